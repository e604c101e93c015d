"""MTAD: a beam search drafts, and prefixes are accepted by their joint likelihood (MTAD, sections 2.1 and 3.2). BiLD's verifier.

Multi-token joint decoding, which it approximates, makes each block of tokens the likeliest one under the target (Definition 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.base.errors import RunError, nan_logits
from specgen.base.types import Context, Draft, Mode, Round, SamplingParams, Verdict
from specgen.decoding import token_sampling
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy_base import NO_SIGNALS, DraftedToken, LengthPolicy, Signals, extend_draft
from specgen.decoding.tree import DraftTree, Tree
from specgen.decoding.verification import accept_prefix
from specgen.engine.devices import inference, upload

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.engine.forward_pass import ModelOutput

BATCH = 16  # prefixes that one pass of the exact search for a block extends


class Beam(NamedTuple):
    """A candidate continuation of the context: its last node in the draft tree and its joint log-likelihood (nats).

    `node` is -1 for the empty continuation. The likelihood is the draft model's. `finished`: the continuation ends with an
    end-of-sequence token. `signals` are numbers about its last token for the length policy.
    """

    node: int
    log_likelihood: float
    finished: bool = False
    signals: Mapping[str, float] = NO_SIGNALS


def likelihood_warping(sampling: SamplingParams) -> SamplingParams:
    """Returns the sampling parameters for joint likelihoods: `sampling`, with temperature 1 in place of 0 (greedy).

    At temperature 0 every likelihood would be 0 or 1, and MTAD would only compare tokens with the target's argmax.
    """
    return replace(sampling, temperature=1.0) if sampling.greedy else sampling


class BeamSearchDrafter(DraftModelUser):
    """Drafts by beam search with `beams` beams, and proposes the likeliest beam as a chain with its joint log-likelihoods.

    The beams are paths of one draft tree, so each step is one forward pass. By default a step keeps the likeliest continuations.
    With `beam` set to `sample`, it draws them among all continuations of all beams, without replacement, in proportion to their
    joint likelihoods (MTAD, Eq. 2); greedy decoding ignores `beam`. A beam with an end-of-sequence is not extended any more, but
    still competes with the other beams. The length policy sees the last token of the likeliest unfinished beam; the signal `prob`
    is this token's factor in the beam's joint likelihood.
    """

    def __init__(self, setup: Setup, *, beams: int, beam: str) -> None:
        super().__init__(setup)
        self._warping = likelihood_warping(setup.sampling)
        self._width = beams
        self._stochastic = beam == "sample" and not setup.sampling.greedy

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        tree = DraftTree(self._setup, context)
        likelihoods: list[float] = []  # of each node
        beams = [Beam(-1, 0.0)]

        def extend(position: int) -> DraftedToken | str:
            after = self._step(tree, beams, likelihoods, policy.signals)
            if after is None:
                return NO_CANDIDATES
            beams[:] = after
            if self._is_decided(beams):
                return "eos"
            return DraftedToken(position, max(beams, key=lambda beam: (not beam.finished, beam.log_likelihood)).signals)

        reason = extend_draft(policy, limit, extend)
        path = tree.path(max(beams, key=lambda beam: beam.log_likelihood).node)
        return tree.draft(reason, path, log_likelihoods=[likelihoods[node] for node in path])

    def _is_decided(self, beams: Sequence[Beam]) -> bool:
        """Whether the search can end: the likeliest beam is finished (other beams only get less likely), or all beams are.

        Stochastic beams always need all to be finished.
        """
        if not self._stochastic:
            return max(beams, key=lambda beam: beam.log_likelihood).finished
        return all(beam.finished for beam in beams)

    def _step(self, tree: DraftTree, beams: Sequence[Beam], likelihoods: list[float], read: Signals) -> list[Beam] | None:
        """Extends the unfinished beams by one token, and returns the beams that are kept. One transfer to the host.

        None where penalties forbid all tokens.

        `likelihoods` gets the joint log-likelihood (nats) of each new node of the tree. `read` are the signals that the length
        policy reads.
        """
        growing = [beam for beam in beams if not beam.finished]
        finished = [beam for beam in beams if beam.finished]
        logits = tree.next_logits([beam.node for beam in growing])
        if logits is None:
            return None
        vocabulary = logits.shape[-1]
        best = max(beam.log_likelihood for beam in beams)
        scale = [math.exp(beam.log_likelihood - best) for beam in (*growing, *finished)]
        before = upload(torch.tensor(scale), logits.device)  # relative to the best, so that no product of many tokens underflows
        probs = token_sampling.warp(logits, self._warping)
        joint = (before[: len(growing), None] * probs).flatten()
        joint = torch.cat((joint, before[len(growing) :])) if finished else joint
        chosen = self._ranked(joint).topk(min(self._width, joint.shape[0])).indices
        parents, tokens = chosen // vocabulary, chosen % vocabulary
        # A finished beam has no row of logits: it reads the last one, and the result is not used.
        rows = parents.clamp_max(len(growing) - 1)
        computed = tree.signals(read, logits, rows, tokens, probs)
        numbers = (parents.float(), tokens.float(), joint[chosen], *(value.float() for value in computed.values()))
        after = []
        for parent, token, relative, *values in zip(*torch.stack(numbers).tolist(), strict=True):  # ids stay exact up to 2^24
            if math.isnan(relative):
                raise nan_logits("draft")
            if not relative:  # fewer continuations are possible than there are beams
                continue
            value = best + math.log(relative)
            if parent >= len(growing):
                after.append(finished[int(token)])
                continue
            node = tree.add(growing[int(parent)].node, int(token))
            likelihoods.append(value)
            found = {name: number for name, number in zip(computed, values, strict=True) if name in read}
            after.append(Beam(node, value, int(token) in self._eos_ids, found))
        return after

    def _ranked(self, joint: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all continuations, of which the `width` highest are kept. `joint` are their joint likelihoods.

        The highest values of likelihood / exponential noise are a draw without replacement, used for stochastic beams.
        """
        if not self._stochastic:
            return joint
        return joint / torch.empty_like(joint).exponential_(generator=self._generator).clamp_min_(1e-30)


class JointLikelihoodVerifier:
    """Accepts the longest prefix with min(1, P_j / Q_j) > tau; the target then chooses the next token (MTAD, section 3.2).

    P_j and Q_j are the joint likelihoods of the first j tokens under target and draft, after temperature, top-k and top-p (at
    temperature 1 in greedy decoding). A longer prefix may pass where a shorter one fails, unless a token has likelihood 0.
    Only for chains with `log_likelihoods`. Not lossless: the output is likelier under the target than samples of the target.
    """

    def __init__(self, setup: Setup, *, tau: float) -> None:
        self._sampling, device, seed = setup.for_verifier
        self._generator = token_sampling.make_generator(device, seed)
        self._warping = likelihood_warping(self._sampling)
        self._log_tau = math.log(tau) if tau else -math.inf

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        count = self._longest(draft, output.logits[: len(draft.tokens)])
        return accept_prefix(draft, output, count, self._sampling, self._generator)

    def _longest(self, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
        """Returns the length of the longest prefix that passes the test, as a scalar on the device.

        `logits` [tokens, vocabulary] are the target's, from which it would choose each of the draft's tokens.
        """
        length, device = len(draft.tokens), logits.device
        if not length:
            return torch.zeros((), dtype=torch.long, device=device)
        tokens = upload(torch.tensor(draft.tokens), device)
        target_probs = token_sampling.warp(logits, self._warping)
        target_joint = target_probs.gather(1, tokens[:, None])[:, 0].log().cumsum(dim=0)
        draft_joint = upload(torch.tensor(draft.log_likelihoods), device)
        passes = (target_joint - draft_joint).clamp_max(0) > self._log_tau  # false for NaN, and for -inf whatever tau is
        return (passes * torch.arange(1, length + 1, device=device)).amax()


class BildVerifier:
    """Rejects the first token with -ln p > `rollback` (nats) that is not the target's likeliest, and all tokens after it.

    p is the token's probability under the target at temperature 1. The target then chooses the next token from its own
    distribution (after temperature, top-k and top-p), not from a residual. Not lossless. Chains only.
    """

    def __init__(self, setup: Setup, *, rollback: float) -> None:
        self._sampling, device, seed = setup.for_verifier
        self._generator = token_sampling.make_generator(device, seed)
        self._rollback = rollback

    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        tokens = upload(torch.tensor(draft.tokens, dtype=torch.long), output.logits.device)
        logits = output.logits[: len(draft.tokens)].float()
        log_probs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        accepted = (log_probs >= -self._rollback) | (logits.argmax(dim=-1) == tokens)  # false for NaN
        count = accepted.long().cumprod(dim=0).sum()
        return accept_prefix(draft, output, count, self._sampling, self._generator)


class FlyVerifier:
    """Accepts a token that is not the target's argmax if the text continues as before (FLy, arXiv 2511.22972). Greedy chains.

    Such a token i of n is accepted if the next `window` - 1 drafted tokens are the target's argmax after it, i < n - `window`,
    and the target was unsure there: -sum p ln p over its three likeliest tokens (nats, temperature 1) is at least `entropy`. Not
    lossless.
    """

    def __init__(self, setup: Setup, *, window: int, entropy: float) -> None:
        self._sampling, device, seed = setup.for_verifier
        self._generator = token_sampling.make_generator(device, seed)
        self._window = window
        self._entropy = entropy

    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        count = len(draft.tokens)
        tokens = upload(torch.tensor(draft.tokens, dtype=torch.long), output.logits.device)
        logits = output.logits[:count].float()
        accepted = token_sampling.argmax_token(logits) == tokens  # -1 for NaN
        judged = count - self._window  # tokens that enough others follow
        if judged > 0:
            following = accepted[1:].unfold(0, self._window - 1, 1).all(dim=-1)[:judged]
            probs = logits[:judged].softmax(dim=-1).topk(min(3, logits.shape[-1])).values
            entropies = torch.special.entr(probs).sum(dim=-1)
            accepted[:judged] |= following & (entropies >= self._entropy)
        kept = accepted.long().cumprod(0).sum()
        return accept_prefix(draft, output, kept, self._sampling, self._generator)


class JointGreedy:
    """The schedule of multi-token joint greedy decoding: each round appends the likeliest block of `k` tokens.

    A block may be shorter if it ends with an end-of-sequence token, or if fewer tokens remain to the limit. With `beams` 0 an
    exact search finds the likeliest of all blocks; otherwise a beam search of this width finds a likely one. `nodes` is the
    largest number of prefixes in the exact search for one block.

    There is no draft model and nothing to verify: the draft of a round is the tree that was searched, and its accepted path is
    the block. A round takes several passes of the target (`Round.target_passes`). The first pass of round 0 runs the prompt.
    """

    def __init__(self, setup: Setup, *, k: int, beams: int, nodes: int) -> None:
        self._length, self._beams, self._most_prefixes = k, beams, nodes

    @inference
    def _round(self, run: Run, mode: Mode) -> Round:
        run.clock.start()
        search = BlockSearch(run, min(self._length, run.remaining), self._beams, self._most_prefixes)
        draft, block = search.found("prefill" if mode == "prefill" else "verify")
        return run.commit(mode, draft, Verdict(block), target_passes=search.passes)

    def __call__(self, run: Run) -> Iterator[Round]:
        yield self._round(run, "prefill")
        while run.finish_reason is None:
            yield self._round(run, "sequential")


class BlockSearch:
    """Searches for the likeliest block of `length` tokens after a run's context; a block with an end-of-sequence token ends
    there.

    Prefixes of blocks are nodes of one tree in the target's KV cache, and a pass extends several of them by all tokens of the
    vocabulary at once. The first `length` passes are a beam search. With `beams` 0, branch and bound follows: the likeliest
    prefixes are extended until none is likelier than the best complete block. That block is then the likeliest of all, because
    each further token only lowers a likelihood.
    """

    def __init__(self, run: Run, length: int, beams: int, most_prefixes: int) -> None:
        self._run, self._length = run, length
        self._eos = upload(torch.tensor(sorted(run.eos_ids), dtype=torch.long), run.target.device)
        self._is_exact, self._width, self._most = beams == 0, beams or BATCH, most_prefixes
        self.passes = 0
        self.log_likelihood = -math.inf  # nats, of the best complete block so far
        self._last = (-1, -1)  # that block's last prefix (a node, -1: the context) and its last token
        self._tree = Tree()
        self._likelihoods: list[float] = []  # of each node, in nats, with all tokens before it

    def found(self, first_phase: str) -> tuple[Draft, tuple[int, ...]]:
        """Runs the search. Returns the searched tree as a draft, with the best block's last token added, and the nodes of the
        best block.

        The time of the first pass is counted in the phase `first_phase`, that of later passes in `verify`. Raises RunError if the
        exact search needs more than `most_prefixes` prefixes.
        """
        self._search(first_phase)
        tree = self._tree
        path = tree.path(tree.add(*self._last))
        kind = "likeliest block" if self._is_exact else "likeliest beam"
        reason = f"{kind}, {self.passes} pass{'es' * (self.passes != 1)}"
        return Draft(tree.tokens, tree.parents, stop_reason=reason), tuple(path)

    def _search(self, first_phase: str) -> None:
        """Finds the best block. Raises RunError if the exact search needs more than `most_prefixes` prefixes."""
        newest = self._extend([-1], first_phase)
        waiting = newest[:, :0]
        while True:
            newest = self._above_best(newest)
            if self.passes >= self._length or not newest.shape[1]:  # a complete block is known
                newest = self._above_best(torch.cat((newest, waiting), dim=1))
                waiting = waiting[:, :0]
                if not newest.shape[1]:
                    return
            order = newest[0].argsort(descending=True)
            if self._is_exact:
                waiting = torch.cat((waiting, newest[:, order[self._width :]]), dim=1)
            chosen = newest[:, order[: self._width]]
            if self._is_exact and len(self._tree) + chosen.shape[1] > self._most:
                raise RunError(
                    f"the likeliest block of {self._length} tokens is not found among {self._most:,} prefixes",
                    "Take a smaller k, a larger nodes, or beams=8, which approximates it",
                )
            first = len(self._tree)
            for likelihood, parent, token in zip(*chosen.tolist(), strict=True):  # ids stay exact up to 2^24
                self._likelihoods.append(likelihood)
                self._tree.add(int(parent), int(token))
            newest = self._extend(range(first, len(self._tree)), "verify")

    def _extend(self, nodes: Sequence[int], phase: str) -> torch.Tensor:
        """Runs the target on the newest nodes ([-1]: on the context alone) and keeps the best complete block.

        Returns their unfinished continuations [3, n], the likeliest first: joint log-likelihood, parent node and token. At most
        `most_prefixes` (for a beam search, `beams`) of them: the search cannot extend more.
        """
        run, tree = self._run, self._tree
        output = run.target.logits(run.context, tree.tokens, tree.parents, start=nodes[0] + 1)
        run.clock.lap(phase, on_device=True)
        self.passes += 1
        before = [self._likelihoods[node] if node >= 0 else 0.0 for node in nodes]
        joint = output.logits.float().log_softmax(dim=-1) + upload(torch.tensor(before), output.logits.device)[:, None]
        is_last = upload(torch.tensor([len(tree.path(node)) == self._length - 1 for node in nodes]), joint.device)
        ended = is_last[:, None].expand_as(joint).clone()
        ended[:, self._eos] = True
        complete = joint.masked_fill(~ended, -math.inf).flatten()
        best, index = complete.max(dim=0)
        most = self._most if self._is_exact else self._width
        values, indices = joint.masked_fill(ended, -math.inf).flatten().topk(min(most, joint.numel()))
        highest, highest_open = torch.stack((best, values[0])).tolist()
        if math.isnan(highest) or math.isnan(highest_open):
            raise nan_logits("target")
        vocabulary = joint.shape[1]
        if highest > self.log_likelihood:
            self.log_likelihood = highest
            self._last = (nodes[int(index) // vocabulary], int(index) % vocabulary)
        parents = upload(torch.tensor(list(nodes)), joint.device)[indices // vocabulary]
        run.clock.lap("sample")
        return torch.stack((values, parents.float(), (indices % vocabulary).float()))

    def _above_best(self, prefixes: torch.Tensor) -> torch.Tensor:
        """Returns those of the continuations [3, n] that are likelier than the best complete block."""
        return prefixes[:, prefixes[0] > self.log_likelihood]
