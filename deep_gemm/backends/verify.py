"""A check of all kernels that a GPU has, for `deep-gemm doctor --verify`: are they right, and how fast are they?

Casts give the same bytes as torch does on the CPU. Every operation that backends can have is compared with its result
in float64, within the bounds of `testing.accuracy`, and timed beside cuBLASLt. Then each family of products is forced,
with several of its tiles, and must give the same bits twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import arch as archs
from .. import kernels, options, quantize
from ..arch import ArchSpec
from ..errors import DeepGemmError, UnsupportedError
from ..kernels.gemm import GemmFamily
from ..params import GemmConfig
from ..runtime import engine
from ..settings import settings
from ..spec import GemmSpec
from .accuracy import examine
from .fp4_operations import Fp4GroupedOperation, Fp4Operation
from .operations import PackedOperation
from .registry import Dims, Operation, get_kernel, get_operation, operation_names
from .results import Result
from .runner import compare

SECONDS = 100.0
"""No part begins later than this."""

OURS, THEIRS = "cuda", "cublaslt"

SIZES: Mapping[tuple[str, ...], tuple[Dims, ...]] = {
    ("M", "N", "K"): ((16, 4096, 4096), (2048, 4096, 4096)),
    ("groups", "mean rows", "N", "K"): ((8, 12, 2048, 2048), (8, 200, 2048, 2048)),
    ("groups", "mean K", "M", "N"): ((4, 512, 1024, 2048),),
    ("rows", "heads", "K", "N"): ((16, 8, 1024, 512), (512, 8, 1024, 512)),
    ("queries", "keys"): ((256, 4096),),
    ("requests", "tokens", "keys"): ((16, 1, 4096),),
    ("M", "K"): ((512, 7168),),
    ("M", "N"): ((2048, 4096),),
}
"""The shapes of each kind of operation: few rows, and many. Float64 is slow on most cards."""

FORCED: Mapping[tuple[str, ...], tuple[Dims, ...]] = {
    ("M", "N", "K"): ((137, 520, 528), (13, 520, 1040)),
    ("groups", "mean rows", "N", "K"): ((3, 70, 520, 640),),
    ("groups", "mean K", "M", "N"): ((3, 200, 264, 520),),
    ("rows", "heads", "K", "N"): ((37, 3, 256, 128),),
}
"""Shapes with ragged edges, in which families are forced. Some take few rows only."""

PACKED = PackedOperation()
NOT_OF_FAMILIES = Fp4Operation, Fp4GroupedOperation
"""Operations that no family of GEMMs computes."""

TILES = 4
"""Tiles of a family that are forced for an operation, from the smallest to the largest."""

CASTS: Mapping[str, Callable[[Tensor], Any]] = {
    "rows": quantize.rows,
    "rows, powers of two": lambda x: quantize.rows(x, use_ue8m0=True),
    "rows, gated": lambda x: quantize.rows(x, gated=True),
    "columns": quantize.columns,
    "rows and columns": quantize.rows_and_columns,
    "blocks": quantize.blocks,
    "blocks and their transpose": quantize.blocks_and_transpose,
}


@dataclass
class Family:
    """A family that was forced: how many calls were right, the largest error as a part of its bound, and what was
    wrong."""

    name: str
    calls: int = 0
    of_allowed: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What was found. ``casts`` and ``wrong_casts`` are numbers of casts, and sentences."""

    arch: str
    ours: str = OURS
    """The backend that was checked."""
    casts: int = 0
    wrong_casts: list[str] = field(default_factory=list)
    rows: list[Result] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """What there was no time for."""
    seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """Every fault, as a sentence."""
        bad = [row for row in self.rows if row.backend == self.ours and row.status in ("wrong", "failed")]
        found = [f"{row.op} {row.shape}: {row.why}" for row in bad]
        return [*self.wrong_casts, *found, *(f"{each.name}: {why}" for each in self.families for why in each.wrong)]

    @property
    def refused(self) -> dict[str, str]:
        """The operations that this GPU has no kernel for, and why."""
        return {row.op: row.why for row in self.rows if row.status == "skipped" and row.backend == self.ours}


def verify(
    device: torch.device,
    arch: ArchSpec,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda text: None,
    ours: str = OURS,
    sizes: Mapping[tuple[str, ...], tuple[Dims, ...]] = SIZES,
) -> Report:
    """Check the kernels for ``arch`` on ``device``. ``ours``: the backend that is checked."""
    start, report = time.monotonic(), Report(arch.name, ours)
    with settings.override(fallback=()):  # what falls back would check the reference
        for name, cast in CASTS.items():
            progress(f"casts: {name}")
            _check_cast(report, name, cast, device)
        for op in operation_names():
            _compare(report, op, device, ours, sizes, start + seconds, progress)
        for family in kernels.gemms().values() if ours == OURS else ():
            if arch.name in family.archs:
                _force(report, family, device, arch, start + seconds, progress)
    report.seconds = time.monotonic() - start
    return report


def _check_cast(report: Report, name: str, cast: Callable[[Tensor], Any], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, columns in ((257, 896), (64, 1024)):
            x = torch.randn(rows, columns, generator=generator).mul(8).to(dtype)
            try:
                found, exact = _flat(cast(x.to(device))), _flat(cast(x))
            except DeepGemmError as error:
                report.wrong_casts.append(f"cast of {name} from {dtype}: {error}")
                continue
            report.casts += 1
            if not all(torch.equal(_bits(mine), _bits(other)) for mine, other in zip(found, exact, strict=True)):
                report.wrong_casts.append(f"cast of {name} from {dtype}, {rows}x{columns}: other bytes than torch's")


def _flat(x: Any) -> list[Tensor]:
    return [x.cpu()] if isinstance(x, Tensor) else [each for part in x for each in _flat(part)]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _compare(
    report: Report,
    op: str,
    device: torch.device,
    ours: str,
    sizes: Mapping[tuple[str, ...], tuple[Dims, ...]],
    end: float,
    progress: Callable[[str], None],
) -> None:
    """One operation beside cuBLASLt, in each of its shapes."""
    if time.monotonic() > end:
        report.late.append(op)
        return
    found = compare(op, sizes[get_operation(op).dims], [ours, THEIRS], device=str(device), progress=progress)
    report.rows += [row for row in found.results if row.backend == ours or row.timing is not None]


def _force(
    report: Report,
    family: GemmFamily,
    device: torch.device,
    arch: ArchSpec,
    end: float,
    progress: Callable[[str], None],
) -> None:
    """Calls of each operation that the family can compute, with some of its tiles."""
    found = Family(family.name)
    configs = sorted(family.configs(arch), key=lambda config: math.prod(config.tile))
    steps = {round(index * (len(configs) - 1) / (TILES - 1)) for index in range(TILES)}
    every = [(op, dims) for op in map(get_operation, operation_names()) for dims in FORCED.get(op.dims, ())]
    every = [(op, dims) for op, dims in every if not isinstance(op, NOT_OF_FAMILIES)]
    packed = "ue8m0" in family.scalings
    every += [(PACKED, dims) for dims in FORCED[PACKED.dims] if packed]
    for op, dims in every:
        if found.calls >= 2 * TILES * (1 + packed):
            break
        if time.monotonic() > end:
            report.late.append(family.name)
            break
        progress(f"{family.name}: {_name(op)}")
        for result in _forced(op, dims, device, family, [configs[index] for index in sorted(steps)], arch):
            found.calls += 1
            if isinstance(result, str):
                found.wrong.append(result)
            else:
                found.of_allowed = max(found.of_allowed, result)
    report.families.append(found)


def _forced(
    op: Operation, dims: Dims, device: torch.device, family: GemmFamily, configs: list[GemmConfig], arch: ArchSpec
) -> Iterator[float | str]:
    """For each config that can compute the operation: the error as a part of its bound, or what is wrong."""
    operands = op.make(dims, device)
    try:
        with options.only(configs.__contains__):
            _result(op, operands)
            specs = [spec for spec in engine.planned() if isinstance(spec, GemmSpec)]
    except UnsupportedError:
        return
    able = [(spec, config) for spec in specs for config in configs if family.fits(spec, config)]
    with ThreadPoolExecutor() as pool:  # so that calls find them on disk
        list(pool.map(lambda each: engine.build(family.params(each[0], each[1], arch)), able))
    exact = allowed = None
    for config in dict.fromkeys(config for _, config in able):
        where = f"{_name(op)} {'x'.join(map(str, dims))} in {config}"
        try:
            with options.only(config.__eq__):
                results = [_result(op, operands) for _ in range(2)]
        except UnsupportedError:
            continue
        except (DeepGemmError, RuntimeError) as error:
            yield f"{where}: {type(error).__name__}: {error}"
            return  # the GPU may take no more work
        if exact is None or allowed is None:
            exact = op.exact(*operands)
            allowed = op.allowed(exact, *operands)
        accuracy = examine(results[0], exact, allowed)
        if not accuracy.right:
            yield f"{where}: {accuracy.fault}"
        elif not torch.equal(_bits(results[0]), _bits(results[1])):
            yield f"{where}: the second call gave other bits"
        else:
            yield accuracy.of_allowed


def _name(op: Operation) -> str:
    return f"{op.name} with scales of UE8M0" if op is PACKED else op.name


def _result(op: Operation, operands: tuple[Any, ...]) -> Tensor:
    """A copy of the result of one call, whose output was filled with NaN."""
    op.output(operands).fill_(float("nan"))
    get_kernel(OURS, op.name)(*operands)
    torch.cuda.synchronize()
    return op.result(operands).clone()


def arch_here() -> ArchSpec:
    """The architecture of the current CUDA device. Raises UnsupportedError without one, and for one that is not
    supported."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "There is no GPU here, and --verify runs kernels on one. On this machine `make test-all` compiles every "
            "kernel, and runs some on the CPU."
        )
    return archs.for_device(torch.cuda.current_device())
