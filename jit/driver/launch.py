"""Launch records: packed once, launched many times, at the same addresses or (a patched launch) at others."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver import api
from deep_gemm.jit.driver.module import Function, primary_context
from deep_gemm.jit.driver.tensor_map import ADDRESS_ALIGNMENT, ALIGNMENT, SIZE, TensorMapSpec
from deep_gemm.records import record


class Pointer(NamedTuple):
    """A kernel's parameter that is the address of an operand."""

    operand: str


class Map(NamedTuple):
    """A kernel's parameter that is a tensor map of an operand, or of what begins `offset` bytes behind its address."""

    spec: TensorMapSpec
    operand: str
    offset: int = 0


# An encoded tensor map, ("ptr" | "i32" | "u32" | "i64" | "f32", value), or ("u32s", values) for a struct of such.
Arg: TypeAlias = bytes | tuple[str, int | float | tuple[int, ...]]

# A parameter whose operand addresses are not filled in yet.
LaunchArgument: TypeAlias = Arg | Pointer | Map

_Places: TypeAlias = tuple[list[ctypes.c_uint64], list[tuple[Any, int]]]

_CODES = {"ptr": "=Q", "i32": "=i", "u32": "=I", "i64": "=q", "f32": "=f"}
NUMBERS = ("i32", "u32", "i64", "f32")
"""Of these the types of numbers, by the names that device code has for them (``types.cuh`` and ``custom.cuh``)."""
_FORMATS = {name: struct.Struct(code) for name, code in _CODES.items()}
CONTEXT_ERRORS = ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_HANDLE")
"""What a launch says on a thread without a context, or with the context of another device."""


@record(frozen=True)
class LaunchShape:
    """Grid and cluster in blocks, `block` in threads, `dynamic_shared` in bytes; `pdl` lets the kernel start before
    its predecessor has finished, for kernels that wait for it themselves."""

    grid: tuple[int, int, int]
    block: int
    dynamic_shared: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    pdl: bool = False

    def __post_init__(self) -> None:
        if any(size < 1 for size in (*self.grid, *self.cluster, self.block)) or self.dynamic_shared < 0:
            raise InvalidInputError(f"A launch needs positive sizes, but it has {self}.")
        if any(size % part for size, part in zip(self.grid, self.cluster, strict=True)):
            raise InvalidInputError(f"The grid {self.grid} must be a multiple of the cluster {self.cluster}.")


class Launch:
    """A launch record: arguments, shape and stream, packed once.

    `parameters` are the kernel's, in order; `addresses` those of the operands that they name, by operand.

    A call launches the record as it was packed: any number of threads may do so at once. `at` writes other addresses
    into the record first, which makes it a patched launch: a new record takes ten times as long. A record is used in
    one of these ways, never in both.
    """

    __slots__ = (
        "_at",
        "_block",
        "_config",
        "_lock",
        "_parameters",
        "_places",
        "_pointers",
        "call",
        "function",
        "operands",
        "shape",
        "stream",
    )

    def __init__(
        self,
        function: Function,
        shape: LaunchShape,
        stream: int,
        parameters: Sequence[LaunchArgument],
        addresses: Mapping[str, int] | None = None,
    ) -> None:
        addresses = addresses or {}
        self.function = function
        self.shape = shape
        self.stream = stream
        self.operands = tuple(addresses)
        """The operands in the order in which `at` takes their addresses."""
        self._at = list(addresses.values())
        self._block, self._pointers = _pack(placed(parameters, addresses))
        self._config = _config(shape, stream)
        # An integer is taken as the address of the array of parameter pointers; `self` keeps all of it alive.
        pointers = ctypes.addressof(self._pointers)
        self.call = functools.partial(api.cuda().cuLaunchKernelEx, self._config, function.handle, pointers, 0)
        """Launches without error handling; returns a tuple whose first item is the CUresult."""
        # Not a ForkLock: there are thousands of records, and an interrupt in its Python code would leave it locked.
        self._lock = threading.Lock()
        self._places: list[_Places] | None = None
        self._parameters = parameters

    def __call__(self) -> None:
        """Launch. Raises DriverError."""
        try:
            if status := self.call()[0]:
                self._recover(status)
        except api.UNKNOWN as error:
            raise api.unknown(error, "cuLaunchKernelEx", self.function.symbol) from error

    def at(self, addresses: Sequence[int]) -> None:
        """Launch with the operands at `addresses`, in the order of `operands`. Raises DriverError, and
        InvalidInputError for an address that no tensor map can have.

        Threads take turns: the driver has copied the whole record when a launch returns.
        """
        with self._lock:
            at = self._at
            for index, address in enumerate(addresses):
                if at[index] != address:
                    self._patch(index, address)
            self()

    def _recover(self, status: Any) -> None:
        if status.name in CONTEXT_ERRORS:
            with primary_context(self.function.device):
                status = self.call()[0]
        api.check(status, "cuLaunchKernelEx", f"{self.function.symbol} with {self.shape}")

    def _patch(self, index: int, address: int) -> None:
        if self._places is None:
            self._places = self._find_places()
        pointers, maps = self._places[index]
        if maps and (address <= 0 or address % ADDRESS_ALIGNMENT):
            raise InvalidInputError(
                f"Tensor map of {self.operands[index]}: the address must be a multiple of {ADDRESS_ALIGNMENT} bytes, "
                f"but it is {address:#x}."
            )
        self._at[index] = 0  # unknown if the driver fails half way
        for pointer in pointers:
            pointer.value = address
        replace = api.cuda().cuTensorMapReplaceAddress
        try:
            for tensor_map, offset in maps:
                status = replace(tensor_map, address + offset)[0]
                if status and status.name in CONTEXT_ERRORS:
                    with primary_context(self.function.device):
                        status = replace(tensor_map, address + offset)[0]
                if status:
                    api.check(status, "cuTensorMapReplaceAddress", f"{self.function.symbol} at {address:#x}")
        except api.UNKNOWN as error:
            where = f"{self.function.symbol} at {address:#x}"
            raise api.unknown(error, "cuTensorMapReplaceAddress", where) from error
        self._at[index] = address

    def _find_places(self) -> list[_Places]:
        """For each operand, the pointers and the tensor maps in the record that hold its address; maps with their
        offsets from it."""
        found: list[_Places] = [([], []) for _ in self.operands]
        for parameter, place in zip(self._parameters, self._pointers, strict=False):
            if isinstance(parameter, Pointer):
                pointers, _ = found[self.operands.index(parameter.operand)]
                pointers.append(ctypes.c_uint64.from_address(place or 0))
            elif isinstance(parameter, Map):
                _, maps = found[self.operands.index(parameter.operand)]
                maps.append((api.cuda().CUtensorMap(_ptr=place), parameter.offset))
        return found


def placed(parameters: Sequence[LaunchArgument], addresses: Mapping[str, int]) -> list[Arg]:
    """The parameters with `addresses`, given by operand, filled in. Raises InvalidInputError for an operand that has
    none."""
    try:
        return [
            ("ptr", addresses[parameter.operand])
            if isinstance(parameter, Pointer)
            else parameter.spec.encode(addresses[parameter.operand] + parameter.offset)
            if isinstance(parameter, Map)
            else parameter
            for parameter in parameters
        ]
    except KeyError as error:
        raise InvalidInputError(f"A launch needs the address of operand {error}, but has {set(addresses)}.") from None


def _pack(args: Sequence[Arg]) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_void_p]]:
    """The values, each at its natural alignment (tensor maps at 64 bytes), and the array of pointers to them."""
    offsets = []
    end = 0
    for argument in args:
        size, alignment = _measure(argument)
        start = -(-end // alignment) * alignment
        offsets.append(start)
        end = start + size
    block = ctypes.create_string_buffer(end + ALIGNMENT)
    base = ctypes.addressof(block)
    shift = -base % ALIGNMENT
    for argument, offset in zip(args, offsets, strict=True):
        at = shift + offset
        if isinstance(argument, bytes):
            ctypes.memmove(base + at, argument, SIZE)
        else:
            values = argument[1] if isinstance(argument[1], tuple) else argument[1:]
            try:
                _format(argument).pack_into(block, at, *values)
            except struct.error as error:
                raise InvalidInputError(f"The kernel argument {argument} does not fit its type: {error}.") from error
    pointers = (ctypes.c_void_p * max(len(args), 1))(*[base + shift + offset for offset in offsets])
    return block, pointers


def _measure(argument: Arg) -> tuple[int, int]:
    if isinstance(argument, bytes):
        if len(argument) != SIZE:
            raise InvalidInputError(f"A tensor map has {SIZE} bytes, but this argument has {len(argument)}.")
        return SIZE, ALIGNMENT
    size = _format(argument).size
    return size, 4 if argument[0] == "u32s" else size


def _format(argument: tuple[str, int | float | tuple[int, ...]]) -> struct.Struct:
    kind, value = argument
    if kind == "u32s" and isinstance(value, tuple):
        return struct.Struct(f"={len(value)}I")
    if kind not in _FORMATS or isinstance(value, tuple):
        kinds = ", ".join((*_FORMATS, "u32s"))
        raise InvalidInputError(
            f"A kernel argument is one of {kinds} with its value or values, but this is {argument!r}."
        )
    return _FORMATS[kind]


@functools.lru_cache(maxsize=4096)
def _config(shape: LaunchShape, stream: int) -> Any:
    # Records of one shape and stream share it: they differ only in their pointers, and nobody changes it.
    driver = api.cuda()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block, 1, 1
    config.sharedMemBytes = shape.dynamic_shared
    config.hStream = driver.CUstream(stream)
    attributes = []
    if shape.cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = attribute.value.clusterDim
        value.x, value.y, value.z = shape.cluster
        attributes.append(attribute)
    if shape.pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if attributes:  # an empty list would make cuda-python 12.9.0 free it twice
        config.attrs = attributes  # copied into an array that the config owns
        config.numAttrs = len(attributes)
    return config
