"""Compiling ahead by threads and processes: results are adopted, and missing ones are built here."""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import forks_with_torch

from deep_gemm.aot import build
from deep_gemm.aot.workload import GemmShape
from deep_gemm.jit import default_builder
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.log import reset_warnings

SHAPES = [GemmShape(m, 576, 512) for m in (1, 64)]  # these compile fast
TOTAL = len(build.choose(SHAPES).kernels)  # for two products on each GPU model, and the transpose of scales
FIRST = len(build.choose(SHAPES[:1]).kernels)


@pytest.fixture(autouse=True)
def fresh(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVRTC, for speed, and an empty cache, also for the workers that a test starts."""
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    reset_warnings()
    return cache_dir


def set_environment(values: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("DG_")]:
        del os.environ[name]
    os.environ.update(values)


@contextmanager
def process_pool(workers: int = 2, **environment: str) -> Iterator[Executor]:
    own = {"DG_JIT_USE_NVRTC": "1", **environment}
    with ProcessPoolExecutor(workers, forks_with_torch(), initializer=set_environment, initargs=(own,)) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[Executor]:
    """One process for several tests, since it takes seconds to import torch."""
    with process_pool(1) as pool:
        yield pool


@pytest.fixture
def worker(shared_worker: Executor) -> Callable[..., Executor]:
    def with_environment(**environment: str) -> Executor:
        shared_worker.submit(set_environment, {"DG_JIT_USE_NVRTC": "1", **environment}).result()
        return shared_worker

    return with_environment


def counts(before: dict[str, float]) -> dict[str, float]:
    after = default_builder().stats
    return {name: after[name] - before[name] for name in ("compiled", "adopted")}


def test_a_pool_of_threads_shares_the_cache() -> None:
    before = default_builder().stats
    with ThreadPoolExecutor(2) as pool:
        summary = build.precompile(SHAPES, executor=pool)
    assert (len(summary.outcomes), summary.count("compiled")) == (TOTAL, TOTAL)
    assert counts(before) == {"compiled": TOTAL, "adopted": 0}


def test_what_workers_with_caches_of_their_own_build_is_adopted(cache_dir: Path, tmp_path: Path) -> None:
    before = default_builder().stats
    seen: list[int] = []
    with process_pool(DG_JIT_CACHE_DIR=str(tmp_path / "theirs")) as pool:
        summary = build.precompile(SHAPES, executor=pool, progress=lambda outcome, done, total: seen.append(done))
    assert (len(summary.outcomes), summary.count("compiled")) == (TOTAL, TOTAL)
    assert counts(before) == {"compiled": 0, "adopted": TOTAL}
    assert seen == list(range(1, TOTAL + 1))
    assert sorted({shape for outcome in summary.outcomes for shape in outcome.shapes}) == SHAPES
    for outcome in summary.outcomes:
        assert outcome.binary is not None
        assert Path(outcome.binary.source_path or "").is_relative_to(cache_dir)
    assert DiskCache(cache_dir).info()["entries"] == TOTAL
    assert build.precompile(SHAPES).count("memory") == TOTAL


@pytest.mark.long
def test_a_process_that_shares_the_disk_writes_it_once(cache_dir: Path, worker: Callable[..., Executor]) -> None:
    before = default_builder().stats
    pool = worker(DG_JIT_CACHE_DIR=str(cache_dir))
    assert build.precompile(SHAPES, executor=pool).count("compiled") == TOTAL
    assert build.precompile(SHAPES, executor=pool).count("memory") == TOTAL
    assert counts(before) == {"compiled": 0, "adopted": 0}


class Deadly(Executor):
    """A pool whose workers die at the second submitted kernel."""

    def __init__(self, pool: Executor) -> None:
        self.pool = pool
        self.submitted = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1
        return self.pool.submit(os._exit, 1) if self.submitted == 2 else self.pool.submit(fn, *args, **kwargs)


@pytest.mark.long
def test_a_worker_that_dies_costs_nothing_but_time(caplog: pytest.LogCaptureFixture, cache_dir: Path) -> None:
    with process_pool(1) as pool, caplog.at_level(logging.WARNING, "deep_gemm"):
        summary = build.precompile(SHAPES, executor=Deadly(pool))
    assert (len(summary.outcomes), summary.failed) == (TOTAL, [])
    assert DiskCache(cache_dir).info()["entries"] == TOTAL
    (record,) = caplog.records
    assert "are built here, not by workers: BrokenProcessPool" in record.getMessage()


@pytest.mark.long
def test_what_other_settings_made_is_refused_and_built_here(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, worker: Callable[..., Executor]
) -> None:
    before = default_builder().stats
    pool = worker(DG_JIT_WITH_LINEINFO="1", DG_JIT_CACHE_DIR=str(tmp_path / "theirs"))
    summary = build.precompile(SHAPES[:1], executor=pool)
    assert summary.failed == []
    assert counts(before) == {"compiled": FIRST, "adopted": 0}
    (record,) = caplog.records
    assert f"{FIRST} kernels are built here" in record.getMessage()
    assert "the same DG_* settings" in record.getMessage()


def test_an_error_of_a_worker_comes_back(worker: Callable[..., Executor], tmp_path: Path) -> None:
    before = default_builder().stats
    pool = worker(DG_JIT_FORBID_COMPILE="1", DG_JIT_CACHE_DIR=str(tmp_path / "theirs"))
    summary = build.precompile(SHAPES[:1], executor=pool)
    assert [str(outcome.error).split()[0] for outcome in summary.failed] == ["DG_JIT_FORBID_COMPILE"] * FIRST
    assert {shape for outcome in summary.failed for shape in outcome.shapes} == {SHAPES[0]}
    assert counts(before) == {"compiled": 0, "adopted": 0}
