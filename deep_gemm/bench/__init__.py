"""Measuring the kernels: shapes, timing, side-by-side runs, charts. The command is `deep-gemm bench`."""
