"""Epilogues of products grouped by M: those of the groups' own products, in each form; what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from grouped_cases import BF16, E4M3, FORMS, KINDS, Case, Routing, call

import deep_gemm
from deep_gemm import Epilogue, InvalidInputError, UnsupportedError, ops, quantize, select
from deep_gemm.arch import SM90

F32 = torch.float32
N, K, MAX_M = 512, 384, 140
ROUTING = Routing((5, 0, 100, 128, 1), rows=128 * 5)
"""With a row of tiles of padding alone at the end."""
UNTOUCHED, OF_ZEROS = 9.0, 1e-4 / 448

PARTS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation": "swiglu"},
    "all of swiglu": {"activation": "swiglu", "alpha": 0.5, "bias": F32, "row_factor": True, "clamp": 1.5},
    "powers of two": {"activation": "swiglu", "use_ue8m0": True},
    "interleaved": {"activation": "swiglu", "interleaved": True, "bias": F32},
    "plain": {"activation": "gelu", "alpha": 0.5, "bias": BF16, "row_factor": True},
    "alpha, a tensor": {"alpha": torch.tensor(0.5), "bias": F32},
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def epilogue(name: str, groups: int, m: int, n: int = N) -> Epilogue:
    """Its tensors are for all groups: bias, and row_factor of rows without padding between them."""
    parts = dict(PARTS[name])
    if "bias" in parts:
        parts["bias"] = random(groups, n, seed=3).to(parts["bias"])
    if "row_factor" in parts:
        parts["row_factor"] = random(m, seed=4)
    return Epilogue(**parts)


def spread(case: Case, form: str, whole: Epilogue) -> Epilogue:
    """The epilogue of the masked form."""
    if whole.row_factor is None or form != "masked":
        return whole
    given = {name: getattr(whole, name) for name in ("bias", "activation", "alpha", "clamp")}
    return Epilogue(**given, row_factor=case.spread(whole.row_factor[:, None], MAX_M)[..., 0])


def of_group(whole: Epilogue, group: int, rows: slice) -> Epilogue:
    given = {name: getattr(whole, name) for name in ("activation", "alpha", "clamp", "use_ue8m0", "interleaved")}
    bias, each = whole.bias, whole.row_factor
    given |= {"bias": None if bias is None else bias[group], "row_factor": None if each is None else each[rows]}
    return Epilogue(**given)


def outputs(rows: Any, columns: int, cast: bool) -> Any:
    if not cast:
        return torch.full((*rows, columns), UNTOUCHED, dtype=BF16)
    return torch.full((*rows, columns), UNTOUCHED).to(E4M3), torch.full((*rows, columns // 128), UNTOUCHED)


def apart(case: Case, whole: Epilogue, columns: int, cast: bool) -> Any:
    """A dense product for each group."""
    d = outputs((case.routing.m,), columns, cast)
    for group, rows in enumerate(case.routing.slices()):
        out = tuple(x[rows] for x in d) if cast else d[rows]
        more = {"epilogue": of_group(whole, group, rows)}
        if case.kind == "bf16":
            deep_gemm.bf16_gemm_nt(case.a[rows], case.b[group], out, **more)
        else:
            a, b = (case.a[rows], case.sfa[rows]), (case.b[group], case.sfb[group])
            deep_gemm.fp8_gemm_nt(a, b, out, **more)
    return d


def each(d: Any) -> tuple[torch.Tensor, ...]:
    """Comparable tensors of d."""
    return (d[0].view(torch.uint8), d[1]) if isinstance(d, tuple) else (d,)


def assert_as_apart(case: Case, form: str, name: str, cast: bool) -> Any:
    whole = epilogue(name, len(case.routing.counts), case.routing.m, case.n)
    columns = case.n // 2 if whole.activation == "swiglu" else case.n
    a, b, layout = case.arguments(form, MAX_M)
    d = outputs((a[0] if case.kind == "fp8" else a).shape[:-1], columns, cast)
    call(case.kind, form, a, b, d, layout, epilogue=spread(case, form, whole))
    for found, wanted in zip(each(d), each(apart(case, whole, columns, cast)), strict=True):
        assert torch.equal(case.gathered(found), case.gathered(wanted))
    return d


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name, parts in PARTS.items() if "use_ue8m0" not in parts])
@pytest.mark.parametrize("kind", KINDS)
def test_each_group_has_the_epilogue_of_its_own_product(kind: str, name: str, form: str) -> None:
    assert_as_apart(Case(kind, ROUTING, N, K, "cpu"), form, name, cast=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_of_groups(kind: str, name: str, form: str) -> None:
    """In the index form, rows of padding alone are zeros, with the scale of zeros; in others they stay as they are."""
    case = Case(kind, ROUTING, N, K, "cpu")
    values, scales = assert_as_apart(case, form, name, cast=True)
    padding = (values[0, 5:], scales[0, 5:]) if form == "masked" else (values[512:], scales[512:])
    least = 2**-22 if name == "powers of two" else torch.tensor(1e-4) / 448
    wanted = (0.0, least) if form == "contiguous" else (UNTOUCHED, UNTOUCHED)
    for found, value in zip(padding, wanted, strict=True):
        assert bool((found.float() == value).all())


def test_scales_of_the_masked_form_may_be_those_that_the_next_product_reads() -> None:
    case = Case("fp8", ROUTING, N, K, "cpu")
    whole, (a, b, layout) = epilogue("swiglu", 5, ROUTING.m), case.arguments("masked", MAX_M)
    values, scales = outputs((5, MAX_M), N // 2, True)
    turned = torch.full((5, N // 2 // 128, MAX_M), UNTOUCHED).mT
    for sf in (scales, turned):
        call("fp8", "masked", a, b, (values, sf), layout, epilogue=whole)
    assert torch.equal(scales, turned)


def given(
    form: str = "masked", kind: str = "fp8", d: Any = None, cast: bool = True, **parts: Any
) -> Callable[[], object]:
    """A call with an epilogue of these parts."""

    def made() -> None:
        case = Case(kind, Routing((3, 4)), N, K, "cpu")
        a, b, layout = case.arguments(form, 8)
        rows = (a[0] if kind == "fp8" else a).shape[:-1]
        out = outputs(rows, N // 2, cast) if d is None else d
        call(kind, form, a, b, out, layout, epilogue=Epilogue(**{"activation": "swiglu", **parts}))

    return made


def pair(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 8, N // 2).to(E4M3), scales


SHARED = torch.zeros(2, 8, N // 2).to(E4M3)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "d of the product's shape": (
        given(d=torch.empty(2, 8, N, dtype=BF16)),
        r"d must have the shape \(2, 8, 256\), .* of which gate has half, but it has \(2, 8, 512\)",
    ),
    "d of float32": (given(d=torch.empty(2, 8, N // 2)), "d of a GEMM grouped by M must be torch.bfloat16"),
    "use_ue8m0 of bfloat16": (
        given(cast=False, use_ue8m0=True),
        "use_ue8m0 is for the scales of a d of FP8, but d is a torch.bfloat16 tensor",
    ),
    "residual": (
        given(activation=None, residual=torch.empty(2, 8, N, dtype=BF16)),
        "a GEMM grouped by M adds no residual. Add it to d after the call",
    ),
    "bias of one group": (given(bias=torch.ones(N)), "bias must have 2 dimensions"),
    "bias of other groups": (given(bias=torch.ones(3, N)), r"bias of the epilogue must have the shape \(2, 512\)"),
    "factors of all rows": (
        given(row_factor=torch.ones(16)),
        r"row_factor of the epilogue must have the shape \(2, 8\), but it has \(16,\)",
    ),
    "factors with a gap": (
        given(row_factor=torch.ones(2, 16)[:, :8]),
        r"row_factor of the epilogue must have its groups right after one another.*Pass row_factor.contiguous\(\)",
    ),
    "factors of groups": (
        given("contiguous", row_factor=torch.ones(2)),
        r"row_factor of the epilogue must have the shape \(256,\), but it has \(2,\)",
    ),
    "scales of one group": (
        given(d=pair(torch.empty(1, 8, 2))),
        r"the scales of d must be torch.float32 \(2, 8, 2\), one for each row",
    ),
    "scales with gaps": (
        given(d=pair(torch.empty(2, 8, 4)[..., ::2])),
        "the scales of d must be contiguous along one dimension, with each group right after",
    ),
    "scales in d": (
        given(d=(SHARED, SHARED.view(F32).flatten()[:32].view(2, 8, 2))),
        "d and the scales of d share memory",
    ),
    "FP8 scales of another": (
        given(d=quantize.rows(torch.zeros(256, N // 2)), form="psum", activation="silu"),
        r"d must have the shape \(256, 512\)",
    ),
    "FP8 without an epilogue": (
        lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            quantize.rows(random(128, K)), fp8_weights(), quantize.rows(random(128, N)), torch.zeros(128).int()
        ),
        r"d must be a torch.Tensor without an epilogue.* pass epilogue=deep_gemm.Epilogue\(\)",
    ),
    "a name": (
        lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            *(quantize.rows(random(128, K)), fp8_weights(), torch.empty(128, N).bfloat16(), torch.zeros(128).int()),
            epilogue="swiglu",  # type: ignore[arg-type]
        ),
        r"Pass deep_gemm.Epilogue\(activation='swiglu'\)",
    ),
}


def fp8_weights() -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantize.blocks(random(N, K))
    return values[None], scales[None]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    made, sentence = REFUSED[name]
    with pytest.raises((InvalidInputError, UnsupportedError), match=sentence):
        made()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_for_groups_have_the_plain_parts(kind: str, form: str) -> None:
    name = {"contiguous": "contiguous", "psum": "contiguous_psum", "masked": "masked"}[form]
    more = {"groups": 4, "expected_m": 32 if form == "masked" else 0}
    op = f"m_grouped_{kind}_gemm_nt_{name}"
    for text in ("alpha+rows+bias:f32+gelu_erf", "bias:f16", "swiglu+clamp:7.0", "silu+fp8", "swiglu+fp8:ue8m0"):
        output = "e4m3" if "fp8" in text else "bf16"
        spec = ops.spec(256, 4096, 7168, 132, op, epilogue=text, output=output, **more)  # type: ignore[arg-type]
        assert select.rank(spec, SM90)


def test_kernels_get_factors_and_scales_of_all_groups(gpu: FakeGpu) -> None:
    """The first call is remembered, others with other tensors are replays. Either dimension of scales is contiguous."""
    groups, max_m, blocks = 3, 8, N // 2 // 128
    a = torch.zeros(groups, max_m, K).to(E4M3), torch.ones(groups, K // 128, max_m).mT
    b = torch.zeros(groups, N, K).to(E4M3), torch.ones(groups, N // 128, K // 128)
    bias, counts = torch.zeros(1, N).expand(groups, N), torch.zeros(groups).int()
    for turned, strides in ((True, (blocks * max_m - max_m, 1, max_m)), (False, (0, blocks, 1))):
        prepared = gpu.prepared
        for _ in range(3):
            values = torch.zeros(groups, max_m, N // 2).to(E4M3)
            scales = torch.zeros(groups, blocks, max_m).mT if turned else torch.zeros(groups, max_m, blocks)
            each = torch.ones(groups, max_m)
            epilogue = Epilogue(bias, "swiglu", row_factor=each)
            deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, (values, scales), counts, 4, epilogue=epilogue)
            launched = gpu.launched[-1]
            assert str(launched.spec.epilogue) == "rows+bias:f32+swiglu+fp8"
            assert (launched.spec.grouping, launched.spec.d.dtype, launched.spec.n) == ("masked", "e4m3", N)
            found = [launched.strides[name] for name in ("sfd", "bias", "row_factor")]
            assert found == [strides, (0, 1), (1,)]
            assert (launched.at["sfd"], launched.at["row_factor"]) == (scales.data_ptr(), each.data_ptr())
        assert gpu.prepared == prepared + 2  # the first call, and a record that replays share
