"""Reads and writes Medusa heads in their published layouts: the authors' of v0.1, v1.0 and "version 2", and vLLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.head_tensors import HeadTensors, Shape
from specgen.engine.parts.layer_config import HeadConfig, check_vocabulary, matrix_shape
from specgen.engine.parts.weights import MedusaWeights

_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"(\d{1,3})\.(\d{1,3})\.weight")
_OF_VLLM = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_SHARED_LM_HEAD = "lm_heads.0.weight"


def is_medusa(name: str) -> bool:
    """Whether only a Medusa head has a tensor of this name."""
    return _BLOCK.fullmatch(name) is not None or _OF_VLLM.fullmatch(name) is not None


def rename_medusa(name: str) -> str:
    """Returns a tensor's name in vLLM's layout, of which the authors' number all that head k has from 0: blocks, then LM head."""
    if match := _BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := _LM_HEAD.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return _SHARED_LM_HEAD if name == "lm_head.weight" else name


def read_medusa(files: HeadTensors, config: Mapping[str, Any], target: LoadedModel) -> MedusaWeights:
    """Reads a head whose tensors have Medusa's names. `config` is the content of its config.json, empty if there is none.

    How many heads and blocks there are is counted: config files state other numbers. Raises SpecgenError for damaged heads and
    for heads of other targets.
    """
    files.rename(rename_medusa)
    width = matrix_shape(files, "blocks.0.layers.0.weight")[0]
    if width != target.model.shape.hidden_size:
        found = "blocks.0.layers.0.weight"
        raise files.refuse_target(found, "a hidden size of", width, target.name, target.model.shape.hidden_size)
    heads, layers = _counts(files)
    lm_heads = _lm_heads(files, HeadConfig(files, config), heads)
    shapes: dict[str, Shape] = {}
    for block in (f"blocks.{head}.layers.{layer}" for head in range(heads) for layer in range(layers)):
        shapes[f"{block}.weight"] = (width, width)
        if f"{block}.bias" in files:
            shapes[f"{block}.bias"] = (width,)
    for name in lm_heads:
        shapes[name] = (matrix_shape(files, name)[0], width)
    rows = {shapes[name][0] for name in lm_heads}
    has_map = "token_map" in files
    if has_map:
        shapes["token_map"] = files.shape("token_map")
    files.check_shapes(shapes)
    order = _token_map(files, target) if has_map else None
    if len(rows) > 1:
        raise files.refuse("its LM heads have different numbers of rows")
    if order is None or rows != {len(order)}:
        check_vocabulary(files, lm_heads, target)
    if order is not None and not lm_heads:
        raise files.refuse("it has a token_map, but no LM head of its own")
    blocks = [[_block(files, f"blocks.{head}.layers.{layer}", width) for layer in range(layers)] for head in range(heads)]
    tables = {name: _ordered(files.take(name), order) for name in lm_heads}
    own = [tables[lm_heads[min(head, len(lm_heads) - 1)]] for head in range(heads)] if lm_heads else None
    return MedusaWeights(blocks, own, None if order is None else order.sort().values.to(target.device))


def _counts(files: HeadTensors) -> tuple[int, int]:
    """Returns the numbers of heads and of blocks in each, as the tensors' names show. That all are there is left to check."""
    found = [match for name in files.names if (match := _OF_VLLM.fullmatch(name))]
    return len({match[1] for match in found}), len({match[2] for match in found})


def _lm_heads(files: HeadTensors, config: HeadConfig, heads: int) -> list[str]:
    """Returns the names of the LM heads: one for each head, one for all, or none."""
    if config.switch("original_lm_head") and _SHARED_LM_HEAD in files:
        return [_SHARED_LM_HEAD]
    return (
        [f"lm_heads.{head}.weight" for head in range(heads)] if any(name.startswith("lm_heads.") for name in files.names) else []
    )


def _block(files: HeadTensors, name: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = files.take(f"{name}.weight", may_be_zero=True)  # as blocks are before their training
    bias = files.take(f"{name}.bias", may_be_zero=True) if f"{name}.bias" in files else weight.new_zeros(width)
    return weight, bias


def _token_map(files: HeadTensors, target: LoadedModel) -> torch.Tensor:
    """Returns the target's ids of the head's tokens, in the order of the file."""
    ids = files.take_integers("token_map")
    if (
        not len(ids)
        or int(ids.min()) < 0
        or int(ids.max()) >= target.model.vocab_size
        or not bool((ids.sort().values.diff() > 0).all())
    ):
        raise files.refuse(f"{files.stored_name('token_map')} does not hold different ids of tokens of {target.name}")
    return ids


def _ordered(table: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows of an LM head for ascending ids. It has a row for each id of `token_map`, or for each of the target's."""
    if token_map is None:
        return table
    ordered = token_map.sort()
    indices = ordered.indices if len(table) == len(token_map) else ordered.values
    return table[indices.to(table.device)]


def medusa_layout(weights: MedusaWeights, target: str, vocab_size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the content of config.json, and the tensors to write: the layout of the authors' code, "version 2" if the heads
    share the target's LM head, otherwise v0.1; for a reduced vocabulary, which only vLLM has, vLLM's.

    `vocab_size` is the target's number of logits.
    """
    heads, layers = len(weights.blocks), len(weights.blocks[0])
    width = weights.blocks[0][0][0].shape[0]
    if weights.vocabulary is not None:
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": width, "num_heads": heads}
        config |= {"num_hidden_layers": layers, "vocab_size": vocab_size, "truncated_vocab_size": len(weights.vocabulary)}
        config |= {"medusa_fc_bias": True, "original_lm_head": False}
        block_name, head_name = "blocks.{}.layers.{}", "lm_heads.{}.weight"
    else:
        config = {"base_model_name_or_path": target, "medusa_num_heads": heads, "medusa_num_layers": layers}
        config |= {"hidden_size": width, "vocab_size": vocab_size} | ({"version": "2"} if weights.lm_heads is None else {})
        block_name, head_name = "{}.{}.linear", f"{{}}.{layers}.weight"
    tensors: dict[str, torch.Tensor] = {} if weights.vocabulary is None else {"token_map": weights.vocabulary}
    for head, blocks in enumerate(weights.blocks):
        for layer, (weight, bias) in enumerate(blocks):
            tensors |= {f"{block_name.format(head, layer)}.weight": weight, f"{block_name.format(head, layer)}.bias": bias}
        if weights.lm_heads is not None:
            tensors[head_name.format(head)] = weights.lm_heads[head]
    return config, tensors
