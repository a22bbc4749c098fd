"""The Hugging Face classes: configuration, saving, outputs, masks, rotary scaling, tied embeddings."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, pipeline

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.errors import ConfigError
from subquad.layers import PRESETS, attention_mode, converted_layers, resolve_mixer
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM
from tests.tiny_llama import relative_error, tiny_config, tiny_teacher, tiny_tokens

MIXER = {"preset": "2mamba", "window": 8, "sinks": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def student(mixer=MIXER, **changes) -> SubquadLlamaForCausalLM:
    teacher = tiny_teacher(**changes)
    return apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer(mixer), layers=None))


def test_save_and_load_are_bit_equal(tmp_path):
    model = student(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).mixers == model.config.mixers
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadLlamaForCausalLM)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(tiny_tokens()).logits, model(tiny_tokens()).logits)


@pytest.mark.parametrize("preset", ["mamba2", "fox-pro", "cottention", "softmax-layer", "based"])
def test_every_part_is_saved_and_loaded(preset, tmp_path):
    mixer = {"preset": preset, **({"feature_dim": 6} if preset == "based" else {})}
    model = student(mixer)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mixer." in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tiny_tokens()).logits, model(tiny_tokens()).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {value.dtype for name, value in half.named_parameters() if ".mixer." in name} == {torch.float32}
    assert relative_error(half(tiny_tokens()).logits.float(), model(tiny_tokens()).logits) < 0.1


def test_based_starts_from_the_strongest_pairs_of_the_teacher():
    teacher = tiny_teacher()
    with torch.no_grad():
        # Rotary pairs 1 and 2 of the first key/value head (query heads 0 to 2), 0 and 3 of the second.
        for head, quiet in ((0, (0, 3)), (1, (1, 2))):
            for pair in quiet:
                for row in (pair, pair + 4):
                    teacher.model.layers[0].self_attn.k_proj.weight[8 * head + row] *= 1e-3
    plan = plan_conversion(teacher.config, resolve_mixer({"preset": "based", "feature_dim": 4}))
    layer = converted_layers(apply_plan(teacher, plan))[0]
    keys = layer.mixer.score.features.key_map.abs().sum(-1).nonzero().tolist()
    assert keys == [[0, 1], [0, 2], [0, 5], [0, 6], [1, 0], [1, 3], [1, 4], [1, 7]]
    # All of q . k that is left is in the features, with the teacher's scale.
    hidden = torch.randn(1, 9, 36)
    inputs = layer.inputs(hidden, teacher.model.rotary_emb(hidden, torch.arange(9)[None]))
    q, k = inputs.rotate(inputs.q, inputs.k)
    features = layer.mixer.score.map_queries(q), layer.mixer.score.map_keys(k)
    score = torch.einsum("btd,bsd->bts", features[0][:, :, 4], features[1][:, :, 1]) * 4**-0.5
    expected = torch.einsum("btd,bsd->bts", q[:, :, 4], k[:, :, 1]) * 8**-0.5
    assert relative_error(score, expected) < 1e-2


def test_mixer_parameters_stay_float32(tmp_path):
    student().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".mixer." in name} == {torch.float32}
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == torch.bfloat16
    assert loaded(tiny_tokens()).logits.isfinite().all()


def test_random_start_from_a_config_is_the_identity_start():
    config = SubquadLlamaConfig(**tiny_config().to_dict() | {"model_type": "subquad_llama"})
    config.mixers = [resolve_mixer(MIXER).model_dump(mode="json"), None]
    model = SubquadLlamaForCausalLM(config)
    layers = converted_layers(model)
    assert [layer.layer_idx for layer in layers] == [0]
    assert torch.equal(layers[0].mixer.score.key_map[0], torch.eye(8))
    assert torch.equal(layers[0].mixer.conv.weight[:, 1], torch.ones(80))


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "softmax"])
def test_every_system_trains_from_random_weights(preset):
    config = SubquadLlamaConfig(**tiny_config().to_dict() | {"model_type": "subquad_llama"})
    changes = {"feature_dim": 6} if preset == "based" else {}
    config.mixers = [resolve_mixer({"preset": preset, **changes}).model_dump(mode="json")] * 2
    torch.manual_seed(0)
    model = SubquadLlamaForCausalLM(config)
    ids = tiny_tokens()
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(4):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_wrong_number_of_mixers_is_refused():
    config = SubquadLlamaConfig(**tiny_config().to_dict() | {"model_type": "subquad_llama"})
    config.mixers = [None]
    with pytest.raises(ConfigError, match="1 entries but the model has 2 layers"):
        SubquadLlamaForCausalLM(config)


def test_hidden_states_are_recorded_after_surgery():
    states = student()(tiny_tokens(), output_hidden_states=True).hidden_states
    assert len(states) == 3


def test_four_dimensional_mask_is_refused():
    with pytest.raises(ConfigError, match="2-D mask"):
        student()(tiny_tokens(), attention_mask=torch.ones(2, 1, 40, 40))


@torch.no_grad()
def test_llama3_rotary_scaling_is_kept():
    teacher = tiny_teacher(rope_parameters=LLAMA3_ROPE)
    expected, plain = teacher(tiny_tokens()).logits, tiny_teacher()(tiny_tokens()).logits
    assert relative_error(expected, plain) > 1e-3
    model = student({"preset": "2mamba", "window": 40}, rope_parameters=LLAMA3_ROPE)
    assert model.config.rope_parameters == LLAMA3_ROPE
    assert relative_error(model(tiny_tokens()).logits, expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_teacher_mode_equals_the_teacher_with_every_attention(attention):
    teacher = tiny_teacher()
    teacher.set_attn_implementation(attention)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    expected = teacher(tiny_tokens(), attention_mask=mask).logits
    model = apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer(MIXER), layers=None))
    with attention_mode(model, "teacher"):
        assert torch.equal(model(tiny_tokens(), attention_mask=mask).logits, expected)


def test_a_cache_cannot_change_between_teacher_and_student():
    model = student()
    with attention_mode(model, "teacher"):
        cache = model(tiny_tokens(), use_cache=True).past_key_values
    with pytest.raises(ConfigError, match="teacher mode"):
        model(tiny_tokens()[:, :1], past_key_values=cache)
    cache = model(tiny_tokens(), use_cache=True).past_key_values
    with attention_mode(model, "teacher"), pytest.raises(ConfigError, match="teacher mode"):
        model(tiny_tokens()[:, :1], past_key_values=cache)


def test_pipeline_generates():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(97)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w2")
    generate = pipeline("text-generation", model=student(), tokenizer=tokenizer)
    out = generate(["w5 w6 w7", "w9"], max_new_tokens=4, do_sample=False, batch_size=2)
    assert all(item[0]["generated_text"] for item in out)


@pytest.mark.parametrize("strategy", [{"num_beams": 3, "num_return_sequences": 2}, {"cache_implementation": "static"}])
def test_generation_strategies_equal_generation_without_a_cache(strategy):
    model, ids = student(), tiny_tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    without = {key: value for key, value in strategy.items() if key != "cache_implementation"}
    expected = model.generate(ids, use_cache=False, **without, **options)
    assert torch.equal(model.generate(ids, **strategy, **options), expected)


def test_a_row_of_padding_only_is_finite():
    model, ids = student(), tiny_tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1] = 0
    out = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
