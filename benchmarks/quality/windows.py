"""Shapes of the window alone: sliding, or terraced, where a chunk of tokens sees itself and nothing before it.

    python -m benchmarks.quality.windows benchmarks/quality/studies/layer-levers.yaml

A terraced window (Zhang et al. 2024, LoLCATs, arXiv 2410.10254) is cheaper on a GPU, and shows a token half as many
others on average. Both are measured on layers of the teacher as the far part's levers are, with nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.quality import layer_levers
from benchmarks.quality.layer_levers import LayerInput, Levers, read_rows, record_layers
from subquad.convert.plan import plan_conversion
from subquad.convert.source import load_teacher
from subquad.convert.surgery import apply_plan
from subquad.layers import SubquadAttention, converted_layers, resolve_mixer
from subquad.recipes.loader import apply_overrides, parse_yaml
from subquad.recipes.schema import parse_section

Shape = Literal["sliding", "terraced"]
WINDOWS = (16, 32, 64, 128, 256)
SINKS = 4


def visible(length: int, window: int, shape: Shape, sinks: int = SINKS) -> Tensor:
    """Return which keys a query sees, `[length, length]` bool: the window and the first `sinks` tokens."""
    steps = torch.arange(length)
    first = steps - window + 1 if shape == "sliding" else steps // window * window
    return (steps <= steps[:, None]) & ((steps >= first[:, None]) | (steps < sinks))


@torch.no_grad()
def window_error(layer: SubquadAttention, records: Sequence[LayerInput], window: int, shape: Shape) -> float:
    """Return the squared error of a window's output over the layer's power, from `FIRST_POSITION` on.

    Args:
        layer: a layer of the teacher; it may be converted.
        records: what it was given, rows of one document.
        window: tokens of the window.
        shape: of the window.

    Returns:
        The error; 1 is no better than zero.
    """
    error, power, first = 0.0, 0.0, layer_levers.FIRST_POSITION
    for record in records:
        inputs = record.heads(layer)
        q, k = inputs.rotate(inputs.q, inputs.k)
        mask = visible(q.shape[1], window, shape)
        k, v = (x.repeat_interleave(layer.geometry.group_size, dim=2) for x in (k, inputs.v))
        heads = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=layer.scaling
        )
        out = layer.project_out(heads.transpose(1, 2))
        error += (out - record.target)[:, first:].square().sum().item()
        power += record.target[:, first:].square().sum().item()
    return error / power


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="a study of layer_levers, for its model, rows and layers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value")
    options = parser.parse_args()
    content = apply_overrides(parse_yaml(options.study.read_text(encoding="utf-8"), str(options.study)), options.set)
    study = parse_section(Levers, content, origin=str(options.study))
    teacher = load_teacher(study.model, torch.float32)
    rows = read_rows(study, teacher.tokenizer)[1]
    model = apply_plan(teacher.model, plan_conversion(teacher.model.config, resolve_mixer(study.base)))
    records = record_layers(model, rows, study.layers)
    layers = [layer for layer in converted_layers(model) if layer.layer_idx in records]
    print("| window | sliding | terraced |\n|---:|---:|---:|")
    for window in WINDOWS:
        errors = {
            shape: sum(window_error(layer, records[layer.layer_idx], window, shape) for layer in layers) / len(layers)
            for shape in ("sliding", "terraced")
        }
        print(f"| {window} | {errors['sliding']:.4f} | {errors['terraced']:.4f} |", flush=True)


if __name__ == "__main__":
    main()
