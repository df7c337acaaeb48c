"""Layers of models by their quantization_config: formats, and which layers are quantised; names of layers as text."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from model_cases import (
    BLOCKS,
    CHANNEL,
    GLM_45,
    IN_BLOCKS,
    LLAMA_8B,
    MIXTRAL,
    PB_WO,
    QWEN3_5,
    QWEN3_MOE,
    Config,
    fp8,
    groups,
    of_experts,
    precompile,
    quantised,
    runs,
    served,
    why_not,
    write,
)

import deep_gemm
from deep_gemm.aot import model, workload
from deep_gemm.aot.layers import FP8, ROWWISE
from deep_gemm.cli.app import app
from deep_gemm.errors import UnsupportedError

# fmt: off
NOT_SERVED: list[tuple[Config, str]] = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ"), ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
    (BLOCKS | {"weight_block_size": [64, 64]}, "64 x 64 blocks"),
    (BLOCKS | {"activation_scheme": "static"}, "activations have one scale per tensor"),
    (BLOCKS | {"fmt": "e5m2"}, "not E4M3"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt's 'NVFP4'"),
    (PB_WO | {"group_size": 64}, "64 x 64 blocks"), (PB_WO | {"quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"),
    (groups({"weights": CHANNEL["weights"]}), "its activations are not FP8"),
    (groups({"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}), "of 4 bits"),
    (groups(CHANNEL, IN_BLOCKS), "scales of several kinds"), ({"quant_method": "new"}, "quant_method 'new'"),
]
# fmt: on


@pytest.mark.parametrize(("quantization", "words"), NOT_SERVED, ids=lambda it: it if isinstance(it, str) else "")
def test_other_quantisation_is_not_served(tmp_path: Path, quantization: Config, words: str) -> None:
    config = LLAMA_8B | {"quantization_config": quantization}
    found = model.plan(config)
    assert served(found) == {}
    assert all(words in reason for reason in (*why_not(found).values(), *found.problems))
    assert {problem.split(" ")[0] for problem in found.problems} - {"The"} == set(why_not(found))
    for arguments in ((), ("--dry-run",), ("--allow-partial",), ("--dry-run", "--allow-partial")):
        result = precompile(tmp_path, config, *arguments)
        assert result.exit_code == 3, result.output
        assert words in result.output
        assert "nothing to compile" in result.output
    with pytest.raises(UnsupportedError, match="cannot be served"):
        deep_gemm.precompile(config)


def test_glm_46_in_fp8_is_served_but_for_its_experts(tmp_path: Path) -> None:
    """Published with a scale per channel, which has no form with groups."""
    config = GLM_45 | {"quantization_config": groups(CHANNEL)}
    found = model.plan(config)
    assert {layer.name for layer in found.served} >= {"qkv_proj", "o_proj", "mlp.down_proj", "shared_expert.down_proj"}
    assert {problem.split(" ")[0] for problem in found.problems} == {"experts.gate_up_proj", "experts.down_proj"}
    assert precompile(tmp_path, config, "--dry-run").exit_code == 3
    assert precompile(tmp_path, config, "--dry-run", "--allow-partial").exit_code == 0


# fmt: off
SOME: dict[str, tuple[Config, str]] = {
    "a fused name": (BLOCKS | {"modules_to_not_convert": ["qkv_proj", "model.layers.0.mlp.gate_up_proj",
                                                          "model.layers.1.mlp.gate_up_proj"]}, "o mlp.down"),
    "a wrapped layer": (groups(CHANNEL, ignore=[f"model.layers.{i}.self_attn.o_proj.linear" for i in range(2)]),
                        "qkv mlp.gate_up mlp.down"),
    "a wrapped layer's pattern": (groups(CHANNEL, ignore=[r"re:.*down_proj\.linear$"]), "qkv o mlp.gate_up"),
    "all below": (PB_WO | {"ignore": ["model.layers.*.self_attn.*", "lm_head"]}, "mlp.gate_up mlp.down"),
    "all that begin so": (PB_WO | {"ignore": ["model.layers.0.self_attn*", "model.layers.1.self_attn*"]},
                          "mlp.gate_up mlp.down"),
    "all that hold it": (PB_WO | {"ignore": ["*self_attn*"]}, "mlp.gate_up mlp.down"),
    "the end": (PB_WO | {"ignore": ["*.down_proj"]}, "qkv o mlp.gate_up"),
    "ModelOpt's file": (PB_WO | {"quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["*mlp*"]}}, "qkv o"),
    **{f"in {at}": (BLOCKS | {"ignored_layers": [f"{at}layers.{i}.mlp.{name}_proj" for i in range(2)
                                                 for name in ("gate", "up")]}, "qkv o mlp.down")
       for at in ("model.language_model.", "language_model.model.", "language_model.", "thinker.model.", "")},
    "a whole part": (BLOCKS | {"ignored_layers": ["model.language_model"]}, ""),
    "its pattern": (groups(CHANNEL, ignore=[r"re:^model\.language_model\.layers\.\d+\.mlp\..*"]), "qkv o"),
    "a vision tower": (PB_WO | {"ignore": ["model.visual*", "*vision_tower*", "mtp.*"]}, "qkv o mlp.gate_up mlp.down"),
    "targets": (groups(CHANNEL | {"targets": ["re:.*mlp.*"]}), "mlp.gate_up mlp.down"),
    "a target of engines": (groups(CHANNEL | {"targets": ["re:.*qkv_proj"]}), "qkv"),
    "targets by name": (groups(CHANNEL | {"targets": [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]}), "o"),
    "of another class": (groups(CHANNEL | {"targets": ["Embedding"]}), ""),
    "of the class": (groups(CHANNEL | {"targets": ["Linear"]}), "qkv o mlp.gate_up mlp.down"),
    "listed": (PB_WO | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        f"model.layers.{i}.self_attn.o_proj": {"quant_algo": "FP8"} for i in range(2)}}, "o"),
}
# fmt: on


@pytest.mark.parametrize("case", SOME)
def test_a_config_says_which_layers_are_quantised(case: str) -> None:
    quantization, wanted = SOME[case]
    found = model.plan(LLAMA_8B | {"num_hidden_layers": 2, "quantization_config": quantization})
    assert set(served(found)) == {f"{name}_proj" for name in wanted.split()}
    assert set(why_not(found).values()) <= {"quantization_config leaves it as it is."}
    assert found.problems == ()


def test_layers_may_be_stored_in_several_ways() -> None:
    kinds = [CHANNEL | {"targets": ["re:.*self_attn.*"]}, IN_BLOCKS | {"targets": ["Linear"]}]
    found = model.plan(quantised(LLAMA_8B, **groups(*kinds)))
    assert {layer.name: layer.op for layer in found.served if "mlp" not in layer.name} == dict.fromkeys(
        ("qkv_proj", "o_proj"), ROWWISE
    )
    assert {layer.op for layer in found.served if "mlp" in layer.name} == {FP8}
    first = {f"model.layers.0.mlp.{name}_proj": {"quant_algo": "FP8"} for name in ("gate", "up", "down")}
    rest = {f"model.layers.{i}.mlp": {"quant_algo": "FP8_PB_WO"} for i in (1, 2)}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": first | rest}
    layers = model.plan(LLAMA_8B | {"num_hidden_layers": 4, "quantization_config": mixed}).layers
    told = [layer.op if not layer.why_not else "left" for layer in layers if layer.name == "mlp.down_proj"]
    assert told == [ROWWISE, FP8, "left"]


def test_experts_are_left_out_by_any_of_their_names() -> None:
    for config, names in (
        (MIXTRAL, ["re:.*block_sparse_moe.experts.*w[123]$", "*block_sparse_moe.experts*", "block_sparse_moe.experts"]),
        (QWEN3_MOE, ["re:.*experts.gate_up_proj|.*experts.down_proj", "model.layers.0.mlp.experts*"]),
    ):
        for name in names:
            found = model.plan(quantised(config, **BLOCKS | {"ignored_layers": [name]}))
            assert {layer.why_not for layer in of_experts(found)} == {"quantization_config leaves it as it is."}, name


@pytest.mark.parametrize(
    "entries", [["visual"], ["model.visual*"], ["re:.*visual.*"], ["re:^model\\.visual\\.blocks.*"]]
)
def test_a_tower_that_is_left_out_is_no_problem(entries: list[str]) -> None:
    vision = {"vision_config": QWEN3_5["vision_config"], "text_config": LLAMA_8B}
    assert model.plan(quantised(vision, **groups(CHANNEL, ignore=entries))).problems == ()
    assert model.plan(quantised(vision, **groups(CHANNEL | {"targets": ["re:.*self_attn.*"]}))).problems == ()
    assert model.plan(quantised(vision, **groups(CHANNEL, ignore=["re:.*self_attn.*"]))).problems


def test_modelopts_file_is_read_beside_the_config(tmp_path: Path) -> None:
    """Models were planned in BF16 whose weights are FP8."""
    told: Config = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.down_proj"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B | {"torch_dtype": "bfloat16"}))
    for path in (config, tmp_path):
        found = workload.plan(path)
        assert (set(served(found)), runs(found)) == ({"qkv_proj", "o_proj", "mlp.gate_up_proj"}, {ROWWISE})
    names = {"weight_map": {"model.layers.0.mlp.up_proj.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(names))
    assert runs(workload.plan(tmp_path)) == {ROWWISE}
    config.write_text(json.dumps(quantised(LLAMA_8B)))
    assert runs(workload.plan(config)) == {FP8}, "the config's own counts first"


def test_modules_that_are_left_out_are_not_served_unless_only_some_layers_are() -> None:
    asked = groups(IN_BLOCKS, ignore=["lm_head", "re:.*self_attn.*"])
    found = model.plan(LLAMA_8B | {"quantization_config": asked})
    assert set(served(found)) == {"mlp.gate_up_proj", "mlp.down_proj"}
    assert "leaves it as it is" in why_not(found)["o_proj"]
    names = [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
    for left, known in ((names[:1], served), (names, why_not)):
        config = quantised(LLAMA_8B | {"num_hidden_layers": 2}, **BLOCKS | {"modules_to_not_convert": left})
        assert "mlp.down_proj" in known(model.plan(config))


CONTROL = "a\x1b[2J\x07\r\x9b31mb"


def test_names_do_not_write_to_the_terminal(tmp_path: Path) -> None:
    """They are text from files: escapes in them could hide a line, or send words to a shell."""
    layer = f"m.{CONTROL}.o_proj"
    write(
        tmp_path / "a.safetensors",
        fp8(layer, 256, 256) | {f"m.{at}{CONTROL}.weight": ("BF16", (512, 512)) for at in ("", "experts.")},
    )
    write(tmp_path / "b.safetensors", {f"m.{CONTROL}.weight": (CONTROL, (512, 512))})
    (tmp_path / "c.json").write_text(json.dumps([{"n": 128, "k": 128, "name": CONTROL}]))
    (tmp_path / "d.json").write_text(json.dumps(LLAMA_8B | {"model_type": CONTROL}))
    index = {"weight_map": {f"{layer}.weight": "x.safetensors", f"{layer}.weight_scale": "x.safetensors"}}
    (tmp_path / "e.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    write(tmp_path / f"{CONTROL}.safetensors", {})
    names = [*(f"{name}.safetensors" for name in ("a", "b", CONTROL)), "c.json", "d.json", "e.safetensors.index.json"]
    for name in (*names, f"{CONTROL}.json", "."):
        for command in (("precompile", "--dry-run", "--tp", "2", "--m", "8", "--model"), ("tune", "--model")):
            output = CliRunner().invoke(app, [*command, str(tmp_path / name)]).output
            assert output.replace("\n", "").isprintable(), (name, output)
