"""Executors that share a folder."""

import pytest

from services.executor.tiers.shelf import take_shelf


def test_a_restart_finds_its_own_shelf(tmp_path):
    first, second = take_shelf(tmp_path, "a"), take_shelf(tmp_path, "b")
    assert first.path != second.path
    (first.path / "x.kv").write_text("of a")
    (second.path / "x.kv").write_text("of b")
    first.close()
    second.close()
    again = take_shelf(tmp_path, "b")
    assert (again.path / "x.kv").read_text() == "of b"
    other = take_shelf(tmp_path, "a")
    assert (other.path / "x.kv").read_text() == "of a"
    again.close()
    other.close()


def test_two_of_a_kind_never_share(tmp_path):
    first, second = take_shelf(tmp_path, "a"), take_shelf(tmp_path, "a")
    assert first.path != second.path
    first.close()
    third = take_shelf(tmp_path, "a")
    assert third.path == first.path
    second.close()
    third.close()


def test_a_shelf_with_another_label_is_emptied(tmp_path):
    first = take_shelf(tmp_path, "a")
    (first.path / "x.kv").write_text("of a")
    first.close()
    second = take_shelf(tmp_path, "b")
    assert second.path == first.path
    assert not (second.path / "x.kv").exists()
    second.close()
    third = take_shelf(tmp_path, "a")
    assert sorted(path.name for path in third.path.iterdir()) == ["label", "lock"]
    third.close()


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    take_shelf(tmp_path, "a").close()
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file"):
        take_shelf(tmp_path / "file", "a")


def test_a_label_that_is_no_text_is_another_label(tmp_path):
    shelf = take_shelf(tmp_path, "a")
    (shelf.path / "label").write_bytes(b"\xff\xfe")
    shelf.close()
    again = take_shelf(tmp_path, "a")
    assert (again.path / "label").read_text() == "a"
    again.close()
