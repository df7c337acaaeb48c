"""What is refused of users' kernels, in sentences that name what is wrong, and what `deep-gemm new-kernel` writes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from custom_gpu import BODY, PARAMETERS, CustomGpu, made, own, scale_add, vectors

import deep_gemm
from deep_gemm import InvalidInputError, LaunchConfig, tensor_map
from deep_gemm.cli.app import app
from deep_gemm.settings import child_environment

__all__ = ["own"]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({}, "parameters of scale_add must be a dictionary of names and types"),
        ({**PARAMETERS, "n": "int"}, r"n must be a number \(i32, u32, i64, f32\), a pointer .* but it is 'int'"),
        ({**PARAMETERS, "x": "const double*"}, "x must be a number .* but it is 'const double\\*'"),
        ({**PARAMETERS, "x": "const TensorMap<i64>"}, "but it is 'const TensorMap<i64>'"),
        ({**PARAMETERS, "x": 3}, "x must be a number .* but it is 3"),
        ({**PARAMETERS, "z": "f32*"}, "z is of the tensor z, which is no argument of the function: out, x, y, scale"),
        ({**PARAMETERS, "a b": "u32"}, "'a b' is no name that a parameter in C"),
        ({**PARAMETERS, "int": "u32"}, "'int' is no name that a parameter in C"),
        ({**PARAMETERS, "i32": "i32"}, "'i32' is no name that a parameter in C"),
        ({**PARAMETERS, "m": "const TensorMap<bf16> x"}, "x has elements of two types"),
        ({"out": "const f32*"}, "all tensors are const, so that it has no result"),
    ],
)
def test_a_wrong_declaration_is_refused_at_once(parameters: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        deep_gemm.kernel(parameters, body=BODY)(scale_add)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"source": "x"}, "scale_add must have one of body, source and template, but 2 are given"),
        ({"body": None}, "but 0 are given"),
        ({"body": "\0"}, r"body of scale_add must be a text without NUL and .*, but it is '.x00'"),
        ({"body": None, "source": "\udfff"}, r"source of scale_add must be .* half of a surrogate pair"),
        ({"body": 3}, "body of scale_add must be a text .*, but it is 3"),
        ({"body": None, "template": "/nowhere/k.cu.jinja"}, "template of scale_add: there is no file /nowhere/k"),
        ({"strided": ("z",)}, "strided of scale_add: z is no tensor of it"),
        ({"name": "scale-add"}, "name of a kernel must be a name that C\\+\\+ can have, but it is 'scale-add"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_at_once(options: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        made(**options)


def test_the_decorator_without_parameters_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"kernel must be given the parameters: @deep_gemm\.kernel\("):
        deep_gemm.kernel(scale_add)  # type: ignore[arg-type]


def test_arguments_that_are_no_plain_ones_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="scale must be a plain argument"):
        deep_gemm.kernel({"out": "f32*", "scale": "f32"}, body="", name="k")(lambda out, *, scale: None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: None}, "out must be a torch.Tensor, but it is of type NoneType"),
        ({1: torch.zeros(1000).double()}, "x of scale_add must be torch.float32, but it is torch.float64"),
        ({1: torch.zeros(2000)[::2]}, "x of scale_add must be contiguous"),
        ({0: torch.zeros(1000, requires_grad=True)}, "out requires grad"),
        ({1: torch.zeros(1000, device="meta")}, "x is a meta tensor"),
        ({3: "2"}, "scale of scale_add must be a number of float32, but it is '2'"),
        ({3: 1e39}, r"scale of scale_add must be a number of float32, but it is 1e\+39"),
        ({3: torch.ones(())}, "scale of scale_add must be a number, .* but it is a torch.float32 tensor"),
    ],
)
def test_a_wrong_argument_is_named(own: CustomGpu, change: dict[int, Any], says: str) -> None:
    arguments = [*vectors(), 2.0]
    made()(*arguments)  # warm: what is wrong is found all the same
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(InvalidInputError, match=says):
        made()(*arguments)


def launching(config: Any) -> Callable[[], None]:
    def function(out: Any, n: int = 3) -> Any:
        return config

    kernel = deep_gemm.kernel({"out": "f32*", "n": "u32", "size": "i32"}, body="")(function)
    return lambda: kernel(torch.zeros(4))


VALUES = {"size": 1}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ((1, 2), "the function of function must return a deep_gemm.LaunchConfig, or None .* but it returned tuple"),
        (LaunchConfig(0, 32), "grid of function must be one to three positive integers, but it is 0"),
        (LaunchConfig((1, 2, 3, 4), 32), r"grid of function must be .* but it is \(1, 2, 3, 4\)"),
        (LaunchConfig(1.5, 32), "grid of function must be .* but it is 1.5"),  # type: ignore[arg-type]
        (LaunchConfig(1, 2048), "block of function must be at most 1024 threads, but it is 2048"),
        (LaunchConfig(1, 0), "block of function must be a whole number, but it is 0"),
        (LaunchConfig(1, 32, shared=-1), "shared of function must be a whole number, but it is -1"),
        (LaunchConfig(3, 32, cluster=2), r"grid of function, \(3, 1, 1\), must be a multiple of its cluster, \(2"),
        (LaunchConfig((1, 65536), 32), r"grid of function must be at most .* but it is \(1, 65536, 1\)"),
        (LaunchConfig(16, 32, cluster=16), r"cluster of function must be at most 8 blocks, but it is \(16, 1, 1\)"),
        (LaunchConfig(1, 32), "values of function must give size, .* but size is missing"),
        (LaunchConfig(1, 32, values={"size": 1, "n": 1}), "but n is an argument or is not declared"),
        (
            LaunchConfig(1, 32, values={"size": 1 << 31}),
            "size of function must be an integer from -2147483648 to 21474",
        ),
        (LaunchConfig(1, 32, values={"size": 1.0}), "size of function must be an integer .* but it is 1.0"),
        (
            LaunchConfig(1, 32, values=VALUES, constants={"name": 1}),
            "constants of function: name must be .* not be one",
        ),
        (LaunchConfig(1, 32, values=VALUES, constants={"rows": 1}), "constants of function has rows, which its source"),
    ],
)
def test_a_wrong_launch_is_named(own: CustomGpu, config: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        launching(config)()


@pytest.mark.parametrize(
    ("x", "box", "says"),
    [
        (torch.zeros(4, 8, dtype=torch.int32), (4, 8), "must be a tensor of torch.float32, .* but it is torch.int32"),
        (torch.zeros(4, 8).t(), (4, 4), "last dimension must be contiguous"),
        (torch.zeros(0, 8), (4, 4), "must have elements"),
        (torch.zeros(4, 8), (4,), r"box of tensor_map must have a size for each of 2 dimensions, not \(4,\)"),
        (torch.zeros(4, 8), (4, 6), "innermost box must be a multiple of 16 bytes"),
        (torch.zeros(4, 7), (4, 4), "strides must be multiples of 16 bytes"),
    ],
)
def test_what_tma_cannot_address_is_refused(x: torch.Tensor, box: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        tensor_map(x, box)


@pytest.mark.parametrize("way", ["body", "source", "template"])
def test_a_comment_of_a_pasted_kernel_runs_no_python(way: str, tmp_path: Path) -> None:
    payload = f"// /*{{ cycler.__init__.__globals__.os.system('touch {tmp_path}/made') }}*/"
    (tmp_path / "k.cu").write_text(payload)
    kernel = deep_gemm.kernel(PARAMETERS, **{way: tmp_path / "k.cu" if way == "template" else payload})(scale_add)
    with pytest.raises(InvalidInputError, match=r"text may only have|cannot be rendered \(SecurityError"):
        kernel.source(*vectors(), 2.0)
    assert not (tmp_path / "made").exists()


def test_a_reference_makes_no_gradients() -> None:
    """As the kernel does on a GPU: its output is no part of a graph."""
    kernel = deep_gemm.kernel(PARAMETERS, body=BODY)(scale_add)

    @kernel.reference
    def in_torch(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        out.copy_(scale * x + y)

    out, x, y = vectors()
    x.requires_grad_()
    kernel(out, x, y, 2.0)
    assert not out.requires_grad
    assert torch.equal(out, 2.0 * x.detach() + y)


@pytest.mark.parametrize(
    "text",
    [
        '#include "/dev/zero"',
        "  # include </dev/zero>",
        '#include "../../../../../../../dev/zero"',
        '#include "../../dev/zero"',  # from the folder in which a source is compiled
    ],
)
def test_a_body_that_includes_no_regular_file_is_refused(text: str) -> None:
    """Its content is a part of the key, and reading it would not end."""
    kernel = deep_gemm.kernel(PARAMETERS, source=f"{text}\n/*{{ signature }}*/")(scale_add)
    with pytest.raises(InvalidInputError, match=r"zero, which is no regular file"):
        kernel.build(*vectors(), 2.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new-kernel", *arguments])


@pytest.mark.long
@pytest.mark.compile
def test_its_own_test_passes(tmp_path: Path) -> None:
    """Without a GPU by compiling, and with one by running too."""
    folder = tmp_path / "new" / "kernels"
    result = run("blend", "--directory", str(folder))
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {"blend.cu.jinja", "blend.py", "test_blend.py"}
    assert f"cd {folder} && python -m pytest test_blend.py" in result.output
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_blend.py"]
    done = subprocess.run(command, cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout or "6 passed" in done.stdout


def test_without_pytest_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install" not in run("blend", "--directory", str(tmp_path / "one")).output
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert "Try it: pip install pytest && cd" in run("blend", "--directory", str(tmp_path / "two")).output


def test_no_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_blend.py").write_text("mine")
    result = run("blend", "--directory", str(tmp_path))
    assert result.exit_code == 1
    assert "test_blend.py exists, and nothing was written" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["test_blend.py"]


@pytest.mark.parametrize("name", ["two words", "9lives", "float", "lambda", "bf16", "../up", "json", "torch", ""])
def test_a_name_that_is_none_is_a_usage_error(tmp_path: Path, name: str) -> None:
    result = run(name, "--directory", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert "NAME must" in result.output
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run("blend", "--directory", str(tmp_path / "file")).exit_code == 2
