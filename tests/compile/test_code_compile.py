"""What only machine code shows, not results: evict-first, next-tile hints, sums that nobody clears, prefetches."""

import re
from collections import Counter
from pathlib import Path

import pytest
from chosen import PLAIN, SWAPPED, argument_names, find_config, make_params
from headers import edited_headers
from kernel_builds import loaded_maps, open_compiler, ptx

from deep_gemm.jit import Builder, sass
from deep_gemm.jit.compilers import Compiler
from deep_gemm.jit.generator import include_dir
from deep_gemm.kernels.gemm import GemmFamily
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


def divisions_between_products(kernels_root: Path, config: GemmConfig) -> list[str]:
    """The integer multiplications for upper halves, which locate a tile in the order, between the first and the last
    wgmma. This part of the code belongs to consumers only."""
    text = sass(Builder(kernels_root, open_compiler("nvrtc")).build(engine.build_request(make_params(config))).cubin)
    return re.findall(r"IMAD\.HI\.U32", text[text.index("GMMA") : text.rindex("GMMA")])


@pytest.mark.parametrize(
    "config",
    [
        find_config(block_m=128, block_n=128),
        find_config(block_m=128, block_n=192),
        find_config(block_m=256, block_n=128, cluster_n=2),
        find_config(block_m=128, block_n=64, cluster_k=2),
    ],
    ids=lambda config: f"{config.block_m}x{config.block_n}",
)
def test_two_consumers_are_told_their_next_tile(kernels_root: Path, config: GemmConfig) -> None:
    assert divisions_between_products(kernels_root, config) == []


def test_one_looks_for_it_itself(kernels_root: Path) -> None:
    """The check above must be able to fail: a lone consumer has these multiplications."""
    assert divisions_between_products(kernels_root, find_config(block_m=64, block_n=64))


SEVERAL_BLOCKS = [
    find_config(PLAIN, block_m=128, block_n=144),
    find_config(PLAIN, block_m=128, block_n=224, cluster_m=2),
    find_config(PLAIN, block_m=256, block_n=128, cluster_n=2),
    find_config(PLAIN, block_m=256, block_n=128, persistent=False),
]


def zeros_behind_the_first_product(root: Path, config: GemmConfig, headers: Path) -> int:
    """The number of registers that are cleared between a tile's first two groups of products, in the order of the code.
    The code for tiles with one block is elsewhere."""
    builder = Builder(root, open_compiler("nvrtc"), headers)
    text = sass(builder.build(engine.build_request(make_params(config))).cubin)
    first, second = [found.end() for found in re.finditer(r"GMMA\.[^;]*gsb0", text)][:2]
    found = re.findall(r"\b(CS2R R\d+, SRZ|MOV R\d+, RZ|MOV\.U32 R\d+, RZ, RZ, RZ)", text[first:second])
    return sum(2 if clearing.startswith("CS2R") else 1 for clearing in found)


@pytest.mark.parametrize("config", SEVERAL_BLOCKS, ids=lambda c: f"{c.block_m}x{c.block_n}x{c.cluster_size}")
def test_a_tile_of_several_blocks_clears_no_sums(kernels_root: Path, config: GemmConfig) -> None:
    assert zeros_behind_the_first_product(kernels_root, config, include_dir()) < 8


def test_it_would_be_seen(kernels_root: Path, tmp_path: Path) -> None:
    headers = edited_headers(tmp_path / "include", "fp8_mainloop.cuh", ('        asm volatile("");', "        "))
    assert zeros_behind_the_first_product(kernels_root, SEVERAL_BLOCKS[2], headers) > 100


IN_L2 = 65536
"""The most bytes of weights that a CTA prefetches."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return open_compiler("nvrtc")


def counts_before_prefetch(text: str) -> tuple[list[int], list[int]]:
    """Constants in the instructions before the first prefetch of a box: those of minima, and those of selections. Only
    selections by threads count; those that depend on constants are uniform instructions."""
    before = text[: text.index("UTMAPF")].splitlines()[-60:]
    least = [int(found[1], 16) for line in before if (found := re.search(r"\sVIMNMX\S* \w+, \w+, (0x\w+)", line))]
    chosen = [int(found[1], 16) for line in before if (found := re.search(r"\sSEL \w+, \w+, (0x\w+)", line))]
    return least, chosen


@pytest.mark.parametrize("cluster_k", [1, 2])
@pytest.mark.parametrize(("family", "block_n"), [(PLAIN, 64), (PLAIN, 224), (SWAPPED, 64)])
def test_three_blocks_of_weights_come_into_l2_where_there_is_time(
    compiler: Compiler, kernels_root: Path, family: GemmFamily, block_n: int, cluster_k: int
) -> None:
    """CTAs with split K wait for their cluster: they prefetch three blocks, or as many as `IN_L2` allows. Other CTAs do
    so only with early loads, which they know at run time, and otherwise prefetch one block."""
    config = find_config(family, block_n=block_n, cluster_k=cluster_k)
    several = min(3, IN_L2 // (config.block_n * config.block_k))
    text = sass(Builder(kernels_root, compiler).build(engine.build_request(make_params(config))).cubin)
    least, chosen = counts_before_prefetch(text)
    counts = [number for number in chosen if number <= 3]  # others are offsets of the map that was chosen
    assert (least, counts) == (([several], []) if cluster_k > 1 else ([], [several]))
