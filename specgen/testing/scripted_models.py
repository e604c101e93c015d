"""A model runner and an acceptance predictor whose outputs are known, for tests of drafters,
verifiers and complete runs: models of a few tokens, whose passes cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from specgen import methods
from specgen.base.types import Constraint, Context, Round, SamplingParams
from specgen.decoding.run import Run, Schedule, Turns
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.model_runner import (
    TOKEN_BY_TOKEN,
    AcceptancePredictor,
    Runners,
    SizedRunner,
)
from specgen.engine.text.grammar import GrammarCompiler
from specgen.engine.text.token_bytes import TokenBytes
from specgen.engine.text.tokenizer import Tokenizer
from specgen.methods.base import Method, Request
from specgen.methods.drafting_knowledge import AUTO, DraftingCase, DraftingKnowledge
from specgen.methods.learned_drafting import AdaptiveInputs, DraftingCosts, Learned
from specgen.methods.pass_times import PassTimes

VOCAB = 6
PROMPT = [0, 3, 1, 2, 3, 1]  # it contains matches for prompt lookup
COSTS = ("draft_cost", "verify_cost")  # settings of `adaptive`


class TableRunner(SizedRunner):
    """A model runner whose logits [vocabulary] depend on the last two tokens alone: a row of a
    random table."""

    traits = TOKEN_BY_TOKEN
    vocab_size = num_embeddings = VOCAB
    context_limit = 1000
    device = torch.device("cpu")

    def __init__(self, seed: int, scale: float = 1.5) -> None:
        self.table = (
            torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
        )

    def row(self, ids: Sequence[int]) -> torch.Tensor:
        return self.table[ids[-2], ids[-1]]

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        paths = [context.ids[-2:]]
        for node, token in enumerate(draft):
            paths.append([*paths[node if parents is None else parents[node] + 1], token])
        assert len(context) + max(map(len, paths)) - 2 <= self.context_limit
        rows = torch.stack([self.row(path) for path in paths[start:]])
        return ModelOutput(rows, rows)


class TopProbPredictor:
    """An acceptance predictor whose score is the draft's top probability: a `TableRunner` returns
    its logits as hidden states."""

    def begin(self, context: Context) -> None:
        pass

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        return draft_hidden.softmax(dim=-1).max()


class ScriptedRunners(Runners):
    """Runners without caches."""

    def reserve(self, capacity: int) -> None: ...


class ScriptedKnowledge(DraftingKnowledge):
    """Knows the costs of drafting that the settings give; 0.1 target passes where they give
    none."""

    def inputs(self, case: DraftingCase) -> AdaptiveInputs:
        values = case.settings.values
        drafting, verification = (
            0.1 if values[name] == AUTO else float(values[name]) for name in COSTS
        )
        costs = DraftingCosts(drafting, verification)
        return AdaptiveInputs(costs, Learned.prior(costs), in_parallel=case.in_parallel)


class ScriptedPassTimes(PassTimes):
    """Measures nothing."""

    def costs(self, context_length: int, sampling: SamplingParams, *, record: bool = False) -> Any:
        return None


class ScriptedModels:
    """Implements `Models` with these model runners: the same draft for each method."""

    measurements: Any = None

    def __init__(
        self,
        target: Any,
        draft: Any,
        eos: Iterable[int] = (),
        worker: Any = None,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
        predictor: AcceptancePredictor | None = None,
    ) -> None:
        ours, theirs = tokenizers or (None, None)
        self.lock = Turns()
        self.tokenizer: Any = ours
        self.target: Any = SimpleNamespace(device=target.device, name="demo/target")
        self.draft: Any = None
        if draft is not None:
            self.draft = SimpleNamespace(refusal=None, drafts_blocks=False, tokenizer=theirs)
        self._plain = ScriptedRunners(target)
        self._drafting = None if draft is None else ScriptedRunners(target, draft, None, predictor)
        self._eos = frozenset(eos)
        self._worker = worker

    def plain(self) -> Runners:
        return self._plain

    def with_draft_model(self) -> Runners | None:
        return self._drafting

    def has_part(self, kind: str) -> bool:
        return False

    def with_part(self, kind: str, name: str) -> Runners | None:
        return self._drafting

    def without_layers(self, skip: str) -> Runners:
        assert self._drafting is not None
        return self._drafting

    def worker(self) -> Any:
        return self._worker

    def kept(self, kind: type[Any]) -> Any:
        scripted: dict[Any, Any] = {
            DraftingKnowledge: ScriptedKnowledge,
            PassTimes: ScriptedPassTimes,
        }
        return scripted.get(kind, kind)(self)

    def capacity(self, tokens: int) -> int:
        return 0  # these runners have no caches

    def checked(self, schedule: Schedule) -> Schedule:
        return schedule

    def eos_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return self._eos

    def constraint(self, sampling: SamplingParams) -> Constraint:
        assert sampling.grammar is not None
        return letters_compiler().constraint(sampling.grammar, self._eos)


@cache
def letters_compiler() -> GrammarCompiler:
    """Makes constraints for a tokenizer whose tokens are the letters a, b, c, ..."""
    letters = "abcdef"[:VOCAB]
    ids = {letter.encode(): number for number, letter in enumerate(letters)}
    pipeline: Any = SimpleNamespace(
        encode=lambda text, **_: SimpleNamespace(ids=[ids.get(x.encode(), 0) for x in text])
    )
    return GrammarCompiler(TokenBytes(list(ids), {}, ids, {}, pipeline))


TOP_PROB = TopProbPredictor()


def scripted_run(
    method: Method | str,
    settings: Mapping[str, object],
    target: Any,
    draft: Any,
    sampling: SamplingParams,
    *,
    eos: Iterable[int] = (),
    seed: int = 0,
    worker: Any = None,
    prompt: Sequence[int] = PROMPT,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    predictor: AcceptancePredictor | None = TOP_PROB,
) -> Run:
    """A run of a method with these model runners, ready to start. Nothing is measured."""
    method = methods.find(method) if isinstance(method, str) else method
    resolved = methods.resolve(method, {**method.unmeasured, **settings})
    policy = None if resolved.policy is None else methods.POLICIES[resolved.policy]
    limit = sampling.max_new_tokens
    request = Request(method, resolved, policy, sampling, list(prompt), limit, own_seed=seed)
    models: Any = ScriptedModels(target, draft, eos, worker, tokenizers, predictor)
    return method.start(models, request)


def named_method(
    method: Method | type[Method] | str, settings: Mapping[str, object]
) -> tuple[Method, dict[str, Any]]:
    """Returns a method that is given as a class or as text such as `package.module:Class:k=2`, and
    its settings: those in the text, and `settings`. Raises SpecgenError as `methods.given`."""
    if isinstance(method, Method):
        return method, dict(settings)
    chosen, written = methods.given(method)
    return chosen, {**written, **settings}


def ids_of(rounds: Iterable[Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.token_ids]
