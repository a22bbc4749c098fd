"""Bytes of the generation cache over length: read from a real cache, and computed where a run would take too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from subquad.errors import ConfigError
from subquad.eval.loss import Progress
from subquad.eval.modes import EvalMode, evaluation_mode
from subquad.eval.results import CacheTable
from subquad.layers import MixerConfig, SubquadAttention, cache_bytes, layer_geometry
from subquad.layers.cache import cache_argument

LENGTHS = tuple(2**power for power in range(7, 18))
LONGEST_MEASURED = 2048
LONGEST_CROSSOVER = 2**26
_SOFTMAX = MixerConfig(score="softmax")


def measure_cache_bytes(
    model: PreTrainedModel,
    lengths: Sequence[int],
    mode: EvalMode | None = "student",
    *,
    batch_size: int = 1,
    chunk_size: int = 256,
    progress: Progress | None = None,
) -> dict[int, int]:
    """Run a model over random tokens and read the size of its cache after given numbers of tokens.

    One cache grows through all lengths: chunks of prompt, then one decoding step onto each length. A tensor that is a
    view counts with the whole memory it keeps alive.

    Args:
        model: A converted model, or with `mode=None` any Hugging Face causal model.
        lengths: Numbers of tokens, 1 or more each.
        mode: Attention mode: `teacher` measures the key/value cache; None leaves the model as it is.
        batch_size: Sequences held.
        chunk_size: Most tokens per forward pass.
        progress: Called with (tokens done, tokens in all).

    Returns:
        Tokens to bytes, in ascending order.

    Raises:
        ConfigError: No length, or a length, batch size or chunk size below 1.
    """
    wanted = sorted(set(lengths))
    if not wanted or min(wanted[0], batch_size, chunk_size) < 1:
        raise ConfigError(
            "lengths, batch_size and chunk_size must be at least 1 and lengths not empty, "
            f"got {list(lengths)}, {batch_size} and {chunk_size}"
        )
    decoder = model.get_decoder()
    keyword = cache_argument(decoder)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    cache, sizes, done = DynamicCache(), {}, 0
    with torch.no_grad(), evaluation_mode(model, mode):
        for length in wanted:
            for step in _steps(length - done, chunk_size):
                tokens = torch.randint(decoder.config.vocab_size, (batch_size, step), generator=generator)
                decoder(input_ids=tokens.to(device), use_cache=True, **{keyword: cache})
                done += step
                if progress is not None:
                    progress(done, wanted[-1])
            sizes[length] = held_bytes(cache.layers)
    return sizes


def held_bytes(holder: object) -> int:
    """Return the bytes of every tensor an object holds, however deep in attributes, mappings and sequences.

    Memory shared by two tensors counts once; a view counts with the whole storage behind it; modules are not entered.

    Args:
        holder: Typically the `layers` of a transformers cache.

    Returns:
        Bytes.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [holder]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, nn.Module | type | str | bytes):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set):
            waiting.extend(item)
        else:
            waiting.extend(getattr(item, "__dict__", {}).values())
    return sum(storages.values())


def computed_cache_bytes(model: PreTrainedModel, seq_len: int, *, student: bool, batch_size: int = 1) -> int:
    """Return the bytes of a model's cache by its layers' own formula, without running it.

    Args:
        model: A converted or plain Llama.
        seq_len: Tokens in the cache.
        student: True for the converted layers, False for the teacher's key/value cache of the same model.
        batch_size: Sequences held.

    Returns:
        Bytes, summed over the layers.
    """
    decoder = model.get_decoder()
    dtype = _cache_dtype(model)
    total = 0
    geometry = layer_geometry(decoder.config)
    for layer in decoder.layers:
        attention = layer.self_attn
        converted = student and isinstance(attention, SubquadAttention)
        total += cache_bytes(attention.mixer_config if converted else _SOFTMAX, geometry, batch_size, seq_len, dtype)
    return total


def crossover_length(student: Callable[[int], int], kv: Callable[[int], int]) -> int | None:
    """Return the shortest length from which on a student's cache is smaller than the key/value cache.

    Args:
        student: Bytes of the student's cache after a number of tokens.
        kv: Bytes of the key/value cache. It must grow at least as fast as the student's.

    Returns:
        Tokens, or None where it stays the larger one up to `LONGEST_CROSSOVER`.
    """
    if student(LONGEST_CROSSOVER) >= kv(LONGEST_CROSSOVER):
        return None
    low, high = 0, LONGEST_CROSSOVER
    while high - low > 1:
        middle = (low + high) // 2
        if student(middle) < kv(middle):
            high = middle
        else:
            low = middle
    return high


def cache_table(
    model: PreTrainedModel,
    lengths: Sequence[int] = LENGTHS,
    *,
    longest_measured: int = LONGEST_MEASURED,
    progress: Progress | None = None,
) -> tuple[CacheTable, list[str]]:
    """Compare the memory of a converted model with its teacher's key/value cache, for one sequence.

    Args:
        model: A converted model.
        lengths: Numbers of tokens.
        longest_measured: Lengths up to this one are run, in student and in teacher mode; the others are computed.
        progress: Called with (tokens done, tokens in all) over both runs.

    Returns:
        The table, and one note for each length at which the formula and the measurement differ.

    Raises:
        ConfigError: No length, or one below 1.
    """
    measured_lengths = [length for length in lengths if length <= longest_measured]
    columns: dict[EvalMode, dict[int, int]] = {}
    notes = []
    modes: tuple[EvalMode, EvalMode] = ("student", "teacher")
    for index, mode in enumerate(modes):
        computed = {n: computed_cache_bytes(model, n, student=mode == "student") for n in sorted(set(lengths))}
        report = _shifted(progress, index, len(modes))
        measured = measure_cache_bytes(model, measured_lengths, mode, progress=report) if measured_lengths else {}
        columns[mode] = {**computed, **measured}
        notes += [
            f"The {mode}'s cache after {n:,} tokens holds {size:,} bytes where its formula says {computed[n]:,}."
            for n, size in measured.items()
            if computed[n] != size
        ]
    table = CacheTable(
        student=columns["student"],
        kv=columns["teacher"],
        measured_lengths=sorted(set(measured_lengths)),
        crossover_length=crossover_length(
            lambda length: computed_cache_bytes(model, length, student=True),
            lambda length: computed_cache_bytes(model, length, student=False),
        ),
        dtype=str(_cache_dtype(model)).removeprefix("torch."),
    )
    return table, notes


def _cache_dtype(model: PreTrainedModel) -> torch.dtype:
    return model.get_decoder().get_input_embeddings().weight.dtype


def _steps(num_tokens: int, chunk_size: int) -> list[int]:
    """Cut a number of tokens into chunks and a last step of one token, which is how generation reaches a length."""
    full, rest = divmod(num_tokens - 1, chunk_size)
    return [chunk_size] * full + [rest] * (rest > 0) + [1]


def _shifted(progress: Progress | None, index: int, num_runs: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(index * total + done, num_runs * total)
