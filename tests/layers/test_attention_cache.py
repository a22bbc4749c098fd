"""Decoding with a cache equals one forward, in every mode, and the cache has the bytes that are said."""

import pytest
import torch
from transformers import DynamicCache

from subquad.errors import ConfigError
from subquad.layers import SubquadCacheLayer, attention_mode, cache_bytes, converted_layers
from subquad.layers import resolve_mixer as mixer
from tests.layers.students import MIXERS, all_mixers, convert
from tests.tiny_llama import relative_error as relative
from tests.tiny_llama import tiny_teacher
from tests.tiny_llama import tiny_tokens as tokens


@pytest.fixture
def teacher():
    return tiny_teacher()


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
