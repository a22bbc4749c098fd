"""The score of kept keys is a regression on the teacher's attention, and it chooses better keys."""

import pytest
import torch

from subquad.convert.calibrate import calibrate, calibration_tokens
from subquad.convert.key_scores import MIN_FAR_QUERIES, MIN_TOKENS, KeyScoreFit, far_attention, fit_key_scores
from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.layers import attention_mode, converted_layers, resolve_mixer
from subquad.layers.kept_keys import token_features
from subquad.layers.sequence import SequenceInfo
from tests.tiny_llama import tiny_teacher, tiny_tokens


def convert(teacher, **parts):
    mixer = resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2, "kept_keys": 6, **parts})
    return apply_plan(teacher, plan_conversion(teacher.config, mixer))


def inputs_of(model, ids, **kwargs):
    """Return layer 0 and the heads it is given."""
    found = []
    layer = converted_layers(model)[0]
    hook = layer.register_forward_pre_hook(
        lambda module, args, named: found.append(
            module.inputs(named["hidden_states"], named["position_embeddings"], named.get("sequence"))
        ),
        with_kwargs=True,
    )
    with torch.no_grad(), attention_mode(model, "teacher"):
        model(ids, use_cache=False, **kwargs)
    hook.remove()
    return layer, found[0]


def test_attention_from_beyond_the_window():
    model = convert(tiny_teacher())
    layer, inputs = inputs_of(model, tiny_tokens(2, 60))
    largest, measured = far_attention(layer, inputs, 1)
    q, k = inputs.rotate(inputs.q, inputs.k)
    group = layer.split.group_size
    expected = torch.zeros(60, 2)
    for t in range(60):
        for head in range(q.shape[2]):
            weights = (q[1, t, head] @ k[1, : t + 1, head // group].T * layer.scaling).softmax(0)
            for s in range(max(0, t - 7)):
                expected[s, head // group] = max(expected[s, head // group], weights[s])
    counts = torch.tensor([max(60 - s - 8, 0) for s in range(60)])
    torch.testing.assert_close(largest, expected)
    assert measured.tolist() == [s >= 2 and counts[s] >= MIN_FAR_QUERIES for s in range(60)]


def test_padding_and_other_documents_are_left_out():
    model = convert(tiny_teacher())
    ids = tiny_tokens(2, 120)
    layer, alone = inputs_of(model, ids[:, 50:])
    largest, measured = far_attention(layer, alone, 0)
    positions = torch.cat([torch.arange(50), torch.arange(70)])[None].expand(2, -1)
    packed = inputs_of(model, ids, position_ids=positions)[1]
    found, named = far_attention(layer, packed, 0)
    torch.testing.assert_close(found[50:], largest)
    assert torch.equal(named[50:], measured)
    padded = alone._replace(sequence=SequenceInfo(real=(torch.arange(70) >= 20).expand(2, -1)))
    shorter = inputs_of(model, ids[:, 70:])[1]
    found, named = far_attention(layer, padded, 0)
    expected, wanted = far_attention(layer, shorter, 0)
    assert not named[:20].any()
    assert torch.equal(named[20:], wanted)
    # rotations differ by a constant, which attention does not see
    torch.testing.assert_close(found[20:][wanted], expected[wanted], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("exact", [[], [1]])
def test_the_fit_is_least_squares(exact):
    model = convert(tiny_teacher(), exact_kv_heads=exact)
    layer, inputs = inputs_of(model, tiny_tokens(4, 200))
    fit = KeyScoreFit(layer)
    fit.add(inputs)
    start = layer.mixer.key_score(inputs.select(layer.split, layer.split.mixed))
    fit.write()
    kept = inputs.select(layer.split, layer.split.mixed)
    rows = [far_attention(layer, kept, row) for row in range(4)]
    features = token_features(kept)
    assert features.shape[-1] == 36 + 3 * (2 - len(exact))
    torch.testing.assert_close(features[..., 36 : 36 + kept.k.shape[2]], kept.k.norm(dim=-1))
    torch.testing.assert_close(start, -kept.k.norm(dim=-1), atol=1 / 512, rtol=0)
    x = torch.cat([features[row, measured] for row, (_, measured) in enumerate(rows)])
    for head in range(2 - len(exact)):
        values = kept.v[:, :, head].norm(dim=-1)
        y = torch.cat([(largest[:, head] * values[row])[at].log() for row, (largest, at) in enumerate(rows)])
        predicted = x @ layer.mixer.key_score.weight[head]
        # better than any one number, and as good as a plain solver's
        centred = (y - y.mean()) - (predicted - predicted.mean())
        ones = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
        best = torch.linalg.lstsq(ones, y.double()[:, None]).solution[:, 0]
        rest = y.double() - ones @ best
        assert centred.square().mean() < 0.98 * y.var()
        assert centred.double().square().mean() < 1.1 * rest.square().mean() + 0.01 * y.var()


def test_too_few_keys_leave_the_start():
    model = convert(tiny_teacher())
    layer, inputs = inputs_of(model, tiny_tokens(1, 45))
    start = layer.mixer.key_score.weight.clone()
    fit = KeyScoreFit(layer)
    fit.add(inputs)
    fit.write()
    assert 0 < fit.num_tokens < MIN_TOKENS
    assert torch.equal(layer.mixer.key_score.weight, start)


def test_it_is_fitted_to_the_weights_of_the_model():
    """As after training: adapters that are on count, and nothing but the scores changes."""
    model = convert(tiny_teacher())
    rows = [{"input_ids": tiny_tokens(4, 200), "labels": torch.zeros(4, 200)}]
    found = fit_key_scores(model, rows)
    assert found.tokens == 800
    assert found.kept
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for layer in converted_layers(model):
            layer.k_proj.weight.neg_()
    fit_key_scores(model, rows)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, first[name])}
    scores = {name for name in first if name.endswith("key_score.weight")}
    assert changed == scores | {name for name in first if name.endswith("k_proj.weight")}
    assert fit_key_scores(convert(tiny_teacher(), kept_keys=0), rows) is None


def test_calibration_fits_it_and_counts_the_pass():
    teacher = tiny_teacher()
    rows = [{"input_ids": tiny_tokens(4, 200)}]
    model = convert(teacher)
    start = [layer.mixer.key_score.weight.clone() for layer in converted_layers(model)]
    seen = []
    result = calibrate(model, rows, on_batch=seen.append)
    assert sum(seen) == calibration_tokens(model, rows) == 3 * result.tokens
    assert result.keys.tokens == result.tokens
    changed = [
        not torch.equal(layer.mixer.key_score.weight, before)
        for layer, before in zip(converted_layers(model), start, strict=True)
    ]
    assert all(changed) == result.keys.kept


def test_scores_that_raise_the_loss_are_undone(monkeypatch):
    model = convert(tiny_teacher())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    losses = iter([2.0, 2.5])
    monkeypatch.setattr("subquad.convert.key_scores.mean_loss", lambda model, rows: next(losses))
    with pytest.warns(UserWarning, match=r"raised the loss on its own rows from 2\.0000 to 2\.5000 and was undone"):
        found = fit_key_scores(model, [{"input_ids": tiny_tokens(4, 200)}])
    assert not found.kept
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_scores_outlive_settings_that_are_undone(monkeypatch):
    model = convert(tiny_teacher())
    losses = iter([2.0, 2.5])
    monkeypatch.setattr("subquad.convert.calibrate.mean_loss", lambda model, rows: next(losses))
    start = [layer.mixer.key_score.weight.clone() for layer in converted_layers(model)]
    with pytest.warns(UserWarning, match="was undone"):
        result = calibrate(model, [{"input_ids": tiny_tokens(4, 200)}])
    assert not result.kept
    assert result.keys.kept
    for layer, before in zip(converted_layers(model), start, strict=True):
        assert not torch.equal(layer.mixer.key_score.weight, before)


def test_too_few_tokens_are_named():
    with pytest.warns(UserWarning, match=r"kept keys of layers \[0, 1\] .* 4 tokens could be measured.* needs 256"):
        fit_key_scores(convert(tiny_teacher()), [{"input_ids": tiny_tokens(1, 45)}])
