"""A layer in a model's files: its blocks and norms, and how they are read.

Matrices that read the same input are fused, with the weights of the norm before them and the score
scale folded in. All operations can be differentiated, so an exit layer is trained through them.
Names have no prefix `model.`, which most files have; what families call otherwise has Llama's names
here (`Family.names`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attention import (
    AttentionFiles,
    AttentionWeights,
    attention_files,
    read_attention,
)
from specgen.engine.native.experts import ExpertFiles, ExpertWeights, expert_files, read_experts
from specgen.engine.native.mlp import MLPFiles, MLPWeights, mlp_files, read_mlp
from specgen.engine.native.recurrence import (
    RecurrentFiles,
    RecurrentWeights,
    read_recurrence,
    recurrent_files,
)
from specgen.engine.native.tensors import Tensor
from specgen.engine.weights import Take

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"
EXIT_HEAD = "head.weight"  # the name of an exit layer's own LM head in its file


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """The weights of one layer in a model's files.

    `attention_norm` and `mlp_norm` are the norms of the input of mixer and MLP,
    `attention_post_norm` and `mlp_post_norm` those of their output; None: there is no such norm.
    `scalar` is the factor of the layer's output (None: there is none), `per_layer` are the weights
    `LayerWeights.per_layer`.
    """

    mixer: AttentionFiles | RecurrentFiles
    mlp: MLPFiles | ExpertFiles
    attention_norm: Tensor | None
    mlp_norm: Tensor | None
    attention_post_norm: Tensor | None
    mlp_post_norm: Tensor | None
    scalar: Tensor | None
    per_layer: tuple[Tensor, ...]


class LayerWeights(NamedTuple):
    """The weights of one layer: those of its mixer, those of its MLP, and the norms of their
    outputs (None: there are none).

    `per_layer` are the weights `gate` [size of e, width], `projection` [width, size of e] and
    `norm` [width] that add the layer's own embedding e of the token to its output x: x + norm
    RMSNorm(projection (act(gate x) e)). Empty: the layer has no such embedding. `scalar` is the
    factor of the layer's output. `attention_norm` and `mlp_norm` [width] are the weights of the
    norms before mixer and MLP that are not part of the matrices after them; None: they are.
    """

    mixer: AttentionWeights | RecurrentWeights
    mlp: MLPWeights | ExpertWeights
    attention_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    per_layer: Sequence[torch.Tensor] = ()
    scalar: float = 1.0
    attention_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None


def layer_files(architecture: Architecture, index: int) -> LayerFiles:
    """Returns the weights of layer `index` in a model's files."""
    architecture = architecture.of_layer(index)
    layer = f"layers.{index}."
    width = architecture.hidden_size
    kind = architecture.layers[index]
    pre = architecture.pre_norms
    post = architecture.post_norms

    def norm(name: str) -> Tensor:
        return Tensor(f"{layer}{name}.weight", (width,))

    mixer: AttentionFiles | RecurrentFiles
    if kind.mixer == "attention":
        mixer = attention_files(architecture, index)
    else:
        mixer = recurrent_files(architecture, index)
    mlp: MLPFiles | ExpertFiles
    if kind.mlp == "dense":
        mlp = mlp_files(architecture, index)
    else:
        mlp = expert_files(architecture, index)

    per_layer: tuple[Tensor, ...] = ()
    if size := architecture.per_layer_size:
        per_layer = (
            Tensor(f"{layer}per_layer_input_gate.weight", (size, width)),
            Tensor(f"{layer}per_layer_projection.weight", (width, size)),
            norm("post_per_layer_input_norm"),
        )
    mlp_norm = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    return LayerFiles(
        mixer,
        mlp,
        norm("input_layernorm") if pre else None,
        norm(mlp_norm) if pre else None,
        norm("post_attention_layernorm") if post else None,
        norm("post_feedforward_layernorm") if post else None,
        Tensor(f"{layer}layer_scalar", (1,)) if architecture.layer_scalars else None,
        per_layer,
    )


def read_layer(
    architecture: Architecture,
    index: int,
    take: Take,
    dtype: torch.dtype | None,
    gain: float = 1.0,
    *,
    is_normed: bool = True,
    take_matrix: Take | None = None,
) -> LayerWeights:
    """Returns the weights of layer `index` in `dtype`, with norms and scales folded in.

    `take` returns a tensor of the model by name. `gain` is a factor on the weights of the norms
    before attention and MLP (see `norms.norm_gain`). `is_normed` False: the attention's input has
    no norm. `dtype` None, for our own kernels: the matrices of mixer and MLP stay as
    `take_matrix` returns them, with nothing folded in, and all else is in float32.
    """
    files = layer_files(architecture, index)
    architecture = architecture.of_layer(index)

    def norm(tensor: Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return take(tensor.name).float() + architecture.norm_weight_offset

    others = dtype or torch.float32  # of what is no matrix
    attention_norm = norm(files.attention_norm if is_normed else None)
    mlp_norm = norm(files.mlp_norm)
    mixer_gain = None if attention_norm is None else attention_norm * gain
    mlp_gain = None if mlp_norm is None else mlp_norm * gain
    mlp: MLPWeights | ExpertWeights
    if isinstance(files.mlp, ExpertFiles):
        assert mlp_gain is not None
        mlp = read_experts(files.mlp, architecture, take, dtype, mlp_gain, gain, take_matrix)
        if dtype is not None or files.mlp.own_norms is not None:
            mlp_norm = None
    elif dtype is None:
        mlp = read_mlp(files.mlp, take, None, None, take_matrix)
    else:
        mlp = read_mlp(files.mlp, take, dtype, mlp_gain)
        mlp_norm = None

    mixer: AttentionWeights | RecurrentWeights
    if isinstance(files.mixer, RecurrentFiles):
        own_gain = None if dtype is None else mixer_gain
        mixer = read_recurrence(files.mixer, architecture, take, dtype, own_gain, take_matrix)
        if dtype is not None:
            attention_norm = None
    elif dtype is None:
        mixer = read_attention(files.mixer, architecture, take, None, None, take_matrix)
    else:
        mixer = read_attention(files.mixer, architecture, take, dtype, mixer_gain)
        attention_norm = None

    after = norm(files.attention_post_norm), norm(files.mlp_post_norm)
    return LayerWeights(
        mixer,
        mlp,
        None if after[0] is None else after[0].to(others),
        None if after[1] is None else after[1].to(others),
        [take(tensor.name).to(others) for tensor in files.per_layer],
        1.0 if files.scalar is None else float(take(files.scalar.name).to(others)),
        attention_norm,
        mlp_norm,
    )


def final_norm(
    architecture: Architecture, take: Take, dtype: torch.dtype, gain: float = 1.0
) -> torch.Tensor:
    """Returns the weight [width] of the norm before the LM head, multiplied by `gain` (see
    `norms.norm_gain`)."""
    return ((take(FINAL_NORM).float() + architecture.norm_weight_offset) * gain).to(dtype)
