"""What the kernel modules promise to templates, builder and launcher, without compiling anything."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from dataclasses import replace
from typing import Any

import pytest
from golden_renders import FAMILIES, FOLDER, SMALL, SWAPPED, find_config, golden_renders, make_params
from golden_renders import PLAIN as UNSWAPPED

from deep_gemm import arch, kernels
from deep_gemm.engine import build_request
from deep_gemm.jit.builder import BuildRequest
from deep_gemm.jit.generator import variables
from deep_gemm.kernels import transpose_scales
from deep_gemm.kernels.base import Kernel
from deep_gemm.kernels.fp8 import turns
from deep_gemm.kernels.sm90_fp8_swapped import mma_n, scales_held
from deep_gemm.params import FP8Config, GemmConfig, GemmProblem, KernelParams, SmallConfig, SwappedConfig

SM90 = arch.SM90
CONFIGS: list[FP8Config] = [config for family in FAMILIES for config in family.configs(SM90)]
EVERY: list[FP8Config] = [*CONFIGS, *SMALL.configs(SM90)]


def stores(config: FP8Config) -> set[str]:
    """The ways in which a config can store."""
    return {kernels.of(config).store(config, d_tma) for d_tma in (True, False)}


@pytest.fixture(params=sorted(kernels.registry()))
def kernel(request: pytest.FixtureRequest) -> Kernel[Any]:
    return kernels.get(request.param)


def test_the_registry_finds_every_module_with_a_kernel() -> None:
    assert {"sm90_fp8_gemm", "sm90_fp8_swapped", "sm90_fp8_small", "transpose_scales"} <= kernels.registry().keys()
    assert all(name == kernel.name for name, kernel in kernels.registry().items())


def test_a_config_tells_its_family() -> None:
    for family in kernels.registry().values():
        assert all(kernels.of(config) is family for config in family.configs(SM90))
    with pytest.raises(LookupError, match="no kernel takes a GemmProblem"):
        kernels.of(GemmProblem(1, 1, 1, 1))  # type: ignore[arg-type]


def test_tiles_narrower_than_a_swizzled_row_are_stored_by_element() -> None:
    for config in CONFIGS:
        narrow = isinstance(config, SwappedConfig) and config.block_n < 64
        assert kernels.of(config).store(config, True) == ("direct" if narrow else "tma")
        assert kernels.of(config).store(config, False) == "direct"


def test_templates_use_exactly_the_declared_fields(kernel: Kernel[Any]) -> None:
    for params in kernel.cases():
        assert variables(kernel.template) == kernel.fields(params).keys()


def test_cases_are_legal_and_distinct(kernel: Kernel[Any]) -> None:
    cases = kernel.cases()
    assert len(cases) == len(set(cases)) > 0
    for params in cases:
        assert params.kernel == kernel.name
        assert params.arch in kernel.archs
        assert kernel.illegal(params.config, arch.get(params.arch)) is None


def test_configs_are_legal_and_distinct(kernel: Kernel[Any]) -> None:
    for name in kernel.archs:
        configs = list(kernel.configs(arch.get(name)))
        assert len(configs) == len(set(configs)) > 0
        assert [kernel.illegal(config, arch.get(name)) for config in configs] == [None] * len(configs)


def test_entry_names_tell_all_binaries_apart() -> None:
    shapes = [(0, 0, 0), (0, 2112, 7168), (7, 0, 0), (0, 7, 0), (0, 0, 7), (64, 2112, 7168)]
    every = [make_params(c, store, shape) for c in EVERY for store in stores(c) for shape in shapes]
    every += transpose_scales.KERNEL.cases()
    names = [kernels.get(params.kernel).entry(params) for params in every]
    assert len(set(names)) == len(every)
    # As a path of the cache and a symbol of C, wherever case does not count too.
    assert len({name.lower() for name in names}) == len(every)
    for name in names:
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,159}", name)


def test_one_source_a_binary() -> None:
    """Params that differ must not render alike, or two plans would share a key and one would be wrong."""
    requests = [build_request(make_params(c, store)) for c in EVERY for store in stores(c)]
    assert len({request.source for request in requests}) == len(requests)
    for request in requests:
        assert f"{request.name}(" in request.source


def test_params_round_trip_through_json(kernel: Kernel[Any]) -> None:
    classes = {cls.__name__: cls for cls in (GemmConfig, FP8Config, SwappedConfig, SmallConfig)}
    for params in kernel.cases():
        data = json.loads(json.dumps(params.to_json()))
        config = data.pop("config")
        made = classes[config.pop("class")](**config)
        assert KernelParams(**{**data, "config": made, "shape": tuple(data["shape"])}) == params


def test_params_are_values() -> None:
    params, again = (make_params(next(UNSWAPPED.configs(SM90))) for _ in range(2))
    assert params == again
    assert hash(params) == hash(again)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.store = "direct"  # type: ignore[misc]


def shared_by_hand(c: FP8Config, store: str) -> int:
    """What one CTA keeps in shared memory, from what it is for."""
    stage = c.block_m * 128 + c.block_n * 128  # E4M3 operands
    stage += -(-c.block_m * 4 // 128) * 128  # float32 scales of A, on a boundary that TMA can write to
    stage += 8 + 8  # its full and its empty barrier
    finished = c.block_m // 64 * 64 * c.block_n // c.cluster_k  # elements; tokens past slices go straight to D
    staging = finished * 2 if store == "tma" and c.persistent else 0  # bfloat16; a lone tile's lie in stages
    shares = c.cluster_k * c.consumers_k
    # Float32 sums of every other share of K, and two barriers for each consumer to hand them over.
    reduction = (shares - 1) * finished * 4 + (16 * c.num_consumers if shares > 1 else 0)
    # Where two consumers hear which tile is next, from who stores the one at hand.
    told = 16 if staging and c.num_consumers == 2 and not c.stream_k and not c.extra_tokens else 0
    return c.num_stages * stage + staging + reduction + told


def swapped_by_hand(c: SwappedConfig, store: str) -> int:
    """The same for swapped operands."""
    stage = c.stage_blocks * (c.block_m + c.block_n) * 128  # E4M3 operands
    scales = -(-c.stage_blocks * c.block_m * 4 // 128) * 128  # float32, of A, on a boundary that TMA can write to
    stage += scales
    stage += 8 + 8  # its full and its empty barrier
    shares = c.cluster_k * c.consumers_k
    # A share of K finishes whole chunks of eight tokens, for all weights of its consumer.
    tokens = 8 * -(-(c.block_m // 8) // shares)
    finished = c.consumers_k * max(c.block_n, 64) * tokens
    staging = finished * 2 if store == "tma" else 0  # bfloat16
    # Float32 sums of every other share of K, and two barriers a consumer to hand them over.
    exchange = (shares - 1) * finished * 4 + c.num_consumers * 16 if shares > 1 else 0
    # What is read when the stage has been let go has room for one block more of each consumer along K.
    spare = 0 if scales_held(c) else c.consumers_k * scales
    return c.num_stages * stage + staging + exchange + spare


def test_shared_memory_is_the_sum_of_its_parts() -> None:
    for config in CONFIGS:
        for store in stores(config):
            params, kernel = make_params(config, store), kernels.of(config)
            by_hand = swapped_by_hand if isinstance(config, SwappedConfig) else shared_by_hand
            size = kernel.shared_bytes(params)
            assert size == by_hand(config, store) == kernel.fields(params)["shared_bytes"]  # type: ignore[arg-type]
            # The limits of compute capability 9.0: a CTA has 227 KiB, an SM 228 KiB, 1 KiB of it lost to each CTA.
            assert size <= 227 * 1024
            assert config.ctas_per_sm * (size + 1024) <= 228 * 1024


def test_one_more_stage_would_not_fit() -> None:
    for config in CONFIGS:
        # Consumers that take blocks of K in turn own as many stages each.
        deeper = replace(config, num_stages=config.num_stages + config.consumers_k)
        most = 24 if isinstance(config, SwappedConfig) else 16
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
    ("family", "block_m", "block_n", "others", "expected"),
    [
        (UNSWAPPED, 256, 128, {}, 2),
        (UNSWAPPED, 192, 96, {}, 3),
        (UNSWAPPED, 128, 128, {}, 1),  # products are issued ahead
        (UNSWAPPED, 64, 144, {}, 1),  # one consumer
        (UNSWAPPED, 128, 192, {"cluster_k": 2}, 1),  # a share of K may be empty
        (SWAPPED, 88, 256, {}, 2),
        (SWAPPED, 16, 256, {"consumers_k": 2}, 1),
    ],
)
def test_consumers_with_one_set_of_partial_sums_take_turns(
    family: Any, block_m: int, block_n: int, others: dict[str, int], expected: int
) -> None:
    config = find_config(family, block_m=block_m, block_n=block_n, **others)
    assert turns(config) == expected
    assert kernels.of(config).fields(make_params(config))["turns"] == expected


def test_more_than_64_tokens_are_padded_by_less_than_eight_in_each_tile() -> None:
    heights = {config.block_m for config in CONFIGS if isinstance(config, SwappedConfig)}
    assert {*range(72, 129, 8)} <= heights


def test_scales_are_held_where_registers_allow_it() -> None:
    """Both ways are among the legal configs, and which is in the source; what is not held is read ahead, up to eight
    pairs, and never more than a product has columns for."""
    held = {scales_held(config) for config in SWAPPED.configs(SM90)}
    assert held == {True, False}
    for config in SWAPPED.configs(SM90):
        source = build_request(make_params(config)).source
        assert f"kScalesHeld = {str(scales_held(config)).lower()} }};" in source
        ahead = 0 if scales_held(config) else min(8, mma_n(config) // 8)
        assert f"kScalesAhead = {ahead} }};" in source


def swapped(**fields: int) -> FP8Config:
    """A swapped config, as `find_config` finds it."""
    return find_config(SWAPPED, **fields)


PLAIN = find_config(block_m=128, block_n=128)
LOW = find_config(block_m=64, block_n=64)
SHARED_K = find_config(block_m=64, block_n=32, consumers_k=2)
UNSWAPPED_REASONS: list[tuple[str, FP8Config]] = [
    (r"block_k, scale_n and scale_k must be 128, not 64", replace(PLAIN, block_k=64)),
    (r"must be 128, not 128, 64 and 128", replace(PLAIN, scale_n=64)),
    (r"must be 128, not 128, 128 and 32", replace(PLAIN, scale_k=32)),
    (r"256 rows and under 64 columns", replace(PLAIN, block_m=256, block_n=48)),
    (r"64 rows and 256 columns", replace(LOW, block_n=256, num_stages=4)),
    (r"block_m 128 with 1 consumer", replace(PLAIN, num_consumers=1)),
    (r"block_m 96 with 2 consumer", replace(PLAIN, block_m=96)),
    (r"4 tokens past slices of 64 are not one of \(8, 16", replace(PLAIN, block_m=132, num_partials=1)),
    (r"40 tokens past slices of 64 .* lone tile of 128 columns", replace(PLAIN, block_m=168, num_partials=1)),
    (r"8 tokens past slices of 64", replace(PLAIN, block_m=136)),
    (r"8 tokens past slices of 64", replace(PLAIN, block_m=136, num_partials=1, block_n=96)),
    (r"8 tokens past slices of 64", replace(PLAIN, block_m=136, num_partials=1, cluster_n=2)),
    (r"8 tokens past slices of 64", replace(PLAIN, block_m=136, num_partials=1, stream_k=True)),
    (r"24 tokens past slices of 64", replace(PLAIN, block_m=280, num_partials=1, num_stages=3)),
    (r"2 x 2 x 1 CTAs", replace(PLAIN, cluster_m=2, cluster_n=2)),
    (r"0 x 1 x 1 CTAs", replace(PLAIN, cluster_m=0)),
    (r"1 x 1 x 3 CTAs", replace(LOW, cluster_k=3)),
    (r"consumers share K in tiles of 64 rows only, not of 128", replace(PLAIN, consumers_k=2, num_consumers=4)),
    (r"2 shares of K cannot finish equal parts of 48 columns", replace(LOW, block_n=48, cluster_k=2)),
    (r"two stages keep too few bytes", replace(PLAIN, cluster_k=2, num_stages=2)),
    (r"block_n must be a multiple of 16 from 16 to 256, not 24", replace(PLAIN, block_n=24)),
    (r"block_n must be a multiple of 16 from 16 to 256, not 272", replace(PLAIN, block_n=272)),
    (r"block_n must be a multiple of 16 from 16 to 256, not 0", replace(PLAIN, block_n=0)),
    (r"120 columns do not end on a multiple of 16", replace(PLAIN, block_n=240, num_partials=1)),
    (r"a cluster of small tiles", replace(LOW, cluster_m=2)),
    (r"no schedule for 3 sets", replace(PLAIN, num_partials=3)),
    (r"no schedule for 2 sets .* and 4 products", replace(PLAIN, block_m=256, block_n=160, num_partials=2)),
    (r"72 columns do not end on a multiple of 16", replace(PLAIN, block_m=256, block_n=144, num_partials=1)),
    (r"accumulator registers a thread leave too few", replace(PLAIN, block_m=256, block_n=192, num_partials=1)),
    (r"1 stages are not two or more for each of 1 consumers along K", replace(PLAIN, num_stages=1)),
    (r"5 stages are not two or more for each of 2 consumers along K", replace(SHARED_K, num_stages=5)),
    (r"2 stages are not two or more for each of 2 consumers along K", replace(SHARED_K, num_stages=2)),
    (r"2 CTAs with 2 consumers", replace(PLAIN, ctas_per_sm=2, num_stages=3)),
    (r"3 CTAs with 1 consumers", replace(LOW, ctas_per_sm=3, num_stages=3)),
    (r"dealt out over lone CTAs", replace(PLAIN, stream_k=True, cluster_m=2)),
    (r"dealt out over lone CTAs", replace(LOW, stream_k=True, ctas_per_sm=2)),
    (r"dealt out over lone CTAs, with tiles of 64 columns or more", replace(PLAIN, stream_k=True, block_n=48)),
    (r"dealt out over lone CTAs, .* in steps of 32", replace(PLAIN, stream_k=True, block_n=80)),
    (r"CTAs that share K .* are persistent", replace(LOW, persistent=False, cluster_k=2)),
    (r"CTAs that share K .* are persistent", replace(PLAIN, persistent=False, stream_k=True)),
    (r"CTAs that share .* loads with others are persistent", replace(PLAIN, persistent=False, cluster_m=2)),
    (r"1 x \d+ bytes of shared memory do not fit", replace(PLAIN, num_stages=8)),
    (r"2 x \d+ bytes of shared memory do not fit", replace(LOW, ctas_per_sm=2)),
]

FEW_TOKENS = swapped(block_m=16, block_n=64)
FEW_SHARED = swapped(block_m=16, block_n=64, consumers_k=2)
NARROW = swapped(block_m=8, block_n=32)
WIDE = swapped(block_m=64, block_n=256)
SWAPPED_REASONS: list[tuple[str, FP8Config]] = [
    (r"block_k, scale_n and scale_k must be 128, not 64", replace(FEW_TOKENS, block_k=64)),
    (r"must be 128, not 128, 64 and 128", replace(FEW_TOKENS, scale_n=64)),
    (r"must be 128, not 128, 128 and 32", replace(FEW_TOKENS, scale_k=32)),
    (r"2 x 1 x 1 CTAs and 1 consumers", replace(FEW_TOKENS, cluster_m=2)),
    (r"1 x 2 x 1 CTAs and 1 consumers", replace(FEW_TOKENS, cluster_n=2)),
    (r"0 x 1 x 1 CTAs and 1 consumers", replace(FEW_TOKENS, cluster_m=0)),
    (r"1 x 1 x 3 CTAs and 1 consumers", replace(FEW_TOKENS, cluster_k=3)),
    (r"1 x 1 x 16 CTAs and 1 consumers", replace(FEW_TOKENS, cluster_k=16)),
    (r"1 x 1 x 1 CTAs and 3 consumers", replace(FEW_TOKENS, consumers_k=3, num_consumers=3)),
    (r"1 x 1 x 1 CTAs and 0 consumers", replace(FEW_TOKENS, consumers_k=0)),
    (r"block_n 48 with 1 consumer warpgroups, 1 along K, and 1 blocks", replace(FEW_TOKENS, block_n=48)),
    (r"block_n 64 with 2 consumer warpgroups, 1 along K, and 1 blocks", replace(FEW_TOKENS, num_consumers=2)),
    (r"block_n 64 with 1 consumer warpgroups, 2 along K, and 1 blocks", replace(FEW_TOKENS, consumers_k=2)),
    (r"block_n 32 with 1 consumer warpgroups, 1 along K, and 1 blocks", replace(NARROW, stage_blocks=1)),
    (r"blocks of K are not dealt out over CTAs here", replace(FEW_TOKENS, stream_k=True)),
    (r"CTAs are persistent here", replace(FEW_TOKENS, persistent=False)),
    (r"8 consumer warpgroups leave too few registers", replace(WIDE, consumers_k=4, num_consumers=8)),
    (r"block_m must be a multiple of 8 from 8 to 256, not 12", replace(FEW_TOKENS, block_m=12)),
    (r"block_m must be a multiple of 8 from 8 to 256, not 0", replace(FEW_TOKENS, block_m=0)),
    (r"block_m must be a multiple of 8 from 8 to 256, not 264", replace(FEW_TOKENS, block_m=264)),
    (r"32 weights are too few for a tile of 72 tokens", replace(NARROW, block_m=72)),
    (r"32 weights are too few for .* K 4 CTAs share", replace(NARROW, cluster_k=4)),
    (r"16 shares of K are more than 8", replace(FEW_TOKENS, cluster_k=8, consumers_k=2, num_consumers=2)),
    (r"no schedule for 0 sets", replace(FEW_TOKENS, num_partials=0)),
    (r"no schedule for 3 sets", replace(FEW_TOKENS, num_partials=3)),
    (r"no schedule for 2 sets .* and 4 products", replace(WIDE, block_m=128, num_partials=2)),
    (r"320 accumulator registers a thread leave too few of 232", replace(WIDE, block_m=256, num_partials=1)),
    (r"1 stages are not two or more for each of 1 consumers along K", replace(FEW_TOKENS, num_stages=1)),
    (r"5 stages are not two or more for each of 2 consumers", replace(FEW_SHARED, num_stages=5)),
    (r"2 stages are not two or more for each of 2 consumers", replace(FEW_SHARED, num_stages=2)),
    (r"0 CTAs on an SM", replace(FEW_TOKENS, ctas_per_sm=0)),
    (r"3 CTAs on an SM", replace(FEW_TOKENS, ctas_per_sm=3, num_stages=2)),
    (r"1 x \d+ bytes of shared memory do not fit", replace(FEW_TOKENS, num_stages=40)),
    (r"2 x \d+ bytes of shared memory do not fit", replace(FEW_TOKENS, ctas_per_sm=2)),
]

TWO_SHARES = find_config(SMALL, block_n=16, consumers_k=2, persistent=False)
SMALL_REASONS: list[tuple[str, FP8Config]] = [
    (r"block_k, scale_n and scale_k must be 128, not 64", replace(TWO_SHARES, block_k=64)),
    (r"must be 128, not 128, 64 and 128", replace(TWO_SHARES, scale_n=64)),
    (r"128 x 16 is not 64 by one of", replace(TWO_SHARES, block_m=128)),
    (r"64 x 48 is not 64 by one of", replace(TWO_SHARES, block_n=48)),
    (r"CTAs are alone on an SM", replace(TWO_SHARES, ctas_per_sm=2)),
    (r"in no cluster", replace(TWO_SHARES, cluster_n=2)),
    (r"3 warpgroups, 3 along K", replace(TWO_SHARES, num_consumers=3, consumers_k=3)),
    (r"4 warpgroups, 2 along K", replace(TWO_SHARES, num_consumers=4)),
    (r"a CTA has one tile here, and all of its K", replace(TWO_SHARES, persistent=True)),
    (r"a CTA has one tile here, and all of its K", replace(TWO_SHARES, stream_k=True)),
    (r"one set of partial sums, not 2", replace(TWO_SHARES, num_partials=2)),
    (r"15 stages are not 1 to 8 for each of 2", replace(TWO_SHARES, num_stages=15)),
    (r"18 stages are not 1 to 8 for each of 2", replace(TWO_SHARES, num_stages=18)),
    (r"0 stages are not 1 to 8 for each of 2", replace(TWO_SHARES, num_stages=0)),
    (r"\d+ bytes of shared memory do not fit", replace(TWO_SHARES, block_n=64, num_stages=16)),
]
REASONS = UNSWAPPED_REASONS + SWAPPED_REASONS + SMALL_REASONS


@pytest.mark.parametrize(
    ("sentence", "config"), REASONS, ids=[f"{kernels.of(config).name}: {sentence}" for sentence, config in REASONS]
)
def test_an_illegal_config_is_told_why(sentence: str, config: FP8Config) -> None:
    reason = kernels.of(config).illegal(config, SM90)
    assert reason is not None
    assert re.search(sentence, reason), reason


@pytest.mark.parametrize("kernel", [*FAMILIES, SMALL], ids=lambda kernel: kernel.name)
def test_every_reason_has_a_test(kernel: Kernel[Any]) -> None:
    """A refusal that nothing reaches is either dead or untested."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(kernel).illegal)))
    reasons = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            reasons.append("".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts))
    given = [str(kernel.illegal(config, SM90)) for _, config in REASONS if kernels.of(config) is kernel]
    assert [reason for reason in reasons if not any(re.fullmatch(reason, sentence) for sentence in given)] == []


def test_another_config_is_refused_by_the_transposing_kernel() -> None:
    kernel = transpose_scales.KERNEL
    config = next(kernel.configs(SM90))
    assert kernel.illegal(config, SM90) is None
    assert "one config only" in str(kernel.illegal(replace(config, block_m=128), SM90))


def test_a_config_of_another_class_is_an_error() -> None:
    plain = GemmConfig(block_m=128, block_n=128, block_k=128, num_stages=4, num_consumers=2)
    for kernel, made, needed in (
        (UNSWAPPED, PLAIN, "an FP8Config"),
        (SWAPPED, FEW_TOKENS, "a SwappedConfig"),
        (SMALL, TWO_SHARES, "a SmallConfig"),
    ):
        params = replace(make_params(made), config=plain)
        for method in (kernel.fields, kernel.shared_bytes, kernel.entry):
            with pytest.raises(TypeError, match=f"takes {needed}, not GemmConfig"):
                method(params)


def test_requests_carry_their_params() -> None:
    params = make_params(PLAIN, shape=(0, 2112, 7168))
    request = build_request(params)
    assert isinstance(request, BuildRequest)
    assert request.arch == "sm_90a"
    assert json.loads(json.dumps(request.meta)) == json.loads(json.dumps({"params": params.to_json()}))
    assert "kShapeN = 2112, kShapeK = 7168" in request.source


def test_renders_are_as_they_were() -> None:
    """`python tests/golden_renders.py` accepts what is rendered now."""
    renders = dict(golden_renders())
    assert sorted(FOLDER.glob("*.cu")) == sorted(renders)
    for path, source in renders.items():
        assert path.read_text() == source, path.name
        assert "/*{" not in source
        assert "/*%" not in source
