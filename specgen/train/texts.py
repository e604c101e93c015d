"""Training text: the target generates it in batches (EESD, section 3.2). Each complete batch is
stored in a file.

The target's predictions after the tokens of a text are not stored: they are computed when training
begins, or in each step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgen.base.errors import SpecgenError, nan_logits
from specgen.base.files import write_whole
from specgen.base.seeds import derive_seed
from specgen.base.types import FILTERS, SamplingParams
from specgen.decoding.token_sampling import draw, make_generator, warp
from specgen.engine.devices import free_memory, inference
from specgen.engine.forward_pass import BatchPass, text_pass
from specgen.engine.kernels import library
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.weights import weights_fingerprint
from specgen.train.corpus import CYCLE, Use
from specgen.train.speed import Speed, measured_speed
from specgen.train.task import TrainingTask

TOP_K = 64  # tokens whose log-probabilities are used; the probability of all others is one number
MAX_BATCH = 64  # texts of a batch
_CPU_BATCH = 32  # on a CPU, where more at once gain little
GREEDY = SamplingParams()
_MIN_BATCH = 2
# of a budget in seconds, for generating text; it is 2/3 where only a predictor is trained
_BUDGET_SHARE = 0.2
# of the time for generating text: if less is left, no further batch is started
_MIN_TIME_SHARE = 0.1
_WANTED_TOKENS = 96  # of each answer, where the time is short,
_LONGER = 1.2  # if half as many texts have answers that are longer by this factor
_CACHE_SHARE = 0.5  # of the free memory; forward passes need the rest
# finished texts leave the KV cache once fewer than this share of its texts are unfinished
_COMPACTION_SHARE = 0.7
_PROMPT_TRIES = 20  # documents that are tried for a prompt of the batch's length
_EPOCHS = 10  # with a budget in steps: how often training uses each generated token
# of texts for the predictor and of held-out ones: their hidden states are kept for it,
PREDICTOR_TOKENS = 100_000
_PREDICTOR_BYTES = 1 << 28  # in at most this much memory


class Text(NamedTuple):
    """A text (token ids) that the target generated after a prompt of `prompt_length` tokens. In
    corpus text all is prompt.

    `greedy` tells whether the target chose its tokens greedily; it is False for sampled text and
    for corpus text. `use` says what the text is used for.
    """

    ids: list[int]
    prompt_length: int
    greedy: bool
    use: Use


class PredictedText(NamedTuple):
    """A text of n tokens with what the target predicts after each of them.

    `top_k_ids` (int32) and `top_k_log_probs`, each [n, TOP_K], are the most probable next tokens in
    descending order and their log-probabilities. `hidden` [n, width], bfloat16, are the target's
    last hidden states after its final norm; None: not kept.
    """

    text: Text
    top_k_ids: Tensor
    top_k_log_probs: Tensor
    hidden: Tensor | None = None


def most_probable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the most probable tokens for logits [n, vocabulary], and their log-probabilities in
    float32.

    Both results are [n, TOP_K], or [n, vocabulary] for a smaller vocabulary, in descending order of
    probability.
    """
    top = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    return top.indices, top.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)


@inference
def predicted(target: LoadedModel, text: Text, *, keep_hidden: bool = False) -> PredictedText:
    """Returns a text with the target's predictions after each token, computed in one forward pass.
    The tensors are on the CPU.

    With `keep_hidden` the result has the last hidden states too.
    """
    model = target.model
    taps = [model.shape.num_layers] if keep_hidden else []
    output = model.batch(text_pass(torch.tensor(text.ids, device=model.device)), taps=taps)
    top_k_ids, log_probs = most_probable(output.logits[0])
    hidden = None if output.features is None else output.features[0].to("cpu", torch.bfloat16)
    return PredictedText(text, top_k_ids.int().cpu(), log_probs.cpu(), hidden)


def wanted_for_predictor(target: LoadedModel) -> int:
    """Returns how many tokens of generated text the training of an acceptance predictor needs,
    held-out text included."""
    return min(PREDICTOR_TOKENS, _PREDICTOR_BYTES // (2 * target.model.shape.hidden_size))


class TextGeneration:
    """Generates and keeps the training text of a task.

    Stored batches are reused: those of a process that was interrupted, and, where the task names a
    folder for text, those of earlier trainings with the same target, arithmetic, prompts and
    sampling (`text_key`).

    Batches of greedy and of sampled text alternate; sampled text has the target's own temperature
    and filters. A text has the use (`Use`) of its prompt or document, which follow `CYCLE`, so that
    text after held-out prompts is never trained on. `uses` are the uses for which text is wanted:
    where a predictor is not trained, its texts are for training. If only a predictor is trained, no
    text for training is generated, and generation ends once the predictor has enough text
    (`wanted_for_predictor`).

    Many texts are generated in one pass over them all: on two cores three times as many tokens a
    second as any method that decodes one text (SmolLM2-135M: 142 against 51 with `adaptive`). With
    a budget in seconds they are as many as can have answers of `_WANTED_TOKENS` tokens in time, by
    the speed of some first passes: of shorter answers, prompts take most of the time.

    `seconds` is the time that this training has spent on generation, including the
    `earlier_seconds` before an interruption. With a budget in steps, the texts depend only on the
    seed. The constructor raises SpecgenError if a stored batch is damaged.
    """

    def __init__(self, target: LoadedModel, task: TrainingTask, uses: Sequence[Use]) -> None:
        self._target = target
        self._task = task
        recipe = task.recipe
        self._uses = uses
        self._only_predictor = Use.TRAIN not in uses
        self._max_tokens = min(recipe.window, target.context_limit)
        self._most_at_once = MAX_BATCH if target.device.type != "cpu" else _CPU_BATCH
        self._at_once = self._most_at_once
        self._speed: Speed | None = None  # None: not measured yet
        source = task.prompts or task.corpus
        self._is_split = source is not None and source.is_split
        self._prompts = self._in_order()
        self._planned = self._limit = math.inf
        if recipe.steps is not None:
            tokens = recipe.steps * (recipe.batch or 1) * recipe.self_text / _EPOCHS
            self._planned = 2 * max(1, round(tokens / (2 * self._most_at_once)))
        if recipe.seconds is not None:
            self._limit = recipe.seconds * (2 / 3 if self._only_predictor else _BUDGET_SHARE)
        self._sampling = own_sampling(target)
        variant = "predictor" if self._only_predictor else ""
        key = text_key(target, task, self._sampling, variant)
        self._folder = task.folder if task.kept_text is None else task.kept_text / key
        self.texts = list[Text]()
        self._made = list[Text]()  # each with the use of its prompt
        self._number = 0
        self.seconds = 0.0
        self._load()
        self.earlier_seconds = self.seconds
        # another training has generated text already: more comes when text is what limits
        self._has_kept = task.kept_text is not None and self._number >= 2

    def _keep(self, made: Sequence[Text]) -> None:
        """Adds a batch, in `texts` with the use that each text has in this training."""
        self._made += made
        self.texts += [
            text if text.use in self._uses else text._replace(use=self._uses[0]) for text in made
        ]
        self._number += 1

    def run(self) -> list[Text]:
        """Generates the batches that are not stored yet, and returns the texts of all batches.

        Raises TrainingStopped if a stop is requested; the unfinished batch is then lost. Raises
        RunError if the target's logits contain NaN.
        """
        while self._has_next():
            # half is for the first sampled batch
            share = 2 if self._number == 0 else 1
            self._add((self._limit - self.seconds) / share)
            self._show(self._share() if self._has_next() else 1.0)
        return self.texts

    def more(self, seconds: float) -> list[Text]:
        """Generates another batch for at most so many seconds, and returns its texts. Raises as
        `run`."""
        before = len(self.texts)
        self._add(seconds)
        return self.texts[before:]

    def _add(self, limit: float) -> None:
        start = time.monotonic()
        if math.isfinite(limit):
            self._choose_number(limit)
        made = self._batch(start, start + limit)
        seconds = time.monotonic() - start
        self.seconds += seconds
        write_whole(self._path(), json.dumps({"texts": made}))
        write_whole(self._own_path(), json.dumps({"seconds": self.seconds}))
        self._keep(made)

    def _choose_number(self, seconds: float) -> None:
        """Chooses how many texts the next batch has, by what there is time for."""
        prompts = [ids for ids, _ in self._prompts or ()]
        length = self._max_tokens // 8  # of documents' beginnings, about
        if prompts:
            length = sum(map(len, prompts)) // len(prompts)
        if self._speed is None:
            ids = max(prompts, key=len) if prompts else self._beginnings([self._uses[0]], 0)[0]
            self._speed = measured_speed(self._target, ids)
        wanted = min(_WANTED_TOKENS, self._max_tokens - length)
        number = self._most_at_once
        tokens = self._speed.answers(number, length, seconds)
        while number > _MIN_BATCH and tokens < wanted:
            of_half = self._speed.answers(number // 2, length, seconds)
            if of_half < _LONGER * tokens:  # fewer texts take as long
                break
            number //= 2
            tokens = of_half
        self._at_once = number

    def _has_next(self) -> bool:
        """Whether to generate another batch: always one greedy and one sampled batch, and more
        while budget is left."""
        if self._task.recipe.self_text == 0:
            return False
        if self._has_kept and self._task.recipe.steps is None and not self._only_predictor:
            return False
        return self._number < 2 or (
            self._done() < 1 and self.seconds < (1 - _MIN_TIME_SHARE) * self._limit
        )

    def _done(self, of_batch: float = 0.0) -> float:
        """Returns which share of the wanted text is generated, counting the share `of_batch` of an
        unfinished batch."""
        return (
            self._predictor_share
            if self._only_predictor
            else (self._number + of_batch) / self._planned
        )

    def _share(self, of_batch: float = 0.0, seconds: float = 0.0) -> float:
        """Returns which share of the text or of the time budget is used up, whichever is larger, at
        most 1. Counts the share `of_batch` of an unfinished batch, which has taken `seconds`."""
        return min(1.0, max(self._done(of_batch), (self.seconds + seconds) / self._limit))

    def _show(self, share: float, new_tokens: int = 0) -> None:
        tokens = new_tokens + sum(len(text.ids) for text in self._made)
        self._task.show("Generating text", share, f"{tokens:,} tokens")

    @property
    def _predictor_share(self) -> float:
        """The number of tokens that the predictor can use, as a share of what it needs."""
        return sum(
            len(text.ids) for text in self._made if text.use != Use.TRAIN
        ) / wanted_for_predictor(self._target)

    def _batch(self, start: float, deadline: float) -> list[Text]:
        seed = self._task.recipe.seed * 1_000_003 + self._number
        greedy, chosen = self._next_prompts(seed, self._number % 2 == 0)
        uses = [use for _, use in chosen]
        prompts = [prompt for prompt, _ in chosen]

        def on_progress(share: float, tokens: int) -> bool:
            now = time.monotonic()
            self._show(min(0.99, self._share(share, now - start)), tokens)
            self._task.stop_if_requested()
            return now < deadline

        made = continuations(
            self._target,
            prompts,
            self._max_tokens,
            sampling=GREEDY if greedy else self._sampling,
            seed=seed,
            on_progress=on_progress,
        )
        return [
            Text(ids, len(prompt), greedy, use)
            for ids, prompt, use in zip(made, prompts, uses, strict=True)
        ]

    def _in_order(self) -> list[tuple[list[int], Use]] | None:
        """Returns the prompts with their uses in the order in which they are answered, which
        depends on the seed; None if text begins as documents do. The first few have all uses."""
        prompts = self._task.prompts
        if prompts is None:
            return None
        longest = max(1, 3 * self._max_tokens // 4)  # longer prompts lose their beginning
        uses = [use for use in Use if use != Use.TRAIN or not self._only_predictor]
        if not prompts.is_split:
            uses = [self._uses[0]]
        rng = Random(f"prompts {self._task.recipe.seed}")
        waiting = dict[Use, list[list[int]]]()
        for use in uses:
            waiting[use] = [list(ids)[-longest:] for ids in prompts.different((use,))]
            rng.shuffle(waiting[use])
        listed = []
        while any(waiting.values()):
            for use in CYCLE if len(uses) > 1 else uses:
                if waiting.get(use):
                    listed.append((waiting[use].pop(), use))
        return listed

    def _next_prompts(self, seed: int, greedy: bool) -> tuple[bool, list[tuple[list[int], Use]]]:
        """Returns whether the batch is generated greedily, and its prompts (token ids) with their
        uses (`Use`).

        Once all prompts have been used, they are used again, but only for sampled text: greedy text
        would be the same as before. So a batch that should be greedy is sampled if no unused
        prompts are left.
        """
        used = sum(text.greedy == greedy for text in self._made)
        if self._prompts is None:
            uses = [self._use_of(index) for index in range(used, used + self._at_once)]
            return greedy, list(zip(self._beginnings(uses, seed), uses, strict=True))
        count = len(self._prompts)
        if not greedy:
            indices = [index % count for index in range(used, used + self._at_once)]
            return False, [self._prompts[index] for index in indices]
        left = self._prompts[used : used + self._at_once]
        return (True, left) if left else self._next_prompts(seed, False)

    def _use_of(self, index: int) -> Use:
        """Returns what text number `index` of the greedy or of the sampled texts is used for."""
        if not self._is_split:
            return self._uses[0]
        cycle = [use for use in CYCLE if use != Use.TRAIN or not self._only_predictor]
        return cycle[index % len(cycle)]

    def _beginnings(self, uses: Sequence[Use], seed: int) -> list[list[int]]:
        """Returns a prompt (token ids) from the corpus for each use in `uses`, mostly the
        beginning of a document.

        All have the same length, drawn from 4 tokens to a quarter of the longest text, unless few
        documents are that long.
        """
        rng = Random(f"beginnings {seed}")
        corpus = self._task.corpus
        assert corpus is not None
        size = rng.randint(4, max(4, self._max_tokens // 4))
        prompts = list[list[int]]()
        for use in uses:
            for _ in range(_PROMPT_TRIES):
                ids = corpus.sample(rng, size, from_start=rng.random() < 0.8, uses=(use,))
                if len(ids) == size:
                    break
            prompts.append(ids)
        return prompts

    def _path(self) -> Path:
        return self._folder / f"texts-{self._number:04d}.json"

    def _own_path(self) -> Path:
        """The file with the time that this training has spent, which text of others has not
        cost."""
        return self._task.folder / "generating.json"

    def _load(self) -> None:
        """Reads what is stored, with a budget in steps no more than is wanted. Raises SpecgenError
        if a file is damaged."""
        if self._own_path().is_file():
            self.seconds = float(self._read(self._own_path(), "seconds"))
        while self._path().is_file() and self._number < self._planned:
            stored = self._read(self._path(), "texts")
            self._keep([Text(ids, length, greedy, Use(use)) for ids, length, greedy, use in stored])

    def _read(self, path: Path, field: str) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))[field]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecgenError(f"cannot read {path}", "Delete it: it is generated again") from error


def text_key(
    target: LoadedModel, task: TrainingTask, sampling: SamplingParams, variant: str
) -> str:
    """Returns the name of the folder of text that a target generates: the same only for the same
    weights, arithmetic, prompts or corpus, lengths, sampling and seed."""
    corpus, prompts = (
        None if text is None else text.digest() for text in (task.corpus, task.prompts)
    )
    conditions = [
        weights_fingerprint(target.folder),
        target.dtype_name,
        target.device.type,
        library.kind(),
        corpus,
        prompts,
        task.recipe.window,
        task.recipe.seed,
        sampling.warping,
        variant,
    ]
    return sha256(json.dumps(conditions).encode()).hexdigest()[:16]


def own_sampling(target: LoadedModel) -> SamplingParams:
    """Returns the sampling that the target's generation config names; without one, temperature 1.
    What cannot be used of it is left out."""
    stored: Any = {}
    with suppress(OSError, ValueError):
        stored = json.loads((target.folder / "generation_config.json").read_text(encoding="utf-8"))
    sampling = SamplingParams(temperature=1.0)
    for name in ("temperature", *FILTERS):
        value = stored.get(name) if isinstance(stored, dict) else None
        if value and not isinstance(value, bool):
            with suppress(SpecgenError, TypeError):
                sampling = replace(sampling, **{name: value})
    return sampling


def largest_batch(target: LoadedModel, max_tokens: int) -> int:
    """Returns how many texts of `max_tokens` tokens to generate at once.

    The result is a power of two from 2 to `MAX_BATCH`: the largest for which the KV cache takes at
    most half of the free memory; `MAX_BATCH` if the system does not say how much is free.
    """
    free = free_memory(target.device)
    if free is None:
        return MAX_BATCH
    element_size = torch.empty(0, dtype=target.model.dtype).element_size()
    fitting = int(_CACHE_SHARE * free) // (
        max_tokens * target.model.shape.kv_bytes_per_token(element_size)
    )
    return max(_MIN_BATCH, min(MAX_BATCH, 1 << max(0, fitting.bit_length() - 1)))


def continuations(
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    on_progress: Callable[[float, int], bool] = lambda *_: True,
) -> list[list[int]]:
    """Returns one text (token ids) per prompt: the prompt, followed by the target's continuation.

    A text ends after an end-of-sequence token, after the token with which the chat template ends an
    answer, or when it has `max_tokens` tokens. Of the texts as many are generated at once as memory
    allows (`largest_batch`); their prompts are left-padded to the longest one, and the padding
    counts towards `max_tokens`. The random numbers of a sampled text depend on the seed and on its
    place in `prompts` alone. After each pass, which gives every unfinished text one token,
    `on_progress` is called with the share of the work that is done (0 to 1) and the number of
    tokens so far; if it returns False, generation ends there. Raises RunError if the logits contain
    NaN.
    """
    size = largest_batch(target, max_tokens)
    texts = [list(prompt) for prompt in prompts]
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        done = sum(map(len, texts[:start]))

        def on_part(
            share: float, tokens: int, first: int = start, before: int = done, own: int = len(part)
        ) -> bool:
            return on_progress((first + own * share) / len(texts), before + tokens)

        generators = None
        if not sampling.greedy:
            generators = [
                make_generator(target.device, derive_seed(seed, f"text {start + index}"))
                for index in range(len(part))
            ]
        if not _continue(target, part, max_tokens, sampling, generators, on_part):
            return texts[: start + size]
    return texts


@inference
def _continue(
    target: LoadedModel,
    texts: list[list[int]],
    max_tokens: int,
    sampling: SamplingParams,
    generators: Sequence[torch.Generator] | None,
    on_progress: Callable[[float, int], bool],
) -> bool:
    """Appends the target's continuations to the texts, all at once; see `continuations`. Returns
    False if `on_progress` ended it."""
    device = target.device
    model = target.model
    ends = {*target.eos_ids, target.tokenizer.special_id(target.tokenizer.turn_end)}
    longest = length = max(map(len, texts))
    new = torch.tensor([[0] * (length - len(text)) + text for text in texts], device=device)
    padding = torch.tensor([length - len(text) for text in texts], device=device)[:, None]
    columns = torch.arange(max_tokens, device=device)
    # of each text's tokens
    visible = columns >= padding
    positions = (columns - padding).clamp_min(0)
    cache = model.batch_cache(len(texts))
    cache.capacity = max_tokens
    rows = list(range(len(texts)))  # the text in each row of the cache; -1: it is finished
    while rows and length < max_tokens:
        past = cache.length
        seen = visible[:, None, :length] & (columns[past:length, None] >= columns[:length])
        batch = BatchPass(new, positions[:, past:length], seen, positions[:, :length], cache)
        logits = model.batch(batch, logits_to_keep=1).logits[:, -1].float()
        cache.length = length
        if logits.isnan().any():
            raise nan_logits("target")
        if generators is None:
            tokens = logits.argmax(dim=-1)
        else:
            probs = warp(logits, sampling)
            tokens = torch.zeros(len(rows), dtype=torch.long, device=device)
            for row, text in enumerate(rows):
                if text >= 0:
                    tokens[row] = draw(probs[row], generators[text])
        for row, (text, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if text >= 0:
                texts[text].append(token)
                rows[row] = -1 if token in ends else text
        new = tokens[:, None]
        length = length + 1
        unfinished = [row for row, text in enumerate(rows) if text >= 0]
        if len(unfinished) < _COMPACTION_SHARE * len(rows):
            index = torch.tensor(unfinished, dtype=torch.long, device=device)
            rows = [rows[row] for row in unfinished]
            new = new[index]
            positions = positions[index]
            visible = visible[index]
            cache.keep_sequences(unfinished)
        if not on_progress((length - longest) / (max_tokens - longest), sum(map(len, texts))):
            return False
    return True
