"""What products compute on the CPU, where the reference takes the kernel's place: forms, strides, c, groups."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grouped_cases import BF16, E4M3, Case, Routing, call
from grouped_cases import FORMS as GROUPED_FORMS
from grouped_cases import KINDS as GROUPED_KINDS
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import UnsupportedError
from deep_gemm.ops import checks, cublaslt, reference
from deep_gemm.ops.reference import exact_product, group_rows
from deep_gemm.testing import guarded, integer_operands

FORMS = ("nt", "nn", "tn", "tt")
DTYPES = {"bf16": BF16, "fp16": torch.float16, "cublaslt": BF16, "cublaslt fp16": torch.float16}
KINDS = ("fp8", *DTYPES)
M, N, K = 20, 200, 272


def function(kind: str, form: str) -> Callable[..., None]:
    found: Callable[..., None] = getattr(deep_gemm, f"{kind.split()[0]}_gemm_{form}")
    return found


def random(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(kind: str, m: int = M, n: int = N, k: int = K) -> tuple[Any, Any, torch.Tensor]:
    """a (M, K), b (N, K) and their product."""
    if kind == "fp8":
        a, b = integer_operands(m, n, k, "cpu")
        return a, b, exact_product(*a, *b)
    x, y = random(m, k, DTYPES[kind], 1), random(n, k, DTYPES[kind], 2)
    return x, y, x.double() @ y.double().t()


def turned(x: Any, copied: bool = False) -> Any:
    """An operand with K first, as a view, or in memory of its own."""
    if isinstance(x, tuple):
        return turned(x[0], copied), x[1].t()
    return x.t().contiguous() if copied else x.t()


def given_as(form: str, a: Any, b: Any, copied: bool = False) -> tuple[Any, Any]:
    """a and b in the layout of a form."""
    return turned(a, copied) if form[0] == "t" else a, turned(b, copied) if form[1] == "n" else b


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_and_accumulation(kind: str, form: str, wide: bool) -> None:
    """With operands of which K is contiguous, and with others."""
    a, b, product = operands(kind)
    out = torch.float32 if wide else DTYPES.get(kind, BF16)
    call = function(kind, form)
    for copied in (False, True):
        x, y = given_as(form, a, b, copied)
        d, c = torch.full((M, N), float("nan"), dtype=out), random(M, N, out, 3)
        assert call(x, y, d) is None  # type: ignore[func-returns-value]
        assert torch.equal(d, product.to(out))
        before = c.clone()
        call(x, y, d, c)
        assert torch.equal(d, (product + c.double()).to(out))
        assert torch.equal(c, before)
        call(x, y, c, c=c)
        assert torch.equal(c, d)
    if "cublaslt" not in kind:
        call(x, y, d, compiled_dims="n", epilogue=None, alpha=None)


def test_what_is_added_is_rounded_once() -> None:  # 256 + 1 is 256 in bfloat16
    d, ones = torch.full((1, 1), 256.0, dtype=BF16), torch.ones(1, 2, dtype=BF16)
    deep_gemm.bf16_gemm_nt(ones, ones, d, c=d)
    assert d.item() == 258.0


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    sizes=st.tuples(*[st.integers(0, 9)] * 3),
    ways=st.tuples(*[st.sampled_from(["rows", "columns", "sparse", "expanded"])] * 2),
    pads=st.tuples(*[st.integers(0, 9)] * 3),
    accumulate=st.sampled_from(["", "c", "d"]),
    out=st.sampled_from([torch.float32, BF16]),
)
def test_strides_are_read_and_not_names(
    form: str, sizes: Any, ways: Any, pads: Any, accumulate: str, out: torch.dtype
) -> None:
    """For any strides the product is right, and the memory between rows of d is not written."""
    m, n, k = sizes

    def laid_out(rows: int, way: str, pad: int, seed: int) -> torch.Tensor:
        strides = {"columns": (1, rows + pad), "sparse": (2 * k + pad, 2)}.get(way, (k + pad, 1))
        own = 1 if way == "expanded" else rows
        x = guarded((own, k), BF16, "cpu", strides, offset=2 * pad).tensor
        if x.numel():
            x.copy_(random(own, k, BF16, seed))
        return x.expand(rows, k)

    a, b = laid_out(m, ways[0], pads[0], 1), laid_out(n, ways[1], pads[1], 2)
    buffer = guarded((m, n), out, "cpu", (n + pads[2], 1), offset=out.itemsize * pads[2])
    d = buffer.tensor
    c = {"": None, "c": random(m, n, out, 3), "d": d}[accumulate]
    if c is d and d.numel():
        d.copy_(random(m, n, out, 3))
    expected = a.double() @ b.double().t() + (c.double() if c is not None else 0.0)
    function("bf16", form)(*given_as(form, a, b), d, c)
    assert torch.equal(d, expected.to(out))
    buffer.check("d")


@pytest.mark.parametrize("kind", ["fp8", "bf16", "cublaslt"])
@pytest.mark.parametrize("accumulate", ["", "c", "d"])
def test_sizes_of_zero(kind: str, accumulate: str) -> None:
    for m, n, k in ((0, N, K), (M, 0, K), (M, N, 0), (0, 0, 0)):
        a, b = ((torch.zeros(rows, k).to(E4M3 if kind == "fp8" else BF16)) for rows in (m, n))
        blocks = -(-k // 128)
        given = ((a, torch.ones(m, blocks)), (b, torch.ones(-(-n // 128), blocks))) if kind == "fp8" else (a, b)
        added = random(m, n, BF16, 3)
        d = added.clone() if accumulate == "d" else torch.full((m, n), float("nan"), dtype=BF16)
        function(kind, "nt")(*given, d, {"": None, "c": added, "d": d}[accumulate])
        assert torch.equal(d, added if accumulate else torch.zeros_like(added))


def test_no_k_writes_where_inference_mode_made_d() -> None:
    with torch.inference_mode():
        d = torch.ones(2, 3, dtype=BF16)
    deep_gemm.bf16_gemm_nt(torch.ones(2, 0).bfloat16(), torch.ones(3, 0).bfloat16(), d)
    assert not d.any()


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = random(77, 40, BF16), random(55, 40, BF16, 1), random(77, 55, torch.float32, 2)
    whole, parts = c.clone(), c.clone()
    deep_gemm.bf16_gemm_nt(a, b, whole, c=whole)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 500)
    deep_gemm.bf16_gemm_nt(a, b, parts, c=parts)
    assert torch.equal(whole, parts)


def test_weights_of_a_module_are_multiplied_inside_of_an_autograd_function() -> None:
    """torch calls forward without grad mode, and the code around it with grad mode."""
    (x, sfa), (b, sfb), product = operands("fp8")
    weights = torch.nn.Parameter(b), torch.nn.Parameter(sfb)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            deep_gemm.fp8_gemm_nt((x, sfa), weights, d := torch.empty(M, N, dtype=BF16))  # type: ignore[arg-type]
            return d

    d = torch.empty(M, N, dtype=BF16)
    deep_gemm.fp8_gemm_nt((x, sfa), weights, d)
    assert d.grad_fn is None
    assert torch.equal(d, product.to(BF16))
    assert torch.equal(Linear.apply(x, *weights), d)  # type: ignore[no-untyped-call]


def test_other_names() -> None:
    others = {f"fp8_fp4_gemm_{form}": f"fp8_gemm_{form}" for form in FORMS if form != "nt"}
    masked = {"fp8_m_grouped_gemm_nt_masked": "m_grouped_fp8_gemm_nt_masked"}
    masked |= {"bf16_m_grouped_gemm_nt_masked": "m_grouped_bf16_gemm_nt_masked"}
    others["m_grouped_fp8_fp4_gemm_nn_contiguous"] = "m_grouped_fp8_gemm_nn_contiguous"
    for name, other in (others | masked).items():
        assert getattr(deep_gemm, name) is getattr(deep_gemm, other)


def test_fp8_without_scales_goes_through_torch() -> None:
    a, b = (random(rows, 32, torch.float32, rows).to(E4M3) for rows in (16, 32))
    d = torch.empty(16, 32, dtype=BF16)
    deep_gemm.cublaslt_gemm_nt(a, b, d)
    assert torch.equal(d, (a.double() @ b.double().t()).bfloat16())


@pytest.fixture
def through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code path of a GPU, which torch can also run on the CPU if the output's dtype is the inputs'."""
    monkeypatch.setattr(cublaslt, "plain_arithmetic", lambda device: torch.inference_mode())
    monkeypatch.setattr(checks, "check_devices", lambda named: SimpleNamespace(type="cuda"))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_given_to_torch(through_torch: None, form: str, accumulate: bool) -> None:
    a, b, product = operands("cublaslt")
    d = random(M, N, BF16)
    expected = (product + (d.double() if accumulate else 0.0)).bfloat16()
    function("cublaslt", form)(*given_as(form, a, b), d, d if accumulate else None)
    assert torch.allclose(d.float(), expected.float(), rtol=2**-7)


def test_what_torch_cannot_do_is_refused_in_words(through_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such\n  algorithm")

    monkeypatch.setattr(cublaslt, "_multiply", fails)
    a, b, _ = operands("cublaslt")
    with pytest.raises(UnsupportedError, match=r"torch .* cannot multiply torch.bfloat16 .*: no such algorithm"):
        deep_gemm.cublaslt_gemm_nt(a, b, torch.empty(M, N, dtype=BF16))


@pytest.fixture(autouse=True)
def default_alignment() -> Iterator[None]:
    yield
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def exact(case: Case) -> torch.Tensor:
    return case.gathered(case.exact()).to(BF16)


# The last but one has less than the alignment after its last group.
ROUTINGS = [Routing((3, 0, 130, 17)), Routing((0, 0, 5)), Routing((200, 0, 0)), Routing((128, 128), rows=300)]
ROUTINGS += [Routing((0, 0, 0), rows=128), Routing((100, 20), rows=148), Routing((1,))]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("form", GROUPED_FORMS)
@pytest.mark.parametrize("kind", GROUPED_KINDS)
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


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(COUNTS, st.sampled_from([16, 32]), st.integers(0, 50), st.sampled_from(GROUPED_KINDS))
def test_forms_give_the_same_rows(counts: list[int], alignment: int, past: int, kind: str) -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    routing = Routing(tuple(counts), alignment=alignment)
    case = Case(kind, Routing(tuple(counts), max(1, routing.end + past), alignment), 24, 144, "cpu", seed=past)
    found = [case.gathered(case.run(form, max_m=max(counts) + 3)) for form in GROUPED_FORMS]
    assert all(torch.equal(d, found[0]) for d in found)


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("kind", GROUPED_KINDS)
def test_grouped_nn(kind: str, psum: bool) -> None:
    """b as a transposed view of K-major storage; for bfloat16 also contiguous as (G, K, N)."""
    case = Case(kind, Routing((3, 20)), 136, 192, "cpu", integers=True)
    a, b, layout = case.arguments("psum" if psum else "contiguous")
    views: list[Any] = [(b[0].mT, b[1].mT)] if kind == "fp8" else [b.mT, b.mT.contiguous()]
    for view in views:
        d = torch.zeros(case.routing.m, 136, dtype=BF16)
        getattr(deep_gemm, f"m_grouped_{kind}_gemm_nn_contiguous")(a, view, d, layout, use_psum_layout=psum)
        assert torch.equal(case.gathered(d), exact(case))


def test_options_by_position_and_by_name() -> None:
    case = Case("fp8", Routing((3, 20)), 24, 144, "cpu", integers=True)
    recipe, pairs = (1, 128, 128), {"recipe_a": (1, 128), "recipe_b": (128, 128)}
    contiguous: Any = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    masked: Any = deep_gemm.fp8_m_grouped_gemm_nt_masked
    for form, call_of in (
        ("psum", lambda a, b, d, x: contiguous(list(a), list(b), d, x, recipe, None, None, "nk", True, True, True, 9)),
        ("psum", lambda a, b, d, x: contiguous(a, b, d, x, **pairs, use_psum_layout=True)),
        ("masked", lambda a, b, d, x: masked(a, b, d, x, 7, recipe, None, None, "nk", True)),
        ("masked", lambda a, b, d, x: masked(a, b, d, x, 10**6, enable_overlap=False, signal=None)),
    ):
        a, b, layout = case.arguments(form)
        d = torch.zeros(*a[0].shape[:-1], 24, dtype=BF16)
        call_of(a, b, d, layout)  # type: ignore[no-untyped-call]
        assert torch.equal(case.gathered(d), exact(case))


def test_an_empty_group_may_end_where_the_previous_one_does() -> None:
    layout = torch.tensor([5, 5, 128, 131], dtype=torch.int32)
    rows = [range(*where.indices(256)) for _, where in group_rows(layout, "psum", 256, 128)]
    assert ([len(x) for x in rows], rows[-1].start) == ([5, 0, 0, 3], 128)
