"""Distil a draft model to its target, on text that the target wrote (DistillSpec, arXiv 2310.08461; forward divergence) or read.

The target's likeliest tokens and their probabilities are recorded beforehand, so that training holds the draft alone. What is
minimized is KL(target || draft) over these tokens and one more outcome, that it is none of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
import yaml

from specgen.engine.attention_masks import Masks
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.inference_mode import inference
from specgen.engine.model_loading import quiet_transformers
from specgen.environment import versions
from specgen.files import write_whole
from specgen.training.corpus import Texts
from specgen.training.exit_training import texts_of, what_is_left
from specgen.training.generated_text import GeneratedText
from specgen.training.packing import NOTHING, Rows
from specgen.training.text_generation import TextGeneration, TrainingObserver, TrainingTask
from specgen.training.training_loop import Data, Recipe, Training, greedy_agreement

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

DESCRIPTION = "distilled.yaml"
_CACHED = 1 << 18  # numbers in the logits that are judged at once on a CPU, as many as its caches hold
_ON_DEVICE = 1 << 26
_FEWEST = 16  # tokens that are judged at once, however large the vocabulary
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True, slots=True)
class DistillationResult:
    """The folder of the new draft, and how often its likeliest token is the target's on text that was kept apart, greedy and
    sampled, `before` and `after`."""

    path: Path
    before: dict[str, float | None]
    after: dict[str, float | None]
    figures: dict[str, Any]


class DistillationData(Data):
    """Batches of text in which `best` says where in `likely` and `logs` [tokens, LIKELY] the target's word on a token stands."""

    def __init__(self, open_text: Texts | None, self_texts: Sequence[GeneratedText], recipe: Recipe) -> None:
        used = [text for text in self_texts if not text.held_out]
        ends = accumulate(len(text.ids) for text in used)
        placed = [replace(text, best=torch.arange(end - len(text.ids), end)) for text, end in zip(used, ends, strict=True)]
        super().__init__(open_text, placed, recipe)
        self.likely = _joined([text.likely for text in used])
        self.logs = _joined([text.logs for text in used])


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([part for part in parts if part is not None]) if parts else torch.empty(0, 1)


class DraftTraining(Training):
    """A draft model in training. What the target wrote or read teaches its probabilities, open text as it is the next token."""

    def __init__(self, draft: LoadedModel, lessons: DistillationData, recipe: Recipe, *, narrow: bool = False) -> None:
        self.draft, self._narrow = draft, narrow  # products in bfloat16
        draft.model.to(torch.float32).requires_grad_(True)
        self._masks = Masks(draft.model)
        self._lessons = lessons
        trained = dict(draft.model.named_parameters())
        vocabulary = draft.model.get_output_embeddings().weight.shape[0]
        super().__init__(trained, lessons, recipe, draft.device, vocabulary)

    def _backward(self, rows: Rows, labelled: int) -> torch.Tensor:
        dtype = torch.bfloat16 if self._narrow else torch.float32
        mask = self._masks.batched(rows.visible(), rows.positions, rows.positions, dtype)
        with self._autocast():
            logits = self.draft.model(
                input_ids=rows.ids, attention_mask=mask, position_ids=rows.positions, use_cache=False
            ).logits.flatten(0, 1)
        labels, places = rows.labels.flatten(), rows.best.flatten()
        sums = torch.zeros(3, device=logits.device)
        gradients = []
        size = max(_FEWEST, (_CACHED if logits.device.type == "cpu" else _ON_DEVICE) // logits.shape[-1])
        for start in range(0, len(logits), size):
            piece = slice(start, start + size)
            cut = logits[piece].detach().float().requires_grad_()
            judged = self._judge(cut, labels[piece], places[piece])
            (judged[0] / labelled).backward()  # type: ignore[no-untyped-call]
            assert cut.grad is not None
            gradients.append(cut.grad)
            sums += judged.detach()
        logits.backward(torch.cat(gradients).to(logits.dtype))  # type: ignore[no-untyped-call]
        sums[0] /= labelled
        return sums

    def _judge(self, logits: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The loss summed up, agreements and judgements [3], of `logits` [n, vocabulary]."""
        taught = (places != NOTHING) & (labels != NOTHING)
        as_it_is = (labels != NOTHING) & ~taught
        where = places[taught].to(self._lessons.likely.device)
        likely = self._lessons.likely[where].long().to(logits.device)
        # Not by masks, whose backward sorts.
        said, untaught = (logits.index_select(0, these.nonzero()[:, 0]) for these in (taught, as_it_is))
        loss = divergence(said, likely, self._lessons.logs[where].to(logits.device)).sum()
        loss = loss + F.cross_entropy(untaught, labels[as_it_is], reduction="sum")
        right = (said.detach().argmax(dim=-1) == likely[:, 0]).sum()
        return torch.stack((loss, right, taught.sum()))

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.draft.device.type, dtype=torch.bfloat16, enabled=self._narrow)

    @inference
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The draft's logits [n, vocabulary] behind each of `ids` [n]."""
        logits: torch.Tensor = self.draft.model(input_ids=ids[None].to(self.draft.device), use_cache=False).logits[0]
        return logits.float()


def divergence(logits: torch.Tensor, likely: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """KL(target || draft) [n], in nats, from the draft's `logits` [n, vocabulary] and the target's `likely` tokens [n, k] with
    the logarithms of their probabilities [n, k]. All other tokens are one outcome: it is no more than the whole divergence."""
    smallest = torch.finfo(torch.float32).eps
    total = logits.logsumexp(dim=-1, keepdim=True)
    ours = logits.gather(-1, likely) - total
    found = (logs.exp() * (logs - ours)).sum(dim=-1)
    if likely.shape[-1] == logits.shape[-1]:
        return found
    theirs_left = (1 - logs.exp().sum(dim=-1)).clamp_min(smallest)
    # Not as 1 - sum: of a sure draft nothing would be left of it, nor of its gradient.
    ours_left = logits.scatter(-1, likely, -torch.inf).logsumexp(dim=-1) - total[:, 0]
    return found + theirs_left * (theirs_left.log() - ours_left)


def distill(
    target: LoadedModel, draft: LoadedModel, task: TrainingTask, watcher: TrainingObserver, stored: torch.dtype = torch.float32
) -> DistillationResult:
    """Train `draft` and save it in `task.out` in the dtype `stored`, with its tokenizer. The files that it was loaded from
    stay as they are. The target's weights are let go on the way, and it can't be used afterwards.

    Raises Stopped where the watcher stops it (the same call goes on later), SpecgenError for what does not fit.
    """
    folder = task.out / "training"
    settings = {
        **asdict(task.recipe),
        "fingerprint": weights_fingerprint(target.folder),
        "draft": weights_fingerprint(draft.folder),
        "dtype": target.dtype_name,
        **texts_of(task),
    }
    writing = TextGeneration(target, task, settings, folder, watcher, keep_likely=True)
    writing.run()
    narrow = target.model.dtype != torch.float32
    target.model.to("meta")  # what it had to say is written down: its memory is the training's
    texts = writing.kept.read()
    apart = [text for text in texts if text.held_out]
    recipe = what_is_left(task.recipe, writing.seconds)
    lessons = DistillationData(task.open_text, texts, recipe)
    del texts  # the lessons have them in another form
    training = DraftTraining(draft, lessons, recipe, narrow=narrow)
    before = greedy_agreement(training.read, apart)
    state = folder / "state.safetensors"
    if state.exists():
        training.restore(state, settings)
        watcher.announce(f"going on from step {training.step}")
    training.run(state, settings, watcher.training, watcher.stopping)
    after = greedy_agreement(training.read, apart)
    progress = training.progress()
    figures = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "loss": progress.loss,
        "minutes": {"writing": writing.seconds / 60, "training": progress.seconds / 60},
        "agreement_before": before,
        "agreement": after,
    }
    _save(draft, stored, target, task, figures)
    shutil.rmtree(folder, ignore_errors=True)
    return DistillationResult(task.out, before, after, figures)


def _save(draft: LoadedModel, stored: torch.dtype, target: LoadedModel, task: TrainingTask, figures: dict[str, Any]) -> None:
    """Tokenizer and whatever else lies beside the draft's weights, then the new weights and what they are."""
    task.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(draft.folder.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, task.out / path.name)
    with quiet_transformers():
        draft.model.requires_grad_(False).to(stored).save_pretrained(task.out)
    described = {
        "draft": draft.name,
        "target": target.name,
        "fingerprint": weights_fingerprint(target.folder),
        "figures": figures,
        "made_with": {**({"command": task.note} if task.note else {}), **asdict(task.recipe), **versions()},
    }
    about = "# A draft model, distilled to a target: specgen generate --draft with this folder.\n"
    write_whole(task.out / DESCRIPTION, about + yaml.safe_dump(described, sort_keys=False, allow_unicode=True))
