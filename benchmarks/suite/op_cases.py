"""The cases of `poly_attention` that are compared with float64: one line each, spread over the axes that matter.

Not the full product: every kernel is compiled anew per dtype, width and set of powers, and a run has minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Score = Literal["linear", "square", "offset", "taylor"]
# None, as a model has them, up to 200 per token, packed documents, or all of it mixed.
Decay = Literal["none", "gentle", "strong", "resets", "mixed"]
# `leaning`: random, but each query scores 2 with its own key. `common_mean`: keys with a strong mean, queries that are
# orthogonal to it. `zero_rows`: queries that are 0, keys that are not written.
Inputs = Literal["leaning", "common_mean", "zero_rows"]

BF16, FP16, FP32 = "bfloat16", "float16", "float32"
ALL_DTYPES = (BF16, FP16, FP32)

# Toy sizes keep what a case is about: several chunks, a ragged tail, fewer queries than keys.
_TOY_TOKENS, _TOY_CHUNK, _TOY_HEAD_DIM = 41, 16, 8


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One call of the op.

    Attributes:
        name: Unique; the dtype is appended.
        score: Which polynomial: `x`, `x^2`, `(x + c)^2` with a learned c per head, `1 + x + x^2 / 2`.
        dtypes: Dtypes of q, k, v to run it in.
        dtype: The one of them (set when the table is expanded).
        batch: Sequences.
        tokens: Keys T.
        queries: Queries Tq, the last positions; None is T.
        kv_heads: Key/value heads.
        groups: Query heads per key/value head.
        head_dim: Width d of keys.
        value_dim: Width e of values; None is d.
        decay: Kind of log decays.
        inputs: Kind of queries and keys.
        key_weights: Whether keys have random weights; a tenth of them is 0 unless few keys are in sight.
        state: Whether there is an initial state and the final one is asked for.
        normalize: Whether the output is divided by the sum of weights.
        chunk_size: Tokens per chunk; None is the default of the form.
        whole: One chunk over all tokens: the quadratic kernel.
        precision: The op's option.
        gradients: Whether gradients are compared too.
        long: Compare with the chunked form in float64, since the quadratic one would not fit in memory.
        weak_spot: Why default precision is held to ten times the limit of its dtype; empty for all other cases.
        quick: Whether a quick run has it.
    """

    name: str
    score: Score
    dtypes: tuple[str, ...] = (BF16,)
    dtype: str = BF16
    batch: int = 1
    tokens: int = 1000
    queries: int | None = None
    kv_heads: int = 2
    groups: int = 4
    head_dim: int = 64
    value_dim: int | None = None
    decay: Decay = "gentle"
    inputs: Inputs = "leaning"
    key_weights: bool = True
    state: bool = False
    normalize: bool = True
    chunk_size: int | None = None
    whole: bool = False
    precision: Literal["default", "high"] = "default"
    gradients: bool = True
    long: bool = False
    weak_spot: str = ""
    quick: bool = False

    @property
    def num_queries(self) -> int:
        """Queries Tq."""
        return self.tokens if self.queries is None else self.queries

    @property
    def width(self) -> int:
        """Width e of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def few_keys(self) -> bool:
        """Whether many queries see hardly more than one key, whose weight cancels against the normaliser."""
        return self.normalize and self.decay in ("strong", "resets", "mixed")

    def at_toy_size(self) -> OpCase:
        """Return the case at a size that a CPU does in milliseconds."""
        tokens = min(self.tokens, _TOY_TOKENS)
        return replace(
            self,
            tokens=tokens,
            queries=None if self.queries is None else min(self.queries, tokens // 2 + 1),
            head_dim=_TOY_HEAD_DIM,
            value_dim=None if self.value_dim is None else _TOY_HEAD_DIM - 3,
            chunk_size=None if self.chunk_size is None else _TOY_CHUNK,
        )


_MEAN = "bfloat16 products of keys with a strong mean cancel in queries orthogonal to it"

_chunks = functools.partial(OpCase, chunk_size=256)
_whole = functools.partial(OpCase, whole=True)
_decode = functools.partial(OpCase, state=True, gradients=False)

_TABLE = (
    # Every score in every dtype, through chunks, with a state in and out.
    _chunks(name="linear", score="linear", dtypes=ALL_DTYPES, state=True, normalize=False),
    _chunks(name="square", score="square", dtypes=ALL_DTYPES, state=True, quick=True),
    _chunks(name="offset", score="offset", dtypes=ALL_DTYPES, state=True),
    _chunks(name="taylor", score="taylor", dtypes=ALL_DTYPES, state=True, groups=1),
    _chunks(name="taylor-raw", score="taylor", state=True, normalize=False, quick=True),
    OpCase(name="square-raw", score="square", chunk_size=128, normalize=False),
    # Widths and groups.
    _chunks(name="d128", score="square", dtypes=ALL_DTYPES, head_dim=128, state=True, quick=True),
    _chunks(name="d128-linear", score="linear", head_dim=128, normalize=False, groups=1),
    _chunks(name="d128-taylor", score="taylor", head_dim=128, groups=1),
    _chunks(name="d96-e64", score="square", head_dim=96, value_dim=64, groups=3, quick=True),
    _chunks(name="d96-taylor", score="taylor", dtypes=(FP32,), head_dim=96, groups=1),
    _chunks(name="d64-e128", score="offset", value_dim=128, groups=1),
    _chunks(name="groups-1", score="square", dtypes=(BF16, FP32), groups=1, kv_heads=3, batch=2),
    _chunks(name="groups-3", score="square", dtypes=(BF16, FP32), groups=3, kv_heads=3, state=True),
    _chunks(name="groups-8", score="square", groups=8, kv_heads=1, batch=3, tokens=700),
    OpCase(name="d128-offset", score="offset", head_dim=128, value_dim=64, chunk_size=512, groups=8, kv_heads=1),
    OpCase(name="d16-e32", score="square", dtypes=ALL_DTYPES, head_dim=16, value_dim=32, chunk_size=128, groups=1),
    # The quadratic kernel.
    _whole(name="whole-square", score="square", dtypes=ALL_DTYPES, quick=True),
    _whole(name="whole-linear", score="linear", normalize=False, groups=1),
    _whole(name="whole-offset", score="offset", groups=3),
    _whole(name="whole-taylor", score="taylor", dtypes=(BF16, FP32)),
    _whole(name="whole-d128", score="square", head_dim=128),
    # Lengths around tiles and chunks; no decay; no weights.
    OpCase(name="one-token", score="square", dtypes=(BF16, FP32), tokens=1, normalize=False),
    OpCase(name="37-tokens", score="taylor", dtypes=(BF16, FP32), tokens=37),
    _chunks(name="257-tokens", score="square", dtypes=(BF16, FP32), tokens=257, state=True, quick=True),
    OpCase(name="no-decay", score="square", decay="none", key_weights=False, tokens=512, chunk_size=128),
    _chunks(name="fewer-queries", score="square", dtypes=(BF16, FP32), queries=300, state=True),
    OpCase(name="auto", score="square", tokens=6000, kv_heads=1, long=True, quick=True),
    # Packed documents and strong decays.
    _chunks(name="packed", score="square", dtypes=ALL_DTYPES, decay="resets", quick=True),
    _chunks(name="packed-state", score="offset", decay="resets", state=True),
    _whole(name="packed-whole", score="taylor", decay="resets"),
    _chunks(name="strong", score="square", dtypes=ALL_DTYPES, decay="strong", quick=True),
    _chunks(name="strong-taylor", score="taylor", decay="strong", normalize=False, state=True),
    _chunks(name="strong-high", score="square", decay="strong", precision="high"),
    _chunks(name="mixed", score="offset", dtypes=(BF16, FP32), decay="mixed", state=True),
    # Hard inputs, and the precision meant for them.
    _chunks(name="mean", score="square", dtypes=ALL_DTYPES, inputs="common_mean", weak_spot=_MEAN, quick=True),
    _chunks(name="mean-high", score="square", dtypes=(BF16, FP16), inputs="common_mean", precision="high"),
    _chunks(name="taylor-high", score="taylor", state=True, precision="high"),
    _chunks(name="zero-rows", score="square", dtypes=(BF16, FP32), inputs="zero_rows", quick=True),
    # Decoding: one token, a few, and one query over a buffer of pending keys.
    _decode(name="step-square", score="square", dtypes=ALL_DTYPES, tokens=1, batch=3, quick=True),
    _decode(name="step-d128", score="square", tokens=1, head_dim=128, groups=8),
    _decode(name="step-linear", score="linear", tokens=1, normalize=False),
    _decode(name="step-offset", score="offset", tokens=1, groups=3),
    _decode(name="step-taylor", score="taylor", dtypes=(BF16, FP32), tokens=1, groups=1),
    _decode(name="step-reset", score="square", tokens=1, decay="resets", batch=8),
    OpCase(name="step-trained", score="offset", dtypes=(BF16, FP32), tokens=1, state=True),
    _decode(name="few-tokens", score="square", dtypes=(BF16, FP32), tokens=5, quick=True),
    _decode(name="buffer-64", score="square", dtypes=(BF16, FP32), tokens=64, queries=1, quick=True),
    _decode(name="buffer-17", score="offset", tokens=17, queries=1, head_dim=128),
    _decode(name="buffer-33-taylor", score="taylor", tokens=33, queries=1, groups=1),
    # Several segments of the workspace.
    OpCase(name="long-d64", score="square", tokens=140_001, kv_heads=1, groups=2, state=True, long=True, quick=True),
    OpCase(name="long-d128", score="square", tokens=36_001, kv_heads=1, groups=1, head_dim=128, state=True, long=True),
)


def op_cases(*, toy: bool, quick: bool) -> Iterator[OpCase]:
    """Expand the table by dtype.

    Args:
        toy: Whether at toy size.
        quick: Whether only the cases of a quick run, in bfloat16 and, where the case has it, float32.

    Yields:
        Cases with `name` and `dtype` set.
    """
    for case in _TABLE:
        if quick and not case.quick:
            continue
        for dtype in case.dtypes:
            if quick and dtype == FP16:
                continue
            expanded = replace(case, name=f"{case.name}-{dtype}", dtype=dtype)
            yield expanded.at_toy_size() if toy else expanded
