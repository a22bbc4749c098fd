"""Reading the machine code of one compiled kernel: registers, spills, instructions, loops, programs per processor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_][\w.]*)(.*?);")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")
_WARPGROUP_PRODUCT = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.F32\.(\w+)")
_WARP_PRODUCT = re.compile(r"HMMA\.(1688|16816)\.F32\.?(\w*)")
_WARP_SIZES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}
_SPILLS = ("STL", "LDL")
_SCHEDULERS = 4


@dataclass(frozen=True)
class Chip:
    """Limits of one streaming multiprocessor.

    Attributes:
        shared_bytes: Shared memory that one program may have.
        threads: Threads at a time.
        flops_per_clock: Dense bf16 operations of the tensor cores; tf32 has half of them.
    """

    shared_bytes: int
    threads: int
    flops_per_clock: int


# CUDA C++ programming guide, technical specifications per compute capability; rates from NVIDIA's A100, A10 and H100
# data sheets. 86 stands for every chip with 99 KiB: 8.6, 8.9 and 12.x.
CHIPS: Mapping[int, Chip] = {
    80: Chip(163 * 1024, 2048, 2048),
    86: Chip(99 * 1024, 1536, 1024),
    90: Chip(227 * 1024, 2048, 4096),
}
_REGISTERS = 65536
# Every program also takes 1 KiB of shared memory for the system, out of 1 KiB more than a program may have.
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Loop:
    """One loop of the machine code, inner loops not included.

    Attributes:
        instructions: Per warp and turn.
        products: Clocks that one warp's share of the matrix products keeps the tensor cores busy, per turn.
        spills: Loads and stores of spilled registers among the instructions.
    """

    instructions: int
    products: float
    spills: int


@dataclass(frozen=True)
class MachineCode:
    """What the assembler made of one kernel.

    Attributes:
        registers: Per thread.
        stack: Bytes per thread; anything but 0 means that registers were spilled.
        opcodes: Instructions by name, without modifiers.
        loops: In the order of the code.
    """

    registers: int
    stack: int
    opcodes: Mapping[str, int]
    loops: tuple[Loop, ...]

    @property
    def instructions(self) -> int:
        """All instructions."""
        return sum(self.opcodes.values())

    @property
    def products(self) -> int:
        """Tensor-core instructions: of a warpgroup (HGMMA) or of a warp (HMMA)."""
        return self.opcodes.get("HGMMA", 0) + self.opcodes.get("HMMA", 0)

    @property
    def spills_in_loops(self) -> int:
        """Loads and stores of spilled registers that are repeated."""
        return sum(loop.spills for loop in self.loops)

    def programs(self, arch: int, num_warps: int, shared: int) -> int:
        """Return how many programs fit one multiprocessor at a time.

        Args:
            arch: A key of `CHIPS`.
            num_warps: Warps per program.
            shared: Bytes of shared memory per program.

        Returns:
            0 where the kernel cannot be launched at all.
        """
        chip = CHIPS[arch]
        if shared > chip.shared_bytes:
            return 0
        # Registers are handed out to warps, 8 per thread at a time.
        registers = -(-self.registers // 8) * 8 * 32 * num_warps
        by_shared = (chip.shared_bytes + _RESERVED_SHARED) // (shared + _RESERVED_SHARED)
        return min(_REGISTERS // registers, by_shared, chip.threads // (32 * num_warps))


def issue_clocks(loop: Loop, num_warps: int) -> float:
    """Return the clocks that one program's warps need to issue a turn of a loop; compare with `product_clocks`."""
    return loop.instructions * num_warps / _SCHEDULERS


def product_clocks(loop: Loop, num_warps: int) -> float:
    """Return the clocks that one program's matrix products keep the tensor cores busy in a turn of a loop."""
    return loop.products * num_warps


def read_machine_code(cubin: bytes, arch: int) -> MachineCode:
    """Disassemble a compiled kernel with the tools that come with Triton.

    Args:
        cubin: What Triton keeps as `asm["cubin"]`.
        arch: 80, 86 or 90, for the speed of the tensor cores.

    Returns:
        What is in it.

    Raises:
        RuntimeError: The tools did not say how many registers are used.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _output("nvdisasm", "-c", path)
        usage = _USAGE.search(_output("cuobjdump", "-res-usage", path))
    if usage is None:
        raise RuntimeError("cuobjdump reported no register usage")
    names, loops = _parse(listing, CHIPS[arch].flops_per_clock)
    opcodes = Counter(name.split(".")[0] for name in names)
    return MachineCode(int(usage.group(1)), int(usage.group(2)), dict(opcodes), loops)


def _output(tool: str, *arguments: str | Path) -> str:
    command = [str(_TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _parse(listing: str, flops_per_clock: int) -> tuple[list[str], tuple[Loop, ...]]:
    """Return all instructions in order, and the loops: the stretches that a branch goes back over."""
    names: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(names)
        elif instruction := _INSTRUCTION.match(line):
            if instruction.group(1).startswith("BRA") and (target := _TARGET.search(instruction.group(2))):
                branches.append((len(names), target.group(1)))
            names.append(instruction.group(1))
    # A branch to itself fills up the end of the code.
    spans = sorted((labels[name], end + 1) for end, name in branches if labels.get(name, end) < end)
    return names, tuple(_loop(names, span, spans, flops_per_clock) for span in spans)


def _loop(names: list[str], span: tuple[int, int], spans: list[tuple[int, int]], flops_per_clock: int) -> Loop:
    inner = [other for other in spans if other != span and span[0] <= other[0] and other[1] <= span[1]]
    own = [names[i] for i in range(*span) if not any(start <= i < end for start, end in inner)]
    return Loop(
        instructions=len(own),
        products=sum(_product_flops(name) for name in own) / flops_per_clock,
        spills=sum(name.startswith(_SPILLS) for name in own),
    )


def _product_flops(name: str) -> float:
    """Return the operations of one warp's matrix product; those of tf32 count twice, since they take twice as long."""
    if shape := _WARPGROUP_PRODUCT.match(name):
        rows, columns, depth = (int(size) for size in shape.groups()[:3])
        return 2 * rows * columns * depth / 4 * (2 if shape.group(4) == "TF32" else 1)
    if shape := _WARP_PRODUCT.match(name):
        return 2 * _WARP_SIZES[shape.group(1)] * (2 if shape.group(2) == "TF32" else 1)
    return 0.0
