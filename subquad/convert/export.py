"""Writing a student as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from subquad.convert import shim
from subquad.convert.atomic import atomic_directory
from subquad.convert.families import FAMILIES
from subquad.convert.modelcard import ModelCard, write_model_card
from subquad.convert.safetensors_dir import read_shapes
from subquad.errors import ConfigError, OutputError, TrainingError
from subquad.models import ConvertedModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# model_type to the classes that a checkpoint's own code offers to transformers' Auto classes
AUTO_CLASSES = {
    "subquad_llama": {
        "AutoConfig": "SubquadLlamaConfig",
        "AutoModelForCausalLM": "SubquadLlamaForCausalLM",
        "AutoModelForSequenceClassification": "SubquadLlamaForSequenceClassification",
    },
    "subquad_bert": {
        "AutoConfig": "SubquadBertConfig",
        "AutoModel": "SubquadBertModel",
        "AutoModelForMaskedLM": "SubquadBertForMaskedLM",
        "AutoModelForPreTraining": "SubquadBertForPreTraining",
        "AutoModelForSequenceClassification": "SubquadBertForSequenceClassification",
    },
}
_SHIM_FILES = ("configuration_subquad.py", "modeling_subquad.py")
_PROBE_LENGTH = 16
# relative RMS of the logits' change by merging: rounding of one addition per weight
_MERGE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_MERGE_TOLERANCE_HALF = 5e-2


def export_student(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | Path,
    card: ModelCard,
) -> Path:
    """Write a student as a checkpoint that transformers loads, with tokenizer and model card.

    Adapters are merged into the model first, in place. The directory is complete or not there: an earlier export in
    its place is kept until the new one is finished.

    Args:
        model: The student, with or without LoRA adapters.
        tokenizer: Its tokenizer; None writes none.
        directory: Where to write. It must not exist, be empty, or hold an earlier export, which is replaced.
        card: Content of the model card.

    Returns:
        The directory.

    Raises:
        ConfigError: The model is not a converted one.
        TrainingError: A weight is NaN or infinite.
        OutputError: The directory holds something else, cannot be written, or merging changed the model's outputs.
    """
    target = Path(directory).expanduser()
    _check_target(target)
    student = merge_adapters(model)
    if not issubclass(type(student), ConvertedModel):
        raise ConfigError(f"export_student takes a converted model, got {type(student).__name__}; apply_plan first")
    _check_finite(student)
    student.config.auto_map = _auto_map(student.config.model_type)
    with atomic_directory(target) as folder:
        student.save_pretrained(folder)
        for name in _SHIM_FILES:
            shutil.copyfile(Path(shim.__path__[0]) / name, folder / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_model_card(folder, replace(card, auto_class=_auto_class(student)))
        _check_written(student, folder)
    return target


def _auto_map(model_type: str) -> dict[str, str]:
    files = {"AutoConfig": "configuration_subquad"}
    return {auto: f"{files.get(auto, 'modeling_subquad')}.{name}" for auto, name in AUTO_CLASSES[model_type].items()}


def _auto_class(student: PreTrainedModel) -> str:
    """Return the Auto class that loads a model as what it is; a checkpoint's own code may have subclassed it."""
    names = [kind.__name__ for kind in type(student).__mro__]
    return next(auto for auto, name in AUTO_CLASSES[student.config.model_type].items() if name in names)


def merge_adapters(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Add every LoRA adapter to the weight it adapts and remove it, in place; without adapters nothing happens.

    Args:
        model: A model with adapters, wrapped as a `PeftModel` or injected.

    Returns:
        The model without adapters, unwrapped.

    Raises:
        TrainingError: An adapter holds NaN or infinite values.
        OutputError: The merged model's logits are not those of the model with adapters.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapted = [(name, module) for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)]
    if not adapted:
        return base
    before = _probe(base)
    for name, module in adapted:
        try:
            module.merge(safe_merge=True)
        except ValueError as error:
            raise TrainingError(f"the adapter of {name} cannot be merged: {error}") from error
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, module.get_base_layer())
    if hasattr(base, "peft_config"):
        del base.peft_config
    _compare_logits(before, _probe(base))
    return base


def _compare_logits(before: Tensor, after: Tensor) -> None:
    tolerance = _MERGE_TOLERANCE.get(before.dtype, _MERGE_TOLERANCE_HALF)
    change = ((after - before).double().square().mean() / before.double().square().mean()).sqrt().item()
    if not change <= tolerance:  # NaN is not
        raise OutputError(
            f"merging the adapters changed the logits by {change:.1e} (relative RMS; at most {tolerance:.0e} is "
            "rounding), so nothing was written. Export from the last checkpoint with another peft version."
        )


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Tensor:
    """Return the logits of a fixed short sequence."""
    embedding = model.get_input_embeddings()
    tokens = torch.arange(_PROBE_LENGTH, device=embedding.weight.device) % embedding.num_embeddings
    with _evaluation_mode(model):
        return model(input_ids=tokens[None], use_cache=False)[0]


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _check_target(target: Path) -> None:
    if not target.is_dir() or not any(target.iterdir()):
        return
    students = [family.student_model_type for family in FAMILIES]
    try:
        model_type = json.loads((target / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        model_type = None
    if model_type not in students:
        raise OutputError(
            f"{target} holds files that are not an earlier export, and is left as it is. Choose another directory."
        )


def _check_finite(model: PreTrainedModel) -> None:
    broken = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    if broken:
        raise TrainingError(
            f"{len(broken)} tensors hold NaN or infinite values, first {broken[0]}; nothing was written. "
            "Export from an earlier checkpoint."
        )


def _check_written(model: PreTrainedModel, folder: Path) -> None:
    """Compare the files with the model: a tensor that is lost or renamed would be initialised anew when loaded."""
    written = read_shapes(folder)
    state, buffers = model.state_dict(), dict(model.named_buffers())
    # of weights that are tied the state has two names and the files one
    wanted = dict(model.named_parameters()) | {name: tensor for name, tensor in state.items() if name in buffers}
    wrong = [name for name, tensor in wanted.items() if written.get(name) != tuple(tensor.shape)] + [
        name for name in written if name not in state
    ]
    if wrong:
        raise OutputError(f"the written checkpoint does not hold the model's tensors: {', '.join(wrong[:5])}")
