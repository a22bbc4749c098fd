"""The stages of a run: each does its work and says what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from subquad.convert.calibrate import CalibrationResult, calibrate, calibration_tokens
from subquad.convert.export import export_student
from subquad.convert.key_scores import KeyFit, fit_key_scores
from subquad.convert.modelcard import ModelCard, write_model_card
from subquad.convert.plan_table import render_plan
from subquad.errors import TaskError
from subquad.eval.loss_record import pack_loss, unpack_loss
from subquad.eval.memory import cache_table
from subquad.eval.modes import EvalMode
from subquad.eval.report import write_report
from subquad.eval.results import LOSS_LABELS, LossName, Results, Sample, TokenCounts, summarise_losses
from subquad.eval.storage import collect_versions, device_name, git_commit, load_results, save_results
from subquad.recipes.contestants import load_contestants
from subquad.recipes.exact_heads import choose_heads
from subquad.recipes.measure import (
    measure_loss,
    mixer_counts,
    model_card,
    write_sample,
)
from subquad.recipes.progress import progress_bar, token_bar
from subquad.recipes.settings import text_source
from subquad.recipes.suite import run_suite
from subquad.recipes.workshop import Workshop


@dataclass(frozen=True)
class Outcome:
    """What a stage leaves for later ones.

    Attributes:
        result: plain values.
        files: what it made; without them it does not count as finished.
        seconds: time it took, where the stage knows better than the clock (training that was interrupted).
    """

    result: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    seconds: float | None = None


def plan_layers(shop: Workshop) -> Outcome:
    """Print what every layer becomes; where the recipe asks for it, choose the heads that stay softmax first."""
    if not shop.recipe.convert.chooses_heads:
        shop.console.print(render_plan(shop.plan))
        named = shop.recipe.convert.named_heads
        return Outcome({**shop.plan.to_dict(), **({"exact_heads": {"exact_kv_heads": named}} if named else {})})
    ranking = choose_heads(shop)
    exact = ranking.exact_kv_heads()
    plan = shop.plan_with(exact)
    shop.console.print(render_plan(plan))
    return Outcome({**plan.to_dict(), "exact_heads": {"exact_kv_heads": exact, **dataclasses.asdict(ranking)}})


def convert_layers(shop: Workshop) -> Outcome:
    """Load the teacher and swap its attention layers."""
    return Outcome({"parameters": sum(parameter.numel() for parameter in shop.student.parameters())})


def calibrate_mixers(shop: Workshop) -> Outcome:
    """Set temperatures, decays and far weights from the teacher's own activations, without training."""
    if not shop.recipe.calibrate.enabled:
        return Outcome({"tokens": 0}, (shop.save_mixers(),))
    found = _calibrate(shop)
    if found.keys is not None:
        shop.console.print(_key_line(found.keys))
    shop.console.print(
        f"Calibrated on {found.tokens:,} tokens: loss {found.loss_before:.4f} → {found.loss_after:.4f}"
        + ("." if found.kept else ", undone.")
    )
    return Outcome(dataclasses.asdict(found), (shop.save_mixers(),))


def measure_baseline(shop: Workshop) -> Outcome:
    """Measure the teacher, the window-only control and the student before any training."""
    modes: dict[LossName, EvalMode] = {"teacher": "teacher", "student_start": "student"}
    if shop.has_control:
        modes["window_only"] = "window_only"
    losses = {
        name: pack_loss(measure_loss(shop, shop.student, mode, LOSS_LABELS[name])) for name, mode in modes.items()
    }
    samples = write_sample(shop, shop.student, "teacher", "teacher")
    return Outcome({"losses": losses, "samples": [sample.model_dump() for sample in samples]})


def train_stage1(shop: Workshop) -> Outcome:
    """Match every layer's output to the teacher's."""
    return _train(shop, "stage1")


def train_stage2(shop: Workshop) -> Outcome:
    """Match the model's output distribution to the teacher's."""
    return _train(shop, "stage2")


def fit_keys(shop: Workshop) -> Outcome:
    """Fit the scores of kept keys again, where training has moved queries and keys."""
    stage2 = shop.recipe.stage2
    moved = shop.folder.result("stage2")["tokens"] and (stage2.full or stage2.lora is not None)
    if not (shop.recipe.calibrate.enabled and shop.keeps_keys and moved):
        return Outcome({"tokens": 0})
    rows = shop.key_batches()
    with token_bar("choosing keys", sum(row["input_ids"].numel() for row in rows), shop.console) as count:
        found = fit_key_scores(shop.student, rows, on_batch=count)
    assert found is not None, "a layer keeps keys"
    shop.console.print(_key_line(found))
    return Outcome(dataclasses.asdict(found), (shop.save_key_scores(),))


def _key_line(found: KeyFit) -> str:
    change = f"loss {found.loss_before:.4f} → {found.loss_after:.4f}"
    return f"Kept keys chosen on {found.tokens:,} tokens: {change}" + ("." if found.kept else ", undone.")


def export_checkpoint(shop: Workshop) -> Outcome:
    """Write the student as a Hugging Face checkpoint; its card gets the measurements at the end of the run."""
    folder = export_student(shop.student, shop.tokenizer, shop.folder.student_dir, bare_card(shop))
    # what is measured next is the checkpoint, read back
    del shop.student
    return Outcome({}, (folder,))


def evaluate_run(shop: Workshop) -> Outcome:
    """Measure the exported checkpoint and write `results.json`."""
    model = shop.exported_student()
    baseline = shop.folder.result("baseline")
    losses = {name: unpack_loss(packed) for name, packed in baseline["losses"].items()}
    losses["student"] = measure_loss(shop, model, "student", LOSS_LABELS["student"])
    if shop.has_control:
        losses["student_without_far"] = measure_loss(
            shop, model, "student_without_far", LOSS_LABELS["student_without_far"]
        )
    with progress_bar("memory over length", shop.console) as advance:
        cache, notes = cache_table(model, shop.recipe.eval.memory_lengths, progress=advance)
    samples = [Sample(**sample) for sample in baseline["samples"]] + write_sample(shop, model, "student", "student")
    table, differences, by_position = summarise_losses(losses)
    results = Results(
        name=shop.recipe.name,
        source=shop.recipe.model.source,
        mixers=mixer_counts(shop.plan),
        data=text_source(shop.recipe.data.eval).describe(),
        loss=table,
        differences=differences,
        by_position=by_position,
        cache_bytes=cache,
        tokens=_token_counts(shop),
        wall_seconds=shop.folder.seconds(),
        samples=samples,
        versions=collect_versions(),
        commit=git_commit(),
        device=device_name(shop.state.device),
        dtype=str(shop.dtype).removeprefix("torch."),
        seed=shop.recipe.seed,
        command=shop.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=[*_key_notes(shop), *_calibration_note(shop), *notes],
    )
    return Outcome({}, (save_results(results, shop.folder.path),))


def evaluate_tasks(shop: Workshop) -> Outcome:
    """Measure the tasks of `eval.suite`, if there is one, on the teacher, the control and the exported checkpoint."""
    settings = shop.recipe.eval.suite
    if settings is None:
        return Outcome({"tasks": []})
    contestants = load_contestants(str(shop.folder.path), dtype=shop.dtype)
    done = run_suite(contestants, settings, shop.folder.path, command=shop.command, console=shop.console)
    if done.failures:
        write_report(shop.folder.path)
        failed = "\n".join(f"  {task}: {message}" for task, message in done.failures.items())
        raise TaskError(
            f"{len(done.failures)} of the tasks of eval.suite could not be measured:\n{failed}\n"
            "The others are kept and in the report; the same command tries these again."
        )
    return Outcome({"tasks": list(settings.tasks)})


def report_run(shop: Workshop) -> Outcome:
    """Write the report and put the measurements on the student's model card."""
    paths = write_report(shop.folder.path)
    write_model_card(shop.folder.student_dir, model_card(load_results(shop.folder.path)))
    return Outcome({}, (paths.markdown, paths.html))


STEPS: dict[str, Callable[[Workshop], Outcome]] = {
    "plan": plan_layers,
    "convert": convert_layers,
    "calibrate": calibrate_mixers,
    "baseline": measure_baseline,
    "stage1": train_stage1,
    "stage2": train_stage2,
    "keys": fit_keys,
    "export": export_checkpoint,
    "evaluate": evaluate_run,
    "suite": evaluate_tasks,
    "report": report_run,
}
# measured and written by the main process alone
MAIN_PROCESS_STEPS = ("plan", "baseline", "keys", "export", "evaluate", "suite", "report")


def bare_card(shop: Workshop) -> ModelCard:
    """Return the content of a model card before anything is measured."""
    return ModelCard(shop.recipe.name, shop.recipe.model.source, mixer_counts(shop.plan), command=shop.command)


def _calibrate(shop: Workshop) -> CalibrationResult:
    rows, key_rows = shop.batches("calibrate", shop.recipe.calibrate.tokens), shop.key_batches()
    fit_maps = shop.recipe.calibrate.fit_maps
    total = calibration_tokens(shop.student, rows, key_rows, fit_maps)
    with token_bar("calibrating", total, shop.console) as count:
        return calibrate(shop.student, rows, key_rows=key_rows, fit_maps=fit_maps, on_batch=count)


def _train(shop: Workshop, stage: str) -> Outcome:
    if not getattr(shop.recipe, stage).tokens:
        return Outcome({"tokens": 0})
    done = shop.train(stage)
    shop.console.print(f"{stage}: {done.tokens:,} tokens, loss {done.first_loss:.4f} → {done.last_loss:.4f}.")
    result = {**dataclasses.asdict(done), "checkpoint": str(done.checkpoint.relative_to(shop.folder.path))}
    return Outcome(result, (done.checkpoint,), seconds=done.wall_s)


def _token_counts(shop: Workshop) -> TokenCounts:
    tokens = {stage: shop.folder.result(stage)["tokens"] for stage in ("stage1", "stage2", "calibrate")}
    return TokenCounts(stage1=tokens["stage1"], stage2=tokens["stage2"], calibration=tokens["calibrate"])


def _key_notes(shop: Workshop) -> list[str]:
    fits = {
        "before training": shop.folder.result("calibrate").get("keys"),
        "after it": shop.folder.result("keys") if shop.folder.result("keys")["tokens"] else None,
    }
    return [
        f"Kept keys were chosen {when} on {found['tokens']:,} tokens, which took the loss from "
        f"{found['loss_before']:.4f} to {found['loss_after']:.4f} nats per token of these rows"
        + ("." if found["kept"] else ", and undone.")
        for when, found in fits.items()
        if found is not None
    ]


def _calibration_note(shop: Workshop) -> list[str]:
    found = shop.folder.result("calibrate")
    if not found["tokens"]:
        return ["The mixers were not calibrated before training."]
    if not found["kept"]:
        return [f"Calibration on {found['tokens']:,} tokens raised the loss on its own text and was undone."]
    change = f"from {found['loss_before']:.4f} to {found['loss_after']:.4f} nats per token of its own text"
    return [f"Calibration on {found['tokens']:,} tokens, without training, took the loss {change}."]
