"""Chains whose tokens are chosen on a GPU, one after the other. The host reads the tokens at the
end of a draft, not one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import token_sampling
from specgen.decoding.drafting import Setup
from specgen.decoding.policy_base import DraftedToken
from specgen.engine.model_runner import ModelRunner

_ROWS = 16  # tokens; the host reads them before more are chosen


class DeviceChooser:
    """Chooses tokens on the device, and keeps them there for the host to read. Implements
    `graphs.TokenChooser`.

    Logits from column `vocab_size` on are ignored. A row of `table` [rows, 3] has a chosen token,
    and the entropy (nats) and largest probability of its distribution; the same row of `drawn_from`
    [rows, vocabulary] has the distribution it was drawn from (None in greedy decoding). `row` [1]
    is the row for the next token. `point` [1, 1] is a random number in [0, 1) that decides which
    token is drawn; the caller writes a new one before each token, since a replayed CUDA graph
    cannot draw random numbers alone.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int, device: torch.device) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        with torch.inference_mode(False):
            self.token = torch.zeros(1, dtype=torch.int64, device=device)
            self.row = torch.zeros(1, dtype=torch.int64, device=device)
            self.point = torch.zeros(1, 1, dtype=torch.float64, device=device)
            # exact for tokens
            self.table = torch.zeros(_ROWS, 3, dtype=torch.float64, device=device)
            self.drawn_from = (
                None if sampling.greedy else torch.zeros(_ROWS, vocab_size, device=device)
            )
        self.state: Sequence[torch.Tensor] = [self.row]

    def __call__(self, logits: torch.Tensor) -> None:
        logits = logits[:, : self._vocab_size]
        if self.drawn_from is None:
            token = logits.argmax(dim=-1)
        else:
            probs = token_sampling.warp(logits, self._sampling)
            token = token_sampling.draw_at(probs, self.point)
            self.drawn_from.index_copy_(0, self.row, probs)
        entropy, top_prob = token_sampling.entropy_and_top_prob(logits)
        self.table.index_copy_(
            0, self.row, torch.stack([token.double(), entropy.double(), top_prob.double()], dim=1)
        )
        self.row.add_(1)
        # -1, after logits with a NaN, is no token that can be run
        self.token.copy_(token.clamp_min(0))


class DeviceChain:
    """A draft that grows token by token on a GPU, after the context and after `unverified`, which
    are tokens drafted earlier.

    The host reads the tokens when the draft ends, and during the draft whenever the table for
    unread tokens is full.
    """

    def __init__(
        self,
        runner: ModelRunner,
        setup: Setup,
        generator: torch.Generator,
        context: Context,
        unverified: Sequence[int],
    ) -> None:
        sampling = SamplingParams(**setup.sampling.warping)
        width = min(runner.vocab_size, setup.vocab_size)
        self._rule = sampling, width  # equal rules share a chooser and its graphs
        chooser = runner.chooser(self._rule, partial(DeviceChooser, sampling, width, runner.device))
        assert isinstance(chooser, DeviceChooser)
        self._runner = runner
        self._setup = setup
        self._chooser = chooser
        self._generator = generator
        self._context = context
        self._unverified = list(unverified)
        self._read_rows: list[list[float]] = []  # token, entropy and top probability
        self._probs: list[torch.Tensor] = []
        self._count = 0  # chosen tokens
        self._unread = 0  # those of them that the host has not read

    def append(self, position: int) -> DraftedToken:
        """Starts the choice of the draft's next token on the device, greedy or sampled as the run
        is, and does not wait for it.

        `position` in the draft counts from 1. The returned token has neither an id nor signals:
        `draft` reads the ids later. Raises RunError if the logits of earlier tokens held a NaN,
        which is found when their table is full and read.
        """
        if self._unread in (0, _ROWS):
            self._read()
            self._chooser.row.zero_()
        if not self._setup.sampling.greedy:
            self._chooser.point.uniform_(generator=self._generator)
        self._runner.choose_next(self._rule, self._context, self._unverified, self._count)
        self._unread += 1
        self._count += 1
        return DraftedToken(position)

    def draft(self, reason: str) -> Draft:
        """Returns the whole draft, with its `probs` padded with zeros to the target's vocabulary.

        If the draft has an end-of-sequence token, it is cut after the first one, with the reason
        `eos`; otherwise `reason` says why it ended. Raises RunError if logits held a NaN.
        """
        if self._count == 0:
            return Draft(stop_reason=reason)
        self._read()
        tokens = [
            token_sampling.valid_token(int(token), "draft") for token, _, _ in self._read_rows
        ]
        self._runner.count_chosen([*self._unverified, *tokens[:-1]])
        end = next(
            (position for position, token in enumerate(tokens, 1) if token in self._setup.eos_ids),
            None,
        )
        kept = self._read_rows[:end]
        probs = None
        if self._probs:
            probs = token_sampling.pad_probs(
                torch.cat(self._probs)[: len(kept)], self._setup.vocab_size
            )
        return Draft.chain(
            tokens[:end],
            probs=probs,
            entropies=[entropy for _, entropy, _ in kept],
            top_probs=[top_prob for _, _, top_prob in kept],
            stop_reason=reason if end is None else "eos",
        )

    def _read(self) -> None:
        """Reads the tokens that the host has not read yet, in one transfer. Raises RunError if
        their logits hold a NaN."""
        rows = self._chooser.table[: self._unread].tolist()
        if any(math.isnan(entropy) for _, entropy, _ in rows):
            raise nan_logits("draft")
        self._read_rows += rows
        if self._chooser.drawn_from is not None and self._unread:
            self._probs.append(self._chooser.drawn_from[: self._unread].clone())
        self._unread = 0
