"""The drafting layers in a target's own files (multi-token prediction, MTP): reads their layouts,
and runs them.

Layer k, from 0, joins token i + k + 1 with a hidden state at token i: layer 0 with the target's, a
later layer with that of layer k - 1. With N for RMSNorm, E for the embedding, and `eh_proj` for one
weight that reads both parts,

    x = eh_proj [N(E(token)); N(state)]
    h = N(decoder layer(x))
    the target's LM head on h predicts token i + k + 2

(DeepSeek-V3, arXiv:2412.19437, section 2.2). If there is only one layer, it drafts any number of
tokens: h is the state that the next token is joined with, as in EAGLE. If there are several, layer
k drafts the k-th token of a draft (from 0), and each layer has a KV cache of its own.

The assistants of Gemma 4 do the same with files of their own (`AssistantRunner`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.block_runner import penalised
from specgen.engine.devices import inference, upload
from specgen.engine.forward_pass import NO_NODES, ForwardPass, ModelOutput, TreeNodes, draft_nodes
from specgen.engine.kernels.branches import KindTable
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.model import Model
from specgen.engine.model_runner import TOKEN_BY_TOKEN
from specgen.engine.native.architecture import Architecture, LayerKind, UnsupportedConfig
from specgen.engine.native.attend import CAUSAL
from specgen.engine.native.config_reading import attention_architecture, read_architecture
from specgen.engine.native.families import tensor_names
from specgen.engine.native.inputs import InputMaker, KindInputs, PassInputs, layer_kinds
from specgen.engine.native.kv_buffer import LayerEntries
from specgen.engine.native.layer_files import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    final_norm,
    layer_files,
)
from specgen.engine.native.linear import Linear, MakeLinear
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.norms import norm_function, norm_gain, output_norm
from specgen.engine.native.tensors import tensor_shapes
from specgen.engine.parts.head_files import (
    OTHER_HEAD,
    check_size,
    check_vocabulary,
    expect,
    matrix_shape,
    take_exactly,
    unsupported,
)
from specgen.engine.parts.own_layers import known_architecture
from specgen.engine.parts.part import (
    AssistantWeights,
    FeatureRunner,
    MtpWeights,
    native_layers,
    part_linears,
    part_weight,
)
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.weights import Shape, WeightFiles, model_files, renamed

_TOKEN_NORM, _STATE_NORM, _JOIN, _OUT_NORM = (
    f"layers.{{}}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
)
# with a number after those of the target's layers: DeepSeek-V3's layout
_LAYER = re.compile(r"layers\.(\d{1,9})\.(.*)")
# of the target's embedding and LM head
_COPY = re.compile(r"embed_tokens\.weight|shared_head\.head\.weight")
# patterns of names in the files, without the prefix `model.`, and what they become, one after the
# other
_NAMES = (
    (r"^mtp(_layers|\.layers)\.", "layers."),  # of MiMo-7B; of Qwen3-Next and MiMo-V2-Flash
    (r"^mtp\.(fc|norm|pre_fc_norm_\w+)\.", r"layers.0.\1."),  # of Qwen3-Next
    (r"\.(pre_fc_norm_embedding|token_layernorm)\.", ".enorm."),
    (r"\.(pre_fc_norm_hidden|hidden_layernorm)\.", ".hnorm."),
    (r"\.(fc|input_proj)\.", ".eh_proj."),
    (r"\.(norm|final_layernorm)\.", ".shared_head.norm."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
)
# MiMo-7B's, which reads [state; embedding], with the state before the target's final norm
_MIMO_JOIN = "input_proj"
# of an assistant of Gemma 4
JOIN = "pre_projection.weight"
POST = "post_projection.weight"
_CENTROIDS = "masked_embedding.centroids.weight"
_ORDER = "masked_embedding.token_ordering"
_OTHERS = "Take another method: all others work with this target"


def find_layers(target: LoadedModel) -> tuple[WeightFiles, Architecture] | None:
    """Looks for drafting layers in the target's files. Returns the files, and the `architecture`
    for `MtpWeights`; None if there are none.

    The files have the tensors under their names in `MtpWeights`. Reads no weights. Raises
    SpecgenError, in one line, for layers of an unknown layout, and if the native decoder does not
    know the model's family.
    """
    count = target.shape.num_layers
    names = tensor_names(target.shape.model_type)

    def name_of(key: str) -> str | None:
        name = renamed(re.sub(r"^((language_)?model\.)+", "", key), names)
        if (own := _LAYER.fullmatch(name)) is not None:
            is_after = int(own[1]) >= count and not _COPY.fullmatch(own[2])
            return f"layers.{int(own[1]) - count}.{own[2]}" if is_after else None
        if re.match(r"mtp(_\w+)?\.", name) is None:
            return None
        for published, named in _NAMES:
            name = re.sub(published, named, name)
        return name

    files = WeightFiles(
        target.folder, f"the drafting layers of {target.name}", target.device, name_of=name_of
    )
    if not files.names:
        return None
    whole = _attention_architecture(target)
    number = len({match[1] for name in files.names if (match := _LAYER.fullmatch(name))})
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
    """Returns the architecture of the target's layers with attention, also where transformers runs
    its layers."""
    if not isinstance(target.shape, Architecture):
        with suppress(UnsupportedConfig):
            return attention_architecture(target.files.raw)
    return known_architecture(target.shape, "mtp")


def _shapes(architecture: Architecture) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    width = architecture.hidden_size
    for index in range(architecture.num_layers):
        shapes |= tensor_shapes(layer_files(architecture, index)) | {
            _JOIN.format(index): (width, 2 * width)
        }
        shapes |= {name.format(index): (width,) for name in (_TOKEN_NORM, _STATE_NORM, _OUT_NORM)}
    return shapes


def read_layers(target: LoadedModel) -> MtpWeights:
    """Returns the weights of the drafting layers in the target's files. The files must have such
    layers (see `find_layers`).

    Raises SpecgenError as `find_layers` does, and for damaged files.
    """
    layers = find_layers(target)
    assert layers is not None
    files, architecture = layers
    final_norm = None
    tensors = take_exactly(files, _shapes(architecture))
    if _MIMO_JOIN in files.key(_JOIN.format(0)):
        names = tensor_names(architecture.model_type)
        whole = model_files(target.folder, target.name, target.device, names)
        final_norm = whole.take(FINAL_NORM).float() + architecture.norm_weight_offset
        for name in (_JOIN.format(index) for index in range(architecture.num_layers)):
            tensors[name] = tensors[name].roll(architecture.hidden_size, dims=1)
    return MtpWeights(architecture, tensors, final_norm)


def before_final_norm(
    weights: MtpWeights, device: torch.device
) -> Callable[[Tensor], Tensor] | None:
    """Returns a function that turns the target's hidden states after the final norm into those
    before it; None if they are not needed.

    Some layers (MiMo-7B's) read the states before the norm. The function divides by the norm's
    weight. The result differs from the original state by a factor, which does not matter because
    the layers apply a norm of their own.
    """
    if weights.final_norm is None:
        return None
    divisor = weights.final_norm.to(device)
    divisor = divisor.masked_fill(divisor == 0, torch.inf)
    return lambda states: (states / divisor).to(states.dtype)


class MtpLayer:
    """Drafting layer number `index`, with the projection before it and the norm after it.

    `make_linear` makes a linear layer from a weight, a bias and a factor, as for `NativeLayer`;
    `norm_gain` is `gain` of `norms.norm_function`.
    """

    def __init__(
        self,
        weights: MtpWeights,
        index: int,
        device: torch.device,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        *,
        norm_gain: float = 1.0,
    ) -> None:
        architecture = weights.architecture

        def take(name: str) -> Tensor:
            return weights.tensors[name].to(device)

        def norm(name: str) -> Tensor:
            return (take(name.format(index)).float() + architecture.norm_weight_offset) * norm_gain

        self._pair_norm = torch.cat((norm(_TOKEN_NORM), norm(_STATE_NORM))).to(dtype)
        join = part_weight(take(_JOIN.format(index)), dtype, make_linear)
        self._join = make_linear(join, None, 1.0)
        (self._layer,) = native_layers(
            architecture, [0], take, dtype, make_linear, norm_gain, index
        )
        self._norm = output_norm(architecture.norm_eps, norm_gain, norm(_OUT_NORM).to(dtype))
        self._normed = norm_function(architecture.norm_eps, norm_gain)

    def __call__(self, embeddings: Tensor, states: Tensor, inputs: PassInputs) -> Tensor:
        """Returns the hidden states h [n, width] of n pairs; see the module.

        `embeddings` [n, width] are those of the pairs' tokens, `states` [n, width] the hidden
        states that they are joined with.
        """
        pairs = self._normed(torch.stack((embeddings, states), dim=1)).flatten(1)
        return self._norm(self._layer(self._join(pairs * self._pair_norm), inputs))


def read_assistant(
    files: WeightFiles, target: LoadedModel, config: Mapping[str, Any]
) -> AssistantWeights:
    """Returns the weights of an assistant of Gemma 4. `config` is its config.json.

    Raises SpecgenError for unsupported variants, for damaged files, and for assistants of other
    targets.
    """
    theirs = known_architecture(target.shape, "an assistant of Gemma 4", any_sizes=True)
    own = _assistant_config(files, theirs, config)
    check_size(
        files, POST, "a hidden size of", matrix_shape(files, POST)[0], target, theirs.hidden_size
    )
    check_vocabulary(files, EMBEDDING, target)
    architecture = replace(own, layers=_reading_layers(files, own, theirs, target.name))

    tokens = theirs.vocab_size
    shapes = _assistant_shapes(architecture, theirs)
    groups = 0
    if config.get("use_ordered_embeddings"):
        groups = config.get("centroid_intermediate_top_k", 32)
        count = matrix_shape(files, _CENTROIDS)[0]
        if not isinstance(groups, int) or not 1 <= groups <= count or tokens % count:
            raise unsupported(files, "centroid_intermediate_top_k", groups)
        shapes |= {_CENTROIDS: (count, own.hidden_size), _ORDER: (tokens,)}
    expect(files, shapes, {HEAD: (tokens, own.hidden_size)})  # a copy of the embedding

    tensors = take_exactly(files, shapes)
    if groups and not torch.equal(tensors[_ORDER].sort().values, torch.arange(tokens)):
        raise files.refuse(f"{files.key(_ORDER)} does not hold the id of each token once")
    return AssistantWeights(architecture, tensors, groups)


def _assistant_config(
    files: WeightFiles, theirs: Architecture, config: Mapping[str, Any]
) -> Architecture:
    """Returns the architecture that an assistant's config.json describes; `theirs` is the target's.
    Raises SpecgenError for layers of another family, and for experts."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise unsupported(files, "text_config", inner)
    try:
        own = read_architecture({**inner, "num_kv_shared_layers": 0})
    except UnsupportedConfig as error:
        raise unsupported(files, error.field, error.value) from error
    if own.model_type != theirs.model_type or own.per_layer_size or own.mixture is not None:
        problem = (
            f"it has to consist of layers of {theirs.model_type}, without experts "
            "and embeddings of their own"
        )
        raise files.refuse(problem, OTHER_HEAD)
    return own


def _reading_layers(
    files: WeightFiles, own: Architecture, theirs: Architecture, target: str
) -> tuple[LayerKind, ...]:
    """Returns an assistant's layers, each with the target's last layer of its kind as the `owner`
    of the keys that it reads. Raises SpecgenError if their heads do not fit."""
    layers = []
    for kind in own.layers:
        owners = [
            index
            for index, other in enumerate(theirs.layers)
            if other.rotary == kind.rotary and other.owner is None
        ]
        read = theirs.of_layer(owners[-1]) if owners else None
        if (
            read is None
            or read.head_size != (kind.head_size or own.head_size)
            or own.num_heads % read.num_kv_heads
        ):
            problem = f"its layers do not fit to the keys and values of {target}"
            raise files.refuse(problem, OTHER_HEAD)
        layers.append(replace(kind, owner=owners[-1], kv_heads=read.num_kv_heads))
    return tuple(layers)


def _assistant_shapes(own: Architecture, theirs: Architecture) -> dict[str, Shape]:
    """Returns the shapes of the tensors that all assistants have."""
    width = own.hidden_size
    shapes: dict[str, Shape] = {
        EMBEDDING: (theirs.vocab_size, width),
        FINAL_NORM: (width,),
        JOIN: (width, 2 * theirs.hidden_size),
        POST: (theirs.hidden_size, width),
    }
    for index in range(own.num_layers):
        shapes |= tensor_shapes(layer_files(own, index))
    return shapes


class AssistantRunner:
    """Drafts with an assistant of Gemma 4. Implements `DraftRunner`. Raises SpecgenError if the
    target does not run on the native decoder.

    Like drafting layer 0 (see the module), with h = N(decoder layers(x)) and x = `pre_projection`
    [E(token); state]: the first state is the target's, and `post_projection` h is the state that
    the next token is joined with. But E is the target's embedding, the logits are those of the
    assistant's own table, and the layers have no keys and values: each reads those of one of the
    target's layers, of the tokens before the context's last one. All drafted tokens have the
    position of that token. So no drafted token sees another, and each level of a draft takes a
    pass.
    """

    traits = TOKEN_BY_TOKEN

    def __init__(
        self,
        weights: AssistantWeights,
        model: Model,
        target_penalties: PenaltyProcessor | None,
        penalties: PenaltyProcessor | None,
    ) -> None:
        if not isinstance(model, NativeModel):
            raise SpecgenError(
                "an assistant of Gemma 4 needs its target on the native backend",
                "Take --backend auto or native",
            )
        made = weights.architecture
        self.device = model.device
        self.context_limit = model.shape.context_limit
        self.num_embeddings = self.vocab_size = model.shape.vocab_size
        self.target = FeatureRunner(
            model, model.forward(taps=[model.shape.num_layers]), model.new_cache(), target_penalties
        )
        self._model = model
        self._penalties = penalties
        self._kinds = made.layers
        self._groups = weights.groups
        devices = [self.device] * made.num_layers
        self._tables = InputMaker(made, model.dtype, devices).tables
        make_linear = part_linears(model)
        gain = norm_gain(made, model.dtype, self.device)

        def take(name: str) -> Tensor:
            return weights.tensors[name].to(self.device)

        self._layers = native_layers(
            made, layer_kinds(made, devices)[1], take, model.dtype, make_linear, gain
        )

        def linear(name: str) -> Linear:
            return make_linear(part_weight(take(name), model.dtype, make_linear))

        norm = final_norm(made, take, model.dtype, gain)
        self._norm = output_norm(made.norm_eps, gain, norm)
        self._join = linear(JOIN)
        self._post = linear(POST)
        if not self._groups:
            self._head = linear(EMBEDDING)
        else:  # of a few groups, the logits of single rows are computed
            self._table = part_weight(take(EMBEDDING), model.dtype, make_linear)
            self._centroids = linear(_CENTROIDS)
            self._order = take(_ORDER).view(len(weights.tensors[_CENTROIDS]), -1)
        # the last call's context, its length, and its draft
        self._known: tuple[Context, int, TreeNodes] | None = None
        # the logits and the states that were computed for these
        self._rows = norm, norm

    def room(self, context: Context) -> int:
        """Returns how many tokens can be drafted; 0 if the context has no token before its last
        one, or one without an embedding."""
        is_known = len(context) > 1 and context.largest_id < self.num_embeddings
        return self.context_limit - len(context) if is_known else 0

    @inference
    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits after the context (index 0) and after each draft token i (index i +
        1), from index `start` on.

        The arguments are those of `ModelRunner.logits`. The output's `hidden_states` are the states
        of the next tokens.
        """
        tokens, above = nodes = draft_nodes(list(draft), parents)
        done = 0
        known = self._known
        self._known = None
        if known is None or known[0] is not context or known[1] != len(context):
            cached, _ = self.target.share_prefix(context)
            before = ForwardPass(context, NO_NODES, cached - 1, cached, self.target.cache)
            self._pass = self._pass_after(cached)
            self._rows = self._run(context.ids[-1:], self.target.features(before))
        else:
            for own, other in zip(
                zip(*nodes, strict=True), zip(*known[2], strict=True), strict=False
            ):
                if own != other:
                    break
                done += 1
        logits, states = (rows[: done + 1] for rows in self._rows)
        while done < len(tokens):
            end = done + 1
            while end < len(tokens) and above[end] < done:
                end += 1
            at = upload(torch.tensor(above[done:end]) + 1, self.device)
            level = self._run(tokens[done:end], states.index_select(0, at))
            logits, states = (torch.cat(rows) for rows in zip((logits, states), level, strict=True))
            done = end
        self._rows = logits, states
        self._known = context, len(context), nodes
        output = ModelOutput(logits[start:], states[start:])
        return penalised(output, self._penalties, context, draft, parents, start)

    def _pass_after(self, cached: int) -> PassInputs:
        """Returns the layers' inputs behind `cached` tokens of the target: what they read of it,
        and the rotations.

        A layer with a sliding window of w tokens sees the last w + 1 of the target's.
        """
        entries = []
        for kind in self._kinds:
            assert kind.owner is not None
            keys, values = self.target.cache.keys_and_values(kind.owner, cached)
            first = 0 if kind.window is None else max(0, cached - 1 - kind.window)
            entries.append(LayerEntries(keys, keys[:, first:], values[:, first:]))
        rotations = [
            None if table is None else table.rows(cached, cached + 1)[:, None]
            for table in self._tables
        ]
        return PassInputs(1, 1, [KindInputs(rotation, None, entries) for rotation in rotations])

    def _run(self, tokens: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the assistant on n tokens, each joined with its row of `states` [n, target width].

        Returns the logits and the states of the next tokens.
        """
        hidden = self._join(
            torch.cat((self._model.embeddings(torch.tensor(tokens)), states), dim=1)
        )
        inputs = self._pass._replace(rows=len(tokens), written=len(tokens))
        for layer in self._layers:
            hidden = layer(hidden, inputs)
        hidden = self._norm(hidden)
        return self._scores(hidden), self._post(hidden)

    def _scores(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, vocabulary] for `hidden` [n, width]; -inf for tokens outside the
        likeliest groups."""
        if not self._groups:
            return self._head(hidden)
        best = self._centroids(hidden).topk(self._groups, dim=-1).indices
        ids = self._order[best].flatten(1)
        scores = torch.einsum("ntw,nw->nt", self._table[ids].to(hidden.dtype), hidden)
        return scores.new_full((len(hidden), self.vocab_size), -torch.inf).scatter_(1, ids, scores)

    def reserve(self, capacity: int) -> None:
        """Does nothing: the assistant has no KV cache."""

    def clear_cache(self) -> None:
        """Drops what was computed for the last context. For measurements."""
        self._known = None


def without_first(inputs: PassInputs, count: int, last: int) -> PassInputs:
    """Returns `inputs` changed so that the tokens of the pass do not see the first `count` entries
    of the cache.

    `last` is the number of cache entries, those of the pass's tokens included.
    """
    kinds = []
    for rotation, mask, entries, seen in inputs.kinds:
        assert entries is not None
        if seen is not None:
            kinds.append(KindInputs(rotation, None, entries, seen.without_first(count)))
            continue
        # in a sliding window, the keys are not all
        hidden = max(0, count + entries[0].keys.shape[1] - last)
        cut = [
            LayerEntries(written, keys[:, hidden:], values[:, hidden:])
            for written, keys, values in entries
        ]
        kinds.append(
            KindInputs(rotation, mask if mask is None or mask is CAUSAL else mask[:, hidden:], cut)
        )
    place = inputs.place
    if place is not None:
        place = place._replace(kinds=KindTable.of(kinds))
    return inputs._replace(kinds=kinds, place=place)
