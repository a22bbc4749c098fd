"""The report of evaluation records: the first screen, the sections, what is missing, and what cannot be compared."""

from __future__ import annotations

import re
import shlex

import pytest

from subquad.errors import OutputError
from subquad.eval.records import save_record
from subquad.eval.report import load_run, measures_of, write_report
from subquad.eval.report.commands import eval_command
from subquad.eval.report.differences import Difference, metric_differences
from subquad.eval.report.plain import report_to_dict

from .report_records import (
    finetune_record,
    layer_record,
    lm_eval_record,
    loss_record,
    niah_record,
    provenance,
    save_all,
)
from .test_report import make_run, read_page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The report of a run with every kind of record: its folder, the page and the Markdown."""
    folder = make_run(tmp_path_factory.mktemp("run"))
    save_all(folder, lengths=(256, 512), samples=4)
    paths = write_report(folder)
    return folder, paths.html.read_text(encoding="utf-8"), paths.markdown.read_text(encoding="utf-8")


def rows_of(folder):
    return {measure.name: measure for measure in measures_of(load_run(folder))}


def test_the_first_screen_answers_what_it_cost_and_gained(run):
    _, html, markdown = run
    first_screen = html[: html.index("<h2")]
    for words in (
        "Cost against the teacher: loss +0.1243 ± 0.0040 (worse); GLUE zero-shot",
        "Gain over the window-only control: loss -0.0278 ± 0.0022 (better)",
        "Needle accuracy",
        "Needle log probability",
        "GLUE average, fine-tuned",
        "Cache at 8,192 tokens",
        "7.2× smaller",
    ):
        assert words in first_screen
        assert words in markdown
    assert "smaller one from 1,138 tokens" in first_screen


def test_differences_of_the_first_screen_are_paired(run):
    folder, _, _ = run
    rows = rows_of(folder)
    assert rows["Loss (nats/token) (loss)"].cost.mark == "worse"
    assert rows["Loss (nats/token) (loss)"].gain.mark == "better"
    accuracy = rows["Needle accuracy (niah)"]
    assert accuracy.cost.sort == pytest.approx(accuracy.values["student"].sort - accuracy.values["teacher"].sort)
    glue = rows["GLUE average, zero-shot"]
    assert glue.cost.sort == pytest.approx(glue.values["student"].sort - glue.values["teacher"].sort, abs=1e-9)
    assert "2 of 9 tasks: sst2, rte" in glue.note
    assert "a constant answer scores 0.540" in glue.note


def test_lm_eval_pairs_by_document_and_falls_back_to_independent_models(tmp_path):
    student, teacher = (lm_eval_record("sst2", model, tmp_path) for model in ("student", "teacher"))
    paired = metric_differences(student, teacher, tmp_path)["acc"]
    alone = metric_differences(student, teacher, tmp_path / "elsewhere")["acc"]
    assert paired.paired
    assert not alone.paired
    assert paired.value == pytest.approx(alone.value)
    assert paired.standard_error < alone.standard_error / 2


@pytest.mark.parametrize(
    "value, error, higher, mark",
    [
        (0.1, 0.04, True, "better"),
        (0.1, 0.04, False, "worse"),
        (-0.1, 0.04, True, "worse"),
        (0.1, 0.06, True, "tie"),
        (0.0, 0.0, True, "tie"),
        (0.1, None, True, "open"),
    ],
)
def test_marks(value, error, higher, mark):
    assert Difference(value, error, higher, paired=True).mark == mark


def test_every_task_has_its_numbers_baseline_and_marks(run):
    _, html, markdown = run
    line = next(line for line in markdown.splitlines() if line.startswith("| sst2 | acc | 200 | 0.540 |"))
    assert "°" in line
    assert "*tie*" in line
    assert "rte (all models): The model gives the same answer (choice 1) to all 200 documents." in markdown
    assert "GLUE after fine-tuning" in html
    assert 'class="mark worse"' in html


def test_layers_flag_exact_heads_and_long_half_lives(run):
    _, _, markdown = run
    line = next(line for line in markdown.splitlines() if line.startswith("| 1 | "))
    assert "2 exact" in line
    assert "| 0 | 0.10 % | over 1M · 85 · over 1M | – | – | – |" in markdown


def test_needle_section_has_both_scores_tables_and_difference_maps(run):
    folder, html, markdown = run
    names = {path.name for path in (folder / "plots").glob("niah_*")}
    assert {f"niah_{score}_student_minus_teacher.png" for score in ("accuracy", "key_logprob")} <= names
    for words in ("| Prompt length (tokens) |", "| Depth of the needle |", "minus Window-only control, on the same"):
        assert words in markdown
    assert html.count("data:image/png") == 17


def test_environment_of_every_record_is_there(run):
    _, html, _ = run
    for words in ("Prompts hash", "aaaaaaaaaaaa", "fedcba9876543210", "float32", "1 min 13 s", "89abcdef" * 5):
        assert words in html


def test_page_is_whole_and_sorts_by_buttons_made_in_its_one_script(run):
    folder, html, _ = run
    page = read_page(folder / "report.html")
    assert page.tags.count("script") == 1
    assert "button" not in page.tags
    script = html[html.index("<script>") : html.index("</script>")]
    assert 'createElement("button")' in script
    assert "aria-sort" in script
    assert not re.search(r"https?://|url\(|@import|fetch|innerHTML", html)
    assert 'data-sort="' in html


@pytest.mark.parametrize(
    "what, command",
    [
        ("needle in a haystack", "--tasks niah"),
        ("GLUE, zero-shot", "--tasks glue"),
        ("GLUE, fine-tuned", "--tasks glue-finetune"),
        ("speed", "--tasks speed"),
        ("error, half-lives and far share of the layers", "--tasks layers"),
    ],
)
def test_missing_parts_say_so_with_the_command(tmp_path, what, command):
    markdown = write_report(make_run(tmp_path)).markdown.read_text(encoding="utf-8")
    assert f"{what[1:]}: not measured; `subquad eval {tmp_path} {command}`" in markdown
    assert "Needle accuracy" not in markdown


def command_for(folder, *models, **checkpoints):
    """The command for a missing task, as a shell reads it."""
    for model in models:
        record = lm_eval_record("sst2", model, folder)
        checkpoint = checkpoints.get(model, record.provenance.checkpoint)
        save_record(record.model_copy(update={"provenance": provenance(model, checkpoint=checkpoint)}), folder)
    return shlex.split(eval_command(load_run(folder), "speed"))


def test_the_command_for_a_missing_part_of_a_run_is_quoted(tmp_path):
    folder = make_run(tmp_path / "my runs" / "it's one")
    assert command_for(folder) == ["subquad", "eval", str(folder), "--tasks", "speed"]


def test_the_command_for_a_folder_without_a_run_names_its_checkpoints(tmp_path):
    folder = tmp_path / "dir sp"
    end = ["--output", str(folder), "--tasks", "speed"]
    assert command_for(folder, "gemma", gemma="hub/gemma") == ["subquad", "eval", "hub/gemma", *end]
    assert command_for(folder, "teacher", teacher="my ck") == [
        *("subquad", "eval", "my ck", "--against", "gemma=hub/gemma"),
        *end,
    ]
    assert command_for(folder, "student", student="out/student") == [
        *("subquad", "eval", "out/student", "--teacher", "my ck", "--against", "gemma=hub/gemma"),
        *end,
    ]


def test_the_command_for_a_run_without_its_recipe_names_its_student_and_teacher(tmp_path):
    (make_run(tmp_path) / "recipe.yaml").unlink()
    found = command_for(tmp_path)
    assert found[:5] == ["subquad", "eval", str(tmp_path / "student"), "--teacher", "smollm2-135m"]


def test_a_teacher_that_no_record_names_is_left_to_the_run(tmp_path):
    assert command_for(tmp_path, "student", student="out")[:4] == ["subquad", "eval", "out", "--output"]


def test_evaluation_without_a_run(tmp_path):
    save_all(tmp_path, ("teacher", "gemma"), lengths=(256,), samples=2)
    paths = write_report(tmp_path)
    markdown = paths.markdown.read_text(encoding="utf-8")
    assert "An evaluation without a converted model." in markdown
    assert "Cost: student − teacher" not in markdown
    assert "memory while generating (a run measures it at its end): not measured" in markdown
    assert "No training curves: this folder is not a run's." in markdown
    read_page(paths.html)


def test_student_without_a_run_gets_its_verdict_from_the_loss_task(tmp_path):
    for model in ("teacher", "window_only", "student"):
        save_record(loss_record(model), tmp_path)
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "**On held-out loss, the distilled student beats the window-only control.**" in markdown
    assert "lower than that of the window-only control" in markdown


def test_a_student_alone_is_compared_with_nothing(tmp_path):
    save_record(loss_record("student"), tmp_path)
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "The student's loss is not judged: that of the window-only control was not measured" in markdown


def test_other_settings_are_said_and_not_compared(tmp_path):
    save_record(lm_eval_record("sst2", "teacher", tmp_path), tmp_path)
    save_record(lm_eval_record("sst2", "student", tmp_path, limit=100), tmp_path)
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "sst2 was not measured alike, so there is no difference: student: limit differs from teacher." in markdown
    assert rows_of(tmp_path)["GLUE average, zero-shot"].cost is None


@pytest.mark.parametrize("make", [loss_record, niah_record, finetune_record])
def test_other_prompts_are_not_compared(tmp_path, make):
    other = make("student").model_copy(update={"provenance": provenance("student", prompts="c" * 64)})
    assert metric_differences(other, make("teacher"), tmp_path) == {}
    save_record(make("teacher"), tmp_path)
    save_record(other, tmp_path)
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "was not measured alike, so there is no difference: student: prompts differs from teacher" in markdown


def test_needles_beyond_one_models_context_are_left_out_for_both(tmp_path):
    short = niah_record("student", lengths=(256, 512), samples=2)
    cells = [cell for cell in short.details["cells"] if cell["length"] == 256]
    save_record(short.model_copy(update={"details": {"cells": cells}, "notes": ["512 is too long."]}), tmp_path)
    save_record(niah_record("teacher", lengths=(256, 512), samples=2), tmp_path)
    assert "256 tokens, 10 prompts" in rows_of(tmp_path)["Needle accuracy (niah)"].note
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "not measured |" in markdown
    assert "Student, distilled: 512 is too long." in markdown
    assert "niah: scores are over the lengths each model has room for" in markdown
    assert "student: measured lengths differs from teacher." in markdown
    assert "not measured alike" not in markdown


def test_a_task_that_could_not_run_says_why(tmp_path):
    save_record(loss_record("teacher"), tmp_path)
    empty = lm_eval_record("rte", "teacher", tmp_path)
    save_record(empty.model_copy(update={"metrics": {}, "notes": ["Not run: no file of rte."]}), tmp_path)
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "| rte | not measured |" in markdown
    assert "rte (Teacher (softmax)): Not run: no file of rte." in markdown
    assert "GLUE, zero-shot: not measured" in markdown


def test_records_of_other_weights_are_warned_of(tmp_path):
    save_record(loss_record("student"), tmp_path)
    stale = layer_record()
    weights = stale.provenance.model_copy(update={"weights": "1111111111111111"})
    save_record(stale.model_copy(update={"provenance": weights}), tmp_path)
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "Careful: the records of Student, distilled are of different weights: layers of 1111111111111111" in markdown


def test_empty_folder_and_damaged_record_are_errors(tmp_path):
    with pytest.raises(OutputError, match=r"no results\.json and no evals/"):
        write_report(tmp_path)
    path = save_record(loss_record("teacher"), tmp_path)
    path.write_text("{broken")
    with pytest.raises(OutputError, match=r"teacher\.json"):
        write_report(tmp_path)


def test_plain_values(run):
    folder, _, _ = run
    found = report_to_dict(load_run(folder))
    assert found["loss"]["teacher"] == 2.9991
    assert found["evals"]["sst2"]["student"]["acc"]["num"] == 200
