"""What all kinds of trained parts share: weights under one set of names, and runners of the target
and of the part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from specgen.base.text import counted
from specgen.engine.cached_prefix import CachedPrefix
from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, ModelOutput
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.config_reading import read_architecture
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_files import EMBEDDING, read_layer
from specgen.engine.native.linear import LinearFactory, MakeLinear
from specgen.engine.native.norms import norm_gain
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.weights import Take

_MOST_HELD = 64  # rows of features that are not reduced yet


@dataclass(frozen=True)
class MedusaWeights:
    """The heads of Medusa-1 (Cai et al. 2024, section 2.1). Head k predicts the k-th token (from 0)
    of a draft.

    `blocks[k][j]` are weight [width, width] and bias [width] of head k's block j, which computes h
    + SiLU(W h + b). `lm_heads[k]` [head vocabulary, width] computes logits from the output of head
    k's last block; None: the target's LM head serves all heads. `vocabulary` [head vocabulary],
    int64, has the target's id of each of the head's ids; None: they are equal.
    `rank_accuracies[k][r]` is the share of held-out tokens that head k predicts with rank r (0: its
    likeliest token), measured in training; empty if it is not known.
    """

    blocks: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
    lm_heads: Sequence[torch.Tensor] | None = None
    vocabulary: torch.Tensor | None = None
    rank_accuracies: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class DecoderWeights:
    """A head that consists of decoder layers. `config` describes the layers as a config.json of
    Llama, Qwen 2 or Qwen 3 does.

    `tensors` has the weights under Llama's names without the prefix `model.`.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @cached_property
    def architecture(self) -> Architecture:
        return read_architecture(dict(self.config))


@dataclass(frozen=True)
class EagleWeights(DecoderWeights):
    """A head of EAGLE-1 and EAGLE-2 (`version` 1; Li et al. 2024) or of EAGLE-3 (`version` 3; Li et
    al. 2025).

    Beside the layers' weights, `tensors` has `fc.weight` and perhaps `fc.bias`. In version 1 there
    is no norm of the first layer's input and no final norm. Version 3 has all norms:
    `layers.0.input_layernorm.weight` is that of the embedding, and `layers.0.hidden_norm.weight`
    that of the features. It also has `lm_head.weight` [head vocabulary, width].
    `embed_tokens.weight` [target vocabulary, width] is there only if it differs from the target's
    embedding.

    Only if a version-1 head is limited to the tokens `vocabulary` (FR-Spec, arXiv:2502.14856), it
    has `lm_head.weight` too: these tokens' rows of the target's LM head.

    Only for version 3: `feature_layers` are the three layers of the target whose inputs are the
    features, counted as in transformers' `hidden_states` (entry j is the input of layer j).
    `vocabulary` [head vocabulary], int64, has the target's id of each of the head's ids, ascending;
    None: they are equal. `norm_before_residual`: the residual stream starts with the feature after
    its norm, not before.

    Also only for version 3, what EAGLE-3.1 adds (arXiv:2605.09992): `fc_norm.{0,1,2}.weight`, a
    norm of each of the three features before `fc`, or `input_norm.weight`, one norm of all three.
    `norm_output`: predicted features are states after the final norm, which the LM head reads as
    they are. `trial_ids`: the tokens of a text on which to measure whether that is so; empty if it
    is known.
    """

    version: Literal[1, 3] = 3
    feature_layers: tuple[int, ...] = ()
    vocabulary: torch.Tensor | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    trial_ids: Sequence[int] = ()


@dataclass(frozen=True)
class GlideWeights(DecoderWeights):
    """A GliDe draft model (Du et al. 2024), whose layers also attend to the target's KV cache.

    For each layer j, `tensors` also has `layers.j.cross_attn.q_proj.weight` [target heads * target
    head size, width] and `layers.j.cross_attn.o_proj.weight` [width, target heads * target head
    size]. `embed_tokens.weight` and `lm_head.weight` are missing where the target's are used. Layer
    j of m reads the keys and values of layer L - m + j of the target, which has L layers.
    `block_size` is the number of tokens in a block of its training. In training, the newest key of
    the target that a query sees is at most this many tokens before it.
    """

    block_size: int = 5


@dataclass(frozen=True)
class BlockWeights(DecoderWeights):
    """A head of DFlash (Chen et al. 2026, arXiv 2602.06036), DFlash2 or DSpark (arXiv 2607.05147),
    which drafts a block in one pass.

    `tensors` also has `fc.weight` [width, taps * target width] and `hidden_norm.weight` for the
    target's hidden states that `feature_layers` name (as in `EagleWeights`), and `norm.weight`.
    `lm_head.weight` and `embed_tokens.weight` are there only if they differ from the target's;
    `vocabulary` is as in `EagleWeights`. The pass has `block_size` rows: the context's last token
    and masks, whose id is `mask_id`. `from_anchor`: row j predicts the token after its own
    position, otherwise the one at it. `causal`: rows do not see later ones; False: they do; None:
    they do except in layers with a sliding window. The head reads the target's tables without the
    target's factors and cap. It has its own: `embedding_scale` of the embeddings, `logit_scale` of
    the logits, and then their cap `logit_cap` (None: they have none).

    DSpark's Markov head is `markov_head.markov_w1.weight` and `markov_head.markov_w2.weight`
    [vocabulary, rank]; its prediction of acceptance is `confidence_head.proj.weight` [1, width or
    width + rank] and `confidence_head.proj.bias` [1].

    DFlash2's convolutions are, for each layer i and each of `attention_conv` and `mlp_conv`,
    `layers.i.attention_conv.base_kernel` [2, taps, width] and
    `layers.i.attention_conv.kernel_projection.weight` [2 * taps * groups, width]; `conv_group` is
    the number of channels in a group (0: there are no convolutions). Its selector chooses among the
    `candidates` likeliest tokens of a row (0: there is none): see
    `candidate_selector.CandidateSelector`.
    """

    block_size: int = 8
    mask_id: int = 0
    feature_layers: tuple[int, ...] = ()
    from_anchor: bool = True
    causal: bool | None = None
    vocabulary: torch.Tensor | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    conv_group: int = 0
    candidates: int = 0

    @property
    def drafts(self) -> int:
        """The number of tokens that a whole block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def kind(self) -> str:
        """DFlash2 if there are convolutions or a selector, DSpark if rows predict the token after
        their own or read the token before, DFlash otherwise."""
        if self.conv_group or self.candidates:
            return "DFlash2"
        has_markov_head = any(name.startswith("markov_head.") for name in self.tensors)
        return "DSpark" if self.from_anchor or has_markov_head else "DFlash"

    @property
    def about(self) -> str:
        """The head in a few words."""
        text = f"{self.kind}, {counted(self.architecture.num_layers, 'layer')}, "
        text += f"{counted(self.drafts, 'token')} from a block of {self.block_size} rows"
        if self.candidates:
            text += f", each one of {self.candidates} candidates"
        return text

    @cached_property
    def architecture(self) -> Architecture:
        made = read_architecture(dict(self.config))
        default = self.causal
        layers = (
            replace(kind, causal=kind.window is not None if default is None else default)
            for kind in made.layers
        )
        return replace(
            made, layers=tuple(layers), logit_scale=self.logit_scale, logit_cap=self.logit_cap
        )


@dataclass(frozen=True)
class MtpWeights:
    """The drafting layers in a target's files (multi-token prediction; DeepSeek-V3,
    arXiv:2412.19437, section 2.2).

    `architecture` is the target's, but with the drafting layers alone. For each layer k, `tensors`
    has under `layers.k.` the decoder layer's weights, the norms `enorm.weight`, `hnorm.weight` and
    `shared_head.norm.weight` [width], and `eh_proj.weight` [width, 2 width], which reads the normed
    embedding, then the normed state. If the layers read the target's states before its final norm,
    `final_norm` [width] is the factor of that norm; None: they read the states after it.
    """

    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    final_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class AssistantWeights:
    """An assistant of Gemma 4: decoder layers without keys of their own; see `mtp.AssistantRunner`.

    In `architecture`, `owner` of a layer is the index of the target's layer whose keys and values
    it reads. `tensors` has the layers' weights under Llama's names, the assistant's own
    `embed_tokens.weight`, which is its LM head too, `norm.weight`, `pre_projection.weight` [width,
    2 target width] and `post_projection.weight` [target width, width]. With `groups` above 0, its
    head computes the logits of that many groups of tokens alone:
    `masked_embedding.centroids.weight` [number of groups, width] scores the groups, and
    `masked_embedding.token_ordering` [vocabulary] has their ids, one group after the other.
    """

    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    groups: int = 0


HeadWeights = MedusaWeights | EagleWeights | GlideWeights | BlockWeights


class RowBuffer(NamedTuple):
    """A buffer `rows` [capacity, width]: where its first row is, and the bytes of a row."""

    rows: torch.Tensor
    capacity: int
    row_bytes: int
    address: int

    @classmethod
    def of(cls, rows: torch.Tensor) -> RowBuffer:
        return cls(rows, len(rows), rows.stride(0) * rows.element_size(), rows.data_ptr())


class KeptRows:
    """A row (such as features) for each token in a KV cache."""

    def __init__(self) -> None:
        # replaced as a whole: a call may be interrupted between two statements
        self._buffer = RowBuffer.of(torch.empty(0, 0))

    @property
    def kept(self) -> torch.Tensor:
        """The rows [capacity, width] by cache index."""
        return self._buffer.rows

    def write(self, first: int, rows: torch.Tensor, capacity: int) -> None:
        """Keeps the rows [n, width] of the tokens with cache indices `first`, `first` + 1, ...

        If the buffer is too small, a new one has room for at least `capacity` tokens.
        """
        end = first + rows.shape[0]
        self.make_room(first, end, rows, capacity)
        if rows.is_cpu and rows.dtype == self.kept.dtype and rows.is_contiguous():
            # what torch does before it copies takes longer than a few rows
            memmove(self.address(first), rows.data_ptr(), rows.nbytes)
        else:
            self.kept[first:end] = rows

    def make_room(self, first: int, end: int, like: torch.Tensor, capacity: int) -> None:
        """Makes room for the rows `first` to `end` - 1. A new buffer has room for `capacity` rows,
        of the width, the dtype and the device of `like`, and keeps the first ones."""
        buffer = self._buffer
        if end <= buffer.capacity:
            return
        larger = like.new_zeros(max(end, capacity, 2 * buffer.capacity), like.shape[1])
        old = buffer.rows[:first]
        if len(old):
            larger[: len(old)] = old
        self._buffer = RowBuffer.of(larger)

    def address(self, index: int) -> int:
        """Returns where the row of the token with this cache index is."""
        return self._buffer.address + index * self._buffer.row_bytes

    def gather(self, indices: Sequence[int], start: int) -> None:
        """Moves the rows at cache `indices` to `start`, `start + 1`, ..., as
        `forward_pass.Cache.gather` moves entries."""
        source = upload(torch.tensor(indices), self.kept.device)
        self.kept[start : start + len(indices)] = self.kept.index_select(0, source)


class HeldRows:
    """The rows of the last tokens in a KV cache, pass by pass, before they are reduced."""

    def __init__(self) -> None:
        # of each pass the cache index of its first token, ascending, and the rows
        self._passes: list[tuple[int, torch.Tensor]] = []

    def add(self, first: int, rows: torch.Tensor) -> None:
        """Holds the rows of a pass over the tokens with cache indices `first`, `first` + 1, ..., in
        place of those that are held of them and of later ones."""
        while self._passes and self._passes[-1][0] >= first:
            self._passes.pop()
        self._passes.append((first, rows))

    @property
    def is_long(self) -> bool:
        """Whether so many rows are held that they should be reduced."""
        last, rows = self._passes[-1]
        return last + len(rows) - self._passes[0][0] > _MOST_HELD

    def joined(self) -> tuple[int, torch.Tensor] | None:
        """Returns the cache index of the first token, and the rows of all; None if there are
        none."""
        if not self._passes:
            return None
        parts = [rows[: later - first] for (first, rows), (later, _) in pairwise(self._passes)]
        parts.append(self._passes[-1][1])
        return self._passes[0][0], parts[0] if len(parts) == 1 else torch.cat(parts)

    def clear(self) -> None:
        self._passes = []


class FeatureRunner(ModelRunner):
    """Runs a model by the function `run`, and keeps features of each token for a head or an exit
    that reads them.

    The features are the output's `features`, or `hidden_states` if there are none. `reduce`
    computes what is kept from the features [n, ...] of n tokens (None: they are kept as they are).
    On a CPU it does so when they are read, so that it costs nothing while nothing is drafted.
    """

    def __init__(
        self,
        model: Model,
        run: ForwardFunction,
        kv_cache: Any,
        penalties: PenaltyProcessor | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(model, penalties, self._run_and_keep, kv_cache)
        self._run = run
        self._reduce = reduce
        self._rows = KeptRows()
        self._held = HeldRows()
        self._cached.gathers.append(self._gather)

    def _run_and_keep(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        output = self._run(forward_pass, logits_to_keep)
        kept = output.hidden_states if output.features is None else output.features
        assert kept is not None
        if self._reduce is None:
            self._rows.write(forward_pass.first, kept, self.cache.capacity)
        else:
            self._held.add(forward_pass.first, kept)
            # a GPU's next pass may overwrite them
            if not kept.is_cpu or self._held.is_long:
                self._reduce_held()
        if output.features is None:
            return output
        # they belong to all tokens of the pass, not to the rows of the logits
        return output._replace(features=None)

    def _reduce_held(self) -> None:
        held = self._held.joined()
        if held is not None and self._reduce is not None:
            first, rows = held
            self._rows.write(first, self._reduce(rows), self.cache.capacity)
            self._held.clear()  # not before they are written: a call may be interrupted

    def _gather(self, indices: Sequence[int], start: int) -> None:
        self._reduce_held()
        self._rows.gather(indices, start)

    def features(self, later: ForwardPass) -> torch.Tensor:
        """Returns the features [n, width] of the n tokens of the pass `later`, which reads them.
        They are valid until the next call.

        First runs the tokens of context and draft that the KV cache lacks.
        """
        cached = self._cached
        cached.switch_to(later.context)
        # otherwise all tokens of the pass are cached, and a cached draft can stay
        if later.last > cached.committed:
            self._forget_other_drafts(later)
            for earlier in cached.missing_passes(later.context, later.draft, later.last):
                self._forward(earlier, 1)
        self._reduce_held()
        return self._rows.kept[later.first : later.last]

    def resume(self, later: ForwardPass) -> tuple[int, int] | None:
        """Prepares for a function that runs this runner's layers on those tokens of the pass
        `later` that the KV cache lacks, and writes their keys and values to it; `ran` follows.

        Returns the address of the features of the n tokens [n, width], and how many of these are
        there already, the first ones. None if a token before the pass is not cached.
        """
        rows = self._rows
        cache = self.cache
        cached = self._cached
        assert isinstance(cache, KVBuffer)
        if not rows.kept.numel():
            return None
        self._forget_other_drafts(later)
        begin = min(cached.length, later.last)
        if begin < later.first:
            return None
        cache.length = begin
        cache.make_room(later.last)
        rows.make_room(begin, later.last, rows.kept, cache.capacity)
        return rows.address(later.first), begin - later.first

    def _forget_other_drafts(self, later: ForwardPass) -> None:
        """Counts only tokens of the context and the draft of the pass `later` as cached."""
        self._cached.truncate_for(later.context, later.draft, len(later.draft.tokens) + 1)

    def ran(self, later: ForwardPass) -> None:
        """Says that the tokens of `later` have run, after `resume`."""
        self._cached.ran(later)
        self.forward_count += 1


class DecoderRunner(ModelRunner):
    """Runs a head of decoder layers by the function `run`, with a KV cache of its own. The target
    may be run by either backend.

    `target_model` supplies the embedding if the head has none. `inputs` makes the inputs of the
    head's passes, `make_linear` makes its linear layers; `gain` is that of `norms.norm_function`.
    """

    def __init__(
        self,
        weights: DecoderWeights | MtpWeights,
        model: Model,
        run: ForwardFunction,
        penalties: PenaltyProcessor | None = None,
    ) -> None:
        self.architecture = weights.architecture
        self.target_model = model
        self.devices = [model.device] * len(self.architecture.layers)
        self.inputs = InputMaker(self.architecture, model.dtype, self.devices)
        self.make_linear = part_linears(model)
        self.gain = norm_gain(self.architecture, model.dtype, model.device)
        sizes = [(self.architecture.num_kv_heads, self.architecture.head_size)] * len(self.devices)
        cache = KVBuffer(self.devices, sizes, model.dtype)
        super().__init__(model, penalties, run, cache)
        self._cached = CachedPrefix(cache, self.architecture.rope_boundary)
        table = weights.tensors.get(EMBEDDING)
        self._embedding: torch.Tensor | None = None
        if table is not None:
            self._embedding = part_weight(table.to(model.device), model.dtype, self.make_linear)
        if table is not None:
            self.num_embeddings = min(self.num_embeddings, len(table))

    def embed(self, forward_pass: ForwardPass) -> torch.Tensor:
        """Returns the embeddings [n, width] of the n tokens of a pass, from the head's own table or
        the target's."""
        ids = upload(torch.tensor(forward_pass.ids), self.device)
        if self._embedding is None:
            return self.target_model.embeddings(ids)
        return self._embedding.index_select(0, ids).to(self.target_model.dtype)


def part_linears(model: Model) -> LinearFactory:
    """Returns what makes the linear layers of a trained part of this target.

    Where the target's weights are rounded, the part's are too, for our own kernels; with torch they
    would be slower.
    """
    made = LinearFactory(model.device, model.dtype)
    if made.kernels is None or model.rounding is None:
        return made
    return LinearFactory(model.device, model.dtype, quantise=model.rounding)


def part_weight(weight: torch.Tensor, dtype: torch.dtype, make_linear: MakeLinear) -> torch.Tensor:
    """Returns a weight of a part as it is kept: as it is stored if our own kernels run the part,
    otherwise in `dtype`."""
    return weight if make_linear.kernels is not None else weight.to(dtype)


def native_layers(
    architecture: Architecture,
    kinds: Sequence[int],
    take: Take,
    dtype: torch.dtype,
    make_linear: MakeLinear,
    gain: float,
    first: int = 0,
    make_layer: type[NativeLayer] = NativeLayer,
) -> list[NativeLayer]:
    """Returns one layer for each of `kinds` (indices in `PassInputs.kinds`).

    `take` returns their weights, under the names of the layers `first`, `first` + 1, ... `gain` is
    that of `norms.norm_function`. For our own kernels, matrices stay as they are stored.
    """
    made: list[NativeLayer] = []
    for index, kind in enumerate(kinds, first):
        own = None if make_linear.kernels is not None else dtype
        weights = read_layer(architecture, index, take, own, gain)
        made.append(make_layer(architecture, index, kind, weights, make_linear, gain=gain))
    return made


def of_all_tokens(logits: torch.Tensor, vocabulary: torch.Tensor | None, size: int) -> torch.Tensor:
    """Returns logits [n, `size`] of all the target's tokens, from `logits` [n, m] of the tokens in
    `vocabulary` [m].

    Tokens that are not in `vocabulary` get -inf. `vocabulary` None: `logits` are of all tokens
    already.
    """
    if vocabulary is None:
        return logits
    return logits.new_full((logits.shape[0], size), -torch.inf).index_copy_(1, vocabulary, logits)
