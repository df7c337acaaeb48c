"""Transposes scale factors into the layout that TMA reads."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.runtime import engine

from ..errors import InvalidInputError
from ..spec import TransposeSpec, align
from . import checks


def transpose_scales(sf: Tensor) -> Tensor:
    """``sf`` as MN-major scales: same shape and values, rows contiguous, columns (align(mn, 4)) floats apart.

    ``sf`` is float32 on a CUDA device, (mn, columns) or (groups, mn, columns), of any strides. Runs on the current
    stream of its device.
    """
    checks.check_tensors("transpose_scales", {"sf": sf}, {"sf": (2, 3)})
    if sf.dtype != torch.float32 or not sf.is_cuda:
        raise InvalidInputError(f"sf must be float32 on a CUDA device, but it is {sf.dtype} on {sf.device}.")
    fake = checks.is_fake([sf])
    batched = sf if sf.dim() == 3 else sf.unsqueeze(0)
    batch, rows, columns = batched.shape
    # Not empty_strided, which would not allocate the padding after the last column.
    whole = torch.empty((batch, columns, align(rows, 4)), dtype=sf.dtype, device=sf.device)
    if sf.numel() and not fake:
        device = sf.get_device()
        with torch.cuda.device(device):
            plan = engine.plan(TransposeSpec(rows, columns, batch), device)
            addresses = {"source": sf.data_ptr(), "target": whole.data_ptr()}
            engine.launch_record(plan, {"source": batched.stride()}, addresses, engine.raw_stream(device))()
    out = whole.transpose(1, 2)[:, :rows]
    return out if sf.dim() == 3 else out[0]
