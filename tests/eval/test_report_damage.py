"""A record whose layout is right and whose details are damaged: one error, with the file and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from subquad.errors import OutputError
from subquad.eval.records import EvalRecord, Metric, save_record
from subquad.eval.report import load_run
from subquad.eval.speed import Timing

from .report_records import finetune_record, layer_record, loss_record, niah_record, provenance

Details = dict[str, Any]


def speed_record(model: str) -> EvalRecord:
    timings = [
        Timing(phase="decode", length=64, num_tokens=8, seconds=(1.0, 2.0, 3.0), ratios=(0.5, 0.6, 0.7)),
    ]
    return EvalRecord(
        task="speed",
        model=model,
        metrics={timing.metric_name: Metric(value=0.6, standard_error=0.1, num=3) for timing in timings},
        settings={"lengths": [64], "repeats": 3},
        details={"timings": [timing.to_dict() for timing in timings], "call": "one"},
        provenance=provenance(model),
    )


def each(name: str, change: Callable[[Details], object]) -> Callable[[Details], object]:
    """Change every entry of a list of the details."""
    return lambda details: [change(entry) for entry in details[name]]


DAMAGES: list[tuple[Callable[[str], EvalRecord], Callable[[Details], object], str]] = [
    (loss_record, lambda d: d.pop("row_sums"), "row_sums: Field required"),
    (loss_record, lambda d: d.update(row_sums=["a"]), "row_sums.0"),
    (loss_record, lambda d: d.update(row_sums=[[1.0], [1.0, 2.0]]), "number of buckets"),
    (loss_record, lambda d: d.update(position_buckets=[64]), "2 columns"),
    (loss_record, lambda d: d.update(row_sums=d["row_sums"][:1], row_tokens=d["row_tokens"][:1]), "255 tokens"),
    (loss_record, lambda d: d["row_sums"][0].reverse() or d["row_sums"][0].__setitem__(0, 9e9), "its metric is"),
    (niah_record, lambda d: d.pop("cells"), "details.cells is missing"),
    (niah_record, lambda d: d.update(cells=[{"length": "a"}]), "0.length"),
    (niah_record, each("cells", lambda cell: cell.update(log_probs=cell["log_probs"][:1])), "1 values of log_probs"),
    (layer_record, each("layers", lambda layer: layer.pop("far_shares")), "0.far_shares: Field required"),
    (layer_record, lambda d: d.pop("layers"), "no readable layers"),
    (finetune_record, lambda d: d.clear(), "labels or seeds"),
    (finetune_record, lambda d: d.update(seeds=[{"predictions": "01"}]), "100 digits"),
    (finetune_record, lambda d: d.update(seeds=[5]), "100 digits"),
    (speed_record, lambda d: d.update(timings=[]), "no ratios for decode_ratio_64"),
    (speed_record, lambda d: d.update(timings="x"), "no readable timings"),
    (speed_record, lambda d: d.pop("timings"), "no readable timings"),
    (speed_record, lambda d: d.pop("call"), "details.call"),
    (speed_record, lambda d: d["timings"][0].update(ratios=[0.5]), "1 ratios of 3 rounds"),
]


@pytest.mark.parametrize("make, damage, what", DAMAGES)
def test_damaged_details_are_one_error_with_the_file_and_the_fix(tmp_path, make, damage, what):
    record = make("student")
    path = save_record(record, tmp_path)
    assert load_run(tmp_path).records == [record]
    damage(record.details)
    save_record(record, tmp_path)
    with pytest.raises(OutputError) as error:
        load_run(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{path} is damaged: ")
    assert what in message
    assert message.endswith("Remove it and evaluate again.")
    assert "http" not in message


def test_a_model_with_room_for_no_length_is_not_damaged(tmp_path):
    speed = speed_record("student")
    save_record(
        speed.model_copy(update={"metrics": {}, "details": speed.details | {"timings": []}, "notes": ["no room"]}),
        tmp_path,
    )
    save_record(niah_record("student").model_copy(update={"metrics": {}, "details": {"cells": []}}), tmp_path)
    assert {record.task for record in load_run(tmp_path).records} == {"niah", "speed"}


def test_a_long_list_of_problems_is_cut(tmp_path):
    record = niah_record("student")
    record.details["cells"] = [{"length": "a"}] * 10
    save_record(record, tmp_path)
    with pytest.raises(OutputError, match="25 more"):
        load_run(tmp_path)
