"""``gradientmail export URL DIR --hf CONFIG_DIR``: what a run committed last, in a folder for ``from_pretrained``.

``CONFIG_DIR`` is a folder like those that ``save_pretrained`` leaves. Its ``config.json`` says what model the run
trains; tokenizer and other small files go along. Parameters that the run does not train come from its weights, where
it has some; without them the run must have every parameter. With an ``adapter_config.json`` instead, the run trains
adapters, and the folder is one that PEFT loads on top of their base model.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from gradientmail_core.errors import ConfigurationError, GradientMailError, SchemaMismatch
from gradientmail_core.session.aligning import Committed

_ADAPTER: Final = "adapter_config.json"
_WEIGHTS: Final = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf")
_NAMED: Final = "Give a directory that the model itself was saved to, such as a checkpoint's."
_OWN: Final = ("gradientmail.json", "trainer_state.json")


def export(found: Committed, folder: Path, config: Path) -> None:
    """Write ``found`` to ``folder`` in the shape that ``config`` describes.

    Raises :class:`ConfigurationError` for a folder that cannot be read or written, and :class:`SchemaMismatch`
    where the run is of another model.
    """
    if not config.is_dir():
        raise ConfigurationError(f"There is no directory {config}.", "Give one with a config.json in it.")
    tensors = {name: torch.from_numpy(values) for name, values in found.tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(tensors, folder, config)
        _copy_rest(config, folder)
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, GradientMailError):
            raise
        raise ConfigurationError(f"{config} cannot be exported to {folder}: {error}", "See there.") from error


def _write(tensors: Mapping[str, Tensor], folder: Path, config: Path) -> None:
    if (config / _ADAPTER).is_file():
        _write_adapters(tensors, folder, config)
    else:
        _filled(tensors, config).save_pretrained(folder)


def _write_adapters(tensors: Mapping[str, Tensor], folder: Path, config: Path) -> None:
    """Under the names that PEFT saves adapters by, of which none says the adapter's own."""
    named = {_saved_name(name): values for name, values in tensors.items()}
    others = [name for name in tensors if ".default" not in name or ".prompt_encoder" in _saved_name(name)]
    if others:
        raise SchemaMismatch(
            f"The run trains {others[0]}, which is no adapter.", "Give the directory of the whole model's config."
        )
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})


def _saved_name(name: str) -> str:
    if name == "prompt_encoder.default.embedding.weight":
        return "prompt_embeddings"
    bare = name.replace(".modules_to_save.default", "").replace(".default", "")
    if bare.endswith(".lora_magnitude_vector.weight"):
        bare = bare.removesuffix(".weight")
    return f"base_model.model.{bare}"


def _filled(tensors: Mapping[str, Tensor], config: Path) -> transformers.PreTrainedModel:
    """The model that ``config`` describes with the run's parameters; without a name a causal language model."""
    whole = any(path.name.endswith(_WEIGHTS) for path in config.iterdir())
    settings = transformers.AutoConfig.from_pretrained(str(config))
    kind = getattr(transformers, (settings.architectures or ["AutoModelForCausalLM"])[0])
    if not settings.architectures and type(settings) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigurationError(f"The config.json in {config} names no architecture.", _NAMED)
    model = kind.from_pretrained(str(config)) if whole else getattr(kind, "from_config", kind)(settings)
    _refuse_others(model, tensors, whole, settings)
    with torch.no_grad():
        model.load_state_dict(dict(tensors), strict=False)
    model.tie_weights()
    return cast(transformers.PreTrainedModel, model)


def _refuse_others(
    model: transformers.PreTrainedModel,
    tensors: Mapping[str, Tensor],
    whole: bool,
    settings: transformers.PretrainedConfig,
) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    expected = {name: tuple(value.shape) for name, value in named.items()}
    differences = [
        f"{name}: {tuple(values.shape)} in the run, {expected.get(name, 'nothing')} in the config's model"
        for name, values in sorted(tensors.items())
        if expected.get(name) != tuple(values.shape)
    ]
    given = {id(named[name]) for name in tensors if name in named}
    lacking = [] if whole else [name for name, value in sorted(named.items()) if id(value) not in given]
    if differences or lacking:
        raise SchemaMismatch(
            "The run is of another model than the config:\n  "
            + "\n  ".join((differences + [f"{name}: not in the run" for name in lacking])[:20])
            + "\n",
            "Give the run's config; if part of the model is frozen, with the base model's weights beside it."
            if settings.architectures
            else f"It names no architecture, so a causal language model was taken. {_NAMED}",
        )


def _copy_rest(config: Path, folder: Path) -> None:
    """Tokenizer, generation settings and the like: what is neither weights nor written already."""
    for path in config.iterdir():
        kept = path.name.endswith(_WEIGHTS) or path.name in _OWN or (folder / path.name).exists()
        if path.is_file() and not kept:
            shutil.copyfile(path, folder / path.name)
