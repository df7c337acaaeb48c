"""Process-wide options that callers set through functions: number of SMs, programmatic dependent launch, block sizes,
batch invariance.

Plans depend on them, so every change calls the listeners, which drop plans and remembered calls. Batch invariance is
the exception: plans and remembered calls of both positions are kept side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .arch import DEFAULT, device_sms
from .errors import InvalidInputError
from .listeners import Listeners
from .settings import settings

if TYPE_CHECKING:
    from .params import GemmConfig


@dataclass
class _Options:
    num_sms: int | None = None
    tc_util: int = 100
    pdl: bool = True
    ignore_compile_dims: bool = False
    block_multiple: tuple[int, int] = (1, 1)
    batch_invariant: bool = False
    measured_times: bool = False
    wanted: Callable[[GemmConfig], bool] | None = None


_options = _Options()
changed = Listeners()
"""Is called after every change of an option."""


def use_measured_times() -> None:
    """Let configs be chosen by measured times for the rest of this process, as with DG_TUNE=read, also for calls that
    were made before."""
    _options.measured_times = True
    changed()


@contextmanager
def only(wanted: Callable[[GemmConfig], bool]) -> Iterator[None]:
    """Inside, products are computed by configs for which ``wanted`` is true, whatever is faster. A product that has
    none raises UnsupportedError. For tests of configs; all threads are affected."""
    _options.wanted = wanted
    changed()
    try:
        yield
    finally:
        _options.wanted = None
        changed()


def wanted() -> Callable[[GemmConfig], bool] | None:
    """The condition of `only`, if any."""
    return _options.wanted


def measured_times() -> bool:
    """Whether configs are chosen by measured times, where there are any."""
    return _options.measured_times or settings.tune != "off"


def set_num_sms(num_sms: int) -> None:
    """Let GEMM kernels launch on at most ``num_sms`` SMs, leaving the rest to communication or other streams. (The
    kernel that transposes scales of A, where they need it, is not limited: it lasts microseconds.)

    Raises:
        InvalidInputError: not an integer from 1 to the number of SMs of the current device.

    >>> deep_gemm.set_num_sms(100)
    >>> deep_gemm.get_num_sms()
    100
    """
    limit = _device_limit()
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or not 1 <= num_sms <= limit:
        raise InvalidInputError(f"num_sms must be an integer from 1 to {limit}, the SMs of this GPU, not {num_sms!r}.")
    if _options.num_sms != num_sms:
        _options.num_sms = num_sms
        changed()


def get_num_sms() -> int:
    """How many SMs kernels use: the number that was set, or all of the current device.

    >>> deep_gemm.get_num_sms() > 0
    True
    """
    return _options.num_sms or _device_limit()


def num_sms_for(device: int) -> int:
    """How many SMs kernels use on CUDA device ``device``."""
    return min(_options.num_sms or device_sms(device), device_sms(device))


def whole_gpu(device: int) -> bool:
    """Whether kernels may use all SMs of CUDA device ``device``."""
    return num_sms_for(device) == device_sms(device)


def set_tc_util(tc_util: int) -> None:
    """Set the share of tensor-core time, in percent from 0 to 100, that callers plan with. It is only returned by
    `get_tc_util`: kernels on Hopper do not throttle themselves.

    >>> deep_gemm.set_tc_util(100)
    """
    if isinstance(tc_util, bool) or not isinstance(tc_util, int) or not 0 <= tc_util <= 100:
        raise InvalidInputError(f"tc_util must be an integer from 0 to 100 (percent), not {tc_util!r}.")
    _options.tc_util = tc_util


def get_tc_util() -> int:
    """The share that `set_tc_util` was given; 100 at first.

    >>> deep_gemm.get_tc_util()
    100
    """
    return _options.tc_util


def set_pdl(enabled: bool) -> None:
    """Whether kernels are launched so that they may start before their predecessor in the stream has finished
    (programmatic dependent launch); True at first.

    It is safe whoever wrote the operands: after its prologue, a kernel waits for its predecessor before it reads or
    writes anything that the predecessor may have written. Only weights under `declare_constant` are read earlier; with
    ``set_pdl(False)`` that promise has no effect. It has none on part of a GPU either (`set_num_sms`): there, kernels
    never start early, so that no more SMs are used than allowed.

    >>> deep_gemm.set_pdl(True)
    """
    if not isinstance(enabled, bool):
        raise InvalidInputError(f"enabled must be True or False, not {enabled!r}.")
    _options.pdl = enabled
    changed()


def get_pdl() -> bool:
    """Whether programmatic dependent launch is on; True at first.

    >>> deep_gemm.get_pdl()
    True
    """
    return _options.pdl


def set_ignore_compile_dims(ignore: bool) -> None:
    """Whether to ignore every ``compiled_dims`` argument, so that all sizes are run-time arguments.

    >>> deep_gemm.set_ignore_compile_dims(False)
    """
    if not isinstance(ignore, bool):
        raise InvalidInputError(f"ignore must be True or False, not {ignore!r}.")
    _options.ignore_compile_dims = ignore
    changed()


def ignore_compile_dims() -> bool:
    """What `set_ignore_compile_dims` was given."""
    return _options.ignore_compile_dims


def set_block_size_multiple_of(value: int | tuple[int, int]) -> None:
    """Only choose tiles whose block_m and block_n are multiples of ``value``: one number for both, or a pair.

    >>> deep_gemm.set_block_size_multiple_of((1, 1))
    """
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in pair):
        raise InvalidInputError(f"value must be a positive integer or a pair of them, not {value!r}.")
    _options.block_multiple = (pair[0], pair[1])
    changed()


def get_block_size_multiple_of() -> tuple[int, int]:
    """The multiples of (block_m, block_n) that are allowed; (1, 1) at first.

    >>> deep_gemm.get_block_size_multiple_of()
    (1, 1)
    """
    return _options.block_multiple


def set_batch_invariant(enabled: bool) -> None:
    """Whether a row of a dense GEMM's result must have the same bits whatever M is and whichever rows are beside it;
    False at first.

    While it is True, each product sums K in one order that does not depend on M. If it has few columns, these are two
    or four parts of K, which some SMs share or one SM computes in turn; otherwise K is not split, which costs speed
    where M is small. Repeating a call gives the same bits either way.

    The switch is process-wide, and a call follows its position at the time of the call. Setting it takes a fraction of
    a microsecond and drops nothing: kernels and remembered calls of both positions are kept. A CUDA graph keeps the
    kernels that it was captured with.

    Raises:
        InvalidInputError: not a bool.

    >>> deep_gemm.set_batch_invariant(True)
    >>> deep_gemm.get_batch_invariant()
    True
    """
    if not isinstance(enabled, bool):
        raise InvalidInputError(f"enabled must be True or False, not {enabled!r}.")
    import torch  # here: what only compiles ahead needs none

    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()  # or it would be set after the calls that follow
    _options.batch_invariant = enabled


def get_batch_invariant() -> bool:
    """What `set_batch_invariant` was given; False at first.

    >>> deep_gemm.get_batch_invariant()
    False
    """
    return _options.batch_invariant


use_deterministic_algorithms = set_batch_invariant
get_deterministic_algorithms = get_batch_invariant


def current() -> _Options:
    """All options, as attributes that change, for the warm path, which reads one at each call."""
    return _options


def _device_limit() -> int:
    import torch

    return device_sms(torch.cuda.current_device()) if torch.cuda.is_available() else DEFAULT.num_sms
