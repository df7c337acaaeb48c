"""The quantization_config of a model: which kernels serve each of its weights, if any, and which are left out."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import BF16_FP4, FP8, ROWWISE
from deep_gemm.aot.patterns import compiled
from deep_gemm.errors import InvalidInputError

OTHERS = {
    "awq": "4-bit integers (AWQ)",
    "gptq": "4-bit integers (GPTQ)",
    "auto-round": "4-bit integers (AutoRound)",
    "bitsandbytes": "bitsandbytes' own format",
    "hqq": "HQQ's own format",
    "gguf": "GGUF's own format",
    "compressed_int8": "8-bit integers",
}
"""The known methods, and the weights that each means."""

PER_ROW = frozenset(["fbgemm_fp8", "ptpc_fp8"])
"""Methods of FP8 with one scale per row of the weight and per token."""

MODELOPT = {"FP8": ROWWISE, "FP8_PER_CHANNEL_PER_TOKEN": ROWWISE, "FP8_PB_WO": FP8, "FP8_BLOCK_SCALES": FP8}
"""The operations of ModelOpt's FP8 algorithms: one scale per tensor, per row, and twice per 128 x 128 block."""

MAX_NAMES = 1 << 17
MAX_PATTERNS = 64
MAX_WILDCARDS = 1 << 12


PREFIXES = (
    "model.language_model.model.", "language_model.model.", "model.language_model.", "model.text_model.",
    "thinker.model.", "language_model.", "text_model.", "model.llm.", "llm.model.", "model.", "",
)  # fmt: skip
"""What stands before "layers" in names of a language model's modules, also of one in a model of several parts."""

_BEFORE_LAYERS = re.compile(f"({'|'.join(map(re.escape, PREFIXES))})(?=layers[.])")
_WHOLE = frozenset(prefix.strip(".") for prefix in PREFIXES if prefix)


@dataclass(frozen=True)
class Kind:
    """How a quantised weight is stored: the operation that multiplies by it, and why none does ("" if one does)."""

    op: str = FP8
    why_not: str = ""


@dataclass(frozen=True)
class Names:
    """Modules that a quantization_config lists: by name, by wildcards, or by regular expressions."""

    plain: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def read(cls, entries: Any, where: str) -> Names:
        """Of a list of names. "re:" begins a regular expression, and * stands for any text, dots too. Raises
        InvalidInputError for anything else."""
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise InvalidInputError(
                f"{where} of quantization_config must be a list of names, but it is {shown(entries)}."
            )
        plain, wild, patterns = set(), [], []
        for entry in entries:
            # A module may be wrapped by one that clamps, and hold the weight as its `linear`.
            name = re.sub(r"\\?\.(linear|weight)(\$?)$", r"\2", entry.strip("."))
            if name.startswith("re:"):
                patterns.append((entry, name[3:][:256]))
            elif any(sign in name for sign in "*?["):
                wild.append(name)
            else:
                plain.add(name[found.end() :] if (found := _BEFORE_LAYERS.match(name)) else name)
        for kind, count, most in (
            ("names", len(plain), MAX_NAMES), ("wildcards", len(wild), MAX_WILDCARDS),
            ("patterns", len(patterns), MAX_PATTERNS),
        ):  # fmt: skip
            if count > most:
                raise InvalidInputError(f"{where} of quantization_config has {count} {kind}: {most} at most.")
        whole = [each for name in wild for each in (name, f"{name}.*")]  # and what is in such a module
        ready = [re.compile("|".join(map(fnmatch.translate, whole)))] if wild else []
        for entry, pattern in patterns:
            try:
                ready.append(compiled(pattern))
            except ValueError as error:
                raise InvalidInputError(f"{where} of quantization_config has {shown(entry)}: {error}.") from error
        return cls(frozenset(plain), tuple(ready))

    def have(self, names: Iterable[str]) -> bool:
        """Whether an entry names the module that has these names, from "layers" on, or a module that holds it."""
        if self.plain & _WHOLE:
            return True
        for name in names:
            parts = name.split(".")
            spans = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
            if any(span in self.plain for span in spans):
                return True
            if any(found.match(prefix + name) for found in self.patterns for prefix in PREFIXES):
                return True
        return False

    def mention(self, modules: Collection[str]) -> bool:
        """Whether an entry has one of these modules in it."""
        texts = (*self.plain, *(found.pattern for found in self.patterns))
        words = re.compile(rf"(?<![A-Za-z0-9_])({'|'.join(map(re.escape, modules))})(?![A-Za-z0-9_])")
        return any(words.search(text) for text in texts)


@dataclass(frozen=True)
class Format:
    """`kinds` are those of quantised weights, each with the modules that are of it, the first that fits counting;
    None: all others. Modules of no kind, and those `left_out`, are not quantised. `given` says that the model is
    quantised at all."""

    given: bool = False
    problems: tuple[str, ...] = ()
    kinds: tuple[tuple[Names | None, Kind], ...] = ()
    left_out: Names = Names()

    @property
    def fixed(self) -> bool:
        """Whether weights that can be served come with their scales."""
        return any(not kind.why_not for _, kind in self.kinds)

    def kind(self, names: Sequence[str]) -> Kind | None:
        """How the weight of the module with these names (see `Names.have`) is stored; None if it is not quantised."""
        if self.left_out.have(names):
            return None
        return next((kind for modules, kind in self.kinds if modules is None or modules.have(names)), None)

    def leaves_out(self, modules: Collection[str]) -> bool:
        """Whether something in one of these modules is named as not quantised, or only others as quantised."""
        listed = [where for where, _ in self.kinds if where is not None]
        others = len(listed) == len(self.kinds) > 0 and not any(where.mention(modules) for where in listed)
        return others or self.left_out.mention(modules)


def config_of(*configs: Mapping[str, Any]) -> Any:
    """The first quantization_config of these configs of a model, or compression_config, its old name; None without."""
    for config in configs:
        if config.get("quantization_config") is not None:
            return config["quantization_config"]
    old = next((config["compression_config"] for config in configs if config.get("compression_config")), None)
    if not isinstance(old, Mapping):
        return old
    inner = old.get("quantization_config")
    return {"quant_method": "compressed-tensors"} | dict(inner if isinstance(inner, Mapping) else old)


def format_of(config: Any) -> Format:
    """The format of `quantization_config`, which may be None. Raises InvalidInputError for a wrong type."""
    if config is None:
        return Format()
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"quantization_config must be an object, but it is {shown(config)}.")
    if _is_modelopt(config):
        inner = config.get("quantization")
        return _modelopt(inner if isinstance(inner, Mapping) else config)
    method = config.get("quant_method")
    if isinstance(method, str):
        method = method.lower().replace("compressed_tensors", "compressed-tensors")
    problems: tuple[str, ...] = ()
    if method == "compressed-tensors":
        kinds = _compressed(config)
    elif method == "fp8":
        kinds = ((None, _fp8(config)),)
    elif isinstance(method, str) and method in PER_ROW:
        kinds = ((None, Kind(ROWWISE)),)
    elif method == "mxfp4":
        kinds = ((None, Kind(BF16_FP4)),)
    elif isinstance(method, str) and method in OTHERS:
        kinds = ((None, Kind(why_not=f"its weights are {OTHERS[method]}.")),)
    else:
        kinds = ((None, Kind(why_not=f"the quant_method {shown(method)} is not known.")),)
        problems = (f"The quant_method {shown(method)} of quantization_config is not known.",)
    return Format(True, problems, kinds, _left_out(config))


def blocks_not(rows: Any, columns: Any) -> str:
    """Why no kernel serves blocks of this size; "" if one does."""
    if (rows, columns) == (128, 128):
        return ""
    return f"its scales are of {shown(rows)} x {shown(columns)} blocks, not of 128 x 128."


def _fp8(config: Mapping[str, Any]) -> Kind:
    """Without blocks there is one scale per tensor, which rowwise operations take as that of every row."""
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return Kind(why_not=f"its weights are {shown(config['fmt'])}, not E4M3.")
    if block is None:
        return Kind(ROWWISE)
    if config.get("activation_scheme", "dynamic") != "dynamic":
        return Kind(why_not="its activations have one scale per tensor (activation_scheme is not dynamic).")
    if not isinstance(block, list) or len(block) != 2:
        raise InvalidInputError(f"weight_block_size must be two numbers, but it is {shown(block)}.")
    return Kind(why_not=blocks_not(*block))


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    method, producer = config.get("quant_method"), config.get("producer")
    made = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return method.lower().startswith("modelopt") if isinstance(method, str) else made or "quantization" in config


def _modelopt(config: Mapping[str, Any]) -> Format:
    """ModelOpt writes this into config.json, or as `quantization` into hf_quant_config.json beside it. Without an
    algorithm only the cache of keys and values is quantised."""
    if not config.get("quant_algo"):
        return Format()
    left_out, listed = _left_out(config), config.get("quantized_layers")
    if not isinstance(listed, Mapping):
        return Format(True, (), ((None, _algorithm(config)),), left_out)
    by_kind: dict[Kind, list[str]] = {}
    for name, layer in listed.items():
        if not isinstance(layer, Mapping):
            raise InvalidInputError(f"quantized_layers of quantization_config must hold objects, not {shown(layer)}.")
        by_kind.setdefault(_algorithm(layer), []).append(name)
    kinds = tuple((Names.read(names, "quantized_layers"), kind) for kind, names in by_kind.items())
    return Format(True, (), kinds, left_out)


def _algorithm(config: Mapping[str, Any]) -> Kind:
    algorithm, block = config.get("quant_algo"), config.get("group_size") or 128
    op = MODELOPT.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if op is None:
        return Kind(why_not=f"its weights are ModelOpt's {shown(algorithm)}.")
    return Kind(op, blocks_not(block, block) if op == FP8 else "")


def _compressed(config: Mapping[str, Any]) -> tuple[tuple[Names | None, Kind], ...]:
    """The kinds of all groups. A module's name counts more than a regular expression, and that more than its class."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InvalidInputError(f"config_groups of quantization_config must be an object, but it is {shown(groups)}.")
    plain, patterns, classes = [], [], []
    for group in groups.values():
        kind, targets = _compressed_group(group), group.get("targets") or ["Linear"]
        names = Names.read(targets, "targets")
        plain.append((Names(names.plain), kind))
        patterns.append((Names(patterns=names.patterns), kind))
        classes += [kind] * any(name.endswith("Linear") and "." not in name for name in names.plain)
    if len(set(classes)) > 1:
        told = next((kind.why_not for kind in classes if kind.why_not), "its weights have scales of several kinds.")
        classes = [Kind(why_not=told)]
    return (*plain, *patterns, *((None, kind) for kind in classes[:1]))


def _compressed_group(group: Any) -> Kind:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise InvalidInputError(f"a group of quantization_config must have weights, but it is {shown(group)}.")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if strategy is None:  # the size of groups says it
        size = weights.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if (bits, kind) != (8, "float"):
        return Kind(why_not=f"its weights are {shown(kind)} of {shown(bits)} bits, not FP8.")
    if strategy in ("channel", "tensor"):
        if not isinstance(group.get("input_activations"), Mapping):
            why_not = f"its weights are FP8 with one scale per {shown(strategy)}, but its activations are not FP8."
            return Kind(why_not=why_not)
        return Kind(ROWWISE)
    if strategy != "block":
        return Kind(why_not=f"its weights have one scale per {shown(strategy)}, not per row or per 128 x 128 block.")
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2:
        raise InvalidInputError(f"block_structure must be two numbers, but it is {shown(block)}.")
    return Kind(why_not=blocks_not(*block))


def _left_out(config: Mapping[str, Any]) -> Names:
    found = Names()
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        names = Names.read(config.get(key) or [], key)
        found = Names(found.plain | names.plain, found.patterns + names.patterns)
    return found
