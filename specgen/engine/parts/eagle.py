"""Runs an EAGLE head as a draft model: EAGLE-1 and -2 (arXiv:2401.15077, 2406.16858) and EAGLE-3 (arXiv:2503.01840)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.base.types import Context
from specgen.engine.cached_prefix import CachedPrefix
from specgen.engine.devices import upload
from specgen.engine.forward_pass import NO_NODES, ForwardPass, ModelOutput, TreeNodes, draft_nodes
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import norm_gain
from specgen.engine.native.layer_weights import EMBEDDING
from specgen.engine.native.products import ProductFactory
from specgen.engine.parts.eagle_layers import EagleLayers, head_weight
from specgen.engine.parts.feature_runner import FeatureRunner, KeptRows, PartRunners
from specgen.engine.parts.weights import EagleWeights


class EagleHead:
    """A head as it drafts for the target `model`, whatever its backend: layers with a KV cache, and its LM head or the target's.

    `num_embeddings` is the number of tokens that it has embeddings for.
    """

    def __init__(self, weights: EagleWeights, model: Model) -> None:
        tensors, architecture, device = weights.tensors, weights.architecture, model.device
        self.dtype = dtype = model.dtype
        self._model, self._architecture = model, architecture
        self.width, self.rope_boundary = architecture.hidden_size, architecture.rope_boundary

        def take(name: str) -> Tensor:
            return tensors[name].to(device)

        with torch.inference_mode(False), torch.no_grad():
            factory = ProductFactory(device, dtype)
            gain = norm_gain(architecture, dtype, device)
            self._layers = EagleLayers(
                weights.version,
                architecture,
                take,
                dtype,
                factory,
                device,
                has_bias="fc.bias" in tensors,
                norm_before_residual=weights.norm_before_residual,
                norm_gain=gain,
            )
            self._lm_head = factory(head_weight(take, gain).to(dtype)) if weights.version == 3 else None
            self._embedding = take(EMBEDDING) if EMBEDDING in tensors else None
        self.num_embeddings = model.shape.vocab_size if self._embedding is None else self._embedding.shape[0]
        self._vocabulary = None if weights.vocabulary is None else weights.vocabulary.to(device)
        self._devices = [device] * len(architecture.layers)
        self._inputs = InputMaker(architecture, dtype, self._devices)

    def new_cache(self) -> KVBuffer:
        """Returns an empty KV cache, with one entry for each pair."""
        return KVBuffer(self._devices, self._architecture.num_kv_heads, self._architecture.head_size, self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Returns what version 3 keeps of the target's features [n, 3 * width]: their product with `fc`, [n, width]."""
        return self._layers.fc(features)

    def __call__(self, forward_pass: ForwardPass, features: Tensor) -> Tensor:
        """Returns the predicted features [n, width] for the tokens of a pass and the features [n, width] paired with them."""
        count, inputs = features.shape[0], self._inputs(forward_pass)
        ids = upload(torch.tensor(forward_pass.ids), self._model.device)
        table = self._embedding
        embeddings = self._model.embeddings(ids) if table is None else table.index_select(0, ids).to(self.dtype)
        if inputs.rows != count:
            embeddings, features = (pad(x, (0, 0, 0, inputs.rows - count)) for x in (embeddings, features))
        return self._layers(embeddings, features, inputs)[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, vocabulary of the target] for predicted features [n, width].

        Those of tokens outside the head's vocabulary are -inf.
        """
        if self._lm_head is None:
            return self._model.head_logits(hidden)
        logits = self._lm_head(self._layers.normed(hidden))
        if self._vocabulary is None:
            return logits
        wide = logits.new_full((logits.shape[0], self._model.shape.vocab_size), -torch.inf)
        return wide.index_copy_(1, self._vocabulary, logits)


class EagleRunner(ModelRunner):
    """Drafts with an EAGLE head. Implements `DraftRunner`; `target` keeps the features that the head reads.

    The head runs on pairs: feature i of the target and token i + 1, at position i. So n committed tokens are n - 1 pairs, and the
    logits after the context come from the last of them. A drafted token is paired with the predicted feature of its parent, so
    each level of a draft takes a pass. The cache has the keys, values and predicted features of the context's pairs, made from
    the target's features, then those of the draft. The latter are dropped when the context grows, also where tokens were
    accepted: the pass over their pairs with the target's features also computes the next draft's first logits.

    As with `ModelRunner`, each call may have another context, and the runner stays usable after an interrupted call. A context of
    one token has no pair; in its place, the token is paired with zeros.
    """

    def __init__(self, head: EagleHead, model: Model, target: FeatureRunner, penalties: PenaltyProcessor | None) -> None:
        self._rows = KeptRows()
        super().__init__(model, None, self._run, head.new_cache())
        self._cached = CachedPrefix(self.cache, head.rope_boundary)
        self._cached.gathers.append(self._rows.gather)
        self._head, self._target, self._token_penalties = head, target, penalties
        self.num_embeddings = min(model.shape.vocab_size, head.num_embeddings)
        self._context: Context | None = None  # the last call's
        self._first: int | None = None  # its first token, None if it has no other
        self._pairs = Context(())  # the tokens of its pairs: all but the first

    @inference
    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """Returns logits after the context and after draft tokens; see `ModelRunner.logits`.

        The output's `hidden_states` are the predicted features. Logits of tokens outside the head's vocabulary are -inf.
        """
        pairs = self._follow(context)
        if self._cached.committed != len(pairs):
            self._cached.truncate(self._cached.committed)  # drops the draft, also the part that was accepted
        output = super().logits(pairs, draft, parents, start=start)
        if self._token_penalties is None:
            return output
        nodes = draft_nodes(list(draft), parents)
        processed = self._token_penalties(output.logits, context, nodes.tokens, nodes.parents, start)
        return output._replace(logits=processed, unpenalised=output.logits)

    def _follow(self, context: Context) -> Context:
        """Returns the tokens of the context's pairs, as an object that stays the same as long as the context does."""
        ids = context.ids
        first = ids[0] if len(ids) > 1 else None
        if context is not self._context or first != self._first:
            self._context = None  # until the rest agrees: an interruption may come between any two lines
            if first != self._first:
                self._cached.clear()
            self._first, self._pairs = first, Context(ids[1:] or ids)
            self._pairs.prompt_length = context.prompt_length
            self._context = context
        elif len(ids) > len(self._pairs) + 1:
            self._pairs.extend(ids[len(self._pairs) + 1 :])
        return self._pairs

    def _run(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        """Runs the pairs of a pass: those of the context in one pass of the head, then each level of the draft in another."""
        first, last, length = forward_pass.first, forward_pass.last, len(forward_pass.context)
        outputs, tokens, parents = list[ModelOutput](), *forward_pass.draft
        if first < length:
            end = min(last, length)
            outputs.append(self._run_pairs(forward_pass._replace(draft=NO_NODES, last=end), self._features(first, end), 1))
        node = max(first - length, 0)
        while length + node < last:
            end = node + 1
            while end < len(tokens) and parents[end] < node:
                end += 1
            level = forward_pass._replace(draft=TreeNodes(tokens[:end], parents[:end]), first=length + node, last=length + end)
            outputs.append(self._run_pairs(level, self._of_parents(length, parents[node:end]), end - node))
            node = end
        logits, hidden = (rows[0] if len(rows) == 1 else torch.cat(rows) for rows in list(zip(*outputs, strict=True))[:2])
        return ModelOutput(logits[-logits_to_keep:], hidden[-logits_to_keep:])

    def _run_pairs(self, forward_pass: ForwardPass, features: Tensor, logits_to_keep: int) -> ModelOutput:
        self.cache.length = forward_pass.first
        output = self._head(forward_pass, features)
        self._rows.write(forward_pass.first, output, self.cache.capacity)
        kept = output[-logits_to_keep:]
        return ModelOutput(self._head.logits(kept), kept)

    def _features(self, first: int, last: int) -> Tensor:
        """Returns the target's features [n, width] of the context's pairs `first` to `last` - 1."""
        assert self._context is not None
        if self._first is None:
            return torch.zeros(1, self._head.width, dtype=self._head.dtype, device=self.device)
        return self._target.features(self._context)[first:last]

    def _of_parents(self, length: int, parents: Sequence[int]) -> Tensor:
        """Returns the predicted features [n, width] of the draft tokens with these n indices (-1: of the context)."""
        lowest = min(parents)
        rows = self._rows.kept[length + lowest : length + max(parents) + 1]
        if len(parents) == 1:
            return rows
        return rows.index_select(0, upload(torch.tensor(parents) - lowest, self.device))


def make_runners(
    weights: EagleWeights, model: Model, _: ModelRunner, penalties: Callable[[], PenaltyProcessor | None]
) -> PartRunners:
    """Returns a target that keeps the head's features, and the head. `penalties` makes the processor for each of the two.

    Raises SpecgenError if the model's layers cannot be run one by one.
    """
    layers = (model.shape.num_layers,) if weights.version == 1 else weights.feature_layers
    head = EagleHead(weights, model)
    fuse = head.fuse if weights.version == 3 else None
    target = FeatureRunner(model, model.forward(taps=layers), model.new_cache(), penalties(), fuse)
    return PartRunners(target, EagleRunner(head, model, target, penalties()))
