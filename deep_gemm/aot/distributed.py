"""Compiling ahead on all ranks of a torch.distributed job: each kernel is compiled once and sent to all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist

from deep_gemm.aot import build, shard
from deep_gemm.aot.exchange import BuildExchange, StoreError
from deep_gemm.aot.outcomes import Outcome, OutcomeLog, Progress, Summary
from deep_gemm.errors import DeepGemmError, InvalidInputError, UnsupportedError
from deep_gemm.jit.builder import BuildRequest, default_builder
from deep_gemm.log import counted, log
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine


def precompile(
    what: Any,
    *,
    store: dist.Store | None = None,
    timeout: float = 300.0,
    jobs: int | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Summary:
    """Build every kernel that `what` can need, divided among the ranks of the default process group.

    Every rank calls it. Each draws kernels from a common queue, builds them, and sends the bytes to the others through
    the store. No collective, no NCCL and no common disk is needed; ranks with a common cache directory use that
    instead. In the summary, "compiled" counts what this rank compiled, and "adopted" what it got from others. Without a
    process group, or in one of a single rank, it is `deep_gemm.precompile`.

    No rank depends on another: a kernel that does not come within `timeout`, is damaged or does not fit is compiled
    here, with a warning. Ranks whose list of kernels differs from the first rank's warn, and share only with ranks that
    have the same list. Bytes are checked, not signed: whoever can write to the store can give kernels to the ranks.

    Args:
        what, progress, tp, ep, max_m, op, arch, num_sms, allow_partial, training: as for `deep_gemm.precompile`.
        store: where kernels are exchanged; that of the default process group if None.
        timeout: how many seconds this rank waits for others in all. The process that holds the store must answer.
        jobs: threads that build at once in this process; this rank's share of the kernels if None, at most its CPUs.

    Raises InvalidInputError for a `timeout` below 0 and for a `store` without a process group, and UnsupportedError if
    torch does not tell the group's store.
    """
    start, deadline = time.perf_counter(), time.monotonic() + timeout
    if not 0 <= timeout < math.inf:
        raise InvalidInputError(f"timeout must be a number of seconds from 0, but it is {timeout!r}.")
    grouped = dist.is_available() and dist.is_initialized()
    if store is not None and not grouped:
        raise InvalidInputError(
            "store was given, but torch.distributed is not initialised, so that this process has no rank: call "
            "torch.distributed.init_process_group first, or leave store out to build everything here."
        )
    size = dist.get_world_size() if grouped else 1
    if size == 1:
        return build.precompile(what, jobs=jobs, progress=progress, **options)
    store = _default_store() if store is None else store
    work = build.work_of(what, **options)
    report = OutcomeLog(work, progress)
    try:
        requests = {params: engine.build_request(params) for params in shard.order(work.kernels)}
        keys = [default_builder().key(request) for request in requests.values()]
        exchange = BuildExchange(store, dist.get_rank(), size, keys)
        if not exchange.agreed:
            log.warning(
                f"Rank {dist.get_rank()} builds other kernels than rank {exchange.first_rank}: their shapes, "
                "compilers, settings or versions of deep_gemm differ. It shares with ranks like itself only."
            )
        mine = _build_share(exchange, list(requests), jobs or min(build.cpus(), -(-len(keys) // size)), report)
        _take_rest(exchange, requests, mine, dist.get_rank() * len(keys) // size, deadline, report)
        exchange.close()
    except StoreError as error:
        log.warning(f"The store of the process group failed, so that this rank builds by itself: {error}")
    except DeepGemmError as error:
        # Such as no compiler: building will fail for each kernel, and say so.
        log.debug("nothing is shared: %s", error)
    build.build_all(report.missing(), report.add, jobs=jobs)
    summary = report.summary(start)
    if summary.failed:
        log.warning(summary.failures)
    return summary


def _build_share(exchange: BuildExchange, work: list[KernelParams], jobs: int, report: OutcomeLog) -> set[int]:
    """Build the kernels that this rank draws until none is left. Returns their places in the list."""
    mine: set[int] = set()
    running: dict[Future[Outcome], int] = {}
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        while True:
            while len(running) < jobs and (place := exchange.draw()) is not None:
                running[pool.submit(build.build, work[place])] = place
            if not running:
                return mine
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                outcome, place = future.result(), running.pop(future)
                report.add(outcome)
                mine.add(place)
                exchange.publish(place, outcome.binary)


def _take_rest(
    exchange: BuildExchange,
    requests: dict[KernelParams, BuildRequest],
    mine: set[int],
    first: int,
    deadline: float,
    report: OutcomeLog,
) -> None:
    """Adopt what others built. Each rank begins at another place, so that not all ask for the same kernel at once."""
    late = []
    places = [(first + step) % len(requests) for step in range(len(requests))]
    items = list(requests.items())
    for place in places:
        if place in mine:
            continue
        params, request = items[place]
        try:
            binary = default_builder().lookup(request)
            if binary is None:
                if not exchange.wait(place, deadline):
                    late.append(request.name)
                    continue
                # On a common disk it is there by now, and is not fetched.
                binary = default_builder().lookup(request)
            if binary is None:
                sent = exchange.fetch(place)
                binary = default_builder().adopt(request, sent) if sent is not None else None
        except (DeepGemmError, ValueError) as error:
            log.warning(f"What another rank published as {request.name} is refused and built here: {error}")
            continue
        if binary is not None:
            report.add(Outcome(binary.name, (), params, binary))
    if late:
        verb = "is" if len(late) == 1 else "are"
        names = ", ".join(late[:4]) + (", ..." if len(late) > 4 else "")
        log.warning(
            f"{counted(len(late), 'kernel')} did not come from other ranks in time, and {verb} built here: {names}"
        )


def _default_store() -> Any:
    # ProcessGroup.get_group_store would be public, but torch 2.7 lacks it; this function is in all from 2.7 to 2.13.
    find: Callable[[], Any] | None = getattr(dist.distributed_c10d, "_get_default_store", None)
    if find is None:
        raise UnsupportedError("This version of torch does not tell the store of its process group: pass store=...")
    return find()
