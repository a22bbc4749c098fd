"""Read a recipe from YAML, apply `key=value` overrides, and write the resolved one back."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from subquad.errors import ConfigError
from subquad.recipes.fields import Section
from subquad.recipes.library import RecipeKind, packaged_recipe
from subquad.recipes.schema import Recipe, parse_recipe

_SUFFIXES = (".yaml", ".yml")


class _StrictLoader(yaml.SafeLoader):
    """YAML without the silent rule that the last of two equal keys wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key_node, deep=True) for key_node, _ in node.value]
        for index, key in enumerate(keys):
            # a list: keys that are no text or number, which the base class refuses, need not be hashable
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", mark)
        return super().construct_mapping(node, deep)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load and validate a recipe.

    Args:
        source: name of a packaged recipe, or path of a `.yaml` file.
        overrides: `key=value` pairs with dotted keys and YAML values, such as `stage1.tokens=50000` or
            `convert.mixer={preset: taylor, order: 1}`; applied in order.

    Returns:
        The recipe, with every default filled in.

    Raises:
        ConfigError: an unknown name, a file that is missing or no YAML mapping, a malformed override, or a recipe that
            breaks rules (all of them in the one message).
    """
    content, origin = load_content(source, overrides)
    return parse_recipe(content, origin=origin)


def load_content(
    source: str | Path, overrides: Sequence[str] = (), kind: RecipeKind = "run"
) -> tuple[dict[str, Any], str]:
    """Load a recipe of any kind as a plain mapping, not validated.

    Args:
        source: name of a packaged recipe, or path of a `.yaml` file.
        overrides: `key=value` pairs, as for `load_recipe`.
        kind: which packaged recipes a name stands for.

    Returns:
        The mapping, and where it came from, for messages.

    Raises:
        ConfigError: an unknown name, a file that is missing or no YAML mapping, or a malformed override.
    """
    text, origin = _read(source, kind)
    return apply_overrides(parse_yaml(text, origin), overrides), origin


def recipe_kind(source: str | Path) -> RecipeKind:
    """Return which command a recipe is for.

    Args:
        source: name of a packaged recipe, or path of a `.yaml` file.

    Returns:
        The packaged recipe's kind; for a file, `study` where it has arms, `pretrain` where it names a mixer beside its
        sections, and `run` otherwise.

    Raises:
        ConfigError: an unknown name, or a file that is missing or no YAML mapping.
    """
    path = Path(source)
    if path.suffix not in _SUFFIXES and not path.is_file():
        return packaged_recipe(str(source)).kind
    content, _ = load_content(source)
    if "arms" in content:
        return "study"
    return "pretrain" if content.keys() & {"mixer", "training", "recall"} else "run"


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """Parse the text of a recipe.

    Args:
        text: YAML.
        origin: where it came from, for the message.

    Returns:
        The mapping.

    Raises:
        ConfigError: not YAML, a key that stands twice, or something else than a mapping.
    """
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        kind = "empty" if content is None else f"a {type(content).__name__}"
        raise ConfigError(f"{origin} is {kind}; a recipe is a mapping of sections. See `subquad recipes show demo`.")
    return content


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set values by their dotted path.

    Sections on the way are made where they are missing. A mixer given by name gets its other parts beside the name:
    `convert.mixer.window=0` turns `2mamba` into `{preset: 2mamba, window: 0}`.

    Args:
        content: a recipe as a plain mapping; it is not changed.
        overrides: `key=value` pairs, applied in order.

    Returns:
        The new mapping.

    Raises:
        ConfigError: pairs without `=` or key, values that are no YAML, or paths through a value; all in one message.
    """
    content = copy.deepcopy(content)
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            problems.append(f"{override!r} is no override; write key=value, such as stage1.tokens=50000")
            continue
        try:
            _set(content, path, yaml.load(text, Loader=_StrictLoader))
        except yaml.YAMLError as error:
            problems.append(f"{override!r}: the value is not valid YAML: {_one_line(error)}")
        except ConfigError as error:
            problems.append(f"{override!r}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return content


def merge_content(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe as a plain mapping with some of its values changed.

    Args:
        base: a recipe as a plain mapping; it is not changed.
        changes: sections with the values that differ; anything but a mapping takes the place of what was there.

    Returns:
        The new mapping.
    """
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[key] = merge_content(inner, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def recipe_to_yaml(recipe: Section) -> str:
    """Return a recipe as YAML with every default and every part of every mixer spelled out.

    Args:
        recipe: a recipe of any kind.

    Returns:
        YAML that its loader reads back to an equal recipe.
    """
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _read(source: str | Path, kind: RecipeKind) -> tuple[str, str]:
    """Return the text and a name for messages."""
    path = Path(source)
    if path.suffix not in _SUFFIXES and not path.is_file():
        name = str(source)
        return packaged_recipe(name, kind).text, f"recipe {name}"
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; `subquad recipes copy demo {path}` makes one.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from error


def _set(content: dict[str, Any], path: list[str], value: object) -> None:
    section = content
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.get(part)
        if inner is None:
            inner = {}
        elif isinstance(inner, str) and _is_mixer(path[:depth]):
            inner = {"preset": inner}
        elif not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path[:depth])} is {inner!r}, not a section")
        section[part] = inner
        section = inner
    section[path[-1]] = value


def _is_mixer(path: list[str]) -> bool:
    return path[-1] == "mixer" or path[-2:-1] == ["layers"]


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
    return f"{getattr(error, 'problem', None) or error}{where}"
