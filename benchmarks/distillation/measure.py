"""What is measured of teacher, control and student: held-out loss by position, and the needle by length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.distillation.contents import Prepared
from subquad.eval.contestants import Contestant
from subquad.eval.loss import LossResult, evaluate_loss
from subquad.eval.modes import EvalMode
from subquad.eval.niah.cells import group_cells
from subquad.eval.niah.measure import make_cells, measure
from subquad.eval.results import LossName, summarise_losses

# rows per forward pass, and prompts with their tokens; neither changes a figure beyond rounding
LOSS_ROWS = 16
PROMPTS, PROMPT_TOKENS = 32, 65_536
MODES: dict[LossName, EvalMode] = {
    "teacher": "teacher",
    "window_only": "window_only",
    "student_start": "student",
    "student": "student",
    "student_without_far": "student_without_far",
}


class Measurements:
    """Figures of the models of a run, all on the same rows and prompts.

    Attributes:
        needle_settings: How the needle is scored: the true answer in one forward, none is written.
        losses: Model to its losses.
        needle: Model to length to `key_logprob` and `key_rank1`, each with its error.
    """

    def __init__(self, prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start with none.

        Args:
            prepared: Rows and prompts.
            tokenizer: The teacher's tokenizer.
        """
        self.prepared, self.tokenizer = prepared, tokenizer
        self.needle_settings = prepared.needle.model_copy(
            update={"scores": ("teacher_forced",), "batch_size": PROMPTS, "max_tokens_per_batch": PROMPT_TOKENS}
        )
        self.losses: dict[LossName, LossResult] = {}
        self.needle: dict[LossName, dict[int, dict[str, Any]]] = {}

    def add(self, name: LossName, model: PreTrainedModel) -> None:
        """Measure the model in the attention mode that its name stands for."""
        mode = MODES[name]
        self.losses[name] = evaluate_loss(model, self.prepared.held_out, mode=mode, batch_size=LOSS_ROWS)
        contestant = Contestant(name, self.prepared.model, model, self.tokenizer, mode)
        outcomes, _ = measure(contestant, self.prepared.prompts, self.needle_settings, lambda _: None)
        groups = group_cells(make_cells(self.prepared.prompts, outcomes), "length")
        self.needle[name] = {
            int(group.at): group.model_dump(mode="json", include={"key_logprob", "key_rank1"}) for group in groups
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything that is there as plain values; with the student, paired differences, too."""
        found: dict[str, Any] = {
            "loss": {name: _loss(result) for name, result in self.losses.items()},
            "needle": {name: {str(at): scores for at, scores in by.items()} for name, by in self.needle.items()},
        }
        if "student" in self.losses:
            table, differences, _ = summarise_losses(self.losses)
            found["gap_closed"] = table.gap_closed
            found["differences"] = [difference.model_dump(mode="json") for difference in differences]
        return found

    def lines(self) -> list[str]:
        """Return a line for each model: its loss, and how many keys it finds at each length."""
        return [f"{name:20} loss {self.losses[name].loss:.4f}  {_hits(by)}" for name, by in self.needle.items()]


def _hits(by_length: Mapping[int, Mapping[str, Any]]) -> str:
    return "  ".join(
        f"{length}: {round(scores['key_rank1']['value'] * scores['key_rank1']['num'])}/{scores['key_rank1']['num']}"
        for length, scores in by_length.items()
    )


def _loss(result: LossResult) -> dict[str, Any]:
    return {
        "nats_per_token": result.loss,
        "standard_error": result.standard_error,
        "num_tokens": result.num_tokens,
        "by_position": [vars(bucket) for bucket in result.by_position],
    }
