"""Every Triton kernel, exactly as it would be launched, compiled for sm_80 and sm_90: no GPU is needed for that.

This is the only place where kernels with bfloat16 operands are seen without a GPU: the interpreter cannot multiply
bfloat16. What the compiler makes of them depends on Triton's version; the claims hold for 3.6 and 3.7.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, to compile the kernels")

from benchmarks.aot_report import (
    POWERS,
    Compiled,
    compile_launch,
    identity,
    kernel_name,
    launches_to_compile,
    training_step,
)
from benchmarks.machine_code import CHIPS
from subquad.kernels.backend import interpreting
from subquad.kernels.triton.launch import Launch
from subquad.kernels.triton.tuning import ScanTile, Tile, tiles_for

pytestmark = pytest.mark.skipif(interpreting(), reason="kernels made for Triton's interpreter cannot be compiled")

ARCHS = (80, 90)
# The tensor-core instruction: of four warps together, or of one.
PRODUCT = {80: "HMMA", 90: "HGMMA"}
# What multiplies no matrices.
NO_PRODUCTS = {"prepare_keys", "prepare_gradients", "even_sums", "carry", "read_state", "combine"}
KERNELS = ("forward", "dq", "dk", "dv", "scan_products", "sum_rest", "others")

# Spilled bytes per thread that are accepted, by generation, kernel and start of the variant, and why: what Triton 3.6
# or 3.7 needs, whichever is more. All are stored and loaded outside of loops; to that there is no exception.
_WORDS = "the assembler prefers a word or two on the stack to one program less per multiprocessor"
_TILE = (
    "addresses and row sums that are needed before and after the loop over the state, which takes all 255 registers;"
    " a tile of half the rows would not spill, and read the states twice as often"
)
_OLD = "with Triton 3.6, hardly with 3.7; a tile without spills in both issues up to twice as much per token"
ALLOWED_SPILLS: dict[tuple[int, str, str], tuple[int, str]] = {
    (80, "forward", "d64 "): (8, _WORDS),
    (80, "dq", "d64 "): (8, _WORDS),
    (80, "dk", "d64 "): (16, _WORDS),
    (80, "dv", "d64 "): (16, _WORDS),
    (80, "prepare_keys", "d128"): (8, _WORDS),
    (80, "dq", "d128 taylor"): (224, _TILE),
    (80, "dq", "d128 "): (24, _TILE),
    (80, "dk", "d128 "): (40, _TILE),
    (80, "dv", "d128 1 "): (216, _OLD),
    (80, "dv", "d128 "): (32, _TILE),
    (90, "dq", "d128 taylor"): (120, _TILE),
    (90, "dv", "d128 1 "): (112, _OLD),
    (90, "dv", "d128 taylor"): (8, _OLD),
}


@pytest.fixture(scope="session", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile from scratch: a cached kernel may stem from another version of the compiler's options."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    yield
    if before is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = before


def distinct(launches: list[Launch]) -> list[Launch]:
    """Drop launches that compile to the same code."""
    return list({identity(one): one for one in launches}.values())


def launches_of(kernel: str, arch: int, head_dim: int, powers: list[str], dtype=torch.bfloat16) -> list[Launch]:
    """Return a kernel's distinct launches; `others` are all that `KERNELS` does not name."""
    found = []
    for name in powers:
        # Without states a kernel is a part of itself with states: the fullest score stands for the others.
        found += launches_to_compile(arch, head_dim, name, dtype, one_chunk=name == "taylor")
    return distinct([one for one in found if (kernel_name(one) if kernel_name(one) in KERNELS else "others") == kernel])


def limit(arch: int) -> int:
    """Return the shared memory that a program may have: the tiles of 80 also serve chips with 99 KiB."""
    return CHIPS[86 if arch == 80 else arch].shared_bytes


def complaints(one: Compiled) -> list[str]:
    """Say what is wrong with a compiled kernel."""
    found = []
    allowed, _ = next(
        (
            entry
            for (arch, kernel, variant), entry in ALLOWED_SPILLS.items()
            if (arch, kernel) == (one.arch, one.kernel) and one.variant.startswith(variant)
        ),
        (0, ""),
    )
    if one.code.stack > allowed:
        found.append(f"spills {one.code.stack} bytes per thread")
    if one.code.spills_in_loops:
        found.append(f"spills inside loops: {one.code.spills_in_loops} instructions")
    if one.shared > limit(one.arch):
        found.append(f"takes {one.shared} bytes of shared memory of {limit(one.arch)}")
    if one.kernel not in NO_PRODUCTS and not one.code.opcodes.get(PRODUCT[one.arch]):
        found.append(f"has no {PRODUCT[one.arch]}")
    if one.kernel in NO_PRODUCTS and one.code.products:
        found.append("multiplies matrices, which it is not known to do")
    return [f"{one.kernel} {one.variant} (sm_{one.arch}): {complaint}" for complaint in found]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_fit_the_chip(kernel, arch, head_dim):
    launches = launches_of(kernel, arch, head_dim, sorted(POWERS))
    assert launches, "the kernel is not launched by a training or decoding step any more"
    found = [complaint for one in launches for complaint in complaints(compile_launch(one, arch))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("head_dim", [16, 32, 96])
@pytest.mark.parametrize("kernel", ["forward", "dq", "scan_products", "sum_rest"])
def test_other_widths_compile(kernel, head_dim):
    tiles = tiles_for(90, head_dim, 2, 2)
    launches = training_step(head_dim, POWERS["taylor"], tiles)
    (one, *_) = [one for one in launches if kernel_name(one) == kernel]
    compiled = compile_launch(one, 90)
    assert compiled.shared <= limit(90)
    assert compiled.code.products


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dk", "dv", "scan_products", "sum_rest"])
def test_float32_operands_fit_shared_memory(kernel, arch, head_dim):
    """Three tf32 products may spill, which costs time; too much shared memory would make the launch fail."""
    for one in launches_of(kernel, arch, head_dim, ["taylor"], torch.float32):
        assert compile_launch(one, arch).shared <= limit(arch), kernel


def test_every_generation_gets_tiles_that_it_can_launch():
    rows = {arch: tiles_for(arch, 128, 2, 2) for arch in ARCHS}
    # 99 KiB of shared memory: those of 80 are held to that, above.
    for capability in (80, 86, 87, 89, 120, 121):
        assert tiles_for(capability, 128, 2, 2) is rows[80]
    for capability in (90, 100, 103, 110):
        assert tiles_for(capability, 128, 2, 2) is rows[90]


def test_a_tile_that_is_too_large_is_noticed():
    tiles = tiles_for(90, 128, 1, 2)._replace(forward=Tile(128, 128, 4, 4))
    (one,) = [one for one in training_step(128, (1,), tiles) if kernel_name(one) == "forward"]
    compiled = compile_launch(one, 90)
    assert compiled.programs == 0
    text = "\n".join(complaints(compiled))
    assert "per thread" in text
    assert "of shared memory" in text


def test_spills_inside_loops_are_noticed():
    tiles = tiles_for(80, 128, 2, 2)._replace(scan=ScanTile(16, 16, 64, 4, 2))
    one = next(one for one in training_step(128, (2,), tiles) if kernel_name(one) == "scan_products")
    compiled = compile_launch(one, 80)
    assert compiled.code.spills_in_loops > 0
    assert any("inside loops" in complaint for complaint in complaints(compiled))


def test_products_are_counted_by_generation():
    (one,) = launches_of("dv", 90, 64, ["1"])
    assert "HGMMA" in compile_launch(one, 90).code.opcodes
    assert "HMMA" in compile_launch(one, 80).code.opcodes


def test_the_folder_of_compiled_kernels_is_ours(tmp_path_factory):
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(tmp_path_factory.getbasetemp())
