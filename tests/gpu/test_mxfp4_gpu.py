"""Products of MXFP4 weights on a GPU: against float64, beside poison, repeated, in graphs, and for every config."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forced import compile_for_calls
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm import quantize
from deep_gemm.arch import SM90
from deep_gemm.kernels.sm90_fp4_gemm import FP4, Fp4Config, large, wide
from deep_gemm.ops import fp4_weights
from deep_gemm.runtime import engine
from deep_gemm.spec import Fp4Spec

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16 = torch.bfloat16
KINDS = ("fp8", "bf16")
of_kinds = pytest.mark.parametrize("kind", KINDS)

Weights = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Side by side: one after the other in first calls takes a minute."""
    if DEVICE != "cpu":
        compile_for_calls(FP4.cases())


def drawn(*shape: int, low: int = 116, high: int = 128, seed: int = 0) -> Weights:
    """Packed codes of (..., N, K), and exponents from low to below high."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=DEVICE, generator=gen)
    size = (*shape[:-1], shape[-1] // 32)
    return codes, torch.randint(low, high, size, dtype=torch.uint8, device=DEVICE, generator=gen)


def operand(kind: str, *shape: int, seed: int = 1) -> tuple[Any, torch.Tensor]:
    """a, and its values in float64."""
    x = torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))
    if kind == "bf16":
        return x.to(BF16), x.to(BF16).double()
    values, scales = quantize.rows(x.flatten(0, -2))
    exact = deep_gemm.dequantise(values, scales, (1, 128), torch.float64)
    if len(shape) == 2:
        return (values, scales), exact
    return (values.view(shape), scales.contiguous().view(*shape[:-1], -1)), exact.view(shape)


def of_group(weights: Weights, group: int) -> torch.Tensor:
    return deep_gemm.dequantise(weights[0][group], weights[1][group], dtype=torch.float64)


def close(kind: str, d: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> None:
    """d is a @ w^T, rounded to bf16, with sums as the tensor cores have them: of FP8 short ones for each 128 of K."""
    exact, size = a @ w.t(), a.abs() @ w.abs().t()
    bound = exact.abs() * 2.0**-8 + size * (2.0**-11 if kind == "fp8" else 2.0**-20) + 1e-30
    assert ((d.double() - exact).abs() / bound).max().item() <= 1


def call(kind: str, grouping: str, a: Any, b: Any, d: torch.Tensor, *layout: Any, **more: Any) -> None:
    start = "m_grouped_" if grouping else ""
    getattr(deep_gemm, f"{start}{kind}_fp4_gemm_nt{grouping}")(a, b, d, *layout, **more)


def repeated(
    kind: str, grouping: str, a: Any, b: Any, shape: tuple[int, ...], *layout: Any, **more: Any
) -> torch.Tensor:
    """d of several calls, all with the same bits, in a larger tensor of NaN."""
    around = torch.full((shape[0] + 2, *shape[1:]), torch.nan, dtype=BF16, device=DEVICE)
    first = None
    for _ in range(4):
        around.fill_(torch.nan)
        call(kind, grouping, a, b, around[1:-1], *layout, **more)
        assert around[0].isnan().all()
        assert around[-1].isnan().all()
        first = around.clone() if first is None else first
        assert torch.equal(first.view(torch.int16), around.view(torch.int16))
    assert first is not None
    return first[1:-1]


ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300, 400)


@of_kinds
@pytest.mark.parametrize(("n", "k"), [(4096, 2048), (2048, 1056), (7168, 2048), (200, 2880), (72, 160), (64, 32)])
def test_dense(kind: str, n: int, k: int) -> None:
    weights = drawn(n, k)
    exact = deep_gemm.dequantise(*weights, dtype=torch.float64)
    b = deep_gemm.transform_fp4_weights(*weights, kind)
    assert not fp4_weights.is_absolute(b.packed)
    for m in ROWS:
        a, values = operand(kind, m, k, seed=m)
        close(kind, repeated(kind, "", a, b, (m, n)), values, exact)


@of_kinds
def test_rows_that_are_not_aligned(kind: str) -> None:
    """N is no multiple of 8, and rows of d begin anywhere."""
    weights, (a, values) = drawn(133, 1024), operand(kind, 70, 1024)
    whole = torch.full((70, 301), torch.nan, dtype=BF16, device=DEVICE)
    call(kind, "", a, deep_gemm.transform_fp4_weights(*weights, kind), whole[:, 5:138])
    close(kind, whole[:, 5:138], values, deep_gemm.dequantise(*weights, dtype=torch.float64))
    assert whole[:, :5].isnan().all()
    assert whole[:, 138:].isnan().all()


COUNTS: list[tuple[int, int, list[int], int, int]] = [
    (33, 5, [33, 0, 1, 5, 33], 512, 640), (8, 8, [8, 3, 0, 0, 7, 8, 1, 0], 1280, 2880),
    (24, 20, [20, 24, 0, 1], 2048, 1024), (16, 12, [12, 16, 9], 320, 1056),
    (130, 60, [130, 0, 64, 65, 1, 129], 1152, 1024), (96, 20, [20] * 40, 1024, 512),
    (64, 24, [24, 20, 64, 0, 1, 17], 6144, 7168), (4, 1, [0, 0, 0], 256, 256),
    (300, 128, [300, 0, 128, 129, 1, 64], 1152, 1056),
]  # fmt: skip


@of_kinds
@pytest.mark.parametrize("case", COUNTS, ids=str)
def test_masked(kind: str, case: tuple[int, int, list[int], int, int]) -> None:
    most, expected, counts, n, k = case
    weights = drawn(len(counts), n, k)
    a, values = operand(kind, len(counts), most, k)
    rows = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    b = deep_gemm.transform_fp4_weights(*weights, kind)
    d = repeated(kind, "_masked", a, b, (len(counts), most, n), rows, expected)
    for group, count in enumerate(counts):
        assert d[group, count:].isnan().all()
        if count:
            close(
                kind,
                d[group, :count],
                values[group, :count],
                of_group(weights, group),
            )


@of_kinds
@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize(("m", "groups"), [(1024, 9), (2048, 5)])  # tiles of 64 and of 128 tokens
def test_contiguous(kind: str, psum: bool, m: int, groups: int) -> None:
    n, k = 1088, 1056
    weights, (a, values) = drawn(groups, n, k), operand(kind, m, k)
    b = deep_gemm.transform_fp4_weights(*weights, kind)
    labels = torch.full((m,), -1, dtype=torch.int32, device=DEVICE)
    places = {0: slice(0, 200), 2: slice(256, 257), 3: slice(384, 640), 4: slice(640, 641)}
    for group, rows in places.items():
        labels[rows] = group
    ends = torch.tensor([200, 200, 257, 640] + [641] * (groups - 4), dtype=torch.int32, device=DEVICE)
    d = repeated(kind, "_contiguous", a, b, (m, n), ends if psum else labels, use_psum_layout=psum)
    for group, rows in places.items():
        close(kind, d[rows], values[rows], of_group(weights, group))
    assert d[768:].isnan().all() if psum else (d[768:] == 0).all()


@pytest.fixture
def few_sms() -> Iterator[None]:
    """So few that small products have rounds of whole tiles."""
    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(4)
    try:
        yield
    finally:
        deep_gemm.set_num_sms(before)


def planned() -> set[Fp4Config]:
    return {FP4.config_of(spec, SM90) for spec in engine.planned() if isinstance(spec, Fp4Spec)}


@pytest.fixture
def large_tiles(few_sms: None) -> Iterator[None]:
    yield
    assert planned() == {large()}


@pytest.fixture
def wide_tiles(few_sms: None) -> Iterator[None]:
    yield
    assert planned() == {wide()}


@cuda_only
@of_kinds
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 1022, 1056), (1793, 264, 96), (400, 1152, 2880)])
@pytest.mark.usefixtures("large_tiles")
def test_many_rows(kind: str, m: int, n: int, k: int) -> None:
    weights, (a, values) = drawn(n, k), operand(kind, m, k)
    b = deep_gemm.transform_fp4_weights(*weights, kind)
    close(kind, repeated(kind, "", a, b, (m, n)), values, deep_gemm.dequantise(*weights, dtype=torch.float64))


@cuda_only
@of_kinds
@pytest.mark.usefixtures("large_tiles")
def test_many_rows_of_groups(kind: str) -> None:
    """The second half of a tile may have no rows."""
    test_contiguous(kind, False, 2560, 5)
    test_contiguous(kind, True, 3200, 5)
    test_masked(kind, (500, 500, [500, 0, 128, 129, 1, 300], 1152, 1056))


@cuda_only
@of_kinds
@pytest.mark.usefixtures("wide_tiles")
def test_many_rows_of_small_groups(kind: str) -> None:
    test_contiguous(kind, False, 1024, 8)
    test_contiguous(kind, True, 2048, 8)
    test_masked(kind, (110, 110, [110, 0, 64, 65, 1, 100], 1280, 1056))


@of_kinds
def test_every_exponent(kind: str) -> None:
    """Exponents that span all of float32, one NaN, and weights as checkpoints have them."""
    weights, (a, values) = drawn(2, 320, 1056, low=60, high=190), operand(kind, 2, 70, 1056)
    rows = torch.tensor([70, 9], dtype=torch.int32, device=DEVICE)
    weights[1][1, 7, 3] = 255
    exact = deep_gemm.dequantise(*weights, dtype=torch.float64)
    b = deep_gemm.transform_fp4_weights(*weights, kind)
    assert fp4_weights.is_absolute(b.packed)
    d = repeated(kind, "_masked", a, b, (2, 70, 320), rows, 70)
    assert d[1, :9, 7].isnan().all()
    for group, count in enumerate((70, 9)):
        columns = [column for column in range(320) if (group, column) != (1, 7)]
        close(kind, d[group, :count][:, columns], values[group, :count], exact[group][columns])
    assert torch.equal(
        repeated(kind, "_masked", a, weights, (2, 70, 320), rows, 70).view(torch.int16), d.view(torch.int16)
    )
    for m in (1, 9, 70):
        one = tuple(x[0, :m] for x in a) if kind == "fp8" else a[0, :m]
        close(kind, repeated(kind, "", one, tuple(x[0] for x in weights), (m, 320)), values[0, :m], exact[0])


@of_kinds
def test_both_widths_of_exponents_agree(kind: str) -> None:
    """All codes with all exponents of a span, by a product with the identity: exact."""
    k = 512
    weights = drawn(256, k, low=110, high=126)
    exact = deep_gemm.dequantise(*weights, dtype=torch.float64)
    one = torch.eye(k, device=DEVICE)
    a = one.to(BF16) if kind == "bf16" else (one.to(torch.float8_e4m3fn), torch.ones(k, k // 128, device=DEVICE))
    for absolute in (False, True):
        b = fp4_weights.transform(*weights, kind, absolute)
        for m in (8, 64, k):
            rows = a[:m] if kind == "bf16" else tuple(x[:m] for x in a)
            assert torch.equal(repeated(kind, "", rows, b, (m, 256)).double(), exact.t()[:m])


@of_kinds
def test_constant_weights(kind: str) -> None:
    """They are read before the kernel that writes a has ended."""
    weights = deep_gemm.transform_fp4_weights(*drawn(2112, 7168), kind)
    x = torch.randn(16, 7168, device=DEVICE)
    first = None
    for promised in (False, True):
        if promised:
            deep_gemm.declare_constant(*weights)
        for _ in range(20):
            a = x.to(BF16) if kind == "bf16" else quantize.rows(x)
            d = torch.empty(16, 2112, dtype=BF16, device=DEVICE)
            call(kind, "", a, weights, d)
            first = d if first is None else first
            assert torch.equal(d, first)
    deep_gemm.retract_constant(*weights)


@of_kinds
def test_batch_invariance(kind: str) -> None:
    weights = deep_gemm.transform_fp4_weights(*drawn(1024, 2880), kind)
    x = torch.randn(400, 2880, device=DEVICE)
    deep_gemm.set_batch_invariant(True)
    try:
        whole = torch.empty(400, 1024, dtype=BF16, device=DEVICE)
        call(kind, "", x.to(BF16) if kind == "bf16" else quantize.rows(x), weights, whole)
        for m in (1, 9, 64, 130, 250):
            part = torch.empty(m, 1024, dtype=BF16, device=DEVICE)
            call(kind, "", x[:m].to(BF16) if kind == "bf16" else quantize.rows(x[:m]), weights, part)
            assert torch.equal(part, whole[:m])
    finally:
        deep_gemm.set_batch_invariant(False)


@cuda_only
@of_kinds
@pytest.mark.usefixtures("few_sms")
def test_large_tiles_add_in_the_order_of_few_rows(kind: str) -> None:
    test_batch_invariance(kind)


@cuda_only
@of_kinds
def test_a_graph_reads_the_sizes_that_are_there(kind: str) -> None:
    weights = drawn(4, 1024, 2048)
    b = deep_gemm.transform_fp4_weights(*weights, kind)
    a, values = operand(kind, 4, 24, 2048)
    rows = torch.tensor([24, 24, 24, 24], dtype=torch.int32, device=DEVICE)
    d = torch.empty(4, 24, 1024, dtype=BF16, device=DEVICE)
    call(kind, "_masked", a, b, d, rows, 24)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call(kind, "_masked", a, b, d, rows, 24)
    for counts in ([1, 0, 24, 7], [24, 24, 24, 24], [0, 0, 0, 0], [0, 9, 0, 1]):
        rows.copy_(torch.tensor(counts))
        d.fill_(torch.nan)
        graph.replay()
        for group, count in enumerate(counts):
            assert d[group, count:].isnan().all()
            if count:
                exact = of_group(weights, group)
                close(kind, d[group, :count], values[group, :count], exact)
