"""The recipes that come with the package: list, show, copy. Light: imports neither torch nor transformers."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from subquad.errors import ConfigError, OutputError

_SUFFIX = ".yaml"


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that comes with the package.

    Attributes:
        name: what `subquad run NAME` takes.
        summary: first comment line of the file.
        text: the file, comments included.
    """

    name: str
    summary: str
    text: str


def packaged_recipes() -> dict[str, PackagedRecipe]:
    """Return every packaged recipe by name, in alphabetical order."""
    recipes = {}
    for entry in sorted(files("subquad.recipes").joinpath("packaged").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(_SUFFIX):
            name, text = entry.name.removesuffix(_SUFFIX), entry.read_text(encoding="utf-8")
            recipes[name] = PackagedRecipe(name, text.partition("\n")[0].lstrip("# "), text)
    return recipes


def packaged_recipe(name: str) -> PackagedRecipe:
    """Return one packaged recipe.

    Args:
        name: its name, without `.yaml`.

    Returns:
        The recipe.

    Raises:
        ConfigError: no recipe has this name; the nearest one is suggested.
    """
    recipes = packaged_recipes()
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
