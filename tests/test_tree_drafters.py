"""What drafters of trees propose: the likeliest of all candidates, CaPE's siblings; limits of all
drafts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.chain import ModelDrafter, further_candidates
from specgen.decoding.drafting import Setup
from specgen.decoding.policy_base import DraftedToken, Fixed
from specgen.decoding.tree import TopKTreeDrafter
from specgen.testing.scripted_models import PROMPT, VOCAB, TableRunner, scripted_run

Path = tuple[int, ...]
EOS = VOCAB - 1


class Seeing(Fixed):
    """Records the drafted tokens that it is shown."""

    signals = frozenset({"entropy", "prob", "top_prob"})

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.seen: list[DraftedToken] = []

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.seen.append(token)
        return super().keep_drafting(token)


def paths(draft: Draft) -> list[Path]:
    """The tokens from the context to each node."""
    found: list[Path] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def candidates(runner: TableRunner, width: int, levels: int) -> list[dict[Path, float]]:
    """All tokens that may be drafted by level, in the order in which a level lists them, with each
    path's log-likelihood."""
    found: list[dict[Path, float]] = []
    frontier: dict[Path, float] = {(): 0.0}
    for _ in range(levels):
        level = {}
        for before, joint in frontier.items():
            values, tokens = runner.row([*PROMPT, *before]).float().log_softmax(-1).topk(width)
            for value, token in zip(values, tokens.tolist(), strict=True):
                level[*before, token] = float(torch.tensor(joint) + value)
        best = sorted(level, key=lambda path: -level[path])[:width]
        frontier = {path: level[path] for path in best if path[-1] != EOS}
        found.append(level)
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    values=st.integers(1, 4),
    # with the larger one, some nodes are less likely than others of a later level
    scale=st.sampled_from([0.3, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    width=st.integers(2, VOCAB),
    levels=st.integers(1, 4),
    nodes=st.integers(0, 60),  # 0: no limit
)
def test_the_likeliest_of_all_candidates_are_drafted(
    seed: int, values: int, scale: float, dtype: torch.dtype, width: int, levels: int, nodes: int
) -> None:
    """Also among equally likely ones, of which the earlier level's come first. The policy sees each
    level's likeliest."""
    runner = TableRunner(0)
    policy = Seeing(levels)
    generator = torch.Generator().manual_seed(seed)
    runner.table = (
        torch.randint(values, (VOCAB, VOCAB, VOCAB), generator=generator).to(dtype) * scale
    )
    setup = Setup(runner, eos_ids=frozenset({EOS}), vocab_size=VOCAB)
    draft = TopKTreeDrafter(setup, width=width, depth=4, nodes=nodes or None).propose(
        Context(PROMPT), policy, 100
    )
    known = candidates(runner, width, levels)
    if not nodes:
        wanted = [sorted(level, key=lambda path: -level[path])[:width] for level in known]
    else:
        likeliest = sorted(
            [
                (-joint, number, path)
                for number, level in enumerate(known)
                for path, joint in level.items()
            ],
            key=lambda one: one[:2],
        )[:nodes]
        wanted = [[path for _, at, path in likeliest if at == number] for number in range(levels)]
    assert paths(draft) == [path for level in wanted for path in level]
    rows = [runner.row([*PROMPT, *path[:-1]]).float().softmax(-1) for path in paths(draft)]
    assert draft.top_probs == pytest.approx([float(row.max()) for row in rows], abs=1e-4)
    for seen, level in zip(policy.seen, known, strict=False):
        best = max(level, key=lambda path: level[path])
        row = runner.row([*PROMPT, *best[:-1]]).float().softmax(-1)
        assert (seen["prob"], seen["top_prob"]) == pytest.approx(
            (float(row[best[-1]]), float(row.max())), abs=1e-4
        )


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.9, top_k=4)],
    ids=["greedy", "sampled"],
)
def test_cape_adds_to_each_position_the_likeliest_other_tokens(sampling: SamplingParams) -> None:
    """As many as the paper says; impossible tokens are none. The chain and its distributions are
    those without them."""
    tops = (0.01, 0.3, 0.31, 0.6, 0.61, 0.8, 0.81, 1.0, 1.0000001)
    assert [further_candidates(top) for top in tops] == [7, 7, 5, 5, 3, 3, 1, 1, 1]
    numbers = set()
    for seed in range(6):
        runner = TableRunner(0)
        policy = Seeing(5)
        generator = torch.Generator().manual_seed(seed)
        scales = torch.tensor([0.5, 2.0, 4.0, 12.0])[
            torch.randint(4, (40, 40, 1), generator=generator)
        ]
        runner.table = torch.randn(40, 40, 40, generator=generator) * (scales if seed else 0.02)
        runner.table[..., 8 if seed else 3 :] = -torch.inf
        runner.num_embeddings = 40
        setup = Setup(runner, sampling, frozenset({3}), 40, seed)
        chain = ModelDrafter(setup).propose(Context(PROMPT), Fixed(5), 30)
        draft = ModelDrafter(setup, cape=True).propose(Context(PROMPT), policy, 30)
        length = len(chain.tokens)
        assert (draft.tokens[:length], draft.levels) == (chain.tokens, length)
        assert sampling.greedy or torch.equal(draft.probs, chain.probs)
        for position, seen in enumerate(policy.seen):
            row = runner.row([*PROMPT, *chain.tokens[:position]])
            possible = row.argsort(descending=True)[: 8 if seed else 3].tolist()
            others = [token for token in possible if token != chain.tokens[position]]
            number = further_candidates(float(row.softmax(-1).max()))
            wanted = others[:number]
            nodes = [
                node
                for node in range(length, len(draft.tokens))
                if draft.parents[node] == position - 1
            ]
            assert [draft.tokens[node] for node in nodes] == wanted
            assert seen.nodes == 1 + number
            numbers.add(len(wanted))
    assert numbers >= {1, 2, 3, 5, 7}


LIMITED: dict[str, dict[str, object]] = {
    "sd": {},
    "sd:tree": {"width": 3, "nodes": 9},
    "sd:cape": {"cape": True},
    "spectr": {"drafts": 4},
    "specinfer": {"drafts": 3},
    "mtad": {"beams": 3},
    "bild": {"fallback": 0},
    "eesd-tree": {"width": 2, "theta0": 1.0},
    "lookup": {"ngram": 1, "policy": "fixed"},
    "suffix": {"policy": "fixed"},
    "lookahead": {},
    "ouroboros": {"branches": 2},
}


@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_passes_its_limits(name: str, temperature: float) -> None:
    """Nothing follows a token that ends the output; contexts and vocabularies of both models end;
    the output has room."""
    drafted = 0
    (method, _, _) = name.partition(":")
    for seed, eos in product(range(8), ((), (1, 4))):
        target = TableRunner(seed)
        target.context_limit = len(PROMPT) + 12
        draft = TableRunner(seed)
        draft.table = draft.table + 0.3 * TableRunner(99).table
        if method not in ("lookup", "suffix", "lookahead"):
            draft.context_limit = len(PROMPT) + 8
        sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
        run = scripted_run(method, LIMITED[name], target, draft, sampling, eos=eos, seed=seed)
        for round_ in run.rounds():
            length = len(run.context) - len(round_.token_ids)
            nodes = round_.draft.candidates
            assert nodes.levels <= max(min(len(PROMPT) + 11, draft.context_limit) - length, 0)
            assert not {nodes.tokens[parent] for parent in nodes.parents if parent >= 0} & set(eos)
            drafted += len(nodes.tokens)
    assert drafted > 50
