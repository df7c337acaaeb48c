"""The switch for batch invariance: its two pairs of names, its effect, and that setting it drops no call."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import InvalidInputError, ops, options, select
from deep_gemm.arch import SM90
from deep_gemm.errors import UnsupportedError
from deep_gemm.kernels.sm90_tf32_hc_prenorm_gemm import PRENORM
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.prenorm import HcPrenormGemm
from deep_gemm.runtime import engine
from deep_gemm.spec import PrenormSpec
from deep_gemm.testing import random_operands

PAIRS = [
    (deep_gemm.set_batch_invariant, deep_gemm.get_batch_invariant),
    (deep_gemm.use_deterministic_algorithms, deep_gemm.get_deterministic_algorithms),
]


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    deep_gemm.set_batch_invariant(False)
    yield
    deep_gemm.set_batch_invariant(False)


def test_it_is_one_switch_of_two_names_and_off_at_first() -> None:
    for write, _ in PAIRS:
        for value in (True, False):
            write(value)
            assert [read() for _, read in PAIRS] == [value, value]


@pytest.mark.parametrize("value", [1, 0, None, "True"])
@pytest.mark.parametrize("write", [pair[0] for pair in PAIRS])
def test_only_a_bool_is_taken(write: Any, value: Any) -> None:
    with pytest.raises(InvalidInputError, match="enabled must be True or False, not"):
        write(value)
    assert deep_gemm.get_batch_invariant() is False


PARTS = {
    ("fp8_gemm_nt", 576): 4,
    ("fp8_gemm_nt", 1536): 2,
    ("fp8_gemm_nt", 2112): 2,
    ("fp8_gemm_nt", 4096): 1,
    ("bf16_gemm_nt", 576): 4,
    ("bf16_gemm_nt", 1536): 4,
    ("bf16_gemm_nt", 2112): 2,
    ("bf16_gemm_nt", 4096): 1,
}
"""Parts of a K of 7168 by the operation and N."""


@pytest.mark.parametrize(("op", "n"), PARTS)
def test_all_kernels_sum_k_in_as_many_parts_while_it_is_on(op: str, n: int) -> None:
    """For any M. With the switch off, how many there are depends on M."""
    split: dict[bool, set[int]] = {False: set(), True: set()}
    for value, m in itertools.product(split, (1, 16, 24, 33, 64, 65, 200, 1000, 4096, 16384)):
        deep_gemm.set_batch_invariant(value)
        spec = ops.spec(m, n, 7168, 132, op)
        assert spec.batch_invariant is value
        configs = [choice.config for choice in select.rank(spec, SM90)]
        split[value] |= {config.k_splits * config.in_turn for config in configs}
        assert not value or {config.consumers_k for config in configs} == {1}
        assert value or {config.in_turn for config in configs} == {1}
    assert split[True] == {PARTS[op, n]}
    assert len(split[False]) > 1


@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp16"])
def test_parts_are_known_without_m(kind: str) -> None:
    """They depend on nothing that a kernel for few rows has and one for many rows has not."""
    deep_gemm.set_batch_invariant(True)
    output, other = ("f32", "bf16") if kind == "fp8" else ("f16" if kind == "fp16" else "bf16", "f32")
    draw = random.Random(kind)
    for _ in range(60):
        n, k = 8 * draw.randint(1, 400), 16 * draw.randint(1, 400)
        use = {
            "output": draw.choice((output, other)),
            "accumulate": draw.choice(("none", "in place", "from c")),
            "aligned": draw.random() < 0.7,
            "majors": draw.choice([("k", "k"), ("mn", "k"), ("k", "mn")]) if kind != "fp8" else ("k", "k"),
        }
        if kind == "fp8" and use["output"] == "bf16":
            use["accumulate"] = "none"
        sms, multiple = draw.choice((1, 2, 3, 4, 66, 132)), draw.choice(((1, 1), (64, 64), (128, 128), (1, 256)))
        found = set()
        for m in (1, 20, 64, 100, 1000, 5000):
            spec = ops.spec(m, n, k, sms, f"{kind}_gemm_nt", whole_gpu=sms == 132, **use)
            spec = replace(spec, block_multiple=multiple)
            try:
                configs = select.legal(spec, SM90)
                chosen = select.select(spec, SM90).config
            except UnsupportedError:
                continue
            assert chosen in configs or chosen.in_turn > 1
            found |= {config.k_splits * config.in_turn for config in (*configs, chosen)}
        assert len(found) <= 1, (n, k, use)


def test_a_prenorm_product_sums_k_in_one_order_while_it_is_on(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels add the sums of parts in order, and then those of groups of warps: as many in each config."""
    configs: dict[bool, set[Any]] = {False: set(), True: set()}
    for value, m, sms in itertools.product(configs, (1, 500, 1000, 2000, 4096, 8192), (8, 132)):
        deep_gemm.set_batch_invariant(value)
        monkeypatch.setattr(options, "num_sms_for", lambda device, sms=sms: sms)
        product = HcPrenormGemm()
        a, b, d = torch.ones(m, 128).bfloat16(), torch.ones(24, 128), torch.empty(m, 24)
        operands = product.check(a, b, d, torch.empty(m))
        assert operands is not None
        (step,) = product.launches(operands, 0).steps
        assert isinstance(step.spec, PrenormSpec)
        assert step.spec.num_sms == sms
        configs[value].add(PRENORM.config_of(step.spec, SM90))
    assert configs[True] == set(PRENORM.ordered())
    assert {(config.cluster * config.in_turn, config.groups) for config in configs[True]} == {(8, 4)}
    assert configs[False] == set(PRENORM.configs(SM90))


class Calls:
    """Repeats one call on the fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        (a, sfa), self.b, _, _ = random_operands(24, 136, 272, "cpu")
        self.a = (a, sfa.t().contiguous().t())
        self.d = torch.empty(24, 136, dtype=torch.bfloat16)
        self.kept: list[torch.Tensor] = []  # kept, so that no fresh operand gets an earlier one's address

    def __call__(self, fresh: bool = False) -> int:
        """Make the call; returns how many launch records it made."""
        before = self.gpu.prepared
        a, sfa = self.a
        operand = (a.clone(), sfa.t().clone().t()) if fresh else self.a
        self.kept += operand
        deep_gemm.fp8_gemm_nt(operand, self.b, self.d)
        return self.gpu.prepared - before


def test_flipping_keeps_both_positions_warm(gpu: FakeGpu) -> None:
    """SGLang flips it around each call."""
    call = Calls(gpu)
    for value in (False, True):
        deep_gemm.set_batch_invariant(value)
        assert [call(), call(), call(fresh=True)] == [1, 0, 1]
    for value in (True, False) * 3:
        deep_gemm.set_batch_invariant(value)
        assert [call(), call(fresh=True)] == [0, 0]
        assert gpu.launched[-1].spec.batch_invariant is value


def test_a_flip_during_a_first_call_is_not_remembered_for_the_wrong_position(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may flip it after the operands were looked up and before the kernel is chosen."""
    call = Calls(gpu)
    check = gpu.checks[Dense]
    deep_gemm.set_batch_invariant(True)
    plan = engine.plan

    def flipped(*args: Any) -> Any:
        deep_gemm.set_batch_invariant(True)
        return plan(*args)

    def interrupted(*args: Any) -> Any:
        deep_gemm.set_batch_invariant(False)
        return check(*args)

    with monkeypatch.context() as patch:
        patch.setitem(gpu.checks, Dense, interrupted)
        patch.setattr(engine, "plan", flipped)
        call()
    assert gpu.launched[-1].spec.batch_invariant is False
    assert deep_gemm.get_batch_invariant() is True
    assert call() == 1  # the record of the call before is gone
    assert gpu.launched[-1].spec.batch_invariant is True
