"""Compiles the kernels of shapes.json into the package when the wheel is built; the rest is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ARCH = "sm_90a"


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        from deep_gemm.aot import build, workload

        summary = build.precompile(workload.shapes_of(HERE / "shapes.json"), arch=ARCH)
        # Raises, and so ends the build, if one kernel failed.
        held = build.pack(summary, Path(self.build_lib, "gemm_kernels", f"{ARCH}.dgpack"))
        self.announce(f"{len(held)} kernels for {ARCH}", level=2)


setup(cmdclass={"build_py": BuildWithKernels})
