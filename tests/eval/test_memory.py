"""Cache memory: measured against hand-computed bytes and the layers' formula."""

from __future__ import annotations

import pytest
import torch

from subquad.errors import ConfigError
from subquad.eval.memory import (
    cache_table,
    computed_cache_bytes,
    crossover_length,
    held_bytes,
    measure_cache_bytes,
)
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM

from .conftest import SIZES, make_converted

# 2 (key and value) x 2 layers x 2 key/value heads x head_dim 8 x 4 bytes
KV_BYTES_PER_TOKEN = 256


def test_kv_cache_of_a_plain_llama(llama):
    lengths = [1, 2, 17, 40]
    measured = measure_cache_bytes(llama, lengths, mode=None, chunk_size=8)
    assert measured == {length: KV_BYTES_PER_TOKEN * length for length in lengths}
    batch = measure_cache_bytes(llama, [5], mode=None, batch_size=3)
    assert batch == {5: 3 * 5 * KV_BYTES_PER_TOKEN}


def test_teacher_mode_holds_a_kv_cache(converted):
    assert measure_cache_bytes(converted, [33], "teacher", chunk_size=16) == {33: 33 * KV_BYTES_PER_TOKEN}


@pytest.mark.parametrize("preset", ["2mamba", "mamba2s", "taylor"])
@pytest.mark.parametrize("window", [0, 8])
def test_linear_student_is_constant_and_equals_the_formula(preset, window):
    model = make_converted({"preset": preset, "window": window})
    measured = measure_cache_bytes(model, [9, 40, 90], chunk_size=16)
    assert len(set(measured.values())) == 1
    assert measured == {length: computed_cache_bytes(model, length, student=True) for length in measured}


def test_2mamba_state_by_hand():
    model = make_converted({"preset": "2mamba", "window": 0, "offset": False, "conv_width": 1})
    # per layer and key/value head: 8 * 9 / 2 rows, each 8 values and a normaliser, float32
    assert measure_cache_bytes(model, [20]) == {20: 2 * 2 * 36 * (8 + 1) * 4}


def test_computed_kv_bytes(converted):
    assert computed_cache_bytes(converted, 1000, student=False) == 1000 * KV_BYTES_PER_TOKEN
    assert computed_cache_bytes(converted, 10, student=False, batch_size=4) == 40 * KV_BYTES_PER_TOKEN


def test_held_bytes_finds_tensors_anywhere_and_counts_storage_once():
    class Holder:
        def __init__(self):
            self.deep = {"a": [torch.zeros(10), (torch.zeros(3, dtype=torch.float64),)], "n": 5, "s": "text"}
            self.alias = self.deep["a"][0][2:4]
            self.cycle = self
            self.module = torch.nn.Linear(50, 50)

    assert held_bytes([Holder(), None]) == 10 * 4 + 3 * 8
    assert held_bytes(torch.zeros(1000)[:1]) == 4000


def test_crossover_is_the_first_smaller_length():
    assert crossover_length(lambda _: 1000, lambda n: 10 * n) == 101
    assert crossover_length(lambda _: 999, lambda n: 10 * n) == 100
    assert crossover_length(lambda n: 500 + 4 * n, lambda n: 10 * n) == 84
    assert crossover_length(lambda n: 500 + 10 * n, lambda n: 10 * n) is None


def test_table_measures_short_and_computes_long(converted):
    calls = []
    table, notes = cache_table(
        converted, [16, 64, 5000], longest_measured=64, progress=lambda *call: calls.append(call)
    )
    assert notes == []
    assert table.measured_lengths == [16, 64]
    assert table.kv == {n: n * KV_BYTES_PER_TOKEN for n in (16, 64, 5000)}
    assert len(set(table.student.values())) == 1
    assert table.crossover_length == table.student[16] // KV_BYTES_PER_TOKEN + 1
    assert calls[-1] == (128, 128)
    assert table.dtype == "float32"


def test_a_wrong_formula_is_noted(converted, monkeypatch):
    monkeypatch.setattr("subquad.eval.memory.cache_bytes", lambda *_: 1)
    table, notes = cache_table(converted, [16], longest_measured=64)
    assert len(notes) == 2
    assert "16 tokens" in notes[0]
    assert table.kv == {16: 16 * KV_BYTES_PER_TOKEN}


def test_hybrid_grows_by_its_softmax_layer():
    mixers = [make_converted().config.mixers[0], None]
    hybrid = SubquadLlamaForCausalLM(SubquadLlamaConfig(**SIZES, mixers=mixers)).eval()
    measured = measure_cache_bytes(hybrid, [20, 50])
    assert measured[50] - measured[20] == 30 * KV_BYTES_PER_TOKEN / 2
    assert measured[50] == computed_cache_bytes(hybrid, 50, student=True)


@pytest.mark.parametrize("lengths", [[], [0, 5]])
def test_bad_lengths_are_refused(llama, lengths):
    with pytest.raises(ConfigError, match="lengths"):
        measure_cache_bytes(llama, lengths, mode=None)
