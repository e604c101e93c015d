"""Reads configs and loads models with transformers, also quantised ones, GGUF files, and onto
several devices.

`files` is a `model_files.ModelFiles`, which cannot be imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import is_accelerate_available

from specgen.base.errors import SpecgenError
from specgen.base.text import shown
from specgen.base.types import Context
from specgen.engine.devices import inference
from specgen.engine.gguf.architectures import ARCHITECTURES
from specgen.engine.gguf.config import gguf_config
from specgen.engine.gguf.file import GgufFile, is_gguf, open_gguf
from specgen.engine.gguf.metadata import Metadata
from specgen.engine.gguf.tensors import GgufTensors
from specgen.engine.model import ModelShape, of_transformers
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.families import tensor_names
from specgen.engine.transformers.quiet import quiet_transformers, reading
from specgen.engine.transformers.transformers_model import (
    TransformersModel,
    logits_error,
    model_without_weights,
)
from specgen.engine.weights import (
    AGAIN,
    check_no_extra,
    missing_tensors,
    renamed,
    stored_tensors,
    wrong_shape,
)


def read_transformers_config(folder: Path, name: str, trust_remote_code: bool) -> Any:
    """Returns transformers' config of the model in `folder`, or of the GGUF file that it is; `name`
    is used in messages.

    Raises SpecgenError if it cannot be read, or belongs to no decoder-only model.
    """
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    if is_gguf(folder):
        source = _gguf_source(folder, name)
    with reading("configuration", name):
        config = source.get("config") or AutoConfig.from_pretrained(
            **source, trust_remote_code=trust_remote_code
        )
    if getattr(config, "is_encoder_decoder", False):
        raise SpecgenError(
            f"{name} ({config.model_type}) is an encoder-decoder",
            "Take a decoder-only language model",
        )
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", True
    ):
        raise SpecgenError(
            f"{name} ({config.model_type}) is an encoder", "Take a decoder-only language model"
        )
    own_classes = getattr(config, "auto_map", None) or {}
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and "AutoModelForCausalLM" not in own_classes
    ):
        problem = f"{name} ({config.model_type}) is no causal language model"
        raise SpecgenError(problem, "Take a decoder-only language model")
    return config


def read_shape(config: Any, name: str) -> ModelShape:
    """Returns the sizes in a transformers config. Raises SpecgenError where it lacks those of a
    language model."""
    with reading("configuration", name):
        return of_transformers(config)


def _gguf_source(path: Path, name: str) -> dict[str, Any]:
    """Returns what transformers' `from_pretrained` gets for a GGUF file, without weights.

    Files of the native decoder's families are read by our own code, as transformers knows few
    architectures. Raises SpecgenError if transformers has to read the file and cannot.
    """
    opened = open_gguf(path, name)
    raw = gguf_config(opened, name)
    architecture = opened.metadata["general.architecture"]
    if architecture in ARCHITECTURES:
        with reading("configuration", name):
            return {
                "pretrained_model_name_or_path": None,
                "config": CONFIG_MAPPING[raw["model_type"]](**raw),
            }
    _check_for_transformers(opened, name)
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with reading("configuration", name):
        config = _transformers_gguf_config(source, _called(opened, name))
    _correct_rotary(config, Metadata(opened.metadata, name))
    return {**source, "config": config}


def _transformers_gguf_config(source: Mapping[str, Any], what: str) -> Any:
    """Returns transformers' config of a GGUF file. Raises SpecgenError, which begins with `what`,
    for an unknown architecture."""
    try:
        return AutoConfig.from_pretrained(**source)
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        raise SpecgenError(f"{what}, which is not supported", "Take a safetensors model") from error


def _called(opened: GgufFile, name: str) -> str:
    """Returns the file and its architecture as the beginning of a message."""
    return (
        f"{name} is a GGUF file of the architecture "
        f"{shown(opened.metadata['general.architecture'], 40)}"
    )


def _correct_rotary(config: Any, metadata: Metadata) -> None:
    """Puts the base of the rotary frequencies, and how much of each head is rotated, into
    transformers' config of a GGUF file.

    Transformers does not read them for all architectures, and takes the defaults of a family in
    silence. Raises SpecgenError for a scaling that it has not read.
    """
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict) or "rope_theta" not in settings:
        return
    factor = metadata.number("{arch}.rope.scaling.factor", 1)
    if factor not in (0, 1) and settings.get("rope_type") == "default":
        problem = "scales its rotary embedding, which is not supported for its architecture"
        raise metadata.refuse(problem, "Take a safetensors model")
    settings["rope_theta"] = metadata.number("{arch}.rope.freq_base", settings["rope_theta"])
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "{arch}.rope.dimension_count" in metadata:
        share = metadata.integer("{arch}.rope.dimension_count") / size
        if share != settings.get("partial_rotary_factor", 1.0):
            settings["partial_rotary_factor"] = share


def _check_for_transformers(opened: GgufFile, name: str) -> None:
    """Raises SpecgenError if transformers cannot read a GGUF file because of its parts or for lack
    of a package."""
    what = _called(opened, name)
    if any(find_spec(package) is None for package in ("accelerate", "gguf")):
        raise SpecgenError(
            f"{what}, which only transformers runs, with two more packages",
            'pip install -e ".[gguf]"',
        )
    if len(opened.paths) > 1:
        problem = f"{what}, which only transformers runs, and not in several parts"
        raise SpecgenError(problem, "Join them: llama-gguf-split --merge")


def check_quantisation(settings: Mapping[str, Any], device: torch.device, name: str) -> bool:
    """Checks that transformers can load weights with these quantisation settings onto a device.
    Loads no weights.

    Returns whether transformers will dequantise the weights. Raises SpecgenError, with
    transformers' reason, if it cannot load them.
    """
    try:
        with quiet_transformers():
            from transformers.quantizers.auto import AutoHfQuantizer

            quantiser = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
            quantiser.validate_environment(device_map={"": str(device)}, weights_only=True)
    except Exception as error:
        reason = (
            shorten(" ".join(str(error).split()), 200, placeholder=" …").rstrip(".")
            or type(error).__name__
        )
        method = shorten(str(settings.get("quant_method")), 40)
        hint = "Take another checkpoint of the model"
        if isinstance(error, ImportError):
            hint = (
                'Install it: pip install -e ".[quantised]"'
                if method == "torchao"
                else "Install what it names"
            )
        message = (
            f"the weights of {name} are quantised with {method}, which transformers "
            f"cannot load here: {reason}"
        )
        raise SpecgenError(message, hint) from error
    return bool(getattr(quantiser.quantization_config, "dequantize", False))


def load_transformers_model(
    files: Any,
    dtype: torch.dtype,
    device: torch.device,
    layer_devices: Sequence[torch.device] | None = None,
) -> TransformersModel:
    """Loads a model, and checks that its forward passes with a KV cache give the right logits after
    a rollback.

    `layer_devices` has the device of each layer, if they are on several. Raises SpecgenError if the
    check fails, for damaged or missing weights, or without a package that several devices need.
    Passes on torch's error if memory is short.
    """
    with quiet_transformers():  # some decompress weights at their first pass
        module = load_module(files, dtype, device, layer_devices)
        model = TransformersModel(module)
        _check_rollback(model, files, device)
    return model


def load_module(
    files: Any,
    dtype: torch.dtype,
    device: torch.device,
    layer_devices: Sequence[torch.device] | None = None,
) -> Any:
    """Returns transformers' model with its weights, in evaluation mode, on `device` or on
    `layer_devices` (one for each layer).

    Checks that the files have exactly the tensors that the model needs, but not whether a KV cache
    can be rolled back. Raises SpecgenError if the tensors do not fit, and with `layer_devices` as
    `module_devices` does.
    """
    name = files.name
    trust = files.source.trust_remote_code
    config = files.transformers_config
    options = dict[str, Any]()
    _check_size(files)
    # straight to the device
    if device.type not in ("cpu", "mps") or files.quantisation is not None:
        options["device_map"] = {"": str(device)} if is_accelerate_available() else None
    if files.quantisation is not None:  # which may be in the text part of its config.json
        options["config"] = config
        config.quantization_config = dict(files.quantisation)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": files.folder,
        "use_safetensors": True,
    }
    if is_gguf(files.folder):
        source = _gguf_source(files.folder, name)
    if _score_cap(files) is not None:
        # another one ignores the cap; old versions of transformers take it nevertheless
        options["attn_implementation"] = "eager"
    if layer_devices is not None:
        options["device_map"] = module_devices(
            model_without_weights(config, trust), name, layer_devices
        )
    with reading("weights", name):
        loader: Any = AutoModelForCausalLM
        if is_gguf(files.folder) and "gguf_file" not in source:
            loader = MODEL_FOR_CAUSAL_LM_MAPPING[type(source["config"])]
            source["state_dict"] = _gguf_tensors(files.folder, name, config.model_type)
        model, report = loader.from_pretrained(
            **source,
            dtype=dtype,
            trust_remote_code=trust,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # checked below, with a message that names the tensor
            **options,
        )
        # some quantised models cannot be moved, not even to where they are
        if options.get("device_map") is None:
            model = model.to(device)
        model = (
            model.to(dtype) if files.dequantises_on(device) else model
        ).eval()  # transformers gives them the dtype of their scales
    _check_report(report, model.config.get_text_config(), name)
    return model


def _gguf_tensors(path: Path, name: str, model_type: str) -> dict[str, Any]:
    """Returns the tensors of a GGUF file by their names in transformers' model of this type. They
    are read one after the other, as the slices of a safetensors file are."""
    tensors = GgufTensors(path, name)
    names = {own: theirs for theirs, own in tensor_names(model_type).items()}
    return {
        renamed(key, names): tensors.get_slice(key)
        for key in tensors.keys()  # noqa: SIM118
    }


def _check_size(files: Any) -> None:
    """Raises SpecgenError for files that hold next to nothing of what the config describes.

    transformers would give all missing weights memory and random numbers before it reports them.
    """
    shape = files.shape
    stored = sum(prod(dimensions) for dimensions, _ in stored_tensors(files.folder).values())
    if files.quantisation is None and stored < shape.vocab_size * shape.hidden_size // 8:
        raise SpecgenError(
            f"{files.name} lacks most of the tensors that its config.json describes", AGAIN
        )


def _score_cap(files: Any) -> float | None:
    """Returns what caps the scores of the model's attention (Gemma 2); None if nothing does."""
    if files.architecture is not None:
        return files.architecture.score_cap  # type: ignore[no-any-return]
    return getattr(files.transformers_config.get_text_config(), "attn_logit_softcapping", None)


def _check_report(report: Mapping[str, Any], config: Any, name: str) -> None:
    """Raises SpecgenError if transformers found tensors missing, unexpected or of another shape
    than the config says."""
    if missing := sorted(report["missing_keys"]):
        raise missing_tensors(name, missing)
    if mismatched := sorted(report["mismatched_keys"]):
        key, *shapes = mismatched[0]
        raise wrong_shape(name, key, *shapes)
    prediction_layers = getattr(config, "num_nextn_predict_layers", None)
    extra = prediction_layers if isinstance(prediction_layers, int) else 0
    check_no_extra(report["unexpected_keys"], name, config.num_hidden_layers, extra)


@inference
def _check_rollback(model: TransformersModel, files: Any, device: torch.device) -> None:
    """Checks that the model gives the same logits with a KV cache after a rolled-back draft as
    without a cache.

    Raises SpecgenError if the logits differ: then the attention is not causal, or the model ignores
    the cache or the mask.
    """
    runner = ModelRunner(model)
    ids = [token % runner.num_embeddings for token in (5, 9, 7, 6, 11, 4)]

    def logits_after_rollback() -> torch.Tensor:
        context = Context(ids[:3])
        runner.logits(context, [ids[3], ids[0]])
        context.extend(ids[3:-1])
        runner.logits(context)
        context.extend(ids[-1:])
        return runner.logits(context).logits

    if why := logits_error(logits_after_rollback, lambda: model.reference_logits(ids)):
        is_packed = files.quantisation is not None and not files.dequantises_on(device)
        packed = "try --dtype bfloat16, or another --device"
        other = "Take a causal language model"
        raise SpecgenError(
            (
                f"{files.name} does not work with a cache that is rolled back: forward "
                f"passes after a rollback {why}"
            ),
            f"Its weights are quantised: {packed}" if is_packed else other,
        )


def module_devices(
    module: Any, name: str, layer_devices: Sequence[torch.device]
) -> dict[str, torch.device]:
    """Returns accelerate's device map of a model without weights: the devices of its modules by
    their names.

    Modules before the layers, and modules without weights such as the rotary embedding, are on the
    first layer's device. Modules after the layers are on the last layer's, except for a head that
    shares the embedding's table, which is on the first layer's. Raises SpecgenError without
    accelerate, and for a model (`name` in messages) whose layers cannot be found.
    """
    if find_spec("accelerate") is None:
        raise SpecgenError(
            (
                f"{name} runs on transformers, which needs the package accelerate to use "
                "several devices"
            ),
            'Install it: pip install -e ".[multi-gpu]"; or take --device cuda',
        )
    count = len(layer_devices)
    named = [] if module is None else list(module.named_modules())
    layers = next(
        (path for path, part in named if isinstance(part, nn.ModuleList) and len(part) == count),
        None,
    )
    if layers is None:
        raise SpecgenError(
            f"the layers of {name} cannot be told from its other modules",
            "Take --device cuda or cpu",
        )
    tied = bool(getattr(module.config.get_text_config(), "tie_word_embeddings", False))
    head = module.get_output_embeddings()
    placed = {f"{layers}.{index}": device for index, device in enumerate(layer_devices)}
    are_before = True
    for path, part in named:
        if path == layers:
            are_before = False
        elif not path.startswith(f"{layers}.") and not any(part.children()):
            has_weights = any(True for _ in part.parameters())
            placed[path] = layer_devices[
                0 if are_before or not has_weights or (tied and part is head) else -1
            ]
    return placed
