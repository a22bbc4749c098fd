"""Find, hash and read the data files of an evaluation task where there is no hub."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pyarrow
from pyarrow import parquet

from subquad.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetDict

Row = dict[str, Any]


class MissingFilesError(DataError):
    """A task's files are not in the data folders; the message lists what was looked for."""


@dataclass(frozen=True)
class LocalData:
    """The splits of a task, read from files, in the columns its lm-eval task expects.

    Attributes:
        dataset: Rows by split.
        split: The split that is scored.
        files: By split, the SHA-256 of each file by its name below its data folder.
        notes: What a reader of the score must know about the data.
    """

    dataset: DatasetDict
    split: str
    files: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split.

    Attributes:
        folder: The data folder they lie in.
        paths: The files in order; several are the shards of one table.
    """

    folder: Path
    paths: tuple[Path, ...]

    def hashes(self) -> dict[str, str]:
        """Hash the files.

        Returns:
            The SHA-256 of each by its name below the data folder.

        Raises:
            DataError: A file cannot be read.
        """
        found = {}
        for path in self.paths:
            with _readable(path), path.open("rb") as file:
                found[path.relative_to(self.folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
        return found


def find_split(task: str, split: str, data_dirs: Sequence[Path], patterns: Sequence[str]) -> SplitFiles:
    """Return the files of the first pattern that matches something in the first folder where one does.

    Args:
        task: Name of the task, for the message.
        split: Name of the split, for the message.
        data_dirs: Folders to search.
        patterns: Glob patterns relative to a data folder, the preferred one first.

    Returns:
        The files, sorted by name.

    Raises:
        MissingFilesError: There are none.
    """
    for folder in data_dirs:
        for pattern in patterns:
            paths = sorted(path for path in folder.glob(pattern) if path.is_file())
            if paths:
                return SplitFiles(folder, tuple(paths))
    raise MissingFilesError(
        f"the {split} split of {task} is not in {', '.join(map(str, data_dirs))}; looked for {', '.join(patterns)}. "
        "Put one of these there, or leave the task out."
    )


def table_patterns(task: str, split: str) -> list[str]:
    """Return where a split in the hub's columns may lie: JSON lines or parquet, also in shards."""
    endings = (".jsonl", ".jsonl.gz", ".parquet", "-*.parquet")
    return [f"{stem}{ending}" for stem in (f"{task}/{split}", f"{task}_{split}") for ending in endings]


def read_rows(files: SplitFiles, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a table in the hub's columns, each with where it stands (for messages).

    Args:
        files: Parquet or JSON-lines files.
        columns: Columns that every row must have.

    Yields:
        `FILE, row N` (from 1), and the row.

    Raises:
        DataError: A file cannot be read, has no rows, or lacks a column.
    """
    for path in files.paths:
        with _readable(path):
            rows = parquet.read_table(path).to_pylist() if path.suffix == ".parquet" else _json_rows(path)
        if not rows:
            raise DataError(f"{path} has no rows; give the whole file.")
        for number, row in enumerate(rows, start=1):
            absent = [name for name in columns if row.get(name) is None]
            if absent:
                raise DataError(
                    f"{path}, row {number} has no {', '.join(absent)} (its columns are {', '.join(row)}); every row "
                    f"needs {', '.join(columns)}, as on the hub."
                )
            yield f"{path}, row {number}", row


def read_text(path: Path) -> str:
    """Return a UTF-8 text file, also a gzipped one, with its line ends as they are.

    Args:
        path: The file.

    Returns:
        Its text.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    with _readable(path), _open_text(path) as file:
        return file.read()


def _json_rows(path: Path) -> list[Row]:
    with _open_text(path) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is not a JSON object")
    return rows


def _open_text(path: Path) -> TextIO:
    # newline="" keeps the line ends: they count as bytes.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}. Give a complete file, text in UTF-8.") from error
