"""Text that the target itself generates, to distil it from (EESD, section 3.2), half of it greedy and half sampled; or reads.

A batch is generated at a time and kept in a file of its own, so that an interrupted run goes on behind the last one. With the
ids are kept the target's own choice behind each of them, and of some texts its hidden rows, from which the predictor learns; or
its likeliest tokens with their probabilities, which a draft model is distilled from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from specgen.engine.attention_masks import Masks
from specgen.engine.decoder_layers import decoder_of
from specgen.engine.inference_mode import inference
from specgen.engine.kv_cache import KVCache
from specgen.errors import RunError, SpecgenError
from specgen.files import whole_file
from specgen.training.corpus import HELD_OUT, Texts

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

LIKELY = 16
"""So many of the target's likeliest tokens are kept; the others' probability is taken together."""
_PIECE = 256  # rows of logits that are turned into probabilities at once
_WORTH_SHRINKING = 0.7  # the share of a batch's texts that still grow, under which the others' cache rows are dropped


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """One text. `best` [n] is the target's likeliest token behind each of its `ids` [n]; `rows` [n, width] the target's hidden
    rows behind its norm, None where they were not kept. The first `prompt` ids are not the target's own. `likely` [n, LIKELY]
    are the target's likeliest tokens and `logs` [n, LIKELY] the logarithms of their probabilities, None where they were not
    asked for. Text that the target only read is all prompt, and not greedy."""

    ids: torch.Tensor
    best: torch.Tensor
    rows: torch.Tensor | None
    prompt: int
    greedy: bool
    held_out: bool
    likely: torch.Tensor | None = None
    logs: torch.Tensor | None = None


class TrainingStopped(Exception):  # noqa: N818  nothing went wrong
    """The user asked to stop."""


@dataclass(frozen=True, slots=True)
class TrainingWatch:
    """Who looks on while texts grow: told the share of the longest that is there and the tokens of all, after each. It may want
    to stop, which loses the batch, or be late: by `time.monotonic`, the moment after which nothing grows any more."""

    grown: Callable[[float, int], None] = lambda _, __: None
    stopping: Callable[[], bool] = lambda: False
    until: float = math.inf

    def check(self) -> None:
        if self.stopping():
            raise TrainingStopped

    def is_late(self) -> bool:
        return time.monotonic() >= self.until


NEVER_STOPPED = TrainingWatch()


class GeneratedTexts:
    """The batches in a folder: `part-0000.safetensors`, `part-0001.safetensors`, ..."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def count(self) -> int:
        """How many batches are there, the first ones."""
        count = 0
        while self._path(count).is_file():
            count += 1
        return count

    def keep(self, number: int, texts: Sequence[GeneratedText]) -> None:
        """Whole or not at all. OSError where the disk refuses."""
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [text.rows for text in texts if text.rows is not None]
        content: dict[str, torch.Tensor] = {
            "ids": torch.cat([text.ids for text in texts]).int(),
            "best": torch.cat([text.best for text in texts]).int(),
            "lengths": torch.tensor([len(text.ids) for text in texts], dtype=torch.int32),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
            "kept": torch.tensor([text.rows is not None for text in texts]),
            "greedy": torch.tensor([text.greedy for text in texts]),
            "held_out": torch.tensor([text.held_out for text in texts]),
        }
        if rows:
            content["rows"] = torch.cat(rows)
        weighed = [(text.likely, text.logs) for text in texts if text.likely is not None and text.logs is not None]
        if weighed:
            likely, logs = zip(*weighed, strict=True)
            content |= {"likely": torch.cat(likely), "logs": torch.cat(logs)}
        with whole_file(self._path(number)) as file:
            file.write(save(content))

    def read(self) -> list[GeneratedText]:
        """All texts of all batches."""
        texts: list[GeneratedText] = []
        for number in range(self.count()):
            try:
                content = load_file(self._path(number))
            except (OSError, SafetensorError) as error:
                raise SpecgenError(f"cannot read {self._path(number)}", "Delete it: it is generated anew") from error
            lengths = content["lengths"].tolist()
            ids, best = _split(content["ids"].long(), lengths), _split(content["best"].long(), lengths)
            kept = content["kept"].tolist()
            with_rows = [length for length, has in zip(lengths, kept, strict=True) if has]
            rows = iter(_split(content["rows"], with_rows) if with_rows else ())
            weighed = [_split(content[name], lengths) for name in ("likely", "logs") if name in content]
            for position, length in enumerate(content["prompts"].tolist()):
                own = next(rows) if kept[position] else None
                flags = bool(content["greedy"][position]), bool(content["held_out"][position])
                texts.append(
                    GeneratedText(ids[position], best[position], own, length, *flags, *(part[position] for part in weighed))
                )
        return texts

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:04d}.safetensors"


def _split(tensor: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = tensor.split(lengths)  # type: ignore[no-untyped-call]
    return parts


def write_batch(
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    longest: int,
    *,
    greedy: bool,
    seed: int,
    held_out: Sequence[bool],
    keep_rows: bool,
    keep_likely: bool = False,
    watch: TrainingWatch = NEVER_STOPPED,
) -> list[GeneratedText]:
    """Let the target go on from each prompt, up to `longest` tokens together with it. Some texts are `held_out` of training."""
    texts = continuations(target, prompts, longest, greedy=greedy, seed=seed, watch=watch)
    made = []
    for prompt, text, apart in zip(prompts, texts, held_out, strict=True):
        ids = torch.tensor(text)
        if keep_likely:
            made.append(_with_likely(target, ids, len(prompt), greedy=greedy, held_out=apart))
        else:
            best, rows = judged(target.model, ids)
            own = rows.to("cpu", torch.bfloat16) if keep_rows else None
            made.append(GeneratedText(ids, best.cpu(), own, len(prompt), greedy, apart))
        watch.check()
    return made


def read_batch(target: LoadedModel, texts: Sequence[Sequence[int]], watch: TrainingWatch = NEVER_STOPPED) -> list[GeneratedText]:
    """Texts of somebody else's with what the target would have said behind each token; the first one at least, where the `watch`
    is late. A pass over a whole text is many times faster than writing one."""
    made, tokens = [], 0
    for text in texts:
        made.append(_with_likely(target, torch.tensor(text), len(text), greedy=False, held_out=False))
        tokens += len(text)
        watch.grown(len(made) / len(texts), tokens)
        watch.check()
        if watch.is_late():
            break
    return made


def _with_likely(target: LoadedModel, ids: torch.Tensor, prompt: int, *, greedy: bool, held_out: bool) -> GeneratedText:
    likely, logs = weighed(target.model, ids)
    return GeneratedText(ids, likely[:, 0].long(), None, prompt, greedy, held_out, likely, logs)


@inference
def judged(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's likeliest token behind each of `ids` [n], and its hidden rows [n, width] behind its norm, on its device."""
    hidden = decoder_of(model)(input_ids=ids[None].to(model.device), use_cache=False).last_hidden_state
    return model.lm_head(hidden)[0].argmax(dim=-1), hidden[0]  # a cap on logits changes no order


@inference
def weighed(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's LIKELY likeliest tokens behind each of `ids` [n], the likeliest first, and the logarithms of their
    probabilities, each [n, LIKELY], on the CPU."""
    logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    top = logits.topk(min(LIKELY, logits.shape[-1]), dim=-1)
    totals = torch.cat([piece.float().logsumexp(dim=-1) for piece in logits.split(_PIECE)])
    return top.indices.int().cpu(), (top.values.float() - totals[:, None]).cpu()


@inference
def continuations(
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    longest: int,
    *,
    greedy: bool,
    seed: int = 0,
    watch: TrainingWatch = NEVER_STOPPED,
) -> list[list[int]]:
    """Each prompt and what the target says behind it, up to `longest` tokens together or an end-of-sequence, all side by side.

    Greedy, or drawn at temperature 1. Prompts of one length are fastest: shorter ones are padded on their left. A batch gives
    several times the tokens a second that any way of decoding one text after the other does. Where the `watch` is late they end
    as they are.
    """
    batch = _Batch(target, prompts, longest, seed)
    begun = batch.slots
    while batch.growing and batch.slots < longest:
        batch.grow(greedy)
        watch.grown((batch.slots - begun) / (longest - begun), sum(map(len, batch.texts)))
        watch.check()
        if watch.is_late():
            break
    return batch.texts


class _Batch:
    """Texts that grow by a token at a time, their keys and values in one cache."""

    def __init__(self, target: LoadedModel, prompts: Sequence[Sequence[int]], longest: int, seed: int) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self._model, self._eos = target.model, target.eos_ids
        self._masks = Masks(target.model)
        self._generator = torch.Generator(target.device).manual_seed(seed)
        width = max(map(len, prompts))
        pads = torch.tensor([width - len(prompt) for prompt in prompts], device=target.device)
        self._fresh = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=target.device)
        self._visible = torch.arange(width, device=target.device) >= pads[:, None]
        self._positions = (torch.arange(width, device=target.device) - pads[:, None]).clamp_min(0)
        self._cache = KVCache(len(decoder_of(target.model).layers))
        self._cache.capacity = longest
        self.growing = list(range(len(prompts)))
        self.slots = width

    def grow(self, greedy: bool) -> None:
        """One pass over what is new, one token for each text that grows."""
        fresh, past = self._fresh.shape[1], self._cache.length
        rows = self._positions[:, past:]
        order = torch.arange(past + fresh, device=rows.device)
        visible = self._visible[:, None, :] & (order[past:, None] >= order)
        mask = self._masks.batched(visible, rows, self._positions, self._model.dtype)
        output = self._model(
            input_ids=self._fresh,
            attention_mask=mask,
            position_ids=rows,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache.length = past + fresh
        logits = output.logits[:, -1].float()
        if logits.isnan().any():
            raise RunError("the target's logits hold NaN", "Its weights are damaged, or the dtype is too narrow")
        self._append(logits.argmax(dim=-1) if greedy else self._drawn(logits))

    def _drawn(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(dim=-1).multinomial(1, generator=self._generator)[:, 0]

    def _append(self, chosen: torch.Tensor) -> None:
        kept = []
        for position, token in enumerate(chosen.tolist()):
            text = self.growing[position]
            if text < 0:
                continue
            self.texts[text].append(token)
            if token in self._eos:
                self.growing[position] = -1
            else:
                kept.append(position)
        self._fresh = chosen[:, None]
        self.slots += 1
        self._positions = torch.cat((self._positions, self._positions[:, -1:] + 1), dim=1)
        self._visible = torch.cat((self._visible, torch.ones_like(self._visible[:, :1])), dim=1)
        if not kept:
            self.growing = []
        elif len(kept) < _WORTH_SHRINKING * len(self.growing):
            self._shrink(kept)

    def _shrink(self, kept: list[int]) -> None:
        """Go on with some of the texts alone."""
        index = torch.tensor(kept, device=self._fresh.device)
        self.growing = [self.growing[position] for position in kept]
        self._fresh, self._positions, self._visible = self._fresh[index], self._positions[index], self._visible[index]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]


def beginnings(texts: Texts, count: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of one length, drawn from open text: its documents' first tokens, 4 to a quarter of `longest`.

    Each HELD_OUTth, the first one among them, is of documents that are kept apart, as far as these are long enough.
    """
    from random import Random

    rng = Random(f"beginnings {seed}")
    size = rng.randint(4, max(4, longest // 4))
    found: list[list[int]] = []
    misses = 0
    while len(found) < count and misses < 20 * count:
        apart = len(found) % HELD_OUT == 0 if misses < 10 * count else None
        ids = texts.draw(rng, size, beginning=rng.random() < 0.8, apart=apart)
        if len(ids) == size:
            found.append(ids)
        else:
            misses += 1
    return found or [texts.draw(rng, size)]
