"""The interface of a training objective: what a kind of head (Medusa, EAGLE, GliDe) computes in training, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn

from specgen.engine.parts.weights import HeadKind, HeadWeights
from specgen.train.divergence import divergence
from specgen.train.frozen_target import FrozenTarget, TargetStates
from specgen.train.generated_text import GeneratedText
from specgen.train.packing import IGNORED, PackedBatch

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel


class Predictions(NamedTuple):
    """The drafted tokens that a head predicts in a batch, one row each.

    `outputs` [rows, m] is what `Objective.logits` turns into logits, with gradients. `sources` [rows], int64, are the tokens
    after which the predicted ones come, as indices into the flat batch; the label is the target's prediction after it.
    `depths` [rows], int64, are the numbers of tokens that were drafted before in the same draft, from 0; in training these are
    taken from the text. `sources - depths` is then the last token that was not drafted; rows of one draft have the same.
    """

    outputs: torch.Tensor
    sources: torch.Tensor
    depths: torch.Tensor


class RowLabels(NamedTuple):
    """What the target computes for some rows of `Predictions`.

    `depths` [rows] are the rows' own. `next_tokens` [rows] are the tokens that follow in the text. `top_k_ids` and
    `top_k_log_probs` [rows, k] are the target's most probable tokens, in descending order, and their log-probabilities. `hidden`
    [rows, width], float32, are the target's hidden states after its final norm, from which it predicts the row's token.
    """

    depths: torch.Tensor
    next_tokens: torch.Tensor
    top_k_ids: torch.Tensor
    top_k_log_probs: torch.Tensor
    hidden: torch.Tensor


class Objective(ABC):
    """Trains one kind of head for a target, whose weights do not change.

    `module` has the trained parameters, float32 and on the target's device; those that do not need gradients are neither trained
    nor saved. `taps` are the layers whose inputs the head reads (see `Model.batch_features`), `kv_layers` those whose keys and
    values it reads. `depths` is the number of drafted tokens for which it is trained and measured. `decay` is the factor of the
    loss from each of them to the next.

    All methods are called within an autocast context if the target's dtype is not float32.
    """

    kind: ClassVar[HeadKind]
    decay: ClassVar[float] = 0.8
    module: nn.Module
    taps: Sequence[int] = ()
    kv_layers: Sequence[int] = ()
    depths: int

    def __init__(self, target: FrozenTarget, texts: Sequence[GeneratedText], seed: int) -> None:
        """`texts` are those that the target generated. The same arguments have to give the same initial weights."""
        self.target = target

    @classmethod
    def check(cls, target: LoadedModel) -> None:
        """Raises SpecgenError if this kind of head cannot be trained for the target. Called before any text is generated."""
        target.model.check_layers(f"training {cls.kind}")

    @abstractmethod
    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head on a batch, with gradients.

        `rng` is the source of random numbers in training, the same for all parts of a step's batch. It is None for a measurement:
        then nothing is random, and tokens of all `depths` are predicted.
        """

    def logits(self, outputs: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, vocabulary] for n rows of `Predictions`: -inf for tokens of the target that the head lacks."""
        return self.target.logits(outputs)

    def losses(self, outputs: torch.Tensor, logits: torch.Tensor, labels: RowLabels) -> torch.Tensor:
        """Returns the loss [n] in nats of n rows with the result of `logits`: KL(target || head), times `decay` ** depth."""
        return self.decay**labels.depths * divergence(logits, labels.top_k_ids, labels.top_k_log_probs)

    @abstractmethod
    def weights(self, ranks: Sequence[Sequence[float]]) -> HeadWeights:
        """Returns the trained weights. `ranks` is `HeldOut.ranks`."""


def reachable(batch: PackedBatch, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs of tokens that are `distance` apart in one text, where a token follows the later one: two lists [pairs].

    They are indices into the flat batch: of the earlier tokens, in ascending order, and of the later ones.
    """
    tokens = batch.ids.shape[1]
    same = batch.segments[:, distance:] == batch.segments[:, : tokens - distance]
    found = torch.nn.functional.pad(same & (batch.labels[:, distance:] != IGNORED), (0, distance))
    first = found.flatten().nonzero()[:, 0]
    return first, first + distance
