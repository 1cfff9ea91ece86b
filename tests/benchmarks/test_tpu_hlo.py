"""What is found in the text of modules; the longer lines are as libtpu prints them."""

import pytest

from benchmarks.tpu import hlo

MODULE = """
HloModule step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->(f32[4]{0})}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum.1 = f32[]{:T(128)} add(%x, %y)
}

ENTRY %main (a: f32[8,4]) -> f32[4] {
  %a = f32[8,4]{1,0:T(8,128)} parameter(0)
  %all-reduce.3 = (f32[8,4]{1,0:T(8,128)}, bf16[3]{0:T(256)(128)(2,1)S(1)}, /*index=2*/f32[]) \
all-reduce(%a, %b, %c), replica_groups={{0,1}}, to_apply=%add
  %infeed.1 = ((f32[2]{0}), token[]) infeed(%token)
  %infeed-done.1 = f32[2]{0} infeed-done(%infeed.1)
  %custom.1 = f32[4]{0} custom-call(%a), custom_call_target="xla_python_cpu_callback"
  %custom.2 = f32[4]{0} custom-call(%a), custom_call_target="TopK"
  %gather-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%z), dimensions={0}
  %gather-done = f32[8]{0} all-gather-done(%gather-start)
}
"""


def test_shapes_and_opcodes():
    found = {i.opcode: i for i in hlo.instructions(MODULE)}
    assert found["add"].rest == "(%x, %y)"
    reduced = found["all-reduce"]
    assert reduced.elements == 8 * 4 + 3 + 1
    assert reduced.bytes == 4 * 32 + 2 * 3 + 4
    assert found["all-gather-start"].elements == 12


def test_collectives_count_once():
    found = hlo.collectives(hlo.instructions(MODULE))
    assert [i.opcode for i in found] == ["all-reduce", "all-gather-start"]


@pytest.mark.parametrize("name", hlo.COLLECTIVES)
def test_every_collective_is_seen(name):
    line = f"  %x = f32[2]{{0}} {name}(%y), replica_groups={{}}"
    assert len(hlo.collectives(hlo.instructions(line))) == 1


def test_calls_of_the_host():
    found = hlo.instructions(MODULE)
    assert hlo.host_calls(found) == ["infeed", "infeed-done", "xla_python_cpu_callback"]
    assert hlo.custom_calls(found) == ["TopK", "xla_python_cpu_callback"]


def constants(*values):
    return "\n".join(f"  constant.{v} = u32[] constant({v})" for v in values)


PHILOX = constants(0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", []),
        (PHILOX, ["philox"]),
        ("\n".join(PHILOX.splitlines()[:3]), []),
        (constants(0x1BD11BDA), ["threefry"]),
        ("  r = u32[4] rng-bit-generator(s), algorithm=rng_philox", ["philox"]),
        ("  r = u32[4] rng-bit-generator(s), algorithm=rng_default", ["rng-bit-generator"]),
        ("  r = f32[4] rng(a, b), distribution=rng_normal", ["rng"]),
        (PHILOX + "\n  r = f32[4] rng(a, b), distribution=rng_normal", ["philox", "rng"]),
    ],
)
def test_generators(text, expected):
    assert hlo.generators(hlo.instructions(text)) == expected


def test_precisions():
    text = """
  a = f32[2,2] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  b = f32[2,2] dot(x, y), rhs_contracting_dims={0}, operand_precision={highest,highest}
  c = f32[2,2] convolution(x, y), dim_labels=b01f_01io->b01f, operand_precision={highest,highest}
"""
    assert hlo.precisions(hlo.instructions(text)) == {"default": 1, "highest": 2}
