"""Tiny models with a byte-level tokenizer, and small data files, for the tests of lm-eval tasks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.eval.contestants import Contestant
from subquad.layers import resolve_mixer
from tests.tiny_llama import tiny_teacher

MODES = ("teacher", "window_only", "student")
SENTENCES = [
    ("a fine , warm film that never once hurries its people . ", 1),
    ("dull . ", 0),
    ('the " plot " is nowhere , and the jokes , such as they are , arrive late , tired and more than once . ', 0),
    ("see it ", 1),
    ("an odd , quiet and very funny little picture ", 1),
    ("too long by half ", 0),
    ("it works ", 1),
    ("one leaves the cinema with nothing at all but a headache , a cold and a sense of having been robbed ", 0),
    ("bright and quick ", 1),
]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and no padding token, as stories260K has none."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: index for index, letter in enumerate(letters, start=3)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def byte_teacher():
    return tiny_teacher(vocab_size=259, max_position_embeddings=512)


def converted(model, **mixer):
    """The model, converted in place, with a far part large enough to matter."""
    parts = resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2} | mixer)
    model = apply_plan(model, plan_conversion(model.config, parts)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_mix"):
                parameter.fill_(0.0)
    return model


def contestants(model, tokenizer) -> list[Contestant]:
    return [Contestant(mode, "tiny", model, tokenizer, mode) for mode in MODES]


def write_sst2(folder: Path, *, train: bool = False) -> Path:
    """The classic layout."""
    path = folder / "SST-2"
    path.mkdir(parents=True, exist_ok=True)
    table = "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in SENTENCES)
    (path / "dev.tsv").write_text(table, encoding="utf-8")
    if train:
        rows = "".join(f"example number {index}\t{index % 2}\n" for index in range(20))
        (path / "train.tsv").write_text("sentence\tlabel\n" + rows, encoding="utf-8")
    return folder


def samples(folder: Path, task: str, model: str) -> list[dict]:
    """The newest samples of a task in lm-eval's files."""
    paths = sorted((folder / "evals" / "lm-eval" / model).glob(f"samples_{task}_*.jsonl"))
    return [json.loads(line) for line in paths[-1].read_text(encoding="utf-8").splitlines()]


def log_likelihoods(folder: Path, task: str, model: str) -> list[float]:
    return [float(answer[0]) for sample in samples(folder, task, model) for (answer,) in sample["resps"]]
