"""The command of a measurement of one checkpoint on one text: read the arguments, measure, print, write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from subquad.convert.atomic import atomic_file


def run_command(
    doc: str | None,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
    **defaults: int,
) -> None:
    """Run it.

    Args:
        doc: the module's docstring; its first line describes the command.
        measure: from `checkpoint`, `text` and the options to the figures.
        render: the figures as Markdown.
        **defaults: further whole-number options, by name, with their defaults.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("checkpoint", help="a converted checkpoint")
    parser.add_argument("--text", required=True, help="a text file; its first rows are read")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--output", type=Path, help="write the figures there as JSON, too")
    options = parser.parse_args()
    result = measure(options)
    print(render(result))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        atomic_file(options.output, json.dumps(result, indent=1).encode())
