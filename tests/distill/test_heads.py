"""The choice of exact heads: slopes against finite differences, and models in which the right choice is known."""

import pytest
import torch

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.distill.heads import MIDDLE, Head, _softmax_shares, _Study, rank_heads
from subquad.errors import ConfigError
from subquad.layers import attention_mode, converted_layers
from subquad.layers import resolve_mixer as mixer
from tests.tiny_llama import tiny_teacher
from tests.tiny_llama import tiny_tokens as tokens

WINDOWED = {"preset": "2mamba", "window": 4, "sinks": 1}


def converted(teacher, **changes):
    return apply_plan(teacher, plan_conversion(teacher.config, mixer({**WINDOWED, **changes})))


def rows(count=2):
    return [{"input_ids": tokens(seed=seed)[:1]} for seed in range(count)]


def silence(model, keep):
    """Leave one key/value head a say; what the others read reaches nobody."""
    for layer in converted_layers(model):
        for head in range(layer.geometry.num_kv_heads):
            if Head(layer.layer_idx, head) != keep:
                columns = [index for query in layer.split.query_heads((head,)) for index in _channels(layer, query)]
                layer.o_proj.weight.data[:, columns] = 0


def _channels(layer, query):
    return range(query * layer.geometry.head_dim, (query + 1) * layer.geometry.head_dim)


def all_heads(model):
    return [
        Head(layer.layer_idx, head) for layer in converted_layers(model) for head in range(layer.geometry.num_kv_heads)
    ]


@torch.no_grad()
def test_a_share_of_one_is_the_teacher_and_of_zero_the_student():
    model = converted(tiny_teacher())
    ids = tokens()
    layers = {layer.layer_idx: layer for layer in converted_layers(model)}
    student = model(ids, use_cache=False).logits
    with attention_mode(model, "teacher"):
        teacher = model(ids, use_cache=False).logits

    def blended(share):
        with _softmax_shares(layers, {index: torch.full((2,), share) for index in layers}):
            return model(ids, use_cache=False).logits

    torch.testing.assert_close(blended(1.0), teacher, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(blended(0.0), student)
    assert (blended(0.5) - student).abs().max() > 1e-3
    torch.testing.assert_close(model(ids, use_cache=False).logits, student)


def test_slopes_are_those_of_the_divergence():
    model = converted(tiny_teacher())
    layers = {layer.layer_idx: layer for layer in converted_layers(model)}
    study = _Study(model, layers, None)
    row = rows(1)[0]
    slopes = study.slopes([row], all_heads(model))
    step = 1e-2

    def loss_at(head, share):
        shares = {index: torch.full((layer.geometry.num_kv_heads,), MIDDLE) for index, layer in layers.items()}
        shares[head.layer_idx][head.kv_head] = share
        with torch.no_grad(), _softmax_shares(layers, shares):
            return study._loss(row).item()

    for head, slope in slopes.items():
        measured = (loss_at(head, MIDDLE - step) - loss_at(head, MIDDLE + step)) / (2 * step)
        assert slope == pytest.approx(measured, rel=0.05, abs=2e-5)


@pytest.mark.parametrize("keep", [Head(0, 1), Head(1, 0)])
def test_the_only_head_that_matters_is_kept(keep):
    model = converted(tiny_teacher())
    silence(model, keep)
    ranking = rank_heads(model, rows(), [], keep=1)
    assert ranking.exact_kv_heads() == {keep.layer_idx: (keep.kv_head,)}
    assert ranking.text_gap > 0
    assert ranking.recall_gap == 0
    others = [head for head in ranking.heads if (head.layer_idx, head.kv_head) != keep]
    assert all(head.text == 0 for head in others)
    assert ranking.heads[0].text > 0


def test_answers_decide_where_they_weigh_more():
    teacher = tiny_teacher()
    model = converted(teacher)
    text = rows(2)
    labels = torch.full_like(text[1]["input_ids"], -100)
    labels[:, -2:] = text[1]["input_ids"][:, -2:]
    recall = [{**text[1], "labels": labels}]
    light = rank_heads(model, text[:1], recall, keep=1, recall_weight=0.0)
    heavy = rank_heads(model, text[:1], recall, keep=1, recall_weight=1e6)
    assert light.heads[0].value == pytest.approx(light.heads[0].text / light.text_gap)
    assert heavy.heads[0].value == pytest.approx(1e6 * heavy.heads[0].recall / heavy.recall_gap, rel=1e-3)


def test_every_head_is_ranked_once_and_the_model_is_left_alone():
    model = converted(tiny_teacher())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    seen = []
    ranking = rank_heads(model, rows(), rows(1), keep=2, on_batch=seen.append)
    assert sorted((head.layer_idx, head.kv_head) for head in ranking.heads) == all_heads(model)
    assert sum(map(len, ranking.exact_kv_heads().values())) == ranking.kept == 2
    assert sum(map(len, ranking.exact_kv_heads(3).values())) == 3
    assert ranking.tokens == sum(seen) > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(layer.softmax_share is None for layer in converted_layers(model))


def test_refusals():
    model = converted(tiny_teacher())
    with pytest.raises(ConfigError, match=r"keep must be at least 1 and below the 4 converted heads, got 4"):
        rank_heads(model, rows(), [], keep=4)
    with pytest.raises(ConfigError, match="no rows of text"):
        rank_heads(model, [], rows(), keep=1)
    with pytest.raises(ConfigError, match="no converted layer"):
        rank_heads(tiny_teacher(), rows(), [], keep=1)
    with pytest.raises(ConfigError, match=r"layers \[0, 1\] have exact_kv_heads already"):
        rank_heads(converted(tiny_teacher(), exact_kv_heads=[0]), rows(), [], keep=1)
