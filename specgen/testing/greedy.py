"""Whether a method's greedy output is plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specgen import methods
from specgen.base.types import SamplingParams
from specgen.compare.verdict import judge
from specgen.methods.base import Method
from specgen.pair.loading import load
from specgen.pair.pair import Pair
from specgen.testing.scripted_models import TableRunner, ids_of, named_method, scripted_run

PLAIN = "ar"
PROMPTS = (
    "def mean(numbers):",
    "Question: A box holds 6 eggs. How many eggs do 7 boxes hold?\nAnswer:",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n",
)
TABLES = 6  # random models of a few tokens
TABLE_TOKENS = 24


def check_greedy(
    method: str | type[Method],
    pair: Pair | None = None,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = 48,
    **settings: object,
) -> None:
    """Checks that a lossless method's greedy ids are plain decoding's: on random tables, with good
    and bad drafts, and on `prompts` with `pair` (None: the bundled pair).

    Each prompt is decoded twice, the second time with the caches of the first. A difference within
    rounding error (`specgen.compare.verdict`) does not count. Raises AssertionError for another
    one, and SpecgenError if the method cannot run.
    """
    chosen, given = named_method(method, settings)
    if not chosen.lossless:
        raise AssertionError(f"{chosen.name} is lossy: its output may differ from plain decoding's")
    for seed in range(TABLES):
        for draft_seed in (seed, seed + 100):
            _check_on_tables(chosen, given, seed, draft_seed)
    if pair is not None:
        _check_on_pair(chosen, given, pair, prompts, tokens)
        return
    with load(device="cpu", dtype="float32") as bundled:
        _check_on_pair(chosen, given, bundled, prompts, tokens)


def _check_on_tables(method: Method, settings: dict[str, Any], seed: int, draft_seed: int) -> None:
    sampling = SamplingParams(max_new_tokens=TABLE_TOKENS)
    target = TableRunner(seed)
    draft = TableRunner(draft_seed)
    plain = ids_of(scripted_run(methods.find(PLAIN), {}, target, None, sampling).rounds())
    ids = ids_of(scripted_run(method, settings, target, draft, sampling).rounds())
    if ids != plain:
        where = f"on the table {seed}, drafted by the table {draft_seed}"
        raise AssertionError(f"{method.name} {where}: {ids}, and plain decoding {plain}")


def _check_on_pair(
    method: Method, settings: dict[str, Any], pair: Pair, prompts: Sequence[str], tokens: int
) -> None:
    sampling = SamplingParams(max_new_tokens=tokens)
    for number, prompt in enumerate(prompts):
        plain = pair.generate(prompt, PLAIN, sampling).token_ids
        request = pair.request(prompt, type(method), sampling, **settings)
        for repeat in range(2):
            ids = ids_of(pair.run(request).rounds())
            difference = judge(pair, number, repeat, request.prompt_ids, plain, ids)
            if difference is not None and difference.is_broken:
                raise AssertionError(difference.explanation(method.name, repr(prompt)))
