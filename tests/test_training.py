"""Training of all kinds: corpus, text of the target's own, the loop and its state, figures, the
predictor, the command."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from families import CHAT_TEMPLATE, EOS, LETTERS, make_model, make_tokenizer, plain, save
from runner_checks import RUN_BY, few
from safetensors.torch import load_file
from training_helpers import (
    TINY,
    Recorder,
    corpus_of,
    objective,
    opened,
    opened_draft,
    refused,
    task_of,
    train_command,
    trained,
    written,
)

import specgen
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import bundled_prompts, kept_part
from specgen.base.part_verdict import PartVerdict
from specgen.base.types import Context, SamplingParams
from specgen.cli.options import ModelGroup, TrainingOptions, TuneOptions
from specgen.cli.train import _draft_report, _report
from specgen.cli.trainable import EXIT, GLIDE, TRAINABLE, Asked
from specgen.cli.training import training_task
from specgen.compare.prompts import load_prompts
from specgen.engine.parts.own_layers import make_runners
from specgen.engine.parts.trained_part import EXIT_DESCRIPTION, open_part
from specgen.engine.weights import weights_fingerprint
from specgen.train import texts as training_texts
from specgen.train.corpus import CYCLE, NOT_HELD_OUT, Corpus, Use, chat_prompts, read_corpus
from specgen.train.exits import PredictorObjective, judged_tokens, measure, train_predictor
from specgen.train.loop import (
    IGNORED,
    RANKS,
    PackedBatch,
    Training,
    TrainingBatches,
    held_out_agreement,
    train,
)
from specgen.train.speed import Speed
from specgen.train.task import Recipe, TrainingStopped
from specgen.train.texts import (
    PredictedText,
    Text,
    TextGeneration,
    continuations,
    largest_batch,
    own_sampling,
    predicted,
)

pytestmark = pytest.mark.usefixtures("short_fit")
KINDS = ["eesd", "medusa", "eagle", "glide", "sd"]
LAST: list[Any] = []  # the objective of the last run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        save(
            make_model("llama"),
            tmp_path_factory.mktemp("training") / "target",
            make_tokenizer(LETTERS),
        )
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        save(
            make_model("llama", seed=7),
            tmp_path_factory.mktemp("training") / "draft",
            make_tokenizer(LETTERS),
        )
    )


def run(
    kind: str,
    folder: Path,
    other: Path,
    out: Path,
    corpus: Path,
    recorder: Recorder,
    recipe: Recipe = TINY,
) -> tuple[Path, dict[str, Any]]:
    target = opened(folder)
    task = task_of(out, recipe, recorder, corpus=corpus_of(corpus, target))
    LAST[:] = [objective(kind, task, target, *([opened_draft(other)] if kind == "sd" else []))]
    return train(LAST[0])


# the corpus


def test_a_corpus_is_plain_text_or_json_lines(tmp_path: Path, corpus: Path) -> None:
    encode: Any = lambda text: list(text.encode())  # noqa: E731
    (tmp_path / "a.txt").write_text("one two\nthree\n" * 5000)
    assert read_corpus(tmp_path / "a.txt", encode).tokens == 14 * 5000
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "twelve", "id": 1}\n')
    texts = read_corpus(tmp_path / "a.jsonl", encode)
    assert {bytes(texts.sample(random.Random(seed), 4)).decode() for seed in range(60)} == {
        "one",
        "twel",
        "welv",
        "elve",
    }
    assert texts.sample(random.Random(0), 9, uses=[Use.HELD_OUT]), (
        "two documents are too few to hold one out"
    )
    assert read_corpus(corpus, encode).is_split, "a short file is cut into enough pieces"
    bad = {
        "bad.jsonl": b"{",
        "b.jsonl": b'{"prompt": "x"}',
        "bad.txt": b"\xff\xfe\xff",
        "empty.txt": b" ",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            SpecgenError,
            match=r"line 1 is not JSON|line 1: text: it is missing|not UTF-8|contains no text",
        ):
            read_corpus(tmp_path / name, encode)
    with pytest.raises(SpecgenError, match="cannot read"):
        read_corpus(tmp_path, encode)


def test_the_bundled_prompts_are_of_many_kinds_and_none_is_one_of_compare() -> None:
    """Of each kind one is held out."""
    prompts = load_prompts(bundled_prompts(), for_tuning=None)
    texts = {prompt.text for prompt in prompts}
    assert len(prompts) == len(texts) == 200
    assert not texts & {prompt.text for prompt in load_prompts(None, for_tuning=None)}
    kinds = {prompt.category for prompt in prompts}
    assert len(kinds) == 20
    uses = [CYCLE[prompt.index % len(CYCLE)] for prompt in prompts]
    held_out = [prompt for prompt, use in zip(prompts, uses, strict=True) if use == Use.HELD_OUT]
    assert len(held_out) == 20
    assert {prompt.category for prompt in held_out} == kinds


@pytest.mark.parametrize("has_template", [True, False])
def test_without_text_of_the_user_the_target_answers_the_bundled_prompts(
    tmp_path: Path, has_template: bool
) -> None:
    """In its chat template, if it has one."""
    tokenizer = make_tokenizer(LETTERS)
    tokenizer.chat_template = CHAT_TEMPLATE if has_template else None
    target = opened(save(make_model("llama"), tmp_path / "target", tokenizer))
    models = ModelGroup(target=str(target.folder))
    asked = Asked(models, TuneOptions(), TrainingOptions(training_length=900), 0, EXIT)
    assert asked.has_no_text
    listed = load_prompts(bundled_prompts(), for_tuning=None)
    task = training_task(asked, listed, target, None)
    assert task.corpus is None
    assert task.recipe.self_text == 1
    assert task.prompts is not None
    texts = [target.tokenizer.text_of(ids) for ids in task.prompts.different(Use)]
    assert len(texts) == (100 if has_template else 200), "a template is not cut to the window"
    beginning = "user " if has_template else ""
    plain = target.tokenizer.text_of(target.tokenizer.encode(listed[0].text))
    assert texts[0].startswith(beginning + plain[:10])
    assert texts[0].endswith("assistant ") == has_template
    for tuning, training in (
        (TuneOptions(prompts=tmp_path), TrainingOptions()),
        (TuneOptions(), TrainingOptions(corpus=tmp_path)),
    ):
        assert not Asked(models, tuning, training, 0, EXIT).has_no_text
    assert not Asked(ModelGroup(), TuneOptions(), TrainingOptions(), 0, EXIT).has_no_text


def documents_of(corpus: Corpus, *uses: Use) -> set[int]:
    return {corpus.sample(random.Random(seed), 9, uses=uses)[0] for seed in range(300)}


def test_every_document_has_one_part_and_is_trained_on_only_there() -> None:
    """One in ten is held out, two are for the predictor. Equal documents have the same part.
    Samples are parts of documents."""
    repeated = Corpus([[index // 2] * 4 for index in range(48)])
    held_out, predictor, of_train = (
        documents_of(repeated, part) for part in (Use.HELD_OUT, Use.PREDICTOR, Use.TRAIN)
    )
    assert (held_out, predictor) == ({0, 10, 20}, {2, 6, 12, 16, 22})
    assert of_train == set(range(24)) - held_out - predictor
    assert documents_of(Corpus([[index % 7, 1] for index in range(24)]), Use.HELD_OUT) == set(
        range(7)
    ), "too few to split"
    for uses, expected in (((Use.TRAIN,), of_train), (NOT_HELD_OUT, of_train | predictor)):
        batches = TrainingBatches(
            task_of(Path(), replace(TINY, batch=8), corpus=repeated), [], uses
        )
        assert {
            int(token) for step in range(20) for token in batches.batch(step).ids.unique()
        } == expected
    corpus = Corpus(
        [[number * 100 + index for index in range(10 + number)] for number in range(16)]
    )
    for seed in range(100):
        found = corpus.sample(random.Random(seed), 6, uses=[Use.PREDICTOR])
        assert found == list(range(found[0], found[0] + 6))
        assert found[-1] % 100 < 10 + found[0] // 100
        assert corpus.sample(random.Random(seed), 6, from_start=True)[0] % 100 == 0


def test_chat_prompts_are_in_the_template_up_to_the_answer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(LETTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    folder = save(make_model("llama"), tmp_path / "chat", tokenizer)
    own = opened(folder).tokenizer
    says = [("system", "be kind"), ("user", "ab"), ("assistant", "cd"), ("user", "ef" * 8)]
    messages = [{"role": role, "content": text} for role, text in says]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "hello"}))
    start = "system be kind\nuser ab\nassistant "
    short = "user hello\nassistant "
    for limit, expected in (
        (100, [f"{start}cd\nuser {'ef' * 8}\nassistant "]),
        (40, [start]),
        (25, []),
    ):
        texts = [own.text_of(ids) for ids in chat_prompts(path, own, limit)]
        assert texts == [*expected, short], "the last message that leaves room"
    for wrong in ("{}", '{"messages": [{"role": "user"}]}', '{"prompt": 3}'):
        (tmp_path / "b.jsonl").write_text(wrong)
        with pytest.raises(SpecgenError, match=r"b.jsonl, line 1(: | has neither)"):
            chat_prompts(tmp_path / "b.jsonl", own, 100)
    options = ["tune", "--train", "-t", folder, "--out", str(tmp_path / "out"), "--chat"]
    assert "there are no prompts for --chat of at most" in refused(
        [*options, "--corpus", str(path), "--window", "16"]
    )
    sizes = [
        "--window",
        "48",
        "--batch-size",
        "4",
        "--steps",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "-q",
    ]
    trained([*options, "--methods", "medusa", "--corpus", str(path), *sizes])


# text of the target's own


@pytest.mark.parametrize(("family", "backend"), few(RUN_BY))
def test_batched_texts_equal_those_generated_alone(
    family: str, backend: str, models_folder: Path
) -> None:
    module = make_model(family)
    target = opened(save(module, models_folder / "side" / family), backend)
    prompts = [[1, 5, 9], [7, 8, 9, 10, 11, 12], [4], [20, 21]]
    for prompt, text in zip(prompts, continuations(target, prompts, 30), strict=True):
        alone = plain(module, prompt, 24 + 6 - len(prompt))
        assert text[len(prompt) :] == alone[: len(text) - len(prompt)]
        assert text[-1] == EOS or len(text) >= 24
    first, again, another = (
        continuations(target, prompts, 30, sampling=SamplingParams(temperature=0.8), seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != another


PARTS = {
    "head": (Use.TRAIN, Use.HELD_OUT),
    "exit": tuple(Use),
    "predictor": (Use.PREDICTOR, Use.HELD_OUT),
}


@pytest.mark.parametrize("is_prompted", [False, True])
@pytest.mark.parametrize("used", PARTS)
def test_every_text_continues_a_document_of_its_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: str, is_prompted: bool
) -> None:
    """Half greedily, half sampled. Only where a predictor is trained are texts reserved for it,
    until it has enough."""
    monkeypatch.setattr(training_texts, "PREDICTOR_TOKENS", 600)
    target = opened(folder)
    corpus = Corpus([[5 + number] * 6 for number in range(24)])
    recipe = replace(TINY, steps=None if used == "predictor" else 1000)
    task = task_of(tmp_path, recipe, **{"prompts" if is_prompted else "corpus": corpus})
    texts = TextGeneration(target, task, PARTS[used]).run()
    assert TextGeneration(target, task, PARTS[used]).texts == texts, "they are stored"
    for text in texts:
        part = CYCLE[(text.ids[0] - 5) % len(CYCLE)]
        assert text.use == (part if used != "head" or part != Use.PREDICTOR else Use.TRAIN)
        top1 = predicted(target, text).top_k_ids[text.prompt_length - 1 : -1, 0].tolist()
        assert text.ids[text.prompt_length :] == top1 or not text.greedy
    uses = [text.use for text in texts]
    of_greedy = sum(text.greedy for text in texts)
    assert 0 < of_greedy < len(texts)
    if is_prompted:
        assert of_greedy <= 24, "greedily, each prompt is continued once"
    elif used == "predictor":
        assert set(uses) == {Use.PREDICTOR, Use.HELD_OUT}
    else:
        assert 2 * of_greedy == len(texts)
        assert len(texts) / 12 < uses.count(Use.HELD_OUT) < len(texts) / 8
        assert (
            0 < uses.count(Use.PREDICTOR) < len(uses) / 4
            if used == "exit"
            else Use.PREDICTOR not in uses
        )
    path = tmp_path / "training" / "texts-0000.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(SpecgenError, match="Delete it: it is generated again"):
        TextGeneration(target, task, PARTS[used])


def test_text_is_kept_for_further_trainings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all kinds that learn from the same prompts, each with its own uses of them. Text that is
    there costs nothing; what is generated later is added."""
    monkeypatch.setattr(training_texts, "_CPU_BATCH", 8)
    target = opened(folder)
    prompts = Corpus([[5 + number] * 6 for number in range(20)])

    def generation(name: str, uses: tuple[Use, ...], **changed: Any) -> TextGeneration:
        recipe = replace(TINY, steps=changed.pop("steps", 60), **changed)
        task = task_of(tmp_path / name, recipe, prompts=prompts, kept_text=tmp_path / "text")
        return TextGeneration(target, task, uses)

    first = generation("first", PARTS["head"])
    texts = first.run()
    assert first.seconds > 0
    assert not (tmp_path / "first" / "training" / "texts-0000.json").exists()
    again = generation("again", PARTS["exit"])
    assert [text.ids for text in again.texts] == [text.ids for text in texts]
    held_out = [text.ids[0] for text in texts if text.use == Use.HELD_OUT]
    assert {CYCLE[(token - 5) % len(CYCLE)] for token in held_out} == {Use.HELD_OUT}
    assert Use.PREDICTOR in {text.use for text in again.texts}
    assert {text.use for text in texts} == {Use.TRAIN, Use.HELD_OUT}
    with monkeypatch.context() as patched:
        patched.setattr(target.model, "batch", None)
        assert again.run() == again.texts
        timed = generation("timed", PARTS["head"], steps=None, seconds=60.0)
        assert timed.run() == texts
        assert timed.seconds == 0
        assert generation("less", PARTS["head"], steps=1).run() == texts[:16]
    for changed in ({"seed": 1}, {"window": 20}):
        assert not generation("changed", PARTS["head"], **changed).texts
    more = timed.more(60.0)
    assert len(more) == 8
    assert timed.texts == [*texts, *more]
    assert generation("later", PARTS["head"], steps=None, seconds=60.0).texts == timed.texts


def test_sampled_text_does_not_depend_on_what_is_generated_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened(folder)
    prompts = [[5, 9], [7, 3, 11, 30], [4], [8, 8, 13]]
    made = []
    for free in (None, 0):  # with little memory two texts are generated at once
        monkeypatch.setattr(training_texts, "free_memory", lambda _, free=free: free)
        counts = list[int]()
        texts = continuations(
            target,
            prompts,
            24,
            sampling=SamplingParams(temperature=1.5),
            seed=3,
            on_progress=lambda _, tokens, counts=counts: counts.append(tokens) or True,  # type: ignore[func-returns-value]
        )
        made.append([text[: 20 + len(prompt)] for text, prompt in zip(texts, prompts, strict=True)])
        assert counts == sorted(counts)
        assert counts[-1] == sum(map(len, texts))
    assert made[0] == made[1]


def test_text_is_sampled_at_the_temperature_of_the_target(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "own")
    config = tmp_path / "own" / "generation_config.json"
    for stored, expected in (
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": "hot", "top_k": 20, "min_p": None}, {"temperature": 1.0, "top_k": 20}),
        ({"temperature": 0}, {"temperature": 1.0}),
    ):
        config.write_text(json.dumps(stored))
        assert own_sampling(opened(tmp_path / "own")) == SamplingParams(**expected)
    config.unlink()
    assert own_sampling(opened(tmp_path / "own")) == SamplingParams(temperature=1.0)


def test_generation_keeps_to_its_time_and_memory(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a simulated clock on which two complete batches would take ten times the budget."""
    target = opened(folder)
    now = 0.0
    run_batch = target.model.batch

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        now += 2.0  # for each generated token
        return run_batch(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(target.model, "batch", timed)
        patched.setattr("time.monotonic", lambda: now)
        recipe = replace(TINY, steps=None, seconds=200.0, window=64)
        made = TextGeneration(
            target, task_of(tmp_path, recipe, corpus=corpus_of(corpus, target)), tuple(Use)
        )
        assert {text.greedy for text in made.run()} == {True, False}
        assert 0.2 * 200 * 0.5 < made.seconds < 0.2 * 200 * 1.1
    # tokens x keys and values x layers x heads x head size x bytes
    per_text = 24 * 2 * 3 * 2 * 8 * 4
    for free, expected in ((None, 64), (2 * 63 * per_text, 32), (0, 2)):
        monkeypatch.setattr(training_texts, "free_memory", lambda _, free=free: free)
        assert largest_batch(target, 24) == expected


# the loop


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_same_weights(
    folder: Path,
    other: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Also with more free memory than at first. Nothing else resumes it: other options, a damaged
    state."""
    monkeypatch.setattr(training_texts, "free_memory", lambda _: 0)
    straight = run(kind, folder, other, tmp_path / "straight", corpus, Recorder())
    for recorder in (
        Recorder("Generating text", 25),
        Recorder("Training", 1),
        Recorder("Training", 3),
    ):
        with pytest.raises(TrainingStopped):
            run(kind, folder, other, tmp_path / "resumed", corpus, recorder)
        monkeypatch.setattr(training_texts, "free_memory", lambda _: None)
    with pytest.raises(SpecgenError, match=r"another run \(window: 24, now 25\)"):
        run(kind, folder, other, tmp_path / "resumed", corpus, Recorder(), replace(TINY, window=25))
    state = tmp_path / "resumed" / "training" / "state.pt"
    content = state.read_bytes()
    state.write_bytes(content[:-9])
    with pytest.raises(SpecgenError, match=r"cannot read .*state\.pt"):
        run(kind, folder, other, tmp_path / "resumed", corpus, Recorder())
    state.write_bytes(content)
    last = Recorder()
    resumed = run(kind, folder, other, tmp_path / "resumed", corpus, last)
    assert [figures.split(",")[0] for figures in last.shown["Training"]] == ["step 5", "step 6"], (
        "the budget is 6 steps"
    )
    assert "resuming at step 4" in last.messages
    assert not last.shown["Generating text"], "stored text is not generated again"
    figures, again = ({**made["figures"], "minutes": 0} for _, made in (straight, resumed))
    assert figures == again
    for path in straight[0].parent.rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes()
    assert not (tmp_path / "resumed" / "training").exists()


def test_a_budget_in_seconds_is_kept(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a simulated clock on which every step takes a second, and five percent are kept for other
    work."""
    target = opened(folder)
    now = 0.0

    class Timed(Training):
        def advance(self) -> float:
            nonlocal now
            now += 1.0
            return super().advance()

    task = task_of(
        tmp_path, replace(TINY, steps=None, seconds=20.0), corpus=corpus_of(corpus, target)
    )
    made = objective("medusa", task, target)
    training = Timed(made, made.start([]), spent=9.0)
    monkeypatch.setattr("time.monotonic", lambda: now)
    training.run()
    assert training.step == training.seconds == 10


class Clocked(Training):
    """A training by a simulated clock, on which a step takes some time, and each of its sequences
    more."""

    now = 0.0
    predicted: ClassVar[list[int]] = []  # tokens in each step

    def advance(self) -> float:
        Clocked.now += 0.4 + 0.5 * self.batches.size
        return super().advance()

    def backward(self, batch: PackedBatch, labelled: int) -> torch.Tensor:
        rows, _ = self.objective.outputs(batch, Random(f"objective {TINY.seed} {self.step}"))
        Clocked.predicted.append(len(rows))
        return super().backward(batch, labelled)


def test_the_batch_is_chosen_by_timing_and_kept_when_training_goes_on(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest that predicts nearly as many tokens a second as any: 4 sequences. With a budget
    in seconds, an interrupted training continues from its step and in what is left of the
    budget."""
    target = opened(folder)
    recipe = replace(TINY, steps=None, seconds=400.0, batch=None)

    def training(recorder: Recorder) -> Training:
        task = task_of(tmp_path, recipe, recorder, corpus=corpus_of(corpus, target))
        made = objective("medusa", task, target)
        return Clocked(made, made.start([]))

    monkeypatch.setattr("time.monotonic", lambda: Clocked.now)
    with pytest.raises(TrainingStopped):
        (first := training(Recorder("Training", 11))).run()
    assert first._tried == [
        (size, pytest.approx(predicted / (0.4 + 0.5 * size)))
        for size, predicted in zip((2, 2, 4, 4, 8, 8, 16, 16), Clocked.predicted, strict=False)
    ]
    assert (first.step, first.batches.size) == (11, 4)
    Clocked.now += 1000
    second = training(Recorder())
    second.run()
    assert (second.batches.size, second._tried) == (4, [])
    assert second.seconds == pytest.approx(380, abs=2.4)
    assert abs(second.step - 11 - (380 - first.seconds) / 2.4) < 1


@pytest.mark.parametrize(("held_out", "is_short"), [(9.0, True), (0.0, False)])
def test_text_is_generated_while_it_is_what_limits(
    folder: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held_out: float,
    is_short: bool,
) -> None:
    """By a simulated clock on which every step takes a second: for as long as was trained since the
    measurement before, and the last tenth of the budget is for steps. The budget is kept."""
    target = opened(folder)
    now = 0.0
    asked = list[float]()

    class Timed(Training):
        def advance(self) -> float:
            nonlocal now
            now += 1.0
            self.step += 1
            return 3.0

    def more(seconds: float) -> list[Text]:
        nonlocal now
        now += seconds
        asked.append(seconds)
        return written(target, [[5, 9], [7]], 12, greedy=True, part=Use.TRAIN)

    recorder = Recorder()
    recipe = replace(TINY, steps=None, seconds=100.0)
    task = task_of(tmp_path, recipe, recorder, corpus=corpus_of(corpus, target))
    made = objective("medusa", task, target)
    monkeypatch.setattr(made, "progress", lambda _: (held_out, [0.5, 0.4]))
    first = written(target, [[5, 9], [7]], 12, greedy=True, part=Use.TRAIN)
    training = Timed(made, made.start(first), texts=first, more=more)
    monkeypatch.setattr("time.monotonic", lambda: now)
    training.run()
    assert 95 <= training.seconds <= 96
    assert training.step + sum(asked) == pytest.approx(training.seconds)
    assert (
        "agreement 50.0%, 1.70 tokens a pass (plain decoding: 1)" in recorder.shown["Training"][-1]
    )
    learning = training.learning
    assert learning is not None
    assert (learning.loss, learning.held_out_loss, learning.agreement) == (3.0, held_out, 0.5)
    if is_short:
        assert len(asked) >= 3
        assert asked[0] == pytest.approx(10, abs=1)
        assert sum(asked) < 0.55 * 95
    else:
        assert not asked


@pytest.mark.parametrize(("losses", "kept"), [((9.0, 3.0, 4.0), 3), ((2.0, 3.0, 4.0), 0)])
def test_the_weights_that_predict_held_out_text_best_are_kept(
    folder: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: tuple[float, ...],
    kept: int,
) -> None:
    """Those before the first step among them, and after an interruption too."""

    class Counting(Training):
        def advance(self) -> float:
            self.step += 1
            for weight in self.trained.values():
                weight.data.fill_(self.step)
            return 1.0

    target = opened(folder)
    left = list(losses)
    for stop_after in (4, 0):
        recorder = Recorder("Training", stop_after)
        task = task_of(tmp_path, TINY, recorder, corpus=corpus_of(corpus, target))
        made = objective("medusa", task, target)
        monkeypatch.setattr(made, "progress", lambda _: (left.pop(0), [0.5]))
        batches = made.start([])
        for weight in made.parameters.values():
            weight.data.fill_(0)
        training = Counting(made, batches)
        if stop_after:
            with pytest.raises(TrainingStopped):
                training.run()
        else:
            training.run()
    assert not left
    assert {float(weight.detach().unique()) for weight in training.trained.values()} == {kept}
    assert f"the weights of step {kept} predict held-out text best: they are kept" in (
        recorder.messages
    )


def test_a_budget_that_ends_before_the_first_step_leaves_the_start(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a simulated clock on which the measurement before the steps takes all the time."""
    target = opened(folder)
    now = 0.0

    def progress(_: object) -> tuple[float, list[float]]:
        nonlocal now
        now += 100.0
        return 5.0, [0.25]

    recorder = Recorder()
    recipe = replace(TINY, steps=None, seconds=60.0)
    task = task_of(tmp_path, recipe, recorder, corpus=corpus_of(corpus, target))
    made = objective("medusa", task, target)
    monkeypatch.setattr(made, "progress", progress)
    training = Training(made, made.start([]))
    before = {name: weight.detach().clone() for name, weight in training.trained.items()}
    monkeypatch.setattr("time.monotonic", lambda: now)
    training.run()
    assert (training.step, training.loss) == (0, None)
    assert "no time was left for a step: give it more --minutes" in recorder.messages
    assert all(weight.equal(before[name]) for name, weight in training.trained.items())


def test_where_time_is_short_there_are_fewer_texts_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the speed of the first passes: as many as can have answers of some length. Half of them
    are not fewer where they take as long. All uses are among the first ones."""
    target = opened(folder)
    prompts = Corpus([[5 + number] * 10 for number in range(40)])
    for speed, number in (
        (Speed(0.01, 0.0, 0.001), 32),  # in 10 seconds, 243 tokens of each of 32 answers
        (Speed(0.05, 0.001, 0.005), 8),
        (Speed(1.0, 0.1, 0.9), 2),
        (Speed(1.0, 0.0, 0.0), 32),
    ):
        monkeypatch.setattr(training_texts, "measured_speed", lambda *_, speed=speed: speed)
        recipe = replace(TINY, steps=None, seconds=100.0, window=200)
        generation = TextGeneration(target, task_of(tmp_path, recipe, prompts=prompts), tuple(Use))
        generation._max_tokens = 200
        generation._choose_number(10.0)
        assert generation._at_once == number
        _, chosen = generation._next_prompts(0, True)
        assert len(chosen) == number
        if number > 2:
            assert {use for _, use in chosen} == set(Use)


def test_of_much_text_as_much_is_read_as_there_is_time_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a simulated clock on which a pass over a text takes a second."""
    target = opened(folder)
    now = 0.0
    texts = written(
        target, [[5, 9, token] for token in range(3, 43)], 12, greedy=True, part=Use.TRAIN
    )
    for kind, seconds, count in (("eagle", 50.0, 16), ("eagle", 1000.0, 40), ("eagle", 1.0, 8)):
        recipe = replace(TINY, steps=None, seconds=seconds)
        corpus = Corpus([[5 + number] * 6 for number in range(24)])
        made = objective(kind, task_of(tmp_path, recipe, corpus=corpus), target)
        made.task.began = now
        of_text = made._of_text

        def timed(text: Text, of_text: Any = of_text) -> Any:
            nonlocal now
            now += 1.0
            return of_text(text)

        with monkeypatch.context() as patched:
            patched.setattr("time.monotonic", lambda: now)
            patched.setattr(made, "_of_text", timed)
            assert len(made.affordable(texts)) == count


def test_a_draft_learns_answers_alone(
    folder: Path, other: Path, corpus: Path, tmp_path: Path
) -> None:
    """And is measured by position in a draft on held-out answers."""
    target = opened(folder)
    checked = opened(folder)
    texts = written(target, [[5, 9, 7, 4], [8, 3, 3, 6]], 20, greedy=True, part=Use.TRAIN)
    held_out = texts[1]._replace(use=Use.HELD_OUT)
    prompts = Corpus([[5, 9, 7, 4]])
    task = task_of(tmp_path, replace(TINY, batch=1), prompts=prompts)
    made = objective("sd", task, target, opened_draft(other))
    labels = made.start([texts[0], held_out]).batch(0).labels[0][: len(texts[0].ids)].tolist()
    assert labels[: len(texts[0].ids) - 1] == [IGNORED] * 3 + texts[0].ids[4:]

    loss, shares = made.progress([])
    ids = torch.tensor(held_out.ids)
    own = made.next_logits(ids)[3:-1]
    of_target = checked.model.reference_logits(held_out.ids)[3:-1].log_softmax(-1)
    is_right = own.argmax(-1) == of_target.argmax(-1)
    assert shares[0] == pytest.approx(float(is_right.float().mean()))
    divergences = (of_target.exp() * (of_target - own.log_softmax(-1))).sum(-1)
    assert loss == pytest.approx(float(divergences.mean()), rel=0.02)
    entropy = -(of_target.exp() * of_target).sum(-1).mean()
    assert made.measured([])["cross_entropy"] == pytest.approx(loss + float(entropy), rel=0.1)


def started(kind: str, folder: Path, corpus: Path, out: Path, recipe: Recipe = TINY) -> Training:
    target = opened(folder)
    made = objective(kind, task_of(out, recipe, corpus=corpus_of(corpus, target)), target)
    return Training(made, made.start([]))


def test_the_learning_rate_rises_and_falls_to_zero(
    folder: Path, corpus: Path, tmp_path: Path
) -> None:
    """Whatever the budget: in a twentieth of the steps, or of the seconds."""
    for recipe in (replace(TINY, steps=200), replace(TINY, steps=None, seconds=200 / 0.95)):
        training = started("medusa", folder, corpus, tmp_path / str(recipe.steps), recipe)
        rates = []
        for step in range(200):
            training.step = step
            training.seconds = float(step)
            rates.append(training._rate())
        assert 0 < rates[0] < 0.15
        assert max(rates) == max(rates[9:12]) > 0.93
        assert rates[:10] == sorted(rates[:10])
        assert rates[12:] == sorted(rates[12:], reverse=True)
        assert rates[100] == pytest.approx(0.5, abs=0.01)
        assert 0 < rates[-1] < 0.01


def test_a_full_disk_is_told_in_one_line(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, where it can be foreseen."""
    training = started("medusa", folder, corpus, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large|no room"):
            training.save(tmp_path / "state.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr("specgen.train.loop.shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(Training, "advance", None)
    result = trained(
        train_command("medusa", corpus, tmp_path / "out", "-t", str(folder), "--steps", "3"), 1
    )
    assert "0 MB free, and training needs" in result.stderr.splitlines()[-1]


def test_only_the_answers_tokens_are_learned(folder: Path, tmp_path: Path) -> None:
    """Of a text that the target generated after a prompt; of corpus text all."""
    target = opened(folder)
    (text,) = written(target, [[5, 9, 7, 4]], 12, greedy=True, part=Use.TRAIN)
    corpus = Corpus([[20 + number] * 8 for number in range(24)])
    made = objective("medusa", task_of(tmp_path, replace(TINY, batch=2), corpus=corpus), target)
    batch = made.start([text]).batch(0)
    own = batch.labels[0][: len(text.ids)].tolist()
    assert own[: len(text.ids) - 1] == [IGNORED] * 3 + text.ids[4:]
    assert batch.labels[1][:7].tolist() == batch.ids[1][1:8].tolist()


def test_a_loss_that_is_not_finite_ends_the_run(
    folder: Path, other: Path, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="learning-rate"):
        run(
            "eesd",
            folder,
            other,
            tmp_path,
            corpus,
            Recorder(),
            replace(TINY, steps=40, learning_rate=1e30),
        )


@pytest.mark.parametrize("kind", ["eesd", "medusa", "sd"])
def test_training_learns_and_the_figures_are_those_of_the_saved_weights(
    folder: Path,
    other: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Files have the weights in bfloat16: they are rounded before they are measured and before the
    predictor is trained."""
    rounded = []
    measured = list[Text]()

    def recording(texts: list[Text], ranks_of: Any) -> Any:
        dtype = torch.float32 if kind == "sd" else torch.bfloat16
        rounded.append(
            all(torch.equal(each, each.to(dtype).float()) for each in LAST[0].parameters.values())
        )
        measured[:] = [text for text in texts if text.use == Use.HELD_OUT and text.greedy]
        return held_out_agreement(texts, ranks_of)

    for module in ("exits", "distillation", "heads"):
        monkeypatch.setattr(f"specgen.train.{module}.held_out_agreement", recording)
    monkeypatch.setattr(training_texts, "_CPU_BATCH", 64)
    own = weights_fingerprint(other)
    recorder = Recorder()
    recipe = replace(TINY, self_text=1.0, steps=60, learning_rate=4e-3, batch=8)
    path, made = run(kind, folder, other, tmp_path, corpus, recorder, recipe)
    first, *_, last = (float(figures.split()[-1]) for figures in recorder.shown["Training"])
    assert rounded[-1], "what is measured are the saved weights"
    figures = made["figures"]
    if kind == "eesd":  # it begins as good as least squares make it
        assert figures["cross_entropy"] < figures["start"]["cross_entropy"] - 0.01
    else:
        assert last < first - 0.05
    target = opened(folder)
    if kind == "medusa":
        weights: Any = open_part(path, target, is_exit=False).load()
        assert len(weights.rank_accuracies[0]) == RANKS
        assert figures["held_out_agreement"]["greedy"][0] > 0.1
        return
    if kind == "sd":
        agreement = figures["agreement"]["greedy"]
        draft = opened(tmp_path).model
        assert agreement > figures["agreement_before"]["greedy"] + 0.1
        assert weights_fingerprint(other) == own
        assert {each.name for each in tmp_path.iterdir()} >= {each.name for each in other.iterdir()}
        logits = [draft.reference_logits(text.ids) for text in measured]
    else:
        agreement = figures["held_out_agreement"]["greedy"][0]
        part = open_part(path, target, is_exit=True)
        assert agreement > 0.2
        assert part.has_predictor
        drafts = make_runners(part.load(), target.model, None, lambda: None).draft  # type: ignore[arg-type]
        logits = [
            torch.cat(
                [
                    drafts.logits(Context(text.ids[:end])).logits
                    for end in range(1, len(text.ids) + 1)
                ]
            )
            for text in measured
        ]
    right = list[bool]()
    for text, found in zip(measured, logits, strict=True):
        right += (found.argmax(dim=-1)[:-1] == torch.tensor(text.ids[1:]))[
            text.prompt_length - 1 :
        ].tolist()
    assert agreement == sum(right) / len(right)


def test_teacher_references_point_to_the_probabilities_of_their_token(
    folder: Path, other: Path, corpus: Path
) -> None:
    """Of the target's own texts and of twice as many that it reads; those held out are not
    learned."""
    target = opened(folder)
    checked = opened(folder)
    texts = written(
        target, [[5, 9, token] for token in range(3, 9)], 20, greedy=False, part=Use.TRAIN
    )
    texts += written(target, [[7, 7, 7]], 20, greedy=False, part=Use.HELD_OUT)
    task = task_of(folder / "out", replace(TINY, batch=6), corpus=corpus_of(corpus, target))
    batches = objective("sd", task, target, opened_draft(other)).start(texts)
    batch = batches.batch(3)
    assert 0.4 < (batch.teacher != IGNORED).float().mean() < 0.6
    for ids, teacher, segments in zip(batch.ids, batch.teacher, batch.segments, strict=True):
        for segment in segments.unique():
            references = teacher[segments == segment]
            if references[0] != IGNORED:
                again = predicted(
                    checked, Text(ids[segments == segment].tolist(), 1, False, Use.TRAIN)
                )
                assert torch.equal(batches.top_k_ids[references], again.top_k_ids)
                torch.testing.assert_close(
                    batches.top_k_log_probs[references], again.top_k_log_probs, atol=1e-4, rtol=1e-4
                )
    taught = [text.ids for text in batches._taught]
    assert taught[:6] == [text.ids for text in texts[:6]]
    assert len(taught) == 6 + 2 * len(texts), "and none that is held out"


# the predictor of acceptance

WIDTH = 16
LENGTH = 30


def judged(
    ids: list[int], top1: list[int], prompt_length: int, exit_top1: list[int], continuing: float
) -> list[Any]:
    text = PredictedText(
        Text(ids, prompt_length, True, Use.PREDICTOR), torch.tensor(top1)[:, None], torch.empty(0)
    )
    return list(judged_tokens(text, [exit_top1], continuing, random.Random(0)))


def test_rounds_start_after_the_last_committed_token() -> None:
    """Greedy text: a round ends at the first rejected token, and the next one starts after the
    correction."""
    ids = [7, 8, 9, 10, 11, 12, 13, 14]  # the prompt has 2 tokens, and the prefill gives the third
    exits = [8, 9, 10, 11, 50, 13, 14, 99]  # wrong about token 5
    expected = [
        (1, 2, 1, True),
        (1, 3, 2, True),
        (1, 4, 3, False),
        (4, 5, 1, True),
        (4, 6, 2, True),
    ]
    assert judged(ids, [*ids[1:], 99], 2, exits, 1.0) == expected
    # drafts of one token, each followed by a bonus token
    expected = [(1, 2, 1, True), (3, 4, 1, False), (4, 5, 1, True)]
    assert judged(ids, [*ids[1:], 99], 2, exits, 0.0) == expected
    # the token after 10 was sampled: 60 is more probable, and the draft is followed up to there
    top1 = [8, 9, 10, 60, 12, 99]
    assert judged(ids[:6], top1, 1, top1, 1.0) == [
        (0, 1, 1, True),
        (0, 2, 2, True),
        (0, 3, 3, True),
        (3, 4, 1, True),
    ]


def made_texts(number: int, accepts: Any, uses: list[Use]) -> Any:
    """Texts of random states; `accepts(target_states, exit_states, rng)` says which tokens exit and
    target agree about.

    Returns the texts and a function that stands for the exit.
    """
    made: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    texts = []
    for index in range(number):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 90, (LENGTH,), generator=generator)
        target_states, exit_states = (
            torch.randn(LENGTH, WIDTH, generator=generator) for _ in range(2)
        )
        top1 = torch.cat((ids[1:], torch.tensor([2])))
        guesses = torch.where(accepts(target_states, exit_states, generator), top1, 95)
        made[tuple(ids.tolist())] = guesses, exit_states
        text = Text(ids.tolist(), 1, True, uses[index % len(uses)])
        texts.append(PredictedText(text, top1[:, None], torch.empty(0), target_states))
    return texts, lambda ids: tuple(each[None] for each in made[tuple(ids)])


def test_a_predictor_learns_from_reserved_text_only() -> None:
    """In the texts that the exit was trained on, exit and target always agree; in the others, half
    of the time."""
    half = lambda target, _, generator: torch.rand(len(target), generator=generator) < 0.5  # noqa: E731
    texts, outputs = made_texts(48, half, list(Use))
    for text in texts:
        if text.text.use == Use.TRAIN:
            outputs(text.text.ids)[0][0].copy_(text.top_k_ids[:, 0])
    assert train_predictor(outputs, texts, seed=0)[1]["mean_score"] == pytest.approx(0.5, abs=0.1)
    uses = [Use.HELD_OUT, Use.PREDICTOR, Use.PREDICTOR, Use.PREDICTOR]
    seen, state_of = made_texts(40, lambda _, exit_, __: 30 * exit_[:, 0] > -15, uses)
    fit = train_predictor(state_of, seen, seed=0)[1]
    assert fit["loss"] < 0.9 * fit["base_loss"], "the exit's state tells"
    without = {
        part: [text for text in texts if text.text.use != part]
        for part in (Use.HELD_OUT, Use.PREDICTOR)
    }
    assert train_predictor(outputs, without[Use.HELD_OUT], seed=0)[1] == {}
    assert train_predictor(outputs, without[Use.PREDICTOR], seed=0) == (None, {})


def test_later_tokens_of_a_draft_are_judged_by_what_is_drafted_there() -> None:
    """The exit is right as the first token of a draft, and wrong as the second one."""
    top1 = [7, 8, 9, 10, 11]
    text = PredictedText(
        Text([6, *top1], 1, True, Use.PREDICTOR), torch.tensor([*top1, 0])[:, None], torch.empty(0)
    )
    rounds = judged_tokens(text, [[*top1, 0], [0] * 6], 1.0, random.Random(0))
    assert [(position, accepted) for _, _, position, accepted in rounds] == [
        (1, True),
        (2, False),
        (1, True),
        (2, False),
    ]


def test_measurements_of_known_scores() -> None:
    found = measure(
        torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([False, False, True, False])
    )
    loss = -float(torch.tensor([0.75, 0.75, 0.75, 0.25]).log().mean())
    assert (found["mean_score"], found["accepted"], found["loss"]) == pytest.approx(
        (0.5, 0.25, loss)
    )
    base = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert found["base_loss"] == pytest.approx(base)


def test_a_new_predictor_leaves_the_exit_as_it_is(
    folder: Path, other: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From text for predictors alone; the command replaces the files by default."""
    monkeypatch.setattr(training_texts, "PREDICTOR_TOKENS", 2000)
    path, old = run("eesd", folder, other, tmp_path / "exit", corpus, Recorder())
    target = opened(folder)
    task = task_of(
        tmp_path / "new", replace(TINY, steps=None, seed=3), corpus=corpus_of(corpus, target)
    )
    made, description = train(PredictorObjective(task, target, path))
    before = load_file(path)
    after = load_file(made)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) != name.startswith("predictor.")
    assert description["figures"]["steps"] == old["figures"]["steps"]
    assert description["made_with"]["predictor"]["seed"] == 3
    options = [
        "tune",
        "--train",
        "-t",
        str(folder),
        "--exit-layer",
        str(path.parent),
        "--corpus",
        str(corpus),
    ]
    result = trained(
        [
            *options,
            "--window",
            "24",
            "--minutes",
            "0.01",
            "--seed",
            "2",
            "--device",
            "cpu",
            "--dtype",
            "float32",
        ]
    )
    assert result.stdout.strip() == str(path), "by default, the files are replaced"
    assert "Trained a predictor for" in result.stderr
    assert "is accepted, cross-entropy" in result.stderr


# the command


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_trains_where_it_is_found(
    folder: Path,
    other: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """What the models' files hold stays; the native decoder does everything but the draft: no
    weights are loaded twice."""
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    if kind != "sd":
        monkeypatch.setattr("specgen.engine.transformers.loading.load_module", None)
    own = {path: path.read_bytes() for each in (folder, other) for path in each.iterdir()}
    named = ["-t", str(folder), *(["-d", str(other)] if kind == "sd" else [])]
    result = trained(train_command(kind, corpus, None, *named, "--steps", "3", "--json"))
    line = json.loads(result.stdout)
    fingerprint = weights_fingerprint(folder)
    assert (line["type"], line["figures"]["steps"]) == ("train", 3)
    assert (
        "Distilled a draft model." if kind == "sd" else f"Trained {TRAINABLE[kind].name} for "
    ) in result.stderr
    assert "Training: 100%, step 3" in result.stderr
    assert {path: path.read_bytes() for each in (folder, other) for path in each.iterdir()} == own
    draft = None
    if kind == "eesd":
        assert (
            kept_part("exit", str(folder), fingerprint)
            == Path(line["profile"])
            == Path(line["exit_layer"]).parent
        )
        assert line["predictor"] is True
    elif kind == "sd":
        draft = line["draft"]
        assert Path(draft).name == "distilled"
        assert line["figures"].keys() >= {
            "agreement_before",
            "agreement",
            "loss",
            "minutes",
            "tokens",
        }
    else:
        assert kept_part(kind, str(folder), fingerprint) == Path(line["head"])
        assert line["kind"] == kind
    with specgen.load(str(folder), draft, device="cpu", dtype="float32") as pair:
        sampling = specgen.SamplingParams(max_new_tokens=8, ignore_eos=True)
        made = pair.generate([1, 5, 9], kind, sampling)
        assert made.token_ids == pair.generate([1, 5, 9], "ar", sampling).token_ids


REFUSED: list[tuple[str, list[str], str]] = [
    ("eesd", ["--steps", "3", "--minutes", "1"], "both --minutes and --steps"),
    ("eesd", ["--exit-head", "other"], "--exit-head is 'other'"),
    ("sd", ["--draft", "none"], "there is no draft model to train"),
    ("eesd", ["--layer", "3"], "after layer 3"),
    ("eesd", ["--methods", "svip"], "svip has nothing to train"),
    (
        "eesd",
        ["--exit-layer", "x", "--steps", "3"],
        "--steps, --batch-size cannot be combined with --train --exit-layer",
    ),
    (
        "medusa",
        ["--layer", "1"],
        "--layer cannot be combined with --train --methods medusa, which trains Medusa heads",
    ),
    ("medusa", ["--methods", "medusa,glide"], "glide and medusa cannot be trained in one run"),
    ("sd", ["--self-text", "0"], "--self-text is 0"),
    ("sd", ["-d", "{other}", "--prompts", "prompts.txt"], "--self-text 0.5"),
    ("sd", ["-d", "{other}", "--out", "{other}"], "the folder of one of the models"),
    ("medusa", ["--out", "{folder}"], "does not belong to a head trained by specgen"),
    ("eesd", ["-t", "{gpt2}"], "built as Llama is, and gpt2 is not"),
]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_model("gpt2"), tmp_path_factory.mktemp("gpt2"), make_tokenizer(LETTERS))


@pytest.mark.parametrize(("kind", "more", "message"), REFUSED)
def test_wrong_options_are_refused(
    folder: Path,
    other: Path,
    gpt2: str,
    corpus: Path,
    tmp_path: Path,
    kind: str,
    more: list[str],
    message: str,
) -> None:
    """In one line, before anything is written."""
    before = {path: path.read_bytes() for each in (folder, other) for path in each.iterdir()}
    filled = [word.format(folder=folder, other=other, gpt2=gpt2) for word in more]
    assert message in refused([*train_command(kind, corpus, tmp_path, "-t", str(folder)), *filled])
    assert not any(tmp_path.iterdir())
    assert {
        path: path.read_bytes() for each in (folder, other) for path in each.iterdir()
    } == before


def test_training_needs_text_and_says_so_of_too_little(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    for more in ([], ["--prompts", "prompts.jsonl"]):
        more = [*more, "--self-text", "0"]
        assert "there is no text to train on" in refused(
            ["tune", "--train", "-t", str(folder), *more]
        )
    Path("few.jsonl").write_text(
        "\n".join(f'{{"text": "{"abc def " * (5 + number)}"}}' for number in range(7))
    )
    result = trained(
        train_command(
            "eesd", Path("few.jsonl"), tmp_path / "out", "-t", str(folder), "--steps", "1"
        )
    )
    assert "fewer than ten different documents or prompts" in result.stderr
    assert "held-out text" not in result.stderr
    assert "predictor: false" in (tmp_path / "out" / EXIT_DESCRIPTION).read_text()


def test_the_report_of_a_trained_head_names_only_what_is_so(tmp_path: Path) -> None:
    """A head that was saved elsewhere is used by nothing, and held-out text too short for a draft
    has no agreement."""
    made: dict[str, Any] = {
        "target": "a target",
        "kind": "glide",
        "figures": {"held_out_agreement": {"greedy": [0.2, 0.1]}},
    }
    before = 0.5, tmp_path / "before"

    def said(**given: Any) -> str:
        return _report(GLIDE, tmp_path, made, before, **given)[1]

    assert f"to return to it, delete {tmp_path}." in said(is_used=True)
    assert "Profiles of this target are stale now" in said(is_used=True)
    elsewhere = said(is_used=False)
    assert f"that one is still used, and this one only where it is named: {tmp_path}." in elsewhere
    assert "delete" not in elsewhere
    assert "stale" not in elsewhere
    made["figures"]["held_out_agreement"]["greedy"] = []
    assert "of a draft:" not in said(is_used=True)
    assert "Worse" not in said(is_used=True)


def test_only_a_draft_that_was_faster_is_recommended(tmp_path: Path) -> None:
    """However much its agreement rose."""
    learning = {
        "loss": 1.0,
        "held_out_loss": 1.1,
        "agreement": 0.95,
        "agreement_before": 0.91,
        "tokens": 10_000,
    }
    figures = {
        "agreement_before": {"greedy": 0.9},
        "agreement": {"greedy": 0.95},
        "learning": learning,
    }
    for speed, said in (
        (13.0, f"sd 1.30 × plain, lookup 1.20 ×: used. Use it: --draft {tmp_path}"),
        (
            11.0,
            "sd 1.10 × plain, lookup 1.20 ×: not used; more time is what would help (agreement "
            f"rose 0.40 points in the last thousand tokens). It is kept in {tmp_path}",
        ),
    ):
        verdict = PartVerdict.of({"ar": 10.0, "sd": speed, "lookup": 12.0}, "sd", "cpu")
        fields, sentence = _draft_report(tmp_path, figures, verdict)
        assert fields["figures"] == figures
        assert "95.0% of the greedy tokens (before: 90.0%)" in sentence
        assert sentence.endswith(said)
    assert "was not measured: specgen tune" in _draft_report(tmp_path, figures, None)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_has_its_exit_code_and_says_how_to_go_on(
    folder: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    """A Ctrl-C or a request to end during the first step. That a resumed run ends with the same
    weights is tested above."""
    advance = Training.advance

    def interrupted(self: Training) -> float:
        monkeypatch.setattr(Training, "advance", advance)
        os.kill(os.getpid(), number)
        return advance(self)

    monkeypatch.setattr(Training, "advance", interrupted)
    command = train_command(
        "eesd", corpus, tmp_path / "out", "-t", str(folder), "--steps", "3", "--self-text", "0"
    )
    assert "the same command resumes from here" in trained(command, 130).stderr
    assert "resuming at step" in trained(command).stderr
