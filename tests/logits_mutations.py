"""Device code of indexer logits and of the prenorm product broken on purpose, as in `mutations.py`: each edit makes a
wrong result, and no wait for something that never comes."""

from __future__ import annotations

from logit_runs import params_of
from mutation import Mutation

from deep_gemm.spec import LogitsScheduleSpec, LogitsSpec, PagedLogitsSpec, PrenormSpec, Spec

SPECS: dict[str, Spec] = {
    "prompt": LogitsSpec(300, 3000, 64, 128, 3000, clean=True, num_sms=7),
    "pages": PagedLogitsSpec(7, 2, 64, 128, 32, 1102, 157, 9, 5000),
    "schedule": LogitsScheduleSpec(40, 9, 1),
    "product": PrenormSpec(300, 24, 4096, 1, 132),
}

KERNELS = {name: params_of(spec) for name, spec in SPECS.items()}

_LOGITS = ("prompt", "pages")
_PROMPT, _PAGES, _SCHEDULE, _PRODUCT = (("prompt",), ("pages",), ("schedule",), ("product",))

MUTATIONS = [
    Mutation(
        "give no query the low part of its weights", "logits.cuh", "if (!low) return high;", "return high;", _LOGITS
    ),
    Mutation("give a key its neighbour's scale", "logits.cuh", "arg.scales[key] :", "arg.scales[key ^ 1] :", _PROMPT),
    Mutation("store a key's logit one place further", "logits.cuh", "[%0+32], %2", "[%0+36], %2", _LOGITS),
    Mutation(
        "attend one key more",
        "logits.cuh",
        "rows[i].start < rows[i].length",
        "rows[i].start <= rows[i].length",
        _PROMPT,
    ),
    Mutation(
        "give all queries the first one's weights",
        "logits.cuh",
        "from[4 * kSet + lane / 8 % queries(kSet)]",
        "from[4 * kSet]",
        _LOGITS,
    ),
    Mutation(
        "begin in the middle of a block with its first keys",
        "logits_prefill.cuh",
        "first = ranges.first() + skipped * kTileKeys",
        "first = ranges.first()",
        _PROMPT,
    ),
    Mutation(
        "leave the columns before a run of keys",
        "logits_prefill.cuh",
        "side ? max_of(begin, last) : begin",
        "side ? max_of(begin, last) : end",
        _PROMPT,
    ),
    Mutation(
        "read a batch of the block table twice",
        "logits_paged.cuh",
        "units.first_page + units.done + 32 + lane",
        "units.first_page + units.done + lane",
        _PAGES,
    ),
    Mutation(
        "put a unit's second page of scales over the first",
        "logits_paged.cuh",
        "places.scales(stage) + i * arg.page_keys * 4",
        "places.scales(stage)",
        _PAGES,
    ),
    Mutation(
        "give the first slots one split more",
        "logits_schedule.cuh",
        "plain = slots - total % slots;",
        "plain = total % slots;",
        _SCHEDULE,
    ),
    Mutation(
        "count splits from the batch's beginning",
        "logits_schedule.cuh",
        "write(slot, request, begin(slot) - before)",
        "write(slot, request, begin(slot))",
        _SCHEDULE,
    ),
    Mutation("cut b to TF32", "prenorm.cuh", "rounded_to_tf32(b[0])", "b[0]", _PRODUCT),
    Mutation(
        "multiply odd elements with the bits of even ones",
        "prenorm.cuh",
        "a[i].words[j / 2] & 0xFFFF0000",
        "a[i].words[j / 2]",
        _PRODUCT,
    ),
    Mutation(
        "leave the last group out",
        "prenorm.cuh",
        "group < kGroups; ++group) sum",
        "group + 1 < kGroups; ++group) sum",
        _PRODUCT,
    ),
    Mutation(
        "leave the last CTA out",
        "prenorm.cuh",
        "other < C::kCluster; ++other",
        "other + 1 < C::kCluster; ++other",
        _PRODUCT,
    ),
    Mutation(
        "take a row of squares from another lane only",
        "prenorm.cuh",
        "__shfl_xor_sync(0xFFFFFFFF, all, 2)",
        "__shfl_xor_sync(0xFFFFFFFF, all, 1)",
        _PRODUCT,
    ),
]


def mutants() -> list[tuple[Mutation, str]]:
    """Each mutation with each kernel that it breaks."""
    return [(mutation, kernel) for mutation in MUTATIONS for kernel in mutation.kernels]
