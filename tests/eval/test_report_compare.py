"""Several runs on one page: the same rows, and a word on everything that was not measured alike."""

from __future__ import annotations

import io
import shutil

import pytest
from rich.console import Console

from subquad.errors import ConfigError
from subquad.eval.records import save_record
from subquad.eval.report import load_run, write_comparison
from subquad.eval.summary import print_comparison, print_report

from .report_records import finetune_record, lm_eval_record, loss_record, save_all
from .test_metric_text import needle_record
from .test_report import make_run, read_page


@pytest.fixture
def runs(tmp_path):
    """Two runs whose records differ in the examples of sst2."""
    folders = [make_run(tmp_path / name, name=name) for name in ("first", "second")]
    for folder, limit in zip(folders, (200, 100), strict=True):
        for model in ("teacher", "window_only", "student"):
            save_record(lm_eval_record("sst2", model, folder, limit=limit), folder)
            save_record(finetune_record(model), folder)
    return folders


def test_values_of_every_run_and_model_stand_side_by_side(runs, tmp_path):
    paths = write_comparison(runs, tmp_path / "out")
    markdown = paths.markdown.read_text(encoding="utf-8")
    head = next(line for line in markdown.splitlines() if line.startswith("| Measure |"))
    for title in ("first: Teacher (softmax)", "first: Student, distilled", "second: Student, distilled"):
        assert title in head
    read_page(paths.html)
    assert paths.html == tmp_path / "out" / "report.html"


def test_what_differs_is_said_and_marked(runs, tmp_path):
    markdown = write_comparison(runs, tmp_path / "out").markdown.read_text(encoding="utf-8")
    assert "limit is 200 for first, 100 for second" in markdown
    line = next(line for line in markdown.splitlines() if line.startswith("| sst2: acc"))
    assert line.count("†") == 3
    finetuned = next(line for line in markdown.splitlines() if line.startswith("| glue-finetune-sst2: acc"))
    assert "†" not in finetuned
    assert "| GLUE average, zero-shot † |" in markdown
    assert "| GLUE average, fine-tuned |" in markdown


def test_equal_runs_differ_in_nothing(tmp_path):
    first = make_run(tmp_path / "a")
    shutil.copytree(first, tmp_path / "b")
    markdown = write_comparison([first, tmp_path / "b"], tmp_path / "out").markdown.read_text(encoding="utf-8")
    assert "Every row was measured with the same settings" in markdown
    assert "†:" in markdown
    assert " † |" not in markdown
    # both are called demo, so their folders tell them apart
    assert "a: Teacher (softmax)" in markdown


def test_a_run_beside_an_evaluation_does_not_mix_their_losses(tmp_path):
    first = make_run(tmp_path / "run")
    save_all(tmp_path / "lone", ("teacher",), lengths=(256,), samples=2)
    markdown = write_comparison([first, tmp_path / "lone"], tmp_path / "out").markdown.read_text(encoding="utf-8")
    line = next(line for line in markdown.splitlines() if line.startswith("| Loss (nats/token) (loss)"))
    assert f"{loss_record('teacher').metrics['loss'].value:.4f}" in line
    assert "2.9991" not in line
    assert "an evaluation without a run" in markdown


def test_needle_rows_over_other_lengths_are_marked(tmp_path):
    for name, lengths in (("a", (192, 320)), ("b", (192,))):
        for model in ("teacher", "student"):
            save_record(needle_record(model, lengths=lengths), tmp_path / name)
    markdown = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "out").markdown.read_text(encoding="utf-8")
    assert "Every row was measured with the same settings" not in markdown
    assert "measured lengths is [192, 320] for a, [192] for b" in markdown
    for label in ("| Needle accuracy (niah)", "| niah: accuracy", "| niah: key_logprob"):
        line = next(line for line in markdown.splitlines() if line.startswith(label))
        # both models of the second run
        assert line.count("†") == 2, line


def test_averages_over_other_tasks_say_which(runs, tmp_path):
    save_record(lm_eval_record("rte", "student", runs[1]), runs[1])
    save_record(lm_eval_record("rte", "teacher", runs[1]), runs[1])
    save_record(lm_eval_record("rte", "window_only", runs[1]), runs[1])
    markdown = write_comparison(runs, tmp_path / "out").markdown.read_text(encoding="utf-8")
    assert "GLUE average, zero-shot: tasks is ['sst2'] for first, ['rte', 'sst2'] for second." in markdown


@pytest.mark.parametrize("folders", [["a"], ["a", "a"]])
def test_one_run_cannot_be_compared(tmp_path, folders):
    make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="at least two different folders"):
        write_comparison([tmp_path / name for name in folders], tmp_path / "out")


def test_tables_on_the_console(runs, tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=200)
    print_report(load_run(runs[0]), tmp_path / "report.html", console)
    text = out.getvalue()
    assert "GLUE average, zero-shot" in text
    assert "+0.1243 ± 0.0040 worse" in text
    assert text.splitlines()[-1] == f"Report: {tmp_path / 'report.html'}"
    print_comparison([load_run(folder) for folder in runs], tmp_path / "out.html", console)
    assert "second: Student" in out.getvalue()
