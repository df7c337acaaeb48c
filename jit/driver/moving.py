"""A launch whose operands are elsewhere from call to call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver import api
from deep_gemm.jit.driver.launch import CONTEXT_ERRORS, Launch, LaunchShape, Map, Parameter, Pointer
from deep_gemm.jit.driver.module import Function, primary_context
from deep_gemm.jit.driver.tensor_map import ADDRESS_ALIGNMENT


class MovingLaunch:
    """A record of which only addresses are written anew, and only those that changed: a new record takes ten times as
    long. Any number of threads may call it, one after the other: the driver has copied all of it when a launch returns.

    `parameters` are the kernel's, in order, and `addresses` those of the operands that they name, to begin with.
    """

    __slots__ = ("_at", "_launch", "_lock", "_maps", "_pointers", "_replace")

    def __init__(
        self,
        function: Function,
        shape: LaunchShape,
        stream: int,
        parameters: Sequence[Parameter],
        addresses: Mapping[str, int],
    ) -> None:
        self._launch = Launch(function, shape, stream, parameters, addresses)
        self._at = dict(addresses)
        # Not a ForkLock: there are thousands of these, and an interrupt inside its Python would leave it locked.
        self._lock = threading.Lock()
        self._replace = api.library_function("cuTensorMapReplaceAddress")
        self._pointers: dict[str, list[ctypes.c_uint64]] = {operand: [] for operand in addresses}
        self._maps: dict[str, list[ctypes.c_void_p]] = {operand: [] for operand in addresses}
        for parameter, place in zip(parameters, self._launch.places(), strict=True):
            if isinstance(parameter, Pointer):
                self._pointers[parameter.operand].append(ctypes.c_uint64.from_address(place))
            elif isinstance(parameter, Map):
                self._maps[parameter.operand].append(ctypes.c_void_p(place))

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launch with the operands at `addresses`. Raises DriverError, and InvalidInputError for an address that no
        tensor map can have."""
        with self._lock:
            at = self._at
            for operand, address in addresses.items():
                if at[operand] != address:
                    self._move(operand, address)
            self._launch()

    def _move(self, operand: str, address: int) -> None:
        maps = self._maps[operand]
        if maps and (address <= 0 or address % ADDRESS_ALIGNMENT):
            raise InvalidInputError(
                f"Tensor map of {operand}: the address must be a multiple of {ADDRESS_ALIGNMENT} bytes, but it is "
                f"{address:#x}."
            )
        self._at[operand] = 0  # nowhere, should the driver refuse half way
        for pointer in self._pointers[operand]:
            pointer.value = address
        there = ctypes.c_void_p(address)
        for place in maps:
            status = self._replace(place, there)
            if status:
                self._recover(status, place, there)
        self._at[operand] = address

    def _recover(self, status: int, place: ctypes.c_void_p, there: ctypes.c_void_p) -> None:
        function = self._launch.function
        if status in CONTEXT_ERRORS:
            with primary_context(function.device):
                status = self._replace(place, there)
        api.check(int(status), "cuTensorMapReplaceAddress", f"{function.symbol} at {there.value:#x}")
