"""Multi-token joint greedy decoding: each block of tokens is the likeliest one under the target
(MTAD, Definition 3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from specgen.base.errors import RunError, nan_logits
from specgen.base.types import Draft, Mode, Round, Verdict
from specgen.decoding.tree import Tree
from specgen.engine.devices import inference, upload

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.decoding.run import Run

BATCH = 16  # prefixes that one pass of the exact search for a block extends


class JointGreedy:
    """The schedule of multi-token joint greedy decoding: each round appends the likeliest block of
    `k` tokens.

    A block may be shorter if it ends with an end-of-sequence token, or if fewer tokens remain to
    the limit. With `beams` 0 an exact search finds the likeliest of all blocks; otherwise a beam
    search of this width finds a likely one. `nodes` is the largest number of prefixes in the exact
    search for one block.

    There is no draft model and nothing to verify: the draft of a round is the tree that was
    searched, and its accepted path is the block. A round takes several passes of the target
    (`Round.target_passes`). The first pass of round 0 runs the prompt.
    """

    def __init__(self, setup: Setup, *, k: int, beams: int, nodes: int) -> None:
        self._length = k
        self._beams = beams
        self._most_prefixes = nodes

    @inference
    def _round(self, run: Run, mode: Mode) -> Round:
        run.clock.start()
        search = BlockSearch(
            run, min(self._length, run.remaining), self._beams, self._most_prefixes
        )
        draft, block = search.run("prefill" if mode == "prefill" else "verify")
        return run.commit(mode, draft, Verdict(block), target_passes=search.passes)

    def __call__(self, run: Run) -> Iterator[Round]:
        yield self._round(run, "prefill")
        while run.finish_reason is None:
            yield self._round(run, "sequential")


class BlockSearch:
    """Searches for the likeliest block of `length` tokens after a run's context; a block with an
    end-of-sequence token ends there.

    Prefixes of blocks are nodes of one tree in the target's KV cache, and a pass extends several of
    them by all tokens of the vocabulary at once. The first `length` passes are a beam search. With
    `beams` 0, branch and bound follows: the likeliest prefixes are extended until none is likelier
    than the best complete block. That block is then the likeliest of all, because each further
    token only lowers a likelihood.
    """

    def __init__(self, run: Run, length: int, beams: int, most_prefixes: int) -> None:
        self._run = run
        self._length = length
        self._eos = upload(torch.tensor(sorted(run.eos_ids), dtype=torch.long), run.target.device)
        self._is_exact = beams == 0
        self._width = beams or BATCH
        self._most = most_prefixes
        self.passes = 0
        self.log_likelihood = -math.inf  # nats, of the best complete block so far
        # that block's last prefix (a node, -1: the context) and its last token
        self._last = (-1, -1)
        self._tree = Tree()
        self._likelihoods: list[float] = []  # of each node, in nats, with all tokens before it

    def run(self, first_phase: str) -> tuple[Draft, tuple[int, ...]]:
        """Runs the search. Returns the searched tree as a draft, with the best block's last token
        added, and the nodes of the best block.

        The time of the first pass is counted in the phase `first_phase`, that of later passes in
        `verify`. Raises RunError if the exact search needs more than `most_prefixes` prefixes, or
        if logits hold a NaN.
        """
        self._search(first_phase)
        tree = self._tree
        path = tree.path(tree.add(*self._last))
        what = "likeliest block" if self._is_exact else "likeliest beam"
        reason = f"{what}, {self.passes} pass{'es' * (self.passes != 1)}"
        return Draft(tree.tokens, tree.parents, stop_reason=reason), tuple(path)

    def _search(self, first_phase: str) -> None:
        """Finds the best block. Raises RunError if the exact search needs more than `most_prefixes`
        prefixes."""
        newest = self._extend([-1], first_phase)
        waiting = newest[:, :0]
        while True:
            newest = self._above_best(newest)
            is_complete = self.passes >= self._length or not newest.shape[1]
            if is_complete:  # a complete block is known: what waits may be likelier
                newest = self._above_best(torch.cat((newest, waiting), dim=1))
                waiting = waiting[:, :0]
                if not newest.shape[1]:
                    return
            order = newest[0].argsort(descending=True)
            if self._is_exact:
                waiting = torch.cat((waiting, newest[:, order[self._width :]]), dim=1)
            chosen = newest[:, order[: self._width]]
            if self._is_exact and len(self._tree) + chosen.shape[1] > self._most:
                problem = (
                    f"the likeliest block of {self._length} tokens is not found among "
                    f"{self._most:,} prefixes"
                )
                hint = "Take a smaller k, a larger nodes, or beams=8, which approximates it"
                raise RunError(problem, hint)

            first = len(self._tree)
            # the ids are exact: a float32 holds integers up to 2^24
            for likelihood, parent, token in zip(*chosen.tolist(), strict=True):
                self._likelihoods.append(likelihood)
                self._tree.add(int(parent), int(token))
            newest = self._extend(range(first, len(self._tree)), "verify")

    def _extend(self, nodes: Sequence[int], phase: str) -> torch.Tensor:
        """Runs the target on the newest nodes ([-1]: on the context alone) and keeps the best
        complete block.

        Returns their unfinished continuations [3, n], the likeliest first: joint log-likelihood,
        parent node and token. At most `most_prefixes` (for a beam search, `beams`) of them: the
        search cannot extend more.
        """
        run = self._run
        tree = self._tree
        output = run.target.logits(run.context, tree.tokens, tree.parents, start=nodes[0] + 1)
        run.clock.lap(phase, on_device=True)
        self.passes += 1

        before = [self._likelihoods[node] if node >= 0 else 0.0 for node in nodes]
        log_probs = output.logits.float().log_softmax(dim=-1)
        joint = log_probs + upload(torch.tensor(before), log_probs.device)[:, None]

        are_last = [len(tree.path(node)) == self._length - 1 for node in nodes]
        is_last = upload(torch.tensor(are_last), joint.device)
        ended = is_last[:, None].expand_as(joint).clone()
        ended[:, self._eos] = True
        complete = joint.masked_fill(~ended, -math.inf).flatten()
        best, index = complete.max(dim=0)
        unfinished = joint.masked_fill(ended, -math.inf).flatten()
        most = self._most if self._is_exact else self._width
        values, indices = unfinished.topk(min(most, joint.numel()))
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
        """Returns those of the continuations [3, n] that are likelier than the best complete
        block."""
        return prefixes[:, prefixes[0] > self.log_likelihood]
