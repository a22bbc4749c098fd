"""Fine-tuned GLUE: it learns, nothing leaks between contestants, and every one gets the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from subquad.convert.adapters import adapted_layers
from subquad.eval.contestants import Contestant
from subquad.eval.finetune import (
    build_classifier,
    compare_finetuned,
    contestant_mode,
)
from subquad.eval.glue_data import load_glue
from subquad.eval.records import load_records
from subquad.layers import SubquadAttention
from tests.eval.finetune.runs import run, settings
from tests.eval.toy_glue import contestants, toy_model, toy_rows, toy_tokenizer, write_pairs, write_sst2

MODES = ("teacher", "window_only", "student")


# What is measured


@pytest.mark.parametrize("method, rate", [("lora", 2e-2), ("full", 1e-2)])
def test_every_mode_learns_the_rule(method, rate, tmp_path):
    data = write_sst2(tmp_path / "data", num_train=320)
    chosen = settings(data, method=method, learning_rate=rate, max_steps=60)
    records = run(contestants(*MODES), chosen, tmp_path)
    assert [(record.task, record.model) for record in records] == [("glue-finetune-sst2", mode) for mode in MODES]
    for record in records:
        assert record.metrics["acc"].value > 0.9
        assert 0 <= (record.metrics["acc"].standard_error or 0) < 0.05
        assert (record.metrics["acc"].standard_error is None) == (record.metrics["acc"].value == 1)
        assert record.metrics["acc"].num == 64
        assert record.baselines == {"acc": 0.5}
        losses = [loss for _, loss in record.details["seeds"][0]["curve"]]
        assert losses[-1] < 0.2 < losses[0]
        assert "the standard errors are of the choice of rows only" in " ".join(record.notes)


def test_shuffled_labels_teach_nothing(tmp_path):
    data = write_sst2(tmp_path / "data", num_train=320, shuffled=True)
    (record,) = run(contestants("student"), settings(data, learning_rate=2e-2, max_steps=60), tmp_path)
    # three binomial standard errors
    assert abs(record.metrics["acc"].value - 0.5) < 0.19


def test_a_record_holds_what_repeats_it(tmp_path):
    data = write_sst2(tmp_path / "data")
    (record,) = run(contestants("student"), settings(data, seeds=(1, 2), eval_limit=20, train_limit=32), tmp_path)
    assert load_records(tmp_path) == [record]
    assert record.settings["data_dir"] == str(data)
    assert "tasks" not in record.settings
    assert record.settings["seeds"] == [1, 2]
    assert record.details["train_rows"] == 32
    assert record.details["labels"] == "".join(
        str(label) for label in load_glue("sst2", "validation", data)["label"][:20]
    )
    assert record.metrics["acc"].num == 20
    assert "The first 20 of 64 validation rows." in record.notes
    first, second = record.details["seeds"]
    assert first["train_hash"] != second["train_hash"]
    values = [seed["metrics"]["acc"] for seed in (first, second)]
    assert record.metrics["acc"].value == pytest.approx(sum(values) / 2)
    assert record.details["errors"]["acc"]["seeds"] == pytest.approx(abs(values[0] - values[1]) / 2)
    assert record.provenance.command == "subquad eval"
    assert record.provenance.wall_seconds > 0
    assert len(record.provenance.prompts_hash) == 64


def test_both_halves_of_mnli_come_from_one_training(tmp_path):
    labels = ["entailment", "neutral", "contradiction"]
    columns = "sentence1\tsentence2\tgold_label"
    files = ("train", "dev_matched", "dev_mismatched")
    data = write_pairs(tmp_path / "data", "MNLI", labels, columns, files)
    steps = []
    records = run(contestants("student"), settings(data, tasks=("mnli",)), tmp_path, lambda *done: steps.append(done))
    assert [record.task for record in records] == ["glue-finetune-mnli", "glue-finetune-mnli_mismatch"]
    assert [set(record.metrics) for record in records] == [{"acc"}, {"acc"}]
    assert steps == [(1, 3), (2, 3), (3, 3), (3, 3)]


def test_paraphrases_have_accuracy_and_f1_and_acceptability_a_correlation(tmp_path):
    data = write_pairs(tmp_path / "data", "MRPC", ["0", "1"], "#1 String\t#2 String\tQuality", ("train", "dev"))
    (data / "CoLA").mkdir()
    for name in ("train", "dev"):
        lines = [f"x\t{label}\t\t{text}\n" for text, label in toy_rows(12, 5)]
        (data / "CoLA" / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    mrpc, cola = run(contestants("student"), settings(data, tasks=("mrpc", "cola")), tmp_path)
    assert set(mrpc.metrics) == {"acc", "f1"}
    assert mrpc.baselines == {"acc": 0.5, "f1": pytest.approx(2 / 3)}
    assert set(cola.metrics) == {"mcc"}
    assert cola.baselines == {"mcc": 0.0}
    assert cola.metrics["mcc"].standard_error is not None


def test_a_constant_answer_is_said_to_be_one(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    path = data / "SST-2" / "train.tsv"
    path.write_text(path.read_text().replace("\t0", "\t1"))
    (record,) = run(contestants("student"), settings(data, max_steps=6), tmp_path)
    assert record.details["seeds"][0]["predictions"] == "1" * 8
    assert "Seed 0: every row got the same answer" in " ".join(record.notes)


# The same for everyone


def test_contestants_get_the_same_start_rows_and_order(tmp_path):
    data = write_sst2(tmp_path / "data")
    chosen = settings(data, max_steps=6, train_limit=40, batch_size=8)
    # a window over the whole row is the teacher's attention, so all else being equal the curves are the teacher's
    teacher, student = run(contestants("teacher", "student", model=toy_model(window=64)), chosen, tmp_path)
    curves = [[loss for _, loss in record.details["seeds"][0]["curve"]] for record in (teacher, student)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert teacher.details["seeds"][0]["train_hash"] == student.details["seeds"][0]["train_hash"]
    assert teacher.details["trained_parameters"] == student.details["trained_parameters"]
    assert teacher.provenance.prompts_hash == student.provenance.prompts_hash
    gap = compare_finetuned(student, teacher)["acc"]
    assert abs(gap.value) <= 2 / 64


def test_full_training_counts_only_what_is_read(tmp_path):
    data = write_sst2(tmp_path / "data")
    model = toy_model()
    teacher, student = run(contestants("teacher", "student", model=model), settings(data, method="full"), tmp_path)
    new = sum(p.numel() for name, p in model.named_parameters() if ".mixer." in name)
    body = sum(p.numel() for name, p in model.model.named_parameters() if ".mixer." not in name)
    assert teacher.details["trained_parameters"] == body + 2 * 36
    assert student.details["trained_parameters"] == body + 2 * 36 + new


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_mode_holds_in_every_forward_of_training_and_evaluation(checkpointing, tmp_path, monkeypatch):
    seen = []
    forward = SubquadAttention.forward

    def spy(self, *args, **kwargs):
        seen.append((self.mode, self.training))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(SubquadAttention, "forward", spy)
    data = write_sst2(tmp_path / "data", num_dev=8)
    chosen = settings(data, gradient_checkpointing=checkpointing)
    run(contestants("window_only"), chosen, tmp_path)
    assert {mode for mode, _ in seen} == {"window_only"}
    # two layers, three steps, twice where the backward pass recomputes; one batch of evaluation
    assert [training for _, training in seen].count(True) == 2 * 3 * (2 if checkpointing else 1)
    assert [training for _, training in seen].count(False) == 2


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_changes_nothing(mode, tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    (stored,) = run(contestants(mode), settings(data), tmp_path / "stored")
    (recomputed,) = run(contestants(mode), settings(data, gradient_checkpointing=True), tmp_path / "recomputed")
    losses = [[loss for _, loss in record.details["seeds"][0]["curve"]] for record in (stored, recomputed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_far_part_and_window_matter(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    records = run(contestants(*MODES), settings(data), tmp_path)
    first = [record.details["seeds"][0]["curve"][0][1] for record in records]
    assert len({round(loss, 5) for loss in first}) == 3


@torch.no_grad()
@pytest.mark.parametrize("mode", ["teacher", "student"])
def test_logits_do_not_depend_on_batch_or_padding(mode):
    (contestant,) = contestants(mode)
    model = build_classifier(contestant, settings(Path()), num_labels=2, pad_token_id=0, seed=3).eval()
    texts = [text for text, _ in toy_rows(8, 9)]
    tokenizer = toy_tokenizer()
    with contestant_mode(model, contestant):
        alone = torch.cat([model(**_tokens(tokenizer, [text])).logits for text in texts])
        for side in ("right", "left"):
            tokenizer.padding_side = side
            assert (model(**_tokens(tokenizer, texts)).logits - alone).abs().max() < 1e-4 * alone.abs().max()


def _tokens(tokenizer, texts):
    return {k: v for k, v in tokenizer(texts, padding=True, return_tensors="pt").items() if k != "token_type_ids"}


def test_the_batch_of_evaluation_changes_no_answer(tmp_path):
    data = write_sst2(tmp_path / "data")
    answers = []
    for size in (1, 8):
        (record,) = run(contestants("student"), settings(data, eval_batch_size=size), tmp_path / str(size))
        answers.append(record.details["seeds"][0]["predictions"])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 2


# Nothing leaks


@pytest.mark.parametrize("method", ["lora", "full"])
def test_shared_weights_are_left_exactly_as_they_were(method, tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    model = toy_model().train()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    flags = [parameter.requires_grad for parameter in model.parameters()]
    config = model.config.to_dict()
    models = contestants(*MODES, model=model)
    tokenizer = models[0].tokenizer
    tokenizer.padding_side = "left"
    run(models, settings(data, method=method), tmp_path)
    after = model.state_dict()
    assert list(before) == list(after)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not adapted_layers(model)
    assert model.config.to_dict() == config
    assert tokenizer.padding_side == "left"
    assert model.training
    assert {module.mode for module in model.modules() if isinstance(module, SubquadAttention)} == {"student"}


def test_a_contestant_scores_the_same_alone_and_after_others(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    *_, last = run(contestants(*MODES), settings(data), tmp_path / "all")
    (alone,) = run(contestants("student"), settings(data), tmp_path / "one")
    assert last.details["seeds"][0]["curve"] == alone.details["seeds"][0]["curve"]


@torch.no_grad()
def test_adapters_of_the_distillation_belong_to_the_student_only():
    plain = toy_model(window=64)
    model = copy.deepcopy(plain)
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False), model)
    tokens = torch.tensor([[5, 9, 30, 44, 7]])
    hidden = {}
    for mode in ("teacher", "window_only", "student", "student_without_far"):
        contestant = Contestant(mode, "toy", model, toy_tokenizer(), mode)
        classifier = build_classifier(contestant, settings(Path()), num_labels=2, pad_token_id=0, seed=0).eval()
        with contestant_mode(classifier, contestant):
            hidden[mode] = classifier.model(tokens).last_hidden_state
        with contestant.active():
            expected = model.model(tokens).last_hidden_state
        assert torch.allclose(hidden[mode], expected, atol=1e-4), mode
    assert not torch.allclose(hidden["teacher"], hidden["student"], atol=1e-2)
    assert len(adapted_layers(model)) == 4


def test_adapters_in_training_learn_in_teacher_mode_too():
    (contestant,) = contestants("teacher")
    model = build_classifier(contestant, settings(Path()), num_labels=2, pad_token_id=0, seed=0)
    with contestant_mode(model, contestant):
        model(input_ids=torch.tensor([[5, 9, 30]]), labels=torch.tensor([1])).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in grads.values())
    assert {name.rpartition("lora_")[2][:1] for name in grads if "lora_" in name} == {"A", "B"}
    assert any(grad.abs().max() > 0 for name, grad in grads.items() if "lora_B" in name)


def test_trained_weights_are_float32_whatever_the_contestants(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    for method in ("lora", "full"):
        model = toy_model().to(torch.bfloat16)
        models = contestants("student", model=model)
        chosen = settings(data, method=method)
        classifier = build_classifier(models[0], chosen, num_labels=2, pad_token_id=0, seed=0)
        assert {p.dtype for p in classifier.parameters() if p.requires_grad} == {torch.float32}
        (record,) = run(models, chosen, tmp_path / method)
        assert record.provenance.dtype == "bfloat16"
