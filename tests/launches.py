"""Launches of the FP8 GEMM for any geometry, without a driver: what would be passed to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from golden_renders import PLAIN, SWAPPED, make_params
from hypothesis import strategies as st

from deep_gemm import arch
from deep_gemm.engine import build_request
from deep_gemm.jit.driver.launch import Arg, LaunchShape, placed
from deep_gemm.jit.driver.tensor_map import TensorMapSpec
from deep_gemm.kernels.columns import segments
from deep_gemm.kernels.sm90_fp8_launch import Addresses, Geometry, launch
from deep_gemm.params import FP8Config, KernelParams, SwappedConfig, align, ceil_div

UNSWAPPED: list[FP8Config] = list(PLAIN.configs(arch.SM90))
CONFIGS: list[FP8Config] = [*UNSWAPPED, *SWAPPED.configs(arch.SM90)]
AT = Addresses(a=0x1000, sfa=0x2000, b=0x3000, sfb=0x4004, d=0x5000)

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 9000), st.sampled_from([1 << 17, (1 << 20) + 1]))


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
    make_params, st.one_of(*map(st.sampled_from, (UNSWAPPED, CONFIGS))), st.sampled_from(["", "", "direct"])
)


def suited(g: Geometry, params: KernelParams) -> Geometry:
    """``g``, with whole blocks of K where a stage holds several of them, and whole pieces of eight columns where CTAs
    of one tile copy them."""
    config = fp8(params)
    if not config.persistent and params.store == "tma":
        g = replace(g, n=align(g.n, 8))
    if config.stage_blocks == 1:
        return g
    k = align(g.k, 128)
    return replace(g, k=k, stride_a=k + g.stride_a - g.k, stride_b=k + g.stride_b - g.k)


def maps_output(params: KernelParams) -> bool:
    """Whether a launch makes a tensor map of D: where a warp brings tiles there by TMA."""
    config = fp8(params)
    return params.store == "tma" and config.persistent and not isinstance(config, SwappedConfig)


@dataclass(frozen=True)
class Recorded:
    """A launch, and the tensor maps that it made: (spec, address) by their place among the arguments."""

    shape: LaunchShape
    args: list[Arg]
    maps: dict[int, tuple[TensorMapSpec, int]]


@contextmanager
def encoder() -> Iterator[list[tuple[TensorMapSpec, int]]]:
    """In place of the driver's: each map is its own number."""
    made: list[tuple[TensorMapSpec, int]] = []

    def encode(spec: TensorMapSpec, address: int) -> bytes:
        made.append((spec, address))
        return bytes([len(made)]) + bytes(127)

    with mock.patch.object(TensorMapSpec, "encode", encode):
        yield made


def launch_at(
    params: KernelParams, geometry: Geometry, at: Addresses, num_sms: int, pdl: bool, constant_b: bool = False
) -> tuple[LaunchShape, list[Arg]]:
    """Launch shape and arguments with operands there."""
    shape, parameters = launch(params, geometry, num_sms, pdl, constant_b)
    return shape, placed(parameters, vars(at))


def record(params: KernelParams, geometry: Geometry, num_sms: int = 132, pdl: bool = False) -> Recorded:
    with encoder() as made:
        shape, args = launch_at(params, geometry, AT, num_sms, pdl)
    places = {index: arg[0] - 1 for index, arg in enumerate(args) if isinstance(arg, bytes) and arg[0]}
    return Recorded(shape, args, {index: made[which] for index, which in places.items()})


def fp8(params: KernelParams) -> FP8Config:
    assert isinstance(params.config, FP8Config)
    return params.config


def parameters(params: KernelParams) -> list[tuple[str, str]]:
    """(type, name) of the kernel's parameters, from its source."""
    request = build_request(params)
    found = re.search(rf"{request.name}\(([^)]*)\)", request.source)
    assert found is not None
    return [tuple(part.strip().rsplit(" ", 1)) for part in found.group(1).replace("\n", " ").split(",")]  # type: ignore[misc]


def parameter_names(params: KernelParams) -> list[str]:
    config = params.config
    parts = len(segments(config.block_n)) if isinstance(config, FP8Config) else 1
    extra = isinstance(config, FP8Config) and config.block_m % 64 > 0
    key = params.kernel, getattr(config, "stream_k", False), extra, parts
    names = NAMES.get(key)
    if names is None:
        names = NAMES[key] = [name for _, name in parameters(params)]
    return names


NAMES: dict[tuple[str, bool, bool, int], list[str]] = {}


def map_places(params: KernelParams) -> dict[str, int]:
    """Where the tensor maps are among the arguments."""
    return {name: place for place, name in enumerate(parameter_names(params)) if name.startswith("map_")}
