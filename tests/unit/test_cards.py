"""Kernels that are compiled ahead: for which GPU models, and how they are divided among processes."""

import itertools
import json
import math
import pickle
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import arch, kernels, ops, select
from deep_gemm.aot import build, cards, shard
from deep_gemm.aot.cards import Card
from deep_gemm.aot.layers import GROUPED_OPS
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.cli.app import app
from deep_gemm.errors import CompileError, InvalidInputError
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.select import calibration, representatives, sheets
from deep_gemm.spec import GemmSpec

NK = ((2112, 7168), (7168, 2304), (512, 7168), (6144, 4096))


def needed(spec: GemmSpec) -> KernelParams:
    """The kernel of a call with this spec on the faked GPU."""
    return engine.kernel_params(spec, engine.ranked_configs(spec, 0)[0].config, arch.for_device(0))


def put_in(monkeypatch: pytest.MonkeyPatch, device: str, sms: int, target: str = SM90.name) -> None:
    """A GPU of this model takes the place of CUDA device 0."""
    major, minor = arch.get(target).capability
    found = SimpleNamespace(name=device, multi_processor_count=sms, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(arch, "for_device", lambda index: arch.get(target))


ELSEWHERE = ("fp8_gemm_nt", "m_grouped_bf16_gemm_nt_masked")
"""Operations that are tried on other cards than Hopper's."""
CALLS = [
    pytest.param(sheet, op, id=f"{op}-{sheet.name}")
    for sheet in sheets.SHEETS
    for op in (ops.NAMES if sheet.arch == SM90.name else ELSEWHERE)
]


@pytest.mark.parametrize(("sheet", "op"), CALLS)
def test_calls_on_a_card_need_no_other_kernel(sheet: sheets.Sheet, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every operation of layers, at some M of each size, with and without batch invariance, on all SMs and on
    some."""
    put_in(monkeypatch, sheet.device, sheet.sms, sheet.arch)
    draw = random.Random(f"{sheet.name} {op}")
    groups = 32 if op in GROUPED_OPS else 1
    everyone = representatives(16384)
    ms = draw.sample(everyone[:24], 3) + draw.sample(everyone[24:80], 3) + draw.sample(everyone[80:], 3)
    shapes = [GemmShape(m, *draw.choice(NK), op=op, groups=groups) for m in ms]
    for part in (0, 20):
        asked_sms, on = sheet.sms - part if part else None, cards.parse([sheet.name], sheet.arch)
        ahead = build.choose(shapes, sheet.arch, asked_sms, on).kernels
        by_default = build.choose(shapes, sheet.arch, asked_sms).kernels
        assert ahead.keys() <= by_default.keys(), "the GPU that is here is always prepared for"
        for shape, invariant in itertools.product(shapes, (False, True)):
            spec = ops.spec(
                *(shape.m, shape.n, shape.k, sheet.sms - part, op, not part), groups=groups, expected_m=shape.m
            )
            asked = spec if spec.batch_invariant == invariant else _switched(spec, invariant)
            assert needed(asked) in ahead, asked


@pytest.mark.parametrize(("rows", "height"), [(1, 16), (16, 16), (20, 32), (32, 32), (33, 64), (500, 128)])
@pytest.mark.parametrize("op", ["m_grouped_bf16_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"])
def test_few_rows_of_a_group_have_low_tiles_with_swapped_operands(op: str, rows: int, height: int) -> None:
    (sheet,) = (each for each in sheets.SHEETS if each.name == "L40S")
    known = calibration.for_device(sheet.device, sheet.sms, sheet.hbm_gb_per_s, sheet.arch)
    asked = ops.spec(1024, 4096, 2048, sheet.sms, op, groups=8, expected_m=rows)
    config = select.select(asked, arch.get(sheet.arch), known).config
    assert (config.block_m, config.swap_ab) == (height, height < 64)


def _switched(spec: GemmSpec, invariant: bool) -> GemmSpec:
    import dataclasses

    return dataclasses.replace(spec, batch_invariant=invariant)


def names(found: tuple[Card, ...]) -> list[str]:
    return [card.name for card in found]


def test_cards_by_name() -> None:
    assert names(cards.parse(["h20"])) == names(cards.parse(["NVIDIA H20", "H20"])) == ["H20"]
    assert {*names(cards.parse(["all"]))} == {sheet.name for sheet in sheets.of_arch(SM90.name)}
    with pytest.raises(InvalidInputError, match=r"A card of sm_90a must be one of H100 .*, or all, but it is 'B200'"):
        cards.parse(["B200"])
    assert names(cards.parse(["B200"], "sm_100a")) == ["B200"]


def test_cards_that_are_prepared_for_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "DRIVER", tmp_path)
    usual = ["H100 SXM", "H200"]
    assert names(cards.default()) == usual
    assert names(cards.default(78)) == [*usual, "H20"]
    assert names(cards.default(114)) == [*usual, "H100 PCIe"]
    for place, model in enumerate(["NVIDIA H20", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla T4"]):
        (tmp_path / str(place)).mkdir()
        (tmp_path / str(place) / "information").write_text(f"Model: \t\t {model}\nIRQ: 11\n")
    (tmp_path / "9").mkdir()
    assert names(cards.default()) == [*usual, "H20"]
    assert names(cards.default(arch="sm_89")) == ["L40S", "L4", "4090"]
    assert names(tuple(cards.here("sm_80"))) == ["A100 80GB"]
    put_in(monkeypatch, "NVIDIA H20-3e", 78)
    assert [(card.device, card.sms) for card in cards.here()] == [("NVIDIA H20-3e", 78)]
    assert cards.here()[0].calibration == cards.parse(["H20"])[0].calibration


def test_the_command_takes_cards() -> None:
    def kernels(*arguments: str) -> dict[str, object]:
        result = CliRunner().invoke(
            app, ["precompile", "--shape", "2112x7168", "--m", "1-1024:16", "--dry-run", "--json", *arguments]
        )
        assert result.exit_code == 0, result.output
        found: dict[str, object] = json.loads(result.output)
        return found

    usual, h20, whole = kernels(), kernels("--card", "H20"), kernels("--card", "all")
    assert h20["cards"] == ["H20"]
    assert usual["kernels"] != h20["kernels"] < whole["kernels"]  # type: ignore[operator]
    result = CliRunner().invoke(app, ["precompile", "--shape", "128x128", "--card", "V100"])
    assert "A card of sm_90a must be one of" in result.output


SHAPES = [GemmShape(m, n, k) for m in (1, 64, 300, 4096) for n, k in ((576, 7168), (4096, 512), (7168, 2048))]
KERNELS = list(build.choose(SHAPES).kernels)
CASES = [params for kernel in kernels.registry().values() for params in kernel.cases()]


@given(st.sets(st.sampled_from(CASES)), st.integers(1, 40), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_parts_are_disjoint_complete_and_even(chosen: set[KernelParams], count: int, chance: random.Random) -> None:
    params = list(chosen)
    parts = []
    for index in range(count):
        chance.shuffle(params)  # processes may list them in different orders
        parts.append(shard.deal(params, index, count))
    together = [one for part in parts for one in part]
    assert len(together) == len(chosen)
    assert set(together) == chosen
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def area(params: KernelParams) -> int:
    return math.prod(params.config.tile)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_each_part_has_its_share_of_large_tiles(count: int) -> None:
    """Large tiles take longest to compile."""
    parts = [sorted(map(area, shard.deal(CASES, index, count)), reverse=True) for index in range(count)]
    ranked = sorted(map(area, CASES), reverse=True)
    for part in parts:
        assert all(
            ranked[(place + 1) * count - 1] <= found <= ranked[place * count] for place, found in enumerate(part[:-1])
        )


def test_parse() -> None:
    assert shard.parse("0/1") == (0, 1)
    assert shard.parse(" 7/16 ") == (7, 16)


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "a/2", "1/2/3", "-1/2", "1.5/2", "\u0661/2", "0x1/2"])
def test_a_text_that_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="must look like 0/8"):
        shard.parse(text)


@pytest.mark.parametrize("text", ["2/2", "0/0", "8/4"])
def test_parts_are_counted_from_zero(text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"but it is {text}: parts are counted from 0"):
        shard.parse(text)


@pytest.mark.parametrize("index_count", [(3, 3), (-1, 3), (0.0, 2), ("0", "2")])
def test_precompile_refuses_a_bad_shard(index_count: Any) -> None:
    with pytest.raises(InvalidInputError, match="0 <= i < n"):
        build.precompile(SHAPES, shard=index_count)


def test_precompile_builds_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[KernelParams] = []

    def fails(params: KernelParams) -> Any:
        built.append(params)
        raise CompileError("enough")

    monkeypatch.setattr("deep_gemm.runtime.engine.build", fails)
    summaries = [build.precompile(SHAPES, shard=(index, 5)) for index in range(5)]
    assert len(built) == len(set(built)) == len(KERNELS)
    assert [len(summary.outcomes) for summary in summaries] == [len(shard.deal(KERNELS, i, 5)) for i in range(5)]


@pytest.mark.parametrize("params", CASES, ids=lambda params: kernels.get(params.kernel).kernel_name(params))
def test_params_survive_pickling(params: KernelParams) -> None:
    copy = pickle.loads(pickle.dumps(params))
    assert copy == params
    assert type(copy.config) is type(params.config)
    assert hash(copy) == hash(params)


def test_outcomes_and_the_function_of_workers_survive_pickling() -> None:
    error = CompileError("it broke", log="a log", source_path="/x", options=["-a"])
    outcome = build.Outcome("k", (SHAPES[0],), KERNELS[0], error=error)
    copy = pickle.loads(pickle.dumps(outcome))
    assert (copy.name, copy.shapes, copy.params, copy.binary) == ("k", (SHAPES[0],), KERNELS[0], None)
    assert (str(copy.error), copy.error.log, copy.error.options) == (str(error), "a log", ("-a",))
    assert pickle.loads(pickle.dumps(build.build)) is build.build
