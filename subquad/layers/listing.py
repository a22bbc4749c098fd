"""Every preset as a row: formula, parts, time, forms, what its cache holds, and source. `subquad mixers` prints it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from subquad.layers.cache import cache_layout
from subquad.layers.config import MixerConfig
from subquad.layers.geometry import LayerGeometry
from subquad.layers.presets import SOURCES, SYSTEMS

LISTED_HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class CacheNumbers:
    """What one key/value head with one query head caches, counted in numbers (counters and masks left out).

    Attributes:
        fixed: numbers that do not grow: state, window, sinks, last tokens of convolution and shift.
        per_token: numbers added by every token.
        crossover: the length from which on this is less than a KV cache's 2 d per token; None where it never is.
    """

    fixed: int
    per_token: int
    crossover: int | None


@dataclass(frozen=True)
class MixerListing:
    """One preset.

    Attributes:
        name: the preset.
        title: the system in words.
        formula: what it computes.
        parts: the configuration's parts that differ from the defaults.
        time: `linear` or `quadratic` in the sequence's length.
        forms: how it can be computed.
        cache: width of a head to what its cache holds.
        source: paper.
    """

    name: str
    title: str
    formula: str
    parts: dict[str, Any]
    time: str
    forms: tuple[str, ...]
    cache: dict[int, CacheNumbers]
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values for JSON."""
        cache = {str(head_dim): vars(numbers) for head_dim, numbers in self.cache.items()}
        return {**vars(self), "forms": list(self.forms), "cache": cache}


def list_mixers() -> list[MixerListing]:
    """Return a row for every preset, in the order of the theory."""
    rows = []
    for name, system in SYSTEMS.items():
        mixer = system.mixer
        cache = {head_dim: count_cached(mixer, head_dim) for head_dim in LISTED_HEAD_DIMS}
        time = "linear" if mixer.linear else "quadratic"
        source = SOURCES[system.source]
        rows.append(
            MixerListing(name, system.title, system.formula, changed_parts(mixer), time, forms(mixer), cache, source)
        )
    return rows


def forms(mixer: MixerConfig) -> tuple[str, ...]:
    """Return the forms that a mixer has; what generation continues from is the last one."""
    if mixer.linear:
        return ("quadratic", "chunked", "recurrent")
    return ("quadratic", "KV cache")


def changed_parts(mixer: MixerConfig) -> dict[str, Any]:
    """Return the parts that differ from the defaults, as they would stand in a recipe; the score comes first."""
    fields = type(mixer).model_fields
    has_order = mixer.score in ("power", "taylor")
    changed = [name for name, field in fields.items() if getattr(mixer, name) != field.default]
    parts = mixer.model_dump(mode="json")
    return {name: parts[name] for name in fields if name in changed or (has_order and name == "order")}


def count_cached(mixer: MixerConfig, head_dim: int) -> CacheNumbers:
    """Count what one key/value head with one query head caches.

    Args:
        mixer: any mixer.
        head_dim: width of a head.

    Returns:
        The numbers.
    """
    kv_numbers = 2 * head_dim
    if mixer.score == "softmax":
        return CacheNumbers(0, kv_numbers, None)
    layout = cache_layout(mixer, LayerGeometry(head_dim, 1, 1, head_dim), torch.float32)
    counts = {True: 0, False: 0}
    for spec in layout.values():
        if spec.dtype.is_floating_point:
            counts[spec.grows] += math.prod(spec.shape[1:] if spec.grows else spec.shape)
    saved = kv_numbers - counts[True]
    return CacheNumbers(counts[False], counts[True], counts[False] // saved + 1 if saved > 0 else None)


def markdown_table() -> str:
    """Return the table of `docs/mixers.md`."""
    lines = [
        "| preset | system | parts | time | numbers cached at d = 64 | at d = 128 | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in list_mixers():
        parts = ", ".join(f"{name}: {_yaml(value)}" for name, value in row.parts.items())
        cached = " | ".join(_cached(numbers) for numbers in row.cache.values())
        source = SYSTEMS[row.name].source
        lines.append(f"| `{row.name}` | {row.title} | `{{{parts}}}` | {row.time} | {cached} | [{source}] |")
    return "\n".join(lines)


def systems_table() -> str:
    """Return the table of `docs/systems.md`: every system with its formula and the code that computes it."""
    lines = ["| preset | system | formula | code | source |", "|---|---|---|---|---|"]
    for name, system in SYSTEMS.items():
        code = ", ".join(f"[{path.rpartition('/')[2]}](../subquad/{path})" for path in code_of(system.mixer))
        formula = system.formula.replace("|", "\\|")
        lines.append(f"| `{name}` | {system.title} | `{formula}` | {code} | [{system.source}] |")
    return "\n".join(lines)


def code_of(mixer: MixerConfig) -> list[str]:
    """Return the files below `subquad/` that compute a mixer's parts, its score first."""
    if mixer.score == "softmax":
        return ["models/llama.py"]
    parts = {
        "kernels/ops.py": mixer.score != "exp",
        "kernels/exp_attention.py": mixer.score == "exp",
        "layers/score.py": mixer.score != "exp",
        "layers/feature_maps.py": mixer.feature_map != "identity",
        "layers/decay.py": mixer.decay != "none",
        "layers/conv.py": mixer.conv_width > 1,
        "layers/value_step.py": mixer.value_step != "none",
        "layers/norms.py": mixer.qk_norm or mixer.normaliser not in ("sum", "none", "count"),
        "layers/gates.py": mixer.kv_shift or mixer.output_gate != "none",
        "kernels/window.py": mixer.window > 0,
        "layers/kept_keys.py": mixer.kept_keys > 0,
    }
    return [path for path, used in parts.items() if used]


def render_mixers() -> Table:
    """Return the list as a table for a rich console."""
    table = Table(
        title="Mixers",
        caption="x = scale q_t.k_s; L: sum of the log decays after s up to t. Cached: numbers per key/value head, "
        "one query head each.",
    )
    for heading in ("preset", "formula", "time", "forms", *(f"cached, d = {d}" for d in LISTED_HEAD_DIMS), "source"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "preset")
    for row in list_mixers():
        cached = [_cached(numbers) for numbers in row.cache.values()]
        table.add_row(row.name, row.formula, row.time, ", ".join(row.forms), *cached, row.source)
    return table


def _cached(numbers: CacheNumbers) -> str:
    growing = f"{numbers.per_token:,} per token"
    if not numbers.per_token:
        return f"{numbers.fixed:,}"
    return f"{growing} + {numbers.fixed:,}" if numbers.fixed else growing


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
