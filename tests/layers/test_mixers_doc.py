"""docs/mixers.md and `subquad mixers` say what the code is: table, sources, parts, time, numbers in the cache."""

import re
from pathlib import Path

import pytest
import yaml

from subquad.layers import PRESETS, parse_mixer
from subquad.layers.listing import count_cached, list_mixers, markdown_table, systems_table
from subquad.layers.presets import SOURCES

TEXT = (Path(__file__).parents[2] / "docs" / "mixers.md").read_text()
ROWS = re.findall(r"^\| `(\S+)` \| (.+?) \| `(\{.+?\})` \| (linear|quadratic)", TEXT, re.MULTILINE)


def test_the_table_is_the_one_of_the_code():
    assert markdown_table() in TEXT, "paste the output of: subquad mixers --markdown"
    assert all(f"[{key}] {source}" in TEXT for key, source in SOURCES.items())


def test_every_preset_has_a_row():
    assert [name for name, *_ in ROWS] == list(PRESETS)


@pytest.mark.parametrize("name, title, parts, time", ROWS, ids=[row[0] for row in ROWS])
def test_the_parts_spell_out_the_preset(name, title, parts, time):
    assert parse_mixer(yaml.safe_load(parts)) == PRESETS[name]


def test_forms_follow_from_the_score():
    forms = {row.name: row.forms[-1] for row in list_mixers()}
    assert {name for name, last in forms.items() if last == "KV cache"} == {
        *(name for name in PRESETS if name.startswith(("softmax", "fox"))),
        "2mamba-e",
    }


def test_numbers_of_the_papers():
    # [C]: d (d + 1)^2 / 2 + 3 d numbers, smaller than a KV cache from 1,058 and 4,162 tokens on (rounded down there).
    numbers = {head_dim: count_cached(PRESETS["2mamba-pure"], head_dim) for head_dim in (64, 128)}
    assert [numbers[d].fixed for d in (64, 128)] == [d * (d + 1) ** 2 // 2 + 3 * d for d in (64, 128)]
    assert [numbers[d].crossover for d in (64, 128)] == [1058, 4162]
    assert count_cached(PRESETS["fox"], 64).crossover is None
    # A narrow learned q and k: 1 + d' + d' (d' + 1) / 2 rows.
    assert count_cached(PRESETS["based"], 64).fixed == (1 + 16 + 136) * 65


def test_the_systems_document_is_the_code_and_its_links_lead_somewhere():
    document = Path(__file__).parents[2] / "docs" / "systems.md"
    text = document.read_text()
    assert systems_table() in text
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(targets) > len(PRESETS)
    assert [target for target in targets if not (document.parent / target).exists()] == []
