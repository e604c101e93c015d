"""Training of a head that drafts from the target's hidden states (Medusa, EAGLE) or from its keys
and values (GliDe).

The target runs in every step without gradients, so what a head reads is never stored. The loss is
the divergence from the target's own predictions, on text that the target generated and on corpus
text alike.

Medusa-1: Cai et al. 2024, section 2.2.1. EAGLE-3 (arXiv:2503.01840, section 3.2) and GliDe (Du et
al. 2024) have a decoder layer, which begins with the weights of the target's last one. EAGLE-3
learns from its own drafts: in its training-time test, the predicted features of one step are the
input of the next. GliDe's layer also attends to the keys and values of the target's last layer.
When it drafts, the target has no keys of the drafted tokens yet. So texts are divided into blocks,
and each token sees the target's keys of earlier blocks alone: the rows of a block are those of a
draft that begins after the block's first token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import HeadKind
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.attention import AttentionFiles
from specgen.engine.native.attention_mask import AttentionMask
from specgen.engine.native.config_reading import read_architecture
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer_files import (
    EXIT_HEAD,
    FINAL_NORM,
    HEAD,
    layer_files,
)
from specgen.engine.native.linear import trained_linear
from specgen.engine.native.native_model import NativeModel, final_logits
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.native.tensors import tensor_shapes
from specgen.engine.parts.eagle import FC, FEATURE_NORM, EagleLayers, UnrolledLayer
from specgen.engine.parts.glide import CrossInputs, GlideLayers
from specgen.engine.parts.own_layers import known_architecture
from specgen.engine.parts.part import EagleWeights, GlideWeights, HeadWeights
from specgen.engine.parts.trained_part import (
    check_head_folder,
    describe_head,
    round_as_saved,
    save_head,
)
from specgen.train.corpus import NOT_HELD_OUT
from specgen.train.loop import (
    IGNORED,
    Labels,
    Objective,
    PackedBatch,
    Taught,
    TrainingBatches,
    divergence,
    held_out_agreement,
    pack,
)
from specgen.train.target_layer import last_layers, layer_config
from specgen.train.task import TrainingTask
from specgen.train.texts import Text, most_probable

# the least number of layers in which the authors' three features are of different layers
_LAYERS_FOR_DEFAULT = 7
# tokens that EAGLE's LM head predicts at most, as in the published heads
_LARGEST_VOCABULARY = 32_000
_OUTSIDE = -1e4  # in place of the infinite log-probability of a token outside the vocabulary
# tokens in a block of GliDe
_SHORTEST = 2
_LONGEST = 10
_DEVIATION = 0.02  # of random initial weights


class TargetStates(NamedTuple):
    """What the target computes for a batch of n tokens in each sequence. All tensors are without
    gradients.

    `features` [batch, n, len(taps) * width], float32, are the hidden states that the objective's
    `taps` name. `hidden` [batch, n, width], float32, are those after the final norm, `embeddings`
    [batch, n, width], float32, those that enter the first layer. `keys_values` are the keys and the
    values, each [batch, kv heads, n, head size], of the last layer, as the target's KV cache stores
    them; None unless the objective `reads_cache`.
    """

    features: Tensor
    hidden: Tensor
    embeddings: Tensor
    keys_values: tuple[Tensor, Tensor] | None = None


class Predictions(NamedTuple):
    """The drafted tokens that a head predicts in a batch, one row each.

    `outputs` [rows, m] is what `HeadObjective.logits` turns into logits, with gradients. `sources`
    [rows], int64, has for each row the token that the predicted one follows, as an index into the
    flat batch; the row's label is the target's prediction after this token. `depths` [rows], int64,
    is the number of tokens drafted earlier in the same draft, from 0; in training these are taken
    from the text. `sources - depths` is then the last token before the draft, the same for all rows
    of one draft.
    """

    outputs: Tensor
    sources: Tensor
    depths: Tensor


class HeadObjective(Objective):
    """Trains one kind of head (`kind`) for a target, whose weights do not change.

    `taps` are the layers whose inputs the head reads (see `Model.forward`). `depths` is the number
    of drafted tokens for which it is trained and measured. The loss of a draft's token number d,
    from 0, is multiplied by `decay`**d. `reads_cache`: the head reads keys and values of the
    target. `predict` and `logits` run within `autocast`.
    """

    kind: ClassVar[HeadKind]
    depths: ClassVar[int]
    decay: ClassVar[float] = 0.8
    reads_cache: ClassVar[bool] = False
    taps: Sequence[int] = ()

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        self.settings = {"--methods": self.kind}
        self.width = self.model.shape.hidden_size
        self.num_layers = self.model.shape.num_layers
        self.model.check_layers(f"training {self.kind}")
        check_head_folder(task.out)

    @abstractmethod
    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the initial weights by name. `texts` are those that the target generated."""

    @abstractmethod
    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head on a batch, with gradients.

        `rng` is the source of random numbers in training. It is None for a measurement: then
        nothing is random, and tokens of all `depths` are predicted.
        """

    @abstractmethod
    def weights(self, ranks: Sequence[Sequence[float]]) -> HeadWeights:
        """Returns the trained weights. `ranks[n][r]` is the share of n-th drafted tokens at which
        the target's token had rank r in the head's prediction (`held_out_agreement`)."""

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        """Returns logits [n, vocabulary] over the target's vocabulary for n rows of `Predictions`;
        -inf for tokens that the head lacks."""
        return self.target_logits(outputs)

    def row_losses(self, logits: Tensor, top_k_ids: Tensor, log_probs: Tensor) -> Tensor:
        """Returns KL(target || head) [n] in nats.

        `logits` [n, vocabulary] are the head's, `top_k_ids` and `log_probs`, each [n, k], the
        target's most probable tokens.
        """
        return divergence(logits, top_k_ids, log_probs)

    def start(self, texts: Sequence[Text]) -> TrainingBatches:
        made = self.initial_weights(texts, torch.Generator().manual_seed(self.task.recipe.seed))
        return self.begin(made, texts, NOT_HELD_OUT)

    def outputs(self, batch: PackedBatch, rng: Random) -> tuple[Tensor, Labels]:
        predictions, labels = self.predictions(batch, rng)
        return predictions.outputs, labels

    def losses(self, outputs: Tensor, *labels: Tensor) -> Tensor:
        depths, top_k_ids, log_probs = labels
        with self.autocast():
            losses = self.decay**depths * self.row_losses(
                self.logits(outputs, depths), top_k_ids, log_probs
            )
        return losses.sum()

    def predictions(self, batch: PackedBatch, rng: Random | None) -> tuple[Predictions, Labels]:
        """Runs target and head on a batch. Returns the head's predictions, with gradients, and
        their labels.

        The labels are the rows' `depths`, and the target's most probable tokens with their
        log-probabilities as `most_probable` returns them. `rng` as for `predict`.
        """
        states = self.states(batch)
        with self.autocast():
            predictions = self.predict(batch, states, rng)
        with torch.no_grad():
            pieces = torch.split(states.hidden.flatten(0, 1), self.rows)
            labels = [most_probable(self.target_logits(piece)) for piece in pieces]
        of_rows = (
            torch.cat(parts).index_select(0, predictions.sources)
            for parts in zip(*labels, strict=True)
        )
        return predictions, (predictions.depths, *of_rows)

    @torch.no_grad()
    def ranks_of(self, text: Text) -> Tensor:
        """Returns the ranks [text's tokens, depths] that the head gives to the target's most
        probable tokens, for a draft after each token of the text from the prompt's last one on; -1
        before, and where nothing is predicted. See `held_out_agreement`."""
        taught = Taught(text.ids, [IGNORED] * len(text.ids), text.prompt_length)
        whole = pack([lambda *_: taught], len(text.ids), Random(0))
        predictions, (depths, top_k_ids, _) = self.predictions(
            whole.part(slice(None), self.device), None
        )
        pieces = []
        for piece in torch.split(torch.arange(len(depths), device=self.device), self.rows):
            with self.autocast():
                logits = self.logits(predictions.outputs[piece], depths[piece])
            pieces.append((logits > logits.gather(1, top_k_ids[piece, :1])).sum(dim=1))
        starts = predictions.sources - depths  # the last tokens that are not drafted
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
        taps = [*self.taps, self.num_layers]
        tapped = self.model.batch(forward_pass, taps=taps, with_head=False).features
        assert tapped is not None
        sizes = [len(self.taps) * self.width, self.width]
        features, hidden = torch.split(tapped.float(), sizes, dim=-1)
        states = TargetStates(features, hidden, self.model.embeddings(batch.ids).float())
        if cache is None:
            return states
        keys, values = cache.keys_and_values(self.num_layers - 1, tokens)
        shape = sequences, -1, *keys.shape[1:]
        return states._replace(keys_values=(keys.view(shape), values.view(shape)))

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Returns the LM head's logits [..., vocabulary] for hidden states [..., width] after the
        final norm. Differentiable."""
        hidden = hidden.to(self.dtype)
        if not isinstance(self.model, NativeModel):
            return self.model.head_logits(hidden).float()
        return final_logits(self.model.architecture, F.linear(hidden, self._lm_head)).float()

    @cached_property
    def _lm_head(self) -> Tensor:
        return self.model.last_layers(self.target.folder, 0)[EXIT_HEAD].to(self.dtype)


def reachable(batch: PackedBatch, distance: int) -> tuple[Tensor, Tensor]:
    """Returns all pairs of tokens of one text that are `distance` apart and of which the later one
    is not the text's last.

    The result are two tensors [pairs] of indices into the flat batch: the earlier tokens, in
    ascending order, and the later ones.
    """
    tokens = batch.ids.shape[1]
    same = batch.segments[:, distance:] == batch.segments[:, : tokens - distance]
    is_first = F.pad(same & (batch.labels[:, distance:] != IGNORED), (0, distance))
    first = is_first.flatten().nonzero()[:, 0]
    return first, first + distance


class LayerObjective(HeadObjective):
    """Trains a head with `layers` decoder layers: those of a Llama with the target's sizes, or of a
    Qwen if the target has its biases or norms.

    `config` is the head's config.json as a mapping, `architecture` what it describes.
    """

    layers = 1

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the initial weights of the layers and of the final norm: those of the target's
        last ones, or random ones."""
        self.config = layer_config(self.target, self.layers)
        self.architecture = read_architecture(self.config)
        self.inputs = InputMaker(self.architecture, self.dtype, [self.device] * self.layers)
        last = last_layers(self.target, self.architecture)
        made = {}
        shapes: dict[str, tuple[int, ...]] = {FINAL_NORM: (self.width,)}
        for index in range(self.layers):
            shapes |= tensor_shapes(layer_files(self.architecture, index))
        for name, shape in shapes.items():
            if name in last:
                made[name] = last[name]
            elif len(shape) == 1:
                made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            else:
                made[name] = torch.randn(shape, generator=generator) * _DEVIATION
        return made


class EagleObjective(LayerObjective):
    """Trains an EAGLE-3 head with one decoder layer. It uses the target's embedding, which is not
    trained.

    Its LM head begins as a copy of the target's. Of a large vocabulary, it has only the most
    frequent tokens of the texts.
    """

    kind = "eagle"
    depths = 5

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        count = self.num_layers
        if count < 3:
            raise SpecgenError(
                f"{target.name} has {count} layers, and an EAGLE head reads from three",
                "Train --methods medusa",
            )
        self.taps = (
            (2, count // 2, count - 3)
            if count >= _LAYERS_FOR_DEFAULT
            else (0, count // 2, count - 1)
        )

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        self._ids = _vocabulary(self.vocabulary, texts, self.device)
        made = super().initial_weights(texts, generator)
        width = self.width
        files = layer_files(self.architecture, 0)
        assert isinstance(files.mixer, AttentionFiles)
        assert files.attention_norm is not None
        norm = files.attention_norm.name
        made[FC] = torch.cat((torch.zeros(width, 2 * width), torch.eye(width)), dim=1)
        for projection in files.mixer.projections:  # the embedding has no influence at first
            name = projection.weight.name
            made[name] = torch.cat((torch.zeros_like(made[name]), made[name]), dim=1)
        made |= {FEATURE_NORM: made[norm], norm: torch.ones(width)}
        head = self.model.last_layers(self.target.folder, 0)[EXIT_HEAD]
        return {
            **made,
            HEAD: head.clone() if self._ids is None else head[self._ids.to(head.device)],
        }

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head once per depth. At depth 0 it reads the target's features, then its own
        output of the depth before (EAGLE-3's training-time test)."""
        weights = EagleWeights(self.config, self.parameters)
        layers = EagleLayers(
            weights, self.device, torch.float32, trained_linear, first_layer=UnrolledLayer
        )
        features = layers.joined(states.features.flatten(0, 1)).float()
        forward_pass = batch.forward_pass()
        rows = []
        for depth in range(self.depths):
            at, padding = batch.positions + depth, min(1 + depth, batch.ids.shape[1])
            following = F.pad(states.embeddings[:, 1 + depth :], (0, 0, 0, padding)).flatten(0, 1)
            inputs = self.inputs.batched(forward_pass._replace(positions=at, key_positions=at))
            features = layers(following, features, inputs)
            pairs, sources = reachable(batch, 1 + depth)
            rows.append((features.index_select(0, pairs), sources, torch.full_like(sources, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        normed = F.rms_norm(
            outputs, (self.width,), self.parameters[FINAL_NORM], self.architecture.norm_eps
        )
        logits = F.linear(normed, self.parameters[HEAD]).float()
        if self._ids is None:
            return logits
        return logits.new_full((len(logits), self.vocabulary), -torch.inf).index_copy(
            1, self._ids, logits
        )

    def row_losses(self, logits: Tensor, top_k_ids: Tensor, log_probs: Tensor) -> Tensor:
        """Returns KL(target || head) [n] in nats, with the target's distribution restricted to the
        head's vocabulary. 0 in rows in which the target's most probable token is not in it."""
        if self._ids is None:
            return super().row_losses(logits, top_k_ids, log_probs)
        inside = torch.isin(top_k_ids, self._ids)
        outside = (log_probs.exp() * ~inside).sum(-1, keepdim=True)
        log_probs = log_probs - torch.log1p(-outside.clamp_max(1 - 1e-6))
        log_probs = log_probs.masked_fill(~inside, _OUTSIDE)
        return divergence(logits.clamp_min(_OUTSIDE), top_k_ids, log_probs) * inside[:, 0]

    def weights(self, ranks: Sequence[Sequence[float]]) -> EagleWeights:
        tensors = {name: weight.detach() for name, weight in self.parameters.items()}
        return EagleWeights(
            self.config,
            tensors,
            3,
            tuple(self.taps),
            None if self._ids is None else self._ids.cpu(),
        )


def _vocabulary(size: int, texts: Sequence[Text], device: torch.device) -> Tensor | None:
    """Returns the ids of the head's tokens, ascending: those that the target generated most often.
    None if the head can have all `size` tokens of the target."""
    if size <= _LARGEST_VOCABULARY:
        return None
    counts = Counter[int]()
    for text in texts:
        counts.update(text.ids[text.prompt_length :])
    frequent = [token for token, _ in counts.most_common(_LARGEST_VOCABULARY)]
    others = islice(
        (token for token in range(size) if token not in counts), _LARGEST_VOCABULARY - len(frequent)
    )
    return torch.tensor(sorted([*frequent, *others]), device=device)


class GlideObjective(LayerObjective):
    """Trains a GliDe draft model with one layer, and the target's embedding and LM head.

    Texts are divided into blocks, and a token sees the target's keys of earlier blocks alone, as in
    drafting. The blocks' number of tokens is drawn for each batch, so that the drafts are of
    different lengths (Du et al.: always 5). A text's first block is not trained on, because its
    tokens see none of the target's keys.
    """

    kind = "glide"
    depths = _LONGEST
    reads_cache = True

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        self._theirs = theirs = known_architecture(target.shape, "training glide")
        rotary = theirs.layers[-1].rotary
        rounded = None if theirs.rotary_in_float32 else self.dtype
        self._rotations = (
            None if rotary is None else RotaryTable(theirs.rotary[rotary], self.device, rounded)
        )

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the initial weights by their names in `GlideWeights`. The output of the
        cross-attention is zero."""
        made = super().initial_weights(texts, generator)
        cross = "layers.0.cross_attn."
        width = self.width
        query = made["layers.0.self_attn.q_proj.weight"]
        return {
            **made,
            f"{cross}q_proj.weight": query.clone(),
            f"{cross}o_proj.weight": torch.zeros(width, len(query)),
        }

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        size = _LONGEST if rng is None else rng.randint(_SHORTEST, _LONGEST)
        own_pass = batch.forward_pass()
        block = batch.positions // size
        visible = own_pass.visible & (block[:, None, :] < block[:, :, None])
        # rows that see no key are left out below; a softmax over nothing would be NaN
        visible |= block[:, :, None] == 0
        attention_mask = AttentionMask(~visible, batch.positions, batch.positions)
        mask = attention_mask.additive(None, self.dtype)[:, None]
        assert states.keys_values is not None
        cross = CrossInputs(*states.keys_values, self._rotation(batch), mask, batch=len(batch.ids))
        layers = GlideLayers(
            GlideWeights(self.config, self.parameters), self.model, torch.float32, trained_linear
        )
        outputs = layers(states.embeddings.flatten(0, 1), self.inputs.batched(own_pass), [cross])
        sources = ((batch.labels != IGNORED) & (block > 0)).flatten().nonzero()[:, 0]
        return Predictions(
            outputs.index_select(0, sources), sources, (batch.positions % size).flatten()[sources]
        )

    def weights(self, ranks: Sequence[Sequence[float]]) -> GlideWeights:
        return GlideWeights(
            self.config,
            {name: weight.detach() for name, weight in self.parameters.items()},
            _LONGEST,
        )

    def _rotation(self, batch: PackedBatch) -> Tensor | None:
        """Returns the rotations of the target's last layer at the tokens' positions."""
        if self._rotations is None:
            return None
        length = batch.ids.shape[1]
        boundary = self._rotations.long_boundary
        is_long = boundary is not None and int(batch.positions.max()) >= boundary
        return self._rotations.gather(batch.positions.flatten(), is_long, length)[:, None]
