"""A small set of kernels that covers every feature of all kernels."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from chosen import FAMILIES, make_params

from deep_gemm.arch import SM90
from deep_gemm.kernels.sm90_fp4_gemm import Fp4Config
from deep_gemm.params import GemmConfig, KernelParams

Item = TypeVar("Item")


def everything() -> list[KernelParams]:
    """Each config of the serving sets, with TMA stores and with direct stores."""
    configs = [config for kernel in FAMILIES for config in kernel.configs(SM90)]
    return [make_params(config, store) for store in ("tma", "direct") for config in configs]


def features(params: KernelParams) -> frozenset[tuple[Hashable, ...]]:
    """The features of a kernel within its family: its tile, its cluster, its way to split K, and so on."""
    config = params.gemm
    kinds: dict[str, Hashable] = {
        "tile": (config.block_m, config.block_n),
        # Consumers of one CTA exchange sums by other code than CTAs do; with both there is a third way.
        "split": (config.cluster_m, config.cluster_n, config.cluster_k, config.consumers_k),
        "consumers": config.num_consumers,
        "partials": config.num_partials,
        "CTAs on an SM": config.ctas_per_sm,
        "persistent": config.persistent,
        "store": (params.store, config.persistent, config.num_consumers),
    }
    return frozenset((params.kernel, kind, value) for kind, value in kinds.items())


def traits(params: KernelParams) -> frozenset[tuple[Hashable, ...]]:
    """The features of any kernel: which it is, and among the GEMMs of its operands' dtype its scales, output, groups
    and epilogue, and each way to work; among products of MXFP4 weights their groups, exponents and ways to work; among
    helpers of one name their options."""
    kinds: dict[str, Hashable] = {name: getattr(params, name) for name in ("scaling", "output", "adds_c", "store")}
    kinds |= {"grouping": params.grouping, "majors": params.majors}
    parts = params.epilogue
    kinds["epilogue"] = bool(parts), parts.is_gated, bool(parts.cast)
    among: Hashable = params.kernel
    if isinstance(config := params.config, GemmConfig):
        among = "e4m3" if "e5m2" in params.dtype else params.dtype  # one code, but for the names of types
        kinds["shared work"] = config.cluster_m * config.cluster_n > 1, config.cluster_k > 1, config.consumers_k > 1
        kinds["loop"] = config.swap_ab, config.persistent, config.num_consumers, config.num_partials > 1
    elif isinstance(config, Fp4Config):
        among = params.kernel, params.dtype
        kinds["loop"] = config.consumers, min(config.cluster, 2), config.in_shared, config.wide
        kinds["exponents"] = params.options
    elif params.options:
        kinds |= {"function": params.options[0]}
    return frozenset({(params.kernel,), *((among, kind, value) for kind, value in kinds.items())})


def cover(
    items: Sequence[Item], features_of: Callable[[Item], frozenset[Hashable]], first: Iterable[Item] = ()
) -> list[Item]:
    """``first`` and enough further ``items``, in their order, to cover every feature: greedily the item with the most
    features that are not covered yet; of equals, the first."""
    chosen = list(first)
    shown = {feature for item in chosen for feature in features_of(item)}
    left = [(item, features_of(item)) for item in items]
    while True:
        new = [len(found - shown) for _, found in left]
        if not new or max(new) == 0:
            break
        item, found = left[new.index(max(new))]
        chosen.append(item)
        shown |= found
    order = {id(item): place for place, item in enumerate(items)}
    return sorted(chosen, key=lambda item: order.get(id(item), -1))
