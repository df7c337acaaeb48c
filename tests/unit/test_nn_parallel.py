"""Layers that are divided among ranks, and operators whose operands are DTensors, over two ranks with gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import divided_cases
import parallel_cases as cases
import pytest
import spawned
import torch

from deep_gemm.nn import FP8Linear
from deep_gemm.nn.parallel import gather_in_fp8

pytestmark = [pytest.mark.long, pytest.mark.limit(100)]
ROOT = Path(__file__).parents[2]
BLOCKS = "of a shard must be a multiple of 128, the size of a block of scales, but it is"
TORCHS = (
    "torch's styles and distribute_module cannot divide a linear layer of deep_gemm.nn, whose products take no "
    "DTensors. Give parallelize_module ColwiseParallel or RowwiseParallel of deep_gemm.nn.parallel."
)
WHOLE = "of a shard must be a whole number, but it is"


@pytest.mark.parametrize("kind", ["fp8", "stored", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
def test_tensor_parallel_layers_compute_what_one_process_does(kind: str, sequence: bool) -> None:
    for errors in spawned.run(cases.tensor_parallel, kind, sequence):
        assert len(errors) == (4 if kind == "stored" else 6)
        assert all(error < 0.01 for error in errors.values()), errors


def test_one_rank_computes_the_same_bits() -> None:
    (errors,) = spawned.run(cases.tensor_parallel, "fp8", False, size=1)
    assert not any(errors.values()), errors


def test_what_cannot_be_divided_is_said() -> None:
    for said in spawned.run(cases.tensor_parallel_refusals):
        assert said == [
            f"out_features {BLOCKS} 1152 / 2 = 576. Legal numbers of ranks are 1, 3, 9.",
            f"in_features {BLOCKS} 144 / 2 = 72. Legal numbers of ranks are 1.",
            f"out_features {WHOLE} 9 / 2. Legal numbers of ranks are 1, 3, 9.",
            f"The number of experts {WHOLE} 3 / 2. Legal numbers of ranks are 1, 3.",
            "ExpertParallel divides a deep_gemm.nn.MoE, but it got of type ReLU.",
            "weight of the layer is a DTensor already: divide it once.",
            *[TORCHS] * 6,
        ]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["plain", "kept", "fp8"])
def test_fsdp_trains_as_one_process_does(way: str, weights: Any) -> None:
    for errors, seen in spawned.run(cases.fully_sharded, way, weights):
        assert seen["local rows"] == cases.HIDDEN // 2
        assert seen.get("converted", ("up", "down")) == ("up", "down")
        assert seen["gathered"] == ("Gathered" if way == "fp8" else "Parameter")
        assert seen["casts kept"] == 0, "backward would find whole weights of all layers in memory"
        assert all(error < (1e-5 if weights == torch.float32 else 0.01) for error in errors.values()), errors
        assert errors["y 0"] == errors["x 0"] == 0


def test_tied_weights_stay_tied_and_are_gathered_as_they_are() -> None:
    model = torch.nn.ModuleDict({name: FP8Linear(256, 256, bias=False) for name in ("one", "two", "alone")})
    model["two"].weight = model["one"].weight
    report = gather_in_fp8(model, 2)
    assert report.converted == ("alone",)
    assert report.kept == {"one": "it shares its weight with two", "two": "it shares its weight with one"}
    assert model["two"].weight is model["one"].weight


@pytest.mark.parametrize("chosen", ["by the router", "one rank", "no tokens", "some are dropped"])
def test_divided_experts_have_the_bits_of_one_process(chosen: str) -> None:
    for errors in spawned.run(cases.expert_parallel, chosen):
        assert errors.pop("router.weight") < 1e-5
        assert len(errors) == 5
        assert not any(errors.values()), errors


def test_tensor_parallel_layers_are_sharded_by_fsdp_too() -> None:
    for errors in spawned.run(cases.both_ways, size=4):
        assert len(errors) == 6
        assert all(error < 0.01 for error in errors.values()), errors


@pytest.mark.parametrize("way", ["plain", "fp8"])
def test_fsdp_shards_experts(way: str) -> None:
    for errors, casts in spawned.run(cases.sharded_experts, way):
        assert casts == 0
        assert len(errors) == 5
        assert all(error < 1e-5 for error in errors.values()), errors


def test_a_checkpoint_of_shards_is_plain_and_loads(tmp_path: Path) -> None:
    for types, equal, in_fp8 in spawned.run(cases.checkpoint, str(tmp_path / "state")):
        assert types == {"Tensor"}
        assert len(equal) == 4
        assert all(equal.values()), equal
        assert in_fp8
    import torch.distributed.checkpoint.format_utils as formats

    formats.dcp_to_torch_save(tmp_path / "state", tmp_path / "state.pt")
    alone = cases.mlp("fp8", "cpu")
    state = alone.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in torch.load(tmp_path / "state.pt", weights_only=True).items())


def test_a_compiled_tensor_parallel_model_has_the_same_bits() -> None:
    for errors in spawned.run(cases.compiled):
        assert not any(errors.values()), errors


def torchrun(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A script by two ranks, on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, str(ROOT / script), *options], capture_output=True, text=True, timeout=90, env=environment
    )


@pytest.mark.parametrize(
    ("script", "titles"),
    [
        ("tensor_parallel.py", ["tensor parallel MLP", "expert parallel mixture"]),
        ("fsdp.py", ["FSDP2"]),
    ],
)
def test_examples_agree_with_one_process(script: str, titles: list[str], tmp_path: Path) -> None:
    done = torchrun(f"examples/{script}", "--record", str(tmp_path / "record.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record) == titles
    for title, row in record.items():
        assert f"{title}: 2 ranks, gloo" in done.stdout
        assert row["errors"].keys() == row["bounds"].keys()
        assert all(row["errors"][name] <= bound for name, bound in row["bounds"].items())
        assert all(f"\n{name} " in done.stdout for name in row["errors"])


def test_an_example_alone_says_how_to_run_it() -> None:
    done = subprocess.run([sys.executable, ROOT / "examples/fsdp.py"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "Run it as ranks: torchrun --nproc-per-node 2" in done.stderr


def test_the_benchmark_measures_each_layer_beside_torch(tmp_path: Path) -> None:
    done = torchrun("benchmarks/parallel.py", "--output", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    found = {(row["layer"], row["pass"], row["way"]) for row in rows}
    assert len(found) == len(rows)
    passes = ("forward", "step")
    assert {(layer, name) for layer, name, way in found if way == "torch BF16"} == {
        *((layer, name) for layer in ("tensor parallel MLP", "expert parallel mixture") for name in passes),
        ("FSDP2", "step and AdamW"),
    }
    assert sum(way != "torch BF16" for *_, way in found) == 6
    assert all(row["ranks"] == 2 and row["us"] > 0 for row in rows)


def test_divided_products_are_those_of_one_process() -> None:
    for found in spawned.run(divided_cases.products):
        assert len(found) == sum(len(make()[1]) for make in divided_cases.CASES)
        assert all(error < 0.01 for error in found.values()), found


def test_other_placements_are_refused() -> None:
    given = "a Replicate(), b Shard(0), d Replicate()"
    ways = (
        "a Replicate(), b Replicate(), d Replicate(); a Shard(0), b Replicate(), d Shard(0); "
        "a Shard(1), b Shard(1), d Partial(); a Replicate(), b Shard(0), d Shard(1)"
    )
    gate = "a Replicate(), b Shard(0), d Shard(1)"
    gates = "a Replicate(), b Replicate(), d Replicate(); a Shard(0), b Replicate(), d Shard(0)"
    block = "b[0].shape[0] of a shard must be a multiple of 128, the size of a block of scales, but it is 384 / 2 = 192"
    for said in spawned.run(divided_cases.refusals):
        assert said == [
            f"Operands of bf16_gemm_nt cannot be divided so: {given}. Redistribute them to one of: {ways}.",
            "b must be a DTensor, as other operands are. Call DTensor.from_local first.",
            f"{block}. Legal numbers of ranks are 1, 3.",
            f"Operands of bf16_gemm_nt_epilogue cannot be divided so: {gate}. Redistribute them to one of: {gates}.",
            "tf32_hc_prenorm_gemm has no rule for DTensors. Call it with local tensors.",
        ]


WITHOUT = {
    *("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "tf32_hc_prenorm_gemm"),
    *("fp8_linear", "fp8_linear_backward", "k_grouped_fp8_gemm_contiguous"),
    *(
        *("fp8_moe", "fp8_fp4_moe", "bf16_fp4_moe"),
        *("moe_combine", "moe_dots", "moe_route"),
    ),  # their rows of tokens and their experts are indices into whole tensors
    *(f"m_grouped_{kind}_fp4_gemm_contiguous" for kind in ("fp8", "bf16")),  # pieces of N and K are not divided
}
"""Operators without a rule."""


def test_each_operator_has_a_rule_or_says_that_it_has_none() -> None:
    (found,) = spawned.run(divided_cases.every_operator, size=1)
    index = "quantize plain has no rule for rows as a DTensor. Call it with local tensors."
    assert found.pop("quantize_plain") == index
    assert {name for name, said in found.items() if said} == WITHOUT
    for name in WITHOUT:
        assert found[name].endswith(" has no rule for DTensors. Call it with local tensors."), found[name]


def test_neither_import_nor_calls_load_dtensors() -> None:
    code = (
        "import sys, torch, deep_gemm; x = torch.ones(16, 16).bfloat16(); deep_gemm.bf16_gemm_nt(x, x, x.clone());"
        "deep_gemm.register_operators(); deep_gemm.nn.FP8Linear(16, 16)(x);"
        "print('torch.distributed.tensor' in sys.modules, 'deep_gemm.nn.parallel' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
    assert done.stdout.split() == ["False", "False"]
