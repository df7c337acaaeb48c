"""fp8_gemm_nt_skip_head_mid on the CPU: results, refusals, and the launches that a GPU would make."""

from typing import Any

import pytest
import torch
from chosen import argument_names, case
from gpu_fakes import FakeGpu
from head_cases import ODD, WHOLE, Splits, check, operands, output

import deep_gemm
from deep_gemm import kernels, ops
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.kernels.families import FP8_HEADS
from deep_gemm.ops.table import SKIP_HEAD_MID
from deep_gemm.settings import settings

M, H, K = 20, 3, 272
SPLITS = WHOLE[0]


def call(d: torch.Tensor, x: dict[str, torch.Tensor], splits: Any, **more: Any) -> None:
    deep_gemm.fp8_gemm_nt_skip_head_mid((x["a"], x["sfa"]), (x["b"], x["sfb"]), d, splits, **more)


@pytest.mark.parametrize("splits", WHOLE + ODD)
def test_columns_in_the_middle_stay(splits: Splits) -> None:
    for m in (0, 1, M):
        x, (d, before) = operands(m, H, splits, K), output(m, H, splits)
        call(d.tensor, x, splits)
        check(d, x, splits, before)


def test_without_k_kept_columns_are_zero() -> None:
    x, (d, before) = operands(M, H, SPLITS, 0), output(M, H, SPLITS)
    call(d.tensor, x, SPLITS, recipe=(1, 128, 128), disable_ue8m0_cast=True)
    check(d, x, SPLITS, before)


@pytest.mark.parametrize(
    ("splits", "columns", "more", "error", "message"),
    [
        ((128, 64), 960, {}, InvalidInputError, r"head_splits must be \(left, mid, right\).* but it is \(128, 64\)"),
        ((0, 64, 0), 960, {}, InvalidInputError, "with left . right above 0"),
        ((128, -1, 128), 960, {}, InvalidInputError, "integers from 0 on"),
        ((128, 64.0, 128), 960, {}, InvalidInputError, "integers from 0 on"),
        ((128, 64, 100), 960, {}, InvalidInputError,
            r"a multiple of the 128 . 100 columns of a head .* b is \(768, 272\)"),
        ((128, 64, 128), 768, {}, InvalidInputError, r"\(20, 960\), rows of a by 3 heads of 128 . 64 . 128 columns"),
        ((128, 64, 128), 960, {"recipe": (1, 1, 128)}, UnsupportedError, "not supported by products that skip columns"),
        ((128, 64, 128), 960, {"compiled_dims": "x"}, InvalidInputError, "compiled_dims must be"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    splits: Any, columns: int, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    x, d = operands(M, H, SPLITS, K), torch.empty(M, columns, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        call(d, x, splits, **more)


def test_d_is_bfloat16() -> None:
    with pytest.raises(InvalidInputError, match=r"d must be torch\.bfloat16, but"):
        call(torch.empty(M, 960), operands(M, H, SPLITS, K), SPLITS)


def test_it_is_one_launch(gpu: FakeGpu) -> None:
    x, (d, _) = operands(M, H, SPLITS, K), output(M, H, SPLITS)
    x["sfa"] = x["sfa"].t().contiguous().t()
    for _ in range(3):
        call(d.tensor, x, SPLITS)
    assert len(gpu.launched) == 3
    launched = gpu.launched[-1]
    assert launched.spec == ops.spec(M, H * 256, K, 132, SKIP_HEAD_MID, groups=H)
    assert launched.numbers["heads"] == SPLITS
    assert launched.strides["d"] == (H * 320 + 8, 1)


@pytest.mark.parametrize("splits", WHOLE + ODD)
def test_tma_stores_whole_boxes_of_heads(gpu: FakeGpu, splits: Splits) -> None:
    x, (d, _) = operands(M, 8, splits, K), output(M, 8, splits)
    call(d.tensor, x, splits)
    assert gpu.launched[-1].spec.d.aligned == (splits in WHOLE)


def test_no_other_library_is_a_fallback(gpu: FakeGpu) -> None:
    x, (d, before) = operands(M, H, SPLITS, K), output(M, H, SPLITS)
    gpu.unsupported = "no kernel here."
    with settings.override(fallback=("cublaslt",)), pytest.raises(UnsupportedError, match="no kernel here"):
        call(d.tensor, x, SPLITS)
    with settings.override(fallback=("torch",)):
        call(d.tensor, x, SPLITS)
    check(d, x, SPLITS, before)


def test_the_map_of_d_has_all_of_its_columns() -> None:
    spec = ops.spec(200, 5 * 256, 208, 132, SKIP_HEAD_MID, groups=5)
    strides = {"a": (208, 1), "b": (208, 1), "d": (1608, 1), "sfa": (1, 204), "sfb": (2, 1)}
    params = case(FP8_HEADS, 128, 128, (1, 1), 2, 2)
    plan = kernels.get(params.kernel).launch_plan(params, spec, strides, numbers={"heads": SPLITS})
    found = dict(zip(argument_names(params), plan.parameters, strict=True))
    assert (found["map_d"].spec.dims, found["map_d"].spec.box) == ((5 * 320, 200), (64, 64))
    assert (found["heads"][1][0], *found["heads"][1][3:]) == (256, 64, 128)
