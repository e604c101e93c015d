"""`specgen tune`: options that belong to training or to tuning only, and training with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CHAT_TEMPLATE, LETTERS, make_model, make_tokenizer, save
from specgen.train.generated_text import load_batches
from training_helpers import invoke, opened, refused, trained

from specgen.base.errors import SpecgenError
from specgen.train.corpus import chat_prompts

SIZES = ["--steps", "1", "--window", "64", "--batch-size", "2", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parent, tokenizer = tmp_path_factory.mktemp("options"), make_tokenizer(LETTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    folders = [save(make_model("llama", seed=seed), parent / name, tokenizer) for name, seed in (("t", 0), ("d", 7))]
    return ["-t", folders[0], "-d", folders[1]]


@pytest.mark.parametrize(
    "option",
    [
        ["--budget", "60"],
        ["--category", "code"],
        ["--limit", "8"],
        ["--export", "vllm"],
        ["--max-new-tokens", "64"],
        ["--temperature", "0"],
        ["--top-p", "1"],
        ["--top-k", "0"],
        ["--ignore-eos"],
        ["--head", "own"],
    ],
)
def test_training_refuses_options_of_tuning(pair: list[str], corpus: Path, option: list[str]) -> None:
    """Also where the value is the default one: the user expects it to matter."""
    assert f"{option[0]} cannot be combined with --train" in refused(["tune", "--train", *pair, "--corpus", str(corpus), *option])


@pytest.mark.parametrize(
    "option",
    [
        ["--minutes", "1"],
        ["--steps", "1"],
        ["--corpus", "a.txt"],
        ["--layer", "1"],
        ["--exit-layers", "1"],
        ["--exit-head", "own"],
        ["--self-text", "0.5"],
        ["--batch-size", "4"],
        ["--window", "64"],
        ["--learning-rate", "0.1"],
    ],
)
def test_tuning_refuses_options_of_training(pair: list[str], option: list[str]) -> None:
    assert f"{option[0]} needs --train" in refused(["tune", *pair, *option])


def test_several_wrong_options_are_named_in_one_line(pair: list[str]) -> None:
    assert "--limit, --max-new-tokens, --temperature cannot be combined" in refused(
        ["tune", "--train", *pair, "-n", "9", "--temperature", "1", "--limit", "3"]
    )


def write_lines(path: Path, entries: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_chat_prompts_are_in_the_template_up_to_the_answer(pair: list[str], tmp_path: Path) -> None:
    tokenizer = opened(pair[1]).tokenizer
    conversation = [message("system", "be kind"), message("user", "ab"), message("assistant", "cd"), message("user", "ef" * 8)]
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"messages": conversation}, {"prompt": "hello"}, {"text": "spec"}, {"messages": [message("assistant", "alone")]}],
    )

    def texts(limit: int) -> list[str]:
        return [tokenizer.text_of(ids) for ids in chat_prompts(path, tokenizer, limit)]

    short = ["user hello\nassistant ", "user spec\nassistant "]
    start = "system be kind\nuser ab\n"
    assert texts(100) == [f"{start}assistant cd\nuser {'ef' * 8}\nassistant ", *short]
    assert texts(40) == [f"{start}assistant ", *short], "the last message of the user is too long"
    assert texts(25) == short
    with pytest.raises(SpecgenError, match="no prompt of at most 5 tokens"):
        texts(5)
    (tmp_path / "a.txt").write_text("one\n\n  two \n")
    found = [tokenizer.text_of(ids) for ids in chat_prompts(tmp_path / "a.txt", tokenizer, 100)]
    assert found == ["user one\nassistant ", "user two\nassistant "]
    for wrong in ({}, {"messages": []}, {"messages": "x"}, {"messages": [{"role": "user"}]}, {"prompt": 3}, {"text": ""}, 7):
        with pytest.raises(SpecgenError, match=r"b.jsonl, line 1: not a JSON object with messages"):
            chat_prompts(write_lines(tmp_path / "b.jsonl", [wrong]), tokenizer, 100)


@pytest.mark.parametrize(
    ("option", "method"),
    [
        ("--corpus", "eesd"),
        pytest.param("--prompts", "sd", marks=pytest.mark.slow),
        pytest.param("--prompts", "eesd", marks=pytest.mark.slow),
        pytest.param("--corpus", "sd", marks=pytest.mark.slow),
    ],
)
def test_with_chat_all_training_text_is_templated(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, option: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": f"{letter} hello"} for letter in LETTERS[10:30]])
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # the generated text stays
    batches: list[torch.Tensor] = []
    monkeypatch.setattr("specgen.train.training_loop.Training.backward", recording(batches))
    trained(["tune", "--train", *pair, "-m", method, option, str(path), "--chat", "--out", str(tmp_path / "out"), *SIZES])
    tokenizer = opened(pair[1]).tokenizer
    prompts = {tuple(tokenizer.chat(f"{letter} hello", None)) for letter in LETTERS[10:30]}
    texts = [text for batch in load_batches(tmp_path / "out" / "training") for text in batch]
    assert {tuple(text.ids[: text.prompt_length].tolist()) for text in texts} <= prompts
    assert len(texts) >= 20
    starts = {tuple(ids[:5].tolist()) for ids in batches}
    assert starts <= {prompt[:5] for prompt in prompts}, "no other text is mixed in"
    assert starts


def recording(batches: list[torch.Tensor]) -> Any:
    from specgen.train.training_loop import Training

    backward = Training.backward

    def recorded(self: Training, batch: Any, labelled: int) -> torch.Tensor:
        batches.extend(batch.ids)
        return backward(self, batch, labelled)

    return recorded


def test_chat_needs_a_template_and_prompts(pair: list[str], tmp_path: Path, corpus: Path) -> None:
    run = ["tune", "--train", "--out", str(tmp_path / "out"), "--chat"]
    plain = save(make_model("llama"), tmp_path / "plain", make_tokenizer(LETTERS))
    lines = write_lines(tmp_path / "a.jsonl", [{"prompt": "hello"}])
    assert "has no chat template" in refused([*run, "-t", plain, "--corpus", str(lines)])
    assert "there are no prompts for --chat" in refused([*run, *pair])
    assert "--self-text cannot be combined with --chat" in refused([*run, *pair, "--corpus", str(lines), "--self-text", "0.5"])
    assert "--corpus demo has no conversations" in refused([*run, *pair, "--corpus", "demo"])
    assert "no prompt of at most 12 tokens" in refused([*run, *pair, "--prompts", str(lines), "--window", "16"])
    assert invoke(["tune", "--help"]).exit_code == 0
