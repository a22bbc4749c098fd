"""Run a recipe from random weights to the measured checkpoint, one resumable stage after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subquad.convert.export import export_student
from subquad.convert.modelcard import ModelCard, write_model_card
from subquad.convert.plan import ConversionPlan
from subquad.distill import StageResult, build_token_dataset
from subquad.errors import ConfigError, DataError, OutputError
from subquad.eval.loss import POSITION_BUCKETS, Row, evaluate_loss
from subquad.eval.records import Metric
from subquad.eval.storage import collect_versions, device_name, git_commit
from subquad.models import SubquadLlamaForCausalLM
from subquad.pretrain.model import build_model, plan_model
from subquad.pretrain.recall import chance, evaluate_recall, recall_rows
from subquad.pretrain.results import BucketLoss, PretrainResults, load_pretrain_results, save_pretrain_results
from subquad.pretrain.schema import PretrainRecipe, load_pretrain_recipe
from subquad.pretrain.tokenizer import provide_tokenizer
from subquad.pretrain.training import STAGE, pretrain_config, pretrain_model
from subquad.recipes.measure import mixer_counts
from subquad.recipes.progress import progress_bar
from subquad.recipes.run_folder import RECIPE_FILE, RunFolder
from subquad.recipes.runner import explained_write_errors, only_run, open_process
from subquad.recipes.settings import text_source

STAGES = ("train", "export", "evaluate")
# held-out rows are the same for every seed; training rows are drawn with the recipe's own
_EVAL_ROW_SEED = 3


class RowStore:
    """Tokenised rows, kept so that the runs of a study that share them do not tokenise them again."""

    def __init__(self) -> None:
        """Start empty."""
        self._found: dict[str, Dataset | IterableDataset] = {}

    def get(self, key: str, make: Callable[[], Dataset | IterableDataset]) -> Dataset | IterableDataset:
        """Return the rows of a key, made at the first call.

        Args:
            key: everything the rows depend on.
            make: makes them.

        Returns:
            The rows.
        """
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]


class PretrainRun:
    """What the stages of one run share.

    Attributes:
        recipe: the recipe.
        folder: the folder of the run.
        state: which of the processes of the run this one is, and its device.
        console: where progress goes.
        command: command that repeats the run.
    """

    def __init__(
        self,
        recipe: PretrainRecipe,
        state: PartialState,
        console: Console,
        command: str,
        tokenizer_dir: Path | None = None,
        store: RowStore | None = None,
    ) -> None:
        """Refer to a run; nothing is loaded.

        Args:
            recipe: the recipe.
            state: which process this is.
            console: where progress goes.
            command: command that repeats the run.
            tokenizer_dir: folder of the tokenizer that is trained; None is `tokenizer` in the run's folder.
            store: rows shared with other runs; None shares none.
        """
        self.recipe = recipe
        self.folder = RunFolder(recipe.run_dir, STAGES, load_pretrain_recipe)
        self.state = state
        self.console = console
        self.command = command
        self._tokenizer_dir = tokenizer_dir or self.folder.path / "tokenizer"
        self._store = store or RowStore()

    @property
    def model_dir(self) -> Path:
        """Folder of the exported checkpoint."""
        return self.folder.path / "model"

    @cached_property
    def plan(self) -> ConversionPlan:
        """The mixer of every layer."""
        return plan_model(self.recipe)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None for recall, which makes its own tokens."""
        if self.recipe.recall is not None:
            return None
        with self.state.main_process_first():
            return provide_tokenizer(self.recipe.tokenizer, text_source(self.recipe.data.train), self._tokenizer_dir)

    def build(self) -> SubquadLlamaForCausalLM:
        """Return the model with the random weights of the recipe's seed."""
        recall, tokenizer = self.recipe.recall, self.tokenizer
        if recall is not None:
            return build_model(self.recipe, recall.vocab_size)
        assert tokenizer is not None, "text has a tokenizer"
        return build_model(self.recipe, len(tokenizer), tokenizer.eos_token_id)

    def training_rows(self) -> Dataset | IterableDataset:
        """Return the training rows, the same at every call."""
        recipe = self.recipe
        seq_len, tokens = recipe.data.seq_len, recipe.training.tokens
        if recipe.recall is not None:
            recall = recipe.recall
            key = f"recall {recall!r} {seq_len} {tokens} {recipe.seed}"
            return self._store.get(key, lambda: recall_rows(recall, tokens // seq_len, seq_len, recipe.seed))
        return self._text_rows("train", seq_len, tokens, recipe.seed)

    def held_out_rows(self) -> list[Row]:
        """Return the held-out rows of text, the same for every run with the same data and tokenizer."""
        return list(self._held_out())

    def _held_out(self) -> Dataset | IterableDataset:
        return self._text_rows("eval", self.recipe.eval_seq_len, self.recipe.eval.tokens, _EVAL_ROW_SEED)

    def check_held_out(self) -> None:
        """Make the held-out rows, so that text that is missing or too short is refused before the training."""
        if self.recipe.recall is None and self.state.is_main_process:
            self._held_out()

    def trained(self) -> tuple[SubquadLlamaForCausalLM, StageResult]:
        """Return the trained model and what training did, from where an interrupted one stopped."""
        model = self.build()
        model.to(self.state.device)
        config = pretrain_config(self.recipe)
        result = pretrain_model(model, self.training_rows(), config, self.folder.work_dir(STAGE), self.folder.log_file)
        if config.fsdp:
            # FSDP leaves every process with a part of the weights: the finished checkpoint has them in one piece
            whole = pretrain_config(self.recipe.model_copy(update={"trainer": self._unsharded()}))
            model = self.build().to(self.state.device)
            pretrain_model(model, self.training_rows(), whole, self.folder.work_dir(STAGE), self.folder.log_file)
        return model, result

    def _unsharded(self) -> object:
        return self.recipe.trainer.model_copy(update={"fsdp": False})

    def _text_rows(self, part: str, seq_len: int, tokens: int, seed: int) -> Dataset | IterableDataset:
        section = getattr(self.recipe.data, part)
        tokenizer = self.tokenizer
        assert tokenizer is not None, "text has a tokenizer"
        key = f"{section!r} {seq_len} {tokens} {seed} {self.recipe.tokenizer!r}"
        return self._store.get(key, lambda: build_token_dataset(text_source(section), tokenizer, seq_len, seed, tokens))


def run_pretrain(
    recipe: PretrainRecipe,
    *,
    resume: bool = True,
    command: str | None = None,
    tokenizer_dir: Path | None = None,
    store: RowStore | None = None,
) -> PretrainResults | None:
    """Train, export and measure the model of a recipe, or continue an interrupted run.

    Started by `accelerate launch` in several processes, all of them train; the main one measures and writes.

    Args:
        recipe: the recipe.
        resume: False removes an earlier run in the recipe's folder first.
        command: command that repeats the run; None names the recipe in the run's folder.
        tokenizer_dir: folder of the tokenizer that is trained; None is `tokenizer` in the run's folder.
        store: rows shared with other runs of the process; None shares none.

    Returns:
        What was measured; None in all processes but the main one.

    Raises:
        ConfigError: the mixers do not fit the model.
        DataError: text or tokenizer are missing, empty or too short.
        OutputError: the folder holds another run, is in use by another process, or cannot be written (full disk).
        TrainingError: training diverged; the last good checkpoint was kept.
    """
    state, console = open_process()
    command = command or f"subquad pretrain {recipe.run_dir / RECIPE_FILE} output_dir=FOLDER"
    run = PretrainRun(recipe, state, console, command, tokenizer_dir, store)
    plan = run.plan
    with only_run(run.folder, state), explained_write_errors(run.folder):
        if state.is_main_process:
            run.folder.claim(recipe, fresh=not resume)
        state.wait_for_everyone()
        with _unclaimed_if_untrained(run):
            # by every process: the others wait while the main one trains it, and the main one alone measures
            tokenizer = run.tokenizer
            if not run.folder.finished("export"):
                run.check_held_out()
                _train_and_export(run, tokenizer)
        if not state.is_main_process:
            return None
        if not run.folder.finished("evaluate"):
            start = time.monotonic()
            results = _measure(run, plan)
            path = save_pretrain_results(results, run.folder.path)
            write_model_card(run.model_dir, _card(run, results))
            run.folder.finish("evaluate", {}, time.monotonic() - start, (path,))
        return load_pretrain_results(run.folder.path)


@contextmanager
def _unclaimed_if_untrained(run: PretrainRun) -> Iterator[None]:
    """Clear the folder of a run whose data or settings were refused, so that it is not in the mended recipe's way."""
    try:
        yield
    except (ConfigError, DataError):
        trained = run.folder.work_dir(STAGE).exists() or run.folder.stages_dir.exists()
        if run.state.is_main_process and not trained:
            run.folder.clear()
        raise


def _train_and_export(run: PretrainRun, tokenizer: PreTrainedTokenizerBase | None) -> None:
    # the exported checkpoint is what counts: without it the trained weights are read from their last checkpoint
    model, result = run.trained()
    if run.state.is_main_process and not math.isfinite(result.last_loss):
        raise OutputError(
            f"{run.folder.log_file} has no losses of this training, although its checkpoints are there. Put the log "
            f"back, or remove {run.folder.work_dir(STAGE)} and run the same command again to train anew."
        )
    run.console.print(
        f"{run.recipe.name}: {result.tokens:,} tokens, loss {result.first_loss:.4f} → {result.last_loss:.4f}."
    )
    if run.state.is_main_process:
        facts = {"tokens": result.tokens, "last_loss": result.last_loss}
        run.folder.finish("train", facts, result.wall_s)
        start = time.monotonic()
        folder = export_student(model, tokenizer, run.model_dir, _card(run))
        run.folder.finish("export", {}, time.monotonic() - start, (folder,))
    run.state.wait_for_everyone()


def _measure(run: PretrainRun, plan: ConversionPlan) -> PretrainResults:
    """Measure the exported checkpoint, read back."""
    recipe, recall = run.recipe, run.recipe.recall
    model = _exported(run).to(run.state.device)
    cache_bytes, kv_bytes = plan.total_cache_bytes(plan.lengths[-1])
    facts = run.folder.result("train")
    loss, by_position = (None, []) if recall is not None else _text_loss(run, model)
    return PretrainResults(
        name=recipe.name,
        seed=recipe.seed,
        mixers=mixer_counts(plan),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        mixer_parameters=plan.added_parameters,
        cache_bytes=cache_bytes,
        kv_bytes=kv_bytes,
        data=text_source(recipe.data.eval).describe() if recall is None else "synthetic recall",
        loss=loss,
        by_position=by_position,
        recall={} if recall is None else evaluate_recall(model, recall),
        chance=None if recall is None else chance(recall),
        train_loss=facts["last_loss"],
        tokens=facts["tokens"],
        train_seconds=run.folder.seconds()["train"],
        device=device_name(run.state.device),
        versions=collect_versions(),
        commit=git_commit(),
        command=run.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _exported(run: PretrainRun) -> SubquadLlamaForCausalLM:
    try:
        return SubquadLlamaForCausalLM.from_pretrained(run.model_dir).eval()
    except Exception as error:
        # damaged files make the readers raise errors of several unrelated classes
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise OutputError(
            f"the exported model {run.model_dir} cannot be read: {first_line}. Remove {run.model_dir} and run the same "
            "command again: it is written anew from the last checkpoint."
        ) from error


def _text_loss(run: PretrainRun, model: PreTrainedModel) -> tuple[Metric, list[BucketLoss]]:
    settings = run.recipe.eval
    with progress_bar("held-out loss", run.console) as advance:
        found = evaluate_loss(
            model,
            run.held_out_rows(),
            mode=None,
            position_buckets=settings.position_buckets or POSITION_BUCKETS,
            batch_size=settings.batch_size,
            progress=advance,
        )
    loss = Metric(value=found.loss, standard_error=found.standard_error, num=found.num_tokens, higher_is_better=False)
    buckets = [
        BucketLoss(
            start=each.start,
            end=each.end,
            num_tokens=each.num_tokens,
            loss=each.loss,
            standard_error=each.standard_error,
        )
        for each in found.by_position
    ]
    return loss, buckets


def _card(run: PretrainRun, results: PretrainResults | None = None) -> ModelCard:
    losses = {} if results is None or results.loss is None else {"this model": results.loss.value}
    return ModelCard(
        run.recipe.name,
        None,
        mixer_counts(run.plan),
        losses=losses,
        loss_data="" if results is None else results.data,
        training_tokens={} if results is None else {"from random weights": results.tokens},
        command=run.command,
        versions={} if results is None else results.versions,
    )
