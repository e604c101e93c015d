"""Distillation of a draft model from its target, on text that the target generated or read (DistillSpec, arXiv 2310.08461).

The loss is the forward divergence KL(target || draft). The target's k largest probabilities after each token are computed and
stored before training, so that only the draft is in memory during training. The loss treats all tokens outside the k as one.
For a draft with another tokenizer see `translated_text`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
import yaml

from specgen.base.files import write_whole
from specgen.engine.batch_pass import BatchPass
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.inference_mode import inference
from specgen.engine.transformers.attention_masks import AttentionMasks
from specgen.engine.transformers.quiet import quiet_transformers
from specgen.train.corpus import Corpus, Part
from specgen.train.divergence import divergence
from specgen.train.generated_text import GeneratedText
from specgen.train.packing import IGNORED, PackedBatch
from specgen.train.text_generation import NOT_HELD_OUT, Purpose, TextGeneration
from specgen.train.training_loop import (
    MAX_LOGITS,
    Labels,
    Training,
    TrainingBatches,
    autocast_for,
    greedy_agreement,
    greedy_matches,
    next_tokens,
)
from specgen.train.training_task import Recipe, TrainingObserver, TrainingTask
from specgen.train.translated_text import TranslatedBatches, check_overlap, overlap_shares

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

DESCRIPTION = "distilled.yaml"
_CPU_LOGITS = 1 << 18  # numbers in a piece of logits on a CPU: few enough for its caches
_MIN_PIECE = 16  # tokens in a piece, however large the vocabulary
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class DistillationBatches(TrainingBatches):
    """Batches of corpus text and of texts for which the target's predictions are stored.

    The field `teacher` of a batch has, for each token, its row in `top_k_ids` and `top_k_log_probs`, each [tokens, k]: the
    target's k most probable next tokens and their log-probabilities.
    """

    def __init__(self, corpus: Corpus | None, texts: Sequence[GeneratedText], recipe: Recipe) -> None:
        used = [text for text in texts if text.part == Part.TRAIN]
        ends = accumulate(len(text.ids) for text in used)
        taught = [(text.ids.tolist(), [*range(end - len(text.ids), end)]) for text, end in zip(used, ends, strict=True)]
        super().__init__(corpus, taught, recipe, NOT_HELD_OUT)  # there is no predictor to train
        self.top_k_ids = _concatenated([text.top_k_ids for text in used])
        self.top_k_log_probs = _concatenated([text.top_k_log_probs for text in used])

    def compare(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of `divergence` for some draft logits [n, vocabulary], and the two numbers of `greedy_matches`.

        `rows` [n] are those of the target's predictions.
        """
        rows = rows.to(self.top_k_ids.device)
        top_k_ids = self.top_k_ids[rows].long().to(logits.device)
        loss = divergence(logits, top_k_ids, self.top_k_log_probs[rows].to(logits.device)).sum()
        return loss, greedy_matches(logits, top_k_ids[:, 0])

    def measure(self, logits_of: Callable[[torch.Tensor], torch.Tensor], texts: Sequence[GeneratedText]) -> dict[str, Any]:
        """Returns the draft's figures on held-out texts: `agreement`, the result of `greedy_agreement`."""
        return {"agreement": greedy_agreement(logits_of, texts)}


def _concatenated(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([part for part in parts if part is not None]) if parts else torch.empty(0, 1)


class DraftTraining(Training):
    """A draft model in training.

    The loss is that of the batches' method `compare` for tokens whose target probabilities are stored, and cross-entropy with the
    next token elsewhere. The weights are float32. Matrix products use float32 if `target_dtype` is float32, otherwise bfloat16.
    """

    batches: DistillationBatches | TranslatedBatches

    def __init__(
        self, draft: LoadedModel, batches: DistillationBatches | TranslatedBatches, target_dtype: torch.dtype = torch.float32
    ) -> None:
        self.draft, self._dtype = draft, torch.float32 if target_dtype == torch.float32 else torch.bfloat16
        self._model = draft.transformers_module.to(torch.float32).requires_grad_(True)
        self._masks = AttentionMasks(self._model)
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        piece_size = max(_MIN_PIECE, (_CPU_LOGITS if draft.device.type == "cpu" else MAX_LOGITS) // vocabulary)
        super().__init__(dict(self._model.named_parameters()), batches, draft.device, vocabulary, piece_size)

    def outputs(self, batch: PackedBatch) -> tuple[torch.Tensor, Labels]:
        """Returns the draft's logits [tokens, vocabulary] for all tokens of the batch, and their labels."""
        forward_pass = BatchPass(batch.ids, batch.positions, batch.attention_mask(), batch.positions)
        mask = self._masks.batched(forward_pass, self._dtype)
        with autocast_for(self.draft.device, self._dtype):
            logits: torch.Tensor = self._model(
                input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False
            ).logits
        return logits.flatten(0, 1), next_tokens(batch)

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        tokens, teacher = labels
        logits = outputs.float()
        is_taught = (teacher != IGNORED) & (tokens != IGNORED)
        is_untaught = (tokens != IGNORED) & ~is_taught
        # index_select, because the backward pass of indexing with a boolean mask sorts.
        taught, untaught = (logits.index_select(0, chosen.nonzero()[:, 0]) for chosen in (is_taught, is_untaught))
        loss, matches = self.batches.compare(taught, teacher[is_taught])
        loss = loss + F.cross_entropy(untaught, tokens[is_untaught], reduction="sum")
        return torch.cat((loss[None], matches))

    @torch.no_grad()
    def round_weights(self, dtype: torch.dtype) -> None:
        """Rounds the weights, which stay float32, to values of `dtype`."""
        for weight in self.trained.values():
            weight.copy_(weight.to(dtype))

    @inference
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the draft's next-token logits [n, vocabulary] after each of the token ids `ids` [n]."""
        logits: torch.Tensor = self._model(input_ids=ids[None].to(self.draft.device), use_cache=False).logits[0]
        return logits.float()


def distill(
    target: LoadedModel, draft: LoadedModel, task: TrainingTask, observer: TrainingObserver, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Trains `draft` to predict what `target` predicts, and saves it in the folder `task.out` with weights of `dtype`.

    The files that `draft` was loaded from do not change. The target's weights are freed, so `target` cannot be used afterwards.
    Returns measurements to store with the result: those of TrainingProgress.figures, and those of the batches' method `measure`
    on held-out text before (`agreement_before`, ...) and after training (`agreement`, ...); for a draft with another tokenizer
    also those of `overlap_shares`. Raises TrainingStopped if `observer` requests a stop (the same call resumes the training), and
    SpecgenError for an unsuitable model.
    """
    translation = draft.translation
    if translation is not None:
        check_overlap(translation, task, draft.model.num_embeddings)
    settings = {**task.settings(target), "draft": weights_fingerprint(draft.folder)}
    generation = TextGeneration(target, task, settings, observer, Purpose.DRAFT)
    texts = generation.run()
    target_dtype = target.model.dtype
    target.model.free_weights()
    held_out = [text for text in texts if text.part == Part.HELD_OUT]
    recipe = task.recipe.after_generation(generation.seconds)
    batches: DistillationBatches | TranslatedBatches
    if translation is None:
        batches = DistillationBatches(task.corpus, texts, recipe)
    else:
        vocabulary = draft.transformers_module.get_output_embeddings().weight.shape[0]
        batches = TranslatedBatches(task.corpus, texts, recipe, translation, vocabulary, draft.context_limit)
    del texts  # their tensors have been copied
    training = DraftTraining(draft, batches, target_dtype)
    before = batches.measure(training.logits, held_out)
    progress = training.run(task.folder / "state.safetensors", settings, observer, task.clock)
    training.round_weights(dtype)  # what is measured now is what is saved
    after = batches.measure(training.logits, held_out)
    figures = progress.figures(generation.seconds) | {f"{name}_before": value for name, value in before.items()} | after
    if translation is not None:
        figures |= overlap_shares(translation, held_out)
    _save(draft, dtype, target, task, figures)
    shutil.rmtree(task.folder, ignore_errors=True)
    return figures


def _save(draft: LoadedModel, dtype: torch.dtype, target: LoadedModel, task: TrainingTask, figures: dict[str, Any]) -> None:
    """Writes the trained weights and a description (YAML) to `task.out`, and copies the draft's tokenizer and other files."""
    task.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(draft.folder.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, task.out / path.name)
    with quiet_transformers():
        draft.transformers_module.requires_grad_(False).to(dtype).save_pretrained(task.out)
    description = {
        "draft": draft.name,
        "target": target.name,
        "fingerprint": weights_fingerprint(target.folder),
        "figures": figures,
        "made_with": task.made_with(),
    }
    about = "# A draft model distilled from a target: give this folder to specgen generate --draft.\n"
    write_whole(task.out / DESCRIPTION, about + yaml.safe_dump(description, sort_keys=False, allow_unicode=True))
