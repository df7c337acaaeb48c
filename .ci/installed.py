"""Check an installed wheel, in the environment that it is installed into: `python -I .ci/installed.py [--kernels]`.

Imports it, runs `doctor` and a product on the CPU, and looks into the pack of kernels that the wheel ships, which
--kernels says it must have: its kernels are those of this version, are whole, and are found with no compiler allowed.
Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

import deep_gemm
from deep_gemm import kernels
from deep_gemm.aot import shipped as shipping
from deep_gemm.jit.cache import pack
from deep_gemm.runtime import engine


def product() -> None:
    """A product on the CPU, against torch."""
    x, w = torch.randn(8, 256).bfloat16(), torch.randn(128, 256).bfloat16()
    a, b = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False), deep_gemm.per_block_cast_to_fp8(w, use_ue8m0=False)
    d = torch.empty(8, 128, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, b, d)
    exact = x.float() @ w.float().t()
    error = ((d - exact).norm() / exact.norm()).item()
    assert error < 0.06, f"the product differs by {error:.3f} of its norm"


def doctor() -> dict[str, Any]:
    """What `doctor` says; it ends with 1 where there is no GPU."""
    done = subprocess.run([sys.executable, "-I", "-m", "deep_gemm", "doctor", "--json"], capture_output=True, text=True)
    assert done.stdout.startswith("{"), f"doctor ended with {done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shipped() -> str:
    """What the wheel's pack holds."""
    (path,) = Path(deep_gemm.__file__).parent.glob("shipped/*.dgpack")
    found = pack.read(path)
    assert not (problems := found.problems()), problems
    names = {kernel.name for kernel in found.kernels.values()}
    wanted = [params for params in shipping.kernels_of() if kernels.get(params.kernel).kernel_name(params) in names]
    assert len(wanted) == found.count, f"{found.count} kernels, of which this version would ship {len(wanted)}"
    with (
        tempfile.TemporaryDirectory() as empty,
        deep_gemm.settings.override(forbid_compile=True, cache_dir=Path(empty)),
    ):
        for params in wanted:
            assert (layer := engine.build(params).layer) == "pack", f"{params} is from {layer}"
    (listed,) = [one for one in deep_gemm.cache_info()["packs"] if one["path"] == str(path)]
    assert not listed["problem"], listed
    return f"{found.count} kernels of {len({params.kernel for params in wanted})} families, all found in its pack"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="the wheel has kernels")
    options = parser.parse_args()
    here = Path(deep_gemm.__file__)
    assert here.is_relative_to(sysconfig.get_path("purelib")), f"{here} is imported, not the installed wheel"
    product()
    report = doctor()
    told = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{told}: import, doctor ({len(report['problems'])} problems: {report['problems']}), product on the CPU")
    if options.kernels:
        print(f"{told}: {shipped()}")
    else:
        assert not list(here.parent.glob("shipped/*")), "the plain wheel has kernels"


if __name__ == "__main__":
    main()
