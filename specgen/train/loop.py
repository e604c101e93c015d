"""The training loop that all objectives share: batches, optimizer steps, budget and saved state.
Besides, the divergence of predictions from the target's, which serves as a loss, and their
agreement with the target's, which is measured.

The batch of a step depends only on the seed and the number of the step. With a budget in steps, a
training that is interrupted and resumed therefore gives the same weights as one without
interruption.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from pickle import UnpicklingError  # of torch.load
from random import Random
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import whole_file, write_whole
from specgen.base.part_verdict import Learning
from specgen.engine.forward_pass import BatchPass
from specgen.engine.loaded_model import LoadedModel
from specgen.train.corpus import Use
from specgen.train.task import TrainingStopped, TrainingTask
from specgen.train.texts import Text, TextGeneration

RANKS = 10  # ranks that are counted: as many as the published trees of Medusa use
_NONE = torch.empty(0, dtype=torch.long)
IGNORED = -100  # a label that does not contribute to the loss: cross_entropy's ignore_index
WARM_UP_SHARE = 0.05  # of the budget
MAX_LOGITS = 1 << 26  # numbers in a piece of logits: larger batches are processed in pieces
# predicted tokens whose logits are computed at once on a CPU: few enough for its caches
_CPU_ROWS = 256
_RESERVED_SHARE = 0.05  # of a budget in seconds, at least: for measuring and saving
_SAVE_SECONDS = 60.0
_LEAST_RATE = 0.002  # of the warm-up that has passed, at the first step
_MEASURING_SHARE = 1.5  # of the seconds of a measurement, for the one at the end and saving
# numbers of sequences that are tried on a CPU; the first is taken that learns at least this share
# of the tokens a second that the fastest does. Trying ends with a share of the budget.
_BATCHES = (2, 4, 8, 16)
_NEARLY = 0.85
_TRIAL_SHARE = 0.1
_TIMED_PRODUCTS = 5
_CLEARLY = 0.8  # of the time in float32
_REPORTED_STEPS = 100  # steps in the mean loss that is reported
_LATEST_STEPS = 10  # whose mean loss is compared with that of held-out text
# shares of the budget at which held-out text is measured
_MARKS = tuple(tenth / 10 for tenth in range(1, 11))
_MARKS_OF_STEPS = (0.5, 0.9, 1.0)
_MEASURED_SHARE = 0.1  # of a budget in seconds, for measuring
_STATE_COPIES = 4  # the weights, the best ones, and the optimizer's two means

# Tensors [n, ...] with one row per predicted token, which `Objective.losses` needs beside the
# outputs.
Labels = tuple[Tensor, ...]


class Taught(NamedTuple):
    """A text as token ids, and their `teacher` values (PackedBatch). Tokens before the one with the
    index `first`, such as those of a prompt, are read but not learned."""

    ids: list[int]
    teacher: list[int]
    first: int = 1


# A function that draws a text of at most a given number of tokens.
SampleText = Callable[[Random, int], Taught]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch of sequences that hold several texts each, without padding. All fields are integer
    tensors [batch, window].

    `ids` are the token ids. `positions` start at 0 in each text. `segments` number the texts of a
    sequence from 0. `labels` are the next tokens, IGNORED at the end of a text and where the next
    token is not learned, as in a prompt that the target answered. `teacher` is for
    distillation: each token's row in a table of the target's predictions after it, IGNORED where
    they are not known.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    labels: Tensor
    teacher: Tensor

    def part(self, sequences: slice, device: torch.device) -> PackedBatch:
        """Returns a batch of only the given sequences, copied to `device`."""
        return PackedBatch(*(getattr(self, name)[sequences].to(device) for name in self.__slots__))

    def forward_pass(self) -> BatchPass:
        """Returns the pass over the batch without a cache. A token attends to itself and to earlier
        tokens of its own text."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        visible = same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()
        return BatchPass(self.ids, self.positions, visible, self.positions)


def pack(samplers: Sequence[SampleText], window: int, rng: Random) -> PackedBatch:
    """Returns a batch with one sequence per sampler. Each sampler fills its sequence of `window`
    tokens with texts, which it draws with `rng`."""
    sequences = []
    for sample in samplers:
        tokens: list[tuple[int, ...]] = []  # the values of the fields for each token
        segment = 0
        while len(tokens) < window:
            left = window - len(tokens)
            text, teacher, first = sample(rng, left + 1)  # one token more: the last one's label
            labels = [*[IGNORED] * (first - 1), *text[first:], IGNORED]
            tokens += [
                (text[at], at, segment, labels[at], teacher[at])
                for at in range(min(left, len(text)))
            ]
            segment += 1
        sequences.append(tokens)
    return PackedBatch(*torch.tensor(sequences).permute(2, 0, 1).contiguous())


class TrainingBatches:
    """Makes the training batch of each step from corpus text and from the texts `taught`, in the
    proportion of the recipe.

    Of the corpus, documents whose use (`Use`) is in `uses` are trained on. `window` is the number
    of tokens in a sequence (None: the recipe's).
    """

    def __init__(
        self,
        task: TrainingTask,
        taught: Sequence[Taught],
        uses: Collection[Use],
        window: int | None = None,
    ) -> None:
        self._corpus = task.corpus
        self._taught = list(taught)
        self._uses = uses
        recipe = task.recipe
        self.window = window or recipe.window
        self.size = recipe.batch or _BATCHES[0]  # sequences
        self._seed = recipe.seed
        self._share = 1.0 if task.corpus is None else recipe.self_text

    def add(self, taught: Sequence[Taught]) -> None:
        """Adds texts, of which the batches of later steps draw too."""
        self._taught += taught

    def batch(self, step: int) -> PackedBatch:
        own = max(1, round(self.size * self._share)) if self._taught else 0
        samplers: list[SampleText] = [self._sample_taught] * own
        samplers += [self._sample_corpus] * (self.size - own)
        return pack(samplers, self.window, Random(f"batch {self._seed} {step}"))

    def _sample_corpus(self, rng: Random, max_tokens: int) -> Taught:
        assert self._corpus is not None
        ids = self._corpus.sample(rng, max_tokens, uses=self._uses)
        return Taught(ids, [IGNORED] * len(ids))

    def _sample_taught(self, rng: Random, max_tokens: int) -> Taught:
        ids, teacher, first = rng.choice(self._taught)
        return Taught(ids[:max_tokens], teacher[:max_tokens], first)


class Objective(ABC):
    """What is trained for `target`: what it computes in training, its loss, its measurements and
    its files.

    `uses` are the uses of text (`Use`) for which it needs text. `parameters` are the weights to
    train, by name, float32; those that need no gradients are not trained. The loss is computed for
    `rows` predicted tokens at a time, to limit the memory for logits over `vocabulary` tokens on
    `device`. For the dtype of matrix products, see `autocast`; `dtype` is the target's.
    `settings` have to be the same when an interrupted training is resumed. Random choices may
    depend on seeds alone. `generates`: the target may generate further text during the training.
    """

    uses: ClassVar[Sequence[Use]] = (Use.TRAIN, Use.HELD_OUT)
    generates: bool = True
    parameters: dict[str, torch.nn.Parameter]

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        """Raises SpecgenError if this cannot be trained for the target, on the task's text, or
        saved in the task's folder."""
        self.task = task
        self.target = target
        self.model = target.model
        self.device = self.model.device
        self.dtype = self.model.dtype
        self.vocabulary = self.model.shape.vocab_size
        at_once = _CPU_ROWS if self.device.type == "cpu" else MAX_LOGITS
        self.rows = min(at_once, max(1, MAX_LOGITS // self.vocabulary))
        self.settings: dict[str, Any] = {}
        self.in_bfloat16: bool | None = None  # None: not decided yet

    def begin(
        self, weights: Mapping[str, Tensor], texts: Sequence[Text], uses: Collection[Use]
    ) -> TrainingBatches:
        """Makes `parameters` of `weights`, and returns batches of the training texts among `texts`
        and of corpus documents whose use (`Use`) is in `uses`."""
        self.parameters = {
            name: torch.nn.Parameter(weight.to(self.device)) for name, weight in weights.items()
        }
        return TrainingBatches(self.task, self.learn(texts), uses)

    def teacher(self, text: Text) -> list[int]:
        """Returns the `teacher` values (PackedBatch) of a text's tokens."""
        return [IGNORED] * len(text.ids)

    def progress(self, texts: Sequence[Text]) -> tuple[float, list[float]] | None:
        """Returns the mean loss of some of the held-out texts, in nats a token, and the share of
        right predictions by position in a draft (`held_out_agreement`). None where there are no
        such texts, or if it cannot be measured during the training."""
        return None

    def learn(self, texts: Sequence[Text]) -> list[Taught]:
        """Returns what is learned of further texts that the target has generated."""
        return [
            Taught(text.ids, self.teacher(text), text.prompt_length)
            for text in texts
            if text.use == Use.TRAIN
        ]

    def affordable(self, texts: Sequence[Text]) -> Sequence[Text]:
        """Returns the first of the texts: as many as a budget in seconds has time for, before
        training. Raises TrainingStopped if a stop is requested."""
        return texts

    def closing_seconds(self, measuring: float, texts: Sequence[Text]) -> float:
        """Estimates how many seconds `finish` takes, where `measured` took `measuring`."""
        return _MEASURING_SHARE * measuring

    @abstractmethod
    def start(self, texts: Sequence[Text]) -> TrainingBatches | None:
        """Makes the initial weights and returns the batches, or None if no weights are trained in
        the loop.

        Frees weights of models that are no longer needed. `texts` are those that the target
        generated. Raises TrainingStopped if a stop is requested.
        """

    @abstractmethod
    def outputs(self, batch: PackedBatch, rng: Random) -> tuple[Tensor, Labels]:
        """Does the forward pass and returns its result [n, width], one row per predicted token,
        with the labels of the rows.

        A step's batch may come in several pieces, one per call; `rng` then draws the same numbers
        for each piece.
        """

    @abstractmethod
    def losses(self, outputs: Tensor, *labels: Tensor) -> Tensor:
        """Returns the sum of the rows' losses in nats.

        The arguments are a slice of the result of the method `outputs`, and the same slice of each
        tensor in its labels.
        """

    @abstractmethod
    def finish(self, texts: Sequence[Text], figures: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Rounds the weights to the saved dtype, measures them on held-out texts, and saves them.

        Returns the path of what was saved, and the contents of its description file, which has the
        given `figures` and the measured ones.
        """

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context in which matrix products use bfloat16, or float32 if the target's dtype
        is float32 or if products in float32 take less time here."""
        if self.in_bfloat16 is None:
            is_cpu = self.device.type == "cpu"
            width = self.model.shape.hidden_size
            self.in_bfloat16 = self.dtype != torch.float32 and (
                not is_cpu or is_faster_in_bfloat16(width)
            )
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.in_bfloat16)

    def measured(self, texts: Sequence[Text]) -> dict[str, Any]:
        """Returns figures of the part as it is now, measured on held-out texts; empty if there are
        none."""
        return {}


def train(objective: Objective) -> tuple[Path, dict[str, Any]]:
    """Trains from text to files: generates text with the target, trains, measures and saves.

    Returns the path of what was saved, and the contents of its description file. Raises
    TrainingStopped if a stop is requested (the same call resumes the training), SpecgenError if the
    unfinished work in the output folder belongs to another training, and RunError if the training
    fails.
    """
    task = objective.task
    task.begin(objective.target, objective.settings)
    generation = TextGeneration(objective.target, task, objective.uses)
    texts = list(objective.affordable(generation.run()))  # later ones are learned alone
    figures = dict[str, Any]()
    batches = objective.start(texts)
    if batches is not None:
        start = time.monotonic()
        figures = {"start": first_figures(objective, texts)}
        now = time.monotonic()
        training = Training(
            objective,
            batches,
            spent=generation.earlier_seconds + now - task.began,
            texts=texts,
            more=generation.more if objective.generates else None,
            closing=objective.closing_seconds(now - start, texts),
        )
        before = generation.seconds
        training.run()
        later = generation.seconds - before
        minutes = {
            "writing": generation.seconds / 60,
            "training": (training.seconds - later) / 60,
        }
        figures |= {
            "steps": training.step,
            "batch": training.batches.size,
            "tokens": training.tokens,
            "loss": training.loss,
            "minutes": minutes,
        }
        if training.learning is not None:
            figures["learning"] = asdict(training.learning)
    made = objective.finish(texts, figures)
    shutil.rmtree(task.folder, ignore_errors=True)
    return made


def first_figures(objective: Objective, texts: Sequence[Text]) -> dict[str, Any]:
    """Returns the figures of an objective before its first step. They are stored with the
    unfinished work, for a resumed training."""
    task = objective.task
    path = task.folder / "start.json"
    if path.is_file():
        with suppress(OSError, ValueError):
            return dict(json.loads(path.read_text(encoding="utf-8")))
    figures = objective.measured(texts)
    write_whole(path, json.dumps(figures))
    loss = figures.get("cross_entropy")
    if loss is not None:
        shares = (figures["held_out_agreement"]["greedy"] or [0.0])[:1]
        task.announce(
            f"before the first step: {loss:.2f} nats, {shares[0]:.0%} agreement on held-out text"
        )
    return figures


@cache
def is_faster_in_bfloat16(width: int) -> bool:
    """Whether this CPU multiplies matrices as large as in training clearly faster in bfloat16 than
    in float32; measured once."""
    seconds = dict[torch.dtype, float]()
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.ones(_CPU_ROWS, width)
        weight = torch.ones(4 * width, width)
        times = []
        for _ in range(_TIMED_PRODUCTS):
            start = time.perf_counter()
            torch.nn.functional.linear(rows.to(dtype), weight.to(dtype))
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] < _CLEARLY * seconds[torch.float32]


class Point(NamedTuple):
    """What was measured during a training, when the `share` of its budget was used: after so many
    `seconds` and trained `tokens`, the mean `loss` of the last steps, that of held-out text, and
    the `agreement` on it by position in a draft."""

    share: float
    seconds: float
    tokens: int
    loss: float
    held_out_loss: float
    agreement: list[float]


class Training:
    """An objective in training, with a state that is saved in the task's folder every minute and
    restored from there.

    `spent` are seconds of earlier work, such as generating text, and `closing` those of what comes
    after the steps, which a budget in seconds has to pay too. `seconds` is the time of all steps.

    If the recipe names no number of sequences, the first steps try several: the smallest is taken
    with which a step learns nearly as many tokens a second as with any.

    Before the first step and from time to time the held-out ones of `texts` are measured. The
    weights with which they were predicted best are those that the objective has at the end: a
    training never makes worse what it began with. Where text is what limits
    (`Learning.needs_text`), and the budget is in seconds, the target then generates `more` text for
    as long as was trained since the measurement before: `more` is called with a number of seconds
    and returns texts. The two share the time in halves as long as that holds, and otherwise all of
    it is for steps.
    """

    def __init__(
        self,
        objective: Objective,
        batches: TrainingBatches,
        spent: float = 0.0,
        texts: Sequence[Text] = (),
        more: Callable[[float], Sequence[Text]] | None = None,
        closing: float = 0.0,
    ) -> None:
        self.objective = objective
        self.batches = batches
        self.task = objective.task
        self.trained = {
            name: weight for name, weight in objective.parameters.items() if weight.requires_grad
        }
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        recipe = self._recipe = self.task.recipe
        seconds = recipe.seconds or 0.0
        reserved = max(_RESERVED_SHARE * seconds, closing) + self.task.afterwards
        self._budget = max(1.0, seconds - reserved - spent)
        # sequences in a step, and predicted tokens a second: a step may predict several after each
        # token, not as many in every step
        self._tried: list[tuple[int, float]] = []
        self._predicted = 0
        self._is_trying = recipe.batch is None
        betas = (0.9, 0.95)
        self._optimizer = torch.optim.AdamW(
            self.trained.values(), lr=recipe.learning_rate, betas=betas, weight_decay=0.0
        )
        self._losses: list[float] = []  # of the last steps
        self._step_seconds = 0.0  # of the last step
        self._texts = texts
        self._more = more
        self._points: list[Point] = []
        self._best: tuple[float, int, dict[str, Tensor]] | None = None  # loss, step, weights
        self._cost = 0.0  # seconds of a measurement
        self._begin = 0.0  # of all steps, on the clock

    @property
    def share(self) -> float:
        """The share of the budget (steps or seconds) that is used; 1 when it is spent."""
        steps = self._recipe.steps
        if steps is not None:
            return min(1.0, self.step / steps)
        # the step that would end more than half of itself too late is not begun
        half_a_step = self._step_seconds / 2
        return min(1.0, (self.seconds + half_a_step) / self._budget)

    @property
    def loss(self) -> float | None:
        """The mean over the last steps in nats a token; None before the first step."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def run(self) -> None:
        """Trains until the budget is spent.

        Raises TrainingStopped if a stop is requested, after saving the state; RunError if the loss
        is not finite; SpecgenError if the file with the state is damaged, and OSError if it cannot
        be written.
        """
        state = self.task.folder / "state.pt"
        if state.exists():
            self.restore(state)
            self.task.announce(f"resuming at step {self.step}")
        self.check_room()
        saved = time.monotonic()
        self._begin = saved - self.seconds
        if not self.step:
            self._measure()
        while self.share < 1:
            start = time.monotonic()
            self._try_batch()
            predicted = self._predicted
            self._losses = [*self._losses, self.advance()][-_REPORTED_STEPS:]
            now = time.monotonic()
            self._step_seconds = now - start
            self.seconds = now - self._begin
            if self._is_trying:
                speed = (self._predicted - predicted) / max(self._step_seconds, 1e-9)
                self._tried.append((self.batches.size, speed))
            loss = self._losses[-1]
            if not math.isfinite(loss):
                raise RunError(
                    f"the loss is {loss} at step {self.step}", "Use a smaller --learning-rate"
                )
            if self._is_due():
                self._measure()
                self._generate(state)
            self.task.show("Training", self.share, self._figures())
            stop = self.task.stop_requested()
            if stop or self.share == 1 or time.monotonic() - saved > _SAVE_SECONDS:
                self.save(state)
                saved = time.monotonic()
            if stop:
                raise TrainingStopped
        if not self.step:
            self.task.announce("no time was left for a step: give it more --minutes")
        self._take_best()

    def _take_best(self) -> None:
        """Returns to the weights with which held-out text was predicted best, if others came
        after."""
        if self._best is None or self._best[1] == self.step:
            return
        _, step, weights = self._best
        self._copy(weights)
        self.task.announce(f"the weights of step {step} predict held-out text best: they are kept")

    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in self.trained.items():
            weight.data.copy_(weights[name])

    def _try_batch(self) -> None:
        """Chooses the number of sequences of the next step, while several are tried: each twice, as
        the first step of a size takes longer."""
        if not self._is_trying:
            return
        number = len(self._tried) // 2
        if number < len(_BATCHES) and self.seconds < _TRIAL_SHARE * self._budget:
            self.batches.size = _BATCHES[number]
            return
        self._is_trying = False
        best = max((speed for _, speed in self._tried), default=0.0)
        fast = [size for size, speed in self._tried if speed >= _NEARLY * best]
        self.batches.size = min(fast, default=_BATCHES[0])

    @property
    def learning(self) -> Learning | None:
        """How far the training went between its last two measurements; None if nothing was
        measured."""
        if not self._points:
            return None
        last = self._points[-1]
        before = self._points[-2] if len(self._points) > 1 else last
        tokens = last.tokens - before.tokens
        return Learning(
            last.loss, last.held_out_loss, last.agreement[0], before.agreement[0], tokens
        )

    def _figures(self) -> str:
        """Returns the figures to show: step, what was measured last, and the loss."""
        shown = [f"step {self.step}"]
        if self._points:
            agreement = self._points[-1].agreement
            shown.append(f"agreement {agreement[0]:.1%}")
            shown.append(f"{tokens_per_pass(agreement):.2f} tokens a pass (plain decoding: 1)")
        if self.loss is not None:
            shown.append(f"loss {self.loss:.3f}")
        return ", ".join(shown)

    def _is_due(self) -> bool:
        """Whether to measure: at fixed shares of the budget; of a budget in seconds not where that
        would take more than `_MEASURED_SHARE` of the time since the last one, but for the last two
        times."""
        last = self._points[-1] if self._points else Point(0.0, 0.0, 0, 0.0, 0.0, [])
        steps = self._recipe.steps is not None
        passed = [
            mark
            for mark in (_MARKS_OF_STEPS if steps else _MARKS)
            if last.share < mark <= self.share
        ]
        if not passed:
            return False
        is_long_ago = self._cost <= _MEASURED_SHARE * (self.seconds - last.seconds)
        return steps or is_long_ago or passed[-1] >= _MARKS_OF_STEPS[-2]

    def _measure(self) -> None:
        start = time.monotonic()
        found = self.objective.progress(self._texts)
        now = time.monotonic()
        self._cost = now - start
        self.seconds = now - self._begin
        if found is None or not found[1]:
            return
        latest = self._losses[-_LATEST_STEPS:] or found[:1]
        loss = sum(latest) / len(latest)
        self._points.append(Point(self.share, self.seconds, self.tokens, loss, *found))
        if self._best is None or found[0] < self._best[0]:
            weights = {name: weight.data.clone() for name, weight in self.trained.items()}
            self._best = found[0], self.step, weights

    def _generate(self, state: Path) -> None:
        """Generates text if that is what limits. Saves the state before, because a stop may be
        requested meanwhile."""
        learning = self.learning
        if learning is None or self._more is None or self._recipe.steps is not None:
            return
        last = self._points[-1]
        if not learning.needs_text or last.share >= _MARKS_OF_STEPS[-2]:
            return
        before = self._points[-2].seconds if len(self._points) > 1 else 0.0
        self.save(state)
        until_last_marks = _MARKS_OF_STEPS[-2] * self._budget - self.seconds
        seconds = min(last.seconds - before, until_last_marks)
        self.batches.add(self.objective.learn(self._more(seconds)))
        self.seconds = time.monotonic() - self._begin
        self._points[-1] = last._replace(seconds=self.seconds)

    def advance(self) -> float:
        """Does one optimizer step. Returns the mean loss in nats per token."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * self._rate()
        batch = self.batches.batch(self.step)
        device = self.objective.device
        labelled = max(1, int((batch.labels != IGNORED).sum()))
        size = max(1, MAX_LOGITS // (batch.ids.shape[1] * self.objective.vocabulary))
        loss = torch.zeros((), device=device)
        for start in range(0, batch.ids.shape[0], size):
            loss += self.backward(batch.part(slice(start, start + size), device), labelled)
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.ids.numel()
        return float(loss)

    def _rate(self) -> float:
        """Returns the learning rate of the next step as a share of its peak: it rises for
        WARM_UP_SHARE of the budget, and then falls to zero at its end."""
        done = (self.step + 1) / max(1, self.step) * self.share if self.step else 0.0
        if self._recipe.steps is not None:
            done = (self.step + 1) / self._recipe.steps
        return min(1.0, max(done, _LEAST_RATE) / WARM_UP_SHARE) * (1 - self.share)

    def backward(self, batch: PackedBatch, labelled: int) -> Tensor:
        """Adds the gradients of `batch`, some sequences of a step's batch, to the trained weights.
        Returns its share of the loss.

        `labelled` is the number of tokens with a label in the whole step; the loss and the
        gradients are divided by it. The loss is computed for `Objective.rows` predicted tokens at a
        time, and the gradients of all of these pieces then pass through the model together. The
        logits of a long sequence over a large vocabulary are thus never in memory at the same time.
        """
        outputs, labels = self.objective.outputs(
            batch, Random(f"objective {self._recipe.seed} {self.step}")
        )
        self._predicted += len(outputs)
        loss = torch.zeros((), device=outputs.device)
        gradients = []
        for start in range(0, len(outputs), self.objective.rows):
            piece = slice(start, start + self.objective.rows)
            leaf = outputs[piece].detach().requires_grad_(outputs.requires_grad)
            of_piece = self.objective.losses(leaf, *(tensor[piece] for tensor in labels))
            (of_piece / labelled).backward()  # type: ignore[no-untyped-call]
            if leaf.grad is not None:
                gradients.append(leaf.grad)
            loss += of_piece.detach()
        if gradients:
            outputs.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
        return loss / labelled

    def check_room(self) -> None:
        """Raises RunError if the disk has no room for the state, its replacement and the result."""
        weights = sum(weight.nbytes for weight in self.trained.values())
        needed = 2 * _STATE_COPIES * weights + weights
        folder = self.task.folder
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            problem = (
                f"{folder} has {free / 1e6:,.0f} MB free, and training needs {needed / 1e6:,.0f} MB"
            )
            raise RunError(problem, "Free some space, or name another folder with --out")

    def save(self, path: Path) -> None:
        """Writes weights, optimizer state and counters to one file, atomically. Raises OSError if
        it cannot be written."""
        state = {
            "weights": {name: weight.data for name, weight in self.trained.items()},
            "optimizer": self._optimizer.state_dict(),
            "numbers": (self.step, self.tokens, self.seconds, self._losses),
            "choices": (self.batches.size, self._is_trying, self.objective.in_bfloat16),
            "points": [tuple(point) for point in self._points],
            "best": self._best,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch's own, for a write that failed
                cause = error.__context__
                raise cause if isinstance(cause, OSError) else OSError("no room for it") from error

    def restore(self, path: Path) -> None:
        """Loads what `save` wrote. Raises SpecgenError if the file is damaged."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
            raise SpecgenError(f"cannot read {path}", "Delete it to start again") from error
        self._copy(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds, self._losses = state["numbers"]
        size, self._is_trying, self.objective.in_bfloat16 = state["choices"]
        self.batches.size = size
        self._points = [Point(*point) for point in state["points"]]
        self._best = state["best"]


def divergence(
    logits: Tensor, top_k_ids: Tensor, top_k_log_probs: Tensor, off_overlap: Tensor = _NONE
) -> Tensor:
    """Computes KL(target || draft) [n] in nats at n positions.

    `logits` [n, vocabulary] are the draft's. `top_k_ids` and `top_k_log_probs`, each [n, k], are
    the target's k most probable tokens and their log-probabilities. All tokens outside the k are
    merged into one outcome, so the result is a lower bound of the divergence over the whole
    vocabulary.

    For a draft with another vocabulary, the overlap are the tokens that both vocabularies have.
    `off_overlap` [count] are the ids of the draft's tokens off the overlap, and `top_k_ids` are the
    draft's ids, -1 for a token that it lacks; in each row it has at least one. The outcomes are
    then each of the k tokens that the draft has, all other tokens on the overlap, and all tokens
    off it. The target's probability outside the k tokens is divided between the last two outcomes
    in the proportion in which that of the k tokens is on and off the overlap. With m the target's
    probability on the overlap, the result is m KL(p' || q') + KL(m || the draft's probability on
    the overlap), in which p' and q' are the target's and the draft's distribution restricted to the
    overlap and renormalized. If `off_overlap` is empty, the second term is left out.
    """
    tiny = torch.finfo(torch.float32).eps
    off_overlap = off_overlap.to(logits.device)
    is_common = top_k_ids >= 0
    # gather and scatter need ids
    ids = torch.where(is_common, top_k_ids, top_k_ids.amax(dim=-1, keepdim=True))
    common_logits = logits.gather(-1, ids)
    target_probs = top_k_log_probs.exp()
    common_probs = torch.where(is_common, target_probs, 0)
    total = target_probs.sum(dim=-1)
    on_overlap = common_probs.sum(dim=-1) / total  # m
    # there are other tokens on the overlap
    has_rest = logits.shape[-1] - len(off_overlap) > top_k_ids.shape[-1]
    if has_rest:
        # The sum over all other tokens, not 1 minus a sum: for a confident draft that and its
        # gradient would vanish.
        others = torch.cat((ids, off_overlap.expand(len(ids), -1)), dim=-1)
        rest_total = logits.scatter(-1, others, -torch.inf).logsumexp(dim=-1)
        common_total = common_logits.masked_fill(~is_common, -torch.inf).logsumexp(dim=-1)
        overlap_total = torch.logaddexp(common_total, rest_total)
    else:
        overlap_total = logits.index_fill(-1, off_overlap, -torch.inf).logsumexp(dim=-1)
    log_q = common_logits - overlap_total[:, None]
    result = (common_probs * (top_k_log_probs - on_overlap.log()[:, None] - log_q)).sum(dim=-1)
    if has_rest:
        rest = ((1 - total) * on_overlap).clamp_min(tiny)
        result = result + rest * (rest.log() - on_overlap.log() - rest_total + overlap_total)
    if len(off_overlap):
        outside_total = logits.index_select(-1, off_overlap).logsumexp(dim=-1)
        all_total = torch.logaddexp(overlap_total, outside_total)
        outside = (1 - on_overlap).clamp_min(tiny)
        result = result + on_overlap * (on_overlap.log() - overlap_total + all_total)
        result = result + outside * (outside.log() - outside_total + all_total)
    return result


def held_out_agreement(
    texts: Sequence[Text], ranks_of: Callable[[Text], Tensor]
) -> tuple[dict[str, list[float] | None], list[list[float]]]:
    """Measures how often the target's most probable token is predicted: on the generated tokens of
    the held-out texts.

    `ranks_of(text)` returns int64 [rows, depths] with one row per draft, which begins after a token
    of the text. Column n has the rank, in the prediction of the draft's n-th token, of the target's
    most probable token: 0 if the prediction is right, -1 where nothing was predicted.

    Returns two things. `agreement` has, for texts that the target generated greedily (`greedy`) and
    for all other texts (`sampled`), the share of right predictions by depth: the n-th number is
    that of the n-th drafted token, where all tokens before it were right (EAGLE's n-alpha), up to
    the last that was ever reached. It is None if there are no such texts. `ranks[n][r]` is the
    share of the n-th tokens to which rank r was given, whatever was predicted before: the mean of
    the shares in greedy and in sampled texts, as far as there are any; empty without texts.
    """
    agreement: dict[str, list[float] | None] = {"greedy": None, "sampled": None}
    tables: list[Tensor] = []
    own = [
        text for text in texts if text.use == Use.HELD_OUT and text.prompt_length < len(text.ids)
    ]
    for name, is_greedy in (("greedy", True), ("sampled", False)):
        ranks = [ranks_of(text).cpu() for text in own if text.greedy == is_greedy]
        if ranks:
            table = torch.cat(ranks)
            is_right = (table == 0).cumprod(dim=1)
            is_reached = torch.nn.functional.pad(is_right[:, :-1], (1, 0), value=1) * (table >= 0)
            counts = zip(is_right.sum(dim=0).tolist(), is_reached.sum(dim=0).tolist(), strict=True)
            agreement[name] = [right / reached for right, reached in counts if reached]
            columns = [column[column >= 0].clamp_max(RANKS) for column in table.T]
            by_rank = torch.stack(
                [torch.bincount(column, minlength=RANKS + 1) for column in columns]
            )
            tables.append(by_rank / by_rank.sum(dim=1, keepdim=True).clamp_min(1))
    return agreement, torch.stack(tables).mean(dim=0)[:, :RANKS].tolist() if tables else []


def tokens_per_pass(agreement: Sequence[float]) -> float:
    """Returns the expected tokens of a round with a draft of as many tokens as `agreement` has, of
    which each is right with that share if all before it are: with the target's own token."""
    return 1.0 + sum(math.prod(agreement[:length]) for length in range(1, len(agreement) + 1))


def first_shares(agreement: dict[str, list[float] | None]) -> dict[str, float | None]:
    """Returns the share of right predictions of first drafted tokens, for `greedy` and for
    `sampled` texts; None without such texts. `agreement` is as `held_out_agreement` returns it."""
    return {name: shares[0] if shares else None for name, shares in agreement.items()}
