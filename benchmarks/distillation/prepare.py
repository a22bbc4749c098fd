"""Prepare: texts become packed rows, needles become tokens, and all of it, with the teacher, is cut into loads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from benchmarks.distillation.bundle import write_bundle
from benchmarks.distillation.contents import ABOUT, HELD_OUT, MODEL, NEEDLES, ROWS, write_needles
from benchmarks.distillation.rows import PackedRows
from benchmarks.quality.corpus import build as build_corpus
from subquad.convert.source import SourceInfo, load_teacher
from subquad.distill import TextSource, build_token_dataset
from subquad.distill.recall import RecallConfig, add_recall
from subquad.errors import ConfigError, DataError
from subquad.eval.niah.prompts import build_prompts
from subquad.eval.niah.settings import NiahSettings
from subquad.eval.niah.summary import lengths_beyond
from subquad.eval.storage import collect_versions

_MIB = 2**20
# a text file becomes documents of about this many characters, so that every stage sees all of it
_CHARACTERS = 8000
_COLUMNS = ("input_ids", "position_ids", "loss_weights")
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What to prepare.

    Attributes:
        model: The teacher: a name, a folder or a `.gguf` file.
        texts: Text files (`.gz` too), cut into documents, or `.jsonl` files with a document in `text` of every line;
            none is the embedded corpus.
        held_out: Files to measure on; none is one document in ten of the texts, which is then not trained on.
        seq_len: Tokens of a row.
        tokens: Most training tokens.
        held_out_tokens: Most tokens to measure on.
        recall: Share of the training rows that ask for recall; 0 is none.
        needle: Needle prompts.
        load_mib: Most MiB of a load.
        seed: Of the choice of rows and of recall.
    """

    model: str
    texts: tuple[Path, ...] = ()
    held_out: tuple[Path, ...] = ()
    seq_len: int = 1024
    tokens: int = 30_000_000
    held_out_tokens: int = 131_072
    recall: float = 0.0
    needle: NiahSettings = field(default_factory=NiahSettings)
    load_mib: float = 56.0
    seed: int = 0


def prepare(options: PrepareOptions, output: Path) -> list[Path]:
    """Write everything a run needs into loads.

    Args:
        options: What to prepare.
        output: Folder of the loads.

    Returns:
        The folders of the loads.

    Raises:
        ConfigError: A model on the hub or rows beyond its context.
        SourceError: The model cannot be converted.
        DataError: Missing or too little text, a model without tokenizer, or needles that cannot be built.
        OutputError: The output cannot be written.
    """
    _check_files(options)
    teacher = load_teacher(options.model)
    if teacher.tokenizer is None:
        raise DataError(f"{options.model} has no tokenizer, and preparing tokenises text; put its files beside it")
    _check_context(options, teacher.model.config)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows, held_out = _all_rows(options, teacher.tokenizer, folder)
        rows.save(folder / ROWS)
        held_out.save(folder / HELD_OUT)
        needle = options.needle.resolved(teacher.model.config.max_position_embeddings)
        write_needles(folder / NEEDLES, build_prompts(teacher.tokenizer, needle).prompts, needle)
        model_files = _model_files(teacher.info)
        single = teacher.info.path is not None and teacher.info.path.is_file()
        about = {
            "model": options.model,
            "model_file": next(iter(model_files)) if single else "",
            "texts": [path.name for path in options.texts] or ["embedded corpus"],
            "held_out_texts": [path.name for path in options.held_out] or ["one document in ten of the texts"],
            "train_tokens": rows.num_tokens,
            "held_out_tokens": held_out.num_tokens,
            "seq_len": options.seq_len,
            "recall": asdict(RecallConfig(share=options.recall)) if options.recall else None,
            "seed": options.seed,
            "versions": collect_versions(),
        }
        (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        # small files first, so that a look into the first load says what all of them are
        files = {name: folder / name for name in (ABOUT, NEEDLES, HELD_OUT, ROWS)}
        files |= {f"{MODEL}/{name}": path for name, path in model_files.items()}
        return write_bundle(files, output, int(options.load_mib * _MIB))


def _check_files(options: PrepareOptions) -> None:
    shared = {path.resolve() for path in options.texts} & {path.resolve() for path in options.held_out}
    if shared:
        names = ", ".join(sorted(path.name for path in shared))
        raise ConfigError(
            f"{names}: trained on and measured on; leave --held-out away to hold out one document in ten, or give "
            "other files"
        )
    missing = [str(path) for path in (*options.texts, *options.held_out) if not path.is_file()]
    if missing:
        raise DataError(f"no such file: {', '.join(missing)}")


def _check_context(options: PrepareOptions, config: PretrainedConfig) -> None:
    context = config.max_position_embeddings
    problems = []
    if options.seq_len > context:
        problems.append(f"rows of {options.seq_len} tokens (--seq-len)")
    beyond = lengths_beyond(context, options.needle.resolved(context))
    if beyond:
        problems.append(f"needle prompts of {', '.join(map(str, beyond))} tokens with their answers (--needle-lengths)")
    if problems:
        raise ConfigError(f"beyond the context of {options.model}, {context} tokens: {'; '.join(problems)}")


def _all_rows(
    options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, scratch: Path
) -> tuple[PackedRows, PackedRows]:
    """Return training rows and held-out rows."""
    seed, seq_len = options.seed, options.seq_len
    own = list(_sources(options.texts, scratch / "train", "all" if options.held_out else "train"))
    other = list(_sources(options.held_out or options.texts, scratch / "eval", "all" if options.held_out else "eval"))
    trained = _columns(own, tokenizer, seq_len, options.tokens, seed, options.recall)
    # other seeds draw other rows of the same text; held-out rows do not depend on how much is trained
    return PackedRows.pack(trained), PackedRows.pack(
        _columns(other, tokenizer, seq_len, options.held_out_tokens, seed + 1, recall=0.0)
    )


def _sources(paths: Sequence[Path], scratch: Path, part: Any) -> Iterator[TextSource]:
    """Return text as sources of documents: lines of JSON as they are, other files cut into documents first."""
    if not paths:
        yield TextSource(kind="embedded", part=part)
        return
    lines = tuple(str(path) for path in paths if path.suffix == ".jsonl")
    if lines:
        yield TextSource(kind="jsonl", paths=lines, part=part)
    texts = [path for path in paths if path.suffix != ".jsonl"]
    if texts:
        scratch.mkdir()
        whole = sum(path.stat().st_size for path in texts) * 1000
        documents = build_corpus(texts, characters=_CHARACTERS, most=whole)
        corpus = scratch / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in documents), encoding="utf-8")
        yield TextSource(kind="jsonl", paths=(str(corpus),), part=part)


def _columns(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    tokens: int,
    seed: int,
    recall: float,
) -> dict[str, np.ndarray]:
    """Return packed columns `[num_rows, seq_len]` of all sources in one random order, at most as many as asked for."""
    parts = []
    for source in sources:
        rows = build_token_dataset(source, tokenizer, seq_len, seed, tokens)
        if recall:
            rows = add_recall(rows, tokenizer, RecallConfig(share=recall), seed)
        numbers = rows.with_format("numpy")
        parts.append({name: np.asarray(numbers[name]) for name in _COLUMNS if name in rows.column_names})
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.random.default_rng(seed).permutation(len(joined["input_ids"]))[: max(1, tokens // seq_len)]
    return {name: column[order] for name, column in joined.items()}


def _model_files(info: SourceInfo) -> dict[str, Path]:
    """Return the files of a checkpoint by name."""
    if info.path is None:
        raise ConfigError(f"{info.source} is on the hub; give a local checkpoint, which can be carried")
    if info.path.is_file():
        return {info.path.name: info.path}
    found = {path.name: path for pattern in _MODEL_FILES for path in sorted(info.path.glob(pattern))}
    return dict(sorted(found.items()))
