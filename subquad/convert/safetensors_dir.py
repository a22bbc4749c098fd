"""Reading what a directory of safetensors holds, from the headers alone."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from subquad.errors import SourceError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LFS_MARK = b"version https://git-lfs"
Shapes = dict[str, tuple[int, ...]]


def read_shapes(directory: Path) -> Shapes:
    """Return the shape of every tensor of a checkpoint; no tensor is read.

    Args:
        directory: A Hugging Face checkpoint directory.

    Returns:
        Tensor name to shape.

    Raises:
        SourceError: No weights, a shard that the index names is missing, or a file that is truncated or damaged.
    """
    if (directory / SINGLE_FILE).is_file():
        return _file_shapes(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).is_file():
        return _sharded_shapes(directory)
    pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if pickled:
        raise SourceError(
            f"{directory} holds its weights as {pickled[0]}, a pickle file that can run code and cannot be checked. "
            "Save it as safetensors with transformers: from_pretrained(...) and then save_pretrained(...)."
        )
    raise SourceError(
        f"{directory} has a config.json but no weights; it needs {SINGLE_FILE}, or {INDEX_FILE} and its shards. "
        "Download it completely."
    )


def _sharded_shapes(directory: Path) -> Shapes:
    index = directory / INDEX_FILE
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{index} is damaged ({error!r}); download it again.") from error
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise SourceError(
            f"{directory} lacks {len(missing)} of the {len(shards)} weight files that its index names: "
            f"{', '.join(missing[:5])}. Download it completely."
        )
    shapes = {name: _file_shapes(directory / name) for name in shards}
    lost = [key for key, name in weight_map.items() if key not in shapes[name]]
    if lost:
        raise SourceError(
            f"{directory / weight_map[lost[0]]} does not hold {lost[0]!r}, though the index says so "
            f"({len(lost)} such tensors). The files belong to different checkpoints; download all of them again."
        )
    return {key: shapes[name][key] for key, name in weight_map.items()}


def _file_shapes(path: Path) -> Shapes:
    try:
        # opening checks the header and that the file is exactly as long as the header says
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            start = file.read(len(_LFS_MARK))
        if start == _LFS_MARK:
            raise SourceError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` beside it.") from error
        raise SourceError(
            f"{path} is truncated or damaged ({error}; the file has {path.stat().st_size:,} bytes). Download it again."
        ) from error
