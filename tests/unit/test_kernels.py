"""The contract of the kernel modules with templates, builder and launcher, without compiling."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from chosen import FAMILIES, PLAIN, SWAPPED, find_config, make_params
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import arch, kernels, ops, select
from deep_gemm.arch import SM90
from deep_gemm.engine import build_request
from deep_gemm.errors import UnsupportedError
from deep_gemm.jit.builder import BuildRequest
from deep_gemm.jit.generator import variables
from deep_gemm.kernels import copy_rows, transpose_bytes, transpose_scales
from deep_gemm.kernels.base import Kernel
from deep_gemm.kernels.fp8 import turns
from deep_gemm.kernels.scaled import SCALINGS
from deep_gemm.params import (
    FP8Config,
    GemmConfig,
    SwappedConfig,
    UprightConfig,
)
from deep_gemm.spec import CopySpec, GemmSpec, Operand, TransposeBytesSpec, TransposeSpec

CONFIGS: list[FP8Config] = [config for family in FAMILIES for config in family.legal(SM90)]
SERVING: list[FP8Config] = [config for family in FAMILIES for config in family.configs(SM90)]


@pytest.fixture(params=sorted(kernels.registry()))
def kernel(request: pytest.FixtureRequest) -> Kernel[Any]:
    return kernels.get(request.param)


def test_the_registry_finds_every_module_with_a_kernel() -> None:
    gemms = {
        "sm90_fp8_gemm",
        "sm90_fp8_swapped",
        "sm90_fp8_rows",
        "sm90_fp8_scaled",
        "sm90_fp8_scaled_swapped",
        "sm90_half_gemm",
        "sm90_half_swapped",
        "sm90_half_turned",
        "sm90_fp8_grouped",
        "sm90_half_grouped",
        "sm90_fp8_k_grouped",
        "sm90_half_k_grouped",
    }
    assert (
        gemms | {"k_group_maps", "transpose_scales", "transpose_bytes", "copy_rows", "quantize"}
        == kernels.registry().keys()
    )
    assert all(name == kernel.name for name, kernel in kernels.registry().items())


def test_a_config_tells_its_family(kernel: Kernel[Any]) -> None:
    assert all(kernels.of(config) is kernel for config in kernel.legal(SM90))
    with pytest.raises(LookupError, match="no kernel takes a GemmConfig"):
        kernels.of(GemmConfig(128, 128, 128, 4, 2))


SPEC = ops.spec(64, 2112, 7168, 132)
A, B, D = SPEC.a, SPEC.b, SPEC.d


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"a": replace(A, dtype="bf16")}, "A must be K-major e4m3 with 1x128 scales, not K-major bf16"),
        ({"a": replace(A, major="mn")}, "not MN-major e4m3 with 1x128 scales"),
        ({"b": replace(B, scaling="row")}, "B must be K-major e4m3 with 128x128 scales, not .* with row scales"),
        ({"a": replace(A, aligned=False)}, "A must be multiples of 16 bytes for TMA"),
        ({"d": replace(D, dtype="e4m3")}, "D must be row-major .* bf16 without scales, not MN-major e4m3 without"),
        ({"d": replace(D, major="k")}, "D must be .*, not K-major bf16"),
        ({"batch": 2}, "without batch or groups"),
        ({"groups": 4, "grouping": "k"}, "without batch or groups"),
        ({"epilogue": "gelu"}, "or an epilogue"),
    ],
)
def test_what_no_family_can_do_is_refused_with_each_ones_reason(other: dict[str, Any], reason: str) -> None:
    assert kernels.for_spec(SPEC) == list(FAMILIES)
    with pytest.raises(UnsupportedError, match="There is no kernel for M=64, N=2112, K=7168") as caught:
        kernels.for_spec(replace(SPEC, **other))
    for family in FAMILIES:
        assert re.search(rf"{family.name}: [^:]*{reason}", str(caught.value)), caught.value
    assert "transpose_scales: it transposes" in str(caught.value)


OPERANDS = st.builds(
    Operand,
    st.sampled_from(["e4m3", "bf16", "f32"]),
    st.sampled_from(["k", "mn"]),
    st.sampled_from(["none", "1x128", "128x128", "row"]),
    st.booleans(),
)
HALVES = st.builds(Operand, st.just("bf16"), st.sampled_from(["k", "mn"]), st.just("none"), st.just(True))


@given(
    st.builds(
        replace,
        st.just(SPEC),
        a=st.one_of(st.just(A), HALVES, OPERANDS),
        b=st.one_of(st.just(B), HALVES, OPERANDS),
        d=st.one_of(st.just(D), OPERANDS),
        grouping=st.sampled_from(["none", "none", "contiguous"]),
        accumulate=st.sampled_from(["none", "none", "from c"]),
    )
)
def test_only_what_is_computed_is_taken(spec: GemmSpec) -> None:
    """If no family looked at a field, the result would be wrong."""
    rows = (spec.d.major, spec.d.scaling) == ("mn", "none")
    plain = spec.grouping == "none" and rows
    grouped = spec.grouping == "contiguous" and rows and (spec.d.dtype, spec.accumulate) == ("bf16", "none")
    half = [(x.dtype, x.scaling, x.aligned) for x in (spec.a, spec.b)] == [("bf16", "none", True)] * 2
    fp8 = [(x.dtype, x.major, x.aligned) for x in (spec.a, spec.b)] == [("e4m3", "k", True)] * 2
    scaling = (spec.a.scaling, spec.b.scaling)
    if replace(spec, d=replace(spec.d, aligned=D.aligned)) == SPEC:
        assert kernels.for_spec(spec) == list(FAMILIES)
    elif plain and fp8 and scaling in SCALINGS and spec.d.dtype in ("bf16", "f32"):
        own = SCALINGS[scaling] == "rowwise" and (spec.d.dtype, spec.d.aligned, spec.accumulate) == (
            "bf16",
            True,
            "none",
        )
        names = ["sm90_fp8_rows" if own else "sm90_fp8_scaled"]
        names += [] if SCALINGS[scaling] == "1d1d" else ["sm90_fp8_scaled_swapped"]
        assert [kernel.name for kernel in kernels.for_spec(spec)] == names
    elif plain and half and spec.d.dtype in ("bf16", "f32"):
        names = ["sm90_half_gemm"]
        names += ["sm90_half_swapped"] if spec.a.major == "k" else []
        own = (spec.d.dtype, spec.d.aligned, spec.accumulate) == ("bf16", True, "none")
        names += ["sm90_half_turned"] if own else []
        assert [kernel.name for kernel in kernels.for_spec(spec)] == names
    elif grouped and fp8 and scaling == ("1x128", "128x128"):
        assert [kernel.name for kernel in kernels.for_spec(spec)] == ["sm90_fp8_grouped"]
    elif grouped and half and spec.a.major == "k" and (spec.b.major == "k" or spec.k % 64 == 0):
        assert [kernel.name for kernel in kernels.for_spec(spec)] == ["sm90_half_grouped"]
    else:
        with pytest.raises(UnsupportedError):
            kernels.for_spec(spec)


def test_transposing_and_copying_are_one_familys_each() -> None:
    assert kernels.for_spec(TransposeSpec(4, 4)) == [transpose_scales.KERNEL]
    assert kernels.for_spec(TransposeBytesSpec(4, 16)) == [transpose_bytes.KERNEL]
    assert kernels.for_spec(CopySpec(4, 4)) == [copy_rows.KERNEL]


def test_a_family_is_left_out_where_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    blackwell = replace(SM90, name="sm_100a", capability=(10, 0))
    with pytest.raises(UnsupportedError, match="sm90_fp8_gemm: it is built for sm_90a, not for sm_100a"):
        select.select(SPEC, blackwell)
    monkeypatch.setattr(type(copy_rows.KERNEL), "archs", (SM90.name, "sm_100a"))
    assert kernels.for_spec(CopySpec(4, 4), blackwell) == [copy_rows.KERNEL]


def test_templates_use_exactly_the_declared_fields(kernel: Kernel[Any]) -> None:
    for params in kernel.cases():
        assert variables(kernel.template) == kernel.fields(params).keys()


def test_configs_and_cases_are_legal_and_distinct(kernel: Kernel[Any]) -> None:
    serving, legal, cases = list(kernel.configs(SM90)), list(kernel.legal(SM90)), kernel.cases()
    for found in (serving, legal, cases):
        assert len(found) == len(set(found)) > 0
    assert set(serving) <= set(legal)
    assert [kernel.illegal(config, SM90) for config in legal] == [None] * len(legal)
    for params in cases:
        assert params.kernel == kernel.name
        assert params.arch in kernel.archs
        assert kernel.illegal(params.config, arch.get(params.arch)) is None
    # Tests compile and run every config that calls can choose, and more.
    assert set(serving) <= {params.config for params in cases}


def test_the_serving_set_is_small() -> None:
    """With compiled-in sizes, precompiling builds the whole set for each shape."""
    assert len(SERVING) <= 64


def test_entry_names_tell_all_binaries_apart() -> None:
    shapes = [(0, 0, 0), (0, 2112, 7168), (7, 0, 0), (0, 7, 0), (0, 0, 7), (64, 2112, 7168)]
    every = [make_params(c, store, shape) for c in CONFIGS for store in ("tma", "direct") for shape in shapes]
    every += transpose_scales.KERNEL.cases() + copy_rows.KERNEL.cases()
    names = [kernels.get(params.kernel).entry(params) for params in every]
    # Names are paths and C symbols; some filesystems ignore case.
    assert len({name.lower() for name in names}) == len(every)
    for name in names:
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,159}", name)


def test_one_source_a_binary() -> None:
    """Different params must render different sources: otherwise two plans would share a key, and one would be wrong."""
    requests = [build_request(make_params(c, store)) for c in SERVING for store in ("tma", "direct")]
    assert len({request.source for request in requests}) == len(requests)
    for request in requests:
        assert f"{request.name}(" in request.source


def test_params_round_trip_through_json(kernel: Kernel[Any]) -> None:
    classes = {known.config_class.__name__: known.config_class for known in kernels.registry().values()}
    for params in kernel.cases():
        data = json.loads(json.dumps(params.to_json()))
        config = data.pop("config")
        made = classes[config.pop("class")](**config)
        assert type(params)(**{**data, "config": made, "shape": tuple(data["shape"])}) == params


def test_params_are_values() -> None:
    params, again = (make_params(next(PLAIN.configs(SM90))) for _ in range(2))
    assert params == again
    assert hash(params) == hash(again)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.store = "direct"  # type: ignore[misc]


def upright_by_hand(c: UprightConfig, store: str) -> int:
    """The shared memory of one CTA, summed up by purpose."""
    stage = c.block_m * 128 + c.block_n * 128  # E4M3 operands
    stage += -(-c.block_m * 4 // 128) * 128  # float32 scales of A, on a boundary that TMA can write to
    stage += 8 + 8  # its full and its empty barrier
    finished = c.block_m * c.block_n // c.cluster_k  # elements
    staging = finished * 2 if store == "tma" and c.persistent else 0  # bfloat16; a lone tile's lie in stages
    # Float32 sums of every other split of K, and two barriers for each consumer to exchange them.
    reduction = (c.cluster_k - 1) * finished * 4 + (16 * c.num_consumers if c.cluster_k > 1 else 0)
    # The next-tile hint, from the store warp to two consumers.
    told = 16 if staging and c.num_consumers == 2 else 0
    return c.num_stages * stage + staging + reduction + told


def swapped_by_hand(c: SwappedConfig, store: str) -> int:
    """The same for swapped operands."""
    stage = (c.block_m + c.block_n) * 128  # E4M3 operands
    stage += -(-c.block_m * 4 // 128) * 128  # float32 scales of A, on a boundary that TMA can write to
    stage += 8 + 8  # its full and its empty barrier
    shares = c.cluster_k * c.consumers_k
    # Each split of K finishes whole chunks of eight tokens, for all weights.
    finished = c.consumers_k * c.block_n * 8 * -(-(c.block_m // 8) // shares)
    staging = finished * 2 if store == "tma" else 0  # bfloat16
    # Float32 sums of every other split of K, and two barriers a consumer to exchange them.
    exchange = (shares - 1) * finished * 4 + c.num_consumers * 16 if shares > 1 else 0
    return c.num_stages * stage + staging + exchange


def test_shared_memory_is_the_sum_of_its_parts() -> None:
    for config in CONFIGS:
        for store in ("tma", "direct"):
            params, kernel = make_params(config, store), kernels.of(config)
            by_hand = swapped_by_hand if isinstance(config, SwappedConfig) else upright_by_hand
            size = kernel.shared_bytes(params)
            assert size == by_hand(config, store) == kernel.fields(params)["shared_bytes"]  # type: ignore[operator]
            # The limits of compute capability 9.0: a CTA has 227 KiB, an SM 228 KiB, 1 KiB of it lost to each CTA.
            assert size <= 227 * 1024
            assert config.ctas_per_sm * (size + 1024) <= 228 * 1024


def test_one_more_stage_would_not_fit() -> None:
    for config in CONFIGS:
        # Consumers that take blocks of K in turn own equally many stages.
        step, most = (config.consumers_k, 24) if isinstance(config, SwappedConfig) else (1, 16)
        deeper = replace(config, num_stages=config.num_stages + step)
        assert config.num_stages == most or "do not fit" in str(kernels.of(config).illegal(deeper, SM90)), config


def test_registers_of_a_cta_fit() -> None:
    for config in CONFIGS:
        fields = kernels.of(config).fields(make_params(config))
        consumer, producer = int(fields["consumer_registers"]), int(fields["producer_registers"])
        assert consumer % 8 == producer % 8 == 0
        assert 24 <= producer <= consumer <= 255
        # setmaxnreg moves registers between warpgroups of one CTA; what the launch reserved is the ceiling.
        reserved = 65536 // (int(fields["min_ctas"]) * config.num_threads) // 8 * 8
        assert 128 * (config.num_consumers * consumer + producer) <= min(reserved, 255) * config.num_threads
        assert int(fields["min_ctas"]) >= config.ctas_per_sm


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"block_m": 256, "block_n": 128}, 2),
        ({"block_m": 128, "block_n": 128}, 1),  # products are issued ahead
        ({"block_m": 64, "block_n": 144}, 1),  # one consumer
        ({"block_m": 128, "block_n": 192, "cluster_k": 2}, 1),  # a split of K may be empty
    ],
)
def test_consumers_with_one_set_of_partial_sums_take_turns(fields: dict[str, int], expected: int) -> None:
    config = find_config(PLAIN, **fields)
    assert turns(config) == kernels.of(config).fields(make_params(config))["turns"] == expected


UPRIGHT_128 = find_config(block_m=128, block_n=128)
LOW = find_config(block_m=64, block_n=64)
FEW = find_config(SWAPPED, block_m=16)
FEW_SHARED = find_config(SWAPPED, block_m=16, consumers_k=2)
MOST = find_config(SWAPPED, block_m=64)

# Changes of a legal config, and the reason why the result is illegal.
REASONS: list[tuple[FP8Config, dict[str, Any], str]] = [
    (UPRIGHT_128, {"block_k": 64}, r"block_k must be 128, not 64"),
    (UPRIGHT_128, {"block_m": 256, "block_n": 48}, r"256 rows and under 64 columns"),
    (LOW, {"block_n": 256, "num_stages": 4}, r"64 rows and 256 columns"),
    (UPRIGHT_128, {"num_consumers": 1}, r"block_m 128 with 1 consumer"),
    (UPRIGHT_128, {"block_m": 96}, r"block_m 96 with 2 consumer"),
    (UPRIGHT_128, {"cluster_m": 2, "cluster_n": 2}, r"2 x 2 x 1 CTAs"),
    (UPRIGHT_128, {"cluster_m": 0}, r"0 x 1 x 1 CTAs"),
    (LOW, {"cluster_k": 3}, r"1 x 1 x 3 CTAs"),
    (LOW, {"block_n": 48, "cluster_k": 2}, r"block_n must be a multiple of 32 where K is split over 2 CTAs, not 48"),
    (UPRIGHT_128, {"cluster_k": 2, "num_stages": 2}, r"two stages load too few bytes ahead"),
    *[(UPRIGHT_128, {"block_n": n}, rf"a multiple of 16 from 16 to 256, not {n}") for n in (24, 272, 0)],
    (LOW, {"cluster_m": 2}, r"with small tiles, waiting for the cluster"),
    (LOW, {"block_n": 224, "num_partials": 1, "num_stages": 4}, r"a lone consumer multiplies 224 columns in two parts"),
    (UPRIGHT_128, {"num_partials": 3}, r"no schedule for 3 sets"),
    (UPRIGHT_128, {"block_m": 256, "block_n": 160}, r"no schedule for 2 sets .* and 4 products"),
    (UPRIGHT_128, {"block_n": 240, "num_partials": 1}, r"120 columns do not end on a multiple of 16"),
    (UPRIGHT_128, {"block_m": 256, "block_n": 192, "num_partials": 1}, r"accumulator registers a thread leave too few"),
    (UPRIGHT_128, {"num_stages": 1}, r"1 stages are not two or more"),
    (UPRIGHT_128, {"ctas_per_sm": 2, "num_stages": 3}, r"2 CTAs with 2 consumers"),
    (LOW, {"ctas_per_sm": 3, "num_stages": 3}, r"3 CTAs with 1 consumers"),
    (LOW, {"persistent": False, "cluster_k": 2}, r"a config with cluster_size 2 must be persistent"),
    (UPRIGHT_128, {"persistent": False, "cluster_m": 2}, r"a config with cluster_size 2 must be persistent"),
    (UPRIGHT_128, {"num_stages": 8}, r"1 x \d+ bytes of shared memory do not fit"),
    (LOW, {"ctas_per_sm": 2}, r"2 x \d+ bytes of shared memory do not fit"),
    (FEW, {"block_k": 64}, r"block_n and block_k must be 64 and 128, not 64 and 64"),
    (FEW, {"block_n": 128}, r"must be 64 and 128, not 128 and 128"),
    (FEW, {"cluster_m": 2}, r"2 x 1 x 1 CTAs and 1 consumers"),
    (FEW, {"cluster_n": 0}, r"1 x 0 x 1 CTAs and 1 consumers"),
    (FEW, {"cluster_k": 16}, r"1 x 1 x 16 CTAs and 1 consumers"),
    (FEW, {"consumers_k": 3, "num_consumers": 3}, r"1 x 1 x 1 CTAs and 3 consumers"),
    (FEW, {"num_consumers": 2}, r"num_consumers must be consumers_k, 1, not 2"),
    *[(FEW, {"block_m": m}, rf"a multiple of 8 from 8 to 64, not {m}") for m in (12, 0, 72)],
    (FEW_SHARED, {"cluster_k": 8}, r"K can be split into 8 parts at most, not 16"),
    (FEW, {"num_partials": 1}, r"no schedule for 1 sets"),
    (MOST, {"consumers_k": 2, "num_consumers": 2, "ctas_per_sm": 2}, r"registers a thread are more than 104"),
    (FEW, {"num_stages": 1}, r"1 stages are not two or more for each of 1 consumers along K"),
    (FEW_SHARED, {"num_stages": 5}, r"5 stages are not two or more for each of 2 consumers"),
    (FEW_SHARED, {"num_stages": 2}, r"2 stages are not two or more for each of 2 consumers"),
    (FEW, {"ctas_per_sm": 0}, r"0 CTAs on an SM"),
    (FEW, {"ctas_per_sm": 3, "num_stages": 2}, r"3 CTAs on an SM"),
    (FEW, {"num_stages": 40}, r"1 x \d+ bytes of shared memory do not fit"),
    (FEW, {"ctas_per_sm": 2}, r"2 x \d+ bytes of shared memory do not fit"),
]


def refusal(config: FP8Config, other: dict[str, Any]) -> str:
    return str(kernels.of(config).illegal(replace(config, **other), SM90))


@pytest.mark.parametrize(
    ("config", "other", "sentence"), REASONS, ids=[f"{kernels.of(c).name}: {other}" for c, other, _ in REASONS]
)
def test_an_illegal_config_is_told_why(config: FP8Config, other: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, refusal(config, other)), refusal(config, other)


@pytest.mark.parametrize("kernel", [transpose_scales.KERNEL, copy_rows.KERNEL], ids=lambda kernel: kernel.name)
def test_another_config_is_refused_by_the_kernels_that_have_one(kernel: Kernel[Any]) -> None:
    config = next(kernel.configs(SM90))
    assert kernel.illegal(config, SM90) is None
    assert "one config only" in str(kernel.illegal(replace(config, tile_rows=128), SM90))


def test_a_config_of_another_class_is_an_error(kernel: Kernel[Any]) -> None:
    params = replace(kernel.cases()[0], config=GemmConfig(128, 128, 128, num_stages=4, num_consumers=2))
    with pytest.raises(TypeError, match=r"takes .*\w+Config, not .*GemmConfig"):
        kernel.fields(params)


def test_requests_carry_their_params() -> None:
    params = make_params(UPRIGHT_128, shape=(0, 2112, 7168))
    request = build_request(params)
    assert isinstance(request, BuildRequest)
    assert request.arch == "sm_90a"
    assert json.loads(json.dumps(request.meta)) == json.loads(json.dumps({"params": params.to_json()}))
    assert request.source != build_request(replace(params, shape=(0, 2112, 7184))).source
