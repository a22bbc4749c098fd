"""A converted layer against its teacher and against itself: window, padding, documents, cache, heads."""

import pytest
import torch
from transformers import DynamicCache

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan, undo_plan
from subquad.errors import ConfigError
from subquad.layers import SubquadCacheLayer, attention_mode, cache_bytes, collect_local_losses, converted_layers
from subquad.layers import resolve_mixer as mixer
from tests.tiny_llama import relative_error as relative
from tests.tiny_llama import tiny_teacher
from tests.tiny_llama import tiny_tokens as tokens

MIXERS = {
    "2mamba": {"preset": "2mamba", "window": 8, "sinks": 2},
    "2mamba-pure": {"preset": "2mamba", "window": 0},
    "2mamba-no-rope": {"preset": "2mamba", "window": 8, "sinks": 2, "rope": "drop"},
    "2mamba-fast-rope": {"preset": "2mamba", "window": 8, "sinks": 2, "conv_width": 1, "rope": "fast"},
    "2mamba-slow-rope": {"preset": "2mamba", "window": 8, "sinks": 2, "kept_keys": 4, "conv_width": 1, "rope": "slow"},
    "2mamba-exact-head": {"preset": "2mamba", "window": 8, "sinks": 2, "exact_kv_heads": [1]},
    "2mamba-absolute": {"preset": "2mamba", "window": 8, "sinks": 2, "mix_reference": "absolute"},
    "2mamba-mix": {"preset": "2mamba", "window": 8, "sinks": 2, "mix_by_mass": True, "mix_by_input": True},
    "2mamba-value-step": {"preset": "2mamba", "window": 8, "sinks": 2, "value_step": "softplus"},
    "2mamba-write": {"preset": "2mamba", "window": 8, "sinks": 2, "write_gate": True},
    "2mamba-write-pure": {"preset": "2mamba-pure", "write_gate": True},
    "taylor-3-write": {"preset": "taylor", "order": 3, "window": 4, "sinks": 1, "write_gate": True},
    "taylor-3-write-pure": {"preset": "taylor-pure", "order": 3, "write_gate": True},
    "taylor-1-mix": {"preset": "taylor", "order": 1, "window": 8, "mix_by_mass": True, "mix_reference": "absolute"},
    "2mamba-kept": {"preset": "2mamba", "window": 8, "sinks": 2, "kept_keys": 3},
    "2mamba-kept-head": {"preset": "2mamba", "window": 4, "kept_keys": 1, "exact_kv_heads": [1], "mix_by_mass": True},
    "2mamba-kept-write": {"preset": "2mamba", "window": 5, "sinks": 1, "kept_keys": 7, "write_gate": True},
    "taylor-kept": {"preset": "taylor", "window": 3, "kept_keys": 4, "sinks": 2},
    "taylor-3-kept": {"preset": "taylor", "order": 3, "window": 4, "sinks": 1, "kept_keys": 5},
    "linear-relu-kept": {"preset": "linear-relu", "window": 3, "kept_keys": 4},
    "mamba2s-mix": {"preset": "mamba2s", "window": 8, "sinks": 2, "mix_by_input": True},
    "mamba2s": {"preset": "mamba2s", "window": 8, "sinks": 2},
    "mamba2s-pure": {"preset": "mamba2s", "window": 0},
    "taylor": {"preset": "taylor", "window": 8, "sinks": 2},
    "taylor-pure": {"preset": "taylor", "window": 0},
    "taylor-4": {"preset": "taylor", "order": 4, "window": 8, "sinks": 0},
    "taylor-3-pure": {"preset": "taylor", "order": 3, "window": 0},
    "linear-identity": {"preset": "linear-identity"},
    "linear-relu": {"preset": "linear-relu"},
    "linear-relu-window": {"preset": "linear-relu", "window": 8, "sinks": 2, "temperature": True},
    "linear-elu": {"preset": "linear-elu"},
    "cottention": {"preset": "cottention"},
    "cottention-window": {"preset": "cottention", "window": 8, "sinks": 2},
    "taylor-relu": {"preset": "taylor-relu"},
    "taylor-elu-3": {"preset": "taylor-elu", "order": 3, "temperature": True, "qk_maps": True},
    "taylor-cosine": {"preset": "taylor-cosine"},
    "mamba2": {"preset": "mamba2"},
    "mamba2-norm-only": {"preset": "mamba2", "skip": False, "conv_activation": "none", "window": 8},
    "based": {"preset": "based", "feature_dim": 5},
    "based-window": {"preset": "based", "feature_dim": 4, "window": 8, "sinks": 2, "output_gate": "sigmoid"},
    "softmax-l2": {"preset": "softmax-l2"},
    "softmax-layer": {"preset": "softmax-layer", "exact_kv_heads": [0]},
    "softmax-gate": {"preset": "softmax-gate", "score_clamp": 1.0},
    "2mamba-e": {"preset": "2mamba-e"},
    "fox": {"preset": "fox"},
    "fox-pro": {"preset": "fox-pro"},
    "exp-everything": {
        "score": "exp",
        "feature_map": "learned",
        "feature_dim": 6,
        "decay": "mamba2",
        "value_step": "softplus",
        "conv_width": 3,
        "conv_activation": "silu",
        "skip": True,
        "temperature": True,
        "score_clamp": 4.0,
        "normaliser": "head_rms",
        "output_gate": "silu",
        "qk_norm": True,
        "kv_shift": True,
    },
    "window-1": {"preset": "taylor", "window": 1, "sinks": 1},
}
all_mixers = pytest.mark.parametrize("name", MIXERS)


def convert(teacher, name_or_mixer, randomise=True, layers=None):
    config = MIXERS[name_or_mixer] if isinstance(name_or_mixer, str) and name_or_mixer in MIXERS else name_or_mixer
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer(config), layers=layers))
    if randomise:
        torch.manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if ".mixer." not in key:
                    continue
                parameter.add_(0.2 * torch.randn_like(parameter))
                # A far part that really counts.
                if key.endswith("log_mix"):
                    parameter.fill_(-1.0)
        for layer in converted_layers(model):
            if layer.mixer is not None and layer.mixer.decay is not None:
                # A decay that really forgets.
                layer.mixer.decay.set_timescale(torch.linspace(5.0, 20.0, layer.mixer.geometry.num_kv_heads))
    return model


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
def test_decode_equals_one_forward(teacher, name):
    model = convert(teacher, name)
    ids = tokens()
    full = model(ids).logits
    for prefill in (1, 7, 8, 25):
        cache = DynamicCache(config=model.config)
        steps = [model(ids[:, :prefill], past_key_values=cache, use_cache=True).logits]
        for start in range(prefill, 30):
            steps.append(model(ids[:, start : start + 1], past_key_values=cache, use_cache=True).logits)
        steps.append(model(ids[:, 30:], past_key_values=cache, use_cache=True).logits)
        assert relative(torch.cat(steps, dim=1), full) < 1e-4
        assert cache.get_seq_length() == 40


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "window_only") for name in MIXERS if mixer(MIXERS[name]).window]
    + [(name, "exact_only") for name in MIXERS if mixer(MIXERS[name]).kept_keys],
)
def test_the_control_decodes_without_a_far_part(teacher, name, mode, monkeypatch):
    model = convert(teacher, name)
    ids, mask = tokens(), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    monkeypatch.setattr("subquad.layers.mixer.poly_attention", lambda *args, **kwargs: pytest.fail("far part computed"))
    with attention_mode(model, mode):
        full = model(ids, attention_mask=mask).logits
        cache, parts, done = DynamicCache(config=model.config), [], 0
        for size in (5, *[1] * 13, 22):
            done += size
            new = ids[:, done - size : done]
            parts.append(model(new, attention_mask=mask[:, :done], past_key_values=cache, use_cache=True).logits)
    decoded = torch.cat(parts, dim=1)
    assert relative(decoded[0], full[0]) < 1e-4
    assert relative(decoded[1, 9:], full[1, 9:]) < 1e-4
    for layer in cache.layers:
        growing = [buffer for name, buffer in layer.buffers.items() if name.startswith("past_")]
        assert all(buffer.shape[1] == 0 for buffer in growing)
        assert growing or not layer.buffers["values"].any()


@torch.no_grad()
@pytest.mark.parametrize("begun, other", [("student", "window_only"), ("window_only", "student")])
def test_a_cache_stays_in_the_mode_it_was_begun_in(teacher, begun, other):
    model = convert(teacher, "2mamba")
    cache = DynamicCache(config=model.config)

    def read(mode, part):
        with attention_mode(model, mode):
            return model(part, past_key_values=cache, use_cache=True).logits

    first = read(begun, tokens()[:, :20])
    with pytest.raises(ConfigError, match=f"begun in {begun} mode and cannot continue in {other}"):
        read(other, tokens()[:, 20:])
    assert cache.get_seq_length() == 20
    with attention_mode(model, begun):
        full = model(tokens()).logits
    assert relative(torch.cat([first, read(begun, tokens()[:, 20:])], dim=1), full) < 1e-4
    cache.reset()
    read(other, tokens())


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
@all_mixers
def test_left_padded_batch_generates_as_each_row_alone(teacher, name):
    model = convert(teacher, name)
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    ids = torch.where(mask.bool(), ids, 0)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    batch = model.generate(ids, attention_mask=mask, **options)[:, 20:]
    for row in range(2):
        alone_ids = ids[row : row + 1, mask[row].bool()]
        alone = model.generate(alone_ids, attention_mask=torch.ones_like(alone_ids), **options)
        assert torch.equal(batch[row], alone[0, alone_ids.shape[1] :])
    beams = model.generate(ids, attention_mask=mask, num_beams=3, **options)
    without = model.generate(ids, attention_mask=mask, num_beams=3, use_cache=False, **options)
    assert torch.equal(beams, without)


@torch.no_grad()
@all_mixers
def test_cache_bytes_equal_the_formula(teacher, name):
    model = convert(teacher, name)
    layer = converted_layers(model)[0]
    held = {}
    for length in (5, 40, 200):
        cache = DynamicCache(config=model.config)
        model(tokens(2, length), past_key_values=cache, use_cache=True)
        assert isinstance(cache.layers[0], SubquadCacheLayer)
        held[length] = cache.layers[0].num_bytes()
        assert held[length] == cache_bytes(layer.mixer_config, layer.geometry, 2, length, torch.float32)
    if layer.mixer_config.linear and not layer.mixer_config.exact_kv_heads:
        assert held[5] == held[40] == held[200]
    else:
        assert held[5] < held[40] < held[200]


@torch.no_grad()
@pytest.mark.parametrize("name", ["2mamba", "2mamba-pure", "mamba2s"])
def test_a_bfloat16_state_takes_half_the_bytes_and_rounds(teacher, name):
    ids = tokens()
    model = convert(teacher, name)
    full = model(ids).logits
    half = convert(tiny_teacher(), {**MIXERS[name], "state_dtype": "bfloat16"})
    assert torch.equal(half(ids).logits, full)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    logits = []
    for converted, cache in zip((model, half), caches, strict=True):
        parts = [converted(ids[:, step : step + 1], past_key_values=cache, use_cache=True).logits for step in range(40)]
        logits.append(torch.cat(parts, dim=1))
    assert 1e-6 < relative(logits[1], logits[0]) < 0.05
    held = [cache.layers[0].buffers for cache in caches]
    for buffer in ("values", "normaliser"):
        if buffer in held[0]:
            assert held[1][buffer].dtype == torch.bfloat16
            assert 2 * held[1][buffer].nbytes == held[0][buffer].nbytes
    layer = converted_layers(half)[0]
    assert caches[1].layers[0].num_bytes() == cache_bytes(layer.mixer_config, layer.geometry, 2, 40, torch.float32)


@pytest.mark.parametrize(
    "parts", [{"preset": "fox"}, {"preset": "taylor", "order": 3}, {"preset": "taylor-pure", "causal": False}]
)
def test_a_state_dtype_needs_a_cached_state(parts):
    with pytest.raises(ConfigError, match="state_dtype: bfloat16 is for a cached state"):
        mixer({**parts, "state_dtype": "bfloat16"})


def test_pure_2mamba_state_is_the_papers_number():
    from subquad.layers import LayerGeometry, cache_layout

    config = mixer({"preset": "2mamba", "window": 0, "offset": False})
    layout = cache_layout(config, LayerGeometry(64, 1, 1, 64), torch.float32)
    numbers = sum(torch.Size(spec.shape).numel() for spec in layout.values())
    assert numbers == 64 * 65**2 // 2 + 3 * 64


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
