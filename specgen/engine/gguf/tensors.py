"""The tensors of a GGUF file by the names that they have in the same model's safetensors files, with the same values.

llama.cpp stores some tensors otherwise than the model does: the rows of queries and keys in another order, norms with 1 added,
convolutions without an inner dimension. `GgufTensors` has the methods of an opened safetensors file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specgen.engine.gguf.blocks import GgufTensor, read_tensor
from specgen.engine.gguf.config import is_known
from specgen.engine.gguf.file import GgufFile, open_gguf
from specgen.engine.gguf.metadata import Metadata

Change = Callable[[torch.Tensor], torch.Tensor]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_POST_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {"gemma3": _POST_NORMS, "lfm2": _LFM2}
_PERMUTED = {"llama"}  # architectures that rotate neighbours, so that the rows of queries and keys are stored in that order
_SHIFTED_NORMS = {"gemma3"}  # whose norms multiply by 1 + weight, which is what is stored
_SETTINGS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight")  # read by `config`
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OUTER = re.compile(r"([^.]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the model: where it is stored, its `shape`, and the `change` that turns what is stored into it."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    change: Change | None = None

    def read(self) -> torch.Tensor:
        stored = read_tensor(self.tensor)
        return stored if self.change is None else self.change(stored)


class GgufTensors:
    """The tensors of the model in the GGUF file `path`, on the CPU. Messages call the model `name`.

    A tensor is a copy: as stored if it is F32, F16 or BF16, in float32 if it is quantised. Of an architecture that `config` does
    not know, the tensors have the names of the file. Raises SpecgenError for a damaged file.
    """

    def __init__(self, path: Path, name: str) -> None:
        opened = open_gguf(path, name)
        self._stored = _by_model_name(opened, Metadata(opened.metadata, name))

    def keys(self) -> list[str]:
        return list(self._stored)

    def metadata(self) -> Mapping[str, str]:
        """The text in a safetensors file's header: none."""
        return {}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor. Raises KeyError for an unknown name, and ValueError or OSError for damaged data."""
        return self._stored[name].read()

    def get_slice(self, name: str) -> GgufSlice:
        """Returns a tensor that is read when a part of it is taken."""
        return GgufSlice(self._stored[name])

    def shapes_and_types(self) -> dict[str, tuple[list[int], str]]:
        """Returns the shape of each tensor by name, and the name of the type in which it is stored, such as Q4_K."""
        return {name: (list(stored.shape), stored.tensor.type) for name, stored in self._stored.items()}


class GgufSlice:
    """A tensor of which parts can be read."""

    def __init__(self, stored: _Stored) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def __getitem__(self, part: Any) -> torch.Tensor:
        """Returns a part of the tensor, by what indexes a torch tensor.

        Of a range of rows only these are read, unless the tensor is stored otherwise than the model has it. For any other part
        the whole tensor is read.
        """
        if part is ...:
            return self._stored.read()
        index = part if isinstance(part, tuple) else (part,)
        if self._stored.change is not None or not index or not isinstance(index[0], slice):
            return self._stored.read()[part].clone()
        rows = range(self._stored.shape[0])[index[0]]
        if rows.step != 1:
            return self._stored.read()[part].clone()
        found = read_tensor(self._stored.tensor, range(rows.start, max(rows.start, rows.stop)))
        rest = index[1:]
        return found[(slice(None), *rest)].clone() if rest else found


def _by_model_name(opened: GgufFile, metadata: Metadata) -> dict[str, _Stored]:
    if not is_known(metadata):
        return {name: _Stored(tensor, tensor.shape) for name, tensor in opened.tensors.items()}
    found: dict[str, _Stored] = {}
    for name, tensor in opened.tensors.items():
        if _SETTINGS.fullmatch(name):
            continue
        own = _model_name(name, metadata.architecture)
        if own in found:
            raise metadata.refuse(f"has two tensors that are its {own}")
        found[own] = _stored(tensor, own, metadata)
    return found


def _model_name(name: str, architecture: str) -> str:
    """Returns the name of a tensor in safetensors files; the name itself if it is not known, so that it is noticed later."""
    names = {**_NAMES, **_OTHER_NAMES.get(architecture, {})}
    if (layer := _LAYER.fullmatch(name)) and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
    if (outer := _OUTER.fullmatch(name)) and outer[1] in names:
        return f"{names[outer[1]]}.{outer[2]}"
    return name


def _stored(tensor: GgufTensor, name: str, metadata: Metadata) -> _Stored:
    architecture, shape = metadata.architecture, tensor.shape
    if architecture in _PERMUTED and (found := re.search(r"\.(q|k)_proj\.(weight|bias)$", name)):
        key = "{arch}.attention.head_count" if found[1] == "q" else "{arch}.attention.head_count_kv"
        heads = metadata.per_layer(key, metadata.per_layer("{arch}.attention.head_count"))
        return _Stored(tensor, shape, partial(_in_halves, heads=heads))
    if architecture in _SHIFTED_NORMS and name.endswith("norm.weight"):
        return _Stored(tensor, shape, _less_one)
    if name.endswith("conv.conv.weight") and len(shape) == 2:
        return _Stored(tensor, (shape[0], 1, shape[1]), partial(torch.unsqueeze, dim=1))
    return _Stored(tensor, shape)


def _in_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns the rows of all heads with the two rows of a rotated pair half a head apart; they are stored as neighbours."""
    if heads < 1 or len(rows) % (2 * heads):
        raise ValueError(f"{len(rows):,} rows of queries or keys do not belong to {heads:,} heads")
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _less_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() - 1
