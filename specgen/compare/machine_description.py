"""Describes in words the machine and the models that a comparison ran on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.base.machine import machine_in_words

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel
    from specgen.pair.pair import Pair


def describe(pair: Pair) -> list[tuple[str, str]]:
    """Returns (heading, text) pairs that describe the machine, its GPUs that are used, the devices and the CPU's threads, the
    target and the draft model (if there is one)."""
    import torch

    described = [("Machine", machine_in_words())]
    device = pair.target.device
    gpus = [each for each in dict.fromkeys(pair.devices()) if each.type == "cuda"]
    if gpus:
        described.append(("GPU", ", ".join(torch.cuda.get_device_name(gpu) for gpu in gpus)))
    threads = torch.get_num_threads()
    apart = "" if pair.draft is None or pair.draft.device == device else f" (draft: {pair.draft.device})"
    described.append(("Device", f"{device}{apart}, {pair.target.dtype_name}, {threads} CPU thread{'' if threads == 1 else 's'}"))
    described.append(("Target", _model(pair.target)))
    if pair.draft is not None:
        described.append(("Draft", _model(pair.draft)))
    return described


def _model(loaded: LoadedModel) -> str:
    parameters = loaded.model.num_parameters
    layers = loaded.model.shape.num_layers
    size = f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
    return f"{loaded.name} ({loaded.model.shape.model_type}, {size} parameters, {layers} layers, {loaded.dtype_name})"
