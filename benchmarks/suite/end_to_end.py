"""A model of about 1B parameters, teacher against student: a training step, and generation."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.suite.cases import Case, Session
from benchmarks.suite.hardware import Call
from benchmarks.suite.llamas import LlamaShape, random_student
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import Mode, Settings
from benchmarks.suite.timing import measure, percentiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from subquad.layers import AttentionMode

TEACHER: AttentionMode = "teacher"
STUDENT: AttentionMode = "student"
# The first case of a mixer compiles its window and its kernels.
_CASE_SECONDS = 90.0
# Parameters in bfloat16, their gradients, float32 logits and what checkpointing keeps.
_MEMORY_PER_PARAMETER, _MEMORY_PER_LOGIT = 6, 16


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What a mode runs.

    Attributes:
        shape: The model.
        lengths: Tokens of a training sequence and of a prompt.
        mixers: Names of the mixers.
        new_tokens: Tokens generated after the prompt.
        measure_ms: Time for the repetitions of a training step, per mode.
    """

    shape: LlamaShape
    lengths: tuple[int, ...]
    mixers: tuple[str, ...]
    new_tokens: int
    measure_ms: float


# Llama 3.2 1B but for the vocabulary: with 128,256 words the logits of 32k tokens would be most of the memory.
_BILLION = LlamaShape(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=32000,
    max_position_embeddings=131072,
)
_TOY = LlamaShape(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,
    max_position_embeddings=256,
)
SCALES: Mapping[Mode, Scale] = {
    "full": Scale(
        shape=_BILLION, lengths=(32768, 8192), mixers=("2mamba", "2mamba-pure"), new_tokens=128, measure_ms=2500.0
    ),
    "quick": Scale(shape=_BILLION, lengths=(8192,), mixers=("2mamba",), new_tokens=32, measure_ms=1000.0),
    "toy": Scale(shape=_TOY, lengths=(96,), mixers=("2mamba",), new_tokens=6, measure_ms=2.0),
}


def end_to_end_cases(settings: Settings) -> list[Case]:
    """Return the cases of a mode.

    Args:
        settings: The run's settings.

    Returns:
        Per mixer and length, a training step and a generation.
    """
    scale = SCALES[settings.mode]
    cases = []
    for mixer in scale.mixers:
        for seq_len in scale.lengths:
            for name, function in (("training", measure_training), ("generation", measure_generation)):
                run = functools.partial(_if_it_fits, function, mixer, seq_len)
                cases.append(Case("end_to_end", f"{name} {mixer} T{seq_len}", run, limit_s=_CASE_SECONDS, alone=True))
    return cases


def _if_it_fits(function: Any, mixer: str, seq_len: int, session: Session) -> list[Row]:
    scale = SCALES[session.settings.mode]
    need = _MEMORY_PER_PARAMETER * num_parameters(scale.shape) + _MEMORY_PER_LOGIT * seq_len * scale.shape.vocab_size
    free = session.hardware.free_bytes()
    config = {"mixer": mixer, "tokens": seq_len, "batch": 1, "model": asdict(scale.shape)}
    if need > free:
        reason = f"needs about {need / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
        return [Row(what="case", status="skipped", reason=reason, config=config)]
    model = random_student(
        scale.shape, mixer, device=session.hardware.device, dtype=torch.bfloat16, seed=session.settings.seed
    )
    generator = torch.Generator().manual_seed(session.settings.seed)
    tokens = torch.randint(scale.shape.vocab_size, (1, seq_len), generator=generator).to(session.hardware.device)
    return function(model, tokens, config, session)


def num_parameters(shape: LlamaShape) -> int:
    """Return the parameters of a Llama without tied embeddings, norms left out."""
    heads = shape.num_attention_heads + shape.num_key_value_heads
    attention = 2 * shape.hidden_size * heads * shape.head_dim
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_hidden_layers * layer + 2 * shape.vocab_size * shape.hidden_size


def measure_training(model: PreTrainedModel, tokens: Tensor, config: dict[str, Any], session: Session) -> list[Row]:
    """Time forward and backward of the next-token loss, in turns: bfloat16 autocast, gradient checkpointing.

    All parameters have gradients, in both modes.
    """
    from subquad.layers import attention_mode

    model.train()
    # Renamed in transformers 5.24, where the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    device = session.hardware.device

    def step(mode: AttentionMode) -> Tensor:
        with attention_mode(model, mode):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(tokens, labels=tokens, use_cache=False).loss
            # Still in the mode: checkpointing runs the layers again in here.
            loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    calls: dict[str, Call] = {mode: functools.partial(step, mode) for mode in (TEACHER, STUDENT)}
    timings, failures = measure(session.hardware, calls, SCALES[session.settings.mode].measure_ms)
    rows = []
    for mode in calls:
        if mode in failures:
            rows.append(Row(what=mode, status="error", reason=failures[mode], config=config))
            continue
        metrics = timings[mode].metrics() | {"tokens_per_s": 1e3 * tokens.shape[1] / timings[mode].median_ms}
        if mode == STUDENT and TEACHER in timings:
            metrics["speedup_vs_teacher"] = timings[TEACHER].median_ms / timings[mode].median_ms
        rows.append(Row(what=mode, config=config, metrics=metrics))
    return rows


class TokenClock:
    """A stopping criterion that never stops and notes when each token was there.

    Attributes:
        times: Seconds, one per token.
    """

    def __init__(self, session: Session) -> None:
        """Start without times.

        Args:
            session: Waits for the device before the clock is read.
        """
        self.session = session
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Note the time; arguments and result are those transformers expects of a stopping criterion.

        Args:
            input_ids: `[B, T]`, the tokens so far.
            scores: Not used.
            **kwargs: Not used.

        Returns:
            `[B]` of False.
        """
        self.session.hardware.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def measure_generation(model: PreTrainedModel, tokens: Tensor, config: dict[str, Any], session: Session) -> list[Row]:
    """Generate greedily after the prompt, teacher then student: time to the first token and per further token."""
    new_tokens = SCALES[session.settings.mode].new_tokens
    rows: dict[str, Row] = {}
    config = config | {"new_tokens": new_tokens}
    for mode in (TEACHER, STUDENT):
        try:
            _generate(model, tokens, mode, 3, session)  # compiles and warms up
            rows[mode] = Row(what=mode, config=config, metrics=_with_peak(model, tokens, mode, new_tokens, session))
        except Exception as error:
            rows[mode] = Row(what=mode, status="error", reason=f"{type(error).__name__}: {error}", config=config)
    if all(row.status == "ok" for row in rows.values()):
        teacher, student = rows[TEACHER].metrics, rows[STUDENT].metrics
        student["speedup_vs_teacher"] = teacher["median_ms"] / student["median_ms"]
        student["prefill_speedup_vs_teacher"] = teacher["prefill_ms"] / student["prefill_ms"]
    return list(rows.values())


def _with_peak(
    model: PreTrainedModel, tokens: Tensor, mode: AttentionMode, new_tokens: int, session: Session
) -> dict[str, Any]:
    """Generate, and add the memory at the peak."""
    metrics: dict[str, Any] = {}
    peak = session.hardware.peak_bytes(lambda: metrics.update(_generate(model, tokens, mode, new_tokens, session)))
    return metrics | {"peak_bytes": peak}


def _generate(
    model: PreTrainedModel, tokens: Tensor, mode: AttentionMode, new_tokens: int, session: Session
) -> dict[str, Any]:
    """Return the time to the first token, and the spread of the time per further token."""
    from transformers import GenerationConfig, StoppingCriteriaList

    from subquad.layers import attention_mode

    clock = TokenClock(session)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,  # random weights may write the end of the text at any time
        pad_token_id=0,
    )
    with torch.no_grad(), attention_mode(model, mode):
        session.hardware.synchronize()
        began = time.perf_counter()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    steps = [1e3 * (after - before) for before, after in zip(clock.times, clock.times[1:], strict=False)]
    p20, median, p80 = percentiles(steps)
    return {
        "prefill_ms": 1e3 * (clock.times[0] - began),
        "median_ms": median,
        "p20_ms": p20,
        "p80_ms": p80,
        "repetitions": len(steps),
        "tokens_per_s": 1e3 / median,
    }
