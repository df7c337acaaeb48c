"""Clusters whose loaders are late where a tile has no box for them. Such a loader must hold the ring back. Its waits
see whether a round is over, but not which one: after missing one it would wait forever. (The kernels are debug builds,
which trap then.)"""

from collections.abc import Callable, Iterator

import pytest
import torch
from forced import DTYPES, assert_right, compiled, force_gemm, load, nvrtc, operands
from gpu_cases import DEVICE
from late_loaders import KERNELS, SHAPE, late_headers

from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.runtime import engine
from deep_gemm.settings import settings


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Function]]:
    root = tmp_path_factory.mktemp("late")
    builder = Builder(root / "cache", nvrtc(), late_headers(root / "include"))
    with (
        settings.override(debug=True),
        compiled((name, builder, params) for name, params in KERNELS.items()) as binaries,
    ):
        yield lambda name: load(KERNELS[name], binaries[name].result())


@pytest.mark.parametrize("name", KERNELS)
def test_a_late_loader_holds_the_ring_back(loaded: Callable[[str], Function], name: str) -> None:
    m, n, k, num_sms = SHAPE
    params, function, stream = KERNELS[name], loaded(name), engine.raw_stream(torch.cuda.current_device())
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = (torch.randn(rows, k, device=DEVICE, generator=generator) for rows in (m, n))
    d = torch.full((m, n), float("nan"), device=DEVICE, dtype=DTYPES[params.output])
    tensors = {**operands(params, x, y), "d": d}
    force_gemm(params, function, tensors, num_sms, stream)()
    torch.cuda.synchronize()
    assert_right(params, tensors)
