"""The drafting layers in a target's own files (multi-token prediction, MTP): reads their layouts, and runs them.

Layer k, from 0, joins token i + k + 1 with a hidden state at token i: layer 0 with the target's, a later layer with that of layer
k - 1. With N for RMSNorm, E for the embedding, and `eh_proj` for one weight that reads both parts,

    x = eh_proj [N(E(token)); N(state)]     h = N(decoder layer(x))     the target's LM head on h predicts token i + k + 2

(DeepSeek-V3, arXiv:2412.19437, section 2.2). If there is only one layer, it drafts any number of tokens: h is the state that the
next token is joined with, as in EAGLE. If there are several, layer k drafts the k-th token of a draft (from 0), and each layer
has a KV cache of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.attention import CAUSAL
from specgen.engine.native.config_reading import attention_architecture
from specgen.engine.native.inputs import KindInputs, PassInputs
from specgen.engine.native.kv_buffer import LayerEntries
from specgen.engine.native.layer import norm_function
from specgen.engine.native.layer_weights import FINAL_NORM, layer_shapes
from specgen.engine.native.products import MakeProduct
from specgen.engine.parts.head_files import take_exactly
from specgen.engine.parts.own_layers import known_architecture
from specgen.engine.parts.part import MtpWeights, native_layers
from specgen.engine.weights import Shape, WeightFiles, model_files

_TOKEN_NORM, _STATE_NORM, _JOIN, _OUT_NORM = (
    f"layers.{{}}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
)
_LAYER = re.compile(r"layers\.(\d{1,9})\.(.*)")  # with a number after those of the target's layers: DeepSeek-V3's layout
_COPY = re.compile(r"embed_tokens\.weight|shared_head\.head\.weight")  # of the target's embedding and LM head
_NAMES = (  # patterns of names in the files, without the prefix `model.`, and what they become, one after the other
    (r"^mtp(_layers|\.layers)\.", "layers."),  # of MiMo-7B; of Qwen3-Next and MiMo-V2-Flash
    (r"^mtp\.(fc|norm|pre_fc_norm_\w+)\.", r"layers.0.\1."),  # of Qwen3-Next
    (r"\.(pre_fc_norm_embedding|token_layernorm)\.", ".enorm."),
    (r"\.(pre_fc_norm_hidden|hidden_layernorm)\.", ".hnorm."),
    (r"\.(fc|input_proj)\.", ".eh_proj."),
    (r"\.(norm|final_layernorm)\.", ".shared_head.norm."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
)
_MIMO_JOIN = "input_proj"  # MiMo-7B's, which reads [state; embedding], with the state before the target's final norm
_OTHERS = "Take another method: all others work with this target"


def find_layers(target: LoadedModel) -> tuple[WeightFiles, Architecture] | None:
    """Looks for drafting layers in the target's files. Returns the files, and the `architecture` for `MtpWeights`; None if there
    are none.

    The files have the tensors under their names in `MtpWeights`. Reads no weights. Raises SpecgenError, in one line, for layers
    of an unknown layout, and if the native decoder does not know the model's family.
    """
    count = target.model.shape.num_layers

    def name_of(key: str) -> str | None:
        name = re.sub(r"^((language_)?model\.)+", "", key)
        if (own := _LAYER.fullmatch(name)) is not None:
            is_after = int(own[1]) >= count and not _COPY.fullmatch(own[2])
            return f"layers.{int(own[1]) - count}.{own[2]}" if is_after else None
        if re.match(r"mtp(_\w+)?\.", name) is None:
            return None
        for published, named in _NAMES:
            name = re.sub(published, named, name)
        return name

    files = WeightFiles(target.folder, f"the drafting layers of {target.name}", target.device, name_of=name_of)
    if not files.names:
        return None
    whole = _attention_architecture(target)
    number = len({found[1] for name in files.names if (found := _LAYER.fullmatch(name))})
    kind = next(kind for kind in reversed(whole.layers) if kind.mixer == "attention")
    architecture = replace(whole, num_layers=number, layers=(kind,) * number)
    if whole.mixture is not None and whole.mixture.layout != "interleaved":
        is_fused = any(name.endswith("experts.gate_up_proj") for name in files.names)
        mixture = replace(whole.mixture, layout="fused" if is_fused else "separate")
        architecture = replace(architecture, mixture=mixture)
    shapes = _shapes(architecture)
    if unknown := sorted(files.names - shapes.keys()):
        raise files.refuse(f"{files.key(unknown[0])} is of no layout that specgen knows", _OTHERS)
    files.check(shapes)
    return files, architecture


def _attention_architecture(target: LoadedModel) -> Architecture:
    """Returns the architecture of the target's layers with attention, also where transformers runs its layers."""
    if not isinstance(target.model.shape, Architecture):
        with suppress(UnsupportedConfig):
            return attention_architecture(target.prepared.raw)
    return known_architecture(target.model, "mtp")


def _shapes(architecture: Architecture) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    width = architecture.hidden_size
    for index in range(architecture.num_layers):
        shapes |= layer_shapes(architecture, index) | {_JOIN.format(index): (width, 2 * width)}
        shapes |= {name.format(index): (width,) for name in (_TOKEN_NORM, _STATE_NORM, _OUT_NORM)}
    return shapes


def read_layers(target: LoadedModel) -> MtpWeights:
    """Returns the weights of the drafting layers in the target's files. The files must have such layers (see `find_layers`).

    Raises SpecgenError as `find_layers` does, and for damaged files.
    """
    found = find_layers(target)
    assert found is not None
    files, architecture = found
    final_norm = None
    tensors = take_exactly(files, _shapes(architecture))
    if _MIMO_JOIN in files.key(_JOIN.format(0)):
        final_norm = (
            model_files(target.folder, target.name, target.device).take(FINAL_NORM).float() + architecture.norm_weight_offset
        )
        for name in (_JOIN.format(index) for index in range(architecture.num_layers)):
            tensors[name] = tensors[name].roll(architecture.hidden_size, dims=1)
    return MtpWeights(architecture, tensors, final_norm)


def before_final_norm(weights: MtpWeights, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Returns a function that turns the target's hidden states after the final norm into those before it; None if they are not
    needed.

    Some layers (MiMo-7B's) read the states before the norm. The function divides by the norm's weight. The result differs from
    the original state by a factor, which does not matter because the layers apply a norm of their own.
    """
    if weights.final_norm is None:
        return None
    divisor = weights.final_norm.to(device)
    divisor = divisor.masked_fill(divisor == 0, torch.inf)
    return lambda states: (states / divisor).to(states.dtype)


class MtpLayer:
    """Drafting layer number `index`, with the projection before it and the norm after it.

    `make_product` makes a product from a weight, a bias and a factor, as for `NativeLayer`; `norm_gain` is `gain` of
    `layer.norm_function`.
    """

    def __init__(
        self,
        weights: MtpWeights,
        index: int,
        device: torch.device,
        dtype: torch.dtype,
        make_product: MakeProduct,
        *,
        norm_gain: float = 1.0,
    ) -> None:
        architecture = weights.architecture

        def take(name: str) -> Tensor:
            return weights.tensors[name].to(device)

        def norm(name: str) -> Tensor:
            return (take(name.format(index)).float() + architecture.norm_weight_offset) * norm_gain

        norms = torch.cat((norm(_TOKEN_NORM), norm(_STATE_NORM)))
        self._join = make_product((take(_JOIN.format(index)).float() * norms).to(dtype), None, 1.0)
        (self._layer,) = native_layers(architecture, [0], take, dtype, make_product, norm_gain, index)
        self._norm = norm(_OUT_NORM).to(dtype)
        self._normed = norm_function(architecture.norm_eps, norm_gain)

    def __call__(self, embeddings: Tensor, states: Tensor, inputs: PassInputs) -> Tensor:
        """Returns the hidden states h [n, width] of n pairs; see the module.

        `embeddings` [n, width] are those of the pairs' tokens, `states` [n, width] the hidden states that they are joined with.
        """
        pairs = self._normed(torch.stack((embeddings, states), dim=1)).flatten(1)
        return self._normed(self._layer(self._join(pairs), inputs)) * self._norm


def without_first(inputs: PassInputs, count: int, last: int) -> PassInputs:
    """Returns `inputs` changed so that the tokens of the pass do not see the first `count` entries of the cache.

    `last` is the number of cache entries, those of the pass's tokens included.
    """
    kinds = []
    for rotation, mask, entries in inputs.kinds:
        assert entries is not None
        hidden = max(0, count + entries[0].keys.shape[1] - last)  # in a sliding window, the keys are not all
        cut = [LayerEntries(written, keys[:, hidden:], values[:, hidden:]) for written, keys, values in entries]
        kinds.append(KindInputs(rotation, mask if mask is None or mask is CAUSAL else mask[:, hidden:], cut))
    return inputs._replace(kinds=kinds)
