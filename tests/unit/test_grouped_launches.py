"""What calls of grouped products launch: estimates, alignments, scales and strides of groups."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from call_kinds import BF16, E4M3, KINDS, G, K, M, N
from gpu_fakes import FakeGpu
from grouped_cases import call
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.arch import SM90
from deep_gemm.ops import table
from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.ops.k_grouped import KGrouped
from deep_gemm.ops.layouts import scales_stride
from deep_gemm.ops.m_grouped import MGrouped
from deep_gemm.spec import GemmSpec, KGroupMapsSpec, TransposeSpec
from deep_gemm.testing import guarded


@pytest.fixture
def gpu(gpu: FakeGpu) -> Iterator[FakeGpu]:
    """With the default alignment afterwards."""
    yield gpu
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


@pytest.mark.parametrize("name", ["masked fp8", "masked bf16"])
@pytest.mark.parametrize(("expected", "rounded"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 24), (999, 24)])
def test_estimates_are_rounded_so_that_few_plans_are_made(gpu: FakeGpu, name: str, expected: int, rounded: int) -> None:
    tensors = KINDS[name].tensors()
    KINDS[name](tensors, expected_m=expected)
    assert gpu.launched[-1].spec.expected_m == rounded
    before = gpu.prepared
    KINDS[name](tensors, expected_m=rounded if rounded < M else 32 if expected < 32 else 1000)
    assert gpu.prepared == before


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_another_alignment_is_another_call(gpu: FakeGpu, kind: str) -> None:
    """vLLM sets and restores it around each call."""
    tensors, before = KINDS[f"psum {kind}"].tensors(), gpu.prepared
    for alignment in (128, 64, 128, 64, 128):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        KINDS[f"psum {kind}"](tensors)
        assert gpu.launched[-1].spec.alignment == alignment
    assert gpu.prepared == before + 2
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    KINDS[f"masked {kind}"](KINDS[f"masked {kind}"].tensors())
    assert gpu.launched[-1].spec.alignment == 1


@pytest.mark.parametrize("form", ["index", "psum", "masked"])
def test_scales_that_lie_otherwise_are_transposed_first(gpu: FakeGpu, form: str) -> None:
    """First, warm and replayed."""
    kind, kept = KINDS[f"{form} fp8"], []
    for _ in range(3):
        tensors = kind.tensors()
        tensors["sfa"] = tensors["sfa"].contiguous()
        kept.append(tensors)
        for _ in range(2):
            gpu.launched.clear()
            kind(tensors)
            transpose, product = gpu.launched
            masked = form == "masked"
            assert transpose.spec == TransposeSpec(rows=M, columns=2, batch=G if masked else 1)
            assert transpose.strides == {"source": (2 * M, 2, 1) if masked else (0, 2, 1)}
            assert transpose.at["source"] == tensors["sfa"].data_ptr()
            assert product.at["sfa"] == transpose.at["target"] != tensors["sfa"].data_ptr()
            assert product.strides["sfa"] == (1, M)


@pytest.fixture
def whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a GPU with 132 SMs."""
    monkeypatch.setattr("deep_gemm.options.num_sms_for", lambda device: 132)
    monkeypatch.setattr("deep_gemm.options.whole_gpu", lambda device: True)
    monkeypatch.setattr("deep_gemm.arch.for_device", lambda device: SM90)


def test_scratch_of_masked_scales_is_padded_to_16_bytes(whole_gpu: None) -> None:
    tensors = KINDS["masked fp8"].tensors()
    operation = MGrouped("m_grouped_fp8_gemm_nt_masked")
    a, sfa = torch.zeros(G, 7, K).to(E4M3), torch.ones(G, 7, 2)
    d = torch.zeros(G, 7, N, dtype=BF16)
    x = operation.check((a, sfa), (tensors["b"], tensors["sfb"]), d, tensors["layout"], 4)
    assert x is not None
    work = operation.launches(x, 0)
    assert work.scratch == {"sfa transposed": ((G, 2, 8), torch.float32)}
    assert (work.steps[-1].strides["sfa"], work.steps[-1].operands["sfa"]) == ((1, 8), "sfa transposed")
    assert operation.shape(x) == f"7x{N}x{K} in {G} groups"
    assert operation.flops(x) == 2 * G * 4 * N * K


def at(shape: tuple[int, int, int], strides: tuple[int, int, int], offset: int = 0) -> torch.Tensor:
    return guarded(shape, torch.float32, "cpu", strides, offset).tensor


# fmt: off
READ: list[tuple[torch.Tensor, int | None]] = [
    (at((2, 8, 3), (24, 1, 8)), 8), (at((2, 6, 3), (24, 1, 8)), 8), (at((2, 8, 3), (36, 1, 12)), 12),
    (at((2, 8, 1), (8, 1, 5)), 8), (at((2, 8, 1), (12, 1, 5)), 12),  # one block: groups are columns
    (at((1, 7, 1), (3, 1, 5)), 8), (at((1, 8, 3), (5, 1, 8)), 8),  # one group: its stride does not matter
    (at((3, 1, 2), (8, 9, 4)), 4),  # one row
    (at((2, 8, 3), (24, 3, 1)), None), (at((2, 8, 3), (32, 1, 8)), None),  # a gap between groups
    (at((2, 8, 3), (30, 1, 10)), None), (at((2, 8, 3), (24, 1, 8), offset=4), None), (at((2, 8, 1), (10, 1, 5)), None),
    (at((1, 8, 3), (24, 1, 8)).expand(2, 8, 3), None), (at((2, 8, 1), (8, 1, 8)).expand(2, 8, 3), None),
]
# fmt: on


@pytest.mark.parametrize(("sf", "step"), READ)
def test_which_scales_of_groups_are_read_as_they_are(sf: torch.Tensor, step: int | None) -> None:
    assert scales_stride(sf) == step


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_strides_of_the_caller(gpu: FakeGpu, kind: str) -> None:
    """Rows may be padded, scales of b transposed, and b of the form nn."""
    tensors = KINDS[f"psum {kind}"].tensors()
    tensors["a"] = guarded((M, K), tensors["a"].dtype, "cpu", (K + 16, 1)).tensor
    tensors["b"] = guarded((G, N, K), tensors["b"].dtype, "cpu", (N * (K + 32), K + 32, 1)).tensor
    tensors["d"] = guarded((M, N), BF16, "cpu", (N + 4, 1)).tensor
    tensors |= {"sfb": torch.ones(G, 2, 2).mT} if kind == "fp8" else {}
    KINDS[f"psum {kind}"](tensors)
    launched = gpu.launched[-1]
    assert [launched.strides[name] for name in "abd"] == [(K + 16, 1), (K + 32, 1), (N + 4, 1)]
    assert launched.strides.get("sfb") == ((4, 1, 2) if kind == "fp8" else None)
    assert not launched.spec.d.aligned
    nn = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nn_contiguous")
    a, b = ((tensors["a"], tensors["sfa"]), (tensors["b"].mT, tensors["sfb"].mT)) if kind == "fp8" else (
        tensors["a"], tensors["b"].mT)  # fmt: skip
    nn(a, b, tensors["d"], tensors["layout"], use_psum_layout=True)
    assert gpu.launched[-1] == launched


def test_bfloat16_weights_may_be_n_major(gpu: FakeGpu) -> None:
    tensors = KINDS["psum bf16"].tensors()
    b = torch.zeros(G, K, N, dtype=BF16)
    for form, view, major, strides in (
        *(("nn", b, "mn", (1, N)), ("nt", b.mT, "mn", (1, N))),
        ("nn", b.mT.contiguous().mT, "k", (K, 1)),
    ):
        product = getattr(deep_gemm, f"m_grouped_bf16_gemm_{form}_contiguous")
        product(tensors["a"], view, tensors["d"], tensors["layout"], use_psum_layout=True)
        spec = gpu.launched[-1].spec
        assert (spec.b.major, gpu.launched[-1].strides["b"]) == (major, strides)
        assert (spec.m, spec.n, spec.k, spec.groups) == (M, N, K, G)


@pytest.mark.parametrize(("groups", "rows"), [(3, 1), (1, 5), (1, 1)])
def test_dimensions_of_one(gpu: FakeGpu, groups: int, rows: int) -> None:
    a, b, d = (torch.zeros(groups, *shape, dtype=BF16) for shape in ((rows, 64), (8, 64), (rows, 8)))
    call("bf16", "masked", a, b, d, torch.zeros(groups, dtype=torch.int32))
    assert gpu.launched[-1].strides == {"a": (64, 1), "b": (64, 1), "d": (8, 1)}


def work_of(operation: KGrouped, tensors: dict[str, Any], c: Any = None) -> Any:
    given = (tensors["a"], tensors["b"])
    if "sfa" in tensors:
        given = ((tensors["a"], tensors["sfa"]), (tensors["b"], tensors["sfb"]))
    return operation.launches(
        operation.check(*given, tensors["d"], tensors["layout"], *([c] if c is not None else [])), 0
    )


def test_fp8_groups_along_k_make_maps_first(whole_gpu: None) -> None:
    """And transposes scales that TMA cannot read."""
    tensors = KINDS["k fp8"].tensors()
    work = work_of(KGrouped(table.K_FP8), tensors | {name: tensors[name].contiguous() for name in ("sfa", "sfb")})
    *transposes, maps, gemm = work.steps
    assert [step.spec for step in transposes] == [TransposeSpec(M, 2), TransposeSpec(N, 2)]
    assert maps.spec == KGroupMapsSpec(groups=G, m=M, n=N)
    assert maps.operands == {"a": "a", "b": "b", "layout": "layout", "maps": "maps"}
    assert work.scratch["maps"] == ((2 * G * 128,), torch.uint8)
    assert isinstance(gemm.spec, GemmSpec)
    assert (gemm.spec.m, gemm.spec.n, gemm.spec.k, gemm.spec.groups) == (M, N, K, G)
    assert (gemm.operands["maps"], gemm.operands["sfa"]) == ("maps", "sfa transposed")
    assert (gemm.numbers["blocks"], gemm.strides["d"]) == ((2, 2), (M * N, N, 1))


def test_bf16_groups_along_k_are_read_as_they_are(whole_gpu: None) -> None:
    d = torch.zeros(G, M, N + 8)[:, :, :N]  # rows of another stride
    (step,) = work_of(KGrouped(table.K_BF16, accumulates=True), KINDS["k bf16"].tensors() | {"d": d}, d).steps
    assert isinstance(step.spec, GemmSpec)
    assert (step.spec.accumulate, step.spec.grouping, step.spec.d.dtype) == ("in place", "k", "f32")
    assert (step.strides["a"], step.strides["b"]) == ((1, M), (1, N))
    assert step.strides["d"] == step.strides["c"] == (M * (N + 8), N + 8, 1)


COLUMNS = (24, 144)


def sizes(ks: list[int]) -> torch.Tensor:
    return torch.tensor(ks, dtype=torch.int32)


def halves(ks: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, and the product of each group."""
    a, b = (torch.randn(sum(ks), size).bfloat16() for size in COLUMNS)
    parts = zip(a.double().split(ks), b.double().split(ks), strict=True)
    return a, b, torch.stack([x.t() @ y for x, y in parts])


def fp8s(ks: list[int], padded: bool = False, past: int = 0, mixed: bool = False) -> tuple[Any, Any, torch.Tensor]:
    """The same with scales, in b with ``mixed`` of blocks: each group's values after one another; or ``padded``, as
    parts of one matrix, with NaN and NaN scales around them."""
    pairs, exact = [], []
    for rows, cast, block in zip(
        COLUMNS,
        (per_token_cast_to_fp8, per_block_cast_to_fp8 if mixed else per_token_cast_to_fp8),
        ((1, 128), (128 if mixed else 1, 128)),
        strict=True,
    ):
        casts = [cast(torch.randn(rows, k), False) for k in ks]
        exact.append([deep_gemm.dequantise(x, sf, block, torch.float64) for x, sf in casts])
        values, scales = torch.cat([x.flatten() for x, _ in casts]), torch.cat([sf for _, sf in casts], dim=1)
        if padded:
            parts = [torch.nn.functional.pad(x.view(torch.uint8), (0, -x.shape[1] % 128), value=0x7F) for x, _ in casts]
            parts.append(torch.full((rows, 128 * past), 0x7F, dtype=torch.uint8))
            values = torch.cat(parts, 1).view(E4M3)
            scales = torch.cat([scales, torch.full((len(scales), past), float("nan"))], 1)
        pairs.append((values, scales))
    return pairs[0], pairs[1], torch.stack([x @ y.t() for x, y in zip(*exact, strict=True)])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=5), st.sampled_from(["none", "in place", "from c"]))
def test_k_grouped_bf16_is_a_product_of_each_group(ks: list[int], adds: str) -> None:
    a, b, exact = halves(ks)
    before = torch.randn(len(ks), *COLUMNS)
    d = before.clone()
    c = {"none": None, "in place": d, "from c": before}[adds]
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, sizes(ks), c)
    torch.testing.assert_close(d.double(), exact if c is None else exact + before)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(0, 2), st.booleans(), st.booleans(), st.booleans()
)
def test_k_grouped_fp8_is_a_product_of_each_group(
    sixteens: list[int], past: int, padded: bool, adds: bool, mixed: bool
) -> None:
    """Groups may end inside a block of scales; padded parts, anywhere."""
    ks = [16 * x - (3 if padded and x else 0) for x in sixteens]
    a, b, exact = fp8s(ks, padded, past, mixed)
    recipe = {"recipe": (1, 128, 128)} if mixed else {}
    before = torch.randn(len(ks), *COLUMNS)
    d = before.clone() if adds else torch.full(before.shape, float("nan"))
    if padded:
        deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, sizes(ks), d if adds else None, **recipe)
    else:
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, sizes(ks), d if adds else None, **recipe)
    torch.testing.assert_close(d.double(), exact + before if adds else exact, rtol=1e-5, atol=1e-5)


def test_casts_of_padded_rows_are_such_parts() -> None:
    """What an expert layer's gradients need: rows in expert order, each expert's from a multiple of 128 on."""
    x, y = (torch.randn(384, columns).bfloat16() for columns in COLUMNS)
    for recipe, cast in (
        ((1, 1, 128), deep_gemm.quantize.columns),
        ((1, 128, 128), deep_gemm.quantize.blocks_transposed),
    ):
        a, b, d = deep_gemm.quantize.columns(x), cast(y), torch.empty(3, *COLUMNS)
        deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, sizes([100, 0, 130]), recipe=recipe)
        for group, rows in enumerate((slice(0, 100), slice(128, 128), slice(128, 258))):
            assert deep_gemm.testing.calc_diff(d[group] + 1, x[rows].float().t() @ y[rows].float() + 1) < 1e-3


def test_the_scales_of_b_suit_the_recipe() -> None:
    a, b, _ = fp8s([128])
    blocks = fp8s([128], mixed=True)[1]
    d = torch.empty(1, *COLUMNS)
    product: Any = functools.partial(deep_gemm.k_grouped_fp8_gemm_nt_contiguous, a)
    with pytest.raises(InvalidInputError, match=r"\(144, 1\), one per row.*They suit recipe=\(1, 128, 128\)"):
        product(blocks, d, [128])
    with pytest.raises(InvalidInputError, match=r"\(2, 1\), one per 128 rows.*They suit recipe=\(1, 1, 128\)"):
        product(b, d, [128], recipe=(1, 128, 128))
    with pytest.raises(UnsupportedError, match=r"only \(1, 1, 128\) and \(1, 128, 128\) are"):
        product(b, d, [128], recipe=(128, 128, 128))


def test_sizes_have_two_names_and_may_be_on_the_device_alone() -> None:
    ks = [128, 0, 64]
    a, b, exact = halves(ks)
    product: Any = functools.partial(deep_gemm.k_grouped_bf16_gemm_tn_contiguous, a, b)
    for named in ({"ks_cpu": ks}, {"ks": tuple(ks)}, {"grouped_layout": sizes(ks)}, {"ks_tensor": sizes(ks)}):
        d = torch.zeros(3, *COLUMNS, dtype=BF16)
        product(d, **named, c=d)
        assert torch.equal(d, exact.bfloat16())
    with pytest.raises(InvalidInputError, match="two names of one argument"):
        product(d, ks, ks=ks)
    with pytest.raises(InvalidInputError, match="must be given"):
        product(d)
