"""Exporting a student: what is written, that it is complete or not there, and loading it in a fresh process."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from subquad.convert.export import export_student, merge_adapters
from subquad.convert.modelcard import ModelCard, render_model_card, write_model_card
from subquad.convert.surgery import undo_plan
from subquad.errors import ConfigError, OutputError, TrainingError

from .tiny_checkpoints import logits, tiny_model, tiny_tokenizer
from .tiny_students import CARD, make_student

REPOSITORY = Path(__file__).parents[2]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def randomise_adapters(model) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)


def test_everything_is_written(exported):
    assert {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "configuration_subquad.py",
        "modeling_subquad.py",
        "README.md",
    } <= {path.name for path in exported.iterdir()}
    assert [path.name for path in exported.parent.iterdir() if path.name.startswith(".")] == []
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "subquad_llama"
    assert config["architectures"] == ["SubquadLlamaForCausalLM"]
    assert config["auto_map"] == {
        "AutoConfig": "configuration_subquad.SubquadLlamaConfig",
        "AutoModelForCausalLM": "modeling_subquad.SubquadLlamaForCausalLM",
        "AutoModelForSequenceClassification": "modeling_subquad.SubquadLlamaForSequenceClassification",
    }


def test_others_may_read_it_as_usual(tmp_path):
    mask = os.umask(0o027)
    try:
        directory = export_student(make_student(), tiny_tokenizer(), tmp_path / "s", CARD)
    finally:
        os.umask(mask)
    assert directory.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o640}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_stay_tied(tmp_path, tied):
    student = make_student(tie_word_embeddings=tied)
    directory = export_student(student, None, tmp_path / "s", CARD)
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118, not a dict
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert torch.equal(logits(loaded), logits(student))


def test_bfloat16_reloads_bit_equal_with_float32_mixers(tmp_path):
    student = make_student(torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(export_student(student, None, tmp_path / "s", CARD))
    dtypes = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".mixer." in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if ".mixer." not in name} == {torch.bfloat16}
    assert torch.equal(logits(loaded), logits(student))


def test_undo_after_reloading_gives_the_teacher(exported):
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert not torch.allclose(logits(loaded), logits(tiny_model()), atol=1e-2), "the student must differ"
    assert torch.equal(logits(undo_plan(loaded)), logits(tiny_model()))


@pytest.mark.parametrize("wrapped", [True, False])
def test_adapters_are_merged(tmp_path, wrapped):
    plain = make_student()
    config = LoraConfig(r=4, target_modules=PROJECTIONS, lora_dropout=0.5)
    model = get_peft_model(make_student(), config) if wrapped else inject_adapter_in_model(config, make_student())
    randomise_adapters(model)
    model.eval()
    adapted = logits(model)
    assert not torch.allclose(adapted, logits(plain), atol=1e-2), "the adapters must matter"
    model.train()  # as a trainer leaves it: dropout must not enter the comparison
    directory = export_student(model, None, tmp_path / "s", CARD)
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "lora" in name or "base_layer" in name]  # noqa: SIM118
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(directory)), adapted, rtol=1e-4, atol=1e-4)


def test_model_without_adapters_is_returned_as_it_is():
    student = make_student()
    assert merge_adapters(student) is student


def test_merge_that_changes_the_outputs_writes_nothing(tmp_path, monkeypatch):
    from peft.tuners.lora import Linear

    model = inject_adapter_in_model(LoraConfig(r=4, target_modules=PROJECTIONS), make_student())
    randomise_adapters(model)
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: torch.zeros_like(self.weight))
    with pytest.raises(OutputError, match="merging the adapters changed the logits"):
        export_student(model, None, tmp_path / "s", CARD)
    assert not (tmp_path / "s").exists()


def test_nan_is_not_exported(tmp_path):
    student = make_student()
    student.model.norm.weight.data[0] = float("nan")
    with pytest.raises(TrainingError, match=r"1 tensors hold NaN.*model\.norm\.weight"):
        export_student(student, None, tmp_path / "s", CARD)
    model = inject_adapter_in_model(LoraConfig(r=4, target_modules=PROJECTIONS), make_student())
    model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data.fill_(float("inf"))
    with pytest.raises(TrainingError, match=r"layers\.0\.self_attn\.q_proj cannot be merged"):
        export_student(model, None, tmp_path / "s", CARD)
    assert list(tmp_path.iterdir()) == []


def test_teacher_is_not_exported(tmp_path):
    with pytest.raises(ConfigError, match="LlamaForCausalLM; apply_plan first"):
        export_student(tiny_model(), None, tmp_path / "s", CARD)


def test_earlier_export_is_replaced(tmp_path):
    target = export_student(make_student(), tiny_tokenizer(), tmp_path / "s", CARD)
    (target / "left-over.txt").write_text("from the earlier export")
    second = make_student()
    second.model.norm.weight.data.mul_(2.0)
    export_student(second, tiny_tokenizer(), target, CARD)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target)), logits(second))
    assert not (target / "left-over.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_what_a_killed_export_left_is_removed_after_a_day(tmp_path):
    for name, age in ((".s.old.part", 25 * 3600), (".s.new.part", 60)):
        (tmp_path / name).mkdir()
        moment = time.time() - age
        os.utime(tmp_path / name, (moment, moment))
    export_student(make_student(), None, tmp_path / "s", CARD)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.new.part", "s"]


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_other_directories_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text('{"model_type": "llama"}')
    with pytest.raises(OutputError, match="not an earlier export, and is left as it is"):
        export_student(make_student(), None, tmp_path, CARD)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_file_in_the_way(tmp_path):
    (tmp_path / "s").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        export_student(make_student(), None, tmp_path / "s", CARD)
    with pytest.raises(OutputError, match="could not be written"):
        export_student(make_student(), None, tmp_path / "s" / "below", CARD)
    assert (tmp_path / "s").read_text() == "x"


@pytest.mark.parametrize("limit", [1_000, 50_000])
def test_full_disk_keeps_the_earlier_export(tmp_path, limit):
    student = make_student()
    target = export_student(student, tiny_tokenizer(), tmp_path / "s", CARD)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    changed = make_student()
    changed.model.norm.weight.data.mul_(2.0)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(OutputError, match=r"could not be written.*unchanged.*Free some space"):
            export_student(changed, tiny_tokenizer(), target, CARD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"], "no half-written directory is left"
    export_student(changed, tiny_tokenizer(), target, CARD)  # the same command works once there is space


def test_earlier_export_comes_back_if_the_last_step_fails(tmp_path, monkeypatch):
    target = export_student(make_student(), tiny_tokenizer(), tmp_path / "s", CARD)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    rename = Path.rename

    def fail_for_the_new_one(self, destination):
        if self.suffix == ".part":
            raise OSError("rename refused")
        return rename(self, destination)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OutputError, match="rename refused"):
        export_student(make_student(), tiny_tokenizer(), target, CARD)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_tensor_lost_while_saving_is_noticed(tmp_path, monkeypatch):
    student = make_student()
    save = type(student).save_pretrained

    def lossy(self, folder):
        state = {name: tensor for name, tensor in self.state_dict().items() if not name.endswith("log_mix")}
        save(self, folder, state_dict=state)

    monkeypatch.setattr(type(student), "save_pretrained", lossy)
    with pytest.raises(OutputError, match=r"does not hold the model's tensors.*log_mix"):
        export_student(student, None, tmp_path / "s", CARD)
    assert not (tmp_path / "s").exists()


def test_card_says_what_was_measured():
    text = render_model_card(CARD)
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["license"] == "apache-2.0"
    assert header["library_name"] == "transformers"
    assert "base_model" not in header, "smollm2-135m is not a hub id"
    assert "| Student | 3.2500 | 25.790 |" in text
    assert text.index("| 64 | 1,000 | 125 |") < text.index("| 1,024 | 1,000 | 2,000 |")
    assert "`subquad run demo`" in text
    assert "Measured on one CPU." in text


def test_card_leaves_out_what_is_not_known():
    text = render_model_card(ModelCard(name="x", teacher="owner/name", mixers={"2mamba": 2}))
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == "owner/name"
    for heading in ("Held-out loss", "Memory", "How it was made", "Notes"):
        assert heading not in text


def test_card_can_be_replaced_after_evaluation(exported):
    before = (exported / "README.md").read_text()
    write_model_card(exported, ModelCard(name="renamed", teacher="t", mixers={"taylor": 1}))
    assert "# renamed" in (exported / "README.md").read_text()
    write_model_card(exported, CARD)
    assert (exported / "README.md").read_text() == before
    with pytest.raises(OutputError, match="could not be written"):
        write_model_card(exported / "README.md", CARD)
