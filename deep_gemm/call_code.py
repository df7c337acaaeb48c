"""Generates Python functions for an operation's operands, as dataclasses generate ``__init__``. Each call runs them; a
loop over operands would take two microseconds longer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .jit.driver.tensor_map import ADDRESS_ALIGNMENT
from .operation import Operation

Places: TypeAlias = Sequence[int]
"""Addresses of the operands, in the operation's order."""


def entry_source(operation: Operation) -> str:
    """The source of the function ``entry`` with the operation's parameters. It makes a warm call, or calls
    `Calls.first`."""
    pairs = sorted({argument.partition("[")[0] for argument in operation.operands.values() if "[" in argument})
    tensors = [argument.replace("[", "_").rstrip("]") for argument in operation.operands.values()]
    output = operation.operands[operation.output]
    written = operation.outputs or (operation.output,)
    plain = [
        name for name in operation.parameters if name not in (*pairs, *operation.operands.values(), *operation.unused)
    ]
    in_place = operation.operands[operation.in_place] if operation.in_place else ""
    key = [
        *(f"{name}.data_ptr()" for name in tensors),
        *(f"{name}.shape" for name in tensors),
        *(f"{name}.stride()" for name in tensors),
        *(f"{name}.dtype" for name in tensors),
        *(f"{operation.operands[name]}.requires_grad and is_grad_enabled()" for name in written),
        *(f"{name} is None" for name in operation.unused),
        *([f"{in_place}.data_ptr() == {output}.data_ptr()"] if in_place else []),
        # 0.0 equals -0.0, but a kernel may distinguish them.
        *(f"{name} or repr({name})" if name in operation.floats else name for name in plain),
        "device",
        "raw_stream(device) if device >= 0 else None",
        "current_device() if device >= 0 else None",
        "choices.batch_invariant",
    ]
    lines = [
        f"def entry({', '.join(operation.parameters)}):",
        "    try:",
        *(f"        {name}_0, {name}_1 = {name}" for name in pairs),
        f"        device = {output}.get_device()",
        f"        key = ({', '.join(key)})",
        "        call = calls.warm.get(key)",
        "    except (TypeError, ValueError, AttributeError, RuntimeError, AssertionError):",
        # An argument is wrong, has no memory, or is a fake tensor on a GPU that this torch is not built for. The check
        # finds out which.
        f"        calls.first(None, ({', '.join(operation.parameters)},), ())",
        "        return",
        "    if call is not None:",
        "        call()",
        "    else:",
        # An iterator in place of a pair is now exhausted. The check refuses it.
        *(f"        key = key if isinstance({name}, (tuple, list)) else None" for name in pairs),
        f"        calls.first(key, ({', '.join(operation.parameters)},), ({', '.join(tensors)},))",
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def fits(
    count: int, written: tuple[int, ...], same: int = -1, apart: bool = True
) -> Callable[[Places, Places, Places], bool]:
    """`Replay.fits` for ``count`` operands. ``written`` are the outputs, and ``same`` is the operand that is the first
    output itself. ``apart``: outputs share no memory with other operands."""
    at, first, size = ([f"{letter}{index}" for index in range(count)] for letter in "pfs")
    moved = " | ".join(f"({p} ^ {f})" for p, f in zip(at, first, strict=True))
    ranges = [
        f"{at[i]} == {at[out]}" if i == same else f"(e{out} <= {at[i]} or {at[i]} + {size[i]} <= {at[out]})"
        for place, out in enumerate(written)
        for i in range(count)
        if apart and i not in written[: place + 1]
    ]
    source = "\n".join(
        [
            "def fits(first, sizes, at):",
            f"    {', '.join(at)}, = at",
            f"    {', '.join(first)}, = first",
            f"    if ({moved}) % {ADDRESS_ALIGNMENT} or not ({' and '.join(at)}):",
            "        return False",
            f"    {', '.join(size)}, = sizes",
            *(f"    e{out} = {at[out]} + {size[out]}" for out in written),
            f"    return {' and '.join(ranges) or 'True'}",
        ]
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<deep_gemm fits of {count} operands>", "exec"), namespace)
    found: Callable[[Places, Places, Places], bool] = namespace["fits"]
    return found
