"""What is computed once from a model's files, and when it is computed again."""

import os
from pathlib import Path

import pytest

from services.executor.models.derived import derived


class Counted:
    """Makes something new each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return f"made {self.count}".encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"1234")
    return path


def test_made_once_while_nothing_changes(file: Path, tmp_path: Path) -> None:
    make = Counted()
    assert [derived("a", [file], make, tmp_path / "kept") for _ in range(2)] == [b"made 1"] * 2
    assert derived("b", [file], make, tmp_path / "kept") == b"made 2"  # another kind


@pytest.mark.parametrize("change", ["size", "time", "name"])
def test_made_anew_for_other_files(file: Path, tmp_path: Path, change: str) -> None:
    make = Counted()
    derived("a", [file], make, tmp_path / "kept")
    if change == "size":
        before = file.stat()
        file.write_bytes(b"12345")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(1, 1))
    else:
        file = file.rename(tmp_path / "other")
    assert derived("a", [file], make, tmp_path / "kept") == b"made 2"


def test_a_newer_result_replaces_the_older(file: Path, tmp_path: Path) -> None:
    for stamp in range(3):
        os.utime(file, ns=(stamp, stamp))
        derived("a", [file], Counted(), tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_damaged_results_are_made_anew(file: Path, tmp_path: Path, damage: bytes | None) -> None:
    make = Counted()
    derived("a", [file], make, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1] if damage is None else damage)
    assert derived("a", [file], make, tmp_path / "kept") == b"made 2"


def test_a_folder_that_cannot_be_written_costs_only_time(file: Path, tmp_path: Path) -> None:
    make = Counted()
    (tmp_path / "kept").write_bytes(b"a file where a folder should be")
    assert [derived("a", [file], make, tmp_path / "kept") for _ in range(2)] == [b"made 1", b"made 2"]


def test_errors_are_not_kept(file: Path, tmp_path: Path) -> None:
    def fail() -> bytes:
        raise ValueError("staged")

    with pytest.raises(ValueError, match="staged"):
        derived("a", [file], fail, tmp_path / "kept")
    assert derived("a", [file], Counted(), tmp_path / "kept") == b"made 1"
