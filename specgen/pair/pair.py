"""A loaded target and, if there is one, its draft model, with the functions that decode with them. `specgen.load` returns it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

import torch

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.measuring import PassCheck, Sample
from specgen.base.types import Context, Round, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.parallel import Parallel
from specgen.decoding.parallel_costs import LONGEST_WINDOW, ParallelCosts, usual_window
from specgen.decoding.run import Clock, Run, StopTexts, Turns, sequential
from specgen.engine.devices import device_timer
from specgen.engine.model_loading import DraftModelRunner, LoadedModel
from specgen.engine.model_runner import ModelRunner, run_some_passes
from specgen.engine.native.native_model import NativeModel
from specgen.engine.parts.own_layers import LayerSkippingRunner, SkippedLayers
from specgen.engine.penalties import PenaltyProcessor
from specgen.methods import runs
from specgen.methods.adaptive import Adaptive
from specgen.methods.method import Method
from specgen.methods.pass_times import time_parallel_passes
from specgen.methods.suffix import SuffixHistory
from specgen.pair import skip_search
from specgen.pair.figures import Figures
from specgen.pair.measurements import DraftingKnowledge, Key, Measurements
from specgen.pair.parts import PartStore, name_in
from specgen.pair.profile_search import find as find_profile
from specgen.pair.request import (
    RESERVED,
    Prompt,
    Request,
    Result,
    check_prompt_ids,
    encoded,
    fitting_tokens,
    sampling_with,
    several,
)
from specgen.workers.worker import DraftWorker

if TYPE_CHECKING:
    from specgen.decoding.run import Schedule
    from specgen.pair.finding import Found, Search
    from specgen.pair.profile import Profile
    from specgen.pair.profile_place import ProfileSource

P = ParamSpec("P")
T = TypeVar("T")
PASSES = "passes"  # the kind of measurements: `ParallelCosts`


def _in_turn(function: Callable[Concatenate[Pair, P], T]) -> Callable[Concatenate[Pair, P], T]:
    """Decorates a method of `Pair` to wait until no other thread runs the pair's models."""

    @wraps(function)
    def waiting(pair: Pair, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with pair.lock:
            return function(pair, *args, **kwargs)

    return waiting


class Pair:
    """A target and its draft model (or none), for any number of decoding runs, one after the other or in turns.

    Threads may share a pair: their calls wait for one another, and rounds of unfinished runs are made in turns.

    The models' KV caches stay between runs: a run reuses the cached tokens with which its own context begins. `worker` is the
    process that runs the draft model for PEARL; None if this process does.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel | None, worker: DraftWorker | None = None) -> None:
        self.target, self.draft, self.tokenizer = target, draft, target.tokenizer
        self.measurements = Measurements(target, draft)
        self.searched: Search | None = None  # what `load` found for the target, if it was asked to look
        self.lock = Turns()  # of all that changes models' caches; pairs with the same target share it
        self._is_closed = False
        self._reserved = 0  # tokens
        self._worker = worker
        if worker is not None and target.has_penalties:
            worker.penalties = target.generation, target.eos_ids
        self._target_runner = target.runner(target.penalties(target.device, target.model.shape.vocab_size))
        self._draft_runner: DraftModelRunner | None = None
        self.parts = PartStore(target, self._target_runner, self._penalties)
        self._skipping: tuple[str, LayerSkippingRunner] | None = None  # of the last run that skipped layers
        self._history = SuffixHistory()
        self._knowledge = DraftingKnowledge(self.measurements, target, draft, self._has_model)
        # Where the tuned profile is that chooses the method of calls without one; None: nowhere, and the default method decodes.
        self.profile_from: ProfileSource | None = None
        self._profiles: dict[tuple[float, ...], Profile | None] = {}  # by sampling parameters

    @property
    def found(self) -> Sequence[Found]:
        """What `load` found that can draft for the target; nothing if it was not asked to look."""
        return () if self.searched is None else self.searched.found

    def learn(self, found: Found) -> None:
        """Takes over what was learned about something that was found for the target, and stores it for later searches."""
        if self.searched is not None:
            self.searched = self.searched.learned(found)
            self.searched.keep()

    # runs

    def rounds(
        self,
        prompt: Prompt,
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        record: bool = False,
        **settings: object,
    ) -> Iterator[Round]:
        """Decodes, and yields each round: one target pass with the draft that it verified.

        `prompt` is text, token ids, or messages for the model's chat template: dictionaries with `role` and `content`. `method`
        None takes the method and the settings of the tuned profile that fits the pair and the sampling (see `load`), else, and
        with settings, the default method. `sampling` None is greedy decoding. `settings` are the method's, and fields of
        `sampling` by name. `record` adds to each round how close the target's and the draft's probabilities are, which takes
        time. Invalid arguments raise SpecgenError at the call, before the first round.
        """
        request = self.request(prompt, method, sampling, record=record, **settings)
        return self.run(request).rounds()

    @overload
    def generate(
        self,
        prompt: Prompt,
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        perplexity: bool = False,
        record: bool = False,
        **settings: object,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | Sequence[list[int]] | Sequence[Sequence[Mapping[str, str]]],
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        perplexity: bool = False,
        record: bool = False,
        **settings: object,
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Any,
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        perplexity: bool = False,
        record: bool = False,
        **settings: object,
    ) -> Result | list[Result]:
        """Decodes the whole output and returns it. Arguments as for `rounds`.

        `prompt` may also be a list of prompts, which are decoded one after the other: then a list of results is returned.
        `perplexity` adds the output's perplexity under the target to the summary; methods that do not keep the target's
        distribution always get it.
        """
        prompts = several(prompt)
        given = [prompt] if prompts is None else prompts
        requests = [self.request(each, method, sampling, record=record, **settings) for each in given]
        results = [self._result(request, perplexity=perplexity) for request in requests]
        return results[0] if prompts is None else results

    @_in_turn
    def _result(self, request: Request, *, perplexity: bool) -> Result:
        run = self.run(request)
        computed = run.uncached_tokens
        rounds = list(run.rounds())
        summary = Figures(request.method.name, rounds, prompt_tokens=computed)
        if perplexity or not request.method.lossless:
            summary.add_log_likelihood(self.log_likelihood(request.prompt_ids, summary.token_ids))
        text = request.text(self.tokenizer, summary.token_ids)
        return Result(text, summary.token_ids, rounds, summary.as_dict(text, run.finish_reason or "length"))

    def request(
        self,
        prompt: Prompt,
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        record: bool = False,
        **settings: object,
    ) -> Request:
        """Returns the arguments, which are those of `rounds`, checked and with the prompt as token ids, for `prepare` and `run`.

        Raises SpecgenError for invalid arguments.
        """
        self._check_open()
        profile = self._profile_of_call(sampling, settings) if method is None else None
        written: Mapping[str, object]
        if method is not None:
            name, written = methods.split(str(method))
        elif profile is not None:
            name, written = profile.chosen.method, profile.chosen.settings
        else:
            name, written = methods.DEFAULT_METHOD, {}
        chosen, settings = methods.find(name), {**written, **settings}
        exit_name = str(settings.get("exit", methods.DEFAULT_EXIT))
        with self.lock:  # it may load the part
            has_predictor = chosen.needs_exit_layer and self.parts.has_predictor(exit_name)
        ids, turn_end = encoded(prompt, self.tokenizer)
        sampling = sampling_with(sampling, settings, self.target, turn_end)
        prompt_ids = check_prompt_ids(ids, self._target_runner.num_embeddings)
        resolved = methods.resolve(chosen, settings, has_predictor=has_predictor)
        limit = fitting_tokens(len(prompt_ids), sampling.max_new_tokens, self.target)
        refusal = None if self.draft is None else self.draft.refusal
        if refusal is not None and chosen.uses_draft_model and not resolved.drafts_text:
            raise refusal
        costs = None if profile is None else profile.measured.costs
        return Request(chosen, resolved, sampling, prompt_ids, limit, record, costs)

    def _profile_of_call(self, sampling: SamplingParams | None, settings: Mapping[str, object]) -> Profile | None:
        """Returns the tuned profile that decides for a call that names no method, the one for this sampling. None if there is no
        such profile, or if the call has settings of a method."""
        own = dict(settings)
        wanted = sampling_with(sampling, own, self.target, "")
        return None if own or self.profile_from is None else self._profile(self.profile_from, wanted)

    def _profile(self, source: ProfileSource, sampling: SamplingParams) -> Profile | None:
        """Returns the tuned profile that fits this pair and sampling; None if there is none. It is looked for once."""
        key = tuple(sampling.warping.values())
        with self.lock:
            if key not in self._profiles:
                self._profiles[key], _ = find_profile(self, sampling, source.folder)
            return self._profiles[key]

    @_in_turn
    def prepare(self, request: Request) -> Run:
        """Returns `run(request)`, which does slow work at the first call. For PEARL it also waits until the process that runs the
        draft model is ready, so that the first round need not wait."""
        run = self.run(request)
        if request.method.is_parallel and self.draft is not None:
            draft_worker(self).ready()
        return run

    @_in_turn
    def run(self, request: Request) -> Run:
        """Returns a run of the request, ready to start: `run(request).rounds()` decodes.

        Loads the draft model if the method runs it in this process. Measures or searches the values of settings that are `auto`,
        unless an earlier call, also of another process on this machine, has stored them. For a repeatable request they follow
        from the models' sizes instead. Without a seed in the request, each run draws a random one, and a repeatable one takes 0.
        """
        self._check_open()
        method, settings, sampling = request.method, request.settings, request.sampling
        passes = adaptive = window = None
        if settings.values.get("skip") == "auto":
            if request.is_repeatable:
                skips = skip_search.usual_skips(self.target)
            else:
                skips = skip_search.find_skips(self.measurements, self.target, partial(skipping_speed, self))
            settings = settings.with_value("skip", skips)
        if method.is_parallel and self.draft is not None:
            is_auto = settings.values["window"] == "auto"
            if is_auto and request.is_repeatable:
                settings = settings.with_value("window", usual_window(self._knowledge.draft_cost))
            elif is_auto or self._knowledge.reads_pass_costs(request):
                passes = pass_costs(self, request.typical_length, sampling, record=request.record)
            if is_auto and passes is not None:
                window = passes.run_window(is_flexible=has_flexible_window(self, sampling))
                settings = settings.with_value("window", passes.window.size)
        if settings.policy == Adaptive.name:
            adaptive = self._knowledge.inputs(request, passes)
        setup = replace(
            self._setup(method, sampling, len(request.prompt_ids) + min(request.limit, RESERVED)),
            seed=_seed(request),
            eos_ids=frozenset() if sampling.ignore_eos else self.target.eos_ids,
            record=request.record,
            window=window,
            adaptive=adaptive,
            history=self._history if settings.values.get("history") else None,
        )
        source = (self.parts.stand_in(method) if self.draft is None else None) or method
        if source.needs_exit_layer or source.head:
            parts = self.parts.runners(source, name_in(settings.values))
            parts.reserve(setup.capacity)
            setup = replace(setup, target=parts.target, draft=parts.draft, acceptance_predictor=parts.predictor)
        elif method.skips_layers:
            setup = replace(setup, draft=self._skipping_runner(str(settings.values["skip"])))
        elif method.is_parallel and self.draft is not None:
            setup = replace(setup, worker=draft_worker(self))
        stops = StopTexts.of(sampling.stop, self.tokenizer, request.prompt_ids)
        clock = Clock(device_timer(self.target.device))
        costs = None if window is None else passes
        run = runs.make_run(method, settings, setup, Context(request.prompt_ids), request.limit, stops, clock, costs=costs)
        run.schedule = self._checked(run.schedule, request, costs)
        run.lock = self.lock
        return run

    def _checked(self, schedule: Schedule, request: Request, costs: ParallelCosts | None) -> Schedule:
        """Returns the schedule with comparisons of its passes with measured ones.

        PEARL's are compared with its `costs`, if the window was computed from them, those of other rounds with the watched ones.
        """
        if costs is not None and isinstance(schedule, Parallel):
            key = _passes_key(self, request.typical_length, request.sampling, record=request.record)
            return replace(schedule, costs=costs, check=PassCheck(partial(self.measurements.doubt, PASSES, key)))
        if schedule is sequential and not request.method.needs_exit_layer:
            return self.measurements.checked(schedule)
        return schedule

    def _has_model(self, method: Method) -> bool:
        """Whether a model, or a part of the target, makes at least some of the method's drafts."""
        if not method.uses_draft_model or self.draft is not None:
            return method.runs_model
        return self.parts.stand_in(method) is not None

    def _setup(self, method: Method, sampling: SamplingParams, capacity: int) -> Setup:
        """Returns what every run is made from: the model runners and the sampling, without seed and end-of-sequence ids.

        Its `draft` is None if `method` runs no draft model in this process. Makes the KV caches large enough for `capacity`
        tokens (prompt and output).
        """
        capacity = max(capacity, self._reserved)
        in_worker = method.is_parallel and self._worker is not None and self._worker.is_process
        target, draft = runners(self) if method.uses_draft_model and not in_worker else (self._target_runner, None)
        for runner in (target, draft):
            if runner is not None:
                runner.reserve(capacity)
        tokenizers = None if self.draft is None else (self.tokenizer, self.draft.tokenizer)
        return Setup(draft, sampling, vocab_size=target.vocab_size, target=target, capacity=capacity, tokenizers=tokenizers)

    def _skipping_runner(self, skip: str) -> LayerSkippingRunner:
        """Returns a runner of the target that leaves out the layers in `skip`, a setting such as `3+5a+7m`.

        Only the last runner made is kept for reuse, because a search for the fastest layers makes many.
        """
        skips = SkippedLayers.parse(skip, self.target.model.shape.num_layers)
        if self._skipping is None or self._skipping[0] != str(skips):
            runner = LayerSkippingRunner(self._target_runner, self.target.model, skips, self._penalties())
            self._skipping = str(skips), runner
        return self._skipping[1]

    def _penalties(self, device: torch.device | None = None) -> PenaltyProcessor | None:
        return self.target.penalties(device or self.target.device, self._target_runner.vocab_size)

    # between runs

    @_in_turn
    def log_likelihood(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """Returns the target's log-likelihood (nats) of `token_ids` after the prompt, at temperature 1 and without penalties.

        Runs the target on the tokens that its KV cache does not hold.
        """
        runner = self.target.runner() if self.target.has_penalties else self._target_runner
        return runner.log_likelihood(prompt_ids, token_ids)

    @_in_turn
    def warm_up(
        self,
        announce: Callable[[str], None] = lambda _: None,
        *,
        sequential: bool = False,
        parallel: bool = False,
        remembered: bool = False,
    ) -> None:
        """Runs some forward passes, so that the first measured one is not slower than the others.

        Loads the draft model's weights if later runs need them in this process: those of methods that draft before each target
        pass (`sequential`), or of PEARL (`parallel`) if no other process drafts for it. `announce` is called with a short
        description of each step. If a loaded model is on the CPU, also sets torch's number of threads for the whole process, to
        what suits this pair. So a library that uses specgen should not call it. `remembered`: takes the number of threads that an
        earlier process has measured for this pair, if any, and then runs no pass.
        """
        needs_draft = sequential or (parallel and self._worker is None)
        if self.draft is not None and self.draft.refusal is None and needs_draft:
            announce(f"loading {self.draft.name}")
            runners(self)
        announce("warming up")
        some_passes = partial(run_some_passes, self._target_runner, self._draft_runner)
        if "cpu" in {runner.device.type for runner in (self._target_runner, self._draft_runner) if runner is not None}:
            self.measurements.set_threads(some_passes, remembered=remembered)
        else:
            some_passes()
        self.forget()

    @_in_turn
    def reserve(self, capacity: int) -> None:
        """Makes the KV caches of all later runs large enough for `capacity` tokens at once.

        A cache that grows is allocated anew, which would make passes invalid that were captured as CUDA graphs.
        """
        self._reserved = max(self._reserved, capacity)

    @_in_turn
    def forget(self) -> None:
        """Empties all KV caches and forgets earlier outputs, so that the next run computes everything. For measurements."""
        self._history.clear()
        for runner in (self._target_runner, self._draft_runner):
            if runner is not None:
                runner.clear_cache()
        self.parts.clear_caches()
        if self._worker is not None:
            self._worker.forget()

    @_in_turn
    def close(self) -> None:
        """Ends the process that runs the draft model, and stores the costs of drafting that runs have learned.

        Then a new run cannot begin (SpecgenError). Runs that have begun can be finished, except PEARL's (RunError).
        """
        if not self._is_closed:
            self._knowledge.save()
        self._is_closed = True
        if self._worker is not None:
            self._worker.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SpecgenError("the pair of models is closed", "Load it again, or close it later")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _seed(request: Request) -> int:
    if request.sampling.seed is not None:
        return request.sampling.seed
    return 0 if request.is_repeatable else secrets.randbits(32)


def devices(pair: Pair, method: Method | None = None) -> list[torch.device]:
    """Returns the target's devices, and the draft model's if there is one and `method` is None or uses it."""
    found = list(pair.target.devices)
    if pair.draft is not None and (method is None or method.uses_draft_model):
        found += pair.draft.devices
    return found


def runners(pair: Pair) -> tuple[ModelRunner, DraftModelRunner | None]:
    """Returns the model runners of the target and of the draft model (None if there is none).

    Loads the draft model's weights unless they are loaded already.
    """
    if pair._draft_runner is None and pair.draft is not None:  # with the target's penalties: it has to predict their effect
        pair._draft_runner = pair.draft.draft_runner(pair._penalties(pair.draft.device))
    return pair._target_runner, pair._draft_runner


def capture_seconds(pair: Pair) -> float:
    """Returns the seconds that this process has spent so far on capturing passes of the pair's models as CUDA graphs."""
    models = [pair.target.model]
    if pair.draft is not None and pair._draft_runner is not None:
        models.append(pair.draft.model)
    captured = (model.captures for model in models if isinstance(model, NativeModel))
    return float(sum(captures.seconds for captures in captured if captures is not None))


def skipping_speed(pair: Pair, skips: SkippedLayers, prompts: Sequence[Sequence[int]]) -> float:
    """Returns the tokens per second of greedy Self-SD, whose drafts are made by the target without the layers `skips`.

    The speed is measured on all `prompts` (token ids) together, without the prefill.
    """
    sampling = SamplingParams(max_new_tokens=skip_search.NEW_TOKENS, ignore_eos=True)
    rounds = [round_ for ids in prompts for round_ in list(pair.rounds(ids, "selfsd", sampling, skip=str(skips)))[1:]]
    seconds = sum(sum(round_.seconds.values()) for round_ in rounds)
    return sum(len(round_.token_ids) for round_ in rounds) / seconds if seconds else 0.0


def draft_worker(pair: Pair) -> DraftWorker:
    """Returns the worker that runs the draft model during the target's passes (PEARL). The pair must have a draft model.

    Raises SpecgenError if the pair is closed.
    """
    pair._check_open()
    if pair._worker is None:
        draft = runners(pair)[1]
        assert draft is not None
        if pair.draft is not None and pair.draft.drafts_blocks:
            draft = pair.draft.runner(pair._penalties(pair.draft.device))
        pair._worker = DraftWorker.in_this_process(draft, pair.target.device)
    return pair._worker


def has_flexible_window(pair: Pair, sampling: SamplingParams) -> bool:
    """Whether PEARL with `window=auto` ends each draft when the target's pass ends, instead of after a fixed number of tokens.

    True in greedy decoding if the draft model runs in another process. When sampling, tokens would depend on the passes' times.
    """
    return sampling.greedy and pair.draft is not None and draft_worker(pair).is_process


def pass_costs(pair: Pair, context_length: int, sampling: SamplingParams | None = None, *, record: bool = False) -> ParallelCosts:
    """Returns the seconds of forward passes of target and draft while both run at once. PEARL's window is computed from them.

    `context_length` is in tokens; `sampling` None is greedy decoding; `record`: see `Pair.rounds`. The pair must have a draft
    model. Each combination of what changes the times is measured once: the length rounded up to a power of two, which processing
    the logits get (temperature, top-k, top-p, penalties), where the draft model runs, and whether its logits are passed on
    (`record`). The seconds of a draft pass are infinite if the draft model cannot read a context of this length.
    """
    draft, worker = pair.draft, draft_worker(pair)
    assert draft is not None
    sampling = SamplingParams() if sampling is None else sampling

    def measure() -> Sample[dict[str, float]]:
        worker.ready()
        shortest = min(pair.target.max_tokens(context_length), draft.context_limit)
        length = max(1, min(context_length, max(shortest - LONGEST_WINDOW, shortest // 2)))
        widest = max(1, min(LONGEST_WINDOW, shortest - length))
        setup = replace(pair._setup(methods.METHODS["pearl"], sampling, context_length + LONGEST_WINDOW), record=record)
        drafter = worker.drafter(methods.resolve(methods.METHODS["pearl"], {}), setup, LONGEST_WINDOW)
        assert setup.target is not None
        timer, context = device_timer(pair.target.device), Context([1] * length)
        sample = time_parallel_passes(setup.target, drafter, context, timer, widest)
        return sample.holding(asdict(sample.value))

    key = _passes_key(pair, context_length, sampling, record=record)
    return pair.measurements.get(PASSES, key, measure, lambda stored: ParallelCosts(**stored))


def _passes_key(pair: Pair, context_length: int, sampling: SamplingParams, *, record: bool) -> Key:
    """Returns what distinguishes the measurements of `pass_costs`."""
    worker = draft_worker(pair)
    logits = not sampling.greedy, sampling.top_k > 0, sampling.top_p < 1 or sampling.min_p > 0, pair.target.has_penalties
    return 1 << (context_length - 1).bit_length(), *logits, worker.is_process, worker.threads, record
