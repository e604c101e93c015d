"""Exports to Ollama: a Modelfile."""

from __future__ import annotations

from specgen.tune.exports import llama_cpp
from specgen.tune.exports.records import HEAD, TARGET, ExportedMethod, ExportedModels


def write(method: ExportedMethod) -> str:
    lines = [write_plain(method.models)]
    if method.drafter != "mtp":
        lines.append(f"DRAFT {HEAD}")
    lines.append(f"PARAMETER draft_num_predict {llama_cpp.length(method)}")
    return "\n".join(lines)


def write_plain(models: ExportedModels) -> str:
    return f"FROM {_value(models.target_gguf or TARGET)}"


def _value(text: str) -> str:
    """Returns a path as the value of an instruction. Only spaces at its ends and a quote at its
    beginning need quotes around it."""
    if text != text.strip() or text.startswith('"'):
        return f'"""{text}"""'
    return text
