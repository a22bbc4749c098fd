"""Writing a file or a directory so that it is either complete or what it was before."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from subquad.errors import OutputError

_LEFTOVER_SECONDS = 24 * 3600


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the target's place once the block has ended without an error.

    The new directory is made beside the target, so that the last step is a rename on one file system. What stood at
    the target stays untouched until then, and stays for good if the block fails.

    Args:
        target: The directory to write. Its parents are created.

    Yields:
        A directory to write into.

    Raises:
        OutputError: It cannot be written (full disk, missing permission, a file in the way).
    """
    temporary = None
    try:
        if target.is_symlink() or target.is_file():
            raise OutputError(f"{target} is a file or a link, not a directory; give another output directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
        yield temporary
        _open_to_others(temporary)
        _flush(temporary)
        _take_place(temporary, target)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{target} could not be written: {error}. What was there before is unchanged. "
            "Free some space or choose another output directory, then run the same command again."
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Delete what processes that were killed left behind; what is newer than a day may still be written to."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        if time.time() - left.stat().st_mtime > _LEFTOVER_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _take_place(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    # a directory that is not empty cannot be renamed over, so the old one steps aside first
    old = new.with_suffix(".old")
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(directory: Path) -> None:
    """Bring files and directories to the disk: a rename must not survive a crash that its content does not."""
    for path in [*directory.rglob("*"), directory, directory.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_to_others(directory: Path) -> None:
    """Give files and directories the usual permissions: mkdtemp and safetensors make theirs for the owner alone."""
    mask = os.umask(0o022)  # the mask can only be read by setting it
    os.umask(mask)
    for path in [directory, *directory.rglob("*")]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def atomic_file(path: Path, content: bytes) -> None:
    """Write a file so that it is either complete or what it was before.

    Args:
        path: The file; its directory is created if missing.
        content: Its bytes.

    Raises:
        OutputError: It cannot be written (full disk, missing permission).
    """
    # In the same directory, so that the last step is a rename within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(
            f"{path} could not be written: {error}. What was there before is unchanged. "
            "Free some space or choose another folder."
        ) from error
