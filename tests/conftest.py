"""Shared by all tests: markers by directory, the limit of a test's time, failures named at once, a private kernel
cache, the record of a GPU run."""

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import hypothesis
import pytest
from gpu_record import GpuRecord

TESTS = Path(__file__).parent
SCRATCH = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()
MESSAGES = pytest.StashKey[TextIO]()
LIMIT = 120.0
"""Seconds that a test may take, without its fixtures."""
BUILDING = 1500.0
"""Seconds that the fixtures of a test may take: some compile a hundred kernels."""
LONG = ("test_cases.py", "test_configs.py", "test_epilogues_gpu.py", "test_mutations.py", "test_numerics.py")
"""Files of tests/gpu that take longest: they compile hundreds of kernels."""
GRACE = 60.0
"""Seconds after which a process is ended whose test did not end by an exception at its limit."""

# A busy machine is no failure: the time of an example says nothing.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


def why_no_gpu() -> str | None:
    """Why the GPU tests cannot run here, or None if they can."""
    # Threads of torch wait by spinning, so that several processes with several threads each take four times as long.
    # The variable is for processes that tests start; here OpenMP may be loaded already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Streams that wait for each other must not share one of a GPU's queues, of which there are 8 without this.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not torch.cuda.is_available():
        return "no CUDA device"
    from deep_gemm import arch
    from deep_gemm.errors import UnsupportedError

    try:
        arch.for_device(0)
    except UnsupportedError as error:
        return str(error)
    return None


def begin_with_another_gpu() -> None:
    """Of processes side by side, each takes another of this machine's GPUs for its device 0. Before CUDA starts."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if worker is not None and gpus:
        order = gpus.split(",")
        first = int(worker.removeprefix("gw")) % len(order)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(order[first:] + order[:first])


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests of interrupts would hang.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # of nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Tests must not depend on the settings of the caller's shell, nor touch the caller's kernels.
    for variable in [name for name in os.environ if name.startswith("DG_")]:
        del os.environ[variable]
    begin_with_another_gpu()
    if why_no_gpu() is not None:  # whoever imports Triton first decides for the process
        os.environ["TRITON_INTERPRET"] = "1"
    else:  # for the processes side by side, which begin with another each
        import torch

        gpus = ",".join(map(str, range(torch.cuda.device_count())))
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", gpus)
    scratch = tempfile.TemporaryDirectory(prefix="deep_gemm_tests_", ignore_cleanup_errors=True)
    os.environ["DG_JIT_CACHE_DIR"] = str(Path(scratch.name, "cache"))
    os.environ.setdefault("COMPILING_LOCKS", scratch.name)  # of the first process; see `forced.compile_all`
    config.stash[SCRATCH] = scratch
    config.stash[MESSAGES] = os.fdopen(os.dup(2), "w")  # stderr, which is captured during a test
    if hasattr(config.option, "loadscopereorder"):
        # Side by side, files begin in the order of collection, not those with most tests first.
        config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(NamedAtOnce(config))
        config.pluginmanager.register(GpuRecord(TESTS / "gpu"))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[SCRATCH].cleanup()


class NamedAtOnce:
    """Prints the name of a failed test and the last line of its error when it happens: the run may be far from its
    end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or terminal is None:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash else str(report.longrepr)).strip().splitlines() or [""]
        phase = "" if report.when in ("call", "???") else f" ({report.when})"
        terminal.write(f"\nFAILED {report.nodeid}{phase}: {why[0][:300]}\n", red=True)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """The process that takes the place of one that has ended goes on behind the test that ended it: without this it
    begins with the same test."""
    for scope, tests in list(getattr(sched, "workqueue", {}).items()):
        if crashitem in tests:
            tests[crashitem] = True
            if all(tests.values()):
                del sched.workqueue[scope]


@contextlib.contextmanager
def limited(item: pytest.Item, seconds: float, what: str) -> Iterator[None]:
    """Fail if what is inside takes longer. Where an exception does not end it, as in a call of C that waits, the
    process ends later, after it has shown what all threads do; side by side, pytest-xdist then names the test, and
    another process goes on behind it."""
    messages = item.config.stash[MESSAGES]

    def late(*_: object) -> None:
        faulthandler.dump_traceback(messages)
        pytest.fail(f"{what} took longer than {seconds:.0f} s, its limit")

    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=messages)
    if is_free := signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:  # a few tests and fixtures have their own handler
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if is_free and signal.getsignal(signal.SIGALRM) is late:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with limited(item, BUILDING, "what its fixtures make"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test's own time is limited, whatever it waits for."""
    limit = item.get_closest_marker("limit")
    with limited(item, limit.args[0] if limit is not None else LIMIT, "the test"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with limited(item, BUILDING, "what its fixtures end"):
        return (yield)


def pytest_report_header() -> str:
    import deep_gemm

    reason = why_no_gpu()
    origin = Path(deep_gemm.__file__ or "").parent
    return f"deep_gemm: {origin}; gpu tests: {'run' if reason is None else f'skipped, {reason}'}"


ALL_LONG = re.compile(r"^pytestmark = .*pytest\.mark\.long\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are all long are not imported where none of these runs: each process would import them."""
    if config.option.markexpr != "not long" or collection_path.suffix != ".py":
        return None
    return True if ALL_LONG.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # side by side: long files first, so that no process ends long after the others
        items.sort(key=lambda item: (item.path.parent.name != "compile", item.path.name not in LONG))
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in ("gpu", "compile"):
            item.add_marker(kind)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    for item in on_gpu if reason is not None else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def compiled_sooner(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels of calls on a GPU are compiled by NVRTC, in a third of NVCC's time. What tests run in other processes
    is compiled as users have it, and so are the calls of test_api.py."""
    if request.path.parent.name != "gpu" or request.path.name == "test_api.py":
        yield
        return
    from deep_gemm.settings import settings

    with settings.override(use_nvrtc=True):
        yield


@pytest.fixture(scope="session")
def kernels_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of kernels that all test files share, also those that run in other processes: several look at the same
    kernels, each at something else. A kernel is compiled by one of them."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if hasattr(request.config, "workerinput") else base) / "kernels"


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of this test's own."""
    directory = tmp_path / "kernels"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(directory))
    return directory
