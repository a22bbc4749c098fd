"""Text written by a model itself, as training text: one document a row, sampled from the empty prompt.

    python -m benchmarks.quality.teacher_text smollm2-135m -o runs/written.jsonl --tokens 100000

What a teacher writes is what its student is asked to write later, and needs no corpus (Agarwal et al. 2024, arXiv
2306.13649, learn from the student's own text; this is the cheaper form, sampled once from the teacher).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subquad.convert.atomic import atomic_file
from subquad.convert.source import load_teacher
from subquad.errors import SubquadError


@torch.no_grad()
def write_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int,
    length: int,
    batch_size: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    """Sample documents until they hold as many tokens as asked for.

    Args:
        model: the model.
        tokenizer: its tokenizer; documents begin with its token for that, or that of an end where it has none.
        tokens: tokens in all, rounded up to whole batches.
        length: most tokens of a document.
        batch_size: documents at a time.
        temperature: of the sampling, above 0.
        seed: of the sampling.

    Yields:
        Text without special tokens; empty documents are left out.

    Raises:
        SystemExit: the tokenizer has no token to begin with, documents would be longer than the model's context, or
            the model writes nothing.
    """
    context = model.config.max_position_embeddings
    if length >= context:
        raise SystemExit(f"error: --length is {length}, but with the first token the context is {context}; lower it")
    torch.manual_seed(seed)
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise SystemExit("error: the tokenizer has neither a first nor a last token, so there is nothing to begin with")
    prompts = torch.full((batch_size, 1), first, device=model.device)
    end = tokenizer.eos_token_id
    written = 0
    while written < tokens:
        rows = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=length,
            pad_token_id=first if end is None else end,
        )[:, 1:]
        documents = [row[: row.index(end)] if end in row else row for row in rows.tolist()]
        if not any(documents):
            raise SystemExit("error: the model ends every document at once; raise --temperature or give another model")
        for ids in documents:
            written += len(ids)
            if ids:
                yield tokenizer.decode(ids, skip_special_tokens=True)


def main() -> None:
    """Read the command line and write the text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a checkpoint: a folder, a GGUF file or a hub name")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--tokens", type=int, default=100_000, help="in all")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a document")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if min(options.tokens, options.length, options.batch_size) < 1 or options.temperature <= 0:
        raise SystemExit("error: --tokens, --length and --batch-size must be at least 1 and --temperature above 0")
    try:
        teacher = load_teacher(options.model, torch.float32)
    except SubquadError as error:
        raise SystemExit(f"error: {error}") from error
    if teacher.tokenizer is None:
        raise SystemExit(f"error: {options.model} has no tokenizer")
    sampling = {name: getattr(options, name) for name in ("tokens", "length", "batch_size", "temperature", "seed")}
    texts = list(write_documents(teacher.model, teacher.tokenizer, **sampling))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_file(options.output, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    print(f"{len(texts)} documents, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
