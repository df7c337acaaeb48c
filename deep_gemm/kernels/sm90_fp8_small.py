"""Dense FP8 GEMM for Hopper where most of the time is the launch: threads copy operands, without tensor maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..params import KernelParams, SmallConfig
from . import fp8
from .base import Kernel

_BLOCK_M = 64
_BLOCK_N = (16, 32, 64)
_SHARES = (2, 4)

_MOST_STAGES = 8
"""Blocks of K of a share. Longer K is better left to kernels whose producers do not stand in consumers' way."""


class Sm90Fp8Small(Kernel[SmallConfig]):
    """See ``templates/include/fp8_small.cuh`` for the algorithm."""

    name = "sm90_fp8_small"
    archs = (SM90.name,)
    config_class = SmallConfig
    mma_instruction = "QGMMA"

    def configs(self, arch: ArchSpec) -> Iterator[SmallConfig]:
        """64 tokens by 16 to 64 weights, K in two or four shares; always with as many blocks of K as fit."""
        for block_n in _BLOCK_N:
            for shares in _SHARES:
                config = SmallConfig(
                    block_m=_BLOCK_M,
                    block_n=block_n,
                    block_k=128,
                    num_stages=0,
                    num_consumers=shares,
                    consumers_k=shares,
                )
                config = self._deepest(config, arch)
                if self.illegal(config, arch) is None:
                    yield config

    def _deepest(self, config: SmallConfig, arch: ArchSpec) -> SmallConfig:
        """``config`` with as many stages as fit into shared memory beside the sums."""
        stages = (arch.shared_per_cta - sums_bytes(config)) // (stage_bytes(config) * config.consumers_k)
        return replace(config, num_stages=min(_MOST_STAGES, stages) * config.consumers_k)

    def illegal(self, config: SmallConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if (c.scale_n, c.scale_k, c.block_k) != (128, 128, 128):
            return f"block_k, scale_n and scale_k must be 128, not {c.block_k}, {c.scale_n} and {c.scale_k}"
        if c.block_m != _BLOCK_M or c.block_n not in _BLOCK_N:
            return f"a tile of {c.block_m} x {c.block_n} is not {_BLOCK_M} by one of {_BLOCK_N}"
        if c.cluster_size > 1 or c.ctas_per_sm > 1:
            return "CTAs are alone on an SM, and in no cluster: what these are for has few tiles"
        if c.consumers_k not in _SHARES or c.num_consumers != c.consumers_k:
            return f"{c.num_consumers} warpgroups, {c.consumers_k} along K, are not as many of both, one of {_SHARES}"
        if c.stream_k or c.persistent:
            return "a CTA has one tile here, and all of its K"
        if c.num_partials != 1:
            return f"there is one set of partial sums, not {c.num_partials}: other warpgroups multiply meanwhile"
        each, left = divmod(c.num_stages, c.consumers_k)
        if left or not 1 <= each <= _MOST_STAGES:
            return f"{c.num_stages} stages are not 1 to {_MOST_STAGES} for each of {c.consumers_k} warpgroups"
        shared = config_shared_bytes(c)
        if not arch.ctas_fit(shared, 1):
            return f"{shared} bytes of shared memory do not fit on one SM"
        return None

    def fields(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``sm90_fp8_small.cu.jinja``."""
        c = _config(params)
        return {
            "name": self.entry(params),
            "block_n": c.block_n,
            "shares": c.consumers_k,
            "share_stages": c.num_stages // c.consumers_k,
            "num_threads": c.num_threads,
            **fp8.shape_fields(params),
            "whole_rows": params.store == "tma",
            "shared_bytes": self.shared_bytes(params),
            "mma_name": "Mma",
            "mma_n": c.block_n,
        }

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, scales and sums, as ``Fp8Small`` lays them out (it asserts the same number)."""
        return config_shared_bytes(_config(params))

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_small_64x16_s16_k2_tma``."""
        c = _config(params)
        parts = [f"fp8_gemm_small_{c.block_m}x{c.block_n}", f"s{c.num_stages}", f"k{c.consumers_k}", params.store]
        parts += fp8.compiled_dims(params)
        return "_".join(parts)

    def cases(self) -> list[KernelParams]:
        """Every config; direct stores of one; compile-time dimensions."""
        every = list(self.configs(SM90))
        return (
            [make_params(c) for c in every]
            + [make_params(every[1], store="direct")]
            + [make_params(every[1], shape=(0, 512, 384))]
        )


def make_params(config: SmallConfig, store: str = "tma", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of this kernel with ``config``."""
    return KernelParams(kernel=KERNEL.name, arch=SM90.name, config=config, store=store, shape=shape)


def stage_bytes(config: SmallConfig) -> int:
    """One stage: a tile of A, a tile of B, A's scales, and one of B in 16 bytes."""
    return (config.block_m + config.block_n) * config.block_k + config.block_m * 4 + 16


def sums_bytes(config: SmallConfig) -> int:
    """The sums of all shares, in rows of eight columns more than there are."""
    return config.consumers_k * config.block_m * (config.block_n + 8) * 4


def config_shared_bytes(config: SmallConfig) -> int:
    """Dynamic shared memory of one CTA."""
    return config.num_stages * stage_bytes(config) + sums_bytes(config)


def _config(params: KernelParams) -> SmallConfig:
    if not isinstance(params.config, SmallConfig):
        raise TypeError(f"{params.kernel} takes a SmallConfig, not {type(params.config).__name__}")
    return params.config


KERNEL = Sm90Fp8Small()
