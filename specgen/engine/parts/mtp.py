"""The drafting layers in a target's own files (multi-token prediction, MTP): reads their layouts, and runs them.

Layer k, from 0, joins token i + k + 1 with a hidden state of token i: layer 0 with the target's, the others with layer k - 1's.
With N RMSNorm, E the embedding, and one weight for both parts,

    x = eh_proj [N(E(token)); N(state)]     h = N(decoder layer(x))     the target's LM head on h predicts token i + k + 2

(DeepSeek-V3, arXiv:2412.19437, section 2.2). One layer drafts any number of tokens: its h takes the state's place, as in EAGLE.
Of several, layer k drafts token k after layer k - 1, and each has a KV cache of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attention import CAUSAL
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
    """Returns the files with the drafting layers' tensors under their names in `MtpWeights`, and its `architecture`.

    None if there are none. Reads no weights. Raises SpecgenError, in one line, for layers of an unknown layout, and for those of
    a model whose layers the native decoder does not know.
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
    whole = known_architecture(target.model, "mtp")
    number = len({found[1] for name in files.names if (found := _LAYER.fullmatch(name))})
    kind = next(kind for kind in reversed(whole.layers) if kind.mixer == "attention")
    architecture = replace(whole, num_layers=number, layers=(kind,) * number)
    if whole.mixture is not None and whole.mixture.layout != "interleaved":
        layout = "fused" if any(name.endswith("experts.gate_up_proj") for name in files.names) else "separate"
        architecture = replace(architecture, mixture=replace(whole.mixture, layout=layout))
    shapes = _shapes(architecture)
    if unknown := sorted(files.names - shapes.keys()):
        raise files.refuse(f"{files.key(unknown[0])} is of no layout that specgen knows", _OTHERS)
    files.check(shapes)
    return files, architecture


def _shapes(architecture: Architecture) -> dict[str, Shape]:
    shapes, width = dict[str, Shape](), architecture.hidden_size
    for index in range(architecture.num_layers):
        shapes |= layer_shapes(architecture, index) | {_JOIN.format(index): (width, 2 * width)}
        shapes |= {name.format(index): (width,) for name in (_TOKEN_NORM, _STATE_NORM, _OUT_NORM)}
    return shapes


def read_layers(target: LoadedModel) -> MtpWeights:
    """Returns the weights of a target's drafting layers, which it has. Raises SpecgenError as `find_layers`, and for damaged
    files."""
    found = find_layers(target)
    assert found is not None
    (files, architecture), final_norm = found, None
    tensors = take_exactly(files, _shapes(architecture))
    if _MIMO_JOIN in files.key(_JOIN.format(0)):
        final_norm = (
            model_files(target.folder, target.name, target.device).take(FINAL_NORM).float() + architecture.norm_weight_offset
        )
        for name in (_JOIN.format(index) for index in range(architecture.num_layers)):
            tensors[name] = tensors[name].roll(architecture.hidden_size, dims=1)
    return MtpWeights(architecture, tensors, final_norm)


def before_final_norm(weights: MtpWeights, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Returns what turns the target's states into those that the layers read; None: nothing.

    A state divided by the final norm's weight is the one before that norm but for its length, which the layers' own norm takes
    out.
    """
    if weights.final_norm is None:
        return None
    divisor = weights.final_norm.to(device)
    divisor = divisor.masked_fill(divisor == 0, torch.inf)
    return lambda states: (states / divisor).to(states.dtype)


class MtpLayer:
    """Drafting layer `index`, with the projection before it and the norm after it.

    `make_product` makes a product as for `NativeLayer`, `norm_gain` is as in `layer.norm_function`.
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
        self._norm, self._normed = norm(_OUT_NORM).to(dtype), norm_function(architecture.norm_eps, norm_gain)

    def __call__(self, embeddings: Tensor, states: Tensor, inputs: PassInputs) -> Tensor:
        """Returns the states h [n, width] of n tokens, from their embeddings and from the states that they are joined with."""
        pairs = self._normed(torch.stack((embeddings, states), dim=1)).flatten(1)
        return self._normed(self._layer(self._join(pairs), inputs)) * self._norm


def without_first(inputs: PassInputs, count: int, last: int) -> PassInputs:
    """Returns the inputs of a pass whose tokens do not see the first `count` entries of the cache; it has `last` with theirs."""
    kinds = []
    for rotation, mask, entries in inputs.kinds:
        assert entries is not None
        hidden = max(0, count + entries[0].keys.shape[1] - last)  # in a sliding window, the keys are not all
        cut = [LayerEntries(written, keys[:, hidden:], values[:, hidden:]) for written, keys, values in entries]
        kinds.append(KindInputs(rotation, mask if mask is None or mask is CAUSAL else mask[:, hidden:], cut))
    return inputs._replace(kinds=kinds)
