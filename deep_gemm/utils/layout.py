"""Layouts of scale factors and alignments of grouped operands, under the names that callers import them by."""

from deep_gemm.layout import *  # noqa: F403
