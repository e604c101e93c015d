"""Drafters that compute all rows of a draft at once: PARD's rows by their definition, and exact
sampling by enumeration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model, model_of
from runner_checks import path_to

import specgen
from specgen import demo, methods
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.marginal_tree import MarginalTreeDrafter
from specgen.decoding.policy_base import Fixed
from specgen.engine.block_runner import LONGEST_DRAFT, BlockRunner, PardRunner
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.model_runner import ModelRunner
from specgen.methods.base import DraftModelMethod, PartMethod, drafting_case
from specgen.methods.drafting_knowledge import DraftingKnowledge
from specgen.pair.pair import Pair
from specgen.testing.enumeration import PROMPT, ROUNDING, Case, SmallRunner, distance
from specgen.testing.scripted_models import scripted_run

THREE = (3, 3)


class RowTable(BlockRunner):
    """Rows that depend on the context's last two tokens; with `markov` also on the token before, as
    DSpark's."""

    def __init__(self, case: Case, *, markov: bool = False, draws: bool = False) -> None:
        size = case.sizes[1]
        super().__init__(SmallRunner(0, size), 3, None)
        self.independent = not markov
        self.draws = draws
        self._tables = [
            SmallRunner(case.seed + 100 + row, size, zero=case.zero) for row in range(3)
        ]
        self._bias = SmallRunner(case.seed + 200, size).table[0, :, :size] * markov

    def rows(self, context: Context, count: int) -> ModelOutput:
        return ModelOutput(torch.stack([table.row(context.ids) for table in self._tables]))

    def after(self, tokens: Sequence[int], rows: ModelOutput) -> ModelOutput:
        logits = rows.logits + self._bias[list(tokens)]
        return ModelOutput(logits, logits)  # the scripted predictor reads the hidden states


CASES = [
    Case("sd", {"k": 3}, 5, THREE, {"top_k": 2}, eos=(2,)),
    Case("sd", {"k": 2}, 4, THREE, zero=True, seed=1),
    Case("sd", {"policy": "confidence", "threshold": 0.4, "max_draft": 3}, 5, seed=2),
    Case("sd", {"policy": "svip", "threshold": 0.25, "max_draft": 3}, 5),
    Case("eesd-cali", {"theta0": 0.9, "max_draft": 3}, 4),
    Case("eesd-fixed", {"policy": "adaptive", "draft_cost": 0.01, "verify_cost": 0.2}, 5, seed=2),
    Case("sd", {"depth": 3, "width": 2, "nodes": 4}, 4, THREE, eos=(2,)),
    Case("block", {"nodes": 5, "k": 2}, 4, THREE, {"top_k": 2}, zero=True),
    Case("block", {"k": 3, "policy": "fixed"}, 4, THREE, {"top_p": 0.8, "temperature": 1.3}),
    Case("block", {"policy": "cali-ts", "sampling_prediction": False, "max_draft": 3}, 4),
]


@pytest.mark.parametrize("kind", ["likeliest", "drawn", "markov"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampling_is_lossless(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = RowTable(case, markov=kind == "markov", draws=kind != "likeliest")
    assert distance(case, draft) < ROUNDING


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of(make_model("llama"), "native")


def test_rows_of_pard_are_those_of_masks_behind_the_context_whatever_is_drafted(llama: Any) -> None:
    """Also after drafts of other lengths, of which a part was accepted: what masks left in the
    cache is dropped."""
    runner = PardRunner(ModelRunner(llama), 2)
    context = Context([1, 5, 6, 7])
    mask = 2
    for longest, accepted in ((3, 2), (0, 0), (6, 6), (LONGEST_DRAFT - 1, 1), (1, 0), (9, 9)):
        draft = [9 + 3 * node for node in range(longest)]
        found = [
            runner.logits(context, draft[:node], start=node).logits[0]
            for node in range(longest + 1)
        ]
        expected = llama.reference_logits([*context.ids, *[mask] * longest])[-longest - 1 :]
        torch.testing.assert_close(torch.stack(found), expected, atol=1e-4, rtol=1e-4)
        context.extend([*draft[:accepted], 30])
    tree = runner.logits(context, [3, 4, 5], [-1, -1, 1]).logits
    assert torch.equal(tree[1], tree[2]), "two tokens on one level"
    torch.testing.assert_close(
        tree,
        llama.reference_logits([*context.ids, mask, mask])[[-3, -2, -2, -1]],
        atol=1e-4,
        rtol=1e-4,
    )


def test_the_pass_of_pard_is_as_long_as_the_last_drafts(llama: Any) -> None:
    own = ModelRunner(llama)
    context = Context([1, 5, 6, 7])
    rows = list[int]()
    runner = PardRunner(own, 2)
    for token in range(20):
        before = own.forward_count
        for drafted in range(4):
            runner.logits(context, [9] * drafted, start=drafted)
        assert own.forward_count == before + 1
        assert runner._computed is not None
        rows.append(len(runner._computed[2].logits))
        context.extend([3 + token])
    assert (rows[0], rows[-1]) == (LONGEST_DRAFT, 4)


def pard_draft(folder: Path, mask: int) -> str:
    """The bundled draft model, whose config calls one of its tokens PARD's mask."""
    shutil.copytree(demo.folder("draft"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "pard_token": mask, "spd_type": "pard"})
    )
    return str(folder)


def test_a_draft_model_with_a_pard_token_drafts_in_one_pass(tmp_path: Path) -> None:
    target = str(demo.folder("target"))
    sampling = specgen.SamplingParams(max_new_tokens=24)
    with specgen.load(target, pard_draft(tmp_path / "draft", 0), dtype="float32") as pair:
        plain = pair.generate("def f(", "ar", sampling).token_ids
        for method in ("sd", "svip", "adaptive", "spectr", "ouroboros", "pearl"):
            assert pair.generate("def f(", method, sampling).token_ids == plain
    with (
        specgen.load(target, pard_draft(tmp_path / "wrong", 99_999), dtype="float32") as pair,
        pytest.raises(SpecgenError, match="pard_token is 99999"),
    ):
        pair.generate("def f(", "sd")


def test_adaptive_counts_one_pass_a_draft_where_this_pass_drafts_a_block(tmp_path: Path) -> None:
    """A PARD model and the head of the method `block` draft so; Medusa's heads are small."""

    def start_cost(pair: Pair, name: str, **settings: Any) -> float:
        method = methods.find(name)
        assert isinstance(method, DraftModelMethod | PartMethod)
        sampling = SamplingParams(temperature=1, seed=0)  # costs that nobody measures
        request = pair.request([1, 2], name, sampling, policy="adaptive", **settings)
        case = drafting_case(pair.models, request, method.setup(pair.models, request))
        return DraftingKnowledge(pair.models).inputs(case).costs.start

    with specgen.load() as pair:
        costs = {name: start_cost(pair, name) for name in ("sd", "block", "medusa", "eagle")}
        assert start_cost(pair, "block", draft_cost=0.1, verify_cost=0.03) == 0
    assert costs.pop("block") > 0
    assert set(costs.values()) == {0}
    target = str(demo.folder("target"))
    with specgen.load(target, pard_draft(tmp_path / "draft", 0), dtype="float32") as pair:
        assert start_cost(pair, "sd") > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [2, 9])
def test_best_first_trees_have_the_likeliest_paths(seed: int, k: int) -> None:
    """By comparison with all paths of at most k of three rows, by the product of their
    probabilities."""
    case = Case("block", {"nodes": 9}, 9, (4, 4), seed=seed)
    draft = RowTable(case)
    context = Context(PROMPT)
    probs = [row.softmax(-1).tolist() for row in draft.rows(context, 3).logits]
    values = {
        path: prod(probs[level][token] for level, token in enumerate(path))
        for length in range(1, min(k, 3) + 1)
        for path in product(range(4), repeat=length)
    }
    drafter = MarginalTreeDrafter(Setup(draft, SamplingParams(), vocab_size=4), nodes=9)
    made = drafter.propose(context, Fixed(k), 9)
    tokens = list(made.tokens)
    parents = list(made.parents)
    assert {tuple(path_to(tokens, parents, node)) for node in range(9)} == set(
        sorted(values, key=lambda path: -values[path])[:9]
    )


@pytest.mark.parametrize(
    ("method", "lacking"),
    [("block", "this head has none"), ("eesd-cali", "the exit layer has none")],
)
def test_a_policy_without_its_predictor_names_what_lacks_it(method: str, lacking: str) -> None:
    settings = {"policy": "cali-ts"} if method == "block" else {}
    draft = RowTable(CASES[0])
    with pytest.raises(SpecgenError, match=lacking):
        scripted_run(method, settings, draft, draft, SamplingParams(), predictor=None)
