"""The drafts of SpecTr and SpecInfer, which are verified as one tree, and their rules of acceptance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy import DraftedToken, LengthPolicy, Signals, extend_draft
from specgen.decoding.tree import DraftTree
from specgen.decoding.verification import GreedyVerifier, Verifier, make_verdict
from specgen.engine.devices import move, upload
from specgen.engine.inference_mode import inference

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput

_BISECTIONS = 16  # halvings of rho's interval; the remaining error lowers the acceptance probability by less than 0.1 %


class MultiDraftDrafter(DraftModelUser):
    """Draws several independent chains from the draft model and joins them in one tree, with one forward pass for each level.

    `drafts` is the number of chains. Chains with a common prefix share its nodes; the draft's `draws` lists each random draw by
    its node. In greedy decoding the chains start with the likeliest distinct tokens, and each continues with the likeliest token.

    The length policy sees one node of each level: the last token of the likeliest chain, by the joint probability of its tokens
    in the distributions that they were drawn from. It decides after all tokens of the level are drawn, and all of them stay in
    the tree. So, given the nodes that exist, each token of the next level is still an independent draw from its distribution, or
    none of the level exists and the target draws the token: in both cases verification stays lossless, whatever the policy reads.
    """

    def __init__(self, setup: Setup, *, drafts: int) -> None:
        super().__init__(setup)
        self._drafts = drafts

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        tree = DraftTree(self._setup, context)
        draws: list[int] = []
        probs: list[torch.Tensor] = []
        chains = [-1] * self._drafts  # the last node of each unfinished chain
        joint = torch.zeros(self._drafts, device=self._runner.device)  # their log-likelihoods; only for a policy with signals

        def extend(position: int) -> DraftedToken | str:
            nonlocal joint
            level = self._level(tree, chains, probs, joint, policy.signals)
            if level is None:
                return NO_CANDIDATES
            draws.extend(level.nodes)
            unfinished = [number for number, node in enumerate(level.nodes) if tree.tokens[node] not in self._eos_ids]
            chains[:] = [level.nodes[number] for number in unfinished]
            joint = level.joint
            if len(chains) < len(level.nodes):
                joint = joint.index_select(0, upload(torch.tensor(unfinished, dtype=torch.long), joint.device))
            return DraftedToken(position, level.signals, len(set(level.nodes))) if chains else "eos"

        reason = extend_draft(policy, limit, extend)
        return tree.draft(reason, draws=draws, probs=logits_ops.pad_probs(torch.cat(probs), self._vocab_size) if probs else None)

    def _level(
        self, tree: DraftTree, chains: Sequence[int], probs: list[torch.Tensor], joint: torch.Tensor, read: Signals
    ) -> _Level | None:
        """Extends each chain by one token, with one forward pass and one transfer to the host. None: penalties forbid all tokens.

        `chains` holds each chain's last node (-1: the context), `joint` [chains] its log-likelihood (nats). The distributions
        drawn from are appended to `probs`. `read` are the signals that the length policy reads.
        """
        origins = list(dict.fromkeys(chains))
        logits = tree.next_logits(origins)
        if logits is None:
            return None
        warped = None
        if self._sampling.greedy:
            chosen = logits.topk(min(len(chains), logits.shape[-1])).indices[0] if origins == [-1] else logits.argmax(dim=-1)
            chains = [-1] * chosen.shape[0] if origins == [-1] else chains
        if read or not self._sampling.greedy:
            rows = upload(torch.tensor([origins.index(node) for node in chains]), logits.device)
        if not self._sampling.greedy:
            warped = logits_ops.warp(logits, self._sampling)
            chosen = logits_ops.draw(warped.index_select(0, rows), self._generator)
        computed: dict[str, torch.Tensor] = {}
        if read:
            joint = joint[: len(chains)] + ((logits.float().softmax(dim=-1) if warped is None else warped)[rows, chosen]).log()
            best = joint.argmax(dim=0, keepdim=True)
            computed = tree.signals(read, logits, rows.index_select(0, best), chosen.index_select(0, best), warped)
        on_host = torch.cat((chosen.float(), *(value.float() for value in computed.values()))).tolist()
        tokens, numbers = list(map(int, on_host[: len(chains)])), on_host[len(chains) :]
        nodes: dict[tuple[int, int], int] = {}
        for step in zip(chains, tokens, strict=True):
            if step not in nodes:
                nodes[step] = tree.add(*step)
        if warped is not None:
            parents = upload(torch.tensor([origins.index(parent) for parent, _ in nodes]), logits.device)
            probs.append(warped.index_select(0, parents))
        values = {name: value for name, value in zip(computed, numbers, strict=True) if name in read}
        return _Level([nodes[step] for step in zip(chains, tokens, strict=True)], joint, values)


class _Level(NamedTuple):
    """A level of a tree of chains: each chain's new node and log-likelihood (nats) [chains], and the signals for the policy."""

    nodes: list[int]
    joint: torch.Tensor
    signals: Mapping[str, float]


class Acceptance(NamedTuple):
    """The probabilities for verifying the candidates (drafted next tokens) of each node, one candidate after the other.

    `probs` [nodes, candidates] is the probability to accept each candidate, given that the candidates before it were rejected.
    `residual` [nodes, vocabulary] is the distribution (not normalised) of the correction, if all candidates are rejected.
    """

    probs: torch.Tensor
    residual: torch.Tensor


# The arguments: the target's distributions [nodes, vocabulary]; the candidate tokens [nodes, candidates]; each node's number of
# candidates (Python ints, descending); a function (j, n) that returns the distributions [n, vocabulary] from which the j-th
# candidates of the first n nodes were drawn.
AcceptanceRule = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Callable[[int, int], torch.Tensor]], Acceptance]


def multi_round(
    target_probs: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int], drawn_from: Callable[[int, int], torch.Tensor]
) -> Acceptance:
    """SpecInfer's multi-round rejection sampling (Algorithm 2): accept with min(1, p / q), else p becomes norm(max(p - q, 0)).

    p are the target's probabilities and q the draft's. A token drawn twice is verified twice, each time with the whole q.
    The arguments are those of `AcceptanceRule`.
    """
    residual = target_probs.clone()
    probs = torch.zeros(tokens.shape, dtype=residual.dtype, device=residual.device)
    for j in range(tokens.shape[1]):
        verified = sum(count > j for count in counts)
        token = tokens[:verified, j, None]
        before, draft_probs = residual[:verified], drawn_from(j, verified)
        probs[:verified, j] = (before.gather(1, token) / draft_probs.gather(1, token))[:, 0]
        after = (before - draft_probs).clamp_min_(0)
        mass = after.sum(dim=-1, keepdim=True)
        residual[:verified] = torch.where(mass > 0, after / mass, before)  # all zero through rounding: p equals q
    return Acceptance(probs, residual)


def k_sequential(
    target_probs: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int], drawn_from: Callable[[int, int], torch.Tensor]
) -> Acceptance:
    """SpecTr's k-sequential selection: accept each of n candidates with min(1, p / (rho q)), with the smallest valid rho.

    p are the target's probabilities and q the draft's; a node's n candidates are independent draws from one q. rho solves
    1 - (1 - b)^n = rho b with b = sum of min(q, p / rho). It is approached from above, because only larger values keep the output
    lossless. The arguments are those of `AcceptanceRule`.
    """
    exact = torch.float32 if target_probs.device.type == "mps" else torch.float64
    target, draft = target_probs.to(exact), drawn_from(0, len(counts)).to(exact)
    number = upload(torch.tensor(counts, dtype=exact), target.device)[:, None]
    rho = number.clone()
    if several := sum(count > 1 for count in counts):
        rho[:several] = _smallest_rho(target[:several], draft[:several], number[:several])
    common = torch.minimum(draft, target / rho)
    mass = common.sum(dim=-1, keepdim=True)
    taken = torch.where(mass > 0, (1 - (1 - mass) ** number) / mass, 0)
    residual = (target - common * taken).clamp_min_(0)
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target)
    return Acceptance(target.gather(1, tokens) / (rho * draft.gather(1, tokens)), residual)


def _smallest_rho(target: torch.Tensor, draft: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Finds SpecTr's rho [nodes, 1] by bisection between 1 and `number` [nodes, 1], each node's number of candidates."""
    low, high = torch.ones_like(number), number
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        mass = torch.minimum(draft, target / middle).sum(dim=-1, keepdim=True)
        valid = 1 - (1 - mass) ** number <= middle * mass
        high, low = torch.where(valid, middle, high), torch.where(valid, low, middle)
    return high


class TreeSampling:
    """Verifies a tree from its root down: at each node one of its children is accepted, or a correction ends the path.

    `rule` computes the acceptance probabilities. The output has the target's distribution (after temperature, top-k and top-p)
    if the candidates were drawn as `rule` assumes. All nodes are verified at once on the device, and the accepted path is then
    followed there to its end.
    """

    def __init__(self, rule: AcceptanceRule, sampling: SamplingParams, device: torch.device, seed: int) -> None:
        self._rule = rule
        self._sampling = sampling
        self._generator = logits_ops.make_generator(device, seed)

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        target_probs = logits_ops.warp(output.logits, self._sampling)
        candidates = _candidates(draft)
        if not candidates:
            return _verdict(draft, [0], int(logits_ops.draw(target_probs[0], self._generator)))
        device = target_probs.device
        counts = [len(children) for _, children in candidates]
        parents = upload(torch.tensor([parent + 1 for parent, _ in candidates]), device)
        padded = [children + [children[0]] * (counts[0] - len(children)) for _, children in candidates]
        nodes = upload(torch.tensor(padded), device)
        tokens = upload(torch.tensor(draft.tokens), device)[nodes]

        def drawn_from(j: int, count: int) -> torch.Tensor:
            probs: torch.Tensor = move(draft.probs, device).index_select(0, nodes[:count, j])
            return probs

        acceptance = self._rule(target_probs.index_select(0, parents), tokens, counts, drawn_from)
        exists = torch.arange(counts[0], device=device) < upload(torch.tensor(counts), device)[:, None]
        accepted = _bernoulli(acceptance.probs, self._generator) & exists
        child = nodes.gather(1, accepted.byte().argmax(dim=1, keepdim=True))[:, 0] + 1
        # positions 0 (the context) and i + 1 (node i): the next one on the accepted path; its last position leads to itself
        onward = torch.arange(len(draft.tokens) + 1, device=device)
        onward[parents] = torch.where(accepted.any(dim=1), child, parents)
        end = onward
        for _ in range(len(candidates).bit_length()):  # pointer jumping: each iteration doubles the steps
            end = end[end]
        target_probs.index_copy_(0, parents, acceptance.residual.to(target_probs.dtype))
        own = logits_ops.draw(target_probs.index_select(0, end[:1])[0], self._generator)
        *steps, token = torch.cat((onward, own[None])).tolist()
        return _verdict(draft, steps, token)


def tree_verifier(setup: Setup, rule: AcceptanceRule) -> Verifier:
    """Returns the verifier of a method with this rule: in greedy decoding that of all methods."""
    return GreedyVerifier() if setup.sampling.greedy else TreeSampling(rule, *setup.for_verifier)


def _candidates(draft: Draft) -> list[tuple[int, list[int]]]:
    """Returns each node that has children (-1: the context), with its children in the order of their draws.

    A child that was drawn twice occurs twice. The nodes with most children come first.
    """
    children: dict[int, list[int]] = {}
    for node in range(len(draft.tokens)) if draft.draws is None else draft.draws:
        children.setdefault(draft.parents[node], []).append(node)
    return sorted(children.items(), key=lambda entry: -len(entry[1]))


def _verdict(draft: Draft, onward: Sequence[int], token: int) -> Verdict:
    """Returns the verdict that accepts the path given by `onward`, followed by the target's `token`.

    Position 0 is the context and position i + 1 is node i. `onward` maps each position to the next; a path ends at a position
    that maps to itself.
    """
    path: list[int] = []
    position = 0
    while onward[position] != position:
        position = onward[position]
        path.append(position - 1)
    return make_verdict(draft, path, token)


def _bernoulli(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws independent booleans that are true with these probabilities; false where a probability is NaN."""
    return torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, generator=generator) < probs
