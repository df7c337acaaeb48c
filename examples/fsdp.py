"""Train a model in FP8 whose weights FSDP2 shards, gathered in bfloat16 and in FP8, beside one process with all tokens.

    torchrun --nproc-per-node 2 examples/fsdp.py                    # large with GPUs, by NCCL; small by gloo
    torchrun --nproc-per-node 2 examples/fsdp.py --record FILE      # adds what was measured to a JSON file

Each rank has a part of each weight in bfloat16, of its gradient and of the optimizer's state, and tokens of its own.
FSDP2 gathers the weights of a block before its forward and its backward pass. In FP8 half of the bytes move, and the
products are the same: the parts are cast to FP8 in the same blocks in which a whole weight is.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import milliseconds, options, relative_error, report, started, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from deep_gemm.nn import FP8Linear
from deep_gemm.nn.parallel import gather_in_fp8

SIZES = {"cuda": (4096, 4096, 11264, 6), "cpu": (128, 256, 512, 2)}
"""Tokens of a rank, width, hidden features and blocks, by the type of device. Scales of gradients are those of 128
tokens: with a multiple of that a rank has the same blocks as one process."""

BOUND = 0.01
"""Above what rounding to bfloat16 costs. An error of FP8 itself would be 0.04, and is in both."""


class Block(nn.Module):
    """A SwiGLU MLP after a norm, added to its input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            FP8Linear(k, n, bias=False, dtype=torch.bfloat16)
            for k, n in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, x.shape[-1:])
        added: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return added


def shard(model: nn.Module, mesh: DeviceMesh, in_fp8: bool) -> nn.Module:
    """``model`` with its weights sharded, block by block."""
    if in_fp8:
        gather_in_fp8(model, mesh.size())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, wanted: Tensor) -> Tensor:
    """Learn a batch by heart. Returns the loss before."""
    optimizer.zero_grad()
    loss = (model(x) - wanted).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def run(mesh: DeviceMesh, given: argparse.Namespace) -> None:
    device, rank = mesh.device_type, mesh.get_rank()
    tokens, width, hidden, blocks = SIZES[device]
    torch.manual_seed(0)  # the same model and tokens on each rank
    model = nn.Sequential(*(Block(width, hidden) for _ in range(blocks))).to(device)
    x = torch.randn(tokens * mesh.size(), width, device=device).bfloat16()
    wanted = torch.roll(x, 1, dims=1)
    own = slice(rank * tokens, (rank + 1) * tokens)
    ways: dict[str, Callable[[], Any]] = {
        "one process": lambda: copy.deepcopy(model),
        "gathered in bfloat16": lambda: shard(copy.deepcopy(model), mesh, in_fp8=False),
        "gathered in FP8": lambda: shard(copy.deepcopy(model), mesh, in_fp8=True),
    }
    losses: dict[str, list[float]] = {}
    gradients: dict[str, Tensor] = {}
    times: dict[str, float | None] = {}
    for name, make in ways.items():
        net, part = make(), slice(None) if name == "one process" else own
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3 * 256 / width)
        one = partial(step, net, optimizer, x[part], wanted[part])
        found = [one()]
        gradients[name] = whole(next(net.parameters()).grad).clone()  # of the first step: weights are the same yet
        found += [one() for _ in range(given.steps - 1)]
        mean = torch.stack(found)
        dist.all_reduce(mean)
        losses[name] = (mean / mesh.size()).tolist()
        times[f"{name}, {tokens * mesh.size()} tokens"] = milliseconds(one, 5)
        del net, one, optimizer
        if device == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            print(f"{name:24} losses " + " ".join(f"{loss:.4f}" for loss in losses[name]), flush=True)
    alone, exact = losses.pop("one process"), gradients.pop("one process")
    if not alone[-1] < alone[0]:
        raise SystemExit(f"The loss does not fall: {alone}")
    errors = {
        f"losses, {name}": max(abs(a / b - 1) for a, b in zip(each, alone, strict=True))
        for name, each in losses.items()
    }
    errors |= {f"first gradient, {name}": relative_error(each, exact) for name, each in gradients.items()}
    report(mesh, "FSDP2", errors, dict.fromkeys(errors, BOUND), times, given.record)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="steps of AdamW that are compared [%(default)s]")
    given = parser.parse_args()
    with started() as mesh:
        run(mesh, given)


if __name__ == "__main__":
    main()
