"""Draft models that are made of layers of their target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_helpers import (
    TINY,
    Recorder,
    objective,
    opened,
    task_of,
    train_command,
    trained,
    written,
)

from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.engine.forward_pass import text_pass
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.transformers.loading import load_module
from specgen.train import distillation, loop
from specgen.train.corpus import Corpus, Use
from specgen.train.joined_layers import chosen_layers, join, joined_draft
from specgen.train.task import TrainingStopped
from specgen.train.texts import Text, predicted

TARGET = demo.folder("target")
LAYERS = (0, 1, 10, 11)  # of the target's 12
EMBEDDING = "model.embed_tokens.weight"
PROMPTS = (
    "User: What is the capital of Kenya?\nAssistant:",
    "Question: Tom has 5 pens. He buys 3 more. How many pens does Tom have?\nAnswer:",
    "def add(a, b):\n",
    "Article: A fire broke out at a school in Marlow on Friday.\nSummary:",
)


@pytest.fixture
def target() -> LoadedModel:
    return opened(TARGET)


def test_the_first_and_the_last_layers_are_chosen() -> None:
    assert chosen_layers(30) == [0, 1, 28, 29]
    assert chosen_layers(8) == [0, 1, 6, 7]
    assert chosen_layers(7) == [0, 6]
    assert chosen_layers(3) == [0, 2]


def test_the_draft_has_the_targets_own_tensors(target: LoadedModel, tmp_path: Path) -> None:
    draft = joined_draft(target, tmp_path)
    assert draft.name == f"layers 0, 1, 10, 11 of {target.name}"
    assert draft.files.shape.num_layers == len(LAYERS)
    assert draft.tokenizer.encode("User: Hello") == target.tokenizer.encode("User: Hello")

    theirs = load_file(TARGET / "model.safetensors")
    own = load_file(tmp_path / "model.safetensors")
    dropped = [
        name for name in theirs if ".layers." in name and int(name.split(".")[2]) not in LAYERS
    ]
    assert len(own) == len(theirs) - len(dropped)
    for name, tensor in own.items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(LAYERS[int(parts[2])])
        assert torch.equal(tensor, theirs[".".join(parts)]), name


def test_joined_layers_predict_what_the_target_does(target: LoadedModel, tmp_path: Path) -> None:
    draft = joined_draft(target, tmp_path)
    module: Any = load_module(draft.files, torch.float32, torch.device("cpu"))
    prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = written(target, 3 * prompts, 100, greedy=False, part=Use.TRAIN)
    held_out = written(target, prompts, 60, greedy=True, part=Use.HELD_OUT)
    before, agreed_before = compared(module, target, held_out)
    join(module, target, texts)
    after, agreed = compared(module, target, held_out)
    assert after < before - 1, "cross-entropy, nats"
    assert agreed > agreed_before + 0.15


@torch.no_grad()
def compared(module: Any, target: LoadedModel, texts: list[Text]) -> tuple[float, float]:
    """The draft's mean cross-entropy with the target after the tokens of answers, and for which
    share of them both have the same likeliest token."""
    entropies = []
    agreements = []
    for text in texts:
        ids = torch.tensor(text.ids)
        answer = slice(text.prompt_length - 1, None)
        ours = module(input_ids=ids[None]).logits[0, answer]
        theirs = target.model.batch(text_pass(ids)).logits[0, answer]
        entropies.append(-(theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1).mean())
        agreements.append((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    return float(torch.stack(entropies).mean()), float(torch.stack(agreements).mean())


def test_without_a_draft_the_command_trains_layers_of_the_target(
    tmp_path: Path, corpus: Path
) -> None:
    out = tmp_path / "out"
    arguments = train_command("sd", corpus, out, "-t", str(TARGET), "--steps", "2", "--json")
    line = json.loads(trained(arguments).stdout)
    assert line["figures"]["steps"] == 2
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == len(LAYERS)
    theirs = load_file(TARGET / "model.safetensors")
    own = load_file(out / "model.safetensors")
    assert torch.equal(own[EMBEDDING], theirs[EMBEDDING]), "the embedding is not trained"
    first = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(own[first], theirs[first])


def test_the_loss_compares_the_likely_tokens_alone(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_COMPARED_TOKENS", 70)
    recorder = Recorder()
    prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    task = task_of(tmp_path, TINY, recorder, prompts=Corpus(prompts))
    trained_draft = objective("sd", task, target, None)
    texts = written(target, prompts, 60, greedy=True, part=Use.TRAIN)
    batch = trained_draft.start(texts).batch(0)
    outputs, labels = trained_draft.outputs(batch, Random(0))
    assert outputs.shape[-1] == trained_draft.vocabulary == 70
    numbers = trained_draft.batches.top_k_ids
    assert numbers.min() == -1, "most of a token's 64 likeliest are not compared"
    assert numbers.max() < 70
    likeliest = (numbers[:, 0] >= 0).float().mean()
    assert likeliest > 0.5

    trained_draft.losses(outputs, *labels).backward()
    weights = dict(trained_draft._module.named_parameters())
    assert weights["model.layers.3.mlp.up_proj.weight"].grad.isfinite().all()
    assert weights[EMBEDDING].grad is None


def test_text_that_is_generated_during_the_training_is_learned_too(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_COMPARED_TOKENS", 70)
    prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    timed = replace(TINY, steps=None, seconds=600.0)
    task = task_of(tmp_path, timed, Recorder(), prompts=Corpus(prompts))
    trained_draft = objective("sd", task, target, None)
    first, *later = written(target, prompts, 60, greedy=True, part=Use.TRAIN)
    batches = trained_draft.start([first])
    assert trained_draft.generates
    held_out = first._replace(use=Use.HELD_OUT)

    taught = trained_draft.learn([*later, held_out])
    assert [text.ids for text in taught] == [text.ids for text in later]
    numbers = trained_draft._numbers
    for text, own in zip(later, taught, strict=True):
        rows = torch.tensor(own.teacher)
        found = predicted(target, text)
        assert torch.equal(batches.top_k_ids[rows], numbers[found.top_k_ids.long()])
        assert torch.equal(batches.top_k_log_probs[rows], found.top_k_log_probs)
    assert trained_draft.learn([held_out]) == []


@pytest.mark.parametrize(
    ("steps", "free", "generates"), [(2, None, False), (None, 1000, False), (None, None, True)]
)
def test_a_target_that_generates_no_more_text_is_freed(
    target: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int | None,
    free: int | None,
    generates: bool,
) -> None:
    monkeypatch.setattr(distillation, "free_memory", lambda _: free)
    prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = written(target, prompts, 60, greedy=True, part=Use.TRAIN)
    generation = SimpleNamespace(run=lambda: texts, more=lambda _: [], earlier_seconds=0.0)
    monkeypatch.setattr(loop, "TextGeneration", lambda *_: generation)
    given = dict[str, Any]()

    def begun(*_: Any, **arguments: Any) -> None:
        given.update(arguments)
        raise TrainingStopped

    monkeypatch.setattr(loop, "Training", begun)
    recipe = replace(TINY, steps=steps, seconds=None if steps else 600.0)
    task = task_of(tmp_path, recipe, Recorder(), prompts=Corpus(prompts))
    with pytest.raises(TrainingStopped):
        loop.train(objective("sd", task, target, None))
    assert given["more"] is (generation.more if generates else None)
    assert bool(target.model.layers) == generates


def test_a_target_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    for path in TARGET.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    kept = {
        name: tensor
        for name, tensor in load_file(TARGET / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".")[2]) < 2
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecgenError, match="it has only 2") as refusal:
        joined_draft(opened(folder), tmp_path / "start")
    assert "--draft" in str(refusal.value.hint)
