"""The benchmark of the papers' claims: its figures, its verdicts, and the methods that it names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specgen import methods
from specgen.base.errors import SpecgenError

BENCH = Path(__file__).parent / "bench"
PAGE = Path(__file__).parent.parent / ".github" / "PAPERS.md"


@pytest.fixture(autouse=True)
def bench_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "papers"]:
        del sys.modules[name]


def measured(**drafts: list[list[tuple[int, int]]]) -> Any:
    """A comparison whose methods drafted and accepted so many tokens in each round, by prompt."""
    from papers.measuring import Measured, Run

    runs = {}
    for spec, prompts in drafts.items():
        made = [Run(spec, number, 0, "code", "", {}) for number in range(len(prompts))]
        for run, rounds in zip(made, prompts, strict=True):
            run.drafts = rounds
            tokens = 1 + sum(accepted + 1 for _, accepted in rounds)
            run.summary = {"new_tokens": tokens, "target_passes": len(rounds) + 1}
        runs[spec] = made
    return Measured("specgen compare", runs, {})


def test_a_speedup_from_counts_is_that_of_the_costs() -> None:
    """Three rounds of two drafted tokens, of which 2, 1 and 0 are accepted: 6 tokens for three
    passes and six drafted tokens."""
    from papers.measuring import Costs

    made = measured(sd=[[(2, 2), (2, 1), (2, 0)]], plain=[[(0, 0)] * 6])
    speedup = Costs(0.1, 0.05).speedup
    assert made.of(speedup, "sd").value == pytest.approx(6 / (3 + 6 * 0.15))
    assert made.of(speedup, "plain").value == 1
    assert made.best(speedup, ["plain", "sd"]) == "sd"
    assert made.ratio(speedup, "plain", "sd").value == pytest.approx((3 + 6 * 0.15) / 6)


def test_a_verdict_needs_the_whole_interval() -> None:
    from papers.measuring import CLOSE, FAILS, HOLDS, Estimate

    high, low, both = Estimate(1.2, 1.1, 1.3), Estimate(0.8, 0.7, 0.9), Estimate(1.0, 0.9, 1.1)
    assert [figure.above() for figure in (high, low, both)] == [HOLDS, FAILS, CLOSE]
    assert [figure.below() for figure in (high, low, both)] == [FAILS, HOLDS, CLOSE]
    assert [both.near(predicted) for predicted in (0.95, 1.05, 1.15)] == [HOLDS, HOLDS, FAILS]


@pytest.mark.parametrize(
    ("options", "seeded"), [(("--ignore-eos",), False), (("--temperature", "1"), True)]
)
def test_a_seed_is_given_where_tokens_are_drawn(
    options: tuple[str, ...], seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the command that is shown is the one that runs."""
    from papers import measuring

    given: list[str] = []
    monkeypatch.setattr(measuring, "_run", lambda *arguments: given.extend(arguments) or [])
    monkeypatch.setattr(measuring, "_read", lambda _: {})
    made = measuring.Bench("bundled", quick=True).compare(["sd:k=5"], *options)
    shown = made.command.split()
    assert given[: len(shown) - 1] == shown[1:]
    assert ("--seed" in shown) is seeded


def test_a_gain_is_compared_with_the_predicted_one() -> None:
    from papers import pearl
    from papers.measuring import FAILS, HOLDS, UNMEASURED

    made = measured(pearl=[[(2, 2)]], sd=[[(2, 2)]])
    for runs in made.runs.values():
        runs[0].summary["seconds"] = 1.0
    verdicts = [pearl._gain(made, "pearl", "sd", gain).verdict for gain in (1.0, 1.2, None)]
    assert verdicts == [HOLDS, FAILS, UNMEASURED]


def test_intervals_are_of_prompts_that_are_drawn_together() -> None:
    """Two methods of which one always drafts twice as much: their ratio has no spread, each of them
    has."""
    from papers.measuring import Quantity

    made = measured(
        once=[[(count, 0)] for count in (1, 2, 5, 9)],
        twice=[[(2 * count, 0)] for count in (1, 2, 5, 9)],
    )
    drafted = Quantity(lambda run: sum(each for each, _ in run.drafts), lambda _: 1.0)
    ratio = made.ratio(drafted, "twice", "once")
    assert (ratio.low, ratio.value, ratio.high) == (2, 2, 2)
    alone = made.of(drafted, "once")
    assert alone.low < alone.value == 17 / 4 < alone.high


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Nora has 47 lemons. She buys 6 bags with 8 lemons in each and gives 19 to Felix.", 76),
        ("A shop sells candles for 7 dollars each. Lucia buys 6 of them and pays with 60.", 18),
        ("A train travels at 64 miles per hour for 5 hours and then 27 miles more.", 347),
        ("Ingrid shares 59 pears equally among 8 friends. Each friend gets 7 pears.", 3),
    ],
)
def test_answers_to_arithmetic_questions_are_judged(question: str, answer: int) -> None:
    from papers.measuring import Run
    from papers.mtad import is_right

    run = Run("ar", 0, 0, "math", f"<s>Question: {question}\nAnswer:", {})
    for said, right in ((answer, True), (answer + 1, False)):
        run.summary = {"text": f" It is 3 + 4. The answer is {said}."}
        assert is_right(run) is right
    run.summary = {"text": ""}
    assert not is_right(run)


def test_every_method_of_the_benchmark_can_be_written_so() -> None:
    from papers import eesd, mtad, pearl, svip

    specs = [eesd.CALI, eesd.WITHOUT_MODEL, eesd.WITHOUT_SAMPLING, eesd.KNOWN_RATE, eesd.TREE]
    specs += [*eesd.FIXED, *eesd.PRINTED, eesd.SVIP, eesd.SELF_SD, eesd.SELF_SD_BETA]
    specs += [f"eesd:{costs.settings}" for costs in eesd.COSTS]
    specs += [mtad.MTAD, mtad.JOINT, *mtad.BASELINES, *mtad.BEAMS, *mtad.TAUS]
    specs += [pearl.PEARL, *pearl.SEQUENTIAL]
    specs += [f"{pearl.PEARL}:window=4:{phase}=false" for phase in pearl.WITHOUT]
    specs += [svip.CONSTANT, svip.SVIP, svip.PRINTED, svip._with_svip("eagle")]
    for spec in specs:
        try:
            methods.choice_of(*methods.split(spec), has_predictor=True)
        except SpecgenError as error:
            pytest.fail(f"{spec}: {error.message}")


def test_a_table_is_written_between_its_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the page has those of each paper and pair."""
    import reproduce

    page = PAGE.read_text("utf-8")
    for name in reproduce.PAPERS:
        for pair in ("bundled", "published"):
            for word in ("begin", "end"):
                assert page.count(f"<!-- {name} {pair} {word} -->") == 1
    copy = tmp_path / "PAPERS.md"
    copy.write_text("one\n<!-- svip bundled begin -->\nold\n<!-- svip bundled end -->\ntwo\n")
    monkeypatch.setattr(reproduce, "PAGE", copy)
    reproduce.write("svip", "bundled", r"new \1")
    text = copy.read_text()
    assert text == (
        "one\n<!-- svip bundled begin -->\n\nnew \\1\n\n<!-- svip bundled end -->\ntwo\n"
    )
    with pytest.raises(ValueError, match="needs the lines"):
        reproduce.write("pearl", "bundled", "")
