"""A grid of conversion recipes on one model: every arm with every seed, one JSON row each, a table and a plot.

    python -m benchmarks.quality.study benchmarks/quality/studies/frontier.yaml --output runs/frontier
    python -m benchmarks.quality.study ... --arms far,heads-10         # some arms; finished ones are kept
    python -m benchmarks.quality.study ... --set stage2.tokens=60000   # another value in every arm

An arm is a recipe of `subquad run`: the base with some values changed. It runs in a folder of its own and goes on where
it was stopped; started several times at once, the processes share the work. Teacher and window-only control are
measured with the first arm that needs them, and their records are handed on to arms on which they would be the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from benchmarks.quality.plots import plot_frontier
from benchmarks.quality.rows import Row, read_row
from benchmarks.quality.table import render_table
from subquad.convert.atomic import atomic_file
from subquad.errors import FolderInUseError, SubquadError
from subquad.eval.records import record_files
from subquad.recipes.fields import Section, Seed
from subquad.recipes.loader import apply_overrides, merge_content, parse_yaml
from subquad.recipes.run_folder import RunFolder
from subquad.recipes.runner import run_recipe
from subquad.recipes.schema import Recipe, parse_recipe, parse_section

# Models whose weights do not depend on the arm's training.
_REFERENCES = ("teacher.json", "window_only.json")
_SAMPLES = "samples"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_OWN_KEYS = ("name", "seed", "output_dir")


class Arm(Section):
    """What one arm changes.

    Attributes:
        label: what tables call it; None is its name.
        group: arms of one group share a colour.
        changes: sections of the base recipe with other values.
    """

    label: str | None = None
    group: str = ""
    changes: dict[str, Any] = Field(default_factory=dict)


class Study(Section):
    """A grid of recipes.

    Attributes:
        name: letters, digits, dot, dash and underscore.
        seeds: every arm runs with each.
        base: a recipe of `subquad run` without name, seed and folder.
        arms: name to arm, in the order of the table.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0,)
    base: dict[str, Any] = Field(default_factory=dict)
    arms: Annotated[dict[Annotated[str, Field(pattern=_NAME)], Arm], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Study:
        own = [key for key in _OWN_KEYS if key in self.base]
        if own:
            raise ValueError(f"base sets {', '.join(own)}; the study sets these")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds has repeats: {list(self.seeds)}")
        return self

    def recipe(self, arm: str, seed: int, folder: Path) -> Recipe:
        """Return the recipe of an arm with one seed, checked."""
        content = merge_content(self.base, self.arms[arm].changes)
        content |= {"name": f"{self.name}-{arm}", "seed": seed, "output_dir": str(run_dir(folder, arm, seed))}
        return parse_recipe(content, origin=f"arm {arm}")


def run_dir(folder: Path, arm: str, seed: int) -> Path:
    """Return the folder of an arm's run with one seed."""
    return folder / arm / f"seed-{seed}"


def load_study(path: Path, overrides: Sequence[str]) -> Study:
    """Read a study, with other values in its base.

    Args:
        path: a YAML file.
        overrides: `key=value` pairs of the base recipe.

    Returns:
        The study.

    Raises:
        ConfigError: not a study, or a malformed override.
    """
    content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    content["base"] = apply_overrides(content.get("base") or {}, overrides)
    return parse_section(Study, content, origin=str(path))


def run_study(study: Study, folder: Path, arms: Sequence[str]) -> None:
    """Run what is not finished, and rewrite rows, table and plot after every run.

    Args:
        study: the study.
        folder: its folder.
        arms: arms to run.

    Raises:
        SubquadError: an arm cannot run; finished ones are kept.
    """
    # every arm is checked before anything runs
    recipes = {(arm, seed): study.recipe(arm, seed, folder) for seed in study.seeds for arm in arms}
    atomic_file(folder / "study.yaml", yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False).encode())
    for (arm, seed), recipe in recipes.items():
        print(f"== {study.arms[arm].label or arm}, seed {seed}", flush=True)
        try:
            # the tasks come last: what other arms know of teacher and control by then is handed over
            run = RunFolder(recipe.run_dir)
            if not run.finished("evaluate"):
                run_recipe(recipe, last_stage="evaluate")
            if recipe.eval.suite is not None and not run.finished("suite"):
                share_references(folder, recipe.run_dir)
            # of a finished arm this checks the recipe: other values are refused, other tasks of `eval.suite` measured
            run_recipe(recipe)
        except FolderInUseError:
            print("another process works on it", flush=True)
            continue
        write_results(study, folder)


def share_references(folder: Path, target: Path) -> None:
    """Copy records of teacher and control from other arms; whether they hold is decided by settings and weights."""
    for source in sorted(folder.glob("*/seed-*")):
        if source == target or not (source / "evals").is_dir():
            continue
        for record in record_files(source):
            copy = target / record.relative_to(source)
            samples = record.parent / _SAMPLES / f"{record.stem}.jsonl"
            if record.name not in _REFERENCES or copy.exists():
                continue
            if samples.is_file():
                atomic_file(copy.parent / _SAMPLES / samples.name, samples.read_bytes())
            atomic_file(copy, record.read_bytes())


def finished_rows(study: Study, folder: Path) -> Iterator[Row]:
    """Return the row of every finished run, in the order of the arms."""
    for arm, section in study.arms.items():
        for seed in study.seeds:
            path = run_dir(folder, arm, seed)
            if RunFolder(path).finished("report"):
                yield read_row(path, arm=arm, label=section.label or arm, group=section.group, changes=section.changes)


def write_results(study: Study, folder: Path) -> None:
    """Write `rows.jsonl`, `table.md` and the plots from the finished runs."""
    rows = list(finished_rows(study, folder))
    if not rows:
        return
    atomic_file(folder / "rows.jsonl", "".join(json.dumps(row.to_dict()) + "\n" for row in rows).encode())
    atomic_file(folder / "table.md", render_table(study.name, rows).encode())
    plot_frontier(rows, folder)


def main() -> None:
    """Read the command line and run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="a YAML file")
    parser.add_argument("--output", type=Path, help="the study's folder; runs/NAME without it")
    parser.add_argument("--arms", help="comma-separated names; all without it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value in every arm")
    options = parser.parse_args()
    try:
        study = load_study(options.study, options.set)
        arms = list(study.arms) if options.arms is None else options.arms.split(",")
        unknown = [arm for arm in arms if arm not in study.arms]
        if unknown:
            parser.error(f"no arm {', '.join(unknown)}; arms: {', '.join(study.arms)}")
        run_study(study, options.output or Path("runs") / study.name, arms)
    except (SubquadError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
