"""Standard errors against lm-eval's and scikit-learn's, records of made-up answers, and texts as documents."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval: pip install 'subquad[eval]'")
from lm_eval.api import metrics
from sklearn.metrics import f1_score, matthews_corrcoef

from subquad.errors import DataError, OutputError
from subquad.eval import confusion
from subquad.eval.data_files import MissingFilesError
from subquad.eval.harness import paired_difference, uncertainty
from subquad.eval.harness.library import WarningNotes, collected_warnings
from subquad.eval.harness.local import load_local, load_text, text_task_name
from subquad.eval.harness.record import Outcome, add_standard_errors, build_record
from subquad.eval.records import EvalRecord, Metric
from tests.eval.provenance import tiny_provenance

GENERATOR = np.random.default_rng(0)


def pairs(num, classes=2, skill=0.5):
    gold = GENERATOR.integers(0, classes, num)
    guess = GENERATOR.integers(0, classes, num)
    return list(zip(gold.tolist(), np.where(GENERATOR.random(num) < skill, gold, guess).tolist(), strict=True))


def counts(items, classes=2):
    table = np.zeros((1, classes, classes))
    for gold, predicted in items:
        table[0, gold, predicted] += 1
    return table


@pytest.mark.parametrize("classes", [2, 3])
def test_matthews_is_scikit_learns(classes):
    for skill in (0.0, 0.3, 1.0):
        items = pairs(60, classes, skill)
        expected = matthews_corrcoef(*zip(*items, strict=True))
        assert confusion.matthews(counts(items, classes))[0] == pytest.approx(expected, abs=1e-12)
    assert confusion.matthews(counts([(0, 1), (1, 1)]))[0] == 0.0


def test_f1_is_scikit_learns():
    for skill in (0.0, 0.3, 1.0):
        items = pairs(60, skill=skill)
        assert confusion.f1(counts(items))[0] == pytest.approx(f1_score(*zip(*items, strict=True)), abs=1e-12)
    assert confusion.f1(counts([(0, 0), (0, 0)]))[0] == 0.0


@pytest.mark.parametrize("aggregation", [metrics.matthews_corrcoef, metrics.f1_score])
def test_bootstrap_of_counts_is_lm_evals_of_documents(aggregation, monkeypatch):
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    items = pairs(80)
    theirs = metrics.bootstrap_stderr(aggregation, items, iters=400)
    own = uncertainty.estimate(aggregation, items, seed=1)
    assert own.standard_error == pytest.approx(theirs, rel=0.15)
    assert own == uncertainty.estimate(aggregation, items, seed=1)
    # an error of the mean falls with the root of the number
    larger = uncertainty.estimate(aggregation, items * 16, seed=1)
    assert larger.standard_error == pytest.approx(own.standard_error / 4, rel=0.15)


def test_standard_error_of_a_mean_is_lm_evals():
    items = GENERATOR.integers(0, 2, 50).tolist()
    assert uncertainty.estimate(metrics.mean, items, 0).standard_error == metrics.mean_stderr(items)


@pytest.mark.parametrize("aggregation", [metrics.perplexity, metrics.weighted_perplexity, metrics.bits_per_byte])
def test_delta_method_agrees_with_a_bootstrap(aggregation):
    weights = GENERATOR.integers(20, 60, 120)
    rates = -2.0 * weights + GENERATOR.normal(size=120) * 5
    items = (rates / weights).tolist() if aggregation is metrics.perplexity else list(zip(rates, weights, strict=True))
    own = uncertainty.estimate(aggregation, items, 0).standard_error
    draws = [aggregation([items[i] for i in GENERATOR.integers(0, 120, 120)]) for _ in range(400)]
    assert own == pytest.approx(np.std(draws, ddof=1), rel=0.15)


def test_any_other_aggregation_is_resampled_or_says_why_not():
    items = GENERATOR.normal(size=100).tolist()
    found = uncertainty.estimate(metrics.median, items, 0)
    assert found.standard_error == pytest.approx(1.2533 / 10, rel=0.35)
    assert "100 resamples" in found.method

    def fails(_items):
        raise KeyError("twice")

    assert uncertainty.estimate(fails, items, 0) == (None, "none: the bootstrap failed (KeyError('twice'))")
    assert uncertainty.estimate(lambda _: math.nan, items, 0).standard_error is None
    assert uncertainty.estimate(metrics.mean, [1.0], 0) == (None, "none: one document")


def test_paired_difference_of_correlations_is_that_of_drawn_documents(tmp_path):
    gold = GENERATOR.integers(0, 2, 90).tolist()
    guesses = [[label if GENERATOR.random() < skill else 1 - label for label in gold] for skill in (0.9, 0.7)]
    models = []
    for name, guess in zip(("a", "b"), guesses, strict=True):
        lines = [{"mcc": pair, "doc_hash": str(index)} for index, pair in enumerate(zip(gold, guess, strict=True))]
        (tmp_path / "evals").mkdir(exist_ok=True)
        (tmp_path / "evals" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        metric = Metric(value=0.1, num=90)
        details = {"samples_file": f"{name}.jsonl"}
        models.append(
            EvalRecord(
                task="cola",
                model=name,
                metrics={"mcc": metric},
                settings={},
                details=details,
                provenance=tiny_provenance(),
            )
        )
    found = paired_difference(tmp_path, *models, "mcc")
    assert found.difference == pytest.approx(matthews_corrcoef(gold, guesses[0]) - matthews_corrcoef(gold, guesses[1]))
    draws = []
    for _ in range(300):
        drawn = GENERATOR.integers(0, 90, 90)
        a, b = ([guess[i] for i in drawn] for guess in guesses)
        labels = [gold[i] for i in drawn]
        draws.append(matthews_corrcoef(labels, a) - matthews_corrcoef(labels, b))
    assert found.standard_error == pytest.approx(np.std(draws, ddof=1), rel=0.15)
    (tmp_path / "evals" / "a.jsonl").unlink()
    with pytest.raises(OutputError, match=r"a\.jsonl cannot be read"):
        paired_difference(tmp_path, *models, "mcc")


def choice(doc_id, target, answers, **scores):
    return {
        "doc_id": doc_id,
        "target": target,
        "filter": "none",
        "arguments": [("question", f" {index}") for index in range(len(answers))],
        "filtered_resps": [(answer, False) for answer in answers],
        **scores,
    }


def record(outcome):
    return build_record(outcome, model="teacher", settings={}, notes=[], details={}, provenance=tiny_provenance())


def test_missing_numbers_are_named_and_never_zero():
    numbers = {"sample_len": 3, "alias": "x", "acc,none": math.nan, "acc_stderr,none": "N/A", "em,strict": 0.5}
    made = record(Outcome("x:y", numbers, {"em": False}))
    assert made.task == "x-y"
    assert made.metrics.keys() == {"em,strict"}
    assert not made.metrics["em,strict"].higher_is_better
    assert made.metrics["em,strict"].num == 3
    assert made.metrics["em,strict"].standard_error is None
    assert made.notes == [
        "acc could not be measured: lm-eval gives nan.",
        "em,strict has no standard error (lm-eval gives none).",
    ]
    assert "acc,none" not in made.details["lm_eval"]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_accuracy_of_0_or_1_has_no_standard_error_and_a_note(value):
    numbers = {"sample_len": 3, "acc,none": value, "acc_stderr,none": 0.0, "mcc,none": 0.0, "mcc_stderr,none": 0.0}
    made = record(Outcome("sst2", numbers, {}))
    assert made.metrics["acc"].standard_error is None
    assert made.metrics["mcc"].standard_error == 0.0
    assert made.notes == [f"acc has no standard error: all 3 examples score {value:.0f}."]


def test_glue_is_compared_with_the_best_constant_answer():
    gold = [1, 1, 1, 0]
    answers = [choice(index, label, [-2.0, -1.0], f1=(label, 1), acc=float(label)) for index, label in enumerate(gold)]
    numbers = {"sample_len": 4, "acc,none": 0.75, "f1,none": 6 / 7}
    methods = add_standard_errors(numbers, {"f1": metrics.f1_score, "acc": metrics.mean}, answers, 0)
    made = record(Outcome("mrpc", numbers, {}, answers, methods))
    assert made.baselines == {"acc": 0.75, "f1": pytest.approx(6 / 7)}
    assert made.details["predictions"] == [0, 4]
    assert made.details["log_likelihood_sum"] == -12.0
    assert "The model gives the same answer (choice 1) to all 4 documents." in made.notes
    assert made.metrics["f1"].standard_error > 0
    assert "confusion counts" in made.details["standard_errors"]["f1"]


def test_other_questions_are_compared_with_guessing():
    answers = [choice(0, 2, [-1.0, -2.0, -3.0, -4.0]), choice(1, 0, [-1.0, -2.0])]
    made = record(Outcome("arc_easy", {"sample_len": 2, "acc,none": 0.5, "acc_norm,none": 0.5}, {}, answers))
    assert made.baselines == {"acc": 0.375, "acc_norm": 0.375}
    assert "predictions" not in made.details


def test_warnings_that_differ_in_numbers_count_as_one():
    import logging

    with collected_warnings() as found:
        for number in range(12):
            logging.getLogger("lm_eval.models").warning("cut %d of %d\n tokens", number, 40 + number)
            logging.getLogger("lm_eval.tasks").warning("Overwriting default num_fewshot of x from None to %d", number)
        for letter in "abcdefg":
            logging.getLogger("lm_eval").warning("kind %s", letter)
    notes = found.notes()
    assert notes[0] == "lm-eval warned 12 times: cut 0 of 40 tokens"
    assert notes[-1] == "lm-eval gave 3 more kinds of warning."
    assert len(notes) == 6
    assert isinstance(found, WarningNotes)
    assert found not in logging.getLogger("lm_eval").handlers


def test_wikitext_is_split_at_titles_and_nowhere_else(tmp_path):
    articles = [
        " \n = First one = \n \n Text = here = . \n = = Part = = \n \n More . \n = = = Below = = = \n",
        " = Second = \n \n Its text . \n",
    ]
    (tmp_path / "wiki.test.raw").write_text("".join(articles), encoding="utf-8")
    local = load_local("wikitext", [tmp_path], train=False)
    # what stands before the first title has no text; the end of the line before a title is the separator
    assert local.dataset["test"]["page"] == [articles[0].removeprefix(" \n").removesuffix("\n"), articles[1]]
    assert local.split == "test"


def test_texts_are_read_as_documents(tmp_path):
    plain, lines = tmp_path / "some tale.txt.gz", tmp_path / "tales.jsonl"
    with gzip.open(plain, "wt", encoding="utf-8", newline="") as file:
        file.write("one\r\n<|endoftext|>\n<|endoftext|>two")
    lines.write_text(json.dumps({"text": "a <|endoftext|> b"}) + "\n", encoding="utf-8")
    assert load_text(plain).dataset["test"]["page"] == ["one\r\n", "two"]
    assert load_text(lines).dataset["test"]["page"] == ["a <|endoftext|> b"]
    assert text_task_name(plain) == "text-some-tale.txt.gz"
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt cannot be read"):
        load_text(tmp_path / "latin.txt")


def test_zero_shot_files_become_the_hubs_rows(tmp_path):
    def write(name, *rows):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    write("lambada_openai_test.jsonl", {"context": "He saw the", "continuation": "dog"}, {"text": "It was late"})
    assert load_local("lambada_openai", [tmp_path], train=False).dataset["test"]["text"] == [
        "He saw the dog",
        "It was late",
    ]
    arc = {"id": "1", "question": "?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
    write("arc_easy_validation.jsonl", arc)
    local = load_local("arc_easy", [tmp_path], train=False)
    assert local.split == "validation"
    assert "lm-eval's own, is not there" in local.notes[0]
    write("arc_easy_test.jsonl", arc | {"answerKey": "C"})
    with pytest.raises(DataError, match="answerKey 'C' is none of the choices' labels"):
        load_local("arc_easy", [tmp_path], train=False)
    write("sciq_test.jsonl", {"question": "?"})
    with pytest.raises(DataError, match="has no distractor1"):
        load_local("sciq", [tmp_path], train=False)
    with pytest.raises(MissingFilesError, match=r"piqa_validation\.jsonl"):
        load_local("piqa", [tmp_path], train=False)
