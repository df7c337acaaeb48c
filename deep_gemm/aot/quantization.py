"""The quantization_config of a model: which kernels serve its weights, if any, and which weights are left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import FP8, ROWWISE
from deep_gemm.errors import InvalidInputError

OTHERS = {
    "awq": "4-bit integers (AWQ)",
    "gptq": "4-bit integers (GPTQ)",
    "auto-round": "4-bit integers (AutoRound)",
    "bitsandbytes": "bitsandbytes' own format",
    "mxfp4": "4-bit floats (MXFP4)",
    "hqq": "HQQ's own format",
    "gguf": "GGUF's own format",
    "compressed_int8": "8-bit integers",
}
"""The known methods, and the weights that each means."""

PER_ROW = frozenset(["fbgemm_fp8", "ptpc_fp8"])
"""Methods of FP8 with one scale per row of the weight and per token."""

MAX_NAMES = 1 << 17
MAX_PATTERNS = 64


@dataclass(frozen=True)
class Format:
    """`why_not` says why no kernel serves the weights; "" if one does, or if there is no quantization_config (`given`).
    `op` is the operation of quantised weights. `names` and `patterns` are those of modules that are not quantised.
    `fixed` says that weights come with their scales."""

    given: bool = False
    why_not: str = ""
    problems: tuple[str, ...] = ()
    op: str = FP8
    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    @property
    def fixed(self) -> bool:
        return self.given and not self.why_not

    def leaves_out(self, name: str) -> bool:
        """Whether this module is not quantised: an entry names it, or a module that holds it."""
        parts = name.split(".")
        spans = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return any(span in self.names for span in spans) or any(found.match(name) for found in self.patterns)

    def names_any(self, modules: Collection[str]) -> bool:
        """Whether an entry names one of these modules, or something in it."""
        return any(part in modules for name in self.names for part in name.split("."))


def format_of(config: Any) -> Format:
    """The format of `quantization_config`, which may be None. Raises InvalidInputError for a wrong type."""
    if config is None:
        return Format()
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"quantization_config must be an object, but it is {shown(config)}.")
    method = config.get("quant_method")
    problems: tuple[str, ...] = ()
    op, why_not = FP8, ""
    if method == "fp8":
        op, why_not = _fp8(config)
    elif method == "compressed-tensors":
        op, why_not = _compressed(config)
    elif isinstance(method, str) and method in PER_ROW:
        op = ROWWISE
    elif isinstance(method, str) and method in OTHERS:
        why_not = f"its weights are {OTHERS[method]}."
    elif method == "modelopt" and config.get("quant_algo") in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        op = ROWWISE
    elif method == "modelopt":
        why_not = f"its weights are ModelOpt's {shown(config.get('quant_algo'))}."
    else:
        why_not = f"the quant_method {shown(method)} is not known."
        problems = (f"The quant_method {shown(method)} of quantization_config is not known.",)
    names, patterns = _left_out(config)
    return Format(True, why_not, problems, op, names, patterns)


def blocks_not(rows: Any, columns: Any) -> str:
    """Why no kernel serves blocks of this size; "" if one does."""
    if (rows, columns) == (128, 128):
        return ""
    return f"its scales are of {shown(rows)} x {shown(columns)} blocks, not of 128 x 128."


def _fp8(config: Mapping[str, Any]) -> tuple[str, str]:
    """Without blocks there is one scale per tensor, which rowwise operations take as that of every row."""
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return FP8, f"its weights are {shown(config['fmt'])}, not E4M3."
    if block is None:
        return ROWWISE, ""
    if config.get("activation_scheme", "dynamic") != "dynamic":
        return FP8, "its activations have one scale per tensor (activation_scheme is not dynamic)."
    if not isinstance(block, list) or len(block) != 2:
        raise InvalidInputError(f"weight_block_size must be two numbers, but it is {shown(block)}.")
    return FP8, blocks_not(*block)


def _compressed(config: Mapping[str, Any]) -> tuple[str, str]:
    """All groups must be FP8 with the same kind of scales."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InvalidInputError(f"config_groups of quantization_config must be an object, but it is {shown(groups)}.")
    found = [_compressed_group(group) for group in groups.values()]
    if why_not := next((why for _, why in found if why), ""):
        return FP8, why_not
    ops = {op for op, _ in found}
    return (ops.pop(), "") if len(ops) == 1 else (FP8, "its weights have scales of several kinds.")


def _compressed_group(group: Any) -> tuple[str, str]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise InvalidInputError(f"a group of quantization_config must have weights, but it is {shown(group)}.")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if (bits, kind) != (8, "float"):
        return FP8, f"its weights are {shown(kind)} of {shown(bits)} bits, not FP8."
    if strategy in ("channel", "tensor"):
        if not isinstance(group.get("input_activations"), Mapping):
            return FP8, f"its weights are FP8 with one scale per {shown(strategy)}, but its activations are not FP8."
        return ROWWISE, ""
    if strategy != "block":
        return FP8, f"its weights have one scale per {shown(strategy)}, not per row or per 128 x 128 block."
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2:
        raise InvalidInputError(f"block_structure must be two numbers, but it is {shown(block)}.")
    return FP8, blocks_not(*block)


def _left_out(config: Mapping[str, Any]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    names: set[str] = set()
    patterns: list[re.Pattern[str]] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        entries = config.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise InvalidInputError(
                f"{key} of quantization_config must be a list of names, but it is {shown(entries)}."
            )
        if len(entries) > MAX_NAMES:
            raise InvalidInputError(f"{key} of quantization_config has {len(entries)} names: {MAX_NAMES} at most.")
        for entry in entries:
            # Some configs end a name with a dot; "re:" begins a regular expression.
            if not entry.startswith("re:"):
                names.add(entry.strip(".").removesuffix(".weight"))
                continue
            try:
                patterns.append(re.compile(entry[3:][:256]))
            except re.error as error:
                raise InvalidInputError(f"{key} of quantization_config has {shown(entry)}: {error}.") from error
    if len(patterns) > MAX_PATTERNS:
        raise InvalidInputError(f"quantization_config has {len(patterns)} patterns: {MAX_PATTERNS} at most.")
    return frozenset(names), tuple(patterns)
