"""A call of any operation: look it up; if it is new, check it, choose and launch kernels, and remember them.

A warm call is one look-up, by everything that a launch depends on, and the launch itself. A call that differs from an
earlier one only in addresses is a call replay: a patched launch of the earlier record. The second identical call gets
its own launch record.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm import options
from deep_gemm.errors import UnsupportedError
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.runtime import engine, monitor, operators, weight_promises
from deep_gemm.runtime.call_code import Places, entry_source, runner
from deep_gemm.runtime.call_code import fits as _fits
from deep_gemm.runtime.generated import function
from deep_gemm.runtime.monitor import Call
from deep_gemm.runtime.operation import SCRATCH, KernelOperation, LaunchSequence, Operands, Parameter, Step
from deep_gemm.settings import environment, settings
from deep_gemm.spec import GemmSpec
from deep_gemm.tensors import is_fake_type, refuse_unwritten

__all__ = [
    "Calls",
    "KernelOperation",
    "LaunchSequence",
    "Operands",
    "Parameter",
    "Replay",
    "Step",
    "byte_range",
    "forget_all",
    "make_entry",
]

MAX_REMEMBERED = 8192
"""The most launch records that one operation keeps, of about 1 KB each (9 KB if scales are transposed). When it is
reached, all are dropped: calls that repeat are soon remembered again."""

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Types of tensors that have memory of their own: neither fake tensors nor DTensors."""

_raw_stream = engine.raw_stream
_is_grad_enabled = torch.is_grad_enabled
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class _DeviceOf(dict[type, Callable[[Any], int]]):
    """The function that returns a tensor's device, by the tensor's type. Fake tensors raise TypeError here, before
    their address is read, since torch warns about that."""

    def __missing__(self, kind: type) -> Callable[[Any], int]:
        if not issubclass(kind, Tensor) or is_fake_type(kind):
            raise TypeError(f"{kind.__name__} has no memory")
        self[kind] = Tensor.get_device
        return Tensor.get_device


_DEVICE_OF = _DeviceOf()


def _check_unwritten(operation: KernelOperation, parameters: Sequence[Parameter], arguments: Sequence[Any]) -> None:
    """See `refuse_unwritten`."""
    named: dict[str, Any] = {}
    for parameter, value in zip(parameters, arguments, strict=True):
        parts = {f"{parameter.name}[{i}]": x for i, x in enumerate(value)} if isinstance(value, (tuple, list)) else {}
        named |= parts or {parameter.name: value}
    outputs = [operation.operands.get(name, "") for name in operation.outputs or (operation.output,)]
    refuse_unwritten({name: named[name] for name in outputs if name in named}, named.values())


class Calls:
    """The remembered calls of one operation."""

    every: ClassVar[weakref.WeakSet[Calls]] = weakref.WeakSet()

    def __init__(self, operation: KernelOperation, variants: Sequence[KernelOperation]) -> None:
        self.operation, self._variants = operation, variants
        names = list(operation.operands)
        self._count = len(names)
        self._weights = tuple(names.index(name) for name in operation.weights)
        # Keyed by what differs between calls that alternate: addresses, shapes, options, stream, batch invariance. The
        # value is the launch, and the rest of what checks, launches and plans depend on (see `entry_source`): it is
        # compared, which is cheaper than hashing. None marks a key seen once, as a replay; the second hit records it.
        self.warm: dict[Any, tuple[Any, Callable[[], object]] | None] = {}
        # Keyed by the weight promise, the key of `warm` without addresses, and the rest.
        self.replays: dict[Any, Call] = {}
        self.every.add(self)

    def forget(self) -> None:
        """Replace the dictionaries by new ones: a call in progress then remembers itself in the old ones, which are
        dropped. No lock is taken: a storage can be freed, and its promise end, at any moment."""
        self.warm, self.replays = {}, {}

    def not_warm(self, key: Any, rest: Any, arguments: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> None:
        """A call that is not warm. If no key could be made, ``key`` is None and ``tensors`` is empty."""
        special = self.operation.has_operator and not _PLAIN.issuperset(map(type, tensors or (None,)))
        if special and operators.is_recorded(arguments):
            operators.record(self._variants, arguments)
            return
        monitor.begin()
        warm, replays = self.warm, self.replays  # read first: see `forget`
        if key is not None and self._replay(warm, replays, key, rest, tensors):
            return
        x = self.operation.check(*arguments)
        if x is None:
            _check_unwritten(self.operation, self._variants[0].arguments, arguments)
            return
        if x.device.type == "cpu":
            self.operation.check_values(x)
            monitor.run(self.operation, x, "reference", self.operation.reference)
            return
        device, current = x.device.index, _current_device()
        checked = "check" in self.operation.settings and settings.check  # each call is: none is remembered
        with torch.cuda.device(device):
            if checked:
                self.operation.check_values(x)
            made = _made(self.operation, x, device)
        if made is None or key is None or checked or not made[0].is_for(key):
            return
        replay, call = made
        # The common case, tensors on the current device, needs no device guard.
        _remember(warm, key, (rest, call if current == device else functools.partial(_on_device, device, call)))
        kind = (replay.constant, key[self._count :], rest)
        # Keep the newest replay: later calls probably have its alignment.
        if current == device and not (kind in replays and replays[kind].fits(key[: self._count])):
            _remember(replays, kind, replay)

    def _replay(
        self,
        warm: dict[Any, tuple[Any, Callable[[], object]] | None],
        replays: dict[Any, Call],
        key: Any,
        rest: Any,
        tensors: tuple[Tensor, ...],
    ) -> bool:
        """Make the call of ``key`` as a replay of a call that differs only in addresses. The second call with the same
        addresses gets a launch record of its own. False if no replay fits."""
        promised = True
        for index in self._weights:
            if not weight_promises.is_constant(tensors[index]):
                promised = False
                break
        replay = replays.get((promised, key[self._count :], rest))
        if replay is None:
            return False
        at = key[: self._count]
        if not replay.fits(at):
            return False
        for tensor in tensors:
            if tensor.get_device() != replay.device:
                return False
        if key in warm:
            call = replay.record(at)
            call()
            _remember(warm, key, (rest, call))
        else:
            replay(at)
            _remember(warm, key, None)
        return True


def _made(operation: KernelOperation, x: Operands, device: int) -> tuple[Call, Callable[[], object]] | None:
    """Make a call on the current stream of ``device``. Returns its replay and its launch record, or None if a fallback
    computed the call or a part of it."""
    try:
        replay = _prepare(operation, x, device)
    except UnsupportedError as error:
        if parts := operation.parts(x):
            for part, operands in parts:
                _made(part, operands, device)
        else:
            from deep_gemm.runtime import fallback

            fallback.run(operation, x, error)
        return None
    call = replay.record()
    call()
    return replay, call


def _prepare(operation: KernelOperation, x: Operands, device: int) -> Call:
    """The launches of a call on the current stream of ``device``."""
    sequence = operation.launches(x, device)
    if settings.tune == "on":
        from deep_gemm.runtime import measuring  # here, so that processes that do not tune do not import it

        measuring.consider(operation, sequence, x.tensors, device)
    promised = all(weight_promises.is_constant(x.tensors[name]) for name in operation.weights)
    # The operation itself first, so that an error names its sizes.
    main = sequence.main
    own = operation.plan(sequence.steps[main], device)
    plans = [own if index == main else operation.plan(step, device) for index, step in enumerate(sequence.steps)]
    replay = Replay(sequence, plans, x.tensors, operation, _raw_stream(device), promised)
    config, symbol = (" + ".join(words) for words in zip(*((y.config, y.symbol) for y in plans[main:]), strict=True))
    return monitor.watch(replay, operation, x, config, symbol)


class Replay:
    """A call's launches, for operands of the same sizes, strides and dtypes at other addresses. Holds addresses and
    sizes only, never the caller's tensors."""

    def __init__(
        self,
        sequence: LaunchSequence,
        plans: Sequence[engine.Plan],
        tensors: Mapping[str, Tensor],
        operation: KernelOperation,
        stream: int,
        constant: bool,
    ) -> None:
        self.constant, self.device = constant, plans[0].device
        self._sequence, self._plans, self._stream = sequence, plans, stream
        self._weights = {*operation.weights, "b", "sfb"}
        self._place = next(iter(tensors.values())).device
        self._names = (*tensors, *([SCRATCH] if sequence.scratch else ()))
        ranges = [byte_range(tensor) for tensor in tensors.values()]
        self._first = tuple(start for start, _ in ranges)
        sizes = tuple(end - start for start, end in ranges)
        written = tuple(map(self._names.index, operation.outputs or (operation.output,)))
        same = self._names.index(operation.in_place) if operation.in_place else -1
        same = same if same >= 0 and self._first[same] == self._first[written[0]] else -1
        fits = _fits(len(sizes), written, same, operation.apart)
        self.fits: Callable[[Places], bool] = functools.partial(fits, self._first, sizes)
        """Whether operands at these addresses can be replayed: they have memory and the alignment of the first ones,
        and outputs overlap no other operand, except the one that the output was identical to the first time."""
        self._run: Callable[[Places], None] | None = None

    def is_for(self, key: Any) -> bool:
        """Whether a call with this key may be remembered: the check copied no operand, and kernels were chosen for the
        key's batch invariance, which another thread may have changed meanwhile."""
        specs = [step.spec for step in self._sequence.steps]
        same = all(spec.batch_invariant == key[-1] for spec in specs if isinstance(spec, GemmSpec))
        return same and key[: len(self._first)] == self._first

    def record(self, at: Places | None = None) -> Callable[[], None]:
        """The call at fixed addresses, for which `fits` is true. A call of one kernel without scratch memory gets a
        launch record of its own. Others patch the records of replays at the first addresses, or records of their
        own."""
        if len(self._plans) == 1 and not self._sequence.places:
            return self._launch(0, dict(zip(self._names, at or self._first, strict=True)))
        if at is not None:
            return functools.partial(self._patched(at), at)
        self._run = self._run or self._patched(self._first)
        return functools.partial(self._run, self._first)

    def __call__(self, at: Places) -> None:
        """Make the call on operands at addresses for which `fits` is true. Raises DriverError."""
        if self._run is None:
            self._run = self._patched(at)
        self._run(at)

    def _patched(self, at: Places) -> Callable[[Places], None]:
        """The call by patched launches; ``at`` are the first addresses of their records. Replays share one: if two
        threads make it at once, either will do."""
        sequence, names = self._sequence, self._names
        new = torch.zeros if sequence.zeroed else torch.empty
        scratch = functools.partial(new, sequence.scratch_bytes, dtype=torch.uint8, device=self._place)
        addresses = (*at, scratch().data_ptr()) if sequence.scratch else at
        places = dict(zip(names, addresses, strict=True))
        places |= {name: places[whole] + offset for name, (whole, offset) in sequence.places.items()}
        launches = [self._launch(index, places).at for index in range(len(self._plans))]
        inside = tuple((names.index(whole), offset) for whole, offset in sequence.places.values())
        every = (*names, *sequence.places)
        picks = tuple(tuple(map(every.index, step.operands.values())) for step in sequence.steps)
        if picks == (tuple(range(len(every))),):
            return launches[0]
        return runner(len(at), bool(sequence.scratch), inside, picks)(scratch, launches)

    def _launch(self, index: int, places: Mapping[str, int]) -> Launch:
        plan, step = self._plans[index], self._sequence.steps[index]
        addresses = {name: places[place] for name, place in step.operands.items()}
        # If a launch before copies or casts the weights, what it makes is not constant, even if the weights are.
        copied = any(step.operands.get(name, name) != name for name in self._weights)
        constant = self.constant and not copied
        return engine.launch_record(plan, step.strides, addresses, self._stream, constant, step.numbers)


def make_entry(*variants: KernelOperation) -> Callable[..., None]:
    """The function behind a public one: it takes all arguments by position. ``variants`` are operations with the same
    arguments that differ in the optional tensors that are given (`KernelOperation.absent`). Those with fewer tensors
    come first."""
    namespace: dict[str, Any] = {
        "raw_stream": _raw_stream,
        "is_grad_enabled": _is_grad_enabled,
        "is_traced": torch.compiler.is_dynamo_compiling,
        "modes": torch._C._len_torch_dispatch_stack,
        "is_recording": operators.is_recording,
        "register": operators.register,
        "traced": getattr(torch.ops, operators.NAMESPACE),
        "current_device": _current_device,
        "device_of": _DEVICE_OF,
        "options": options.current(),
        "environment": environment(),
        "redirect": variants[0].redirect,
        "names": [parameter.name for parameter in variants[0].entry_arguments],
        **{f"calls{index}": Calls(operation, variants) for index, operation in enumerate(variants)},
    }
    made = function(entry_source(variants), "entry", f"entry of {variants[0].name}", namespace)
    if variants[0].has_operator:
        operators.announce(variants, made)
    return made


def byte_range(x: Tensor) -> tuple[int, int]:
    """The first address of ``x`` and the one past its last element; equal when it is empty."""
    start = x.data_ptr()
    if x.numel() == 0:
        return start, start
    span = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        span += (size - 1) * stride
    return start, start + span * x.element_size()


def _on_device(device: int, call: Callable[[], object]) -> None:
    """Make a call with its device as the current one."""
    with torch.cuda.device(device):
        call()


def _remember(known: dict[Any, Any], key: Any, what: Any) -> None:
    if len(known) >= MAX_REMEMBERED:
        known.clear()
    known[key] = what


def forget_all() -> None:
    """Forget the calls of all operations."""
    for calls in list(Calls.every):
        calls.forget()


def _forget_readers(names: Collection[str]) -> None:
    """Forget the calls of operations that read one of these settings. All calls are ranges of NVTX, or none is."""
    for calls in list(Calls.every):
        if not set(names).isdisjoint((*calls.operation.settings, "nvtx")):
            calls.forget()


options.changed.add(forget_all)
settings.on_change(_forget_readers)
weight_promises.changed.add(forget_all)
monitor.changed.add(forget_all)
os.register_at_fork(after_in_child=forget_all)  # a thread of the parent may have held a record's lock
