"""The server that drafts for the runs of a pair of models (PEARL), in a worker process or in the
process of the pair."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.types import Context, Draft
from specgen.decoding.chain import ModelDrafter
from specgen.decoding.drafting import Setup
from specgen.decoding.policy_base import LengthPolicy
from specgen.engine.devices import inference, pick_threads, upload
from specgen.engine.loaded_model import load_weights
from specgen.engine.model_files import ModelSource, describe
from specgen.engine.model_runner import ModelRunner
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.precision import Precision
from specgen.engine.text.grammar import GrammarCompiler
from specgen.engine.text.token_bytes import TokenBytes
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.engine.text.translation import Translation
from specgen.workers.process import (
    ANSWERED,
    ASKED,
    CUT,
    DRAFTED,
    MOST_SHOWN,
    TOKEN_BITS,
    not_sent,
    shared_words,
    watch,
)

# A draft, the seconds that it took and those in which its thread ran, and what the length policy
# had learned before it, where only the worker knows this.
Answer = tuple[Draft, float, float, Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a length policy learns from a verified draft: see `LengthPolicy.observe`, and
    `LengthPolicy.in_turn`."""

    drafted: int
    accepted: int
    in_turn: bool

    def tell(self, policy: LengthPolicy) -> None:
        policy.in_turn = self.in_turn
        policy.observe(self.drafted, self.accepted)


class SharedDrafts:
    """The part of the shared memory that one run uses for drafts: their `probs` if the run samples,
    their `logits` if it records.

    There are two slots, 0 and 1, because one draft is verified while the next is made. `window` is
    the largest number of tokens in a draft. `size` is in bytes; 0 for a run that needs neither
    tensor.
    """

    def __init__(self, setup: Setup, window: int) -> None:
        needed = {"probs": not setup.sampling.greedy, "logits": setup.record}
        self._fields = [name for name, is_needed in needed.items() if is_needed]
        self._shape = len(self._fields), 2, window, setup.vocab_size
        self.size = 4 * prod(self._shape)

    def map(self, memory: int, offset: int) -> None:
        """Maps `size` bytes of the file with the descriptor `memory`, beginning at `offset`. The
        file must be large enough already."""
        if self.size:
            words = torch.frombuffer(
                mmap(memory, offset + self.size), dtype=torch.float32, offset=offset
            )
            self._tensor = words.view(self._shape)

    def write(self, slot: int, draft: Draft) -> Draft:
        """Writes a draft's tensors to a slot, and returns the draft without them.

        Pads a smaller draft vocabulary: `probs` with zeros, `logits` with -inf.
        """
        for number, name in enumerate(self._fields if draft.tokens else ()):
            memory = self._tensor[number, slot, : len(draft.tokens)]
            values = getattr(draft, name)
            memory[:, : values.shape[-1]].copy_(values)
            memory[:, values.shape[-1] :] = 0.0 if name == "probs" else float("-inf")
        return replace(draft, probs=None, logits=None)

    def read(self, slot: int, draft: Draft, device: torch.device) -> Draft:
        """Returns the draft with the tensors of the slot: copies on `device` if this is a GPU,
        otherwise views of the shared memory.

        Views stay valid until the draft after the next one is started.
        """
        if not self._fields or not draft.tokens:
            return draft
        tensors = (upload(tensor, device) for tensor in self._tensor[:, slot, : len(draft.tokens)])
        fields: dict[str, Any] = dict(zip(self._fields, tensors, strict=True))
        return replace(draft, **fields)


@dataclass(slots=True)
class _Run:
    """What is kept for one run: the generation of one output."""

    context: Context
    drafter: ModelDrafter
    policy: LengthPolicy
    shared: SharedDrafts | None


class DraftServer:
    """Keeps the draft model and the active runs (outputs being generated) between requests.

    `runner` runs the draft model; None: it is loaded by the request `load`. `memory` is the
    descriptor of the memory shared with the pair's process; None in that process itself. `show` is
    called with each drafted token's number, from 0, and the token; if it returns False, the draft
    ends.
    """

    def __init__(self, runner: Any = None, memory: int | None = None) -> None:
        self.show: Callable[[int, int], bool] = lambda position, token: True
        self._runner = runner
        self._memory = memory
        self._model: Any = None
        self._translation: Any = None
        self._runs: dict[int, _Run] = {}
        self._compiler: GrammarCompiler | None = None
        self._learned: dict[Hashable, Any] = {}  # see `LengthPolicy.share`

    def load(
        self,
        folder: Path,
        source: ModelSource,
        precision: Precision,
        device: torch.device,
        threads: int,
        translation: Translation | None,
    ) -> None:
        """Loads the draft model from its folder (or GGUF file) onto `device`.

        `threads` is the number of CPU threads to use. `translation` is between the target's tokens
        and the draft model's; None if both have the same.
        """
        torch.set_num_threads(threads)
        self._runner = None  # of a model loaded before
        files = describe(folder, source, on_mps=device.type == "mps")
        self._model = load_weights(files, precision, [device])
        self._translation = translation
        runner = ModelRunner(self._model)

        def a_draft() -> None:
            for length in range(4):
                runner.logits(Context([0, 1]), [1] * length, start=length)

        a_draft()
        if device.type == "cpu":
            pick_threads(a_draft)  # at most as many as set above

    def learn_tokens(self, tokens: TokenBytes) -> None:
        """Takes the target's tokens, which constraints need."""
        self._compiler = GrammarCompiler(tokens)

    @inference
    def begin(
        self,
        run: int,
        prompt_ids: Sequence[int],
        policy: LengthPolicy,
        setup: Setup,
        window: int,
        offset: int,
        penalties: Any,
        ends: frozenset[int] | None,
    ) -> None:
        """Makes the run's drafter, and runs the draft model over the prompt.

        `run` is the run's number in later requests, `policy` ends its drafts, `window` is the
        largest number of tokens in a draft. `offset` (bytes) is where the run's part of the shared
        memory begins. `penalties` are the target's generation config and end-of-sequence ids; None
        if the target has no penalties, or if the runner applies them already. `ends` are the tokens
        that may end an output with a grammar; None for a run without one. The target's tokens have
        to be known for it: see `learn_tokens`.
        """
        if self._runner is None:
            self._runner = self._make_runner(setup.vocab_size, penalties)
        if setup.capacity:
            self._runner.reserve(setup.capacity)
        shared = None
        if self._memory is not None:
            shared = SharedDrafts(setup, window)
            shared.map(self._memory, offset)
        constraint = None
        if ends is not None and setup.sampling.grammar is not None:
            assert self._compiler is not None
            constraint = self._compiler.constraint(setup.sampling.grammar, ends)
        context = Context(prompt_ids, setup.sampling.penalties, constraint)
        if self._runner.room(context) > 0:
            self._runner.logits(context)
        policy.share(self._learned)
        drafter = ModelDrafter(replace(setup, draft=self._runner))
        self._runs[run] = _Run(context, drafter, policy, shared)

    def _make_runner(self, vocab_size: int, penalties: Any) -> ModelRunner | TranslatedRunner:
        """Returns a runner of the loaded model that takes and answers in the target's tokens;
        `penalties` are as in `begin`."""
        processor = None
        if penalties is not None:
            generation, eos_ids = penalties
            processor = PenaltyProcessor(generation, eos_ids, vocab_size, self._model.device)
        if self._translation is None:
            return ModelRunner(self._model, processor)
        return TranslatedRunner(ModelRunner(self._model), self._translation, processor)

    @inference
    def draft(
        self,
        run: int,
        committed: Sequence[int],
        unverified: Sequence[int],
        observed: Sequence[Observed],
        limit: int,
        slot: int,
    ) -> Answer:
        """Drafts at most `limit` tokens. Returns the draft, the seconds that it took, those in
        which this thread ran, and the policy's state before it.

        `committed` are the output's new tokens since the last request. `unverified` are drafted
        tokens after them that the target is still verifying. `observed` are the drafts verified
        since the last request, for the length policy. The draft's probabilities and logits are
        written to `slot` (0 or 1) of the shared memory, if there is one. The state is None where
        the pair's process knows it (see `LengthPolicy.learns_from_tokens`).
        """
        own_start = time.thread_time()
        start = time.perf_counter()
        active = self._runs[run]
        policy = active.policy
        if committed:
            active.context.extend(committed)
        for verified in observed:
            verified.tell(policy)
        state = policy.state() if policy.learns_from_tokens else None
        draft = active.drafter.propose(active.context, policy, limit, unverified, self.show)
        draft = draft.with_predictions(policy.predictions)
        if active.shared is not None:
            draft = active.shared.write(slot, draft)
        return draft, time.perf_counter() - start, time.thread_time() - own_start, state

    def end(self, run: int, observed: Sequence[Observed]) -> None:
        """Ends a run. `observed` are its last drafts, for the length policy."""
        ended = self._runs.pop(run, None)
        if ended is not None:
            for verified in observed:
                verified.tell(ended.policy)

    def forget(self) -> None:
        """Clears the draft model's KV cache."""
        if self._runner is not None:
            self._runner.clear_cache()


def serve(connection: Connection, memory: int) -> None:
    """Answers requests until the parent process closes its end of `connection`. Reports errors to
    it and continues.

    `memory` is the descriptor of the shared memory.
    """
    server = DraftServer(None, memory)
    words = shared_words(memory)
    serial = 0
    name = ""

    def show(position: int, token: int) -> bool:
        if position < MOST_SHOWN:
            words[DRAFTED + position] = serial << TOKEN_BITS | token
        return words[CUT] != serial

    def is_asked() -> bool:
        return words[ASKED] > serial

    server.show = show
    with suppress(EOFError, OSError):
        while True:
            if name == "draft":
                watch(is_asked)  # `recv` would let this process sleep
            message = connection.recv_bytes()
            serial += 1  # of a message that cannot be read
            name = ""
            try:
                serial, name, arguments = _unpickled(message)
                answer = getattr(server, name)(*arguments)
            except Exception as error:  # noqa: BLE001  every failure is reported to the pair
                traceback.print_exc()
                answer = _reportable(error)
            connection.send_bytes(pickle.dumps((serial, answer)))
            words[ANSWERED] = serial


def _unpickled(message: bytes) -> Any:
    try:
        return pickle.loads(message)  # noqa: S301  of the parent process
    except (ImportError, AttributeError) as error:
        raise not_sent(error) from error


def _reportable(error: Exception) -> SpecgenError:
    if isinstance(error, SpecgenError):
        return error
    if is_out_of_memory(error):
        return RunError("the draft worker ran out of memory", "Try a smaller model")
    return RunError(
        f"the draft worker failed: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    )
