"""A model runner and an acceptance predictor whose outputs are known, for tests of drafters, verifiers and complete runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from specgen import methods
from specgen.base.types import Context, Round, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.run import Clock, Run
from specgen.engine.model_runner import ModelOutput
from specgen.engine.text.tokenizer import Tokenizer
from specgen.methods import runs
from specgen.methods.adaptive import AUTO, AdaptiveInputs
from specgen.methods.learned_drafting import DraftingCosts, Learned
from specgen.methods.method import Method
from specgen.workers.worker import DraftWorker

VOCAB = 6
PROMPT = [0, 3, 1, 2, 3, 1]  # it contains matches for prompt lookup
LENGTH_SETTINGS = {
    "sd": "k",
    "adaptive": "max_draft",
    "heuristic": "k",
    "lookup": "k",
    "suffix": "max_draft",
    "lookahead": "window",
    "ouroboros": "k",
    "confidence": "max_draft",
    "svip": "max_draft",
    "beta-ts": "max_draft",
    "spectr": "k",
    "specinfer": "k",
    "pearl": "window",
    "eesd": "max_draft",
    "eesd-fixed": "k",
    "eesd-beta": "max_draft",
    "eesd-cali": "max_draft",
    "eesd-tree": "depth",
    "selfsd": "k",
}  # the setting that limits a draft's length


COSTS = ("draft_cost", "verify_cost")  # settings of `adaptive`


class TableRunner:
    """A model runner whose logits [vocabulary] depend on the last two tokens alone: a row of a random table."""

    vocab_size = num_embeddings = VOCAB
    context_limit = 1000
    device = torch.device("cpu")

    def __init__(self, seed: int, scale: float = 1.5) -> None:
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale

    def row(self, ids: Sequence[int]) -> torch.Tensor:
        return self.table[ids[-2], ids[-1]]

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        paths = [context.ids[-2:]]
        for node, token in enumerate(draft):
            paths.append([*paths[node if parents is None else parents[node] + 1], token])
        rows = torch.stack([self.row(path) for path in paths[start:]])
        return ModelOutput(rows, rows)


class TopProbPredictor:
    """An acceptance predictor whose score is the draft's top probability: a `TableRunner` returns its logits as hidden states."""

    def begin(self, context: Context) -> None:
        pass

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        return draft_hidden.softmax(dim=-1).max()


def scripted_run(
    method: Method | str,
    settings: Mapping[str, object],
    target: Any,
    draft: Any,
    sampling: SamplingParams,
    *,
    eos: Iterable[int] = (),
    seed: int = 0,
    worker: DraftWorker | None = None,
    prompt: Sequence[int] = PROMPT,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
) -> Run:
    """A run of a method with these model runners, ready to start."""
    method = methods.find(method) if isinstance(method, str) else method
    setup = Setup(draft, sampling, frozenset(eos), target.vocab_size, seed, target, tokenizers=tokenizers, worker=worker)
    setup = replace(setup, acceptance_predictor=TopProbPredictor())
    resolved, context = methods.resolve(method, settings), Context(prompt)
    if resolved.policy == "adaptive":
        drafting, verification = (0.1 if resolved.values[name] == AUTO else float(resolved.values[name]) for name in COSTS)
        costs = DraftingCosts(drafting, verification)
        learned = Learned.prior(costs)
        setup = replace(setup, adaptive=AdaptiveInputs(costs, learned, in_parallel=method.is_parallel))
    return runs.make_run(method, resolved, setup, context, sampling.max_new_tokens, None, Clock(None))


def ids_of(rounds: Iterable[Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.token_ids]
