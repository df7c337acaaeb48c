"""The tree agrees with tests/house.json; see tests/house.py."""

from __future__ import annotations

import house
import pytest

BINARIES = {name: digests.split()[0] for name, digests in house.recorded()["binaries"].items()}


def test_the_sources_of_all_kernels_are_as_recorded() -> None:
    assert {name: house.source_digest(params) for name, params in house.cases().items()} == BINARIES


@pytest.mark.parametrize("chunk", range(house.DRAWN // house.PER_CHUNK))
def test_the_same_kernels_are_chosen_and_launched(chunk: int) -> None:
    found, known = house.choices(chunk), house.recorded_choices(chunk)
    different = [index for index, pair in enumerate(zip(found, known, strict=True)) if pair[0] != pair[1]]
    assert not different, [
        (house.draw(index + chunk * house.PER_CHUNK), found[index], known[index]) for index in different[:3]
    ]


@pytest.mark.limit(300)  # every refusal of every function: 80 s on a machine with 15 other processes
@pytest.mark.parametrize("part", ["signatures", "refusals", "families"])
def test_what_users_see_is_as_recorded(part: str) -> None:
    assert getattr(house, part)() == house.recorded()[part]
