"""Reading machine code, on listings small enough to count by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the disassembler comes with triton")

from benchmarks.machine_code import Loop, MachineCode, _parse, issue_clocks, product_clocks

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, [R4.64] ;
.L_x_1:
        /*0020*/              @!P0 LDL R3, [R1] ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   HGMMA.64x32x8.F32.TF32 R24, gdesc[UR4], R24 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/               @P2 BRA `(.L_x_0) ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   BRA `(.L_x_2);
"""


def test_loops_hold_only_their_own_instructions():
    names, loops = _parse(LISTING, 4096)
    assert [name.split(".")[0] for name in names].count("HGMMA") == 2
    outer, inner = loops
    assert (outer.instructions, outer.spills, outer.products) == (2, 0, 0.0)
    assert (inner.instructions, inner.spills) == (4, 1)
    # A quarter of a warpgroup's operations per warp; tf32 at half the rate.
    assert inner.products == (2 * 64 * 64 * 16 / 4 + 2 * 2 * 64 * 32 * 8 / 4) / 4096


def test_clocks_of_a_turn():
    loop = Loop(instructions=100, products=16.0, spills=0)
    assert issue_clocks(loop, 8) == 200
    assert product_clocks(loop, 8) == 128


@pytest.mark.parametrize(
    "registers, warps, shared, arch, programs",
    [
        (255, 8, 1024, 90, 1),  # registers
        (128, 4, 1024, 90, 4),
        (129, 4, 1024, 90, 3),  # handed out by eights
        (32, 4, 100 * 1024, 90, 2),  # shared memory
        (32, 4, 100 * 1024, 80, 1),
        (32, 4, 100 * 1024, 86, 0),  # cannot be launched
        (32, 8, 0, 80, 8),  # threads
        (32, 8, 0, 86, 6),
    ],
)
def test_programs_per_multiprocessor(registers, warps, shared, arch, programs):
    code = MachineCode(registers, 0, {}, ())
    assert code.programs(arch, warps, shared) == programs
