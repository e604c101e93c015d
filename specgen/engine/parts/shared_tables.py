"""Compares a head's copies of the target's embedding and LM head with the target's own, by some of their rows."""

from __future__ import annotations

from typing import Literal

import torch
from safetensors import safe_open

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.head_tensors import HeadTensors
from specgen.engine.weights import FLOATS, files_of_keys, reading_weights

Similarity = Literal["equal", "similar", "different", "unknown"]

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_ROWS = 128  # that are compared; models that were not made from each other differ in nearly every number
_SIMILAR = 0.5  # the least median cosine of rows of the same origin; those of unrelated models are nearly orthogonal


def compare_embedding(files: HeadTensors, name: str, target: LoadedModel) -> Similarity:
    """Compares the table `name` of a head with the target's embedding. See `_compare`."""
    return _compare(files, name, target, (*_EMBEDDINGS, *_HEADS))


def compare_lm_head(files: HeadTensors, name: str, target: LoadedModel) -> Similarity:
    """Compares the table `name` of a head with the target's LM head. See `_compare`."""
    return _compare(files, name, target, (*_HEADS, *_EMBEDDINGS))


def _compare(files: HeadTensors, name: str, target: LoadedModel, suffixes: tuple[str, ...]) -> Similarity:
    """Returns `equal` if the rows are equal after rounding to the narrower dtype, `similar` if one table may have been made from
    the other by training, and `unknown` if the target's files do not have the table in a known form."""
    rows, width = files.shape(name)
    step = max(1, rows // _ROWS)
    indices = range(0, rows, step)
    theirs = _target_rows(target, suffixes, (rows, width), indices)
    if theirs is None:
        return "unknown"
    own = files.rows(name, indices)
    dtype = _narrower(own.dtype, theirs.dtype)
    if torch.equal(own.to(dtype), theirs.to(dtype)):
        return "equal"
    cosines = torch.nn.functional.cosine_similarity(own.float(), theirs.float(), dim=-1)
    used = cosines[(own != 0).any(-1) & (theirs != 0).any(-1)]  # rows of padding may be zero
    return "similar" if used.numel() and float(used.median()) >= _SIMILAR else "different"


def _target_rows(target: LoadedModel, suffixes: tuple[str, ...], shape: tuple[int, int], indices: range) -> torch.Tensor | None:
    try:
        with reading_weights(target.name):
            paths = files_of_keys(target.folder)
            for suffix in suffixes:
                key = next((key for key in paths if key == suffix or key.endswith(f".{suffix}")), None)
                if key is None:
                    continue
                with safe_open(paths[key], framework="pt") as file:
                    table = file.get_slice(key)
                    if tuple(table.get_shape()) != shape:
                        return None
                    rows = torch.cat([table[index : index + 1] for index in indices])
                    return rows if rows.dtype in FLOATS else None
    except SpecgenError:  # the files are named otherwise: transformers may have loaded them
        pass
    return None


def _narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype in (first, second):
            return dtype
    return torch.float64
