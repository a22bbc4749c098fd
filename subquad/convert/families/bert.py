"""Names of the BERT family: encoders with absolute positions."""

from __future__ import annotations

from subquad.convert.families.base import Family

BERT = Family(
    name="bert",
    architecture="BertForMaskedLM",
    # what has a pooler keeps it: a fine-tuned classification starts from it
    other_architectures=("BertForPreTraining", "BertForSequenceClassification", "BertModel"),
    model_type="bert",
    student_model_type="subquad_bert",
    fields={
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "context_length": "max_position_embeddings",
    },
    causal=False,
    rotary=False,
    # a buffer that older versions of transformers saved, and heads that the class a config names does not have
    ignored_keys=(
        r"(bert\.)?embeddings\.position_ids",
        r"bert\.pooler\..*",
        r"cls\.(predictions|seq_relationship)\..*",
    ),
    # the names of the original TensorFlow release
    renamed_keys=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    # the releases call themselves BertForMaskedLM but hold both heads of the pretraining
    fuller=(("BertForMaskedLM", "cls.seq_relationship.weight", "BertForPreTraining"),),
)
