"""Products of MXFP4 weights: what kernels read of them, results of the reference, and refusals."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, quantize
from deep_gemm.arch import SM90
from deep_gemm.kernels.sm90_fp4_gemm import FP4
from deep_gemm.ops import fp4_weights
from deep_gemm.spec import Fp4Spec

KINDS = ("fp8", "bf16")
BF16 = torch.bfloat16

decodes = pytest.mark.parametrize("activations", KINDS)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Also the signs of zeros; NaN equals NaN."""
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) and torch.equal(
        x.signbit(), y.signbit() | x.isnan() & x.signbit()
    )


def drawn(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes of (..., N, K), and exponents from low to below high."""
    gen = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=gen)
    return packed, torch.randint(low, high, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=gen)


def every_code(span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row e has all codes, each in both halves of a byte, with the exponents from e to e + span."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (15 - codes) << 4).repeat(255, span + 1)
    exponents = torch.arange(255).unsqueeze(1) + torch.arange(span + 1)
    return packed, exponents.clamp(max=254).to(torch.uint8)


@decodes
@pytest.mark.parametrize("absolute", [None, True])
def test_all_codes_with_all_exponents_are_exact(activations: str, absolute: bool | None) -> None:
    packed, exponents = every_code(15)
    found = fp4_weights.transform(packed, exponents, activations, absolute)
    assert fp4_weights.is_absolute(found.packed) is bool(absolute)
    exact = deep_gemm.dequantise(packed, exponents, dtype=torch.float64)
    assert same_bits(fp4_weights.restored(*found, *exact.shape), exact)


@decodes
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 130),
    st.integers(1, 10),
    st.integers(0, 255),
    st.integers(1, 256),
    st.integers(0, 99),
)
def test_no_weight_is_rounded(activations: str, n: int, blocks: int, low: int, width: int, seed: int) -> None:
    """Whatever the sizes and exponents, NaN among them."""
    packed, exponents = drawn(n, 32 * blocks, low=low, high=min(256, low + width), seed=seed)
    exact = deep_gemm.dequantise(packed, exponents, dtype=torch.float64)
    found = deep_gemm.transform_fp4_weights(packed, exponents, activations)
    assert same_bits(fp4_weights.restored(*found, n, 32 * blocks), exact)
    spread = exponents.int().amax() - exponents.int().amin()
    assert not (fp4_weights.is_absolute(found.packed) and spread <= 15 and exponents.max() < 255)


@decodes
def test_blocks_of_zeros_do_not_widen_a_row(activations: str) -> None:
    packed, exponents = drawn(64, 128, low=100, high=116)
    packed[:, :16] &= 0x88  # zeros of both signs
    exponents[:, 0] = 3
    found = deep_gemm.transform_fp4_weights(packed, exponents, activations)
    assert not fp4_weights.is_absolute(found.packed)
    exact = deep_gemm.dequantise(packed, exponents, dtype=torch.float64)
    assert same_bits(fp4_weights.restored(*found, 64, 128), exact)


def test_one_group_that_needs_wide_exponents_widens_all() -> None:
    packed, exponents = drawn(3, 64, 128, low=100, high=116)
    exponents[1, 5, 2] = 90
    packed[1, 5, 32:48] |= 0x11
    found = deep_gemm.transform_fp4_weights(packed, exponents)
    assert found.packed.shape == (3, 1, 1, 4352)
    exact = deep_gemm.dequantise(packed, exponents, dtype=torch.float64)
    assert all(same_bits(fp4_weights.restored(found.packed[g], found.factors[g], 64, 128), exact[g]) for g in range(3))


def test_gpt_oss_blocks_are_the_same_weights() -> None:
    packed, exponents = drawn(2, 96, 288, low=110, high=120)
    for one, other in zip(
        deep_gemm.transform_fp4_weights(packed, exponents),
        deep_gemm.transform_fp4_weights(packed.view(2, 96, 9, 16), exponents.view(torch.float8_e8m0fnu)),
        strict=True,
    ):
        assert torch.equal(one, other)


def operand(activations: str, *shape: int, seed: int = 1) -> tuple[Any, torch.Tensor]:
    """a, and its values in float64."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if activations == "bf16":
        return x.to(BF16), x.to(BF16).double()
    values, scales = (part.unflatten(0, shape[:-1]) for part in quantize.rows(x.flatten(0, -2)))
    exact = deep_gemm.dequantise(values.flatten(0, -2), scales.flatten(0, -2), (1, 128), torch.float64)
    return (values, scales), exact.view(shape)


def function(activations: str, grouping: str = "") -> Callable[..., None]:
    name = f"{'m_grouped_' if grouping else ''}{activations}_fp4_gemm_nt{grouping}"
    found: Callable[..., None] = getattr(deep_gemm, name)
    return found


def dequantised(weights: tuple[torch.Tensor, torch.Tensor], group: int) -> torch.Tensor:
    return deep_gemm.dequantise(weights[0][group], weights[1][group], dtype=torch.float64)


def forms(weights: tuple[torch.Tensor, torch.Tensor], activations: str) -> list[Any]:
    """As a checkpoint has them, and transformed."""
    return [weights, deep_gemm.transform_fp4_weights(*weights, activations)]


@decodes
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 72, 160), (70, 8, 2880)])
def test_dense_products(activations: str, m: int, n: int, k: int) -> None:
    a, exact = operand(activations, m, k)
    weights = drawn(n, k, low=118, high=128)
    wanted = (exact @ deep_gemm.dequantise(*weights, dtype=torch.float64).T).to(BF16)
    for b in forms(weights, activations):
        d = torch.full((m, n), float("nan"), dtype=BF16)
        function(activations)(a, b, d)
        assert torch.equal(d, wanted)


@decodes
def test_masked_groups_leave_other_rows(activations: str) -> None:
    a, exact = operand(activations, 3, 40, 160)
    weights, rows = drawn(3, 72, 160, low=118, high=128), torch.tensor([40, 0, 7], dtype=torch.int32)
    for b in forms(weights, activations):
        d = torch.full((3, 40, 72), -1.0, dtype=BF16)
        function(activations, "_masked")(a, b, d, rows, 20)
        for group, count in enumerate(rows.tolist()):
            wanted = exact[group] @ dequantised(weights, group).T
            assert torch.equal(d[group, :count], wanted[:count].to(BF16))
            assert (d[group, count:] == -1).all()


@decodes
@pytest.mark.parametrize("psum", [False, True])
def test_contiguous_groups(activations: str, psum: bool) -> None:
    a, exact = operand(activations, 384, 160)
    weights = drawn(3, 72, 160, low=118, high=128)
    labels = torch.tensor([0] * 128 + [2] * 100 + [-1] * 156, dtype=torch.int32)
    layout = torch.tensor([128, 128, 228], dtype=torch.int32) if psum else labels
    for b in forms(weights, activations):
        d = torch.full((384, 72), -1.0, dtype=BF16)
        function(activations, "_contiguous")(a, b, d, layout, use_psum_layout=psum)
        for group, rows in ((0, slice(0, 128)), (2, slice(128, 228))):
            wanted = exact[rows] @ dequantised(weights, group).T
            assert torch.equal(d[rows], wanted.to(BF16))
        assert (d[256:] == (-1 if psum else 0)).all()


def test_fp8_weights_are_those_of_the_fp8_products() -> None:
    a, _ = operand("fp8", 16, 256)
    b, (one, other) = quantize.blocks(torch.randn(64, 256)), torch.empty(2, 16, 64, dtype=BF16)
    deep_gemm.fp8_fp4_gemm_nt(a, b, one)
    deep_gemm.fp8_gemm_nt(a, b, other)
    assert torch.equal(one, other)


@decodes
@pytest.mark.parametrize("grouping", ["", "_masked", "_contiguous"])
def test_operators_have_what_functions_have(activations: str, grouping: str) -> None:
    shape = {"": (9,), "_masked": (2, 9), "_contiguous": (256,)}[grouping]
    a, _ = operand(activations, *shape, 160)
    weights = drawn(*((2,) if grouping else ()), 72, 160, low=118, high=128)
    b = deep_gemm.transform_fp4_weights(*weights, activations)
    counts = torch.tensor([9, 4], dtype=torch.int32), 9
    labels = (torch.tensor([0] * 128 + [1] * 100 + [-1] * 28, dtype=torch.int32),)
    more: Any = {"": (), "_masked": counts, "_contiguous": labels}[grouping]
    one, other = torch.zeros(2, *shape, 72, dtype=BF16)
    function(activations, grouping)(a, b, one, *more)
    deep_gemm.register_operators()
    flat = a if activations == "fp8" else (a,)
    name = f"{'m_grouped_' if grouping else ''}{activations}_fp4_gemm{grouping}"
    operator = getattr(torch.ops.deep_gemm_jit, name)
    operator(*flat, *b, other, *more)
    assert torch.equal(one, other)
    made = getattr(torch.ops.deep_gemm_jit, f"{name}_functional")(*flat, *b, torch.zeros_like(one), *more)
    assert torch.equal(one, made)
    checked = ("test_faketensor",) if activations == "fp8" else ("test_faketensor", "test_schema")  # adds up FP8
    torch.library.opcheck(operator, (*flat, *b, other, *more), test_utils=checked)


M, N, K = 4, 72, 160


def right(activations: str = "fp8", **changes: Any) -> Callable[[], object]:
    given = {
        "a": operand(activations, M, K)[0],
        "b": deep_gemm.transform_fp4_weights(*drawn(N, K, low=118, high=128), activations),
        "d": torch.empty(M, N, dtype=BF16),
    }
    return lambda: function(activations)(**{**given, **changes})


def masked(**changes: Any) -> Callable[[], object]:
    given = {
        "a": operand("fp8", 2, M, K)[0],
        "b": deep_gemm.transform_fp4_weights(*drawn(2, N, K, low=118, high=128)),
        "d": torch.empty(2, M, N, dtype=BF16),
        "masked_m": torch.tensor([1, 2], dtype=torch.int32),
        "expected_m": 2,
    }
    return lambda: deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(**{**given, **changes})


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "order of the other activations": (right(b=deep_gemm.transform_fp4_weights(*drawn(N, K), "bf16")),
        InvalidInputError,
        r"b must be torch.uint8, as transform_fp4_weights\(..., activations='fp8'\) returns it, but it is torch.int16"),
    "another K": (right(b=deep_gemm.transform_fp4_weights(*drawn(N, 512))), InvalidInputError,
        r"b must be the weights \(N, K\) = \(72, 160\) of transform_fp4_weights"),
    "K that is no multiple of 32": (right("bf16", a=torch.ones(M, 48, dtype=BF16)), InvalidInputError,
        "K must be a positive multiple of 32"),
    "float32 d": (right(d=torch.empty(M, N)), InvalidInputError, "d must be torch.bfloat16, but it is torch.float32"),
    "a c": (right(c=torch.empty(M, N, dtype=BF16)), UnsupportedError, "c must be left out with MXFP4 weights"),
    "an epilogue": (right(epilogue=deep_gemm.Epilogue(activation="gelu")), UnsupportedError,
        "epilogue must be left out"),
    "FP8's recipe": (right(recipe=(1, 128, 128)), UnsupportedError,
        r"recipe_b=\(1, 32\), but recipe is \(1, 128, 128\)"),
    "a recipe that is an array": (right(recipe_a=numpy.array([1, 128]), recipe_b=(numpy.array([1, 2]), 32)),
        UnsupportedError, "but recipe is None, recipe_a"),
    "activations that are a set": (lambda: deep_gemm.transform_fp4_weights(*drawn(N, K), set()),  # type: ignore[arg-type]
        InvalidInputError, "activations must be 'fp8' or 'bf16', but it is set"),
    "another M of d": (right(d=torch.empty(M + 1, N, dtype=BF16)), InvalidInputError, "a and d must agree in M"),
    "scattered rows of d": (right(d=torch.empty(N, M, dtype=BF16).t()), InvalidInputError,
        "d must be row-major, with rows of its own"),
    "int64 counts": (masked(masked_m=torch.tensor([1, 2])), InvalidInputError, "masked_m must be torch.int32"),
    "three counts": (masked(masked_m=torch.ones(3, dtype=torch.int32)), InvalidInputError,
        r"masked_m must have the shape \(2,\), one number for each group of b"),
    "no estimate": (masked(expected_m=0), InvalidInputError, "expected_m must be a positive integer"),
    "another number of groups": (masked(b=deep_gemm.transform_fp4_weights(*drawn(3, N, K))), InvalidInputError,
        "a and b must agree in the number of groups"),
    "one matrix for groups": (masked(b=drawn(N, K)), InvalidInputError, r"b must be \(G, N, K / 2\) of MXFP4"),
    "overlap": (masked(enable_overlap=True), UnsupportedError, "enable_overlap, max_block_n and signal"),
    "unknown activations": (lambda: deep_gemm.transform_fp4_weights(*drawn(N, K), "fp16"), InvalidInputError,
        "activations must be 'fp8' or 'bf16', but it is 'fp16'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_told(name: str) -> None:
    call, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        call()


def spec(m: int, n: int, k: int, **more: Any) -> Fp4Spec:
    return Fp4Spec(m, n, k, more.pop("dtype", "e4m3"), **{"num_sms": 132, **more})


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (spec(1, 4096, 7168), "8x64_k2"),
        (spec(16, 7168, 2048), "16x64_k1"),
        (spec(20, 2048, 7168, dtype="bf16"), "32x64_k4"),
        (spec(1, 4096, 7168, dtype="bf16"), "8x64_k2x3"),
        (spec(16, 7168, 2048, dtype="bf16"), "16x64_k1x3"),
        (spec(16, 2048, 7168, dtype="bf16"), "16x64_k4x3"),
        (spec(17, 7168, 2048, dtype="bf16"), "32x64_k1"),
        (spec(64, 4096, 256), "64x64_k1"),  # each CTA has a block of K at least
        (spec(64, 65536, 7168), "64x256"),
        (spec(1, 4096, 7168, batch_invariant=True), "8x256"),
        (spec(65, 4096, 7168), "128x128"),
        (spec(129, 4096, 7168), "64x256"),  # 192 rows are cheaper than 256
        (spec(193, 4096, 7168), "128x128"),
        (spec(300, 4096, 7168), "64x256"),
        (spec(385, 4096, 7168), "128x128"),
        (spec(2048, 4096, 7168, dtype="bf16", batch_invariant=True), "256x128"),
        (spec(2048, 4096, 7168, absolute=True), "32x256"),
        (spec(96, 6144, 7168, groups=32, grouping="masked", expected_m=24), "24x256"),
        (spec(96, 4096, 4096, groups=6, grouping="masked", expected_m=24), "24x64"),
        (spec(96, 4096, 4096, groups=6, grouping="masked", expected_m=24, dtype="bf16"), "24x256"),
        (spec(96, 4096, 4096, groups=6, grouping="masked", expected_m=64, absolute=True), "32x256"),
        (spec(96, 4096, 4096, groups=6, grouping="masked", expected_m=128), "128x128"),  # 96 is all they can have
        (spec(512, 4096, 4096, groups=6, grouping="masked", expected_m=64), "64x256"),
        (spec(512, 4096, 4096, groups=6, grouping="masked", expected_m=512, dtype="bf16"), "256x128"),
        (spec(512, 4096, 7168), "128x128"),  # large tiles would be on half of the SMs
        (spec(512, 7168, 2048), "256x128"),
        (spec(4096, 4096, 7168), "256x128"),
        (spec(4096, 4096, 7168, batch_invariant=True), "256x128"),
        (spec(2048, 7168, 2048, dtype="bf16"), "256x128"),
        (spec(1100, 7168, 2048, dtype="bf16"), "128x256"),
        (spec(1100, 4096, 7168, dtype="bf16"), "128x128"),
        (spec(16384, 4096, 7168, groups=32, grouping="contiguous", alignment=128), "256x128"),
        (spec(16384, 4096, 7168, groups=32, grouping="contiguous", alignment=64), "64x256"),
        (spec(4096, 4096, 7168, groups=32, grouping="contiguous", alignment=128), "128x256"),
        (spec(12288, 4096, 7168, groups=32, grouping="psum", alignment=128), "256x128"),
        (spec(512, 4096, 7168, groups=32, grouping="masked", expected_m=256), "256x128"),
        (spec(4096, 4096, 4096, groups=6, grouping="contiguous", alignment=16), "16x256"),
        (spec(4096, 4096, 4096, groups=6, grouping="contiguous", alignment=192), "64x256"),
        (spec(4096, 4096, 4096, groups=32, grouping="contiguous", alignment=128), "128x256"),
        (spec(4096, 4096, 4096, groups=33, grouping="contiguous", alignment=128), "64x256"),
        (spec(4096, 4096, 4096, groups=17, grouping="psum", alignment=128), "64x256"),
        (spec(4096, 4096, 4096, groups=16, grouping="psum", alignment=128, dtype="bf16"), "128x256"),
    ],
    ids=str,
)
def test_the_choice(asked: Fp4Spec, text: str) -> None:
    assert FP4.describe(config := FP4.config_of(asked, SM90)) == text
    assert config in FP4.configs(SM90)
    assert (FP4.workspace_bytes(asked) == 0) is (config.whole or config.cluster > 0)


def test_registers_fit_in_what_a_launch_allocates() -> None:
    """Or setmaxnreg waits for ever. A thread has the largest multiple of 8 that lets all CTAs in."""
    for config in FP4.configs(SM90):
        producer, consumer = config.registers
        at_entry = 65536 // (config.num_threads * config.ctas_per_sm) // 8 * 8
        assert consumer * config.consumers * 128 + producer * 128 <= at_entry * config.num_threads
