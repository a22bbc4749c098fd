"""The folder of a run: which recipe it belongs to, and which stages of it are finished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from subquad.convert.atomic import atomic_file
from subquad.errors import ConfigError, OutputError
from subquad.eval.records import RECORDS_FOLDER
from subquad.recipes.fields import Section
from subquad.recipes.loader import load_recipe, recipe_to_yaml

STAGES = (
    "plan",
    "convert",
    "calibrate",
    "baseline",
    "stage1",
    "stage2",
    "keys",
    "export",
    "evaluate",
    "suite",
    "report",
)
RECIPE_FILE = "recipe.yaml"
LOCK_FILE = ".lock"
# everything a run writes; `--fresh` removes these and nothing else, the recipe last: without it the rest is nobody's
_CONTENT = (
    "stages", "log.jsonl", "checkpoints", "tensorboard", "student", "model", "tokenizer",
    ".tokenizer.lock", "report.md", "report.html", "results.json", "plots", RECORDS_FOLDER, RECIPE_FILE,
)  # fmt: skip

# what a marker must hold
_MARKER: dict[str, type | tuple[type, ...]] = {"seconds": (int, float), "files": list, "result": dict}
_ABSENT = object()
_LONGEST_VALUE = 60


class RunFolder:
    """One run on disk.

    A finished stage leaves `stages/<stage>.json`, written after everything the stage made, so a run that is killed at
    any moment continues with the first stage that lacks one. A stage counts only if all before it do and the files it
    made are there.

    Attributes:
        path: the folder.
        stages: names of the stages, in order.
    """

    def __init__(
        self, path: Path, stages: Sequence[str] = STAGES, load: Callable[[Path], Section] = load_recipe
    ) -> None:
        """Refer to a folder; nothing is read or written.

        Args:
            path: the folder of the run.
            stages: names of the stages, in order.
            load: reads the recorded recipe back.
        """
        self.path = path
        self.stages = tuple(stages)
        self._load = load

    @property
    def student_dir(self) -> Path:
        """Folder of the exported checkpoint."""
        return self.path / "student"

    @property
    def log_file(self) -> Path:
        """Training log, one JSON object a line."""
        return self.path / "log.jsonl"

    @property
    def stages_dir(self) -> Path:
        """Folder of the markers and of what stages hand to later ones."""
        return self.path / "stages"

    @property
    def claimed(self) -> bool:
        """Whether the folder belongs to a recipe."""
        return (self.path / RECIPE_FILE).exists()

    def work_dir(self, stage: str) -> Path:
        """Return the folder of a training stage's checkpoints."""
        return self.path / "checkpoints" / stage

    def claim(self, recipe: Section, *, fresh: bool = False) -> None:
        """Make the folder this recipe's: a new one, or the one in which the same recipe was started before.

        Other tasks in `eval.suite` are taken over: they are measured when the run goes on, on what it has trained.

        Args:
            recipe: the recipe; where the run goes may differ from the recorded one, everything else may not.
            fresh: remove an earlier run's files first, whatever its recipe.

        Raises:
            OutputError: the folder holds another run or other files (they are left as they are), or cannot be written.
        """
        recipe_file = self.path / RECIPE_FILE
        if fresh:
            self.clear()
        self.refuse_other_files()
        if recipe_file.exists():
            recorded = self._recorded_recipe(recipe, recipe_file)
            if _tasks_of(recorded) != _tasks_of(recipe):
                for stage in self.stages[self.stages.index("suite") :]:
                    (self.stages_dir / f"{stage}.json").unlink(missing_ok=True)
                atomic_file(recipe_file, recipe_to_yaml(recipe).encode())
        else:
            atomic_file(recipe_file, recipe_to_yaml(recipe).encode())

    def clear(self) -> None:
        """Remove an earlier run's files, whatever its recipe, and nothing else; hold the folder's lock.

        Raises:
            OutputError: they cannot be removed.
        """
        try:
            if self.claimed:
                self._clear()
        except OSError as error:
            raise OutputError(f"{self.path} cannot be used as the folder of a run: {error}") from error

    def refuse_other_files(self) -> None:
        """Refuse a folder that is no run's and holds files.

        Raises:
            OutputError: it holds other files, is a file, or cannot be read.
        """
        try:
            occupied = self.path.exists() and not all(map(_is_claiming, self.path.iterdir()))
        except OSError as error:
            raise OutputError(f"{self.path} cannot be used as the folder of a run: {error}") from error
        if occupied and not self.claimed:
            raise OutputError(
                f"{self.path} holds files that are not a run's, and is left as it is. "
                "Name another folder: output_dir=FOLDER."
            )

    def finished(self, stage: str) -> bool:
        """Return whether a stage and all before it are finished."""
        return all(self._valid(earlier) for earlier in self.stages[: self.stages.index(stage) + 1])

    def result(self, stage: str) -> dict[str, Any]:
        """Return what a finished stage recorded.

        Args:
            stage: a finished stage.

        Returns:
            The mapping given to `finish`.

        Raises:
            OutputError: the stage is not finished.
        """
        marker = self._marker(stage)
        if marker is None:
            raise OutputError(f"{self.path} has not finished the stage {stage}; run the recipe again to continue it.")
        return marker["result"]

    def seconds(self) -> dict[str, float]:
        """Return the wall time of every finished stage, in the order they ran."""
        markers = {stage: self._marker(stage) for stage in self.stages}
        return {stage: marker["seconds"] for stage, marker in markers.items() if marker is not None}

    def finish(self, stage: str, result: Mapping[str, Any], seconds: float, files: tuple[Path, ...] = ()) -> None:
        """Record that a stage is finished.

        Args:
            stage: its name.
            result: plain values for later stages and the report.
            seconds: wall time it took.
            files: what it made, under the run's folder; without them it no longer counts as finished.

        Raises:
            OutputError: the marker cannot be written.
        """
        content = {
            "stage": stage,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "files": [str(path.relative_to(self.path)) for path in files],
            "result": dict(result),
        }
        atomic_file(self.stages_dir / f"{stage}.json", (json.dumps(content, indent=2) + "\n").encode())

    def _marker(self, stage: str) -> dict[str, Any] | None:
        path = self.stages_dir / f"{stage}.json"
        try:
            marker = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(marker, dict) or not all(isinstance(marker.get(key), of) for key, of in _MARKER.items()):
                raise ValueError(f"it must hold {', '.join(_MARKER)}")
            return marker
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise OutputError(f"{path} is damaged: {error}. Remove it to run the stage {stage} again.") from error

    def _valid(self, stage: str) -> bool:
        marker = self._marker(stage)
        return marker is not None and all((self.path / name).exists() for name in marker["files"])

    def _clear(self) -> None:
        for name in _CONTENT:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _recorded_recipe(self, recipe: Section, recipe_file: Path) -> Section:
        """Return the recipe of the earlier run, which must be the same one."""
        fix = "Name another folder (output_dir=FOLDER), or remove the earlier run with --fresh."
        try:
            recorded = self._load(recipe_file)
        except ConfigError as error:
            raise OutputError(
                f"{self.path} holds a run whose recipe this version cannot read: {error}\n{fix}"
            ) from error
        differences = recipe_differences(recorded, recipe)
        if differences:
            listed = "\n".join(f"  {line}" for line in differences)
            raise OutputError(f"{self.path} holds a run of another recipe:\n{listed}\n{fix}")
        return recorded


def _is_claiming(entry: Path) -> bool:
    """Return whether a process that is about to claim the folder has made this."""
    return entry.name == LOCK_FILE or (entry.name.startswith(f".{RECIPE_FILE}.") and entry.suffix == ".part")


def _tasks_of(recipe: Section) -> object:
    """Return the tasks measured at the end; None where a kind of recipe has none."""
    return getattr(getattr(recipe, "eval", None), "suite", None)


def recipe_differences(recorded: Section, wanted: Section) -> list[str]:
    """Return what differs between two recipes, one line per key.

    Where the run goes does not count, nor do the tasks measured at its end: `claim` sees to those.

    Args:
        recorded: the recipe of an earlier run.
        wanted: the recipe to run now.

    Returns:
        Lines `path: old value there, new value here`.
    """
    left_out: dict[str, Any] = {"output_dir": True, "eval": {"suite"}}
    old, new = (recipe.model_dump(mode="json", exclude=left_out) for recipe in (recorded, wanted))
    return content_differences(old, new)


def content_differences(old: Mapping[str, Any], new: Mapping[str, Any], there: str = "there") -> list[str]:
    """Return what differs between two recipes as plain mappings, one line per key.

    Args:
        old: the one compared with.
        new: the one at hand.
        there: what the line calls the place of `old`.

    Returns:
        Lines `path: old value there, new value here`.
    """
    return [f"{path}: {_show(before)} {there}, {_show(now)} here" for path, before, now in _differences(old, new, "")]


def _differences(old: object, new: object, path: str) -> Iterator[tuple[str, object, object]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new


def _show(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
