"""The op written a second time, straight from its formula, and the cases on which the forms are compared with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subquad.kernels import PolyState, num_rows, poly_attention
from subquad.kernels.state import active_orders

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# What float32 cannot hold counts as 0: exp(-200) has a float64 value and no float32 one.
UNDERFLOW = 1e-30


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return RMS(actual - expected) / RMS(expected) in float64; NaN and wrong shapes count as infinite."""
    if actual.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    error = (actual.double() - expected).square().mean().sqrt().item()
    size = max(expected.square().mean().sqrt().item(), UNDERFLOW)
    return error / size if error == error else float("inf")


@dataclass(frozen=True)
class Case:
    """Inputs of one call, all float64 (but representable in float32)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    key_weight: Tensor
    coefs: tuple[float | Tensor, ...]
    values: Tensor | None = None
    normaliser: Tensor | None = None
    normalize: bool = False

    @property
    def orders(self) -> tuple[int, ...]:
        return active_orders(self.coefs)

    @property
    def state(self) -> PolyState | None:
        return None if self.values is None else PolyState(self.values, self.normaliser)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that has a gradient, by name."""
        named = {
            name: getattr(self, name) for name in ("q", "k", "v", "log_decay", "key_weight", "values", "normaliser")
        }
        named |= {f"coefs[{n}]": coef for n, coef in enumerate(self.coefs) if isinstance(coef, Tensor)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def mapped(self, change) -> Case:
        """Return the case with `change` applied to every tensor."""
        return self.mapped_to({name: change(tensor) for name, tensor in self.tensors().items()})

    def mapped_to(self, changed: dict[str, Tensor]) -> Case:
        """Return the case with other tensors, given by name."""
        changed = dict(changed)
        coefs = tuple(changed.pop(f"coefs[{n}]", coef) for n, coef in enumerate(self.coefs))
        return replace(self, coefs=coefs, **changed)


def random_decay(shape: tuple[int, ...], kind: str) -> Tensor:
    """Return log decays: none, as a model has them, strong (up to 200 per token), with resets, or all of it mixed."""
    decay = {
        "none": lambda: torch.zeros(shape),
        "gentle": lambda: -torch.rand(shape) * 0.3,
        "strong": lambda: -200 * torch.rand(shape),
        "resets": lambda: -torch.rand(shape).masked_fill(torch.rand(shape) < 0.2, torch.inf),
        "mixed": lambda: -(10 ** (5 * torch.rand(shape) - 3)).masked_fill(torch.rand(shape) < 0.1, torch.inf),
    }[kind]()
    return decay.clamp(min=-200).where(decay.isfinite(), decay)


def make_case(
    *,
    seed: int = 0,
    batch: int = 2,
    tokens: int = 23,
    queries: int | None = None,
    kv_heads: int = 2,
    groups: int = 2,
    head_dim: int = 5,
    value_dim: int = 4,
    score: str = "taylor",
    decay: str = "gentle",
    with_state: bool = False,
    normalize: bool = False,
) -> Case:
    """Draw a case. `score` is `square`, `linear`, `constant`, `taylor`, `even`, `offset` (tensors) or `taylorN`."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    heads = kv_heads * groups
    offset = torch.rand(heads) + 0.5
    coefs = {
        "square": (0.0, 0.0, 1.0),
        "linear": (0.0, 0.7),
        "constant": (1.3,),
        "taylor": (1.0, 1.0, 0.5),
        "even": (torch.rand(heads) + 0.5, 0.0, torch.rand(heads) + 0.5),
        "offset": (offset.square() + 0.1, 2 * offset, torch.ones(heads)),
        "taylor3": (1.0, 1.0, 1 / 2, 1 / 6),
        "taylor10": tuple(1 / torch.arange(1, n + 1).prod().item() for n in range(11)),
    }[score]
    orders = active_orders(coefs)
    case = Case(
        q=torch.randn(batch, queries or tokens, heads, head_dim),
        k=torch.randn(batch, tokens, kv_heads, head_dim),
        v=torch.randn(batch, tokens, kv_heads, value_dim),
        log_decay=random_decay((batch, tokens, kv_heads), decay),
        key_weight=torch.rand(batch, tokens, kv_heads) * 2 * (torch.rand(batch, tokens, kv_heads) > 0.1),
        coefs=coefs,
        normalize=normalize,
    )
    if with_state:
        keys = torch.randn(batch, 7, kv_heads, head_dim)
        rows = [torch.ones(batch, 7, kv_heads, 1), keys, packed_products(keys)]
        before = torch.cat([rows[order] for order in orders], dim=-1)
        assert before.shape[-1] == num_rows(head_dim, orders)
        case = replace(
            case,
            values=torch.einsum("bthr,bthe->bhre", before, torch.randn(batch, 7, kv_heads, value_dim)),
            normaliser=before.sum(1),
        )
    torch.set_rng_state(generator_state)
    return case.mapped(lambda tensor: tensor.double())


def packed_products(k: Tensor) -> Tensor:
    """Return `k_i k_j`, `i <= j`, row by row."""
    return torch.stack([k[..., i] * k[..., j] for i in range(k.shape[-1]) for j in range(i, k.shape[-1])], dim=-1)


def definition(case: Case) -> dict[str, Tensor]:
    """Compute the op from its formula, with every `L_ts` summed on its own (`T**3` memory)."""
    tokens, queries, heads = case.k.shape[1], case.q.shape[1], case.q.shape[2]
    group = heads // case.k.shape[2]
    kv_head = [h // group for h in range(heads)]
    k, v, weight = case.k[:, :, kv_head], case.v[:, :, kv_head], case.key_weight[:, :, kv_head]
    t = torch.arange(tokens - queries, tokens)[:, None, None]
    s, r = torch.arange(tokens)[None, :, None], torch.arange(tokens)[None, None, :]
    between = ((s < r) & (r <= t)).double()
    reset = (case.log_decay == -torch.inf).double()
    finite = torch.where(case.log_decay == -torch.inf, 0.0, case.log_decay)
    factor = torch.einsum("tsr,brh->bhts", between, finite).exp()
    factor = factor * (torch.einsum("tsr,brh->bhts", between, reset) == 0) * (s <= t)[..., 0]

    x = torch.einsum("bthd,bshd->bhts", case.q, k) * case.q.shape[-1] ** -0.5
    polynomial = sum(_of_head(coef) * x**n for n, coef in enumerate(case.coefs))
    pair = polynomial * factor[:, kv_head] * weight.transpose(1, 2)[:, :, None]
    result = {"numerator": torch.einsum("bhts,bshe->bthe", pair, v), "normaliser": pair.sum(-1).transpose(1, 2)}

    if max(case.orders) <= 2:
        to_end = factor[:, :, -1] * case.key_weight.transpose(1, 2)
        rows = [torch.ones_like(case.k[..., :1]), case.k, packed_products(case.k)]
        rows = torch.cat([rows[order] for order in case.orders], dim=-1)
        result["state.values"] = torch.einsum("bhs,bshr,bshe->bhre", to_end, rows, case.v)
        result["state.normaliser"] = torch.einsum("bhs,bshr->bhr", to_end, rows)
    if case.values is not None:
        _add_state(case, result, kv_head, finite, reset)
    result["out"] = result.pop("numerator")
    if case.normalize:
        result["out"] = result["out"] / result["normaliser"][..., None]
    return result


def _add_state(case: Case, result: dict[str, Tensor], kv_head: list[int], finite: Tensor, reset: Tensor) -> None:
    kept = finite.cumsum(1).exp() * (reset.cumsum(1) == 0)
    q = case.q * case.q.shape[-1] ** -0.5
    dim = q.shape[-1]
    many = torch.tensor([1.0 if i == j else 2.0 for i in range(dim) for j in range(i, dim)], dtype=q.dtype)
    rows = [torch.ones_like(q[..., :1]), q, packed_products(q) * many]
    rows = torch.cat([rows[n] * _of_head(case.coefs[n])[:, 0] for n in case.orders], dim=-1)
    read = rows * kept[:, -q.shape[1] :, kv_head, None]
    result["numerator"] = result["numerator"] + torch.einsum("bthr,bhre->bthe", read, case.values[:, kv_head])
    result["normaliser"] = result["normaliser"] + torch.einsum("bthr,bhr->bth", read, case.normaliser[:, kv_head])
    result["state.values"] = result["state.values"] + case.values * kept[:, -1, :, None, None]
    result["state.normaliser"] = result["state.normaliser"] + case.normaliser * kept[:, -1, :, None]


def _of_head(coef: float | Tensor) -> Tensor:
    return (
        coef[:, None, None] if isinstance(coef, Tensor) else torch.tensor(coef, dtype=torch.float64)[None, None, None]
    )


def run(
    case: Case, form: str, chunk_size: int | None = None, *, backend: str = "auto", keep_state: bool | None = None
) -> dict[str, Tensor]:
    """Call the op; `form="steps"` feeds it one token at a time. `keep_state=None` keeps the state if there is one."""
    keep_state = max(case.orders) <= 2 if keep_state is None else keep_state
    if form != "steps":
        result = poly_attention(
            case.q,
            case.k,
            case.v,
            case.log_decay,
            coefs=case.coefs,
            key_weight=case.key_weight,
            normalize=case.normalize,
            initial_state=case.state,
            output_final_state=keep_state,
            chunk_size=chunk_size,
            form=form,
            backend=backend,
        )
        return _named([result])
    state, steps = case.state, []
    ahead = case.k.shape[1] - case.q.shape[1]
    for t in range(case.k.shape[1]):
        # A key before the first query has no query of its own: any will do, and its output is dropped.
        q = case.q[:, max(t - ahead, 0), None]
        k, v, log_decay, key_weight = (x[:, t : t + 1] for x in (case.k, case.v, case.log_decay, case.key_weight))
        step = poly_attention(
            q,
            k,
            v,
            log_decay,
            coefs=case.coefs,
            key_weight=key_weight,
            normalize=case.normalize,
            initial_state=state,
            output_final_state=True,
            form="recurrent",
        )
        state = step.final_state
        steps.append(step)
    return _named(steps[ahead:])


def _named(results: list) -> dict[str, Tensor]:
    named = {name: torch.cat([getattr(part, name) for part in results], dim=1) for name in ("out", "normaliser")}
    state = results[-1].final_state
    return named if state is None else named | {"state.values": state.values, "state.normaliser": state.normaliser}


def with_gradients(case: Case, compute, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Compute in `dtype` and add the gradient of every input, under fixed random weights on every output."""
    case = case.mapped(lambda tensor: tensor.to(dtype).detach().requires_grad_())
    result = compute(case)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for name in sorted(result):
        weight = torch.randn(result[name].shape, generator=generator, dtype=torch.float64)
        loss = loss + (result[name].double() * weight).sum()
    inputs = case.tensors()
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for (name, tensor), grad in zip(inputs.items(), grads, strict=True):
        result[f"d {name}"] = torch.zeros_like(tensor) if grad is None else grad
    return {name: tensor.detach() for name, tensor in result.items()}


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative RMS error and where it is; a missing or surplus result counts as infinite."""
    if actual.keys() != expected.keys():
        return float("inf"), f"results {sorted(actual.keys() ^ expected.keys())}"
    return max((relative_rms(actual[name], expected[name]), name) for name in expected)
