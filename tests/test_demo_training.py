"""Training demo models: token stream, the loop with its checkpoints, the command line."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.base.errors import SpecgenError
from specgen.demo.corpus.documents import DOMAIN_SHARES
from specgen.demo.recipe.__main__ import main
from specgen.demo.recipe.hyperparameters import Recipe, Shape, learning_rate_factor
from specgen.demo.recipe.token_stream import TokenStream
from specgen.demo.recipe.tokenizer import load_tokenizer
from specgen.demo.recipe.train import Progress, pick_matmul_dtype, train

TINY = Recipe(Shape(hidden_size=32, layers=1, heads=2), learning_rate=0.02, steps=16, batch_size=4, training_length=48)


@pytest.fixture
def out(tokenizers: Path, tmp_path: Path) -> Path:
    """A pair's folder with a tokenizer and no weights."""
    return shutil.copytree(tokenizers, tmp_path / "pair")


class TestStream:
    def test_only_the_last_document_of_a_sequence_is_cut(self, tokenizers: Path) -> None:
        tokenizer = load_tokenizer(tokenizers / "target")
        sequences = TokenStream(tokenizer, seed=0).batch(20, length=600)
        assert sequences.shape == (20, 601)
        assert sequences.dtype == torch.int64
        assert (sequences[:, 0] == tokenizer.bos_token_id).all()
        assert (sequences != tokenizer.pad_token_id).all()
        cut = 0
        for tokens in sequences.tolist():
            starts = [index for index, token in enumerate(tokens) if token == tokenizer.bos_token_id]
            assert all(tokens[index - 1] == tokenizer.eos_token_id for index in starts[1:])
            cut += len(tokens) - starts[-1] if tokens[-1] != tokenizer.eos_token_id else 0
        assert cut < 0.02 * sequences.numel()

    def test_domains_have_their_shares(self, tokenizers: Path) -> None:
        stream = TokenStream(load_tokenizer(tokenizers / "target"), seed=0)
        stream.batch(100, length=200)
        used = stream.state()["used"]
        assert {domain: tokens / sum(used.values()) for domain, tokens in used.items()} == pytest.approx(DOMAIN_SHARES, abs=0.03)


def interruption(at_step: int) -> Callable[[Progress], None]:
    """A report function that interrupts the run after a step, like Ctrl-C."""

    def report(progress: Progress) -> None:
        if progress.step == at_step:
            raise KeyboardInterrupt

    return report


class TestTraining:
    def test_the_loss_falls(self, out: Path) -> None:
        reports: list[Progress] = []
        train("draft", replace(TINY, steps=40), out, device="cpu", report=reports.append, report_every=8)
        assert [report.step for report in reports] == [8, 16, 24, 32, 40]
        assert reports[-1].budget_spent == 1
        assert reports[-1].tokens == 40 * TINY.batch_size * TINY.training_length
        assert reports[-1].loss < reports[0].loss - 0.5
        assert (out / "draft" / "model.safetensors").is_file()

    def test_interrupted_and_resumed_is_the_same(self, tokenizers: Path, tmp_path: Path) -> None:
        whole, parts = (shutil.copytree(tokenizers, tmp_path / name) for name in ("whole", "parts"))
        train("draft", TINY, whole, device="cpu")
        for step in (7, 12):
            with pytest.raises(KeyboardInterrupt):
                train("draft", TINY, parts, device="cpu", report=interruption(step), report_every=1, checkpoint_every=5)
        torch.manual_seed(random.randrange(1000))  # the process's generator must not matter
        train("draft", TINY, parts, device="cpu", checkpoint_every=5)
        weights = [(path / "draft" / "model.safetensors").read_bytes() for path in (whole, parts)]
        assert weights[0] == weights[1]
        assert sorted(path.name for path in parts.iterdir()) == ["draft", "draft.stable.pt", "target"]

    def test_a_run_can_be_continued_with_a_larger_budget(self, tokenizers: Path, tmp_path: Path) -> None:
        whole, parts = (shutil.copytree(tokenizers, tmp_path / name) for name in ("whole", "parts"))
        longer = replace(TINY, steps=24)
        train("draft", longer, whole, device="cpu")
        train("draft", TINY, parts, device="cpu")
        reports: list[Progress] = []
        train("draft", longer, parts, device="cpu", report=reports.append, report_every=1)
        assert reports[0].step == 13  # the learning rate decays after step 12
        with pytest.raises(SpecgenError, match="budget is already spent: 18 steps"):
            train("draft", TINY, parts, device="cpu")
        weights = [(path / "draft" / "model.safetensors").read_bytes() for path in (whole, parts)]
        assert weights[0] == weights[1]

    @pytest.mark.parametrize(
        ("step", "change", "message"),
        [
            (15, {"steps": 20}, "budget: 16 steps, now 20 steps"),  # during the decay
            (2, {"learning_rate": 0.001}, r"learning_rate: 0\.02, now 0\.001"),
        ],
    )
    def test_a_checkpoint_of_a_different_recipe_is_refused(
        self, out: Path, step: int, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(KeyboardInterrupt):
            train("draft", TINY, out, device="cpu", report=interruption(step), report_every=1, checkpoint_every=1)
        with pytest.raises(SpecgenError, match=message):
            train("draft", replace(TINY, **change), out, device="cpu")

    def test_long_batches_in_the_decay_phase(self) -> None:
        recipe = Recipe(TINY.shape, learning_rate=1e-3, steps=1, batch_size=8, training_length=256)
        assert {recipe.batch_shape(step, decaying=False) for step in range(8)} == {(8, 256)}
        assert [recipe.batch_shape(step, decaying=True) for step in range(4)] == [(2, 1024), (8, 256), (8, 256), (8, 256)]

    def test_matrix_products_use_the_faster_dtype(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for fast in (torch.bfloat16, torch.float32):
            monkeypatch.setattr(
                "specgen.demo.recipe.train._matmul_seconds", lambda dtype, fast=fast: 1.0 if dtype == fast else 2.0
            )
            assert pick_matmul_dtype(torch.device("cpu")) == fast
        assert pick_matmul_dtype(torch.device("cuda")) == torch.bfloat16

    def test_a_budget_in_minutes_ends(self, out: Path) -> None:
        reports: list[Progress] = []
        train("draft", replace(TINY, steps=None, minutes=0.3 / 60), out, device="cpu", report=reports.append)
        assert reports[-1].budget_spent == 1

    def test_a_damaged_checkpoint_is_refused(self, out: Path) -> None:
        (out / "draft.checkpoint.pt").write_bytes(b"PK\x03\x04 cut short")
        with pytest.raises(SpecgenError, match="cannot be read"):
            train("draft", TINY, out, device="cpu")

    def test_learning_rate_schedule(self) -> None:
        assert learning_rate_factor(0, 0.0) == pytest.approx(0.01)
        assert learning_rate_factor(99, 0.0) == learning_rate_factor(5000, 0.74) == pytest.approx(1.0)
        assert learning_rate_factor(5000, 0.875) == pytest.approx(0.5)
        assert learning_rate_factor(5000, 1.0) == 0.0

    def test_shapes(self) -> None:
        assert Shape(256, 12) == Shape(256, 12, heads=8)
        assert Shape(256, 12).intermediate_size == 704
        for sizes in [(0, 1), (64, 0), (64, 1, -2)]:
            with pytest.raises(SpecgenError, match="Each size has to be at least 1"):
                Shape(*sizes)
        for hidden_size, heads in [(66, 4), (6, 2)]:
            with pytest.raises(SpecgenError, match=f"{hidden_size} does not fit {heads} heads"):
                Shape(hidden_size, 1, heads)


class TestCommandLine:
    def test_a_missing_tokenizer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["draft", str(tmp_path), "--steps", "1"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "python -m specgen.demo.recipe tokenizer" in error

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--steps", "0"],
            ["--minutes", "nan"],
            ["--hidden-size", "100", "--heads", "3"],
            ["--checkpoint-every", "0"],
            ["--batch-size", "-1"],
            ["--learning-rate", "nan"],
            ["--window", "2000"],
            pytest.param(["--device", "cuda"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")),
        ],
    )
    def test_invalid_values(self, out: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["draft", str(out), *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("arguments", [[], ["nothing"], ["draft"], ["draft", "o", "--steps", "1", "--minutes", "1"]])
    def test_invalid_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_file_instead_of_a_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").touch()
        assert main(["tokenizer", str(tmp_path / "file")]) == 2
        assert "is not a folder" in capsys.readouterr().err

    def test_a_complete_run(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = "--steps 2 --batch-size 2 --window 16 --hidden-size 32 --layers 1 --heads 2 --device cpu"
        assert main(["draft", str(out), *options.split()]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "step 2" in captured.err
