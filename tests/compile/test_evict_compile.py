"""Where a launch asks for it, what is read once leaves L2 first: loads of B come with that policy too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden_renders import PLAIN, SWAPPED, find_config, make_params
from headers import edited_headers
from kernel_builds import open_compiler

from deep_gemm import engine
from deep_gemm.jit.generator import include_dir
from deep_gemm.params import FP8Config

CONFIGS = [
    find_config(PLAIN, block_m=128, block_n=128),
    find_config(PLAIN, block_m=256, block_n=128, cluster_n=2),
    find_config(SWAPPED, block_m=16, block_n=64),
]
EVICT_FIRST = int("12F0000000000000", 16)


def loads(config: FP8Config, headers: Path) -> tuple[int, int]:
    """(with the policy, without) of the loads of operands by tensor maps, in PTX."""
    compiler = open_compiler("nvrtc")
    request = engine.build_request(make_params(config))
    compiled = compiler.compile(
        request.name,
        request.source,
        "k.cu",
        list(compiler.flags(request.arch)),
        headers.absolute(),
        want_ptx=True,
    )
    text = compiled.ptx or ""
    found = re.findall(r"cp\.async\.bulk\.tensor\.[^;]*shared::cluster\.global[^;]*;", text)
    policies = [each for each in found if "L2::cache_hint" in each]
    registers = {match.group(1) for each in policies if (match := re.search(r"(%rd\d+);$", each))}
    values = {int(v) for r in registers for v in re.findall(rf"mov\.(?:b|u)64\s+{r}, (\d+);", text)}
    assert values <= {EVICT_FIRST}
    assert len(values) == bool(policies)
    return len(policies), len(found) - len(policies)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}x{c.cluster_size}")
def test_weights_have_loads_with_and_without_the_policy(config: FP8Config) -> None:
    hinted, plain = loads(config, include_dir())
    # Without the policy: the same loads of B, and as many of A and of its scales.
    assert hinted > 0
    assert plain == 3 * hinted


def test_without_it_none_has(tmp_path: Path) -> None:
    headers = edited_headers(tmp_path / "include", "tma.cuh", ("use(evict_first());", "use();"))
    assert loads(CONFIGS[0], headers)[0] == 0
