"""Which backend `auto` is, by the environment variable."""

import pytest
import torch

from subquad.errors import ConfigError
from subquad.kernels import poly_attention
from subquad.kernels.backend import BACKEND_VARIABLE, choose_backend


def chosen(backend: str = "auto"):
    x = torch.ones(1, 3, 2, 4)
    return choose_backend(backend, x, x, x, (2,))


@pytest.mark.parametrize("value", ["", "auto"])
def test_auto_on_a_cpu_is_torch(monkeypatch, value):
    monkeypatch.setenv(BACKEND_VARIABLE, value)
    assert chosen() == ("torch", "the tensors are on cpu")


def test_the_variable_names_the_backend_of_auto(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    assert chosen() == ("torch", "SUBQUAD_BACKEND=torch")
    assert chosen("torch") == ("torch", "asked for")


def test_the_variable_insists_on_triton(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"'triton' \(SUBQUAD_BACKEND=triton\) cannot run"):
        chosen()
    assert chosen("torch").backend == "torch"  # an argument counts more


def test_a_wrong_value_lists_the_choices(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
    x = torch.ones(1, 3, 2, 4)
    with pytest.raises(ConfigError, match="SUBQUAD_BACKEND is 'cuda'; it must be one of auto, torch, triton"):
        poly_attention(x, x, x, coefs=(0.0, 1.0))
