"""docs/mixers.md: every listed system is a valid configuration, and its status and time are true."""

import re
from pathlib import Path

import pytest
import yaml

from subquad.layers import parse_mixer

TEXT = (Path(__file__).parents[2] / "docs" / "mixers.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| `(\{.+?\})` \| (.+?) \| (built|next) \|", TEXT, re.MULTILINE)


def test_the_table_has_all_rows():
    assert len(ROWS) == 23


@pytest.mark.parametrize("system, text, time, status", ROWS, ids=[row[0] for row in ROWS])
def test_row(system, text, time, status):
    mixer = parse_mixer(yaml.safe_load(text))
    assert (mixer.not_built() == []) == (status == "built"), mixer.not_built()
    assert mixer.linear == time.startswith("linear")
