"""`DistillTrainer`: transformers' Trainer with learning rates per parameter group and crash-safe checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from subquad.distill.checkpoints import (
    STAGING_DIR,
    discard_staged,
    load_trainable,
    newest_valid_checkpoint,
    publish_checkpoint,
    remove_old_checkpoints,
    save_trainable,
)
from subquad.distill.objectives import Objective
from subquad.distill.rows import TokenRows
from subquad.errors import ConfigError, OutputError, TrainingError


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """One parameter group: the parameters it takes and how fast they learn.

    Attributes:
        name: Name of the group in logs.
        pattern: Regular expression searched in a parameter's name.
        learning_rate: Peak learning rate.
        weight_decay: Decoupled weight decay of AdamW.
    """

    name: str
    pattern: str
    learning_rate: float
    weight_decay: float = 0.0


def parameter_groups(model: nn.Module, rules: Sequence[GroupRule]) -> list[dict[str, Any]]:
    """Sort the trainable parameters into groups for an optimizer.

    Args:
        model: The model.
        rules: The first rule whose pattern is found in a parameter's name takes it.

    Returns:
        One dict per rule that takes any parameter: `params`, `name`, `lr`, `weight_decay`.

    Raises:
        ConfigError: A trainable parameter that no rule takes, or no trainable parameter at all.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rule = next((rule for rule in rules if re.search(rule.pattern, name)), None)
        if rule is None:
            raise ConfigError(f"no learning rate for {name}; the groups are {', '.join(rule.name for rule in rules)}")
        empty = {"params": [], "name": rule.name, "lr": rule.learning_rate, "weight_decay": rule.weight_decay}
        groups.setdefault(rule.name, empty)["params"].append(parameter)
    if not groups:
        raise ConfigError("no parameter of the model requires a gradient, so there is nothing to train")
    return list(groups.values())


class DistillTrainer(Trainer):
    """Trains an `Objective`.

    Checkpoints hold the trainable parameters (with FSDP also everything, as the Trainer shards it), optimizer,
    scheduler, random state and position in the data. They are written under another name and renamed when whole; one
    whose parameters or loss are not finite is never written, so the last one kept is good. Distribution, gradient
    accumulation, autocast and resuming are the Trainer's own.

    Attributes:
        rules: Parameter groups.
        keep_checkpoints: How many checkpoints stay.
    """

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        dataset: TokenRows,
        rules: Sequence[GroupRule],
        callbacks: list[TrainerCallback],
        keep_checkpoints: int = 2,
    ) -> None:
        """Set up training.

        Args:
            objective: What is trained; its forward returns the loss.
            args: The Trainer's arguments.
            dataset: Packed rows.
            rules: Parameter groups, see `parameter_groups`.
            callbacks: Callbacks beside the Trainer's own; its printing of every log is switched off.
            keep_checkpoints: How many checkpoints stay, at least 1.
        """
        self.rules = tuple(rules)
        self.keep_checkpoints = keep_checkpoints
        self._staging = False
        self.optimizer: torch.optim.Optimizer | None = None
        super().__init__(model=objective, args=args, train_dataset=dataset, callbacks=callbacks)
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer over the parameter groups.

        Args:
            model: The module whose parameters are optimized; None is the trainer's own.

        Returns:
            The optimizer.
        """
        if self.optimizer is None:
            source = self.model if model is None else model
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, source)
            self.optimizer = optimizer_class(parameter_groups(source, self.rules), **options)
        return self.optimizer

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / STAGING_DIR) if self._staging else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._require_finite(model)
        work_dir = Path(self.args.output_dir)
        if self.args.should_save:
            discard_staged(work_dir)
        self.accelerator.wait_for_everyone()
        self._staging = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                staged = work_dir / STAGING_DIR / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                publish_checkpoint(staged, work_dir)
                discard_staged(work_dir)
                remove_old_checkpoints(work_dir, self.keep_checkpoints)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch.save reports a full disk as RuntimeError, safetensors as its own class
            discard_staged(work_dir)
            raise OutputError(
                f"cannot write a checkpoint into {work_dir} at step {self.state.global_step}: {error}. "
                f"Free space or make the folder writable and run again: {self._last_good()}"
            ) from error
        finally:
            self._staging = False
        self.accelerator.wait_for_everyone()

    def _require_finite(self, model: nn.Module) -> None:
        parameters = [_local(p.detach()) for p in model.parameters() if p.requires_grad]
        finite = torch.stack([torch.isfinite(p).all() for p in parameters] + [torch.isfinite(self._tr_loss)]).all()
        # every process has to come to the same answer, or the others wait for ever
        bad = self.accelerator.reduce((~finite).float(), reduction="sum")
        if bad.item():
            raise TrainingError(
                f"parameters or loss are NaN or infinite at step {self.state.global_step}; nothing was saved. "
                f"Try a lower learning rate or a longer warm-up; {self._last_good()}"
            )

    def _last_good(self) -> str:
        good = newest_valid_checkpoint(Path(self.args.output_dir))
        return "there is no earlier checkpoint" if good is None else f"the last good checkpoint is {good}"

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # with FSDP the Trainer hands over the gathered weights of the whole objective
        prefix = "student."
        gathered = None
        if state_dict is not None:
            gathered = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        if self.args.should_save:
            save_trainable(self._student(), Path(output_dir or self.args.output_dir), gathered)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_trainable(self._student(), Path(resume_from_checkpoint))

    def _student(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model).student


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
