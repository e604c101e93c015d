"""The loaded models of a pair: their runners, KV caches and warm-up, and what runs have measured
and learned with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from specgen.base.errors import SpecgenError
from specgen.base.skipped_layers import SkippedLayers
from specgen.base.types import SamplingParams
from specgen.decoding.run import Schedule, Turns
from specgen.engine.draft_model import DraftModel, DraftModelRunner
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.model_runner import DraftRunner, ModelRunner, Runners, run_some_passes
from specgen.engine.native.native_model import NativeModel
from specgen.engine.parts.own_layers import LayerSkippingRunner
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.text.grammar import GrammarCompiler, GrammarConstraint
from specgen.engine.text.tokenizer import Tokenizer
from specgen.models.measurements import Measurements
from specgen.models.models import K, Kept
from specgen.models.parts import PartStore
from specgen.workers.process import DraftProcess
from specgen.workers.worker import DraftWorker


def worker_of(draft: DraftModel, process: DraftProcess | None = None) -> DraftWorker:
    """Returns a worker that runs the draft model in a process of its own: in `process`, or in one
    that is started when it is first needed."""
    return DraftWorker.of_process(
        process, draft.files, draft.precision, draft.device, draft.translation
    )


class LoadedModels:
    """A target and its draft model (or none), and what drafts for the target. Implements
    `models.Models`.

    The KV caches stay between runs: a run reuses the cached tokens with which its own context
    begins. `drafts_apart`: a process of its own runs the draft model for PEARL; otherwise this one
    does. `worker` has such a process that was started early, to load the draft model while this one
    loads the target; None: it is started when it is needed. Models with the same target share its
    `parts` and `lock`.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: DraftModel | None,
        worker: DraftWorker | None = None,
        *,
        drafts_apart: bool = False,
        parts: PartStore | None = None,
        lock: Turns | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.tokenizer: Tokenizer = target.tokenizer
        self.measurements = Measurements(target, draft)
        self.lock = Turns() if lock is None else lock
        self.drafts_apart = drafts_apart
        self._worker = None if worker is None else self._with_penalties(worker)
        self._target_runner = target.runner(
            target.penalties(target.device, target.shape.vocab_size)
        )
        self._draft_runner: DraftModelRunner | None = None
        self.parts = (
            PartStore(target, self._target_runner, self.penalties) if parts is None else parts
        )
        # the layers that the last such run skipped, and its runner
        self._skipping: tuple[str, LayerSkippingRunner] | None = None
        self._kept: dict[type[Kept], Any] = {}
        self._compiler: GrammarCompiler | None = None
        self._reserved = 0  # tokens
        self._is_closed = False

    def devices(self, *, with_draft: bool = True) -> list[torch.device]:
        """Returns the target's devices, and unless `with_draft` is False the draft model's if there
        is one."""
        devices = list(self.target.devices)
        if with_draft and self.draft is not None:
            devices += self.draft.devices
        return devices

    # what drafts

    def plain(self) -> Runners:
        return Runners(self._target_runner)

    def with_draft_model(self) -> Runners | None:
        if self.draft is None:
            return None
        # with the target's penalties: it has to predict their effect
        if self._draft_runner is None:
            self._draft_runner = self.draft.draft_runner(self.penalties(self.draft.device))
        return Runners(self._target_runner, self._draft_runner)

    def has_part(self, kind: str) -> bool:
        return self.parts.can_run(kind)

    def with_part(self, kind: str, name: str) -> Runners | None:
        return self.parts.runners(kind, name)

    def without_layers(self, skip: str) -> Runners:
        """See `Models`. Only the last runner made is kept for reuse, because a search for the
        fastest layers makes many."""
        skips = SkippedLayers.parse(skip, self.target.shape.num_layers)
        if self._skipping is None or self._skipping[0] != str(skips):
            runner = LayerSkippingRunner(
                self._target_runner, self.target.model, skips, self.penalties()
            )
            self._skipping = str(skips), runner
        return Runners(self._target_runner, self._skipping[1])

    def worker(self) -> DraftWorker | None:
        """See `Models`. Raises SpecgenError if the models are closed."""
        self.check_open()
        if self.draft is None:
            return None
        if self._worker is None and self.drafts_apart:
            self._worker = self._with_penalties(worker_of(self.draft))
        if self._worker is None:
            if self.draft.drafts_blocks:  # token by token here: see `methods.pearl`
                runner: DraftRunner | None = self.draft.runner(self.penalties(self.draft.device))
            else:
                runners = self.with_draft_model()
                runner = None if runners is None else runners.draft
            assert runner is not None
            self._worker = DraftWorker.in_this_process(runner, self.target.device)
        return self._worker

    def _with_penalties(self, worker: DraftWorker) -> DraftWorker:
        """Returns the worker, which has to predict the effect of the target's penalties."""
        if self.target.has_penalties:
            worker.penalties = self.target.generation, self.target.eos_ids
        return worker

    def kept(self, kind: type[K]) -> K:
        if kind not in self._kept:
            self._kept[kind] = kind(self)
        return cast("K", self._kept[kind])

    def penalties(self, device: torch.device | None = None) -> PenaltyProcessor | None:
        """Returns the processor that applies the target's penalties to logits on `device` (None:
        the target's); None if the target has no penalties."""
        return self.target.penalties(device or self.target.device, self._target_runner.vocab_size)

    def checked(self, schedule: Schedule) -> Schedule:
        return self.measurements.checked(schedule)

    def eos_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset() if sampling.ignore_eos else frozenset(self.target.eos_ids)

    def constraint(self, sampling: SamplingParams) -> GrammarConstraint | None:
        """See `Models`. The output may also end with a special token that is a stop string."""
        if sampling.grammar is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler.of(self.tokenizer)
        stops = map(self.tokenizer.special_id, sampling.stop)
        ends = self.eos_ids(sampling) | {token for token in stops if token is not None}
        return self._compiler.constraint(sampling.grammar, ends)

    def capacity(self, tokens: int) -> int:
        return max(tokens, self._reserved)

    def runners(self) -> list[ModelRunner | DraftModelRunner]:
        """Returns the runners of the target and of the draft model, as far as they are loaded in
        this process."""
        runners: list[ModelRunner | DraftModelRunner] = [self._target_runner]
        if self._draft_runner is not None:
            runners.append(self._draft_runner)
        return runners

    # between runs

    def log_likelihood(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """See `Pair.log_likelihood`."""
        runner = self.target.runner() if self.target.has_penalties else self._target_runner
        return runner.log_likelihood(prompt_ids, token_ids)

    def warm_up(
        self,
        announce: Callable[[str], None] = lambda _: None,
        *,
        sequential: bool = False,
        parallel: bool = False,
        remembered: bool = False,
    ) -> None:
        """See `Pair.warm_up`."""
        needs_draft = sequential or (parallel and not self.drafts_apart)
        if self.draft is not None and self.draft.refusal is None and needs_draft:
            announce(f"loading {self.draft.name}")
            self.with_draft_model()
        announce("warming up")
        some_passes = partial(run_some_passes, self._target_runner, self._draft_runner)
        if "cpu" in {runner.device.type for runner in self.runners()}:
            self.measurements.set_threads(some_passes, remembered=remembered)
        else:
            some_passes()
        self.forget()

    def reserve(self, capacity: int) -> None:
        """Has all later runs allocate their KV caches for at least `capacity` tokens."""
        self._reserved = max(self._reserved, capacity)

    def forget(self) -> None:
        """Empties all KV caches and forgets earlier outputs, so that the next run computes
        everything. For measurements."""
        for kept in self._kept.values():
            kept.forget()
        for runner in self.runners():
            runner.clear_cache()
        self.parts.clear_caches()
        if self._worker is not None:
            self._worker.forget()

    def capture_seconds(self) -> float:
        """Returns the seconds that this process has spent so far on capturing passes of the models
        as CUDA graphs."""
        models = [self.target.model]
        if self.draft is not None and self._draft_runner is not None:
            models.append(self.draft.model)
        captured = (model.captures for model in models if isinstance(model, NativeModel))
        return float(sum(captures.seconds for captures in captured if captures is not None))

    def close(self) -> None:
        """Ends the process that runs the draft model, and stores what runs have learned."""
        if not self._is_closed:
            for kept in self._kept.values():
                kept.save()
        self._is_closed = True
        if self._worker is not None:
            self._worker.close()

    def check_open(self) -> None:
        """Raises SpecgenError if the models are closed."""
        if self._is_closed:
            raise SpecgenError("the pair of models is closed", "Load it again, or close it later")
