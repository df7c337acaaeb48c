"""What must not change unnoticed: binaries, signatures, refusals, and the configs and launches that are chosen.

    python tests/house.py            compare the tree with tests/house.json; compiles the kernels whose source key or
                                     compiler differs from the record's
    python tests/house.py --all      the same, and compile every kernel, in some three minutes on two cores
    python tests/house.py --show     print whole what the record has digests of, or parts of it: --show families
    python tests/house.py --write    write tests/house.json again, and compile what differs

`tests/unit/test_house.py` compares all but the cubins, and the compile tests compare each cubin that they build. A
change of the record is argued in the commit that makes it. After a conflict in the record take either side of it, and
write it again.
"""

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from chosen import kernel_name
from cover import cover, traits
from house_choices import DRAWN, PER_CHUNK, choices, draw
from house_refusals import digest, refusals

import deep_gemm
from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.jit.binary import Binary
from deep_gemm.jit.compilers import choose
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.kernels.hopper import ffma_bursts
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts
from deep_gemm.runtime import engine
from deep_gemm.settings import settings
from deep_gemm.spec import Accumulate, Dtype, GemmSpec, Grouping, Scaling

FILE = Path(__file__).parent / "house.json"
SHORT, WIDTH = 8, 160
"""Digits of a key and of a cubin's digest, and the columns of the file."""
WRITE = "If that is meant, run `python tests/house.py --write` and say why in the commit."


# ------------------------------------------------------------------------------------------------ binaries


@functools.cache
def cases() -> dict[str, KernelParams]:
    """Every case of every family, by the name of its kernel."""
    return {kernel_name(params): params for kernel in kernels.registry().values() for params in kernel.cases()}


@functools.cache
def keys() -> dict[str, str]:
    """The source key of each case: of its source, of all headers that it reaches, and of the flags."""
    builder = Builder(None)
    return {name: builder.source_key(engine.build_request(params))[:SHORT] for name, params in cases().items()}


@functools.cache
def unchanged() -> frozenset[str]:
    """The cases that the record's compiler would compile to the record's cubins, since their keys are equal."""
    data = recorded()
    if data["compiler"] != compiler():
        return frozenset()
    return frozenset(name for name, key in keys().items() if data["binaries"].get(name, "").split(" ")[0] == key)


@functools.cache
def covering() -> frozenset[str]:
    """Some 60 cases that have every feature of a kernel, which are compiled whatever has changed."""
    return frozenset(kernel_name(params) for params in cover(list(cases().values()), traits))


def is_compiled_always(params: KernelParams) -> bool:
    """Whether ``make test`` compiles a case: one of the cover, or that is not as recorded."""
    name = kernel_name(params)
    return name in covering() or name not in unchanged()


def compiler() -> str:
    """The compiler that cubins are recorded of."""
    with settings.override(use_nvrtc=True):
        return choose().identity


def cubins(params: KernelParams) -> str:
    """Digests of the cubin before and after the edit of the FFMA hints; one if this kernel is not edited."""
    request = engine.build_request(params)
    with settings.override(use_nvrtc=True):
        found = choose()
        compiled = found.compile(
            request.name, request.source, f"{request.name}.cu", found.flags(params.arch), deep_gemm_include()
        )
    both = digest(compiled.cubin, SHORT), edited(params, compiled.cubin, request.name)
    return " ".join(dict.fromkeys(both))


def edited(params: KernelParams, cubin: bytes, name: str) -> str:
    """The digest of a cubin as it is with DG_FFMA_BURSTS on."""
    with settings.override(ffma_bursts=True):
        post_pass = kernels.get(params.kernel).post_pass(params)
    assert post_pass is None or post_pass is ffma_bursts.POST_PASS
    return digest(cubin if post_pass is None else post_pass.apply(cubin, name), SHORT)


def unlike_the_record(binary: Binary) -> str:
    """How the cubin of a case differs from the recorded one, as a sentence; "" if it does not. Another compiler may
    compile other code."""
    data = recorded()
    if binary.compiler != data["compiler"]:
        return ""
    if not (known := data["binaries"].get(binary.name)):
        return f"tests/house.json has no kernel {binary.name}. {WRITE}"
    same = digest(binary.cubin, SHORT) == known.split()[-1]
    return "" if same else f"The cubin of {binary.name} is not the recorded one. {WRITE}"


def deep_gemm_include() -> Path:
    from deep_gemm.jit.generator import include_dir

    return include_dir()


# ------------------------------------------------------------------------------------------------ signatures


def signatures() -> dict[str, str]:
    """Public functions with their parameters and defaults."""
    found = {}
    for name in deep_gemm.__all__:
        value = getattr(deep_gemm, name)
        if inspect.ismodule(value):
            own = [each for each, x in vars(value).items() if getattr(x, "__module__", "") == value.__name__]
            names = getattr(value, "__all__", None) or [each for each in own if not each.startswith("_")]
            found |= {f"{name}.{each}": signature(getattr(value, each)) for each in names}
        else:
            found[name] = signature(value)
    return {name: text for name, text in sorted(found.items()) if text}


def signature(value: Any) -> str:
    if not callable(value) or not getattr(value, "__module__", "").startswith("deep_gemm"):
        return ""
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    return re.sub(r" at 0x\w+", "", str(found.replace(return_annotation=inspect.Signature.empty)))


# ------------------------------------------------------------------------------------------------ families


def families() -> dict[str, dict[str, Any]]:
    """For each family of GEMMs: what its refusals say of drawn and of odd specs, what it says of odd configs, and how
    many legal configs there are, with a digest of them."""
    drawn = [replace(draw(index), num_sms=132) for index in range(150)]
    specs = [odd for spec in drawn for odd in (spec, *odd_specs(spec))]
    found = {}
    for name, kernel in kernels.registry().items():
        if not isinstance(kernel, GemmFamily):
            continue
        serving, legal = list(kernel.configs(SM90)), list(kernel.legal(SM90))
        odd = [each for config in (serving[0], serving[-1]) for each in odd_configs(config)]
        found[name] = {
            "refuses": sorted({shown(why) for spec in specs if (why := kernel.refuses(spec))}),
            "refused": digest([kernel.refuses(spec) is None for spec in specs]),
            "illegal": sorted({shown(why) for config in odd if (why := illegal(kernel, config))}),
            "forbidden": digest([illegal(kernel, config) is not None for config in odd]),
            "serving": digest([tuple_of(config) for config in serving]),
            "legal": f"{len(legal)} {digest([tuple_of(config) for config in legal])}",
        }
    return found


def shown(why: str) -> str:
    """A sentence without its numbers."""
    return re.sub(r"\d+", "#", why)


def illegal(kernel: Any, config: Any) -> str | None:
    try:
        return kernel.illegal(config, SM90)
    except (ArithmeticError, RecursionError, LookupError):  # no sentence
        return None


TILE = ("block_m", "block_n", "block_k", "num_stages", "num_consumers", "cluster_m", "cluster_n", "cluster_k")
TILE += ("ctas_per_sm",)


def tuple_of(config: Any) -> tuple[Any, ...]:
    """A config's fields that differ from their defaults; a family without a field and one with its default agree."""
    defaults = {"num_partials": 1, "buffers": 2, "consumers_k": 1, "parts": False, "in_turn": 1}
    values = {name: getattr(config, name, default) or default for name, default in defaults.items()}
    values |= {name: getattr(config, name) for name in TILE}
    values["persistent"] = getattr(config, "persistent", True)
    return tuple(sorted((name, value) for name, value in values.items() if value != defaults.get(name)))


def odd_configs(config: Any) -> Iterator[Any]:
    for name in TILE:
        for value in (0, 1, 2, 3, 5, 8, 16, 24, 48, 64, 192, 256, 512):
            if value != getattr(config, name):
                yield replace(config, **{name: value})


def odd_specs(spec: GemmSpec) -> Iterator[GemmSpec]:
    yield replace(spec, epilogue=Parts(activation="relu"))
    for name in ("a", "b", "d"):
        operand = getattr(spec, name)
        changes: list[dict[str, Any]] = [{"dtype": dtype} for dtype in get_args(Dtype)]
        changes += [{"major": major} for major in ("k", "mn")] + [{"scaling": each} for each in get_args(Scaling)]
        yield from (replace(spec, **{name: replace(operand, **change)}) for change in (*changes, {"aligned": False}))
    yield from (replace(spec, accumulate=each) for each in get_args(Accumulate))
    yield from (replace(spec, grouping=each) for each in get_args(Grouping))
    yield replace(spec, k=spec.k + 8)


# ------------------------------------------------------------------------------------------------ the file

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "signatures": signatures,
    "refusals": refusals,
    "families": families,
    "choices": lambda: {chunk_name(chunk): choices(chunk) for chunk in range(DRAWN // PER_CHUNK)},
}
"""Of the last three the record has digests, by function, by family, and by chunk of specs."""


def chunk_name(chunk: int) -> str:
    return f"{chunk * PER_CHUNK}-{(chunk + 1) * PER_CHUNK - 1}"


@functools.cache
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def brief(part: str, found: dict[str, Any]) -> dict[str, str]:
    """What the record has of a part."""
    return {name: _brief(part, value) for name, value in found.items()}


def _brief(part: str, value: Any) -> str:
    if part == "signatures":
        return str(value)
    if part == "families":  # each answer for itself, with its number
        return ", ".join(f"{key} {each if isinstance(each, str) else numbered(each)}" for key, each in value.items())
    return numbered(value)


def numbered(values: Any) -> str:
    return f"{len(values)} {digest(json.dumps(values))}"


def differences(part: str, found: dict[str, str], only: Container[str] | None = None) -> str:
    """What of a part, or ``only`` of some, is not as recorded, in sentences; "" if all of it is."""
    known = {name: each for name, each in recorded()[part].items() if only is None or name in only}
    if not (wrong := [name for name in {**known, **found} if known.get(name) != found.get(name)]):
        return ""
    lines = [
        f"  {name}: recorded is {known.get(name, 'nothing')}, and now it is {found.get(name, 'nothing')}"
        for name in wrong[:8]
    ]
    show = f"`python tests/house.py --show {part}` prints them whole, also in an older checkout. "
    first = f"{len(wrong)} of {len(known)} {part} are not those of tests/house.json, by digest:"
    return "\n".join([first, *lines, (show if part in PARTS else "") + WRITE])


def shown_whole(parts: list[str]) -> Iterator[str]:
    """Everything that the record has digests of, one thing a line, so that two outputs can be compared by `diff`."""
    for part in parts:
        for name, value in PARTS[part]().items():
            if part == "choices":
                first = int(name.split("-")[0])
                yield from (
                    f"choice {first + at}: {' '.join(row)}   {draw(first + at)}" for at, row in enumerate(value)
                )
            elif isinstance(value, dict):
                for key, each in value.items():
                    yield from (f"{part} of {name}: {key}: {x}" for x in (each if isinstance(each, list) else [each]))
            else:
                yield f"{part}: {name}{value}"


def binaries(every: bool) -> dict[str, str]:
    """The key and the digests of each case. Those of the record hold where its key and its compiler do, or with
    ``every`` all are compiled."""
    known: frozenset[str] = frozenset() if every else unchanged()
    found = {name: recorded()["binaries"][name] for name in known}
    changed = [name for name in cases() if name not in known]
    with ThreadPoolExecutor(2) as pool:
        digests = pool.map(cubins, [cases()[name] for name in changed])
        found |= {name: f"{keys()[name]} {each}" for name, each in zip(changed, digests, strict=True)}
    return dict(sorted(found.items()))


def filled(found: dict[str, Any]) -> str:
    """The text of the file: as many entries of a part in a line as fit."""
    parts = []
    for name, part in found.items():
        if isinstance(part, str):
            parts.append(f"{json.dumps(name)}: {json.dumps(part)}")
            continue
        lines = [""]
        for each in (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()):
            if lines[-1] and len(lines[-1]) + len(each) + 3 > WIDTH:
                lines.append("")
            lines[-1] += f"{', ' if lines[-1] else ''}{each}"
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)  # threads of small tensors wait by spinning
    if "--show" in arguments:
        print(*shown_whole([each for each in arguments if each in PARTS] or list(PARTS)), sep="\n")
        return 0
    found: dict[str, Any] = {"compiler": compiler(), "binaries": binaries("--all" in arguments)}
    found |= {part: brief(part, make()) for part, make in PARTS.items()}
    wrong = [text for part in ("binaries", *PARTS) if (text := differences(part, found[part]))]
    print(*wrong or ["The tree is as recorded."], sep="\n")
    if "--write" in arguments:
        FILE.write_text(filled(found))
        return 0
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
