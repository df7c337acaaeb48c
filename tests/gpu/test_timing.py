"""The three timing modes with a real kernel: plausible times, and cuBLASLt for comparison."""

import costs
import pytest
import torch

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends, run
from deep_gemm.testing import timing

SHAPE = GemmShape(64, 4096, 4096)


@pytest.mark.parametrize("mode", ["flush", "graph"])
def test_measure(mode: str) -> None:
    row = run.measure(SHAPE, mode)
    # No GPU reads 16 MiB of weights faster than 10 TB/s, and none takes a millisecond.
    assert 1.0 < row["us"] < 1000.0
    assert 0.1 < row["ratio_tensorwise"] < 10.0


def test_steady() -> None:
    operands = backends.make_operands(SHAPE, 4)
    us = timing.steady({"ours": [backends.ours(x) for x in operands]}, seconds=0.2)
    assert 1.0 < us["ours"] < 1000.0


def test_blockwise_is_compared_before_it_is_timed() -> None:
    x = backends.make_operands(GemmShape(128, 512, 1024), 1)[0]
    assert backends.usable("blockwise", x) is None
    x.sfb = x.sfb * 2
    other = backends.blockwise(x)()
    x.sfb = x.sfb / 2
    backends.ours(x)()
    assert not torch.allclose(other.float(), x.d.float(), rtol=0.1)


def test_host_costs() -> None:
    rows = {row["what"]: row["us"] for row in costs.host()}
    ours = rows["fp8_gemm_nt, warm, scales ready"]
    assert 0.5 < ours < 200.0
    # Hosts differ by a factor of two, but the ratio does not: it was 0.40 to 0.45 on all.
    assert ours < 0.6 * rows["torch._scaled_mm tensorwise, out="]
    assert ours < rows["fp8_gemm_nt, warm, scales to transpose"]
