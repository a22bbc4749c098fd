"""Fine-tuned GLUE on a converted BERT and its teacher: it learns, segments and pooler are BERT's own."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertForMaskedLM, BertForPreTraining

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.errors import ConfigError
from subquad.eval.contestants import Contestant
from subquad.eval.finetune import FinetuneSettings, LoraSettings, build_classifier, run_glue_finetune
from subquad.eval.finetune.training import encode, padding_tokenizer, reads_segments
from subquad.eval.glue_data import GLUE_TASKS, load_glue
from subquad.layers import converted_layers, resolve_mixer
from subquad.models import SubquadBertForSequenceClassification
from tests.eval.toy_glue import FILLERS, SIGNALS, write_pairs, write_sst2
from tests.tiny_bert import tiny_bert, word_tokenizer

TOKENIZER = word_tokenizer(FILLERS + SIGNALS)


def student(kind=BertForPreTraining, preset="cottention"):
    teacher = tiny_bert(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer({"preset": preset, "causal": False})))


def contestants(*modes, model=None):
    model = model or student()
    return [Contestant(mode, "toy", model, TOKENIZER, mode) for mode in modes]


def settings(data_dir, **changes):
    values = {"tasks": ("sst2",), "data_dir": data_dir, "method": "full", "max_length": 40, "max_steps": 3}
    return FinetuneSettings(**(values | changes))


def build(contestant, chosen, seed=0):
    return build_classifier(contestant, chosen, num_labels=2, pad_token_id=0, seed=seed)


def test_teacher_and_student_learn_the_rule(tmp_path):
    data = write_sst2(tmp_path / "data", num_train=320)
    chosen = settings(data, learning_rate=5e-3, max_steps=60)
    records = run_glue_finetune(contestants("teacher", "student"), chosen, tmp_path, command="subquad eval")
    for record in records:
        assert record.metrics["acc"].value > 0.9, record.model
        losses = [loss for _, loss in record.details["seeds"][0]["curve"]]
        assert losses[-1] < 0.3 < losses[0]
    teacher, student_record = (record.details["seeds"][0] for record in records)
    assert teacher["train_hash"] == student_record["train_hash"]
    assert teacher["curve"] != student_record["curve"]


def test_the_pretrained_pooler_is_kept_and_a_missing_one_is_drawn(tmp_path):
    chosen = settings(tmp_path)
    with_pooler = contestants("student")[0]
    model = build(with_pooler, chosen)
    assert type(model) is SubquadBertForSequenceClassification
    assert torch.equal(model.bert.pooler.dense.weight, with_pooler.model.bert.pooler.dense.weight)
    without = contestants("student", model=student(BertForMaskedLM))[0]
    first, again, other = (build(without, chosen, seed) for seed in (0, 0, 1))
    assert torch.equal(first.bert.pooler.dense.weight, again.bert.pooler.dense.weight)
    assert not torch.equal(first.bert.pooler.dense.weight, other.bert.pooler.dense.weight)
    assert not torch.equal(first.bert.pooler.dense.weight[:2], first.classifier.weight)
    assert without.model.bert.pooler is None
    assert first.classifier.bias.abs().max() == 0
    ids = torch.tensor([[1, 7, 9, 2]])
    first.eval()(ids).logits.sum().backward()
    assert {name for name, p in first.named_parameters() if p.grad is None} == set()


def test_lora_trains_adapters_head_and_pooler(tmp_path):
    lora = LoraSettings(target_modules=("query", "value"))
    model = build(contestants("student")[0], settings(tmp_path, method="lora", lora=lora))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "classifier.weight",
        "classifier.bias",
    }
    assert len(trained) == 4 + 2 * 2 * 2
    with pytest.raises(ConfigError, match=r"q_proj.*match no linear layer; the model has.*query"):
        build(contestants("student")[0], settings(tmp_path, method="lora"))


def test_pairs_carry_their_segments(tmp_path):
    data = write_pairs(tmp_path / "data", "MRPC", ["0", "1"], "#1 String\t#2 String\tQuality", ("train", "dev"))
    chosen = settings(data, tasks=("mrpc",), separator="", max_length=12)
    tokenizer = padding_tokenizer(TOKENIZER, 0, segments=reads_segments(student()))
    rows = encode(tokenizer, load_glue("mrpc", "validation", data), GLUE_TASKS["mrpc"].texts, chosen).rows
    for ids, segments in zip(rows["input_ids"], rows["token_type_ids"], strict=True):
        first = ids.index(TOKENIZER.sep_token_id) + 1
        assert ids[0] == TOKENIZER.cls_token_id
        assert segments == [0] * first + [1] * (len(ids) - first)
        assert len(ids) <= 12
    plain = padding_tokenizer(TOKENIZER, 0)
    assert (
        "token_type_ids"
        not in encode(plain, load_glue("mrpc", "validation", data), ("sentence1",), chosen).rows.column_names
    )
    (record,) = run_glue_finetune(contestants("student"), chosen, tmp_path, command="subquad eval")
    assert set(record.metrics) == {"acc", "f1"}


def test_the_contestant_is_left_as_it_is(tmp_path):
    data = write_sst2(tmp_path / "data")
    (contestant,) = contestants("student")
    before = copy.deepcopy(contestant.model.state_dict())
    run_glue_finetune([contestant], settings(data, learning_rate=1e-2), tmp_path, command="subquad eval")
    assert all(torch.equal(tensor, before[name]) for name, tensor in contestant.model.state_dict().items())
    assert len(converted_layers(contestant.model)) == 2
