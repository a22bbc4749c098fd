"""`Recipe`: everything one run depends on, validated as a whole before anything loads."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError, model_validator

from subquad.distill.recall import SHORTEST_ROW
from subquad.errors import ConfigError
from subquad.recipes.fields import RunSection, Section, Seed
from subquad.recipes.problems import describe_problems
from subquad.recipes.sections import (
    CalibrateSection,
    ConvertSection,
    EvalSection,
    ModelSection,
    Stage1Section,
    Stage2Section,
    TrainerSection,
)
from subquad.recipes.text_sections import DataSection

TRAINING_STAGES = ("stage1", "stage2")
SectionType = TypeVar("SectionType", bound=Section)


class Recipe(RunSection):
    """One run, from the teacher's checkpoint to the report.

    Attributes:
        seed: seed of the data order, of initialisation and of dropout.
        model: the teacher.
        convert: the mixers.
        calibrate: the closed-form start.
        data: training and held-out text.
        stage1: layer-local output matching.
        stage2: end-to-end distillation.
        trainer: how both stages run.
        eval: what is measured.
    """

    seed: Seed = 0
    model: ModelSection = ModelSection()
    convert: ConvertSection = ConvertSection()
    calibrate: CalibrateSection = CalibrateSection()
    data: DataSection = DataSection()
    stage1: Stage1Section = Stage1Section()
    stage2: Stage2Section = Stage2Section()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _check_amounts(self) -> Recipe:
        amounts = {
            "calibrate.tokens": (self.calibrate.tokens if self.calibrate.enabled else 0, self.data.seq_len),
            "stage1.tokens": (self.stage1.tokens, self.stage_seq_len("stage1")),
            "stage2.tokens": (self.stage2.tokens, self.stage_seq_len("stage2")),
            "eval.tokens": (self.eval.tokens, self.eval_seq_len),
        }
        choice = self.convert.exact_heads if self.convert.chooses_heads else None
        if choice is not None:
            amounts["convert.exact_heads.tokens"] = (choice.tokens, self.data.seq_len)
            amounts["convert.exact_heads.recall_tokens"] = (choice.recall_tokens, self.data.seq_len)
        problems = [
            f"{name} is {tokens}, less than one row of {seq_len} tokens; raise it or lower seq_len"
            for name, (tokens, seq_len) in amounts.items()
            if 0 < tokens < seq_len
        ]
        if choice is not None and choice.recall_tokens and self.data.seq_len < SHORTEST_ROW:
            problems.append(
                f"data.seq_len {self.data.seq_len} is too short for the recall rows of convert.exact_heads, which need "
                f"{SHORTEST_ROW} tokens; raise it, or set convert.exact_heads.recall_tokens=0"
            )
        trained = [stage for stage in TRAINING_STAGES if getattr(self, stage).tokens] if self.data.recall else []
        short = [stage for stage in trained if self.stage_seq_len(stage) < SHORTEST_ROW]
        problems += [
            f"{stage}.seq_len {self.stage_seq_len(stage)} is too short for data.recall, which needs rows of "
            f"{SHORTEST_ROW} tokens; raise it or remove data.recall"
            for stage in short
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def stage_seq_len(self, stage: str) -> int:
        """Return the tokens per row of `calibrate`, `stage1`, `stage2` or any other use of the training text."""
        section = getattr(self, stage) if stage in TRAINING_STAGES else None
        return (section and section.seq_len) or self.data.seq_len

    @property
    def eval_seq_len(self) -> int:
        """Tokens per held-out row."""
        return self.eval.seq_len or self.data.seq_len


def parse_recipe(content: dict[str, Any], *, origin: str = "recipe") -> Recipe:
    """Validate a recipe given as a plain mapping.

    Args:
        content: what the YAML file holds.
        origin: where it came from, for the message.

    Returns:
        The recipe, with every default filled in.

    Raises:
        ConfigError: every problem found, each with its path, the value and the rule.
    """
    return parse_section(Recipe, content, origin=origin)


def parse_section(model: type[SectionType], content: dict[str, Any], *, origin: str) -> SectionType:
    """Validate a plain mapping as a recipe of any kind.

    Args:
        model: class of the recipe.
        content: what the YAML file holds.
        origin: where it came from, for the message.

    Returns:
        The recipe, with every default filled in.

    Raises:
        ConfigError: every problem found, each with its path, the value and the rule.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = describe_problems(error, model)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"{origin} is not valid ({count}):\n" + "\n".join(f"  {line}" for line in problems)
        ) from error
