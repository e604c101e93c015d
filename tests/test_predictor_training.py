"""Training of Cali-TS's acceptance predictor: judged tokens, fit, measurements, and a new one for an existing exit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LETTERS, make_model, make_tokenizer, save
from runner_checks import every
from safetensors.torch import load_file
from specgen.engine.parts.exit_files import DESCRIPTION, WEIGHTS, load_exit, read_description
from specgen.train.exit_training import retrain_predictor, train_exit
from specgen.train.generated_text import GeneratedText
from specgen.train.predictor_training import judged_tokens, measure, train_predictor
from specgen.train.training_task import TrainingStopped, TrainingTask
from training_helpers import TINY, Recorder, corpus_of, invoke, opened, refused, train_command, trained

from specgen.base.types import Context
from specgen.engine.parts.early_exit import EarlyExit
from specgen.train import exit_training, predictor_training
from specgen.train.corpus import Part

WIDTH, LENGTH = 16, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("predictor") / "target", make_tokenizer(LETTERS)))


def text_of(ids: list[int], top1: list[int], prompt_length: int, part: Part = Part.PREDICTOR) -> GeneratedText:
    states = torch.zeros(len(ids), WIDTH)
    return GeneratedText(torch.tensor(ids), torch.tensor(top1), states, prompt_length, True, part)


def judged(text: GeneratedText, exit_top1: list[int], continuing: float) -> list[tuple[int, int, int, bool]]:
    found = judged_tokens(text, torch.tensor(exit_top1), continuing, random.Random(0))
    return [(token.begin, token.drafted, token.position, token.accepted) for token in found]


def test_rounds_start_after_the_last_committed_token() -> None:
    """Greedy text: a round ends at the first rejected token, and the next one starts after the correction."""
    ids = [7, 8, 9, 10, 11, 12, 13, 14]  # the prompt has 2 tokens, and the prefill gives the third
    text = text_of(ids, [*ids[1:], 99], 2)
    exits = [*ids[1:], 99]
    exits[4] = 50  # wrong about token 5
    assert judged(text, exits, 1.0) == [
        (1, 2, 1, True),
        (1, 3, 2, True),
        (1, 4, 3, False),
        (4, 5, 1, True),  # the last committed token is the correction, which the target predicted after token 4
        (4, 6, 2, True),
    ]
    # Drafts of one token: each is followed by a bonus token, and the next round starts after that.
    assert judged(text, exits, 0.0) == [(1, 2, 1, True), (3, 4, 1, False), (4, 5, 1, True)]


def test_sampled_text_is_followed_as_long_as_it_is_the_targets_most_probable() -> None:
    ids = [7, 8, 9, 10, 11, 12]
    text = text_of(ids, [8, 9, 10, 60, 12, 99], 1)  # the token after 10 was sampled: 60 is more probable
    assert judged(text, [8, 9, 10, 60, 12, 99], 1.0) == [
        (0, 1, 1, True),
        (0, 2, 2, True),
        (0, 3, 3, True),  # accepted, but the text goes another way
        (3, 4, 1, True),
    ]


def made_texts(count: int, accepts: Any, part_of: Any = lambda index: Part.HELD_OUT if index % 4 == 0 else Part.PREDICTOR) -> Any:
    """Texts of random states; `accepts(target_states, exit_states, rng)` says which tokens exit and target agree about.

    Returns the texts and a function that stands for the exit.
    """
    made: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    texts = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 90, (LENGTH,), generator=generator)
        target_states, exit_states = (torch.randn(LENGTH, WIDTH, generator=generator) for _ in range(2))
        top1 = torch.cat((ids[1:], torch.tensor([2])))
        guesses = torch.where(accepts(target_states, exit_states, generator), top1, 95)
        made[tuple(ids.tolist())] = torch.nn.functional.one_hot(guesses, 96).float(), exit_states
        texts.append(GeneratedText(ids, top1, target_states, 1, True, part_of(index)))
    return texts, lambda ids: made[tuple(ids.tolist())]


@pytest.mark.parametrize("scale", every(2, [0.1, 1.0, 30.0]))
def test_the_predictor_learns_from_the_exits_state(scale: float) -> None:
    """Whatever the size of the hidden states."""
    texts, outputs = made_texts(80, lambda target, exit_, _: exit_[:, 0] > -0.5)
    for text in texts:
        outputs(text.ids)[1].mul_(scale)
    fitted = train_predictor(outputs, texts, seed=0)
    assert fitted is not None
    assert fitted[1]["ranking"] > 0.95
    assert fitted[1]["loss"] < 0.6 * fitted[1]["base_loss"]


def test_the_predictor_learns_from_the_targets_state_before_the_draft() -> None:
    """Agreement depends on the target's state one token earlier: only the first token of a draft can be predicted from it."""
    texts, outputs = made_texts(200, lambda target, exit_, _: target[:, 0].roll(1) > -0.5)
    fitted = train_predictor(outputs, texts, seed=0)
    assert fitted is not None
    by_position = fitted[0].target_weights[:, 0].tolist()
    assert by_position[0] > 4 * max(map(abs, by_position[1:]))


def test_a_predictor_without_a_signal_predicts_the_accepted_share() -> None:
    """Few texts: a fit without a prior would find a signal in noise, and its scores would be far from the share."""
    noise = lambda target, _, generator: torch.rand(len(target), generator=generator) < 0.75  # noqa: E731
    texts, outputs = made_texts(24, noise)
    fitted = train_predictor(outputs, texts, seed=0)
    assert fitted is not None
    assert fitted[1]["loss"] < fitted[1]["base_loss"] + 0.03
    assert fitted[1]["mean_score"] == pytest.approx(0.75, abs=0.06)


def test_a_predictor_learns_from_reserved_text_only() -> None:
    """In the texts that the exit was trained on, exit and target always agree; in the others, half of the time."""
    half = lambda target, exit_, generator: torch.rand(len(target), generator=generator) < 0.5  # noqa: E731
    texts, outputs = made_texts(48, half, lambda index: list(Part)[index % 3])
    for text in texts:
        if text.part == Part.TRAIN:
            outputs(text.ids)[0].copy_(torch.nn.functional.one_hot(text.top1, 96))
    fitted = train_predictor(outputs, texts, seed=0)
    assert fitted is not None
    assert fitted[1]["mean_score"] == pytest.approx(0.5, abs=0.1)
    without = [text for text in texts if text.part != Part.HELD_OUT]
    assert train_predictor(outputs, without, seed=0)[1] == {}  # type: ignore[index]
    assert train_predictor(outputs, [text for text in texts if text.part != Part.PREDICTOR], seed=0) is None


def test_measurements_of_known_scores() -> None:
    scores, accepted = torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([False, False, True, False])
    found = measure(scores, accepted)
    assert found["mean_score"] == pytest.approx(0.5)
    assert found["accepted"] == pytest.approx(0.25)
    assert found["calibration_error"] == pytest.approx(0.25)  # 0.25 instead of 0, and 0.75 instead of 0.5
    assert found["brier"] == pytest.approx((2 * 0.0625 + 0.0625 + 0.5625) / 4)
    assert found["base_brier"] == pytest.approx(0.25 * 0.75)
    assert found["loss"] == pytest.approx(-float(torch.tensor([0.75, 0.75, 0.75, 0.25]).log().mean()))
    assert found["ranking"] > 0.5
    assert measure(torch.tensor([0.1, 0.9]), torch.tensor([True, False]))["ranking"] == 0.0


@pytest.fixture(scope="module")
def trained_exit(folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, out = opened(folder), tmp_path_factory.mktemp("exit")
    train_exit(target, TrainingTask(out, replace(TINY, steps=40), corpus=corpus_of(corpus, target)), Recorder())
    return out


@pytest.mark.usefixtures("short_fit")
def test_a_new_predictor_leaves_the_exit_as_it_is(
    folder: Path, corpus: Path, trained_exit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.train.text_generation._HIDDEN_STATE_TOKENS", 2000)
    target = opened(folder)
    task = TrainingTask(tmp_path, replace(TINY, steps=None, seed=3), corpus=corpus_of(corpus, target), command="specgen tune")
    with pytest.raises(TrainingStopped):
        retrain_predictor(target, trained_exit, task, Recorder(stop_at_batch=1))
    observer = Recorder()
    path, description = retrain_predictor(opened(folder), trained_exit, task, observer)
    assert observer.generated[0][0] == 1, "the first batch is not generated again"
    assert not (tmp_path / "training").exists()
    before, after = load_file(trained_exit / WEIGHTS), load_file(path)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("predictor.")}
    old = read_description(trained_exit / DESCRIPTION)
    assert read_description(tmp_path / DESCRIPTION).figures.keys() == description.figures.keys()
    assert description.figures["steps"] == old.figures["steps"]
    assert description.made_with["predictor"]["command"] == "specgen tune"
    assert load_exit(path, target).predictor is not None


@pytest.mark.usefixtures("short_fit")
def test_generation_for_a_predictor_makes_no_text_of_other_parts(
    folder: Path, corpus: Path, trained_exit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.train.text_generation._HIDDEN_STATE_TOKENS", 2000)
    seen: list[GeneratedText] = []
    monkeypatch.setattr(exit_training, "train_predictor", lambda outputs, texts, seed: seen.extend(texts))
    target = opened(folder)
    task = TrainingTask(tmp_path, replace(TINY, steps=None), corpus=corpus_of(corpus, target))
    with pytest.raises(Exception, match="too little text"):
        retrain_predictor(target, trained_exit, task, Recorder())
    assert {text.part for text in seen} == {Part.PREDICTOR, Part.HELD_OUT}
    assert all(text.hidden_states is not None for text in seen)
    assert {text.greedy for text in seen} == {True, False}


@pytest.mark.usefixtures("short_fit")
def test_the_command_trains_a_new_predictor(folder: Path, corpus: Path, trained_exit: Path, tmp_path: Path) -> None:
    for name in (WEIGHTS, DESCRIPTION):
        (tmp_path / name).write_bytes((trained_exit / name).read_bytes())
    options = ["tune", "--train", "-t", str(folder), "--exit-layer", str(tmp_path), "--corpus", str(corpus)]
    result = trained([*options, "--window", "24", "--minutes", "0.01", "--seed", "2", "--device", "cpu", "--dtype", "float32"])
    assert result.stdout.strip() == str(tmp_path / WEIGHTS), "by default, the files are replaced"
    assert "Trained a predictor for the exit" in result.stderr
    assert "is accepted, area under the ROC curve" in result.stderr
    assert read_description(tmp_path / DESCRIPTION).made_with["predictor"]["seed"] == 2
    for more in ("--steps 3", "--layer 1", "--exit-head target", "--batch-size 4", "--learning-rate 0.1"):
        assert f"{more.split()[0]} cannot be combined with --train --exit-layer" in refused([*options, *more.split()])
    assert "--exit-layer cannot be combined with --train --methods sd" in refused([*options, "-m", "sd"])
    (tmp_path / "other.safetensors").write_bytes((trained_exit / WEIGHTS).read_bytes())
    (tmp_path / "other.yaml").write_bytes((trained_exit / DESCRIPTION).read_bytes())
    named = [*options[:4], "--exit-layer", str(tmp_path / "other.safetensors"), "--corpus", str(corpus)]
    assert "--out is not given" in refused(named)
    assert "there is no exit layer" in refused([*options[:4], "--exit-layer", str(tmp_path / "none"), "--corpus", str(corpus)])


@pytest.mark.usefixtures("short_fit")
@pytest.mark.parametrize("interrupted", every(2, [True, False]))
def test_the_figures_are_those_of_the_saved_weights(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """The file has the weights in bfloat16: they are rounded before they are measured and before the predictor is trained."""
    texts: list[GeneratedText] = []
    logits: list[torch.Tensor] = []

    def recording(logits_of: Any, held_out: list[GeneratedText]) -> dict[str, float | None]:
        texts.extend(held_out)
        logits.extend(logits_of(text.ids) for text in held_out)
        return agreement(logits_of, held_out)

    agreement = exit_training.greedy_agreement
    monkeypatch.setattr(exit_training, "greedy_agreement", recording)
    recipe = replace(TINY, steps=30, learning_rate=3e-3)
    target = opened(folder)
    task = TrainingTask(tmp_path, recipe, corpus=corpus_of(corpus, target))
    if interrupted:
        with pytest.raises(TrainingStopped):
            train_exit(opened(folder), task, Recorder(stop_at_step=17))
        assert not (tmp_path / DESCRIPTION).exists()
    observer = Recorder()
    path, _ = train_exit(opened(folder), task, observer)
    figures = read_description(tmp_path / DESCRIPTION).figures
    assert (figures["steps"], figures["loss"]) == (30, pytest.approx(observer.progress[-1].loss, rel=1e-3))
    found = load_exit(path, target)
    drafts = EarlyExit(target.model, found.layer, found.description.after).draft

    def outputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = drafts.logits(Context(ids[:1].tolist()), ids[1:].tolist())
        assert output.hidden_states is not None
        return output.logits, output.hidden_states

    for text, measured in zip(texts, logits, strict=True):
        torch.testing.assert_close(outputs(text.ids)[0], measured, atol=1e-4, rtol=1e-4)
    again = agreement(lambda ids: outputs(ids)[0], texts)
    assert figures["held_out_agreement"] == {name: pytest.approx(share, abs=1e-3) for name, share in again.items()}
    examples = predictor_training._examples(outputs, texts, Part.HELD_OUT, random.Random(0))
    assert examples is not None
    assert found.predictor is not None
    scores = examples.logits(found.predictor, torch.arange(len(examples.accepted))).sigmoid()
    again = measure(scores, examples.accepted)  # other random rounds over the same texts
    assert figures["predictor"]["mean_score"] == pytest.approx(again["mean_score"], abs=0.05)
    assert figures["predictor"]["accepted"] == pytest.approx(again["accepted"], abs=0.1)


def test_too_few_documents_give_no_predictor_and_no_figures(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("\n".join(f'{{"text": "{"abc def " * (5 + number)}"}}' for number in range(7)))
    result = trained(train_command("eesd", tmp_path / "few.jsonl", tmp_path / "out", "-t", str(folder), "--steps", "1"))
    assert "fewer than eight different documents or prompts" in result.stderr
    assert "held-out text" not in result.stderr
    description = read_description(tmp_path / "out" / DESCRIPTION)
    assert not description.predictor
    assert description.figures["held_out_agreement"] == {"greedy": None, "sampled": None}
    assert invoke(["inspect", "-t", str(folder), "--exit-layer", str(tmp_path / "out")]).exit_code == 0
