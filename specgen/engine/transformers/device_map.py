"""Names the device of each module of a transformers model whose layers are on several: accelerate's device map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from specgen.base.errors import SpecgenError


def module_devices(module: Any, name: str, layer_devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Returns the devices of the modules of a model without weights, by the modules' names.

    What comes before the layers is on the first layer's device, as are modules without weights (rotary embedding); what comes
    after them is on the last one's, but for a head that shares the embedding's table. Raises SpecgenError without accelerate, and
    for a model (`name` in messages) whose layers cannot be found.
    """
    if find_spec("accelerate") is None:
        raise SpecgenError(
            f"{name} runs on transformers, which needs the package accelerate to use several devices",
            "Install it: pip install accelerate, or specgen[multi-gpu]; or take --device cuda",
        )
    lists = [] if module is None else [path for path, part in module.named_modules() if _is_layers(part, len(layer_devices))]
    if not lists:
        raise SpecgenError(f"the layers of {name} cannot be told from its other modules", "Take --device cuda or cpu")
    tied = bool(getattr(module.config.get_text_config(), "tie_word_embeddings", False))
    found: dict[str, torch.device] = {}
    head, seen = module.get_output_embeddings(), False
    for path, part in _parts(module, lists[0]):
        if path == lists[0]:
            found |= {f"{path}.{index}": device for index, device in enumerate(layer_devices)}
            seen = True
        else:
            is_late = seen and any(True for _ in part.parameters()) and not (tied and part is head)
            found[path] = layer_devices[-1 if is_late else 0]
    return found


def _is_layers(part: nn.Module, count: int) -> bool:
    return isinstance(part, nn.ModuleList) and len(part) == count


def _parts(module: nn.Module, layers: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the names of the modules beside the list `layers` and around it, and of the list itself, in their order."""
    for name, part in module.named_children():
        path = f"{prefix}{name}"
        if layers.startswith(f"{path}."):
            yield from _parts(part, layers, f"{path}.")
        else:
            yield path, part
