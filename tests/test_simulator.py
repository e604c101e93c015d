"""Simulated runs: the same rounds as real runs, with seconds from measured costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, product
from unittest.mock import patch

import pytest
import torch
from families import EOS, make_model, save, with_exit
from head_layouts import write_head
from pair_helpers import pair_of_models
from tuning_helpers import COSTS, GREEDY, PROMPTS, PairOf, really

import specgen
from specgen.base.settings import written
from specgen.base.types import Context, SamplingParams
from specgen.decoding import token_sampling
from specgen.decoding.costs import FURTHER_TOKEN, LONG_COPIES, CostTable, Curve, RoundCosts
from specgen.decoding.token_sampling import warp
from specgen.decoding.verification import survival
from specgen.engine.model_runner import ModelRunner
from specgen.methods.learned_drafting import Acceptance
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair
from specgen.testing.enumeration import PROMPT, Paths, SmallRunner
from specgen.testing.scripted_models import TableRunner
from specgen.tune import remembered
from specgen.tune.outcome import Deadline, grid
from specgen.tune.remembered import DrawnRunner, MemoisedRunner
from specgen.tune.round_timing import ReferenceOutput, costs_of, record_reference, time_rounds
from specgen.tune.simulator import Simulator, run_seed

SAMPLED = replace(GREEDY, temperature=1.0, top_k=8)
SIMPLE: list[tuple[str, dict[str, object]]] = [
    ("ar", {}),
    ("sd", {"k": 1}),
    ("sd", {"k": 16}),
    ("heuristic", {"k": 3, "max_draft": 6}),
    ("confidence", {"threshold": 0.3, "max_draft": 8}),
    ("svip", {"threshold": 0.7, "max_draft": 40}),
    ("beta-ts", {"alpha": 2}),
    ("lookup", {"k": 4, "ngram": 2}),
    ("lookup", {"ngram": 2, "draft_cost": 0.0, "verify_cost": 0.3}),
    ("pearl", {"window": 1}),
    ("pearl", {"window": 8}),
    ("pearl", {"window": 4, "post_verify": False}),
    ("pearl", {"window": 4, "pre_verify": False}),
]
TREES: list[tuple[str, dict[str, object]]] = [
    ("sd", {"width": 2, "depth": 3}),
    ("sd", {"width": 4, "depth": 2, "k": 2}),
]
OTHERS: list[tuple[str, dict[str, object]]] = [
    ("spectr", {"drafts": 3, "k": 3}),
    ("specinfer", {"drafts": 2, "k": 4}),
    ("mtad", {"beams": 4, "k": 3, "tau": 0.3}),
    ("bild", {"k": 4, "fallback": 0.1}),
    ("lookahead", {"window": 4}),
    ("ouroboros", {"k": 3, "branches": 2}),
]
OF_HEADS: list[tuple[str, dict[str, object]]] = [
    ("medusa", {}),
    ("medusa", {"nodes": 0, "k": 3}),
    ("eagle", {}),
    ("eagle", {"width": 1, "k": 3, "cape": True}),
    ("eagle", {"policy": "svip", "threshold": 0.9, "width": 2, "nodes": 4}),
    ("glide", {"policy": "svip", "threshold": 0.9}),
]


@pytest.fixture(scope="module")
def near(pair_of: PairOf) -> Pair:
    return pair_of("llama", "near")


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target with an exit and a predictor, neither trained, and no draft model."""
    folder = save(make_model("llama", num_hidden_layers=4), tmp_path_factory.mktemp("early"))
    return with_exit(
        pair_of_models(specgen.load(folder, device="cpu", dtype="float32").target, None), 2
    )


@pytest.fixture(scope="module")
def headed(pair_of: PairOf, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target with a random head of each kind."""
    target = pair_of("llama", "near").target
    folder = tmp_path_factory.mktemp("heads")
    pair = pair_of_models(target, None)
    for kind, layout in {"medusa": "medusa-v2", "eagle": "eagle1", "glide": "glide"}.items():
        pair.parts.name(write_head(folder / kind, layout, target.folder), is_exit=False)
    return pair


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods of which rounds are timed. They take what `COSTS` says."""
    names: list[str] = []
    monkeypatch.setattr(
        "specgen.tune.simulator.time_rounds",
        lambda _, name, *given, **named: names.append(name) or [],
    )
    monkeypatch.setattr("specgen.tune.simulator.costs_of", lambda *_: COSTS)
    return names


def simulator(
    pair: Pair, sampling: SamplingParams = GREEDY, costs: RoundCosts = COSTS
) -> Simulator:
    references = [
        record_reference(pair, ids, replace(sampling, seed=run_seed(n, 3)))
        for n, ids in enumerate(PROMPTS)
    ]
    by_kind = dict.fromkeys(("echo", "model", "exit"), costs) | {
        "parallel": replace(costs, synchronisation_overhead=0.5)
    }
    return Simulator(pair, references, sampling, by_kind)


def same(found: Figures, run: Figures) -> bool:
    """The same rounds, drafts, accepted tokens and output."""
    figures = [
        (one.rounds, one.drafted, one.accepted, one.drafts, one.token_ids) for one in (found, run)
    ]
    return figures[0] == figures[1]


@pytest.mark.parametrize("draft", ["near", pytest.param("unrelated", marks=pytest.mark.slow)])
def test_simulated_runs_count_what_real_runs_count(pair_of: PairOf, draft: str) -> None:
    pair = pair_of("llama", draft)
    made = simulator(pair)
    for name, given in SIMPLE + TREES + OTHERS:
        found = made.run(name, given)
        assert same(found, really(pair, name, given)), (name, given)
        assert (found.perplexity is None) == (name not in ("mtad", "bild"))


@pytest.mark.parametrize("memory", [remembered.MOST_BYTES, 0])
def test_no_pass_is_computed_twice_if_its_output_is_kept(
    near: Pair, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(remembered, "MOST_BYTES", memory)
    made = simulator(near)
    tried = [("sd", {"k": 4}), *TREES, OTHERS[0], OTHERS[4]]
    first = [made.run(name, given).token_ids for name, given in tried]
    with patch.object(ModelRunner, "logits", autospec=True, side_effect=ModelRunner.logits) as ran:
        assert [made.run(name, given).token_ids for name, given in tried] == first
    assert (ran.call_count == 0) == (memory > 0) == bool(made._kept)


@pytest.mark.parametrize(
    ("method", "text", "is_long"),
    [("lookup", 48, True), ("suffix", 72, True), ("lookup", 6, False)],
)
def test_where_long_texts_are_copied_long_drafts_are_expected_to_be_fastest(
    near: Pair, method: str, text: int, is_long: bool
) -> None:
    """With the costs of passes that the kernels have. The prompt's `text` tokens come again, then
    all others."""
    every = [*range(3, 96)]
    copied = every[:text]
    output = [*copied[1:], *reversed(every[text:])]
    reference = ReferenceOutput([*copied, copied[0]], output, len(output), frozenset(), 1.0, 99.0)
    passes = {width: 1 + FURTHER_TOKEN * (width - 1) for width in (1, 2, 1 + max(LONG_COPIES))}
    costs = RoundCosts(CostTable({64: Curve({0: 0.0})}), CostTable({64: Curve(passes)}))
    made = Simulator(near, [reference], GREEDY, {"echo": costs})
    speeds = {
        written(method, given): made.run(method, given).tokens_per_second or 0
        for given in grid(method)
    }
    fixed = {name: speed for name, speed in speeds.items() if "k=" in name}
    fastest = max(fixed, key=lambda name: fixed[name])
    chosen = int(fastest.partition("k=")[2].partition(":")[0])
    assert (chosen in LONG_COPIES) == is_long, fastest


def test_in_sampling_a_seed_makes_the_same_run(near: Pair) -> None:
    """Where the method's own verifier decides, or a drafter learns."""
    made = simulator(near, SAMPLED)
    for name, given in OTHERS:
        assert same(made.run(name, given), really(near, name, given, SAMPLED)), name


def test_drawn_chains_share_one_output(pair_of: PairOf, near: Pair) -> None:
    made = simulator(near, SAMPLED)
    output = [token for reference in made.references for token in reference.token_ids]
    for name, given in SIMPLE + TREES:
        assert made.run(name, given).token_ids == output, name
    assert made.run("sd", {"k": 4}).drafted == made.run("sd", {"k": 4}).drafted
    expected = made.run("sd", {"k": 1}).acceptance_rate
    assert expected is not None
    assert 0.5 < expected < 1, "a near copy is often right, but not always"
    real = (
        sum(
            really(near, "sd", {"k": 1}, replace(SAMPLED, seed=seed)).acceptance_rate or 0
            for seed in range(6)
        )
        / 6
    )
    assert expected == pytest.approx(real, abs=0.15)
    assert simulator(pair_of("llama", "itself"), SAMPLED).run("sd", {"k": 4}).acceptance_rate == 1


def test_drafts_drawn_for_a_given_output_have_the_draft_models_distribution() -> None:
    """Over all outputs, which the target draws: q, and accepted as often as rejection sampling
    accepts, the sum of min(p, q)."""
    target = TableRunner(1)
    draft = TableRunner(2)
    sampling = SamplingParams(temperature=1.0)
    context = Context([1, 2])
    p, q = (warp(runner.logits(context).logits[0], sampling) for runner in (target, draft))
    counts = Counter[int]()
    accepted = 0
    runs = 3000
    generator = torch.Generator().manual_seed(0)
    for seed, token in enumerate(
        torch.multinomial(p, runs, replacement=True, generator=generator).tolist()
    ):
        reference = ReferenceOutput([1, 2], [token], 1, frozenset(), 0.0, 0.0)
        runner = DrawnRunner(
            MemoisedRunner(draft, {}), MemoisedRunner(target, {}), reference, sampling, seed
        )
        output = runner.logits(context)
        drawn = int(output.logits[0].argmax())
        assert float(output.logits.softmax(dim=-1)[0, drawn]) == pytest.approx(
            max(float(q[drawn]), 1 / len(q)), rel=0.02
        )
        assert output.unpenalised is not None
        assert torch.equal(output.unpenalised, draft.logits(context).logits)
        counts[drawn] += 1
        accepted += drawn == token
    assert accepted / runs == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.03)
    found = torch.tensor([counts[token] / runs for token in range(len(q))])
    assert float((found - q).abs().sum()) < 0.1


def test_drawn_drafts_are_those_that_block_verification_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By enumeration, over all outputs of the target: so many tokens of two are accepted."""
    target = SmallRunner(1)
    draft = SmallRunner(2)
    sampling = SamplingParams(temperature=1.0)
    generator = torch.Generator()

    def row(runner: SmallRunner, tokens: Sequence[int]) -> torch.Tensor:
        return warp(runner.row([*PROMPT, *tokens]), sampling)

    def accepted() -> int:
        output: list[int] = []
        while len(output) < 2:
            output.append(int(token_sampling.draw(row(target, output), generator)))
        reference = ReferenceOutput(PROMPT, output, 2, frozenset(), 0.0, 0.0)
        runner = DrawnRunner(
            MemoisedRunner(draft, {}), MemoisedRunner(target, {}), reference, sampling, 0
        )
        for length in range(2):
            after = runner.logits(Context(PROMPT), output[:length], start=length).logits[0]
            if int(after.argmax()) != output[length]:
                return length
        return 2

    found = Paths(monkeypatch).all(accepted)
    expected = 0.0
    for chain in product(range(3), repeat=2):
        p, q = ([float(row(own, chain[:n])[chain[n]]) for n in range(2)] for own in (target, draft))
        expected += math.prod(q) * sum(survival(p, q)[1:])
    mean = sum(length * weight for length, weight in found.items())
    assert mean == pytest.approx(expected, abs=1e-6)


def test_heads_read_the_targets_hidden_states_in_simulated_runs(headed: Pair) -> None:
    """The real target is not run in greedy simulations, and its runner has run something else
    before."""
    made = simulator(headed)
    drafted = 0
    accepted = 0
    for name, given in OF_HEADS:
        found = made.run(name, given)
        assert same(found, really(headed, name, given)), (name, given)
        assert found.drafted > 0
        drafted = drafted + found.drafted
        accepted = accepted + found.accepted
    assert accepted > 0
    cape = ("glide", {"cape": True})
    assert same(simulator(headed, SAMPLED).run(*cape), really(headed, *cape, SAMPLED)), (
        "drawn, with candidates that were not"
    )


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("eesd-tree", {"width": 3, "depth": 4, "max_draft": 3}),
        ("eesd-cali", {}),
        ("eesd-fixed", {"k": 3}),
    ],
)
def test_an_early_exit_uses_its_predictor(early: Pair, name: str, given: dict[str, object]) -> None:
    assert same(simulator(early).run(name, given), really(early, name, given))


@pytest.mark.parametrize("given", [{"k": 4}, {"policy": "cali-ts"}, {"nodes": 12, "k": 7}], ids=str)
def test_a_block_head_drafts_in_simulated_runs(demo_pair: Pair, given: dict[str, object]) -> None:
    assert same(simulator(demo_pair).run("block", given), really(demo_pair, "block", given))


def test_levels_that_a_tree_leaves_out_are_timed_and_its_nodes_are_counted_once(
    headed: Pair,
) -> None:
    """A tree of at most two nodes, of four levels of four: the head runs four times, and the target
    verifies two nodes."""
    shape = {"width": 4, "nodes": 2}
    rounds = time_rounds(
        headed,
        "eagle",
        PROMPTS[0],
        GREEDY,
        Deadline.after(0, count().__next__),
        (4,),
        settings=shape,
    )
    ((_, curve),) = costs_of(rounds).draft_cost.curves.items()
    assert set(curve.points) == {0, 4}
    run = headed.run(headed.request(PROMPTS[0], "eagle", GREEDY, **shape))
    with patch.object(run.policy, "keep_drafting", wraps=run.policy.keep_drafting) as judged:
        for round_ in run.rounds():
            assert sum(call.args[0].nodes for call in judged.call_args_list) == len(
                round_.draft.tokens
            )
            judged.reset_mock()


def test_rounds_are_priced_by_their_costs(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes 10 s, a drafted token or level 1 s, the draft's prefill a quarter and a signal
    half a second."""
    monkeypatch.setattr("specgen.tune.simulated_models.draft_prefill_seconds", lambda *_: 0.25)
    made = simulator(near)
    prompts = len(PROMPTS)
    prefill = sum(reference.prefill_seconds for reference in made.references)
    plain = made.run("ar", {})
    drafted = made.run("sd", {"k": 2})
    assert plain.seconds == pytest.approx(prefill + 10 * (plain.new_tokens - prompts))
    assert drafted.seconds == pytest.approx(
        prefill + 0.25 * prompts + 10 * (drafted.rounds - prompts) + drafted.drafted
    )
    beams = made.run("mtad", {"beams": 4, "k": 2, "tau": 0.3})
    rounds = beams.rounds - prompts
    assert beams.phase_seconds["verify"] == pytest.approx(10 * rounds)
    # two levels per round, except the last one of each prompt, which may have less room
    assert 2 * (rounds - prompts) <= beams.phase_seconds["draft"] - 0.25 * prompts <= 2 * rounds
    assert made.run("lookup", {"k": 4, "ngram": 2}).phase_seconds["draft"] == 0
    rising = replace(
        COSTS, verification_cost=CostTable({8: Curve({1: 10.0, 2: 11.0})}), signal_cost=0.5
    )
    dear = simulator(near, costs=rising)
    found = dear.run("sd", {"k": 4})
    assert found.phase_seconds["verify"] == pytest.approx(
        10 * (found.rounds - prompts) + found.drafted
    )
    found = dear.run("svip", {})
    assert found.phase_seconds["draft"] == pytest.approx(0.25 * prompts + 1.5 * found.drafted)


def test_a_parallel_round_takes_the_longer_of_draft_and_pass(near: Pair, pair_of: PairOf) -> None:
    """A pass takes 10 s, a drafted token 1 s. A round in which a draft was started takes half a
    second more."""
    found = simulator(near).run("pearl", {"window": 4})
    prompts = len(PROMPTS)
    rounds = found.rounds - prompts
    assert found.phase_seconds["verify"] == pytest.approx(10.0 * rounds)
    # the target never waits for drafts of four tokens
    without_a_draft = rounds - found.phase_seconds["draft"] / 0.5
    assert without_a_draft in range(prompts + 1), (
        "an output's last round may have nothing left to draft"
    )
    # all tokens are accepted. Of 24 tokens the prefill gives one, a first pass over one token one
    # more of 16 that are drafted; the second pass is over 15 tokens while the last 7 are drafted,
    # and the third is over the remaining 6
    itself = simulator(pair_of("llama", "itself"))
    found = itself.run("pearl", {"window": 16})
    assert found.phase_seconds["verify"] == pytest.approx(prompts * 3 * 10)
    assert found.phase_seconds["draft"] == pytest.approx(prompts * ((16 - 10) + 2 * 0.5))
    # without pre-verify, it waits for all of the first draft of four; there are six, none of which
    # takes longer than a pass
    found = itself.run("pearl", {"window": 4, "pre_verify": False})
    assert found.phase_seconds["draft"] == pytest.approx(prompts * (4 + 6 * 0.5))


def test_each_shape_is_timed_once(
    near: Pair, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulator(near)
    for name, given in [
        ("mtad", {"k": 2}),
        ("mtad", {"k": 3, "tau": 0.5}),
        ("mtad", {"beams": 2}),
        ("bild", {}),
    ]:
        made.run(name, given)
    assert timed == ["mtad", "mtad", "bild"]
    monkeypatch.undo()
    real = Simulator(near, made.references, GREEDY, made.costs, clock=count().__next__)
    assert real.run("mtad", {"k": 2}).seconds > 0


def test_adaptive_learns_from_prompt_to_prompt_of_one_simulation(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulator(near)
    taught = Counter[int]()
    learn = Acceptance.learn

    def counted(self: Acceptance, score: float, accepted: bool) -> None:
        taught[id(self)] += 1
        learn(self, score, accepted)

    with monkeypatch.context() as patched:
        patched.setattr(Acceptance, "learn", counted)
        found = made.run("adaptive", {})
    assert found.token_ids == [
        token for reference in made.references for token in reference.token_ids
    ]
    assert found.drafted > 0
    unseen = found.accepted + found.rejections - sum(taught.values())
    assert unseen <= len(made.references), (
        "all judged tokens of all prompts but end-of-sequence tokens"
    )
    made.run("svip", {})
    assert made.run("adaptive", {}).seconds == pytest.approx(found.seconds)
    assert made.run("adaptive", {"draft_cost": 100}).drafted < found.drafted


def test_an_output_that_ends_early_is_simulated_to_its_end(near: Pair) -> None:
    ended = ReferenceOutput([5, 9], [7, 3, EOS], 24, frozenset({EOS}), 0.1, 0.2)
    assert Simulator(near, [ended], GREEDY, {"model": COSTS}).run("sd", {"k": 4}).token_ids == [
        7,
        3,
        EOS,
    ]
