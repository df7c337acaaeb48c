"""Which GEMMs somebody is going to run on one GPU: from a list, a file, or a model's Hugging Face `config.json`.

Pure functions of plain data: no torch, no GPU.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_gemm.errors import InvalidInputError, UnsupportedError

DEFAULT_M = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Sizes of M that meet the selector's choices from decode to prefill; M itself is never part of a kernel's identity."""


@dataclass(frozen=True, order=True)
class GemmShape:
    """D (m x n) = A (m x k) @ B (n x k)^T; `source` says which layer it is."""

    m: int
    n: int
    k: int
    source: str = ""

    @property
    def flops(self) -> int:
        """Multiply-adds, counted as two operations each."""
        return 2 * self.m * self.n * self.k

    def bytes_moved(self) -> int:
        """Each operand, its scales and the bf16 output once: the least that FP8 with block scales must move."""
        blocks = -(-self.k // 128)
        return self.m * self.k + self.n * self.k + 2 * self.m * self.n + 4 * blocks * (self.m + -(-self.n // 128))

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


@dataclass(frozen=True)
class Layer:
    """A linear layer's weight, n x k, on one GPU."""

    name: str
    n: int
    k: int


def shapes(layers: Iterable[Layer], ms: Sequence[int]) -> list[GemmShape]:
    """Every layer at every M."""
    return [GemmShape(m, layer.n, layer.k, layer.name) for layer in layers for m in ms]


def parse_sizes(text: str) -> list[int]:
    """Sizes such as "1,2,64-512:64": numbers, and ranges with an optional step, both ends included.

    Raises InvalidInputError for anything else, and for sizes below 1.
    """
    sizes: list[int] = []
    for part in text.split(","):
        bounds, _, step = part.strip().partition(":")
        low, dash, high = bounds.partition("-")
        try:
            first, last, stride = int(low), int(high if dash else low), int(step or 1)
        except ValueError:
            first, last, stride = 0, 0, 0
        if first < 1 or last < first or stride < 1:
            raise InvalidInputError(f"Sizes must look like 1,2,64-512:64 with numbers from 1, but it is {text!r}.")
        sizes += range(first, last + 1, stride)
    return list(dict.fromkeys(sizes))


def parse_shape(text: str, ms: Sequence[int] = DEFAULT_M) -> list[GemmShape]:
    """ "64x7168x2048" is M x N x K; "7168x2048" is N x K at every M of `ms`."""
    try:
        sizes = [int(part) for part in text.lower().replace(",", "x").split("x")]
    except ValueError:
        sizes = []
    if len(sizes) == 2:
        n, k = sizes
        return shapes([Layer("", n, k)], ms)
    if len(sizes) == 3:
        m, n, k = sizes
        return [GemmShape(m, n, k)]
    raise InvalidInputError(f"A shape must look like MxNxK or NxK, such as 64x7168x2048, but it is {text!r}.")


def load(path: Path, ms: Sequence[int] = DEFAULT_M, tp: int = 1, ep: int = 1) -> list[GemmShape]:
    """The shapes that a JSON or YAML file asks for.

    A list of entries `{"n": ..., "k": ..., "m": number or list, "name": ...}`, or `{"m": [...], "shapes": [entries]}`,
    or a model's `config.json`, which is known by its `hidden_size`. Entries without `m` take the file's, else `ms`.
    `tp` and `ep` are as in `model_layers`.
    """
    return _described(_read(path), str(path), ms, tp, ep)


def shapes_of(what: Any, ms: Sequence[int] = DEFAULT_M, tp: int = 1, ep: int = 1) -> list[GemmShape]:
    """The shapes of a workload however it is given: the path of a file (see `load`) or what such a file holds; one
    shape or many: a `GemmShape`, a `Layer`, texts such as "7168x2048" (see `parse_shape`), (n, k), or (n, k, groups).

    Where M is not said it is each of `ms`. Raises InvalidInputError for anything else, and UnsupportedError for more
    than one group.
    """
    if isinstance(what, Mapping):
        return _described(what, "the description", ms, tp, ep)
    if isinstance(what, str) and _SHAPE.fullmatch(what):
        return parse_shape(what, ms)
    if isinstance(what, str | os.PathLike):
        return load(Path(what), ms, tp, ep)
    if isinstance(what, GemmShape):
        return [what]
    if isinstance(what, Layer):
        return shapes([what], ms)
    if isinstance(what, Iterable):
        items = list(what)
        if isinstance(what, tuple) and 2 <= len(items) <= 3 and all(isinstance(item, int) for item in items):
            return _entry(dict(zip(("n", "k", "groups"), items, strict=False)), str(what), ms)
        return [shape for item in items for shape in shapes_of(item, ms, tp, ep)]
    raise InvalidInputError(
        f"what must be a file, a model's description, or shapes such as (n, k) or 7168x2048, but it is {what!r}."
    )


_SHAPE = re.compile(r"\d+[xX,]\d+([xX,]\d+)?")


def _described(data: Any, where: str, ms: Sequence[int], tp: int, ep: int) -> list[GemmShape]:
    if isinstance(data, Mapping) and ("hidden_size" in data or "text_config" in data):
        return shapes(model_layers(data, tp, ep), ms)
    if isinstance(data, Mapping) and "shapes" in data:
        ms = _sizes(data.get("m", list(ms)), f"m in {where}")
        data = data["shapes"]
    if not isinstance(data, list):
        raise InvalidInputError(
            f"{where} must hold a list of shapes, an object with `shapes`, or a model's config with `hidden_size`, "
            f"but it holds {type(data).__name__}."
        )
    return [shape for index, entry in enumerate(data) for shape in _entry(entry, f"shape {index} of {where}", ms)]


def _entry(entry: Any, where: str, ms: Sequence[int]) -> list[GemmShape]:
    if not isinstance(entry, Mapping) or not {"n", "k"} <= set(entry):
        raise InvalidInputError(f"{where} must be an object with n and k (and m if wanted), but it is {entry!r}.")
    (n,), (k,) = _sizes(entry["n"], f"n of {where}"), _sizes(entry["k"], f"k of {where}")
    (groups,) = _sizes(entry.get("groups", 1), f"groups of {where}")
    if groups > 1:
        raise UnsupportedError(
            f"{where} has {groups} groups, and there are no grouped kernels yet: leave it out, or give one group."
        )
    return shapes([Layer(str(entry.get("name", "")), n, k)], _sizes(entry.get("m", list(ms)), f"m of {where}"))


def model_layers(config: Mapping[str, Any], tp: int = 1, ep: int = 1) -> list[Layer]:
    """The dense linear layers of a model on one of its GPUs, from its Hugging Face configuration.

    `tp` GPUs share each layer: column-parallel layers divide N, row-parallel layers divide K, and what every GPU needs
    whole stays whole. Query, key and value are one layer, and so are gate and up. `ep` GPUs share the routed experts,
    which must divide evenly: these are grouped products, for which there are no kernels yet, and not among the layers.
    """
    if "hidden_size" not in config and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    for name, degree in (("tp", tp), ("ep", ep)):
        if degree < 1:
            raise InvalidInputError(f"{name} must be at least 1, but it is {degree}.")
    layers = _latent_attention(config, tp) if config.get("kv_lora_rank") else _attention(config, tp)
    hidden = _get(config, "hidden_size")
    experts = routed_experts(config)
    if experts % ep:
        raise InvalidInputError(f"ep must divide the model's {experts} routed experts, but it is {ep}.")
    if ep > 1 and not experts:
        raise InvalidInputError(f"ep must be 1 for a model without routed experts, but it is {ep}.")
    if not experts or config.get("first_k_dense_replace") or config.get("mlp_only_layers"):
        layers += _mlp("mlp", hidden, _get(config, "intermediate_size"), tp)
    if experts:
        shared = config.get("shared_expert_intermediate_size") or (
            (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
        )
        if shared:
            layers += _mlp("shared_expert", hidden, shared, tp)
    return list(dict.fromkeys(layers))


def left_out(what: Any) -> str | None:
    """What of a workload (as for `shapes_of`) is not among its shapes, as a sentence; None if nothing is."""
    if isinstance(what, str | os.PathLike) and not (isinstance(what, str) and _SHAPE.fullmatch(what)):
        what = _read(Path(what))
    if not isinstance(what, Mapping):
        return None
    inner = what.get("text_config")
    experts = routed_experts(inner if "hidden_size" not in what and isinstance(inner, Mapping) else what)
    if not experts:
        return None
    return f"The model's {experts} routed experts are grouped products, for which there are no kernels yet."


def routed_experts(config: Mapping[str, Any]) -> int:
    """How many experts a model routes tokens to; 0 for a dense one."""
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        if config.get(name):
            return _get(config, name)
    return 0


def _attention(config: Mapping[str, Any], tp: int) -> list[Layer]:
    hidden, heads = _get(config, "hidden_size"), _get(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    # Fewer key-value heads than GPUs: each GPU holds a copy of one.
    own_kv = _split(kv_heads, tp, "num_key_value_heads") if kv_heads >= tp else 1
    own = _split(heads, tp, "num_attention_heads")
    return [Layer("qkv_proj", (own + 2 * own_kv) * size, hidden), Layer("o_proj", hidden, own * size)]


def _latent_attention(config: Mapping[str, Any], tp: int) -> list[Layer]:
    """Multi-head latent attention (DeepSeek, Kimi): keys and values are expanded from a low-rank latent."""
    hidden, rank, rope = (_get(config, name) for name in ("hidden_size", "kv_lora_rank", "qk_rope_head_dim"))
    nope, value = _get(config, "qk_nope_head_dim"), _get(config, "v_head_dim")
    heads = _split(_get(config, "num_attention_heads"), tp, "num_attention_heads")
    q_rank = config.get("q_lora_rank")
    if q_rank:
        layers = [Layer("qkv_a_proj", q_rank + rank + rope, hidden), Layer("kv_a_proj", rank + rope, hidden)]
        layers.append(Layer("q_b_proj", heads * (nope + rope), q_rank))
    else:
        layers = [Layer("kv_a_proj", rank + rope, hidden), Layer("q_proj", heads * (nope + rope), hidden)]
    return [*layers, Layer("kv_b_proj", heads * (nope + value), rank), Layer("o_proj", hidden, heads * value)]


def _mlp(name: str, hidden: int, intermediate: int, tp: int) -> list[Layer]:
    own = _split(intermediate, tp, f"{name}'s intermediate size")
    return [Layer(f"{name}.gate_up_proj", 2 * own, hidden), Layer(f"{name}.down_proj", hidden, own)]


def _get(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise InvalidInputError(f"The model's config must have {name} as a positive number, but it has {value!r}.")
    return value


def _split(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise InvalidInputError(f"{what} must be a multiple of tp, but it is {size} and tp is {tp}.")
    return size // tp


def _sizes(value: Any, where: str) -> list[int]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in values):
        raise InvalidInputError(f"{where} must be a positive number or a list of them, but it is {value!r}.")
    return values


def _read(path: Path) -> Any:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    if path.suffix.lower() not in (".yaml", ".yml"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"{path} is not JSON: {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise InvalidInputError(
            f"{path} is YAML, and pyyaml is not installed: pip install 'deep-gemm-jit[cli]'"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{path} is not YAML: {error}") from error
