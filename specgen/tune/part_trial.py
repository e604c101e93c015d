"""Measures a trained drafter on prompts that it was not trained on, beside plain decoding and the
methods that need no training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from specgen.base.errors import SpecgenError
from specgen.base.part_verdict import PLAIN, PartVerdict
from specgen.base.types import Round, SamplingParams
from specgen.pair.pair import Pair
from specgen.tune.outcome import Deadline

NEW_TOKENS = 48  # of each run
UNTRAINED = ("suffix", "lookup")  # methods that need no drafter at all
_WARM_UP_TOKENS = 8
_FEWEST = 2  # prompts that are run even if the time is short,
_FEWEST_TOKENS = 16  # with so many new tokens
_CONTENDERS = 5
_PROMPTS_FACTOR = 1.5  # of the tokens' seconds, with the passes over prompts


class Contender(NamedTuple):
    """A method, and the pair of models with which it decodes."""

    pair: Pair
    method: str


def contenders(pair: Pair, method: str, before: Pair | None = None) -> dict[str, Contender]:
    """Returns what a drafter that was trained for `method` is measured against, by name: itself,
    plain decoding and the methods that need no training.

    Another draft model is among them: that of the `pair`, or where it is what was trained, that of
    the pair `before` the training.
    """
    named = {PLAIN: Contender(pair, PLAIN), method: Contender(pair, method)}
    named |= {name: Contender(pair, name) for name in UNTRAINED}
    if before is not None:
        named["sd before"] = Contender(before, "sd")
    elif method != "sd" and pair.draft is not None and pair.draft.refusal is None:
        named["sd"] = Contender(pair, "sd")
    return named


def trial_seconds(one: float) -> float:
    """Estimates the least time that a verdict takes, where a token of plain decoding takes `one`
    seconds."""
    tokens = _WARM_UP_TOKENS + _FEWEST * _FEWEST_TOKENS
    return _PROMPTS_FACTOR * _CONTENDERS * tokens * one


def verdict(
    named: Mapping[str, Contender],
    method: str,
    prompts: Sequence[Sequence[int]],
    deadline: Deadline,
    announce: Callable[[str], None],
) -> PartVerdict | None:
    """Runs all contenders on the prompts (token ids) in turn, until the deadline, and returns what
    follows for the drafter that was trained for `method`. Where there is little time, by the speed
    of plain decoding in a first run, they generate fewer tokens.

    None if that or plain decoding could not run. Others that cannot run are left out.
    """
    tokens = dict.fromkeys(named, 0)
    seconds = dict.fromkeys(named, 0.0)
    failed = set[str]()
    one = 0.0  # seconds of a token of plain decoding, with its share of the prompt's pass
    for name, contender in named.items():
        announce(f"measuring {name}")
        with suppress(SpecgenError):
            begin = deadline.clock()
            rounds = list(islice(_rounds(contender, prompts[0], NEW_TOKENS), _WARM_UP_TOKENS))
            if name == PLAIN:
                one = (deadline.clock() - begin) / max(1, len(rounds))
            continue
        failed.add(name)
    if {PLAIN, method} & failed:
        return None

    affordable = deadline.left / (_FEWEST * (len(named) - len(failed)) * max(one, 1e-9))
    new_tokens = round(min(NEW_TOKENS, max(_FEWEST_TOKENS, affordable)))

    count = 0
    for count, prompt in enumerate(prompts, start=1):
        for name in [name for name in named if name not in failed]:
            announce(f"measuring {name}, prompt {count}")
            _, *rounds = _rounds(named[name], prompt, new_tokens)  # the first one is the prompt's
            tokens[name] += sum(len(round_.token_ids) for round_ in rounds)
            seconds[name] += sum(sum(round_.seconds.values()) for round_ in rounds)
        if count >= _FEWEST and deadline.left <= 0:
            break
    speeds = {name: tokens[name] / seconds[name] for name in named if seconds[name]}
    if not {PLAIN, method} <= speeds.keys():
        return None
    device = named[method].pair.target.device.type
    return PartVerdict.of(speeds, method, device, prompts=count, tokens=tokens[method])


def _rounds(contender: Contender, prompt: Sequence[int], new_tokens: int) -> Iterator[Round]:
    """Decodes from an empty cache, without what earlier runs have learned."""
    pair = contender.pair
    pair.forget()
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return pair.rounds(prompt, contender.method, sampling)
