"""The rules of a device template: which tiles it has, and what they take; its parameters, constants and launch.

A family (``gemm.py``) is a template, and a row of what is supported. What templates for one architecture share is in a
folder of its own, such as ``hopper``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from ..arch import ArchSpec
from ..jit.binary import PostPass
from ..params import GemmConfig, KernelParams
from ..spec import GemmSpec, Operand
from . import groups
from .base import Argument, Numbers, Strides, Value
from .features import Costs

BYTES = {"e4m3": 1, "e5m2": 1, "bf16": 2, "f16": 2, "f32": 4}

NAMES = {
    "e4m3": "fp8",
    "bf16": "bf16",
    "f16": "fp16",
    "none": "",
    "threads": "add",
    "tma": "reduce",
}
"""In names of kernels: dtypes that are called differently there, and ways to add C."""

_HEADS = {
    "none": "",
    "k": "k_grouped",
    "batched": "batched",
    "heads": "skip_head_mid",
    "summed": "bmn_bnk_mn_gemm_impl",  # profilers of DeepGEMM's callers look for this name
}
"""The beginnings of kernels' names, by the form of groups; that of all others is ``m_grouped``."""

Constants: TypeAlias = Mapping[str, str | int | bool]
Grid: TypeAlias = tuple[int, int, int]


class Template(ABC):
    """One ``templates/kernels/*.cu.jinja`` of a GEMM. Configs are those of the families that use it."""

    file: ClassVar[str]
    mma_instruction: ClassVar[str] = ""
    """The tensor-core instruction that the SASS must contain; empty for a kernel without one."""
    block_k: ClassVar[int]
    names_partials: ClassVar[bool] = False
    """Whether names of kernels give the sets of partial sums."""
    names_consumers_k: ClassVar[bool] = False
    """Whether names of kernels give the consumers along K."""
    adds_in_memory: ClassVar[bool] = False
    """Whether stores add to a float32 D, so that consumers need not read C."""
    takes_epilogues: ClassVar[bool] = False
    """Whether it has all that `parts.Parts` has, without groups and with groups along M."""
    adds_residuals: bool = True
    """Whether an epilogue may add a residual."""
    starts_early: ClassVar[bool] = False
    """Whether kernels wait for the previous one themselves, so that they may be launched before it has ended."""
    gated: ClassVar[bool] = False
    """Whether B is a gate's rows, and then as many of up."""

    # ---- which configs

    @abstractmethod
    def make(self, family: str, *tile: object, arch: ArchSpec) -> GemmConfig:
        """A config with as many stages as fit. ``tile`` is a row of a serving set."""

    @abstractmethod
    def tiles(self) -> Iterator[tuple[object, ...]]:
        """The arguments of `make` for all configs that may be legal."""

    @abstractmethod
    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, as a sentence, or None if it can."""

    def unreadable(self, name: str, operand: Operand) -> str | None:
        """Why kernels cannot read A or B, as a sentence, or None if they can."""
        return None if operand.aligned else f"the address and the row stride of {name} must be multiples of 16 bytes"

    def fits(self, spec: GemmSpec, config: GemmConfig, adds_c: str, scaling: str) -> bool:
        """Whether the legal config ``config`` can run ``spec``. Only what this template adds to `GemmFamily.fits`."""
        return True

    def finishes(self, config: GemmConfig) -> bool:
        """Whether consumers have registers for an epilogue."""
        return True

    def offered(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> list[GemmConfig]:
        """The configs that the model ranks, of ``configs``, which all fit ``spec``: without any that measurements show
        to be slower than another one. ``serving`` are the rows of the serving set."""
        return list(configs)

    def shipped(
        self, spec: GemmSpec, configs: Sequence[GemmConfig], serving: tuple[tuple[Any, ...], ...]
    ) -> Sequence[GemmConfig]:
        """The configs that a wheel ships for specs like ``spec``, whatever their sizes. With groups, all configs that
        fit, since the choice depends on too many sizes to list."""
        return configs if spec.grouping != "none" else self.offered(spec, configs, serving)

    def yields(self, config: GemmConfig) -> bool:
        """Whether ``config`` does not ship if another family ships the same tile."""
        return False

    def fitted(self, params: KernelParams, table: int, arch: ArchSpec) -> GemmConfig:
        """The config of ``params`` with no more stages than fit beside what these params need, and a table of groups of
        ``table`` bytes."""
        return params.gemm

    @abstractmethod
    def costs(self, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str) -> Costs:
        """What ``config`` costs on the target ``arch``, for the performance model. ``output`` is D's dtype;
        ``aligned``: rows of D begin at multiples of 16 bytes."""

    def speeds(self, spec: GemmSpec) -> str:
        """The name in `select.calibration.NAMED` of the speeds by which the model estimates ``spec``; "" for the common
        ones."""
        return ""

    def parts_of_k(self, spec: GemmSpec) -> int:
        """Parts in which K of ``spec`` is summed under batch invariance."""
        return 1

    # ---- a binary

    @abstractmethod
    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The kernel's parameters in order, but for those of an epilogue."""

    @abstractmethod
    def constants(self, params: KernelParams, given: Constants) -> Constants:
        """The template's variables, but for the kernel's name and signature. ``given`` are what a family knows:
        ``shared_bytes`` with a table of groups; the names ``epilogue`` and ``expression`` of an epilogue's functor; and
        ``argument_fields`` and ``arguments``, the struct of all parameters and what fills it."""

    def name_of_options(self, config: GemmConfig) -> str:
        """What names of kernels say of options that this template alone has; "" if none is set."""
        return ""

    @abstractmethod
    def num_threads(self, config: GemmConfig) -> int:
        """Threads of a CTA."""

    @abstractmethod
    def shared_bytes(self, params: KernelParams) -> int:
        """Dynamic shared memory of one CTA without a table of groups."""

    def post_pass(self, params: KernelParams) -> PostPass | None:
        """The edit of the cubin of ``params`` under the current settings, or None."""
        return None

    # ---- a launch

    def memory_bytes(self, spec: GemmSpec) -> int:
        """Bytes of the operand ``memory``, in which parts of K of ``spec`` meet, at most; 0 if no config needs it."""
        return 0

    def columns_of_d(self, n: int) -> int:
        """Columns of D, where B has ``n`` rows; and those of a tile of D."""
        return n // 2 if self.gated else n

    @abstractmethod
    def launch(
        self, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, early: bool
    ) -> tuple[Grid, dict[str, Value]]:
        """The grid, and the values of `arguments` by name, but for pointers and for the sizes m, n and k. ``early``: no
        kernel that still runs writes the weights, and this one may start before they have ended."""


def kernel_name(params: KernelParams, template: Template, prefix: str, tile_prefix: str) -> str:
    """Such as ``fp8_gemm_128x128_s5_p2_c2x1_tma`` or ``m_grouped_bf16_gemm_nt_128x256_s4_masked_g32_tma``."""
    p, c = params, params.gemm
    head = f"{NAMES.get(p.dtype, p.dtype)}_gemm"
    if p.scaling != "none":
        kind = [prefix or f"{head}_{p.scaling}_{p.output}"]
    else:
        kind = [head, p.form, p.output if p.output != p.dtype else ""]
    k = f"k{c.cluster_k}" + (f"x{c.consumers_k}" if template.names_consumers_k else "")
    parts = [
        _HEADS.get(p.grouping, "m_grouped"),
        *kind,
        NAMES[p.adds_c],
        f"{tile_prefix}{c.block_m}x{c.block_n}_s{c.num_stages}",
        f"p{c.num_partials}" if template.names_partials else "",
        f"c{c.cluster_m}x{c.cluster_n}" if c.cluster_m * c.cluster_n > 1 else "",
        k if c.k_splits > 1 else "",
        f"t{c.in_turn}" if c.in_turn > 1 else "",
        f"r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "",
        "" if c.persistent else "nonpersistent",
        "b1" if c.buffers == 1 else "",
        "parts" if c.parts else "",
        template.name_of_options(c),
        "" if p.grouping in _HEADS else p.grouping,
        f"g{p.segments}" if p.grouping in groups.WITH_TABLE else "",
        re.sub(r"\W", "_", p.epilogue.label) if p.epilogue else "",
        p.store,
        *(f"{letter}{size}" for letter, size in zip("mnk", p.shape, strict=True) if size),
    ]
    return "_".join(filter(None, parts))
