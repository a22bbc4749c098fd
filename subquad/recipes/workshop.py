"""The model of a run as the stages need it: loaded when first asked for, in the state the run has reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subquad.convert.plan import ConversionPlan, plan_conversion
from subquad.convert.source import SourceInfo, Teacher, inspect_source, load_teacher
from subquad.convert.surgery import apply_plan
from subquad.distill import StageResult, build_token_dataset, run_stage1, run_stage2
from subquad.distill.checkpoints import load_part, save_part
from subquad.distill.recall import RecallConfig, add_recall
from subquad.errors import DataError
from subquad.eval.loss import Row
from subquad.models import SubquadLlamaForCausalLM
from subquad.recipes.checkpoint import load_checkpoint
from subquad.recipes.run_folder import RunFolder
from subquad.recipes.schema import TRAINING_STAGES, Recipe
from subquad.recipes.settings import recall_config, stage1_config, stage2_config, text_source, weights_dtype
from subquad.recipes.text_sections import EmbeddedText, HubText, TextFiles

_MIXER_MARK = ".mixer."
_AGAIN = "Remove it to make it again, then run the recipe again; --fresh starts anew."
_KEY_SCORE_MARK = ".key_score."
# stages draw their rows with seeds of their own, so that stage 2 does not repeat the rows of stage 1
_ROW_SEEDS = {"calibrate": 0, "stage1": 1, "stage2": 2, "eval": 3, "heads": 4, "keys": 5}


class Workshop:
    """What the stages of one run share.

    Attributes:
        recipe: the recipe.
        folder: the folder of the run.
        state: which of the processes of the run this one is, and its device.
        console: where progress goes; quiet in all processes but the main one.
        command: command that repeats the run.
    """

    def __init__(self, recipe: Recipe, state: PartialState, console: Console, command: str) -> None:
        """Refer to a run; nothing is loaded.

        Args:
            recipe: the recipe.
            state: which process this is.
            console: where progress goes.
            command: command that repeats the run.
        """
        self.recipe = recipe
        self.folder = RunFolder(recipe.run_dir)
        self.state = state
        self.console = console
        self.command = command

    @property
    def calibrated_file(self) -> Path:
        """File with the mixers' parameters after calibration."""
        return self.folder.stages_dir / "calibrated.safetensors"

    @property
    def key_scores_file(self) -> Path:
        """File with the scores of kept keys that were fitted after training."""
        return self.folder.stages_dir / "key_scores.safetensors"

    @cached_property
    def info(self) -> SourceInfo:
        """What is known about the teacher without its weights."""
        return inspect_source(self.recipe.model.source)

    @cached_property
    def plan(self) -> ConversionPlan:
        """What every layer becomes; where the run chooses exact heads, the stage `plan` must have chosen them."""
        if not self.recipe.convert.chooses_heads:
            return self.plan_with(self.recipe.convert.named_heads)
        chosen = self.folder.result("plan")["exact_heads"]["exact_kv_heads"]
        return self.plan_with({int(layer): tuple(heads) for layer, heads in chosen.items()})

    @cached_property
    def base_plan(self) -> ConversionPlan:
        """What every layer becomes, without the heads that the run chooses to keep."""
        return self.plan_with({})

    def plan_with(self, exact_kv_heads: Mapping[int, Sequence[int]]) -> ConversionPlan:
        """Return what every layer becomes where these key/value heads, by layer, stay softmax."""
        convert = self.recipe.convert
        return plan_conversion(
            self.info.hf_config, convert.mixer, convert.layers, exact_kv_heads=exact_kv_heads, dtype=self.dtype
        )

    @cached_property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return weights_dtype(self.recipe, self.info.hf_config)

    @property
    def keeps_keys(self) -> bool:
        """Whether a converted layer keeps keys behind its window."""
        return any(mixer.kept_keys for mixer in self.base_plan.mixers.values())

    @property
    def has_control(self) -> bool:
        """Whether there is a window-only control: every converted layer has a window."""
        return all(mixer.window for mixer in self.base_plan.mixers.values())

    def load_teacher(self) -> Teacher:
        """Load the teacher anew, on this process's device."""
        teacher = load_teacher(self.recipe.model.source, self.dtype)
        teacher.model.to(self.state.device)
        return teacher

    def converted(self) -> SubquadLlamaForCausalLM:
        """Return a new converted model, untrained; calibrated if the run got that far."""
        teacher = self.load_teacher()
        self.__dict__["tokenizer"] = self._require_tokenizer(teacher.tokenizer)
        model = apply_plan(teacher.model, self.plan).eval()
        if self.folder.finished("calibrate"):
            load_part(model, self.calibrated_file, _MIXER_MARK, _AGAIN)
        return model

    @cached_property
    def student(self) -> SubquadLlamaForCausalLM:
        """The converted model, with what the finished stages have found and trained."""
        model = self.converted()
        for stage in TRAINING_STAGES:
            if self.folder.finished(stage) and getattr(self.recipe, stage).tokens:
                # a finished stage is only loaded, in one piece even where it was trained sharded
                self._train(stage, model)
        if self.folder.finished("keys") and self.folder.result("keys")["tokens"]:
            load_part(model, self.key_scores_file, _KEY_SCORE_MARK, _AGAIN)
        return model

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's tokenizer."""
        return self._require_tokenizer(self.load_teacher().tokenizer)

    def train(self, stage: str) -> StageResult:
        """Run a training stage on the student, or continue it from its last checkpoint.

        Args:
            stage: `stage1` or `stage2`.

        Returns:
            What was done.
        """
        result = self._train(stage, self.student)
        if self.recipe.trainer.fsdp:
            # FSDP leaves every process with a part of the weights: the next use loads the stage's checkpoint
            del self.student
        return result

    def _train(self, stage: str, model: SubquadLlamaForCausalLM) -> StageResult:
        work_dir, log = self.folder.work_dir(stage), self.folder.log_file
        if stage == "stage1":
            settings = stage1_config(self.recipe)
            return run_stage1(model, self.rows(stage, settings.tokens), settings, work_dir, log)
        config = stage2_config(self.recipe)
        teacher = self.load_teacher().model if config.full else None
        return run_stage2(model, self.rows(stage, config.tokens), config, work_dir, log, teacher)

    def save_mixers(self) -> Path:
        """Write the mixers' parameters and buffers to `calibrated_file`; only the main process writes."""
        return self._save(self.calibrated_file, _MIXER_MARK)

    def save_key_scores(self) -> Path:
        """Write the scores of kept keys to `key_scores_file`; only the main process writes."""
        return self._save(self.key_scores_file, _KEY_SCORE_MARK)

    def _save(self, path: Path, mark: str) -> Path:
        return save_part(self.student, path, mark) if self.state.is_main_process else path

    def exported_student(self) -> PreTrainedModel:
        """Load the exported checkpoint as its users will."""
        return load_checkpoint(str(self.folder.student_dir), self.dtype).model.to(self.state.device)

    def rows(self, stage: str, tokens: int) -> Dataset | IterableDataset:
        """Return packed training rows of a stage.

        Args:
            stage: name of the stage.
            tokens: how many tokens it takes.

        Returns:
            Rows of `data.seq_len` tokens, or of the stage's own `seq_len`, the same at every call; with recall in those
            of the training stages, and those that kept keys are fitted on.
        """
        data = self.recipe.data
        rows = self._rows(data.train, self.recipe.stage_seq_len(stage), stage, tokens)
        recall = recall_config(data.recall) if data.recall is not None and stage in TRAINING_STAGES else None
        if stage == "keys" and self.recipe.calibrate.key_recall:
            recall = RecallConfig(share=self.recipe.calibrate.key_recall)
        return rows if recall is None else add_recall(rows, self.tokenizer, recall, self._seed(stage))

    def batches(self, stage: str, tokens: int) -> list[dict[str, Tensor]]:
        """Return the rows of a stage as batches of one on this process's device; arguments as for `rows`."""
        return self.as_batches(self.rows(stage, tokens))

    def key_batches(self) -> list[dict[str, Tensor]]:
        """Return the rows that the scores of kept keys are fitted on; none where no layer keeps keys."""
        if not self.keeps_keys:
            return []
        return self.batches("keys", self.recipe.calibrate.key_tokens)

    def as_batches(self, rows: Dataset | IterableDataset) -> list[dict[str, Tensor]]:
        """Return rows as batches of one on this process's device."""
        return [{name: column[None].to(self.state.device) for name, column in row.items()} for row in rows]

    @cached_property
    def held_out_rows(self) -> list[Row]:
        """The held-out rows, the same for every model."""
        rows = self._rows(self.recipe.data.eval, self.recipe.eval_seq_len, "eval", self.recipe.eval.tokens)
        return list(rows)

    def _rows(
        self, section: EmbeddedText | TextFiles | HubText, seq_len: int, stage: str, tokens: int
    ) -> Dataset | IterableDataset:
        return build_token_dataset(text_source(section), self.tokenizer, seq_len, self._seed(stage), tokens)

    def _seed(self, stage: str) -> int:
        return self.recipe.seed + _ROW_SEEDS[stage]

    def _require_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
        if tokenizer is None:
            raise DataError(
                f"{self.recipe.model.source} has no tokenizer, and a run needs one to read text. Put the tokenizer's "
                "files (tokenizer.json, tokenizer_config.json) beside the weights."
            )
        return tokenizer
