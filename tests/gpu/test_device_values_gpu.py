"""DG_CHECK=1 on a GPU: values on the device that break the contract are a sentence, and the context lives on."""

import pytest
import torch
from gpu_cases import DEVICE
from grouped_cases import FORMS, KINDS, Case, Routing, call
from logit_cases import decoding

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, settings

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def alive() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


WRONG = {
    "contiguous": (lambda x: x.__setitem__(slice(120, 140), 1), "has the groups 0 and 1 in rows 0 to 127"),
    "psum": (lambda x: x.__setitem__(1, 140), r"\[1\] is 140, but group 1 begins at row 256"),
    "masked": (lambda x: x.__setitem__(1, 201), r"masked_m\[1\] is 201, but it must be from 0 to 200"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_groups(kind: str, form: str) -> None:
    case = Case(kind, Routing((130, 200)), 136, 256, DEVICE, integers=True)
    expected = case.gathered(case.run(form))
    change, words = WRONG[form]
    a, b, layout = case.arguments(form)
    d = torch.zeros(*(a[0] if kind == "fp8" else a).shape[:-1], 136, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(3):
        call(kind, form, a, b, d, layout)
    right = layout.clone()
    with settings.override(check=True):
        for _ in range(2):
            layout.copy_(right)
            call(kind, form, a, b, d, layout)
            assert torch.equal(case.gathered(d), expected)
            d.fill_(7.0)
            change(layout)
            with pytest.raises(InvalidInputError, match=words):
                call(kind, form, a, b, d, layout)
            alive()
            assert bool((d == 7.0).all())


def test_what_would_trap() -> None:
    """Rows of FP8 that begin inside of 16 bytes, and more runs of labels than a CTA's table holds."""
    a, b = (
        (torch.zeros(256 * size, device=DEVICE).to(torch.float8_e4m3fn), torch.ones(size, 2, device=DEVICE))
        for size in (64, 136)
    )
    sizes = torch.tensor([120, 136], dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(8960, 64, dtype=torch.bfloat16, device=DEVICE)
    labels = (torch.arange(8960, device=DEVICE) // 128 % 2).int()
    w, d = (torch.zeros(*x, 64, dtype=torch.bfloat16, device=DEVICE) for x in ((2, 64), (8960,)))
    with settings.override(check=True):
        with pytest.raises(InvalidInputError, match=r"grouped_layout\[0\] is 120, .* must be a multiple of 16"):
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
                a, b, torch.zeros(2, 64, 136, device=DEVICE), grouped_layout=sizes
            )
        with pytest.raises(InvalidInputError, match="has the group 0 again from row 256 on"):
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows, w, d, labels)
    alive()


def test_pages() -> None:
    x = decoding([100, 300, 600], next_n=2, width=640, device=DEVICE)
    meta = deep_gemm.get_paged_mqa_logits_metadata(x.lengths, 64, 3)

    def run() -> torch.Tensor:
        return deep_gemm.fp8_paged_mqa_logits(x.q, x.cache, x.weights, x.lengths, x.table, meta, 640)

    shape, right = run().shape, x.table.clone()
    with settings.override(check=True):
        assert run().shape == shape
        x.table.fill_(-1)
        with pytest.raises(InvalidInputError, match=r"^block_table\[0, 0\] is -1, but it must be from 0 to"):
            run()
        x.table.copy_(right)
        run()
    alive()


@cuda_only
def test_nothing_is_checked_during_capture() -> None:
    case = Case("bf16", Routing((130, 200)), 136, 256, DEVICE, integers=True)
    a, b, layout = case.arguments("psum")
    d = torch.zeros(case.routing.m, 136, dtype=torch.bfloat16, device=DEVICE)
    call("bf16", "psum", a, b, d, layout)
    expected, graph = d.clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with settings.override(check=True), pytest.raises(UnsupportedError, match="a CUDA graph is being captured"):
            call("bf16", "psum", a, b, d, layout)
        call("bf16", "psum", a, b, d, layout)
    d.zero_()
    graph.replay()
    assert torch.equal(case.gathered(d), case.gathered(expected))
