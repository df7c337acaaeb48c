"""Jobs that run in several processes at once, which are the ranks of a process group on this machine."""

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

GROUP_SECONDS = 60
"""After which a collective fails that a rank misses."""
SECONDS = {"cpu": 90, "cuda": 240}
"""After which a test gives up. On GPUs kernels are compiled."""

PRELOAD = ["deep_gemm.nn", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
"""What ranks need and takes seconds to import. They are forked from a process that has it."""


LATE = 0.5
"""Seconds by which a late rank begins later. Then it waits a tenth of that before each layer, forward and backward."""


def run(
    job: Callable[..., Any],
    *arguments: Any,
    size: int = 2,
    device: str = "cpu",
    late: Sequence[int | None] = (None,),
) -> list[Any]:
    """The results of ``job(device mesh, *arguments)`` of each rank. The job is run once for each of ``late``: for that
    rank the others have to wait in their collectives. A rank that raises fails the test with its text."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes: list[Connection] = []
    processes = []
    end = time.monotonic() + SECONDS[device]
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            place = rank, size, store.port, device, [rank == each for each in late]
            process = context.Process(target=_serve, args=(*place, theirs, job, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        found = [_answer(pipe, end) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    wrong = [text for failed, text in found if failed]
    assert not wrong, "\n".join(wrong)
    return [results[turn] for turn in range(len(late)) for _, results in found]


def _answer(pipe: Connection, end: float) -> tuple[bool, Any]:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        return True, "a rank hangs"
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except (EOFError, OSError):
        return True, "a rank has died"
    return answer


def _serve(
    rank: int,
    size: int,
    port: int,
    device: str,
    late: Sequence[bool],
    pipe: Connection,
    job: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch
    import torch.distributed as dist

    from deep_gemm.settings import settings

    torch.set_num_threads(1)
    limit = timedelta(seconds=GROUP_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    if device == "cuda":
        # A rank has few streams. Contexts with more queues leave no room for others on the GPU: see `why_no_gpu`.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    results = []
    try:
        with settings.override(use_nvrtc=device == "cuda" or settings.use_nvrtc):  # which compiles sooner
            for is_late in late:
                with _delayed(device) if is_late else contextlib.nullcontext():
                    results.append(job(dist.device_mesh.init_device_mesh(device, (size,)), *arguments))
        pipe.send((False, results))
    except BaseException:
        pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        pipe.close()


@contextlib.contextmanager
def _delayed(device: str) -> Iterator[None]:
    """Sleep now, and before each layer's passes have the GPU wait, or this process where there is none."""
    import torch

    time.sleep(LATE)

    def wait(*_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if device == "cuda":
            torch.cuda._sleep(int(LATE / 10 * 1.7e9))  # cycles
        else:
            time.sleep(LATE / 10)

    def before_backward(module: Any, args: Any, y: Any) -> None:
        if isinstance(y, torch.Tensor) and y.requires_grad and not torch.compiler.is_compiling():
            y.register_hook(wait)

    hooks = (
        torch.nn.modules.module.register_module_forward_pre_hook(wait),
        torch.nn.modules.module.register_module_forward_hook(before_backward),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
