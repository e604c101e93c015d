"""Kappa, the share of a target's tokens that are one token in both tokenizers: counted, shown, and said before runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tokenizer_helpers import LLAMA, byte_level, load, metaspace, write
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers, pre_tokenizers

from specgen.cost_model.speedup import SpeedupModel
from specgen.engine.token_bytes import NoTokenBytes, token_bytes
from specgen.engine.token_overlap import TokenOverlap, overlap_of_examples, token_overlap
from specgen.engine.tokenizer import Tokenizer
from specgen.ui.terminal import token_overlap as words

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
    assert [target.text_of([token]) for token in target.encode_plain(text)] == ["the", " c", "a", "t", " ", "s", "a", "t"]
    assert [draft.text_of([token]) for token in draft.encode_plain(text)] == ["the", " ", "c", "at", " ", "sat"]
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
    assert text.startswith("0.83× at best, even if")
    cheap = SpeedupModel({1: 1.0, 2: 1.0, 3: 1.0}, 0.1, 10)
    pays, text = words.best_speedup(replace(low, covered=90), cheap) or (False, "")
    assert pays
    assert text.startswith("at most 2.26×, with drafts of 2")
    assert words.best_speedup(replace(low, tokens=5, covered=1), model) is None
    assert words.best_speedup(low, SpeedupModel({1: 1.0}, 0.8, 10)) is None
    assert words.advice(replace(low, covered=90), pays=False) == words.advice(low) == f"use {words.ALTERNATIVES}"
    assert words.advice(replace(low, covered=90)) is None
    assert "50% of the tokens of example text are one token in both (kappa), about 1.0 in a row" in words.notice(low)
    assert words.notice(low).endswith(f"Faster may be {words.ALTERNATIVES}")
    high = replace(low, covered=100, is_output=True)
    assert words.notice(high).endswith("100% of the tokens of the target's output are one token in both (kappa)")
    assert "too little text" in words.notice(replace(low, tokens=3))
