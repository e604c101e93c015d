"""MTAD and BiLD on hand-made logits and scripted models, compared with exact multi-token joint decoding where possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from statistics import mean

import pytest
import torch
from families import make_model, model_of
from scripted_models import PROMPT, VOCAB, TableRunner, ids_of, scripted_run

from specgen.base.errors import RunError
from specgen.base.types import Context, Draft, Round, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import Fixed, comparison
from specgen.engine.forward_pass import ForwardPass, ModelOutput
from specgen.engine.model_runner import ModelRunner
from specgen.methods.bild_drafting import BildDrafter, BildVerifier
from specgen.methods.mtad_search import BeamSearchDrafter, JointLikelihoodVerifier

CPU = torch.device("cpu")
SAMPLING, GREEDY = SamplingParams(temperature=1.0), SamplingParams()


def rows(*probs: Sequence[float]) -> ModelOutput:
    return ModelOutput(torch.tensor(probs).log())


def draft(tokens: Sequence[int], probs: Sequence[float]) -> Draft:
    """A chain, from the draft's conditional probability of each token."""
    joint = [sum(map(math.log, probs[: position + 1])) for position in range(len(probs))]
    return Draft(tokens, range(-1, len(tokens) - 1), log_likelihoods=joint)


def accepted(tau: float, proposed: Draft, given: ModelOutput, sampling: SamplingParams = SAMPLING) -> int:
    return len(JointLikelihoodVerifier(sampling, CPU, 0, tau).verify(proposed, given).path)


class TestJointAcceptance:
    # P_j / Q_j: 0.1 / 0.8 = 0.125, then 0.9 / 0.4 on top: 0.28, then 0.2 / 0.8 on top: 0.07
    PROPOSED = draft((0, 1, 2), (0.8, 0.4, 0.8))
    GIVEN = rows((0.1, 0.6, 0.3), (0.05, 0.9, 0.05), (0.5, 0.3, 0.2), (0.2, 0.2, 0.6))

    @pytest.mark.parametrize(
        ("tau", "count"), [(0.0, 3), (0.06, 3), (0.08, 2), (0.12, 2), (0.2, 2), (0.28, 2), (0.285, 0), (0.5, 0), (1.0, 0)]
    )
    def test_the_longest_prefix_above_the_threshold(self, tau: float, count: int) -> None:
        """With tau 0.2 the first token alone fails (0.125), but passes with the second (0.28)."""
        assert accepted(tau, self.PROPOSED, self.GIVEN) == count

    @pytest.mark.parametrize("tau", [0.0, 0.01, 0.1])
    def test_a_likelihood_of_zero_ends_all_longer_prefixes(self, tau: float) -> None:
        given = rows((0.6, 0.4, 0.0), (0.5, 0.0, 0.5), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0))
        assert accepted(tau, draft((0, 1, 2), (0.6, 0.5, 0.01)), given) == 1

    def test_outside_the_targets_nucleus_is_a_likelihood_of_zero(self) -> None:
        sampling = SamplingParams(temperature=1.0, top_k=2)
        assert accepted(0.0, self.PROPOSED, self.GIVEN, sampling) == 0, "the third token of the first row is cut"
        assert accepted(0.0, draft((1, 1), (0.5, 0.5)), self.GIVEN, sampling) == 2

    def test_a_ratio_above_one_counts_as_one(self) -> None:
        likelier = draft((1, 1), (0.1, 0.1))
        assert accepted(0.999, likelier, self.GIVEN) == 2
        assert accepted(1.0, likelier, self.GIVEN) == 0, "a threshold of one accepts nothing"

    def test_joint_likelihoods_do_not_underflow(self) -> None:
        """Forty tokens of probability 1e-9: a product in float32 would be zero after the fifth."""
        row = torch.tensor([1e-9, 1 - 1e-9])
        assert accepted(0.5, draft([0] * 40, [1e-9] * 40), ModelOutput(row.log().expand(41, 2))) == 40

    @pytest.mark.parametrize("sampling", [SAMPLING, GREEDY])
    def test_the_token_behind_is_the_targets_own_not_a_residuals(self, sampling: SamplingParams) -> None:
        verifier = JointLikelihoodVerifier(sampling, CPU, 0, 0.5)
        verdicts = [verifier.verify(draft((0,), (0.99,)), rows((0.3, 0.5, 0.2), (0.2, 0.2, 0.6))) for _ in range(300)]
        assert all(verdict.path == () and verdict.source == "correction" for verdict in verdicts)
        share = mean(verdict.token == 0 for verdict in verdicts)
        assert share == 0 if sampling.greedy else 0.2 < share < 0.4, "the refused token may come all the same"
        whole = verifier.verify(draft((0,), (0.3,)), rows((0.3, 0.5, 0.2), (0.0, 0.0, 1.0)))
        assert whole == Verdict((0,), 2, "bonus")
        assert verifier.verify(Draft(), rows((0.0, 1.0, 0.0))) == Verdict((), 1, None)


def beam_search(
    runner: object, sampling: SamplingParams, *, width: int, stochastic: bool = False, eos: tuple[int, ...] = ()
) -> BeamSearchDrafter:
    return BeamSearchDrafter(Setup(runner, sampling, eos, VOCAB, 3), width=width, stochastic=stochastic)  # type: ignore[arg-type]


def joint_argmax(
    runner: TableRunner, ids: Sequence[int], length: int, sampling: SamplingParams = SAMPLING, eos: tuple[int, ...] = ()
) -> tuple[list[int], float]:
    """Exact multi-token joint decoding (MTAD, section 3.1) of one block: every continuation is tried."""
    best: tuple[list[int], float] = ([], -math.inf)
    for tokens in product(range(VOCAB), repeat=length):
        ends = [position for position, token in enumerate(tokens) if token in eos]
        kept = list(tokens[: ends[0] + 1]) if ends else list(tokens)
        likelihood = sum(
            float(logits_ops.warp(runner.row([*ids, *kept[:position]]), sampling).log()[token])
            for position, token in enumerate(kept)
        )
        if likelihood > best[1]:
            best = (kept, likelihood)
    return best


class TestBeams:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_beams_that_are_wide_enough_find_the_joint_argmax(self, seed: int, length: int) -> None:
        runner = TableRunner(seed)
        found = beam_search(runner, SAMPLING, width=VOCAB ** (length - 1)).propose(Context(PROMPT), Fixed(length), 10)
        tokens, likelihood = joint_argmax(runner, PROMPT, length)
        assert found.tokens == tokens
        assert found.log_likelihoods[-1] == pytest.approx(likelihood, abs=1e-5)

    @pytest.mark.parametrize("seed", range(6))
    def test_beams_end_at_their_own_end_of_sequence_and_go_on_competing(self, seed: int) -> None:
        runner, eos = TableRunner(seed), (1, 4)
        found = beam_search(runner, SAMPLING, width=64, eos=eos).propose(Context(PROMPT), Fixed(3), 10)
        tokens, likelihood = joint_argmax(runner, PROMPT, 3, eos=eos)
        assert found.tokens == tokens
        assert found.log_likelihoods[-1] == pytest.approx(likelihood, abs=1e-5)
        assert not set(found.tokens[:-1]) & set(eos)

    def test_likelihoods_are_those_of_the_prefixes_after_warping(self) -> None:
        sampling = SamplingParams(temperature=0.7, top_k=3, top_p=0.9)
        runner = TableRunner(4)
        found = beam_search(runner, sampling, width=5).propose(Context(PROMPT), Fixed(4), 10)
        expected, total = [], 0.0
        for position, token in enumerate(found.tokens):
            row = runner.row([*PROMPT, *found.tokens[:position]])
            total += float(logits_ops.warp(row, sampling).log()[token])
            expected.append(total)
            entropy = torch.distributions.Categorical(logits=row).entropy()
            assert found.entropies[position] == pytest.approx(float(entropy), abs=1e-5)
            assert found.top_probs[position] == pytest.approx(float(row.softmax(-1).max()), abs=1e-5)
        assert found.log_likelihoods == pytest.approx(expected, abs=1e-5)

    def test_at_temperature_zero_likelihoods_are_those_at_temperature_one(self) -> None:
        runner = TableRunner(4)
        greedy = beam_search(runner, GREEDY, width=36, stochastic=True).propose(Context(PROMPT), Fixed(3), 10)
        assert greedy.tokens == joint_argmax(runner, PROMPT, 3)[0]

    def test_stochastic_beams_are_drawn_by_their_joint_likelihoods(self) -> None:
        """One beam is sampling from the draft; two are two draws without replacement."""
        runner = TableRunner(4)
        probs = runner.row(PROMPT).softmax(-1)
        single = beam_search(runner, SAMPLING, width=1, stochastic=True)
        drawn = torch.tensor([single.propose(Context(PROMPT), Fixed(1), 1).tokens[0] for _ in range(4000)])
        assert torch.allclose(drawn.bincount(minlength=VOCAB) / 4000, probs, atol=0.03)
        double = beam_search(runner, SAMPLING, width=2, stochastic=True)
        best = torch.tensor([double.propose(Context(PROMPT), Fixed(1), 1).tokens[0] for _ in range(4000)])
        expected = torch.zeros(VOCAB)
        for first, second in product(range(VOCAB), repeat=2):
            if first != second:
                likelier = first if probs[first] > probs[second] else second
                expected[likelier] += probs[first] * probs[second] / (1 - probs[first])
        assert torch.allclose(best.bincount(minlength=VOCAB) / 4000, expected, atol=0.03)

    def test_more_beams_than_continuations(self) -> None:
        sampling = SamplingParams(temperature=1.0, top_k=1)
        for stochastic in (False, True):
            found = beam_search(TableRunner(4), sampling, width=8, stochastic=stochastic).propose(Context(PROMPT), Fixed(3), 10)
            assert len(found.tokens) == 3
            assert found.log_likelihoods == pytest.approx([0, 0, 0])

    def test_a_step_is_one_pass_whatever_the_width(self) -> None:
        model = model_of(make_model("llama"), "native")
        passes: list[int] = []
        forward = model.forward()

        def counted(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            passes.append(forward_pass.last - forward_pass.first)
            return forward(forward_pass, logits_to_keep)

        search = BeamSearchDrafter(Setup(ModelRunner(model, None, counted), SAMPLING, frozenset(), 96), width=6, stochastic=False)
        context = Context([1, 5, 6, 7])
        first = search.propose(context, Fixed(4), 10)
        assert passes == [4, 6, 6, 6]
        context.extend([*first.tokens[:3], 9])
        search.propose(context, Fixed(4), 10)
        assert passes[4:] == [1, 6, 6, 6], "the accepted path's rows were kept"

    def test_nan_logits_are_an_error(self) -> None:
        runner = TableRunner(1)
        runner.table.fill_(math.nan)
        for stochastic in (False, True):
            with pytest.raises(RunError, match="draft model's logits hold NaN"):
                beam_search(runner, SAMPLING, width=3, stochastic=stochastic).propose(Context(PROMPT), Fixed(2), 5)


def run(name: str, settings: dict[str, object], target: TableRunner, draft: TableRunner, sampling: SamplingParams) -> list[Round]:
    return list(scripted_run(name, settings, target, draft, sampling, seed=sampling.seed or 0).rounds())


def log_likelihood(runner: TableRunner, tokens: Sequence[int], ids: Sequence[int] = PROMPT) -> float:
    return sum(float(runner.row([*ids, *tokens[:position]]).log_softmax(-1)[token]) for position, token in enumerate(tokens))


def greedy(runner: TableRunner, count: int, ids: Sequence[int] = PROMPT) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(runner.row([*ids, *tokens]).argmax()))
    return tokens


class TestMtad:
    @pytest.mark.parametrize("seed", range(4))
    def test_with_the_target_as_its_own_draft_and_wide_beams_it_is_exact_joint_decoding(self, seed: int) -> None:
        runner = TableRunner(seed)
        rounds = run("mtad", {"k": 3, "beams": 36, "tau": 0.5}, runner, runner, SamplingParams(max_new_tokens=13))
        ids = [*PROMPT, *rounds[0].token_ids]
        for round_ in rounds[1:]:
            assert round_.accepted_ids == joint_argmax(runner, ids, 3)[0]
            assert round_.verdict.source == "bonus"
            ids += round_.accepted_ids
            assert round_.verdict.token == int(runner.row(ids).argmax())
            ids.append(round_.verdict.token)

    @pytest.mark.parametrize("beam", ["greedy", "sample"])
    def test_a_threshold_of_zero_accepts_every_draft(self, beam: str) -> None:
        """MTAD, section 5.2.2: the draft model generates alone, with one token of the target after each draft."""
        settings = {"k": 3, "beams": 4, "tau": 0, "beam": beam}
        sampling = SamplingParams(max_new_tokens=17, temperature=1.0, seed=1)
        rounds = run("mtad", settings, TableRunner(1), TableRunner(2), sampling)
        assert [len(round_.verdict.path) for round_ in rounds] == [0, 3, 3, 3, 3]
        assert all(round_.verdict.source == "bonus" for round_ in rounds[1:])

    @pytest.mark.parametrize("settings", [{"beams": 1}, {"k": 1}, {"beams": 1, "k": 1}, {"beams": 256, "k": 2}])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_narrow_short_and_wide(self, settings: dict[str, object], temperature: float) -> None:
        """Each draft has up to k tokens, and of it the longest prefix with min(1, P / Q) above tau is accepted."""
        target, draft_model = TableRunner(1), TableRunner(2)
        accepted = []
        for beam, seed in product(("greedy", "sample"), range(3)):
            sampling = SamplingParams(max_new_tokens=10, temperature=temperature, seed=seed)
            rounds = run("mtad", {**settings, "beam": beam, "tau": 0.4}, target, draft_model, sampling)
            tokens = ids_of(rounds)
            assert len(tokens) == 10
            ids = [*PROMPT, *rounds[0].token_ids]
            for round_ in rounds[1:]:
                drafted, room = round_.draft.tokens, len(PROMPT) + 10 - len(ids)
                assert len(drafted) == min(settings.get("k", 4), room - 1)
                ratios = [
                    math.exp(log_likelihood(target, drafted[:length], ids) - log_likelihood(draft_model, drafted[:length], ids))
                    for length in range(1, len(drafted) + 1)
                ]
                assert len(round_.verdict.path) == max((at for at, ratio in enumerate(ratios, 1) if ratio > 0.4), default=0)
                accepted.append(len(round_.verdict.path))
                if settings.get("beams") == 1 and beam == "greedy":
                    assert list(drafted) == greedy(draft_model, len(drafted), ids)
                ids += round_.accepted_ids
                assert temperature or round_.verdict.token == greedy(target, 1, ids)[0]
                ids.append(round_.verdict.token)
            assert ids == [*PROMPT, *tokens]
        assert len(set(accepted)) > 1, "some drafts are accepted, and some are not"

    @pytest.mark.parametrize("name", ["mtad", "bild"])
    def test_an_end_of_sequence_ends_the_output(self, name: str) -> None:
        for seed in range(20):
            sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed)
            tokens = ids_of(scripted_run(name, {}, TableRunner(1), TableRunner(2), sampling, eos={1}, seed=seed).rounds())
            assert 1 not in tokens[:-1]
            assert tokens[-1] == 1 or len(tokens) == 12


class TestBild:
    SURE, UNSURE = (0.95, 0.03, 0.02), (0.5, 0.3, 0.2)

    def test_the_first_token_that_the_target_finds_bad_is_rolled_back(self) -> None:
        given = rows((0.2, 0.5, 0.3), (0.05, 0.9, 0.05), (0.6, 0.2, 0.2), (0.1, 0.1, 0.8))
        proposed = Draft((0, 0, 0), (-1, 0, 1))
        for rollback, count in ((0.1, 0), (2.0, 1), (3.1, 3)):  # -ln 0.2 is 1.6, -ln 0.05 is 3.0
            verdict = BildVerifier(GREEDY, CPU, 0, rollback).verify(proposed, given)
            assert len(verdict.path) == count
            assert verdict.token == (1, 1, None, 2)[count]
            assert verdict.source == ("bonus" if count == 3 else "correction")

    def test_the_targets_likeliest_token_always_stands(self) -> None:
        flat = rows(*[[0.26, 0.25, 0.25, 0.24]] * 2)
        assert BildVerifier(GREEDY, CPU, 0, 0.0).verify(Draft((0,), (-1,)), flat).path == (0,)
        assert BildVerifier(GREEDY, CPU, 0, 0.0).verify(Draft((1,), (-1,)), flat).path == ()

    def test_likelihoods_are_unwarped_but_the_own_token_is_warped(self) -> None:
        sampling = SamplingParams(temperature=5.0, top_k=1)
        given = rows((0.2, 0.7, 0.1), (0.3, 0.1, 0.6))
        assert BildVerifier(sampling, CPU, 0, 1.7).verify(Draft((0,), (-1,)), given) == Verdict((0,), 2, "bonus")
        assert BildVerifier(sampling, CPU, 0, 1.5).verify(Draft((0,), (-1,)), given) == Verdict((), 1, "correction")
        assert BildVerifier(sampling, CPU, 0, 1.5).verify(Draft(), rows((0.2, 0.7, 0.1))) == Verdict((), 1, None)

    def test_nan_logits_are_an_error(self) -> None:
        for sampling in (SAMPLING, GREEDY):
            with pytest.raises(RunError, match="target model's logits hold NaN"):
                BildVerifier(sampling, CPU, 0, 2.0).verify(Draft((0,), (-1,)), ModelOutput(torch.full((2, 3), torch.nan)))
        runner = TableRunner(1)
        runner.table.fill_(math.nan)
        with pytest.raises(RunError, match="draft model's logits hold NaN"):
            BildDrafter(Setup(runner, SAMPLING, frozenset(), VOCAB), fallback=0.5).propose(Context(PROMPT), Fixed(2), 5)  # type: ignore[arg-type]

    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.5, top_k=2)])
    def test_the_draft_hands_over_before_a_token_that_it_is_unsure_of(self, sampling: SamplingParams) -> None:
        runner = TableRunner(5, scale=3)
        drafter = BildDrafter(Setup(runner, sampling, frozenset(), VOCAB), fallback=0.8)  # type: ignore[arg-type]
        lengths = set()
        for last in range(VOCAB):
            context = Context([*PROMPT, last])
            found = drafter.propose(context, Fixed(4), 10)
            lengths.add(len(found.tokens))
            tops = [
                float(runner.row([*context.ids, *found.tokens[:position]]).softmax(-1).max())
                for position in range(len(found.tokens) + 1)
            ]
            assert all(top >= 0.8 for top in tops[:-1])
            assert found.top_probs == pytest.approx(tops[:-1], abs=1e-5)
            assert found.stop_reason == ("limit 4" if len(found.tokens) == 4 else f"unsure {comparison(tops[-1], '<', 0.8)}")
        assert len(lengths) > 1
        assert 0 in lengths, "a draft may be empty"

    def test_a_target_that_refuses_nothing_and_one_that_refuses_all_but_its_own(self) -> None:
        sampling = SamplingParams(max_new_tokens=16)
        strict = run("bild", {"fallback": 0, "rollback": 0, "k": 3}, TableRunner(1), TableRunner(2), sampling)
        assert ids_of(strict) == greedy(TableRunner(1), 16), "rollback 0 leaves only the target's argmax"
        lax = run("bild", {"fallback": 0, "rollback": 1000, "k": 3}, TableRunner(1), TableRunner(2), sampling)
        assert all(len(round_.verdict.path) == len(round_.draft.tokens) for round_ in lax)
        never = run("bild", {"fallback": 1, "k": 3}, TableRunner(1), TableRunner(2), sampling)
        assert not any(round_.draft.tokens for round_ in never)
        assert ids_of(never) == greedy(TableRunner(1), 16)
