"""Layers of checkpoints, from headers of safetensors that this file writes: no tensor has any data."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_cases import (
    CHECKPOINT,
    DEEPSEEK_V3,
    GPT_OSS,
    JOINED,
    MIXTRAL,
    QWEN3,
    QWEN3_MOE,
    Tensors,
    all_fp8,
    fp8,
    of_experts,
    runs,
    served,
    sized,
    why_not,
    wide,
    write,
)

from deep_gemm.aot import headers, layers, model, workload
from deep_gemm.aot.layers import FORMS, FP8, GROUPED, ROWWISE, LayerPlan
from deep_gemm.errors import InvalidInputError

BF16, FP16 = "bf16_gemm_nt", "fp16_gemm_nt"
LM_HEAD = "engines multiply it by other libraries."


def plan(folder: Path, tensors: Tensors, config: Any = None, tp: int = 1, ep: int = 1, **options: Any) -> LayerPlan:
    """The plan of a checkpoint, with a config beside it or none."""
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").unlink(missing_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return workload.plan(folder, tp, ep, **options)


def stored(dtype: str) -> Tensors:
    """`CHECKPOINT` before it was quantised."""
    return {name: (dtype, shape) for name, (_, shape) in CHECKPOINT.items() if not name.endswith("scale_inv")}


def deepseek(count: int) -> Tensors:
    """Experts with blocks of scales."""
    sizes = "gate_proj 2048x7168 up_proj 2048x7168 down_proj 7168x2048"
    found: Tensors = {}
    for expert in range(count):
        found |= all_fp8(f"model.layers.3.mlp.experts.{expert}.", sizes)
    return found


def mixtral() -> Tensors:
    at = "model.layers.0.block_sparse_moe.experts"
    names = [f"{at}.{expert}" for expert in range(8)]
    return wide(" ".join(f"{name}.w1 14336x4096 {name}.w3 14336x4096 {name}.w2 4096x14336" for name in names))


def row_scales(text: str) -> Tensors:
    """FP8 weights with a scale for each row."""
    scales = {f"{name}.weight_scale": ("F32", (n, 1)) for name, (n, _) in sized(text).items()}
    return wide(text, "F8_E4M3") | scales  # type: ignore[return-value]


def stack(dtype: str, text: str, at: str = "model.layers.0.mlp.experts.") -> Tensors:
    """Tensors that hold all experts."""
    return {f"{at}{name}": (dtype, size) for name, size in sized(text).items()}


ATTENTION = "model.layers.3.self_attn."
DEEPSEEK = all_fp8(
    "model.layers.3.",
    "self_attn.q_a_proj 1536x7168 self_attn.kv_a_proj_with_mqa 576x7168 self_attn.q_b_proj 24576x1536 "
    "self_attn.kv_b_proj 32768x512 self_attn.o_proj 7168x16384 self_attn.indexer.wq_b 8192x1536 "
    "self_attn.indexer.wk 128x7168 mlp.experts.0.gate_proj 2048x7168 mlp.experts.1.gate_proj 2048x7168 "
    "mlp.shared_experts.down_proj 7168x2048",
) | wide(f"{ATTENTION}indexer.weights_proj 64x7168 model.layers.3.mlp.gate 256x7168")
LINEAR = all_fp8("m.layers.0.linear_attn.", "in_proj_qkv 8192x4096 in_proj_z 4096x4096 out_proj 4096x4096")
LINEAR |= wide("m.layers.0.linear_attn.in_proj_b 32x4096 m.layers.0.linear_attn.in_proj_a 32x4096")
LINEAR |= wide("m.layers.0.linear_attn.conv1d 8192x1x4") | {"m.layers.0.linear_attn.A_log": ("F32", (32,))}
QKV_ROWS = row_scales("a.q_proj 192x256 a.k_proj 64x256 a.v_proj 64x256")
GPT_OSS_STACK = stack("BF16", "gate_up_proj 32x2880x5760 gate_up_proj_bias 32x5760 down_proj 32x2880x2880")
GPT_OSS_STACK |= stack("BF16", "down_proj_bias 32x2880")
GPT_OSS_SIZES = "experts.gate_up_proj 32x5760x2880 experts.down_proj 32x2880x2880"
STEP3 = wide("s.layers.4.moe.gate_proj 48x5120x7168 s.layers.4.moe.up_proj 48x5120x7168 "
             "s.layers.4.moe.down_proj 48x7168x5120")  # fmt: skip
STEP3_CONFIG = {
    "model_type": "step3v",
    "text_config": {"hidden_size": 7168, "num_attention_heads": 64, "head_dim": 256},
}
STEP3_SIZES = "moe.gate_up_proj 48x10240x7168 moe.down_proj 48x7168x5120"
QWEN_UP, QWEN_DOWN = "gate_up_proj 128x1536x2048", "down_proj.weight 128x2048x768"
NOT_MULTIPLIED = wide("m.layers.0.self_attn.o_proj 512x512 m.layers.0.linear_attn.conv1d 8192x1x4")
NOT_MULTIPLIED |= wide("m.visual.patch_embed.proj 1152x3x2x16x16 m.visual.pos_embed 1x2304x1152")
NOT_MULTIPLIED |= {"m.layers.0.mlp.experts.e_score_correction_bias": ("F32", (8, 64))}
TABLES = fp8("m.embed_tokens", 2048, 256) | wide("m.pos_embeddings 8x256", "F8_E4M3")
E8M0 = "experts.gate_up_proj {0}x{1}x7168 experts.down_proj {0}x7168x{2}"
# fmt: off
SERVED: dict[str, tuple[Tensors, Any, int, int, str, set[str]]] = {
    "joined and listed once": (CHECKPOINT, None, 1, 1, JOINED, {FP8}),
    "heads of the config": (CHECKPOINT, QWEN3, 8, 1, ("qkv_proj 768x2048 o_proj 2048x512 mlp.gate_up_proj 1536x2048 "
                                                      "mlp.down_proj 2048x768"), {FP8}),
    "more GPUs than heads": (CHECKPOINT, QWEN3, 16, 1, ("qkv_proj 512x2048 o_proj 2048x256 "
                                                        "mlp.gate_up_proj 768x2048 mlp.down_proj 2048x384"), {FP8}),
    "v3.2": (DEEPSEEK, None, 1, 1, ("qkv_a_proj 2112x7168 kv_a_proj 576x7168 q_b_proj 24576x1536 kv_b_proj 32768x512 "
                                    "o_proj 7168x16384 indexer.wq_b 8192x1536 indexer.wk 128x7168 "
                                    "shared_expert.down_proj 7168x2048 experts.gate_proj 2x2048x7168"),
             {FP8, *GROUPED[FP8]}),
    "linear attention": (LINEAR, None, 1, 1, "linear_attn.in_proj_qkvz 12288x4096 linear_attn.out_proj 4096x4096",
                         {FP8}),
    "parts of rows are no blocks": (QKV_ROWS, None, 2, 1, "a.qkv_proj 160x256", {ROWWISE}),
    **{f"{dtype} as stored": (stored(dtype), QWEN3, 2, 1, ("qkv_proj 3072x2048 o_proj 2048x2048 "
                                                           "mlp.gate_up_proj 6144x2048 mlp.down_proj 2048x3072"), {op})
       for dtype, op in (("BF16", BF16), ("F16", FP16))},
    "experts": (deepseek(16), None, 8, 8, E8M0.format(2, 4096, 2048), set(GROUPED[FP8])),
    "as many as the config says": (deepseek(16), DEEPSEEK_V3, 8, 8, E8M0.format(32, 4096, 2048), set(GROUPED[FP8])),
    "split experts": (deepseek(16), DEEPSEEK_V3, 16, 2, E8M0.format(128, 512, 256), set(GROUPED[FP8])),
    "mixtral": (mixtral(), MIXTRAL, 2, 1, "experts.w13 8x14336x4096 experts.w2 8x4096x7168", set(GROUPED[BF16])),
    "a stack": (stack("BF16", f"{QWEN_UP} {QWEN_DOWN} gate_up_proj_bias 128x1536"), QWEN3_MOE, 4, 2,
                "experts.gate_up_proj 64x768x2048 experts.down_proj 64x2048x384", set(GROUPED[BF16])),
    "a transposed stack": (stack("BF16", "gate_up_proj 128x2048x1536 down_proj.weight 128x768x2048"), QWEN3_MOE, 4, 2,
                           "experts.gate_up_proj 64x768x2048 experts.down_proj 64x2048x384", set(GROUPED[BF16])),
    "a stack with blocks": (
        stack("F8_E4M3", f"{QWEN_UP} {QWEN_DOWN}")
        | stack("F32", "gate_up_proj_scale_inv 128x12x16 down_proj.weight_scale_inv 128x16x6"), QWEN3_MOE, 1, 1,
        "experts.gate_up_proj 128x1536x2048 experts.down_proj 128x2048x768", set(GROUPED[FP8])),
    # gpt-oss keeps K x N, with K = N of the other; its weights tell so, whether its config is known or not.
    **{f"which way {index}": (GPT_OSS_STACK, config, 1, 1, GPT_OSS_SIZES, set(GROUPED[BF16]))
       for index, config in enumerate((GPT_OSS, GPT_OSS | {"model_type": "new"}, None))},
    "which way, by a table": (STEP3 | wide("m.embed_tokens 1000x7168"), None, 1, 1, STEP3_SIZES, set(GROUPED[BF16])),
    "which way, by a config": (STEP3, STEP3_CONFIG, 1, 1, STEP3_SIZES, set(GROUPED[BF16])),
    # A scale for each weight that a matrix is made of, which rows can have.
    "a scale for each part": (
        wide("a.qkv_proj 768x256 a.gate_up_proj 1024x256", "F8_E4M3")
        | {"a.qkv_proj.weight_scale": ("F32", (3,)), "a.gate_up_proj.weight_scale": ("F32", (2, 1))}, None, 2, 1,
        "a.qkv_proj 384x256 a.gate_up_proj 512x256", {ROWWISE}),
    # What is looked up is multiplied by nothing, and of heads each GPU has some rows.
    "a vocabulary": (TABLES | fp8("lm_head", 2048, 256), None, 8, 1, "lm_head 256x256", {FP8}),
    "a vocabulary in rows": (TABLES | row_scales("lm_head 1000x256 head 1000x256"), None, 8, 1,
                             "lm_head 125x256 head 125x256", {ROWWISE}),
    "a padded vocabulary": (TABLES | row_scales("lm_head 1001x256"), None, 8, 1, "lm_head 128x256", {ROWWISE}),
    "not multiplied": (NOT_MULTIPLIED, None, 1, 1, "o_proj 512x512", {BF16}),
}
PROBLEMS: dict[str, tuple[Tensors, Any, int, list[str]]] = {
    "a block on two GPUs": (CHECKPOINT, QWEN3, 32, ["^mlp.gate_up_proj ", "^mlp.down_proj "]),
    "an unknown name": (fp8("m.layers.0.mixer.in_proj", 512, 512), None, 2, ["how 2 GPUs share in_proj is not known"]),
    "a stack without a hint": (STEP3, None, 1, ["may be N x K or K x N"] * 2),
    "a transposed stack with blocks": (
        stack("F8_E4M3", "gate_up_proj 128x2048x1536 down_proj.weight 128x768x2048")
        | stack("F32", "gate_up_proj_scale_inv 128x16x12 down_proj.weight_scale_inv 128x6x16"), QWEN3_MOE, 1,
        ["must be N x K"] * 2),
    "bert": (wide("bert.encoder.layer.0.attention.self.query 768x768 bert.encoder.layer.0.intermediate.dense 3072x768 "
                  "bert.embeddings.word_embeddings 30522x768", "F32"), None, 1,
             [r"bert.encoder.layer.\*.attention.self.query(?!.*FP8)", "dense(?!.*FP8)"]),
    "how many": ({name: kept for name, kept in deepseek(16).items() if ".experts.7." not in name}, None, 1,
                 ["^15 of the experts from 0 to 15 are here: a config.json would say how many.$"]),
    "more than there are": (deepseek(16), DEEPSEEK_V3 | {"n_routed_experts": 8}, 1,
                            ["Tensors hold 16 experts, but the model has 8"]),
    **{name: (wide("m.layers.0.self_attn.o_proj 512x512") | {f"model.layers.0.{name}": ("BF16", shape)}, None, 1,
              ["^" + re.escape(f"model.layers.*.{name}".replace(".3.", ".*.")) + ".*no kernel is prepared for it"])
       for name, shape in (("block_sparse_moe.input_linear.weight", (32, 1024, 1536)),
                           ("ffn.experts.mlp.w1", (1024, 512)), ("ffn.experts.mlp.w1.weight", (1024, 512)),
                           ("mlp.experts.wi_0", (8, 1024, 512)), ("mlp.experts.3.wi", (1024, 512)))},
}
SCALES: list[tuple[Tensors, str]] = [
    ({"weight_scale": ("F32", ())}, ROWWISE), ({"weight_scale": ("BF16", (512, 1))}, ROWWISE),
    ({"weight_scale": ("F32", (1, 1)), "input_scale": ("F32", (1,))}, ROWWISE),
    ({"weight_scale": ("F32", (4, 1, 2, 1))}, FP8),
    ({"weight_scale": ("F32", (512,))}, ROWWISE), ({"weight_scale": ("F32", (4, 2))}, FP8),
    ({"scale": ("F8_E8M0", (4, 2))}, FP8), ({"weight_scale": ("F32", (4, 1, 2, 1))}, FP8),
]
E4M3: Tensors = {"a.o_proj.weight": ("F8_E4M3", (512, 256))}
OTHERS: list[tuple[Tensors, str]] = [
    (fp8("a.o_proj", 512, 512, 64), "64 x 64 blocks"), (fp8("a.o_proj", 64, 1024, 32), "32 x 32 blocks"),
    (E4M3 | {"a.o_proj.weight_scale": ("U8", (512, 8))}, "scales are U8"),
    (E4M3 | {"a.o_proj.weight_scale": ("F32", (512, 8))}, "not per 128 x 128"), (E4M3, "no scales"),
    (wide("a.o_proj 512x256", "F8_E5M2"), "F8_E5M2"),
    (fp8("a.o_proj", 512, 512) | {"a.o_proj.input_scale": ("F32", ())}, "activations"),
    ({"a.o_proj.qweight": ("I32", (512, 64)), "a.o_proj.scales": ("F16", (4, 512))}, "4-bit"),
    ({"a.o_proj.weight_packed": ("I32", (512, 64)), "a.o_proj.weight_scale": ("BF16", (512, 4))}, "4-bit"),
]
# fmt: on


@pytest.mark.parametrize("case", SERVED)
def test_layers_by_their_tensors(tmp_path: Path, case: str) -> None:
    tensors, config, tp, ep, wanted, operations = SERVED[case]
    found = plan(tmp_path, tensors, config, tp, ep)
    assert (found.problems, served(found), runs(found)) == ((), sized(wanted), operations)
    assert len(found.served) == sum(len(FORMS) if len(size) == 3 else 1 for size in served(found).values()), "each once"
    if case.endswith("as stored"):
        assert why_not(found)["lm_head"] == LM_HEAD
        assert runs(workload.plan(tmp_path, op=FP8)) == {FP8}
    if case == "as many as the config says":
        assert of_experts(found) == of_experts(model.plan(DEEPSEEK_V3, 8, 8))


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_weights_that_say_no_operation_are_a_problem(tmp_path: Path, dtype: str) -> None:
    """They were taken for weights that are cast to FP8 when they are loaded, without a word."""
    (problem,) = plan(tmp_path, stored(dtype), QWEN3).problems
    assert "neither FP8 nor of 16 bits, so which operation its layers run is not known. Give it as op" in problem
    for op in (FP8, BF16):
        found = workload.plan(tmp_path, op=op)
        assert (served(found), runs(found), found.problems) == (sized(JOINED), {op}, ())


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_is_not_known_or_does_not_fit_is_a_problem(tmp_path: Path, case: str) -> None:
    tensors, config, tp, wanted = PROBLEMS[case]
    found = plan(tmp_path, tensors, config, tp)
    assert len(found.problems) == len(wanted), found.problems
    assert all(re.search(*pair) for pair in zip(wanted, found.problems, strict=True)), found.problems


@pytest.mark.parametrize(("tensors", "words"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_other_formats_are_not_served(tmp_path: Path, tensors: Tensors, words: str) -> None:
    found = plan(tmp_path, tensors)
    assert served(found) == {}
    assert words in why_not(found)["a.o_proj"]
    assert any(words in problem for problem in found.problems)


@pytest.mark.parametrize(("scale", "op"), SCALES)
def test_scales_of_rows_tensors_and_blocks_are_served(tmp_path: Path, scale: Tensors, op: str) -> None:
    """The names and dtypes are those of compressed-tensors, ModelOpt and DeepSeek-V4."""
    found = plan(tmp_path, E4M3 | {f"a.o_proj.{name}": stored for name, stored in scale.items()})
    assert found.problems == ()
    assert [(layer.n, layer.k, layer.op) for layer in found.served] == [(512, 256, op)]


def test_what_is_not_quantised_stays_with_others(tmp_path: Path) -> None:
    left = {"model.embed_tokens": "it is BF16, not FP8.", "lm_head": "it is BF16, not FP8."}
    assert why_not(plan(tmp_path, CHECKPOINT)) == left
    assert served(workload.plan(str(tmp_path / "model.safetensors"))) == sized(JOINED)
    mixed = CHECKPOINT | wide("model.layers.0.self_attn.o_proj 2048x4096")
    del mixed["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    found = plan(tmp_path, mixed)
    assert runs(found) == {FP8}
    assert {layer.why_not for layer in found.layers if layer.name == "o_proj"} == {"", "it is BF16, not FP8."}
    with pytest.raises(InvalidInputError, match="multiple of tp"):
        plan(tmp_path, CHECKPOINT, QWEN3, 3)


def test_a_model_of_16_bits_has_no_layer_that_stays_in_16_bits(tmp_path: Path) -> None:
    """What engines leave in BF16 when they cast a model to FP8 is a layer like others in a model of BF16."""
    at = "model.layers.0"
    tensors = wide(f"mtp.fc 2048x4096 model.layers.92.eh_proj 2048x4096 {at}.linear_attn.in_proj_ba 64x2048 "
                   f"{at}.self_attn.o_proj 2048x4096 {at}.mlp.gate 512x2048 lm_head 32000x2048")  # fmt: skip
    found = plan(tmp_path, tensors)
    assert (found.problems, runs(found)) == ((), {BF16})
    assert set(served(found)) == {"mtp.fc", "model.layers.*.eh_proj", "linear_attn.in_proj_ba", "o_proj"}
    assert not [why for why in why_not(found).values() if "FP8" in why]
    cast = workload.plan(tmp_path, op=FP8)
    assert (cast.problems, set(served(cast)), why_not(cast)["mtp.fc"]) == ((), {"o_proj"}, "it stays in BF16.")


def test_experts_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="ep must divide the model's 16 routed experts, but it is 3"):
        plan(tmp_path, deepseek(16), None, 1, 3)
    at = "model.layers.0.mlp.experts.0.down_proj"
    for tensors, words in (
        (fp8(at, 2048, 768, 64), "its scales are of 64 x 64 blocks, not of 128 x 128."),
        (wide(f"{at} 2048x768") | fp8("model.layers.0.o_proj", 256, 256), "it is BF16, not FP8."),
        (wide(f"{at} 2048x768", "F16"), "experts run in FP8 or bfloat16, and fp16_gemm_nt has no form"),
        (stack("F8_E4M3", QWEN_UP), "it has no scales."),
    ):
        assert all(words in layer.why_not for layer in of_experts(plan(tmp_path, tensors, None)))
        assert of_experts(workload.plan(tmp_path))
    tensors = stack("U8", "gate_up_proj_blocks 32x5760x90x16 gate_up_proj_scales 32x5760x90")
    tensors |= stack("U8", "down_proj_blocks 32x2880x90x16 down_proj_scales 32x2880x90")
    tensors |= wide("model.layers.0.self_attn.o_proj 2880x4096")
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    found = plan(tmp_path, tensors, GPT_OSS | {"quantization_config": mxfp4})
    assert {(layer.name, layer.op, layer.n, layer.k) for layer in found.served} == {
        (f"experts.{name}", op, n, 2880)
        for name, n in (("gate_up_proj", 5760), ("down_proj", 2880))
        for op in layers.FP4_GROUPED[layers.BF16_FP4]
    }
    assert [layer.why_not for layer in found.layers if layer.name == "o_proj"] == ["it stays in BF16."]
    assert not found.problems
    by_config = model.plan(GPT_OSS | {"quantization_config": mxfp4})
    assert {x for x in by_config.served if x.groups > 1} == {x for x in found.served if x.groups > 1}
    assert {x.name for x in by_config.layers if x.why_not} == {"qkv_proj", "o_proj"}
    split = model.plan(GPT_OSS | {"quantization_config": mxfp4}, 8)
    assert all("is 360, no multiple of 32" in x.why_not for x in split.layers if x.name == "experts.down_proj")


@pytest.mark.parametrize("number", ["65536", "10000000000", "9" * 5000])
def test_an_expert_with_a_number_that_no_model_has(tmp_path: Path, number: str) -> None:
    with pytest.raises(InvalidInputError, match="experts are numbered from 0 to 65535") as refused:
        plan(tmp_path, fp8(f"model.layers.0.mlp.experts.{number}.down_proj", 256, 256))
    assert len(str(refused.value)) < 300
    many = stack("BF16", f"down_proj {int(number[:10]) + 1}x256x256")
    with pytest.raises(InvalidInputError, match="65536 are the most"):
        plan(tmp_path, many | wide("model.embed_tokens 8x256"))


# ---- files


def test_an_index_and_its_files(tmp_path: Path) -> None:
    names = {name: f"model-0000{1 + name.startswith('model.layers.1')}-of-00002.safetensors" for name in CHECKPOINT}
    for file in set(names.values()):
        write(tmp_path / file, {name: CHECKPOINT[name] for name, place in names.items() if place == file})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert served(workload.plan(tmp_path)) == served(workload.plan(index)) == sized(JOINED)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        workload.plan(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors", {})
    with pytest.raises(InvalidInputError, match=r"lists .* tensors that no file has"):
        workload.plan(tmp_path)


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("other", ["consolidated", "consolidated-00001-of-00001", "adapter_model", "optimizer"])
def test_files_beside_those_of_the_model_are_no_part_of_it(tmp_path: Path, other: str, index: bool) -> None:
    write(tmp_path / "model-00001-of-00001.safetensors", stored("BF16"))
    write(tmp_path / f"{other}.safetensors", wide("layers.0.attention.wq 4096x2048 layers.0.feed_forward.w9 64x64"))
    for name in ("model", other) if index else ():
        listed = {
            "weight_map": dict.fromkeys(headers.header(tmp_path / f"{other}.safetensors"), f"{other}.safetensors")
        }
        if name == "model":
            listed = {"weight_map": dict.fromkeys(stored("BF16"), "model-00001-of-00001.safetensors")}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(listed))
    found = workload.plan(tmp_path)
    assert (found.problems, served(found)) == ((), sized(JOINED))
    alone = workload.plan(tmp_path / f"{other}.safetensors")
    assert {layer.name.rpartition(".")[2] for layer in alone.layers} == {"wq", "w9"}


def test_an_index_alone_is_held_against_the_config(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"

    def listed(tensors: Tensors) -> None:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))

    listed(CHECKPOINT)
    with pytest.raises(InvalidInputError, match=r"no config\.json"):
        workload.plan(tmp_path)
    for dtype, op in (("float16", FP16), ("bfloat16", BF16)):
        (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"torch_dtype": dtype}))
        found = workload.plan(tmp_path)
        assert (served(found), found.problems, runs(found)) == (sized(JOINED), (), {op})
        assert runs(workload.plan(tmp_path, op=FP8)) == {FP8}
    listed(CHECKPOINT | fp8("model.layers.0.self_attn.indexer.wk", 128, 2048))
    assert "model.layers.*.self_attn.indexer.wk is in the index" in workload.plan(tmp_path).problems[0]


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 7, "sub/model.safetensors", "model.bin", None])
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, file: Any) -> None:
    (tmp_path / "a.safetensors.index.json").write_text(json.dumps({"weight_map": {"x.weight": file}}))
    with pytest.raises(InvalidInputError, match=r"must name \*\.safetensors"):
        workload.plan(tmp_path)


def test_a_directory_with_a_config_alone_or_with_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="holds neither"):
        workload.plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert served(workload.plan(tmp_path)) == sized(JOINED)


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


DAMAGED = [b"", b"\x02\0\0", header(b"{}")[:-1], (2**63).to_bytes(8, "little") + b"{}"]
DAMAGED += map(header, (b"[]", b"{", b"[" * 100000, b'{"a": {"dtype": 7, "shape": []}}', b'{"a": 7}'))
for size in (b"NaN", b"-1", b"1e400", b"9" * 5000):
    DAMAGED.append(header(b'{"a": {"dtype": "F32", "shape": [' + size + b"]}}"))


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: repr(data[:40]))
def test_a_damaged_header_is_refused_in_one_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError) as refused:
        headers.header(path)
    assert len(str(refused.value)) < 700


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=64) | st.binary(max_size=64).map(header))
def test_any_bytes_are_a_plan_or_a_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(InvalidInputError):
        workload.plan(path)
