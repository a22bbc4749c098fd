"""What subquad runs on: package versions against the supported ranges, the driver, the devices."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from subquad.errors import ConfigError

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "datasets", "lm-eval")


@dataclass(frozen=True)
class Package:
    """A package and the versions of it that subquad asks for.

    Attributes:
        name: Its name on the package index.
        version: The installed version, or None.
        supported: The range, such as `>=2.11`; None where subquad runs from a folder without being installed.
    """

    name: str
    version: str | None
    supported: str | None

    @property
    def problem(self) -> str | None:
        """What is wrong with the installed version, with the fix, or None."""
        if self.version is None or self.supported is None:
            return None
        if Version(self.version) in SpecifierSet(self.supported, prereleases=True):
            return None
        return (
            f"{self.name} {self.version} is not a supported version ({self.supported}): "
            f"pip install -U '{self.name}{self.supported}'"
        )


@dataclass(frozen=True)
class Device:
    """A device of this machine.

    Attributes:
        name: As PyTorch spells it: `cpu`, `cuda:0`, ….
        model: The chip.
        capability: Compute capability of a GPU, such as `(9, 0)`.
        memory_bytes: Memory of a GPU.
        threads: Threads that PyTorch uses on a CPU.
    """

    name: str
    model: str
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    threads: int | None = None

    def __str__(self) -> str:
        """Return everything but the name, in one line."""
        parts = [self.model]
        if self.capability is not None:
            parts.append("compute capability {}.{}".format(*self.capability))
        if self.memory_bytes is not None:
            parts.append(f"{self.memory_bytes / 2**30:.1f} GiB")
        if self.threads is not None:
            parts.append(f"PyTorch threads: {self.threads}")
        return ", ".join(parts)


def find_packages() -> list[Package]:
    """Return the packages that decide what subquad can do, installed or not.

    The supported ranges are those of subquad's own metadata, extras included.
    """
    try:
        requirements = [Requirement(text) for text in metadata.requires("subquad") or ()]
    except metadata.PackageNotFoundError:
        requirements = []
    supported = {canonicalize_name(found.name): str(found.specifier) for found in requirements}
    return [Package(name, _version(name), supported.get(canonicalize_name(name))) for name in PACKAGES]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def cuda_problem() -> str | None:
    """Return why PyTorch sees no GPU, or None if it sees one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs only"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "torch finds no GPU"


def find_devices() -> list[Device]:
    """Return the devices of this machine that PyTorch can use, GPUs first."""
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        devices.append(Device(f"cuda:{index}", found.name, (found.major, found.minor), found.total_memory))
    if torch.backends.mps.is_available():
        devices.append(Device("mps", platform.processor() or "Apple GPU"))
    devices.append(Device("cpu", platform.machine(), threads=torch.get_num_threads()))
    return devices


def select_devices(devices: list[Device], wanted: str | None) -> list[Device]:
    """Return the devices that a name stands for.

    Args:
        devices: The devices of this machine.
        wanted: `cpu`, `cuda` (all of them), `cuda:1`, …; None is all devices.

    Returns:
        At least one device.

    Raises:
        ConfigError: There is no such device here.
    """
    found = [device for device in devices if wanted is None or wanted in (device.name, device.name.split(":")[0])]
    if found:
        return found
    problem = cuda_problem() if str(wanted).startswith("cuda") else None
    raise ConfigError(
        f"there is no device {wanted!r}{f' ({problem})' if problem else ''}; "
        f"this machine has {', '.join(device.name for device in devices)}."
    )
