"""Layers of checkpoints, from headers of safetensors that this file writes: no tensor has any data."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deep_gemm.aot import headers, workload
from deep_gemm.aot.layers import FP8, ROWWISE, Plan
from deep_gemm.errors import InvalidInputError

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write(path: Path, tensors: Tensors) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def fp8(name: str, n: int, k: int, block: int = 128) -> Tensors:
    scales = (-(-n // block), -(-k // block))
    return {f"{name}.weight": ("F8_E4M3", (n, k)), f"{name}.weight_scale_inv": ("F32", scales)}


def decoder(layer: int) -> Tensors:
    """A layer with 32 heads of queries and 8 of keys, 128 wide."""
    at = f"model.layers.{layer}"
    return (
        fp8(f"{at}.self_attn.q_proj", 4096, 2048)
        | fp8(f"{at}.self_attn.k_proj", 1024, 2048)
        | fp8(f"{at}.self_attn.v_proj", 1024, 2048)
        | fp8(f"{at}.self_attn.o_proj", 2048, 4096)
        | fp8(f"{at}.mlp.gate_proj", 6144, 2048)
        | fp8(f"{at}.mlp.up_proj", 6144, 2048)
        | fp8(f"{at}.mlp.down_proj", 2048, 6144)
        | {f"{at}.input_layernorm.weight": ("BF16", (2048,))}
    )


MODEL = (
    decoder(0)
    | decoder(1)
    | {
        "model.embed_tokens.weight": ("BF16", (32000, 2048)),
        "lm_head.weight": ("BF16", (32000, 2048)),
        "model.norm.weight": ("BF16", (2048,)),
    }
)
CONFIG = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32}
CONFIG |= {"num_key_value_heads": 8, "head_dim": 128}
JOINED = {
    "qkv_proj": (6144, 2048),
    "o_proj": (2048, 4096),
    "mlp.gate_up_proj": (12288, 2048),
    "mlp.down_proj": (2048, 6144),
}


def served(plan: Plan) -> dict[str, tuple[int, int]]:
    return {layer.name: (layer.n, layer.k) for layer in plan.served}


def why_not(plan: Plan) -> dict[str, str]:
    return {layer.name: layer.why_not for layer in plan.layers if layer.why_not}


def plan(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, tp: int = 1) -> Plan:
    write(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return workload.plan(folder, tp)


def test_weights_are_joined_and_listed_once(tmp_path: Path) -> None:
    found = plan(tmp_path, MODEL)
    assert found.problems == ()
    assert served(found) == JOINED
    assert why_not(found) == {"model.embed_tokens": "it is BF16, not FP8.", "lm_head": "it is BF16, not FP8."}
    assert served(workload.plan(str(tmp_path / "model.safetensors"))) == JOINED


def test_heads_of_the_config_say_how_gpus_share(tmp_path: Path) -> None:
    assert served(plan(tmp_path, MODEL, CONFIG, 8)) == {
        "qkv_proj": (768, 2048),
        "o_proj": (2048, 512),
        "mlp.gate_up_proj": (1536, 2048),
        "mlp.down_proj": (2048, 768),
    }
    found = plan(tmp_path, MODEL, CONFIG, 16)
    assert served(found) == {"qkv_proj": (512, 2048), "o_proj": (2048, 256), "mlp.gate_up_proj": (768, 2048),
                             "mlp.down_proj": (2048, 384)}  # fmt: skip
    broken = [problem.split(" ")[0] for problem in plan(tmp_path, MODEL, CONFIG, 32).problems]
    assert broken == ["mlp.gate_up_proj", "mlp.down_proj"]
    with pytest.raises(InvalidInputError, match="multiple of tp"):
        plan(tmp_path, MODEL, CONFIG, 3)


def test_deepseek_v32_by_its_tensors(tmp_path: Path) -> None:
    at = "model.layers.3"
    tensors = (
        fp8(f"{at}.self_attn.q_a_proj", 1536, 7168)
        | fp8(f"{at}.self_attn.kv_a_proj_with_mqa", 576, 7168)
        | fp8(f"{at}.self_attn.q_b_proj", 24576, 1536)
        | fp8(f"{at}.self_attn.kv_b_proj", 32768, 512)
        | fp8(f"{at}.self_attn.o_proj", 7168, 16384)
        | fp8(f"{at}.self_attn.indexer.wq_b", 8192, 1536)
        | fp8(f"{at}.self_attn.indexer.wk", 128, 7168)
        | {f"{at}.self_attn.indexer.weights_proj.weight": ("BF16", (64, 7168))}
        | {f"{at}.mlp.gate.weight": ("BF16", (256, 7168))}
        | fp8(f"{at}.mlp.experts.0.gate_proj", 2048, 7168)
        | fp8(f"{at}.mlp.experts.1.gate_proj", 2048, 7168)
        | fp8(f"{at}.mlp.shared_experts.down_proj", 7168, 2048)
    )
    found = plan(tmp_path, tensors)
    assert found.problems == ()
    assert served(found) == {
        "qkv_a_proj": (2112, 7168),
        "kv_a_proj": (576, 7168),
        "q_b_proj": (24576, 1536),
        "kv_b_proj": (32768, 512),
        "o_proj": (7168, 16384),
        "indexer.wq_b": (8192, 1536),
        "indexer.wk": (128, 7168),
        "shared_expert.down_proj": (7168, 2048),
        "experts.gate_proj": (2048, 7168),
    }


def test_linear_attention_of_qwen3_5(tmp_path: Path) -> None:
    at = "model.language_model.layers.0.linear_attn"
    tensors = (
        fp8(f"{at}.in_proj_qkv", 2 * 2048 + 4096, 4096)
        | fp8(f"{at}.in_proj_z", 4096, 4096)
        | {f"{at}.in_proj_b.weight": ("BF16", (32, 4096)), f"{at}.in_proj_a.weight": ("BF16", (32, 4096))}
        | {f"{at}.conv1d.weight": ("BF16", (8192, 1, 4)), f"{at}.A_log": ("F32", (32,))}
        | fp8(f"{at}.out_proj", 4096, 4096)
    )
    found = plan(tmp_path, tensors)
    assert found.problems == ()
    assert served(found) == {"linear_attn.in_proj_qkvz": (12288, 4096), "linear_attn.out_proj": (4096, 4096)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (fp8("a.o_proj", 512, 512, 64), "64 x 64 blocks"),
        ({"a.o_proj.weight": ("F8_E4M3", (512, 256)), "a.o_proj.weight_scale": ("U8", (512, 8))}, "scales are U8"),
        ({"a.o_proj.weight": ("F8_E4M3", (512, 256)), "a.o_proj.weight_scale": ("F32", (512, 8))}, "not per 128 x 128"),
        ({"a.o_proj.weight": ("F8_E4M3", (512, 256))}, "no scales"),
        ({"a.o_proj.weight": ("F8_E5M2", (512, 256))}, "F8_E5M2"),
        (fp8("a.o_proj", 512, 512) | {"a.o_proj.input_scale": ("F32", ())}, "activations"),
        ({"a.o_proj.qweight": ("I32", (512, 64)), "a.o_proj.scales": ("F16", (4, 512))}, "4-bit"),
        ({"a.o_proj.weight_packed": ("I32", (512, 64)), "a.o_proj.weight_scale": ("BF16", (512, 4))}, "4-bit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_formats_are_not_served(tmp_path: Path, tensors: Tensors, words: str) -> None:
    found = plan(tmp_path, tensors)
    assert served(found) == {}
    assert words in why_not(found)["a.o_proj"]
    assert any(words in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("scale", "op"),
    [
        ({"weight_scale": ("F32", ())}, ROWWISE),
        ({"weight_scale": ("F32", (1, 1)), "input_scale": ("F32", (1,))}, ROWWISE),
        ({"weight_scale": ("BF16", (512, 1))}, ROWWISE),
        ({"weight_scale": ("F32", (512,))}, ROWWISE),
        ({"weight_scale": ("F32", (4, 2))}, FP8),
        ({"scale": ("F8_E8M0", (4, 2))}, FP8),
    ],
)
def test_scales_of_rows_tensors_and_blocks_are_served(
    tmp_path: Path, scale: dict[str, tuple[str, tuple[int, ...]]], op: str
) -> None:
    """The names and dtypes are those of compressed-tensors, ModelOpt and DeepSeek-V4."""
    tensors: Tensors = {"a.o_proj.weight": ("F8_E4M3", (512, 256))}
    tensors |= {f"a.o_proj.{name}": stored for name, stored in scale.items()}
    found = plan(tmp_path, tensors)
    assert found.problems == ()
    assert [(layer.n, layer.k, layer.op) for layer in found.served] == [(512, 256, op)]


def test_a_part_of_a_matrix_with_scales_of_rows_need_not_end_with_a_block(tmp_path: Path) -> None:
    """Two GPUs share a matrix of 192 rows; q, k and v are joined though 96 rows are no whole block."""
    tensors: Tensors = {}
    for name, n in (("q_proj", 192), ("k_proj", 64), ("v_proj", 64)):
        tensors[f"a.{name}.weight"] = ("F8_E4M3", (n, 256))
        tensors[f"a.{name}.weight_scale"] = ("F32", (n, 1))
    found = plan(tmp_path, tensors, None, 2)
    assert found.problems == ()
    assert served(found) == {"a.qkv_proj": (160, 256)}


def wide(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> Tensors:
    return {f"{name}.weight": (dtype, shape) for name, shape in shapes.items()}


def test_a_model_of_16_bits_has_no_layer_that_stays_in_16_bits(tmp_path: Path) -> None:
    """What engines leave in BF16 when they cast a model to FP8 is a layer like others in a model of BF16."""
    tensors = wide(
        {
            "mtp.fc": (2048, 4096),
            "model.layers.92.eh_proj": (2048, 4096),
            "model.layers.0.linear_attn.in_proj_ba": (64, 2048),
            "model.layers.0.self_attn.o_proj": (2048, 4096),
            "model.layers.0.mlp.gate": (512, 2048),
            "lm_head": (32000, 2048),
        }
    )
    found = plan(tmp_path, tensors)
    assert found.problems == ()
    assert set(served(found)) == {"mtp.fc", "model.layers.*.eh_proj", "linear_attn.in_proj_ba", "o_proj"}
    assert {layer.op for layer in found.served} == {"bf16_gemm_nt"}
    assert not [why for why in why_not(found).values() if "FP8" in why]
    cast = workload.plan(tmp_path, op="fp8_gemm_nt")
    assert cast.problems == ()
    assert set(served(cast)) == {"o_proj"}
    assert why_not(cast)["mtp.fc"] == "it stays in BF16."


def test_a_model_of_bfloat16_is_taken_as_cast_when_loaded(tmp_path: Path) -> None:
    wide = {name: ("BF16", shape) for name, (_, shape) in MODEL.items() if not name.endswith("scale_inv")}
    assert served(plan(tmp_path, wide)) == JOINED


def test_bert_has_weights_that_nobody_casts(tmp_path: Path) -> None:
    tensors: Tensors = {"bert.embeddings.word_embeddings.weight": ("F32", (30522, 768))}
    for name, shape in (("attention.self.query", (768, 768)), ("intermediate.dense", (3072, 768))):
        tensors[f"bert.encoder.layer.0.{name}.weight"] = ("F32", shape)
    found = plan(tmp_path, tensors)
    assert served(found) == {}
    assert len(found.problems) == 2
    assert "bert.encoder.layer.*.attention.self.query" in " ".join(found.problems)
    assert "FP8" not in " ".join(found.problems), "there is none in this model"


def test_how_gpus_share_a_weight_with_an_unknown_name_is_not_guessed(tmp_path: Path) -> None:
    strange = fp8("model.layers.0.mixer.in_proj", 512, 512)
    assert served(plan(tmp_path, strange)) == {"mixer.in_proj": (512, 512)}
    assert "how 2 GPUs share in_proj is not known" in plan(tmp_path, strange, None, 2).problems[0]


def test_an_index_and_its_files(tmp_path: Path) -> None:
    names = {name: f"model-0000{1 + name.startswith('model.layers.1')}-of-00002.safetensors" for name in MODEL}
    for file in set(names.values()):
        write(tmp_path / file, {name: MODEL[name] for name, place in names.items() if place == file})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert served(workload.plan(tmp_path)) == served(workload.plan(index)) == JOINED
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        workload.plan(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors", {})
    with pytest.raises(InvalidInputError, match=r"lists .* tensors that no file has"):
        workload.plan(tmp_path)


def test_an_index_alone_is_held_against_the_config(tmp_path: Path) -> None:
    extra = MODEL | fp8("model.layers.0.self_attn.indexer.wk", 128, 2048)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(MODEL, "model-00001-of-00001.safetensors")}))
    with pytest.raises(InvalidInputError, match=r"no config\.json"):
        workload.plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert served(workload.plan(tmp_path)) == JOINED
    assert workload.plan(tmp_path).problems == ()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(extra, "model-00001-of-00001.safetensors")}))
    assert "model.layers.*.self_attn.indexer.wk is in the index" in workload.plan(tmp_path).problems[0]


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 7, "sub/model.safetensors", "model.bin", None])
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, file: Any) -> None:
    (tmp_path / "a.safetensors.index.json").write_text(json.dumps({"weight_map": {"x.weight": file}}))
    with pytest.raises(InvalidInputError, match=r"must name \*\.safetensors"):
        workload.plan(tmp_path)


def test_a_directory_with_a_config_alone_or_with_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="holds neither"):
        workload.plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert served(workload.plan(tmp_path)) == JOINED


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02\0\0",
        header(b"{}")[:-1],
        (2**63).to_bytes(8, "little") + b"{}",
        header(b"[]"),
        header(b"{"),
        header(b"[" * 100000),
        header(b'{"a": {"dtype": "F32", "shape": [NaN]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [-1]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [1e400]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"),
        header(b'{"a": {"dtype": 7, "shape": []}}'),
        header(b'{"a": 7}'),
    ],
)
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
