"""Exports to LM Studio: a command that loads the target."""

from __future__ import annotations

from shlex import quote

from specgen.tune.exports import llama_cpp
from specgen.tune.exports.records import ExportedMethod, ExportedModels

_MODES = {
    "model": "simple",
    "mtp": "mtp",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
}


def write(method: ExportedMethod) -> str:
    words = [write_plain(method.models), f"--speculative-draft-{_MODES[method.drafter]}"]
    if method.drafter != "mtp":
        name = method.draft if method.head is None else method.head.folder
        words.append(f"--speculative-draft-model {quote(str(name))}")
    words.append(f"--speculative-draft-max-tokens {llama_cpp.length(method)}")
    if method.name == "confidence":
        threshold = method.settings["threshold"]
        words.append(f"--speculative-draft-min-continue-probability {threshold:g}")
    return " ".join(words)


def write_plain(models: ExportedModels) -> str:
    return f"lms load {quote(models.target)}"
