"""Drafts whose tokens are chosen on a GPU: the host reads them later, or one by one where it decides after each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import logits_ops
from specgen.decoding.distributions import Distributions
from specgen.decoding.policy import DraftedToken, Signals
from specgen.engine.model_runner import ChoosingRunner

_ROWS = 16  # tokens; the host reads them before more are chosen


@dataclass(frozen=True, slots=True)
class ChoiceOnDevice:
    """How tokens are chosen, and what is computed for each. Implements `forward_pass.ChoiceRule`.

    Logits from `vocab_size` on are cut. `signals` are the names of numbers about a token, see `signals.compute`. `keeps_probs`:
    the distributions that tokens were drawn from are kept. `likeliest` of the likeliest tokens at each position are kept, too.
    """

    temperature: float
    top_p: float
    top_k: int
    vocab_size: int
    signals: Signals
    keeps_probs: bool
    likeliest: int

    @classmethod
    def make(cls, sampling: SamplingParams, vocab_size: int, read: Signals, *, keep_probs: bool, likeliest: int = 0) -> Self:
        """Returns the choice for these sampling parameters. It computes the signals `read`, entropy and top probability."""
        names = (read | {"entropy", "top_prob"}) - {"predicted_acceptance"}  # which is not computed from logits
        return cls(sampling.temperature, sampling.top_p, sampling.top_k, vocab_size, names, keep_probs, likeliest)

    def chooser(self, vocab_size: int, device: torch.device) -> DeviceChooser:
        return DeviceChooser(self, min(vocab_size, self.vocab_size), device)


class DeviceChooser:
    """Chooses tokens on the device, and keeps them with their signals for the host. Implements `forward_pass.TokenChooser`.

    `table` [rows, columns] has the token and its signals, in the order of `columns`, and then the likeliest tokens;
    `drawn_from` are the distributions (None if not kept), and `row` [1] is the row of the next token. `point` [1] is a random
    number in [0, 1) by which a token is drawn: the caller writes a new one before each token, since random numbers cannot be
    drawn by a CUDA graph's replay alone.
    """

    def __init__(self, choice: ChoiceOnDevice, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._signals = vocab_size, choice.signals
        self._sampling = SamplingParams(temperature=choice.temperature, top_p=choice.top_p, top_k=choice.top_k)
        self.columns = ("token", *sorted(choice.signals))
        self._likeliest = min(choice.likeliest, vocab_size)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self.point = torch.zeros(1, 1, dtype=torch.float64, device=device)
        columns = len(self.columns) + self._likeliest
        self.table = torch.zeros(_ROWS, columns, dtype=torch.float64, device=device)  # exact for tokens, unlike float32
        width = logits_ops.few_tokens(self._sampling, vocab_size) if device.type != "cpu" else 0
        self._in_few = width > 0
        self.drawn_from: Distributions | None = None
        if choice.keeps_probs:
            ids = torch.zeros(_ROWS, width, dtype=torch.int64, device=device) if width else None
            self.drawn_from = Distributions(torch.zeros(_ROWS, width or vocab_size, device=device), ids)
        self.width = 1
        self.parents: torch.Tensor | None = None
        self.state: Sequence[torch.Tensor] = [self.row]

    def __call__(self, logits: torch.Tensor, unrestricted: torch.Tensor | None = None) -> torch.Tensor:
        logits, probs = logits[:, : self._vocab_size], None
        if self._sampling.greedy:
            token = index = logits.argmax(dim=-1)
        else:
            found = Distributions.of(logits, self._sampling, in_few=self._in_few)
            probs = found.probs
            index = logits_ops.draw_at(probs, self.point)
            token = found.ids(index)
            if self.drawn_from is not None:
                self.drawn_from.write(self.row, found)
        numbers = logits_ops.signals(self._signals, logits, index, probs, unpenalised=unrestricted)
        columns = [token, *(numbers[name] for name in self.columns[1:])]
        row = torch.stack([column.double() for column in columns], dim=1)
        if self._likeliest:
            row = torch.cat((row, logits_ops.likeliest(logits, self._likeliest).double()), dim=1)
        self.table.index_copy_(0, self.row, row)
        self.row.add_(1)
        return token.clamp_min(0)  # -1, after logits with a NaN, is no token that can be run


class DeviceChain:
    """A draft that grows token by token on the device, after the context and after `unverified`: tokens that follow it.

    The host needs one transfer for each token, which `choice` chooses. If the draft `is_deferred`, it reads no token before the
    draft ends. `tokens` are those that it has read, `values` the signals of the last one; `read` names those for the policy.
    `likeliest` are the likeliest tokens at the position of each.
    """

    def __init__(
        self,
        runner: ChoosingRunner,
        choice: ChoiceOnDevice,
        generator: torch.Generator,
        context: Context,
        unverified: Sequence[int],
        read: Signals,
        eos_ids: frozenset[int],
        *,
        is_deferred: bool,
    ) -> None:
        self.tokens: list[int] = []
        self.values: dict[str, float] = {}
        self.likeliest: list[list[int]] = []
        self.is_deferred = is_deferred
        chooser = runner.chooser(choice)
        assert isinstance(chooser, DeviceChooser)
        self._runner, self._choice, self._chooser, self._generator = runner, choice, chooser, generator
        self._read_signals, self._eos_ids = read, eos_ids
        self._context, self._unverified = context, list(unverified)
        self._chosen: list[int] = []  # all tokens that the host has read
        self._statistics: list[tuple[float, float]] = []  # entropy and top probability
        self._kept: list[Distributions] = []  # of the rows that were used again
        self._count = 0  # tokens chosen
        self._first = 0  # the number of the token in row 0
        self._random_state = None if choice.temperature == 0 or not is_deferred else generator.get_state()

    def append(self) -> DraftedToken:
        """Adds a token. Returns it with its signals, or without if the draft `is_deferred`."""
        chooser = self._chooser
        if self._count == 0:
            chooser.row.zero_()
        elif self._count - self._first == _ROWS:
            self._use_rows_again()
        if self._choice.temperature != 0:
            chooser.point.uniform_(generator=self._generator)
        self._runner.choose_next(self._choice, self._context, self._unverified, self._count, self._count + 1)
        self._count += 1
        if self.is_deferred:
            return DraftedToken(self._count)
        self._read()
        return DraftedToken(self._count, {name: self.values[name] for name in self._read_signals if name in self.values})

    def drop_last(self) -> None:
        for read in (self.tokens, self._statistics, self.likeliest):
            read.pop()

    def draft(self, reason: str) -> Draft:
        """Returns the whole draft, with its `probs` padded with zeros to the target's vocabulary. `reason` says why it ended.

        A deferred draft ends at the first of `eos_ids`, and then for this reason.
        """
        if self._count == 0:
            return Draft(stop_reason=reason)
        self._read()
        if self.is_deferred:
            reason = self._end_at_eos(reason)
        self._runner.count_chosen([*self._unverified, *self._chosen[:-1]])
        if not self.tokens:
            return Draft(stop_reason=reason)
        entropies, top_probs = zip(*self._statistics, strict=True)
        return Draft.chain(self.tokens, probs=self._probs(), entropies=entropies, top_probs=top_probs, stop_reason=reason)

    def _read(self) -> None:
        """Reads the tokens that the host has not read yet, in one transfer. Raises RunError if their logits hold a NaN."""
        if len(self._chosen) == self._count:
            return
        rows = self._chooser.table[len(self._chosen) - self._first : self._count - self._first]
        for row in rows.tolist():
            token, *numbers = row
            names = self._chooser.columns[1:]
            self.values = dict(zip(names, numbers, strict=False))  # the likeliest tokens follow
            self.likeliest.append(list(map(int, numbers[len(names) :])))
            if math.isnan(self.values["entropy"]):
                raise nan_logits("draft")
            self.tokens.append(logits_ops.valid_token(int(token), "draft"))
            self._chosen.append(int(token))
            self._statistics.append((self.values["entropy"], self.values["top_prob"]))

    def _probs(self) -> torch.Tensor | None:
        """Returns the distributions that the tokens were drawn from [tokens, vocabulary]; None if they are not kept."""
        table, width = self._chooser.drawn_from, self._choice.vocab_size
        if table is None:
            return None
        drawn_from = Distributions.joined([*self._kept, table.first(self._count - self._first)]).first(len(self.tokens))
        return logits_ops.pad_probs(drawn_from.dense(width), width)

    def _use_rows_again(self) -> None:
        self._read()
        if (table := self._chooser.drawn_from) is not None:
            self._kept.append(Distributions.joined([table]))
        self._first = self._count
        self._chooser.row.zero_()

    def _end_at_eos(self, reason: str) -> str:
        """Drops what follows an end-of-sequence token, as if the draft had ended there. Returns why the draft ended."""
        end = next((index for index, token in enumerate(self.tokens, 1) if token in self._eos_ids), None)
        if end is None:
            return reason
        del self.tokens[end:], self._statistics[end:], self.likeliest[end:]
        if self._random_state is not None:  # the next draft gets the random numbers that this one should not have drawn
            self._generator.set_state(self._random_state)
            for _ in range(end):
                self._chooser.point.uniform_(generator=self._generator)
        return "eos"
