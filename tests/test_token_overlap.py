"""Kappa, the share of a target's tokens that are one token in both tokenizers: counted, shown, and said before runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cli_helpers import parsed, run_main
from foreign_tokenizers import write_model
from tokenizer_helpers import LLAMA, load, write
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers

from specgen.engine.text import translation as overlaps
from specgen.engine.text.tokenizer import Tokenizer
from specgen.engine.text.translation import token_overlap
from specgen.tune import pair_inspection
from specgen.view import pair_report as words

TokenizerOf = Callable[..., Tokenizer]


@pytest.fixture
def pieces(tmp_path: Path) -> TokenizerOf:
    """Makes a byte-level tokenizer of single characters and of longer tokens, each of which is merged left to right."""

    @cache
    def made(*longer: str) -> Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        marked = [token.replace(" ", "Ġ") for token in longer]
        vocabulary = {token: id_ for id_, token in enumerate([*alphabet, *marked])}
        pipeline = Pipeline(models.BPE(vocab=vocabulary, merges=[(token[:-1], token[-1]) for token in marked]))
        pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        pipeline.decoder = decoders.ByteLevel()
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        return load(write(tmp_path / str(len(list(tmp_path.iterdir()))), pipeline.to_str(), settings, LLAMA))

    return made


def test_kappa_against_a_count_by_hand(pieces: TokenizerOf) -> None:
    """`the cat sat` ten times: the target's tokens are `the`, ` c`, `a`, `t`, ` `, `s`, `a`, `t` (after the first: ` the`)."""
    target, draft = pieces("th", "the", " c"), pieces("th", "the", "sa", "sat", "at")
    text = "the cat sat"
    assert [target.text_of([token]) for token in target.encode(text, special=False)] == [
        "the",
        " c",
        "a",
        "t",
        " ",
        "s",
        "a",
        "t",
    ]
    assert [draft.text_of([token]) for token in draft.encode(text, special=False)] == ["the", " ", "c", "at", " ", "sat"]
    found = token_overlap(target, draft, [text] * 4)
    assert (found.covered, found.tokens, found.is_output) == (4 * 2, 4 * 8, False), "`the` and the second space"
    assert found.kappa == 0.25
    assert found.expected_run == pytest.approx(1 / 3)
    assert found.is_low
    assert (found.vocabulary, found.common) == (259, 258), "all but ` c`"
    assert token_overlap(target, target, [text] * 4).kappa == 1
    assert token_overlap(target, target, [text] * 4).expected_run is None
    assert token_overlap(target, draft, [text]).kappa is None, "of eight tokens it would say little"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    parent = tmp_path_factory.mktemp("models")
    return cache(lambda name: write_model(parent / name.replace(" ", "-"), name))


Folders = Callable[[str], str]
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def specgen_(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, with what it writes to stdout and stderr."""

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", "400")
        capfd.readouterr()  # of what has saved the models
        found, out, err = run_main(monkeypatch, capfd, *arguments, "--device", "cpu")
        assert found == code, err
        return out, err

    return call


def test_inspect_prices_the_overlap(folders: Folders, specgen_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "LOW", 0.99)
    pair = ("inspect", "-t", folders("byte-level"), "-d", folders("other merges"))
    line = parsed(specgen_(*pair, "--json")[0])[0]
    overlap = line["tokenizers"]["overlap"]
    assert overlap["common"] < overlap["vocabulary"]
    assert overlap["kappa"] == overlap["covered"] / overlap["tokens"] > 0.5
    assert line["tokenizers"]["refusal"] is None
    out, _ = specgen_(*pair)
    assert f"· tokenizer  another; {overlap['common']} of the target's {overlap['vocabulary']} tokens are the draft's, too" in out
    assert f"{overlap['kappa']:.0%} of the tokens of example text are one token in both (kappa), about " in out
    assert words.ALTERNATIVES in out
    assert "✓ sd, heuristic" in out
    monkeypatch.setattr(pair_inspection, "time_passes", lambda _, widths, length: dict.fromkeys(widths, 0.01))
    monkeypatch.setattr(pair_inspection, "measure_parallel", lambda *_: None)
    out, _ = specgen_(*pair, "--measure")
    assert "of the tokens of the target's output are one token in both (kappa)" in out
    assert "· tokens     " in out, "a draft pass takes as long as one of the target"
    assert "so drafts in common tokens are slower, unless the draft was trained" in out
    assert out.count(words.ALTERNATIVES) == 1
    line = parsed(specgen_(*pair, "--measure", "--json")[0])[0]
    assert line["tokenizers"]["overlap"]["is_output"]
    assert line["measured"]["at_kappa"]["speedup"] < 1


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    (tmp_path / "prompts.yaml").write_text("prompts: [{prompt: the quick dog}]", encoding="utf-8")
    return str(tmp_path / "prompts.yaml")


def test_what_works_without_token_bytes_runs_and_the_rest_says_why(
    folders: Folders, specgen_: Run, prompts: str, tmp_path: Path
) -> None:
    """Of a draft with a WordPiece tokenizer, drafts by way of their text; and methods without a draft model."""
    pair = ("-t", folders("byte-level"), "-d", folders("word piece"), "-n", "8")
    compare = ("compare", *pair, "--prompts", prompts, "--repeats", "1", "--methods")
    generate = ("generate", "the quick", *pair)
    for command in (generate, (*generate, "-m", "sd"), (*compare, "sd:k=2")):
        (line,) = specgen_(*command, code=2)[1].splitlines()
        for part in (
            "their tokens cannot be translated",
            "WordPiece",
            "Only drafts by their text",
            "sd:translation=text",
            "-m lookup",
        ):
            assert part in line
    lines = {
        line["method"]: line for line in parsed(specgen_(*compare, "sd,sd:translation=text,pearl,adaptive,lookup", "--json")[0])
    }
    assert [lines[name]["identical"] for name in ("ar", "sd:translation=text", "lookup")] == [1] * 3
    assert all("tokens cannot be translated" in lines[name]["error"] for name in ("sd", "pearl", "adaptive"))
    tune = ("tune", *pair, "--prompts", prompts, "--budget", "5", "--out", str(tmp_path / "out"), "--methods")
    (tuned,) = parsed(specgen_(*tune, "sd,lookup", "--json")[0])
    assert "lookup" in tuned["predicted"]
    assert "tokens cannot be translated" in tuned["left_out"]["sd"]
    message = specgen_(*tune, "sd,pearl", code=2)[1].splitlines()[-1]
    assert message.startswith("error: no method can be tuned: sd, pearl: the tokenizers differ")
