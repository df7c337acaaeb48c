"""Launching the FP8 GEMMs: grid, rasterisation, tensor maps, arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvalidInputError
from ..jit.driver.launch import LaunchShape, Map, Parameter, Pointer
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import SCALE_BLOCK, FP8Config, GemmConfig, KernelParams, SmallConfig, SwappedConfig, align, ceil_div
from . import get, stream_k
from .columns import first_column, segments
from .raster import Raster, raster


@dataclass(frozen=True)
class Geometry:
    """Sizes and strides of one call, all but its addresses. Strides in elements: rows of A, B and D; columns of A's
    scales (whose rows are contiguous); rows and columns of B's scales."""

    m: int
    n: int
    k: int
    stride_a: int
    stride_b: int
    stride_d: int
    stride_sfa: int
    stride_sfb: tuple[int, int]


@dataclass(frozen=True)
class Addresses:
    """Where the five tensors of one call begin, and the flags and slots of configs that need a workspace: what the
    operands are called in a launch's parameters."""

    a: int
    sfa: int
    b: int
    sfb: int
    d: int
    flags: int = 0
    slots: int = 0


def num_ctas(config: FP8Config, m: int, n: int, num_sms: int) -> int:
    """Grid size: one CTA for each resident slot, or fewer if there are fewer tiles; whole clusters. One for each tile
    where CTAs are not persistent."""
    tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
    slots = max(1, num_sms * config.ctas_per_sm // config.cluster_size)
    return (min(tiles, slots) if config.persistent else tiles) * config.cluster_size


def slot_bytes(config: GemmConfig, shape: Geometry, num_sms: int) -> int:
    """Of a launch's workspace: 0 where it needs none."""
    if not isinstance(config, FP8Config) or not config.stream_k:
        return 0
    return stream_k.slot_bytes(config, stream_k.stream(config, shape.m, shape.n, shape.k, num_sms).ctas)


def last_rows(config: FP8Config, m: int) -> int:
    """Rows of A that are loaded for the last row of tiles: those that there are (see ``box.cuh``), but 16 bytes of
    scales at least, and of tokens past the m64 slices all or none; all where another block of K follows in a stage."""
    rows = align(_left(m, config.block_m), 4)
    if config.stage_blocks > 1 or rows > config.block_m - config.extra_tokens:
        return config.block_m
    return rows


def last_columns(config: FP8Config, n: int) -> int:
    """Rows of B that are loaded for the last column of tiles."""
    return config.block_n if config.stage_blocks > 1 else _left(n, config.block_n)


def _left(size: int, step: int) -> int:
    """What the last of the steps has left of ``size``: from 1 to a whole one."""
    return (size - 1) % step + 1


def _maps(spec: Callable[[int], TensorMapSpec], operand: str, size: int, box: int, last: int) -> tuple[Map, Map]:
    """The maps of an operand's ``size`` rows by what ``spec`` says of the rows of a box: for boxes of ``box``, and for
    the last one, if ``last`` rows of the last tile are loaded. One map is both where no box is another."""
    left = _left(last, box)
    ending = Map(spec(left), operand)
    return (ending if left == box or size <= box else Map(spec(box), operand)), ending


def _weights_maps(spec: Callable[[int], TensorMapSpec], n: int, config: FP8Config) -> tuple[list[Map], Map, int]:
    """The maps of B: for each segment of a tile's columns, and for the one box that ends at the edge, with its rows, or
    ``block_n`` if no box is cut."""
    widths = segments(config.block_n)
    tiles = align(ceil_div(n, config.block_n), config.cluster_n)
    boxes = [width // config.cluster_m for width in widths]
    begins = [first_column(config.block_n, segment, 0, tiles) for segment in range(len(widths))]
    edge = max(segment for segment, begin in enumerate(begins) if begin < n)
    left = boxes[edge] if config.stage_blocks > 1 else _left(n - begins[edge], boxes[edge])
    ending = Map(spec(left), "b")
    maps = [
        ending if left == box or begin + box > n else Map(spec(box), "b")
        for begin, box in zip(begins, boxes, strict=True)
    ]
    return maps, ending, left if left < boxes[edge] else config.block_n


def store_box(config: FP8Config) -> tuple[int, int]:
    """(columns, rows) of one box of staged sums (see ``TmaStore``): rows of 64 columns where the tile can be cut so."""
    finished = config.block_n // config.k_shares
    return next(columns for columns in (64, 32, 16) if finished % columns == 0), 64


SECTOR_BYTES = 32
"""What L2 reads and writes at a time."""


def _promotion(shape: Geometry, stride: int) -> int:
    """How many bytes of a row of A or B, which are ``stride`` apart, come into L2 together: a block of K, or where D is
    larger than B, two. Two at once keep what is wanted first waiting for what is wanted later: graphs of up to 64
    tokens were 0 to 6% faster with one (H200, promised weights), single calls with M up to 512 mostly 1%. But what D's
    writes interrupt is read better in long pieces: 1000 x 32768 x 512 took 9% longer with one, 4096 x 32768 x 512 4%.
    Not so where rows begin inside sectors: of twelve such shapes none lost more than 1% by one, and where many SMs ask
    for the same rows it is much better (6922 x 1280 x 3440 57.4 -> 52.4 us, 3465 x 1088 x 2960 29.2 -> 26.2)."""
    torn = stride % SECTOR_BYTES > 0
    return SCALE_BLOCK if torn or 2 * shape.m <= shape.k else 2 * SCALE_BLOCK


def _operand_map(k: int, rows: int, stride: int, box: int, stage_blocks: int, promotion: int) -> TensorMapSpec:
    """The map of K-major rows, ``box`` of which are loaded at a time, for ``stage_blocks`` blocks of K one after the
    other: the blocks are then a dimension of their own, and K must be whole blocks."""
    if stage_blocks == 1:
        return TensorMapSpec("u8", (k, rows), (stride,), (SCALE_BLOCK, box), 128, promotion)
    if k % SCALE_BLOCK:
        raise InvalidInputError(
            f"A config with {stage_blocks} blocks of K in a stage needs a K that is a multiple of "
            f"{SCALE_BLOCK}, but K is {k}."
        )
    dims = (SCALE_BLOCK, rows, k // SCALE_BLOCK)
    return TensorMapSpec("u8", dims, (stride, SCALE_BLOCK), (SCALE_BLOCK, box, stage_blocks), 128, promotion)


_FEW_EARLY, _ALL_EARLY = 2, 255
"""Stages; no ring has so many."""


def _early_stages(config: FP8Config, m: int, k: int) -> int:
    """How many stages of constant weights are loaded before the previous kernel has ended: the whole ring, but few
    where that one has more to do than loads. Where D has an eighth of B's bytes or more, all SMs store for long, and
    who reads much meanwhile slows them down: graphs of 32 to 128 x 32768 x 512, 96 and 128 x 24576 x 1536 and 64 x
    20000 x 1024 were 4 to 10% faster with few on an H200. But only where one row of tiles reads B: 128 x 7168 x 2048,
    which two read at a time, was 4% slower, and 64 x 24576 x 1536, whose D is smaller, 3%. Few, too, where a stage has
    more bytes of tokens, which come last, than of weights: 96 and 128 x 2112 x 7168 were 3% faster."""
    much_stored = m <= config.block_m and 16 * m >= k
    return _FEW_EARLY if much_stored or config.block_n < config.block_m else _ALL_EARLY


_IN_STEP = 8
"""With more blocks of K than these, tiles take so much longer than their starts differ that those below each other
read the same rows of B at one time."""

_LEAVES_B, _LEAVES_D = 1, 2
"""`Leaves` of ``fp8_gemm_arguments.cuh``."""

_LARGE_D = 100_000_000
"""Bytes, twice an H200's L2: of such a D little would be left for who reads it from its beginning, and what it pushes
out meanwhile is needed. Where D left first, and tiles had another order too, ten such shapes gained 2.8% on cuBLASLt
by geometric mean, at least 0 and at most 8, and twelve whose D has 34 to 91 MB 0.1%."""


def _leave_first(params: KernelParams, config: FP8Config, shape: Geometry, order: Raster, members: int) -> int:
    """What leaves L2 before anything else does. B where one row of tiles reads it, or several that read the same rows
    of it at one time: kept, such weights push out what is needed again: M x N x K of 256 x 7168 x 16384 took 5% longer
    on an H200, 256 x 24576 x 1536 4%. With few blocks of K some reader comes too late: 1000 x 32768 x 512 took up to
    11% longer where they were let go. B also where it would push out A (see `raster`). And a large D."""
    together = order.rows <= order.height and ceil_div(shape.k, SCALE_BLOCK) > _IN_STEP
    leaves = _LEAVES_B if order.rows * members == 1 or together or order.b_leaves else 0
    large = _stores_by_tma(params, config) and 2 * shape.m * shape.n > _LARGE_D
    return leaves | (_LEAVES_D if large else 0)


def _stores_by_tma(params: KernelParams, config: FP8Config) -> bool:
    """Whether TMA brings tiles to D, and not the warps that staged or multiplied them."""
    return params.store == "tma" and config.persistent and not isinstance(config, SwappedConfig)


def _output_maps(params: KernelParams, config: FP8Config, shape: Geometry) -> list[Parameter]:
    """The map of D, for kernels that have a parameter for it. It is not read unless tiles are stored by TMA; what a CTA
    with one tile copies itself instead is 16 bytes long."""
    if isinstance(config, SwappedConfig):
        return []
    if _stores_by_tma(params, config):
        width, height = store_box(config)
        spec = TensorMapSpec("bf16", (shape.n, shape.m), (shape.stride_d * 2,), (width, height), width * 2)
        return [Map(spec, "d")]
    if params.store == "tma" and shape.n % 8:
        raise InvalidInputError(
            "A config whose CTAs have one tile each copies eight columns of D at a time, so that N must be a "
            f"multiple of 8, but N is {shape.n}. Take its persistent twin."
        )
    return [bytes(128)]


def launch(
    params: KernelParams, shape: Geometry, num_sms: int, pdl: bool, constant_b: bool = False
) -> tuple[LaunchShape, list[Parameter]]:
    """Launch shape and the kernel's parameters, all but ``Addresses``; ``constant_b`` promises, for
    programmatic launches, that nothing still running writes B or its scales. K must be whole blocks where a stage holds
    several. TypeError for params of another family."""
    config = params.config
    if not isinstance(config, FP8Config):
        raise TypeError(f"{params.kernel} takes an FP8Config, not {type(config).__name__}")
    if isinstance(config, SmallConfig):
        return _launch_small(params, config, shape, pdl, constant_b)
    m, n, k = shape.m, shape.n, shape.k
    rows = last_rows(config, m)
    blocks, stage_blocks = ceil_div(k, SCALE_BLOCK), config.stage_blocks
    dealt = stream_k.stream(config, m, n, k, num_sms) if config.stream_k else None
    members = dealt.members if dealt else 1
    order = raster(config, m, n, k, num_sms, members)

    def tokens(box: int) -> TensorMapSpec:
        return _operand_map(k, m, shape.stride_a, box, stage_blocks, _promotion(shape, shape.stride_a))

    def weights(box: int) -> TensorMapSpec:
        return _operand_map(k, n, shape.stride_b, box, stage_blocks, _promotion(shape, shape.stride_b))

    def scales(box: int) -> TensorMapSpec:
        return TensorMapSpec("f32", (m, blocks), (shape.stride_sfa * 4,), (box, stage_blocks))

    extra = config.extra_tokens
    upright = config.block_m - extra
    map_a, map_a_last = _maps(tokens, "a", m, upright // config.cluster_n, rows)
    maps_b, map_b_last, columns = _weights_maps(weights, n, config)
    map_scale_a, map_scale_a_last = _maps(scales, "sfa", m, upright, rows)
    extras = [Map(tokens(extra), "a"), Map(scales(extra), "sfa")] if extra else []
    # What a CTA begins with comes first: it shares a line of the constants' cache, and each line takes 110 cycles.
    args: list[Parameter] = [
        ("u32", m),
        ("u32", n),
        ("u32", k),
        ("u32", rows),
        ("u32", columns),
        ("u32", _early_stages(config, m, k) if constant_b and pdl else 0),
        ("u32s", order.arguments),
        ("u32", _leave_first(params, config, shape, order, members)),
        Pointer("sfb"),
        ("i64", shape.stride_sfb[0]),
        ("i64", shape.stride_sfb[1]),
        Pointer("d"),
        ("i64", shape.stride_d),
    ]
    if dealt:
        args += [("u32", number) for number in dealt.arguments]
        args += [Pointer("flags"), Pointer("slots")]
    args += [
        map_a,
        maps_b[0],
        map_scale_a,
        *_output_maps(params, config, shape),
        map_a_last,
        map_b_last,
        map_scale_a_last,
        *extras,
        *maps_b[1:],
    ]
    kernel = get(params.kernel)
    ctas = dealt.ctas if dealt else num_ctas(config, m, n, num_sms)
    launch_shape = LaunchShape(
        grid=(ctas, 1, 1),
        block=config.num_threads,
        dynamic_shared=kernel.shared_bytes(params),
        cluster=(config.cluster_size, 1, 1),
        pdl=pdl,
    )
    return launch_shape, args


def _launch_small(
    params: KernelParams, config: SmallConfig, shape: Geometry, pdl: bool, constant_b: bool
) -> tuple[LaunchShape, list[Parameter]]:
    """The same for a kernel whose threads copy by address. CTAs beside each other share tokens. Weights are read late
    where a kernel that may still run writes them."""
    blocks = ceil_div(shape.k, SCALE_BLOCK)
    if blocks > config.num_stages:
        raise InvalidInputError(
            f"A config without a ring holds all of K in its {config.num_stages} stages of {SCALE_BLOCK}, "
            f"but K is {shape.k}."
        )
    launch_shape = LaunchShape(
        grid=(ceil_div(shape.n, config.block_n), ceil_div(shape.m, config.block_m), 1),
        block=config.num_threads,
        dynamic_shared=get(params.kernel).shared_bytes(params),
        pdl=pdl,
    )
    return launch_shape, [
        Pointer("a"),
        Pointer("b"),
        ("i64", shape.stride_a),
        ("i64", shape.stride_b),
        ("u32", shape.m),
        ("u32", shape.n),
        ("u32", shape.k),
        ("u32", int(pdl and not constant_b)),
        Pointer("sfa"),
        Pointer("sfb"),
        ("i64", shape.stride_sfa),
        ("i64", shape.stride_sfb[0]),
        ("i64", shape.stride_sfb[1]),
        Pointer("d"),
        ("i64", shape.stride_d),
    ]
