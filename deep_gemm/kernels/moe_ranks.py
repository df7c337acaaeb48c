"""What ranks of a mixture of experts exchange: see ``templates/include/moe_ranks.cuh``."""

from __future__ import annotations

from collections.abc import Mapping

from ..params import TileConfig
from ..spec import MeetSpec, PullSpec, ReturnSpec, ceil_div
from .base import Strides, Value, parse_arguments
from .helpers import Grid, Helper

_WARPS = 8
_PER_SM = 4
"""CTAs, which loop over what there is."""


def _grid(warps: int, num_sms: int) -> Grid:
    return min(ceil_div(warps, _WARPS), _PER_SM * num_sms), 1, 1


def _meet(config: TileConfig, spec: MeetSpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operands: peers (ranks, fields), addresses; epochs (2,), of this rank."""
    return (1, 1, 1), {"rank": spec.rank, "ranks": spec.ranks, "which": spec.which}


def _pull(config: TileConfig, spec: PullSpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operands: peers; of ranks * tokens tokens values, scales, chosen and weights; slots_of (tokens, top_k). All but
    peers are written, contiguous."""
    names = "rank", "ranks", "tokens", "width", "experts", "all_experts", "top_k"
    return _grid(spec.ranks * spec.tokens, spec.num_sms), {name: getattr(spec, name) for name in names}


def _return(config: TileConfig, spec: ReturnSpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operands: peers; rows (rows, width) or (experts, room, width); places (ranks * tokens, top_k)."""
    values = {name: getattr(spec, name) for name in ("ranks", "tokens", "width", "top_k")}
    return _grid(spec.ranks * spec.tokens * spec.top_k, spec.num_sms), values | {"stride": strides["rows"][-2]}


def _config(name: str, num_threads: int) -> TileConfig:
    return TileConfig(name, tile_rows=1, tile_columns=1, num_threads=num_threads)


MEET = Helper(
    name="moe_meet",
    spec=MeetSpec,
    what="ranks wait for each other in it",
    config=_config("moe_meet", 32),
    given=parse_arguments("const i64* peers, u32* epochs, u32 rank, u32 ranks, u32 which"),
    launched=_meet,
    constant_names=("num_threads",),
    ships=False,
)
PULL = Helper(
    name="moe_pull",
    spec=PullSpec,
    what="it pulls tokens from ranks",
    config=_config("moe_pull", 32 * _WARPS),
    given=parse_arguments(
        "const i64* peers, u32 rank, u32 ranks, u32 tokens, u32 width, u32 experts, u32 all_experts, u32 top_k, "
        "u8* values, float* scales, i64* chosen, float* weights, int* slots_of"
    ),
    launched=_pull,
    constant_names=("num_threads",),
    ships=False,
)
RETURN = Helper(
    name="moe_return",
    spec=ReturnSpec,
    what="it returns rows to ranks",
    config=_config("moe_return", 32 * _WARPS),
    given=parse_arguments(
        "const i64* peers, const u8* rows, i64 stride, const int* places, u32 ranks, u32 tokens, u32 width, u32 top_k"
    ),
    launched=_return,
    constant_names=("num_threads",),
    ships=False,
)
