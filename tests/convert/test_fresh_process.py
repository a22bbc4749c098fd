"""An exported student in a process that has not seen it: reloading, pipeline, lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from .tiny_checkpoints import tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]


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

# a classification head on the same body, saved and loaded again
from transformers import AutoModelForSequenceClassification
head = AutoModelForSequenceClassification.from_pretrained(directory, trust_remote_code=True, num_labels=3)
assert torch.equal(head.model.embed_tokens.weight, model.model.embed_tokens.weight)
head.save_pretrained(again + "-head")
copy = AutoModelForSequenceClassification.from_pretrained(again + "-head", trust_remote_code=True)
with torch.no_grad():
    assert torch.equal(copy(input_ids=tokens[None]).logits, head(input_ids=tokens[None]).logits), "heads differ"
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
