"""What calls of GEMMs grouped by M launch: specs, strides, transposes of scales, replays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu, calls_behind
from grouped_cases import BF16, E4M3, FORMS, KINDS, call

import deep_gemm
from deep_gemm import InvalidInputError, ops
from deep_gemm.ops import m_grouped
from deep_gemm.ops.layouts import scales_stride
from deep_gemm.ops.m_grouped import MGrouped
from deep_gemm.spec import GemmSpec, Operand, TransposeSpec
from deep_gemm.testing import guarded

G, M, N, K = 3, 40, 136, 272
LAYOUTS = {"contiguous": "grouped_layout", "psum": "grouped_layout", "masked": "masked_m"}


@pytest.fixture
def gpu(gpu: FakeGpu) -> Iterator[FakeGpu]:
    """With the default alignment afterwards."""
    yield gpu
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def tensors(kind: str, form: str, ready: bool = True) -> Any:
    """a, b, the layout and d. ``ready``: TMA can read the scales of a as they are."""
    leading = (G,) if form == "masked" else ()
    dtype = E4M3 if kind == "fp8" else BF16
    a, b = torch.zeros(*leading, M, K).to(dtype), torch.zeros(G, N, K).to(dtype)
    layout = torch.zeros(M if form == "contiguous" else G, dtype=torch.int32)
    d = torch.zeros(*leading, M, N, dtype=BF16)
    if kind == "bf16":
        return a, b, layout, d
    sfa = torch.ones(*leading, 3, M).mT if ready else torch.ones(*leading, M, 3)
    return (a, sfa), (b, torch.ones(G, 2, 3)), layout, d


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_the_strides_and_the_operands(gpu: FakeGpu, kind: str, form: str) -> None:
    a, b, layout, d = tensors(kind, form)
    options = {"expected_m": 9} if form == "masked" else {}
    call(kind, form, a, b, d, layout, **options)
    (launched,) = gpu.launched
    fp8 = kind == "fp8"
    assert launched.spec == GemmSpec(
        m=M,
        n=N,
        k=K,
        a=Operand("e4m3", scaling="1x128") if fp8 else Operand("bf16"),
        b=Operand("e4m3", scaling="128x128") if fp8 else Operand("bf16"),
        d=Operand("bf16", "mn"),
        num_sms=132,
        groups=G,
        grouping=form,  # type: ignore[arg-type]
        alignment=1 if form == "masked" else 128,
        expected_m=16 if form == "masked" else 0,
    )
    scales = {"sfa": (1, M), "sfb": (6, 3, 1)} if fp8 else {}
    assert launched.strides == {"a": (K, 1), "b": (K, 1), "d": (N, 1), **scales}
    names = ["a", "sfa", "b", "sfb", "layout", "d"] if fp8 else ["a", "b", "layout", "d"]
    (x, y) = ((a[0], a[1]), (b[0], b[1])) if fp8 else ((a,), (b,))
    assert launched.at == dict(zip(names, (t.data_ptr() for t in (*x, *y, layout, d)), strict=True))


def test_the_spec_of_a_layer_is_that_of_its_call(gpu: FakeGpu) -> None:
    for kind in KINDS:
        for form in FORMS:
            op = f"m_grouped_{kind}_gemm_nt_" + {"psum": "contiguous_psum"}.get(form, form)
            a, b, layout, d = tensors(kind, form)
            call(kind, form, a, b, d, layout)
            size = 64 if form == "masked" else 128
            asked = ops.spec(M, N, K, 132, op, groups=G, alignment=size, expected_m=size)
            assert gpu.launched[-1].spec == asked


@pytest.mark.parametrize(("expected", "rounded"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (33, 40), (999, 40)])
def test_estimates_are_rounded_so_that_few_plans_are_made(gpu: FakeGpu, expected: int, rounded: int) -> None:
    for kind in KINDS:
        a, b, layout, d = tensors(kind, "masked")
        call(kind, "masked", a, b, d, layout, expected_m=expected)
        assert gpu.launched[-1].spec.expected_m == rounded
    before = gpu.prepared
    call(kind, "masked", a, b, d, layout, expected_m=rounded if rounded < M else 64 if expected < 64 else 1000)
    assert gpu.prepared == before


def test_another_alignment_is_another_call(gpu: FakeGpu) -> None:
    """vLLM sets and restores it around each call."""
    for kind in KINDS:
        a, b, layout, d = tensors(kind, "psum")
        before = gpu.prepared
        for alignment in (128, 64, 128, 64, 128):
            deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
            call(kind, "psum", a, b, d, layout)
            assert gpu.launched[-1].spec.alignment == alignment
        assert gpu.prepared == before + 2
        deep_gemm.set_mk_alignment_for_contiguous_layout(64)
        call(kind, "masked", *tensors(kind, "masked")[:2], tensors(kind, "masked")[3], tensors(kind, "masked")[2])
        assert gpu.launched[-1].spec.alignment == 1
        deep_gemm.set_mk_alignment_for_contiguous_layout(128)


@pytest.mark.parametrize("form", FORMS)
def test_scales_that_lie_otherwise_are_transposed_first(gpu: FakeGpu, form: str) -> None:
    """First, warm and replayed."""
    for _ in range(3):
        a, b, layout, d = tensors("fp8", form, ready=False)
        for _ in range(2):
            gpu.launched.clear()
            call("fp8", form, a, b, d, layout)
            transpose, product = gpu.launched
            masked = form == "masked"
            assert transpose.spec == TransposeSpec(rows=M, columns=3, batch=G if masked else 1)
            assert transpose.strides == {"source": (3 * M, 3, 1) if masked else (0, 3, 1)}
            assert transpose.at["source"] == a[1].data_ptr()
            assert product.at["sfa"] == transpose.at["target"] != a[1].data_ptr()
            assert product.strides["sfa"] == (1, M)


def test_scratch_of_masked_scales_is_padded_to_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_gemm.options.num_sms_for", lambda device: 132)
    monkeypatch.setattr("deep_gemm.options.whole_gpu", lambda device: True)
    (a, sfa), b, layout, d = tensors("fp8", "masked", ready=False)
    operation = MGrouped("m_grouped_fp8_gemm_nt_masked")
    bits = a.view(torch.uint8)[:, :7].contiguous().view(E4M3)
    x = operation.check((bits, sfa[:, :7]), b, d[:, :7].contiguous(), layout, 4)
    assert x is not None
    work = operation.work(x, 0)
    assert work.scratch == {"sfa transposed": ((G, 3, 8), torch.float32)}
    assert work.steps[-1].strides["sfa"] == (1, 8)
    assert work.steps[-1].operands["sfa"] == "sfa transposed"
    assert operation.shape(x) == f"7x{N}x{K} in {G} groups"
    assert operation.flops(x) == 2 * G * 4 * N * K


def at(shape: tuple[int, int, int], strides: tuple[int, int, int], offset: int = 0) -> torch.Tensor:
    return guarded(shape, torch.float32, "cpu", strides, offset).tensor


@pytest.mark.parametrize(
    ("sf", "step"),
    [
        (at((2, 8, 3), (24, 1, 8)), 8),
        (at((2, 6, 3), (24, 1, 8)), 8),
        (at((2, 8, 3), (36, 1, 12)), 12),
        (at((2, 8, 1), (8, 1, 5)), 8),  # one block: groups are columns
        (at((2, 8, 1), (12, 1, 5)), 12),
        (at((1, 7, 1), (3, 1, 5)), 8),
        (at((1, 8, 3), (5, 1, 8)), 8),  # one group: its stride does not matter
        (at((3, 1, 2), (8, 9, 4)), 4),  # one row
        (at((2, 8, 3), (24, 3, 1)), None),
        (at((2, 8, 3), (32, 1, 8)), None),  # a gap between groups
        (at((2, 8, 3), (30, 1, 10)), None),
        (at((2, 8, 3), (24, 1, 8), offset=4), None),
        (at((2, 8, 1), (10, 1, 5)), None),
        (at((1, 8, 3), (24, 1, 8)).expand(2, 8, 3), None),
        (at((2, 8, 1), (8, 1, 8)).expand(2, 8, 3), None),
    ],
)
def test_which_scales_of_groups_are_read_as_they_are(sf: torch.Tensor, step: int | None) -> None:
    assert scales_stride(sf) == step


def test_strides_of_the_caller(gpu: FakeGpu) -> None:
    """Rows may be padded, scales of b transposed, and b of the form nn or N-major."""
    for kind in KINDS:
        a, _, layout, _ = tensors(kind, "psum")
        x = guarded((M, K), E4M3 if kind == "fp8" else BF16, "cpu", (K + 16, 1)).tensor
        y = guarded((G, N, K), x.dtype, "cpu", (N * (K + 32), K + 32, 1)).tensor
        d = guarded((M, N), BF16, "cpu", (N + 4, 1)).tensor
        wide = torch.ones(G, 3, 2).mT
        fp8 = kind == "fp8"
        first: Any = (x, a[1]) if fp8 else x
        call(kind, "psum", first, (y, wide) if fp8 else y, d, layout)
        launched = gpu.launched[-1]
        assert [launched.strides[name] for name in "abd"] == [(K + 16, 1), (K + 32, 1), (N + 4, 1)]
        assert launched.strides.get("sfb") == ((6, 1, 2) if fp8 else None)
        assert not launched.spec.d.aligned
        nn = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nn_contiguous")
        nn(first, (y.mT, wide.mT) if fp8 else y.mT, d, layout, use_psum_layout=True)
        assert gpu.launched[-1] == launched


def test_bfloat16_weights_may_be_n_major(gpu: FakeGpu) -> None:
    a, b, layout, d = torch.zeros(M, 192, dtype=BF16), torch.zeros(G, 192, N, dtype=BF16), *tensors("bf16", "psum")[2:]
    for form, view in (("nn", b), ("nt", b.mT), ("nn", b.mT.contiguous().mT)):
        function = getattr(deep_gemm, f"m_grouped_bf16_gemm_{form}_contiguous")
        function(a, view, d, layout, use_psum_layout=True)
        spec, strides = gpu.launched[-1].spec, gpu.launched[-1].strides
        assert (spec.b.major, strides["b"]) == (("k", (192, 1)) if view is not b and form == "nn" else ("mn", (1, N)))
        assert (spec.m, spec.n, spec.k, spec.groups) == (M, N, 192, G)


@pytest.mark.parametrize("shape", [(3, 1), (1, 5), (1, 1)])
def test_dimensions_of_one(gpu: FakeGpu, shape: tuple[int, int]) -> None:
    groups, rows = shape
    a = torch.zeros(groups, rows, 64, dtype=BF16)
    b, d = torch.zeros(groups, 8, 64, dtype=BF16), torch.zeros(groups, rows, 8, dtype=BF16)
    call("bf16", "masked", a, b, d, torch.zeros(groups, dtype=torch.int32))
    assert gpu.launched[-1].strides == {"a": (64, 1), "b": (64, 1), "d": (8, 1)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_warm_calls_and_replays(gpu: FakeGpu, kind: str, form: str) -> None:
    kept = []
    for _ in range(4):
        a, b, layout, d = tensors(kind, form)
        kept.append((a, b, layout, d))
        for _ in range(3):
            call(kind, form, a, b, d, layout)
            assert gpu.launched[-1].at["layout"] == layout.data_ptr()
            assert gpu.launched[-1].at["d"] == d.data_ptr()
    assert gpu.prepared <= 6
    with pytest.raises(InvalidInputError, match=f"{LAYOUTS[form]} must be torch.int32"):
        call(kind, form, a, b, d, layout.long())


@pytest.mark.parametrize("kind", KINDS)
def test_constant_weights_are_told_to_the_kernel(gpu: FakeGpu, kind: str) -> None:
    a, b, layout, d = tensors(kind, "psum")
    call(kind, "psum", a, b, d, layout)
    deep_gemm.declare_constant(*(b if kind == "fp8" else (b,)))
    call(kind, "psum", a, b, d, layout)
    assert gpu.constants == [False, True]


def test_batch_invariance_is_in_the_spec(gpu: FakeGpu) -> None:
    a, b, layout, d = tensors("fp8", "psum")
    try:
        for value in (True, False):
            deep_gemm.set_batch_invariant(value)
            call("fp8", "psum", a, b, d, layout)
            assert gpu.launched[-1].spec.batch_invariant is value
    finally:
        deep_gemm.set_batch_invariant(False)


def test_each_form_remembers_its_own() -> None:
    entries = (m_grouped.fp8, m_grouped.fp8_masked, m_grouped.bf16, m_grouped.bf16_masked)
    assert len({id(calls_behind(x)) for x in entries}) == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_are_checked_and_not_touched(kind: str, form: str, device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(fake, x))
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    given = tensors(kind, form)
    narrow = given[3][..., :8]
    with FakeTensorMode():
        a, b, layout, d = map(fake, given)
        call(kind, form, a, b, d, layout)
        with pytest.raises(InvalidInputError, match="d must have the shape"):
            call(kind, form, a, b, fake(narrow), layout)
