"""Epilogues on a GPU: each family's kernels, launched directly; and calls, against the same steps one by one."""

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from built import built, kernels_of
from chosen import kernel_name
from epilogue_runs import EXPRESSIONS, TEXTS, assert_close, check, integers, product, vectors
from forced import compiled, load, nvrtc
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm import Epilogue, ops, quantize
from deep_gemm.arch import SM90
from deep_gemm.jit import Binary, Builder
from deep_gemm.kernels.families import FP8_SCALED, GEMMS
from deep_gemm.ops.reference import ACTIVATIONS, Finish, Scalings
from deep_gemm.params import KernelParams
from deep_gemm.parts import parse
from deep_gemm.spec import SCALINGS

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16, F32 = torch.bfloat16, torch.float32
CASES = [
    family.case(family.configs(SM90)[place], store=store, epilogue=text)
    for family in GEMMS
    if family.has_epilogues and family.groupings == ("none",) and SM90.name in family.archs
    for at, store in enumerate(("tma",) if family.aligned_d else ("tma", "direct"))
    for place in (0, -1)
    for text in (*TEXTS[(at + place) % 2 :: 2], list(EXPRESSIONS)[place])
]
"""Each text with each family and store, with its first config or its last one."""
CAST_TEXTS = ("rows+bias:f32+relu+fp8", "alpha+fp8:ue8m0", next(iter(EXPRESSIONS)).replace("+custom:", "+fp8+custom:"))
CASTS = [
    FP8_SCALED.case(config, scaling=name, output="e4m3", epilogue=text)
    for at, config in enumerate(FP8_SCALED.configs(SM90))
    for scaling, name in SCALINGS.items()
    if name in FP8_SCALED.scalings
    for text in (CAST_TEXTS[at % 3],)
    if FP8_SCALED.fits(
        ops.spec(256, 1024, 512, 132, scaling=scaling, output="e4m3", epilogue=text, aligned=True), config
    )
]
"""FP8 output: each config that has it, with each scaling."""
Binaries = dict[KernelParams, Future[Binary]]


@pytest.fixture(scope="module")
def binaries(kernels_root: Path) -> Iterator[Binaries]:
    builder = Builder(kernels_root, nvrtc())
    with compiled((params, builder, params) for params in (*CASES, *CASTS)) as found:
        yield found


@cuda_only
@pytest.mark.parametrize("params", [*CASES, *CASTS], ids=kernel_name)
def test_every_family_finishes_its_sums(params: KernelParams, binaries: Binaries) -> None:
    """Tiles that cross the edge of D, and several tiles of a CTA; nothing outside of D is written, and what lies around
    the epilogue's tensors is NaN."""
    check(params, load(params, binaries[params].result()))


OPERATIONS: dict[str, tuple[Callable[..., None], str, Scalings]] = {
    "fp8": (deep_gemm.fp8_gemm_nt, "e4m3", ("1x128", "128x128")),
    "rows": (deep_gemm.fp8_gemm_nt, "e4m3", ("row", "row")),
    "1d1d": (deep_gemm.fp8_gemm_nt, "e4m3", ("1x128", "1x128")),
    "bf16": (deep_gemm.bf16_gemm_nt, "bf16", ("none", "none")),
    "fp16": (deep_gemm.fp16_gemm_nt, "f16", ("none", "none")),
}
OUTPUTS = {
    "fp8": (BF16, F32, torch.float16), "rows": (BF16, F32), "1d1d": (F32,), "bf16": (BF16, F32),
    "fp16": (torch.float16,),
}  # fmt: skip


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
        more, d = vectors(parse("rows+bias:f32+residual"), m, n, out), integers(m, n, seed=6).to(out)
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


def casts(activation: str | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """FP8 bytes and scales of calls, and those of the cast of the float32 result."""
    deep_gemm.set_batch_invariant(True)  # one order of sums, whatever kernel is chosen
    try:
        for kind, (m, n, k), power in itertools.product(
            ("fp8", "rows", "1d1d"), ((1, 128, 256), (33, 1024, 1152), (300, 512, 656)), (False, True)
        ):
            x, y = (torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(DEVICE) for rows in (m, n))
            parts = {"bias": torch.randn(n, device=DEVICE), "row_factor": torch.rand(m, device=DEVICE), "alpha": 0.125}
            epilogue = functools.partial(Epilogue, activation=activation, **parts)
            exact, d = torch.empty(m, n, device=DEVICE), quantize.rows(torch.zeros(m, n, device=DEVICE))
            a, b = quantize.rows(x), quantize.blocks(y) if kind == "fp8" else quantize.rows(y)
            if kind == "rows":
                a, b = ((each.to(torch.float8_e4m3fn), torch.rand(len(each), 1, device=DEVICE)) for each in (x, y))
            recipe = (1, 1, 128) if kind == "1d1d" else None
            deep_gemm.fp8_gemm_nt(a, b, exact, None, recipe, epilogue=epilogue())
            deep_gemm.fp8_gemm_nt(a, b, d, None, recipe, epilogue=epilogue(use_ue8m0=power))
            wanted = quantize.rows(exact, use_ue8m0=power)
            yield torch.stack((d[0].view(torch.uint8), wanted[0].view(torch.uint8)))
            yield torch.stack((d[1], wanted[1]))
    finally:
        deep_gemm.set_batch_invariant(False)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_fp8_bytes_are_the_cast_of_the_float32_result(activation: str | None) -> None:
    """Bit for bit: cold, warm and replayed."""
    for _ in range(3):
        for found, wanted in casts(activation):
            assert torch.equal(found, wanted)


def special_casts(kind: str) -> list[torch.Tensor]:
    """Results in all dtypes with a special value in one column of each block of 128, and rows of zeros; and casts."""
    m, n, k = 70, 8 * 128, 256
    x, y = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    x[::7], bias = 0, torch.zeros(n, device=DEVICE)
    bias[64::128] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 88.0, -88.0, 3e-39])
    half = torch.float16 if kind == "fp16" else BF16
    found: list[torch.Tensor] = []
    deep_gemm.set_batch_invariant(True)  # one order of sums, whatever kernel is chosen
    try:
        tensors = random(kind, x, y)
        exact, rounded = torch.empty(m, n, device=DEVICE), torch.empty(m, n, device=DEVICE, dtype=half)
        d = quantize.rows(torch.zeros(m, n, device=DEVICE))
        for out in (exact, d) if kind == "1d1d" else (exact, d, rounded):
            call(kind, tensors, out, None, epilogue=Epilogue(bias))  # type: ignore[arg-type]
        found += [exact, *d, exact.to(half) if kind == "1d1d" else rounded, *quantize.rows(exact)]
    finally:
        deep_gemm.set_batch_invariant(False)
    return found


@pytest.mark.parametrize("kind", OPERATIONS)
def test_special_values_are_cast_as_those_of_the_float32_result(kind: str) -> None:
    """NaN has one of several codes. The scale of a block with it is NaN too."""
    exact, values, scales, rounded, wanted, of_wanted = special_casts(kind)
    for found, right in ((values, wanted), (scales, of_wanted), (rounded, exact.to(rounded.dtype))):
        x, y = found.float(), right.float()
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(7.0).view(torch.int32), y.nan_to_num(7.0).view(torch.int32))


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
    more, d = vectors(parse("rows+bias:f32+residual"), 64, 256, BF16), torch.empty(64, 256, device=DEVICE, dtype=BF16)
    made = functools.partial(call, kind, tensors, d, None, epilogue=Epilogue(activation="relu", **more))
    made()
    return made, more, exact, d


KINDS = ("fp8", "bf16")


def expressed(kind: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Results of many rows, and of few, with an expression and with one of relu2; and what they should be."""
    _, dtype, scaling = OPERATIONS[kind]
    for m, n, k in ((300, 520, 656), (5, 256, 512)):
        tensors, exact = product(dtype, m, n, k, scaling)
        scale, weight, bias = integers(n, seed=3), integers(m, seed=4), integers(n, seed=5)
        body = "const float y = x + weight;\nreturn column > row ? y * scale : y;"
        out = OUTPUTS[kind][-1]
        d, same, also = (torch.empty(m, n, device=DEVICE, dtype=out) for _ in range(3))
        own = functools.partial(Epilogue.custom, "causal", body, reference=causal)
        call(kind, tensors, d, None, epilogue=own(rows={"weight": weight}, columns={"scale": scale}, bias=bias))
        places = {"row": torch.arange(m, device=DEVICE)[:, None], "column": torch.arange(n, device=DEVICE)}
        wanted = causal((exact + bias).float(), weight=weight[:, None], scale=scale, **places).to(out)
        relu2 = Epilogue.custom("relu2", "return x > 0 ? x * x : 0.0f;", reference=lambda x: torch.relu(x).square())
        call(kind, tensors, same, None, epilogue=relu2)
        call(kind, tensors, also, None, epilogue=Epilogue(activation="relu2"))
        yield torch.stack((d, same)), torch.stack((wanted, also))


def causal(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor, weight: Any, scale: Any) -> torch.Tensor:
    y = x + weight
    return torch.where(column > row, y * scale, y)


@pytest.mark.parametrize("kind", OPERATIONS)
def test_calls_with_an_expression(kind: str) -> None:
    """It finds its row, its column and its vectors' elements; and is the same as the activation of that name."""
    for found, wanted in expressed(kind):
        assert torch.equal(found, wanted)


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


BY_ROWS: dict[str, dict[str, Any]] = {
    "bias": {"activation": "gelu"}, **{name: {"activation": name} for name in ("silu", "relu2", "gelu_erf")},
    "residual": {"activation": "silu", "residual": BF16}, "float32": {"residual": F32},
    "factors": {"row_factor": True, "alpha": 0.3}, "c": {"activation": "silu", "c": True}, "own": {"own": True},
    "FP8": {"activation": "silu", "d": "fp8"},
    "FP8, powers of two": {"row_factor": True, "use_ue8m0": True, "d": "fp8"},
    "gate": {"activation": "swiglu", "row_factor": True}, "gate, FP8": {"activation": "swiglu", "d": "fp8"},
}  # fmt: skip
"""What there is beside a bias."""
EVERY_KIND = [(kind, name) for kind in KINDS for name in BY_ROWS]
EVERY_KIND += [("fp16", name) for name in ("bias", "factors", "gate")]
EVERY_KIND += [(kind, name) for kind in ("rows", "1d1d") for name in ("bias", "factors", "own", "FP8")]


def by_rows(kind: str, name: str = "bias") -> list[torch.Tensor]:
    """Results of many rows, and of the first of them; of FP8 also their scales."""
    m, n, k = 300, 512, 1024
    asked = dict(BY_ROWS[name])
    x, y = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    out = asked.pop("residual", F32 if kind == "1d1d" else torch.float16 if kind == "fp16" else BF16)
    columns, is_cast = n // 2 if asked.get("activation") == "swiglu" else n, asked.pop("d", "") == "fp8"
    each: dict[str, torch.Tensor] = {}
    if "residual" in BY_ROWS[name]:
        each["residual"] = torch.randn(m, n, device=DEVICE).to(out)
    if asked.pop("row_factor", False):
        each["row_factor"] = torch.rand(m, device=DEVICE)
    added = torch.randn(m, n, device=DEVICE).to(out) if asked.pop("c", False) else None
    make: Callable[..., Epilogue] = functools.partial(Epilogue, **asked)
    if asked.pop("own", False):
        body = "return x > 0 ? x * x : 0.0f;"
        make = functools.partial(Epilogue.custom, "relu2", body, reference=ACTIVATIONS["relu2"])
    make = functools.partial(make, bias=torch.randn(n, device=DEVICE))
    deep_gemm.set_batch_invariant(True)
    try:
        found = []
        for rows in (m, 100, 17, 1):
            d: Any = torch.empty(rows, columns, device=DEVICE, dtype=out)
            d = quantize.rows(d.float().zero_()) if is_cast else d
            c = None if added is None else added[:rows]
            epilogue = make(**{part: tensor[:rows] for part, tensor in each.items()})
            call(kind, random(kind, x[:rows], y), d, c, epilogue=epilogue)
            found.append(torch.cat([part.float() for part in d], 1) if is_cast else d)
    finally:
        deep_gemm.set_batch_invariant(False)
    return found


def random(kind: str, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Operands of these values, whose sums are not exact."""
    _, dtype, scaling = OPERATIONS[kind]
    if dtype != "e4m3":
        return {
            "a": x.to({"bf16": BF16, "f16": torch.float16}[dtype]),
            "b": y.to(BF16 if dtype == "bf16" else torch.float16),
        }
    if scaling == ("row", "row"):
        (a, b), ones = (each.to(torch.float8_e4m3fn) for each in (x, y)), torch.ones(len(y), 1, device=DEVICE)
        return {"a": a, "sfa": ones[:1].expand(len(x), 1) / 3, "b": b, "sfb": ones / 7}
    (a, sfa), (b, sfb) = quantize.rows(x), quantize.rows(y) if kind == "1d1d" else quantize.blocks(y)
    return {"a": a, "sfa": sfa, "b": b, "sfb": sfb}


@pytest.mark.parametrize(("kind", "name"), EVERY_KIND)
def test_a_row_has_the_same_bits_whatever_m_is(kind: str, name: str) -> None:
    found = by_rows(kind, name)
    assert all(torch.equal(each, found[0][: each.shape[0]]) for each in found)


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    calls: list[Callable[[], object]] = [with_a_nan]
    for kind, added in itertools.product(OPERATIONS, ADDED):
        calls += steps(kind, added)
    calls += [lambda name=name: list(casts(name)) for name in (None, *ACTIVATIONS)]  # type: ignore[misc]
    calls += [lambda name=name: list(edges(name)) for name in ACTIVATIONS]  # type: ignore[misc]
    calls += [lambda kind=kind: list(expressed(kind)) for kind in OPERATIONS]  # type: ignore[misc]
    calls += [functools.partial(before_a_graph, kind) for kind in KINDS]
    calls += [functools.partial(by_rows, *each) for each in EVERY_KIND]
    calls += [functools.partial(special_casts, kind) for kind in OPERATIONS]
    with built(kernels_of(calls)):
        yield
