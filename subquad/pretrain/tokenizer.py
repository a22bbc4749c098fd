"""The tokenizer of a model from random weights: an existing one, or a byte-level BPE trained on the training text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from subquad.convert.atomic import atomic_directory
from subquad.distill import TextSource
from subquad.distill.sources import DOCUMENT_SEPARATOR, document_texts, load_documents
from subquad.errors import DataError, OutputError
from subquad.pretrain.schema import DEFAULT_TRAIN_BYTES, DEFAULT_VOCAB_SIZE, TokenizerSection

_SETTINGS_FILE = "subquad_tokenizer.json"


def provide_tokenizer(section: TokenizerSection, source: TextSource, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a recipe, trained now if it has to be and was not before.

    Training is deterministic: the same text and settings give the same tokenizer.

    Args:
        section: what the recipe says.
        source: training text.
        folder: where a trained tokenizer lies, or is written whole or not at all.

    Returns:
        The tokenizer, with an end-of-text token.

    Raises:
        DataError: an existing tokenizer cannot be loaded, or the text cannot be read or is too little.
        OutputError: the folder holds a tokenizer of other settings or a damaged one, or cannot be written.
    """
    if section.source is not None:
        return _load(section.source)
    vocab_size = section.vocab_size or DEFAULT_VOCAB_SIZE
    train_bytes = section.train_bytes or DEFAULT_TRAIN_BYTES
    settings: dict[str, object] = {"vocab_size": vocab_size, "train_bytes": train_bytes, "text": source.describe()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    # runs of one study may share the folder: one trains, the others wait for it
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if holds_trained_tokenizer(folder):
            _refuse_other_settings(folder, settings)
        else:
            tokenizer = train_tokenizer(source, vocab_size, train_bytes)
            with atomic_directory(folder) as staged:
                tokenizer.save_pretrained(staged)
                (staged / _SETTINGS_FILE).write_text(json.dumps(settings, indent=1), encoding="utf-8")
    # as later runs get it, so that a resumed run cannot differ from the first
    try:
        return _read(str(folder))
    except Exception as error:  # as in _load
        raise OutputError(
            f"the trained tokenizer {folder} cannot be read: {_first_line(error)}. Remove {folder} and run the same "
            "command again: the same text gives the same tokenizer."
        ) from error


def holds_trained_tokenizer(folder: Path) -> bool:
    """Return whether `provide_tokenizer` has trained the tokenizer of a folder."""
    return (folder / _SETTINGS_FILE).is_file()


def train_tokenizer(source: TextSource, vocab_size: int, train_bytes: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (as GPT-2's), which can write any text.

    Args:
        source: training text; documents are read in order until there is enough.
        vocab_size: number of tokens, the 256 bytes and the end-of-text token among them.
        train_bytes: bytes of text to read.

    Returns:
        The tokenizer; it adds no special tokens by itself.

    Raises:
        DataError: the text is missing, unreadable, or too little for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DOCUMENT_SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(source, train_bytes), trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise DataError(
            f"{source.describe()} has words for {found} tokens, tokenizer.vocab_size is {vocab_size}; "
            "lower it, or give more text"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=DOCUMENT_SEPARATOR, clean_up_tokenization_spaces=False
    )


def _texts(source: TextSource, train_bytes: int) -> Iterator[str]:
    left = train_bytes
    for row in load_documents(source):
        for text in document_texts(source, row):
            yield text
            left -= len(text.encode("utf-8"))
            if left <= 0:
                return


def _load(source: str) -> PreTrainedTokenizerBase:
    try:
        return _read(source)
    except Exception as error:
        # the readers raise errors of several unrelated classes for one reason: there is no tokenizer to be had
        raise DataError(
            f"the tokenizer {source} cannot be loaded: {_first_line(error)}. Give a folder with a tokenizer's files, a "
            "tokenizer.json or a hub id as tokenizer.source, or leave it out to train one"
        ) from error


def _read(source: str) -> PreTrainedTokenizerBase:
    path = Path(source)
    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    return AutoTokenizer.from_pretrained(source)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _refuse_other_settings(folder: Path, settings: dict[str, object]) -> None:
    try:
        recorded = json.loads((folder / _SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{folder / _SETTINGS_FILE} cannot be read: {error}. Remove {folder} to train anew."
        ) from error
    if recorded != settings:
        raise OutputError(
            f"{folder} holds a tokenizer trained with {recorded}, the recipe asks for {settings}. "
            "Name another folder (output_dir=FOLDER), or remove that one."
        )
