"""The kernels that are no GEMMs: those that prepare operands, casts, indexer logits, and the prenorm product."""

from __future__ import annotations

from .base import Kernel
from .helpers import COPY_ROWS, K_GROUP_MAPS, LOGITS_SCHEDULE, TRANSPOSE_BYTES, TRANSPOSE_SCALES
from .quantize import QUANTIZE
from .rows import ROWS
from .sm90_fp8_mqa_logits import PROMPT_LOGITS
from .sm90_fp8_paged_mqa_logits import PAGED_LOGITS
from .sm90_tf32_hc_prenorm_gemm import PRENORM

OTHERS: tuple[Kernel, ...] = (
    *(COPY_ROWS, K_GROUP_MAPS, QUANTIZE, ROWS, TRANSPOSE_BYTES, TRANSPOSE_SCALES),
    *(PROMPT_LOGITS, PAGED_LOGITS, LOGITS_SCHEDULE, PRENORM),
)
