"""The numbers that fp8_gemm_nt writes: bit-exact and statistical tests."""

import math
import random

import pytest
import torch
from gpu_cases import DEVICE, PROJECTIONS, Layout, call, guarded_call, projection

import deep_gemm
from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.ops.reference import exact_product
from deep_gemm.testing import (
    Operand,
    assert_close_to_exact,
    calc_diff,
    guarded,
    integer_operands,
    one_hot_operand,
    random_operands,
)


@pytest.mark.parametrize("m", [0, 1, 7, 16, 64, 100, 128, 1000, 4096])
@pytest.mark.parametrize(("n", "k"), PROJECTIONS)
def test_projections(n: int, k: int, m: int) -> None:
    (a, sfa), (b, sfb), x, y = projection(n, k, 4096)
    a, sfa, x = a[:m], sfa[:m], x[:m]
    d = call((a, sfa), (b, sfb))
    assert_close_to_exact(d, a, sfa, b, sfb)
    assert calc_diff(d, x.float() @ y.float().t()) < 1e-3


def random_case(seed: int) -> tuple[tuple[int, int, int], Layout]:
    """Sizes spread evenly over orders of magnitude, and a layout."""
    rng = random.Random(seed)

    def size(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    m, n, k = size(1, 5000), size(1, 9000), 16 * size(1, 600)
    while m * n * k > 1 << 36:
        m, n = -(-m // 2), -(-n // 2)
    layout = Layout(
        scales=rng.choice(["rows", "columns", "slice", "sparse"]),
        pad_a=16 * rng.choice([0, 0, 1, 9]),
        pad_b=16 * rng.choice([0, 0, 1, 9]),
        pad_d=rng.choice([0, 0, 8, rng.randint(1, 40)]),
        offset_a=16 * rng.choice([0, 0, 1, 5]),
        offset_d=2 * rng.choice([0, 0, 8, rng.randint(1, 40)]),
        transposed_sfb=rng.random() < 0.5,
    )
    return (m, n, k), layout


@pytest.mark.parametrize("seed", range(300))
def test_random_shapes_and_layouts(seed: int) -> None:
    (m, n, k), layout = random_case(seed)
    (a, sfa), (b, sfb), _, _ = random_operands(m, n, k, DEVICE, seed)
    d = guarded_call((a, sfa), (b, sfb), layout, compiled_dims="")
    assert_close_to_exact(d, a, sfa, b, sfb)


EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257]


@pytest.mark.parametrize("m", EDGES)
@pytest.mark.parametrize("n", [1, 8, 63, 127, 128, 129, 200, 384, 1000])
def test_integers_are_exact(m: int, n: int) -> None:
    for k in (16, 112, 128, 144, 256, 400, 1152, 2064):
        (a, sfa), (b, sfb) = integer_operands(m, n, k, DEVICE, seed=m * n + k)
        d = guarded_call((a, sfa), (b, sfb), Layout(), compiled_dims="")
        assert torch.equal(d, exact_product(a, sfa, b, sfb).bfloat16()), f"K = {k}"


@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 7168), (64, 2112, 7168), (300, 1000, 1040), (1000, 4096, 512)])
def test_integers_are_exact_in_larger_sizes(m: int, n: int, k: int) -> None:
    (a, sfa), (b, sfb) = integer_operands(m, n, k, DEVICE)
    assert torch.equal(call((a, sfa), (b, sfb)), exact_product(a, sfa, b, sfb).bfloat16())


@pytest.mark.parametrize(("m", "n", "k"), [(5, 140, 272), (130, 300, 1040), (500, 1100, 2048)])
def test_one_hot_rows_pick_columns(m: int, n: int, k: int) -> None:
    """A row or column that reads another's data shows, because each result is a single element and not a sum."""
    (a, sfa), index = one_hot_operand(m, k, DEVICE)
    _, (b, sfb) = integer_operands(1, n, k, DEVICE)
    d = call((a, sfa), (b, sfb), compiled_dims="")
    scales = sfb.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert torch.equal(d.float(), (b.float() * scales).t()[index])


@pytest.mark.parametrize(("m", "n", "k"), [(70, 300, 656), (200, 520, 1040)])
def test_one_changed_scale_at_a_time(m: int, n: int, k: int) -> None:
    (a, sfa), (b, sfb) = integer_operands(m, n, k, DEVICE)
    sfa, sfb = torch.ones_like(sfa), torch.ones_like(sfb)
    plain = exact_product(a, sfa, b, sfb)
    assert torch.equal(call((a, sfa), (b, sfb), compiled_dims=""), plain.bfloat16())
    rng = random.Random(m)
    blocks = sfa.shape[1]
    for row, block in [(0, 0), (m - 1, blocks - 1), *((rng.randrange(m), rng.randrange(blocks)) for _ in range(10))]:
        changed = sfa.clone()
        changed[row, block] = 4.0
        d = call((a, changed), (b, sfb), compiled_dims="")
        assert torch.equal(d, exact_product(a, changed, b, sfb).bfloat16()), f"scale of a at {row}, {block}"
    for row in range(sfb.shape[0]):
        for block in (0, blocks // 2, blocks - 1):
            changed = sfb.clone()
            changed[row, block] = 4.0
            d = call((a, sfa), (b, changed), compiled_dims="")
            assert torch.equal(d, exact_product(a, sfa, b, changed).bfloat16()), f"scale of b at {row}, {block}"


@pytest.mark.parametrize("where", ["a", "b", "the scales of a", "the scales of b"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_where_they_belong(where: str, value: float) -> None:
    (a, sfa), (b, sfb), _, _ = random_operands(150, 300, 400, DEVICE)
    clean = call((a, sfa), (b, sfb), compiled_dims="")
    a, sfa, b, sfb = a.clone(), sfa.clone(), b.clone(), sfb.clone()
    rows, columns = slice(0, 150), slice(0, 300)
    if where == "a":
        a.view(torch.uint8)[77, 399] = 0x7F  # E4M3 has no infinity, only NaN
        rows = slice(77, 78)
    elif where == "b":
        b.view(torch.uint8)[299, 0] = 0xFF
        columns = slice(299, 300)
    elif where == "the scales of a":
        sfa[3, 2] = value
        rows = slice(3, 4)
    else:
        sfb[1, 3] = value
        columns = slice(128, 256)
    d = call((a, sfa), (b, sfb), compiled_dims="")
    assert not bool(d[rows, columns].isfinite().any())
    d[rows, columns] = clean[rows, columns]
    assert torch.equal(d, clean)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("disable_ue8m0_cast", [False, True])
def test_power_of_two_scales(use_ue8m0: bool, disable_ue8m0_cast: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = (torch.randn(rows, 1024, device=DEVICE, generator=generator) for rows in (200, 640))
    a, b = per_token_cast_to_fp8(x, use_ue8m0), per_block_cast_to_fp8(y, use_ue8m0)
    d = call(a, b, disable_ue8m0_cast=disable_ue8m0_cast)
    assert_close_to_exact(d, *a, *b)
    assert calc_diff(d, x @ y.t()) < 1e-3


def test_data_of_one_sign() -> None:
    """With positive data truncation always rounds sums down. The bound is wider there, and must hold."""
    (a, sfa), (b, sfb), _, _ = random_operands(128, 512, 4096, DEVICE)
    a, b = (x.float().abs().to(x.dtype) for x in (a, b))
    d = call((a, sfa), (b, sfb))
    assert_close_to_exact(d, a, sfa, b, sfb, worst_case=True)
    assert calc_diff(d, exact_product(a, sfa, b, sfb)) < 1e-4


@pytest.mark.parametrize("k", [20480, 147456])
def test_long_sums(k: int) -> None:
    (a, sfa), (b, sfb), _, _ = random_operands(20, 264, k, DEVICE)
    assert_close_to_exact(call((a, sfa), (b, sfb)), a, sfa, b, sfb)


def random_bytes(rows: int, k: int, seed: int) -> torch.Tensor:
    """Random finite E4M3 values below 2 in magnitude, made without temporaries of the same size."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    out = torch.randint(0, 256, (rows, k), dtype=torch.uint8, device=DEVICE, generator=generator)
    return out.bitwise_and_(0xBF).view(torch.float8_e4m3fn)


def random_scales(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)) + 0.5


@pytest.mark.skipif(DEVICE == "cpu", reason="gigabytes")
@pytest.mark.parametrize(("m", "n", "k"), [(1 << 18 | 3, 256, 8208), (1 << 21 | 5, 1040, 128), (65, 1 << 18 | 8, 8208)])
def test_offsets_past_two_to_the_31(m: int, n: int, k: int) -> None:
    """A, D and B in turn have more than 2^31 elements."""
    assert max(m * k, m * n, n * k) > 1 << 31
    a: Operand = random_bytes(m, k, 1), random_scales(m, -(-k // 128), 2)
    b: Operand = random_bytes(n, k, 3), random_scales(-(-n // 128), -(-k // 128), 4)
    buffer = guarded((m, n), torch.bfloat16, DEVICE)
    deep_gemm.fp8_gemm_nt(a, b, buffer.tensor, compiled_dims="")
    assert not bool(buffer.tensor.isnan().any())
    crossing = (1 << 31) // max(n, k)
    for start in {0, min(crossing, m) - 60, m - 60}:
        rows = slice(max(0, start), start + 60)
        if n < 100_000:
            assert_close_to_exact(buffer.tensor[rows], a[0][rows], a[1][rows], *b)
    for start in {0, n // 128 // 2 * 128, (n - 1) // 128 * 128}:
        columns, block = slice(start, min(start + 128, n)), slice(start // 128, start // 128 + 1)
        if m < 100_000:
            assert_close_to_exact(buffer.tensor[:, columns], *a, b[0][columns], b[1][block])
    buffer.check("d")
