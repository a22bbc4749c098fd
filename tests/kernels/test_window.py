"""The exact window in PyTorch against its definition, and the choice between it and the fused kernel."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.errors import ConfigError
from subquad.kernels import backend, window, window_attention, window_flex
from subquad.kernels.window_blocked import blocked_window_attention
from tests.kernels.window_oracle import (
    make_window_case,
    window_by_definition,
    with_window_gradients,
    worst_window_error,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_queries=st.integers(1, 30),
    past=st.sampled_from([0, 1, 9]),
    length=st.sampled_from([1, 2, 7, 50]),
    sinks=st.sampled_from([0, 1, 3, 60, "beside"]),
    padded=st.booleans(),
    packed=st.booleans(),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
def test_blocked_form_is_the_definition(num_queries, past, length, sinks, padded, packed, heads):
    case = make_window_case(
        num_queries,
        num_queries + past,
        length,
        sinks=sinks,
        padded=padded,
        packed=packed,
        heads=heads,
        widths=(5, 6),
        scale=0.3,
        dtype=torch.float64,
    )
    expected = with_window_gradients(window_by_definition, *case)
    assert worst_window_error(with_window_gradients(blocked_window_attention, *case), expected) < 1e-10


def test_rows_that_see_nothing_give_zeros():
    inputs, leaves = make_window_case(20, 20, 3, padded=True)
    out, log_normaliser, *gradients = with_window_gradients(blocked_window_attention, inputs, leaves)
    assert (log_normaliser[0, :10] == -torch.inf).all()
    assert not out[0, :10].any()
    assert not gradients[0][0, :10].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


def tensors_on(device, num_queries=129, widths=(64, 64), dtypes=(torch.bfloat16,) * 3):
    """Return stand-ins for q, k, v with what the choice looks at."""
    shapes = ((1, num_queries, 4, widths[0]), (1, 200, 2, widths[0]), (1, 200, 2, widths[1]))
    return [
        SimpleNamespace(device=torch.device(device), shape=shape, dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.fixture
def usable_gpu(monkeypatch):
    monkeypatch.setattr(window_flex, "device_problem", lambda device: None)
    monkeypatch.delenv("SUBQUAD_BACKEND", raising=False)
    backend._said.clear()


@pytest.mark.parametrize(
    "backend, tensors, fuses",
    [
        ("auto", tensors_on("cpu"), False),
        ("auto", tensors_on("cuda"), True),
        ("auto", tensors_on("cuda", num_queries=128), False),
        ("auto", tensors_on("cuda", num_queries=1), False),
        ("flex", tensors_on("cuda", num_queries=1), True),
        ("torch", tensors_on("cuda"), False),
        ("auto", tensors_on("cuda", dtypes=(torch.float32,) * 3), True),
    ],
)
def test_choice(usable_gpu, caplog, backend, tensors, fuses):
    assert window._fuses(backend, *tensors) is fuses
    assert not caplog.records


@pytest.mark.parametrize(
    "tensors, problem",
    [
        (tensors_on("cuda", dtypes=(torch.float64,) * 3), "float64"),
        (tensors_on("cuda", dtypes=(torch.float16, torch.float32, torch.float32)), "one dtype"),
        (tensors_on("cuda", widths=(8, 8)), "head_dim 8"),
        (tensors_on("cuda", widths=(64, 256)), r"head_dim 64 \(values: 256\) is outside 16 to 128"),
    ],
)
def test_what_cannot_be_fused_warns_once_or_is_refused(usable_gpu, caplog, tensors, problem):
    with caplog.at_level(logging.WARNING):
        assert not window._fuses("auto", *tensors)
        assert not window._fuses("auto", *tensors)
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match=f"'flex' cannot run: .*{problem}"):
        window._fuses("flex", *tensors)


def test_the_environment_can_ask_for_pytorch(usable_gpu, monkeypatch):
    monkeypatch.setenv("SUBQUAD_BACKEND", "torch")
    assert not window._fuses("auto", *tensors_on("cuda"))
    assert window._fuses("flex", *tensors_on("cuda"))


def test_the_reason_of_the_device_is_passed_on(monkeypatch):
    monkeypatch.setattr(window_flex, "device_problem", lambda device: "the GPU is too old")
    with pytest.raises(ConfigError, match="the GPU is too old"):
        window._fuses("flex", *tensors_on("cuda"))


def test_arguments_are_checked():
    q, k = torch.zeros(1, 4, 3, 5), torch.zeros(1, 4, 2, 5)
    with pytest.raises(ConfigError, match="window must be at least 1"):
        window_attention(k, k, k, window=0)
    with pytest.raises(ConfigError, match=r"num_heads \(3\) must be a multiple of num_kv_heads \(2\)"):
        window_attention(q, k, k, window=2)
    with pytest.raises(ConfigError, match="backend 'fast' is unknown; it must be one of auto, torch, flex"):
        window_attention(k, k, k, window=2, backend="fast")
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU; the tensors are on cpu"):
        window_attention(k, k, k, window=2, backend="flex")


def test_the_chosen_form_gets_the_arguments(monkeypatch):
    inputs, _ = make_window_case(8, 10, 3, sinks=2, packed=True, padded=True)
    arguments = inputs._asdict()
    tensors = [arguments.pop(name) for name in ("q", "k", "v")]
    expected = window_by_definition(inputs)
    assert worst_window_error([*window_attention(*tensors, **arguments)], [*expected]) < 1e-5
    monkeypatch.setattr(window, "_fuses", lambda *chosen: True)
    monkeypatch.setattr(window, "flex_window_attention", lambda inputs: inputs)
    assert window_attention(*tensors, **arguments) == inputs
