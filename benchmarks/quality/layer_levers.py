"""Each lever on and off, one attention layer at a time: cheap enough for many levers on two CPU cores.

    python -m benchmarks.quality.layer_levers benchmarks/quality/studies/layer-levers.yaml --output runs/layer-levers

The teacher reads training and held-out rows once, and what some of its layers are given is kept in memory. Each lever
is a mixer: it is calibrated and trained like stage 1 on those inputs, several epochs over few rows, and its output is
compared with the layer's own attention on the held-out ones. What is left out is what layers do to each other: a
model's loss needs `study.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from subquad.convert.atomic import atomic_file
from subquad.convert.calibrate import calibrate_layer
from subquad.convert.plan import plan_conversion
from subquad.convert.source import load_teacher
from subquad.convert.surgery import apply_plan, undo_plan
from subquad.distill import Stage1Config, TextSource, build_token_dataset
from subquad.distill.stages import stage1_rules
from subquad.distill.trainer import parameter_groups
from subquad.errors import SubquadError
from subquad.eval.storage import collect_versions, git_commit
from subquad.layers import SubquadAttention, attention_mode, converted_layers, resolve_mixer
from subquad.layers.inputs import HeadInputs
from subquad.layers.sequence import SequenceInfo
from subquad.layers.transfer import local_loss
from subquad.recipes.fields import Count, Indices, Section
from subquad.recipes.loader import apply_overrides, parse_yaml
from subquad.recipes.schema import parse_section

# Errors are counted from here: before, the window sees nearly everything.
FIRST_POSITION = 128
_COLUMNS = ("input_ids", "position_ids")

Row = dict[str, Tensor]


class Levers(Section):
    """What is compared.

    Attributes:
        model: the teacher.
        train: text of the training rows, a jsonl file.
        held_out: a text file of another source.
        seq_len: tokens per row.
        train_rows: rows that are trained on.
        calibration_rows: how many of them calibrate; the scores of kept keys are fitted on all.
        held_out_rows: rows that are measured.
        epochs: passes over the training rows.
        layers: which layers.
        base: the mixer that every lever changes.
        levers: name to the parts that it changes.
        fit_maps: levers whose learned maps start from least squares.
    """

    model: str
    train: str
    held_out: str
    seq_len: Count = 1024
    train_rows: Count = 8
    calibration_rows: Count = 2
    held_out_rows: Count = 4
    epochs: Count = 2
    layers: Indices
    base: dict[str, Any]
    levers: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    fit_maps: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Levers:
        unknown = [name for name in self.fit_maps if name not in self.levers]
        if unknown:
            raise ValueError(f"fit_maps names {', '.join(unknown)}, which no lever is called")
        return self


@dataclass(frozen=True)
class LayerInput:
    """What one layer is given for one row, and what it makes of it.

    Attributes:
        hidden_states: `[1, T, hidden_size]`.
        rope: (cos, sin).
        sequence: packed documents.
        target: `[1, T, hidden_size]`, the softmax attention's output.
    """

    hidden_states: Tensor
    rope: tuple[Tensor, Tensor]
    sequence: SequenceInfo | None
    target: Tensor

    def heads(self, layer: SubquadAttention) -> HeadInputs:
        """Return the layer's heads."""
        return layer.inputs(self.hidden_states, self.rope, self.sequence)


@dataclass(frozen=True)
class Outcome:
    """One lever in one layer: squared errors of the held-out output over the teacher's power, from position 128 on.

    Attributes:
        lever: its name.
        layer: the layer's index.
        window: of window and sinks alone.
        exact: of the exact part, with kept keys.
        calibrated: before training.
        trained: after it.
        seconds: calibration and training.
    """

    lever: str
    layer: int
    window: float
    exact: float
    calibrated: float
    trained: float
    seconds: float


@torch.no_grad()
def record_layers(model: PreTrainedModel, rows: Sequence[Row], layers: Sequence[int]) -> dict[int, list[LayerInput]]:
    """Run the teacher and keep what its layers were given and returned.

    Args:
        model: a converted model; it runs as its teacher.
        rows: `input_ids` and `position_ids`, `[T]` each.
        layers: which layers.

    Returns:
        Layer index to one record per row.
    """
    records: dict[int, list[LayerInput]] = {index: [] for index in layers}

    def hook(layer: SubquadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = (kwargs["hidden_states"], kwargs["position_embeddings"], kwargs.get("sequence"))
        records[layer.layer_idx].append(LayerInput(*given, output[0]))

    watched = [layer for layer in converted_layers(model) if layer.layer_idx in records]
    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in watched]
    with attention_mode(model, "teacher"):
        for row in rows:
            model.base_model(**{name: row[name][None] for name in _COLUMNS}, use_cache=False)
    for handle in handles:
        handle.remove()
    return records


def train_layer(layer: SubquadAttention, records: Sequence[LayerInput], epochs: int) -> None:
    """Train a mixer as stage 1 does, a row per step.

    Args:
        layer: the layer, calibrated.
        records: training rows.
        epochs: passes over them.
    """
    steps = epochs * len(records)
    config = Stage1Config(tokens=steps)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("mixer."))
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return
    optimizer = torch.optim.AdamW(parameter_groups(layer, stage1_rules(config)))
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(config.warmup_ratio * steps), steps)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(epochs):
        for index in torch.randperm(len(records), generator=generator).tolist():
            record = records[index]
            with torch.no_grad():
                inputs = record.heads(layer)
            local_loss(layer, inputs, record.target).backward()
            torch.nn.utils.clip_grad_norm_(layer.mixer.parameters(), config.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@torch.no_grad()
def held_out_error(layer: SubquadAttention, records: Sequence[LayerInput]) -> float:
    """Return the squared error over the teacher's power, from `FIRST_POSITION` on; the layer's mode says of what."""
    error = power = 0.0
    for record in records:
        out = layer.project_out(layer.student_heads(record.heads(layer)))
        error += (out - record.target)[:, FIRST_POSITION:].square().sum().item()
        power += record.target[:, FIRST_POSITION:].square().sum().item()
    return error / power


def run_lever(
    model: PreTrainedModel,
    study: Levers,
    name: str,
    index: int,
    train: Sequence[LayerInput],
    test: Sequence[LayerInput],
) -> Outcome:
    """Convert one layer, calibrate, train and measure it; the model is as before afterwards.

    Args:
        model: the teacher.
        study: the study.
        name: the lever.
        index: the layer.
        train: its training rows.
        test: its held-out rows.

    Returns:
        The figures.
    """
    torch.manual_seed(0)
    mixer = resolve_mixer({**study.base, **study.levers[name]})
    plan = plan_conversion(model.config, resolve_mixer("softmax"), {str(index): mixer})
    model = apply_plan(model, plan)
    layer = next(layer for layer in converted_layers(model) if layer.mixer is not None)
    start, errors = time.perf_counter(), {}
    with torch.no_grad():
        batches = [record.heads(layer) for record in train]
        calibrate_layer(layer, batches[: study.calibration_rows], batches, fit_maps=name in study.fit_maps)
    errors["calibrated"] = held_out_error(layer, test)
    if layer.mixer_config.window:
        for mode, label in (("window_only", "window"), ("exact_only", "exact")):
            with attention_mode(model, mode):
                errors[label] = held_out_error(layer, test)
    train_layer(layer, train, study.epochs)
    seconds = time.perf_counter() - start
    errors["trained"] = held_out_error(layer, test)
    undo_plan(model)
    return Outcome(name, index, **{"window": math.nan, "exact": math.nan, **errors}, seconds=seconds)


def read_rows(study: Levers, tokenizer: Any) -> tuple[list[Row], list[Row]]:
    """Return the training and the held-out rows."""
    train = TextSource(kind="jsonl", paths=(study.train,))
    test = TextSource(kind="text", paths=(study.held_out,))

    def take(source: TextSource, count: int, shuffle: bool) -> list[Row]:
        most = count * study.seq_len
        data = build_token_dataset(source, tokenizer, study.seq_len, max_tokens=most, shuffle=shuffle)
        return list(data)

    return take(train, study.train_rows, True), take(test, study.held_out_rows, False)


def run(study: Levers, folder: Path, names: Sequence[str]) -> None:
    """Run what is not in `rows.jsonl` yet, and rewrite it and the table after every lever.

    Args:
        study: the study.
        folder: where to write.
        names: levers to run.
    """
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    todo = [name for name in names if name not in {row["lever"] for row in rows}]
    if not todo:
        return
    teacher = load_teacher(study.model, torch.float32)
    train, test = read_rows(study, teacher.tokenizer)
    model = apply_plan(teacher.model, plan_conversion(teacher.model.config, resolve_mixer(study.base)))
    records = record_layers(model, [*train, *test], study.layers)
    model = undo_plan(model)
    settings = {"commit": git_commit(), "versions": collect_versions()}
    for name in todo:
        for outcome in _outcomes(model, study, name, records, len(train)):
            changes = {"changes": study.levers[name], "fit_maps": name in study.fit_maps}
            rows.append({**asdict(outcome), **changes, **settings})
            print(json.dumps(asdict(outcome)), flush=True)
        atomic_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        atomic_file(folder / "table.md", render(study, rows).encode())


def _outcomes(
    model: PreTrainedModel, study: Levers, name: str, records: dict[int, list[LayerInput]], num_train: int
) -> Iterator[Outcome]:
    for index in study.layers:
        yield run_lever(model, study, name, index, records[index][:num_train], records[index][num_train:])


def render(study: Levers, rows: Sequence[dict[str, Any]]) -> str:
    """Return the table: means over layers, and the difference from the first lever layer by layer.

    Args:
        study: the study.
        rows: outcomes as plain values.

    Returns:
        Markdown.
    """
    by_lever: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_lever.setdefault(row["lever"], []).append(row)
    base = next(iter(study.levers))
    heads = ("lever", "window alone", "exact part", "calibrated", "trained", f"trained − {base}")
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for name, found in by_lever.items():
        cells = [f"{fmean(row[key] for row in found):.4f}" for key in ("window", "exact", "calibrated", "trained")]
        pairs = list(zip(found, by_lever.get(base, ()), strict=False))
        gains = [own["trained"] - other["trained"] for own, other in pairs]
        spread = f" (sd {stdev(gains):.4f})" if len(gains) > 1 else ""
        cells.append("" if name == base or not gains else f"{fmean(gains):+.4f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    layers = ", ".join(map(str, study.layers))
    tokens = study.train_rows * study.epochs * study.seq_len
    return (
        f"Squared error of the layer's output over its power, held out, from position {FIRST_POSITION} on; mean of "
        f"layers {layers}; {study.train_rows} rows of {study.seq_len:,} tokens, {study.epochs} epochs ({tokens:,} "
        "tokens). The difference is paired by layer, sd over layers.\n\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    """Read the command line and run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="a YAML file")
    parser.add_argument("--output", type=Path, default=Path("runs/layer-levers"))
    parser.add_argument("--levers", help="comma-separated names; all without it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value")
    options = parser.parse_args()
    try:
        content = apply_overrides(
            parse_yaml(options.study.read_text(encoding="utf-8"), str(options.study)), options.set
        )
        study = parse_section(Levers, content, origin=str(options.study))
        names = list(study.levers) if options.levers is None else options.levers.split(",")
        unknown = [name for name in names if name not in study.levers]
        if unknown:
            parser.error(f"no lever {', '.join(unknown)}; levers: {', '.join(study.levers)}")
        run(study, options.output, names)
    except (SubquadError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
