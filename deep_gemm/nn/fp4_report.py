"""What FP8 would hold of the MXFP4 weights of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deep_gemm import quantize
from deep_gemm.aot import headers, scales
from deep_gemm.aot.headers import Stored
from deep_gemm.errors import InvalidInputError
from deep_gemm.log import counted
from deep_gemm.nn.checkpoint import read
from deep_gemm.ops import mxfp4


@dataclass(frozen=True)
class FP8Report:
    """Of each MXFP4 weight of a checkpoint, by name: ``blocks`` of 128 x 128, and those of them that
    `quantize.mxfp4_to_fp8` would round, since their exponents span more than 14. ``print(report)`` sums them up.

    >>> print(deep_gemm.nn.FP8Report({"w1": 8}, {"w1": 2}))
    1 MXFP4 weight: FP8 with 128 x 128 scales would round values of 2 of 8 blocks, in 1 weight; most in w1, 2.
    """

    blocks: dict[str, int]
    rounded: dict[str, int]

    def __str__(self) -> str:
        found = [name for name, count in self.rounded.items() if count]
        total, lost = sum(self.blocks.values()), sum(self.rounded.values())
        if not found:
            return f"{counted(len(self.blocks), 'MXFP4 weight')}: FP8 with 128 x 128 scales holds all exactly."
        worst = max(found, key=lambda name: self.rounded[name])
        return (
            f"{counted(len(self.blocks), 'MXFP4 weight')}: FP8 with 128 x 128 scales would round values of {lost} of "
            f"{total} blocks, in {counted(len(found), 'weight')}; most in {worst}, {self.rounded[worst]}."
        )


def check_mxfp4(path: str | Path) -> FP8Report:
    """Say which MXFP4 weights of a checkpoint FP8 would round: a safetensors file, an index, or a directory.

    Weights are read one after the other, on the CPU. Nothing is changed. Raises InvalidInputError if there are none.

    >>> from safetensors.torch import save_file
    >>> packed, scales = deep_gemm.quantize.mxfp4(torch.ones(128, 256))
    >>> save_file({"experts.0.w1.weight": packed, "experts.0.w1.scale": scales}, "layer.safetensors")
    >>> print(deep_gemm.nn.check_mxfp4("layer.safetensors"))
    1 MXFP4 weight: FP8 with 128 x 128 scales holds all exactly.
    """
    path = Path(path)
    directory = path if path.is_dir() else path.parent
    places, found = dict[str, str](), dict[str, Stored]()
    for file in headers.listed(path)[1]:
        inside = headers.header(directory / file)
        places |= dict.fromkeys(inside, file)
        found |= inside
    blocks, rounded = dict[str, int](), dict[str, int]()
    for name in found:
        if (scale := _scale_of(name, found)) is not None:
            tensors = dict(read(directory, {each: places[each] for each in (name, scale)}))
            counts = quantize.mxfp4_rounded(tensors[name], tensors[scale])
            blocks[name], rounded[name] = counts.numel(), int((counts > 0).sum())
    if not blocks:
        raise InvalidInputError(f"{path} has no MXFP4 weights: uint8 or int8, with a scale for 32 values.")
    return FP8Report(blocks, rounded)


def _scale_of(name: str, found: dict[str, Stored]) -> str | None:
    """The scales of an MXFP4 weight; None for other tensors."""
    x = found[name]
    if x.dtype not in ("U8", "I8"):
        return None
    if name.endswith("_blocks"):
        scale = f"{name.removesuffix('_blocks')}_scales"
        return scale if scale in found and x.shape[:-1] == found[scale].shape else None
    base = name.rpartition(".")[0]
    own = scales.name_of(found, f"{base}.") if name.endswith((".weight", ".weight_packed")) else None
    fits = own is not None and len(x.shape) > 1 and found[own].shape == (*x.shape[:-1], 2 * x.shape[-1] // mxfp4.BLOCK)
    return own if fits else None
