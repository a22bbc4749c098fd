"""Where the command line prints: as wide as the terminal, and wide enough for whole tables in a file or a pipe."""

from __future__ import annotations

import os

from rich.console import Console

FILE_WIDTH = 160


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a rich console.

    Args:
        stderr: print to standard error.
        quiet: print nothing.

    Returns:
        The console. Without a terminal it is 160 columns wide, not rich's 80, unless `COLUMNS` says otherwise.
    """
    console = Console(stderr=stderr, quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console
