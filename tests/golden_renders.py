"""The kernels whose rendered sources are kept under tests/unit/golden. To write them again:

    python tests/golden_renders.py

Then read the diff: every changed line changes the binaries of the kernels that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.engine import build_request
from deep_gemm.kernels import (
    copy_rows,
    quantize,
    sm90_fp8_gemm,
    sm90_fp8_grouped,
    sm90_fp8_rows,
    sm90_fp8_scaled,
    sm90_fp8_scaled_swapped,
    sm90_fp8_swapped,
    sm90_half_gemm,
    sm90_half_grouped,
    sm90_half_swapped,
    sm90_half_turned,
    transpose_bytes,
    transpose_scales,
)
from deep_gemm.kernels.base import Kernel
from deep_gemm.params import FP8Config, KernelParams

FOLDER = Path(__file__).parent / "unit" / "golden"
PLAIN, SWAPPED = sm90_fp8_gemm.KERNEL, sm90_fp8_swapped.KERNEL
FAMILIES: tuple[Kernel[Any], ...] = (PLAIN, SWAPPED)
"""The GEMMs."""


def find_config(kernel: Kernel[Any] = PLAIN, **fields: int) -> FP8Config:
    """The first legal config of ``kernel`` with these fields. Other fields default to those of a plain config: no
    cluster, no split of K, one CTA on an SM."""
    alone = {"cluster_m": 1, "cluster_n": 1, "cluster_k": 1, "consumers_k": 1, "ctas_per_sm": 1, "persistent": True}
    wanted = {**alone, **fields}
    for config in kernel.legal(SM90):
        if all(getattr(config, name, alone.get(name)) == value for name, value in wanted.items()):
            return config
    raise LookupError(f"no legal config has {wanted}")


def make_params(config: FP8Config, store: str = "tma", shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of ``config`` in its own family."""
    return KernelParams(kernel=kernels.of(config).name, arch=SM90.name, config=config, store=store, shape=shape)


def golden_params() -> list[KernelParams]:
    """Two of each family: a plain kernel, and one with as many features as can be combined."""
    return [
        make_params(find_config(block_m=128, block_n=128)),
        make_params(find_config(block_m=128, block_n=192, cluster_m=2), "direct", shape=(0, 2112, 7168)),
        make_params(find_config(SWAPPED, block_m=16)),
        make_params(find_config(SWAPPED, block_m=24, cluster_k=2, consumers_k=2), "direct", shape=(0, 2112, 7168)),
        sm90_half_gemm.make_params(sm90_half_gemm.make_config(128, 256)),
        sm90_half_gemm.make_params(
            sm90_half_gemm.make_config(256, 128, (1, 2, 1)), majors="mm", output="f32", accumulate="reduces"
        ),
        sm90_half_swapped.make_params(sm90_half_swapped.make_config(16)),
        sm90_half_swapped.make_params(
            sm90_half_swapped.make_config(24, 2, 2), majors="km", dtype="f16", output="f16", accumulate="reads"
        ),
        sm90_half_turned.make_params(sm90_half_turned.make_config(136, 256, (2, 1, 1))),
        sm90_half_turned.make_params(sm90_half_turned.make_config(72, 64), majors="km", dtype="f16", output="f16"),
        sm90_fp8_rows.KERNEL.cases()[-1],
        sm90_fp8_scaled.make_params(sm90_fp8_scaled.make_config(128, 160)),
        sm90_fp8_scaled.make_params(
            sm90_fp8_scaled.make_config(128, 128, (1, 2)), scaling="rowwise", output="bf16", accumulate="reads"
        ),
        sm90_fp8_scaled_swapped.make_params(sm90_fp8_scaled_swapped.make_config(16)),
        sm90_fp8_scaled_swapped.make_params(
            sm90_fp8_scaled_swapped.make_config(24, 2, 2), scaling="1d2d", output="f32", accumulate="reads"
        ),
        sm90_fp8_grouped.make_params(sm90_fp8_scaled.make_config(128, 128), grouping="masked"),
        sm90_half_grouped.make_params(sm90_half_gemm.make_config(64, 64), majors="km"),
        quantize.KERNEL.cases()[0],
        next(params for params in quantize.KERNEL.cases() if "silu" in quantize.KERNEL.entry(params)),
        *transpose_bytes.KERNEL.cases(),
        *transpose_scales.KERNEL.cases(),
        *copy_rows.KERNEL.cases(),
    ]


def golden_renders() -> Iterator[tuple[Path, str]]:
    """The file and the source of each."""
    for params in golden_params():
        yield FOLDER / f"{kernels.get(params.kernel).entry(params)}.cu", build_request(params).source


def write() -> None:
    """Write the folder again, and delete files of kernels that are no longer listed."""
    renders = dict(golden_renders())
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.cu"):
        if path not in renders:
            path.unlink()
    for path, source in renders.items():
        path.write_text(source)


if __name__ == "__main__":
    write()
