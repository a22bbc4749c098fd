"""The needle-in-a-haystack task: the same prompts for every model, one record for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from subquad.errors import ConfigError
from subquad.eval.contestants import Clock, Contestant
from subquad.eval.niah.measure import measure
from subquad.eval.niah.prompts import NiahPrompt, PromptSet, build_prompts
from subquad.eval.niah.samples import save_samples
from subquad.eval.niah.settings import NiahSettings
from subquad.eval.niah.summary import baselines, context_notes, lengths_beyond, make_details, make_metrics, metric_notes
from subquad.eval.records import EvalRecord, save_record

Progress = Callable[[int, int], None]


def run_niah(
    contestants: Sequence[Contestant],
    settings: NiahSettings,
    folder: Path,
    *,
    command: str,
    progress: Progress | None = None,
) -> list[EvalRecord]:
    """Measure whether models find a key in a long prompt, by length of the prompt and depth of the key.

    A model whose record has equal settings and prompts is not measured again, so an interrupted call goes on with the
    first model that is not finished. Prompts that exceed a model's context are noted as not measured, not scored 0.

    Args:
        contestants: The models; those with equal tokenizers get the same tokens.
        settings: The grid and what is hidden in it.
        folder: The evaluation folder. Writes `evals/<task>/<model>.json` and `evals/<task>/samples/<model>.jsonl`.
        command: Command that repeats the measurement.
        progress: Called with (prompts done, prompts in all) after each batch.

    Returns:
        One record per model, in their order. Metrics: `accuracy` (exact answers), `values_named` (several values only),
        `key_logprob` and `key_logprob_per_token` (nats), `key_rank1`, `key_reciprocal_rank`.

    Raises:
        ConfigError: No model, a length too short for the needle, or too few tokens for an answer.
        DataError: A haystack that cannot be read or is too short, or a tokenizer that cannot write the keys.
        TrainingError: A model gives probabilities that are not finite.
        OutputError: The folder cannot be written, or holds a damaged record.
    """
    if not contestants:
        raise ConfigError("there is no model to look for needles with; give at least one")
    settings = settings.resolved(max(contestant.context_length for contestant in contestants))
    entries = _entries(contestants, settings, folder)
    count = _Counter(sum(len(entry.fitting) for entry in entries if entry.finished is None), progress)
    return [entry.finished or _evaluate(entry, settings, folder, command, count) for entry in entries]


class _Entry(NamedTuple):
    """A model, its prompts, those it has room for, lengths it has none for, and its record if there is one."""

    contestant: Contestant
    prompts: PromptSet
    fitting: list[NiahPrompt]
    left_out: list[int]
    finished: EvalRecord | None
    notes: list[str]


class _Counter:
    """Counts prompts over all models."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def advance(self, num: int) -> None:
        self._done += num
        if self._progress is not None:
            self._progress(self._done, self._total)


def _entries(contestants: Sequence[Contestant], settings: NiahSettings, folder: Path) -> list[_Entry]:
    built: dict[int, PromptSet] = {}
    entries: list[_Entry] = []
    for contestant in contestants:
        found = built.get(id(contestant.tokenizer))
        if found is None:
            found = built[id(contestant.tokenizer)] = build_prompts(contestant.tokenizer, settings)
        left_out = [] if settings.beyond_context else lengths_beyond(contestant.context_length, settings)
        fitting = [prompt for prompt in found.prompts if prompt.length not in left_out]
        record = contestant.finished_record(folder, settings.task, settings.identity())
        # The haystack's file may have changed under the same name.
        same = record is not None and record.provenance.prompts_hash == found.prompts_hash
        notes = context_notes(contestant.context_length, settings)
        if entries and entries[0].prompts.prompts_hash != found.prompts_hash:
            notes.append(
                f"Its tokenizer is not that of {contestants[0].name}: keys and depths are the same, tokens are not."
            )
        entries.append(_Entry(contestant, found, fitting, left_out, record if same else None, notes))
    return entries


def _evaluate(entry: _Entry, settings: NiahSettings, folder: Path, command: str, count: _Counter) -> EvalRecord:
    clock = Clock.start()
    outcomes, cost = measure(entry.contestant, entry.fitting, settings, count.advance)
    reason = f"exceeds the context of {entry.contestant.context_length:,} tokens"
    metrics = make_metrics(outcomes)
    record = EvalRecord(
        task=settings.task,
        model=entry.contestant.name,
        metrics=metrics,
        baselines=baselines(settings),
        settings=settings.identity(),
        details=make_details(entry.fitting, outcomes, cost, [(length, reason) for length in entry.left_out]),
        notes=[*entry.notes, *metric_notes(metrics)],
        provenance=clock.provenance(
            entry.contestant,
            seed=settings.seed,
            batch_size=settings.batch_size,
            prompts_hash=entry.prompts.prompts_hash,
            command=command,
        ),
    )
    # The record last: it is what says that the model is finished.
    save_samples(outcomes, folder, record.task, record.model)
    save_record(record, folder)
    return record
