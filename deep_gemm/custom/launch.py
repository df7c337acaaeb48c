"""The launch of a user's kernel: grid, block, shared memory, and values that the caller does not give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import InvalidInputError
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import ADDRESS_ALIGNMENT, TensorMapSpec
from ..spec import align
from ..tensors import check_tensor
from .parameters import ELEMENTS, MAP_ELEMENTS, Declared, KernelParameter

Size = int | tuple[int, ...]

MAX_CLUSTER = 8
"""The largest cluster, in blocks, that every GPU with clusters can run."""

_DTYPES = {dtype: MAP_ELEMENTS[name] for name, dtype in ELEMENTS.items() if name in MAP_ELEMENTS}


@dataclass(frozen=True)
class LaunchConfig:
    """A launch: the result of a kernel's function.

    Args:
        grid, cluster: in blocks, up to three numbers.
        block: threads per block.
        shared: dynamic shared memory per block, in bytes.
        values: parameters that are not arguments of the function: sizes that it computes, and tensor maps.
        constants: Jinja fields of the source: numbers, text, True or False. Different constants need another binary.
        pdl: programmatic dependent launch: the kernel may start before the previous kernel of the stream has ended. It
            must then call ``wait_for_previous_kernel()`` of ``barrier.cuh`` before it accesses memory that the previous
            kernel may write.
        flops: floating-point operations of this call, for the monitor.

    >>> launch = deep_gemm.LaunchConfig(grid=4, block=128, values={"n": 512})
    """

    grid: Size
    block: int
    shared: int = 0
    cluster: Size = 1
    values: Mapping[str, int | float | TileMap] = field(default_factory=dict)
    constants: Mapping[str, str | int | bool] = field(default_factory=dict)
    pdl: bool = False
    flops: int = 0


@dataclass(frozen=True)
class TileMap:
    """The result of `tensor_map`: a tensor map without its address, and the tensor's current address."""

    spec: TensorMapSpec
    address: int
    row_bytes: int


def tensor_map(x: Tensor, box: tuple[int, ...], swizzle: int = 0, l2_promotion: int = 128) -> TileMap:
    """A tensor map, with which TMA copies tiles of ``x`` between global and shared memory.

    Args:
        x: a tensor with 1 to 5 dimensions, the last one contiguous, other strides multiples of 16 bytes. It may be a
            view of the parameter's tensor, with the same address.
        box: the size of the tile that one copy moves, in elements, in the order of x's dimensions; at most 256 in each.
        swizzle: 0, 32, 64 or 128 bytes. l2_promotion: 0, 64, 128 or 256 bytes.

    Elements outside of ``x`` read as zero and are not written. Raises InvalidInputError.

    >>> tiles = deep_gemm.tensor_map(torch.ones(64, 64), box=(8, 8))
    """
    check_tensor("x of tensor_map", x)
    if x.dtype not in _DTYPES:
        raise InvalidInputError(
            f"x of tensor_map must be a tensor of {', '.join(map(str, _DTYPES))}, but it is {x.dtype}."
        )
    if x.dim() == 0 or x.numel() == 0 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        raise InvalidInputError(
            f"x of tensor_map must have elements, and its last dimension must be contiguous, but it is "
            f"{tuple(x.shape)} with strides {x.stride()}."
        )
    if not isinstance(box, tuple) or len(box) != x.dim():
        raise InvalidInputError(f"box of tensor_map must have a size for each of {x.dim()} dimensions, not {box!r}.")
    size = x.element_size()
    strides, extent = [], x.shape[-1] * size
    for length, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        # A dimension of size 1 may have any stride.
        strides.append(stride * size if length > 1 else align(extent, ADDRESS_ALIGNMENT))
        extent = max(extent, length * strides[-1])
    spec = TensorMapSpec(
        dtype=_DTYPES[x.dtype],
        dims=tuple(reversed(x.shape)),
        strides=tuple(strides),
        box=tuple(reversed(box)),
        swizzle=swizzle,
        l2_promotion=l2_promotion,
    )
    return TileMap(spec, x.data_ptr(), x.shape[-1] * size)


def checked_shape(kernel: str, config: object) -> LaunchShape:
    """The launch that a function returned, checked. Raises InvalidInputError."""
    if not isinstance(config, LaunchConfig):
        raise InvalidInputError(
            f"the function of {kernel} must return a deep_gemm.LaunchConfig, or None where there is nothing to do, but "
            f"it returned {type(config).__name__}."
        )
    for name in ("block", "shared"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if name == "block" else 0):
            raise InvalidInputError(f"{name} of {kernel} must be a whole number, but it is {value!r}.")
    if config.block > 1024:
        raise InvalidInputError(f"block of {kernel} must be at most 1024 threads, but it is {config.block}.")
    grid, cluster = _three(kernel, "grid", config.grid), _three(kernel, "cluster", config.cluster)
    if max(grid[1:]) > 65535 or grid[0] >= 1 << 31:
        raise InvalidInputError(f"grid of {kernel} must be at most (2147483647, 65535, 65535), but it is {grid}.")
    if math.prod(cluster) > MAX_CLUSTER:
        raise InvalidInputError(f"cluster of {kernel} must be at most {MAX_CLUSTER} blocks, but it is {cluster}.")
    if any(size % part for size, part in zip(grid, cluster, strict=True)):
        raise InvalidInputError(f"grid of {kernel}, {grid}, must be a multiple of its cluster, {cluster}.")
    return LaunchShape(grid, config.block, config.shared, cluster, config.pdl is True)


def _three(kernel: str, name: str, size: Any) -> tuple[int, int, int]:
    sizes = size if isinstance(size, tuple) else (size,)
    whole = all(isinstance(part, int) and not isinstance(part, bool) and part >= 1 for part in sizes)
    if not 1 <= len(sizes) <= 3 or not whole:
        raise InvalidInputError(f"{name} of {kernel} must be one to three positive integers, but it is {size!r}.")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def checked_values(
    declared: Declared, config: LaunchConfig, given: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Numbers and tensor maps by parameter, of the caller or of ``config``. Raises InvalidInputError."""
    kernel, wanted = declared.kernel, set(declared.computed)
    if set(config.values) != wanted:
        missing, unknown = wanted - set(config.values), set(config.values) - wanted
        what = [f"{name} is missing" for name in sorted(missing)]
        what += [f"{name} is an argument or is not declared" for name in sorted(unknown)]
        raise InvalidInputError(
            f"values of {kernel} must give {', '.join(sorted(wanted)) or 'nothing'}, the parameters that are no "
            f"arguments of its function, but {' and '.join(what)}."
        )
    found: dict[str, Any] = {}
    for parameter in declared.parameters:
        value = config.values.get(parameter.name, given.get(parameter.name))
        if parameter.is_map:
            value = _map(kernel, parameter, value, tensors[parameter.operand])
        if parameter.is_map or not parameter.operand:
            found[parameter.name] = parameter.check(kernel, value)
    return found


def _map(kernel: str, parameter: KernelParameter, value: Any, tensor: Tensor) -> Any:
    if not isinstance(value, TileMap):
        return value  # `KernelParameter.check` refuses it
    where = f"{parameter.name} of {kernel}"
    if value.address != tensor.data_ptr() or value.spec.dtype != _DTYPES[tensor.dtype]:
        raise InvalidInputError(
            f"{where} must be a tensor map of {parameter.operand}, or of a view of it that begins where it begins."
        )
    if value.address % ADDRESS_ALIGNMENT:
        raise InvalidInputError(
            f"{where}: {parameter.operand} must start at a multiple of {ADDRESS_ALIGNMENT} bytes, but its address is "
            f"{value.address % ADDRESS_ALIGNMENT} past one. Pass a copy (.clone())."
        )
    if parameter.written and value.row_bytes % ADDRESS_ALIGNMENT:
        raise InvalidInputError(
            f"{where}: rows of {parameter.operand} have {value.row_bytes} bytes, and TMA writes whole units of "
            f"{ADDRESS_ALIGNMENT}, past the end of each row. Pad them, or write it through a pointer."
        )
    return Map(value.spec, parameter.operand)
