"""Exact output distributions of whole runs: all outcomes of all random choices are enumerated, each
with its probability.

Random numbers are replaced while paths are enumerated: those of `torch.rand`, which may only be
compared with bounds, and tokens drawn by `token_sampling.draw`. A method that draws otherwise
cannot be enumerated.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch

from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import token_sampling
from specgen.decoding.chain import ModelDrafter
from specgen.decoding.drafting import Setup
from specgen.decoding.parallel import Parallel
from specgen.decoding.parallel_costs import Window
from specgen.decoding.policy_base import LengthPolicy
from specgen.decoding.run import Run
from specgen.engine.text.tokenizer import Tokenizer
from specgen.methods.base import Method
from specgen.testing.scripted_models import TableRunner, named_method, scripted_run

PROMPT = [0, 1, 1, 0, 1]  # tokens of every vocabulary here; it contains matches for prompt lookup
ROUNDING = 1e-5  # distributions are float32
Distribution = dict[tuple[int, ...], float]  # the probability of each output
Outcomes = Callable[[], Iterable[tuple[Any, float]]]
Choice = list[tuple[Any, float]]  # the outcomes that are not enumerated yet, the current one last


class SmallRunner(TableRunner):
    """A `TableRunner` with a vocabulary of `size` tokens. `zero` gives one token in each row the
    probability 0, as top-k would."""

    def __init__(self, seed: int, size: int = 3, *, zero: bool = False, scale: float = 1.5) -> None:
        self.vocab_size = self.num_embeddings = size
        generator = torch.Generator().manual_seed(seed)
        rows = max(size, 4)  # a draft model with a narrower vocabulary sees the target's tokens
        self.table = torch.randn(rows, rows, size, generator=generator) * scale
        if zero:
            cut = torch.randint(size, (rows, rows, 1), generator=generator)
            self.table.scatter_(2, cut, -torch.inf)


class Patches(Protocol):
    """What replaces attributes until it is undone: `Replacements`, or pytest's monkeypatch."""

    def setattr(self, target: Any, name: str, value: object, /) -> None: ...


class Replacements(ExitStack):
    """Replaces attributes of modules and classes, until this context ends."""

    def setattr(self, target: Any, name: str, value: object, /) -> None:
        self.enter_context(patch.object(target, name, value))


class State(NamedTuple):
    """What the future of a run depends on after a round: two runs with equal states continue alike.

    `tokens` are committed, `pending` are drafted and not verified yet. `policy` is the length
    policy's state, `drafter` what the drafter has learned.
    """

    tokens: tuple[int, ...]
    pending: tuple[int, ...]
    policy: Hashable
    drafter: Hashable
    finished: bool


class Paths:
    """Replaces all random numbers and enumerates the outcomes of every choice that depends on them.

    A path is a sequence of outcomes; `weight` is the probability of the current path.
    """

    def __init__(self, patches: Patches) -> None:
        self._choices: list[Choice] = []
        self._position = 0
        self.weight = 1.0
        patches.setattr(
            torch, "rand", lambda *size, **_: Uniforms(self, size[0] if len(size) == 1 else size)
        )
        patches.setattr(token_sampling, "draw", self._draw)

    def all(self, run: Callable[[], Any]) -> dict[Any, float]:
        """The probability of each result that `run` can return. `run` makes random choices."""
        found: dict[Any, float] = defaultdict(float)
        for result, _ in self._enumerate(run, []):
            found[result] += self.weight
        return dict(found)

    def of_rounds(self, begin: Callable[[], Iterator[State]]) -> Distribution:
        """The probability of each output of a run with random choices. `begin` starts the run anew,
        and yields its state after every round.

        Paths that lead to equal states are merged: later rounds are enumerated only once for each
        state.
        """
        found: Distribution = defaultdict(float)
        # probability and outcomes that lead there
        unfinished: dict[State | None, tuple[float, list[Any]]] = {None: (1.0, [])}
        rounds = 0
        while unfinished:
            rounds += 1
            following: dict[State | None, tuple[float, list[Any]]] = {}

            def after(begun: int = rounds) -> State:
                states = begin()
                for _ in range(begun - 1):
                    next(states)
                return next(states)

            for mass, outcomes in unfinished.values():
                for state, path in self._enumerate(after, outcomes):
                    if state.finished:
                        found[state.tokens] += mass * self.weight
                    else:
                        before, representative = following.get(state, (0.0, path))
                        following[state] = (before + mass * self.weight, representative)
            unfinished = following
        total = sum(found.values())
        if not math.isclose(total, 1, abs_tol=ROUNDING):
            raise AssertionError(f"the outputs' probabilities add up to {total:.6g}")
        return dict(found)

    def choose(self, outcomes: Outcomes) -> Any:
        """The outcome of the next random choice on the current path. `outcomes` returns (outcome,
        probability) pairs; outcomes with probability 0 are left out."""
        if self._position == len(self._choices):
            self._choices.append([(value, weight) for value, weight in outcomes() if weight > 0])
        value, weight = self._choices[self._position][-1]
        self._position += 1
        self.weight *= weight
        return value

    def _enumerate(
        self, run: Callable[[], Any], beginning: Sequence[Any]
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Yields the result of each path that begins with the outcomes `beginning`, and all
        outcomes on the path.

        While a path is yielded, `weight` is its probability given its beginning.
        """
        self._choices = [[(value, 1.0)] for value in beginning]
        while True:
            self._position = 0
            self.weight = 1.0
            result = run()
            if self._position != len(self._choices):
                raise AssertionError("the run is not determined by its random choices")
            yield result, [choice[-1][0] for choice in self._choices]
            while len(self._choices) > len(beginning) and len(self._choices[-1]) == 1:
                self._choices.pop()
            if len(self._choices) == len(beginning):
                return
            self._choices[-1].pop()

    def _draw(
        self, probs: torch.Tensor, _: object, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = (probs / probs.sum(-1, keepdim=True)).reshape(-1, probs.shape[-1]).tolist()

        def outcomes() -> Iterator[tuple[Any, float]]:
            for tokens in product(range(len(rows[0])), repeat=len(rows)):
                weight = 1.0
                for row, token in zip(rows, tokens, strict=True):
                    weight *= row[token]
                yield tokens, weight

        columns = torch.tensor(self.choose(outcomes)).reshape(probs.shape[:-1])
        return columns if ids is None else ids.gather(-1, columns[..., None])[..., 0]


class Uniforms:
    """Uniform random numbers between 0 and 1 for comparisons `uniforms * scale < bound`, whose
    outcomes are enumerated.

    Of each number only the interval is known in which earlier comparisons have placed it. So one
    number that is compared several times (broadcast, or used again) gives dependent outcomes, as it
    should.
    """

    def __init__(self, paths: Paths, shape: Sequence[int] | int) -> None:
        self._paths = paths
        count = int(torch.Size((shape,) if isinstance(shape, int) else shape).numel())
        self._intervals = [(0.0, 1.0)] * count
        self._numbers = torch.arange(count).reshape(shape)
        self._scale: torch.Tensor | float = 1.0

    def __mul__(self, scale: torch.Tensor | float) -> Uniforms:
        scaled = copy.copy(self)  # the numbers are the same
        scaled._scale = self._scale * scale
        return scaled

    def __getitem__(self, index: int) -> Uniforms:
        part = copy.copy(self)  # the intervals are the same
        part._numbers = self._numbers[index]
        return part

    def __lt__(self, bound: torch.Tensor) -> torch.Tensor:
        scale = self._scale.double() if isinstance(self._scale, torch.Tensor) else self._scale
        numbers, thresholds = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
            self._numbers, bound.double() / scale
        )
        if thresholds.isnan().any():
            raise AssertionError("a random number is compared with NaN")
        flips = [
            self._is_below(number, threshold)
            for number, threshold in zip(
                numbers.flatten().tolist(), thresholds.flatten().tolist(), strict=True
            )
        ]
        return torch.tensor(flips).reshape(numbers.shape)

    def _is_below(self, number: int, threshold: float) -> bool:
        low, high = self._intervals[number]
        chance = min(max((threshold - low) / (high - low), 0.0), 1.0)
        below: bool = self._paths.choose(lambda: ((False, 1 - chance), (True, chance)))
        self._intervals[number] = (
            (low, min(high, threshold)) if below else (max(low, threshold), high)
        )
        return below


class InlineWorker:
    """Drafts for PEARL at once when a draft is started, so that all random choices have one order.
    Implements `DraftWorker`."""

    kind = "inline"
    threads: int | None = None

    def __init__(self, runner: TableRunner) -> None:
        self._runner = runner

    def drafter(self, policy: LengthPolicy, components: Setup, window: int) -> InlineDrafter:
        return InlineDrafter(policy, replace(components, draft=self._runner))  # type: ignore[arg-type]


class InlineDrafter:
    """Drafts for one run. Implements `ParallelDrafter`. `drafted` is the last draft."""

    def __init__(self, policy: LengthPolicy, components: Setup) -> None:
        self.policy = policy
        self.seconds = 0.0
        self.drafted = Draft()
        self._model = ModelDrafter(components)

    def ready(self) -> None:
        pass

    def prefill(self, context: Context) -> None:
        pass

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        drafted = self._model.propose(context, self.policy, limit, list(unverified))
        self.drafted = drafted.with_predictions(self.policy.predictions)

    def first(self, count: int) -> list[int]:
        return list(self.drafted.tokens[:count])

    def cut(self) -> None:
        pass

    def finish(self) -> Draft:
        return self.drafted

    def close(self) -> None:
        pass


def states(
    method: Method | str,
    settings: Mapping[str, object],
    target: Any,
    draft: Any,
    sampling: SamplingParams,
    eos: Iterable[int] = (),
    window: Window | None = None,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
) -> Iterator[State]:
    """Runs a method on these model runners and yields its state after each round. `window` replaces
    PEARL's."""
    run = scripted_run(
        method,
        settings,
        target,
        draft,
        sampling,
        eos=eos,
        worker=InlineWorker(draft),
        prompt=PROMPT,
        tokenizers=tokenizers,
    )
    if window is not None:
        assert isinstance(run.schedule, Parallel)
        run.schedule = replace(run.schedule, window=window)
    for round_ in run.rounds():
        pending: Sequence[int] = ()
        # all judged tokens were accepted
        if isinstance(run.schedule, Parallel) and round_.verdict.token is None:
            assert isinstance(run.schedule.drafter, InlineDrafter)
            pending = run.schedule.drafter.drafted.tokens[1:]
        run.policy.reason = ""  # of the draft that has ended
        run.policy.take_seconds()  # they would make every state different from the others
        yield State(
            tuple(run.context.ids[len(PROMPT) :]),
            tuple(pending),
            _policy_state(run.policy),
            learned(run),
            run.finish_reason is not None,
        )


def learned(run: Run) -> Hashable:
    """Returns what a run has learned besides its policy, to compare states: the n-gram pool and
    window of lookahead decoding; None for other drafters of this package.

    What a drafter or verifier from outside keeps is not known here, so it equals nothing.
    """
    if not all(_is_ours(part) for part in (run.drafter, run.verifier)):
        return object()
    drafter: Any = run.drafter
    if not hasattr(drafter, "_pool"):
        return None
    window = drafter._window
    return str(drafter._pool._phrases), str(window._levels), window._random.getstate()


def _policy_state(policy: LengthPolicy) -> Hashable:
    """Returns the policy's state, which equals nothing if it cannot be pickled."""
    try:
        return pickle.dumps(policy)
    except (pickle.PicklingError, AttributeError, TypeError):
        return object()


def _is_ours(part: object) -> bool:
    return type(part).__module__.startswith("specgen.")


def exact(
    runner: TableRunner,
    sampling: SamplingParams,
    length: int,
    eos: Iterable[int] = (),
    start: Distribution | None = None,
) -> Distribution:
    """The distribution of the outputs when the target alone continues `start` (outputs with their
    probabilities; None: the empty output) to `length` tokens."""
    return output_distribution(
        lambda tokens: token_sampling.warp(runner.row([*PROMPT, *tokens]), sampling).tolist(),
        length,
        set(eos),
        start,
    )


def output_distribution(
    next_probs: Callable[[tuple[int, ...]], Sequence[float]],
    length: int,
    eos: Collection[int] = (),
    start: Mapping[tuple[int, ...], float] | None = None,
) -> Distribution:
    """The probability of each output of `length` tokens, or fewer if an end-of-sequence id comes
    first.

    `next_probs` returns the probabilities [vocabulary] of the token after the given ones. `start`
    has the outputs to continue with their probabilities (None: the empty output).
    """
    found: Distribution = defaultdict(float)
    unfinished = [*({(): 1.0} if start is None else start).items()]
    while unfinished:
        tokens, mass = unfinished.pop()
        if len(tokens) >= length or (tokens and tokens[-1] in eos):
            found[tokens] += mass
        else:
            unfinished += [
                ((*tokens, token), mass * prob)
                for token, prob in enumerate(next_probs(tokens))
                if prob
            ]
    return dict(found)


def total_variation(found: Distribution, wanted: Distribution) -> float:
    return (
        sum(abs(found.get(tokens, 0.0) - wanted.get(tokens, 0.0)) for tokens in {*found, *wanted})
        / 2
    )


@dataclass(frozen=True)
class Case:
    """A method with settings on two small tables, for `limit` new tokens. `sizes` are the
    vocabularies of target and draft, `warp` the sampling parameters. `zero`: some tokens of the
    target have probability 0. `window` replaces PEARL's."""

    method: Method | str
    settings: Mapping[str, Any]
    limit: int
    sizes: tuple[int, int] = (2, 2)
    warp: dict[str, Any] = field(default_factory=dict)
    eos: tuple[int, ...] = ()
    zero: bool = False
    window: Window | None = None
    seed: int = 0

    def __str__(self) -> str:
        settings = "".join(f":{name}={value}" for name, value in self.settings.items())
        extras = [
            f"limit {self.limit}",
            f"vocabulary {self.sizes[0]}",
            *(f"{name} {value}" for name, value in self.warp.items()),
        ]
        extras += [
            text
            for text, used in (("eos", self.eos), ("zeros", self.zero), ("lead", self.window))
            if used
        ]
        name = self.method if isinstance(self.method, str) else self.method.name
        return f"{name}{settings}, {', '.join(extras)}"

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**{"max_new_tokens": self.limit, "temperature": 1.0} | self.warp)

    @property
    def models(self) -> tuple[SmallRunner, SmallRunner]:
        return SmallRunner(self.seed, self.sizes[0], zero=self.zero), SmallRunner(
            self.seed + 100, self.sizes[1]
        )


def distance(case: Case, draft: Any = None, *, on_gpu: bool = False, **options: Any) -> float:
    """The total variation distance between the exact distributions of the target's outputs and of
    the method's.

    `draft` drafts instead of the case's table. `on_gpu`: the method takes tensors for those of a
    GPU. `options`: see `states`.
    """
    target, own = case.models

    def begin() -> Iterator[State]:
        return states(
            case.method,
            case.settings,
            target,
            draft or own,
            case.sampling,
            case.eos,
            case.window,
            **options,
        )

    with Replacements() as replaced:
        if on_gpu:
            replaced.setattr(torch.Tensor, "is_cpu", False)
        found = Paths(replaced).of_rounds(begin)
    return total_variation(found, exact(target, case.sampling, case.limit, case.eos))


def check_distribution(
    method: str | type[Method],
    *,
    tokens: int = 4,
    vocabulary: int = 2,
    seeds: int = 3,
    warp: Mapping[str, Any] = MappingProxyType({}),
    **settings: object,
) -> None:
    """Checks that a lossless method's output follows the target's distribution at temperature 1 or
    as `warp` says (`temperature`, `top_k`, `top_p`, `min_p`): enumerates all random paths of whole
    runs of `tokens` new tokens, on `seeds` pairs of random tables with so few tokens.

    The work grows steeply with `tokens`, `vocabulary` and the length of drafts: give a setting
    such as `k=2` that keeps them short. Random numbers have to be those that this module replaces.
    Raises AssertionError if a probability is wrong, and SpecgenError if the method cannot run.
    """
    chosen, given = named_method(method, settings)
    if not chosen.lossless:
        raise AssertionError(f"{chosen.name} is lossy: its output has another distribution")
    for seed in range(seeds):
        case = Case(chosen, given, tokens, (vocabulary, vocabulary), dict(warp), seed=seed)
        error = distance(case)
        if not error < ROUNDING:  # NaN is wrong too
            raise AssertionError(
                f"{case}, tables {seed}: the output's distribution is {error:.2g} "
                "(total variation) from the target's"
            )
