"""Runs a draft model with another tokenizer than the target's, and answers in the target's token
ids."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

import torch

from specgen.base.types import Context
from specgen.engine.devices import inference, upload
from specgen.engine.forward_pass import ModelOutput, chain_parents
from specgen.engine.model_runner import TOKEN_BY_TOKEN, ModelRunner
from specgen.engine.penalties import PenaltyProcessor, penalised_logits
from specgen.engine.text.translation import Translation


class TranslatedRunner:
    """A runner of a draft model by token-level intersection (TLI; Timor et al. 2025, arXiv
    2502.05202, Algorithm 4).

    It takes contexts and drafts in the target's ids, and returns logits [n, the target's
    vocabulary]. Tokens that the draft model lacks have the logit -inf, so the softmax is the draft
    model's distribution restricted to the common tokens. If several of its tokens are one token of
    the target, their probabilities are added. `penalties` are the target's, and are applied to
    these logits.

    For each of the target's contexts the draft model has a context of its own: the prompt as its
    own tokenizer would encode it, then each new token as the draft's token with the same bytes, or
    as several that make them up. That context only grows, so the KV cache stays valid. Tokens for
    which the draft model has no embedding are left out of it. `own` is the draft model's runner in
    its own ids. `context_limit` counts the draft model's tokens, so `room` says how many more
    tokens fit. Every id of the target can be run.
    """

    num_embeddings = sys.maxsize
    traits = TOKEN_BY_TOKEN

    def __init__(
        self,
        runner: ModelRunner,
        translation: Translation,
        penalties: PenaltyProcessor | None = None,
    ) -> None:
        self.context_limit = runner.context_limit
        self.device = runner.device
        self.vocab_size = translation.width
        self.own = runner
        self._translation = translation
        self._penalties = penalties
        singles = enumerate(translation.target_to_draft)
        self._single = {id_: other for id_, other in singles if 0 <= other < runner.num_embeddings}
        self._make_columns(translation, runner.vocab_size)
        # the draft's, of how many tokens
        self._contexts: WeakKeyDictionary[Context, tuple[Context, int]] = WeakKeyDictionary()

    def clear_cache(self) -> None:
        """Empties the KV cache, so that the next call runs its whole context. For measurements."""
        self.own.clear_cache()
        self._contexts.clear()

    def reserve(self, capacity: int) -> None:
        """Makes the KV cache's next buffers large enough for `capacity` tokens."""
        self.own.reserve(capacity)

    def room(self, context: Context) -> int:
        """See `DraftRunner`: as many tokens as fit into the draft model's own context."""
        return self.own.room(self._translated(context))

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

        The arguments are those of `ModelRunner.logits`, in the target's ids. Drafts need not
        consist of common tokens: a token that the draft model lacks is run as the tokens that make
        up its bytes. The output's `unrestricted` also has the logits of the draft model's tokens
        that the target lacks.
        """
        own = self._translated(context)
        find = self._single.get
        tokens = [find(token, -1) for token in draft]
        if -1 in tokens:
            output = self._spelled_logits(own, draft, parents, start)
        else:
            output = self.own.logits(own, tokens, parents, start=start)
        wide = self._widened(output.logits)
        logits = wide[:, : self.vocab_size]
        ids = list(draft)
        nodes = chain_parents(len(ids)) if parents is None else parents
        processed = penalised_logits(self._penalties, logits, context, ids, nodes, start)
        unpenalised = None
        if processed is not None:
            unpenalised = logits
            logits = processed
            if logits.shape[1] < self.vocab_size:  # narrower than the tokenizer's vocabulary
                unpenalised = unpenalised[:, : logits.shape[1]]
            # all common tokens are forbidden: draft one regardless
            nothing = logits.amax(dim=-1, keepdim=True) == -torch.inf
            logits = torch.where(nothing, unpenalised.float(), logits)
        unrestricted = wide if wide.shape[1] > self.vocab_size else None
        return ModelOutput(logits, output.hidden_states, unpenalised, unrestricted=unrestricted)

    def _translated(self, context: Context) -> Context:
        """Returns the draft model's context, after adding the tokens that have joined the target's
        since the last call."""
        own, done = self._contexts.get(context) or (
            Context(self._prompt(context)),
            context.prompt_length,
        )
        new = context.ids[done:]
        if new or done == context.prompt_length:
            spelled = [id_ for token in new for id_ in self._spelling(token)]
            if spelled:
                own.extend(spelled)
            self._contexts[context] = own, done + len(new)
        return own

    def _prompt(self, context: Context) -> list[int]:
        """Returns the draft's ids of the context's prompt: at least one, as a model can run no
        empty context."""
        special = self._translation.draft.special
        ids = self._embedded(self._translation.prompt(context.ids[: context.prompt_length]))
        return (
            ids
            or [
                *self._embedded(special[role] for role in ("bos", "eos", "unk") if role in special),
                0,
            ][:1]
        )

    def _spelling(self, token: int) -> list[int]:
        return self._embedded(self._translation.spelling(token))

    def _embedded(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that the draft model has embeddings for. Its tokenizer may have more:
        tokens added later."""
        return [id_ for id_ in ids if id_ < self.own.num_embeddings]

    def _spelled_logits(
        self, own: Context, draft: Sequence[int], parents: Sequence[int] | None, start: int
    ) -> ModelOutput:
        """Returns the draft model's output for drafted tokens of which it lacks some, which become
        several nodes each."""
        parents = chain_parents(len(draft)) if parents is None else parents
        spelled = [self._spelling(token) for token in draft]
        # only the last of each: there is room for these
        if len(own) + _deepest(spelled, parents) > self.context_limit:
            spelled = [ids[-1:] or own.ids[-1:] for ids in spelled]
        nodes: list[int] = []
        node_parents: list[int] = []
        # the last node of the context, and of each drafted token; its parent's if it has none
        ends = [-1]
        for ids, parent in zip(spelled, parents, strict=True):
            end = ends[parent + 1]
            for id_ in ids:
                nodes.append(id_)
                node_parents.append(end)
                end = len(nodes) - 1
            ends.append(end)
        wanted = [end + 1 for end in ends[start:]]
        first = min(wanted)
        output = self.own.logits(own, nodes, node_parents, start=first)
        rows = upload(torch.tensor([row - first for row in wanted]), self.device)
        hidden = output.hidden_states
        return ModelOutput(output.logits[rows], None if hidden is None else hidden[rows])

    def _make_columns(self, translation: Translation, count: int) -> None:
        """Finds which of the draft's `count` logits are moved to which columns.

        The target's tokens come first, then the draft's other ones.
        """
        # the draft's tokens of each target token; those of -1 are other ones
        draft_ids: dict[int, list[int]] = {}
        for id_ in range(count):
            target = (
                translation.draft_to_target[id_] if id_ < len(translation.draft_to_target) else -1
            )
            draft_ids.setdefault(target if target < translation.width else -1, []).append(id_)
        others = draft_ids.pop(-1, [])
        targets = range(translation.width)
        device = self.device
        self._origins = torch.tensor(
            [*(draft_ids.get(target, [0])[0] for target in targets), *others], device=device
        )
        self._missing = torch.tensor(
            [target for target in targets if target not in draft_ids],
            dtype=torch.int64,
            device=device,
        )
        several = (
            [(target, ids[number]) for target, ids in draft_ids.items() if len(ids) > number]
            for number in range(1, count)
        )
        self._again = [
            torch.tensor(pairs, device=device).T.contiguous() for pairs in takewhile(bool, several)
        ]

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns `logits` [n, draft vocabulary] as [n, target vocabulary + tokens that the target
        lacks].

        If several draft tokens are one token of the target, their probabilities are added in its
        column.
        """
        wide = logits.index_select(1, self._origins).index_fill_(1, self._missing, -torch.inf)
        for kept, added in self._again:
            total = torch.logaddexp(wide.index_select(1, kept), logits.index_select(1, added))
            wide.index_copy_(1, kept, total)
        return wide


def _deepest(spelled: Sequence[Sequence[int]], parents: Sequence[int]) -> int:
    """Returns the number of nodes on the longest path of a tree whose tokens become several nodes
    each."""
    lengths = [0]
    for ids, parent in zip(spelled, parents, strict=True):
        lengths.append(lengths[parent + 1] + len(ids))
    return max(lengths)
