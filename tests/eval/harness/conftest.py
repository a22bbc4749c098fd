"""A tiny teacher with its students, and lm-eval without what takes long."""

from __future__ import annotations

import pytest

from .lm_eval_models import byte_teacher, byte_tokenizer, contestants, converted, write_sst2


@pytest.fixture(scope="module", autouse=True)
def no_environment_listing():
    """lm-eval lists the machine's packages with each task, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
        yield


@pytest.fixture(scope="module")
def tiny():
    return converted(byte_teacher())


@pytest.fixture(scope="module")
def models(tiny):
    return contestants(tiny, byte_tokenizer())


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return write_sst2(tmp_path_factory.mktemp("glue"), train=True)


@pytest.fixture
def small_index(monkeypatch):
    """lm-eval's index of everything takes 20 s to build: GLUE's part of it will do."""
    from subquad.eval.harness import tasks

    full = tasks._cached_manager
    monkeypatch.setattr(tasks, "_cached_manager", lambda folders, include: full(folders or ("glue",), include))
