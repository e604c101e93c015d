"""Describes the machine and the models of a comparison in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel
    from specgen.pair import Pair


def describe(pair: Pair) -> list[tuple[str, str]]:
    """Pairs of a heading and its text: machine, GPU, device and threads, target, draft."""
    import torch

    told = [("Machine", f"{_processor()}, {os.cpu_count()} cores, {_memory()}{platform.system()} {platform.release()}")]
    device = pair.target.device
    if device.type == "cuda":
        told.append(("GPU", torch.cuda.get_device_name(device)))
    told.append(("Device", f"{device}, {pair.target.dtype_name}, {torch.get_num_threads()} CPU threads"))
    told.append(("Target", _model(pair.target)))
    if pair.draft is not None:
        told.append(("Draft", _model(pair.draft)))
    return told


def _model(loaded: LoadedModel) -> str:
    parameters = sum(weight.numel() for weight in loaded.model.parameters())
    layers = loaded.model.config.get_text_config().num_hidden_layers
    size = f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
    return f"{loaded.name} ({loaded.model.config.model_type}, {size} parameters, {layers} layers, {loaded.dtype_name})"


def _processor() -> str:
    """The processor's name from /proc/cpuinfo, elsewhere from Python's `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB, "
    except (AttributeError, OSError, ValueError):
        return ""
