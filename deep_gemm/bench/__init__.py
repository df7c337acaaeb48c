"""Measuring the kernels: shapes, timing, side-by-side runs, surveys. The command is `deep-gemm bench`."""
