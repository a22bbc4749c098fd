"""A greedy sample through the library's own `generate`."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from subquad.errors import ConfigError
from subquad.eval.generate import generate_sample


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<eos>": 0, **{f"w{index}": index for index in range(1, 97)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def greedy_by_hand(model, tokens, steps):
    new = []
    with torch.no_grad():
        for _ in range(steps):
            new.append(int(model(torch.tensor([tokens + new]), use_cache=False).logits[0, -1].argmax()))
            if new[-1] == 0:
                break
    return " ".join(f"w{token}" for token in new if token)


@pytest.mark.parametrize("mode", [None, "student"])
def test_sample_is_the_greedy_continuation(converted, tokenizer, mode):
    # A checkpoint may ask for sampling; a sample must not.
    converted.generation_config.do_sample = True
    prompt = " ".join(f"w{index}" for index in range(5, 25))
    text = generate_sample(converted, tokenizer, prompt, max_new_tokens=6, mode=mode)
    assert text == " " + greedy_by_hand(converted, list(range(5, 25)), 6)


def test_teacher_and_student_write_with_their_own_attention(converted, tokenizer):
    prompt = " ".join(f"w{index}" for index in range(5, 45))
    texts = {mode: generate_sample(converted, tokenizer, prompt, mode=mode) for mode in ("student", "teacher")}
    assert texts["student"] != texts["teacher"]
    assert converted.model.layers[0].self_attn.mode == "student"


def test_bad_arguments(converted, tokenizer):
    with pytest.raises(ConfigError, match="max_new_tokens"):
        generate_sample(converted, tokenizer, "w1", max_new_tokens=0)
    with pytest.raises(ConfigError, match="no tokens"):
        generate_sample(converted, tokenizer, "")
