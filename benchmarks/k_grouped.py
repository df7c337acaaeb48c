"""How fast GEMMs grouped along K are, beside DeepGEMM and torch's grouped GEMM, in single calls with a cold L2.

    python -m deep_gemm.benchmarks.k_grouped --output FILE [--deepgemm DIRECTORY]
    python -m deep_gemm.benchmarks.k_grouped --survey --output FILE

They add to float32 D in place. Rows, surveys and options are those of `deep_gemm.benchmarks.grouped`. Needs a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from deep_gemm import grouped
from deep_gemm.backends import deepgemm as theirs
from deep_gemm.benchmarks.grouped import (
    Launch,
    Row,
    arguments,
    begin,
    check_ours,
    comparable,
    configs_lines,
    last_launch,
    make_row,
    survey_of,
)
from deep_gemm.benchmarks.grouped_operands import CHECKED_ROWS, cast, paired, worst
from deep_gemm.benchmarks.grouped_shapes import K_SHAPES, KShape, chosen, words_of
from deep_gemm.ops.k_grouped import BF16, FP8, LAYOUT, KGroupedBF16, KGroupedFP8
from deep_gemm.reference import exact_product
from deep_gemm.spec import SCALE_BLOCK
from deep_gemm.testing import timing


@dataclass
class Operands:
    """The tensors of a call. For FP8, ``a`` and ``b`` hold the groups' K-major matrices one after the other, and
    ``sfa`` and ``sfb`` their MN-major scales. For BF16, they are (K, M) and (K, N)."""

    shape: KShape
    a: Tensor
    b: Tensor
    d: Tensor
    layout: Tensor
    sfa: Tensor | None = None
    sfb: Tensor | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The first two arguments of the public functions, ours and DeepGEMM's."""
        return paired((self.a, self.sfa), (self.b, self.sfb))

    @property
    def name(self) -> str:
        """The name of these functions."""
        return FP8 if self.shape.kind == "fp8" else BF16


def make(shape: KShape, device: str = "cuda") -> Operands:
    """Normal data, quantised for FP8. D is zero."""
    generator = torch.Generator(device).manual_seed(0)
    a, sfa = _operand(shape, shape.m, generator)
    b, sfb = _operand(shape, shape.n, generator)
    d = torch.zeros(shape.groups, shape.m, shape.n, device=device)
    return Operands(shape, a, b, d, torch.tensor(shape.counts, dtype=torch.int32, device=device), sfa, sfb)


def _operand(shape: KShape, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """A or B with M or N ``rows``, and scales for FP8."""
    if shape.kind == "bf16":
        return cast("bf16", shape.k, rows, 1, generator)[0], None
    values = torch.empty(shape.k * rows, dtype=torch.uint8, device=generator.device).view(torch.float8_e4m3fn)
    scales = torch.empty(shape.k // SCALE_BLOCK, rows, device=generator.device)
    start = 0
    for k in shape.counts:
        x, sf = cast("fp8", rows, k, 1, generator)
        values[start * rows : (start + k) * rows] = x.flatten()
        if sf is not None:
            scales[start // SCALE_BLOCK : (start + k) // SCALE_BLOCK] = sf.t()
        start += k
    return values, scales.t()


def ours(x: Operands, on_device: bool = False) -> timing.Call:
    """Our public function, with sizes in a list and on the device, or on the device alone."""
    sizes = None if on_device else list(x.shape.counts)
    return functools.partial(getattr(grouped, x.name), *x.inputs, x.d, sizes, x.layout, x.d)


def deepgemm(x: Operands) -> timing.Call:
    """DeepGEMM's function of the same name."""
    return functools.partial(getattr(theirs.library(), x.name), *x.inputs, x.d, list(x.shape.counts), x.layout, x.d)


def torch_overwrite(x: Operands) -> timing.Call:
    """The easier problem: torch's grouped GEMM writes a bfloat16 result, and adds to nothing."""
    ends = x.layout.cumsum(0).to(torch.int32)
    return functools.partial(torch._grouped_mm, x.a.t(), x.b, offs=ends)


PEERS: dict[str, Callable[[Operands], timing.Call]] = {
    "device_sizes": functools.partial(ours, on_device=True),
    "deepgemm": deepgemm,
    "torch_overwrite": torch_overwrite,
}
"""Each adds to ``d``, or returns its result. The first is ours with sizes on the device alone."""


def peers_of(shape: KShape) -> list[str]:
    """The peers of a shape's kind."""
    return [name for name in PEERS if name != "torch_overwrite" or shape.kind == "bf16"]


def from_exact(x: Operands) -> float:
    """How far the last rows of each group of ``d`` are from the exact product, by `calc_diff`."""
    return worst((x.d[group, -CHECKED_ROWS:], exact) for group, exact in enumerate(_exact(x)))


def _exact(x: Operands) -> Iterator[Tensor]:
    """The last rows of each group's product."""
    m, n, start = x.shape.m, x.shape.n, 0
    for k in x.shape.counts:
        stop = start + k
        if x.sfa is None or x.sfb is None:
            yield x.a[start:stop, -CHECKED_ROWS:].double().t() @ x.b[start:stop].double()
        else:
            a, b = x.a[start * m : stop * m].view(m, k), x.b[start * n : stop * n].view(n, k)
            sfa, sfb = (sf[:, start // SCALE_BLOCK : stop // SCALE_BLOCK] for sf in (x.sfa, x.sfb))
            yield exact_product(a[-CHECKED_ROWS:], sfa[-CHECKED_ROWS:], b, sfb, scaling=("1x128", "1x128"))
        start = stop


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference of results (groups, M, N) by `calc_diff`. It is taken of a few rows at a time, so that it
    shows a tile of zeros."""
    rows = (x.flatten(0, 1).split(CHECKED_ROWS) for x in (one, other))
    return worst(zip(*rows, strict=True))


def measure(shape: KShape) -> Row:
    """Time ours and every peer that can run the shape. Raises DeepGemmError if our result is wrong. Each is checked
    after one call, which adds to zeros; timed calls go on adding."""
    x = make(shape)
    mine = ours(x)
    mine()
    check_ours(from_exact(x))
    result = x.d.clone()
    peers = {name: functools.partial(PEERS[name], x) for name in peers_of(shape)}
    calls, refused = comparable(peers, x.d.zero_, lambda _, found: apart(result, x.d if found is None else found))
    return make_row(shape, timing.flush({"ours": mine, **calls}), refused)


def launch_of(x: Operands, device: int) -> Launch:
    """What a call of ours launches last. For FP8, tensor maps are made before it, here."""
    operation = (KGroupedFP8 if x.shape.kind == "fp8" else KGroupedBF16)(accumulates=True)
    a, b = x.inputs
    return last_launch(operation, {"a": a, "b": b, "c": x.d, "d": x.d, LAYOUT: x.layout}, device)


def measure_configs(shape: KShape) -> Row:
    """See `survey_of`."""
    x = make(shape)
    return survey_of(shape, x, launch_of(x, torch.cuda.current_device()))


@click.command()
@arguments(words_of(K_SHAPES))
def main(output: Path | None, directory: Path | None, only: tuple[str, ...], seconds: float, configs: bool) -> None:
    """Time GEMMs grouped along K beside DeepGEMM and torch's grouped GEMM, in single calls with a cold L2."""
    shapes = chosen(only, K_SHAPES)
    if not shapes:
        raise click.ClickException("No shape is in all that --only names.")
    session = begin(output, directory, seconds)
    if configs:
        session.lines(shapes, measure_configs, configs_lines)
    else:
        session.table(shapes, measure, tuple(PEERS))
    session.end()


if __name__ == "__main__":
    main()
