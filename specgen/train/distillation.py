"""Distillation of a draft model from its target, on text that the target generated or read
(DistillSpec, arXiv 2310.08461).

The loss is the forward divergence KL(target || draft). The target's k largest probabilities after
each token are computed before training, so that only the draft is in memory during training. The
loss treats all tokens outside the k as one. For a draft with another tokenizer, the target's text
is translated into the draft's tokens.

A drafted token can be accepted only if both vocabularies have it (token-level intersection, Timor
et al. 2025, arXiv 2502.05202, Algorithm 4). With p the target's next-token distribution, m its
probability on this overlap, and p' and q' the target's and the draft's distributions restricted to
it and renormalized, the chance of acceptance is the sum of min(p, q') over the overlap. It is at
most m, and because p = m p' there, it is at least m (1 - TV(p', q')) >= m (1 - sqrt(KL(p' || q') /
2)). A draft with KL(p' || q') = 0 therefore reaches the bound m, whatever it predicts off the
overlap.

This comparison is sound only where both models have read the same bytes and are about to continue
them: after a draft token that ends at the byte at which a target token ends. There the loss is
`divergence`: m KL(p' || q'), and the divergence of the draft's own probability of the overlap from
m. After all other draft tokens, those of the prompt included but for its last, and where m is
small, the loss is cross-entropy with the draft's next token.

Drafting reads a text as `Translation` writes it: the prompt in the draft's own tokenization, then
each token of the target's output as one draft token, or spelled by several. Training uses the same
form: in the output it has a boundary after every token of the target, even where the draft's
tokenizer would have cut the text elsewhere, so that a distilled draft learns the target's
tokenization.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
import yaml
from torch import Tensor

from specgen.base.errors import SpecgenError
from specgen.base.files import DRAFT_DESCRIPTION, write_whole
from specgen.engine.devices import DTYPES, free_memory, inference
from specgen.engine.draft_model import DraftModel
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.attention_mask import AttentionMask
from specgen.engine.text.translation import Translation
from specgen.engine.transformers.loading import load_module
from specgen.engine.transformers.quiet import quiet_transformers
from specgen.engine.transformers.transformers_model import AttentionMasks
from specgen.engine.weights import weights_fingerprint
from specgen.train.corpus import NOT_HELD_OUT, Corpus, Use
from specgen.train.joined_layers import join, joined_draft
from specgen.train.loop import (
    IGNORED,
    MAX_LOGITS,
    Labels,
    Objective,
    PackedBatch,
    Taught,
    TrainingBatches,
    divergence,
    first_shares,
    held_out_agreement,
)
from specgen.train.task import TrainingTask
from specgen.train.texts import PredictedText, Text, predicted

_ABOUT = "# A draft model distilled from a target: give this folder to specgen generate --draft.\n"
_CPU_LOGITS = 1 << 18  # numbers in a piece of logits on a CPU: few enough for its caches
_MIN_PIECE = 16  # tokens in a piece, however large the vocabulary
_READ_FACTOR = 2  # corpus texts that the target predicts, for each text that it generated;
_READ_SHARE = 0.1  # that takes at most this share of the time that is left
# the models are compared where the target's probability on the overlap is at least this
_MIN_MASS = 0.05
# of the time that is left of a budget in seconds: for the target's predictions, and for joining
_PREDICTED_SHARE = 0.2
_JOIN_SHARE = 0.05
_FEWEST_PREDICTED = 8  # texts, however short the time
_MEASURED_TOKENS = 4096  # of held-out answers
_PROGRESS_TOKENS = 1024  # of these, during the training
_DEPTHS = 5  # tokens of a draft for which agreement is measured
_BYTES_OF_TRAINING = 12  # of a weight's gradient and of the optimizer's two means
_COMPARED_TOKENS = 8192  # at most, where the draft has the target's own LM head
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


# least share of the training text's tokens that both have; no larger share of tokens can be
# accepted
MIN_OVERLAP = 0.3
_CHECKED = 200  # pieces of text, each of at most _CHECKED_TOKENS tokens
_CHECKED_TOKENS = 100
_READ_CONTEXT = 0.05  # of a corpus text: the share at its beginning that is translated as a prompt
_HINT = "Take a draft with the target's tokenizer, or a method without a draft model: -m lookup"


class DraftBatches(TrainingBatches):
    """Batches in the draft's tokens of corpus text and of texts with the target's predictions.

    The field `teacher` of a batch has, for each token after which the models are compared, its row
    in `top_k_ids` and `top_k_log_probs`, each [tokens, k]: see `Comparisons`. If translated texts
    have more tokens than in the target's tokens, the sequences are longer than the recipe's window
    in the same proportion, up to `context_limit` tokens.
    """

    def __init__(
        self,
        task: TrainingTask,
        texts: Sequence[PredictedText],
        translation: Translation | None,
        context_limit: int,
    ) -> None:
        self._translation = translation
        self._numbers: Tensor | None = None  # see `number`
        self.top_k_ids = texts[0].top_k_ids[:0]
        self.top_k_log_probs = texts[0].top_k_log_probs[:0]
        taught = self.compare(texts)

        of_target = sum(len(text.text.ids) for text in texts)
        longer = sum(len(text.ids) for text in taught) / of_target
        window = min(context_limit, math.ceil(task.recipe.window * max(1.0, longer)))
        super().__init__(task, taught, NOT_HELD_OUT, window)  # there is no predictor to train

    def number(self, numbers: Tensor) -> None:
        """Puts the tokens' `numbers` [vocabulary], -1 for tokens without one, in the place of those
        in `top_k_ids`, also of texts that `compare` adds later."""
        self._numbers = numbers
        self.top_k_ids = numbers[self.top_k_ids.long()]

    def compare(self, texts: Sequence[PredictedText]) -> list[Taught]:
        """Adds the target's predictions on texts. Returns the texts in the draft's tokens, for
        `add`."""
        taught = []
        all_ids = [self.top_k_ids]
        all_log_probs = [self.top_k_log_probs]
        row = len(self.top_k_ids)
        for text in texts:
            ids, after, top_k_ids, log_probs, first = comparisons(
                self._translation, text, _MIN_MASS
            )
            teacher = torch.full_like(ids, IGNORED)
            teacher[after] = torch.arange(row, row + len(after))
            row += len(after)
            taught.append(Taught(ids.tolist(), teacher.tolist(), first))
            if self._numbers is not None:
                top_k_ids = self._numbers[top_k_ids.long()]
            all_ids.append(top_k_ids)
            all_log_probs.append(log_probs)
        self.top_k_ids = torch.cat(all_ids)
        self.top_k_log_probs = torch.cat(all_log_probs)
        return taught

    def _sample_corpus(self, rng: Random, max_tokens: int) -> Taught:
        sampled = super()._sample_corpus(rng, max_tokens)
        if self._translation is None:
            return sampled
        of_draft = self._translation.prompt(sampled.ids)[:max_tokens]
        return Taught(of_draft, [IGNORED] * len(of_draft))


class DraftObjective(Objective):
    """Distils a draft model: trains a copy of it in float32, run by transformers, and saves it in
    the dtype of its files.

    The loss is the divergence after tokens where the target's probabilities are known, and
    cross-entropy with the next token elsewhere. `start` frees the target's weights once its
    predictions are computed, unless it may generate further text: with a budget in seconds, where
    the memory is enough for both.
    """

    batches: DraftBatches

    def __init__(self, task: TrainingTask, target: LoadedModel, draft: DraftModel | None) -> None:
        """`draft` None: the draft model is made of layers of the target, whose embedding and LM
        head it keeps."""
        super().__init__(task, target)
        self._is_joined = draft is None
        if draft is None:
            draft = joined_draft(target, task.folder / "start")
        self.draft = draft
        self.device = draft.device
        quantised = draft.files.quantisation
        text = task.corpus or task.prompts
        if quantised is not None:
            problem = (
                f"the draft {draft.name} cannot be trained: its weights are "
                f"quantised with {quantised.get('quant_method')}"
            )
            raise SpecgenError(
                problem,
                "Train the checkpoint that it was made from; drafts are quantised after training",
            )
        if draft.folder.is_file():
            problem = f"the draft {draft.name} cannot be trained: it is a GGUF file"
            raise SpecgenError(
                problem, "Train the safetensors model that it was made from, and convert that"
            )
        if draft.refusal is not None:
            raise draft.refusal
        if task.out.resolve() in (draft.folder.resolve(), target.folder.resolve()):
            raise SpecgenError(
                f"--out is {task.out}, the folder of one of the models",
                "Name another: they are not changed",
            )
        if draft.translation is not None and text is not None:
            check_overlap(draft.translation, text, draft.files.shape.vocab_size)
        self.settings = {"the draft model": weights_fingerprint(draft.folder)}
        self.saved_dtype = DTYPES.get(str(draft.files.shape.dtype), torch.float32)
        self.dtype = torch.float32 if self.dtype == torch.float32 else torch.bfloat16
        self._module = load_module(draft.files, torch.float32, self.device).requires_grad_(True)
        self._masks = AttentionMasks(self._module)
        if self._is_joined:
            for module in (
                self._module.get_input_embeddings(),
                self._module.get_output_embeddings(),
            ):
                module.requires_grad_(False)
        self.parameters = dict(self._module.named_parameters())
        self.vocabulary = self._module.get_output_embeddings().weight.shape[0]
        self.rows = self._rows_at_once()
        self._compared: Tensor | None = None  # the tokens of the loss; None: all
        self._numbers: Tensor | None = None  # each token's place among these, -1 if it is none
        self.off_overlap = off_overlap(draft.translation, self.vocabulary)

    def start(self, texts: Sequence[Text]) -> TrainingBatches:
        """Computes the target's predictions on the texts that it generated and, if the user gave no
        prompts, on twice as many texts of the corpus. Then frees the target, if it generates no
        further text."""
        recipe = self.task.recipe
        corpus = self.task.corpus
        predictions = list[PredictedText]()
        end = time.monotonic() + _PREDICTED_SHARE * self.task.seconds_left
        for text in texts:
            if len(predictions) >= _FEWEST_PREDICTED and time.monotonic() > end:
                break
            self.task.stop_if_requested()
            predictions.append(predicted(self.target, text))
        rng = Random(f"read {recipe.seed}")
        length = min(recipe.window, self.target.context_limit)
        end = time.monotonic() + _READ_SHARE * self.task.seconds_left
        if corpus is not None and self.task.prompts is None:
            for _ in range(_READ_FACTOR * len(texts)):
                if time.monotonic() > end:
                    break
                self.task.stop_if_requested()
                ids = corpus.sample(rng, length, uses=NOT_HELD_OUT)
                read = Text(ids, len(ids), False, Use.TRAIN)
                predictions.append(predicted(self.target, read))
        if self._is_joined:
            join(
                self._module,
                self.target,
                [text for text in texts if text.use == Use.TRAIN],
                _JOIN_SHARE * self.task.seconds_left,
            )
        self.generates = recipe.steps is None and self._has_memory_for_both()
        if not self.generates:
            self.target.model.free_weights()
        taught = [text for text in predictions if text.text.use == Use.TRAIN]
        self._held_out = self._measured(predictions)
        self.batches = DraftBatches(
            self.task, taught, self.draft.translation, self.draft.context_limit
        )
        if self._is_joined:
            self._reduce_head()
        return self.batches

    def learn(self, texts: Sequence[Text]) -> list[Taught]:
        own = [text for text in texts if text.use == Use.TRAIN]
        return self.batches.compare([predicted(self.target, text) for text in own])

    def _has_memory_for_both(self) -> bool:
        """Returns whether the draft can be trained while the target stays in memory."""
        free = free_memory(self.device)
        trained = sum(weight.numel() for weight in self.parameters.values() if weight.requires_grad)
        return free is None or free > _BYTES_OF_TRAINING * trained

    def _measured(self, predictions: Sequence[PredictedText]) -> list[PredictedText]:
        """Returns those that are measured: of held-out texts, greedy ones first, up to a limit."""
        held_out = [text for text in predictions if text.text.use == Use.HELD_OUT]
        chosen = []
        tokens = 0
        for prediction in sorted(held_out, key=lambda prediction: not prediction.text.greedy):
            if tokens < _MEASURED_TOKENS:
                chosen.append(prediction)
                tokens += len(prediction.text.ids) - prediction.text.prompt_length
        return chosen

    @torch.no_grad()
    def _reduce_head(self) -> None:
        """Limits the loss to the tokens that the target finds likely in the training text: the LM
        head of all tokens would take most of a step. A draft whose logits are not just its LM
        head's products keeps all."""
        ids = self.batches.top_k_ids.long()
        probs = self.batches.top_k_log_probs.exp()
        mass = torch.bincount(ids.flatten(), probs.flatten().double(), minlength=self.vocabulary)
        count = min(_COMPARED_TOKENS, int((mass > 0).sum()))
        compared = mass.topk(count).indices.sort().values.to(self.device)
        some = ids[:8, 0][None].to(self.device)
        full = self._module(input_ids=some, use_cache=False).logits[..., compared]
        states = self._module.get_decoder()(input_ids=some, use_cache=False).last_hidden_state
        head = self._module.get_output_embeddings().weight[compared]
        if not torch.allclose(F.linear(states, head), full, rtol=1e-3, atol=1e-3):
            return
        self._compared = compared
        self._numbers = torch.full((self.vocabulary,), -1, device=self.device)
        self._numbers[compared] = torch.arange(count, device=self.device)
        self.batches.number(self._numbers.cpu())
        self.vocabulary = count
        self.rows = self._rows_at_once()

    def _rows_at_once(self) -> int:
        most = _CPU_LOGITS if self.device.type == "cpu" else MAX_LOGITS
        return max(_MIN_PIECE, most // self.vocabulary)

    def outputs(self, batch: PackedBatch, rng: Random) -> tuple[Tensor, Labels]:
        """Returns the draft's logits [tokens, vocabulary] for all tokens of the batch, in the
        vocabulary of the loss, and as their labels the batch's `labels` and `teacher`."""
        mask = self._masks(
            AttentionMask(~batch.forward_pass().visible, batch.positions, batch.positions),
            self.dtype,
        )
        inputs = {
            "input_ids": batch.ids,
            "attention_mask": mask,
            "position_ids": batch.positions,
            "use_cache": False,
        }
        with self.autocast():
            if self._compared is None:
                logits: Tensor = self._module(**inputs).logits
            else:
                states = self._module.get_decoder()(**inputs).last_hidden_state
                head = self._module.get_output_embeddings().weight[self._compared]
                logits = F.linear(states, head)
        return logits.flatten(0, 1), (batch.labels.flatten(), batch.teacher.flatten())

    def losses(self, outputs: Tensor, *labels: Tensor) -> Tensor:
        tokens, teacher = labels
        logits = outputs.float()
        is_taught = (teacher != IGNORED) & (tokens != IGNORED)
        is_untaught = (tokens != IGNORED) & ~is_taught
        # index_select, because the backward pass of indexing with a boolean mask sorts.
        taught, untaught = (
            logits.index_select(0, chosen.nonzero()[:, 0]) for chosen in (is_taught, is_untaught)
        )
        rows = teacher[is_taught].cpu()
        following = tokens[is_untaught]
        if self._numbers is not None:
            following = self._numbers[following]
            following = following.masked_fill(following < 0, IGNORED)
        top_k_ids = self.batches.top_k_ids[rows]
        loss = self._divergences(taught, top_k_ids, self.batches.top_k_log_probs[rows]).sum()
        return loss + F.cross_entropy(untaught, following, reduction="sum", ignore_index=IGNORED)

    def _divergences(self, logits: Tensor, top_k_ids: Tensor, log_probs: Tensor) -> Tensor:
        """Returns the divergences at positions with the draft's logits [n, vocabulary], in the
        vocabulary of the loss, and the target's likeliest tokens [n, k], -1 for those outside of
        it; positions without any are left out."""
        top_k_ids = top_k_ids.long().to(logits.device)
        log_probs = log_probs.to(logits.device)
        if self._numbers is not None:
            known = (top_k_ids >= 0).any(dim=-1).nonzero()[:, 0]
            logits, top_k_ids, log_probs = (
                rows.index_select(0, known) for rows in (logits, top_k_ids, log_probs)
            )
        return divergence(logits, top_k_ids, log_probs, self.off_overlap)

    def measured(self, texts: Sequence[Text]) -> dict[str, Any]:
        """Returns `held_out_agreement` with the target, and `cross_entropy`: the mean divergence
        from the target's distribution as far as it is known, plus that distribution's entropy."""
        loss, entropy, agreement = self._figures(_MEASURED_TOKENS)
        return {
            "held_out_agreement": agreement,
            "cross_entropy": None if loss is None else loss + entropy,
        }

    def progress(self, texts: Sequence[Text]) -> tuple[float, list[float]] | None:
        loss, _, agreement = self._figures(_PROGRESS_TOKENS)
        shares = agreement["greedy"] or agreement["sampled"]
        return None if loss is None or not shares else (loss, shares)

    @torch.no_grad()
    def _figures(
        self, most_tokens: int
    ) -> tuple[float | None, float, dict[str, list[float] | None]]:
        """Measures on generated tokens of held-out texts, up to about `most_tokens`: the mean
        divergence, the entropy of the target's likeliest tokens, and the agreement by position in a
        draft (`held_out_agreement`). A draft with another tokenizer reads a text as in drafting
        (see `translate`)."""
        divergences = list[Tensor]()
        entropies = list[Tensor]()
        ranks = dict[int, Tensor]()
        texts = []
        for prediction in self._held_out:
            if sum(map(len, divergences)) >= most_tokens:
                break
            compared = comparisons(self.draft.translation, prediction, 0.0, only_generated=True)
            limit = self.draft.context_limit
            inside = compared.after < limit
            logits = self.next_logits(compared.ids[:limit])[compared.after[inside]].cpu()
            top_k_ids = compared.top_k_ids[inside]
            log_probs = compared.log_probs[inside]
            on_overlap = logits.index_fill(-1, self.off_overlap, -torch.inf)
            is_wrong = (on_overlap.argmax(dim=-1) != top_k_ids[:, 0]).long()
            ranks[id(prediction.text)] = F.pad(is_wrong, (0, _DEPTHS - 1), value=-1).unfold(
                0, _DEPTHS, 1
            )
            texts.append(prediction.text)

            known = (top_k_ids >= 0).any(dim=-1)
            entropies.append(-(log_probs.exp() * log_probs).sum(dim=-1)[known])
            if self._numbers is not None:
                assert self._compared is not None
                logits = logits[:, self._compared.cpu()]
                top_k_ids = self._numbers.cpu()[top_k_ids.long()]
            divergences.append(self._divergences(logits[known], top_k_ids[known], log_probs[known]))
        agreement, _ = held_out_agreement(texts, lambda text: ranks[id(text)])
        if not any(len(rows) for rows in divergences):
            return None, 0.0, agreement
        means = (float(torch.cat(rows).mean()) for rows in (divergences, entropies))
        return next(means), next(means), agreement

    def agreement(self) -> dict[str, float | None]:
        """Returns, for `greedy` and for `sampled` text, the share of tokens for which draft and
        target have the same most probable token; None where there are no such tokens."""
        return first_shares(self._figures(_MEASURED_TOKENS)[2])

    @inference
    def next_logits(self, ids: Tensor) -> Tensor:
        """Returns the draft's next-token logits [n, vocabulary] after each of the token ids `ids`
        [n]."""
        logits: Tensor = self._module(input_ids=ids[None].to(self.device), use_cache=False).logits[
            0
        ]
        return logits.float()

    def finish(self, texts: Sequence[Text], figures: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Saves a copy of the draft model's folder with the trained weights.

        The figures get `agreement` with the target, and `agreement_before`, that of the draft
        before training.
        """
        out = self.task.out
        with torch.no_grad():
            for weight in self.parameters.values():
                weight.copy_(weight.to(self.saved_dtype))
        before = first_shares(figures["start"]["held_out_agreement"])
        figures |= self.measured(texts)
        agreement = first_shares(figures["held_out_agreement"])
        figures |= {"agreement_before": before, "agreement": agreement}
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.draft.folder.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, out / path.name)
        with quiet_transformers():
            self._module.requires_grad_(False).to(self.saved_dtype).save_pretrained(out)
        description = {
            "draft": self.draft.name,
            "target": self.target.name,
            "fingerprint": weights_fingerprint(self.target.folder),
            "figures": figures,
            "made_with": self.task.made_with(),
        }
        write_whole(
            out / DRAFT_DESCRIPTION,
            _ABOUT + yaml.safe_dump(description, sort_keys=False, allow_unicode=True),
        )
        return out, description


def check_overlap(translation: Translation, text: Corpus, num_embeddings: int) -> None:
    """Raises SpecgenError if the draft's vocabulary has too few of the training text's tokens for
    distillation to gain anything.

    Also raises it if the draft's tokenizer has more tokens than `num_embeddings`, the number of
    embeddings in its model.
    """
    tokens = len(translation.draft.pieces)
    if tokens > num_embeddings:
        raise SpecgenError(
            (
                f"the draft's tokenizer has {tokens:,} tokens, and its model "
                f"{num_embeddings:,} embeddings"
            ),
            _HINT,
        )
    rng = Random(0)
    ids = list[int]()
    for _ in range(_CHECKED):
        ids += text.sample(rng, _CHECKED_TOKENS)
    # a model can have more ids than its tokenizer has tokens
    to_draft = translation.target_to_draft
    common = sum(id_ < len(to_draft) and to_draft[id_] >= 0 for id_ in ids) / len(ids)
    if common < MIN_OVERLAP:
        shared = f"{common:.0%} of the training text's tokens"
        raise SpecgenError(
            f"the draft's vocabulary has only {shared}: more could never be accepted", _HINT
        )


def off_overlap(translation: Translation | None, vocabulary: int) -> Tensor:
    """Returns the ids of the draft's tokens that the target lacks, int64; empty without a
    translation. `vocabulary` is the number of the draft's ids."""
    known = range(vocabulary) if translation is None else translation.target_to_draft
    return torch.tensor(sorted(set(range(vocabulary)).difference(known)), dtype=torch.long)


def translate(
    translation: Translation, ids: Sequence[int], prompt_length: int
) -> tuple[list[int], list[int]]:
    """Returns the draft's token ids for a text of the target's token ids `ids`, as the draft model
    reads the text in drafting.

    The first `prompt_length` tokens are a prompt, which is tokenized anew; each later token is one
    token of the draft or spelled by several. The second list has, for each of the draft's tokens,
    the index of the target's token that ends at the same byte, or IGNORED.
    """
    of_draft = list[int]()
    positions = list[int]()
    pieces = [
        translation.prompt(ids[:prompt_length]),
        *map(translation.spelling, ids[prompt_length:]),
    ]
    for index, piece in enumerate(pieces, prompt_length - 1):
        of_draft += piece
        positions += [*[IGNORED] * (len(piece) - 1), index][: len(piece)]
    return of_draft, positions


class Comparisons(NamedTuple):
    """A text in the draft's tokens, with the target's predictions where the models are compared.

    `ids` [n] are the draft's token ids, of which those from the index `first` on are learned: the
    target's answer, or all of a text that it only read. `after` [c] are the indices in `ids` of the
    tokens after which the models are compared. `top_k_ids` [c, k] are the target's most probable
    next tokens there, as the draft's ids (-1 for a token that the draft lacks), and `log_probs`
    [c, k] their log-probabilities.
    """

    ids: Tensor
    after: Tensor
    top_k_ids: Tensor
    log_probs: Tensor
    first: int


def comparisons(
    translation: Translation | None,
    prediction: PredictedText,
    min_mass: float,
    *,
    only_generated: bool = False,
) -> Comparisons:
    """Translates a text to the draft's tokens, and finds the tokens after which the models are
    compared.

    These are the tokens after which both models have read the same bytes and the target gives the
    tokens that both have a probability of at least `min_mass`. Without a translation (None) they
    are all tokens or, with `only_generated`, those before tokens that the target generated.
    """
    text, length = prediction.text, len(prediction.text.ids)
    if translation is None:
        first = text.prompt_length - 1 if only_generated else 0
        after = torch.arange(first, length - only_generated)
        return Comparisons(
            torch.tensor(text.ids),
            after,
            prediction.top_k_ids[after],
            prediction.top_k_log_probs[after],
            text.prompt_length if text.prompt_length < length else 1,
        )
    is_read = text.prompt_length >= length  # a corpus text: its beginning is translated as a prompt
    prompt_length = max(1, int(_READ_CONTEXT * length)) if is_read else text.prompt_length
    ids, positions = translate(translation, text.ids, prompt_length)
    chosen = [(after, before) for after, before in enumerate(positions) if 0 <= before < length - 1]
    after, before = torch.tensor(chosen, dtype=torch.long).reshape(-1, 2).T
    of_target = prediction.top_k_ids[before]
    log_probs = prediction.top_k_log_probs[before]
    to_draft = torch.tensor(translation.target_to_draft, dtype=torch.int)
    is_known = of_target < len(to_draft)
    top_k_ids = torch.where(is_known, to_draft[of_target.clamp_max(len(to_draft) - 1)], -1)
    probs = log_probs.exp()
    kept = torch.where(top_k_ids >= 0, probs, 0).sum(dim=-1) >= min_mass * probs.sum(dim=-1)
    first = 1 if is_read else len(translation.prompt(text.ids[:prompt_length]))
    return Comparisons(torch.tensor(ids), after[kept], top_k_ids[kept], log_probs[kept], first)
