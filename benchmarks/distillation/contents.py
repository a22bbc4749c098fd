"""What a prepared folder holds, under which names, and reading it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.distillation.bundle import join_bundle
from benchmarks.distillation.rows import PackedRows
from subquad.errors import DataError
from subquad.eval.niah.prompts import NiahPrompt
from subquad.eval.niah.settings import NiahSettings

ROWS = "rows.safetensors"
HELD_OUT = "held_out.safetensors"
NEEDLES = "needles.json"
ABOUT = "about.json"
MODEL = "model"
JOINED = "joined"


@dataclass(frozen=True)
class Prepared:
    """What a run reads.

    Attributes:
        model: Source of the teacher: a checkpoint's folder or a `.gguf` file.
        rows: Training rows.
        held_out: Rows to measure on.
        prompts: Needle prompts, by length.
        needle: What they were made with.
        about: Where everything came from, as plain values.
    """

    model: str
    rows: PackedRows
    held_out: PackedRows
    prompts: list[NiahPrompt]
    needle: NiahSettings
    about: dict[str, Any]

    def excerpt(self, num_rows: int) -> Prepared:
        """Return the same with the first held-out rows, and one needle prompt of each length."""
        held_out = self.held_out.head(num_rows)
        prompts = list({prompt.length: prompt for prompt in reversed(self.prompts)}.values())[::-1]
        return replace(self, held_out=held_out, prompts=prompts)


def write_needles(path: Path, prompts: list[NiahPrompt], settings: NiahSettings) -> None:
    """Write prompts with their answers as JSON."""
    content = {"settings": settings.model_dump(mode="json"), "prompts": [asdict(prompt) for prompt in prompts]}
    path.write_text(json.dumps(content), encoding="utf-8")


def read_prepared(folder: Path) -> Prepared:
    """Join the loads that were carried and read them; the weights are not loaded.

    Args:
        folder: The folder of the loads; the joined files go to `joined` in it.

    Returns:
        What was prepared.

    Raises:
        DataError: A load is missing or damaged, or a file is not what `prepare` writes.
        OutputError: The joined files cannot be written.
    """
    joined = folder / JOINED
    join_bundle(folder, joined)
    try:
        about = dict(json.loads((joined / ABOUT).read_text(encoding="utf-8")))
        needles = json.loads((joined / NEEDLES).read_text(encoding="utf-8"))
        settings = NiahSettings.model_validate(needles["settings"])
        prompts = [_prompt(fields) for fields in needles["prompts"]]
        model = str(joined / MODEL / about["model_file"]) if about["model_file"] else str(joined / MODEL)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} was not prepared by this version ({error}); prepare it again") from error
    rows, held_out = PackedRows.load(joined / ROWS), PackedRows.load(joined / HELD_OUT)
    return Prepared(model, rows, held_out, prompts, settings, about)


def _prompt(fields: dict[str, Any]) -> NiahPrompt:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    spans = tuple((int(first), int(last)) for first, last in fields["key_spans"])
    return NiahPrompt(**{**fields, **lists, "key_spans": spans})
