"""The families of GEMM kernels: a row each of what is supported."""

from __future__ import annotations

from typing import Any

from ..params import GemmConfig
from ..spec import GemmSpec
from .gemm import SAME, GemmFamily
from .groups import ALONG_M
from .hopper import serving
from .hopper.b16_gemm import B16Gemm
from .hopper.fp8_gemm import Fp8Gemm
from .hopper.fp8_scaled import Fp8Scaled, enough_registers, mma_n, more_registers
from .hopper.gated import B16_GATED, FP8_GATED
from .hopper.swapped import B16Swapped, Fp8ScaledSwapped, Fp8Swapped
from .portable import PORTABLE

ALL_FORMS = ("nt", "nn", "tn", "tt")
SHAPE = (0, 2112, 7168)
"""Sizes that are compiled in."""


def _plain_has_own_kernels(spec: GemmSpec) -> str | None:
    if "e5m2" in (spec.a.dtype, spec.b.dtype) and spec.scaling != "rowwise":
        return "E5M2 has scales of rows"
    if spec.scaling == "1d2d" and spec.d.dtype == "bf16" and spec.accumulate == "none":
        return "1D2D with bf16 output and without C has kernels of its own"
    return None


def _rows_have_own_kernel(spec: GemmSpec) -> str | None:
    plain = spec.d.dtype == "bf16" and spec.d.aligned and spec.accumulate == "none"
    if plain and spec.scaling == "rowwise":
        return "scales of rows with bf16 output and without C have a kernel of their own"
    return _plain_has_own_kernels(spec)


def _mn_major_b_has_whole_blocks(spec: GemmSpec) -> str | None:
    if spec.b.major != "k" and spec.k % B16Gemm.block_k:
        return f"K of an MN-major B must be a multiple of {B16Gemm.block_k}, not {spec.k}"
    return None


def _any_scaling(config: GemmConfig) -> dict[str, Any]:
    """1D1D, or scales of rows where a consumer has too few registers for it."""
    enough = enough_registers(config, mma_n(config), more_registers("1d1d", "none", True))
    return {} if enough else {"scaling": "rowwise"}


FP8_GEMM = GemmFamily(
    name="sm90_fp8_gemm",
    template=Fp8Gemm(),
    serving=serving.FP8_GEMM,
    in_parts=serving.FP8_IN_PARTS,
    dtypes=("e4m3",),
    scalings=("1d2d",),
    outputs=("bf16",),
    accumulates=("none",),
    prefix="fp8_gemm",
    varied=(
        ((256, 128, (2, 1, 1)), {}),
        ((128, 128), {"store": "direct"}),
        ((128, 192), {"store": "direct"}),
        ((128, 64, (1, 1, 2)), {"store": "direct"}),
        ((64, 128, (1, 1, 1), 1, False), {"store": "direct"}),
        ((128, 128, (1, 1, 1), 1, True, 2), {"store": "direct"}),
        ((128, 128), {"shape": SHAPE}),
    ),
)

FP8_ROWS = GemmFamily(
    name="sm90_fp8_rows",
    template=Fp8Gemm(by_rows=True),
    serving=serving.FP8_ROWS,
    dtypes=("e4m3", "e5m2"),
    mixes=True,
    scalings=("rowwise",),
    outputs=("bf16",),
    accumulates=("none",),
    aligned_d=True,
    label="rows ",
    varied=(
        ((128, 128), {"shape": SHAPE}),
        ((128, 128), {"dtype": "e5m2_e4m3"}),
        ((256, 128), {"dtype": "e4m3_e5m2"}),
        ((128, 128, (2, 1, 1)), {"dtype": "e5m2"}),
    ),
)

FP8_SWAPPED = GemmFamily(
    name="sm90_fp8_swapped",
    template=Fp8Swapped(),
    serving=serving.FP8_SWAPPED,
    in_parts=serving.FP8_SWAPPED_IN_PARTS,
    dtypes=("e4m3",),
    scalings=("1d2d",),
    outputs=("bf16",),
    accumulates=("none",),
    label="swapped ",
    prefix="fp8_gemm",
    tile_prefix="swapped_",
    varied=(
        ((64,), {}),
        ((64, 4, 2), {}),
        ((64,), {"store": "direct"}),
        ((24, 2, 2), {"store": "direct"}),
        ((16, 2, 2), {"shape": SHAPE}),
    ),
)

FP8_SCALED = GemmFamily(
    name="sm90_fp8_scaled",
    template=Fp8Scaled(),
    serving=serving.FP8_SCALED,
    dtypes=("e4m3", "e5m2"),
    mixes=True,
    scalings=("1d1d", "1d2d", "rowwise"),
    outputs=("f32", "bf16", "f16", "e4m3"),
    limit=_rows_have_own_kernel,
    label="scaled ",
    serving_options=_any_scaling,
    varied=(
        ((128, 160), {"adds_c": "tma"}),
        ((256, 64, (1, 1), 1, 2), {"output": "bf16"}),
        ((128, 160), {"adds_c": "threads"}),
        ((128, 128), {"output": "bf16", "adds_c": "threads"}),
        ((64, 64), {"output": "f16"}),
        ((128, 96), {"store": "direct"}),
        ((128, 256, (1, 1), 1), {"scaling": "1d2d"}),
        ((128, 256, (2, 1), 1), {"scaling": "1d2d", "adds_c": "tma"}),
        ((256, 64, (1, 1), 1, 2), {"scaling": "1d2d"}),
        ((128, 128), {"scaling": "1d2d", "output": "bf16", "adds_c": "threads"}),
        ((128, 128, (1, 2)), {"scaling": "1d2d", "adds_c": "tma"}),
        ((64, 64), {"scaling": "1d2d", "store": "direct", "adds_c": "threads"}),
        ((128, 112), {"scaling": "rowwise"}),
        ((64, 64), {"scaling": "rowwise", "output": "bf16", "store": "direct"}),
        ((128, 128), {"scaling": "rowwise", "output": "bf16", "adds_c": "threads"}),
        ((128, 112), {"scaling": "rowwise", "dtype": "e5m2_e4m3", "adds_c": "tma"}),
        ((64, 64), {"scaling": "rowwise", "dtype": "e4m3_e5m2", "output": "bf16", "store": "direct"}),
        ((128, 128), {"scaling": "rowwise", "dtype": "e5m2", "output": "bf16", "adds_c": "threads"}),
        ((128, 128), {"shape": SHAPE}),
        ((128, 256, (1, 1), 1, 1), {"scaling": "1d2d", "output": "e4m3", "epilogue": "bias:f32+gelu+fp8"}),
        ((64, 128), {"output": "e4m3", "epilogue": "rows+silu+fp8:ue8m0"}),
    ),
)

FP8_SCALED_SWAPPED = GemmFamily(
    name="sm90_fp8_scaled_swapped",
    template=Fp8ScaledSwapped(),
    serving=serving.FP8_SCALED_SWAPPED,
    dtypes=("e4m3", "e5m2"),
    mixes=True,
    scalings=("rowwise", "1d2d"),  # with 1D1D a token's scale and a weight's would both change with each block of K
    outputs=("bf16", "f32", "f16"),
    limit=_plain_has_own_kernels,
    label="scaled swapped ",
    tile_prefix="swapped_",
    varied=(
        ((64,), {"scaling": "1d2d", "output": "f32"}),
        ((16, 4), {"scaling": "1d2d", "output": "f32", "adds_c": "threads"}),
        ((8, 1, 2), {"scaling": "1d2d", "adds_c": "threads"}),
        ((16, 4), {"output": "f32"}),
        ((8, 1, 2), {"output": "f16"}),
        ((8, 1, 2), {"store": "direct", "adds_c": "threads"}),
        ((24, 2, 2), {"store": "direct"}),
        ((64,), {"dtype": "e5m2_e4m3"}),
        ((16, 4), {"dtype": "e4m3_e5m2", "output": "f32"}),
        ((8, 1, 2), {"dtype": "e5m2", "store": "direct", "adds_c": "threads"}),
        ((16, 2, 2), {"shape": SHAPE}),
    ),
)

FP8_BATCHED = GemmFamily(
    name="sm90_fp8_batched",
    template=Fp8Scaled(groups="batch"),
    serving=serving.FP8_BATCHED,
    dtypes=("e4m3",),
    scalings=("1d2d",),
    outputs=("bf16",),
    groupings=("batched",),
    accumulates=("none",),
    label="scaled ",
    varied=(
        ((64, 64, (1, 1), 2, 2), {"store": "direct"}),
        ((128, 256, (1, 1), 1, 1), {"store": "direct"}),
        ((128, 128, (1, 1), 2, 2), {"shape": SHAPE}),
    ),
)

FP8_BATCHED_SWAPPED = GemmFamily(
    name="sm90_fp8_batched_swapped",
    template=Fp8ScaledSwapped(batched=True),
    serving=serving.FP8_BATCHED_SWAPPED,
    dtypes=("e4m3",),
    scalings=("1d2d",),
    outputs=("bf16",),
    groupings=("batched",),
    accumulates=("none",),
    label="scaled swapped ",
    tile_prefix="swapped_",
    varied=(
        ((64,), {"store": "direct"}),
        ((16, 1, 1, 2), {"store": "direct"}),
        ((16, 1, 1, 2), {"shape": SHAPE}),
    ),
)

FP8_HEADS = GemmFamily(
    name="sm90_fp8_heads",
    template=Fp8Scaled(groups="heads"),
    serving=serving.FP8_BATCHED,
    dtypes=("e4m3",),
    scalings=("1d2d",),
    outputs=("bf16",),
    groupings=("heads",),
    accumulates=("none",),
    label="scaled ",
    varied=(
        ((64, 64, (1, 1), 2, 2), {"store": "direct"}),
        ((128, 256, (1, 1), 1, 1), {"store": "direct"}),
    ),
)

FP8_GROUPED = GemmFamily(
    name="sm90_fp8_grouped",
    template=Fp8Scaled(groups="m"),
    serving=serving.FP8_GROUPED,
    dtypes=("e4m3",),
    scalings=("1d2d",),
    outputs=("bf16", "e4m3"),
    groupings=ALONG_M,
    accumulates=("none",),
    label="scaled ",
    varied=(
        ((128, 128, (1, 1), 2, 1), {"grouping": "psum"}),
        ((128, 256, (1, 1), 1), {"grouping": "masked"}),
        ((64, 64), {"grouping": "masked", "segments": 512, "store": "direct"}),
        ((128, 256, (1, 1), 1), {"grouping": "masked", "output": "e4m3", "epilogue": "rows+bias:bf16+gelu+fp8"}),
    ),
)

FP8_K_GROUPED = GemmFamily(
    name="sm90_fp8_k_grouped",
    template=Fp8Scaled(groups="k"),
    serving=serving.FP8_K_GROUPED,
    dtypes=("e4m3",),
    scalings=("1d1d", "1d2d"),
    outputs=("f32", "bf16", "f16"),
    groupings=("k",),
    label="scaled ",
    serving_options=lambda config: {"adds_c": "tma", "scaling": "1d2d" if config.block_n == 256 else "1d1d"},
    varied=(
        ((128, 128, (1, 1), 2, 1), {"scaling": "1d2d", "output": "bf16"}),
        ((128, 64, (1, 1), 2, 2), {"scaling": "1d2d", "adds_c": "tma"}),
        ((128, 128, (1, 1), 2, 1), {"output": "bf16", "adds_c": "threads", "segments": 256}),
        ((128, 128, (1, 1), 2, 1), {"adds_c": "threads", "store": "direct"}),
    ),
)

B16_GEMM = GemmFamily(
    name="sm90_b16_gemm",
    template=B16Gemm(),
    serving=serving.B16_GEMM,
    in_parts=serving.B16_IN_PARTS,
    dtypes=("bf16", "f16"),
    forms=ALL_FORMS,
    outputs=(SAME, "f32", "e4m3"),
    varied=(
        ((128, 256), {"output": "e4m3", "epilogue": "bias:f32+gelu+fp8"}),
        ((128, 128, (1, 1, 1), 1, False, 4), {"output": "e4m3", "epilogue": "bias:f32+gelu+fp8"}),
        ((128, 128), {"form": "nn"}),
        ((128, 256), {"form": "tn"}),
        ((256, 128), {"form": "tt"}),
        ((128, 256, (2, 1, 1)), {"form": "nn"}),
        ((256, 128, (1, 2, 1)), {"form": "tn"}),
        ((64, 64, (1, 1, 4)), {"form": "tn"}),
        ((128, 256), {"output": "f32"}),
        ((256, 128), {"output": "f32", "adds_c": "tma", "form": "tn"}),
        ((128, 128), {"adds_c": "threads"}),
        ((64, 64, (1, 1, 4)), {"output": "f32", "adds_c": "threads"}),
        ((64, 64, (1, 1, 4)), {"adds_c": "threads"}),
        ((64, 96, (1, 1, 1), 2), {"output": "f32", "adds_c": "tma"}),
        ((128, 256), {"dtype": "f16", "output": "f16"}),
        ((128, 128), {"dtype": "f16", "output": "f32", "adds_c": "threads"}),
        ((128, 128), {"store": "direct"}),
        ((64, 64, (1, 1, 4)), {"store": "direct", "output": "f32"}),
        ((256, 128), {"store": "direct", "output": "f32", "adds_c": "threads"}),
        ((128, 128, (2, 2, 1)), {}),
        ((128, 128), {"shape": SHAPE}),
    ),
)

B16_SWAP_AB = GemmFamily(
    name="sm90_b16_swap_ab",
    template=B16Gemm(swap_ab=True),
    serving=serving.B16_SWAP_AB,
    dtypes=("bf16", "f16"),
    forms=ALL_FORMS,
    outputs=(SAME,),
    accumulates=("none",),
    aligned_d=True,
    label="swap-AB ",
    tile_prefix="swap_ab_",
    varied=(
        ((128, 128), {"form": "tn"}),
        ((200, 128), {"form": "nn"}),
        ((128, 256, (1, 2, 1)), {"form": "nn"}),
        ((192, 128), {"form": "tt"}),
        ((72, 64), {"dtype": "f16"}),
        ((136, 192), {"form": "nn"}),
        ((128, 128, (2, 2, 1)), {"form": "tn"}),
        ((256, 128, (1, 2, 1)), {"form": "tt"}),
        ((128, 256, (2, 1, 1)), {"form": "nn"}),
        ((176, 192, (2, 1, 1)), {"shape": SHAPE}),
    ),
)

B16_SWAPPED = GemmFamily(
    name="sm90_b16_swapped",
    template=B16Swapped(),
    serving=serving.B16_SWAPPED,
    in_parts=serving.B16_SWAPPED_IN_PARTS,
    dtypes=("bf16", "f16"),
    forms=("nt", "nn"),  # few rows of A are loaded at a time
    outputs=(SAME, "f32"),
    label="swapped ",
    tile_prefix="swapped_",
    varied=(
        ((64,), {"form": "nn"}),
        ((16, 4), {"form": "nn", "output": "f32"}),
        ((64,), {"output": "f32", "adds_c": "threads"}),
        ((16, 4), {"adds_c": "threads"}),
        ((8, 1, 2), {"output": "f32"}),
        ((8, 1, 2), {"store": "direct", "adds_c": "threads"}),
        ((24, 2, 2), {"store": "direct"}),
        ((16, 4), {"dtype": "f16", "output": "f16"}),
        ((64,), {"dtype": "f16", "output": "f32"}),
        ((16, 2, 2), {"shape": SHAPE}),
    ),
)

B16_GROUPED = GemmFamily(
    name="sm90_b16_grouped",
    template=B16Gemm(groups="m"),
    serving=serving.B16_GROUPED,
    dtypes=("bf16", "f16"),
    forms=("nt", "nn"),
    outputs=(SAME, "e4m3"),
    groupings=ALONG_M,
    accumulates=("none",),
    limit=_mn_major_b_has_whole_blocks,
    varied=(
        ((128, 256), {"grouping": "masked", "form": "nn"}),
        ((64, 64), {"grouping": "masked", "segments": 512, "store": "direct"}),
        ((128, 128), {"grouping": "masked", "output": "e4m3", "epilogue": "rows+bias:bf16+silu+fp8"}),
        ((128, 128), {"dtype": "f16", "output": "f16", "grouping": "psum", "segments": 256}),
    ),
)

B16_K_GROUPED = GemmFamily(
    name="sm90_b16_k_grouped",
    template=B16Gemm(groups="k"),
    serving=serving.B16_K_GROUPED,
    dtypes=("bf16", "f16"),
    forms=("tn",),
    outputs=(SAME, "f32"),
    groupings=("k",),
    serving_options=lambda config: {"output": "f32", "adds_c": "tma"},
    varied=(
        ((256, 128), {"output": "f32", "adds_c": "threads"}),
        ((128, 128), {"adds_c": "threads", "segments": 256}),
        ((128, 128), {"dtype": "f16", "output": "f16", "store": "direct"}),
    ),
)

B16_BATCHED = GemmFamily(
    name="sm90_b16_batched",
    template=B16Gemm(groups="batch"),
    serving=serving.B16_BATCHED,
    dtypes=("bf16", "f16"),
    forms=ALL_FORMS,
    outputs=(SAME, "f32"),
    groupings=("batched",),
    accumulates=("none",),
    varied=(
        ((128, 256, (2, 1, 1)), {"form": "nn"}),
        ((256, 128, (1, 2, 1)), {"form": "tn"}),
        ((64, 64), {"form": "nn", "store": "direct"}),
        ((128, 128), {"dtype": "f16", "output": "f16", "form": "tt"}),
        ((128, 128), {"output": "f32", "shape": SHAPE}),
    ),
)

B16_SUMMED = GemmFamily(
    name="sm90_b16_summed",
    template=B16Gemm(groups="sum"),
    serving=serving.B16_SUMMED,
    dtypes=("bf16",),
    outputs=("f32", "bf16"),
    groupings=("summed",),
    serving_options=lambda config: {"adds_c": "tma"},
    varied=(((64, 64, (1, 1, 4)), {"output": "bf16"}), ((128, 128), {"adds_c": "threads", "store": "direct"})),
)

GEMMS: tuple[GemmFamily, ...] = (
    *(FP8_BATCHED, FP8_BATCHED_SWAPPED, FP8_GATED, FP8_GEMM, FP8_GROUPED, FP8_HEADS),
    *(FP8_K_GROUPED, FP8_ROWS),
    *(FP8_SCALED, FP8_SCALED_SWAPPED, FP8_SWAPPED),
    *(B16_BATCHED, B16_GATED, B16_GEMM, B16_GROUPED, B16_K_GROUPED, B16_SUMMED, B16_SWAPPED, B16_SWAP_AB),
    *PORTABLE,
)
