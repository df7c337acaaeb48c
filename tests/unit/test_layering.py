"""The structure of the package: imports point one way, one module reads the environment, files stay small."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 600

# Every module belongs to the first layer with a matching prefix; it may import its own layer and those before it. The
# device code is data, and any layer may read it.
LAYERS: list[tuple[str, ...]] = [
    ("deep_gemm.errors", "deep_gemm.listeners", "deep_gemm.log", "deep_gemm.names", "deep_gemm.records"),
    ("deep_gemm.settings", "deep_gemm.templates"), ("deep_gemm.advice",),
    ("deep_gemm.runtime.__init__", "deep_gemm.runtime.timer", "deep_gemm.tensors"),
    ("deep_gemm.jit", "deep_gemm.params", "deep_gemm.spec", "deep_gemm.parts", "deep_gemm.expression"),
    ("deep_gemm.arch",), ("deep_gemm.kernels",), ("deep_gemm.select",),
    ("deep_gemm.runtime.weight_promises", "deep_gemm.options", "deep_gemm.runtime.debug_record"),
    ("deep_gemm.runtime.engine",),
    ("deep_gemm.runtime.generated", "deep_gemm.runtime.operation", "deep_gemm.runtime.sharding"),
    ("deep_gemm.runtime.operators", "deep_gemm.runtime.reports"),
    ("deep_gemm.runtime.call_code", "deep_gemm.runtime.fallback", "deep_gemm.runtime.measuring",
        "deep_gemm.runtime.monitor"),
    ("deep_gemm.runtime.calls",), ("deep_gemm.ops.cast_reference", "deep_gemm.ops.mxfp4", "deep_gemm.ops.reference"),
    ("deep_gemm.ops",), ("deep_gemm.custom",),
    (*("deep_gemm.attention", "deep_gemm.batched", "deep_gemm.cublaslt", "deep_gemm.prenorm", "deep_gemm.dense",
        "deep_gemm.epilogue", "deep_gemm.fused", "deep_gemm.grouped", "deep_gemm.layout", "deep_gemm.mega_moe",
        "deep_gemm.moe", "deep_gemm.operators", "deep_gemm.quantize", "deep_gemm.testing"), "deep_gemm.unsupported"),
    ("deep_gemm.fp4", "deep_gemm.fp4_moe"), ("deep_gemm.utils",),
    ("deep_gemm.aot.headers", "deep_gemm.aot.inputs", "deep_gemm.aot.layers", "deep_gemm.aot.patterns"),
    ("deep_gemm.aot.quantization",), ("deep_gemm.aot.deepseek_v4", "deep_gemm.aot.scales", "deep_gemm.aot.stacks"),
    ("deep_gemm.aot.attention_layers", "deep_gemm.aot.experts", "deep_gemm.aot.model"),
    ("deep_gemm.aot.checkpoint",), ("deep_gemm.aot.shard", "deep_gemm.aot.workload"),
    ("deep_gemm.aot.cards", "deep_gemm.aot.outcomes"), ("deep_gemm.aot.build",), ("deep_gemm.nn",),
    # For `from deep_gemm import X` of a public name.
    ("deep_gemm.__init__",), ("deep_gemm.backends", "deep_gemm.compat"), ("deep_gemm.aot",), ("deep_gemm.bench",),
    ("deep_gemm.cli", "deep_gemm.__main__"),
]  # fmt: skip


def package_files() -> dict[str, Path]:
    """Every module of the package as it is imported, by its dotted name."""
    files = {}
    for package in ("deep_gemm", "deep_gemm.jit", "deep_gemm.templates"):
        root = Path(next(iter(importlib.import_module(package).__path__)))
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join((package, *parts))
            # In a wheel the mapped packages lie inside deep_gemm and are found twice, under one name.
            files[name] = path
    return files


FILES = package_files()


def layer(module: str) -> int | None:
    for index, prefixes in enumerate(LAYERS):
        if any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes):
            return index
    return None


def resolve(name: str, attribute: str = "") -> str:
    """The module of this package that an import reaches: a submodule if there is one, else the package itself."""
    for candidate in (f"{name}.{attribute}", name):
        if candidate in FILES:
            return candidate
        if f"{candidate}.__init__" in FILES:
            return f"{candidate}.__init__"
    raise AssertionError(f"{name} {attribute} is not a module of deep_gemm")


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of this package that `module` imports, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (resolve(alias.name) for alias in node.names if alias.name.split(".")[0] == "deep_gemm")
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package that holds the module; `__init__` is a module of its own here.
            parents = module.split(".")[: -node.level] if node.level else []
            name = ".".join(parents + (node.module.split(".") if node.module else []))
            if name.split(".")[0] == "deep_gemm":
                yield from (resolve(name, alias.name) for alias in node.names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def whole(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def parse(path: Path) -> ast.Module:
    """The module without what only a type checker imports."""
    return ast.Module([node for node in whole(path).body if not is_type_checking(node)], [])


def violations(module: str, tree: ast.AST) -> list[str]:
    own = layer(module)
    assert own is not None, f"{module} is in no layer: add it to LAYERS in {__file__}"
    found = []
    for target in imports(module, tree):
        other = layer(target)
        assert other is not None, f"{target} is in no layer: add it to LAYERS in {__file__}"
        if other > own or (
            module.startswith("deep_gemm.jit") and other == own and not target.startswith("deep_gemm.jit")
        ):
            found.append(f"{module} imports {target}")
    return found


CORE = (
    *("deep_gemm.arch", "deep_gemm.runtime.calls", "deep_gemm.runtime.weight_promises", "deep_gemm.runtime.engine",
        "deep_gemm.options"),
    *("deep_gemm.runtime.call_code", "deep_gemm.runtime.fallback", "deep_gemm.runtime.generated",
        "deep_gemm.runtime.monitor", "deep_gemm.runtime.operation", "deep_gemm.runtime.operators",
        "deep_gemm.runtime.reports"),
    *("deep_gemm.runtime.measuring", "deep_gemm.runtime.timer", "deep_gemm.runtime.debug_record", "deep_gemm.select",
        "deep_gemm.jit", "deep_gemm.kernels.__init__", "deep_gemm.kernels.base"),
    *("deep_gemm.kernels.features", "deep_gemm.kernels.raster"),
)  # fmt: skip
"""Modules that serve every GEMM, of any dtype and family."""
FAMILY = re.compile(r"fp\d|e\dm\d|float8|swapped|upright_?(config|by|gemm)|(bf|f|bfloat|float)(16|32)|sm\d+_\w")
DTYPES_OF = {
    "deep_gemm.jit.driver.tensor_map": {
        "f32",
        "f16",
        "bf16",
        "FLOAT32",
        "FLOAT16",
        "BFLOAT16",
    },  # the driver's own names
    "deep_gemm.jit.driver.launch": {"f32"},
}


def particulars(module: str, tree: ast.AST) -> set[str]:
    """Families and dtypes that a module names in identifiers and strings, docstrings excluded."""
    read = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    } | {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in read:
            names.add(node.value)
        for field in ("id", "attr", "arg", "name", "module", "asname"):
            value = getattr(node, field, None)
            names |= {value} if isinstance(value, str) else set()
    return {name for name in names - DTYPES_OF.get(module, set()) if FAMILY.search(name.lower())}


def test_the_core_names_no_family_and_no_dtype() -> None:
    """Another kernel, operation or dtype is a file of its own, and changes none of these modules."""
    core = [m for m in FILES if any(m == prefix or m.startswith(prefix + ".") for prefix in CORE)]
    found = {module: particulars(module, parse(FILES[module])) for module in core}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from .kernels import sm90_fp8_gemm", "isinstance(config, SwappedConfig)", "kernel == 'sm90_bf16_gemm'",
        "d.dtype == torch.bfloat16", "def fp8_gemm_launch(): pass",
    ],
)  # fmt: skip
def test_a_name_of_a_family_is_found(source: str) -> None:
    assert particulars("deep_gemm.runtime.engine", ast.parse(source))


def test_families_are_found_by_the_registry_alone() -> None:
    lists = {"deep_gemm.kernels.families", "deep_gemm.kernels.other_families"}
    others = [module for module in FILES if not module.startswith("deep_gemm.kernels")]
    assert [module for module in others if lists.intersection(imports(module, parse(FILES[module])))] == []
    assert lists <= set(imports("deep_gemm.kernels.__init__", parse(FILES["deep_gemm.kernels.__init__"])))


def reads_environment(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            return any(alias.name in ("environ", "environb", "getenv", "putenv") for alias in node.names)
    return False


def test_what_serves_every_gpu_imports_no_code_for_one() -> None:
    """Selection, shipping and calls ask a family's template."""
    own = "deep_gemm.kernels.hopper"
    found = {module for module, path in FILES.items() for name in imports(module, parse(path)) if name.startswith(own)}
    assert {module for module in found if not module.startswith(own)} == {"deep_gemm.kernels.families"}


def test_imports_point_one_way() -> None:
    found = {
        module: violations(module, parse(FILES[module])) for module in set(FILES) - {"deep_gemm.templates.__init__"}
    }
    assert {module: what for module, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deep_gemm.jit.builder", "from deep_gemm.params import KernelParams"),
        ("deep_gemm.kernels.base", "from deep_gemm.runtime import engine"),
        ("deep_gemm.errors", "import deep_gemm.log, deep_gemm.runtime.engine"),
        ("deep_gemm.arch", "from .kernels import base"),
        ("deep_gemm.kernels.base", "from ..runtime.engine import plan"),
        ("deep_gemm.runtime.engine", "def f():\n    from deep_gemm.dense import fp8_gemm_nt"),
        ("deep_gemm.runtime.engine", "from deep_gemm import fp8_gemm_nt"),
    ],
)
def test_an_arrow_that_points_back_is_found(module: str, source: str) -> None:
    assert violations(module, ast.parse(source))


def knows_torch(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "torch" for name in names):
            return True
    return False


JIT = [module for module in FILES if module.startswith("deep_gemm.jit")]


def test_the_jit_knows_no_torch() -> None:
    assert [module for module in JIT if knows_torch(whole(FILES[module]))] == []
    assert knows_torch(ast.parse("def f():\n    from torch.cuda import is_available"))


def test_only_settings_reads_the_environment() -> None:
    assert [module for module in FILES if reads_environment(whole(FILES[module]))] == ["deep_gemm.settings"]


def test_a_read_of_the_environment_is_found() -> None:
    assert reads_environment(ast.parse("import os\nhome = os.environ['HOME']"))
    assert reads_environment(ast.parse("from os import getenv"))


def runs_data(tree: ast.AST) -> bool:
    """Whether data that is read could run as code. Only cubins may, after their checksum was verified."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if {name.split(".")[0] for name in names} & {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib"}:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            return True
    return False


def test_nothing_unpickles_or_evaluates() -> None:
    assert [module for module in JIT if runs_data(parse(FILES[module]))] == []


@pytest.mark.parametrize("source", ["import pickle", "from marshal import loads", "eval('1')", "exec(text)"])
def test_a_way_to_run_data_is_found(source: str) -> None:
    assert runs_data(ast.parse(source))


def source_files() -> list[Path]:
    files = list(FILES.values())
    templates = Path(next(iter(importlib.import_module("deep_gemm.templates").__path__)))
    files += [path for pattern in ("*/*.jinja", "*/*.cuh") for path in templates.glob(pattern)]
    files += [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    return sorted(set(files))


def test_files_stay_small() -> None:
    lines = {path: path.read_text().count("\n") for path in source_files()}
    long = {str(path): count for path, count in lines.items() if count > MAX_LINES}
    assert long == {}, "split them, one noun a file"


def test_every_package_is_listed_for_installation() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'^  "(deep_gemm[\w.]*)",$', text, flags=re.MULTILINE))
    on_disk = set()
    for name, directory in (
        ("deep_gemm", "deep_gemm"),
        ("deep_gemm.jit", "jit"),
        ("deep_gemm.templates", "templates"),
    ):
        for path in (ROOT / directory).rglob("__init__.py"):
            on_disk.add(".".join((name, *path.parent.relative_to(ROOT / directory).parts)))
    assert listed == on_disk
