"""The speed task: every model timed in turns in one call, one record for each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.errors import ConfigError
from subquad.eval.contestants import Clock, Contestant
from subquad.eval.records import EvalRecord, Provenance, hash_prompts, save_record
from subquad.eval.speed.rounds import Now, Rounds, RoundSeconds, measure_rounds, synchronized_time
from subquad.eval.speed.settings import SpeedSettings
from subquad.eval.speed.timings import PHASES, TIMINGS, Phase, Timing
from subquad.eval.storage import collect_versions, device_name, git_commit

TASK = "speed"
REFERENCE = "teacher"
CALL = "call"
_ABSOLUTE = (
    "The others' speeds are ratios to this model, so it has none of its own. Tokens per second stand in "
    "details.timings; they are those of this machine, as busy as it was."
)


def run_speed(
    contestants: Sequence[Contestant],
    settings: SpeedSettings,
    folder: Path,
    *,
    command: str,
    progress: Callable[[int, int], None] | None = None,
    now: Now = synchronized_time,
) -> list[EvalRecord]:
    """Measure how fast models read a prompt and write tokens, as ratios to the teacher.

    Ratios need both models in the same call, on a machine that is as busy for the one as for the other. So all models
    are measured anew unless every one has a record of equal settings, device, threads, versions and commit, all from
    one call. Lengths beyond a model's context, or the teacher's, are noted as not measured.

    Args:
        contestants: The models, one of them `teacher`, the softmax path that the others are compared with.
        settings: Lengths, tokens and rounds.
        folder: The evaluation folder. Writes `evals/speed/<model>.json` when everything is measured.
        command: Command that repeats the measurement.
        progress: Called with (measurements done, measurements in all).
        now: Clock in seconds that waits for the device it is given.

    Returns:
        One record per model, in their order. Metrics `prefill_ratio_<length>` and `decode_ratio_<length>`: the
        teacher's time over the model's, median over rounds, with a bootstrap standard error; the teacher has none.
        `details["timings"]` has the seconds of every round and tokens per second.

    Raises:
        ConfigError: No teacher, nothing to compare it with, no room for a prompt, or too little memory.
        TrainingError: A model gives logits that are not finite.
        OutputError: The folder cannot be written, or holds a damaged record.
    """
    teacher = next((contestant for contestant in contestants if contestant.name == REFERENCE), None)
    if teacher is None or len(contestants) < 2:
        names = ", ".join(contestant.name for contestant in contestants) or "no model"
        raise ConfigError(
            f"a speed is a ratio to the {REFERENCE} and needs it with at least one other model, got {names}; "
            "evaluate a converted checkpoint, or add one with --against"
        )
    settings = settings.resolved(teacher.context_length)
    device = teacher.model.device
    machine = {"device": device_name(device), "num_threads": torch.get_num_threads()}
    chosen = settings.model_dump(mode="json") | machine
    finished = _finished(contestants, folder, chosen)
    if finished is not None:
        return finished
    clock = Clock.start()
    tokens = _random_tokens(contestants, settings)
    rounds = measure_rounds(_by_length(contestants, teacher, settings), tokens, settings, now=now, progress=progress)
    call = _Call(teacher, settings, chosen, rounds, identity=uuid.uuid4().hex)
    prompts = hash_prompts(tokens.tolist())
    how: dict[str, Any] = {
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "prompts_hash": prompts,
        "command": command,
    }
    records = [call.record(contestant, clock.provenance(contestant, **how)) for contestant in contestants]
    for record in records:
        save_record(record, folder)
    return records


def _finished(contestants: Sequence[Contestant], folder: Path, chosen: dict[str, Any]) -> list[EvalRecord] | None:
    """Return the records of all models, or None unless they are of one call with this very software."""
    versions, commit = collect_versions(), git_commit()
    records = []
    for contestant in contestants:
        record = contestant.finished_record(folder, TASK, chosen)
        if record is None or (record.provenance.versions, record.provenance.commit) != (versions, commit):
            return None
        records.append(record)
    return records if len({record.details.get(CALL) for record in records}) == 1 else None


def _by_length(
    contestants: Sequence[Contestant], teacher: Contestant, settings: SpeedSettings
) -> dict[int, list[Contestant]]:
    """Return the models with room for each length, for the lengths at which the teacher has room."""
    return {
        length: [contestant for contestant in contestants if settings.fits(length, contestant.context_length)]
        for length in settings.lengths or ()
        if settings.fits(length, teacher.context_length)
    }


def _random_tokens(contestants: Sequence[Contestant], settings: SpeedSettings) -> Tensor:
    """Draw `[B, longest length + new_tokens]` of tokens that every model knows."""
    vocab_size = min(int(contestant.model.config.vocab_size) for contestant in contestants)
    shape = (settings.batch_size, max(settings.lengths or ()) + settings.new_tokens)
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(settings.seed))


class _Call(NamedTuple):
    """What one call measured."""

    teacher: Contestant
    settings: SpeedSettings
    chosen: dict[str, Any]
    rounds: Rounds
    identity: str

    def record(self, contestant: Contestant, provenance: Provenance) -> EvalRecord:
        timings = self._timings(contestant)
        return EvalRecord(
            task=TASK,
            model=contestant.name,
            metrics={timing.metric_name: timing.metric() for timing in timings if timing.ratios},
            settings=self.chosen,
            details={TIMINGS: [timing.to_dict() for timing in timings], CALL: self.identity},
            notes=[*self._notes(contestant), *self._context_notes(contestant)],
            provenance=provenance,
        )

    def _timings(self, contestant: Contestant) -> list[Timing]:
        found = []
        for length in self.settings.lengths or ():
            own = self.rounds.get((contestant.name, length))
            if own is not None:
                found += [self._timing(phase, length, own, contestant is self.teacher) for phase in PHASES]
        return found

    def _timing(self, phase: Phase, length: int, own: Sequence[RoundSeconds], reference: bool) -> Timing:
        seconds = [getattr(taken, phase) for taken in own]
        theirs = [getattr(taken, phase) for taken in self.rounds[self.teacher.name, length]]
        tokens = length if phase == "prefill" else self.settings.new_tokens
        return Timing(
            phase=phase,
            length=length,
            num_tokens=self.settings.batch_size * tokens,
            seconds=tuple(seconds),
            ratios=() if reference else tuple(t / s for t, s in zip(theirs, seconds, strict=True)),
        )

    def _notes(self, contestant: Contestant) -> list[str]:
        if contestant is self.teacher:
            return [_ABSOLUTE]
        return [
            "Ratios of speed: the teacher's time over the model's, round by round in turns; the value is the median "
            f"over {self.settings.repeats} rounds and its standard error a bootstrap over them. They hold for "
            f"{self.chosen['device']} (threads: {self.chosen['num_threads']})."
        ]

    def _context_notes(self, contestant: Contestant) -> list[str]:
        """Say which lengths the teacher has no room for, then which of the others the model has none for."""
        found = []
        lengths = self.settings.lengths or ()
        for owner in (self.teacher, contestant):
            fitting = tuple(length for length in lengths if self.settings.fits(length, owner.context_length))
            beyond = ", ".join(f"{length:,}" for length in lengths if length not in fitting)
            if beyond:
                found.append(
                    f"Lengths of {beyond} tokens were not measured: with {self.settings.new_tokens} new tokens they "
                    f"exceed the context of {owner.name}, {owner.context_length:,} tokens."
                )
            lengths = fitting
        return found
