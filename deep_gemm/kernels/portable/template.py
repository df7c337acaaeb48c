"""The template of mma.sync kernels: their tiles, warps and stages, their parameters and their launches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...arch import ArchSpec
from ...params import GemmConfig, KernelParams
from ...spec import SCALE_BLOCK, GemmSpec, Operand, ceil_div
from .. import groups
from ..base import Argument, Numbers, Strides, Value, parse_arguments
from ..features import Costs
from ..raster import raster
from ..template import Constants, Grid, Template

LEAST_STAGES, MAX_STAGES = 3, 8
"""More would not hide more latency: the stages of a small tile hold what an SM reads in several microseconds."""

SIDES = (64, 128, 192, 256)
"""Rows and columns of tiles."""

TOKENS, WEIGHTS = (16, 32, 64), 64
"""Rows of A and of B in tiles with swapped operands."""

DECODE_TOKENS, DECODE_WEIGHTS, DECODE_STAGES = (8, 16), (16, 32, 64), (2, 4)
"""The same of tiles whose warps multiply blocks of K of their own, and the least and the most stages of a warp."""

DECODE_BYTES = 96 << 10
"""Bytes of weights in all stages of such a CTA. With more, products of an H200 took up to a sixth longer."""

_ATOM = 64
"""Rows of an MN-major operand that lie together in shared memory."""

DEPTHS = (64, 128)
"""Bytes of K in a block: rows of an atom in shared memory."""

MOST_SUMS = 128
"""Sums of a thread, partial ones too. Beside them there are two sets of fragments, in 255 registers."""

_CONSTANTS = {
    "bf16": "kBf16",
    "f16": "kF16",
    "f32": "kF32",
    "none": "kNothing",
    "threads": "kReads",
    "contiguous": "kIndex",
    "psum": "kPsum",
    "masked": "kMasked",
}
_LEAST_TABLE = groups.table_bytes("contiguous", groups.LEAST_SEGMENTS)
"""Bytes of the smallest table of groups."""

_SHARED_BYTES = 128
"""Bytes that shared memory takes or gives in a cycle."""

WIDENING = 13
"""Instructions by which a warp widens a word of FP8, seven on integers and six on FP16. A scheduler issues one in a
cycle."""

DECODE_WIDENING = 10
"""The same where scales take a part of it: six on integers and four on FP16."""

_LONE_INSTRUCTION = 4.0
"""Cycles of an instruction of a warp that multiplies a block of FP8 alone, which often waits for the one before."""

_WITHOUT_CONVERSION = ("sm_80", "sm_86")
"""Targets without an instruction that widens two bytes of FP8."""

_WITHOUT_DECODE = ("depth", "warps_m", "warps_n", "grouping", "segments", "swapped", "mn_major_a", "aligned")
"""Constants of `MmaGemm` that `MmaDecode` does not have."""

_SLOW_FLOAT32 = ("sm_80",)
"""Targets with a multiply-add of float32 in two cycles of a scheduler; others have one in each."""

_RATES = {"sm_90a": 0.67}
"""Of mma.sync, by target, as parts of wgmma's rate. An H200 did 630 TFLOP/s in registers. Sheets have others."""

_LONE_ELEMENT = 10.0
"""The cost of an element that is stored by itself, in elements that are not: as on Hopper."""

_SCALED = "kMmaE4m3Scaled"
"""Products that scale each row and column by a power of two."""

_FP8 = {"sm_89": "kMmaE4m3", "sm_120a": _SCALED}
"""Products of FP8 by target. Elsewhere it is widened to FP16 in registers, which is exact: compute capabilities 8.0 and
8.6 have no such product, and ptxas widens for those of Hopper and B200, and spills."""


class MmaGemm(Template):
    """See ``templates/include/mma_gemm.cuh``. ``num_consumers`` times four warps multiply, and copy operands too.
    ``fp8``: with scales of 1x128 and of 128x128, or of UE8M0. ``grouped``: along M.

    The kernels were compiled for every target, and run in emulation on a CPU. Built for Hopper, they gave exact results
    on an H200; on no other GPU have they run. There BF16 reaches 0.54 to 0.67 of cuBLASLt's speed at 4,096 rows."""

    file = "mma_gemm.cu.jinja"
    takes_epilogues = starts_early = True

    def __init__(self, fp8: bool = False, grouped: bool = False) -> None:
        self.fp8, self.grouped = fp8, grouped
        self.size = 1 if fp8 else 2

    @property
    def block_k(self) -> int:  # type: ignore[override]
        """The longest one."""
        return DEPTHS[-1] // self.size

    @property
    def mma_instruction(self) -> str:  # type: ignore[override]
        return "MMA"

    def make(  # type: ignore[override]
        self, family: str, block_m: int, block_n: int, block_k: int, warps: int, ctas_per_sm: int, arch: ArchSpec
    ) -> GemmConfig:
        """A config with as many stages as fit."""
        config = GemmConfig(
            *(family, block_m, block_n, block_k, MAX_STAGES, warps // 4),
            ctas_per_sm=ctas_per_sm,
            num_partials=int(self.fp8),
        )
        return config.changed(self._stages_that_fit(config, arch, _LEAST_TABLE if self.grouped else 0))

    def tiles(self) -> Iterator[tuple[object, ...]]:
        """Tiles from 64x64 to 128x256 and 256x128, blocks of 64 or 128 bytes of K, four or eight warps, and one or two
        CTAs on an SM."""
        depths = DEPTHS[-1:] if self.fp8 else DEPTHS
        return itertools.product(SIDES, SIDES, [depth // self.size for depth in depths], (4, 8), (1, 2))

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        c = config
        if c.swap_ab or c.parts or not c.persistent:
            return "it has no swapped operands and no parts of K, and its CTAs are persistent"
        if c.block_m not in SIDES or c.block_n not in SIDES:
            return f"a tile of {c.block_m}x{c.block_n} has other sides than {SIDES}"
        if self.fp8 and c.block_n > SCALE_BLOCK:
            return f"a tile has one scale of B in a block of K, so at most {SCALE_BLOCK} columns, not {c.block_n}"
        return self._unfit(c, arch)

    def _unfit(self, c: GemmConfig, arch: ArchSpec) -> str | None:
        """`illegal`, for what all of these templates have."""
        depths = DEPTHS[-1:] if self.fp8 else DEPTHS
        if c.block_k * self.size not in depths:
            return f"block_k must be one of {[depth // self.size for depth in depths]}, not {c.block_k}"
        if c.num_consumers not in (1, 2):
            return f"it has four or eight warps, not {4 * c.num_consumers}"
        if c.cluster_size > 1 or c.consumers_k > 1 or c.num_partials != int(self.fp8):
            return "it has no clusters, and one set of partial sums if there are scales"
        rows, columns = warp_tile(c)
        if min(rows, columns) < 16 or max(rows, columns) > 64:
            return f"a warp would multiply {rows}x{columns} of a tile, not 16 to 64 of each"
        sums = c.block_m * c.block_n // (128 * c.num_consumers) * (1 + c.num_partials)
        if sums > MOST_SUMS or c.ctas_per_sm * c.num_consumers not in (1, 2):
            return f"{c.ctas_per_sm} CTAs of {4 * c.num_consumers} warps leave too few registers for {sums} sums"
        if not LEAST_STAGES <= c.num_stages <= MAX_STAGES:
            return f"{c.num_stages} stages are not {LEAST_STAGES} to {MAX_STAGES}"
        shared = c.num_stages * self._stage_bytes(c)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def unreadable(self, name: str, operand: Operand) -> str | None:
        return None if operand.aligned else f"{super().unreadable(name, operand)} for copies of 16 bytes"

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """Not where a large table of groups would leave too few stages, nor where a warp's rows of an MN-major operand
        reach from one 64 of them into the next."""
        for operand, extent in zip((spec.a, spec.b), warp_tile(config), strict=True):
            if not config.swap_ab and operand.major == "mn" and _ATOM % extent:
                return False
        if not self.grouped:
            return True
        table = groups.table_bytes(spec.grouping, groups.segments(spec.grouping, spec.groups))
        return config.num_stages - ceil_div(max(0, table - _LEAST_TABLE), self._stage_bytes(config)) >= LEAST_STAGES

    def finishes(self, config: GemmConfig) -> bool:
        """Not with groups and the most sums: then registers hold where the next tile of a group lies."""
        return not self.grouped or config.block_m * config.block_n // (128 * config.num_consumers) < MOST_SUMS

    def fitted(self, params: KernelParams, table: int, arch: ArchSpec) -> GemmConfig:
        return params.gemm.changed(self._stages_that_fit(params.gemm, arch, table))

    def speeds(self, spec: GemmSpec) -> str:
        return "" if self.fp8 else "of 16-bit tiles"

    def costs(self, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str) -> Costs:
        """By counting instructions: nothing was measured. Tensor cores take the cycles of a Hopper's for as many
        products, and a calibration scales these by the rate of the instruction. Meanwhile shared memory takes a block
        and gives fragments, and warps widen these. Each sum is promoted by one FFMA after that, and
        another instruction if columns have scales, but products have none."""
        rows, columns = warp_tile(config)
        read = 4 * config.num_consumers * (rows + columns) * 128
        moved = (config.block_m + config.block_n) * 128 + read
        words = config.num_consumers * (rows + columns) if self.fp8 and arch not in _FP8 else 0
        promoted = config.num_consumers * rows * columns / 32 * (2 if arch in _SLOW_FLOAT32 else 1)
        if scaling == "ue8m0" and _FP8.get(arch) != _SCALED:
            promoted *= 2
        return Costs(
            tensor=config.block_m * config.block_n / 32 / _RATES.get(arch, 1.0),
            read=read,
            issue=max(moved / _SHARED_BYTES, words * WIDENING),
            depth=config.block_k * self.size / DEPTHS[-1],
            promotion=promoted if self.fp8 else 0.0,
            ahead=not self.fp8,
            element=2.0 if config.swap_ab else 1.0 if aligned else _LONE_ELEMENT,
            hides_epilogue=False,
            exchanges_alone=False,
        )

    # ---- a binary

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        p = params
        grouped = p.grouping in groups.WITH_TABLE
        order = "GroupRaster" if grouped else "Raster"
        operands = "const u8* a, i64 a_stride, const u8* b, i64 b_stride, u8* d, i64 d_stride"
        found = parse_arguments(f"u32 m, u32 n, u32 k, {order} raster, {operands}")
        if p.adds_c == "threads":
            found += parse_arguments("const u8* c, i64 c_stride")
        if p.scaling == "ue8m0":
            found += parse_arguments(
                "const u8* scale_a=sfa, i64 scale_a_stride, const u8* scale_b=sfb, i64 scale_b_stride"
            )
        elif self.fp8:
            found += parse_arguments("const float* scale_a=sfa, i64 scale_a_stride, const float* scale_b=sfb")
            found += parse_arguments("i64 scale_b_stride_n, i64 scale_b_stride_k" + ", i64 scale_b_stride_g" * grouped)
        if grouped:
            found += parse_arguments("u32 groups, u32 alignment, const int* layout")
        return found + (parse_arguments("u8* memory") if p.gemm.parts else ())

    def constants(self, params: KernelParams, given: Constants) -> Constants:
        p, c = params, params.gemm
        warps_m, warps_n = warps(c)
        fp8 = _FP8.get(p.arch, "kMmaWidened")
        return {
            "block_m": c.block_m,
            "block_n": c.block_n,
            "depth": c.block_k * self.size,
            "num_stages": c.num_stages,
            "warps_m": warps_m,
            "warps_n": warps_n,
            "num_threads": self.num_threads(c),
            "min_ctas": c.ctas_per_sm,
            "mma": {"bf16": "kMmaBf16", "f16": "kMmaF16", "e4m3": fp8}[p.dtype],
            "element": _CONSTANTS[p.output],
            "accumulate": _CONSTANTS[p.adds_c],
            "exponents": p.scaling == "ue8m0",
            "grouping": _CONSTANTS.get(p.grouping, "") if p.grouping != "none" else "kUngrouped",
            "segments": p.segments,
            "swapped": c.swap_ab,
            "mn_major_a": p.majors[0] == "mn",
            "mn_major_b": p.majors[1] == "mn",
            "aligned": p.store == "tma",
            **{f"shape_{letter}": size for letter, size in zip("mnk", p.shape, strict=True)},
            **given,
        }

    def name_of_options(self, config: GemmConfig) -> str:
        return f"k{config.block_k}w{4 * config.num_consumers}"

    def num_threads(self, config: GemmConfig) -> int:
        return 128 * config.num_consumers

    def shared_bytes(self, params: KernelParams) -> int:
        """In the layout of ``MmaGemmLayout``, which asserts the same number."""
        return params.gemm.num_stages * self._stage_bytes(params.gemm)

    # ---- a launch

    def launch(
        self, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
    ) -> tuple[Grid, dict[str, Value]]:
        c = params.gemm
        values: dict[str, Value] = {"d_stride": strides["d"][-2]}
        for name, operand in (("a", spec.a), ("b", spec.b)):
            values[f"{name}_stride"] = strides[name][-2 if operand.major == "k" else -1]
        if params.adds_c == "threads":
            values["c_stride"] = strides["c"][-2]
        if params.scaling == "ue8m0":
            values |= {f"scale_{name}_stride": strides[f"sf{name}"][-1] for name in "ab"}
        elif self.fp8:
            *of_group, stride_n, stride_k = strides["sfb"]
            values |= {"scale_a_stride": strides["sfa"][-1], "scale_b_stride_n": stride_n, "scale_b_stride_k": stride_k}
            values |= {"scale_b_stride_g": of_group[0]} if of_group else {}
        if self.grouped:
            values |= _of_groups(spec, c, strides)
            return (
                min(groups.rows_of_tiles(spec, c) * ceil_div(spec.n, c.block_n), spec.num_sms * c.ctas_per_sm),
                1,
                1,
            ), values
        values["raster"] = raster(c, spec.m, spec.n, spec.k * self.size, spec.num_sms).arguments
        tiles = ceil_div(spec.m, c.block_m) * ceil_div(spec.n, c.block_n)
        if not c.parts:
            return (min(tiles, spec.num_sms * c.ctas_per_sm), 1, 1), values
        return (tiles, groups.parts(c, spec), 1), values

    def _stage_bytes(self, config: GemmConfig) -> int:
        return (config.block_m + config.block_n) * config.block_k * self.size

    def _stages_that_fit(self, config: GemmConfig, arch: ArchSpec, rest: int) -> int:
        """Stages that fit beside ``rest`` bytes, at most those of ``config``."""
        budget = min(arch.shared_per_cta, arch.shared_per_sm // config.ctas_per_sm - arch.shared_reserved_per_cta)
        return min(config.num_stages, (budget - rest) // self._stage_bytes(config))


class MmaSwapped(MmaGemm):
    """Swap-AB tiles of 64 rows of B, for few rows of each group, or of A, if they are too many for `MmaDecode`. Without
    groups K is split over as many CTAs as there is room for."""

    def make(  # type: ignore[override]
        self, family: str, block_m: int, ctas_per_sm: int, arch: ArchSpec
    ) -> GemmConfig:
        """A config with as many stages as fit."""
        config = GemmConfig(
            *(family, block_m, WEIGHTS, self.block_k, MAX_STAGES, 1),
            ctas_per_sm=ctas_per_sm,
            swap_ab=True,
            num_partials=int(self.fp8),
            persistent=self.grouped,
            parts=not self.grouped,
        )
        return config.changed(self._stages_that_fit(config, arch, _LEAST_TABLE if self.grouped else 0))

    def tiles(self) -> Iterator[tuple[object, ...]]:
        return itertools.product(TOKENS, (1, 2))

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        c = config
        if not c.swap_ab or c.parts == self.grouped or c.persistent != self.grouped or c.num_consumers != 1:
            ctas = "persistent CTAs" if self.grouped else "CTAs with one part of K of one tile"
            return f"it has swapped operands, four warps, and {ctas}"
        if c.block_m not in TOKENS or c.block_n != WEIGHTS:
            return f"a tile of {c.block_m}x{c.block_n} is not one of {TOKENS} by {WEIGHTS}"
        return self._unfit(c, arch)

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """The smallest tile that has all rows. More rows take tiles that share operands among more warps. Rows of
        groups are not known, and any tile is right there."""
        return super().fits(spec, config, adds_c, scaling) if self.grouped else config.block_m == _tokens(spec.m)

    def offered(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> list[GemmConfig]:
        """The smallest tile that has the rows that are expected in a group."""
        tokens = _tokens(groups.one_group(spec).m)
        return [config for config in configs if config.block_m == tokens]

    def memory_bytes(self, spec: GemmSpec) -> int:
        """As `PartsInOrder` lays it out: a count for each warp, and the sums of all parts, of as many CTAs as run."""
        tokens, ctas = 0 if self.grouped else _tokens(spec.m), 2 * spec.num_sms
        return 128 + ctas * (4 * 8 + tokens * WEIGHTS * 4) if tokens and not spec.batch_invariant else 0


class MmaDecode(MmaGemm):
    """See ``templates/include/mma_decode.cuh``. Swap-AB tiles for up to 16 rows of A, of which each warp multiplies
    blocks of K of its own. K is split over CTAs too, where tiles are few and K is long."""

    file = "mma_decode.cu.jinja"

    def make(  # type: ignore[override]
        self, family: str, block_m: int, block_n: int, warps: int, ctas_per_sm: int, arch: ArchSpec
    ) -> GemmConfig:
        """A config with as many stages as fit."""
        config = GemmConfig(
            *(family, block_m, block_n, self.block_k, 0, warps // 4),
            ctas_per_sm=ctas_per_sm,
            swap_ab=True,
            num_partials=int(self.fp8),
            persistent=False,
            parts=True,
        )
        return config.changed(self._stages_that_fit(config.changed(self.most_stages(config)), arch, 0))

    def most_stages(self, config: GemmConfig) -> int:
        """Stages of a warp that are not more than what is useful."""
        return min(DECODE_STAGES[1], DECODE_BYTES // (4 * config.num_consumers * config.block_n * DEPTHS[-1]))

    def tiles(self) -> Iterator[tuple[object, ...]]:
        return itertools.product(DECODE_TOKENS, DECODE_WEIGHTS, (4, 8), (1, 2))

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        c, least, most = config, DECODE_STAGES[0], self.most_stages(config)
        if not c.swap_ab or not c.parts or c.persistent or c.cluster_size > 1 or c.num_partials != int(self.fp8):
            return "it has swapped operands, CTAs with one part of K of one tile, and partial sums if there are scales"
        if c.block_m not in DECODE_TOKENS or c.block_n not in DECODE_WEIGHTS or c.block_k != self.block_k:
            return f"a tile of {c.block_m}x{c.block_n} is not one of {DECODE_TOKENS} by {DECODE_WEIGHTS}"
        if c.num_consumers not in (1, 2) or c.ctas_per_sm * c.num_consumers > 2:
            return f"{c.ctas_per_sm} CTAs of {4 * c.num_consumers} warps are not up to eight warps on an SM"
        if not least <= c.num_stages <= most:
            return f"{c.num_stages} stages are not {least} to {most}"
        shared = c.num_stages * self._stage_bytes(c)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """The smallest tile that has all rows. MN-major weights are copied 64 rows at a time."""
        whole = spec.b.major == "k" or config.block_n == WEIGHTS
        return whole and config.block_m == next((rows for rows in DECODE_TOKENS if spec.m <= rows), 0)

    def memory_bytes(self, spec: GemmSpec) -> int:
        """As `PartsInOrder` lays it out. There are at most as many CTAs as SMs where K is split."""
        if spec.m > DECODE_TOKENS[-1] or spec.batch_invariant:
            return 0
        return 128 + spec.num_sms * (8 * 8 + DECODE_TOKENS[-1] * DECODE_WEIGHTS[-1] * 4)

    def costs(self, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str) -> Costs:
        """By counting instructions. A warp multiplies a block alone: so blocks of all warps are loaded ahead."""
        c = config
        warps, rows = 4 * c.num_consumers, c.block_m + c.block_n
        words = rows * (DECODE_WIDENING if arch in _WITHOUT_CONVERSION else 2) if self.fp8 and arch not in _FP8 else 0
        return Costs(
            tensor=c.block_m * c.block_n / 32,
            read=rows * 128,
            issue=max(2 * rows * 128 / _SHARED_BYTES, (words + 3 * rows) / 4),
            depth=warps,
            promotion=_LONE_INSTRUCTION * (words + 3 * rows) if self.fp8 else 0.0,
            consumers_k=warps,
            element=2.0,
            hides_epilogue=False,
            exchanges_alone=False,
        )

    # ---- a binary

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        found = tuple(each for each in super().arguments(params) if each.name != "raster")
        return found + parse_arguments("u32 share, u32 more")

    def constants(self, params: KernelParams, given: Constants) -> Constants:
        c, found = params.gemm, dict(super().constants(params, given))
        for name in _WITHOUT_DECODE:
            del found[name]
        return found | {"warps": 4 * c.num_consumers}

    # ---- a launch

    def launch(
        self, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
    ) -> tuple[Grid, dict[str, Value]]:
        c = params.gemm
        _, values = super().launch(params, spec, strides, numbers, early)
        del values["raster"]
        parts, blocks = groups.parts(c, spec), ceil_div(spec.k, c.block_k)
        return (ceil_div(spec.n, c.block_n), parts, 1), values | {"share": blocks // parts, "more": blocks % parts}

    def _stage_bytes(self, config: GemmConfig) -> int:
        return 4 * config.num_consumers * super()._stage_bytes(config)


def _tokens(m: int) -> int:
    """Rows of a tile with swapped operands for ``m`` rows; 0 if these are too many."""
    return next((tokens for tokens in TOKENS if m <= tokens), 0)


def warps(config: GemmConfig) -> tuple[int, int]:
    """Warps along the rows and along the columns of sums. They read the fewest rows of operands from shared memory;
    with equally many, a warp has more rows of a tile than columns. With swapped operands each has all columns."""
    count = 4 * config.num_consumers
    if config.swap_ab:
        return count, 1
    shapes = [(x, count // x) for x in (1, 2, 4, 8) if count % x == 0]
    return min(shapes, key=lambda shape: (config.block_m // shape[0] + config.block_n // shape[1], shape[0]))


def warp_tile(config: GemmConfig) -> tuple[int, int]:
    """Rows and columns of sums of a warp."""
    rows, columns = warps(config)
    return config.height // rows, config.width // columns


def _of_groups(spec: GemmSpec, config: GemmConfig, strides: Strides) -> Mapping[str, Value]:
    """The values of parameters with groups along M. Nothing is prefetched while sizes are read."""
    return {
        "groups": spec.groups,
        "alignment": spec.alignment,
        "raster": tuple(groups.order(config, spec.n, True, 0)),
    }
