"""The chunked loss against plain PyTorch on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.distill.losses import LossWeights, distillation_loss, next_token_targets, next_token_weights

BATCH, SEQ_LEN, HIDDEN, VOCAB = 2, 13, 6, 31


def make_inputs(seq_len: int = SEQ_LEN, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(BATCH, seq_len, HIDDEN, generator=generator) for _ in range(2))
    targets = torch.randint(0, VOCAB, (BATCH, seq_len), generator=generator)
    targets[torch.rand(BATCH, seq_len, generator=generator) < 0.3] = -100
    return student.requires_grad_(), teacher, targets


def make_head(seed: int = 1) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(HIDDEN, VOCAB, bias=False)


def plain_loss(student, teacher, targets, student_head, teacher_head, weights):
    """The definition, term by term, on the positions that count."""
    counts = targets != -100
    student_logits, teacher_logits = student_head(student)[counts], teacher_head(teacher)[counts]
    p = (teacher_logits / weights.temperature).softmax(-1)
    log_q = (student_logits / weights.temperature).log_softmax(-1)
    kl = (p * (p.log() - log_q)).sum(-1).mean() * weights.temperature**2
    distance = (student - teacher)[counts].norm(dim=-1) ** 2 / teacher[counts].norm(dim=-1) ** 2
    text = F.cross_entropy(student_logits, targets[counts])
    return weights.kl * kl + weights.ce * text + weights.hidden * distance.mean()


WEIGHTS = [
    LossWeights(),
    LossWeights(temperature=2.5),
    LossWeights(kl=0.7, ce=0.4),
    LossWeights(kl=0.0, ce=1.0),
    LossWeights(kl=0.5, hidden=0.3),
    LossWeights(kl=0.0, hidden=2.0, ce=0.1),
]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 26, 100])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_value_and_gradients(chunk_tokens, weights):
    student, teacher, targets = make_inputs()
    head, teacher_head = make_head(), make_head(2)
    expected = plain_loss(student, teacher, targets, head, teacher_head, weights)
    expected_grads = torch.autograd.grad(expected, [student, head.weight])

    teacher_hidden = teacher if weights.reads_teacher else None
    loss = distillation_loss(student, teacher_hidden, targets, head, teacher_head, weights, chunk_tokens)
    # scaled by 3, as a Trainer scales it under gradient accumulation
    grads = torch.autograd.grad(3 * loss, [student, head.weight])

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for grad, reference in zip(grads, expected_grads, strict=True):
        error = (grad / 3 - reference).norm() / reference.norm()
        assert error < 1e-5


@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(kl=0.5, ce=1.0), LossWeights(kl=0.1, hidden=1.0)])
def test_token_weights_count_tokens_several_times(weights):
    student, teacher, targets = make_inputs()
    head = make_head()
    counts = targets != -100
    token_weights = torch.arange(targets.numel(), dtype=torch.float32).reshape(targets.shape) / 7

    def one(position):
        only = torch.full_like(targets, -100)
        only[position] = targets[position]
        return plain_loss(student, teacher, only, head, head, weights)

    terms = [token_weights[tuple(at)] * one(tuple(at)) for at in counts.nonzero().tolist()]
    expected = sum(terms) / counts.sum()
    loss = distillation_loss(student, teacher, targets, head, head, weights, 5, token_weights=token_weights)
    torch.testing.assert_close(loss, expected)
    grads = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)


def test_weights_are_of_the_token_that_is_predicted():
    weights = torch.tensor([[1.0, 2.0, 3.0]])
    assert next_token_weights(weights).tolist() == [[2.0, 3.0, 0.0]]


def test_frozen_head_and_no_grad():
    student, teacher, targets = make_inputs()
    head = make_head().requires_grad_(False)
    loss = distillation_loss(student, teacher, targets, head, head, LossWeights(), 4)
    loss.backward()
    assert student.grad.abs().sum() > 0
    assert head.weight.grad is None
    with torch.no_grad():
        assert distillation_loss(student, teacher, targets, head, head, LossWeights(), 4) == loss.detach()


@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(ce=1.0)])
def test_loss_does_not_grow_with_length_or_batch(weights):
    student, teacher, targets = make_inputs()
    head, teacher_head = make_head(), make_head(2)
    once = distillation_loss(student, teacher, targets, head, teacher_head, weights, 7)
    longer = [torch.cat([x] * 3, dim=1) for x in (student, teacher, targets)]
    wider = [torch.cat([x] * 3, dim=0) for x in (student, teacher, targets)]
    for inputs in (longer, wider):
        torch.testing.assert_close(distillation_loss(*inputs, head, teacher_head, weights, 7), once, rtol=1e-5, atol=0)


def test_masked_positions_count_for_nothing():
    student, teacher, targets = make_inputs()
    head = make_head()
    clean = distillation_loss(student, teacher, targets, head, head, LossWeights(ce=1.0), 4)
    masked = targets == -100
    spoilt_teacher = teacher.masked_fill(masked[..., None], 1e3)
    spoilt_student = student.detach().masked_fill(masked[..., None], -1e3).requires_grad_()
    loss = distillation_loss(spoilt_student, spoilt_teacher, targets, head, head, LossWeights(ce=1.0), 4)
    assert loss == clean
    loss.backward()
    assert spoilt_student.grad[masked].abs().max() == 0
    assert spoilt_student.grad[~masked].abs().min() > 0


def test_everything_masked_is_zero_with_zero_gradient():
    student, teacher, targets = make_inputs()
    loss = distillation_loss(student, teacher, torch.full_like(targets, -100), make_head(), make_head(), LossWeights())
    loss.backward()
    assert loss == 0
    assert student.grad.abs().max() == 0


def test_equal_models_have_no_divergence():
    student, _, targets = make_inputs()
    head = make_head()
    loss = distillation_loss(student, student.detach(), targets, head, head, LossWeights(), 5)
    assert abs(loss.item()) < 1e-6


class LargestTensor(TorchDispatchMode):
    """Records the most elements any operation's result had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    seq_len, chunk_tokens = 64, 8
    student, teacher, targets = make_inputs(seq_len)
    head = make_head()
    assert chunk_tokens * VOCAB < BATCH * seq_len * HIDDEN < BATCH * seq_len * VOCAB
    with LargestTensor() as seen:
        distillation_loss(student, teacher, targets, head, head, LossWeights(ce=1.0), chunk_tokens).backward()
    assert seen.largest == BATCH * seq_len * HIDDEN


def test_bfloat16_hidden_states_give_a_float32_loss():
    student, teacher, targets = make_inputs()
    head = make_head()
    reference = plain_loss(student, teacher, targets, head, head, LossWeights())
    half = student.detach().bfloat16().requires_grad_()
    loss = distillation_loss(half, teacher.bfloat16(), targets, head.bfloat16(), head, LossWeights(), 4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, reference, rtol=2e-2, atol=0)


def test_targets_stop_at_documents_and_rows():
    input_ids = torch.tensor([[5, 6, 7, 8, 9]])
    position_ids = torch.tensor([[0, 1, 0, 1, 2]])
    expected = [[6, -100, 8, 9, -100]]
    assert next_token_targets(input_ids, position_ids, None).tolist() == expected
    labels = input_ids.masked_fill(position_ids == 0, -100)
    assert next_token_targets(input_ids, None, labels).tolist() == expected
    assert next_token_targets(input_ids, None, None).tolist() == [[6, 7, 8, 9, -100]]
