"""Distillation of a draft model: the loss, the batches, the loop, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from families import BACKENDS, LETTERS, make_model, make_tokenizer, save
from specgen.train.generated_text import (
    GeneratedText,
    generate_texts,
    load_batches,
    read_texts,
    save_batch,
    top_k_log_probs,
)
from specgen.train.text_generation import Purpose, TextGeneration
from specgen.train.training_loop import greedy_agreement
from specgen.train.training_task import TrainingStopped, TrainingTask
from training_helpers import TINY, Recorder, corpus_of, opened, refused, train_command, trained

import specgen
from specgen.engine.fingerprint import weights_fingerprint
from specgen.train.corpus import CYCLE, Part
from specgen.train.distillation import DESCRIPTION, DistillationBatches, DraftTraining, distill
from specgen.train.divergence import TOP_K, divergence
from specgen.train.packing import IGNORED

ONLY_TAUGHT = replace(TINY, generated_share=1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and an unrelated draft."""
    made, tokenizer = tmp_path_factory.mktemp("distilling"), make_tokenizer(LETTERS)
    models = {"target": make_model("llama"), "draft": make_model("llama", seed=7)}
    return tuple(Path(save(model, made / role, tokenizer)) for role, model in models.items())  # type: ignore[return-value]


def test_the_divergence_is_over_the_top_k_tokens_and_the_rest() -> None:
    torch.manual_seed(0)
    target, draft = (3 * torch.randn(5, 20) for _ in range(2))
    log_probs = target.log_softmax(dim=-1)
    full = F.kl_div(draft.log_softmax(dim=-1), log_probs, log_target=True, reduction="none").sum(dim=-1)
    top = log_probs.topk(20)
    torch.testing.assert_close(divergence(draft, top.indices, top.values), full)
    top = log_probs.topk(4)
    q = draft.softmax(dim=-1).gather(-1, top.indices)
    q, p = (torch.cat((part, 1 - part.sum(dim=-1, keepdim=True)), dim=-1) for part in (q, top.values.exp()))
    found = divergence(draft, top.indices, top.values)
    torch.testing.assert_close(found, (p * (p / q).log()).sum(dim=-1), rtol=1e-4, atol=1e-5)
    assert (found <= full + 1e-5).all()


def test_a_confident_draft_has_a_gradient() -> None:
    draft = torch.tensor([[60.0, 0.0, 0.0, 0.0]], requires_grad=True)
    divergence(draft, torch.tensor([[1, 0]]), torch.tensor([[0.7, 0.2]]).log()).sum().backward()
    assert draft.grad is not None
    assert draft.grad.isfinite().all()
    assert draft.grad[0, 0] > 0.5 > -0.5 > draft.grad[0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_targets_top_k_probabilities_are_stored(folders: tuple[Path, Path], tmp_path: Path, backend: str) -> None:
    target = opened(folders[0], backend)
    texts = generate_texts(target, [[5, 9], [7, 8, 3]], 20, greedy=True, seed=0, parts=[Part.TRAIN] * 2, keep_top_k=True)
    save_batch(tmp_path, 0, texts)
    for text in load_batches(tmp_path)[0]:
        assert text.top_k_ids is not None
        assert text.top_k_log_probs is not None
        log_probs = target.transformers_module(input_ids=text.ids[None]).logits[0].log_softmax(dim=-1)
        torch.testing.assert_close(text.top_k_log_probs, log_probs.gather(-1, text.top_k_ids.long()), atol=1e-4, rtol=1e-4)
        assert torch.equal(text.top1, log_probs.argmax(dim=-1))
        assert text.top_k_ids.shape == (len(text.ids), TOP_K)
        assert (text.top_k_log_probs.diff(dim=-1) <= 0).all()


def test_corpus_text_is_read_in_turn_with_generation(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    target = opened(folders[0])
    task = TrainingTask(tmp_path, ONLY_TAUGHT, corpus=corpus_of(corpus, target))
    texts = TextGeneration(target, task, {}, Recorder(), purpose=Purpose.DRAFT).run()
    assert [text.greedy for text in texts[:128]] == [True] * 64 + [False] * 64
    read = texts[128:]
    assert len(read) == 256
    assert all(text.prompt_length == len(text.ids) and text.part == Part.TRAIN for text in read)
    assert len({tuple(text.ids.tolist()) for text in read}) > 10
    for text in read[:5]:
        assert text.top_k_ids is not None
        assert torch.equal(text.top_k_ids, top_k_log_probs(target.model, text.ids)[0])
    # Greedy agreement is measured on generated tokens, and read text has none.
    assert greedy_agreement(lambda ids: torch.zeros(len(ids), 96), read) == {"greedy": None, "sampled": None}


def test_teacher_references_point_to_the_probabilities_of_their_token(folders: tuple[Path, Path], corpus: Path) -> None:
    target = opened(folders[0])
    prompts = [[5, 9, token] for token in range(3, 11)]
    texts = generate_texts(target, prompts, 20, greedy=False, seed=1, parts=CYCLE, keep_top_k=True)
    batches = DistillationBatches(corpus_of(corpus, target), texts, replace(TINY, batch_size=6))
    batch = batches.batch(3)
    assert 0.4 < (batch.teacher != IGNORED).float().mean() < 0.6
    for ids, teacher, segments in zip(batch.ids, batch.teacher, batch.segments, strict=True):
        for segment in segments.unique():
            references = teacher[segments == segment]
            if references[0] != IGNORED:
                top_k_ids, log_probs = top_k_log_probs(target.model, ids[segments == segment])
                assert torch.equal(batches.top_k_ids[references], top_k_ids)
                torch.testing.assert_close(batches.top_k_log_probs[references], log_probs, atol=1e-4, rtol=1e-4)


def test_gradients_do_not_depend_on_the_piece_size(
    folders: tuple[Path, Path], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For text with and without the target's probabilities, in pieces of five tokens and in one piece."""
    target = opened(folders[0])
    texts, read = corpus_of(corpus, target), read_texts(target, [[5, 9, 7, 3, 8], [4, 4, 6]])
    results = []
    for logits in (5 * 96, 1 << 18):
        monkeypatch.setattr("specgen.train.distillation._CPU_LOGITS", logits)
        monkeypatch.setattr("specgen.train.distillation._MIN_PIECE", 1)
        training = DraftTraining(opened(folders[1]), DistillationBatches(texts, read, TINY))
        batch = training.batches.batch(0)
        labelled = int((batch.labels != IGNORED).sum())
        sums = training.backward(batch, labelled)
        assert 0 < sums[2] < labelled
        results.append([sums, *(weight.grad for weight in training.trained.values())])
    for pieces, whole in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_distillation_raises_greedy_agreement(
    folders: tuple[Path, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    target, draft = opened(folders[0], backend), opened(folders[1], "transformers")
    if backend == "native":  # the target runs natively, and its weights are not loaded a second time
        monkeypatch.setattr("specgen.engine.transformers.loading.load_module", None)
    fingerprint = weights_fingerprint(folders[1])
    observer = Recorder()
    recipe = replace(ONLY_TAUGHT, steps=150, learning_rate=3e-3, batch_size=8)
    task = TrainingTask(tmp_path / "out", recipe, corpus=corpus_of(corpus, target))
    figures = distill(target, draft, task, observer, torch.bfloat16)
    assert observer.progress[-1].loss < observer.progress[0].loss - 0.5
    assert figures["agreement"]["greedy"] > figures["agreement_before"]["greedy"] + 0.2
    assert weights_fingerprint(folders[1]) == fingerprint
    old, new = ({path.name for path in folder.iterdir() if path.suffix != ".jinja"} for folder in (folders[1], task.out))
    assert new == old | {DESCRIPTION}
    with specgen.load(str(folders[0]), str(task.out), device="cpu", dtype="auto") as pair:
        assert pair.draft is not None
        assert json.loads((task.out / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_figures_are_those_of_the_saved_weights(
    folders: tuple[Path, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are saved in bfloat16 are rounded before they are measured."""
    measured: list[tuple[torch.Tensor, torch.Tensor]] = []

    def recording(logits_of: Any, texts: list[GeneratedText]) -> dict[str, float | None]:
        measured[:] = [(text.ids, logits_of(text.ids)) for text in texts]
        return greedy_agreement(logits_of, texts)

    monkeypatch.setattr("specgen.train.distillation.greedy_agreement", recording)
    target, draft = opened(folders[0]), opened(folders[1], "transformers")
    task = TrainingTask(tmp_path, replace(ONLY_TAUGHT, learning_rate=3e-3), corpus=corpus_of(corpus, target))
    distill(target, draft, task, Recorder(), torch.bfloat16)
    saved = opened(tmp_path)
    assert measured
    for ids, logits in measured:
        torch.testing.assert_close(saved.model.reference_logits(ids.tolist()), logits, atol=1e-4, rtol=1e-4)


def test_a_resumed_run_ends_with_the_same_weights(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    def run(name: str, observer: Recorder) -> Path:
        target, draft = opened(folders[0]), opened(folders[1], "transformers")
        task = TrainingTask(tmp_path / name, ONLY_TAUGHT, corpus=corpus_of(corpus, target))
        distill(target, draft, task, observer)
        return task.out

    straight = run("straight", Recorder())
    for observer in (Recorder(stop_at_batch=1), Recorder(stop_at_batch=2), Recorder(stop_at_step=3)):
        with pytest.raises(TrainingStopped):
            run("resumed", observer)
    last = Recorder()
    resumed = run("resumed", last)
    assert "resuming at step 3" in last.messages
    assert (straight / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    assert not (resumed / "training").exists()


def command(folders: tuple[Path, Path], corpus: Path, out: Path | None, *more: str) -> list[str]:
    return train_command("sd", corpus, out, "-t", str(folders[0]), "-d", str(folders[1]), *more)


def test_the_command_distils_a_draft(
    folders: tuple[Path, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    monkeypatch.setattr("specgen.engine.transformers.loading.load_module", None)  # no model is loaded twice
    own = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    line = json.loads(trained(command(folders, corpus, None, "--steps", "3", "--json", "--backend", "native")).stdout)
    assert line["type"] == "train"
    out = Path(line["draft"])
    assert (out.name, out.parent.parent) == ("distilled", tmp_path / "pairs")
    assert line["figures"]["steps"] == 3
    assert 0 <= line["figures"]["agreement_before"]["greedy"] <= 1
    assert (out / "model.safetensors").read_bytes() != own[folders[1] / "model.safetensors"]
    assert {path: path.read_bytes() for folder in folders for path in folder.iterdir()} == own


@pytest.mark.parametrize(("after", "recommended"), [(0.95, True), (0.9, False), (0.7, False)])
def test_only_a_draft_that_agrees_more_is_recommended(
    folders: tuple[Path, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, recommended: bool
) -> None:
    shares = iter([{"greedy": 0.9, "sampled": 0.5}, {"greedy": after, "sampled": 0.6}])
    monkeypatch.setattr("specgen.train.distillation.greedy_agreement", lambda *_: next(shares))
    result = trained(command(folders, corpus, tmp_path / "out", "--steps", "1"))
    assert f"{after:.1%} of the greedy tokens (before: 90.0%)" in result.stderr
    assert (f"Use it: --draft {tmp_path / 'out'}" in result.stderr) == recommended
    assert ("did not rise: keep the draft you have" in result.stderr) == (not recommended)
    assert result.stdout.strip() == str(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layer", "2"], "--layer cannot be combined with --train --methods sd, which trains a draft model"),
        (["--methods", "sd,eesd"], "cannot be trained in one run"),
        (["--methods", "lookup"], "lookup has nothing to train"),
        (["--self-text", "0"], "--self-text is 0"),
        (["--prompts", "prompts.txt"], "--self-text 0.5"),
    ],
)
def test_wrong_options_are_refused(
    folders: tuple[Path, Path], corpus: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    assert message in refused(command(folders, corpus, tmp_path, *more))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("index", [0, 1])
def test_no_model_is_overwritten(folders: tuple[Path, Path], corpus: Path, index: int) -> None:
    before = sorted(folders[index].iterdir())
    assert "the folder of one of the models" in refused(command(folders, corpus, folders[index], "--steps", "1"))
    assert sorted(folders[index].iterdir()) == before


def test_distillation_needs_a_draft_model(folders: tuple[Path, Path], corpus: Path, tmp_path: Path) -> None:
    assert "there is no draft model to train" in refused(train_command("sd", corpus, tmp_path, "-t", str(folders[0])))
