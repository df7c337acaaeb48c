"""Which kernels are kept as rendered sources under tests/unit/golden, and how to write them anew:

    python tests/golden_renders.py

Then read the diff: every changed line changes the binaries of the kernels that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deep_gemm import arch, kernels
from deep_gemm.engine import build_request
from deep_gemm.kernels import sm90_fp8_gemm, sm90_fp8_small, sm90_fp8_swapped, transpose_scales
from deep_gemm.kernels.base import Kernel
from deep_gemm.params import FP8Config, KernelParams

FOLDER = Path(__file__).parent / "unit" / "golden"
PLAIN, SWAPPED, SMALL = sm90_fp8_gemm.KERNEL, sm90_fp8_swapped.KERNEL, sm90_fp8_small.KERNEL
FAMILIES: tuple[Kernel[Any], ...] = (PLAIN, SWAPPED)
"""Those with producers and a ring."""


def find_config(kernel: Kernel[Any] | None = None, **fields: int) -> FP8Config:
    """The first legal config with these fields, of ``kernel`` or of the first family that has one; fields that are not
    named are as in a plain one, alone on its SM."""
    alone = {"cluster_m": 1, "cluster_n": 1, "cluster_k": 1, "consumers_k": 1, "ctas_per_sm": 1}
    wanted = {**alone, "persistent": True, **fields}
    for family in FAMILIES if kernel is None else (kernel,):
        for config in family.configs(arch.SM90):
            if all(getattr(config, name, None) == value for name, value in wanted.items()):
                assert isinstance(config, FP8Config)
                return config
    raise LookupError(f"no legal config has {wanted}")


def make_params(config: FP8Config, store: str = "", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of ``config`` in its own family, storing by TMA where it can unless ``store`` says otherwise."""
    kernel = kernels.of(config)
    store = store or kernel.store(config, True)
    return KernelParams(kernel=kernel.name, arch=arch.SM90.name, config=config, store=store, shape=shape)


def golden_params() -> list[KernelParams]:
    """One of each kind, small tiles first because their sources are short."""
    return [
        make_params(find_config(block_m=64, block_n=16, ctas_per_sm=2)),
        make_params(find_config(block_m=64, block_n=32, cluster_k=2, consumers_k=2)),
        make_params(find_config(block_m=128, block_n=64, cluster_m=2), shape=(0, 2112, 7168)),
        make_params(find_config(block_m=128, block_n=192), store="direct"),
        make_params(find_config(block_m=128, block_n=112)),
        make_params(find_config(block_m=256, block_n=128, persistent=False)),
        make_params(find_config(block_m=136, block_n=128)),
        make_params(find_config(SWAPPED, block_m=16, block_n=64)),
        make_params(find_config(SWAPPED, block_m=24, block_n=128, cluster_k=2)),
        make_params(find_config(SWAPPED, block_m=16, block_n=64, cluster_k=2, consumers_k=2), shape=(0, 2112, 7168)),
        make_params(find_config(SWAPPED, block_m=8, block_n=32)),
        make_params(find_config(SMALL, block_n=16, consumers_k=2, persistent=False)),
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
