"""Decoding with a buffer gives what one pass gives, whenever the buffer is flushed."""

from __future__ import annotations

import pytest
import torch

from subquad.errors import ConfigError
from subquad.kernels import DecodeBuffer
from tests.kernels.oracle import TOLERANCE, definition, make_case, relative_rms


@pytest.mark.parametrize("capacity", [1, 2, 5, 64])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_steps_equal_the_whole(capacity, step, normalize):
    case = make_case(tokens=12, score="offset", decay="mixed", with_state=True, normalize=normalize)
    case.key_weight.add_(0.1)
    buffer = DecodeBuffer(case.state, capacity)
    outs, written = [], 0
    for t in range(0, 12, step):
        tokens = (x[:, t : t + step] for x in (case.q, case.k, case.v, case.log_decay, case.key_weight))
        result = buffer.attend(*tokens, coefs=case.coefs, normalize=normalize)
        outs.append(result.out)
        written += result.final_state is not None
        assert buffer.k is None or buffer.k.shape[1] < capacity
    assert relative_rms(torch.cat(outs, 1), definition(case)["out"]) < TOLERANCE[torch.float64]
    assert written == 12 // step // -(-capacity // step)


def test_a_flush_takes_every_token_up():
    case = make_case(tokens=6, score="taylor", with_state=True)
    buffer = DecodeBuffer(case.state, capacity=3)
    for t in range(6):
        tokens = (x[:, t : t + 1] for x in (case.q, case.k, case.v, case.log_decay, case.key_weight))
        buffer.attend(*tokens, coefs=case.coefs, normalize=False)
    assert relative_rms(buffer.state.values, definition(case)["state.values"]) < TOLERANCE[torch.float64]


def test_capacity_must_be_positive():
    case = make_case(tokens=1, with_state=True)
    with pytest.raises(ConfigError, match="at least 1"):
        DecodeBuffer(case.state, 0)
