"""Train a small transformer block in FP8, and the same block in bfloat16, and draw both loss curves.

Linear layers are those of deep_gemm.nn, whose three products and casts are deep_gemm's: forward and input gradient with
scales of 1x128 by 128x128, weight gradient with 1x128 on both sides. Attention, normalisation and the optimiser are
torch's.

    python examples/train_linear.py            # on a Hopper GPU: 300 steps
    python examples/train_linear.py            # without one: 10 steps of the reference, which is slow

The task: predict the next token of sequences that repeat a random pattern, which takes attention to solve. Each step
has new patterns, so that the loss falls only after many steps. Without a GPU all steps have the same ones, which the
model learns by heart.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from deep_gemm.nn import BF16Linear, FP8Linear


def linear(k: int, n: int, fp8: bool) -> nn.Module:
    """A linear layer without bias, with float32 weights, in FP8 or in bfloat16."""
    layer = FP8Linear(k, n, bias=False) if fp8 else BF16Linear(k, n, bias=False)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return layer


class Block(nn.Module):
    """Embedding, causal attention, SwiGLU, and logits."""

    def __init__(self, width: int, heads: int, tokens: int, fp8: bool) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(tokens, width)
        self.places = nn.Parameter(torch.randn(1024, width) * 0.02)
        self.qkv, self.out = linear(width, 3 * width, fp8), linear(width, width, fp8)
        self.gate, self.up = linear(width, 2 * width, fp8), linear(width, 2 * width, fp8)
        self.down = linear(2 * width, width, fp8)
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
    fp8: bool, steps: int, device: str, width: int = 512, length: int = 128, size: int = 16, by_heart: bool = False
) -> list[float]:
    """Losses, step by step. ``by_heart``: all steps have the same patterns."""
    torch.manual_seed(0)
    model = Block(width, heads=8, tokens=64, fp8=fp8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    losses = []
    began = time.perf_counter()
    for step in range(steps):
        if by_heart:
            generator.manual_seed(1)
        ids = batch(size, length, 64, generator).to(device)
        loss = functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            took = time.perf_counter() - began
            print(f"{'FP8 ' if fp8 else 'BF16'} step {step:4}: loss {losses[-1]:.4f} after {took:.1f} s", flush=True)
    return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), colour in zip(curves.items(), ("#9aa0a6", "#0b6e4f"), strict=True):
        axes.plot(losses, label=name, color=colour)
    axes.set(xlabel="step", ylabel="loss", title="One transformer block, linear layers in BF16 and in FP8")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300 if device == "cuda" else 10)
    parser.add_argument("--png", type=Path, default=Path("train_linear.png"), help="where to draw the curves")
    options = parser.parse_args()
    size = {} if device == "cuda" else {"width": 128, "length": 32, "size": 2, "by_heart": True}
    curves = {name: train(name == "FP8", options.steps, device, **size) for name in ("BF16", "FP8")}
    last = {name: sum(losses[-10:]) / len(losses[-10:]) for name, losses in curves.items()}
    print(f"loss of the last steps: BF16 {last['BF16']:.4f}, FP8 {last['FP8']:.4f}")
    try:
        draw(curves, options.png)
    except ImportError:
        print("no chart: pip install matplotlib")
    else:
        print(f"curves in {options.png}")


if __name__ == "__main__":
    main()
