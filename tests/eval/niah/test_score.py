"""The two scores: independent of the batch, one forward over the prompt, logits for the answer alone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from subquad.errors import TrainingError
from subquad.eval.modes import evaluation_mode
from subquad.eval.niah import NiahSettings, build_prompts
from subquad.eval.niah.prompts import NiahPrompt
from subquad.eval.niah.score import (
    batches,
    can_share_prompts,
    generate_answers,
    pad_left,
    pad_right,
    read_prompts,
    score_answers,
)
from subquad.layers import PRESETS

from .tiny import random_model, random_student, tiny_tokenizer

STORIES = Path(__file__).resolve().parents[4] / "shared/data/checkpoints/stories260K_hf"
VOCAB = 97
# One prompt is shorter than the window, one not longer than the sinks, and no two are equally long.
LENGTHS = (41, 5, 64, 23, 2, 50)
STEPS = 12


class _Tokenizer:
    """What scoring asks of a tokenizer; no token ends a text, so that every answer has all its steps."""

    pad_token_id = None
    eos_token_id = None


def token_rows(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def make_model(name):
    if name == "llama":
        return random_model(VOCAB), None
    if name in ("teacher", "window_only"):
        return random_student(VOCAB, {"preset": "2mamba", "window": 8, "sinks": 2}), name
    changes = {"window": 8, "sinks": 2} if PRESETS[name].window else {}
    return random_student(VOCAB, {"preset": name, **changes}), "student"


# One preset of every kind of cache; tests/layers has them all.
NAMES = ["llama", "teacher", "window_only", "softmax", "2mamba", "mamba2s", "taylor", "cottention", "mamba2", "fox-pro"]


@pytest.mark.parametrize("name", NAMES)
def test_answers_do_not_depend_on_the_batch(name):
    model, mode = make_model(name)
    prompts = token_rows(LENGTHS, seed=1)
    with evaluation_mode(model, mode):
        together = generate_answers(model, _Tokenizer(), prompts, STEPS)
        alone = [generate_answers(model, _Tokenizer(), [prompt], STEPS)[0] for prompt in prompts]
        by_hand = [greedy_by_hand(model, prompt) for prompt in prompts]
    assert together == alone == by_hand
    assert len({tuple(answer) for answer in alone}) == len(prompts)


def greedy_by_hand(model, prompt):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(STEPS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
def test_scores_do_not_depend_on_the_batch_and_are_those_of_the_definition(name):
    model, mode = make_model(name)
    prompts, answers = token_rows(LENGTHS, seed=2), token_rows((5, 1, 4, 5, 7, 2), seed=3)
    with evaluation_mode(model, mode):
        together = score_answers(model, _Tokenizer(), prompts, answers)
        for prompt, answer, found in zip(prompts, answers, together, strict=True):
            alone = score_answers(model, _Tokenizer(), [prompt], [answer])[0]
            assert found.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
            assert found.ranks == alone.ranks
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = [float(row.log_softmax(-1)[token]) for row, token in zip(logits, answer, strict=True)]
            ranks = [
                row.argsort(descending=True).tolist().index(token) + 1
                for row, token in zip(logits, answer, strict=True)
            ]
            assert alone.log_probs == pytest.approx(expected, abs=1e-4)
            assert list(alone.ranks) == ranks


@pytest.mark.parametrize("name", NAMES)
def test_prompts_read_once_give_both_scores(name):
    model, mode = make_model(name)
    prompts, answers = token_rows(LENGTHS, seed=2), token_rows((5, 1, 4, 5, 7, 2), seed=3)
    with evaluation_mode(model, mode):
        cache = read_prompts(model, _Tokenizer(), prompts)
        scores = score_answers(model, _Tokenizer(), prompts, answers, copy.deepcopy(cache))
        written = generate_answers(model, _Tokenizer(), prompts, STEPS, cache)
        pairs = zip(prompts, answers, strict=True)
        alone = [score_answers(model, _Tokenizer(), [prompt], [answer])[0] for prompt, answer in pairs]
        assert written == generate_answers(model, _Tokenizer(), prompts, STEPS)
    for found, expected in zip(scores, alone, strict=True):
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        assert found.ranks == expected.ranks


@pytest.mark.parametrize("name", ["llama", "teacher", "2mamba", "softmax"])
def test_no_token_but_the_last_is_read_again(name):
    model, mode = make_model(name)
    seen, heads = [], []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    model.lm_head.register_forward_hook(lambda _, args, out: heads.append(tuple(out.shape)))
    prompts, answers = token_rows((30, 20), seed=4), token_rows((3, 5), seed=5)
    with evaluation_mode(model, mode):
        cache = read_prompts(model, _Tokenizer(), prompts)
        score_answers(model, _Tokenizer(), prompts, answers, copy.deepcopy(cache))
        generate_answers(model, _Tokenizer(), prompts, 4, cache)
    assert [tuple(call["input_ids"].shape) for call in seen] == [(2, 29), (2, 6)] + [(2, 1)] * 4
    assert seen[1]["input_ids"][:, 0].tolist() == seen[2]["input_ids"][:, 0].tolist() == [row[-1] for row in prompts]
    assert seen[1]["position_ids"].tolist() == [[29, 30, 31, 32, 32, 32], [19, 20, 21, 22, 23, 24]]
    assert [call["position_ids"].tolist() for call in seen[2:]] == [[[29 + i], [19 + i]] for i in range(4)]
    assert heads == [(2, 1, VOCAB), (2, 6, VOCAB)] + [(2, 1, VOCAB)] * 4


def test_only_caches_of_attention_are_shared():
    assert can_share_prompts(make_model("llama")[0])
    assert can_share_prompts(make_model("2mamba")[0])
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2}
    assert not can_share_prompts(MambaForCausalLM(MambaConfig(**sizes)))
    assert not can_share_prompts(RwkvForCausalLM(RwkvConfig(**sizes, attention_hidden_size=8)))
    model, _ = make_model("llama")
    model.generation_config.cache_implementation = "static"
    assert not can_share_prompts(model)


def test_a_real_model_answers_needles_the_same_in_any_batch():
    if not STORIES.is_dir():
        pytest.skip("needs ../shared/data/checkpoints/stories260K_hf")
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    found = build_prompts(tokenizer, NiahSettings(lengths=(256, 300, 333), depths=2, samples=1).resolved(512)).prompts
    prompts, answers = [prompt.input_ids for prompt in found], [prompt.answer_ids for prompt in found]
    together = generate_answers(model, tokenizer, prompts, STEPS)
    scores = score_answers(model, tokenizer, prompts, answers)
    for index, prompt in enumerate(prompts):
        assert together[index] == generate_answers(model, tokenizer, [prompt], STEPS)[0]
        alone = score_answers(model, tokenizer, [prompt], [answers[index]])[0]
        assert scores[index].log_probs == pytest.approx(alone.log_probs, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "2mamba"])
def test_prefill_is_one_forward_and_decoding_reads_one_token(name):
    model, mode = make_model(name)
    seen = []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with evaluation_mode(model, mode):
        generate_answers(model, _Tokenizer(), token_rows((30, 20), seed=4), 6)
    assert seen == [(2, 30)] + [(2, 1)] * 5


@pytest.mark.parametrize("name", ["llama", "2mamba"])
def test_teacher_forcing_is_one_forward_with_logits_for_the_answer_alone(name):
    model, mode = make_model(name)
    forwards, heads = [], []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: forwards.append(kwargs), with_kwargs=True)
    model.lm_head.register_forward_hook(lambda _, args, out: heads.append(tuple(out.shape)))
    with evaluation_mode(model, mode):
        score_answers(model, _Tokenizer(), token_rows((30, 28), seed=4), token_rows((3, 3), seed=5))
    (found,) = forwards
    assert found["input_ids"].shape == (2, 33)
    assert found["attention_mask"].sum(1).tolist() == [33, 31]
    assert found["position_ids"].tolist() == [list(range(33)), [0, 0, *range(31)]]
    assert found["use_cache"] is False
    assert heads == [(2, 4, VOCAB)]


def test_generation_is_greedy_whatever_the_checkpoint_asks_for():
    model, _ = make_model("llama")
    prompts = token_rows((20, 31), seed=6)
    plain = generate_answers(model, _Tokenizer(), prompts, STEPS)
    config = model.generation_config
    config.do_sample, config.temperature, config.repetition_penalty, config.num_beams = True, 5.0, 3.0, 2
    assert generate_answers(model, _Tokenizer(), prompts, STEPS) == plain


def test_ties_count_against_the_key():
    model, _ = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    score = score_answers(model, _Tokenizer(), [[5, 6]], [[7, 8]])[0]
    assert score.ranks == (VOCAB, VOCAB)


def test_scores_that_are_not_finite_are_an_error():
    model, _ = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        score_answers(model, _Tokenizer(), [[5, 6]], [[7, 8]])


def test_padding_is_on_the_left_and_masked():
    tokens, mask = pad_left([[5, 6, 7], [8]], pad_token=2)
    assert tokens.tolist() == [[5, 6, 7], [2, 2, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_answers_are_padded_on_the_right_and_masked():
    tokens, mask = pad_right([[5, 6, 7], [8]], pad_token=2)
    assert tokens.tolist() == [[5, 6, 7], [8, 2, 2]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def prompt_of(length, sample):
    return NiahPrompt(length, 0.5, sample, (0,) * length, (1,), (True,), ("1",), ((0, 1),))


@pytest.mark.parametrize(
    "batch_size, max_tokens, sizes",
    [
        (8, 10_000, [(10, 5), (40, 5), (300, 2)]),
        (2, 10_000, [(10, 2), (10, 2), (10, 1), (40, 2), (40, 2), (40, 1), (300, 2)]),
        # A prompt longer than the limit is alone, not left out.
        (8, 100, [(10, 5), (40, 2), (40, 2), (40, 1), (300, 1), (300, 1)]),
    ],
)
def test_batches_keep_to_their_limits_and_do_not_mix_lengths(batch_size, max_tokens, sizes):
    prompts = [prompt_of(length, sample) for length, num in ((10, 5), (40, 5), (300, 2)) for sample in range(num)]
    made = list(batches(prompts, batch_size, max_tokens))
    assert [(group[0].length, len(group)) for group in made] == sizes
    assert [prompt for group in made for prompt in group] == prompts


def test_the_true_answer_follows_the_prompt():
    tokenizer = tiny_tokenizer("digits")
    prompt = build_prompts(tokenizer, NiahSettings(lengths=(200,), depths=1, samples=1).resolved(256)).prompts[0]
    assert tokenizer.decode(prompt.input_ids + prompt.answer_ids).endswith(f"The pass key is {prompt.values[0]}")
