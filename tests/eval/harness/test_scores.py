"""lm-eval on teacher, control and student: scores that nothing but the model changes, and records to repeat them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra eval: pip install 'subquad[eval]'")
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from subquad.errors import ConfigError
from subquad.eval.contestants import Contestant
from subquad.eval.harness import LmEvalSettings, export_tasks, paired_difference, run_lm_eval
from subquad.eval.records import load_records

from .lm_eval_models import (
    MODES,
    SENTENCES,
    byte_teacher,
    byte_tokenizer,
    contestants,
    converted,
    log_likelihoods,
    samples,
)
from .runs import measure, write_yaml

SHARED = Path(__file__).parents[4] / "shared" / "data"
PROMPT = "{}\nQuestion: Is this sentence positive or negative?\nAnswer:"
TEXT = "One day a fox met a very old crow.\nThey spoke.<|endoftext|>\n<|endoftext|>It rained, and the fox went home é."


def own_log_likelihood(model, tokens: list[int], num_scored: int) -> float:
    """Log-likelihood of the last tokens, from one forward pass of one sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
    picked = logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    return float(picked[-num_scored:].sum())


@pytest.mark.parametrize("batch_size", [1, 8])
def test_log_likelihoods_are_the_models_own(models, tiny, glue, tmp_path, batch_size):
    measure(models, tmp_path, tasks=("sst2",), data_dirs=(glue,), batch_size=batch_size)
    tokenizer = byte_tokenizer()
    found = {}
    for contestant in models:
        expected = []
        with contestant.active():
            for sentence, _ in SENTENCES:
                for choice in (" negative", " positive"):
                    tokens = tokenizer(PROMPT.format(sentence) + choice)["input_ids"]
                    expected.append(own_log_likelihood(tiny, tokens, len(tokenizer(choice)["input_ids"])))
        found[contestant.name] = log_likelihoods(tmp_path, "sst2", contestant.name)
        assert found[contestant.name] == pytest.approx(expected, abs=1e-4)
    # the three models differ, so that a mode that is not switched would show
    for other in ("teacher", "student"):
        assert max(abs(a - b) for a, b in zip(found[other], found["window_only"], strict=True)) > 0.2


def test_perplexity_follows_lm_evals_definition_whatever_the_batch(models, tiny, tmp_path):
    path = tmp_path / "tale.txt"
    path.write_text(TEXT, encoding="utf-8")
    documents = [part for part in TEXT.split("<|endoftext|>") if part.strip()]
    tokenizer, length = byte_tokenizer(), 16
    records = {}
    for batch_size in (1, 8):
        folder = tmp_path / str(batch_size)
        records[batch_size] = measure(
            models, folder, tasks=(), text_files=(path,), batch_size=batch_size, max_length=length
        )
    for index, contestant in enumerate(models):
        likelihood = []
        with contestant.active():
            for document in documents:
                tokens = [tokenizer.bos_token_id, *tokenizer(document)["input_ids"]]
                # disjoint windows, each after one token of context; the last is filled up with context on its left
                ends = [min(start + length, len(tokens) - 1) for start in range(0, len(tokens) - 1, length)]
                total = 0.0
                for number, end in enumerate(ends):
                    num_scored = end - number * length
                    total += own_log_likelihood(tiny, tokens[max(0, end - length) : end + 1], num_scored)
                likelihood.append(total)
        num_bytes = sum(len(document.encode()) for document in documents)
        num_words = sum(len(document.split()) for document in documents)
        for batch_size in (1, 8):
            metrics = records[batch_size][index].metrics
            assert metrics["bits_per_byte"].value == pytest.approx(-sum(likelihood) / num_bytes / math.log(2), rel=1e-5)
            assert metrics["byte_perplexity"].value == pytest.approx(math.exp(-sum(likelihood) / num_bytes), rel=1e-5)
            assert math.log(metrics["word_perplexity"].value) == pytest.approx(-sum(likelihood) / num_words, rel=1e-2)
            assert not metrics["word_perplexity"].higher_is_better
            assert metrics["bits_per_byte"].standard_error > 0
            assert metrics["bits_per_byte"].num == 2


def test_generation_does_not_depend_on_the_batch(models, tmp_path, small_index):
    prompts = [{"text": text} for text, _ in SENTENCES]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    write_yaml(
        tmp_path / "tasks",
        "echo",
        task="echo",
        dataset_path="json",
        dataset_kwargs={
            "data_files": {"test": str(tmp_path / "prompts.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        test_split="test",
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="nothing",
        generation_kwargs={"until": ["\n\n"], "do_sample": False, "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        metadata={"version": 1.0},
    )
    answers = {}
    for batch_size in (1, 8):
        folder = tmp_path / str(batch_size)
        measure(models, folder, tasks=("echo",), include_path=tmp_path / "tasks", batch_size=batch_size)
        answers[batch_size] = {mode: [s["resps"] for s in samples(folder, "echo", mode)] for mode in MODES}
    assert answers[1] == answers[8]
    assert len({json.dumps(answer) for answer in answers[1].values()}) == 3


@pytest.mark.skipif(not (SHARED / "glue").is_dir(), reason="needs the data and checkpoints beside the checkout")
def test_real_examples_score_the_same_in_any_batch(tmp_path):
    source = SHARED / "checkpoints" / "stories260K_hf"
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = converted(AutoModelForCausalLM.from_pretrained(source), window=16)
    models = contestants(model, tokenizer)
    for batch_size in (1, 8):
        measure(
            models,
            tmp_path / str(batch_size),
            tasks=("sst2", "rte"),
            data_dirs=(SHARED / "glue",),
            limit=5,
            batch_size=batch_size,
        )
    for task in ("sst2", "rte"):
        for mode in MODES:
            one, eight = (log_likelihoods(tmp_path / str(batch_size), task, mode) for batch_size in (1, 8))
            assert one == pytest.approx(eight, abs=1e-4)
    assert tokenizer.pad_token is None  # lm-eval needs one, and must not leave it behind


def test_plain_lm_eval_gives_the_same_numbers(glue, tmp_path):
    tokenizer, teacher = byte_tokenizer(), byte_teacher()
    teacher.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    plain = [Contestant("teacher", str(tmp_path / "model"), teacher, tokenizer)]
    settings = {"tasks": ("sst2",), "data_dirs": (glue,), "num_fewshot": 2, "seed": 7}
    (record,) = measure(plain, tmp_path / "own", **settings)
    (definition,) = export_tasks(["sst2"], [glue], tmp_path / "tasks", train=True)
    results = simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'model'},dtype=float32",
        tasks=["sst2"],
        num_fewshot=2,
        batch_size=3,
        device="cpu",
        fewshot_random_seed=7,
        task_manager=TaskManager(include_defaults=False, include_path=str(definition.parent)),
    )
    assert record.metrics["acc"].value == results["results"]["sst2"]["acc,none"]
    assert record.metrics["acc"].standard_error == results["results"]["sst2"]["acc_stderr,none"]
    theirs = [answer[0] for sample in results["samples"]["sst2"] for (answer,) in sample["resps"]]
    assert log_likelihoods(tmp_path / "own", "sst2", "teacher") == pytest.approx(theirs, abs=1e-4)


def test_record_says_what_was_measured(models, glue, tmp_path):
    calls = []
    settings = LmEvalSettings(tasks=("sst2",), data_dirs=(glue,), limit=7)
    records = run_lm_eval(
        models, settings, tmp_path, command="subquad eval x", progress=lambda *done: calls.append(done)
    )
    assert [(record.task, record.model) for record in records] == [("sst2", mode) for mode in MODES]
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert load_records(tmp_path) == sorted(records, key=lambda record: record.model)
    record = records[0]
    answers = samples(tmp_path, "sst2", "teacher")
    accuracy = sum(sample["acc"] for sample in answers) / 7
    assert record.metrics["acc"].value == accuracy
    assert record.metrics["acc"].standard_error == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 6))
    assert record.metrics["acc"].num == 7
    assert record.baselines == {"acc": pytest.approx(4 / 7)}
    assert record.settings["data"]["files"]["validation"].keys() == {"SST-2/dev.tsv"}
    assert record.settings["max_length"] == 512
    assert (record.settings["limit"], record.settings["mode"]) == (7, "teacher")
    assert sum(record.details["predictions"]) == 7
    assert record.details["log_likelihood_sum"] == pytest.approx(sum(log_likelihoods(tmp_path, "sst2", "teacher")))
    assert record.provenance.command == "subquad eval x"
    assert len({other.provenance.prompts_hash for other in records}) == 1


def test_lm_evals_own_files_lie_beside_the_records(models, glue, tmp_path):
    measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(glue,))
    (path,) = (tmp_path / "evals" / "lm-eval" / "teacher").glob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert {
        "results",
        "configs",
        "versions",
        "n-shot",
        "higher_is_better",
        "n-samples",
        "config",
        "task_hashes",
    } <= set(results)
    numbers = results["results"]["sst2"]
    assert numbers["acc_stderr,none"] == pytest.approx(math.sqrt(numbers["acc,none"] * (1 - numbers["acc,none"]) / 8))
    assert results["configs"]["sst2"]["doc_to_text"] == PROMPT.format("{{sentence}}")
    assert results["model_name"] == "teacher"
    answers = samples(tmp_path, "sst2", "teacher")
    assert len(answers) == len(SENTENCES)
    assert answers[0]["arguments"]["gen_args_0"]["arg_0"] == PROMPT.format(SENTENCES[0][0])


def test_two_models_are_compared_on_the_same_documents(models, glue, tmp_path):
    path = tmp_path / "tale.txt"
    path.write_text(TEXT, encoding="utf-8")
    settings = {"tasks": ("sst2",), "text_files": (path,), "data_dirs": (glue,)}
    records = {(record.task, record.model): record for record in measure(models, tmp_path, **settings)}
    for task, metric in (("sst2", "acc"), ("text-tale.txt", "bits_per_byte"), ("text-tale.txt", "word_perplexity")):
        first, second = records[task, "student"], records[task, "teacher"]
        found = paired_difference(tmp_path, first, second, metric)
        expected = first.metrics[metric].value - second.metrics[metric].value
        assert found.difference == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert found.num == first.metrics[metric].num
        assert paired_difference(tmp_path, first, first, metric)[:2] == (0.0, 0.0)
    scores = [[sample["acc"] for sample in samples(tmp_path, "sst2", mode)] for mode in ("student", "teacher")]
    differences = [a - b for a, b in zip(*scores, strict=True)]
    mean = sum(differences) / len(differences)
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences)) / len(differences)
    found = paired_difference(tmp_path, records["sst2", "student"], records["sst2", "teacher"], "acc")
    assert found.standard_error == pytest.approx(spread, rel=0.1, abs=1e-12)
    with pytest.raises(ConfigError, match="has no mcc by document"):
        paired_difference(tmp_path, records["sst2", "student"], records["sst2", "teacher"], "mcc")
    (fewer,) = measure(models[:1], tmp_path, **(settings | {"text_files": (), "limit": 3}))
    with pytest.raises(ConfigError, match="did not answer the same documents"):
        paired_difference(tmp_path, records["sst2", "student"], fewer, "acc")
