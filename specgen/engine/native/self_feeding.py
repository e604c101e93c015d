"""Draft steps of the native decoder that need no host: a token is chosen on the device, run, and the next one chosen."""

from __future__ import annotations

import torch

from specgen.engine.forward_pass import ChoiceRule
from specgen.engine.inference_mode import inference
from specgen.engine.native.native_model import NativeForward
from specgen.engine.native.static_pass import StaticPass


class TokenChoice:
    """Chooses tokens by a rule. `run` reads the buffer `logits` [1, vocabulary] and writes the buffer `token` [1].

    `state` are the tensors that it both reads and changes.
    """

    def __init__(self, rule: ChoiceRule, forward: NativeForward) -> None:
        model, parts = forward.model, forward.parts
        assert parts is not None
        vocab_size = parts.head.out_features
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be written outside it
            self.chooser = rule.chooser(vocab_size, model.device)
            self.logits = torch.zeros(1, vocab_size, dtype=model.dtype, device=model.device)
            self.token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.state = self.chooser.state

    @inference
    def run(self) -> None:
        self.choose(self.logits)

    def choose(self, logits: torch.Tensor) -> None:
        """Chooses the next token from logits [1, vocabulary]."""
        self.token.copy_(self.chooser(logits))


class SelfFeedingPass:
    """A static pass over the one token that `choice` has chosen. It chooses the next token from the logits.

    Used as `load`, `run`, `has_run`. `run` can be captured and replayed as `StaticPass.run` can; `state` are the tensors that it
    both reads and changes. Repeated for the next positions, it needs nothing from the host.
    """

    def __init__(self, static: StaticPass, choice: TokenChoice) -> None:
        self._static, self._choice = static, choice
        self._position = -1  # the index in the KV cache of the next token, if the static pass has it on the device
        self.state = [static.inputs, choice.token, *choice.state]

    def load(self, position: int) -> None:
        """Prepares a run of the token chosen last, at this index of the KV cache. Copies nothing right after the one before."""
        if position != self._position:
            self._static.load_position(position)
        self._position = -1  # unknown, until a run is complete

    def has_run(self, position: int) -> None:
        """Notes that a run at this index is complete: the inputs of the next index are on the device."""
        self._position = position + 1

    @inference
    def run(self) -> None:
        static, choice = self._static, self._choice
        static.feed(choice.token)
        static.run()
        static.advance()
        choice.choose(static.logits)
