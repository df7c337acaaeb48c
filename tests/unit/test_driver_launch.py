"""Launch records, by reading the memory that the driver would read."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from typing import Any

import pytest
from cuda.bindings import driver as bindings
from driver_fakes import OK, FakeDriver

from deep_gemm.errors import DriverError, InvalidInputError
from deep_gemm.jit.driver.launch import Launch, LaunchShape
from deep_gemm.jit.driver.module import Function


def attributes_of(config: Any) -> list[tuple[int, bytes]]:
    """(id, value) of each launch attribute, read from the memory that the driver would read."""
    address, count = struct.unpack("=QI", ctypes.string_at(config.getPtr() + 40, 12))
    size = 72
    return [
        (
            struct.unpack("=i", ctypes.string_at(address + size * i, 4))[0],
            ctypes.string_at(address + size * i + 8, 64),
        )
        for i in range(count)
    ]


def test_the_config_as_the_driver_reads_it(driver: FakeDriver, function: Function) -> None:
    launch = Launch(function, LaunchShape((132, 2, 3), 384, 200_000, (2, 1, 1), pdl=True), 0x1234, [])
    raw = ctypes.string_at(launch._config.getPtr(), 40)
    assert struct.unpack("=IIIIIIIIQ", raw) == (132, 2, 3, 384, 1, 1, 200_000, 0, 0x1234)
    ids = bindings.CUlaunchAttributeID
    (first, cluster), (second, allowed) = attributes_of(launch._config)
    assert first == int(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    assert struct.unpack("=III", cluster[:12]) == (2, 1, 1)
    assert second == int(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    assert struct.unpack("=i", allowed[:4]) == (1,)


@pytest.mark.parametrize(
    ("cluster", "pdl", "ids"), [((1, 1, 1), False, []), ((1, 2, 1), False, [4]), ((1, 1, 1), True, [6])]
)
def test_attributes_are_there_only_if_needed(
    driver: FakeDriver, function: Function, cluster: tuple[int, int, int], pdl: bool, ids: list[int]
) -> None:
    launch = Launch(function, LaunchShape((4, 4, 4), 128, 0, cluster, pdl), 0, [])
    assert [kind for kind, _ in attributes_of(launch._config)] == ids


def test_arguments_as_the_driver_reads_them(driver: FakeDriver, function: Function) -> None:
    one, two = bytes(range(128)), bytes(range(128, 256))
    big = 0x7FFF_1234_5678_9ABC
    arguments: list[Any] = [
        ("i32", -5),
        one,
        ("u32", 0xFFFF_FFFF),
        ("ptr", big),
        two,
        ("f32", 1.5),
        ("i64", -(1 << 40)),
    ]
    launch = Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, arguments)
    launch()
    name, (config, handle, parameters, extra) = driver.calls[-1]
    assert (name, config, handle, extra) == ("cuLaunchKernelEx", launch._config, function.handle, 0)
    # cuda.bindings takes an int as the address of the void*[].
    assert type(parameters) is int
    addresses = struct.unpack("=7Q", ctypes.string_at(parameters, 56))
    formats = ["i", "128s", "I", "Q", "128s", "f", "q"]
    values = [
        struct.unpack("=" + code, ctypes.string_at(address, struct.calcsize("=" + code)))[0]
        for address, code in zip(addresses, formats, strict=True)
    ]
    assert values == [-5, one, 0xFFFF_FFFF, big, two, 1.5, -(1 << 40)]
    alignments = [4, 64, 4, 8, 64, 4, 8]
    assert [address % alignment for address, alignment in zip(addresses, alignments, strict=True)] == [0] * 7
    spans = sorted(
        (address, address + struct.calcsize("=" + code)) for address, code in zip(addresses, formats, strict=True)
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_records_of_one_shape_and_stream_share_a_config_only(driver: FakeDriver, function: Function) -> None:
    shape = LaunchShape((1, 1, 1), 128, 0)
    one, two = (Launch(function, shape, 7, [("ptr", pointer)]) for pointer in (16, 32))
    other = Launch(function, shape, 8, [("ptr", 16)])
    assert one._config is two._config
    assert one._config is not other._config
    values = []
    for launch in (one, two):
        launch()
        address = struct.unpack("=Q", ctypes.string_at(driver.calls[-1][1][2], 8))[0]
        values.append(struct.unpack("=Q", ctypes.string_at(address, 8))[0])
    assert values == [16, 32]


def test_a_warm_launch_is_one_call(driver: FakeDriver, function: Function) -> None:
    launch = Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, [("ptr", 16)])
    driver.calls.clear()
    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.names() == ["cuLaunchKernelEx"] * 8
    with pytest.raises(AttributeError):
        launch.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_HANDLE"])
@pytest.mark.parametrize("before", [0, 1001])
def test_a_launch_without_its_context_binds_it_and_retries_once(
    driver: FakeDriver, function: Function, name: str, before: int
) -> None:
    error = getattr(bindings.CUresult, name)
    driver.current = before
    driver.answers["cuLaunchKernelEx"] = lambda *_: (OK if driver.current == 1000 else error,)
    Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, [])()
    assert driver.names().count("cuLaunchKernelEx") == 2
    # A thread that was on another device stays there; one without a context keeps this one.
    assert driver.current == (before or 1000)


@pytest.mark.parametrize(("name", "calls"), [("CUDA_ERROR_INVALID_CONTEXT", 2), ("CUDA_ERROR_LAUNCH_FAILED", 1)])
def test_a_launch_that_goes_on_failing_names_the_kernel(
    driver: FakeDriver, function: Function, name: str, calls: int
) -> None:
    driver.fail("cuLaunchKernelEx", name)
    launch = Launch(function, LaunchShape((5, 1, 1), 128, 0), 0, [])
    with pytest.raises(DriverError, match=rf"cuLaunchKernelEx for k with LaunchShape\(grid=\(5, 1, 1\).*{name}"):
        launch()
    assert driver.names().count("cuLaunchKernelEx") == calls


def test_several_numbers_are_one_argument(driver: FakeDriver, function: Function) -> None:
    """A struct of 32-bit numbers, which needs no more than their alignment: right behind the number before it."""
    numbers = (1, 0xFFFF_FFFF, 3)
    launch = Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, [("u32", 7), ("u32s", numbers), ("u32", 9)])
    launch()
    before, at, after = struct.unpack("=3Q", ctypes.string_at(driver.calls[-1][1][2], 24))
    assert (at - before, after - at) == (4, 12)
    assert struct.unpack("=3I", ctypes.string_at(at, 12)) == numbers


@pytest.mark.parametrize(
    "argument",
    [
        ("i32", 1 << 31),
        ("u32", -1),
        ("ptr", -8),
        ("u16", 1),
        b"short",
        ("i32", 1.5),
        ("u32", (1,)),
        ("u32s", 1),
        ("u32s", (1, -1)),
    ],
)
def test_bad_arguments_are_refused(driver: FakeDriver, function: Function, argument: Any) -> None:
    with pytest.raises(InvalidInputError):
        Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, [argument])


@pytest.mark.parametrize(
    "fields",
    [{"grid": (0, 1, 1)}, {"block": 0}, {"dynamic_shared": -1}, {"grid": (3, 1, 1), "cluster": (2, 1, 1)}],
)
def test_bad_shapes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"launch needs positive sizes|multiple of the cluster"):
        LaunchShape(**{"grid": (2, 1, 1), "block": 128, "dynamic_shared": 0, **fields})
