"""bf16_gemm and fp16_gemm on a GPU: numbers, bits, memory, graphs, constant weights. Batch invariance, also of FP8."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, busy

import deep_gemm
from deep_gemm import arch, ops, select
from deep_gemm.aot import build
from deep_gemm.kernels.helpers import COPY_ROWS
from deep_gemm.runtime import engine
from deep_gemm.select import calibration
from deep_gemm.spec import CopySpec, GemmSpec
from deep_gemm.testing import (
    assert_close_to_exact,
    assert_half_close_to_exact,
    calc_diff,
    guarded,
    guarded_copy,
    random_operands,
)

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
FORMS = ("nt", "nn", "tn", "tt")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMS = 132


@pytest.fixture(autouse=True)
def switch_off() -> Iterator[None]:
    yield
    deep_gemm.set_batch_invariant(False)


def prepare(specs: Iterable[GemmSpec]) -> None:
    """Build the kernels of these specs in parallel. Calls would build them one after another."""
    if DEVICE == "cpu":
        return
    target, known = arch.for_device(0), calibration.for_device(torch.cuda.get_device_name(0))
    chosen = {(asked, select.rank(asked, target, known)[0].config) for asked in set(specs)}
    work = {engine.kernel_params(asked, config, target) for asked, config in chosen}
    outcomes: list[build.Outcome] = []
    build.build_all(work, outcomes.append)
    assert [str(outcome.error) for outcome in outcomes if outcome.error] == []


def num_sms() -> int:
    return deep_gemm.get_num_sms() if DEVICE == "cuda" else SMS


def function(kind: str, form: str) -> Callable[..., None]:
    found: Callable[..., None] = getattr(deep_gemm, f"{kind}_gemm_{form}")
    return found


def normal(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, columns, device=DEVICE, generator=generator).to(dtype)


def laid_out(x: torch.Tensor, transposed: bool, padded: bool) -> torch.Tensor:
    """x (rows, K) with NaN around it and between its rows, K-major or MN-major. Without padding to 16 bytes it may have
    to be copied."""
    stored = x.t() if transposed else x
    width = stored.shape[1]
    stride = -(-width // 8) * 8 + 8 if padded else width
    return guarded_copy(stored, (stride, 1)).tensor


def pair(form: str, a: torch.Tensor, b: torch.Tensor, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) and b (N, K) in the layouts of a form."""
    return laid_out(a, form[0] == "t", padded), laid_out(b, form[1] == "n", padded)


def majors(form: str) -> Any:
    return ("mn" if form[0] == "t" else "k"), ("mn" if form[1] == "n" else "k")


def random_shape(rng: random.Random) -> tuple[int, int, int]:
    return rng.choice([1, 2, rng.randint(3, 64), rng.randint(65, 300)]), rng.randint(8, 3000), rng.randint(1, 600)


ACCUMULATIONS = ("none", "in place", "from c")


@pytest.mark.parametrize("accumulate", ACCUMULATIONS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
def test_products(kind: str, wide: bool, accumulate: Any) -> None:
    """Results of each layout are within the bound; nothing outside is read or written. All layouts have the same bits
    as long as K is summed in one order."""
    dtype = DTYPES[kind]
    out = torch.float32 if wide else dtype
    rng = random.Random(f"{kind} {wide} {accumulate}")
    shapes = [random_shape(rng) for _ in range(3)] + [(rng.randint(1, 300), 8 * rng.randint(1, 200), 16 * 37)]
    op, output = f"{kind}_gemm_nt", "f32" if wide else None
    prepare(
        ops.spec(m, n, k, num_sms(), op, majors=majors(form), output=output, accumulate=accumulate, aligned=aligned)
        for m, n, k in shapes
        for form in FORMS
        for aligned in ({False, n % (4 if wide else 8) == 0})
    )
    for index, (m, n, k) in enumerate(shapes):
        a, b, c = normal(m, k, dtype, index), normal(n, k, dtype, index + 100), normal(m, n, out, index + 200)
        added = None if accumulate == "none" else c
        first: dict[bool, torch.Tensor] = {}
        for invariant in (False, True):
            deep_gemm.set_batch_invariant(invariant)
            for form in FORMS:
                d = guarded((m, n), out, DEVICE, (-(-n // 8) * 8 + 8 * (index % 2), 1), 0 if index % 3 else 4)
                if accumulate == "in place":
                    d.tensor.copy_(c)
                given = {"none": None, "in place": d.tensor, "from c": c}[accumulate]
                function(kind, form)(*pair(form, a, b, padded=index % 2 == 0), d.tensor, given)
                what = f"{form} {m} x {n} x {k}, invariant {invariant}"
                d.check(what)
                assert_half_close_to_exact(d.tensor, a, b, added)
                if invariant:
                    assert torch.equal(d.tensor, first.setdefault(True, d.tensor)), what


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DTYPES)
def test_the_identity_picks_rows(kind: str, form: str) -> None:
    """The result is the other operand, exactly: a wrong descriptor, step of K or row shows."""
    dtype = DTYPES[kind]
    for k, n in ((16, 24), (64, 64), (200, 136), (333, 257)):
        eye = torch.eye(k, device=DEVICE, dtype=dtype)
        other = normal(n, k, dtype, k)
        d = torch.full((k, n), float("nan"), device=DEVICE, dtype=dtype)
        function(kind, form)(*pair(form, eye, other, padded=True), d)
        assert torch.equal(d, other.t()), f"K = {k}, the identity as a"
        d = torch.full((n, k), float("nan"), device=DEVICE, dtype=dtype)
        function(kind, form)(*pair(form, other, eye, padded=True), d)
        assert torch.equal(d, other), f"K = {k}, the identity as b"
        # Each step of 16 of K alone, with few tokens, where K may be split.
        for start in range(0, k, 16):
            rows = eye[start : start + 16]
            d = torch.full((len(rows), n), float("nan"), device=DEVICE, dtype=dtype)
            function(kind, form)(*pair(form, rows, other, padded=True), d)
            assert torch.equal(d, other.t()[start : start + 16]), f"K = {k}, the step at {start}"


@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 7168), (64, 2112, 1040), (300, 1000, 512)])
def test_twenty_runs_agree_bit_for_bit(m: int, n: int, k: int) -> None:
    a, b = normal(m, k, torch.bfloat16, 1), normal(n, k, torch.bfloat16, 2)
    found = [torch.full((m, n), float("nan"), device=DEVICE, dtype=torch.bfloat16) for _ in range(20)]
    for d in found:
        deep_gemm.bf16_gemm_nt(a, b, d)
    assert all(torch.equal(d, found[0]) for d in found)
    assert calc_diff(found[0], a.double() @ b.double().t()) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_row_or_column(form: str) -> None:
    m, n, k = 150, 300, 200
    a, b = normal(m, k, torch.bfloat16, 1), normal(n, k, torch.bfloat16, 2)

    def call() -> torch.Tensor:
        d = torch.zeros(m, n, device=DEVICE, dtype=torch.bfloat16)
        function("bf16", form)(*pair(form, a, b, padded=True), d)
        return d

    clean = call()
    a[77, 199], b[299, 0] = float("nan"), float("inf")
    d = call()
    assert not bool(d[77].isfinite().any())
    assert not bool(d[:, 299].isfinite().any())
    d[77], d[:, 299] = clean[77], clean[:, 299]
    assert torch.equal(d, clean)


SPLITS = 150


def splits(total: int, seed: int) -> list[slice]:
    """Parts of a batch: one row, few rows, most rows."""
    rng = random.Random(seed)
    found = []
    for _ in range(SPLITS):
        size = min(total, rng.choice([1, rng.randint(1, 16), rng.randint(17, 128), rng.randint(129, total)]))
        start = rng.randint(0, total - size)
        found.append(slice(start, start + size))
    return found


@pytest.mark.parametrize(("n", "k"), [(576, 7168), (2112, 1024), (1096, 2064), (2816, 640)])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(kind: str, n: int, k: int) -> None:
    """The switch is set around each call, as SGLang does."""
    total = 600
    parts = splits(total, n)
    deep_gemm.set_batch_invariant(True)
    sizes = {part.stop - part.start for part in parts} | {total}
    prepare(ops.spec(m, n, k, num_sms(), f"{kind}_gemm_nt") for m in sizes)
    deep_gemm.set_batch_invariant(False)
    (a, sfa), b, x, y = random_operands(total, n, k, DEVICE)

    def call(rows: slice) -> torch.Tensor:
        d = torch.empty(rows.stop - rows.start, n, device=DEVICE, dtype=torch.bfloat16)
        deep_gemm.use_deterministic_algorithms(True)
        if kind == "fp8":
            deep_gemm.fp8_gemm_nt((a[rows], sfa[rows]), b, d)
        else:
            deep_gemm.bf16_gemm_nt(x[rows], y, d)
        deep_gemm.use_deterministic_algorithms(False)
        return d

    whole = call(slice(0, total))
    if kind == "fp8":
        assert_close_to_exact(whole, a, sfa, *b)
    else:
        assert_half_close_to_exact(whole, x, y)
    differ = [part for part in parts if not torch.equal(call(part), whole[part])]
    assert differ == []


@cuda_only
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("form", ["nt", "tn"])
def test_capture_and_replay(form: str, padded: bool) -> None:
    """c is d. An operand without padding is copied inside the graph."""
    m, n, k = 60, 264, 203
    operands = [(normal(m, k, torch.bfloat16, seed), normal(n, k, torch.bfloat16, seed + 9)) for seed in (1, 2)]
    a, b = pair(form, *operands[0], padded)
    d = torch.zeros(m, n, device=DEVICE)
    call = function("bf16", form)
    call(a, b, d, d)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            call(a, b, d, d)
    for x, y in operands:
        a.copy_(x.t() if form[0] == "t" else x)
        b.copy_(y.t() if form[1] == "n" else y)
        d.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert calc_diff(d, 2 * (x.double() @ y.double().t())) < 1e-10


@pytest.mark.parametrize("offset", [0, 2])
def test_promised_weights(offset: int) -> None:
    """Also if weights are copied first: the GEMM must not read the copy before it is complete."""
    m, n, k = 16, 576, 1024
    x, y = normal(m, k, torch.bfloat16, 1), normal(n, k, torch.bfloat16, 2)
    weights = guarded_copy(y, (k, 1), offset).tensor
    plain = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(x, weights, plain)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    deep_gemm.declare_constant(weights)
    try:
        found = [torch.zeros(m, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(30)]
        busy()
        for d in found:
            a = x.clone()  # the previous kernel writes the tokens
            deep_gemm.bf16_gemm_nt(a, weights, d)
        assert all(torch.equal(d, plain) for d in found)
    finally:
        deep_gemm.retract_constant(weights)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_cublaslt(form: str, dtype: torch.dtype) -> None:
    """FP8 only in the form nt, as torch supports it."""
    m, n, k = 48, 64, 96
    a, b = normal(m, k, torch.float32, 1).to(dtype), normal(n, k, torch.float32, 2).to(dtype)
    fp8 = dtype == torch.float8_e4m3fn
    for out in (torch.bfloat16 if fp8 else dtype, torch.float32):
        c = normal(m, n, out, 3)
        for added in (None, "d", c):
            d = c.clone()
            given = (a.t() if form[0] == "t" else a), (b.t() if form[1] == "n" else b)
            expected = a.double() @ b.double().t() + (0.0 if added is None else c.double())
            deep_gemm_call = function("cublaslt", form)
            deep_gemm_call(*given, d, d if added == "d" else added)
            assert calc_diff(d, expected) < (1e-3 if fp8 else 1e-5)


@cuda_only
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 64), (65, 63), (300, 1000), (3, 40000), (40000, 5), (129, 8), (9000, 12000)]
)
@pytest.mark.parametrize("way", ["rows", "columns", "sparse", "expanded"])
def test_copied_rows(rows: int, columns: int, way: str) -> None:
    """Every bit is right, with any strides, and padding is zero. The last case has more tiles than the grid has
    CTAs."""
    strides = {"columns": (1, rows + 3), "sparse": (2 * columns + 1, 2)}.get(way, (columns, 1))
    own = 1 if way == "expanded" else rows
    bits = torch.randint(-(1 << 15), 1 << 15, (own, columns), dtype=torch.int16, device=DEVICE)
    source = guarded_copy(bits.view(torch.bfloat16), strides, offset=2).tensor.expand(rows, columns)
    spec = CopySpec(rows, columns)
    target = guarded((rows, spec.padded_columns), torch.bfloat16, DEVICE)
    device = torch.cuda.current_device()
    plan = engine.plan(spec, device)
    (params,) = COPY_ROWS.cases()
    most = COPY_ROWS.launch_plan(params, CopySpec(9000, 12000), {"source": (12000, 1)}).shape.grid[0]
    assert most < -(-9000 // 64) * -(-12000 // 64)
    addresses = {"source": source.data_ptr(), "target": target.tensor.data_ptr()}
    engine.launch_record(plan, {"source": source.stride()}, addresses, engine.raw_stream(device))()
    torch.cuda.synchronize()
    target.check("the copy")
    found = target.tensor.view(torch.int16)
    assert torch.equal(found[:, :columns], bits.expand(rows, columns))
    assert not found[:, columns:].any()
