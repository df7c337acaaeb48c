"""Workloads from every kind of source, and compiling them ahead."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deep_gemm.aot import build, inputs, workload
from deep_gemm.aot.layers import Layer
from deep_gemm.aot.workload import GemmShape
from deep_gemm.errors import CompileError, InvalidInputError, SettingError
from deep_gemm.runtime import engine

DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def sizes(config: dict[str, Any], tp: int = 1) -> dict[str, tuple[int, int]]:
    return {layer.name: (layer.n, layer.k) for layer in workload.plan(config, tp).served}


def test_deepseek_v3() -> None:
    found = sizes(DEEPSEEK_V3)
    assert found == {
        "qkv_a_proj": (2112, 7168),
        "kv_a_proj": (576, 7168),
        "q_b_proj": (24576, 1536),
        "kv_b_proj": (32768, 512),
        "o_proj": (7168, 16384),
        "mlp.gate_up_proj": (36864, 7168),
        "mlp.down_proj": (7168, 18432),
        "shared_expert.gate_up_proj": (4096, 7168),
        "shared_expert.down_proj": (7168, 2048),
        "experts.gate_up_proj": (4096, 7168),
        "experts.down_proj": (7168, 2048),
    }


def test_tensor_parallel_splits_heads_and_intermediate_sizes_only() -> None:
    whole, split = sizes(DEEPSEEK_V3), sizes(DEEPSEEK_V3, 8)
    assert split["qkv_a_proj"] == whole["qkv_a_proj"]
    assert split["q_b_proj"] == (24576 // 8, 1536)
    assert split["o_proj"] == (7168, 16384 // 8)
    assert split["shared_expert.gate_up_proj"] == (4096 // 8, 7168)


def test_grouped_query_attention() -> None:
    assert sizes(LLAMA_8B)["qkv_proj"] == (6144, 4096)
    assert sizes(QWEN3_32B)["o_proj"] == (5120, 8192)
    # 8 key-value heads on 16 GPUs: each holds a copy of one, so 4 query heads and one of each.
    assert sizes(QWEN3_32B, 16)["qkv_proj"] == ((4 + 2) * 128, 5120)


def test_a_nested_text_config_and_a_mixture_without_dense_layers() -> None:
    nested = {"text_config": QWEN3_32B | {"num_experts": 128, "moe_intermediate_size": 1536}}
    assert set(sizes(nested)) == {"qkv_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.parametrize(
    ("config", "tp", "words"),
    [
        ({"hidden_size": 4096}, 1, "num_attention_heads"),
        (LLAMA_8B | {"intermediate_size": "many"}, 1, "intermediate_size"),
        (LLAMA_8B, 3, "multiple of tp"),
        (LLAMA_8B, 0, "tp must be at least 1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_words(config: dict[str, Any], tp: int, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        workload.plan(config, tp)


def test_parse_sizes() -> None:
    assert inputs.parse_sizes("1, 2,64-256:64,2") == [1, 2, 64, 128, 192, 256]
    assert inputs.parse_sizes("3-5") == [3, 4, 5]


@pytest.mark.parametrize("text", ["", "0", "a", "5-3", "1-9:0", "-4", "1,,2"])
def test_parse_sizes_refuses(text: str) -> None:
    with pytest.raises(InvalidInputError, match="Sizes must look like"):
        inputs.parse_sizes(text)


def test_parse_shape() -> None:
    assert workload.shapes_of("64x7168x2048") == [GemmShape(64, 7168, 2048)]
    assert workload.shapes_of("7168x2048", [1, 2]) == [GemmShape(1, 7168, 2048), GemmShape(2, 7168, 2048)]
    for text in ("7168", "1x2x3x4", "ax2x3"):
        with pytest.raises(InvalidInputError, match="MxNxK"):
            workload.parse(text)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(
        json.dumps([{"n": 256, "k": 512, "m": [1, 64], "name": "x"}, {"n": 128, "k": 128}])
    )
    assert workload.shapes_of(tmp_path / "list.json", [7]) == [
        GemmShape(1, 256, 512, "x"),
        GemmShape(64, 256, 512, "x"),
        GemmShape(7, 128, 128),
    ]
    (tmp_path / "shapes.yaml").write_text("m: [1, 2]\nshapes:\n  - {n: 256, k: 512}\n")
    assert workload.shapes_of(tmp_path / "shapes.yaml") == [GemmShape(1, 256, 512), GemmShape(2, 256, 512)]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert len(workload.shapes_of(tmp_path / "config.json", [1, 2])) == 8


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.yaml", "{", "is not YAML"),
        ("a.json", "7", "must hold a list"),
        ("a.json", '[{"n": 1}]', "with n and k"),
        ("a.json", '[{"n": 0, "k": 128}]', "n of shape 0"),
        ("a.json", '[{"n": true, "k": 128}]', "n of shape 0"),
        ("a.json", '{"shapes": [{"n": 8, "k": 128, "m": []}]}', "m of shape 0"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_bad_files_are_refused_in_words(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=words):
        workload.shapes_of(tmp_path / name)


SHAPES = [GemmShape(1, 576, 7168), GemmShape(64, 576, 7168), GemmShape(4096, 7168, 2048)]


def test_choosing_joins_shapes_that_share_a_kernel() -> None:
    work = build.choose([*SHAPES, SHAPES[0]])
    # A shape has one kernel, or one for each GPU model with a calibration; each of them lists the shape once.
    for params, shapes in work.kernels.items():
        assert len(shapes) == len(set(shapes)), params
    assert {shape for shapes in work.kernels.values() for shape in shapes} == set(SHAPES)
    assert any(not shapes for shapes in work.kernels.values()), "the helper kernels come along"
    assert not work.impossible


def test_an_unknown_arch_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="sm_12"):
        build.choose(SHAPES, "sm_12")


@dataclasses.dataclass
class FakeBinary:
    name: str
    layer: str = "compiled"


def test_failures_are_collected_and_the_rest_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def fake(params: Any) -> FakeBinary:
        if params == first:
            raise CompileError("no good", log="line 1")
        built.append(params)
        return FakeBinary(params.kernel)

    first = next(iter(build.choose(SHAPES).kernels))
    monkeypatch.setattr(engine, "build", fake)
    seen: list[tuple[int, int]] = []
    summary = build.precompile(SHAPES, jobs=2, progress=lambda outcome, done, total: seen.append((done, total)))
    total = len(build.choose(SHAPES).kernels)
    assert seen == [(index + 1, total) for index in range(total)]
    assert [outcome.params for outcome in summary.failed] == [first]
    assert isinstance(summary.failed[0].error, CompileError)
    assert summary.count("compiled") == len(built) == total - 1


def test_failures_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(params: Any) -> Any:
        raise CompileError("no good", log="line 1\nline 2")

    monkeypatch.setattr(engine, "build", fail)
    summary = build.precompile(SHAPES, jobs=2)
    count = len(summary.failed)
    assert count == len(summary.outcomes) > 3
    (told,) = (record.getMessage() for record in caplog.records)
    assert told == summary.failures
    assert told.startswith(f"{count} of {count} kernels failed")
    assert summary.failed[0].name in told
    assert "no good" in told
    assert "line" not in told
    assert not build.precompile([]).failures


def test_a_wrong_setting_stops_everything(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "maybe")
    with pytest.raises(SettingError, match="DG_JIT_USE_NVRTC"):
        build.precompile(SHAPES, jobs=2)


def test_nothing_to_do() -> None:
    summary = build.precompile([])
    assert summary.outcomes == ()


def test_a_workload_in_any_form() -> None:
    ms = [1, 64]
    both = [GemmShape(1, 512, 256), GemmShape(64, 512, 256)]
    for what in (
        (512, 256),
        [(512, 256)],
        "512x256",
        ["512x256"],
        {"n": 512, "k": 256},
        [{"n": 512, "k": 256, "groups": 1}],
        [Layer("", 512, 256)],
        [[(512, 256)]],
    ):
        assert workload.shapes_of(what, ms) == both, what
    assert workload.shapes_of(GemmShape(7, 512, 256), ms) == [GemmShape(7, 512, 256)]
    assert workload.shapes_of({"shapes": [{"n": 512, "k": 256}]}, ms) == both
    assert workload.shapes_of({"shapes": [{"n": 512, "k": 256, "m": 3}]}, ms) == [GemmShape(3, 512, 256)]
    assert workload.shapes_of(DEEPSEEK_V3, ms, tp=8, ep=32) == workload.shapes(
        workload.plan(DEEPSEEK_V3, 8, 32).served, ms
    )


def test_a_workload_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text('[{"n": 512, "k": 256, "m": 5}]')
    assert workload.shapes_of(path) == workload.shapes_of(str(path)) == [GemmShape(5, 512, 256)]


@pytest.mark.parametrize("what", [(64, 7168, 2048), [(64, 7168, 2048)], (512, 256, 1), (1, 2, 3, 4)])
def test_numbers_without_names_are_not_guessed(what: Any) -> None:
    """(n, k, groups) once, while "64x7168x2048" is M x N x K."""
    with pytest.raises(
        InvalidInputError, match=r"may be M, N, K or N, K, groups\. Write \"64x7168x2048\" for M x N x K"
    ):
        workload.shapes_of(what)
    assert workload.shapes_of("64x7168x2048") == [GemmShape(64, 7168, 2048)]
    assert {shape.groups for shape in workload.shapes_of({"n": 7168, "k": 2048, "groups": 8}, [1])} == {8}


@pytest.mark.parametrize("what", [None, 5, [3.5], [(0, 5)], {"n": 1}])
def test_what_is_no_workload_is_refused_in_words(what: Any) -> None:
    with pytest.raises(InvalidInputError, match="but it"):
        workload.shapes_of(what)


@pytest.mark.parametrize(
    ("config", "ep", "words"), [(DEEPSEEK_V3, 3, "256 routed experts"), (LLAMA_8B, 2, "without routed")]
)
def test_expert_parallel_degrees_must_fit(config: dict[str, Any], ep: int, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        workload.plan(config, 1, ep)
