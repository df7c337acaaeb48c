"""The kernels that a wheel can ship: all that calls with default options can need, on every GPU model.

Nothing here names a kernel. Products come from the table of operations, and their kernels from the families' serving
sets: whatever the selector prefers, its choice is one of them. A default call uses D as a layer does, or as the table
says that others do. It has no epilogue and no operand in E5M2, and compiles no sizes in. Its operands may have any
layout that there are kernels for. A layer's D may have any address; the rows of another D begin at multiples of 16
bytes.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from deep_gemm import arch as archs
from deep_gemm import kernels, ops
from deep_gemm.aot.build import cpus
from deep_gemm.aot.outcomes import Outcome, Progress
from deep_gemm.arch import ArchSpec
from deep_gemm.errors import CompilerNotFoundError, InvalidInputError, UnsupportedError
from deep_gemm.jit.binary import packed
from deep_gemm.jit.builder import Builder
from deep_gemm.jit.cache import solid_writer
from deep_gemm.jit.cache.packable import Packable, PackedKernel
from deep_gemm.jit.compilers import FoundCompiler, Nvrtc, find_all
from deep_gemm.kernels import groups
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.params import GemmConfig, KernelParams
from deep_gemm.runtime import engine
from deep_gemm.settings import settings
from deep_gemm.spec import GemmSpec, Major

TOOLKIT = 12
"""The major version of the toolkit whose compiler is used: every driver that supports a newer one loads its cubins."""

MOST_BYTES = 5_280_000
"""The largest pack, so that the wheel, whose other files take 0.76 MB, has about 6 MB."""

MOST_ENTRIES = 512
"""Entries of the largest table of groups for which kernels ship: 256 groups whose rows have labels, 512 others. More
are left to the JIT: each size of the table is a kernel of its own, and no public model has so many experts on a GPU."""

SIZES = ((64, 512, 8192), (256, 512, 8192), (8192, 8192, 8192))
"""M, N and K. Tiles that are not persistent need few, and splits of K much K. Of 16-bit tiles up to 64 rows rank others
than more rows. All others take any size."""

MAJORS: tuple[Major, ...] = ("k", "mn")


def kernels_of(arch: str = archs.DEFAULT.name) -> list[KernelParams]:
    """All kernels that ship, those of a family next to each other."""
    spec = archs.get(arch)
    found: dict[KernelParams, None] = {}
    for op in (each for each in ops.table.PRODUCTS if each not in ops.ROWWISE_E5M2):
        for asked in (*specs(op, spec), *specs_in_parts(op, spec)):
            for family, config in ranked(asked, spec):
                found[family.params(asked, config, spec)] = None
    for kernel in kernels.registry().values():
        found |= dict.fromkeys(kernel.default_cases(spec) if arch in kernel.archs else ())
    return sorted(found, key=lambda params: (params.kernel, str(params)))


def ranked(asked: GemmSpec, arch: ArchSpec) -> list[tuple[GemmFamily, GemmConfig]]:
    """The kernels that the selector may choose for sizes such as those of ``asked``; see `Template.shipped`."""
    found: list[tuple[GemmFamily, GemmConfig]] = []
    for family in kernels.for_spec(asked, arch):
        configs: Sequence[GemmConfig] = family.fitting(asked, family.configs_for(asked, arch))
        found += [(family, config) for config in family.template.shipped(asked, configs, family.serving)]
    plain = {_place(config) for _, config in found if not config.swap_ab}
    return [(family, c) for family, c in found if not family.template.yields(c) or _place(c) not in plain]


def _place(config: GemmConfig) -> tuple[tuple[int, int], int, int]:
    return config.tile, config.cluster_m, config.cluster_n


def specs(op: str, arch: ArchSpec) -> Iterator[GemmSpec]:
    """A spec of each kind of default calls of ``op`` that there are kernels for."""
    product = ops.table.PRODUCTS[op]
    tables = {groups.segments(product.grouping, count): count for count in range(1, MOST_ENTRIES + 1)}
    counts = [count for entries, count in tables.items() if entries <= MOST_ENTRIES]
    uses = [(use, aligned) for use in product.uses for aligned in (True, False) if aligned or use not in product.others]
    every = itertools.product(uses, itertools.product(MAJORS, repeat=2), counts, SIZES)
    for (use, aligned), majors, count, (m, n, k) in every:
        if use.majors not in (None, majors):
            continue
        how: dict[str, Any] = {"majors": majors, "output": use.output, "accumulate": use.accumulate, "aligned": aligned}
        asked = ops.spec(m, n, k, arch.num_sms, op, groups=count, expected_m=m, **how)
        try:
            kernels.for_spec(asked, arch)
        except UnsupportedError:
            continue
        yield asked


def specs_in_parts(op: str, arch: ArchSpec) -> Iterator[GemmSpec]:
    """The same under batch invariance for each number of parts of K, with the D of a layer; see `Template.parts_of_k`.
    Other kernels for it ship, since they are in the serving set, or are left to the JIT."""
    if op in (ops.table.FP8, ops.table.BF16):
        for m, n in itertools.product((64, 256), (512, 2048)):
            yield replace(ops.spec(m, n, 8192, arch.num_sms, op), batch_invariant=True)


def write(
    path: Path,
    found: Iterable[KernelParams] | None = None,
    root: Path | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[PackedKernel]:
    """Compile the kernels ``found``, all that ship by default, and write them to the pack ``path``; returns what it
    holds. The same sources and the same build of NVRTC give the same bytes, whatever the settings of this process.

    Args:
        root: a cache directory that keeps the compiled kernels, and has some perhaps; a temporary one if it is None.
        jobs: threads that compile at once; the CPUs that this process may use if it is None.
        progress: called as `progress(outcome, done, total)` after each kernel.

    Raises CompilerNotFoundError if there is no NVRTC 12, CompileError, and InvalidInputError if the pack would be too
    large or cannot be written.
    """
    wanted = list(kernels_of() if found is None else found)
    usual = {"debug": False, "lineinfo": False, "ffma_bursts": True, "dump_ptx": False, "dump_asm": False}
    usual |= {"dump_sass": False, "forbid_compile": False}
    contents: list[Packable] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = root or Path(scratch)
        with settings.override(shipped=False, precompiled=(), cache_dir=root, cache_limit=None, **usual):
            builder = Builder(root, _nvrtc())

            def build(params: KernelParams) -> tuple[Outcome, Packable]:
                request = engine.build_request(params)
                binary = builder.build(request)
                return Outcome(binary.name, (), params, binary), packed(binary, request)

            with ThreadPoolExecutor(jobs or cpus()) as pool:
                try:
                    for outcome, content in pool.map(build, wanted):
                        contents.append(content)
                        if progress is not None:
                            progress(outcome, len(contents), len(wanted))
                finally:
                    pool.shutdown(cancel_futures=True)
    try:
        families = itertools.groupby(zip(wanted, contents, strict=True), key=lambda each: each[0].kernel)
        listed = solid_writer.write(path, [[content for _, content in family] for _, family in families])
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"path: the pack {path} cannot be written: {error}.") from error
    if (size := path.stat().st_size) > MOST_BYTES:
        raise InvalidInputError(
            f"found has {len(listed)} kernels, whose pack {path} has {size} bytes, but {MOST_BYTES} is the limit for a "
            "wheel. Leave rare ones to the JIT: narrow what deep_gemm.aot.shipped lists."
        )
    return listed


def _nvrtc() -> Nvrtc:
    """The newest NVRTC of this machine whose cubins every driver for Hopper loads."""
    known = [one for one in find_all() if one.kind == "nvrtc" and one.version.startswith(f"{TOOLKIT}.")]
    if not known:
        raise CompilerNotFoundError(
            f"Shipped kernels are compiled by NVRTC {TOOLKIT}, so that drivers of CUDA {TOOLKIT} load them, and none "
            f"is here. Install it with `pip install nvidia-cuda-nvrtc-cu{TOOLKIT}`."
        )

    def version(one: FoundCompiler) -> tuple[int, int]:
        major, minor = one.version.split(".")[:2]
        return int(major), int(minor)

    newest = max(known, key=version)
    return Nvrtc(newest.path, version(newest))
