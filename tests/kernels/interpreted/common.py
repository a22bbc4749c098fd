"""Running a case of `tests/kernels/oracle.py` on the Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.kernels.oracle import Case, definition, make_case, run, with_gradients, worst

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def on_triton(case: Case, chunk_size: int | None = 16, form: str = "chunked") -> dict[str, Tensor]:
    """Call the op on the kernels; one chunk over all tokens is only taken where no state comes out."""
    keep_state = form == "chunked" or case.state is not None
    return run(case, form, chunk_size, backend="triton", keep_state=keep_state)


def small_case(**changes: object) -> Case:
    """Draw a case of the kernels' smallest tile sizes; a normalised one sees every key."""
    case = make_case(**{"batch": 1, "tokens": 35, "kv_heads": 1, "head_dim": 16, "value_dim": 16} | changes)
    return replace(case, key_weight=case.key_weight + 0.1) if case.normalize else case


def check(case: Case, dtype: torch.dtype = torch.float32, **how: object) -> None:
    """Compare outputs and all gradients with the formula in float64."""
    # The kernels get rounded inputs; the formula must start from the same ones.
    case = case.mapped(lambda tensor: tensor.to(dtype).double())
    results: list[str] = []

    def kernels(case: Case) -> dict[str, Tensor]:
        outputs = on_triton(case, **how)
        results.extend(outputs)
        return outputs

    actual = with_gradients(case, kernels, dtype)
    expected = with_gradients(case, lambda case: {name: definition(case)[name] for name in results})
    error, where = worst(actual, expected)
    assert error < TOLERANCE[dtype], f"{where} is off by {error:.2e}"
