"""The parameters of GEMMs for Hopper, and their launches: grid, order of tiles, tensor maps and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from ...errors import InvalidInputError, UnsupportedError
from ...jit.driver.launch import Map
from ...jit.driver.tensor_map import TensorMapSpec
from ...params import GemmConfig, KernelParams
from ...parts import EIGHT
from ...spec import SCALE_BLOCK, GemmSpec, Operand, align, ceil_div
from .. import groups
from ..base import Argument, Numbers, Strides, Value, integers, parse_arguments
from ..raster import Raster, divisor, raster
from ..template import BYTES, Grid
from .loads import early_stages, evict_first, l2_promotion, operand_maps

if TYPE_CHECKING:
    from .template import HopperTemplate

Boxes: TypeAlias = Callable[[int], TensorMapSpec]
"""The tensor map of an operand by the rows of its boxes."""


SCALE_PARAMETERS = {
    "none": (),
    "1d1d": parse_arguments("TensorMap map_scale_a, TensorMap map_scale_b"),
    "1d2d": parse_arguments(
        "const float* scale_b=sfb, i64 scale_b_stride_n, i64 scale_b_stride_k, TensorMap map_scale_a"
    ),
    "rowwise": parse_arguments(
        "const float* scale_a=sfa, i64 scale_a_stride, const float* scale_b=sfb, i64 scale_b_stride"
    ),
}
"""TMA loads scales of 1x128. Threads read all others, with a stride of zero where all rows share one scale."""

_RASTERS = {
    "none": "Raster",
    "heads": "Raster",
    "k": "DepthRaster",
    "batched": "BatchRaster",
    "summed": "SumRaster",
}
"""Types of the order of tiles, by the form of groups; that of all others is ``GroupRaster``."""


def arguments(params: KernelParams, template: HopperTemplate) -> tuple[Argument, ...]:
    """Parameters in the order of first use: those of the prologue share a line of the constant cache, and each line
    takes 110 cycles. Each operand also has a map of edge boxes (see ``edge_boxes.cuh``), which have ``last_rows``
    and ``last_columns`` rows; those of MN-major operands are the same. ``early_stages`` stages of B are loaded
    before the previous kernel has ended; 0 means that it may still write B and its scales. ``evict_first`` is a set
    of bits (see ``tma.cuh``). With groups along K, FP8 reads tensor maps of A and B from memory."""
    p = params
    scales, map_d = SCALE_PARAMETERS[p.scaling], maps("map_d") if template.has_map_d(p) else ()
    reads = p.adds_c == "threads"
    c = parse_arguments("const u8* c, i64 c_stride") if reads else ()
    in_memory = p.grouping == "k" and p.dtype == "e4m3"
    operands, lasts = ((), ()) if in_memory else (maps("map_a, map_b"), maps("map_a_last, map_b_last"))
    found = (*front(p), *parse_arguments("u8* d, i64 d_stride"), *c, *scales, *operands, *map_d, *lasts)
    if template.rows_of_last_map_d(p.gemm):
        found += maps("map_d_last")
    if p.grouping == "k":
        found += parse_arguments("u32 groups, const int* layout")
        found += parse_arguments("const TensorMap* maps") if in_memory else ()
    if p.grouping in ("k", "batched"):
        found += parse_arguments("i64 d_stride_g") + (parse_arguments("i64 c_stride_g") if reads else ())
    elif p.grouping in groups.WITH_TABLE:
        found += parse_arguments("u32 groups, u32 alignment, const int* layout")
    if p.scaling == "1d2d" and p.grouping in ("batched", *groups.ALONG_M):
        found += parse_arguments("i64 scale_b_stride_g")
    if p.gemm.parts:
        found += parse_arguments("u8* memory")
    return found + (parse_arguments("HeadColumns heads") if p.grouping == "heads" else ())


def front(params: KernelParams) -> tuple[Argument, ...]:
    """The first parameters of all kernels."""
    order = _RASTERS.get(params.grouping, "GroupRaster")
    head = f"u32 m, u32 n, u32 k, u32 last_rows, u32 last_columns, u32 early_stages, {order} raster, "
    return parse_arguments(f"{head}u32 evict_first")


def maps(names: str) -> tuple[Argument, ...]:
    """Parameters that are tensor maps."""
    return tuple(Argument(name, "TensorMap") for name in names.split(", "))


def launch(
    template: HopperTemplate, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
) -> tuple[Grid, dict[str, Value]]:
    """See `Template.launch`. The grid's z dimension has the parts of K."""
    _check_whole_pieces(params, spec.n)
    make = along_k if spec.grouping == "k" else along_m if spec.grouping in groups.ALONG_M else dense
    ctas, values = make(template, params, spec, strides, numbers, early)
    if params.adds_c == "threads" and "c_stride" not in values:
        values["c_stride"] = strides["c"][0]
    return (ctas, groups.parts(params.gemm, spec), 1), values


def dense(
    template: HopperTemplate, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
) -> tuple[int, dict[str, Value]]:
    """The grid size and the values for one product (also if D has columns that are left out), for a batch, or for a sum
    of products."""
    c, size, batched = params.gemm, BYTES[spec.a.dtype], spec.grouping == "batched"
    m, n, row_bytes = spec.m, spec.n, spec.k * size
    order = raster(c, m, n, row_bytes, spec.num_sms)
    products = spec.groups if batched else 1
    rows = template.last_rows(c, m)
    box_a = boxes(spec, spec.a, "a", strides)
    map_a, map_a_last = operand_maps(box_a, "a", m, c.block_m // c.cluster_n, rows)
    maps_b, map_b_last, columns = template.maps_of_b(params, spec, strides)
    values: dict[str, Value] = {
        "last_rows": rows,
        "last_columns": columns,
        "early_stages": early_stages(c, m, row_bytes) if early else 0,
        "raster": order.arguments if spec.grouping in ("none", "heads") else _products(order, spec, c, products),
        # CTAs that share B drift apart where K has parts.
        "evict_first": 0 if c.parts else evict_first(spec, order, row_bytes, large_d=template.stores_by_tma(params)),
        "d_stride": strides["d"][-2],
        "d_stride_g": strides["d"][0],
        "map_a": map_a,
        "map_b": maps_b[0],
        "map_a_last": map_a_last,
        "map_b_last": map_b_last,
        **{f"map_b_{index}": each for index, each in enumerate(maps_b[1:], 1)},
        **_scales(template, params, spec, strides),
    }
    columns_of_d = template.columns_of_d(n)
    if spec.grouping == "heads":
        left_columns, mid, right_columns = integers(numbers, "heads")
        values["heads"] = [*divisor(left_columns + right_columns), mid, right_columns]
        columns_of_d += spec.groups * mid
    if template.has_map_d(params):
        sizes, steps = (
            ((columns_of_d, m, products), strides["d"][-2::-1]) if batched else ((columns_of_d, m), (strides["d"][0],))
        )
        values["map_d"] = _map_d(template, params, sizes, steps) if template.stores_by_tma(params) else bytes(128)
        if last := template.rows_of_last_map_d(c):
            values["map_d_last"] = _map_d(template, params, sizes, steps, rows=last)
    return template.num_ctas(c, products * align(m, c.block_m * c.cluster_m), n, spec.num_sms), values


def _products(order: Raster, spec: GemmSpec, config: GemmConfig, products: int) -> list[int]:
    """The argument ``raster`` of several products: see ``BatchRaster`` and ``SumRaster``. Raises UnsupportedError for
    too many tiles."""
    tiles = order.rows * order.columns
    if spec.grouping == "summed":
        share, more = divmod(spec.k // config.block_k, groups.parts(config, spec) * config.cluster_k)
        return [share, more, *divisor(spec.k // spec.groups // config.block_k), *order.arguments]
    if tiles * products >= 1 << 31:
        raise UnsupportedError(f"{products} products of {spec.m} x {spec.n} are more than 2^31 tiles. Split the call.")
    return [tiles * products, *divisor(tiles), *order.arguments]


def _scales(template: HopperTemplate, params: KernelParams, spec: GemmSpec, strides: Strides) -> dict[str, Value]:
    """The values of `SCALE_PARAMETERS` without groups, or of a batch."""
    c, blocks, products = params.gemm, ceil_div(spec.k, SCALE_BLOCK), spec.groups if spec.grouping == "batched" else 0
    if params.scaling == "none":
        return {}
    if params.scaling == "rowwise":
        return {"scale_a_stride": strides["sfa"][0], "scale_b_stride": strides["sfb"][0]}

    def box(rows: int) -> TensorMapSpec:
        return _scales_map("sfa", spec.m, blocks, rows, strides, products).spec

    if params.scaling == "1d1d":
        map_b = _scales_map("sfb", spec.n, blocks, c.block_n, strides)
        return {"map_scale_a": Map(box(c.block_m), "sfa"), "map_scale_b": map_b}
    *of_product, stride_n, stride_k = strides["sfb"]
    values: dict[str, Value] = {"scale_b_stride_n": stride_n, "scale_b_stride_k": stride_k}
    if products:
        values["scale_b_stride_g"] = of_product[0]
    return values | template.maps_of_scales(box, c, spec.m)


def along_m(
    template: HopperTemplate, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
) -> tuple[int, dict[str, Value]]:
    c, masked = params.gemm, spec.grouping == "masked"
    rows, blocks = spec.m * (spec.groups if masked else 1), ceil_div(spec.k, SCALE_BLOCK)
    boxes_a = boxes(replace(spec, m=rows), spec.a, "a", strides, spec)
    n = spec.groups * spec.n
    map_a = Map(boxes_a(groups.a_rows(spec.grouping, spec.a.dtype, c)), "a")
    if template.gated:
        map_b, map_b_last = gated_maps(template, params, spec, n, strides)
    else:
        map_b = map_b_last = Map(boxes(replace(spec, n=n), spec.b, "b", strides, spec)(c.block_n), "b")
    values: dict[str, Value] = {
        **groups.along_m_values(spec, c, strides),
        "map_a": map_a,
        "map_b": map_b,
        "map_a_last": map_a,
        "map_b_last": map_b_last,
    }
    if params.scaling == "1d2d":
        all_blocks = blocks * (spec.groups if masked else 1)
        stride_g, stride_n, stride_k = strides["sfb"]
        values["map_scale_a"] = _scales_map("sfa", spec.m, all_blocks, c.block_m, strides)
        values |= {"scale_b_stride_g": stride_g, "scale_b_stride_n": stride_n, "scale_b_stride_k": stride_k}
    if template.has_map_d(params):
        values["map_d"] = _map_d(template, params, (template.columns_of_d(spec.n), rows), (strides["d"][0],))
    return groups.along_m_ctas(spec, c), values


def along_k(
    template: HopperTemplate, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
) -> tuple[int, dict[str, Value]]:
    c = params.gemm
    values: dict[str, Value] = dict(groups.along_k_values(spec, c, strides, BYTES[spec.a.dtype]))
    if spec.a.dtype == "e4m3":
        of_a, of_b = integers(numbers, "blocks")
        values["map_scale_a"] = _scales_map("sfa", spec.m, of_a, c.block_m, strides)
        if params.scaling == "1d1d":
            values["map_scale_b"] = _scales_map("sfb", spec.n, of_b, c.block_n, strides)
        else:
            values["scale_b_stride_n"], values["scale_b_stride_k"] = strides["sfb"]
    else:
        for name, operand in (("a", spec.a), ("b", spec.b)):
            values[f"map_{name}"] = values[f"map_{name}_last"] = Map(boxes(spec, operand, name, strides)(64), name)
    if template.has_map_d(params):
        step, row, _ = strides["d"]
        values["map_d"] = _map_d(template, params, (spec.n, spec.m, spec.groups), (row, step))
    return groups.along_k_ctas(spec, c), values


def gated_maps(
    template: HopperTemplate, params: KernelParams, spec: GemmSpec, n: int, strides: Strides
) -> tuple[Map, Map]:
    """The tensor maps of gate's rows and of up's, of ``n`` rows of B in all; the same one if they are not interleaved.
    All boxes are whole. Rows that alternate by `EIGHT` have a dimension of eight rows."""
    rows, turn = template.columns_of_d(params.gemm.block_n) // params.gemm.cluster_m, params.epilogue.interleaved
    row, column = strides["b"]
    if not turn:
        both = Map(boxes(replace(spec, n=n), spec.b, "b", strides, spec)(rows), "b")
        return both, both
    each = boxes(replace(spec, n=n // 2), spec.b, "b", {**strides, "b": (2 * row, column)}, spec)(rows)
    step = row * BYTES[spec.b.dtype]
    if turn == EIGHT:
        (k, count), (width, height) = each.dims, each.box
        dims, box = (k, EIGHT, count // EIGHT), (width, EIGHT, height // EIGHT)
        each = replace(each, dims=dims, strides=(step, 2 * EIGHT * step), box=box)
    return Map(each, "b"), Map(each, "b", turn * step)


def _map_d(
    template: HopperTemplate, params: KernelParams, shape: tuple[int, ...], steps: tuple[int, ...], rows: int = 64
) -> Map:
    """The tensor map of D: boxes of ``rows`` rows, swizzled over their own length, clipped at each matrix."""
    size, width = BYTES[params.output], template.box_columns(params.gemm, params.output)
    box = (width, rows, 1)[: len(shape)]
    dtype = "u8" if params.output == "e4m3" else params.output
    return Map(TensorMapSpec(dtype, shape, tuple(step * size for step in steps), box, width * size), "d")


def boxes(spec: GemmSpec, operand: Operand, name: str, strides: Strides, asked: GemmSpec | None = None) -> Boxes:
    """A function of the rows of a box that returns the tensor map of an operand with such boxes. MN-major boxes always
    have 64 rows. ``asked`` is the spec of the call, if ``spec`` has the sizes of all groups together."""
    size = BYTES[operand.dtype]
    dtype = "u8" if size == 1 else operand.dtype
    rows, k = spec.m if name == "a" else spec.n, spec.k
    *products, row, column = strides[name]
    k_major = operand.major == "k"
    inside = (row if k_major else column) * size
    count, one, steps = ((spec.groups,), (1,), (inside, products[0] * size)) if products else ((), (), (inside,))
    promotion = l2_promotion(asked or spec, inside, size)
    if spec.grouping == "summed":
        k //= spec.groups
    if k_major:
        return lambda box: TensorMapSpec(dtype, (k, rows, *count), steps, (128 // size, box, *one), 128, promotion)
    each, depth = (rows // spec.groups, spec.groups * k) if asked and name == "b" else (rows, k)
    return lambda _: TensorMapSpec(dtype, (each, depth, *count), steps, (64, 128 // size, *one), 128, promotion)


def _scales_map(name: str, rows: int, blocks: int, box: int, strides: Strides, products: int = 0) -> Map:
    """The tensor map of scales (rows, blocks) with contiguous rows, or of (products, rows, blocks). A box has ``box``
    rows in one block of K."""
    *of_product, _, step = strides[name]
    count, one = ((products,), (1,)) if products else ((), ())
    steps = (step * 4, *(each * 4 for each in of_product))
    return Map(TensorMapSpec("f32", (rows, blocks, *count), steps, (box, 1, *one)), name)


def _check_whole_pieces(params: KernelParams, n: int) -> None:
    """Refuse copies of eight columns at a time where N is not a multiple of eight. Raises InvalidInputError."""
    if not params.gemm.persistent and params.store == "tma" and n % 8:
        raise InvalidInputError(
            "A config whose CTAs have one tile each copies eight columns of D at a time, so that N must be a "
            f"multiple of 8, but N is {n}. Use the same config with persistent=True."
        )
