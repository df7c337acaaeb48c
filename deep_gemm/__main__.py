"""`python -m deep_gemm`: the same as `deep-gemm`."""

from deep_gemm.cli import main

if __name__ == "__main__":
    main()
