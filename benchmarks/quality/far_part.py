"""Where the far part errs: in how much it counts (its share of the attention), or in what it says (its content).

    python -m benchmarks.quality.far_part runs/demo/student --text data/text/wikitext2/wiki.test.raw --seq-len 2048

Every converted head is given its teacher's input. Its window is exact, so that its error has two causes, the share and
the content of the far part. Each is replaced by the exact one in turn, which says what the other costs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.checkpoint_command import run_command
from subquad.convert.watch import watch_teacher
from subquad.distill import TextSource, build_token_dataset
from subquad.eval.storage import collect_versions, git_commit
from subquad.layers import SubquadAttention, converted_layers
from subquad.layers.inputs import HeadInputs
from subquad.recipes.checkpoint import load_checkpoint

BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192)
# The first tokens behind the window have a far part of a few keys: errors are counted from here.
FIRST_POSITION = 128


@dataclass
class LayerParts:
    """Sums over heads and tokens of one layer.

    Attributes:
        layer: its index.
        shares: bucket's end to (student's far share, exact far share), means over heads and tokens.
        errors: squared errors of the head outputs as a share of the teacher's power: `window` (no far part), `student`,
            `exact_share` (the student's content at the exact share), `exact_content` (exact content at the student's
            share).
        explained: share of the variance within a head of log(far mass / window mass), exactly, that a line in logs of
            the student's masses explains: of its far mass and the number of tokens, and of these and the window's mass.
    """

    layer: int
    shares: dict[int, tuple[float, float]]
    errors: dict[str, float]
    explained: dict[str, float]


class _Probe:
    """Measures one layer on every row that the teacher reads."""

    def __init__(self, layer: SubquadAttention) -> None:
        self.layer = layer
        self.found: list[LayerParts] = []

    def add(self, inputs: HeadInputs) -> None:
        """Measure one row."""
        self.found.append(measure_layer(self.layer, inputs))


@torch.no_grad()
def measure_layer(layer: SubquadAttention, inputs: HeadInputs) -> LayerParts:
    """Measure one layer on one row.

    Args:
        layer: a converted layer whose far part shares a normaliser with its window.
        inputs: the teacher's heads, one row.

    Returns:
        The layer's figures.
    """
    mixer = layer.mixer
    assert mixer is not None, "a converted layer has a mixer"
    if layer.mixer_config.kept_keys:
        raise SystemExit(
            f"layer {layer.layer_idx} has kept_keys: {layer.mixer_config.kept_keys}; this measures a far part that has "
            "everything behind the window"
        )
    inputs = inputs.select(layer.split, layer.split.mixed)
    parts = mixer.parts(inputs)
    share = mixer.far_share(parts)
    if parts.near is None or parts.far is None or parts.mass is None or share is None or parts.far_inputs is None:
        raise SystemExit(f"layer {layer.layer_idx} has no far part beside a window on these rows; give longer ones")
    content = parts.far / parts.mass.clamp_min(1e-9)[..., None]
    logits, far = _far_logits(layer, inputs)
    exact_content = torch.einsum(
        "hts,shd->thd", logits.softmax(-1), _by_query_head(inputs.v[0], layer.split.group_size)
    )
    odds = logits.logsumexp(-1).T - parts.near.log_normaliser[0]
    exact_share = odds.sigmoid()
    near = parts.near.out[0]

    def joined(weight: Tensor, said: Tensor) -> Tensor:
        return torch.lerp(near, said, weight[..., None])

    first = max(FIRST_POSITION, mixer.config.window + mixer.config.sinks + 1)
    exact = joined(exact_share, exact_content)[first:]
    candidates = {
        "window": near,
        "student": joined(share[0], content[0]),
        "exact_share": joined(exact_share, content[0]),
        "exact_content": joined(share[0], exact_content),
    }
    power = exact.square().sum()
    errors = {name: ((out[first:] - exact).square().sum() / power).item() for name, out in candidates.items()}
    logs = [parts.mass[0].abs().clamp_min(1e-9).log(), far.sum(-1).float().log()[:, None].expand_as(odds)]
    explained = {
        "far_mass_and_length": _explained(odds[first:], [log[first:] for log in logs]),
        "and_window_mass": _explained(odds[first:], [log[first:] for log in [*logs, parts.near.log_normaliser[0]]]),
    }
    return LayerParts(layer.layer_idx, _bucket_means(share[0], exact_share), errors, explained)


def _far_logits(layer: SubquadAttention, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """Return the teacher's logits `[heads, T, T]`, -1e9 but for far keys, and which keys are far, `[T, T]`."""
    config = layer.mixer_config
    q, k = inputs.rotate(inputs.q, inputs.k)
    steps = torch.arange(q.shape[1])
    far = (steps[:, None] - steps >= config.window) & (steps >= config.sinks)
    logits = torch.einsum("thd,shd->hts", q[0], _by_query_head(k[0], layer.split.group_size)) * layer.scaling
    return logits.masked_fill(~far, -1e9), far


def _by_query_head(x: Tensor, group_size: int) -> Tensor:
    return x.repeat_interleave(group_size, dim=1)


def _explained(values: Tensor, features: list[Tensor]) -> float:
    """Return the mean over heads of the share of variance that a least-squares line explains, `[T, heads]` each."""
    shares = []
    for head in range(values.shape[1]):
        y = values[:, head].double()
        columns = torch.stack([torch.ones_like(y), *(feature[:, head].double() for feature in features)], dim=1)
        rest = y - columns @ torch.linalg.lstsq(columns, y[:, None]).solution[:, 0]
        shares.append(1 - (rest.square().sum() / (y - y.mean()).square().sum()).item())
    return sum(shares) / len(shares)


def _bucket_means(student: Tensor, exact: Tensor) -> dict[int, tuple[float, float]]:
    means, start = {}, 0
    for end in BUCKETS:
        if start >= len(student):
            break
        means[end] = (student[start:end].mean().item(), exact[start:end].mean().item())
        start = end
    return means


def measure(checkpoint: str, text: str, seq_len: int) -> dict[str, Any]:
    """Measure every converted layer of a checkpoint on the first row of a text.

    Args:
        checkpoint: a converted checkpoint.
        text: a text file.
        seq_len: tokens of the row.

    Returns:
        Layers, their mean, and what is needed to repeat it.
    """
    loaded = load_checkpoint(checkpoint, torch.float32)
    if loaded.tokenizer is None:
        raise SystemExit(f"{checkpoint} has no tokenizer")
    source = TextSource(kind="text", paths=(text,))
    row = next(iter(build_token_dataset(source, loaded.tokenizer, seq_len, max_tokens=seq_len, shuffle=False)))
    layers = [layer for layer in converted_layers(loaded.model) if layer.mixer is not None]
    probes = {layer: _Probe(layer) for layer in layers}
    watch_teacher(loaded.model, probes, [{"input_ids": row["input_ids"][None]}])
    found = [parts for probe in probes.values() for parts in probe.found]
    return {
        "checkpoint": checkpoint,
        "text": Path(text).name,
        "seq_len": seq_len,
        "mean": _mean_of(found),
        "layers": [dataclasses.asdict(parts) for parts in found],
        "versions": collect_versions(),
        "commit": git_commit(),
    }


def _mean_of(layers: list[LayerParts]) -> dict[str, Any]:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        "shares": {
            end: [mean([layer.shares[end][which] for layer in layers]) for which in (0, 1)] for end in layers[0].shares
        },
        "errors": {name: mean([layer.errors[name] for layer in layers]) for name in layers[0].errors},
        "explained": {name: mean([layer.explained[name] for layer in layers]) for name in layers[0].explained},
    }


def render(result: dict[str, Any]) -> str:
    """Return the figures as Markdown.

    Args:
        result: from `measure`.

    Returns:
        Two tables.
    """
    lines = ["| positions up to | far share, student | far share, exact |", "|---:|---:|---:|"]
    lines += [f"| {end:,} | {own:.3f} | {exact:.3f} |" for end, (own, exact) in result["mean"]["shares"].items()]
    names = list(result["mean"]["errors"])
    lines += ["", "| layer | " + " | ".join(names) + " |", "|---:" * (len(names) + 1) + "|"]
    rows = [(str(layer["layer"]), layer["errors"]) for layer in result["layers"]]
    for label, errors in [*rows, ("mean", result["mean"]["errors"])]:
        lines.append(f"| {label} | " + " | ".join(f"{errors[name]:.3f}" for name in names) + " |")
    lines += ["", *(f"Explained by {name}: {share:.2f}." for name, share in result["mean"]["explained"].items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the command line, measure, print and write."""
    run_command(__doc__, lambda given: measure(given.checkpoint, given.text, given.seq_len), render, seq_len=1024)


if __name__ == "__main__":
    main()
