"""fp8_gemm with every scaling, float32 and 16-bit output, C, and operands whose K is not contiguous."""

import functools
import random
from typing import Any

import pytest
import torch
from forced import DTYPES, FP8, by_rows
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm.ops import cast_reference
from deep_gemm.ops.reference import exact_product
from deep_gemm.ops.table import E5M2
from deep_gemm.runtime import engine
from deep_gemm.spec import SCALINGS, Scaling, TransposeBytesSpec, align, ceil_div
from deep_gemm.testing import assert_close_to_exact, calc_diff, guarded, guarded_copy, integer_operands

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
E4M3 = torch.float8_e4m3fn
KINDS: dict[str, tuple[Scaling, Scaling]] = {
    kind: pair for pair, kind in SCALINGS.items() if kind not in ("none", "ue8m0")
}
OF_E5M2 = {f"rowwise {of_a} {of_b}": (of_a, of_b) for of_a, of_b in E5M2}
KINDS |= dict.fromkeys(OF_E5M2, ("row", "row"))
RECIPES: dict[str, Any] = {"1d1d": (1, 1, 128), "1d2d": (1, 128, 128), "rowwise": None, **dict.fromkeys(OF_E5M2)}


def normal(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def operand(x: torch.Tensor, scaling: Scaling, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, K) in FP8, with scales of this kind; E5M2 has those of rows."""
    if scaling == "1x128":
        return cast_reference.per_token_cast_to_fp8(x, False)
    if scaling == "128x128":
        return cast_reference.per_block_cast_to_fp8(x, False)
    return by_rows(x, FP8[dtype])


@functools.cache
def data(kind: str, m: int, n: int, k: int) -> tuple[Any, Any]:
    dtypes = OF_E5M2.get(kind, ("e4m3", "e4m3"))
    both = zip((m, n), KINDS[kind], dtypes, strict=True)
    return tuple(operand(normal(rows, k, rows + k), scaling, dtype) for rows, scaling, dtype in both)  # type: ignore[return-value]


FORMS = ("nt", "nn", "tn", "tt")


@pytest.mark.parametrize("accumulate", ["none", "in place", "from c"])
@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, output: str, accumulate: str) -> None:
    """Calls like those of users: row-major scales, every form, K-major or not. All have the same bits."""
    rng = random.Random(f"{kind} {output} {accumulate}")
    for index in range(3):
        m, n, k = rng.choice([1, 7, rng.randint(8, 300)]), rng.randint(1, 700), 16 * rng.randint(1, 70)
        (a, sfa), (b, sfb) = data(kind, m, n, k)
        c = normal(m, n, index).to(DTYPES[output])
        found = []
        for form in FORMS:
            for stored in (True, False):  # a view of K-major storage, and MN-major storage
                x = (a.t() if stored else a.t().contiguous(), sfa.t()) if form[0] == "t" else (a, sfa)
                y = (b.t() if stored else b.t().contiguous(), sfb.t()) if form[1] == "n" else (b, sfb)
                d = guarded((m, n), DTYPES[output], DEVICE, (align(n, 8), 1) if index else None)
                d.tensor.copy_(c) if accumulate == "in place" else None
                added = {"none": None, "in place": d.tensor, "from c": c}[accumulate]
                getattr(deep_gemm, f"fp8_gemm_{form}")(x, y, d.tensor, added, recipe=RECIPES[kind])
                d.check(f"{form} {m} x {n} x {k}")
                found.append(d.tensor)
        assert_close_to_exact(found[0], a, sfa, b, sfb, c=None if accumulate == "none" else c, scaling=KINDS[kind])
        assert all(torch.equal(d, found[0]) for d in found), f"{m} x {n} x {k}: forms differ"


@pytest.mark.parametrize("kind", ["1d1d", "1d2d"])
def test_integers_are_exact(kind: str) -> None:
    """Sums of small integers with powers of two as scales are exact: any wrong scale, row, column or block shows."""
    for m, n, k in ((300, 400, 1040), (64, 72, 4096), (1, 1000, 144)):
        (a, sfa), (b, sfb) = integer_operands(m, n, k, DEVICE, seed=m)
        if kind == "1d1d":
            sfb = 2.0 ** torch.randint(-2, 3, (n, ceil_div(k, 128)), device=DEVICE).float()
        d = torch.full((m, n), float("nan"), device=DEVICE)
        deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d, recipe=RECIPES[kind])
        assert torch.equal(d.double(), exact_product(a, sfa, b, sfb, scaling=KINDS[kind]))


@pytest.mark.parametrize("side", ["a", "b"])
def test_each_scale_belongs_to_its_row_and_block(side: str) -> None:
    """1D1D, with one scale changed at a time."""
    m, n, k = 70, 140, 640
    (a, sfa), (b, sfb) = data("1d1d", m, n, k)
    for row, block in ((0, 0), (69, 4), (33, 2), (8, 3)):
        changed = (sfa if side == "a" else sfb).clone()
        changed[row, block] *= 2
        x, y = ((a, changed), (b, sfb)) if side == "a" else ((a, sfa), (b, changed))
        d = torch.full((m, n), float("nan"), device=DEVICE)
        deep_gemm.fp8_gemm_nt(x, y, d, recipe=(1, 1, 128))
        assert_close_to_exact(d, *x, *y, scaling=KINDS["1d1d"])


@pytest.mark.parametrize("zeros", ["a", "b"])
def test_a_block_of_zeros_adds_nothing(zeros: str) -> None:
    m, n, k = 130, 200, 512
    (a, sfa), (b, sfb) = data("1d1d", m, n, k)
    a, b = a.clone(), b.clone()
    (a if zeros == "a" else b).view(torch.uint8)[:, 128:256] = 0
    c = normal(m, n, 5)
    d = c.clone()
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d, d, recipe=(1, 1, 128))
    assert_close_to_exact(d, a, sfa, b, sfb, c=c, scaling=KINDS["1d1d"])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row_or_column(kind: str) -> None:
    m, n, k = 150, 300, 400
    (a, sfa), (b, sfb) = data(kind, m, n, k)
    a, b = a.clone(), b.clone()

    def call() -> torch.Tensor:
        d = torch.zeros(m, n, device=DEVICE)
        deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d, recipe=RECIPES[kind])
        return d

    clean = call()
    a.view(torch.uint8)[77, 399] = b.view(torch.uint8)[299, 0] = 0x7F
    d = call()
    assert not bool(d[77].isfinite().any())
    assert not bool(d[:, 299].isfinite().any())
    d[77], d[:, 299] = clean[77], clean[:, 299]
    assert torch.equal(d, clean)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_agree_bit_for_bit(kind: str) -> None:
    """A hundred runs, each with the same C. A race shows in few of them."""
    m, n, k = 384, 1032, 2064
    a, b = data(kind, m, n, k)
    c = normal(m, n, 1)
    first = None
    for _ in range(100):
        d = c.clone()
        deep_gemm.fp8_gemm_nt(a, b, d, d, recipe=RECIPES[kind])
        first = d if first is None else first
        assert torch.equal(d, first)


@cuda_only
def test_capture_and_replay() -> None:
    """The graph has transposes of both scales and of an operand."""
    m, n, k = 60, 264, 208
    (a, sfa), (b, sfb) = data("1d1d", m, n, k)
    stored = b.t().contiguous()
    d = torch.zeros(m, n, device=DEVICE)

    def call() -> None:
        deep_gemm.fp8_gemm_nn((a, sfa), (stored, sfb.t()), d, d, recipe=(1, 1, 128))

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()
    d.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert calc_diff(d, 2 * exact_product(a, sfa, b, sfb, scaling=KINDS["1d1d"])) < 1e-6


def test_as_torch_scaled_mm_is_called() -> None:
    """One scale, and scales of rows as (M, 1) and (1, N). Results are closer to the exact product than those of fast
    accumulation."""
    m, n, k = 256, 512, 7168
    (a, sfa), (b, sfb) = data("rowwise", m, n, k)
    d = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb.t()), d)
    exact = exact_product(a, sfa, b, sfb, scaling=("row", "row"))
    ours = calc_diff(d, exact)
    assert ours < 1e-5
    if DEVICE == "cuda":
        theirs = torch._scaled_mm(a, b.t(), scale_a=sfa, scale_b=sfb.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
        assert ours <= calc_diff(theirs, exact)
    one = torch.tensor(0.25, device=DEVICE)
    deep_gemm.fp8_gemm_nt((a, one), (b, one), d)
    assert_close_to_exact(d, a, one, b, one, scaling=("row", "row"))


def test_as_prime_rl_and_torchao_call_weight_gradients() -> None:
    """prime-rl adds to d itself. torchao passes recipes as pairs, and scales that are columns of a wider tensor."""
    m, n, k = 256, 384, 1024
    (a, sfa), (b, sfb) = data("1d1d", m, n, k)
    d = torch.zeros(m, n, device=DEVICE)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d, c=d, disable_ue8m0_cast=True, recipe=(1, 1, 128))
    wide = torch.full((n, 24), float("nan"), device=DEVICE)
    wide[:, 5:13] = sfb
    other = torch.empty(m, n, device=DEVICE)
    deep_gemm.fp8_gemm_nt(
        (a, sfa.t().contiguous().t()), (b, wide[:, 5:13]), other, recipe_a=(1, 128), recipe_b=(1, 128)
    )
    assert torch.equal(d, other)
    assert_close_to_exact(d, a, sfa, b, sfb, scaling=KINDS["1d1d"])


@cuda_only
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 16), (128, 128), (129, 144), (127, 112), (16, 4096), (5000, 48), (1000, 7168)]
)
@pytest.mark.parametrize("offset", [0, 1])
def test_transposed_bytes(rows: int, columns: int, offset: int) -> None:
    """Every byte is right, whether the kernel reads 16 bytes at once or not."""
    bits = torch.randint(0, 256, (columns, rows), dtype=torch.uint8, device=DEVICE)
    stride = align(rows, 16) + 16 if offset == 0 else rows + 3
    source = guarded_copy(bits.view(E4M3), (stride, 1), offset=offset).tensor
    target = guarded((rows, columns), E4M3, DEVICE)
    device = torch.cuda.current_device()
    plan = engine.plan(TransposeBytesSpec(rows, columns), device)
    addresses = {"source": source.data_ptr(), "target": target.tensor.data_ptr()}
    engine.launch_record(plan, {"source": source.t().stride()}, addresses, engine.raw_stream(device))()
    torch.cuda.synchronize()
    target.check("the transpose")
    assert torch.equal(target.tensor.view(torch.uint8), bits.t())
