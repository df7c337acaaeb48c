"""A D of FP8 in one launch, or in two: a product with a float32 D, and the cast of that.

An FP8 D needs all columns of a scale in one CTA, so that tiles are wide, and K is not split over CTAs. With few rows
most SMs have no tile then. What the constants were measured by: docs/measurements/rules.md.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..arch import ArchSpec
from ..kernels.epilogues import apart
from ..records import record
from ..spec import SCALE_BLOCK, GemmSpec, Spec
from .calibration import Calibration, default
from .heuristic import FEW_TOKENS, least, ranked_as, select
from .model import speed

LAUNCH_US = 2.0
"""The time of the second launch, without that of moving the bytes of the cast."""

GAIN_OF_FEW, GAIN = 1.1, 1.2
"""Two launches are chosen if one takes this many times as long, by the model: for at most `FEW_TOKENS` rows, and for
more. With more rows the ratio varies with the rounds of tiles, and a layer should change its number of launches at one
M only."""


@record(frozen=True)
class Casting:
    """How an FP8 D is made: the times of both ways by the model, in us, and the ``launches`` that are chosen."""

    one_us: float
    two_us: float
    launches: int


def casting(spec: GemmSpec, arch: ArchSpec, calibration: Calibration | None = None) -> Casting:
    """How ``spec``, which `apart` divides, is computed. Measured times are not used, so that precompilation finds what
    calls choose. M is rounded as in the choice of a config. Raises UnsupportedError."""
    return _casting(ranked_as(spec), arch, calibration or default())


@functools.lru_cache(maxsize=1024)
def _casting(spec: GemmSpec, arch: ArchSpec, calibration: Calibration) -> Casting:
    one = select(spec, arch, calibration).estimate.total_us
    product, cast = apart(spec)  # type: ignore[misc]
    chosen = select(product, arch, calibration)
    two = chosen.estimate.total_us + LAUNCH_US
    moved = cast.rows * cast.columns * (4 + 1 + 4 / SCALE_BLOCK)  # sums, bytes, and scales
    two += moved / (speed(product, chosen.config.family, calibration).hbm_gb_per_s * 1e3)
    return Casting(one, two, 2 if one >= two * (GAIN_OF_FEW if spec.m <= FEW_TOKENS else GAIN) else 1)


def all_launches(spec: GemmSpec, arch: ArchSpec, calibration: Calibration) -> tuple[Spec, ...]:
    """The specs of the launches for every M that is ranked as that of ``spec``, one for each kernel. The tile of a cast
    depends on M itself, so the least M has a spec too. Raises UnsupportedError."""
    both = apart(spec)
    if both is None or casting(spec, arch, calibration).launches == 1:
        return (spec,)
    return (*both, replace(both[1], rows=least(spec.m)))
