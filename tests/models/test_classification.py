"""The classification head: loading by the Auto classes, padding on either side, batches, stock training."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForSequenceClassification, Trainer, TrainingArguments

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.layers import attention_mode, resolve_mixer
from subquad.models import SubquadLlamaForCausalLM, SubquadLlamaForSequenceClassification, SubquadLlamaModel
from tests.tiny_llama import tiny_teacher

PAD = 0
MIXERS = {
    "window": {"preset": "2mamba", "window": 8, "sinks": 2},
    "pure": {"preset": "taylor", "window": 0, "sinks": 0},
    "some heads exact": {"preset": "2mamba", "window": 8, "sinks": 2, "exact_kv_heads": [0]},
}


def student(mixer: object = MIXERS["window"]) -> SubquadLlamaForCausalLM:
    teacher = tiny_teacher()
    model = apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer(mixer), layers=None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_mix"):
                parameter.fill_(0.0)
    return model


@pytest.fixture(params=MIXERS)
def classifier(request, tmp_path) -> SubquadLlamaForSequenceClassification:
    """A head on a student, loaded from the student's own checkpoint."""
    student(MIXERS[request.param]).save_pretrained(tmp_path)
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()


def rows(lengths=(5, 40, 17, 9, 1, 33, 8, 24)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def padded(texts: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD, padding_side=side)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


def test_a_students_checkpoint_loads_with_a_new_head(classifier, tmp_path):
    assert isinstance(classifier, SubquadLlamaForSequenceClassification)
    trained = SubquadLlamaForCausalLM.from_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    assert isinstance(body, SubquadLlamaModel)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(classifier.model.state_dict()[name], tensor), name
        assert torch.equal(body.state_dict()[name], tensor), name


def test_saved_and_loaded_heads_give_the_same_logits(classifier, tmp_path):
    classifier.save_pretrained(tmp_path / "head")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head")
    batch = padded(rows(), "right")
    assert torch.equal(loaded(**batch).logits, classifier(**batch).logits)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["student", "teacher"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_neither_batch_nor_padding_changes_a_logit(classifier, mode, use_cache):
    texts = rows()
    with attention_mode(classifier, mode):
        alone = torch.cat([classifier(text[None], use_cache=use_cache).logits for text in texts])
        for side in ("right", "left"):
            together = classifier(**padded(texts, side), use_cache=use_cache).logits
            assert (together - alone).abs().max() < 1e-4 * alone.abs().max(), side
    assert alone.std(0).min() > 1e-3


@torch.no_grad()
def test_the_head_reads_the_last_real_token_and_the_whole_row(classifier):
    text = rows()[1]
    before = classifier(text[None]).logits
    for position in (0, len(text) - 1):
        changed = text.clone()
        changed[position] = 3 + (changed[position] - 2) % 94
        assert not torch.allclose(classifier(changed[None]).logits, before, atol=1e-4), position


def test_mixers_stay_float32_in_a_bfloat16_classifier(tmp_path):
    student().save_pretrained(tmp_path)
    for auto in (AutoModelForSequenceClassification, AutoModel):
        model = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        assert {dtype for name, dtype in dtypes.items() if ".mixer." in name} == {torch.float32}
        assert {dtype for name, dtype in dtypes.items() if ".mixer." not in name} == {torch.bfloat16}


def test_a_random_start_from_a_config_starts_mixers_at_the_identity():
    config = student().config
    config.num_labels = 2
    model = AutoModelForSequenceClassification.from_config(config)
    assert torch.equal(model.model.layers[0].self_attn.mixer.score.key_map[0], torch.eye(8))
    assert model.score.weight.shape == (2, 36)


def test_a_stock_trainer_fits_it(tmp_path):
    student().save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    texts = [row.tolist() for row in torch.stack(rows((12,) * 16))]
    dataset = Dataset.from_dict({"input_ids": texts, "labels": [text[0] % 2 for text in texts]})
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=12,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(model, args, train_dataset=dataset)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    assert trainer.predict(dataset).predictions.argmax(-1).tolist() == dataset["labels"][:]
    now = dict(model.named_parameters())
    assert [name for name, old in start.items() if torch.equal(old, now[name])] == []
