"""What `subquad doctor` says: versions, devices, the implementation on each and why, a self-check, and what to do."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.specifiers import SpecifierSet
from rich.console import Group
from rich.table import Table
from rich.text import Text

from subquad import __version__
from subquad.environment import (
    Device,
    Package,
    cuda_problem,
    driver_version,
    find_devices,
    find_packages,
    select_devices,
)
from subquad.errors import ConfigError
from subquad.kernels.backend import import_problem

if TYPE_CHECKING:
    from subquad.kernels.selfcheck import CheckResult

# Of these releases wrong gradients on Hopper GPUs are known, in a kernel of another project.
SUSPECT_TRITON = SpecifierSet(">=3.4,<3.7.1")
_SUSPECT_ISSUE = "fla-org/flash-linear-attention#640"
_HOPPER = 9


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A device and what was found on it.

    Attributes:
        device: The device.
        op: What runs the op, `triton` or `torch`; None where nothing can.
        op_reason: Why.
        window: What runs the exact window, `flex` or `torch`; None where nothing can.
        window_reason: Why.
        results: The self-check.
    """

    device: Device
    op: str | None = None
    op_reason: str
    window: str | None = None
    window_reason: str = ""
    results: tuple[CheckResult, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything in the types of JSON; an error that is not finite is None."""
        return {
            **dataclasses.asdict(self.device),
            "op": {"implementation": self.op, "reason": self.op_reason},
            "window": {"implementation": self.window, "reason": self.window_reason},
            "checks": [
                {
                    "name": result.check.name,
                    "status": result.status,
                    "problems": list(result.problems),
                    "measured": {
                        name: {"error": error if math.isfinite(error) else None, "limit": limit}
                        for name, (error, limit) in result.measured.items()
                    },
                    "seconds": round(result.seconds, 3),
                }
                for result in self.results
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `subquad doctor` found.

    Attributes:
        packages: Versions and supported ranges.
        driver: Version of the NVIDIA driver, or None.
        gpu_problem: Why PyTorch uses no GPU, or None.
        triton_problem: Why the installed Triton cannot be imported, or None.
        examined: The devices.
    """

    packages: tuple[Package, ...]
    driver: str | None
    gpu_problem: str | None
    triton_problem: str | None
    examined: tuple[Examined, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything in the types of JSON."""
        return {
            "ok": self.ok,
            "subquad": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cuda": torch.version.cuda,
            "driver": self.driver,
            "packages": [dataclasses.asdict(package) for package in self.packages],
            "devices": [one.to_dict() for one in self.examined],
            "warnings": self.warnings,
            "problems": self.problems,
            "advice": self.advice,
        }

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked is wrong."""
        return not self.problems

    @property
    def results(self) -> list[CheckResult]:
        """The self-checks of all devices."""
        return [result for one in self.examined for result in one.results]

    @property
    def problems(self) -> list[str]:
        """What is wrong."""
        if self.triton_problem is not None:
            return [f"triton is installed but cannot be imported: {self.triton_problem}"]
        problems = [f"{one.device.name}: {one.op_reason}" for one in self.examined if one.op is None]
        for one in self.examined:
            failed = (result for result in one.results if result.status == "failed")
            problems += [f"{one.device.name}: {result.check.name}: {'; '.join(result.problems)}" for result in failed]
        return problems

    @property
    def warnings(self) -> list[str]:
        """What may be wrong; the self-check decides."""
        warnings = [package.problem for package in self.packages if package.problem is not None]
        if self._suspect_triton():
            warnings.append(
                f"Triton 3.4 to 3.7.0 gave wrong gradients on Hopper GPUs in another project's kernels "
                f"({_SUSPECT_ISSUE}); the self-check tells whether subquad's are right here"
            )
        if self.driver is not None and self.gpu_problem is not None:
            warnings.append(
                f"the NVIDIA driver {self.driver} is installed, but PyTorch uses no GPU: {self.gpu_problem}; install "
                "the build of torch for a CUDA version of this driver"
            )
        return warnings

    @property
    def advice(self) -> list[str]:
        """What to do about the problems, step by step."""
        if self.triton_problem is not None:
            return [
                "Install Triton again: pip install --force-reinstall triton",
                "Or remove it: pip uninstall triton. Without it everything runs in PyTorch.",
                "Then run subquad doctor again: nothing was checked this time.",
            ]
        failed = {result.check.implementation for result in self.results if result.status == "failed"}
        steps = []
        if failed & {"triton", "flex"}:
            steps.append(self._fallback())
        if "triton" in failed:
            steps.append(self._other_triton())
        if "flex" in failed:
            steps.append(
                "The fused window is compiled by PyTorch: install another release of torch, then run subquad "
                "doctor again."
            )
        if "torch" in failed:
            steps.append(
                "PyTorch itself is wrong here: install another build of torch for this device and its driver, then run "
                "subquad doctor again. Meanwhile CUDA_VISIBLE_DEVICES= (empty) keeps subquad off the GPUs."
            )
        if failed:
            steps.append("If it stays wrong, report it with the output of: subquad doctor --json")
        return steps

    def _suspect_triton(self) -> bool:
        version = next((package.version for package in self.packages if package.name == "triton"), None)
        hopper = any(one.device.capability is not None and one.device.capability[0] == _HOPPER for one in self.examined)
        return hopper and version is not None and SUSPECT_TRITON.contains(version, prereleases=True)

    def _fallback(self) -> str:
        found = {result.status for result in self.results if result.check.implementation == "torch"}
        judged = "wrong here, too" if "failed" in found else "right here" if "ok" in found else "could not be checked"
        return (
            "Until that is solved, set SUBQUAD_BACKEND=torch: everything then runs in PyTorch, which is slower and "
            f"{judged}."
        )

    def _other_triton(self) -> str:
        if self._suspect_triton():
            return "Install a newer Triton (pip install -U 'triton>=3.7.1'), then run subquad doctor again."
        return (
            "If an error above names its cause, such as a missing C compiler, fix that. Else install another release "
            "of Triton, newer or older. Then run subquad doctor again."
        )


def diagnose(device: str | None = None, seconds: float = 10.0) -> Diagnosis:
    """Look at the installation and check what runs the op and the window on each device.

    Args:
        device: The device to check, such as `cpu`, `cuda`, `cuda:1`; None is all of them.
        seconds: About how long the checks of a device may take; those that do not fit are left out.

    Returns:
        What was found.

    Raises:
        ConfigError: There is no such device here.
    """
    devices = select_devices(find_devices(), device)
    triton_problem = import_problem("triton")
    if triton_problem is None:
        examined = [_examine(one, seconds) for one in devices]
    else:
        # PyTorch, too, may import it and fail.
        examined = [Examined(device=one, op_reason="not checked") for one in devices]
    return Diagnosis(
        packages=tuple(find_packages()),
        driver=driver_version(),
        gpu_problem=cuda_problem(),
        triton_problem=triton_problem,
        examined=tuple(examined),
    )


def _examine(device: Device, seconds: float) -> Examined:
    from subquad.kernels.backend import choose_backend
    from subquad.kernels.selfcheck import run_checks, window_problem

    on = torch.device(device.name)
    try:
        example = torch.empty(1, 1, 1, 64, device=on)
        op = choose_backend("auto", example, example, example, (2,))
        window = window_problem(on)
    except (ConfigError, RuntimeError) as error:
        return Examined(device=device, op_reason=str(error).partition("\n")[0])
    return Examined(
        device=device,
        op=op.backend,
        op_reason=op.reason,
        window="flex" if window is None else "torch",
        window_reason="long inputs on an NVIDIA GPU" if window is None else window,
        results=tuple(run_checks(on, seconds)),
    )


def render_diagnosis(diagnosis: Diagnosis) -> Group:
    """Return the diagnosis for a rich console; the last line is the result."""
    parts: list[Table | Text] = [_version_table(diagnosis), _device_table(diagnosis)]
    if diagnosis.results:
        parts.append(_check_table(diagnosis))
    parts += [Text(f"Warning: {warning}", style="yellow") for warning in diagnosis.warnings]
    parts += [Text(f"Wrong: {problem}", style="bold red") for problem in diagnosis.problems]
    parts += [Text(f"{number}. {step}") for number, step in enumerate(diagnosis.advice, start=1)]
    return Group(*parts, *_result_lines(diagnosis))


def _version_table(diagnosis: Diagnosis) -> Table:
    table = Table("", "installed", "supported", title="Versions", title_justify="left")
    if not any(package.supported for package in diagnosis.packages):
        table.caption = "Supported versions are recorded when subquad is installed: pip install -e ."
    table.add_row("subquad", __version__, "")
    table.add_row("python", platform.python_version(), "")
    for package in diagnosis.packages:
        table.add_row(package.name, package.version or "not installed", package.supported or "")
    table.add_row("CUDA of torch", torch.version.cuda or "none", "")
    table.add_row("NVIDIA driver", diagnosis.driver or "none", "")
    return table


def _device_table(diagnosis: Diagnosis) -> Table:
    table = Table("device", "", "op", "window", title="Devices and what runs on them", title_justify="left")
    for one in diagnosis.examined:
        op = f"{one.op} ({one.op_reason})" if one.op else one.op_reason
        window = f"{one.window} ({one.window_reason})" if one.window else ""
        table.add_row(*map(Text, (one.device.name, str(one.device), op, window)))
    return table


def _check_table(diagnosis: Diagnosis) -> Table:
    table = Table(
        *("device", "check", "result", "worst", "error", "limit"),
        title="Self-check",
        title_justify="left",
        caption="Relative RMS error against float64 on the CPU, of outputs, states and gradients (d ...).",
        caption_justify="left",
    )
    for one in diagnosis.examined:
        for result in one.results:
            cells = ["", "", ""]
            if result.worst is not None:
                name, (error, limit) = result.worst
                cells = [name, f"{error:.1e}", f"{limit:.0e}"]
            style = {"ok": "green", "failed": "bold red"}.get(result.status, "yellow")
            table.add_row(one.device.name, result.check.name, Text(result.status, style), *cells)
    return table


def _result_lines(diagnosis: Diagnosis) -> list[Text]:
    counts = Counter(result.status for result in diagnosis.results)
    lines = []
    if counts["no time"]:
        lines.append(
            f"There was no time for {counts['no time']} of the checks: --seconds 120 gives more, and the kernels "
            "compiled now are kept for the next run."
        )
    if counts["no memory"]:
        lines.append(f"There was too little free memory on the device for {counts['no memory']} of the checks.")
    if counts["failed"]:
        result = Text(f"{counts['failed']} of {counts['failed'] + counts['ok']} checks failed.", "bold red")
    elif diagnosis.problems:
        result = Text("Something is wrong, see above.", "bold red")
    else:
        result = Text(f"All checks{' that ran' if lines else ''} passed ({counts['ok']}).", "green")
    return [*map(Text, lines), result]
