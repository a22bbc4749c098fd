"""Tokenizers of the three common kinds, and models whose needle score is known."""

from __future__ import annotations

from functools import lru_cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.eval.niah.texts import FILLER_SENTENCES, INTRODUCTION, NAMES, WORDS, needle_template, question_text
from subquad.layers import resolve_mixer
from subquad.layers.cache import cache_argument
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM

SPECIAL = ["<s>", "</s>"]
KINDS = ("digits", "merged", "spaces")
_LONGEST_MATCH = 8
CACHE = cache_argument(LlamaForCausalLM)


def _corpus() -> list[str]:
    names = " ".join(f"of {name}." for name in NAMES)
    words = " ".join(f"is {word}." for word in WORDS)
    forms = [
        text(kind, None, num, *rest)
        for kind in ("digits", "words")
        for num in (1, 2)
        for text, rest in ((needle_template, (True,)), (question_text, ()))
    ]
    # Frequent enough that their words become tokens; the numbers make merges of digits that "merged" allows.
    numbers = " ".join(f"is {number}." for number in range(100, 999))
    return [" ".join([INTRODUCTION, *FILLER_SENTENCES, *forms, names, words, numbers])] * 3


@lru_cache
def tiny_tokenizer(kind: str = "digits", *, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """A trained tokenizer.

    `digits`: byte-level, every digit alone, so that a space before a number is a token (SmolLM2). `merged`: byte-level,
    numbers in pieces joined with their space (GPT-2). `spaces`: SentencePiece-like, a space before every text.
    """
    inner = Tokenizer(models.BPE())
    if kind == "spaces":
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Split(Regex(r"[\d.,?!]"), "isolated")]
        )
        inner.decoder = decoders.Metaspace()
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if kind == "digits":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
        inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_corpus(), trainer)
    if bos or eos:
        template = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def tiny_sizes(vocab_size: int, context: int = 256) -> dict[str, object]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context,
        "bos_token_id": 0,
        "eos_token_id": 1,
        # Large enough that attention matters: at the default 0.02 every position predicts nearly the same.
        "initializer_range": 0.3,
    }


def random_model(vocab_size: int, context: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**tiny_sizes(vocab_size, context))).eval()


def random_student(vocab_size: int, mixer: object, context: int = 256) -> SubquadLlamaForCausalLM:
    """A converted model whose far part is as large as its window."""
    torch.manual_seed(0)
    parts = resolve_mixer(mixer).model_dump(mode="json")
    config = SubquadLlamaConfig(**tiny_sizes(vocab_size, context), mixers=[parts] * 2)
    model = SubquadLlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_mix"):
                parameter.fill_(0.0)
    return model


class CopyingModel(LlamaForCausalLM):
    """Predicts what followed the first earlier place with the longest equal ending: it copies the key."""

    def __init__(self, vocab_size: int, context: int = 256) -> None:
        super().__init__(LlamaConfig(**tiny_sizes(vocab_size, context)))
        self.eval()

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, cache=None, past_key_values=None, **kwargs):
        cache = past_key_values if cache is None else cache
        cache = DynamicCache() if cache is None else cache
        # The cache holds token ids in place of keys and values.
        new = input_ids[:, None, :, None]
        seen = cache.update(new, new, 0)[0][:, 0, :, 0]
        real = (torch.ones_like(seen) if attention_mask is None else attention_mask).bool()
        num_kept, length = logits_to_keep or input_ids.shape[1], seen.shape[1]
        logits = torch.full((len(seen), num_kept, self.config.vocab_size), -20.0)
        for index, (row, keep) in enumerate(zip(seen, real, strict=True)):
            for place in range(num_kept):
                end = length - num_kept + place + 1
                logits[index, place, copied_token(row[:end][keep[:end]].tolist())] = 20.0
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def copied_token(text: list[int]) -> int:
    for length in range(min(_LONGEST_MATCH, len(text) - 1), 0, -1):
        ending = text[-length:]
        for start in range(len(text) - length):
            if text[start : start + length] == ending:
                return text[start + length]
    return 0
