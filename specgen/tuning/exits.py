"""From a target to a trained exit on disk: the target writes text, is cut down to its first layers, the exit is trained.

What is not finished lies in `training/` in the output folder, and goes once the exit is saved.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specgen.bench.trace import versions
from specgen.errors import SpecgenError
from specgen.models.exit_files import Description, save_exit, write_text
from specgen.models.exit_layer import ExitLayer, check_split, decoder_of
from specgen.models.fingerprint import weights_fingerprint
from specgen.models.first_layers import FirstLayers, check_depth, usual_depth
from specgen.tuning.predictor import Fit, train_predictor
from specgen.tuning.selftext import HELD_OUT, SelfTexts, beginnings, write_batch
from specgen.tuning.texts import Texts
from specgen.tuning.training import Data, Progress, Recipe, Training, agreement, check_same_run

if TYPE_CHECKING:
    from specgen.models.load import LoadedModel

TEXTS_AT_ONCE = 64
_WRITING, _ENDING = 0.3, 0.05  # of a budget in minutes: for the target's own text, and for the predictor and what else is left
_EPOCHS = 10  # how often a text of the target's own is seen, with a budget in steps: writing a token costs several steps' worth
_KEPT_TOKENS = 40_000  # whose hidden rows are kept for the predictor,
_KEPT_BYTES = 1 << 27  # unless they are as wide as this


@dataclass(frozen=True, slots=True)
class Job:
    """What to train and with what. `after` is N, None for the usual depth. `prompts` are ids that the target goes on from;
    without them they are beginnings of the open text. `note` is how the run was asked for."""

    out: Path
    recipe: Recipe
    after: int | None = None
    layers: int = 1
    own_head: bool = True
    open_text: Texts | None = None
    prompts: Sequence[Sequence[int]] = ()
    note: str = ""


class Watcher(Protocol):
    """Who wants to know how it goes, and may stop it."""

    def announce(self, what: str) -> None: ...

    def writing(self, batches: int, share: float, tokens: int) -> None: ...

    def training(self, progress: Progress) -> None: ...

    def stopping(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """`agreement` with the target on its own greedy text that was kept apart, and `fit` of the predictor, None without one."""

    path: Path
    description: Description
    progress: Progress
    agreement: float | None
    fit: Fit | None
    parameters_held: int


def train_exit(target: LoadedModel, job: Job, watcher: Watcher) -> Outcome:
    """Train and save. The target is taken apart on the way, and can't be used afterwards.

    Raises Stopped where the watcher stops it (the same call goes on later), SpecgenError for what does not fit.
    """
    check_split(target.model)
    after = usual_depth(len(decoder_of(target.model).layers)) if job.after is None else job.after
    check_depth(target.model, after)
    folder = job.out / "training"
    settings = _settings(target, job, after)
    texts, writing_seconds = _written(target, job, settings, folder, watcher)
    layer = ExitLayer.of(target.model, job.layers)
    first = FirstLayers(target.model, after)
    recipe = job.recipe
    if recipe.seconds is not None:
        recipe = replace(recipe, seconds=max(1.0, recipe.seconds * (1 - _ENDING) - writing_seconds))
    training = Training(first, layer, Data(job.open_text, texts, recipe), recipe, own_head=job.own_head)
    state = folder / "state.safetensors"
    if state.exists():
        training.restore(state, settings)
        watcher.announce(f"going on from step {training.step}")
    training.run(state, settings, watcher.training, watcher.stopping)
    layer.requires_grad_(False).eval()
    watcher.announce("training the predictor")
    apart = [text for text in texts if text.held_out]
    agreements = {"greedy": agreement(first, layer, [t for t in apart if t.greedy])}
    agreements["sampled"] = agreement(first, layer, [t for t in apart if not t.greedy])
    fitted = train_predictor(first, layer, texts, job.recipe.seed)
    predictor, fit = fitted if fitted is not None else (None, None)
    progress = training.progress()
    description = Description(
        target=target.name,
        fingerprint=settings["fingerprint"],
        after=after,
        layers=job.layers,
        own_head=job.own_head,
        predictor=predictor is not None,
        figures=_figures(progress, agreements, fit, writing_seconds),
        made_with={**({"command": job.note} if job.note else {}), **asdict(job.recipe), **versions()},
    )
    path = save_exit(job.out, layer, predictor, description)
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(path, description, progress, agreements["greedy"], fit, training.parameters_held)


def _settings(target: LoadedModel, job: Job, after: int) -> dict[str, Any]:
    """What has to be the same for a run to go on."""
    return {
        **asdict(job.recipe),
        "fingerprint": weights_fingerprint(target.folder),
        "dtype": target.dtype_name,
        "after": after,
        "layers": job.layers,
        "own_head": job.own_head,
        "corpus": None if job.open_text is None else job.open_text.digest(),
        "prompts": None if not job.prompts else Texts(job.prompts).digest(),
    }


def _written(target: LoadedModel, job: Job, settings: dict[str, Any], folder: Path, watcher: Watcher) -> tuple[list[Any], float]:
    """The target's own text, what is missing of it generated; and the seconds that this took, earlier runs included."""
    kept, log = SelfTexts(folder), folder / "writing.json"
    seconds = _begun(log, settings)
    _log(log, settings, seconds)
    if not job.recipe.self_text:
        return [], seconds
    window = min(job.recipe.window, target.context_limit)
    planned = _batches(job.recipe) if job.recipe.steps is not None else None
    limit = math.inf if job.recipe.seconds is None else job.recipe.seconds * _WRITING
    most_kept = min(_KEPT_TOKENS, _KEPT_BYTES // (2 * target.model.config.get_text_config().hidden_size))
    texts = kept.read()
    tokens = sum(len(text.ids) for text in texts)
    with_rows = sum(len(text.ids) for text in texts if text.rows is not None)
    number = kept.count()
    # Two at the least, a greedy one and a sampled one, and with a budget in minutes as many as it takes.
    while number < 2 or (number < planned if planned is not None else seconds < limit):
        start = time.monotonic()
        prompts, apart, greedy = _prompts(job, number, window)
        made = write_batch(
            target,
            prompts,
            window,
            greedy=greedy,
            seed=_seed(job.recipe.seed, number),
            held_out=apart,
            keep_rows=with_rows < most_kept,
            stopping=watcher.stopping,
        )
        kept.keep(number, made)
        seconds += time.monotonic() - start
        _log(log, settings, seconds)
        number += 1
        tokens += sum(len(text.ids) for text in made)
        with_rows += sum(len(text.ids) for text in made if text.rows is not None)
        watcher.writing(number, min(1.0, number / planned if planned is not None else seconds / limit), tokens)
    return kept.read(), seconds


def _log(log: Path, settings: dict[str, Any], seconds: float) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    write_text(log, json.dumps({"settings": settings, "seconds": seconds}))


def _begun(log: Path, settings: dict[str, Any]) -> float:
    """The seconds that an earlier run spent on text, 0 where there was none."""
    if not log.exists():
        return 0.0
    try:
        found = json.loads(log.read_text(encoding="utf-8"))
        before, seconds = dict(found["settings"]), float(found["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecgenError(f"cannot read {log}", f"Delete {log.parent} to begin anew") from error
    check_same_run(log, before, settings)
    return seconds


def _batches(recipe: Recipe) -> int:
    """How many batches of own text a number of steps asks for: an even one, for greedy and sampled ones take turns."""
    tokens = (recipe.steps or 0) * recipe.batch * recipe.window * recipe.self_text / _EPOCHS
    return max(2, 2 * round(tokens / (2 * TEXTS_AT_ONCE * recipe.window)))


def _prompts(job: Job, number: int, window: int) -> tuple[list[list[int]], list[bool], bool]:
    """A batch's prompts, which of them are kept apart, and whether it is greedy.

    A greedy batch and a sampled one take turns. The user's prompts come round again, but greedy text only once: it would be
    the same.
    """
    greedy = number % 2 == 0
    if not job.prompts:
        assert job.open_text is not None
        found = beginnings(job.open_text, TEXTS_AT_ONCE, window, _seed(job.recipe.seed, number))
        return found, [place % HELD_OUT == 0 for place in range(len(found))], greedy
    longest = max(1, 3 * window // 4)  # of a longer prompt, its end
    count, start = len(job.prompts), number // 2 * TEXTS_AT_ONCE
    greedy = greedy and start < count
    places = range(start, min(count, start + TEXTS_AT_ONCE)) if greedy else range(start, start + TEXTS_AT_ONCE)
    found = [list(job.prompts[place % count])[-longest:] for place in places]
    # Where there are many, what is kept apart are prompts, and all the texts behind them.
    return found, [(place % count if count >= HELD_OUT else place) % HELD_OUT == 0 for place in places], greedy


def _seed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number


def _figures(progress: Progress, agreements: dict[str, float | None], fit: Fit | None, writing_seconds: float) -> dict[str, Any]:
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "loss": progress.loss,
        "minutes": {"writing": writing_seconds / 60, "training": progress.seconds / 60},
        "agreement_on_own_text": agreements,
        **({} if fit is None else {"predictor": asdict(fit)}),
    }


def default_recipe(device: torch.device, context_limit: int) -> Recipe:
    """The paper's batch where there is an accelerator. On a processor such a step would take minutes: many small ones do more."""
    if device.type == "cuda":
        return Recipe(window=min(2048, context_limit))
    return Recipe(batch=16, window=min(256, context_limit))
