"""Sending tokens to their experts, and adding the experts' rows: the launches around the products of a mixture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm import options
from deep_gemm.ops.cast_reference import cast_blocks
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry

from ..errors import InvalidInputError
from ..kernels.moe_kernels import GATED, MOST_EXPERTS
from ..records import record
from ..spec import SCALE_BLOCK, ActivateSpec, CombineSpec, DispatchSpec, DotsSpec, RouteSpec, align
from . import checks, layouts
from .row_functions import gated
from .table import DTYPES

TENSOR, OPTIONAL, PAIR = "Tensor", "Tensor | None", "tuple[Tensor, Tensor]"


_ROUTE_SIZES = ("experts", "alignment")


@record(frozen=True, eq=False)
class MoeOperands:
    """Checked operands."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    spec: Any


def _operands(named: Mapping[str, Tensor], spec: Any) -> MoeOperands | None:
    """None for fake tensors, and without tokens or columns."""
    sizes = (spec.choices, spec.columns) if isinstance(spec, ActivateSpec) else (spec.tokens, spec.width)
    if checks.is_fake(named.values()) or 0 in sizes:
        return None
    return MoeOperands(dict(named), next(iter(named.values())).device, spec)


def _one_launch(x: MoeOperands, spec: Any) -> LaunchSequence:
    strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
    return LaunchSequence((Step(spec, strides, {name: name for name in x.tensors}),))


class Dispatch(KernelOperation):
    """Give each choice of a token a row of its expert, and write the token there in FP8.

    x (tokens, width) is bfloat16, or E4M3 with scales sfx (tokens, ceil(width / 128)). chosen (tokens, top_k) int64 are
    experts; other numbers are none. ``out`` are the values and scales of rows, or without ``cast`` bfloat16 rows that
    tokens are copied to: (experts, rows, ..), then ``layout``
    gets the number of rows of each expert, or (rows, ..), then it gets the row at which each ends, and they begin at a
    multiple of ``alignment``. places (tokens, top_k) gets the row of each choice, or -1. With weights (tokens, top_k),
    factors gets the weight of each row. The number of rows of each expert is added to stats (experts,), int32.

    Only a chain calls it, which has checked what users give. ``given``: those of sfx, weights and stats that are there.
    """

    name = "moe_dispatch"
    outputs = ("values", "scales", "layout", "places", "factors", "stats")
    output = "values"
    has_operator = False

    def __init__(self, given: tuple[str, ...], cast: bool = True) -> None:
        self.given_operands, self.cast = given, cast
        optional = {"sfx": "sfx" in given, **dict.fromkeys(("weights", "factors"), "weights" in given)}
        optional["stats"] = "stats" in given
        self.parameters = (
            *(Parameter(name, TENSOR) for name in ("x", "chosen", "layout", "places")),
            Parameter("out", PAIR if cast else TENSOR),
            Parameter("alignment", "int"),
            *(Parameter(name, OPTIONAL, None) for name, there in optional.items() if there),
        )
        names = "x", "chosen", "layout", "places", *(name for name, there in optional.items() if there)
        self.operands = {name: name for name in names}
        self.operands |= {"values": "out[0]", "scales": "out[1]"} if cast else {"values": "out"}

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands | None:
        """None if there is nothing to send."""
        given = self.given(arguments, named_arguments)
        out = given["out"] if self.cast else (given["out"],)
        named = {name: given[name] for name in self.operands if name in given}
        named |= dict(zip(("values", "scales"), out, strict=False))
        x, values = named["x"], named["values"]
        masked = values.dim() == 3
        spec = DispatchSpec(
            *(x.shape[0], x.shape[1], named["layout"].shape[0], named["chosen"].shape[1]),
            values.shape[1] if masked else given["alignment"],
            masked,
            DTYPES[x.dtype],
            (*(name for name in ("weights", "stats") if name in named), *([] if self.cast else ["copied"])),
        )
        return _operands(named, spec)

    def launches(self, x: MoeOperands, device: int) -> LaunchSequence:
        """One launch."""
        return _one_launch(x, replace(x.spec, num_sms=options.num_sms_for(device)))

    def reference(self, x: MoeOperands) -> None:
        """In torch."""
        spec, given = x.spec, x.tensors
        with torch.inference_mode():
            chosen = given["chosen"].flatten()
            expert = chosen.masked_fill((chosen < 0) | (chosen >= spec.experts), spec.experts)
            found = expert.bincount(minlength=spec.experts + 1)[: spec.experts]
            counts = found.clamp(max=spec.room) if spec.masked else found
            room = counts.clone().fill_(spec.room) if spec.masked else (counts + spec.room - 1) // spec.room * spec.room
            starts = room.cumsum(0) - room
            order = expert.argsort(stable=True)[: int(found.sum())]  # of the choices that are experts
            rank = torch.arange(len(order), device=x.device) - (found.cumsum(0) - found)[expert[order]]
            order, rank = order[kept := rank < counts[expert[order]]], rank[kept]
            rows = starts[expert[order]] + rank
            given["layout"].copy_(counts if spec.masked else starts + counts)
            given["places"].fill_(-1).view(-1)[order] = rows.int()
            values, scales = given["x"], given.get("sfx")
            if scales is None and self.cast:
                values, scales = cast_blocks(values.detach(), 1, SCALE_BLOCK, False)
            token = order // spec.top_k
            place = (rows // spec.room, rows % spec.room) if spec.masked else (rows,)
            bits = torch.uint8 if self.cast else torch.int16
            given["values"].view(bits)[place] = values.view(bits)[token]
            if scales is not None:
                given["scales"][place] = scales[token]
            if "weights" in given:
                given["factors"].view(-1)[rows] = given["weights"].flatten()[order]
            if "stats" in given:
                given["stats"].add_(counts)


class Combine(KernelOperation):
    """Add the rows of each token's choices in their order, in float32, and round once.

    x (rows, width) or (experts, rows, width) bfloat16; places (tokens, top_k) int32, of `Dispatch`; y (tokens, width)
    bfloat16. With weights (tokens, top_k) float32, each row is multiplied by its weight first. With bias (experts,
    width) bfloat16 that of its expert, by chosen (tokens, top_k) int64, is added before: only a chain has it.
    """

    name = "moe_combine"
    output = "y"

    def __init__(self, weighted: bool, biased: bool = False) -> None:
        names = ("x", "places", *(["weights"] if weighted else []), *(["chosen", "bias"] if biased else []), "y")
        self.parameters = (
            *(Parameter(name, TENSOR) for name in ("x", "places", *(["chosen", "bias"] if biased else []))),
            Parameter("weights", OPTIONAL, None),
            Parameter("y", TENSOR),
        )
        self.operands = {name: name for name in names}
        self.absent = () if weighted else ("weights",)

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands | None:
        """None if there is nothing to add."""
        named = self.given(arguments, named_arguments)
        named = {name: named[name] for name in self.operands}
        tokens, width = named["y"].shape
        _check_rows(self.name, named, "y", "y")
        return _operands(
            named, CombineSpec(tokens, width, named["places"].shape[1], "weights" in named, "bias" in named)
        )

    def launches(self, x: MoeOperands, device: int) -> LaunchSequence:
        """One launch."""
        return _one_launch(x, x.spec)

    def reference(self, x: MoeOperands) -> None:
        """In float32, as the kernel."""
        places, y = x.tensors["places"].long(), x.tensors["y"]
        rows = x.tensors["x"].flatten(0, -2)
        with torch.inference_mode():
            total = torch.zeros(y.shape, device=y.device)
            for choice in range(places.shape[1]):
                own, used = places[:, choice], (places[:, choice] >= 0)[:, None]
                each = rows[own.clamp(min=0)].float() if len(rows) else total
                if "bias" in x.tensors:
                    each = each + x.tensors["bias"][torch.where(used[:, 0], x.tensors["chosen"][:, choice], 0)]
                if "weights" in x.tensors:
                    each = each * x.tensors["weights"][:, choice, None]
                total = torch.where(used, total + each, total)
            y.copy_(total)


class Dots(KernelOperation):
    """The dot products, in float32, of each token's row with the rows of its choices: out (tokens, top_k) float32.

    x (any rows, width) bfloat16; places (tokens, top_k) int32: the row of each choice, or -1 for a product of 0; rows
    (tokens, width) bfloat16.
    """

    name = "moe_dots"
    parameters = tuple(Parameter(name, TENSOR) for name in ("x", "places", "rows", "out"))
    operands = MappingProxyType({name: name for name in ("x", "places", "rows", "out")})
    output = "out"
    unsigned = ("places",)

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands | None:
        """None if there is nothing to multiply."""
        named = self.given(arguments, named_arguments)
        tokens, width = named["rows"].shape
        _check_rows(self.name, named, "rows", "out")
        return _operands(named, DotsSpec(tokens, width, named["places"].shape[1]))

    def launches(self, x: MoeOperands, device: int) -> LaunchSequence:
        """One launch."""
        return _one_launch(x, x.spec)

    def reference(self, x: MoeOperands) -> None:
        """In float32."""
        places, out = x.tensors["places"].long(), x.tensors["out"]
        with torch.inference_mode():
            rows = x.tensors["x"]
            each = rows[places.clamp(min=0)].float() if len(rows) else rows.new_zeros(*places.shape, rows.shape[1])
            found = (each * x.tensors["rows"][:, None].float()).sum(2)
            out.copy_(found.masked_fill(places < 0, 0))


class Route(KernelOperation):
    """Give each choice of a token a row of its expert: see `deep_gemm.nn.Routing`, whose fields are written.

    chosen, rows (tokens, top_k) int64; places (tokens, top_k) int32; of_rows (capacity,) int64; index, labels
    (capacity,) int32; sizes (experts,) int32, which stay as they are without tokens. Experts' rows begin at multiples
    of ``alignment``.
    """

    name = "moe_route"
    outputs = ("rows", "places", "of_rows", "index", "labels", "sizes")
    output = "rows"
    kept = ("sizes",)
    operands = MappingProxyType({name: name for name in ("chosen", *outputs)})
    parameters = (*(Parameter(name, TENSOR) for name in operands), *(Parameter(name, "int") for name in _ROUTE_SIZES))
    unsigned = tuple(operands)

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands | None:
        """None if there is nothing to choose."""
        given = self.given(arguments, named_arguments)
        named = {name: given[name] for name in self.operands}
        experts, alignment = given["experts"], checks.check_alignment(given["alignment"])
        dims = dict.fromkeys(("chosen", "rows", "places"), (2,))
        checks.check_tensors(self.name, named, dims, (1,), self.outputs)
        choices, capacity = tuple(named["chosen"].shape), tuple(named["of_rows"].shape)
        wide, shapes = ("chosen", "rows", "of_rows"), {"sizes": (experts,)} | dict.fromkeys(dims, choices)
        for name, tensor in named.items():
            dtype, shape = torch.int64 if name in wide else torch.int32, shapes.get(name, capacity)
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise InvalidInputError(
                    f"{name} must be {dtype} {shape}, but it is {tensor.dtype} {checks.shape_of(tensor)}."
                )
        if checks.is_fake(named.values()):
            return None
        checks.check_index("experts", experts, 1, MOST_EXPERTS, f"a whole number from 1 to {MOST_EXPERTS}")
        for name, tensor in named.items():
            checks.check_sizes(name, tensor)
            if not tensor.is_contiguous():
                raise InvalidInputError(f"{name} must be contiguous, but its strides are {tensor.stride()}.")
            if name in self.outputs:
                others = {other: x for other, x in named.items() if other != name}
                checks.check_no_overlap(name, tensor.view(1, -1), others)
        if capacity[0] < (least := most_rows(math.prod(choices), experts, alignment)):
            raise InvalidInputError(f"of_rows must have {least} elements or more, but it has {capacity[0]}.")
        if 0 in choices:
            return None
        spec = RouteSpec(choices[0], experts, choices[1], alignment, capacity[0])
        return MoeOperands(named, named["chosen"].device, spec)

    def launches(self, x: MoeOperands, device: int) -> LaunchSequence:
        """One launch."""
        return _one_launch(x, replace(x.spec, num_sms=options.num_sms_for(device)))

    def reference(self, x: MoeOperands) -> None:
        """See `routed`."""
        spec, given = x.spec, x.tensors
        with torch.inference_mode():
            found = routed(given["chosen"], spec.experts, spec.room, spec.capacity)
            for name, tensor in zip(self.outputs, found, strict=True):
                given[name].copy_(tensor)


class Activate(KernelOperation):
    """The activation of gate and up of the rows that choices have; other rows are neither read nor written.

    x (rows, 2 * columns) or (experts, rows, 2 * columns) bfloat16; places (tokens, top_k) int32, of `Dispatch`. ``out``
    is bfloat16 like x, or for ``fp8`` E4M3 and scales of 1 x 128. With bias (experts, 2 * columns) bfloat16 that of the
    choice's expert, by chosen (tokens, top_k) int64, is added before, in float32. Only a chain calls it.
    """

    name = "moe_activate"
    outputs = ("values", "scales")
    output = "values"
    has_operator = False

    def __init__(self, function: str, fp8: bool, biased: bool) -> None:
        self.function, self.fp8 = function, fp8
        names = "x", "places", *(["chosen", "bias"] if biased else [])
        self.parameters = (
            *(Parameter(name, TENSOR) for name in names),
            Parameter("out", PAIR if fp8 else TENSOR),
            Parameter("limit", "float"),
        )
        self.operands = {name: name for name in names}
        self.operands |= {"values": "out[0]", "scales": "out[1]"} if fp8 else {"values": "out"}

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands | None:
        """None if there is nothing to compute."""
        given = self.given(arguments, named_arguments)
        named = {name: given[name] for name in self.operands if name in given}
        named |= dict(zip(("values", "scales"), given["out"] if self.fp8 else (given["out"],), strict=False))
        *front, columns = named["values"].shape
        spec = ActivateSpec(
            *(self.function, named["places"].numel(), math.prod(front), columns, front[1] if len(front) == 2 else 0),
            *("e4m3" if self.fp8 else "bf16", "bias" in named, float(given["limit"])),
        )
        return _operands(named, spec)

    def launches(self, x: MoeOperands, device: int) -> LaunchSequence:
        """One launch."""
        return _one_launch(x, x.spec)

    def reference(self, x: MoeOperands) -> None:
        """In float64, rounded to float32 first."""
        spec, given = x.spec, x.tensors
        with torch.inference_mode():
            used = given["places"] >= 0
            rows = given["places"][used].long()
            both = given["x"].flatten(0, -2)[rows].double()
            if spec.biased:
                both = both + given["bias"][given["chosen"][used]].double()
            interleaved, is_oai = GATED[spec.function]
            found = gated(both, is_oai, interleaved, spec.limit).float()
            place = (rows // spec.room, rows % spec.room) if spec.room else (rows,)
            if self.fp8:
                values, scales = cast_blocks(found, 1, SCALE_BLOCK, False)
                given["values"].view(torch.uint8)[place] = values.view(torch.uint8)
                given["scales"][place] = scales
            else:
                given["values"][place] = found.to(torch.bfloat16)


def _check_rows(name: str, named: Mapping[str, Tensor], of_tokens: str, written: str) -> None:
    """Check bfloat16 rows x and ``of_tokens``, and what there is of each choice."""
    checks.check_tensors(name, named, {}, (2, 3), (written,))
    (tokens, width), (_, top_k) = named[of_tokens].shape, named["places"].shape
    of_choices = {"places": torch.int32, "weights": torch.float32, "out": torch.float32}
    for each, tensor in named.items():
        dtype, shape = of_choices.get(each, torch.bfloat16), (*tensor.shape[:-1], width)
        if each in of_choices:
            shape = tokens, top_k
        if each != "chosen" and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
            raise InvalidInputError(
                f"{each} must be {dtype} {shape}, but it is {tensor.dtype} {checks.shape_of(tensor)}."
            )
    if width % 8:
        raise InvalidInputError(f"x must have a multiple of 8 columns, but it is {checks.shape_of(named['x'])}.")
    if checks.is_fake(named.values()):
        return
    for each, tensor in named.items():
        checks.check_sizes(each, tensor)
        if each in of_choices and not tensor.is_contiguous():
            raise InvalidInputError(f"{each} must be contiguous, but its strides are {tensor.stride()}.")
        if each in ("x", "y") and tensor.numel():
            layouts.check_stride(each, tensor, tensor.stride(-2) if tensor.shape[-2] > 1 else 0)
    others = {each: x for each, x in named.items() if each != written}
    checks.check_written(written, named[written], others, has_columns=False)


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The choices ``chosen`` (tokens, top_k) in the order of their experts, and of the tokens of each: the expert of
    each choice, its place in ``chosen``, and how many choices each expert has. Those of no expert are the last, and
    have the number ``experts``."""
    dropped = (chosen < 0) | (chosen >= experts)
    expert, order = chosen.masked_fill(dropped, experts).flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=chosen.device), right=True)
    return expert, order, ends.diff(prepend=ends.new_zeros(1))


def routed(chosen: Tensor, experts: int, alignment: int, capacity: int) -> tuple[Tensor, ...]:
    """What `Route` writes, by torch."""
    device, (tokens, top_k) = chosen.device, chosen.shape
    expert, order, counts = by_expert(chosen, experts)
    sizes = (counts + alignment - 1) // alignment * alignment
    padding = sizes - counts
    shift = padding.cumsum(0) - padding  # from places without padding to rows
    dropped = expert == experts
    row = torch.arange(tokens * top_k, device=device) + shift[expert.clamp(max=experts - 1)]
    row = row.masked_fill(dropped, capacity - 1)
    labels = torch.full((capacity,), -1, dtype=torch.int32, device=device)
    rows = torch.empty_like(row).scatter_(0, order, row).view(tokens, top_k)
    of_rows = torch.full((capacity,), tokens, device=device).scatter_(
        0, row, (order // top_k).masked_fill(dropped, tokens)
    )
    labels = labels.scatter_(0, row, expert.int().masked_fill(dropped, -1))
    places = rows.int().masked_fill((chosen < 0) | (chosen >= experts), -1)
    return rows, places, of_rows, of_rows.int(), labels, sizes.int()


def most_rows(choices: int, experts: int, alignment: int) -> int:
    """Rows that are enough for any choice of experts, if each expert's begin at a multiple of the alignment."""
    return align(choices + min(experts, choices) * (alignment - 1), alignment)


combine = make_entry(Combine(False), Combine(True))
"""Arguments: x, places, weights or None, y. See `Combine`."""
dots = make_entry(Dots())
"""Arguments: x, places, rows, out. See `Dots`."""
route = make_entry(Route())
"""Arguments: chosen, rows, places, of_rows, index, labels, sizes, experts, alignment. See `Route`."""
