"""The recipes that come with the package: list, show, copy. Light: imports neither torch nor transformers."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from subquad.errors import ConfigError, OutputError

RecipeKind = Literal["run", "pretrain", "study"]
# folder of each kind, and the command that takes it
KINDS: dict[RecipeKind, tuple[str, str]] = {
    "run": ("packaged", "subquad run"),
    "pretrain": ("packaged/pretrain", "subquad pretrain"),
    "study": ("packaged/studies", "subquad study"),
}
_SUFFIX = ".yaml"


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that comes with the package.

    Attributes:
        name: what the command of its kind takes.
        summary: first comment line of the file.
        text: the file, comments included.
        kind: `run` (convert and distil), `pretrain` (one model from scratch) or `study` (many of those).
    """

    name: str
    summary: str
    text: str
    kind: RecipeKind = "run"


def packaged_recipes(kind: RecipeKind = "run") -> dict[str, PackagedRecipe]:
    """Return every packaged recipe of a kind by name, in alphabetical order."""
    recipes = {}
    folder = files("subquad.recipes").joinpath(KINDS[kind][0])
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(_SUFFIX):
            name, text = entry.name.removesuffix(_SUFFIX), entry.read_text(encoding="utf-8")
            recipes[name] = PackagedRecipe(name, text.partition("\n")[0].lstrip("# "), text, kind)
    return recipes


def packaged_recipe(name: str, kind: RecipeKind | None = None) -> PackagedRecipe:
    """Return one packaged recipe.

    Args:
        name: its name, without `.yaml`.
        kind: the kind it must be of; None takes any.

    Returns:
        The recipe.

    Raises:
        ConfigError: no recipe has this name (the nearest one is suggested), or it is of another kind.
    """
    by_kind = {each: packaged_recipes(each) for each in KINDS}
    for other, found in by_kind.items():
        if kind is not None and other != kind and name in found:
            raise ConfigError(f"{name!r} is a recipe of another command: {KINDS[other][1]} {name}")
    recipes = by_kind[kind] if kind is not None else {n: r for found in by_kind.values() for n, r in found.items()}
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(
            f"no recipe is called {name!r}{hint} Packaged recipes: {', '.join(recipes)}. "
            "For a file of your own give its path, ending in .yaml."
        )
    return recipes[name]


def copy_recipe(name: str, destination: Path) -> Path:
    """Write a packaged recipe to a file, to be edited.

    Args:
        name: the recipe's name.
        destination: the new file, or a folder that gets `<name>.yaml`.

    Returns:
        Path of the new file.

    Raises:
        ConfigError: no recipe has this name.
        OutputError: the file exists (it is left as it is) or cannot be written.
    """
    recipe = packaged_recipe(name)
    path = destination / f"{name}{_SUFFIX}" if destination.is_dir() else destination
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(recipe.text)
    except FileExistsError:
        raise OutputError(f"{path} exists and is left as it is; name another file, or remove it first.") from None
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}. Name a file in a folder that exists.") from error
    return path
