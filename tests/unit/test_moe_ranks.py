"""Mixtures of experts over several ranks: each rank is a thread. What ranks exchange is done by its references, and by
device code in an emulation. Results are those of one rank, bit for bit."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import Emulated
from rank_cases import CASES, IMPATIENT, INNER, WIDTH, Group, Layer, compare
from torch import Tensor

from deep_gemm import InvalidInputError, UnsupportedError, kernels, mega_moe
from deep_gemm.arch import SM90
from deep_gemm.ops import moe_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are threads where there is no GPU")
OPERATIONS = (moe_ranks.Meet, moe_ranks.Pull, moe_ranks.Return)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls with other tokens and counts too."""
    ranks, experts, top_k, counts, late, hot = CASES[name]
    layer = Layer(monkeypatch, ranks, experts, top_k)
    for seed in range(3):
        compare(layer, counts[seed % ranks :] + counts[: seed % ranks], seed, late, hot)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_ranks, "PATIENCE", 0.05)
    layer = Layer(monkeypatch, 2, 4, 1)
    first, second = ((values[:2], scales[:2]) for values, scales in layer.weights)
    with pytest.raises(RuntimeError, match=r"rank 0 has waited 0.05 s for the ranks \[1\]"):
        mega_moe.fp8_mega_moe(torch.empty(1, WIDTH).bfloat16(), first, second, layer.buffers[0])


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [torch.zeros(1)] * 33
    with pytest.raises(UnsupportedError, match="group has 33 ranks, but at most 32 are supported"):
        mega_moe.SymmBuffer(Group(many, 0), 66, 8, 2, WIDTH, INNER)
    with pytest.raises(InvalidInputError, match="num_experts must be a multiple of the 2 ranks of group, but it is 5"):
        mega_moe.SymmBuffer(Group(many[:2], 0), 5, 8, 2, WIDTH, INNER)


# ------------------------------------------------------------------------------------------------ device code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


_built: dict[Any, Emulated] = {}


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path, memory: Callable[[], list[Tensor]], *edits: Any) -> None:
    """Run the kernels in place of references. Each thread has kernels of its own."""
    lock, of_thread = threading.Lock(), threading.local()

    def kernel_of(spec: Any) -> Emulated:
        family: Any = kernels.for_helper(spec, SM90)
        with lock:
            if (family.name, edits) not in _built:
                params = family.params(spec, family.config_of(spec, SM90), SM90)
                _built[family.name, edits] = Emulated(folder / f"{len(_built)}", params, *edits)
            own = vars(of_thread)
            if family.name not in own:
                own[family.name] = _built[family.name, edits].another(folder / f"{time.monotonic_ns()}.so")
            return own[family.name]

    def run(operation: Any, x: Any) -> None:
        spec = operation.spec(x, 2)
        others = {f"memory {index}": each for index, each in enumerate(memory())}
        kernel_of(spec)(spec, {**x.tensors, **others}, backwards=x.spec.ranks % 2 == 1)

    for operation in OPERATIONS:
        monkeypatch.setattr(operation, "reference", run)


def run_case(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *edits: Any) -> None:
    ranks, experts, top_k, counts, late, hot = CASES[name]
    layer = Layer(monkeypatch, ranks, experts, top_k)
    emulate(monkeypatch, folder, lambda: layer.memory, *edits)
    for seed in range(2):
        compare(layer, counts[seed:] + counts[:seed], seed, late, hot)


@pytest.mark.parametrize("name", CASES)
def test_device_code_gives_the_bits_of_one_rank(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run_case(name, monkeypatch, folder)


def test_a_wait_traps_in_the_end(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    layer = Layer(monkeypatch, 2, 4, 1)
    emulate(monkeypatch, folder, lambda: layer.memory, IMPATIENT)
    meet, buffer = moe_ranks.Meet(), layer.buffers[1]
    with pytest.raises(RuntimeError, match="it traps"):
        meet.reference(meet.check(buffer.peers, buffer.epochs, 1, 0))


BREAKS = {
    "tell oneself": ("address_of(peers, lane, kFlags)", "address_of(peers, rank, kFlags)"),
    "do not wait": ("- epoch) < 0; ++polls", "- epoch) < -9; ++polls"),
    "one epoch for both meetings": ("epochs[which] = epoch", "epochs[0] = epoch"),
    "tokens of another rank": ("const u64 token = index - owner * tokens, place", "const u64 token = index % 2, place"),
    "experts of another rank": ("rank * experts)", "(rank + 1) * experts)"),
    "weights": ("their[k];", "their[0];"),
    "scales": ("scales[place * blocks + i] = from[i]", "scales[place * blocks + i] = from[0]"),
    "slots of what is no expert": ("expert < static_cast<i64>(all_experts)", "expert <= static_cast<i64>(all_experts)"),
    "slots of another": ("const u64 slot = index - owner", "const u64 slot = 1 + index - owner"),
    "half of a row": ("row * stride * 2, width / 8", "row * stride * 2, width / 16"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BREAKS)
def test_wrong_device_code_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        run_case("a hot expert", monkeypatch, folder, ("moe_ranks.cuh", *BREAKS[name]), IMPATIENT)
