"""Checks that operations share: the only code that looks at a tensor's rank, strides, device and memory.

They run when a combination of tensors is first seen, never on the warm path, so they can take the time for exact
messages: `InvalidInputError` for what the caller can correct, `UnsupportedError` for what this version does not
support.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import EPILOGUES
from deep_gemm.runtime.calls import byte_range

from ..errors import InvalidInputError, UnsupportedError
from ..spec import Accumulate

MAX_SIZE = 2**31 - 1
"""Kernels count rows and columns in 32-bit signed integers (offsets are 64 bits wide)."""


def check_compiled_dims(compiled_dims: Any) -> str:
    """The dimensions to bake into the kernel, in the order m, n, k."""
    compiled_dims = compiled_dims or ""
    if not isinstance(compiled_dims, str) or set(compiled_dims) - set("mnk"):
        raise InvalidInputError(
            f"compiled_dims must be a string of the letters m, n and k, such as 'nk' or '', but it is "
            f"{compiled_dims!r}."
        )
    return "".join(letter for letter in "mnk" if letter in compiled_dims)


def check_bool(name: str, value: Any) -> None:
    """Refuse everything except True and False."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} must be True or False, but it is {value!r}.")


def check_epilogue(epilogue: Any) -> str:
    """The name of an epilogue, "none" for None. Refuses what is not in `reference.EPILOGUES`."""
    if epilogue is None:
        return "none"
    if isinstance(epilogue, str) and epilogue in EPILOGUES:
        return epilogue
    known = f"None or one of {', '.join(EPILOGUES)}" if EPILOGUES else "None: this version has no epilogue"
    raise UnsupportedError(f"epilogue must be {known}. Apply it to d after the call.")


def refuse_alpha(alpha: Any) -> None:
    """Refuse a keyword of later versions of the interface if it is not None."""
    if alpha is not None:
        raise UnsupportedError("alpha must be None: this version has no alpha. Apply it to d after the call.")


def pair(name: str, operand: Any) -> tuple[Tensor, Tensor]:
    is_sequence = isinstance(operand, (tuple, list))
    if not is_sequence or len(operand) != 2:
        kind = f"has {len(operand)} elements" if is_sequence else f"is {kind_of(operand)}"
        raise InvalidInputError(
            f"{name} must be a pair (tensor, scales), but it {kind}. An FP8 operand comes with its scales; "
            "per_token_cast_to_fp8 and per_block_cast_to_fp8 return such pairs."
        )
    return operand[0], operand[1]


def is_fake(tensors: Iterable[Any]) -> bool:
    """Whether one of them is a fake tensor, with which `torch.compile` traces: it has a shape, but no data."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and any(isinstance(tensor, module.FakeTensor) for tensor in tensors)


def check_tensors(
    named: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]], others: tuple[int, ...]
) -> torch.device:
    """Check that these are ordinary tensors with ``dims`` dimensions, or ``others``, all on one device, and that
    nothing would have to be recorded for d. Returns the device."""
    for name, tensor in named.items():
        check_plain(name, tensor, dims.get(name, others))
    device = check_devices(named)
    check_output_gradient("d", named["d"])
    return device


def check_plain(name: str, tensor: Any, dims: tuple[int, ...] = (2,)) -> None:
    """Refuse everything except ordinary tensors whose number of dimensions is one of ``dims``."""
    if not isinstance(tensor, Tensor):
        from .. import advice  # here, since first calls that are right shall import little

        instead = advice.of_type(name, tensor)
        raise InvalidInputError(f"{name} must be a torch.Tensor, but it is {kind_of(tensor)}.{instead}")
    if tensor.is_quantized:
        raise InvalidInputError(
            f"{name} is a quantised tensor ({tensor.dtype}). Pass a plain tensor, and scales beside it."
        )
    if tensor.is_nested:
        raise InvalidInputError(f"{name} is a nested tensor. Pass a dense tensor, with padding where rows differ.")
    if tensor.layout != torch.strided:
        raise InvalidInputError(f"{name} has the layout {tensor.layout}. Pass a dense tensor (.to_dense()).")
    if tensor.device.type == "meta":
        raise InvalidInputError(f"{name} is a meta tensor, which has a shape and no data. Materialise it first.")
    if tensor.is_neg():
        raise InvalidInputError(f"{name} is a view whose sign is applied when it is read. Call .resolve_neg() on it.")
    if tensor.dim() not in dims:
        from .. import advice

        raise InvalidInputError(
            f"{name} must have {dims[-1]} dimensions, but it has {tensor.dim()}: {shape_of(tensor)}."
            f"{advice.of_rank(name, tensor, dims[-1])}"
        )


def check_memory(named: Mapping[str, Tensor]) -> None:
    """Refuse tensors that have elements but no memory for them. A kernel would read address 0, and every later CUDA
    call of the process would fail."""
    for name, tensor in named.items():
        if tensor.numel() == 0:
            continue
        try:
            address, has = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        except RuntimeError:  # also NotImplementedError
            raise InvalidInputError(
                f"{name} is a {type(tensor).__name__} without memory of its own, as tensors are inside torch.func.vmap "
                "and other transforms. Call the function outside of the transform, on plain tensors."
            ) from None
        size = tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needs = (tensor.storage_offset() + last + 1) * size
        if address == 0 or has < needs:
            raise InvalidInputError(
                f"{name} has no memory: it needs {needs} bytes, and its storage has {has if address else 0}. The "
                "storage was freed or resized, as FSDP does between uses, or the tensor only wraps others, as a "
                "DTensor does. Gather the weights first, or pass the local tensor."
            )


def check_devices(named: Mapping[str, Tensor]) -> torch.device:
    devices = {tensor.device for tensor in named.values()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise InvalidInputError(f"all tensors must be on one device, but they are: {places}.")
    device = devices.pop()
    if device.type not in ("cuda", "cpu"):
        raise UnsupportedError(f"tensors on '{device.type}' devices are not supported: use CUDA, or the CPU reference.")
    return device


def check_output_gradient(name: str, tensor: Tensor) -> None:
    """Refuse an output that requires grad. Inputs may require grad; autograd records nothing for them."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(
            f"{name} requires grad, but this function writes into it and records nothing for autograd. "
            "Call it under torch.no_grad(), or pass a detached tensor."
        )


def check_sizes(name: str, x: Tensor) -> None:
    """Refuse dimensions that do not fit in 32-bit signed integers."""
    if max(x.shape) > MAX_SIZE:
        raise UnsupportedError(
            f"{name} is {shape_of(x)}: a dimension above {MAX_SIZE} is not supported. Split the call."
        )


def check_int32(name: str, x: Tensor) -> None:
    """Refuse a list of groups that is not contiguous int32."""
    if x.dtype != torch.int32:
        raise InvalidInputError(f"{name} must be torch.int32, but it is {x.dtype}. Pass .to(torch.int32).")
    if x.shape[0] > 1 and x.stride(0) != 1:
        raise InvalidInputError(f"{name} must be contiguous, but its stride is {x.stride(0)}. Pass .contiguous().")


def check_row_major(name: str, d: Tensor) -> None:
    """Refuse an output that is not row-major, or whose rows overlap."""
    rows, columns = d.shape
    if columns > 1 and d.stride(1) != 1:
        raise InvalidInputError(
            f"{name} must be row-major (stride 1 along its last dimension), but it is {shape_of(d)} with strides "
            f"{d.stride()}. Pass a row-major tensor and copy afterwards, or swap the operands to get the transpose."
        )
    if rows > 1 and d.stride(0) < columns:
        raise InvalidInputError(
            f"the rows of {name} overlap in memory: it is {shape_of(d)} with strides {d.stride()}, so rows would "
            "overwrite each other. Pass a tensor with rows of its own."
        )


def check_no_overlap(name: str, d: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Refuse a row-major output that shares an element with an input. Interleaved columns of one buffer share none."""
    start, end = byte_range(d)
    for other, tensor in inputs.items():
        other_start, other_end = byte_range(tensor)
        if start < other_end and other_start < end and _share_bytes(d, tensor):
            raise InvalidInputError(
                f"{name} and {other} share memory: {name} spans the addresses {start:#x} to {end:#x} and {other} "
                f"{other_start:#x} to {other_end:#x}. Results would be written over data still to be read; pass a "
                f"{name} of its own."
            )


def _share_bytes(d: Tensor, x: Tensor) -> bool:
    """Whether a row of ``d`` (rows, columns), whose rows are contiguous, contains a byte of an element of ``x``.

    Adjacent elements of ``x`` form a run. Each run is compared with all rows at once.
    """
    size, dims = x.element_size(), sorted(zip(x.stride(), x.shape, strict=True))
    run = size
    while dims and (dims[0][1] == 1 or dims[0][0] * size == run):
        run *= dims.pop(0)[1]
    base, rows = x.data_ptr() - d.data_ptr(), d.shape[0]
    width, step = d.shape[1] * d.element_size(), max(1, d.stride(0) * d.element_size())
    for at in itertools.product(*(range(count) for _, count in dims)):
        begin = base + sum(index * stride * size for index, (stride, _) in zip(at, dims, strict=True))
        # Rows that begin before the run ends, and end after it begins.
        first, last = (begin - width) // step + 1, (begin + run - 1) // step
        if max(first, 0) <= min(last, rows - 1):
            return True
    return False


def check_places(named: Mapping[str, Tensor]) -> Accumulate:
    """Check the memory of c and d: both are row-major, and d shares no memory with another operand, unless c is d.
    Returns the spec's ``accumulate``."""
    d, c = named["d"], named.get("c")
    if d.numel():
        check_row_major("d", d)
    inputs = {name: tensor for name, tensor in named.items() if name not in ("c", "d")}
    if c is None:
        check_no_overlap("d", d, inputs)
        return "none"
    if c.numel() and ((c.shape[1] > 1 and c.stride(1) != 1) or (c.shape[0] > 1 and c.stride(0) < c.shape[1])):
        raise InvalidInputError(
            f"c must be row-major with rows of its own, as d is, but it is {shape_of(c)} with strides {c.stride()}. "
            "Pass .contiguous()."
        )
    if _same(c, d):
        check_no_overlap("d", d, inputs)
        return "in place"
    check_no_overlap("d", d, {**inputs, "c": c})
    return "from c"


def _same(c: Tensor, d: Tensor) -> bool:
    """Whether c is d: the same elements at the same addresses."""
    strides = zip(c.shape, c.stride(), d.stride(), strict=True)
    return c.data_ptr() == d.data_ptr() and all(size <= 1 or one == other for size, one, other in strides)


def write_empty_sum(d: Tensor, c: Tensor | None, accumulate: Accumulate, epilogue: str = "none") -> None:
    """Write the result for K = 0: zeros, or c, with the epilogue applied."""
    with torch.inference_mode():  # d may be an inference tensor
        if accumulate == "none":
            d.zero_()
        elif c is not None and accumulate == "from c":
            d.copy_(c)
        if epilogue != "none":
            d.copy_(EPILOGUES[epilogue](d))


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor, for messages."""
    return tuple(x.shape)


def kind_of(value: Any) -> str:
    """The type of a value, for messages."""
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
