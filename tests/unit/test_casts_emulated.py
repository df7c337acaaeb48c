"""Casts, functions of rows, copies and transposes on the CPU, in emulation, as they are compiled for GPUs before
Hopper: they give the bytes of torch."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import step_cases
import torch
from emulation import Emulated
from gpu_fakes import FakeGpu
from rows_cases import CASES, assert_right
from torch import Tensor

from deep_gemm import fused, kernels, quantize
from deep_gemm.arch import SM80
from deep_gemm.nn import casts
from deep_gemm.spec import CopySpec, Spec, TransposeBytesSpec, TransposeSpec


def flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [each for part in x or () for each in flat(part)]


def emulated(
    folder: Path, spec: Spec, operands: dict[str, Tensor], backwards: bool = False, *edits: tuple[str, str, str]
) -> None:
    kernel = kernels.for_helper(spec, SM80)
    params = kernel.params(spec, kernel.config_of(spec, SM80), SM80)
    Emulated(folder, params, *edits)(spec, operands, backwards=backwards)


def launched(
    folder: Path, call: Callable[[], Any], inputs: list[Tensor], backwards: bool, *edits: tuple[str, str, str]
) -> list[Tensor]:
    """The results of a public function whose one launch is emulated."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu(patch)
        out = flat(call())
    (made,) = gpu.launched
    known = {x.data_ptr(): x for x in (*inputs, *out)}
    emulated(folder, made.spec, {name: known[address] for name, address in made.at.items()}, backwards, *edits)
    return out


def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes, with zeros, subnormal ones, infinities and NaN in some blocks."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randn(rows, 1, generator=generator) * 6)
    x[0] = 0.0
    x[1, :5] = torch.tensor([float("inf"), -1.0, -0.0, 1e-40, 1.0])
    x[2, 3] = float("nan")
    return x.to(dtype)


BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LONG = pytest.mark.long
CASTS = [
    pytest.param(lambda x: quantize.rows(x), (37, 272), BF16, id="rows"),
    pytest.param(lambda x: quantize.rows(x, use_ue8m0=True), (5, 257), F16, id="rows, few and odd"),
    pytest.param(lambda x: quantize.rows(x, gated=True), (3, 512), F32, id="rows, gated", marks=LONG),
    pytest.param(lambda x: quantize.columns(x), (150, 144), F16, id="columns", marks=LONG),
    pytest.param(lambda x: quantize.rows_and_columns(x), (130, 256), BF16, id="rows and columns"),
    pytest.param(lambda x: quantize.blocks(x), (130, 136), F32, id="blocks", marks=LONG),
    pytest.param(lambda x: quantize.blocks_and_transpose(x), (130, 144), BF16, id="blocks and transpose", marks=LONG),
    pytest.param(lambda x: quantize.blocks_and_transpose(x), (2, 130, 144), BF16, id="blocks of experts"),
]


@pytest.mark.parametrize(("cast", "size", "dtype"), CASTS)
def test_casts(cast: Callable[[Tensor], Any], size: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    x = matrix(math.prod(size[:-1]), size[-1], dtype).view(size)
    exact = flat(cast(x))
    for backwards in (False, True):
        found = launched(tmp_path / str(backwards), lambda: cast(x), [x], backwards)
        for mine, other in zip(found, exact, strict=True):
            assert torch.equal(mine.float().nan_to_num(nan=1e9), other.float().nan_to_num(nan=1e9))


@pytest.mark.parametrize("size", step_cases.SENT, ids=str)
def test_tokens_of_experts(size: tuple[int, int, int, Any], tmp_path: Path) -> None:
    given = step_cases.sent(*size[:3], "cpu")
    for chosen in (("x", "rows"), ("x", "rows", "factors")):
        named = {name: given[name] for name in chosen}
        call = functools.partial(casts.tokens, blocks=size[3], epsilon=0.0, **named)
        step_cases.check_sent(call(), size[3], **named)
        if size[3] == "column" or len(chosen) == 2:
            found = launched(tmp_path / f"{len(chosen)}", call, list(named.values()), len(chosen) == 2)
            step_cases.check_sent(paired(found), size[3], **named)


@pytest.mark.parametrize("size", step_cases.GATED, ids=str)
def test_gradients_of_gate_and_up(size: tuple[int, int], tmp_path: Path) -> None:
    both, d = step_cases.gate_and_up(*size, "cpu")
    step_cases.check_gradient(step_cases.gradients(both, d), both, d)
    found = launched(tmp_path / "kernel", lambda: step_cases.gradients(both, d), [both, d], size[0] == 37)
    step_cases.check_gradient(paired(found), both, d)


@pytest.mark.parametrize(
    "edit",
    [
        ("is_of_up ? column - half : column)", "column)"),
        ("__fsub_rn(1.0f, sigmoid), 1.0f)", "__fsub_rn(1.0f, sigmoid), 0.0f)"),
        ("column + i >= half", "column >= half"),
    ],
)
def test_a_wrong_gradient_is_seen(edit: tuple[str, str], tmp_path: Path) -> None:
    both, d = step_cases.gate_and_up(200, 101 if "+ i" in edit[0] else 136, "cpu")

    def checked() -> None:
        edits = (("silu_gradient.cuh", *edit),)
        found = launched(tmp_path / "kernel", lambda: step_cases.gradients(both, d), [both, d], False, *edits)
        step_cases.check_gradient(paired(found), both, d)

    with pytest.raises((AssertionError, RuntimeError)):
        checked()


def paired(x: list[Tensor]) -> Any:
    return (x[0], x[1]), (x[2], x[3])


FUNCTIONS = [
    pytest.param(lambda x: fused.rms_norm(x, x[3]), id="rms_norm"),
    pytest.param(lambda x: fused.layer_norm(x, x[3], x[3], out=torch.float8_e4m3fn), id="layer_norm", marks=LONG),
    pytest.param(lambda x: fused.silu_and_mul(x, out=torch.float8_e4m3fn), id="silu_and_mul"),
    pytest.param(lambda x: fused.add_gelu(x, x), id="add_gelu", marks=LONG),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_rows(function: Callable[[Tensor], Any], tmp_path: Path) -> None:
    """Sums have another order in torch, so bits may differ, but by no more than the last one."""
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(0)).to(BF16)
    exact = flat(function(x))
    found = launched(tmp_path / "kernel", lambda: function(x), [x, x[3]], False)
    for mine, other in zip(found, exact, strict=True):
        unit = 2**-7 if mine.element_size() > 1 else 2**-3
        torch.testing.assert_close(mine.float(), other.float(), rtol=unit, atol=1e-3)


BIASED = [("silu and mul with biases of groups", 136, E4M3), ("swigluoai and mul with biases of groups", 101, BF16)]


@pytest.mark.parametrize(("name", "columns", "output"), BIASED)
def test_biases_of_groups(name: str, columns: int, output: torch.dtype, tmp_path: Path) -> None:
    """Rows that are read by sixteen bytes, and others; halves, and neighbours; fewer rows than groups, and more."""
    for rows in (3, 37):
        inputs = CASES[name].make(rows, columns, BF16)
        call = functools.partial(CASES[name], inputs, output)
        found = launched(tmp_path / f"{rows}", call, list(inputs.values()), backwards=rows == 3)
        assert_right(CASES[name], tuple(found) if output == E4M3 else found[0], inputs)


def test_copies_and_transposes(tmp_path: Path) -> None:
    x = torch.randint(0, 1 << 15, (70, 99), dtype=torch.int16)
    for name, source in (("rows", x), ("columns", x.t().contiguous().t())):
        target = torch.full((70, 104), -1, dtype=torch.int16)
        emulated(tmp_path / name, CopySpec(70, 99), {"source": source, "target": target})
        assert torch.equal(target[:, :99], x)
        assert not target[:, 99:].any()
    x = torch.randint(0, 256, (144, 131), dtype=torch.uint8)
    target = torch.empty(131, 144, dtype=torch.uint8)
    emulated(tmp_path / "bytes", TransposeBytesSpec(131, 144), {"source": x.t(), "target": target})
    assert torch.equal(target, x.t())
    x = torch.randn(2, 70, 5)
    target = torch.full((2, 5, 72), float("nan"))
    emulated(tmp_path / "scales", TransposeSpec(70, 5, 2), {"source": x, "target": target})
    assert torch.equal(target[..., :70], x.mT)
    assert not target[..., 70:].any()
