"""A loaded target and, if there is one, its draft model, with the functions that decode with them.
`specgen.load` returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from specgen import methods
from specgen.base.part_kinds import DEFAULT_PART
from specgen.base.types import Round, SamplingParams
from specgen.decoding.parallel import Parallel
from specgen.decoding.run import Run
from specgen.methods.base import Method, Request
from specgen.models.loaded_models import LoadedModels
from specgen.pair.figures import Figures
from specgen.pair.profile_search import find as find_profile
from specgen.pair.prompts import (
    Prompt,
    Result,
    check_prompt_ids,
    encoded,
    fitting_tokens,
    output_text,
    sampling_with,
    several,
)

if TYPE_CHECKING:
    from specgen.pair.finding import Found, Search
    from specgen.pair.profile import Profile
    from specgen.pair.profile_place import ProfileSource

P = ParamSpec("P")
T = TypeVar("T")


def _in_turn(function: Callable[Concatenate[Pair, P], T]) -> Callable[Concatenate[Pair, P], T]:
    """Decorates a method of `Pair` to wait until no other thread runs the pair's models."""

    @wraps(function)
    def waiting(pair: Pair, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with pair.lock:
            return function(pair, *args, **kwargs)

    return waiting


class Pair:
    """A target and its draft model (or none), for any number of decoding runs, one after the other
    or in turns.

    Threads may share a pair: their calls wait for one another, and rounds of unfinished runs are
    made in turns. The models' KV caches stay between runs.
    """

    def __init__(self, models: LoadedModels) -> None:
        self.models = models
        self.target = models.target
        self.draft = models.draft
        self.tokenizer = models.tokenizer
        self.parts = models.parts
        self.measurements = models.measurements
        self.lock = models.lock
        # what `load` found for the target, if it was asked to look
        self.searched: Search | None = None
        # Where the tuned profile is that chooses the method of calls without one; None: nowhere,
        # and the default method decodes.
        self.profile_from: ProfileSource | None = None
        self._profiles: dict[tuple[float, ...], Profile | None] = {}  # by sampling parameters

    @property
    def found(self) -> Sequence[Found]:
        """What `load` found that can draft for the target; nothing if it was not asked to look."""
        return () if self.searched is None else self.searched.found

    def learn(self, found: Found) -> None:
        """Takes over what was learned about something that was found for the target, and stores it
        for later searches."""
        if self.searched is not None:
            self.searched = self.searched.learned(found)
            self.searched.keep()

    # runs

    def rounds(
        self,
        prompt: Prompt,
        method: str | type[Method] | None = None,
        sampling: SamplingParams | None = None,
        *,
        record: bool = False,
        **settings: object,
    ) -> Iterator[Round]:
        """Decodes, and yields each round: one target pass with the draft that it verified.

        `prompt` is text, token ids, or messages for the model's chat template: dictionaries with
        `role` and `content`. `method` may be a class, or name one as `package.module:Class`, whose
        module is then imported. None takes the method and the settings of the tuned profile
        that fits the pair and the sampling (see `load`), else, and with settings, the default
        method. `sampling` None is greedy decoding. `settings` are the method's, and fields of
        `sampling` by name. `record` adds to each round how close the target's and the draft's
        probabilities are, which takes time. Invalid arguments raise SpecgenError at the call,
        before the first round.
        """
        request = self.request(prompt, method, sampling, record=record, **settings)
        return self.run(request).rounds()

    @overload
    def generate(
        self,
        prompt: Prompt,
        method: str | type[Method] | None = None,
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
        method: str | type[Method] | None = None,
        sampling: SamplingParams | None = None,
        *,
        perplexity: bool = False,
        record: bool = False,
        **settings: object,
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Any,
        method: str | type[Method] | None = None,
        sampling: SamplingParams | None = None,
        *,
        perplexity: bool = False,
        record: bool = False,
        **settings: object,
    ) -> Result | list[Result]:
        """Decodes the whole output and returns it. Arguments and errors as for `rounds`.

        `prompt` may also be a list of prompts, which are decoded one after the other: then a list
        of results is returned. `perplexity` adds the output's perplexity under the target to the
        summary; methods that do not keep the target's distribution always get it.
        """
        prompts = several(prompt)
        given = [prompt] if prompts is None else prompts
        requests = [
            self.request(text, method, sampling, record=record, **settings) for text in given
        ]
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
        text = output_text(request, self.tokenizer, summary.token_ids)
        return Result(
            text, summary.token_ids, rounds, summary.as_dict(text, run.finish_reason or "length")
        )

    def request(
        self,
        prompt: Prompt,
        method: str | type[Method] | None = None,
        sampling: SamplingParams | None = None,
        *,
        record: bool = False,
        **settings: object,
    ) -> Request:
        """Returns the arguments, which are those of `rounds`, checked and with the prompt as token
        ids, for `prepare` and `run`.

        Raises SpecgenError for invalid arguments.
        """
        self.models.check_open()
        profile = self._profile_of_call(sampling, settings) if method is None else None
        written: Mapping[str, object]
        if method is not None:
            chosen, written = methods.given(method)
        elif profile is not None:
            chosen = methods.find(profile.chosen.method)
            written = profile.chosen.settings
        else:
            chosen = methods.find(methods.DEFAULT_METHOD)
            written = {}
        settings = {**written, **settings}
        exit_name = str(settings.get("exit", DEFAULT_PART))
        with self.lock:  # it may load the part
            has_predictor = chosen.needs_exit_layer and self.parts.has_predictor(exit_name)
        ids, turn_end = encoded(prompt, self.tokenizer)
        sampling = sampling_with(sampling, settings, self.target, turn_end)
        if sampling.grammar is not None:
            with self.lock:
                self.models.constraint(sampling)  # which may refuse it
        prompt_ids = check_prompt_ids(ids, self.models.plain().target.num_embeddings)
        resolved = methods.resolve(chosen, settings, has_predictor=has_predictor)
        limit = fitting_tokens(len(prompt_ids), sampling.max_new_tokens, self.target)
        policy = None if resolved.policy is None else methods.POLICIES[resolved.policy]
        costs = None if profile is None else profile.measured.costs
        return Request(chosen, resolved, policy, sampling, prompt_ids, limit, record, costs)

    def _profile_of_call(
        self, sampling: SamplingParams | None, settings: Mapping[str, object]
    ) -> Profile | None:
        """Returns the tuned profile that decides for a call that names no method, the one for this
        sampling. None if there is no such profile, or if the call has settings of a method."""
        own = dict(settings)
        wanted = sampling_with(sampling, own, self.target, "")
        return (
            None if own or self.profile_from is None else self._profile(self.profile_from, wanted)
        )

    def _profile(self, source: ProfileSource, sampling: SamplingParams) -> Profile | None:
        """Returns the tuned profile that fits this pair and sampling; None if there is none. It is
        looked for once."""
        key = tuple(sampling.warping.values())
        with self.lock:
            if key not in self._profiles:
                self._profiles[key], _ = find_profile(self, sampling, source.folder)
            return self._profiles[key]

    @_in_turn
    def prepare(self, request: Request) -> Run:
        """Returns `run(request)`, which does slow work at the first call. If drafts are made during
        the target's passes, it also waits until the draft model is loaded for that, so that the
        first round need not wait."""
        run = self.run(request)
        if isinstance(run.schedule, Parallel):
            run.schedule.ready()
        return run

    @_in_turn
    def run(self, request: Request) -> Run:
        """Returns a run of the request, ready to start: `run(request).rounds()` decodes.

        Loads the draft model if the method runs it in this process. Measures or searches the values
        of settings that are `auto`, unless an earlier call, also of another process on this
        machine, has stored them. For a repeatable request they follow from the models' sizes
        instead. Without a seed in the request, each run draws a random one, and a repeatable one
        takes 0. Raises SpecgenError if what drafts is missing or cannot be used.
        """
        self.models.check_open()
        return request.method.start(self.models, request)

    # between runs

    @_in_turn
    def log_likelihood(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """Returns the target's log-likelihood (nats) of `token_ids` after the prompt, at
        temperature 1 and without penalties.

        Runs the target on the tokens that its KV cache does not hold.
        """
        return self.models.log_likelihood(prompt_ids, token_ids)

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

        Loads the draft model's weights if later runs need them in this process: runs that draft
        before each target pass (`sequential`), or during the target's passes (`parallel`) if no
        other process drafts then. `announce` is called with a short description of each step. If a
        loaded model is on the CPU, also sets torch's number of threads for the whole process, to
        what suits this pair. So a library that uses specgen should not call it. `remembered`: takes
        the number of threads that an earlier process has measured for this pair, if any, and then
        runs no pass.
        """
        self.models.warm_up(
            announce, sequential=sequential, parallel=parallel, remembered=remembered
        )

    @_in_turn
    def reserve(self, capacity: int) -> None:
        """Makes the KV caches of all later runs large enough for `capacity` tokens at once.

        A cache that grows is allocated anew, which would make passes invalid that were captured as
        CUDA graphs.
        """
        self.models.reserve(capacity)

    @_in_turn
    def forget(self) -> None:
        """Empties all KV caches and forgets earlier outputs, so that the next run computes
        everything. For measurements."""
        self.models.forget()

    @_in_turn
    def close(self) -> None:
        """Ends the process that runs the draft model, and stores the costs of drafting that runs
        have learned.

        Then a new run cannot begin (SpecgenError). Runs that have begun can be finished, except
        those for which that process drafts (RunError).
        """
        self.models.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
