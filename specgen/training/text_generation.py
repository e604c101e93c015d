"""Generation of training text by the target, in batches that fit into memory and budget. A complete batch is stored in a file.

To distil a draft, the target also predicts the next tokens of corpus text ("reads" it), which is much cheaper than generating.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from specgen.engine.devices import free_memory
from specgen.errors import SpecgenError
from specgen.files import write_whole
from specgen.training.batched_generation import OnProgress
from specgen.training.corpus import HELD_OUT_EVERY, Corpus
from specgen.training.generated_text import GeneratedText, generate_texts, load_batches, read_texts, save_batch
from specgen.training.training_task import Recipe, TrainingObserver, TrainingStopped, TrainingTask, check_same_run

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

MAX_BATCH = 64  # texts that are generated at once
_MIN_BATCH = 2  # one of them is held out
_GREEDY, _SAMPLED, _READ = "greedy", "sampled", "read"  # the kinds of batches, in turn
_READ_FACTOR = 4  # read batches are this many times larger than generated ones
_BUDGET_SHARE = 0.3  # of a budget in seconds
_GENERATION_SHARE = 2 / 3  # of a batch's time; the rest is for the target's predictions
_MIN_TIME_SHARE = 0.1  # of the time for all batches: with less left, no other batch is started
_CACHE_SHARE = 0.5  # of the free memory; forward passes need the rest
_TIMED_TOKENS = 256
_REPORT_SECONDS = 0.5
_EPOCHS = 10  # with a budget in steps: how often training uses each generated token, if there were no read text
_HIDDEN_STATE_TOKENS = 40_000  # tokens whose hidden states are stored for the predictor,
_HIDDEN_STATE_BYTES = 1 << 27  # and the most memory for them


class TextGeneration:
    """Generates and stores the training text of a task. Batches that an interrupted process has stored are reused.

    Batches of greedy and of sampled text alternate. With `keep_top_k`, the target's top-k probabilities are stored with every
    text; if the task has a corpus and no prompts, every third batch then holds corpus text that the target did not generate.
    Without `keep_top_k`, the target's hidden states are stored with the first texts only. `settings` must be the same to resume.
    `seconds` is the time spent on generation, including the time before an interruption.

    With a budget in steps, the texts depend only on the seed and the batch size (the number of texts generated at once). The
    batch size of an interrupted process is kept.
    """

    def __init__(
        self,
        target: LoadedModel,
        task: TrainingTask,
        settings: dict[str, Any],
        observer: TrainingObserver,
        keep_top_k: bool = False,
    ) -> None:
        self._target, self._task, self._settings, self._observer = target, task, settings, observer
        self._keep_top_k, self._clock = keep_top_k, task.clock
        reads = keep_top_k and task.corpus is not None and not task.prompts
        self._kinds = [_GREEDY, _SAMPLED, *([_READ] if reads else [])]
        self._log = task.folder / "writing.json"
        recipe = task.recipe
        self._max_tokens = min(recipe.training_length, target.context_limit)
        self.seconds, batch_size = _read_log(self._log, settings)
        self._batch_size = batch_size or largest_batch(target, self._max_tokens)
        self._planned = math.inf if recipe.steps is None else len(self._kinds) * _batches_per_kind(recipe, self._batch_size)
        self._limit = math.inf if recipe.seconds is None else recipe.seconds * _BUDGET_SHARE
        self._write_log()

    def run(self) -> list[GeneratedText]:
        """Generates the batches that are not stored yet, and returns the texts of all batches.

        Raises TrainingStopped if the observer requests a stop. The unfinished batch is then lost.
        """
        if not self._task.recipe.generated_share:
            return []
        width = self._target.model.shape.hidden_size
        hidden_state_tokens = min(_HIDDEN_STATE_TOKENS, _HIDDEN_STATE_BYTES // (2 * width))
        batches = load_batches(self._task.folder)
        texts = [text for batch in batches for text in batch]
        for number in itertools.count(len(batches)):
            if not self._has_next(number):
                break
            start = self._clock()
            with_states = sum(len(text.ids) for text in texts if text.hidden_states is not None)
            made = self._batch(number, _tokens(texts), keep_hidden_states=with_states < hidden_state_tokens)
            save_batch(self._task.folder, number, made)
            self.seconds += self._clock() - start
            self._write_log()
            texts += made
            share = self._share(number + 1, 0.0) if self._has_next(number + 1) else 1.0
            self._observer.generating(number + 1, share, _tokens(texts))
        return texts

    def _has_next(self, number: int) -> bool:
        """Whether batch `number` is to be made: always one of each kind (greedy, sampled, read), more within the budget."""
        has_time = self.seconds < (1 - _MIN_TIME_SHARE) * self._limit
        return number < len(self._kinds) or (number < self._planned and has_time)

    def _share(self, batches: float, batch_seconds: float) -> float:
        """Returns the share of the generation that is done: `batches` batches, and `batch_seconds` spent in an unfinished one."""
        return min(1.0, max(batches / self._planned, (self.seconds + batch_seconds) / self._limit))

    def _batch(self, number: int, tokens: int, *, keep_hidden_states: bool) -> list[GeneratedText]:
        start = self._clock()
        turn, index = divmod(number, len(self._kinds))
        time_left = max(0.0, self._limit - self.seconds)
        if turn == 0:  # divided among the kinds that have no batch yet
            time_left /= len(self._kinds) - index
        seed = self._task.recipe.seed * 1_000_003 + number
        if self._kinds[index] == _READ:
            assert self._task.corpus is not None
            rng, count = Random(f"read {seed}"), _READ_FACTOR * self._batch_size
            read = [self._task.corpus.sample(rng, self._max_tokens, held_out=False) for _ in range(count)]
            return read_texts(self._target, read, self._progress(number, tokens, start, start + time_left))
        prompts, held_out, greedy = self._prompts(turn, seed, greedy=self._kinds[index] == _GREEDY)
        if time_left < math.inf:
            text_seconds = self._prediction_seconds(prompts[0]) * self._max_tokens
            count = max(_MIN_BATCH, int((1 - _GENERATION_SHARE) * time_left / text_seconds))
            prompts, held_out = prompts[:count], held_out[:count]
        deadline = start + _GENERATION_SHARE * time_left
        return generate_texts(
            self._target,
            prompts,
            self._max_tokens,
            greedy=greedy,
            seed=seed,
            held_out=held_out,
            keep_hidden_states=keep_hidden_states,
            keep_top_k=self._keep_top_k,
            on_progress=self._progress(number, tokens - sum(map(len, prompts)), start, deadline),
        )

    def _progress(self, number: int, tokens: int, start: float, deadline: float) -> OnProgress:
        """Returns the `on_progress` function for batch `number`.

        It reports the progress, raises TrainingStopped if the observer requests a stop, and ends the batch at the deadline (a
        time of the clock). `tokens` is the number of tokens in earlier batches, `start` the time when the batch began.
        """
        reported = -math.inf

        def on_progress(share: float, new_tokens: int) -> bool:
            nonlocal reported
            now = self._clock()
            if now - reported >= _REPORT_SECONDS:
                reported = now
                done = min(0.99, self._share(number + share, now - start))  # the target's predictions are still missing
                self._observer.generating(number, done, max(0, tokens + new_tokens))
            if self._observer.stop_requested():
                raise TrainingStopped
            return now < deadline

        return on_progress

    def _prompts(self, turn: int, seed: int, *, greedy: bool) -> tuple[list[list[int]], list[bool], bool]:
        """Returns the prompts of a batch, whether each is held out from training, and whether the batch is generated greedily.

        `turn` is the number of earlier batches of the same kind. Once all of the user's prompts have been used, they are used
        again, but only for sampled text: greedy text would be the same as before.
        """
        given, batch_size = self._task.prompts, self._batch_size
        if not given:
            assert self._task.corpus is not None
            prompts = corpus_prompts(self._task.corpus, batch_size, self._max_tokens, seed)
            return prompts, [index % HELD_OUT_EVERY == 0 for index in range(len(prompts))], greedy
        max_prompt = max(1, 3 * self._max_tokens // 4)  # longer prompts lose their beginning
        start = turn * batch_size
        greedy = greedy and start < len(given)
        indices = range(start, min(len(given), start + batch_size) if greedy else start + batch_size)
        prompts = [list(given[index % len(given)])[-max_prompt:] for index in indices]
        # With enough prompts, a held-out prompt is held out every time it is used.
        period = len(given) if len(given) >= HELD_OUT_EVERY else indices.stop
        return prompts, [index % period % HELD_OUT_EVERY == 0 for index in indices], greedy

    def _prediction_seconds(self, prompt: list[int]) -> float:
        """Measures how many seconds per token the target's predictions take, with one forward pass."""
        size = min(self._max_tokens, _TIMED_TOKENS)
        start = self._clock()
        read_texts(self._target, [(prompt * size)[:size]])
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


def corpus_prompts(corpus: Corpus, count: int, max_tokens: int, seed: int) -> list[list[int]]:
    """Returns prompts (token ids) from the corpus, mostly beginnings of documents.

    All prompts have the same length, drawn from 4 to a quarter of `max_tokens`. The first prompt and every HELD_OUT_EVERY-th
    after it come from held-out documents, if enough held-out documents have this length. There may be fewer than `count`.
    """
    rng = Random(f"beginnings {seed}")
    size = rng.randint(4, max(4, max_tokens // 4))
    prompts: list[list[int]] = []
    misses = 0
    while len(prompts) < count and misses < 20 * count:
        held_out = len(prompts) % HELD_OUT_EVERY == 0 if misses < 10 * count else None
        ids = corpus.sample(rng, size, from_start=rng.random() < 0.8, held_out=held_out)
        if len(ids) == size:
            prompts.append(ids)
        else:
            misses += 1
    return prompts or [corpus.sample(rng, size)]


def _tokens(texts: list[GeneratedText]) -> int:
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
