"""Routed experts of models: their layers from config.json and from checkpoints, and how GPUs share them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import Tensors, fp8, write
from test_model_layers import BLOCKS, DEEPSEEK_V32, GLM_45, QWEN3_NEXT

from deep_gemm.aot import model, workload
from deep_gemm.aot.experts import shares
from deep_gemm.aot.layers import FORMS, GROUPED, Layer, Plan
from deep_gemm.errors import InvalidInputError

FP8, BF16 = GROUPED["fp8_gemm_nt"], GROUPED["bf16_gemm_nt"]
DEEPSEEK_V3 = DEEPSEEK_V32 | {"model_type": "deepseek_v3", "num_experts_per_tok": 8}
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
QWEN3_MOE = ATTENTION | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
MINIMAX_M2 = ATTENTION | {
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "quantization_config": BLOCKS,
}


def of_experts(found: Plan) -> list[Layer]:
    return [layer for layer in found.layers if layer.name.startswith("experts.")]


def sizes(found: Plan) -> dict[str, set[tuple[int, int, int]]]:
    """Groups, N and K of experts by the operation that multiplies them; those of layers that have kernels."""
    by_op: dict[str, set[tuple[int, int, int]]] = {}
    for layer in of_experts(found):
        if not layer.why_not:
            by_op.setdefault(layer.op, set()).add((layer.groups, layer.n, layer.k))
    return by_op


def in_each(operations: tuple[str, ...], *found: tuple[int, int, int]) -> dict[str, set[tuple[int, int, int]]]:
    return {op: set(found) for op in operations}


@pytest.mark.parametrize(
    ("config", "tp", "ep", "operations", "groups", "up", "down"),
    [
        (DEEPSEEK_V3, 1, 1, FP8, 256, (4096, 7168), (7168, 2048)),
        (DEEPSEEK_V3, 8, 1, FP8, 256, (512, 7168), (7168, 256)),
        (DEEPSEEK_V3, 8, 8, FP8, 32, (4096, 7168), (7168, 2048)),
        (DEEPSEEK_V3, 8, 4, FP8, 64, (2048, 7168), (7168, 1024)),
        (DEEPSEEK_V3, 1, 32, FP8, 8, (4096, 7168), (7168, 2048)),
        (QWEN3_MOE, 1, 1, BF16, 128, (1536, 2048), (2048, 768)),
        (QWEN3_MOE, 4, 1, BF16, 128, (384, 2048), (2048, 192)),
        (QWEN3_MOE, 4, 4, BF16, 32, (1536, 2048), (2048, 768)),
        (MIXTRAL, 2, 1, BF16, 8, (14336, 4096), (4096, 7168)),
        (MINIMAX_M2, 1, 8, FP8, 32, (3072, 3072), (3072, 1536)),
        (GLM_45, 4, 4, FP8, 40, (3072, 5120), (5120, 1536)),
        (QWEN3_NEXT, 1, 16, FP8, 32, (1024, 2048), (2048, 512)),
        (MIXTRAL | {"torch_dtype": "float32"}, 1, 8, FP8, 1, (28672, 4096), (4096, 14336)),
    ],
)
def test_experts_of_a_config(
    config: dict[str, Any],
    tp: int,
    ep: int,
    operations: tuple[str, ...],
    groups: int,
    up: tuple[int, int],
    down: tuple[int, int],
) -> None:
    found = model.plan(config, tp, ep)
    assert found.problems == ()
    assert sizes(found) == in_each(operations, (groups, *up), (groups, *down))
    assert {layer.name for layer in of_experts(found)} == {"experts.gate_up_proj", "experts.down_proj"}


def test_a_config_cast_to_another_format() -> None:
    assert set(sizes(model.plan(QWEN3_MOE, op="fp8_gemm_nt"))) == set(FP8)
    assert set(sizes(model.plan(DEEPSEEK_V3, op="bf16_gemm_nt"))) == set(FP8), "a quantised model keeps its format"


@pytest.mark.parametrize("op", ["fp16_gemm_nt", "fp8_gemm_nt_rowwise"])
def test_experts_of_another_format_have_no_kernel(op: str) -> None:
    found = model.plan(QWEN3_MOE, op=op)
    assert sizes(found) == {}
    assert {layer.why_not for layer in of_experts(found)} == {
        f"experts run in FP8 or bfloat16, and {op} has no form with groups."
    }
    assert [problem.split(" ")[0] for problem in found.problems] == ["experts.gate_up_proj", "experts.down_proj"]


def test_experts_that_are_left_out_of_quantisation_or_in_another_format() -> None:
    left_out = QWEN3_MOE | {"quantization_config": BLOCKS | {"modules_to_not_convert": ["experts"]}}
    assert {layer.why_not for layer in of_experts(model.plan(left_out))} == {"quantization_config leaves it as it is."}
    assert model.plan(left_out).problems == ()
    awq = QWEN3_MOE | {"quantization_config": {"quant_method": "awq"}}
    found = of_experts(model.plan(awq))
    assert [layer.why_not for layer in found] == ["its weights are 4-bit integers (AWQ)."] * 2, "each once"


def test_a_model_without_experts_has_no_such_layers() -> None:
    dense = {name: value for name, value in MIXTRAL.items() if "experts" not in name} | {"model_type": "llama"}
    assert of_experts(model.plan(dense)) == []


@pytest.mark.parametrize(
    ("config", "tp", "ep", "words"),
    [
        (DEEPSEEK_V3, 1, 3, "ep must divide the model's 256 routed experts, but it is 3."),
        (MIXTRAL, 1, 16, "ep must divide the model's 8 routed experts, but it is 16."),
        (MIXTRAL, 8, 0, "ep must be at least 1"),
        (
            MINIMAX_M2 | {"num_local_experts": 24},
            4,
            6,
            "ep must divide tp or be a multiple of it, but ep is 6 and tp is 4",
        ),
        (
            QWEN3_MOE | {"moe_intermediate_size": 770},
            4,
            1,
            "N of experts.gate_proj must be a multiple of tp, but it is 770 and tp is 4.",
        ),
        (
            QWEN3_MOE | {"moe_intermediate_size": 770},
            8,
            2,
            "N of experts.gate_proj must be a multiple of tp / ep, but it is 770 and tp / ep is 4.",
        ),
        (MIXTRAL | {"num_experts_per_tok": "two"}, 1, 1, "num_experts_per_tok of the model's config must be a whole"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_in_words(config: dict[str, Any], tp: int, ep: int, words: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        model.plan(config, tp, ep)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(("tp", "ep"), [(8, 1), (16, 2)])
def test_gpus_do_not_share_a_block_of_scales(tp: int, ep: int) -> None:
    """1536 / 8 = 192."""
    found = model.plan(GLM_45, tp, ep)
    assert sizes(found) == {}
    for name, size in (("gate_up_proj", "384 x 5120"), ("down_proj", "5120 x 192")):
        (problem,) = (problem for problem in found.problems if problem.startswith(f"experts.{name} ({size})"))
        assert "on each of 8 GPUs is 192, no multiple of 128" in problem


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 40))
def test_every_expert_is_somewhere(log_tp: int, log_ep: int, some: int) -> None:
    tp, ep = 1 << log_tp, 1 << log_ep
    groups, parts = shares(some * ep, tp, ep)
    assert groups * ep == some * ep
    assert parts == max(1, tp // ep)


def test_all_tokens_of_all_gpus_may_go_to_the_experts_of_one() -> None:
    found = of_experts(model.plan(DEEPSEEK_V3, 8, 8))
    # 8 GPUs with 1000 tokens each: each token goes to 8 of the 32 experts here, and each of these begins at 128 rows.
    rows = {layer.op: layer.most_rows(1000) for layer in found}
    assert rows == {FP8[0]: 64000 + 33 * 127, FP8[1]: 64000 + 33 * 127, FP8[2]: 8000}
    few = of_experts(model.plan(DEEPSEEK_V3, 1, 64))
    assert {layer.most_rows(1) for layer in few} == {64 * 8 + 5 * 127, 64}, "a token goes to an expert once"
    unknown = of_experts(model.plan(DEEPSEEK_V32, 1, 16))
    assert {layer.most_rows(1) for layer in unknown} == {16 * 16 + 17 * 127, 16}, "it may go to all of them"
    assert {layer.most_rows(2**31 - 1) for layer in found} == {2**31 - 1}
    assert Layer("", 1, 16).most_rows(1000) == 1000


def checkpoint(folder: Path, tensors: Tensors, config: dict[str, Any] | None, tp: int = 1, ep: int = 1) -> Plan:
    write(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return workload.plan(folder, tp, ep)


def deepseek(count: int) -> Tensors:
    tensors: Tensors = {}
    for expert in range(count):
        at = f"model.layers.3.mlp.experts.{expert}"
        for name, n, k in (("gate_proj", 2048, 7168), ("up_proj", 2048, 7168), ("down_proj", 7168, 2048)):
            tensors |= fp8(f"{at}.{name}", n, k)
    return tensors


def test_experts_of_a_checkpoint(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, deepseek(16), None, 8, 8)
    assert sizes(found) == in_each(FP8, (2, 4096, 7168), (2, 7168, 2048))
    assert found.problems == ()
    assert len(found.layers) == 2 * len(FORMS), "each once"
    with pytest.raises(InvalidInputError, match="ep must divide the model's 16 routed experts, but it is 3"):
        workload.plan(tmp_path, 1, 3)
    # With a config, experts are as many as it says, and a token goes to as many as it says.
    known = checkpoint(tmp_path, deepseek(16), DEEPSEEK_V3, 8, 8)
    assert sizes(known) == in_each(FP8, (32, 4096, 7168), (32, 7168, 2048))
    assert of_experts(known) == of_experts(model.plan(DEEPSEEK_V3, 8, 8))
    split = workload.plan(tmp_path, 16, 2)
    assert sizes(split) == in_each(FP8, (128, 512, 7168), (128, 7168, 256))


def test_experts_of_mixtral_have_other_names(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for expert in range(8):
        at = f"model.layers.0.block_sparse_moe.experts.{expert}"
        for name, shape in (("w1", (14336, 4096)), ("w3", (14336, 4096)), ("w2", (4096, 14336))):
            tensors[f"{at}.{name}.weight"] = ("BF16", shape)
    found = checkpoint(tmp_path, tensors, MIXTRAL, 2)
    assert sizes(found) == in_each(BF16, (8, 14336, 4096), (8, 4096, 7168))
    assert {layer.name for layer in of_experts(found)} == {"experts.w13", "experts.w2"}
    assert found.problems == ()


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_are_one_tensor(tmp_path: Path, transposed: bool) -> None:
    up, down = ((2048, 1536), (768, 2048)) if transposed else ((1536, 2048), (2048, 768))
    at = "model.layers.0.mlp.experts"
    tensors: Tensors = {
        f"{at}.gate_up_proj": ("BF16", (128, *up)),
        f"{at}.down_proj.weight": ("BF16", (128, *down)),
        f"{at}.gate_up_proj_bias": ("BF16", (128, 1536)),
    }
    found = checkpoint(tmp_path, tensors, QWEN3_MOE, 4, 2)
    assert sizes(found) == in_each(BF16, (64, 768, 2048), (64, 2048, 384))
    assert found.problems == ()
    packed = {name: ("F8_E4M3", shape) for name, (_, shape) in tensors.items()}
    (tmp_path / "other").mkdir()
    words = {layer.why_not for layer in of_experts(checkpoint(tmp_path / "other", packed, QWEN3_MOE))}
    assert words == {"it has no scales."}
    (tmp_path / "blocks").mkdir()
    packed |= {f"{at}.gate_up_proj_scale_inv": ("F32", (128, -(-up[0] // 128), -(-up[1] // 128)))}
    packed |= {f"{at}.down_proj.weight_scale_inv": ("F32", (128, -(-down[0] // 128), -(-down[1] // 128)))}
    found = checkpoint(tmp_path / "blocks", packed, QWEN3_MOE)
    if transposed:
        assert all("must be N x K" in problem for problem in found.problems)
        assert len(found.problems) == 2
    else:
        assert sizes(found) == in_each(FP8, (128, 1536, 2048), (128, 2048, 768))


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("config", [GPT_OSS, GPT_OSS | {"model_type": "new"}, None])
def test_which_way_stacked_experts_lie(tmp_path: Path, config: dict[str, Any] | None) -> None:
    """gpt-oss keeps K x N, with K = N of the other; its weights tell so, whether its config is known or not."""
    at = "model.layers.0.mlp.experts"
    tensors: Tensors = {
        f"{at}.gate_up_proj": ("BF16", (32, 2880, 5760)),
        f"{at}.gate_up_proj_bias": ("BF16", (32, 5760)),
        f"{at}.down_proj": ("BF16", (32, 2880, 2880)),
        f"{at}.down_proj_bias": ("BF16", (32, 2880)),
    }
    found = checkpoint(tmp_path, tensors, config)
    assert found.problems == ()
    assert sizes(found) == in_each(BF16, (32, 5760, 2880), (32, 2880, 2880))


def test_which_way_stacked_experts_lie_is_not_guessed(tmp_path: Path) -> None:
    at = "model.layers.4.moe"
    tensors: Tensors = {
        f"{at}.gate_proj.weight": ("BF16", (48, 5120, 7168)),
        f"{at}.up_proj.weight": ("BF16", (48, 5120, 7168)),
        f"{at}.down_proj.weight": ("BF16", (48, 7168, 5120)),
    }
    found = checkpoint(tmp_path, tensors, None)
    assert found.served == ()
    assert all("may be N x K or K x N" in problem for problem in found.problems)
    assert len(found.problems) == 2
    table: Tensors = {"model.embed_tokens.weight": ("BF16", (1000, 7168))}
    step3 = {"model_type": "step3v", "text_config": {"hidden_size": 7168, "num_attention_heads": 64, "head_dim": 256}}
    for more, config in ((table, None), ({}, step3)):
        (tmp_path / "config.json").unlink(missing_ok=True)
        found = checkpoint(tmp_path, tensors | more, config)
        assert found.problems == ()
        want = {("moe.gate_up_proj", 48, 10240, 7168), ("moe.down_proj", 48, 7168, 5120)}
        assert {(layer.name, layer.groups, layer.n, layer.k) for layer in found.served} == want
        assert {layer.op for layer in found.served} == set(BF16)


def test_experts_in_mxfp4_are_told(tmp_path: Path) -> None:
    at = "model.layers.0.mlp.experts"
    tensors: Tensors = {
        f"{at}.gate_up_proj_blocks": ("U8", (32, 5760, 90, 16)),
        f"{at}.gate_up_proj_scales": ("U8", (32, 5760, 90)),
        f"{at}.down_proj_blocks": ("U8", (32, 2880, 90, 16)),
        f"{at}.down_proj_scales": ("U8", (32, 2880, 90)),
        "model.layers.0.self_attn.o_proj.weight": ("BF16", (2880, 4096)),
    }
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    found = checkpoint(tmp_path, tensors, GPT_OSS | {"quantization_config": mxfp4})
    words = {layer.name: (layer.n, layer.k, layer.why_not) for layer in found.layers}
    assert words == {
        "experts.gate_up_proj": (5760, 2880, "its weights are 4-bit floats (MXFP4)."),
        "experts.down_proj": (2880, 2880, "its weights are 4-bit floats (MXFP4)."),
        "o_proj": (2880, 4096, "it stays in BF16."),
    }
    assert len(found.problems) == 2


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.block_sparse_moe.input_linear.weight", (32, 1024, 1536)),
        ("model.layers.0.ffn.experts.mlp.w1", (1024, 512)),
        ("model.layers.0.ffn.experts.mlp.w1.weight", (1024, 512)),
        ("model.layers.0.mlp.experts.wi_0", (8, 1024, 512)),
        ("model.layers.0.mlp.experts.3.wi", (1024, 512)),
    ],
)
def test_no_weight_of_experts_vanishes(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    o_proj: Tensors = {"model.layers.0.self_attn.o_proj.weight": ("BF16", (512, 512))}
    found = checkpoint(tmp_path, o_proj | {name: ("BF16", shape)}, None)
    assert {layer.name for layer in found.served} == {"o_proj"}
    (problem,) = found.problems
    assert problem.startswith(re.sub(r"(?<=[.])[0-9]+(?=[.])", "*", name))
    assert "no kernel is prepared for it" in problem


def test_tensors_that_no_gemm_multiplies_are_no_problem(tmp_path: Path) -> None:
    tensors: Tensors = {
        "model.layers.0.self_attn.o_proj.weight": ("BF16", (512, 512)),
        "model.layers.0.linear_attn.conv1d.weight": ("BF16", (8192, 1, 4)),
        "model.visual.patch_embed.proj.weight": ("BF16", (1152, 3, 2, 16, 16)),
        "model.visual.pos_embed.weight": ("BF16", (1, 2304, 1152)),
        "model.layers.0.mlp.experts.e_score_correction_bias": ("F32", (8, 64)),
    }
    assert checkpoint(tmp_path, tensors, None).problems == ()


@pytest.mark.parametrize("number", ["65536", "1000000000", "10000000000", "9" * 5000])
def test_an_expert_with_a_number_that_no_model_has(tmp_path: Path, number: str) -> None:
    tensors = fp8(f"model.layers.0.mlp.experts.{number}.down_proj", 256, 256)
    with pytest.raises(InvalidInputError, match="experts are numbered from 0 to 65535") as refused:
        checkpoint(tmp_path, tensors, None)
    assert len(str(refused.value)) < 300
    stack: Tensors = {"model.layers.0.mlp.experts.down_proj": ("BF16", (int(number[:10]) + 1, 256, 256))}
    with pytest.raises(InvalidInputError, match="65536 are the most"):
        checkpoint(tmp_path, stack | {"model.embed_tokens.weight": ("BF16", (8, 256))}, None)


def test_how_many_experts_there_are_is_not_guessed(tmp_path: Path) -> None:
    some = {name: stored for name, stored in deepseek(16).items() if ".experts.7." not in name}
    found = checkpoint(tmp_path, some, None)
    assert found.problems == ("15 of the experts from 0 to 15 are here: a config.json would say how many.",)
    assert checkpoint(tmp_path, some, DEEPSEEK_V3).problems == ()
    more = checkpoint(tmp_path, some, DEEPSEEK_V3 | {"n_routed_experts": 8})
    assert "Tensors hold 16 experts, but the model has 8" in more.problems[0]


def test_experts_of_a_checkpoint_in_other_formats(tmp_path: Path) -> None:
    at = "model.layers.0.mlp.experts.0.down_proj"
    for tensors, words in (
        (fp8(at, 2048, 768, 64), "its scales are of 64 x 64 blocks, not of 128 x 128."),
        ({f"{at}.weight": ("BF16", (2048, 768))} | fp8("model.layers.0.o_proj", 256, 256), "it is BF16, not FP8."),
        ({f"{at}.weight": ("F16", (2048, 768))}, "experts run in FP8 or bfloat16, and fp16_gemm_nt has no form"),
    ):
        (layer,) = of_experts(checkpoint(tmp_path, tensors, None))
        assert words in layer.why_not
        assert layer.groups == 1
