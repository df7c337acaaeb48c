"""The rules for products with a gate, SwiGLU, of FP8 and of 16 bits, dense and with groups along M."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ...arch import ArchSpec
from ...params import GemmConfig
from ...parts import EIGHT
from ...spec import SCALE_BLOCK, GemmSpec
from ..gemm import SAME, GemmFamily
from ..groups import ALONG_M
from . import serving
from .b16_gemm import B16Gemm
from .fp8_scaled import Fp8Scaled
from .template import HopperTemplate, slices

_WIDTHS = (64, 128, 256)
"""Columns of tiles, of which half are gate's."""

_FEW_ROWS = 64, 256
"""The tile for FP8 output of few rows."""


class Gated(HopperTemplate):
    """What both have: consumers with gate and up in the same thread. N is that of the product: gate's and up's columns.
    The other base of a class gives the rest."""

    gated = True

    def __init__(self) -> None:
        super().__init__(groups="gated")  # type: ignore[call-arg]

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        if config.block_n not in _WIDTHS:
            return f"block_n must be one of {_WIDTHS}, of which gate has half, not {config.block_n}"
        if config.cluster_n * config.cluster_k > 1:
            return "CTAs that share A could lie outside of D, and those that share K have no whole gate"
        return super().illegal(config, arch)  # type: ignore[safe-super]

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """With groups there is one CTA on an SM, without clusters."""
        may = spec.grouping == "none" or config.cluster_size * config.ctas_per_sm == 1
        return may and super().fits(spec, config, adds_c, scaling)


class Fp8Gated(Gated, Fp8Scaled):
    """Tiles of `Fp8Scaled`. Each half of one lies in one block of B's scales."""

    def tiles(self) -> Iterator[tuple[object, ...]]:
        """Tiles of 64 or 128 rows, without clusters or in pairs that share B, with one set of partial sums or two."""
        clusters = (1, 1), (2, 1)
        return itertools.product((64, 128), _WIDTHS, clusters, (1, 2), (1, 2))

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        if slices(config) != 1:
            return f"a consumer has gate and up of 64 rows, not of {slices(config) * 64}"
        if config.num_consumers > 1 and config.num_partials > 1:
            return "two consumers have one set of partial sums"
        return super().illegal(config, arch)

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """A lone consumer of all columns of an FP8 scale has no registers for groups and for alpha."""
        alone = spec.grouping == "none" and spec.d.dtype == "e4m3" and not spec.epilogue.alpha
        return (alone or config.tile != _FEW_ROWS) and super().fits(spec, config, adds_c, scaling)


class B16Gated(Gated, B16Gemm):
    """Tiles of `B16Gemm`."""

    def tiles(self) -> Iterator[tuple[object, ...]]:
        """Tiles of 64 to 256 rows, without clusters or in pairs that share B, with one or two CTAs per SM."""
        return itertools.product((64, 128, 256), _WIDTHS, ((1, 1, 1), (2, 1, 1)), (1, 2))


def _gate_has_whole_blocks(spec: GemmSpec) -> str | None:
    if spec.epilogue.interleaved == EIGHT and spec.grouping == "none":
        return "rows of gate and up that alternate by eight are of products with groups"
    if spec.n % (2 * SCALE_BLOCK):
        return f"columns of gate, half of N, must be a multiple of {SCALE_BLOCK}, not {spec.n / 2:g}"
    return None


def _gate_is_half(spec: GemmSpec) -> str | None:
    if spec.epilogue.interleaved == EIGHT:
        return "rows of gate and up that alternate by eight are FP8"
    return f"gate has half of B's rows, so that N must be even, not {spec.n}" if spec.n % 2 else None


def _gated(config: GemmConfig) -> dict[str, Any]:
    return {"epilogue": "swiglu+fp8", "output": "e4m3"} if config.block_n == 256 else {"epilogue": "swiglu"}


_BY_EIGHT = {"epilogue": "rows+swiglu+interleaved:8+clamp:10.0+fp8", "output": "e4m3"}
"""As DeepGEMM's fused mixture of experts."""

FP8_GATED = GemmFamily(
    name="sm90_fp8_gated",
    template=Fp8Gated(),
    serving=serving.FP8_GATED,
    dtypes=("e4m3",),
    scalings=("1d2d",),
    outputs=("bf16", "f16", "f32", "e4m3"),
    groupings=("none", *ALONG_M),
    accumulates=("none",),
    aligned_d=True,
    limit=_gate_has_whole_blocks,
    label="gated ",
    serving_options=_gated,
    varied=(
        ((128, 256, (1, 1), 1, 1), {"epilogue": "swiglu+clamp:7.0"}),
        ((128, 256, (2, 1), 1, 1), {"epilogue": "alpha+rows+bias:f32+swiglu", "output": "f32"}),
        ((128, 256, (1, 1), 1, 1), {"epilogue": "swiglu+fp8:ue8m0", "output": "e4m3", "grouping": "psum"}),
        ((128, 256, (1, 1), 1, 1), {"epilogue": "swiglu+fp8", "output": "e4m3", "grouping": "contiguous"}),
        (
            (128, 256, (1, 1), 1, 1),
            {"epilogue": "rows+bias:bf16+swiglu+clamp:7.0+fp8", "output": "e4m3", "grouping": "masked"},
        ),
        ((64, 64, (1, 1), 2, 2), {"epilogue": "bias:f32+swiglu", "output": "f16", "grouping": "masked"}),
        ((128, 256, (2, 1), 1, 1), {"epilogue": "bias:f32+swiglu+interleaved+fp8", "output": "e4m3"}),
        ((128, 256, (1, 1), 1, 1), {**_BY_EIGHT, "grouping": "psum"}),
        ((128, 256, (1, 1), 1, 1), {**_BY_EIGHT, "grouping": "masked"}),
        ((64, 64, (1, 1), 2, 2), {"epilogue": "swiglu+interleaved:8", "grouping": "contiguous"}),
    ),
)

B16_GATED = GemmFamily(
    name="sm90_b16_gated",
    template=B16Gated(),
    serving=serving.B16_GATED,
    dtypes=("bf16", "f16"),
    outputs=(SAME, "f32", "e4m3"),
    groupings=("none", *ALONG_M),
    accumulates=("none",),
    aligned_d=True,
    limit=_gate_is_half,
    label="gated ",
    tile_prefix="gated_",
    serving_options=_gated,
    varied=(
        ((128, 256), {"epilogue": "swiglu+clamp:7.0"}),
        ((128, 256, (2, 1, 1)), {"epilogue": "alpha+rows+bias:f32+swiglu", "output": "f32"}),
        ((256, 128), {"epilogue": "rows+bias:f16+swiglu", "dtype": "f16", "output": "f16"}),
        ((128, 256), {"epilogue": "swiglu+fp8:ue8m0", "output": "e4m3", "grouping": "psum"}),
        ((128, 256), {"epilogue": "swiglu+fp8", "output": "e4m3", "grouping": "contiguous"}),
        ((128, 256), {"epilogue": "rows+bias:bf16+swiglu+clamp:7.0+fp8", "output": "e4m3", "grouping": "masked"}),
        ((64, 64), {"epilogue": "bias:f32+swiglu", "grouping": "masked"}),
        ((128, 128), {"epilogue": "bias:bf16+swiglu+interleaved", "grouping": "contiguous"}),
    ),
)
