"""From the names that were asked for to lm-eval's tasks, each with its data from local files or the hub."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from subquad.convert.atomic import atomic_directory
from subquad.errors import ConfigError
from subquad.eval.data_files import LocalData, MissingFilesError
from subquad.eval.glue import LM_EVAL_TASKS
from subquad.eval.harness.library import quiet_lm_eval, require_lm_eval
from subquad.eval.harness.local import (
    LOCAL_TASKS,
    load_local,
    load_text,
    local_override,
    split_override,
    text_task_name,
)

# Where lm-eval's own definitions of these lie: its index of everything takes 20 s to build.
_FOLDERS = {
    **dict.fromkeys((*LM_EVAL_TASKS, "glue"), "glue"),
    "piqa": "piqa",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "sciq": "sciq",
    "lambada_openai": "lambada",
    "lambada_standard": "lambada",
    "wikitext": "wikitext",
}
_PERPLEXITIES = (
    ("word_perplexity", "weighted_perplexity"),
    ("byte_perplexity", "weighted_perplexity"),
    ("bits_per_byte", "bits_per_byte"),
)


@dataclass(frozen=True)
class Loaded:
    """What one name stands for.

    Attributes:
        name: The name, as asked for.
        tasks: lm-eval's tasks by their names; empty where the data is missing.
        groups: lm-eval's groups with a score of their own, by name.
        data: Where the data is from: local files with their hashes, or where lm-eval's task says.
        notes: What a reader of the score must know about the data.
        problem: Why the name cannot be evaluated.
    """

    name: str
    tasks: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problem: str | None = None


def expand(names: Sequence[str]) -> list[str]:
    """Return the names without doubles, `glue` as its tasks in GLUE's order."""
    flat = [task for name in names for task in (LM_EVAL_TASKS if name == "glue" else (name,))]
    return list(dict.fromkeys(flat))


def check_tasks(names: Sequence[str], include_path: Path | None) -> None:
    """Check that lm-eval knows tasks, without loading them.

    Args:
        names: Tasks, tags or groups of lm-eval; without any, lm-eval need not be installed.
        include_path: Folder with further task definitions in lm-eval's YAML.

    Raises:
        ConfigError: A name lm-eval does not know, or lm-eval is missing.
    """
    if names:
        _known_manager(expand(names), include_path)


def load_tasks(
    names: Sequence[str],
    text_files: Sequence[Path],
    data_dirs: Sequence[Path],
    include_path: Path | None,
    *,
    train: bool,
) -> tuple[Any, list[Loaded]]:
    """Load lm-eval's tasks with their data.

    Args:
        names: Tasks, tags or groups of lm-eval.
        text_files: Texts whose perplexity is measured, each a task of its own.
        data_dirs: Folders with local files; where given, the tasks in `LOCAL_TASKS` are read from nowhere else.
        include_path: Folder with further task definitions in lm-eval's YAML.
        train: Whether prompts hold examples, which are drawn from the training split.

    Returns:
        lm-eval's task manager, and what each name stands for; a name without data has its `problem`.

    Raises:
        ConfigError: A name lm-eval does not know, or two text files of one name.
        DataError: A local file is damaged or holds a value that is not allowed.
    """
    names = expand(names)
    manager = _known_manager(names, include_path)
    names = list(dict.fromkeys(member for name in names for member in _members(manager.task_index[name])))
    text_names = [text_task_name(path) for path in text_files]
    double = {name for name in text_names if text_names.count(name) > 1}
    if double:
        raise ConfigError(f"two text files would be the task {', '.join(sorted(double))}; rename one of them")
    with quiet_lm_eval():
        found = [_load(manager, name, data_dirs, train=train) for name in names]
        found += [_load_text(manager, path) for path in text_files]
    return manager, found


def _known_manager(names: Sequence[str], include_path: Path | None) -> Any:
    """Return a task manager that knows the names."""
    manager = _manager(names, include_path)
    unknown = [name for name in names if name not in manager.task_index]
    if unknown:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ConfigError(f"lm-eval has no task or group {', '.join(unknown)}{hint} (`lm-eval ls tasks` lists all)")
    return manager


def _manager(names: Sequence[str], include_path: Path | None) -> Any:
    """Return a task manager that knows the names, with a small index where that is enough."""
    folders = sorted({_FOLDERS[name] for name in names if name in _FOLDERS})
    small = _cached_manager(tuple(folders), include_path)
    entries = [small.task_index.get(name) for name in names]
    # A group may name any task.
    enough = all(entry is not None and entry.kind.name != "GROUP" for entry in entries)
    return small if enough else _cached_manager(None, include_path)


@cache
def _cached_manager(folders: tuple[str, ...] | None, include_path: Path | None) -> Any:
    """Return lm-eval's index of the given folders of its own tasks, or of all (None), and of the user's."""
    require_lm_eval()
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    own = [] if folders is None else [root / folder for folder in folders]
    everything = folders is None or not all(folder.is_dir() for folder in own)
    paths = ([] if everything else own) + ([] if include_path is None else [include_path])
    with quiet_lm_eval():
        return lm_eval.tasks.TaskManager(include_path=paths or None, include_defaults=everything)


def _members(entry: Any) -> list[str]:
    """Return the tasks of a tag, so that each may have local data; a task or a group stands for itself."""
    return sorted(entry.tags) if entry.kind.name == "TAG" else [entry.name]


def _load(manager: Any, name: str, data_dirs: Sequence[Path], *, train: bool) -> Loaded:
    if data_dirs and name in LOCAL_TASKS:
        try:
            local = load_local(name, data_dirs, train=train)
        except MissingFilesError as error:
            return Loaded(name, problem=str(error))
        # A task given by itself would not be merged with the registered one; the member of a group is.
        spec = {"group": "local", "task": [{"task": name, **local_override(local)}]}
        return _local(name, manager.load([spec])["tasks"], local)
    try:
        found = manager.load([name])
    # The data sets' client raises these for a hub it cannot reach or data it does not find.
    except (OSError, ValueError) as error:
        return Loaded(name, problem=f"it cannot be loaded: {' '.join(str(error).split())}. {_FIX}")
    groups = {key: group for key, group in found.get("groups", {}).items() if group.has_aggregation}
    notes = ("Its data is not from the data folders: no local layout of it is known here.",) if data_dirs else ()
    return Loaded(name, found["tasks"], groups, {"source": "as lm-eval's task says"}, notes)


_FIX = f"Where there is no hub, data_dirs names folders with local files of {', '.join(LOCAL_TASKS)}."


def _load_text(manager: Any, path: Path) -> Loaded:
    local, name = load_text(path), text_task_name(path)
    metrics = [
        {"metric": metric, "aggregation": aggregation, "higher_is_better": False}
        for metric, aggregation in _PERPLEXITIES
    ]
    # lm-eval's own definition of a perplexity over documents, without WikiText's detokeniser.
    spec = {
        "task": name,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": metrics,
        "metadata": {"version": 1.0},
        **local_override(local),
    }
    return _local(name, manager.load([spec])["tasks"], local)


def _local(name: str, tasks: Mapping[str, Any], local: LocalData) -> Loaded:
    files = {split: dict(hashes) for split, hashes in local.files.items()}
    return Loaded(name, tasks, {}, {"source": "local files", "files": files}, local.notes)


def export_tasks(names: Sequence[str], data_dirs: Sequence[Path], folder: Path, *, train: bool = False) -> list[Path]:
    """Write tasks on local files for lm-eval's own command line: `lm_eval run --include_path FOLDER --tasks sst2 …`.

    Each task keeps its name, prompts and metrics; only its data is read from `FOLDER/TASK/SPLIT.jsonl`. The definitions
    name absolute paths, so they hold on this machine only.

    Args:
        names: Names in `LOCAL_TASKS`, or `glue`.
        data_dirs: Folders with local files.
        folder: Where to write; what stood there is replaced.
        train: Whether to write the training split, too, for few-shot prompts.

    Returns:
        The definitions.

    Raises:
        ConfigError: A name whose local layout is not known, or lm-eval is missing.
        DataError: Files are missing or damaged.
        OutputError: The folder cannot be written.
    """
    names = expand(names)
    unknown = [name for name in names if name not in LOCAL_TASKS]
    if unknown:
        known = ", ".join(LOCAL_TASKS)
        raise ConfigError(f"no local layout is known for {', '.join(unknown)}; there is one for {known}")
    manager = _manager(names, None)
    loaded = {name: load_local(name, data_dirs, train=train) for name in names}
    with atomic_directory(folder) as temporary:
        for name, local in loaded.items():
            files = {}
            for split, rows in local.dataset.items():
                rows.to_json(temporary / name / f"{split}.jsonl", force_ascii=False)
                files[str(split)] = str(folder.resolve() / name / f"{split}.jsonl")
            definition = {
                "include": str(manager.task_index[name].yaml_path),
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": files},
                **split_override(local),
            }
            (temporary / f"{name}.yaml").write_text(yaml.safe_dump(definition, sort_keys=False), encoding="utf-8")
    return [folder / f"{name}.yaml" for name in names]
