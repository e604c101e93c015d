"""Distilling a draft model: the loss, the lessons, the loop, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from families import LETTERS, make_model, make_tokenizer, save
from test_training import TINY, Silent, open_text, opened
from typer.testing import CliRunner

import specgen
from specgen.cli.app import app
from specgen.engine.fingerprint import weights_fingerprint
from specgen.training.distillation import DESCRIPTION, DistillationData, DraftTraining, distill, divergence
from specgen.training.generated_text import LIKELY, GeneratedTexts, TrainingStopped, read_batch, weighed, write_batch
from specgen.training.packing import NOTHING
from specgen.training.text_generation import TextGeneration, TrainingTask
from specgen.training.training_loop import greedy_agreement

OWN_TEXT = replace(TINY, self_text=1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that knows nothing of it."""
    made, tokenizer = tmp_path_factory.mktemp("distilling"), make_tokenizer(LETTERS)
    models = {"target": make_model("llama"), "draft": make_model("llama", seed=7)}
    return tuple(Path(save(model, made / role, tokenizer)) for role, model in models.items())  # type: ignore[return-value]


def test_the_divergence_is_over_the_likeliest_and_the_rest() -> None:
    torch.manual_seed(0)
    target, draft = (3 * torch.randn(5, 20) for _ in range(2))
    logs = target.log_softmax(dim=-1)
    whole = F.kl_div(draft.log_softmax(dim=-1), logs, log_target=True, reduction="none").sum(dim=-1)
    top = logs.topk(20)
    torch.testing.assert_close(divergence(draft, top.indices, top.values), whole)
    top = logs.topk(4)
    ours = draft.softmax(dim=-1).gather(-1, top.indices)
    ours, theirs = (torch.cat((part, 1 - part.sum(dim=-1, keepdim=True)), dim=-1) for part in (ours, top.values.exp()))
    found = divergence(draft, top.indices, top.values)
    torch.testing.assert_close(found, (theirs * (theirs / ours).log()).sum(dim=-1), rtol=1e-4, atol=1e-5)
    assert (found <= whole + 1e-5).all()


def test_a_sure_draft_has_a_gradient() -> None:
    draft = torch.tensor([[60.0, 0.0, 0.0, 0.0]], requires_grad=True)
    divergence(draft, torch.tensor([[1, 0]]), torch.tensor([[0.7, 0.2]]).log()).sum().backward()
    assert draft.grad is not None
    assert draft.grad.isfinite().all()
    assert draft.grad[0, 0] > 0.5 > -0.5 > draft.grad[0, 1]


def test_what_is_kept_is_the_target_s_word(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target = opened(folders[0])
    texts = write_batch(
        target, [[5, 9], [7, 8, 3]], 20, greedy=True, seed=0, held_out=[False, False], keep_rows=False, keep_likely=True
    )
    GeneratedTexts(tmp_path).keep(0, texts)
    for text in GeneratedTexts(tmp_path).read():
        assert text.likely is not None
        assert text.logs is not None
        logs = target.model(input_ids=text.ids[None]).logits[0].log_softmax(dim=-1)
        torch.testing.assert_close(text.logs, logs.gather(-1, text.likely.long()))
        assert torch.equal(text.best, logs.argmax(dim=-1))
        assert text.likely.shape == (len(text.ids), LIKELY)
        assert (text.logs.diff(dim=-1) <= 0).all()


def test_open_text_is_read_in_turn_with_what_is_written(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    target = opened(folders[0])
    texts = open_text(corpus, target)
    writing = TextGeneration(
        target, TrainingTask(tmp_path, OWN_TEXT, open_text=texts), {}, tmp_path / "training", Silent(), keep_likely=True
    )
    writing.run()
    found = writing.kept.read()
    assert [text.greedy for text in found[:128]] == [True] * 64 + [False] * 64
    read = found[128:]
    assert len(read) == 256
    assert all(text.prompt == len(text.ids) and not text.held_out for text in read)
    assert len({tuple(text.ids.tolist()) for text in read}) > 10
    for text in read[:5]:
        assert text.likely is not None
        assert torch.equal(text.likely, weighed(target.model, text.ids)[0])
    # Nobody wrote them: they have no say in how often the draft is right.
    assert greedy_agreement(lambda ids: torch.zeros(len(ids), 96), read) == {"greedy": None, "sampled": None}


def test_a_lesson_stands_beside_its_token(folders: tuple[Path, Path], corpus: Path) -> None:
    target = opened(folders[0])
    prompts = [[5, 9, position] for position in range(3, 11)]
    texts = write_batch(
        target, prompts, 20, greedy=False, seed=1, held_out=[True] + [False] * 7, keep_rows=False, keep_likely=True
    )
    lessons = DistillationData(open_text(corpus, target), texts, replace(TINY, batch=6))
    rows = lessons.batch(3)
    taught = rows.best != NOTHING
    assert 0.4 < taught.float().mean() < 0.6
    for row, positions in zip(rows.ids, rows.best, strict=True):
        starts = [
            i
            for i, position in enumerate(positions.tolist())
            if position != NOTHING and (i == 0 or positions[i - 1] != position - 1)
        ]
        for start in starts:
            end = start + 1
            while end < len(row) and positions[end] == positions[end - 1] + 1:
                end += 1
            likely, logs = weighed(target.model, row[start:end])
            assert torch.equal(lessons.likely[positions[start:end]], likely)
            torch.testing.assert_close(lessons.logs[positions[start:end]], logs, atol=1e-4, rtol=1e-4)


def test_judged_in_pieces_it_is_the_same(folders: tuple[Path, Path], corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that the target read, text of its own and open text as it is, in pieces of five rows and all at once."""
    target = opened(folders[0])
    texts = open_text(corpus, target)
    own = [*read_batch(target, [[5, 9, 7, 3, 8], [4, 4, 6]])]
    recipe = replace(TINY, batch=4)
    found = []
    for numbers in (5 * 96, 1 << 18):
        monkeypatch.setattr("specgen.training.distillation._CACHED", numbers)
        monkeypatch.setattr("specgen.training.distillation._FEWEST", 1)
        training = DraftTraining(opened(folders[1]), DistillationData(texts, own, recipe), recipe)
        rows = training._data.batch(0)
        sums = training._backward(rows, int((rows.labels != NOTHING).sum()))
        assert 0 < sums[2] < (rows.labels != NOTHING).sum()
        found.append([sums, *(weight.grad for weight in training._trained.values())])
    for pieces, whole in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)


def test_distilling_brings_agreement(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    target, draft = (opened(folder) for folder in folders)
    before = weights_fingerprint(folders[1])
    watcher = Silent()
    recipe = replace(OWN_TEXT, steps=150, learning_rate=3e-3, batch=8)
    task = TrainingTask(tmp_path / "out", recipe, open_text=open_text(corpus, target))
    found = distill(target, draft, task, watcher, torch.bfloat16)
    assert watcher.seen[-1].loss < watcher.seen[0].loss - 0.5
    assert found.before["greedy"] is not None
    assert found.after["greedy"] is not None
    assert found.after["greedy"] > found.before["greedy"] + 0.2
    assert weights_fingerprint(folders[1]) == before
    assert sorted(path.name for path in found.path.iterdir() if path.suffix != ".jinja") == sorted(
        [path.name for path in folders[1].iterdir() if path.suffix != ".jinja"] + [DESCRIPTION]
    )
    with specgen.load(str(folders[0]), str(found.path), device="cpu", dtype="auto") as pair:
        assert pair.draft is not None
        assert json.loads((found.path / "config.json").read_text())["dtype"] == "bfloat16"


def test_interrupted_and_resumed_is_the_same(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    def run(name: str, watcher: Silent) -> Path:
        target, draft = (opened(folder) for folder in folders)
        return distill(target, draft, TrainingTask(tmp_path / name, OWN_TEXT, open_text=open_text(corpus, target)), watcher).path

    straight = run("straight", Silent())
    for watcher in (Silent(stop_at_batch=1), Silent(stop_at_batch=2), Silent(stop_at_step=3)):
        with pytest.raises(TrainingStopped):
            run("resumed", watcher)
    last = Silent()
    resumed = run("resumed", last)
    assert "going on from step 3" in last.said
    assert (straight / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    assert not (resumed / "training").exists()


def options(folders: tuple[Path, Path], corpus: Path, out: Path, *more: str) -> list[str]:
    named = ["-t", str(folders[0]), "-d", str(folders[1]), "--corpus", str(corpus), "--out", str(out)]
    sizes = ["--window", "24", "--batch-size", "4", "--device", "cpu", "--dtype", "float32"]
    return ["tune", "--train", "--methods", "sd", *named, *sizes, *more]


def test_the_command_distils_and_says_so(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, options(folders, corpus, tmp_path / "out", "--steps", "3", "--json"))
    assert result.exit_code == 0, result.stderr
    line = json.loads(result.stdout)
    assert line["type"] == "train"
    assert line["draft"] == str(tmp_path / "out")
    assert line["figures"]["steps"] == 3
    assert 0 <= line["figures"]["agreement_before"]["greedy"] <= 1
    assert f"Use it: --draft {tmp_path / 'out'}" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_without_a_folder_it_is_the_pair_s(
    folders: tuple[Path, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    given = options(folders, corpus, tmp_path, "--steps", "1", "-q")
    del given[given.index("--out") : given.index("--out") + 2]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()).name == "distilled"
    assert Path(result.stdout.strip()).parent.parent == tmp_path / "pairs"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layer", "2"], "a draft model has none"),
        (["--methods", "sd,eesd"], "trained in turn"),
        (["--methods", "lookup"], "lookup has nothing to train"),
        (["--self-text", "0"], "--self-text is 0"),
    ],
)
def test_mistakes_get_one_line(folders: tuple[Path, Path], corpus: Path, tmp_path: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(app, options(folders, corpus, tmp_path, *more))
    assert result.exit_code == 2
    said = result.stderr.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    assert not any(tmp_path.iterdir())


def test_a_target_alone_has_no_draft_to_train(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    given = options(folders, corpus, tmp_path)
    del given[given.index("-d") : given.index("-d") + 2]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "there is no draft model to train" in result.stderr


@pytest.mark.parametrize(("position", "role"), [(0, "target"), (1, "draft")])
def test_no_model_is_written_over(folders: tuple[Path, Path], corpus: Path, position: int, role: str) -> None:
    before = sorted(folders[position].iterdir())
    result = CliRunner().invoke(app, options(folders, corpus, folders[position], "--steps", "1"))
    assert result.exit_code == 2
    assert f"the {role}'s own folder" in result.stderr
    assert sorted(folders[position].iterdir()) == before


def test_a_corpus_that_would_not_be_read_is_refused(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('{"prompt": "abc"}\n')
    given = [*options(folders, corpus, tmp_path / "out", "--steps", "1"), "--prompts", str(prompts)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "--self-text 0.5" in result.stderr
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    other = save(make_model("llama", seed=3), tmp_path / "other", make_tokenizer(LETTERS[::-1]))
    given = options((folders[0], Path(other)), corpus, tmp_path / "out")
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "the tokenizers differ" in result.stderr
