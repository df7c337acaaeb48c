"""SwiGLU on a GPU: every config, launched directly; and calls, against the steps one by one on a float32 product."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from built import built, kernels_of
from chosen import kernel_name
from forced import ALPHA, DTYPES, compiled, fits, force_gemm, load, nvrtc
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm import Epilogue, quantize
from deep_gemm.arch import SM90
from deep_gemm.jit import Binary, Builder
from deep_gemm.kernels.hopper.gated import FP8_GATED
from deep_gemm.ops.reference import Finish
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts
from deep_gemm.runtime import engine
from deep_gemm.spec import SCALE_BLOCK, align
from deep_gemm.testing import guarded

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]
TEXTS = {
    "bf16": ("swiglu", "alpha+rows+bias:bf16+swiglu+clamp:2.0"),
    "f32": ("bias:f32+swiglu",),
    "f16": ("swiglu+clamp:0.5",),
    "e4m3": ("swiglu+fp8", "rows+bias:f32+swiglu+clamp:2.0+fp8", "alpha+swiglu+fp8:ue8m0"),
}
CASES = [
    FP8_GATED.case(config, output=output, epilogue=text)
    for config in FP8_GATED.configs(SM90)
    for output, texts in TEXTS.items()
    for text in texts
]
CASES = [params for params in CASES if fits(params, 256, 1024, 512, 132)]
SHAPES = [(200, 384, 656, 8), (37, 128, 128, 132), (1, 256, 16, 132), (520, 640, 1152, 132)]
"""M, columns of D, K, SMs: tiles that cross the edge of D, and several tiles of a CTA."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def factors(parts: Parts, m: int, n: int) -> dict[str, torch.Tensor]:
    """The tensors of an epilogue, without scales."""
    found = {"row_factor": random(m, seed=3), "bias": random(n, seed=4).to(DTYPES.get(parts.bias, F32))}
    return {name: found[name] for name in parts.tensors if name in found}


def operands(m: int, columns: int, k: int, spread: float = 8.0) -> tuple[Pair, Pair, torch.Tensor]:
    """a, b and the product in float64. Sums are about 1, or ``8 / spread``."""
    a, b = random(m, k, seed=1), random(2 * columns, k, seed=2) / k**0.5 * 8 / spread
    x, y = quantize.rows(a), quantize.blocks(b)
    exact = deep_gemm.dequantise(*x, dtype=torch.float64) @ deep_gemm.dequantise(*y, (128, 128), torch.float64).t()
    return x, y, exact


def cast_of(pair: Pair) -> torch.Tensor:
    return deep_gemm.dequantise(*pair, dtype=torch.float64)


def slack(exact: torch.Tensor, alpha: float, more: dict[str, torch.Tensor]) -> torch.Tensor:
    """What errors of the two sums, which FP8 tensor cores keep to some 13 bits, can change in their product."""
    gate, up = (alpha * exact + more.get("bias", torch.zeros(1, device=exact.device)).double()).abs().chunk(2, 1)
    return (
        2**-10 * (1.1 * up + gate) * more.get("row_factor", torch.ones(len(exact), device=exact.device)).abs()[:, None]
    )


def assert_close(found: torch.Tensor, wanted: torch.Tensor, half_unit: float, slack: torch.Tensor) -> None:
    """Within a rounding of D, and ``slack``."""
    error = (found.double() - wanted.double()).abs()
    assert bool((error <= half_unit * wanted.double().abs() + slack).all()), (error - slack).max()


HALF_UNIT = {"bf16": 2.0**-8, "f16": 2.0**-10, "f32": 2.0**-12}
Binaries = dict[KernelParams, Future[Binary]]


@pytest.fixture(scope="module")
def binaries(kernels_root: Path) -> Iterator[Binaries]:
    builder = Builder(kernels_root, nvrtc())
    with compiled((params, builder, params) for params in CASES) as found:
        yield found


@cuda_only
@pytest.mark.parametrize("params", CASES, ids=kernel_name)
def test_every_config(params: KernelParams, binaries: Binaries) -> None:
    """Nothing outside of D and its scales is written."""
    function, parts = load(params, binaries[params].result()), params.epilogue
    dtype = E4M3 if params.output == "e4m3" else DTYPES[params.output]
    for m, columns, k, sms in SHAPES:
        (x, sfx), (y, sfy), exact = operands(m, columns, k)
        more = factors(params.epilogue, m, 2 * columns)
        d = guarded((m, columns), dtype, DEVICE, (columns + 16, 1))
        sfd = guarded((m, columns // SCALE_BLOCK), F32, DEVICE, (1, align(m, 4) + 4))
        given = {"a": x, "sfa": sfx, "b": y, "sfb": sfy, "d": d.tensor, **more}
        stream = engine.raw_stream(torch.cuda.current_device())
        force_gemm(params, function, given | ({"sfd": sfd.tensor} if parts.cast else {}), sms, stream)()
        torch.cuda.synchronize()
        d.check(f"d, {m} x {columns} x {k}")
        sfd.check(f"scales of d, {m} x {columns} x {k}")
        alpha = ALPHA if parts.alpha else 1.0
        finish = Finish(parts.activation, alpha, clamp=parts.clamp, **more)  # type: ignore[arg-type]
        wanted = finish(exact, (slice(None), slice(None)))
        if parts.cast:
            values = cast_of((d.tensor, sfd.tensor))
            largest = wanted.abs().unflatten(1, (-1, SCALE_BLOCK)).amax(2).repeat_interleave(SCALE_BLOCK, 1)
            error = (values - wanted).abs()
            allowed = wanted.abs() / 15 + largest / 2**15 + slack(exact, alpha, more)
            assert bool((error <= allowed).all()), error.max()
            if parts.cast == "ue8m0":
                assert torch.equal(sfd.tensor, torch.exp2(torch.log2(sfd.tensor).round()))
        else:
            assert_close(d.tensor, wanted, HALF_UNIT[params.output], slack(exact, alpha, more))


CALLS: dict[str, tuple[Callable[..., None], torch.dtype]] = {
    "fp8": (deep_gemm.fp8_gemm_nt, BF16),
    "bf16": (deep_gemm.bf16_gemm_nt, BF16),
    "fp16": (deep_gemm.fp16_gemm_nt, torch.float16),
}
"""Functions by the kind of operands, and the dtype of their 16-bit results."""


def swiglu(
    kind: str, m: int, columns: int, k: int, **parts: object
) -> tuple[torch.Tensor, torch.Tensor, Pair, torch.Tensor]:
    """Results of calls: float32, 16 bits, FP8; and the float32 product."""
    multiply, half = CALLS[kind]
    x, y = operands(m, columns, k)[:2]
    if kind != "fp8":
        x, y = random(m, k, seed=1).to(half), (random(2 * columns, k, seed=2) / k**0.5).to(half)  # type: ignore[assignment]
    found = [torch.empty(m, columns, device=DEVICE, dtype=dtype) for dtype in (F32, half)]
    cast = quantize.rows(torch.zeros(m, columns, device=DEVICE))
    product = torch.empty(m, 2 * columns, device=DEVICE)
    deep_gemm.set_batch_invariant(True)
    try:
        for d in (*found, cast):
            use_ue8m0 = {"use_ue8m0": True} if parts.get("use_ue8m0") and isinstance(d, tuple) else {}
            given = {name: each for name, each in parts.items() if name != "use_ue8m0"}
            multiply(x, y, d, epilogue=Epilogue(activation="swiglu", **given, **use_ue8m0))  # type: ignore[arg-type]
        multiply(x, y, product)
    finally:
        deep_gemm.set_batch_invariant(False)
    return found[0], found[1], cast, product


PARTS: dict[str, dict[str, object]] = {
    "plain": {},
    "all": {"alpha": 0.5, "clamp": 1.5},
    "powers of two": {"use_ue8m0": True},
    "interleaved": {"interleaved": True},
}
SIZES = ((1, 128, 256), (33, 1024, 1008), (300, 512, 656))


def parts_of(name: str, m: int, columns: int) -> dict[str, object]:
    more = {"bias": random(2 * columns, seed=5), "row_factor": random(m, seed=6)} if name == "all" else {}
    return PARTS[name] | more


def results(kind: str, name: str) -> list[tuple[torch.Tensor, torch.Tensor, Pair, torch.Tensor]]:
    return [swiglu(kind, *size, **parts_of(name, *size[:2])) for size in SIZES]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", CALLS)
def test_fp8_bytes_are_the_cast_of_the_float32_result(kind: str, name: str) -> None:
    """Bit for bit, and so are 16 bits its rounding. Cold, warm and replayed."""
    for _ in range(3):
        for size, (exact, half, cast, product) in zip(SIZES, results(kind, name), strict=True):
            parts = parts_of(name, *size[:2])
            wanted = quantize.rows(exact, use_ue8m0=bool(parts.pop("use_ue8m0", False)))
            assert torch.equal(cast[0].view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(cast[1], wanted[1])
            assert torch.equal(half, exact.to(half.dtype))
            finish = Finish("swiglu", **parts)  # type: ignore[arg-type]
            torch.testing.assert_close(exact, finish(product, (slice(None), slice(None))), rtol=2**-17, atol=2**-40)


SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 88.0, -88.0, 1e-30, -1e-30, 448.0, 3e4)


def narrow() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """16-bit results whose columns end inside a tile, and what they should be; nothing else is written."""
    for m, columns, k in ((1, 8, 64), (70, 200, 264), (300, 136, 128)):
        x, y = (random(rows, k, seed=rows).bfloat16() for rows in (m, 2 * columns))
        bias, d = random(2 * columns, seed=9), guarded((m, columns), F32, DEVICE, (columns + 4, 1))
        deep_gemm.bf16_gemm_nt(x, y, d.tensor, epilogue=Epilogue(bias, "swiglu", alpha=0.125))
        d.check(f"d, {m} x {columns} x {k}")
        finish = Finish("swiglu", 0.125, bias=bias)
        yield d.tensor, finish(x.double() @ y.double().t(), (slice(None), slice(None)))


def test_columns_may_end_inside_a_tile() -> None:
    for d, wanted in narrow():
        torch.testing.assert_close(d, wanted, rtol=2**-12, atol=2**-14)


def edges() -> tuple[torch.Tensor, Pair, torch.Tensor]:
    """Rows whose gate is a special value in column 5, and whose up is 1; d, its cast, and the values."""
    values, columns = torch.tensor(SPECIAL, device=DEVICE), 128
    rows = len(SPECIAL)
    a = torch.zeros(rows, 128, device=DEVICE)
    a[:, 0] = 1.0
    x = a.to(E4M3), torch.ones(rows, 1, device=DEVICE)
    y = torch.zeros(2 * columns, 128, device=DEVICE)
    y[columns:, 0] = 1.0
    weights = y.to(E4M3), torch.ones(2, 1, device=DEVICE)
    bias = torch.zeros(2 * columns, device=DEVICE)
    found, casts = [], []
    for value in values:  # gate is 0, and the bias makes one column of it special
        bias = torch.zeros(2 * columns, device=DEVICE)
        bias[5] = value
        d = torch.empty(rows, columns, device=DEVICE)
        cast = quantize.rows(torch.zeros(rows, columns, device=DEVICE))
        for out in (d, cast):
            deep_gemm.fp8_gemm_nt(x, weights, out, epilogue=Epilogue(bias, "swiglu"))
        found.append(d[0])
        casts.append((cast[0].view(torch.uint8)[0], cast[1][0]))
    both = torch.stack([each for each, _ in casts]), torch.stack([each for _, each in casts])
    return torch.stack(found), both, values


def test_special_values_stay_in_their_place() -> None:
    """NaN, infinities and zeros in one gate: other elements are zeros, and bytes are those of the cast. A row of zeros
    has the scale of the least magnitude, not of zero."""
    d, (cast, scales), values = edges()
    wanted = torch.nn.functional.silu(values)
    torch.testing.assert_close(d[:, 5], wanted, rtol=2**-18, atol=2**-119, equal_nan=True)
    others = torch.arange(128, device=DEVICE) != 5
    assert bool((d[:, others] == 0).all())
    again, sf = quantize.rows(d)
    assert torch.equal(cast, again.view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), sf.contiguous().view(torch.int32))
    assert scales[0].item() == pytest.approx(1e-4 / 448)


def by_rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """FP8 results of many rows, and of the first of them."""
    found = []
    x, w = random(300, 1024, seed=7), quantize.blocks(random(512, 1024, seed=8))
    for rows in (300, 129, 17, 1):
        cast = quantize.rows(torch.zeros(rows, 256, device=DEVICE))
        deep_gemm.fp8_gemm_nt(quantize.rows(x[:rows]), w, cast, epilogue=Epilogue(activation="swiglu"))
        found.append((cast[0].view(torch.uint8), cast[1]))
    return found


def test_a_row_has_the_same_bits_whatever_m_is() -> None:
    (values, scales), *fewer = by_rows()
    for some, sf in fewer:
        assert torch.equal(some, values[: some.shape[0]])
        assert torch.equal(sf, scales[: sf.shape[0]])


def before_a_graph() -> tuple[Callable[[], None], torch.Tensor, Pair]:
    """A call that was made once, its factors of rows, and d."""
    x, y, _ = operands(64, 256, 512)
    each, cast = torch.ones(64, device=DEVICE), quantize.rows(torch.zeros(64, 256, device=DEVICE))
    epilogue = Epilogue(activation="swiglu", row_factor=each)

    def call() -> None:
        deep_gemm.fp8_gemm_nt(x, y, cast, epilogue=epilogue)

    call()
    return call, each, cast


@cuda_only
def test_a_graph_reads_the_factors_when_it_runs() -> None:
    call, each, (values, scales) = before_a_graph()
    before = values.view(torch.uint8).clone(), scales.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    each.fill_(2.0)
    values.view(torch.uint8).zero_()
    graph.replay()
    assert torch.equal(values.view(torch.uint8), before[0])
    assert torch.equal(scales, 2 * before[1])


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    calls: list[Callable[[], object]] = [functools.partial(results, kind, name) for kind in CALLS for name in PARTS]
    with built(kernels_of([*calls, lambda: list(narrow()), edges, by_rows, before_a_graph])):
        yield
