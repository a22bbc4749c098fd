"""Files in loads of a limited size: cut into pieces, carried one load at a time, joined and checked where they arrive.

Every load is a folder `load-N` with its pieces and the manifest of all loads, so that a load that is missing is named.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from subquad.convert.atomic import atomic_directory
from subquad.errors import ConfigError, DataError

MANIFEST = "manifest.json"
# as much of a file as is in memory at a time
_BLOCK = 2**20


@dataclass(frozen=True)
class Piece:
    """A part of a file.

    Attributes:
        path: Where it is, below the folder of all loads: `load-N/NAME`.
        bytes: Its size.
        sha256: Of its content, hexadecimal.
    """

    path: str
    bytes: int
    sha256: str


def write_bundle(files: Mapping[str, Path], folder: Path, load_bytes: int) -> list[Path]:
    """Cut files into as few loads of equal size as the limit allows.

    Args:
        files: Name to file; a name may have folders (`model/config.json`).
        folder: Where the loads are written; what stood there is replaced once all of them are.
        load_bytes: Most bytes of one load's pieces; its manifest, some kB, comes on top.

    Returns:
        The folders of the loads, in order.

    Raises:
        ConfigError: `load_bytes` below 1, or no file with content.
        OutputError: The folder cannot be written.
    """
    if load_bytes < 1:
        raise ConfigError(f"a load must hold at least 1 byte, got {load_bytes}")
    total = sum(path.stat().st_size for path in files.values())
    if not total:
        raise ConfigError("there is nothing to carry: no file has any content")
    equal = math.ceil(total / math.ceil(total / load_bytes))
    with atomic_directory(folder) as new:
        writer = _Writer(new, equal)
        described = [_describe(writer, index, name, path) for index, (name, path) in enumerate(files.items())]
        manifest = json.dumps({"loads": writer.load, "files": described}, indent=1)
        for load in range(1, writer.load + 1):
            (new / f"load-{load}" / MANIFEST).write_text(manifest, encoding="utf-8")
    return [folder / f"load-{load}" for load in range(1, writer.load + 1)]


class _Writer:
    """Fills one load after the other."""

    def __init__(self, folder: Path, load_bytes: int) -> None:
        self.folder, self.load_bytes = folder, load_bytes
        self.load, self.room = 0, 0

    def piece(self, source: BinaryIO, left: int, name: str) -> Piece:
        """Write as much of what is left of a file as the load has room for; a full one makes way for the next."""
        if not self.room:
            self.load, self.room = self.load + 1, self.load_bytes
            (self.folder / f"load-{self.load}").mkdir()
        size = min(left, self.room)
        path = f"load-{self.load}/{name}"
        digest = hashlib.sha256()
        with (self.folder / path).open("wb") as target:
            for block in _blocks(source, size):
                digest.update(block)
                target.write(block)
        self.room -= size
        return Piece(path, size, digest.hexdigest())


def _describe(writer: _Writer, index: int, name: str, path: Path) -> dict[str, Any]:
    left, pieces = path.stat().st_size, []
    with path.open("rb") as source:
        while left:
            piece = writer.piece(source, left, f"{index:02d}-{path.name}.{len(pieces) + 1}")
            pieces.append(asdict(piece))
            left -= piece.bytes
    return {"name": name, "pieces": pieces}


def _blocks(source: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        block = source.read(min(size, _BLOCK))
        if not block:
            raise DataError(f"{source.name} became shorter while it was read; run the same command again")
        size -= len(block)
        yield block


def join_bundle(folder: Path, target: Path) -> None:
    """Put the files of a bundle together again.

    Args:
        folder: The folder of all loads.
        target: Where the files are written; what stood there is replaced once all of them are whole.

    Raises:
        DataError: A load or piece is missing or damaged, or the loads are of different bundles; nothing is written.
        OutputError: The target cannot be written.
    """
    manifest = _read_manifest(folder)
    with atomic_directory(target) as new:
        for file in manifest["files"]:
            path = new / file["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as joined:
                for piece in (Piece(**fields) for fields in file["pieces"]):
                    _append(folder, piece, joined)


def _append(folder: Path, piece: Piece, joined: BinaryIO) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with (folder / piece.path).open("rb") as source:
            while block := source.read(_BLOCK):
                digest.update(block)
                size += len(block)
                joined.write(block)
    except FileNotFoundError:
        raise DataError(f"{folder / piece.path} is missing; carry all of {Path(piece.path).parent} again") from None
    if size != piece.bytes or digest.hexdigest() != piece.sha256:
        raise DataError(
            f"{folder / piece.path} is damaged: {size:,} bytes with sha256 {digest.hexdigest()[:12]}…, but "
            f"{piece.bytes:,} bytes with {piece.sha256[:12]}… were prepared. Carry {Path(piece.path).parent} again"
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    paths = sorted(folder.glob(f"load-*/{MANIFEST}"))
    if not paths:
        raise DataError(
            f"{folder} has no load-N/{MANIFEST}. Run `prepare` where the libraries are, and carry the folders it names"
        )
    texts = [path.read_text(encoding="utf-8") for path in paths]
    if len(set(texts)) > 1:
        raise DataError(f"the loads in {folder} are of different preparations; carry all of them from one")
    try:
        manifest = dict(json.loads(texts[0]))
        wanted = [f"load-{load}" for load in range(1, int(manifest["loads"]) + 1)]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{paths[0]} is damaged ({error}); carry {paths[0].parent.name} again") from error
    _require_loads(folder, wanted, [path.parent.name for path in paths])
    return manifest


def _require_loads(folder: Path, wanted: Sequence[str], found: Sequence[str]) -> None:
    missing = [load for load in wanted if load not in found]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)} of {len(wanted)} loads; carry them, too")
