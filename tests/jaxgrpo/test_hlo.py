"""Costs read from compiled programs: against XLA's own count, loops of a known length, rings worked out by hand."""

import json
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxgrpo import hlo


def compiled(function, *shapes) -> Any:
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def cost_of(program, bound=lambda loop: None):
    return hlo.cost(hlo.parse(program.as_text()), bound)


def convolution(**options):
    return lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


LOOP_FREE = {
    "matrices": (lambda x, y: x @ y, (6, 7), (7, 5)),
    "batched": (lambda x, y: jnp.einsum("abcd,aecd->abe", x, y), (3, 4, 5, 6), (3, 7, 5, 6)),
    "padded": (convolution(window_strides=(1, 1), padding="SAME"), (2, 6, 7, 3), (3, 3, 3, 4)),
    "strided": (convolution(window_strides=(2, 3), padding=[(1, 0), (2, 1)]), (2, 9, 8, 3), (3, 2, 3, 4)),
    "dilated": (
        convolution(window_strides=(1, 2), padding=[(2, 2), (1, 1)], lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        (2, 5, 7, 3),
        (3, 2, 3, 4),
    ),
    "grouped": (convolution(window_strides=(1, 1), padding="VALID", feature_group_count=2), (2, 6, 6, 4), (3, 3, 2, 6)),
}


@pytest.mark.parametrize("name", LOOP_FREE)
def test_products_and_bytes_are_those_of_xla(name):
    program = compiled(*LOOP_FREE[name])
    expected, found = program.cost_analysis(), cost_of(program)
    assert found.flops == expected["flops"]
    assert found.bytes == pytest.approx(expected["bytes accessed"], rel=0.35)  # copies that XLA fuses differ
    if name in ("matrices",):
        assert found.bytes == expected["bytes accessed"]


def layers(turns):
    def scanned(x, w):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    return compiled(scanned, (8, 16), (turns, 16, 16))


def without_counts(program):
    return re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", program.as_text())


@pytest.mark.parametrize("read", ["said", "found"])
def test_a_scan_counts_its_body_as_often_as_it_runs(read):
    program = layers(7)
    text = program.as_text() if read == "said" else without_counts(program)
    assert ("known_trip_count" in text) == (read == "said")
    unknown = []
    found = hlo.cost(hlo.parse(text), unknown.append)
    assert not unknown
    assert found.flops == 7 * 2 * 8 * 16 * 16 > program.cost_analysis()["flops"]
    # A turn reads its own layer, not all of them: the bytes grow with the layers, not with their square.
    more = hlo.cost(hlo.parse(layers(14).as_text()), unknown.append)
    assert more.bytes == pytest.approx(2 * found.bytes, rel=0.02)


def test_nested_loops_multiply():
    def outer(x, w):
        def body(_, h):
            return jax.lax.fori_loop(0, 5, lambda _, h: h @ w, h)

        return jax.lax.fori_loop(2, 13, body, x)

    assert cost_of(compiled(outer, (4, 16), (16, 16))).flops == 11 * 5 * 2 * 4 * 16 * 16


def test_a_loop_whose_length_is_data_runs_as_often_as_the_caller_says():
    def until(x, w):
        with jax.named_scope("reply"):
            return jax.lax.while_loop(lambda h: jnp.sum(h) > 0, lambda h: h @ w, x)

    program, loops = compiled(until, (4, 16), (16, 16)), []

    def bound(loop):
        loops.append(loop)
        return 9

    assert cost_of(program, bound).flops == 9 * 2 * 4 * 16 * 16
    assert [loop.op_name.split("/")[-2:] for loop in loops] == [["reply", "while"]]
    assert hlo.Shape("f32", (4, 16)) in hlo.leaves(loops[0].carried)
    assert cost_of(program).flops == 2 * 4 * 16 * 16


def test_of_a_conditional_the_costliest_branch_counts():
    def choose(x, w):
        return jax.lax.cond(jnp.sum(x) > 0, lambda: x @ w @ w, lambda: x)

    assert cost_of(compiled(choose, (4, 16), (16, 16))).flops == 2 * 2 * 4 * 16 * 16


TPU = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%sliced (p: bf16[12,8,8], i: s32[]) -> bf16[1,8,8] {
  %p = bf16[12,8,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %one = bf16[1,8,8]{2,1,0:T(8,128)(2,1)S(1)} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
}

%written (q: f32[64,8], new: f32[2,8], j: s32[]) -> f32[64,8] {
  %q = f32[64,8]{1,0} parameter(0)
  %new = f32[2,8]{1,0} parameter(1)
  %j = s32[]{:T(128)} parameter(2)
  %start = s32[] constant(0)
  ROOT %updated = f32[64,8]{1,0} dynamic-update-slice(%q, %new, %j, %start)
}

%gathering (part: bf16[2,8]) -> bf16[8,8] {
  %part = bf16[2,8]{1,0} parameter(0)
  ROOT %all = bf16[8,8]{1,0} all-gather(%part), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (w: bf16[12,8,8], c: f32[64,8], x: f32[2,8], i: s32[], part: bf16[2,8]) -> f32[64,8] {
  %w = bf16[12,8,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %c = f32[64,8]{1,0} parameter(1)
  %x = f32[2,8]{1,0} parameter(2)
  %i = s32[]{:T(128)S(6)} parameter(3)
  %part = bf16[2,8]{1,0} parameter(4)
  %layer = bf16[1,8,8]{2,1,0:T(8,128)(2,1)S(1)} fusion(%w, %i), kind=kLoop, calls=%sliced
  %cs = (f32[2,8]{1,0:S(1)}, f32[2,8]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %cd = f32[2,8]{1,0:S(1)} copy-done(%cs)
  %gs = ((bf16[2,8]{1,0}), bf16[8,8]{1,0:S(1)}) async-start(%part), calls=%gathering
  %gd = bf16[8,8]{1,0:S(1)} async-done(%gs)
  %sum = f32[64,8]{1,0} all-reduce(%c), replica_groups=[2,2]<=[4], to_apply=%sliced
  ROOT %cache = f32[64,8]{1,0} fusion(%sum, %cd, %i), kind=kLoop, calls=%written, metadata={op_name="jit(f)/a b"}
}
"""


def test_memory_spaces_slices_and_updates_in_place():
    by_name = {o.instruction.name: o for o in hlo.operations(hlo.parse(TPU), lambda loop: None)}
    assert by_name["layer"].bytes == 8 * 8 * 2  # one layer read; it lands in VMEM
    assert by_name["cs"].bytes == 2 * 8 * 4
    assert by_name["cache"].bytes == 2 * 8 * 4  # the new rows, read in VMEM and written to HBM
    assert by_name["cache"].instruction.op_name == "jit(f)/a b"
    assert by_name["gs"].collectives == (hlo.Collective("all-gather", 4, 8 * 8 * 2),)
    assert by_name["sum"].collectives == (hlo.Collective("all-reduce", 2, 64 * 8 * 4),)
    assert set(by_name) == {"layer", "cs", "gs", "sum", "cache"}


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", 2),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={2}", 4),
        ("replica_groups=mesh['x'=2,'y'=4] {'x','y':(2)2}", 4),
        ("replica_groups=mesh['x'=1,'y'=4,'z'=2], device_ids=([2,4]T(1,0)) {'y'}, to_apply=%add", 4),
        ("replica_groups={}", 8),
        ("channel_id=1", 8),
    ],
)
def test_groups_of_devices(attributes, size):
    assert hlo.group_size(attributes, everyone=8) == size


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(hlo.HLOError, match="unknown form"):
        hlo.group_size("replica_groups=v9<8>", everyone=8)


@pytest.mark.parametrize(
    ("kind", "moved"),
    [("all-gather", 75), ("reduce-scatter", 75), ("all-to-all", 75), ("all-reduce", 150), ("collective-permute", 100)],
)
def test_what_a_device_sends_on_a_ring_of_four(kind, moved):
    assert hlo.Collective(kind, 4, 100.0).moved == moved


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "no ENTRY"), ("ENTRY %m () -> f32[] {\n  %x = f32[] constant(1)\n}\n", "no ROOT"),
     ("ENTRY %m () -> f32[] {\n  ROOT %x = what\n}\n", "no type"), ("ENTRY %m () -> f32[] {\n  oh\n}\n", "oh")],
)  # fmt: skip
def test_what_is_no_program_is_refused(text, problem):
    with pytest.raises(hlo.HLOError, match=problem):
        hlo.parse(text)


SHARDED = """
import dataclasses, json
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxgrpo import hlo

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def cost(function, *specs, out=P()):
    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, spec)) for spec in specs]
    program = jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*shapes).compile()
    found = hlo.cost(hlo.parse(program.as_text()), lambda loop: None)
    return [found.flops, [dataclasses.astuple(traffic) for traffic in found.collectives]]


def three(x, w):
    return jax.lax.scan(lambda h, _: (jax.lax.with_sharding_constraint(h @ w, NamedSharding(mesh, P())), None), x,
                        None, length=3)[0]


print(json.dumps({
    "contracted": cost(jnp.matmul, P(None, "tensor"), P("tensor", None)),
    "gathered": cost(lambda x: x, P(("data", "tensor"), None)),
    "columns": cost(jnp.matmul, P("data", None), P(None, "tensor"), out=P("data", "tensor")),
    "looped": cost(three, P(), P("data", None)),
}))
"""


def test_collectives_of_sharded_products():
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(SHARDED)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found, whole, product = json.loads(run.stdout), 64 * 64 * 4, 2 * 64**3
    assert found["contracted"] == [product / 4, [["all-reduce", 4, 1, 2 * whole * 3 / 4, 2 * whole * 3 / 4]]]
    assert found["gathered"][1] == [["all-gather", 8, 1, whole * 7 / 8, whole * 7 / 8]]
    assert found["columns"] == [product / 8, []]
    kinds = {traffic[0]: traffic for traffic in found["looped"][1]}
    assert found["looped"][0] == 3 * product / 2
    assert kinds["all-reduce"] == ["all-reduce", 2, 3, 3 * whole, whole]
