"""FP8 batches and fp8_einsum on the CPU: results, refusals, and the launches that a GPU would make."""

from typing import Any

import pytest
import torch
from batched_cases import FORMS, scaled, scaled_product, surrounded
from chosen import argument_names, case
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import kernels, ops, select
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.kernels.families import FP8_BATCHED, FP8_BATCHED_SWAPPED
from deep_gemm.ops.table import BMM_FP8
from deep_gemm.settings import settings
from deep_gemm.spec import GemmSpec, TransposeSpec

BHR, BHD = FORMS[1:3]
BF16 = torch.bfloat16
H, B, D, R = 3, 24, 136, 272
BLOCKS = 3
Pair = tuple[torch.Tensor, torch.Tensor]


def operands() -> tuple[Pair, Pair, torch.Tensor, torch.Tensor]:
    """a and b of `fp8_einsum`, a d full of NaN, and the result."""
    x = scaled(H, B, D, R)
    a = x["a"].transpose(0, 1).contiguous(), x["sfa"].transpose(0, 1).contiguous()
    d = torch.full((B, H, D), float("nan"), dtype=BF16)
    return a, (x["b"], x["sfb"]), d, scaled_product(x).transpose(0, 1).to(BF16)


def test_einsum_is_einsum() -> None:
    a, b, d, wanted = operands()
    deep_gemm.fp8_einsum(BHR, a, b, d)
    assert torch.equal(d, wanted)
    for rows in (0, 1):
        part = torch.full((rows, H, D), float("nan"), dtype=BF16)
        deep_gemm.fp8_einsum(BHR, tuple(x[:rows] for x in a), b, part, None, (1, 128, 128), None)  # type: ignore[arg-type]
        assert torch.equal(part, wanted[:rows])


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_products_of_any_strides(by_rows: bool, major: str) -> None:
    """And scales of any strides."""
    values = scaled(H, B, D, R)
    x = {name: surrounded(each, by_rows, major if name.startswith("sf") else "k") for name, each in values.items()}
    d = torch.empty(B, H, D, dtype=BF16).transpose(0, 1)
    deep_gemm.fp8_bmm((x["a"].tensor, x["sfa"].tensor), (x["b"].tensor, x["sfb"].tensor), d)
    assert torch.equal(d, scaled_product(values).to(BF16))


@pytest.mark.parametrize("sizes", [(0, 4, 8, 16), (2, 0, 8, 16), (2, 4, 0, 16), (2, 4, 8, 0)])
def test_any_size_may_be_zero(sizes: tuple[int, ...]) -> None:
    x = scaled(*sizes)
    d = torch.full((*sizes[:2], sizes[2]), float("nan"), dtype=BF16)
    deep_gemm.fp8_bmm((x["a"], x["sfa"]), (x["b"], x["sfb"]), d)
    assert bool((d == 0).all())


def part(index: int, change: Any) -> Any:
    """A pair with its values or its scales changed."""
    return lambda pair: tuple(change(each) if at == index else each for at, each in enumerate(pair))


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("expr", lambda x: BHD, UnsupportedError, "expr of FP8 must be bhr,hdr->bhd on Hopper, but it is 'bhd,hdr->bhr'"),
    ("expr", lambda x: FORMS[3], UnsupportedError, "expr of FP8 must be"),
    ("c", lambda x: torch.zeros(B, H, D, dtype=BF16), InvalidInputError, "c must be None for bhr,hdr->bhd"),
    ("epilogue", lambda x: "relu", UnsupportedError, "epilogue must be None"),
    ("recipe", lambda x: (1, 1, 128), UnsupportedError,
        r"recipe \(1, 1, 128\) is not supported by batches of products"),
    ("recipe", lambda x: (1, 2), InvalidInputError, "recipe must be 3 positive integers"),
    ("a", lambda x: x[0], InvalidInputError, "a must be a pair"),
    ("a", part(0, lambda x: x[0]), InvalidInputError, "a must have 3 dimensions"),
    ("a", part(0, lambda x: x.float()), InvalidInputError, "a must be torch.float8_e4m3fn"),
    ("a", part(1, lambda x: x[1:]), InvalidInputError,
        r"the scales of a must have the shape \(24, 3, 3\), one per row"),
    ("a", part(1, lambda x: x.double()), InvalidInputError, "the scales of a must be torch.float32"),
    ("b", part(1, lambda x: x[:, :1]), InvalidInputError, r"the scales of b must have the shape \(3, 2, 3\)"),
    ("b", part(1, lambda x: x.int()), UnsupportedError, "the scales of b are torch.int32"),
    ("b", part(0, lambda x: x[:2]), InvalidInputError, "b must have the shape .* h is 2 in it and 3 before"),
    ("b", part(0, lambda x: x[:1].expand(H, D, R)), InvalidInputError, "matrices of b must lie .* 0 bytes apart"),
    ("d", lambda x: x[1:], InvalidInputError, "d must have the shape .* b is 23 in it and 24 before"),
    ("d", lambda x: x.float(), InvalidInputError, "d of fp8_einsum bhr,hdr->bhd must be torch.bfloat16, but"),
    ("d", lambda x: x[:1].expand(B, H, D), InvalidInputError, "d must have contiguous rows of their own"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "message"), REFUSED)
def test_what_is_wrong_is_said(name: str, change: Any, error: type[Exception], message: str) -> None:
    a, b, d, _ = operands()
    given: dict[str, Any] = {"expr": BHR, "a": a, "b": b, "d": d}
    with pytest.raises(error, match=message):
        deep_gemm.fp8_einsum(**given | {name: change(given.get(name))})


def test_k_is_contiguous() -> None:
    x = scaled(2, 32, 32, 32)
    turned = x["b"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(UnsupportedError, match="K of b must be contiguous"):
        deep_gemm.fp8_bmm((x["a"], x["sfa"]), (turned, x["sfb"]), torch.empty(2, 32, 32, dtype=BF16))


# ------------------------------------------------------------------------------------------------ on a GPU


def test_scales_that_tma_can_read_cost_no_launch(gpu: FakeGpu) -> None:
    """As a slice of storage (h, blocks, rows rounded up to 4)."""
    a, b, d, _ = operands()
    storage = torch.ones(H, BLOCKS, B + 4)
    for sfa in (storage[:, :, :B], storage[:, :, 4:]):
        deep_gemm.fp8_einsum(BHR, (a[0], sfa.permute(2, 0, 1)), b, d)
    assert len(gpu.launched) == 2
    launched = gpu.launched[-1]
    assert launched.spec == ops.spec(B, D, R, 132, BMM_FP8, groups=H)
    assert launched.strides == {
        "a": (R, H * R, 1),
        "sfa": (BLOCKS * (B + 4), 1, B + 4),
        "b": (D * R, R, 1),
        "sfb": b[1].stride(),
        "d": (D, H * D, 1),
    }


@pytest.mark.parametrize("rows", [1, 24])
def test_other_scales_are_transposed_first(gpu: FakeGpu, rows: int) -> None:
    a, b, d, _ = operands()
    odd = torch.ones(H, BLOCKS, B + 1).permute(2, 0, 1)
    for sfa in (a[1], odd, torch.ones(B, 1, BLOCKS).expand(B, H, BLOCKS)):
        deep_gemm.fp8_einsum(BHR, (a[0][:rows], sfa[:rows]), b, d[:rows])
        transpose, gemm = gpu.launched[-2:]
        assert transpose.spec == TransposeSpec(rows, BLOCKS, H)
        assert transpose.strides["source"] == sfa[:rows].transpose(0, 1).stride()
        step = -(-rows // 4) * 4
        assert gemm.strides["sfa"] == (BLOCKS * step, 1, step)


def test_a_fallback_computes_what_no_kernel_can(gpu: FakeGpu) -> None:
    a, b, d, wanted = operands()
    gpu.unsupported = "no kernel here."
    for way in ("torch", "cublaslt"):
        d.zero_()
        with settings.override(fallback=(way,)):
            deep_gemm.fp8_einsum(BHR, a, b, d)
        assert deep_gemm.testing.calc_diff(d, wanted) < 1e-4


def launch_of(spec: GemmSpec, params: Any, strides: Any) -> dict[str, Any]:
    plan = kernels.get(params.kernel).launch_plan(params, spec, strides)
    return {"grid": plan.shape.grid[0]} | dict(zip(argument_names(params), plan.parameters, strict=True))


@pytest.mark.parametrize(
    ("params", "box", "tiles"),
    [
        (case(FP8_BATCHED, 128, 128, (1, 1), 2, 2), 128, 2 * 3),
        (case(FP8_BATCHED_SWAPPED, 64), 64, 4 * 6),
    ],
)
def test_maps_end_with_each_matrix(params: Any, box: int, tiles: int) -> None:
    """Nothing of a neighbour is read or written: rows, K and columns end where those of a product do."""
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


def test_no_kernel_of_a_batch_splits_k() -> None:
    for m, n, k in ((1, 1024, 4096), (64, 128, 16384), (4096, 1024, 4096)):
        spec = ops.spec(m, n, k, 132, BMM_FP8, groups=2)
        assert {choice.config.k_splits for choice in select.rank(spec, SM90)} == {1}
        assert {config.k_splits for config in select.heuristic.legal(spec, SM90)} == {1}


@pytest.mark.parametrize("heads", [8, 16])
def test_few_rows_are_swapped(heads: int) -> None:
    """Weights are the bytes of these products."""
    for rows in (1, 8, 16, 32):
        config = select.select(ops.spec(rows, 1024, 4096, 132, BMM_FP8, groups=heads), SM90).config
        assert (config.swap_ab, config.block_m) == (True, max(8, rows))
    config = select.select(ops.spec(4096, 1024, 4096, 132, BMM_FP8, groups=heads), SM90).config
    assert (config.swap_ab, config.block_m * config.block_n) == (False, 128 * 256)
