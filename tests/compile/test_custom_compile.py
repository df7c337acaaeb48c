"""Users' kernels through the real compilers: the example's kernels, all element types, errors with their lines."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from kernel_builds import KINDS, open_compiler
from scripts import module_of

import deep_gemm
from deep_gemm import LaunchConfig
from deep_gemm import arch as archs
from deep_gemm.arch import SM90
from deep_gemm.cli.app import app
from deep_gemm.custom.parameters import ELEMENTS, NUMBERS
from deep_gemm.errors import CompileError
from deep_gemm.expression import Expression
from deep_gemm.jit import Builder, sass
from deep_gemm.kernels.families import B16_GEMM, GEMMS
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.kernels.hopper.ffma_bursts import code_sections
from deep_gemm.parts import Parts
from deep_gemm.runtime import engine
from deep_gemm.settings import settings


def example() -> Any:
    return module_of("examples/own_kernel.py")


def built(kind: str, root: Path, kernel: deep_gemm.CustomKernel[Any], *arguments: Any) -> Any:
    return Builder(root, open_compiler(kind)).build(kernel._request(arguments, {}, "sm_90a"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_compiles_and_spills_nothing(kind: str, tmp_path: Path) -> None:
    found, x = example(), torch.zeros(96, 64).bfloat16()
    added = built(kind, tmp_path, found.scale_add, x, x, x, 2.0)
    turned = built(kind, tmp_path, found.scaled_transpose, torch.zeros(64, 96).bfloat16(), x, 2.0)
    for binary in (added, turned):
        assert binary.resources.problems() == []
        assert binary.resources.warnings == ()
        assert binary.layer == "compiled"
    text = sass(turned.cubin)
    assert "UTMALDG.2D" in text
    assert "UTMASTG.2D" in text
    assert turned.resources.shared_static >= 2 * 64 * 64 * 2


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With a GPU the example launches both kernels."""
    example().main()
    assert "Both agree with torch on" in capsys.readouterr().out


def every_type(out: Any, *tensors: Any) -> LaunchConfig:
    return LaunchConfig(grid=1, block=32, values={f"n_{name}": 1 for name in NUMBERS} | {"f": 1.0})


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_known_to_device_code(kind: str, tmp_path: Path) -> None:
    """Each type converts to and from float."""
    names = ", ".join(f"x_{element}" for element in ELEMENTS)
    parameters = {"out": "f32*", "f": "f32", **{f"n_{name}": name for name in NUMBERS}}
    parameters |= {f"x_{element}": f"{element}*" for element in ELEMENTS}
    body = "float sum = f;\n" + "\n".join(f"sum += n_{name};" for name in NUMBERS)
    body += "\n".join(f"\nsum += float(x_{e}[threadIdx.x]); x_{e}[threadIdx.x] = {e}(sum);" for e in ELEMENTS)
    namespace = {"every_type": every_type}
    exec(f"def function(out, {names}): return every_type(out)", namespace)
    kernel = deep_gemm.kernel(parameters, body=body + "\nout[threadIdx.x] = sum;")(namespace["function"])
    tensors = [torch.zeros(32, dtype=dtype) for dtype in ELEMENTS.values()]
    assert built(kind, tmp_path, kernel, torch.zeros(32), *tensors).resources.problems() == []


def test_another_process_finds_it_in_the_same_cache(tmp_path: Path) -> None:
    found, x = example(), torch.zeros(96, 64).bfloat16()
    first = built("nvrtc", tmp_path, found.scale_add, x, x, x, 2.0)
    again = built("nvrtc", tmp_path, example().scale_add, x, x, x, 3.0)
    assert (first.layer, again.layer) == ("compiled", "disk")
    assert first.key == again.key


def test_a_pack_serves_it_where_compiling_is_forbidden(tmp_path: Path) -> None:
    found, x, pack = example(), torch.zeros(96, 64).bfloat16(), tmp_path / "own.dgpack"
    with settings.override(cache_dir=tmp_path / "here", use_nvrtc=True):
        assert found.scale_add.build(x, x, x, 2.0).layer == "compiled"
        packed = CliRunner().invoke(app, ["cache", "pack", str(pack)])
        assert packed.exit_code == 0, packed.output
    with settings.override(cache_dir=tmp_path / "there", forbid_compile=True):
        with pytest.raises(CompileError, match="DG_JIT_FORBID_COMPILE forbids compiling scale_add"):
            found.scale_add.build(x, x, x, 2.0)
        with settings.override(precompiled=[pack]):
            assert found.scale_add.build(x, x, x, 2.0).layer == "pack"


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_the_source_is_shown_with_its_line(kind: str, tmp_path: Path) -> None:
    kernel = deep_gemm.kernel({"out": "f32*"}, body="out[0] = 1;\nout[1] = nothing;", name="k")(
        lambda out: LaunchConfig(1, 32)
    )
    with pytest.raises(CompileError) as caught:
        built(kind, tmp_path, kernel, torch.zeros(4))
    assert 'identifier "nothing" is undefined' in caught.value.log
    assert caught.value.source_path is not None
    line = Path(caught.value.source_path).read_text().splitlines()[7 - 1]
    assert line == "  out[1] = nothing;"
    assert "kernel.cu(7)" in caught.value.log


UNDEFINED = {
    "float a; out[0] = a;": "is used before its value is set",
    "out[0] = 5 / 0;": "division by zero",
    "out[0] = float(threadIdx.x % 0);": 'right operand of "%" is zero',
    "int b = 2147483647 + 1; out[0] = b;": "integer operation result is out of range",
    "out[0] = 1 << -1;": "shift count is negative",
    "out[0] = 1 << 35;": "shift count is too large",
    "int c[4] = {}; out[0] = *(c + 6);": "pointer points outside of underlying object",
    "int d[4] = {}; out[0] = d[5];": "subscript out of range",
    "auto e = [](float x) -> float { if (x > 0) return x; }; out[0] = e(1);": "missing return statement",
    "auto f = [](float x) -> float { if (x > 0) return x; return; }; out[0] = f(1);": "should return a value",
    "auto g = [](float x) -> float* { float y = x; return &y; }; out[0] = *g(1);": "returning pointer to local",
    "auto h = [](float x) -> float& { float y = x; return y; }; out[0] = h(1);": "returning reference to local",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["body", "source", "template"])
def test_a_sure_mistake_is_an_error_on_its_line(way: str, kind: str, tmp_path: Path) -> None:
    """The compilers only warn, and leave the statement out or compute something else."""
    text = "\n".join(UNDEFINED)
    whole = f'extern "C" __global__ void k(float* out) {{\n{text}\n}}'
    (tmp_path / "k.cu").write_text(whole)
    given: dict[str, Any] = {way: {"body": text, "source": whole, "template": tmp_path / "k.cu"}[way]}
    kernel = deep_gemm.kernel({"out": "f32*"}, name="k", **given)(lambda out: LaunchConfig(1, 32))
    with pytest.raises(CompileError) as caught:
        built(kind, tmp_path, kernel, torch.zeros(4))
    lines = Path(caught.value.source_path or "").read_text().splitlines()
    for statement, says in UNDEFINED.items():
        place = next(at for at, line in enumerate(lines, 1) if line.strip() == statement)
        assert re.search(rf"kernel\.cu\({place}\): error: .*{re.escape(says)}", caught.value.log), (
            says,
            caught.value.log,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_an_expression_is_shown_with_its_line(kind: str, tmp_path: Path) -> None:
    """The name tells whose it is, and the log has the line."""
    text = str(Parts(expression=Expression("own", "const float y = x + scale;\nreturn y > nothing ? y : 0.0f;")))
    request = engine.build_request(B16_GEMM.case(B16_GEMM.configs(SM90)[0], epilogue=text))
    with pytest.raises(CompileError, match="_own_tma") as caught:
        Builder(tmp_path, open_compiler(kind)).build(request)
    assert caught.value.source_path is not None
    lines = Path(caught.value.source_path).read_text().splitlines()
    for name, line in (("scale", "const float y = x + scale;"), ("nothing", "return y > nothing ? y : 0.0f;")):
        assert f"{line}\n" in str(caught.value)
        assert f'identifier "{name}" is undefined' in str(caught.value)
        place = next(at for at, each in enumerate(lines, 1) if each.strip() == line)
        assert f"kernel.cu({place})" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("if (x > 0.0f) return x;", "missing return statement at end of non-void function"),
        ("float y; return y;", 'variable "y" is used before its value is set'),
    ],
)
def test_an_expression_without_a_value_does_not_compile(body: str, says: str, kind: str, tmp_path: Path) -> None:
    """It would compile to whatever the optimiser likes: negative values were kept."""
    text = str(Parts(expression=Expression("own", body)))
    request = engine.build_request(B16_GEMM.case(B16_GEMM.configs(SM90)[0], epilogue=text))
    with pytest.raises(CompileError) as caught:
        Builder(tmp_path, open_compiler(kind)).build(request)
    place = 1 + request.source[: request.source.index(body)].count("\n")
    assert re.search(rf"kernel\.cu\(({place}|{place + 1})\): error: {says}", caught.value.log), caught.value.log


FAMILIES = [
    pytest.param(family, target, id=f"{family.name}-{target}")
    for family in GEMMS
    if family.has_epilogues and family.groupings == ("none",)
    for target in family.archs
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "target"), FAMILIES)
def test_an_expression_costs_registers_only_for_what_it_uses(family: GemmFamily, target: str) -> None:
    """One that is an activation of ours takes as many instructions. Vectors of columns take the most registers: with
    them, two of Hopper's other tiles spill 4 and 8 bytes."""
    arch = archs.get(target)
    able = [config for config in family.configs(arch) if family.template.finishes(config)]
    able = able[-1 if target == SM90.name else -4 :]
    body = "x = max_or_nan(x, 0.0f);\nreturn __fmul_rn(x, x);"
    texts = ("bias:f32+relu2", str(Parts(bias="f32", expression=Expression("relu2", body))))
    placed = str(Parts(expression=Expression("own", "return x * (column > row ? v : w);", ("v",), ("w",))))
    with settings.override(use_nvrtc=True):
        ours, theirs = (engine.build(family.case(able[-1], arch, epilogue=text)) for text in texts)
        others = [engine.build(family.case(config, arch, epilogue=placed)) for config in able]
    assert [binary.name for binary in (ours, theirs, *others) if binary.resources.problems()] == []
    ours_words, theirs_words = (words for each in (ours, theirs) for _, words in code_sections(each.cubin))
    assert len(ours_words) == len(theirs_words)


def test_a_source_whose_kernel_has_another_name_is_refused(tmp_path: Path) -> None:
    source = 'extern "C" __global__ void other(float* out) { *out = 1; }'
    kernel = deep_gemm.CustomKernel.from_source(source, lambda out: LaunchConfig(1, 32), {"out": "f32*"}, name="k")
    with pytest.raises(CompileError, match="reported no entry function 'k'"):
        built("nvrtc", tmp_path, kernel, torch.zeros(4))


def test_an_older_architecture_compiles_what_needs_no_newer() -> None:
    found, x = example(), torch.zeros(96, 64).bfloat16()
    assert found.scale_add.build(x, x, x, 2.0, arch="sm_80").arch == "sm_80"
