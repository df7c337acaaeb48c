"""Products of MXFP4 weights with tokens in FP8 or BF16, alone and grouped by M."""

from __future__ import annotations

from collections.abc import Mapping

from .. import arch as archs
from ..arch import ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import Config, KernelParams
from ..records import record
from ..spec import Fp4Spec, Spec, align, ceil_div
from . import groups
from .base import Argument, KernelFamily, Numbers, Strides, Value, parse_arguments

PIECE_ROWS, PIECE_K = 64, 128
PIECE_BYTES = {False: 4096 + 128, True: 4096 + 256}
"""Bytes of 64 rows by 128 of K, with relative and with absolute exponents: see ``fp4_weights.cuh``."""

GROUPINGS = {"none": "kUngrouped", "masked": "kMasked", "contiguous": "kIndex", "psum": "kPsum"}

TOKENS = (8, 16, 24, 32, 64, 128)
"""Heights of tiles."""
SPLIT_TOKENS = (8, 16, 32, 64)
_MOST_ABSOLUTE = 32
"""Tokens of a tile with absolute exponents, whose products are added up in other registers."""
_MOST_STAGES = 32
_LARGE_TOKENS, _LARGE_COLUMNS = 256, 128
"""The tile for many rows, whose weights are decoded into shared memory."""
_WIDE_COLUMNS = 256
"""The columns of a wide tile, whose 128 rows fit groups of so many; weights are decoded into registers."""
_BLOCK_TIMES = {"e4m3": (1.2, 1.05, 1.75), "bf16": (1.55, 1.15, 1.6)}
"""The times of a block of K in a large tile, in one with up to 128 rows of a group, and in a wide tile, beside that of
128 x 128 in stream-K order (H200)."""

_NARROW_BYTES = 80_000_000
"""Packed weights up to which four CTAs on an SM have 64 rows each. On an H200 they took 0.86 to 0.92 of the time of
one CTA of 256 rows with 53 and 70 MB (6 x 20 rows, FP8), and 1.24 with 748 MB. BF16 gains nothing."""
_PREFETCHED_BYTES = 200_000_000
"""Packed weights up to which the first ones are prefetched while the previous kernel ends: 0.90 of the time with 53 MB,
and 1.12 with 748 MB (H200)."""
_EARLY_UNITS = 4


@record(frozen=True)
class Fp4Config(Config):
    """A CTA has ``tokens`` rows of A and 64 rows of B for each of ``consumers``, in stream-K order. If ``cluster`` is
    not 0, it has 64 rows of B, consumers take blocks of K in turn, and the CTAs of a cluster split K. If weights are
    decoded ``in_shared`` memory, it has whole tiles, and both consumers multiply all its columns. If it is ``wide``, it
    has whole tiles, and a consumer has 128 rows of B."""

    tokens: int
    consumers: int
    ctas_per_sm: int
    cluster: int = 0
    in_shared: bool = False
    wide: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of D that a CTA writes."""
        return self.tokens, PIECE_ROWS * (1 if self.cluster else self.consumers * (2 if self.wide else 1))

    @property
    def whole(self) -> bool:
        """Whether it is for many rows, with whole tiles in rounds."""
        return self.in_shared or self.wide

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and of a consumer's thread; (0, 0) where all have the same. Both together must fit in what
        the launch allocates, threads times the registers at entry: otherwise setmaxnreg waits for ever."""
        if self.in_shared:
            return 56, 224
        if self.wide:
            return 24, 240
        if self.cluster:
            return (24, 104) if self.tokens == SPLIT_TOKENS[-1] else (0, 0)
        return {1: (24, 104), 2: (40, 208), 4: (32, 112)}[self.consumers]

    @property
    def num_threads(self) -> int:
        """The producer is a warpgroup where it gives registers away, otherwise a warp."""
        return self.consumers * 128 + (128 if self.registers[0] else 32)


def stream(tokens: int, narrow: bool = False) -> Fp4Config:
    """A config in stream-K order. Sums of 128 tokens leave registers for two consumers only."""
    return Fp4Config(Fp4Family.name, tokens, *((1, 4) if narrow else (2 if tokens == TOKENS[-1] else 4, 1)))


def large() -> Fp4Config:
    """The config for many rows."""
    return Fp4Config(Fp4Family.name, _LARGE_TOKENS, 2, 1, in_shared=True)


def wide() -> Fp4Config:
    """The config for groups of some 128 rows."""
    return Fp4Config(Fp4Family.name, TOKENS[-1], 2, 1, wide=True)


def _clusters(tokens: int) -> tuple[int, ...]:
    """CTAs that split K. With four, sums of 64 tokens would spill."""
    return (1, 2) if tokens == SPLIT_TOKENS[-1] else (1, 2, 4)


def split(tokens: int, cluster: int, dtype: str) -> Fp4Config:
    """A config that splits K. Few BF16 tokens have three consumers, since decoding to BF16 has more instructions: they
    took 0.90 to 0.95 of the time of two (H200), and FP8 gained nothing. Without a cluster deep rings are better than a
    third CTA on an SM (H200)."""
    consumers = 3 if dtype == "bf16" and tokens <= 16 else 2
    ctas = 3 if consumers == 2 and cluster > 1 and tokens <= 16 else 2
    return Fp4Config(Fp4Family.name, tokens, consumers, ctas, cluster)


def _configs(dtype: str) -> list[Fp4Config]:
    """All that tokens of ``dtype`` use."""
    return [
        *(stream(tokens) for tokens in TOKENS),
        *(stream(tokens, narrow=True) for tokens in TOKENS if tokens <= 32 and dtype == "e4m3"),
        large(),
        wide(),
        *(split(tokens, cluster, dtype) for tokens in SPLIT_TOKENS for cluster in _clusters(tokens)),
    ]


def _rows(spec: Fp4Spec) -> int:
    """Those that a tile should take. One of 128 tokens takes 0.85 to 0.94 of the time of two of 64 (H200), since it
    decodes weights once; so up to an eighth more rows with padding is no loss."""
    two, most = TOKENS[-2:]
    rows = _rows_of_group(spec)
    if spec.grouping == "none":
        return rows if align(rows, most) * 7 <= align(rows, two) * 8 else min(rows, two)
    if spec.grouping == "masked":
        return rows
    return most if rows >= most else two


def _rows_of_group(spec: Fp4Spec) -> int:
    """Those that are expected. Of contiguous groups only the mean is known; with the psum layout m has room for the
    padding of each."""
    if spec.grouping == "masked":
        return min(spec.expected_m or spec.m, spec.m)
    return spec.m // spec.groups - (spec.alignment if spec.grouping == "psum" else 0)


def many(spec: Fp4Spec) -> Fp4Config | None:
    """The config for many rows, in rounds of one tile for each SM, if that takes less time than tiles of 128 rows in
    stream-K order, which has no rounds. Absolute exponents would need products of 32 of K, and labels are those of 128
    rows. All add in the order of whole tiles in stream-K order, so that batch invariance does not matter."""
    if spec.absolute or _rows(spec) <= TOKENS[-2] or (spec.grouping == "contiguous" and spec.alignment % 128):
        return None
    full, part, across = _BLOCK_TIMES[spec.dtype]
    rows = ceil_div(_rows_of_group(spec), TOKENS[-1])

    def tiles(height: int, columns: int) -> int:
        return spec.groups * ceil_div(rows, height) * ceil_div(spec.n, columns)

    def rounds(height: int, columns: int) -> int:
        return ceil_div(tiles(height, columns), spec.num_sms)

    times = {
        large(): rounds(2, _LARGE_COLUMNS) * (part if rows == 1 else full),
        wide(): rounds(1, _WIDE_COLUMNS) * across,
        None: tiles(1, _LARGE_COLUMNS) / spec.num_sms,
    }
    return min(times, key=lambda config: times[config])


class Fp4Family(KernelFamily):
    """See ``fp4_gemm.cuh``, ``fp4_split.cuh``, ``fp4_large.cuh`` and ``fp4_wide.cuh`` in ``templates/include``."""

    name = "sm90_fp4_gemm"
    template_file = f"{name}.cu.jinja"
    mma_instruction = "GMMA"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except these products."""
        if not isinstance(spec, Fp4Spec):
            return "it multiplies MXFP4 weights"
        rows = spec.groups * spec.m if spec.grouping == "masked" else spec.m
        if ceil_div(rows, TOKENS[0]) * ceil_div(spec.n, PIECE_ROWS) * ceil_div(spec.k, PIECE_K) >= 1 << 31:
            return "it counts blocks of work in 31 bits, and these are more"
        return None

    def configs(self, arch: ArchSpec) -> tuple[Fp4Config, ...]:
        """Few tokens split K, and many have whole tiles; the others are in stream-K order."""
        return tuple(dict.fromkeys(_configs("e4m3") + _configs("bf16")))

    def config_of(self, spec: Fp4Spec, arch: ArchSpec) -> Fp4Config:
        """The lowest tile that takes the expected rows of a group. One product of up to 64 rows splits K if it has too
        few tiles for all SMs, but not under batch invariance, where all M add in one order."""
        pieces, blocks, rows = ceil_div(spec.n, PIECE_ROWS), ceil_div(spec.k, PIECE_K), _rows(spec)
        few = spec.grouping == "none" and spec.m <= SPLIT_TOKENS[-1] and pieces <= 2 * spec.num_sms
        if few and not spec.batch_invariant and not spec.absolute:
            tokens = next(each for each in SPLIT_TOKENS if rows <= each)
            few_enough = (x for x in _clusters(tokens)[::-1] if pieces * x <= spec.num_sms and blocks >= 2 * x)
            return split(tokens, next(few_enough, 1), spec.dtype)
        if found := many(spec):
            return found
        heights = [x for x in TOKENS if x <= (_MOST_ABSOLUTE if spec.absolute else TOKENS[-1])]
        if spec.grouping in ("contiguous", "psum"):  # groups begin at multiples of the alignment
            heights = [x for x in heights if spec.alignment % x == 0]
        tokens = next((x for x in heights if rows <= x), heights[-1])
        few = spec.grouping == "masked" and tokens <= 32 and packed_bytes(spec) <= _NARROW_BYTES
        return stream(tokens, narrow=few and spec.dtype == "e4m3" and not spec.absolute)

    def params(self, spec: Fp4Spec, config: Fp4Config, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`."""
        return KernelParams(
            kernel=self.name,
            arch=arch.name,
            config=config,
            dtype=spec.dtype,
            grouping=spec.grouping,
            segments=groups.segments(spec.grouping, spec.groups),
            options=(spec.absolute,),
        )

    def typed(self, params: KernelParams) -> Fp4Config:
        """The config of ``params``, with its type."""
        if not isinstance(params.config, Fp4Config):
            raise TypeError(f"{self.name} takes a Fp4Config, not a {type(params.config).__name__}")
        return params.config

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """``pieces`` of N, ``blocks`` of K. ``early``: units of K to prefetch; where K is split, whether weights are
        constant."""
        c = self.typed(params)
        scales = ", TensorMap map_sfa=sfa" if params.dtype == "e4m3" else ""
        of_groups = ", u32 groups, u32 alignment, const int* layout" if params.grouping != "none" else ", u32 groups"
        own = "" if c.cluster or c.whole else ", u8* workspace, u32 whole_tiles"
        return parse_arguments(
            f"TensorMap map_a=a{scales}, const u8* packed=b, const float* factors=sfb, u8* d, i64 d_stride, u32 m, "
            f"u32 n, u32 pieces, u32 blocks, u32 early, u32 aligned{of_groups}{own}"
        )

    def values(
        self, params: KernelParams, spec: Fp4Spec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: a, sfa (blocks of K contiguous over rows, TMA's layout), b, sfb, layout, d, workspace. Strides of a
        and d are those of all groups' rows as one matrix."""
        c = self.typed(params)
        size, step = (1, 128) if spec.dtype == "e4m3" else (2, 64)
        masked = spec.groups if spec.grouping == "masked" else 1
        pieces, blocks = ceil_div(spec.n, PIECE_ROWS), ceil_div(spec.k, PIECE_K)
        kind = "u8" if size == 1 else "bf16"
        rows = (spec.k, spec.m * masked)
        box = c.tokens // 2 if c.in_shared else c.tokens
        values: dict[str, Value] = {
            "map_a": Map(TensorMapSpec(kind, rows, (size * strides["a"][0],), (step, box), 128), "a"),
            "d_stride": strides["d"][0],
            "m": spec.m,
            "n": spec.n,
            "pieces": pieces,
            "blocks": blocks,
            "early": int(constant) if c.cluster else self._prefetched(spec, c),
            "aligned": int(spec.aligned),
            "groups": spec.groups,
            "alignment": spec.alignment,
            "whole_tiles": int(spec.batch_invariant),
        }
        if spec.dtype == "e4m3":
            scales = TensorMapSpec("f32", (spec.m, blocks * masked), (4 * strides["sfa"][1],), (c.tokens, 1))
            values["map_sfa"] = Map(scales, "sfa")
        grid = pieces * ceil_div(spec.m, c.tokens) * c.cluster if c.cluster else spec.num_sms * c.ctas_per_sm
        shape = LaunchShape(
            grid=(grid, 1, 1),
            block=c.num_threads,
            dynamic_shared=self.shared_bytes(params),
            cluster=(max(1, c.cluster), 1, 1),
            pdl=pdl and spec.whole_gpu,
        )
        return shape, values

    def _prefetched(self, spec: Fp4Spec, config: Fp4Config) -> int:
        few = config.tokens < SPLIT_TOKENS[-1] and packed_bytes(spec) <= _PREFETCHED_BYTES
        return _EARLY_UNITS if few and not spec.batch_invariant else 0

    def workspace_bytes(self, spec: Fp4Spec) -> int:
        """The memory in which CTAs leave sums to each other; 0 if they do not."""
        c = self.config_of(spec, self.arch)
        if c.cluster or c.whole:
            return 0
        consumers = spec.num_sms * c.ctas_per_sm * c.consumers
        return align(consumers * 8, 128) + consumers * PIECE_ROWS * c.tokens * 4

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of the template."""
        c, fp8, absolute = self.typed(params), params.dtype == "e4m3", self.is_absolute(params)
        producer, consumer = c.registers
        # Decoded FP8 weights are E5M2, see fp4_weights.cuh.
        types = ("k32.f32.e4m3.e5m2" if c.in_shared else "k32.f32.e5m2.e4m3") if fp8 else "k16.f32.bf16.bf16"
        source, kernel = ("fp4_split", "Fp4Split") if c.cluster else ("fp4_gemm", "Fp4Gemm")
        if c.whole:
            source, kernel = ("fp4_large", "Fp4Large") if c.in_shared else ("fp4_wide", "Fp4Wide")
        return {
            "source": source,
            "kernel": kernel,
            "in_shared": c.in_shared,
            "tokens": c.tokens,
            "columns": c.tile[1],
            # Wide tiles multiply half of the tokens by a block of K in FP8, and all by a half of it in BF16.
            "mma_n": _LARGE_COLUMNS if c.in_shared else c.tokens // (2 if c.wide and fp8 else 1),
            "mma_steps": 4 if c.wide else (1 if fp8 else 2) * (1 if absolute else 2),
            "mma_types": types,
            "mma_majors": "" if fp8 else ", 0, 0" if c.in_shared else ", 0",
            "step_a": "kStepKMajor",
            "step_b": "kStepKMajor",
            "consumers": c.consumers,
            "num_stages": self.stages(params),
            "cluster": max(1, c.cluster),
            "num_threads": c.num_threads,
            "min_ctas": c.ctas_per_sm,
            "shared_bytes": self.shared_bytes(params),
            "producer_registers": producer,
            "consumer_registers": consumer,
            "fp8": "true" if fp8 else "false",
            "absolute": "true" if absolute else "false",
            "grouping": GROUPINGS[params.grouping],
            "segments": params.segments,
            "argument_fields": self.struct_fields(params),
            "arguments": self.struct(params),
        }

    def is_absolute(self, params: KernelParams) -> bool:
        """Whether exponents have 8 bits."""
        return bool(params.options[0])

    def stages(self, params: KernelParams) -> int:
        """As many as fit, for consumers that take blocks in turn the same number each."""
        c = self.typed(params)
        rest = self._shared(params, 0)
        arch = archs.get(params.arch)
        room = min(arch.shared_per_cta, arch.shared_per_sm // c.ctas_per_sm - arch.shared_reserved_per_cta)
        fit = min(_MOST_STAGES, (room - rest) // (self._shared(params, 1) - rest))
        return fit // c.consumers * c.consumers if c.cluster else fit

    def shared_bytes(self, params: KernelParams) -> int:
        """See the offsets in ``Fp4Gemm`` and ``Fp4Split``."""
        return self._shared(params, self.stages(params))

    def _shared(self, params: KernelParams, stages: int) -> int:
        c, fp8, piece = self.typed(params), params.dtype == "e4m3", PIECE_BYTES[self.is_absolute(params)]
        block = c.tokens * 128 * (1 if fp8 else 2) + (align(c.tokens * 4, 128) if fp8 else 0)
        if c.in_shared:
            step = c.tokens * 128 + _LARGE_COLUMNS * 128 + (c.tokens * 4 if fp8 else 0)
            table = groups.table_bytes(params.grouping, params.segments)
            if params.grouping == "contiguous":
                table += align((params.segments + 1) * 4, 128)
            # Eight warps have staging, factors and the tile's place, and four have packed weights.
            return stages * (step + 16) + 8 * (1024 + 512 + 16) + table + 4 * piece
        if c.wide:  # a stage has factors and a note of the tile, too
            table = groups.table_bytes(params.grouping, params.segments)
            stage = block + 4 * (piece + PIECE_ROWS * 4) + 16
            return stages * (stage + 16) + c.consumers * c.tokens * 128 + table
        if not c.cluster:
            stage = 2 * (block + c.consumers * piece)
            table = groups.table_bytes(params.grouping, params.segments)
            return stages * (stage + 16) + c.consumers * c.tokens * 128 + table
        splits = c.consumers * c.cluster
        owned = ceil_div(c.tokens // 8, splits)
        slots = min(ceil_div(c.tokens // 8, owned), c.consumers) * (splits - 1) * owned * 2048
        return stages * (block + piece + 16) + c.consumers * (owned * 1024 + 16) + slots

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``m_grouped_fp8_fp4_gemm_24x256_masked_g32``."""
        c = self.typed(params)
        kind = "fp8" if params.dtype == "e4m3" else "bf16"
        grouped = params.grouping != "none"
        return "_".join(
            filter(
                None,
                (
                    f"{'m_grouped_' if grouped else ''}{kind}_fp4_gemm_{self.describe(c)}",
                    "absolute" if self.is_absolute(params) else "",
                    f"{params.grouping}_g{params.segments}" if grouped else "",
                ),
            )
        )

    def describe(self, config: Config) -> str:
        """The tile, and how many CTAs split K, by three consumers each if there is an x3."""
        rows, columns = config.tile
        if not isinstance(config, Fp4Config) or not config.cluster:
            return f"{rows}x{columns}"
        return f"{rows}x{columns}_k{config.cluster}{'x3' if config.consumers == 3 else ''}"

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """Each config with the tokens that use it; each form of groups, and absolute exponents."""
        target = arch or self.arch

        def case(config: Fp4Config, dtype: str, grouping: str = "masked", absolute: bool = False) -> KernelParams:
            grouping = "none" if config.cluster else grouping
            return KernelParams(self.name, target.name, config, dtype=dtype, grouping=grouping, options=(absolute,))

        found = []
        for dtype in ("e4m3", "bf16"):
            found += [case(config, dtype) for config in _configs(dtype)]
            for config in (*(stream(tokens) for tokens in TOKENS[-2:]), large(), wide()):
                found += [case(config, dtype, grouping) for grouping in ("none", "contiguous", "psum")]
            found += [case(stream(tokens), dtype, absolute=True) for tokens in (8, _MOST_ABSOLUTE)]
        return found

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """With relative exponents, what experts of gpt-oss (BF16) and DeepSeek-V4 (FP8) need: the masked form of up to
        32 on a GPU, for up to 64 tokens, and the psum form, which mixtures have for more, of 32 and of all. All others
        compile when they are first called."""
        few = [(stream(tokens), "masked", 32) for tokens in TOKENS if tokens <= 64]
        narrow = [(stream(tokens, narrow=True), "masked", 32) for tokens in TOKENS if tokens <= 32]
        tall = {
            x: [(config, "psum", groups.segments("psum", x)) for config in (stream(TOKENS[-2]), wide())]
            for x in (32, 128, 256)
        }
        by_dtype = {"e4m3": few + narrow + tall[32] + tall[256], "bf16": few + tall[32] + tall[128]}
        return [
            KernelParams(self.name, arch.name, config, dtype=dtype, grouping=form, segments=size, options=(False,))
            for dtype, found in by_dtype.items()
            for config, form, size in found
        ]

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """None: no GEMM calls it."""
        return []


def packed_bytes(spec: Fp4Spec) -> int:
    """Of all weights."""
    return spec.groups * ceil_div(spec.n, PIECE_ROWS) * ceil_div(spec.k, PIECE_K) * PIECE_BYTES[spec.absolute]


FP4 = Fp4Family()
