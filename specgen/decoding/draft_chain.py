"""A chain of drafted tokens that grows token by token, with what the length policy and the verifier need of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Draft, SamplingParams
from specgen.decoding import logits_ops, signals
from specgen.decoding.length_policy import DraftedToken, Signals


class DraftChain:
    """A draft that grows token by token. Each token needs one transfer to the host: its id and its signals.

    The arguments `sampling`, `vocab_size` and `keep_logits` are those of `DraftSetup`. `keep_probs`: the verifier reads the
    draft's distributions. `likeliest`: how many of the likeliest tokens at each position are kept.

    Signals are numbers such as the token's entropy. `read` names those for the length policy, `own` those for the drafter. If
    neither includes entropy or top probability, a GPU computes these for all tokens at once at the end, and copies them to the
    host only when they are read.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        generator: torch.Generator,
        read: Signals,
        own: Signals = frozenset(),
        *,
        keep_probs: bool = True,
        keep_logits: bool = False,
        likeliest: int = 0,
    ) -> None:
        self.tokens: list[int] = []
        self.values: dict[str, float] = {}  # the computed signals of the last token
        self._sampling, self._vocab_size, self._generator = sampling, vocab_size, generator
        self._keep_probs, self._keep_logits = keep_probs, keep_logits
        self._read, self._computed = read, read | own
        self._logits: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []
        self._statistics: list[tuple[float, float]] = []  # entropy and top probability
        self._count_likeliest, self._likeliest = likeliest, list[torch.Tensor]()

    @property
    def likeliest(self) -> list[list[int]]:
        """The likeliest tokens at each position, as many as the constructor's argument says, see `logits_ops.likeliest`."""
        return torch.stack(self._likeliest).tolist() if self._likeliest else []

    def append(
        self,
        logits: torch.Tensor,
        predicted_acceptance: torch.Tensor | None = None,
        unpenalised: torch.Tensor | None = None,
    ) -> DraftedToken:
        """Adds a token chosen from the logits [vocabulary]: the likeliest in greedy decoding, otherwise drawn at random.

        `predicted_acceptance` is the predictor's acceptance probability for the token; None without a predictor. `unpenalised`
        are the logits of the draft model's own distribution, without penalties; None if `logits` are. They may have more columns:
        see `ModelOutput.unrestricted`.
        """
        probs = None
        if not self._sampling.greedy:
            probs = logits_ops.warp(logits, self._sampling)
            if self._keep_probs:
                self._probs.append(probs)
        on_cpu = logits.is_cpu
        if self._keep_logits or not on_cpu:
            self._logits.append((logits if unpenalised is None else unpenalised).clone())  # valid until the runner's next call
        if self._count_likeliest:
            self._likeliest.append(logits_ops.likeliest(logits, self._count_likeliest))
        choose = self._choose_on_cpu if on_cpu else self._choose
        token, self.values = choose(logits, probs, predicted_acceptance, unpenalised)
        if "entropy" in self.values:
            self._statistics.append((self.values["entropy"], self.values["top_prob"]))
            if math.isnan(self.values["entropy"]):
                raise nan_logits("draft")
        self.tokens.append(logits_ops.valid_token(token, "draft"))
        return DraftedToken(len(self.tokens), {name: self.values[name] for name in self._read if name in self.values})

    def _choose(
        self,
        logits: torch.Tensor,
        probs: torch.Tensor | None,
        predicted_acceptance: torch.Tensor | None,
        unpenalised: torch.Tensor | None,
    ) -> tuple[int, dict[str, float]]:
        """Returns a token drawn from `probs` [vocabulary] (None: the likeliest), and its signals by name. One transfer."""
        token = logits_ops.argmax_token(logits) if probs is None else logits_ops.draw(probs, self._generator)
        computed = signals.compute(self._computed, logits, token, probs, predicted_acceptance, unpenalised)
        chosen, *numbers = logits_ops.to_host(token, *computed.values())
        return int(chosen), dict(zip(computed, numbers, strict=True))

    def _choose_on_cpu(
        self,
        logits: torch.Tensor,
        probs: torch.Tensor | None,
        predicted_acceptance: torch.Tensor | None,
        unpenalised: torch.Tensor | None,
    ) -> tuple[int, dict[str, float]]:
        """Does what `_choose` does, on a CPU: there entropy and top probability come with the argmax in one function."""
        token, entropy, top_prob = logits_ops.greedy_statistics(logits if unpenalised is None else unpenalised)
        values = {"entropy": entropy, "top_prob": top_prob}
        if token >= 0 and probs is not None:
            token = logits_ops.draw_on_cpu(probs, self._generator)
        elif token >= 0 and unpenalised is not None:
            token = logits_ops.argmax_tokens(logits[None])[0]
        if probs is None and unpenalised is None:
            values["prob"] = top_prob
        if others := self._computed - values.keys():
            computed = signals.compute(others, logits, torch.tensor(token), probs, predicted_acceptance, unpenalised)
            values |= {name: value.item() for name, value in computed.items()}
        return token, values

    def drop_last(self) -> None:
        for kept in (self.tokens, self._logits, self._probs, self._statistics, self._likeliest):
            if kept:
                kept.pop()

    def draft(self, reason: str) -> Draft:
        """Returns the whole draft, with its `probs` padded with zeros to the target's vocabulary. `reason` says why it ended."""
        if not self.tokens:
            return Draft(stop_reason=reason)
        entropies: Sequence[float]
        top_probs: Sequence[float]
        if self._statistics:
            entropies, top_probs = zip(*self._statistics, strict=True)
        else:  # tokens are -1 where the logits hold a NaN, so these numbers hold none
            entropies, top_probs = map(DeviceNumbers, logits_ops.entropy_and_top_prob(torch.stack(self._logits)))
        return Draft.chain(
            self.tokens,
            probs=logits_ops.pad_probs(torch.stack(self._probs), self._vocab_size) if self._probs else None,
            entropies=entropies,
            top_probs=top_probs,
            stop_reason=reason,
            logits=torch.stack(self._logits)[:, : self._vocab_size] if self._keep_logits else None,
        )


class DeviceNumbers(Sequence[float]):
    """A vector [n] of numbers on a device, which is copied to the host when it is first read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._on_host: list[float] | None = None

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...

    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if self._on_host is None:
            self._on_host = self._values.tolist()
        return self._on_host[index]
