"""Workspaces without a GPU: whose flags and slots are whose, where they come from, and what a launch is given of them.

Flags or slots that two launches use at a time are wrong sums, and kernels that never end; so are flags that are not
zero at first. What torch's allocator handed out under capture must not be kept.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda.bindings import driver as bindings
from driver_fakes import OK, FakeDriver
from golden_renders import PLAIN, find_config, make_params
from launches import parameter_names

from deep_gemm import arch, engine, workspace
from deep_gemm.errors import DriverError
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.memory import allocate_zeros
from deep_gemm.jit.driver.module import Function
from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels import stream_k
from deep_gemm.kernels.sm90_fp8_launch import Addresses, Geometry
from deep_gemm.kernels.stream_k import FLAG_BYTES
from deep_gemm.params import FP8Config, GemmProblem, align
from deep_gemm.workspace import FLAGS_AT_ONCE, LEAST_SLOTS, WorkspaceLaunch, flags_of_capture, of_stream

CONFIG = find_config(PLAIN, block_m=128, block_n=64, stream_k=True)
AT = Addresses(a=0x1000, sfa=0x2000, b=0x3000, sfb=0x4004, d=0x5000)
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
SHAPE = Geometry(m=300, n=1000, k=896, stride_a=896, stride_b=896, stride_d=1000, stride_sfa=300, stride_sfb=(7, 1))


@dataclass
class FakeGpu:
    """What `deep_gemm.workspace` sees of the driver, of torch and of captures in progress."""

    captures: dict[int, int] = field(default_factory=dict)
    """The identity of the capture that each of these streams is part of."""

    failures: list[str] = field(default_factory=list)
    """Errors of the next allocations."""

    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    """Device, address and size of what the driver has handed out."""

    attempts: int = 0
    emptied: int = 0
    slots: list[tuple[str, int, int]] = field(default_factory=list)
    """The same of what torch has handed out."""

    alive: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def allocate_zeros(self, device: int, size: int) -> int:
        self.attempts += 1
        if self.failures:
            raise DriverError("no memory", name=self.failures.pop(0))
        _, end, last = self.pieces[-1] if self.pieces else (0, 1 << 40, 0)
        address = align(end + last, 256)
        self.pieces.append((device, address, size))
        return address

    def capture_id(self, stream: int) -> int:
        return self.captures[stream]

    def is_current_stream_capturing(self) -> bool:
        return bool(self.captures)

    def empty_cache(self) -> None:
        self.emptied += 1

    def empty(self, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype)
        self.slots.append((device, made.data_ptr(), size))
        self.alive.append(weakref.ref(made))
        return made

    def room(self, device: int, address: int) -> int:
        """Bytes from an address on that belong to the piece that it lies in."""
        return max(start + size - address for at, start, size in self.pieces if at == device and start <= address)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    # It stands for torch.cuda as well.
    monkeypatch.setattr(workspace, "torch", SimpleNamespace(empty=fake.empty, uint8=torch.uint8, cuda=fake))
    monkeypatch.setattr(workspace, "allocate_zeros", fake.allocate_zeros)
    monkeypatch.setattr(workspace, "_capture_id", fake.capture_id)
    for known in ("_kept", "_captured", "_spare_flags"):
        monkeypatch.setattr(workspace, known, {})
    return fake


SIZE = 1000


def test_a_stream_has_one_piece(gpu: FakeGpu) -> None:
    flags, slots = of_stream(1, 7, SIZE)
    assert slots == flags + FLAG_BYTES
    assert gpu.pieces == [(1, flags, FLAG_BYTES + LEAST_SLOTS)]
    for size in (SIZE, SIZE // 2, LEAST_SLOTS):
        assert of_stream(1, 7, size) == (flags, slots)
    assert len(gpu.pieces) == 1


def test_what_a_stream_has_at_least_is_enough_for_all_configs() -> None:
    configs: list[FP8Config] = [config for config in PLAIN.configs(arch.SM90) if config.stream_k]
    assert max(stream_k.slot_bytes(config, arch.SM90.num_sms) for config in configs) <= LEAST_SLOTS


def test_a_larger_launch_gets_a_new_piece(gpu: FakeGpu) -> None:
    """The old one is given up, since launches may be waiting that use it."""
    small, large = of_stream(0, 7, SIZE), of_stream(0, 7, LEAST_SLOTS + 1)
    assert [(flags, size) for _, flags, size in gpu.pieces] == [
        (small[0], FLAG_BYTES + LEAST_SLOTS),
        (large[0], FLAG_BYTES + LEAST_SLOTS + 1),
    ]
    assert of_stream(0, 7, SIZE) == of_stream(0, 7, LEAST_SLOTS + 1) == large


def test_streams_and_devices_have_their_own(gpu: FakeGpu) -> None:
    """Launches on two streams may run at the same time."""
    keys = [(0, 7), (0, 8), (1, 7), (0, 0)]
    pieces = {key: of_stream(*key, SIZE) for key in keys}
    assert len(set(pieces.values())) == len(keys)
    assert [device for device, *_ in gpu.pieces] == [device for device, _ in keys]
    assert all(of_stream(*key, SIZE) == piece for key, piece in pieces.items())


def test_a_capture_has_the_same_flags_for_each_of_its_streams(gpu: FakeGpu) -> None:
    eager, _ = of_stream(0, 7, SIZE)
    gpu.captures = {7: 3, 8: 3}
    flags, other = flags_of_capture(0, 7), flags_of_capture(0, 8)
    assert len({eager, flags, other}) == 3
    assert (flags_of_capture(0, 7), flags_of_capture(0, 8)) == (flags, other)
    elsewhere = flags_of_capture(1, 7)
    assert gpu.room(1, elsewhere) >= FLAG_BYTES
    assert of_stream(0, 7, SIZE)[0] == eager


def test_captures_in_turn_on_two_streams_keep_their_own(gpu: FakeGpu) -> None:
    gpu.captures = {7: 3, 8: 4}
    flags = [flags_of_capture(0, 7), flags_of_capture(0, 8)]
    assert [flags_of_capture(0, 7), flags_of_capture(0, 8)] == flags
    gpu.captures[8] = 5
    assert flags_of_capture(0, 8) not in flags
    assert flags_of_capture(0, 7) == flags[0]


def test_flags_are_handed_out_once(gpu: FakeGpu) -> None:
    """A graph may be replayed as long as the process lives, at the same time as any other."""
    captures = 3 * FLAGS_AT_ONCE + 1
    given = []
    for identity in range(captures):
        gpu.captures = {7: identity}
        given.append(flags_of_capture(0, 7))
        assert flags_of_capture(0, 7) == given[-1]
    assert all(later - one >= FLAG_BYTES for one, later in pairwise(sorted(given)))
    assert all(gpu.room(0, flags) >= FLAG_BYTES for flags in given)
    assert [size for *_, size in gpu.pieces] == [FLAGS_AT_ONCE * FLAG_BYTES] * 4


def test_threads_share_a_stream_and_nothing_else(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(device: int, size: int) -> int:
        time.sleep(0.02)
        return gpu.allocate_zeros(device, size)

    monkeypatch.setattr(workspace, "allocate_zeros", slow)
    gpu.captures = {stream: stream for stream in range(8)}
    ready = threading.Barrier(8)

    def both(stream: int) -> tuple[tuple[int, int], int]:
        ready.wait()
        return of_stream(0, 7, SIZE), flags_of_capture(0, stream)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(both, range(8)))
    assert len({piece for piece, _ in found}) == 1
    assert len({flags for _, flags in found}) == 8
    assert len(gpu.pieces) == 2


def test_memory_that_torch_does_not_use_is_asked_for_once(gpu: FakeGpu) -> None:
    gpu.failures = [OUT_OF_MEMORY]
    of_stream(0, 7, SIZE)
    assert (gpu.attempts, gpu.emptied) == (2, 1)
    gpu.failures = [OUT_OF_MEMORY] * 2
    with pytest.raises(DriverError):
        of_stream(0, 8, SIZE)
    assert (gpu.attempts, gpu.emptied, gpu.failures) == (4, 2, [])
    assert of_stream(0, 8, SIZE) != of_stream(0, 7, SIZE)


@pytest.mark.parametrize(("error", "captures"), [("CUDA_ERROR_ILLEGAL_ADDRESS", {}), (OUT_OF_MEMORY, {7: 3})])
def test_torch_keeps_its_memory_under_capture_and_for_other_errors(
    gpu: FakeGpu, error: str, captures: dict[int, int]
) -> None:
    gpu.captures, gpu.failures = captures, [error]
    with pytest.raises(DriverError):
        of_stream(0, 7, SIZE)
    assert (gpu.attempts, gpu.emptied) == (1, 0)
    gpu.captures, gpu.failures = {7: 3}, [error]
    with pytest.raises(DriverError):
        flags_of_capture(0, 7)
    assert (gpu.attempts, gpu.emptied) == (2, 0)
    assert gpu.room(0, flags_of_capture(0, 7)) >= FLAG_BYTES


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_finds_the_lock_free() -> None:
    with workspace._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if workspace._lock.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0


@dataclass
class Records:
    """Makes launch records, noting for which addresses, and which were launched while their slots were there."""

    gpu: FakeGpu
    made: list[tuple[int, int]] = field(default_factory=list)
    launched: list[tuple[int, int]] = field(default_factory=list)

    def make(self, flags: int, slots: int) -> Any:
        def record() -> None:
            self.launched.append((flags, slots))
            assert not self.gpu.captures or self.gpu.alive[-1]() is not None

        self.made.append((flags, slots))
        return record


def test_an_eager_record_is_made_once(gpu: FakeGpu) -> None:
    """It stays where it is when its stream gets a larger piece."""
    records = Records(gpu)
    call = WorkspaceLaunch(records.make, 0, 7, SIZE)
    assert records.made == []
    assert gpu.pieces == []
    call()
    piece = of_stream(0, 7, SIZE)
    assert of_stream(0, 7, LEAST_SLOTS + 1) != piece
    call()
    assert (records.made, records.launched) == ([piece], [piece] * 2)
    assert gpu.slots == []


def test_captured_calls_have_flags_of_their_capture_and_slots_of_their_own(gpu: FakeGpu) -> None:
    records = Records(gpu)
    call = WorkspaceLaunch(records.make, 1, 7, SIZE)
    call()
    eager = records.launched.pop()
    for capture in (3, 4):
        gpu.captures = {7: capture}
        call()
        call()
        assert [flags for flags, _ in records.launched[-2:]] == [flags_of_capture(1, 7)] * 2
    assert [slots for _, slots in records.launched] == [address for _, address, _ in gpu.slots]
    assert {(device, size) for device, _, size in gpu.slots} == {("cuda:1", SIZE)}
    assert len({eager[0], *(flags for flags, _ in records.launched)}) == 3
    assert records.made == [eager, *records.launched]
    gpu.captures = {}
    call()
    assert records.launched[-1] == eager
    assert len(records.made) == 5


def test_slots_of_a_capture_are_not_kept(gpu: FakeGpu) -> None:
    """torch wants back all that its pool for a graph has handed out."""
    gpu.captures = {7: 3}
    call = WorkspaceLaunch(Records(gpu).make, 0, 7, SIZE)
    for count in (1, 2):
        call()
        assert len(gpu.alive) == count
        assert not any(slots() is not None for slots in gpu.alive)


def test_a_call_that_is_captured_first_has_no_eager_record_yet(gpu: FakeGpu) -> None:
    """Its slots are the graph's: an eager launch must not end up there."""
    records = Records(gpu)
    call = WorkspaceLaunch(records.make, 0, 7, SIZE)
    gpu.captures = {7: 3}
    call()
    captured = flags_of_capture(0, 7), gpu.slots[0][1]
    gpu.captures = {}
    call()
    assert records.launched == [captured, of_stream(0, 7, SIZE)]


@pytest.mark.parametrize("config", [CONFIG, find_config(PLAIN, block_m=128, block_n=64)], ids=["stream", "plain"])
def test_the_engine_gives_a_launch_the_workspace_that_it_needs(
    gpu: FakeGpu, driver: FakeDriver, function: Function, config: FP8Config
) -> None:
    launches, names = [], parameter_names(make_params(config))

    def note(shape: Any, _: Any, parameters: int, __: Any) -> tuple[Any, ...]:
        # While the record is there: that of a captured call is gone after it.
        places = (ctypes.c_void_p * len(names)).from_address(parameters)
        given = (places[names.index(name)] for name in ("flags", "slots") if config.stream_k)
        launches.append((shape.gridDimX, tuple(ctypes.c_uint64.from_address(place).value for place in given)))
        return (OK,)

    driver.answers["cuLaunchKernelEx"] = note
    problem = GemmProblem(m=SHAPE.m, n=SHAPE.n, k=SHAPE.k, num_sms=132)
    with mock.patch.object(TensorMapSpec, "encode", return_value=bytes(128)):
        call = engine._launch(make_params(config), function, problem, SHAPE, AT, 0, 7, True, False)
        call()
        call()
        gpu.captures = {7: 3}
        call()
    if not config.stream_k:
        assert isinstance(call, Launch)
        assert len(launches) == 3
        assert (gpu.pieces, gpu.slots) == ([], [])
        return
    ctas = stream_k.stream(config, SHAPE.m, SHAPE.n, SHAPE.k, 132).ctas
    eager, captured = of_stream(0, 7, 0), (flags_of_capture(0, 7), gpu.slots[0][1])
    assert launches == [(ctas, eager), (ctas, eager), (ctas, captured)]
    assert gpu.slots[0][2] == stream_k.slot_bytes(config, ctas)


def test_the_identity_of_a_capture_is_the_drivers(driver: FakeDriver) -> None:
    active = bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    for rest in ([None, [], 0], [None, [], [], 0]):  # which of them come depends on the version of the bindings
        answer = (OK, active, bindings.cuuint64_t(107), *rest)
        driver.answers["cuStreamGetCaptureInfo"] = lambda stream, answer=answer: answer
        assert workspace._capture_id(7) == 107
        assert driver.calls[-1] == ("cuStreamGetCaptureInfo", (7,))
    failed = bindings.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    driver.answers["cuStreamGetCaptureInfo"] = lambda stream: (failed, *[None] * 5)
    with pytest.raises(DriverError, match=r"cuStreamGetCaptureInfo for stream 0x7 failed with .*CAPTURE_IMPLICIT"):
        workspace._capture_id(7)


# Driver calls that memory takes, in order, and that which identifies a capture, with the number of arguments given.
MEMORY_CALLS = {
    "cuStreamCreate": 1,
    "cuMemAlloc": 1,
    "cuMemsetD8Async": 4,
    "cuStreamSynchronize": 1,
    "cuStreamDestroy": 1,
}


@pytest.mark.parametrize(("name", "count"), [*MEMORY_CALLS.items(), ("cuStreamGetCaptureInfo", 1)])
def test_the_installed_bindings_have_the_calls_that_are_made(name: str, count: int) -> None:
    signature = (inspect.getdoc(getattr(bindings, name)) or "").splitlines()[0]
    arguments = signature.partition("(")[2].rpartition(")")[0]
    assert len(arguments.split(",")) == count, signature


def test_memory_is_cleared_on_a_stream_of_its_own_beside_captures(driver: FakeDriver) -> None:
    """The stream must wait for no other, as it would for the legacy default stream, which may be captured."""
    modes = bindings.CUstreamCaptureMode
    seen = []

    def answers(name: str, *values: Any) -> None:
        def answer(*arguments: Any) -> tuple[Any, ...]:
            assert (driver.current, driver.capture_mode) == (1003, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
            seen.append((name, *map(int, arguments)))
            return (OK, *values)

        driver.answers[name] = answer

    for name in MEMORY_CALLS:
        answers(name)
    answers("cuMemAlloc", bindings.CUdeviceptr(0x7000))
    answers("cuStreamCreate", bindings.CUstream(9))
    driver.current = 5
    address = allocate_zeros(3, 4096)
    assert (type(address), address) == (int, 0x7000)
    assert [name for name, *_ in seen] == list(MEMORY_CALLS)
    non_blocking = int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert [arguments for _, *arguments in seen] == [[non_blocking], [4096], [0x7000, 0, 4096, 9], [9], [9]]
    assert (driver.current, driver.capture_mode) == (5, modes.CU_STREAM_CAPTURE_MODE_GLOBAL)


def test_memory_that_is_not_there_is_an_error(driver: FakeDriver) -> None:
    driver.fail("cuMemAlloc", OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=f"4096 bytes on device 3 failed with {OUT_OF_MEMORY}") as caught:
        allocate_zeros(3, 4096)
    assert caught.value.name == OUT_OF_MEMORY
    assert driver.names().count("cuStreamCreate") == driver.names().count("cuStreamDestroy")
    assert driver.capture_mode == bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
