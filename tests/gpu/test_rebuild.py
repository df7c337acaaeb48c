"""A kernel that was built before, but is no longer in our cache."""

import shutil
from pathlib import Path

from deep_gemm.jit import Builder
from deep_gemm.jit.compilers import choose
from deep_gemm.kernels.helpers import TRANSPOSE_SCALES
from deep_gemm.runtime import engine
from deep_gemm.settings import settings


def test_nvrtc_builds_again_what_it_has_built_at_the_same_place(tmp_path: Path) -> None:
    """With a driver NVRTC has its own cache, and its cached binaries came without ptxas' report."""
    with settings.override(use_nvrtc=True):
        compiler = choose()
    request = engine.build_request(TRANSPOSE_SCALES.cases()[0])
    first = Builder(tmp_path / "cache", compiler).build(request)
    shutil.rmtree(tmp_path / "cache")
    again = Builder(tmp_path / "cache", compiler).build(request)
    assert (again.cubin, again.resources) == (first.cubin, first.resources)
