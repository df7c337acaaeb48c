"""Launches of FP8 GEMMs for any geometry, without a driver: the arguments that it would get."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from chosen import FAMILIES, PLAIN, argument_names, make_params
from hypothesis import strategies as st

from deep_gemm import kernels, ops
from deep_gemm.arch import SM90
from deep_gemm.jit.driver.launch import Arg, placed
from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels.base import LaunchPlan, Strides
from deep_gemm.params import GemmConfig, KernelParams
from deep_gemm.spec import GemmSpec, align, ceil_div

CONFIGS: list[GemmConfig] = [config for family in FAMILIES for config in family.legal(SM90)]
AT = {"a": 0x1000, "sfa": 0x2000, "b": 0x3000, "sfb": 0x4004, "d": 0x5000}

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 9000), st.sampled_from([1 << 17, (1 << 20) + 1]))


@dataclass(frozen=True)
class Geometry:
    """Sizes and strides, in elements; strides of 0 are those of dense operands."""

    m: int
    n: int
    k: int
    stride_a: int = 0
    stride_b: int = 0
    stride_d: int = 0
    stride_sfa: int = 0
    stride_sfb: tuple[int, int] = (0, 0)

    @property
    def strides(self) -> Strides:
        """The strides in the form of a launch."""
        return {
            "a": (self.stride_a or self.k, 1),
            "sfa": (1, self.stride_sfa or align(self.m, 4)),
            "b": (self.stride_b or self.k, 1),
            "sfb": self.stride_sfb if any(self.stride_sfb) else (ceil_div(self.k, 128), 1),
            "d": (self.stride_d or align(self.n, 8), 1),
        }

    def spec(self, params: KernelParams) -> GemmSpec:
        """The spec that ``params`` compute for this geometry."""
        made = ops.spec(self.m, self.n, self.k, 132)
        return replace(made, d=replace(made.d, aligned=params.store == "tma"))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    m, n, k = draw(SIZES), draw(SIZES), 16 * draw(st.integers(1, 1200))
    pad = st.sampled_from([0, 0, 1, 7])
    return Geometry(
        m=m,
        n=n,
        k=k,
        stride_a=k + 16 * draw(pad),
        stride_b=k + 16 * draw(pad),
        stride_d=align(n, 8) + 8 * draw(pad),
        stride_sfa=align(m, 4) + 4 * draw(pad),
        stride_sfb=draw(st.sampled_from([(ceil_div(k, 128), 1), (1, ceil_div(n, 128)), (300, 2)])),
    )


PARAMS = st.builds(
    make_params,
    st.one_of(st.sampled_from(PLAIN.legal(SM90)), st.sampled_from(CONFIGS)),
    st.sampled_from(["tma", "tma", "direct"]),
)


def suited(g: Geometry, params: KernelParams) -> Geometry:
    """``g``, with N rounded to a multiple of eight where CTAs of one tile copy D in such pieces."""
    return g if params.gemm.persistent or params.store == "direct" else replace(g, n=align(g.n, 8))


@dataclass(frozen=True)
class Recorded:
    """The arguments of a launch, and the tensor maps that it made, (spec, address), by the parameters' names."""

    args: dict[str, Arg]
    maps: dict[str, tuple[TensorMapSpec, int]]


@contextmanager
def encoder() -> Iterator[list[tuple[TensorMapSpec, int]]]:
    """A fake encoder: each map is its own number."""
    made: list[tuple[TensorMapSpec, int]] = []

    def encode(spec: TensorMapSpec, address: int) -> bytes:
        made.append((spec, address))
        return bytes([len(made)]) + bytes(127)

    with mock.patch.object(TensorMapSpec, "encode", encode):
        yield made


def plan_of(params: KernelParams, g: Geometry, pdl: bool = False) -> LaunchPlan:
    return kernels.get(params.kernel).launch_plan(params, g.spec(params), g.strides, pdl)


def record(params: KernelParams, g: Geometry) -> Recorded:
    plan = plan_of(params, g)
    with encoder() as made:
        args = dict(zip(argument_names(params), placed(plan.parameters, AT), strict=True))
    places = {name: arg[0] - 1 for name, arg in args.items() if isinstance(arg, bytes) and arg[0]}
    return Recorded(args, {name: made[which] for name, which in places.items()})
