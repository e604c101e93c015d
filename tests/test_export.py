"""Tuned settings as options of other engines, and what transformers does with those that are written for it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import torch
from check_exports import KNOWN, exported, options
from families import make_model, near_copy
from transformers import GenerationConfig
from transformers.generation import candidate_generator
from tuning_helpers import outcome

from specgen.base.errors import SpecgenError
from specgen.base.settings import Value
from specgen.tune.export import ENGINES, LOOKUP_TOKENS, ExportedHead, export
from specgen.tune.outcome import Candidate

TUNED: Any = {found.name: found for found in outcome().methods}
NAMES = ("org/target", "org/draft")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_gets_its_own_options(engine: str) -> None:
    made = export(engine, TUNED, "svip", *NAMES)
    steps = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    vllm = '{"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 3}'
    expected = {
        "transformers": json.dumps(steps, indent=2),
        "vllm": f"vllm serve org/target --speculative-config '{vllm}'",
        "tensorrt-llm": "# config.yaml, for: trtllm-serve org/target --config config.yaml\n"
        "disable_overlap_scheduler: true\nspeculative_config:\n  decoding_type: Draft_Target\n  max_draft_len: 3\n"
        "  speculative_model: org/draft",
        "sglang": "sglang serve --model-path org/target --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path org/draft --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4",
        "llama.cpp": "llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max 3 "
        "--spec-draft-n-min 0 --spec-draft-p-min 0",
        "mlx": "mlx_lm.generate --model org/target --draft-model org/draft --num-draft-tokens 3",
    }
    assert made.lost[0] == f"svip, the fastest here, is not in {engine}: this is sd, the best of what it has"
    assert made.text == expected[engine]


def test_thresholds_and_lookup_carry_over_where_they_can() -> None:
    confident: Any = {"confidence": Candidate("confidence", {"threshold": 0.35, "max_draft": 9}, 1.0)}
    assert json.loads(export("transformers", confident, "confidence", *NAMES).text) == {
        "num_assistant_tokens": 9,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.35,
    }
    assert "--spec-draft-p-min 0.35" in export("llama.cpp", confident, "confidence", *NAMES).text
    looked_up: Any = {"lookup": Candidate("lookup", {"k": 6, "ngram": 2}, 1.0)}
    vllm = export("vllm", looked_up, "lookup", "a target", None)
    lookup = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    assert shlex.split(vllm.text) == ["vllm", "serve", "a target", "--speculative-config", json.dumps(lookup)]
    assert not any("fastest" in note for note in vllm.lost)
    assert not any("not tuned" in note for note in vllm.lost)
    tuned: list[Any] = [{"lookup": Candidate("lookup", given, 1.0)} for given in ({"ngram": 2}, {"ngram": 2, "k": LOOKUP_TOKENS})]
    for engine in ("transformers", "vllm", "sglang"):
        found, fixed = (export(engine, each, "lookup", *NAMES) for each in tuned)
        assert found.text == fixed.text
        assert [note for note in found.lost if note not in fixed.lost] == [
            f"{engine} cannot adapt the length of lookup's drafts as specgen does: {LOOKUP_TOKENS} tokens, not tuned"
        ]
    looked = "llama-server -m TARGET.gguf --spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 6"
    assert export("llama.cpp", looked_up, "lookup", *NAMES).text == looked
    searched = options("tensorrt-llm", export("tensorrt-llm", looked_up, "lookup", *NAMES).text)
    assert (searched["decoding_type"], searched["max_draft_len"], searched["max_matching_ngram_size"]) == ("NGram", 6, 2)
    assert not searched["is_public_pool"]
    assert not searched["is_use_oldest"], "the latest match, as here"
    with pytest.raises(SpecgenError, match="none of the tuned methods"):
        export("mlx", looked_up, "lookup", *NAMES)
    slower: Any = {
        "sd": Candidate("sd", {"k": 3}, 100.0, measured=60.0),
        "lookup": Candidate("lookup", {"k": 4, "ngram": 1}, 80.0),
    }
    assert "ngram" in export("vllm", slower, "lookup", *NAMES).text, "a measured speed counts before an expected one"
    plain = export("mlx", TUNED, "ar", *NAMES)
    assert "plain decoding is the fastest" in plain.lost[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_notes_say_what_another_tokenizer_and_a_rounded_draft_mean(engine: str) -> None:
    made = export(engine, TUNED, "sd", *NAMES, tokenizers_differ=True, draft_dtype="int8")
    assert made.lost[0].startswith("the draft model's tokenizer is not the target's: ")
    assert made.lost[1] == f"the draft's weights were rounded to int8 here: {engine} takes them as they are stored"
    assert ("assistant_tokenizer" in made.lost[0]) == (engine == "transformers")
    if engine != "mlx":
        lookup: Any = {"lookup": Candidate("lookup", {"k": 6, "ngram": 2}, 1.0)}
        assert export(engine, lookup, "lookup", *NAMES, tokenizers_differ=True, draft_dtype="int8") == export(
            engine, lookup, "lookup", *NAMES
        )


HEADS = {
    "eagle": ExportedHead("a head", "eagle3"),
    "medusa": ExportedHead("heads", "medusa"),
    "glide": ExportedHead("model", "glide"),
}


def of_head(engine: str, name: str, **settings: Value) -> tuple[list[str], str]:
    """The words of the exported command, and all notes but the last."""
    made = export(engine, {name: Candidate(name, settings, 9.0)}, name, *NAMES, HEADS)  # type: ignore[dict-item]
    return shlex.split(made.text), "; ".join(made.lost[:-1])


def test_heads_and_suffixes_go_to_the_engines_that_have_them() -> None:
    words, lost = of_head("vllm", "eagle", width=4, nodes=10, k=6)
    assert json.loads(words[-1]) == {"method": "eagle3", "model": "a head", "num_speculative_tokens": 6}
    assert lost == "vLLM drafts chains: the tree (width 4, nodes 10) is left out"
    words, lost = of_head("vllm", "eagle", width=1, policy="svip", threshold=0.3)
    assert json.loads(words[-1])["num_speculative_tokens"] == 5
    assert lost == "vLLM has no length policies: drafts have 5 tokens instead of svip"
    with pytest.raises(SpecgenError, match="none of the tuned methods"):
        of_head("vllm", "medusa", nodes=10, k=3)  # vLLM 0.33 has no Medusa any more
    words, lost = of_head("vllm", "suffix", min_prob=0.2)
    limits = {"suffix_decoding_min_token_prob": 0.2, "suffix_decoding_max_spec_factor": 4.0}
    assert json.loads(words[-1]) == {"method": "suffix", "suffix_decoding_max_cached_requests": 0, **limits}
    assert "arctic-inference" in lost
    words, lost = of_head("sglang", "eagle", width=4, nodes=10, k=6)
    tree = "--speculative-num-steps 6 --speculative-eagle-topk 4 --speculative-num-draft-tokens 11"
    assert words[-10:] == ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "a head", *tree.split()]
    assert not lost
    words, lost = of_head("sglang", "eagle", width=1, cape=True, k=2)
    assert words[-4:] == ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"]
    assert lost == "SGLang has no CaPE: the added candidates are left out"
    words, lost = of_head("llama.cpp", "eagle", width=1, k=2)
    assert words[3:] == ["-md", "HEAD.gguf", "--spec-type", "draft-eagle3", "--spec-draft-n-max", "2"]
    assert "convert_hf_to_gguf.py 'a head' --target-model-dir org/target" in lost
    made = export("tensorrt-llm", {"eagle": Candidate("eagle", {"width": 4, "nodes": 30, "k": 6}, 9.0)}, "eagle", *NAMES, HEADS)  # type: ignore[dict-item]
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 24}
    head = {"decoding_type": "Eagle3", "max_draft_len": 6, "speculative_model": "a head"}
    assert options("tensorrt-llm", made.text)["speculative_config"] == head | tree
    assert "TensorRT-LLM's tree of 6 levels holds 24 nodes, not 30" in made.lost
    for engine in ("tensorrt-llm", "llama.cpp"):  # they read EAGLE-3's heads alone
        older = {"eagle": ExportedHead("a head", "eagle")}
        with pytest.raises(SpecgenError, match="none of the tuned methods"):
            export(engine, {"eagle": Candidate("eagle", {"k": 2}, 9.0)}, "eagle", *NAMES, older)  # type: ignore[dict-item]
    with pytest.raises(SpecgenError, match="none of the tuned methods"):
        of_head("sglang", "glide", k=3)
    with pytest.raises(SpecgenError, match="none of the tuned methods"):
        export("vllm", {"eagle": Candidate("eagle", {"k": 2}, 9.0)}, "eagle", *NAMES)  # type: ignore[dict-item]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_is_known_to_the_engine(engine: str) -> None:
    """`check_exports.py` holds the table of names against the engines; here, all that is written parses and is in the table."""
    known = KNOWN[engine]
    written = [options(engine, text) for _, text in exported(engine)]
    assert len(written) == len(ENGINES[engine].methods)
    for given in written:
        assert set(given) <= known.names
        assert all(given[name] in values for name, values in known.values.items() if name in given)
    assert set().union(*written) == known.names, "a name that is never written needs no check"


def as_generation_config(method: str, **settings: float) -> dict[str, Any]:
    """The exported fields. Checks that transformers' own class knows each of them and refuses no value."""
    tuned: Any = {method: Candidate(method, settings, 1.0)}
    fields: dict[str, Any] = json.loads(export("transformers", tuned, method, *NAMES).text)
    config = GenerationConfig(**fields)
    config.validate(strict=True)
    assert set(fields) <= set(GenerationConfig().to_dict()), "an unknown field would be kept without a word"
    assert {name: getattr(config, name) for name in fields} == fields
    return fields


@pytest.mark.parametrize(
    ("method", "settings", "length", "threshold"),
    [
        ("sd", {"k": 3}, 3, 0.0),
        ("confidence", {"threshold": 0.1, "max_draft": 4}, 4, 0.1),
        ("heuristic", {"k": 2, "max_draft": 9}, 2, 0.0),
    ],
)
def test_transformers_drafts_as_the_exported_settings_say(
    monkeypatch: pytest.MonkeyPatch, method: str, settings: dict[str, float], length: int, threshold: float
) -> None:
    """In the assistant's generation config, as the note says. A constant draft is as long as tuned until the output ends."""
    model = make_model("llama")
    assistant = near_copy(model)
    assistant.generation_config = GenerationConfig(eos_token_id=-1, pad_token_id=0, **as_generation_config(method, **settings))
    seen: list[tuple[int, float, int]] = []

    class Observed(candidate_generator.AssistedCandidateGenerator):
        def get_candidates(self, input_ids: torch.Tensor, **more: Any) -> Any:
            planned, stop = self.num_assistant_tokens, self.assistant_generation_config.assistant_confidence_threshold
            candidates, logits = super().get_candidates(input_ids, **more)
            seen.append((planned, stop, candidates.shape[1] - input_ids.shape[1]))
            return candidates, logits

    monkeypatch.setattr("transformers.generation.utils.AssistedCandidateGenerator", Observed)
    prompt = torch.tensor([[1, 5, 9, 7]])
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=assistant,
        generation_config=GenerationConfig(max_new_tokens=60, do_sample=False, eos_token_id=-1, pad_token_id=0),
    )
    assert len(seen) > 4
    assert seen[0][0] == length
    assert {found for _, found, _ in seen} == {threshold}
    drafted = [drafted for _, _, drafted in seen[:-2]]  # the last ones have less room
    if method == "heuristic":
        assert {planned for planned, _, _ in seen} > {length}, "the schedule changes it"
    else:
        assert {planned for planned, _, _ in seen} == {length}
        assert max(drafted) == length
        assert (min(drafted) < length) == (method == "confidence"), "only a threshold ends a draft early"


def test_transformers_looks_up_as_the_exported_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[candidate_generator.PromptLookupCandidateGenerator] = []

    class Observed(candidate_generator.PromptLookupCandidateGenerator):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr("transformers.generation.utils.PromptLookupCandidateGenerator", Observed)
    prompt = torch.tensor([[5, 9, 7, 5, 9, 7]])
    fields = as_generation_config("lookup", k=6, ngram=2)
    make_model("llama").generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, **fields)
    (lookup,) = made
    assert (lookup.num_output_tokens, lookup.max_matching_ngram_size) == (6, 2)
