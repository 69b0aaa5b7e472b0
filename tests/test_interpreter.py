"""The repaired Triton interpreter computes what a device computes, and an unrepaired one is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deeptwin.kernels.triton_ops as triton_ops

CHILD = Path(__file__).with_name("interpreter_child.py")
ITEMS = "abcdefgh"


def run_python(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    source = Path(triton_ops.__file__).parents[2]
    package_root = next(p for p in (source / "src", source.parent) if (p / "deeptwin").is_dir())
    environment["PYTHONPATH"] = str(package_root)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    pytest.importorskip("triton")
    done = run_python(str(CHILD), interpret=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# properties of the repaired interpreter


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2", "f16"])
def test_casts_from_fp32_have_the_bits_of_torch(measured: dict[str, Any], dtype: str) -> None:
    wrong, compared = measured["casts_from_f32"][dtype]
    assert (wrong, compared) == (0, 6 * 65536)


@pytest.mark.parametrize(("dtype", "codes"), [("bf16", 65536), ("e4m3", 256), ("e5m2", 256)])
def test_every_code_widens_exactly(measured: dict[str, Any], dtype: str, codes: int) -> None:
    assert measured["casts_to_f32"][dtype] == [0, codes]


def test_every_bf16_survives_the_way_to_fp32_and_back(measured: dict[str, Any]) -> None:
    assert measured["bf16_round_trip"] == 0


def test_round_to_zero_truncates(measured: dict[str, Any]) -> None:
    assert measured["round_to_zero"] == 0


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2"])
def test_narrow_arithmetic_and_comparisons_have_the_bits_of_torch(measured: dict[str, Any], dtype: str) -> None:
    assert measured["arithmetic"][dtype] == [0, 0]


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2", "f16", "f32"])
def test_dot_is_the_exact_product_rounded_once(measured: dict[str, Any], dtype: str) -> None:
    assert measured["dots"][dtype] == 0


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_equal_rows_of_a_tile_give_equal_bits(measured: dict[str, Any], dtype: str) -> None:
    assert measured["equal_rows"][dtype] == 0


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_fma_rounds_once(measured: dict[str, Any], dtype: str) -> None:
    assert measured["fused_multiply_add"][dtype] == 0


def test_integers_and_bf16_convert_as_in_torch(measured: dict[str, Any]) -> None:
    counts = measured["integer_casts"]
    assert len(counts) == 6
    assert set(counts.values()) == {0}


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2"])
def test_narrow_constants_keep_their_value(measured: dict[str, Any], dtype: str) -> None:
    # x / 2 + 3 with x = 1, -4 and the masked -2, -2
    assert measured["constants"][dtype] == [3.5, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2"])
def test_sums_are_taken_in_fp32_or_refused(measured: dict[str, Any], dtype: str) -> None:
    results = measured["reductions"]
    assert results[f"sum of fp32, {dtype}"] == "8.0"
    assert "expected float32" in results[f"sum, {dtype}"]
    assert "expected float32" in results[f"scan, {dtype}"]


# rejected interpreters


def test_the_repaired_interpreter_is_accepted_once_and_twice(measured: dict[str, Any]) -> None:
    assert measured["refusals"]["repaired"] == "nothing raised"
    assert measured["refusals"]["twice"] == "nothing raised"


@pytest.mark.parametrize("item", ITEMS)
def test_an_interpreter_without_one_repair_is_refused(measured: dict[str, Any], item: str) -> None:
    assert f"({item})" in measured["refusals"][item]


def test_the_stock_interpreter_is_refused_in_every_item(measured: dict[str, Any]) -> None:
    message = measured["refusals"]["stock"]
    assert all(f"({item})" in message for item in ITEMS)
    assert message.startswith("triton 3.")


def test_an_interpreter_with_other_names_is_refused(measured: dict[str, Any]) -> None:
    message = measured["unknown_interpreter"]
    assert "no InterpreterBuilder.no_such_name" in message
    assert "3.6 to 3.9" in message


def test_a_variable_set_too_late_is_refused() -> None:
    pytest.importorskip("triton")
    late = "import os, triton; os.environ['TRITON_INTERPRET'] = '1'; import deeptwin.kernels.triton_ops"
    done = run_python("-c", late, interpret=False)
    assert done.returncode != 0
    assert "must be set to 1 before triton is imported" in done.stderr


def test_a_cpu_tensor_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="x_tm: expected a tensor on a device"):
        triton_ops.require_runnable("x_tm", torch.zeros(1))


def test_a_cpu_tensor_runs_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "INTERPRETED", True)
    assert triton_ops.require_runnable("x_tm", torch.zeros(1)) is None
