"""Users' kernels: what is declared, what is refused in words, and what reaches the driver."""

from pathlib import Path
from typing import Any

import pytest
import torch
from custom_gpu import BODY, PARAMETERS, CustomGpu, made, own, scale_add, vectors

import deep_gemm
from deep_gemm import InvalidInputError, LaunchConfig, NotWarmError, UnsupportedError, settings, tensor_map

__all__ = ["own"]


def test_the_source_has_the_declared_parameters() -> None:
    text = made().source(*vectors(), 2.0)
    assert "scale_add(f32* out, const f32* x, const f32* y, f32 scale, u32 n) {\n  const u32 i" in text
    assert "__launch_bounds__(256)" in text
    assert '#include "custom.cuh"' in text


def test_every_argument_reaches_the_driver(own: CustomGpu) -> None:
    kernel, (out, x, y) = made(), vectors()
    kernel(out, x, y, 2.5)
    (ran,) = own.ran
    assert ran.values == {"out": out.data_ptr(), "x": x.data_ptr(), "y": y.data_ptr(), "scale": 2.5, "n": 1000}
    assert (ran.grid, ran.block, ran.shared, ran.attributes) == ((4, 1, 1), 256, 0, 0)


def test_a_warm_call_asks_nobody_again_and_a_moved_one_neither(own: CustomGpu) -> None:
    asked = []

    def counted(out: Any, x: Any, y: Any, scale: float) -> LaunchConfig | None:
        asked.append(scale)
        return scale_add(out, x, y, scale)

    kernel = deep_gemm.kernel(PARAMETERS, body=BODY)(counted)
    cases = [vectors() for _ in range(3)]
    for _ in range(3):
        for case in cases:
            kernel(*case, 2.0)
    assert asked == [2.0]  # by the first: a record of addresses that come again is made of its replay
    assert [ran.values["x"] for ran in own.ran[-3:]] == [case[1].data_ptr() for case in cases]
    kernel(*vectors(), 2.0)
    assert asked == [2.0]
    kernel(*cases[0], 3.0)
    assert asked == [2.0, 3.0]
    assert own.ran[-1].values["scale"] == 3.0
    assert len(own.compiler.calls) == 1  # a number is no part of the binary


def test_zero_and_minus_zero_are_two_numbers(own: CustomGpu) -> None:
    kernel, case = made(), vectors()
    for scale in (0.0, -0.0, 0.0, 0):
        kernel(*case, scale)
    assert [str(ran.values["scale"]) for ran in own.ran] == ["0.0", "-0.0", "0.0", "0.0"]


def test_names_and_defaults_are_those_of_the_function(own: CustomGpu) -> None:
    def shifted(out: Any, x: Any, y: Any, scale: float = 7.0) -> LaunchConfig | None:
        return scale_add(out, x, y, scale)

    kernel, (out, x, y) = deep_gemm.kernel(PARAMETERS, body=BODY, name="k")(shifted), vectors()
    kernel(out, x, y)
    kernel(y=y, x=x, out=out, scale=1.0)
    assert [ran.values["scale"] for ran in own.ran] == [7.0, 1.0]
    assert own.compiler.calls[0]["name"] == "k"
    with pytest.raises(InvalidInputError, match=r"k: missing a required argument: 'y'; its arguments are \(out"):
        kernel(out, x)


def test_a_kernel_that_is_declared_again_is_loaded_once(own: CustomGpu) -> None:
    for _ in range(3):
        made()(*vectors(), 2.0)
    assert own.driver.names().count("cuModuleLoadData") == 1
    made(body=BODY + " ")(*vectors(), 2.0)
    assert own.driver.names().count("cuModuleLoadData") == 2


def test_in_place_calls_replay(own: CustomGpu) -> None:
    kernel = made()
    for _ in range(4):
        x = vectors()[0]
        kernel(x, x, x, 2.0)
        assert own.ran[-1].values["out"] == own.ran[-1].values["y"] == x.data_ptr()


def test_constants_make_another_binary(own: CustomGpu) -> None:
    def rows(out: Any, x: Any, per_thread: int) -> LaunchConfig:
        return LaunchConfig(grid=1, block=32, shared=per_thread * 1024, constants={"count": per_thread})

    kernel = deep_gemm.kernel({"out": "f32*", "x": "const f32*"}, body="out[0] = /*{ count }*/ * x[0];")(rows)
    out, x, _ = vectors()
    for count in (2, 3, 2):
        kernel(out, x, count)
    assert len(own.compiler.calls) == 2
    assert [ran.shared for ran in own.ran] == [2048, 3072, 2048]
    assert "out[0] = 3 * x[0];" in kernel.source(out, x, 3)


def test_true_and_one_are_two_constants(own: CustomGpu) -> None:
    make = deep_gemm.kernel({"out": "f32*"}, body="out[0] = /*{ flag }*/;", name="flags")
    kernel = make(lambda out, which: LaunchConfig(1, 32, constants={"flag": which == "true" or 1}))
    for which in ("true", "one", "true"):
        kernel(torch.zeros(1), which)
    assert len(own.compiler.calls) == 2


def test_a_cluster_and_dependent_launch_reach_the_driver(own: CustomGpu) -> None:
    def launch(out: Any) -> LaunchConfig:
        return LaunchConfig(grid=(4, 2), block=64, cluster=(2, 1), pdl=True)

    kernel, out = deep_gemm.kernel({"out": "f32*"}, body="")(launch), torch.zeros(4)
    kernel(out)
    assert (own.ran[-1].grid, own.ran[-1].attributes) == ((4, 2, 1), 2)
    deep_gemm.set_pdl(False)
    try:
        kernel(out)
    finally:
        deep_gemm.set_pdl(True)
    assert own.ran[-1].attributes == 1


MAPS = {"map_x": "const TensorMap<bf16> x", "map_out": "TensorMap<bf16> out", "x": "const bf16*"}


def tiles(out: Any, x: Any) -> LaunchConfig:
    values = {"map_x": tensor_map(x, (8, 64), swizzle=128), "map_out": tensor_map(out, (8, 64))}
    return LaunchConfig(grid=1, block=32, values=values)


def test_tensor_maps_are_encoded_and_replaced_where_tensors_move(own: CustomGpu) -> None:
    kernel = deep_gemm.kernel(MAPS, body="")(tiles)
    out, x = torch.zeros(16, 64).bfloat16(), torch.zeros(16, 128).bfloat16()[:, :64]
    with pytest.raises(InvalidInputError, match=r"x of tiles must be contiguous.*strided=\('x',\)"):
        kernel(out, x)
    kernel = deep_gemm.kernel(MAPS, body="", strided=("x",))(tiles)
    kernel(out, x)
    assert own.ran[-1].values["x"] == x.data_ptr()
    assert {own.ran[-1].values["map_x"], own.ran[-1].values["map_out"]} == {1, 2}
    for _ in range(2):
        other = torch.zeros(16, 64).bfloat16()
        kernel(other, x)
    assert own.moved[-1] == other.data_ptr()
    assert "(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_out, const bf16* x)" in (
        kernel.source(out, x)
    )


def test_dimensions_of_a_map_are_innermost_first() -> None:
    x = torch.zeros(3, 5, 64, dtype=torch.float16)[:, :, :48]
    spec = tensor_map(x, (1, 5, 32), swizzle=64).spec
    assert (spec.dtype, spec.dims, spec.strides, spec.box) == ("f16", (48, 5, 3), (128, 640), (32, 5, 1))
    one = tensor_map(torch.zeros(1, 20, dtype=torch.bfloat16)[:, :10], (1, 8))
    assert one.spec.strides == (32,)  # of a dimension of size 1, any multiple of 16


@pytest.mark.parametrize(
    ("out", "x", "says"),
    [
        ((16, 60), (16, 64), "map_out of tiles: rows of out have 120 bytes, and TMA writes whole units of 16"),
        ((16, 64), (2, 16, 64), None),
    ],
)
def test_a_map_that_would_write_past_a_row_is_refused(
    own: CustomGpu, out: tuple[int, ...], x: tuple[int, ...], says: str | None
) -> None:
    def launch(out: Any, x: Any) -> LaunchConfig:
        values = {"map_x": tensor_map(x[0] if x.dim() == 3 else x, (8, 64)), "map_out": tensor_map(out, (8, 8))}
        return LaunchConfig(grid=1, block=32, values=values)

    wide = torch.zeros(16, 64).bfloat16()[:, : out[1]]
    kernel = deep_gemm.kernel(MAPS, body="", name="tiles")(launch)
    if says is None:
        kernel(wide, torch.zeros(x).bfloat16())  # a view that begins where x begins
        return
    with pytest.raises(InvalidInputError, match=says):
        kernel(wide, torch.zeros(x).bfloat16())


def test_a_template_and_what_it_includes(own: CustomGpu, tmp_path: Path) -> None:
    (tmp_path / "k.cu.jinja").write_text(
        '#include "custom.cuh"\n/*% include "part.cuh" %*/\nextern "C" __global__ void /*{ name }*/(/*{ signature }*/) '
        "{ out[0] = part</*{ rows }*/>(); }\n"
    )
    (tmp_path / "part.cuh").write_text("template <int kRows> DG_DEVICE int part() { return kRows; }\n")

    def function(out: Any) -> LaunchConfig:
        return LaunchConfig(1, 32, constants={"rows": 5})

    kernel = deep_gemm.kernel({"out": "f32*"}, template=tmp_path / "k.cu.jinja")(function)
    text = kernel.source(torch.zeros(4))
    assert "part<5>()" in text
    assert "return kRows" in text


def test_a_field_that_nobody_gives_is_named(own: CustomGpu) -> None:
    kernel = deep_gemm.CustomKernel.from_source(
        "/*{ rows }*/", lambda out: LaunchConfig(1, 32), {"out": "f32*"}, name="k"
    )
    with pytest.raises(InvalidInputError, match="Template 'k' uses rows, which its fields lack"):
        kernel(torch.zeros(4))


def test_tensors_on_the_cpu_need_a_reference() -> None:
    kernel, (out, x, y) = made(), vectors()
    with pytest.raises(UnsupportedError, match=r"scale_add has no reference to run on cpu: .*@scale_add\.reference"):
        kernel(out, x, y, 2.0)

    @kernel.reference
    def in_torch(out: Any, x: Any, y: Any, scale: float) -> None:
        torch.add(y, x, alpha=scale, out=out)

    kernel(out, x, y, scale=2.0)
    assert torch.equal(out, 2 * x + y)


def test_nothing_to_do_is_not_launched(own: CustomGpu) -> None:
    kernel, empty = made(), torch.zeros(0)
    kernel(empty, empty, empty, 1.0)
    assert not own.ran
    with pytest.raises(InvalidInputError, match="scale_add launches nothing for these arguments"):
        kernel.build(empty, empty, empty, 1.0)


def test_a_gpu_that_is_too_old_is_refused_or_replaced(own: CustomGpu, caplog: pytest.LogCaptureFixture) -> None:
    own.capability = (8, 0)
    kernel, case = made(needs=(9, 0)), vectors()
    with pytest.raises(UnsupportedError, match=r"scale_add needs a GPU of compute capability 9\.0 or newer, but S"):
        kernel(*case, 2.0)
    kernel.reference(lambda out, x, y, scale: out.fill_(scale))
    with settings.override(fallback="torch"):
        kernel(*case, 2.0)
    assert bool((case[0] == 2).all())
    assert "scale_add is computed by the reference" in caplog.text
    made()(*case, 2.0)  # any GPU will do for one that does not say
    assert len(own.ran) == 1


def test_a_first_call_inside_capture_is_refused_and_a_warm_one_is_not(own: CustomGpu) -> None:
    kernel, case = made(), vectors()
    own.capturing = True
    with pytest.raises(NotWarmError, match=r"scale_add \(256 threads\) needs a kernel that is not loaded yet"):
        kernel(*case, 2.0)
    own.capturing = False
    kernel(*case, 2.0)
    own.capturing = True
    kernel(*case, 2.0)
    kernel(*vectors(), 3.0)  # the same binary
    assert len(own.ran) == 3


def test_monitors_and_the_debug_record_know_it(own: CustomGpu) -> None:
    kernel, case = made(), vectors()
    with deep_gemm.monitor(every=100) as m:
        kernel(*case, 2.0)
        own.capturing = True  # so that no event is made
        kernel(*case, 2.0)
    (entry,) = m.report()["calls"]
    assert entry | {"operation": "scale_add", "config": "256 threads", "kernel": "scale_add", "calls": 2} == entry
    assert entry | {"shape": "out 1000, x 1000, y 1000", "bytes": 12000, "flops": 2000} == entry
    plan = next(plan for plan in deep_gemm.debug_info()["plans"] if plan["kernel"] == "scale_add")
    assert plan["resources"]["registers"] == 168
    assert plan["params"]["config"] | {"num_threads": 256} == plan["params"]["config"]


def test_what_torch_compile_traces_with_is_only_checked() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made()(*vectors(), 2.0)
