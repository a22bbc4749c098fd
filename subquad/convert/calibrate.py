"""Calibration without training: each head's temperature, decay, far weight or size, to start near its teacher."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.convert.key_scores import KeyFit, KeyScoreFit, fit_key_scores, keeps_keys
from subquad.convert.score_fit import ScoreFit, fit_scores, fits_scores
from subquad.convert.watch import CHECKED_ROWS, mean_loss, watch_teacher
from subquad.errors import ConfigError
from subquad.layers import SubquadAttention, converted_layers
from subquad.layers.inputs import HeadInputs
from subquad.layers.mixer import Mixer
from subquad.layers.mixer_parts import MixerParts

TEMPERATURES = (0.02, 0.06, 0.2, 0.6)
TIMESCALES = (128.0, 512.0, 2048.0, float("inf"))
LOG_MIXES = (-14.0, -11.0, -9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -2.0, 0.0)
# Sizes of a normed head: pretrained values have entries of 0.05 to 1.
NORM_WEIGHTS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
# m in s ** -sigmoid(m): exponents of 0.27 to 0.95.
POSITION_EXPONENTS = (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)

# A head takes the smallest far weight that has this share of what the best one gains over none. Its error hardly tells
# the two apart, and errors add up over the layers: the model's loss is lower so (`docs/quality.md`).
GAIN_SHARE = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationResult:
    """How far the heads are from their teacher: squared error of the head outputs over the teacher's mean square.

    Attributes:
        error_before: layer index to the mean over its converted heads, before the search (but with the keys that the
            fitted score keeps, mean keys and fitted maps).
        error_after: the same with the chosen settings.
        loss_before: nats per token on the first calibration rows before calibration.
        loss_after: the same with the chosen settings.
        kept: whether the settings were kept; where they raise that loss they are undone.
        tokens: tokens used for this search.
        keys: the fit of the scores of kept keys, which came first; None where no layer keeps keys.
    """

    error_before: dict[int, float]
    error_after: dict[int, float]
    loss_before: float
    loss_after: float
    kept: bool
    tokens: int
    keys: KeyFit | None = None


@dataclass(frozen=True)
class _Axis:
    """One parameter to search: its grid, how to set a value (one per head) and whether heads of a group share it."""

    values: tuple[float, ...]
    write: Callable[[Mixer, Tensor], None]
    per_kv_head: bool


def _write_temperature(mixer: Mixer, values: Tensor) -> None:
    assert mixer.score.log_temperature is not None
    mixer.score.log_temperature.copy_(values.log())


def _write_timescale(mixer: Mixer, values: Tensor) -> None:
    assert mixer.decay is not None
    mixer.decay.set_timescale(values)


def _write_norm_weight(mixer: Mixer, values: Tensor) -> None:
    assert mixer.norm_weight is not None
    mixer.norm_weight.copy_(values.repeat_interleave(mixer.geometry.head_dim))


def _write_exponent(mixer: Mixer, values: Tensor) -> None:
    assert mixer.position_step is not None
    mixer.position_step.exponent.copy_(values)


_TEMPERATURE = _Axis(TEMPERATURES, _write_temperature, per_kv_head=False)
_TIMESCALE = _Axis(TIMESCALES, _write_timescale, per_kv_head=True)
_NORM_WEIGHT = _Axis(NORM_WEIGHTS, _write_norm_weight, per_kv_head=False)
_EXPONENT = _Axis(POSITION_EXPONENTS, _write_exponent, per_kv_head=True)


class _LayerSearch:
    """Errors of one layer for every value of one axis and every far weight: `[values, log mixes, heads]`."""

    def __init__(self, layer: SubquadAttention, axis: _Axis | None) -> None:
        assert layer.mixer is not None
        self.layer, self.mixer, self.axis = layer, layer.mixer, axis
        self.heads = self.mixer.geometry.num_heads
        num_mixes = 1 if self.mixer.far_weight is None else len(LOG_MIXES)
        num_values = 1 if axis is None else len(axis.values)
        self.error = torch.zeros(num_values, num_mixes, self.heads)
        self.start_error, self.power = torch.zeros(self.heads), torch.zeros(self.heads)
        self.logs, self.far_tokens = torch.zeros(num_values, 3, self.heads), 0

    @torch.no_grad()
    def add(self, inputs: HeadInputs) -> None:
        """Measure every grid point on one batch of the teacher's inputs; the mixer is left as it was."""
        mixer, inputs = self.mixer, inputs.select(self.layer.split, self.layer.split.mixed)
        target, real = self.layer.exact_heads(inputs), inputs.real()
        self.power += _per_head(target, real)
        # no value of the grid changes window and kept keys
        exact = mixer.exact_part(inputs) if mixer.config.window else None
        self.start_error += _per_head(mixer.finish(mixer.parts(inputs, exact=exact)) - target, real)
        saved = {name: value.clone() for name, value in mixer.state_dict().items()}
        for index in range(self.error.shape[0]):
            if self.axis is not None:
                count = mixer.geometry.num_kv_heads if self.axis.per_kv_head else self.heads
                self.axis.write(mixer, torch.full((count,), self.axis.values[index]))
            parts = mixer.parts(inputs, exact=exact)
            self._add_logs(index, parts, real)
            for m in range(self.error.shape[1]):
                if mixer.far_weight is not None:
                    mixer.far_weight.log_mix.fill_(LOG_MIXES[m])
                self.error[index, m] += _per_head(mixer.finish(parts) - target, real)
        mixer.load_state_dict(saved)

    def _add_logs(self, index: int, parts: MixerParts, real: Tensor) -> None:
        """Sum up what the far part's weight follows, over the tokens that have a far part."""
        weight = self.mixer.far_weight
        if weight is None or weight.means is None or parts.near is None or parts.far_inputs is None:
            return
        far = real & (parts.far_inputs.tokens >= 1)
        logs = weight.logs(parts.near, parts.mass, parts.far_inputs)
        self.logs[index] += (logs * far[..., None]).sum((1, 2)).cpu()
        if index == 0:
            self.far_tokens += int(far.sum())

    @torch.no_grad()
    def choose(self) -> tuple[float, float]:
        """Give every head its best value and a cautious far weight; return the mean relative error before and after."""
        mixer, relative = self.mixer, self.error / self.power
        best, log_mix = relative.amin(dim=1), cautious_choice(relative)
        if self.axis is not None and self.axis.per_kv_head:
            grouped = best.unflatten(1, (mixer.geometry.num_kv_heads, -1)).sum(-1)
            value = grouped.argmin(0)
            self.axis.write(mixer, torch.tensor(self.axis.values)[value])
            value = value.repeat_interleave(mixer.geometry.group_size)
        else:
            value = best.argmin(0)
            if self.axis is not None:
                self.axis.write(mixer, torch.tensor(self.axis.values)[value])
        heads = torch.arange(self.heads)
        if mixer.far_weight is not None:
            mixer.far_weight.log_mix.copy_(torch.tensor(LOG_MIXES)[log_mix[value, heads]])
            if mixer.far_weight.means is not None and self.far_tokens:
                mixer.far_weight.means.copy_(self.logs[value, :, heads].T / self.far_tokens)
        chosen = relative[value, log_mix[value, heads], heads]
        return (self.start_error / self.power).mean().item(), chosen.mean().item()


def cautious_choice(errors: Tensor) -> Tensor:
    """Return the first far weight that has most of the best one's gain.

    Args:
        errors: `[values, log mixes, heads]`, the smallest far weight first: as good as none.

    Returns:
        `[values, heads]` int64, indices of log mixes.
    """
    none, best = errors[:, :1], errors.amin(dim=1, keepdim=True)
    return (errors <= none - GAIN_SHARE * (none - best)).int().argmax(dim=1)


def calibrate(
    model: PreTrainedModel,
    rows: Sequence[dict[str, Tensor]],
    *,
    key_rows: Sequence[dict[str, Tensor]] | None = None,
    fit_maps: bool = False,
    on_batch: Callable[[int], None] | None = None,
) -> CalibrationResult:
    """Choose temperature, decay timescale and far weight of every converted head by search on the teacher's own inputs.

    Each head takes, first among temperatures and then among timescales (shared by the query heads of a key/value head),
    each with its own best far weight, the values whose output is nearest to its teacher's in squared error; the far
    weight itself is then the smallest with half of that one's gain (`GAIN_SHARE`). With a learned
    offset the temperature sets the ratio of score and offset, which is what matters, so the offset stays 1. Pure mixers
    whose output has another size than a weighted mean are searched for that instead: the weight of their norm, or
    Cottention's exponent. An `exp` score starts as its teacher, its decay with it. A layer with nothing to search is
    left as it is, and named in the log. Where keys are kept, their score is fitted first (`fit_key_scores`); then the
    mean key and, if asked for, narrow maps (`fit_scores`). Nothing is trained; the cost is two teacher forwards (one
    more for kept keys and one for mean keys and maps) plus up to nine student attentions per batch.

    A head that is nearer to its teacher does not make the model better for certain. So the model's loss is measured
    before and after on the first rows, and settings that raise it are undone with a warning.

    Args:
        model: a converted model with fresh mixers.
        rows: batches with `input_ids` `[B, T]` and optionally `position_ids`; a few thousand tokens are enough.
        key_rows: the same, for the scores of kept keys; rows that ask for what stands far back make better ones. None
            is `rows`.
        fit_maps: start a learned feature map from least squares over the teacher's scores, not from a selection of its
            rotary pairs.
        on_batch: called with the number of tokens after each batch (for a progress bar); `calibration_tokens` in all.

    Returns:
        Errors and losses before and after.

    Raises:
        ConfigError: The model has no converted layer, or there were no rows.
    """
    layers = [layer for layer in converted_layers(model) if layer.mixer is not None]
    if not layers:
        raise ConfigError("calibrate: the model has no converted layer")
    if not rows:
        raise ConfigError("calibrate: no rows were given; it needs at least one batch of tokens")
    _name_what_is_left([layer for layer in layers if not fits_scores(layer, fit_maps)])
    keys = fit_key_scores(model, rows if key_rows is None else key_rows, on_batch=on_batch)
    mixers = [layer.mixer for layer in layers if layer.mixer is not None]
    saved = [{name: value.clone() for name, value in mixer.state_dict().items()} for mixer in mixers]
    loss_before = mean_loss(model, rows[:CHECKED_ROWS])
    fit_scores(model, rows, maps=fit_maps, on_batch=on_batch)
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    for pick in (_first_axis, _second_axis):
        searches = {layer: _LayerSearch(layer, pick(layer)) for layer in layers if pick(layer) or not before}
        watch_teacher(model, searches, rows, on_batch)
        for search in searches.values():
            start, best = search.choose()
            before.setdefault(search.layer.layer_idx, start)
            after[search.layer.layer_idx] = best
    loss_after = mean_loss(model, rows[:CHECKED_ROWS])
    kept = loss_after <= loss_before
    if not kept:
        warnings.warn(
            f"calibration raised the loss on its own text from {loss_before:.4f} to {loss_after:.4f} and was undone; "
            "training starts from the plain settings",
            stacklevel=2,
        )
        for mixer, values in zip(mixers, saved, strict=True):
            mixer.load_state_dict(values)
    tokens = sum(row["input_ids"].numel() for row in rows)
    return CalibrationResult(before, after, loss_before, loss_after, kept, tokens, keys)


def calibration_tokens(
    model: PreTrainedModel,
    rows: Sequence[dict[str, Tensor]],
    key_rows: Sequence[dict[str, Tensor]] | None = None,
    fit_maps: bool = False,
) -> int:
    """Return how many tokens `calibrate` reads, as often as it does: for kept keys, scores, temperatures and decays."""
    key_rows = rows if key_rows is None else key_rows
    fits = any(fits_scores(layer, fit_maps) for layer in converted_layers(model))
    passes = [*rows, *rows, *(key_rows if keeps_keys(model) else ()), *(rows if fits else ())]
    return sum(row["input_ids"].numel() for row in passes)


def calibrate_layer(
    layer: SubquadAttention,
    batches: Sequence[HeadInputs],
    key_batches: Sequence[HeadInputs] | None = None,
    fit_maps: bool = False,
) -> tuple[float, float]:
    """Do to one layer what `calibrate` does to each, from its inputs alone and without asking the model's loss.

    Args:
        layer: a converted layer with a fresh mixer.
        batches: the teacher's heads.
        key_batches: the same, to fit the score of kept keys on; None is `batches`.
        fit_maps: as for `calibrate`.

    Returns:
        Mean relative error of its heads before and after; NaN for a layer with nothing to search.
    """
    if layer.mixer_config.kept_keys:
        keys = KeyScoreFit(layer)
        for inputs in batches if key_batches is None else key_batches:
            keys.add(inputs)
        keys.write()
    if fits_scores(layer, fit_maps):
        scores = ScoreFit(layer, fit_maps)
        for inputs in batches:
            scores.add(inputs)
        scores.write()
    errors = []
    for number, pick in enumerate((_first_axis, _second_axis)):
        axis = pick(layer)
        if axis is None and (number or not layer.mixer_config.window):
            continue
        search = _LayerSearch(layer, axis)
        for inputs in batches:
            search.add(inputs)
        errors.append(search.choose())
    return (errors[0][0], errors[-1][1]) if errors else (float("nan"), float("nan"))


def _name_what_is_left(layers: Sequence[SubquadAttention]) -> None:
    """Log the layers whose mixer has nothing to search."""
    idle = [
        layer.layer_idx
        for layer in layers
        if not layer.mixer_config.window and _first_axis(layer) is None and _second_axis(layer) is None
    ]
    if idle:
        logger.info("calibrate: the mixers of layers %s have nothing to search; they start as they are", idle)


def _first_axis(layer: SubquadAttention) -> _Axis | None:
    return _temperature_axis(layer) or _size_axis(layer)


def _second_axis(layer: SubquadAttention) -> _Axis | None:
    """Return the timescale's grid; for a mixer without one, that of the output's size unless it was searched first."""
    return _timescale_axis(layer) or (_size_axis(layer) if _temperature_axis(layer) else None)


def _temperature_axis(layer: SubquadAttention) -> _Axis | None:
    """Return the temperature's grid where it does more than scale the far part, which its weight does already."""
    config = layer.mixer_config
    return _TEMPERATURE if config.temperature and (config.offset or config.score == "taylor") else None


def _timescale_axis(layer: SubquadAttention) -> _Axis | None:
    config = layer.mixer_config
    return _TIMESCALE if config.decay != "none" and config.score != "exp" else None


def _size_axis(layer: SubquadAttention) -> _Axis | None:
    """Return the grid of what sets the size of a pure mixer's output; with a window its far weight does."""
    mixer = layer.mixer
    assert mixer is not None, "only converted heads are searched"
    if layer.mixer_config.window:
        return None
    if mixer.norm_weight is not None:
        return _NORM_WEIGHT
    return _EXPONENT if mixer.position_step is not None else None


def _per_head(x: Tensor, real: Tensor) -> Tensor:
    """Sum of squares over batch, tokens and channels for each head, padding left out."""
    return (x.float().square().sum(-1) * real[..., None]).sum((0, 1)).cpu()
