"""Runners on captured passes, and drafts by them compared with drafts by eager ones."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from static_checks import RecordedGraphs, random_model, random_tokens

from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.drafting import Setup, ModelDrafter
from specgen.decoding.policy import DraftedToken, LengthPolicy
from specgen.methods.svip import SVIP
from specgen.methods.eesd import BetaTS
from specgen.methods.sd import Confidence
from specgen.decoding.policy import Fixed
from specgen.engine.model_runner import DraftRunner, ModelRunner
from specgen.engine.native.cuda_graphs import CudaGraphs, Graphs
from specgen.engine.native.static_forward import use_static_passes

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, id="recorded"),
    pytest.param("cuda:0", torch.float32, 1e-4, id="cuda-float32", marks=CUDA),
    pytest.param("cuda:0", torch.bfloat16, 0.03, id="cuda-bfloat16", marks=CUDA),
]
_LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 12, "sliding_window_pattern": 2},
    "phi3": {"rope_scaling": _LONG_ROPE, "original_max_position_embeddings": 20},
}


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs a CUDA device."""
    for mark in CUDA:
        test = mark(test)
    return test


def graphs_on(device: str, counts: Counter[str] | None = None) -> Callable[[], Graphs]:
    """What captures on this device: operators recorded on the CPU, CUDA graphs on a GPU."""
    if device == "cpu":
        return partial(RecordedGraphs, counts=Counter() if counts is None else counts)
    chosen = torch.device(device)
    return partial(CudaGraphs, chosen, torch.cuda.Stream(chosen))


def runners_of(
    family: str, device: str, dtype: torch.dtype, seed: int = 0, counts: Counter[str] | None = None
) -> tuple[Any, Any]:
    """Two runners of a random model: one runs eagerly, the other one replays captured passes."""
    model = random_model(family, dtype, device, **_CHANGES.get(family, {}))
    eager = ModelRunner(model)
    use_static_passes(model, new_graphs=graphs_on(device, counts))
    return eager, ModelRunner(model)


@pytest.fixture(autouse=True)
def nothing_falls_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails if a capture failed that the test does not expect: without graphs, everything gives the same, too."""
    yield
    assert not [record.message for record in caplog.get_records("call") if record.levelno >= logging.WARNING]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (found.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max().clamp_min(1)


class Margins(Confidence):
    """Reads all signals that logits give."""

    signals = frozenset({"entropy", "prob", "top_prob", "margin"})
    seen: ClassVar[list[float]] = []

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.seen.extend(token[name] for name in sorted(self.signals))
        return super().keep_drafting(token)


POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: Fixed(5),
    "long": lambda: Fixed(37),
    "svip": lambda: SVIP(0.785, 0.15, 40),
    "margins": lambda: Margins(0.05, 12),
    "random": lambda: BetaTS(5.0, 1.0, 12, 3),
}


def draft_setup(runner: DraftRunner, sampling: SamplingParams, vocab_size: int = 96, eos: Sequence[int] = ()) -> Setup:
    return Setup(runner, sampling, frozenset(eos), vocab_size, seed=4)


def _assert_same_draft(found: Draft, expected: Draft, tolerance: float) -> None:
    assert (list(found.tokens), found.stop_reason) == (list(expected.tokens), expected.stop_reason)
    assert list(found.parents) == list(expected.parents)
    assert found.entropies == pytest.approx(expected.entropies, abs=tolerance)
    assert found.top_probs == pytest.approx(expected.top_probs, abs=tolerance)
    assert (found.probs is None) == (expected.probs is None)
    if found.probs is not None:
        assert found.probs.shape == expected.probs.shape
        assert (found.probs - expected.probs).abs().max() <= tolerance


def compare_drafters(
    eager: DraftRunner,
    captured: DraftRunner,
    sampling: SamplingParams,
    policy: Callable[[], LengthPolicy],
    *,
    rounds: int,
    prompt: int = 30,
    vocab_size: int = 96,
    eos: Sequence[int] = (),
    kind: Callable[[Setup], Any] = ModelDrafter,
    tolerance: float = 1e-5,
) -> list[Draft]:
    """Drafts with both runners through a run, whose random prefixes of the drafts are accepted. Returns the drafts."""
    drafters = [kind(draft_setup(runner, sampling, vocab_size, eos)) for runner in (eager, captured)]
    policies, seen = (policy(), policy()), []
    rng, contexts, drafts = random.Random(6), [], []
    contexts = [Context(random_tokens(random.Random(7), prompt)) for _ in drafters]
    for _ in range(rounds):
        results = []
        for drafter, policy_, context in zip(drafters, policies, contexts, strict=True):
            Margins.seen.clear()
            results.append(drafter.propose(context, policy_, 30))
            seen.append(list(Margins.seen))
        _assert_same_draft(results[1], results[0], tolerance)
        assert seen[-1] == pytest.approx(seen[-2], abs=tolerance)
        accepted = rng.choice([0, len(results[0].tokens), rng.randint(0, len(results[0].tokens))])
        new = [*results[0].tokens[:accepted], *random_tokens(rng, 1)]
        for context in contexts:
            context.extend(new)
        drafts.append(results[0])
    return drafts
