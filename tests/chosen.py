"""The two families of FP8 GEMMs with scales of blocks, and their configs by a few fields."""

from __future__ import annotations

from typing import Any

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.kernels import sm90_fp8_gemm, sm90_fp8_swapped
from deep_gemm.kernels.base import Kernel
from deep_gemm.params import FP8Config, KernelParams

PLAIN, SWAPPED = sm90_fp8_gemm.KERNEL, sm90_fp8_swapped.KERNEL
FAMILIES: tuple[Kernel[Any], ...] = (PLAIN, SWAPPED)
"""The GEMMs."""


def find_config(kernel: Kernel[Any] = PLAIN, **fields: int) -> FP8Config:
    """The first legal config of ``kernel`` with these fields. Other fields default to those of a plain config: no
    cluster, no split of K, one CTA on an SM."""
    alone = {"cluster_m": 1, "cluster_n": 1, "cluster_k": 1, "consumers_k": 1, "ctas_per_sm": 1, "persistent": True}
    wanted = {**alone, **fields}
    for config in kernel.legal(SM90):
        if all(getattr(config, name, alone.get(name)) == value for name, value in wanted.items()):
            return config
    raise LookupError(f"no legal config has {wanted}")


def make_params(config: FP8Config, store: str = "tma", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of ``config`` in its own family."""
    return KernelParams(kernel=kernels.of(config).name, arch=SM90.name, config=config, store=store, shape=shape)
