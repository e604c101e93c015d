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
from specgen.decoding.policy_base import DraftedToken, LengthPolicy, Signals, extend_draft
from specgen.engine.devices import inference, upload


class Tree:
    """Nodes in the order in which they were added: their `tokens` and the numbers of their
    `parents` (-1: the context)."""

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
    """A tree that a draft model grows level by level. The model's KV cache holds the nodes, so each
    is computed only once.

    `hidden` [n, width] and `unpenalised` [n, ...] are the hidden states, and the logits without
    penalties, that belong to the n rows which `next_logits` returned last; see `ModelOutput`.
    `hidden` is None if the runner returns no hidden states, `unpenalised` if there are no
    penalties.
    """

    def __init__(self, setup: Setup, context: Context) -> None:
        super().__init__()
        assert setup.draft is not None
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
        output = self._runner.logits(self._context, self.tokens, self.parents, start=first + 1)
        logits = output.logits[:, : self._setup.vocab_size]
        own = output.unpenalised_part(self._setup.vocab_size)
        # valid until the runner's next call
        self._logits.append((logits if own is None else own).clone())
        hidden = output.hidden_states
        rows = [node - first for node in nodes]
        if rows != list(range(len(logits))):
            selected = upload(torch.tensor(rows), logits.device)
            logits = logits[selected]
            hidden, own = (None if each is None else each[selected] for each in (hidden, own))
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
        row, own, drawn_from = (
            None if each is None else each.index_select(0, rows)
            for each in (logits, self.unpenalised, probs)
        )
        assert row is not None
        return token_sampling.signals(names, row, tokens, drawn_from, score, own)

    def draft(self, reason: str, nodes: Sequence[int] | None = None, **fields: Any) -> Draft:
        """Returns a draft with some `nodes` of the tree, in this order, in which each has to come
        after its parent; None: all nodes.

        `reason` says why the draft ended; `fields` are further fields of `Draft` by name.
        """
        nodes = range(len(self.tokens)) if nodes is None else nodes
        if not nodes:
            return Draft(stop_reason=reason, **fields)
        at = {node: position for position, node in enumerate((-1, *nodes), -1)}
        parents = [self.parents[node] for node in nodes]
        origins = sorted({*parents})
        logits = torch.cat(self._logits)
        rows = logits[upload(torch.tensor([origin + 1 for origin in origins]), logits.device)]
        # one transfer
        statistics: list[list[float]] = torch.stack(
            token_sampling.entropy_and_top_prob(rows)
        ).tolist()
        if math.isnan(sum(statistics[0])):
            raise nan_logits("draft")
        entropies, top_probs = (dict(zip(origins, each, strict=True)) for each in statistics)
        kept = (
            upload(torch.tensor([parent + 1 for parent in parents]), logits.device)
            if self._setup.record
            else None
        )
        return Draft(
            [self.tokens[node] for node in nodes],
            [at[parent] for parent in parents],
            entropies=[entropies[parent] for parent in parents],
            top_probs=[top_probs[parent] for parent in parents],
            stop_reason=reason,
            logits=None if kept is None else logits[kept, : self._setup.vocab_size],
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

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        scores = self._scores(policy, context)
        tree = DraftTree(self._setup, context)
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

        reason = self._reason(extend_draft(policy, limit, extend), limit)
        if self._nodes is None:
            return tree.draft(reason)
        # stable
        by_likelihood = sorted(
            range(len(candidates)), key=lambda number: -candidates[number].log_likelihood
        )
        chosen = [candidates[number] for number in sorted(by_likelihood[: self._nodes])]
        return tree.draft(
            reason,
            [
                tree.add(each.parent, each.token) if each.node is None else each.node
                for each in chosen
            ],
        )

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
        values, tokens = (
            logits.float().log_softmax(dim=-1).topk(min(self._width, logits.shape[-1]), dim=-1)
        )
        before = upload(torch.tensor([value for _, value in alive]), logits.device)
        # <= parent's
        best, positions = (
            (values.clamp_max_(0.0) + before[:, None]).flatten().sort(descending=True, stable=True)
        )
        if self._nodes is None:
            best = best[: self._width]
            positions = positions[: self._width]
        chosen = tokens.flatten()[positions].masked_fill_(best.isnan(), -1)
        origins = positions // tokens.shape[1]
        score = None
        if scores is not None and tree.hidden is not None:
            score = scores(tree.hidden.index_select(0, origins[:1])[0], position)[None]
        computed = tree.signals(read, logits, origins[:1], chosen[:1], score=score)
        on_host = torch.cat(
            (chosen.float(), origins.float(), best, *(value.float() for value in computed.values()))
        ).tolist()
        size = len(positions)
        continued = list(alive)
        count = 0
        alive.clear()
        for token, origin, value in zip(
            *(on_host[start : start + size] for start in (0, size, 2 * size)), strict=True
        ):
            if value == -math.inf:
                break
            (parent, _), node = continued[int(origin)], None
            if count < self._width:
                node = tree.add(parent, int(token))
                count = count + 1
                if token not in self._eos_ids:
                    alive.append((node, value))
            candidates.append(_Candidate(parent, int(token), value, node))
        found = dict(zip(computed, on_host[3 * size :], strict=True))
        return {name: found[name] for name in read if name in found}
