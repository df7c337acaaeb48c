"""Dense BF16 and FP16 GEMM for Hopper: operands with any major dimension, 16-bit or float32 output, C added."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from ..arch import SM90, ArchSpec
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import HalfConfig, HalfParams, KernelParams
from ..spec import GemmSpec, Spec, ceil_div
from .gemm_features import PACKING, Counts
from .groups import LEAST_SEGMENTS
from .half import BLOCK_K, BYTES, HalfKernel, box_columns, operand_bytes, stages_that_fit
from .half_choice import drifts, for_small_outputs, padded, turns
from .loads import BARRIER_BYTES

Config = TypeVar("Config", bound=HalfConfig)

MAX_STAGES = 16

CONSUMERS = {64: 1, 128: 2, 192: 3, 256: 2}
"""Consumer warpgroups by the rows of a tile's sums. Only the kernel with operands swapped has three: without, such
tiles gained 0.1% over 86 shapes (H100)."""

CLUSTERS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4))
"""Cluster shapes: CTAs of a cluster along m, n and k."""

SERVING: tuple[tuple[int, int, tuple[int, int, int], int], ...] = (
    (64, 32, (1, 1, 1), 2),
    (64, 48, (1, 1, 1), 1),
    (64, 64, (1, 1, 1), 1),
    (64, 64, (1, 1, 1), 2),
    (64, 64, (1, 1, 2), 1),
    (64, 64, (1, 1, 4), 1),
    (64, 96, (1, 1, 1), 1),
    (64, 96, (1, 1, 1), 2),
    (64, 128, (1, 1, 1), 1),
    (64, 128, (1, 1, 4), 1),
    (128, 32, (1, 1, 2), 1),
    (128, 64, (1, 1, 1), 1),
    (128, 64, (1, 1, 2), 1),
    (128, 64, (1, 1, 4), 1),
    (128, 96, (1, 1, 1), 1),
    (128, 128, (1, 1, 1), 1),
    (128, 128, (1, 1, 2), 1),
    (128, 128, (1, 1, 4), 1),
    (128, 128, (2, 1, 1), 1),
    (128, 160, (1, 1, 1), 1),
    (128, 176, (1, 1, 1), 1),
    (128, 192, (1, 1, 1), 1),
    (128, 224, (1, 1, 1), 1),
    (128, 256, (1, 1, 1), 1),
    (128, 256, (2, 1, 1), 1),
    (256, 128, (1, 1, 1), 1),
    (256, 128, (1, 2, 1), 1),
    (256, 160, (1, 2, 1), 1),
    (256, 192, (2, 1, 1), 1),
)
"""(block_m, block_n, cluster, CTAs per SM) of the serving set, chosen by a greedy cover of surveyed shapes (see
``benchmarks/README.md``)."""

_REGISTER_SPLITS = {1: (40, 208), 2: (40, 232), 3: (32, 160)}
"""Registers per thread of producers and of consumers, by the number of consumer warpgroups."""

_MOST_SUMS = 96
"""Sums of a thread where there are three consumers. For 512 threads ptxas counts 128 registers each, although
consumers have more at run time, and refuses a product with more sums."""

F32_ELEMENT = 6.0
"""The cost of a float32 element of D, in 16-bit elements, beyond those that staging buffers hold. Fitted to ten
products of TN with C in place (H100): the choices are 3.8% faster than cuBLASLt, and 2.7% without."""

LARGE_F32 = 1 << 22
"""Elements of a large float32 D. To add to one in place, tiles below 128x128 took 4 to 40% longer."""

_OTHER_REGISTERS = 32
"""Registers of a consumer thread besides sums and words to be stored. Measured with ptxas: with fewer it spills."""


class Sm90HalfGemm(HalfKernel[HalfConfig]):
    """See ``templates/include/half_gemm.cuh`` for the algorithm."""

    name = "sm90_half_gemm"
    archs = (SM90.name,)
    config_class = HalfConfig
    swapped = False
    columns = 16
    """The width of a tile is a multiple of this."""
    most_consumers = 2

    def configs(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """`SERVING`, with as many stages as fit."""
        return self.legal_of((make_config(*chosen, arch=arch) for chosen in SERVING), arch)

    def legal(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """Tiles from 64x16 to 256x128 and 128x256, without clusters or in clusters of two or four, with one or two CTAs
        per SM."""
        choices = itertools.product(CONSUMERS, range(16, 257, 16), CLUSTERS, (1, 2))
        return self.legal_of((make_config(*chosen, arch=arch) for chosen in choices), arch)

    def legal_of(self, configs: Iterable[HalfConfig], arch: ArchSpec) -> Iterator[HalfConfig]:
        """Those of ``configs`` that are legal on ``arch``."""
        return (config for config in configs if self.illegal(config, arch) is None)

    def illegal(self, config: HalfConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if c.block_k != BLOCK_K:
            return f"block_k must be {BLOCK_K}, not {c.block_k}"
        if CONSUMERS.get(c.height) != c.num_consumers or c.num_consumers > self.most_consumers:
            return f"{c.height} rows of sums with {c.num_consumers} consumer warpgroups are not one of {CONSUMERS}"
        if c.width % self.columns or not self.columns <= c.width <= 256:
            return f"the width must be a multiple of {self.columns} from {self.columns} to 256, not {c.width}"
        if (c.cluster_m, c.cluster_n, c.cluster_k) not in CLUSTERS:
            return f"sharing a tile by {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {CLUSTERS}"
        if c.block_n % (16 * c.cluster_k):
            step = 16 * c.cluster_k
            return f"block_n must be a multiple of {step} where K is split over {c.cluster_k} CTAs, not {c.block_n}"
        if c.cluster_m * c.cluster_n > 1 and (c.block_m < 64 or c.block_n < 64):
            return "with small tiles, waiting for the cluster costs more time than sharing loads saves"
        if c.block_m % (8 * c.cluster_n) or c.block_n % (8 * c.cluster_m):
            return "a CTA of a cluster loads whole atoms of the swizzle, which have eight rows"
        needed, has = sums(c) + _OTHER_REGISTERS, _REGISTER_SPLITS[c.num_consumers][1]
        if needed > has:
            return f"{needed} registers a thread are more than {has}"
        if c.num_consumers == 3 and sums(c) > _MOST_SUMS:
            return f"three consumers have at most {_MOST_SUMS} sums a thread, not {sums(c)}"
        if c.num_consumers == 1 and c.width > 128:
            return f"a lone consumer multiplies at most 128 columns: {c.width} would leave it too few registers"
        if c.num_stages < 3:
            return f"{c.num_stages} stages are not three or more"
        if c.ctas_per_sm > 2 or (c.ctas_per_sm == 2 and c.num_consumers > 1):
            return f"{c.ctas_per_sm} CTAs with {c.num_consumers} consumers each leave too few registers a thread"
        shared = config_shared_bytes(c, True)
        if not arch.ctas_fit(shared, c.ctas_per_sm):
            return f"{c.ctas_per_sm} x {shared} bytes of shared memory do not fit on one SM"
        return None

    def runs(self, spec: Spec, config: HalfConfig) -> bool:
        """Also refuses an MN-major operand of which a CTA would load a part that is not whole boxes of 64 rows."""
        if not super().runs(spec, config) or not isinstance(spec, GemmSpec):
            return False
        if spec.b.major == "mn" and config.block_n % (64 * config.cluster_m):
            return False
        return spec.a.major == "k" or config.block_m % (64 * config.cluster_n) == 0

    def worthwhile(self, spec: Spec, config: HalfConfig) -> bool:
        """Whether less than half of the tile is padding. Otherwise a config with half the height is better. To a large
        float32 D only large tiles add. Where `Sm90HalfTurned` has tiles of any height, which K-major A allows, only
        small tiles and split K."""
        if not isinstance(spec, GemmSpec) or padded(spec.m, config) or drifts(spec, config):
            return False
        c = config
        adds_much = spec.accumulate == "in place" and spec.d.dtype == "f32" and spec.m * spec.n >= LARGE_F32
        if adds_much and c.block_m * c.block_n < 128 * 128:
            return False
        return for_small_outputs(config) or not (turns(spec) and spec.a.major == "k")

    def accumulates(self, spec: GemmSpec) -> str:
        """TMA adds to D if C is D and float32."""
        if spec.accumulate == "in place" and spec.d.dtype == "f32" and spec.d.aligned:
            return "reduces"
        return super().accumulates(spec)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of ``sm90_half_gemm.cu.jinja``."""
        p, c = self.of(params)
        majors = p.majors[::-1] if self.swapped else p.majors  # of the operands of wgmma
        return {
            **super().constants(params),
            "swapped": self.swapped,
            "block_n": c.block_n,
            "cluster_m": c.cluster_m,
            "cluster_n": c.cluster_n,
            "buffers": staging_buffers(c, p.output),
            "late": stores_late(c, p.output),
            "min_ctas": c.ctas_per_sm if c.num_consumers > 1 else 2,
            "mn_major_a": p.majors[0] == "m",
            "mma_majors": "".join(f", {int(major == 'm')}" for major in majors),
            "step_a": step(majors[0]),
            "step_b": step(majors[1]),
            "grouping": "kUngrouped",
            "segments": LEAST_SEGMENTS,
            "a_rows": 0,
        }

    def registers(self, config: HalfConfig) -> tuple[int, int]:
        """Depends on the number of consumers."""
        return _REGISTER_SPLITS[config.num_consumers]

    def mma_n(self, config: HalfConfig) -> int:
        """One wgmma has all columns of the tile's sums."""
        return config.width

    def counts(self, config: HalfConfig, output: str, aligned: bool) -> Counts:
        """The store warp stores tiles."""
        return Counts(
            groups=config.num_consumers,
            slices=config.slices,
            width=config.width,
            mma_n=config.width,
            direct=not aligned,
            store_warp=aligned,
            promotion=0.0,
            stored_row=box_columns(config.stored, output) * BYTES[output],
            element=F32_ELEMENT if output == "f32" else 1.0,
            buffered=_buffered(config) if output == "f32" and aligned else 0,
            hides_epilogue=aligned and stores_late(config, output),
        )

    def num_ctas(self, config: HalfConfig, m: int, n: int, num_sms: int) -> int:
        """As many CTAs as can be resident, or fewer if there are fewer tiles, in whole clusters."""
        tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
        slots = max(1, num_sms * config.ctas_per_sm // config.cluster_size)
        clusters = tiles if tiles <= slots else max(1, int(slots * PACKING[config.cluster_size]))
        return clusters * config.cluster_size

    def params(self, spec: Spec, config: HalfConfig, arch: ArchSpec) -> HalfParams:
        """See `Kernel.params`. Takes as many stages as fit beside the output's staging buffers."""
        found = super().params(spec, config, arch)
        return replace(found, config=fitted(config, found.output, arch))

    def has_output_map(self, params: HalfParams) -> bool:
        """Yes, unless elements are stored one by one."""
        return params.store == "tma"

    def output_map(self, params: HalfParams, spec: GemmSpec, stride_d: int, rows: int = 64) -> TensorMapSpec | None:
        """Boxes of ``rows`` rows, swizzled over their own length."""
        _, config = self.of(params)
        size = BYTES[params.output]
        columns = box_columns(config.stored, params.output)
        return TensorMapSpec(params.output, (spec.n, spec.m), (stride_d * size,), (columns, rows), columns * size)

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, staging buffers and barriers, in the layout of ``HalfGemmLayout``, which asserts the same number."""
        p, config = self.of(params)
        return config_shared_bytes(config, p.store == "tma", p.output)

    def entry(self, params: KernelParams) -> str:
        """Such as ``bf16_gemm_nt_128x256_s4_c2x1_tma``, or ``bf16_gemm_nt_turned_136x256_s4_c2x1_tma``."""
        p, c = self.of(params)
        return self.entry_name(
            p,
            "turned" if self.swapped else "",
            f"{c.block_m}x{c.block_n}_s{c.num_stages}",
            f"c{c.cluster_m}x{c.cluster_n}" if c.cluster_m * c.cluster_n > 1 else "",
            f"k{c.cluster_k}" if c.cluster_k > 1 else "",
            f"r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "",
        )

    def cases(self) -> list[KernelParams]:
        """The serving set; each layout, output, way to add C, and store, with plain and tall tiles, clusters, and split
        K; compile-time dimensions."""
        tile, tall, split = make_config(128, 128), make_config(256, 128), make_config(64, 64, (1, 1, 4))
        pair, wide = make_config(128, 256, (2, 1, 1)), make_config(128, 256)
        varied = [
            make_params(tile, majors="km"),
            make_params(wide, majors="mm"),
            make_params(tall, majors="mk"),
            make_params(pair, majors="km"),
            make_params(make_config(256, 128, (1, 2, 1)), majors="mm"),
            make_params(split, majors="mm"),
            make_params(wide, output="f32"),
            make_params(tall, output="f32", accumulate="reduces", majors="mm"),
            make_params(tile, accumulate="reads"),
            make_params(split, output="f32", accumulate="reads"),
            make_params(split, accumulate="reads"),
            make_params(make_config(64, 96, ctas_per_sm=2), output="f32", accumulate="reduces"),
            make_params(wide, dtype="f16", output="f16"),
            make_params(tile, dtype="f16", output="f32", accumulate="reads"),
            make_params(tile, store="direct"),
            make_params(split, store="direct", output="f32"),
            make_params(tall, store="direct", output="f32", accumulate="reads"),
            make_params(make_config(128, 128, (2, 2, 1))),
            make_params(tile, shape=(0, 2112, 7168)),
        ]
        return [*(make_params(config) for config in self.configs(SM90)), *varied]


def step(major: str) -> str:
    """The step of descriptors from one instruction to the next in a stage, by its name in ``warpgroup.cuh``."""
    return "kStepMnMajor" if major == "m" else "kStepKMajor"


def make_config(
    block_m: int,
    block_n: int,
    cluster: tuple[int, int, int] = (1, 1, 1),
    ctas_per_sm: int = 1,
    arch: ArchSpec = SM90,
) -> HalfConfig:
    """A config with as many stages as fit into shared memory beside the staging buffers."""
    return make(HalfConfig, block_m, block_n, cluster, ctas_per_sm, arch)


def make(
    kind: type[Config], block_m: int, block_n: int, cluster: tuple[int, int, int], ctas_per_sm: int, arch: ArchSpec
) -> Config:
    """The same of a class of configs."""
    cluster_m, cluster_n, cluster_k = cluster
    config = kind(
        block_m=block_m,
        block_n=block_n,
        block_k=BLOCK_K,
        num_stages=MAX_STAGES,
        num_consumers=0,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        cluster_k=cluster_k,
        ctas_per_sm=ctas_per_sm,
    )
    return fitted(replace(config, num_consumers=CONSUMERS[config.height]), "bf16", arch)


def fitted(config: Config, output: str, arch: ArchSpec = SM90) -> Config:
    """``config`` with no more stages than fit beside the staging buffers for this output."""
    rest = config_shared_bytes(replace(config, num_stages=0), True, output)
    return replace(config, num_stages=stages_that_fit(arch, config, rest, config.num_stages))


def make_params(config: HalfConfig, **options: object) -> HalfParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: bf16, K-major operands, TMA stores."""
    config = fitted(config, str(options.get("output", "bf16")))
    return HalfParams(kernel=KERNEL.name, arch=SM90.name, config=config, **{"store": "tma", **options})  # type: ignore[arg-type]


def sums(config: HalfConfig) -> int:
    """Registers of a consumer thread that hold sums."""
    return config.slices * config.width // 2


def _buffered(config: HalfConfig) -> int:
    """Elements that the staging buffers for float32 hold."""
    return staging_buffers(config, "f32") * staging_bytes(config, "f32") // BYTES["f32"]


def stores_late(config: HalfConfig, output: str) -> bool:
    """Whether tiles are staged while the next tile's products run: that needs 16-bit elements, no split K, and enough
    registers."""
    registers = sums(config) * 3 // 2 + _OTHER_REGISTERS
    return output != "f32" and config.cluster_k == 1 and registers <= _REGISTER_SPLITS[config.num_consumers][1]


def staging_buffers(config: HalfConfig, output: str) -> int:
    """Staging buffers of a consumer. One if tiles are staged late. Otherwise two, because consumers wait for a free
    buffer; but one where only that leaves room for a fourth stage, and for three consumers, since there are four named
    barriers."""
    if stores_late(config, output) or config.num_consumers == 3:
        return 1
    room = SM90.shared_per_cta - 4 * (operand_bytes(config.block_m) + operand_bytes(config.block_n) + BARRIER_BYTES)
    return 1 if config.cluster_k == 1 and room < 2 * staging_bytes(config, output) <= 2 * room else 2


def staging_bytes(config: HalfConfig, output: str) -> int:
    """Bytes of one staging buffer of each consumer: 64 rows of a box."""
    return config.num_consumers * 64 * box_columns(config.stored, output) * BYTES[output]


def config_shared_bytes(config: HalfConfig, tma_store: bool, output: str = "bf16") -> int:
    """Dynamic shared memory of one CTA: stages, staging buffers of each consumer, and the split-K exchange, in which
    each consumer has two barriers and a slot for the sums of each other split."""
    total = config.num_stages * (operand_bytes(config.block_m) + operand_bytes(config.block_n) + BARRIER_BYTES)
    if tma_store:
        total += staging_buffers(config, output) * staging_bytes(config, output)
    if config.cluster_k > 1:
        slot = config.slices * config.width // config.cluster_k * 256
        total += config.num_consumers * ((config.cluster_k - 1) * slot + BARRIER_BYTES)
    return total


KERNEL = Sm90HalfGemm()
