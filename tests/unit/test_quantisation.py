"""Casts to FP8: shapes, scales, and round trips."""

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError
from deep_gemm.ops import cast_reference as q
from deep_gemm.spec import ceil_div

Cast = Callable[[torch.Tensor, bool, int], tuple[torch.Tensor, torch.Tensor]]

CASTS: dict[str, tuple[Cast, Callable[[int], tuple[int, int]]]] = {
    "token": (q.per_token_cast_to_fp8, lambda gran: (1, gran)),
    "channel": (q.per_channel_cast_to_fp8, lambda gran: (gran, 1)),
    "block": (q.per_block_cast_to_fp8, lambda gran: (gran, gran)),
}


def scale_of(block: torch.Tensor, use_ue8m0: bool) -> float:
    """The rule for the scale of one block, spelled out."""
    scale = max(float(block.abs().max()), 1e-4) / 448
    return 2.0 ** torch.tensor(scale).log2().ceil().item() if use_ue8m0 else scale


@pytest.mark.parametrize("name", CASTS)
@settings(deadline=None)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    gran=st.sampled_from([32, 128]),
    use_ue8m0=st.booleans(),
    seed=st.integers(0, 99),
    log_size=st.integers(-6, 6),
)
def test_every_block_has_its_own_scale(
    name: str, rows: int, columns: int, gran: int, use_ue8m0: bool, seed: int, log_size: int
) -> None:
    cast, granularity = CASTS[name]
    block = granularity(gran)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0**log_size
    y, sf = cast(x, use_ue8m0, gran)
    assert y.dtype == torch.float8_e4m3fn
    assert y.shape == x.shape
    assert y.is_contiguous()
    assert sf.dtype == torch.float32
    assert sf.shape == (ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    for i in {0, sf.shape[0] - 1}:
        for j in {0, sf.shape[1] - 1}:
            part = x[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            assert float(sf[i, j]) == pytest.approx(scale_of(part, use_ue8m0), rel=1e-6)
    # Half a unit in the last of E4M3's 3 mantissa bits; below 2^-6 the spacing is 2^-9.
    error = (q.dequantise(y, sf, block) - x).abs()
    full = q.dequantise(torch.ones_like(y), sf, block)
    assert bool((error <= torch.maximum(x.abs() * 2.0**-4, full * 2.0**-10) * (1 + 1e-5)).all())


@pytest.mark.parametrize("name", CASTS)
def test_the_largest_value_becomes_448(name: str) -> None:
    x = torch.randn(130, 260, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    y, _ = CASTS[name][0](x, False, 128)
    assert float(y.float().abs().max()) == 448.0


@pytest.mark.parametrize("name", CASTS)
def test_power_of_two_scales_lose_nothing(name: str) -> None:
    """Scales are rounded up, never down: no value may exceed 448."""
    x = torch.randn(130, 260, generator=torch.Generator().manual_seed(1)) * 3
    y, sf = CASTS[name][0](x, True, 128)
    assert torch.equal(torch.frexp(sf)[0], torch.full_like(sf, 0.5))
    assert float(y.float().abs().max()) <= 448
    assert float(y.float().abs().max()) >= 224


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_zeros(use_ue8m0: bool) -> None:
    y, sf = q.per_token_cast_to_fp8(torch.zeros(3, 200), use_ue8m0)
    assert not y.float().any()
    assert bool((sf > 0).all())
    assert float(sf[0, 0]) == pytest.approx(scale_of(torch.zeros(1), use_ue8m0), rel=1e-6)


TINY = [2.0**-114, 2.0**-120, 448 * 2.0**-127, 448 * 2.0**-128, 1e-36, 1e-38, 9.2e-41, 2.0**-134]


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("size", TINY)
def test_tiny_blocks_are_what_they_were_again(size: float, use_ue8m0: bool) -> None:
    """The reciprocal of a scale below 2^-128 would be more than a float32 can hold. Down to 2^-134, 6 bits before the
    least normal value of E4M3, nothing more than E4M3's rounding is lost."""
    x = torch.tensor([[size, -size / 2, 0.0] + [size / 4] * 125], dtype=torch.float64).float()
    y, sf = q.cast_blocks(x, 1, 128, use_ue8m0, 0.0)
    assert bool(((q.dequantise(y, sf).double() - x.double()).abs() <= x.double().abs() / 16 + sf * 2.0**-10).all())
    if size >= 448 * 2.0**-128:
        exact = x.abs().amax(1, keepdim=True) / torch.full((), 448.0)
        assert torch.equal(sf, q.ceil_to_ue8m0(exact) if use_ue8m0 else exact)


def test_scales_of_zeros_and_of_tiny_blocks_without_an_epsilon() -> None:
    x = torch.zeros(4, 128)
    x[1:, 0] = torch.tensor([2.0**-149, 448 * 2.0**-128, float("nan")])
    _, sf = q.cast_blocks(x, 1, 128, False, 0.0)
    assert sf.flatten()[:3].tolist() == [0.0, 0.0, 2.0**-128]  # 2^-149 / 448 is zero
    assert bool(sf[3].isnan())


@pytest.mark.parametrize(
    ("exponent", "least", "most"), [(0, 0.02, 0.03), (12, 0.02, 0.03), (14, 0.04, 0.08), (16, 0.2, 0.3)]
)
def test_spread_says_where_one_scale_for_a_block_loses_accuracy(exponent: int, least: float, most: float) -> None:
    """The small column's relative error after a round trip is that of the docstring."""
    x = torch.randn(130, 384, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x[:, 200] *= 2.0**-exponent
    found = deep_gemm.quantize.spread(x.bfloat16())
    assert found.shape == (2, 3)
    assert 2.0**exponent / 4 < found[0, 1] < 2.0**exponent * 8
    assert found[0, [0, 2]].max() < 8
    again = deep_gemm.dequantise(*deep_gemm.quantize.blocks(x[:128], epsilon=0), (128, 128))
    error = (again - x[:128])[:, 200].norm() / x[:128, 200].norm()
    assert least < error < most


def test_spread_counts_no_zeros() -> None:
    x = torch.zeros(128, 256)
    x[3, 128:] = torch.arange(128.0)
    assert deep_gemm.quantize.spread(x).tolist() == [[1.0, 127.0]]
    assert deep_gemm.quantize.spread(x[:0]).shape == (0, 2)
    with pytest.raises(InvalidInputError, match="floating-point values"):
        deep_gemm.quantize.spread(x.int())


def test_no_rows() -> None:
    y, sf = q.per_token_cast_to_fp8(torch.zeros(0, 256), False)
    assert (y.shape, sf.shape) == ((0, 256), (0, 2))


def test_infinity_and_nan_stay_in_their_block() -> None:
    x = torch.ones(2, 256)
    x[0, 3] = float("nan")
    x[1, 200] = float("inf")
    y, sf = q.per_token_cast_to_fp8(x, True)
    values = q.dequantise(y, sf)
    assert bool(values[0, 3].isnan())
    assert bool((values[0, 128:] == 1).all())
    assert bool((values[1, :128] == 1).all())
    assert not bool(values[1, 200].isfinite())


def test_no_gradient_flows() -> None:
    y, sf = q.per_token_cast_to_fp8(torch.ones(2, 128, requires_grad=True), False)
    assert not y.requires_grad
    assert not sf.requires_grad


@pytest.mark.parametrize("strided", [torch.ones(300, 64).t(), torch.ones(64, 600)[:, ::2]])
def test_strided_input(strided: torch.Tensor) -> None:
    y, sf = q.per_token_cast_to_fp8(strided, False)
    assert torch.allclose(q.dequantise(y, sf), strided)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [((0,), (6,)), ((0, 1), (6, 5)), ((1, 2), (5, 4)), ((-1,), (4,)), ((), ()), ((0, 1, 2), (6, 5, 4))],
)
def test_custom_dims(dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    y, sf = q.per_custom_dims_cast_to_fp8(x, dims, False)
    assert y.shape == x.shape
    assert sf.shape == shape
    kept = {dim % 3 for dim in dims}
    wide = sf.reshape([size if dim in kept else 1 for dim, size in enumerate(x.shape)])
    assert torch.allclose(y.float() * wide, x, rtol=2**-4, atol=float(sf.max()) * 2**-9)
    shared = tuple(dim for dim in range(3) if dim not in kept)
    if shared:
        assert torch.allclose(wide * 448, x.abs().amax(dim=shared, keepdim=True))


def test_one_row_keeps_its_dimension() -> None:
    _, sf = q.per_custom_dims_cast_to_fp8(torch.ones(1, 128), (0,), False)
    assert sf.shape == (1,)


@pytest.mark.parametrize("exponent", [-100, -1, 0, 1, 100])
def test_powers_of_two_are_their_own_ceiling(exponent: int) -> None:
    exact = torch.tensor(2.0**exponent)
    above = torch.nextafter(exact, torch.tensor(float("inf")))
    below = torch.nextafter(exact, torch.tensor(0.0))
    assert float(q.ceil_to_ue8m0(exact)) == 2.0**exponent
    assert float(q.ceil_to_ue8m0(above)) == 2.0 ** (exponent + 1)
    assert float(q.ceil_to_ue8m0(below)) == 2.0**exponent


def test_infinity_and_nan_have_no_ceiling() -> None:
    out = q.ceil_to_ue8m0(torch.tensor([float("inf"), float("nan")]))
    assert bool(out[0].isinf())
    assert bool(out[1].isnan())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: q.per_token_cast_to_fp8(torch.ones(2, 2, 2), False), "x must have 2 dimensions, but it has 3"),
        (lambda: q.per_block_cast_to_fp8(torch.ones(4), True), "x must have 2 dimensions, but it has 1"),
        (lambda: q.per_token_cast_to_fp8(torch.ones(2, 2, dtype=torch.int32), False), "x must be a tensor of .*int32"),
        (lambda: q.per_token_cast_to_fp8(torch.ones(2, 2).to(torch.float8_e4m3fn), False), "float8_e4m3fn"),
        (lambda: q.per_token_cast_to_fp8([[1.0]], False), "x must be a torch.Tensor, but it is of type list"),
        (lambda: q.per_channel_cast_to_fp8(torch.ones(2, 2), False, 0),
            "gran_k must be a whole number from 1, but it is 0"),
        (lambda: q.per_custom_dims_cast_to_fp8(torch.ones(2, 2), (2,), False), r"dims must name.*\(2,\)"),
        *((functools.partial(cast, torch.ones(2, 2), *dims, 1),
            "use_ue8m0 must be True or False, but it is 1") for cast,
            dims in ((q.per_token_cast_to_fp8, ()), (q.per_channel_cast_to_fp8, ()), (q.per_block_cast_to_fp8, ()),
            (q.per_custom_dims_cast_to_fp8, ((0,),)))),
        (lambda: q.dequantise(torch.ones(2, 256).to(torch.float8_e4m3fn), torch.ones(2, 3)),
            r"shape \(2, 2\).*\(2, 3\)"),
    ],
)  # fmt: skip
def test_mistakes(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        call()


def test_packed_scales_are_exponents() -> None:
    """The keyword is DeepGEMM's."""
    x = torch.randn(3, 640)
    values, sf = q.per_token_cast_to_fp8(x, use_ue8m0=True)
    found, packed = q.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=128, use_packed_ue8m0=True)
    assert (packed.dtype, packed.shape) == (torch.int32, (3, 2))
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(q.unpack_ue8m0_from_int(packed), torch.nn.functional.pad(sf, (0, 3), value=1.0))
    with pytest.raises(InvalidInputError, match="use_ue8m0 must be True with use_packed_ue8m0"):
        q.per_token_cast_to_fp8(x, use_ue8m0=False, use_packed_ue8m0=True)
    x = torch.ones(2, 256)
    with pytest.raises(InvalidInputError, match="use_packed_ue8m0 must be True or False"):
        q.per_token_cast_to_fp8(x, True, use_packed_ue8m0=1)  # type: ignore[arg-type]
    y, sf = q.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=128, use_packed_ue8m0=False)
    assert (y.shape, sf.shape) == ((2, 256), (2, 2))


PUBLIC: dict[str, tuple[str, ...]] = {
    "per_token_cast_to_fp8": ("x", "use_ue8m0", "gran_k", "use_packed_ue8m0"),
    "per_channel_cast_to_fp8": ("x", "use_ue8m0", "gran_k"), "per_block_cast_to_fp8": ("x", "use_ue8m0", "gran_k"),
    "per_custom_dims_cast_to_fp8": ("x", "dims", "use_ue8m0"),
    "transform_sf_into_required_layout": (
        *("sf", "mn", "k", "recipe", "num_groups", "is_sfa", "disable_ue8m0_cast", "psum_layout"),),
    "get_mn_major_tma_aligned_tensor": ("sf",), "get_tma_aligned_size": ("x", "element_size"), "ceil_div": ("x", "y"),
    "align": ("x", "y"), "get_theoretical_mk_alignment_for_contiguous_layout": ("expected_m", "num_groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_have_deepgemms_names_and_order(name: str) -> None:
    assert tuple(inspect.signature(getattr(deep_gemm, name)).parameters) == PUBLIC[name]
