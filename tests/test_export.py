"""Tuned settings as options of other engines, as recorded in `golden/exports.json`, and what transformers does with them.

`python tests/test_export.py` records them anew, after a change that is meant: `bench/check_exports.py` then holds them against
the engines themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from families import make_model, near_copy
from transformers import GenerationConfig
from transformers.generation import candidate_generator
from tuning_helpers import outcome

from specgen.base.errors import SpecgenError
from specgen.tune.export import ENGINES, ExportedHead, export
from specgen.tune.outcome import Candidate

GOLDEN = Path(__file__).parent / "golden" / "exports.json"
NAMES = ("org/a target", "org/the: draft")  # with characters that need quotes
TUNED: Any = {found.name: found for found in outcome().methods}


class Case(NamedTuple):
    """What is exported: the tuned methods, the fastest of all, the kind of the EAGLE head, and more arguments."""

    tuned: Any
    chosen: str
    layout: str = "eagle3"
    more: Mapping[str, Any] = MappingProxyType({})


def of(name: str, layout: str = "eagle3", more: dict[str, Any] | None = None, **settings: Any) -> Case:
    return Case({name: Candidate(name, settings, 9.0)}, name, layout, more or {})


CASES = {
    "the fastest is not in the engine": Case(TUNED, "svip"),
    "plain decoding is the fastest": Case(TUNED, "ar"),
    "a measured speed counts before an expected one": Case(
        {"sd": Candidate("sd", {"k": 3}, 100.0, measured=60.0), "lookup": Candidate("lookup", {"k": 4, "ngram": 1}, 80.0)},
        "lookup",
    ),
    "sd": of("sd", k=3),
    "sd with a foreign, rounded draft": of("sd", more={"tokenizers_differ": True, "draft_dtype": "int8"}, k=3),
    "heuristic": of("heuristic", k=2, max_draft=9),
    "confidence": of("confidence", threshold=0.35, max_draft=9),
    "lookup": of("lookup", more={"tokenizers_differ": True, "draft_dtype": "int8"}, k=6, ngram=2),
    "lookup whose length adapts": of("lookup", ngram=2),
    "suffix": of("suffix", min_prob=0.2),
    "a tree of eagle": of("eagle", width=4, nodes=30, k=6),
    "a chain of eagle": of("eagle", "eagle", width=1, policy="svip", threshold=0.3),
    "eagle with cape": of("eagle", width=1, cape=True, k=2),
    "eagle without a head": of("eagle", "glide", k=2),
    "medusa": of("medusa", nodes=10, k=3),
    "glide": of("glide", k=3),
}


def exported(engine: str) -> dict[str, Any]:
    """What is written for each case: the text and the notes, or the refusal."""
    written: dict[str, Any] = {}
    for label, (tuned, chosen, layout, more) in CASES.items():
        heads = {name: ExportedHead("a head", layout if name == "eagle" else name) for name in ("eagle", "medusa", "glide")}
        try:
            made = export(engine, tuned, chosen, *NAMES, heads, **more)
            written[label] = {"text": made.text, "lost": list(made.lost)}
        except SpecgenError as error:
            written[label] = {"refused": error.message}
    return written


@pytest.mark.parametrize("engine", ENGINES)
def test_exports_are_as_recorded(engine: str) -> None:
    assert exported(engine) == json.loads(GOLDEN.read_text())[engine]


def as_generation_config(method: str, **settings: float) -> dict[str, Any]:
    """The exported fields. Checks that transformers' own class knows each of them and refuses no value."""
    tuned: Any = {method: Candidate(method, settings, 1.0)}
    fields: dict[str, Any] = json.loads(export("transformers", tuned, method, *NAMES).text)
    GenerationConfig(**fields).validate(strict=True)
    assert set(fields) <= set(GenerationConfig().to_dict()), "an unknown field would be kept without a word"
    return fields


@pytest.mark.parametrize("method", ["sd", "confidence", "heuristic"])
def test_transformers_drafts_as_the_exported_settings_say(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """In the assistant's generation config, as the note says. A constant draft is as long as tuned until the output ends."""
    given = {"sd": {"k": 3}, "confidence": {"threshold": 0.1, "max_draft": 4}, "heuristic": {"k": 2, "max_draft": 9}}[method]
    length, threshold = {"sd": (3, 0.0), "confidence": (4, 0.1), "heuristic": (2, 0.0)}[method]
    model = make_model("llama")
    assistant = near_copy(model)
    assistant.generation_config = GenerationConfig(eos_token_id=-1, pad_token_id=0, **as_generation_config(method, **given))
    seen: list[tuple[int, float, int]] = []

    class Observed(candidate_generator.AssistedCandidateGenerator):
        def get_candidates(self, input_ids: torch.Tensor, **more: Any) -> Any:
            planned, stop = self.num_assistant_tokens, self.assistant_generation_config.assistant_confidence_threshold
            candidates, logits = super().get_candidates(input_ids, **more)
            seen.append((planned, stop, candidates.shape[1] - input_ids.shape[1]))
            return candidates, logits

    monkeypatch.setattr("transformers.generation.utils.AssistedCandidateGenerator", Observed)
    prompt, limits = (
        torch.tensor([[1, 5, 9, 7]]),
        {"max_new_tokens": 60, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0},
    )
    mask, config = torch.ones_like(prompt), GenerationConfig(**limits)  # type: ignore[arg-type]
    model.generate(prompt, attention_mask=mask, assistant_model=assistant, generation_config=config)
    assert len(seen) > 4
    assert seen[0][0] == length
    assert {found for _, found, _ in seen} == {threshold}
    drafted = [drafted for _, _, drafted in seen[:-2]]  # the last ones have less room
    if method == "heuristic":
        assert {planned for planned, _, _ in seen} > {length}, "the schedule changes it"
    else:
        assert {planned for planned, _, _ in seen} == {length} == {max(drafted)}
        assert (min(drafted) < length) == (method == "confidence"), "only a threshold ends a draft early"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({engine: exported(engine) for engine in ENGINES}, indent=1) + "\n")
