"""The linear layers of a model from the headers of its safetensors: names, sizes, formats and scales. No data is read.

A safetensors file begins with eight bytes, the length of a JSON object that describes each tensor by dtype, shape and
place. An index, `*.safetensors.index.json`, says which file of several holds a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deep_gemm.aot import experts, inputs, model
from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import (
    ALSO_ALONE,
    COLUMN,
    FP8,
    JOINED,
    KNOWN,
    OPS,
    Plan,
    Weight,
    check_op,
    layers_of,
)
from deep_gemm.aot.quantization import blocks_not
from deep_gemm.errors import InvalidInputError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

MAX_EXPERTS = 1 << 16
"""Far above the number of experts that any model has."""

INDEX = ".safetensors.index.json"
WIDE = frozenset(("F16", "BF16", "F32", "F64"))
SCALES = ("weight_scale_inv", "weight_scale")
SIDE = frozenset((*SCALES, "input_scale", "weight_scale_2", "weight_zero_point", "weight_g_idx", "weight_shape"))
OTHER_LAYERS = re.compile(
    r"(^|\.)(lm_head|embed_tokens|embeddings?|\w*_embeddings?|wte|wpe|\w*norm\w*|conv1d|gate|"
    r"shared_expert_gate|in_proj_(ba|b|a)|weights_proj|eh_proj)$"
)
"""Weights of two dimensions that stay as they are when a model is cast to FP8: embeddings, heads, routers, gates."""


@dataclass(frozen=True)
class Stored:
    """A tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a safetensors file, an index of some, or a directory that holds either."""
    if path.is_dir():
        return any(path.glob("*.safetensors")) or any(path.glob("*" + INDEX))
    return path.name.endswith((".safetensors", INDEX))


def plan(path: Path, tp: int = 1, ep: int = 1, op: str = "") -> Plan:
    """The linear layers of a checkpoint on one GPU of `tp`. Its config.json, if there is one, says how heads are split.

    An index whose files are missing gives names without sizes: these then come from config.json, and a weight that it
    does not explain is a problem. Layers of a checkpoint without FP8 run `op`, or the operation of their dtype if it is
    "". Raises InvalidInputError for files that are damaged or missing.
    """
    model.degrees(tp, ep)
    check_op(op)
    directory = path if path.is_dir() else path.parent
    config = _config(directory / "config.json")
    names, files = _listed(path)
    if not any((directory / file).exists() for file in files):
        if config is None:
            raise InvalidInputError(f"{path} names files that are not there, and there is no config.json beside it.")
        return _from_names(names, config, tp, ep, op)
    found: dict[str, Stored] = {}
    for file in files:
        found |= header(directory / file)
    if absent := [name for name in names if name not in found]:
        raise InvalidInputError(f"{path} lists {len(absent)} tensors that no file has, such as {shown(absent[0])}.")
    return _from_tensors(found, config, tp, ep, op)


def header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Raises InvalidInputError if its header is damaged."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 2 <= length <= MAX_HEADER_BYTES else b""
    except (OSError, ValueError) as error:  # a path with a zero byte raises ValueError
        raise InvalidInputError(f"{path} cannot be read: {error}.") from error
    if len(text) < 2 or len(text) != length:
        raise InvalidInputError(f"{path} is no safetensors file, or is cut: its header should have {length} bytes.")
    entries = inputs.parse_json(text, f"The header of {path}")
    if not isinstance(entries, Mapping):
        raise InvalidInputError(f"The header of {path} must be an object, but it is {shown(entries)}.")
    return {
        name: _stored(entry, f"{shown(name)} of {path}") for name, entry in entries.items() if name != "__metadata__"
    }


def _stored(entry: Any, where: str) -> Stored:
    dtype = entry.get("dtype") if isinstance(entry, Mapping) else None
    shape = entry.get("shape") if isinstance(entry, Mapping) else None
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise InvalidInputError(f"{where} must have a dtype and a shape, but it is {shown(entry)}.")
    return Stored(dtype, tuple(inputs.whole(size, f"the shape of {where}", 0, 2**62) for size in shape))


def _config(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    found = inputs.read_file(path)
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"{path} must hold an object, but it holds {type(found).__name__}.")
    return found


def _listed(path: Path) -> tuple[list[str], list[str]]:
    """The names of the tensors, if there is an index, and of the files."""
    indices = sorted(path.glob("*" + INDEX)) if path.is_dir() else [path] if path.name.endswith(INDEX) else []
    if not indices:
        return [], sorted(found.name for found in path.glob("*.safetensors")) if path.is_dir() else [path.name]
    if len(indices) > 1:
        raise InvalidInputError(f"{path} holds {len(indices)} indices: give the path of one.")
    data = inputs.read_file(indices[0])
    places = data.get("weight_map") if isinstance(data, Mapping) else None
    if not isinstance(places, Mapping) or not places:
        raise InvalidInputError(f"{indices[0]} must have a weight_map of names and files, but it has {shown(places)}.")
    for file in places.values():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise InvalidInputError(f"weight_map of {indices[0]} must name *.safetensors, but it has {shown(file)}.")
    return list(places), sorted(set(places.values()))


def _from_names(names: list[str], config: Mapping[str, Any], tp: int, ep: int, op: str) -> Plan:
    """The layers of the config. Quantised weights of the index that it does not explain are problems."""
    found = model.plan(config, tp, ep, op)
    quantised = {name.removesuffix("." + scale) for name in names for scale in SCALES if name.endswith("." + scale)}
    has = {part for layer in found.layers for part in _parts_of(layer.name)}
    strange = {_general(name) for name in quantised if name.rpartition(".")[2] not in has and not _is_expert(name)}
    problems = [f"{name} is in the index, and the config does not say how large it is." for name in sorted(strange)]
    return Plan(found.layers, (*found.problems, *problems))


def _parts_of(layer: str) -> tuple[str, ...]:
    last = layer.rpartition(".")[2]
    alone = {value: key for key, value in ALSO_ALONE.items()}
    return (last, *JOINED.get(last, ()), alone.get(last, last))


def _from_tensors(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None, tp: int, ep: int, op: str) -> Plan:
    known = _read_config(config)
    if known is not None:
        experts.shares(known.experts, tp, ep)
    quantised = any(
        stored.dtype not in WIDE for name, stored in tensors.items() if name.endswith(("weight", "weight_packed"))
    )
    modules: dict[str, dict[str, Weight]] = {}
    routed: dict[str, dict[str, Weight]] = {}
    numbers: set[int] = set()
    strange: dict[str, None] = {}
    for name, stored in sorted(tensors.items()):
        base, _, last = name.rpartition(".")
        expert = _is_expert(name)
        if expert and len(stored.shape) == 3 and 0 not in stored.shape:
            base = name.removesuffix(".weight")
            weight = _of_all_experts(base.rpartition(".")[2], stored, known)
            numbers |= set(range(min(stored.shape[0], MAX_EXPERTS)))
        else:
            weight = _weight(base, last, stored, tensors)
        if weight is None:
            continue
        module, _, own = base.rpartition(".")
        other = OTHER_LAYERS.search(base) is not None
        runs = FP8 if quantised else op or OPS.get(stored.dtype, FP8)
        if stored.dtype in WIDE and (quantised or other):
            why_not = f"it is {stored.dtype}, not FP8." if runs == FP8 else "engines multiply it by other libraries."
            weight = replace(weight, why_not=why_not)
        elif stored.dtype in WIDE and own not in KNOWN:
            strange[_general(base)] = None
            weight = replace(weight, why_not="its name is not known as that of a linear layer.")
        if expert and (number := re.search(r"(^|\.)experts\.([0-9]{1,9})(\.|$)", module)):
            numbers.add(int(number[2]))
        into = routed if expert else modules
        into.setdefault(module, {})[own] = _with_heads(own, replace(weight, op=runs), known)
    found = layers_of(_named(modules), tp, quantised)
    if routed:
        count, chosen = (known.experts, known.num_experts_per_tok) if known is not None else (0, None)
        of_experts = experts.plan(_named(routed), count or len(numbers), chosen, tp, ep, quantised)
        found = Plan.join([found, of_experts])
    problems = [f"{name} is {_UNKNOWN}" for name in list(strange)[:8]]
    if len(strange) > 8:
        problems.append(f"{len(strange) - 8} more weights are not known either.")
    if not found.served and not problems and not found.problems:
        problems.append("The checkpoint has no weight that can be served.")
    return Plan(found.layers, (*problems, *found.problems))


def _named(modules: Mapping[str, dict[str, Weight]]) -> Iterator[tuple[str, dict[str, Weight]]]:
    return ((_short(module), weights) for module, weights in modules.items())


def _of_all_experts(own: str, stored: Stored, config: model.ModelConfig | None) -> Weight | None:
    """A weight of all experts in one tensor (experts, n, k); some checkpoints have (experts, k, n) instead."""
    if own in SIDE or own.startswith(("scale", "qzero")) or own.endswith(("_scale_inv", "_scale", "_scales", "_bias")):
        return None
    n, k = stored.shape[1:]
    hidden = config.hidden_size if config is not None else 0
    if hidden and (n if own in COLUMN else k) == hidden != (k if own in COLUMN else n):
        n, k = k, n
    if own not in KNOWN or stored.dtype not in WIDE:
        return Weight((n,), k, "all its experts are one tensor, which is read in bfloat16 only.")
    halves = own in JOINED and n % 2 == 0
    return Weight((n // 2, n // 2) if halves else (n,), k)


_UNKNOWN = "not FP8, and not known as a linear layer that engines cast when they load it."


def _weight(base: str, last: str, stored: Stored, tensors: Mapping[str, Stored]) -> Weight | None:
    """A tensor as a linear layer's weight, or None if it is none."""
    if last in ("qweight", "weight_packed") and len(stored.shape) == 2:
        rows, columns = stored.shape
        scales = tensors.get(f"{base}.scales")
        n = scales.shape[-1] if scales is not None and scales.shape else rows
        k = (rows if n != columns else 8 * rows) if last == "qweight" else 8 * columns
        return Weight((n,), k, "its weights are 4-bit integers.") if n and k else None
    if last != "weight" or len(stored.shape) != 2 or 0 in stored.shape:
        return None
    n, k = stored.shape
    if stored.dtype in WIDE:
        return Weight((n,), k)
    return Weight((n,), k, _why_not(base, stored, tensors))


def _why_not(base: str, stored: Stored, tensors: Mapping[str, Stored]) -> str:
    """Why no kernel serves a weight with these scales; "" if one does."""
    if stored.dtype != "F8_E4M3":
        return f"its weights are {stored.dtype}, not E4M3."
    scale = next((tensors[f"{base}.{name}"] for name in SCALES if f"{base}.{name}" in tensors), None)
    if scale is None:
        return "it has no scales."
    n, k = stored.shape
    if scale.shape == (-(-n // 128), -(-k // 128)) and scale.shape != (1, 1):
        return "its activations have one scale per tensor." if f"{base}.input_scale" in tensors else ""
    count = 1
    for size in scale.shape:
        count *= size
    if count == 1:
        # For a weight of one 128 x 128 block, a scale per block and a scale per tensor are the same.
        return "" if len(scale.shape) == 2 and max(n, k) <= 128 else "it has one scale per tensor."
    if count == n:
        return "it has one scale per row, not per 128 x 128 block."
    if len(scale.shape) != 2:
        return f"its scales are {shown(list(scale.shape))}, not one per 128 x 128 block."
    side = [
        next((size for size in (16, 32, 64, 128, 256, 512) if -(-all_ // size) == part), 0)
        for all_, part in zip((n, k), scale.shape, strict=True)
    ]
    return blocks_not(*side) if all(side) else f"its scales are {shown(list(scale.shape))}, not per 128 x 128 block."


def _read_config(config: Mapping[str, Any] | None) -> model.ModelConfig | None:
    if config is None:
        return None
    text, _ = model.text_part(config)
    kind = text.get("model_type", config.get("model_type"))
    return model.ModelConfig.read(text) if kind is None or kind in model.FAMILIES else None


def _with_heads(name: str, weight: Weight, config: model.ModelConfig | None) -> Weight:
    """The weight with its heads, by which tensor parallelism splits it, if the config gives their number."""
    if config is None or weight.why_not or name not in COLUMN | {"o_proj", "out_proj"}:
        return weight
    heads, linear = config.num_attention_heads, config.linear_num_value_heads or 0
    if name in ("k_proj", "v_proj"):
        return replace(weight, heads=config.kv_heads, repeats=True)
    if name in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj"):
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
    name = re.sub(r"^.*?layers\.\*\.", "", _general(module))
    for long, short in (
        ("self_attn.indexer", "indexer"),
        ("self_attn", ""),
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
