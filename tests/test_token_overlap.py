"""Kappa, the share of a target's tokens that are one token in both tokenizers: counted, shown, and said before runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from cli_helpers import parsed, run_main
from foreign_tokenizers import write_model
from tokenizer_helpers import LLAMA, byte_level, load, metaspace, write
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers, pre_tokenizers

import specgen
from specgen.base.types import SamplingParams
from specgen.decoding.costs.speedup import SpeedupModel
from specgen.engine.text import translation as overlaps
from specgen.engine.text.token_bytes import NoTokenBytes, token_bytes
from specgen.engine.text.tokenizer import Tokenizer
from specgen.engine.text.translation import TokenOverlap, overlap_of_examples, token_overlap
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


def test_the_targets_own_tokens_count_as_it_said_them(pieces: TokenizerOf) -> None:
    """They need not be those that its tokenizer makes of the text, and the last one may be a part of a character."""
    target, draft = pieces("th", "the"), pieces("th", "the")
    ids = {token: id_ for id_, token in enumerate(token_bytes(target).pieces)}
    spelled = [ids[b"t"], ids[b"h"], ids[b"e"]] * 4 + [ids[b"the"]] * 12
    found = token_overlap(target, draft, ["never read"], [[*spelled, ids["é".encode()[:1]]], []])
    assert (found.covered, found.tokens, found.is_output) == (12, 24, True)


def test_a_space_before_the_text_moves_nothing(tmp_path: Path) -> None:
    """A SentencePiece-like tokenizer puts one there; all other tokens of these are the same."""
    made = {kind: load(write(tmp_path / kind, metaspace(kind), None, LLAMA)) for kind in ("first", "prepend", "gemma")}
    text = "the quick brown jumps over the lazy dog, and the dog is not amused"
    for target, draft, lost in (("gemma", "first", 2), ("first", "gemma", 2), ("prepend", "first", 0)):
        found = token_overlap(made[target], made[draft], [text])
        assert found.tokens > 20
        assert found.tokens - lost <= found.covered, (target, draft)


def test_examples_and_tokenizers_without_bytes(pieces: TokenizerOf, tmp_path: Path) -> None:
    target, draft = pieces("th", "the", " t", " th", " the", "in"), pieces("th", "he", "the")
    found = overlap_of_examples(target, draft)
    assert found.tokens > 5000
    assert found.kappa is not None
    assert 0.8 < found.kappa < 0.99
    assert json.loads(json.dumps(found.as_dict()))["kappa"] == found.kappa
    pipeline = Pipeline.from_str(byte_level())
    pipeline.normalizer = normalizers.Lowercase()
    lower = load(write(tmp_path / "lower", pipeline.to_str(), {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA))
    with pytest.raises(NoTokenBytes):
        overlap_of_examples(target, lower)


def test_words_for_what_can_pay() -> None:
    """By hand: at kappa 0.5 a draft of 1 yields 1.5 tokens in 1 + 0.8 target passes, of 2 1.75 in 2.6."""
    low = TokenOverlap(300, 1000, 50, 100)
    model = SpeedupModel({1: 1.0, 2: 1.0, 3: 1.0}, 0.8, 10)
    pays, text = words.best_speedup(low, model) or (True, "")
    assert not pays
    assert (
        text == "about 0.83× at best, so drafts in common tokens are slower, unless the draft was trained on the target's tokens"
    )
    cheap = SpeedupModel({1: 1.0, 2: 1.0, 3: 1.0}, 0.1, 10)
    pays, text = words.best_speedup(replace(low, covered=90), cheap) or (False, "")
    assert pays
    assert text == "about 2.26× at best, with drafts of 2, unless the draft was trained on the target's tokens"
    assert "tune --train --methods sd" in words.ALTERNATIVES
    assert "--train" not in words.UNTRANSLATED, "such drafts cannot be trained"
    assert words.best_speedup(replace(low, tokens=5, covered=1), model) is None
    assert words.best_speedup(low, SpeedupModel({1: 1.0}, 0.8, 10)) is None
    assert words.advice(replace(low, covered=90), pays=False) == words.advice(low) == f"use {words.ALTERNATIVES}"
    assert words.advice(replace(low, covered=90)) is None
    assert "50% of the tokens of example text are one token in both (kappa), about 1.0 in a row" in words.notice(low)
    assert words.notice(low).endswith(f"Faster may be {words.ALTERNATIVES}")
    high = replace(low, covered=100, is_output=True)
    assert words.notice(high).endswith("100% of the tokens of the target's output are one token in both (kappa)")
    assert "too little text" in words.notice(replace(low, tokens=3))


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


def test_runs_say_it_first(folders: Folders, specgen_: Run, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "LOW", 0.99)
    pair = ("-t", folders("byte-level"), "-d", folders("other merges"), "-n", "4")
    generate = ("generate", "the quick", *pair, "-m")
    for command in ((*generate, "sd"), ("compare", *pair, "--methods", "sd:k=2", "--prompts", prompts, "--repeats", "1")):
        _, err = specgen_(*command)
        assert err.startswith("note: the tokenizers differ: "), err
        assert words.ALTERNATIVES in err.splitlines()[0]
        assert "note:" not in specgen_(*command, "--quiet")[1]
    for method in (("lookup",), ("sd", "--set", "translation=text")):
        assert "note:" not in specgen_(*generate, *method)[1]


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


@pytest.mark.parametrize("draft", ["byte-level", "permuted", "other merges", "first", "gemma", "word piece"])
def test_greedy_output_is_plain_decodings(folders: Folders, draft: str) -> None:
    """On models, whose drafts by way of their text are cut, refused and accepted; and with no memory of the run before."""
    pair = specgen.load(folders("byte-level"), folders(draft), device="cpu", dtype="float32")
    pair._worker = None
    given = {"the quick brown": {"k": 6}, "日本語 def fibonacci(n": {"policy": "svip"}, "a": {"k": 1}}
    for prompt, settings in given.items():
        sampling = SamplingParams(max_new_tokens=24)
        plain = pair.generate(prompt, "ar", sampling)
        found = pair.generate(prompt, "sd", sampling, translation="text", **settings)
        assert found.token_ids == plain.token_ids
        if draft == "byte-level":
            assert found.summary["drafted"] > 0
    pair.close()
