"""The kernels that a wheel ships: no default call misses, and what holds them is found, can be turned off, and may be
missing or damaged."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import compile_cost
import pytest
import shipped_calls
from census import dense_layers
from jit_fakes import FakeCompiler
from test_budgets import BUDGETS, LLAMA_3

from deep_gemm import CompileError, CompilerNotFoundError, InvalidInputError, cache_info, kernels, ops
from deep_gemm.aot import attention_layers, cards, shipped
from deep_gemm.aot.build import choose
from deep_gemm.aot.layers import Layer
from deep_gemm.aot.workload import GemmShape, plan, shapes
from deep_gemm.arch import SM90
from deep_gemm.bench.shapes import DEEPSEEK_V3
from deep_gemm.cli import doctor, findings, inspect
from deep_gemm.jit import Builder
from deep_gemm.jit.cache import packs as layer
from deep_gemm.jit.compilers import FoundCompiler
from deep_gemm.kernels.families import GEMMS
from deep_gemm.kernels.sm90_fp4_gemm import FP4
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts
from deep_gemm.runtime import engine
from deep_gemm.select import representatives
from deep_gemm.settings import settings
from deep_gemm.spec import Fp4Spec

DRAWN = 200
"""Calls for each GPU model. `python tests/shipped_calls.py` draws 20,000."""


@pytest.fixture(scope="module")
def listed() -> list[KernelParams]:
    return shipped.kernels_of()


# ------------------------------------------------------------------------------------------------ what ships


@pytest.mark.parametrize("card", cards.every(), ids=lambda card: card.name)
def test_no_default_call_misses(listed: list[KernelParams], card: cards.Card) -> None:
    known, found = set(listed), list(shipped_calls.drawn(card, DRAWN))
    assert {call.op for call in found} == {*ops.PRODUCTS, ""}
    assert [call for call in found if not call.left and call.params not in known] == []


@pytest.mark.parametrize("op", [op for op, product in ops.PRODUCTS.items() if product.others])
def test_each_use_of_d_that_would_not_ship_is_seen(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """What is drawn does not depend on what the table says of uses."""
    product, card = ops.PRODUCTS[op], cards.every()[0]
    found = [shipped_calls.product(random.Random(index), op, card) for index in range(150)]
    wanted = {call.params for call in found if not call.left}
    for use in product.others:
        fewer = replace(product, others=tuple(each for each in product.others if each != use))
        monkeypatch.setattr(ops.table, "PRODUCTS", {op: fewer})
        assert wanted - set(shipped.kernels_of()), use
    monkeypatch.setattr(ops.table, "PRODUCTS", {op: product})
    assert wanted <= set(shipped.kernels_of())


@pytest.mark.parametrize("is_whole", [True, False])
def test_drawing_calls_fails_if_one_misses(
    listed: list[KernelParams], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_whole: bool
) -> None:
    card = cards.every()[0]
    used = next(call.params for call in shipped_calls.drawn(card, 20) if not call.left)
    monkeypatch.setattr(cards, "every", lambda: (card,))
    monkeypatch.setattr(sys, "argv", ["shipped_calls.py", "20"])
    monkeypatch.setattr(shipped, "kernels_of", lambda: [params for params in listed if is_whole or params != used])
    assert shipped_calls.main() == (0 if is_whole else 1)
    assert (kernels.get(used.kernel).kernel_name(used) in capsys.readouterr().out) is not is_whole


def test_every_family_ships(listed: list[KernelParams]) -> None:
    """Not those that only calls with an epilogue, or of several ranks, need: they are compiled when first called."""
    finishing = {family.name for family in GEMMS if family.template.gated}
    here = {name for name, kernel in kernels.registry().items() if SM90.name in kernel.archs}
    assert {params.kernel for params in listed} == here - finishing - {"moe_meet", "moe_pull", "moe_return"}


def test_a_new_family_ships_with_its_serving_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = kernels.gemm_family("sm90_fp8_grouped")
    rows = ((64, 64, (1, 1), 2, 2), *(row for row in known.serving[2:] if row[1] != 192))
    added = replace(known, name="sm90_fp8_more", serving=rows)
    monkeypatch.setattr(kernels, "gemms", lambda: {added.name: added, known.name: known})
    monkeypatch.setattr(ops.table, "PRODUCTS", {"masked": ops.PRODUCTS["m_grouped_fp8_gemm_nt_masked"]})
    found = [params for params in shipped.kernels_of() if params.kernel == added.name]
    by_tma = {(params.config.tile, params.segments) for params in found if params.store == "tma"}
    assert by_tma == {(row[:2], 1 << power) for row in rows for power in range(5, 10)}
    assert {params.store for params in found} == {"tma", "direct"}


def test_each_kernel_is_listed_once_and_they_are_few(listed: list[KernelParams]) -> None:
    assert len({kernels.get(params.kernel).kernel_name(params) for params in listed}) == len(set(listed)) == len(listed)
    assert 1000 <= len(listed) <= BUDGETS["shipped_kernels"]


def test_they_stay_within_the_size_of_a_wheel(listed: list[KernelParams]) -> None:
    """An estimate: the whole list takes some 14 minutes to build, which then holds the limit itself."""
    took = BUDGETS["shipped_bytes"]
    estimate = sum(took.get(params.kernel, took["other"]) for params in listed)
    assert 0.6 * shipped.MOST_BYTES <= estimate <= shipped.MOST_BYTES


def test_only_large_tables_and_what_callers_ask_for_are_left_to_the_jit(listed: list[KernelParams]) -> None:
    assert max(params.segments for params in listed) == shipped.MOST_ENTRIES
    assert {params.epilogue for params in listed} == {Parts()}
    assert {params.shape for params in listed} == {(0, 0, 0)}


@pytest.mark.long
def test_the_list_depends_on_nothing_but_the_sources(listed: list[KernelParams]) -> None:
    """Two builds of a wheel have the same kernels in the same order, whatever the hashes of this process are."""
    code = "import sys; from deep_gemm.aot import shipped; print(*shipped.kernels_of(), sep=chr(10), file=sys.stdout)"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.splitlines() == [str(params) for params in listed]


def served(model: Any) -> set[KernelParams]:
    return set(choose(shapes(plan(model).served, representatives(16384)[::8])).kernels)


def decoding_with_mxfp4() -> set[KernelParams]:
    """gpt-oss-20b and 120b, and DeepSeek-V4 on eight GPUs and on one. Six small experts have narrow tiles, and 128
    rows of each expert high ones."""
    sizes = (("bf16", 32, 5760, 2880), ("bf16", 128, 5760, 2880), ("e4m3", 256, 4096, 4096), ("e4m3", 32, 4096, 2048))
    asked = [
        Fp4Spec(m, n, k, dtype, False, count, "psum", 128, num_sms=132)
        for dtype, count, n, k in sizes
        for m in (4096, 256 * count)
    ]
    for dtype, count, n, k in (sizes[0], sizes[3], ("e4m3", 6, 4096, 4096)):
        for rows in (1, 9, 17, 25, 60):
            asked.append(Fp4Spec(128, n, k, dtype, False, count, "masked", num_sms=132, expected_m=rows))
    return {FP4.params(spec, FP4.config_of(spec, SM90), SM90) for spec in asked}


INDEXER = [Layer("indexer.wq_b", 64 * 128, 1536), Layer("indexer.weights_proj", 64, 7168)]
MODELS = {
    "DeepSeek-V3, dense and experts": lambda: set(compile_cost.serving_kernels(step=4)),
    "DeepSeek-V3, dense, on one GPU": lambda: set(
        choose(shapes(dense_layers(DEEPSEEK_V3), representatives(16384)[::8])).kernels
    ),
    "DeepSeek-V3.2's indexer": lambda: set(attention_layers.kernels_of(INDEXER, SM90)),
    "experts with MXFP4 weights": decoding_with_mxfp4,
    "Llama 3 8B": lambda: served(LLAMA_3["8B"]),
    "Llama 3 70B": lambda: served(LLAMA_3["70B"]),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_no_kernel_to_compile(listed: list[KernelParams], model: str) -> None:
    wanted = MODELS[model]()
    assert len(wanted) >= 4
    assert wanted <= set(listed)


# ------------------------------------------------------------------------------------------------ the pack of a wheel


@pytest.fixture
def some(listed: list[KernelParams]) -> list[KernelParams]:
    """A kernel of each family."""
    return list({params.kernel: params for params in listed}.values())


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory as that of an installed package: its packs are shipped. There is no compiler."""
    folder = tmp_path / "package" / "shipped"

    def nothing() -> None:
        raise CompilerNotFoundError("There is no usable CUDA compiler.")

    monkeypatch.setattr(layer, "shipped_folder", lambda: folder)
    monkeypatch.setattr("deep_gemm.jit.compilers.choose", nothing)
    monkeypatch.setattr(shipped, "_nvrtc", FakeCompiler)
    return folder


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builder:
    """The builder of a new process with an empty cache."""
    build = Builder(tmp_path / "root")
    for module in (engine, doctor):
        monkeypatch.setattr(module, "default_builder", lambda: build)
    monkeypatch.setattr("deep_gemm.jit.builder.default_builder", lambda: build)
    return build


def ship(folder: Path, found: list[KernelParams]) -> Path:
    path = folder / "sm_90a.dgpack"
    folder.mkdir(parents=True, exist_ok=True)
    shipped.write(path, found)
    return path


def test_a_model_runs_from_the_wheel_where_compiling_is_forbidden(wheel: Path, fresh: Builder) -> None:
    """DeepSeek-V3, dense and grouped, with no compiler, nothing precompiled and an empty cache."""
    wanted = compile_cost.serving_kernels(step=16)
    ship(wheel, wanted)
    with settings.override(forbid_compile=True):
        assert {engine.build(params).layer for params in wanted} == {"pack"}
        other = next(params for params in shipped.kernels_of() if params not in wanted)
        with pytest.raises(CompileError, match=r"sm_90a\.dgpack"):
            engine.build(other)
    assert (fresh.stats["pack"], fresh.stats["compiled"]) == (len(wanted), 0)
    assert not (wheel.parents[1] / "root").exists(), "no cache directory is needed"


def test_it_can_be_turned_off(wheel: Path, fresh: Builder, some: list[KernelParams]) -> None:
    ship(wheel, some[:1])
    assert [found.by for found in fresh.packs.found()][:1] == [layer.SHIPPED]
    assert engine.build(some[0]).layer == "pack"
    with settings.override(shipped=False):
        assert layer.SHIPPED not in [found.by for found in fresh.packs.found()]
        with pytest.raises(CompilerNotFoundError):
            engine.build(some[0])
    assert engine.build(some[0]).layer == "memory"


def test_a_named_pack_comes_first(wheel: Path, fresh: Builder, some: list[KernelParams], tmp_path: Path) -> None:
    ship(wheel, some[:1])
    named = ship(tmp_path / "named", some[:1])
    with settings.override(precompiled=named):
        assert [found.path for found in fresh.packs.found()][:2] == [named, wheel / "sm_90a.dgpack"]
        request = engine.build_request(some[0])
        holder = fresh.packs.holder(fresh.source_key(request), request.name, request.arch)
    assert holder is not None
    assert holder.path == named


def test_no_pack_in_the_wheel_is_nothing_to_speak_of(wheel: Path, fresh: Builder, caplog: Any) -> None:
    assert layer.SHIPPED not in [found.by for found in fresh.packs.found()]
    wheel.mkdir(parents=True)
    assert layer.SHIPPED not in [found.by for found in Builder().packs.found()]
    assert caplog.records == []


@pytest.mark.parametrize("kept", [0, 10, 100, 0.5, -1])
def test_a_truncated_pack_warns_once_and_the_jit_serves(
    wheel: Path, fresh: Builder, some: list[KernelParams], caplog: Any, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ship(wheel, some[:2])
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    monkeypatch.setattr("deep_gemm.jit.compilers.choose", FakeCompiler)
    assert [engine.build(params).layer for params in some[:2]] == ["compiled"] * 2
    assert [path.name in record.message for record in caplog.records] == [True]


def test_a_pack_that_others_could_replace_is_used_as_the_code_beside_it_is(
    wheel: Path, fresh: Builder, some: list[KernelParams]
) -> None:
    """Where pip runs with a umask of 002, both are writable by a group."""
    path = ship(wheel, some[:1])
    path.chmod(0o664)
    path.parent.chmod(0o775)
    assert engine.build(some[0]).layer == "pack"


def test_the_pack_is_looked_for_beside_the_code() -> None:
    import deep_gemm

    assert layer.shipped_folder() == Path(deep_gemm.__path__[0], "shipped")


def test_reports_say_what_came_from_the_wheel(wheel: Path, fresh: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GemmShape(4096, 7168, 2048)
    needed = choose([shape]).kernels
    path = ship(wheel, list(needed))
    report = inspect.examine(shape, "sm_90a", None, 1, False)
    assert report["from"] == "pack"
    assert (report["pack"]["path"], report["pack"]["by"]) == (str(path), "shipped")
    (told,) = [pack for pack in cache_info(fresh)["packs"] if pack["by"] == "shipped"]
    assert told["kernels"] == len(needed)
    lines: list[str] = []
    monkeypatch.setattr(inspect, "fact", lambda out, what, text, **_: lines.append(f"{what}: {text}"))
    inspect._print(report)
    assert any(line.startswith("source:") and "shipped with deep_gemm" in line for line in lines)
    (finding,) = findings._of_packs({"packs": [{**told, "problem": "it is empty"}]})
    assert "Install the package again" in finding.action


# ------------------------------------------------------------------------------------------------ building it


def test_only_a_compiler_of_cuda_12_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [
        FoundCompiler("nvrtc", "/a/libnvrtc.so.13", "13.0", True, True, ""),
        FoundCompiler("nvcc", "/n", "12.9.1", True, False, ""),
    ]
    monkeypatch.setattr(shipped, "find_all", lambda: found)
    with pytest.raises(CompilerNotFoundError, match="by NVRTC 12, so that drivers of CUDA 12 load them"):
        shipped.write(tmp_path / "a.dgpack", [])
    found += [
        FoundCompiler("nvrtc", f"/{minor}/libnvrtc.so.12", f"12.{minor}", True, False, "") for minor in (4, 9, 10)
    ]
    monkeypatch.setattr(shipped, "Nvrtc", lambda *given: given)
    assert shipped._nvrtc() == ("/10/libnvrtc.so.12", (12, 10))


def test_settings_of_this_process_do_not_change_the_pack(wheel: Path, some: list[KernelParams], tmp_path: Path) -> None:
    path = ship(wheel, some)
    with settings.override(debug=True, lineinfo=True, ffma_bursts=False, precompiled=path):
        assert ship(tmp_path / "other", some).read_bytes() == path.read_bytes()


def test_a_pack_has_a_limit(wheel: Path, some: list[KernelParams], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "MOST_BYTES", 1000)
    with pytest.raises(InvalidInputError, match="but 1000 is the limit for a wheel"):
        ship(wheel, some)
