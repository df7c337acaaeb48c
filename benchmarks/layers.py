"""Draw products of public models: M log-uniform, N x K from the layers of the models in models.json, on 1 to 8 GPUs.

    python benchmarks/layers.py COUNT --seed 1 --min-m 1 --max-m 8192 --kept-out

Each line is M x N x K, as `deep-gemm bench` and `calibrate survey` take it. Every second model is kept out of all fits:
with `--kept-out` only those are drawn, without it only the others. A claim is made on what is kept out. An N x K that a
survey has (`SURVEYED`) is not kept out, whichever model it is of: constants, serving sets and rules come from surveys.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from deep_gemm.aot import workload
from deep_gemm.errors import DeepGemmError
from deep_gemm.spec import align

MODELS = Path(__file__).with_name("models.json")
"""Sizes of forty models without experts, from the `config.json` that each was published with."""
SURVEYED = (
    *((640, 1536), (768, 1024), (1024, 384), (1024, 512), (1024, 768), (1024, 3072), (1536, 768), (2304, 512)),
    *((2304, 1024), (2560, 512), (4608, 512), (7168, 8192), (8192, 28672), (57344, 8192)),
)
"""N x K of models that are kept out, which a survey had nevertheless. A survey that a fit uses adds its own."""

GPUS = (1, 2, 4, 8)
"""Over how many GPUs a model's layers are divided."""


@cache
def layers(kept_out: bool, family: str = "") -> tuple[tuple[int, int], ...]:
    """The different N x K of the models that are kept out of fits, or of the others. What both have, or a survey has,
    is not kept out. With `family`, of models only whose names begin so."""
    models = list(json.loads(MODELS.read_text()).items())
    known, others = models[::2], models[1::2]
    found = _layers_of(sizes for name, sizes in (others if kept_out else known) if name.startswith(family))
    return tuple(sorted(found - _layers_of(sizes for _, sizes in known) - set(SURVEYED) if kept_out else found))


def _layers_of(models: Iterable[dict[str, int]]) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for sizes in models:
        for tp in GPUS:
            try:
                plan = workload.plan(sizes, tp=tp, op="fp8_gemm_nt")
            except DeepGemmError:  # its heads cannot be divided so
                continue
            found |= {(layer.n, layer.k) for layer in plan.served}
    return found


def draw(
    count: int,
    seed: int,
    kept_out: bool,
    min_m: int = 1,
    max_m: int = 8192,
    op: str = "fp8_gemm_nt",
    family: str = "",
    multiple: int = 1,
) -> list[workload.GemmShape]:
    """`count` products, the same for one seed. M is rounded up to a multiple of `multiple`."""
    generator, shapes = random.Random(seed), []
    for _ in range(count):
        m = align(round(math.exp(generator.uniform(math.log(min_m), math.log(max_m)))), multiple)
        n, k = generator.choice(layers(kept_out, family))
        shapes.append(workload.GemmShape(m, n, k, f"models, seed {seed}", op))
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-m", type=int, default=1)
    parser.add_argument("--max-m", type=int, default=8192)
    parser.add_argument("--kept-out", action="store_true")
    parser.add_argument("--family", default="", help="how the names of models in models.json begin: Llama, Qwen, ...")
    parser.add_argument("--multiple", type=int, default=1, help="M is one of this; cuBLASLt's block scales need 4")
    options = parser.parse_args()
    names = ("count", "seed", "kept_out", "min_m", "max_m", "family", "multiple")
    drawn = draw(**{name: getattr(options, name) for name in names})
    for shape in drawn:
        print(f"{shape.m}x{shape.n}x{shape.k}")


if __name__ == "__main__":
    main()
