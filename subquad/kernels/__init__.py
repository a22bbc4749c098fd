"""The polynomial-score op with decay in three forms that agree; `README.md` holds the maths."""

from subquad.kernels.cost import crossover_length
from subquad.kernels.ops import PolyAttentionOutput, poly_attention
from subquad.kernels.state import PolyState, num_rows, state_bytes, state_numel, zero_state
from subquad.kernels.window import SinkTokens, WindowOutput, window_attention

__all__ = [
    "PolyAttentionOutput",
    "PolyState",
    "SinkTokens",
    "WindowOutput",
    "crossover_length",
    "num_rows",
    "poly_attention",
    "state_bytes",
    "state_numel",
    "window_attention",
    "zero_state",
]
