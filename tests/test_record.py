"""`--record distributions`: the overlap of both models' distributions at each token that a model
drafted."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from families import VOCAB, make_model, near_copy, save
from runner_checks import every

from specgen import Pair, SamplingParams, load
from specgen.pair.records import round_line

METHODS = (
    "svip",
    "sd:width=3",
    "pearl:window=3",
    "mtad:beams=3",
    "bild:fallback=0.1",
    "spectr:drafts=3",
    "specinfer:drafts=3",
)
PROMPT = [5, 9, 7, 3]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "penalties"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = make_model("llama")
    draft = near_copy(target, 0.6)
    if request.param:
        target.generation_config.repetition_penalty = 1.6
        target.generation_config.suppress_tokens = [4, 11]
    return load(save(target, folder / "target"), save(draft, folder / "draft"), device="cpu")


@cache  # most methods reach the same texts
def agreement(pair: Pair, ids: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Overlap and KL of both models after these tokens, and the draft's entropy and largest
    probability.

    By forward passes without a cache and without penalties.
    """
    assert pair.draft is not None
    with torch.no_grad():
        rows = [model.model.reference_logits(ids)[-1] for model in (pair.target, pair.draft)]
    p, q = (row[:VOCAB].double().softmax(-1) for row in rows)
    return tuple(
        map(
            float,
            (
                torch.minimum(p, q).sum(),
                (q * (q.log() - p.log())).sum(),
                -(q * q.log()).sum(),
                q.max(),
            ),
        )
    )


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("written", every(2, METHODS))
def test_every_method_with_distributions_records_how_far_they_agree(
    pair: Pair, written: str, temperature: float
) -> None:
    name, *settings = written.split(":")
    sampling = SamplingParams(max_new_tokens=14, temperature=temperature, seed=3, ignore_eos=True)
    given = dict(setting.split("=") for setting in settings)
    committed = list(PROMPT)
    judged = 0
    drafted = 0
    for round_ in pair.rounds(PROMPT, name, sampling, record=True, **given):
        line = round_line(round_, str, record=True)
        tokens = line["draft_ids"]
        assert len(line["overlap"]) == len(line["kl"]) == len(tokens)
        drafted += len(tokens)
        for node, overlap in enumerate(line["overlap"]):
            if overlap is None:
                continue
            path = []
            parent = line["parents"][node]
            while parent >= 0:
                path.insert(0, tokens[parent])
                parent = line["parents"][parent]
            judged += 1
            recorded = (overlap, line["kl"][node], line["entropies"][node], line["top_probs"][node])
            assert recorded == pytest.approx(agreement(pair, (*committed, *path)), abs=1e-4)
        committed += round_.token_ids
    assert judged
    assert judged == drafted or name == "pearl", "PEARL drafts ahead of what it judges"


def test_nothing_is_kept_where_nobody_asks(pair: Pair) -> None:
    for round_ in pair.rounds(PROMPT, "spectr", SamplingParams(max_new_tokens=8)):
        assert round_.verdict.agreement is None
        assert "overlap" not in round_line(round_, str)
