"""What the converted models of all families share."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from subquad.errors import ConfigError
from subquad.layers import MixerConfig, SubquadAttention, converted_layers, parse_mixer

logger = logging.get_logger(__name__)


class ConvertedConfig:
    """The part of a converted model's configuration that is not its teacher's.

    Attributes:
        mixers: one mapping per layer (see `MixerConfig`); None, or a `softmax` mixer, leaves that layer as it was.
    """

    num_hidden_layers: int
    mixers: list[dict[str, Any] | None] | None

    def layer_mixers(self) -> list[MixerConfig | None]:
        """Return the mixer of every layer, None where the layer keeps its softmax attention.

        Returns:
            A list of `num_hidden_layers` entries.

        Raises:
            ConfigError: The number of mixers is not the number of layers, or a mixer is not valid.
        """
        mixers = self.mixers or [None] * self.num_hidden_layers
        if len(mixers) != self.num_hidden_layers:
            raise ConfigError(
                f"config.mixers has {len(mixers)} entries but the model has {self.num_hidden_layers} layers; "
                "give one mixer (or null) per layer"
            )
        parsed = [None if mixer is None else parse_mixer(mixer) for mixer in mixers]
        return [None if mixer is None or mixer.score == "softmax" else mixer for mixer in parsed]


class ConvertedModel:
    """What loading and starting weights must know about converted layers, whatever model stands around them."""

    _keep_in_fp32_modules_strict: ClassVar[set[str]] = {"mixer"}
    _can_compile_fullgraph = False

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]  # of the family's model, the next base class
        reset = getattr(module, "reset_parameters", None)
        if type(module).__module__.startswith("subquad.layers") and callable(reset):
            reset()


class Conversion(NamedTuple):
    """How the models of a family change class.

    Attributes:
        config: the teacher's configuration class.
        student_config: the converted model's.
        classes: the class of every convertible model, and of the stack of layers inside it, to the converted one.
        whole: the names of those that can be converted on their own.
        attention: the class of a converted layer's attention.
        teacher_attention: the class it replaces.
        parent: path of the module that holds layer i's attention, with `{}` for i, from the stack of layers.
        name: its name there.
    """

    config: type[PretrainedConfig]
    student_config: type[PretrainedConfig]
    classes: dict[type[PreTrainedModel], type[PreTrainedModel]]
    whole: tuple[str, ...]
    attention: type[SubquadAttention]
    teacher_attention: type[nn.Module]
    parent: str
    name: str

    def install_mixers(self, model: PreTrainedModel, mixers: list[MixerConfig | None]) -> None:
        """Replace the attention of every layer that has a mixer, in place; the projections stay the same modules.

        Args:
            model: the stack of layers, not a model around it.
            mixers: one per layer, None to leave it.
        """
        for layer_idx, mixer in enumerate(mixers):
            if mixer is None:
                continue
            parent = model.get_submodule(self.parent.format(layer_idx))
            teacher = parent.get_submodule(self.name)
            attention = self.attention(teacher, mixer)
            if attention.mixer is not None:
                attention.mixer.to(attention.projections[0].weight.device)
            setattr(parent, self.name, attention.train(teacher.training))

    def remove_mixers(self, model: PreTrainedModel, config: PretrainedConfig) -> None:
        """Put a plain attention back in every converted layer, in place, with the same projection modules.

        Args:
            model: the stack of layers, not a model around it.
            config: the plain configuration the restored layers refer to.
        """
        for attention in converted_layers(model):
            restored = self.teacher_attention.__new__(self.teacher_attention)
            nn.Module.__init__(restored)
            for name in attention.teacher_attributes:
                setattr(restored, name, getattr(attention, name))
            restored.config = config
            restored.train(attention.training)
            setattr(model.get_submodule(self.parent.format(attention.layer_idx)), self.name, restored)


def check_call(attention_mask: Tensor | None, output_attentions: bool | None) -> None:
    """Check what a converted model cannot take, and say what it cannot give.

    Args:
        attention_mask: as given to the model.
        output_attentions: as given to the model.

    Raises:
        ConfigError: A mask that is not 2-D.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ConfigError(
            f"attention_mask has {attention_mask.dim()} dimensions; a converted model takes the usual 2-D mask "
            "[batch_size, seq_len] of real tokens"
        )
    if output_attentions:
        logger.warning_once("output_attentions: converted layers have no attention matrix and return none")
