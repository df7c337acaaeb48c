"""Models for tests: their configs, headers of checkpoints, and the layers of a plan as text."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from deep_gemm.aot.layers import FP8, Layer, LayerPlan
from deep_gemm.cli.app import app

# fmt: off
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8}
DEEPSEEK_V32 = {
    "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64,
    "index_head_dim": 128, "num_nextn_predict_layers": 1, "quantization_config": BLOCKS,
}
DEEPSEEK_V3 = DEEPSEEK_V32 | {"model_type": "deepseek_v3", "num_experts_per_tok": 8}
GLM_45 = {
    "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "n_shared_experts": 1, "first_k_dense_replace": 3, "num_hidden_layers": 92,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
}
DELTA_NET = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
             "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "head_dim": 256}
QWEN3_NEXT = DELTA_NET | {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16,
    "num_key_value_heads": 2, "num_hidden_layers": 48, "num_experts": 512, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "linear_num_value_heads": 32,
}
QWEN3_5 = {
    "model_type": "qwen3_5",
    "text_config": DELTA_NET | {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
        "num_key_value_heads": 4, "num_hidden_layers": 64, "linear_num_value_heads": 48,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    },
    "vision_config": {"model_type": "qwen3_5", "depth": 27, "hidden_size": 1152},
    "quantization_config": BLOCKS | {"modules_to_not_convert": ["lm_head", "model.visual", "visual"]},
}
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
QWEN3_MOE = ATTENTION | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
}
MINIMAX_M2 = ATTENTION | {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256,
    "num_experts_per_tok": 8, "quantization_config": BLOCKS,
}
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
    "torch_dtype": "bfloat16",
}
QWEN3 = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128}
"""The model of the checkpoint `CHECKPOINT`."""
BERT = {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
# fmt: on

Config = dict[str, Any]
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write(path: Path, tensors: Tensors) -> None:
    """A file of safetensors without any data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def fp8(name: str, n: int, k: int, block: int = 128) -> Tensors:
    """A weight with scales of blocks."""
    scales = (-(-n // block), -(-k // block))
    return {f"{name}.weight": ("F8_E4M3", (n, k)), f"{name}.weight_scale_inv": ("F32", scales)}


def sized(text: str) -> dict[str, tuple[int, ...]]:
    """ "o_proj 2048x4096" by name; with groups, "experts.down_proj 8x7168x2048"."""
    words = text.split()
    return {name: tuple(map(int, size.split("x"))) for name, size in zip(words[::2], words[1::2], strict=True)}


def all_fp8(prefix: str, text: str) -> Tensors:
    """Weights with scales of blocks, by name and size."""
    return {key: stored for name, size in sized(text).items() for key, stored in fp8(prefix + name, *size).items()}


def wide(text: str, dtype: str = "BF16") -> Tensors:
    """Weights without scales."""
    return {f"{name}.weight": (dtype, size) for name, size in sized(text).items()}


def decoder(layer: int) -> Tensors:
    """A layer with 32 heads of queries and 8 of keys, 128 wide."""
    at = f"model.layers.{layer}."
    attention = "self_attn.q_proj 4096x2048 self_attn.k_proj 1024x2048 self_attn.v_proj 1024x2048"
    rest = "self_attn.o_proj 2048x4096 mlp.gate_proj 6144x2048 mlp.up_proj 6144x2048 mlp.down_proj 2048x6144"
    return all_fp8(at, f"{attention} {rest}") | {f"{at}input_layernorm.weight": ("BF16", (2048,))}


CHECKPOINT = decoder(0) | decoder(1) | wide("model.embed_tokens 32000x2048 lm_head 32000x2048 model.norm 2048")
JOINED = "qkv_proj 6144x2048 o_proj 2048x4096 mlp.gate_up_proj 12288x2048 mlp.down_proj 2048x6144"
"""The layers of `CHECKPOINT`."""


def of_experts(plan: LayerPlan) -> list[Layer]:
    return [layer for layer in plan.layers if layer.name.startswith("experts.")]


def quantised(config: Config, **quantization: Any) -> Config:
    return config | {"quantization_config": quantization or BLOCKS}


def groups(*weights: Config, **more: Any) -> Config:
    """quantization_config of compressed-tensors."""
    return {"quant_method": "compressed-tensors", "config_groups": dict(zip("ab", weights, strict=False))} | more


CHANNEL = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": {"num_bits": 8}}
IN_BLOCKS = {"weights": CHANNEL["weights"] | {"strategy": "block", "block_structure": [128, 128]}}
PB_WO = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}


def served(plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Sizes of the layers that have kernels, by name; with groups in front, if there are any."""
    return {layer.name: (*([layer.groups] * (layer.groups > 1)), layer.n, layer.k) for layer in plan.served}


def cast(config: dict[str, Any]) -> str:
    """The operation to plan a config with: FP8 if it does not say one, as for a model that is cast when loaded."""
    return "" if {"torch_dtype", "quantization_config"} & set(config) else FP8


def runs(plan: LayerPlan) -> set[str]:
    """The operations of the layers that have kernels."""
    return {layer.op for layer in plan.served}


def why_not(plan: LayerPlan) -> dict[str, str]:
    return {layer.name: layer.why_not for layer in plan.layers if layer.why_not}


def precompile(folder: Path, config: Any, *arguments: str) -> Result:
    """What the command says of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return CliRunner().invoke(app, ["precompile", "--model", str(path), "--m", "64", *arguments])
