"""A tiny teacher with text of its own, and a recipe that takes seconds."""

from pathlib import Path

import pytest

from subquad.recipes.schema import Recipe, parse_recipe

from ..convert.tiny_checkpoints import write_hf

SEQ_LEN = 32


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("text")
    files = {}
    for part in ("train", "eval"):
        lines = (f"{part} line {number}: the heron stands in the shallow water.\n" for number in range(40))
        files[part] = folder / f"{part}.txt"
        files[part].write_text("".join(lines))
    return files


@pytest.fixture
def make_recipe(teacher_dir, text_files, tmp_path):
    def make(**changes) -> Recipe:
        sections = {
            "name": "tiny",
            "output_dir": str(tmp_path / "run"),
            "model": {"source": str(teacher_dir)},
            "convert": {"mixer": {"preset": "2mamba", "window": 8, "sinks": 2}},
            "calibrate": {"tokens": 2 * SEQ_LEN},
            "data": {
                "train": {"kind": "text", "paths": [str(text_files["train"])]},
                "eval": {"kind": "text", "paths": [str(text_files["eval"])]},
                "seq_len": SEQ_LEN,
            },
            "stage1": {"tokens": 4 * SEQ_LEN, "batch_size": 2},
            "stage2": {"tokens": 4 * SEQ_LEN, "batch_size": 2},
            "trainer": {"report_to": []},
            "eval": {"tokens": 8 * SEQ_LEN, "memory_lengths": [16, 64], "generate_tokens": 4},
        }
        return parse_recipe({**sections, **changes})

    return make
