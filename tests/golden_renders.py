"""Which kernels are kept as rendered sources under tests/unit/golden, and how to write them anew:

    python tests/golden_renders.py

Then read the diff: every changed line changes the binaries of the kernels that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deep_gemm import arch, kernels
from deep_gemm.engine import build_request
from deep_gemm.kernels import transpose_scales
from deep_gemm.kernels.sm90_fp8_gemm import KERNEL, make_params
from deep_gemm.params import FP8Config, KernelParams

FOLDER = Path(__file__).parent / "unit" / "golden"


def find_config(**fields: int) -> FP8Config:
    """The first legal config with these fields; those not named are as in a plain one, alone on its SM."""
    wanted = {"cluster_m": 1, "cluster_n": 1, "cluster_k": 1, "consumers_k": 1, "ctas_per_sm": 1, **fields}
    for config in KERNEL.configs(arch.SM90):
        if all(getattr(config, name) == value for name, value in wanted.items()):
            return config
    raise LookupError(f"no legal config has {wanted}")


def golden_params() -> list[KernelParams]:
    """One of each kind, small tiles first because their sources are short."""
    return [
        make_params(find_config(block_m=64, block_n=16, ctas_per_sm=2)),
        make_params(find_config(block_m=64, block_n=32, cluster_k=2, consumers_k=2)),
        make_params(find_config(block_m=128, block_n=64, cluster_m=2), shape=(0, 2112, 7168)),
        make_params(find_config(block_m=128, block_n=192), store="direct"),
        transpose_scales.make_params(arch.SM90),
    ]


def golden_renders() -> Iterator[tuple[Path, str]]:
    """The file and the source of each."""
    for params in golden_params():
        yield FOLDER / f"{kernels.get(params.kernel).entry(params)}.cu", build_request(params).source


def write() -> None:
    """Bring the folder to what is rendered now, dropping files of kernels that are no longer among them."""
    renders = dict(golden_renders())
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.cu"):
        if path not in renders:
            path.unlink()
    for path, source in renders.items():
        path.write_text(source)


if __name__ == "__main__":
    write()
