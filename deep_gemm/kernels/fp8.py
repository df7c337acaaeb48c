"""What the FP8 kernel families have in common."""

from __future__ import annotations

from ..params import FP8Config, KernelParams

BARRIER_BYTES = 16
"""A full and an empty mbarrier."""


def fields(
    params: KernelParams, config: FP8Config, mma_n: int, registers: tuple[int, int]
) -> dict[str, str | int | bool]:
    """Constants of both templates: the tile, registers of (producer, consumer), and a wgmma of ``mma_n`` columns."""
    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "num_stages": config.num_stages,
        "num_consumers": config.num_consumers,
        "num_threads": config.num_threads,
        "cluster_k": config.cluster_k,
        "consumers_k": config.consumers_k,
        "num_partials": config.num_partials,
        "turns": turns(config),
        "producer_registers": registers[0],
        "consumer_registers": registers[1],
        **shape_fields(params),
        "tma_store": params.store == "tma",
        "mma_name": "Mma",
        "mma_n": mma_n,
    }


def shape_fields(params: KernelParams) -> dict[str, int]:
    """Constants of all templates: dimensions that are compiled in, 0 for the others."""
    return {f"shape_{letter}": size for letter, size in zip("mnk", params.shape, strict=True)}


def compiled_dims(params: KernelParams) -> list[str]:
    """Parts of a kernel's name that tell dimensions which are compiled in, such as ``n2112``."""
    return [f"{letter}{size}" for letter, size in zip("mnk", params.shape, strict=True) if size]


def turns(config: FP8Config) -> int:
    """Consumers that start their products in turn, or 1. Left alone they promote at the same time, and the tensor cores
    idle: at M = N = 4096, K = 7168 on an H200, order took 128x192 from 215 to 190 us, 192x128 from 206 to 195, 256x128
    from 172.4 to 170.8. Products issued ahead lost by it."""
    return config.num_consumers if config.num_partials == config.k_shares == 1 else 1
