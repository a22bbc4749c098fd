"""Compare the op and the window, as an implementation computes them on a device, with float64 on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.ops import Form, poly_attention
from subquad.kernels.state import Coefs, PolyState
from subquad.kernels.window import WindowBackend, window_attention

Named = dict[str, Tensor]

# Relative RMS error; the second number is for gradients in whose sums large terms cancel.
LIMITS = {torch.float32: (1e-5, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (5e-3, 1e-2)}
_CANCELLING = {
    "op": ("d log_decay", "d key_weight", "d coefs", "d state.values", "d state.normaliser"),
    "decode": (),
    "window": ("d q", "d k"),
}
_COEFS = {"linear": (0.0, 1.0), "square": (0.0, 0.0, 1.0), "taylor": (1.0, 1.0, 0.5)}
_SEED = 0
_NUM_GROUPS = 3
# Tokens that are decoded one at a time.
_NUM_STEPS = 3
_NUM_SINKS = 4
_STATE = ("state.values", "state.normaliser")
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison.

    Attributes:
        part: `op`: outputs, final state and every gradient. `decode`: a prompt, then tokens one at a time. `window`:
            outputs, log normaliser and gradients.
        implementation: What is checked.
        score: The polynomial: x, x^2, 1 + x + x^2 / 2; the window has none.
        dtype: Dtype of q, k, v.
        head_dim: Width of keys and values.
        tokens: Keys and queries.
        chunk_size: Tokens per chunk; 0 is one chunk over all tokens, without a state. Of a window: its size.
        num_kv_heads: Key/value heads, of three query heads each.
    """

    part: Literal["op", "decode", "window"] = "op"
    implementation: Literal["triton", "torch", "flex"]
    score: Literal["linear", "square", "taylor"] = "square"
    dtype: torch.dtype = torch.float32
    head_dim: int
    tokens: int = 300
    chunk_size: int = 128
    num_kv_heads: int = 2

    @property
    def name(self) -> str:
        """One line that tells the checks of a device apart."""
        kinds = {"op": self.score, "decode": f"{self.score}, token by token", "window": "window"}
        form = "" if self.chunk_size else ", one chunk"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.implementation}: {kinds[self.part]}{form}, head_dim {self.head_dim}, {dtype}"

    @property
    def normalize(self) -> bool:
        """Whether the op divides by the sum of weights: where that is never near 0, so that limits can be tight."""
        return self.score == "taylor"


class Measured(NamedTuple):
    """A relative RMS error (infinite where a result is NaN) and the largest one allowed."""

    error: float
    limit: float


def compare(check: Check, device: torch.device) -> tuple[dict[str, Measured], list[str]]:
    """Run a check.

    Args:
        check: The check.
        device: Where the implementation runs.

    Returns:
        Errors by result: `out`, `d k`, …; and one phrase per error above its limit and per result that differs between
        two runs in some bit (of the Triton kernels; on a CPU, of anything).
    """
    inputs = _draw_inputs(check)
    evaluate = _evaluate_window if check.part == "window" else _evaluate_op
    leaves = _as_leaves({name: tensor.double() for name, tensor in inputs.items()})
    outputs = evaluate(check, leaves, reference=True)
    cotangents = _draw_cotangents(check, outputs)
    expected = _with_gradients(outputs, leaves, cotangents)
    runs = []
    for _ in range(2):
        leaves = _as_leaves({name: tensor.to(device) for name, tensor in inputs.items()})
        runs.append(_with_gradients(evaluate(check, leaves, reference=False), leaves, cotangents))
    measured = {name: _measure(check, name, runs[0][name], right) for name, right in expected.items()}
    problems = [
        f"{name}: relative error {error:.1e}, the limit is {limit:.0e}"
        for name, (error, limit) in measured.items()
        if error > limit
    ]
    # PyTorch's own operations on a GPU do not promise the same bits.
    if check.implementation == "triton" or device.type == "cpu":
        problems += [f"{name}: two runs differ" for name, first in runs[0].items() if _differ(first, runs[1][name])]
    return measured, problems


def _measure(check: Check, name: str, actual: Tensor, right: Tensor) -> Measured:
    tight, loose = LIMITS[check.dtype]
    error = ((actual.double() - right).norm() / right.norm().clamp_min(_TINY)).item()
    return Measured(math.inf if math.isnan(error) else error, loose if name in _CANCELLING[check.part] else tight)


def _differ(left: Tensor, right: Tensor) -> bool:
    return not torch.equal(left.nan_to_num(), right.nan_to_num())


def _draw_inputs(check: Check) -> Named:
    """Draw inputs on the CPU, rounded to the check's dtype: float64 starts from the same numbers."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens, heads, width = check.tokens, check.num_kv_heads, check.head_dim
    inputs = {
        "q": torch.randn(1, tokens, heads * _NUM_GROUPS, width, generator=generator).to(check.dtype),
        "k": torch.randn(1, tokens, heads, width, generator=generator).to(check.dtype),
        "v": torch.randn(1, tokens, heads, width, generator=generator).to(check.dtype),
    }
    if check.part == "window":
        return inputs
    reset = 2 * tokens // 3
    # Such that the first chunks still weigh something at the end.
    log_decay = -4 / tokens * torch.rand(1, tokens, heads, generator=generator)
    log_decay[:, reset, 0] = -torch.inf
    key_weight = 0.5 + torch.rand(1, tokens, heads, generator=generator)
    # Tokens that are not written; never the first of a document, whose query would see no key.
    key_weight[:, 1:reset:7] = 0.0
    inputs |= {"log_decay": log_decay, "key_weight": key_weight}
    coefs = _COEFS[check.score]
    if check.score == "taylor":
        spread = 0.8 + 0.4 * torch.rand(len(coefs), heads * _NUM_GROUPS, generator=generator)
        inputs["coefs"] = torch.tensor(coefs)[:, None] * spread
    if check.chunk_size:
        earlier = torch.randn(1, 40, heads, width, generator=generator)
        state = poly_attention(
            earlier, earlier, earlier.flip(3), coefs=coefs, output_final_state=True, form="quadratic"
        ).final_state
        assert state is not None, "a final state was asked for"
        inputs |= {"state.values": state.values, "state.normaliser": state.normaliser}
    return inputs


def _as_leaves(inputs: Named) -> Named:
    return {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}


def _draw_cotangents(check: Check, outputs: Named) -> Named:
    """Draw a gradient for every output, so scaled that each has the same share in the gradients of the inputs."""
    generator = torch.Generator().manual_seed(_SEED)
    share = math.sqrt(outputs["out"].numel())
    cotangents = {}
    for name, output in outputs.items():
        draw = torch.randn(output.shape, generator=generator) * share / output.norm().clamp_min(_TINY).item()
        # Rounded to what backward is given: the dtype of the output under test.
        dtype = check.dtype if name == "out" and (check.normalize or check.part == "window") else torch.float32
        cotangents[name] = draw.to(dtype).double()
    return cotangents


def _with_gradients(outputs: Named, leaves: Named, cotangents: Named) -> Named:
    """Add `d <input>` for every input if the outputs have gradients, and bring everything to the CPU."""
    results = dict(outputs)
    if outputs["out"].requires_grad:
        weights = [cotangents[name].to(output) for name, output in outputs.items()]
        grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), weights)
        results |= {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


def _evaluate_op(check: Check, leaves: Named, reference: bool) -> Named:
    """Return `out`, `normaliser` and the final state: by the definition, or with the implementation under test."""
    tokens = check.tokens
    if check.part == "op":
        return _attend(check, leaves, reference, 0, tokens, None)
    with torch.no_grad():
        if reference:
            outputs = _attend(check, leaves, reference, 0, tokens, None)
            return {name: x if name in _STATE else x[:, -_NUM_STEPS:] for name, x in outputs.items()}
        outputs = _attend(check, leaves, reference, 0, tokens - _NUM_STEPS, None)
        steps = []
        for start in range(tokens - _NUM_STEPS, tokens):
            outputs = _attend(check, leaves, reference, start, start + 1, outputs)
            steps.append(outputs)
        return {
            name: x if name in _STATE else torch.cat([step[name] for step in steps], 1) for name, x in outputs.items()
        }


def _attend(check: Check, leaves: Named, reference: bool, start: int, stop: int, previous: Named | None) -> Named:
    """Call the op on some of the tokens, after `previous` or the initial state."""
    held = previous or leaves
    q, k, v, log_decay, key_weight = (leaves[x][:, start:stop] for x in ("q", "k", "v", "log_decay", "key_weight"))
    coefs: Coefs = tuple(leaves["coefs"]) if "coefs" in leaves else _COEFS[check.score]
    form: Form = "quadratic" if reference else "chunked" if check.chunk_size and stop - start > 1 else "auto"
    result = poly_attention(
        q,
        k,
        v,
        log_decay,
        coefs=coefs,
        key_weight=key_weight,
        normalize=check.normalize,
        initial_state=PolyState(*(held[name] for name in _STATE)) if check.chunk_size else None,
        output_final_state=check.chunk_size > 0,
        chunk_size=check.chunk_size if form == "chunked" else None,
        form=form,
        backend="triton" if check.implementation == "triton" else "torch",
    )
    outputs = {"out": result.out, "normaliser": result.normaliser}
    if result.final_state is not None:
        outputs |= dict(zip(_STATE, result.final_state, strict=True))
    return outputs


def _evaluate_window(check: Check, leaves: Named, reference: bool) -> Named:
    """Return `out` and `log_normaliser`: by the definition, or with the implementation under test."""
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    steps = torch.arange(check.tokens, device=q.device)
    second = 2 * check.tokens // 5
    documents = (steps >= second).long()
    if not reference:
        backend: WindowBackend = "flex" if check.implementation == "flex" else "torch"
        result = window_attention(
            q, k, v, window=check.chunk_size, sinks=_NUM_SINKS, documents=documents[None], backend=backend
        )
        return {"out": result.out, "log_normaliser": result.log_normaliser}
    sink = steps - second * documents < _NUM_SINKS
    behind = steps[:, None] - steps
    seen = (documents[:, None] == documents) & (behind >= 0) & (sink | (behind < check.chunk_size))
    k, v = (x.repeat_interleave(_NUM_GROUPS, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * check.head_dim**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)
    return {"out": out, "log_normaliser": scores.logsumexp(-1).transpose(1, 2)}
