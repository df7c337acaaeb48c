"""Parts of a list of kernels: the same in every process, disjoint, complete and even; and pickling for workers."""

import math
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import kernels
from deep_gemm.aot import build, shard
from deep_gemm.aot.workload import GemmShape
from deep_gemm.errors import CompileError, InvalidInputError
from deep_gemm.params import KernelParams

SHAPES = [GemmShape(m, n, k) for m in (1, 64, 300, 4096) for n, k in ((576, 7168), (4096, 512), (7168, 2048))]
KERNELS = list(build.choose(SHAPES).kernels)
CASES = [params for kernel in kernels.registry().values() for params in kernel.cases()]


@given(st.sets(st.sampled_from(CASES)), st.integers(1, 40), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_parts_are_disjoint_complete_and_even(chosen: set[KernelParams], count: int, chance: random.Random) -> None:
    params = list(chosen)
    parts = []
    for index in range(count):
        chance.shuffle(params)  # processes may list them in different orders
        parts.append(shard.deal(params, index, count))
    together = [one for part in parts for one in part]
    assert len(together) == len(chosen)
    assert set(together) == chosen
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def area(params: KernelParams) -> int:
    return math.prod(params.config.tile)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_each_part_has_its_share_of_large_tiles(count: int) -> None:
    """Large tiles take longest to compile."""
    parts = [sorted(map(area, shard.deal(CASES, index, count)), reverse=True) for index in range(count)]
    ranked = sorted(map(area, CASES), reverse=True)
    for part in parts:
        assert all(
            ranked[(place + 1) * count - 1] <= found <= ranked[place * count] for place, found in enumerate(part[:-1])
        )


def test_parse() -> None:
    assert shard.parse("0/1") == (0, 1)
    assert shard.parse(" 7/16 ") == (7, 16)


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "a/2", "1/2/3", "-1/2", "1.5/2", "\u0661/2", "0x1/2"])
def test_a_text_that_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="must look like 0/8"):
        shard.parse(text)


@pytest.mark.parametrize("text", ["2/2", "0/0", "8/4"])
def test_parts_are_counted_from_zero(text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"but it is {text}: parts are counted from 0"):
        shard.parse(text)


@pytest.mark.parametrize("index_count", [(3, 3), (-1, 3), (0.0, 2), ("0", "2")])
def test_precompile_refuses_a_bad_shard(index_count: Any) -> None:
    with pytest.raises(InvalidInputError, match="0 <= i < n"):
        build.precompile(SHAPES, shard=index_count)


def test_precompile_builds_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[KernelParams] = []

    def fails(params: KernelParams) -> Any:
        built.append(params)
        raise CompileError("enough")

    monkeypatch.setattr("deep_gemm.runtime.engine.build", fails)
    summaries = [build.precompile(SHAPES, shard=(index, 5)) for index in range(5)]
    assert len(built) == len(set(built)) == len(KERNELS)
    assert [len(summary.outcomes) for summary in summaries] == [len(shard.deal(KERNELS, i, 5)) for i in range(5)]


@pytest.mark.parametrize("params", CASES, ids=lambda params: kernels.get(params.kernel).kernel_name(params))
def test_params_survive_pickling(params: KernelParams) -> None:
    copy = pickle.loads(pickle.dumps(params))
    assert copy == params
    assert type(copy.config) is type(params.config)
    assert hash(copy) == hash(params)


def test_outcomes_and_the_function_of_workers_survive_pickling() -> None:
    error = CompileError("it broke", log="a log", source_path="/x", options=["-a"])
    outcome = build.Outcome("k", (SHAPES[0],), KERNELS[0], error=error)
    copy = pickle.loads(pickle.dumps(outcome))
    assert (copy.name, copy.shapes, copy.params, copy.binary) == ("k", (SHAPES[0],), KERNELS[0], None)
    assert (str(copy.error), copy.error.log, copy.error.options) == (str(error), "a log", ("-a",))
    assert pickle.loads(pickle.dumps(build.build)) is build.build
