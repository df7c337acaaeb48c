"""Dense FP8 GEMM for Hopper with operands swapped: weights are the rows (M) of wgmma, tokens the columns (N)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..params import KernelParams, SwappedConfig
from ..spec import GemmSpec, Spec, align
from . import swapped
from .fp8 import FP8Kernel
from .gemm_features import Counts
from .loads import BARRIER_BYTES

SERVING: tuple[tuple[int, int, int, int], ...] = (
    (8, 1, 1, 1),
    (8, 1, 1, 2),
    (8, 1, 2, 1),
    (8, 2, 1, 1),
    (8, 4, 1, 2),
    (8, 8, 1, 1),
    (8, 8, 1, 2),
    (16, 1, 1, 2),
    (16, 1, 2, 1),
    (16, 2, 1, 1),
    (16, 4, 1, 1),
    (16, 8, 1, 2),
    (24, 1, 2, 1),
    (24, 4, 1, 2),
    (24, 8, 1, 2),
    (32, 1, 2, 1),
    (32, 2, 1, 1),
    (32, 4, 1, 2),
    (32, 8, 1, 1),
    (32, 8, 1, 2),
)
"""(block_m, CTAs along k, consumers along k, CTAs per SM) of the serving set, chosen by a greedy cover of surveyed
shapes."""

_OTHER_REGISTERS = 32
_OTHER_REGISTERS_OF_CLUSTERS = 4
"""Registers of a consumer thread besides accumulators and scales, and additional ones in clusters of four or more.
Measured with ptxas: with fewer registers it spills, or moves descriptors in each block."""

_SIZES = sorted({chosen[0] for chosen in SERVING})


class Sm90Fp8Swapped(FP8Kernel[SwappedConfig]):
    """See ``templates/include/fp8_swapped.cuh`` for the algorithm."""

    name = "sm90_fp8_swapped"
    archs = (SM90.name,)
    config_class = SwappedConfig
    label = "swapped "

    def configs(self, arch: ArchSpec) -> Iterator[SwappedConfig]:
        """`SERVING`, with as many stages as fit."""
        for chosen in SERVING:
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[SwappedConfig]:
        """See `swapped.choices`."""
        for chosen in swapped.choices():
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def illegal(self, config: SwappedConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if c.num_partials != 2:
            return f"there is no schedule for {c.num_partials} sets of partial sums"
        if needed_registers(c) > register_split(c)[1]:
            return f"{needed_registers(c)} registers a thread are more than {register_split(c)[1]}"
        return swapped.illegal(c, 128, config_shared_bytes(c, tma_store=True), arch)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of ``sm90_fp8_swapped.cu.jinja``."""
        c = self.config(params)
        return {**super().constants(params), "min_ctas": 2 if c.num_consumers == 1 else c.ctas_per_sm}

    def worthwhile(self, spec: Spec, config: SwappedConfig) -> bool:
        """See `swapped.worthwhile`."""
        return isinstance(spec, GemmSpec) and swapped.worthwhile(spec.m, config.block_m, _SIZES)

    @property
    def has_output_map(self) -> bool:
        """No: D is transposed in shared memory, and then warps copy it, 16 bytes at a time."""
        return False

    def registers(self, config: SwappedConfig) -> tuple[int, int]:
        """See `register_split`."""
        return register_split(config)

    def mma_n(self, config: SwappedConfig) -> int:
        """One wgmma has all tokens of the tile."""
        return config.block_m

    def counts(self, config: SwappedConfig, aligned: bool) -> Counts:
        """Tokens are the columns of wgmma, and the epilogue transposes D."""
        return Counts(
            groups=1,
            slices=1,
            width=config.block_m,
            mma_n=config.block_m,
            direct=not aligned,
            store_warp=False,
            transposed=True,
            consumers_k=config.consumers_k,
        )

    def num_ctas(self, config: SwappedConfig, m: int, n: int, num_sms: int) -> int:
        """See `swapped.num_ctas`."""
        return swapped.num_ctas(config, m, n, num_sms)

    def stores_by_tma(self, params: KernelParams) -> bool:
        """Never."""
        return False

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, staging area, slots and barriers, in the layout of ``Fp8Swapped``, which asserts the same number."""
        return config_shared_bytes(self.config(params), params.store == "tma")

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_swapped_16x64_s12_p2_k4x2_tma``."""
        c = self.config(params)
        return self.entry_name(
            params,
            f"fp8_gemm_swapped_{c.block_m}x{c.block_n}_s{c.num_stages}_p{c.num_partials}",
            f"k{c.cluster_k}x{c.consumers_k}" if c.k_splits > 1 else "",
            f"r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "",
        )

    def cases(self) -> list[KernelParams]:
        """The serving set; the widest tile and direct stores, both without and with split K; compile-time
        dimensions."""
        return (
            [make_params(config) for config in self.configs(SM90)]
            + [make_params(make_config(64)), make_params(make_config(64, 4, 2))]
            + [make_params(make_config(*chosen), store="direct") for chosen in ((64,), (24, 2, 2))]
            + [make_params(make_config(16, 2, 2), shape=(0, 2112, 7168))]
        )


def make_config(
    block_m: int, cluster_k: int = 1, consumers_k: int = 1, ctas_per_sm: int = 1, arch: ArchSpec = SM90
) -> SwappedConfig:
    """A config with two sets of partial sums, and as many stages as fit into shared memory beside the staging area and
    the slots of the split-K exchange."""
    config = SwappedConfig(
        block_m=block_m,
        block_n=swapped.WEIGHTS,
        block_k=128,
        num_stages=0,
        num_consumers=consumers_k,
        cluster_k=cluster_k,
        ctas_per_sm=ctas_per_sm,
        consumers_k=consumers_k,
        num_partials=2,
    )
    budget = min(arch.shared_per_cta, arch.shared_per_sm // ctas_per_sm - arch.shared_reserved_per_cta)
    rest = swapped.staging_bytes(config) + swapped.exchange_bytes(config)
    stages = max(0, min(swapped.MAX_STAGES, (budget - rest) // (stage_bytes(config) + BARRIER_BYTES)))
    return replace(config, num_stages=stages // consumers_k * consumers_k)


def make_params(config: SwappedConfig, store: str = "tma", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of this kernel with ``config``."""
    return KernelParams(kernel=KERNEL.name, arch=SM90.name, config=config, store=store, shape=shape)


def needed_registers(config: SwappedConfig) -> int:
    """Registers of a consumer thread: sums, two sets of partial sums, and the token scales of this and the next
    block."""
    accumulators = config.block_m // 2 + config.num_partials * config.block_m // 2
    others = _OTHER_REGISTERS + (_OTHER_REGISTERS_OF_CLUSTERS if config.cluster_k > 2 else 0)
    return accumulators + 2 * config.block_m // 4 + others


def register_split(config: SwappedConfig) -> tuple[int, int]:
    """(producer, consumer) registers per thread, for setmaxnreg."""
    if config.num_consumers == 1:
        return 40, 216
    return (40, 232) if config.ctas_per_sm == 1 else (32, 104)


def stage_bytes(config: SwappedConfig) -> int:
    """Bytes of one stage: a tile of A, a tile of B, and A's scales, which TMA writes to 128-byte boundaries."""
    return (config.block_m + config.block_n) * config.block_k + align(config.block_m * 4, 128)


def config_shared_bytes(config: SwappedConfig, tma_store: bool) -> int:
    """Dynamic shared memory of one CTA. There is no staging area if elements are stored one by one."""
    stages = config.num_stages * (stage_bytes(config) + BARRIER_BYTES)
    return stages + swapped.exchange_bytes(config) + (swapped.staging_bytes(config) if tma_store else 0)


KERNEL = Sm90Fp8Swapped()
