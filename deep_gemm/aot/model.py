"""The linear layers of a model from its Hugging Face `config.json`. Only families with known layers are accepted:
nothing is guessed. A checkpoint says more (`deep_gemm.aot.checkpoint`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deep_gemm.aot import deepseek_v4, experts, inputs
from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import FP4_OPS, FP8, JOINED, OPS, STAYS, LayerPlan, Weight, absorbed, check_op, layers_of
from deep_gemm.aot.quantization import Format, Kind, config_of, format_of
from deep_gemm.errors import InvalidInputError

FAMILIES = frozenset((
    "cohere", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "glm_moe_dsa", "gpt_oss", "granite", "kimi_k2", "llama", "minimax_m2",
    "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
))  # fmt: skip
"""Values of model_type with these layers: attention with q, k, v and o, latent attention or gated delta nets; and a
gated MLP, dense or of experts. Encoders, state-space models and MLPs of two matrices are not among them."""

GATED_QUERIES = frozenset(["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"])
"""Their q_proj has a gate for each query, so that it is twice as high, unless attn_output_gate says otherwise."""

ATTENTION = dict.fromkeys(("attention", "full_attention", "sliding_attention", "chunked_attention"), "full")
ATTENTION["linear_attention"] = "linear"

OTHER_PARTS = {
    "vision_config": ("visual", "vision_tower", "vision_model"),
    "audio_config": ("audio_tower", "audio_model"),
    "encoder": ("encoder",),
    "thinker_config": ("thinker",),
    "talker_config": ("talker",),
}
"""The config's descriptions of parts other than the language model, and their modules."""


FUSED = {"fused_qkv_a_proj": JOINED["qkv_a_proj"]}
"""Names of joined layers that only engines use."""
IN_EXPERTS = {"gate_proj": ("w1", "w13"), "up_proj": ("w3", "w13"), "down_proj": ("w2",)}
"""Other names of the weights of a routed expert, and of what they become a part of."""

SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers", "intermediate_size",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads",
    "index_head_dim", "o_groups", "o_lora_rank", "hc_mult", "moe_intermediate_size", "n_routed_experts", "num_experts",
    "num_local_experts", "num_experts_per_tok", "n_shared_experts", "shared_expert_intermediate_size",
    "first_k_dense_replace", "decoder_sparse_step", "num_nextn_predict_layers", "full_attention_interval",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
"""The fields of a config.json that give sizes of layers. The first two are in each config."""


class ModelConfig(SimpleNamespace):
    """The `SIZES` of a config.json: whole numbers, 0 where the model has no such thing. Made by `read`."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of config.json. Raises InvalidInputError, which names the field."""
        found = dict.fromkeys(SIZES, 0)
        for name in SIZES:
            needed = name in SIZES[:2]
            # Some configs write 0 experts, ranks or layers where there are none.
            if config.get(name) is not None or needed:
                found[name] = inputs.whole(config.get(name), f"{name} of the model's config", int(needed))
        made = cls(**found)
        if made.num_attention_heads % made.kv_heads:
            raise InvalidInputError(
                f"num_attention_heads of the model's config must be a multiple of num_key_value_heads, but they are "
                f"{made.num_attention_heads} and {made.kv_heads}."
            )
        if not made.head_dim and not made.kv_lora_rank and made.hidden_size % made.num_attention_heads:
            raise InvalidInputError(
                f"hidden_size of the model's config must be a multiple of num_attention_heads where there is no "
                f"head_dim, but they are {made.hidden_size} and {made.num_attention_heads}."
            )
        return made

    def need(self, name: str) -> int:
        """A field that this model must have. Raises InvalidInputError."""
        value: int = getattr(self, name)
        if not value:
            raise InvalidInputError(f"{name} of the model's config must be a whole number from 1, but there is none.")
        return value

    @property
    def kv_heads(self) -> int:
        return int(self.num_key_value_heads or self.num_attention_heads)

    @property
    def head_size(self) -> int:
        return int(self.head_dim or self.hidden_size // self.num_attention_heads)

    @property
    def experts(self) -> int:
        """How many experts tokens are routed to; 0 for a dense model."""
        return int(self.n_routed_experts or self.num_experts or self.num_local_experts)

    def absorbed(self, tp: int) -> LayerPlan:
        """What latent attention multiplies by kv_b_proj while it decodes."""
        sizes = self.qk_nope_head_dim, self.kv_lora_rank, self.v_head_dim
        return LayerPlan(absorbed(self.num_attention_heads, *sizes, tp))


def read(path: Path) -> Mapping[str, Any]:
    """The content of a config.json. ModelOpt may have left quantization_config in a file of its own beside it. Raises
    InvalidInputError if one cannot be read, or holds no object."""
    found, beside = inputs.read_object(path), path.with_name("hf_quant_config.json")
    text, _ = text_part(found)
    if config_of(text, found) is not None or not beside.exists():
        return found
    return {**found, "quantization_config": inputs.read_object(beside)}


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether this is a model's configuration rather than a list of shapes."""
    return bool({"hidden_size", "text_config", "model_type", "architectures"} & set(data))


def plan(config: Mapping[str, Any], tp: int = 1, ep: int = 1, op: str = "") -> LayerPlan:
    """The layers of a model on one of its GPUs. `tp` GPUs share each: column-parallel layers divide N, row-parallel
    layers divide K, the rest stays whole. `ep` GPUs share the routed experts. Without a quantization_config layers run
    `op`; if it is "", their dtype (torch_dtype) decides, which must be bfloat16 or float16. Raises InvalidInputError
    for a wrong field, and for a `tp` or `ep` that does not divide sizes evenly."""
    degrees(tp, ep)
    check_op(op)
    text, outside = text_part(config)
    kind = text.get("model_type", config.get("model_type"))
    if kind is not None and (not isinstance(kind, str) or kind not in FAMILIES):
        problem = (
            f"The layers of model_type {shown(kind)} are not known. Give the directory of its checkpoint, whose "
            f"safetensors say them, or shapes. Known are {', '.join(sorted(FAMILIES))}."
        )
        return LayerPlan((), (problem,))
    known = ModelConfig.read(text)
    experts.shares(known.experts, tp, ep)
    form = format_of(config_of(text, config))
    problems = list(form.problems)
    problems += [
        f"{name} of the model's config is not read: no kernel is prepared for its layers."
        for name in outside
        if not form.leaves_out(OTHER_PARTS[name])
    ]
    if kind == deepseek_v4.KIND:
        modules, strange = deepseek_v4.modules(text, known)
        problems += strange
    else:
        kinds, strange = _attention_kinds(text, known)
        problems += [f"Layers of the type {shown(x)} are not known: no kernel is prepared for them." for x in strange]
        modules = _modules(text, known, kinds, str(kind))
    if not op:
        dtype = _dtype_of(text, config)
        if not form.given and dtype not in OPS:
            problems.append(
                undecided(f"The model's config has no quantization_config, and its dtype is {shown(dtype)}")
            )
        op = OPS.get(dtype or "", FP8)
    named = [(each[0], weights) for each in modules for weights in _formatted(form, each, op)]
    found = LayerPlan.join([layers_of(named, tp, form.fixed), known.absorbed(tp)])
    routed = LayerPlan(())
    if known.experts:
        v4 = kind == deepseek_v4.KIND
        expert = deepseek_v4.expert(text, known, form.given) if v4 else _expert(known)
        one = [(expert[0], weights) for weights in _formatted(form, expert, op)]
        routed = experts.plan(one, known.experts, known.num_experts_per_tok, tp, ep, form.fixed)
    return LayerPlan.join([LayerPlan((), tuple(problems)), found, routed])


def degrees(tp: int, ep: int) -> None:
    """Raises InvalidInputError unless both are whole numbers from 1."""
    for name, degree in (("tp", tp), ("ep", ep)):
        if isinstance(degree, bool) or not isinstance(degree, int) or not 1 <= degree <= inputs.MAX_SIZE:
            raise InvalidInputError(f"{name} must be at least 1, a whole number, but it is {shown(degree)}.")


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The part that describes the language model, and the names of parts that describe other towers."""
    inner = config.get("text_config")
    text = inner if "hidden_size" not in config and isinstance(inner, Mapping) else config
    return text, [name for name in OTHER_PARTS if isinstance(config.get(name), Mapping)]


def _attention_kinds(text: Mapping[str, Any], config: ModelConfig) -> tuple[dict[str, list[int]], list[Any]]:
    """Which layers have "full" attention and which "linear", and the types that are not known."""
    types = text.get("layer_types")
    count = config.num_hidden_layers or 1
    if types is not None and not isinstance(types, list):
        raise InvalidInputError(f"layer_types of the model's config must be a list, but it is {shown(types)}.")
    if not types:
        linear = bool(config.linear_num_value_heads)
        every = (config.full_attention_interval or 4) if linear else 1
        # No model has so many layers; a few of them stand for all.
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(min(count, 4096))]
        if linear and count < every:
            types += ["full_attention"]
    found: dict[str, list[int]] = {}
    strange: list[Any] = []
    for index, name in enumerate(types):
        if isinstance(name, str) and name in ATTENTION:
            found.setdefault(ATTENTION[name], []).append(index)
        elif len(strange) < 4 and name not in strange:
            strange.append(name)
    return found, strange


Module = tuple[str, str, dict[str, Weight], list[int]]
"""A module: its name in the table, its name within a layer of the model, its weights, and the layers that have one."""


def _modules(text: Mapping[str, Any], x: ModelConfig, kinds: dict[str, list[int]], kind: str) -> list[Module]:
    found: list[Module] = []
    everywhere = sorted(index for indices in kinds.values() for index in indices)
    full = kinds.get("full", [])
    if x.kv_lora_rank:
        found.append(("", "self_attn", _latent_attention(x), everywhere))
        if x.index_n_heads:
            found.append(("indexer", "self_attn.indexer", _indexer(x), everywhere))
    elif full:
        gated = text.get("attn_output_gate", kind in GATED_QUERIES) is True
        found.append(("", "self_attn", _attention(x, gated), full))
    if "linear" in kinds:
        found.append(("linear_attn", "linear_attn", _delta_net(x, kind), kinds["linear"]))
    dense = not x.experts or bool(
        x.first_k_dense_replace or text.get("mlp_only_layers") or (x.decoder_sparse_step or 1) > 1
        or text.get("moe_layer_freq", 1) not in (1, None)
    )  # fmt: skip
    first = list(range(min(x.first_k_dense_replace, 4096)))
    if dense:
        layers = first if x.experts and first else everywhere
        found.append(("mlp", "mlp", _mlp(x.hidden_size, x.need("intermediate_size")), layers))
    shared = x.shared_expert_intermediate_size or x.n_shared_experts * x.moe_intermediate_size
    if x.experts and shared:
        name = "mlp.shared_expert" if x.shared_expert_intermediate_size else "mlp.shared_experts"
        rest = [index for index in everywhere if index not in set(first)]
        found.append(("shared_expert", name, _mlp(x.hidden_size, shared), rest))
    if x.num_nextn_predict_layers:
        head = Weight((x.hidden_size,), 2 * x.hidden_size, "it stays in bfloat16.", elsewhere=True)
        found.append(("mtp", "", {"eh_proj": head}, []))
    return found


def _attention(x: ModelConfig, gated: bool) -> dict[str, Weight]:
    heads, kv, size, hidden = x.num_attention_heads, x.kv_heads, x.head_size, x.hidden_size
    keys = Weight((kv * size,), hidden, heads=kv, repeats=True)
    return {
        "q_proj": Weight((heads * size * (2 if gated else 1),), hidden, heads=heads),
        "k_proj": keys,
        "v_proj": keys,
        "o_proj": Weight((hidden,), heads * size, heads=heads),
    }


def _latent_attention(x: ModelConfig) -> dict[str, Weight]:
    """Multi-head latent attention (DeepSeek, Kimi): keys and values are expanded from a low-rank latent."""
    hidden, rank, rope = x.hidden_size, x.need("kv_lora_rank"), x.need("qk_rope_head_dim")
    nope, value, heads = x.need("qk_nope_head_dim"), x.need("v_head_dim"), x.num_attention_heads
    found = {"kv_a_proj_with_mqa": Weight((rank + rope,), hidden)}
    queries = heads * (nope + rope)
    if x.q_lora_rank:
        found = {"q_a_proj": Weight((x.q_lora_rank,), hidden)} | found
        found["q_b_proj"] = Weight((queries,), x.q_lora_rank, heads=heads)
    else:
        found["q_proj"] = Weight((queries,), hidden, heads=heads)
    found["kv_b_proj"] = Weight((heads * (nope + value),), rank, heads=heads)
    found["o_proj"] = Weight((hidden,), heads * value, heads=heads)
    return found


def _indexer(x: ModelConfig) -> dict[str, Weight]:
    """The indexer of sparse attention (DeepSeek-V3.2), which every GPU has whole."""
    heads, size = x.need("index_n_heads"), x.need("index_head_dim")
    return {
        "wq_b": Weight((heads * size,), x.q_lora_rank or x.hidden_size),
        "wk": Weight((size,), x.hidden_size),
        "weights_proj": Weight((heads,), x.hidden_size, "it stays in bfloat16 or float32.", elsewhere=True),
    }


def _delta_net(x: ModelConfig, kind: str) -> dict[str, Weight]:
    """Linear attention by a gated delta net (Qwen3-Next, Qwen3.5): queries and keys, values and a gate, by heads."""
    key_heads, heads = x.need("linear_num_key_heads"), x.need("linear_num_value_heads")
    keys, values = key_heads * x.need("linear_key_head_dim"), heads * x.need("linear_value_head_dim")
    if kind == "qwen3_next":
        inside = {
            "in_proj_qkvz": Weight((keys, keys, values, values), x.hidden_size, heads=key_heads),
            "in_proj_ba": Weight((heads, heads), x.hidden_size, _FEW_ROWS, heads=heads, elsewhere=True),
        }
    else:
        inside = {
            "in_proj_qkv": Weight((keys, keys, values), x.hidden_size, heads=key_heads),
            "in_proj_z": Weight((values,), x.hidden_size, heads=heads),
            "in_proj_b": Weight((heads,), x.hidden_size, _FEW_ROWS, heads=heads, elsewhere=True),
            "in_proj_a": Weight((heads,), x.hidden_size, _FEW_ROWS, heads=heads, elsewhere=True),
        }
    return inside | {"out_proj": Weight((x.hidden_size,), values, heads=heads)}


_FEW_ROWS = "it stays in bfloat16: it has two rows for each head."


def _mlp(hidden: int, size: int) -> dict[str, Weight]:
    return {
        "gate_proj": Weight((size,), hidden),
        "up_proj": Weight((size,), hidden),
        "down_proj": Weight((hidden,), size),
    }


def _expert(x: ModelConfig) -> Module:
    """One routed expert."""
    first, count = x.first_k_dense_replace, min(x.num_hidden_layers or 1, 4096)
    weights = _mlp(x.hidden_size, x.moe_intermediate_size or x.need("intermediate_size"))
    return "experts", "mlp.experts.0", weights, list(range(first, count))


def _dtype_of(*configs: Mapping[str, Any]) -> str | None:
    """The config's dtype, a field that transformers has renamed; None without one."""
    words = (config.get(field) for config in configs for field in ("torch_dtype", "dtype"))
    word = next((word for word in words if isinstance(word, str)), None)
    return None if word is None else word.removeprefix("torch.")


def undecided(why: str) -> str:
    """A problem of a model that says for no operation. ``why`` begins the sentence."""
    return (
        f"{why}, so which operation its layers run is not known. Give it as op, or --op: {FP8} if they are cast to FP8 "
        f"when they are loaded, else {OPS['bfloat16']} or {OPS['float16']}. The sizes here are those of {FP8}."
    )


def _formatted(form: Format, module: Module, op: str) -> Iterator[dict[str, Weight]]:
    """The weights of a module, once for each way in which layers of the model store them. They run ``op`` if the model
    is not quantised."""
    _, where, weights, layers = module
    if not form.given:
        yield {name: unquantised(name, weight, op) for name, weight in weights.items()}
        return
    ways = {tuple(form.kind(names_of(layer, where, name)) for name in weights): None for layer in layers or [0]}
    for kinds in ways:
        yield {name: _of_kind(weight, kind) for (name, weight), kind in zip(weights.items(), kinds, strict=True)}


def _of_kind(weight: Weight, kind: Kind | None) -> Weight:
    if kind is not None:
        op = weight.op if weight.op in FP4_OPS else kind.op
        return replace(weight, why_not=weight.why_not or kind.why_not, op=op)
    if weight.why_not:
        return weight
    return replace(weight, why_not="quantization_config leaves it as it is.", elsewhere=True)


def names_of(layer: int, module: str, weight: str) -> list[str]:
    """What a weight of a layer is called in lists of names, from "layers" on: engines name a weight by the matrix that
    it becomes a part of."""
    modules = [module]
    own = [weight, *(whole for whole, parts in (JOINED | FUSED).items() if weight in parts)]
    if module == "mlp.experts.0":
        modules += ["mlp.experts", "block_sparse_moe.experts.0", "block_sparse_moe.experts"]
        own += IN_EXPERTS[weight]
    inside = [".".join(filter(None, (at, name))) for at in modules for name in own]
    return [f"layers.{layer}.{name}" for name in inside]


def unquantised(name: str, weight: Weight, op: str) -> Weight:
    """The weight called `name` of a model without a quantization_config, whose layers run `op`."""
    served = name in STAYS and op in OPS.values()
    left = weight.elsewhere and not served
    op = weight.op if weight.op in FP4_OPS else op
    return replace(weight, op=op, why_not="" if served else weight.why_not, elsewhere=left)
