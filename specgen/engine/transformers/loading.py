"""Reads configs and loads models with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specgen.base.errors import RunError, SpecgenError
from specgen.base.types import Context
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.engine.quantisation import Quantisation
from specgen.engine.tolerances import logits_error
from specgen.engine.transformers.device_map import module_devices
from specgen.engine.transformers.quantisers import device_map, quiet_quantisers
from specgen.engine.transformers.quiet import reading
from specgen.engine.transformers.structure import model_without_weights
from specgen.engine.transformers.transformers_model import TransformersModel
from specgen.engine.weights import check_no_extra, missing_tensors, wrong_shape

_AGAIN = "Download or save it again"
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})  # layers that need no state but a KV cache


def read_transformers_config(folder: Path, name: str, trust_remote_code: bool) -> Any:
    """Returns transformers' config of the model in `folder`; `name` is used in messages.

    Raises SpecgenError if it cannot be read, or belongs to no decoder-only model with attention in every layer.
    """
    with reading("configuration", name):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise SpecgenError(f"{name} ({config.model_type}) is an encoder-decoder", "Take a decoder-only language model")
    others = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_TYPES
    if others:
        raise _recurrent(name, ", ".join(sorted(others)))
    return config


def load_transformers_model(
    folder: Path,
    name: str,
    trust_remote_code: bool,
    dtype: torch.dtype,
    device: torch.device,
    quantisation: Quantisation | None = None,
    layer_devices: Sequence[torch.device] | None = None,
) -> TransformersModel:
    """Loads the model in `folder`, and checks that cached passes with a rollback give the right logits.

    `quantisation` says how its weights are quantised, and whether they stay so on `device`; None: they are not. `layer_devices`
    has the device of each layer, if they are on several. Raises SpecgenError if the check fails, for damaged or missing weights,
    or without a package that several devices need, and RunError if memory is short.
    """
    placed = None
    if layer_devices is not None:
        config = read_transformers_config(folder, name, trust_remote_code)
        placed = module_devices(model_without_weights(config, trust_remote_code), name, layer_devices)
    with nullcontext() if quantisation is None else quiet_quantisers():  # some decompress weights at their first pass
        module = load_module(folder, name, trust_remote_code, dtype, device, quantisation, placed)
        if getattr(type(module), "_is_stateful", False):
            raise _recurrent(name, module.config.model_type)
        model = TransformersModel(module)
        _check_rollback(model, name, quantisation)
    return model


def load_module(
    folder: Path,
    name: str,
    trust_remote_code: bool,
    dtype: torch.dtype,
    device: torch.device,
    quantisation: Quantisation | None = None,
    placed: Mapping[str, torch.device] | None = None,
) -> Any:
    """Returns the transformers model in `folder`, on `device` in evaluation mode. Checks only its tensors.

    `quantisation` is as for `load_transformers_model`. `placed` has the devices of its modules by name, if they are on several.
    Raises SpecgenError for damaged, missing or unexpected weights, RunError if memory is short.
    """
    options: dict[str, Any] = {}
    if quantisation is not None:
        config = read_transformers_config(folder, name, trust_remote_code)
        config.quantization_config = dict(quantisation.settings)
        options = {"config": config, "device_map": device_map(device)}
    elif device.type not in ("cpu", "mps"):  # straight to the device; without accelerate by way of the host's memory, see below
        options["device_map"] = device_map(device)
    if placed is not None:
        options["device_map"] = dict(placed)
    with reading("weights", name):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # checked below, with a message that names the tensor
                **options,
            )
            if options.get("device_map") is None:  # some quantised models cannot be moved, not even to where they are
                model = model.to(device)
            if quantisation is not None and quantisation.dequantises:  # transformers gives them the dtype of their scales
                model = model.to(dtype)
            model = model.eval()
        except (torch.OutOfMemoryError, MemoryError) as error:
            hint = "Try --dtype bfloat16 or a smaller model"
            where = device if placed is None else ", ".join(dict.fromkeys(map(str, placed.values())))
            raise RunError(f"{name} does not fit into the memory of {where}", hint) from error
    _check_report(report, model.config.get_text_config(), name)
    return model


def _check_report(report: Mapping[str, Any], config: Any, name: str) -> None:
    """Raises SpecgenError if transformers found tensors missing, unexpected or of another shape than the config says."""
    if missing := sorted(report["missing_keys"]):
        raise missing_tensors(name, missing)
    if mismatched := sorted(report["mismatched_keys"]):
        key, *shapes = mismatched[0]
        raise wrong_shape(name, key, *shapes)
    prediction_layers = getattr(config, "num_nextn_predict_layers", None)
    extra = prediction_layers if isinstance(prediction_layers, int) else 0
    check_no_extra(report["unexpected_keys"], name, config.num_hidden_layers, extra)


def _recurrent(name: str, what: str) -> SpecgenError:
    return SpecgenError(
        f"{name} keeps a state ({what}) that cannot be rolled back after a rejected draft",
        "Take a model with attention in every layer",
    )


@inference
def _check_rollback(model: TransformersModel, name: str, quantisation: Quantisation | None) -> None:
    """Checks that the model gives the same logits with a KV cache after a rolled-back draft as without a cache.

    Raises SpecgenError if the logits differ: then the attention is not causal, or the model ignores the cache or the mask.
    """
    runner = ModelRunner(model)
    ids = [token % runner.num_embeddings for token in (5, 9, 7, 6, 11, 4)]

    def logits_after_rollback() -> torch.Tensor:
        context = Context(ids[:3])
        runner.logits(context, [ids[3], ids[0]])
        context.extend(ids[3:])
        return runner.logits(context).logits

    if why := logits_error(logits_after_rollback, lambda: model.reference_logits(ids)):
        quantised = quantisation is not None and not quantisation.dequantises
        raise SpecgenError(
            f"{name} does not work with a cache that is rolled back: forward passes after a rollback {why}",
            "Its weights are quantised: try --dtype bfloat16, or another --device"
            if quantised
            else "Take a causal language model with attention in every layer",
        )
