"""Arguments that do not fit together give one message with the value, the rule and the fix."""

from __future__ import annotations

import pytest
import torch

from subquad.errors import ConfigError
from subquad.kernels import PolyState, poly_attention, zero_state

SQUARE = (0.0, 0.0, 1.0)


def call(q=(1, 4, 4, 3), k=(1, 4, 2, 3), v=(1, 4, 2, 5), coefs=SQUARE, log_decay=None, key_weight=None, **options):
    """Call the op on zeros of the given shapes."""
    per_key = [None if shape is None else torch.zeros(shape) for shape in (log_decay, key_weight)]
    tensors = [torch.zeros(shape) for shape in (q, k, v)]
    return poly_attention(*tensors, per_key[0], coefs=coefs, key_weight=per_key[1], **options)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"q": (4, 4, 3)}, r"q has shape \[4, 4, 3\]; it must be \[batch, tokens, heads, width\]"),
        ({"q": (1, 0, 4, 3)}, r"q has shape \[1, 0, 4, 3\].*none of them 0"),
        ({"q": (1, 4, 3, 3)}, "q has 3 heads and k 2; the first must be a multiple of the second"),
        ({"q": (1, 5, 4, 3)}, "q has 5 tokens and k 4"),
        ({"q": (2, 4, 4, 3)}, r"q \[2, 4, 4, 3\] and k \[1, 4, 2, 3\] must agree in batch and width"),
        ({"q": (1, 4, 4, 2)}, "must agree in batch and width"),
        ({"v": (1, 3, 2, 5)}, r"k \[1, 4, 2, 3\] and v \[1, 3, 2, 5\] must agree"),
        ({"log_decay": (1, 4, 4)}, r"log_decay has shape \[1, 4, 4\].*\[1, 4, 2\]"),
        ({"key_weight": (1, 4)}, r"key_weight has shape \[1, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"ascend from 0 to the 4 tokens of k, got \[0, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "must ascend"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "must be whole numbers"),
        ({"cu_seqlens": torch.tensor([0, 4]), "output_final_state": True}, "one state per sequence"),
        (
            {"q": (2, 4, 4, 3), "k": (2, 4, 2, 3), "v": (2, 4, 2, 5), "cu_seqlens": torch.tensor([0, 4])},
            "the batch has 2",
        ),
        ({"coefs": ()}, "coefs has 0 entries"),
        ({"coefs": (1.0,) * 12}, "coefs has 12 entries.*up to 10"),
        ({"coefs": (0.0, 0.0)}, "all 0"),
        ({"coefs": (0.0, torch.ones(2))}, r"coefs\[1\] has shape \[2\]; a tensor must be \[query heads\] = \[4\]"),
        ({"form": "fast"}, "form 'fast' is unknown; it must be one of auto, quadratic, chunked, recurrent"),
        ({"chunk_size": 0}, "chunk_size is 0; it must be at least 1"),
        ({"form": "recurrent"}, "takes one token, got 4 queries and 4 keys"),
        ({"coefs": (1.0,) * 4, "form": "chunked"}, "powers above 2 need form 'auto' or 'quadratic'"),
        ({"coefs": (1.0,) * 4, "output_final_state": True}, "power 3 has no state"),
        ({"initial_state": zero_state(1, 2, 3, 5, (0, 2))}, r"values has shape \[1, 2, 7, 5\], not \[1, 2, 6, 5\]"),
        ({"initial_state": PolyState(torch.zeros(1, 2, 6, 5), torch.zeros(1, 6))}, r"normaliser has shape \[1, 6\]"),
    ],
)
def test_message(wrong, message):
    with pytest.raises(ConfigError, match=message):
        call(**wrong)


def test_all_wrong_shapes_are_named_at_once():
    with pytest.raises(ConfigError, match=r"q has 5 tokens.*log_decay has shape.*key_weight has shape"):
        call(q=(1, 5, 4, 3), log_decay=(1, 1, 1), key_weight=(1, 1, 1))


def test_integer_tensors_are_refused():
    ids = torch.zeros(1, 4, 2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"k is torch\.int64; it must be a floating point tensor"):
        poly_attention(torch.zeros(1, 4, 4, 3), ids, torch.zeros(1, 4, 2, 5), coefs=SQUARE)


def test_what_fits_is_accepted():
    assert call(log_decay=(1, 4, 2), key_weight=(1, 4, 2)).out.shape == (1, 4, 4, 5)
