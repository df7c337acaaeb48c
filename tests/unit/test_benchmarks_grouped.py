"""What the benchmark of grouped GEMMs times: routings, operands, peers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from grouped_bench import COUNTS, K, N, cpu, small

from deep_gemm.benchmarks import grouped_operands as operands
from deep_gemm.benchmarks import grouped_shapes as shapes
from deep_gemm.benchmarks.grouped import TOLERANCE
from deep_gemm.benchmarks.grouped_shapes import Shape
from deep_gemm.spec import SCALE_BLOCK
from deep_gemm.testing import calc_diff

__all__ = ["cpu"]

pytestmark = pytest.mark.usefixtures("cpu")


def test_the_shapes_are_those_of_the_targets() -> None:
    assert len(shapes.SHAPES) == len(set(map(str, shapes.SHAPES))) == 2 * 7 * 4
    for kind in shapes.KINDS:
        found = [s for s in shapes.SHAPES if s.kind == kind]
        contiguous = {s.words[2] for s in found if s.form == "contiguous"}
        assert contiguous == {"4x8192", "8x4096", "64x256"}
        assert {s.words[2] for s in found if s.form == "masked"} == {"32x192", "6x1024", "32x20", "6x20"}
        assert {s.words[3] for s in found} == {"6144x7168", "7168x3072", "4096x4096", "4096x2048"}
    assert str(shapes.SHAPES[0]) == "fp8 contiguous 4x8192 6144x7168"


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=str)
def test_routings_are_random_within_30_percent_and_the_same_every_time(shape: Shape) -> None:
    assert len(shape.counts) == shape.groups
    assert all(int(0.7 * shape.mean) <= rows <= 1.3 * shape.mean for rows in shape.counts)
    assert all(rows <= shape.max_m for rows in shape.counts if shape.form == "masked")
    assert len(set(shape.counts)) > shape.groups // 8
    again = Shape("bf16", shape.form, shape.groups, shape.mean, 128, 128)
    assert again.counts == shape.counts
    assert 0.7 * shape.groups * shape.mean < shape.m == sum(shape.counts) < 1.3 * shape.groups * shape.mean
    assert all(start % 128 == 0 for start in shape.starts)
    ends = [start + rows for start, rows in zip(shape.starts, shape.counts, strict=True)]
    assert all(end <= start < end + 128 for end, start in zip(ends, [*shape.starts[1:], shape.padded_m], strict=True))


def test_a_seed_is_the_same_in_every_process() -> None:
    """Rows of other days are of the same routing."""
    assert Shape("fp8", "masked", 6, 20, 128, 128).counts == (21, 15, 25, 18, 19, 14)


def test_bytes_and_flops() -> None:
    """Padding does not count."""
    fp8, bf16 = small("fp8"), small("bf16")
    assert fp8.m == 231
    assert fp8.padded_m == 128 + 128 + 256
    assert fp8.starts == [0, 128, 256]
    assert fp8.flops == bf16.flops == 2 * 231 * 256 * 384
    assert bf16.bytes_moved == 2 * (231 * 384 + 3 * 256 * 384 + 231 * 256)
    assert fp8.bytes_moved == 231 * 384 + 3 * 256 * 384 + 2 * 231 * 256 + 4 * (231 * 3 + 3 * 2 * 3)
    assert small("fp8", "masked").bytes_moved == fp8.bytes_moved


def test_layouts() -> None:
    shape = small("fp8", counts=(2, 0, 129))
    labels = operands.layout(shape, "index", "cpu")
    assert labels.tolist() == [0] * 2 + [-1] * 126 + [2] * 129 + [-1] * 127
    assert operands.layout(shape, "psum", "cpu").tolist() == [2, 128, 128 + 129]
    assert operands.layout(shape, "masked", "cpu").tolist() == [2, 0, 129]
    assert labels.dtype == torch.int32


@pytest.mark.parametrize("form", shapes.FORMS)
@pytest.mark.parametrize("kind", shapes.KINDS)
def test_operands_are_normal_data_in_the_layout_that_tma_reads(kind: str, form: str) -> None:
    shape = small(kind, form)
    x = operands.make(shape, "cpu")
    leading = (3, 140) if form == "masked" else (512,)
    assert (x.form, x.a.shape, x.b.shape, x.d.shape) == (
        "masked" if form == "masked" else "index",
        (*leading, K),
        (3, N, K),
        (*leading, N),
    )
    assert x.d.isnan().all()
    assert [part.shape[0] for part in x.parts(x.a)] == list(COUNTS)
    assert x.gathered(x.a).shape == (231, K)
    values = x.a.float().view(-1, K), x.b.float().view(-1, K)
    if kind == "fp8":
        assert x.sfa is not None
        assert x.sfb is not None
        assert x.sfa.shape == (*leading, 3)
        assert x.sfa.stride()[-2:] == (1, 140 if form == "masked" else 512)
        assert x.sfb.shape == (3, 2, 3)
        scales = x.sfb.reshape(6, 3).repeat_interleave(SCALE_BLOCK, 0)
        factors = x.sfa.reshape(-1, 3), scales
        values = tuple(v * f.repeat_interleave(SCALE_BLOCK, 1) for v, f in zip(values, factors, strict=True))
    else:
        assert x.sfa is x.sfb is None
    for one in values:
        assert 0.95 < one.std() < 1.05
        assert one.abs().max() < 6
    assert not torch.equal(x.b[0].view(torch.uint8), x.b[1].view(torch.uint8))


def test_large_operands_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = operands.make(small("fp8"), "cpu")
    monkeypatch.setattr(operands, "CAST_ROWS", 384)
    parts = operands.make(small("fp8"), "cpu")
    assert parts.sfa is not None
    assert whole.sfa is not None
    assert parts.sfa.shape == whole.sfa.shape
    assert parts.sfa.min() > 0
    operands.ours(parts)()
    assert operands.from_exact(parts) < 1e-5


@pytest.mark.parametrize("kind", shapes.KINDS)
def test_other_forms_are_the_same_problem(kind: str) -> None:
    first = operands.make(small(kind), "cpu")
    operands.ours(first)()
    result = first.gathered(first.d)
    assert calc_diff(result[:100], result[100:200]) > 0.5
    for form in ("psum", "masked"):
        x = operands.in_form(first, form)
        assert x.d.isnan().all()
        assert x.a.shape == ((512, K) if form == "psum" else (3, 256, K))
        assert torch.equal(x.gathered(x.a).view(torch.uint8), first.gathered(first.a).view(torch.uint8))
        if x.sfa is not None and first.sfa is not None:
            assert x.sfa.stride()[-2] == 1
            pairs = zip(x.parts(x.sfa), first.parts(first.sfa), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
        operands.ours(x)()
        assert torch.equal(x.gathered(x.d), result)
        assert operands.from_exact(x) < 1e-4


def test_the_difference_from_the_exact_product_is_seen() -> None:
    for kind in shapes.KINDS:
        for form in shapes.FORMS:
            x = operands.make(small(kind, form), "cpu")
            assert math.isnan(operands.from_exact(x))
            operands.ours(x)()
            assert operands.from_exact(x) < 1e-4
            x.parts(x.d)[-1][-1] = 0
            assert operands.from_exact(x) > TOLERANCE


def test_torchs_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups without padding between them; weights are views of K-major ones."""
    x = operands.make(small("fp8"), "cpu")
    call: Any = operands.torch_rowwise(x)
    a, b, scale_a, scale_b = call.args
    assert (a.shape, a.stride(), a.dtype) == ((231, K), (K, 1), torch.float8_e4m3fn)
    assert (b.shape, b.stride()) == ((3, K, N), (N * K, 1, K))
    assert (scale_a.shape, scale_b.shape) == ((231,), (3, N))
    ends = call.keywords.pop("offs")
    assert (ends.tolist(), ends.dtype) == ([100, 101, 231], torch.int32)
    assert call.keywords == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    meta = [t.to("meta") for t in (a, b, scale_a, scale_b)]
    found = torch._scaled_grouped_mm(*meta, offs=ends.to("meta"), **call.keywords)  # torch's own checks
    assert found.shape == (231, N)
    y = operands.make(small("bf16"), "cpu")
    operands.ours(y)()
    assert operands.apart(y, operands.torch_bf16(y)(), y.gathered(y.d)) < 1e-4


def test_words_choose_shapes() -> None:
    assert len(shapes.chosen([], shapes.SHAPES)) == 56
    assert {s.kind for s in shapes.chosen(["fp8"], shapes.SHAPES)} == {"fp8"}
    assert len(shapes.chosen(["fp8", "bf16"], shapes.SHAPES)) == 56
    assert [str(s) for s in shapes.chosen(["fp8", "masked", "32x20", "6x20", "4096x2048"], shapes.SHAPES)] == [
        "fp8 masked 32x20 4096x2048",
        "fp8 masked 6x20 4096x2048",
    ]
    assert shapes.chosen(["contiguous", "32x20"], shapes.SHAPES) == []
