"""A small Llama of Transformers: training in bfloat16 and FP8, and its FP8 weights served in four ways.

Both models begin with the same weights, and learn to continue sequences that repeat a random pattern;
`deep_gemm.nn.convert(model)` is all that differs. Then the bfloat16 one is served: as it is; with FP8 weights by the
layers of deep_gemm.nn; and with the same FP8 weights by the layers of Transformers, which call the Triton kernel of the
Hugging Face hub by default, or DeepGEMM's kernel of the hub, in whose place `deep_gemm.compat.enable()` puts this
library. Tokens a second of prefill and of generation, how far logits are apart, and how many greedy tokens are the
same. Times are medians of five repeats, after three that load kernels and fill caches, without Python's collector.

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
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deep_gemm

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16}
TOKENS = 64
"""How many different tokens there are."""
APART = {"BF16": 0.2, "Transformers": 0.05, "compat": 0.05}
"""How far the logits of a prefill may be from those of deep_gemm.nn, by norm. The Triton kernel multiplies the same FP8
values and adds in another order: now and then a result is rounded to the other side in bfloat16, and then perhaps in
the next cast to FP8, whose step is 1/16 to 1/8 of the value. That is a small part of what FP8 itself rounds, which is
the distance to BF16."""
ALIKE = {"BF16": 0.8, "Transformers": 0.95, "compat": 0.95}
"""The least share of greedy tokens that are the same. A token differs only where its two best logits are no further
apart than the two ways are, which is more often after little training. It also changes what follows it: so this says
less than logits do, above all of a few sequences."""
REPEATS, WARM_UPS = 5, 3


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


def seconds(step: Callable[[], Any], device: str) -> float:
    """The median time of a step. A collection of all of a process's objects takes longer than some steps: none is made
    meanwhile."""
    for _ in range(WARM_UPS):
        step()
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(REPEATS):
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            times.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return statistics.median(times)


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


class Result(NamedTuple):
    """The greedy tokens after a prompt, the logits of the prompt, and tokens a second of prefill and of generation."""

    tokens: Tensor
    logits: Tensor
    prefill: float
    rate: float


def serve(net: Any, ids: Tensor, count: int, device: str) -> Result:
    """Prefill ``ids``, and generate ``count`` tokens."""

    def generate(new: int) -> Tensor:
        options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
        tokens: Tensor = net.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        return tokens[:, ids.shape[1] :]

    with torch.inference_mode():
        prefill = seconds(lambda: net(input_ids=ids, use_cache=False), device)
        whole = seconds(lambda: generate(count), device)
        logits = net(input_ids=ids, use_cache=False).logits.float()
        return Result(generate(count), logits, ids.numel() / prefill, ids.shape[0] * count / whole)


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


Served = dict[tuple[str, int], Result]


def table(titles: dict[str, str], served: Served) -> str:
    """The lines of the table: tokens a second of each way and batch, how far logits are from those of nn, and the share
    of the same tokens."""
    lines = [f"{'':34}{'batch':>6}{'prefill/s':>12}{'generated/s':>13}{'logits apart':>14}{'same tokens':>13}"]
    for (way, batch), found in served.items():
        like = ""
        if ("nn", batch) in served:
            own = served["nn", batch]
            like = f"{apart(found, own):14.4f}{100 * same(found, own):12.1f}%"
        lines.append(f"{titles[way]:34}{batch:6}{found.prefill:12,.0f}{found.rate:13,.1f}{like}")
    return "\n".join(lines)


def same(found: Result, own: Result) -> float:
    """The share of the same tokens."""
    return (found.tokens == own.tokens).float().mean().item()


def apart(found: Result, own: Result) -> float:
    """The norm of the difference of logits, relative to their own. What all tokens have in common does not count."""
    x, y = (each.logits - each.logits.mean(-1, keepdim=True) for each in (found, own))
    return ((x - y).norm() / y.norm()).item()


def verdict(served: Served) -> list[str]:
    """Speeds relative to each other way, and which tokens differ more than they may."""
    lines = []
    for (way, batch), found in served.items():
        if way == "nn" or ("nn", batch) not in served:
            continue
        own = served["nn", batch]
        distance, share = apart(found, own), same(found, own)
        kept = "as" if distance <= APART[way] and share >= ALIKE[way] else "NOT as"
        lines.append(
            f"batch {batch}: deep_gemm.nn is {own.prefill / found.prefill:.2f}x in prefill and "
            f"{own.rate / found.rate:.2f}x in generation of {way}; logits are {distance:.4f} apart and "
            f"{100 * share:.1f}% of tokens are the same, {kept} expected (at most {APART[way]}, at least "
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
    parser.add_argument("--steps", type=int, default=120 if gpu else 4, help="of training [%(default)s]")
    parser.add_argument("--new-tokens", type=int, default=64 if gpu else 4, help="to generate [%(default)s]")
    parser.add_argument("--hub-kernels", type=Path, help="a directory with the hub's package finegrained_fp8")
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no part begins [%(default)s]")
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
                speeds = {"prefill_per_s": found.prefill, "generated_per_s": found.rate}
                rows.append({"part": "serving", "way": way, "batch": batch, **speeds})
    for row in rows:
        if row["part"] == "serving" and ("nn", row["batch"]) in served:
            found, own = served[row["way"], row["batch"]], served["nn", row["batch"]]
            row |= {"same_tokens": same(found, own), "logits_apart": apart(found, own)}
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
