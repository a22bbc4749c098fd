"""The typed result of one training from random weights: a row of a study's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from subquad.convert.atomic import atomic_file
from subquad.errors import OutputError
from subquad.eval.records import Finite, Metric
from subquad.eval.storage import RESULTS_FILE


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BucketLoss(_Frozen):
    """Held-out loss of the tokens at `start <= position < end` in their document, in nats per token.

    Attributes:
        start: First position.
        end: One past the last position; None for no bound.
        num_tokens: Predicted tokens.
        loss: Mean over them.
        standard_error: Over rows; None with fewer than two.
    """

    start: int
    end: int | None
    num_tokens: Annotated[int, Field(ge=1)]
    loss: Finite
    standard_error: Finite | None


class PretrainResults(_Frozen):
    """What one training gave, and what is needed to repeat it.

    Attributes:
        schema_version: Version of this layout.
        name: Name of the run.
        seed: Its seed.
        mixers: Mixer label to number of layers.
        parameters: Parameters of the model.
        mixer_parameters: Those of the mixers beside the q, k, v, o projections.
        cache_bytes: Bytes of the cache after as many tokens as the longest row, for one sequence in float32.
        kv_bytes: The same for a key/value cache.
        data: What was measured on, in words.
        loss: Held-out loss in nats per token; None for recall.
        by_position: Held-out loss by position in the document; empty for recall.
        recall: Row length to accuracy in [0, 1]; empty for text.
        chance: Accuracy of guessing a value; None for text.
        train_loss: Last logged training loss, nats per token.
        tokens: Training tokens.
        train_seconds: Time of training, interrupted runs included.
        device: In words.
        versions: Python and package versions.
        commit: Git commit of subquad, or None.
        command: Command that repeats the run.
        created: UTC time, ISO 8601.
    """

    schema_version: Literal[1] = 1
    name: str
    seed: int
    mixers: dict[str, int]
    parameters: int
    mixer_parameters: int
    cache_bytes: int
    kv_bytes: int
    data: str
    loss: Metric | None = None
    by_position: list[BucketLoss] = []
    recall: dict[int, Metric] = {}
    chance: Finite | None = None
    train_loss: Finite
    tokens: int
    train_seconds: Finite
    device: str
    versions: dict[str, str]
    commit: str | None
    command: str
    created: str


def save_pretrain_results(results: PretrainResults, run_dir: Path) -> Path:
    """Write `results.json` so that a reader sees the old file or the whole new one.

    Args:
        results: What was measured.
        run_dir: The run's folder.

    Returns:
        Path of the file.

    Raises:
        OutputError: It cannot be written.
    """
    path = run_dir / RESULTS_FILE
    atomic_file(path, (results.model_dump_json(indent=2) + "\n").encode())
    return path


def load_pretrain_results(run_dir: Path) -> PretrainResults:
    """Read and check `results.json` of a training from random weights.

    Args:
        run_dir: The run's folder.

    Returns:
        The results.

    Raises:
        OutputError: The file is missing, damaged, or not the layout this version reads.
    """
    path = run_dir / RESULTS_FILE
    try:
        return PretrainResults.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        problem = "; ".join(item["msg"] for item in error.errors()) if isinstance(error, ValidationError) else error
        raise OutputError(f"{path} cannot be read: {problem}. Remove it and run the same command again.") from error
