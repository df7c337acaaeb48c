"""`deep-gemm doctor --verify`, without a GPU: torch's reference takes the place of our kernels."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import arch, backends, kernels, options, quantize
from deep_gemm.backends import verify
from deep_gemm.backends.accuracy import examine
from deep_gemm.backends.registry import get_operation, operation_names
from deep_gemm.cli.app import app
from deep_gemm.errors import UnsupportedError
from deep_gemm.ops import table
from deep_gemm.runtime import engine

CPU = torch.device("cpu")
SMALL = {
    ("M", "N", "K"): ((3, 40, 64),),
    ("groups", "mean rows", "N", "K"): ((2, 3, 16, 128),),
    ("groups", "mean K", "M", "N"): ((2, 128, 8, 16),),
    ("rows", "heads", "K", "N"): ((2, 2, 128, 128),),
    ("queries", "keys"): ((4, 64),),
    ("requests", "tokens", "keys"): ((2, 1, 64),),
    ("M", "K"): ((4, 256),),
    ("M", "N"): ((4, 128),),
}


def test_every_operation_has_shapes() -> None:
    dims = {get_operation(op).dims for op in operation_names()}
    assert set(verify.SIZES) == set(SMALL) == dims
    for chosen in (verify.SIZES, verify.FORCED):
        for of_dims, shapes in chosen.items():
            able = [get_operation(op) for op in operation_names() if get_operation(op).dims == of_dims]
            able = [op for op in able if chosen is verify.SIZES or not isinstance(op, verify.NOT_OF_FAMILIES)]
            assert all(op.refuses(shape) == "" for op in able for shape in shapes)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """The command on a faked H100, whose kernels are torch's reference on the CPU."""
    checked = verify.verify

    def faked(device: torch.device, spec: arch.ArchSpec, **more: object) -> verify.Report:
        return checked(CPU, spec, ours="torch", sizes=SMALL, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "verify", faked)
    monkeypatch.setattr(verify, "arch_here", lambda: arch.SM90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    done = CliRunner().invoke(app, ["doctor", "--verify", *arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_report_says_that_all_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ("fp8_gemm_nt", "bf16_gemm_tn", "m_grouped_fp8_gemm_nt_masked", "fp8_einsum", "tf32_hc_prenorm_gemm")
    monkeypatch.setattr(verify, "operation_names", lambda: ops)
    code, text = run(monkeypatch)
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0].split() == ["GPU", "cpu,", "sm_90a"]
    assert f"{6 * len(verify.CASTS)} of {6 * len(verify.CASTS)} give the bytes" in text
    for op in ops:
        shape = " x ".join(map(str, SMALL[get_operation(op).dims][0]))
        (line,) = [line for line in lines if line.startswith(f"{op} ")]
        assert 0 < float(line.partition(shape)[2].split()[0]) <= 1
    assert lines[-1].startswith("Everything that ran is right. It took ")


def test_what_is_wrong_is_named_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cast gives other bytes on the device, and one product is not written."""
    seen: list[torch.Tensor] = []

    def other(x: torch.Tensor) -> object:
        seen.append(x)
        return quantize.rows(x if len(seen) % 2 else x * 1.01)

    monkeypatch.setattr(verify, "CASTS", {"rows": other})
    monkeypatch.setattr(verify, "operation_names", lambda: ["bf16_gemm_nt"])
    backends.get_kernel("torch", "bf16_gemm_nt")
    kernel = backends.registry._kernels["torch", "bf16_gemm_nt"]
    monkeypatch.setitem(backends.registry._kernels, ("torch", "bf16_gemm_nt"), _Unwritten(**vars(kernel)))
    code, text = run(monkeypatch, "--json")
    assert code == 1
    report = json.loads(text)
    assert len(report["wrong_casts"]) == 6
    assert "cast of rows from torch.bfloat16, 257x896: other bytes than torch's" in report["wrong"]
    assert any(why.startswith("bf16_gemm_nt 3 x 40 x 64: 120 of 120 elements are NaN") for why in report["wrong"])


class _Unwritten(backends.Kernel):
    def __call__(self, *operands: object) -> None:
        return None


def test_a_product_with_scales_of_ue8m0_is_checked() -> None:
    """Its exact result is that of the reference, and another exponent is a fault."""
    op = verify.PACKED
    a, b, d = op.make((37, 136, 528), CPU)
    exact, (values, scales) = op.exact(a, b, d), a
    allowed = op.allowed(exact, a, b, d)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert examine(d, exact, allowed).right
    scales[3, 1] += 1
    deep_gemm.fp8_gemm_nt((values, scales), b, d)
    assert not examine(d, exact, allowed).right


def test_there_must_be_a_gpu() -> None:
    done = CliRunner().invoke(app, ["doctor", "--verify"])
    assert done.exit_code == 1
    assert "There is no GPU here, and --verify runs kernels on one." in done.output


def test_a_time_limit_leaves_the_rest_out() -> None:
    found = verify.verify(CPU, arch.SM90, seconds=-1.0, ours="torch", sizes=SMALL)
    assert found.late == operation_names()
    assert not found.rows
    assert found.casts


def test_a_family_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.archs, "for_device", lambda device: arch.SM90)
    monkeypatch.setattr(engine, "calibration_of", lambda device: engine.calibration.default())
    asked = table.spec(64, 512, 512, 132)
    with options.only(lambda config: config.family == "sm90_fp8_gemm"):
        assert {choice.config.family for choice in engine.ranked_configs(asked, 0)} == {"sm90_fp8_gemm"}
    with options.only(lambda config: False), pytest.raises(UnsupportedError, match="No config that is wanted"):
        engine.ranked_configs(asked, 0)
    assert options.wanted() is None


@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=pytest.mark.long), "sm_80"])
def test_families_are_forced_one_after_the_other(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a faked GPU, whose kernels do nothing: so each forced call is wrong, and says which config it had."""
    plan = engine.plan
    FakeGpu(monkeypatch)
    launch = type("Launch", (), {"__call__": lambda self: None, "at": lambda self, addresses: None})()
    binary = SimpleNamespace(name="", key="", layer="", compiler="", source_path="", resources=None, seconds={})
    monkeypatch.setattr(engine, "plan", plan)
    monkeypatch.setattr(engine, "_plans", {})
    monkeypatch.setattr(engine.debug_record, "add_plan", lambda *_: None)
    monkeypatch.setattr(engine, "build", lambda params: binary)
    monkeypatch.setattr(engine, "load", lambda *_: (SimpleNamespace(symbol="", device=0), binary))
    monkeypatch.setattr(engine, "launch_record", lambda *_, **__: launch)
    monkeypatch.setattr(arch, "for_device", lambda device: arch.get(target))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    report, spec = verify.Report(target), arch.get(target)
    for family in kernels.gemms().values():
        if target in family.archs:
            verify._force(report, family, CPU, spec, math.inf, lambda text: None)
    assert len(report.families) == sum(target in family.archs for family in kernels.gemms().values())
    for found in report.families:
        assert len(found.wrong) == found.calls
        assert all(f"family='{found.name}'" in why for why in found.wrong)
        packed = any("with scales of UE8M0" in why for why in found.wrong)
        assert packed == (found.name in ("mma_fp8", "mma_fp8_decode"))
    assert sum(found.calls > 1 for found in report.families) >= 0.75 * len(report.families)
