"""Draft steps of the native decoder that need no host: tokens are chosen on the device, run, and the next ones chosen."""

from __future__ import annotations

import torch

from specgen.engine.forward_pass import ChoiceRule
from specgen.engine.inference_mode import inference
from specgen.engine.native.static_pass import StaticPass, StaticWork


class TokenChoice:
    """Chooses tokens by a rule from the logits of `forward`, and keeps the hidden states from which they were predicted.

    `run` reads the buffer `logits` [1, vocabulary] and writes the buffer `tokens` [width]; `hidden` [width, ...] is None if
    `forward` needs none. `state` are the tensors that a choice both reads and changes.
    """

    def __init__(self, rule: ChoiceRule, forward: StaticWork) -> None:
        model, widths = forward.model, forward.widths
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be written outside it
            self.chooser = rule.chooser(widths.logits, model.device)
            self.width = width = self.chooser.width
            self.logits = torch.zeros(1, widths.logits, dtype=model.dtype, device=model.device)
            self.tokens = torch.zeros(width, dtype=torch.int64, device=model.device)
            self.hidden = None
            if widths.inputs:
                self.hidden = torch.zeros(width, widths.inputs, dtype=model.dtype, device=model.device)
        self.state = [*self.chooser.state, *([] if self.hidden is None else [self.hidden])]

    def load(self, logits: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Writes what `run` reads: logits [1, vocabulary] and the hidden state [1, ...] that they were computed from."""
        self.logits.copy_(logits)
        if self.hidden is not None and hidden is not None:
            self.hidden.copy_(hidden.expand_as(self.hidden))

    @inference
    def run(self) -> None:
        self.tokens.copy_(self.chooser(self.logits))  # all follow the one row, of which `hidden` has copies

    def choose(self, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Chooses the next tokens from logits [width, vocabulary] and the hidden states [width, ...] that they come from."""
        self.tokens.copy_(self.chooser(logits))
        if self.hidden is not None:
            parents = self.chooser.parents
            self.hidden.copy_(hidden if parents is None else hidden.index_select(0, parents))


class SelfFeedingPass:
    """A static pass over the tokens that `choice` has chosen. It chooses the next ones from the logits.

    Used as `load`, `run`, `has_run`. `run` can be captured and replayed as `StaticPass.run` can; `state` are the tensors that it
    both reads and changes. Repeated for the next tokens or levels of a tree, it needs nothing from the host.
    """

    def __init__(self, static: StaticPass, choice: TokenChoice) -> None:
        self._static, self._choice = static, choice
        self._position = -1  # the index in the KV cache of the next tokens, if the static pass has it on the device
        self.state = [static.inputs, choice.tokens, *choice.state]

    @property
    def logits(self) -> torch.Tensor:
        """The buffer [width, vocabulary] of the logits that `run` chooses from."""
        return self._static.logits

    def load(self, position: int, *, is_root: bool) -> None:
        """Prepares a run of the tokens chosen last, from this index of the KV cache on. Copies nothing right after a run before.

        `is_root`: no token before them is part of their tree.
        """
        if position != self._position or (is_root and self._choice.chooser.parents is not None):
            self._static.load_position(position)
        self._position = -1  # unknown, until a run is complete

    def has_run(self, position: int) -> None:
        """Notes that a run from this index on is complete: the inputs of the next one are on the device."""
        self._position = position + self._static.width

    @inference
    def run(self) -> None:
        static, choice = self._static, self._choice
        static.feed(choice.tokens, choice.hidden)
        static.run()
        choice.choose(static.logits, static.hidden)
        static.advance(choice.chooser.parents)
