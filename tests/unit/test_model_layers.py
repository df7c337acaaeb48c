"""Layers of models from their config.json: sizes by family, formats by quantization_config, and configs that are not
known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import deep_gemm
from deep_gemm.aot import attention, build, model
from deep_gemm.aot.layers import Plan
from deep_gemm.arch import SM90
from deep_gemm.cli.app import app
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.runtime import engine

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
DEEPSEEK_V32 = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "quantization_config": BLOCKS,
}
GLM_45 = {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "head_dim": 256,
}
QWEN3_NEXT = DELTA_NET | {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "linear_num_value_heads": 32,
}
QWEN3_5 = {
    "model_type": "qwen3_5",
    "text_config": DELTA_NET
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "num_hidden_layers": 64,
        "linear_num_value_heads": 48,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    },
    "vision_config": {"model_type": "qwen3_5", "depth": 27, "hidden_size": 1152},
    "quantization_config": BLOCKS | {"modules_to_not_convert": ["lm_head", "model.visual", "visual"]},
}
BERT = {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


def served(plan: Plan) -> dict[str, tuple[int, int]]:
    return {layer.name: (layer.n, layer.k) for layer in plan.served}


def why_not(plan: Plan) -> dict[str, str]:
    return {layer.name: layer.why_not for layer in plan.layers if layer.why_not}


def test_deepseek_v32_has_an_indexer_and_a_head_for_the_next_token() -> None:
    found = model.plan(DEEPSEEK_V32, 8)
    assert not found.problems
    assert served(found) | {"indexer.wq_b": (8192, 1536), "indexer.wk": (128, 7168)} == served(found)
    assert set(why_not(found)) == {"indexer.weights_proj", "mtp.eh_proj"}


@pytest.mark.parametrize(("heads", "size", "kernels"), [(64, 128, 4), (32, 128, 4), (24, 128, 0), (64, 96, 0)])
def test_an_indexer_needs_kernels_for_prompts_and_pages(heads: int, size: int, kernels: int) -> None:
    layers = model.plan(DEEPSEEK_V32 | {"index_n_heads": heads, "index_head_dim": size}, 8).layers
    assert attention.indexers(layers) == {(heads, size)}
    found = [engine.build_request(params).name for params in attention.kernels_of(layers, SM90)]
    assert len(found) == len(set(found)) == kernels
    if kernels:
        assert found[0] == f"fp8_mqa_logits_h{heads}_d128_f32_q{256 // heads}"
        assert found[1:3] == [f"fp8_paged_mqa_logits_h{heads}_d128_f32_q{next_n}" for next_n in (1, 2)]
        assert found[3] == "paged_mqa_logits_metadata"
    assert attention.kernels_of([], SM90) == []


def test_qwen3_next_has_linear_attention_and_gated_queries() -> None:
    found = model.plan(QWEN3_NEXT)
    assert not found.problems
    assert served(found) == {
        "qkv_proj": (2 * 16 * 256 + 2 * 2 * 256, 2048),
        "o_proj": (2048, 4096),
        "linear_attn.in_proj_qkvz": (12288, 2048),
        "linear_attn.out_proj": (2048, 4096),
        "shared_expert.gate_up_proj": (1024, 2048),
        "shared_expert.down_proj": (2048, 512),
        "experts.gate_up_proj": (1024, 2048),
        "experts.down_proj": (2048, 512),
    }
    # Two heads of keys on four GPUs: each has a copy of one. Linear attention is split by heads.
    split = served(model.plan(QWEN3_NEXT, 4))
    assert split["qkv_proj"] == (2 * 4 * 256 + 2 * 256, 2048)
    assert split["linear_attn.in_proj_qkvz"] == (12288 // 4, 2048)
    assert split["linear_attn.out_proj"] == (2048, 1024)


def test_qwen3_5_is_dense_with_linear_attention_and_a_vision_tower() -> None:
    found = model.plan(QWEN3_5)
    assert not found.problems, "its vision tower is left out of quantisation"
    assert served(found) == {
        "qkv_proj": (2 * 24 * 256 + 2 * 4 * 256, 5120),
        "o_proj": (5120, 24 * 256),
        "linear_attn.in_proj_qkvz": (2 * 2048 + 2 * 6144, 5120),
        "linear_attn.out_proj": (5120, 6144),
        "mlp.gate_up_proj": (2 * 17408, 5120),
        "mlp.down_proj": (5120, 17408),
    }
    plain = {name: value for name, value in QWEN3_5.items() if name != "quantization_config"}
    (problem,) = model.plan(plain).problems
    assert problem.startswith("vision_config of the model's config is not read")


def test_layers_of_both_kinds_are_looked_for_in_layer_types() -> None:
    strange = model.plan(LLAMA_8B | {"layer_types": ["full_attention", "mamba", "sliding_attention"]})
    assert "'mamba'" in strange.problems[0]
    assert "qkv_proj" in served(strange)


@pytest.mark.parametrize("field", ["mlp_only_layers", "decoder_sparse_step", "moe_layer_freq"])
def test_a_mixture_may_have_dense_layers_too(field: str) -> None:
    mixture = LLAMA_8B | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 512}
    assert "mlp.down_proj" not in served(model.plan(mixture))
    assert "mlp.down_proj" in served(model.plan(mixture | {field: [0] if field == "mlp_only_layers" else 2}))


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba2", "gpt2", 7, ["llama"]])
def test_a_family_that_is_not_known_gets_no_invented_layers(kind: Any) -> None:
    found = model.plan(BERT | {"model_type": kind})
    assert found.layers == ()
    assert "are not known" in found.problems[0]
    with pytest.raises(UnsupportedError, match="are not known"):
        deep_gemm.precompile(BERT | {"model_type": kind})


def test_tensor_parallelism_must_not_split_a_block_of_scales() -> None:
    found = model.plan(GLM_45, 8)
    assert len(found.problems) == 4, "of the experts, too"
    for name, sizes in (("gate_up_proj", "384 x 5120"), ("down_proj", "5120 x 192")):
        assert any(f"shared_expert.{name} ({sizes})" in problem and "192" in problem for problem in found.problems)
    assert "shared_expert.down_proj" not in served(found)
    assert not model.plan(GLM_45, 4).problems
    with pytest.raises(UnsupportedError, match="share the scale of one block"):
        deep_gemm.precompile(GLM_45, tp=8)


def test_a_head_of_64_rows_splits_a_block_too() -> None:
    small = LLAMA_8B | {"hidden_size": 2048}
    assert not model.plan(small, 4).problems
    assert "qkv_proj (" in model.plan(small, 8).problems[0]


def test_weights_with_ragged_blocks_stay_apart_where_they_come_with_scales() -> None:
    ragged = LLAMA_8B | {"num_key_value_heads": 1, "head_dim": 64, "num_attention_heads": 9}
    assert set(served(model.plan(ragged))) >= {"qkv_proj"}
    assert set(served(model.plan(ragged | {"quantization_config": BLOCKS}))) >= {"q_proj", "k_proj", "v_proj"}


FIELDS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "q_lora_rank",
          "kv_lora_rank", "n_shared_experts", "moe_intermediate_size", "n_routed_experts", "first_k_dense_replace",
          "num_hidden_layers", "index_n_heads", "qk_rope_head_dim", "num_nextn_predict_layers")  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["8", "two", -1, 1.5, float("nan"), [8], {}, True, 10**30, 2**31])
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{field} of the model's config must be a whole number"):
        model.plan(DEEPSEEK_V32 | {field: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        ({"num_attention_heads": 24}, "multiple of num_attention_heads"),
        ({"layer_types": "full"}, "layer_types"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
        ({"quantization_config": BLOCKS | {"weight_block_size": 128}}, "weight_block_size"),
        ({"quantization_config": BLOCKS | {"modules_to_not_convert": "lm_head"}}, "modules_to_not_convert"),
        ({"quantization_config": BLOCKS | {"ignored_layers": ["re:("]}}, "ignored_layers"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
    ],
)
def test_fields_that_do_not_fit_are_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        model.plan(LLAMA_8B | change)


def precompile(folder: Path, config: Any, *arguments: str) -> Result:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return CliRunner().invoke(app, ["precompile", "--model", str(path), "--m", "64", *arguments])


def test_the_command_lists_layers_and_compiles_nothing_of_what_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(build, "build", lambda params: built.append(params) or build.Outcome("k", (), params))
    result = precompile(tmp_path, GLM_45, "--tp", "8")
    assert result.exit_code == 3
    assert "shared_expert.down_proj" in result.output
    assert "--allow-partial" in result.output
    result = precompile(tmp_path, GLM_45, "--tp", "8", "--dry-run")
    assert result.exit_code == 3
    result = precompile(tmp_path, GLM_45, "--tp", "8", "--dry-run", "--allow-partial")
    assert result.exit_code == 0, result.output
    assert "kernels would be compiled" in result.output
    assert not built
    assert precompile(tmp_path, GLM_45, "--tp", "8", "--allow-partial").exit_code == 1, "the fake builds nothing"
    assert built
    assert precompile(tmp_path, BERT, "--allow-partial").exit_code == 3


def test_a_plan_as_json(tmp_path: Path) -> None:
    result = precompile(tmp_path, DEEPSEEK_V32, "--tp", "8", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["problems"] == []
    assert report["compiled"] is None
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert layers["o_proj"] == {
        "name": "o_proj",
        "n": 7168,
        "k": 2048,
        "op": "fp8_gemm_nt",
        "groups": 1,
        "m": "M = 64",
        "kernels": 1,
        "served": True,
        "why_not": "",
        "elsewhere": False,
    }
    assert not layers["mtp.eh_proj"]["served"]
    assert json.loads(precompile(tmp_path, BERT, "--json").output)["problems"]


def test_shapes_that_no_call_can_use_are_refused() -> None:
    result = CliRunner().invoke(app, ["precompile", "--shape", "128x2047", "--m", "64"])
    assert result.exit_code == 3
    assert "K must be a multiple of 16" in result.output
    assert "K = 2048" in result.output
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        deep_gemm.precompile([(128, 2047)])
    result = CliRunner().invoke(app, ["precompile", "--shape", "0x2048"])
    assert result.exit_code == 2
    assert "N of the shape '0x2048' must be a whole number from 1" in result.output


def test_three_numbers_are_one_m_and_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["precompile", "--shape", "64x7168x2048", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "M = 64" in result.output
    assert "every M" not in result.output


@pytest.mark.compile
@pytest.mark.parametrize(
    ("variables", "words"),
    [({"HOME": "/dev/null/x"}, "stored nowhere"), ({"DG_JIT_CACHE_DIR": "/proc/nothing"}, "stored")],
)
def test_nothing_is_called_compiled_that_is_not_kept(
    variables: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shape = ("precompile", "--shape", "8x128x256", "--jobs", "2")
    result = CliRunner().invoke(app, shape)
    assert result.exit_code == 1
    assert words in result.output
    # A pack does not need the cache.
    assert CliRunner().invoke(app, [*shape, "--pack", str(tmp_path / "a.dgpack")]).exit_code == 0
