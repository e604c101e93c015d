"""Distillation of a draft model from its target, on text that the target generated or read (DistillSpec, arXiv 2310.08461).

The loss is the forward divergence KL(target || draft). The target's k largest probabilities after each token are computed before
training, so that only the draft is in memory during training. The loss treats all tokens outside the k as one. For a draft with
another tokenizer see `translation`.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
import yaml

from specgen.base.errors import SpecgenError
from specgen.base.files import write_whole
from specgen.engine.devices import DTYPES
from specgen.engine.inference_mode import inference
from specgen.engine.native.attention import Sight
from specgen.engine.text.translation import Translation
from specgen.engine.transformers.loading import load_module
from specgen.engine.transformers.quiet import quiet_transformers
from specgen.engine.transformers.transformers_model import AttentionMasks
from specgen.engine.weights import weights_fingerprint
from specgen.train.corpus import NOT_HELD_OUT, Part
from specgen.train.loop import IGNORED, MAX_LOGITS, Labels, Objective, PackedBatch, Taught, TrainingBatches
from specgen.train.measures import divergence, first_shares, held_out_agreement
from specgen.train.task import TrainingTask
from specgen.train.texts import PredictedText, Text, predicted
from specgen.train.translation import Comparisons, check_overlap, common_share, comparisons, off_overlap

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

DESCRIPTION = "distilled.yaml"
_ABOUT = "# A draft model distilled from a target: give this folder to specgen generate --draft.\n"
_CPU_LOGITS = 1 << 18  # numbers in a piece of logits on a CPU: few enough for its caches
_MIN_PIECE = 16  # tokens in a piece, however large the vocabulary
_READ_FACTOR = 2  # corpus texts that the target reads, for each one that it generated,
_READ_SHARE = 0.1  # of a budget in seconds at most
_MIN_MASS = 0.05  # least probability of the target on the overlap for a comparison there
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class DraftBatches(TrainingBatches):
    """Batches in the draft's tokens of corpus text and of texts with the target's predictions.

    The field `teacher` of a batch has, for each token after which the models are compared, its row in `top_k_ids` and
    `top_k_log_probs`, each [tokens, k]: see `Comparisons`. With a translation, sequences hold as many of the target's tokens.
    """

    def __init__(
        self, task: TrainingTask, texts: Sequence[PredictedText], translation: Translation | None, context_limit: int
    ) -> None:
        self._translation = translation
        compared = [comparisons(translation, each, _MIN_MASS) for each in texts]
        self.top_k_ids = torch.cat([each.top_k_ids for each in compared]) if compared else torch.empty(0, 1).int()
        self.top_k_log_probs = torch.cat([each.log_probs for each in compared]) if compared else torch.empty(0, 1)
        starts = accumulate((len(each.after) for each in compared), initial=0)
        taught = []
        for each, start in zip(compared, starts, strict=False):
            teacher = torch.full_like(each.ids, IGNORED)
            teacher[each.after] = torch.arange(start, start + len(each.after))
            taught.append((each.ids.tolist(), teacher.tolist()))
        longer = sum(len(ids) for ids, _ in taught) / max(1, sum(len(each.text.ids) for each in texts))
        window = min(context_limit, math.ceil(task.recipe.window * max(1.0, longer)))
        super().__init__(task, taught, NOT_HELD_OUT, window)  # there is no predictor to train

    def _sample_corpus(self, rng: Random, max_tokens: int) -> Taught:
        ids, teacher = super()._sample_corpus(rng, max_tokens)
        if self._translation is None:
            return ids, teacher
        of_draft = self._translation.prompt(ids)[:max_tokens]
        return of_draft, [IGNORED] * len(of_draft)


class DraftObjective(Objective):
    """A draft model, of which transformers trains a copy in float32. It is saved in the dtype of its files.

    The loss is the divergence after tokens where the target's probabilities are known, and cross-entropy with the next token
    elsewhere. `target` loses its weights.
    """

    batches: DraftBatches

    def __init__(self, task: TrainingTask, target: LoadedModel, draft: LoadedModel) -> None:
        super().__init__(task, target)
        self.draft, self.device = draft, draft.device
        quantised, text = draft.prepared.quantisation, task.corpus or task.prompts
        if quantised is not None:
            problem = f"the draft {draft.name} cannot be trained: its weights are quantised with {quantised.get('quant_method')}"
            raise SpecgenError(problem, "Train the checkpoint that it was made from; drafts are quantised after training")
        if draft.refusal is not None:
            raise draft.refusal
        if task.out.resolve() in (draft.folder.resolve(), target.folder.resolve()):
            raise SpecgenError(f"--out is {task.out}, the folder of one of the models", "Name another: they are not changed")
        if draft.translation is not None and text is not None:
            check_overlap(draft.translation, text, draft.prepared.shape.vocab_size)
        self.settings = {"the draft model": weights_fingerprint(draft.folder)}
        self.saved_dtype = DTYPES.get(str(draft.prepared.shape.dtype), torch.float32)
        self.dtype = torch.float32 if self.dtype == torch.float32 else torch.bfloat16
        self._module = load_module(draft.prepared, torch.float32, self.device).requires_grad_(True)
        self._masks = AttentionMasks(self._module)
        self.parameters = dict(self._module.named_parameters())
        self.vocabulary = self._module.get_output_embeddings().weight.shape[0]
        self.rows = max(_MIN_PIECE, (_CPU_LOGITS if self.device.type == "cpu" else MAX_LOGITS) // self.vocabulary)
        self.off_overlap = off_overlap(draft.translation, self.vocabulary)

    def start(self, texts: Sequence[Text]) -> TrainingBatches:
        """Has the target predict after the tokens of its texts and, unless there are prompts, of twice as many corpus texts."""
        recipe, corpus, found = self.task.recipe, self.task.corpus, list[PredictedText]()
        for text in texts:
            self.task.stop_if_requested()
            found.append(predicted(self.target, text))
        rng, length = Random(f"read {recipe.seed}"), min(recipe.window, self.target.context_limit)
        end = math.inf if recipe.seconds is None else time.monotonic() + _READ_SHARE * recipe.seconds
        if corpus is not None and self.task.prompts is None:
            for _ in range(_READ_FACTOR * len(texts)):
                if time.monotonic() > end:
                    break
                self.task.stop_if_requested()
                ids = corpus.sample(rng, length, parts=NOT_HELD_OUT)
                found.append(predicted(self.target, Text(ids, len(ids), False, Part.TRAIN)))
        self.target.model.free_weights()
        taught = [each for each in found if each.text.part == Part.TRAIN]
        self._held_out = {id(each.text): each for each in found if each.text.part == Part.HELD_OUT}
        self.batches = DraftBatches(self.task, taught, self.draft.translation, self.draft.context_limit)
        self._before = self.measure()
        return self.batches

    def outputs(self, batch: PackedBatch, seed: str | None) -> tuple[torch.Tensor, Labels]:
        """Returns the draft's logits [tokens, vocabulary] for all tokens of the batch, and their labels."""
        mask = self._masks(Sight(~batch.forward_pass().visible, batch.positions, batch.positions), self.dtype)
        with self.autocast():
            logits: torch.Tensor = self._module(
                input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False
            ).logits
        return logits.flatten(0, 1), (batch.labels.flatten(), batch.teacher.flatten())

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        tokens, teacher = labels
        logits = outputs.float()
        is_taught = (teacher != IGNORED) & (tokens != IGNORED)
        is_untaught = (tokens != IGNORED) & ~is_taught
        # index_select, because the backward pass of indexing with a boolean mask sorts.
        taught, untaught = (logits.index_select(0, chosen.nonzero()[:, 0]) for chosen in (is_taught, is_untaught))
        rows = teacher[is_taught].cpu()
        top_k_ids, log_probs = (table[rows].to(logits.device) for table in (self.batches.top_k_ids, self.batches.top_k_log_probs))
        loss = divergence(taught, top_k_ids.long(), log_probs, self.off_overlap).sum()
        return loss + F.cross_entropy(untaught, tokens[is_untaught], reduction="sum")

    def measure(self) -> dict[str, Any]:
        """Returns the draft's figures on the generated tokens of held-out texts. Its context is what drafting makes it.

        `agreement` has the share of tokens for which draft and target have the same most probable token, in greedy and in sampled
        text; None where there are no such tokens. `acceptance`, with a translation, is the mean sum of min(p, q') over the
        target's known probabilities in sampled text: the expected acceptance of a drafted token at temperature 1; None without
        such text.
        """
        accepted: list[torch.Tensor] = []

        def ranks_of(text: Text) -> torch.Tensor:
            found = self._compared(text)
            logits = self.next_logits(found.ids)[found.after].cpu().index_fill(-1, self.off_overlap, -torch.inf)
            if not text.greedy:
                q = logits.softmax(dim=-1).gather(-1, found.top_k_ids.clamp_min(0).long())
                p = torch.where(found.top_k_ids >= 0, found.log_probs.exp(), 0)
                accepted.append(torch.minimum(p, q).sum(dim=-1))
            return (logits.argmax(dim=-1) != found.top_k_ids[:, 0])[:, None].long()

        texts = [each.text for each in self._held_out.values()]
        figures: dict[str, Any] = {"agreement": first_shares(held_out_agreement(texts, ranks_of)[0])}
        if self.draft.translation is not None:
            figures["acceptance"] = float(torch.cat(accepted).mean()) if accepted else None
        return figures

    def _compared(self, text: Text) -> Comparisons:
        found = comparisons(self.draft.translation, self._held_out[id(text)], 0.0, only_generated=True)
        inside = found.after < self.draft.context_limit
        ids = found.ids[: self.draft.context_limit]
        return Comparisons(ids, found.after[inside], found.top_k_ids[inside], found.log_probs[inside])

    @inference
    def next_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the draft's next-token logits [n, vocabulary] after each of the token ids `ids` [n]."""
        logits: torch.Tensor = self._module(input_ids=ids[None].to(self.device), use_cache=False).logits[0]
        return logits.float()

    def finish(self, texts: Sequence[Text], figures: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Also measures the draft as it was before training (`agreement_before`, ...). Its files are copied with new weights."""
        out = self.task.out
        with torch.no_grad():
            for weight in self.parameters.values():
                weight.copy_(weight.to(self.saved_dtype))
        figures |= {f"{name}_before": value for name, value in self._before.items()} | self.measure()
        if self.draft.translation is not None:
            figures["common"] = common_share(self.draft.translation, [each.text for each in self._held_out.values()])
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
        write_whole(out / DESCRIPTION, _ABOUT + yaml.safe_dump(description, sort_keys=False, allow_unicode=True))
        return out, description
