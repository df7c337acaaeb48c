"""Dense BF16 and FP16 GEMM for Hopper with operands swapped: weights are the rows (M) of wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..params import HalfParams, HalfSwappedConfig, KernelParams
from ..spec import GemmSpec, Operand, Spec
from . import swapped
from .gemm_features import Counts
from .half import BLOCK_K, HalfKernel, operand_bytes, stages_that_fit
from .loads import BARRIER_BYTES
from .sm90_half_gemm import step

SERVING: tuple[tuple[int, int, int, int], ...] = (
    (8, 1, 1, 1),
    (8, 1, 1, 2),
    (8, 1, 2, 2),
    (8, 4, 1, 2),
    (8, 8, 1, 1),
    (8, 8, 1, 2),
    (16, 1, 1, 2),
    (16, 1, 2, 1),
    (16, 4, 1, 1),
    (16, 8, 1, 2),
    (24, 1, 2, 1),
    (24, 8, 1, 1),
    (32, 1, 1, 1),
    (32, 4, 1, 2),
    (32, 8, 1, 1),
    (64, 1, 1, 1),
    (64, 4, 1, 1),
    (64, 8, 1, 1),
)
"""(block_m, CTAs along k, consumers along k, CTAs per SM) of the serving set, chosen by a greedy cover of surveyed
shapes (see ``benchmarks/README.md``)."""

_SIZES = sorted({chosen[0] for chosen in SERVING})


class Sm90HalfSwapped(HalfKernel[HalfSwappedConfig]):
    """See ``templates/include/half_swapped.cuh`` for the algorithm."""

    name = "sm90_half_swapped"
    archs = (SM90.name,)
    config_class = HalfSwappedConfig
    label = "swapped "

    def configs(self, arch: ArchSpec) -> Iterator[HalfSwappedConfig]:
        """`SERVING`, with as many stages as fit."""
        for chosen in SERVING:
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[HalfSwappedConfig]:
        """See `swapped.choices`."""
        for chosen in swapped.choices():
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def illegal(self, config: HalfSwappedConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        return swapped.illegal(config, BLOCK_K, config_shared_bytes(config, staged=True), arch)

    def refuses_majors(self, a: Operand, b: Operand) -> str | None:
        """A must be K-major, because TMA loads boxes of few rows."""
        return None if a.major == "k" else "A must be K-major, as few rows of it are loaded at a time"

    def worthwhile(self, spec: Spec, config: HalfSwappedConfig) -> bool:
        """See `swapped.worthwhile`."""
        return (
            isinstance(spec, GemmSpec)
            and spec.m <= swapped.MOST_TOKENS
            and swapped.worthwhile(spec.m, config.block_m, _SIZES)
        )

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of ``sm90_half_swapped.cu.jinja``. Weights are the first operand of wgmma."""
        p, c = self.of(params)
        return {
            **super().constants(params),
            "min_ctas": 2 if c.num_consumers == 1 else c.ctas_per_sm,
            "mma_majors": f", {int(p.majors[1] == 'm')}, 0",
            "step_a": step(p.majors[1]),
            "step_b": step("k"),
        }

    def registers(self, config: HalfSwappedConfig) -> tuple[int, int]:
        """The sums of 64 tokens take 32 registers."""
        if config.num_consumers == 1:
            return 40, 208
        return (40, 232) if config.ctas_per_sm == 1 else (32, 104)

    def mma_n(self, config: HalfSwappedConfig) -> int:
        """One wgmma has all tokens of the tile."""
        return config.block_m

    def counts(self, config: HalfSwappedConfig, output: str, aligned: bool) -> Counts:
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
            promotion=0.0,
        )

    def num_ctas(self, config: HalfSwappedConfig, m: int, n: int, num_sms: int) -> int:
        """See `swapped.num_ctas`."""
        return swapped.num_ctas(config, m, n, num_sms)

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, staging area, slots and barriers, in the layout of ``HalfSwappedLayout``, which asserts the same
        number."""
        p, config = self.of(params)
        return config_shared_bytes(config, p.store == "tma" and p.output != "f32")

    def entry(self, params: KernelParams) -> str:
        """Such as ``bf16_gemm_nt_swapped_16x64_s12_k4x2_tma``."""
        p, c = self.of(params)
        return self.entry_name(
            p,
            f"swapped_{c.block_m}x{c.block_n}_s{c.num_stages}",
            f"k{c.cluster_k}x{c.consumers_k}" if c.k_splits > 1 else "",
            f"r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "",
        )

    def cases(self) -> list[KernelParams]:
        """The serving set; each layout, output, way to add C, and store, with plain tiles, K split over CTAs, and K
        split over consumers; compile-time dimensions."""
        plain, split, shared = make_config(64), make_config(16, 4), make_config(8, 1, 2)
        varied = [
            make_params(plain, majors="km"),
            make_params(split, majors="km", output="f32"),
            make_params(plain, output="f32", accumulate="reads"),
            make_params(split, accumulate="reads"),
            make_params(shared, output="f32"),
            make_params(shared, store="direct", accumulate="reads"),
            make_params(make_config(24, 2, 2), store="direct"),
            make_params(split, dtype="f16", output="f16"),
            make_params(plain, dtype="f16", output="f32"),
            make_params(make_config(16, 2, 2), shape=(0, 2112, 7168)),
        ]
        return [*(make_params(config) for config in self.configs(SM90)), *varied]


def make_config(
    block_m: int, cluster_k: int = 1, consumers_k: int = 1, ctas_per_sm: int = 1, arch: ArchSpec = SM90
) -> HalfSwappedConfig:
    """A config with as many stages as fit into shared memory beside the staging area and the slots of the split-K
    exchange."""
    config = HalfSwappedConfig(
        block_m=block_m,
        block_n=swapped.WEIGHTS,
        block_k=BLOCK_K,
        num_stages=0,
        num_consumers=consumers_k,
        cluster_k=cluster_k,
        ctas_per_sm=ctas_per_sm,
        consumers_k=consumers_k,
    )
    stages = stages_that_fit(arch, config, config_shared_bytes(config, staged=True), swapped.MAX_STAGES)
    return replace(config, num_stages=stages // consumers_k * consumers_k)


def make_params(config: HalfSwappedConfig, **options: object) -> HalfParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: bf16, K-major operands, and stores of 16
    bytes."""
    return HalfParams(kernel=KERNEL.name, arch=SM90.name, config=config, **{"store": "tma", **options})  # type: ignore[arg-type]


def config_shared_bytes(config: HalfSwappedConfig, staged: bool) -> int:
    """Dynamic shared memory of one CTA: stages, a staging area for each consumer if tiles are staged, and the split-K
    exchange, in which each consumer has two barriers and a slot for the sums of each other split."""
    total = config.num_stages * (operand_bytes(config.block_m) + operand_bytes(config.block_n) + BARRIER_BYTES)
    return total + swapped.exchange_bytes(config) + (swapped.staging_bytes(config) if staged else 0)


KERNEL = Sm90HalfSwapped()
