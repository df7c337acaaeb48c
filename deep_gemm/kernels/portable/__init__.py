"""Kernels that multiply with mma.sync, which every GPU has from compute capability 8.0 on: a family a row."""

from __future__ import annotations

from ..gemm import SAME, GemmFamily
from ..groups import ALONG_M
from .template import MmaDecode, MmaGemm, MmaSwapped

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_103a", "sm_120a")
"""Targets on which these families are chosen. They can be built for sm_90a too, where Hopper's own are faster."""

GEMM_TILES = (
    (64, 64, 64, 4, 1),
    (64, 64, 64, 4, 2),
    (64, 128, 32, 4, 2),
    (128, 64, 32, 4, 2),
    (128, 128, 32, 4, 2),
    (128, 128, 64, 8, 1),
    (192, 128, 64, 8, 1),
    (192, 128, 32, 8, 1),
    (128, 256, 64, 8, 1),
    (128, 256, 32, 8, 1),
    (256, 128, 64, 8, 1),
    (256, 128, 32, 8, 1),
)
"""(block_m, block_n, block_k, warps, CTAs on an SM). Long blocks of K come first, which are faster where they fit. Of
tiles with 192 rows there is often a number that leaves fewer SMs idle."""

GROUPED_TILES = (
    (64, 64, 64, 4, 1),
    (64, 128, 32, 4, 1),
    (128, 128, 32, 8, 1),
    (128, 256, 32, 8, 1),
)
"""The same with one CTA on an SM, so that a large table of groups leaves enough stages."""
FP8_TILES = (
    (64, 64, 128, 4, 1),
    (64, 128, 128, 4, 1),
    (128, 64, 128, 4, 1),
    (128, 128, 128, 8, 1),
)
DECODE_TILES = tuple((rows, *tile) for rows in (8, 16) for tile in ((16, 8, 1), (32, 8, 1), (32, 4, 2), (64, 4, 1)))
"""(block_m, block_n, warps, CTAs on an SM)."""
SWAPPED_TILES = ((32, 1), (32, 2), (64, 1), (64, 2))
"""(block_m, CTAs on an SM)."""
GROUPED_SWAPPED_TILES = ((16, 1), (16, 2), *SWAPPED_TILES[:2])
"""For up to 32 rows of a group. With more, upright tiles have fewer reads of shared memory."""

MMA_GEMM = GemmFamily(
    name="mma_gemm",
    template=MmaGemm(),
    archs=ARCHS,
    serving=GEMM_TILES,
    dtypes=("bf16", "f16"),
    forms=("nt", "nn", "tn", "tt"),
    outputs=(SAME, "f32"),
    label="mma ",
    tile_prefix="mma_",
    varied=(
        ((128, 256, 32, 8, 1), {"form": "nn"}),
        ((256, 128, 32, 8, 1), {"form": "tn"}),
        ((128, 128, 32, 4, 2), {"form": "tt", "dtype": "f16", "output": "f16"}),
        ((128, 256, 32, 8, 1), {"output": "f32"}),
        ((128, 256, 32, 8, 1), {"output": "f32", "adds_c": "threads", "form": "tn"}),
        ((128, 128, 32, 4, 2), {"adds_c": "threads"}),
        ((64, 64, 64, 4, 2), {"store": "direct", "form": "tt"}),
        ((256, 128, 32, 8, 1), {"store": "direct", "output": "f32", "adds_c": "threads"}),
        ((128, 128, 64, 8, 1), {"shape": (0, 2112, 7168)}),
    ),
)

MMA_SWAPPED = GemmFamily(
    name="mma_swapped",
    template=MmaSwapped(),
    archs=ARCHS,
    serving=SWAPPED_TILES,
    dtypes=("bf16", "f16"),
    forms=("nt", "nn"),
    outputs=(SAME, "f32"),
    label="mma swapped ",
    tile_prefix="mma_swapped_",
    varied=(
        ((64, 1), {"form": "nn"}),
        ((32, 2), {"dtype": "f16", "output": "f16", "adds_c": "threads"}),
        ((32, 1), {"output": "f32", "adds_c": "threads"}),
    ),
)

MMA_DECODE = GemmFamily(
    name="mma_decode",
    template=MmaDecode(),
    archs=ARCHS,
    serving=DECODE_TILES,
    dtypes=("bf16", "f16"),
    forms=("nt", "nn"),
    outputs=(SAME, "f32"),
    label="mma decode ",
    tile_prefix="mma_decode_",
    varied=(
        ((16, 64, 4, 1), {"form": "nn"}),
        ((8, 32, 4, 2), {"dtype": "f16", "output": "f16", "adds_c": "threads"}),
        ((16, 32, 8, 1), {"output": "f32", "adds_c": "threads"}),
    ),
)

MMA_FP8_DECODE = GemmFamily(
    name="mma_fp8_decode",
    template=MmaDecode(fp8=True),
    archs=ARCHS,
    serving=DECODE_TILES,
    dtypes=("e4m3",),
    scalings=("1d2d", "ue8m0"),
    outputs=("bf16", "f32", "f16"),
    label="mma decode ",
    tile_prefix="mma_decode_",
    varied=(((16, 32, 8, 1), {"output": "f32", "adds_c": "threads"}), ((16, 64, 4, 1), {"scaling": "ue8m0"})),
)

MMA_FP8 = GemmFamily(
    name="mma_fp8",
    template=MmaGemm(fp8=True),
    archs=ARCHS,
    serving=FP8_TILES,
    dtypes=("e4m3",),
    scalings=("1d2d", "ue8m0"),
    outputs=("bf16", "f32", "f16"),
    label="mma ",
    tile_prefix="mma_",
    varied=(
        ((128, 128, 128, 8, 1), {"output": "f32", "adds_c": "threads"}),
        ((64, 64, 128, 4, 1), {"store": "direct"}),
        ((128, 128, 128, 8, 1), {"scaling": "ue8m0"}),
    ),
)

MMA_FP8_SWAPPED = GemmFamily(
    name="mma_fp8_swapped",
    template=MmaSwapped(fp8=True),
    archs=ARCHS,
    serving=SWAPPED_TILES,
    dtypes=("e4m3",),
    scalings=("1d2d", "ue8m0"),
    outputs=("bf16", "f32", "f16"),
    label="mma swapped ",
    tile_prefix="mma_swapped_",
    varied=(((64, 1), {"output": "f32", "adds_c": "threads"}), ((64, 2), {"scaling": "ue8m0"})),
)

MMA_GROUPED = GemmFamily(
    name="mma_grouped",
    template=MmaGemm(grouped=True),
    archs=ARCHS,
    serving=GROUPED_TILES,
    dtypes=("bf16", "f16"),
    forms=("nt", "nn"),
    outputs=(SAME,),
    groupings=ALONG_M,
    accumulates=("none",),
    label="mma ",
    tile_prefix="mma_",
    varied=(
        ((128, 256, 32, 8, 1), {"grouping": "masked", "form": "nn"}),
        ((64, 64, 64, 4, 1), {"grouping": "masked", "segments": 512, "store": "direct"}),
        ((64, 64, 64, 4, 1), {"dtype": "f16", "output": "f16", "grouping": "psum", "segments": 256}),
    ),
)

MMA_FP8_GROUPED = GemmFamily(
    name="mma_fp8_grouped",
    template=MmaGemm(fp8=True, grouped=True),
    archs=ARCHS,
    serving=FP8_TILES,
    dtypes=("e4m3",),
    scalings=("1d2d", "ue8m0"),
    outputs=("bf16",),
    groupings=ALONG_M,
    accumulates=("none",),
    label="mma ",
    tile_prefix="mma_",
    varied=(
        ((128, 128, 128, 8, 1), {"grouping": "masked"}),
        ((64, 64, 128, 4, 1), {"grouping": "psum", "segments": 256, "store": "direct"}),
        ((128, 128, 128, 8, 1), {"grouping": "masked", "scaling": "ue8m0"}),
    ),
)

MMA_GROUPED_SWAPPED = GemmFamily(
    name="mma_grouped_swapped",
    template=MmaSwapped(grouped=True),
    archs=ARCHS,
    serving=GROUPED_SWAPPED_TILES,
    dtypes=("bf16", "f16"),
    forms=("nt", "nn"),
    outputs=(SAME,),
    groupings=ALONG_M,
    accumulates=("none",),
    label="mma swapped ",
    tile_prefix="mma_swapped_",
    varied=(
        ((32, 1), {"grouping": "masked", "form": "nn"}),
        ((16, 1), {"grouping": "masked", "segments": 512, "store": "direct"}),
        ((32, 2), {"dtype": "f16", "output": "f16", "grouping": "psum", "segments": 256}),
    ),
)

MMA_FP8_GROUPED_SWAPPED = GemmFamily(
    name="mma_fp8_grouped_swapped",
    template=MmaSwapped(fp8=True, grouped=True),
    archs=ARCHS,
    serving=GROUPED_SWAPPED_TILES,
    dtypes=("e4m3",),
    scalings=("1d2d", "ue8m0"),
    outputs=("bf16",),
    groupings=ALONG_M,
    accumulates=("none",),
    label="mma swapped ",
    tile_prefix="mma_swapped_",
    varied=(
        ((32, 1), {"grouping": "masked"}),
        ((16, 2), {"grouping": "psum", "segments": 256, "store": "direct"}),
        ((32, 2), {"grouping": "masked", "scaling": "ue8m0"}),
    ),
)

PORTABLE = (
    MMA_DECODE,
    MMA_FP8_DECODE,
    MMA_FP8,
    MMA_FP8_GROUPED,
    MMA_FP8_GROUPED_SWAPPED,
    MMA_FP8_SWAPPED,
    MMA_GEMM,
    MMA_GROUPED,
    MMA_GROUPED_SWAPPED,
    MMA_SWAPPED,
)
