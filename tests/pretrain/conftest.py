"""A recipe that trains in a second."""

import pytest
import torch

from subquad.pretrain.schema import PretrainRecipe
from subquad.pretrain.study.schema import StudyRecipe
from subquad.recipes.schema import parse_section

from .tiny import base_content, write_texts


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> dict[str, str]:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def make_recipe(texts, tmp_path):
    def make(**changes) -> PretrainRecipe:
        content = {"name": "tiny", "output_dir": str(tmp_path / "run"), **base_content(texts), **changes}
        return parse_section(PretrainRecipe, content, origin="recipe")

    return make


@pytest.fixture
def recall_recipe(tmp_path):
    def make(**changes) -> PretrainRecipe:
        content = {
            "name": "recall",
            "output_dir": str(tmp_path / "run"),
            "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2},
            "data": {"seq_len": 20},
            "recall": {
                "num_pairs": 3,
                "num_queries": 2,
                "num_keys": 5,
                "num_values": 4,
                "num_fillers": 3,
                "eval_lengths": [16, 40],
                "eval_rows": 8,
            },
            "training": {"tokens": 400, "batch_size": 4},
            **changes,
        }
        return parse_section(PretrainRecipe, content, origin="recipe")

    return make


@pytest.fixture
def make_study(texts, tmp_path):
    def make(**changes) -> StudyRecipe:
        content = {
            "name": "little",
            "output_dir": str(tmp_path / "study"),
            "seeds": [0, 1],
            "reference": "softmax",
            "base": base_content(texts),
            "arms": {
                "softmax": {"mixer": "softmax"},
                "plain": {"mixer": {"score": "power", "order": 1, "normaliser": "rms"}, "label": "linear + norm"},
            },
            "expected": [["plain"], ["softmax"]],
            **changes,
        }
        return parse_section(StudyRecipe, content, origin="study")

    return make
