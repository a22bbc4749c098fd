"""A converted layer against its teacher and against itself: window, padding, documents, heads."""

import pytest
import torch
from transformers import DynamicCache

from subquad.convert.surgery import undo_plan
from subquad.layers import attention_mode, collect_local_losses, converted_layers
from subquad.layers import resolve_mixer as mixer
from tests.layers.students import all_mixers, convert
from tests.tiny_llama import relative_error as relative
from tests.tiny_llama import tiny_teacher
from tests.tiny_llama import tiny_tokens as tokens


@pytest.fixture
def teacher():
    return tiny_teacher()


@torch.no_grad()
def test_window_as_long_as_the_sequence_is_the_teacher(teacher):
    ids = tokens()
    expected = teacher(ids).logits
    for sinks in (0, 4):
        model = convert(teacher, {"preset": "2mamba", "window": 40, "sinks": sinks})
        assert relative(model(ids).logits, expected) < 1e-5
        undo_plan(model)


@torch.no_grad()
@all_mixers
def test_student_differs_from_its_teacher_and_from_the_window(teacher, name):
    ids = tokens()
    expected = teacher(ids).logits
    model = convert(teacher, name)
    student = model(ids).logits
    assert relative(student, expected) > 1e-3
    with attention_mode(model, "teacher"):
        assert torch.equal(model(ids).logits, expected)
    if converted_layers(model)[0].mixer_config.window:
        with attention_mode(model, "window_only"):
            assert relative(model(ids).logits, student) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", ["2mamba", "2mamba-kept"])
def test_exact_only_adds_the_kept_keys(teacher, name):
    ids, logits = tokens(), {}
    model = convert(teacher, name)
    for mode in ("window_only", "exact_only", "student"):
        with attention_mode(model, mode):
            logits[mode] = model(ids).logits
    assert relative(logits["exact_only"], logits["student"]) > 1e-3
    assert torch.equal(logits["exact_only"], logits["window_only"]) == (name == "2mamba")


@torch.no_grad()
@pytest.mark.parametrize("far", [{"preset": "2mamba"}, {"preset": "taylor", "order": 1}, {"preset": "mamba2s"}])
def test_a_store_for_every_token_is_the_teacher(teacher, far):
    ids, mask = tokens(), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    packed = torch.cat([torch.arange(25), torch.arange(15)]).expand(2, -1)
    calls = ({}, {"attention_mask": mask}, {"position_ids": packed, "use_cache": False})
    expected = [teacher(ids, **call).logits for call in calls]
    model = convert(teacher, {**far, "window": 4, "sinks": 2, "kept_keys": 40, "normaliser": "sum"})
    for call, logits in zip(calls, expected, strict=True):
        found = model(ids, **call).logits
        assert relative(found[0], logits[0]) < 1e-4
        assert relative(found[1, 9:], logits[1, 9:]) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_recency_alone_keeps_the_last_tokens(packed):
    """As a window that is longer by so much; a little of it changes some choices."""
    parts = {"preset": "2mamba", "window": 5, "sinks": 2}
    positions = torch.cat([torch.arange(17), torch.arange(23)])[None].expand(2, -1) if packed else None

    def exact(**changes):
        model = convert(tiny_teacher(), {**parts, **changes})
        with attention_mode(model, "exact_only"):
            return model(tokens(), position_ids=positions).logits

    longer, only_recent = exact(window=9), exact(kept_keys=4, kept_recency=1e6)
    torch.testing.assert_close(only_recent, longer, atol=1e-4, rtol=1e-4)
    best, mixed = exact(kept_keys=4), exact(kept_keys=4, kept_recency=100.0)
    for first, second in ((best, longer), (best, mixed), (mixed, longer)):
        assert relative(first, second) > 1e-3


@torch.no_grad()
def test_undo_is_bit_equal(teacher):
    ids = tokens()
    expected, weight = teacher(ids).logits, teacher.model.layers[0].self_attn.q_proj.weight
    model = convert(teacher, "2mamba")
    assert model.model.layers[0].self_attn.q_proj.weight is weight
    restored = undo_plan(model)
    assert type(restored).__name__ == "LlamaForCausalLM"
    assert restored.config.model_type == "llama"
    assert torch.equal(restored(ids).logits, expected)
    assert not converted_layers(restored)


@torch.no_grad()
@all_mixers
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(teacher, name, side):
    model = convert(teacher, name)
    lengths = (40, 23, 5)
    ids = tokens(3)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        if side == "left":
            mask[row, : 40 - length] = 0
        else:
            mask[row, length:] = 0
    ids = torch.where(mask.bool(), ids, 0)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = model(ids, attention_mask=mask, position_ids=positions).logits
    for row in range(3):
        real = mask[row].bool()
        alone = model(ids[row : row + 1, real]).logits[0]
        assert relative(batch[row, real], alone) < 1e-4
    assert batch.isfinite().all()


@torch.no_grad()
@all_mixers
def test_packed_documents_equal_separate_rows(teacher, name):
    model = convert(teacher, name)
    ids = tokens(1, 60)
    lengths = (17, 1, 30, 12)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    separate = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    assert relative(packed, separate) < 1e-4


@torch.no_grad()
def test_one_exact_head_is_that_head_of_the_teacher(teacher):
    ids = tokens()
    model = convert(teacher, {"preset": "2mamba", "window": 8, "sinks": 2, "exact_kv_heads": [1]})
    layer = converted_layers(model)[0]
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    rope = model.model.rotary_emb(hidden, torch.arange(40)[None])
    inputs = layer.inputs(hidden, rope)
    heads = layer.student_heads(inputs)
    q, k = inputs.rotate(inputs.q, inputs.k)
    v = inputs.v
    k, v = (x.repeat_interleave(3, 2).transpose(1, 2) for x in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
    assert relative(heads[:, :, 3:], exact[:, :, 3:]) < 1e-5
    assert relative(heads[:, :, :3], exact[:, :, :3]) > 1e-3


@pytest.mark.parametrize("part, rotated", [("fast", [0, 1, 4, 5]), ("slow", [2, 3, 6, 7])])
@torch.no_grad()
def test_half_of_the_channel_pairs_is_rotated(teacher, part, rotated):
    layer = converted_layers(convert(teacher, {"preset": "2mamba", "rope": part}))[0]
    hidden = torch.randn(1, 40, 36, generator=torch.Generator().manual_seed(0))
    assert teacher.config.head_dim == 8
    inputs = layer.inputs(hidden, teacher.model.rotary_emb(hidden, torch.arange(40)[None]))
    for x, half, whole in zip(
        (inputs.q, inputs.k), inputs.rotate(inputs.q, inputs.k, part), inputs.rotate(inputs.q, inputs.k), strict=True
    ):
        still = [channel for channel in range(8) if channel not in rotated]
        assert torch.equal(half[..., rotated], whole[..., rotated])
        assert torch.equal(half[..., still], x[..., still])
        assert not torch.equal(half[..., rotated], x[..., rotated])


@all_mixers
def test_transfer_gives_each_layer_its_own_gradient(teacher, name):
    model = convert(teacher, name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(".mixer." in key)
    ids = tokens()
    with attention_mode(model, "transfer"):
        model.model(ids, use_cache=False)
        losses = collect_local_losses(model)
    assert set(losses) == {0, 1}
    assert all(loss.item() > 1e-4 for loss in losses.values())
    if not list(converted_layers(model)[1].mixer.parameters()):
        assert not any(loss.requires_grad for loss in losses.values())
        return
    sum(losses.values()).backward()
    layer = converted_layers(model)[1]
    got = {key: p.grad.clone() for key, p in layer.mixer.named_parameters() if p.grad is not None}
    assert len(got) == len(list(layer.mixer.parameters()))
    # The same loss by hand, through ordinary autograd.
    model.zero_grad()
    with attention_mode(model, "teacher"), torch.no_grad():
        states = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        hidden = model.model.layers[1].input_layernorm(states[1])
        rope = model.model.rotary_emb(hidden, torch.arange(40)[None])
        target, _ = layer(hidden, rope, None)
    layer.mode = "student"
    out, _ = layer(hidden, rope)
    ((out - target).square().sum() / target.square().sum()).backward()
    for key, parameter in layer.mixer.named_parameters():
        if parameter.grad is not None:
            assert relative(got[key], parameter.grad) < 1e-4 or parameter.grad.abs().max() < 1e-7, key


def test_training_through_the_student_reaches_the_projections(teacher):
    model = convert(teacher, "2mamba")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model(tokens(), labels=tokens()).loss.backward()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert getattr(model.model.layers[0].self_attn, name).weight.grad.abs().sum() > 0
    assert model.model.layers[0].self_attn.mixer.score.key_map.grad.abs().sum() > 0


@torch.no_grad()
def test_bfloat16_keeps_state_and_mixer_in_float32(teacher):
    model = convert(teacher, "2mamba")
    expected = model(tokens()).logits
    for key, parameter in model.named_parameters():
        if ".mixer." not in key:
            parameter.data = parameter.data.bfloat16()
    cache = DynamicCache(config=model.config)
    logits = model(tokens(), past_key_values=cache, use_cache=True).logits
    assert cache.layers[0].buffers["values"].dtype == torch.float32
    assert cache.layers[0].buffers["window_keys"].dtype == torch.bfloat16
    assert relative(logits.float(), expected) < 0.1


@torch.no_grad()
def test_per_layer_mixers_keep_softmax_layers(teacher):
    ids = tokens()
    model = convert(teacher, "2mamba", layers={"0": mixer("softmax")})
    assert [layer.layer_idx for layer in converted_layers(model)] == [1]
    full = model(ids).logits
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split((10, 1, 29), dim=1)]
    assert relative(torch.cat(parts, dim=1), full) < 1e-4
