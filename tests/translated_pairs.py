"""Draft models with another tokenizer than the bundled target's: model folders, written for tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

from specgen import demo

SPECIAL = 3  # ids of special tokens in the bundled vocabulary: 0 to 2


def permuted_draft(folder: Path, seed: int = 0) -> Path:
    """Writes the bundled draft model with its vocabulary in another order, and returns the folder."""
    copied = Path(shutil.copytree(demo.folder("draft"), folder))
    tokenizer = json.loads((copied / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    order = list(range(len(vocabulary)))
    Random(seed).shuffle(order)  # the new id of each old one
    tokenizer["model"]["vocab"] = {token: order[id_] for token, id_ in vocabulary.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = order[token["id"]]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    for special in tokenizer["post_processor"]["processors"][1]["special_tokens"].values():
        special["ids"] = [order[id_] for id_ in special["ids"]]
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    rows = torch.tensor(order).argsort()  # the old id of each new one
    tensors = load_file(copied / "model.safetensors")
    moved = {
        name: tensor[rows] if name.endswith(("embed_tokens.weight", "lm_head.weight")) else tensor
        for name, tensor in tensors.items()
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in moved.items()}, copied / "model.safetensors", metadata={"format": "pt"}
    )
    for name in ("config.json", "generation_config.json"):
        config = json.loads((copied / name).read_text(encoding="utf-8"))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(config.get(key), int):
                config[key] = order[config[key]]
        (copied / name).write_text(json.dumps(config), encoding="utf-8")
    return copied
