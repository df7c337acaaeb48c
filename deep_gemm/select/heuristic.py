"""The selector: every config that families offer for a spec, ranked by the model.

Neighbouring numbers of tokens share a choice (`representative`), so that all kernels which any number can ask for are
known, and so that serving with ever new numbers of tokens ranks little.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from .. import kernels
from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..params import GemmConfig
from ..spec import GemmSpec, ceil_div
from .calibration import Calibration, default
from .model import Estimate, estimate, features, parts
from .power import sustained_us


@dataclass(frozen=True)
class Choice:
    """A config for a spec."""

    config: GemmConfig
    spec: GemmSpec
    calibration: Calibration

    @functools.cached_property
    def estimate(self) -> Estimate:
        """What the model expects of it: worked out when asked for, since ranking needs one number of each."""
        return estimate(self.spec, self.config, self.calibration.speed)

    @functools.cached_property
    def sustained_us(self) -> float:
        """How long it takes among many launches back to back, if power is what limits them (see `power`)."""
        return sustained_us(self.spec, self.config, features(self.spec, self.config), self.calibration.power)


SOME_TOKENS = 512
"""More are prefill or training, which make many launches in a row."""

EXACT_TOKENS = 16
"""M up to 16 is not bucketed."""


SUSTAINED_FLOPS, PREFILL_FLOPS = 1e10, 2e9
"""FLOPs from which power is the limit of launches one after the other: 1000 x 2112 x 7168 took 29.8 us alone and 31.8
back to back in one config, 28.8 and 30.8 in another (H200). With more tokens than `SOME_TOKENS`, of which prefill and
training make thousands in a row, fewer count: 1000 x 576 x 7168 took 12.9 us back to back with 64x80 tiles and 11.4
with 64x96, which draw less."""
SUSTAINED_PART = 0.9
"""Of these, configs are ranked by a smooth maximum of their time alone, but for the launch, which others hide, and of
this part of what they take where power is the limit. Of shapes timed back to back in up to ten configs, choices are
0.991 of the best for 29 of 15 GFLOP and more (0.980 without regard to power), 0.983 for 15 smaller ones (0.970), and
0.994 for 22 others in up to five configs (0.981). Timed alone, over 200 surveyed shapes of 10 GFLOP and more, 0.975
with and 0.977 without."""
SHARPNESS = 6


def representative(m: int) -> int:
    """The number of tokens as which ``m`` are ranked: ``m`` rounded up to a multiple of 8, and past 512 of the power of
    two that makes 32 steps to the next power of two. Rounding changes few counts of tiles, and none for multiples of
    256 up to 16384."""
    if m <= EXACT_TOKENS:
        return m
    step = max(8, 1 << (m - 1).bit_length() >> 6)
    return ceil_div(m, step) * step


def representatives(max_m: int) -> list[int]:
    """What 1..``max_m`` tokens are ranked as, in rising order: the last may be above ``max_m``."""
    found = [0]
    while found[-1] < max_m:
        found.append(representative(found[-1] + 1))
    return found[1:]


def sustains(spec: GemmSpec) -> bool:
    """Whether power can be the limit of such launches, one after the other."""
    return spec.flops >= (PREFILL_FLOPS if spec.m > SOME_TOKENS else SUSTAINED_FLOPS)


def rank(spec: GemmSpec, arch: ArchSpec, calibration: Calibration | None = None) -> list[Choice]:
    """Every config that `candidates` names for ``spec``, the fastest by the model first; ties go to the smaller tile.
    Where power can be the limit, what they take back to back counts too (`SUSTAINED_PART`). ``calibration`` is an
    H200's if it is None. Estimates are of the `representative` number of tokens.

    Raises:
        UnsupportedError: no family can do it, or none within ``block_multiple`` and the number of SMs.
    """
    return list(_rank(replace(spec, m=representative(spec.m)), arch, calibration or default()))


@functools.lru_cache(maxsize=256)
def _rank(spec: GemmSpec, arch: ArchSpec, calibration: Calibration) -> tuple[Choice, ...]:
    return tuple(order(spec, candidates(spec, arch), calibration))


def order(spec: GemmSpec, configs: list[GemmConfig], calibration: Calibration) -> list[Choice]:
    """``configs``, all of which can run ``spec``, the fastest by the model first."""
    speed, sustained = calibration.speed, sustains(spec)

    def key(config: GemmConfig) -> tuple[float, int]:
        x = features(spec, config)
        us = parts(x, speed)["total"]
        if sustained:
            drawn = SUSTAINED_PART * sustained_us(spec, config, x, calibration.power)
            us = (max(0.0, us - speed.launch_us) ** SHARPNESS + drawn**SHARPNESS) ** (1 / SHARPNESS)
        return us, config.block_m * config.block_n

    return [Choice(config, spec, calibration) for config in sorted(configs, key=key)]


def select(spec: GemmSpec, arch: ArchSpec, calibration: Calibration | None = None) -> Choice:
    """The first of `rank`."""
    return rank(spec, arch, calibration)[0]


def candidates(spec: GemmSpec, arch: ArchSpec) -> list[GemmConfig]:
    """The configs of the serving set that can run ``spec``. Raises UnsupportedError if there is none."""
    found = [
        (kernel.worthwhile(spec, config), config)
        for kernel in kernels.for_spec(spec)
        for config in _serving(kernel.name, arch)
        if kernel.runs(spec, config)
    ]
    if not found:
        raise UnsupportedError(
            f"No tile has block_m and block_n that are multiples of {spec.block_multiple} and runs on {spec.num_sms} "
            "SMs. Relax set_block_size_multiple_of or set_num_sms."
        )
    return [config for worthwhile, config in found if worthwhile] or [config for _, config in found]


@functools.cache
def _serving(kernel: str, arch: ArchSpec) -> tuple[GemmConfig, ...]:
    return tuple(kernels.get(kernel).configs(arch))


def legal(spec: GemmSpec, arch: ArchSpec) -> list[GemmConfig]:
    """Every legal config that can run ``spec``, however slowly: for surveys and tuners."""
    return [config for kernel in kernels.for_spec(spec) for config in kernel.legal(arch) if kernel.runs(spec, config)]
