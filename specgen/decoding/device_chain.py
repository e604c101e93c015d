"""Drafts whose tokens are chosen on a GPU, one after the other, without the host, which reads them once, at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import logits_ops
from specgen.decoding.policy import DraftedToken
from specgen.engine.model_runner import ModelRunner

_ROWS = 16  # tokens; the host reads them before more are chosen
_STATISTICS = frozenset({"entropy", "top_prob"})


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """How tokens are chosen, and what is kept of each. Equal rules share a chooser and its graphs.

    Logits from `vocab_size` on are cut. `keeps_probs`: the distributions that tokens were drawn from are kept. So are the
    `likeliest` tokens at each position, this many.
    """

    temperature: float
    top_p: float
    top_k: int
    vocab_size: int
    keeps_probs: bool
    likeliest: int


class DeviceChooser:
    """Chooses tokens on the device, and keeps them for the host. Implements `graphs.TokenChooser`.

    `table` [rows, columns] has the token, its entropy and top probability, and then the likeliest tokens; `drawn_from` are the
    distributions (None if not kept), and `row` [1] is the row of the next token. `point` [1] is a random number in [0, 1) by
    which a token is drawn: the caller writes a new one before each token, since random numbers cannot be drawn by a CUDA graph's
    replay alone.
    """

    def __init__(self, rule: ChoiceRule, device: torch.device) -> None:
        self._vocab_size, self._likeliest = rule.vocab_size, min(rule.likeliest, rule.vocab_size)
        self._sampling = SamplingParams(temperature=rule.temperature, top_p=rule.top_p, top_k=rule.top_k)
        with torch.inference_mode(False):
            self.token = torch.zeros(1, dtype=torch.int64, device=device)
            self.row = torch.zeros(1, dtype=torch.int64, device=device)
            self.point = torch.zeros(1, 1, dtype=torch.float64, device=device)
            self.table = torch.zeros(_ROWS, 3 + self._likeliest, dtype=torch.float64, device=device)  # exact for tokens
            self.drawn_from = torch.zeros(_ROWS, rule.vocab_size, device=device) if rule.keeps_probs else None
        self.state: Sequence[torch.Tensor] = [self.row]

    def __call__(self, logits: torch.Tensor) -> None:
        logits, probs = logits[:, : self._vocab_size], None
        if self._sampling.greedy:
            token = logits.argmax(dim=-1)
        else:
            probs = logits_ops.warp(logits, self._sampling)
            token = logits_ops.draw_at(probs, self.point)
            if self.drawn_from is not None:
                self.drawn_from.index_copy_(0, self.row, probs)
        numbers = logits_ops.signals(_STATISTICS, logits, token, probs)
        row = torch.stack([token.double(), numbers["entropy"].double(), numbers["top_prob"].double()], dim=1)
        if self._likeliest:
            row = torch.cat((row, logits_ops.likeliest(logits, self._likeliest).double()), dim=1)
        self.table.index_copy_(0, self.row, row)
        self.row.add_(1)
        self.token.copy_(token.clamp_min(0))  # -1, after logits with a NaN, is no token that can be run


class DeviceChain:
    """A draft that grows token by token on the device, after the context and after `unverified`: tokens that follow it.

    `vocab_size` is the target's; that of `rule` is at most the draft's.

    The host reads no token before the draft ends, or before there are more than it keeps rows for. `likeliest` are the likeliest
    tokens at the position of each.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rule: ChoiceRule,
        generator: torch.Generator,
        context: Context,
        unverified: Sequence[int],
        eos_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.likeliest: list[list[int]] = []
        chooser = runner.chooser(rule, partial(DeviceChooser, rule, runner.device))
        assert isinstance(chooser, DeviceChooser)
        self._runner, self._rule, self._chooser, self._generator = runner, rule, chooser, generator
        self._context, self._unverified = context, list(unverified)
        self._eos_ids, self._vocab_size = eos_ids, vocab_size
        self._tokens: list[int] = []
        self._statistics: list[tuple[float, float]] = []  # entropy and top probability
        self._kept: list[torch.Tensor] = []
        self._rows = self._count = 0  # tokens chosen that the host has not read; all tokens chosen

    def append(self) -> DraftedToken:
        """Adds a token."""
        if self._rows in (0, _ROWS):
            self._read()
            self._chooser.row.zero_()
        if self._rule.temperature != 0:
            self._chooser.point.uniform_(generator=self._generator)
        self._runner.choose_next(self._rule, self._context, self._unverified, self._count)
        self._rows += 1
        self._count += 1
        return DraftedToken(self._count)

    def draft(self, reason: str) -> Draft:
        """Returns the whole draft, with its `probs` padded with zeros to the target's vocabulary. `reason` says why it ended.

        It ends at the first of `eos_ids`, and then for this reason. Raises RunError if its logits hold a NaN.
        """
        if self._count == 0:
            return Draft(stop_reason=reason)
        self._read()
        self._runner.count_chosen([*self._unverified, *self._tokens[:-1]])
        end = next((index for index, token in enumerate(self._tokens, 1) if token in self._eos_ids), None)
        tokens, statistics = self._tokens[:end], self._statistics[:end]
        self.likeliest = self.likeliest[:end]
        entropies, top_probs = zip(*statistics, strict=True)
        probs = None
        if self._kept:
            probs = logits_ops.pad_probs(torch.cat(self._kept)[: len(tokens)], self._vocab_size)
        reason = reason if end is None else "eos"
        return Draft.chain(tokens, probs=probs, entropies=entropies, top_probs=top_probs, stop_reason=reason)

    def _read(self) -> None:
        """Reads the tokens that the host has not read yet, in one transfer. Raises RunError if their logits hold a NaN."""
        if self._rows == 0:
            return
        for token, entropy, top_prob, *likeliest in self._chooser.table[: self._rows].tolist():
            if math.isnan(entropy):
                raise nan_logits("draft")
            self._tokens.append(logits_ops.valid_token(int(token), "draft"))
            self._statistics.append((entropy, top_prob))
            self.likeliest.append(list(map(int, likeliest)))
        if (table := self._chooser.drawn_from) is not None:
            self._kept.append(table[: self._rows].clone())
        self._rows = 0
