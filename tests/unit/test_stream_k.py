"""Stream K without a GPU: how blocks of K are dealt out, and what a launch is told of it. (test_workspace has whose
memory is whose.)

A block that is dealt out twice or not at all is a wrong sum; a group that waits for one that does not give, or for one
of a higher number, is a kernel that never ends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import pytest
from golden_renders import PLAIN, SWAPPED, find_config, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import launch_at, parameter_names
from rasters import located

from deep_gemm import arch
from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels.raster import raster
from deep_gemm.kernels.sm90_fp8_launch import Addresses, Geometry, slot_bytes
from deep_gemm.kernels.stream_k import FLAG_BYTES, Stream, stream
from deep_gemm.params import FP8Config, align, ceil_div

CONFIGS: list[FP8Config] = [config for config in PLAIN.configs(arch.SM90) if config.stream_k]
MOST_SMS = 200


@dataclass(frozen=True)
class Case:
    """A GEMM and how it is dealt out."""

    config: FP8Config
    m: int
    n: int
    k: int
    num_sms: int

    @property
    def dealt(self) -> Stream:
        return stream(self.config, self.m, self.n, self.k, self.num_sms)

    @property
    def tiles(self) -> tuple[int, int]:
        """Along m, and along n."""
        return ceil_div(self.m, self.config.block_m), ceil_div(self.n, self.config.block_n)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly few tiles, since then K is dealt out finely, and SMs that no number of members divides."""
    tiles = st.one_of(st.integers(1, 8), st.integers(1, 60))
    config = draw(st.sampled_from(CONFIGS))
    return Case(
        config,
        m=draw(tiles) * config.block_m - draw(st.integers(0, config.block_m - 1)),
        n=draw(tiles) * config.block_n - draw(st.integers(0, config.block_n - 1)),
        k=16 * draw(st.one_of(st.integers(1, 64), st.integers(1, 2048))),
        num_sms=draw(st.one_of(st.sampled_from([132, 1, 2, 7, 131]), st.integers(1, MOST_SMS))),
    )


@dataclass(frozen=True)
class Piece:
    """Blocks [begin, end) of K of a tile, and how many groups' sums are to be added to theirs."""

    group: int
    tile: int
    begin: int
    end: int
    donors: int

    def owned(self, dealt: Stream) -> bool:
        return self.end == dealt.blocks


def walk(dealt: Stream, group: int) -> list[Piece]:
    """What a group does, in its order: what `StreamScheduler::advance` says."""
    _, groups, whole, share, longer = dealt.arguments

    def cut(at: int) -> int:
        return at * share + min(at, longer)

    pieces = [Piece(group, tile, 0, dealt.blocks, 0) for tile in range(group, whole, groups)]
    start, to = cut(group), cut(group + 1)
    while start < to:
        tile = (to - 1) // dealt.blocks
        first = tile * dealt.blocks
        begin, end = max(start - first, 0), to - first
        to = first + begin
        donors = 0
        if end == dealt.blocks and begin > 0:
            while cut(group - donors) > first:
                donors += 1
        pieces.append(Piece(group, whole + tile, begin, end, donors))
    return pieces


def walks(dealt: Stream) -> list[list[Piece]]:
    """The pieces of each group."""
    return [walk(dealt, group) for group in range(dealt.groups)]


def by_tile(dealt: Stream) -> dict[int, list[Piece]]:
    """The pieces of each tile, from the first block of K to the last."""
    out = defaultdict(list)
    for pieces in walks(dealt):
        for piece in pieces:
            out[piece.tile].append(piece)
    return {tile: sorted(pieces, key=lambda piece: piece.begin) for tile, pieces in out.items()}


@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_block_of_every_tile_is_done_once(case: Case) -> None:
    dealt = case.dealt
    tiles = by_tile(dealt)
    assert sorted(tiles) == list(range(dealt.rows * dealt.columns))
    assert dealt.blocks == ceil_div(case.k, 128)
    for pieces in tiles.values():
        assert pieces[0].begin == 0
        assert all(before.end == piece.begin for before, piece in pairwise(pieces))
        assert pieces[-1].end == dealt.blocks
        assert all(piece.begin < piece.end for piece in pieces)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_the_owner_of_a_tile_waits_for_all_who_give_it_sums_and_nobody_else(case: Case) -> None:
    """Donors are found by counting down from the owner: they must be the groups just below it, and all of them."""
    dealt = case.dealt
    for pieces in by_tile(dealt).values():
        *given_away, owner = pieces
        assert owner.owned(dealt)
        assert not any(piece.owned(dealt) for piece in given_away)
        assert [piece.group for piece in given_away] == [owner.group - d for d in range(owner.donors, 0, -1)]
        assert all(piece.donors == 0 for piece in given_away)
        assert owner.donors <= dealt.donors


@settings(max_examples=400, deadline=None)
@given(cases())
def test_nobody_waits_before_having_given_and_only_for_lower_groups(case: Case) -> None:
    """Then whoever is waited for has an SM, and needs nobody to get done: no launch can lock itself up. Each CTA has
    one slot and one flag, so it can give once."""
    dealt = case.dealt
    for group, pieces in enumerate(walks(dealt)):
        kinds = ["waits" if piece.donors else "gives" if not piece.owned(dealt) else "own" for piece in pieces]
        assert kinds.count("gives") <= 1
        assert kinds.count("waits") <= 1
        assert "waits" not in kinds[:-1]
        streamed = [kind for piece, kind in zip(pieces, kinds, strict=True) if piece.tile >= dealt.whole]
        assert "gives" not in streamed[1:]
        assert all(0 <= group - d < group for piece in pieces for d in range(1, piece.donors + 1))
        assert all(piece.begin == 0 and piece.owned(dealt) for piece in pieces if piece.tile < dealt.whole)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_work_is_dealt_out_evenly(case: Case) -> None:
    dealt = case.dealt
    pieces = walks(dealt)
    blocks = [sum(piece.end - piece.begin for piece in of_group) for of_group in pieces]
    streamed = [sum(p.end - p.begin for p in of_group if p.tile >= dealt.whole) for of_group in pieces]
    assert max(streamed) - min(streamed) <= 1
    assert sum(streamed) == dealt.dealt
    assert max(blocks) == dealt.most_blocks
    assert min(blocks) >= 1
    # What more than a whole wave could hold is not dealt out: a tile would be cut up without need.
    assert dealt.whole % dealt.groups == 0
    assert dealt.dealt < 2 * dealt.groups * dealt.blocks


@settings(max_examples=300, deadline=None)
@given(cases())
def test_members_do_tiles_below_each_other_and_leave_few_sms_idle(case: Case) -> None:
    dealt = case.dealt
    assert 1 <= dealt.members <= 12
    assert dealt.rows * dealt.members == case.tiles[0]
    assert dealt.columns == case.tiles[1]
    assert case.num_sms - case.num_sms // dealt.members * dealt.members <= 0.02 * case.num_sms
    assert dealt.ctas == dealt.members * dealt.groups <= case.num_sms
    # All groups that there is room for, unless there are fewer blocks.
    assert dealt.groups == min(case.num_sms // dealt.members, dealt.rows * dealt.columns * dealt.blocks)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_tile_of_the_output_is_some_members(case: Case) -> None:
    """Where a piece lies: what `StreamScheduler::locate` says, in tiles."""
    dealt = case.dealt
    order = raster(case.config, case.m, case.n, case.k, case.num_sms, dealt.members)
    places = []
    for tile in range(dealt.rows * dealt.columns):
        row, column = located(order.arguments, tile)
        places += [(row * dealt.members + member, column) for member in range(dealt.members)]
    assert len(places) == math.prod(case.tiles)
    assert set(places) == {(i, j) for i in range(case.tiles[0]) for j in range(case.tiles[1])}


def test_what_fills_waves_is_not_dealt_out() -> None:
    config = find_config(PLAIN, block_m=128, block_n=128, stream_k=True)
    for waves in (1, 2, 5):
        dealt = stream(config, 132 * 128, waves * 128, 1024, 132)
        assert (dealt.members, dealt.groups, dealt.whole) == (12, 11, 11 * waves)
        assert (dealt.dealt, dealt.donors, dealt.most_blocks) == (0, 0, 8 * waves)


def geometry(case: Case) -> Geometry:
    """All dense."""
    m, n, k = case.m, case.n, case.k
    return Geometry(m, n, k, k, k, align(n, 8), align(m, 4), (ceil_div(k, 128), 1))


AT = Addresses(a=0x1000, sfa=0x2000, b=0x3000, sfb=0x4004, d=0x5000, flags=0x6000, slots=0x8000)
CASE = Case(find_config(PLAIN, block_m=128, block_n=64, stream_k=True), m=300, n=1000, k=912, num_sms=132)


@contextmanager
def no_tensor_maps() -> Iterator[None]:
    """They need a driver."""
    with mock.patch.object(TensorMapSpec, "encode", return_value=bytes(128)):
        yield


DEALT = ("members", "groups", "whole", "share", "longer")


@pytest.mark.parametrize("store", ["tma", "direct"])
def test_the_parts_and_the_workspace_go_to_the_parameters_for_them(store: str) -> None:
    params = make_params(CASE.config, store)
    dealt = CASE.dealt
    with no_tensor_maps():
        shape, args = launch_at(params, geometry(CASE), AT, CASE.num_sms, pdl=True)
    assert shape.grid == (dealt.members * dealt.groups, 1, 1)
    assert shape.cluster == (1, 1, 1)
    values = dict(zip(parameter_names(params), args, strict=True))
    assert (values["flags"], values["slots"]) == (("ptr", AT.flags), ("ptr", AT.slots))
    assert [values[name] for name in DEALT] == [("u32", number) for number in dealt.arguments]
    assert sum(arg in (("ptr", AT.flags), ("ptr", AT.slots)) for arg in args) == 2


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_every_member_of_every_group_has_a_flag_and_a_slot(case: Case, pdl: bool) -> None:
    with no_tensor_maps():
        params = make_params(case.config)
        shape, args = launch_at(params, geometry(case), AT, case.num_sms, pdl)
    values = dict(zip(parameter_names(params), args, strict=True))
    numbers = [int(values[name][1]) for name in DEALT]
    assert shape.grid == (numbers[0] * numbers[1], 1, 1)
    assert all(0 <= number < 1 << 32 for number in numbers)
    assert shape.grid[0] * 4 <= FLAG_BYTES
    # Of float32 sums of a tile.
    size = slot_bytes(case.config, geometry(case), case.num_sms)
    assert size == shape.grid[0] * case.config.block_m * case.config.block_n * 4


def test_other_configs_need_no_workspace() -> None:
    for config in (find_config(PLAIN, block_m=128, block_n=64), find_config(SWAPPED, block_m=16, block_n=64)):
        case = replace(CASE, k=896)
        assert slot_bytes(config, geometry(case), case.num_sms) == 0
        with no_tensor_maps():
            args = launch_at(make_params(config), geometry(case), AT, case.num_sms, pdl=False)[1]
        assert not {("ptr", AT.flags), ("ptr", AT.slots)} & set(args)
