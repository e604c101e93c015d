"""Token trees: drafts with several candidates at a position, and the drafter of the likeliest
continuations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft
from specgen.decoding import token_sampling
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Scores, Setup
from specgen.decoding.policy_base import (
    DraftedToken,
    LengthPolicy,
    Signals,
    begins_draft,
    continue_draft,
)
from specgen.engine.devices import inference, upload


class Tree:
    """A tree of drafted tokens that a drafter builds node by node, each after its parent.

    Nodes are numbered in the order in which they are added: `tokens` are theirs, and `parents` the
    numbers of the nodes before them (-1: the context). The result is a `Draft`.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Returns the child of node `parent` that has this token. Adds it if there is none."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def extend(self, parent: int, tokens: Iterable[int]) -> list[int]:
        """Adds a path of tokens after node `parent`, and returns its nodes. Nodes that the tree has
        already are used again."""
        path: list[int] = []
        for token in tokens:
            parent = self.add(parent, token)
            path.append(parent)
        return path

    def path(self, node: int) -> list[int]:
        """The nodes on the path from the context to `node`, including it; empty if `node` is -1."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


class DraftTree(Tree):
    """A tree that a draft model grows level by level, with the logits after its nodes. The model's
    KV cache holds the nodes, so each is computed only once. The tree follows the context and the
    tokens `before` it, which are no nodes.

    `hidden` [n, width] and `unpenalised` [n, ...] are the hidden states, and the logits without
    penalties, that belong to the n rows which `next_logits` returned last; see `ModelOutput`.
    `hidden` is None if the runner returns no hidden states, `unpenalised` if there are no
    penalties.
    """

    def __init__(self, setup: Setup, context: Context, before: Sequence[int] = ()) -> None:
        super().__init__()
        assert setup.draft is not None
        self._before = before
        self.hidden: torch.Tensor | None = None
        self.unpenalised: torch.Tensor | None = None
        self._runner = setup.draft
        self._setup = setup
        self._context = context
        self._logits: list[torch.Tensor] = []  # without penalties; row i is after node i - 1

    def add(self, parent: int, token: int) -> int:
        """Returns the child of node `parent` that has this token, and adds it if there is none.

        Raises RunError if the token is -1, which means that the logits held a NaN.
        """
        return super().add(parent, token_sampling.valid_token(token, "draft"))

    def next_logits(self, nodes: Sequence[int]) -> torch.Tensor | None:
        """Runs the draft model on all nodes added since the last call. Returns the logits
        [len(nodes), vocabulary] after `nodes`.

        `nodes` are some of the nodes added since the last call. The first call, with [-1], returns
        the logits after the context. Returns None if penalties forbid all tokens after one of the
        nodes.
        """
        first = sum(map(len, self._logits)) - 1
        count = len(self._before)
        output = self._runner.logits(
            self._context,
            [*self._before, *self.tokens],
            [*range(-1, count - 1), *(parent + count for parent in self.parents)],
            start=count + first + 1,
        )
        logits = output.logits[:, : self._setup.vocab_size]
        own = output.unpenalised_part(self._setup.vocab_size)
        # valid until the runner's next call
        self._logits.append((logits if own is None else own).clone())
        hidden = output.hidden_states
        rows = [node - first for node in nodes]
        if rows != list(range(len(logits))):
            selected = upload(torch.tensor(rows), logits.device)
            logits = logits[selected]
            hidden = None if hidden is None else hidden[selected]
            own = None if own is None else own[selected]
        self.hidden = hidden
        self.unpenalised = own
        return None if own is not None and token_sampling.is_forbidden(logits) else logits

    def signals(
        self,
        names: Signals,
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        probs: torch.Tensor | None = None,
        score: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Computes signals of `tokens` [n], by name; see `token_sampling.signals`.

        Token i was chosen from row `rows[i]` of `logits`, which `next_logits` returned last, or
        drawn from this row of `probs`. `score` [n] is the predicted acceptance probability.
        """
        if not names:
            return {}
        own = None if self.unpenalised is None else self.unpenalised.index_select(0, rows)
        drawn_from = None if probs is None else probs.index_select(0, rows)
        chosen_from = logits.index_select(0, rows)
        return token_sampling.signals(names, chosen_from, tokens, drawn_from, score, own)

    def draft(self, reason: str, nodes: Sequence[int] | None = None, **fields: Any) -> Draft:
        """Returns a draft with some `nodes` of the tree, in this order, in which each has to come
        after its parent; None: all nodes.

        `reason` says why the draft ended; `fields` are further fields of `Draft` by name. Raises
        RunError if the logits held a NaN.
        """
        nodes = range(len(self.tokens)) if nodes is None else nodes
        if not nodes:
            return Draft(stop_reason=reason, **fields)
        parents = [self.parents[node] for node in nodes]
        distinct = sorted({*parents})
        logits = torch.cat(self._logits)
        rows = logits[upload(torch.tensor([parent + 1 for parent in distinct]), logits.device)]
        statistics = torch.stack(token_sampling.entropy_and_top_prob(rows)).tolist()  # one transfer
        if math.isnan(sum(statistics[0])):
            raise nan_logits("draft")
        entropies: dict[int, float] = dict(zip(distinct, statistics[0], strict=True))
        top_probs: dict[int, float] = dict(zip(distinct, statistics[1], strict=True))

        recorded = None
        if self._setup.record:
            kept = upload(torch.tensor([parent + 1 for parent in parents]), logits.device)
            recorded = logits[kept, : self._setup.vocab_size]
        positions = {node: position for position, node in enumerate((-1, *nodes), -1)}
        return Draft(
            [self.tokens[node] for node in nodes],
            [positions[parent] for parent in parents],
            entropies=[entropies[parent] for parent in parents],
            top_probs=[top_probs[parent] for parent in parents],
            stop_reason=reason,
            logits=recorded,
            **fields,
        )


class _Candidate(NamedTuple):
    """A token that may be in the draft, after `parent`, with the log-likelihood (nats) of the path
    to it.

    `parent` is a node of the tree that the draft model runs (-1: the context). `node` is the
    candidate's own node in that tree; None if it was not added.
    """

    parent: int
    token: int
    log_likelihood: float
    node: int | None


class TopKTreeDrafter(DraftModelUser):
    """Drafts a tree of the likeliest continuations: several candidates at each position (EESD,
    section 5.7, and EAGLE-2).

    Each level has the `width` likeliest continuations of the previous level, by the probability of
    the whole path. If `nodes` is None, these levels are the draft. Otherwise the draft is EAGLE-2's
    dynamic tree (sections 4.1 and 4.2): all `width` likeliest tokens after each node of the
    previous level are candidates, and the `nodes` likeliest candidates of all levels are the draft.
    Of equally likely ones, that of the earlier level counts as likelier, then that after the
    likelier node. A draft that ends early may have fewer nodes. Probabilities are those at
    temperature 1. No node is drawn at random, even if the target samples. The length policy sees
    only the likeliest node of each level, after the whole level is in the tree.
    """

    def __init__(
        self, setup: Setup, *, width: int, depth: int | None = None, nodes: int | None = None
    ) -> None:
        super().__init__(setup, depth=depth)
        self._width = width
        self._nodes = nodes
        self.takes_forced = self._longest is None  # a head's levels begin after the context

    @inference
    def propose(
        self, context: Context, policy: LengthPolicy, limit: int, forced: Sequence[int] = ()
    ) -> Draft:
        limit = self._room(context, limit, forced)
        if limit < 1:
            return Draft()
        if not begins_draft(policy):
            return Draft(stop_reason=self._reason(policy.reason, limit))

        scores = self._scores(policy, context)
        tree = DraftTree(self._setup, context, forced)
        candidates = list[_Candidate]()
        # the nodes that the next level continues, and the log-likelihoods (nats) of their paths
        alive = [(-1, 0.0)]

        def extend(position: int) -> DraftedToken | str:
            before = len(candidates)
            values = self._level(tree, alive, candidates, policy.signals, scores, position)
            if values is None:
                return NO_CANDIDATES
            most = len(candidates) if self._nodes is None else self._nodes
            added = min(len(candidates), most) - min(before, most)
            return DraftedToken(position, values, added) if alive else "eos"

        reason = self._reason(continue_draft(policy, limit, extend), limit)
        if self._nodes is None:
            return tree.draft(reason)
        # sorting keeps equally likely candidates in their order
        by_likelihood = sorted(
            range(len(candidates)), key=lambda number: -candidates[number].log_likelihood
        )
        nodes = []
        for number in sorted(by_likelihood[: self._nodes]):
            candidate = candidates[number]
            if candidate.node is None:
                nodes.append(tree.add(candidate.parent, candidate.token))
            else:
                nodes.append(candidate.node)
        return tree.draft(reason, nodes)

    def _level(
        self,
        tree: DraftTree,
        alive: list[tuple[int, float]],
        candidates: list[_Candidate],
        read: Signals,
        scores: Scores | None,
        position: int,
    ) -> dict[str, float] | None:
        """Adds the candidates for the level with this number, with one forward pass and one
        transfer to the host.

        `alive` becomes the nodes of this level that do not end the output. Returns the signals in
        `read` of the level's likeliest node; None if there are no candidates. `scores` is the
        acceptance predictor's function, None if the policy reads none.
        """
        logits = tree.next_logits([node for node, _ in alive])
        if logits is None:
            return None
        chosen, origins, likelihoods = self._likeliest(logits, [value for _, value in alive])
        score = None
        if scores is not None and tree.hidden is not None:
            score = torch.as_tensor(scores(tree.hidden.index_select(0, origins[:1])[0], position))
            score = score[None]
        computed = tree.signals(read, logits, origins[:1], chosen[:1], score=score)
        columns = (chosen.float(), origins.float(), likelihoods)
        numbers = torch.cat((*columns, *(value.float() for value in computed.values()))).tolist()

        size = len(chosen)
        parents = [node for node, _ in alive]
        added = 0
        alive.clear()
        rows = (numbers[start : start + size] for start in (0, size, 2 * size))
        for token, origin, likelihood in zip(*rows, strict=True):
            if likelihood == -math.inf:
                break
            parent = parents[int(origin)]
            node = None
            if added < self._width:
                node = tree.add(parent, int(token))
                added += 1
                if token not in self._eos_ids:
                    alive.append((node, likelihood))
            candidates.append(_Candidate(parent, int(token), likelihood, node))
        signals = dict(zip(computed, numbers[3 * size :], strict=True))
        return {name: signals[name] for name in read if name in signals}

    def _likeliest(
        self, logits: torch.Tensor, before: list[float]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the candidates of a level, the likeliest first: their tokens, their rows in
        `logits` [rows, vocabulary], and the log-likelihoods (nats) of their paths.

        `before` are those of the paths to the rows. A token is -1 where the logits hold a NaN.
        """
        width = min(self._width, logits.shape[-1])
        values, tokens = logits.float().log_softmax(dim=-1).topk(width, dim=-1)
        of_parents = upload(torch.tensor(before), logits.device)[:, None]
        paths = (
            values.clamp_max_(0.0) + of_parents
        )  # rounding makes no path likelier than its begin
        likelihoods, positions = paths.flatten().sort(descending=True, stable=True)
        if self._nodes is None:
            likelihoods = likelihoods[: self._width]
            positions = positions[: self._width]
        chosen = tokens.flatten()[positions].masked_fill_(likelihoods.isnan(), -1)
        return chosen, positions // tokens.shape[1], likelihoods
