"""The target writes text of its own for a training: batch after batch, within memory and budget, each kept once it is whole.

For a draft model it reads open text too: its word on each token there costs a fraction of what writing one does, and the draft
meets as many kinds of text as the corpus has.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specgen.engine.devices import free_memory, synchronizer
from specgen.engine.kv_cache import bytes_per_token
from specgen.errors import SpecgenError
from specgen.files import write_whole
from specgen.training.corpus import HELD_OUT, Texts
from specgen.training.generated_text import (
    GeneratedText,
    GeneratedTexts,
    TrainingWatch,
    beginnings,
    judged,
    read_batch,
    write_batch,
)
from specgen.training.training_loop import Progress, Recipe, check_same_run

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

TEXTS_AT_ONCE = 64
_LEAST = 2  # texts in a batch: one is kept apart
_GREEDY, _SAMPLED, _READ = "greedy", "sampled", "read"  # the kinds of batches, in turn
_READ_TEXTS = 4  # times as many texts as are written at once
_SHARE = 0.3  # of a budget in minutes
_GROWING = 2 / 3  # of a batch's time; the rest is for judging what was written
_WORTH_BEGINNING = 0.1  # of all the time for writing: with less left no further batch is begun
_CACHE_SHARE = 0.5  # of the free memory; passes need the rest
_TIMED_TOKENS = 256
_REPORT_EVERY = 0.5  # seconds
_EPOCHS = 10
"""How often a token that the target wrote would be seen with a budget in steps, were there no other text. Generating one costs
several steps' worth; what is read comes on top."""
_KEPT_TOKENS = 40_000  # whose hidden rows are kept for the predictor,
_KEPT_BYTES = 1 << 27  # unless they are as wide as this


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What to train with. `prompts` are ids that the target goes on from; without them they are beginnings of the open text.
    `note` is how the run was asked for."""

    out: Path
    recipe: Recipe
    open_text: Texts | None = None
    prompts: Sequence[Sequence[int]] = ()
    note: str = ""


class TrainingObserver(Protocol):
    """Who wants to know how it goes, and may stop it."""

    def announce(self, what: str) -> None: ...

    def writing(self, batches: int, share: float, tokens: int) -> None: ...

    def training(self, progress: Progress) -> None: ...

    def stopping(self) -> bool: ...


class TextGeneration:
    """What an earlier run has written stands already. `seconds` is what it took, earlier runs included. With `keep_likely` the
    target's likeliest tokens are kept with every text, instead of hidden rows with some, and where there are no
    prompts of the user's open text is read in turn with what is written.

    With a budget in steps what is written follows from the seed, and from how many texts there is memory for at once: a power
    of two, which the first run keeps for the others.
    """

    def __init__(
        self,
        target: LoadedModel,
        job: TrainingTask,
        settings: dict[str, Any],
        folder: Path,
        watcher: TrainingObserver,
        *,
        keep_likely: bool = False,
    ) -> None:
        self.kept = GeneratedTexts(folder)
        self._target, self._job, self._settings, self._watcher = target, job, settings, watcher
        self._keep_likely = keep_likely
        self._kinds = [_GREEDY, _SAMPLED, *([_READ] if keep_likely and job.open_text is not None and not job.prompts else [])]
        self._log = folder / "writing.json"
        self._window = min(job.recipe.window, target.context_limit)
        self.seconds, at_once = _begun(self._log, settings)
        self._at_once = at_once or texts_at_once(target, self._window)
        self._planned = None if job.recipe.steps is None else len(self._kinds) * _turns(job.recipe, self._at_once)
        self._limit = math.inf if job.recipe.seconds is None else job.recipe.seconds * _SHARE
        self._pace: float | None = None
        self._keep()

    def run(self) -> None:
        """Write what is missing. Raises Stopped where the watcher stops it: the batch that was begun is lost."""
        if not self._job.recipe.self_text:
            return
        wide = 2 * self._target.model.config.get_text_config().hidden_size
        most_kept = min(_KEPT_TOKENS, _KEPT_BYTES // wide)
        texts = self.kept.read()
        tokens, with_rows = _sizes(texts)
        number = self.kept.count()
        while self._goes_on(number):
            start = time.monotonic()
            made = self._batch(number, tokens, keep_rows=with_rows < most_kept)
            self.kept.keep(number, made)
            self.seconds += time.monotonic() - start
            self._keep()
            number += 1
            more = _sizes(made)
            tokens, with_rows = tokens + more[0], with_rows + more[1]
            self._watcher.writing(number, 1.0 if not self._goes_on(number) else self._share(number, 0.0), tokens)

    def _goes_on(self, number: int) -> bool:
        """A batch of each kind at the least, and with a budget in minutes as many as there is time for."""
        if number < len(self._kinds):
            return True
        return (
            number < self._planned if self._planned is not None else self._limit - self.seconds > _WORTH_BEGINNING * self._limit
        )

    def _share(self, number: float, begun: float) -> float:
        """How much is done with `number` batches, of which the last one has taken the seconds `begun` so far."""
        if self._planned is not None:
            return min(1.0, number / self._planned)
        return min(1.0, (self.seconds + begun) / self._limit)

    def _batch(self, number: int, tokens: int, *, keep_rows: bool) -> list[GeneratedText]:
        start = time.monotonic()
        turn, position = divmod(number, len(self._kinds))
        # The first ones leave as much to the others.
        time_left = max(0.0, self._limit - self.seconds) / (1 if turn else len(self._kinds) - position)
        seed = _seed(self._job.recipe.seed, number)
        if self._kinds[position] == _READ:
            return self._read(number, tokens, seed, start + time_left)
        prompts, apart, greedy = _prompts(
            self._job, turn, seed, self._window, self._at_once, greedy=self._kinds[position] == _GREEDY
        )
        until = math.inf
        if self._planned is None:
            count = max(_LEAST, int((1 - _GROWING) * time_left / (self._seconds_a_token(prompts[0]) * self._window)))
            prompts, apart = prompts[:count], apart[:count]
            until = start + _GROWING * time_left
        before = sum(map(len, prompts))
        return write_batch(
            self._target,
            prompts,
            self._window,
            greedy=greedy,
            seed=seed,
            held_out=apart,
            keep_rows=keep_rows,
            keep_likely=self._keep_likely,
            watch=TrainingWatch(self._reporter(number, tokens - before, start), self._watcher.stopping, until),
        )

    def _read(self, number: int, tokens: int, seed: int, until: float) -> list[GeneratedText]:
        assert self._job.open_text is not None
        rng = Random(f"read {seed}")
        texts = [self._job.open_text.draw(rng, self._window, apart=False) for _ in range(_READ_TEXTS * self._at_once)]
        watch = TrainingWatch(self._reporter(number, tokens, time.monotonic()), self._watcher.stopping, until)
        return read_batch(self._target, texts, watch)

    def _reporter(self, number: int, tokens: int, start: float) -> Callable[[float, int], None]:
        said = 0.0

        def grown(share: float, there: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= _REPORT_EVERY:
                said = now
                # Never all of it: judging comes yet.
                self._watcher.writing(number, min(0.99, self._share(number + share, now - start)), max(0, tokens + there))

        return grown

    def _seconds_a_token(self, prompt: list[int]) -> float:
        """What judging a token takes, measured once."""
        if self._pace is None:
            size = min(self._window, _TIMED_TOKENS)
            ids = torch.tensor((prompt * size)[:size])
            wait = synchronizer(self._target.device) or (lambda: None)
            start = time.monotonic()
            judged(self._target.model, ids)
            wait()
            self._pace = (time.monotonic() - start) / size
        return self._pace

    def _keep(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        content = {"settings": self._settings, "seconds": self.seconds, "texts_at_once": self._at_once}
        write_whole(self._log, json.dumps(content))


def texts_at_once(target: LoadedModel, window: int) -> int:
    """How many texts of a window grow side by side: 64, or the power of two whose cache takes at most half of what is free."""
    free = free_memory(target.device)
    if free is None:
        return TEXTS_AT_ONCE
    size = torch.empty(0, dtype=target.model.dtype).element_size()
    most = int(_CACHE_SHARE * free) // (window * bytes_per_token(target.model.config.get_text_config(), size))
    return max(_LEAST, min(TEXTS_AT_ONCE, 1 << max(0, most.bit_length() - 1)))


def _sizes(texts: list[GeneratedText]) -> tuple[int, int]:
    """The texts' tokens, and those whose rows are kept."""
    return sum(len(text.ids) for text in texts), sum(len(text.ids) for text in texts if text.rows is not None)


def _begun(log: Path, settings: dict[str, Any]) -> tuple[float, int | None]:
    """The seconds that an earlier run spent on text, and how many texts it wrote at once; 0 and None where there was none."""
    if not log.exists():
        return 0.0, None
    try:
        found = json.loads(log.read_text(encoding="utf-8"))
        before, seconds, at_once = dict(found["settings"]), float(found["seconds"]), int(found["texts_at_once"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecgenError(f"cannot read {log}", f"Delete {log.parent} to begin anew") from error
    check_same_run(log, before, settings)
    return seconds, max(_LEAST, at_once)


def _turns(recipe: Recipe, at_once: int) -> int:
    """How many batches of each kind a number of steps asks for."""
    tokens = (recipe.steps or 0) * recipe.batch * recipe.window * recipe.self_text / _EPOCHS
    return max(1, round(tokens / (2 * at_once * recipe.window)))


def _prompts(
    job: TrainingTask, turn: int, seed: int, window: int, at_once: int, *, greedy: bool
) -> tuple[list[list[int]], list[bool], bool]:
    """A batch's prompts, which of them are kept apart, and whether it is greedy.

    The user's prompts come round again, but greedy text only once: it would be the same.
    """
    if not job.prompts:
        assert job.open_text is not None
        found = beginnings(job.open_text, at_once, window, seed)
        return found, [position % HELD_OUT == 0 for position in range(len(found))], greedy
    longest = max(1, 3 * window // 4)  # of a longer prompt, its end
    count, start = len(job.prompts), turn * at_once
    greedy = greedy and start < count
    positions = range(start, min(count, start + at_once)) if greedy else range(start, start + at_once)
    found = [list(job.prompts[position % count])[-longest:] for position in positions]
    # Where there are many, what is kept apart are prompts, and all the texts behind them.
    return found, [(position % count if count >= HELD_OUT else position) % HELD_OUT == 0 for position in positions], greedy


def _seed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number
