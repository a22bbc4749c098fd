"""A tiny BERT with weights large enough that attention attends to something, and a tokenizer for it."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForPreTraining, PreTrainedTokenizerFast

VOCAB_SIZE = 97
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]


def tiny_bert_config(**changes) -> BertConfig:
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 36,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return BertConfig(**(values | changes))


def tiny_bert(kind=BertForPreTraining, **changes):
    """A BERT of any class whose attention is not flat; the weights are the same in every class."""
    torch.manual_seed(0)
    model = kind(tiny_bert_config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            if "LayerNorm" not in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def tiny_bert_tokens(batch_size=2, seq_len=23, seed=3) -> torch.Tensor:
    return torch.randint(5, VOCAB_SIZE, (batch_size, seq_len), generator=torch.Generator().manual_seed(seed))


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words that frames texts and pairs as BERT's does."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL + words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
