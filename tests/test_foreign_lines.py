"""Real runs on transformers' backend: nothing but specgen's own lines reaches the user."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import run, run_main
from families import CHAT_TEMPLATE, LETTERS, make_model, make_tokenizer, near_copy, save
from processes import Forked
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama, its near copy, one in torchao's format, and families that transformers
    runs."""
    folder = tmp_path_factory.mktemp("foreign")
    tokenizer = make_tokenizer(LETTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    llama = make_model("llama")
    made = {
        "llama": llama,
        "near": near_copy(llama),
        "mamba2": make_model("mamba2"),
        "gpt2": make_model("gpt2"),
    }
    for name, model in made.items():
        save(model, folder / name, tokenizer)
    return folder


@pytest.fixture(scope="module")
def rounded(models: Path) -> Path:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(models / "llama", quantization_config=config)
    return Path(save(model, models / "torchao", make_tokenizer(LETTERS)))


@pytest.mark.parametrize("name", ["llama", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_a_quiet_run_on_transformers_writes_nothing_to_stderr(models: Path, name: str) -> None:
    options = ["-q", "-t", str(models / name), "--backend", "transformers", "-n", "4"]
    process = Forked("generate", *options, "abc")
    assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 0


def test_quiet_baselines_of_a_quantised_model_write_nothing_to_stderr(
    models: Path, rounded: Path
) -> None:
    methods = "transformers,transformers-assisted,sd"
    named = [
        "-t",
        str(rounded),
        "-d",
        str(models / "near"),
        "-m",
        methods,
        "-n",
        "4",
        "--limit",
        "1",
    ]
    code, _, err = run("compare", "-q", *named)
    assert (code, err) == (0, b"")


def test_a_run_says_in_one_line_why_transformers_runs_the_model(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unless the user asked for it; a draft model is named too."""
    why = (
        "runs on transformers, which is slower: the native decoder does not support "
        "model_type = 'gpt2'"
    )
    slow = str(models / "gpt2")
    both = ["-t", slow, "-d", slow, "-n", "4"]
    for command in (["generate", *both, "abc"], ["compare", *both, "-m", "lookup", "--limit", "1"]):
        lines = run_main(monkeypatch, capfd, *command)[2].splitlines()
        assert lines.count(f"{slow} {why}") == 2, lines
    asked = run_main(monkeypatch, capfd, "generate", *both, "--backend", "transformers", "abc")[2]
    assert "slower" not in asked
