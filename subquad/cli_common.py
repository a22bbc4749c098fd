"""What the commands share: arguments, the command that was given, and where output goes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated

import typer

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A packaged recipe (`subquad recipes list`) or a .yaml file.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values to change, by dotted key: `stage1.tokens=50000`."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Remove the earlier run in the output folder first.")]

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A converted checkpoint, such as runs/demo/student.")
]


def given_command() -> str:
    """Return the command that was given, without the option that would remove the run it started."""
    return shlex.join(["subquad", *(word for word in sys.argv[1:] if word != "--fresh")])


@contextmanager
def long_run() -> Iterator[None]:
    """Keep standard output for the result."""
    with redirect_stdout(sys.stderr):
        yield
