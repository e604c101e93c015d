"""PEARL's measured costs: one rule for the window everywhere, and a cache that holds no costs that runs contradict."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from families import make_model, save

import specgen
from specgen.tuning.request import Deadline
from specgen.tuning.round_timing import ParallelProbe
from specgen.types import SamplingParams

GREEDY = SamplingParams(max_new_tokens=24, seed=3)


@pytest.mark.parametrize("shorter", ["target", "draft"])
def test_pearl_that_drafts_nothing_has_no_costs_and_says_so(tmp_path: Path, shorter: str) -> None:
    """Where a context has no room for drafts. Tuning leaves PEARL out then."""
    length = {"target": {}, "draft": {}} | {shorter: {"max_position_embeddings": 9}}
    folders = [save(make_model("llama", **length[role]), tmp_path / role) for role in length]
    with specgen.load(*folders, device="cpu", dtype="float32") as pair:
        pair._process_worker = None
        probe = ParallelProbe(pair, [[5, 9, 7, 3, 11, 5, 9, 7]], GREEDY)
        with pytest.raises(specgen.SpecgenError, match="pearl drafts nothing"):
            probe.run(Deadline.after(3, count().__next__))
