"""A small BERT trained on the embedded text, converted, and trained on: masked-language-model losses on held-out text.

    python -m benchmarks.bert_mlm                      # 4 minutes on one CPU core
    python -m benchmarks.bert_mlm --hidden 128 --layers 4 --steps 4000 --more 1000 --mixers cottention,taylor,linear-elu

Everything is drawn from `--seed`; the masks of the held-out rows are the same for every model. The teacher trained on
for as many steps is the control: what those steps alone bring.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.corpus import embedded_corpus, held_out_year
from subquad.layers import converted_layers, resolve_mixer

SEQ_LEN = 64
# little more than letters, whose neighbours say much about them, so that a few hundred steps teach attention something
VOCAB_SIZE = 120
ALPHABET = 45
BATCH_SIZE = 32
EVAL_ROWS = 256
MASKED_SHARE = 0.15
LEARNING_RATE = 2e-3
# of the conversion's own parameters, which are few and start far from where they end
MIXER_LEARNING_RATE = 1e-2


def build_rows(tokenizer: BertWordPieceTokenizer, texts: list[str], seq_len: int) -> Tensor:
    """Return `[rows, seq_len]` token ids: consecutive pieces of the texts between [CLS] and [SEP]."""
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids]
    num_rows = len(ids) // (seq_len - 2)
    body = torch.tensor(ids[: num_rows * (seq_len - 2)]).view(num_rows, -1)
    start, end = (torch.full((num_rows, 1), tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]"))
    return torch.cat([start, body, end], dim=1)


def mask_rows(rows: Tensor, mask_id: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (inputs, labels) as BERT's paper does: of 15 % of the tokens 80 % masked, 10 % random, 10 % kept."""
    chosen = torch.rand(rows.shape, generator=generator) < MASKED_SHARE
    chosen[:, 0] = chosen[:, -1] = False
    fate = torch.rand(rows.shape, generator=generator)
    drawn = torch.randint(5, VOCAB_SIZE, rows.shape, generator=generator)
    inputs = torch.where(chosen & (fate < 0.8), mask_id, rows)
    inputs = torch.where(chosen & (fate >= 0.9), drawn, inputs)
    return inputs, rows.masked_fill(~chosen, -100)


def train(model: PreTrainedModel, rows: Tensor, mask_id: int, steps: int, seed: int) -> None:
    """Train on masked rows with AdamW, the rate falling linearly to 0."""
    generator = torch.Generator().manual_seed(seed)
    groups = [{"params": [], "lr": LEARNING_RATE}, {"params": [], "lr": MIXER_LEARNING_RATE, "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups[".mixer." in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / steps))
    model.train()
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH_SIZE,), generator=generator)]
        inputs, labels = mask_rows(batch, mask_id, generator)
        loss = model(inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def measure(model: PreTrainedModel, rows: Tensor, mask_id: int) -> float:
    """Return the loss on the masked tokens of held-out rows, nats per token."""
    inputs, labels = mask_rows(rows, mask_id, torch.Generator().manual_seed(7))
    total = sum(
        torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten(), reduction="sum").item()
        for x, y in zip(inputs.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True)
    )
    return total / int((labels != -100).sum())


def main() -> None:
    """Train, convert, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64, help="hidden size, in heads of 16")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1700, help="steps of the teacher")
    parser.add_argument("--more", type=int, default=150, help="steps of every converted model, and of the control")
    parser.add_argument("--mixers", default="cottention,taylor", help="presets, comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    texts = {held_out: [m.text for m in embedded_corpus() if held_out_year(m.year) == held_out] for held_out in (0, 1)}
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(texts[0], vocab_size=VOCAB_SIZE, limit_alphabet=ALPHABET, show_progress=False)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    rows, held_out = (build_rows(tokenizer, texts[part], SEQ_LEN) for part in (0, 1))
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(options.seed))
    held_out, mask_id = held_out[order[:EVAL_ROWS]], tokenizer.token_to_id("[MASK]")
    torch.manual_seed(options.seed)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 16,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=SEQ_LEN,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    teacher = BertForMaskedLM(config)
    train(teacher, rows, mask_id, options.steps, options.seed)
    counts = torch.bincount(rows.flatten(), minlength=VOCAB_SIZE)[5:] + 1.0
    frequencies = counts.log() - counts.sum().log()
    guess = -frequencies[held_out[held_out >= 5] - 5].mean().item()
    print(
        f"{teacher.num_parameters():,} parameters, {len(rows):,} rows of {SEQ_LEN}, {EVAL_ROWS} held-out rows; ", end=""
    )
    print(f"loss of guessing by frequency: {guess:.3f}")
    print(f"\n| model | converted | after {options.more} more steps |\n|---|---|---|")
    control = copy.deepcopy(teacher)
    train(control, rows, mask_id, options.more, options.seed + 1)
    print(
        f"| teacher (softmax) | {measure(teacher, held_out, mask_id):.3f} | {measure(control, held_out, mask_id):.3f} |"
    )
    for name in options.mixers.split(","):
        student = copy.deepcopy(teacher)
        apply_plan(student, plan_conversion(config, resolve_mixer({"preset": name, "causal": False})))
        assert len(converted_layers(student)) == config.num_hidden_layers
        before = measure(student, held_out, mask_id)
        train(student, rows, mask_id, options.more, options.seed + 1)
        print(f"| {name} | {before:.3f} | {measure(student, held_out, mask_id):.3f} |", flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
