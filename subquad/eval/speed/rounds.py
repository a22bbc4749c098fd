"""Time models in turns, so that a machine that slows down or is busy slows all of them down alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from subquad.errors import ConfigError, TrainingError
from subquad.eval.contestants import Contestant
from subquad.eval.speed.settings import SpeedSettings
from subquad.layers.cache import cache_argument

# Seconds, of a clock read when the device has done everything it was given.
Now = Callable[[torch.device], float]
# By model and length, one entry per round.
Rounds = dict[tuple[str, int], list["RoundSeconds"]]


class RoundSeconds(NamedTuple):
    """One round of one model at one length, in seconds."""

    prefill: float
    decode: float


def synchronized_time(device: torch.device) -> float:
    """Return the time in seconds once the device is idle."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def measure_rounds(
    lengths: Mapping[int, Sequence[Contestant]],
    tokens: Tensor,
    settings: SpeedSettings,
    *,
    now: Now = synchronized_time,
    progress: Callable[[int, int], None] | None = None,
) -> Rounds:
    """Time every model at every length once per round.

    The first round compiles and warms up, and does not count. Each round starts with the next model of the list, so
    that none is always the one that comes after the same other.

    Args:
        lengths: Prompt length to the models that are measured there.
        tokens: Token ids `[B, longest length + new_tokens]`, the same for all models.
        settings: Rounds and tokens to write.
        now: The clock.
        progress: Called with (measurements done, measurements in all).

    Returns:
        Seconds of the rounds that count.

    Raises:
        ConfigError: A model runs out of memory.
        TrainingError: A model's logits are not finite: the speed of a broken model says nothing.
    """
    found: Rounds = {}
    done, total = 0, (settings.repeats + 1) * sum(map(len, lengths.values()))
    for round_index in range(settings.repeats + 1):
        for length, contestants in lengths.items():
            first = round_index % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                seconds = _time_one(contestant, tokens[:, : length + settings.new_tokens], length, now)
                if round_index:
                    found.setdefault((contestant.name, length), []).append(seconds)
                done += 1
                if progress is not None:
                    progress(done, total)
    return found


@torch.no_grad()
def _time_one(contestant: Contestant, tokens: Tensor, length: int, now: Now) -> RoundSeconds:
    model, device = contestant.model, contestant.model.device
    tokens = tokens.to(device)
    prompt, steps = tokens[:, :length], tokens[:, length:].split(1, dim=1)
    # What `generate` asks for: a cache, and the logits of the last token.
    how = {"use_cache": True, "logits_to_keep": 1, cache_argument(model): DynamicCache()}
    try:
        with contestant.active():
            started = now(device)
            logits = model(prompt, **how).logits
            read = now(device)
            for step in steps:
                logits = model(step, **how).logits
            written = now(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{contestant.name} ran out of memory on {device} at a length of {length} tokens and a batch size of "
            f"{tokens.shape[0]}; lower speed.lengths or speed.batch_size"
        ) from error
    if not logits.isfinite().all():
        raise TrainingError(
            f"{contestant.name} gives logits that are not finite after {tokens.shape[1]} tokens, so its speed says "
            "nothing; measure its loss to find out where it breaks"
        )
    return RoundSeconds(read - started, written - read)
