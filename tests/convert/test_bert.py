"""BERT through source, plan, surgery and export: a folder in, a folder out that loads by every way."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification

from subquad.convert.export import export_student
from subquad.convert.modelcard import ModelCard
from subquad.convert.plan import plan_conversion
from subquad.convert.plan_table import render_plan
from subquad.convert.source import inspect_source, load_teacher
from subquad.convert.surgery import apply_plan
from subquad.errors import ConfigError, SourceError
from subquad.kernels.cost import bidirectional_crossover
from subquad.kernels.counts import HeadShape
from subquad.layers import resolve_mixer
from tests.convert.test_fresh_process import run_fresh
from tests.tiny_bert import tiny_bert, tiny_bert_config, tiny_bert_tokens, word_tokenizer
from tests.tiny_llama import tiny_config

COTTENTION = resolve_mixer({"preset": "cottention", "causal": False})
CARD = ModelCard(name="tiny", teacher="tiny-bert", mixers={"cottention": 2})


def checkpoint(folder, kind=BertForPreTraining, named=None):
    model = tiny_bert(kind)
    model.save_pretrained(folder)
    word_tokenizer([f"w{i}" for i in range(92)]).save_pretrained(folder)
    if named is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    return folder, model


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForPreTraining, BertForSequenceClassification])
def test_a_folder_is_loaded_as_what_it_is(kind, tmp_path):
    folder, model = checkpoint(tmp_path, kind)
    teacher = load_teacher(str(folder))
    assert teacher.info.family.name == "bert"
    assert teacher.info.num_parameters == model.num_parameters()
    assert type(teacher.model) is kind
    assert torch.equal(teacher.model(tiny_bert_tokens())[0], model(tiny_bert_tokens())[0])


def test_the_releases_quirks_are_known(tmp_path):
    # They call themselves BertForMaskedLM, hold both heads, name layer norms as TensorFlow did, and carry a buffer.
    folder, model = checkpoint(tmp_path, named="BertForMaskedLM")
    tensors = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    info = inspect_source(str(folder))
    assert info.architecture == "BertForPreTraining"
    teacher = load_teacher(info)
    assert torch.equal(teacher.model(tiny_bert_tokens())[0], model(tiny_bert_tokens())[0])


def test_a_missing_tensor_is_an_error(tmp_path):
    folder, _ = checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    lost = "bert.encoder.layer.1.attention.self.key.bias"
    save_file({n: t for n, t in tensors.items() if n != lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match=f"1 missing: {lost}"):
        inspect_source(str(folder))


def test_the_plan_shows_an_encoder():
    config = BertConfig()  # BERT base: 12 layers, 12 heads of 64
    plan = plan_conversion(config, COTTENTION, {"0": resolve_mixer("softmax")})
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(render_plan(plan))
    text = capture.get()
    for words in ("bert, 12 layers", "softmax, unchanged", "softmax → cottention (causal=False)", "there is no cache"):
        assert words in text
    assert "smaller from" not in text
    assert plan.to_dict()["causal"] is False
    assert plan.added_parameters == 11 * 12
    assert plan.layers[1].prefill_crossover == 65
    assert plan.layers[1].decode_crossover is None
    assert plan.lengths == ()


def test_the_crossover_is_where_the_counts_say():
    # rows e (1 + 1 / G) / (d + e): 64 tokens for power 1, 2,080 for power 2, at d = e = 64 and G = 1
    assert bidirectional_crossover(HeadShape(64, 64, 1, (1,))) == 65
    assert bidirectional_crossover(HeadShape(64, 64, 1, (2,))) == 2081
    assert bidirectional_crossover(HeadShape(64, 64, 3, (2,))) == 1387


@pytest.mark.parametrize(
    "config, mixer, words",
    [
        (tiny_bert_config(), "2mamba", "causal: true in a BertForMaskedLM"),
        (tiny_config(), {"preset": "cottention", "causal": False}, "causal: false in a LlamaForCausalLM"),
        (tiny_bert_config(), {"preset": "taylor", "causal": False, "rope": "drop"}, "no rotary embedding"),
    ],
)
def test_a_mixer_of_the_other_direction_is_refused(config, mixer, words):
    with pytest.raises(ConfigError, match=words):
        plan_conversion(config, resolve_mixer(mixer))
    with pytest.raises(ConfigError, match=f"1.*{words}"):
        plan_conversion(config, resolve_mixer("softmax"), {"1": resolve_mixer(mixer)})


@pytest.mark.parametrize(
    "changes, words",
    [({"is_decoder": True}, "only the encoder"), ({"num_attention_heads": 5}, "not a multiple of its 5")],
)
def test_shapes_that_cannot_be_converted(changes, words):
    with pytest.raises(SourceError, match=words):
        plan_conversion(tiny_bert_config(**changes), COTTENTION)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    folder, _ = checkpoint(root / "teacher")
    teacher = load_teacher(str(folder))
    model = apply_plan(teacher.model, plan_conversion(teacher.info.hf_config, COTTENTION))
    with torch.no_grad():
        torch.save(model(tiny_bert_tokens(1)).prediction_logits, root / "expected.pt")
    return export_student(model, teacher.tokenizer, root / "student", CARD)


def test_the_export_keeps_the_tokenizer_and_says_how_to_load(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("w1 w2", "w3")
    assert ids["input_ids"] == [1, 6, 7, 2, 8, 2]
    assert ids["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    card = (exported / "README.md").read_text()
    assert "AutoModelForPreTraining.from_pretrained" in card
    assert "pipeline_tag: fill-mask" in card
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["SubquadBertForPreTraining"]


LOADED = """
import sys, torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
IMPORT
directory, again = sys.argv[1:]
ids = torch.randint(5, 97, (1, 23), generator=torch.Generator().manual_seed(3))
expected = torch.load(directory + "/../expected.pt")
model = AutoModelForMaskedLM.from_pretrained(directory, OPTION)
with torch.no_grad():
    assert torch.equal(model(ids).logits, expected), "logits differ"
classifier = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3, OPTION)
body = AutoModel.from_pretrained(directory, OPTION)
with torch.no_grad():
    assert torch.equal(classifier.bert(ids).pooler_output, body(ids).pooler_output)
model.save_pretrained(again)
copy = AutoModelForMaskedLM.from_pretrained(again, OPTION)
with torch.no_grad():
    assert torch.equal(copy(ids).logits, expected), "logits of the copy differ"
from subquad.convert.surgery import undo_plan
assert type(undo_plan(copy)).__name__ == "BertForMaskedLM"
"""


@pytest.mark.parametrize(
    "before, option",
    [("import subquad.models", ""), ("assert 'subquad' not in sys.modules", "trust_remote_code=True")],
    ids=["after import", "remote code"],
)
def test_a_fresh_process_loads_it(exported, before, option, tmp_path):
    script = LOADED.replace("IMPORT", before).replace("OPTION", option)
    run_fresh(script, str(exported), str(tmp_path / "again"), cache=tmp_path / "cache")
