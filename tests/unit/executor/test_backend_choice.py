"""Which backend computes: what was asked for, else the cpu backend where it can."""

import logging
from pathlib import Path

import pytest

from services.common.errors import QuireError, Reason
from services.executor.backends.choose import uses_cpu_backend
from services.executor.backends.cpu.support import refusal
from services.executor.gpus import cuda_devices
from services.executor.settings import ExecutorSettings

SETS = ["portable", "avx2"]


def settings(**values: object) -> ExecutorSettings:
    return ExecutorSettings.model_validate(values)


def chosen(refused: str | None = None, cuda: bool = False, **values: object) -> bool:
    return uses_cpu_backend(settings(**values), lambda _: refused, lambda: cuda)


def test_the_cpu_backend_is_the_default() -> None:
    assert chosen()
    assert chosen(backend="cpu", cuda=True)
    assert chosen(instruction_set="avx2", cuda=True)
    assert not chosen(backend="torch", refused="never asked")


@pytest.mark.parametrize(("cuda", "refused"), [(True, None), (False, "block_size: 4"), (True, "block_size: 4")])
def test_torch_computes_where_it_must_and_one_line_says_why(
    cuda: bool, refused: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire.executor"):
        assert not chosen(refused, cuda)
    (record,) = caplog.records
    # A GPU that computes is as it should be.
    assert record.levelname == ("WARNING" if refused else "INFO")
    assert "CUDA" in record.getMessage() if refused is None else record.__dict__["because"] == refused


@pytest.mark.parametrize("wish", [{"backend": "cpu"}, {"instruction_set": "avx512"}])
def test_a_wish_is_met_or_refused(wish: dict[str, str]) -> None:
    with pytest.raises(QuireError, match="cannot serve this: the reason") as raised:
        chosen("the reason", **wish)
    assert raised.value.reason is Reason.MODEL_LOAD_FAILED


def test_torch_has_no_instruction_sets() -> None:
    with pytest.raises(QuireError, match="instruction_set"):
        chosen(backend="torch", instruction_set="avx2")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"dtype": "fp16"}, "dtype: fp16"),
        ({"block_size": 16}, "block_size: 16 .* 32"),
        ({"instruction_set": "avx512_vnni"}, "instruction_set: .* avx512_vnni, only portable, avx2"),
    ],
)
def test_refusals_name_the_setting(values: dict[str, object], named: str) -> None:
    found = refusal(settings(**values), SETS)
    assert found is not None
    with pytest.raises(QuireError, match=named):
        chosen(found, backend="cpu")


@pytest.mark.parametrize("values", [{}, {"dtype": "bf16", "kv_format": "fp32"}, {"instruction_set": "portable"}])
def test_everything_else_is_taken(values: dict[str, object]) -> None:
    assert refusal(settings(**values), SETS) is None


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_cuda_devices_are_found_without_torch(tmp_path: Path, environment: dict[str, str], count: int) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert len(cuda_devices(tmp_path, environment)) == count
    assert cuda_devices(tmp_path / "elsewhere", environment) == []
