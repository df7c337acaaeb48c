"""GEMMs grouped by M on a GPU: numbers, bits, memory, graphs."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE
from grouped_cases import BF16, FORMS, KINDS, Case, Routing, call

import deep_gemm
from deep_gemm import UnsupportedError, options
from deep_gemm.kernels import groups
from deep_gemm.runtime import calls, engine
from deep_gemm.testing import assert_close_to_exact, assert_half_close_to_exact, guarded_copy

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
N, K = 520, 656
"""They cross the edges of tiles and of blocks of scales."""
SENTINEL = 7776.0
"""A bfloat16 number far above the sums of these tests."""
MIXED = Routing((100, 0, 1, 128, 300))


@pytest.fixture(autouse=True)
def restored_options() -> Iterator[None]:
    num_sms = deep_gemm.get_num_sms()
    yield
    deep_gemm.set_num_sms(num_sms)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def routed(groups: int, seed: int, most: int = 150) -> Routing:
    """Random sizes, a fifth of them zero, and padding past the end that is no multiple of the alignment."""
    rng = random.Random(seed)
    counts = tuple(0 if rng.random() < 0.2 else rng.randint(1, most) for _ in range(groups))
    return Routing(counts, Routing(counts).end + 70)


def check_exact(case: Case, form: str, **options: Any) -> torch.Tensor:
    """Make the call; the result must be the exact one. Returns the rows of all groups."""
    found = case.gathered(case.run(form, **options))
    assert torch.equal(found, case.gathered(case.exact()).to(BF16)), f"{case.kind} {form} {case.routing}"
    return found


def check_close(case: Case, d: torch.Tensor) -> None:
    """Each group's rows must be within the bound. d has the shape of any form."""
    start, rows = 0, case.gathered(d)
    for group, where in enumerate(case.routing.slices()):
        part = rows[start : start + where.stop - where.start]
        start += part.shape[0]
        if case.kind == "fp8":
            assert_close_to_exact(part, case.a[where], case.sfa[where], case.b[group], case.sfb[group])
        else:
            assert_half_close_to_exact(part, case.a[where], case.b[group])


@pytest.mark.parametrize("groups", [1, 4, 33])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_exact(kind: str, form: str, groups: int) -> None:
    """Any wrong row, column, scale or group shows. Padding is NaN; nothing else is written, or reaches another row."""
    for n, k, pad_d in ((N, K, 0), (N, K, 24), (333, 1040, 0), (64, 128, 8)):
        check_exact(Case(kind, routed(groups, n + groups), n, k, DEVICE, integers=True), form, pad_d=pad_d)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_256_groups(kind: str, form: str) -> None:
    check_exact(Case(kind, routed(256, 1, most=20), 136, 256, DEVICE, integers=True), form)


@cuda_only
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "width"), [("fp8", 192), ("bf16", 160), ("bf16", 192), ("bf16", 224)])
def test_tiles_of_other_widths(kind: str, width: int, form: str) -> None:
    """Blocks of scales end inside them, and some are stored in more parts than they have stages."""
    case = Case(kind, MIXED, N, 2064, DEVICE, integers=True)
    with options.only(lambda config: config.tile == (128, width)):
        check_exact(case, form)


@cuda_only
def test_a_consumer_without_rows_does_not_stop_the_other() -> None:
    """Beside a table of so many groups a tile has three stages, and it is stored in four parts."""
    case = Case("bf16", routed(520, 2, most=60), 264, 512, DEVICE, integers=True)
    with options.only(lambda config: config.tile == (128, 256)):
        check_exact(case, "contiguous")


@pytest.mark.parametrize(
    "routing",
    [
        Routing((0, 0, 0, 700)),
        Routing((700, 0, 0, 0)),
        Routing((0, 0, 700, 0), rows=1000),
        Routing((0, 0, 0, 0), rows=256),
        Routing((1, 1, 1, 1)),
        Routing((128, 256, 128, 384)),
        Routing((129, 127, 0, 5), rows=517),  # the last group ends with A
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_uneven_groups(kind: str, form: str, routing: Routing) -> None:
    """Empty groups, all of them empty, everything in one group, groups of whole tiles."""
    check_exact(Case(kind, routing, N, K, DEVICE, integers=True), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_operands_are_within_the_bound(kind: str, form: str) -> None:
    for routing, n, k in ((MIXED, N, K), (routed(4, 7, 500), 1032, 2064), (Routing((3, 64)), 2112, 7168)):
        case = Case(kind, routing, n, k, DEVICE, seed=n)
        check_close(case, case.run(form))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_form(kind: str) -> None:
    """And whatever the number of rows beside it, the place of its group, and the estimate."""
    case = Case(kind, routed(9, 3, 300), N, 2064, DEVICE)
    first = case.gathered(case.run("contiguous"))
    check_close(case, case.run("contiguous"))
    for form in FORMS:
        assert torch.equal(case.gathered(case.run(form)), first), form
    for expected_m in (1, 16, 100, 4096):
        assert torch.equal(case.gathered(case.run("masked", max_m=333, expected_m=expected_m)), first), expected_m
    rows = case.routing.slices()
    for group in (0, 4, 8):
        alone = Case(kind, Routing((min(7, case.routing.counts[group]),)), N, 2064, DEVICE)
        where = slice(rows[group].start, rows[group].start + alone.routing.counts[0])
        alone.a[: alone.routing.counts[0]], alone.sfa[: alone.routing.counts[0]] = case.a[where], case.sfa[where]
        alone.b, alone.sfb = case.b[group : group + 1], case.sfb[group : group + 1]
        start = sum(case.routing.counts[:group])
        for form in FORMS:
            found = alone.gathered(alone.run(form))
            assert torch.equal(found, first[start : start + found.shape[0]]), f"group {group} alone, {form}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_agree_bit_for_bit(kind: str, form: str) -> None:
    case = Case(kind, routed(33, 5), N, 1552, DEVICE)
    first = case.gathered(case.run(form))
    for _ in range(20):
        assert torch.equal(case.gathered(case.run(form)), first)


@pytest.mark.parametrize("holes", ["single rows", "every other row", "whole tiles"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_inside_groups(kind: str, holes: str) -> None:
    """Index form: a row of -1 is written, and changes no other row, whatever it holds."""
    case = Case(kind, Routing((700, 0, 60, 1, 300), rows=1400), N, K, DEVICE, integers=True)
    expected = case.exact()
    a, b, layout = case.arguments("contiguous")
    m = case.routing.m
    where = torch.zeros(m, dtype=torch.bool, device=DEVICE)
    if holes == "single rows":
        where[torch.tensor([0, 127, 128, 200, 699, 768, 1000], device=DEVICE)] = True
    elif holes == "every other row":
        where[::2] = True
    else:
        where[100:400] = where[500:640] = where[1024:1152] = True
    layout[where] = -1
    bits = (a[0] if kind == "fp8" else a).view(torch.uint8)
    bits[where] = 0x7F  # NaN in E4M3, large in bfloat16
    d = torch.full((m, N), SENTINEL, device=DEVICE, dtype=BF16)
    call(kind, "contiguous", a, b, d, layout)
    assert torch.equal(d[layout >= 0], expected[layout >= 0].to(BF16))
    assert not bool((d[layout < 0] == SENTINEL).any()), "rows of padding were left as they were"
    bits[layout < 0] = 0
    case.sfa[layout < 0] = 1.0
    d.fill_(SENTINEL)
    call(kind, "contiguous", a, b, d, layout)
    assert bool((d[layout < 0] == 0).all()), "rows of zeros have another product than zero"


@pytest.mark.parametrize("alignment", [64, 128, 256])
@pytest.mark.parametrize("form", ["contiguous", "psum"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_alignments(kind: str, form: str, alignment: int) -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    counts = (5, 0, 100, 64, 1, 16, 250)
    case = Case(kind, Routing(counts, alignment=alignment), N, K, DEVICE, integers=True)
    check_exact(case, form)


@pytest.mark.parametrize("form", ["contiguous", "psum"])
@pytest.mark.parametrize("kind", KINDS)
def test_alignments_below_a_tile_are_right_or_refused(kind: str, form: str) -> None:
    for alignment in (16, 48, 144):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        case = Case(kind, Routing((5, 0, 100, 64, 1), alignment=alignment), N, K, DEVICE, integers=True)
        try:
            check_exact(case, form)
        except UnsupportedError:
            assert DEVICE == "cuda"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_few_sms(kind: str, form: str) -> None:
    """Several tiles for each CTA; the bits are those of all SMs."""
    case = Case(kind, routed(9, 11, 300), N, K, DEVICE)
    whole = case.gathered(case.run(form))
    for num_sms in (3, 20):
        deep_gemm.set_num_sms(num_sms)
        assert torch.equal(case.gathered(case.run(form)), whole), num_sms


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout_of", ["rows", "mn-major", "slice", "sparse"])
def test_scales_of_a_in_every_layout(form: str, layout_of: str) -> None:
    case = Case("fp8", routed(5, 2), N, K, DEVICE, integers=True)
    expected = case.gathered(case.exact()).to(BF16)
    (a, sfa), b, layout = case.arguments(form, max_m=157)
    if layout_of == "mn-major":
        sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    elif layout_of == "slice":
        wide = torch.nn.functional.pad(sfa, (0, 0, 0, 61), value=float("nan"))
        sfa = deep_gemm.get_mn_major_tma_aligned_tensor(wide)[..., : sfa.shape[-2], :]
    elif layout_of == "sparse":
        blocks = sfa.shape[-1]
        strides = (2 * blocks + 3, 2) if form != "masked" else (157 * (2 * blocks + 3) + 5, 2 * blocks + 3, 2)
        sfa = guarded_copy(sfa, strides).tensor
    d = torch.zeros(*a.shape[:-1], N, dtype=BF16, device=DEVICE)
    call("fp8", form, (a, sfa), (b[0], b[1].mT.contiguous().mT), d, layout)
    assert torch.equal(case.gathered(d), expected)


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nn(kind: str, psum: bool) -> None:
    """As Megatron calls it, K 64 and 128 and N 48 and 96, and larger. b is N-major or a view of K-major storage."""
    for n, k in ((48, 64), (96, 128), (520, 704)):
        case = Case(kind, routed(5, n), n, k, DEVICE, integers=True)
        expected = case.gathered(case.exact()).to(BF16)
        a, b, layout = case.arguments("psum" if psum else "contiguous")
        function = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nn_contiguous")
        views = [(b[0].mT, b[1].mT)] if kind == "fp8" else [b.mT, b.mT.contiguous()]
        for view in views:
            d = torch.zeros(case.routing.m, n, dtype=BF16, device=DEVICE)
            function(a, view, d, layout, use_psum_layout=psum)
            assert torch.equal(case.gathered(d), expected)


def test_n_major_masked() -> None:
    """bfloat16 weights (G, K, N) in the masked form, as a view."""
    case = Case("bf16", MIXED, N, 704, DEVICE, integers=True)
    case.b = case.b.mT.contiguous().mT
    check_exact(case, "masked", max_m=301)


@pytest.mark.parametrize("kind", KINDS)
def test_mrequested_rows_that_are_no_multiple_of_a_tile(kind: str) -> None:
    """Nothing spills into the next group, whatever max_m and the estimate are."""
    for max_m in (1, 5, 64, 65, 129, 300):
        counts = (max_m, 0, max(1, max_m // 2), max_m, 1)
        case = Case(kind, Routing(counts), 136, 272, DEVICE, integers=True)
        for expected_m in (1, max_m, 1000):
            check_exact(case, "masked", max_m=max_m, expected_m=expected_m)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_be_multiplied_too(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where that costs less than tiles of different length, which large problems only have."""
    monkeypatch.setattr(groups, "skips_padding", lambda *_: False)
    engine.forget_plans()
    calls.forget_all()
    try:
        for routing in (MIXED, Routing((70, 0, 5), rows=500), routed(33, 4)):
            check_exact(Case(kind, routing, N, K, DEVICE, integers=True), form)
    finally:
        engine.forget_plans()
        calls.forget_all()


@cuda_only
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_replayed_with_other_routings(kind: str, form: str) -> None:
    """All in the same buffers, as vLLM does."""
    rows, max_m = 1024, 512
    routings = [Routing(counts, rows) for counts in ((100, 0, 300, 7), (0, 0, 0, 0), (0, 512, 1, 128), (1, 1, 1, 500))]
    cases = [Case(kind, routing, N, K, DEVICE, integers=True, seed=9) for routing in routings]
    for case in cases:
        case.b, case.sfb = cases[0].b, cases[0].sfb
    a, b, layout = cases[0].arguments(form, max_m)
    a = tuple(part.clone() for part in a) if kind == "fp8" else a.clone()
    parts = list(a) if kind == "fp8" else [a]
    d = torch.zeros(*parts[0].shape[:-1], N, dtype=BF16, device=DEVICE)

    def run() -> None:
        call(kind, form, a, b, d, layout, **({"expected_m": 64} if form == "masked" else {}))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in (*cases, cases[0]):
        x, _, new = case.arguments(form, max_m)
        for target, source in zip(parts, x if kind == "fp8" else (x,), strict=True):
            target.copy_(source)
        layout.copy_(new)
        d.fill_(SENTINEL)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(case.gathered(d), case.gathered(case.exact()).to(BF16)), case.routing
        if form == "psum":
            assert bool((d[case.routing.end :] == SENTINEL).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_constant_weights(kind: str, form: str) -> None:
    """Weights that are read early give the same bits, also right after a kernel that writes the other operands."""
    case = Case(kind, MIXED, N, K, DEVICE, integers=True)
    deep_gemm.declare_constant(*(case.weights if kind == "fp8" else (case.weights,)))
    for _ in range(3):
        check_exact(case, form)


@cuda_only
@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_written_right_before(kind: str) -> None:
    """The layout, a and its scales come from the previous kernel in the stream."""
    case = Case(kind, MIXED, N, K, DEVICE, integers=True)
    expected = case.gathered(case.exact()).to(BF16)
    for form in FORMS:
        a, b, layout = case.arguments(form)
        parts = (*a, layout) if kind == "fp8" else (a, layout)
        copies = [part.clone() for part in parts]
        d = torch.zeros(*parts[0].shape[:-1], N, dtype=BF16, device=DEVICE)
        for _ in range(5):
            for part in parts:
                part.zero_()
            for part, kept in zip(parts, copies, strict=True):
                part.copy_(kept)
            call(kind, form, a, b, d, layout)
        assert torch.equal(case.gathered(d), expected)
