"""Training text: the target generates it in batches (EESD, section 3.2). Each complete batch is
stored in a file.

The target's predictions after the tokens of a text are not stored: they are computed when training
begins, or in each step.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from specgen.base.errors import SpecgenError, nan_logits
from specgen.base.files import write_whole
from specgen.engine.devices import free_memory, inference
from specgen.engine.forward_pass import BatchPass, text_pass
from specgen.engine.loaded_model import LoadedModel
from specgen.train.corpus import CYCLE, NOT_HELD_OUT, Use
from specgen.train.task import TrainingTask

TOP_K = 64  # tokens whose log-probabilities are used; the probability of all others is one number
MAX_BATCH = 64  # texts that are generated at once
_MIN_BATCH = 2
# of a budget in seconds, for generating text; it is 2/3 where only a predictor is trained
_BUDGET_SHARE = 0.2
# of the time for generating text: if less is left, no further batch is started
_MIN_TIME_SHARE = 0.1
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
    """Generates and stores the training text of a task. Batches that an interrupted process has
    stored are reused.

    Batches of greedy and of sampled text alternate. `uses` are the uses (`Use`) for which text is
    wanted. `CYCLE` assigns a use to each text, and its prompt comes from documents or prompts with
    the same use (see `_sources`). A text gets the first of `uses` instead if its use is not in
    `uses`, if it is for a predictor that has enough text already (`wanted_for_predictor`), or if
    the prompts are not split (`Corpus.is_split`). If only a predictor is trained, generation ends
    once it has enough text.

    `seconds` is the time spent on generation, including the time before an interruption. With a
    budget in steps, the texts depend only on the seed and the number of texts generated at once,
    which stays the same for an interrupted process. The constructor raises SpecgenError if a stored
    batch is damaged.
    """

    def __init__(self, target: LoadedModel, task: TrainingTask, uses: Sequence[Use]) -> None:
        self._target = target
        self._task = task
        recipe = task.recipe
        self._uses = uses
        self._only_predictor = Use.TRAIN not in uses
        self._max_tokens = min(recipe.window, target.context_limit)
        self.texts = list[Text]()
        self._number = 0
        self.seconds = 0.0
        self._at_once = largest_batch(target, self._max_tokens)
        self._load()
        source = task.prompts or task.corpus
        self._is_split = source is not None and source.is_split
        self._given = (
            {use: task.prompts.different(self._sources(use)) for use in Use}
            if task.prompts
            else None
        )
        self._planned = self._limit = math.inf
        if recipe.steps is not None:
            tokens = recipe.steps * recipe.batch * recipe.self_text / _EPOCHS
            self._planned = 2 * max(1, round(tokens / (2 * self._at_once)))
        if recipe.seconds is not None:
            self._limit = recipe.seconds * (2 / 3 if self._only_predictor else _BUDGET_SHARE)

    def run(self) -> list[Text]:
        """Generates the batches that are not stored yet, and returns the texts of all batches.

        Raises TrainingStopped if a stop is requested; the unfinished batch is then lost. Raises
        RunError if the target's logits contain NaN.
        """
        while self._has_next():
            start = time.monotonic()
            made = self._batch(start)
            self.seconds += time.monotonic() - start
            write_whole(
                self._path(),
                json.dumps({"seconds": self.seconds, "at_once": self._at_once, "texts": made}),
            )
            self.texts += made
            self._number += 1
            self._show(self._share() if self._has_next() else 1.0)
        return self.texts

    def _has_next(self) -> bool:
        """Whether to generate another batch: always one greedy and one sampled batch, and more
        while budget is left."""
        if self._task.recipe.self_text == 0:
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
        tokens = new_tokens + sum(len(text.ids) for text in self.texts)
        self._task.show("Generating text", share, f"{tokens:,} tokens")

    @property
    def _predictor_share(self) -> float:
        """The number of tokens that the predictor can use, as a share of what it needs."""
        return sum(
            len(text.ids) for text in self.texts if text.use != Use.TRAIN
        ) / wanted_for_predictor(self._target)

    def _sources(self, use: Use) -> tuple[Use, ...]:
        """Returns the uses of documents and prompts with which texts for the use `use` may begin.

        If no predictor is trained, texts for training may begin with documents that are reserved
        for it.
        """
        return NOT_HELD_OUT if use == Use.TRAIN and Use.PREDICTOR not in self._uses else (use,)

    def _batch(self, start: float) -> list[Text]:
        seed = self._task.recipe.seed * 1_000_003 + self._number
        greedy, prompts, uses = self._prompts(seed, self._number % 2 == 0)
        # half is for the first sampled batch
        deadline = start + (self._limit - self.seconds) / (2 if self._number == 0 else 1)

        def on_progress(share: float, tokens: int) -> bool:
            now = time.monotonic()
            self._show(min(0.99, self._share(share, now - start)), tokens)
            self._task.stop_if_requested()
            return now < deadline

        made = continuations(
            self._target,
            prompts,
            self._max_tokens,
            greedy=greedy,
            seed=seed,
            on_progress=on_progress,
        )
        return [
            Text(ids, len(prompt), greedy, use)
            for ids, prompt, use in zip(made, prompts, uses, strict=True)
        ]

    def _prompts(self, seed: int, greedy: bool) -> tuple[bool, list[list[int]], list[Use]]:
        """Returns whether the batch is generated greedily, its prompts (token ids), and the use
        (`Use`) of each text.

        Once all of the user's prompts have been used, they are used again, but only for sampled
        text: greedy text would be the same as before. So a batch that should be greedy is sampled
        if no unused prompts are left.
        """
        used = Counter(text.use for text in self.texts if text.greedy == greedy)
        wanted = [
            self._use_of(index) for index in range(used.total(), used.total() + self._at_once)
        ]
        if self._given is None:
            return greedy, self._beginnings(wanted, seed), wanted
        longest = max(1, 3 * self._max_tokens // 4)  # longer prompts lose their beginning
        prompts = []
        uses = []
        for use in wanted:
            given = self._given[use]
            index = used[use]
            if not greedy or index < len(given):
                prompts.append(list(given[index % len(given)])[-longest:])
                uses.append(use)
                used[use] += 1
        return (greedy, prompts, uses) if prompts else self._prompts(seed, False)

    def _use_of(self, index: int) -> Use:
        """Returns what text number `index` of the greedy or of the sampled texts is used for."""
        use = CYCLE[index % len(CYCLE)]
        is_needed = use in self._uses and (use != Use.PREDICTOR or self._predictor_share < 1)
        return use if self._is_split and is_needed else self._uses[0]

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
                ids = corpus.sample(
                    rng, size, from_start=rng.random() < 0.8, uses=self._sources(use)
                )
                if len(ids) == size:
                    break
            prompts.append(ids)
        return prompts

    def _path(self) -> Path:
        return self._task.folder / f"texts-{self._number:04d}.json"

    def _load(self) -> None:
        """Reads what an interrupted process stored. Raises SpecgenError if a file is damaged."""
        while self._path().is_file():
            path = self._path()
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                self.seconds = float(content["seconds"])
                self._at_once = int(content["at_once"])
                self.texts += [
                    Text(ids, length, greedy, Use(use))
                    for ids, length, greedy, use in content["texts"]
                ]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise SpecgenError(
                    f"cannot read {path}", "Delete it: it is generated again"
                ) from error
            self._number += 1


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


@inference
def continuations(
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    greedy: bool,
    seed: int = 0,
    on_progress: Callable[[float, int], bool] = lambda *_: True,
) -> list[list[int]]:
    """Returns one text (token ids) per prompt: the prompt, followed by the target's continuation.

    A text ends after an end-of-sequence token, or when it has `max_tokens` tokens. Prompts are
    left-padded to the longest one, and the padding counts towards `max_tokens`. Tokens are chosen
    greedily or sampled at temperature 1. After each pass, which gives every unfinished text one
    token, `on_progress` is called with the share of the work that is done (0 to 1) and the number
    of tokens so far; if it returns False, generation ends there. Raises RunError if the logits
    contain NaN.
    """
    texts = [list(prompt) for prompt in prompts]
    device = target.device
    model = target.model
    generator = torch.Generator(device).manual_seed(seed)
    longest = length = max(map(len, prompts))
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
        tokens = (
            logits.argmax(dim=-1)
            if greedy
            else logits.softmax(dim=-1).multinomial(1, generator=generator)[:, 0]
        )
        for row, (text, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if text >= 0:
                texts[text].append(token)
                rows[row] = -1 if token in target.eos_ids else text
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
            break
    return texts
