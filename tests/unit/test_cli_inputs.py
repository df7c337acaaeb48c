"""Any input to the command line ends with an exit status and a sentence: no traceback, no hang."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deep_gemm.aot import inputs
from deep_gemm.cli import console
from deep_gemm.cli.app import COMMANDS, app
from deep_gemm.errors import CompileError, InvalidInputError
from deep_gemm.runtime import engine
from deep_gemm.settings import child_environment

LONG = "9" * 5000
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + last] * 9)}]\n" for last, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CONFIG = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    def build(params: Any) -> Any:
        raise CompileError("not in this test")

    monkeypatch.setattr(engine, "build", build)


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{arguments}: {result.output}") from result.exception
    assert result.exit_code in (0, 1, 2, 3), result.output
    assert "Traceback" not in result.output
    return result


def refused(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code in (1, 2, 3), result.output
    # Click shows the whole word that it refuses.
    assert len(result.output) < 1500 + sum(len(str(word)) for word in arguments), result.output[:3000]
    return result.output


# fmt: off
SHAPES = [
    "0x2048", "2048x0", "x", "1x2x3x4", "-1x5", f"{LONG}x128", "99999999999x128", "1e3x128", "６４x128", "1_0x128",
]
# fmt: on


@pytest.mark.parametrize("text", [*SHAPES, "1_0x128", "", "0x0x0", "128x128x", "nanx128", "[/b]x128"])
@pytest.mark.parametrize("command", [("precompile", "--shape"), ("inspect", "--"), ("bench", "--shape")])
def test_a_shape_that_is_none(command: Sequence[str], text: str) -> None:
    if command[0] == "inspect" and text in ("2048x0",):
        text = "64x2048x0"
    refused(*command, text)


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "1-100000000000", "1-2147483647", LONG, f"1-{LONG}", "1:0", "5-3", "1,,2", "nan", "1.5", "٣", ""],
)
@pytest.mark.parametrize("command", [("precompile", "--shape", "128x128"), ("bench", "--shape", "128x128")])
def test_sizes_that_are_none(command: Sequence[str], text: str) -> None:
    assert "--m" in refused(*command, "--m", text)


@pytest.mark.parametrize(
    "arguments",
    [
        *[("--tp", text) for text in ("0", "-1", "x", LONG, "1.5", "3")],
        *[("--ep", text) for text in ("0", "2", LONG)],
        *[("--max-m", text) for text in ("0", "-1", LONG, "99999999999")],
        *[("--num-sms", text) for text in ("0", LONG)],
        *[("--shard", text) for text in ("", "1", "2/2", "-1/2", f"{LONG}/{LONG}", "1/x", "0/0")],
        *[("--jobs", text) for text in ("0", LONG)],
        *[("--arch", text) for text in ("", "sm_12", "sm_90a;x", LONG, "[/b]")],
        ("--pack", "/"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[1][:12]}",
)
def test_options_of_precompile(tmp_path: Path, arguments: tuple[str, str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused("precompile", "--model", tmp_path, "--m", "8", *arguments)


FILES = {
    "deep.json": "[" * 100_000, "deep.yaml": "[" * 3_000, "long.json": f"[{{'n': {LONG}, 'k': 128}}]".replace("'", '"'),
    "long.yaml": f"- {{n: {LONG}, k: 128}}", "nan.json": '[{"n": NaN, "k": 128}]',
    "infinite.json": '[{"n": 1e400, "k": 128}]', "date.yaml": "m: 2001-99-99", "moment.yaml": "m: !!timestamp x",
    "int.yaml": "- {n: !!int abc, k: 128}", "bool.yaml": "- {n: !!bool abc, k: 128}",
    "float.yaml": "- {n: !!float abc, k: 128}", "binary.yaml": "- {n: !!binary '%', k: 128}",
    "object.yaml": "- !!python/object/apply:os.system ['touch pwned']",
    "bomb.yaml": BOMB + "shapes: *i\n", "bomb-entry.yaml": BOMB + "shapes: [{n: *i, k: 128}]\n",
    "bomb-m.yaml": BOMB + "m: *i\nshapes: [{n: 128, k: 128}]\n",
    "self.yaml": "&a [*a]", "key.yaml": "? {a: b}\n: c", "two.yaml": "--- 1\n--- 2\n", "null.json": "null",
    "text.json": '"7168x2048"', "empty.json": "", "empty.yaml": "",
    "m.json": '{"m": "1-100000000000", "shapes": [{"n": 128, "k": 128}]}',
    "groups.json": '[{"n": 128, "k": 128, "groups": 8}]', "groups-text.json": '[{"n": 128, "k": 128, "groups": "8"}]',
    "name.json": '[{"n": 128, "k": 128, "name": ["x"]}]', "shapes.json": '{"shapes": 7}',
    "text-config.json": '{"text_config": 7}', "architectures.json": '{"architectures": ["A"]}',
    "layer-types.json": json.dumps(CONFIG | {"layer_types": [["full_attention"]] * 9}),
    "heads.json": json.dumps(CONFIG | {"num_attention_heads": 10**4000}),
    "ignore.json": json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8", "ignore": [7]}}),
    "groups-config.json": json.dumps(
        CONFIG | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": 7}}}),
    "x.safetensors": "not one", "x.safetensors.index.json": '{"weight_map": []}',
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_describes_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    refused("precompile", "--file", path, "--m", "8")
    assert not Path("pwned").exists()


def test_a_file_that_cannot_be_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_FILE_BYTES", 1 << 10)
    for data in (b"\xff\xfe\x00", b"[" + b" " * 2000 + b"]"):
        (tmp_path / "a.json").write_bytes(data)
        refused("precompile", "--file", tmp_path / "a.json")
    refused("precompile", "--file", tmp_path / "missing.json")
    refused("precompile", "--file", "/dev/zero")


ROWS = {
    "no json": "hello\n", "a list": "[1]\n", "no mode": '{"m": 1}\n', "no sizes": '{"mode": "flush"}\n',
    "negative": '{"mode": "flush", "m": -1, "n": 1, "k": 1}\n',
    "text": '{"mode": "flush", "m": 1, "n": 1, "k": 1, "ratio_tensorwise": "x"}\n',
    "zero": '{"mode": "flush", "m": 1, "n": 1, "k": 1, "ratio_tensorwise": 0, "times": {"a": 0}, "selected": "a"}\n',
    "huge": '{"mode": "flush", "m": 1, "n": 1, "k": 1, "ratio_tensorwise": 1e400, "times": {"a": 1e400}}\n',
    "nan": '{"mode": "flush", "m": 1, "n": 1, "k": 1, "ratio_tensorwise": NaN}\n',
    "digits": '{"mode": "flush", "m": ' + LONG + "}\n", "deep": "[" * 100_000, "no text": "\xff",
}  # fmt: skip


@pytest.mark.parametrize("text", ROWS.values(), ids=ROWS.keys())
def test_rows_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode("latin-1"))
    assert str(path) in refused("bench", "--from", path)
    assert str(path) in refused("calibrate", "check", path)
    refused("calibrate", "fit", path, "--output", tmp_path / "out.json")


@pytest.mark.parametrize(
    "command",
    [("precompile", "--model"), ("precompile", "--file"), ("tune", "--learn"), ("bench", "--from"),
     ("calibrate", "check"), ("calibrate", "fit", "--output", "out.json")],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.json", "a.safetensors", "a.safetensors.index.json", "config.json"])
def test_a_fifo_is_no_file(tmp_path: Path, command: Sequence[str], name: str) -> None:
    """To open one waits for ever."""
    os.mkfifo(tmp_path / name)
    assert "it is not a regular file" in refused(*command, tmp_path / name)


def test_rows_of_a_survey(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"mode": "flush", "m": 1, "n": 8, "k": 16, "times": {"a": 2.0, "b": 1.0}}
    for selected in ("c", ["a"], None):
        path.write_text(json.dumps(row | {"selected": selected}))
        assert "selected in line 1" in refused("calibrate", "check", path)
    path.write_text(json.dumps(row | {"selected": "a"}))
    assert "0.5000" in run("calibrate", "check", path).output


def test_what_writes_nothing_does_not_end_well(tmp_path: Path) -> None:
    pack, empty = tmp_path / "a.dgpack", tmp_path / "empty"
    empty.mkdir(0o700)
    for arguments in (("pack", pack), ("merge", empty), ("merge", empty, "--pack", pack)):
        assert "nothing was written" in refused("cache", *arguments)
    assert not pack.exists()


@pytest.mark.parametrize(("text", "count"), [("1M", 10**6), ("2KiB", 2048), ("0", 0), ("77", 77), ("1.5G", 1.5e9)])
def test_sizes_are_those_of_the_setting(text: str, count: int) -> None:
    assert console.Size().convert(text, None, None) == count
    assert run("cache", "prune", "--max-bytes", text).exit_code == 0


@pytest.mark.parametrize("text", ["", "-1", "M", "1e400", "nan"])
def test_a_size_that_is_none(text: str) -> None:
    assert "--max-bytes" in refused("cache", "prune", "--max-bytes", text)


@pytest.mark.parametrize("text", ["nan", "-1", "x", LONG + "x"])
@pytest.mark.parametrize(
    "command",
    [("cache", "prune", "--older-than"), ("bench", "--seconds"), ("calibrate", "--seconds"),
     ("calibrate", "survey", "--output", "x", "--within")],
    ids=" ".join,
)  # fmt: skip
def test_a_number_that_is_none(command: Sequence[str], text: str) -> None:
    assert run(*command, text).exit_code == 2


@pytest.mark.parametrize("name", ["[/b]", "[red]x"])
def test_paths_are_text_and_not_markup(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / name
    root.mkdir(0o700, parents=True)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(root))
    monkeypatch.setenv("DG_JIT_PRECOMPILED", str(root / "a.dgpack"))
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(root / "nvcc"))
    for command in (["doctor"], ["cache", "info"], ["precompile", "--file", root]):
        assert str(root) in run(*command).output


def test_a_path_need_not_be_text(tmp_path: Path) -> None:
    root = os.fsencode(str(tmp_path)) + b"/a\xffb"
    os.mkdir(root, 0o700)
    env = {os.fsencode(name): os.fsencode(value) for name, value in child_environment("DG_JIT_CACHE_DIR").items()}
    for command in (["cache", "info"], ["precompile", "--file", root]):
        done = subprocess.run(
            [sys.executable, "-m", "deep_gemm", *command],
            env={**env, b"DG_JIT_CACHE_DIR": root},
            capture_output=True,
            timeout=100,
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
        assert b"a\\udcffb" in done.stdout + done.stderr


def test_help_needs_no_torch() -> None:
    code = """
import sys
from deep_gemm.cli import main
for command in sys.argv[1:]:
    sys.argv = ["deep-gemm", *command.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
    heavy = {"torch", "numpy", "yaml", "jinja2", "cuda"} & set(sys.modules)
    assert not heavy, (command, heavy)
"""
    commands = ["", *COMMANDS]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(commands)


WORDS = ["-", "--", "0", "-1", "1", "8", "16", "128", "1e9", "nan", "x", "[/b]", "../x", "/", "~", "*", "%s", "{}"]
WORDS += ["64x128x256", "128x256", "1-9:2", "0/1", "1M", "sm_90a"]
# An argument of a process cannot hold a zero byte or a lone surrogate.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
NASTY = TEXT | st.sampled_from([*WORDS, "", LONG, "a\udcff"])
OPTIONS = {
    ("precompile",): ["--shape", "--file", "--tp", "--ep", "--arch", "--num-sms", "--shard", "--jobs"],
    ("inspect",): ["--arch", "--epilogue", "--num-sms", "--top", ""],
    ("bench",): ["--mode", "--set", "--shape", "--m", "--random", "--seed", "--seconds", "--output", "--from"],
    ("cache", "info"): ["--json", ""], ("cache", "verify"): ["", "--delete"],
    ("cache", "pack"): ["--from", "--arch", "--name", ""], ("cache", "merge"): [""],
    ("cache", "prune"): ["--max-bytes", "--older-than", ""], ("calibrate", "check"): [""],
    ("calibrate", "survey"): ["--random", "--seed", "--min-m", "--max-m", "--mode", "--within", "--seconds"],
    ("calibrate", "fit"): ["--least", ""],
}  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_words_end_in_a_status(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = data.draw(st.sampled_from(sorted(OPTIONS)))
    words: list[str] = []
    for option in data.draw(st.lists(st.sampled_from(OPTIONS[command]), max_size=4)):
        words += [word for word in (option, data.draw(NASTY)) if word != "" or option == ""]
    if command == ("precompile",):
        words += ["--m", "8"]  # ranking all M up to a limit takes long
    run(*command, *words)


# fmt: off
INNER = [
    "n", "k", "m", "name", "groups", "shapes", "weights", "quant_method", "weight_block_size", "ignore", "strategy",
]
# fmt: on
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.just("fp8"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=8,
)
KEYS = [
    *("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("num_experts", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "layer_types",
        "text_config"),
    *("quantization_config", "linear_num_value_heads", "linear_num_key_heads", "mlp_only_layers"),
    *("vision_config", "first_k_dense_replace", "num_hidden_layers", "attn_output_gate", "moe_layer_freq", "shapes",
        "m"),
]  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=JSON
    | st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5)
    | st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3).map(lambda change: CONFIG | change)
)
def test_any_json_is_a_plan_or_a_sentence(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    run("precompile", "--file", path, "--m", "8", "--dry-run")


def test_a_value_is_shown_in_one_line_however_large() -> None:
    nested: Any = "x"
    for _ in range(50):
        nested = [nested] * 9
    for value in (nested, "y" * 10**6, {str(i): i for i in range(1000)}, 10**5000, [[]] * 1000):
        with pytest.raises(InvalidInputError) as error:
            inputs.whole(value, "n", 1, 5)
        assert len(str(error.value)) < 300
