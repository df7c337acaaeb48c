"""Launches whose operands move: what the driver would read is what a new record would have."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
from driver_fakes import OK, FakeDriver
from golden_renders import make_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import AT, CONFIGS, geometries, suited

from deep_gemm import arch
from deep_gemm.errors import DriverError, InvalidInputError
from deep_gemm.jit.driver import api
from deep_gemm.jit.driver.launch import Launch, LaunchShape, Map, Parameter, Pointer, placed
from deep_gemm.jit.driver.module import Function
from deep_gemm.jit.driver.moving import MovingLaunch
from deep_gemm.jit.driver.tensor_map import SIZE, TensorMapSpec
from deep_gemm.kernels import sm90_fp8_small
from deep_gemm.kernels.sm90_fp8_launch import Geometry, launch

SMALL = list(sm90_fp8_small.KERNEL.configs(arch.SM90))
SHAPE = LaunchShape((1, 1, 1), 128, 0)
SPEC = TensorMapSpec("u8", (128, 64), (128,), (128, 64), 128)
ADDRESSES = st.fixed_dictionaries({name: st.integers(1, 1 << 44).map(lambda n: n * 16) for name in vars(AT)})


class Maps:
    """Descriptors that anybody can read: the address, and a digest of all the rest."""

    def __init__(self) -> None:
        self.replaced: list[int] = []
        self.status = 0

    def encode(self, spec: TensorMapSpec, address: int) -> bytes:
        rest = hashlib.sha256(repr(spec).encode()).digest()
        return address.to_bytes(8, "little") + (rest * 4)[: SIZE - 8]

    def replace(self, place: ctypes.c_void_p, address: ctypes.c_void_p) -> int:
        assert place.value is not None
        assert place.value % 64 == 0
        self.replaced.append(address.value or 0)
        if self.status == 0:
            ctypes.c_uint64.from_address(place.value).value = address.value or 0
        return self.status


@pytest.fixture
def maps(driver: FakeDriver) -> Iterator[Maps]:
    fake = Maps()
    functions: dict[str, Callable[..., int]] = {"cuTensorMapReplaceAddress": fake.replace}
    with (
        mock.patch.object(TensorMapSpec, "encode", lambda spec, address: fake.encode(spec, address)),
        mock.patch.object(api, "library_function", functions.__getitem__),
    ):
        yield fake


def values(parameters: list[Parameter], pointers: int) -> list[bytes]:
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


def wanted(maps: Maps, parameters: list[Parameter], addresses: Mapping[str, int]) -> list[bytes]:
    found = placed(parameters, addresses)
    return [argument if isinstance(argument, bytes) else packed(argument) for argument in found]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.sampled_from(CONFIGS), st.sampled_from(SMALL)), geometries(), st.lists(ADDRESSES, min_size=1))
def test_a_launch_that_moved_is_a_new_one(
    maps: Maps, driver: FakeDriver, function: Function, config: Any, g: Geometry, moves: list[dict[str, int]]
) -> None:
    params = make_params(config)
    if config in SMALL:
        g = Geometry(g.m, g.n, 128, 128, 128, g.stride_d, g.stride_sfa, g.stride_sfb)
    shape, parameters = launch(params, suited(g, params) if config not in SMALL else g, 132, True)
    moving = MovingLaunch(function, shape, 7, parameters, vars(AT))
    for addresses in moves:
        moving(addresses)
        pointers = driver.calls[-1][1][2]
        assert values(parameters, pointers) == wanted(maps, parameters, addresses)


PARAMETERS: list[Parameter] = [("u32", 5), Pointer("a"), Map(SPEC, "a"), Map(SPEC, "b"), Pointer("d"), Map(SPEC, "a")]
FIRST = {"a": 0x100, "b": 0x200, "d": 0x300}


def test_only_what_moved_is_written(maps: Maps, driver: FakeDriver, function: Function) -> None:
    moving = MovingLaunch(function, SHAPE, 0, PARAMETERS, FIRST)
    for addresses, replaced in (
        (FIRST, []),
        (FIRST | {"d": 0x310}, []),
        (FIRST | {"a": 0x400}, [0x400, 0x400]),
        (FIRST | {"a": 0x400, "b": 0x400}, [0x400]),
        (FIRST, [0x100, 0x100, 0x200]),
    ):
        maps.replaced.clear()
        moving(addresses)
        assert maps.replaced == replaced
        assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(maps, PARAMETERS, addresses)
    assert driver.names().count("cuLaunchKernelEx") == 5


def test_a_map_that_could_not_be_moved_is_moved_by_the_next_call(
    maps: Maps, driver: FakeDriver, function: Function
) -> None:
    moving = MovingLaunch(function, SHAPE, 0, PARAMETERS, FIRST)
    there = FIRST | {"a": 0x400}
    maps.status = 1
    with pytest.raises(DriverError, match="cuTensorMapReplaceAddress for k at 0x400 failed"):
        moving(there)
    assert "cuLaunchKernelEx" not in driver.names()
    maps.status = 0
    for addresses in (there, FIRST, there):
        moving(addresses)
        assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(maps, PARAMETERS, addresses)


@pytest.mark.parametrize("address", [0, 0x108, -16])
def test_an_address_that_no_map_can_have_is_refused(
    maps: Maps, driver: FakeDriver, function: Function, address: int
) -> None:
    moving = MovingLaunch(function, SHAPE, 0, PARAMETERS, FIRST)
    with pytest.raises(InvalidInputError, match="Tensor map of a: the address must be a multiple of 16"):
        moving(FIRST | {"a": address})
    moving(FIRST)
    assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(maps, PARAMETERS, FIRST)


def test_threads_take_turns(maps: Maps, driver: FakeDriver, function: Function) -> None:
    moving = MovingLaunch(function, SHAPE, 0, PARAMETERS, FIRST)
    places = [{"a": 0x1000 * i, "b": 0x1000 * i + 0x100, "d": 0x1000 * i + 0x200} for i in range(1, 9)]
    expected = [wanted(maps, PARAMETERS, at) for at in places]
    seen = []

    def look(_: Any, __: Any, pointers: int, ___: Any) -> tuple[Any, ...]:
        time.sleep(0.001)
        seen.append(values(PARAMETERS, pointers))
        return (OK,)

    driver.answers["cuLaunchKernelEx"] = look
    threads = [threading.Thread(target=lambda at=at: [moving(at) for _ in range(5)]) for at in places]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 40
    assert all(seen.count(one) == 5 for one in expected)


def test_a_thread_without_a_context_moves_maps_in_its_own(maps: Maps, driver: FakeDriver, function: Function) -> None:
    replace = maps.replace

    def picky(place: ctypes.c_void_p, address: ctypes.c_void_p) -> int:
        return replace(place, address) if driver.current == 1000 else 201

    with mock.patch.object(api, "library_function", {"cuTensorMapReplaceAddress": picky}.__getitem__):
        moving = MovingLaunch(function, SHAPE, 0, PARAMETERS, FIRST)
        moving(FIRST | {"b": 0x800})
    assert values(PARAMETERS, driver.calls[-1][1][2]) == wanted(maps, PARAMETERS, FIRST | {"b": 0x800})


def test_an_operand_without_an_address_is_named(maps: Maps, driver: FakeDriver, function: Function) -> None:
    with pytest.raises(InvalidInputError, match="address of operand 'b'"):
        Launch(function, SHAPE, 0, PARAMETERS, {"a": 0x100, "d": 0x300})
