"""Kernels of users' own, through the same compilers, cache and launch records as ours."""
