"""What is timed: the op, PyTorch's attention and other public kernels, on the same tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.suite.hardware import Call
from subquad.kernels import PolyState, poly_attention, zero_state
from subquad.kernels.backend import Backend
from subquad.kernels.ops import Form
from subquad.kernels.state import Coefs, active_orders

Pass = Literal["forward", "forward_backward", "prefill"]
PASSES: tuple[Pass, ...] = ("forward", "forward_backward", "prefill")

SDPA_FLASH, SDPA_CUDNN = "sdpa_flash", "sdpa_cudnn"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one measurement.

    Attributes:
        tokens: Sequence length; for decoding with softmax, the length of the key/value cache.
        head_dim: Width of keys and values.
        groups: Query heads per key/value head.
        kv_heads: Key/value heads.
        batch: Sequences.
    """

    tokens: int
    head_dim: int
    groups: int
    kv_heads: int = 8
    batch: int = 1

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.groups

    def qkv_bytes(self, itemsize: int = 2) -> int:
        """Return the bytes of q, k and v."""
        return self.batch * self.tokens * (self.num_heads + 2 * self.kv_heads) * self.head_dim * itemsize


@dataclass(frozen=True)
class Tensors:
    """Inputs in bfloat16, the log decay in float32; and a gradient of the output.

    Attributes:
        q: `[B, T, H, d]`.
        k: `[B, T, Hkv, d]`.
        v: `[B, T, Hkv, d]`.
        log_decay: `[B, T, Hkv]`.
        d_out: `[B, T, H, d]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    d_out: Tensor

    def leaves(self) -> list[Tensor]:
        """Return what gradients are taken of."""
        return [self.q, self.k, self.v, self.log_decay]


def draw_tensors(sizes: Sizes, device: torch.device, *, queries: int | None = None, grad: bool = False) -> Tensors:
    """Draw random inputs on the device (zeros would be faster than real data).

    Args:
        sizes: Sizes.
        device: Device.
        queries: Number of queries; None is one per key.
        grad: Whether the leaves require gradients.

    Returns:
        The tensors.
    """
    kv_shape = (sizes.batch, sizes.tokens, sizes.kv_heads, sizes.head_dim)
    q_shape = (sizes.batch, queries or sizes.tokens, sizes.num_heads, sizes.head_dim)
    q, k, v, d_out = (
        torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in (q_shape, kv_shape, kv_shape, q_shape)
    )
    log_decay = -0.02 * torch.rand(kv_shape[:3], device=device)
    tensors = Tensors(q, k, v, log_decay, d_out)
    for leaf in tensors.leaves():
        leaf.requires_grad_(grad)
    return tensors


def call_for_pass(forward: Callable[[], Tensor], tensors: Tensors, which: Pass, leaves: list[Tensor]) -> Call:
    """Return what is timed: the forward without gradients, or the forward and the gradients of `leaves`.

    Args:
        forward: Returns the output in the shape of `tensors.d_out`.
        tensors: Inputs.
        which: The pass.
        leaves: What gradients are taken of.

    Returns:
        The call.
    """

    def without_gradients() -> Tensor:
        with torch.no_grad():
            return forward()

    def with_gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, tensors.d_out)

    return with_gradients if which == "forward_backward" else without_gradients


def subquad_forward(
    tensors: Tensors, coefs: Coefs, backend: Backend, *, chunk_size: int | None = None, final_state: bool = False
) -> Callable[[], Tensor]:
    """Return a call of the op.

    Args:
        tensors: Inputs.
        coefs: The polynomial; without an even power its sum of weights can be 0, so the output is not divided by it.
        backend: The op's option.
        chunk_size: Tokens per chunk; None leaves the choice of the form to the op.
        final_state: Whether the state is asked for too.

    Returns:
        The call; it returns `out`.
    """
    form: Form = "auto" if chunk_size is None else "chunked"

    def forward() -> Tensor:
        result = poly_attention(
            tensors.q,
            tensors.k,
            tensors.v,
            tensors.log_decay,
            coefs=coefs,
            normalize=active_orders(coefs) != (1,),
            output_final_state=final_state,
            chunk_size=chunk_size,
            form=form,
            backend=backend,
        )
        return result.out.to(tensors.q.dtype)

    return forward


def sdpa_forward(tensors: Tensors, kernel: SDPBackend | None, *, causal: bool = True) -> Callable[[], Tensor]:
    """Return a call of PyTorch's attention on the same tensors.

    Args:
        tensors: Inputs; heads go before tokens as views, which its kernels read without a copy.
        kernel: The kernel that must run; None leaves the choice to PyTorch.
        causal: Whether masked; a single query over a cache sees everything.

    Returns:
        The call; it returns `[B, T, H, d]`.
    """

    def attend() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v))
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    def forward() -> Tensor:
        if kernel is None:
            return attend()
        with sdpa_kernel(kernel):
            return attend()

    return forward


def decode_step(tensors: Tensors, state: PolyState, coefs: Coefs, backend: Backend, *, update: bool) -> Call:
    """Return one step of decoding: the new token's query reads the state.

    Args:
        tensors: One query; one key and value, or several that have not been written to the state yet.
        state: The state before the keys.
        coefs: The polynomial.
        backend: The op's option.
        update: Whether the keys are written to the state.

    Returns:
        The call.
    """

    def step() -> Any:
        with torch.no_grad():
            return poly_attention(
                tensors.q,
                tensors.k,
                tensors.v,
                tensors.log_decay,
                coefs=coefs,
                initial_state=state,
                output_final_state=update,
                backend=backend,
            )

    return step


def random_state(sizes: Sizes, coefs: Coefs, device: torch.device) -> PolyState:
    """Return a state of random numbers with a positive normaliser for the squares of queries."""
    empty = zero_state(sizes.batch, sizes.kv_heads, sizes.head_dim, sizes.head_dim, active_orders(coefs), device=device)
    # Rows of products i = j dominate, as a sum of many keys has them.
    rows, columns = torch.triu_indices(sizes.head_dim, sizes.head_dim, device=device)
    normaliser = 0.01 * torch.rand_like(empty.normaliser)
    normaliser[..., -rows.numel() :] += (rows == columns).float()
    return PolyState(torch.randn_like(empty.values), normaliser)


def public_kernels(tensors: Tensors, device: torch.device) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Return other linear-time kernels that are installed, as calls, and why each of the others is not there.

    `retention` is the same power 2 with decay (Buckman et al., power attention); flash-linear-attention has no power 2:
    its `simple_gla` is power 1 with decay, without a normaliser and without shared key/value heads.

    Args:
        tensors: Inputs.
        device: Where they are.

    Returns:
        Calls that return `[B, T, H, d]`, and reasons, by name.
    """
    calls: dict[str, Callable[[], Tensor]] = {}
    absent: dict[str, str] = {}
    for name, (package, make) in {"retention": ("retention", _retention), "fla_simple_gla": ("fla", _fla)}.items():
        if importlib.util.find_spec(package) is None:
            absent[name] = f"the package {package!r} is not installed"
        elif device.type != "cuda":
            absent[name] = "needs a GPU"
        else:
            try:
                calls[name] = make(tensors)
            except Exception as error:  # another project's import can fail in any way
                absent[name] = f"{type(error).__name__}: {error}"
    return calls, absent


def _retention(tensors: Tensors) -> Callable[[], Tensor]:
    power_retention = importlib.import_module("retention").power_retention

    def forward() -> Tensor:
        return power_retention(
            tensors.q, tensors.k, tensors.v, tensors.log_decay, deg=2, chunk_size=1024, switch_over_seq_len=2048
        )

    return forward


def _fla(tensors: Tensors) -> Callable[[], Tensor]:
    chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    groups = tensors.q.shape[2] // tensors.k.shape[2]

    def forward() -> Tensor:
        k, v, log_decay = (
            x if groups == 1 else x.repeat_interleave(groups, dim=2) for x in (tensors.k, tensors.v, tensors.log_decay)
        )
        return chunk_simple_gla(tensors.q, k, v, log_decay)[0]

    return forward
