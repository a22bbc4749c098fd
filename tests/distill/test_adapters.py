"""LoRA adapters on a converted model."""

import pytest
import torch

from subquad.convert.export import merge_adapters
from subquad.distill import adapters_disabled, add_lora
from subquad.distill.config import LORA_TARGETS
from subquad.errors import ConfigError
from subquad.layers import attention_mode

from .tiny import SEQ_LEN, VOCAB_SIZE, tiny_model


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def adapted_model(**changes):
    model = tiny_model()
    count = add_lora(model, **{"rank": 3, "alpha": 6.0, "dropout": 0.0, "target_modules": LORA_TARGETS} | changes)
    return model, count


def disturb_adapters(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)


def test_fresh_adapters_change_nothing_and_are_all_that_trains(input_ids):
    plain = tiny_model().eval()(input_ids).logits
    model, count = adapted_model()
    assert torch.equal(model.eval()(input_ids).logits, plain)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trainable)
    # 2 layers; q and o are 32 x 32, k and v 16 x 32
    assert count == sum(p.numel() for p in trainable.values()) == 2 * 3 * (2 * (32 + 32) + 2 * (32 + 16))


def test_adapters_of_a_bfloat16_model_are_float32():
    model = tiny_model().bfloat16()
    add_lora(model, 2, 2.0, 0.0, ["q_proj"])
    dtypes = {name.split(".lora_")[0][-6:]: p.dtype for name, p in model.named_parameters() if ".lora_" in name}
    assert dtypes == {"q_proj": torch.float32}


@pytest.mark.parametrize("mode", ["student", "teacher"])
def test_disabled_adapters_give_the_model_before(mode, input_ids):
    with torch.no_grad(), attention_mode(plain := tiny_model().eval(), mode):
        before = plain(input_ids).logits
    model, _ = adapted_model()
    disturb_adapters(model)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad(), attention_mode(model, mode):
        with adapters_disabled(model):
            assert torch.equal(model(input_ids).logits, before)
            assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        assert not torch.allclose(model(input_ids).logits, before, atol=1e-2)


def test_merged_model_is_a_plain_one_with_the_same_output(input_ids):
    model, _ = adapted_model()
    disturb_adapters(model)
    model.eval()
    adapted = model(input_ids).logits
    assert merge_adapters(model) is model
    merged = model(input_ids).logits
    assert (merged - adapted).norm() / adapted.norm() < 1e-5
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in tiny_model().named_parameters()]


def test_targets_that_match_nothing_are_named():
    with pytest.raises(ConfigError, match=r"\['w_proj'\] match no linear layer; the model has .*q_proj"):
        adapted_model(target_modules=["q_proj", "w_proj"])


def test_adapters_on_adapters_are_refused():
    model, _ = adapted_model()
    with pytest.raises(ConfigError, match="already has adapters"):
        add_lora(model, 2, 2.0, 0.0, ["q_proj"])
