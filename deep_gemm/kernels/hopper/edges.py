"""The rows and columns of a tile and of its edge boxes (see ``columns.cuh`` and ``edge_boxes.cuh``)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ...jit.driver.launch import Map
from ...params import GemmConfig, KernelParams
from ...spec import GemmSpec, align, ceil_div
from ..base import Argument, Strides, Value, parse_arguments
from . import launch
from .launch import Boxes
from .loads import left, operand_maps
from .template import HopperTemplate


def segments(width: int) -> tuple[int, ...]:
    """Widths of the segments of a tile's columns: the powers of two whose sum is ``width``, widest first. The first
    segments of all tiles lie before all second segments."""
    return tuple(1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1)


def first_column(width: int, segment: int, index: int, tiles: int) -> int:
    """The first column of a segment of tile ``index`` in a row of ``tiles``."""
    widths = segments(width)
    return sum(widths[:segment]) * tiles + index * widths[segment]


class EdgeBoxes(HopperTemplate):
    """A template with a tensor map of B for each segment of a tile's columns, and maps of the edge boxes of scales."""

    names_consumers_k = True
    field_of_map_b: ClassVar[str] = "map_b[0]"
    """The field of the device code's struct that the first map of B fills."""

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        scales, map_d = launch.SCALE_PARAMETERS[params.scaling], launch.maps("map_d") if self.has_map_d(params) else ()
        read, loaded = (tuple(x for x in scales if x.is_value == kind) for kind in (True, False))
        more = range(1, len(segments(params.gemm.block_n)))
        return (
            *(*launch.front(params), *read, *parse_arguments("u8* d, i64 d_stride"), *launch.maps("map_a")),
            *(Argument("map_b", "TensorMap", field=self.field_of_map_b), *loaded, *map_d),
            *(*launch.maps("map_a_last, map_b_last"), *(replace(x, name=f"{x.name}_last") for x in loaded)),
            *(Argument(f"map_b_{index}", "TensorMap", field=f"map_b[{index}]") for index in more),
        )

    def has_runs(self, params: KernelParams) -> bool:
        return params.scaling in ("1d2d", "rowwise")

    def last_rows(self, config: GemmConfig, m: int) -> int:
        """Those that exist, rounded up to 16 bytes of scales."""
        return last_rows(config, m)

    def maps_of_b(self, params: KernelParams, spec: GemmSpec, strides: Strides) -> tuple[list[Map], Map, int]:
        """A map for each segment (see ``columns.cuh``), and that of the edge box, which lies in one of them."""
        c, n, make = params.gemm, spec.n, launch.boxes(spec, spec.b, "b", strides)
        widths = segments(c.block_n)
        tiles = align(ceil_div(n, c.block_n), c.cluster_n)
        boxes = [width // c.cluster_m for width in widths]
        begins = [first_column(c.block_n, segment, 0, tiles) for segment in range(len(widths))]
        edge = max(segment for segment, begin in enumerate(begins) if begin < n)
        rest = left(n - begins[edge], boxes[edge])
        ending = Map(make(rest), "b")
        maps = [
            ending if rest == box or begin + box > n else Map(make(box), "b")
            for begin, box in zip(begins, boxes, strict=True)
        ]
        return maps, ending, rest if rest < boxes[edge] else c.block_n

    def maps_of_scales(self, boxes: Boxes, config: GemmConfig, m: int) -> dict[str, Value]:
        map_a, map_a_last = operand_maps(boxes, "sfa", m, config.block_m, last_rows(config, m))
        return {"map_scale_a": map_a, "map_scale_a_last": map_a_last}


def last_rows(config: GemmConfig, m: int) -> int:
    """Rows of A that are loaded for the last row of tiles: those that exist, rounded up to 16 bytes of scales."""
    return min(align(left(m, config.block_m), 4), config.block_m)
