"""What each stage trains, what it leaves alone, and how it stops."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from subquad.convert.export import merge_adapters
from subquad.distill import (
    LossWeights,
    Stage1Config,
    Stage2Config,
    adapters_disabled,
    add_lora,
    newest_valid_checkpoint,
    run_stage1,
    run_stage2,
)
from subquad.distill.callbacks import read_log
from subquad.distill.config import LORA_TARGETS
from subquad.distill.objectives import LogitObjective
from subquad.errors import ConfigError, DataError, OutputError, TrainingError
from subquad.layers import attention_mode

from .tiny import SEQ_LEN, tiny_config, tiny_dataset, tiny_model, tiny_teacher

MIXER = ".self_attn.mixer."


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(model, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def test_stage1_trains_the_mixers_only_and_lowers_their_loss(tmp_path):
    model, data = tiny_model(), tiny_dataset()
    before = snapshot(model)
    mixer_names = {name for name in before if MIXER in name}
    config = tiny_config("stage1", tokens=60 * 2 * SEQ_LEN, logging_steps=10)
    result = run_stage1(model, data, config, tmp_path / "stage1", tmp_path / "log.jsonl")
    assert moved(model, before) == mixer_names
    assert result.trainable_parameters == sum(before[name].numel() for name in mixer_names)
    assert (result.steps, result.tokens) == (60, 60 * 2 * SEQ_LEN)
    assert result.last_loss < 0.8 * result.first_loss
    assert not model.training


def test_stage1_never_computes_logits(tmp_path):
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("stage 1 computed logits"))
    run_stage1(model, tiny_dataset(), tiny_config("stage1"), tmp_path / "stage1", tmp_path / "log.jsonl")


def test_stage1_has_a_rate_per_group(tmp_path):
    config = tiny_config("stage1", learning_rate=0.3, map_learning_rate=0.2, decay_learning_rate=0.1, warmup_ratio=0.0)
    run_stage1(tiny_model(), tiny_dataset(), config, tmp_path / "stage1", tmp_path / "log.jsonl")
    rates = [line["lr"] for line in read_log(tmp_path / "log.jsonl", "stage1")]
    # the third of ten steps of a cosine
    share = 0.5 * (1 + math.cos(math.pi * 2 / 10))
    assert rates[0] == pytest.approx({"other": 0.3 * share, "maps": 0.2 * share, "decay": 0.1 * share})


def test_stage1_of_a_model_without_mixers_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no converted layer with parameters"):
        run_stage1(tiny_teacher(), tiny_dataset(), tiny_config("stage1"), tmp_path, tmp_path / "log.jsonl")


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_stage2_trains_adapters_and_mixers_under_checkpointing_too(gradient_checkpointing, tmp_path):
    model, data = tiny_model(), tiny_dataset()
    teacher_logits = teacher_output(model, data)
    before, loss_before = snapshot(model), divergence(model, data)
    config = tiny_config(
        "stage2",
        tokens=25 * 8 * SEQ_LEN,
        batch_size=8,
        learning_rate=3e-3,
        mixer_learning_rate=1e-2,
        gradient_checkpointing=gradient_checkpointing,
    )
    result = run_stage2(model, data, config, tmp_path / "stage2", tmp_path / "log.jsonl")
    after = dict(model.named_parameters())
    adapters = {name for name in after if ".lora_" in name}
    # lora_B starts at zero, so lora_A moves only if gradients reached both
    assert all(after[name].abs().sum() > 0 for name in adapters if ".lora_B." in name)
    assert {name for name in before if name in after and not torch.equal(after[name], before[name])} == {
        name for name in before if MIXER in name
    }
    assert {after[name].requires_grad for name in adapters} == {True}
    assert result.trainable_parameters == sum(p.numel() for p in after.values() if p.requires_grad)
    assert divergence(model, data) < 0.8 * loss_before
    assert torch.equal(teacher_output(model, data), teacher_logits)
    assert not model.model.gradient_checkpointing


def teacher_output(model, data) -> torch.Tensor:
    model.eval()
    with torch.no_grad(), attention_mode(model, "teacher"), adapters_disabled(model):
        return model(data[:2]["input_ids"], position_ids=data[:2]["position_ids"], use_cache=False).logits


def divergence(model, data, teacher=None) -> float:
    """The stage's loss over all rows, so that no batch's own difficulty counts."""
    model.eval()
    with torch.no_grad():
        return LogitObjective(model, teacher, LossWeights(), 64)(**data[:])["loss"].item()


def test_adapter_gradients_are_the_same_with_and_without_checkpointing(tmp_path):
    curves = []
    for checkpointing in (False, True):
        folder = tmp_path / str(checkpointing)
        config = tiny_config("stage2", gradient_checkpointing=checkpointing, lora_dropout=0.0)
        run_stage2(tiny_model(), tiny_dataset(), config, folder / "stage2", folder / "log.jsonl")
        curves.append([(line["loss"], line["grad_norm"]) for line in read_log(folder / "log.jsonl", "stage2")])
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-4, atol=1e-7)


def test_first_loss_of_stage2_is_the_divergence_to_the_teacher(tmp_path):
    model, data = tiny_model(), tiny_dataset()
    # one step on all rows, before any update
    config = tiny_config("stage2", tokens=1, batch_size=len(data), lora_dropout=0.0)
    reference = tiny_model().eval()
    # without a cache, since only then do restarting positions mean documents
    inputs = {"input_ids": data[:]["input_ids"], "position_ids": data[:]["position_ids"], "use_cache": False}
    with torch.no_grad():
        student = reference(**inputs).logits.log_softmax(-1)
        with attention_mode(reference, "teacher"):
            teacher = reference(**inputs).logits.log_softmax(-1)
    counts = data[:]["labels"][:, 1:] != -100
    divergence = (teacher.exp() * (teacher - student)).sum(-1)[:, :-1][counts].mean()
    result = run_stage2(model, data, config, tmp_path / "stage2", tmp_path / "log.jsonl")
    assert result.first_loss == pytest.approx(divergence.item(), rel=1e-4)


def test_teacher_of_adapters_is_the_model_before_training():
    model, data = tiny_model(), tiny_dataset()
    separate = tiny_teacher()
    separate.load_state_dict({name: t for name, t in model.state_dict().items() if MIXER not in name})
    add_lora(model, 3, 6.0, 0.0, LORA_TARGETS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    assert divergence(model, data) == pytest.approx(divergence(model, data, separate.eval()), rel=1e-5)


def test_objective_works_without_labels():
    batch = tiny_dataset()[:3]
    objective = LogitObjective(tiny_model(), None, LossWeights(ce=0.5), 16)
    with_labels = objective(**batch)["loss"]
    assert objective(input_ids=batch["input_ids"], position_ids=batch["position_ids"])["loss"] == with_labels


def test_full_tuning_trains_all_weights_against_a_separate_teacher(tmp_path):
    model, teacher, data = tiny_model().bfloat16(), tiny_teacher(), tiny_dataset()
    teacher_before, loss_before = snapshot(teacher), divergence(tiny_model(), data, teacher)
    config = tiny_config("stage2", full=True, learning_rate=1e-3, tokens=25 * 8 * SEQ_LEN, batch_size=8)
    result = run_stage2(model, data, config, tmp_path / "stage2", tmp_path / "log.jsonl", teacher=teacher)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert moved(model, snapshot(tiny_model())) == set(snapshot(model))
    assert not moved(teacher, teacher_before)
    assert divergence(model, data, teacher) < 0.8 * loss_before
    assert not any(key.startswith("teacher") for key in load_file(result.checkpoint / "model.safetensors"))


@pytest.mark.parametrize("full", [False, True])
def test_teacher_and_full_go_together(full, tmp_path):
    teacher = None if full else tiny_teacher()
    with pytest.raises(ConfigError, match="needs a separate teacher"):
        run_stage2(
            tiny_model(),
            tiny_dataset(),
            tiny_config("stage2", full=full),
            tmp_path / "stage2",
            tmp_path / "log.jsonl",
            teacher=teacher,
        )


def test_trained_adapters_merge(tmp_path):
    model, data = tiny_model(), tiny_dataset()
    run_stage2(model, data, tiny_config("stage2"), tmp_path / "stage2", tmp_path / "log.jsonl")
    batch = {key: data[:2][key] for key in ("input_ids", "position_ids")} | {"use_cache": False}
    with torch.no_grad():
        adapted = model(**batch).logits
        merge_adapters(model)
        assert (model(**batch).logits - adapted).norm() / adapted.norm() < 1e-5


def test_accumulated_batches_are_one_large_batch(tmp_path):
    curves = []
    # rows of one document each, so that every batch has the same number of predicted tokens
    data = tiny_dataset().map(lambda row: {"position_ids": torch.arange(SEQ_LEN)}).remove_columns("labels")
    for batch_size, accumulated in ((4, 1), (1, 4)):
        folder = tmp_path / str(batch_size)
        config = tiny_config(
            "stage2", batch_size=batch_size, gradient_accumulation_steps=accumulated, lora_dropout=0.0, tokens=480
        )
        run_stage2(tiny_model(), data, config, folder / "stage2", folder / "log.jsonl")
        curves.append([(line["loss"], line["grad_norm"]) for line in read_log(folder / "log.jsonl", "stage2")])
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-4, atol=1e-7)


def test_nan_stops_names_the_last_good_checkpoint_and_keeps_it(tmp_path):
    model = tiny_model()
    rows = tiny_dataset()
    # an embedding that turns to NaN after the first checkpoint, as a bad batch would make it
    calls = []

    def poison(module, inputs, output):
        calls.append(None)
        return output * math.nan if len(calls) > 6 else output

    model.model.embed_tokens.register_forward_hook(poison)
    work_dir = tmp_path / "stage1"
    good = work_dir / "checkpoint-4"
    with pytest.raises(TrainingError, match=rf"step 8: loss nan.*last good checkpoint is kept: {good}\. Try learning"):
        run_stage1(model, rows, tiny_config("stage1"), work_dir, tmp_path / "log.jsonl")
    assert newest_valid_checkpoint(work_dir) == good
    assert all(torch.isfinite(tensor).all() for tensor in load_file(good / "model.safetensors").values())
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl", "stage1")] == [3, 4, 6]


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    # loss and gradient of the saving step are finite: only its update is not
    def overflow(optimizer, args, kwargs):
        optimizer.param_groups[0]["params"][0].data.fill_(math.inf)

    hook = register_optimizer_step_post_hook(overflow)
    try:
        with pytest.raises(TrainingError, match=r"parameters or loss are NaN or infinite at step 1; nothing was saved"):
            run_stage1(
                tiny_model(),
                tiny_dataset(),
                tiny_config("stage1", save_steps=1),
                tmp_path / "stage1",
                tmp_path / "log.jsonl",
            )
    finally:
        hook.remove()
    assert not list((tmp_path / "stage1").glob("checkpoint-*"))


def test_full_disk_is_one_clear_error_and_keeps_the_checkpoints(tmp_path, monkeypatch):
    saved = []

    def save_until_full(obj, path, **kwargs):
        saved.append(path)
        if len(saved) > 3:
            raise OSError(28, "No space left on device")
        return torch_save(obj, path, **kwargs)

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", save_until_full)
    with pytest.raises(OutputError, match=r"at step 8: .*No space left.*the last good checkpoint is .*checkpoint-4"):
        run_stage1(tiny_model(), tiny_dataset(), tiny_config("stage1"), tmp_path / "stage1", tmp_path / "log.jsonl")
    assert [path.name for path in (tmp_path / "stage1").glob("*-*")] == ["checkpoint-4"]
    assert not (tmp_path / "stage1" / "incomplete").exists()


def test_too_few_rows_for_a_batch(tmp_path):
    with pytest.raises(DataError, match=r"has 3 rows of 24 tokens, but one batch over 1 processes takes 8"):
        run_stage1(
            tiny_model(),
            tiny_dataset().select(range(3)),
            tiny_config("stage1", batch_size=8),
            tmp_path / "stage1",
            tmp_path / "log.jsonl",
        )


def test_streamed_rows_train_as_stored_ones_do(tmp_path):
    stream = tiny_dataset().to_iterable_dataset()
    result = run_stage1(tiny_model(), stream, tiny_config("stage1"), tmp_path / "stage1", tmp_path / "log.jsonl")
    assert result.steps == 10
    assert math.isfinite(result.last_loss)


def test_unusable_work_folder(tmp_path):
    (tmp_path / "stage1").write_text("a file")
    with pytest.raises(OutputError, match=r"cannot use the work folder .*stage1"):
        run_stage1(tiny_model(), tiny_dataset(), tiny_config("stage1"), tmp_path / "stage1", tmp_path / "log.jsonl")


@pytest.mark.parametrize(
    "make, messages",
    [
        (lambda: Stage1Config(tokens=0, warmup_ratio=1.5), ["tokens must be at least 1, got 0", "warmup_ratio"]),
        (lambda: Stage1Config(tokens=1, map_learning_rate=-1.0), ["map_learning_rate must be above 0, got -1.0"]),
        (
            lambda: Stage2Config(tokens=1, kl_weight=0.0, temperature=0.0, lora_rank=0),
            ["kl_weight, ce_weight and hidden_weight", "temperature", "lora_rank"],
        ),
    ],
)
def test_configs_list_every_problem(make, messages):
    with pytest.raises(ConfigError) as error:
        make()
    assert all(message in str(error.value) for message in messages)
