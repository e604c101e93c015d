"""Chooses the method for what was found to draft for a target, by a short trial. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.measuring import Sample, spread
from specgen.base.part_kinds import HEADS, MTP
from specgen.base.types import SamplingParams
from specgen.engine.weights import weights_fingerprint
from specgen.methods.base import DRAFT_MODEL
from specgen.models.measurements import LONGEST_COMPARED, pass_times
from specgen.pair.finding import LEAST_GAIN, hint
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.pair.finding import Found
    from specgen.pair.pair import Pair

TRIAL_ROUNDS = 8
_WARM_UP_ROUNDS = 2  # of these, not counted


def choose_found(
    pair: Pair, text: str, sampling: SamplingParams, err: Console, *, quiet: bool
) -> str:
    """Returns the method that is the fastest in a short trial with what was found to draft for the
    target, and says so in a line.

    Sampled text depends on the method. With a seed it must not depend on times: then the method is
    the one that is expected to be the fastest, by sizes and by counts of tokens.
    """
    heads = dict.fromkeys(
        found.kind for found in pair.found if found.kind in HEADS and found.kind != MTP
    )
    speeds = {methods.DEFAULT_METHOD: 0.0}
    if heads and not sampling.greedy and sampling.seed is not None:
        drafters = [found for found in pair.found if found.kind != MTP]
        best = max(drafters, key=lambda found: found.speedup)
        if best.kind != DRAFT_MODEL:
            speeds = {best.kind: 0.0}
    elif heads:
        with Progress(err, quiet=quiet) as line:
            speeds = _speeds(pair, text or "1.", [methods.DEFAULT_METHOD, *heads], line.announce)
    fastest = next(iter(speeds))
    if not quiet:
        _show_found(pair, fastest, speeds, err)
    return fastest


def _show_found(pair: Pair, method: str, speeds: Mapping[str, float], err: Console) -> None:
    """Prints what was found and drafts for the method, with the tokens per second of the trial
    (`speeds`, by method; 0: not measured), and the draft models that were rejected. If nothing was
    found, prints what is published for the target."""
    rejected = []
    for found in pair.found:
        is_measured = found.kind == DRAFT_MODEL and not found.is_assumed
        if is_measured and found.speedup < LEAST_GAIN:
            rejected.append(found)
            line = f"found {found.name}: {found.why}; too few, so it is not used"
            err.print(Text(line, "quiet"), soft_wrap=True)

    used = next((found for found in pair.found if found.kind == method), None)
    used = used or _drafts_by_default(pair)
    if used is not None:
        rates = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items() if speed)
        tried = f" ({rates} tokens/s in a short trial)" if rates else ""
        line = f"found {used.name}: {used.why}{tried}; -d none drafts without it"
        err.print(Text(line, "quiet"), soft_wrap=True)
        return
    published = hint(pair.target.name)
    if not rejected and published is not None:
        err.print(Text(published, "quiet"), soft_wrap=True)


def _drafts_by_default(pair: Pair) -> Found | None:
    """Returns what the default method drafts with, of what was found: the draft model, else the
    target's own layers."""
    if pair.draft is not None:
        return next((found for found in pair.found if found.folder == pair.draft.folder), None)
    return next((found for found in pair.found if found.kind == MTP), None)


def _speeds(
    pair: Pair, text: str, names: Sequence[str], announce: Callable[[str], None]
) -> dict[str, float]:
    """Returns the tokens per second of the methods `names` in a short trial after the text, fastest
    first, without those that cannot run.

    Measured once for these models and what was found for them, and again if later runs have other
    times.
    """

    def measure() -> Sample[dict[str, Any]]:
        return _trial(pair, text, names, announce)

    def read(stored: Mapping[str, Any]) -> tuple[dict[str, float], dict[int, float]]:
        return dict(stored["speeds"]), pass_times(stored["passes"])

    key = tuple(f"{found.kind} {found.folder} {_weights(found.folder)}" for found in pair.found)
    speeds, passes = pair.measurements.get("drafters", key, measure, read)
    pair.measurements.watch("drafters", key, passes)
    if not speeds:
        return {methods.DEFAULT_METHOD: 0.0}
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))


def _trial(
    pair: Pair, text: str, names: Sequence[str], announce: Callable[[str], None]
) -> Sample[dict[str, Any]]:
    """Runs a few rounds of each method. The sample has `speeds`, the tokens per second by method,
    and `passes`, the shortest seconds of a target pass by its number of tokens."""
    sampling = SamplingParams(max_new_tokens=128, ignore_eos=True)
    speeds = {}
    passes: dict[int, float] = {}
    scatter = 1.0
    for name in names:
        announce(f"trying {name}")
        with suppress(SpecgenError):
            request = pair.request(text, name, sampling)
            rounds = list(islice(pair.run(request).rounds(), TRIAL_ROUNDS))[_WARM_UP_ROUNDS:]
            seconds = sum(sum(round_.seconds.values()) for round_ in rounds)
            tokens = sum(len(round_.token_ids) for round_ in rounds)
            speeds[name] = tokens / seconds if seconds else 0.0
            scatter = max(scatter, spread([round_.seconds["verify"] for round_ in rounds]))
            if len(request.prompt_ids) >= LONGEST_COMPARED:
                continue
            for round_ in rounds:
                width = round_.pass_tokens
                passes[width] = min(round_.seconds["verify"], passes.get(width, math.inf))
    return Sample({"speeds": speeds, "passes": passes}, TRIAL_ROUNDS - _WARM_UP_ROUNDS, scatter)


def _weights(folder: Path) -> str:
    """Returns a fingerprint of the weights in the folder; "" where they cannot be read."""
    with suppress(SpecgenError):
        return weights_fingerprint(folder)
    return ""
