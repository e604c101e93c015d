"""Training of heads that predict all tokens of a draft at once: Medusa's (Medusa-1: Cai et al.
2024) and DSpark's.

DSpark (see `engine.parts.block`): blocks begin at random tokens of a text, their anchors. A block
sees the text before its anchor and itself, as in drafting. The loss is the divergence from the
target's own predictions, with equal weights for all positions of a block, and the error of the
prediction of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from specgen.engine.forward_pass import BatchPass
from specgen.engine.native.linear import trained_linear
from specgen.engine.parts.block import (
    CONFIDENCE,
    CONFIDENCE_BIAS,
    CONTEXT_NORM,
    SUCCESSOR_HEAD,
    SUCCESSORS,
    BlockLayers,
    ContextAttention,
    ContextLayer,
)
from specgen.engine.parts.block_layouts import default_layers
from specgen.engine.parts.eagle import FC, FIRST_NORM
from specgen.engine.parts.part import BlockWeights, MedusaWeights
from specgen.train.heads import HeadObjective, LayerObjective
from specgen.train.loop import IGNORED, PackedBatch
from specgen.train.start import LinearMap, least_squares
from specgen.train.states import Predictions, TargetStates, reachable
from specgen.train.task import TrainingTask
from specgen.train.texts import Text

HEADS = 4  # as many as EESD compares with (4.1); the published trees use as many
BLOCK = 8  # tokens in a draft
TAPS = 5  # hidden states of the target that the head reads
RANK = 64  # of the Markov head
NOISE = 0.01  # standard deviation of initial weights of the other hidden states
ANCHORS = 5.3  # tokens of text for each block in training: 24 blocks in 128 tokens


class BlockObjective(LayerObjective):
    """Trains a DSpark head with two layers, which begin as copies of the target's last ones, and a
    Markov head.

    Without these copies, the head accepts half as much after the same time. At first it reads the
    hidden state that enters the first of the copied layers in the target, and the Markov head says
    nothing.
    """

    kind = "block"
    depths = BLOCK
    layers = 2

    def initial_weights(
        self,
        texts: Sequence[Text],
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        made = super().initial_weights(texts, generator)
        width = self.width
        vocabulary = self.vocabulary
        padding = self.target.files.raw.get("pad_token_id")
        # a token that texts do not hold
        self._mask = padding if isinstance(padding, int) else vocabulary - 1
        fused = torch.randn(width, TAPS * width, generator=generator) * NOISE
        fused[:, -width:] += torch.eye(width)
        made[FC] = fused
        made[CONTEXT_NORM] = made[FIRST_NORM].clone()
        made[SUCCESSORS] = torch.randn(vocabulary, RANK, generator=generator) / RANK**0.5
        made[SUCCESSOR_HEAD] = torch.zeros(vocabulary, RANK)
        made[CONFIDENCE] = torch.zeros(1, width + RANK)
        made[CONFIDENCE_BIAS] = torch.zeros(1)
        return made

    def __init__(self, task: TrainingTask, target: object) -> None:
        super().__init__(task, target)  # type: ignore[arg-type]
        self.taps = tuple(
            min(max(layer, 0), self.num_layers - 1) + 1
            for layer in default_layers(self.num_layers, TAPS)
        )

    def predict(
        self,
        batch: PackedBatch,
        states: TargetStates,
        rng: Random | None,
    ) -> Predictions:
        """Runs blocks at random anchors; with `rng` None at all tokens."""
        layers = BlockLayers(
            self._weights(), self.device, torch.float32, trained_linear, 1.0, ContextLayer
        )
        sequences, tokens = batch.ids.shape
        anchors = self._anchors(batch, rng)  # [sequences, blocks]
        blocks = anchors.shape[1]
        self._set_context(layers, batch, states)
        offsets = torch.arange(BLOCK, device=self.device)
        # the token at each row's position, perhaps beyond the end
        rows = (anchors[:, :, None] + offsets).flatten(1)
        at_anchors = batch.positions.gather(1, anchors)
        positions = (at_anchors[:, :, None] + offsets).flatten(1)
        mask = self.model.embeddings(torch.tensor([self._mask], device=self.device)).float()
        hidden = mask.expand(sequences, blocks, BLOCK, self.width).clone()
        hidden[:, :, 0] = states.embeddings.gather(
            1, anchors[:, :, None].expand(-1, -1, self.width)
        )
        key_positions = torch.cat((batch.positions, positions), dim=1)
        visible = self._visible(batch, anchors)
        inputs = self.inputs.batched(BatchPass(rows, positions, visible, key_positions))
        outputs = layers(hidden.flatten(0, 2), inputs)
        first = torch.arange(sequences, device=self.device)[:, None] * tokens
        inside = rows.clamp_max(tokens - 1)
        segments = batch.segments.gather(1, anchors).repeat_interleave(BLOCK, dim=1)
        is_text = (rows < tokens) & (batch.segments.gather(1, inside) == segments)
        chosen = (is_text & (batch.labels.gather(1, inside) != IGNORED)).flatten().nonzero()[:, 0]
        sources = (first + inside).flatten()[chosen]
        before = F.embedding(batch.ids.flatten()[sources], self.parameters[SUCCESSORS])
        depths = offsets.repeat(sequences * blocks)[chosen]
        return Predictions(torch.cat((outputs[chosen], before), dim=-1), sources, depths)

    def logits(
        self,
        outputs: Tensor,
        depths: Tensor,
    ) -> Tensor:
        states, before = torch.split(outputs, [self.width, RANK], dim=-1)
        return (
            self.target_logits(states) + F.linear(before, self.parameters[SUCCESSOR_HEAD]).float()
        )

    def losses(self, outputs: Tensor, *labels: Tensor) -> Tensor:
        depths, top_k_ids, log_probs = labels
        with self.autocast():
            logits = self.logits(outputs, depths)
            divergences = self.row_losses(logits, top_k_ids, log_probs)
            drafted = logits.detach().log_softmax(dim=-1).gather(1, top_k_ids)
            overlap = torch.minimum(drafted, log_probs).exp().sum(dim=-1).clamp_max(1.0)
            guess = F.linear(
                outputs.detach(), self.parameters[CONFIDENCE], self.parameters[CONFIDENCE_BIAS]
            )[:, 0]
            errors = F.binary_cross_entropy_with_logits(guess.float(), overlap, reduction="none")
        return (divergences + errors).sum()

    def weights(self, ranks: Sequence[Sequence[float]]) -> BlockWeights:
        return self._weights()

    def _weights(self) -> BlockWeights:
        tensors = (
            self.parameters
            if torch.is_grad_enabled()
            else {name: weight.detach() for name, weight in self.parameters.items()}
        )
        # in training, the head reads what the target computes with these
        names = "embedding_scale", "logit_scale", "logit_cap"
        scales = {
            name: getattr(self.model.shape, name)
            for name in names
            if hasattr(self.model.shape, name)
        }
        return BlockWeights(
            self.config, tensors, BLOCK, self._mask, tuple(self.taps), True, False, **scales
        )

    def _anchors(
        self,
        batch: PackedBatch,
        rng: Random | None,
    ) -> Tensor:
        """Returns the indices [sequences, blocks] of the tokens with which blocks begin, in each
        sequence."""
        sequences, tokens = batch.ids.shape
        if rng is None:
            return torch.arange(tokens, device=self.device).expand(sequences, tokens)
        count = max(1, round(tokens / ANCHORS))
        drawn = [[rng.randrange(tokens) for _ in range(count)] for _ in range(sequences)]
        return torch.tensor(drawn, device=self.device)

    def _visible(
        self,
        batch: PackedBatch,
        anchors: Tensor,
    ) -> Tensor:
        """Returns which keys each row of the blocks sees, [sequences, rows, tokens + rows]: earlier
        tokens and its block."""
        tokens = batch.ids.shape[1]
        blocks = anchors.shape[1]
        same = batch.segments.gather(1, anchors)[:, :, None] == batch.segments[:, None, :]
        before = torch.arange(tokens, device=self.device)[None, None, :] < anchors[:, :, None]
        context = (same & before).repeat_interleave(BLOCK, dim=1)
        number = torch.arange(blocks, device=self.device).repeat_interleave(BLOCK)
        own = (number[:, None] == number[None, :]).expand(len(anchors), -1, -1)
        return torch.cat((context, own), dim=2)

    def _set_context(
        self,
        layers: BlockLayers,
        batch: PackedBatch,
        states: TargetStates,
    ) -> None:
        """Computes the keys and values of the text's tokens, which the layers then read."""
        sequences, tokens = batch.ids.shape
        table = self.inputs.tables[0]
        assert table is not None
        end = int(batch.positions.max()) + 1
        rotation = table.gather(batch.positions.flatten(), end > (table.long_boundary or end), end)[
            :, None
        ]
        reduced = layers.reduced(states.features.flatten(0, 1)).float()
        keys_values = layers.keys_values(reduced, rotation)
        keys_values = keys_values.view(sequences, tokens, *keys_values.shape[1:])
        for layer, own in zip(layers.layers, keys_values.unbind(2), strict=True):
            keys, values = own.transpose(1, 3).unbind(2)  # [sequences, kv heads, tokens, head size]
            assert isinstance(layer.mixer, ContextAttention)
            layer.mixer.context = keys, values


class MedusaObjective(HeadObjective):
    """Trains four heads of one block h + SiLU(W h + b) and an LM head each (Medusa-1: Cai et al.
    2024, section 2.2.1).

    Head k (from 0) reads the hidden state from which the target predicts the next token, and
    predicts the token k + 1 places after that next token. W and b begin as zeros, and the LM head
    as the target's after the linear map of that state to the one from which the target predicts the
    token, solved for by least squares. Of a large vocabulary, the heads have only the most frequent
    tokens of the texts: together at most as many rows as the target's LM head.
    """

    kind = "medusa"
    depths = HEADS
    reduces_head = True
    head_share = 1 / HEADS

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        width = self.width
        table = self.head_start().to(self.device) * getattr(self.model.shape, "logit_scale", 1.0)
        made = dict[str, Tensor]()
        for head, found in enumerate(self._to_later_states(texts)):
            made |= {
                f"{head}.weight": torch.zeros(width, width),
                f"{head}.bias": torch.zeros(width),
                _lm_head(head): table.clone() if found is None else table @ found.weight,
            }

        def scaled(scale: float) -> dict[str, Tensor]:
            return made | {
                name: scale * made[name] for name in (_lm_head(head) for head in range(HEADS))
            }

        return scaled(self.best_scale(texts, scaled))

    def _to_later_states(self, texts: Sequence[Text]) -> list[LinearMap | None]:
        """Returns each head's linear map, without bias, of the state that it reads to that from
        which the target predicts its token; None if there is too little text."""
        inputs: list[list[Tensor]] = [[] for _ in range(HEADS)]
        outputs: list[list[Tensor]] = [[] for _ in range(HEADS)]
        for batch, states in self.solved_for(texts):
            hidden = states.hidden.flatten(0, 1)
            for head in range(HEADS):
                read, source = reachable(batch, head + 1)
                inputs[head].append(hidden[read])
                outputs[head].append(hidden[source])
        return [
            least_squares(torch.cat(read), torch.cat(later), centred=False) if read else None
            for read, later in zip(inputs, outputs, strict=True)
        ]

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        hidden = states.hidden.flatten(0, 1)
        rows = []
        for head in range(HEADS):
            # the state of token i predicts i + 1, and head k predicts i + 2 + k
            read, source = reachable(batch, head + 1)
            inputs = hidden.index_select(0, read)
            block = F.linear(
                inputs, self.parameters[f"{head}.weight"], self.parameters[f"{head}.bias"]
            )
            rows.append((inputs + F.silu(block), source, torch.full_like(source, head)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        rows = [(depths == head).nonzero()[:, 0] for head in range(HEADS)]
        by_head = [
            F.linear(outputs.index_select(0, own), self.parameters[_lm_head(head)])
            for head, own in enumerate(rows)
        ]
        return torch.cat(by_head).index_select(0, torch.cat(rows).argsort()).float()

    def weights(self, ranks: Sequence[Sequence[float]]) -> MedusaWeights:
        trained = {name: weight.detach() for name, weight in self.parameters.items()}
        blocks = [[(trained[f"{head}.weight"], trained[f"{head}.bias"])] for head in range(HEADS)]
        lm_heads = [trained[_lm_head(head)] for head in range(HEADS)]
        vocabulary = None if self.ids is None else self.ids.cpu()
        return MedusaWeights(blocks, lm_heads, vocabulary, ranks)


def _lm_head(head: int) -> str:
    return f"{head}.lm_head"
