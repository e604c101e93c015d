"""A draft model with a tokenizer of its own chooses tokens on the device, in the target's ids, as it does on the host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_checks import (  # noqa: F401
    GREEDY,
    POLICIES,
    SAMPLED,
    compare_drafters,
    draft_setup,
    graphs_on,
    nothing_falls_back,
)
from runner_checks import every
from static_checks import HostReads, random_model, random_tokens

from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import ModelDrafter
from specgen.decoding.policy import Fixed
from specgen.decoding.tree import TopKTreeDrafter
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.static_forward import use_static_passes
from specgen.engine.text.translated_runner import TranslatedRunner

_TARGET = 120  # tokens; the draft model has 96, in another order


class Shuffled:
    """A translation in which the tokens have no text: every 7th of the draft's has no equal, every 11th equals the one before."""

    width = _TARGET

    def __init__(self) -> None:
        self.draft = SimpleNamespace(special={})
        order = random.Random(3).sample(range(_TARGET), 96)
        self.draft_to_target = [-1 if id_ % 7 == 6 else order[id_ - (id_ % 11 == 10)] for id_ in range(96)]
        self.target_to_draft = [-1] * _TARGET
        for id_, target in enumerate(self.draft_to_target):
            if target >= 0:
                self.target_to_draft[target] = id_

    def spelling(self, id_: int) -> tuple[int, ...]:
        single = self.target_to_draft[id_]
        return (single,) if single >= 0 else (5, 6)

    def prompt(self, ids: Sequence[int]) -> list[int]:
        return [own for id_ in ids for own in self.spelling(id_)]


def both() -> tuple[Any, Any]:
    """A runner that runs eagerly, and one that replays captured passes."""
    made = []
    for is_captured in (False, True):
        model = random_model("llama")
        if is_captured:
            use_static_passes(model, new_graphs=graphs_on("cpu"))
        made.append(TranslatedRunner(ModelRunner(model), Shuffled()))  # type: ignore[arg-type]
    return made[0], made[1]


@pytest.mark.parametrize("sampling", every(2, [GREEDY, SAMPLED]), ids=["greedy", "sampled"])
def test_drafts_and_signals_are_those_of_the_host(sampling: SamplingParams) -> None:
    """After accepted tokens, and after tokens that the draft model lacks, which it runs as several."""
    eager, captured = both()
    options: dict[str, Any] = {"vocab_size": _TARGET, "eos": range(4, _TARGET, 9), "rounds": 4}
    for policy in ("fixed", "margins"):
        drafts = compare_drafters(eager, captured, sampling, POLICIES[policy], **options)
        assert any(len(draft.tokens) > 2 for draft in drafts)
    if sampling is GREEDY:
        kind = partial(TopKTreeDrafter, width=4, depth=4, nodes=10)
        compare_drafters(eager, captured, sampling, POLICIES["fixed"], kind=kind, **options)
    assert len(captured.own._forward._self_feeding) > 0


def test_the_host_reads_once_a_draft_and_accepted_tokens_are_not_run_again() -> None:
    _, captured = both()
    drafter, context = ModelDrafter(draft_setup(captured, GREEDY, _TARGET)), Context(random_tokens(random.Random(7), 30))
    for _ in range(3):
        with HostReads() as host:
            draft = drafter.propose(context, Fixed(5), 30)
        own = captured._translated(context)
        before = len(own)
        context.extend([*draft.tokens, 9])
        captured.own._cached.switch_to(captured._translated(context))
        assert captured.own._cached.committed == before + 4  # the last drafted token has not been run
    assert host.count == 1


def test_where_the_tokens_need_more_than_a_table_the_host_chooses() -> None:
    _, captured = both()
    translation = captured._translation
    missing = translation.target_to_draft.index(-1)
    known = next(id_ for id_, single in enumerate(translation.target_to_draft) if single >= 0)
    assert captured.chooses_on_device([known])
    assert not captured.chooses_on_device([known, missing])
    own = captured.own
    assert not TranslatedRunner(own, translation, lambda logits, *_: logits).chooses_on_device()  # type: ignore[arg-type]
    one_way = Shuffled()
    one_way.target_to_draft[known] = -1
    assert not TranslatedRunner(own, one_way).chooses_on_device()  # type: ignore[arg-type]
    assert torch.equal(captured._to_draft[known], torch.tensor(translation.target_to_draft[known]))
