"""What the formula does not show: segments, half operands, determinism, PyTorch's own machinery, wrong kernels."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch.utils.checkpoint import checkpoint

from subquad.errors import ConfigError
from subquad.kernels import poly_attention
from subquad.kernels.triton import attention, autograd, decode, prepare, problem, states
from subquad.kernels.triton.problem import Operands
from tests.kernels.interpreted.common import TOLERANCE, check, on_triton, small_case
from tests.kernels.oracle import definition, relative_rms, with_gradients, worst


@pytest.fixture
def short_segments(monkeypatch):
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 1)


@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
def test_a_sequence_cut_into_segments(short_segments, with_state):
    check(small_case(score="offset", decay="mixed", groups=2, with_state=with_state, tokens=40))


def test_the_workspace_stays_below_a_gigabyte(monkeypatch):
    made = []
    monkeypatch.setattr(attention, "Segment", lambda *args: made.append(args) or args)
    q = torch.empty(1, 131072, 8, 16, device="meta")
    weight = torch.empty(1, 131072, 8, device="meta")
    coefs = torch.empty(3, 8, device="meta")
    whole = attention.make_problem(q, q, q, weight, None, coefs, (2,), 1.0, 16, "default")
    # At chunks of 16 tokens the states alone would take 8192 chunks x 8 heads x 136 x 16 numbers, forward and backward.
    assert len(attention.segments(whole)) > 1
    assert made[0][1] == 0
    assert made[-1][2] == 131072
    assert all(left[2] == right[1] for left, right in itertools.pairwise(made))


@pytest.mark.parametrize("normalize", [False, True])
def test_half_precision_operands(monkeypatch, normalize):
    # bfloat16 products are wrong in the interpreter; float16 ones take the same path through the kernels.
    monkeypatch.setattr(attention, "operands_for", lambda *_: Operands(torch.float16, "ieee"))
    check(small_case(score="taylor", groups=2, with_state=True, normalize=normalize), torch.float16)


def test_two_runs_give_the_same_bits():
    case = small_case(score="offset", groups=3, with_state=True, normalize=True)
    first, second = (with_gradients(case, on_triton, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rows_that_see_no_key():
    case = small_case(score="square", tokens=20, decay="none")
    case.key_weight[:, :5] = 0.0
    case = case.mapped(lambda x: x.float().requires_grad_())
    out = poly_attention(
        case.q, case.k, case.v, coefs=case.coefs, key_weight=case.key_weight, chunk_size=16, backend="triton"
    ).out
    assert (out[:, :5] == 0).all()
    grads = torch.autograd.grad(out.sum(), [case.q, case.k, case.v])
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :5] == 0).all()


def test_the_guard_is_that_of_the_other_forms():
    # Keys with a strong common mean and queries orthogonal to it: the sum of weights cancels.
    torch.manual_seed(0)
    mean = torch.nn.functional.one_hot(torch.tensor(0), 16) * 30.0
    k = torch.randn(1, 40, 1, 16) * 1e-3 + mean
    q = torch.randn(1, 40, 2, 16)
    q[..., 0] = 0.0
    v = torch.randn(1, 40, 1, 16)
    run = functools.partial(poly_attention, q, k, v, coefs=(0.0, 0.0, 1.0))
    expected = run(backend="torch", form="quadratic")
    for how in ({"chunk_size": 16, "form": "chunked"}, {"form": "auto"}):
        actual = run(backend="triton", **how)
        assert relative_rms(actual.out, expected.out) < 1e-5


_BLOCK_PAIRS, _CUMULATED_DECAY = problem.block_pairs, prepare.cumulated_decay


def test_packed_sequences():
    case = small_case(score="taylor", groups=2, tokens=30).mapped(lambda x: x.float())
    bounds = torch.tensor([0, 7, 8, 21, 30])
    run = functools.partial(
        poly_attention, case.q, case.k, case.v, coefs=case.coefs, cu_seqlens=bounds, chunk_size=16, form="chunked"
    )
    assert relative_rms(run(backend="triton").out, run(backend="torch").out) < 1e-5


CASES = {
    "one token": {"tokens": 1},
    "one token, many heads": {"tokens": 1, "groups": 9, "score": "offset"},
    "buffered": {"tokens": 11, "queries": 1, "groups": 3, "score": "offset"},
    "a few tokens": {"tokens": 5, "score": "linear", "decay": "strong", "value_dim": 20},
    "packed": {"tokens": 9, "queries": 2, "decay": "resets"},
    "odd width": {"tokens": 4, "head_dim": 5, "value_dim": 4, "decay": "none"},
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_decoding(monkeypatch, name, normalize):
    monkeypatch.setattr(autograd, "run_forward", None)
    case = small_case(batch=2, kv_heads=2, with_state=True, normalize=normalize, **CASES[name])
    with torch.no_grad():
        actual = on_triton(case.mapped(lambda x: x.float()), form="auto")
    error, where = worst(actual, definition(case))
    assert error < TOLERANCE[torch.float32], f"{where} is off by {error:.2e}"


def test_decoding_one_by_one_is_the_whole():
    case = small_case(score="taylor", tokens=6, groups=2, with_state=True).mapped(lambda x: x.float())
    state, outs = case.state, []
    with torch.no_grad():
        for t in range(6):
            parts = (x[:, t : t + 1] for x in (case.q, case.k, case.v, case.log_decay))
            step = poly_attention(
                *parts,
                coefs=case.coefs,
                key_weight=case.key_weight[:, t : t + 1],
                initial_state=state,
                output_final_state=True,
                normalize=False,
                backend="triton",
            )
            state = step.final_state
            outs.append(step.out)
        whole = on_triton(case)
    assert relative_rms(torch.cat(outs, 1), whole["out"]) < 1e-5
    assert relative_rms(state.values, whole["state.values"]) < 1e-5


def test_autocast_chooses_the_operands():
    q = torch.randn(1, 20, 2, 16, requires_grad=True)
    k, v = torch.randn(2, 1, 20, 2, 16)
    run = functools.partial(poly_attention, coefs=(0.0, 0.0, 1.0), chunk_size=16, backend="triton")
    with torch.autocast("cpu", torch.float16):
        result = run(q, k, v)
    assert result.out.dtype == torch.float16
    result.out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    assert torch.equal(result.out, run(q.half(), k.half(), v.half()).out)


def _arguments(state: bool) -> tuple:
    case = small_case(tokens=20, groups=2, with_state=state).mapped(lambda x: x.float().requires_grad_())
    values = case.values.detach().flatten(0, 1).requires_grad_() if state else None
    normaliser = case.normaliser.detach().flatten(0, 1).requires_grad_() if state else None
    coefs = torch.tensor([[1.0], [1.0], [0.5]]).expand(3, 2).contiguous().requires_grad_()
    tensors = (case.q, case.k, case.v, case.key_weight, coefs, case.log_decay, values, normaliser)
    return (*tensors, [0, 1, 2], 0.25)


@pytest.mark.parametrize("state", [False, True])
def test_the_operators_keep_pytorchs_rules(state):
    # Schema, fake tensors and autograd registration are what torch.compile, FSDP and checkpointing rely on.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        autograd._poly_forward, (*_arguments(state), 16, "default", True, state), test_utils=utilities
    )
    if state:
        tensors = [x.detach() if isinstance(x, torch.Tensor) else x for x in _arguments(True)]
        few = [x[:, :1] if x.dim() > 2 and x.shape[1] == 20 else x for x in tensors[:8]]
        torch.library.opcheck(autograd._poly_decode, (*few, [0, 1, 2], 0.25, True, True), test_utils=utilities)


def test_compiled_and_checkpointed_gradients_are_the_same():
    case = small_case(tokens=20, groups=2).mapped(lambda x: x.float().requires_grad_())

    def attend(q, k, v, log_decay):
        return poly_attention(q, k, v, log_decay, coefs=case.coefs, chunk_size=16, backend="triton").out

    inputs = (case.q, case.k, case.v, case.log_decay)
    plain = attend(*inputs)
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    for other in (
        torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs),
        checkpoint(attend, *inputs, use_reentrant=False),
    ):
        assert torch.equal(other, plain)
        found = torch.autograd.grad(other.square().sum(), inputs)
        assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


class _Layer(torch.nn.Module):
    """Projections around the op."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 48, bias=False)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 1, 16)).unbind(2)
        return poly_attention(q, k, v, coefs=(1.0, 1.0, 0.5), chunk_size=16, backend="triton").out


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_data_parallel_gradients_are_the_same(tmp_path, wrap):
    torch.manual_seed(0)
    layer, x = _Layer(), torch.randn(1, 20, 16)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if wrap == "ddp":
            layer = torch.nn.parallel.DistributedDataParallel(layer)
        else:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            layer = torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        layer(x).square().sum().backward()
        (found,) = (parameter.grad for parameter in layer.parameters())
        found = found.full_tensor() if wrap == "fsdp" else found
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(found, expected)


MUTANTS = {
    "a block of rows left out": (problem, "block_pairs", lambda *args: _BLOCK_PAIRS(*args)[:-1]),
    "decay off by one": (attention, "cumulated_decay", lambda *args: [x.roll(1, 1) for x in _CUMULATED_DECAY(*args)]),
    "products counted once": (states, "multiplicity", lambda head_dim, like: like.new_ones(136)),
    "decay of the state forgotten": (
        prepare,
        "_chunk_totals",
        lambda segment: segment.problem.weight.new_ones(segment.problem.num_states, segment.num_chunks),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(monkeypatch, name):
    module, function, wrong = MUTANTS[name]
    monkeypatch.setattr(module, function, wrong)
    case = small_case(score="taylor", with_state=True)
    error, _ = worst(with_gradients(case, on_triton, torch.float32), with_gradients(case, definition))
    assert error > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "change, told",
    [
        ({"backend": "cuda"}, "must be one of auto, torch, triton"),
        ({"precision": "low"}, "must be one of default, high"),
        ({"coefs": (1.0, 1.0, 0.5, 0.1), "backend": "triton"}, "power 3"),
    ],
)
def test_wrong_arguments(change, told):
    x = torch.randn(1, 4, 1, 16)
    with pytest.raises(ConfigError, match=told):
        poly_attention(x, x, x, **{"coefs": (0.0, 0.0, 1.0)} | change)


def test_wide_heads_are_left_to_pytorch():
    x = torch.randn(1, 4, 1, 160)
    with pytest.raises(ConfigError, match="head_dim 160"):
        poly_attention(x, x, x, coefs=(0.0, 1.0), backend="triton")


def test_the_row_table_of_decoding_follows_the_state():
    table = decode.row_table(3, (0, 1, 2), torch.device("cpu")).tolist()
    assert table == [[3, 3], [0, 3], [1, 3], [2, 3], [0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 2]]
