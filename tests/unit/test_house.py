"""The tree agrees with tests/house.json; see tests/house.py."""

import house
import pytest


def test_each_kernel_is_recorded() -> None:
    known = set(house.recorded()["binaries"])
    assert set(house.cases()) == known, f"kernels that the record lacks, or that are gone. {house.WRITE}"


@pytest.mark.long
def test_the_record_has_the_keys_of_this_tree() -> None:
    """Otherwise each run of the tests compiles more kernels than it has to. Their cubins may be the same all the
    same."""
    if house.recorded()["compiler"] != house.compiler():
        pytest.skip(f"the record is of {house.recorded()['compiler']}, and here is {house.compiler()}")
    stale = sorted(set(house.cases()) - house.unchanged())
    assert not stale, f"{len(stale)} kernels have another source or header, such as {stale[:3]}. {house.WRITE}"


@pytest.mark.limit(300)  # 1,900 refusals, each with fresh operands
@pytest.mark.parametrize("part", ["signatures", "refusals", "families"])
def test_what_users_see_is_as_recorded(part: str) -> None:
    if wrong := house.differences(part, house.brief(part, house.PARTS[part]())):
        pytest.fail(wrong, pytrace=False)


@pytest.mark.parametrize("part", range(6))
def test_the_same_kernels_are_chosen_and_launched(part: int) -> None:
    """In six parts, which several processes can share."""
    chunks = range(part, house.DRAWN // house.PER_CHUNK, 6)
    found = house.brief("choices", {house.chunk_name(chunk): house.choices(chunk) for chunk in chunks})
    if wrong := house.differences("choices", found, only=set(found)):
        pytest.fail(wrong, pytrace=False)
