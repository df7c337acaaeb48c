"""The selector: every legal config of the kernel, ranked by the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..kernels.sm90_fp8_gemm import KERNEL
from ..params import FP8Config, GemmProblem
from .model import Estimate, estimate


@dataclass(frozen=True)
class Choice:
    """A config and what the model expects of it."""

    config: FP8Config
    estimate: Estimate


def rank(problem: GemmProblem, arch: ArchSpec) -> list[Choice]:
    """Every legal config for ``problem``, the fastest by the model first; ties go to the smaller tile.

    Raises:
        UnsupportedError: no config is legal, because of ``block_multiple`` or too few SMs for a cluster.
    """
    choices = [
        Choice(config, estimate(problem, config, arch)) for config in _candidates(arch) if _fits(config, problem)
    ]
    if not choices:
        raise UnsupportedError(
            f"No tile has block_m and block_n that are multiples of {problem.block_multiple}. "
            "Relax set_block_size_multiple_of."
        )
    choices.sort(key=lambda choice: (choice.estimate.total_us, choice.config.block_m * choice.config.block_n))
    return choices


def select(problem: GemmProblem, arch: ArchSpec) -> Choice:
    """The first of `rank`."""
    return rank(problem, arch)[0]


@functools.cache
def _candidates(arch: ArchSpec) -> tuple[FP8Config, ...]:
    return tuple(KERNEL.configs(arch))


def _fits(config: FP8Config, problem: GemmProblem) -> bool:
    multiple_m, multiple_n = problem.block_multiple
    multiples = config.block_m % multiple_m == 0 and config.block_n % multiple_n == 0
    alone = problem.whole_gpu or config.ctas_per_sm == 1
    return multiples and alone and config.cluster_size <= problem.num_sms
