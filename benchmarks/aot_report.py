"""Compile every Triton kernel as it would be launched, without a GPU, and report what the compiler made of it.

    python benchmarks/aot_report.py                      # all kernels, sm_80 and sm_90, head_dim 64 and 128
    python benchmarks/aot_report.py --arch 90 --head-dim 64 --powers 2 --kernel forward
    python benchmarks/aot_report.py --dtype float32      # three tf32 products, as precision="high" takes

Registers and spills (`stack`, in bytes) are per thread, `respills` counts the spills' loads and stores inside loops,
shared memory is per program, `programs` is how many of them one multiprocessor holds. `loops` has, for every loop with
matrix products in the order of the code, the clocks to issue its instructions over the clocks its products take, per
turn and program: above 1 the tensor cores must wait.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# From a checkout: neither this folder's parent nor an install need be on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine_code import CHIPS, MachineCode, issue_clocks, product_clocks, read_machine_code
from subquad.kernels.triton import launch
from subquad.kernels.triton.attention import make_problem, run_backward, run_forward
from subquad.kernels.triton.decode import decode
from subquad.kernels.triton.launch import Launch
from subquad.kernels.triton.problem import Carry
from subquad.kernels.triton.tuning import Tiles, default_chunk_size, tiles_for

POWERS = {"1": (1,), "2": (2,), "taylor": (0, 1, 2)}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Chips that 86 stands for run the tiles of 80.
ARCHS = (80, 90)
_GROUPS = 4
_KV_HEADS = 4
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch.

    Attributes:
        kernel: Name, without `_kernel`.
        variant: What distinguishes it from the kernel's other launches.
        arch: GPU generation.
        num_warps: Warps per program.
        num_stages: Depth of the load pipeline.
        shared: Bytes of shared memory per program.
        code: The machine code.
    """

    kernel: str
    variant: str
    arch: int
    num_warps: int
    num_stages: int
    shared: int
    code: MachineCode

    @property
    def programs(self) -> int:
        """Programs per multiprocessor at a time; 0 cannot be launched."""
        return self.code.programs(self.arch, self.num_warps, self.shared)

    def columns(self) -> dict[str, object]:
        """Return a row of the report."""
        turns = [loop for loop in self.code.loops if loop.products]
        return {
            "kernel": self.kernel,
            "variant": self.variant,
            "arch": self.arch,
            "warps": self.num_warps,
            "stages": self.num_stages,
            "registers": self.code.registers,
            "stack": self.code.stack,
            "respills": self.code.spills_in_loops,
            "shared": self.shared,
            "programs": self.programs,
            "mma": self.code.products,
            "all": self.code.instructions,
            "loops": " ".join(
                f"{issue_clocks(loop, self.num_warps):.0f}/{product_clocks(loop, self.num_warps):.0f}" for loop in turns
            ),
        }


def training_step(
    head_dim: int,
    powers: tuple[int, ...],
    tiles: Tiles | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    chunked: bool = True,
    device: str = "cpu",
    kv_heads: int = _KV_HEADS,
    seq_len: int | None = None,
) -> list[Launch]:
    """Return the launches of one training step, with decay, normaliser and four query heads per key/value head.

    Args:
        head_dim: Width of keys and values.
        powers: The score's powers.
        tiles: Tile sizes; None takes the table's for the device.
        dtype: Of q, k and v.
        chunked: Many chunks with initial and final state, or one chunk without.
        device: Where the tensors are.
        kv_heads: Key/value heads.
        seq_len: Tokens; None is two chunks.

    Returns:
        Launches, not run; their tensors are not initialised.
    """
    chunk = default_chunk_size(head_dim, _GROUPS)
    seq_len = seq_len or 2 * chunk
    with launch.recording() as launches, torch.device(device):
        q = torch.zeros(1, seq_len, kv_heads * _GROUPS, head_dim, dtype=dtype)
        k = torch.zeros(1, seq_len, kv_heads, head_dim, dtype=dtype)
        weight = torch.zeros(1, seq_len, kv_heads)
        coefs = torch.zeros(3, kv_heads * _GROUPS)
        chunk = chunk if chunked else seq_len
        problem = make_problem(q, k, k, weight, weight, coefs, powers, 0.125, chunk, "default", tiles)
        state = _state(kv_heads, problem.num_rows, head_dim) if chunked else None
        outputs, _ = run_forward(problem, True, state, chunked)
        run_backward(problem, outputs, state, outputs.out, outputs.normaliser, state, True)
    return launches


def decoding_step(head_dim: int, powers: tuple[int, ...], *, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """Return the launches that decode one token and write the new state, not run.

    Args:
        head_dim: Width of keys and values.
        powers: The score's powers.
        dtype: Of q, k and v.

    Returns:
        The launches.
    """
    with launch.recording() as launches:
        q = torch.zeros(1, 1, _KV_HEADS * _GROUPS, head_dim, dtype=dtype)
        k = torch.zeros(1, 1, _KV_HEADS, head_dim, dtype=dtype)
        weight = torch.zeros(1, 1, _KV_HEADS)
        coefs = torch.zeros(3, _KV_HEADS * _GROUPS)
        rows = sum({0: 1, 1: head_dim, 2: head_dim * (head_dim + 1) // 2}[power] for power in powers)
        decode(q, k, k, weight, weight, coefs, powers, 0.125, _state(_KV_HEADS, rows, head_dim), True, True)
    return launches


def _state(sequences: int, rows: int, width: int) -> Carry:
    return Carry(torch.zeros(sequences, rows, width), torch.zeros(sequences, rows))


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


def identity(one: Launch) -> tuple[object, ...]:
    """Return what two launches that compile to the same code have in common."""
    source = source_of(one)
    parts = (source.signature, source.constants, source.attrs)
    return (one.kernel.__name__, one.num_warps, one.num_stages, *(str(sorted(part.items())) for part in parts))


def compile_launch(one: Launch, arch: int) -> Compiled:
    """Compile one launch for a GPU generation and read the machine code.

    Args:
        one: The launch.
        arch: A key of `CHIPS`.

    Returns:
        What the compiler made of it.
    """
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
    compiled = triton.compile(source_of(one), target=GPUTarget("cuda", arch, 32), options=options)
    return Compiled(
        kernel=kernel_name(one),
        variant=variant_of(one),
        arch=arch,
        num_warps=one.num_warps,
        num_stages=one.num_stages,
        shared=compiled.metadata.shared,
        code=read_machine_code(compiled.asm["cubin"], arch),
    )


def kernel_name(one: Launch) -> str:
    """Return the kernel's name without `_kernel`."""
    return one.kernel.__name__.removesuffix("_kernel")


def variant_of(one: Launch) -> str:
    """Return words that distinguish a launch: powers, width, direction, tile, whether states are read."""
    arguments = one.arguments
    words = [f"d{arguments['d']}"] if "d" in arguments else []
    if "HAS0" in arguments and "HAS0" in one.kernel.arg_names:
        powers = tuple(power for power in range(3) if arguments[f"HAS{power}"])
        words.append(next(name for name, known in POWERS.items() if known == powers))
    if "REVERSE" in arguments:
        words.append("reverse" if arguments["REVERSE"] else "forward")
    if "BI" in arguments:
        words.append(f"{arguments['BI']}x{arguments['BJ']}")
    elif "BT" in arguments and "BS" in arguments:
        words.append(f"{arguments['BT']}x{arguments['BS']}")
    if "STATE" in arguments:
        words.append("states" if arguments["STATE"] else "one chunk")
    return " ".join(words)


def launches_to_compile(
    arch: int, head_dim: int, powers: str, dtype: torch.dtype = torch.bfloat16, *, one_chunk: bool = True
) -> list[Launch]:
    """Return the launches of training and decoding with the table's tiles, each once.

    Of launches that differ only by tensors that are left out (no initial or final state), the fullest one stands for
    all. `scan_products` appears forward and reverse, with large and with small blocks.

    Args:
        arch: GPU generation.
        head_dim: Width of keys and values.
        powers: A key of `POWERS`.
        dtype: Of q, k and v.
        one_chunk: Whether to add the kernels that read no states, because one chunk holds all tokens.

    Returns:
        The launches.
    """
    itemsize = 2 if dtype == torch.bfloat16 else 4
    tiles = tiles_for(arch, head_dim, max(POWERS[powers]), itemsize)
    launches = training_step(head_dim, POWERS[powers], tiles, dtype=dtype)
    launches += training_step(head_dim, POWERS[powers], tiles._replace(scan=tiles.small_scan), dtype=dtype)
    launches += decoding_step(head_dim, POWERS[powers], dtype=dtype)
    if one_chunk:
        launches += training_step(head_dim, POWERS[powers], tiles, dtype=dtype, chunked=False)
    fullest: dict[tuple[object, ...], Launch] = {}
    for one in launches:
        key = (one.kernel.__name__, variant_of(one), one.num_warps)
        if key not in fullest or _num_tensors(one) > _num_tensors(fullest[key]):
            fullest[key] = one
    return list(fullest.values())


def _num_tensors(one: Launch) -> int:
    return sum(isinstance(one.arguments[name], torch.Tensor) for name in one.kernel.arg_names)


def compile_all(
    archs: list[int], head_dims: list[int], powers: list[str], dtype: torch.dtype, kernel: str
) -> Iterator[Compiled]:
    """Compile what was asked for, one after the other, nothing twice."""
    for arch in archs:
        done: set[tuple[object, ...]] = set()
        for head_dim in head_dims:
            for name in powers:
                for one in launches_to_compile(arch, head_dim, name, dtype):
                    if kernel in kernel_name(one) and identity(one) not in done:
                        done.add(identity(one))
                        yield compile_launch(one, arch)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", choices=sorted(CHIPS), help="default: 80 and 90")
    parser.add_argument("--head-dim", type=int, action="append", help="default: 64 and 128")
    parser.add_argument("--powers", action="append", choices=sorted(POWERS), help="default: all")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of q, k and v")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--opcodes", action="store_true", help="also print the most frequent instructions")
    options = parser.parse_args()
    asked = (options.arch or list(ARCHS), options.head_dim or [64, 128], options.powers or sorted(POWERS))
    header_printed = False
    for one in compile_all(*asked, DTYPES[options.dtype], options.kernel):
        columns = one.columns()
        if not header_printed:
            print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
            header_printed = True
        print("| " + " | ".join(map(str, columns.values())) + " |", flush=True)
        if options.opcodes:
            print("  " + " ".join(f"{name}:{count}" for name, count in Counter(one.code.opcodes).most_common(16)))


if __name__ == "__main__":
    main()
