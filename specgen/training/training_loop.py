"""The training loop of what drafts, and an exit layer's (EESD, section 3.2): cross-entropy on text, the target frozen.

A step's batch follows from the seed and the step's number alone. So what has to be kept to go on with an interrupted run is the
weights, the optimizer's moments and a number, and with a budget in steps it ends with the weights of one that was not.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from specgen.engine.exit_layer import ExitLayer
from specgen.engine.first_layers import FirstLayers
from specgen.errors import RunError, SpecgenError
from specgen.files import whole_file
from specgen.training.corpus import Texts
from specgen.training.generated_text import GeneratedText, TrainingStopped
from specgen.training.packing import NOTHING, Draw, Rows, pack

WARM_UP = 50  # steps, at most a tenth of them
_LOGITS = 1 << 26  # numbers in the logits that are held at once: longer batches are gone through in pieces
_TOGETHER = 256  # tokens whose logits are made at once on a CPU: few for its caches, many for a head that is read each time
_SAVE_EVERY = 60.0  # seconds
_ASLEEP = 5.0  # times as long as usual
_WINDOWS = 100  # steps that the progress' figures look back


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. The budget is a number of optimizer `steps`, or else `seconds`; a step takes `batch` rows of `window` tokens.

    `self_text` is the share of rows with text of the target's own; learning rate and batch are the paper's (Appendix C).
    """

    steps: int | None = None
    seconds: float | None = None
    learning_rate: float = 1e-3
    batch: int = 64
    window: int = 2048
    self_text: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands: the `share` of the budget that is spent, the mean `loss` (nats a token) of the last steps, and how
    often the exit's likeliest token was the target's on the target's own text (None where there is none of it)."""

    step: int
    tokens: int
    share: float
    loss: float
    agreement: float | None
    seconds: float


class Data:
    """Batches by their number: open text, and what the target has written or read."""

    def __init__(self, open_text: Texts | None, self_texts: Sequence[GeneratedText], recipe: Recipe) -> None:
        self._open, self._recipe = open_text, recipe
        self._own = [(text.ids.tolist(), text.best.tolist()) for text in self_texts if not text.held_out]
        count = 0 if not self._own else recipe.batch if open_text is None else max(1, round(recipe.batch * recipe.self_text))
        own, other = [self._draw_own], [self._draw_open]
        self._draws: list[Draw] = [*(own * count), *(other * (recipe.batch - count))]

    def batch(self, step: int) -> Rows:
        return pack(self._draws, self._recipe.window, Random(f"batch {self._recipe.seed} {step}"))

    def _draw_open(self, rng: Random, longest: int) -> tuple[list[int], list[int]]:
        assert self._open is not None
        ids = self._open.draw(rng, longest, apart=False)
        return ids, [NOTHING] * len(ids)

    def _draw_own(self, rng: Random, longest: int) -> tuple[list[int], list[int]]:
        ids, best = self._own[rng.randrange(len(self._own))]
        return ids[:longest], best[:longest]


class Training(ABC):
    """What drafts in training, and all that has to be kept to go on with it. `trained` are its weights by name."""

    def __init__(
        self, trained: dict[str, torch.nn.Parameter], data: Data, recipe: Recipe, device: torch.device, vocabulary: int
    ) -> None:
        self.recipe = recipe
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._data, self._device, self._vocabulary = data, device, vocabulary
        self._usual: float | None = None  # seconds of a step
        self._trained = trained
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._recent: list[tuple[float, float, float]] = []

    @property
    def share(self) -> float:
        """How much of the budget is spent."""
        if self.recipe.steps is not None:
            return self.step / self.recipe.steps
        return self.seconds / (self.recipe.seconds or 1.0)

    def run(
        self, save_to: Path, settings: dict[str, Any], report: Callable[[Progress], None], stopping: Callable[[], bool]
    ) -> None:
        """Train until the budget is spent. Keeps the state each minute and in the end. Raises TrainingStopped, with the state
        saved, where it was asked to stop; RunError where the loss is no number."""
        saved = time.monotonic()
        while self.share < 1:
            start = time.monotonic()
            self._recent.append(self._advance())
            del self._recent[:-_WINDOWS]
            self._spend(time.monotonic() - start)
            progress = self.progress()
            if not math.isfinite(progress.loss):
                raise RunError(f"the loss is {progress.loss} at step {self.step}", "Take a smaller --learning-rate")
            report(progress)
            stopped = stopping()
            if stopped or time.monotonic() - saved > _SAVE_EVERY:
                self.save(save_to, settings)
                saved = time.monotonic()
            if stopped:
                raise TrainingStopped
        self.save(save_to, settings)

    def _spend(self, seconds: float) -> None:
        """A step that takes many times what steps usually take was not at work: the process was stopped, the machine asleep."""
        self._usual = seconds if self._usual is None else 0.9 * self._usual + 0.1 * min(seconds, _ASLEEP * self._usual)
        self.seconds += min(seconds, _ASLEEP * self._usual)

    def progress(self) -> Progress:
        losses, right, judged = zip(*self._recent, strict=True) if self._recent else ((math.nan,), (0.0,), (0.0,))
        agreement = sum(right) / sum(judged) if sum(judged) else None
        return Progress(self.step, self.tokens, min(1.0, self.share), sum(losses) / len(losses), agreement, self.seconds)

    def _advance(self) -> tuple[float, float, float]:
        """One optimizer step. Its mean loss, how often the likeliest token was the target's, and of how many times."""
        rate = self.recipe.learning_rate * learning_rate_factor(self.step, min(1.0, self.share), self.recipe.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        rows = self._data.batch(self.step)
        labelled = int((rows.labels != NOTHING).sum())
        count = max(1, _LOGITS // (rows.ids.shape[1] * self._vocabulary))
        sums = torch.zeros(3, device=self._device)
        for start in range(0, rows.ids.shape[0], count):
            sums += self._backward(rows.part(start, start + count).to(self._device), labelled)
        torch.nn.utils.clip_grad_norm_(self._trained.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += rows.ids.numel()
        loss, right, judged = sums.tolist()
        return loss, right, judged

    @abstractmethod
    def _backward(self, rows: Rows, labelled: int) -> torch.Tensor:
        """Add the gradients of some rows; `labelled` tokens have a label in the whole batch. Returns the rows' share of the mean
        loss, agreements and judgements [3]."""

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Weights, moments and numbers, in one file, whole or not at all. OSError where the disk refuses."""
        tensors = {f"layer.{name}": weight for name, weight in self._trained.items()}
        for name, weight in self._trained.items():  # the optimizer knows nothing of a weight before the first step
            tensors |= {f"{kind}.{name}": moment for kind, moment in self._optimizer.state.get(weight, {}).items()}
        numbers = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "recent": self._recent}
        stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(save(stored, {"settings": json.dumps(settings), "numbers": json.dumps(numbers)}))

    def restore(self, path: Path, settings: dict[str, Any]) -> None:
        """Go on where `path` was saved. Raises SpecgenError where it is damaged or of a run with other settings."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
            before, numbers = json.loads(metadata["settings"]), json.loads(metadata["numbers"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise SpecgenError(f"cannot read {path}", "Delete it to begin anew") from error
        check_same_run(path, before, settings)
        with torch.no_grad():
            for name, weight in self._trained.items():
                weight.copy_(tensors[f"layer.{name}"])
        if numbers["step"]:
            kinds = ("step", "exp_avg", "exp_avg_sq")
            state = {position: {kind: tensors[f"{kind}.{name}"] for kind in kinds} for position, name in enumerate(self._trained)}
            self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})
        self.step, self.tokens, self.seconds = numbers["step"], numbers["tokens"], numbers["seconds"]
        self._recent = [(loss, right, judged) for loss, right, judged in numbers["recent"]]


class ExitTraining(Training):
    """An exit layer in training behind the target's first layers."""

    def __init__(self, first: FirstLayers, layer: ExitLayer, data: Data, recipe: Recipe, *, own_head: bool = True) -> None:
        self.first, self.layer = first, layer
        layer.to(first.device, torch.float32).requires_grad_(True).train()
        layer.head.requires_grad_(own_head)
        trained = {name: weight for name, weight in layer.named_parameters() if weight.requires_grad}
        vocabulary: int = layer.head.weight.shape[0]  # type: ignore[union-attr,index,assignment]
        super().__init__(trained, data, recipe, first.device, vocabulary)

    @property
    def parameters_held(self) -> int:
        """All that is in memory of the target and of the exit, in parameters."""
        return self.first.num_parameters + sum(weight.numel() for weight in self.layer.parameters())

    def _backward(self, rows: Rows, labelled: int) -> torch.Tensor:
        """Norm and head go through the tokens in pieces, whose gradients are gathered before they go down into the layers: so
        that the logits of a long row over a large vocabulary never stand in memory whole."""
        mask = self.first.masks.batched(rows.visible(), rows.positions, rows.positions, self.first.dtype)
        hidden, positions = self.first(rows.ids, rows.positions, mask)
        sums = torch.zeros(3, device=hidden.device)
        with self._autocast():
            behind = self.layer.run_layers(hidden.float() if self.first.dtype == torch.float32 else hidden, positions, mask)
            flat = behind.reshape(-1, behind.shape[-1])
        labels, best = rows.labels.flatten(), rows.best.flatten()
        gradients = []
        size = max(1, _LOGITS // self._vocabulary)
        if flat.device.type == "cpu":
            size = min(size, _TOGETHER)
        for start in range(0, len(flat), size):
            piece = slice(start, start + size)
            cut = flat[piece].detach().requires_grad_(flat.requires_grad)
            with self._autocast():
                logits = self.layer.norm_and_head(cut).logits
            loss = F.cross_entropy(logits.float(), labels[piece], ignore_index=NOTHING, reduction="sum") / labelled
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.append(cut.grad)
            judged = best[piece] != NOTHING
            right = (logits.detach().argmax(dim=-1) == best[piece]) & judged
            sums += torch.stack((loss.detach(), right.sum(), judged.sum()))
        if flat.requires_grad:
            flat.backward(torch.cat([gradient for gradient in gradients if gradient is not None]))  # type: ignore[no-untyped-call]
        return sums

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.first)


def autocast(first: FirstLayers) -> AbstractContextManager[Any]:
    """bfloat16 products where the target's weights are narrow, float32 where they are not."""
    return torch.autocast(first.device.type, dtype=torch.bfloat16, enabled=first.dtype != torch.float32)


def learning_rate_factor(step: int, share: float, steps: int | None) -> float:
    """Linear warm-up, times a cosine from 1 down to a tenth over the budget's share."""
    warm_up = WARM_UP if steps is None else max(1, min(WARM_UP, steps // 10))
    return min(1.0, (step + 1) / warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def check_same_run(path: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to go on with what was begun with other settings."""
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        what = ", ".join(f"{name}: {before.get(name)}, now {settings[name]}" for name in changed)
        raise SpecgenError(f"{path} is another run's ({what})", f"Give the same options, or delete {path.parent} to begin anew")


def greedy_agreement(read: Callable[[torch.Tensor], torch.Tensor], texts: Sequence[GeneratedText]) -> dict[str, float | None]:
    """How often the likeliest token is the target's, behind the prompts of its greedy texts and of its sampled ones; None where
    there are none. `read` gives logits [n, vocabulary] behind each of some ids [n]."""
    found: dict[str, float | None] = {}
    for name, greedy in (("greedy", True), ("sampled", False)):
        right = total = 0
        for text in texts:
            if text.greedy == greedy:
                start = max(0, text.prompt - 1)
                logits = read(text.ids)[start:-1]
                best = text.best[start:-1].to(logits.device)
                right += int((logits.argmax(dim=-1) == best).sum())
                total += len(best)
        found[name] = right / total if total else None
    return found


@torch.no_grad()
def exit_rows(first: FirstLayers, layer: ExitLayer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exit's logits [n, vocabulary] and hidden rows [n, width] behind each of `ids` [n]."""
    ids = ids[None].to(first.device)
    positions = torch.arange(ids.shape[1], device=first.device)[None]
    visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=first.device).tril()[None]
    mask = first.masks.batched(visible, positions, positions, first.dtype)
    with autocast(first):
        rows = layer(*first(ids, positions, mask), mask)
    return rows.logits[0].float(), rows.hidden_states[0].float()
