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
        "shape_m": params.shape[0],
        "shape_n": params.shape[1],
        "shape_k": params.shape[2],
        "tma_store": params.store == "tma",
        "mma_name": "Mma",
        "mma_n": mma_n,
    }


def turns(config: FP8Config) -> int:
    """Consumers that start their products in turn, or 1. Left alone they promote at the same time, and the tensor cores
    idle: at M = N = 4096, K = 7168 on an H200, order took 128x192 from 215 to 190 us, 192x128 from 206 to 195, 256x128
    from 172.4 to 170.8. Products issued ahead lost by it."""
    return config.num_consumers if config.num_partials == config.k_shares == 1 else 1
