"""GLUE-shaped toy files with a rule to learn, a word tokenizer and tiny contestants."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.eval.contestants import Contestant
from subquad.layers import resolve_mixer
from subquad.models import SubquadLlamaForCausalLM
from tests.tiny_llama import tiny_teacher

FILLERS = [f"w{index}" for index in range(40)]
SIGNALS = ["bad", "good"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def toy_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(SPECIAL + FILLERS + SIGNALS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def toy_rows(num: int, seed: int) -> list[tuple[str, int]]:
    """Texts of 3 to 15 words whose label is which of two words stands somewhere in them."""
    generator = random.Random(seed)
    rows = []
    for index in range(num):
        words = generator.choices(FILLERS, k=generator.randint(2, 14))
        words.insert(generator.randrange(len(words) + 1), SIGNALS[index % 2])
        rows.append((" ".join(words), index % 2))
    generator.shuffle(rows)
    return rows


def write_sst2(folder: Path, num_train: int = 96, num_dev: int = 64, shuffled: bool = False) -> Path:
    """Write SST-2's files; `shuffled` takes the labels' connection with the texts away."""
    for name, num, seed in (("train", num_train, 1), ("dev", num_dev, 2)):
        rows = toy_rows(num, seed)
        labels = [label for _, label in rows]
        if shuffled:
            random.Random(seed + 2).shuffle(labels)
        lines = [f"{text}\t{label}\n" for (text, _), label in zip(rows, labels, strict=True)]
        path = folder / "SST-2" / f"{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("sentence\tlabel\n" + "".join(lines), encoding="utf-8")
    return folder


def write_pairs(folder: Path, task: str, labels: list[str], columns: str, files: tuple[str, ...]) -> Path:
    """Write a pair task's files, with `num` rows that say nothing."""
    (folder / task).mkdir(parents=True)
    for name in files:
        rows = [(text, "good w1", labels[label % len(labels)]) for text, label in toy_rows(12, 5)]
        lines = ["\t".join(row) + "\n" for row in rows]
        (folder / task / f"{name}.tsv").write_text(columns + "\n" + "".join(lines), encoding="utf-8")
    return folder


def toy_model(window: int = 8) -> SubquadLlamaForCausalLM:
    """A converted model whose far part is large enough to matter."""
    teacher = tiny_teacher()
    mixer = resolve_mixer({"preset": "2mamba", "window": window, "sinks": 2})
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer, layers=None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_mix"):
                parameter.fill_(-2.0)
    return model


def contestants(*modes: str, model: SubquadLlamaForCausalLM | None = None) -> list[Contestant]:
    """Contestants that share one set of weights."""
    model, tokenizer = model or toy_model(), toy_tokenizer()
    return [Contestant(mode, "toy", model, tokenizer, mode) for mode in modes]
