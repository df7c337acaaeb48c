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
from golden_renders import FOLDER, find_config, golden_renders

from deep_gemm import arch, kernels
from deep_gemm.engine import build_request
from deep_gemm.jit.builder import BuildRequest
from deep_gemm.jit.generator import variables
from deep_gemm.kernels import transpose_scales
from deep_gemm.kernels.base import Kernel
from deep_gemm.kernels.sm90_fp8_gemm import KERNEL, make_params
from deep_gemm.params import FP8Config, GemmConfig, KernelParams

SM90 = arch.SM90
CONFIGS = list(KERNEL.configs(SM90))
STORES = ("tma", "direct")


@pytest.fixture(params=sorted(kernels.registry()))
def kernel(request: pytest.FixtureRequest) -> Kernel[Any]:
    return kernels.get(request.param)


def test_the_registry_finds_every_module_with_a_kernel() -> None:
    assert {"sm90_fp8_gemm", "transpose_scales"} <= kernels.registry().keys()
    assert all(name == kernel.name for name, kernel in kernels.registry().items())


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
    every = [make_params(c, store, shape) for c in CONFIGS for store in STORES for shape in shapes]
    every += transpose_scales.KERNEL.cases()
    names = [kernels.get(params.kernel).entry(params) for params in every]
    assert len(set(names)) == len(every)
    # As a path of the cache and a symbol of C, wherever case does not count too.
    assert len({name.lower() for name in names}) == len(every)
    for name in names:
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,159}", name)


def test_one_source_a_binary() -> None:
    """Params that differ must not render alike, or two plans would share a key and one would be wrong."""
    requests = [build_request(make_params(c, store)) for c in CONFIGS for store in STORES]
    assert len({request.source for request in requests}) == len(requests)
    for request in requests:
        assert f"{request.name}(" in request.source


def test_params_round_trip_through_json(kernel: Kernel[Any]) -> None:
    classes = {cls.__name__: cls for cls in (GemmConfig, FP8Config)}
    for params in kernel.cases():
        data = json.loads(json.dumps(params.to_json()))
        config = data.pop("config")
        made = classes[config.pop("class")](**config)
        assert KernelParams(**{**data, "config": made, "shape": tuple(data["shape"])}) == params


def test_params_are_values() -> None:
    params, again = (make_params(next(KERNEL.configs(SM90))) for _ in range(2))
    assert params == again
    assert hash(params) == hash(again)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.store = "direct"  # type: ignore[misc]


def shared_by_hand(c: FP8Config, store: str) -> int:
    """What one CTA keeps in shared memory, from what it is for."""
    stage = c.block_m * 128 + c.block_n * 128  # E4M3 operands
    stage += c.block_m * 4  # float32 scales of A
    stage += 8 + 8  # its full and its empty barrier
    staging = c.block_m * c.block_n * 2 if store == "tma" else 0  # bfloat16
    shares = c.cluster_k * c.consumers_k
    # Float32 sums of every other share of K, and two barriers to hand them over.
    reduction = (shares - 1) * c.block_m * c.block_n * 4 + (16 if shares > 1 else 0)
    return c.num_stages * stage + staging + reduction


@pytest.mark.parametrize("store", STORES)
def test_shared_memory_is_the_sum_of_its_parts(store: str) -> None:
    for config in CONFIGS:
        params = make_params(config, store)
        size = KERNEL.shared_bytes(params)
        assert size == shared_by_hand(config, store) == KERNEL.fields(params)["shared_bytes"]
        # The limits of compute capability 9.0: a CTA has 227 KiB, an SM 228 KiB, 1 KiB of it lost to each CTA.
        assert size <= 227 * 1024
        assert config.ctas_per_sm * (size + 1024) <= 228 * 1024


def test_one_more_stage_would_not_fit() -> None:
    for config in CONFIGS:
        # Consumers that take blocks of K in turn own as many stages each.
        deeper = replace(config, num_stages=config.num_stages + config.consumers_k)
        assert config.num_stages == 16 or "do not fit" in str(KERNEL.illegal(deeper, SM90)), config


def test_registers_of_a_cta_fit() -> None:
    for config in CONFIGS:
        fields = KERNEL.fields(make_params(config))
        consumer, producer = int(fields["consumer_registers"]), int(fields["producer_registers"])
        assert consumer % 8 == producer % 8 == 0
        assert 24 <= producer <= consumer <= 255
        # setmaxnreg moves registers between warpgroups of one CTA; what the launch reserved is the ceiling.
        reserved = 65536 // (int(fields["min_ctas"]) * config.num_threads) // 8 * 8
        assert 128 * (config.num_consumers * consumer + producer) <= min(reserved, 255) * config.num_threads
        assert int(fields["min_ctas"]) >= config.ctas_per_sm


PLAIN = find_config(block_m=128, block_n=128)
SMALL = find_config(block_m=64, block_n=64)
SHARED_K = find_config(block_m=64, block_n=32, consumers_k=2)
REASONS: list[tuple[str, FP8Config]] = [
    (r"block_k, scale_n and scale_k must be 128, not 64", replace(PLAIN, block_k=64)),
    (r"must be 128, not 128, 64 and 128", replace(PLAIN, scale_n=64)),
    (r"must be 128, not 128, 128 and 32", replace(PLAIN, scale_k=32)),
    (r"256 rows and under 64 columns", replace(PLAIN, block_m=256, block_n=48)),
    (r"block_m 128 with 1 consumer", replace(PLAIN, num_consumers=1)),
    (r"block_m 96 with 2 consumer", replace(PLAIN, block_m=96)),
    (r"2 x 2 x 1 CTAs", replace(PLAIN, cluster_m=2, cluster_n=2)),
    (r"0 x 1 x 1 CTAs", replace(PLAIN, cluster_m=0)),
    (r"1 x 1 x 3 CTAs", replace(SMALL, cluster_k=3)),
    (r"K is split for tiles of 64 rows", replace(PLAIN, cluster_k=2)),
    (r"K is split for tiles of 64 rows and 16, 32", replace(SMALL, block_n=48, cluster_k=2)),
    (r"block_n must be a multiple of 16 from 16 to 256, not 24", replace(PLAIN, block_n=24)),
    (r"block_n must be a multiple of 16 from 16 to 256, not 272", replace(PLAIN, block_n=272)),
    (r"block_n must be a multiple of 16 from 16 to 256, not 0", replace(PLAIN, block_n=0)),
    (r"240 columns can touch three rows", replace(PLAIN, block_n=240)),
    (r"a cluster of small tiles", replace(SMALL, cluster_m=2)),
    (r"no schedule for 3 sets", replace(PLAIN, num_partials=3)),
    (r"no schedule for 2 sets .* and 4 products", replace(PLAIN, block_m=256, block_n=160, num_partials=2)),
    (r"72 columns would meet the borders", replace(PLAIN, block_m=256, block_n=144, num_partials=1)),
    (r"accumulator registers a thread leave too few", replace(PLAIN, block_m=256, block_n=192, num_partials=1)),
    (r"1 stages are not two or more for each of 1 consumers along K", replace(PLAIN, num_stages=1)),
    (r"5 stages are not two or more for each of 2 consumers along K", replace(SHARED_K, num_stages=5)),
    (r"2 stages are not two or more for each of 2 consumers along K", replace(SHARED_K, num_stages=2)),
    (r"2 CTAs with 2 consumers", replace(PLAIN, ctas_per_sm=2, num_stages=3)),
    (r"3 CTAs with 1 consumers", replace(SMALL, ctas_per_sm=3, num_stages=3)),
    (r"1 x \d+ bytes of shared memory do not fit", replace(PLAIN, num_stages=8)),
    (r"2 x \d+ bytes of shared memory do not fit", replace(SMALL, ctas_per_sm=2)),
]


@pytest.mark.parametrize(("sentence", "config"), REASONS, ids=[sentence for sentence, _ in REASONS])
def test_an_illegal_config_is_told_why(sentence: str, config: FP8Config) -> None:
    reason = KERNEL.illegal(config, SM90)
    assert reason is not None
    assert re.search(sentence, reason), reason


def test_every_reason_has_a_test() -> None:
    """A refusal that nothing reaches is either dead or untested."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(KERNEL).illegal)))
    reasons = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            reasons.append("".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts))
    given = [str(KERNEL.illegal(config, SM90)) for _, config in REASONS]
    assert [reason for reason in reasons if not any(re.fullmatch(reason, sentence) for sentence in given)] == []


def test_another_config_is_refused_by_the_transposing_kernel() -> None:
    kernel = transpose_scales.KERNEL
    config = next(kernel.configs(SM90))
    assert kernel.illegal(config, SM90) is None
    assert "one config only" in str(kernel.illegal(replace(config, block_m=128), SM90))


def test_a_config_of_another_class_is_an_error() -> None:
    plain = GemmConfig(block_m=128, block_n=128, block_k=128, num_stages=4, num_consumers=2)
    params = replace(make_params(PLAIN), config=plain)
    for method in (KERNEL.fields, KERNEL.shared_bytes, KERNEL.entry):
        with pytest.raises(TypeError, match="takes an FP8Config, not GemmConfig"):
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
