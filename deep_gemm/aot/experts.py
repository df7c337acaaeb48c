"""The routed experts of a model on one GPU: how GPUs share them, and which operations multiply by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deep_gemm.aot.layers import (
    BATCHED_OPS,
    FP4_GROUPED,
    FP4_GROUPED_OPS,
    GROUPED,
    GROUPED_OPS,
    Degree,
    Layer,
    LayerPlan,
    Weight,
    is_masked,
    layers_of,
)
from deep_gemm.errors import InvalidInputError, UnsupportedError

_IN_GROUPS = GROUPED | FP4_GROUPED

ALIGNMENT = 128
"""The starts of groups and the number of all rows are multiples of this by default: each adds up to 127 rows."""

FEWER = "Give an ep (--ep) by which fewer GPUs share each expert, or a smaller tp."


def shares(experts: int, tp: int, ep: int) -> tuple[int, int]:
    """How many of the experts a GPU holds, and how many GPUs share each: `ep` GPUs share the experts, and tp / ep GPUs
    each expert if `tp` is more than `ep`. Raises InvalidInputError if `ep` does not divide the experts, or neither of
    `ep` and `tp` divides the other."""
    if ep > 1 and not experts:
        raise InvalidInputError(f"ep must be 1 for a model without routed experts, but it is {ep}.")
    if experts % ep:
        raise InvalidInputError(f"ep must divide the model's {experts} routed experts, but it is {ep}.")
    if experts and tp % ep and ep % tp:
        raise InvalidInputError(
            f"ep must divide tp or be a multiple of it, but ep is {ep} and tp is {tp}: tp / ep GPUs share each expert, "
            "or one has it whole. Give another ep."
        )
    return experts // ep, max(1, tp // ep)


def plan(
    modules: Iterable[tuple[str, Mapping[str, Weight]]],
    experts: int,
    chosen: int | None,
    tp: int,
    ep: int,
    blocks_fixed: bool,
) -> LayerPlan:
    """The grouped layers of a model's experts on one GPU. `modules` are experts by name, each with its weights by name;
    those that are alike are listed once. A token goes to `chosen` of the `experts` (None: to any number). Raises
    InvalidInputError where `shares` does, and where sizes are not multiples of the GPUs that share an expert."""
    groups, parts = shares(experts, tp, ep)
    one = layers_of(modules, parts, blocks_fixed, Degree("tp" if ep == 1 else "tp / ep", FEWER))
    # Engines make room for all experts that a token goes to, though some may be on other GPUs.
    copies, padding = ep * (chosen or groups), (groups + 1) * (ALIGNMENT - 1)
    found: list[Layer] = []
    for layer in one.layers:
        if layer.why_not or layer.op not in _IN_GROUPS:
            why_not = layer.why_not or f"experts run in FP8 or bfloat16, and {layer.op} has no form with groups."
            found.append(replace(layer, why_not=why_not, groups=groups))
            continue
        for x in in_groups(layer, groups):
            # A token goes to an expert once, and masked groups have no padding between them.
            found.append(replace(x, copies=ep) if is_masked(x.op) else replace(x, copies=copies, padding=padding))
    return LayerPlan(tuple(found), one.unknown)


def in_groups(layer: Layer, groups: int) -> list[Layer]:
    """A layer with a weight for each of `groups`: once for each form, or only for the form that its operation names.
    Raises UnsupportedError if its operation has no form with groups."""
    if layer.op in (*GROUPED_OPS, *FP4_GROUPED_OPS, *BATCHED_OPS):
        return [replace(layer, groups=groups)]
    if layer.op not in _IN_GROUPS:
        raise UnsupportedError(
            f"{layer.op} has no form with groups, but a shape has {groups} groups. Give one group, or another op: "
            f"{', '.join((*GROUPED, *GROUPED_OPS, *BATCHED_OPS))}."
        )
    return [replace(layer, op=op, groups=groups) for op in _IN_GROUPS[layer.op]]
