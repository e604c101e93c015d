"""The forward function of an EAGLE head: from tokens and features to predicted features and logits."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardPass, HiddenSource, ModelOutput
from specgen.engine.model import Model
from specgen.engine.parts.eagle_decoder import EagleDecoder

_ROWS = 16  # tokens whose logits have a buffer of their own


class EagleForward:
    """Runs pairs of the tokens of a pass and the features that `inputs` returns for them. A `ForwardFunction`.

    The output's `hidden_states` are the predicted features, its logits those of all the target's tokens. `vocabulary` are the
    target's ids that the head predicts, and others have the logit -inf; None: it predicts all.
    """

    def __init__(self, decoder: EagleDecoder, target: Model, vocabulary: Tensor | None, inputs: HiddenSource) -> None:
        self.model, self.inputs = decoder, inputs
        self._target, self._vocabulary = target, vocabulary
        rows = 0 if vocabulary is None else _ROWS
        self._wide = torch.full((rows, target.vocab_size), -torch.inf, dtype=decoder.dtype, device=decoder.device)

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        ids = upload(torch.tensor(forward_pass.ids), self.model.device)
        hidden = self.model(forward_pass, self._embeddings(ids), self.inputs(forward_pass))[-logits_to_keep:]
        return ModelOutput(self._logits(hidden), hidden)

    def _embeddings(self, ids: Tensor) -> Tensor:
        """Returns the embeddings [n, width] of token ids on the device."""
        table = self.model.embedding
        return self._target.embeddings(ids) if table is None else table.index_select(0, ids).to(self.model.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, vocabulary of the target] for predicted features [n, width]."""
        if not self.model.head_vocab_size:
            return self._target.head_logits(hidden)
        logits, count = self.model.logits(hidden), hidden.shape[0]
        if self._vocabulary is None:
            return logits
        fits = count <= _ROWS
        wide = self._wide[:count] if fits else self._wide.new_full((count, self._target.vocab_size), -torch.inf)
        return wide.index_copy_(1, self._vocabulary, logits)
