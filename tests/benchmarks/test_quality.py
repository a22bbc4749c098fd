"""The study of conversions: arms are recipes, references are measured once, and where the far part errs."""

import dataclasses
import gzip
import json
import sys

import pytest
import torch
import yaml

from benchmarks.quality import corpus, decode_loss, far_part, plots, study, teacher_text
from benchmarks.quality.rows import Needle, needle_of
from benchmarks.quality.table import render_table
from subquad.errors import ConfigError
from subquad.eval.records import EvalRecord, load_records
from subquad.layers import attention_mode, converted_layers
from subquad.layers import resolve_mixer as mixer
from subquad.recipes import runner
from tests.convert.tiny_checkpoints import write_hf
from tests.eval.provenance import tiny_provenance
from tests.layers.students import convert
from tests.tiny_llama import tiny_teacher, tiny_tokens

SEQ_LEN = 32


@pytest.fixture
def study_file(tmp_path):
    for part in ("train", "eval"):
        lines = (f"{part} line {number}: the heron stands in the shallow water.\n" for number in range(40))
        (tmp_path / f"{part}.txt").write_text("".join(lines))
    content = {
        "name": "tiny",
        "seeds": [0],
        "base": {
            "model": {"source": str(write_hf(tmp_path / "teacher"))},
            "convert": {"mixer": {"preset": "2mamba", "window": 8, "sinks": 2}},
            "calibrate": {"tokens": 64},
            "data": {
                "train": {"kind": "text", "paths": [str(tmp_path / "train.txt")]},
                "eval": {"kind": "text", "paths": [str(tmp_path / "eval.txt")]},
                "seq_len": SEQ_LEN,
            },
            "stage1": {"tokens": 64},
            "stage2": {"tokens": 64},
            "trainer": {"report_to": []},
            "eval": {
                "tokens": 128,
                "memory_lengths": [16, 64],
                "generate_tokens": 0,
                "suite": {
                    "tasks": ["loss"],
                    "loss": {"text": [str(tmp_path / "eval.txt")], "tokens": 64, "seq_len": 16},
                },
            },
        },
        "arms": {
            "far": {"label": "window + far"},
            "heads": {
                "group": "hybrid",
                "changes": {"convert": {"exact_heads": {"count": 1, "tokens": 32, "recall_tokens": 0}}},
            },
        },
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def run(path, folder, *more, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["study", str(path), "--output", str(folder), *more])
    study.main()


def test_a_study_from_one_arm_to_all(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(study_file, folder, "--arms", "far", monkeypatch=monkeypatch)
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 1
    run(study_file, folder, monkeypatch=monkeypatch)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [(row["arm"], row["label"], row["group"]) for row in rows] == [
        ("far", "window + far", ""),
        ("heads", "heads", "hybrid"),
    ]
    assert [len(row["exact_kv_heads"]) for row in rows] == [0, 1]
    assert all(row["texts"]["loss"].keys() >= {"teacher", "window_only", "student"} for row in rows)
    assert rows[0]["loss"]["teacher"] == rows[1]["loss"]["teacher"]
    table = (folder / "table.md").read_text()
    assert "| window + far | 0 |" in table
    assert (folder / "frontier-loss.png").read_bytes().startswith(b"\x89PNG")
    # the teacher is the same model in both arms and was measured once; the control has other heads
    found = {
        arm: {record.model: record for record in load_records(study.run_dir(folder, arm, 0))}
        for arm in ("far", "heads")
    }
    assert found["far"]["teacher"] == found["heads"]["teacher"]
    assert found["far"]["window_only"] != found["heads"]["window_only"]


def test_means_over_seeds_are_paired_with_the_first_arm(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(study_file, folder, "--arms", "far", monkeypatch=monkeypatch)
    row = next(study.finished_rows(study.load_study(study_file, []), folder))

    def other(arm, seed, loss):
        table = row.results.loss.model_copy(update={"student": loss, "gap_closed": None})
        return dataclasses.replace(
            row, arm=arm, label=arm, seed=seed, results=row.results.model_copy(update={"loss": table})
        )

    assert "Means over seeds" not in render_table("one", [row])
    rows = [other("a", 0, 2.0), other("a", 1, 3.0), other("b", 0, 2.5), other("b", 1, 3.1), other("c", 1, 2.0)]
    table = render_table("two", rows)
    assert "difference from a, paired by seed" in table
    lines = table.split("paired by seed")[1].splitlines()[4:]
    assert [line.split(" | ")[:4] for line in lines] == [
        ["| a", "2", "2.5000", ""],
        ["| b", "2", "2.8000", "+0.3000 ± 0.2000"],
        ["| c", "1", "2.0000", "-1.0000"],
    ]


def test_arms_without_a_common_length_are_named(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(study_file, folder, "--arms", "far", monkeypatch=monkeypatch)
    row = next(study.finished_rows(study.load_study(study_file, []), folder))
    without = dataclasses.replace(row, results=row.results.model_copy(update={"cache_bytes": None}))
    with pytest.raises(ConfigError, match="no length has the cache's bytes of every arm"):
        render_table("two", [row, without])


def test_intervals_of_the_plots(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(study_file, folder, "--arms", "far", monkeypatch=monkeypatch)
    row = next(study.finished_rows(study.load_study(study_file, []), folder))
    paired = row.results.difference("student", "teacher")
    assert plots.loss_point(row) == (row.results.loss.student, paired.standard_error)
    assert plots.needle_point(row, "student") is None
    found = {512: Needle(1.0, -0.2, 3, 0.3), 1024: Needle(1 / 3, -3.0, 3, 0.4)}
    point = plots.needle_point(dataclasses.replace(row, needle={"student": found}), "student")
    assert point == pytest.approx((-1.6, 0.25))


def test_the_needle_of_a_row_is_by_length_and_distance():
    cells = [
        {"length": 512, "depth": 0.0, "distance": 490.4, "exact": "10", "log_probs": [-1.0, -3.0]},
        {"length": 512, "depth": 1.0, "distance": 20.0, "exact": "11", "log_probs": [-0.5, -0.5]},
        {"length": 1024, "depth": 1.0, "distance": 20.0, "exact": "0"},
    ]
    record = EvalRecord(
        task="niah", model="student", metrics={}, settings={}, provenance=tiny_provenance(), details={"cells": cells}
    )
    found = needle_of(record)
    assert found[512].by_distance == {20: -0.5, 490: -2.0}
    assert (found[512].accuracy, found[512].key_logprob, found[512].num) == (0.75, -1.25, 4)
    assert (found[1024].by_distance, found[1024].key_logprob) == ({}, None)


def test_a_finished_study_trains_nothing(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(study_file, folder, monkeypatch=monkeypatch)
    before = (folder / "rows.jsonl").read_text()

    def refuse(*args, **kwargs):
        raise AssertionError("a stage ran again")

    monkeypatch.setattr(runner, "_run_stage", refuse)
    run(study_file, folder, monkeypatch=monkeypatch)
    assert (folder / "rows.jsonl").read_text() == before


def test_a_finished_arm_with_other_values_is_not_taken_for_the_asked_one(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(study_file, folder, "--arms", "far", monkeypatch=monkeypatch)
    before = json.loads((folder / "rows.jsonl").read_text())
    with pytest.raises(SystemExit, match=r"stage2\.tokens"):
        run(study_file, folder, "--arms", "far", "--set", "stage2.tokens=32", monkeypatch=monkeypatch)
    assert json.loads((folder / "rows.jsonl").read_text()) == before
    # the suite may change: its tasks are measured, nothing is trained
    run(study_file, folder, "--arms", "far", "--set", "eval.suite.loss.tokens=32", monkeypatch=monkeypatch)
    after = json.loads((folder / "rows.jsonl").read_text())
    assert after["texts"]["loss"]["student"] != before["texts"]["loss"]["student"]
    assert after["loss"] == before["loss"]


def test_an_arm_without_a_suite_has_no_records_of_other_arms(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    run(study_file, folder, "--arms", "far", monkeypatch=monkeypatch)
    run(study_file, folder, "--arms", "heads", "--set", "eval.suite=null", monkeypatch=monkeypatch)
    rows = {row.arm: row for row in study.finished_rows(study.load_study(study_file, []), folder)}
    assert rows["far"].texts
    assert not rows["heads"].texts


def test_wrong_arms_are_found_before_anything_runs(study_file, tmp_path, monkeypatch, capsys):
    content = yaml.safe_load(study_file.read_text())
    content["arms"]["heads"]["changes"] = {"convert": {"exact_heads": {}}}
    study_file.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match="arm heads is not valid"):
        run(study_file, tmp_path / "out", monkeypatch=monkeypatch)
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run(study_file, tmp_path / "out", "--arms", "nobody", monkeypatch=monkeypatch)
    assert "no arm nobody; arms: far, heads" in capsys.readouterr().err


def test_base_may_not_set_what_the_study_sets(study_file):
    content = yaml.safe_load(study_file.read_text())
    content["base"]["seed"] = 3
    study_file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="base sets seed; the study sets these"):
        study.load_study(study_file, [])


@torch.no_grad()
def test_errors_of_share_and_content():
    model = convert(tiny_teacher(), {"preset": "taylor", "window": 6, "sinks": 1})
    layer = converted_layers(model)[0]
    found = {}

    def watch(layer, args, kwargs):
        inputs = layer.inputs(kwargs["hidden_states"], kwargs["position_embeddings"], kwargs.get("sequence"))
        teacher = layer.exact_heads(inputs)
        student = layer.student_heads(inputs)
        found["plain"] = ((student - teacher)[:, 128:].square().sum() / teacher[:, 128:].square().sum()).item()
        found["parts"] = far_part.measure_layer(layer, inputs)

    handle = layer.register_forward_pre_hook(watch, with_kwargs=True)
    with attention_mode(model, "teacher"):
        model.model(tiny_tokens(1, 160), use_cache=False)
    handle.remove()
    parts = found["parts"]
    # window and exact share and content make the teacher, so that the student's error is the plain one
    assert parts.errors["student"] == pytest.approx(found["plain"], rel=1e-4)
    assert parts.errors["window"] > 0
    assert parts.shares[128][1] < parts.shares[256][1]
    assert set(parts.shares) == {128, 256}
    assert 0 <= parts.explained["far_mass_and_length"] <= parts.explained["and_window_mass"] <= 1


def test_kept_keys_are_refused_where_the_far_part_is_taken_apart():
    layer = converted_layers(convert(tiny_teacher(), "2mamba-kept"))[0]
    with pytest.raises(SystemExit, match="layer 0 has kept_keys: 3"):
        far_part.measure_layer(layer, None)


def test_the_loss_of_decoding_with_a_rounded_state():
    model = convert(tiny_teacher(), "2mamba-kept")
    ids = tiny_tokens(2, 40)
    whole = decode_loss.losses(model, ids, 40)
    expected = model(ids, labels=ids).loss
    assert whole.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    sizes, found = {}, {}
    for dtype in decode_loss.DTYPES:
        sizes[dtype] = decode_loss.set_state_dtype(model, dtype)
        found[dtype] = decode_loss.losses(model, ids, 1)
    torch.testing.assert_close(found["float32"], whole, rtol=1e-4, atol=1e-4)
    assert 0 < (found["bfloat16"] - whole).abs().max() < 0.05
    assert sizes["bfloat16"] < sizes["float32"]


@torch.no_grad()
def test_the_exact_share_with_the_exact_content_is_the_teacher():
    """An exp score of all tokens in the far part would have no error: the nearest, a long Taylor series, has little."""
    errors = []
    for order in (1, 4, 10):
        model = convert(
            tiny_teacher(),
            {"score": "taylor", "order": order, "window": 6, "mix_reference": "absolute"},
            randomise=False,
        )
        for each in converted_layers(model):
            each.mixer.far_weight.log_mix.zero_()
        layer = converted_layers(model)[0]
        found = []

        def watch(layer, args, kwargs, found=found):
            inputs = layer.inputs(kwargs["hidden_states"], kwargs["position_embeddings"], kwargs.get("sequence"))
            found.append(far_part.measure_layer(layer, inputs).errors["student"])

        handle = layer.register_forward_pre_hook(watch, with_kwargs=True)
        with attention_mode(model, "teacher"):
            model.model(tiny_tokens(1, 160), use_cache=False)
        handle.remove()
        errors.append(found[0])
    assert errors[2] < errors[1] < errors[0]


def test_mixers_without_a_shared_normaliser_are_refused():
    model = convert(tiny_teacher(), mixer({"preset": "mamba2s", "window": 6, "sinks": 1}).model_dump())
    layer = converted_layers(model)[0]

    def watch(layer, args, kwargs):
        inputs = layer.inputs(kwargs["hidden_states"], kwargs["position_embeddings"], kwargs.get("sequence"))
        with pytest.raises(SystemExit, match="no far part beside a window"):
            far_part.measure_layer(layer, inputs)

    handle = layer.register_forward_pre_hook(watch, with_kwargs=True)
    with torch.no_grad(), attention_mode(model, "teacher"):
        model.model(tiny_tokens(1, 160), use_cache=False)
    handle.remove()


def test_a_corpus_of_documents_from_every_file(tmp_path):
    paragraphs = [f"paragraph {number} of the long book." for number in range(400)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    with gzip.open(tmp_path / "notes.txt.gz", "wt") as file:
        file.write("first note\n\nits end\n<|endoftext|>\nsecond note")
    documents = corpus.cut((tmp_path / "book.txt").read_text(), 100)
    assert "\n\n".join(documents) == "\n\n".join(paragraphs)
    assert all(100 <= len(document) < 100 + 2 * 40 for document in documents[:-1])
    rows = corpus.build([tmp_path / "book.txt", tmp_path / "notes.txt.gz"], characters=20, most=1000)
    notes = [row["text"] for row in rows if row["source"] == "notes.txt.gz"]
    assert notes == ["first note\n\nits end", "second note"]
    book = [row["text"] for row in rows if row["source"] == "book.txt"]
    assert 900 < sum(map(len, book)) < 1100
    assert "paragraph 38" in book[-1]
    everything = corpus.build([tmp_path / "book.txt"], characters=20, most=10**6)
    assert "".join("".join(row["text"].split()) for row in everything) == "".join("".join(paragraphs).split())


def test_a_long_paragraph_is_cut_between_words():
    words = [f"word{number}" for number in range(300)]
    documents = corpus.cut(" ".join(words), 100)
    assert " ".join(documents) == " ".join(words)
    assert max(map(len, documents)) < 120


def test_a_model_writes_its_own_training_text(tmp_path, monkeypatch, capsys):
    source = write_hf(tmp_path / "teacher")
    args = ["teacher_text", str(source), "-o", str(tmp_path / "a.jsonl"), "--tokens", "200", "--length", "24"]
    found = []
    for seed in ("0", "0", "1"):
        monkeypatch.setattr(sys, "argv", [*args, "--batch-size", "4", "--seed", seed])
        teacher_text.main()
        found.append([json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()])
    assert found[0] == found[1] != found[2]
    assert len(found[0]) % 4 == 0
    assert len(set(found[0])) > 4
    assert "documents" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*args, "--temperature", "0"])
    with pytest.raises(SystemExit, match="--temperature above 0"):
        teacher_text.main()
