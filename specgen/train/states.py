"""Training of what drafts from the target's hidden states: heads and exit layers.

The label is the target's own distribution after each token, of which the likeliest tokens are kept.
What a part reads of the target and learns from it is computed once for the texts that the target
generated, as far as memory allows, and in each step for corpus text.

The LM head of a part may know the most frequent tokens alone (EAGLE-3, arXiv:2503.01840; FR-Spec,
arXiv:2502.14856): with a large vocabulary, most of a step's time would be spent in it.
"""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from random import Random
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from specgen.base.files import write_whole
from specgen.engine.devices import free_memory
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.layer_files import EXIT_HEAD
from specgen.engine.native.native_model import NativeModel, final_logits
from specgen.train.corpus import NOT_HELD_OUT, Use
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
from specgen.train.task import TrainingTask
from specgen.train.texts import TOP_K, PredictedText, Text, most_probable

# tokens that an LM head of a part's own knows at most: more hardly ever occur in answers
LARGEST_VOCABULARY = 8192
_LEAST_VOCABULARY = 1024  # a target with fewer tokens has heads of all its tokens
_READ_TEXTS = 32  # pieces of corpus text that least squares read, beside generated text
# of the logits of what least squares give: a mean of states is no state
_SCALES = (0.5, 0.7, 0.85, 1.0)
_SCALED_TEXTS = 16  # on which the scale is chosen
_OUTSIDE = 1 << 20  # the rank of a token that the head does not know
_KEPT_SHARE = 0.25  # of the free memory, for what is kept of the target's passes
_KEEPING_SHARE = 0.3  # of the time that is left, for these passes
_FEWEST_KEPT = 8  # texts, however short the time
_COUNTED = 400  # pieces of corpus text in which tokens are counted, each of so many tokens
_COUNTED_TOKENS = 256
_PROGRESS_TOKENS = 1024  # of held-out answers, for the figures during the training
_MEASURED_TOKENS = 4096  # of held-out text, for the figures before the first step


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
    """The drafted tokens that a part predicts in a batch, one row each.

    `outputs` [rows, m] is what `StatesObjective.logits` turns into logits, with gradients.
    `sources` [rows], int64, has for each row the token that the predicted one follows, as an index
    into the flat batch; the row's label is the target's prediction after this token. `depths`
    [rows], int64, is the number of tokens drafted earlier in the same draft, from 0; in training
    these are taken from the text. `sources - depths` is then the last token before the draft, the
    same for all rows of one draft.
    """

    outputs: Tensor
    sources: Tensor
    depths: Tensor


class KeptStates(NamedTuple):
    """What is kept of the target's passes over n tokens: `features` [n, len(taps) * width] and
    `hidden` [n, width] as in `TargetStates`, in the target's dtype, and the target's likeliest next
    tokens as `most_probable` returns them, int32 and float32."""

    features: Tensor
    hidden: Tensor
    top_k_ids: Tensor
    top_k_log_probs: Tensor


class StatesObjective(Objective):
    """Trains a part that drafts from the hidden states of a target, whose weights do not change.

    `taps` are the layers whose inputs the part reads (see `Model.forward`). `depths` is the number
    of drafted tokens for which it is measured. The loss of a draft's token number d, from 0, is
    multiplied by `decay`**d. `reads_cache`: the part reads keys and values of the target.
    `trained_uses` are the uses of text (`Use`) with which it is trained. `reduces_head`: its LM
    head knows the most frequent tokens alone, whose ids are `ids` (None: all): at most
    `head_share` of the target's. `predict` and `logits` run within `autocast`.
    """

    depths: ClassVar[int]
    decay: ClassVar[float] = 0.8
    reads_cache: ClassVar[bool] = False
    trained_uses: ClassVar[Collection[Use]] = NOT_HELD_OUT
    reduces_head: bool = False
    head_share: ClassVar[float] = 0.5
    taps: Sequence[int] = ()

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        self.width = self.model.shape.hidden_size
        self.num_layers = self.model.shape.num_layers
        self.ids: Tensor | None = None
        self._first_rows: dict[int, int] = {}  # of each kept text, by id() of its tokens
        self._kept: KeptStates | None = None

    @abstractmethod
    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the initial weights by name. `texts` are those that the target generated."""

    @abstractmethod
    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the part on a batch, with gradients.

        `rng` is the source of random numbers in training. It is None for a measurement: then
        nothing is random, and tokens of all `depths` are predicted.
        """

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        """Returns logits [n, tokens] for n rows of `Predictions`: of the tokens `ids`."""
        return self.target_logits(outputs)

    def row_losses(self, logits: Tensor, top_k_ids: Tensor, log_probs: Tensor) -> Tensor:
        """Returns KL(target || part) [n] in nats, over the tokens that the part knows and times the
        target's probability of these; 0 in rows in which the target's likeliest token is not among
        them.

        `logits` [n, tokens] are the part's, `top_k_ids` and `log_probs`, each [n, k], the target's
        most probable tokens.
        """
        own_ids = self.own_ids(top_k_ids)
        is_known = own_ids[:, 0] >= 0
        losses = divergence(logits, torch.where(is_known[:, None], own_ids, 0), log_probs)
        return losses * is_known

    def own_ids(self, ids: Tensor) -> Tensor:
        """Returns the LM head's own ids of the target's token ids [...]; -1 for tokens that it does
        not know."""
        return ids if self.ids is None else self._own_ids[ids]

    @cached_property
    def _own_ids(self) -> Tensor:
        assert self.ids is not None
        own = torch.full((self.vocabulary,), -1, device=self.device)
        own[self.ids] = torch.arange(len(self.ids), device=self.device)
        return own

    def affordable(self, texts: Sequence[Text]) -> Sequence[Text]:
        """Those on which the target can be run in a share of the time that is left. What is read
        and learned of them is kept."""
        if self.reads_cache:
            return texts
        return texts[: self._keep(texts, _KEEPING_SHARE * self.task.seconds_left)]

    def start(self, texts: Sequence[Text]) -> TrainingBatches | None:
        if not self.reads_cache:
            self._keep(texts)
        share = int(self.head_share * self.vocabulary)
        known = min(LARGEST_VOCABULARY, max(_LEAST_VOCABULARY, share))
        if self.reduces_head and self.vocabulary > known:
            self.ids = self._vocabulary(texts, known).to(self.device)
        made = self.initial_weights(texts, torch.Generator().manual_seed(self.task.recipe.seed))
        return self.begin(made, texts, self.trained_uses)

    def teacher(self, text: Text) -> list[int]:
        first = self._first_rows.get(id(text.ids))
        length = len(text.ids)
        return [IGNORED] * length if first is None else list(range(first, first + length))

    def _keep(self, texts: Sequence[Text], seconds: float = math.inf) -> int:
        """Runs the target on the texts and keeps what is read and learned of it, of as many texts
        as memory allows. Those that are kept already stay. Returns how many of the texts can be
        used: all but those that are left when so many `seconds` have passed."""
        begin = time.monotonic()
        each = (len(self.taps) + 1) * self.width * self.dtype.itemsize + 8 * TOP_K
        room = free_memory(torch.device("cpu"))
        rows = [] if self._kept is None else [self._kept]
        count = sum(len(part.hidden) for part in rows)
        most = len(texts) * self.task.recipe.window if room is None else _KEPT_SHARE * room / each
        most += count
        usable = len(texts)
        for number, text in enumerate(texts):
            if id(text.ids) in self._first_rows:
                continue
            if count + len(text.ids) > most:
                break
            if number >= _FEWEST_KEPT and time.monotonic() - begin > seconds:
                usable = number
                break
            self.task.stop_if_requested()
            self._first_rows[id(text.ids)] = count
            rows.append(self._of_text(text))
            count += len(text.ids)
        if rows:
            self._kept = KeptStates(*map(torch.cat, zip(*rows, strict=True)))
        return usable

    def _of_text(self, text: Text) -> KeptStates:
        batch = self.whole(text.ids, 1)
        states = self.states(batch)
        ids, log_probs = self._labels(states.hidden[0])
        features = states.features[0].to(self.dtype)
        return KeptStates(features, states.hidden[0].to(self.dtype), ids.int(), log_probs)

    def whole(self, ids: list[int], first: int, teacher: list[int] | None = None) -> PackedBatch:
        """Returns a batch of a single text, whose labels are the tokens from the index `first`
        on."""
        taught = Taught(ids, teacher or [IGNORED] * len(ids), first)
        return pack([lambda *_: taught], len(ids), Random(0)).part(slice(None), self.device)

    @torch.no_grad()
    def _labels(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the target's likeliest next tokens for its last states [n, width]."""
        pieces = torch.split(hidden, self.rows)
        labels = [most_probable(self.target_logits(piece)) for piece in pieces]
        ids, log_probs = (torch.cat(parts) for parts in zip(*labels, strict=True))
        return ids, log_probs

    def _vocabulary(self, texts: Sequence[Text], number: int) -> Tensor:
        """Returns `_frequent`, which is stored with the unfinished work: a resumed training may
        have more text, but its LM head has rows of the same tokens."""
        path = self.task.folder / "vocabulary.json"
        if path.is_file():
            with suppress(OSError, ValueError):
                return torch.tensor(json.loads(path.read_text(encoding="utf-8")))
        ids = self._frequent(texts, number)
        write_whole(path, json.dumps(ids.tolist()))
        return ids

    def _frequent(self, texts: Sequence[Text], number: int) -> Tensor:
        """Returns the ids, ascending, of the `number` tokens that occur most often in generated
        text and in the corpus, filled up with the lowest others."""
        counts = Counter[int]()
        for text in texts:
            if text.use != Use.HELD_OUT:
                counts.update(text.ids[text.prompt_length :])
        if self.task.corpus is not None:
            rng = Random(f"frequent {self.task.recipe.seed}")
            for _ in range(_COUNTED):
                counts.update(self.task.corpus.sample(rng, _COUNTED_TOKENS, uses=NOT_HELD_OUT))
        frequent = [token for token, _ in counts.most_common(number)]
        others = islice(
            (token for token in range(self.vocabulary) if token not in counts),
            number - len(frequent),
        )
        return torch.tensor(sorted([*frequent, *others]))

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
        """Runs target and part on a batch. Returns the part's predictions, with gradients, and
        their labels.

        The labels are the rows' `depths`, and the target's most probable tokens with their
        log-probabilities as `most_probable` returns them. `rng` as for `predict`.
        """
        states = self.states(batch)
        with self.autocast():
            predictions = self.predict(batch, states, rng)
        labels = self.labels_of(batch, states)
        of_rows = (part.index_select(0, predictions.sources) for part in labels)
        return predictions, (predictions.depths, *of_rows)

    def labels_of(self, batch: PackedBatch, states: TargetStates) -> tuple[Tensor, Tensor]:
        """Returns the target's most probable tokens after each token of the batch, with their
        log-probabilities, as `most_probable` does."""
        kept = self._kept_rows(batch)
        if kept is None:
            return self._labels(states.hidden.flatten(0, 1))
        return kept.top_k_ids.long(), kept.top_k_log_probs

    def _kept_rows(self, batch: PackedBatch) -> KeptStates | None:
        """Returns what is kept of the batch's tokens, one after the other; None unless something is
        kept of each."""
        rows = batch.teacher.flatten()
        if self._kept is None or bool((rows == IGNORED).any()):
            return None
        return KeptStates(*(part.index_select(0, rows) for part in self._kept))

    @torch.no_grad()
    def ranks_of(self, text: Text) -> Tensor:
        """Returns the ranks [text's tokens, depths] that the part gives to the target's most
        probable tokens, for a draft after each token of the text from the prompt's last one on; -1
        before, and where nothing is predicted. See `held_out_agreement`."""
        whole = self.whole(text.ids, text.prompt_length, self.teacher(text))
        predictions, (depths, top_k_ids, _) = self.predictions(whole, None)
        pieces = []
        for piece in torch.split(torch.arange(len(depths), device=self.device), self.rows):
            with self.autocast():
                logits = self.logits(predictions.outputs[piece], depths[piece])
            best = self.own_ids(top_k_ids[piece, :1])
            ranks = (logits > logits.gather(1, best.clamp_min(0))).sum(dim=1)
            pieces.append(torch.where(best[:, 0] < 0, _OUTSIDE, ranks))
        starts = predictions.sources - depths  # the last tokens that are not drafted
        chosen = (starts >= text.prompt_length - 1) & (depths < self.depths)
        table = torch.full((len(text.ids), self.depths), -1, device=self.device)
        if pieces:
            table[starts[chosen], depths[chosen]] = torch.cat(pieces)[chosen]
        return table

    @torch.no_grad()
    def progress(self, texts: Sequence[Text]) -> tuple[float, list[float]] | None:
        """The loss is that of training; the agreement is on greedy text, if there is any."""
        chosen = list[Text]()
        count = 0
        for text in sorted(texts, key=lambda text: not text.greedy):
            if text.use == Use.HELD_OUT and count < _PROGRESS_TOKENS:
                chosen.append(text)
                count += len(text.ids) - text.prompt_length
        total = 0.0
        labelled = 0
        for text in chosen:
            whole = self.whole(text.ids, text.prompt_length, self.teacher(text))
            labelled += int((whole.labels != IGNORED).sum())
            rows, labels = self.outputs(whole, Random("held out"))
            for start in range(0, len(rows), self.rows):
                piece = slice(start, start + self.rows)
                total += float(self.losses(rows[piece], *(label[piece] for label in labels)))
        agreement, _ = held_out_agreement(chosen, self.ranks_of)
        shares = agreement["greedy"] or agreement["sampled"]
        return (total / labelled, shares) if labelled and shares else None

    def learn(self, texts: Sequence[Text]) -> list[Taught]:
        if not self.reads_cache:
            self._keep(texts)
        return super().learn(texts)

    @torch.no_grad()
    def cross_entropy(self, texts: Sequence[Text], use: Use = Use.HELD_OUT) -> float | None:
        """Returns the mean cross-entropy, in nats, of the predictions of drafts' first tokens with
        the target's likeliest tokens, as far as the part knows them: on the answers' tokens of
        texts with the use `use`, up to a limit. None without any."""
        total = 0.0
        count = 0
        for text in texts:
            if text.use != use or count >= _MEASURED_TOKENS:
                continue
            whole = self.whole(text.ids, text.prompt_length, self.teacher(text))
            predictions, (depths, top_k_ids, log_probs) = self.predictions(whole, None)
            first = (depths == 0).nonzero()[:, 0]
            for piece in torch.split(first, self.rows):
                with self.autocast():
                    logits = self.logits(predictions.outputs[piece], depths[piece]).float()
                total += float(self.entropies(logits, top_k_ids[piece], log_probs[piece]).sum())
                count += len(piece)
        return total / count if count else None

    def entropies(self, logits: Tensor, top_k_ids: Tensor, log_probs: Tensor) -> Tensor:
        """Returns the cross-entropy [n] in nats of logits [n, tokens] with the target's likeliest
        tokens, each [n, k], as far as the part knows them."""
        own_ids = self.own_ids(top_k_ids)
        weights = log_probs.exp() * (own_ids >= 0)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        log_q = logits.log_softmax(dim=-1).gather(1, own_ids.clamp_min(0))
        return -(weights * log_q).sum(dim=-1)

    def measured(self, texts: Sequence[Text]) -> dict[str, Any]:
        agreement, _ = held_out_agreement(texts, self.ranks_of)
        return {"held_out_agreement": agreement, "cross_entropy": self.cross_entropy(texts)}

    def solved_for(self, texts: Sequence[Text]) -> Iterator[tuple[PackedBatch, TargetStates]]:
        """Yields the training texts among `texts`, and some of the corpus, each as a batch with
        what the target computes for it: what least squares read."""
        recipe = self.task.recipe
        used = [text for text in texts if text.use == Use.TRAIN]
        if self.task.corpus is not None:
            rng = Random(f"least squares {recipe.seed}")
            for _ in range(_READ_TEXTS):
                ids = self.task.corpus.sample(rng, recipe.window, uses=self.trained_uses)
                used.append(Text(ids, 1, False, Use.TRAIN))
        for text in used:
            self.task.stop_if_requested()
            batch = self.whole(text.ids, text.prompt_length, self.teacher(text))
            yield batch, self.states(batch)

    def best_scale(
        self, texts: Sequence[Text], scaled: Callable[[float], Mapping[str, Tensor]]
    ) -> float:
        """Returns the scale of the logits with which initial weights predict training texts best:
        `scaled` returns the weights with a scale. 1 without such texts."""
        chosen = [text for text in texts if text.use == Use.TRAIN][:_SCALED_TEXTS]
        losses = dict[float, float]()
        for scale in _SCALES:
            self.parameters = {
                name: torch.nn.Parameter(each.to(self.device), requires_grad=False)
                for name, each in scaled(scale).items()
            }
            losses[scale] = self.cross_entropy(chosen, Use.TRAIN) or 0.0
        return min(losses, key=losses.__getitem__) if chosen else 1.0

    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetStates:
        """Returns what the target computes for a batch: what was kept, or by a pass."""
        kept = self._kept_rows(batch)
        embeddings = self.model.embeddings(batch.ids).float()
        if kept is not None:
            shape = *batch.ids.shape, -1
            features = kept.features.float().view(shape)
            return TargetStates(features, kept.hidden.float().view(shape), embeddings)
        sequences, tokens = batch.ids.shape
        cache = self.model.batch_cache(sequences) if self.reads_cache else None
        forward_pass = batch.forward_pass()._replace(cache=cache)
        taps = [*self.taps, self.num_layers]
        tapped = self.model.batch(forward_pass, taps=taps, with_head=False).features
        assert tapped is not None
        sizes = [len(self.taps) * self.width, self.width]
        features, hidden = torch.split(tapped.float(), sizes, dim=-1)
        states = TargetStates(features, hidden, embeddings)
        if cache is None:
            return states
        keys, values = cache.keys_and_values(self.num_layers - 1, tokens)
        shape = sequences, -1, *keys.shape[1:]
        return states._replace(keys_values=(keys.view(shape), values.view(shape)))

    def predicted(self, text: Text, *, keep_hidden: bool) -> PredictedText:
        """Returns a text with the target's predictions, and with `keep_hidden` its last states; on
        the CPU."""
        first = self._first_rows.get(id(text.ids))
        if first is None:
            rows = self._of_text(text)
        else:
            assert self._kept is not None
            kept = slice(first, first + len(text.ids))
            rows = KeptStates(*(part[kept] for part in self._kept))
        hidden = rows.hidden.to("cpu", torch.bfloat16) if keep_hidden else None
        return PredictedText(text, rows.top_k_ids.cpu(), rows.top_k_log_probs.cpu(), hidden)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Returns the LM head's logits [..., vocabulary] for hidden states [..., width] after the
        final norm. Differentiable."""
        hidden = hidden.to(self.dtype)
        if not isinstance(self.model, NativeModel):
            return self.model.head_logits(hidden).float()
        return final_logits(self.model.architecture, F.linear(hidden, self._lm_head)).float()

    def known_logits(self, hidden: Tensor) -> Tensor:
        """Returns `target_logits` of the tokens that the part knows."""
        if self.ids is None:
            return self.target_logits(hidden)
        if not isinstance(self.model, NativeModel):
            return self.target_logits(hidden).index_select(-1, self.ids)
        logits = F.linear(hidden.to(self.dtype), self._known_rows)
        return final_logits(self.model.architecture, logits).float()

    @cached_property
    def _known_rows(self) -> Tensor:
        return self.head_start().to(self.dtype)

    @cached_property
    def _lm_head(self) -> Tensor:
        return self.model.last_layers(self.target.folder, 0)[EXIT_HEAD].to(self.dtype)

    def head_start(self) -> Tensor:
        """Returns the rows of the target's LM head for the tokens that the part knows, float32."""
        head = self.model.last_layers(self.target.folder, 0)[EXIT_HEAD]
        return head.clone() if self.ids is None else head[self.ids.to(head.device)]


def reachable(batch: PackedBatch, distance: int) -> tuple[Tensor, Tensor]:
    """Returns all pairs of tokens of one text that are `distance` apart and of which the later one
    has a label.

    The result are two tensors [pairs] of indices into the flat batch: the earlier tokens, in
    ascending order, and the later ones.
    """
    tokens = batch.ids.shape[1]
    same = batch.segments[:, distance:] == batch.segments[:, : tokens - distance]
    is_first = F.pad(same & (batch.labels[:, distance:] != IGNORED), (0, distance))
    first = is_first.flatten().nonzero()[:, 0]
    return first, first + distance
