"""GEMMs grouped along K on the CPU: results, arguments, and the launches that a GPU would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import options
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.ops import table
from deep_gemm.ops.cast_reference import per_token_cast_to_fp8
from deep_gemm.ops.k_grouped import KGrouped
from deep_gemm.spec import GemmSpec, KGroupMapsSpec, TransposeSpec

M, N = 24, 40


def layout(ks: list[int]) -> torch.Tensor:
    return torch.tensor(ks, dtype=torch.int32)


def half(ks: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, and the product of each group."""
    a, b = (torch.randn(sum(ks), size).bfloat16() for size in (M, N))
    parts = zip(a.double().split(ks), b.double().split(ks), strict=True)
    return a, b, torch.stack([x.t() @ y for x, y in parts])


def fp8(ks: list[int]) -> tuple[Any, Any, torch.Tensor]:
    """a and b with their scales, and the product of each group."""
    pairs, exact = [], []
    for size in (M, N):
        casts = [per_token_cast_to_fp8(torch.randn(size, k), False) for k in ks]
        values = torch.cat([x.flatten() for x, _ in casts])
        pairs.append((values, torch.cat([sf for _, sf in casts], dim=1)))
        exact.append([deep_gemm.dequantise(x, sf, (1, 128), torch.float64) for x, sf in casts])
    return pairs[0], pairs[1], torch.stack([x @ y.t() for x, y in zip(*exact, strict=True)])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=5), st.sampled_from(["none", "in place", "from c"]))
def test_bf16_is_a_product_of_each_group(ks: list[int], adds: str) -> None:
    a, b, exact = half(ks)
    before = torch.randn(len(ks), M, N)
    d = before.clone()
    c = {"none": None, "in place": d, "from c": before}[adds]
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout(ks), c)
    torch.testing.assert_close(d.double(), exact if c is None else exact + before)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_fp8_is_a_product_of_each_group(sixteens: list[int]) -> None:
    """Groups may end inside a block of scales."""
    ks = [16 * x for x in sixteens]
    a, b, exact = fp8(ks)
    d = torch.full((len(ks), M, N), float("nan"))
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, layout(ks))
    torch.testing.assert_close(d.double(), exact, rtol=1e-6, atol=1e-6)


def padded(ks: list[int], rows: int, past: int = 0) -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """One matrix of all groups, with NaN and NaN scales in its padding, and the exact matrix of each group."""
    blocks = [-(-k // 128) for k in ks]
    columns = 128 * (sum(blocks) + past)
    values = torch.full((rows, columns), float("nan")).to(torch.float8_e4m3fn)
    scales, exact, first = torch.full((rows, sum(blocks) + past), float("nan")), [], 0
    for k, count in zip(ks, blocks, strict=True):
        x, sf = per_token_cast_to_fp8(torch.randn(rows, k), False)
        values.view(torch.uint8)[:, first * 128 : first * 128 + k] = x.view(torch.uint8)
        scales[:, first : first + count] = sf
        exact.append(deep_gemm.dequantise(x, sf, (1, 128), torch.float64))
        first += count
    return (values, scales), exact


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 2), st.booleans())
def test_groups_may_be_padded_parts_of_one_matrix(ks: list[int], past: int, adds: bool) -> None:
    (a, ours), (b, theirs) = (padded(ks, rows, past) for rows in (M, N))
    exact = torch.stack([x @ y.t() for x, y in zip(ours, theirs, strict=True)])
    before = torch.randn(len(ks), M, N)
    d = before.clone() if adds else torch.full((len(ks), M, N), float("nan"))
    deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, layout(ks), d if adds else None)
    torch.testing.assert_close(d.double(), exact + before if adds else exact, rtol=1e-5, atol=1e-5)


def test_casts_of_padded_rows_are_such_parts() -> None:
    """What an expert layer's gradients need: rows in expert order, each expert's from a multiple of 128 on."""
    x, y = (torch.randn(384, columns).bfloat16() for columns in (M, N))
    sizes = [100, 0, 130]
    a, b = (deep_gemm.quantize.columns(rows) for rows in (x, y))
    d = torch.empty(3, M, N)
    deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, layout(sizes))
    for group, rows in enumerate((slice(0, 100), slice(128, 128), slice(128, 258))):
        assert deep_gemm.testing.calc_diff(d[group] + 1, x[rows].float().t() @ y[rows].float() + 1) < 1e-3


@pytest.mark.parametrize(
    ("which", "shape", "message"),
    [
        ("a", (M + 1, 256), r"a must have the shape \(24, 256\)"),
        ("b", (N, 384), r"b must have the shape \(40, 256\)"),
        ("sfa", (M, 3), r"the scales of a must have the shape \(24, 2\)"),
        ("sfb", (N, 1), r"the scales of b must have the shape \(40, 2\)"),
    ],
)
def test_wrong_parts_of_one_matrix(which: str, shape: tuple[int, ...], message: str) -> None:
    (a, _), (b, _) = (padded([100, 120], rows) for rows in (M, N))
    given = {"a": a[0], "sfa": a[1], "b": b[0], "sfb": b[1]}
    dtype = torch.float32 if which.startswith("sf") else torch.float8_e4m3fn
    given[which] = torch.zeros(shape).to(dtype)
    d = torch.empty(2, M, N)
    with pytest.raises(InvalidInputError, match=message if which != "a" else "must have the shape"):
        deep_gemm.k_grouped_fp8_gemm_nt_padded(
            (given["a"], given["sfa"]), (given["b"], given["sfb"]), d, layout([100, 120])
        )
    with pytest.raises(InvalidInputError, match="end at 328 of K, but K of a is 256"):
        deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, layout([100, 200]))


def test_sizes_have_two_names_and_may_be_on_the_device_alone() -> None:
    ks = [128, 0, 64]
    a, b, exact = half(ks)
    for sizes in ({"ks_cpu": ks}, {"ks": tuple(ks)}, {"grouped_layout": layout(ks)}, {"ks_tensor": layout(ks)}):
        d = torch.empty(3, M, N)
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, **sizes)  # type: ignore[arg-type]
        torch.testing.assert_close(d.double(), exact)
    with pytest.raises(InvalidInputError, match="two names of one argument"):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, ks=ks)
    with pytest.raises(InvalidInputError, match="must be given"):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d)


def test_bf16_output_and_c() -> None:
    ks = [64, 128]
    a, b, exact = half(ks)
    d = torch.zeros(2, M, N, dtype=torch.bfloat16)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, tuple(ks), layout(ks), d)
    assert torch.equal(d, exact.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.zeros(64, N + 8).bfloat16()}, "b must have the shape"),
        ({"a": torch.zeros(64, M)}, "a of .* must be torch.bfloat16"),
        ({"d": torch.zeros(1, M, N, dtype=torch.float64)}, "d of .* must be torch.float32 or torch.bfloat16"),
        ({"d": torch.zeros(1, N, M).transpose(1, 2)}, "d must be row-major, with each group right after"),
        ({"c": torch.zeros(1, M, N).bfloat16()}, "c must have d's dtype and shape"),
        ({"grouped_layout": layout([64, 0])}, "grouped_layout must have the shape"),
        ({"grouped_layout": layout([64]).long()}, "grouped_layout must be torch.int32"),
        ({"ks_cpu": [32, 32]}, "ks_cpu has 2 groups, but d has 1"),
        ({"ks_cpu": [-64]}, "ks_cpu must be a list of K"),
        ({"ks_cpu": [63]}, "ks_cpu must add up to the K of a, 64, but adds up to 63"),
        ({"grouped_layout": layout([65])}, "must be 0 or more, and add up to at most 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "a": torch.zeros(64, M).bfloat16(),
        "b": torch.zeros(64, N).bfloat16(),
        "d": torch.zeros(1, M, N),
        "ks_cpu": [64],
        "grouped_layout": layout([64]),
    }
    with pytest.raises(InvalidInputError, match=message):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(**{**given, **change})


def test_what_is_not_supported() -> None:
    a, b, _ = fp8([128])
    d = torch.zeros(1, M, N)
    with pytest.raises(UnsupportedError, match="use_psum_layout"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, [128], layout([128]), use_psum_layout=True)
    with pytest.raises(UnsupportedError, match="recipe"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, [128], layout([128]), recipe=(1, 128, 128))
    with pytest.raises(InvalidInputError, match="K of each group must be a multiple of 16, but ks_cpu has 24"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, torch.zeros(2, M, N), [24, 104], layout([24, 104]))
    with pytest.raises(UnsupportedError, match="k_grouped_fp8_gemm_tn_contiguous"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a, b, d, [128], layout([128]))


@pytest.fixture
def whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a GPU with 132 SMs."""
    monkeypatch.setattr(options, "num_sms_for", lambda device: 132)
    monkeypatch.setattr(options, "whole_gpu", lambda device: True)


@pytest.mark.usefixtures("whole_gpu")
def test_fp8_makes_maps_first() -> None:
    """And transposes scales that TMA cannot read."""
    ks = [128, 256]
    a, b, _ = fp8(ks)
    operation = KGrouped(table.K_FP8)
    work = operation.work(operation.check(a, b, torch.zeros(2, M, N), layout(ks)), 0)
    *transposes, maps, gemm = work.steps
    assert [step.spec for step in transposes] == [TransposeSpec(M, 3), TransposeSpec(N, 3)]
    assert maps.spec == KGroupMapsSpec(groups=2, m=M, n=N)
    assert maps.operands == {"a": "a", "b": "b", "layout": "layout", "maps": "maps"}
    assert work.scratch["maps"] == ((2 * 2 * 128,), torch.uint8)
    assert isinstance(gemm.spec, GemmSpec)
    assert (gemm.spec.m, gemm.spec.n, gemm.spec.k, gemm.spec.groups) == (M, N, 384, 2)
    assert (gemm.operands["maps"], gemm.operands["sfa"]) == ("maps", "sfa transposed")
    assert gemm.strides["blocks"] == (3, 3)
    assert gemm.strides["d"] == (M * N, N, 1)


@pytest.mark.usefixtures("whole_gpu")
def test_half_operands_are_read_as_they_are() -> None:
    ks = [64, 64]
    a, b, _ = half(ks)
    d = torch.zeros(2, M, N + 8)[:, :, :N]  # rows of another stride
    operation = KGrouped(table.K_BF16, accumulates=True)
    work = operation.work(operation.check(a, b, d, layout(ks), d), 0)
    (step,) = work.steps
    assert isinstance(step.spec, GemmSpec)
    assert (step.spec.accumulate, step.spec.grouping, step.spec.d.dtype) == ("in place", "k", "f32")
    assert (step.strides["a"], step.strides["b"]) == ((1, M), (1, N))
    assert step.strides["d"] == step.strides["c"] == (M * (N + 8), N + 8, 1)
