"""DeepSeek-V4: its layers by config.json and by its tensors, and the kernels of indexers and hyper-connections."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from model_cases import BLOCKS, DEEPSEEK_V32, precompile, served
from test_checkpoint import Tensors, plan

from deep_gemm.aot import attention_layers, layers, model, workload
from deep_gemm.aot.layers import LayerPlan
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError
from deep_gemm.kernels.sm90_tf32_hc_prenorm_gemm import PRENORM
from deep_gemm.runtime import engine
from deep_gemm.spec import PrenormSpec, ceil_div

GLM_5 = DEEPSEEK_V32 | {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
}
V4_FLASH = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8,
    "o_lora_rank": 1024, "hc_mult": 4, "index_n_heads": 64, "index_head_dim": 128, "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "torch_dtype": "bfloat16", "expert_dtype": "fp4",
    "quantization_config": BLOCKS | {"scale_fmt": "ue8m0"},
}  # fmt: skip
V4_PRO = V4_FLASH | {
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
FIELDS = ("q_lora_rank", "head_dim", "o_groups", "o_lora_rank", "hc_mult", "moe_intermediate_size", "num_hidden_layers")
V4_FLASH_TP_8 = {
    "fused_wqa_wkv": (1024 + 512, 4096), "wq_b": (64 * 512 // 8, 1024), "wo_a": (1024, 64 * 512 // 8),
    "wo_b": (4096, 8 * 1024 // 8), "indexer.wq_b": (64 * 128, 1024), "shared_expert.w13": (2 * 2048 // 8, 4096),
    "shared_expert.w2": (4096, 2048 // 8), "mtp.e_proj": (4096, 4096), "mtp.h_proj": (4096, 4096),
}  # fmt: skip
V4_PRO_TP_1 = {
    "fused_wqa_wkv": (1536 + 512, 7168), "wq_b": (128 * 512, 1536), "wo_a": (16, 1024, 128 * 512 // 16),
    "wo_b": (7168, 16 * 1024), "indexer.wq_b": (64 * 128, 1536), "shared_expert.w13": (2 * 3072, 7168),
    "shared_expert.w2": (7168, 3072), "mtp.e_proj": (7168, 7168), "mtp.h_proj": (7168, 7168),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tp", "want", "indexer", "hyper"),
    [
        (V4_FLASH, 8, V4_FLASH_TP_8, {(64, 128)}, (24, 4 * 4096)),
        (V4_PRO, 1, V4_PRO_TP_1, {(64, 128)}, (24, 4 * 7168)),
    ],
    ids=["flash", "pro"],
)
def test_deepseek_v4(
    config: dict[str, Any], tp: int, want: dict[str, Any], indexer: set[Any], hyper: tuple[int, int]
) -> None:
    found = model.plan(config, tp)
    experts = {x.op for x in found.served if x.name in ("experts.w13", "experts.w2")}
    assert experts == set(layers.FP4_GROUPED[layers.FP8_FP4])
    assert {name: sizes for name, sizes in served(found).items() if not name.startswith("experts.")} == want
    assert {x.name: x.copies for x in found.served if x.copies > 1 and not x.name.startswith("experts.")} == {
        "mtp.h_proj": 4
    }
    assert attention_layers.indexers(found.layers) == indexer
    assert {(layer.n, layer.k) for layer in found.layers if layer.name in ("hc_attn_fn", "hc_ffn_fn")} == {hyper}
    assert not found.problems
    assert {layer.op for layer in found.served if layer.name == "wo_a"} == {"fp8_bmm"}
    sizes = {(x.name, x.n) for x in found.layers if x.elsewhere}
    assert sizes >= {("compressor.fused_wkv_wgate", 4 * 512), ("compressor.fused_wkv_wgate", 2 * 512)}
    assert sizes >= {("indexer.compressor.fused_wkv_wgate", 4 * 128), ("indexer.weights_proj", 64)}


@pytest.mark.parametrize(
    ("change", "served_experts", "problems"),
    [
        ({"expert_dtype": "fp8"}, 6, []),
        ({"expert_dtype": "fp3"}, 0, ["experts.w13", "experts.w2"]),
        ({"expert_dtype": None, "quantization_config": None}, 6, []),
    ],
)
def test_experts_of_deepseek_v4_by_their_dtype(
    change: dict[str, Any], served_experts: int, problems: list[str]
) -> None:
    found = model.plan(V4_FLASH | change, 8)
    assert sum(layer.name.startswith("experts.") for layer in found.served) == served_experts
    assert [problem.partition(" ")[0] for problem in found.problems] == problems


@pytest.mark.parametrize(
    ("change", "indexers"),
    [
        ({"compress_ratios": None, "layer_types": ["compressed_sparse_attention"] * 43}, 1),
        ({"compress_ratios": None, "layer_types": ["heavily_compressed_attention"] * 43}, 0),
        ({"compress_ratios": [128] * 43 + [4]}, 0),  # the last entry is no layer's
    ],
)
def test_only_layers_of_ratio_4_have_an_indexer(change: dict[str, Any], indexers: int) -> None:
    found = model.plan(V4_FLASH | change)
    assert len(attention_layers.indexers(found.layers)) == indexers
    assert not found.unknown
    strange = model.plan(V4_FLASH | {"compress_ratios": [0, 2, "mamba", *[4] * 40]})
    assert [text.partition(" are")[0] for text in strange.unknown] == [
        "Layers that compress by 2",
        "Layers that compress by 'mamba'",
    ]


def test_a_hyper_connection_needs_kernels_for_every_m_and_split() -> None:
    """Splits as vLLM chooses them, and None, as SGLang calls it: no such call compiles."""
    listed = attention_layers.kernels_of(model.plan(V4_PRO).layers, SM90)
    assert [engine.build_request(params).name for params in listed if params.kernel == PRENORM.name] == [
        f"tf32_hc_prenorm_gemm_n24_{tile}" for tile in ("32x1", "128x2", "64x2", "64x4", "32x8", "64x8")
    ]
    called = set()
    for sms, m in itertools.product((78, 132), range(1, 16385, 31)):
        for splits in (1, max(1, min(sms // ceil_div(m, 64), 28672 // 64 // 4))):
            spec = PrenormSpec(m, 24, 28672, splits, sms)
            called.add(PRENORM.params(spec, PRENORM.config_of(spec, SM90), SM90))
    assert called == {params for params in listed if params.kernel == PRENORM.name}


@pytest.mark.parametrize(("config", "heads"), [(DEEPSEEK_V32, 64), (GLM_5, 32)], ids=["deepseek_v32", "glm_5"])
def test_models_without_hyper_connections_have_an_indexers_kernels_only(config: dict[str, Any], heads: int) -> None:
    found = model.plan(config, 8)
    assert not found.problems
    assert attention_layers.indexers(found.layers) == {(heads, 128)}
    assert served(found)["indexer.wq_b"] == (heads * 128, config["q_lora_rank"]), "whole on each GPU"
    assert {params.kernel for params in attention_layers.kernels_of(found.layers, SM90)} == {
        "sm90_fp8_mqa_logits",
        "sm90_fp8_paged_mqa_logits",
        "paged_mqa_logits_metadata",
    }


def v4_block(at: str, ratio: int) -> Tensors:
    """A layer of DeepSeek-V4-Flash, as it is published."""
    sizes = {"attn.wq_a": (1024, 4096), "attn.wkv": (512, 4096), "attn.wq_b": (32768, 1024)}
    sizes |= {"attn.wo_a": (8192, 4096), "attn.wo_b": (4096, 8192)}
    sizes |= {f"ffn.shared_experts.{name}": (2048, 4096) for name in ("w1", "w3")}
    sizes |= {"ffn.shared_experts.w2": (4096, 2048)}
    sizes |= {"attn.indexer.wq_b": (8192, 1024)} if ratio == 4 else {}
    found: Tensors = {f"{at}.{name}.weight": ("F8_E4M3", shape) for name, shape in sizes.items()}
    found |= {f"{at}.{name}.scale": ("F8_E8M0", (n // 128, k // 128)) for name, (n, k) in sizes.items()}
    for name, (n, k) in {"w1": (2048, 4096), "w3": (2048, 4096), "w2": (4096, 2048)}.items():
        found[f"{at}.ffn.experts.0.{name}.weight"] = ("I8", (n, k // 2))
        found[f"{at}.ffn.experts.0.{name}.scale"] = ("F8_E8M0", (n, k // 32))
    rows = {"attn.compressor": 512 * (2 if ratio == 4 else 1)} if ratio else {}
    for module, n in (rows | ({"attn.indexer.compressor": 256} if ratio == 4 else {})).items():
        found |= {f"{at}.{module}.{name}.weight": ("BF16", (n, 4096)) for name in ("wkv", "wgate")}
        found[f"{at}.{module}.ape"] = ("F32", (ratio, n))
    found |= {f"{at}.attn.indexer.weights_proj.weight": ("BF16", (64, 4096))} if ratio == 4 else {}
    found |= {f"{at}.{name}": ("F32", (24, 16384)) for name in ("hc_attn_fn", "hc_ffn_fn")}
    return found | {f"{at}.ffn.gate.weight": ("BF16", (256, 4096)), f"{at}.ffn.gate.tid2eid": ("I64", (129280, 6))}


def v4_flash() -> Tensors:
    joins = {f"mtp.0.{name}.weight": ("F8_E4M3", (4096, 4096)) for name in ("e_proj", "h_proj")}
    scales = {f"mtp.0.{name}.scale": ("F8_E8M0", (32, 32)) for name in ("e_proj", "h_proj")}
    ends = {"embed.weight": ("BF16", (129280, 4096)), "head.weight": ("BF16", (129280, 4096))}
    ends |= {"hc_head_fn": ("F32", (4, 16384)), "norm.weight": ("BF16", (4096,))}
    layers = v4_block("layers.0", 0) | v4_block("layers.2", 4) | v4_block("layers.3", 128) | v4_block("mtp.0", 0)
    return layers | joins | scales | ends


@pytest.mark.parametrize("tp", [1, 8])
def test_deepseek_v4_by_its_tensors_and_by_its_config(tmp_path: Path, tp: int) -> None:
    found, want = plan(tmp_path, v4_flash(), V4_FLASH, tp), model.plan(V4_FLASH, tp)

    def sizes(plan: LayerPlan) -> set[Any]:
        return {(x.name.replace("mtp.*.", "mtp."), x.n, x.k, x.groups, x.copies) for x in plan.served}

    assert sizes(found) == sizes(want)
    assert set(found.problems) == set(want.problems)
    assert {x.name for x in found.layers if x.elsewhere} >= {"compressor.fused_wkv_wgate", "head", "embed"}
    kernels = [attention_layers.kernels_of(each.layers, SM90) for each in (found, want)]
    assert kernels[0] == kernels[1]
    assert len(kernels[0]) == 10


def test_an_index_of_deepseek_v4_alone_and_its_weights_in_16_bits(tmp_path: Path) -> None:
    index, names = tmp_path / "model.safetensors.index.json", dict.fromkeys(v4_flash(), "model-1.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text(json.dumps(V4_FLASH))
    assert workload.plan(tmp_path) == model.plan(V4_FLASH)
    index.unlink()
    wide: Tensors = {
        name: ("BF16", (shape[0], shape[1] * 2) if dtype == "I8" else shape)
        for name, (dtype, shape) in v4_flash().items()
        if not name.endswith("scale")
    }
    found = plan(tmp_path, wide, V4_FLASH | {"quantization_config": None, "expert_dtype": None})
    assert found.problems == ()
    assert [(x.op, x.groups) for x in found.served if x.name == "wo_a"] == [("bf16_bmm", 8)]
    assert {x.name for x in found.layers if x.elsewhere} >= {"compressor.fused_wkv_wgate", "head", "embed"}


def test_kernels_that_belong_to_no_layer_are_named(tmp_path: Path) -> None:
    result = precompile(tmp_path, V4_FLASH, "--tp", "8", "--dry-run", "--allow-partial", "--json")
    others = json.loads(result.output)["others"]
    assert {"fp8_mqa_logits_h64_d128_f32_q4", "tf32_hc_prenorm_gemm_n24_32x1"} <= set(others)
    text = precompile(tmp_path, V4_FLASH, "--tp", "8", "--dry-run", "--allow-partial").output
    assert f"also       {', '.join(others)}, which belong to no layer" in text
    assert precompile(tmp_path, V4_FLASH, "--tp", "8", "--dry-run").exit_code == 0
    assert precompile(tmp_path, V4_FLASH | {"expert_dtype": "fp3"}, "--tp", "8", "--dry-run").exit_code == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"o_groups": 7}, "num_attention_heads of the model's config must be a multiple of o_groups"),
        *(({field: None}, f"{field} of the model's config must be a whole number") for field in FIELDS),
        *(({field: 1.5}, f"{field} of the model's config must be a whole number") for field in FIELDS),
        ({"compress_ratios": [4] * 42}, "compress_ratios .* an entry for each of its 43 layers"),
        ({"compress_ratios": None}, "compress_ratios .* an entry for each of its 43 layers"),
    ],
)
def test_fields_that_do_not_fit_are_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        model.plan(V4_FLASH | change)
