"""Generates Python functions for an operation's operands, as dataclasses generate ``__init__``. Each call runs them; a
loop over operands would take two microseconds longer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from deep_gemm.jit.driver.tensor_map import ADDRESS_ALIGNMENT
from deep_gemm.runtime import operators
from deep_gemm.runtime.generated import function
from deep_gemm.runtime.operation import KernelOperation, Parameter
from deep_gemm.settings import Settings

Places: TypeAlias = Sequence[int]
"""Addresses of the operands, in the operation's order."""


def entry_source(variants: Sequence[KernelOperation]) -> str:
    """The source of the function ``entry`` with the parameters of ``variants`` (see `calls.make_entry`). It makes a
    warm call, or calls `Calls.not_warm`. Everything that `KernelOperation.check`, `KernelOperation.launches` and the
    choice of a plan depend on is in ``key`` or in ``rest``, or a change of it forgets all calls."""
    taken = [_own(parameter) for parameter in variants[0].entry_arguments]
    lines = [f"def entry({', '.join(taken)}):"]
    if redirects := [_own(parameter) for parameter in variants[0].entry_arguments if parameter.use == "redirects"]:
        lines += [
            f"    if {' or '.join(f'{each} is not None' for each in redirects)}:",
            f"        redirect(dict(zip(names, ({', '.join(taken)},))), entry)",
            "        return",
        ]
    if variants[0].has_operator:
        refused = [_own(parameter) for parameter in variants[0].arguments if parameter.use == "must_be_none"]
        # What torch dispatches is recorded, which a launch of ours is not.
        name, traced = operators.name_of(variants), "(is_traced() or (modes() and is_recording()))"
        lines += [
            f"    if {' and '.join([traced, *(f'{each} is None' for each in refused)])}:",
            f"        register({name!r})",
            f"        traced.{name}({operators.call_text(variants, _own)})",
            "        return",
        ]
    for index, operation in enumerate(variants):
        body = _body(operation, f"calls{index}")
        if operation.absent:
            absent = [_own(x) for x in operation.arguments if x.name in operation.absent]
            lines.append(f"    if {' and '.join(f'{name} is None' for name in absent)}:")
            lines += [f"        {line}" for line in (*body, "return")]
        else:
            lines += [f"    {line}" for line in body]
    return "\n".join(lines) + "\n"


def _own(parameter: Parameter) -> str:
    return f"{parameter.name}_"  # none of the other names ends like this


def _body(operation: KernelOperation, calls: str) -> list[str]:
    own = {parameter.name: _own(parameter) for parameter in operation.arguments}
    pairs = sorted({argument.partition("[")[0] for argument in operation.operands.values() if "[" in argument})
    tensors = {
        name: argument.replace("[", "_").rstrip("]") if "[" in argument else own[argument]
        for name, argument in operation.operands.items()
    }
    arguments, operands = ", ".join(own.values()), ", ".join(tensors.values())
    output = tensors[operation.output]
    written = operation.outputs or (operation.output,)
    refused = [_own(parameter) for parameter in operation.arguments if parameter.use == "must_be_none"]
    plain = [
        parameter.name
        for parameter in operation.arguments
        if parameter.use != "must_be_none"
        and parameter.name not in (*pairs, *operation.operands.values(), *operation.absent)
    ]
    added = [parameter.name for parameter in operation.arguments if parameter.use == "internal"]  # of one type
    variables = [variable for name in operation.settings for variable in getattr(Settings, name).variables]
    key = [
        *(f"{name}.data_ptr()" for name in tensors.values()),
        *(f"{name}.shape" for name in tensors.values()),
        *([f"{tensors[operation.in_place]}.data_ptr() == {output}.data_ptr()"] if operation.in_place else []),
        # 0.0 equals -0.0, but a kernel may distinguish them.
        *(f"{own[name]} or repr({own[name]})" if name in operation.floats else own[name] for name in plain),
        "device",
        "raw_stream(device) if device >= 0 else None",
        "current_device() if device >= 0 else None",
        # None with gradients on, False without: `checks.check_tensors` warns where gradients end.
        "is_grad_enabled() and (" + " or ".join(f"{tensors[name]}.requires_grad" for name in written) + " or None)",
        "options.batch_invariant",
    ]
    signed = [argument for name, argument in tensors.items() if name not in operation.unsigned]
    rest = [
        # `stride` takes longer. The strides of dimensions of size 1 do not matter.
        *(f"{name}.is_contiguous() or {name}.stride()" for name in tensors.values()),
        *(f"{name}.dtype" for name in tensors.values()),
        *([" or ".join(f"{name}.is_neg()" for name in signed)] if signed else []),
        *(f"type({own[name]})" for name in pairs),
        *(f"{name} is None" for name in refused),
        # True and 1.0 equal 1, but a check may refuse one of them.
        *(f"{own[name]} is None or {own[name]} is False or type({own[name]})" for name in plain if name not in added),
        *(f"environment({variable.encode()!r})" for variable in variables),
    ]
    return [
        "try:",
        *(f"    {name}_0, {name}_1 = {own[name]}" for name in pairs),
        f"    device = device_of[{output}.__class__]({output})",
        f"    key = ({', '.join(key)})",
        f"    rest = ({', '.join(rest)},)",
        f"    call = {calls}.warm.get(key)",
        "except (TypeError, ValueError, AttributeError, RuntimeError, AssertionError):",
        # An argument is wrong, has no memory, or is a fake tensor. The check finds out which.
        f"    {calls}.not_warm(None, None, ({arguments},), ())",
        "    return",
        "if call is not None and call[0] == rest:",
        "    call[1]()",
        "else:",
        # An iterator in place of a pair is now exhausted. The check refuses it.
        *(f"    key = key if isinstance({own[name]}, (tuple, list)) else None" for name in pairs),
        f"    {calls}.not_warm(key, rest, ({arguments},), ({operands},))",
    ]


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
    return function(source, "fits", f"fits of {count} operands")


@functools.cache
def runner(
    count: int, has_scratch: bool, inside: tuple[tuple[int, int], ...], picks: tuple[tuple[int, ...], ...]
) -> Callable[..., Callable[[Places], None]]:
    """Makes the function of a call with several launches, from a function that allocates scratch memory and from the
    launches themselves. The addresses are those of the ``count`` operands, of the scratch memory, and of the parts
    ``inside`` these (the index of the whole, and the offset in bytes). ``picks`` are the indices of the addresses of
    each launch."""
    wholes = count + has_scratch
    at = [f"p{index}" for index in range(wholes + len(inside))]
    launches = [f"l{index}" for index in range(len(picks))]
    source = "\n".join(
        [
            "def make(new, launches):",
            f"    [{', '.join(launches)}] = launches",
            "    def run(at):",
            f"        {', '.join(at[:count])}, = at",
            *(["        scratch = new()", f"        {at[count]} = scratch.data_ptr()"] if has_scratch else []),
            # It is freed once all launches are queued.
            *(f"        {at[wholes + i]} = p{whole} + {offset}" for i, (whole, offset) in enumerate(inside)),
            *(
                f"        {launch}(({', '.join(at[index] for index in chosen)},))"
                for launch, chosen in zip(launches, picks, strict=True)
            ),
            "    return run",
        ]
    )
    return function(source, "make", f"run of {len(picks)} launches")
