"""What the examples with several ranks share: the process group, times, the table and the record."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def options(doc: str | None) -> argparse.ArgumentParser:
    """The command line that the examples share."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--record", type=Path, help="a JSON file to which rank 0 adds what was measured")
    return parser


@contextlib.contextmanager
def started() -> Iterator[DeviceMesh]:
    """All ranks, by NCCL if there are GPUs and by gloo otherwise. A collective that a rank misses fails in time."""
    if "RANK" not in os.environ:
        raise SystemExit(f"Run it as ranks: torchrun --nproc-per-node 2 {sys.argv[0]}")
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if 0 < count <= rank:
        raise SystemExit(f"Local rank {rank} has no GPU: there are {count}.")
    if count:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if count else "gloo", timeout=timedelta(minutes=4))
    try:
        yield init_device_mesh("cuda" if count else "cpu", (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()
    if not count:
        # torch 2.13 keeps the group that a mesh was given, and with it gloo's threads: an interpreter that ends while
        # they run sometimes ends by "terminate called without an active exception".
        sys.stdout.flush()
        os._exit(0)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to the norm of the exact one."""
    return ((x.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30)).item()


def whole(x: Any) -> Tensor:
    """A tensor, or all shards of one."""
    gathered: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return gathered


def milliseconds(step: Callable[[], Any], repeats: int = 10) -> float | None:
    """The mean time of a step on the GPU, back to back, after steps that compile. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    for _ in range(3):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def report(
    mesh: DeviceMesh,
    title: str,
    errors: dict[str, float],
    bounds: dict[str, float],
    times: dict[str, float | None],
    record: Path | None,
) -> None:
    """Print the largest errors of all ranks and the longest times, and raise SystemExit if an error is above its
    bound."""
    values = torch.tensor([*errors.values(), *(each or 0.0 for each in times.values())], device=mesh.device_type)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    found = dict(zip([*errors, *times], values.tolist(), strict=True))
    wrong = [name for name in errors if not found[name] <= bounds[name]]
    if mesh.get_rank() == 0:
        print(f"{title}: {mesh.size()} ranks, {dist.get_backend()}")
        print(f"{'relative difference from one process':40} {'largest':>8} {'bound':>8}")
        for name in errors:
            print(f"{name:40} {found[name]:8.4f} {bounds[name]:8.4f}{'  too large' if name in wrong else ''}")
        for name, each in times.items():
            if each is not None:
                print(f"{name:40} {found[name]:8.2f} ms")
        if record is not None:
            _add(record, title, mesh, {"errors": {x: found[x] for x in errors}, "bounds": bounds}, times, found)
        sys.stdout.flush()
    if wrong:
        raise SystemExit(f"{title}: too far from one process: {', '.join(wrong)}")


def _add(record: Path, title: str, mesh: DeviceMesh, row: dict[str, Any], times: Any, found: dict[str, float]) -> None:
    from deep_gemm.bench.provenance import environment

    row["milliseconds"] = {name: round(found[name], 3) for name, each in times.items() if each is not None}
    written = json.loads(record.read_text()) if record.exists() else {}
    written[title] = {"ranks": mesh.size(), "backend": dist.get_backend(), **environment(), **row}
    record.write_text(json.dumps(written, indent=2) + "\n")
