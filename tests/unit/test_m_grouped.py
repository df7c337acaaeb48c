"""GEMMs grouped by M on the CPU: results of every form, and the arguments that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from grouped_cases import BF16, E4M3, FORMS, KINDS, Case, Routing, call
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.ops.reference import group_rows

ROUTINGS = [
    Routing((3, 0, 130, 17)),
    Routing((0, 0, 5)),
    Routing((200, 0, 0)),
    Routing((128, 128), rows=300),
    Routing((0, 0, 0), rows=128),
    Routing((1,)),
    Routing((100, 20), rows=148),  # less than the alignment after the last group
]


@pytest.fixture(autouse=True)
def default_alignment() -> Iterator[None]:
    yield
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def exact(case: Case) -> torch.Tensor:
    return case.gathered(case.exact()).to(BF16)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_form_is_a_loop_over_groups(kind: str, form: str, routing: Routing) -> None:
    case = Case(kind, routing, 136, 272, "cpu", integers=True)
    for pad_d in (0, 24):
        assert torch.equal(case.gathered(case.run(form, pad_d=pad_d)), exact(case))


def test_padding_of_the_index_form_is_zero() -> None:
    """At the end of a group, inside of it, and after the last one."""
    case = Case("bf16", Routing((3, 130), rows=500), 24, 64, "cpu", integers=True)
    a, b, layout = case.arguments("contiguous")
    layout[130:133] = -1
    d = torch.full((500, 24), 7.0, dtype=BF16)
    call("bf16", "contiguous", a, b, d, layout)
    assert bool((d[layout < 0] == 0).all())
    assert torch.equal(d[layout >= 0], case.exact()[layout >= 0].to(BF16))


def test_the_psum_form_follows_the_alignment() -> None:
    for alignment in (16, 64, 128):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        case = Case("fp8", Routing((3, 0, 64, 17), rows=400, alignment=alignment), 8, 128, "cpu", integers=True)
        assert torch.equal(case.gathered(case.run("psum")), exact(case))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from([16, 32]),
    st.integers(0, 50),
    st.sampled_from(KINDS),
)
def test_forms_give_the_same_rows(counts: list[int], alignment: int, past: int, kind: str) -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    routing = Routing(tuple(counts), alignment=alignment)
    case = Case(kind, Routing(tuple(counts), max(1, routing.end + past), alignment), 24, 144, "cpu", seed=past)
    found = [case.gathered(case.run(form, max_m=max(counts) + 3)) for form in FORMS]
    assert all(torch.equal(d, found[0]) for d in found)


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nn(kind: str, psum: bool) -> None:
    """b as a transposed view of K-major storage; for bfloat16 also contiguous as (G, K, N)."""
    case = Case(kind, Routing((3, 20)), 136, 192, "cpu", integers=True)
    function = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nn_contiguous")
    a, b, layout = case.arguments("psum" if psum else "contiguous")
    views = [(b[0].transpose(1, 2), b[1].transpose(1, 2))] if kind == "fp8" else [b.transpose(1, 2)]
    views += [views[0].contiguous()] if kind == "bf16" else []
    for view in views:
        d = torch.zeros(case.routing.m, 136, dtype=BF16)
        function(a, view, d, layout, use_psum_layout=psum)
        assert torch.equal(case.gathered(d), exact(case))


def test_other_names() -> None:
    for name, other in (
        ("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous"),
        ("m_grouped_fp8_fp4_gemm_nn_contiguous", "m_grouped_fp8_gemm_nn_contiguous"),
        ("m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"),
        ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"),
        ("bf16_m_grouped_gemm_nt_masked", "m_grouped_bf16_gemm_nt_masked"),
    ):
        assert getattr(deep_gemm, name) is getattr(deep_gemm, other)


def test_options_by_position_and_by_name() -> None:
    case = Case("fp8", Routing((3, 20)), 24, 144, "cpu", integers=True)
    a, b, layout = case.arguments("psum")
    d = torch.zeros(case.routing.m, 24, dtype=BF16)
    recipe = (1, 128, 128)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        list(a), list(b), d, layout, recipe, None, None, "nk", True, True, True, 9
    )
    assert torch.equal(case.gathered(d), exact(case))
    d.zero_()
    pairs: Any = {"recipe_a": (1, 128), "recipe_b": (128, 128)}
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, **pairs, use_psum_layout=True)
    assert torch.equal(case.gathered(d), exact(case))
    a, b, layout = case.arguments("masked")
    d = torch.zeros(2, 20, 24, dtype=BF16)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, d, layout, 7, recipe, None, None, "nk", True)
    assert torch.equal(case.gathered(d), exact(case))
    deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, d, layout, 10**6, enable_overlap=False, signal=None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do(kind: str, form: str) -> None:
    for m, n, groups in ((0, 8, 2), (16, 0, 2), (16, 8, 0)):
        a, b, layout, d = zeros(kind, form, m, n, 128, groups)
        call(kind, form, a, b, d, layout, expected_m=1) if form == "masked" else call(kind, form, a, b, d, layout)
        assert bool((d == 1).all())


def zeros(kind: str, form: str, m: int = 16, n: int = 24, k: int = 128, groups: int = 2) -> Any:
    """a, b, the layout and d, which is one."""
    leading = (groups,) if form == "masked" else ()
    dtype = E4M3 if kind == "fp8" else BF16
    a, b = torch.zeros(*leading, m, k).to(dtype), torch.zeros(groups, n, k).to(dtype)
    layout = torch.zeros(m if form == "contiguous" else groups, dtype=torch.int32)
    d = torch.ones(*leading, m, n, dtype=BF16)
    if kind == "bf16":
        return a, b, layout, d
    sfa, sfb = torch.ones(*leading, m, -(-k // 128)), torch.ones(groups, -(-n // 128), -(-k // 128))
    return (a, sfa), (b, sfb), layout, d


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a", lambda x: x.double(), r"^a .*must be torch\.\w+.*, but it is torch.float64"),
        ("a", lambda x: x[..., None], "^a must have [23] dimensions, but it has [34]"),
        ("a", lambda x: 3, "^a must be a torch.Tensor, but it is of type int"),
        ("a", lambda x: x[..., :64], r"^a and b must agree in K, .*b is \(2, 24, 128\) \(G, N, K\)"),
        ("a", lambda x: x.mT.contiguous().mT, r"^a must be K-major: .*Pass .contiguous\(\)"),
        ("b", lambda x: x[0], "^b must have 3 dimensions, but it has 2"),
        ("b", lambda x: x[:, :12].clone(), "^d must have the shape .*rows of a by rows of a group of b"),
        ("b", lambda x: x[:1].expand(2, -1, -1), "^b must be K-major: .*each group right after the one before"),
        ("b", lambda x: torch.cat([x, x])[::2], r"strides \(6144, 128, 1\). Pass .contiguous\(\)"),
        ("layout", lambda x: x.long(), "must be torch.int32, but it is torch.int64. Pass .to"),
        ("layout", lambda x: x[:-1], r"must have the shape \((16|2),\), one (label|number) for each"),
        ("layout", lambda x: torch.stack([x, x], 1)[:, 0], "must be contiguous, but its stride is 2"),
        ("layout", lambda x: x[None], "must have 1 dimensions"),
        ("d", lambda x: x.float(), "^d of a GEMM grouped by M must be torch.bfloat16, but it is torch.float32"),
        ("d", lambda x: x[..., :8], "^d must have the shape"),
        ("d", lambda x: x.mT.contiguous().mT, "^d must be row-major"),
        ("d", lambda x: x.requires_grad_(), "^d requires grad"),
        ("d", lambda x: x.to("meta"), "^d is a meta tensor"),
    ],
)
def test_wrong_tensors(kind: str, form: str, name: str, change: Any, message: str) -> None:
    a, b, layout, d = zeros(kind, form)
    given: dict[str, Any] = {"a": a, "b": b, "layout": layout, "d": d}
    whole = given[name]
    if isinstance(whole, tuple):
        given[name] = (changed(whole[0], change), whole[1])
    else:
        given[name] = change(whole)
    with pytest.raises(InvalidInputError, match=message):
        call(kind, form, given["a"], given["b"], given["d"], given["layout"])


def changed(x: torch.Tensor, change: Any) -> Any:
    """A change of FP8 values, by way of bytes, since torch has few operations on FP8."""
    y = change(x.view(torch.uint8))
    return y.view(E4M3) if isinstance(y, torch.Tensor) and y.dtype == torch.uint8 else y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("pair", "change", "message"),
    [
        ("a", lambda x, sf: (x, sf[..., None]), "^the scales of a must have [23] dimensions"),
        ("a", lambda x, sf: (x, sf[..., :0]), r"^the scales of a must have the shape .*one per row per 128 of K of a"),
        ("a", lambda x, sf: (x, sf.half()), "^the scales of a must be torch.float32"),
        ("b", lambda x, sf: (x, sf[0]), "^the scales of b must have 3 dimensions"),
        ("b", lambda x, sf: (x, sf.expand(-1, 24, -1)), "^the scales of b must have the shape .*of each group of b"),
        ("b", lambda x, sf: x, "^b must be a pair"),
        ("a", lambda x, sf: (x, sf, sf), "^a must be a pair .*3 elements"),
    ],
)
def test_wrong_scales(form: str, pair: str, change: Any, message: str) -> None:
    a, b, layout, d = zeros("fp8", form)
    given = {"a": a, "b": b}
    given[pair] = change(*given[pair])
    with pytest.raises(InvalidInputError, match=message):
        call("fp8", form, given["a"], given["b"], d, layout)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_supported(form: str) -> None:
    (a, sfa), (b, sfb), layout, d = zeros("fp8", form)
    for x, y, message in (
        ((a, sfa), (b.view(torch.uint8).mT.contiguous().mT.view(E4M3), sfb), "^N of b is contiguous.*Store b K-major"),
        ((a.view(torch.uint8), sfa), (b, sfb), "^a is torch.uint8, as packed FP4"),
        ((a, sfa.int()), (b, sfb), "^the scales of a are torch.int32"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            call("fp8", form, x, y, d, layout)
    for options in ({"recipe": (1, 1, 128)}, {"recipe_a": (1, 128), "recipe_b": (1, 128)}):
        with pytest.raises(
            UnsupportedError, match=r"^recipe.* is not supported by GEMMs grouped by M: only \(1, 128, 128"
        ):
            call("fp8", form, (a, sfa), (b, sfb), d, layout, **options)
    a, b, layout, d = zeros("bf16", form, k=96)
    with pytest.raises(UnsupportedError, match=r"^K must be a multiple of 64 if N of b is contiguous, but it is 96"):
        call("bf16", form, a, b.mT.contiguous().mT, d, layout)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_memory(kind: str, form: str) -> None:
    a, b, layout, d = zeros(kind, form, k=0)
    with pytest.raises(InvalidInputError, match=r"^K must be positive"):
        call(kind, form, a, b, d, layout)
    a, b, layout, d = zeros(kind, form, k=136)
    if kind == "fp8":
        with pytest.raises(InvalidInputError, match=r"^K must be a multiple of 16, .*it is 136. Pad .* K = 144"):
            call(kind, form, a, b, d, layout)
    a, b, layout, d = zeros("bf16", form, k=12)
    with pytest.raises(InvalidInputError, match=r"^the row stride of a must be a multiple of 16 bytes, but it is 24"):
        call("bf16", form, a, b, d, layout)
    a, b, layout, d = zeros("bf16", form)
    moved = torch.zeros(b.numel() + 1, dtype=BF16)[1:].view(b.shape)
    with pytest.raises(
        InvalidInputError, match=r"^b must start at a multiple of 16 bytes, but its address is 2 past one"
    ):
        call("bf16", form, a, moved, d, layout)
    with pytest.raises(InvalidInputError, match=r"^d and a share memory"):
        call("bf16", form, a, b, a.flatten()[: d.numel()].view(d.shape), layout)
    with pytest.raises(InvalidInputError, match=r"^d and (grouped_layout|masked_m) share memory"):
        call("bf16", form, a, b, d, d.view(-1).view(torch.int32)[: layout.shape[0]])
    b.untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match=r"^b has no memory"):
        call("bf16", form, a, b, d, layout)


def test_groups_of_a_and_b() -> None:
    a, b, layout, d = zeros("bf16", "masked")
    with pytest.raises(InvalidInputError, match=r"^a and b must agree in the number of groups.*b has 3 groups"):
        call("bf16", "masked", a, torch.zeros(3, 24, 128, dtype=BF16), d, layout)
    far = torch.zeros(2, 20, 128, dtype=BF16)[:, :16]
    with pytest.raises(InvalidInputError, match=r"^a must be K-major: .*each group right after"):
        call("bf16", "masked", far, b, d, layout)
    with pytest.raises(InvalidInputError, match=r"^d must be row-major.*each group right after"):
        call("bf16", "masked", a, b, torch.zeros(2, 20, 24, dtype=BF16)[:, :16], layout)


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_form_is_suggested(kind: str) -> None:
    a, b, _, d = zeros(kind, "psum")
    for form, length in (("psum", 16), ("contiguous", 2)):
        with pytest.raises(InvalidInputError, match=f"for use_psum_layout={form != 'psum'}"):
            call(kind, form, a, b, d, torch.zeros(length, dtype=torch.int32))


@pytest.mark.parametrize("wrong", [0, -3, 2.5, None, True, torch.tensor(4)])
def test_estimates(wrong: Any) -> None:
    for kind in KINDS:
        a, b, layout, d = zeros(kind, "masked")
        with pytest.raises(InvalidInputError, match=r"^expected_m must be a positive integer"):
            call(kind, "masked", a, b, d, layout, expected_m=wrong)
        a, b, layout, d = zeros(kind, "psum")
        if wrong is not None:
            with pytest.raises(InvalidInputError, match=r"^expected_m_for_psum_layout must be a positive integer"):
                call(kind, "psum", a, b, d, layout, expected_m_for_psum_layout=wrong)
            with pytest.raises(InvalidInputError, match="but use_psum_layout is not set"):
                call(kind, "contiguous", a, b, d, torch.zeros(16, dtype=torch.int32), expected_m_for_psum_layout=wrong)


@pytest.mark.parametrize("options", [{"enable_overlap": True}, {"max_block_n": 256}, {"signal": torch.zeros(1)}])
def test_signals_are_refused(options: Any) -> None:
    a, b, layout, d = zeros("fp8", "masked")
    with pytest.raises(UnsupportedError, match=r"^enable_overlap, max_block_n and signal"):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, layout, 4, **options)


@pytest.mark.parametrize("option", [{"disable_ue8m0_cast": 1}, {"compiled_dims": "x"}])
def test_wrong_options(option: Any) -> None:
    for form in FORMS:
        a, b, layout, d = zeros("fp8", form)
        with pytest.raises(InvalidInputError, match=next(iter(option))):
            call("fp8", form, a, b, d, layout, **option)


@pytest.mark.parametrize(("form", "value"), [("contiguous", 2), ("psum", 17), ("psum", -1), ("masked", 17)])
def test_the_reference_finds_rows_and_groups_that_do_not_exist(form: str, value: int) -> None:
    a, b, layout, d = zeros("bf16", form)
    layout[1] = value
    with pytest.raises(InvalidInputError, match=f"(has the group 2 in row 1|is {value}, but it must be from 0 to 16)"):
        call("bf16", form, a, b, d, layout)


def test_an_empty_group_may_end_where_the_previous_one_does() -> None:
    layout = torch.tensor([5, 5, 128, 131], dtype=torch.int32)
    rows = [range(*where.indices(256)) for _, where in group_rows(layout, "psum", 256, 128)]
    assert [len(x) for x in rows] == [5, 0, 0, 3]
    assert rows[-1].start == 128
