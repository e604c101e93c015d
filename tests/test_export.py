"""Tuned settings as options of other engines, as recorded in `golden/exports.json`.

`python tests/test_export.py` records them anew, after a change that is meant:
`bench/check_exports.py` then holds them against the engines themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from transformers import GenerationConfig
from tuning_helpers import outcome

from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.pair.pair import Pair
from specgen.tune.engines import ENGINES, ExportedHead, ExportedModels
from specgen.tune.export import export
from specgen.tune.outcome import Candidate

GOLDEN = Path(__file__).parent / "golden" / "exports.json"
NAMES = ("org/a target", "org/the: draft")  # with characters that need quotes
PLAIN = Candidate("ar", {}, 100.0, 100.0, 1.0)
TUNED: Any = {found.name: found for found in outcome().methods}


class Case(NamedTuple):
    """What is exported: the tuned methods, the fastest of all, the kind of the EAGLE head, and more
    arguments."""

    tuned: Any
    chosen: str
    layout: str = "eagle3"
    more: Mapping[str, Any] = MappingProxyType({})


def of(
    name: str, layout: str = "eagle3", more: dict[str, Any] | None = None, **settings: Any
) -> Case:
    return Case({name: Candidate(name, settings, 9.0)}, name, layout, more or {})


CASES = {
    "the fastest is not in the engine": Case(TUNED, "svip"),
    "plain decoding is the fastest": Case(TUNED, "ar"),
    "a measured speed counts before an expected one": Case(
        {
            "sd": Candidate("sd", {"k": 3}, 100.0, measured=60.0),
            "lookup": Candidate("lookup", {"k": 4, "ngram": 1}, 80.0),
        },
        "lookup",
    ),
    "sd": of("sd", k=3),
    "sd with a foreign, rounded draft": of(
        "sd", more={"tokenizers_differ": True, "draft_dtype": "int8"}, k=3
    ),
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
    "GGUF files": of(
        "sd", more={"target_gguf": "/m/a target.gguf", "draft_gguf": "/m/draft.gguf"}, k=3
    ),
    "a GGUF file whose draft is none": of("sd", more={"target_gguf": "/m/target.gguf"}, k=3),
    "a GGUF file alone": of("lookup", more={"target_gguf": "/m/target.gguf"}, k=3, ngram=1),
}


def exported(engine: str) -> dict[str, Any]:
    """What is written for each case: the text and the notes, or the refusal."""
    written: dict[str, Any] = {}
    for label, (tuned, chosen, layout, more) in CASES.items():
        heads = {
            name: ExportedHead("a head", layout if name == "eagle" else name)
            for name in ("eagle", "medusa", "glide")
        }
        try:
            models = ExportedModels(*NAMES, heads, **more)
            text, notes = export(engine, tuned, chosen, models)
            written[label] = {"text": text, "lost": notes}
        except SpecgenError as error:
            written[label] = {"refused": error.message}
    return written


@pytest.mark.parametrize("engine", ENGINES)
def test_exports_are_as_recorded(engine: str) -> None:
    assert exported(engine) == json.loads(GOLDEN.read_text())[engine]


@pytest.mark.parametrize("name", ["svip", "adaptive", "pearl", "spectr"])
@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_a_method_that_drafts_with_a_model_becomes_the_engines_own(engine: str, name: str) -> None:
    """Its drafts were 3.4 tokens long on average; lookup, which the engine may have, was slower."""
    tuned = {
        name: Candidate(name, {}, 150.0, 150.0, 1.5, draft_length=3.4),
        "sd": Candidate("sd", {"k": 6}, 120.0, 120.0, 1.2),
        "lookup": Candidate("lookup", {}, 130.0, 130.0, 1.3),
    }
    for known in (tuned, {name: tuned[name]}):
        text, notes = export(engine, known, name, ExportedModels(*NAMES))
        assert (
            "--num-draft-tokens 3" if engine == "mlx" else '"num_speculative_tokens": 3'
        ) in text
        assert any("drafts with the same model" in note for note in notes)
    without = export(engine, {name: tuned[name]}, name, ExportedModels(NAMES[0]))
    assert "draft" not in without[0]


@pytest.mark.parametrize("method", ["sd", "confidence", "heuristic", "lookup"])
def test_the_lines_for_transformers_run(
    method: str, demo_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(demo.folder(role)) for role in demo.ROLES]
    tuned = {method: Candidate(method, {}, 9.0)}
    text, _ = export("transformers", tuned, method, ExportedModels(*names))
    settings = [
        line.split()[0].split(".")[-1] for line in text.splitlines() if "generation_config." in line
    ]
    assert set(settings) <= set(GenerationConfig().to_dict()), (
        "an unknown field would be kept without a word"
    )
    exec(text, {})
    prompt = "def fibonacci(n):"
    assert capsys.readouterr().out.startswith(
        prompt + demo_pair.generate(prompt, "ar", max_new_tokens=6).text
    )


def test_the_plain_lines_for_transformers_run(
    demo_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(demo.folder(role)) for role in demo.ROLES]
    text, (note,) = export("transformers", TUNED, "ar", ExportedModels(*names))
    assert "assistant" not in text
    exec(text, {})
    prompt = "def fibonacci(n):"
    assert capsys.readouterr().out.startswith(
        prompt + demo_pair.generate(prompt, "ar", max_new_tokens=6).text
    )
    assert note.startswith("plain decoding is the fastest here")


def test_the_best_method_beside_plain_decoding_is_named_with_its_speed() -> None:
    slower = Candidate("sd", {"k": 3}, 90.0, measured=90.0, speedup=0.9)
    _, notes = export("vllm", {"ar": PLAIN, "sd": slower}, "ar", ExportedModels(*NAMES))
    assert "the best of what it has is sd, 0.90 times plain decoding here" in notes[-1]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({engine: exported(engine) for engine in ENGINES}, indent=1) + "\n")
