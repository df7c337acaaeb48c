"""Epilogues on a GPU: each family's kernels, launched directly; and calls, against the same steps one by one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from built import built, kernels_of
from chosen import entry
from forced import ALPHA, DTYPES, compiled, fits, force_gemm, load, mn_major, nvrtc, scaling_of
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm import Epilogue
from deep_gemm.arch import SM90
from deep_gemm.jit import Binary, Builder
from deep_gemm.kernels.epilogues import parse
from deep_gemm.kernels.families import GEMMS
from deep_gemm.ops.reference import ACTIVATIONS, Finish, Scalings, exact_product
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import align, ceil_div
from deep_gemm.testing import guarded, guarded_copy

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16, F32 = torch.bfloat16, torch.float32
TEXTS = ("bias:f32+gelu", "alpha+rows+bias:bf16+silu+residual", "alpha+rows+bias:f32+relu+residual", "bias:f16+relu2")
"""Of families' cases; and two whose results are exact for these operands."""
CASES = [
    family.case(family.configs(SM90)[place], store=store, epilogue=text)
    for family in GEMMS
    if family.has_epilogues and family.groupings == ("none",)
    for at, store in enumerate(("tma",) if family.aligned_d else ("tma", "direct"))
    for place in (0, -1)
    for text in TEXTS[(at + place) % 2 :: 2]
]
"""Each text with each family and store, with its first config or its last one."""
SHAPES = [(200, 520, 656, 8), (37, 264, 128, 132), (1, 8, 16, 132)]
ODD_SHAPES = [(100, 333, 400, 8), (1, 1, 128, 132)]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small, so that sums are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)


def powers(*shape: int, seed: int) -> torch.Tensor:
    return torch.exp2(integers(*shape, seed=seed) / 2 // 1)


def fp8_scales(rows: int, k: int, kind: str, seed: int) -> torch.Tensor:
    if kind == "1x128":
        return mn_major(powers(rows, ceil_div(k, 128), seed=seed))
    shape = (ceil_div(rows, 128), ceil_div(k, 128)) if kind == "128x128" else (rows, 1)
    return powers(*shape, seed=seed)


def product(dtype: str, m: int, n: int, k: int, scaling: Scalings) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Operands, and the exact product in float64."""
    a, b = integers(m, k, seed=1), integers(n, k, seed=2)
    if dtype != "e4m3":
        return {"a": a.to(DTYPES[dtype]), "b": b.to(DTYPES[dtype])}, a.double() @ b.double().t()
    x, y = (each.to(torch.float8_e4m3fn) for each in (a, b))
    sfa, sfb = (fp8_scales(rows, k, kind, at) for at, (rows, kind) in enumerate(zip((m, n), scaling, strict=True)))
    return {"a": x, "sfa": sfa, "b": y, "sfb": sfb}, exact_product(x, sfa, y, sfb, scaling=scaling)


def vectors(text: str, m: int, n: int, out: torch.dtype, padding: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of an epilogue; those that are not asked for are left out."""
    parts = parse(text)
    found = {
        "row_factor": powers(m, seed=3),
        "bias": integers(n, seed=4).to(DTYPES.get(parts.bias, F32)),
        "residual": guarded_copy(integers(m, n, seed=5).to(out), (align(n, 8) + padding, 1)).tensor,
    }
    return {name: found[name] for name in parts.tensors}


def assert_close(found: torch.Tensor, wanted: torch.Tensor, activation: str) -> None:
    """Equal if all steps are exact, and within a rounding otherwise."""
    if activation in ("", "relu", "relu2"):
        assert torch.equal(found, wanted.to(found.dtype))
        return
    u = {BF16: 2.0**-8, torch.float16: 2.0**-11, F32: 2.0**-17}[found.dtype]
    assert ((found.double() - wanted.double()).abs() <= u * wanted.double().abs() + 2**-14).all()


Binaries = dict[KernelParams, Future[Binary]]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    builder = Builder(tmp_path_factory.mktemp("kernels"), nvrtc())
    with compiled((params, builder, params) for params in CASES) as found:
        yield found


@cuda_only
@pytest.mark.parametrize("params", CASES, ids=entry)
def test_every_family_finishes_its_sums(params: KernelParams, binaries: Binaries) -> None:
    """Tiles that cross the edge of D, and several tiles of a CTA; nothing outside of D is written, and what lies around
    the epilogue's tensors is NaN."""
    function = load(params, binaries[params].result())
    out, parts = DTYPES[params.output], parse(params.epilogue)
    for m, n, k, sms in SHAPES if params.store == "tma" else ODD_SHAPES:
        if params.dtype != "e4m3" and not fits(params, m, n, k, sms):
            continue
        tensors, exact = product(params.dtype, m, n, k, scaling_of(params))
        more = vectors(params.epilogue, m, n, out, 8 if params.store == "tma" else 1)
        d = guarded((m, n), out, DEVICE, (align(n, 8) + 8, 1) if params.store == "tma" else None)
        stream = engine.raw_stream(torch.cuda.current_device())
        force_gemm(params, function, {**tensors, **more, "d": d.tensor}, sms, stream)()
        torch.cuda.synchronize()
        d.check(f"d, {m} x {n} x {k}")
        finish = Finish(parts.activation, ALPHA if parts.alpha else 1.0, **more)
        assert_close(d.tensor, finish(exact, (slice(None), slice(None))), parts.activation)


OPERATIONS: dict[str, tuple[Callable[..., None], str, Scalings]] = {
    "fp8": (deep_gemm.fp8_gemm_nt, "e4m3", ("1x128", "128x128")),
    "rows": (deep_gemm.fp8_gemm_nt, "e4m3", ("row", "row")),
    "1d1d": (deep_gemm.fp8_gemm_nt, "e4m3", ("1x128", "1x128")),
    "bf16": (deep_gemm.bf16_gemm_nt, "bf16", ("none", "none")),
    "fp16": (deep_gemm.fp16_gemm_nt, "f16", ("none", "none")),
}
OUTPUTS = {
    "fp8": (BF16, F32, torch.float16),
    "rows": (BF16, F32),
    "1d1d": (F32,),
    "bf16": (BF16, F32),
    "fp16": (torch.float16,),
}


def call(kind: str, tensors: dict[str, torch.Tensor], d: torch.Tensor, c: torch.Tensor | None, **options: Any) -> None:
    function, dtype, _ = OPERATIONS[kind]
    if dtype != "e4m3":
        function(tensors["a"], tensors["b"], d, c, **options)
        return
    recipe = (1, 1, 128) if kind == "1d1d" else None
    sfb = tensors["sfb"]
    function((tensors["a"], tensors["sfa"]), (tensors["b"], sfb), d, c, recipe, **options)


ADDED = ("", "c", "d")


def steps(kind: str, added: str) -> Iterator[Callable[[], tuple[torch.Tensor, torch.Tensor, str]]]:
    """Calls for all outputs; few rows, many, and rows of D that TMA cannot store; with all activations. Each returns d,
    what it should be, and the activation."""

    def step(out: torch.dtype, m: int, n: int, k: int, activation: str) -> tuple[torch.Tensor, torch.Tensor, str]:
        _, dtype, scaling = OPERATIONS[kind]
        tensors, exact = product(dtype, m, n, k, scaling)
        more, d = vectors("rows+bias:f32+residual", m, n, out), integers(m, n, seed=6).to(out)
        c = {"": None, "c": integers(m, n, seed=7).to(out), "d": d}[added]
        finish = Finish(activation, 0.5, **more)
        wanted = finish(exact, (slice(None), slice(None)), None if c is None else c.clone())
        call(kind, tensors, d, c, epilogue=Epilogue(activation=activation or None, alpha=0.5, **more))
        return d, wanted, activation

    sizes = ((1, 128, 256), (33, 1024, 1152), (300, 520, 656), (70, 257, 384))
    for out, (at, size) in itertools.product(OUTPUTS[kind], enumerate(sizes, ADDED.index(added))):
        yield functools.partial(step, out, *size, ("", "relu", "gelu")[at % 3])


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_calls_are_the_same_steps_one_by_one(kind: str, added: str) -> None:
    """Cold, warm and replayed."""
    for step in steps(kind, added):
        for _ in range(3):
            assert_close(*step())


def edges(name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Sums, each of which is one bfloat16 value; and d, which has them in all columns. Many rows, and few."""
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 88.0, -88.0, 1e-38, -1e-38], device=DEVICE
    )
    values = torch.cat([special, torch.linspace(-20, 20, 500, device=DEVICE)]).bfloat16()
    a, b = torch.zeros(values.numel(), 64, device=DEVICE).bfloat16(), torch.ones(136, 64, device=DEVICE).bfloat16()
    a[:, 0] = values
    for m in (values.numel(), 16):
        d = torch.empty(m, 136, device=DEVICE)
        deep_gemm.bf16_gemm_nt(a[:m], b, d, epilogue=Epilogue(activation=name))
        yield values[:m].double(), d


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_at_their_edges(name: str) -> None:
    """NaN and infinity stay in their row."""
    for values, d in edges(name):
        assert torch.equal(d, d[:, :1].expand_as(d).clone()) or d[:, 0].isnan().any()
        wanted, least = ACTIVATIONS[name](values), 2.0**-20 if "gelu" in name else 2.0**-48
        torch.testing.assert_close(d[:, 0].double(), wanted, rtol=2**-15, atol=least, equal_nan=True)


def with_a_nan() -> torch.Tensor:
    a, b = (torch.randn(rows, 256, device=DEVICE).bfloat16() for rows in (200, 256))
    bias = torch.zeros(256, device=DEVICE)
    bias[77] = float("nan")
    d = torch.empty(200, 256, device=DEVICE, dtype=BF16)
    deep_gemm.bf16_gemm_nt(a, b, d, epilogue=Epilogue(bias, "silu"))
    return d


def test_a_bias_of_nan_reaches_one_column() -> None:
    assert with_a_nan().isnan().sum(0).tolist() == [200 * (column == 77) for column in range(256)]


def before_a_graph(kind: str) -> tuple[Callable[[], None], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A call that was made once, its epilogue's tensors, the exact product, and d."""
    _, dtype, scaling = OPERATIONS[kind]
    tensors, exact = product(dtype, 64, 256, 512, scaling)
    more, d = vectors("rows+bias:f32+residual", 64, 256, BF16), torch.empty(64, 256, device=DEVICE, dtype=BF16)
    made = functools.partial(call, kind, tensors, d, None, epilogue=Epilogue(activation="relu", **more))
    made()
    return made, more, exact, d


KINDS = ("fp8", "bf16")


@cuda_only
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_reads_the_tensors_when_it_runs(kind: str) -> None:
    made, more, exact, d = before_a_graph(kind)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made()
    for factor in (2.0, 4.0):
        for tensor in more.values():
            tensor.mul_(factor)
        graph.replay()
        assert_close(d, Finish("relu", **more)(exact, (slice(None), slice(None))), "relu")


def by_rows(kind: str) -> list[torch.Tensor]:
    """Results of many rows, and of the first of them."""
    m, n, k = 300, 520, 1024
    x, y = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    epilogue = functools.partial(Epilogue, torch.randn(n, device=DEVICE), "gelu")
    deep_gemm.set_batch_invariant(True)
    try:
        found = []
        for rows in (m, 100, 17, 1):
            d = torch.empty(rows, n, device=DEVICE, dtype=BF16)
            if kind == "fp8":
                pairs = deep_gemm.per_token_cast_to_fp8(x[:rows], False), deep_gemm.per_block_cast_to_fp8(y, False)
                deep_gemm.fp8_gemm_nt(*pairs, d, epilogue=epilogue())
            else:
                deep_gemm.bf16_gemm_nt(x[:rows].bfloat16(), y.bfloat16(), d, epilogue=epilogue())
            found.append(d)
    finally:
        deep_gemm.set_batch_invariant(False)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_m_is(kind: str) -> None:
    found = by_rows(kind)
    assert all(torch.equal(each, found[0][: each.shape[0]]) for each in found)


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    calls: list[Callable[[], object]] = [with_a_nan]
    for kind, added in itertools.product(OPERATIONS, ADDED):
        calls += steps(kind, added)
    calls += [lambda name=name: list(edges(name)) for name in ACTIVATIONS]  # type: ignore[misc]
    calls += [functools.partial(each, kind) for each, kind in itertools.product((before_a_graph, by_rows), KINDS)]
    with built(kernels_of(calls)):
        yield
