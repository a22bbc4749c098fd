"""Turn pydantic's list of errors into lines a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_LONGEST_VALUE = 80


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Describe every problem of a failed validation.

    Args:
        error: what pydantic raised.
        model: the class that was validated.

    Returns:
        One line per problem: full path, what is wrong, the value; for an unknown key the nearest known one.
    """
    return [_describe(item, model) for item in error.errors(include_url=False)]


def describe_unknown_key(key: str, known: Iterable[str]) -> str:
    """Say that a key is unknown, with the nearest known one or, where none is near, all of them.

    Args:
        key: the key found.
        known: the keys allowed in its place.

    Returns:
        Part of a sentence.
    """
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}")


def _describe(item: ErrorDetails, model: type[BaseModel]) -> str:
    parents, section = _locate(model, item["loc"])
    path = ".".join(parents)
    message = item["msg"].removeprefix("Value error, ")
    got = f" (got {_shorten(item['input'])})"
    match item["type"]:
        case "extra_forbidden" if section is not None:
            elsewhere = [place for place in _all_paths(model) if place.split(".")[-1] == parents[-1]]
            if elsewhere and not difflib.get_close_matches(parents[-1], section.model_fields, n=1):
                return f"{path}: unknown key here; it belongs at {' or '.join(elsewhere)}"
            return f"{path}: {describe_unknown_key(parents[-1], section.model_fields)}"
        case "missing":
            return f"{path}: is required"
        case "union_tag_invalid":
            return f"{path}.kind: must be one of {item['ctx']['expected_tags']} (got {item['ctx']['tag']!r})"
        case "model_type" | "model_attributes_type":
            field = section.model_fields.get(parents[-1]) if section is not None else None
            nothing = ", or null for none" if field is not None and type(None) in get_args(field.annotation) else ""
            return f"{path or 'recipe'}: must be a mapping of keys to values{nothing}{got}"
        case "value_error":
            return f"{path}: {message}" if path else message
        case _:
            return f"{path}: {message}{got}"


def _locate(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the path as it stands in the file, and the section that holds (or lacks) its last key."""
    path: list[str] = []
    candidates, section = [model], None
    for part in location:
        tagged = [candidate for candidate in candidates if part in _tags(candidate)]
        if len(candidates) > 1 and tagged:
            # pydantic puts the chosen alternative's tag into the path; the file has no such level
            candidates = tagged
            continue
        path.append(str(part))
        section = candidates[0] if candidates else None
        field = section.model_fields.get(str(part)) if section is not None else None
        candidates = list(_models_in(field.annotation)) if field is not None else []
    return path, section


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _models_in(argument)


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for inner in _models_in(field.annotation):
            yield from _all_paths(inner, f"{path}.")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
