"""The drafters of SpecTr and SpecInfer, whose drafts are verified as one tree, and their rules of
acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.base.seeds import derive_seed
from specgen.base.types import Context, Draft, Verdict
from specgen.decoding import token_sampling
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy_base import DraftedToken, LengthPolicy, Signals, extend_draft
from specgen.decoding.tree import DraftTree
from specgen.decoding.verification import GreedyVerifier, Verifier, make_verdict
from specgen.engine.devices import inference, upload

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput

# halvings of rho's interval: the error that is left lowers the acceptance by less than 0.1 %
_BISECTIONS = 16


class _Chain(NamedTuple):
    """An unfinished chain: its last node (-1: the context) and its log-likelihood (nats; only for a
    policy with signals)."""

    node: int
    log_likelihood: float


class MultiDraftDrafter(DraftModelUser):
    """Draws several independent chains from the draft model and joins them in one tree, with one
    forward pass for each level.

    `drafts` is the number of chains. Chains with a common prefix share its nodes; the draft's
    `draws` lists each random draw by its node. In greedy decoding the chains start with the
    likeliest distinct tokens, and each continues with the likeliest token.

    The length policy sees one node of each level: the last token of the likeliest chain, by the
    joint probability of its tokens in the distributions that they were drawn from. It decides after
    all tokens of the level are drawn, and all of them stay in the tree. So, given the nodes that
    exist, each token of the next level is still an independent draw from its distribution, or none
    of the level exists and the target draws the token: in both cases verification stays lossless,
    whatever the policy reads.
    """

    takes_forced = True

    def __init__(self, setup: Setup, *, drafts: int) -> None:
        super().__init__(setup)
        self._drafts = drafts

    @inference
    def propose(
        self, context: Context, policy: LengthPolicy, limit: int, forced: Sequence[int] = ()
    ) -> Draft:
        limit = self._room(context, limit, forced)
        if limit < 1:
            return Draft(draws=())
        tree = DraftTree(self._setup, context, forced)
        draws: list[int] = []
        probs: list[torch.Tensor] = []
        chains = [_Chain(-1, 0.0)] * self._drafts

        def extend(position: int) -> DraftedToken | str:
            before = len(tree)
            signals = self._level(tree, chains, probs, policy.signals)
            if signals is None:
                return NO_CANDIDATES
            draws.extend(chain.node for chain in chains)
            chains[:] = [chain for chain in chains if tree.tokens[chain.node] not in self._eos_ids]
            return DraftedToken(position, signals, len(tree) - before) if chains else "eos"

        reason = extend_draft(policy, limit, extend)
        padded = token_sampling.pad_probs(torch.cat(probs), self._vocab_size) if probs else None
        return tree.draft(reason, draws=draws, probs=padded)

    def _level(
        self, tree: DraftTree, chains: list[_Chain], probs: list[torch.Tensor], read: Signals
    ) -> Mapping[str, float] | None:
        """Extends each of the `chains` by one token, with one forward pass and one transfer to the
        host.

        The distributions drawn from are appended to `probs`. Returns the signals in `read` of the
        likeliest chain's last token; None where penalties forbid all tokens.
        """
        origins = list(dict.fromkeys(chain.node for chain in chains))
        logits = tree.next_logits(origins)
        if logits is None:
            return None
        if self._sampling.greedy and origins == [-1]:
            chosen = logits[0].topk(min(len(chains), logits.shape[-1])).indices
            del chains[len(chosen) :]
        rows = upload(torch.tensor([origins.index(chain.node) for chain in chains]), logits.device)
        warped = None
        if not self._sampling.greedy:
            warped = token_sampling.warp(logits, self._sampling)
            chosen = token_sampling.draw(warped.index_select(0, rows), self._generator)
        elif origins != [-1]:
            chosen = logits.argmax(dim=-1)

        columns = [chosen]
        signals: dict[str, torch.Tensor] = {}
        if read:
            probabilities = logits.float().softmax(dim=-1) if warped is None else warped
            columns.append(probabilities[rows, chosen])
            signals = tree.signals(read, logits, rows, chosen, warped)
        columns += signals.values()
        on_host = torch.stack([column.float() for column in columns], dim=1).tolist()

        before = len(tree)
        for number, (chain, (token, *own)) in enumerate(zip(chains, on_host, strict=True)):
            node = tree.add(chain.node, int(token))
            likelihood = math.log(own[0]) if own and own[0] > 0 else -math.inf
            chains[number] = _Chain(node, chain.log_likelihood + likelihood)
        if warped is not None:
            parents = [origins.index(parent) for parent in tree.parents[before:]]
            probs.append(warped.index_select(0, upload(torch.tensor(parents), logits.device)))
        if not read:
            return {}
        likeliest = max(range(len(chains)), key=lambda number: chains[number].log_likelihood)
        values = dict(zip(signals, on_host[likeliest][2:], strict=True))
        return {name: value for name, value in values.items() if name in read}


# A function that verifies the candidates (drafted next tokens) of a node, one after the other, such
# as `multi_round`, which describes arguments and results.
AcceptanceRule = Callable[
    [torch.Tensor, torch.Tensor, Sequence[int], torch.Tensor], tuple[int | None, torch.Tensor]
]


def multi_round(
    target: torch.Tensor, draft: torch.Tensor, tokens: Sequence[int], fresh: torch.Tensor
) -> tuple[int | None, torch.Tensor]:
    """SpecInfer's multi-round rejection sampling (Algorithm 2) of the candidates `tokens`, one
    after the other.

    A candidate is accepted with probability min(1, p / q), where p is `target` and q is `draft`,
    both [vocabulary]. After a rejection, p is replaced by norm(max(p - q, 0)). A token that was
    drawn twice is verified twice. `fresh` has a random number in [0, 1) for each candidate. Returns
    the number of the accepted candidate (from 0) and p; or None and the distribution of the
    correction.
    """
    for number, token in enumerate(tokens):
        if fresh[number] < target[token] / draft[token]:
            return number, target
        residual = (target - draft).clamp_min(0)
        mass = residual.sum()
        if mass > 0:  # all zero through rounding: p equals q
            target = residual / mass
    return None, target


def k_sequential(
    target: torch.Tensor, draft: torch.Tensor, tokens: Sequence[int], fresh: torch.Tensor
) -> tuple[int | None, torch.Tensor]:
    """SpecTr's k-sequential selection among the n candidates `tokens`, one after the other.

    A candidate is accepted with probability min(1, p / (rho q)), where p is `target` and q is
    `draft`, both [vocabulary]. rho solves 1 - (1 - b)^n = rho b with b = sum of min(q, p / rho). It
    is approached from above by bisection between 1 and n, because a rho below the solution would
    not be lossless. `fresh` has a random number in [0, 1) for each candidate. Returns the number of
    the accepted candidate (from 0) and p; or None and the distribution (not normalised) of the
    correction.
    """
    count = len(tokens)
    low = 1.0
    rho = float(count)
    for _ in range(_BISECTIONS if count > 1 else 0):
        middle = (low + rho) / 2
        mass = torch.minimum(draft, target / middle).sum()
        if 1 - (1 - mass) ** count <= middle * mass:
            rho = middle
        else:
            low = middle
    for number, token in enumerate(tokens):
        if fresh[number] < target[token] / (rho * draft[token]):
            return number, target
    common = torch.minimum(draft, target / rho)
    mass = common.sum()
    residual = target
    if mass > 0:
        residual = (target - common * (1 - (1 - mass) ** count) / mass).clamp_min(0)
    return None, residual if residual.sum() > 0 else target


class TreeSampling:
    """Verifies a tree from its root down: at each node one of its children is accepted, or a
    correction ends the path.

    `rule` decides about the children of a node. The output has the target's distribution (after
    temperature and filters) if the children were drawn as the rule assumes. The rule computes in
    `dtype` on the CPU, to which all distributions are copied at once.
    """

    def __init__(self, rule: AcceptanceRule, setup: Setup, dtype: torch.dtype) -> None:
        self._rule = rule
        self._sampling = setup.sampling
        self._dtype = dtype
        self._generator = token_sampling.make_generator(
            torch.device("cpu"), derive_seed(setup.seed, "target")
        )

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        target = token_sampling.warp(output.logits, self._sampling).to("cpu", self._dtype)
        # the children of each node (-1: the context), in the order of their draws
        children: dict[int, list[int]] = {}
        for node in draft.draws or ():
            children.setdefault(draft.parents[node], []).append(node)
        if children:
            # those with most children first
            parents = sorted(children, key=lambda parent: -len(children[parent]))
            shape = len(parents), len(children[parents[0]])
            fresh = torch.rand(shape, dtype=self._dtype, generator=self._generator)
            probs = draft.probs.to("cpu", self._dtype)

        path = list[int]()
        node = -1
        after = target[0]
        while node in children:
            candidates = children[node]
            tokens = [draft.tokens[child] for child in candidates]
            accepted, after = self._rule(
                target[node + 1], probs[candidates[0]], tokens, fresh[parents.index(node)]
            )
            if accepted is None:
                break
            node = candidates[accepted]
            path.append(node)
            after = target[node + 1]
        return make_verdict(draft, path, int(token_sampling.draw(after.float(), self._generator)))


def k_sequential_verifier(setup: Setup) -> Verifier:
    if setup.sampling.greedy:
        return GreedyVerifier()
    return TreeSampling(k_sequential, setup, torch.float64)


def multi_round_verifier(setup: Setup) -> Verifier:
    if setup.sampling.greedy:
        return GreedyVerifier()
    return TreeSampling(multi_round, setup, torch.float32)
