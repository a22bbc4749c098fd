"""What an evaluation measures: the settings of `subquad eval` and of `eval.suite` in a recipe."""

from __future__ import annotations

import glob
from typing import Annotated

from pydantic import Field

from subquad.errors import ConfigError
from subquad.eval.finetune import FinetuneSettings
from subquad.eval.harness import LmEvalSettings, check_tasks
from subquad.eval.loss import POSITION_BUCKETS
from subquad.eval.niah import NiahSettings
from subquad.eval.records import SAFE_NAME
from subquad.eval.speed import SpeedSettings
from subquad.recipes.fields import Ascending, Count, Section

# Tasks that are not lm-eval's.
OWN_TASKS = ("loss", "layers", "niah", "speed", "perplexity", "glue-finetune")


class TextLossSettings(Section):
    """The held-out text of `loss` and `layers`.

    Attributes:
        name: a name of this text; its records are those of the task `loss-NAME`, so that texts stand beside each other.
        text: files or patterns; none is the embedded messages that training leaves out.
        tokens: most tokens to measure on.
        layer_tokens: most of these tokens for `layers`.
        seq_len: tokens per row; a document that is longer is cut into rows.
        shuffle: rows drawn from all of the text by `seed`; false is the first ones, in order.
        batch_size: rows per forward pass.
        position_buckets: ascending upper bounds of the position buckets.
    """

    name: Annotated[str, Field(pattern=SAFE_NAME)] | None = None
    text: tuple[str, ...] = ()
    tokens: Count = 16_384
    layer_tokens: Count = 4096
    seq_len: Count = 512
    shuffle: bool = True
    batch_size: Count = 4
    position_buckets: Ascending = POSITION_BUCKETS

    @property
    def task(self) -> str:
        """Task of the records."""
        return "loss" if self.name is None else f"loss-{self.name}"


class SuiteSettings(Section):
    """What an evaluation measures.

    Attributes:
        tasks: `loss` (by position), `layers` (error, half-lives and far share of every layer), `niah` (needle in a
            haystack), `speed` (of reading and writing, as ratios to the teacher), `perplexity` (of
            `lm_eval.text_files`, per word and byte), `glue-finetune` (a classification head on every model), `glue`,
            and any task, group or tag of lm-eval.
        seed: seed of the held-out rows.
        loss: settings of `loss` and `layers`.
        niah: settings of `niah`.
        speed: settings of `speed`.
        lm_eval: settings of all tasks of lm-eval; its `tasks` are those of this list.
        finetune: settings of `glue-finetune`.
    """

    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = ("loss", "layers", "niah")
    seed: int = 0
    loss: TextLossSettings = TextLossSettings()
    niah: NiahSettings = NiahSettings()
    speed: SpeedSettings = SpeedSettings()
    lm_eval: LmEvalSettings = LmEvalSettings()
    finetune: FinetuneSettings = FinetuneSettings()

    def named_files(self) -> dict[str, tuple[str, ...]]:
        """Return the files, folders and patterns that the settings name, by key; what they match must exist."""
        data_dir = self.finetune.data_dir
        named = {
            "loss.text": self.loss.text,
            "niah.paths": self.niah.paths,
            "lm_eval.data_dirs": tuple(map(str, self.lm_eval.data_dirs)),
            "lm_eval.text_files": tuple(map(str, self.lm_eval.text_files)),
            "lm_eval.include_path": () if self.lm_eval.include_path is None else (str(self.lm_eval.include_path),),
            "finetune.data_dir": () if data_dir is None else (str(data_dir),),
        }
        return {key: paths for key, paths in named.items() if paths}

    def problems(self) -> list[str]:
        """Return what would only show when a task's turn comes: files that are missing, tasks that nobody knows.

        Returns:
            A line per problem, `key: what is wrong and what to do`.
        """
        found = [
            f"{key}: no file matches {pattern!r}; give paths relative to the current folder"
            for key, patterns in self.named_files().items()
            for pattern in patterns
            if not glob.glob(pattern, recursive=True)
        ]
        if "perplexity" in self.tasks and not self.lm_eval.text_files:
            found.append("tasks: perplexity needs texts: lm_eval.text_files=[FILE]")
        names = [task for task in self.tasks if task not in OWN_TASKS]
        try:
            check_tasks(names, self.lm_eval.include_path)
        except ConfigError as error:
            found.append(f"tasks: {error}; of subquad's own there are {', '.join(OWN_TASKS)}")
        return found
