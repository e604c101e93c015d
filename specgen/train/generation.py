"""Generation of training text by the target, in batches that fit into memory and budget. A complete batch is stored in a file.

To distil a draft, the target also predicts the next tokens of corpus text ("reads" it), which is much cheaper than generating.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from specgen.base.errors import SpecgenError
from specgen.base.files import write_whole
from specgen.engine.devices import free_memory
from specgen.train.corpus import CYCLE, NOT_HELD_OUT, Corpus, Part, parts_of
from specgen.train.task import Recipe, TrainingObserver, TrainingStopped, TrainingTask, check_same_run
from specgen.train.texts import GeneratedText, OnProgress, continuations, load_batches, predicted, save_batch

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

MAX_BATCH = 64  # texts that are generated at once
_MIN_BATCH = 2
_GREEDY, _SAMPLED, _READ = "greedy", "sampled", "read"  # the kinds of batches, in turn
_READ_FACTOR = 4  # read batches are this many times larger than generated ones
_BUDGET_SHARE = 0.3  # of a budget in seconds
_GENERATION_SHARE = 2 / 3  # of a batch's time; the rest is for the target's predictions
_MIN_TIME_SHARE = 0.1  # of the time for all batches: with less left, no other batch is started
_CACHE_SHARE = 0.5  # of the free memory; forward passes need the rest
_TIMED_TOKENS = 256
_REPORT_SECONDS = 0.5
_PROMPT_TRIES = 20  # documents that are tried for a prompt of the batch's length
_EPOCHS = 10  # with a budget in steps: how often training uses each generated token, if there were no read text
_HIDDEN_STATE_TOKENS = 100_000  # tokens whose hidden states are stored for the predictor,
_HIDDEN_STATE_BYTES = 1 << 28  # and the most memory for them
_ONLY_PREDICTOR = tuple(Part.HELD_OUT if part == Part.HELD_OUT else Part.PREDICTOR for part in CYCLE)
_NO_PREDICTOR = tuple(Part.HELD_OUT if part == Part.HELD_OUT else Part.TRAIN for part in CYCLE)


class Purpose(Enum):
    """What generated text is used to train: an exit layer and its predictor, a predictor alone, a distilled draft, or a head."""

    EXIT = "exit"
    PREDICTOR = "predictor"
    DRAFT = "draft"
    HEAD = "head"


class TextGeneration:
    """Generates and stores the training text of a task. Batches that an interrupted process has stored are reused.

    Batches of greedy and of sampled text alternate. What a text is used for (its part) is decided by its prompt.

    To distil a draft, the target's top-k probabilities are stored with every text; if the task has a corpus and no prompts, every
    third batch then holds corpus text that the target did not generate. Where a predictor is trained, the target's hidden states
    are stored with texts for the predictor and with held-out ones, until there are enough. After that, no more texts are for the
    predictor. For a predictor alone, only these two kinds are generated; for a draft or a head, none is for a predictor.

    `settings` must be the same to resume. `seconds` is the time spent on generation, including the time before an interruption.

    With a budget in steps, the texts depend only on the seed and the batch size (the number of texts generated at once). The
    batch size of an interrupted process is kept.
    """

    def __init__(
        self,
        target: LoadedModel,
        task: TrainingTask,
        settings: dict[str, Any],
        observer: TrainingObserver,
        purpose: Purpose,
    ) -> None:
        self._target, self._task, self._settings, self._observer = target, task, settings, observer
        self._keep_top_k, self._only_predictor = purpose == Purpose.DRAFT, purpose == Purpose.PREDICTOR
        self._has_predictor, self._clock = purpose in (Purpose.EXIT, Purpose.PREDICTOR), task.clock
        reads = self._keep_top_k and task.corpus is not None and not task.prompts
        self._kinds = [_GREEDY, _SAMPLED, *([_READ] if reads else [])]
        self._log = task.folder / "writing.json"
        given = list(dict.fromkeys(map(tuple, task.prompts)))
        parts = parts_of(range(len(given)))
        self._is_split = Part.HELD_OUT in parts if given else task.corpus is not None and task.corpus.is_split
        self._given: dict[Part, list[tuple[int, ...]]] = {part: [] for part in Part}
        for prompt, part in zip(given, parts, strict=True):
            self._given[self._as_used(part)].append(prompt)
        recipe = task.recipe
        self._max_tokens = min(recipe.training_length, target.context_limit)
        self.seconds, batch_size = _read_log(self._log, settings)
        self._batch_size = batch_size or largest_batch(target, self._max_tokens)
        self._planned = math.inf if recipe.steps is None else len(self._kinds) * _batches_per_kind(recipe, self._batch_size)
        self._limit = math.inf if recipe.seconds is None else recipe.seconds * (1.0 if self._only_predictor else _BUDGET_SHARE)
        width = target.model.shape.hidden_size
        self._wanted_states = min(_HIDDEN_STATE_TOKENS, _HIDDEN_STATE_BYTES // (2 * width))
        self._write_log()

    def run(self) -> list[GeneratedText]:
        """Generates the batches that are not stored yet, and returns the texts of all batches.

        Raises TrainingStopped if the observer requests a stop. The unfinished batch is then lost.
        """
        if not self._task.recipe.generated_share:
            return []
        batches = load_batches(self._task.folder)
        texts = [text for batch in batches for text in batch]
        for number in itertools.count(len(batches)):
            if not self._has_next(number, texts):
                break
            start = self._clock()
            made = self._batch(number, texts)
            save_batch(self._task.folder, number, made)
            self.seconds += self._clock() - start
            self._write_log()
            texts += made
            share = self._share(number + 1, 0.0, texts) if self._has_next(number + 1, texts) else 1.0
            self._observer.generating(number + 1, share, _tokens(texts))
        return texts

    def _has_next(self, number: int, texts: Sequence[GeneratedText]) -> bool:
        """Whether batch `number` is to be made: always one of each kind (greedy, sampled, read), more within the budget."""
        has_time = self.seconds < (1 - _MIN_TIME_SHARE) * self._limit
        is_needed = self._share_of_states(texts) < 1 if self._only_predictor else number < self._planned
        return number < len(self._kinds) or (is_needed and has_time)

    def _share(self, batches: float, batch_seconds: float, texts: Sequence[GeneratedText]) -> float:
        """Returns the share of the generation that is done.

        `batches` is the number of batches, `batch_seconds` the time spent in an unfinished one.
        """
        done = self._share_of_states(texts) if self._only_predictor else batches / self._planned
        return min(1.0, max(done, (self.seconds + batch_seconds) / self._limit))

    def _share_of_states(self, texts: Sequence[GeneratedText]) -> float:
        """Returns the number of tokens with stored hidden states, as a share of what the predictor needs."""
        return sum(len(text.ids) for text in texts if text.hidden_states is not None) / self._wanted_states

    def _as_used(self, part: Part) -> Part:
        """Returns what text from a document or prompt of a part is used for here."""
        if not self._is_split:
            return Part.PREDICTOR if self._only_predictor else Part.TRAIN
        return Part.TRAIN if part == Part.PREDICTOR and not self._has_predictor else part

    def _batch(self, number: int, texts: Sequence[GeneratedText]) -> list[GeneratedText]:
        start = self._clock()
        turn, index = divmod(number, len(self._kinds))
        time_left = max(0.0, self._limit - self.seconds)
        if turn == 0:  # divided among the kinds that have no batch yet
            time_left /= len(self._kinds) - index
        seed = self._task.recipe.seed * 1_000_003 + number
        if self._kinds[index] == _READ:
            assert self._task.corpus is not None
            rng, count = Random(f"read {seed}"), _READ_FACTOR * self._batch_size
            read = [self._task.corpus.sample(rng, self._max_tokens, parts=NOT_HELD_OUT) for _ in range(count)]
            return self._read(read, self._progress(number, texts, start, start + time_left))
        keep_hidden_states = self._only_predictor or (self._has_predictor and self._share_of_states(texts) < 1)
        greedy, prompts, parts = self._prompts(texts, seed, self._kinds[index] == _GREEDY, keep_hidden_states)
        if time_left < math.inf:
            text_seconds = self._prediction_seconds(prompts[0]) * self._max_tokens
            count = max(_MIN_BATCH, int((1 - _GENERATION_SHARE) * time_left / text_seconds))
            prompts, parts = prompts[:count], parts[:count]
        on_progress = self._progress(number, texts, start, start + _GENERATION_SHARE * time_left)
        made = continuations(self._target, prompts, self._max_tokens, greedy=greedy, seed=seed, on_progress=on_progress)
        tokens, found = sum(map(len, made)), []
        for prompt, text, part in zip(prompts, made, parts, strict=True):
            keep = {"keep_top_k": self._keep_top_k, "keep_hidden_states": keep_hidden_states and part != Part.TRAIN}
            found.append(predicted(self._target, text, len(prompt), greedy=greedy, part=part, **keep))
            on_progress(1.0, tokens)
        return found

    def _read(self, texts: Sequence[Sequence[int]], on_progress: OnProgress) -> list[GeneratedText]:
        """Returns texts with the target's predictions, which is much faster than generating them, until the time is over."""
        made, tokens = list[GeneratedText](), 0
        for text in texts:
            made.append(predicted(self._target, text, len(text)))
            tokens += len(text)
            if not on_progress(len(made) / len(texts), tokens):
                break
        return made

    def _progress(self, number: int, texts: Sequence[GeneratedText], start: float, deadline: float) -> OnProgress:
        """Returns the `on_progress` function for batch `number`.

        It reports the progress, raises TrainingStopped if the observer requests a stop, and ends the batch at the deadline (a
        time of the clock). `texts` are those of earlier batches, `start` is the time when the batch began.
        """
        reported, tokens = -math.inf, _tokens(texts)

        def on_progress(share: float, new_tokens: int) -> bool:
            nonlocal reported
            now = self._clock()
            if now - reported >= _REPORT_SECONDS:
                reported = now
                done = min(0.99, self._share(number + share, now - start, texts))  # the target's predictions are still missing
                self._observer.generating(number, done, tokens + new_tokens)
            if self._observer.stop_requested():
                raise TrainingStopped
            return now < deadline

        return on_progress

    def _prompts(
        self, texts: Sequence[GeneratedText], seed: int, greedy: bool, for_predictor: bool
    ) -> tuple[bool, list[list[int]], list[Part]]:
        """Returns whether a batch is generated greedily, its prompts, and the part of each one.

        `texts` are those of earlier batches; `for_predictor` says whether the predictor needs more. Once all of the user's
        prompts have been used, they are used again, but only for sampled text: greedy text would be the same as before.
        """
        cycle = _ONLY_PREDICTOR if self._only_predictor else CYCLE if for_predictor else _NO_PREDICTOR
        used = Counter(text.part for text in texts if text.greedy == greedy)
        first = used.total()
        wanted = [self._as_used(cycle[index % len(CYCLE)]) for index in range(first, first + self._batch_size)]
        if not self._task.prompts:
            assert self._task.corpus is not None
            sources = [(part,) if self._has_predictor or part != Part.TRAIN else NOT_HELD_OUT for part in wanted]
            return greedy, corpus_prompts(self._task.corpus, sources, self._max_tokens, seed), wanted
        max_prompt = max(1, 3 * self._max_tokens // 4)  # longer prompts lose their beginning
        prompts, parts = [], []
        for part in wanted:
            given, index = self._given[part], used[part]
            if not greedy or index < len(given):
                prompts.append(list(given[index % len(given)])[-max_prompt:])
                parts.append(part)
                used[part] += 1
        return (greedy, prompts, parts) if prompts else self._prompts(texts, seed, False, for_predictor)

    def _prediction_seconds(self, prompt: list[int]) -> float:
        """Measures how many seconds per token the target's predictions take, with one forward pass."""
        size = min(self._max_tokens, _TIMED_TOKENS)
        start = self._clock()
        predicted(self._target, (prompt * size)[:size], size)
        return (self._clock() - start) / size

    def _write_log(self) -> None:
        content = {"settings": self._settings, "seconds": self.seconds, "texts_at_once": self._batch_size}
        write_whole(self._log, json.dumps(content))


def largest_batch(target: LoadedModel, max_tokens: int) -> int:
    """Returns how many texts of `max_tokens` tokens to generate at once.

    The result is a power of two from 2 to MAX_BATCH: the largest for which the KV cache takes at most half of the free memory.
    """
    free = free_memory(target.device)
    if free is None:
        return MAX_BATCH
    element_size = torch.empty(0, dtype=target.model.dtype).element_size()
    per_text = max_tokens * target.model.shape.kv_bytes_per_token(element_size)
    fitting = int(_CACHE_SHARE * free) // per_text
    return max(_MIN_BATCH, min(MAX_BATCH, 1 << max(0, fitting.bit_length() - 1)))


def corpus_prompts(corpus: Corpus, sources: Sequence[Collection[Part]], max_tokens: int, seed: int) -> list[list[int]]:
    """Returns one prompt (token ids) from the corpus per entry of `sources`: the parts of the documents it may come from.

    Prompts are mostly beginnings of documents. All have the same length, drawn from 4 to a quarter of `max_tokens`, unless few
    documents are that long.
    """
    rng = Random(f"beginnings {seed}")
    size = rng.randint(4, max(4, max_tokens // 4))
    prompts: list[list[int]] = []
    for parts in sources:
        for _ in range(_PROMPT_TRIES):
            ids = corpus.sample(rng, size, from_start=rng.random() < 0.8, parts=parts)
            if len(ids) == size:
                break
        prompts.append(ids)
    return prompts


def _tokens(texts: Sequence[GeneratedText]) -> int:
    return sum(len(text.ids) for text in texts)


def _read_log(log: Path, settings: dict[str, Any]) -> tuple[float, int | None]:
    """Reads the seconds spent and the batch size from the file of an interrupted generation; 0 and None if there is no file."""
    try:
        content = json.loads(log.read_text(encoding="utf-8"))
        check_same_run(log, dict(content["settings"]), settings)
        return float(content["seconds"]), max(_MIN_BATCH, int(content["texts_at_once"]))
    except FileNotFoundError:
        return 0.0, None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecgenError(f"cannot read {log}", f"Delete {log.parent} to start again") from error


def _batches_per_kind(recipe: Recipe, batch_size: int) -> int:
    """Returns how many greedy batches to generate for a budget in steps; as many sampled and read batches are added."""
    tokens = (recipe.steps or 0) * recipe.batch_size * recipe.training_length * recipe.generated_share / _EPOCHS
    return max(1, round(tokens / (2 * batch_size * recipe.training_length)))
