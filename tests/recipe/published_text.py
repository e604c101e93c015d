"""Text of the published model for the recipe of its draft model: answers in its chat form to
prompts of many kinds, and to questions that the model asks itself after the beginning of a user's
turn.

Texts are generated in one batch, in which the next text takes the place of one that has ended. The
final state after each token is kept, from which the distribution of the next token follows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from published_prompts import prompts
from published_target import CONTEXT, END, WIDTH, CachedTarget, Target, likeliest, target_folder
from torch import Tensor
from transformers import AutoTokenizer

TEXTS = 128  # that are generated at once
LONGEST_ANSWER = 320  # tokens
LONGEST_QUESTION = 120
SHARD_TOKENS = 60_000
OWN_QUESTIONS = 0.6  # share of the texts whose first question the model asks itself
GREEDY = 0.55  # share of the texts whose answers are greedy
TEMPERATURES = (0.7, 1.0)  # of the others
SECOND_TURN = 0.3  # share of the answers after which the model asks a second question
LIKELIEST = 40  # tokens among which a sampled one is
TOP_P = 0.95
_LOOP = 60  # tokens at the end of a text that are checked for repetition
_LONGEST_PERIOD = 20

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n"
)
TO_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
TO_QUESTION = "\n<|im_start|>user\n"


class Kind(IntEnum):
    """What a token is."""

    GIVEN = 0
    ANSWER = 1
    QUESTION = 2  # asked by the model


@dataclass(frozen=True, slots=True)
class TaughtText:
    """A text: `ids` and `kinds` [n], and as `hidden` [n, width], int16, the bits of the target's
    final states after each token, bfloat16; zero after the last."""

    ids: np.ndarray
    kinds: np.ndarray
    hidden: np.ndarray


@dataclass(slots=True)
class Writing:
    """A text that is being generated. `read` tokens of it were read; `given` are the next tokens,
    which are not the model's. `own` counts the tokens of the model's turn."""

    ids: list[int]
    greedy: bool
    temperature: float
    given: list[int]
    asks: bool
    kinds: list[int] = field(default_factory=list)
    read: int = 0
    own: int = 0
    turns: int = 1


class Writer:
    """Generates texts without end."""

    def __init__(self, target: Target, seed: int, texts: int = TEXTS) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(target_folder())
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._system, self._to_answer, self._to_question = (
            self._encode(text) for text in (SYSTEM, TO_ANSWER, TO_QUESTION)
        )
        self._target = target
        self._random = Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._prompts = prompts()
        self._model = CachedTarget(target, texts)
        self._hidden = torch.zeros(texts, CONTEXT, WIDTH, dtype=torch.bfloat16)
        self._prefix = self._read_system(texts)
        self._texts = [self._begin(slot) for slot in range(texts)]

    def _read_system(self, texts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Reads the system's message but for its last token. Returns its keys, values and final
        states."""
        length = len(self._system) - 1
        for position, token in enumerate(self._system[:length]):
            step = self._model.step([token] * texts, [position] * texts)
            self._hidden[:, position] = step
        keys, values = (
            cache[:, 0, :, :length].clone() for cache in (self._model.keys, self._model.values)
        )
        return keys, values, self._hidden[0, :length].clone()

    def _begin(self, slot: int) -> Writing:
        asks = self._random.random() < OWN_QUESTIONS
        prompt = [] if asks else self._encode(self._random.choice(self._prompts)) + self._to_answer
        length = len(self._system) - 1
        keys, values, hidden = self._prefix
        self._model.fork(length, slot, (keys, values))
        self._hidden[slot, :length] = hidden
        return Writing(
            ids=list(self._system),
            greedy=self._random.random() < GREEDY,
            temperature=self._random.choice(TEMPERATURES),
            given=prompt,
            asks=asks,
            kinds=[Kind.GIVEN] * len(self._system),
            read=length,
        )

    def texts(self) -> Iterator[TaughtText]:
        while True:
            ids = [text.ids[text.read] for text in self._texts]
            positions = [text.read for text in self._texts]
            hidden = self._model.step(ids, positions)
            self._hidden[torch.arange(len(positions)), torch.tensor(positions)] = hidden
            best, drawn = self._choose(hidden)
            for slot, text in enumerate(self._texts):
                text.read += 1
                token = best[slot] if text.greedy and not text.asks else drawn[slot]
                if self._extend(text, token):
                    yield self._finished(slot, text)
                    self._texts[slot] = self._begin(slot)

    def _choose(self, hidden: Tensor) -> tuple[list[int], list[int]]:
        """Returns for each text its likeliest token and a sampled one."""
        ids, logits = likeliest(self._target, hidden, LIKELIEST)
        temperatures = torch.tensor(
            [1.0 if text.asks else text.temperature for text in self._texts]
        )
        probs = torch.softmax(logits / temperatures[:, None], dim=-1)
        probs = probs * (probs.cumsum(dim=-1) - probs < TOP_P)
        drawn = torch.multinomial(probs, 1, generator=self._generator)
        return ids[:, 0].tolist(), ids.gather(1, drawn)[:, 0].tolist()

    def _extend(self, text: Writing, token: int) -> bool:
        """Adds the next token, `token` if it is the model's. Returns whether the text has ended."""
        if text.given:
            text.ids.append(text.given.pop(0))
            text.kinds.append(Kind.GIVEN)
            text.own = 0
            return len(text.ids) >= CONTEXT - 1
        text.own += 1
        if text.asks and (token in (END, 1) or text.own > LONGEST_QUESTION):
            text.asks = False
            text.given = list(self._to_answer)
            return self._extend(text, token)
        text.ids.append(token)
        text.kinds.append(Kind.QUESTION if text.asks else Kind.ANSWER)
        if len(text.ids) >= CONTEXT - 1:
            return True
        if text.asks or (token != END and text.own < LONGEST_ANSWER and not repeats(text.ids)):
            return False
        goes_on = (
            token == END
            and text.turns == 1
            and len(text.ids) < CONTEXT // 2
            and self._random.random() < SECOND_TURN
        )
        if goes_on:
            text.turns += 1
            text.given = list(self._to_question)
            text.asks = True
        return not goes_on

    def _finished(self, slot: int, text: Writing) -> TaughtText:
        hidden = self._hidden[slot, : len(text.ids)].clone()
        hidden[-1] = 0
        return TaughtText(
            np.array(text.ids, np.int32),
            np.array(text.kinds, np.uint8),
            hidden.view(torch.int16).numpy(),
        )


def repeats(ids: list[int]) -> bool:
    """Returns whether a text goes round in a loop."""
    end = ids[-_LOOP:]
    return len(end) == _LOOP and any(
        end[period:] == end[:-period] for period in range(1, _LONGEST_PERIOD + 1)
    )


@torch.no_grad()
def write_text(folder: Path, minutes: float, seed: int) -> None:
    """Generates text for `minutes` and saves it in `folder`, beside what is there. Another text
    follows from another `seed`, and from another number of files that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    number = len(list(folder.glob("*.npz")))
    texts: list[TaughtText] = []
    for text in Writer(Target(), seed=seed + number).texts():
        texts.append(text)
        if sum(len(text.ids) for text in texts) >= SHARD_TOKENS:
            save(folder / f"text-{number:04}", texts)
            number += 1
            texts = []
        if time.monotonic() > end:
            break
    if texts:
        save(folder / f"text-{number:04}", texts)


def save(stem: Path, texts: list[TaughtText]) -> None:
    np.save(stem.with_suffix(".npy"), np.concatenate([text.hidden for text in texts]))
    unfinished = stem.with_suffix(".unfinished.npz")
    np.savez(
        unfinished,
        ids=np.concatenate([text.ids for text in texts]),
        kinds=np.concatenate([text.kinds for text in texts]),
        lengths=np.array([len(text.ids) for text in texts]),
    )
    unfinished.rename(stem.with_suffix(".npz"))


def load(stem: Path) -> list[TaughtText]:
    """Reads a shard, whose states stay on the disk until they are used."""
    described = np.load(stem.with_suffix(".npz"))
    hidden = np.load(stem.with_suffix(".npy"), mmap_mode="r")
    ends = np.cumsum(described["lengths"])
    spans = [
        slice(end - length, end) for end, length in zip(ends, described["lengths"], strict=True)
    ]
    return [
        TaughtText(described["ids"][span], described["kinds"][span], hidden[span]) for span in spans
    ]
