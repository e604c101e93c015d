"""Real runs of a tuning: methods decode the prompts in turn with plain decoding, for as long as
there is time.

How many tokens a run generates depends on how fast plain decoding is here: on a slow machine runs
are shorter than asked for, so that some can be finished.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from specgen.base.errors import SpecgenError
from specgen.compare.method_specs import REFERENCE, parse_spec
from specgen.compare.results import RESAMPLES, BenchmarkConfig, Results, Run, speedup_interval
from specgen.compare.runner import Runner
from specgen.tune.outcome import PLAIN, Candidate
from specgen.tune.round_timing import ReferenceOutput, record_reference

if TYPE_CHECKING:
    from specgen.compare.prompts import ListedPrompt
    from specgen.pair.pair import Pair
    from specgen.tune.outcome import Deadline, TuningObserver, TuningRequest

PROBE_TOKENS = 4  # new tokens of the first run, which tells how fast plain decoding is
WARM_UP_TOKENS = 4  # new tokens of the run of each method that is not counted
# prompts for which each method's runs are planned
USUAL_PROMPTS = 3
FEWEST_PROMPTS = 2
FEWEST_TOKENS = 16  # new tokens of a run in which a method can show what it gains
LEAST_TOKENS = 4  # where there is not even time for that
# the share of the time left that is planned for the shortest runs: the default may be much slower
# than plain decoding
RESERVE = 0.7
MARGIN = 1.2  # runs may take this many times the expected seconds
MOST_REPEATS = 50  # of one prompt


class PlainSpeed(NamedTuple):
    """The seconds that plain decoding takes for the pass over a prompt, and for each token after
    the first one."""

    prefill_seconds: float
    token_seconds: float

    def seconds(self, tokens: int) -> float:
        return self.prefill_seconds + tokens * self.token_seconds


class Plan(NamedTuple):
    """How many methods, plain decoding included, are run on each prompt, and how many tokens each
    run generates."""

    methods: int
    tokens: int


def plan(speed: PlainSpeed, share: float, left: float, methods: int, tokens: int) -> Plan | None:
    """Returns how many of `methods` are run, and with how many of the new `tokens` asked for, in
    `share` of the seconds that are `left`.

    Methods are left out before runs get shorter than `FEWEST_TOKENS`. Where `share` is not enough
    for plain decoding and one other method, all of `left` is taken. Returns None if even that is
    too short for one short run of each of the two.
    """
    warm_up = speed.seconds(WARM_UP_TOKENS)
    for count in range(methods, 1, -1):
        for prompts in (USUAL_PROMPTS, FEWEST_PROMPTS):
            fitting = _fitting(speed, share - count * warm_up, count * prompts)
            if fitting >= min(FEWEST_TOKENS, tokens):
                return Plan(count, min(fitting, tokens))
    fitting = _fitting(speed, RESERVE * left - 2 * warm_up, 2)
    if fitting < min(LEAST_TOKENS, tokens):
        return None
    return Plan(2, min(fitting, FEWEST_TOKENS, tokens))


def _fitting(speed: PlainSpeed, seconds: float, runs: int) -> int:
    """Returns the number of new tokens with which so many runs take so many seconds."""
    tokens = (seconds / (MARGIN * runs) - speed.prefill_seconds) / speed.token_seconds
    return max(0, int(min(tokens, 1 << 20)))


def probe(pair: Pair, request: TuningRequest) -> PlainSpeed:
    """Returns how fast plain decoding is: decodes a few tokens after the first prompt.

    Does so twice where this takes little time, because the first run also does what is done once.
    """
    sampling = replace(request.sampling, max_new_tokens=PROBE_TOKENS, ignore_eos=True, stop=())
    config = BenchmarkConfig([], request.prompts, 1, sampling, request.chat)
    ids = Runner(pair, config).prompt_ids(request.prompts[0])
    output = record_reference(pair, ids, sampling)
    if output.seconds < 0.01 * request.deadline.left:
        output = record_reference(pair, ids, sampling)
    further = max(1, len(output.token_ids) - 1)
    token_seconds = max((output.seconds - output.prefill_seconds) / further, 1e-9)
    return PlainSpeed(output.prefill_seconds, token_seconds)


class RealRuns:
    """Runs methods with one pair; each run has as many new tokens as the request says.

    `failures` has the error of each method that could not run, by the method with its settings as
    the user writes them (`Candidate.written`).
    """

    def __init__(
        self, pair: Pair, request: TuningRequest, observer: TuningObserver, speed: PlainSpeed
    ) -> None:
        self.pair = pair
        self.request = request
        self._observer = observer
        self.failures: dict[str, SpecgenError] = {}
        self.run_seconds = MARGIN * speed.seconds(request.sampling.max_new_tokens)
        self._parts: list[Results] = []

    @property
    def count(self) -> int:
        """The number of runs so far."""
        return sum(len(results.runs) for results in self._parts)

    def run(
        self,
        candidates: Iterable[Candidate],
        prompts: Sequence[ListedPrompt],
        deadline: Deadline,
        repeats: int = 1,
    ) -> None:
        """Runs plain decoding and the candidates on each prompt in turn, until the time is too
        short for another prompt.

        Raises SpecgenError, with the prompt's name, if plain decoding fails.
        """
        written = [candidate.written for candidate in candidates if candidate.name != PLAIN]
        specs = [parse_spec(text) for text in dict.fromkeys([REFERENCE, *written])]
        request = self.request
        config = BenchmarkConfig(specs, prompts, repeats, request.sampling, request.chat)
        runner = Runner(self.pair, config)
        runner.warm_up_tokens = WARM_UP_TOKENS
        self._parts.append(runner.results)
        prompt = prompts[0]
        turn_seconds = sum(self._expected_seconds(spec.written) for spec in specs)
        begin: float | None = None
        try:
            for step in runner.steps():
                if step.spec is None or step.prompt is None:
                    break
                if step.spec is specs[0] and not step.warming_up:
                    left = deadline.left
                    if begin is not None:
                        turn_seconds = MARGIN * (begin - left)
                    if left < turn_seconds:
                        break
                    begin = left
                prompt = step.prompt
                self._observer.doing(f"really running {step.spec.written}, {prompt.label}")
        except SpecgenError as error:
            if len(runner.results.failures) < len(specs) - 1:
                raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error
        self.failures |= runner.results.failures

    def _expected_seconds(self, written: str) -> float:
        """Returns the seconds of a run of the method: the longest so far. Half of the planned ones
        for one that has not run: only a much shorter time than was planned keeps it from
        running."""
        seconds = [
            run.seconds
            for results in self._parts
            for key, run in results.runs.items()
            if key[0] == written
        ]
        return max(seconds, default=self.run_seconds / 2)

    def references(self) -> list[ReferenceOutput]:
        """Returns plain decoding's output for each prompt that it ran on."""
        pair = self.pair
        sampling = self.request.sampling
        eos_ids = frozenset[int]() if sampling.ignore_eos else frozenset(pair.target.eos_ids)
        references = dict[int, ReferenceOutput]()  # by prompt index
        for results in self._parts:
            for (written, index, _), run in results.runs.items():
                if written == REFERENCE and index not in references:
                    references[index] = self._reference(results, index, run, eos_ids)
        return list(references.values())

    def _reference(
        self, results: Results, index: int, run: Run, eos_ids: frozenset[int]
    ) -> ReferenceOutput:
        prompt = next(prompt for prompt in results.config.prompts if prompt.index == index)
        ids = Runner(self.pair, results.config).prompt_ids(prompt)
        request = self.pair.request(ids, REFERENCE, results.config.sampling)
        prefill = float(run.line["phase_seconds"]["prefill"])
        return ReferenceOutput(
            ids, list(run.line["token_ids"]), request.limit, eos_ids, prefill, run.seconds
        )

    def prompts(self, candidate: Candidate) -> list[int]:
        """Returns the indices of the prompts on which the candidate has run."""
        return list(self._runs(candidate))

    def measured(self, candidate: Candidate) -> Candidate:
        """Returns the candidate with its measured speed, and its speedup over plain decoding on the
        same prompts; unchanged if it has not run. Of several runs on a prompt the one with the
        median time counts."""
        runs = self._runs(candidate)
        pairs = [(_median(own), _median(plain)) for own, plain in runs.values()]
        tokens = sum(own.tokens for own, _ in pairs)
        seconds = sum(own.seconds for own, _ in pairs)
        if not tokens or not seconds:
            return candidate
        plain_tokens = sum(plain.tokens for _, plain in pairs)
        plain_speed = plain_tokens / sum(plain.seconds for _, plain in pairs)
        candidate = replace(
            candidate,
            measured=tokens / seconds,
            plain=plain_speed,
            prompts=len(pairs),
            tokens=tokens,
        )
        if candidate.name == PLAIN:
            return replace(candidate, speedup=1.0)
        table = [(own.tokens, own.seconds, plain.tokens, plain.seconds) for own, plain in pairs]
        speedup, low, high = speedup_interval(table, RESAMPLES)
        drafts = sum(int(own.line.get("drafts") or 0) for own, _ in pairs)
        drafted = sum(int(own.line.get("drafted") or 0) for own, _ in pairs)
        length = drafted / drafts if drafts else None
        return replace(candidate, speedup=speedup, low=low, high=high, draft_length=length)

    def _runs(self, candidate: Candidate) -> Mapping[int, tuple[list[Run], list[Run]]]:
        """Returns the candidate's runs by prompt index, and plain decoding's in the same turns."""
        by_prompt = defaultdict[int, tuple[list[Run], list[Run]]](lambda: ([], []))
        for results in self._parts:
            for (written, index, repeat), run in results.runs.items():
                plain = results.runs.get((REFERENCE, index, repeat))
                if written == candidate.written and plain is not None:
                    own, beside = by_prompt[index]
                    own.append(run)
                    beside.append(plain)
        return by_prompt


def _median(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
