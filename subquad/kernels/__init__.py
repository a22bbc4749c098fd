"""The polynomial-score op with decay in three forms that agree, and the exact scores; `README.md` holds the maths."""

from subquad.kernels.buffered import DecodeBuffer
from subquad.kernels.cost import crossover_length
from subquad.kernels.exp_attention import exp_attention
from subquad.kernels.ops import PolyAttentionOutput, poly_attention
from subquad.kernels.state import PolyState, num_rows, state_bytes, state_numel, zero_state
from subquad.kernels.window import window_attention
from subquad.kernels.window_inputs import SinkTokens, WindowOutput

__all__ = [
    "DecodeBuffer",
    "PolyAttentionOutput",
    "PolyState",
    "SinkTokens",
    "WindowOutput",
    "crossover_length",
    "exp_attention",
    "num_rows",
    "poly_attention",
    "state_bytes",
    "state_numel",
    "window_attention",
    "zero_state",
]
