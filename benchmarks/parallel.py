"""How fast layers over several GPUs are, beside torch's in bfloat16.

    torchrun --nproc-per-node 2 benchmarks/parallel.py [--output FILE] [--only WORD] [--graphs] [--turns COUNT]

- a SwiGLU MLP by tensor parallelism, with the sizes of Llama 3 70B: `FP8Linear` beside `torch.nn.Linear`;
- a mixture by expert parallelism, with the sizes of Qwen3 30B-A3B: `MoE` beside `torch.nn.functional.grouped_mm`, with
  the same router and exchange of tokens, and `fp8_mega_moe` over memory that the GPUs share, also in a CUDA graph. Each
  rank has so many tokens of its own;
- training steps with AdamW of three blocks under FSDP2, 4096 tokens a rank: gathered in FP8 and in bfloat16, beside
  `torch.nn.Linear`.

"forward" is inference, with weights that are stored in FP8; "step" is forward and backward with weights in bfloat16 and
all their casts. With `--graphs` only the MLP's forward is timed, in CUDA graphs. Times are medians between events, of
the slowest rank; ways take turns. A row for each goes to FILE, and a table to the terminal. Results must agree, within
what FP8 costs. Without GPUs sizes are tiny, and times say nothing.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import deep_gemm
from deep_gemm.bench import provenance
from deep_gemm.nn import FP8Linear, MoE
from deep_gemm.nn.exchange import TokenExchange
from deep_gemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel, gather_in_fp8
from deep_gemm.testing import timing

grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm
Call = Callable[[], Any]
Ways = dict[str, Call]

TOKENS = {"cuda": (1, 64, 4096), "cpu": (8,)}
MLP = {"cuda": (8192, 28672), "cpu": (256, 512)}
"""Width and hidden features, of all ranks."""
MOE = {"cuda": (2048, 768, 128, 8), "cpu": (256, 128, 4, 2)}
"""Width, hidden features of an expert, experts of all ranks and those of a token."""
FSDP = {"cuda": (4096, 4096, 11264, 3), "cpu": (16, 256, 512, 1)}
"""Tokens of a rank, width, hidden features and blocks."""
OURS, TORCH, MEGA = "deep_gemm FP8", "torch BF16", "fp8_mega_moe"
CALLS = 10
"""In one sample."""
BOUND = 0.1
"""The largest relative difference from bfloat16: a product of FP8 has 0.04, and two or three follow each other."""


class Mlp(nn.Module):
    """SwiGLU between linear layers."""

    def __init__(self, make: Any, width: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.gate, self.up = (make(width, hidden, bias=False, **options) for _ in range(2))
        self.down = make(hidden, width, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


class Block(Mlp):
    """An MLP after a norm, added to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(functional.rms_norm(x, x.shape[-1:]))


class TorchExperts(nn.Module):
    """The layer of `MoE` by torch in bfloat16. Weights are this rank's."""

    ALIGNED = 8
    """Rows of an expert are padded to a multiple, which grouped_mm needs for the gradients of weights."""

    def __init__(self, layer: MoE, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router, self.top_k, self.exchange = copy.deepcopy(layer.router), layer.top_k, TokenExchange(mesh)
        self.experts = layer.gate_up.num_groups
        own = slice(*(self.experts // mesh.size() * each for each in (mesh.get_rank(), mesh.get_rank() + 1)))
        self.gate_up, self.down = (nn.Parameter(x.weight.detach()[own].clone()) for x in (layer.gate_up, layer.down))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x.float()).softmax(-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        y = self.exchange(x, chosen, self.experts, self.products)
        return (y * weights[..., None]).sum(1).to(x.dtype)

    def products(self, x: Tensor, expert: Tensor) -> Tensor:
        """Rows by experts of this rank, (rows, 1)."""
        expert, count = expert.flatten(), self.gate_up.shape[0]
        numbers = torch.arange(count, device=x.device)
        sizes = (expert[:, None] == numbers).sum(0)
        padded = (sizes + self.ALIGNED - 1) // self.ALIGNED * self.ALIGNED
        order = expert.argsort(stable=True)
        shift = (padded.cumsum(0) - padded) - (sizes.cumsum(0) - sizes)
        place = torch.arange(len(order), device=x.device) + shift[expert[order]]
        rows = x.new_zeros(len(order) + self.ALIGNED * count, x.shape[1]).index_copy(0, place, x.index_select(0, order))
        ends = padded.cumsum(0).to(torch.int32)
        gate, up = grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        y = grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        return torch.zeros_like(y[: len(order)]).index_copy(0, order, y.index_select(0, place))


class MegaExperts(nn.Module):
    """The layer of `MoE` by `fp8_mega_moe`, for ``most`` tokens of a rank."""

    def __init__(self, layer: MoE, mesh: DeviceMesh, most: int) -> None:
        super().__init__()
        self.router, experts = copy.deepcopy(layer.router), layer.gate_up.num_groups
        own = slice(*(experts // mesh.size() * each for each in (mesh.get_rank(), mesh.get_rank() + 1)))
        pairs: Any = [tuple(part[own].clone() for part in each.plain()) for each in (layer.gate_up, layer.down)]
        self.weights = deep_gemm.transform_weights_for_mega_moe_sm90(*pairs)
        sizes = experts, most, layer.top_k, layer.width, layer.down.in_features
        self.buffer = deep_gemm.get_symm_buffer_for_mega_moe(mesh.get_group(), *sizes)

    def forward(self, x: Tensor) -> Tensor:
        (weights, chosen), at, y = self.router.choose(x), self.buffer, torch.empty_like(x)
        own = at.x, at.x_sf, at.topk_idx, at.topk_weights
        deep_gemm.mega_moe_pre_dispatch_sm90(x, chosen, weights, *own, num_tokens=len(x))
        deep_gemm.fp8_mega_moe(y, *self.weights, at, num_tokens_bound=len(x))
        return y


def step(model: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Forward and backward."""
    x.grad = None
    model.zero_grad()
    model(x).backward(dy)


def inference(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Any = model(x)
        # torch's RowwiseParallel returns a sum that may still run.
        return y.wait() if hasattr(y, "wait") else y


def batch(mesh: DeviceMesh, tokens: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x, dy = (torch.randn(tokens, width, device=mesh.device_type).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def mlps(mesh: DeviceMesh) -> dict[str, dict[str, nn.Module]]:
    """By pass and way: the same weights, divided among ranks."""
    width, hidden = MLP[mesh.device_type]
    place: dict[str, Any] = {"device": mesh.device_type, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    plain = Mlp(nn.Linear, width, hidden, **place)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}  # torch's too
    found: dict[str, dict[str, nn.Module]] = {}
    for name, mode in (("forward", "inference"), ("step", "training")):
        ours = Mlp(FP8Linear, width, hidden, mode=mode, **place)
        ours.load_state_dict(plain.state_dict())
        found[name] = {OURS: parallelize_module(ours, mesh, plan)}
    divided = parallelize_module(plain, mesh, plan)
    for each in found.values():
        each[TORCH] = divided
    return found


def mixtures(mesh: DeviceMesh) -> dict[str, dict[str, nn.Module]]:
    sizes = MOE[mesh.device_type]
    place: dict[str, Any] = {"device": mesh.device_type, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    training, stored = MoE(*sizes, **place), MoE(*sizes, mode="inference", **place)
    stored.load_state_dict(training.state_dict())
    plain = TorchExperts(training, mesh)
    mega = {MEGA: MegaExperts(stored, mesh, TOKENS["cuda"][-1])} if mesh.device_type == "cuda" else {}
    ours = [parallelize_module(each, mesh, ExpertParallel()) for each in (stored, training)]
    return {"forward": {OURS: ours[0], TORCH: plain, **mega}, "step": {OURS: ours[1], TORCH: plain}}


LAYERS: dict[str, tuple[Callable[[DeviceMesh], dict[str, dict[str, nn.Module]]], dict[str, Any]]] = {
    "tensor parallel MLP": (mlps, MLP),
    "expert parallel mixture": (mixtures, MOE),
}


def layers(mesh: DeviceMesh, what: str) -> Iterator[tuple[dict[str, Any], Ways]]:
    make, sizes = LAYERS[what]
    rank = mesh.get_rank() if "expert" in what else 0  # other tokens on each rank, or the same
    for name, models in make(mesh).items():
        for tokens in TOKENS[mesh.device_type]:
            x, dy = batch(mesh, tokens, sizes[mesh.device_type][0], seed=rank + 1)
            for way, model in models.items():
                agree(f"{what}, {way}", inference(model, x), inference(models[TORCH], x))
            run: Any = partial(inference, x=x) if name == "forward" else partial(step, x=x, dy=dy)
            labels = {"layer": what, "pass": name, "tokens": tokens, "sizes": sizes[mesh.device_type]}
            ways: Ways = {way: partial(run, model) for way, model in models.items()}
            if MEGA in ways:
                ways[f"{MEGA}, graph"] = captured(ways[MEGA])
            yield labels, ways


def agree(what: str, y: Tensor, wanted: Tensor) -> None:
    error = ((y.float() - wanted.float()).norm() / wanted.float().norm()).item()
    if not error <= BOUND:
        raise SystemExit(f"{what}: the result in FP8 differs from torch's by {error:.3f}, more than {BOUND}")


def graphs(mesh: DeviceMesh) -> Iterator[tuple[dict[str, Any], Ways]]:
    """The MLP's forward in CUDA graphs."""
    models = mlps(mesh)["forward"]
    for tokens in TOKENS[mesh.device_type]:
        x, _ = batch(mesh, tokens, MLP[mesh.device_type][0], seed=1)
        ways: Ways = {}
        for way, model in models.items():
            ways[way] = captured(partial(inference, model, x))
        sizes = MLP[mesh.device_type]
        yield {"layer": "tensor parallel MLP", "pass": "forward, graph", "tokens": tokens, "sizes": sizes}, ways


def captured(call: Call) -> Call:
    """The call as a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread asks for events, which another mode would refuse during capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def fsdp(mesh: DeviceMesh) -> Iterator[tuple[dict[str, Any], Ways]]:
    tokens, width, hidden, blocks = FSDP[mesh.device_type]
    place: dict[str, Any] = {"device": mesh.device_type, "dtype": torch.bfloat16}
    x, dy = batch(mesh, tokens, width, seed=mesh.get_rank())
    ways: Ways = {}
    for way, make in ((f"{OURS}, gathered", FP8Linear), (OURS, FP8Linear), (TORCH, nn.Linear)):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Block(make, width, hidden, **place) for _ in range(blocks)))
        if way.endswith("gathered"):
            gather_in_fp8(model, mesh.size())
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        ways[way] = partial(trained, model, torch.optim.AdamW(model.parameters(), lr=1e-5), x, dy)
    yield {"layer": "FSDP2", "pass": "step and AdamW", "tokens": tokens, "sizes": FSDP[mesh.device_type]}, ways


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, dy: Tensor) -> None:
    step(model, x, dy)
    optimizer.step()


def measure(mesh: DeviceMesh, ways: Ways, turns: int) -> dict[str, float]:
    """Microseconds of a call: the medians of the slowest rank."""
    for call in ways.values():
        for _ in range(3):
            call()
    samples: timing.Samples = {way: [] for way in ways}
    count = CALLS if mesh.device_type == "cuda" else 1
    for _ in range(turns):
        for way, call in ways.items():
            dist.barrier()
            samples[way].append(elapsed_us(mesh, lambda call=call: [call() for _ in range(count)]) / count)
    found = torch.tensor([statistics.median(each) for each in samples.values()], device=mesh.device_type)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(samples, found.tolist(), strict=True))


def elapsed_us(mesh: DeviceMesh, work: Call) -> float:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()
        return timing.elapsed_us(work)
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


@contextlib.contextmanager
def ranks() -> Iterator[DeviceMesh]:
    """All ranks, by NCCL if there are GPUs and by gloo otherwise."""
    if "RANK" not in os.environ:
        raise SystemExit(f"Run it as ranks: torchrun --nproc-per-node 2 {sys.argv[0]}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=2))
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Append rows to this file.")
@click.option("--only", default="", help="Only what has this in its name.")
@click.option("--graphs", "in_graphs", is_flag=True, help="The MLP's forward in CUDA graphs, and nothing else.")
@click.option("--turns", default=10, show_default=True, help="Samples of each way, with a GPU.")
def main(output: Path | None, only: str, in_graphs: bool, turns: int) -> None:
    """Time layers over several GPUs."""
    with ranks() as mesh:
        parts: dict[str, Any] = {what: partial(layers, what=what) for what in LAYERS} | {"FSDP2": fsdp}
        if in_graphs:
            parts = {"tensor parallel MLP": graphs}
        origin = {"ranks": mesh.size(), "backend": dist.get_backend(), **provenance.environment()}
        lines = [f"{'':27}{'pass':16}{'tokens':>7}  {'way':24}{'us':>10}{'x torch':>9}"]
        for what, part in parts.items():
            if only not in what:
                continue
            for labels, ways in part(mesh):
                found = measure(mesh, ways, turns if mesh.device_type == "cuda" else 1)
                ways.clear()  # NCCL's group waits at its end for graphs
                for way, us in found.items():
                    row = {"mode": "parallel", **labels, "way": way, "us": round(us, 2), **origin}
                    if output is not None and mesh.get_rank() == 0:
                        with output.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                    place = f"{what:27}{labels['pass']:16}{labels['tokens']:7}"
                    lines.append(f"{place}  {way:24}{us:10.1f}{found[TORCH] / us:9.2f}")
        if mesh.get_rank() == 0:
            print("\n".join(lines), flush=True)
    if not torch.cuda.is_available():
        # With gloo's threads an interpreter sometimes ends by SIGABRT: see examples/ranks.py.
        os._exit(0)


if __name__ == "__main__":
    main()
