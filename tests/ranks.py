"""Real processes as ranks of a gloo group on this machine, each of which runs jobs."""

import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def forks_with_torch() -> ForkServerContext:
    """Processes forked from one that has imported torch, and nothing else of this one: importing it takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "deep_gemm.aot.distributed"])
    return context


class Ranks:
    """`size` processes; `run` gives each a job. The parent holds the store, so any rank may die."""

    def __init__(self, size: int) -> None:
        import torch.distributed as dist

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forks_with_torch()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, jobs: list[Job]) -> list[Any]:
        """The answer of each rank; None for one that has died."""
        for pipe, job in zip(self.pipes, jobs, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(job)
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe: Connection) -> Any:
        assert pipe.poll(60), "a rank hangs"
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return None

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_precompile(**pipe.recv()))


def _precompile(
    shapes: list[Any],
    cache: str,
    timeout: float = 30.0,
    after: str | None = None,
    sabotage: tuple[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compile ahead once the file `after` exists. `sabotage` is the fault to cause, and a file to create afterwards."""
    from deep_gemm.aot import distributed
    from deep_gemm.jit import default_builder
    from deep_gemm.jit.cache.disk import DiskCache
    from deep_gemm.settings import settings

    while after and not Path(after).exists():
        time.sleep(0.01)
    handler = Messages()
    logging.getLogger("deep_gemm").addHandler(handler)
    before = default_builder().stats
    start = time.monotonic()
    wrong = _sabotaged(*sabotage) if sabotage else contextlib.nullcontext()
    with wrong, settings.override(cache_dir=cache, use_nvrtc=True):
        summary = distributed.precompile(shapes, timeout=timeout, **options)
    stored = DiskCache(Path(cache)).info()["entries"]
    logging.getLogger("deep_gemm").removeHandler(handler)
    after_stats = default_builder().stats
    return {
        "layers": {outcome.name: outcome.binary.layer for outcome in summary.outcomes if outcome.binary is not None},
        "cubins": {outcome.name: outcome.binary.cubin for outcome in summary.outcomes if outcome.binary is not None},
        "failed": len(summary.failed),
        "compiled": after_stats["compiled"] - before["compiled"],
        "adopted": after_stats["adopted"] - before["adopted"],
        "stored": stored,
        "warnings": handler.messages,
        "seconds": time.monotonic() - start,
    }


class Messages(logging.Handler):
    """Warnings, as text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _sabotaged(how: str, done: str) -> contextlib.AbstractContextManager[None]:
    from deep_gemm.aot import build
    from deep_gemm.jit.binary import Binary

    def die(*_: Any) -> Any:
        Path(done).touch()
        os._exit(1)

    def wrong(change: Callable[[Binary], bytes]) -> Callable[[Binary], bytes]:
        def encode(binary: Binary) -> bytes:
            Path(done).touch()
            return change(binary)

        return encode

    plain = Binary.encode
    if how == "dies building":
        return _patched(build, "build", die)
    if how == "flips a bit":
        return _patched(Binary, "encode", wrong(lambda binary: plain(binary)[:-1] + bytes([plain(binary)[-1] ^ 1])))
    if how == "sends another key":
        return _patched(Binary, "encode", wrong(lambda binary: plain(replace(binary, key="0" * 40))))
    raise ValueError(how)


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
