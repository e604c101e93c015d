"""The text that a target writes itself: what it is, how it is kept, and what it costs in memory and time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import EOS, LETTERS, make_model, make_tokenizer, plain, save
from test_training import TINY, Silent, open_text, opened

from specgen.engine.decoder_layers import decoder_of
from specgen.training.exit_training import ExitTrainingTask, train_exit
from specgen.training.generated_text import GeneratedText, GeneratedTexts, TrainingStopped, continuations, judged
from specgen.training.text_generation import TextGeneration, texts_at_once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("writing") / "target", make_tokenizer(LETTERS)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_texts_written_side_by_side_are_those_written_alone(family: str, models_folder: Path) -> None:
    target = opened(save(make_model(family), models_folder / "side" / family))
    prompts = [[1, 5, 9], [7, 8, 9, 10, 11, 12], [4], [20, 21]]
    texts = continuations(target, prompts, 30, greedy=True)
    for prompt, text in zip(prompts, texts, strict=True):
        alone = plain(target.model, prompt, 24 + 6 - len(prompt))
        made = text[len(prompt) :]
        assert made == alone[: len(made)]
        assert text[-1] == EOS or len(text) >= 24
    sampled = continuations(target, prompts, 30, greedy=False, seed=1)
    assert sampled == continuations(target, prompts, 30, greedy=False, seed=1)
    assert sampled != continuations(target, prompts, 30, greedy=False, seed=2)


def test_sampled_texts_follow_the_targets_distribution(folder: Path) -> None:
    target = opened(folder)
    drawn = torch.tensor([text[3] for text in continuations(target, [[5, 9, 7]] * 4000, 4, greedy=False, seed=3)])
    expected = target.model(input_ids=torch.tensor([[5, 9, 7]])).logits[0, -1].detach().softmax(dim=-1)
    found = torch.bincount(drawn, minlength=96) / 4000
    assert float((found - expected).abs().max()) < 5 * (0.25 / 4000) ** 0.5


def test_own_text_is_kept_as_it_was(folder: Path, tmp_path: Path) -> None:
    target = opened(folder)
    texts = []
    for position in range(3):
        ids = torch.randint(3, 90, (5 + position,))
        best, rows = judged(target.model, ids)
        texts.append(GeneratedText(ids, best, rows.bfloat16() if position else None, 2, position == 1, position == 2))
    kept = GeneratedTexts(tmp_path)
    kept.keep(0, texts)
    kept.keep(1, texts[:1])
    assert kept.count() == 2
    for mine, theirs in zip([*texts, texts[0]], kept.read(), strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.best, theirs.best)
        assert (mine.rows is None) == (theirs.rows is None)
        assert mine.rows is None or torch.equal(mine.rows, theirs.rows)
        assert (mine.prompt, mine.greedy, mine.held_out) == (theirs.prompt, theirs.greedy, theirs.held_out)


def test_kept_texts_are_greedy_and_sampled_in_equal_shares(folder: Path, corpus: Path, tmp_path: Path) -> None:
    """And each is what it says it is: greedy texts are the target's likeliest tokens throughout, sampled ones are not."""
    target = opened(folder)
    job = ExitTrainingTask(tmp_path, replace(TINY, steps=1000), open_text=open_text(corpus, target))
    writing = TextGeneration(target, job, {}, tmp_path / "training", Silent())
    writing.run()
    texts = writing.kept.read()
    assert len(texts) == 4 * 64
    greedy, sampled = [t for t in texts if t.greedy], [t for t in texts if not t.greedy]
    assert len(greedy) == len(sampled)

    def likeliest(text: GeneratedText) -> bool:
        own = slice(text.prompt, None)
        return torch.equal(text.ids[own], text.best[text.prompt - 1 : -1])

    assert all(map(likeliest, greedy))
    assert sum(map(likeliest, sampled)) < len(sampled) / 10
    for half in (greedy, sampled):
        assert sum(text.held_out for text in half) == len(half) / 8


def test_writing_tells_how_far_it_is_within_a_batch(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.training.text_generation._REPORT_EVERY", 0.0)
    told: list[tuple[int, float, int]] = []

    class Telling(Silent):
        def writing(self, batches: int, share: float, tokens: int) -> None:
            told.append((batches, share, tokens))

    target = opened(folder)
    TextGeneration(
        target, ExitTrainingTask(tmp_path, TINY, open_text=open_text(corpus, target)), {}, tmp_path / "training", Telling()
    ).run()
    first = [entry for entry in told if entry[0] == 0]
    assert len(first) >= 10
    for entries in zip(*told, strict=True):
        assert list(entries) == sorted(entries)
    assert 0 < first[0][1] < 0.1
    assert told[-1] == (2, 1.0, told[-1][2])


def test_as_many_texts_grow_at_once_as_there_is_memory_for(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened(folder)
    a_text = 24 * 2 * 3 * 2 * 8 * 4  # tokens x keys and values x layers x heads x head size x bytes
    for free, expected in ((None, 64), (2 * 64 * a_text, 64), (2 * 63 * a_text, 32), (2 * 5 * a_text, 4), (0, 2)):
        monkeypatch.setattr("specgen.training.text_generation.free_memory", lambda _, free=free: free)
        assert texts_at_once(target, 24) == expected
    # With less memory for a start, and more for the second half, a resumed run still ends as a straight one.
    found = []
    for name in ("straight", "resumed"):
        monkeypatch.setattr("specgen.training.text_generation.free_memory", lambda _: 2 * 5 * a_text)
        job = ExitTrainingTask(tmp_path / name, TINY, open_text=open_text(corpus, target))
        if name == "resumed":
            with pytest.raises(TrainingStopped):
                train_exit(opened(folder), job, Silent(stop_at_batch=1))
            monkeypatch.setattr("specgen.training.text_generation.free_memory", lambda _: None)
        found.append(train_exit(opened(folder), job, Silent()).path.read_bytes())
    assert found[0] == found[1]


def test_writing_keeps_to_its_share_of_the_minutes(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target so slow that two whole batches would take ten times the budget: every pass takes a second by a clock of ours."""
    target = opened(folder)
    now = 0.0

    def tick(*_: object) -> None:
        nonlocal now
        now += 1.0

    target.model.register_forward_pre_hook(tick)  # a token of each text that grows
    decoder_of(target.model).register_forward_pre_hook(tick)  # the same, and a judged text
    monkeypatch.setattr("specgen.training.text_generation.time.monotonic", lambda: now)
    recipe = replace(TINY, steps=None, seconds=200.0, window=64)
    writing = TextGeneration(
        target, ExitTrainingTask(tmp_path, recipe, open_text=open_text(corpus, target)), {}, tmp_path / "training", Silent()
    )
    writing.run()
    texts = writing.kept.read()
    assert {text.greedy for text in texts} == {True, False}
    assert any(not text.held_out for text in texts)
    assert all(len(text.ids) > text.prompt for text in texts)
    assert 0.3 * 200 * 0.5 < writing.seconds < 0.3 * 200 * 1.1
