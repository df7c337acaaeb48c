"""The GPU models that kernels are compiled ahead for: whatever a call on one of them chooses is there."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from deep_gemm import arch, ops
from deep_gemm.aot import build, cards
from deep_gemm.aot.cards import Card
from deep_gemm.aot.layers import GROUPED_OPS
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.cli.app import app
from deep_gemm.errors import InvalidInputError
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.select import representatives, sheets
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
