"""Packed rows in two bytes per token and a few bits, to carry; read without `datasets`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from torch.utils.data import Dataset, Subset

from subquad.distill.packing import IGNORED_LABEL, document_positions
from subquad.distill.recall import WEIGHTS_COLUMN
from subquad.errors import DataError


class PackedRows(Dataset):
    """Rows of equal length, as `build_token_dataset` and `add_recall` give them.

    What follows from the rest is not stored: positions and labels from where documents start, weights from which
    tokens are answers.

    Attributes:
        input_ids: `[num_rows, seq_len]` uint16, or uint32 for a vocabulary that needs it.
        starts: `[num_rows, seq_len / 8]` uint8, a bit for each token: whether a document starts there.
        answers: The same for the tokens of recall's answers; None where no row has recall.
        answer_weight: Weight of those; the others have 1.
    """

    def __init__(
        self, input_ids: np.ndarray, starts: np.ndarray, answers: np.ndarray | None = None, answer_weight: float = 1.0
    ) -> None:
        """Refer to arrays, see above."""
        self.input_ids, self.starts = input_ids, starts
        self.answers, self.answer_weight = answers, answer_weight

    @classmethod
    def pack(cls, columns: Mapping[str, np.ndarray]) -> PackedRows:
        """Pack columns.

        Args:
            columns: `input_ids`, `position_ids` and, with recall, `loss_weights`, each `[num_rows, seq_len]`.

        Returns:
            The rows.

        Raises:
            DataError: Weights of more than one value beside 1.
        """
        input_ids = columns["input_ids"]
        small = np.uint16 if input_ids.max(initial=0) < 2**16 else np.uint32
        packed = cls(input_ids.astype(small), np.packbits(columns["position_ids"] == 0, axis=1))
        weights = columns.get(WEIGHTS_COLUMN)
        if weights is not None:
            others = np.unique(weights[weights != 1])
            if len(others) > 1:
                raise DataError(f"answers of recall must have one weight, got {others.tolist()}")
            packed.answers = np.packbits(weights != 1, axis=1)
            packed.answer_weight = float(others[0]) if len(others) else 1.0
        return packed

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.input_ids.size

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row: `input_ids`, `position_ids`, `labels` `[seq_len]` int64, `loss_weights` float32 if any."""
        input_ids = self.input_ids[index].astype(np.int64)
        positions = document_positions(self._bits(self.starts[index]))
        row = {
            "input_ids": input_ids,
            "position_ids": positions,
            "labels": np.where(positions == 0, IGNORED_LABEL, input_ids),
        }
        if self.answers is not None:
            answers = self._bits(self.answers[index])
            row[WEIGHTS_COLUMN] = np.where(answers, self.answer_weight, 1.0).astype(np.float32)
        return {name: torch.from_numpy(column) for name, column in row.items()}

    def take(self, first: int, count: int) -> Subset:
        """Return `count` rows from the row `first` on, going round where the end is reached."""
        return Subset(self, [(first + index) % len(self) for index in range(count)])

    def head(self, count: int) -> PackedRows:
        """Return the first `count` rows, or all if there are fewer."""
        answers = None if self.answers is None else self.answers[:count]
        return PackedRows(self.input_ids[:count], self.starts[:count], answers, self.answer_weight)

    def _bits(self, packed: np.ndarray) -> np.ndarray:
        return np.unpackbits(packed, count=self.seq_len).astype(bool)

    def save(self, path: Path) -> None:
        """Write a `.safetensors` file."""
        arrays = {"input_ids": self.input_ids, "starts": self.starts}
        if self.answers is not None:
            arrays["answers"] = self.answers
        save_file(arrays, path, metadata={"answer_weight": json.dumps(self.answer_weight)})

    @classmethod
    def load(cls, path: Path) -> PackedRows:
        """Read a file that `save` wrote.

        Args:
            path: The file.

        Returns:
            The rows.

        Raises:
            DataError: It is missing, damaged or something else.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                weight = float(json.loads(file.metadata()["answer_weight"]))
            return cls(arrays["input_ids"], arrays["starts"], arrays.get("answers"), weight)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} holds no packed rows ({error}); prepare it again") from error
