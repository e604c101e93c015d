"""The loop of all training: batches, optimizer steps, budget and saved state, then measurements of what is saved.

The batch of a step depends only on the seed and the number of the step. With a budget in steps, a training that is interrupted
and resumed therefore gives the same weights as one without interruption.
"""

from __future__ import annotations

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import save

from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import whole_file
from specgen.engine.weights import WeightFiles
from specgen.train.batches import IGNORED, PackedBatch, TrainingBatches
from specgen.train.corpus import Part
from specgen.train.task import Recipe, TrainingObserver, TrainingProgress, TrainingStopped, TrainingTask, check_same_run
from specgen.train.texts import Text, TextGeneration

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

WARM_UP_STEPS = 50  # at most, and at most a tenth of a budget in steps
MAX_LOGITS = 1 << 26  # numbers in a piece of logits: larger batches are processed in pieces
RANKS = 10  # ranks that are counted: as many as the published trees of Medusa use
_CPU_ROWS = 256  # predicted tokens whose logits are computed at once on a CPU: few enough for its caches
_SAVE_SECONDS = 60.0
_MAX_SLOWDOWN = 5.0  # a step's time beyond so many times the mean is not charged to the budget
_REPORTED_STEPS = 100  # steps in the means of TrainingProgress

Labels = tuple[torch.Tensor, ...]
"""Tensors [n, ...] with one row per predicted token, which `Objective.losses` needs beside the outputs."""


class Objective(ABC):
    """What is trained for `target`: what it computes in training, its loss, its measurements and its files.

    `parts` are the parts of the text that it uses. `parameters` are the weights to train, by name, float32; those that need no
    gradients are not trained. The loss is computed for `rows` predicted tokens at a time, to limit the memory for logits over
    `vocabulary` tokens on `device`; matrix products use float32 if `dtype`, the target's, is float32. `settings` have to be the
    same when an interrupted training is resumed. Until `start`, only they are known, and the arguments checked. Nothing that is
    random may depend on anything but a seed.
    """

    parts: ClassVar[Sequence[Part]] = (Part.TRAIN, Part.HELD_OUT)
    parameters: dict[str, torch.nn.Parameter]

    def __init__(self, target: LoadedModel) -> None:
        """Raises SpecgenError if this cannot be trained for the target; before any text is generated."""
        self.target, self.model = target, target.model
        self.device, self.dtype, self.vocabulary = self.model.device, self.model.dtype, self.model.shape.vocab_size
        at_once = _CPU_ROWS if self.device.type == "cpu" else MAX_LOGITS
        self.rows = min(at_once, max(1, MAX_LOGITS // self.vocabulary))
        self.settings: dict[str, Any] = {}

    def check(self, task: TrainingTask) -> None:  # noqa: B027  most have nothing to check
        """Raises SpecgenError if it cannot be trained on the task's text, or saved in its folder."""

    @abstractmethod
    def start(self, texts: Sequence[Text], task: TrainingTask, observer: TrainingObserver) -> TrainingBatches | None:
        """Makes the initial weights and the batches; None: there is no loop. Frees what is not needed of models.

        `texts` are the target's. Raises TrainingStopped if `observer` requests a stop.
        """

    def outputs(self, batch: PackedBatch, seed: str | None) -> tuple[torch.Tensor, Labels]:
        """Does the forward pass and returns its result [n, width], one row per predicted token, with the labels of the rows.

        `seed` is for random numbers, the same for all parts of a step's batch; None: nothing is random.
        """
        raise NotImplementedError

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        """Returns three numbers: the sum of the rows' losses in nats, and the two numbers of `greedy_matches`.

        The arguments are a slice of the result of the method `outputs`, and the same slice of each tensor in its labels.
        """
        raise NotImplementedError

    @abstractmethod
    def finish(
        self, texts: Sequence[Text], figures: dict[str, Any], task: TrainingTask, observer: TrainingObserver
    ) -> tuple[Path, Any]:
        """Rounds the weights, measures them on held-out texts, and saves them with these and the given figures.

        Returns the path of what was saved, and its description (of a draft model: its figures).
        """

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context in which matrix products use float32 if the target's dtype is float32, and otherwise bfloat16."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype != torch.float32)


def train(objective: Objective, task: TrainingTask, observer: TrainingObserver) -> tuple[Path, Any]:
    """Trains from text to files: generates text with the target, trains, measures and saves. Returns as `Objective.finish`.

    Raises TrainingStopped if `observer` requests a stop (the same call resumes the training), and SpecgenError.
    """
    objective.check(task)
    settings = task.settings(objective.target) | objective.settings
    generation = TextGeneration(objective.target, task, settings, observer, objective.parts)
    texts, start, figures = generation.run(), task.clock(), dict[str, Any]()
    batches = objective.start(texts, task, observer)
    if batches is not None:
        recipe = task.recipe.after(generation.seconds + task.clock() - start)
        training = Training(objective, batches, recipe)
        progress = training.run(task.folder / "state.safetensors", settings, observer, task.clock)
        figures = progress.figures(generation.seconds)
    made = objective.finish(texts, figures, task, observer)
    shutil.rmtree(task.folder, ignore_errors=True)
    return made


class Training:
    """An objective in training, with a state that can be saved and restored."""

    def __init__(self, objective: Objective, batches: TrainingBatches, recipe: Recipe) -> None:
        self.objective, self.batches, self.recipe = objective, batches, recipe
        self.trained = {name: weight for name, weight in objective.parameters.items() if weight.requires_grad}
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        rate, betas = self.recipe.learning_rate, (0.9, 0.95)
        self._optimizer = torch.optim.AdamW(self.trained.values(), lr=rate, betas=betas, weight_decay=0.0)
        self._recent: list[tuple[float, float, float]] = []  # results of the last steps, as `advance` returns them

    @property
    def share(self) -> float:
        """The share of the budget (steps or seconds) that is used; 1 when it is spent."""
        if self.recipe.steps is not None:
            return self.step / self.recipe.steps
        return self.seconds / (self.recipe.seconds or 1.0)

    def run(
        self, state: Path, settings: dict[str, Any], observer: TrainingObserver, clock: Callable[[], float]
    ) -> TrainingProgress:
        """Trains until the budget is spent, and returns the final progress.

        The state is saved to the file `state` every minute. If the file exists, training resumes from it. `clock` returns the
        time in seconds. Raises TrainingStopped if `observer` requests a stop, after saving the state; RunError if the loss is not
        finite; SpecgenError if the file is damaged or was written with other `settings`.
        """
        if state.exists():
            self.restore(state, settings)
            observer.announce(f"resuming at step {self.step}")
        saved = clock()
        while self.share < 1:
            start, mean_seconds = clock(), self.seconds / self.step if self.seconds else math.inf
            self._recent.append(self.advance())
            del self._recent[:-_REPORTED_STEPS]
            self.seconds += min(clock() - start, _MAX_SLOWDOWN * mean_seconds)  # the process may have been suspended
            progress = self.progress()
            if not math.isfinite(progress.loss):
                raise RunError(f"the loss is {progress.loss} at step {self.step}", "Use a smaller --learning-rate")
            observer.training(progress)
            stop = observer.stop_requested()
            if stop or clock() - saved > _SAVE_SECONDS:
                self.save(state, settings)
                saved = clock()
            if stop:
                raise TrainingStopped
        self.save(state, settings)
        return self.progress()

    def progress(self) -> TrainingProgress:
        losses, matches, compared = zip(*self._recent, strict=True)
        agreement = sum(matches) / sum(compared) if sum(compared) else None
        loss = sum(losses) / len(losses)
        return TrainingProgress(self.step, self.tokens, min(1.0, self.share), loss, agreement, self.seconds)

    def advance(self) -> tuple[float, float, float]:
        """Does one optimizer step. Returns the mean loss in nats per token and the two numbers of `greedy_matches`."""
        rate = self.recipe.learning_rate * learning_rate_scale(self.step, min(1.0, self.share), self.recipe.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = self.batches.batch(self.step)
        labelled = int((batch.labels != IGNORED).sum())
        size = max(1, MAX_LOGITS // (batch.ids.shape[1] * self.objective.vocabulary))
        sums = torch.zeros(3, device=self.objective.device)
        for start in range(0, batch.ids.shape[0], size):
            sums += self.backward(batch.part(slice(start, start + size), self.objective.device), labelled)
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.ids.numel()
        loss, matches, compared = sums.tolist()
        return loss, matches, compared

    def backward(self, batch: PackedBatch, labelled: int) -> torch.Tensor:
        """Adds the gradients of a part of a step's batch to the trained weights. Returns the sum of `losses` [3] over the part.

        `labelled` is the number of tokens with a label in the whole step; the loss and the gradients are divided by it. The loss
        is computed for `rows` of them at a time, and the gradients of all of these pieces then pass through the model
        together. The logits of a long sequence over a large vocabulary are thus never in memory at the same time.
        """
        outputs, labels = self.objective.outputs(batch, f"objective {self.recipe.seed} {self.step}")
        sums = torch.zeros(3, device=outputs.device)
        gradients = []
        for start in range(0, len(outputs), self.objective.rows):
            piece = slice(start, start + self.objective.rows)
            leaf = outputs[piece].detach().requires_grad_(outputs.requires_grad)
            losses = self.objective.losses(leaf, *(tensor[piece] for tensor in labels))
            (losses[0] / labelled).backward()  # type: ignore[no-untyped-call]
            if leaf.grad is not None:
                gradients.append(leaf.grad)
            sums += losses.detach()
        if gradients:
            outputs.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
        sums[0] /= labelled
        return sums

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Writes weights, optimizer state, counters and `settings` to one file, atomically. Raises OSError."""
        tensors = {f"layer.{name}": weight for name, weight in self.trained.items()}
        for name, weight in self.trained.items():  # before the first step the optimizer has no state
            tensors |= {f"{kind}.{name}": moment for kind, moment in self._optimizer.state.get(weight, {}).items()}
        numbers = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "recent": self._recent}
        stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(save(stored, {"settings": json.dumps(settings), "numbers": json.dumps(numbers)}))

    def restore(self, path: Path, settings: dict[str, Any]) -> None:
        """Loads what `save` wrote. Raises SpecgenError if the file is damaged or was written with other `settings`."""
        try:
            files = WeightFiles(path, str(path))
            tensors = {name: files.take(name) for name in files.names}
            before, numbers = json.loads(files.metadata["settings"]), json.loads(files.metadata["numbers"])
        except (SpecgenError, OSError, ValueError, KeyError, TypeError) as error:
            raise SpecgenError(f"cannot read {path}", "Delete it to start again") from error
        check_same_run(path, before, settings)
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(tensors[f"layer.{name}"])
        if numbers["step"]:
            kinds = ("step", "exp_avg", "exp_avg_sq")
            state = {index: {kind: tensors[f"{kind}.{name}"] for kind in kinds} for index, name in enumerate(self.trained)}
            self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})
        self.step, self.tokens, self.seconds = numbers["step"], numbers["tokens"], numbers["seconds"]
        self._recent = [(loss, matches, compared) for loss, matches, compared in numbers["recent"]]


def learning_rate_scale(step: int, share: float, steps: int | None) -> float:
    """Returns the factor of the peak learning rate at a step: a linear warm-up, times a cosine decay from 1 to 0.1.

    `share` is the used share of the budget, from 0 to 1. `steps` is the budget in steps; None: the budget is a time.
    """
    warm_up = WARM_UP_STEPS if steps is None else max(1, min(WARM_UP_STEPS, steps // 10))
    return min(1.0, (step + 1) / warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def greedy_matches(logits: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """Returns two counts [2]: the positions where draft and target have the same most probable token, and all compared positions.

    `logits` [n, vocabulary] are the draft's. `target_tokens` [n] are the target's most probable tokens; where they are IGNORED,
    nothing is compared.
    """
    return torch.stack(((logits.detach().argmax(dim=-1) == target_tokens).sum(), (target_tokens != IGNORED).sum()))


def held_out_agreement(
    texts: Sequence[Text], ranks_of: Callable[[Text], torch.Tensor]
) -> tuple[dict[str, list[float] | None], list[list[float]]]:
    """Measures how often the target's most probable token is predicted: on the generated tokens of the held-out texts.

    `ranks_of(text)` [rows, depths], int64, has for the drafts that begin after each generated token the ranks that they give to
    the target's tokens, 0 for a right prediction, and -1 where nothing was predicted.

    Returns two things. `agreement` has, for texts that the target generated greedily (`greedy`) and for all other texts
    (`sampled`), the share of right predictions by depth: the n-th number is that of the n-th drafted token, where all tokens
    before it were right (EAGLE's n-alpha), up to the last that was ever reached. It is None if there are no such texts.
    `ranks[n][r]` is the share of the n-th tokens to which rank r was given, whatever was predicted before; the mean of both
    kinds of text, empty without texts.
    """
    agreement: dict[str, list[float] | None] = {"greedy": None, "sampled": None}
    tables: list[torch.Tensor] = []
    own = [text for text in texts if text.part == Part.HELD_OUT and text.prompt_length < len(text.ids)]
    for name, is_greedy in (("greedy", True), ("sampled", False)):
        if found := [ranks_of(text).cpu() for text in own if text.greedy == is_greedy]:
            table = torch.cat(found)
            is_right = (table == 0).cumprod(dim=1)
            reached = (torch.nn.functional.pad(is_right[:, :-1], (1, 0), value=1) * (table >= 0)).sum(dim=0)
            tries = [count for count in reached.tolist() if count]  # none after a token that was never right
            agreement[name] = [right / count for right, count in zip(is_right.sum(dim=0).tolist(), tries, strict=False)]
            columns = (column[column >= 0].clamp_max(RANKS) for column in table.T)
            by_rank = torch.stack([torch.bincount(column, minlength=RANKS + 1) for column in columns])
            tables.append(by_rank / by_rank.sum(dim=1, keepdim=True).clamp_min(1))
    return agreement, torch.stack(tables).mean(dim=0)[:, :RANKS].tolist() if tables else []


def first_shares(agreement: dict[str, list[float] | None]) -> dict[str, float | None]:
    """Returns the shares of right first tokens from the agreement of `held_out_agreement`."""
    return {name: shares[0] if shares else None for name, shares in agreement.items()}
