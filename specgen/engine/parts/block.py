"""Block heads: DFlash (Chen et al. 2026, arXiv 2602.06036), DFlash2 and DSpark (arXiv 2607.05147),
which draft a block in one pass.

The head's layers attend to the context by keys and values that are computed from the target's
hidden states (features) alone, and depend on nothing else: they are computed once for each token,
and kept. The block is the context's last token, of which the target has no features yet, and mask
tokens behind it. Its own keys and values are dropped after each pass. DFlash2's convolutions run
over the rows of the block alone, so that they keep nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.block_runner import BlockRunner
from specgen.engine.devices import upload
from specgen.engine.forward_pass import NO_NODES, ForwardPass, ModelOutput
from specgen.engine.kernels.branches import PassProgram, Program, SegmentInputs, Table
from specgen.engine.kernels.packing import FLOAT_KINDS
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner, Runners
from specgen.engine.native.attend import attend_batch
from specgen.engine.native.attention import Attention, AttentionWeights
from specgen.engine.native.convolved import ConvolvedBranch, DynamicConvolution
from specgen.engine.native.inputs import PassInputs, layer_kinds
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import Branch, NativeLayer
from specgen.engine.native.layer_files import (
    FINAL_NORM,
    HEAD,
    layer_files,
    read_layer,
)
from specgen.engine.native.layer_stack import SHORT_PASS, LayerStack
from specgen.engine.native.linear import Linear, MakeLinear, kernel_runs
from specgen.engine.native.native_model import NativeModel, final_logits
from specgen.engine.native.norms import Norm, output_norm, rms_norm
from specgen.engine.native.rotary import rotate
from specgen.engine.parts.candidate_selector import CandidateSelector
from specgen.engine.parts.eagle import FC
from specgen.engine.parts.part import (
    BlockWeights,
    DecoderRunner,
    FeatureRunner,
    native_layers,
    of_all_tokens,
    part_weight,
)
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.weights import Take

CONTEXT_NORM = "hidden_norm.weight"
SUCCESSORS = "markov_head.markov_w1.weight"  # a row for each token: what it says about the next one
SUCCESSOR_HEAD = "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
CONFIDENCE_BIAS = "confidence_head.proj.bias"
# of a layer's convolutions around its attention and its MLP
CONVOLUTIONS = ("attention_conv", "mlp_conv")


class ContextAttention(Attention):
    """The attention of a head's layer in training: several blocks of a text, as one batch of rows
    without a KV cache.

    `context` are keys and values [batch, kv heads, n, head size] of the text, which stand before
    those of the blocks.
    """

    context: tuple[Tensor, Tensor]

    def _batch_attention(
        self,
        heads: Tensor,
        inputs: PassInputs,
    ) -> Tensor:
        mask = inputs.kinds[self._kind].mask
        assert inputs.batch is not None
        assert mask is not None
        heads = heads.view(inputs.batch, inputs.rows, *heads.shape[1:])
        query, *own = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], dim=2)
        keys, values = (
            torch.cat((before, own_heads.transpose(1, 2)), 2)
            for before, own_heads in zip(self.context, own, strict=True)
        )
        return attend_batch(query, keys, values, mask).flatten(0, 1)


class ContextLayer(NativeLayer):
    """A layer of a head in training; see `ContextAttention`."""

    attention = ContextAttention


class BlockLayers:
    """The layers of a head with their weights on `device`, for drafting and for training.

    `make_linear` makes a linear layer as for `NativeLayer`, `norm_gain` is `gain` of
    `norms.norm_function`, and `make_layer` is the class of the layers.
    """

    def __init__(
        self,
        weights: BlockWeights,
        device: torch.device,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        norm_gain: float,
        make_layer: type[NativeLayer] = NativeLayer,
    ) -> None:
        architecture = weights.architecture
        self._architecture = architecture

        def take(name: str) -> Tensor:
            return weights.tensors[name].to(device)

        def norm(name: str) -> tuple[Tensor, Norm]:
            weight = (take(name).float() * norm_gain).to(dtype)
            return weight, output_norm(architecture.norm_eps, norm_gain, weight)

        self.norm_weight, self.norm = norm(FINAL_NORM)
        _, self._context_norm = norm(CONTEXT_NORM)
        self._fc = make_linear(part_weight(take(FC), dtype, make_linear), None, 1.0)
        _, kinds = layer_kinds(architecture, [device] * len(architecture.layers))
        self.layers = native_layers(
            architecture, kinds, take, dtype, make_linear, norm_gain, make_layer=make_layer
        )
        if weights.conv_group:
            self._convolve(weights, take, dtype, make_linear, norm_gain)
        self._stack = LayerStack(self.layers)
        # of the rows of keys, then of values
        first = architecture.num_heads * architecture.head_size
        as_kept = None if make_linear.kernels is not None else dtype
        mixers = [
            read_layer(architecture, index, take, as_kept, is_normed=False).mixer
            for index in range(len(kinds))
        ]
        plain = [mixer for mixer in mixers if isinstance(mixer, AttentionWeights)]
        weight = torch.cat([mixer.qkv[first:] for mixer in plain])
        biases = [mixer.qkv_bias[first:] for mixer in plain if mixer.qkv_bias is not None]
        self._project = make_linear(weight, torch.cat(biases) if biases else None, 1.0)
        norms = [
            mixer.qk_norm[architecture.num_heads :] for mixer in plain if mixer.qk_norm is not None
        ]
        self._key_norm = torch.stack(norms).to(dtype) if norms else None
        self._kernels = make_linear.kernels

    @property
    def program(self) -> Program | None:
        """The layers of a short pass, if the kernels run all of them in one call."""
        pieces = self._stack.short_pieces
        return pieces[0].program if len(pieces) == 1 else None

    def _convolve(
        self,
        weights: BlockWeights,
        take: Take,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        norm_gain: float,
    ) -> None:
        """Puts the head's convolutions around the branches of its layers."""
        architecture = weights.architecture
        are_folded = make_linear.kernels is None  # the weights of norms, into what reads them

        def convolved(index: int, name: str, branch: Branch, norm: str) -> ConvolvedBranch:
            prefix = f"layers.{index}.{name}."
            projection = take(f"{prefix}kernel_projection.weight")
            if are_folded:
                gain = take(norm).float() * norm_gain
                projection = (projection.float() * gain).to(dtype)
            base = take(f"{prefix}base_kernel").to(dtype)
            convolution = DynamicConvolution(base, projection, weights.conv_group, make_linear)
            return ConvolvedBranch(branch, convolution, architecture.residual_scale)

        for index, layer in enumerate(self.layers):
            files = layer_files(architecture, index)
            assert files.attention_norm is not None
            assert files.mlp_norm is not None
            attention, mlp = CONVOLUTIONS
            layer.mixer = convolved(index, attention, layer.mixer, files.attention_norm.name)
            layer.mlp = convolved(index, mlp, layer.mlp, files.mlp_norm.name)

    def reduced(self, features: Tensor) -> Tensor:
        """Returns what keys and values are computed from, [n, width], for a target's features [n,
        taps * target width]."""
        return self._context_norm(self._fc(features))

    def keys_values(
        self,
        reduced: Tensor,
        rotation: Tensor,
    ) -> Tensor:
        """Returns the keys and values of context tokens in all layers, [n, layers, 2, kv heads,
        head size].

        `reduced` [n, width] are the tokens' reduced features, `rotation` [n, 1, R/2] the rotations
        of their positions.
        """
        made = self._architecture
        projected = self._project(reduced).view(
            len(reduced), len(self.layers), 2, made.num_kv_heads, made.head_size
        )
        keys, values = projected.unbind(2)
        if self._key_norm is not None:
            keys = rms_norm(made.norm_eps, None, keys) * self._key_norm
        keys = keys.clone()
        rotate(keys.view(len(keys), -1, made.head_size), rotation)
        return torch.stack((keys, values), dim=2)

    def write(self, reduced: Tensor, rotation: Tensor, cache: KVBuffer, first: int) -> None:
        """Writes the keys and values of context tokens to `cache`, from the index `first` on. The
        other arguments are those of `keys_values`."""
        last = first + len(reduced)
        written = [entries.written for entries in cache.entries(first, last, 0, last)]
        kernels = self._kernels
        if kernels is None:
            keys_values = self.keys_values(reduced, rotation).unbind(1)
            for slots, layer in zip(written, keys_values, strict=True):
                slots.copy_(layer.permute(1, 2, 0, 3))
            return
        made = self._architecture
        heads = self._project(reduced).view(len(reduced), len(self.layers), -1, made.head_size)
        for index, own in enumerate(heads.unbind(1)):
            if self._key_norm is not None:
                kernels.norm_heads_(own, self._key_norm[index], made.norm_eps)
            kernels.rotate_and_write(own, 0, made.num_kv_heads, rotation, written[index])

    def __call__(
        self,
        hidden: Tensor,
        inputs: PassInputs,
    ) -> Tensor:
        """Runs the layers on the embeddings [n, width] of a block, and returns the input of the LM
        head."""
        return self.norm(self._stack(hidden, inputs))


class BlockPass(DecoderRunner):
    """Runs the passes of a head. The context of its calls lacks the last token, which is the first
    one of the block.

    The block is a call's draft: so its keys and values are dropped where the next call begins.
    """

    def __init__(
        self, weights: BlockWeights, model: Model, target_penalties: PenaltyProcessor | None
    ) -> None:
        super().__init__(weights, model, self._run)
        self.layers = BlockLayers(weights, self.device, model.dtype, self.make_linear, self.gain)
        self._mask = weights.mask_id
        # of `embed`: a target's embeddings have its factor
        scale = getattr(model.shape, "embedding_scale", 1.0) if self._embedding is None else 1.0
        self._scale = weights.embedding_scale / scale
        self._lm_head: Linear | None = None
        if HEAD in weights.tensors:
            own = part_weight(weights.tensors[HEAD].to(model.device), model.dtype, self.make_linear)
            self._lm_head = self.make_linear(own)
        self._program = self._short_pass(weights.embedding_scale)
        forward = model.forward(taps=weights.feature_layers)
        self.target = FeatureRunner(
            model, forward, model.new_cache(), target_penalties, self.layers.reduced
        )
        self._whole = Context(())  # the last call's context, with its last token
        self._known = Context(())  # without it
        # of a part of a long prompt
        self._no_rows = torch.empty(0, 0, dtype=model.dtype, device=self.device)

    def _short_pass(self, scale: float) -> PassProgram | None:
        """Returns the program of the passes over blocks; None if the kernels cannot run all of
        them. `scale` is the factor of the table's embeddings."""
        kernels = self.make_linear.kernels
        layers = self.layers.program
        model = self.target_model
        head = self._lm_head
        table = self._embedding
        if isinstance(model, NativeModel):
            head = head or model.outer.head
            table = model.outer.embedding if table is None else table
        if kernels is None or layers is None or head is None or table is None:
            return None
        runs = kernel_runs(head)
        if runs is None or table.dtype not in FLOAT_KINDS or not table.is_contiguous():
            return None
        return PassProgram(
            [(layers, None)],
            self.architecture.hidden_size,
            SHORT_PASS,
            table=Table(table, scale),
            norm=self.layers.norm_weight,
            eps=self.architecture.norm_eps,
            head=runs[0],
        )

    def rows(self, context: Context, rows: int) -> ModelOutput:
        """Returns the output of the LM head, without factor and cap, for the `rows` rows of a block
        after the context, and its inputs [`rows`, width] as `hidden_states`."""
        known = self._known
        last = len(context) - 1
        if context is self._whole and len(known) <= last:
            known.extend(context.ids[len(known) : last])
        else:
            known = self._known = Context(context.ids[:last])
            known.prompt_length = min(context.prompt_length, last)
        self._whole = context
        # drops the last block, also the tokens of it that were accepted
        self._cached.truncate(self._cached.committed)
        return self.logits(known, [context.ids[-1], *[self._mask] * (rows - 1)], start=1)

    def _run(
        self,
        forward_pass: ForwardPass,
        logits_to_keep: int,
    ) -> ModelOutput:
        first = forward_pass.first
        known = len(forward_pass.context)
        end = min(forward_pass.last, known)
        if first < end:
            context = forward_pass._replace(context=self._whole, draft=NO_NODES, last=end)
            self._write(self.target.features(context), first, long_rope=forward_pass.long_rope)
        if forward_pass.last == end:  # a part of a long prompt
            return ModelOutput(self._no_rows)
        self.cache.length = known
        return self._run_block(forward_pass._replace(first=known))

    def _run_block(self, block: ForwardPass) -> ModelOutput:
        inputs = self.inputs(block)
        place = inputs.place
        kernels = self.make_linear.kernels
        if self._program is None or kernels is None or place is None or inputs.rows > SHORT_PASS:
            states = self.layers(self.embed(block) * self._scale, inputs)
            return ModelOutput(self._head(states), states)
        kernels.use_threads(torch.get_num_threads())
        read = SegmentInputs(place.kinds, place.cache.places(), place.cache.first_layer)
        states, logits = kernels.run_pass(self._program, block.ids, [read], place.slot, inputs.rows)
        assert logits is not None
        return ModelOutput(logits, states)

    def _head(self, states: Tensor) -> Tensor:
        if self._lm_head is None:
            return self.target_model.head_logits(states, is_raw=True)
        return self._lm_head(states)

    def _write(
        self,
        reduced: Tensor,
        first: int,
        *,
        long_rope: bool,
    ) -> None:
        """Writes the keys and values of context tokens with these reduced features [n, width] to
        the cache, from `first` on."""
        cache = self.cache
        table = self.inputs.tables[0]
        assert isinstance(cache, KVBuffer)
        assert table is not None
        rotation = table.rows(first, first + len(reduced), long_rope)[:, None]
        self.layers.write(reduced, rotation, cache, first)


class BlockHeadRunner(BlockRunner):
    """Drafts with the head of `BlockPass`; a Markov head adds what the token before says about the
    next one (DSpark), or a selector chooses by it among the likeliest tokens (DFlash2).

    Row k is U_k + W2 W1[x]: U_k are the LM head's logits for row k of the block, x is the token
    before, the context's last one or a drafted one. The output's `hidden_states` are [h_k; W1[x]],
    where h_k is the LM head's input; from them `Confidence` predicts acceptance. Without a Markov
    head, they are U_k and h_k alone. With a selector, row k has its scores (see
    `CandidateSelector`), and -inf for tokens that are no candidates, so that drafts are drawn from,
    and judged by, a distribution over the candidates alone.

    The block is as long as in training, or as `plan` says. Where rows see later ones, those of a
    shorter block are others.
    """

    sizes_blocks = True

    def __init__(
        self,
        weights: BlockWeights,
        model: Model,
        target_penalties: PenaltyProcessor | None,
        penalties: PenaltyProcessor | None,
    ) -> None:
        self._pass = BlockPass(weights, model, target_penalties)
        self._first = 0 if weights.from_anchor else 1
        self._rows = weights.block_size
        self._planned: int | None = None  # levels of the next draft
        super().__init__(self._pass, weights.drafts, penalties)
        self.target = self._pass.target
        self._architecture = weights.architecture
        self._successors: Tensor | None = None
        self._successor_head: Linear | None = None
        self._selector: CandidateSelector | None = None

        def take(name: str) -> Tensor:
            return part_weight(
                weights.tensors[name].to(model.device), model.dtype, self._pass.make_linear
            )

        if SUCCESSORS in weights.tensors:
            self._successors = take(SUCCESSORS)
            self._successor_head = self._pass.make_linear(take(SUCCESSOR_HEAD))
        if weights.candidates:
            self._selector = CandidateSelector(
                weights.candidates,
                take,
                self._pass.make_linear,
                partial(final_logits, weights.architecture),
            )
        if self._successors is not None or self._selector is not None:
            self.independent = False
            self.draws = True
        self._vocabulary = (
            None if weights.vocabulary is None else weights.vocabulary.to(model.device)
        )

    def plan(self, levels: int | None) -> None:
        self._planned = levels

    def rows(
        self,
        context: Context,
        count: int,
    ) -> ModelOutput:
        rows = self._rows
        if self._planned is not None:
            rows = min(self._first + max(count, self._planned), rows)
            self._planned = None
        logits, states, *_ = self._pass.rows(context, rows)
        assert states is not None
        if self._first:
            logits = logits[self._first :]
            states = states[self._first :]
        if self._selector is None:
            logits = final_logits(self._architecture, logits)
        return ModelOutput(logits, states)

    def after(self, tokens: Sequence[int], rows: ModelOutput) -> ModelOutput:
        logits, states, *_ = rows
        assert states is not None
        if self.independent:
            return ModelOutput(of_all_tokens(logits, self._vocabulary, self.vocab_size), states)
        before = upload(torch.tensor(tokens), self.device)
        if self._selector is not None:
            return ModelOutput(self._selector(before, logits, states), states)
        assert self._successors is not None
        assert self._successor_head is not None
        rank = self._successors.index_select(0, before).to(logits.dtype)
        logits = self._successor_head.add_to(logits.clone(), rank)
        states = torch.cat((states, rank), dim=-1)
        return ModelOutput(of_all_tokens(logits, self._vocabulary, self.vocab_size), states)

    def shortened(self, block_size: int) -> Self:
        """Returns a runner of the same head, with the same caches, whose blocks have `block_size`
        rows. Where rows see later ones, their logits are then others.

        Raises SpecgenError if the head's blocks have fewer rows, or if none would draft.
        """
        least = self._first + 1
        if not least <= block_size <= self._rows:
            raise SpecgenError(
                f"block_size={block_size}: the head's blocks have {self._rows} rows",
                f"Give {least} to {self._rows}",
            )
        made = copy(self)
        made._rows = block_size
        made.longest_draft = block_size - self._first
        made._computed = None
        made._deepest = made.longest_draft
        return made

    def reserve(self, capacity: int) -> None:
        self._pass.reserve(capacity + self.longest_draft)

    def clear_cache(self) -> None:
        super().clear_cache()
        self._pass.clear_cache()


class Confidence:
    """DSpark's prediction that a drafted token is accepted: sigmoid(w [h_k; W1[x]] + b), for the
    row k that it is chosen from.

    x is the token before, so the prediction does not depend on the drafted token itself.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight = weight[0].float()
        self._bias = bias[0].float()

    def begin(self, context: Context) -> None:
        """Does nothing: the prediction depends on the head's row alone."""

    def score(
        self,
        draft_hidden: Tensor,
        position: int,
    ) -> Tensor:
        """Returns the probability, a scalar tensor; `draft_hidden` [width (+ rank)] is the row of
        the token."""
        read = draft_hidden[: len(self._weight)].float()
        return torch.sigmoid(read @ self._weight + self._bias)


@torch.no_grad()
def make_runners(
    weights: BlockWeights,
    model: Model,
    _: ModelRunner,
    penalties: Callable[[], PenaltyProcessor | None],
) -> Runners:
    """Returns a runner of the target that keeps the features that the head reads, a runner of the
    head, and its predictor of acceptance if it has one.

    `penalties` is called once for each runner, and makes its penalty processor. Raises SpecgenError
    if the model's layers cannot be run one by one.
    """
    draft = BlockHeadRunner(weights, model, penalties(), penalties())
    tensors = weights.tensors
    confidence: Any = None
    if CONFIDENCE in tensors:
        confidence = Confidence(
            tensors[CONFIDENCE].to(model.device), tensors[CONFIDENCE_BIAS].to(model.device)
        )
    return Runners(draft.target, draft, None, confidence)
