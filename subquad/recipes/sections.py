"""The sections of a recipe: frozen, keyword-only models whose fields are the keys of the YAML file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from subquad.distill.config import Stage1Config, Stage2Config, StageConfig
from subquad.errors import ConfigError
from subquad.layers.config import MixerConfig
from subquad.layers.presets import resolve_mixer
from subquad.recipes.fields import Ascending, Count, CountOrZero, Indices, LearningRate, RowLength, Section, Weight
from subquad.recipes.problems import describe_unknown_key
from subquad.recipes.suite_settings import SuiteSettings


class ModelSection(Section):
    """The teacher.

    Attributes:
        source: `smollm2-135m`, a `.gguf` file, a local Hugging Face folder or a hub id.
        dtype: data type of the frozen weights; `auto` is the checkpoint's own on GPU and float32 on CPU.
    """

    source: Annotated[str, Field(min_length=1)] = "smollm2-135m"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


def resolve_section_mixer(value: object) -> object:
    """Resolve a mixer of a recipe.

    Args:
        value: a preset's name, or its parts.

    Returns:
        The validated config; anything but a name or a mapping is returned as it is.

    Raises:
        ValueError: an unknown preset or key (the nearest is suggested), or parts that break a rule.
    """
    if not isinstance(value, str | dict):
        return value
    if isinstance(value, dict):
        known = {*MixerConfig.model_fields, "preset"}
        unknown = [describe_unknown_key(str(key), known) for key in value if key not in known]
        if unknown:
            raise ValueError("; ".join(unknown))
    try:
        return resolve_mixer(value)
    except ConfigError as error:
        what, *problems = (line.strip() for line in str(error).splitlines())
        raise ValueError(" ".join([what, "; ".join(problems)]).strip()) from error


def text_keys(value: object) -> object:
    """Return a mapping with text as keys, since YAML reads the key of `5: softmax` as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


Mixer = Annotated[MixerConfig, BeforeValidator(resolve_section_mixer)]


class ExactHeadsSection(Section):
    """Key/value heads that stay softmax: named, or chosen by what their conversion costs text and recall.

    Attributes:
        heads: layer to its heads, as an earlier run chose them (`{7: [1, 2], 8: [0]}`); this, `count`, `share` or
            `cache_mib`.
        count: how many heads.
        share: their share of all converted key/value heads, rounded to whole heads, at least one.
        cache_mib: as many as keep one sequence's cache, after `at_length` tokens, within this many MiB.
        at_length: see `cache_mib`.
        recall_weight: how much the loss of recalled answers counts beside that of text, both as shares of what
            converting every head costs.
        tokens: tokens of training text that the choice reads, over and over.
        recall_tokens: tokens of recall rows that it reads; 0 chooses by text alone.
    """

    heads: Annotated[dict[CountOrZero, Indices], Field(min_length=1)] | None = None
    count: Count | None = None
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    cache_mib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    at_length: Count = 4096
    recall_weight: Weight = 1.0
    tokens: Count = 2048
    recall_tokens: CountOrZero = 2048

    @model_validator(mode="after")
    def _check_budget(self) -> ExactHeadsSection:
        given = [name for name in ("heads", "count", "share", "cache_mib") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of heads, count, share and cache_mib (got {', '.join(given) or 'none'})")
        fields = type(self).model_fields
        idle = [name for name in fields if name != "heads" and getattr(self, name) != fields[name].default]
        if self.heads is not None and idle:
            raise ValueError(f"heads names the heads, so {', '.join(idle)} would have no effect; remove what is idle")
        return self


class ConvertSection(Section):
    """What each attention layer becomes.

    Attributes:
        mixer: a preset's name, or its parts (`{preset: taylor, order: 1}`).
        layers: mixers of single layers, by layer range (`{"0-3": softmax, "5,7": {preset: taylor, order: 1}}`; `-1` is
            the last layer).
        exact_heads: key/value heads that stay softmax, by layer or chosen by the run; None is those the mixers name.
    """

    mixer: Mixer = Field(default="2mamba", validate_default=True)
    layers: Annotated[dict[str, Mixer], BeforeValidator(text_keys)] = Field(default_factory=dict)
    exact_heads: ExactHeadsSection | None = None

    @property
    def named_heads(self) -> dict[int, tuple[int, ...]]:
        """Layer to heads of `exact_heads`, where it names them."""
        return {} if self.exact_heads is None or self.exact_heads.heads is None else self.exact_heads.heads

    @property
    def chooses_heads(self) -> bool:
        """Whether the run chooses heads that stay softmax."""
        return self.exact_heads is not None and self.exact_heads.heads is None

    @model_validator(mode="after")
    def _check_heads(self) -> ConvertSection:
        named = [mixer.exact_kv_heads for mixer in (self.mixer, *self.layers.values()) if mixer.exact_kv_heads]
        if self.exact_heads is not None and named:
            raise ValueError(
                f"exact_heads gives the heads that stay softmax, but a mixer names exact_kv_heads {list(named[0])} "
                "already; remove one of the two"
            )
        return self


class CalibrateSection(Section):
    """The closed-form start: no training.

    Attributes:
        enabled: whether to calibrate.
        tokens: tokens of training text to measure on.
        key_tokens: tokens of training text to fit the scores of kept keys on, before training and again after it.
        key_recall: share of these rows that get recall, so that the scores know what is asked for far back.
        fit_maps: start a learned feature map from least squares over the teacher's scores.
    """

    enabled: bool = True
    tokens: Count = 4096
    key_tokens: Count = 16_384
    key_recall: Annotated[float, Field(ge=0, le=1)] = 1.0
    fit_maps: bool = False


class StageSection(Section):
    """What every training stage has.

    Attributes:
        tokens: training tokens.
        batch_size: rows per step and process.
        warmup_ratio: share of the steps with a rising rate.
        lr_scheduler_type: shape of the rate after that, by its name in transformers.
        max_grad_norm: gradient norm above which gradients are scaled down; 0 leaves them alone.
        divergence_factor: the run stops where the median of recent losses is above this many times the first ones'.
        save_steps: steps between checkpoints.
    """

    tokens: CountOrZero = 20_480
    batch_size: Count = 2
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = StageConfig.warmup_ratio
    lr_scheduler_type: Literal["linear", "cosine", "constant_with_warmup"] = StageConfig.lr_scheduler_type
    max_grad_norm: Weight = StageConfig.max_grad_norm
    divergence_factor: Annotated[float, Field(gt=1)] = StageConfig.divergence_factor
    save_steps: Count = StageConfig.save_steps


class Stage1Section(StageSection):
    """Layer-local output matching: each converted layer learns to give the teacher's output from the teacher's input.

    Attributes:
        tokens: training tokens; 0 leaves the stage out.
        batch_size: rows per step and process.
        seq_len: tokens per row; None is `data.seq_len`.
        warmup_ratio: share of the steps with a rising rate.
        lr_scheduler_type: shape of the rate after that, by its name in transformers.
        max_grad_norm: gradient norm above which gradients are scaled down; 0 leaves them alone.
        divergence_factor: the run stops where the median of recent losses is above this many times the first ones'.
        save_steps: steps between checkpoints.
        learning_rate: peak rate of the mixers' scales.
        map_learning_rate: peak rate of the q/k maps.
        decay_learning_rate: peak rate of the decay.
    """

    seq_len: RowLength | None = None
    learning_rate: LearningRate = Stage1Config.learning_rate
    map_learning_rate: LearningRate = Stage1Config.map_learning_rate
    decay_learning_rate: LearningRate = Stage1Config.decay_learning_rate


ProjectionName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraSection(Section):
    """Low-rank adapters on the frozen projections (peft).

    Attributes:
        r: rank.
        alpha: scale; the adapter's output is multiplied by `alpha / r`.
        dropout: dropout on the adapter's input.
        target_modules: names of the modules that get an adapter.
    """

    r: Count = 8
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Annotated[tuple[ProjectionName, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )


class Stage2Section(StageSection):
    """End-to-end distillation: per-token mean KL to the teacher's logits.

    Attributes:
        tokens: training tokens; 0 leaves the stage out.
        batch_size: rows per step and process.
        seq_len: tokens per row; None is `data.seq_len`.
        warmup_ratio: share of the steps with a rising rate.
        lr_scheduler_type: shape of the rate after that, by its name in transformers.
        max_grad_norm: gradient norm above which gradients are scaled down; 0 leaves them alone.
        divergence_factor: the run stops where the median of recent losses is above this many times the first ones'.
        save_steps: steps between checkpoints.
        learning_rate: peak rate of the adapters (or of all weights with `full`, where 1e-5 suits).
        mixer_learning_rate: peak rate of the mixers' parameters.
        weight_decay: of adapters and base weights.
        lora: adapters on the projections; None trains the mixers alone.
        full: train every weight against a second, frozen copy of the teacher; takes the place of `lora`.
        kl_weight: weight of the KL term.
        ce_weight: weight of the cross-entropy with the text itself.
        hidden_weight: weight of the squared distance of the last hidden states, as a share of the teacher's square.
        temperature: temperature of the KL term.
        far_weight: how much more a token counts in the loss per nat that the teacher gains from beyond window and
            sinks; costs a forward pass more.
    """

    seq_len: RowLength | None = None
    learning_rate: LearningRate = Stage2Config.learning_rate
    mixer_learning_rate: LearningRate = Stage2Config.mixer_learning_rate
    weight_decay: Weight = Stage2Config.weight_decay
    lora: LoraSection | None = LoraSection()
    full: bool = False
    kl_weight: Weight = Stage2Config.kl_weight
    ce_weight: Weight = Stage2Config.ce_weight
    hidden_weight: Weight = Stage2Config.hidden_weight
    temperature: Annotated[float, Field(gt=0, le=100)] = Stage2Config.temperature
    far_weight: Weight = Stage2Config.far_weight

    @model_validator(mode="after")
    def _check_loss(self) -> Stage2Section:
        problems = []
        if not (self.kl_weight or self.ce_weight or self.hidden_weight):
            problems.append(
                "kl_weight, ce_weight and hidden_weight are all 0, so there is nothing to learn from; raise one"
            )
        if self.full and self.far_weight:
            problems.append(
                f"far_weight {self.far_weight} compares the teacher with its window-only self, which full: true trains "
                "away; set far_weight: 0 or full: false"
            )
        if self.full and self.lora not in (None, LoraSection()):
            problems.append("full: true trains every weight, so lora is not used; remove one of the two")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class TrainerSection(Section):
    """How both stages run; the names are those of `transformers.TrainingArguments`.

    Attributes:
        bf16: bfloat16 autocast; None turns it on where the GPU has it. A CPU always computes in float32.
        fsdp: shard weights, gradients and optimizer states over the processes that `accelerate launch` started.
        gradient_checkpointing: recompute activations in the backward pass of stage 2 (stage 1 holds one layer anyway).
        gradient_accumulation_steps: batches per optimizer step.
        logging_steps: steps between log lines.
        dataloader_num_workers: processes that prepare batches.
        report_to: trackers besides `log.jsonl` and the progress bar.
    """

    bf16: bool | None = StageConfig.bf16
    fsdp: bool = False
    gradient_checkpointing: bool = False
    gradient_accumulation_steps: Count = 1
    logging_steps: Count = 1
    dataloader_num_workers: CountOrZero = 0
    report_to: tuple[Literal["tensorboard"], ...] = ("tensorboard",)


class EvalSection(Section):
    """What is measured at the end.

    Attributes:
        tokens: held-out tokens.
        seq_len: tokens per row; None is `data.seq_len`.
        batch_size: rows per forward pass.
        position_buckets: upper bounds of the position buckets; None is the powers of two from 64.
        memory_lengths: numbers of tokens at which cache bytes are compared.
        generate_prompt: text to continue, once by each model.
        generate_tokens: tokens to generate; 0 generates nothing.
        suite: tasks to measure on teacher, control and student after that, as `subquad eval RUN --tasks` does.
    """

    tokens: Count = 16_384
    seq_len: RowLength | None = None
    batch_size: Count = 4
    position_buckets: Ascending | None = None
    memory_lengths: Annotated[Ascending, Field(min_length=1)] = (256, 1024, 4096, 16_384, 65_536)
    generate_prompt: Annotated[str, Field(min_length=1)] = "The state of the Union is"
    generate_tokens: CountOrZero = 40
    suite: SuiteSettings | None = None
