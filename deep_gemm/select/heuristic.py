"""The selector: ranks every config that the families offer for a spec by the model.

Neighbouring M share a choice (`representative`): so all kernels that any M can need are known, and serving, where M
keeps changing, ranks rarely. What the constants were measured by: docs/measurements/rules.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from .. import kernels
from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..kernels.features import ctas
from ..params import GemmConfig
from ..records import record
from ..spec import GemmSpec, ceil_div
from .calibration import Calibration, default
from .model import Estimate, estimate, features, parts, speed
from .power import KNOWN_BYTES, sustained_us


@record(frozen=True)
class Choice:
    config: GemmConfig
    spec: GemmSpec
    calibration: Calibration
    measured_us: float = 0.0
    """Its time where it was measured, by the tuner; 0 where it was not."""

    @functools.cached_property
    def estimate(self) -> Estimate:
        """The model's estimate. Computed when asked for, since ranking needs only one number of each config."""
        known = self.calibration
        return estimate(self.spec, self.config, speed(self.spec, self.config.family, known), known.arch)

    @functools.cached_property
    def sustained_us(self) -> float:
        """The time of one launch among many back to back, if power is the limit (see `power`)."""
        x = features(self.spec, self.config, self.calibration.arch)
        return sustained_us(self.spec, self.config, x, self.calibration.power)


SOME_TOKENS = 512
"""M above this is prefill or training, where many launches follow one another."""

EXACT_TOKENS = 16
"""M up to 16 is not bucketed."""

FEW_TOKENS = 64
"""M up to this is a decoder's."""

SUSTAINED_FLOPS, PREFILL_FLOPS = 1e10, 2e9
"""FLOPs from which power limits launches that follow one another. For M above `SOME_TOKENS` the limit is lower, since
prefill and training launch thousands in a row."""
SUSTAINED_PART = 0.9
"""Where power is the limit, configs are ranked by a smooth maximum of two times: that of a single call without its
launch, which overlaps with other launches, and this fraction of the time limited by power."""
SHARPNESS = 6
"""The exponent of that maximum."""

STREAMED_K = 9000
"""From this K on a launch of few rows is long enough for `partly_full` to matter."""

PARTLY_FULL, PARTLY_FULL_POWER = (0.5, 0.9), 0.2
"""Fractions of the places for CTAs between which `partly_full` counts, and its exponent."""


def representative(m: int) -> int:
    """The M that ``m`` is ranked as: rounded up to a multiple of 8 and, above 512, to one of 32 steps between two
    powers of two. Rounding rarely changes the number of tiles, and never for multiples of 256 up to 16384."""
    if m <= EXACT_TOKENS:
        return m
    step = max(8, 1 << (m - 1).bit_length() >> 6)
    return ceil_div(m, step) * step


def least(m: int) -> int:
    """The least M with the `representative` of ``m``."""
    return m if m <= EXACT_TOKENS else representative(m) - max(8, 1 << (m - 1).bit_length() >> 6) + 1


def representatives(max_m: int) -> list[int]:
    """All M that 1..``max_m`` are ranked as, in rising order; the last may be above ``max_m``."""
    found = [0]
    while found[-1] < max_m:
        found.append(representative(found[-1] + 1))
    return found[1:]


def sustains(spec: GemmSpec) -> bool:
    """Whether power can limit such launches if they follow one another."""
    return spec.flops >= (PREFILL_FLOPS if spec.m > SOME_TOKENS else SUSTAINED_FLOPS)


def streams(spec: GemmSpec) -> bool:
    """Whether a product has few rows and long K, so that `partly_full` matters."""
    return spec.m <= 2 * FEW_TOKENS and spec.k >= STREAMED_K and spec.grouping == "none"


def partly_full(spec: GemmSpec, config: GemmConfig) -> float:
    """A factor of the time of one launch, for launches that follow one another, as in a decoder's graph. If CTAs take
    more than half of the places, but not all, only some CTAs of the next launch start at once. The factor is between
    what was measured in a row and alone, since a choice serves both."""
    places = spec.num_sms * config.ctas_per_sm
    taken = ctas(spec, config)
    least, most = PARTLY_FULL
    return (places / taken) ** PARTLY_FULL_POWER if least < taken / places < most else 1.0


def ranked_as(spec: GemmSpec) -> GemmSpec:
    """M is its `representative`. Of masked groups only the rows that are expected count."""
    if spec.grouping != "masked":
        return replace(spec, m=representative(spec.m))
    rows = representative(min(spec.expected_m or spec.m, spec.m))
    return replace(spec, m=rows, expected_m=rows)


def rank(spec: GemmSpec, arch: ArchSpec, calibration: Calibration | None = None) -> list[Choice]:
    """The `candidates` for ``spec``, the fastest by the model first; ties go to the smaller tile. If power can be the
    limit, the time back to back counts too (`SUSTAINED_PART`). ``calibration`` defaults to an H200's. Estimates are for
    the spec that `ranked_as` gives.

    Raises:
        UnsupportedError: no family supports ``spec``, or none within ``block_multiple`` and the number of SMs.
    """
    return list(_rank(ranked_as(spec), arch, calibration or default()))


@functools.lru_cache(maxsize=256)
def _rank(spec: GemmSpec, arch: ArchSpec, calibration: Calibration) -> tuple[Choice, ...]:
    return tuple(order(spec, candidates(spec, arch), calibration))


def order(
    spec: GemmSpec,
    configs: list[GemmConfig],
    calibration: Calibration,
    measured: Mapping[GemmConfig, float] | None = None,
) -> list[Choice]:
    """``configs``, each of which must be able to run ``spec``, the fastest by the model first. ``measured`` are times
    of single calls, in us, to use in place of the model's."""
    if not configs:
        return []
    names = {config.family for config in configs}
    features_of = {name: kernels.gemm_family(name).features for name in names}
    speed_of = {name: speed(spec, name, calibration) for name in names}
    sustained, streamed, target = sustains(spec), streams(spec), calibration.arch

    def key(config: GemmConfig) -> tuple[float, int]:
        x, known = features_of[config.family](spec, config, target), speed_of[config.family]
        us = parts(x, known)["total"] if measured is None else measured[config]
        if sustained and x.element_bytes == KNOWN_BYTES:
            drawn = SUSTAINED_PART * sustained_us(spec, config, x, calibration.power)
            us = (max(0.0, us - known.launch_us) ** SHARPNESS + drawn**SHARPNESS) ** (1 / SHARPNESS)
        if streamed:
            us *= partly_full(spec, config)
        return us, config.block_m * config.block_n

    return [Choice(config, spec, calibration) for config in sorted(configs, key=key)]


def select(spec: GemmSpec, arch: ArchSpec, calibration: Calibration | None = None) -> Choice:
    return rank(spec, arch, calibration)[0]


def candidates(spec: GemmSpec, arch: ArchSpec) -> list[GemmConfig]:
    """The configs of the serving set that can run ``spec``. Raises UnsupportedError if there is none."""
    able = [(family, family.fitting(spec, family.configs_for(spec, arch))) for family in kernels.for_spec(spec, arch)]
    if not any(configs for _, configs in able):
        raise UnsupportedError(
            f"No tile has block_m and block_n that are multiples of {spec.block_multiple} and runs on {spec.num_sms} "
            "SMs. Relax set_block_size_multiple_of or set_num_sms."
        )
    found = [config for family, configs in able for config in family.offered(spec, configs)]
    return found or [config for _, configs in able for config in configs]


def legal(
    spec: GemmSpec, arch: ArchSpec, wanted: Callable[[GemmConfig], bool] = lambda config: True
) -> list[GemmConfig]:
    """Every legal config that can run ``spec``, fast or slow, and that is ``wanted``: for surveys and tuners."""
    families = kernels.for_spec(spec, arch)
    return [config for family in families for config in family.fitting(spec, filter(wanted, family.legal(arch)))]
