"""The far part's score is fitted: its keys have mean 0, and its narrow maps keep as much of the score as any can."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from subquad.convert.calibrate import calibrate, calibrate_layer, calibration_tokens
from subquad.convert.export import export_student
from subquad.convert.plan import plan_conversion
from subquad.convert.score_fit import ScoreFit, fit_scores
from subquad.convert.surgery import apply_plan
from subquad.errors import TrainingError
from subquad.layers import converted_layers, resolve_mixer
from subquad.layers.sequence import SequenceInfo
from tests.convert.test_key_scores import inputs_of
from tests.convert.tiny_students import CARD
from tests.tiny_llama import tiny_teacher, tiny_tokens

HEADS = ("hidden_states", "q", "k", "v")
NARROW = {"qk_maps": False, "feature_map": "learned", "feature_dim": 4}


def convert(**parts):
    teacher = tiny_teacher()
    mixer = resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2, "conv_width": 1, "center_keys": True, **parts})
    return apply_plan(teacher, plan_conversion(teacher.config, mixer))


def far_pairs(layer, inputs):
    """Return rotated queries that have a far part, and keys that leave the window, of unpadded rows."""
    inputs = inputs.select(layer.split, layer.split.mixed)
    q, k = inputs.rotate(inputs.q, inputs.k, layer.mixer_config.rope)
    return q[:, 10:].flatten(0, 1), k[:, 2:-8].flatten(0, 1)


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
    halves = [inputs._replace(**{name: getattr(inputs, name)[rows] for name in HEADS}) for rows in (slice(3), [3])]
    fit(layer, *halves)
    k = far_pairs(layer, inputs)[1]
    assert k.mean(0).norm() > 0.1
    torch.testing.assert_close(layer.mixer.score.key_center, k.mean(0))
    centred = layer.mixer.score.map_keys(k[None])
    torch.testing.assert_close(centred.mean(1), torch.zeros_like(centred.mean(1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("real", [range(20, 60), range(45)])
def test_padding_is_left_out(real):
    layer, inputs = inputs_of(convert(), tiny_tokens(2, 60))
    mask = torch.zeros(2, 60, dtype=torch.bool)
    mask[:, list(real)] = True
    fit(layer, inputs._replace(sequence=SequenceInfo(real=mask)))
    k = inputs.rotate(inputs.q, inputs.k)[1]
    # at steps of padding the window moves on
    torch.testing.assert_close(layer.mixer.score.key_center, k[:, real[2] : min(real[-1] + 1, 52)].mean((0, 1)))


def test_documents_have_sinks_and_windows_of_their_own():
    positions = torch.cat([torch.arange(25), torch.arange(35)])[None].expand(2, -1)
    layer, inputs = inputs_of(convert(), tiny_tokens(2, 60), position_ids=positions)
    fit(layer, inputs)
    k = inputs.rotate(inputs.q, inputs.k)[1]
    far = torch.cat([k[:, 2:17], k[:, 27:52]], dim=1)
    torch.testing.assert_close(layer.mixer.score.key_center, far.mean((0, 1)))


@pytest.mark.parametrize("write_gate", [False, True])
def test_kept_keys_are_no_far_keys(write_gate):
    layer, inputs = inputs_of(convert(kept_keys=12, write_gate=write_gate), tiny_tokens(2, 100))
    if write_gate:
        torch.nn.init.normal_(layer.mixer.write_gate.weight)
    fit(layer, inputs)
    k = inputs.rotate(inputs.q, inputs.k)[1]
    scores = layer.mixer.key_score(inputs)
    gates = layer.mixer.write_gate(inputs.hidden_states) if write_gate else torch.ones(2, 100, 2)
    for head in range(2):
        far, weights = [], []
        for row in range(2):
            store = []
            for s in range(2, 92):
                store.append((scores[row, s, head].item(), -s))
                if len(store) > 12:
                    leaves = -min(store)[1]
                    store.remove(min(store))
                    far.append(k[row, leaves, head])
                    weights.append(gates[row, leaves, head])
        weights = torch.stack(weights)
        assert len(weights) == 2 * (90 - 12)
        mean = (torch.stack(far) * weights[:, None]).sum(0) / weights.sum()
        torch.testing.assert_close(layer.mixer.score.key_center[head], mean, atol=1e-5, rtol=1e-4)
        assert (mean - k[:, 2:92, head].mean((0, 1))).norm() > 1e-3


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
    layer.scaling = 0.4
    # a mean that matters
    inputs = inputs._replace(k=inputs.k + 0.5, rope=None)
    q, k = far_pairs(layer, inputs)
    layer.mixer.score.key_center.copy_(k.mean(0))
    before = score_error(layer, q, k)[0]
    layer.mixer.score.key_center.zero_()
    fit(layer, inputs, maps=True)
    error, power = score_error(layer, q, k)
    assert (error.view(2, 3).sum(1) < 0.9 * before.view(2, 3).sum(1)).all()
    # no maps of this width are better: the singular values left out, per group
    k = k - layer.mixer.score.key_center
    for group in range(2):
        values = torch.cat([q[:, 3 * group + j] @ k[:, group].T for j in range(3)]) * layer.scaling
        best = torch.linalg.svdvals(values.double())[4:].square().sum() / values.shape[1] / q.shape[0]
        found = error[3 * group : 3 * group + 3].sum()
        # queries and keys are taken as independent, which the pairs of a sample are: all of them count
        assert best <= found + 1e-6
        assert found < best + 1e-4 * power[3 * group : 3 * group + 3].sum()


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


def test_both_maps_are_of_one_size():
    layer, inputs = inputs_of(convert(**NARROW), tiny_tokens(6, 100))
    fit(layer, inputs, maps=True)
    features = layer.mixer.score.features
    for head in range(2):
        sizes = features.query_map[3 * head : 3 * head + 3].norm(dim=(1, 2)), features.key_map[head].norm()
        torch.testing.assert_close(sizes[0], sizes[1].expand(3))


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
    assert not fit_scores(convert(**NARROW, center_keys=False), [{"input_ids": tiny_tokens()}], maps=False)
    # rows of which too little leaves the window
    model = convert(**NARROW)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"layers \[0, 1\] stay as they were: 25 tokens reach the far part"):
        assert fit_scores(model, [{"input_ids": tiny_tokens(1, 35)}], maps=True)
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_a_mean_key_that_is_not_finite_is_not_exported(tmp_path):
    model = convert()
    converted_layers(model)[1].mixer.score.key_center[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"1 tensors hold NaN.*layers\.1.*key_center"):
        export_student(model, None, tmp_path / "s", CARD)


@pytest.mark.parametrize("rope", ["keep", "drop"])
@pytest.mark.parametrize("kind", ["the same word", "no keys"])
def test_degenerate_keys_give_finite_maps(rope, kind):
    model = convert(**NARROW, rope=rope)
    ids = torch.full((2, 60), 7) if kind == "the same word" else tiny_tokens(2, 60)
    layer, inputs = inputs_of(model, ids)
    start = layer.mixer.score.features.key_map.clone()
    if kind == "no keys":
        inputs = inputs._replace(k=torch.cat([torch.zeros_like(inputs.k[:, :, :1]), inputs.k[:, :, 1:]], dim=2))
    fit(layer, inputs, maps=True)
    features = layer.mixer.score.features
    for values in (features.key_map, features.query_map, layer.mixer.score.key_center):
        assert values.isfinite().all()
        assert values.abs().max() < 1e4
    assert torch.equal(features.key_map[0], start[0]) == (kind == "no keys")


def test_channels_of_any_size_are_fitted():
    layer, inputs = inputs_of(convert(**NARROW, temperature=False, rope="drop"), tiny_tokens(6, 100))
    inputs = inputs._replace(k=inputs.k * torch.tensor([100.0] + 7 * [1.0]))
    fit(layer, inputs, maps=True)
    q, k = far_pairs(layer, inputs)
    error = score_error(layer, q, k)[0]
    k = k - layer.mixer.score.key_center
    values = torch.cat([q[:, j] @ k[:, 0].T for j in range(3)]).double() * layer.scaling
    best = torch.linalg.svdvals(values)[4:].square().sum() / values.shape[1] / q.shape[0]
    assert error[:3].sum() < 1.02 * best


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
