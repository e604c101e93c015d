"""Drafting layers in a target's own files: drafts, lossless output, what is found and refused, and
the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    BACKENDS,
    IS_OLD_TRANSFORMERS,
    LETTERS,
    make_model,
    make_tokenizer,
    plain,
    prompt,
    save,
)
from pair_helpers import pair_of_models
from part_references import add_drafting_layers, drafting_target, weakened
from safetensors.torch import load_file, save_file
from training_helpers import invoke
from transformers.generation.candidate_generator import MTPCandidateGenerator

import specgen
from specgen.base.types import SamplingParams

COUNT = 24
COSTS = {"draft_cost": 0.01, "verify_cost": 0.01}
SETTINGS: list[dict[str, Any]] = [
    *({"k": k} for k in (1, 2, 3, 5)),
    {"width": 2, "k": 3},
    {"width": 3, "k": 3, "nodes": 5},
    {"cape": True, "k": 3},
    {"policy": "svip", "threshold": 0.6},
    {"policy": "adaptive", **COSTS},
]
TARGETS = [
    ("deepseek", 1, "qwen3"),
    ("deepseek", 2, "gemma3_text"),
    ("deepseek", 3, "glm4_moe"),
    ("qwen", 1, "qwen3_5_text"),
]


@pytest.mark.skipif(
    IS_OLD_TRANSFORMERS, reason="this version of transformers does not load the models of tests"
)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drafts_are_those_of_transformers_in_each_round(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `generate(use_mtp=True)`, whose caches are rolled back too: after drafts that were
    accepted in part, wholly or not."""
    module, loaded, _ = drafting_target("qwen3", "native", "deepseek", layers)
    drafts: list[list[int]] = []
    original: Callable[..., Any] = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found = original(self, ids, *arguments, **options)
        drafts.append(found[0][0, ids.shape[1] :].tolist())
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    pair = pair_of_models(loaded, None)
    accepted = set()
    for seed in range(3):
        drafts.clear()
        theirs = plain(module, prompt(seed), COUNT, use_mtp=True, eos_token_id=-1)
        rounds = list(
            pair.rounds(prompt(seed), "mtp", SamplingParams(COUNT, ignore_eos=True), k=layers)
        )
        assert [token for round_ in rounds for token in round_.token_ids] == theirs
        own = [list(round_.draft.tokens) for round_ in rounds[1:]]
        assert len(own) >= COUNT // (layers + 1)
        # the first is empty; the last ones may be cut
        for expected, found in zip(drafts[1:], own, strict=False):
            assert found == expected[: len(found)]
        accepted |= {(len(round_.draft.tokens), len(round_.verdict.path)) for round_ in rounds[1:]}
    assert accepted >= {(layers, count) for count in range(layers + 1)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layout", "layers", "family"), TARGETS)
def test_greedy_ids_are_the_targets_own(
    layout: str, layers: int, family: str, backend: str
) -> None:
    if IS_OLD_TRANSFORMERS and family.startswith("qwen3_5") and backend == "transformers":
        pytest.skip("this version of transformers cannot roll its states back, so no head is used")
    module, loaded, _ = drafting_target(family, backend, layout, layers)
    pair = pair_of_models(loaded, None)
    accepted = 0
    for number in range(
        (TARGETS.index((layout, layers, family)) + 2 * BACKENDS.index(backend)) % 3,
        len(SETTINGS),
        3,
    ):
        ids = prompt(number)
        settings = SETTINGS[number]
        result = pair.generate(ids, "mtp", SamplingParams(COUNT, ignore_eos=True), **settings)
        assert result.token_ids == plain(module, ids, COUNT, eos_token_id=-1), settings
        accepted += result.summary["accepted"]
        longest = max(len(round_.draft.tokens) for round_ in result.rounds)
        assert longest <= layers or layers == 1 or settings.get("width") or settings.get("cape")
    assert accepted > 4


def test_without_a_draft_model_the_default_method_drafts_with_them(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "plain")
    model = weakened(make_model("llama"))
    save(model, tmp_path / "drafting")
    add_drafting_layers(model, tmp_path / "drafting")
    for name, drafts in (("plain", False), ("drafting", True)):
        pair = specgen.load(str(tmp_path / name), device="cpu", dtype="float32")
        rounds = pair.generate([1, 5, 9, 7], sampling=SamplingParams(12), **COSTS).rounds
        by_model = [
            round_
            for round_ in rounds
            if round_.draft.tokens and "lookup" not in str(round_.draft.stop_reason)
        ]
        assert bool(by_model) == drafts
    with_draft = specgen.load(str(tmp_path / "drafting"), folder, device="cpu", dtype="float32")
    run = with_draft.run(with_draft.request([1, 5, 9, 7], **COSTS))
    assert run.target is with_draft.run(with_draft.request([1], "ar")).target, (
        "the draft model is taken"
    )


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["mtp.layers.0.mlp.up_proj.weight"]


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.fc_hidden.weight"] = tensors.pop("mtp.fc.weight")


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :32].clone()


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.norm.weight"][3] = torch.nan


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.layers.1.input_layernorm.weight"] = torch.ones(32)


@pytest.mark.parametrize(
    ("change", "family", "message"),
    [
        (
            rename,
            "llama",
            "mtp.fc_hidden.weight is of no layout that specgen knows. Take another method",
        ),
        (drop, "llama", "lacks 1 of its tensors (the first: layers.0.mlp.up_proj.weight)"),
        (widen, "llama", "mtp.fc.weight is 32 x 32 in its file, but has to be 32 x 64"),
        (spoil, "llama", "mtp.norm.weight holds NaN or infinities"),
        (add, "llama", "lacks"),
        (None, "starcoder2", "mtp needs a target of a family that specgen knows, not starcoder2"),
    ],
)
def test_layers_that_cannot_be_run_are_named_and_the_target_works_without(
    tmp_path: Path, change: Callable[[Any], None] | None, family: str, message: str
) -> None:
    model = make_model(family)
    save(model, tmp_path, make_tokenizer(LETTERS))
    if change is None:
        stored = load_file(tmp_path / "model.safetensors")
        save_file(
            {**stored, "mtp.fc.weight": torch.zeros(32, 64)},
            tmp_path / "model.safetensors",
            {"format": "pt"},
        )
    else:
        add_drafting_layers(model, tmp_path, "qwen")
        stored = load_file(tmp_path / "model.safetensors")
        change(stored)
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    arguments = ["-t", str(tmp_path), "--device", "cpu", "--dtype", "float32"]
    refused = invoke(["generate", "abc", "-n", "4", "-m", "mtp", *arguments])
    *notices, error = refused.stderr.splitlines()
    assert (refused.exit_code, message in error) == (2, True), refused.stderr
    assert all("runs on transformers, which is slower" in notice for notice in notices)
    assert invoke(["generate", "abc", "-n", "4", *arguments]).exit_code == 0
    report = json.loads(invoke(["inspect", "--json", *arguments]).stdout)["methods"]["mtp"]
    assert report["ready"] == (change is spoil), "weights are not read"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_commands_find_them(tmp_path: Path, backend: str) -> None:
    model = weakened(make_model("qwen3"))
    save(model, tmp_path, make_tokenizer(LETTERS))
    arguments = ["-t", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--backend", backend]
    report = json.loads(invoke(["inspect", "--json", *arguments]).stdout)["methods"]["mtp"]
    assert report == {
        "ready": False,
        "why": "no drafting layers in the target's own files",
        "cure": "",
    }
    refused = invoke(["generate", "abc", "-m", "mtp", *arguments])
    assert refused.exit_code == 2
    assert (
        "mtp needs drafting layers in the target's own files, and there are none" in refused.stderr
    )
    add_drafting_layers(model, tmp_path, layers=2)
    report = json.loads(invoke(["inspect", "--json", *arguments]).stdout)["methods"]["mtp"]
    assert report == {"ready": True, "why": "drafting layers in the target's own files", "cure": ""}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "some words"}\n')
    options = ["--prompts", str(prompts), "-n", "12", "--repeats", "1", "--json"]
    compared = invoke(["compare", "-m", "mtp,adaptive", *options, *arguments])
    assert compared.exit_code == 0, compared.stderr
    lines = [json.loads(line) for line in compared.stdout.splitlines()]
    assert [(line["method"], line["diverged"]) for line in lines] == [
        ("ar", 0),
        ("mtp", 0),
        ("adaptive", 0),
    ]
    assert lines[1]["accepted"] > 0
    footer = invoke(["generate", "abc", "-n", "4", *arguments]).stderr
    assert "adaptive (mtp drafts)" in footer
