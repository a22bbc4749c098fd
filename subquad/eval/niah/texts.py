"""The words of the prompts: introduction, filler, needles, questions, and the lists keys and names are drawn from."""

from __future__ import annotations

from collections.abc import Sequence

# Introduction, filler and pass-key sentences: Mohtashami & Jaggi 2023 (Landmark Attention), also in the data set on
# which the 2Mamba paper measures.
INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER_SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
VALUE = "{value}"
_NOUNS = {"digits": "pass key", "words": "secret word"}

_NAMES = """
Alice Boris Clara David Emma Felix Grace Henry Irene Jonas Karen Louis Maria Nina Oscar Paula Quentin Rosa Simon Tara
Ulrich Vera Walter Xenia Yusuf Zoe
"""
_WORDS = """
anchor apple arrow balloon banana basket bottle bridge button camera candle carpet castle cherry circus coffee copper
cotton cricket curtain diamond dolphin dragon eagle engine feather forest fossil garden garlic guitar hammer harbor
helmet honey island jacket jungle kettle ladder lantern lemon lizard magnet marble meadow mirror monkey mountain
mushroom napkin needle onion orange oyster paper parrot pebble pencil pepper piano pillow planet pocket potato puzzle
rabbit ribbon river rocket saddle salmon sandal shadow silver spider spoon squirrel sugar table temple thunder ticket
tiger tomato tunnel turtle umbrella velvet violin walnut whistle window zebra
"""
NAMES = tuple(_NAMES.split())
WORDS = tuple(_WORDS.split())


def needle_template(kind: str, name: str | None, num_values: int, twice: bool) -> str:
    """Return the sentence that states a value, with `{value}` in its place.

    Args:
        kind: `digits` or `words`.
        name: Whose value it is; None where there is only one owner.
        num_values: Values the owner has.
        twice: State it twice, the paper's form.

    Returns:
        The sentences, with a leading space.
    """
    noun = _NOUNS[kind]
    article = "The" if num_values == 1 else "One"
    text = f" {article} {noun}{_of(name)} is {VALUE}. Remember it."
    return f"{text} {VALUE} is the {noun}." if twice else text


def question_text(kind: str, name: str | None, num_values: int) -> str:
    """Return the question and the beginning of its answer; arguments as in `needle_template`."""
    noun, of = _NOUNS[kind], _of(name)
    # The paragraph keeps the question apart from the haystack's last sentence, which may be cut off.
    if num_values == 1:
        return f" \n\nWhat is the {noun}{of}? The {noun}{of} is"
    return f" \n\nWhat are all the {noun}s{of}? The {noun}s{of} are"


def answer_parts(values: Sequence[str]) -> list[tuple[str, str]]:
    """Return the answer as (what stands before a value, the value): `a`, `a and b`, `a, b and c`, spaces included."""
    parts = []
    for index, value in enumerate(values):
        joint = " and" if index == len(values) - 1 else ","
        parts.append((joint if index else "", f" {value}"))
    return parts


def _of(name: str | None) -> str:
    return "" if name is None else f" of {name}"
