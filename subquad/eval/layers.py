"""What each converted layer has become: its error, how long it remembers, how much it looks far back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from subquad.convert.watch import watching
from subquad.errors import OutputError
from subquad.eval.contestants import Clock, Contestant
from subquad.eval.loss import Row
from subquad.eval.records import EvalRecord, Finite, Metric, hash_prompts, list_problems, save_record
from subquad.layers import SubquadAttention, converted_layers
from subquad.layers.inputs import HeadInputs

TASK = "layers"


class _LayerSums:
    """Sums of one layer over all tokens."""

    def __init__(self, layer: SubquadAttention) -> None:
        self.layer = layer
        self.error = self.power = 0.0
        self.share: Tensor | None = None
        self.log_decay: Tensor | None = None
        self.tokens = 0

    @torch.no_grad()
    def add(self, inputs: HeadInputs) -> None:
        """Read one batch of the layer's inputs."""
        layer, mixer = self.layer, self.layer.mixer
        target = layer.project_out(layer.exact_heads(inputs)).float()
        out = layer.project_out(layer.student_heads(inputs)).float()
        self.error += (out - target).square().sum().item()
        self.power += target.square().sum().item()
        self.tokens += out.shape[0] * out.shape[1]
        if mixer is None:
            return
        mixed = inputs.select(layer.split, layer.split.mixed)
        share = mixer.far_share(mixer.parts(mixed))
        if share is not None:
            self.share = _added(self.share, share)
        if mixer.decay is not None:
            self.log_decay = _added(self.log_decay, mixer.decay(mixed.hidden_states))

    def to_dict(self) -> dict[str, Any]:
        half_lives = None
        if self.log_decay is not None:
            half_lives = [_half_life(total.item() / self.tokens) for total in self.log_decay]
        shares = None if self.share is None else [total.item() / self.tokens for total in self.share]
        return {
            "layer": self.layer.layer_idx,
            "relative_error": self.error / self.power,
            "half_lives": half_lives,
            "far_shares": shares,
            "exact_kv_heads": list(self.layer.split.exact),
        }


def _added(total: Tensor | None, new: Tensor) -> Tensor:
    """Add `[B, T, heads]`, summed over tokens, to a total."""
    summed = new.double().sum((0, 1))
    return summed if total is None else total + summed


def _half_life(log_decay: float) -> float | None:
    """Return the tokens after which half is left at a mean log decay; None where nothing is forgotten."""
    return math.log(0.5) / log_decay if log_decay < 0 else None


def run_layers(
    contestants: Sequence[Contestant],
    rows: Sequence[Row],
    folder: Path,
    *,
    command: str,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[EvalRecord]:
    """Measure every converted layer of the students, on the inputs they get when the student runs.

    Args:
        contestants: The models; those that run as a student (mode `student` or None, with converted layers) count.
        rows: Tokenised rows, as for `evaluate_loss`; a few thousand tokens are enough.
        folder: Evaluation folder; what it has of equal rows is not measured again.
        command: Command that repeats it.
        seed: Seed that picked the rows.
        progress: Called with (rows done, rows in all) of each contestant.

    Returns:
        One record each. `details["layers"]` has per layer `relative_error` (squared error of the layer's output against
        its own softmax attention on the same input, divided by the softmax output's mean square), `half_lives` in
        tokens per converted key/value head at the mean log decay (None: no decay), `far_shares` per converted query
        head (share of the attention mass in the far part; None where window and far part share none).

    Raises:
        OutputError: The folder cannot be written.
    """
    prompts = hash_prompts([int(token) for token in row["input_ids"]] for row in rows)
    settings = {"rows_hash": prompts, "tokens": sum(len(row["input_ids"]) for row in rows)}
    records = []
    for contestant in contestants:
        if contestant.mode not in ("student", None) or not converted_layers(contestant.model):
            continue
        record = contestant.finished_record(folder, TASK, settings)
        if record is None:
            clock = Clock.start()
            layers = _measure(contestant, rows, progress)
            errors = [layer["relative_error"] for layer in layers]
            mean = sum(errors) / len(errors)
            record = EvalRecord(
                task=TASK,
                model=contestant.name,
                metrics={"relative_error": Metric(value=mean, num=len(errors), higher_is_better=False)},
                settings=settings,
                details={"layers": layers},
                notes=["relative_error is a mean over layers; it has no standard error"],
                provenance=clock.provenance(contestant, seed=seed, batch_size=1, prompts_hash=prompts, command=command),
            )
            save_record(record, folder)
        records.append(record)
    return records


class LayerFacts(BaseModel):
    """What a record says of one converted layer, see `run_layers`.

    Attributes:
        layer: Number of the layer.
        relative_error: Squared error against its own softmax attention, as a share of that output's power.
        half_lives: Tokens, by converted key/value head; None without decay, and in it where nothing is forgotten.
        far_shares: Share of the attention in the far part, by converted query head; None where there is none.
        exact_kv_heads: Key/value heads that kept their softmax.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    layer: int
    relative_error: Finite
    half_lives: tuple[Finite | None, ...] | None
    far_shares: tuple[Finite, ...] | None
    exact_kv_heads: tuple[int, ...]


def layers_of(record: EvalRecord) -> list[LayerFacts]:
    """Read the layers of a record of `run_layers`.

    Args:
        record: The record.

    Returns:
        A converted layer each, in order.

    Raises:
        OutputError: It has none that can be read.
    """
    try:
        return TypeAdapter(list[LayerFacts]).validate_python(record.details.get("layers"))
    except ValidationError as error:
        raise OutputError(
            f"the record of {record.task} for {record.model} has no readable layers ({list_problems(error)})."
        ) from error


@torch.no_grad()
def _measure(
    contestant: Contestant, rows: Sequence[Row], progress: Callable[[int, int], None] | None
) -> list[dict[str, Any]]:
    model = contestant.model
    sums = {layer: _LayerSums(layer) for layer in converted_layers(model)}
    with contestant.active(), watching(sums):
        for index, row in enumerate(rows):
            names = ("input_ids", "position_ids")
            inputs = {name: torch.as_tensor(row[name], device=model.device)[None] for name in names if name in row}
            model.model(**inputs, use_cache=False)
            if progress is not None:
                progress(index + 1, len(rows))
    return [total.to_dict() for total in sums.values()]
