"""`StudyRecipe`: a base recipe, the arms that differ from it, and the order the papers lead one to expect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from subquad.errors import ConfigError
from subquad.pretrain.model import plan_model
from subquad.pretrain.schema import PretrainRecipe
from subquad.recipes.fields import RunSection, Section, Seed
from subquad.recipes.loader import load_content, merge_content
from subquad.recipes.run_folder import content_differences
from subquad.recipes.schema import parse_section

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ArmName = Annotated[str, Field(pattern=_NAME, max_length=60)]
# what the study gives every run itself
_OWN_KEYS = ("name", "seed", "output_dir", "mixer")


class ArmSection(Section):
    """One arm: a mixer, and what else differs from the base recipe.

    Attributes:
        mixer: a preset's name, or its parts, as in a pretraining recipe.
        label: what the table calls it; None is its name.
        group: arms of one group share a colour in the plot.
        paper_loss: the loss the papers report for it, nats per token, at their own size; None where they do not.
        changes: sections of the base recipe with other values (`{training: {learning_rate: 0.001}}`); not of text,
            tokenizer, recall and held-out rows, which arms that are compared share.
    """

    mixer: str | dict[str, Any]
    label: str | None = None
    group: str = ""
    paper_loss: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    changes: dict[str, Any] = Field(default_factory=dict)


class StudyRecipe(RunSection):
    """Many trainings from random weights that are compared with each other.

    Attributes:
        seeds: every arm is trained once with each.
        reference: the arm that the others are compared with.
        base: a pretraining recipe without `name`, `seed`, `output_dir` and `mixer`.
        arms: name to arm, in the order of the table.
        expected: groups of arms from the highest loss (lowest accuracy) to the lowest, as the papers have them; arms of
            one group are about equal there.
    """

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0, 1)
    reference: str
    base: dict[str, Any] = Field(default_factory=dict)
    arms: Annotated[dict[ArmName, ArmSection], Field(min_length=1)]
    expected: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()

    @model_validator(mode="after")
    def _check_names(self) -> StudyRecipe:
        problems = []
        if len(set(self.seeds)) != len(self.seeds):
            problems.append(f"seeds has repeats: {list(self.seeds)}")
        if self.reference not in self.arms:
            problems.append(f"reference {self.reference!r} is no arm; arms: {', '.join(self.arms)}")
        named = [arm for group in self.expected for arm in group]
        problems += [f"expected names {arm!r}, which is no arm" for arm in dict.fromkeys(named) if arm not in self.arms]
        problems += [f"expected names {arm!r} twice" for arm in dict.fromkeys(named) if named.count(arm) > 1]
        own = [key for key in _OWN_KEYS if key in self.base]
        if own:
            problems.append(f"base sets {', '.join(own)}; the study and its arms set these")
        for name, arm in self.arms.items():
            own = [key for key in _OWN_KEYS if key in arm.changes]
            if own:
                problems.append(f"arms.{name}.changes sets {', '.join(own)}; the study and its arms set these")
        labels = [self.label(arm) for arm in self.arms]
        problems += [
            f"the label {label!r} stands for several arms: {', '.join(a for a in self.arms if self.label(a) == label)}"
            for label in dict.fromkeys(labels)
            if labels.count(label) > 1
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def label(self, arm: str) -> str:
        """Return what the table calls an arm."""
        return self.arms[arm].label or arm


def load_study(source: str | Path, overrides: Sequence[str] = ()) -> StudyRecipe:
    """Load and validate a study.

    Args:
        source: name of a packaged one, or path of a `.yaml` file.
        overrides: `key=value` pairs with dotted keys, such as `base.training.tokens=50000` or `seeds=[0,1,2]`.

    Returns:
        The study; its arms are checked by `study_recipes`.

    Raises:
        ConfigError: an unknown name, a file that is missing or no YAML mapping, a malformed override, or a study that
            breaks rules.
    """
    content, origin = load_content(source, overrides, "study")
    return parse_section(StudyRecipe, content, origin=origin)


def arm_folder(study: StudyRecipe, arm: str, seed: int | None = None) -> Path:
    """Return the folder of an arm, or of its run with one seed."""
    folder = study.run_dir / "arms" / arm
    return folder if seed is None else folder / f"seed-{seed}"


def choose_arms(study: StudyRecipe, names: Sequence[str]) -> list[str]:
    """Return the arms to run, in the study's order.

    Args:
        study: the study.
        names: arms asked for; empty is all.

    Returns:
        Names of arms.

    Raises:
        ConfigError: a name is no arm.
    """
    unknown = [name for name in names if name not in study.arms]
    if unknown:
        raise ConfigError(f"{study.name} has no arm {', '.join(map(repr, unknown))}; arms: {', '.join(study.arms)}")
    return [arm for arm in study.arms if not names or arm in names]


def study_recipes(study: StudyRecipe, arms: Sequence[str]) -> dict[str, list[PretrainRecipe]]:
    """Return the recipes of arms, one per seed, all of them checked; builds and loads nothing.

    Args:
        study: the study.
        arms: names of arms.

    Returns:
        Arm to its recipes in the order of the seeds.

    Raises:
        ConfigError: every problem of every arm: values that break rules, parts that do not fit, other text, tokenizer,
            recall or held-out rows than the reference's.
    """
    recipes: dict[str, list[PretrainRecipe]] = {}
    reference = _reference_recipe(study, arms)
    problems: dict[str, list[str]] = {}
    for arm in arms:
        try:
            recipes[arm] = [_arm_recipe(study, arm, seed) for seed in study.seeds]
            plan_model(recipes[arm][0])
            for line in [] if reference is None else _unlike(recipes[arm][0], *reference):
                problems.setdefault(line, []).append(arm)
        except ConfigError as error:
            first, *rest = str(error).splitlines()
            for line in rest or [first]:
                problems.setdefault(line.strip(), []).append(arm)
    if problems:
        listed = "\n".join(f"  {_who(of, arms)}: {line}" for line, of in problems.items())
        broken = {arm for of in problems.values() for arm in of}
        fine = [arm for arm in arms if arm not in broken]
        hint = f"\nThe others can run alone: --arms {','.join(fine)}" if fine else ""
        raise ConfigError(f"study {study.name} cannot run, {len(broken)} of {len(arms)} arms:\n{listed}{hint}")
    return recipes


def _reference_recipe(study: StudyRecipe, arms: Sequence[str]) -> tuple[PretrainRecipe, str] | None:
    """Return the recipe that all arms must be comparable with: the reference's, or the first that is valid."""
    for arm in (study.reference, *arms):
        try:
            return _arm_recipe(study, arm, study.seeds[0]), arm
        except ConfigError:  # said where the arm itself is checked
            continue
    return None


def _unlike(recipe: PretrainRecipe, reference: PretrainRecipe, name: str) -> list[str]:
    """Return what keeps two arms from being compared: their shared tokenizer, and what they are measured on."""
    if (recipe.recall is None) != (reference.recall is None):
        kinds = [("text" if each.recall is None else "recall") for each in (recipe, reference)]
        return [f"recall: {kinds[0]} cannot be compared with the {kinds[1]} of {name}; make it a study of its own"]
    found = content_differences(_measured_on(reference), _measured_on(recipe), there=f"in {name}")
    return [f"{line}; arms that are compared share it, so set it in base" for line in found]


def _measured_on(recipe: PretrainRecipe) -> dict[str, Any]:
    if recipe.recall is not None:
        return {"recall": recipe.recall.model_dump(mode="json")}
    return {
        "tokenizer": recipe.tokenizer.model_dump(mode="json"),
        "data": recipe.data.model_dump(mode="json", include={"train", "eval"}),
        "eval": {"tokens": recipe.eval.tokens, "seq_len": recipe.eval_seq_len},
    }


def _who(broken: Sequence[str], arms: Sequence[str]) -> str:
    return "every arm" if len(broken) == len(arms) > 1 else ", ".join(broken)


def _arm_recipe(study: StudyRecipe, arm: str, seed: int) -> PretrainRecipe:
    section = study.arms[arm]
    content = merge_content(study.base, section.changes)
    content["name"] = f"{study.name}-{arm}"
    content["seed"] = seed
    content["output_dir"] = str(arm_folder(study, arm, seed))
    content["mixer"] = section.mixer
    return parse_section(PretrainRecipe, content, origin=f"arm {arm}")
