"""`make sanitize`: which kernels run and what each shows, edits of headers that must apply, and what is a failure."""

from pathlib import Path

import pytest
import sanitize
import sanitizer
from cover import cover, everything, features
from hypothesis import given
from hypothesis import strategies as st
from racecheck_headers import RACES, Race, racecheck_headers
from sanitize import chosen, sizes

from deep_gemm import kernels
from deep_gemm.params import KernelParams
from deep_gemm.spec import SCALE_BLOCK, ceil_div


@pytest.mark.parametrize("race", RACES.values(), ids=list(RACES))
def test_a_race_is_in_one_header_and_a_kernel_shows_it(tmp_path: Path, race: Race) -> None:
    sound = racecheck_headers(tmp_path / "sound")
    assert changed(race.put_into(racecheck_headers(tmp_path / "racy")), sound) == {race.file}
    assert len(sanitize.named(sanitize.everyone(1), race.kernel)) == 1


def changed(folder: Path, base: Path) -> set[str]:
    """The headers in ``folder`` that differ from those in ``base``."""
    return {path.name for path in folder.iterdir() if path.read_text() != (base / path.name).read_text()}


TOOL = Path("compute-sanitizer")


def as_it_should(kind: str, *arguments: str) -> int:
    return sanitizer.REPORTED if "--race" in arguments else 0


def test_nothing_reported_but_races_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(sanitizer, "ends", lambda tool, *run: runs.append(run) or as_it_should(*run))
    assert sanitizer.failures(TOOL) == []
    assert runs[:2] == [("memcheck",), ("racecheck", "--racecheck")]
    assert [run[-1] for run in runs[2:]] == list(RACES)


@pytest.mark.parametrize("wrong", ["memcheck", "--racecheck", *RACES])
@pytest.mark.parametrize("other", [0, 1, sanitizer.REPORTED])
def test_anything_else_fails(monkeypatch: pytest.MonkeyPatch, wrong: str, other: int) -> None:
    """For a race, it is also a failure if the program itself fails or does not start."""

    def ends(tool: Path, *run: str) -> int:
        return other if run[-1] == wrong else as_it_should(*run)

    monkeypatch.setattr(sanitizer, "ends", ends)
    should = sanitizer.REPORTED if wrong in RACES else 0
    found = sanitizer.failures(TOOL)
    assert len(found) == (other != should)
    assert not found or (wrong.strip("-") in found[0] and str(other) in found[0])


EVERYTHING = everything()


@pytest.fixture(scope="module")
def taken() -> list[KernelParams]:
    return chosen(0)


def test_every_feature_of_every_family_is_seen(taken: list[KernelParams]) -> None:
    shown = {feature for params in taken for feature in features(params)}
    for params in EVERYTHING:
        assert features(params) <= shown


def test_sizes_suit_the_kernels_and_ctas_that_stay_do_several_tiles(taken: list[KernelParams]) -> None:
    """So that the next tile's writes meet what the one before left in shared memory."""
    for params in taken:
        config, template = params.gemm, kernels.gemm_family(params.kernel).template
        m, n, k, num_sms = sizes(config)
        assert k % SCALE_BLOCK == 0
        assert config.cluster_size <= num_sms * config.ctas_per_sm <= 32
        tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
        if config.persistent:
            assert template.num_ctas(config, m, n, num_sms) < tiles * config.cluster_size, params


SETS = st.lists(st.frozensets(st.integers(0, 12), max_size=4), max_size=12)


@given(SETS, st.integers(0, 3))
def test_a_cover_shows_all_and_nothing_twice(sets: list[frozenset[int]], given_first: int) -> None:
    items = list(enumerate(sets))
    first = items[:given_first]
    found = cover(items, lambda item: item[1], first)
    assert set().union(*(item[1] for item in found)) == set().union(*sets)
    assert first == [item for item in found if item in first]
    assert found == sorted(found)
    assert len(found) == len(set(found)) <= len(first) + len(set().union(*sets))
