"""Epilogues of products grouped by M on a GPU: every config with a gate or FP8 output, and the dense ones of 16 bits,
launched directly; and calls, against dense products of each group."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import gated_runs
import pytest
import torch
from built import built, kernels_of
from chosen import kernel_name
from forced import compiled, nvrtc
from gpu_cases import DEVICE
from grouped_cases import BF16, E4M3, FORMS, KINDS, Case, Routing, call, strides

import deep_gemm
from deep_gemm import Epilogue, quantize
from deep_gemm.arch import SM90
from deep_gemm.jit import Binary, Builder
from deep_gemm.kernels.families import B16_GEMM, B16_GROUPED, FP8_GROUPED
from deep_gemm.kernels.hopper.gated import B16_GATED, FP8_GATED
from deep_gemm.ops.reference import Finish
from deep_gemm.params import KernelParams
from deep_gemm.spec import SCALE_BLOCK, align
from deep_gemm.testing import guarded

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
F32 = torch.float32
INNER, K = 512, 656
ROUTING = Routing((70, 0, 1, 128, 300, 5), Routing((70, 0, 1, 128, 300, 5)).end + 200)
MAX_M = 301

CASES = (
    [
        FP8_GATED.case(config, grouping=form, output=output, epilogue=text)
        for config in FP8_GATED.configs(SM90)
        for form in FORMS
        for output, text in (("bf16", "bias:f32+swiglu"), ("e4m3", "rows+bias:f32+swiglu+clamp:2.0+fp8"))
        if config.cluster_size == 1
        and config.tile != (64, 256)
        and (output != "e4m3" or config.block_n == 2 * SCALE_BLOCK)
    ]
    + [
        B16_GATED.case(config, grouping=form, output=output, epilogue=text)
        for config in B16_GATED.configs(SM90)
        for form in ("none", *FORMS)
        for output, text in (("bf16", "bias:f32+swiglu"), ("e4m3", "rows+bias:f32+swiglu+clamp:2.0+fp8"))
        if (form == "none" or config.cluster_size * config.ctas_per_sm == 1)
        and not (form == "contiguous" and config.block_m > 128)  # groups begin at multiples of 128
        and (output != "e4m3" or config.block_n == 2 * SCALE_BLOCK)
    ]
    + [
        family.case(config, grouping=form, output="e4m3", epilogue=text)
        for family, forms in ((B16_GEMM, ("none",)), (B16_GROUPED, FORMS))
        for config in family.configs(SM90)
        for form, text in zip(forms, ("rows+bias:f32+gelu+fp8", "fp8", "alpha+bias:bf16+silu+fp8:ue8m0"), strict=False)
        if config.block_n // config.cluster_k in (128, 256)
    ]
    + [
        FP8_GROUPED.case(config, grouping=form, output="e4m3", epilogue=text)
        for config in FP8_GROUPED.configs(SM90)
        for form, text in zip(FORMS, ("fp8", "rows+bias:f32+gelu+fp8", "alpha+bias:bf16+silu+fp8:ue8m0"), strict=True)
        if config.block_n in (SCALE_BLOCK, 2 * SCALE_BLOCK)
    ]
)
Binaries = dict[KernelParams, Future[Binary]]


@pytest.fixture(scope="module")
def builder(kernels_root: Path) -> Iterator[Builder]:
    found = Builder(kernels_root, nvrtc())
    with compiled((params, found, params) for params in CASES) as binaries:
        for binary in binaries.values():
            binary.result()
        yield found


@cuda_only
@pytest.mark.parametrize("params", CASES, ids=kernel_name)
def test_every_config(params: KernelParams, builder: Builder) -> None:
    gated_runs.check(params, builder)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"alpha": 0.5, "clamp": 1.5, "bias": True, "row_factor": True},
    "powers of two": {"use_ue8m0": True},
    "interleaved": {"interleaved": True, "bias": True},
    "no gate": {"activation": "gelu", "alpha": 0.5, "bias": True, "row_factor": True},
    "no activation": {"activation": None},
}


def parts_of(name: str, case: Case) -> dict[str, Any]:
    """The tensors of all groups."""
    made = {"bias": random(len(case.routing.counts), case.n, seed=5), "row_factor": random(case.routing.m, seed=6)}
    return {part: made.get(part, value) for part, value in PARTS[name].items()}


def in_form(case: Case, form: str, parts: dict[str, Any], max_m: int) -> Epilogue:
    parts = dict(parts)
    if form == "masked" and "row_factor" in parts:
        parts["row_factor"] = case.spread(parts["row_factor"][:, None], max_m)[..., 0]
    return Epilogue(**{"activation": "swiglu", **parts})


def columns_of(case: Case, parts: dict[str, Any]) -> int:
    return case.n if "activation" in parts else case.n // 2


def wanted(case: Case, parts: dict[str, Any]) -> torch.Tensor:
    """A dense product with float32 output for each group."""
    found = torch.full((case.routing.m, columns_of(case, parts)), float("nan"), device=DEVICE)
    deep_gemm.set_batch_invariant(True)  # K in one order, as groups have it
    for group, rows in enumerate(case.routing.slices()):
        own = {name: value for name, value in parts.items() if name != "use_ue8m0"}
        own |= {"bias": own["bias"][group]} if "bias" in own else {}
        own |= {"row_factor": own["row_factor"][rows]} if "row_factor" in own else {}
        epilogue = Epilogue(**{"activation": "swiglu", **own})
        if case.kind == "bf16":
            deep_gemm.bf16_gemm_nt(case.a[rows], case.b[group], found[rows], epilogue=epilogue)
            continue
        a, b = (case.a[rows], case.sfa[rows]), (case.b[group], case.sfb[group])
        deep_gemm.fp8_gemm_nt(a, b, found[rows], epilogue=epilogue)
    deep_gemm.set_batch_invariant(False)
    return found


def cast(case: Case, form: str, parts: dict[str, Any], max_m: int = MAX_M, **options: Any) -> Any:
    """FP8 values and scales of a call, with NaN around them and in them before."""
    a, b, layout = case.arguments(form, max_m)
    rows, columns = (a[0] if case.kind == "fp8" else a).shape[:-1], columns_of(case, parts)
    values = guarded((*rows, columns), E4M3, DEVICE, strides(rows, columns + 16))
    step, blocks = align(rows[-1], 4) + 4, columns // SCALE_BLOCK
    of_scales = (1, step) if len(rows) == 1 else (blocks * step, 1, step)
    scales = guarded((*rows, blocks), F32, DEVICE, of_scales)
    pair = values.tensor, scales.tensor
    call(case.kind, form, a, b, pair, layout, epilogue=in_form(case, form, parts, max_m), **options)
    values.check(f"d of {form}")
    scales.check(f"the scales of d of {form}")
    return pair


def halves(case: Case, form: str, parts: dict[str, Any], max_m: int = MAX_M, **options: Any) -> torch.Tensor:
    """The bfloat16 d of a call."""
    a, b, layout = case.arguments(form, max_m)
    rows = (a[0] if case.kind == "fp8" else a).shape[:-1]
    d = torch.zeros(*rows, columns_of(case, parts), dtype=BF16, device=DEVICE)
    plain = {part: value for part, value in parts.items() if part != "use_ue8m0"}
    call(case.kind, form, a, b, d, layout, epilogue=in_form(case, form, plain, max_m), **options)
    return d


def case_of(routing: Routing = ROUTING, kind: str = "fp8") -> Case:
    case = Case(kind, routing, 2 * INNER, K, DEVICE)
    (case.sfb if kind == "fp8" else case.b).div_(16)  # sums are about 1
    return case


def results(kind: str, name: str) -> Any:
    """FP8 and bfloat16 of each form, and the float32 results."""
    case = case_of(kind=kind)
    parts, found = parts_of(name, case), []
    for form in FORMS:
        found.append((form, cast(case, form, parts), halves(case, form, parts)))
    exact = case.gathered(wanted(case, parts))
    quantize.rows(exact, use_ue8m0=name == "powers of two")  # its kernel is built with the others
    return case, found, exact


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_group_is_as_a_product_of_its_own(kind: str, name: str) -> None:
    """FP8 is the cast of the float32 result, and bfloat16 its rounding, bit for bit: cold, warm and replayed. Rows that
    are not a group's are left as they were, or in the index form are zeros with the scale of zeros."""
    for _ in range(3):
        case, found, exact = results(kind, name)
        values, scales = quantize.rows(exact, use_ue8m0=name == "powers of two")
        for form, d, half in found:
            assert torch.equal(case.gathered(d[0].view(torch.uint8)), values.view(torch.uint8)), form
            assert torch.equal(case.gathered(d[1]), scales), form
            assert torch.equal(case.gathered(half), exact.to(BF16)), form
            if form == "masked":
                for group, count in enumerate(ROUTING.counts):
                    assert bool((d[0].view(torch.uint8)[group, count:] == 255).all())
                    assert bool((d[1].view(torch.int32)[group, count:] == -1).all())
                continue
            rest = d[0][ROUTING.end :].view(torch.uint8), d[1][ROUTING.end :]
            least = 2.0**-22 if name == "powers of two" else torch.tensor(1e-4) / 448
            if form == "psum":
                assert bool((rest[0] == 255).all() and (rest[1].view(torch.int32) == -1).all())
            else:
                assert bool((rest[0] == 0).all() and (rest[1] == least).all())


def routings(kind: str, name: str) -> Any:
    """FP8 values, scales and bfloat16 results of the same 70 rows among others; the first are those of them alone."""
    whole, found = case_of(kind=kind), []
    kept, rows = parts_of(name, whole), slice(0, 70)
    for counts in ((70,), (70, 300, 5), (70, 0, 1, 128)):
        case = case_of(Routing(counts), kind)
        case.a[rows], case.b[0] = whole.a[rows], whole.b[0]
        if kind == "fp8":
            case.sfa[rows], case.sfb[0] = whole.sfa[rows], whole.sfb[0]
        parts = parts_of(name, case)
        for part, place in (("bias", 0), ("row_factor", rows)):
            if part in parts:
                parts[part][place] = kept[part][place]
        ways: list[tuple[str, int, dict[str, int]]] = [(form, MAX_M, {}) for form in FORMS]
        ways += [("masked", max_m, {"expected_m": expected_m}) for max_m, expected_m in ((300, 4), (512, 512))]
        for form, max_m, more in ways:
            found.append((*cast(case, form, parts, max_m, **more), halves(case, form, parts, max_m, **more)))
    return [tuple((x[0, :70] if x.dim() == 3 else x[:70]).contiguous() for x in each) for each in found]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_is_beside_it(kind: str, name: str) -> None:
    first, *others = routings(kind, name)
    for each in others:
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(each, first, strict=True))


def before_a_graph() -> Any:
    """A masked call that was made once, what it reads, and d."""
    case = case_of()
    (a, sfa), b, counts = case.arguments("masked", MAX_M)
    each = torch.ones(a.shape[:2], device=DEVICE)
    d = torch.zeros(*a.shape[:2], INNER, device=DEVICE).to(E4M3), torch.zeros(*a.shape[:2], INNER // 128, device=DEVICE)
    epilogue = Epilogue(activation="swiglu", row_factor=each)

    def run() -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_masked((a, sfa), b, d, counts, 64, epilogue=epilogue)

    run()
    return case, run, counts, each, d


@cuda_only
def test_a_graph_reads_counts_and_factors_when_it_runs() -> None:
    """A group of no rows leaves d as it was. Factors of a row scale its scales."""
    _, run, counts, each, (values, scales) = before_a_graph()
    torch.cuda.synchronize()
    before = values.view(torch.uint8).clone(), scales.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    each.fill_(2.0)
    values.view(torch.uint8).zero_()
    scales.zero_()
    counts[3] = 0
    counts[4] = 17
    graph.replay()
    torch.cuda.synchronize()
    rows = counts.tolist()
    for group, count in enumerate(rows):
        assert torch.equal(values.view(torch.uint8)[group, :count], before[0][group, :count])
        assert torch.equal(scales[group, :count], 2 * before[1][group, :count])
        assert not values.view(torch.uint8)[group, count:].any()
        assert not scales[group, count:].any()


def plain_parts(kind: str, activation: str | None) -> Any:
    """Results of products whose sums are exact, in each form, with an epilogue; and the products."""
    case, found = Case(kind, ROUTING, 264, K, DEVICE, integers=True), []
    bias = torch.randint(-3, 4, (len(ROUTING.counts), case.n), generator=torch.Generator().manual_seed(1)).float()
    each = torch.exp2(torch.randint(-2, 3, (ROUTING.m,), generator=torch.Generator().manual_seed(2)).float())
    bias, each = bias.to(DEVICE), each.to(DEVICE)
    for form in FORMS:
        a, b, layout = case.arguments(form, MAX_M)
        rows = (a[0] if kind == "fp8" else a).shape[:-1]
        d = guarded((*rows, case.n), BF16, DEVICE, strides(rows, case.n))
        factors = case.spread(each[:, None], MAX_M)[..., 0] if form == "masked" else each
        epilogue = Epilogue(bias, activation, 0.25, row_factor=factors)
        call(kind, form, a, b, d.tensor, layout, epilogue=epilogue)
        d.check(f"d of {form}")
        found.append((form, d.tensor))
    return case, found, bias, each


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_parts(kind: str, activation: str | None) -> None:
    """A bias of each group, factors of rows, and an activation: exact but for silu."""
    case, found, bias, each = plain_parts(kind, activation)
    exact, expected = case.exact(), torch.zeros(ROUTING.m, case.n, device=DEVICE)
    for group, rows in enumerate(ROUTING.slices()):
        finish = Finish(activation or "", 0.25, bias=bias[group], row_factor=each[rows])
        expected[rows] = finish(exact[rows], (slice(None), slice(None)))
    for form, d in found:
        if activation == "silu":
            torch.testing.assert_close(case.gathered(d).float(), case.gathered(expected), rtol=2**-8, atol=2**-100)
        else:
            assert torch.equal(case.gathered(d), case.gathered(expected).to(BF16)), form


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    calls: list[Callable[[], object]] = [functools.partial(results, kind, name) for kind in KINDS for name in PARTS]
    calls += [functools.partial(plain_parts, kind, each) for kind in KINDS for each in (None, "relu", "silu")]
    calls += [functools.partial(routings, kind, name) for kind in KINDS for name in PARTS]
    with built(kernels_of([*calls, before_a_graph])):
        yield
