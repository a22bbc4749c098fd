"""Run: the teacher is converted, calibrated and distilled, and everything is measured, before the time is up."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.distillation.budget import AnyStage, Speed, fit_tokens, measure_speed, train
from benchmarks.distillation.contents import Prepared, read_prepared
from benchmarks.distillation.measure import LOSS_ROWS, Measurements
from benchmarks.distillation.record import RESULT, RunRecord
from benchmarks.distillation.rows import PackedRows
from subquad.convert.atomic import atomic_directory
from subquad.convert.calibrate import calibrate
from subquad.convert.key_scores import fit_key_scores, keeps_keys
from subquad.convert.plan import plan_conversion
from subquad.convert.source import SourceInfo, inspect_source, load_teacher
from subquad.convert.surgery import apply_plan
from subquad.distill.checkpoints import save_part, save_trainable
from subquad.distill.stages import MIXER_MARK
from subquad.errors import ConfigError, OutputError
from subquad.eval.results import LossName
from subquad.layers import converted_layers
from subquad.recipes.checks import check_recipe_against
from subquad.recipes.loader import apply_overrides, load_content, merge_content
from subquad.recipes.schema import Recipe, parse_recipe
from subquad.recipes.sections import CalibrateSection
from subquad.recipes.settings import stage1_config, stage2_config, weights_dtype

LOG = "log.jsonl"
STUDENT = "student"
# What calibration found and no training changes is in no parameter: buffers of the mixers.
MIXERS = "mixers.safetensors"
# What a GPU changes in the recipe: batches that fill it, and no checkpoints on the way, which nothing resumes from.
GPU_CHANGES: dict[str, Any] = {
    "stage1": {"batch_size": 16, "save_steps": 10**9},
    "stage2": {"batch_size": 16, "save_steps": 10**9},
    "trainer": {"logging_steps": 10, "report_to": []},
}
STAGE1_SHARE = 1 / 3
# calibration may take this share of the time; it is a search over a grid, and more rows change little
_CALIBRATION_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to run.

    Attributes:
        data: Folder of the loads.
        output: Folder of the result, the log and the student's parameters.
        seconds: How long it may take, from the start of the program's work to the last figure.
        tokens: Training tokens, a third of them for stage 1.
        recipe: Recipe whose settings are used: a packaged one's name or a file.
        overrides: `key=value` pairs of the recipe, as `subquad run` takes them.
        commit: The commit, where the checkout cannot tell.
        command: Command that repeats the run.
    """

    data: Path
    output: Path
    seconds: float = 420.0
    tokens: int = 30_000_000
    recipe: str = "smollm2-2mamba"
    overrides: tuple[str, ...] = ()
    commit: str | None = None
    command: str = ""


def make_recipe(options: RunOptions, model: str, seq_len: int, recall: dict[str, Any] | None = None) -> Recipe:
    """Return the recipe of a run; `overrides` come last.

    Args:
        options: What to run.
        model: Source of the teacher.
        seq_len: Tokens of the prepared rows.
        recall: Their recall, as `data.recall` of a recipe.

    Returns:
        The recipe.

    Raises:
        ConfigError: It breaks a rule, names other rows than were prepared, or asks for what a run cannot do here.
    """
    content, origin = load_content(options.recipe)
    first = max(seq_len, round(STAGE1_SHARE * options.tokens))
    content = merge_content(content, GPU_CHANGES)
    own = {"model": {"source": model}, "data": {"seq_len": seq_len, "recall": recall}}
    stages = {"stage1": {"tokens": first}, "stage2": {"tokens": max(seq_len, options.tokens - first)}}
    prepared = merge_content(content, {**own, **stages})
    recipe = parse_recipe(apply_overrides(prepared, options.overrides), origin=origin)
    problems = []
    if recipe.data != parse_recipe(prepared, origin=origin).data or recipe.model.source != model:
        problems.append("data and model.source are those of the preparation, which says what is read; prepare others")
    if recipe.convert.chooses_heads:
        problems.append("convert.exact_heads chooses heads, which `subquad run` does; name its choice with heads")
    if recipe.stage2.full:
        problems.append("stage2.full trains all weights, whose file is too large to hand back; use adapters")
    if any(stage.seq_len not in (None, seq_len) for stage in (recipe.stage1, recipe.stage2)):
        problems.append(f"stage1.seq_len and stage2.seq_len: all rows have the {seq_len} tokens of the preparation")
    if recipe.calibrate.key_recall != CalibrateSection().key_recall:
        problems.append(
            "calibrate.key_recall: keys are fitted on training rows, whose recall is that of the preparation"
        )
    if problems:
        raise ConfigError("; ".join(problems))
    return recipe


def convert_teacher(
    info: SourceInfo, recipe: Recipe, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the teacher and convert it, without calibration and training.

    Args:
        info: The teacher.
        recipe: What its layers become.
        dtype: Data type of the weights; None is what the recipe says.

    Returns:
        The converted model, on the CPU, and the tokenizer.
    """
    teacher = load_teacher(info, dtype or weights_dtype(recipe, info.hf_config))
    convert = recipe.convert
    plan = plan_conversion(
        info.hf_config, convert.mixer, convert.layers, exact_kv_heads=convert.named_heads, dtype=teacher.model.dtype
    )
    assert teacher.tokenizer is not None, "prepare refuses a model without one"
    return apply_plan(teacher.model, plan).eval(), teacher.tokenizer


def run(options: RunOptions) -> dict[str, Any]:
    """Distil and measure.

    Args:
        options: What to run.

    Returns:
        The row that `gpu_distill.json` holds.

    Raises:
        SubquadError: Data, settings or training; the row then has status `failed` and what there was before.
    """
    if (options.output / RESULT).exists():
        raise OutputError(f"{options.output} holds the result of a run already; give another folder")
    record = RunRecord(options.output, options.seconds, options.commit, options.command)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _Run(options, record, Path(scratch)).all()
    except BaseException as error:
        record.end("failed", f"{type(error).__name__}: {error}")
        raise
    if record.left < 0:
        record.note(f"it took {record.elapsed:.0f} s, more than the {options.seconds:.0f} s it was given")
    record.end("done")
    return record.row


class _Run:
    """The parts of a run, in order."""

    def __init__(self, options: RunOptions, record: RunRecord, scratch: Path) -> None:
        self.options, self.record, self.scratch = options, record, scratch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def all(self) -> None:
        with self.record.phase("load"):
            prepared, recipe, model, measured = self._load()
        # kernels are compiled here, so that what the parts after this take says what they will take again
        with self.record.phase("warm_up"):
            self._warm_up(measured, model)
        with self.record.phase("baseline"):
            self._measure(measured, model, ["teacher", *(["window_only"] if _has_control(model) else [])])
        with self.record.phase("calibrate"):
            self._calibrate(model, prepared.rows, recipe)
        with self.record.phase("start"):
            self._measure(measured, model, ["student_start"])
        phases = self.record.row["phases"]
        # the student is measured as often as teacher, control and start were, and its keys take part of a calibration
        reserve = sum(phases[name]["seconds"] for name in ("baseline", "start", "calibrate"))
        self._train(model, prepared.rows, recipe, reserve)
        if recipe.calibrate.enabled and keeps_keys(model):
            with self.record.phase("keys"):
                self._fit_keys(model, prepared.rows, recipe)
        with self.record.phase("student"):
            self._measure(measured, model, ["student", *(["student_without_far"] if _has_control(model) else [])])
        print("\n".join(measured.lines()), flush=True)

    def _load(self) -> tuple[Prepared, Recipe, PreTrainedModel, Measurements]:
        prepared = read_prepared(self.options.data)
        info = inspect_source(prepared.model)
        recipe = make_recipe(self.options, prepared.model, prepared.rows.seq_len, prepared.about["recall"])
        check_recipe_against(recipe, info.hf_config)
        # a GGUF file has no dtype of its own, and on a GPU float32 would take half the speed
        on_gpu = self.device.type == "cuda" and recipe.model.dtype == "auto"
        model, tokenizer = convert_teacher(info, recipe, torch.bfloat16 if on_gpu else None)
        model.to(self.device)
        measured = Measurements(prepared, tokenizer)
        self.record.row |= {
            "recipe": recipe.model_dump(mode="json"),
            "dtype": str(model.dtype).removeprefix("torch."),
            "prepared": prepared.about,
            "needle_settings": measured.needle_settings.identity(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        return prepared, recipe, model, measured

    def _measure(self, measured: Measurements, model: PreTrainedModel, names: Sequence[LossName]) -> None:
        for name in names:
            measured.add(name, model)
        self.record.row |= measured.to_dict()

    def _warm_up(self, measured: Measurements, model: PreTrainedModel) -> None:
        few = Measurements(measured.prepared.excerpt(LOSS_ROWS), measured.tokenizer)
        for name in ("teacher", *(["window_only"] if _has_control(model) else []), "student_start"):
            few.add(name, model)

    def _calibrate(self, model: PreTrainedModel, rows: PackedRows, recipe: Recipe) -> None:
        if not recipe.calibrate.enabled:
            self.record.row["calibration"] = None
            return
        batches = self._batches(rows, recipe.calibrate.tokens)
        wanted = len(batches)
        fit_maps = recipe.calibrate.fit_maps
        per_row = self._seconds_per_row(model, batches[:1], fit_maps)
        affordable = min(wanted, max(1, int(_CALIBRATION_SHARE * self.record.left / per_row)))
        if affordable < wanted:
            self.record.note(f"calibrated on {affordable} rows in place of {wanted}: a row takes {per_row:.1f} s")
        # rows for keys are training rows, with the recall that was prepared; one takes less than a fourth of a search
        key_rows = self._batches(rows, recipe.calibrate.key_tokens)[: 4 * affordable]
        found = calibrate(model, batches[:affordable], key_rows=key_rows, fit_maps=fit_maps)
        self.record.row["calibration"] = dataclasses.asdict(found)

    def _fit_keys(self, model: PreTrainedModel, rows: PackedRows, recipe: Recipe) -> None:
        """Choose kept keys anew, on as many rows as they were chosen on before; training has moved them."""
        found = fit_key_scores(model, self._batches(rows, self.record.row["calibration"]["keys"]["tokens"]))
        self.record.row["keys"] = None if found is None else dataclasses.asdict(found)
        self._save(model)

    def _batches(self, rows: PackedRows, tokens: int) -> list[dict[str, Tensor]]:
        count = min(len(rows), math.ceil(tokens / rows.seq_len))
        return [_batch(rows[index], self.device) for index in range(count)]

    def _save(self, model: PreTrainedModel) -> None:
        with atomic_directory(self.options.output / STUDENT) as folder:
            save_trainable(model, folder)
            save_part(model, folder / MIXERS, MIXER_MARK)

    @staticmethod
    def _seconds_per_row(model: PreTrainedModel, batch: list[dict[str, Tensor]], fit_maps: bool) -> float:
        """Return how long a row takes: the second time, since kernels are compiled in the first."""
        for _ in range(2):
            started = time.monotonic()
            with warnings.catch_warnings():
                # that it was undone says nothing: this is a copy
                warnings.simplefilter("ignore")
                calibrate(copy.deepcopy(model), batch, fit_maps=fit_maps)
        return time.monotonic() - started

    def _train(self, model: PreTrainedModel, rows: PackedRows, recipe: Recipe, reserve: float) -> None:
        configs: dict[str, AnyStage] = {}
        if recipe.stage1.tokens:
            configs["stage1"] = dataclasses.replace(stage1_config(recipe), show_progress=False)
        if recipe.stage2.tokens:
            configs["stage2"] = dataclasses.replace(stage2_config(recipe), show_progress=False)
        speeds: dict[str, Speed] = {}
        for stage, config in configs.items():
            with self.record.phase(f"{stage}_speed"):
                speeds[stage] = measure_speed(stage, model, rows, config)
        self.record.row["stages"] = {}
        first = 0
        for stage in configs:
            # what is left is shared out anew before every stage, by what the one before really took
            waiting = {name: config.tokens for name, config in configs.items() if name not in self.record.row["stages"]}
            tokens = fit_tokens(waiting, speeds, self.record.left - reserve)[stage]
            first = self._train_stage(model, rows, dataclasses.replace(configs[stage], tokens=tokens), stage, first)
            self.record.row["stages"][stage] |= {
                "asked_tokens": configs[stage].tokens,
                "measured_tokens_per_s": round(speeds[stage].tokens_per_s, 1),
            }
            if tokens < configs[stage].tokens:
                self.record.note(
                    f"{stage} had {tokens:,} tokens in place of {configs[stage].tokens:,}: "
                    f"{speeds[stage].tokens_per_s:,.0f} tokens/s leave no time for more in {self.record.seconds:.0f} s"
                )
        trained = sum(stage["tokens"] for stage in self.record.row["stages"].values())
        passes = trained / rows.num_tokens
        self.record.row["passes"] = round(passes, 4)
        if passes > 1:
            self.record.note(f"{trained:,} tokens are {passes:.2f} passes over the {rows.num_tokens:,} that there are")
        self.record.write()

    def _train_stage(self, model: PreTrainedModel, rows: PackedRows, config: AnyStage, stage: str, first: int) -> int:
        """Train; return the first row of the stage after this one."""
        with self.record.phase(stage):
            done = train(stage, model, rows, first, config, self.scratch, self.options.output / LOG)
            self.record.row["stages"][stage] = {
                "tokens": done.tokens,
                "steps": done.steps,
                "first_loss": done.first_loss,
                "last_loss": done.last_loss,
                "seconds": done.wall_s,
                "tokens_per_s": round(done.tokens / max(done.wall_s, 1e-9), 1),
                "trainable_parameters": done.trainable_parameters,
            }
            self._save(model)
        return first + done.tokens // rows.seq_len


def _has_control(model: PreTrainedModel) -> bool:
    return all(layer.mixer is None or layer.mixer_config.window for layer in converted_layers(model))


def _batch(row: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: column[None].to(device) for name, column in row.items()}
