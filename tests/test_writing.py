"""Generation of training text: batched generation, the stored texts, batch size in memory, and the time budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EOS, LETTERS, make_model, make_tokenizer, plain, save
from runner_checks import RUN_BY, few
from safetensors.torch import load_file, save_file
from specgen.train.batched_generation import continuations
from specgen.train.exit_training import train_exit
from specgen.train.generated_text import GeneratedText, generate_texts, load_batches, save_batch
from specgen.train.text_generation import Purpose, TextGeneration, largest_batch
from specgen.train.training_task import TrainingStopped, TrainingTask
from training_helpers import TINY, Recorder, corpus_of, opened

from specgen.base.errors import SpecgenError
from specgen.train.corpus import CYCLE, Corpus, Part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("writing") / "target", make_tokenizer(LETTERS)))


@pytest.mark.parametrize(("family", "backend"), few(RUN_BY))
def test_batched_greedy_texts_equal_those_generated_alone(family: str, backend: str, models_folder: Path) -> None:
    module = make_model(family)
    target = opened(save(module, models_folder / "side" / family), backend)
    prompts = [[1, 5, 9], [7, 8, 9, 10, 11, 12], [4], [20, 21]]
    texts = continuations(target, prompts, 30, greedy=True)
    for prompt, text in zip(prompts, texts, strict=True):
        alone = plain(module, prompt, 24 + 6 - len(prompt))
        generated = text[len(prompt) :]
        assert generated == alone[: len(generated)]
        assert text[-1] == EOS or len(text) >= 24
    sampled = continuations(target, prompts, 30, greedy=False, seed=1)
    assert sampled == continuations(target, prompts, 30, greedy=False, seed=1)
    assert sampled != continuations(target, prompts, 30, greedy=False, seed=2)


def test_sampled_texts_follow_the_targets_distribution(folder: Path) -> None:
    target = opened(folder)
    samples = torch.tensor([text[3] for text in continuations(target, [[5, 9, 7]] * 4000, 4, greedy=False, seed=3)])
    expected = target.reference_logits([5, 9, 7], []).softmax(dim=-1)
    found = torch.bincount(samples, minlength=96) / 4000
    assert float((found - expected).abs().max()) < 5 * (0.25 / 4000) ** 0.5


def test_stored_texts_are_read_back(folder: Path, tmp_path: Path) -> None:
    target, parts = opened(folder), [Part.PREDICTOR, Part.HELD_OUT]
    texts = [
        text
        for keep in (False, True)
        for text in generate_texts(target, [[5, 9], [7, 8]], 9, greedy=keep, seed=0, parts=parts, keep_hidden_states=keep)
    ]
    for number, batch in enumerate((texts, texts[:1])):
        save_batch(tmp_path, number, batch)
    first, second = load_batches(tmp_path)
    for text, read in zip([*texts, texts[0]], [*first, *second], strict=True):
        assert torch.equal(text.ids, read.ids)
        assert torch.equal(text.top1, read.top1)
        assert (text.hidden_states is None) == (read.hidden_states is None)
        assert text.hidden_states is None or torch.equal(text.hidden_states, read.hidden_states)
        assert (text.prompt_length, text.greedy, text.part) == (read.prompt_length, read.greedy, read.part)


def test_half_of_the_texts_are_greedy_and_half_sampled(folder: Path, corpus: Path, tmp_path: Path) -> None:
    target = opened(folder)
    task = TrainingTask(tmp_path, replace(TINY, steps=1000), corpus=corpus_of(corpus, target))
    texts = TextGeneration(target, task, {}, Recorder(), Purpose.EXIT).run()
    assert len(texts) == 4 * 64
    greedy, sampled = [t for t in texts if t.greedy], [t for t in texts if not t.greedy]
    assert len(greedy) == len(sampled)

    def is_argmax(text: GeneratedText) -> bool:
        return torch.equal(text.ids[text.prompt_length :], text.top1[text.prompt_length - 1 : -1])

    assert all(map(is_argmax, greedy))
    assert sum(map(is_argmax, sampled)) < len(sampled) / 10
    for half in (greedy, sampled):
        assert sum(text.part == Part.HELD_OUT for text in half) == len(half) / 8


def test_every_text_continues_a_document_of_its_part(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the predictor has enough text; a distilled draft has no predictor."""
    target = opened(folder)
    corpus = Corpus([[5 + number] * 6 for number in range(24)])
    monkeypatch.setattr("specgen.train.text_generation._HIDDEN_STATE_TOKENS", 600)
    for keep_top_k in (False, True):
        task = TrainingTask(tmp_path / str(keep_top_k), replace(TINY, steps=2000, training_length=24), corpus=corpus)
        texts = TextGeneration(target, task, {}, Recorder(), Purpose.DRAFT if keep_top_k else Purpose.EXIT).run()
        for text in texts:
            part = CYCLE[(int(text.ids[0]) - 5) % len(CYCLE)]
            assert text.part == (Part.TRAIN if keep_top_k and part == Part.PREDICTOR else part)
            assert text.hidden_states is None or text.part != Part.TRAIN
        generated = [text for text in texts if text.prompt_length < len(text.ids)]
        parts = [text.part for text in generated]
        if keep_top_k:
            assert set(parts) == {Part.TRAIN, Part.HELD_OUT}
        else:
            assert parts.count(Part.PREDICTOR) == 128 / 4, "in the first batches only: then there is enough"
            assert all(text.hidden_states is not None for text in generated if text.part == Part.PREDICTOR)
        assert parts.count(Part.HELD_OUT) == len(parts) / 8


@pytest.mark.parametrize("count", [7, 20])
def test_a_prompt_has_one_part_however_often_it_is_used(folder: Path, tmp_path: Path, count: int) -> None:
    """Greedily continued and sampled; every other prompt is there twice. Seven different prompts are all for training."""
    target = opened(folder)
    prompts = [[1, 5 + number, 9] for number in range(count)]
    task = TrainingTask(tmp_path, replace(TINY, steps=1000), prompts=[*prompts, *prompts[::2]])
    texts = TextGeneration(target, task, {}, Recorder(), Purpose.EXIT).run()
    parts: dict[int, set[Part]] = {}
    for text in texts:
        parts.setdefault(int(text.ids[1]) - 5, set()).add(text.part)
    expected = {number: {CYCLE[number % len(CYCLE)] if count >= len(CYCLE) else Part.TRAIN} for number in range(count)}
    assert parts == expected
    greedy = [int(text.ids[1]) for text in texts if text.greedy]
    assert len(greedy) == len(set(greedy)) > 0, "a prompt is continued greedily once"
    assert {text.greedy for text in texts} == {True, False}


def test_damaged_text_is_generated_again_by_hand(folder: Path, tmp_path: Path) -> None:
    target = opened(folder)
    save_batch(tmp_path, 0, generate_texts(target, [[5, 9]], 9, greedy=True, seed=0, parts=[Part.TRAIN]))
    path = tmp_path / "part-0000.safetensors"
    content = load_file(path)
    save_file({name: tensor for name, tensor in content.items() if name != "part"}, path)  # as an earlier version wrote it
    with pytest.raises(SpecgenError, match="Delete it: it is generated again"):
        load_batches(tmp_path)


def test_progress_is_reported_within_a_batch(folder: Path, corpus: Path, tmp_path: Path) -> None:
    """By a simulated clock on which a second passes between two readings."""
    target, observer = opened(folder), Recorder()
    task = TrainingTask(tmp_path, TINY, corpus=corpus_of(corpus, target), clock=map(float, count()).__next__)
    TextGeneration(target, task, {}, observer, Purpose.EXIT).run()
    first = [entry for entry in observer.generated if entry[0] == 0]
    assert len(first) >= 10
    for column in zip(*observer.generated, strict=True):
        assert list(column) == sorted(column)
    assert 0 < first[0][1] < 0.1
    assert observer.generated[-1][:2] == (2, 1.0)


def test_the_batch_size_follows_free_memory(folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = opened(folder)
    per_text = 24 * 2 * 3 * 2 * 8 * 4  # tokens x keys and values x layers x heads x head size x bytes
    for free, expected in ((None, 64), (2 * 64 * per_text, 64), (2 * 63 * per_text, 32), (2 * 5 * per_text, 4), (0, 2)):
        monkeypatch.setattr("specgen.train.text_generation.free_memory", lambda _, free=free: free)
        assert largest_batch(target, 24) == expected
    # A resumed run keeps the batch size of the interrupted one, although more memory is free now.
    weights = []
    for name in ("straight", "resumed"):
        monkeypatch.setattr("specgen.train.text_generation.free_memory", lambda _: 2 * 5 * per_text)
        task = TrainingTask(tmp_path / name, TINY, corpus=corpus_of(corpus, target))
        if name == "resumed":
            with pytest.raises(TrainingStopped):
                train_exit(opened(folder), task, Recorder(stop_at_batch=1))
            monkeypatch.setattr("specgen.train.text_generation.free_memory", lambda _: None)
        weights.append(train_exit(opened(folder), task, Recorder())[0].read_bytes())
    assert weights[0] == weights[1]


def test_generation_keeps_to_its_share_of_the_time_budget(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a simulated clock on which two complete batches would take ten times the budget."""
    target, now = opened(folder), 0.0

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*arguments, **options)

        return timed

    model = target.model  # each generated token costs two seconds, the predictions of a text one
    monkeypatch.setattr(model, "batch_logits", taking(2.0, model.batch_logits))
    monkeypatch.setattr(model, "batch_layers", taking(1.0, model.batch_layers))
    recipe = replace(TINY, steps=None, seconds=200.0, training_length=64)
    task = TrainingTask(tmp_path, recipe, corpus=corpus_of(corpus, target), clock=lambda: now)
    generation = TextGeneration(target, task, {}, Recorder(), Purpose.EXIT)
    texts = generation.run()
    assert {text.greedy for text in texts} == {True, False}
    assert any(text.part == Part.TRAIN for text in texts)
    assert all(len(text.ids) > text.prompt_length for text in texts)
    assert 0.3 * 200 * 0.5 < generation.seconds < 0.3 * 200 * 1.1
