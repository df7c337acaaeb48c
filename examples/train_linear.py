"""Train a small transformer block in bfloat16 and in FP8 by two recipes, and say whether the losses differ.

Linear layers are those of deep_gemm.nn, whose three products and casts are deep_gemm's. Forward and input gradient have
scales of 1x128 by 128x128. The weight gradient has 1x128 on both sides, or is mixed: 128x128 for the layer's input.
Attention, normalisation and the optimiser are torch's.

    python examples/train_linear.py                                       # on a Hopper GPU: 300 steps, 3 seeds
    python examples/train_linear.py --steps 2000 --record rows.jsonl      # a minute or so
    python examples/train_linear.py                                       # without a GPU: 10 steps of the reference

The task: predict the next token of sequences that repeat a random pattern, which takes attention to solve. Each step
has new patterns, so that the loss falls only after many steps. Without a GPU all steps have the same ones, which the
model learns by heart.

Each way is trained from the same seeds: weights and the order of patterns. A run's result is its mean loss over the
last tenth of its steps. Results of BF16 runs differ by their seeds, with a standard deviation s. So the mean of n runs
differs from that of n others by chance alone: in 95 of 100 cases by less than t s sqrt(2 / n), where t is Student's
with n - 1 degrees of freedom. That is the noise which the last line compares with.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deep_gemm.nn import BF16Linear, FP8Linear

WAYS: dict[str, dict[str, Any] | None] = {
    "BF16": None,
    "FP8": {"weight_gradient": "1x128"},
    "FP8 mixed": {"weight_gradient": "mixed"},
}
"""The ways to train, and the options of `FP8Linear`."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Student's t for 95%, by the number of seeds."""
POINTS = 200
"""Losses of a recorded curve, at most: means of as many steps as that takes."""


def linear(k: int, n: int, way: str) -> nn.Module:
    """A linear layer without bias, with float32 weights, in FP8 or in bfloat16."""
    options = WAYS[way]
    layer = BF16Linear(k, n, bias=False) if options is None else FP8Linear(k, n, bias=False, **options)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return layer


class Block(nn.Module):
    """Embedding, causal attention, SwiGLU, and logits."""

    def __init__(self, width: int, heads: int, tokens: int, way: str) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(tokens, width)
        self.places = nn.Parameter(torch.randn(1024, width) * 0.02)
        self.qkv, self.out = linear(width, 3 * width, way), linear(width, width, way)
        self.gate, self.up = linear(width, 2 * width, way), linear(width, 2 * width, way)
        self.down = linear(2 * width, width, way)
        self.logits = nn.Linear(width, tokens, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = (self.embedding(ids) + self.places[: ids.shape[1]]).bfloat16()
        q, k, v = self.qkv(norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = norm(x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        logits: Tensor = self.logits(norm(x).float())
        return logits


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def batch(size: int, length: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Random patterns of a quarter of the length, repeated."""
    pattern = torch.randint(tokens, (size, length // 4), generator=generator)
    return pattern.repeat(1, 4)


def train(
    way: str,
    steps: int,
    device: str,
    seed: int = 0,
    width: int = 512,
    length: int = 128,
    size: int = 16,
    by_heart: bool = False,
) -> list[float]:
    """Losses, step by step. ``by_heart``: all steps have the same patterns."""
    torch.manual_seed(seed)
    model = Block(width, heads=8, tokens=64, way=way).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=device == "cuda")
    generator = torch.Generator().manual_seed(seed + 1)
    losses = []
    began = time.perf_counter()
    for step in range(steps):
        if by_heart:
            generator.manual_seed(seed + 1)
        ids = batch(size, length, 64, generator).to(device, non_blocking=True)
        loss = functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # the host does not wait for the GPU
        if step % max(25, steps // 8) == 0 or step == steps - 1:
            said = f"loss {losses[-1].item():.4f} after {time.perf_counter() - began:.1f} s"
            print(f"{way:9} seed {seed} step {step:4}: {said}", flush=True)
    return torch.stack(losses).tolist()


def last(losses: list[float]) -> float:
    """The mean of the last tenth."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def verdict(curves: dict[str, list[list[float]]]) -> str:
    """Whether the FP8 runs differ from those in BF16 by more than chance, given the losses of each way's runs."""
    ends = {way: [last(losses) for losses in runs] for way, runs in curves.items()}
    mean = {way: statistics.fmean(found) for way, found in ends.items()}
    said = "loss of the last tenth of the steps: " + ", ".join(f"{way} {value:.4f}" for way, value in mean.items())
    seeds = len(ends["BF16"])
    if seeds not in STUDENT:
        return f"{said}\nOne seed says nothing of noise: pass --seeds 2 or more."
    noise = STUDENT[seeds] * statistics.stdev(ends["BF16"]) * math.sqrt(2 / seeds)
    found = []
    for way in [way for way in curves if way != "BF16"]:
        by = [other - own for other, own in zip(ends[way], ends["BF16"], strict=True)]
        answer = "yes" if abs(statistics.fmean(by)) <= noise else "NO"
        found.append(f"{way} {answer} ({statistics.fmean(by):+.4f}, by seed {min(by):+.4f} to {max(by):+.4f})")
    return f"{said}\nwithin the noise of BF16, {noise:.4f} with {seeds} seeds: {', '.join(found)}"


def rows(curves: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """A row for each run: means of ``every`` steps, and that of the last tenth."""
    found = []
    for way, runs in curves.items():
        for seed, losses in enumerate(runs):
            every = -(-len(losses) // POINTS)
            means = [statistics.fmean(losses[at : at + every]) for at in range(0, len(losses), every)]
            row = {"way": way, "seed": seed, "steps": len(losses), "last": round(last(losses), 5)}
            found.append({"mode": "losses", **row, "every": every, "losses": [round(x, 4) for x in means]})
    return found


def record(path: Path, curves: dict[str, list[list[float]]]) -> None:
    """Append rows, each with where they are from."""
    from deep_gemm.bench import provenance

    origin = provenance.environment() if torch.cuda.is_available() else {"device": "cpu"}
    with path.open("a") as file:
        file.writelines(json.dumps(row | origin) + "\n" for row in rows(curves))


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Draw the runs of the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (way, runs), colour, dash in zip(curves.items(), ("#9aa0a6", "#0b6e4f", "#b08a4f"), "--:", strict=True):
        axes.plot(runs[0], label=way, color=colour, linestyle=dash)
    axes.set(xlabel="step", ylabel="loss", title="One transformer block, linear layers in BF16 and in FP8")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300 if device == "cuda" else 10)
    parser.add_argument("--seeds", type=int, choices=[1, *STUDENT], default=3 if device == "cuda" else 1)
    parser.add_argument("--png", type=Path, default=Path("train_linear.png"), help="where to draw the curves")
    parser.add_argument("--record", type=Path, help="append a row for each run to this file")
    options = parser.parse_args()
    size: Any = {} if device == "cuda" else {"width": 128, "length": 32, "size": 2, "by_heart": True}
    curves: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way, runs in curves.items():
            runs.append(train(way, options.steps, device, seed, **size))
    if options.record is not None:
        record(options.record, curves)
    try:
        draw(curves, options.png)
    except ImportError:
        print("no chart: pip install matplotlib")
    else:
        print(f"curves in {options.png}")
    print(verdict(curves))


if __name__ == "__main__":
    main()
