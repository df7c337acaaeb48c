"""What all kernel families keep: they take only what they compute, their configs fit the hardware, and names and
sources tell binaries apart."""

import json
import re
from dataclasses import replace

import pytest
from chosen import kernel_name, make_params
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import kernels, ops, select
from deep_gemm.arch import SM80, SM90
from deep_gemm.errors import UnsupportedError
from deep_gemm.jit.generator import variables
from deep_gemm.kernels.base import KernelFamily
from deep_gemm.kernels.families import GEMMS
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.kernels.helpers import COPY_ROWS, TRANSPOSE_BYTES, TRANSPOSE_SCALES
from deep_gemm.kernels.hopper.swapped import Swapped
from deep_gemm.kernels.hopper.template import MAX_STAGES
from deep_gemm.kernels.other_families import OTHERS
from deep_gemm.kernels.portable.template import MmaDecode, MmaGemm
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts
from deep_gemm.runtime.engine import build_request
from deep_gemm.spec import CopySpec, GemmSpec, Operand, TransposeBytesSpec, TransposeSpec

of_all = pytest.mark.parametrize("family", kernels.registry().values(), ids=lambda family: family.name)
of_gemms = pytest.mark.parametrize("family", GEMMS, ids=lambda family: family.name)

SPEC = ops.spec(64, 2112, 7168, 132)
A, B, D = SPEC.a, SPEC.b, SPEC.d
PLAIN = {"sm90_fp8_gemm", "sm90_fp8_swapped"}


def test_what_no_family_can_do_is_refused_with_each_ones_reason() -> None:
    with pytest.raises(UnsupportedError, match="There is no kernel for M=64, N=2112, K=7168") as caught:
        kernels.for_spec(replace(SPEC, a=replace(A, scaling="row")))
    for family in GEMMS:
        assert re.search(rf"{family.name}: \w[^:]*\.", str(caught.value)), caught.value


OPERANDS = st.builds(
    Operand,
    st.sampled_from(["e4m3", "e5m2", "bf16", "f32"]),
    st.sampled_from(["k", "mn"]),
    st.sampled_from(["none", "1x128", "128x128", "row", "ue8m0"]),
    st.booleans(),
)
HALVES = st.builds(Operand, st.just("bf16"), st.sampled_from(["k", "mn"]), st.just("none"), st.just(True))


@given(
    st.builds(
        replace,
        st.just(SPEC),
        a=st.one_of(st.just(A), HALVES, OPERANDS),
        b=st.one_of(st.just(B), HALVES, OPERANDS),
        d=st.one_of(st.just(D), OPERANDS),
        grouping=st.sampled_from(["none", "none", "contiguous", "batched"]),
        accumulate=st.sampled_from(["none", "none", "from c"]),
        epilogue=st.sampled_from([Parts(), Parts(), Parts(), Parts(activation="gelu")]),
    )
)
def test_only_what_is_computed_is_taken(spec: GemmSpec) -> None:
    """If no family looked at a field, the result would be wrong."""
    batched = spec.grouping == "batched"
    known = (spec.d.major, spec.d.scaling) == ("mn", "none") and not (batched and spec.epilogue)
    alone, plain = spec.grouping == "none", (spec.d.dtype, spec.accumulate) == ("bf16", "none")
    half = [(x.dtype, x.scaling, x.aligned) for x in (spec.a, spec.b)] == [("bf16", "none", True)] * 2
    fp8 = all(x.dtype in ("e4m3", "e5m2") and (x.major, x.aligned) == ("k", True) for x in (spec.a, spec.b))
    scaling = spec.scaling or "none"
    fp8 = fp8 and (spec.dtypes == "e4m3" or scaling == "rowwise")
    names: set[str] = set()
    if known and fp8 and scaling not in ("none", "ue8m0") and spec.d.dtype in ("bf16", "f32") and alone:
        if plain and scaling == "1d2d":
            names = PLAIN
        else:
            own = plain and scaling == "rowwise" and spec.d.aligned
            names = {"sm90_fp8_rows" if own else "sm90_fp8_scaled"}
            names |= set() if scaling == "1d1d" else {"sm90_fp8_scaled_swapped"}
    elif known and fp8 and scaling == "1d2d" and plain and not alone:
        names = {"sm90_fp8_batched", "sm90_fp8_batched_swapped"} if batched else {"sm90_fp8_grouped"}
    elif known and half and alone and spec.d.dtype in ("bf16", "f32"):
        names = {"sm90_b16_gemm"} | ({"sm90_b16_swapped"} if spec.a.major == "k" else set())
        names |= {"sm90_b16_swap_ab"} if plain and spec.d.aligned else set()
    elif known and half and batched and spec.d.dtype in ("bf16", "f32") and spec.accumulate == "none":
        names = {"sm90_b16_batched"}
    elif known and half and plain and not alone and not batched and spec.a.major == "k":
        names = {"sm90_b16_grouped"}
    if names:
        assert {family.name for family in kernels.for_spec(spec, SM90)} == names
    else:
        with pytest.raises(UnsupportedError):
            kernels.for_spec(spec, SM90)


@pytest.mark.parametrize("of", OTHERS)
def test_kernels_that_are_no_gemms_are_found_by_their_spec_and_by_their_name(of: type) -> None:
    name = OTHERS[of][0]
    assert kernels.get(name).name == name
    others = [kernels.get(other) for other, *_ in OTHERS.values()]
    assert [family.name for family in others if family.refuses(object.__new__(GemmSpec)) is None] == []
    assert kernels._other(of) is kernels.get(name) is kernels.registry()[name]


def test_a_family_is_left_out_where_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.for_helper(TransposeSpec(4, 4), SM90) is TRANSPOSE_SCALES
    assert kernels.for_helper(TransposeBytesSpec(4, 16), SM90) is TRANSPOSE_BYTES
    with pytest.raises(
        UnsupportedError, match=r"another GPU than sm_80: sm90_fp8_scaled.* for sm_90a only.*DG_FALLBACK"
    ):
        select.select(replace(SPEC, b=replace(B, scaling="1x128"), d=replace(D, dtype="f32")), SM80)
    monkeypatch.setitem(COPY_ROWS.__dict__, "archs", (SM90.name, SM80.name))
    assert kernels.for_helper(CopySpec(4, 4), SM80) is COPY_ROWS


@of_all
def test_templates_use_exactly_the_declared_fields(family: KernelFamily) -> None:
    used = variables(family.template_file)
    for params in family.cases():
        assert family.fields(params).keys() == used


@of_all
def test_cases_hold_every_config_that_calls_choose(family: KernelFamily) -> None:
    """Tests compile and run them."""
    serving, cases = family.configs(SM90), family.cases()
    assert len(serving) == len(set(serving)) > 0
    assert len(cases) == len(set(cases))
    assert {config.tile for config in serving} <= {params.config.tile for params in cases}
    assert {params.kernel for params in cases} == {config.family for config in serving} == {family.name}


@of_gemms
def test_configs_are_legal(family: GemmFamily) -> None:
    legal = family.legal(SM90)
    assert len(legal) == len(set(legal))
    assert set(family.configs(SM90)) <= set(legal)
    for params in family.cases():
        # A case may have fewer stages than the config of the serving set, for what it needs besides.
        assert any(replace(params.gemm, num_stages=config.num_stages) == config for config in legal), params


def variants(family: GemmFamily) -> list[KernelParams]:
    """Every legal config, with TMA stores and without; and the cases."""
    return [make_params(c, store) for c in family.legal(family.arch) for store in ("tma", "direct")] + family.cases()


@of_gemms
def test_a_cta_fits(family: GemmFamily) -> None:
    """The limits of its first target: an SM has 1 KiB more than a CTA can have, and 1 KiB of it is lost to each CTA;
    and setmaxnreg moves registers between warpgroups of one CTA, of which the launch reserved so many."""
    for params in variants(family):
        config, size, fields = params.gemm, family.shared_bytes(params), family.constants(params)
        assert fields["shared_bytes"] == size <= family.arch.shared_per_cta
        assert config.ctas_per_sm * (size + 1024) <= family.arch.shared_per_cta + 1024
        consumer, producer = (int(fields.get(f"{role}_registers", 0)) for role in ("consumer", "producer"))
        ctas, threads = int(fields["min_ctas"]), family.template.num_threads(config)
        if producer == consumer == 0:  # none are moved: each thread has as many as there can be
            assert 255 * threads <= 65536 // ctas
            continue
        assert consumer % 8 == producer % 8 == 0
        assert 24 <= producer <= consumer <= 255
        reserved = 65536 // (ctas * threads) // 8 * 8
        assert 128 * (config.num_consumers * consumer + producer) <= min(reserved, 255) * threads
        assert ctas >= config.ctas_per_sm


@of_gemms
def test_one_more_stage_would_not_fit(family: GemmFamily) -> None:
    most = 24 if isinstance(family.template, Swapped) else 8 if isinstance(family.template, MmaGemm) else MAX_STAGES
    for config in family.legal(family.arch) if family.groupings == ("none",) else ():
        # Consumers that take blocks of K in turn own equally many stages.
        deeper = replace(config, num_stages=config.num_stages + config.consumers_k)
        most = family.template.most_stages(config) if isinstance(family.template, MmaDecode) else most
        assert config.num_stages == most or "fit on one SM" in str(family.illegal(deeper, family.arch)), config


def test_entry_names_tell_all_binaries_apart() -> None:
    shapes = [(0, 0, 0), (0, 2112, 7168), (7, 0, 0), (0, 7, 0), (0, 0, 7), (64, 2112, 7168)]
    every = {params for family in GEMMS for params in variants(family)}
    every |= {make_params(family.configs(family.arch)[0], shape=shape) for family in GEMMS for shape in shapes}
    every |= {params for family in kernels.registry().values() for params in family.cases()}
    names = [kernel_name(params) for params in every]
    # Names are paths and C symbols; some filesystems ignore case.
    assert len({name.lower() for name in names}) == len(every)
    for name in names:
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,159}", name)


def test_one_source_a_binary() -> None:
    """Different params must render different sources: otherwise two plans would share a key, and one would be wrong."""
    requests = [build_request(params) for family in kernels.registry().values() for params in family.cases()]
    assert len({request.source for request in requests}) == len(requests)
    assert len({json.dumps(request.meta) for request in requests}) == len(requests)
    for request in requests:
        assert f"{request.name}(" in request.source
