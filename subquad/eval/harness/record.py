"""From lm-eval's results of a task to a record: metrics with standard errors, baselines, what the answers were."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from subquad.eval.glue import LM_EVAL_TASKS
from subquad.eval.harness.uncertainty import Uncertainty, estimate
from subquad.eval.metric_text import extreme_interval, no_error_note
from subquad.eval.records import EvalRecord, Metric, Provenance, hash_prompts

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """lm-eval's results of one task.

    Attributes:
        name: lm-eval's name of the task.
        numbers: Values and standard errors by lm-eval's keys, such as `acc,none` and `acc_stderr,none`.
        higher_is_better: Direction by metric, where lm-eval knows it.
        samples: A document each, with its requests and answers, once per filter.
        methods: How each standard error was made, by metric.
    """

    name: str
    numbers: Mapping[str, Any]
    higher_is_better: Mapping[str, bool | None]
    samples: Sequence[Sample] = ()
    methods: Mapping[str, Uncertainty] = field(default_factory=dict)

    @property
    def documents(self) -> list[Sample]:
        """Each document once: filters repeat them."""
        return [sample for sample in self.samples if sample["filter"] == self.samples[0]["filter"]]


def record_name(task: str) -> str:
    """Return lm-eval's name of a task with what a file name cannot hold replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", task)


def add_standard_errors(
    numbers: dict[str, Any], aggregations: Mapping[str, Callable[..., float]], samples: Sequence[Sample], seed: int
) -> dict[str, Uncertainty]:
    """Fill in the standard errors lm-eval left out, under its own keys.

    Args:
        numbers: lm-eval's results of a task without bootstrap; changed in place.
        aggregations: lm-eval's aggregation of each metric; one that is not there takes the mean.
        samples: The task's samples.
        seed: Seed of the resamples.

    Returns:
        The standard errors with their methods, by metric.
    """
    from lm_eval.api.metrics import mean

    found = {}
    for key in [key for key in numbers if "," in key and "_stderr," not in key]:
        metric, chosen = key.split(",", 1)
        items = [sample[metric] for sample in samples if sample["filter"] == chosen and metric in sample]
        found[_metric_name(key)] = error = estimate(aggregations.get(metric, mean), items, seed)
        numbers[f"{metric}_stderr,{chosen}"] = "N/A" if error.standard_error is None else error.standard_error
    return found


def build_record(
    outcome: Outcome,
    *,
    model: str,
    settings: Mapping[str, Any],
    notes: Sequence[str],
    details: Mapping[str, Any],
    provenance: Provenance,
) -> EvalRecord:
    """Make the record of one task.

    Args:
        outcome: lm-eval's results.
        model: Name of the model.
        settings: Everything chosen.
        notes: What a reader must know beside what the answers show.
        details: Further details.
        provenance: What is needed to repeat it.

    Returns:
        The record.
    """
    metrics, missing = _metrics(outcome)
    methods = {name: error.method for name, error in outcome.methods.items()}
    answers, remarks = _answers(outcome)
    return EvalRecord(
        task=record_name(outcome.name),
        model=model,
        metrics=metrics,
        baselines=_baselines(outcome, metrics),
        settings=dict(settings),
        details={"lm_eval": _plain(outcome.numbers), "standard_errors": methods, **answers, **details},
        notes=[*notes, *remarks, *missing],
        provenance=provenance,
    )


def hash_requests(documents: Sequence[Sample], encode: Callable[[str], Sequence[int]]) -> str:
    """Return the hash of the token ids the model is asked about: of each request its context with its continuation."""
    return hash_prompts(encode("".join(_texts(request))) for document in documents for request in document["arguments"])


def join_hashes(hashes: Sequence[str]) -> str:
    """Return the hash of a group's tasks."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _texts(request: Sequence[Any]) -> Iterator[str]:
    """Yield the texts of a request; a generation's second part are its settings."""
    return (part for part in request if isinstance(part, str))


def _metric_name(key: str) -> str:
    metric, chosen = key.split(",", 1)
    return metric if chosen == "none" else f"{metric},{chosen}"


def _metrics(outcome: Outcome) -> tuple[dict[str, Metric], list[str]]:
    """Return the finite numbers as metrics, and a note on each that is not or has no standard error."""
    metrics, notes = {}, []
    for key, value in outcome.numbers.items():
        if "," not in key or "_stderr," in key:
            continue
        name = _metric_name(key)
        metric, chosen = key.split(",", 1)
        if not _finite(value):
            notes.append(f"{name} could not be measured: lm-eval gives {value!r}.")
            continue
        error = outcome.numbers.get(f"{metric}_stderr,{chosen}", "N/A")
        if not _finite(error):
            method = outcome.methods.get(name)
            notes.append(f"{name} has no standard error ({method.method if method else 'lm-eval gives none'}).")
        better = outcome.higher_is_better.get(metric)
        found = Metric(
            value=float(value),
            standard_error=float(error) if _finite(error) else None,
            num=_num_documents(outcome, metric, chosen),
            higher_is_better=better is not False,
        )
        if extreme_interval(name, found) and found.standard_error is not None:
            found = found.model_copy(update={"standard_error": None})
            notes.append(no_error_note(name, found))
        metrics[name] = found
    return metrics, notes


def _num_documents(outcome: Outcome, metric: str, chosen: str) -> int:
    own = sum(1 for sample in outcome.samples if sample["filter"] == chosen and metric in sample)
    return own or int(outcome.numbers["sample_len"])


def _finite(value: object) -> bool:
    # numpy's numbers, too, but not strings such as "N/A" or "0.5"
    return not isinstance(value, str) and hasattr(value, "__float__") and math.isfinite(float(value))


def _plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return lm-eval's numbers as JSON holds them; what is not finite is left out."""
    return {key: value if isinstance(value, str) else float(value) for key, value in numbers.items() if _kept(value)}


def _kept(value: object) -> bool:
    return isinstance(value, str) or _finite(value)


def _choices(document: Sample) -> list[float] | None:
    """Return the log-likelihoods of a document's choices, or None where it is not a question with choices."""
    answers = document["filtered_resps"]
    is_choice = isinstance(document["target"], int) and len(answers) == len(document["arguments"]) > 1
    if not is_choice or not all(isinstance(answer, tuple | list) and len(answer) == 2 for answer in answers):
        return None
    return [float(log_likelihood) for log_likelihood, _ in answers]


def _answers(outcome: Outcome) -> tuple[dict[str, Any], list[str]]:
    """Return what the model answered, which an accuracy at its baseline does not show, and a remark on it."""
    choices = [_choices(document) for document in outcome.documents]
    known = [values for values in choices if values is not None]
    if not known or len(known) < len(choices):
        return {}, []
    details: dict[str, Any] = {"log_likelihood_sum": math.fsum(value for values in known for value in values)}
    if len({len(values) for values in known}) > 1:
        return details, []
    chosen = Counter(values.index(max(values)) for values in known)
    details["predictions"] = [chosen[index] for index in range(len(known[0]))]
    if len(chosen) > 1 or len(known) == 1:
        return details, []
    remark = f"The model gives the same answer (choice {next(iter(chosen))}) to all {len(known)} documents."
    return details, [remark]


def _baselines(outcome: Outcome, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return what the best constant answer scores on GLUE, and what guessing scores on other questions with choices."""
    documents = [document for document in outcome.documents if _choices(document) is not None]
    if not documents or len(documents) < len(outcome.documents):
        return {}
    accuracies = [name for name in metrics if name in ("acc", "acc_norm")]
    if outcome.name not in LM_EVAL_TASKS:
        chance = math.fsum(1 / len(document["arguments"]) for document in documents) / len(documents)
        return dict.fromkeys(accuracies, chance)
    gold = Counter(document["target"] for document in documents)
    share = gold[1] / len(documents)
    best = {
        **dict.fromkeys(accuracies, max(gold.values()) / len(documents)),
        # always "yes": all found, and a share of the answers right
        "f1": 2 * share / (1 + share),
        "mcc": 0.0,
    }
    return {name: value for name, value in best.items() if name in metrics}
