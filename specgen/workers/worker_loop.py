"""The main loop of the worker process. It loads one draft model, which drafts for all runs of a pair of models."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.prefill_progress import prefill_reports
from specgen.base.types import Context
from specgen.decoding.adaptive import Adaptive
from specgen.decoding.drafters import ModelDrafter
from specgen.decoding.learned_drafting import Learned
from specgen.decoding.length_policy import LengthPolicy
from specgen.engine.devices import DTYPES
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import ModelSource, describe, load_weights
from specgen.engine.model_runner import ModelRunner, room
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.engine.text.translation import Translation
from specgen.engine.timing import pick_threads
from specgen.methods import factory
from specgen.workers.messages import BeginRun, DraftAnswer, DraftRequest, EndRun, LoadModel
from specgen.workers.shared_drafts import SharedDrafts
from specgen.workers.shared_flags import SharedFlags


def serve(connection: Connection, memory: int, flags: SharedFlags) -> None:
    """Answers requests until the parent process closes its end of `connection`. Reports errors to it and continues.

    `memory` is the descriptor of the shared memory, `flags` are the numbers in it. If the parent dies, another child may still
    hold the connection open: `heartbeat` ends the process then.
    """
    worker = Worker(memory, flags)
    serial, is_drafting = 0, False
    with suppress(EOFError, OSError):
        while True:
            if is_drafting:
                flags.await_request(serial)  # `recv` would let this process sleep
            serial, request = connection.recv()
            is_drafting = isinstance(request, DraftRequest)
            try:
                answer = worker.handle(serial, request)
            except Exception as error:  # noqa: BLE001  every failure is reported to the pair
                traceback.print_exc()
                connection.send((serial, _reportable(error)))
                flags.answer(serial)
            else:
                if isinstance(request, LoadModel | DraftRequest):
                    connection.send_bytes(pickle.dumps((serial, answer)))
                    flags.answer(serial)


class Worker:
    """Handles requests, and keeps the draft model and the active runs (outputs being generated) between them."""

    def __init__(self, memory: int, flags: SharedFlags) -> None:
        self._memory, self._flags = memory, flags
        self._model: Any = None
        self._translation: Translation | None = None
        self._runner: ModelRunner | TranslatedRunner | None = None
        self._runs: dict[int, _Run] = {}
        self._learned: dict[Hashable, Learned] = {}  # by `AdaptiveInputs.key`

    def handle(self, serial: int, request: object) -> DraftAnswer | None:
        """Handles a request with its serial number. Returns the answer to a `DraftRequest`, otherwise None."""
        if isinstance(request, DraftRequest):
            run = self._runs.get(request.run)
            if run is None:  # why it could not begin has been reported, but another run may have skipped that answer
                raise RunError("the draft worker could not begin this run")
            return run.draft(request, partial(self._show, serial))
        if isinstance(request, LoadModel):
            self._load(request)
        elif isinstance(request, BeginRun):
            self._runs[serial] = self._begin(request)
        elif isinstance(request, EndRun):
            self._runs.pop(request.run, None)
        elif self._runner is not None:
            self._runner.clear_cache()
        return None

    def _show(self, serial: int, position: int, token: int) -> bool:
        """Makes a drafted token known to the parent. Returns whether the draft may continue."""
        self._flags.show(serial, position, token)
        return not self._flags.is_cut(serial)

    def _load(self, request: LoadModel) -> None:
        torch.set_num_threads(request.threads)
        source = ModelSource(
            request.name,
            trust_remote_code=request.trust_remote_code,
            backend=request.backend,
            on_mps=request.device.startswith("mps"),
            quantise=request.quantise,
        )
        folder, dtype, device = Path(request.folder), DTYPES[request.dtype], torch.device(request.device)
        self._runner = None  # of a model loaded before
        self._model = load_weights(describe(folder, source), dtype, device)
        self._translation = request.translation
        runner = ModelRunner(self._model)

        def a_draft() -> None:
            for length in range(4):
                runner.logits(Context([0, 1]), [1] * length, start=length)

        a_draft()
        if request.device == "cpu":
            pick_threads(a_draft)  # at most as many as set above

    def _begin(self, request: BeginRun) -> _Run:
        """Constructs the run's drafter and length policy, and runs the draft model over the prompt."""
        components = request.components
        if self._runner is None:
            penalties = None
            if request.penalties is not None:
                penalties = PenaltyProcessor(*request.penalties, components.vocab_size, self._model.device)
            if self._translation is None:
                self._runner = ModelRunner(self._model, penalties)
            else:
                self._runner = TranslatedRunner(ModelRunner(self._model), self._translation, penalties)
        self._runner.reserve(components.capacity)
        shared = SharedDrafts(components, request.window)
        if shared.size:
            shared.map(self._memory, request.offset)
        context = Context(request.prompt_ids)
        if room(self._runner, context) > 0:
            with prefill_reports.to(lambda _, done, total: self._flags.prefill(done, total)):
                self._runner.logits(context)
        drafter = ModelDrafter(factory.draft_setup(replace(components, draft=self._runner)))
        if (adaptive := components.adaptive) is not None and adaptive.key is not None:
            adaptive = replace(adaptive, learned=self._learned.setdefault(adaptive.key, adaptive.learned))
        return _Run(context, drafter, factory.make_policy(request.settings, components.seed, adaptive), shared)


@dataclass(slots=True)
class _Run:
    """What the worker keeps for one run: the generation of one output."""

    context: Context
    drafter: ModelDrafter
    policy: LengthPolicy
    shared: SharedDrafts

    def draft(self, request: DraftRequest, show: Callable[[int, int], bool]) -> DraftAnswer:
        """Drafts as requested. Writes the draft's probabilities and logits to the shared memory, where the run needs them.

        `show` gets each token's number, from 0, and the token. If it returns False, the draft ends.
        """
        start = time.perf_counter()
        if request.committed:
            self.context.extend(request.committed)
        for drafted, accepted in request.observed:
            self.policy.observe(drafted, accepted)
        state = self.policy.state() if isinstance(self.policy, Adaptive) else None
        draft = self.drafter.propose(self.context, self.policy, request.limit, request.unverified, show)
        if draft.tokens and self.shared.size:
            self.shared.write(request.slot, draft)
        predicted = draft.with_predictions(self.policy.predictions).predicted
        seconds = time.perf_counter() - start
        answered = list(draft.entropies), list(draft.top_probs), draft.stop_reason, seconds, predicted, state
        return DraftAnswer(draft.tokens, *answered)


def _reportable(error: Exception) -> SpecgenError:
    if isinstance(error, SpecgenError):
        return error
    if is_out_of_memory(error):
        return RunError("the draft worker ran out of memory", "Try a smaller model")
    return RunError(f"the draft worker failed: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
