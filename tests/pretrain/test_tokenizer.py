"""The byte-level BPE that is trained on the training text."""

import shutil

import pytest

from subquad.distill import TextSource
from subquad.errors import DataError, OutputError
from subquad.pretrain.schema import TokenizerSection
from subquad.pretrain.tokenizer import provide_tokenizer


@pytest.fixture
def source(texts):
    return TextSource(kind="text", paths=(texts["train"],))


def test_trained_tokenizer_writes_any_text_and_is_the_same_every_time(source, tmp_path):
    section = TokenizerSection(vocab_size=270)
    first, second = (provide_tokenizer(section, source, tmp_path / name) for name in ("a", "b"))
    text = "the heron, naïve – 鷺\n\tstands"
    assert first(text)["input_ids"] == second(text)["input_ids"]
    assert first.decode(first(text)["input_ids"]) == text
    assert len(first) == 270
    assert first.eos_token == "<|endoftext|>"
    # merges were learned: fewer tokens than bytes
    assert len(first(" heron")["input_ids"]) < len(" heron")


def test_a_trained_tokenizer_is_used_again(source, tmp_path, monkeypatch):
    section = TokenizerSection(vocab_size=270)
    first = provide_tokenizer(section, source, tmp_path / "a")
    monkeypatch.setattr("subquad.pretrain.tokenizer.train_tokenizer", None)
    assert provide_tokenizer(section, source, tmp_path / "a").get_vocab() == first.get_vocab()


def test_a_tokenizer_of_other_settings_is_refused(source, tmp_path):
    provide_tokenizer(TokenizerSection(vocab_size=270), source, tmp_path / "a")
    with pytest.raises(OutputError, match=r"'vocab_size': 270.*asks for.*'vocab_size': 280"):
        provide_tokenizer(TokenizerSection(vocab_size=280), source, tmp_path / "a")


def test_too_little_text_says_how_many_tokens_there_are(source, tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.vocab_size is 5000; lower it"):
        provide_tokenizer(TokenizerSection(vocab_size=5000), source, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_tokenizer_that_is_not_there_says_so(source, tmp_path):
    with pytest.raises(DataError, match=r"the tokenizer .*absent cannot be loaded"):
        provide_tokenizer(TokenizerSection(source=str(tmp_path / "absent")), source, tmp_path / "a")


def test_an_existing_tokenizer_is_taken_as_it_is(source, tmp_path):
    trained = provide_tokenizer(TokenizerSection(vocab_size=270), source, tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "tokenizer.json"):
        taken = provide_tokenizer(TokenizerSection(source=str(path)), source, tmp_path / "unused")
        assert taken.get_vocab() == trained.get_vocab()
    assert not (tmp_path / "unused").exists()


def test_a_damaged_tokenizer_of_our_own_is_to_be_removed(source, tmp_path):
    section, folder = TokenizerSection(vocab_size=270), tmp_path / "a"
    trained = provide_tokenizer(section, source, folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(OutputError, match=rf"cannot be read: .*\. Remove {folder} and run the same command again"):
        provide_tokenizer(section, source, folder)
    shutil.rmtree(folder)
    assert provide_tokenizer(section, source, folder).get_vocab() == trained.get_vocab()
