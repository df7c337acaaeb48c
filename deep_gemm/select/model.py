"""How long a config takes: an analytic model of one persistent GEMM.

A CTA's time for a block of K is what its slowest resource needs: the tensor cores of the SM, which co-resident CTAs
share; shared memory, which operands are read from and tiles are written to; the way from L2; the producer's issue; or
the consumer's own chain of multiply and promote. An SM does its tiles one after the other, with an epilogue a tile. The
whole cannot be faster than HBM, nor than the L2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import kernels
from ..kernels.features import Features
from ..params import KernelConfig
from ..spec import Spec
from .calibration import Calibration


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


class Costs(NamedTuple):
    """What of a launch's time is a config's alone, whatever the problem: cycles of a block of K, and us."""

    tensor: Any
    chain: Any
    waiting: Any
    """Of the chain, of loads in turn, and of their issue, as the smooth maximum takes them."""
    per_element: Any
    handing: Any
    per_handed: Any
    launch: Any


def costs(x: Features, c: Calibration, maximum: Callable[[Any, Any], Any] = max) -> Costs:
    """The costs of the config that ``x`` is of. Of one, or of many: then ``x`` holds arrays or tensors, and ``maximum``
    is theirs."""
    instruction = maximum(x.half_width, c.instruction_cycles)
    # Tensor cores at work draw the power that lowers the clock: their cycles are longer.
    own = x.products * instruction
    tensor = x.groups * own * (c.clock_ghz / c.tensor_ghz)
    scale = x.columns * c.promote_cycles
    promote = scale + x.token_scales * c.token_cycles
    chain = x.ahead * maximum(own, promote + c.ahead_cycles) + (1 - x.ahead) * (own + promote + c.chain_cycles)
    chain = chain / x.consumers_k
    # Not all of promotion hides, whatever the schedule, and less of it where consumers promote at the same time.
    exposed = x.groups * scale * (c.exposed + x.in_step * c.in_step)
    refill = c.load_cycles / x.stages
    issue = c.issue_cycles * x.boxes
    by_tma = x.narrow**c.narrow_store / c.epilogue_elements_per_us
    per_element = x.direct / c.direct_elements_per_us + (1 - x.direct) * by_tma
    launch = c.launch_us + (1 - x.transposed) * c.upright_us + x.stages * c.stage_us + x.store_warp * c.store_warp_us
    launch = launch + x.consumers * c.consumer_us
    return Costs(
        tensor=tensor + exposed + x.in_parts * c.parts_cycles,
        chain=chain,
        waiting=chain**4 + refill**4 + issue**4,
        per_element=per_element + x.transposed / c.transposed_elements_per_us,
        handing=x.local_shares * c.local_us + x.cluster_shares * c.exchange_us,
        per_handed=(1 - x.cluster_shares) / c.handed_per_us + x.cluster_shares / c.exchanged_per_us,
        launch=launch + x.cluster_2 * c.cluster_2_us + x.cluster_4 * c.cluster_4_us + x.cluster_8 * c.cluster_8_us,
    )


def parts(
    x: Features, c: Calibration, maximum: Callable[[Any, Any], Any] = max, known: Costs | None = None
) -> dict[str, Any]:
    """The times of what a launch is made of, in us, and their ``total``; one or many, as in `costs`. ``known`` are the
    config's costs, if the caller has them."""
    of = costs(x, c, maximum) if known is None else known
    shared = (x.read + x.scales_read + x.filled) / c.shared_bytes_per_cycle
    # A row of a block that begins inside a line of 128 bytes takes two.
    lines = 1 + (c.unaligned - 1) * x.unaligned + c.torn * x.torn
    row = lines * c.line_cycles + x.hanging * c.hanging_cycles
    asked = x.asked * row + x.crowded * c.crowded_cycles
    fill = maximum(x.filled / c.fill_bytes_per_cycle, asked)
    busy = x.resident * maximum(maximum(of.tensor, shared), fill)
    # Near the limit of one resource the others still cost: a smooth maximum.
    cycles = (busy**4 + of.waiting) ** 0.25
    steps = x.steps * 1e-3 / c.clock_ghz
    handing = of.handing + x.handed * of.per_handed
    # The next tile is multiplied while one is stored, but for the last; CTAs that share an SM share its way out.
    seen = x.waves - (x.waves - 1) * c.epilogue_hidden
    epilogue = seen * (c.epilogue_us + x.resident * x.elements * of.per_element + handing)
    hbm = (x.traffic + x.weights_again * c.again) / (c.hbm_gb_per_s * 1e3)
    # SMs that ask for the same line at a time share an answer.
    handed_out = x.tokens_read * x.tokens_sharers**-c.l2_sharing + x.weights_read * x.weights_sharers**-c.l2_sharing
    l2 = handed_out * lines / (c.l2_gb_per_s * 1e3)
    # Loads and work on chip overlap, but not perfectly, and not before there is something to work on.
    first = x.first / (c.start_gb_per_s * 1e3)
    body = first + ((cycles * steps) ** 4 + hbm**4 + l2**4) ** 0.25
    # Who exchanges sums waits for the slowest CTA of its cluster.
    body = body * (1 + x.cluster_shares * c.skew)
    return {
        "launch": of.launch,
        "tensor": busy * steps,
        "chain": of.chain * steps,
        "shared": x.resident * maximum(shared, fill) * steps,
        "l2": l2,
        "hbm": first + hbm,
        "epilogue": epilogue,
        "total": of.launch + body + epilogue,
    }


def features(spec: Spec, config: KernelConfig) -> Features:
    """What ``config``'s family counts."""
    return kernels.of(config).features(spec, config)


def estimate(spec: Spec, config: KernelConfig, calibration: Calibration) -> Estimate:
    """The time of ``spec`` with ``config``, including the launch."""
    x = features(spec, config)
    times = parts(x, calibration)
    total = times.pop("total")
    return Estimate(
        total_us=total,
        **{f"{name}_us": time for name, time in times.items()},
        waves=int(x.waves),
        bound=max(times, key=lambda name: times[name]),
    )
