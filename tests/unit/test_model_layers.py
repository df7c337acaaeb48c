"""Layers of models from their config.json: sizes by family and degree, operations, formats, and what is left out."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_cases import (
    BERT,
    BLOCKS,
    CHANNEL,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_45,
    LLAMA_8B,
    MINIMAX_M2,
    MIXTRAL,
    PB_WO,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    Config,
    cast,
    groups,
    of_experts,
    precompile,
    quantised,
    runs,
    served,
    sized,
    why_not,
)

import deep_gemm
from deep_gemm.aot import attention_layers, model
from deep_gemm.aot.experts import shares
from deep_gemm.aot.layers import FP8, GROUPED, Layer, LayerPlan
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.runtime import engine

BF16, FP16, ROWWISE = "bf16_gemm_nt", "fp16_gemm_nt", "fp8_gemm_nt_rowwise"
LLAMA = "qkv_proj 6144x4096 o_proj 4096x4096 mlp.gate_up_proj 28672x4096 mlp.down_proj 4096x14336"

GQA = {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64}
GQA |= {"num_key_value_heads": 8, "head_dim": 128}
# fmt: off
SIZES: dict[str, tuple[Config, int, str]] = {
    "llama": (LLAMA_8B, 1, LLAMA), "heads of 64 rows": (LLAMA_8B | {"hidden_size": 2048}, 4, "qkv_proj 768x2048"),
    "a copy of one head": (GQA | {"torch_dtype": "bfloat16"}, 16, "qkv_proj 768x5120"),
    "wide heads": (GQA, 1, "o_proj 5120x8192"),
    "nested, without dense layers": (
        {"text_config": GQA | {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 1536}}, 1,
        "experts.gate_up_proj 128x3072x5120 experts.down_proj 128x5120x1536"),
    "v3": (DEEPSEEK_V3, 8, ("qkv_a_proj 2112x7168 kv_a_proj 576x7168 q_b_proj 3072x1536 kv_b_proj 4096x512 "
                            "o_proj 7168x2048 mlp.gate_up_proj 4608x7168 mlp.down_proj 7168x2304 "
                            "shared_expert.gate_up_proj 512x7168 shared_expert.down_proj 7168x256 "
                            "w_uk 16x512x128 w_uv 16x128x512")),
    "no blocks of scales": (LLAMA_8B | {"torch_dtype": "bfloat16"}, 32, "mlp.gate_up_proj 896x4096"),
    "ragged": (LLAMA_8B | {"num_key_value_heads": 1, "head_dim": 64, "num_attention_heads": 9}, 1, "qkv_proj 704x4096"),
    # Weights with ragged blocks stay apart where they come with scales.
    "ragged blocks": (quantised(LLAMA_8B | {"num_key_value_heads": 1, "head_dim": 64, "num_attention_heads": 9}), 1,
                      "q_proj 576x4096 k_proj 64x4096 v_proj 64x4096"),
    "v3.2": (DEEPSEEK_V32, 8, "indexer.wq_b 8192x1536 indexer.wk 128x7168"),
    "qwen3-next": (QWEN3_NEXT, 1, ("qkv_proj 9216x2048 o_proj 2048x4096 linear_attn.in_proj_qkvz 12288x2048 "
                   "linear_attn.out_proj 2048x4096 shared_expert.gate_up_proj 1024x2048 "
                   "shared_expert.down_proj 2048x512 experts.gate_up_proj 512x1024x2048 "
                   "experts.down_proj 512x2048x512")),
    # Two heads of keys on four GPUs: each has a copy of one. Linear attention is split by heads.
    "qwen3-next on four": (QWEN3_NEXT, 4, ("qkv_proj 2560x2048 linear_attn.in_proj_qkvz 3072x2048 "
                           "linear_attn.out_proj 2048x1024")),
    "qwen3.5": (QWEN3_5, 1, ("qkv_proj 14336x5120 o_proj 5120x6144 linear_attn.in_proj_qkvz 16384x5120 "
                "linear_attn.out_proj 5120x6144 mlp.gate_up_proj 34816x5120 mlp.down_proj 5120x17408")),
}
WHOLE = ("llama", "qwen3-next", "qwen3.5")
OPERATIONS: list[tuple[Config, str]] = [
    ({"torch_dtype": "bfloat16"}, BF16), ({"torch_dtype": "float16"}, FP16), ({"dtype": "bfloat16"}, BF16),
    ({"torch_dtype": "torch.float16"}, FP16), ({"torch_dtype": "bfloat16", "quantization_config": BLOCKS}, FP8),
    *((quantised({}, **asked), ROWWISE) for asked in (
        groups(CHANNEL, ignore=["lm_head"]), groups(CHANNEL | {"weights": {"num_bits": 8, "type": "float"}}),
        groups(CHANNEL | {"weights": CHANNEL["weights"] | {"strategy": "tensor"}}),
        {"quant_method": "fbgemm_fp8"}, {"quant_method": "ptpc_fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        BLOCKS | {"weight_block_size": None}, BLOCKS | {"weight_block_size": None, "activation_scheme": "static"})),
    ({"compression_config": groups(CHANNEL)}, ROWWISE),
    ({"compression_config": {"quantization_config": groups(CHANNEL)}}, ROWWISE),
    *((quantised({}, **PB_WO | {"quant_algo": name}), FP8) for name in ("FP8_PB_WO", "fp8_pb_wo", "FP8_BLOCK_SCALES")),
    ({"torch_dtype": "bfloat16"} | quantised({}, **PB_WO | {"quant_algo": None, "kv_cache_quant_algo": "FP8"}), BF16),
]
ODD = QWEN3_MOE | {"moe_intermediate_size": 770}
REFUSED: list[tuple[Config, int, int, str]] = [
    (LLAMA_8B | {"num_key_value_heads": 5}, 1, 1, "multiple of num_key_value_heads"),
    (LLAMA_8B | {"num_attention_heads": 24}, 1, 1, "multiple of num_attention_heads"),
    (LLAMA_8B | {"layer_types": "full"}, 1, 1, "layer_types"),
    (LLAMA_8B | {"quantization_config": "fp8"}, 1, 1, "quantization_config must be an object"),
    (quantised(LLAMA_8B, **BLOCKS | {"weight_block_size": 128}), 1, 1, "weight_block_size"),
    (quantised(LLAMA_8B, **BLOCKS | {"modules_to_not_convert": "lm_head"}), 1, 1, "modules_to_not_convert"),
    (quantised(LLAMA_8B, **BLOCKS | {"ignored_layers": ["re:("]}), 1, 1, "ignored_layers"),
    *((quantised(LLAMA_8B, **BLOCKS | {"ignored_layers": [f"re:{text}"]}), 1, 1, "ignored_layers.* very long to match")
      for text in ("(.*)*x", "(a|a)+x", "(a{0,9}){9}x", r"(.)\1", ".*" * 5 + "x", "a?" * 30 + "a" * 30)),
    (quantised(LLAMA_8B, quant_method="compressed-tensors"), 1, 1, "config_groups"),
    (LLAMA_8B, 3, 1, "multiple of tp"), (LLAMA_8B, 0, 1, "tp must be at least 1"),
    (LLAMA_8B, 1, 2, "without routed"), (MIXTRAL, 8, 0, "ep must be at least 1"),
    (DEEPSEEK_V3, 1, 3, "^ep must divide the model's 256 routed experts, but it is 3[.]"),
    (MIXTRAL, 1, 16, "^ep must divide the model's 8 routed experts, but it is 16[.]"),
    (MINIMAX_M2 | {"num_local_experts": 24}, 4, 6, "^ep must divide tp or be a multiple of it, but ep is 6"),
    (ODD, 4, 1, "^N of experts.gate_proj must be a multiple of tp, but it is 770 and tp is 4[.] Give an ep"),
    (ODD, 8, 2, "^N of experts.gate_proj must be a multiple of tp / ep, but it is 770 and tp / ep is 4[.]"),
    (MIXTRAL | {"num_experts_per_tok": "two"}, 1, 1, "^num_experts_per_tok of the model's config must be a whole"),
]
EXPERTS: list[tuple[Config, int, int, str, int, str]] = [
    (DEEPSEEK_V3, 1, 1, FP8, 256, "4096x7168 7168x2048"), (DEEPSEEK_V3, 8, 1, FP8, 256, "512x7168 7168x256"),
    (DEEPSEEK_V3, 8, 8, FP8, 32, "4096x7168 7168x2048"), (DEEPSEEK_V3, 8, 4, FP8, 64, "2048x7168 7168x1024"),
    (DEEPSEEK_V3, 1, 32, FP8, 8, "4096x7168 7168x2048"), (QWEN3_MOE, 1, 1, BF16, 128, "1536x2048 2048x768"),
    (QWEN3_MOE, 4, 1, BF16, 128, "384x2048 2048x192"), (QWEN3_MOE, 4, 4, BF16, 32, "1536x2048 2048x768"),
    (MIXTRAL, 2, 1, BF16, 8, "14336x4096 4096x7168"), (MINIMAX_M2, 1, 8, FP8, 32, "3072x3072 3072x1536"),
    (GLM_45, 4, 4, FP8, 40, "3072x5120 5120x1536"), (QWEN3_NEXT, 1, 16, FP8, 32, "1024x2048 2048x512"),
    (quantised(MIXTRAL | {"torch_dtype": "float32"}), 1, 8, FP8, 1, "28672x4096 4096x14336"),
]
# fmt: on


@pytest.mark.parametrize("name", SIZES)
def test_sizes_by_family_and_degree(name: str) -> None:
    config, tp, wanted = SIZES[name]
    found = model.plan(config, tp, op=cast(config))
    assert found.problems == ()
    assert sized(wanted).items() <= served(found).items()
    assert name not in WHOLE or served(found) == sized(wanted)


@pytest.mark.parametrize(("fields", "op"), OPERATIONS)
def test_a_config_says_what_its_layers_run(fields: Config, op: str) -> None:
    found = model.plan(LLAMA_8B | fields)
    assert (served(found), runs(found), found.problems) == (sized(LLAMA), {op}, ())
    # A caller that casts the model when loading it says so; a quantised model keeps its format.
    kept = op if op != BF16 and "config" in str(fields) else ""
    assert runs(model.plan(LLAMA_8B | fields, op=FP8)) == {kept or FP8}
    assert runs(model.plan(LLAMA_8B | fields, op=BF16)) == {kept or BF16}


@pytest.mark.parametrize("fields", [{}, {"torch_dtype": "float32"}, {"torch_dtype": None}, {"dtype": 7}])
def test_a_config_that_says_no_operation_is_a_problem(tmp_path: Path, fields: Config) -> None:
    """It was taken for a model that is cast to FP8 when it is loaded, without a word."""
    config = LLAMA_8B | fields
    (problem,) = model.plan(config).problems
    assert f"its dtype is {fields.get('torch_dtype')!r}, so which operation its layers run is not known" in problem
    assert "--op: fp8_gemm_nt" in problem
    for arguments, status in (((), 3), (("--op", FP8), 0), (("--op", BF16), 0), (("--allow-partial",), 0)):
        result = precompile(tmp_path, config, "--dry-run", *arguments)
        assert result.exit_code == status, result.output
        assert ("is not known. Give it as op" in " ".join(result.output.split())) == ("--op" not in arguments)
    with pytest.raises(UnsupportedError, match="which operation its layers run is not known"):
        deep_gemm.precompile(config)


def test_every_served_layer_names_the_function_that_it_runs(tmp_path: Path) -> None:
    lines = precompile(tmp_path, quantised(LLAMA_8B), "--dry-run").output.splitlines()
    assert [line.split("  ")[-1] for line in lines if "_proj" in line] == ["yes, by fp8_gemm_nt"] * 4


# fmt: off
TRAINED: dict[str, tuple[Config, int, str]] = {
    "bf16": (LLAMA_8B | {"torch_dtype": "bfloat16"}, 3, "training adds no kernel: gradients of bf16_gemm_nt are not"),
    "rows": (quantised(LLAMA_8B, **groups(CHANNEL)), 3, "gradients of fp8_gemm_nt_rowwise are not compiled ahead (qkv"),
    "odd": (quantised(LLAMA_8B | {"intermediate_size": 14344}), 3, "gradient of mlp.gate_proj (14344 x 4096) has no"),
    "experts": (DEEPSEEK_V3, 0, "training gradients of m_grouped_fp8_gemm_nt_contiguous are not compiled ahead"),
    "all": (quantised(LLAMA_8B), 0, ""),
}
# fmt: on


@pytest.mark.parametrize(("config", "status", "words"), TRAINED.values(), ids=TRAINED)
def test_training_says_which_gradients_it_leaves_out(tmp_path: Path, config: Config, status: int, words: str) -> None:
    result = precompile(tmp_path, config, "--dry-run", "--training", "--m", "256")
    text = " ".join(result.output.split())
    assert (result.exit_code, words in text, "training" in text) == (status, True, bool(words)), result.output
    if status:
        with pytest.raises(UnsupportedError, match=r"training adds no kernel|K must be a multiple of 16"):
            deep_gemm.precompile(config, training=True)


def test_the_dtype_may_be_outside_of_the_language_model() -> None:
    assert runs(model.plan({"model_type": "mistral3", "torch_dtype": "bfloat16", "text_config": LLAMA_8B})) == {BF16}


@pytest.mark.parametrize(("config", "tp", "ep", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_words(config: Config, tp: int, ep: int, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        model.plan(config, tp, ep)


FIELDS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "q_lora_rank",
          "kv_lora_rank", "n_shared_experts", "moe_intermediate_size", "n_routed_experts", "first_k_dense_replace",
          "num_hidden_layers", "index_n_heads", "qk_rope_head_dim", "num_nextn_predict_layers")  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_field_is_named(field: str) -> None:
    for value in ("8", "two", -1, 1.5, float("nan"), [8], {}, True, 10**30, 2**31):
        with pytest.raises(InvalidInputError, match=f"{field} of the model's config must be a whole number"):
            model.plan(DEEPSEEK_V32 | {field: value})


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba2", "gpt2", 7, ["llama"]])
def test_a_family_that_is_not_known_gets_no_invented_layers(kind: Any) -> None:
    found = model.plan(BERT | {"model_type": kind})
    assert found.layers == ()
    assert "are not known" in found.problems[0]
    with pytest.raises(UnsupportedError, match="are not known"):
        deep_gemm.precompile(BERT | {"model_type": kind})


@pytest.mark.parametrize("call", [model.plan, deep_gemm.precompile])
@pytest.mark.parametrize("op", ["gemm", GROUPED[FP8][2]])
def test_a_model_runs_dense_operations_that_exist(call: Any, op: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"op must be one of fp8_gemm_nt, .*bf16_gemm_nt.*'{op}'"):
        call(QWEN3_MOE, op=op)


@pytest.mark.parametrize(("heads", "size", "kernels"), [(64, 128, 4), (32, 128, 4), (24, 128, 0), (64, 96, 0)])
def test_an_indexer_needs_kernels_for_prompts_and_pages(heads: int, size: int, kernels: int) -> None:
    layers = model.plan(DEEPSEEK_V32 | {"index_n_heads": heads, "index_head_dim": size}, 8).layers
    assert attention_layers.indexers(layers) == {(heads, size)}
    found = [engine.build_request(params).name for params in attention_layers.kernels_of(layers, SM90)]
    assert len(found) == len(set(found)) == kernels
    if kernels:
        pages = [f"fp8_paged_mqa_logits_h{heads}_d128_f32_q{next_n}" for next_n in (1, 2)]
        assert found == [f"fp8_mqa_logits_h{heads}_d128_f32_q{256 // heads}", *pages, "paged_mqa_logits_metadata"]
    assert attention_layers.kernels_of([], SM90) == []


def test_what_is_not_read_or_strange_is_a_problem() -> None:
    plain = {name: value for name, value in QWEN3_5.items() if name != "quantization_config"}
    (problem,) = model.plan(plain, op=FP8).problems
    assert problem.startswith("vision_config of the model's config is not read")
    strange = model.plan(LLAMA_8B | {"layer_types": ["full_attention", "mamba", "sliding_attention"]}, op=FP8)
    assert "'mamba'" in strange.problems[0]
    assert "qkv_proj" in served(strange)


@pytest.mark.parametrize("field", ["mlp_only_layers", "decoder_sparse_step", "moe_layer_freq"])
def test_a_mixture_may_have_dense_layers_too(field: str) -> None:
    mixture = LLAMA_8B | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 512}
    assert "mlp.down_proj" not in served(model.plan(mixture))
    assert "mlp.down_proj" in served(model.plan(mixture | {field: [0] if field == "mlp_only_layers" else 2}))
    dense = {name: value for name, value in MIXTRAL.items() if "experts" not in name} | {"model_type": "llama"}
    assert of_experts(model.plan(dense)) == []


def test_tensor_parallelism_must_not_split_a_block_of_scales() -> None:
    """1536 / 8 = 192."""
    found = model.plan(GLM_45, 8, op=FP8)
    assert len(found.problems) == 4, "of the experts, too"
    for name, size in (("gate_up_proj", "384 x 5120"), ("down_proj", "5120 x 192")):
        for layer in ("shared_expert", "experts"):
            (problem,) = (problem for problem in found.problems if problem.startswith(f"{layer}.{name} ({size})"))
            assert ("Give an ep (--ep)" in problem) == (layer == "experts")
            assert "on each of 8 GPUs is 192, no multiple of 128" in problem or layer == "shared_expert"
    assert not {name for name in served(found) if "expert" in name}
    assert not model.plan(GLM_45, 4, op=FP8).problems
    assert not {name for name in served(model.plan(GLM_45, 16, 2, op=FP8)) if name.startswith("experts")}
    assert model.plan(LLAMA_8B, 32, op=FP8).problems
    assert "qkv_proj (" in model.plan(LLAMA_8B | {"hidden_size": 2048}, 8, op=FP8).problems[0]
    with pytest.raises(UnsupportedError, match="share the scale of one block"):
        deep_gemm.precompile(GLM_45, tp=8, op=FP8)


def test_what_other_libraries_multiply_is_no_problem(tmp_path: Path) -> None:
    assert set(why_not(model.plan(DEEPSEEK_V32, 8))) == {"indexer.weights_proj", "mtp.eh_proj"}
    result = precompile(tmp_path, DEEPSEEK_V32, "--dry-run")
    assert result.exit_code == 0
    assert "elsewhere: it stays in bfloat16." in result.output
    assert " no: " not in result.output
    all_left = quantised(LLAMA_8B, **BLOCKS | {"modules_to_not_convert": ["self_attn", "mlp"]})
    for arguments in ((), ("--dry-run",)):
        assert precompile(tmp_path, all_left, *arguments).exit_code == 3, "there is nothing to compile"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((GLM_45 | {"num_nextn_predict_layers": 1}, "mtp.eh_proj"), (QWEN3_NEXT, "linear_attn.in_proj_ba")),
        (DEEPSEEK_V32 | {"quantization_config": None}, "mtp.eh_proj"),
    ],
)
def test_a_model_of_16_bits_has_no_layer_that_stays_in_16_bits(config: Config, name: str) -> None:
    in_16_bits, in_fp8 = model.plan(config | {"torch_dtype": "bfloat16"}), model.plan(config, op=FP8)
    assert {layer.op for layer in in_16_bits.served if layer.name == name} == {BF16}
    assert name in {layer.name for layer in in_fp8.layers if layer.elsewhere}
    assert in_fp8.problems == in_16_bits.problems == ()


def ops_of_experts(found: LayerPlan) -> set[str]:
    return {layer.op for layer in of_experts(found) if not layer.why_not}


@pytest.mark.parametrize(("config", "tp", "ep", "op", "groups", "sizes"), EXPERTS)
def test_experts_of_a_config(config: Config, tp: int, ep: int, op: str, groups: int, sizes: str) -> None:
    found = model.plan(config, tp, ep, cast(config))
    assert found.problems == ()
    assert ops_of_experts(found) == set(GROUPED[op])
    names = ("experts.gate_up_proj", "experts.down_proj")
    wanted = [(name, groups, *map(int, size.split("x"))) for name, size in zip(names, sizes.split(), strict=True)]
    assert {(x.name, x.groups, x.n, x.k) for x in of_experts(found)} == set(wanted)


def test_experts_of_another_format() -> None:
    assert ops_of_experts(model.plan(QWEN3_MOE, op=FP8)) == set(GROUPED[FP8])
    assert ops_of_experts(model.plan(DEEPSEEK_V3, op=BF16)) == set(GROUPED[FP8]), "a quantised model keeps its format"
    for op in (FP16, ROWWISE):
        found = model.plan(QWEN3_MOE, op=op)
        said = {layer.why_not for layer in of_experts(found)}
        assert said == {f"experts run in FP8 or bfloat16, and {op} has no form with groups."}
        assert [problem.split(" ")[0] for problem in found.problems] == ["experts.gate_up_proj", "experts.down_proj"]
    left_out = model.plan(quantised(QWEN3_MOE, **BLOCKS | {"modules_to_not_convert": ["experts"]}))
    assert {layer.why_not for layer in of_experts(left_out)} == {"quantization_config leaves it as it is."}
    assert left_out.problems == ()
    awq = of_experts(model.plan(quantised(QWEN3_MOE, quant_method="awq")))
    assert [layer.why_not for layer in awq] == ["its weights are 4-bit integers (AWQ)."] * 2, "each once"


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 40))
def test_every_expert_is_somewhere(log_tp: int, log_ep: int, some: int) -> None:
    tp, ep = 1 << log_tp, 1 << log_ep
    groups, parts = shares(some * ep, tp, ep)
    assert (groups * ep, parts) == (some * ep, max(1, tp // ep))


def test_all_tokens_of_all_gpus_may_go_to_the_experts_of_one() -> None:
    found = of_experts(model.plan(DEEPSEEK_V3, 8, 8))
    # 8 GPUs with 1000 tokens each: each token goes to 8 of the 32 experts here, and each of these begins at 128 rows.
    rows = {layer.op: layer.most_rows(1000) for layer in found}
    assert rows == dict(zip(GROUPED[FP8], (64000 + 33 * 127, 64000 + 33 * 127, 8000), strict=True))
    few = of_experts(model.plan(DEEPSEEK_V3, 1, 64))
    assert {layer.most_rows(1) for layer in few} == {64 * 8 + 5 * 127, 64}, "a token goes to an expert once"
    unknown = of_experts(model.plan(DEEPSEEK_V32, 1, 16))
    assert {layer.most_rows(1) for layer in unknown} == {16 * 16 + 17 * 127, 16}, "it may go to all of them"
    assert ({x.most_rows(2**31 - 1) for x in found}, Layer("", 1, 16).most_rows(1000)) == ({2**31 - 1}, 1000)
