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
from specgen.engine.parts.feature_runner import FeatureRunner, PartRunners
from specgen.engine.parts.weights import EagleWeights


class EagleHead:
    """A head as it drafts for the target `model`, whatever its backend: layers with a KV cache, and its LM head or the target's.

    `num_embeddings` is the number of tokens that it has embeddings for.
    """

    def __init__(self, weights: EagleWeights, model: Model) -> None:
        tensors, architecture, dtype, device = weights.tensors, weights.architecture, model.dtype, model.device
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
        self.num_embeddings = model.num_embeddings if self._embedding is None else self._embedding.shape[0]
        self._vocabulary = None if weights.vocabulary is None else weights.vocabulary.to(device)
        self._devices = [device] * len(architecture.layers)
        self._inputs = InputMaker(architecture, dtype, self._devices, min_rows=factory.min_rows)

    def new_cache(self) -> KVBuffer:
        """Returns an empty KV cache, with one entry for each pair."""
        return KVBuffer(self._devices, self._architecture.num_kv_heads, self._architecture.head_size, self._model.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Returns what version 3 keeps of the target's features [n, 3 * width]: their product with `fc`, [n, width]."""
        return self._layers.fc(features)

    def __call__(self, forward_pass: ForwardPass, features: Tensor, logits_to_keep: int) -> ModelOutput:
        """Runs the pairs of the tokens of a pass and the features [n, width] that belong to them.

        The output's `hidden_states` are the predicted features. Logits of tokens outside the head's vocabulary are -inf.
        """
        count, inputs = features.shape[0], self._inputs(forward_pass)
        ids = upload(torch.tensor(forward_pass.ids), self._model.device)
        table = self._embedding
        embeddings = self._model.embeddings(ids) if table is None else table.index_select(0, ids).to(self._model.dtype)
        if inputs.rows != count:
            embeddings, features = (pad(x, (0, 0, 0, inputs.rows - count)) for x in (embeddings, features))
        hidden = self._layers(embeddings, features, inputs)[count - logits_to_keep : count]
        return ModelOutput(self._logits(hidden), hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, vocabulary of the target] for predicted features [n, width]."""
        if self._lm_head is None:
            return self._model.head_logits(hidden)
        logits = self._lm_head(self._layers.normed(hidden))
        if self._vocabulary is None:
            return logits
        wide = logits.new_full((logits.shape[0], self._model.vocab_size), -torch.inf)
        return wide.index_copy_(1, self._vocabulary, logits)


class EagleRunner:
    """Drafts with an EAGLE head. Implements `DraftRunner`; `target` keeps the features that the head reads.

    The head runs on pairs: feature i of the target and token i + 1, at position i. So n committed tokens are n - 1 pairs, and the
    logits after the context come from the last of them. A drafted token is paired with the predicted feature of its parent, so
    each level of a draft takes a pass. The KV cache has the pairs of the context, made from the target's features, then those of
    the draft. The latter are dropped when the context grows, also where tokens were accepted: the pass over their pairs with
    the target's features also computes the next draft's first logits.

    As with `ModelRunner`, each call may have another context, and the runner stays usable after an interrupted call. A context of
    one token has no pair; in its place, the token is paired with zeros.
    """

    def __init__(self, head: EagleHead, model: Model, target: FeatureRunner, penalties: PenaltyProcessor | None) -> None:
        self._head = head
        self.context_limit, self.vocab_size, self.device = target.context_limit, model.vocab_size, model.device
        self.num_embeddings = min(model.num_embeddings, head.num_embeddings)
        self._target, self._penalties = target, penalties
        self.cache = head.new_cache()
        self._cached = CachedPrefix(self.cache, head.rope_boundary)
        self._context: Context | None = None  # the last call's
        self._first: int | None = None  # its first token, None if it has no other
        self._pairs = Context(())  # the tokens of its pairs: all but the first
        # The predicted features [draft tokens + 1, width] of the cached draft, after those of the context's last pair.
        self._rows = torch.empty(0, head.width, dtype=model.dtype, device=model.device)
        self._root = -1  # the number of pairs in the context whose last one `_rows[0]` belongs to
        self._logits: list[tuple[int, Tensor]] = []  # of the call's passes, each with the index of its first row

    def clear_cache(self) -> None:
        """Empties the KV cache, so that the next call runs its whole context. For measurements."""
        self._cached.clear()

    def reserve(self, capacity: int) -> None:
        """Makes the KV cache's next buffers large enough for `capacity` tokens, so that they need not grow during a run."""
        self.cache.capacity = max(self.cache.capacity, capacity)

    @inference
    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """Returns logits after the context and after draft tokens; see `ModelRunner.logits`.

        The output's `hidden_states` are the predicted features. Logits of tokens outside the head's vocabulary are -inf.
        """
        tokens = list(draft)
        nodes = draft_nodes(tokens, parents)
        pairs, cached = self._follow(context), self._cached
        if cached.committed != len(pairs):
            cached.truncate(cached.committed)  # drops the draft, also the part that was accepted
        cached.truncate_for(pairs, nodes, start if self._root == len(pairs) else 0)
        self._logits.clear()
        self._run_context(pairs)
        self._run_draft(pairs, nodes)
        hidden = self._rows[start : len(tokens) + 1]
        wanted = [rows[max(start - first, 0) :] for first, rows in self._logits if first + rows.shape[0] > start]
        logits = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        if self._penalties is None:
            return ModelOutput(logits, hidden)
        return ModelOutput(self._penalties(logits, context, tokens, nodes.parents, start), hidden, logits)

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

    def _features(self, forward_pass: ForwardPass) -> Tensor:
        """Returns the features [n, width] of a pass's n pairs: the target's, or those predicted for drafted tokens."""
        first, last, length = forward_pass.first, forward_pass.last, len(forward_pass.context)
        if first >= length:
            return self._parent_rows(forward_pass.draft.parents[first - length : last - length])
        if self._first is None:
            return self._rows.new_zeros(1, self._rows.shape[1])
        assert self._context is not None
        return self._target.features(self._context)[first:last]

    def _run_context(self, pairs: Context) -> None:
        """Runs the pairs of the context that the KV cache lacks."""
        cached = self._cached
        if cached.committed == len(pairs):
            return
        self._root = -1
        for forward_pass in cached.missing_passes(pairs, NO_NODES, len(pairs)):
            output = self._head(forward_pass, self._features(forward_pass), 1)
            if forward_pass.last == len(pairs):
                self._keep_rows(0, output)
                self._root = forward_pass.last

    def _run_draft(self, pairs: Context, nodes: TreeNodes) -> None:
        """Runs the draft tokens that the KV cache lacks: one pass for each level."""
        cached, tokens, parents = self._cached, nodes.tokens, nodes.parents
        count, first = len(pairs), len(self._cached.draft.tokens)
        long_rope = cached.uses_long_rope(pairs)
        while first < len(tokens):
            last = first + 1
            while last < len(tokens) and parents[last] < first:
                last += 1
            run = nodes if last == len(tokens) else TreeNodes(tokens[:last], parents[:last])
            self.cache.length = count + first
            forward_pass = ForwardPass(pairs, run, count + first, count + last, self.cache, long_rope)
            self._keep_rows(first + 1, self._head(forward_pass, self._features(forward_pass), last - first))
            cached.draft = run
            first = last

    def _parent_rows(self, parents: Sequence[int]) -> Tensor:
        """Returns the predicted features [n, width] of the draft tokens with these n indices (-1: of the context)."""
        lowest = parents[0] + 1
        if len(parents) == 1:
            return self._rows[lowest : lowest + 1]
        return self._rows.index_select(0, upload(torch.tensor(parents) + 1, self.device))

    def _keep_rows(self, first: int, output: ModelOutput) -> None:
        """Keeps the predicted features of a pass, as the rows from `first` on, and its logits until the call ends."""
        hidden = output.hidden_states
        assert hidden is not None
        end = first + hidden.shape[0]
        if end > self._rows.shape[0]:
            larger = self._rows.new_empty(max(end, 2 * self._rows.shape[0], 32), self._rows.shape[1])
            larger[:first] = self._rows[:first]
            self._rows = larger
        self._rows[first:end] = hidden
        self._logits.append((first, output.logits))


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
