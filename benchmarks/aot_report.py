"""Compile every Triton kernel as it would be launched, without a GPU, and report what the compiler made of it.

    python benchmarks/aot_report.py                      # all kernels, sm_80 and sm_90, head_dim 64 and 128
    python benchmarks/aot_report.py --arch 90 --head-dim 64 --powers 2 --kernel forward

Registers and spills (stack) are per thread, shared memory is per program; `mma` counts the tensor-core instructions in
the machine code, `all` every instruction.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from subquad.kernels.triton import launch
from subquad.kernels.triton.attention import make_problem, run_backward, run_forward
from subquad.kernels.triton.launch import Launch
from subquad.kernels.triton.problem import Carry
from subquad.kernels.triton.tuning import Tiles, default_chunk_size, tiles_for

POWERS = {"1": (1,), "2": (2,), "taylor": (0, 1, 2)}
# Shared memory per program in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", re.MULTILINE)
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Report:
    """What the compiler made of one launch."""

    kernel: str
    arch: int
    head_dim: int
    powers: str
    variant: str
    num_warps: int
    registers: int
    stack: int
    shared: int
    mma: int
    instructions: int
    opcodes: dict[str, int]


def forward_and_backward(
    head_dim: int,
    powers: tuple[int, ...],
    tiles: Tiles,
    *,
    dtype: torch.dtype = torch.bfloat16,
    chunked: bool = True,
    normalize: bool = True,
) -> list[Launch]:
    """Return the launches of one training step, with decay and four query heads per key/value head.

    Args:
        head_dim: Width of keys and values.
        powers: The score's powers.
        tiles: Tile sizes.
        dtype: Of q, k and v.
        chunked: Many chunks with initial and final state, or one chunk without.
        normalize: Whether the op divides by the sum of weights.

    Returns:
        Launches, not run.
    """
    seq_len = 2 * default_chunk_size(head_dim, 4)
    chunk = seq_len // 2 if chunked else seq_len
    with launch.recording() as launches:
        q = torch.zeros(1, seq_len, 16, head_dim, dtype=dtype)
        k = torch.zeros(1, seq_len, 4, head_dim, dtype=dtype)
        weight = torch.zeros(1, seq_len, 4)
        coefs = torch.zeros(3, 16)
        problem = make_problem(q, k, k, weight, weight, coefs, powers, 0.125, chunk, "default", tiles)
        state = Carry(torch.zeros(4, problem.num_rows, head_dim), torch.zeros(4, problem.num_rows)) if chunked else None
        outputs, _ = run_forward(problem, normalize, state, chunked)
        run_backward(problem, outputs, state, outputs.out, outputs.normaliser, state, True)
    return launches


def source_of(one: Launch) -> ASTSource:
    """Return the launch as a compiler input, specialised as a real launch is."""
    kernel = one.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = one.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if specialised and type(value) is int and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_launch(one: Launch, arch: int, head_dim: int, powers: str, variant: str) -> Report:
    """Compile one launch for a GPU generation and read the machine code."""
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
    compiled = triton.compile(source_of(one), target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        listing = _output(_TOOLS / "nvdisasm", "-c", cubin)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _output(_TOOLS / "cuobjdump", "-res-usage", cubin))
    if usage is None:
        raise RuntimeError(f"cuobjdump reported no resource usage for {one.kernel.__name__}")
    opcodes = Counter(_INSTRUCTION.findall(listing))
    return Report(
        kernel=one.kernel.__name__.removesuffix("_kernel"),
        arch=arch,
        head_dim=head_dim,
        powers=powers,
        variant=variant,
        num_warps=one.num_warps,
        registers=int(usage.group(1)),
        stack=int(usage.group(2)),
        shared=compiled.metadata.shared,
        mma=opcodes["HMMA"] + opcodes["HGMMA"],
        instructions=sum(opcodes.values()),
        opcodes=dict(opcodes),
    )


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def launches_to_compile(arch: int, head_dim: int, powers: str) -> list[tuple[str, Launch]]:
    """Return the distinct launches of a training step with the table's tiles, each with a name for its variant.

    `scan_products` appears forward and reverse; what reads pairs appears with states and, as one long chunk, without.
    """
    tiles = tiles_for(arch, head_dim, max(POWERS[powers]))
    found: dict[tuple[Any, ...], tuple[str, Launch]] = {}
    for tiling in (tiles, tiles._replace(scan=tiles.small_scan)):
        for chunked in (True, False):
            for one in forward_and_backward(head_dim, POWERS[powers], tiling, chunked=chunked):
                constants = {
                    p.name: one.arguments[p.name]
                    for p in one.kernel.params
                    if p.is_constexpr or one.arguments[p.name] is None
                }
                key = (one.kernel.__name__, one.num_warps, *(str(value) for value in constants.values()))
                found.setdefault(key, (_variant(one), one))
    return list(found.values())


def _variant(one: Launch) -> str:
    words = []
    if "REVERSE" in one.arguments:
        words.append("reverse" if one.arguments["REVERSE"] else "forward")
    if "BI" in one.arguments:
        words.append(f"{one.arguments['BI']}x{one.arguments['BJ']}")
    if "STATE" in one.arguments:
        words.append("states" if one.arguments["STATE"] else "one chunk")
    return " ".join(words)


def reports(archs: list[int], head_dims: list[int], powers: list[str], kernel: str) -> Iterator[Report]:
    """Compile what was asked for, one after the other."""
    for arch in archs:
        for head_dim in head_dims:
            for name in powers:
                for variant, one in launches_to_compile(arch, head_dim, name):
                    if kernel in one.kernel.__name__:
                        yield compile_launch(one, arch, head_dim, name, variant)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT), help="default: all")
    parser.add_argument("--head-dim", type=int, action="append", help="default: 64 and 128")
    parser.add_argument("--powers", action="append", choices=sorted(POWERS), help="default: all")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--opcodes", action="store_true", help="also print the most frequent instructions")
    options = parser.parse_args()
    columns = [name for name in Report.__dataclass_fields__ if name != "opcodes"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    asked = (options.arch or sorted(SHARED_LIMIT), options.head_dim or [64, 128], options.powers or sorted(POWERS))
    for report in reports(*asked, options.kernel):
        row = asdict(report)
        print("| " + " | ".join(str(row[name]) for name in columns) + " |", flush=True)
        if options.opcodes:
            print("  " + " ".join(f"{name}:{count}" for name, count in Counter(report.opcodes).most_common(16)))


if __name__ == "__main__":
    sys.exit(main())
