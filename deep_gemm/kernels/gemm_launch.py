"""The launches of GEMMs: grid, order of tiles, tensor maps and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import InvalidInputError, UnsupportedError
from ..jit.driver.launch import Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import GemmConfig, KernelParams
from ..spec import SCALE_BLOCK, GemmSpec, Operand, align, ceil_div
from . import groups
from .base import Numbers, Strides, Value, integers
from .loads import early_stages, evict_first, l2_promotion, operand_maps
from .raster import Raster, divisor, raster
from .template import BYTES, Template
from .tiles import first_column, last_rows, left, segments


def dense(
    rules: Template, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
) -> tuple[int, dict[str, Value]]:
    """Of one product, with columns left out too, of a batch, or of a sum of several."""
    c, size, batched = params.gemm, BYTES[spec.a.dtype], spec.grouping == "batched"
    m, n, row_bytes = spec.m, spec.n, spec.k * size
    order = raster(c, m, n, row_bytes, spec.num_sms)
    products = spec.groups if batched else 1
    rows = last_rows(c, m) if rules.scales_have_edges else left(m, c.block_m)
    box_a, box_b = (_boxes(spec, operand, name, strides) for name, operand in (("a", spec.a), ("b", spec.b)))
    map_a, map_a_last = operand_maps(box_a, "a", m, c.block_m // c.cluster_n, rows)
    if rules.scales_have_edges:
        maps_b, map_b_last, columns = _segment_maps(box_b, n, c)
    else:
        columns = c.block_n if rules.gated else left(n, c.block_n)
        if rules.gated:
            map_b, map_b_last = _gated_maps(rules, params, spec, n, strides)
        else:
            map_b, map_b_last = operand_maps(box_b, "b", n, c.block_n // c.cluster_m, columns)
        maps_b = [map_b]
    values: dict[str, Value] = {
        "last_rows": rows,
        "last_columns": columns,
        "early_stages": early_stages(c, m, row_bytes) if early else 0,
        "raster": order.arguments if spec.grouping in ("none", "heads") else _products(order, spec, c, products),
        "evict_first": evict_first(spec, order, row_bytes, large_d=rules.stores_by_tma(params)),
        "d_stride": strides["d"][-2],
        "d_stride_g": strides["d"][0],
        "map_a": map_a,
        "map_b": maps_b[0],
        "map_a_last": map_a_last,
        "map_b_last": map_b_last,
        **{f"map_b_{index}": each for index, each in enumerate(maps_b[1:], 1)},
        **_scales(rules, params, spec, strides),
    }
    columns_of_d = rules.columns_of_d(n)
    if spec.grouping == "heads":
        left_columns, mid, right_columns = integers(numbers, "heads")
        values["heads"] = [*divisor(left_columns + right_columns), mid, right_columns]
        columns_of_d += spec.groups * mid
    if rules.has_map_d(params):
        sizes, steps = (
            ((columns_of_d, m, products), strides["d"][-2::-1]) if batched else ((columns_of_d, m), (strides["d"][0],))
        )
        values["map_d"] = _map_d(rules, params, sizes, steps) if rules.stores_by_tma(params) else bytes(128)
        if rules.edge_map_d:
            values["map_d_last"] = _map_d(rules, params, sizes, steps, rows=left(c.block_m, 64))
    return rules.num_ctas(c, products * align(m, c.block_m * c.cluster_m), n, spec.num_sms), values


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


def _scales(rules: Template, params: KernelParams, spec: GemmSpec, strides: Strides) -> dict[str, Value]:
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
    if not rules.scales_have_edges:
        return values | {"map_scale_a": Map(box(c.block_m), "sfa")}
    map_a, map_a_last = operand_maps(box, "sfa", spec.m, c.block_m, last_rows(c, spec.m))
    return values | {"map_scale_a": map_a, "map_scale_a_last": map_a_last}


def along_m(
    rules: Template, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
) -> tuple[int, dict[str, Value]]:
    c, masked = params.gemm, spec.grouping == "masked"
    rows, blocks = spec.m * (spec.groups if masked else 1), ceil_div(spec.k, SCALE_BLOCK)
    boxes_a = _boxes(replace(spec, m=rows), spec.a, "a", strides, spec)
    n = spec.groups * spec.n
    map_a = Map(boxes_a(groups.a_rows(spec.grouping, spec.a.dtype, c)), "a")
    if rules.gated:
        map_b, map_b_last = _gated_maps(rules, params, spec, n, strides)
    else:
        map_b = map_b_last = Map(_boxes(replace(spec, n=n), spec.b, "b", strides, spec)(c.block_n), "b")
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
    if rules.has_map_d(params):
        values["map_d"] = _map_d(rules, params, (rules.columns_of_d(spec.n), rows), (strides["d"][0],))
    return groups.along_m_ctas(spec, c), values


def along_k(
    rules: Template, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
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
            values[f"map_{name}"] = values[f"map_{name}_last"] = Map(_boxes(spec, operand, name, strides)(64), name)
    if rules.has_map_d(params):
        step, row, _ = strides["d"]
        values["map_d"] = _map_d(rules, params, (spec.n, spec.m, spec.groups), (row, step))
    return groups.along_k_ctas(spec, c), values


def _gated_maps(rules: Template, params: KernelParams, spec: GemmSpec, n: int, strides: Strides) -> tuple[Map, Map]:
    """The tensor maps of gate's rows and of up's, of ``n`` rows of B in all; the same one if they are not interleaved.
    All boxes are whole."""
    rows = rules.columns_of_d(params.gemm.block_n) // params.gemm.cluster_m
    row, column = strides["b"]
    if not params.epilogue.interleaved:
        both = Map(_boxes(replace(spec, n=n), spec.b, "b", strides, spec)(rows), "b")
        return both, both
    each = _boxes(replace(spec, n=n // 2), spec.b, "b", {**strides, "b": (2 * row, column)}, spec)(rows)
    return Map(each, "b"), Map(each, "b", row * BYTES[spec.b.dtype])


def _map_d(
    rules: Template, params: KernelParams, shape: tuple[int, ...], steps: tuple[int, ...], rows: int = 64
) -> Map:
    """The tensor map of D: boxes of ``rows`` rows, swizzled over their own length, clipped at each matrix."""
    size, width = BYTES[params.output], rules.box_columns(params.gemm, params.output)
    box = (width, rows, 1)[: len(shape)]
    dtype = "u8" if params.output == "e4m3" else params.output
    return Map(TensorMapSpec(dtype, shape, tuple(step * size for step in steps), box, width * size), "d")


def _boxes(
    spec: GemmSpec, operand: Operand, name: str, strides: Strides, asked: GemmSpec | None = None
) -> Callable[[int], TensorMapSpec]:
    """A function of the rows of a box that returns the tensor map of an operand with such boxes. MN-major boxes always
    have 64 rows. ``asked`` is the spec of the call, if ``spec`` has the sizes of all groups together."""
    size, dtype = BYTES[operand.dtype], "u8" if operand.dtype == "e4m3" else operand.dtype
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


def _segment_maps(spec: Callable[[int], TensorMapSpec], n: int, config: GemmConfig) -> tuple[list[Map], Map, int]:
    """The maps of B: one for each segment of a tile's columns (see ``columns.cuh``), and one for the edge box; and the
    rows of the edge box, or ``block_n`` if no box crosses the edge."""
    widths = segments(config.block_n)
    tiles = align(ceil_div(n, config.block_n), config.cluster_n)
    boxes = [width // config.cluster_m for width in widths]
    begins = [first_column(config.block_n, segment, 0, tiles) for segment in range(len(widths))]
    edge = max(segment for segment, begin in enumerate(begins) if begin < n)
    rest = left(n - begins[edge], boxes[edge])
    ending = Map(spec(rest), "b")
    maps = [
        ending if rest == box or begin + box > n else Map(spec(box), "b")
        for begin, box in zip(begins, boxes, strict=True)
    ]
    return maps, ending, rest if rest < boxes[edge] else config.block_n


def check_whole_pieces(params: KernelParams, n: int) -> None:
    """Refuse copies of eight columns at a time where N is not a multiple of eight. Raises InvalidInputError."""
    if not params.gemm.persistent and params.store == "tma" and n % 8:
        raise InvalidInputError(
            "A config whose CTAs have one tile each copies eight columns of D at a time, so that N must be a "
            f"multiple of 8, but N is {n}. Use the same config with persistent=True."
        )
