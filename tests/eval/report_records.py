"""Records of every kind of task, as the tasks write them, for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from subquad.eval.finetune import FinetuneSettings
from subquad.eval.finetune.scores import constant_baseline, score_predictions, to_digits
from subquad.eval.loss import LossResult
from subquad.eval.loss_record import pack_loss
from subquad.eval.niah import NiahSettings
from subquad.eval.niah.cells import Cell
from subquad.eval.niah.stats import mean_and_error
from subquad.eval.records import RECORDS_FOLDER, EvalRecord, Metric, Provenance, save_record

MODELS = ("teacher", "window_only", "student")
GLUE_SCORES = {
    "sst2": {"teacher": 0.56, "window_only": 0.55, "student": 0.55},
    "rte": {"teacher": 0.555, "window_only": 0.53, "student": 0.54},
}


def provenance(model: str, prompts: str = "a" * 64, **changes: object) -> Provenance:
    fields = {
        "checkpoint": "runs/demo/student" if model == "student" else "smollm2-135m",
        "mode": None if model == "student" else model,
        "weights": "0123456789abcdef" if model == "student" else "fedcba9876543210",
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "commit": "89abcdef" * 5,
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "batch_size": 8,
        "prompts_hash": prompts,
        "command": "subquad eval runs/demo --tasks all",
        "created": "2030-01-02T03:04:05+00:00",
        "wall_seconds": 73.4,
    }
    return Provenance.model_validate({**fields, **changes})


def loss_record(model: str, num_rows: int = 12) -> EvalRecord:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([[63, 64, 128]] * num_rows)
    hard = 3 + 0.3 * torch.rand(num_rows, 1, generator=generator, dtype=torch.float64)
    known = {"teacher": [0.0, 0.0, 0.0], "window_only": [0.0, 0.1, 0.25], "student": [0.01, 0.02, 0.06]}
    above = known.get(model, [0.5, 0.5, 0.5])
    generator.manual_seed(sum(map(ord, model)))
    noise = 0.02 * torch.rand(num_rows, 3, generator=generator, dtype=torch.float64)
    result = LossResult((hard + torch.tensor(above) + noise) * tokens, tokens, (64, 128))
    error = result.standard_error or 0.0
    return EvalRecord(
        task="loss",
        model=model,
        metrics={
            "loss": Metric(value=result.loss, standard_error=error, num=result.num_tokens, higher_is_better=False),
            "perplexity": Metric(
                value=result.perplexity,
                standard_error=error * result.perplexity,
                num=result.num_tokens,
                higher_is_better=False,
            ),
        },
        settings={"data": "wiki.test.raw", "tokens": 4096, "seq_len": 256, "rows_hash": "b" * 64},
        details=pack_loss(result),
        provenance=provenance(model),
    )


def niah_record(model: str, **settings: object) -> EvalRecord:
    chosen = NiahSettings.model_validate(
        {"lengths": (256, 512, 1024, 2048), "depths": 5, "samples": 6, "max_new_tokens": 10, **settings}
    )
    rng = random.Random(model)
    cells = []
    for length in chosen.lengths or ():
        for depth in chosen.depths:
            distance = (1 - depth) * length
            odds = {"teacher": 0.95, "window_only": 0.9 if distance < 128 else 0.0}.get(
                model, 0.9 if distance < 128 else max(0.0, 0.7 - distance / 1500)
            )
            exact = "".join(str(int(rng.random() < odds)) for _ in range(chosen.samples))
            log_probs = [-11.0 * (1 - odds) - rng.random() for _ in exact]
            cell = Cell(
                length=length,
                depth=depth,
                distance=distance,
                exact=exact,
                rank1=exact,
                log_probs=log_probs,
                reciprocal_rank=odds,
            )
            cells.append(cell)
    numbers = {
        "accuracy": [float(flag) for cell in cells for flag in cell.exact or ""],
        "key_logprob": [value for cell in cells for value in cell.log_probs or ()],
    }
    metrics = {}
    for name, values in numbers.items():
        mean, error = mean_and_error(values)
        metrics[name] = Metric(value=mean, standard_error=error, num=len(values))
    return EvalRecord(
        task=chosen.task,
        model=model,
        metrics=metrics,
        baselines={"accuracy": 1 / 90_000, "key_logprob": -math.log(90_000)},
        settings=chosen.identity(),
        details={"cells": [cell.model_dump(mode="json") for cell in cells]},
        provenance=provenance(model),
    )


def lm_eval_record(task: str, model: str, folder: Path, *, limit: int = 200, samples: bool = True) -> EvalRecord:
    """A record, and lm-eval's file of samples below `folder`."""
    rng = np.random.default_rng(0)
    right = (rng.random(limit) < GLUE_SCORES[task].get(model, 0.5)).astype(float)
    name = f"lm-eval/{model}/samples_{task}.jsonl"
    if samples:
        path = folder / RECORDS_FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"acc": value, "doc_hash": str(index)}) for index, value in enumerate(right)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    mean, error = mean_and_error(list(right))
    return EvalRecord(
        task=task,
        model=model,
        metrics={"acc": Metric(value=mean, standard_error=error, num=limit)},
        baselines={"acc": 0.54},
        settings={"num_fewshot": None, "limit": limit, "max_length": 2048, "checkpoint": model, "mode": model},
        details={"samples_file": name},
        notes=["The model gives the same answer (choice 1) to all 200 documents."] if task == "rte" else [],
        provenance=provenance(model),
    )


def finetune_record(model: str, task: str = "sst2") -> EvalRecord:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 100)
    wrong = rng.random(100) < {"teacher": 0.10, "window_only": 0.14, "student": 0.12}.get(model, 0.5)
    predictions = np.where(wrong, 1 - labels, labels)
    score = score_predictions("acc", labels, predictions[None])
    return EvalRecord(
        task=f"glue-finetune-{task}",
        model=model,
        metrics={"acc": Metric(value=score.value, standard_error=score.standard_error, num=100)},
        baselines={"acc": constant_baseline("acc", labels)},
        settings=FinetuneSettings(tasks=("sst2",), max_steps=60).for_record(),
        details={
            "labels": to_digits(labels.tolist()),
            "seeds": [{"seed": 0, "predictions": to_digits(predictions.tolist())}],
        },
        notes=["One seed: the standard errors are of the choice of rows only, not of the training."],
        provenance=provenance(model),
    )


def layer_record(model: str = "student") -> EvalRecord:
    rng = random.Random(3)
    layers = [
        {
            "layer": index,
            "relative_error": 0.001 + 0.02 * index * rng.random(),
            "half_lives": [3.4e8, 84.7 * (index + 1), None][index % 2 :],
            "far_shares": [0.2 * rng.random() for _ in range(9)] if index else None,
            "exact_kv_heads": [2] if index % 2 else [],
        }
        for index in range(6)
    ]
    return EvalRecord(
        task="layers",
        model=model,
        metrics={"relative_error": Metric(value=fmean(layer["relative_error"] for layer in layers), num=6)},
        settings={"rows_hash": "b" * 64, "tokens": 1024},
        details={"layers": layers},
        provenance=provenance(model),
    )


def save_all(folder: Path, models: tuple[str, ...] = MODELS, **niah: object) -> list[EvalRecord]:
    """Write records of every kind into an evaluation folder."""
    records = [make(model) for model in models for make in (loss_record, finetune_record)]
    records += [niah_record(model, **niah) for model in models]
    records += [lm_eval_record(task, model, folder) for task in GLUE_SCORES for model in models]
    records += [layer_record()] if "student" in models else []
    for record in records:
        save_record(record, folder)
    return records
