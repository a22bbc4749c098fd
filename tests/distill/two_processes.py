"""Run by torchrun in two processes: a stage under DDP, or the objectives' gradients under FSDP2, on CPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2]))

from subquad.distill import LossWeights, add_lora, run_stage1, run_stage2
from subquad.distill.config import LORA_TARGETS
from subquad.distill.objectives import LogitObjective, Objective, TransferObjective
from tests.distill.tiny import tiny_config, tiny_dataset, tiny_model, tiny_teacher


def run_both_stages(folder: Path, accumulated: int) -> None:
    data = tiny_dataset()
    settings = {"batch_size": 1, "gradient_accumulation_steps": accumulated}
    config1, config2 = tiny_config("stage1", **settings), tiny_config("stage2", lora_dropout=0.0, **settings)
    run_stage1(tiny_model(), data, config1, folder / "stage1", folder / "log.jsonl")
    run_stage2(tiny_model(), data, config2, folder / "stage2", folder / "log.jsonl")


def make_objective(case: str) -> Objective:
    model = tiny_model()
    if case == "transfer":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mixer." in name)
        return TransferObjective(model).train()
    if case == "full":
        return LogitObjective(model, tiny_teacher().requires_grad_(False), LossWeights(ce=0.3), 16).train()
    torch.manual_seed(0)
    add_lora(model, 3, 6.0, 0.0, LORA_TARGETS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mixer." in name or ".lora_" in name)
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return LogitObjective(model, None, LossWeights(), 16).train()


def shard(objective: Objective) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for model in objective.children():
        if isinstance(model, PreTrainedModel):
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def compare_sharded_gradients(case: str) -> None:
    """Assert that the sharded objective's gradients are the mean over the processes of the plain one's."""
    rank = dist.get_rank()
    batch = {name: rows[2 * rank : 2 * rank + 2] for name, rows in tiny_dataset()[:4].items()}
    if case == "transfer":
        del batch["labels"]
    plain, sharded = make_objective(case), make_objective(case)
    shard(sharded)
    for objective in (plain, sharded):
        for _ in range(2):
            objective(**batch)["loss"].backward()
    compared = 0
    for (name, reference), parameter in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if not reference.requires_grad:
            continue
        mean = reference.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        gradient = parameter.grad.full_tensor()
        assert mean.norm() > 0, name
        assert (gradient - mean).norm() < 1e-5 * mean.norm(), name
        compared += 1
    assert compared > 15


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "ddp":
        run_both_stages(Path(sys.argv[2]), accumulated=1)
    else:
        dist.init_process_group("gloo")
        for name in ("transfer", "adapters", "full"):
            compare_sharded_gradients(name)
    dist.barrier()
    sys.stderr.flush()
    # Everything is checked or written. Tearing gloo's threads down can abort a process ("terminate called without an
    # active exception"), which says nothing about training.
    os._exit(0)
