"""A tiny model and tiny data, and (run as a script) a stage that kills itself, for the tests of distillation."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import subquad.distill.trainer as trainer_module
from subquad.distill import Stage1Config, Stage2Config, StageResult, run_stage1, run_stage2
from subquad.distill.callbacks import LogFile
from subquad.distill.packing import pack_documents
from subquad.layers import MixerConfig, resolve_mixer
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM

VOCAB_SIZE = 61
SEQ_LEN = 24
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # large enough that attention matters: at the default 0.02 every position predicts nearly the same
    "initializer_range": 0.3,
}
STEPS = 10
SAVE_STEPS = 4


def tiny_mixer() -> MixerConfig:
    return resolve_mixer("2mamba").model_copy(update={"window": 4, "sinks": 1, "qk_maps": True})


def tiny_model() -> SubquadLlamaForCausalLM:
    torch.manual_seed(0)
    model = SubquadLlamaForCausalLM(SubquadLlamaConfig(**SIZES, mixers=[tiny_mixer().model_dump()] * 2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_mix"):
                # a far part large enough that its parameters have something to do
                parameter.fill_(-2.0)
    return model


def tiny_teacher() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def tiny_dataset(num_documents: int = 40) -> Dataset:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, VOCAB_SIZE, size) for size in generator.integers(3, 60, num_documents)]
    return Dataset.from_dict(pack_documents(documents, SEQ_LEN)).with_format("torch")


def tiny_config(stage: str, **changes: object) -> Stage1Config | Stage2Config:
    common = {
        "tokens": STEPS * 2 * SEQ_LEN,
        "batch_size": 2,
        "save_steps": SAVE_STEPS,
        "logging_steps": 3,
        "show_progress": False,
        "learning_rate": 1e-2,
    }
    if stage == "stage1":
        return Stage1Config(**common | changes)
    return Stage2Config(**common | {"lora_dropout": 0.2, "gradient_checkpointing": True} | changes)


def run_tiny(stage: str, folder: Path, **changes: object) -> StageResult:
    run = run_stage1 if stage == "stage1" else run_stage2
    return run(tiny_model(), tiny_dataset(), tiny_config(stage, **changes), folder / stage, folder / "log.jsonl")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_second_save() -> None:
    """Die when all files of the second checkpoint are written but it is not published."""
    publish = trainer_module.publish_checkpoint

    def publish_or_die(staged: Path, work_dir: Path) -> Path:
        if staged.name == f"checkpoint-{2 * SAVE_STEPS}":
            _die()
        return publish(staged, work_dir)

    trainer_module.publish_checkpoint = publish_or_die


def kill_between_saves() -> None:
    """Die in the middle of writing the log line of a step between two checkpoints."""
    on_log = LogFile.on_log

    def on_log_or_die(self, args, state, control, **kwargs):
        if state.global_step > SAVE_STEPS + 1:
            with self.path.open("a", encoding="utf-8") as file:
                file.write('{"stage": "sta')
            _die()
        return on_log(self, args, state, control, **kwargs)

    LogFile.on_log = on_log_or_die


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"in_second_save": kill_in_second_save, "between_saves": kill_between_saves}[sys.argv[3]]()
    run_tiny(sys.argv[1], Path(sys.argv[2]))
