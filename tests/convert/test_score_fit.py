"""The far part's score is fitted: its keys have mean 0, and its narrow maps keep as much of the score as any can."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from subquad.convert.calibrate import calibrate, calibrate_layer, calibration_tokens
from subquad.convert.export import export_student
from subquad.convert.plan import plan_conversion
from subquad.convert.score_fit import RIDGE, ScoreFit, fit_scores
from subquad.convert.surgery import apply_plan
from subquad.layers import converted_layers, resolve_mixer
from subquad.layers.sequence import SequenceInfo
from tests.convert.test_key_scores import inputs_of
from tests.convert.tiny_students import CARD
from tests.tiny_llama import tiny_teacher, tiny_tokens

NARROW = {"qk_maps": False, "feature_map": "learned", "feature_dim": 4}


def convert(**parts):
    teacher = tiny_teacher()
    mixer = resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2, "conv_width": 1, "center_keys": True, **parts})
    return apply_plan(teacher, plan_conversion(teacher.config, mixer))


def far_pairs(layer, inputs):
    """Return rotated queries that have a far part, and keys that are no sinks, of unpadded rows."""
    inputs = inputs.select(layer.split, layer.split.mixed)
    q, k = inputs.rotate(inputs.q, inputs.k, layer.mixer_config.rope)
    return q[:, 10:].flatten(0, 1), k[:, 2:].flatten(0, 1)


def fit(layer, *batches, maps=False):
    found = ScoreFit(layer, maps)
    for inputs in batches:
        found.add(inputs)
    found.write()


@pytest.mark.parametrize("rope", ["keep", "drop"])
def test_keys_have_mean_zero(rope):
    model = convert(exact_kv_heads=[1], rope=rope)
    layer, inputs = inputs_of(model, tiny_tokens(4, 60))
    assert not layer.mixer.score.key_center.any()
    fit(layer, inputs)
    k = far_pairs(layer, inputs)[1]
    assert k.mean(0).norm() > 0.1
    torch.testing.assert_close(layer.mixer.score.key_center, k.mean(0))
    centred = layer.mixer.score.map_keys(k[None])
    torch.testing.assert_close(centred.mean(1), torch.zeros_like(centred.mean(1)), atol=1e-5, rtol=0)


def test_padding_is_left_out_and_documents_have_sinks_of_their_own():
    model = convert()
    ids = tiny_tokens(2, 60)
    layer, inputs = inputs_of(model, ids)
    fit(layer, inputs._replace(sequence=SequenceInfo(real=(torch.arange(60) >= 20).expand(2, -1))))
    k = inputs.rotate(inputs.q, inputs.k)[1]
    torch.testing.assert_close(layer.mixer.score.key_center, k[:, 22:].mean((0, 1)))
    positions = torch.cat([torch.arange(25), torch.arange(35)])[None].expand(2, -1)
    packed = inputs_of(model, ids, position_ids=positions)[1]
    fit(layer, packed)
    k = packed.rotate(packed.q, packed.k)[1]
    real = torch.cat([k[:, 2:25], k[:, 27:]], dim=1)
    torch.testing.assert_close(layer.mixer.score.key_center, real.mean((0, 1)))


def score_error(layer, q, k):
    """Return the mean squared error of the far score against the centred teacher's, over all pairs, per head."""
    score, group = layer.mixer.score, layer.split.group_size
    own = torch.einsum("the,she->hts", score.map_queries(q[None])[0], per_query(score.map_keys(k[None])[0], group))
    own = own * layer.mixer_config.feature_dim**-0.5
    exact = torch.einsum("thd,shd->hts", q, per_query(k - score.key_center, group)) * layer.scaling
    return (own - exact).square().mean((1, 2)), exact.square().mean((1, 2))


def per_query(k, group):
    return k.repeat_interleave(group, dim=1)


def test_narrow_maps_are_least_squares():
    model = convert(**NARROW, temperature=False)
    layer, inputs = inputs_of(model, tiny_tokens(6, 100))
    q, k = far_pairs(layer, inputs)
    before = score_error(layer, q, k)[0]
    fit(layer, inputs, maps=True)
    error, power = score_error(layer, q, k)
    assert (error.view(2, 3).sum(1) < 0.9 * before.view(2, 3).sum(1)).all()
    # no maps of this width are better: the singular values left out, per group
    k = k - layer.mixer.score.key_center
    for group in range(2):
        values = torch.cat([q[:, 3 * group + j] @ k[:, group].T for j in range(3)]) * layer.scaling
        best = torch.linalg.svdvals(values.double())[4:].square().sum() / values.shape[1] / q.shape[0]
        found = error[3 * group : 3 * group + 3].sum()
        assert best <= found + 1e-6 < best + 10 * RIDGE * power[3 * group : 3 * group + 3].sum()


def test_any_scale_of_the_mixer_gives_the_same_score():
    scores = []
    for scale in (None, 0.2):
        model = convert(**NARROW, scale=scale)
        layer, inputs = inputs_of(model, tiny_tokens(6, 100))
        fit(layer, inputs, maps=True)
        q, k = far_pairs(layer, inputs)
        score = layer.mixer.score
        queries, keys = score.map_queries(q[None])[0, :, 0], score.map_keys(k[None])[0, :, 0]
        scores.append(queries @ keys.T * (scale or 0.5))
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)


def test_maps_of_full_width_keep_the_whole_score():
    model = convert(**{**NARROW, "feature_dim": 8}, temperature=False)
    layer, inputs = inputs_of(model, tiny_tokens(6, 100))
    fit(layer, inputs, maps=True)
    error, power = score_error(layer, *far_pairs(layer, inputs))
    assert (error < 1e-8 * power).all()


def test_calibration_fits_counts_the_pass_and_undoes_it(monkeypatch):
    rows = [{"input_ids": tiny_tokens(4, 60)}]
    seen = []
    model = convert(**NARROW)
    result = calibrate(model, rows, fit_maps=True, on_batch=seen.append)
    assert sum(seen) == calibration_tokens(model, rows, fit_maps=True) == 3 * result.tokens
    start = [layer.mixer.score.features.key_map.clone() for layer in converted_layers(convert(**NARROW))]
    assert not any(map(torch.equal, (x.mixer.score.features.key_map for x in converted_layers(model)), start))
    model = convert(**NARROW)
    assert calibration_tokens(model, rows) == 3 * result.tokens
    calibrate(model, rows)
    kept = [layer.mixer.score for layer in converted_layers(model)]
    for score, x in zip(kept, start, strict=True):
        assert score.key_center.any()
        assert torch.equal(score.features.key_map, x)
    # settings that raise the loss are undone, mean keys and maps with them
    losses = iter([1.0, 2.0])
    monkeypatch.setattr("subquad.convert.calibrate.mean_loss", lambda *_: next(losses))
    model = convert(**NARROW)
    with pytest.warns(UserWarning, match="was undone"):
        assert not calibrate(model, rows, fit_maps=True).kept
    for layer, x in zip(converted_layers(model), start, strict=True):
        assert not layer.mixer.score.key_center.any()
        assert torch.equal(layer.mixer.score.features.key_map, x)


def test_a_layer_alone_is_fitted_as_in_its_model():
    model, other = convert(**NARROW), convert(**NARROW)
    ids = tiny_tokens(4, 60)
    layer, inputs = inputs_of(other, ids)
    with torch.no_grad():
        calibrate_layer(layer, [inputs], fit_maps=True)
    fit_scores(model, [{"input_ids": ids}], maps=True)
    score = converted_layers(model)[0].mixer.score
    torch.testing.assert_close(layer.mixer.score.key_center, score.key_center)
    torch.testing.assert_close(layer.mixer.score.features.key_map, score.features.key_map)


def test_nothing_to_fit_runs_nothing():
    seen = []
    assert not fit_scores(convert(center_keys=False), [{"input_ids": tiny_tokens()}], maps=True, on_batch=seen.append)
    assert seen == []
    # rows that never leave the window
    model = convert()
    assert fit_scores(model, [{"input_ids": tiny_tokens(1, 9)}], maps=False)
    assert not any(layer.mixer.score.key_center.any() for layer in converted_layers(model))


def test_decoding_and_a_saved_student_know_the_mean_keys(tmp_path):
    model = convert(kept_keys=4)
    ids = tiny_tokens(2, 60)
    calibrate(model, [{"input_ids": ids}])
    for layer in converted_layers(model):
        layer.mixer.far_weight.log_mix.data.fill_(-4.0)
    with torch.no_grad():
        expected = model(ids).logits
        without = convert(kept_keys=4)
        first = model(ids[:, :40], use_cache=True)
        rest = [first.logits]
        for t in range(40, 60):
            step = model(ids[:, t : t + 1], past_key_values=first.past_key_values, use_cache=True)
            rest.append(step.logits)
        torch.testing.assert_close(torch.cat(rest, dim=1), expected, atol=2e-4, rtol=2e-4)
        state = {k: v for k, v in model.state_dict().items() if "key_center" not in k}
        without.load_state_dict(state, strict=False)
        assert (without(ids).logits - expected).abs().max() > 1e-3
        export_student(model, None, tmp_path / "student", CARD)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
        torch.testing.assert_close(again(ids).logits, expected)
