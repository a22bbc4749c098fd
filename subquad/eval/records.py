"""The typed result of one evaluation task on one model, with everything needed to repeat it, one JSON file each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from subquad.convert.atomic import atomic_file
from subquad.errors import OutputError

RECORDS_FOLDER = "evals"
# Names become folders and files.
SAFE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
_MOST_PROBLEMS = 5

Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Metric(_Frozen):
    """One number.

    Attributes:
        value: The number.
        standard_error: Its standard error; None where there is none, said in `EvalRecord.notes`.
        num: Examples it is made of.
        higher_is_better: Direction.
    """

    value: Finite
    standard_error: Finite | None = None
    num: Annotated[int, Field(ge=1)]
    higher_is_better: bool = True


class Provenance(_Frozen):
    """What is needed to measure the same thing again.

    Attributes:
        checkpoint: The model's folder, hub id or name.
        mode: Attention mode; None is the model as it stands.
        weights: Fingerprint of the weights.
        versions: Python and package versions.
        commit: Git commit of subquad, `-dirty` appended with local changes; None outside a checkout.
        device: In words.
        dtype: Data type of the weights.
        seed: Seed of everything drawn.
        batch_size: Sequences per forward pass.
        prompts_hash: SHA-256 of the token ids of all prompts, in order (`hash_prompts`).
        command: Command that repeats it.
        created: UTC time, ISO 8601.
        wall_seconds: Time it took.
    """

    checkpoint: str
    mode: str | None
    weights: str
    versions: dict[str, str]
    commit: str | None
    device: str
    dtype: str
    seed: int
    batch_size: Annotated[int, Field(ge=1)]
    prompts_hash: str
    command: str
    created: str
    wall_seconds: Finite


class EvalRecord(_Frozen):
    """What one task measured on one model.

    Attributes:
        schema_version: Version of this layout.
        task: Name of the task, such as `niah`, `sst2`, `glue-finetune-rte`; also its folder's name.
        model: `teacher`, `student`, `window_only`, `student_without_far`, or the name of another checkpoint.
        metrics: Numbers by name; a number that could not be measured is not there, and `notes` says why.
        baselines: What chance or the majority class scores, by metric.
        settings: Everything chosen; a record counts as finished only for equal settings.
        details: More than single numbers, such as cells of a grid.
        notes: Anything a reader must know to judge the numbers.
        provenance: What is needed to repeat it.
    """

    schema_version: Literal[1] = 1
    task: Annotated[str, Field(pattern=SAFE_NAME)]
    model: Annotated[str, Field(pattern=SAFE_NAME)]
    metrics: dict[str, Metric]
    baselines: dict[str, Finite] = {}
    settings: dict[str, Any]
    details: dict[str, Any] = {}
    notes: list[str] = []
    provenance: Provenance


def hash_prompts(prompts: Iterable[Iterable[int]]) -> str:
    """Return the SHA-256 of prompts, given as token ids in the order in which they are scored."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update((" ".join(map(str, prompt)) + "\n").encode())
    return digest.hexdigest()


def record_path(folder: Path, task: str, model: str) -> Path:
    """Return the file of a record below `folder`, a run's or a checkpoint's evaluation folder."""
    return folder / RECORDS_FOLDER / task / f"{model}.json"


def save_record(record: EvalRecord, folder: Path) -> Path:
    """Write a record so that a reader sees the old file or the whole new one.

    Args:
        record: What was measured.
        folder: The evaluation folder; created if missing.

    Returns:
        Path of the file.

    Raises:
        OutputError: The folder cannot be written.
    """
    path = record_path(folder, record.task, record.model)
    atomic_file(path, (record.model_dump_json(indent=2) + "\n").encode())
    return path


def load_record(path: Path) -> EvalRecord:
    """Read and check a record.

    Args:
        path: Its file.

    Returns:
        The record.

    Raises:
        OutputError: The file is missing, damaged, or not the layout this version reads.
    """
    try:
        return EvalRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        raise OutputError(
            f"{path} is not a record of this version of subquad ({list_problems(error)}). Remove it and evaluate again."
        ) from error


def list_problems(error: ValidationError) -> str:
    """Return what pydantic found, the first problems with their places, as one phrase.

    Args:
        error: What it raised.

    Returns:
        Such as `0.length: Input should be a valid integer; 0.depth: Field required; 2 more`.
    """
    found = [f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors()]
    more = [f"{len(found) - _MOST_PROBLEMS} more"] if len(found) > _MOST_PROBLEMS else []
    return "; ".join([*found[:_MOST_PROBLEMS], *more])


def record_files(folder: Path) -> list[Path]:
    """Return the files of all records of an evaluation folder, by task and model."""
    return sorted((folder / RECORDS_FOLDER).glob("*/*.json"))


def load_records(folder: Path) -> list[EvalRecord]:
    """Read all records of an evaluation folder, by task and model.

    Args:
        folder: The evaluation folder.

    Returns:
        The records; none where nothing was evaluated.

    Raises:
        OutputError: One of them is damaged.
    """
    return [load_record(path) for path in record_files(folder)]
