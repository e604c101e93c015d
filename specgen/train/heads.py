"""Training of a head that drafts from the target's hidden states (Medusa, EAGLE) or from its keys and values (GliDe).

The target runs in every step without gradients, so what a head reads is never stored. The loss is the divergence from the
target's own predictions, on text that the target generated and on corpus text alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from specgen.engine.native.layer_weights import EXIT_HEAD
from specgen.engine.native.native_model import NativeModel, final_logits
from specgen.engine.parts.part import HeadKind, HeadWeights
from specgen.engine.parts.trained_part import HeadDescription, check_head_folder, describe_head, round_as_saved, save_head
from specgen.train.batches import IGNORED, PackedBatch, TrainingBatches, pack
from specgen.train.corpus import NOT_HELD_OUT, Part
from specgen.train.divergence import divergence, most_probable
from specgen.train.loop import Labels, Objective, greedy_matches, held_out_agreement
from specgen.train.task import TrainingObserver, TrainingTask
from specgen.train.texts import Text

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel


class TargetStates(NamedTuple):
    """What the target computes for a batch of n tokens in each sequence. All tensors are without gradients.

    `features` [batch, n, len(taps) * width], float32, are the hidden states that the objective's `taps` name. `hidden`
    [batch, n, width], float32, are those after the final norm. `keys_values` has the keys and values, each [batch, kv heads, n,
    head size], of the objective's `kv_layers`, as the target's KV cache stores them.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    keys_values: Sequence[tuple[torch.Tensor, torch.Tensor]]


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


class RowLabels(NamedTuple):
    """What the target computes for some rows of `Predictions`.

    `depths` [rows] are the rows' own. `top_k_ids` and `top_k_log_probs` [rows, k] are the target's most probable tokens, in
    descending order, and their log-probabilities.
    """

    depths: torch.Tensor
    top_k_ids: torch.Tensor
    top_k_log_probs: torch.Tensor


class HeadObjective(Objective):
    """Trains one kind of head for a target, whose weights do not change: products in the target's dtype, results in float32.

    `taps` are the layers whose inputs the head reads (see `Model.forward`), `kv_layers` those whose keys and values it
    reads. `depths` is the number of drafted tokens for which it is trained and measured. `decay` is the factor of the loss from
    each of them to the next. `begin` makes the parameters, `predict` and `logits` run within autocast.
    """

    kind: ClassVar[HeadKind]
    decay: ClassVar[float] = 0.8
    taps: Sequence[int] = ()
    kv_layers: Sequence[int] = ()
    depths: int

    def __init__(self, target: LoadedModel) -> None:
        super().__init__(target)
        self.settings = {"--methods": self.kind}
        self.width, self.num_layers = self.model.shape.hidden_size, self.model.shape.num_layers
        self.model.check_layers(f"training {self.kind}")

    def check(self, task: TrainingTask) -> None:
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

    def row_losses(self, logits: torch.Tensor, labels: RowLabels) -> torch.Tensor:
        """Returns KL(target || head) [n] in nats for n rows with the result of `logits`."""
        return divergence(logits, labels.top_k_ids, labels.top_k_log_probs)

    def start(self, texts: Sequence[Text], task: TrainingTask, observer: TrainingObserver) -> TrainingBatches:
        made = self.begin(texts, torch.Generator().manual_seed(task.recipe.seed))
        self.parameters = {name: torch.nn.Parameter(weight.to(self.device)) for name, weight in made.items()}
        taught = [(text.ids, [IGNORED] * len(text.ids)) for text in texts if text.part == Part.TRAIN]
        return TrainingBatches(task, taught, NOT_HELD_OUT)

    def outputs(self, batch: PackedBatch, seed: str | None) -> tuple[torch.Tensor, Labels]:
        predicted, labels = self.predictions(batch, None if seed is None else Random(seed))
        return predicted.outputs, labels

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        row = RowLabels(*labels)
        with self.autocast():
            logits = self.logits(outputs, row.depths)
            losses = self.decay**row.depths * self.row_losses(logits, row)
        first = torch.where(row.depths == 0, row.top_k_ids[:, 0], IGNORED)
        return torch.cat((losses.sum()[None], greedy_matches(logits, first)))

    def predictions(self, batch: PackedBatch, rng: Random | None) -> tuple[Predictions, RowLabels]:
        """Runs target and head on a batch. Returns the head's predictions, with gradients, and their labels."""
        states = self.states(batch)
        with self.autocast():
            found = self.predict(batch, states, rng)
        with torch.no_grad():
            pieces = torch.split(states.hidden.flatten(0, 1), self.rows)
            labels = [most_probable(self.target_logits(piece)) for piece in pieces]
        of_rows = (torch.cat(parts).index_select(0, found.sources) for parts in zip(*labels, strict=True))
        return found, RowLabels(found.depths, *of_rows)

    @torch.no_grad()
    def ranks_of(self, text: Text) -> torch.Tensor:
        """Returns the ranks [rows, depths] that the head gives to the target's tokens; see `held_out_agreement`."""
        whole = pack([lambda *_: (text.ids, [IGNORED] * len(text.ids))], len(text.ids), Random(0))
        found, labels = self.predictions(whole.part(slice(None), self.device), None)
        pieces = []
        for piece in torch.split(torch.arange(len(labels.depths), device=self.device), self.rows):
            with self.autocast():
                logits = self.logits(found.outputs[piece], labels.depths[piece])
            pieces.append((logits > logits.gather(1, labels.top_k_ids[piece, :1])).sum(dim=1))
        starts = found.sources - found.depths  # the last tokens that are not drafted
        chosen = (starts >= text.prompt_length - 1) & (found.depths < self.depths)
        table = torch.full((len(text.ids), self.depths), -1, device=self.device)
        table[starts[chosen], found.depths[chosen]] = torch.cat(pieces)[chosen]
        return table

    def finish(
        self, texts: Sequence[Text], figures: dict[str, Any], task: TrainingTask, observer: TrainingObserver
    ) -> tuple[Path, HeadDescription]:
        round_as_saved(self.parameters)
        observer.announce("measuring on held-out text")
        agreement, ranks = held_out_agreement(texts, self.ranks_of)
        description = describe_head(self.kind, self.target, {**figures, "held_out_agreement": agreement}, task.made_with())
        save_head(task.out, self.weights(ranks), description)
        return task.out, description

    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetStates:
        """Runs the target on a batch."""
        sequences, tokens = batch.ids.shape
        cache = self.model.batch_cache(sequences) if self.kv_layers else None
        forward_pass = batch.forward_pass()._replace(cache=cache)
        features = self.model.batch(forward_pass, taps=[*self.taps, self.num_layers], with_head=False).features
        assert features is not None
        features = features.float()
        of_layers = [] if cache is None else [cache.keys_and_values(layer, tokens) for layer in self.kv_layers]
        by_sequence = [
            (keys.view(sequences, -1, *keys.shape[1:]), values.view(sequences, -1, *values.shape[1:]))
            for keys, values in of_layers
        ]
        return TargetStates(features[..., : -self.width], features[..., -self.width :], by_sequence)

    @torch.no_grad()
    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the token embeddings [..., width] of `ids` [...], as the first layer gets them."""
        return self.model.embeddings(ids).float()

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits [..., vocabulary] for hidden states [..., width] after the final norm. Differentiable."""
        hidden = hidden.to(self.dtype)
        if not isinstance(self.model, NativeModel):
            return self.model.head_logits(hidden).float()
        return final_logits(self.model.architecture, torch.nn.functional.linear(hidden, self._lm_head)).float()

    @cached_property
    def _lm_head(self) -> torch.Tensor:
        return self.model.last_layers(self.target.folder, 0)[EXIT_HEAD].to(self.dtype)


def reachable(batch: PackedBatch, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs of tokens that are `distance` apart in one text, where a token follows the later one: two lists [pairs].

    They are indices into the flat batch: of the earlier tokens, in ascending order, and of the later ones.
    """
    tokens = batch.ids.shape[1]
    same = batch.segments[:, distance:] == batch.segments[:, : tokens - distance]
    found = torch.nn.functional.pad(same & (batch.labels[:, distance:] != IGNORED), (0, distance))
    first = found.flatten().nonzero()[:, 0]
    return first, first + distance
