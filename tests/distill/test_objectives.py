"""The weights of tokens in stage 2: those the data gives, and what the teacher gains from far back."""

import pytest
import torch

from subquad.distill import Stage2Config, run_stage2
from subquad.distill.losses import LossWeights, token_log_probs
from subquad.distill.objectives import MOST_FAR_GAIN, LogitObjective
from subquad.errors import ConfigError
from subquad.layers import attention_mode, resolve_mixer
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM
from tests.distill.tiny import SIZES, tiny_config, tiny_dataset, tiny_model


def batch():
    rows = tiny_dataset()[:3]
    return {name: rows[name] for name in ("input_ids", "position_ids", "labels")}


def loss_of(far_weight=0.0, weights=None, **more):
    objective = LogitObjective(tiny_model(), None, weights or LossWeights(), 16, far_weight)
    return objective(**batch(), **more)["loss"]


def log_probs(model, mode):
    data = batch()
    with torch.no_grad(), attention_mode(model, mode):
        logits = model(data["input_ids"], position_ids=data["position_ids"], use_cache=False).logits
    targets = torch.nn.functional.pad(data["labels"][:, 1:], (0, 1), value=-100)
    found = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    return torch.where(targets == -100, 0.0, found), logits, targets


@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(kl=0.0, ce=1.0)])
def test_tokens_count_more_where_the_teacher_gains_from_far_back(weights):
    model = tiny_model()
    (teacher, teacher_logits, targets), (window, _, _), (student, logits, _) = (
        log_probs(model, mode) for mode in ("teacher", "window_only", "student")
    )
    gain = (teacher - window).clamp(0, MOST_FAR_GAIN)
    counts = targets != -100
    p = teacher_logits.softmax(-1)
    kl = (p * (teacher_logits.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)
    per_token = kl if weights.kl else -student
    assert (gain[counts] > 0.01).float().mean() > 0.2
    expected = ((1 + 0.7 * gain) * per_token)[counts].sum() / counts.sum()
    torch.testing.assert_close(loss_of(0.7, weights), expected, rtol=1e-4, atol=1e-6)
    assert loss_of(0.7, weights) > 1.01 * loss_of(0.0, weights)


def test_weights_of_the_data_and_of_the_gain_multiply():
    data_weights = torch.full_like(batch()["input_ids"], 2, dtype=torch.float32)
    torch.testing.assert_close(loss_of(0.7, loss_weights=data_weights), 2 * loss_of(0.7))
    torch.testing.assert_close(loss_of(loss_weights=data_weights), 2 * loss_of())
    first = torch.zeros_like(data_weights)
    # a row's first token is predicted by nobody
    first[:, 0] = 1.0
    assert loss_of(loss_weights=first) == 0


def test_log_probs_in_chunks():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(6, 31), torch.randn(2, 13, 6)
    targets = torch.randint(0, 31, (2, 13))
    targets[0, 3] = -100
    expected = head(hidden).log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    expected[0, 3] = 0
    for chunk_tokens in (1, 5, 100):
        torch.testing.assert_close(token_log_probs(hidden, targets, head, chunk_tokens), expected.detach())


def test_hidden_states_alone_need_the_teacher():
    model = tiny_model()
    objective = LogitObjective(model, None, LossWeights(kl=0.0, hidden=1.0), 16)
    assert objective(**batch())["loss"] > 0.01
    with torch.no_grad():
        same = LogitObjective(model.train(False), model, LossWeights(kl=0.0, hidden=1.0), 16)
        assert same(**batch())["loss"] == 0


def test_a_model_without_window_is_refused(tmp_path):
    mixer = resolve_mixer({"preset": "2mamba", "window": 0}).model_dump()
    pure = SubquadLlamaForCausalLM(SubquadLlamaConfig(**SIZES, mixers=[mixer] * 2))
    config = tiny_config("stage2", far_weight=1.0)
    with pytest.raises(ConfigError, match=r"far_weight 1.0: layers \[0, 1\] have window: 0"):
        run_stage2(pure, tiny_dataset(), config, tmp_path / "work", tmp_path / "log.jsonl")
    assert not (tmp_path / "work").exists()


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="far_weight must be at least 0, got -1"):
        Stage2Config(tokens=64, far_weight=-1)
    with pytest.raises(ConfigError, match="which full: true trains away"):
        Stage2Config(tokens=64, far_weight=1.0, full=True)
