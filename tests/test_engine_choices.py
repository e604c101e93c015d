"""`specgen inspect` says what runs the models, and why: backend, dtype, threads, packed weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import make_model, save

import specgen
from specgen import demo
from specgen.engine.model_loading import ModelSource, describe
from specgen.engine.native.products import ProductChoice
from specgen.engine.timing import ThreadChoice
from specgen.tune.pair_inspection import EngineChoices, engine_choices, inspect_files
from specgen.view import pair_report

CPU = torch.device("cpu")


def test_the_report_names_the_backend_and_the_reason_for_it(tmp_path: Path) -> None:
    target, draft = save(make_model("llama"), tmp_path / "llama"), save(make_model("gpt2"), tmp_path / "gpt2")
    report = inspect_files(ModelSource(target), ModelSource(draft), (CPU, CPU), ("auto", None), lambda _: None)
    assert (report.target.backend, report.target.fallback) == ("native", None)
    assert report.draft is not None
    assert report.draft.backend == "transformers"
    assert report.draft.fallback is not None
    assert "gpt2" in report.draft.fallback
    text = " ".join(" ".join(line.plain for line in pair_report.lines(report, 400, None)).split())
    assert "target: specgen's own forward pass, float32: the dtype of its weights" in text
    assert f"draft: transformers ({report.draft.fallback}), float32" in text
    assert report.as_dict()["engine"] is None


def test_the_choices_of_loading_are_shown_with_their_reasons(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    report = inspect_files(ModelSource(folder), None, (CPU, CPU), ("auto", None), lambda _: None)
    packed = ProductChoice(4096, 1024, packed=True, dense_seconds={1: 0.5}, packed_seconds={1: 0.25}, count=3)
    products = {"target": [packed, ProductChoice(8, 8, reason="too small")]}
    threads = ThreadChoice(2, "the fewest", {1: 0.02, 2: 0.01})
    report = replace(report, choices=EngineChoices(threads, products, {"target": 4}))
    text = " ".join(" ".join(line.plain for line in pair_report.lines(report, 400, None)).split())
    assert "target: weights of 1 of 2 shapes packed for oneDNN (the others: too small), passes padded to 4 tokens" in text
    assert "threads 2: the fewest (20 ms with 1, 10 ms with 2)" in text
    engine = report.as_dict()["engine"]
    assert engine["threads"] == {"threads": 2, "reason": "the fewest", "seconds": {"1": 0.02, "2": 0.01}}
    assert engine["padded_to"] == {"target": 4}
    assert engine["products"]["target"][0]["packed_seconds"] == {"1": 0.25}


def test_choices_come_from_the_loaded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with specgen.load(save(make_model("llama"), tmp_path), device="cpu", dtype="float32") as pair:
        assert engine_choices(pair).threads is None
        pair.warm_up()
        choices = engine_choices(pair)
    assert choices.threads == pair.thread_choice
    assert choices.threads is not None
    assert choices.threads.reason == "OMP_NUM_THREADS is set"
    assert sum(choice.count for choice in choices.products["target"]) == 1 + 4 * 3  # the head, and four of each layer
    assert {choice.reason for choice in choices.products["target"]} == {"too small"}
    assert choices.padded_to == {"target": 1}


def test_on_apple_gpus_auto_takes_transformers() -> None:
    folder = demo.folder("target")
    chosen = describe(folder, ModelSource(str(folder), on_mps=True))
    assert (chosen.backend, chosen.fallback) == ("transformers", "on Apple GPUs")
    assert describe(folder, ModelSource(str(folder), on_mps=True, backend="native")).backend == "native"
    assert describe(folder, ModelSource(str(folder))).backend == "native"
