"""Layouts of scale factors and alignments of grouped operands, under the names that callers import them by."""

from deep_gemm.layout import align as align
from deep_gemm.layout import ceil_div as ceil_div
from deep_gemm.layout import get_k_alignment_for_contiguous_layout as get_k_alignment_for_contiguous_layout
from deep_gemm.layout import (
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor as get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
)
from deep_gemm.layout import get_m_alignment_for_contiguous_layout as get_m_alignment_for_contiguous_layout
from deep_gemm.layout import get_mk_alignment_for_contiguous_layout as get_mk_alignment_for_contiguous_layout
from deep_gemm.layout import (
    get_mn_major_tma_aligned_packed_ue8m0_tensor as get_mn_major_tma_aligned_packed_ue8m0_tensor,
)
from deep_gemm.layout import get_mn_major_tma_aligned_tensor as get_mn_major_tma_aligned_tensor
from deep_gemm.layout import (
    get_theoretical_mk_alignment_for_contiguous_layout as get_theoretical_mk_alignment_for_contiguous_layout,
)
from deep_gemm.layout import get_tma_aligned_size as get_tma_aligned_size
from deep_gemm.layout import set_mk_alignment_for_contiguous_layout as set_mk_alignment_for_contiguous_layout
from deep_gemm.layout import transform_sf_into_required_layout as transform_sf_into_required_layout
