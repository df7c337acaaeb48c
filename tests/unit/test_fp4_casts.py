"""Casts to FP4 and back, as DeepGEMM's tests define them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, cast_back_from_fp4, per_token_cast_to_fp4, transpose_packed_fp4
from deep_gemm.ops import mxfp4

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gran_k", [1, 3, 32, 128, 10**6])
@pytest.mark.parametrize("shape", [(5, 64), (3, 2), (7, 200), (0, 8), (4, 0)])
def test_values_of_the_format_come_back(shape: tuple[int, int], gran_k: int, packed: bool) -> None:
    torch.manual_seed(0)
    signs = torch.randint(0, 2, shape) * 2 - 1
    x = VALUES[torch.randint(0, 8, shape)] * signs
    x[:, ::gran_k] = 6.0  # scales are 1
    codes, scales = per_token_cast_to_fp4(x, True, gran_k, packed)
    assert (codes.dtype, codes.shape) == (torch.int8, (shape[0], shape[1] // 2))
    assert scales.dtype == (torch.int32 if packed else torch.float32)
    assert torch.equal(cast_back_from_fp4(codes, scales, gran_k, packed), x)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=2, max_size=40), st.booleans())
@settings(deadline=None, max_examples=100)
def test_each_value_is_the_nearest_one_and_ties_go_down(values: list[float], use_ue8m0: bool) -> None:
    x = torch.tensor([values[: len(values) // 2 * 2]])
    codes, scales = per_token_cast_to_fp4(x, use_ue8m0, 128)
    scale = float(scales)
    assert scale >= max(1e-4, float(x.abs().max())) / 6 * (1 - 1e-6)
    assert not use_ue8m0 or scale.hex().startswith("0x1.0000000000000p")
    scaled = x * (1.0 / scales)
    distance = (scaled.abs()[..., None].double() - VALUES).abs()
    nearest = VALUES[distance.argmin(-1)]  # the first of two, which is the smaller one
    found = cast_back_from_fp4(codes, scales)
    assert torch.equal(found, torch.where(scaled < 0, -nearest, nearest) * scales)
    assert not found[found == 0].signbit().any()


def test_a_transpose_is_of_values() -> None:
    x = torch.randn(34, 64)
    codes, _ = per_token_cast_to_fp4(x, False, 64)
    turned = transpose_packed_fp4(codes)
    assert turned.shape == (64, 17)
    assert turned.is_contiguous()
    assert torch.equal(transpose_packed_fp4(turned), codes)
    of_rows, of_columns = torch.ones(34, 1), torch.ones(64, 1)
    assert torch.equal(cast_back_from_fp4(codes, of_rows), cast_back_from_fp4(turned, of_columns).t())


def test_scales_of_32_are_those_of_our_products() -> None:
    """DeepGEMM's tests cast weights so."""
    codes, scales = per_token_cast_to_fp4(torch.randn(6, 96), True, 32)
    assert torch.equal(mxfp4.dequantise(codes, scales, torch.float32), cast_back_from_fp4(codes, scales, 32))


X, CODES, SCALES = torch.ones(4, 64), torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (per_token_cast_to_fp4, (X[:, :3], True), "x must be floating-point with an even number of columns"),
        (per_token_cast_to_fp4, (X.int(), True), "x must be floating-point"),
        (per_token_cast_to_fp4, (X[0], True), "x must have 2 dimensions"),
        (per_token_cast_to_fp4, (None, True), "x must be a torch.Tensor"),
        (per_token_cast_to_fp4, (X, 1), "use_ue8m0 must be True or False"),
        (per_token_cast_to_fp4, (X, True, 0), "gran_k must be an integer from 1"),
        (per_token_cast_to_fp4, (X, False, 32, True), "use_ue8m0 must be True with use_packed_ue8m0"),
        (cast_back_from_fp4, (CODES.float(), SCALES, 32), "packed must be torch.int8 or torch.uint8"),
        (cast_back_from_fp4, (CODES, SCALES[:, :1], 32),
            r"sf must be torch.float32 \(4, 2\) .* torch.float32 \(4, 1\)"),
        (cast_back_from_fp4, (CODES, SCALES, 32, True), r"sf must be torch.int32 \(4, 1\)"),
        (transpose_packed_fp4, (CODES[:3],), "a must have an even number of rows"),
        (transpose_packed_fp4, (CODES.int(),), "a must be torch.int8 or torch.uint8"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_sentences(function: Any, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        function(*arguments)


def test_clients_find_them_in_utils() -> None:
    for name in ("per_token_cast_to_fp4", "cast_back_from_fp4", "transpose_packed_fp4"):
        assert getattr(deep_gemm.utils, name) is getattr(deep_gemm.utils.math, name) is getattr(deep_gemm, name)
