"""Evaluation of a demo pair on fresh prompts: `python -m specgen.demo.recipe eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from specgen.base.errors import SpecgenError
from specgen.demo import ROLES
from specgen.demo.corpus.documents import DOMAINS, documents
from specgen.demo.recipe.fresh_prompts import SEED, FreshPrompt, fresh_prompts
from specgen.engine.inference_mode import inference
from specgen.engine.model_loading import LoadedModel, ModelSource, load_model, prepare
from specgen.engine.text.translation import same_tokens
from specgen.train.batched_generation import continuations

_NEW_TOKENS = 160
_BATCH_SIZE = 64
_LOSS_DOCUMENTS = 40  # per category


@dataclass(frozen=True, slots=True)
class ModelScores:
    """The scores of one model in one category of prompts (code, math, news or chat).

    `loss` is the mean cross-entropy in nats per token on fresh documents: from a seed that training does not use. In code and
    math most of them also have held-out names, files and questions; in chat many facts are those of training. `right` is the
    share of its answers that are right. `copied` is the share of its answers with all names and numbers that are both in the
    prompt and in the correct answer; None if this was not measured.
    """

    loss: float
    right: float
    copied: float | None


@dataclass(frozen=True, slots=True)
class CategoryScores:
    """The scores of target and draft in one category of prompts; `prompts` is the number of prompts.

    `agreement` is the share of tokens in the target's greedy answers that are the draft's most likely tokens as well.
    """

    prompts: int
    target: ModelScores
    draft: ModelScores
    agreement: float


def evaluate(
    folders: dict[str, Path], count: int, seed: int = 0, announce: Callable[[str], None] = lambda _: None
) -> dict[str, CategoryScores]:
    """Evaluates the models in `folders` (keys: target and draft) on `count` fresh prompts. Returns the scores by category.

    Raises SpecgenError if a model cannot be loaded or the tokenizers differ.
    """
    models = {role: _load(folders[role], role) for role in ROLES}
    if not same_tokens(models["target"].tokenizer, models["draft"].tokenizer):
        raise SpecgenError("the tokenizers differ: the prompts' answers are compared token by token")
    prompts = fresh_prompts(count, seed)
    answers: dict[str, list[list[int]]] = {}
    for role, model in models.items():
        announce(f"generating the {role}'s answers")
        answers[role] = _greedy_answers(model, prompts)
    announce("measuring loss on fresh documents, and agreement")
    scores = {}
    for category in DOMAINS:
        indices = [index for index, prompt in enumerate(prompts) if prompt.category == category]
        if not indices:
            continue
        chosen = [prompts[index] for index in indices]
        by_role = {role: [answers[role][index] for index in indices] for role in ROLES}
        target, draft = (_scores(models[role], chosen, by_role[role], category, seed) for role in ROLES)
        agreement = _agreement(models["draft"], chosen, by_role["target"])
        scores[category] = CategoryScores(len(chosen), target, draft, agreement)
    return scores


def table_rows(scores: dict[str, CategoryScores]) -> list[list[str]]:
    """Returns the rows of a table: a header, one row per category, and means. A cell with two scores is `target / draft`."""
    rows = [["", "prompts", "fresh loss", "right", "names, numbers", "agreement"]]
    for name, category in scores.items():
        pair = (category.target, category.draft)
        rows.append(
            [
                name,
                str(category.prompts),
                " / ".join(f"{one.loss:.2f}" for one in pair),
                " / ".join(f"{one.right:.0%}" for one in pair),
                " / ".join("–" if one.copied is None else f"{one.copied:.0%}" for one in pair),
                f"{category.agreement:.0%}",
            ]
        )
    mean = means(scores)
    loss = " / ".join(f"{mean[role]['loss']:.2f}" for role in ROLES)
    right = " / ".join(f"{mean[role]['right']:.0%}" for role in ROLES)
    return [*rows, ["mean", "", loss, right, "", f"{mean['agreement']:.0%}"]]


def means(scores: dict[str, CategoryScores]) -> dict[str, Any]:
    """Returns the means of the scores over the categories. Each category has the same weight."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        **{
            role: {name: mean([getattr(getattr(one, role), name) for one in scores.values()]) for name in ("loss", "right")}
            for role in ROLES
        },
        "agreement": mean([one.agreement for one in scores.values()]),
    }


def as_json(scores: dict[str, CategoryScores]) -> dict[str, Any]:
    return {"type": "demo-eval", "categories": {name: asdict(one) for name, one in scores.items()}, "mean": means(scores)}


def _load(folder: Path, role: str) -> LoadedModel:
    prepared = prepare(ModelSource(str(folder), role), lambda _: None)
    return load_model(prepared, torch.device("cpu"), torch.float32, lambda _: None)


def _greedy_answers(model: LoadedModel, prompts: Sequence[FreshPrompt]) -> list[list[int]]:
    """Token ids of the model's greedy answer to each prompt. A batch has prompts of similar length, to need little padding."""
    ids = [model.tokenizer.encode(prompt.prompt) for prompt in prompts]
    by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    answers: list[list[int]] = [[] for _ in ids]
    for start in range(0, len(by_length), _BATCH_SIZE):
        batch = by_length[start : start + _BATCH_SIZE]
        max_length = min(model.context_limit, len(ids[batch[-1]]) + _NEW_TOKENS)
        texts = continuations(model, [ids[index] for index in batch], max_length, greedy=True)
        for index, text in zip(batch, texts, strict=True):
            answers[index] = text[len(ids[index]) :]
    return answers


def _scores(
    model: LoadedModel, prompts: Sequence[FreshPrompt], answers: Sequence[list[int]], category: str, seed: int
) -> ModelScores:
    texts = [_answer_text(model, ids) for ids in answers]
    right = [prompt.is_right(text) for prompt, text in zip(prompts, texts, strict=True)]
    copied: list[bool] = []
    if category in ("math", "news"):
        results = [prompt.copied_all(text) for prompt, text in zip(prompts, texts, strict=True)]
        copied = [result for result in results if result is not None]
    return ModelScores(
        loss=_fresh_loss(model, category, seed),
        right=sum(right) / len(right),
        copied=sum(copied) / len(copied) if copied else None,
    )


def _answer_text(model: LoadedModel, ids: Sequence[int]) -> str:
    """Returns the text of an answer (token ids), up to where the model starts to write the user's next question."""
    return model.tokenizer.text_of([token for token in ids if token not in model.eos_ids]).split("\nUser:")[0]


@inference
def _fresh_loss(model: LoadedModel, category: str, seed: int) -> float:
    """Returns the model's mean cross-entropy in nats per token on fresh documents of a category."""
    total = tokens = 0.0
    for text in islice(documents(category, SEED + seed, held_out=True), _LOSS_DOCUMENTS):
        ids = torch.tensor([*model.tokenizer.encode(text), *sorted(model.eos_ids)[:1]])
        logits = model.model.reference_logits(ids.tolist())[:-1].float()
        total += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        tokens += len(ids) - 1
    return total / tokens


@inference
def _agreement(draft: LoadedModel, prompts: Sequence[FreshPrompt], answers: Sequence[list[int]]) -> float:
    """Returns the share of tokens in the target's `answers` that are also the draft's most likely tokens."""
    equal = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        prompt_ids = draft.tokenizer.encode(prompt.prompt)
        logits = draft.model.reference_logits(prompt_ids + answer)
        most_likely = logits[len(prompt_ids) - 1 : -1].argmax(dim=-1)
        equal += int((most_likely == torch.tensor(answer)).sum())
        total += len(answer)
    return equal / total
