"""Runs one model on one sequence with a KV cache.

Callers pass the whole sequence and get logits; the runner runs those tokens that its KV cache does
not hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from specgen.base.measuring import distinct_ids, timed
from specgen.base.types import Context
from specgen.engine.cached_prefix import CachedPrefix, matching_path
from specgen.engine.devices import inference, release, synchronizer, upload
from specgen.engine.forward_pass import (
    Cache,
    ForwardFunction,
    ModelOutput,
    TreeNodes,
    draft_nodes,
)
from specgen.engine.model import Model
from specgen.engine.native.graphs import StaticForward, TokenChooser
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.penalties import PenaltyProcessor, penalised_logits

_LIKELIHOOD_CHUNK = 512  # tokens whose logits are in memory at once


class DraftTraits(NamedTuple):
    """How a runner drafts. The defaults are those of a model that runs token by token.

    `longest_draft` is the most tokens (levels, for a tree) in a draft; None: as many as the context
    limit allows. `draws`: in sampling, a chain's tokens are drawn from its logits; otherwise the
    likeliest are taken. `independent`: no logits depend on the tokens drafted before.
    `drafts_blocks`: one pass computes a whole draft, so that a longer one costs hardly more.
    `sizes_blocks`: this pass is as long as `BlockRunner.plan` says.
    `rank_accuracies` are as in `MedusaWeights`; empty where they are not known.
    """

    longest_draft: int | None = None
    draws: bool = True
    independent: bool = False
    drafts_blocks: bool = False
    rank_accuracies: Sequence[Sequence[float]] = ()
    sizes_blocks: bool = False


TOKEN_BY_TOKEN = DraftTraits()


class LogitsRunner(Protocol):
    """Runs a model on one sequence, on `device`."""

    @property
    def device(self) -> torch.device: ...

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits after the last context token (index 0) and after each draft token i
        (index i + 1), from index `start` on.

        Their shape is [draft tokens + 1 - `start`, vocabulary]. `parents[i]` is the index of draft
        token i's parent in the tree (-1: the context); `parents` None means a chain.
        """
        ...


class VerifyingRunner(LogitsRunner, Protocol):
    """The interface of the target's runner that a run uses."""

    def cached_tokens(self, context: Context) -> int:
        """Returns how many tokens of the context the KV cache holds."""
        ...


class DraftRunner(LogitsRunner, Protocol):
    """The interface of a model runner that drafting uses.

    `context_limit` is the longest context in tokens, `num_embeddings` the number of token ids that
    the model has embeddings for, `vocab_size` the number of logits per position.
    """

    @property
    def traits(self) -> DraftTraits: ...

    @property
    def context_limit(self) -> int: ...

    @property
    def num_embeddings(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def room(self, context: Context) -> int:
        """Returns how many tokens (levels, for a tree) can be drafted after the context; negative
        if the context is too long.

        0 if the context holds a token that the model has no embedding for.
        """
        ...


class SizedRunner:
    """Base of draft runners: the sizes of one model, and how many tokens fit into its context."""

    context_limit: int
    num_embeddings: int
    vocab_size: int
    device: torch.device

    def take_sizes(self, other: DraftRunner) -> None:
        """Gives this runner the sizes and the device of another."""
        self.context_limit = other.context_limit
        self.num_embeddings = other.num_embeddings
        self.vocab_size = other.vocab_size
        self.device = other.device

    def room(self, context: Context) -> int:
        """See `DraftRunner`."""
        if context.largest_id >= self.num_embeddings:
            return 0
        return self.context_limit - len(context)


class KeptDraftRunner(DraftRunner, Protocol):
    """A draft runner whose KV caches stay between runs."""

    def reserve(self, capacity: int) -> None:
        """Makes the KV caches large enough for `capacity` tokens, so that they need not grow during
        a run."""

    def clear_cache(self) -> None:
        """Empties the KV caches, so that the next call runs its whole context."""


class TargetRunner(KeptDraftRunner, VerifyingRunner, Protocol):
    """The interface of a target's runner."""


class AcceptancePredictor(Protocol):
    """Predicts the probability that a drafted token is accepted (theta_M of EESD, Eq. 5)."""

    def begin(self, context: Context) -> None:
        """Starts a draft after `context`."""

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor | float:
        """Returns the probability of the token at `position` of the draft (from 1), which was
        predicted from the hidden state `draft_hidden` [width].

        It is a number on a CPU. Elsewhere it is a scalar tensor, for which the host need not wait.
        """
        ...


class HiddenStates(NamedTuple):
    """The hidden states `states` [n, width] that a call of `ModelRunner.logits` returned, from
    index `start` on.

    Index 0 is the hidden state at the last token of the call's context, which had `length` tokens;
    index i + 1 is that at node i of the call's `draft`.
    """

    length: int
    draft: TreeNodes
    start: int
    states: torch.Tensor

    def before_last(self, context: Context) -> torch.Tensor | None:
        """Returns the hidden state [width] from which the last token of `context` was predicted.

        `context` is the context of the call that returned these states, with the tokens added
        since. The added tokens but the last one must be a path of that call's draft; otherwise
        returns None.
        """
        tokens = context.ids[self.length : -1]
        path = matching_path(self.draft, tokens)
        index = path[-1] + 1 if path else 0
        is_known = len(context) > self.length and len(path) == len(tokens) and index >= self.start
        return self.states[index - self.start] if is_known else None


class ModelRunner(SizedRunner):
    """Runs a model on any context and draft. Tokens in its KV cache are not run again; callers
    never roll back themselves.

    Each call may have another context, and the runner stays usable after an interrupted call.
    `penalties` changes the logits from which tokens are chosen (None: no change). `forward` is the
    function that runs the model; None: the whole model. `cache` is another runner's KV cache to
    share; None makes a new one. `context_limit` is the longest context in tokens.
    """

    traits = TOKEN_BY_TOKEN

    def __init__(
        self,
        model: Model,
        penalties: PenaltyProcessor | None = None,
        forward: ForwardFunction | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.context_limit = model.shape.context_limit
        self.num_embeddings = self.vocab_size = model.shape.vocab_size
        self.device = model.device
        self.cache = model.new_cache() if cache is None else cache
        self._forward = model.forward() if forward is None else forward
        self._penalties = penalties
        static = self._forward if isinstance(self._forward, StaticForward) else None
        self._feeding = (
            static if static is not None and static.feeds and penalties is None else None
        )
        self._cached = CachedPrefix(self.cache, model.shape.rope_boundary, exact=model.exact)
        self._last: tuple[Context, HiddenStates] | None = None  # the last call's
        # of the last call with each other context
        self._earlier: WeakKeyDictionary[Context, HiddenStates] = WeakKeyDictionary()
        self.forward_count = 0  # counts forward passes and clearings of the cache

    def clear_cache(self) -> None:
        """Empties the KV cache, so that the next call runs its whole context. For measurements."""
        self._cached.clear()
        # tells a runner that shares this cache that its entries are gone, see `share_prefix`
        self.forward_count += 1

    def reserve(self, capacity: int) -> None:
        """Makes the KV cache's next buffers large enough for `capacity` tokens, so that they need
        not grow during a run."""
        self.cache.capacity = max(self.cache.capacity, capacity)

    @inference
    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits after the last context token (index 0) and after each draft token i
        (index i + 1).

        Only the logits from index `start` on are returned: [draft tokens + 1 - `start`,
        vocabulary]. `parents[i]` is the index of draft token i's parent in the tree, lower than i
        (-1: the context); `parents` None means a chain. Runs the model on the tokens that its KV
        cache lacks, in one pass; most of a long prompt is run in chunks before this pass. Draft
        tokens of the last call that have been accepted, and so are part of `context` now, are not
        run again.
        """
        tokens = list(draft)
        nodes = draft_nodes(tokens, parents)
        end = len(context) + len(tokens)
        self._keep_hidden_states(context)
        self._cached.truncate_for(context, nodes, start)
        for forward_pass in self._cached.missing_passes(context, nodes, end):
            self.forward_count += 1
            output = self._forward(
                forward_pass, len(tokens) + 1 - start if forward_pass.last == end else 1
            )
        if output.hidden_states is not None:
            self._last = context, HiddenStates(len(context), nodes, start, output.hidden_states)
        processed = penalised_logits(
            self._penalties, output.logits, context, tokens, nodes.parents, start
        )
        if processed is None:
            return output
        return output._replace(logits=processed, unpenalised=output.logits)

    @property
    def chooses_on_device(self) -> bool:
        """Whether the tokens of a chain can be chosen on the device, by `chooser`, `choose_next`
        and `count_chosen`.

        True only with CUDA graphs and without penalties: elsewhere choosing on the host is as fast,
        or necessary.
        """
        return self._feeding is not None

    def chooser(self, rule: Hashable, make: Callable[[], TokenChooser]) -> TokenChooser:
        """Returns the object that chooses tokens in `choose_next(rule, ...)`: made by `make` at the
        first call with this rule, and then kept."""
        assert self._feeding is not None
        return self._feeding.chooser(rule, make)

    @inference
    def choose_next(
        self, rule: Hashable, context: Context, draft: Sequence[int], chosen: int
    ) -> None:
        """Chooses a further token of a chain on the device, without the host reading it.

        The chain follows the context and the draft `draft` (a chain too), and has `chosen` tokens
        already. One chain is made by calls with the same arguments but for `chosen`: 0, 1, ... Each
        call runs the token that the call before chose. The caller gets the tokens from the chooser
        of this `rule`, and reports those that were run to `count_chosen`, so that they need not be
        run again.
        """
        assert self._feeding is not None
        if chosen == 0:
            self._feeding.choosers[rule](self.logits(context, draft, start=len(draft)).logits)
        else:
            assert isinstance(self.cache, KVBuffer)
            position = len(context) + len(draft) + chosen - 1
            is_long = self._cached.uses_long_rope(context)
            self._feeding.feed(rule, self.cache, position, long_rope=is_long)

    def count_chosen(self, tokens: Sequence[int]) -> None:
        """Counts a chain of tokens after the context as cached: the `draft` of the last calls of
        `choose_next`, and the tokens that they ran."""
        self._cached.draft = draft_nodes(list(tokens), None)

    def cached_tokens(self, context: Context) -> int:
        """Returns how many tokens at the beginning of the context the KV cache holds."""
        self._cached.switch_to(context)
        return self._cached.committed

    def share_prefix(self, context: Context) -> tuple[int, int]:
        """Makes sure that the KV cache holds all tokens of `context` but the last, so that another
        runner can read them.

        The other runner shares the cache and may write after these tokens. Returns how many tokens
        are cached, and a number that differs from that of the last call if this runner has written
        to the cache since; what the other runner had written is then invalid.
        """
        cached = self._cached
        cached.switch_to(context)
        if cached.committed < len(context) - 1:
            self.logits(context)
        cached.truncate(len(context) - 1)
        return cached.committed, self.forward_count

    def last_hidden_state(self, context: Context) -> torch.Tensor | None:
        """Returns the hidden state [width], after the norm, from which this runner predicted the
        last token of `context`.

        It was computed by the last call with this context, before the context grew; other contexts
        may have been run since. None if that call did not compute it.
        """
        last = self._last
        states = last[1] if last is not None and last[0] is context else self._earlier.get(context)
        return None if states is None else states.before_last(context)

    def _keep_hidden_states(self, context: Context) -> None:
        """Copies the hidden states of the last call if it had another context than `context`,
        because the next call overwrites them."""
        if self._last is not None and self._last[0] is not context:
            other, hidden = self._last
            self._earlier[other] = hidden._replace(states=hidden.states.clone())
            release(hidden.states)  # the other context may have been run on another stream
        if self._earlier:
            self._earlier.pop(context, None)
        self._last = None

    @inference
    def log_likelihood(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """Returns the log-likelihood (nats) of `token_ids` after the prompt at temperature 1,
        computed in float32.

        The runner's penalties apply; for the model's own distribution use a runner without
        penalties.
        """
        context = Context(prompt_ids)
        total = torch.zeros((), device=self.device)
        for start in range(0, len(token_ids), _LIKELIHOOD_CHUNK):
            tokens = list(token_ids[start : start + _LIKELIHOOD_CHUNK])
            logits = self.logits(context, tokens[:-1]).logits.float()
            chosen = logits.gather(1, upload(torch.tensor(tokens), logits.device)[:, None])[:, 0]
            total += (chosen - logits.logsumexp(dim=-1)).sum()
            context.extend(tokens)
        return float(total)


class Runners(NamedTuple):
    """The runners of a run's models.

    `target` verifies. `draft` runs the draft model, or the part of the target that drafts; None if
    none does. A trained part reads the hidden states (or keys and values) that `target` keeps. For
    early exit, `first` runs the layers that target and draft share; None otherwise. `predictor`
    predicts whether drafted tokens are accepted; None without one.
    """

    target: TargetRunner
    draft: KeptDraftRunner | None = None
    first: ModelRunner | None = None
    predictor: AcceptancePredictor | None = None

    def reserve(self, capacity: int) -> None:
        """Makes the KV caches of all runners large enough for `capacity` tokens, so that they need
        not grow during a run."""
        for runner in self[:3]:
            if runner is not None:
                runner.reserve(capacity)

    def clear_cache(self) -> None:
        """Empties all KV caches, so that the next call runs its whole context. For measurements."""
        for runner in self[:3]:
            if runner is not None:
                runner.clear_cache()


def run_some_passes(target: ModelRunner, draft: DraftRunner | None) -> dict[int, float]:
    """Runs passes such as those of a round, so that later ones are not slower because they are the
    first of their kind.

    Returns the seconds of the target's passes by their number of tokens. On a device that is not
    waited for, they say nothing.
    """
    context = Context([0, 1])
    others = distinct_ids(4, target.num_embeddings)
    if draft is not None:
        for length in range(4):
            draft.logits(context, [1] * length, start=length)
    width = max(1, len(context) - target.cached_tokens(context))
    begin = time.perf_counter()
    target.logits(context)
    middle = time.perf_counter()
    target.logits(context, others)
    return {width: middle - begin, 1 + len(others): time.perf_counter() - middle}


def time_passes(runner: Any, widths: Sequence[int], context_length: int) -> dict[int, float]:
    """Returns the median seconds of a forward pass over w tokens, for each w in `widths`.

    `runner` is a `DraftRunner` with `reserve` and `clear_cache`. The w tokens are the last token of
    a context of `context_length` tokens, whose other tokens are cached, and w - 1 distinct drafted
    tokens.
    """
    synchronize = synchronizer(runner.device) or (lambda: None)
    context = Context([1] * context_length)
    draft = distinct_ids(max(widths) - 1, runner.vocab_size)
    runner.reserve(context_length + max(widths))
    runner.logits(context)

    def run(width: int) -> None:
        runner.logits(context, draft[: width - 1])
        synchronize()

    samples = timed({width: partial(run, width) for width in widths}, 2, 6.0, before=synchronize)
    runner.clear_cache()
    return {width: median(taken) for width, taken in samples.items()}
