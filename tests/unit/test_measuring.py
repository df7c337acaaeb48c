"""Measuring configs of a call: when, on what, and what the call does afterwards. The GPU and its times are fakes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu, FakeLaunch, calls_behind

import deep_gemm
from deep_gemm import arch, ops, options, select, settings
from deep_gemm.arch import SM90
from deep_gemm.errors import CompileError, DriverError, UnsupportedError
from deep_gemm.ops import dense
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import calls, engine, measuring
from deep_gemm.select import tuner
from deep_gemm.select.calibration import default
from deep_gemm.spec import GemmSpec

M, N, K = 24, 136, 272


class Timers:
    """Times of configs, and what was timed: all of it without a GPU."""

    def __init__(self, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.fastest = 5
        """Which of the configs, by the model, is the fastest."""
        self.timed: list[GemmConfig] = []
        self.tensors: list[Sequence[torch.Tensor]] = []
        self.contents: list[torch.Tensor] = []
        """The operands of the first config, before anything was timed."""
        self.broken: Callable[[GemmConfig], bool] = lambda config: False
        """Which configs do not compile."""
        self.unloadable: Callable[[GemmConfig], bool] = lambda config: False
        """Which configs cannot be loaded or launched."""
        self.planned: list[GemmConfig] = []
        """The configs of the plans that calls made."""
        self.capturing = False
        self.offered: list[GemmConfig] = []
        self._forced: dict[int, GemmConfig] = {}
        self._ranked = engine.ranked_configs
        self._launch = gpu.launch
        monkeypatch.setattr(options.current(), "measured_times", False)
        monkeypatch.setattr(engine, "calibration_of", lambda device: default())
        monkeypatch.setattr(engine, "device_name", lambda device: "NVIDIA H200")
        monkeypatch.setattr(engine, "raw_stream", lambda device: 7)
        monkeypatch.setattr(engine, "kernel_params", lambda spec, config, arch: config)
        monkeypatch.setattr(engine, "build", self.build)
        monkeypatch.setattr(engine, "forced_plan", self.forced_plan)
        monkeypatch.setattr(engine, "plan", self.plan)
        monkeypatch.setattr(engine, "launch_record", self.launch)
        monkeypatch.setattr(measuring, "Single", self.single)
        monkeypatch.setattr(measuring, "_is_capturing", lambda: self.capturing)

    def build(self, config: GemmConfig) -> None:
        if self.broken(config):
            raise CompileError("it does not compile")

    def plan(self, spec: Any, device: int) -> Any:
        if isinstance(spec, GemmSpec):
            self.planned.append(self._ranked(spec, device)[0].config)
        return self.gpu.plan(spec, device)

    def forced_plan(self, spec: GemmSpec, config: GemmConfig, device: int) -> Any:
        if self.unloadable(config):
            raise DriverError("it does not load")
        return SimpleNamespace(spec=spec, config=config)

    def launch(
        self, plan: Any, strides: Any, at: Mapping[str, int], stream: int, constant: bool = False, numbers: Any = None
    ) -> FakeLaunch:
        made = self._launch(plan, strides, at, stream, constant, numbers)
        if isinstance(plan.config, GemmConfig):
            assert not constant
            self._forced[id(made)] = plan.config
            self.offered.append(plan.config)
        return made

    def single(self, call: Any, flush: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Callable[[], float]:
        assert flush.numel() == 512 << 20
        config, index = self._forced[id(call)], len(self.offered) - 1
        self.tensors.append(tensors)
        self.contents = self.contents or [tensor.clone() for tensor in tensors]

        def timer() -> float:
            self.timed.append(config)
            for tensor in tensors:
                tensor.fill_(0)  # whatever a kernel might write
            return 10.0 - (index == self.fastest)

        return timer


@pytest.fixture
def timers(gpu: FakeGpu, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Timers:
    engine.forget_plans()
    return Timers(gpu, monkeypatch)


def operands(m: int = M) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    return normal(m, K), normal(N, K), normal(m, N)


def test_a_new_shape_is_measured_once_and_runs_with_the_fastest(timers: Timers) -> None:
    mine = operands()
    before = [tensor.clone() for tensor in mine]
    with settings.override(tune="on"):
        for _ in range(3):
            deep_gemm.bf16_gemm_nt(*mine)
            deep_gemm.bf16_gemm_nt(*operands())  # at other addresses
        deep_gemm.bf16_gemm_nt(*operands(23))  # ranked as 24 is
    offered = timers.offered
    assert len(offered) == len(set(offered)) == tuner.TOP + tuner.BEYOND
    assert set(timers.planned) == {offered[5]}
    assert all(torch.equal(*pair) for pair in zip(mine, before, strict=True))


def test_a_config_outside_the_serving_set_can_win(timers: Timers) -> None:
    timers.fastest = tuner.TOP + 3
    with deep_gemm.tuning() as found:
        deep_gemm.bf16_gemm_nt(*operands())
    (one,) = found
    assert one.chosen == timers.offered[timers.fastest]
    served = select.rank(one.spec, SM90, default())
    assert one.chosen not in [choice.config for choice in served]
    tuner._stores.clear()
    engine.forget_plans()
    calls.forget_all()
    with settings.override(tune="read"):
        deep_gemm.bf16_gemm_nt(*operands())
    assert timers.planned[-1] == one.chosen


def test_what_was_kept_is_read_and_nothing_else_is_measured(timers: Timers) -> None:
    with settings.override(tune="on"):
        deep_gemm.bf16_gemm_nt(*operands())
    count = len(timers.timed)
    tuner._stores.clear()
    for word, chosen in (("read", timers.offered[5]), ("off", timers.offered[0])):
        calls.forget_all()
        with settings.override(tune=word):
            deep_gemm.bf16_gemm_nt(*operands())
        assert timers.planned[-1] == chosen
    with settings.override(tune="read"):
        deep_gemm.bf16_gemm_nt(*operands(1000))
    assert len(timers.timed) == count


def test_nothing_is_measured_by_default_or_inside_capture(timers: Timers) -> None:
    deep_gemm.bf16_gemm_nt(*operands())
    timers.capturing = True
    with settings.override(tune="on"):
        deep_gemm.bf16_gemm_nt(*operands(48))
    assert (timers.timed, len(timers.planned)) == ([], 2)
    timers.capturing = False
    with settings.override(tune="on"):
        deep_gemm.bf16_gemm_nt(*operands(56))
    assert timers.timed


def test_a_block_measures_what_is_called_in_it_even_if_it_was_called_before(timers: Timers) -> None:
    mine = operands()
    deep_gemm.bf16_gemm_nt(*mine)
    with deep_gemm.tuning() as found:
        deep_gemm.bf16_gemm_nt(*mine)
        with deep_gemm.tuning() as inner:
            deep_gemm.bf16_gemm_nt(*operands(48))
    (one, other), (alone,) = found, inner
    assert (other, one.spec.m) == (alone, M)
    assert (one.modelled, one.chosen, one.gain) == (timers.offered[0], timers.offered[5], 10 / 9)
    assert timers.planned[:2] == [timers.offered[0], timers.offered[5]]
    deep_gemm.bf16_gemm_nt(*operands(96))
    assert len(found) == 2
    deep_gemm.set_pdl(True)  # drops all plans
    deep_gemm.bf16_gemm_nt(*mine)
    assert timers.planned[-1] == one.chosen


def test_the_warm_path_is_what_it_was(timers: Timers) -> None:
    mine, remembered = operands(), calls_behind(dense.bf16)
    with deep_gemm.tuning():
        deep_gemm.bf16_gemm_nt(*mine)
    assert [type(call) for _, call in remembered.warm.values()] == [FakeLaunch]
    assert [type(call) for call in remembered.replays.values()] == [calls.Replay]


def test_copies_have_the_strides_and_the_contents_of_the_operands(timers: Timers) -> None:
    a, b, d = operands()
    wide = torch.randn(M, 512).bfloat16()
    wide[:, :K] = a
    with deep_gemm.tuning():
        deep_gemm.bf16_gemm_nt(wide[:, :K], b, d)
    for given, copy, content in zip((wide[:, :K], b, d), timers.tensors[0], timers.contents, strict=True):
        assert torch.equal(given, content)
        assert given.stride() == copy.stride()
        assert given.data_ptr() != copy.data_ptr()


def test_in_place_c_and_d_stay_one_tensor(timers: Timers) -> None:
    a, b, d = operands()
    wide = d.float()
    before = wide.clone()
    with deep_gemm.tuning() as found:
        deep_gemm.bf16_gemm_nt(a, b, wide, wide)
    assert found[0].spec.accumulate == "in place"
    assert torch.equal(wide, before)
    copies = timers.tensors[0]
    assert len({tensor.data_ptr() for tensor in copies}) == 3 == len(copies) - 1


def test_scales_are_transposed_before_the_gemm_is_timed(timers: Timers) -> None:
    (a, sfa), b, *_ = deep_gemm.testing.random_operands(M, N, K, "cpu")
    d = torch.empty(M, N, dtype=torch.bfloat16)
    with deep_gemm.tuning() as found:
        deep_gemm.fp8_gemm_nt((a, sfa.contiguous()), b, d)
    assert len(found) == 1
    assert [made.kernel for made in timers.gpu.launched] == ["transpose", "transpose", "gemm"]
    measured, called, _ = timers.gpu.launched
    assert measured.at["source"] != called.at["source"] == sfa.data_ptr()


def test_configs_that_do_not_compile_are_left_out(timers: Timers) -> None:
    """If the model's choice is one of them, nothing is measured: the call itself reports the error."""
    asked: list[GemmConfig] = []
    timers.broken = lambda config: asked.append(config) or len(asked) == 3  # type: ignore[func-returns-value]
    with deep_gemm.tuning() as found:
        deep_gemm.bf16_gemm_nt(*operands())
    assert len(asked) == tuner.TOP + tuner.BEYOND == len(found[0].times) + 1
    asked.clear()
    timers.broken = lambda config: asked.append(config) or len(asked) == 1  # type: ignore[func-returns-value]
    with deep_gemm.tuning() as found:
        deep_gemm.bf16_gemm_nt(*operands(200))
    assert (found, len(timers.gpu.launched)) == ([], 2)


def test_configs_that_cannot_be_loaded_are_left_out(timers: Timers) -> None:
    asked: list[GemmConfig] = []
    timers.unloadable = lambda config: asked.append(config) or len(asked) == 3  # type: ignore[func-returns-value]
    with deep_gemm.tuning() as found:
        deep_gemm.bf16_gemm_nt(*operands())
    assert asked[2] not in found[0].times
    assert len(found[0].times) == len(asked) - 1


def test_without_memory_for_copies_the_model_decides(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(tensors: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(measuring, "_copies", full)
    with deep_gemm.tuning() as found:
        deep_gemm.bf16_gemm_nt(*operands())
    assert found == []
    assert len(timers.gpu.launched) == 1
    assert "no memory for copies" in caplog.text


def test_what_has_no_kernel_goes_to_the_fallback(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(spec: Any, device: int) -> Any:
        raise UnsupportedError("There is no kernel.")

    for name in ("ranked_configs", "worth_measuring"):
        monkeypatch.setattr(engine, name, none)
    a, b, d = operands()
    with deep_gemm.tuning(), settings.override(fallback="torch"):
        deep_gemm.bf16_gemm_nt(a, b, d)
    assert torch.allclose(d.float(), a.float() @ b.float().t(), rtol=2e-2, atol=0.2)
    with deep_gemm.tuning(), pytest.raises(UnsupportedError, match="no kernel"):
        deep_gemm.bf16_gemm_nt(a, b, d)


def test_batch_invariance_offers_configs_of_one_order_only(timers: Timers) -> None:
    deep_gemm.set_batch_invariant(True)
    try:
        with deep_gemm.tuning() as found:
            deep_gemm.bf16_gemm_nt(*operands())
    finally:
        deep_gemm.set_batch_invariant(False)
    assert found[0].spec.batch_invariant
    assert all(config.k_splits == 1 for config in timers.offered)
    assert any(choice.config.k_splits > 1 for choice in timers._ranked(found[0].spec, 0)) is False


def test_a_launch_that_is_planned_is_not_measured(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan would not change: only `tuning` drops plans."""
    monkeypatch.setattr(engine, "_plans", dict.fromkeys((half_spec(m), 0) for m in (24, 32)))
    with settings.override(tune="on"):
        for m in (24, 32):
            deep_gemm.bf16_gemm_nt(*operands(m))
        assert timers.timed == []
        deep_gemm.bf16_gemm_nt(*operands(40))
    assert timers.timed


def half_spec(m: int) -> GemmSpec:
    return ops.spec(m, N, K, 132, "bf16_gemm_nt")


def test_the_debug_record_says_what_was_measured(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = dict.fromkeys(("name", "key", "layer", "compiler", "source_path"), "")
    binary = SimpleNamespace(**fields, seconds={}, resources=SimpleNamespace(to_json=dict))
    monkeypatch.setattr(options.current(), "measured_times", False)
    monkeypatch.setattr(arch, "for_device", lambda device: SM90)
    monkeypatch.setattr(engine, "calibration_of", lambda device: default())
    monkeypatch.setattr(engine, "device_name", lambda device: "GPU X")
    monkeypatch.setattr(engine, "load", lambda params, device, what: (SimpleNamespace(symbol="k"), binary))
    spec = half_spec(24)
    slow, fast = (choice.config for choice in engine.ranked_configs(spec, 0)[:2])
    tuner.remember(spec, {slow: 12.0, fast: 8.25}, "GPU X")
    for word, config in (("off", slow), ("read", fast)):
        engine.forget_plans()
        with settings.override(tune=word, print_configs=True):
            assert engine.plan(spec, 0).params.config == config
        assert (", measured 8.25 us, " in capsys.readouterr().err) == (word == "read")
        assert engine.debug_info()["plans"][-1].get("measured_us", 0) == (8.25 if word == "read" else 0)
    engine.forget_plans()


@pytest.mark.parametrize("value", ["always", "1", "yes", ""])
def test_the_setting_takes_three_words(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_TUNE", value)
    if value:
        with pytest.raises(deep_gemm.SettingError, match="DG_TUNE must be one of off, read, on"):
            _ = settings.tune
    else:
        assert settings.tune == "off"
    monkeypatch.setenv("DG_TUNE", " Read ")
    assert settings.tune == "read"
