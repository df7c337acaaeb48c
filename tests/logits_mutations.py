"""Device code of indexer logits and of the prenorm product broken on purpose, as in `mutations.py`: each edit makes a
wrong result, and no wait for something that never comes."""

from logit_runs import params_of
from mutation import Mutation

from deep_gemm.spec import LogitsScheduleSpec, LogitsSpec, PagedLogitsSpec, PrenormSpec, Spec

SPECS: dict[str, Spec] = {
    "prompt": LogitsSpec(300, 3000, 64, 128, 3000, clean=True, num_sms=7),
    "short prompt": LogitsSpec(60, 700, 64, 128, 700, clean=True, num_sms=132),
    "pages": PagedLogitsSpec(7, 2, 64, 128, 32, 1102, 157, 2, 5000),
    "schedule": LogitsScheduleSpec(40, 9, 1),
    "product": PrenormSpec(300, 24, 4096, 1, 132),
    "wide product": PrenormSpec(1000, 24, 1088, 1, 132, batch_invariant=True),
    "long product": PrenormSpec(5000, 24, 1088, 1, 132, batch_invariant=True),
}

KERNELS = {name: params_of(spec) for name, spec in SPECS.items()}

_LOGITS = ("prompt", "pages")
_PROMPT, _PAGES, _SCHEDULE, _PRODUCT = (("prompt",), ("pages",), ("schedule",), ("product",))

# fmt: off
MUTATIONS = [
    Mutation("multiply by the high part of a weight twice", "logits.cuh", "[lane / 4 % 2][lane % 4]", "[0][lane % 4]",
             _LOGITS),
    Mutation("give a key its neighbour's scale", "logits.cuh", "arg.scales[min_of(key,", "arg.scales[min_of(key ^ 1,",
             _PROMPT),
    Mutation("store a key's logit one place further", "logits.cuh", "[%0+32], %2", "[%0+36], %2", _LOGITS),
    Mutation("attend one key less", "logits.cuh", "rows.start[i] < rows.length[i]",
             "rows.start[i] + 1 < rows.length[i]", _PROMPT),
    Mutation("give all queries the first one's weights", "logits.cuh", "from[4 * set + lane / 8 % queries(set)]",
             "from[4 * set]", _LOGITS),
    Mutation("begin in the middle of a block with its first keys", "logits_prefill.cuh",
             "first = run.first + tile * kTileKeys", "first = run.first", _PROMPT),
    Mutation("load a block's first keys where a CTA begins in its middle", "logits_prefill.cuh",
             "load_first(block, run.first + tile(begin) * kTileKeys)", "load_first(block, run.first)", _PROMPT),
    Mutation("give all CTAs of a block its first tile", "logits_prefill.cuh",
             "(blockIdx.x - block * parts) * each", "0", ("short prompt",)),
    Mutation("leave the tiles of the block in which a CTA ends", "logits_prefill.cuh", "share.last_tile = tile(end)",
             "share.last_tile = 0", _PROMPT),
    Mutation("write a unit's logits to the next visit's rows", "logits.cuh", "if constexpr (C::kTurns) write();",
             "if (first) rows.load(visit, arg, thread);\n        if constexpr (C::kTurns) write();", _PROMPT),
    Mutation("leave the columns before a run of keys", "logits_prefill.cuh",
             "{min_of(end, first), end}", "{begin, end}", _PROMPT),
    Mutation("read a batch of the block table twice", "logits_paged.cuh",
             "entry_of(now, now_split, unit + batch * C::kConsumers)", "entry_of(now, now_split, unit)", _PAGES),
    Mutation("put a unit's second page of scales over the first", "logits_paged.cuh",
             "places.scales(stage) + i * arg.page_keys * 4", "places.scales(stage)", _PAGES),
    Mutation("begin the next request with another consumer's pages", "logits_paged.cuh",
             "(unit + C::kConsumers - units * groups % C::kConsumers) % C::kConsumers)", "unit)", _PAGES),
    Mutation("give the first slots one split more", "logits_schedule.cuh", "plain = slots - total % slots;",
             "plain = total % slots;", _SCHEDULE),
    Mutation("count splits from the batch's beginning", "logits_schedule.cuh",
             "write(slot, request, begin(slot) - before)", "write(slot, request, begin(slot))", _SCHEDULE),
    Mutation("cut b to TF32", "prenorm.cuh", "rounded_to_tf32(b[0])", "b[0]", _PRODUCT),
    Mutation("multiply odd elements with the bits of even ones", "prenorm.cuh", "a[i].words[j / 2] & 0xFFFF0000",
             "a[i].words[j / 2]", _PRODUCT),
    Mutation("leave the last group out", "prenorm.cuh", "group < kGroups; ++group) {",
             "group + 1 < kGroups; ++group) {", _PRODUCT),
    Mutation("leave the last part of K out", "prenorm.cuh", "part < C::kCluster * kKept; ++part",
             "part + 1 < C::kCluster * kKept; ++part", (*_PRODUCT, "wide product")),
    Mutation("keep only the last part of K", "prenorm.cuh", "C::kCluster == 1 && turn > 0", "false", ("long product",)),
    Mutation("write a part over the one before", "prenorm.cuh", "C::kCluster == 1 ? 0 : turn", "0", ("wide product",)),
    Mutation("take a row of squares from another lane only", "prenorm.cuh", "0xFFFFFFFF, sum.squares[i], 2)",
             "0xFFFFFFFF, sum.squares[i], 1)", _PRODUCT),
]
# fmt: on


def mutants() -> list[tuple[Mutation, str]]:
    """Each mutation with each kernel that it breaks."""
    return [(mutation, kernel) for mutation in MUTATIONS for kernel in mutation.kernels]
