"""Training of a head that drafts from the target's hidden states (Medusa, EAGLE) or from its keys and values (GliDe); and Medusa.

The target runs in every step without gradients, so what a head reads is never stored. The loss is the divergence from the
target's own predictions, on text that the target generated and on corpus text alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.layer_weights import EXIT_HEAD
from specgen.engine.native.native_model import NativeModel, final_logits
from specgen.engine.parts.part import HeadKind, HeadWeights, MedusaWeights
from specgen.engine.parts.trained_part import check_head_folder, describe_head, round_as_saved, save_head
from specgen.train.corpus import NOT_HELD_OUT, Part
from specgen.train.loop import IGNORED, Labels, Objective, PackedBatch, TrainingBatches, pack
from specgen.train.measures import divergence, held_out_agreement
from specgen.train.task import TrainingTask
from specgen.train.texts import Text, most_probable

HEADS = 4  # of Medusa: as many as EESD compares with (4.1); the published trees use as many
OWN_SHARE = 0.3  # of the target's weights, in LM heads of Medusa's own: as many as the authors' for 7 billion


class TargetStates(NamedTuple):
    """What the target computes for a batch of n tokens in each sequence. All tensors are without gradients.

    `features` [batch, n, len(taps) * width], float32, are the hidden states that the objective's `taps` name. `hidden`
    [batch, n, width], float32, are those after the final norm. `keys_values` are the keys and the values, each [batch, kv heads,
    n, head size], of the last layer, as the target's KV cache stores them; None unless the objective `reads_cache`.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    keys_values: tuple[torch.Tensor, torch.Tensor] | None = None


class Predictions(NamedTuple):
    """The drafted tokens that a head predicts in a batch, one row each.

    `outputs` [rows, m] is what `HeadObjective.logits` turns into logits, with gradients. `sources` [rows], int64, are the tokens
    after which the predicted ones come, as indices into the flat batch; the label is the target's prediction after it.
    `depths` [rows], int64, are the numbers of tokens that were drafted before in the same draft, from 0; in training these are
    taken from the text. `sources - depths` is then the last token that was not drafted; rows of one draft have the same.
    """

    outputs: torch.Tensor
    sources: torch.Tensor
    depths: torch.Tensor


class HeadObjective(Objective):
    """Trains one kind of head for a target, whose weights do not change: products in the target's dtype, results in float32.

    `taps` are the layers whose inputs the head reads (see `Model.forward`). `depths` is the number of drafted tokens for which it
    is trained and measured. `decay` is the factor of the loss from each of them to the next. `begin` makes the parameters,
    `predict` and `logits` run within autocast.
    """

    kind: ClassVar[HeadKind]
    depths: ClassVar[int]
    decay: ClassVar[float] = 0.8
    reads_cache: ClassVar[bool] = False
    taps: Sequence[int] = ()

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        self.settings = {"--methods": self.kind}
        self.width, self.num_layers = self.model.shape.hidden_size, self.model.shape.num_layers
        self.model.check_layers(f"training {self.kind}")
        check_head_folder(task.out)

    @abstractmethod
    def begin(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Returns the initial weights by name. `texts` are those that the target generated."""

    @abstractmethod
    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head on a batch, with gradients.

        `rng` is the source of random numbers in training. It is None for a measurement: then nothing is random, and tokens of all
        `depths` are predicted.
        """

    @abstractmethod
    def weights(self, ranks: Sequence[Sequence[float]]) -> HeadWeights:
        """Returns the trained weights. `ranks` are from `held_out_agreement`."""

    def logits(self, outputs: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, vocabulary] for n rows of `Predictions`: -inf for tokens of the target that the head lacks."""
        return self.target_logits(outputs)

    def row_losses(self, logits: torch.Tensor, top_k_ids: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Returns KL(target || head) [n] in nats for n rows with the result of `logits`."""
        return divergence(logits, top_k_ids, log_probs)

    def start(self, texts: Sequence[Text]) -> TrainingBatches:
        made = self.begin(texts, torch.Generator().manual_seed(self.task.recipe.seed))
        self.parameters = {name: torch.nn.Parameter(weight.to(self.device)) for name, weight in made.items()}
        taught = [(text.ids, [IGNORED] * len(text.ids)) for text in texts if text.part == Part.TRAIN]
        return TrainingBatches(self.task, taught, NOT_HELD_OUT)

    def outputs(self, batch: PackedBatch, seed: str | None) -> tuple[torch.Tensor, Labels]:
        found, labels = self.predictions(batch, None if seed is None else Random(seed))
        return found.outputs, labels

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        depths, top_k_ids, log_probs = labels
        with self.autocast():
            losses = self.decay**depths * self.row_losses(self.logits(outputs, depths), top_k_ids, log_probs)
        return losses.sum()

    def predictions(self, batch: PackedBatch, rng: Random | None) -> tuple[Predictions, Labels]:
        """Runs target and head on a batch. Returns the head's predictions, with gradients, and their labels: the rows' depths,
        and the target's most probable tokens and their log-probabilities as `most_probable` returns them."""
        states = self.states(batch)
        with self.autocast():
            found = self.predict(batch, states, rng)
        with torch.no_grad():
            pieces = torch.split(states.hidden.flatten(0, 1), self.rows)
            labels = [most_probable(self.target_logits(piece)) for piece in pieces]
        of_rows = (torch.cat(parts).index_select(0, found.sources) for parts in zip(*labels, strict=True))
        return found, (found.depths, *of_rows)

    @torch.no_grad()
    def ranks_of(self, text: Text) -> torch.Tensor:
        """Returns the ranks [rows, depths] that the head gives to the target's tokens; see `held_out_agreement`."""
        whole = pack([lambda *_: (text.ids, [IGNORED] * len(text.ids))], len(text.ids), Random(0))
        found, (depths, top_k_ids, _) = self.predictions(whole.part(slice(None), self.device), None)
        pieces = []
        for piece in torch.split(torch.arange(len(depths), device=self.device), self.rows):
            with self.autocast():
                logits = self.logits(found.outputs[piece], depths[piece])
            pieces.append((logits > logits.gather(1, top_k_ids[piece, :1])).sum(dim=1))
        starts = found.sources - depths  # the last tokens that are not drafted
        chosen = (starts >= text.prompt_length - 1) & (depths < self.depths)
        table = torch.full((len(text.ids), self.depths), -1, device=self.device)
        table[starts[chosen], depths[chosen]] = torch.cat(pieces)[chosen]
        return table

    def finish(self, texts: Sequence[Text], figures: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        round_as_saved(self.parameters)
        self.task.announce("measuring on held-out text")
        agreement, ranks = held_out_agreement(texts, self.ranks_of)
        figures = {**figures, "held_out_agreement": agreement}
        description = describe_head(self.kind, self.target, figures, self.task.made_with())
        save_head(self.task.out, self.weights(ranks), description)
        return self.task.out, asdict(description)

    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetStates:
        """Runs the target on a batch."""
        sequences, tokens = batch.ids.shape
        cache = self.model.batch_cache(sequences) if self.reads_cache else None
        forward_pass = batch.forward_pass()._replace(cache=cache)
        found = self.model.batch(forward_pass, taps=[*self.taps, self.num_layers], with_head=False).features
        assert found is not None
        features, hidden = torch.split(found.float(), [len(self.taps) * self.width, self.width], dim=-1)
        if cache is None:
            return TargetStates(features, hidden)
        keys, values = (each.view(sequences, -1, *each.shape[1:]) for each in cache.keys_and_values(self.num_layers - 1, tokens))
        return TargetStates(features, hidden, (keys, values))

    @torch.no_grad()
    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the token embeddings [..., width] of `ids` [...], as the first layer gets them."""
        return self.model.embeddings(ids).float()

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits [..., vocabulary] for hidden states [..., width] after the final norm. Differentiable."""
        hidden = hidden.to(self.dtype)
        if not isinstance(self.model, NativeModel):
            return self.model.head_logits(hidden).float()
        return final_logits(self.model.architecture, F.linear(hidden, self._lm_head)).float()

    @cached_property
    def _lm_head(self) -> torch.Tensor:
        return self.model.last_layers(self.target.folder, 0)[EXIT_HEAD].to(self.dtype)


def reachable(batch: PackedBatch, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs of tokens that are `distance` apart in one text, where a token follows the later one: two lists [pairs].

    They are indices into the flat batch: of the earlier tokens, in ascending order, and of the later ones.
    """
    tokens = batch.ids.shape[1]
    same = batch.segments[:, distance:] == batch.segments[:, : tokens - distance]
    found = F.pad(same & (batch.labels[:, distance:] != IGNORED), (0, distance))
    first = found.flatten().nonzero()[:, 0]
    return first, first + distance


class MedusaObjective(HeadObjective):
    """Trains four heads of one block h + SiLU(W h + b) and an LM head each (Medusa-1: Cai et al. 2024, section 2.2.1).

    Head k reads the hidden state from which the target predicts the next token, and predicts the token k + 1 later. W and b begin
    as zeros, the LM heads as copies of the target's. If these would have more than OWN_SHARE times the target's weights, all
    heads share the target's, which is not trained: they predict less well then.
    """

    kind = "medusa"
    depths = HEADS

    def begin(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, torch.Tensor]:
        width = self.width
        self._has_lm_heads = HEADS * self.vocabulary * width <= OWN_SHARE * sum(self.target.prepared.parameters.values())
        made = dict[str, torch.Tensor]()
        for head in range(HEADS):
            made |= {f"{head}.weight": torch.zeros(width, width), f"{head}.bias": torch.zeros(width)}
        if self._has_lm_heads:
            start = self.model.last_layers(self.target.folder, 0)[EXIT_HEAD]
            made |= {f"{head}.lm_head": start.clone() for head in range(HEADS)}
        return made

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        hidden = states.hidden.flatten(0, 1)
        rows = []
        for head in range(HEADS):
            read, source = reachable(batch, head + 1)  # the state of token i predicts i + 1, and head k predicts i + 2 + k
            inputs = hidden.index_select(0, read)
            block = F.linear(inputs, self.parameters[f"{head}.weight"], self.parameters[f"{head}.bias"])
            rows.append((inputs + F.silu(block), source, torch.full_like(source, head)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        if not self._has_lm_heads:
            return super().logits(outputs, depths)
        rows = [(depths == head).nonzero()[:, 0] for head in range(HEADS)]
        by_head = [F.linear(outputs.index_select(0, own), self.parameters[f"{head}.lm_head"]) for head, own in enumerate(rows)]
        return torch.cat(by_head).index_select(0, torch.cat(rows).argsort()).float()

    def weights(self, ranks: Sequence[Sequence[float]]) -> MedusaWeights:
        found = {name: weight.detach() for name, weight in self.parameters.items()}
        blocks = [[(found[f"{head}.weight"], found[f"{head}.bias"])] for head in range(HEADS)]
        lm_heads = [found[f"{head}.lm_head"] for head in range(HEADS)] if self._has_lm_heads else None
        return MedusaWeights(blocks, lm_heads, rank_accuracies=ranks)
