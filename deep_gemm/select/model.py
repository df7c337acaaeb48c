"""The time of a GEMM with a config, by a roofline model.

Each resource has its time: the tensor cores of an SM, which co-resident CTAs share; a consumer's chain of multiply and
promote, or what else its warps need the SM for; the latency of loads, which stages hide; the path from L2 into an SM;
the whole L2; and HBM. They overlap, but not perfectly: together they take a smooth maximum (a p-norm) of their times.
The launch and the first stage come before, the epilogue of the last tile after them. `Features` holds counts, `Speed`
the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import kernels
from ..arch import DEFAULT
from ..kernels.features import Features
from ..params import GemmConfig
from ..records import record
from ..spec import GemmSpec
from .calibration import Calibration, Speed


@record(frozen=True)
class Estimate:
    """The predicted time of a launch and its parts, in us. ``bound`` names the largest part."""

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
    """The times of the parts of a launch, in us, and their ``total``: for one spec and config, or for many at once, if
    ``x`` holds arrays or tensors and ``maximum`` is their elementwise maximum."""
    us = x.steps * (1e-3 / c.clock_ghz)  # us of one cycle in each block of K
    tensor = x.tensor * c.tensor
    own = tensor * x.consumers_k / x.consumers
    hidden = maximum(own, x.promotion + c.chain_cycles)
    chain = (hidden + (1 - x.ahead) * (own + x.promotion + c.chain_cycles - hidden)) / x.consumers_k
    # A row that begins inside a line of 128 bytes touches one line more.
    lines = 1 + c.unaligned * x.unaligned
    loads = maximum(
        c.load_cycles / x.stages, x.resident * (x.filled / c.fill_bytes_per_cycle + x.crowded * c.crowded_cycles)
    )
    first = x.first / (c.start_gb_per_s * 1e3)
    chain = maximum(chain, x.resident * x.issue)
    tensor, chain, loads = x.resident * tensor * us, chain * us, loads * us
    l2, hbm = x.from_l2 * lines / (c.l2_gb_per_s * 1e3), x.traffic / (c.hbm_gb_per_s * 1e3)
    most, p = maximum(tensor, maximum(chain, maximum(loads, maximum(l2, hbm)))), c.overlap
    powers = (tensor / most) ** p + (chain / most) ** p + (loads / most) ** p + (l2 / most) ** p + (hbm / most) ** p
    body = most * powers ** (1 / p)
    # Most kernels store each tile but the last while the next is multiplied. CTAs on one SM share its path out.
    seen = x.waves - (x.waves - 1) * c.epilogue_hidden * x.hides_epilogue
    epilogue = seen * (c.epilogue_us + x.resident * x.elements / c.elements_per_us)
    # Nothing hides a split-K exchange: all parts of a tile wait for the last one.
    epilogue = epilogue + x.waves * (x.exchanges * c.exchange_us + x.exchanged / c.exchanged_per_us)
    launch = c.launch_us + x.prologue_us + x.consumers * c.consumer_us + x.store_warp * c.store_warp_us
    launch = launch + x.cluster * c.cluster_us
    return {
        "launch": launch,
        "tensor": tensor,
        "chain": chain,
        "loads": loads,
        "l2": l2,
        "hbm": hbm + first,
        "epilogue": epilogue,
        "total": launch + first + body + epilogue,
    }


def speed(spec: GemmSpec, family: str, calibration: Calibration) -> Speed:
    """The constants of speed by which configs of ``family`` are estimated for ``spec``."""
    return calibration.named(kernels.gemm_family(family).speeds(spec))


def features(spec: GemmSpec, config: GemmConfig, arch: str = DEFAULT.name) -> Features:
    """The counts of ``config`` on the target ``arch``, by its family."""
    return kernels.gemm_family(config.family).features(spec, config, arch)


def estimate(spec: GemmSpec, config: GemmConfig, speed: Speed, arch: str = DEFAULT.name) -> Estimate:
    """The predicted time of ``spec`` with ``config`` on the target ``arch``, launch included."""
    x = features(spec, config, arch)
    times = parts(x, speed)
    total = times.pop("total")
    return Estimate(
        total_us=total,
        **{f"{name}_us": time for name, time in times.items()},
        waves=int(x.waves),
        bound=max(times, key=lambda name: times[name]),
    )
