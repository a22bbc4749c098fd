"""Memory of many systems over length: bytes of one head's cache, read from a real one, against a key/value cache."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from subquad.eval.loss import Progress
from subquad.eval.memory import crossover_length, measure_cache_bytes
from subquad.eval.plots import Plot
from subquad.eval.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, format_bytes, new_figure, save_figure
from subquad.layers import LayerGeometry, MixerConfig, cache_bytes
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM

HEAD_DIMS = (64, 128)
LENGTHS = tuple(2**power for power in range(6, 17))
LONGEST_MEASURED = 8192
_SOFTMAX = MixerConfig(score="softmax")
_COLORS = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#B8860B", GREY)
_DASHES = ("-", "--", "-.", ":")
_LABEL_WIDTH = 34


@dataclass(frozen=True)
class SystemMemory:
    """One system at one width of head: one layer, one key/value head with one query head, one sequence.

    Attributes:
        system: Its name.
        head_dim: Width of q, k and v.
        sizes: Tokens to bytes of its cache.
        kv_sizes: Tokens to bytes of a key/value cache.
        measured: The lengths at which `sizes` was read from a real cache; at the others it is computed.
        crossover: Tokens from which on its cache is the smaller one; None where it never is.
        crossover_numbers: The same with every number counting alike, as the papers count (keys and values in bfloat16
            take half the bytes of a float32 state).
        differs: Measured lengths at which the real cache is not what the formula says; empty as it should be.
    """

    system: str
    head_dim: int
    sizes: dict[int, int]
    kv_sizes: dict[int, int]
    measured: tuple[int, ...]
    crossover: int | None
    crossover_numbers: int | None
    differs: tuple[int, ...]


def measure_systems(
    mixers: Mapping[str, MixerConfig],
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    lengths: Sequence[int] = LENGTHS,
    dtype: torch.dtype = torch.bfloat16,
    longest_measured: int = LONGEST_MEASURED,
    progress: Progress | None = None,
) -> list[SystemMemory]:
    """Run one layer of every system over random tokens and read the bytes its cache holds.

    Args:
        mixers: Name of a system to its mixer; softmax is the comparison and need not be there.
        head_dims: Widths of a head, even numbers.
        lengths: Numbers of tokens.
        dtype: Data type of activations, keys and values; states are float32 whatever it is.
        longest_measured: Lengths up to this one are run; the others are computed.
        progress: Called with (systems done, systems in all).

    Returns:
        One entry per system and width, width by width, without those a head is too narrow for.
    """
    found = []
    total = sum(has_width(mixer, head_dim) for head_dim in head_dims for mixer in mixers.values())
    for head_dim in head_dims:
        kv_sizes = _kv_sizes(head_dim, lengths, dtype, longest_measured)
        for name, mixer in mixers.items():
            if not has_width(mixer, head_dim):
                continue
            found.append(_measure(name, mixer, head_dim, lengths, dtype, longest_measured, kv_sizes))
            if progress is not None:
                progress(len(found), total)
    return found


def has_width(mixer: MixerConfig, head_dim: int) -> bool:
    """Return whether a system exists at a width of head: learned features cannot be wider than the head."""
    return mixer.feature_dim is None or mixer.feature_dim <= head_dim


def _kv_sizes(head_dim: int, lengths: Sequence[int], dtype: torch.dtype, longest_measured: int) -> dict[int, int]:
    sizes = {n: _bytes(_SOFTMAX, head_dim, n, dtype) for n in sorted(set(lengths))}
    short = [n for n in sizes if n <= longest_measured]
    return sizes | (measure_cache_bytes(_one_layer(None, head_dim, dtype), short, None) if short else {})


def _measure(
    name: str,
    mixer: MixerConfig,
    head_dim: int,
    lengths: Sequence[int],
    dtype: torch.dtype,
    longest_measured: int,
    kv_sizes: dict[int, int],
) -> SystemMemory:
    computed = {n: _bytes(mixer, head_dim, n, dtype) for n in sorted(set(lengths))}
    short = [n for n in computed if n <= longest_measured]
    measured = measure_cache_bytes(_one_layer(mixer, head_dim, dtype), short) if short else {}
    return SystemMemory(
        system=name,
        head_dim=head_dim,
        sizes=computed | measured,
        kv_sizes=kv_sizes,
        measured=tuple(short),
        crossover=system_crossover(mixer, head_dim, dtype),
        crossover_numbers=system_crossover(mixer, head_dim, torch.float32),
        differs=tuple(n for n in short if measured[n] != computed[n]),
    )


def system_crossover(mixer: MixerConfig, head_dim: int, dtype: torch.dtype) -> int | None:
    """Return from how many tokens on one head's cache is smaller than its key/value cache.

    Args:
        mixer: The system.
        head_dim: Width of the head.
        dtype: Data type of keys and values; float32 counts numbers, since states are float32.

    Returns:
        Tokens; None where it never is.
    """
    return crossover_length(
        lambda length: _bytes(mixer, head_dim, length, dtype), lambda length: _bytes(_SOFTMAX, head_dim, length, dtype)
    )


def _bytes(mixer: MixerConfig, head_dim: int, seq_len: int, dtype: torch.dtype) -> int:
    return cache_bytes(mixer, LayerGeometry(head_dim, 1, 1, head_dim), 1, seq_len, dtype)


def _one_layer(mixer: MixerConfig | None, head_dim: int, dtype: torch.dtype) -> SubquadLlamaForCausalLM:
    config = SubquadLlamaConfig(
        vocab_size=16,
        hidden_size=head_dim,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=2**20,
        mixers=[None if mixer is None else mixer.model_dump(mode="json")],
        dtype=dtype,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = SubquadLlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        # mixers stay float32, as in a loaded checkpoint
        if ".mixer." not in name:
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def systems_table(found: Sequence[SystemMemory]) -> str:
    """Return every system with its crossovers as Markdown.

    Args:
        found: What `measure_systems` returned.

    Returns:
        A table.
    """
    longest = max(found[0].sizes)
    heads = ("system", "head_dim", "smaller than the KV cache from (bytes)", "the same in numbers")
    lines = [
        "| " + " | ".join((*heads, f"cache at {longest:,} tokens", "KV cache")) + " |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        cells = (_tokens(each.crossover), _tokens(each.crossover_numbers), each.sizes[longest], each.kv_sizes[longest])
        shown = (*cells[:2], *(format_bytes(size) for size in cells[2:]))
        lines.append(f"| {each.system} | {each.head_dim} | " + " | ".join(map(str, shown)) + " |")
    return "\n".join(lines)


def plot_systems(found: Sequence[SystemMemory], dtype: torch.dtype, path: Path) -> Plot:
    """Draw the bytes of every system's cache over length, one panel per width of head, with the crossovers.

    Args:
        found: What `measure_systems` returned.
        dtype: Data type of keys and values, for the caption.
        path: PNG to write.

    Returns:
        The plot.
    """
    widths = list(dict.fromkeys(each.head_dim for each in found))
    title = "Memory of one head over length"
    figure, first = new_figure(f"head_dim {widths[0]}", "Tokens in the context", "Cache size")
    figure.set_size_inches(8 * len(widths), 5.6)
    panels = [first]
    if len(widths) > 1:
        first.set_subplotspec(figure.add_gridspec(1, len(widths))[0])
        for index, width in enumerate(widths[1:], start=2):
            axes = figure.add_subplot(1, len(widths), index, sharey=first)
            _copy_look(first, axes, f"head_dim {width}")
            panels.append(axes)
    for width, axes in zip(widths, panels, strict=True):
        _draw_width(axes, [each for each in found if each.head_dim == width])
        # beside its panel: twenty systems do not fit inside, and each width has crossovers of its own
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    save_figure(figure, path)
    caption = (
        f"One key/value head, keys and values in {str(dtype).removeprefix('torch.')}, states in float32. Dots were "
        "read from a real cache, lines are computed; crosses mark from where on a system holds less than a key/value "
        "cache."
    )
    return Plot(path, title, caption)


def _copy_look(source: Axes, axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=10)
    axes.set_xlabel(source.get_xlabel(), fontsize=11)
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_width(axes: Axes, found: Sequence[SystemMemory]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    kv_sizes = found[0].kv_sizes
    # over the systems that hold as much; first in the legend
    label = "softmax: key/value cache"
    axes.plot(list(kv_sizes), list(kv_sizes.values()), color=BLACK, linewidth=2.2, zorder=3, label=label)
    alike: dict[tuple[int, ...], list[SystemMemory]] = {}
    for each in found:
        alike.setdefault(tuple(each.sizes.values()), []).append(each)
    for index, systems in enumerate(alike.values()):
        each = systems[0]
        color, dash = _COLORS[index % len(_COLORS)], _DASHES[index // len(_COLORS) % len(_DASHES)]
        start = f"from {each.crossover:,}" if each.crossover else "never smaller"
        label = textwrap.fill(f"{', '.join(system.system for system in systems)} ({start})", _LABEL_WIDTH)
        axes.plot(list(each.sizes), list(each.sizes.values()), color=color, linestyle=dash, linewidth=1.6, label=label)
        axes.plot(each.measured, [each.sizes[n] for n in each.measured], color=color, marker=".", linestyle="none")
        if each.crossover and min(kv_sizes) <= each.crossover <= max(kv_sizes):
            size = kv_sizes[min(kv_sizes)] / min(kv_sizes) * each.crossover
            axes.plot([each.crossover], [size], color=color, marker="x", markersize=9, markeredgewidth=2, zorder=4)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(base=4))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))


def _tokens(length: int | None) -> str:
    return "never" if length is None else f"{length:,}"
