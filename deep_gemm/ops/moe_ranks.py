"""A mixture of experts of which each of several ranks has a part: ranks pull tokens, and return rows to their owners.

What ranks exchange lies in buffers that each can address, the fields of `FIELDS`. All ranks make the same calls in the
same order. Results are those of one rank with all experts, bit for bit.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm import options
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry

from ..errors import InvalidInputError, UnsupportedError
from ..spec import SCALE_BLOCK, MeetSpec, PullSpec, ReturnSpec, align, ceil_div
from . import checks
from .chain import Chain, Layout, Link, Links, Named, pair
from .checks import MAX_SIZE
from .layouts import check_stride
from .moe_chain import (
    ALIGNMENT,
    BF16,
    DOWN,
    E4M3,
    F32,
    GATE_UP,
    I32,
    MOST_MASKED,
    check_clamp,
    check_each,
    memory_of_rows,
    send_and_multiply,
)
from .moe_rows import OPTIONAL, PAIR, TENSOR, Combine, MoeOperands, most_rows

FIELDS = ("x", "x_sf", "topk_idx", "topk_weights", "slots", "flags")
"""What ``peers`` (ranks, 6) int64 has the addresses of, for each rank: tokens (most, width) E4M3, their scales (most,
width / 128), choices (most, top_k) int64, their weights float32, a row of bfloat16 for each choice, and two int32 for
each rank, zeros at first."""

MOST_RANKS = 32
PATIENCE = 60.0
"""Seconds that a rank on a CPU waits for others."""


def _at(peers: Tensor, rank: int, field: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A field of a rank in this process, on a CPU."""
    if peers.device.type != "cpu":
        raise UnsupportedError("the reference of experts of several ranks runs on a CPU alone. Unset DG_FALLBACK.")
    count = math.prod(shape) * dtype.itemsize
    data = (ctypes.c_ubyte * count).from_address(int(peers[rank, FIELDS.index(field)]))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


class _OfRanks(KernelOperation):
    """One launch of a chain, which has checked what users give."""

    has_operator = False

    def launches(self, x: MoeOperands, device: int) -> LaunchSequence:
        strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
        return LaunchSequence(
            (Step(self.spec(x, options.num_sms_for(device)), strides, {name: name for name in x.tensors}),)
        )

    def spec(self, x: MoeOperands, num_sms: int) -> Any:
        """What is launched."""
        return x.spec


class Meet(_OfRanks):
    """Wait until all ranks have come to this meeting, ``which`` of the call."""

    name, output, outputs = "moe_meet", "epochs", ("epochs",)
    parameters = (
        *(Parameter(name, TENSOR) for name in ("peers", "epochs")),
        *(Parameter(name, "int") for name in ("rank", "which")),
    )
    operands = MappingProxyType({name: name for name in ("peers", "epochs")})

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands:
        given = self.given(arguments, named_arguments)
        peers = given["peers"]
        spec = MeetSpec(given["rank"], peers.shape[0], given["which"])
        return MoeOperands({"peers": peers, "epochs": given["epochs"]}, peers.device, spec)

    def reference(self, x: MoeOperands) -> None:
        """Raises RuntimeError if a rank does not come."""
        spec, peers, epochs = x.spec, x.tensors["peers"], x.tensors["epochs"]
        epoch, every = int(epochs[spec.which]) + 1, slice(spec.which * spec.ranks, (spec.which + 1) * spec.ranks)
        flags = [_at(peers, rank, "flags", (2 * spec.ranks,), I32) for rank in range(spec.ranks)]
        for of_rank in flags:
            of_rank[every][spec.rank] = epoch
        end = time.monotonic() + PATIENCE
        while bool((flags[spec.rank][every] < epoch).any()):
            if time.monotonic() > end:
                missing = (flags[spec.rank][every] < epoch).nonzero().flatten().tolist()
                raise RuntimeError(f"rank {spec.rank} has waited {PATIENCE:g} s for the ranks {missing}.")
            time.sleep(1e-4)
        epochs[spec.which] = epoch


class Pull(_OfRanks):
    """Copy the tokens of all ranks that chose this one's ``experts``, and their choices as numbers of these experts."""

    name, output = "moe_pull", "values"
    outputs = ("values", "scales", "chosen", "weights", "slots_of")
    parameters = (
        *(Parameter(name, TENSOR) for name in ("peers", "chosen", "weights", "slots_of")),
        Parameter("out", PAIR),
        *(Parameter(name, "int") for name in ("rank", "experts")),
    )
    operands = MappingProxyType(
        {name: name for name in ("peers", "chosen", "weights", "slots_of")} | {"values": "out[0]", "scales": "out[1]"}
    )

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands:
        given = self.given(arguments, named_arguments)
        (values, scales), ranks = given["out"], given["peers"].shape[0]
        tensors = {name: given[name] for name in self.operands if name in given} | {"values": values, "scales": scales}
        tokens, top_k = given["slots_of"].shape
        spec = PullSpec(
            *(given["rank"], ranks, tokens, values.shape[1], given["experts"], ranks * given["experts"], top_k)
        )
        return MoeOperands(tensors, values.device, spec)

    def spec(self, x: MoeOperands, num_sms: int) -> PullSpec:
        return PullSpec(**{**vars(x.spec), "num_sms": num_sms})

    def reference(self, x: MoeOperands) -> None:
        """In torch."""
        spec, given, tokens = x.spec, x.tensors, x.spec.tokens
        blocks, first = given["scales"].shape[1], spec.rank * spec.experts
        with torch.inference_mode():
            for rank in range(spec.ranks):
                rows = slice(rank * tokens, (rank + 1) * tokens)
                all_chosen = _at(given["peers"], rank, "topk_idx", (tokens, spec.top_k), torch.int64)
                own = all_chosen - first
                here = (own >= 0) & (own < spec.experts)
                given["chosen"][rows] = own.masked_fill(~here, -1)
                given["weights"][rows] = _at(given["peers"], rank, "topk_weights", (tokens, spec.top_k), F32)
                needed = here.any(1)
                x_of_rank = _at(given["peers"], rank, "x", (tokens, spec.width), torch.uint8)
                given["values"].view(torch.uint8)[rows][needed] = x_of_rank[needed]
                scales = _at(given["peers"], rank, "x_sf", (tokens, blocks), F32)
                given["scales"][rows][needed] = scales[needed]
                if rank == spec.rank:
                    is_expert = (all_chosen >= 0) & (all_chosen < spec.all_experts)
                    slots = torch.arange(tokens * spec.top_k, dtype=I32).view(tokens, spec.top_k)
                    given["slots_of"].copy_(slots.masked_fill(~is_expert, -1))


class Return(_OfRanks):
    """Copy the row of each choice to its slot at the token's owner."""

    name, output = "moe_return", "rows"
    parameters = tuple(Parameter(name, TENSOR) for name in ("peers", "rows", "places"))
    operands = MappingProxyType({name: name for name in ("peers", "rows", "places")})

    def check(self, *arguments: Any, **named_arguments: Any) -> MoeOperands:
        given = self.given(arguments, named_arguments)
        ranks, (all_tokens, top_k), width = given["peers"].shape[0], given["places"].shape, given["rows"].shape[-1]
        spec = ReturnSpec(ranks, all_tokens // ranks, width, top_k)
        return MoeOperands({name: given[name] for name in self.operands}, given["rows"].device, spec)

    def spec(self, x: MoeOperands, num_sms: int) -> ReturnSpec:
        return ReturnSpec(**{**vars(x.spec), "num_sms": num_sms})

    def reference(self, x: MoeOperands) -> None:
        """In torch."""
        spec, rows = x.spec, x.tensors["rows"].flatten(0, -2)
        with torch.inference_mode():
            for rank, places in enumerate(x.tensors["places"].view(spec.ranks, -1).long()):
                slots = _at(x.tensors["peers"], rank, "slots", (spec.tokens * spec.top_k, spec.width), BF16)
                slots[places >= 0] = rows[places[places >= 0]]


class ExpertsOfRanks(Chain):
    """`Experts` as DeepGEMM's layer has them, of the tokens of all ranks in ``peers``: the first ``tokens`` of each.

    peers (ranks, 6) int64 and epochs (2,) int32 on the device; slots, this rank's; gate_up and down of its own
    experts; y (up to ``tokens``, width) of its own tokens. The number of rows of each own expert is added to stats."""

    name = "moe_of_ranks"
    parameters = (
        *(Parameter(name, TENSOR) for name in ("peers", "epochs", "slots")),
        *(Parameter(name, TENSOR) for name in ("gate_up", "gate_up_scales", "down", "down_scales", "y")),
        Parameter("stats", OPTIONAL, None),
        *(Parameter(name, "int") for name in ("rank", "tokens")),
        Parameter("clamp", "float"),
    )
    output = "y"
    ranks = MappingProxyType({**dict.fromkeys((*GATE_UP, *DOWN), (3,)), "stats": (1,), "epochs": (1,)})
    floats = ("clamp",)
    kept = ("stats", "slots", "epochs")
    unsigned = ("gate_up", "down")
    has_operator = False

    def __init__(self, has_stats: bool) -> None:
        self.absent = () if has_stats else ("stats",)
        titles = {"gate_up_scales": GATE_UP[1], "down_scales": DOWN[1]}
        names = "peers", "epochs", "slots", "gate_up", "gate_up_scales", "down", "down_scales", "y"
        self.operands = {titles.get(name, name): name for name in (*names, *(["stats"] if has_stats else []))}
        self.outputs = ("y", "stats", "slots", "epochs") if has_stats else ("y", "slots", "epochs")

    def links(self, given: Mapping[str, Any]) -> Links:
        """The first meeting, what pulls tokens, the launches of `Experts` but its last, what returns rows, the second
        meeting, and the sums."""
        ranks, tokens, (experts, double, width) = given["peers"].shape[0], given["tokens"], given["gate_up"].shape
        _check(given)
        top_k, inner = given["slots"].shape[0] // max(1, tokens), double // 2
        if checks.is_fake([given["y"]]) or tokens == 0:
            return Links((), Layout(), Layout(), False)
        every = ranks * tokens
        masked = every <= MOST_MASKED
        rows = (experts, align(every, 4)) if masked else (most_rows(every * top_k, experts, ALIGNMENT),)
        if math.prod(rows) > MAX_SIZE or every * width > MAX_SIZE:
            choices = every * top_k
            raise UnsupportedError(f"{every} tokens of all ranks, with {choices} choices: too many. Split the call.")
        scratch, blocks = Layout(), ceil_div(width, SCALE_BLOCK)
        scratch.add_tensor("pulled", (every, width), E4M3).add_tensor("sf pulled", (every, blocks), F32)
        scratch.add_tensor("chosen", (every, top_k), torch.int64).add_tensor("weights", (every, top_k), F32)
        scratch.add_tensor("slots of", (tokens, top_k), I32)
        scratch.add_tensor("own slots", (given["y"].shape[0], top_k), I32, over="slots of")
        memory_of_rows(scratch, rows, every, top_k, experts, width, inner, True, True)
        of_rank = {"rank": given["rank"]}

        def meet(which: int) -> Link:
            return Link(Meet(), {"peers": "peers", "epochs": "epochs"}, {**of_rank, "which": which})

        pulled: Named = {"peers": "peers", "chosen": "chosen", "weights": "weights", "slots_of": "slots of"}
        sent: Named = {"x": "pulled", "sfx": "sf pulled", "chosen": "chosen", "layout": "layout", "places": "places"}
        sent |= {"out": pair("a"), "weights": "weights", "factors": "factors"}
        sent |= {} if given["stats"] is None else {"stats": "stats"}
        expected = ceil_div(every * top_k, ranks * experts)
        links = [
            meet(0),
            Link(Pull(), {**pulled, "out": pair("pulled")}, {**of_rank, "experts": experts}),
            *send_and_multiply(sent, masked, True, True, float(given["clamp"]), expected),
            Link(Return(), {"peers": "peers", "rows": "results", "places": "places"}, {}),
            meet(1),
            Link(Combine(False), {"x": "slots", "places": "own slots", "y": "y"}, {}),
        ]
        return Links(links, scratch, Layout(), False)


def _check(given: Mapping[str, Any]) -> None:
    """Check what users give, but for the values of gate_up, whose shape is that of the buffer."""
    (experts, double, width), y, stats = given["gate_up"].shape, given["y"], given["stats"]
    inner = double // 2
    blocks, of_inner = width // SCALE_BLOCK, inner // SCALE_BLOCK
    check_each(
        {
            "gate_up": (given["gate_up"], E4M3, (experts, double, width)),
            "the scales of gate_up": (given["gate_up_scales"], F32, (experts, 2 * of_inner, blocks)),
            "down": (given["down"], E4M3, (experts, width, inner)),
            "the scales of down": (given["down_scales"], F32, (experts, blocks, of_inner)),
            "y": (y, BF16, (y.shape[0], width)),
            "stats": (stats, I32, (experts,)),
        }
    )
    check_clamp(given["clamp"])
    if y.shape[0]:
        checks.check_row_major("y", y)
        check_stride("y", y, y.stride(0) if y.shape[0] > 1 else 0)
    if stats is not None and not stats.is_contiguous():
        raise InvalidInputError(f"stats must be contiguous, but its strides are {stats.stride()}.")


experts = make_entry(ExpertsOfRanks(False), ExpertsOfRanks(True))
"""Arguments: peers, epochs, slots, gate_up and its scales, down and its scales, y, stats or None, rank, tokens, clamp
(infinite for none)."""
