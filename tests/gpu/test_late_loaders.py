"""Clusters whose loaders are late where a tile has no box for them. Such a loader must hold the ring back. Its waits
see whether a round is over, but not which one: after missing one it would wait forever. (The kernels are debug builds,
which trap then.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from forced import compiled, force, force_half, force_scaled, laid_out, load, nvrtc, scaled_operands, scaling_of
from gpu_cases import DEVICE, nan_output
from late_loaders import KERNELS, SHAPE, late_headers

from deep_gemm import engine
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.params import HalfParams, ScaledParams
from deep_gemm.settings import settings
from deep_gemm.testing import assert_close_to_exact, assert_half_close_to_exact, random_operands


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
    d = nan_output(m, n)
    if isinstance(params, HalfParams):
        a, b = (laid_out(each.bfloat16(), major) for each, major in zip((x, y), params.majors, strict=True))
        force_half(params, function, {"a": a, "b": b, "d": d}, num_sms, stream)()
        torch.cuda.synchronize()
        assert_half_close_to_exact(d, a, b)
    elif isinstance(params, ScaledParams):
        operands, d = scaled_operands(params, x, y), d.float() if params.output == "f32" else d
        force_scaled(params, function, {**operands, "d": d}, num_sms, stream)()
        torch.cuda.synchronize()
        assert_close_to_exact(d, *operands.values(), scaling=scaling_of(params))
    else:
        a8, b8, _, _ = random_operands(m, n, k, DEVICE)
        force(params, function, a8, b8, d, num_sms, stream)()
        torch.cuda.synchronize()
        assert_close_to_exact(d, *a8, *b8)
