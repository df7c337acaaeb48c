"""The kernels of `tests/sanitize.py`, and its edits of device headers, which must still apply."""

from __future__ import annotations

from pathlib import Path

import batched_cases
import batched_mutations
import gated_mutations
import gated_runs
import grouped_mutations
import grouped_runs
import head_cases
import pytest
import sanitize
from chosen import entry
from racecheck_headers import RACES, Race, racecheck_headers

from deep_gemm.arch import SM90
from deep_gemm.jit.generator import include_dir
from deep_gemm.kernels.rows import FUNCTIONS, ROWS, WHOLE_ROWS
from deep_gemm.kernels.sm90_tf32_hc_prenorm_gemm import PRENORM


def test_headers_for_racecheck(tmp_path: Path) -> None:
    edited = {"logits.cuh", "pipeline.cuh", "split_k_exchange.cuh"}
    assert changed(racecheck_headers(tmp_path / "include"), include_dir()) == edited


@pytest.mark.parametrize("race", RACES.values(), ids=list(RACES))
def test_a_race_is_in_one_header_and_a_kernel_shows_it(tmp_path: Path, race: Race) -> None:
    sound = racecheck_headers(tmp_path / "sound")
    assert changed(race.put_into(racecheck_headers(tmp_path / "racy")), sound) == {race.file}
    assert len(sanitize.named(sanitize.everyone(1), race.kernel)) == 1


def test_logits_their_schedule_and_the_prenorm_product_are_run() -> None:
    kernels = {params.kernel for params in sanitize.everyone(0)}
    assert {"sm90_fp8_mqa_logits", "sm90_fp8_paged_mqa_logits", "paged_mqa_logits_metadata"} <= kernels
    products = [entry(params) for params in sanitize.everyone(0) if params.kernel == PRENORM.name]
    assert len(products) == len(set(products)) == len(PRENORM.configs(SM90))


def test_each_kernel_of_a_batch_or_with_a_gate_has_its_oracle() -> None:
    for params in batched_mutations.KERNELS.values():
        assert sanitize.oracle(params) is (head_cases if params.grouping == "heads" else batched_cases).is_right
    for params in grouped_mutations.KERNELS.values():
        assert sanitize.oracle(params) is grouped_runs.is_right
    for params in gated_mutations.KERNELS.values():
        assert sanitize.oracle(params) is gated_runs.is_right
    assert {"sm90_fp8_batched", "sm90_fp8_batched_swapped", "sm90_fp8_heads", "sm90_half_batched"} <= {
        params.kernel for params in batched_mutations.KERNELS.values()
    }


def test_functions_of_rows_are_run_with_each_tile() -> None:
    found = [params for params in sanitize.everyone(0) if params.kernel == ROWS.name]
    assert {params.options[0] for params in found} == set(FUNCTIONS)
    assert {params.config for params in found} >= set(WHOLE_ROWS)
    assert {params.output for params in found} >= {"bf16", "f32", "e4m3"}


def test_kernels_can_be_named() -> None:
    (found,) = sanitize.named(sanitize.chosen(1), "64x64_s13_p2_k4x1_direct")
    assert (found.config.tile, found.gemm.cluster_k, found.store) == ((64, 64), 4, "direct")


def changed(folder: Path, base: Path) -> set[str]:
    """The headers in ``folder`` that differ from those in ``base``."""
    return {path.name for path in folder.iterdir() if path.read_text() != (base / path.name).read_text()}
