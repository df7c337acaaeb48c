"""How products and casts are divided among ranks: operators of torch called with DTensors, and legal degrees.

A dimension of a product is divided in all operands that have it: rows (M), columns (N), batches and experts. If K is,
the result is a sum over ranks, which is `Partial`. Nothing is sent: operands must have such placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError
from deep_gemm.runtime.operation import KernelOperation
from deep_gemm.spec import SCALE_BLOCK

PACKED = 4
"""Scales in one int32."""


def legal_degrees(size: int, block: int = SCALE_BLOCK) -> list[int]:
    """Numbers of ranks among which ``size`` can be divided, in parts that are multiples of ``block``."""
    blocks = 0 if size % block else size // block
    return [1, *(degree for degree in range(2, blocks + 1) if blocks % degree == 0)]


def why_not_divided(what: str, size: int, degree: int, block: int = SCALE_BLOCK) -> str:
    """Why ``size`` cannot be divided among ``degree`` ranks, as a sentence without its end; "" if it can."""
    legal = legal_degrees(size, block)
    if degree in legal:
        return ""
    listed = ", ".join(map(str, legal))
    part = f"{size} / {degree}" + ("" if size % degree else f" = {size // degree}")
    must = f"a multiple of {block}, the size of a block of scales" if block > 1 else "a whole number"
    return f"{what} of a shard must be {must}, but it is {part}. Legal numbers of ranks are {listed}"


def register(
    name: str,
    library: torch.library.Library,
    operation: KernelOperation,
    parts: Sequence[tuple[str, str]],
    written: set[str],
) -> None:
    """Register the rules of operator ``name`` for DTensors. ``parts`` are the names of its arguments, and what they
    are of the operation's, such as ``a[0]``; ``written`` are those that it writes, or returns fresh ones of."""
    from torch.distributed.tensor import DTensor

    def rule(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = {argument: value for (argument, _), value in zip(parts, args, strict=False)} | dict(kwargs or {})
        _check(operation, {part: given.get(argument) for argument, part in parts})
        local = {argument: _local(value) if isinstance(value, DTensor) else value for argument, value in given.items()}
        made = func(**local)
        if made is None:
            return None
        models = [given[argument] for argument, part in parts if part in written and given.get(argument) is not None]
        fresh = [
            DTensor.from_local(x, y.device_mesh, y.placements, run_check=False, shape=y.shape, stride=y.stride())
            for x, y in zip([made] if isinstance(made, Tensor) else made, models, strict=True)
        ]
        return fresh[0] if isinstance(made, Tensor) else fresh

    torch.library.register_torch_dispatch(f"{library.ns}::{name}", DTensor, rule, lib=library)


def _local(x: Any) -> Tensor:
    with torch.no_grad():
        local: Tensor = x.to_local()
    return local.wait() if hasattr(local, "wait") else local


def _check(operation: KernelOperation, given: Mapping[str, Any]) -> None:
    """Refuse DTensors that are not divided in one of the ways that `_ways` lists, by each dimension of the mesh."""
    from torch.distributed.tensor import DTensor

    tensors = {part: value for part, value in given.items() if isinstance(value, Tensor)}
    axes = operation.axes(given.get("form"))
    if not axes:
        raise InvalidInputError(f"{operation.name} has no rule for DTensors. Call it with local tensors.")
    meshes = set()
    for part, x in tensors.items():
        if not isinstance(x, DTensor):
            title = operation.titles.get(name := part.partition("[")[0], name) + part.removeprefix(name)
            raise InvalidInputError(f"{title} must be a DTensor, as other operands are. Call DTensor.from_local first.")
        if part.partition("[")[0] not in axes:
            raise InvalidInputError(
                f"{operation.name} has no rule for {part} as a DTensor. Call it with local tensors."
            )
        meshes.add(x.device_mesh)
    if len(meshes) > 1:
        raise InvalidInputError(f"All operands must be on one mesh, but {', '.join(tensors)} are on {len(meshes)}.")
    (mesh,) = meshes
    letters = {part: _letters(axes, part, x) for part, x in tensors.items()}
    ways = _ways(_with_whole(letters, tensors))
    divided: dict[str, int] = {}
    for dim in range(mesh.ndim):
        found: dict[str, Any] = {part: x.placements[dim] for part, x in tensors.items()}  # type: ignore[attr-defined]
        letter = next((letter for letter, way in ways.items() if way == found), None)
        if letter is None:
            legal = "; ".join(_shown(way) for way in ways.values())
            raise InvalidInputError(
                f"Operands of {operation.name} cannot be divided so: {_shown(found)}. Redistribute them to one of: "
                f"{legal}."
            )
        divided[letter] = divided.get(letter, 1) * mesh.size(dim)
    for part in tensors:
        if _is_scales(part):
            values = "d" if part == "sfd" else part.replace("[1]", "[0]")
            _check_blocks(values, letters[values], tensors[values], tensors[part], divided)


def _letters(axes: Mapping[str, str], part: str, x: Tensor) -> str:
    """A letter for each dimension of an operand. Scales may be one for each row, or one for all; of an operand of a
    function of rows there may be one row for all."""
    whole = axes[part.partition("[")[0]]
    if x.dim() == len(whole) or "d" not in axes:
        return whole[len(whole) - x.dim() :]
    return "".join(letter for letter in whole if letter in axes["d"])[: x.dim()]


def _with_whole(letters: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The letters, capital ones for dimensions that have another size in d: with a gate a column of d is of two of b,
    which are on two ranks."""
    sizes: dict[str, set[int]] = {}
    for part, own in letters.items():
        for letter, size in zip(own, tensors[part].shape, strict=True):
            if not _is_scales(part):
                sizes.setdefault(letter, set()).add(size)
    whole = str.maketrans({letter: letter.upper() for letter, found in sizes.items() if len(found) > 1})
    return {part: own.translate(whole) for part, own in letters.items()}


def _is_scales(part: str) -> bool:
    return part.endswith("[1]") or part == "sfd"


def _ways(letters: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The legal placements of operands by the dimension that is divided; "" for none."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def place(part: str, letter: str) -> Any:
        if letter in letters[part]:
            return Shard(letters[part].index(letter))
        is_sum = letter not in letters.get("d", letter) and part in ("c", "d")
        return Partial() if is_sum else Replicate()

    divided = [letter for letter in dict.fromkeys("".join(letters.values())) if letter.islower()]
    ways = {letter: {part: place(part, letter) for part in letters} for letter in divided}
    return {"": dict.fromkeys(letters, Replicate()), **ways}


def _check_blocks(name: str, letters: str, values: Tensor, scales: Tensor, divided: Mapping[str, int]) -> None:
    """Refuse shards that end inside a block of scales."""
    for dim, letter in enumerate(letters):
        if values.dim() == scales.dim() and values.shape[dim] != scales.shape[dim]:
            block = SCALE_BLOCK * (PACKED if scales.dtype == torch.int32 else 1)
            if wrong := why_not_divided(f"{name}.shape[{dim}]", values.shape[dim], divided.get(letter, 1), block):
                raise InvalidInputError(f"{wrong}.")


def _shown(placements: Mapping[str, Any]) -> str:
    """Placements, for messages."""
    return ", ".join(
        f"{part.replace('[0]', '').replace('[1]', '_scales')} {_NAMES.get(str(place), place)}"
        for part, place in placements.items()
    )


_NAMES = {
    "R": "Replicate()",
    "P": "Partial()",
    "P(sum)": "Partial()",
    **{f"S({dim})": f"Shard({dim})" for dim in range(4)},
}
"""Placements are shown as torch's constructors."""
