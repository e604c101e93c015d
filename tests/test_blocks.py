"""Drafters that compute all rows of a draft at once: PARD's rows by their definition, and exact
sampling by enumeration."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run_main
from families import make_model, model_of
from head_layouts import change_head, write_head
from part_references import Part
from runner_checks import CPU, path_to

import specgen
from specgen import demo, methods
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.marginal_tree import MarginalTreeDrafter
from specgen.decoding.policy_base import Fixed
from specgen.decoding.verification import RejectionSampling
from specgen.engine.block_runner import LONGEST_DRAFT, BlockRunner, PardRunner
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.attention_mask import ChainSlots, chain_mask
from specgen.engine.native.linear import LinearFactory
from specgen.engine.parts.block import BlockHeadRunner, BlockPass
from specgen.engine.parts.candidate_selector import (
    PREDECESSORS,
    STATE_PROJECTION,
    SUCCESSORS,
    CandidateSelector,
)
from specgen.methods.base import DraftModelMethod, PartMethod, drafting_case
from specgen.methods.drafting_knowledge import DraftingKnowledge
from specgen.pair.pair import Pair
from specgen.testing.enumeration import PROMPT, ROUNDING, Case, SmallRunner, distance
from specgen.testing.scripted_models import scripted_run

THREE = (3, 3)


class RowTable(BlockRunner):
    """Rows that depend on the context's last two tokens; with `markov` also on the token before, as
    DSpark's; with `candidates` a selector chooses among so many, as DFlash2's."""

    def __init__(
        self, case: Case, *, markov: bool = False, draws: bool = False, candidates: int = 0
    ) -> None:
        size = case.sizes[1]
        super().__init__(SmallRunner(0, size), 3, None)
        self.independent = not (markov or candidates)
        self.draws = draws
        self.sizes_blocks = True
        self._planned: int | None = None
        self._tables = [
            SmallRunner(case.seed + 100 + row, size, zero=case.zero) for row in range(3)
        ]
        self._bias = SmallRunner(case.seed + 200, size).table[0, :, :size] * markov
        self._selector = random_selector(candidates, size, case.seed) if candidates else None

    def plan(self, levels: int | None) -> None:
        self._planned = levels

    def rows(self, context: Context, count: int) -> ModelOutput:
        """Rows see later ones: those of a shorter block are others."""
        size = len(self._tables)
        if self._planned is not None:
            size = min(max(count, self._planned), size)
            self._planned = None
        rows = [table.row(context.ids) for table in self._tables[:size]]
        return ModelOutput(torch.stack(rows) * (len(self._tables) / size))

    def after(self, tokens: Sequence[int], rows: ModelOutput) -> ModelOutput:
        logits = rows.logits + self._bias[list(tokens)]
        if self._selector is not None:
            states = rows.logits.clamp_min(-9)
            logits = self._selector(torch.tensor(tokens), logits, states)
        return ModelOutput(logits, logits)  # the scripted predictor reads the hidden states


def random_selector(candidates: int, size: int, seed: int) -> CandidateSelector:
    """A selector of rank 2 for `size` tokens, whose states are the rows' logits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {STATE_PROJECTION: (2, size), PREDECESSORS: (size, 2), SUCCESSORS: (size, 2)}
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return CandidateSelector(
        candidates, tensors.__getitem__, LinearFactory(CPU, torch.float32), lambda logits: logits
    )


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
    Case("block", {"draft_cost": 0.05, "verify_cost": 0.35, "exploration": 0.5}, 5, seed=3),
    Case("block", {"policy": "cali-ts", "sampling_prediction": False, "max_draft": 3}, 4),
]


@pytest.mark.parametrize("kind", ["likeliest", "drawn", "markov", "selected"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampling_is_lossless(case: Case, kind: str) -> None:
    """Selected: one of the likeliest tokens but one, so that q is 0 for some token."""
    candidates = case.sizes[1] - 1 if kind == "selected" else 0
    draft = RowTable(
        case, markov=kind == "markov", draws=kind != "likeliest", candidates=candidates
    )
    assert distance(case, draft) < ROUNDING


def test_a_target_that_draws_as_the_candidates_do_accepts_all() -> None:
    """What is left of p after q is 0 then: the target draws from p, also after roundings."""
    case = Case("block", {"k": 2}, 3, THREE)
    draft = RowTable(case, draws=True, candidates=2)
    output = draft.logits(Context(PROMPT), [0, 1])
    probs = output.logits.softmax(-1)
    verifier = RejectionSampling(SamplingParams(temperature=1.0), CPU, 0)
    tokens = probs.argmax(-1)[:2].tolist()
    verdict = verifier.verify(Draft.chain(tokens, probs=probs[:2]), output)
    assert len(verdict.path) == 2
    nudged = probs[:1].nextafter(torch.ones(1))  # q is a little more than p wherever p is not 0
    never = int(probs[0].argmin())
    rejected = verifier.verify(Draft.chain([never], probs=nudged), output.first(2))
    assert rejected.path == ()
    assert rejected.token != never


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


@pytest.mark.parametrize(
    "written",
    ["block", "block:nodes=8", "medusa", "medusa:nodes=0", "eagle", "eagle:width=1", "glide"],
)
def test_a_round_without_a_draft_runs_no_head(
    demo_pair: Pair, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a tree is drafted from rows that are all computed at once."""
    passes = 0

    def counted(run: Any) -> Any:
        def logits(*arguments: Any, **options: Any) -> ModelOutput:
            nonlocal passes
            passes += 1
            return run(*arguments, **options)

        return logits

    runners = demo_pair.parts.runners(written.partition(":")[0])
    assert runners is not None
    assert runners.draft is not None
    monkeypatch.setattr(runners.draft, "logits", counted(runners.draft.logits))
    for cost in (0.0, 10.0):
        settings = {"policy": "adaptive", "draft_cost": cost, "verify_cost": 0.0}
        passes = 0
        result = demo_pair.generate(
            "def f(x):", written, SamplingParams(max_new_tokens=6), **settings
        )
        has_drafted = any(round_.draft.tokens for round_ in result.rounds)
        assert (passes > 0, has_drafted) == (cost == 0, cost == 0)


def random_dflash2(folder: Path, **sizes: Any) -> Path:
    """A random DFlash2 head for the bundled target."""
    return write_head(folder, "block-dflash2", demo.folder("target"), causal=False, **sizes)


def test_a_dflash2_head_decodes_as_the_target_alone(tmp_path: Path) -> None:
    """Also in blocks that are shorter than trained, in trees, and beyond the window."""
    head = random_dflash2(tmp_path / "head", block_rows=6, head_layers=2)
    sampling = SamplingParams(max_new_tokens=16)
    prompt = "def f(x):\n    return x\n" * 6
    with specgen.load(head=str(head), dtype="float32") as pair:
        plain = pair.generate(prompt, "ar", sampling).token_ids
        for settings in ({}, {"block_size": 3}, {"nodes": 6}, {"k": 2}, {"policy": "svip"}):
            found = pair.generate(prompt, "block", sampling, **settings)
            assert found.token_ids == plain, settings
        longest = {
            settings.get("block_size", 6): max(
                len(round_.draft.tokens)
                for round_ in pair.rounds(prompt, "block", sampling, k=9, **settings)
            )
            for settings in ({}, {"block_size": 3})
        }
        assert longest == {6: 5, 3: 2}
        with pytest.raises(SpecgenError, match="block_size=7: the head's blocks have 6 rows"):
            pair.generate(prompt, "block", sampling, block_size=7)
        first, second = (
            pair.generate(prompt, "block", SamplingParams(temperature=1, seed=seed))
            for seed in (1, 1)
        )
        assert first.token_ids == second.token_ids


def test_commands_run_and_show_a_dflash2_head_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And refuse one without a codebook in one line."""
    folder = str(random_dflash2(tmp_path / "head", block_rows=8))
    command = partial(run_main, monkeypatch, capfd)

    code, out, _ = command("inspect", "--head", folder, "--json")
    shown = json.loads(out)
    assert (code, shown["methods"]["block"]["ready"]) == (0, True)
    assert shown["head"]["about"] == (
        "DFlash2, 1 layer, 7 tokens from a block of 8 rows, each one of 4 candidates"
    )
    has_kernels = shown["target"]["no_kernels"] is None
    assert shown["head"]["on_torch"] == ["convolutions of rows"] * has_kernels
    code, out, _ = command("inspect", "--head", folder)
    assert "DFlash2, 1 layer, 7 tokens" in " ".join(out.split())

    options = ["-q", "-n", "12"]
    texts = [
        command("generate", "def f(x):", "-m", method, "--head", folder, *options)[:2]
        for method in ("block", "ar")
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] == 0
    code, out, _ = command(
        "compare", "-m", "block", "--head", folder, "--limit", "1", "--json", *options
    )
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert any(row.get("method") == "block" for row in rows)

    change_head(Path(folder), lambda raw: raw.pop(PREDECESSORS))
    code, out, err = command("generate", "hi", "-m", "block", "--head", folder)
    assert (code, out) == (2, "")
    assert f"lacks 1 of its tensors (the first: {PREDECESSORS})" in " ".join(err.split())


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_may_be_run_shorter_than_trained(causal: bool) -> None:
    """Its rows are those of so many masks, and others than the trained block's where rows see
    later ones. Both share what they keep of the context."""
    part = Part("block-dflash2", block_rows=8, head_layers=2, causal=causal)
    context = Context([1, 5, 6, 7])
    whole = part.made.draft
    for accepted in ([9], [30, 8, 21], [11]):
        long_row = whole.logits(context).logits
        short = whole.shortened(4)
        assert (whole.traits.longest_draft, short.traits.longest_draft) == (7, 3)
        part.block_rows = 4
        part._rows.clear()
        short_row = short.logits(context, [9, 10]).logits
        for index in range(3):
            expected = part.row(context.ids, [9, 10][:index])
            torch.testing.assert_close(short_row[index], expected, atol=5e-3, rtol=1e-2)
        assert torch.allclose(long_row[0], short_row[0], atol=1e-3) == causal
        part.made.target.logits(context, accepted)
        context.extend([*accepted, 12])


def test_a_round_keeps_the_context_of_accepted_tokens_and_nothing_of_the_block() -> None:
    """A head that has drafted in each round keeps what one keeps that reads the context at once,
    up to the tokens of which the target has features."""
    part = Part("block-dflash2", head_layers=2, causal=False)
    fresh = Part("block-dflash2", head_layers=2, causal=False)
    context = Context([1, 5, 6, 7])
    for draft, accepted in (([9, 10, 11], 2), ([12, 13], 0), ([14, 15, 16], 3)):
        part.made.draft.logits(context, draft)
        part.made.target.logits(context, draft)
        context.extend([*draft[:accepted], 20 + accepted])
    own, other = (made.draft._pass for made in (part.made, fresh.made))
    part.made.draft.logits(context)
    fresh.made.draft.logits(Context(context.ids))
    known = len(context) - 1
    assert own._cached.committed == other._cached.committed == known
    for layer in range(2):
        for kept, expected in zip(
            own.cache.keys_and_values(layer, known),
            other.cache.keys_and_values(layer, known),
            strict=True,
        ):
            torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)


def test_a_window_of_rows_that_see_both_ways_is_as_wide_before_them_as_behind_them() -> None:
    """By our own kernels' ranges and by a mask, of the rows 5 to 9 with a window of 3."""
    expected = [[abs(key - row) < 3 for key in range(10)] for row in range(5, 10)]
    ranges = ChainSlots(3, causal=False).rows(5, 10).ranges.tolist()
    assert [[first <= key < last for key in range(10)] for first, last, *_ in ranges] == expected
    mask = chain_mask(5, 5, 0, 10, CPU).both_ways(3).additive(3, torch.float32)
    assert (mask == 0).tolist() == expected


@pytest.mark.parametrize("left_out", ["selector", "convolutions"])
def test_a_head_without_a_part_of_dflash2_drafts_otherwise(left_out: str) -> None:
    """Readers that ignore the selector or the convolutions run, and only draft worse."""
    part = Part("block-dflash2", causal=False)
    changes: dict[str, Any] = {"candidates": 0} if left_out == "selector" else {"conv_group": 0}
    other = BlockHeadRunner(dataclasses.replace(part.weights, **changes), part.model, None, None)

    def walk(runner: Any, context: Context) -> list[int]:
        tokens: list[int] = []
        for length in range(4):
            row = runner.logits(context, tokens, start=length).logits[0]
            tokens.append(int(row.argmax()))
        return tokens

    contexts = [Context([1, 5 + start, 6, 7]) for start in range(10)]
    differing = sum(walk(part.made.draft, each) != walk(other, each) for each in contexts)
    assert differing >= 8


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


def test_a_block_has_the_rows_that_the_policy_asks_for(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tokens cost much, blocks are short, and the output stays that of plain decoding. Other
    policies leave the block as long as in training."""
    rows: list[int] = []
    run = BlockPass.rows

    def counted(own: BlockPass, context: Context, count: int) -> ModelOutput:
        rows.append(count)
        return run(own, context, count)

    monkeypatch.setattr(BlockPass, "rows", counted)
    sampling = SamplingParams(max_new_tokens=48, ignore_eos=True)
    prompt = "def mean(numbers):"
    plain = demo_pair.generate(prompt, "ar", sampling)
    costs = {"draft_cost": 0.2, "verify_cost": 0.3, "exploration": 100.0}
    made = demo_pair.generate(prompt, "block", sampling, **costs)
    assert made.token_ids == plain.token_ids
    lengths = [len(round.draft.tokens) for round in made.rounds if round.draft.tokens]
    assert len(lengths) == len(rows)
    assert all(length <= count < 8 for length, count in zip(lengths, rows, strict=True))
    assert len(set(rows)) > 1
    rows.clear()
    demo_pair.generate(prompt, "block", sampling, k=2, nodes=6)
    assert set(rows) == {8}
