"""The gate of all public functions: what a tensor must be before anything reads its sizes, strides or memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .errors import InvalidInputError

DTENSOR = "torch.distributed.tensor"
"""The module of DTensors, which is loaded where there may be some."""


def check_tensor(name: str, x: Any, dims: tuple[int, ...] | None = None, by_torch: bool = False) -> None:
    """Refuse everything except tensors with memory for all their elements, and with as many dimensions as ``dims``
    allows (any number if it is None). A kernel would read address 0, and every later CUDA call of the process would
    fail; torch on the CPU would read past the memory. Of a fake tensor only its shape is checked.

    ``by_torch``: only torch reads x. Then it may also be a meta tensor, or one whose memory only torch can find, as
    inside torch.func.vmap.
    """
    if torch.compiler.is_dynamo_compiling():
        return  # it knows no memory; the operator that is traced checks the rest
    if not isinstance(x, Tensor):
        from . import advice  # here, since first calls that are right shall import little

        raise InvalidInputError(
            f"{name} must be a torch.Tensor, but it is {kind_of(x)}.{advice.of_type(name, x, dims)}"
        )
    if wrong := _wrong_kind(x, by_torch):
        raise InvalidInputError(f"{name} {wrong}")
    if dims is not None and x.dim() not in dims:
        from . import advice

        known = " or ".join(map(str, dims)) if by_torch else dims[-1]
        instead = advice.of_rank(name, x, dims[-1])
        noun = "dimension" if known == 1 else "dimensions"
        raise InvalidInputError(f"{name} must have {known} {noun}, but it has {x.dim()}: {shape_of(x)}.{instead}")
    if x.numel() and not is_fake([x]) and (wrong := _without_memory(x, by_torch)):
        raise InvalidInputError(f"{name} {wrong}")


def _wrong_kind(x: Tensor, by_torch: bool) -> str:
    if isinstance(x, UninitializedTensorMixin):
        return "is an uninitialised parameter. Call its module once before, which gives it a shape."
    if x.is_quantized:
        return f"is a quantised tensor ({x.dtype}). Pass a plain tensor, and scales beside it."
    if x.is_nested:
        return "is a nested tensor. Pass a dense tensor, with padding where rows differ."
    if x.layout != torch.strided:
        return f"has the layout {x.layout}. Pass a dense tensor (.to_dense())."
    if getattr(x, "has_names", bool)():  # torch before 2.13
        return f"has names of dimensions, {getattr(x, 'names', ())}. Pass .rename(None)."
    if x.device.type == "meta" and not by_torch:
        return "is a meta tensor, which has a shape and no data. Materialise it first."
    return "is a view whose sign is applied when it is read. Call .resolve_neg() on it." if x.is_neg() else ""


def _without_memory(x: Tensor, by_torch: bool) -> str:
    try:
        address, has = x.data_ptr(), x.untyped_storage().nbytes()
    except RuntimeError:  # also NotImplementedError
        return (
            ""
            if by_torch
            else (
                f"is a {type(x).__name__} without memory of its own, as tensors are inside torch.func.vmap and other "
                "transforms. Call the function outside of the transform, on plain tensors."
            )
        )
    size = x.element_size()
    last = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    needs = (x.storage_offset() + last + 1) * size
    if (address or by_torch) and has >= needs:
        return ""
    return (
        f"has no memory: it needs {needs} bytes, and its storage has {has if address else 0}. The storage was freed or "
        "resized, as FSDP does between uses, or the tensor only wraps others, as a DTensor does. Gather the weights "
        "first, or pass the local tensor."
    )


def is_fake(tensors: Iterable[Any]) -> bool:
    """Whether one of them is a fake tensor, with which `torch.compile` traces: it has a shape, but no data."""
    return any(is_fake_type(type(tensor)) for tensor in tensors)


def refuse_unwritten(outputs: Mapping[str, Any], tensors: Iterable[Any]) -> None:
    """Refuse an output with memory if one of ``tensors`` is fake: nothing is computed then, and it would keep what it
    held."""
    wrong = [name for name, output in outputs.items() if isinstance(output, Tensor) and not is_fake([output])]
    if wrong and is_fake(tensors):
        raise InvalidInputError(
            f"{wrong[0]} has memory, but other tensors are fake, so that nothing would be written to it. Make all of "
            "them under one FakeTensorMode."
        )


def is_fake_type(kind: type) -> bool:
    """Whether its tensors are fake."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and issubclass(kind, module.FakeTensor)


def is_traced(tensors: Iterable[Any]) -> bool:
    """Whether a program is read, or one of them is fake: no memory may be looked at."""
    return torch.compiler.is_dynamo_compiling() or is_fake(tensors)


def is_sharded(tensors: Iterable[Any]) -> bool:
    """Whether one of them is a DTensor."""
    module = sys.modules.get(DTENSOR)
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor, for messages."""
    return tuple(x.shape)


def described(x: Tensor) -> str:
    """The dtype and the shape of a tensor, for messages."""
    return f"{x.dtype} {tuple(x.shape)}"


def shown(value: Any) -> str:
    """A value, for messages: of a tensor its type, since its elements are many, and may be on a GPU. Of numpy's numbers
    the type too: they look like Python's, which may be what is wrong."""
    if type(value).__module__ == "numpy":
        kind = f"of type numpy.{type(value).__name__}"
        return kind if getattr(value, "ndim", 0) else f"{value} {kind}"
    return kind_of(value) if isinstance(value, Tensor) else repr(value)


def kind_of(value: Any) -> str:
    """The type of a value, for messages."""
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
