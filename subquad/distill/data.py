"""Token data: documents of a source, tokenised and packed into rows of equal length."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from subquad.distill.packing import pack_documents
from subquad.distill.rows import is_counted
from subquad.distill.sources import TextSource, document_texts, load_documents
from subquad.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

# rows are drawn from this many times the tokens asked for, so that a short run still sees many documents
POOL_FACTOR = 16
_TOKENISE_BATCH = 16
_STREAM_PACK_BATCH = 256
_STREAM_SHUFFLE_BUFFER = 1000


def build_token_dataset(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    seed: int = 0,
    max_tokens: int | None = None,
    *,
    shuffle: bool = True,
) -> Dataset | IterableDataset:
    """Tokenise a source and pack it to `seq_len`; the same arguments always give the same rows in the same order.

    Each document is tokenised with the special tokens the tokenizer adds by default (Llama 3 puts a BOS before it,
    SmolLM2 adds nothing) and nothing else: positions that restart and labels of -100 already keep documents apart, so
    a separator the checkpoint was not trained with would only add a token nobody predicts.

    A source that does not stream is packed in memory, 12 bytes per token (stream what does not fit): the documents
    are shuffled, then the rows, and `max_tokens` are taken. A stream is shuffled in a buffer of documents and packed
    while it is read, 256 documents at a time; its order is fixed by the seed, so training resumes by position.

    Args:
        source: Where the documents are, and which part of them.
        tokenizer: The checkpoint's tokenizer.
        seq_len: Tokens per row, at least 2.
        seed: Order of documents and rows.
        max_tokens: Upper bound of the tokens in the result, None for all; fewer are given, with a warning, where the
            source has no more.
        shuffle: False keeps documents and rows in the order of the text: the first `max_tokens`.

    Returns:
        Rows `input_ids`, `position_ids`, `labels` of `pack_documents`, as torch tensors `[seq_len]` int64.

    Raises:
        ConfigError: `seq_len` below 2 or `max_tokens` below `seq_len`.
        DataError: The source is missing, unreadable, empty, or has fewer tokens than one row.
    """
    if seq_len < 2:
        raise ConfigError(
            f"seq_len is {seq_len}; it must be at least 2, since a token is predicted from the one before"
        )
    if max_tokens is not None and max_tokens < seq_len:
        raise ConfigError(
            f"max_tokens is {max_tokens}, less than one row of seq_len {seq_len}; raise it or shorten rows"
        )
    documents = load_documents(source)
    pack = _memory_rows if is_counted(documents) else _stream_rows
    return pack(documents, source, tokenizer, seq_len, seed if shuffle else None, max_tokens)


def _memory_rows(
    documents: Dataset,
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    seed: int | None,
    max_tokens: int | None,
) -> Dataset:
    order = np.arange if seed is None else np.random.default_rng(seed).permutation
    shuffled = (documents[int(index)] for index in order(len(documents)))
    texts = (text for row in shuffled for text in document_texts(source, row))
    pool = None if max_tokens is None else POOL_FACTOR * max_tokens
    tokens = _tokenise_with_progress(texts, tokenizer, pool, len(documents))
    rows = pack_documents(tokens, seq_len)
    num_rows = len(rows["input_ids"])
    if not num_rows:
        found = sum(map(len, tokens))
        raise DataError(
            f"{source.describe()} (part {source.part}) has {found} tokens, fewer than one row of seq_len {seq_len}. "
            "Give more text or a smaller seq_len"
        )
    wanted = num_rows if max_tokens is None else max_tokens // seq_len
    if num_rows < wanted:
        logger.warning(
            "%s (part %s) has %d tokens of the %d asked for; training repeats them, a measurement uses these alone",
            source.describe(),
            source.part,
            num_rows * seq_len,
            wanted * seq_len,
        )
    chosen = order(num_rows)[:wanted]
    return rows_dataset({name: column[chosen] for name, column in rows.items()})


def rows_dataset(columns: dict[str, np.ndarray]) -> Dataset:
    """Return rows of equal length as a data set in memory.

    Args:
        columns: name to integers `[num_rows, seq_len]`.

    Returns:
        One row each, as torch tensors `[seq_len]` int64.
    """
    from datasets import Dataset

    lists = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(column.ravel()), column.shape[1])
        for name, column in columns.items()
    }
    return Dataset(pa.table(lists)).with_format("torch")


def _tokenise_with_progress(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, enough: int | None, num_documents: int
) -> list[np.ndarray]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tokens: list[np.ndarray] = []
    count = 0
    with Progress(*columns, transient=True) as progress:
        unit, total = ("documents", num_documents) if enough is None else ("tokens", enough)
        task = progress.add_task(f"tokenising ({unit})", total=total)
        for document in _tokenise(texts, tokenizer):
            tokens.append(document)
            count += len(document)
            progress.update(task, completed=len(tokens) if enough is None else min(count, enough))
            if enough is not None and count >= enough:
                break
    return tokens


def _tokenise(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _TOKENISE_BATCH:
            yield from _token_arrays(batch, tokenizer)
            batch = []
    if batch:
        yield from _token_arrays(batch, tokenizer)


def _token_arrays(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    # verbose=False: a document longer than the context is expected here, it is cut into rows
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _stream_rows(
    documents: IterableDataset,
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    seed: int | None,
    max_tokens: int | None,
) -> IterableDataset:
    columns = documents.column_names or list(next(iter(documents)))

    def pack(batch: dict[str, list]) -> dict[str, np.ndarray]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        texts = [text for row in rows for text in document_texts(source, row)]
        return pack_documents(_token_arrays(texts, tokenizer) if texts else [], seq_len)

    stream = documents if seed is None else documents.shuffle(seed=seed, buffer_size=_STREAM_SHUFFLE_BUFFER)
    stream = stream.map(pack, batched=True, batch_size=_STREAM_PACK_BATCH, remove_columns=columns)
    if next(iter(stream), None) is None:
        raise DataError(
            f"{source.describe()} (part {source.part}) has fewer tokens than one row of seq_len {seq_len}. "
            "Give more text or a smaller seq_len"
        )
    if max_tokens is not None:
        stream = stream.take(max_tokens // seq_len)
    return stream.with_format("torch")
