"""A converted BERT: against its teacher and its formula, padding, heads, gradients, undo, saving, Auto classes."""

import copy

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan, undo_plan
from subquad.errors import ConfigError
from subquad.layers import attention_mode, collect_local_losses, converted_layers, resolve_mixer
from subquad.models import (
    SubquadBertConfig,
    SubquadBertForMaskedLM,
    SubquadBertForPreTraining,
    SubquadBertForSequenceClassification,
    SubquadBertModel,
)
from tests.tiny_bert import tiny_bert, tiny_bert_config, tiny_bert_tokens
from tests.tiny_llama import relative_error, tiny_teacher

MIXERS = {
    "cottention": {"preset": "cottention"},
    "linear-identity": {"preset": "linear-identity"},
    "linear-relu": {"preset": "linear-relu"},
    "linear-elu": {"preset": "linear-elu"},
    "taylor": {"preset": "taylor"},
    "taylor-4": {"preset": "taylor", "order": 4},
    "taylor-relu": {"preset": "taylor-relu"},
    "taylor-cosine": {"preset": "taylor-cosine"},
    "based": {"preset": "based", "feature_dim": 5},
    "square": {"preset": "2mamba", "decay": "none", "conv_width": 1},
    "gate, skip, step": {"preset": "linear-elu", "output_gate": "silu", "skip": True, "value_step": "softplus"},
    "softmax-rms": {"preset": "softmax-rms"},
    "softmax-gate": {"preset": "softmax-gate"},
    "one head exact": {"preset": "cottention", "exact_kv_heads": [1]},
}
CLASSES = {
    BertModel: SubquadBertModel,
    BertForMaskedLM: SubquadBertForMaskedLM,
    BertForPreTraining: SubquadBertForPreTraining,
    BertForSequenceClassification: SubquadBertForSequenceClassification,
}
all_mixers = pytest.mark.parametrize("name", MIXERS)


def convert(teacher, mixer="cottention", layers=None, randomise=True):
    mixer = resolve_mixer({**MIXERS.get(mixer, mixer), "causal": False}) if isinstance(mixer, str | dict) else mixer
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer, layers))
    if randomise:
        torch.manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if ".mixer." in key:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def mask(lengths, seq_len, side="right"):
    steps = torch.arange(seq_len)
    rows = [steps < length if side == "right" else steps >= seq_len - length for length in lengths]
    return torch.stack(rows).long()


@torch.no_grad()
@all_mixers
def test_student_differs_from_its_teacher_and_teacher_mode_is_the_teacher(name):
    teacher, ids, real = tiny_bert(BertForMaskedLM), tiny_bert_tokens(), mask((23, 9), 23)
    expected = teacher(ids, attention_mask=real).logits
    model = convert(teacher, name)
    assert type(model) is SubquadBertForMaskedLM
    assert relative_error(model(ids, attention_mask=real).logits, expected) > 1e-3
    with attention_mode(model, "teacher"):
        assert torch.equal(model(ids, attention_mask=real).logits, expected)


@torch.no_grad()
def test_cottention_is_the_papers_formula():
    teacher = tiny_bert(BertModel)
    model = convert(teacher, "cottention")
    attention = model.encoder.layer[0].attention.self
    hidden, length = torch.randn(1, 23, 36), 17
    real = mask((length,), 23)
    q, k, v = (project(hidden)[0].view(23, 3, 12) for project in (attention.query, attention.key, attention.value))
    cosine = torch.nn.functional.cosine_similarity(q[:, None], k[None, :, :], dim=-1)
    exponent = attention.mixer.position_step.exponent.sigmoid()
    expected = torch.zeros(23, 3, 12)
    for s in range(length):
        expected += cosine[:, s, :, None] * v[s] / length ** exponent[:, None]
    captured = {}
    attention.register_forward_hook(lambda module, args, out: captured.update(out=out[0]))
    layer = model.encoder.layer[0]
    layer(hidden, sequence=sequence_of(real))
    assert relative_error(captured["out"][0, :length], expected.flatten(1)[:length]) < 1e-5


def sequence_of(real):
    from subquad.layers.sequence import SequenceInfo

    return SequenceInfo.from_masks(real, None, real.shape[1], cached=False)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["student", "teacher"])
@all_mixers
def test_neither_batch_nor_padding_changes_a_logit(name, mode):
    model, ids = convert(tiny_bert(BertForMaskedLM), name), tiny_bert_tokens(3)
    lengths = (23, 9, 1)
    with attention_mode(model, mode):
        alone = [model(row[None, :length]).logits[0] for row, length in zip(ids, lengths, strict=True)]
        together = model(ids, attention_mask=mask(lengths, 23)).logits
        for row, length, expected in zip(together, lengths, alone, strict=True):
            assert relative_error(row[:length], expected) < 1e-5
        # Padding before the text: positions are given, as BERT's embeddings would count the padding.
        left = torch.stack([row.roll(23 - length) for row, length in zip(ids, lengths, strict=True)])
        positions = torch.stack([(torch.arange(23) - (23 - length)).clamp_min(0) for length in lengths])
        together = model(left, attention_mask=mask(lengths, 23, "left"), position_ids=positions).logits
        for row, length, expected in zip(together, lengths, alone, strict=True):
            assert relative_error(row[23 - length :], expected) < 1e-5


@torch.no_grad()
@all_mixers
def test_a_token_sees_those_after_it(name):
    model, ids = convert(tiny_bert(BertForMaskedLM), name), tiny_bert_tokens(1)
    changed = ids.clone()
    changed[0, -1] = 5 + (ids[0, -1] - 4) % 90
    first = [model(tokens).logits[0, 0] for tokens in (ids, changed)]
    assert relative_error(first[0], first[1]) > 1e-4


@all_mixers
def test_every_mixer_parameter_and_projection_gets_a_finite_gradient(name):
    model, ids = convert(tiny_bert(BertForMaskedLM), name), tiny_bert_tokens()
    real = mask((23, 9), 23)
    labels = ids.masked_fill(real == 0, -100)
    model(ids, attention_mask=real, labels=labels).loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        if ".mixer." in key:
            assert parameter.grad.abs().max() > 0, key


def test_a_row_of_padding_alone_is_finite():
    model, ids = convert(tiny_bert(BertForMaskedLM), "taylor"), tiny_bert_tokens()
    out = model(ids, attention_mask=mask((23, 0), 23), labels=ids)
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_converts_and_is_restored_to_the_bit(kind):
    teacher, ids = tiny_bert(kind), tiny_bert_tokens()
    expected = teacher(ids)[0]
    query = teacher.base_model.encoder.layer[0].attention.self.query
    model = convert(teacher)
    assert type(model) is CLASSES[kind]
    assert type(model.base_model) is SubquadBertModel
    assert model.config.model_type == "subquad_bert"
    assert model.base_model.encoder.layer[0].attention.self.query is query
    assert relative_error(model(ids)[0], expected) > 1e-3
    restored = undo_plan(model)
    assert type(restored) is kind
    assert type(restored.base_model) is BertModel
    assert restored.config.architectures == [kind.__name__]
    assert not converted_layers(restored)
    assert torch.equal(restored(ids)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_teacher_mode_equals_the_teacher_with_every_attention(attention):
    teacher, ids, real = tiny_bert(BertForMaskedLM), tiny_bert_tokens(), mask((23, 9), 23)
    teacher.set_attn_implementation(attention)
    expected = teacher(ids, attention_mask=real).logits
    model = convert(teacher)
    with attention_mode(model, "teacher"):
        assert torch.equal(model(ids, attention_mask=real).logits, expected)


def test_teacher_mode_has_the_teachers_dropout_in_training():
    teacher, ids = (
        tiny_bert(BertForMaskedLM, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0),
        tiny_bert_tokens(),
    )
    model = convert(copy.deepcopy(teacher)).train()
    teacher.train()
    torch.manual_seed(0)
    expected = teacher(ids).logits
    torch.manual_seed(0)
    with attention_mode(model, "teacher"):
        assert torch.equal(model(ids).logits, expected)
    assert torch.equal(model(ids).logits, model(ids).logits)  # a mixer has none


def test_transfer_measures_each_layer_and_trains_its_mixer():
    model, ids = convert(tiny_bert(BertForMaskedLM)), tiny_bert_tokens()
    model.requires_grad_(False)
    for layer in converted_layers(model):
        layer.mixer.requires_grad_(True)
    with attention_mode(model, "transfer"):
        model(ids, attention_mask=mask((23, 9), 23))
    losses = collect_local_losses(model)
    assert set(losses) == {0, 1}
    assert all(loss.item() > 0 for loss in losses.values())
    sum(losses.values()).backward()
    assert all(layer.mixer.position_step.exponent.grad.abs().min() > 0 for layer in converted_layers(model))


@torch.no_grad()
def test_some_layers_stay_softmax():
    teacher, ids = tiny_bert(BertForMaskedLM), tiny_bert_tokens()
    expected = teacher(ids).logits
    cottention = resolve_mixer({"preset": "cottention", "causal": False})
    model = convert(teacher, resolve_mixer("softmax"), {"1": cottention})
    assert [layer.layer_idx for layer in converted_layers(model)] == [1]
    assert model.config.mixers[0] is None
    assert relative_error(model(ids).logits, expected) > 1e-3
    undo_plan(model)
    plain = convert(teacher, resolve_mixer("softmax"))
    assert torch.equal(plain(ids).logits, expected)


@torch.no_grad()
def test_saved_models_load_by_every_auto_class(tmp_path):
    model, ids = convert(tiny_bert()), tiny_bert_tokens()
    model.save_pretrained(tmp_path)
    expected = model(ids)
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).seq_relationship_logits, expected.seq_relationship_logits)
    masked = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(masked) is SubquadBertForMaskedLM
    assert torch.equal(masked(ids).logits, expected.prediction_logits)
    assert masked.cls.predictions.decoder.weight is masked.bert.embeddings.word_embeddings.weight
    body = AutoModel.from_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier) is SubquadBertForSequenceClassification
    for part in (body, classifier.bert):
        assert torch.equal(part(ids).pooler_output, model.bert(ids).pooler_output)
    assert classifier(ids).logits.shape == (2, 3)


def test_mixer_parameters_stay_float32(tmp_path):
    convert(tiny_bert(), "taylor").save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".mixer." in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if ".mixer." not in name} == {torch.bfloat16}
    assert model(tiny_bert_tokens()).logits.isfinite().all()


def test_random_start_from_a_config_is_the_start_of_a_conversion():
    config = SubquadBertConfig(**tiny_bert_config().to_dict() | {"model_type": "subquad_bert"})
    config.mixers = [None, resolve_mixer({"preset": "cottention", "causal": False}).model_dump(mode="json")]
    model = AutoModelForMaskedLM.from_config(config)
    (layer,) = converted_layers(model)
    assert layer.layer_idx == 1
    assert torch.equal(layer.mixer.position_step.exponent, torch.full((3,), 0.5))


def test_hidden_states_are_recorded_after_surgery():
    assert len(convert(tiny_bert())(tiny_bert_tokens(), output_hidden_states=True).hidden_states) == 3


def test_gradient_checkpointing_changes_no_gradient():
    model, ids = convert(tiny_bert(BertForMaskedLM), "taylor").train(), tiny_bert_tokens()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        model.zero_grad()
        model(ids, attention_mask=mask((23, 9), 23), labels=ids).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-6) for name in grads[0])


def test_what_an_encoder_cannot_take_is_refused():
    model, ids = convert(tiny_bert(BertForMaskedLM)), tiny_bert_tokens()
    plan = plan_conversion(tiny_bert_config(), resolve_mixer({"preset": "cottention", "causal": False}))
    with pytest.raises(ConfigError, match="2-D mask"):
        model(ids, attention_mask=torch.ones(2, 1, 23, 23))
    with pytest.raises(ConfigError, match="converted already"):
        apply_plan(model, plan)
    llama = tiny_teacher()
    with pytest.raises(ConfigError, match="plan of the family bert, got LlamaForCausalLM"):
        apply_plan(llama, plan)
