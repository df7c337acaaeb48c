"""The linear layers of DeepSeek-V4, by the names of its checkpoints.

Layers differ by how many tokens they compress into one key (compress_ratios): 0 or 1 (none), 4 or 128. Those of 4 have
an indexer. All have routed experts, which the published models keep in MXFP4 (expert_dtype).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import FP8, FP8_FP4, Weight
from deep_gemm.errors import InvalidInputError

if TYPE_CHECKING:
    from deep_gemm.aot.model import ModelConfig, Module

KIND = "deepseek_v4"

RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Types of layers in a config that transformers has written, and what they compress."""

_WIDE = "it stays in bfloat16 or float32."


def modules(text: Mapping[str, Any], x: ModelConfig) -> tuple[list[Module], list[str]]:
    """The modules but for routed experts, and what was not understood, in sentences."""
    heads, groups, hidden, q_rank = x.num_attention_heads, x.need("o_groups"), x.hidden_size, x.need("q_lora_rank")
    size, o_rank, hyper = x.need("head_dim"), x.need("o_lora_rank"), x.need("hc_mult")
    if heads % groups:
        raise InvalidInputError(
            f"num_attention_heads of the model's config must be a multiple of o_groups, but they are {heads} and "
            f"{groups}."
        )
    attention = {
        "wq_a": Weight((q_rank,), hidden),
        "wkv": Weight((size,), hidden),
        "wq_b": Weight((heads * size,), q_rank, heads=heads),
        "wo_a": Weight((groups * o_rank,), heads * size // groups, heads=groups),
        "wo_b": Weight((hidden,), groups * o_rank, heads=groups),
    }
    mixing = Weight((hyper * (2 + hyper),), hyper * hidden)
    ratios = _ratios(text, x)
    every = list(range(len(ratios)))
    found: list[Module] = [
        ("", "attn", attention, every),
        ("", "", {"hc_attn_fn": mixing, "hc_ffn_fn": mixing}, every),
    ]
    for ratio in (4, 128):
        if at := [index for index in every if ratios[index] == ratio]:
            found.append(("compressor", "attn.compressor", _compressor(size, hidden, ratio), at))
            if ratio == 4:
                own, count = x.need("index_head_dim"), x.need("index_n_heads")
                queries = {
                    "wq_b": Weight((count * own,), q_rank),
                    "weights_proj": Weight((count,), hidden, _WIDE, elsewhere=True),
                }
                found.append(("indexer", "attn.indexer", queries, at))
                found.append(("indexer.compressor", "attn.indexer.compressor", _compressor(own, hidden, ratio), at))
    if shared := x.n_shared_experts * x.need("moe_intermediate_size"):
        found.append(("shared_expert", "ffn.shared_experts", _mlp(hidden, shared), every))
    if x.num_nextn_predict_layers:
        joins = {"e_proj": Weight((hidden,), hidden), "h_proj": Weight((hidden,), hidden, copies=hyper)}
        found.append(("mtp", "", joins, [len(ratios)]))
    strange = dict.fromkeys(shown(ratio) for ratio in ratios if ratio not in (0, 1, 4, 128))
    told = [f"Layers that compress by {x} are not known: no kernel is prepared for them." for x in list(strange)[:4]]
    return found, told


def expert(text: Mapping[str, Any], x: ModelConfig, quantised: bool) -> Module:
    """One routed expert."""
    dtype = text.get("expert_dtype") or ("fp4" if quantised else "")
    why_not, op = "", FP8_FP4 if dtype == "fp4" else FP8
    if quantised and dtype not in ("fp4", "fp8"):
        why_not = f"the expert_dtype {shown(dtype)} is not known."
    weights = _mlp(x.hidden_size, x.need("moe_intermediate_size"), why_not, op)
    return "experts", "ffn.experts.0", weights, list(range(len(_ratios(text, x))))


def _ratios(text: Mapping[str, Any], x: ModelConfig) -> list[Any]:
    """What each layer compresses. A list may have an entry more, for the layer that predicts a second token."""
    count = x.need("num_hidden_layers")
    field = "layer_types" if text.get("compress_ratios") is None else "compress_ratios"
    given = text.get(field)
    if not isinstance(given, list) or len(given) < count:
        raise InvalidInputError(
            f"{'compress_ratios' if given is None else field} of the model's config must be a list with an entry for "
            f"each of its {count} layers, but it is {shown(given)}."
        )
    return [RATIOS.get(each, each) if isinstance(each, str) else each for each in given[:count]]


def _compressor(size: int, hidden: int, ratio: int) -> dict[str, Weight]:
    """Sums of tokens' keys, weighted by gates. Those of 4 tokens overlap, so each token has two."""
    rows = size * (2 if ratio == 4 else 1)
    return {name: Weight((rows,), hidden, _WIDE, elsewhere=True) for name in ("wkv", "wgate")}


def _mlp(hidden: int, size: int, why_not: str = "", op: str = FP8) -> dict[str, Weight]:
    return {
        "w1": Weight((size,), hidden, why_not, op=op),
        "w3": Weight((size,), hidden, why_not, op=op),
        "w2": Weight((hidden,), size, why_not, op=op),
    }
