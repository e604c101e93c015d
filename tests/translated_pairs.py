"""Draft models with another tokenizer than the bundled target's, made from the bundled draft
model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizer_helpers import byte_level

from specgen import demo
from specgen.engine.text.token_bytes import token_bytes
from specgen.engine.text.tokenizer import load_tokenizer

_EMBEDDING = "model.embed_tokens.weight"
_ID_FIELDS = "bos_token_id", "eos_token_id", "pad_token_id"


def permuted(folder: Path) -> Path:
    """Writes the bundled draft model with its tokens in another order, that is with other ids.
    Returns the folder."""
    shutil.copytree(demo.folder("draft"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    order = list(range(len(tokenizer["model"]["vocab"])))
    Random(0).shuffle(order)  # the new id of each old one
    tokenizer["model"]["vocab"] = {
        token: order[id_] for token, id_ in tokenizer["model"]["vocab"].items()
    }
    for token in tokenizer["added_tokens"]:
        token["id"] = order[token["id"]]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    for special in tokenizer["post_processor"]["processors"][1]["special_tokens"].values():
        special["ids"] = [order[id_] for id_ in special["ids"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    _save(
        folder,
        lambda table: table[torch.tensor(order).argsort()],
        dict(zip(_ID_FIELDS, (order[1], order[2], order[0]), strict=True)),
    )
    return folder


def retokenized(folder: Path, tokenizer: str) -> Path:
    """Writes the bundled draft model with another tokenizer, given as a tokenizer.json with the
    tokens `<s>` and `</s>`.

    A token's embedding is the mean of those that the bundled tokenizer splits its bytes into.
    """
    shutil.copytree(demo.folder("draft"), folder)
    own = load_tokenizer(folder, {"model_type": "llama"}, trust_remote_code=False)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    new = load_tokenizer(folder, {"model_type": "llama"}, trust_remote_code=False)
    pieces = token_bytes(new).pieces
    ids = token_bytes(own).ids
    assert own.pipeline is not None

    def parts(piece: bytes | None, id_: int) -> list[int]:
        if piece is None:
            return [{"<s>": 1, "</s>": 2}.get(token_bytes(new).names.get(id_, ""), 0)]
        try:
            found: list[int] = own.pipeline.encode(piece.decode(), add_special_tokens=False).ids
            return found
        except UnicodeDecodeError:
            return [ids[bytes([byte])] for byte in piece]

    rows = [parts(piece, id_) for id_, piece in enumerate(pieces)]
    special = token_bytes(new).special
    fields = {
        "vocab_size": len(rows),
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
        "pad_token_id": 0,
    }
    _save(
        folder,
        lambda table: torch.stack(
            [table[part].float().mean(dim=0).to(table.dtype) for part in rows]
        ),
        fields,
    )
    return folder


def _save(
    folder: Path, rows: Callable[[torch.Tensor], torch.Tensor], fields: dict[str, int]
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()} | {
        _EMBEDDING: rows(tensors[_EMBEDDING]).contiguous()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(
            json.dumps(config | {key: value for key, value in fields.items() if key in config}),
            encoding="utf-8",
        )


def other_merges(folder: Path) -> Path:
    """Writes the bundled draft model with a byte-level tokenizer whose merges were trained on other
    text. Returns the folder."""
    return retokenized(folder, byte_level(with_template=True))


DRAFTS: dict[str, Callable[[Path], Path]] = {"permuted": permuted, "merges": other_merges}
