"""What configs of wgmma kernels cost, in the units of the performance model."""

from __future__ import annotations

from ...params import GemmConfig
from ..features import Costs
from ..gemm_features import LINE_BYTES

LEAST_CYCLES = 8.0
"""The least cycles of a wgmma, however narrow."""

PROMOTION_CYCLES = 0.5
"""Cycles for the promotion of one column of an m64 slice."""

TOKEN_CYCLES = 5.8
"""Cycles for reading and multiplying one token's scale in tiles for few rows, where each column has its own scale."""

PROLOGUE_US = 0.16
"""Extra microseconds of a launch, compared with one for few rows."""

DIRECT_ELEMENTS = 10.0
"""The cost of an element that is stored by itself, in elements that TMA stores."""


def slices(config: GemmConfig) -> int:
    """m64 slices of rows that one consumer multiplies."""
    return config.height // (64 * config.num_consumers // config.consumers_k)


def wgmma_costs(
    config: GemmConfig,
    mma_n: int = 0,
    *,
    aligned: bool,
    store_warp: bool,
    few_rows: bool = False,
    promotion: float = PROMOTION_CYCLES,
    busy: float = 0.0,
    stored_row: int = LINE_BYTES,
    element: float = 1.0,
    buffered: int = 0,
    hides_epilogue: bool = True,
) -> Costs:
    """The costs of ``config``, whose wgmma have ``mma_n`` columns; 0: all of a tile.

    Args:
        aligned: TMA stores D, in rows of ``stored_row`` bytes. A shorter row takes as long as one of 128 bytes.
        few_rows: tiles for few rows of A, whose epilogue transposes D.
        promotion: cycles in which a consumer promotes one column of an m64 slice; 0 if it does not.
        busy: cycles for each column of an m64 slice in which shared memory serves promotion and cannot feed products.
        element: the cost of an element that TMA stores.
    """
    height, width = config.block_m, config.block_n
    if config.swap_ab:
        height, width = width, height
    mma_n = mma_n or width
    rows = height // (64 * config.num_consumers // config.consumers_k)  # m64 slices that one consumer multiplies
    products = rows * (width // mma_n) * 4
    consumers = config.num_consumers // config.consumers_k  # that multiply the same block
    promoted = rows * width * promotion + (width * TOKEN_CYCLES if few_rows else 0)
    return Costs(
        tensor=consumers * (products * max(mma_n / 2, LEAST_CYCLES) + rows * width * busy),
        read=consumers * products * (64 + mma_n) * 32,
        promotion=promoted if promotion else 0.0,
        ahead=config.num_partials != 1,
        consumers_k=config.consumers_k,
        element=element * LINE_BYTES / stored_row if aligned else DIRECT_ELEMENTS,
        buffered=buffered,
        store_warp=store_warp,
        hides_epilogue=hides_epilogue,
        exchanges_edges=not few_rows,
        prologue_us=0.0 if few_rows else PROLOGUE_US,
    )
