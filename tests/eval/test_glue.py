"""GLUE through lm-eval on local files: its own prompts, the right labels, and the average."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import Table, parquet

pytest.importorskip("lm_eval", reason="needs the extra eval: pip install 'subquad[eval]'")

from subquad.eval.data_files import MissingFilesError
from subquad.eval.glue import LM_EVAL_TASKS, glue_average, glue_metrics, load_glue_task
from subquad.eval.harness import tasks
from subquad.eval.records import EvalRecord, Metric
from tests.eval.provenance import tiny_provenance

SHARED = Path(__file__).parents[3] / "shared" / "data" / "glue"
MNLI_HEADER = "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
# Of each task: the official file, lm-eval's prompt of its first row, the answer, and the choices.
TASKS = {
    "cola": ("CoLA/dev.tsv", "gj04\t1\t\tIt is.\n", "It is.\nQuestion: Does this sentence make sense?", "yes"),
    "sst2": ("SST-2/dev.tsv", "sentence\tlabel\nbad \t0\n", "bad \nQuestion: Is this sentence positive", "negative"),
    "mrpc": (
        "MRPC/dev.tsv",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"A\tA "b".\n',
        'Sentence 1: "A\nSentence 2: A "b".\nQuestion: Do both sentences mean',
        "yes",
    ),
    "qqp": (
        "QQP/dev.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t0\n",
        "Question 1: A?\nQuestion 2: B?\nQuestion: Do both questions ask",
        "no",
    ),
    "mnli": (
        "MNLI/dev_matched.tsv",
        MNLI_HEADER + "0\t1\t2\tg\tA.\tB\tx\tcontradiction\n",
        "A.\nQuestion: B. True, False or Neither?",
        "False",
    ),
    "mnli_mismatch": (
        "MNLI/dev_mismatched.tsv",
        MNLI_HEADER + "0\t1\t2\tg\tC.\tD.\tx\tneutral\n",
        "C.\nQuestion: D. True, False or Neither?",
        "Neither",
    ),
    "qnli": (
        "QNLI/dev.tsv",
        "index\tquestion\tsentence\tlabel\n0\tWho?\tShe.\tentailment\n",
        "Who?\nShe.\nQuestion: Does this response answer",
        "yes",
    ),
    "rte": (
        "RTE/dev.tsv",
        'index\tsentence1\tsentence2\tlabel\n0\tA "b\tB.\tnot_entailment\n',
        'A "b\nQuestion: B. True or False?',
        "False",
    ),
    "wnli": (
        "WNLI/dev.tsv",
        "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n",
        "A.\nQuestion: B. True or False?",
        "True",
    ),
}


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    for name, text, _, _ in TASKS.values():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def load(names, folder, *, train=False):
    return tasks.load_tasks(names, (), [folder], None, train=train)[1]


def test_lm_eval_has_these_tasks():
    manager = tasks._cached_manager(("glue",), None)
    assert manager.task_index["glue"].tags == set(LM_EVAL_TASKS) == set(TASKS)


def test_official_files_reach_lm_evals_own_prompts(official):
    found = load(["glue"], official)
    assert [loaded.name for loaded in found] == list(LM_EVAL_TASKS)
    for loaded in found:
        assert loaded.problem is None
        task = loaded.tasks[loaded.name]
        _, _, prompt, answer = TASKS[loaded.name]
        (doc,) = task.eval_docs
        assert task.doc_to_text(doc).startswith(prompt)
        assert task.doc_to_text(doc).endswith("Answer:")
        target = task.doc_to_target(doc)
        assert isinstance(target, int)
        assert task.doc_to_choice(doc)[target] == answer
        assert set(task.aggregation()) == set(glue_metrics(loaded.name))
        assert loaded.data["files"].keys() == {LM_EVAL_TASKS[loaded.name][1]}


def test_the_hubs_files_give_the_same_documents(official, tmp_path):
    for name, (task, split) in LM_EVAL_TASKS.items():
        rows = load_glue_task(name, [official], train=False).dataset[split]
        (tmp_path / task).mkdir(exist_ok=True)
        parquet.write_table(Table.from_pylist(rows.to_list()), tmp_path / task / f"{split}-00000-of-00001.parquet")
    for ours, theirs in zip(load(["glue"], official), load(["glue"], tmp_path), strict=True):
        assert ours.tasks[ours.name].eval_docs.to_list() == theirs.tasks[theirs.name].eval_docs.to_list()


def test_missing_files_are_listed_and_the_other_tasks_load(official, tmp_path):
    with pytest.raises(MissingFilesError, match=r"looked for rte/validation-\*\.parquet.*RTE/dev\.tsv"):
        load_glue_task("rte", [tmp_path], train=False)
    # no training file in the official folder
    assert "the train split of cola" in load(["cola"], official, train=True)[0].problem


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs GLUE's TSV files beside the checkout")
def test_real_files_have_the_hubs_number_of_rows():
    found = load(["cola", "sst2", "rte", "wnli"], SHARED)
    assert {loaded.name: len(loaded.tasks[loaded.name].eval_docs) for loaded in found} == {
        "cola": 1043,
        "sst2": 872,
        "rte": 277,
        "wnli": 71,
    }


def record(task, model, error=0.02, **metrics):
    made = {name: Metric(value=value, standard_error=error, num=10) for name, value in metrics.items()}
    return EvalRecord(task=task, model=model, metrics=made, settings={}, provenance=tiny_provenance())


def test_average_is_over_tasks_and_names_what_it_lacks():
    records = [
        record("cola", "teacher", mcc=0.2),
        record("mrpc", "teacher", acc=0.6, f1=0.8),
        record("mnli", "teacher", acc=0.3),
        record("mnli_mismatch", "teacher", acc=0.5),
        record("piqa", "teacher", acc=0.9),
        record("sst2", "student", error=None, acc=0.5),
        record("rte", "student"),  # not run
        record("glue-finetune-rte", "teacher", acc=0.7),
    ]
    averages = glue_average(records)
    teacher = averages["teacher"]
    assert teacher.value == pytest.approx((0.2 + 0.7 + 0.4) / 3)
    assert teacher.standard_error == pytest.approx(0.02 * 3**0.5 / 3)
    assert teacher.tasks == ("cola", "mrpc", "mnli", "mnli_mismatch")
    assert teacher.absent == ("sst2", "qqp", "qnli", "rte", "wnli")
    assert averages["student"].value == 0.5
    assert averages["student"].standard_error is None
    assert glue_average(records, prefix="glue-finetune-")["teacher"].value == 0.7
