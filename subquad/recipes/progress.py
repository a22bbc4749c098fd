"""Progress bars with time left, for the long steps outside training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(title: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while a step runs; nothing where the output is not a terminal.

    Args:
        title: what the step does.
        console: where to show it.

    Yields:
        A function to call with (done, in all).
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def token_bar(title: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """Show a bar that counts tokens.

    Args:
        title: what the step does.
        total: tokens in all.
        console: where to show it.

    Yields:
        A function to call with the tokens of each batch.
    """
    done = 0
    with progress_bar(title, console) as advance:

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            advance(done, total)

        yield count
