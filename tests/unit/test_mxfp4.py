"""MXFP4: its forms, casts, and what FP8 holds of it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, quantize

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
"""OCP Microscaling Formats 1.0, table 5."""


def every_code() -> tuple[torch.Tensor, torch.Tensor]:
    """All codes with all exponents: row e has the exponent e, and each code twice, once in the high bits."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (15 - codes) << 4).repeat(256, 1)
    return packed, torch.arange(256, dtype=torch.uint8).unsqueeze(1)


def meant() -> np.ndarray:
    codes = np.stack([np.arange(16), 15 - np.arange(16)], -1).reshape(-1)
    exact: np.ndarray = VALUES[codes] * 2.0 ** (np.arange(256) - 127.0)[:, None]
    exact[255] = np.nan
    return exact


def drawn(*shape: int, low: int, high: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes of (..., N, K), and exponents from low to below high."""
    gen = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=gen)
    return packed, torch.randint(low, high, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=gen)


def test_every_code_and_exponent_is_exact() -> None:
    got = deep_gemm.dequantise(*every_code(), dtype=torch.float64).numpy()
    assert got.view(np.uint64)[:255].tobytes() == meant().view(np.uint64)[:255].tobytes()  # with the sign of zeros
    assert np.isnan(got[255]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_types_are_exact_below_their_end(dtype: torch.dtype) -> None:
    got = deep_gemm.dequantise(*every_code(), dtype=dtype).double().numpy()
    exact = np.where(np.abs(meant()) < 2.0**128, meant(), np.copysign(np.inf, meant()))
    np.testing.assert_array_equal(got, np.where(np.isnan(meant()), np.nan, exact))


FORMS: dict[str, Any] = {
    "e8m0": lambda x, e: (x, e.view(torch.float8_e8m0fnu)),
    "int8": lambda x, e: (x.view(torch.int8), e),
    "float32": lambda x, e: (x, torch.exp2(e.double() - 127).float()),
    "int32": lambda x, e: (x, torch.nn.functional.pad(e, (0, -e.shape[-1] % 4)).contiguous().view(torch.int32)),
    "int32, MN-major": lambda x, e: (x, FORMS["int32"](x, e)[1].mT.contiguous().mT),
    "gpt-oss": lambda x, e: (x.unflatten(-1, (-1, 16)), e),
    "a view": lambda x, e: (torch.stack([x, x], -1)[..., 0], torch.stack([e, e], 1)[:, 0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_operands(form: str) -> None:
    packed, exponents = drawn(3, 5, 160, low=0, high=255)
    exact = deep_gemm.dequantise(packed, exponents, dtype=torch.float64)
    x, sf = FORMS[form](packed, exponents)
    assert torch.equal(deep_gemm.dequantise(x, sf, dtype=torch.float64), exact)


def test_nan_as_a_float32_scale() -> None:
    packed, exponents = drawn(2, 64, low=100, high=101)
    scales = FORMS["float32"](packed, exponents)[1]
    scales[0, 1] = torch.nan
    got = deep_gemm.dequantise(packed, scales)
    assert got[0, 32:].isnan().all()
    assert not got[1].isnan().any()


def nearest_even(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """By distance: of two codes as near the even one, and 6 for all above."""
    distance = np.abs(np.abs(x)[..., None] / scale[..., None] - MAGNITUDES)
    nearest = distance == distance.min(-1, keepdims=True)
    even = nearest & (np.arange(8) % 2 == 0)
    best = np.where(even.any(-1), even.argmax(-1), nearest.argmax(-1))
    result: np.ndarray = np.copysign(MAGNITUDES[best] * scale, x)
    return result


@settings(deadline=None)
@given(seed=st.integers(0, 999), log_size=st.integers(-140, 120), ties=st.booleans())
def test_cast_rounds_to_nearest_even(seed: int, log_size: int, ties: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 64, generator=gen)
    x = ((x * 8).round() / 4 if ties else x).double().ldexp(torch.tensor(log_size)).float()
    packed, scales = quantize.mxfp4(x)
    largest = x.double().unflatten(-1, (-1, 32)).abs().amax(-1).numpy()
    with np.errstate(divide="ignore"):
        scale = 2.0 ** np.clip(np.floor(np.log2(largest)) - 2, -127, None)
    assert (scales.double().numpy() == scale).all()
    got = deep_gemm.dequantise(packed, scales, dtype=torch.float64).numpy()
    np.testing.assert_array_equal(got, nearest_even(x.double().numpy(), np.repeat(scale, 32, -1)))


def test_cast_returns_what_was_cast() -> None:
    """Every code is the nearest of itself, where a block has the largest one."""
    packed, exponents = every_code()
    again, scales = quantize.mxfp4(deep_gemm.dequantise(packed, exponents)[:252])
    assert torch.equal(again, packed[:252])
    assert torch.equal(scales.view(torch.uint8), exponents[:252])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_makes_its_scale_nan(bad: float) -> None:
    x = torch.ones(2, 64)
    x[1, 40] = bad
    packed, scales = quantize.mxfp4(x)
    got = deep_gemm.dequantise(packed, scales)
    assert got[1, 32:].isnan().all()
    assert torch.equal(got[0], x[0])
    assert torch.equal(got[1, :32], x[1, :32])


@pytest.mark.parametrize("base", [0, 100, 240])
@pytest.mark.parametrize("shape", [(2, 130, 160), (128, 128), (1, 2, 3, 32)])
def test_fp8_is_exact_over_14_binades(shape: tuple[int, ...], base: int) -> None:
    packed, exponents = drawn(*shape, low=base, high=base + 15)
    values, scales = quantize.mxfp4_to_fp8(packed, exponents)
    assert values.shape == shape
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    exact = deep_gemm.dequantise(packed, exponents, dtype=torch.float64)
    flat = [x.view(-1, *x.shape[-2:]) for x in (values, scales, exact)]
    for got, sf, wanted in zip(*flat, strict=True):
        assert torch.equal(deep_gemm.dequantise(got, sf, (128, 128), torch.float64), wanted)
    assert quantize.mxfp4_rounded(packed, exponents).sum() == 0


def test_fp8_refuses_to_round_unless_asked() -> None:
    packed = torch.full((2, 128, 64), 0x33, dtype=torch.uint8)  # 1.5
    exponents = torch.full((2, 128, 4), 127, dtype=torch.uint8)
    packed[1, :, :16] = 0x77  # 6
    exponents[1, :, 0] = 127 + 14
    assert quantize.mxfp4_rounded(packed, exponents).tolist() == [[[0]], [[0]]]
    exponents[1, 5, 1] -= 1  # 1.5 * 2^-15 of 2^(127 + 14)'s block
    assert quantize.mxfp4_rounded(packed, exponents).tolist() == [[[0]], [[32]]]
    with pytest.raises(InvalidInputError, match=r"32 of 32768 values that E4M3 .* would round"):
        quantize.mxfp4_to_fp8(packed, exponents)
    values, scales = quantize.mxfp4_to_fp8(packed, exponents, rounding=True)
    exact = deep_gemm.dequantise(packed[1], exponents[1], dtype=torch.float64)
    got = deep_gemm.dequantise(values[1], scales[1], (128, 128), torch.float64)
    wrong = got != exact
    assert wrong.nonzero().tolist() == [[5, 32 + i] for i in range(32)]
    assert torch.equal(
        got[wrong], torch.full((32,), 1.0, dtype=torch.float64)
    )  # 0.75 is between 0.5 and 1, and 1 is even


def test_fp8_of_zeros_and_nan() -> None:
    packed, exponents = drawn(128, 256, low=120, high=124)
    packed[:, 64:] = 0x80
    exponents[3, 0] = 255
    values, scales = quantize.mxfp4_to_fp8(packed, exponents)
    got = deep_gemm.dequantise(values, scales, (128, 128), torch.float64)
    np.testing.assert_array_equal(got.numpy(), deep_gemm.dequantise(packed, exponents, dtype=torch.float64).numpy())
    assert scales[0, 1] == 1.0


PACKED, SCALES = torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(16, 8, dtype=torch.uint8)
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "values of E4M3": ((PACKED.view(torch.float8_e4m3fn), SCALES), "packed must be uint8 or int8"),
    "half of a block": ((PACKED[:, :24], SCALES), "packed must be .* K a multiple of 32"),
    "scales of 16": ((PACKED, SCALES.repeat(1, 2)), r"scales must have the shape \(16, 8\) .* one for 32 of K"),
    "packed scales of 32": ((PACKED, SCALES.int()), r"scales must have the shape \(16, 2\) .* one for 128 of K"),
    "scales that are no powers of two": ((PACKED, torch.full((16, 8), 0.75)), "scales must be powers of two"),
    "negative scales": ((PACKED, torch.full((16, 8), -0.5)), "scales must be powers of two"),
    "infinite scales": ((PACKED, torch.full((16, 8), torch.inf)), "scales must be powers of two"),
    "scales of zero": ((PACKED, torch.zeros(16, 8)), "scales must be powers of two"),
    "scales of BF16": ((PACKED, torch.ones(16, 8).bfloat16()), "scales must be exponents .* but it is torch.bfloat16"),
    "scales elsewhere": ((PACKED, SCALES.to("meta")), "scales must be on the device of packed"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_operands(what: str) -> None:
    arguments, sentence = WRONG[what]
    with pytest.raises(InvalidInputError, match=sentence):
        quantize.mxfp4_to_fp8(*arguments)


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidInputError, match=r"granularity must be \(1, 32\) or None"):
        deep_gemm.dequantise(PACKED, SCALES, (1, 128))
    with pytest.raises(InvalidInputError, match="rounding must be True or False"):
        quantize.mxfp4_to_fp8(PACKED, SCALES, rounding=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="K a multiple of 32"):
        quantize.mxfp4(torch.ones(4, 48))
    with pytest.raises(InvalidInputError, match="x must be a tensor of bfloat16"):
        quantize.mxfp4(SCALES)
