"""The model card (README.md) of an exported checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCardData

from subquad.convert.atomic import atomic_file

CARD_FILE = "README.md"
_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForPreTraining": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelCard:
    """What a model card says. Only what was measured goes in; what is empty is left out of the card.

    Attributes:
        name: Name of the model.
        teacher: The checkpoint it was converted from, as the user named it; None for a model from random weights.
        mixers: Mixer label to number of layers.
        losses: Model label to held-out loss in nats per token, all on the same tokens.
        loss_data: What the held-out text is.
        cache_bytes: Tokens to (bytes of this model's cache, bytes of the teacher's KV cache), for one sequence.
        training_tokens: Training stage to tokens.
        license: License identifier of the teacher's weights, which the student inherits.
        command: Command that repeats the run.
        versions: Package to version.
        notes: Sentences a reader must know to judge the figures.
        auto_class: The Auto class of transformers that loads it.
    """

    name: str
    teacher: str | None
    mixers: Mapping[str, int]
    losses: Mapping[str, float] = field(default_factory=dict)
    loss_data: str = ""
    cache_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    training_tokens: Mapping[str, int] = field(default_factory=dict)
    license: str | None = None
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    auto_class: str = "AutoModelForCausalLM"


def render_model_card(card: ModelCard) -> str:
    """Return the card as Markdown with the YAML header the hub reads."""
    header = ModelCardData(
        library_name="transformers",
        pipeline_tag=_PIPELINES.get(card.auto_class, "feature-extraction"),
        tags=["subquad", "linear-attention", *(["distillation"] if card.teacher else [])],
        license=card.license,
        base_model=_hub_id(card.teacher),
    )
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {card.name}",
        _what_it_is(card),
        _USE.replace("AUTO_CLASS", card.auto_class),
    ]
    parts += [part for part in (_losses(card), _memory(card), _training(card)) if part]
    if card.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in card.notes))
    return "\n\n".join(parts) + "\n"


def write_model_card(directory: Path, card: ModelCard) -> Path:
    """Write or replace the card of an exported checkpoint, for example once it has been evaluated.

    Args:
        directory: The checkpoint.
        card: What it says.

    Returns:
        The file.

    Raises:
        OutputError: It cannot be written; an earlier card is kept.
    """
    path = directory / CARD_FILE
    atomic_file(path, render_model_card(card).encode())
    return path


_USE = """\
## Use

The mixers are in the Python package subquad (`pip install subquad`).

```python
import subquad
from transformers import AUTO_CLASS, AutoTokenizer

model = AUTO_CLASS.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

Without `import subquad`, pass `trust_remote_code=True`; subquad must be installed all the same."""


def _what_it_is(card: ModelCard) -> str:
    mixers = ", ".join(f"{count} × {label}" for label, count in card.mixers.items())
    if card.teacher is None:
        return f"A Llama-shaped model trained from random weights by subquad. Attention layers: {mixers}."
    return f"`{card.teacher}` with its softmax attention converted by subquad. Layers: {mixers}."


def _hub_id(teacher: str | None) -> str | None:
    """Return the teacher where it is the name of a model on the hub."""
    return teacher if teacher and _HUB_ID.fullmatch(teacher) and not Path(teacher).exists() else None


def _losses(card: ModelCard) -> str:
    if not card.losses:
        return ""
    rows = [f"| {label} | {loss:.4f} | {math.exp(loss):.3f} |" for label, loss in card.losses.items()]
    where = f" on {card.loss_data}" if card.loss_data else ""
    table = "\n".join(["| model | loss (nats per token) | perplexity |", "|---|---|---|", *rows])
    return f"## Held-out loss\n\nMeasured{where}; every model saw the same tokens.\n\n{table}"


def _memory(card: ModelCard) -> str:
    if not card.cache_bytes:
        return ""
    rows = [f"| {length:,} | {own:,} | {kv:,} |" for length, (own, kv) in sorted(card.cache_bytes.items())]
    table = "\n".join(["| tokens | this model (bytes) | KV cache of the teacher (bytes) |", "|---|---|---|", *rows])
    return f"## Memory while generating one sequence\n\n{table}"


def _training(card: ModelCard) -> str:
    lines = [f"- {stage}: {tokens:,} tokens" for stage, tokens in card.training_tokens.items()]
    if card.command:
        lines.append(f"- command: `{card.command}`")
    if card.versions:
        lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in card.versions.items()))
    return "## How it was made\n\n" + "\n".join(lines) if lines else ""
