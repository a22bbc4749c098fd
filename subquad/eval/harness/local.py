"""Local files in place of the hub's data sets, for the tasks whose layout is known here, and any text file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.errors import DataError
from subquad.eval.data_files import (
    LocalData,
    MissingFilesError,
    Row,
    SplitFiles,
    find_split,
    read_rows,
    read_text,
    table_patterns,
)
from subquad.eval.glue import LM_EVAL_TASKS, load_glue_task

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

DOCUMENT_END = "<|endoftext|>"
_WIKITEXT_FILES = {"train": "wiki.train.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"}


@dataclass(frozen=True)
class _Layout:
    """How the rows of a task stand in a file.

    Attributes:
        splits: Splits to score, the one lm-eval scores first.
        columns: Columns every row must have.
        convert: Makes a row of the file the row of the hub; raises `DataError` where a value is not allowed.
    """

    splits: tuple[str, ...]
    columns: tuple[str, ...]
    convert: Callable[[Row, str], Row]


def _plain(row: Row, _where: str) -> Row:
    return row


def _piqa(row: Row, where: str) -> Row:
    if row["label"] not in (0, 1) or isinstance(row["label"], str):
        raise DataError(f"{where}: label {row['label']!r} is not the integer 0 (sol1) or 1 (sol2).")
    return row


def _arc(row: Row, where: str) -> Row:
    letters = row["choices"]["label"]
    if row["answerKey"] not in letters:
        raise DataError(f"{where}: answerKey {row['answerKey']!r} is none of the choices' labels {letters}.")
    return row


def _lambada(row: Row, where: str) -> Row:
    if row.get("text") is not None:
        return {"text": row["text"]}
    if row.get("context") is None or row.get("continuation") is None:
        raise DataError(f"{where} has the columns {', '.join(row)}; it needs text, or context and continuation.")
    # lm-eval splits the text at its last space again.
    return {"text": f"{row['context']} {row['continuation']}"}


_ARC = _Layout(("test", "validation"), ("question", "choices", "answerKey"), _arc)
_LAMBADA = _Layout(("test",), (), _lambada)
_LAYOUTS: Mapping[str, _Layout] = {
    "piqa": _Layout(("validation",), ("goal", "sol1", "sol2", "label"), _piqa),
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "sciq": _Layout(
        ("test", "validation"),
        ("question", "distractor1", "distractor2", "distractor3", "correct_answer", "support"),
        _plain,
    ),
    "lambada_openai": _LAMBADA,
    "lambada_standard": _LAMBADA,
}
LOCAL_TASKS = (*LM_EVAL_TASKS, *_LAYOUTS, "wikitext")


def load_local(task: str, data_dirs: Sequence[Path], *, train: bool) -> LocalData:
    """Read a task's data from local files.

    Args:
        task: A name in `LOCAL_TASKS`.
        data_dirs: Folders to search, in order.
        train: Whether a training split is needed, for the examples of few-shot prompts.

    Returns:
        The splits.

    Raises:
        MissingFilesError: A split is in none of the folders.
        DataError: A file is damaged, lacks a column, or holds a value that is not allowed.
    """
    if task in LM_EVAL_TASKS:
        return load_glue_task(task, data_dirs, train=train)
    if task == "wikitext":
        return _wikitext(data_dirs)
    layout = _LAYOUTS[task]
    split, found = _first_split(task, layout.splits, data_dirs)
    splits = {split: found}
    if train:
        splits["train"] = find_split(task, "train", data_dirs, table_patterns(task, "train"))
    notes = []
    if split != layout.splits[0]:
        notes.append(f"Scored on the {split} split: the {layout.splits[0]} split, lm-eval's own, is not there.")
    from datasets import DatasetDict

    return LocalData(
        DatasetDict({name: _table(layout, files) for name, files in splits.items()}),
        split,
        {name: files.hashes() for name, files in splits.items()},
        tuple(notes),
    )


def _first_split(task: str, splits: Sequence[str], data_dirs: Sequence[Path]) -> tuple[str, SplitFiles]:
    problems = []
    for split in splits:
        try:
            return split, find_split(task, split, data_dirs, table_patterns(task, split))
        except MissingFilesError as error:
            problems.append(str(error))
    raise MissingFilesError(" ".join(problems))


def _table(layout: _Layout, files: SplitFiles) -> Dataset:
    from datasets import Dataset

    return Dataset.from_list([layout.convert(row, where) for where, row in read_rows(files, layout.columns)])


def _wikitext(data_dirs: Sequence[Path]) -> LocalData:
    name = _WIKITEXT_FILES["test"]
    patterns = [name, f"*/{name}", *table_patterns("wikitext", "test")]
    files = find_split("wikitext", "test", data_dirs, patterns)
    if files.paths[0].suffix == ".raw":
        pages = [page for path in files.paths for page in _pages(read_text(path))]
    else:
        pages = [row["page"] for _, row in read_rows(files, ("page",))]
    return _page_data(pages, files)


def _page_data(pages: list[str], files: SplitFiles) -> LocalData:
    from datasets import Dataset, DatasetDict

    return LocalData(DatasetDict(test=Dataset.from_dict({"page": pages})), "test", {"test": files.hashes()})


def _pages(text: str) -> Iterator[str]:
    """Split WikiText into articles as the hub's document-level set does: before each ` = Title = `, text unchanged."""
    page: list[str] = []
    for line in text.split("\n"):
        stripped = line.strip()
        # Headings below the title stand between two or more signs: ` = = Career = = `.
        title = re.match(r"= (?!= ).* =$", stripped) and not stripped.endswith("= =")
        if title and "\n".join(page).strip():
            yield "\n".join(page)
        if title:
            page = []
        page.append(line)
    yield "\n".join(page)


def load_text(path: Path) -> LocalData:
    """Read any text as documents for a perplexity.

    Args:
        path: A text file, whose documents `<|endoftext|>` separates (without it the file is one document), or JSON
            lines with a column `text`, a document each; either may be gzipped.

    Returns:
        A `test` split with a column `page`; documents of white space only are left out.

    Raises:
        DataError: The file cannot be read, or has no text.
    """
    files = SplitFiles(path.parent, (path,))
    if ".jsonl" in path.suffixes[-2:]:
        documents = [row["text"] for _, row in read_rows(files, ("text",))]
    else:
        documents = read_text(path).split(DOCUMENT_END)
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise DataError(f"{path} holds no text; give a file with some.")
    return _page_data(documents, files)


def text_task_name(path: Path) -> str:
    """Return the name of the task that measures a text file: `text-` and the file's name."""
    return "text-" + re.sub(r"[^A-Za-z0-9_.-]", "-", path.name)


def local_override(local: LocalData) -> dict[str, Any]:
    """Return what a registered lm-eval task must be given to read this data; its prompts and metrics stay its own.

    Args:
        local: The data.

    Returns:
        Keys of a task's configuration.
    """

    # lm-eval calls it with the task's metadata and dataset_kwargs.
    def read_local_files(**_metadata: object) -> DatasetDict:
        return local.dataset

    return {
        "dataset_path": "local files",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: dict(hashes) for split, hashes in local.files.items()}},
        "custom_dataset": read_local_files,
        **split_override(local),
    }


def split_override(local: LocalData) -> dict[str, str | None]:
    """Return lm-eval's keys for the splits: it reads every split that its configuration names, needed or not."""
    splits: dict[str, str | None] = {"training_split": "train" if "train" in local.dataset else None}
    scored = "test_split" if local.split == "test" else "validation_split"
    return splits | {"test_split": None, "validation_split": None} | {scored: local.split}
