"""How long a config takes: a roofline of one persistent GEMM.

Every resource has a time of its own: the tensor cores of the SM, which co-resident CTAs share; a consumer's chain of
multiply and promote; the latency of loads, which stages hide; the way from L2 into an SM; the L2 as a whole; and HBM.
They overlap, but not perfectly: together they take a smooth maximum (a p-norm) of all. Before them come the launch and
the first stage, after them the epilogue of the last tile. `Features` are counts, and `Speed` has the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import kernels
from ..kernels.features import Features
from ..params import KernelConfig
from ..spec import Spec
from .calibration import Speed


@dataclass(frozen=True)
class Estimate:
    """Predicted time of a launch and what it is made of, in us. ``bound`` names the largest part."""

    total_us: float
    launch_us: float
    tensor_us: float
    chain_us: float
    loads_us: float
    l2_us: float
    hbm_us: float
    epilogue_us: float
    waves: int
    bound: str


def parts(x: Features, c: Speed, maximum: Callable[[Any, Any], Any] = max) -> dict[str, Any]:
    """The times of what a launch is made of, in us, and their ``total``. Of one pair, or of many: then ``x`` holds
    arrays or tensors, and ``maximum`` is theirs."""
    us = x.steps * (1e-3 / c.clock_ghz)  # of a cycle of each block
    tensor = x.tensor * c.tensor
    own = tensor * x.consumers_k / x.consumers
    hidden = maximum(own, x.promotion + c.chain_cycles)
    chain = (hidden + (1 - x.ahead) * (own + x.promotion + c.chain_cycles - hidden)) / x.consumers_k
    # A row of a block that begins inside a line of 128 bytes takes more of them.
    lines = 1 + c.unaligned * x.unaligned
    loads = maximum(
        c.load_cycles / x.stages, x.resident * (x.filled / c.fill_bytes_per_cycle + x.crowded * c.crowded_cycles)
    )
    first = x.first / (c.start_gb_per_s * 1e3)
    found = {
        "tensor": x.resident * tensor * us,
        "chain": chain * us,
        "loads": loads * us,
        "l2": x.handed_out * lines / (c.l2_gb_per_s * 1e3),
        "hbm": x.traffic / (c.hbm_gb_per_s * 1e3),
    }
    largest = maximum(
        found["tensor"], maximum(found["chain"], maximum(found["loads"], maximum(found["l2"], found["hbm"])))
    )
    body = largest * sum((time / largest) ** c.overlap for time in found.values()) ** (1 / c.overlap)
    # The next tile is multiplied while one is stored, but for the last; CTAs that share an SM share its way out.
    seen = x.waves - (x.waves - 1) * c.epilogue_hidden
    epilogue = seen * (c.epilogue_us + x.resident * x.elements / c.elements_per_us)
    # Nothing hides an exchange: all shares of a tile wait for the last.
    epilogue = epilogue + x.waves * (x.shares * c.exchange_us + x.handed / c.handed_per_us)
    launch = c.launch_us + x.prologue_us + x.consumers * c.consumer_us + x.store_warp * c.store_warp_us
    launch = launch + x.cluster * c.cluster_us
    found["hbm"] = found["hbm"] + first
    return {"launch": launch, **found, "epilogue": epilogue, "total": launch + first + body + epilogue}


def features(spec: Spec, config: KernelConfig) -> Features:
    """What ``config``'s family counts."""
    return kernels.of(config).features(spec, config)


def estimate(spec: Spec, config: KernelConfig, speed: Speed) -> Estimate:
    """The time of ``spec`` with ``config``, including the launch."""
    x = features(spec, config)
    times = parts(x, speed)
    total = times.pop("total")
    return Estimate(
        total_us=total,
        **{f"{name}_us": time for name, time in times.items()},
        waves=int(x.waves),
        bound=max(times, key=lambda name: times[name]),
    )
