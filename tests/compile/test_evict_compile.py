"""The L2 policy evict-first: the code has loads with and without it for B, and only loads without it for all else."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from chosen import PLAIN, SWAPPED, argument_names, find_config, make_params
from headers import edited_headers
from kernel_builds import loaded_maps, open_compiler, ptx

from deep_gemm.jit.generator import include_dir
from deep_gemm.params import GemmConfig
from deep_gemm.runtime import engine

pytestmark = pytest.mark.long

CONFIGS = [
    find_config(PLAIN, block_m=128, block_n=128),
    find_config(PLAIN, block_m=128, block_n=192),  # columns in two segments, each with a map
    find_config(PLAIN, block_m=128, block_n=128, cluster_m=2),  # B is multicast
    find_config(PLAIN, block_m=256, block_n=128, cluster_n=2),  # A is multicast
    find_config(SWAPPED, block_m=16),
]
EVICT_FIRST = 0x12F0000000000000


def loads(config: GemmConfig, headers: Path) -> tuple[Counter[str], Counter[str]]:
    """The number of loads in PTX through each tensor map, by the name of the kernel's parameter: loads with the policy,
    and loads without."""
    params = make_params(config)
    text = ptx(open_compiler("nvrtc"), engine.build_request(params), headers.absolute())
    names = argument_names(params)
    copied = re.findall(r"(?:mov|cvta\.param)\.\w+\s+(%rd\d+), (\w+|%rd\d+);", text)
    chosen = re.findall(r"selp\.b64\s+(%rd\d+), (%rd\d+|\d+), (%rd\d+|\d+), %p\d+;", text)
    sources = {to: names for to, *names in [*copied, *chosen]}

    def origins(register: str) -> set[str]:
        """Where the register's value comes from: several places if it was selected."""
        return set().union(*map(origins, sources[register])) if register in sources else {register}

    hinted, plain = Counter[str](), Counter[str]()
    for load in re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global[^;]*;", text):
        if "L2::cache_hint" in load:
            assert set(map(int, origins(re.findall(r"(%rd\d+);$", load)[0]))) == {EVICT_FIRST}
        for source in origins(re.findall(r"\[(%rd\d+), \{", load)[0]):
            (place,) = re.findall(r"_param_(\d+)$", source)
            (hinted if "L2::cache_hint" in load else plain)[names[int(place)]] += 1
    return hinted, plain


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}x{c.cluster_size}")
def test_weights_alone_have_loads_with_and_without_the_policy(config: GemmConfig) -> None:
    hinted, plain = loads(config, include_dir())
    assert set(plain) == set(loaded_maps(make_params(config)))
    assert hinted == Counter({name: count for name, count in plain.items() if name.startswith("map_b")})


def test_without_it_none_has(tmp_path: Path) -> None:
    headers = edited_headers(tmp_path / "include", "tma.cuh", ("use(evict_first());", "use();"))
    assert not loads(CONFIGS[0], headers)[0]


def test_on_tokens_it_would_be_seen(tmp_path: Path) -> None:
    """Tokens have as many loads as weights, so a count of all loads would not show a wrong one."""
    headers = edited_headers(
        tmp_path / "include",
        "gemm_kernel.cuh",
        ("product(tile, order, step));", "product(tile, order, step), evict_first());"),
    )
    hinted, _ = loads(find_config(SWAPPED, block_m=16), headers)
    assert {name for name in hinted if not name.startswith("map_b")} == {"map_a", "map_a_last"}
