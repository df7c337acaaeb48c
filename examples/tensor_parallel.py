"""An MLP and a mixture of experts in FP8, divided among GPUs, compared with one GPU that has all of it.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py                   # large with GPUs, by NCCL; small by gloo
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --record FILE     # adds what was measured to a JSON file

Tensor parallelism: each rank has some of the hidden features, and all tokens. Results of the ranks are added. Expert
parallelism: each rank has some of the experts, and tokens of its own, which go to the ranks of their experts and back.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from ranks import milliseconds, options, relative_error, report, started, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from deep_gemm.nn import FP8Linear, MoE
from deep_gemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel

SIZES = {"cuda": (8192, 4096, 14336, 1024, 16), "cpu": (48, 256, 512, 128, 4)}
"""Tokens, width, hidden features of the MLP and of an expert, and experts, by the type of device."""
BOUND = 0.01
"""Above what rounding of sums to bfloat16 costs. An error of FP8 itself would be 0.04, and is in both."""


class Mlp(nn.Module):
    """SwiGLU between two linear layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = FP8Linear(width, hidden, bias=False), FP8Linear(width, hidden, bias=False)
        self.down = FP8Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


def step(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Any]:
    """The result of a model, and all gradients."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **{f"d {name}": each.grad for name, each in model.named_parameters()}}


def errors(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    return {name: relative_error(whole(found[name]), wanted[name]) for name in wanted}


def tensor_parallel(mesh: DeviceMesh, record: Any) -> None:
    device = mesh.device_type
    tokens, width, hidden, _, _ = SIZES[device]
    torch.manual_seed(0)  # the same model and tokens on each rank
    model = Mlp(width, hidden).to(device)
    x, dy = (torch.randn(tokens, width, device=device).bfloat16() for _ in range(2))
    alone = copy.deepcopy(model)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    found = errors(step(model, x, dy), step(alone, x, dy))
    times = {
        "one GPU, forward and backward": milliseconds(lambda: step(alone, x, dy)),
        f"{mesh.size()} GPUs, the same tokens": milliseconds(lambda: step(model, x, dy)),
    }
    report(mesh, "tensor parallel MLP", found, dict.fromkeys(found, BOUND), times, record)


def expert_parallel(mesh: DeviceMesh, record: Any) -> None:
    device, rank = mesh.device_type, mesh.get_rank()
    tokens, width, _, hidden, experts = SIZES[device]
    torch.manual_seed(0)
    model = MoE(width, hidden, experts, 2).to(device)
    x, dy = (torch.randn(tokens * mesh.size(), width, device=device).bfloat16() for _ in range(2))
    own = slice(rank * tokens, (rank + 1) * tokens)
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, ExpertParallel())
    wanted, got = step(alone, x, dy), step(model, x[own], dy[own])
    dist.all_reduce(got["d router.weight"])  # the router is whole on each rank, and saw some of the tokens
    found = errors(got, {name: each[own] if name in ("y", "dx") else each for name, each in wanted.items()})
    times = {
        "one GPU, forward and backward": milliseconds(lambda: step(alone, x, dy)),
        f"{mesh.size()} GPUs, each with a part of the tokens": milliseconds(lambda: step(model, x[own], dy[own])),
    }
    report(mesh, "expert parallel mixture", found, dict.fromkeys(found, BOUND), times, record)


def main() -> None:
    given = options(__doc__).parse_args()
    with started() as mesh:
        tensor_parallel(mesh, given.record)
        expert_parallel(mesh, given.record)


if __name__ == "__main__":
    main()
