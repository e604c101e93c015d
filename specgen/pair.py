"""A target, its draft if there is one, and runs on them: what `specgen.load` returns."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from types import TracebackType
from typing import Any

import torch

from specgen import cost_model as timing
from specgen import factory, measurement_cache, methods
from specgen.decoding.components import Components
from specgen.decoding.parallel import DraftWorker
from specgen.decoding.run import Clock, Run, StopTexts
from specgen.engine.devices import device_name, pick_threads, synchronizer
from specgen.engine.early_exit import EarlyExit
from specgen.engine.exit_files import Description, Exit, FoundExit
from specgen.engine.exit_layer import check_split
from specgen.engine.layer_skipping import LayerSkippingRunner, SkippedLayers
from specgen.engine.likelihood import log_likelihood
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import LoadedModel
from specgen.engine.model_runner import ModelRunner
from specgen.engine.reference_logits import reference_logits
from specgen.errors import SpecgenError
from specgen.methods import Method
from specgen.settings import Settings
from specgen.traces.summary import Summary
from specgen.traces.trace_writer import versions
from specgen.types import Context, Round, SamplingParams
from specgen.workers.process_worker import ProcessWorker
from specgen.workers.thread_worker import ThreadWorker

RESERVED = 4096  # new tokens that caches are made for at once: a limit far above what is generated costs no memory


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that is ready to start, and what it was made from. `seed` is the one in use, chosen where none was given."""

    run: Run
    method: Method
    settings: Settings
    sampling: SamplingParams
    seed: int
    prompt_ids: list[int]
    context_ends: bool  # the context is full before `max_new_tokens` are there
    costs: timing.ParallelCosts | None = None  # what PEARL's window was measured by
    record: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run. `summary` has the keys of a trace's summary line."""

    text: str
    token_ids: list[int]
    rounds: list[Round]
    summary: dict[str, Any]


class Pair:
    """Use it again and again; runs may even take turns. It keeps what it can of the last run's cache."""

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        worker: ProcessWorker | None = None,
        exit_layer: Exit | None = None,
    ) -> None:
        self.target, self.draft = target, draft
        self.found_exit: FoundExit | None = None
        if exit_layer is not None:
            self.exit_layer = exit_layer
        self._process_worker = worker
        self._thread_worker: ThreadWorker | None = None
        self.tokenizer = target.tokenizer
        width = target.runner().vocab_size
        self._target_runner = target.runner(target.penalties_on(target.device, width))
        self._draft_runner: ModelRunner | None = None
        if draft is not None:  # reshaped by the target's penalties too: it is to guess what the target will say
            self._draft_runner = draft.runner(target.penalties_on(draft.device, width))
        self._early_exit: EarlyExit | None = None
        self._skipping: dict[str, LayerSkippingRunner] = {}

    @property
    def default_method(self) -> str:
        return methods.default_name(has_draft_model=self.draft is not None)

    @property
    def runners(self) -> tuple[ModelRunner, ModelRunner | None]:
        """The target's and the draft's, for whoever times passes."""
        return self._target_runner, self._draft_runner

    @cached_property
    def exit_layer(self) -> Exit | None:
        """EESD's trained part. What was found by itself is read when it is first asked for."""
        return None if self.found_exit is None else self.found_exit.load()

    @property
    def exit_refusal(self) -> SpecgenError | None:
        """Why there is no `exit_layer`, where one was found and cannot be used."""
        return None if self.found_exit is None else self.found_exit.refusal

    @property
    def exit_description(self) -> Description | None:
        """What the exit layer is, told without reading it; None where there is none."""
        if self.found_exit is not None:
            return self.found_exit.description
        return None if self.exit_layer is None else self.exit_layer.description

    def rounds(
        self,
        prompt: str | Sequence[int],
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        record: bool = False,
        **parameters: object,
    ) -> Iterator[Round]:
        """Decode, round by round. `parameters` are the method's settings; mistakes raise SpecgenError at once.

        `record` asks for each round's `verdict.agreement` of draft and target, which takes time.
        """
        return self.plan(prompt, method, sampling, record=record, **parameters).run.rounds()

    def generate(
        self,
        prompt: str | Sequence[int],
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        perplexity: bool = False,
        record: bool = False,
        **parameters: object,
    ) -> Result:
        """Decode to the end. The summary tells the output's perplexity where that is asked for or the method is lossy."""
        plan = self.plan(prompt, method, sampling, record=record, **parameters)
        rounds = list(plan.run.rounds())
        summary = Summary(plan.method.name)
        for round_ in rounds:
            summary.add(round_)
        if perplexity or not plan.method.lossless:
            summary.add_log_likelihood(self.log_likelihood(plan.prompt_ids, summary.token_ids))
        text = self.text(plan, summary.token_ids)
        return Result(text, summary.token_ids, rounds, summary.as_dict(text, plan.run.finish_reason or "length"))

    def log_likelihood(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """Of `token_ids` behind the prompt, under the target at temperature 1 (nats): one pass, but for what is cached."""
        runner = self.target.runner() if self.target.has_penalties else self._target_runner
        return log_likelihood(runner, prompt_ids, token_ids)

    def devices(self, method: Method) -> list[torch.device]:
        """Where the method's models run."""
        draft = [self.draft] if self.draft is not None and method.needs_draft_model else []
        return [model.device for model in (self.target, *draft)]

    @property
    def all_devices(self) -> list[torch.device]:
        return [model.device for model in (self.target, self.draft) if model is not None]

    def text(self, plan: Plan, token_ids: Sequence[int]) -> str:
        """The answer's text, up to a stop string."""
        detokenizer = self.tokenizer.detokenizer(plan.prompt_ids)
        text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        ends = [text.index(stop) for stop in plan.sampling.stop if stop in text]
        return text[: min(ends)] if ends else text

    def plan(
        self,
        prompt: str | Sequence[int],
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        record: bool = False,
        **parameters: object,
    ) -> Plan:
        """Check everything and assemble the run. Nothing is decoded yet; the first plan for PEARL starts what
        drafts beside the target, and where its window is `auto` measures how long passes take."""
        chosen = methods.find(self.default_method if method is None else method)
        exit_layer = self.exit_layer if chosen.needs_exit_layer else None
        has_predictor = exit_layer is not None and exit_layer.predictor is not None
        settings = methods.resolve(chosen, parameters, has_predictor=has_predictor)
        sampling = SamplingParams() if sampling is None else sampling
        prompt_ids = self._prompt_ids(prompt)
        context_limit = self.target.limit_for(len(prompt_ids))
        limit = self._room(prompt_ids, sampling.max_new_tokens, context_limit)
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        eos_ids = frozenset() if sampling.ignore_eos else self.target.eos_ids
        capacity = len(prompt_ids) + min(limit, RESERVED)
        for runner in (self._target_runner, self._draft_runner):
            if runner is not None:
                runner.reserve(capacity)
        worker = self._worker(chosen)
        width = self._target_runner.vocab_size
        components = Components(
            self._target_runner, self._draft_runner, sampling, eos_ids, width, seed, capacity, worker, None, record
        )
        if chosen.needs_exit_layer:
            components = self._with_early_exit(chosen, components)
        elif chosen.skips_layers:
            if settings.values["skip"] == "auto":
                settings = settings.with_value("skip", str(self.skips()))
            components = replace(components, draft=self.skipping_runner(str(settings.values["skip"])))
        costs = None
        if settings.values.get("window") == "auto" and worker is not None:
            costs = self._costs(worker, components, len(prompt_ids) + min(limit, RESERVED) // 2, context_limit)
            components = replace(components, window=costs.window)
            settings = settings.with_value("window", costs.window.size)
        stops = StopTexts(sampling.stop, self.tokenizer.detokenizer(prompt_ids).push) if sampling.stop else None
        clock = Clock(synchronizer(self.target.device))
        run = factory.make_run(chosen, settings, components, Context(prompt_ids), limit, stops, clock)
        return Plan(run, chosen, settings, sampling, seed, prompt_ids, limit < sampling.max_new_tokens, costs, record=record)

    def _with_early_exit(self, method: Method, components: Components) -> Components:
        """The target split at the exit layer in place of both models."""
        both = self.early_exit(method)
        both.reserve(components.capacity)
        return replace(components, target=both.target, draft=both.draft, acceptance_predictor=both.acceptance_predictor)

    def early_exit(self, method: Method) -> EarlyExit:
        """The target split at its exit layer. Raises SpecgenError where it has none or cannot be split."""
        if self.exit_layer is None:
            check_split(self.target.model)
            bundled = self.target.name.startswith("demo/")
            raise self.exit_refusal or methods.no_exit_layer(method, None if bundled else self.target.name)
        if self._early_exit is None:
            self._early_exit = EarlyExit(
                self.target.model,
                self.exit_layer.layer,
                self.exit_layer.after,
                self.exit_layer.predictor,
                context_limits=(self.target.context_limit, self.target.rope_boundary),
                reshaping=(self._penalties(), self._penalties()),
            )
        return self._early_exit

    def skipping_runner(self, skip: str) -> LayerSkippingRunner:
        """The target with these layers left out."""
        skips = SkippedLayers.parse(skip, self.target.model.config.get_text_config().num_hidden_layers)
        found = self._skipping.get(str(skips))
        if found is None:
            self._skipping.clear()  # a search tries many
            found = LayerSkippingRunner(self._target_runner, self.target.model, skips, self._penalties())
            self._skipping[str(skips)] = found
        return found

    def _penalties(self) -> PenaltyProcessor | None:
        return self.target.penalties_on(self.target.device, self._target_runner.vocab_size)

    def skips(self) -> SkippedLayers:
        """The layers that layer skipping is fastest without: as kept from an earlier search here, else searched for now."""
        key = {
            "model": measurement_cache.fingerprint(self.target.folder),
            "device": str(self.target.device),
            "dtype": self.target.dtype_name,
            "versions": versions(),
            "machine": measurement_cache.machine(),
        }
        kept = measurement_cache.SkipStore(measurement_cache.cache_folder())
        layers = self.target.model.config.get_text_config().num_hidden_layers
        found = kept.find(key)
        if found is None:
            from specgen.tuning.skip_search import search_skips  # it runs methods of this pair

            check_split(self.target.model, "layer skipping")
            found = search_skips(self, layers).skips
            kept.keep(key, found)
        return SkippedLayers.parse(found, layers)

    def _worker(self, method: Method) -> DraftWorker | None:
        """What drafts beside the target, ready to; None for a method that has no need of it."""
        if not method.is_parallel or self._draft_runner is None:
            return None
        worker: DraftWorker | None = self._process_worker or self._thread_worker
        if worker is None:
            worker = self._thread_worker = ThreadWorker(self._draft_runner)
        worker.ready()
        return worker

    def _costs(self, worker: DraftWorker, components: Components, length: int, context_limit: int) -> timing.ParallelCosts:
        """How long passes take behind a context of about that length: as kept from an earlier run here, else measured now."""
        assert self.draft is not None
        sampling = components.sampling
        key = {
            "models": [measurement_cache.fingerprint(model.folder) for model in (self.target, self.draft)],
            "devices": [device_name(model.device) for model in (self.target, self.draft)],
            "dtypes": [model.dtype_name for model in (self.target, self.draft)],
            "worker": [worker.kind, worker.threads, torch.get_num_threads()],
            "context": 1 << (length - 1).bit_length(),  # contexts up to twice as long share their figures
            "warped": [not sampling.greedy, sampling.top_k > 0, sampling.top_p < 1, self.target.has_penalties],
            "versions": versions(),
            "machine": measurement_cache.machine(),
        }
        kept = measurement_cache.CostStore(measurement_cache.cache_folder())
        found = kept.find(key)
        if found is None:
            endless = replace(components, eos_ids=frozenset())
            drafter = worker.drafter(methods.resolve(methods.METHODS["pearl"], {}), endless, timing.LONGEST_WINDOW)
            shortest = min(context_limit, self.draft.context_limit)
            length = max(1, min(length, max(shortest - timing.LONGEST_WINDOW, shortest // 2)))
            context, widest = Context([1] * length), max(1, min(timing.LONGEST_WINDOW, shortest - length))
            found = timing.measure(self._target_runner, drafter, context, synchronizer(self.target.device), widest)
            kept.keep(key, found)
        return found

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids or prompt == "":
            raise SpecgenError("the prompt is empty", "Give the model something to go on from")
        size = self._target_runner.known_ids
        for position, token in enumerate(ids):
            try:
                ids[position] = index(token)
            except TypeError:
                ids[position] = -1
            if not 0 <= ids[position] < size:
                raise SpecgenError(f"the prompt holds the token id {token!r}", f"Ids go from 0 to {size - 1}")
        return ids

    def _room(self, prompt_ids: list[int], wanted: int, context_limit: int) -> int:
        """How many new tokens there is room for."""
        room = context_limit - len(prompt_ids)
        if room >= 1:
            return min(wanted, room)
        over = len(prompt_ids) + wanted - context_limit
        raise SpecgenError(
            f"the prompt is too long: {len(prompt_ids):,} tokens and {wanted:,} new ones are {over:,} over "
            f"the target's {context_limit:,}",
            "Shorten the prompt; a smaller -n alone is not enough",
        )

    def settle(self) -> None:
        """Warm up, and on a CPU choose torch's number of threads: what a round of this pair is fastest with, here and now.

        The number holds for the whole process, so this is left to programs that own theirs, as the command line does.
        """

        def a_round() -> None:
            context = Context([0, 1])
            if self._draft_runner is not None:
                for length in range(4):
                    self._draft_runner.logits(context, [1] * length, start=length)
            self._target_runner.logits(context, [1] * 4)

        if self.target.device.type == "cpu":
            pick_threads(a_round)
        else:
            a_round()
        self.forget()

    def forget(self) -> None:
        """Drop the caches' contents, so that the next run pays for its whole prompt: for measurements."""
        for runner in (self._target_runner, self._draft_runner):
            if runner is not None:
                runner.forget()
        if self._early_exit is not None:
            self._early_exit.forget()
        if self._process_worker is not None:
            self._process_worker.forget()

    def reference_logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Any:
        """The target's logits [vocabulary] after these tokens, by one pass without a cache: for judging what sessions said."""
        return reference_logits(self.target, prompt_ids, token_ids)

    def close(self) -> None:
        """End what the pair started: the process or the thread that drafts beside the target."""
        for worker in (self._process_worker, self._thread_worker):
            if worker is not None:
                worker.close()
        self._thread_worker = None

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
