"""A small Llama of Transformers: training in bfloat16 and FP8, and its FP8 weights served in four ways.

Both models begin with the same weights, and learn to continue sequences that repeat a random pattern;
`deep_gemm.nn.convert(model)` is all that differs. Then the bfloat16 one is served: as it is; with FP8 weights by the
layers of deep_gemm.nn; and with the same FP8 weights by the layers of Transformers, which call the Triton kernel of the
Hugging Face hub by default, or DeepGEMM's kernel of the hub, in whose place `deep_gemm.compat.enable()` puts this
library. Tokens a second of prefill and of generation, and how many greedy tokens are the same.

    pip install transformers kernels
    python examples/transformers_model.py                 # large enough for a GPU if there is one, tiny otherwise
    python examples/transformers_model.py --steps 300 --record rows.jsonl
    python examples/transformers_model.py --hub-kernels DIRECTORY   # holds the package finegrained_fp8: no network

A way that is not possible here says why, and the others go on.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deep_gemm

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16}
TOKENS = 64
"""How many different tokens there are."""
ALIKE = {"BF16": 0.9, "Transformers": 0.99, "compat": 1.0}
"""The least share of greedy tokens that FP8 by deep_gemm.nn must have in common with each other way. The Triton kernel
multiplies the same FP8 values, and adds in another order; the last way calls the same kernel."""


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


# ------------------------------------------------------------------------------------------- ways to serve a model


def by_nn(net: Any) -> Any:
    """FP8 weights, and layers of deep_gemm.nn."""
    made = copy.deepcopy(net)
    deep_gemm.nn.convert(made, mode="inference")
    return made


def by_transformers(net: Any) -> Any:
    """The same FP8 weights, in Transformers' own layers."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    made = by_nn(net)
    for parent in list(made.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, deep_gemm.nn.FP8Linear):
                with torch.device("meta"):
                    own = FP8Linear(layer.in_features, layer.out_features, block_size=(128, 128))
                own.weight, own.weight_scale_inv = layer.weight, layer.weight_scale_inv
                setattr(parent, name, own)
    return made


def load_triton_kernel(directory: Path | None) -> None:
    """Load what Transformers' FP8 layers call by default: from the hub, or from a directory."""
    from transformers.integrations import finegrained_fp8

    if directory is None:
        finegrained_fp8.load_finegrained_fp8_kernel()
        return
    sys.path.insert(0, str(directory))
    found = importlib.import_module("finegrained_fp8")
    functions = found.matmul_2d, found.matmul_batched, found.matmul_grouped
    finegrained_fp8._FINEGRAINED_FP8 = finegrained_fp8.FineGrainedFP8(*functions)


def use_deep_gemm(allowed: bool) -> None:
    """Whether Transformers' layers call DeepGEMM's kernel of the hub, which is this library then. Transformers asks for
    the package kernels and an nvcc first, which this library does not need."""
    from transformers.integrations import deepgemm, finegrained_fp8

    deep_gemm.compat.enable()
    deepgemm.is_deepgemm_loadable = finegrained_fp8.is_deepgemm_loadable = lambda raise_error=False: allowed
    if allowed and deepgemm.load_deepgemm_kernel().fp8_fp4_matmul is not deep_gemm.fp8_fp4_gemm_nt:
        raise RuntimeError("Transformers has loaded another DeepGEMM")


def ways(net: Any, directory: Path | None) -> dict[str, tuple[str, Callable[[], Any]]]:
    """What each way is called in the table, and what makes its model. The last ones may fail."""

    def default() -> Any:
        load_triton_kernel(directory)
        use_deep_gemm(False)
        return by_transformers(net)

    def compat() -> Any:
        use_deep_gemm(True)
        return by_transformers(net)

    return {
        "BF16": ("BF16, cuBLAS", lambda: net),
        "nn": ("FP8, deep_gemm.nn", lambda: by_nn(net)),
        "Transformers": ("FP8, Transformers with Triton", default),
        "compat": ("FP8, Transformers with deep_gemm", compat),
    }


Served = dict[tuple[str, int], tuple[Tensor, float, float]]


def table(titles: dict[str, str], served: Served) -> str:
    """The lines of the table: tokens a second of each way and batch, and the share of tokens like those of nn."""
    lines = [f"{'':34}{'batch':>6}{'prefill/s':>12}{'generated/s':>13}{'same tokens':>13}"]
    for (way, batch), (tokens, prefill, rate) in served.items():
        like = f"{100 * same(served, way, batch, tokens):12.1f}%" if ("nn", batch) in served else f"{'':13}"
        lines.append(f"{titles[way]:34}{batch:6}{prefill:12,.0f}{rate:13,.1f}{like}")
    return "\n".join(lines)


def same(served: Served, way: str, batch: int, tokens: Tensor) -> float:
    return (tokens == served["nn", batch][0]).float().mean().item()


def verdict(served: Served) -> list[str]:
    """Speeds relative to each other way, and which tokens differ more than they may."""
    lines = []
    for (way, batch), (tokens, prefill, rate) in served.items():
        if way == "nn" or ("nn", batch) not in served:
            continue
        _, own_prefill, own_rate = served["nn", batch]
        share = same(served, way, batch, tokens)
        kept = "as" if share >= ALIKE[way] else "NOT as"
        lines.append(
            f"batch {batch}: deep_gemm.nn is {own_prefill / prefill:.2f}x in prefill and {own_rate / rate:.2f}x in "
            f"generation of {way}; {100 * share:.1f}% of tokens are the same, {kept} expected (at least "
            f"{100 * ALIKE[way]:.0f}%)"
        )
    return lines


def curve(losses: dict[str, list[float]], points: int = 8) -> str:
    """Losses at some steps, side by side."""
    count = min(map(len, losses.values()))
    steps = sorted({round(index * (count - 1) / (points - 1)) for index in range(points)})
    lines = [f"{'loss at step':16}" + "".join(f"{step:>9}" for step in steps)]
    return "\n".join([*lines, *(f"{name:16}" + "".join(f"{x[s]:9.4f}" for s in steps) for name, x in losses.items())])


class Parts:
    """Runs the parts of the program: each says what failed, and none begins after the time is up."""

    def __init__(self, limit: float) -> None:
        self.start, self.limit = time.perf_counter(), limit

    def __call__(self, what: str, part: Callable[[], Any]) -> Any:
        """The result of a part, or None."""
        used = time.perf_counter() - self.start
        if used > self.limit:
            print(f"{what}: left out, because {used:.0f} s of {self.limit:.0f} s are over")
            return None
        try:
            return part()
        except Exception as error:
            print(f"{what}: failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:300]}")
            return None


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = device == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200 if gpu else 4, help="of training [%(default)s]")
    parser.add_argument("--new-tokens", type=int, default=64 if gpu else 4, help="to generate [%(default)s]")
    parser.add_argument("--hub-kernels", type=Path, help="a directory with the hub's package finegrained_fp8")
    parser.add_argument("--seconds", type=float, default=110.0, help="after which no part begins [%(default)s]")
    parser.add_argument("--record", type=Path, help="append a row for each result to this file")
    options = parser.parse_args()
    sizes, size, length, batches = (LARGE, 32, 256, (1, 32)) if gpu else (SMALL, 4, 32, (1, 2))
    parts, rows = Parts(options.seconds), []

    trained = {name: model(sizes, device) for name in ("BF16", "FP8")}
    print(deep_gemm.nn.convert(trained["FP8"]), end="\n\n")
    losses = {}
    for name, net in trained.items():
        found = parts(f"training {name}", lambda net=net: train(net, options.steps, size, length, device))
        if found is not None:
            losses[name], rate = found
            print(f"training {name}: {rate:,.0f} tokens/s")
            rows.append({"part": "training", "way": name, "tokens_per_s": rate, "losses": losses[name]})
    del trained["FP8"]

    served: Served = {}
    named = ways(trained["BF16"].bfloat16().eval(), options.hub_kernels)
    prompts = {batch: patterns(batch, length, torch.Generator().manual_seed(2), device) for batch in batches}
    for way, (title, make) in named.items():
        net = parts(title, make)
        for batch in batches if net is not None else ():
            ids = prompts[batch][:, : length // 2 + 1]
            found = parts(f"{title}, batch {batch}", functools.partial(serve, net, ids, options.new_tokens, device))
            if found is not None:
                served[way, batch] = found
                speeds = {"prefill_per_s": found[1], "generated_per_s": found[2]}
                rows.append({"part": "serving", "way": way, "batch": batch, **speeds})
    for row in rows:
        if row["part"] == "serving" and ("nn", row["batch"]) in served:
            row["same_tokens"] = same(served, row["way"], row["batch"], served[row["way"], row["batch"]][0])
    if options.record is not None:
        parts("recording", lambda: record(options.record, rows, sizes))
    for text in (losses and curve(losses), table({way: title for way, (title, _) in named.items()}, served)):
        print(f"\n{text}" if text else "")
    print("\n".join(["", *verdict(served)]))


def record(path: Path, rows: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    """Append rows, each with where they are from."""
    import transformers

    from deep_gemm.bench import provenance

    origin = {**provenance.environment(), "transformers": transformers.__version__}
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({"mode": "transformers", **row, **sizes, **origin}) + "\n")


if __name__ == "__main__":
    main()
