"""GLUE's rows with the hub's columns and integer labels: from the hub, its files, or the classic TSV files."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import pyarrow
from pyarrow import parquet

from subquad.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"]
GlueSplit = Literal["train", "validation", "validation_matched", "validation_mismatched"]
HUB_ID = "nyu-mll/glue"


@dataclass(frozen=True, kw_only=True)
class GlueSpec:
    """Where a task keeps its texts and labels.

    Attributes:
        texts: The hub's text columns, one or two.
        labels: Class names, in the order of the hub's integer labels.
        folder: Folder of the classic TSV files.
        tsv_texts: Columns of the TSV files that hold `texts`: names, or positions where there is no header.
        tsv_label: Column of the TSV files that holds the label.
        tsv_header: Whether the first line of the TSV files names the columns.
        skips_short_rows: Whether the official file has cut rows, which the hub leaves out.
        eval_splits: The validation splits.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    folder: str
    tsv_texts: tuple[str, ...]
    tsv_label: str = "label"
    tsv_header: bool = True
    skips_short_rows: bool = False
    eval_splits: tuple[GlueSplit, ...] = ("validation",)


_PAIR = ("sentence1", "sentence2")
_NO_YES_PARAPHRASE = ("not_equivalent", "equivalent")
_NLI = ("entailment", "not_entailment")

GLUE_TASKS: dict[GlueTask, GlueSpec] = {
    "cola": GlueSpec(
        texts=("sentence",),
        labels=("unacceptable", "acceptable"),
        folder="CoLA",
        tsv_texts=("3",),
        tsv_label="1",
        tsv_header=False,
    ),
    "sst2": GlueSpec(texts=("sentence",), labels=("negative", "positive"), folder="SST-2", tsv_texts=("sentence",)),
    "mrpc": GlueSpec(
        texts=_PAIR,
        labels=_NO_YES_PARAPHRASE,
        folder="MRPC",
        tsv_texts=("#1 String", "#2 String"),
        tsv_label="Quality",
    ),
    "qqp": GlueSpec(
        texts=("question1", "question2"),
        labels=("not_duplicate", "duplicate"),
        folder="QQP",
        tsv_texts=("question1", "question2"),
        tsv_label="is_duplicate",
        skips_short_rows=True,
    ),
    "mnli": GlueSpec(
        texts=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        folder="MNLI",
        tsv_texts=_PAIR,
        tsv_label="gold_label",
        eval_splits=("validation_matched", "validation_mismatched"),
    ),
    "qnli": GlueSpec(texts=("question", "sentence"), labels=_NLI, folder="QNLI", tsv_texts=("question", "sentence")),
    "rte": GlueSpec(texts=_PAIR, labels=_NLI, folder="RTE", tsv_texts=_PAIR),
    "wnli": GlueSpec(texts=_PAIR, labels=("not_entailment", "entailment"), folder="WNLI", tsv_texts=_PAIR),
}


@dataclass(frozen=True)
class _Row:
    """A row as it stands in a file; None where it is too short to hold the field."""

    place: str
    texts: tuple[Any, ...]
    label: Any


def load_glue(task: GlueTask, split: GlueSplit, data_dir: Path | None = None) -> Dataset:
    """Load one split of a GLUE task.

    Every source gives the same rows in the same order: the hub's columns of text, unchanged (SST-2 keeps its spaces),
    and `label` with the hub's integers (RTE: 0 entailment, 1 not). Below `data_dir` a task's files are, first found,
    `rte/train-*.parquet` or `rte/train.parquet`, `rte/train.jsonl` (the hub's columns), or `RTE/train.tsv` (classic;
    also in `rte/`). TSV files are read without quoting: quotes in GLUE are text.

    Args:
        task: Name of the task.
        split: `train` or one of the task's `eval_splits`.
        data_dir: Folder with the tasks' folders; None loads `nyu-mll/glue` from the hub.

    Returns:
        The rows, in memory; `label` is a `ClassLabel`.

    Raises:
        ConfigError: An unknown task, or a split it does not have.
        DataError: Missing or damaged files; a row without text or with a label that is none of the task's.
    """
    if task not in GLUE_TASKS:
        raise ConfigError(f"GLUE has no task {task!r}; it has {', '.join(get_args(GlueTask))}")
    spec = GLUE_TASKS[task]
    splits = ("train", *spec.eval_splits)
    if split not in splits:
        raise ConfigError(f"{task} has no split {split!r} with labels; it has {', '.join(splits)}")
    rows = _hub_rows(task, split) if data_dir is None else _local_rows(task, split, data_dir)
    columns: dict[str, list[Any]] = {name: [] for name in (*spec.texts, "label")}
    for row in rows:
        for name, text in zip(spec.texts, row.texts, strict=True):
            if not isinstance(text, str):
                raise DataError(f"{row.place}: {name} is {text!r}, but every row of {task} needs that text")
            columns[name].append(text)
        columns["label"].append(_label(row, task, spec))
    if not columns["label"]:
        raise DataError(f"the split {split} of {task} is empty in {data_dir or HUB_ID}")
    from datasets import ClassLabel, Dataset, Features, Value

    features: dict[str, Any] = {name: Value("string") for name in spec.texts}
    features["label"] = ClassLabel(names=list(spec.labels))
    return Dataset.from_dict(columns, features=Features(features))


def _label(row: _Row, task: str, spec: GlueSpec) -> int:
    """Return the integer of a label given as an integer, its digits or its name."""
    label = row.label
    if isinstance(label, str):
        label = spec.labels.index(label) if label in spec.labels else int(label) if label.isdecimal() else label
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < len(spec.labels):
        allowed = ", ".join(f"{number} ({name})" for number, name in enumerate(spec.labels))
        raise DataError(f"{row.place}: the label is {row.label!r}, but {task} has {allowed}")
    return label


def _hub_rows(task: str, split: str) -> Iterator[_Row]:
    spec = GLUE_TASKS[cast(GlueTask, task)]
    from datasets import load_dataset

    try:
        dataset = load_dataset(HUB_ID, task, split=split)
    except Exception as error:  # the hub's client raises errors of a dozen kinds
        raise DataError(
            f"cannot load {task} ({split}) of {HUB_ID} from the hub: {error}. Without a hub give a folder with GLUE's "
            "files as data_dir"
        ) from error
    return _column_rows(dataset, spec, f"{HUB_ID} {task} {split}")


def _local_rows(task: str, split: str, data_dir: Path) -> Iterator[_Row]:
    spec = GLUE_TASKS[cast(GlueTask, task)]
    stem = split.replace("validation", "dev")
    folders = [data_dir / task, data_dir / spec.folder]
    for folder in folders:
        shards = sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"{split}.parquet"))
        if shards:
            return _parquet_rows(shards, spec)
        lines = folder / f"{split}.jsonl"
        if lines.is_file():
            return _column_rows(_json_lines(lines), spec, str(lines))
        table = folder / f"{stem}.tsv"
        if table.is_file():
            return _tsv_rows(table, spec)
    wanted = f"{split}-*.parquet, {split}.parquet, {split}.jsonl or {stem}.tsv"
    raise DataError(
        f"no file holds the split {split} of {task}: looked for {wanted} in {folders[0]} and {folders[1]}. Give the "
        "folder that holds the tasks' folders as data_dir, or leave the task out"
    )


def _column_rows(records: Iterable[Mapping[str, Any]], spec: GlueSpec, place: str) -> Iterator[_Row]:
    for number, record in enumerate(records, start=1):
        yield _Row(f"{place}, row {number}", tuple(record.get(name) for name in spec.texts), record.get("label"))


def _parquet_rows(shards: list[Path], spec: GlueSpec) -> Iterator[_Row]:
    for shard in shards:
        try:
            records = parquet.read_table(shard).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{shard} is not a readable parquet file: {error}. Download it again") from error
        yield from _column_rows(records, spec, str(shard))


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number} is {line.strip()[:60]!r}, but every line must be an object")
        yield record


def _tsv_rows(path: Path, spec: GlueSpec) -> Iterator[_Row]:
    """Read a table; the place of a row counts lines, header included."""
    table = csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    wanted = (*spec.tsv_texts, spec.tsv_label)
    header = next(table, []) if spec.tsv_header else list(map(str, range(4)))
    missing = [name for name in wanted if name not in header]
    if missing:
        raise DataError(f"{path} has the columns {header}, without {', '.join(missing)}; is it another task's file?")
    positions = [header.index(name) for name in wanted]
    cut = []
    for fields in table:
        place = f"{path}, line {table.line_num}"
        values = [fields[position] if position < len(fields) else None for position in positions]
        if spec.skips_short_rows and None in values:
            cut.append(place)
            continue
        yield _Row(place, tuple(values[:-1]), values[-1])
    if cut:
        logger.warning("%d rows without all fields are left out, as the hub does; the first is %s", len(cut), cut[0])


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file; MRPC's begin with a byte order mark."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
