"""GLUE's rows: every layout gives the hub's columns and integers, and a wrong row is named."""

import json
import logging
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet

from subquad.errors import ConfigError, DataError
from subquad.eval.glue_data import GLUE_TASKS, load_glue

SHARED = Path(__file__).parents[3] / "shared" / "data" / "glue"
needs_glue = pytest.mark.skipif(not SHARED.is_dir(), reason="needs GLUE's TSV files beside the checkout")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


TSV = {
    "cola": ("CoLA/train.tsv", 'gj04\t0\t*\tHim "is.\ngj04\t1\t\tHe is.\n', [('Him "is.', 0), ("He is.", 1)]),
    "sst2": ("SST-2/train.tsv", "sentence\tlabel\ngood \t1\nbad\t0\n", [("good ", 1), ("bad", 0)]),
    "mrpc": (
        "MRPC/train.tsv",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"A\tA"\n0\t7\t8\tA\tB\n',
        [('"A', 'A"', 1), ("A", "B", 0)],
    ),
    "qqp": (
        "QQP/train.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tA?\t1\n0\t1\t2\tcut\n0\t1\t2\tA?\tB?\t0\n",
        [("A?", "A?", 1), ("A?", "B?", 0)],
    ),
    "mnli": (
        "MNLI/train.tsv",
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA\tB\tneutral\tcontradiction\n1\tA\tC\tentailment\tneutral\n",
        [("A", "B", 2), ("A", "C", 1)],
    ),
    "qnli": ("QNLI/train.tsv", "index\tquestion\tsentence\tlabel\n0\tA?\tB\tentailment\n", [("A?", "B", 0)]),
    "rte": (
        "RTE/train.tsv",
        'index\tsentence1\tsentence2\tlabel\n0\tA\t"B\tnot_entailment\n1\tA\tC\tentailment\n',
        [("A", '"B', 1), ("A", "C", 0)],
    ),
    "wnli": (
        "WNLI/train.tsv",
        "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t0\n1\tA\tC\t1\n",
        [("A", "B", 0), ("A", "C", 1)],
    ),
}


def rows_of(dataset: Dataset) -> list[tuple]:
    return list(zip(*(dataset[name] for name in dataset.column_names), strict=True))


@pytest.mark.parametrize("task", GLUE_TASKS)
def test_every_layout_gives_the_same_rows(task, tmp_path):
    name, text, expected = TSV[task]
    write(tmp_path / "tsv", name, text)
    dataset = load_glue(task, "train", tmp_path / "tsv")
    assert rows_of(dataset) == expected
    assert dataset.column_names == [*GLUE_TASKS[task].texts, "label"]
    assert dataset.features["label"].names == list(GLUE_TASKS[task].labels)

    records = [dict(row, idx=number) for number, row in enumerate(dataset)]
    write(tmp_path / "lines", f"{task}/train.jsonl", "".join(json.dumps(row) + "\n" for row in records))
    assert rows_of(load_glue(task, "train", tmp_path / "lines")) == expected

    folder = tmp_path / "hub" / task
    folder.mkdir(parents=True)
    for shard, part in enumerate((records[:1], records[1:])):
        if part:
            parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"train-{shard:05}-of-00002.parquet")
    assert rows_of(load_glue(task, "train", tmp_path / "hub")) == expected


def test_cut_rows_of_qqp_are_left_out_aloud_and_those_of_others_refused(tmp_path, caplog):
    write(tmp_path, *TSV["qqp"][:2])
    with caplog.at_level(logging.WARNING):
        load_glue("qqp", "train", tmp_path)
    assert "1 rows without all fields" in caplog.text
    assert "train.tsv, line 3" in caplog.text
    write(tmp_path, "RTE/train.tsv", TSV["rte"][1] + "2\tonly one\n")
    with pytest.raises(DataError, match=r"train\.tsv, line 4: sentence2 is None, but every row of rte"):
        load_glue("rte", "train", tmp_path)


def test_both_validation_splits_of_mnli_are_read_from_their_own_files(tmp_path):
    header = "sentence1\tsentence2\tgold_label\n"
    write(tmp_path, "MNLI/dev_matched.tsv", header + "A\tB\tneutral\n")
    write(tmp_path, "MNLI/dev_mismatched.tsv", header + "A\tB\tentailment\n")
    assert load_glue("mnli", "validation_matched", tmp_path)["label"][:] == [1]
    assert load_glue("mnli", "validation_mismatched", tmp_path)["label"][:] == [0]


@pytest.mark.parametrize("label", ["2", "-1", "maybe", ""])
def test_a_wrong_label_is_named_with_its_line_and_the_rule(label, tmp_path):
    write(tmp_path, "SST-2/train.tsv", f"sentence\tlabel\nfine\t1\nodd\t{label}\n")
    with pytest.raises(
        DataError, match=rf"line 3: the label is '{label}', but sst2 has 0 \(negative\), 1 \(positive\)"
    ):
        load_glue("sst2", "train", tmp_path)


def test_labels_as_text_become_integers_in_json_lines_too(tmp_path):
    lines = [{"sentence1": "A", "sentence2": "B", "label": label} for label in ("entailment", "1", 0)]
    write(tmp_path, "rte/train.jsonl", "\n".join(map(json.dumps, lines)))
    assert load_glue("rte", "train", tmp_path)["label"][:] == [0, 1, 0]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rte/train.jsonl", "{broken\n", r"train\.jsonl, line 1 is not JSON"),
        ("rte/train.jsonl", "[1]\n", r"line 1 is '\[1\]', but every line must be an object"),
        ("rte/train.jsonl", "", "the split train of rte is empty"),
        ("rte/train.parquet", "not parquet", r"train\.parquet is not a readable parquet file"),
        ("RTE/train.tsv", "sentence\tlabel\nA\t1\n", "without sentence1, sentence2; is it another task's file"),
        ("RTE/dev.tsv", TSV["rte"][1], "no file holds the split train of rte: looked for"),
    ],
)
def test_damaged_or_missing_files_are_named(name, content, message, tmp_path):
    write(tmp_path, name, content)
    with pytest.raises(DataError, match=message):
        load_glue("rte", "train", tmp_path)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2" / "train.tsv").write_bytes("sentence\tlabel\ncaf\xe9\t1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"train\.tsv cannot be read as UTF-8"):
        load_glue("sst2", "train", tmp_path)


def test_unknown_tasks_and_splits_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="GLUE has no task 'stsb'; it has cola"):
        load_glue("stsb", "train", tmp_path)
    with pytest.raises(ConfigError, match="mnli has no split 'validation' with labels; it has train, validation_m"):
        load_glue("mnli", "validation", tmp_path)


def test_without_a_folder_the_rows_come_from_the_hub(monkeypatch):
    calls = []

    def fake(path, name, split):
        calls.append((path, name, split))
        return Dataset.from_dict({"sentence": ["A"], "label": [1], "idx": [0]})

    monkeypatch.setattr("datasets.load_dataset", fake)
    assert rows_of(load_glue("sst2", "validation")) == [("A", 1)]
    assert calls == [("nyu-mll/glue", "sst2", "validation")]

    def offline(path, name, split):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(DataError, match=r"cannot load sst2 .* no route.* give a folder with GLUE's files as data_dir"):
        load_glue("sst2", "train")


@needs_glue
@pytest.mark.parametrize(
    "task, rows, share_of_ones",
    [("cola", 1043, 0.6913), ("sst2", 872, 0.5092), ("rte", 277, 0.4729), ("wnli", 71, 0.4366)],
)
def test_the_official_validation_files_have_their_known_size_and_balance(task, rows, share_of_ones):
    labels = load_glue(task, "validation", SHARED)["label"][:]
    assert len(labels) == rows
    assert sum(labels) / rows == pytest.approx(share_of_ones, abs=1e-4)
