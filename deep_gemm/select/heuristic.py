"""The selector: every legal config of the kernel, ranked by the model.

Neighbouring numbers of tokens share a choice (`representative`), so that all kernels which any number can ask for are
known, and so that serving with ever new numbers of tokens ranks little.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..kernels import sm90_fp8_gemm, sm90_fp8_small, sm90_fp8_swapped
from ..kernels.sm90_fp8_launch import num_ctas
from ..kernels.sm90_fp8_swapped import TOKENS
from ..kernels.stream_k import stream
from ..params import SCALE_BLOCK, FP8Config, GemmProblem, SmallConfig, SwappedConfig, ceil_div
from .calibration import SOME_TOKENS, Calibration, Calibrations, default
from .features import features
from .model import Costs, Estimate, costs, estimate, parts
from .power import Power, sustained_us


@dataclass(frozen=True)
class Choice:
    """A config for a problem."""

    config: FP8Config
    problem: GemmProblem
    calibration: Calibration
    power: Power

    @functools.cached_property
    def estimate(self) -> Estimate:
        """What the model expects of it: worked out when asked for, since ranking needs one number of each."""
        return estimate(self.problem, self.config, self.calibration)

    @functools.cached_property
    def sustained_us(self) -> float:
        """How long it takes among many launches back to back, if power is what limits them (see `power`)."""
        return sustained_us(self.problem, self.config, features(self.problem, self.config), self.power)


EXACT_TOKENS = 16
"""Up to so many, each number is ranked for itself."""


SUSTAINED_FLOPS, PREFILL_FLOPS = 1e10, 2e9
"""Launches of so many, one after the other, meet the limit of an H200's power: 1000 x 2112 x 7168 took 29.8 us alone
and 31.8 back to back in one config, 28.8 and 30.8 in another. With more tokens than `SOME_TOKENS`, of which prefill and
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


def sustains(problem: GemmProblem) -> bool:
    """Whether power can be the limit of such launches, one after the other."""
    return problem.flops >= (PREFILL_FLOPS if problem.m > SOME_TOKENS else SUSTAINED_FLOPS)


def rank(problem: GemmProblem, arch: ArchSpec, calibration: Calibrations | None = None) -> list[Choice]:
    """Every config that `candidates` names for ``problem``, the fastest by the model first; ties go to the smaller
    tile. Where power can be the limit, what they take back to back counts too (`SUSTAINED_PART`). ``calibration`` is an
    H200's if it is None. Estimates are of the `representative` number of tokens.

    Raises:
        UnsupportedError: there is none, because of ``block_multiple``.
    """
    return list(_rank(replace(problem, m=representative(problem.m)), arch, calibration or default()))


@functools.lru_cache(maxsize=256)
def _rank(problem: GemmProblem, arch: ArchSpec, calibration: Calibrations) -> tuple[Choice, ...]:
    constants = calibration.of(problem.m)
    found = candidates(problem, arch)
    if not found:
        raise UnsupportedError(
            f"No tile has block_m and block_n that are multiples of {problem.block_multiple}. "
            "Relax set_block_size_multiple_of."
        )
    known = _known(constants, problem.d_tma)
    sustained = sustains(problem)

    def order(config: FP8Config) -> tuple[float, int]:
        x = features(problem, config)
        of = known.get(config)
        if of is None:
            of = known[config] = costs(x, constants)
        us = parts(x, constants, known=of)["total"]
        if sustained:
            drawn = SUSTAINED_PART * sustained_us(problem, config, x, calibration.power)
            us = (max(0.0, us - constants.launch_us) ** SHARPNESS + drawn**SHARPNESS) ** (1 / SHARPNESS)
        return us, config.block_m * config.block_n

    found.sort(key=order)
    return tuple(Choice(config, problem, constants, calibration.power) for config in found)


@functools.lru_cache(maxsize=16)
def _known(calibration: Calibration, d_tma: bool) -> dict[FP8Config, Costs]:
    """What configs cost, of those that were ranked before."""
    return {}


def select(problem: GemmProblem, arch: ArchSpec, calibration: Calibrations | None = None) -> Choice:
    """The first of `rank`."""
    return rank(problem, arch, calibration)[0]


def candidates(problem: GemmProblem, arch: ArchSpec) -> list[FP8Config]:
    """The legal configs that are worth an estimate."""
    found = legal(problem, arch)
    return [config for config in found if _worthwhile(config, problem)] or found


def legal(problem: GemmProblem, arch: ArchSpec) -> list[FP8Config]:
    """The configs that can run ``problem``, however slowly."""
    multiple_m, multiple_n = problem.block_multiple
    whole, blocks = problem.k % SCALE_BLOCK == 0, ceil_div(problem.k, SCALE_BLOCK)
    whole_pieces = not (problem.d_tma and problem.n % 8)
    return [
        config
        for config in _known_to(arch)
        if config.block_m % multiple_m == 0
        and config.block_n % multiple_n == 0
        and config.cluster_size <= problem.num_sms
        # On part of a GPU, CTAs that are meant to share an SM would be spread over others.
        and (problem.whole_gpu or config.ctas_per_sm == 1)
        # CTAs of one tile take turns where there are more than can run.
        and (config.persistent or _in_one_wave(config, problem))
        # Those without a ring have stages for all of K; the others copy eight columns of D at a time.
        and (config.persistent or (blocks <= config.num_stages if isinstance(config, SmallConfig) else whole_pieces))
        # Blocks of K that follow each other in a stage are a dimension of their own, which only whole ones make.
        and (whole or config.stage_blocks == 1)
    ]


def _in_one_wave(config: FP8Config, problem: GemmProblem) -> bool:
    return num_ctas(config, problem.m, problem.n, problem.num_sms) <= problem.num_sms * config.ctas_per_sm


_LITTLE_PADDING = 1.15
_MAX_DONORS = 8


def _worthwhile(config: FP8Config, problem: GemmProblem) -> bool:
    """Whether the model need not look at ``config`` to know that another is better."""
    m = problem.m
    if config.stream_k:
        dealt = stream(config, m, problem.n, problem.k, problem.num_sms)
        return m > 64 and config.block_m <= 2 * m and 0 < dealt.donors <= _MAX_DONORS
    if not isinstance(config, SwappedConfig):
        return config.block_m <= max(64, 2 * m)  # else half of the tile is padding, and there is one of half its height
    return config.block_m in _token_tiles(m) and (
        m <= 64 or not (config.block_n < 64 or (m > 1024 and config.k_shares > 1))
    )


@functools.lru_cache(maxsize=256)
def _token_tiles(m: int) -> frozenset[int]:
    """Heights of swapped tiles: few tokens have one that just holds them; more are cut up, to leave little over."""
    if m <= 64:
        return frozenset([min(size for size in TOKENS if size >= m)])
    rows = {size: ceil_div(m, size) * size for size in TOKENS if size >= 48}
    return frozenset(size for size in rows if rows[size] <= min(rows.values()) * _LITTLE_PADDING)


@functools.cache
def _known_to(arch: ArchSpec) -> tuple[FP8Config, ...]:
    families = (sm90_fp8_gemm.KERNEL, sm90_fp8_swapped.KERNEL, sm90_fp8_small.KERNEL)
    return tuple(config for family in families for config in family.configs(arch))
