"""Distillation of a draft model from its target, on text that the target generated or read (DistillSpec, arXiv 2310.08461).

The loss is the forward divergence KL(target || draft). The target's k largest probabilities after each token are computed and
stored before training, so that only the draft is in memory during training. The loss treats all tokens outside the k as one.
For a draft with another tokenizer see `translation`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
import yaml

from specgen.base.files import write_whole
from specgen.engine.inference_mode import inference
from specgen.engine.native.attention import Sight
from specgen.engine.transformers.quiet import quiet_transformers
from specgen.engine.transformers.transformers_model import AttentionMasks
from specgen.engine.weights import weights_fingerprint
from specgen.train.corpus import NOT_HELD_OUT, Corpus, Part
from specgen.train.divergence import divergence
from specgen.train.generation import Purpose
from specgen.train.loop import (
    MAX_LOGITS,
    Labels,
    Objective,
    TrainingBatches,
    autocast_for,
    greedy_agreement,
    greedy_matches,
    next_tokens,
)
from specgen.train.packing import IGNORED, PackedBatch
from specgen.train.task import Recipe, TrainingObserver, TrainingTask
from specgen.train.texts import GeneratedText
from specgen.train.translation import TranslatedBatches, check_overlap, overlap_shares

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

DESCRIPTION = "distilled.yaml"
_ABOUT = "# A draft model distilled from a target: give this folder to specgen generate --draft.\n"
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


class DraftObjective(Objective):
    """A draft model, to be saved with weights of `saved_dtype`. `target` loses its weights.

    The loss is that of the batches' method `compare` for tokens whose target probabilities are stored, and cross-entropy with the
    next token elsewhere. The weights are float32. Matrix products use float32 if the target's do, otherwise bfloat16.
    """

    purpose = Purpose.DRAFT

    def __init__(self, target: LoadedModel, draft: LoadedModel, saved_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(target)
        self.draft, self._saved_dtype, self.device = draft, saved_dtype, draft.device
        self.settings = {"draft": weights_fingerprint(draft.folder)}
        self._dtype = torch.float32 if target.model.dtype == torch.float32 else torch.bfloat16
        self._model = draft.transformers_module.to(torch.float32).requires_grad_(True)
        self._masks = AttentionMasks(self._model)
        self.parameters = dict(self._model.named_parameters())
        self.vocabulary = self._model.get_output_embeddings().weight.shape[0]
        self.rows = max(_MIN_PIECE, (_CPU_LOGITS if self.device.type == "cpu" else MAX_LOGITS) // self.vocabulary)
        self.batches: DistillationBatches | TranslatedBatches

    def check(self, task: TrainingTask) -> None:
        if self.draft.translation is not None:
            check_overlap(self.draft.translation, task, self.draft.model.num_embeddings)

    def start(self, texts: Sequence[GeneratedText], task: TrainingTask, recipe: Recipe) -> TrainingBatches:
        self.target.model.free_weights()
        if (translation := self.draft.translation) is None:
            self.batches = DistillationBatches(task.corpus, texts, recipe)
        else:
            sizes = self.vocabulary, self.draft.context_limit
            self.batches = TranslatedBatches(task.corpus, texts, recipe, translation, *sizes)
        self._before = self.batches.measure(self.next_logits, _held_out(texts))
        return self.batches

    def outputs(self, batch: PackedBatch, seed: str | None) -> tuple[torch.Tensor, Labels]:
        """Returns the draft's logits [tokens, vocabulary] for all tokens of the batch, and their labels."""
        mask = self._masks(Sight(~batch.attention_mask(), batch.positions, batch.positions), self._dtype)
        with autocast_for(self.device, self._dtype):
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

    @inference
    def next_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the draft's next-token logits [n, vocabulary] after each of the token ids `ids` [n]."""
        logits: torch.Tensor = self._model(input_ids=ids[None].to(self.device), use_cache=False).logits[0]
        return logits.float()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Rounds the weights, which stay float32, to what is saved of them."""
        for weight in self.parameters.values():
            weight.copy_(weight.to(self._saved_dtype))

    def finish(
        self, texts: Sequence[GeneratedText], figures: dict[str, Any], task: TrainingTask, observer: TrainingObserver
    ) -> tuple[Path, dict[str, Any]]:
        """Also measures the draft as it was before training (`agreement_before`, ...). Its files are copied with new weights."""
        self.round_weights()
        held_out = _held_out(texts)
        figures |= {f"{name}_before": value for name, value in self._before.items()}
        figures |= self.batches.measure(self.next_logits, held_out)
        figures |= {} if self.draft.translation is None else overlap_shares(self.draft.translation, held_out)
        task.out.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.draft.folder.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, task.out / path.name)
        with quiet_transformers():
            self._model.requires_grad_(False).to(self._saved_dtype).save_pretrained(task.out)
        names = {"draft": self.draft.name, "target": self.target.name}
        description = {
            **names,
            "fingerprint": weights_fingerprint(self.target.folder),
            "figures": figures,
            "made_with": task.made_with(),
        }
        write_whole(task.out / DESCRIPTION, _ABOUT + yaml.safe_dump(description, sort_keys=False, allow_unicode=True))
        return task.out, figures


def _held_out(texts: Sequence[GeneratedText]) -> list[GeneratedText]:
    return [text for text in texts if text.part == Part.HELD_OUT]
