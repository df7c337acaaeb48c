"""How long a config takes: an analytic model of one persistent FP8 GEMM.

A CTA's time for a block of K is what its slowest resource needs: the tensor cores of the SM, which co-resident CTAs
share; shared memory, which operands are read from and tiles are written to; or the consumer's own chain of multiply and
promote. An SM does its tiles one after the other, with a pipeline fill at the start and an epilogue a tile. The whole
cannot be faster than HBM, nor than the tensor cores at the clock that power allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arch import ArchSpec
from ..kernels.sm90_fp8_gemm import instruction_shape
from ..params import SCALE_BLOCK, FP8Config, GemmProblem, ceil_div


@dataclass(frozen=True)
class Calibration:
    """Constants of one GPU model. Times in us, rates as named; fitted to measured times, see `H200`."""

    clock_ghz: float
    """SM clock in short runs."""
    launch_us: float
    """An empty launch as timed, plus the way to the first load."""
    fill_us: float
    """From the first load of a CTA to its first product."""
    epilogue_us: float
    """A tile's fixed cost: drain, staging, barriers."""
    epilogue_elements_per_us: float
    """Output elements a CTA converts and stores in a microsecond."""
    cluster_us: float
    """What launching and ending CTAs together costs."""
    reduce_us: float
    """Handing over shares of K: barriers of a cluster."""
    instruction_cycles: float
    """Fixed cost of a wgmma beside its columns; it hides under wide ones."""
    chain_cycles: float
    """Latency of one K block in a consumer: wait, issue, drain."""
    promote_cycles: float
    """Promotion of one column of an m64 slice, per consumer."""
    overlap_loss: float
    """Part of the promotion that other consumers do not hide."""
    ahead_cycles: float
    """The same where products are issued ahead, so that only issue and promotion are in the chain."""
    straddle: float
    """Promotion in tiles that touch two scale blocks costs this much more."""
    shared_bytes_per_cycle: float
    """Shared memory of an SM: operands that wgmma reads, and tiles that TMA writes."""
    fill_bytes_per_cycle: float
    """From L2 into one SM."""
    load_cycles: float
    """From asking for a stage to having it."""
    hbm_gb_per_s: float
    l2_gb_per_s: float
    """From L2 into all SMs together."""
    peak_tflops: float
    """What power allows over a whole GEMM."""


H200 = Calibration(
    clock_ghz=1.755,
    launch_us=4.19,
    fill_us=0.2657,
    epilogue_us=0.7147,
    epilogue_elements_per_us=21080.0,
    cluster_us=2.133,
    reduce_us=1.158,
    instruction_cycles=39.22,
    chain_cycles=5.0,
    promote_cycles=1.654,
    overlap_loss=0.02,
    ahead_cycles=179.7,
    straddle=1.753,
    shared_bytes_per_cycle=148.1,
    fill_bytes_per_cycle=74.05,
    load_cycles=3000.0,
    hbm_gb_per_s=4800.0,
    l2_gb_per_s=11920.0,
    peak_tflops=2100.0,
)
"""Fitted by differential evolution to 392 shapes timed in flush mode on an NVIDIA H200 on 2026-11-21, log-uniform ones
and DeepSeek-V3's, three quarters of them: what counts is the time of the config that is selected, and then the estimate
itself. The selected config runs at 0.975 of the best by geometric mean, on the quarter that was held out as on the
rest, and at 0.86 at worst. The constants stand together: the clock, for one, is a mean over short and power-limited
runs."""


@dataclass(frozen=True)
class Estimate:
    """Predicted time of a launch and what it is made of, in us. ``bound`` names the largest part."""

    total_us: float
    launch_us: float
    tensor_us: float
    chain_us: float
    shared_us: float
    l2_us: float
    hbm_us: float
    epilogue_us: float
    waves: int
    bound: str


_PACKING = {1: 1.0, 2: 1.0, 4: 0.9}
"""Share of an H200's SMs that clusters of a size can fill: a cluster lives in one GPC, whose SMs are not all a multiple
of four. Inferred: 32 clusters of four took 1.4 times as long as fewer should."""


def estimate(problem: GemmProblem, config: FP8Config, arch: ArchSpec, c: Calibration = H200) -> Estimate:
    """The time of ``problem`` with ``config``, including the launch."""
    tiles = ceil_div(problem.m, config.block_m * config.cluster_m) * ceil_div(
        problem.n, config.block_n * config.cluster_n
    )
    tiles *= config.cluster_size
    slots = max(1, int(_PACKING[config.cluster_size] * problem.num_sms * config.ctas_per_sm / config.cluster_size))
    slots *= config.cluster_size
    waves = ceil_div(tiles, slots)
    resident = min(config.ctas_per_sm, ceil_div(tiles, problem.num_sms))
    blocks = ceil_div(ceil_div(problem.k, SCALE_BLOCK), config.cluster_k)
    consumers = config.num_consumers // config.consumers_k  # that multiply the same block

    slices, mma_n = instruction_shape(config)
    products = slices * config.block_n // mma_n * 4  # instructions a consumer issues for a block of K
    instruction = max(mma_n / 2.0, c.instruction_cycles)
    tensor = consumers * products * instruction
    rows = min(config.block_m, problem.m) if config.cluster_n == 1 else config.block_m
    filled = (rows + config.block_n) * config.block_k
    read = consumers * products * (64 + mma_n) * 32
    shared = (read + filled) / c.shared_bytes_per_cycle
    fill = filled / c.fill_bytes_per_cycle
    columns = slices * config.block_n
    straddle = 1.0 if 128 % config.block_n == 0 or config.block_n == 256 else c.straddle
    promote = columns * c.promote_cycles * straddle
    if config.num_partials > 1:
        chain = max(tensor / consumers, promote + c.ahead_cycles)
        busy = resident * max(tensor, shared, fill)
    else:
        chain = tensor / consumers + promote + c.chain_cycles
        # Promotion that the other consumers' products do not cover.
        others = (config.num_consumers * resident - 1) / (config.num_consumers * resident)
        busy = resident * max(tensor + c.overlap_loss * promote / max(others, 0.25), shared, fill)
    chain /= config.consumers_k
    # A ring of few stages cannot hide the latency of its loads.
    refill = c.load_cycles / config.num_stages
    # Near the limit of one resource the others still cost: a smooth maximum.
    block_cycles = (busy**8 + chain**8 + refill**8) ** 0.125
    cycle_us = 1e-3 / c.clock_ghz
    steps = waves * blocks * cycle_us
    epilogue = waves * (c.epilogue_us + config.block_m * config.block_n / c.epilogue_elements_per_us)
    traffic = problem.m * problem.k + problem.n * problem.k + 2 * problem.m * problem.n
    hbm = traffic / (c.hbm_gb_per_s * 1e3)
    if config.k_shares > 1:
        handed = (config.k_shares - 1) * min(problem.m, config.block_m) * config.block_n
        epilogue += waves * (c.reduce_us + handed / c.epilogue_elements_per_us)
    l2 = tiles * blocks * (rows / config.cluster_n + config.block_n / config.cluster_m) * config.block_k
    l2 /= c.l2_gb_per_s * 1e3
    power = 2.0 * tiles * config.block_m * config.block_n * blocks * SCALE_BLOCK / (c.peak_tflops * 1e6)
    on_chip = block_cycles * steps
    # Loads of HBM and work on chip overlap, but not perfectly: a smooth maximum.
    body = (on_chip**4 + hbm**4 + l2**4 + power**4) ** 0.25
    launch = c.launch_us + c.fill_us + (c.cluster_us if config.cluster_size > 1 else 0.0)
    total = launch + body + epilogue
    parts = {
        "launch": launch,
        "tensor": max(busy * steps, power),
        "chain": chain * steps,
        "shared": resident * max(shared, fill) * steps,
        "l2": l2,
        "hbm": hbm,
        "epilogue": epilogue,
    }
    return Estimate(
        total_us=total,
        launch_us=launch,
        tensor_us=parts["tensor"],
        chain_us=parts["chain"],
        shared_us=parts["shared"],
        l2_us=l2,
        hbm_us=hbm,
        epilogue_us=epilogue,
        waves=waves,
        bound=max(parts, key=lambda name: parts[name]),
    )
