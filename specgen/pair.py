"""A loaded target with its draft model, if there is one, and decoding runs on them: what `specgen.load` returns."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from specgen import factory, methods, preparation
from specgen.cost_model.pearl_window import LONGEST_WINDOW, ParallelCosts
from specgen.decoding.components import Components
from specgen.decoding.parallel import DraftWorker
from specgen.decoding.run import Clock, StopTexts
from specgen.engine.decoder_layers import check_llama_structure
from specgen.engine.devices import pick_threads, synchronizer
from specgen.engine.early_exit import EarlyExit
from specgen.engine.exit_files import Description, Exit, FoundExit
from specgen.engine.layer_skipping import LayerSkippingRunner, SkippedLayers
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import LoadedModel
from specgen.engine.model_runner import ModelRunner
from specgen.errors import SpecgenError
from specgen.methods import Method
from specgen.plan import Plan, Result, RunRequest, check_prompt_ids, fitting_tokens, prepared
from specgen.skip_search import NEW_TOKENS
from specgen.traces.summary import Summary
from specgen.traces.trace_writer import RunInfo
from specgen.types import Context, Round, SamplingParams
from specgen.workers.process_worker import ProcessWorker
from specgen.workers.thread_worker import ThreadWorker


class Pair:
    """A target and its draft model, for any number of runs, also alternating ones. Caches keep the prefix that runs share."""

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
        self._target_runner = target.runner(target.penalties(target.device, width))
        self._draft_runner: ModelRunner | None = None
        if draft is not None:  # with the target's penalties too: the draft has to predict the penalised target
            self._draft_runner = draft.runner(target.penalties(draft.device, width))
        self._early_exit: EarlyExit | None = None
        self._skipping: dict[str, LayerSkippingRunner] = {}
        self._parallel_costs: dict[tuple[Any, ...], ParallelCosts] = {}
        self._fastest_skips: str | None = None

    @property
    def default_method(self) -> str:
        return methods.default_name(has_draft_model=self.draft is not None)

    @property
    def runners(self) -> tuple[ModelRunner, ModelRunner | None]:
        """The target's and the draft's, for timing passes."""
        return self._target_runner, self._draft_runner

    @cached_property
    def exit_layer(self) -> Exit | None:
        """EESD's trained part. One that was found rather than named is read on first use."""
        return None if self.found_exit is None else self.found_exit.load()

    @property
    def exit_refusal(self) -> SpecgenError | None:
        """Why the exit layer that was found cannot be used."""
        return None if self.found_exit is None else self.found_exit.refusal

    @property
    def exit_description(self) -> Description | None:
        """The exit layer's description, without reading its weights; None where there is none."""
        if self.found_exit is not None:
            return self.found_exit.description
        return None if self.exit_layer is None else self.exit_layer.description

    @property
    def has_predictor(self) -> bool:
        """Whether there is an exit layer with a predictor of acceptance."""
        return self.exit_layer is not None and self.exit_layer.predictor is not None

    def devices(self, method: Method) -> list[torch.device]:
        """The devices of the method's models."""
        draft = [self.draft] if self.draft is not None and method.needs_draft_model else []
        return [model.device for model in (self.target, *draft)]

    @property
    def all_devices(self) -> list[torch.device]:
        return [model.device for model in (self.target, self.draft) if model is not None]

    # runs

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

        `record` adds to each round's verdict how far draft and target agree, which takes time.
        """
        self.prepare(prompt, method, sampling, **parameters)
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
        """Decode to the end. The summary has the output's perplexity with `perplexity`, and always for a lossy method."""
        self.prepare(prompt, method, sampling, **parameters)
        plan = self.plan(prompt, method, sampling, record=record, **parameters)
        rounds = list(plan.run.rounds())
        summary = Summary(plan.method.name, rounds)
        if perplexity or not plan.method.lossless:
            summary.add_log_likelihood(self.log_likelihood(plan.info.prompt_ids, summary.token_ids))
        text = self.text(plan, summary.token_ids)
        return Result(text, summary.token_ids, rounds, summary.as_dict(text, plan.run.finish_reason or "length"))

    def prepare(
        self, prompt: str | Sequence[int], method: str | None = None, sampling: SamplingParams | None = None, **parameters: object
    ) -> None:
        """Do what a plan with these arguments needs first: start the draft worker, measure PEARL's window, search the layers to
        skip. What was done before, here or on this machine, is not repeated. Raises SpecgenError as `plan` does."""
        request = self._request(prompt, method, sampling, parameters)
        worker = self._worker if request.method.schedule == "parallel" else None
        if worker is not None:
            if request.settings.values["window"] == "auto":
                self.parallel_costs(request.typical_length, request.sampling)
            worker.ready()
        if request.settings.values.get("skip") == "auto" and self._fastest_skips is None:
            self._fastest_skips = preparation.fastest_skips(self.target, self.skipping_speed)

    def plan(
        self,
        prompt: str | Sequence[int],
        method: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        record: bool = False,
        **parameters: object,
    ) -> Plan:
        """Check the arguments and assemble a run. Starts, measures and decodes nothing.

        Raises SpecgenError for a mistake, and for a setting that is `auto` and has to be prepared before.
        """
        request = self._request(prompt, method, sampling, parameters)
        chosen, settings, sampling = request.method, request.settings, request.sampling
        self._reserve(request.capacity)
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        eos_ids = frozenset[int]() if sampling.ignore_eos else self.target.eos_ids
        components = replace(self._components(sampling, request.capacity), seed=seed, eos_ids=eos_ids, record=record)
        worker = costs = None
        if chosen.needs_exit_layer:
            components = self._with_early_exit(chosen, components)
        elif chosen.skips_layers:
            if settings.values["skip"] == "auto":
                settings = settings.with_value("skip", prepared(chosen, self._fastest_skips))
            components = replace(components, draft=self.skipping_runner(str(settings.values["skip"])))
        elif chosen.is_parallel and self.draft is not None:
            worker = self._worker
            if settings.values["window"] == "auto":
                costs = prepared(chosen, self._parallel_costs.get(self._bucket(request.typical_length, sampling)))
                components = replace(components, window=costs.window)
                settings = settings.with_value("window", costs.window.size)
        prompt_ids, limit = request.prompt_ids, request.limit
        stops = StopTexts(sampling.stop, self.tokenizer.detokenizer(prompt_ids).push) if sampling.stop else None
        clock = Clock(synchronizer(self.target.device))
        run = factory.make_run(chosen, settings, components, Context(prompt_ids), limit, stops, clock, worker)
        info = RunInfo(
            chosen.name,
            settings.as_dict(with_policy=chosen.any_policy),
            chosen.lossless,
            self.target.name,
            self.draft.name if self.draft is not None and chosen.needs_draft_model else None,
            str(self.target.device),
            self.target.dtype_name,
            prompt_ids,
            replace(sampling, seed=seed),
            costs,
        )
        return Plan(run, chosen, settings, info, limit < sampling.max_new_tokens, record)

    def text(self, plan: Plan, token_ids: Sequence[int]) -> str:
        """The answer's text, up to a stop string."""
        detokenizer = self.tokenizer.detokenizer(plan.info.prompt_ids)
        text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        ends = [text.index(stop) for stop in plan.info.sampling.stop if stop in text]
        return text[: min(ends)] if ends else text

    def _request(
        self,
        prompt: str | Sequence[int],
        method: str | None,
        sampling: SamplingParams | None,
        parameters: dict[str, object],
    ) -> RunRequest:
        chosen = methods.find(self.default_method if method is None else method)
        settings = methods.resolve(chosen, parameters, has_predictor=chosen.needs_exit_layer and self.has_predictor)
        sampling = SamplingParams() if sampling is None else sampling
        is_empty = isinstance(prompt, str) and not prompt  # tokenizers may add special tokens to an empty text
        ids = [] if is_empty else self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = check_prompt_ids(ids, self._target_runner.num_embeddings)
        limit = fitting_tokens(len(prompt_ids), sampling.max_new_tokens, self.target.max_tokens(len(prompt_ids)))
        return RunRequest(chosen, settings, sampling, prompt_ids, limit)

    def _reserve(self, capacity: int) -> None:
        for runner in (self._target_runner, self._draft_runner):
            if runner is not None:
                runner.reserve(capacity)

    def _components(self, sampling: SamplingParams, capacity: int) -> Components:
        """Both models' runners, without end-of-sequence ids."""
        width = self._target_runner.vocab_size
        return Components(self._target_runner, self._draft_runner, sampling, frozenset(), width, 0, capacity)

    # early exit and layer skipping

    def _with_early_exit(self, method: Method, components: Components) -> Components:
        """The target split at its exit layer in place of both models."""
        both = self.early_exit(method)
        both.reserve(components.capacity)
        return replace(components, target=both.target, draft=both.draft, acceptance_predictor=both.acceptance_predictor)

    def early_exit(self, method: Method) -> EarlyExit:
        """The target split at its exit layer. Raises SpecgenError where it has none or cannot be split."""
        if self.exit_layer is None:
            check_llama_structure(self.target.model)
            bundled = self.target.name.startswith("demo/")
            raise self.exit_refusal or methods.no_exit_layer(method, None if bundled else self.target.name)
        if self._early_exit is None:
            self._early_exit = EarlyExit(
                self.target.model,
                self.exit_layer.layer,
                self.exit_layer.description.after,
                self.exit_layer.predictor,
                penalties=(self._penalties(), self._penalties()),
            )
        return self._early_exit

    def skipping_runner(self, skip: str) -> LayerSkippingRunner:
        """The target without these layers."""
        skips = SkippedLayers.parse(skip, self.target.model.config.get_text_config().num_hidden_layers)
        found = self._skipping.get(str(skips))
        if found is None:
            self._skipping.clear()  # a search tries many
            found = LayerSkippingRunner(self._target_runner, self.target.model, skips, self._penalties())
            self._skipping[str(skips)] = found
        return found

    def skipping_speed(self, skips: SkippedLayers, prompts: Sequence[Sequence[int]]) -> float:
        """Measured tokens per second after the prefill, of greedy decoding with these layers skipped."""
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        tokens, seconds = 0, 0.0
        for ids in prompts:
            for round_ in self.plan(ids, "selfsd", sampling, skip=str(skips)).run.rounds():
                if round_.mode != "prefill":
                    tokens += len(round_.token_ids)
                    seconds += sum(round_.seconds.values())
        return tokens / seconds if seconds else 0.0

    def _penalties(self) -> PenaltyProcessor | None:
        return self.target.penalties(self.target.device, self._target_runner.vocab_size)

    # parallel decoding

    @property
    def _worker(self) -> DraftWorker | None:
        """What runs the draft model during the target's passes; None without a draft model."""
        if self._process_worker is None and self._thread_worker is None and self._draft_runner is not None:
            self._thread_worker = ThreadWorker(self._draft_runner)
        return self._process_worker or self._thread_worker

    def parallel_costs(self, context_length: int, sampling: SamplingParams | None = None) -> ParallelCosts:
        """Pass times of both models while both run, after a context of about that length: what PEARL's window follows from.

        Measured once for each range of context lengths and kind of sampling. Starts the draft worker. Needs a draft model.
        """
        sampling, worker = SamplingParams() if sampling is None else sampling, self._worker
        assert worker is not None
        assert self.draft is not None
        bucket = self._bucket(context_length, sampling)
        if bucket not in self._parallel_costs:
            capacity = context_length + LONGEST_WINDOW
            self._reserve(capacity)
            components = self._components(sampling, capacity)
            self._parallel_costs[bucket] = preparation.parallel_costs(
                self.target, self.draft, worker, components, context_length, bucket
            )
        return self._parallel_costs[bucket]

    def _bucket(self, context_length: int, sampling: SamplingParams) -> tuple[Any, ...]:
        """Runs with the same bucket share their pass times: contexts up to twice as long, sampled in the same way."""
        longest = 1 << (context_length - 1).bit_length()
        warped = not sampling.greedy, sampling.top_k > 0, sampling.top_p < 1, self.target.has_penalties
        return longest, *warped, self._process_worker is not None

    # measuring and judging outputs

    def log_likelihood(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """Log-likelihood (nats) of `token_ids` after the prompt, under the target at temperature 1. Takes one target pass over
        what is not cached."""
        runner = self.target.runner() if self.target.has_penalties else self._target_runner
        return runner.log_likelihood(prompt_ids, token_ids)

    def reference_logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Any:
        """The target's logits [vocabulary] after these tokens, by one pass without a cache: to check what a run computed."""
        return self.target.reference_logits(prompt_ids, token_ids)

    def warm_up(self) -> None:
        """Run some passes, and on a CPU set torch's number of threads to the one with which a round of this pair is fastest.

        The number holds for the whole process, so this is for programs that own theirs, as the command line does.
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
        """Drop the caches' contents, so that the next run computes its whole prompt: for measurements."""
        for runner in (self._target_runner, self._draft_runner):
            if runner is not None:
                runner.clear_cache()
        if self._early_exit is not None:
            self._early_exit.clear_cache()
        if self._process_worker is not None:
            self._process_worker.forget()

    def close(self) -> None:
        """End the draft worker's process or thread."""
        for worker in (self._process_worker, self._thread_worker):
            if worker is not None:
                worker.close()
        self._thread_worker = None

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
