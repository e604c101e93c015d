"""The setting `copy`: text of the context is drafted in place of a model's drafts, where that is
expected to be better."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import run_main

import specgen
from specgen import methods
from specgen.base.settings import parse_pairs
from specgen.base.types import Context, Draft, Round, SamplingParams, Verdict
from specgen.compare.prompts import load_prompts
from specgen.decoding.drafting import NoDrafter
from specgen.decoding.policy_base import MATCH_LENGTH, DraftedToken, Fixed
from specgen.methods.copying import (
    CopyingPolicy,
    HybridDrafter,
    PromptLookupDrafter,
    with_copies,
)
from specgen.methods.learned_drafting import SHORTEST_PAUSE
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair
from specgen.traces.reader import read_trace
from specgen.view.generation import footer

COPIED = load_prompts(None)[7].text  # the bundled target continues it with a text that repeats
GREEDY = SamplingParams(max_new_tokens=56)
COSTS = "draft_cost=0.1:verify_cost=0.03"
COPYING = f"""
svip:copy=auto sd:copy=8 sd:copy=4:width=3:k=3 sd:copy=4:cape=true sd:copy=4:translation=text
sd:copy=4:policy=adaptive:{COSTS} beta-ts:copy=auto eesd:copy=auto:{COSTS} eesd-tree:copy=4
medusa:copy=auto medusa:copy=4:nodes=0 eagle:copy=4 eagle:copy=auto:width=1 glide:copy=4
block:copy=auto:{COSTS} block:copy=4:nodes=12:k=4 selfsd:copy=4:skip=5+6a+7m
""".split()


def generated(pair: Pair, written: str, prompt: Any = COPIED) -> Any:
    name, *given = written.split(":")
    settings: dict[str, object] = dict(parse_pairs(given))
    return pair.generate(prompt, name, GREEDY, **settings)


def copied_rounds(rounds: Sequence[Round]) -> list[Round]:
    return [round_ for round_ in rounds if round_.draft.is_copied]


@pytest.mark.parametrize("written", COPYING)
def test_greedy_ids_are_plain_decodings_and_both_sources_draft(
    demo_pair: Pair, written: str
) -> None:
    result = generated(demo_pair, written)
    assert result.token_ids == generated(demo_pair, "ar").token_ids
    copied = copied_rounds(result.rounds)
    assert sum(len(round_.accepted_ids) for round_ in copied) > 16
    assert all((round_.draft.stop_reason or "").startswith("lookup: ") for round_ in copied)
    drafting = [round_ for round_ in result.rounds if round_.draft.tokens]
    assert len(copied) < len(drafting)
    at_least = parse_pairs(written.split(":")[1:])["copy"]
    if at_least != "auto":
        least = int(at_least)
        prompt = demo_pair.tokenizer.encode(COPIED)
        for round_ in copied:
            before = [id_ for other in result.rounds[: round_.index] for id_ in other.token_ids]
            assert has_match([*prompt, *before], least)


def has_match(ids: list[int], length: int) -> bool:
    """Whether the last `length` tokens occurred before."""
    return any(ids[end - length : end] == ids[-length:] for end in range(length, len(ids)))


@pytest.mark.parametrize(
    "written", ["sd:k=3", "eesd-fixed", "medusa:nodes=0", "eagle:width=1", "glide", "block:k=7"]
)
def test_a_model_knows_what_was_copied_without_it(demo_pair: Pair, written: str) -> None:
    """Its next draft is as if it had drafted all the time: the target's features of copied tokens
    were kept for it."""
    name, *given = written.split(":")
    settings: dict[str, object] = dict(parse_pairs(given))
    demo_pair.forget()
    copied = demo_pair.generate(COPIED, name, GREEDY, copy=4, **settings)
    assert max(len(round_.accepted_ids) for round_ in copied_rounds(copied.rounds)) > 8
    ids = [*demo_pair.tokenizer.encode(COPIED), *copied.token_ids]
    few = SamplingParams(max_new_tokens=12, ignore_eos=True)
    drafts = []
    for _ in range(2):
        rounds = demo_pair.generate(ids, name, few, **settings).rounds
        drafts.append([list(round_.draft.tokens) for round_ in rounds])
        entropies = [sum(round_.draft.entropies) for round_ in rounds]
        if len(drafts) == 1:
            known = entropies
        demo_pair.forget()
    assert drafts[0] == drafts[1]
    assert known == pytest.approx(entropies, abs=1e-3)


def test_the_models_policy_learns_from_its_drafts_alone(demo_pair: Pair) -> None:
    run = demo_pair.run(demo_pair.request(COPIED, "beta-ts", GREEDY, copy=4))
    rounds = list(run.rounds())
    assert copied_rounds(rounds)
    own = [round_ for round_ in rounds[1:] if not round_.draft.is_copied]
    accepted = sum(len(round_.accepted_ids) for round_ in own)
    assert rounds[-1].policy_state is not None
    assert rounds[-1].policy_state["alpha"] == 1 + accepted


# the rule


def offered(policy: CopyingPolicy, match: int, *, is_last: bool = False) -> int:
    """Returns how many tokens the policy copies after a match; 0 if the model is to draft."""
    if not policy.starts_draft(signals={MATCH_LENGTH: match}, is_last=is_last):
        return 0
    return next(
        position
        for position in range(1, 100)
        if not policy.keep_drafting(DraftedToken(position, {MATCH_LENGTH: match + position - 1}))
    )


def test_copying_stops_for_some_rounds_where_less_than_a_quarter_is_accepted() -> None:
    policy = CopyingPolicy(Fixed(5), always=True)
    copied = []
    for _ in range(60):
        copied.append(offered(policy, 20) > 0)
        drafted, accepted = (10, 1) if copied[-1] else (5, 5)
        policy.observe(drafted, accepted)
    spans = [(is_copied, len([*group])) for is_copied, group in groupby(copied)]
    assert all(count <= 5 for is_copied, count in spans if is_copied)
    pauses = [count for is_copied, count in spans[:6] if not is_copied]
    assert pauses == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE]


def test_copying_goes_on_where_a_quarter_is_accepted() -> None:
    policy = CopyingPolicy(Fixed(5), always=True)
    for _ in range(100):
        assert offered(policy, 20)
        policy.observe(8, 2)


def test_a_copy_has_to_promise_more_than_the_models_drafts_have_kept() -> None:
    policy = CopyingPolicy(Fixed(5), always=False)
    always = CopyingPolicy(Fixed(5), always=True)
    assert offered(always, 4)
    for _ in range(20):
        policy.observe(5, 5)
    assert policy.model_mean > 4
    assert not offered(policy, 12)
    assert offered(policy, 12, is_last=True), "the model has no room"
    policy.observe(3, 3)  # of the copied tokens: they say nothing about the model
    assert policy.model_mean > 4
    for _ in range(100):
        policy.observe(5, 0)
    assert offered(policy, 12)
    policy.observe(3, 3)
    for _ in range(20):
        policy.observe(5, 5)
    for _ in range(20):
        policy.observe_match(12, 20, ended=False)
    assert offered(policy, 12) > 12, "what matches have predicted counts, copied or not"


def test_where_the_model_has_no_room_text_is_copied() -> None:
    """Although the model has drafted better."""
    policy = CopyingPolicy(Fixed(5), always=False)
    for _ in range(20):
        policy.observe(5, 5)
    drafter = HybridDrafter(PromptLookupDrafter(3, ()), NoDrafter())
    draft = drafter.propose(Context([1, 2, 3, 4, 1, 2, 3]), policy, 10)
    assert list(draft.tokens)[:2] == [4, 1]
    assert draft.is_copied


def test_what_followed_most_often_is_copied() -> None:
    """Not what followed last."""
    ids = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 9, 7, 1, 2, 3]
    drafter, policy = with_copies(NoDrafter(), Fixed(5), {"copy": 3}, ())
    assert drafter is not None
    assert drafter.propose(Context(ids), policy, 10).tokens[0] == 4


# what is shown


def round_of(copied: bool, drafted: int, accepted: int) -> Round:
    draft = Draft.chain([5] * drafted, stop_reason="x", is_copied=copied)
    return Round(0, "sequential", draft, Verdict(tuple(range(accepted)), 7, "correction"))


def test_both_sources_acceptance_is_counted_apart() -> None:
    rounds = [round_of(True, 8, 6), round_of(False, 5, 1), round_of(False, 5, 2)]
    figures = Figures("svip", rounds)
    line = figures.as_dict("", "length")
    assert (line["drafted"], line["accepted"]) == (18, 9)
    assert (line["copied"], line["copied_accepted"]) == (8, 6)
    assert "50% accepted  6/8 copied, 3/10 by the model" in footer(figures, [], 200).plain
    for alone in (rounds[:1], rounds[1:]):
        assert "copied" not in footer(Figures("svip", alone), [], 200).plain
    joined = Figures("svip")
    joined.include({**line, "phase_seconds": None, "seconds": 1.0, "drafts": 3, "rejections": 3})
    assert (joined.copied, joined.copied_accepted) == (8, 6)


def test_a_trace_keeps_which_drafts_were_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(COPIED, encoding="utf-8")
    arguments = ["generate", "-m", "svip:copy=4", "-f", str(prompt), "--trace", str(trace), "-n"]
    code, _, err = run_main(monkeypatch, capfd, *arguments, "56", "--no-stdin", "--rounds")
    assert code == 0, err
    (run,) = read_trace(trace)
    assert run.summary is not None
    figures = run.fold()
    copied = figures.copied, figures.copied_accepted
    assert copied == (run.summary["copied"], run.summary["copied_accepted"])
    assert copied[1] > 16
    code, out, _ = run_main(monkeypatch, capfd, "inspect", str(trace))
    assert code == 0
    shown = " ".join(out.split())
    for text in (shown, err):
        assert f"{copied[1]}/{copied[0]} copied" in text
        assert f"/{figures.drafted - copied[0]} by the model" in text
    assert "lookup: " in shown


# settings


def test_adaptives_older_name_of_the_setting() -> None:
    adaptive = methods.find("adaptive")
    for older, present in (("false", "off"), (True, "auto")):
        assert methods.resolve(adaptive, {"lookup": older}).values["copy"] == present
    assert methods.resolve(adaptive, {}).values["copy"] == "auto"
    with pytest.raises(specgen.SpecgenError, match="lookup is an older name of copy"):
        methods.resolve(adaptive, {"lookup": "false", "copy": "4"})


def test_methods_that_draft_with_a_model_token_by_token_or_in_a_tree_copy() -> None:
    """The others have drafts or verifiers of their own."""
    taking = {name for name, method in methods.METHODS.items() if "copy" in method.settings}
    drafting = {name for name, method in methods.METHODS.items() if method.runs_model}
    assert drafting - taking == {
        "pearl",
        "ouroboros",
        "mtad",
        "bild",
        "fly",
        "spectr",
        "specinfer",
    }
