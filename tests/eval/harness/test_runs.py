"""lm-eval on teacher, control and student: what is not measured again, what is noted, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil

import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval: pip install 'subquad[eval]'")

from subquad.errors import ConfigError, DataError, OutputError
from subquad.eval.harness import LmEvalSettings, export_tasks, run
from subquad.eval.records import load_record, load_records, record_path

from .lm_eval_models import (
    SENTENCES,
    samples,
    write_sst2,
)
from .runs import measure, write_yaml


def test_finished_tasks_are_not_measured_again(models, glue, tmp_path, monkeypatch):
    first = measure(models, tmp_path, tasks=("sst2",), data_dirs=(glue,))
    evaluate, calls = run._evaluate, []

    def counted(*arguments):
        calls.append(arguments)
        return evaluate(*arguments)

    monkeypatch.setattr(run, "_evaluate", counted)
    assert measure(models, tmp_path, tasks=("sst2",), data_dirs=(glue,)) == first
    assert calls == []
    measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=3)
    assert len(calls) == 1


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_is_silent_and_the_screen_is_back_afterwards(models, glue, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=2)
    os.write(2, b"still heard\n")
    heard = capfd.readouterr().err
    assert "not a git repository" not in heard
    assert "still heard" in heard


def test_a_length_beyond_the_context_is_noted_and_used(models, glue, tmp_path):
    (record,) = measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=2, max_length=4096)
    assert record.settings["max_length"] == 4096
    assert any("max_length is 4,096, beyond the context of 512 tokens" in note for note in record.notes)
    (record,) = measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=2, max_length=512)
    assert not any("beyond the context" in note for note in record.notes)


def test_what_was_done_before_an_interruption_stays(models, glue, tmp_path, monkeypatch):
    evaluate, calls = run._evaluate, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(run, "_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(models, tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=2)
    assert [record.model for record in load_records(tmp_path)] == ["teacher"]
    measure(models, tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=2)
    assert len(calls) == 4  # one done, one interrupted, two after it


def test_missing_files_are_said_and_never_scored(models, glue, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    records = measure(models[:1], tmp_path, tasks=("rte", "sst2"), data_dirs=(empty, glue))
    assert [record.task for record in records] == ["rte", "sst2"]
    assert records[0].metrics == {}
    (note,) = records[0].notes
    assert "Not run" in note
    assert str(empty) in note
    assert "RTE/dev.tsv" in note
    assert records[1].metrics
    # tried again, and a measured record is not replaced by one without numbers
    write_sst2(empty)
    (empty / "SST-2").rename(empty / "moved")
    again = measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(empty,))
    assert again[0].metrics == {}
    assert load_record(record_path(tmp_path, "sst2", "teacher")).metrics


def test_without_a_hub_a_task_says_so(models, tmp_path):
    (record,) = measure(models[:1], tmp_path, tasks=("sst2",))
    assert record.metrics == {}
    assert "data_dirs" in record.notes[0]


def test_examples_come_from_the_training_file_and_are_the_same_for_all(models, glue, tmp_path):
    settings = {"tasks": ("sst2",), "data_dirs": (glue,), "num_fewshot": 3, "limit": 2}
    records = measure(models, tmp_path / "a", **settings)
    assert len({record.provenance.prompts_hash for record in records}) == 1
    prompt = samples(tmp_path / "a", "sst2", "student")[0]["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.count("Question:") == 4
    assert prompt.count("example number") == 3
    assert records[0].settings["data"]["files"].keys() == {"validation", "train"}
    other = measure(models[:1], tmp_path / "b", seed=5, **settings)
    assert other[0].provenance.prompts_hash != records[0].provenance.prompts_hash
    without = write_sst2(tmp_path / "without")
    (missing,) = measure(models[:1], tmp_path / "c", **(settings | {"data_dirs": (without,)}))
    assert "the train split of sst2 is not in" in missing.notes[0]


def test_cut_prompts_are_in_the_notes(models, glue, tmp_path):
    (record,) = measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(glue,), max_length=64)
    (note,) = [note for note in record.notes if "Combined length" in note]
    # all prompts are longer, two answers each
    assert f"{2 * len(SENTENCES)} times" in note


def test_group_has_a_record_of_its_own(models, tmp_path, small_index):
    rows = [{"text": text, "label": label} for text, label in SENTENCES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    for name, choices in (("good", ["bad", "good"]), ("long", ["short", "long"])):
        write_yaml(
            tmp_path / "tasks",
            name,
            task=f"is_{name}",
            dataset_path="json",
            dataset_kwargs=data,
            test_split="test",
            output_type="multiple_choice",
            doc_to_text="{{text}}",
            doc_to_choice=choices,
            doc_to_target="label",
            metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        )
    write_yaml(
        tmp_path / "tasks",
        "both",
        group="both",
        task=["is_good", "is_long"],
        aggregate_metric_list=[{"metric": "acc", "aggregation": "mean", "weight_by_size": True}],
        metadata={"version": 3.0},
    )
    records = measure(models[:1], tmp_path, tasks=("both",), include_path=tmp_path / "tasks")
    good, long, both = records
    assert (good.task, long.task, both.task) == ("is_good", "is_long", "both")
    assert good.baselines == {"acc": 0.5}
    mean = (good.metrics["acc"].value + long.metrics["acc"].value) / 2
    assert both.metrics["acc"].value == pytest.approx(mean)
    assert both.metrics["acc"].num == 2 * len(SENTENCES)
    assert both.metrics["acc"].standard_error > 0
    assert measure(models[:1], tmp_path, tasks=("both",), include_path=tmp_path / "tasks")[0] == good


def test_model_and_logger_are_left_as_they_were(tiny, models, glue, tmp_path):
    import logging

    before = logging.getLogger("lm_eval").propagate, tiny.training
    measure(models, tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=1)
    assert (logging.getLogger("lm_eval").propagate, tiny.training) == before


def test_errors_name_the_rule_and_the_fix(models, tmp_path, small_index, monkeypatch):
    with pytest.raises(ConfigError, match="no task or group sst3; near: sst2"):
        measure(models, tmp_path, tasks=("sst3",))
    with pytest.raises(ConfigError, match="no model"):
        measure([], tmp_path)
    with pytest.raises(ValueError, match="nothing to measure"):
        LmEvalSettings(tasks=())
    rows = tmp_path / "piqa_validation.jsonl"
    rows.write_text('{"goal": "g", "sol1": "a", "sol2": "b", "label": "1"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"piqa_validation.jsonl, row 1: label '1' is not the integer"):
        measure(models, tmp_path, tasks=("piqa",), data_dirs=(tmp_path,))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="holds no text"):
        measure(models, tmp_path, tasks=(), text_files=(empty,))
    with pytest.raises(ConfigError, match="no local layout is known for hellaswag"):
        export_tasks(["hellaswag"], [tmp_path], tmp_path / "out")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'subquad\[eval\]'"):
        measure(models, tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error(models, glue, tmp_path):
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "lm-eval").write_text("a file in the way", encoding="utf-8")
    with pytest.raises(OutputError, match="could not write its files of sst2"):
        measure(models[:1], tmp_path, tasks=("sst2",), data_dirs=(glue,), limit=1)
    assert load_records(tmp_path) == []
