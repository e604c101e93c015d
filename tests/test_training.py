"""Training of exit layers: packing, gradients, the loop, its saved state, the predictor, and the command."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from families import BACKENDS, LETTERS, make_model, make_tokenizer, save
from runner_checks import every
from safetensors.torch import load_file
from specgen.engine.parts.exit_files import DESCRIPTION, WEIGHTS, Description, load_exit, read_description
from specgen.train.exit_training import ExitTraining, exit_outputs, first_layers, train_exit
from specgen.train.generated_text import generate_texts
from specgen.train.training_loop import TrainingBatches, greedy_agreement
from specgen.train.training_task import TrainingStopped, TrainingTask, check_same_run
from training_helpers import TINY, Recorder, corpus_of, invoke, opened, refused, train_command, trained

from specgen.base.errors import RunError, SpecgenError
from specgen.engine.batch_pass import BatchPass
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.model import TrainableExit
from specgen.engine.model_loading import LoadedModel
from specgen.train.corpus import Corpus, Part, read_corpus
from specgen.train.distillation import DistillationBatches
from specgen.train.packing import IGNORED, pack

pytestmark = pytest.mark.usefixtures("short_fit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("training") / "target", make_tokenizer(LETTERS)))


def parts(folder: Path, backend: str = "auto") -> tuple[LoadedModel, TrainableExit]:
    """A target of which only the first layer is left, and an untrained exit."""
    target = opened(folder, backend)
    layer = target.model.trainable_exit(folder, 1)
    target.model.free_weights(1)
    return target, layer


def exit_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights in an exit's file, by the names of a trainable exit's parameters."""
    return {name.removeprefix("exit."): weight for name, weight in load_file(path).items() if name.startswith("exit.")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_texts_do_not_attend_to_each_other(folder: Path, backend: str) -> None:
    """The logits of a packed text are those of the text alone."""
    target, layer = parts(folder, backend)
    texts = [[5, 9, 7, 3, 11], [4, 8], [30, 31, 32, 33, 34, 35, 36]]
    waiting = iter([*texts, *texts])

    def sample(rng: random.Random, max_tokens: int) -> tuple[list[int], list[int]]:
        text = next(waiting)[:max_tokens]
        return text, [token + 1 for token in text]

    batch = pack([sample], 18, random.Random(0))
    assert batch.ids[0].tolist() == [*texts[0], *texts[1], *texts[2], *texts[0][:4]]
    assert batch.labels[0].tolist()[:8] == [9, 7, 3, 11, IGNORED, 8, IGNORED, 31]
    assert batch.labels[0, -1] == texts[0][4]
    assert batch.teacher[0].tolist() == [token + 1 for token in batch.ids[0].tolist()]
    forward_pass = BatchPass(batch.ids, batch.positions, batch.attention_mask(), batch.positions)
    packed = layer.norm_and_head(layer.run_layers(first_layers(target.model, 1, forward_pass), forward_pass))[0][0]
    start = 0
    for text in texts:
        alone, _ = exit_outputs(target.model, 1, layer, torch.tensor(text))
        torch.testing.assert_close(packed[start : start + len(text)], alone, atol=1e-5, rtol=1e-4)
        start += len(text)


def test_gradients_do_not_depend_on_the_piece_size(folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for logits, tokens in ((1 << 26, 1 << 20), (1 << 26, 5), (96 * 7, 1 << 20)):  # one piece; 5 tokens; a sequence, 7 tokens
        monkeypatch.setattr("specgen.train.training_loop.MAX_LOGITS", logits)
        monkeypatch.setattr("specgen.train.exit_training.MAX_LOGITS", logits)
        monkeypatch.setattr("specgen.train.exit_training._CPU_TOKENS", tokens)
        target, layer = parts(folder)
        ExitTraining(target.model, 1, layer, TrainingBatches(corpus_of(corpus, target), [], TINY)).advance()
        weights.append({name: weight.detach().clone() for name, weight in layer.module.named_parameters()})
    for name, weight in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(weight, other[name], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("backend", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_training_lowers_the_loss_and_raises_greedy_agreement(folder: Path, corpus: Path, tmp_path: Path, backend: str) -> None:
    target, observer = opened(folder, backend), Recorder()
    recipe = replace(TINY, steps=150, learning_rate=3e-3, batch_size=8)
    path, description = train_exit(target, TrainingTask(tmp_path, recipe, corpus=corpus_of(corpus, target)), observer)
    assert observer.progress[-1].loss < observer.progress[0].loss - 0.5
    fresh = opened(folder)
    prompts = [[5, 9, token] for token in range(3, 40)]
    texts = generate_texts(fresh, prompts, 24, greedy=True, seed=0, parts=[Part.HELD_OUT] * len(prompts))
    layer = fresh.model.trainable_exit(folder, 1)
    outputs = partial(exit_outputs, fresh.model, 1, layer)
    before = greedy_agreement(lambda ids: outputs(ids)[0], texts)["greedy"]
    layer.module.load_state_dict(exit_weights(path))
    after = greedy_agreement(lambda ids: outputs(ids)[0], texts)["greedy"]
    assert before is not None
    assert after is not None
    assert after > before + 0.1
    assert description.figures["held_out_agreement"]["greedy"] is not None
    assert not (tmp_path / "training").exists()


def test_a_resumed_run_ends_with_the_same_weights(folder: Path, corpus: Path, tmp_path: Path) -> None:
    def run(name: str, observer: Recorder) -> tuple[Path, Description]:
        target = opened(folder)
        return train_exit(target, TrainingTask(tmp_path / name, TINY, corpus=corpus_of(corpus, target)), observer)

    straight = run("straight", Recorder())
    for observer in (Recorder(stop_at_batch=0), Recorder(stop_at_batch=1), Recorder(stop_at_step=1), Recorder(stop_at_step=4)):
        with pytest.raises(TrainingStopped):
            run("resumed", observer)
    last = Recorder()
    resumed = run("resumed", last)
    assert not last.generated, "stored text is not generated again"
    assert [progress.step for progress in last.progress] == [5, 6]
    assert resumed[1].figures["loss"] == straight[1].figures["loss"]
    assert resumed[0].read_bytes() == straight[0].read_bytes()


def test_the_state_of_another_run_is_refused(folder: Path, corpus: Path, tmp_path: Path) -> None:
    target = opened(folder)
    task = TrainingTask(tmp_path, TINY, corpus=corpus_of(corpus, target))
    with pytest.raises(TrainingStopped):
        train_exit(target, task, Recorder(stop_at_step=2))
    with pytest.raises(SpecgenError, match=r"another run \(--window: 24, now 25\)"):
        train_exit(opened(folder), replace(task, recipe=replace(TINY, training_length=25)), Recorder())
    before = {"steps": None, "seconds": 90.0, "own_head": True, "corpus": "ab12", "exit": "cd34", "prompts": None}
    now = {"steps": 1, "seconds": None, "own_head": False, "corpus": "ef56", "exit": "cd34", "prompts": "0789"}
    with pytest.raises(SpecgenError) as caught:
        check_same_run(tmp_path / "state", before, now)
    minutes = "--steps: not given, now 1; --minutes: 1.5, now not given; --exit-head: own, now target"
    assert f"({minutes}; --corpus changed; --prompts: not given, now given)" in str(caught.value)


def test_a_budget_in_seconds_leaves_out_suspensions(folder: Path, corpus: Path, tmp_path: Path) -> None:
    """By a simulated clock every step takes one second; then the machine sleeps for an hour within a step."""
    target, layer = parts(folder)
    recipe = replace(TINY, steps=None, seconds=20.0)
    now = 0.0

    class Timed(ExitTraining):
        def advance(self) -> tuple[float, float, float]:
            nonlocal now
            now += 3600.0 if self.step == 4 else 1.0
            return super().advance()

    training = Timed(target.model, 1, layer, TrainingBatches(corpus_of(corpus, target), [], recipe))
    progress = training.run(tmp_path / "state.safetensors", {}, Recorder(), lambda: now)
    assert 10 <= progress.step < 20
    assert 20 <= progress.seconds < 22


@pytest.mark.parametrize("backend", every(2, BACKENDS))
def test_only_the_first_layer_of_the_target_stays_in_memory(folder: Path, corpus: Path, tmp_path: Path, backend: str) -> None:
    target = opened(folder, backend)
    model: Any = target.model
    layers, head = (model.layers, model.parts.head) if backend == "native" else (model.module.model.layers, model.module.lm_head)
    kept, freed = ref(layers[0]), [*map(ref, layers[1:]), ref(head)]
    del layers, head
    train_exit(target, TrainingTask(tmp_path, replace(TINY, steps=2), corpus=corpus_of(corpus, target)), Recorder())
    assert kept() is not None
    assert [weight() for weight in freed] == [None] * 3


def test_a_loss_that_is_not_finite_ends_the_run(folder: Path, corpus: Path, tmp_path: Path) -> None:
    target = opened(folder)
    recipe = replace(TINY, steps=40, learning_rate=1e30)
    with pytest.raises(RunError, match="learning-rate"):
        train_exit(target, TrainingTask(tmp_path, recipe, corpus=corpus_of(corpus, target)), Recorder())


def test_a_corpus_is_plain_text_or_json_lines(tmp_path: Path) -> None:
    encode: Any = lambda text: list(text.encode())  # noqa: E731
    (tmp_path / "a.txt").write_text("one two\nthree\n" * 5000)
    assert read_corpus(tmp_path / "a.txt", encode).tokens == 14 * 5000
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "twelve", "id": 1}\n')
    texts = read_corpus(tmp_path / "a.jsonl", encode)
    assert texts.tokens == 9
    samples = {bytes(texts.sample(random.Random(seed), 4)).decode() for seed in range(60)}
    assert samples == {"one", "twel", "welv", "elve"}
    assert texts.sample(random.Random(0), 9, parts=[Part.HELD_OUT]), "two documents are too few to hold one out"
    assert not texts.is_split
    for content in ("{", '{"prompt": "x"}', '{"text": ""}'):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(SpecgenError, match="line 1: not a JSON object with a text"):
            read_corpus(tmp_path / "bad.jsonl", encode)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SpecgenError, match="not UTF-8"):
        read_corpus(tmp_path / "bad.txt", encode)
    with pytest.raises(SpecgenError, match="cannot read"):
        read_corpus(tmp_path, encode)


def documents_of(corpus: Corpus, *parts: Part) -> set[int]:
    return {corpus.sample(random.Random(seed), 9, parts=parts)[0] for seed in range(300)}


def test_every_document_has_one_part() -> None:
    """One in eight is held out, two are for the predictor. Equal documents have the same part."""
    found = documents_of(Corpus([[index, index] for index in range(24)]), Part.HELD_OUT)
    assert found == {0, 8, 16}
    repeated = Corpus([[index // 2, index // 2] for index in range(48)])
    assert repeated.is_split
    held_out, predictor, train = (documents_of(repeated, part) for part in (Part.HELD_OUT, Part.PREDICTOR, Part.TRAIN))
    assert held_out == found
    assert predictor == {2, 5, 10, 13, 18, 21}
    assert train == set(range(24)) - held_out - predictor
    assert documents_of(repeated, Part.TRAIN, Part.PREDICTOR) == train | predictor
    few = Corpus([[index % 7, 1] for index in range(24)])
    assert not few.is_split
    assert documents_of(few, Part.HELD_OUT) == set(range(7))


def test_a_sample_is_a_part_of_its_document() -> None:
    texts = [[number * 100 + index for index in range(10 + number)] for number in range(16)]
    corpus = Corpus(texts)
    for seed in range(200):
        found = corpus.sample(random.Random(seed), 6, parts=[Part.PREDICTOR])
        text = texts[found[0] // 100]
        first = text.index(found[0])
        assert text[first : first + 6] == found
        assert corpus.sample(random.Random(seed), 6, from_start=True)[0] % 100 == 0


def test_a_short_text_file_is_cut_into_enough_pieces(corpus: Path, tmp_path: Path) -> None:
    encode: Any = lambda text: list(text.encode())  # noqa: E731
    found = read_corpus(corpus, encode)
    assert found.is_split
    assert found.tokens == corpus.stat().st_size
    (tmp_path / "a.txt").write_text("x\n" * 200)
    assert not read_corpus(tmp_path / "a.txt", encode).is_split


def test_an_exit_layer_trains_on_no_document_of_another_part() -> None:
    """Also if its batches are all from the corpus; a distilled draft, which has no predictor, uses the predictor's documents."""
    corpus = Corpus([[index] * 4 for index in range(24)])
    recipe = replace(TINY, batch_size=8)
    used = {int(token) for step in range(20) for token in TrainingBatches(corpus, [], recipe).batch(step).ids.unique()}
    assert used == documents_of(corpus, Part.TRAIN)
    batches = DistillationBatches(corpus, [], recipe)
    used = {int(token) for step in range(20) for token in batches.batch(step).ids.unique()}
    assert used == documents_of(corpus, Part.TRAIN, Part.PREDICTOR)


def command(folder: Path, corpus: Path, out: Path | None, *more: str) -> list[str]:
    return train_command("eesd", corpus, out, "-t", str(folder), *more)


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=pytest.mark.slow), "transformers"])
def test_the_command_trains_an_exit(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    if backend != "transformers":  # the native decoder does everything: no other copy of the weights is loaded
        monkeypatch.setattr("specgen.engine.transformers.loading.load_module", None)
        monkeypatch.setattr("specgen.engine.transformers.loading.load_module", None)
    result = trained(command(folder, corpus, None, "--steps", "3", "--json", "--backend", backend))
    line = json.loads(result.stdout)
    assert line["type"] == "train"
    out = Path(line["profile"])
    assert out.parent == tmp_path / "pairs"
    assert line["exit_layer"] == str(out / WEIGHTS)
    assert line["figures"]["steps"] == 3
    assert "Training: 100%, step 3" in result.stderr
    description = read_description(out / DESCRIPTION)
    assert description.fingerprint == weights_fingerprint(folder)
    assert description.predictor
    assert load_exit(out, opened(folder)).predictor is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "3", "--minutes", "1"], "both --minutes and --steps"),
        (["--steps", "0"], "--steps is 0"),
        (["--layer", "3"], "after layer 3"),
        (["--layer", "4", "--corpus", "missing.txt"], "after layer 4"),
        (["--exit-layers", "3"], "--exit-layers is 3"),
        (["--self-text", "2"], "--self-text is 2.0"),
        (["--methods", "svip"], "svip has nothing to train"),
        (["--methods", "esd"], "there is no method 'esd'"),
        (["--exit-head", "other"], "--exit-head is 'other'"),
        (["--corpus", "missing.txt"], "cannot read missing.txt"),
        (["--prompts", "missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_options_are_refused(folder: Path, corpus: Path, tmp_path: Path, more: list[str], message: str) -> None:
    assert message in refused(command(folder, corpus, tmp_path, *more))
    assert not any(tmp_path.iterdir()), "nothing is written before the options are known to be right"


@pytest.mark.parametrize("more", [[], ["--prompts", "prompts.jsonl", "--self-text", "0"]])
def test_training_needs_text(
    folder: Path, models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    assert "there is no text to train on" in refused(["tune", "--train", "-t", str(folder), *more])
    gpt2 = save(make_model("gpt2"), models_folder / "no llama")
    assert "built as Llama is, and gpt2 is not" in refused(["tune", "--train", "-t", gpt2, *more])


@pytest.mark.slow
def test_the_bundled_pair_has_its_own_corpus(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    named = ["--prompts", str(tmp_path / "prompts.jsonl"), "--self-text", "0", "--out", str(tmp_path / "out")]
    sizes = ["--steps", "1", "--batch-size", "1", "--window", "16", "--device", "cpu", "--dtype", "float32"]
    trained(["tune", "--train", *named, *sizes])
    assert not list((tmp_path / "out").glob("training/*"))


def test_a_full_disk_is_reported_and_the_run_resumes(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    arguments = command(folder, corpus, tmp_path / "out", "--steps", "2", "-q")
    monkeypatch.setattr("specgen.train.exit_training.save_exit", full)
    result = invoke(arguments)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    monkeypatch.undo()
    result = trained(arguments)
    assert result.stdout.strip() == str(tmp_path / "out" / WEIGHTS)
    assert result.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
@pytest.mark.slow
def test_an_interrupted_process_can_be_resumed(folder: Path, corpus: Path, tmp_path: Path) -> None:
    def started(name: str) -> subprocess.Popen[str]:
        arguments = command(folder, corpus, tmp_path / name, "--steps", "300", "--self-text", "0.01")
        return subprocess.Popen(
            [sys.executable, "-m", "specgen", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    process = started("out")
    lines: list[str] = []
    assert process.stderr is not None
    while not any(line.startswith("Training:") for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1], lines  # the process ended before it trained
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "the same command resumes from here" in err
    assert (tmp_path / "out" / "training" / "state.safetensors").is_file()
    assert not (tmp_path / "out" / WEIGHTS).exists()
    for name in ("out", "straight"):
        process = started(name)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / name / WEIGHTS)
        assert ("resuming at step" in err) == (name == "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "straight" / WEIGHTS).read_bytes()
