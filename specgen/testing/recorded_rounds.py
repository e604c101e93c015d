"""Records what a method drafts and accepts in each round, and compares with a recording."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.base.files import write_whole
from specgen.base.types import SamplingParams
from specgen.methods.base import Method
from specgen.pair.loading import load
from specgen.pair.pair import Pair
from specgen.pair.records import round_line
from specgen.testing.greedy import PROMPTS
from specgen.testing.scripted_models import named_method

TOLERANCE = 1e-3  # of the sums, relative to the larger of 1 and the sum
TOKENS = 32
_NUMBER = re.compile(r"(\d+\.\d+)")
_STOP_REASON = "[6]"  # its place in a round


def record_rounds(
    method: str | type[Method],
    path: str | Path,
    pair: Pair | None = None,
    prompts: Sequence[str] = PROMPTS,
    **settings: object,
) -> None:
    """Writes what the method does in each round to a JSON file, for `check_rounds`: after each
    prompt, greedy and at temperature 1 with a seed, with `pair` (None: the bundled pair).

    No clock may decide: give as settings what would be measured, such as `draft_cost` and
    `verify_cost`, or PEARL's `window`.
    """
    recorded = _recorded(method, pair, prompts, settings)
    write_whole(Path(path), json.dumps(recorded, indent=1))


def check_rounds(
    method: str | type[Method],
    path: str | Path,
    pair: Pair | None = None,
    prompts: Sequence[str] = PROMPTS,
    **settings: object,
) -> None:
    """Checks that the method does in each round what `record_rounds` recorded, with the same
    arguments. Raises AssertionError with the first difference, and SpecgenError if the file cannot
    be read."""
    try:
        recorded = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecgenError(
            f"the recording {path} cannot be read: {error}",
            "Make it with specgen.testing.record_rounds",
        ) from error
    first = difference(recorded, _recorded(method, pair, prompts, settings))
    if first is not None:
        raise AssertionError(first)


def _recorded(
    method: str | type[Method],
    pair: Pair | None,
    prompts: Sequence[str],
    settings: dict[str, object],
) -> dict[str, list[Any]]:
    if pair is None:
        with load(device="cpu", dtype="float32") as bundled:
            return _recorded(method, bundled, prompts, settings)
    chosen, given = named_method(method, settings)
    recorded = {}
    for prompt in prompts:
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=0)
            rounds = pair.generate(prompt, type(chosen), sampling, **given).rounds
            recorded[f"{prompt!r} t={temperature:g}"] = [
                figures_of(round_line(round_, pair.tokenizer.text_of)) for round_ in rounds
            ]
    return recorded


def figures_of(line: dict[str, Any]) -> list[Any]:
    """Returns what is recorded of a round, given as in a trace: mode, draft_ids, parents (None for
    a chain), accepted_ids, token_id, source, stop_reason, then the sums of entropies, of top_probs
    and of predicted, and of overlap and kl where recorded."""
    parents = line["parents"]
    if all(after - before == 1 for before, after in pairwise([-2, *parents])):
        parents = None
    signals = [
        line[name]
        for name in ("entropies", "top_probs", "predicted", "overlap", "kl")
        if name in line
    ]
    sums = [round(sum(value for value in values if value is not None), 4) for values in signals]
    fields = [line[name] for name in ("accepted_ids", "token_id", "source", "stop_reason")]
    return [line["mode"], line["draft_ids"], parents, *fields, sums]


def difference(old: Any, new: Any, where: str = "") -> str | None:
    """Returns the first place where two recordings differ; None if they agree. Numbers with a
    fraction, those in texts included, may differ a little."""
    if isinstance(old, float) and isinstance(new, int | float):
        is_near = math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return None if is_near else f"{where}: {old} → {new}"
    if isinstance(old, str) and isinstance(new, str) and where.endswith(_STOP_REASON):
        return None if _have_near_numbers(old, new) else f"{where}: {old} → {new}"
    if isinstance(old, dict) and isinstance(new, dict) and list(old) == list(new):
        parts = [(f"{where} {key}".strip(), old[key], new[key]) for key in old]
    elif isinstance(old, list) and isinstance(new, list):
        parts = [
            (f"{where}[{index}]", *values)
            for index, values in enumerate(zip(old, new, strict=False))
        ]
        parts.append((f"{where} has other entries", len(old), len(new)))
    else:
        return None if old == new else f"{where}: {old} → {new}"
    for name, before, after in parts:
        first = difference(before, after, name)
        if first is not None:
            return first
    return None


def _have_near_numbers(old: str, new: str) -> bool:
    """Whether two texts are equal but for the last digits of numbers, rounded otherwise."""
    before = _NUMBER.split(old)
    after = _NUMBER.split(new)
    if before[::2] != after[::2]:
        return False
    for first, second in zip(before[1::2], after[1::2], strict=True):
        digits = len(first) - first.index(".") - 1
        if abs(float(first) - float(second)) >= 1.5 * 10.0**-digits:
            return False
    return True
