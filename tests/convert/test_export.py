"""Exporting a student: what is written, that it is complete or not there, and loading it in a fresh process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from subquad.convert.export import export_student, merge_adapters
from subquad.convert.modelcard import ModelCard, render_model_card, write_model_card
from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan, undo_plan
from subquad.errors import ConfigError, OutputError, TrainingError
from subquad.layers import resolve_mixer

from .tiny_checkpoints import logits, tiny_model, tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
CARD = ModelCard(
    name="tiny-2mamba",
    teacher="smollm2-135m",
    mixers={"2mamba": 1, "taylor": 1},
    losses={"Teacher (softmax)": 3.0, "Student": 3.25},
    loss_data="held-out messages, 4,096 tokens",
    cache_bytes={1024: (1000, 2000), 64: (1000, 125)},
    training_tokens={"stage 1": 20_000},
    license="apache-2.0",
    command="subquad run demo",
    versions={"torch": "2.13.0"},
    notes=("Measured on one CPU.",),
)


def make_student(dtype: torch.dtype = torch.float32, **changes):
    model = tiny_model(**changes)
    for parameter in model.parameters():  # not .to(dtype), which would round the rotary frequencies, too
        parameter.data = parameter.data.to(dtype)
    layers = {"1": resolve_mixer({"preset": "taylor", "window": 4, "sinks": 1})}
    plan = plan_conversion(model.config, resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2}), layers)
    student = apply_plan(model, plan).eval()
    torch.manual_seed(1)
    with torch.no_grad():  # away from the start, where parts that are lost would not be missed
        for name, parameter in student.named_parameters():
            if ".mixer." in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("log_mix"):
                parameter.zero_()
    return student


def randomise_adapters(model) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    student = make_student()
    directory = export_student(student, tiny_tokenizer(), tmp_path_factory.mktemp("export") / "student", CARD)
    torch.save(logits(student), directory.parent / "expected.pt")
    return directory


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


def run_fresh(script: str, *arguments: str, cache: Path, path: str = str(REPOSITORY)) -> str:
    """Run a script in a process that knows nothing of this one; returns what it printed."""
    cache.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HOME": str(cache / "hf"),
        "HF_MODULES_CACHE": str(cache / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cache, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


AFTER_IMPORT = """
import sys, torch
import subquad.models
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from subquad.convert.surgery import undo_plan
directory = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(directory)
tokens = (torch.arange(40) * 7 + 3) % 261
with torch.no_grad():
    found = model(input_ids=tokens[None]).logits
assert torch.equal(found, torch.load(directory + "/../expected.pt")), "logits differ"
assert type(undo_plan(model)) is LlamaForCausalLM
"""

WITH_REMOTE_CODE = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
assert not [name for name in sys.modules if name.startswith("subquad")]
directory, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
tokens = (torch.arange(40) * 7 + 3) % 261
expected = torch.load(directory + "/../expected.pt")
with torch.no_grad():
    found = model(input_ids=tokens[None]).logits
assert torch.equal(found, expected), "logits differ"

# step by step with the cache = without it, from a prompt longer than both windows
prompt = tokens[None, :20]
cached = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)
plain = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=False)
assert cached.shape == (1, 32) and torch.equal(cached, plain), (cached, plain)

generator = pipeline("text-generation", model=directory, tokenizer=directory, trust_remote_code=True)
text = generator("a long prompt, longer than the window", max_new_tokens=5, do_sample=False)[0]["generated_text"]
assert text.startswith("a long prompt"), text

# saving what was loaded by remote code gives a checkpoint that loads by remote code
model.save_pretrained(again)
copy = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
with torch.no_grad():
    assert torch.equal(copy(input_ids=tokens[None]).logits, expected), "logits of the copy differ"
"""

WITHOUT_SUBQUAD_THEN_WITH_IT = """
import sys, torch
from transformers import AutoModelForCausalLM
sys.modules["subquad"] = None  # as if it were not installed
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
del sys.modules["subquad"]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = (torch.arange(40) * 7 + 3) % 261
with torch.no_grad():
    assert torch.equal(model(input_ids=tokens[None]).logits, torch.load(sys.argv[2])), "logits differ"
"""

LM_EVAL = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
directory, data = sys.argv[1:]
task = {
    "task": "tiny", "dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": data}},
    "validation_split": "validation", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}],
}
results = lm_eval.simple_evaluate(
    model="hf", model_args=f"pretrained={directory},trust_remote_code=True,max_length=64", tasks=[task], device="cpu",
    batch_size=4, task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True,
)
scores = [[answer[0][0] for answer in sample["resps"]] for sample in results["samples"]["tiny"]]
print(json.dumps({"acc": results["results"]["tiny"]["acc,none"], "scores": scores}))
"""


def test_fresh_process_after_importing_subquad(exported, tmp_path):
    run_fresh(AFTER_IMPORT, str(exported), cache=tmp_path)


def test_fresh_process_with_remote_code(exported, tmp_path):
    again = tmp_path / "again"
    run_fresh(WITH_REMOTE_CODE, str(exported), str(again), cache=tmp_path)
    expected = exported.parent / "expected.pt"
    printed = run_fresh(WITHOUT_SUBQUAD_THEN_WITH_IT, str(again), str(expected), cache=tmp_path / "other")
    assert "pip install subquad" in printed


@pytest.mark.slow
def test_lm_eval(exported, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")
    rows = [{"question": f"{i} plus one is", "choices": ["ab", "cd ef"], "label": i % 2} for i in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    output = json.loads(run_fresh(LM_EVAL, str(exported), str(data), cache=tmp_path).splitlines()[-1])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), tiny_tokenizer()
    for row, scores in zip(rows, output["scores"], strict=True):
        for choice, score in zip(row["choices"], scores, strict=True):
            assert score == pytest.approx(_log_likelihood(model, tokenizer, row["question"], f" {choice}"), abs=1e-3)


def _log_likelihood(model: LlamaForCausalLM, tokenizer, context: str, continuation: str) -> float:
    ids = torch.tensor(tokenizer(context + continuation)["input_ids"])
    length = len(ids) - len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[1:, None])[-length:].sum().item()
