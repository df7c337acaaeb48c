"""Checks that operations share: the only code that looks at a tensor's rank, strides, device and memory.

They run when a combination of tensors is first seen, never on the warm path, so they can take the time for exact
messages: `InvalidInputError` for what the caller can correct, `UnsupportedError` for what this version does not
support.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import Finish
from deep_gemm.parts import MATRICES
from deep_gemm.runtime.calls import byte_range

from ..errors import InvalidInputError, UnsupportedError
from ..log import warn_once
from ..spec import Accumulate
from ..tensors import check_tensor as check_tensor
from ..tensors import is_fake as is_fake
from ..tensors import kind_of as kind_of
from ..tensors import shape_of as shape_of
from ..tensors import shown as shown

MAX_SIZE = 2**31 - 1
"""Kernels count rows and columns in 32-bit signed integers (offsets are 64 bits wide)."""


DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 128, 1 << 30
"""Of groups along M."""


def check_compiled_dims(compiled_dims: Any) -> str:
    """The dimensions to bake into the kernel, in the order m, n, k."""
    compiled_dims = "" if compiled_dims is None else compiled_dims
    if not isinstance(compiled_dims, str) or set(compiled_dims) - set("mnk"):
        raise InvalidInputError(
            f"compiled_dims must be a string of the letters m, n and k, such as 'nk' or '', but it is "
            f"{shown(compiled_dims)}."
        )
    return "".join(letter for letter in "mnk" if letter in compiled_dims)


def check_index(name: str, value: Any, least: int, most: int, what: str) -> int:
    """A whole number that is no bool: an int, or one of numpy."""
    try:
        found = least - 1 if isinstance(value, (bool, Tensor)) else operator.index(value)
    except TypeError:
        found = least - 1
    if not least <= found <= most:
        raise InvalidInputError(f"{name} must be {what}, but it is {shown(value)}.")
    return found


def check_alignment(alignment: Any) -> int:
    """The alignment of groups along M: a multiple of 16 that kernels can count with."""
    what = f"a positive multiple of 16 up to {MAX_ALIGNMENT}"
    found = check_index("alignment", alignment, 1, MAX_ALIGNMENT, what)
    if found % 16:
        raise InvalidInputError(f"alignment must be {what}, but it is {found}.")
    return found


def one_of_two(name: str, value: Any, other: str, named: Any) -> Any:
    """The value that an argument is given under its other name."""
    if value is not None:
        raise InvalidInputError(f"{name} and {other} are two names of one argument: give one of them.")
    return named


def check_group_sizes(ks: Any, what: str = "a list of K of each group, integers from 0 on") -> list[int]:
    """K of each group, whole numbers from 0 on."""
    if not isinstance(ks, (list, tuple)):
        raise InvalidInputError(f"ks_cpu must be {what}, but it is {shown(ks)}.")
    name = f"ks_cpu must be {what}: ks_cpu"
    return [check_index(f"{name}[{index}]", k, 0, MAX_SIZE, "an integer from 0 on") for index, k in enumerate(ks)]


def check_bool(name: str, value: Any) -> None:
    """Refuse everything except True and False."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} must be True or False, but it is {shown(value)}.")


def refuse_epilogue(epilogue: Any) -> None:
    """Refuse everything except None, where there are no epilogues."""
    if epilogue is not None:
        raise UnsupportedError("epilogue must be None here: these products have none. Apply it to d after the call.")


OPERAND = "An FP8 operand comes with its scales; per_token_cast_to_fp8 and per_block_cast_to_fp8 return such pairs."


def pair(name: str, operand: Any, instead: str = OPERAND) -> tuple[Tensor, Tensor]:
    """The values and the scales of an operand. ``instead`` says what to pass."""
    is_sequence = isinstance(operand, (tuple, list))
    if not is_sequence or len(operand) != 2:
        kind = f"has {len(operand)} elements" if is_sequence else f"is {kind_of(operand)}"
        raise InvalidInputError(f"{name} must be a pair (tensor, scales), but it {kind}. {instead}")
    return operand[0], operand[1]


def check_tensors(
    operation: str,
    named: Mapping[str, Any],
    dims: Mapping[str, tuple[int, ...] | None],
    others: tuple[int, ...] | None = None,
    written: Collection[str] = ("d",),
) -> torch.device:
    """Pass all tensors of a call through `check_tensor`, with ``dims`` dimensions, or ``others``. They must be on one
    device, which is returned, and nothing may have to be recorded for autograd of those that are ``written``.

    One warning a process says that gradients end at an operand that was computed with gradients. It comes when a call
    is checked: on the CPU always, on a GPU when its sizes, strides, dtypes, options, stream or the mode of gradients
    are new.
    """
    for name, tensor in named.items():
        check_tensor(name, tensor, dims.get(name, others))
    device = check_devices(named)
    for name, tensor in named.items():
        if name in written:
            check_output_gradient(name, tensor)
        elif tensor.grad_fn is not None and torch.is_grad_enabled():
            warn_once(
                "gradient",
                f"{operation}: {name} was computed with gradients ({tensor.grad_fn.name()}), but they end here, since "
                f"this function records nothing for autograd. To train, use the layers of deep_gemm.nn, or call it in "
                f"a torch.autograd.Function; otherwise under torch.no_grad(), or pass {name}.detach(). This "
                "warning comes once.",
            )
    return device


def check_flat(axes: Mapping[str, str], named: Mapping[str, Any]) -> None:
    """Refuse an operand that has two of its dimensions, letters in ``axes``, as one, if the others say how to divide
    it."""
    plain = {name: x for name, x in named.items() if type(x) in (Tensor, torch.nn.Parameter) and _has_strides(x)}
    flat = {name: x for name, x in plain.items() if x.dim() == len(axes.get(name, "")) - 1}
    if flat:
        from .. import advice

        whole = [(axes[name], x.shape) for name, x in plain.items() if x.dim() == len(axes.get(name, ""))]
        sizes = {letter: size for letters, shape in whole for letter, size in zip(letters, shape, strict=True)}
        for name, x in flat.items():
            if instead := advice.of_flat(name, x, axes[name], sizes):
                raise InvalidInputError(
                    f"{name} must have {x.dim() + 1} dimensions, but it has {x.dim()}: {shape_of(x)}.{instead}"
                )


def _has_strides(x: Tensor) -> bool:
    return not x.is_nested and x.layout is torch.strided


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
    if any(size > MAX_SIZE for size in x.shape):  # one by one: torch.compile may know none of them
        raise UnsupportedError(
            f"{name} is {shape_of(x)}: a dimension above {MAX_SIZE} is not supported. Split the call."
        )


def check_int32(name: str, x: Tensor) -> None:
    """Refuse a list of groups that is not contiguous int32."""
    if x.dtype != torch.int32:
        raise InvalidInputError(f"{name} must be torch.int32, but it is {x.dtype}. Pass .to(torch.int32).")
    if x.shape[0] > 1 and x.stride(0) != 1:
        raise InvalidInputError(f"{name} must be contiguous, but its stride is {x.stride(0)}. Pass .contiguous().")


def has_own_elements(x: Tensor) -> bool:
    """Whether each element has memory of its own: each dimension steps over all of the inner one."""
    dims = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    return all(stride > 0 for stride, _ in dims) and all(
        inner * size <= outer for (inner, size), (outer, _) in itertools.pairwise(dims)
    )


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


def check_written(name: str, x: Tensor, others: Mapping[str, Tensor], has_columns: bool) -> None:
    """Refuse an output whose rows overlap or that shares memory with others. Scales may have contiguous columns."""
    dense = x.t() if has_columns and x.stride(1) != 1 else x
    if dense is not x and dense.shape[1] > 1 and dense.stride(1) != 1:
        raise InvalidInputError(
            f"{name} must be contiguous along one dimension, but they have the strides {x.stride()}."
        )
    check_row_major(name, dense)
    check_no_overlap(name, dense, others)


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
    for name in ("c", *MATRICES):
        if name in named:
            _check_added(name, named[name])
    if c is None:
        same = next((name for name in MATRICES if name in named and _same(named[name], d)), "")
        inputs.pop(same, None)
        check_no_overlap("d", d, inputs)
        return "none"
    if _same(c, d):
        check_no_overlap("d", d, inputs)
        return "in place"
    check_no_overlap("d", d, {**inputs, "c": c})
    return "from c"


def _check_added(name: str, c: Tensor) -> None:
    if c.numel() and ((c.shape[1] > 1 and c.stride(1) != 1) or (c.shape[0] > 1 and c.stride(0) < c.shape[1])):
        raise InvalidInputError(
            f"{name} must be row-major with rows of its own, as d is, but it is {shape_of(c)} with strides "
            f"{c.stride()}. Pass .contiguous()."
        )


def _same(c: Tensor, d: Tensor) -> bool:
    """Whether c is d: the same elements at the same addresses."""
    strides = zip(c.shape, c.stride(), d.stride(), strict=True)
    return c.data_ptr() == d.data_ptr() and all(size <= 1 or one == other for size, one, other in strides)


def write_empty_sum(
    d: Tensor, c: Tensor | None, accumulate: Accumulate, finish: Finish | None = None, n: int = 0
) -> None:
    """Write the result for K = 0: zeros, or c, or the epilogue of these, where the product has ``n`` columns."""
    with torch.inference_mode():  # d may be an inference tensor
        if finish is not None:
            zeros = torch.zeros((d.shape[0], n), dtype=torch.float32, device=d.device)
            finish.write(d, (slice(None), slice(None)), zeros, c)
        elif accumulate == "none":
            d.zero_()
        elif c is not None and accumulate == "from c":
            d.copy_(c)
