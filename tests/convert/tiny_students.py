"""A tiny converted model and the card it is exported with."""

from __future__ import annotations

import torch

from subquad.convert.modelcard import ModelCard
from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.layers import resolve_mixer

from .tiny_checkpoints import tiny_model

CARD = ModelCard(
    name="tiny-2mamba",
    teacher="smollm2-135m",
    mixers={"2mamba": 1, "taylor": 1},
    losses={"Teacher (softmax)": 3.0, "Student": 3.25},
    loss_data="held-out messages, 4,096 tokens",
    cache_bytes={1024: (1000, 2000), 64: (1000, 125)},
    training_tokens={"stage 1": 20_000},
    license="apache-2.0",
    command="subquad run demo",
    versions={"torch": "2.13.0"},
    notes=("Measured on one CPU.",),
)


def make_student(dtype: torch.dtype = torch.float32, **changes):
    model = tiny_model(**changes)
    for parameter in model.parameters():  # not .to(dtype), which would round the rotary frequencies, too
        parameter.data = parameter.data.to(dtype)
    layers = {"1": resolve_mixer({"preset": "taylor", "window": 4, "sinks": 1})}
    plan = plan_conversion(model.config, resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2}), layers)
    student = apply_plan(model, plan).eval()
    torch.manual_seed(1)
    with torch.no_grad():  # away from the start, where parts that are lost would not be missed
        for name, parameter in student.named_parameters():
            if ".mixer." in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("log_mix"):
                parameter.zero_()
    return student
