"""Kernels that multiply with mma.sync, which every GPU has from compute capability 8.0 on."""
