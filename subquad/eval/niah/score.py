"""The two scores of a batch of prompts: greedy answers, and the probability of the true answer in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from subquad.errors import TrainingError
from subquad.eval.niah.prompts import NiahPrompt

TokenIds = Sequence[int]


@dataclass(frozen=True)
class TokenScores:
    """How likely a model finds the tokens of an answer, each given the prompt and the true tokens before it.

    Attributes:
        log_probs: Natural logarithm of each token's probability.
        ranks: Each token's place among all tokens by probability; 1 is the most likely, ties count as worse.
    """

    log_probs: tuple[float, ...]
    ranks: tuple[int, ...]


def batches(prompts: Sequence[NiahPrompt], batch_size: int, max_tokens: int) -> Iterator[list[NiahPrompt]]:
    """Group prompts of one length, in order.

    Args:
        prompts: The prompts.
        batch_size: Most prompts of a group.
        max_tokens: Most prompt tokens of a group that has more than one prompt.

    Yields:
        Groups; none mixes lengths, so that a short prompt is never padded to a long one.
    """
    group: list[NiahPrompt] = []
    for prompt in prompts:
        most = max(1, min(batch_size, max_tokens // prompt.length))
        if group and (len(group) >= most or group[0].length != prompt.length):
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


def generate_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[TokenIds], max_new_tokens: int
) -> list[list[int]]:
    """Continue prompts greedily: one forward over the prompts, then one token at a time on the cache.

    Args:
        model: Any Hugging Face causal language model, in `eval()` and its attention mode.
        tokenizer: Its tokenizer.
        prompts: Token ids; prompts of different lengths are padded on the left.
        max_new_tokens: Tokens to write, fewer where the end-of-text token comes before.

    Returns:
        The new tokens of each prompt; behind an end-of-text token they are padding.
    """
    input_ids, mask = pad_left(prompts, _pad_token(tokenizer))
    # A checkpoint may ask for sampling, beams or penalties; what is left open here is filled in from it.
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=_pad_token(tokenizer),
        use_cache=True,
    )
    with torch.no_grad():
        tokens = model.generate(
            input_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
        )
    return tokens[:, input_ids.shape[1] :].tolist()


def score_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[TokenIds], answers: Sequence[TokenIds]
) -> list[TokenScores]:
    """Score true answers with one forward over prompt and answer; logits exist for the answers only.

    Args:
        model: Any Hugging Face causal language model, in `eval()` and its attention mode.
        tokenizer: Its tokenizer.
        prompts: Token ids; they may differ in length.
        answers: Token ids that follow each prompt, at least one each.

    Returns:
        The scores of each answer's tokens.

    Raises:
        TrainingError: A score is not finite.
    """
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    input_ids, mask = pad_left(rows, _pad_token(tokenizer))
    # The last answer token predicts nothing, but the position before the answer does.
    num_kept = max(map(len, answers)) + 1
    with torch.no_grad():
        logits = model(
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0).to(model.device),
            logits_to_keep=num_kept,
            use_cache=False,
        ).logits
    return [
        _token_scores(row[num_kept - len(answer) - 1 : num_kept - 1], answer)
        for row, answer in zip(logits, answers, strict=True)
    ]


def pad_left(rows: Sequence[TokenIds], pad_token: int) -> tuple[Tensor, Tensor]:
    """Pad token ids on the left.

    Args:
        rows: Token ids.
        pad_token: What to pad with.

    Returns:
        Token ids and mask (1 for real tokens), both int64 `[num_rows, longest row]`.
    """
    longest = max(map(len, rows))
    tokens = [[pad_token] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(tokens), torch.tensor(mask)


def _token_scores(logits: Tensor, answer: TokenIds) -> TokenScores:
    """Score an answer `[num_tokens]` by the logits `[num_tokens, vocab_size]` that predict it."""
    wanted = torch.tensor(answer, device=logits.device)[:, None]
    log_probs = logits.float().log_softmax(-1).gather(1, wanted)
    if not torch.isfinite(log_probs).all():
        raise TrainingError(
            "the probability of a needle's key is not finite: the model's weights or states overflowed. "
            "Evaluate in float32, or leave out lengths beyond its context."
        )
    # A tie counts against the key: a model that finds all tokens equally likely has found nothing.
    ranks = (logits >= logits.gather(1, wanted)).sum(1)
    return TokenScores(tuple(log_probs[:, 0].tolist()), tuple(ranks.tolist()))


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)
