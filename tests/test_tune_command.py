"""What `specgen tune --json` reports, the examples that it takes, and mistakes on its command line."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tuning_helpers import CURVES, outcome

from specgen.cli.tune import json_line
from specgen.compare.prompts import load_prompts
from specgen.decoding.costs import SpeedupModel
from specgen.pair import skip_search
from specgen.tune.outcome import Candidate


def test_the_json_line_by_hand(tmp_path: Path) -> None:
    """A target pass over two tokens takes 12 ms, a draft pass 2 ms, plain decoding 10 ms: drafts of one token pay from 40 %."""
    found = replace(outcome(), speedup_model=SpeedupModel({1: 0.01, 2: 0.012}, 0.002, 256), left_out={"pearl": "no time"})
    lossy = Candidate("mtad", {"k": 3}, 70.0, perplexity=1.5)
    found = replace(found, methods=[*found.methods, lossy])
    svip = {"threshold": 0.45, "c": 0.15, "max_draft": 12}
    settings = {"svip": svip, "sd": {"k": 3}, "confidence": {"threshold": 0.4, "max_draft": 8}, "lookup": {"k": 4, "ngram": 2}}
    expected = {
        "type": "tune",
        "chosen": {"method": "svip", "settings": svip},
        "verdict": "pays",
        "confirmed": True,
        "speedup": 1.4,
        "speedup_low": 1.2,
        "speedup_high": 1.6,
        "predicted": {"svip": 120.0, "sd": 100.0, "confidence": 90.0, "lookup": 85.0, "ar": 80.0, "mtad": 70.0},
        "measured": {"svip": 118.0, "ar": 84.0},
        "perplexity": {"mtad": 1.5},
        "settings": {**settings, "ar": {}, "mtad": {"k": 3}},
        "acceptance": 0.8,
        "pays_from": pytest.approx(0.4),
        "costs": {"echo": CURVES, "parallel": CURVES | {"together": 1e-4}},
        "left_out": {"pearl": "no time"},
        "draft_dtype": None,
        "profile": str(tmp_path / "profile.yaml"),
    }
    assert json_line(found, tmp_path / "profile.yaml") == expected
    slow = [replace(entry, speedup=0.9, low=0.8, high=0.97) if entry.name == "svip" else entry for entry in found.methods]
    line = json_line(replace(found, methods=slow), tmp_path)
    assert (line["chosen"], line["verdict"], line["speedup"]) == ({"method": "ar", "settings": {}}, "does not pay", 1.0)
    assert (line["speedup_low"], line["speedup_high"], line["confirmed"]) == (None, None, True)


def test_tune_and_compare_take_different_examples() -> None:
    tuned, compared = load_prompts(None, for_tuning=True), load_prompts(None)
    assert not {prompt.fingerprint for prompt in tuned} & {prompt.fingerprint for prompt in compared}
    assert {prompt.category for prompt in tuned} == {prompt.category for prompt in compared} == {"code", "math", "news", "chat"}
    assert Counter(prompt.category for prompt in load_prompts(None, for_tuning=True, limit=8)) == dict.fromkeys(
        ("code", "math", "news", "chat"), 2
    )
    first = {prompt.text[:32] for prompt in tuned if prompt.name in ("tune-sum-of-squares", "tune-tickets")}
    target = SimpleNamespace(context_limit=1000, tokenizer=SimpleNamespace(encode=list))
    assert first <= {"".join(prompt) for prompt in skip_search.example_prompts(target)}  # type: ignore[arg-type]
