"""The linear layers of a model from the headers of its safetensors: names, sizes, formats and scales."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deep_gemm.aot import experts, headers, model, scales, stacks
from deep_gemm.aot.headers import WIDE, Stored
from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import (
    ALSO_ALONE,
    BF16_FP4,
    COLUMN,
    FP4_BLOCK,
    FP4_OPS,
    FP8,
    FP8_FP4,
    GROUPED,
    HYPER,
    JOINED,
    KNOWN,
    OPS,
    STAYS,
    LayerPlan,
    Weight,
    check_op,
    layers_of,
)
from deep_gemm.errors import InvalidInputError

MAX_EXPERTS = 1 << 16

TABLES = re.compile(r"(^|\.)(embed(_tokens)?|embeddings?|\w*_embeddings?|wte|wpe)$")
OTHER_LAYERS = re.compile(
    TABLES.pattern
    + r"|(^|\.)((lm_)?head|\w*norm\w*|conv1d|gate|shared_expert_gate|weights_proj|compressor\.(wkv|wgate))$"
)
"""Weights of two dimensions that engines multiply by other libraries: embeddings, heads, routers, gates."""
BESIDE = re.compile(r"(^|[._])(scale\w*|bias|qzeros|g_idx|zero_point|shape|absmax|quant_map)$")
"""Names of tensors that belong to a weight."""
NO_GEMM = re.compile(r"conv|embed|norm|pos_emb")
"""Parts of names of weights that are no matrix, though they may have three dimensions or more."""
SHARED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "n_routed_experts", "num_experts",
          "num_local_experts", "num_experts_per_tok")  # fmt: skip
"""Fields that mean the same in the configs of all model families."""


def plan(path: Path, tp: int = 1, ep: int = 1, op: str = "") -> LayerPlan:
    """The linear layers of a checkpoint on one GPU of `tp`. Its config.json, if there is one, says how heads are split.

    An index whose files are missing gives names without sizes: these then come from config.json, and a weight that it
    does not explain is a problem. Layers of a checkpoint without FP8 run `op`, or the operation of their dtype if it is
    "", which must have 16 bits. Raises InvalidInputError for files that are damaged or missing.
    """
    model.degrees(tp, ep)
    check_op(op)
    directory = path if path.is_dir() else path.parent
    config = model.read(beside) if (beside := directory / "config.json").is_file() else None
    names, files = headers.listed(path)
    if not any((directory / file).exists() for file in files):
        if config is None:
            raise InvalidInputError(f"{path} names files that are not there, and there is no config.json beside it.")
        return _from_names(names, config, tp, ep, op)
    found: dict[str, Stored] = {}
    for file in files:
        found |= headers.header(directory / file)
    if absent := [name for name in names if name not in found]:
        raise InvalidInputError(f"{path} lists {len(absent)} tensors that no file has, such as {shown(absent[0])}.")
    return _from_tensors(found, config, tp, ep, op)


def _from_names(names: list[str], config: Mapping[str, Any], tp: int, ep: int, op: str) -> LayerPlan:
    """The layers of the config. Quantised weights of the index that it does not explain are problems."""
    found, listed = model.plan(config, tp, ep, op), set(names)
    weights = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    quantised = {base for base in weights if scales.name_of(listed, f"{base}.")}
    has = {part for layer in found.layers for part in _parts_of(layer.name)}
    strange = {_general(name) for name in quantised if name.rpartition(".")[2] not in has and not _is_expert(name)}
    problems = [f"{name} is in the index, and the config does not say how large it is." for name in sorted(strange)]
    return LayerPlan(found.layers, (*found.unknown, *problems))


def _parts_of(layer: str) -> tuple[str, ...]:
    last = layer.rpartition(".")[2]
    alone = {value: key for key, value in ALSO_ALONE.items()}
    return (last, *JOINED.get(last, ()), alone.get(last, last))


def _from_tensors(
    tensors: Mapping[str, Stored], config: Mapping[str, Any] | None, tp: int, ep: int, op: str
) -> LayerPlan:
    known = _read_config(config)
    kept = {stored.dtype for name, stored in tensors.items() if _is_weight(name, stored)} - WIDE
    modules: dict[str, dict[str, Weight]] = {}
    routed: dict[str, dict[str, Weight]] = {}
    stacked: dict[str, dict[str, Stored]] = {}
    numbers: set[int] = set()
    unknown: dict[str, None] = {}
    for name, stored in sorted(tensors.items()):
        base, _, last = name.rpartition(".")
        if last in HYPER:
            base, last = name, "weight"
        module, _, own = name.removesuffix(".weight").rpartition(".")
        if stacks.is_stack(own, stored):
            stacked.setdefault(module, {})[own] = stored
            continue
        weight, number = _weight(base, last, stored, tensors), _expert_number(name)
        if weight is None or (_is_expert(name) and number is None):
            if _is_lost(name, base, stored):
                unknown[f"{_general(name)}, {stored.dtype} {shown(list(stored.shape))},"] = None
            continue
        if number is not None:
            numbers.add(number)
        module, _, own = base.rpartition(".")
        into = modules if number is None else routed
        into.setdefault(module, {})[own] = _with_heads(own, _to_run(base, weight, stored.dtype, kept, op), known)
    for module, found in stacked.items():
        for own, weight in stacks.weights(module, found, tensors, _hidden_size(known, tensors)).items():
            dtype = found[own].dtype if own in found else ""
            routed.setdefault(module, {})[own] = _to_run(f"{module}.{own}", weight, dtype, kept, op)
    problems = [f"{text} is not known: no kernel is prepared for it." for text in list(unknown)[:8]]
    if len(unknown) > 8:
        problems.append(f"{len(unknown) - 8} more tensors are not known either.")
    layers = layers_of(_named(modules), tp, bool(kept))
    if known is not None and any(layer.name.rpartition(".")[2] == "kv_b_proj" for layer in layers.layers):
        layers = LayerPlan.join([layers, known.absorbed(tp)])
    if routed:
        count, wrong = _count_experts(numbers, {x.shape[0] for each in stacked.values() for x in each.values()}, known)
        chosen = known.num_experts_per_tok if known is not None else None
        layers = LayerPlan.join([layers, experts.plan(_named(routed), count, chosen, tp, ep, bool(kept))])
        problems += wrong
    elif known is not None:
        experts.shares(known.experts, tp, ep)
    if not kept and not op and any(layer.op in (FP8, *GROUPED[FP8]) for layer in layers.served):
        problems.append(model.undecided("The checkpoint's weights are neither FP8 nor of 16 bits"))
    plan = LayerPlan(layers.layers, (*problems, *layers.unknown))
    if not plan.served and not plan.problems:
        return replace(plan, unknown=("The checkpoint has no weight that can be served.",))
    return plan


def _is_weight(name: str, stored: Stored) -> bool:
    return name.endswith(("weight", "weight_packed")) or stacks.is_stack(name.rpartition(".")[2], stored)


def _to_run(base: str, weight: Weight, dtype: str, kept: set[str], op: str) -> Weight:
    """The weight with its operation. `kept` are the dtypes of quantised weights of the checkpoint."""
    if dtype not in WIDE and TABLES.search(base):
        return replace(weight, why_not="engines look its rows up.", elsewhere=True)
    if weight.op in FP4_OPS:  # activations are as wide as the other weights
        return replace(weight, op=FP8_FP4 if any(each.startswith("F8") for each in kept) else BF16_FP4)
    if dtype not in WIDE or weight.why_not:
        return weight
    own, runs = base.rpartition(".")[2], FP8 if kept else op or OPS.get(dtype, FP8)
    weight = replace(weight, op=runs)
    if kept:
        fp8 = any(each.startswith("F8") for each in kept)
        return replace(weight, why_not=f"it is {dtype}, not FP8." if fp8 else f"it stays in {dtype}.", elsewhere=True)
    if OTHER_LAYERS.search(base):
        return replace(weight, why_not="engines multiply it by other libraries.", elsewhere=True)
    if own in STAYS and runs not in OPS.values():
        return replace(weight, why_not=f"it stays in {dtype}.", elsewhere=True)
    if own not in KNOWN:
        return replace(weight, why_not="its name is not known as that of a linear layer.")
    return weight


def _is_lost(name: str, base: str, stored: Stored) -> bool:
    """Whether a tensor that was not read may be a weight that needs a kernel."""
    if len(stored.shape) < 2 or 0 in stored.shape or BESIDE.search(name):
        return False
    return _is_expert(name) or (name.endswith(".weight") and not NO_GEMM.search(base))


def _expert_number(name: str) -> int | None:
    match = re.search(r"(^|\.)experts\.([0-9]+)\.", name)
    if match is None:
        return None
    if len(match[2]) > 9 or int(match[2]) >= MAX_EXPERTS:
        raise InvalidInputError(
            f"{shown(name)} is of expert {shown(match[2])}, but experts are numbered from 0 to {MAX_EXPERTS - 1}."
        )
    return int(match[2])


def _count_experts(numbers: set[int], stacked: set[int], known: model.ModelConfig | None) -> tuple[int, list[str]]:
    """How many experts there are, and what contradicts that. The config knows best: a file may hold some of them."""
    held = max([*numbers, -1]) + 1 or max(stacked)
    if max(stacked, default=0) > MAX_EXPERTS:
        raise InvalidInputError(f"A tensor holds {max(stacked)} experts, but {MAX_EXPERTS} are the most.")
    count = (known.experts if known is not None else 0) or held
    if stacked - {count} or held > count:
        told = ", ".join(map(str, sorted(stacked | {held})))
        return count, [f"Tensors hold {told} experts, but the model has {count}: no kernel is prepared for others."]
    if count == held and not stacked and len(numbers) < count and (known is None or not known.experts):
        return count, [
            f"{len(numbers)} of the experts from 0 to {count - 1} are here: a config.json would say how many."
        ]
    return count, []


def _hidden_size(known: model.ModelConfig | None, tensors: Mapping[str, Stored]) -> int:
    """The model's hidden size by its config, else by its embedding; 0 if neither is there."""
    if known is not None:
        return known.hidden_size
    tables = (x.shape for name, x in tensors.items() if name.endswith("embed_tokens.weight") and len(x.shape) == 2)
    return next((shape[1] for shape in tables), 0)


def _named(modules: Mapping[str, dict[str, Weight]]) -> Iterator[tuple[str, dict[str, Weight]]]:
    return ((_short(module), weights) for module, weights in modules.items())


def _weight(base: str, last: str, stored: Stored, tensors: Mapping[str, Stored]) -> Weight | None:
    """None if the tensor is no weight of a linear layer."""
    scale = scales.of_weight(base, tensors)
    if last in ("weight", "weight_packed") and stored.dtype in ("I8", "U8") and len(stored.shape) == 2:
        n, k = stored.shape
        if n and k and scale is not None and scale.shape == (n, 2 * k // FP4_BLOCK):
            return Weight((n,), 2 * k, op=FP8_FP4)
    if last in ("qweight", "weight_packed") and len(stored.shape) == 2:
        rows, columns = stored.shape
        groups = tensors.get(f"{base}.scales")
        n = groups.shape[-1] if groups is not None and groups.shape else rows
        k = (rows if n != columns else 8 * rows) if last == "qweight" else 8 * columns
        return Weight((n,), k, "its weights are 4-bit integers.") if n and k else None
    if last != "weight" or len(stored.shape) != 2 or 0 in stored.shape:
        return None
    n, k = stored.shape
    if stored.dtype in WIDE:
        return Weight((n,), k)
    op, why_not = scales.operation(base, stored, tensors)
    return Weight((n,), k, why_not, op=op)


def _read_config(config: Mapping[str, Any] | None) -> model.ModelConfig | None:
    if config is None:
        return None
    text, _ = model.text_part(config)
    kind = text.get("model_type", config.get("model_type"))
    if kind is None or kind in model.FAMILIES:
        return model.ModelConfig.read(text)
    try:
        return model.ModelConfig.read({name: text[name] for name in SHARED if name in text})
    except InvalidInputError:
        return None  # a config of another kind: the tensors say enough


def _with_heads(name: str, weight: Weight, config: model.ModelConfig | None) -> Weight:
    """The weight with its heads, by which tensor parallelism splits it, if the config gives their number."""
    if config is None or weight.why_not or name not in COLUMN | {"o_proj", "out_proj", "wo_a", "wo_b", "h_proj"}:
        return weight
    if name == "h_proj":
        return replace(weight, copies=config.hc_mult or 1)
    if name in ("wo_a", "wo_b"):
        return replace(weight, heads=config.o_groups)
    heads, linear = config.num_attention_heads, config.linear_num_value_heads
    if name in ("k_proj", "v_proj"):
        return replace(weight, heads=config.kv_heads, repeats=True)
    if name in ("q_proj", "q_b_proj", "wq_b", "kv_b_proj", "o_proj"):
        return replace(weight, heads=heads)
    if name == "qkv_proj":
        keys = config.kv_heads * config.head_size
        return replace(weight, rows=(weight.n - 2 * keys, keys, keys)) if weight.n > 2 * keys else weight
    if name in ("in_proj_qkv", "in_proj_qkvz") and config.linear_num_key_heads and config.linear_key_head_dim:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        left = weight.n - 2 * keys
        values = (left,) if name == "in_proj_qkv" else (left // 2, left - left // 2)
        return replace(weight, rows=(keys, keys, *values), heads=config.linear_num_key_heads) if left > 0 else weight
    return replace(weight, heads=linear) if name in ("in_proj_z", "out_proj") else weight


def _is_expert(name: str) -> bool:
    return re.search(r"(^|\.)experts\.", name) is not None


def _general(name: str) -> str:
    return re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "*", name)


def _short(module: str) -> str:
    """A module's name in the table: without the model's own, the layer's number, and the attention's name."""
    name = re.sub(r"^(.*?layers|mtp)\.\*\.", "", _general(module))
    for long, short in (
        ("self_attn.indexer", "indexer"),
        ("self_attn", ""),
        ("attn.indexer", "indexer"),
        ("attn.compressor", "compressor"),
        ("attn", ""),
        ("ffn.shared_experts", "shared_expert"),
        ("ffn.experts.*", "experts"),
        ("mlp.shared_experts", "shared_expert"),
        ("mlp.shared_expert", "shared_expert"),
        ("mlp.experts.*", "experts"),
        ("mlp.experts", "experts"),
        ("block_sparse_moe.experts.*", "experts"),
        ("block_sparse_moe.experts", "experts"),
    ):
        if name == long or name.startswith(long + "."):
            return (short + name[len(long) :]).strip(".")
    return name
