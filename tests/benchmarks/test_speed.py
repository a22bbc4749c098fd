"""What is timed, and the counts behind its rates."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.suite import contenders, work
from benchmarks.suite.cases import Session
from benchmarks.suite.contenders import (
    Sizes,
    call_for_pass,
    draw_tensors,
    public_kernels,
    sdpa_forward,
    subquad_forward,
)
from benchmarks.suite.end_to_end import SCALES, num_parameters
from benchmarks.suite.llamas import random_student
from benchmarks.suite.settings import BUDGETS_S, HARD_LIMIT_S, Settings
from benchmarks.suite.speed import GRIDS, SQUARE, timing_cases
from benchmarks.suite.speed_checks import check_cases
from tests.benchmarks.fakes import FakeHardware

CPU = torch.device("cpu")
SIZES = Sizes(tokens=24, head_dim=8, groups=2, kv_heads=2)


def test_full_run_measures_what_is_asked_for():
    grid = GRIDS["full"]
    assert set(grid.configs) == {(64, 4), (64, 1), (128, 4), (128, 1)}
    assert grid.lengths == (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    assert (grid.chunk_sizes, grid.sweep_tokens) == ((128, 256, 512, 1024), 32768)
    names = [case.name for case in timing_cases(Settings("full"))]
    assert len(set(names)) == len(names)
    assert names[0] == "peaks"
    assert "forward_backward d128 G1 T131072" in names


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_budgets_end_before_the_limit(mode):
    assert sum(BUDGETS_S[mode].values()) <= HARD_LIMIT_S[mode] < 480


@pytest.mark.parametrize("mode", ["full", "quick", "toy"])
def test_every_timed_shape_is_checked(mode):
    checks = {case.name for case in check_cases(Settings(mode))}
    for head_dim, groups in GRIDS[mode].configs:
        assert {f"check {form} d{head_dim} G{groups}" for form in ("chunks", "whole", "prefill", "step")} <= checks
    assert all(not case.alone for case in check_cases(Settings(mode)))
    assert all(case.alone for case in timing_cases(Settings(mode)))


def test_flops_of_flash_attention():
    sizes = Sizes(tokens=8192, head_dim=64, groups=4)
    per_head = 2 * 64 * 8192**2
    assert work.softmax_flops(sizes, "forward") == per_head * 32
    assert work.softmax_flops(sizes, "forward_backward") == 3.5 * per_head * 32


def test_flops_of_the_kernels_follow_the_chunk():
    sizes = Sizes(tokens=32768, head_dim=64, groups=4)
    products, chunk = 64 * 65 // 2, 512
    chunks = 32768 // chunk
    state = 2 * products * 64 * (1 + 1 / 4) * (chunks - 1) / chunks
    expected = (state + 2 * 64 * chunk) * 32768 * 32
    assert work.subquad_flops(sizes, "forward", (2,), chunk) == pytest.approx(expected)
    short = Sizes(tokens=1024, head_dim=64, groups=4)
    assert work.chosen_chunk_size(short, "forward", (2,)) == 1024
    assert work.subquad_flops(short, "forward", (2,)) == work.softmax_flops(short, "forward")
    assert work.chosen_chunk_size(short, "prefill", (2,)) < 1024


def test_bytes_of_decoding():
    sizes = Sizes(tokens=4096, head_dim=64, groups=4, batch=2)
    state = 2080 * 65 * 4
    assert work.step_bytes(sizes, (2,)) == 2 * state * 8 * 2
    assert work.buffered_bytes(sizes, (2,), 32) == (state + 32 * 2 * 64 * 2) * 8 * 2
    assert work.cache_bytes(sizes) == 2 * 4096 * 64 * 2 * 8 * 2


def test_parameters_of_the_large_model():
    shape = SCALES["toy"].shape
    model = random_student(shape, "2mamba", device=CPU, dtype=torch.float32, seed=0)
    counted = sum(p.numel() for name, p in model.named_parameters() if ".mixer." not in name and "norm" not in name)
    assert num_parameters(shape) == counted
    assert 1.0e9 < num_parameters(SCALES["full"].shape) < 1.3e9


@pytest.mark.parametrize("queries, causal", [(None, True), (1, False)])
def test_sdpa_is_softmax_over_what_a_query_may_see(queries, causal):
    tensors = draw_tensors(SIZES, CPU, queries=queries)
    out = sdpa_forward(tensors, None, causal=causal)()
    q, k, v = (x.float().transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = q @ k.mT * 8**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    assert out.shape == tensors.d_out.shape
    assert (out.float() - expected).norm() < 0.02 * expected.norm()


def test_sdpa_runs_with_the_kernel_it_is_told(monkeypatch):
    seen = []

    class Chosen:
        def __init__(self, kernel):
            seen.append(kernel)

        def __enter__(self): ...

        def __exit__(self, *error): ...

    monkeypatch.setattr(contenders, "sdpa_kernel", Chosen)
    sdpa_forward(draw_tensors(SIZES, CPU), SDPBackend.FLASH_ATTENTION)()
    assert seen == [SDPBackend.FLASH_ATTENTION]


def test_a_training_pass_takes_gradients_and_the_others_do_not():
    tensors = draw_tensors(SIZES, CPU, grad=True)
    forward = subquad_forward(tensors, SQUARE, "torch")
    grads = call_for_pass(forward, tensors, "forward_backward", tensors.leaves())()
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in tensors.leaves()]
    assert not call_for_pass(forward, tensors, "forward", [])().requires_grad


def test_public_kernels_that_are_absent_are_said():
    calls, absent = public_kernels(draw_tensors(SIZES, CPU), CPU)
    assert calls == {}
    assert set(absent) == {"retention", "fla_simple_gla"}


@pytest.fixture
def public_packages(monkeypatch):
    """Put packages with the public signatures in place."""

    def power_retention(
        Q,
        K,
        V,
        log_G=None,
        initial_state=None,
        return_final_state=False,
        deg=2,
        scale=None,
        chunk_size=None,
        switch_over_seq_len=None,
    ):
        assert log_G.dtype == torch.float32
        return Q + V.repeat_interleave(2, dim=2) + K.sum() + log_G.sum() + deg

    def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None):
        assert q.shape == k.shape == v.shape
        assert g.shape == q.shape[:3]
        return q + k + v + g[..., None].to(q.dtype), None

    for name, functions in {
        "retention": {"power_retention": power_retention},
        "fla": {},
        "fla.ops": {},
        "fla.ops.simple_gla": {"chunk_simple_gla": chunk_simple_gla},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: object())


def test_public_kernels_that_are_there_are_called_with_our_tensors(public_packages):
    tensors = draw_tensors(SIZES, CPU, grad=True)
    calls, absent = public_kernels(tensors, torch.device("cuda"))
    assert absent == {}
    for forward in calls.values():
        grads = call_for_pass(forward, tensors, "forward_backward", tensors.leaves())()
        assert grads[0].shape == tensors.q.shape


def test_a_public_kernel_that_cannot_be_imported_is_no_failure(public_packages, monkeypatch):
    monkeypatch.setitem(sys.modules, "retention", ModuleType("retention"))
    calls, absent = public_kernels(draw_tensors(SIZES, CPU), torch.device("cuda"))
    assert "fla_simple_gla" in calls
    assert absent["retention"].startswith("AttributeError")


def test_what_does_not_fit_in_memory_is_skipped_with_a_reason():
    hardware = FakeHardware()
    hardware.free_bytes = lambda: 2**30
    (case,) = (case for case in timing_cases(Settings("full")) if case.name == "forward d64 G4 T131072")
    (row,) = case.run(Session(Settings("full"), hardware))
    assert row.status == "skipped"
    assert row.reason.startswith("needs about")


def test_a_failing_contender_of_ours_is_an_error_and_another_project_s_is_not(monkeypatch):
    from benchmarks.suite import speed

    def broken():
        raise RuntimeError("no kernel")

    monkeypatch.setattr(speed, "public_kernels", lambda tensors, device: ({"retention": broken}, {}))
    monkeypatch.setattr(speed, "subquad_forward", lambda *args, **kwargs: broken)
    session = Session(Settings("toy"), FakeHardware())
    rows = speed.measure_others("forward", SIZES, draw_tensors(SIZES, CPU), session)
    statuses = {row.what: row.status for row in rows}
    assert statuses["retention"] == "skipped"
    assert {statuses[f"subquad {score}"] for score in speed.SCORES} == {"error"}


def test_decoding_keeps_lengths_that_do_not_fit_as_skipped_rows(monkeypatch):
    from benchmarks.suite import speed

    grid = GRIDS["toy"]
    hardware = FakeHardware()
    fits = Sizes(tokens=32, head_dim=8, groups=2, kv_heads=2, batch=2).qkv_bytes()
    hardware.free_bytes = lambda: 2.6 * fits
    monkeypatch.setattr(
        hardware, "time_once", lambda call, head_start: (call(), SimpleNamespace(ms=1.0, enqueue_ms=1.0))[1]
    )
    sizes = Sizes(tokens=1, head_dim=8, groups=2, kv_heads=grid.kv_heads, batch=2)
    rows = speed.measure_decode(sizes, Session(Settings("toy"), hardware))
    found = {(row.what, row.config["tokens"]): row.status for row in rows}
    assert found == {
        ("subquad_step", 1): "ok",
        ("subquad_buffered", 5): "ok",
        ("sdpa_flash", 32): "ok",
        ("sdpa_flash", 64): "skipped",
    }
