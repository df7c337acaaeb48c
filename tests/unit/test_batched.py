"""Batches of products and einsum, of 16 bits and of FP8, on the CPU: results, refusals, and launches of a GPU."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from batched_cases import FORMS, integers, product, scaled, scaled_product, surrounded
from chosen import argument_names, case
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import kernels, ops, select
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.kernels import groups
from deep_gemm.kernels.families import B16_BATCHED, B16_SUMMED, FP8_BATCHED, FP8_BATCHED_SWAPPED
from deep_gemm.ops.batched import Batched
from deep_gemm.ops.table import BMM_BF16, BMM_FP8, SUM_BF16
from deep_gemm.settings import settings
from deep_gemm.spec import GemmSpec, TransposeSpec, ceil_div

PLAIN, BHR, BHD, SUM = FORMS
BF16 = torch.bfloat16
B, H, D, R = 24, 3, 40, 64
SHAPES = {BHR: ((B, H, R), (H, D, R), (B, H, D)), BHD: ((B, H, D), (H, D, R), (B, H, R))}
"""Of a, b and d."""
N8, K8, BLOCKS = 136, 272, 3
"""N and K of FP8, and blocks of K."""
Pair = tuple[torch.Tensor, torch.Tensor]


def of(form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, and a d full of NaN."""
    of_a, of_b, of_d = SHAPES[form]
    return integers(*of_a), integers(*of_b, seed=1), torch.full(of_d, float("nan"), dtype=BF16)


def fp8_operands() -> tuple[Pair, Pair, torch.Tensor, torch.Tensor]:
    """a and b of `fp8_einsum`, a d full of NaN, and the result."""
    x = scaled(H, B, N8, K8)
    a = x["a"].transpose(0, 1).contiguous(), x["sfa"].transpose(0, 1).contiguous()
    d = torch.full((B, H, N8), float("nan"), dtype=BF16)
    return a, (x["b"], x["sfb"]), d, scaled_product(x).transpose(0, 1).to(BF16)


@pytest.mark.parametrize("cublaslt", [False, True])
@pytest.mark.parametrize("form", [BHR, BHD])
def test_einsum_is_einsum(form: str, cublaslt: bool) -> None:
    a, b, d = of(form)
    deep_gemm.einsum(form, a, b, d, use_cublaslt=cublaslt)
    assert torch.equal(d, torch.einsum(form, a.double(), b.double()).to(BF16))


@pytest.mark.parametrize("cublaslt", [False, True])
@pytest.mark.parametrize(
    ("dtype", "adds"), [(torch.float32, True), (torch.float32, False), (BF16, False), (BF16, True)]
)
def test_a_sum_adds_to_c(dtype: torch.dtype, adds: bool, cublaslt: bool) -> None:
    a, b, before = integers(B, 64, 128), integers(B, 192, 128, seed=1), integers(64, 192, dtype=dtype, seed=2)
    d = before.clone()
    deep_gemm.einsum(SUM, a, b, d, d if adds else None, cublaslt)
    assert torch.equal(d, (product(a, b).sum(0) + before.double() * adds).to(dtype))


@pytest.mark.parametrize("majors", list(itertools.product(("k", "mn"), repeat=2)))
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", BF16), ("fp16", torch.float16)])
def test_products_of_any_strides(kind: str, dtype: torch.dtype, majors: tuple[str, str]) -> None:
    values = integers(H, B, R, dtype=dtype), integers(H, D, R, dtype=dtype, seed=1)
    for by_rows in (False, True):
        a, b = (surrounded(x, by_rows, major).tensor for x, major in zip(values, majors, strict=True))
        for out in (dtype, torch.float32):
            d = torch.empty(B, H, D, dtype=out).transpose(0, 1)
            getattr(deep_gemm, f"{kind}_bmm")(a, b, d)
            assert torch.equal(d, product(*values).to(out))


def test_fp8_einsum_is_einsum() -> None:
    a, b, d, wanted = fp8_operands()
    deep_gemm.fp8_einsum(BHR, a, b, d)
    assert torch.equal(d, wanted)
    for rows in (0, 1):
        part = torch.full((rows, H, N8), float("nan"), dtype=BF16)
        deep_gemm.fp8_einsum(BHR, tuple(x[:rows] for x in a), b, part, None, (1, 128, 128), None)  # type: ignore[arg-type]
        assert torch.equal(part, wanted[:rows])


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_fp8_products_of_any_strides(by_rows: bool, major: str) -> None:
    """And scales of any strides."""
    values = scaled(H, B, N8, K8)
    x = {name: surrounded(each, by_rows, major if name.startswith("sf") else "k") for name, each in values.items()}
    d = torch.empty(B, H, N8, dtype=BF16).transpose(0, 1)
    deep_gemm.fp8_bmm((x["a"].tensor, x["sfa"].tensor), (x["b"].tensor, x["sfb"].tensor), d)
    assert torch.equal(d, scaled_product(values).to(BF16))


@pytest.mark.parametrize("sizes", [(0, 4, 8, 16), (2, 0, 8, 16), (2, 4, 0, 16), (2, 4, 8, 0)])
def test_any_size_may_be_zero(sizes: tuple[int, ...]) -> None:
    groups, m, n, k = sizes
    x = scaled(*sizes)
    d, fp8_d = (torch.full((groups, m, n), float("nan"), dtype=BF16) for _ in range(2))
    deep_gemm.bf16_bmm(torch.empty(groups, m, k, dtype=BF16), torch.empty(groups, n, k, dtype=BF16), d)
    deep_gemm.fp8_bmm((x["a"], x["sfa"]), (x["b"], x["sfb"]), fp8_d)
    assert not d.any()
    assert not fp8_d.any()
    total = torch.ones(m * 64, 64)
    deep_gemm.einsum(SUM, torch.empty(0, m * 64, 64, dtype=BF16), torch.empty(0, 64, 64, dtype=BF16), total, total)
    assert bool((total == 1).all())


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("expr", lambda x: "ij,jk->ik", UnsupportedError, "expr must be bhr,hdr->bhd, bhd,hdr->bhr or bmk"),
    ("use_cublaslt", lambda x: 1, InvalidInputError, "use_cublaslt must be True or False"),
]  # fmt: skip


def part(index: int, change: Any) -> Any:
    """A pair with its values or its scales changed."""
    return lambda pair: tuple(change(each) if at == index else each for at, each in enumerate(pair))


FP8_REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("expr", lambda x: BHD, UnsupportedError, "expr of FP8 must be bhr,hdr->bhd on Hopper, but it is 'bhd,hdr->bhr'"),
    ("expr", lambda x: FORMS[3], UnsupportedError, "expr of FP8 must be"),
    ("epilogue", lambda x: "relu", UnsupportedError, "epilogue must be None"),
    ("recipe", lambda x: (1, 2), InvalidInputError, "recipe must be 3 positive integers"),
    ("b", part(1, lambda x: x.int()), UnsupportedError, "the scales of b are torch.int32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fp8", "name", "change", "error", "message"),
    [*((False, *each) for each in REFUSED), *((True, *each) for each in FP8_REFUSED)],
)
def test_what_is_wrong_is_said(fp8: bool, name: str, change: Any, error: type[Exception], message: str) -> None:
    a, b, d = fp8_operands()[:3] if fp8 else of(BHR)
    given: dict[str, Any] = {"expr": BHR, "a": a, "b": b, "d": d}
    with pytest.raises(error, match=message):
        (deep_gemm.fp8_einsum if fp8 else deep_gemm.einsum)(**given | {name: change(given.get(name))})


def test_d_shares_no_memory_with_an_input() -> None:
    both = torch.zeros(B, H, R + D, dtype=BF16)
    deep_gemm.einsum(BHR, both[..., :R], integers(H, D, R), both[..., R:])  # side by side
    with pytest.raises(InvalidInputError, match="d and a share memory"):
        deep_gemm.einsum(BHR, both[..., :R], integers(H, D, R), both[..., R - 8 : R + D - 8])


@pytest.mark.parametrize(
    ("shapes", "error", "message"),
    [
        (((2, 64, 72), (2, 64, 72), (64, 64)), UnsupportedError, "K of bmk,bnk->mn must be a multiple of 64"),
        (((2, 64, 64), (3, 64, 64), (64, 64)), InvalidInputError, "b is 3 in it and 2 before"),
        (((2, 64, 64), (2, 64, 64), (64, 72)), InvalidInputError, "n is 72 in it and 64 before"),
    ],
)
def test_sums_that_are_refused(shapes: Any, error: type[Exception], message: str) -> None:
    a, b, d = (torch.zeros(shape, dtype=BF16) for shape in shapes)
    with pytest.raises(error, match=message):
        deep_gemm.einsum(SUM, a, b, d)


def test_a_sum_reads_k_major_operands() -> None:
    a, d = torch.zeros(2, 64, 64, dtype=BF16), torch.zeros(64, 64)
    with pytest.raises(UnsupportedError, match="a of bmk,bnk->mn must be contiguous along k"):
        deep_gemm.einsum(SUM, a.transpose(1, 2), a, d)


def test_k_of_fp8_is_contiguous() -> None:
    x = scaled(2, 32, 32, 32)
    turned = x["b"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(UnsupportedError, match="K of b must be contiguous"):
        deep_gemm.fp8_bmm((x["a"], x["sfa"]), (turned, x["sfb"]), torch.empty(2, 32, 32, dtype=BF16))


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.parametrize(
    ("form", "m", "n", "k", "major_b", "strides"),
    [
        (BHR, B, D, R, "k", {"a": (R, H * R, 1), "b": (D * R, R, 1), "d": (D, H * D, 1)}),
        (BHD, B, R, D, "mn", {"a": (D, H * D, 1), "b": (D * R, 1, R), "d": (R, H * R, 1)}),
    ],
)
def test_einsum_is_one_launch(gpu: FakeGpu, form: str, m: int, n: int, k: int, major_b: str, strides: Any) -> None:
    a, b, d = of(form)
    for _ in range(3):  # cold, warm, and by a record
        deep_gemm.einsum(form, a, b, d)
    assert len(gpu.launched) == 3
    launched = gpu.launched[-1]
    asked = ops.spec(m, n, k, 132, BMM_BF16, groups=H, majors=("k", major_b))  # type: ignore[arg-type]
    assert (launched.spec, launched.strides) == (asked, strides)
    assert launched.at == {"a": a.data_ptr(), "b": b.data_ptr(), "d": d.data_ptr()}


def test_scales_that_tma_can_read_cost_no_launch(gpu: FakeGpu) -> None:
    """As a slice of storage (h, blocks, rows rounded up to 4)."""
    a, b, d, _ = fp8_operands()
    storage = torch.ones(H, BLOCKS, B + 4)
    for sfa in (storage[:, :, :B], storage[:, :, 4:]):
        deep_gemm.fp8_einsum(BHR, (a[0], sfa.permute(2, 0, 1)), b, d)
    assert len(gpu.launched) == 2
    launched = gpu.launched[-1]
    assert launched.spec == ops.spec(B, N8, K8, 132, BMM_FP8, groups=H)
    assert launched.strides == {
        "a": (K8, H * K8, 1),
        "sfa": (BLOCKS * (B + 4), 1, B + 4),
        "b": (N8 * K8, K8, 1),
        "sfb": b[1].stride(),
        "d": (N8, H * N8, 1),
    }


@pytest.mark.parametrize("rows", [1, 24])
def test_other_scales_are_transposed_first(gpu: FakeGpu, rows: int) -> None:
    a, b, d, _ = fp8_operands()
    odd = torch.ones(H, BLOCKS, B + 1).permute(2, 0, 1)
    for sfa in (a[1], odd, torch.ones(B, 1, BLOCKS).expand(B, H, BLOCKS)):
        deep_gemm.fp8_einsum(BHR, (a[0][:rows], sfa[:rows]), b, d[:rows])
        transpose, gemm = gpu.launched[-2:]
        assert transpose.spec == TransposeSpec(rows, BLOCKS, H)
        assert transpose.strides["source"] == sfa[:rows].transpose(0, 1).stride()
        step = -(-rows // 4) * 4
        assert gemm.strides["sfa"] == (BLOCKS * step, 1, step)


def test_a_sum_is_one_launch(gpu: FakeGpu) -> None:
    a, b, d = integers(B, 64, 128), integers(B, 192, 128), torch.zeros(64, 192)
    deep_gemm.einsum(SUM, a, b, d, d)
    (launched,) = gpu.launched
    assert launched.spec == ops.spec(64, 192, B * 128, 132, SUM_BF16, groups=B)
    assert launched.strides["a"] == (64 * 128, 128, 1)


def test_each_call_of_a_sum_has_its_own_memory(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sums of parts of K, if a config can have parts."""
    made: list[torch.Tensor] = []
    room = torch.empty

    def recorded(*size: Any, **options: Any) -> torch.Tensor:
        made.append(room(*size, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", recorded)
    for m, has_memory in ((64, True), (4096, False)):
        a, b, d = integers(B, m, 128), integers(B, 512, 128), torch.zeros(m, 512)
        for _ in range(3):  # cold, warm, and by a record
            gpu.launched.clear()
            made.clear()
            deep_gemm.einsum(SUM, a, b, d, d)
            (launched,) = gpu.launched
            given = launched.at.get("memory")
            assert (given is not None) == has_memory
            assert not has_memory or given == made[-1].data_ptr()


@pytest.mark.parametrize(("columns", "aligned"), [(D, True), (D + 4, False), (D - 4, False)])
def test_tma_writes_whole_rows_of_16_bytes(gpu: FakeGpu, columns: int, aligned: bool) -> None:
    """Neither rows nor matrices may begin elsewhere."""
    a, b = integers(H, B, R), integers(H, D if columns >= D else columns, R)
    deep_gemm.bf16_bmm(a, b, torch.zeros(H, B, columns, dtype=BF16)[..., :D])
    assert gpu.launched[-1].spec.d.aligned == aligned


def test_a_fallback_computes_what_no_kernel_can(gpu: FakeGpu) -> None:
    gpu.unsupported = "no kernel here."
    a, b, d = of(BHR)
    of_fp8, to_fp8, d8, wanted = fp8_operands()
    with pytest.raises(UnsupportedError, match="no kernel here"):
        deep_gemm.einsum(BHR, a, b, d)
    for way in ("torch", "cublaslt"):
        d.zero_()
        d8.zero_()
        with settings.override(fallback=(way,)):
            deep_gemm.einsum(BHR, a, b, d)
            deep_gemm.fp8_einsum(BHR, of_fp8, to_fp8, d8)
        assert torch.equal(d, torch.einsum(BHR, a.double(), b.double()).to(BF16))
        assert deep_gemm.testing.calc_diff(d8, wanted) < 1e-4


def launch_of(spec: GemmSpec, params: Any, strides: Any) -> dict[str, Any]:
    plan = kernels.get(params.kernel).launch_plan(params, spec, strides)
    return {"grid": plan.shape.grid[0]} | dict(zip(argument_names(params), plan.parameters, strict=True))


def test_maps_end_with_each_matrix() -> None:
    """Nothing of a neighbour is read or written: rows, K and columns end where those of a product do."""
    spec = ops.spec(200, 328, 200, 132, BMM_BF16, groups=5, majors=("k", "mn"))
    strides = {"a": (208, 5 * 208, 1), "b": (40000, 1, 336), "d": (336, 5 * 336, 1)}
    found = launch_of(spec, case(B16_BATCHED, 128, 128, form="nn"), strides)
    maps = {name: found[name].spec for name in ("map_a", "map_a_last", "map_b", "map_d")}
    assert (maps["map_a"].dims, maps["map_a"].strides) == ((200, 200, 5), (5 * 208 * 2, 208 * 2))
    assert (maps["map_b"].dims, maps["map_b"].strides) == ((328, 200, 5), (336 * 2, 40000 * 2))
    assert (maps["map_d"].dims, maps["map_d"].strides) == ((328, 200, 5), (5 * 336 * 2, 336 * 2))
    assert [each.box for each in maps.values()] == [(64, 128, 1), (64, 72, 1), (64, 64, 1), (64, 64, 1)]
    count, tiles = found["raster"][1][:2]
    assert (count, tiles, found["grid"]) == (5 * 2 * 3, 2 * 3, 30)


@pytest.mark.parametrize(
    ("params", "box", "tiles"),
    [
        (case(FP8_BATCHED, 128, 128, (1, 1), 2, 2), 128, 2 * 3),
        (case(FP8_BATCHED_SWAPPED, 64), 64, 4 * 6),
    ],
)
def test_maps_of_fp8_end_with_each_matrix(params: Any, box: int, tiles: int) -> None:
    spec = ops.spec(200, 328, 208, 132, BMM_FP8, groups=5)
    strides = {"a": (208, 1040, 1), "b": (70000, 208, 1), "d": (336, 1680, 1), "sfa": (404, 1, 204), "sfb": (6, 2, 1)}
    found = launch_of(spec, params, strides)
    assert (found["map_a"].spec.dims, found["map_a"].spec.strides) == ((208, 200, 5), (1040, 208))
    assert (found["map_b"].spec.dims, found["map_b"].spec.strides) == ((208, 328, 5), (208, 70000))
    scales = found["map_scale_a"].spec
    assert (scales.dims, scales.strides, scales.box) == ((200, 2, 5), (204 * 4, 404 * 4), (box, 1, 1))
    assert [found[name][1] for name in ("d_stride", "d_stride_g")] == [1680, 336]
    assert [found[f"scale_b_stride_{letter}"][1] for letter in "gnk"] == [6, 2, 1]
    assert found["raster"][1][:2] == (5 * tiles, tiles)
    if "map_d" in found:
        assert (found["map_d"].spec.dims, found["map_d"].spec.strides) == ((328, 200, 5), (3360, 672))


def test_a_sum_has_blocks_of_each_product() -> None:
    spec = ops.spec(128, 384, 129 * 128, 132, SUM_BF16, groups=129)
    strides = {"a": (128 * 128, 128, 1), "b": (384 * 128, 128, 1), "d": (384, 1), "c": (384, 1)}
    found = launch_of(spec, case(B16_SUMMED, 128, 128, (1, 1, 4), adds_c="tma"), strides)
    assert found["map_a"].spec.dims == (128, 128, 129)
    assert found["map_d"].spec.dims == (384, 128)
    assert found["raster"][1][:3] == (*divmod(129 * 2, 4), 2)


PARTS = [  # products, M, N, K of each; the tile; parts
    ((129, 128, 384, 128), (128, 128), 44),
    ((129, 256, 256, 256), (128, 128), 33),
    ((129, 384, 256, 384), (64, 128), 11),
    ((4096, 256, 256, 256), (64, 64), 8),
    ((129, 200, 136, 64), (64, 128), 16),
    ((5, 128, 128, 64), (128, 128), 5),  # blocks of K for no more
    ((4096, 64, 128, 64), (64, 128), 132),
]


def sum_spec(b: int, m: int, n: int, k: int, **options: Any) -> GemmSpec:
    return replace(ops.spec(m, n, b * k, 132, SUM_BF16, groups=b, output="f32", accumulate="in place"), **options)


@pytest.mark.parametrize(("sizes", "tile", "count"), PARTS)
def test_parts_of_k_fill_the_gpu(sizes: tuple[int, int, int, int], tile: tuple[int, int], count: int) -> None:
    """Each part has a CTA for each tile, and all of K is dealt out."""
    spec, (block_m, block_n) = sum_spec(*sizes), tile
    params = B16_SUMMED.params(spec, B16_SUMMED.config(block_m, block_n, (1, 1, 1), 1, True), SM90)
    strides = {"a": (1 << 20, 1024, 1), "b": (1 << 20, 1024, 1), "d": (512, 1), "c": (512, 1)}
    plan = kernels.get(params.kernel).launch_plan(params, spec, strides)
    found = dict(zip(argument_names(params), plan.parameters, strict=True))
    tiles = ceil_div(spec.m, block_m) * ceil_div(spec.n, block_n)
    assert (plan.shape.grid, plan.shape.cluster) == ((tiles, count, 1), (1, 1, 1))
    share, more = found["raster"][1][:2]
    assert (share * count + more, share > 0) == (spec.k // 64, True)
    assert tiles * count <= spec.num_sms
    assert (params.store, params.adds_c) == ("direct", "threads"), "those that add them store them"
    assert B16_SUMMED.fits(spec, params.gemm)


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((64, 128, 128, 64), (64, 64, 4, False)),
        ((400, 128, 256, 256), (64, 128, 1, True)),
        ((600, 256, 256, 256), (128, 128, 1, True)),
        ((2000, 512, 512, 128), (128, 128, 1, True)),
    ],
)
def test_longer_sums_have_parts_of_larger_tiles(
    sizes: tuple[int, int, int, int], tile: tuple[int, int, int, bool]
) -> None:
    config = select.select(sum_spec(*sizes), SM90).config
    assert (*config.tile, config.cluster_k, config.parts) == tile


def test_parts_that_do_not_fit() -> None:
    config = B16_SUMMED.config(128, 128, (1, 1, 1), 1, True)
    assert B16_SUMMED.fits(sum_spec(129, 256, 256, 256), config)
    for spec in (
        sum_spec(129, 256, 256, 256, batch_invariant=True),  # one order of K
        sum_spec(1, 256, 256, 64),  # blocks of K for one part
        sum_spec(129, 2048, 640, 256),  # 80 tiles
        sum_spec(129, 256, 256, 256, num_sms=7),
    ):
        assert not B16_SUMMED.fits(spec, config), spec
    for made, why in (
        (B16_SUMMED.config(128, 128, (1, 2, 1), 1, True), "sharing a tile by 1 x 2 x 1 CTAs is not one of"),
        (
            B16_SUMMED.config(64, 64, (1, 1, 1), 2, True),
            "only sums of products have parts of K, with one CTA on an SM",
        ),
        (
            B16_BATCHED.config(64, 64, (1, 1, 1), 1, True),
            "only sums of products have parts of K, with one CTA on an SM",
        ),
        (B16_SUMMED.config(256, 128, (1, 1, 1), 1, True), "a CTA would have more than 16384 sums of a part of K"),
    ):
        assert why in str(made and kernels.gemm_family(made.family).illegal(made, SM90))


@pytest.mark.parametrize("num_sms", [16, 78, 132])
def test_memory_holds_the_sums_of_all_parts(num_sms: int) -> None:
    """Of each config that fits. A line of 128 bytes counts the parts of each tile."""
    seen = 0
    for b, m, n in (
        (1, 8, 8),
        (129, 128, 384),
        (129, 256, 256),
        (600, 384, 256),
        (600, 72, 512),
        (600, 64, 64),
        (4096, 1024, 512),
        (4096, 8, 4096),
        (4096, 2048, 4096),
    ):
        spec = sum_spec(b, m, n, 256, num_sms=num_sms)
        for config in B16_SUMMED.fitting(spec, [each for each in B16_SUMMED.legal(SM90) if each.parts]):
            tiles = ceil_div(m, config.block_m) * ceil_div(n, config.block_n)
            counts = 128 * tiles
            sums = groups.parts(config, spec) * tiles * config.block_m * config.block_n * 4
            assert counts + sums <= kernels.memory_bytes(spec, SM90)
            seen += 1
    assert seen > 50


def test_too_many_tiles_are_refused() -> None:
    spec = ops.spec(1 << 20, 1 << 20, 64, 132, BMM_BF16, groups=100)
    row = {"a": (64 << 20, 64, 1), "b": (64 << 20, 64, 1), "d": (1 << 40, 1 << 20, 1)}
    with pytest.raises(UnsupportedError, match=r"more than 2\^31 tiles"):
        launch_of(spec, case(B16_BATCHED, 128, 128), row)


def test_no_kernel_of_a_batch_splits_k() -> None:
    sizes = ((1, 1024, 4096), (64, 128, 16384), (4096, 1024, 4096))
    for (m, n, k), op in itertools.product(sizes, (BMM_BF16, BMM_FP8)):
        spec = ops.spec(m, n, k, 132, op, groups=2)
        assert {choice.config.k_splits for choice in select.rank(spec, SM90)} == {1}
        assert {config.k_splits for config in select.heuristic.legal(spec, SM90)} == {1}
    spec = ops.spec(128, 384, 4096 * 128, 132, SUM_BF16, groups=4096)
    assert select.select(spec, SM90).config.parts, "few tiles are shared out"
    assert select.select(replace(spec, batch_invariant=True), SM90).config.cluster_k == 1


@pytest.mark.parametrize("heads", [8, 16])
def test_few_rows_are_swapped(heads: int) -> None:
    """Weights are the bytes of these products."""
    for rows in (1, 8, 16, 32):
        config = select.select(ops.spec(rows, 1024, 4096, 132, BMM_FP8, groups=heads), SM90).config
        assert (config.swap_ab, config.block_m) == (True, max(8, rows))
    config = select.select(ops.spec(4096, 1024, 4096, 132, BMM_FP8, groups=heads), SM90).config
    assert (config.swap_ab, config.block_m * config.block_n) == (False, 128 * 256)


def test_flops_are_those_of_all_products() -> None:
    x = Batched(BMM_BF16).check(integers(H, B, R), integers(H, D, R), torch.empty(H, B, D, dtype=BF16))
    assert x is not None
    assert Batched(BMM_BF16).flops(x) == 2 * H * B * D * R == ops.spec(B, D, R, 132, BMM_BF16, groups=H).flops
    assert Batched(BMM_BF16).shape(x) == "3 x 24x40x64"
