"""`SubquadBertAttention`: the self-attention of a BERT layer, converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.bert.modeling_bert import eager_attention_forward

from subquad.errors import ConfigError
from subquad.layers.attention import SubquadAttention
from subquad.layers.sequence import SequenceInfo


class SubquadBertAttention(SubquadAttention):
    """Replaces the module `attention.self` of a BERT layer; keeps its query, key and value projections.

    It returns the concatenated heads: the output projection, with dropout, residual and layer norm, is the unchanged
    module `attention.output` beside it. So `local_loss` compares heads, before that projection. Positions are in BERT's
    embeddings: q and k carry no rotary embedding. The mixer has no dropout on its weights, as in Cottention's BERT.
    """

    teacher_attributes: ClassVar[tuple[str, ...]] = (
        "layer_idx",
        "num_attention_heads",
        "attention_head_size",
        "all_head_size",
        "scaling",
        "is_decoder",
        "is_causal",
        "query",
        "key",
        "value",
        "dropout",
    )
    eager_attention: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]] = staticmethod(eager_attention_forward)

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    dropout: nn.Dropout

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """The projections of q, k and v."""
        return self.query, self.key, self.value

    @property
    def dropout_rate(self) -> float:
        """The teacher's dropout on its attention weights while training; a mixer has none."""
        return self.dropout.p

    def project_out(self, heads: Tensor) -> Tensor:
        """Concatenate heads `[B, T, num_heads, head_dim]`; the projection is outside this module."""
        return heads.flatten(2).contiguous()

    # as BERT's own module has it; Llama's second argument does not exist here
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        sequence: SequenceInfo | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the concatenated heads; arguments are those of transformers' `BertSelfAttention`.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: the model's mask, used in teacher mode only.
            cache: must be None: an encoder does not generate.
            past_key_values: the same, by its older name.
            sequence: padding of the tokens.
            **kwargs: passed on to the attention function in teacher mode, as transformers does.

        Returns:
            `[B, T, hidden_size]` and attention weights (teacher mode with eager attention only, else None).

        Raises:
            ConfigError: A cache is given.
        """
        if cache is not None or past_key_values is not None:
            raise ConfigError("a converted BERT is an encoder: every token sees all others, so there is no cache")
        inputs = self.inputs(hidden_states, None, sequence)
        if self.mode in ("teacher", "transfer"):
            return self.teach(inputs, attention_mask, None, kwargs)
        return self.project_out(self.student_heads(inputs)), None
