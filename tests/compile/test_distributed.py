"""Compiling ahead on four ranks, which are real processes with gloo. By default each has its own cache directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Job, Ranks

from deep_gemm.aot.workload import GemmShape

SIZE = 4
LIMIT = 12.0
"""Seconds that ranks wait for another rank's kernel: more than a compilation takes on a busy machine."""
SHAPES = [GemmShape(m, n, 512) for m in (1, 64) for n in (576, 4096)]
OTHERS = [GemmShape(1, 576, 512), GemmShape(64, 576, 7168)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(SIZE)
    yield made
    made.stop()


def jobs(folder: Path, shapes: list[GemmShape] = SHAPES, **options: Any) -> list[Job]:
    return [{"shapes": shapes, "cache": str(folder / f"rank{rank}"), **options} for rank in range(SIZE)]


def total(answers: list[Any], what: str = "compiled") -> int:
    return int(sum(answer[what] for answer in answers if answer is not None))


def everything_is_there(answers: list[Any]) -> int:
    """Check that each rank has every kernel with the same bytes. Returns the number of kernels."""
    for answer in answers:
        assert answer["failed"] == 0
        assert answer["cubins"] == answers[0]["cubins"]
        assert answer["stored"] == len(answer["cubins"])
    return len(answers[0]["cubins"])


def test_each_kernel_is_compiled_once_in_all_and_is_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    keys = []
    for call in ("first", "second"):  # the second has empty directories, and must not get the first's published kernels
        answers = ranks.run(jobs(tmp_path / call))
        count = everything_is_there(answers)
        assert count >= 3
        assert total(answers) == count
        assert total(answers, "adopted") == count * (SIZE - 1)
        layers = sorted(layer for answer in answers for layer in answer["layers"].values())
        assert layers == ["adopted"] * count * (SIZE - 1) + ["compiled"] * count
        assert [answer["warnings"] for answer in answers] == [[]] * SIZE
        keys.append(ranks.store.num_keys())
    # Only each rank's count of calls is left in the store.
    assert keys[0] == keys[1]
    answers = ranks.run(jobs(tmp_path / "first"))
    assert (total(answers), total(answers, "adopted")) == (0, 0)


@pytest.mark.long
def test_a_common_cache_directory(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run([job | {"cache": str(tmp_path / "common")} for job in jobs(tmp_path)])
    assert total(answers) == everything_is_there(answers)
    assert [answer["warnings"] for answer in answers] == [[]] * SIZE


@pytest.mark.long
def test_ranks_with_other_lists_share_with_their_likes(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(jobs(tmp_path)[:2] + jobs(tmp_path, OTHERS)[2:])
    counts = [everything_is_there(answers[:2]), everything_is_there(answers[2:])]
    assert answers[0]["cubins"].keys() != answers[2]["cubins"].keys()
    assert [total(answers[:2]), total(answers[2:])] == counts
    warned = [bool(answer["warnings"]) for answer in answers]
    assert warned in ([False, False, True, True], [True, True, False, False])
    (message,) = answers[warned.index(True)]["warnings"]
    assert "builds other kernels than rank" in message


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        ("flips a bit", "its checksum does not match"),
        pytest.param("sends another key", "its key is 0000", marks=pytest.mark.long),
    ],
)
def test_wrong_bytes_are_refused_and_compiled_here(ranks: Ranks, tmp_path: Path, sabotage: str, words: str) -> None:
    gate = str(tmp_path / "gate")
    told = jobs(tmp_path, after=gate)
    told[1] |= {"after": None, "sabotage": (sabotage, gate), "jobs": 1}
    answers = ranks.run(told)
    count = everything_is_there(answers)
    bad = {name for name, layer in answers[1]["layers"].items() if layer == "compiled"}
    assert bad
    for answer in answers[:1] + answers[2:]:
        assert {name for name in bad if answer["layers"][name] == "compiled"} == bad
        refused = [message for message in answer["warnings"] if words in message]
        assert len(refused) == len(bad)
    assert total(answers) == count + len(bad) * (SIZE - 1)


@pytest.mark.long
def test_ranks_that_die(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that is dead at the start costs no time. One that dies while it compiles costs at most the timeout. Last,
    since only two ranks are left."""
    assert ranks.run(jobs(tmp_path / "warm", []))[3] is not None
    ranks.processes[3].kill()
    ranks.processes[3].join()
    answers = ranks.run(jobs(tmp_path / "first", timeout=60.0))
    assert answers[3] is None
    assert total(answers) == everything_is_there(answers[:3])
    assert max(answer["seconds"] for answer in answers[:3]) < 40
    assert [answer["warnings"] for answer in answers[:3]] == [[]] * 3

    gate = str(tmp_path / "gate")
    told = jobs(tmp_path / "second", SHAPES[:3], timeout=LIMIT, after=gate)  # five kernels: one in those hands
    told[1] |= {"after": None, "sabotage": ("dies building", gate), "jobs": 1}
    answers = ranks.run(told)
    assert answers[1] is None
    left = [answers[0], answers[2]]
    count = everything_is_there(left)
    assert total(left) == count + 1
    for answer in left:
        assert LIMIT <= answer["seconds"] < 4 * LIMIT
        (message,) = answer["warnings"]
        assert message.startswith("1 kernel did not come from other ranks in time, and is built here: ")
