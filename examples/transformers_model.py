"""A small Llama of Transformers in bfloat16 and with the FP8 layers of deep_gemm.nn: training, prefill and generation.

`deep_gemm.nn.convert(model)` is all that changes. Both models begin with the same weights, and learn to continue
sequences that repeat a random pattern. Then the bfloat16 one is copied, and the copy's weights become FP8: how many
greedy tokens are the same, and how many tokens a second each makes.

    pip install transformers
    python examples/transformers_model.py                 # large enough for a GPU if there is one, tiny otherwise
    python examples/transformers_model.py --steps 300
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deep_gemm

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16}
TOKENS = 64
"""How many different tokens there are."""


def model(sizes: dict[str, int], device: str) -> Any:
    """A model with random weights in float32, which training reads in bfloat16."""
    torch.manual_seed(0)
    heads = sizes["num_attention_heads"]
    config = LlamaConfig(**sizes, num_key_value_heads=heads // 2, vocab_size=TOKENS, bos_token_id=0, eos_token_id=None)
    made: Any = LlamaForCausalLM(config)
    return made.to(device)


def patterns(size: int, length: int, generator: torch.Generator, device: str) -> Tensor:
    """Random patterns of a quarter of the length, repeated."""
    return torch.randint(TOKENS, (size, length // 4), generator=generator).repeat(1, 4).to(device)


def seconds(step: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """The mean time of a step, after one that compiles."""
    step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(net: Any, steps: int, size: int, length: int, device: str) -> tuple[list[float], float]:
    """Losses step by step, and tokens a second of the last half of the steps."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
    generator, losses, start = torch.Generator().manual_seed(1), [], 0.0
    for step in range(steps):
        if step == steps // 2:
            synchronize(device)
            start = time.perf_counter()
        ids = patterns(size, length, generator, device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = net(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    synchronize(device)
    rate = (steps - steps // 2) * size * length / (time.perf_counter() - start)
    return [float(loss) for loss in losses], rate


def serve(net: Any, ids: Tensor, count: int, device: str) -> tuple[Tensor, float, float]:
    """The greedy tokens after ``ids``, tokens a second of prefill, and of generation."""

    def generate(new: int) -> Tensor:
        options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
        tokens: Tensor = net.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        return tokens[:, ids.shape[1] :]

    with torch.inference_mode():
        prefill = seconds(lambda: net(input_ids=ids, use_cache=False), device)
        whole = seconds(lambda: generate(count), device, repeats=2)
        return generate(count), ids.numel() / prefill, ids.shape[0] * count / whole


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = device == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200 if gpu else 4, help="of training [%(default)s]")
    parser.add_argument("--new-tokens", type=int, default=64 if gpu else 4, help="to generate [%(default)s]")
    options = parser.parse_args()
    sizes, size, length, batches = (LARGE, 32, 256, (1, 32)) if gpu else (SMALL, 4, 32, (1, 2))

    trained = {name: model(sizes, device) for name in ("BF16", "FP8")}
    print(deep_gemm.nn.convert(trained["FP8"]), end="\n\n")
    for name, net in trained.items():
        losses, rate = train(net, options.steps, size, length, device)
        print(f"training {name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:,.0f} tokens/s")

    served = {"BF16": trained["BF16"].bfloat16().eval()}
    served["FP8"] = copy.deepcopy(served["BF16"])
    deep_gemm.nn.convert(served["FP8"], mode="inference")
    generator = torch.Generator().manual_seed(2)
    for batch in batches:
        ids = patterns(batch, length, generator, device)[:, : length // 2 + 1]
        found = {name: serve(net, ids, options.new_tokens, device) for name, net in served.items()}
        for name, (_, prefill, rate) in found.items():
            print(f"batch {batch:2} {name}: prefill {prefill:,.0f} tokens/s, generation {rate:,.0f} tokens/s")
        same = (found["BF16"][0] == found["FP8"][0]).float().mean().item()
        print(f"batch {batch:2}: {100 * same:.1f}% of greedy tokens are the same")


if __name__ == "__main__":
    main()
