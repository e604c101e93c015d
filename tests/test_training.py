"""Training an exit layer: the texts, the packing, the loop, what is kept of it, and the command."""

from __future__ import annotations

import gc
import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LETTERS, make_model, make_tokenizer, save
from typer.testing import CliRunner

import specgen.training.exit_training as exits
from specgen.cli.app import app
from specgen.engine.decoder_layers import decoder_of
from specgen.engine.exit_files import DESCRIPTION, WEIGHTS, load_exit, read_description
from specgen.engine.exit_layer import ExitLayer
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.first_layers import FirstLayers
from specgen.engine.model_loading import LoadedModel, ModelSource, load_model, prepare
from specgen.errors import RunError, SpecgenError
from specgen.training.corpus import Texts, read_corpus
from specgen.training.exit_training import ExitTrainingTask, train_exit
from specgen.training.generated_text import GeneratedText, TrainingStopped, continuations, judged
from specgen.training.packing import NOTHING, pack
from specgen.training.predictor_training import train_predictor
from specgen.training.training_loop import Data, ExitTraining, Progress, Recipe, exit_rows, greedy_agreement

CPU = torch.device("cpu")
TINY = Recipe(steps=6, batch=4, window=24)


class Silent:
    """Says nothing, and stops when so many batches are written or so many steps done."""

    def __init__(self, stop_at_batch: int | None = None, stop_at_step: int | None = None) -> None:
        self.stop_at_batch, self.stop_at_step = stop_at_batch, stop_at_step
        self.batches = 0
        self.seen: list[Progress] = []
        self.said: list[str] = []

    def announce(self, what: str) -> None:
        self.said.append(what)

    def writing(self, batches: int, share: float, tokens: int) -> None:
        self.batches = batches

    def training(self, progress: Progress) -> None:
        self.seen.append(progress)

    def stopping(self) -> bool:
        if self.seen:
            return self.seen[-1].step == self.stop_at_step
        return self.batches == self.stop_at_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("training") / "target", make_tokenizer(LETTERS)))


def opened(folder: Path | str) -> LoadedModel:
    return load_model(prepare(ModelSource(str(folder)), lambda _: None), CPU, torch.float32, lambda _: None)


def open_text(corpus: Path, target: LoadedModel) -> Texts:
    return read_corpus(corpus, target.tokenizer.encode_long)


def test_no_packed_text_sees_another(folder: Path) -> None:
    """A text's rows in a packed row are its rows alone."""
    target = opened(folder)
    layer = ExitLayer.of(target.model)
    first = FirstLayers(target.model, 1)
    made = [[5, 9, 7, 3, 11], [4, 8], [30, 31, 32, 33, 34, 35, 36]]
    waiting = iter([*made, *made])

    def draw(rng: random.Random, longest: int) -> tuple[list[int], list[int]]:
        text = next(waiting)[:longest]
        return text, [token + 1 for token in text]

    rows = pack([draw], 18, random.Random(0))
    assert rows.ids[0].tolist() == [*made[0], *made[1], *made[2], *made[0][:4]]
    assert rows.labels[0].tolist()[:8] == [9, 7, 3, 11, NOTHING, 8, NOTHING, 31]
    assert rows.labels[0, -1] == made[0][4]
    assert rows.best[0].tolist() == [token + 1 for token in rows.ids[0].tolist()]
    mask = first.masks.batched(rows.visible(), rows.positions, rows.positions, first.dtype)
    found = layer(*first(rows.ids, rows.positions, mask), mask).logits[0]
    start = 0
    for text in made:
        alone, _ = exit_rows(first, layer, torch.tensor(text))
        torch.testing.assert_close(found[start : start + len(text)], alone, atol=1e-5, rtol=1e-4)
        start += len(text)


def test_gradients_are_the_same_in_pieces(folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for logits, together in ((1 << 26, 1 << 20), (1 << 26, 5), (96 * 7, 1 << 20)):  # all at once; 5 tokens; a row, and 7 tokens
        monkeypatch.setattr("specgen.training.training_loop._LOGITS", logits)
        monkeypatch.setattr("specgen.training.training_loop._TOGETHER", together)
        target = opened(folder)
        layer = ExitLayer.of(target.model)
        first = FirstLayers(target.model, 1)
        training = ExitTraining(first, layer, Data(open_text(corpus, target), [], TINY), TINY)
        training._advance()
        found.append({name: weight.detach().clone() for name, weight in layer.named_parameters()})
    for name, weight in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(weight, other[name], atol=2e-6, rtol=1e-4)


def test_training_lowers_the_loss_and_brings_agreement(folder: Path, corpus: Path, tmp_path: Path) -> None:
    target = opened(folder)
    watcher = Silent()
    recipe = replace(TINY, steps=150, learning_rate=3e-3, batch=8)
    outcome = train_exit(target, ExitTrainingTask(tmp_path, recipe, open_text=open_text(corpus, target)), watcher)
    losses = [progress.loss for progress in watcher.seen]
    assert losses[-1] < losses[0] - 0.5
    fresh = opened(folder)
    ids = [torch.tensor(text) for text in continuations(fresh, [[5, 9, position] for position in range(3, 40)], 24, greedy=True)]
    texts = [GeneratedText(text, judged(fresh.model, text)[0], None, 3, True, True) for text in ids]
    trained, untrained = load_exit(outcome.path, fresh).layer, ExitLayer.of(fresh.model)
    first = FirstLayers(fresh.model, 1)
    before, after = (
        greedy_agreement(lambda ids, layer=layer: exit_rows(first, layer, ids)[0], texts)["greedy"]
        for layer in (untrained, trained)
    )
    assert before is not None
    assert after is not None
    assert after > before + 0.2
    assert outcome.agreement is not None
    assert not (tmp_path / "training").exists()


def test_an_interrupted_run_ends_with_the_same_weights(folder: Path, corpus: Path, tmp_path: Path) -> None:
    def job(name: str) -> tuple[LoadedModel, ExitTrainingTask]:
        target = opened(folder)
        return target, ExitTrainingTask(tmp_path / name, TINY, open_text=open_text(corpus, target))

    straight = train_exit(*job("straight"), Silent())
    for watcher in (Silent(stop_at_batch=0), Silent(stop_at_batch=1), Silent(stop_at_step=1), Silent(stop_at_step=4)):
        with pytest.raises(TrainingStopped):
            train_exit(*job("resumed"), watcher)
    last = Silent()
    resumed = train_exit(*job("resumed"), last)
    assert last.batches == 0  # what was written is not written again,
    assert [progress.step for progress in last.seen] == [5, 6]  # and what was trained is not trained again
    assert resumed.progress.loss == straight.progress.loss
    assert resumed.path.read_bytes() == straight.path.read_bytes()


def test_another_runs_state_is_refused(folder: Path, corpus: Path, tmp_path: Path) -> None:
    target = opened(folder)
    job = ExitTrainingTask(tmp_path, TINY, open_text=open_text(corpus, target))
    with pytest.raises(TrainingStopped):
        train_exit(target, job, Silent(stop_at_step=2))
    with pytest.raises(SpecgenError, match=r"another run's \(steps: 6, now 7\)"):
        train_exit(opened(folder), replace(job, recipe=replace(TINY, steps=7)), Silent())


def test_only_the_first_layers_and_the_exit_are_held(folder: Path, corpus: Path, tmp_path: Path) -> None:
    target = opened(folder)
    model = target.model
    per_layer = sum(weight.numel() for weight in decoder_of(model).layers[0].parameters())
    table, norm = model.lm_head.weight.numel(), 32
    gc.collect()
    before = {id(weight) for weight in _parameters()} - {id(weight) for weight in model.parameters()}
    counts = []

    class Counting(Silent):
        def training(self, progress: Progress) -> None:
            gc.collect()
            counts.append(sum(weight.numel() for weight in _parameters() if id(weight) not in before))

    outcome = train_exit(
        target, ExitTrainingTask(tmp_path, replace(TINY, steps=2), open_text=open_text(corpus, target)), Counting()
    )
    # Embedding and layer 1 of the target; a layer, norm and head of the exit's.
    assert counts == [table + per_layer + per_layer + norm + table] * 2
    assert outcome.parameters_held == counts[0]


def _parameters() -> list[torch.nn.Parameter]:
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Parameter)]


@pytest.mark.parametrize("whose", ["draft", "target"])
def test_a_predictor_learns_where_the_exit_is_right(folder: Path, whose: str) -> None:
    """Whether it is right is planted in a row: the exit's own at the drafted place, or the target's before a draft of one."""
    target = opened(folder)
    layer = ExitLayer.of(target.model)
    first = FirstLayers(target.model, 1)
    texts = []
    for position in range(60):
        ids = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(position))
        logits, hidden = exit_rows(first, layer, ids)
        rows = torch.randn(30, 32, generator=torch.Generator().manual_seed(position))
        sign = hidden[:, 0] if whose == "draft" else rows[:, 0].roll(1)
        best = logits.argmax(dim=-1) + (sign < 0)
        texts.append(GeneratedText(ids, best, rows.bfloat16(), 1, False, position % 8 == 0))
    fitted = train_predictor(first, layer, texts, seed=0)
    assert fitted is not None
    predictor, fit = fitted
    if whose == "draft":
        assert fit.ranking > 0.9
        assert fit.loss < fit.base_loss
    else:  # it tells of the first place alone
        by_place = predictor.target_weights[:, 0].tolist()
        assert by_place[0] > 2 * max(map(abs, by_place[1:]))


def test_a_loss_that_is_no_number_ends_the_run(folder: Path, corpus: Path, tmp_path: Path) -> None:
    target = opened(folder)
    with pytest.raises(RunError, match="learning-rate"):
        train_exit(
            target,
            ExitTrainingTask(tmp_path, replace(TINY, steps=40, learning_rate=1e30), open_text=open_text(corpus, target)),
            Silent(),
        )


def test_a_corpus_is_read_in_both_forms(tmp_path: Path) -> None:
    encode: Any = lambda text: list(text.encode())  # noqa: E731
    (tmp_path / "a.txt").write_text("one two\nthree\n" * 5000)
    assert read_corpus(tmp_path / "a.txt", encode).tokens == 14 * 5000
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "twelve", "id": 1}\n')
    texts = read_corpus(tmp_path / "a.jsonl", encode)
    assert texts.tokens == 9
    drawn = {bytes(texts.draw(random.Random(seed), 4)).decode() for seed in range(60)}
    assert drawn == {"one", "twel", "welv", "elve"}
    many = Texts([[position, position] for position in range(24)])
    assert {many.draw(random.Random(seed), 9, apart=True)[0] for seed in range(200)} == {0, 8, 16}
    assert {many.draw(random.Random(seed), 9, apart=False)[0] for seed in range(400)} == set(range(24)) - {0, 8, 16}
    assert texts.draw(random.Random(0), 9, apart=True)  # too few to keep one apart
    for content, message in (("{", "line 1: no JSON"), ('{"prompt": "x"}', "no 'text'"), ('{"text": ""}', "is no text")):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(SpecgenError, match=message):
            read_corpus(tmp_path / "bad.jsonl", encode)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SpecgenError, match="not UTF-8"):
        read_corpus(tmp_path / "bad.txt", encode)
    with pytest.raises(SpecgenError, match="cannot read"):
        read_corpus(tmp_path, encode)


def options(folder: Path, corpus: Path, out: Path, *more: str) -> list[str]:
    named = ["-t", str(folder), "--corpus", str(corpus), "--out", str(out), "--window", "24", "--batch-size", "4"]
    return ["tune", "--train", "--methods", "eesd", "--device", "cpu", "--dtype", "float32", *named, *more]


def test_the_command_trains_and_says_so(folder: Path, corpus: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, options(folder, corpus, tmp_path / "out", "--steps", "3", "--json"))
    assert result.exit_code == 0, result.stderr
    line = json.loads(result.stdout)
    assert line["type"] == "train"
    assert line["exit_layer"] == str(tmp_path / "out" / WEIGHTS)
    assert line["figures"]["steps"] == 3
    assert "Training: 100%, step 3" in result.stderr
    described = read_description(tmp_path / "out" / DESCRIPTION)
    assert described.fingerprint == weights_fingerprint(folder)
    assert described.predictor
    assert load_exit(tmp_path / "out", opened(folder)).predictor is not None


def test_the_command_writes_to_the_users_data_folder(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    given = options(folder, corpus, tmp_path, "--steps", "1", "-q")
    del given[given.index("--out") : given.index("--out") + 2]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()).parent.parent == tmp_path / "pairs"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "3", "--minutes", "1"], "both --minutes and --steps"),
        (["--steps", "0"], "--steps is 0"),
        (["--layer", "3"], "the exit is after layer 3"),
        (["--layer", "4", "--corpus", "missing.txt"], "the exit is after layer 4"),
        (["--exit-layers", "3"], "--exit-layers is 3"),
        (["--self-text", "2"], "--self-text is 2.0"),
        (["--methods", "svip"], "svip has nothing to train"),
        (["--methods", "esd"], "there is no method 'esd'"),
        (["--head", "other"], "--head is 'other'"),
        (["--corpus", "missing.txt"], "cannot read missing.txt"),
        (["--prompts", "missing.yaml"], "missing.yaml"),
    ],
)
def test_mistakes_get_one_line(folder: Path, corpus: Path, tmp_path: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(app, options(folder, corpus, tmp_path, *more))
    assert result.exit_code == 2
    said = result.stderr.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert message in said[0]
    assert not any(tmp_path.iterdir()), "nothing is made before it is known that there is something to train"


@pytest.mark.parametrize("more", [[], ["--prompts", "prompts.jsonl", "--self-text", "0"]])
def test_without_text_it_asks_for_some(folder: Path, models_folder: Path, more: list[str]) -> None:
    result = CliRunner().invoke(app, ["tune", "--train", "-t", str(folder), *more])
    assert result.exit_code == 2
    assert "there is no text to train on" in result.stderr
    other = save(make_model("gpt2"), models_folder / "no llama")
    result = CliRunner().invoke(app, ["tune", "--train", "-t", other, *more])
    assert result.exit_code == 2
    assert "built as Llama is, and gpt2 is not" in result.stderr


def test_the_bundled_pair_brings_its_corpus(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    named = ["--prompts", str(tmp_path / "prompts.jsonl"), "--self-text", "0", "--out", str(tmp_path / "out")]
    more = ["--steps", "1", "--batch-size", "1", "--window", "16", "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["tune", "--train", *named, *more])
    assert result.exit_code == 0, result.stderr
    assert not list((tmp_path / "out").glob("training/*"))


def test_a_full_disk_is_one_line(folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exits, "save_exit", full)
    result = CliRunner().invoke(app, options(folder, corpus, tmp_path / "out", "--steps", "2", "-q"))
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    # What was trained is still there: the same command ends it.
    monkeypatch.undo()
    assert CliRunner().invoke(app, options(folder, corpus, tmp_path / "out", "--steps", "2", "-q")).exit_code == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
@pytest.mark.slow
def test_a_process_that_is_interrupted_goes_on(folder: Path, corpus: Path, tmp_path: Path) -> None:
    def started(name: str) -> subprocess.Popen[str]:
        given = options(folder, corpus, tmp_path / name, "--steps", "300", "--self-text", "0.01")
        return subprocess.Popen(
            [sys.executable, "-m", "specgen", *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    process = started("out")
    lines: list[str] = []
    assert process.stderr is not None
    while not any(line.startswith("Training:") for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1], lines  # it ended before it trained
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "the same command goes on from here" in err
    assert (tmp_path / "out" / "training" / "state.safetensors").is_file()
    assert not (tmp_path / "out" / WEIGHTS).exists()
    for name in ("out", "straight"):
        process = started(name)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / name / WEIGHTS)
        assert ("going on from step" in err) == (name == "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "straight" / WEIGHTS).read_bytes()
