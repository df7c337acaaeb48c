"""Tensors whose storage was freed, as FSDP does between uses: the error names them, and the CUDA context survives."""

import pytest
import torch
from gpu_cases import DEVICE, nan_output

import deep_gemm
from deep_gemm import InvalidInputError
from deep_gemm.ops.reference import exact_product
from deep_gemm.runtime import calls
from deep_gemm.testing import integer_operands

M, N, K = 72, 520, 784
NAMES = ("a", "the scales of a", "b", "the scales of b", "d")

Operands = dict[str, torch.Tensor]


def fresh(ready: bool = True, seed: int = 0) -> tuple[Operands, torch.Tensor]:
    """Tensors with their own storages, and the expected result."""
    (a, sfa), (b, sfb) = integer_operands(M, N, K, DEVICE, seed)
    expected = exact_product(a, sfa, b, sfb).bfloat16()
    if ready:
        sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    return dict(zip(NAMES, (a, sfa, b, sfb, nan_output(M, N)), strict=True)), expected


def gemm(x: Operands) -> torch.Tensor:
    a, sfa, b, sfb, d = (x[name] for name in NAMES)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
    return d


def still_works(ready: bool = True) -> None:
    """Check that a valid call and CUDA itself still work. An illegal address would have ended both."""
    x, expected = fresh(ready, seed=1)
    for _ in range(3):
        x["d"].fill_(float("nan"))
        assert torch.equal(gemm(x), expected)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        assert float(torch.ones(3, device=DEVICE).sum()) == 3.0


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("calls_before", [0, 1, 2])
@pytest.mark.parametrize("freed", NAMES)
def test_a_storage_that_was_freed_is_named(freed: str, calls_before: int, ready: bool) -> None:
    """The storage is freed before any call, after a first call, or after a warm call."""
    x, expected = fresh(ready)
    calls.forget_all()
    for _ in range(calls_before):
        assert torch.equal(gemm(x), expected)
    storage = x[freed].untyped_storage()
    size, values = storage.nbytes(), x[freed].clone()
    storage.resize_(0)
    for _ in range(3):
        with pytest.raises(InvalidInputError, match=f"^{freed} has no memory"):
            gemm(x)
    still_works(ready)
    # After it is gathered again, it can be used again.
    storage.resize_(size)
    x[freed].copy_(values)
    assert torch.equal(gemm(x), expected)


@pytest.mark.parametrize("freed", NAMES)
def test_a_replay_names_it_too(freed: str) -> None:
    """A call with other tensors came before, so that this call is a replay. One of its tensors has no memory."""
    for seed in range(3):
        first, expected = fresh(seed=seed)
        assert torch.equal(gemm(first), expected)
    x, _ = fresh(seed=4)
    x[freed].untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match=f"^{freed} has no memory"):
        gemm(x)
    still_works()


@pytest.mark.parametrize("shrunk", NAMES)
def test_a_storage_that_is_too_small_is_named_by_a_first_call(shrunk: str) -> None:
    x, _ = fresh()
    calls.forget_all()
    x[shrunk].untyped_storage().resize_(x[shrunk].untyped_storage().nbytes() // 2)
    with pytest.raises(InvalidInputError, match=f"^{shrunk} has no memory: it needs"):
        gemm(x)
    still_works()


def test_tensors_of_a_transform_are_refused_in_words() -> None:
    x, _ = fresh()
    a, sfa, b, sfb, d = (x[name] for name in NAMES)
    with pytest.raises(InvalidInputError, match="without memory of its own"):
        torch.func.vmap(lambda row: deep_gemm.fp8_gemm_nt((a, row), (b, sfb), d))(torch.stack([sfa, sfa]))
    still_works()


def test_scales_to_transpose() -> None:
    sf = torch.rand(M, 7, device=DEVICE)
    sf.untyped_storage().resize_(0)
    if DEVICE == "cuda":
        with pytest.raises(InvalidInputError, match=r"^sf has no memory"):
            deep_gemm.get_mn_major_tma_aligned_tensor(sf)
    still_works()


def test_no_elements_need_no_memory() -> None:
    x, _ = fresh()
    none = {name: torch.empty_like(x[name][:0]) for name in ("a", "the scales of a", "d")}
    assert all(tensor.numel() == 0 and tensor.data_ptr() == 0 for tensor in none.values())
    assert gemm(x | none).shape == (0, N)
