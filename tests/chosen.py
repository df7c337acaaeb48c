"""Configs and binaries of the GEMM families by a few fields."""

from typing import Any

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.kernels.families import FP8_GEMM, FP8_SWAPPED
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.params import GemmConfig, KernelParams

PLAIN, SWAPPED = FP8_GEMM, FP8_SWAPPED
FAMILIES = (PLAIN, SWAPPED)
"""The families of FP8 with 1x128 by 128x128 scales and bf16 output."""


def find_config(family: GemmFamily = PLAIN, **fields: int) -> GemmConfig:
    """The first legal config of ``family`` with these fields. Other fields default to those of a plain config: no
    cluster, no split of K, one CTA on an SM."""
    alone = {"cluster_m": 1, "cluster_n": 1, "cluster_k": 1, "consumers_k": 1, "ctas_per_sm": 1, "in_turn": 1}
    alone["persistent"] = True
    wanted = {**alone, **fields}
    for config in family.legal(SM90):
        if all(getattr(config, name) == value for name, value in wanted.items()):
            return config
    raise LookupError(f"no legal config has {wanted}")


def make_params(config: GemmConfig, store: str = "tma", **options: Any) -> KernelParams:
    """The identity of ``config`` in its own family."""
    return kernels.gemm_family(config.family).case(config, store=store, **options)


def case(family: GemmFamily, *tile: Any, **options: Any) -> KernelParams:
    """The identity of a binary of ``family``: arguments of its `config`, and options of its `case`."""
    return family.case(family.config(*tile), **options)


def kernel_name(params: KernelParams) -> str:
    """The kernel's name."""
    return kernels.get(params.kernel).kernel_name(params)


def argument_names(params: KernelParams) -> list[str]:
    """The kernel's parameters, in order."""
    return [argument.name for argument in kernels.get(params.kernel).arguments(params)]
