"""An exported student, made once for each test file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from subquad.convert.export import export_student

from .tiny_checkpoints import logits, tiny_tokenizer
from .tiny_students import CARD, make_student


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    student = make_student()
    directory = export_student(student, tiny_tokenizer(), tmp_path_factory.mktemp("export") / "student", CARD)
    torch.save(logits(student), directory.parent / "expected.pt")
    return directory
