"""Length policies on drafters that draft level by level: which token the policy sees, and that the output stays lossless."""

from __future__ import annotations

import pytest
import torch
from enumeration import PROMPT
from scripted_models import VOCAB, TableRunner, ids_of, scripted_run

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import logits_ops
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import DraftedToken, LengthPolicy
from specgen.methods.mtad_search import BeamSearchDrafter
from specgen.methods.multi_draft_tree import MultiDraftDrafter, k_sequential, multi_round
from specgen.methods.sd import Confidence
from specgen.methods.svip import SVIP

SEEN = frozenset({"entropy", "prob", "top_prob", "margin"})
RULES = {"specinfer": multi_round, "spectr": k_sequential}
POLICIES = {"confidence": lambda: Confidence(0.5, 2), "svip": lambda: SVIP(0.31, 0.15, 3)}  # longest drafts 2 and 3


class Recording(LengthPolicy):
    """Drafts three levels and records what it sees."""

    signals = SEEN

    def __init__(self) -> None:
        self.seen: list[DraftedToken] = []

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.seen.append(token)
        return token.position < 3


def check(seen: DraftedToken, row: torch.Tensor, prob: float) -> None:
    """Assert that the policy saw the signals of a token drafted from the logits `row` with the probability `prob`."""
    probs = row.softmax(-1)
    top = probs.sort(descending=True).values
    wanted = {"entropy": float(-(probs * probs.log()).sum()), "prob": prob, "top_prob": top[0], "margin": top[0] - top[1]}
    assert {name: seen[name] for name in SEEN} == pytest.approx({name: float(wanted[name]) for name in SEEN}, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_of_several_chains_the_policy_sees_the_likeliest(temperature: float) -> None:
    changed = 0
    for seed in range(8):
        runner = TableRunner(seed, scale=0.7)
        policy, sampling = Recording(), SamplingParams(temperature=temperature)
        drafter = MultiDraftDrafter(Setup(runner, sampling, frozenset(), VOCAB, seed), drafts=4)  # type: ignore[arg-type]
        draft = drafter.propose(Context(PROMPT), policy, 9)
        assert draft.draws is not None
        levels = [draft.draws[start : start + 4] for start in (0, 4, 8)]
        joint, before = [1.0] * 4, 0
        for seen, nodes in zip(policy.seen, levels, strict=True):
            rows = [runner.row([*PROMPT, *path(draft, node)[:-1]]) for node in nodes]
            warped = [row.softmax(-1) if not temperature else logits_ops.warp(row, sampling) for row in rows]
            probs = [float(part[draft.tokens[node]]) for part, node in zip(warped, nodes, strict=True)]
            joint = [old * new for old, new in zip(joint, probs, strict=True)]
            best = joint.index(max(joint))
            check(seen, rows[best], probs[best])
            changed += nodes[best] != nodes[before]
            before = best
    assert changed, "another chain becomes the likeliest on the way"


@pytest.mark.parametrize("stochastic", [False, True])
def test_of_several_beams_the_policy_sees_the_likeliest(stochastic: bool) -> None:
    runner, policy, sampling = TableRunner(3), Recording(), SamplingParams(temperature=0.8 if stochastic else 0.0)
    setup = Setup(runner, sampling, frozenset(), VOCAB)  # type: ignore[arg-type]
    BeamSearchDrafter(setup, width=VOCAB**2, stochastic=False).propose(Context(PROMPT), policy, 9)
    warping = logits_ops.likelihood_warping(sampling)
    paths = {(): 1.0}
    for seen in policy.seen:
        longer = {}
        for tokens, before in paths.items():
            for token, prob in enumerate(logits_ops.warp(runner.row([*PROMPT, *tokens]), warping).tolist()):
                longer[*tokens, token] = before * prob
        paths = longer
        best = max(paths, key=lambda tokens: paths[tokens])
        row = runner.row([*PROMPT, *best[:-1]])
        check(seen, row, float(logits_ops.warp(row, warping)[best[-1]]))


def path(draft: Draft, node: int) -> list[int]:
    """The tokens on the path to a node."""
    return [*path(draft, draft.parents[node]), draft.tokens[node]] if node >= 0 else []


POLICIES_OF = {
    "spectr": {"drafts": 3},
    "specinfer": {"drafts": 2},
    "mtad": {"beams": 3},
    "bild": {"fallback": 0.1},
    "eesd-tree": {"width": 2},
}


@pytest.mark.parametrize("name", POLICIES_OF)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_that_can_be_fed_ends_drafts(name: str, temperature: float) -> None:
    """Each policy decides in a run, and greedy output of a lossless method stays plain decoding's."""
    method, sampling = methods.find(name), SamplingParams(max_new_tokens=24, temperature=temperature)
    target, draft = TableRunner(1), TableRunner(5)
    plain = ids_of(scripted_run("ar", {}, target, None, sampling).rounds())
    wanted = {"fixed": "limit", "heuristic": "limit", "confidence": "prob", "svip": "√cH", "beta-ts": "bandit", "selfsd": "prob"}
    wanted["adaptive"] = "gain"
    assert set(methods.available_policies(method)) == {*wanted, "cali-ts"}
    wanted["cali-ts"] = "bandit"
    for policy, reason in wanted.items():
        given = {"policy": policy, **POLICIES_OF[name]}
        given |= {"model_prediction": False} if policy == "cali-ts" and name != "eesd-tree" else {}
        rounds = list(scripted_run(name, given, target, draft, sampling).rounds())
        assert any((round_.draft.stop_reason or "").startswith(reason) for round_ in rounds), policy
        if method.lossless and not temperature:
            assert ids_of(rounds) == plain, policy


def test_the_bandit_of_a_tree_is_the_one_asked_for() -> None:
    tree = methods.find("eesd-tree")
    for has_predictor in (True, False, None):
        settings = methods.resolve(tree, {"policy": "beta-ts", "alpha": 3}, has_predictor=has_predictor)
        assert (settings.policy, settings.values["alpha"], settings.values["depth"]) == ("beta-ts", 3, 5)
    assert methods.resolve(tree, {}, has_predictor=True).policy == "cali-ts"
    assert methods.resolve(tree, {}, has_predictor=False).policy == "beta-ts"
    asked_for = methods.resolve(tree, {"policy": "cali-ts"}, has_predictor=False)
    assert asked_for.policy == "cali-ts"
    assert "or use policy=beta-ts" in str(tree.without_predictor().hint)
    with pytest.raises(SpecgenError, match="spectr cannot use the policy 'cali-ts': its drafter does not compute predicted_acc"):
        methods.resolve(methods.find("spectr"), {"policy": "cali-ts"})
    with pytest.raises(SpecgenError, match="eesd-beta has no setting 'policy'"):
        methods.resolve(methods.find("eesd-beta"), {"policy": "svip"})


@pytest.mark.parametrize(
    ("name", "given", "k", "depth"),
    [
        ("eesd-tree", {}, 5, 5),
        ("eesd-tree", {"k": "3"}, 3, 3),
        ("eesd-tree", {"depth": "8"}, 8, 8),
        ("eesd-tree", {"k": 100}, 100, 64),
        ("eesd-tree", {"k": 4, "depth": 2}, 4, 2),
        ("sd", {"width": 2, "depth": 7}, 7, 7),
        ("sd", {"width": 2, "k": 7}, 7, "auto"),
        ("sd", {"width": 2, "depth": "auto"}, 5, "auto"),
    ],
)
def test_k_and_depth_of_a_tree_of_fixed_depth(name: str, given: dict[str, object], k: int, depth: object) -> None:
    """The one that is given alone sets both; of two given ones the smaller ends the tree."""
    values = methods.resolve(methods.find(name), {"policy": "fixed"} | given).values
    assert (values["k"], values["depth"]) == (k, depth)
