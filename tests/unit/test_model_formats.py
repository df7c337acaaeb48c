"""Formats of a model's weights by the quantization_config of its config.json, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_model_layers import BLOCKS, DEEPSEEK_V32, GLM_45, LLAMA_8B, QWEN3_NEXT, precompile, served, why_not

import deep_gemm
from deep_gemm.aot import model
from deep_gemm.errors import UnsupportedError


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        (BLOCKS | {"weight_block_size": [64, 64]}, "64 x 64 blocks"),
        (BLOCKS | {"activation_scheme": "static"}, "activations have one scale per tensor"),
        (BLOCKS | {"fmt": "e5m2"}, "not E4M3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt's 'NVFP4'"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
            },
            "its activations are not FP8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}},
            },
            "of 4 bits",
        ),
    ],
    ids=lambda value: value.get("quant_method", "") if isinstance(value, dict) else value,
)
def test_other_quantisation_is_not_served(tmp_path: Path, quantization: dict[str, Any], words: str) -> None:
    config = LLAMA_8B | {"quantization_config": quantization}
    found = model.plan(config)
    assert served(found) == {}
    assert all(words in reason for reason in why_not(found).values())
    assert all(words in problem for problem in found.problems)
    assert len(found.problems) == len(found.layers)
    for arguments in ((), ("--dry-run",), ("--allow-partial",), ("--dry-run", "--allow-partial")):
        result = precompile(tmp_path, config, *arguments)
        assert result.exit_code == 3, result.output
        assert words in result.output
        assert "nothing to compile" in result.output
    with pytest.raises(UnsupportedError, match="cannot be served"):
        deep_gemm.precompile(config)


CHANNEL = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": {"num_bits": 8}}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": CHANNEL}, "ignore": ["lm_head"]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": CHANNEL | {"weights": CHANNEL["weights"] | {"strategy": "tensor"}}},
        },
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "ptpc_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        BLOCKS | {"weight_block_size": None},
        BLOCKS | {"weight_block_size": None, "activation_scheme": "static"},
    ],
)
def test_scales_of_rows_and_of_tensors_are_served(quantization: dict[str, Any]) -> None:
    found = model.plan(LLAMA_8B | {"quantization_config": quantization}, 8)
    assert found.problems == ()
    assert {layer.op for layer in found.served} == {"fp8_gemm_nt_rowwise"}
    assert set(served(found)) == {"qkv_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj"}


def test_groups_with_scales_of_several_kinds_are_not_guessed() -> None:
    blocks = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}
    groups = {"quant_method": "compressed-tensors", "config_groups": {"a": CHANNEL, "b": blocks}}
    found = model.plan(LLAMA_8B | {"quantization_config": groups})
    assert set(why_not(found).values()) == {"its weights have scales of several kinds."}


def test_glm_46_in_fp8_is_served_but_for_its_experts(tmp_path: Path) -> None:
    """Published with a scale per channel, which has no form with groups."""
    config = GLM_45 | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": CHANNEL}}}
    found = model.plan(config)
    assert {layer.name for layer in found.served} >= {"qkv_proj", "o_proj", "mlp.down_proj", "shared_expert.down_proj"}
    assert {problem.split(" ")[0] for problem in found.problems} == {"experts.gate_up_proj", "experts.down_proj"}
    assert precompile(tmp_path, config, "--dry-run").exit_code == 3
    assert precompile(tmp_path, config, "--dry-run", "--allow-partial").exit_code == 0


def test_what_other_libraries_multiply_is_no_problem(tmp_path: Path) -> None:
    result = precompile(tmp_path, DEEPSEEK_V32, "--dry-run")
    assert result.exit_code == 0
    assert "elsewhere: it stays in bfloat16." in result.output
    assert " no: " not in result.output
    all_left = LLAMA_8B | {"quantization_config": BLOCKS | {"modules_to_not_convert": ["self_attn", "mlp"]}}
    for arguments in ((), ("--dry-run",)):
        assert precompile(tmp_path, all_left, *arguments).exit_code == 3, "there is nothing to compile"


def test_blocks_by_compressed_tensors_are_served_but_for_what_is_ignored() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    groups = {"config_groups": {"group_0": {"weights": weights}}, "ignore": ["lm_head", "re:.*self_attn.*"]}
    found = model.plan(LLAMA_8B | {"quantization_config": {"quant_method": "compressed-tensors"} | groups})
    assert set(served(found)) == {"mlp.gate_up_proj", "mlp.down_proj"}
    assert "leaves it as it is" in why_not(found)["o_proj"]


def test_a_module_left_out_in_some_layers_is_still_compiled() -> None:
    config = LLAMA_8B | {"num_hidden_layers": 2}
    names = [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
    some = model.plan(config | {"quantization_config": BLOCKS | {"modules_to_not_convert": names[:1]}})
    assert "mlp.down_proj" in served(some)
    both = model.plan(config | {"quantization_config": BLOCKS | {"modules_to_not_convert": names}})
    assert "mlp.down_proj" in why_not(both)


def test_a_method_that_nobody_knows_is_a_problem(tmp_path: Path) -> None:
    result = precompile(tmp_path, LLAMA_8B | {"quantization_config": {"quant_method": "new"}})
    assert result.exit_code == 3
    assert "quant_method 'new'" in result.output


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (GLM_45 | {"num_nextn_predict_layers": 1}, {"mtp.eh_proj"}),
        (QWEN3_NEXT, {"linear_attn.in_proj_ba"}),
        (DEEPSEEK_V32 | {"quantization_config": None}, {"mtp.eh_proj"}),
    ],
)
def test_a_model_of_16_bits_has_no_layer_that_stays_in_16_bits(config: dict[str, Any], names: set[str]) -> None:
    in_16_bits, cast = model.plan(config | {"torch_dtype": "bfloat16"}), model.plan(config)
    assert names <= set(served(in_16_bits))
    assert {layer.op for layer in in_16_bits.served if layer.name in names} == {"bf16_gemm_nt"}
    assert names <= {layer.name for layer in cast.layers if layer.elsewhere}
    assert cast.problems == in_16_bits.problems == ()
