"""How good a demo pair is, on fresh prompts: `python -m specgen.demo eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from specgen.demo import ROLES
from specgen.demo.corpus import DOMAINS, documents
from specgen.demo.fresh import SEED, Fresh, fresh_prompts
from specgen.engine.inference_mode import inference
from specgen.engine.model_loading import LoadedModel, ModelSource, load_model, prepare
from specgen.engine.tokenizer import check_same
from specgen.training.batched_generation import continuations

NEW_TOKENS = 160
_AT_ONCE = 64  # answers that grow side by side
_LOSS_DOCUMENTS = 40  # of each category


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one model in one category: mean held-out `loss` (nats a token), shares of answers that are `right` and that `copied` all
    names and numbers they had to (None where there is nothing to copy)."""

    loss: float
    right: float
    copied: float | None


@dataclass(frozen=True, slots=True)
class Category:
    """Both models' figures. `agreement`: how often the draft's likeliest token is the target's, on the target's own answers."""

    prompts: int
    target: Figures
    draft: Figures
    agreement: float


def evaluate(
    folders: dict[str, Path], prompts: int, seed: int = 0, announce: Callable[[str], None] = lambda _: None
) -> dict[str, Category]:
    """By category; `folders` are those of the target and the draft. Raises SpecgenError for models that cannot be loaded, or
    whose tokenizers differ."""
    models = {role: _load(folders[role], role) for role in ROLES}
    check_same(models["target"].tokenizer, models["draft"].tokenizer, *map(str, (folders["target"], folders["draft"])))
    fresh = fresh_prompts(prompts, seed)
    answers: dict[str, list[list[int]]] = {}
    for role, model in models.items():
        announce(f"the {role} answers")
        answers[role] = _answers(model, fresh)
    announce("held-out loss and agreement")
    found = {}
    for category in DOMAINS:
        positions = [position for position, one in enumerate(fresh) if one.category == category]
        asked = [fresh[position] for position in positions]
        if not asked:
            continue
        figures = {
            role: _figures(model, asked, [answers[role][position] for position in positions], category, seed)
            for role, model in models.items()
        }
        agreement = _agreement(models, asked, [answers["target"][position] for position in positions])
        found[category] = Category(len(asked), figures["target"], figures["draft"], agreement)
    return found


def as_rows(found: dict[str, Category]) -> list[list[str]]:
    """The table, its head first: target and draft behind one another in each cell."""
    rows = [["", "prompts", "held-out loss", "right", "names, numbers", "agreement"]]
    for name, category in found.items():
        pair = (category.target, category.draft)
        copied = ["–" if one.copied is None else f"{one.copied:.0%}" for one in pair]
        rows.append(
            [
                name,
                str(category.prompts),
                " / ".join(f"{one.loss:.2f}" for one in pair),
                " / ".join(f"{one.right:.0%}" for one in pair),
                " / ".join(copied),
                f"{category.agreement:.0%}",
            ]
        )
    mean = summary(found)
    losses, rights = ([mean[role][name] for role in ROLES] for name in ("loss", "right"))
    means = [" / ".join(f"{loss:.2f}" for loss in losses), " / ".join(f"{right:.0%}" for right in rights)]
    return [*rows, ["mean", "", *means, "", f"{mean['agreement']:.0%}"]]


def summary(found: dict[str, Category]) -> dict[str, Any]:
    """Means over the categories."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        **{
            role: {name: mean([getattr(getattr(one, role), name) for one in found.values()]) for name in ("loss", "right")}
            for role in ROLES
        },
        "agreement": mean([one.agreement for one in found.values()]),
    }


def as_json(found: dict[str, Category]) -> dict[str, Any]:
    return {"type": "demo-eval", "categories": {name: asdict(one) for name, one in found.items()}, "mean": summary(found)}


def _load(folder: Path, role: str) -> LoadedModel:
    return load_model(prepare(ModelSource(str(folder), role), _silent), torch.device("cpu"), torch.float32, _silent)


def _silent(_: str) -> None:
    """Loading a model this small is not worth a word."""


def _answers(model: LoadedModel, fresh: Sequence[Fresh]) -> list[list[int]]:
    """Ids of what the model says behind each prompt, greedy. Prompts of about one length go together: little padding."""
    prompts = [model.tokenizer.encode(one.prompt) for one in fresh]
    order = sorted(range(len(prompts)), key=lambda position: len(prompts[position]))
    found: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), _AT_ONCE):
        positions = order[start : start + _AT_ONCE]
        longest = min(model.context_limit, max(len(prompts[position]) for position in positions) + NEW_TOKENS)
        texts = continuations(model, [prompts[position] for position in positions], longest, greedy=True)
        for position, text in zip(positions, texts, strict=True):
            found[position] = text[len(prompts[position]) :]
    return found


def _figures(model: LoadedModel, asked: Sequence[Fresh], answers: Sequence[list[int]], category: str, seed: int) -> Figures:
    texts = [_said(model, ids) for ids in answers]
    right = [one.is_right(text) for one, text in zip(asked, texts, strict=True)]
    copied = [one.copies(text) for one, text in zip(asked, texts, strict=True) if category in ("math", "news")]
    judged = [good for good in copied if good is not None]
    return Figures(
        loss=_held_out_loss(model, category, seed),
        right=sum(right) / len(right),
        copied=sum(judged) / len(judged) if judged else None,
    )


def _said(model: LoadedModel, ids: Sequence[int]) -> str:
    """An answer's text, up to where the model takes the user's part."""
    return model.tokenizer.text_of([token for token in ids if token not in model.eos_ids]).split("\nUser:")[0]


@inference
def _held_out_loss(model: LoadedModel, category: str, seed: int) -> float:
    total = tokens = 0.0
    for text in islice(documents(category, SEED + seed, held_out=True), _LOSS_DOCUMENTS):
        ids = torch.tensor([*model.tokenizer.encode_long(text), *sorted(model.eos_ids)[:1]])
        logits = model.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        total += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        tokens += len(ids) - 1
    return total / tokens


@inference
def _agreement(models: dict[str, LoadedModel], asked: Sequence[Fresh], answers: Sequence[list[int]]) -> float:
    """Over all tokens of the target's answers."""
    right = total = 0
    for one, answer in zip(asked, answers, strict=True):
        prompt = models["target"].tokenizer.encode(one.prompt)
        logits = models["draft"].model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        guesses = logits[len(prompt) - 1 : -1].argmax(dim=-1)
        right += int((guesses == torch.tensor(answer)).sum())
        total += len(answer)
    return right / total
