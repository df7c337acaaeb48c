"""The FP8 GEMM with any scaling but 1D1D, with operands swapped: weights on the tensor cores' rows, tokens on their
columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..params import KernelParams, ScaledParams, ScaledSwappedConfig
from ..spec import GemmSpec, Spec, align
from . import swapped
from .gemm_features import Counts
from .loads import BARRIER_BYTES
from .scaled import PROMOTION, ScaledKernel, scaling_of
from .sm90_fp8_swapped import needed_registers, register_split

SERVING: tuple[tuple[int, int, int, int], ...] = (
    (8, 1, 1, 2),
    (8, 4, 1, 2),
    (8, 8, 1, 1),
    (16, 1, 1, 2),
    (16, 4, 1, 1),
    (16, 8, 1, 2),
    (32, 2, 1, 1),
    (32, 4, 1, 2),
    (32, 8, 1, 2),
    (64, 1, 1, 1),
    (64, 4, 1, 1),
)
"""(block_m, CTAs along k, consumers along k, CTAs on an SM) of the serving set: evenly spaced sizes, which were
not chosen by measurements."""

_SIZES = sorted({chosen[0] for chosen in SERVING})


class Sm90Fp8ScaledSwapped(ScaledKernel[ScaledSwappedConfig]):
    """See ``templates/include/fp8_scaled_swapped.cuh`` for the algorithm."""

    name = "sm90_fp8_scaled_swapped"
    archs = (SM90.name,)
    config_class = ScaledSwappedConfig
    label = "any swapped "

    def refuses(self, spec: Spec) -> str | None:
        """Also refuses 1D1D: a token's scale and a weight's would both change with each block of K."""
        if why := super().refuses(spec):
            return why
        assert isinstance(spec, GemmSpec)  # checked above
        return "it has no 1D1D scaling" if scaling_of(spec) == "1d1d" else None

    def configs(self, arch: ArchSpec) -> Iterator[ScaledSwappedConfig]:
        """`SERVING`, with as many stages as fit."""
        for chosen in SERVING:
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[ScaledSwappedConfig]:
        """See `swapped.choices`."""
        for chosen in swapped.choices():
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def illegal(self, config: ScaledSwappedConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        if config.num_partials != 2:
            return f"there is no schedule for {config.num_partials} sets of partial sums"
        if needed_registers(config) > register_split(config)[1]:
            return f"{needed_registers(config)} registers a thread are more than {register_split(config)[1]}"
        return swapped.illegal(config, 128, config_shared_bytes(config, "1d2d", staged=True), arch)

    def worthwhile(self, spec: Spec, config: ScaledSwappedConfig) -> bool:
        """See `swapped.worthwhile`."""
        return isinstance(spec, GemmSpec) and swapped.worthwhile(spec.m, config.block_m, _SIZES)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of ``sm90_fp8_scaled_swapped.cu.jinja``."""
        _, c = self.of(params)
        min_ctas = 2 if c.num_consumers == 1 else c.ctas_per_sm
        return {**super().constants(params), "cluster_k": c.cluster_k, "min_ctas": min_ctas}

    def registers(self, config: ScaledSwappedConfig) -> tuple[int, int]:
        """See `register_split`."""
        return register_split(config)

    def mma_n(self, config: ScaledSwappedConfig) -> int:
        """One wgmma has all tokens of the tile."""
        return config.block_m

    def counts(self, config: ScaledSwappedConfig, aligned: bool, scaling: str) -> Counts:
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
            promotion=PROMOTION[scaling],
        )

    def num_ctas(self, config: ScaledSwappedConfig, m: int, n: int, num_sms: int) -> int:
        """See `swapped.num_ctas`."""
        return swapped.num_ctas(config, m, n, num_sms)

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, staging area, slots, scales and barriers, in the layout of ``Fp8ScaledSwappedLayout``, which asserts
        the same number."""
        p, config = self.of(params)
        return config_shared_bytes(config, p.scaling, p.store == "tma" and p.output != "f32")

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_rowwise_bf16_swapped_16x64_s12_k4x1_tma``."""
        p, c = self.of(params)
        return self.entry_name(
            p,
            f"swapped_{c.block_m}x{c.block_n}_s{c.num_stages}",
            f"k{c.cluster_k}x{c.consumers_k}" if c.k_splits > 1 else "",
            f"r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "",
        )

    def cases(self) -> list[KernelParams]:
        """The serving set with scales of rows; each scaling, output, way to add C, and store, with plain tiles and with
        split K; compile-time dimensions."""
        plain, split, shared = make_config(64), make_config(16, 4), make_config(8, 1, 2)
        return [
            *(make_params(config) for config in self.configs(SM90)),
            make_params(plain, scaling="1d2d", output="f32"),
            make_params(split, scaling="1d2d", output="f32", accumulate="reads"),
            make_params(shared, scaling="1d2d", accumulate="reads"),
            make_params(split, output="f32"),
            make_params(shared, output="f16"),
            make_params(shared, store="direct", accumulate="reads"),
            make_params(make_config(24, 2, 2), store="direct"),
            make_params(make_config(16, 2, 2), shape=(0, 2112, 7168)),
        ]


def make_config(
    block_m: int, cluster_k: int = 1, consumers_k: int = 1, ctas_per_sm: int = 1, arch: ArchSpec = SM90
) -> ScaledSwappedConfig:
    """A config with two sets of partial sums, and with as many stages as fit into shared memory."""
    config = ScaledSwappedConfig(
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
    none, one = (config_shared_bytes(replace(config, num_stages=x), "1d2d", staged=True) for x in (0, 1))
    stages = max(0, min(swapped.MAX_STAGES, (budget - none) // (one - none)))
    return replace(config, num_stages=stages // consumers_k * consumers_k)


def make_params(config: ScaledSwappedConfig, **options: object) -> ScaledParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: scales of rows, bf16 output, and stores of
    16 bytes."""
    known = {"store": "tma", "scaling": "rowwise", "output": "bf16", **options}
    return ScaledParams(kernel=KERNEL.name, arch=SM90.name, config=config, **known)  # type: ignore[arg-type]


def config_shared_bytes(config: ScaledSwappedConfig, scaling: str, staged: bool) -> int:
    """Dynamic shared memory of one CTA: stages with the tokens' scales, a staging area where 16-bit tiles are staged,
    and the split-K exchange."""
    stage = (config.block_m + config.block_n) * config.block_k + BARRIER_BYTES
    stage += align(config.block_m * 4, 128) if scaling == "1d2d" else 0
    total = config.num_stages * stage + swapped.exchange_bytes(config)
    return total + (swapped.staging_bytes(config) if staged else 0)


KERNEL = Sm90Fp8ScaledSwapped()
