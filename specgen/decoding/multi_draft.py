"""Several drafts at once, judged as one tree: SpecTr (Sun et al. 2023) and SpecInfer (Miao et al. 2023), both lossless."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from specgen.decoding import logits_ops
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import ModelDrafterBase, room
from specgen.decoding.policies import DraftedToken, LengthPolicy
from specgen.engine.inference_mode import inference
from specgen.errors import nan_logits
from specgen.types import Context, Draft, SamplingParams, Source, Verdict

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner, ModelOutput

_BISECTIONS = 16  # of rho's interval: what is left of it costs less than a thousandth of the acceptance


class MultiDraftDrafter(ModelDrafterBase):
    """Chains drawn independently of one another from the draft model, as the tree of their prefixes: one pass a level.

    Chains that agree share a node, and the draft's `draws` tell how many went there, and in which order. In greedy decoding the
    chains begin with the likeliest distinct tokens, and go on with the likeliest each.
    """

    def __init__(
        self,
        runner: DraftRunner,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        vocab_size: int,
        seed: int,
        *,
        drafts: int,
        keep_logits: bool = False,
    ) -> None:
        super().__init__(runner, sampling, eos_ids, vocab_size, seed, keep_logits=keep_logits)
        self._drafts = drafts

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = room(self._runner, context, limit)
        if limit < 1:
            return Draft()
        tree = DraftTree(self._runner, context, self._vocab_size)
        draws: list[int] = []
        probs: list[torch.Tensor] = []
        chains = [-1] * self._drafts  # the last node of each that may go on
        reason = "length"
        for position in range(1, limit + 1):
            chains = self._level(tree, chains, probs)
            draws += chains
            chains = [node for node in chains if tree.tokens[node] not in self._eos_ids]
            if not chains:
                reason = "eos"
                break
            if not policy.keep_drafting(DraftedToken(position)):
                reason = policy.reason
                break
        nodes = range(len(tree.tokens))
        logits = tree.logits(nodes) if self._keep_logits else None
        return Draft(tree.tokens, tree.parents, self._together(probs), *tree.figures(nodes), reason, draws, logits=logits)

    def _level(self, tree: DraftTree, chains: Sequence[int], probs: list[torch.Tensor]) -> list[int]:
        """Each chain's next node, chosen in one pass and brought to the host in one transfer."""
        origins = list(dict.fromkeys(chains))
        rows = tree.rows(origins)
        if self._sampling.greedy:
            chosen = rows.topk(min(len(chains), rows.shape[-1])).indices[0] if origins == [-1] else rows.argmax(dim=-1)
            chains = [-1] * chosen.shape[0] if origins == [-1] else chains
        else:
            warped = logits_ops.warp(rows, self._sampling)
            positions = torch.tensor([origins.index(node) for node in chains], device=rows.device)
            chosen = logits_ops.draw(warped.index_select(0, positions), self._generator)
        nodes: dict[tuple[int, int], int] = {}
        for step in zip(chains, chosen.tolist(), strict=True):
            if step not in nodes:
                nodes[step] = tree.add(*step)
        if not self._sampling.greedy:
            positions = torch.tensor([origins.index(parent) for parent, _ in nodes], device=rows.device)
            probs.append(warped.index_select(0, positions))
        return [nodes[step] for step in zip(chains, chosen.tolist(), strict=True)]

    def _together(self, probs: list[torch.Tensor]) -> torch.Tensor | None:
        """[nodes, the target's vocabulary]"""
        if not probs:
            return None
        together = torch.cat(probs)
        return torch.nn.functional.pad(together, (0, self._vocab_size - together.shape[-1]))


class Odds(NamedTuple):
    """What may become of a node's candidates [nodes, candidates], judged one after the other.

    `chances` are each candidate's of being accepted, given that all before it were refused; `rest` [nodes, vocabulary] is what
    the target's own token is drawn from when all were. Nothing in it is random.
    """

    chances: torch.Tensor
    rest: torch.Tensor


# From the target's distributions [nodes, vocabulary], the candidates' tokens [nodes, candidates], how many of these each node has
# (on the host, in descending order), and what gives the distributions [n, vocabulary] that the j-th candidates of the first n
# nodes were drawn from.
Judge = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Callable[[int, int], torch.Tensor]], Odds]


def multi_round(
    target_probs: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int], drawn_from: Callable[[int, int], torch.Tensor]
) -> Odds:
    """SpecInfer's multi-round rejection sampling (Algorithm 2): accept with min(1, p / q), else p becomes norm(max(p - q, 0)).

    A token that was drawn twice is judged twice, each time with the whole q, which a deterministic candidate has all to itself.
    """
    rest = target_probs.clone()
    chances = torch.zeros(tokens.shape, dtype=rest.dtype, device=rest.device)
    for j in range(tokens.shape[1]):
        judged = sum(count > j for count in counts)
        token = tokens[:judged, j, None]
        now, draft_probs = rest[:judged], drawn_from(j, judged)
        chances[:judged, j] = (now.gather(1, token) / draft_probs.gather(1, token))[:, 0]
        residual = (now - draft_probs).clamp_min_(0)
        mass = residual.sum(dim=-1, keepdim=True)
        rest[:judged] = torch.where(mass > 0, residual / mass, now)  # all zero through rounding: p and q are the same
    return Odds(chances, rest)


def k_sequential(
    target_probs: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int], drawn_from: Callable[[int, int], torch.Tensor]
) -> Odds:
    """SpecTr's k-sequential selection: accept each of n candidates with min(1, p / (rho q)), rho as small as can be.

    The candidates of a node are independent draws from one q. rho is the root of 1 - (1 - b)^n = rho b, b = sum min(q, p / rho),
    taken from above: what is larger is valid too, what is smaller is not.
    """
    exact = torch.float32 if target_probs.device.type == "mps" else torch.float64
    target, draft = target_probs.to(exact), drawn_from(0, len(counts)).to(exact)
    number = torch.tensor(counts, dtype=exact, device=target.device)[:, None]
    rho = number.clone()
    if several := sum(count > 1 for count in counts):
        rho[:several] = _smallest_rho(target[:several], draft[:several], number[:several])
    common = torch.minimum(draft, target / rho)
    mass = common.sum(dim=-1, keepdim=True)
    taken = torch.where(mass > 0, (1 - (1 - mass) ** number) / mass, 0)
    rest = (target - common * taken).clamp_min_(0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    return Odds(target.gather(1, tokens) / (rho * draft.gather(1, tokens)), rest)


def _smallest_rho(target: torch.Tensor, draft: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """rho [nodes, 1] between 1 and the number of candidates, by bisection."""
    low, high = torch.ones_like(number), number
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        mass = torch.minimum(draft, target / middle).sum(dim=-1, keepdim=True)
        valid = 1 - (1 - mass) ** number <= middle * mass
        high, low = torch.where(valid, middle, high), torch.where(valid, low, middle)
    return high


class TreeSampling:
    """Walk down a tree of sampled candidates: one of a node's children is accepted, or the target's own token ends the walk.

    What comes out follows the target's warped distribution, as long as the candidates of a node were drawn as `judge` assumes.
    All nodes are judged at once on the device, each with fresh random numbers, and the walk's end is found there too.
    """

    lossless: ClassVar[bool] = True

    def __init__(self, judge: Judge, sampling: SamplingParams, device: torch.device, seed: int) -> None:
        self._judge = judge
        self._sampling = sampling
        self._generator = logits_ops.make_generator(device, seed)

    @inference
    def verify(self, draft: Draft, rows: ModelOutput) -> Verdict:
        target_probs = logits_ops.warp(rows.logits, self._sampling)
        candidates = _candidates(draft)
        if not candidates:
            return _verdict(draft, [0], int(logits_ops.draw(target_probs[0], self._generator)))
        device = target_probs.device
        counts = [len(children) for _, children in candidates]
        parents = torch.tensor([parent + 1 for parent, _ in candidates], device=device)
        padded = [children + [children[0]] * (counts[0] - len(children)) for _, children in candidates]
        nodes = torch.tensor(padded, device=device)
        tokens = torch.tensor(draft.tokens, device=device)[nodes]

        def drawn_from(j: int, count: int) -> torch.Tensor:
            if draft.probs is None:
                return torch.zeros_like(target_probs[:count]).scatter_(1, tokens[:count, j, None], 1.0)
            probs: torch.Tensor = draft.probs.to(device).index_select(0, nodes[:count, j])
            return probs

        odds = self._judge(target_probs.index_select(0, parents), tokens, counts, drawn_from)
        there = torch.arange(counts[0], device=device) < torch.tensor(counts, device=device)[:, None]
        accepted = flips(odds.chances, self._generator) & there
        child = nodes.gather(1, accepted.byte().argmax(dim=1, keepdim=True))[:, 0] + 1
        onward = torch.arange(len(draft.tokens) + 1, device=device)  # where each row's node leads, itself at the walk's end
        onward[parents] = torch.where(accepted.any(dim=1), child, parents)
        end = onward
        for _ in range(len(candidates).bit_length()):  # each time twice as many steps
            end = end[end]
        target_probs.index_copy_(0, parents, odds.rest.to(target_probs.dtype))
        own = logits_ops.draw(target_probs.index_select(0, end[:1])[0], self._generator)
        *steps, token = torch.cat((onward, own[None])).tolist()
        return _verdict(draft, steps, token)


def flips(chances: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """True with these probabilities, each with a random number of its own; false where one is NaN."""
    return torch.rand(chances.shape, dtype=chances.dtype, device=chances.device, generator=generator) < chances


def _candidates(draft: Draft) -> list[tuple[int, list[int]]]:
    """Each node that has children (-1: the context) with these in the order in which they were drawn, most children first."""
    children: dict[int, list[int]] = {}
    for node in range(len(draft.tokens)) if draft.draws is None else draft.draws:
        children.setdefault(draft.parents[node], []).append(node)
    return sorted(children.items(), key=lambda entry: -len(entry[1]))


def _verdict(draft: Draft, onward: Sequence[int], token: int) -> Verdict:
    """The walk from row to row, a node's being one above its number, and the token at its end."""
    if token < 0:
        raise nan_logits("target")
    path: list[int] = []
    row = 0
    while onward[row] != row:
        row = onward[row]
        path.append(row - 1)
    last = path[-1] if path else -1
    source: Source | None = None if not draft.tokens else "bonus" if last not in draft.parents else "correction"
    return Verdict(tuple(path), token, source)
