"""`PretrainRecipe`: everything one training from random weights depends on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from subquad.distill.config import StageConfig
from subquad.pretrain.mixers import ScratchMixer
from subquad.recipes.fields import (
    Ascending,
    Count,
    LearningRate,
    RowLength,
    RunSection,
    Section,
    Seed,
    Weight,
    whole_number,
)
from subquad.recipes.loader import load_content
from subquad.recipes.schema import parse_section
from subquad.recipes.sections import StageSection, TrainerSection, text_keys
from subquad.recipes.text_sections import DataSection

DEFAULT_VOCAB_SIZE = 2048
DEFAULT_TRAIN_BYTES = 20_000_000


class ArchitectureSection(Section):
    """The Llama-shaped decoder around the mixers.

    Attributes:
        hidden_size: width of the residual stream.
        num_layers: blocks.
        num_heads: query heads.
        num_kv_heads: key/value heads; None is `num_heads`.
        head_dim: width of a head; None is `hidden_size / num_heads`.
        intermediate_size: width of the MLP; None is 8/3 of `hidden_size`, rounded up to a multiple of 64.
        context_length: longest sequence; None is the longest one that the recipe trains or measures on.
        tie_embeddings: whether the output head is the embedding.
        initializer_range: standard deviation of the random weights.
        rope_theta: base of the rotary embedding, where the mixer keeps it.
    """

    hidden_size: Count = 128
    num_layers: Count = 4
    num_heads: Count = 4
    num_kv_heads: Count | None = None
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    intermediate_size: Count | None = None
    context_length: Count | None = None
    tie_embeddings: bool = True
    initializer_range: Annotated[float, Field(gt=0, le=1)] = 0.02
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10_000.0

    @model_validator(mode="after")
    def _check_heads(self) -> ArchitectureSection:
        problems = []
        if self.head_dim is None and self.hidden_size % (2 * self.num_heads):
            problems.append(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} is not an even whole number; "
                "set head_dim, or change one of the two"
            )
        if self.num_heads % self.kv_heads:
            problems.append(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def width_of_head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size or -(-self.hidden_size * 8 // (3 * 64)) * 64


class TokenizerSection(Section):
    """The tokenizer: an existing one, or a byte-level BPE trained on the training text.

    Attributes:
        source: folder, hub id or `tokenizer.json` of an existing one; None trains one.
        vocab_size: tokens of the one that is trained.
        train_bytes: bytes of training text it is trained on.
    """

    source: Annotated[str, Field(min_length=1)] | None = None
    vocab_size: Annotated[int, BeforeValidator(whole_number), Field(ge=257)] | None = None
    train_bytes: Count | None = None

    @model_validator(mode="after")
    def _check_use(self) -> TokenizerSection:
        if self.source is not None and (self.vocab_size or self.train_bytes):
            raise ValueError(
                f"source {self.source!r} is an existing tokenizer, so vocab_size and train_bytes are not used; "
                "remove one of the two"
            )
        return self


class RecallSection(Section):
    """Synthetic recall in place of text: pairs of a key and a value lie in filler, then keys are asked for.

    A row is `filler … key value … filler … (ask key value) × num_queries`; the loss and the accuracy are those of the
    values after a question. Pairs lie at random places of the part before the questions, and which value belongs to
    which key is drawn anew in every row, so that only looking it up helps.

    Attributes:
        num_pairs: pairs in a row.
        num_queries: questions at its end, each of another pair.
        num_keys: different keys.
        num_values: different values.
        num_fillers: different filler tokens.
        eval_lengths: row lengths at which accuracy is measured, ascending; longer than trained on is allowed.
        eval_rows: rows at each length.
    """

    num_pairs: Count = 4
    num_queries: Count = 4
    num_keys: Count = 32
    num_values: Count = 32
    num_fillers: Count = 16
    eval_lengths: Annotated[tuple[Count, ...], Field(min_length=1)] = (64, 128, 256)
    eval_rows: Count = 256

    @model_validator(mode="after")
    def _check_counts(self) -> RecallSection:
        problems = []
        if self.num_pairs > self.num_keys:
            problems.append(f"num_pairs {self.num_pairs} needs as many different keys, num_keys is {self.num_keys}")
        if self.num_queries > self.num_pairs:
            problems.append(f"num_queries {self.num_queries} asks for more than num_pairs {self.num_pairs}")
        if self.num_values < 2:
            problems.append(f"num_values is {self.num_values}; with less than 2 there is nothing to recall")
        if list(self.eval_lengths) != sorted(set(self.eval_lengths)):
            problems.append(f"eval_lengths must be ascending without repeats, got {list(self.eval_lengths)}")
        if self.eval_lengths[0] < self.shortest_row:
            problems.append(f"eval_lengths starts at {self.eval_lengths[0]}; a row has at least {self.shortest_row}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def shortest_row(self) -> int:
        """Tokens of a row without filler."""
        return 2 * self.num_pairs + 3 * self.num_queries

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the question mark, keys, values, fillers."""
        return 1 + self.num_keys + self.num_values + self.num_fillers


class TrainingSection(StageSection):
    """Next-token prediction from random weights with AdamW.

    Attributes:
        tokens: training tokens.
        batch_size: rows per step and process.
        warmup_ratio: share of the steps with a rising rate.
        lr_scheduler_type: shape of the rate after that, by its name in transformers.
        max_grad_norm: gradient norm above which gradients are scaled down; 0 leaves them alone.
        divergence_factor: the run stops where the median of recent losses is above this many times the first ones'.
        save_steps: steps between checkpoints.
        learning_rate: peak rate of every parameter.
        weight_decay: of the weight matrices; norms, biases and the mixers' own (float32) parameters have none.
        chunk_tokens: tokens whose logits exist at one time.
    """

    tokens: Count = 1_000_000
    batch_size: Count = 16
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.05
    save_steps: Count = StageConfig.save_steps
    learning_rate: LearningRate = 2e-3
    weight_decay: Weight = 0.1
    chunk_tokens: Count = 1024


class PretrainTrainerSection(TrainerSection):
    """How training runs; as for a conversion, without trackers besides `log.jsonl` unless they are asked for.

    Attributes:
        logging_steps: steps between log lines.
        report_to: trackers besides `log.jsonl` and the progress bar.
    """

    logging_steps: Count = 10
    report_to: tuple[Literal["tensorboard"], ...] = ()


class PretrainEvalSection(Section):
    """What is measured at the end.

    Attributes:
        tokens: held-out tokens.
        seq_len: tokens per row; None is `data.seq_len`.
        batch_size: rows per forward pass.
        position_buckets: upper bounds of the position buckets; None is the powers of two from 64.
    """

    tokens: Count = 65_536
    seq_len: RowLength | None = None
    batch_size: Count = 16
    position_buckets: Ascending | None = None


class PretrainRecipe(RunSection):
    """One training from random weights.

    Attributes:
        seed: seed of the weights and of the data order.
        model: the decoder around the mixers.
        mixer: the mixer of every layer; a preset stands for the papers' system (see `scratch_mixer`).
        layers: mixers of single layers, by layer range, as in a conversion.
        tokenizer: the tokenizer.
        data: training and held-out text.
        recall: synthetic recall in place of text; `data.seq_len` is then the length of its rows.
        training: amount and rates.
        trainer: how training runs.
        eval: what is measured.
    """

    seed: Seed = 0
    model: ArchitectureSection = ArchitectureSection()
    mixer: ScratchMixer = Field(default="2mamba", validate_default=True)
    layers: Annotated[dict[str, ScratchMixer], BeforeValidator(text_keys)] = Field(default_factory=dict)
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection(seq_len=256)
    recall: RecallSection | None = None
    training: TrainingSection = TrainingSection()
    trainer: PretrainTrainerSection = PretrainTrainerSection()
    eval: PretrainEvalSection = PretrainEvalSection()

    @model_validator(mode="after")
    def _check_lengths(self) -> PretrainRecipe:
        problems = []
        amounts = {"training.tokens": (self.training.tokens, self.data.seq_len)}
        if self.recall is None:
            amounts["eval.tokens"] = (self.eval.tokens, self.eval_seq_len)
        elif self.data.seq_len < self.recall.shortest_row:
            problems.append(
                f"data.seq_len is {self.data.seq_len}, but a row of recall has at least {self.recall.shortest_row} "
                "tokens; raise it or lower recall.num_pairs and recall.num_queries"
            )
        problems += [
            f"{name} is {tokens}, less than one row of {seq_len} tokens; raise it or lower seq_len"
            for name, (tokens, seq_len) in amounts.items()
            if tokens < seq_len
        ]
        if self.model.context_length is not None and self.model.context_length < self.longest_row:
            problems.append(
                f"model.context_length is {self.model.context_length}, but rows have up to {self.longest_row} tokens; "
                "raise it, or leave it out"
            )
        if self.recall is not None and self.tokenizer != TokenizerSection():
            problems.append("recall makes its own tokens, so tokenizer is not used; remove one of the two")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def eval_seq_len(self) -> int:
        """Tokens per held-out row of text."""
        return self.eval.seq_len or self.data.seq_len

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row trained or measured on."""
        measured = self.recall.eval_lengths[-1] if self.recall is not None else self.eval_seq_len
        return max(self.data.seq_len, measured)

    @property
    def context_length(self) -> int:
        """The model's longest sequence."""
        return self.model.context_length or self.longest_row


def load_pretrain_recipe(source: str | Path, overrides: Sequence[str] = ()) -> PretrainRecipe:
    """Load and validate a recipe for training from random weights.

    Args:
        source: name of a packaged one, or path of a `.yaml` file.
        overrides: `key=value` pairs with dotted keys.

    Returns:
        The recipe, with every default filled in.

    Raises:
        ConfigError: an unknown name, a file that is missing or no YAML mapping, a malformed override, or a recipe that
            breaks rules (all of them in the one message).
    """
    content, origin = load_content(source, overrides, "pretrain")
    return parse_section(PretrainRecipe, content, origin=origin)
