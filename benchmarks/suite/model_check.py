"""Whole models: logits on the device against those on the CPU, and decoding with a cache against one forward."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.suite.cases import Case, Session
from benchmarks.suite.llamas import MIXERS, LlamaShape, random_student, stir_mixers
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import DTYPES, Settings
from subquad.layers.cache import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Relative RMS of the logits. Half precision is also allowed twice what the CPU loses to it.
LIMITS = {"bfloat16": 2e-2, "float32": 1e-3}
_TORCH_FACTOR = 2.0
_CASE_SECONDS = 90.0
# A large spread of the weights gives attention something to attend to.
_SHAPE = LlamaShape(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=2048,
    initializer_range=0.06,
)
_TOY_SHAPE = LlamaShape(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,
    max_position_embeddings=256,
    initializer_range=0.2,
)
_BATCH_SIZE = 2
# After the prompt: several tokens at once, then one by one.
_PIECES = (5, 1, 1, 1, 1)


def model_cases(settings: Settings) -> list[Case]:
    """Return one case per mixer and dtype.

    Args:
        settings: The run's settings.

    Returns:
        The cases.
    """
    cases = []
    for mixer in MIXERS:
        for dtype in LIMITS:
            if settings.mode == "quick" and (dtype == "float32" or "taylor" in mixer):
                continue
            run = functools.partial(check_model, mixer, dtype)
            cases.append(Case("models", f"{mixer}-{dtype}", run, limit_s=_CASE_SECONDS))
    return cases


def check_model(mixer: str, dtype: str, session: Session) -> list[Row]:
    """Compare logits.

    Args:
        mixer: A name of `MIXERS`.
        dtype: Dtype of the weights outside the mixers, and of activations.
        session: Settings and device.

    Returns:
        A row for the prefill and one for decoding.
    """
    settings, device = session.settings, session.hardware.device
    shape, seq_len = (_TOY_SHAPE, 90) if settings.toy else (_SHAPE, 600)
    on_cpu = random_student(shape, mixer, device=torch.device("cpu"), dtype=DTYPES[dtype], seed=settings.seed)
    stir_mixers(on_cpu, settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = torch.randint(shape.vocab_size, (_BATCH_SIZE, seq_len), generator=generator)
    model = copy.deepcopy(on_cpu).to(device)
    with torch.no_grad():
        expected = copy.deepcopy(on_cpu).float()(tokens).logits
        cpu_error = relative_rms(on_cpu(tokens).logits, expected)
        prefill = model(tokens.to(device)).logits
        decoded = _decode(model, tokens.to(device))
    limit = max(LIMITS[dtype], _TORCH_FACTOR * cpu_error)
    config = {"mixer": mixer, "dtype": dtype, "tokens": seq_len, "batch": _BATCH_SIZE, "device": str(device)}
    last = prefill[:, -decoded.shape[1] :]
    return [
        _row("prefill", relative_rms(prefill, expected), limit, config, {"cpu_error": cpu_error}),
        _row("decode", relative_rms(decoded, last), limit, config | {"pieces": _PIECES}, {}),
    ]


def _decode(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the logits of the last tokens, computed piece by piece with a cache."""
    from transformers import DynamicCache

    cache = {cache_argument(model): DynamicCache()}
    start = tokens.shape[1] - sum(_PIECES)
    model(tokens[:, :start], use_cache=True, **cache)
    logits = []
    for size in _PIECES:
        logits.append(model(tokens[:, start : start + size], use_cache=True, **cache).logits)
        start += size
    return torch.cat(logits, dim=1)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return RMS(actual - expected) / RMS(expected) in float64 on the CPU; NaN counts as infinite."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    error = ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()
    return error if error == error else float("inf")


def _row(what: str, error: float, limit: float, config: dict, more: dict[str, float]) -> Row:
    bad = not error <= limit
    return Row(
        what=what,
        status="failed" if bad else "ok",
        reason=f"logits: {error:.1e} > {limit:.1e}" if bad else "",
        config=config,
        metrics={"error": error, "limit": limit, "worst": error / limit} | more,
    )
