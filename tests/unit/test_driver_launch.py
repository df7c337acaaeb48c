"""Launch records, packed and patched: the tests read the memory that the driver would read."""

import ctypes
import hashlib
import itertools
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
from chosen import make_params
from cuda.bindings import driver as bindings
from driver_fakes import HANDLE, OK, FakeDriver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import AT, CONFIGS, Geometry, geometries, plan_of, suited

from deep_gemm.errors import DriverError, InvalidInputError
from deep_gemm.jit.driver.launch import Launch, LaunchArgument, LaunchShape, Map, Pointer, placed
from deep_gemm.jit.driver.module import Function
from deep_gemm.jit.driver.tensor_map import SIZE, TensorMapSpec


def attributes_of(launch: Launch) -> list[tuple[int, bytes]]:
    """(id, value) of each launch attribute, read from the memory that the driver would read."""
    address, count = struct.unpack("=QI", ctypes.string_at(launch._config.getPtr(), 52)[40:])
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
    (first, cluster), (second, allowed) = attributes_of(launch)
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
    assert [kind for kind, _ in attributes_of(launch)] == ids


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
    assert (name, config, handle, extra) == ("cuLaunchKernelEx", launch._config, HANDLE, 0)
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
    # A thread of another device stays on that device; one without a context keeps this one.
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
    """A struct of 32-bit numbers has their alignment, so it follows the number before it directly."""
    numbers = (1, 0xFFFF_FFFF, 3)
    launch = Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, [("u32", 7), ("u32s", numbers), ("u32", 9)])
    launch()
    before, at, after = struct.unpack("=3Q", ctypes.string_at(driver.calls[-1][1][2], 24))
    assert (at - before, after - at) == (4, 12)
    assert struct.unpack("=3I", ctypes.string_at(at, 12)) == numbers


@pytest.mark.parametrize(
    "argument",
    [
        ("i32", 1 << 31), ("u32", -1), ("ptr", -8), ("u16", 1), b"short", ("i32", 1.5), ("u32", (1,)), ("u32s", 1),
        ("u32s", (1, -1)),
    ],
)  # fmt: skip
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


class Maps:
    """Fake descriptors that can be read: the address, and a digest of the rest."""

    def __init__(self) -> None:
        self.replaced: list[int] = []
        self.status = 0

    def encode(self, spec: TensorMapSpec, address: int) -> bytes:
        rest = hashlib.sha256(repr(spec).encode()).digest()
        return address.to_bytes(8, "little") + (rest * 4)[: SIZE - 8]

    def replace(self, place: bindings.CUtensorMap, address: int) -> tuple[Any, ...]:
        assert place.getPtr() % 64 == 0
        self.replaced.append(address)
        if self.status == 0:
            ctypes.c_uint64.from_address(place.getPtr()).value = address
        return (bindings.CUresult(self.status),)


@pytest.fixture
def maps(driver: FakeDriver) -> Iterator[Maps]:
    fake = Maps()
    driver.answers["cuTensorMapReplaceAddress"] = lambda *at: fake.replace(*at)
    with mock.patch.object(TensorMapSpec, "encode", lambda spec, address: fake.encode(spec, address)):
        yield fake


def values(parameters: Sequence[LaunchArgument], pointers: int) -> list[bytes]:
    """The arguments as the driver would read them."""
    sizes = [
        SIZE if isinstance(p, (Map, bytes)) else 8 if isinstance(p, Pointer) else len(packed(p)) for p in parameters
    ]
    places = (ctypes.c_uint64 * len(sizes)).from_address(pointers)
    return [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=True)]


def packed(argument: Any) -> bytes:
    kind, value = argument
    if kind == "u32s":
        return b"".join(number.to_bytes(4, "little") for number in value)
    return int(value).to_bytes({"u32": 4, "i32": 4, "ptr": 8, "i64": 8}[kind], "little", signed=kind[0] == "i")


def wanted(parameters: Sequence[LaunchArgument], addresses: Mapping[str, int]) -> list[bytes]:
    found = placed(parameters, addresses)
    return [argument if isinstance(argument, bytes) else packed(argument) for argument in found]


SHAPE = LaunchShape((1, 1, 1), 128, 0)
SPEC = TensorMapSpec("u8", (128, 64), (128,), (128, 64), 128)
ADDRESSES = st.fixed_dictionaries({name: st.integers(1, 1 << 44).map(lambda n: n * 16) for name in AT})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(CONFIGS), geometries(), st.lists(ADDRESSES, min_size=1))
def test_a_patched_launch_is_a_new_one(
    maps: Maps, driver: FakeDriver, function: Function, config: Any, g: Geometry, moves: list[dict[str, int]]
) -> None:
    params = make_params(config)
    plan = plan_of(params, suited(g, params), pdl=True)
    launch = Launch(function, plan.shape, 7, plan.parameters, AT)
    assert launch.operands == tuple(AT)
    for addresses in moves:
        launch.at([addresses[name] for name in launch.operands])
        pointers = driver.calls[-1][1][2]
        assert values(plan.parameters, pointers) == wanted(plan.parameters, addresses)


PARAMETERS: list[LaunchArgument] = [
    ("u32", 5), Pointer("a"), Map(SPEC, "a"), Map(SPEC, "b"), Pointer("d"), Map(SPEC, "a"),
]  # fmt: skip
FIRST = {"a": 0x100, "b": 0x200, "d": 0x300}


def test_only_what_moved_is_written(maps: Maps, driver: FakeDriver, function: Function) -> None:
    launch = Launch(function, SHAPE, 0, PARAMETERS, FIRST)
    for addresses, replaced in (
        (FIRST, []),
        (FIRST | {"d": 0x310}, []),
        (FIRST | {"a": 0x400}, [0x400, 0x400]),
        (FIRST | {"a": 0x400, "b": 0x400}, [0x400]),
        (FIRST, [0x100, 0x100, 0x200]),
    ):
        maps.replaced.clear()
        launch.at(list(addresses.values()))
        assert maps.replaced == replaced
        assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(PARAMETERS, addresses)
    assert driver.names().count("cuLaunchKernelEx") == 5


@pytest.mark.parametrize("status", [1, 54321])  # the bindings do not know the second one
def test_a_map_that_could_not_be_moved_is_moved_by_the_next_call(
    maps: Maps, driver: FakeDriver, function: Function, status: int
) -> None:
    launch = Launch(function, SHAPE, 0, PARAMETERS, FIRST)
    there = FIRST | {"a": 0x400}
    maps.status = status
    with pytest.raises(DriverError, match="cuTensorMapReplaceAddress for k at 0x400 failed"):
        launch.at(list(there.values()))
    assert "cuLaunchKernelEx" not in driver.names()
    maps.status = 0
    for addresses in (there, FIRST, there):
        launch.at(list(addresses.values()))
        assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(PARAMETERS, addresses)


@pytest.mark.parametrize("address", [0, 0x108, -16])
def test_an_address_that_no_map_can_have_is_refused(
    maps: Maps, driver: FakeDriver, function: Function, address: int
) -> None:
    launch = Launch(function, SHAPE, 0, PARAMETERS, FIRST)
    with pytest.raises(InvalidInputError, match="Tensor map of a: the address must be a multiple of 16"):
        launch.at(list((FIRST | {"a": address}).values()))
    launch.at(list(FIRST.values()))
    assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(PARAMETERS, FIRST)


def test_threads_take_turns(maps: Maps, driver: FakeDriver, function: Function) -> None:
    launch = Launch(function, SHAPE, 0, PARAMETERS, FIRST)
    places = [{"a": 0x1000 * i, "b": 0x1000 * i + 0x100, "d": 0x1000 * i + 0x200} for i in range(1, 9)]
    expected = [wanted(PARAMETERS, at) for at in places]
    seen = []

    def look(_: Any, __: Any, pointers: int, ___: Any) -> tuple[Any, ...]:
        time.sleep(0.001)
        seen.append(values(PARAMETERS, pointers))
        return (OK,)

    driver.answers["cuLaunchKernelEx"] = look
    threads = [threading.Thread(target=lambda at=at: [launch.at(list(at.values())) for _ in range(5)]) for at in places]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 40
    assert all(seen.count(one) == 5 for one in expected)


def test_a_thread_without_a_context_moves_maps_in_its_own(maps: Maps, driver: FakeDriver, function: Function) -> None:
    replace = maps.replace

    def picky(place: bindings.CUtensorMap, address: int) -> tuple[Any, ...]:
        context = bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT
        return replace(place, address) if driver.current == 1000 else (context,)

    with mock.patch.object(maps, "replace", picky):
        launch = Launch(function, SHAPE, 0, PARAMETERS, FIRST)
        launch.at(list((FIRST | {"b": 0x800}).values()))
    assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(PARAMETERS, FIRST | {"b": 0x800})


def test_an_operand_without_an_address_is_named(maps: Maps, driver: FakeDriver, function: Function) -> None:
    with pytest.raises(InvalidInputError, match="address of operand 'b'"):
        Launch(function, SHAPE, 0, PARAMETERS, {"a": 0x100, "d": 0x300})
