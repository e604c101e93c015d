"""Runs Medusa heads (Cai et al. 2024, section 2.1): they predict several tokens at once from one
hidden state of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.base.types import Context
from specgen.engine.block_runner import BlockRunner
from specgen.engine.forward_pass import LayerCall, ModelOutput
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner, Runners
from specgen.engine.native.linear import LinearFactory, Multiply
from specgen.engine.native.native_model import NativeModel
from specgen.engine.parts.part import MedusaWeights, of_all_tokens, part_linears, part_weight
from specgen.engine.penalties import PenaltyProcessor


def _block(
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]], model: Model, make_linear: LinearFactory
) -> Multiply:
    """Returns a function that computes W h + b of one block of each of K heads, for states h [K, 1,
    width]. `blocks` are W and b of each head."""
    matrices = [
        part_weight(matrix.to(model.device), model.dtype, make_linear) for matrix, _ in blocks
    ]
    biases = [bias.to(model.device, model.dtype) for _, bias in blocks]
    if make_linear.kernels is not None:
        linears = [make_linear(*block) for block in zip(matrices, biases, strict=True)]
        return lambda states: torch.stack(
            [linear(state) for linear, state in zip(linears, states, strict=True)]
        )
    joined = torch.stack([matrix.t() for matrix in matrices])
    joined_biases = torch.stack([bias[None] for bias in biases])
    return lambda states: torch.baddbmm(joined_biases, states, joined)


class MedusaRunner(BlockRunner):
    """Runs K Medusa heads as a draft model of the target `model`, whose runner is `target`. Row m
    is computed by head m.

    All heads read the hidden state from which `target` predicted the context's last token.
    """

    draws = True
    drafts_blocks = False  # heads are small: what matters of their cost is that of their tokens

    def __init__(
        self,
        weights: MedusaWeights,
        model: Model,
        target: ModelRunner,
        penalties: PenaltyProcessor | None,
    ) -> None:
        super().__init__(target, len(weights.blocks), penalties)
        self.rank_accuracies = weights.rank_accuracies
        self._model = model
        self._target = target
        make_linear = part_linears(model)
        # each entry computes W h + b of all heads' blocks with the same index, [K, 1, width]
        self._blocks = [
            _block(blocks, model, make_linear) for blocks in zip(*weights.blocks, strict=True)
        ]
        self._lm_heads = [
            make_linear(part_weight(head.to(model.device), model.dtype, make_linear))
            for head in weights.lm_heads or ()
        ]
        self._vocabulary = (
            None if weights.vocabulary is None else weights.vocabulary.to(model.device)
        )

    def rows(self, context: Context, count: int) -> ModelOutput:
        return ModelOutput(self._of_all_heads(self._hidden_state(context)))

    def _of_all_heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [K, vocabulary] of all heads for the target's hidden state [width]
        after the final norm."""
        states = hidden.to(self._model.dtype).expand(self.longest_draft, 1, -1)
        for block in self._blocks:
            states = states + F.silu(block(states))
        if not self._lm_heads:
            return self._model.head_logits(states[:, 0])
        logits = torch.cat(
            [head(state) for head, state in zip(self._lm_heads, states, strict=True)]
        )
        return of_all_tokens(logits, self._vocabulary, self.vocab_size)

    def _hidden_state(self, context: Context) -> torch.Tensor:
        """Returns the hidden state [width] from which the target predicts the last token of the
        context.

        It is a by-product of the target's last pass. After an interruption, or for a context of
        which the target has not run all tokens but the last, the target runs the last of these
        again.
        """
        hidden = self._target.last_hidden_state(context)
        if hidden is None:
            before = Context(context.ids[:-1])
            before.prompt_length = min(context.prompt_length, len(before))
            states = self._target.logits(before).hidden_states
            assert states is not None
            hidden = states[-1]
        return hidden


@torch.no_grad()
def make_runners(
    weights: MedusaWeights,
    model: Model,
    target: ModelRunner,
    penalties: Callable[[], PenaltyProcessor | None],
) -> Runners:
    """Returns a runner of the target and one of its Medusa heads. `penalties` makes a processor of
    the target's penalties.

    `target` is the target's own runner. It is returned unless transformers runs the model: since
    transformers' forward passes return no hidden states, a runner that runs the layers one by one
    then takes its place. Raises SpecgenError if the layers of such a model cannot be run so.
    """
    if not isinstance(model, NativeModel):
        model.check_layers("medusa")
        layers = [LayerCall(layer) for layer in range(model.shape.num_layers)]
        target = ModelRunner(model, penalties(), model.forward(layers))
    return Runners(target, MedusaRunner(weights, model, target, penalties()))
