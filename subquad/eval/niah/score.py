"""The two scores of a batch of prompts: greedy answers, and the probability of the true answer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from subquad.errors import TrainingError
from subquad.eval.niah.prompts import NiahPrompt
from subquad.layers.cache import cache_argument

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


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Return whether several tokens at once may continue the model's cache, as one reading for both scores needs.

    Args:
        model: Any Hugging Face causal language model.

    Returns:
        False where the library has a linear layer of its own (many of those continue by a single token only), and for
        a model that has a cache of another kind or asks `generate` for one.
    """
    if cache_argument(model) not in inspect.signature(model.forward).parameters:
        return False
    if model.generation_config is not None and model.generation_config.cache_implementation is not None:
        return False
    layers = DynamicCache(config=model.config).layers
    return not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def read_prompts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[TokenIds]) -> Cache:
    """Read all of every prompt but its last token, which both scores begin with.

    Args:
        model: A model for which `can_share_prompts`, in `eval()` and its attention mode.
        tokenizer: Its tokenizer.
        prompts: Token ids, two or more for the longest; prompts of different lengths are padded on the left.

    Returns:
        The cache, for `generate_answers` and `score_answers`, each of which changes what it is given.
    """
    input_ids, mask = pad_left(prompts, _pad_token(tokenizer))
    cache = DynamicCache(config=model.config)
    _forward(model, input_ids[:, :-1], mask[:, :-1], cache, num_kept=1)
    return cache


def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[TokenIds],
    max_new_tokens: int,
    cache: Cache | None = None,
) -> list[list[int]]:
    """Continue prompts greedily: one forward over what is not yet read, then one token at a time on the cache.

    Args:
        model: Any Hugging Face causal language model, in `eval()` and its attention mode.
        tokenizer: Its tokenizer.
        prompts: Token ids; prompts of different lengths are padded on the left.
        max_new_tokens: Tokens to write, fewer where the end-of-text token comes before.
        cache: From `read_prompts` of the same prompts; changed in place. None reads them here.

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
    # The mask is that of the whole prompt: so `generate` knows that tokens were read before these.
    unread = input_ids if cache is None else input_ids[:, cache.get_seq_length() :]
    with torch.no_grad():
        tokens = model.generate(
            unread.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
            **({} if cache is None else {cache_argument(model): cache}),
        )
    return tokens[:, unread.shape[1] :].tolist()


def score_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[TokenIds],
    answers: Sequence[TokenIds],
    cache: Cache | None = None,
) -> list[TokenScores]:
    """Score true answers with one forward over what is not yet read; logits exist for the answers only.

    Args:
        model: Any Hugging Face causal language model, in `eval()` and its attention mode.
        tokenizer: Its tokenizer.
        prompts: Token ids; they may differ in length.
        answers: Token ids that follow each prompt, at least one each.
        cache: From `read_prompts` of the same prompts; changed in place. None reads them here.

    Returns:
        The scores of each answer's tokens.

    Raises:
        TrainingError: A score is not finite.
    """
    pad_token = _pad_token(tokenizer)
    # Answers are padded on the right, so that all of them begin at one position.
    before, after = pad_left(prompts, pad_token), pad_right(answers, pad_token)
    input_ids, mask = (torch.cat(pair, dim=1) for pair in zip(before, after, strict=True))
    # The last answer token predicts nothing, but the position before the answer does.
    logits = _forward(model, input_ids, mask, cache, num_kept=after[0].shape[1] + 1)
    return [_token_scores(row[: len(answer)], answer) for row, answer in zip(logits, answers, strict=True)]


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


def pad_right(rows: Sequence[TokenIds], pad_token: int) -> tuple[Tensor, Tensor]:
    """Pad token ids on the right.

    Args:
        rows: Token ids.
        pad_token: What to pad with.

    Returns:
        Token ids and mask (1 for real tokens), both int64 `[num_rows, longest row]`.
    """
    tokens, mask = pad_left([row[::-1] for row in rows], pad_token)
    return tokens.flip(1), mask.flip(1)


def _forward(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, cache: Cache | None, num_kept: int) -> Tensor:
    """Run the positions `[B, T]` that are not in the cache; return logits `[B, num_kept, vocab_size]` of the last."""
    num_read = 0 if cache is None else cache.get_seq_length()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(
            input_ids=input_ids[:, num_read:].to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=positions[:, num_read:].to(model.device),
            logits_to_keep=num_kept,
            use_cache=cache is not None,
            **({} if cache is None else {cache_argument(model): cache}),
        ).logits


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
