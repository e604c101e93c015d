"""Pieces of the answer, lines of rounds, footers, the console's colours and sanitized text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import WORDS

from specgen.base.measuring import Energy
from specgen.base.text import inline, json_line, one_line, streamed
from specgen.base.types import Draft, Round, Verdict
from specgen.engine.text.stop_strings import StopStrings
from specgen.pair.figures import Figures
from specgen.view import theme
from specgen.view.generation import AnswerText, AnswerView, Piece, footer


class Spelled:
    """A detokenizer of whole words."""

    def push(self, token: int) -> str:
        return WORDS[token]

    def flush(self) -> str:
        return ""


def text_of(ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def a_round(
    index: int,
    tokens: Sequence[int],
    accepted: int,
    token: int | None,
    source: Any = None,
    reason: str = "limit 5",
    **more: Any,
) -> Round:
    draft = Draft.chain(tokens, stop_reason=reason)
    return Round(
        index,
        "sequential" if index else "prefill",
        draft,
        Verdict(tuple(range(accepted)), token, source),
        **more,
    )


def shown(pieces: Sequence[Piece]) -> str:
    return "".join(f"[{piece.text}]" if piece.drafted else piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("stop", "steps"),
    [
        ((), ["Hello", "[ wor][ld].", ""]),
        (("world",), ["Hello", "[ ]", ""]),
        (("lo wor",), ["Hel", "", ""]),
        (("word",), ["Hello", "[ ][wor][ld].", ""]),
        ((".!",), ["Hello", "[ wor][ld]", "."]),
    ],
)
def test_what_may_become_a_stop_text_is_held_back(stop: tuple[str, ...], steps: list[str]) -> None:
    answer = AnswerText(Spelled(), StopStrings(stop))
    rounds = a_round(0, (), 0, 10), a_round(1, (12, 13, 5), 2, 5, "correction")
    found = [*(shown(answer.add(round_)) for round_ in rounds), shown(answer.finish())]
    assert [text.replace("][", "") for text in found] == [text.replace("][", "") for text in steps]
    assert answer.text == re.sub(r"[\[\]]", "", "".join(steps))


@given(
    st.lists(st.lists(st.integers(1, 13), max_size=5), max_size=6),
    st.lists(st.text("stawi pH\n.", min_size=1), max_size=3),
)
def test_pieces_join_to_the_text_before_the_first_stop_text(
    rounds: list[list[int]], stop: list[str]
) -> None:
    answer = AnswerText(Spelled(), StopStrings(stop))
    whole = text_of([token for tokens in rounds for token in (*tokens, 5)])
    pieces = [
        piece
        for index, tokens in enumerate(rounds)
        for piece in answer.add(a_round(index, tokens, len(tokens), 5))
    ]
    joined = "".join(piece.text for piece in (*pieces, *answer.finish()))
    assert joined == answer.text == whole[: len(joined)]
    places = [whole.index(text) for text in stop if text in whole]
    if not any(text in joined for text in stop):
        assert joined == whole[: min(places, default=len(whole))] or len(rounds) > 1
    assert not any(text in joined for text in stop)


# ------------------------------------------------------------------ footers


def a_summary(mode: Any = "sequential") -> Figures:
    """51 tokens after a prompt of 30, 43 of 53 accepted, in 9 passes; with one rejection."""
    summary = Figures("svip", prompt_tokens=30)
    summary.add(a_round(0, (), 0, 1, seconds={"prefill": 0.12}))
    seconds = {"prefill": 0.0, "draft": 0.3, "verify": 0.53, "sample": 0.03, "other": 0.02}
    summary.add(replace(a_round(1, [1] * 53, 43, 1, "correction", seconds=seconds), mode=mode))
    for index in range(2, 8):
        summary.add(a_round(index, (), 0, 1))
    summary.add(a_round(8, (), 0, None))
    return summary


@pytest.mark.parametrize(
    ("width", "notes", "line"),
    [
        (
            100,
            [],
            (
                "svip  51 tokens  decoding 56.8 tokens/s  prompt 250/s  81% accepted  first "
                "token 0.12 s  5.67 a pass"
            ),
        ),
        (80, [], "svip  51 tokens  decoding 56.8 tokens/s  prompt 250/s  81% accepted"),
        (64, [], "51 tokens  decoding 56.8 tokens/s  prompt 250/s  81% accepted"),
        (48, [], "51 tokens  decoding 56.8 tokens/s  81% accepted"),
        (
            80,
            ["no draft model"],
            "svip (no draft model)  51 tokens  decoding 56.8 tokens/s  81% accepted",
        ),
    ],
)
def test_footers_fit_their_width(width: int, notes: list[str], line: str) -> None:
    assert footer(a_summary(), notes, width).plain == line


def test_footers_show_what_a_run_has() -> None:
    summary = a_summary("pre-verify")
    assert (
        "svip  stopped at 51 tokens (-n)  decoding 56.8 tokens/s"
        in footer(summary, [], 180, is_cut=True).plain
    )
    assert footer(summary, [], 20, is_cut=True).plain.startswith("stopped at 51 tokens (-n)"), (
        "never left out"
    )
    waiting = "5.67 a pass  43.0 per rejection  30% waiting for the draft, 53% verifying"
    assert footer(summary, ["window 8, c 8.2"], 180).plain.endswith(waiting)
    assert footer(summary, [], 30, tuned="tuned: svip").plain.startswith("tuned: svip  51 tokens")
    summary = a_summary()
    summary.ties = 1
    assert "1 tie in the target's logits" in footer(summary, [], 180).plain
    summary.add_log_likelihood(-51 * math.log(2.5))
    summary.add_energy(Energy("RAPL package-0", 102.0, 12.34, 0.9))
    line = footer(summary, ["lossy"], 150).plain
    assert line.startswith(
        "svip (lossy)  51 tokens  decoding 56.8 tokens/s  prompt 250/s  perplexity 2.50  "
        "2 J/token above 12.3 W idle"
    )
    summary.add_energy(Energy("unavailable", reason="no counter"))
    assert "J/token" not in footer(summary, [], 120).plain
    plain = Figures("ar", [a_round(0, (), 0, 1, seconds={"prefill": 0.5})])
    plain.prompt_tokens = 100
    assert (
        footer(plain, [], 100, where="cpu float32").plain
        == "ar  1 token  prompt 200/s  first token 0.5 s  cpu float32"
    )


def test_speeds_of_decoding_and_of_the_prompt_add_up_over_runs() -> None:
    both = Figures("svip")
    for run in (
        a_summary(),
        Figures("ar", [a_round(0, (), 0, 1, seconds={"prefill": 0.5})], prompt_tokens=100),
    ):
        line = {**run.as_dict("", "length"), "drafts": run.drafts, "rejections": run.rejections}
        both.include(line)
    assert line["decode_tokens_per_second"] is None, "one token has no speed of its own"
    assert (line["prompt_tokens_per_second"], line["tokens_per_second"]) == (200.0, 2.0)
    assert both.decode_tokens_per_second == pytest.approx(50 / 0.88)
    assert both.prompt_tokens_per_second == pytest.approx(130 / 0.62)
    assert both.tokens_per_second == pytest.approx(52 / 1.5)
    for name in ("first_token_seconds", "decode_tokens_per_second", "prompt_tokens_per_second"):
        del line[name]  # as in lines of earlier versions and of other programs
    both.include(line)
    assert (both.decode_tokens_per_second, both.prompt_tokens_per_second) == (None, None)
    assert both.tokens_per_second is not None


# ------------------------------------------------------------------ text and colours


def test_control_characters_become_pictures_except_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        streamed("a\x1b[31mb\x07\r\n\tc\x9b\x7f\u202e")
        == "a␛[31mb␇␍\n\tc\N{REPLACEMENT CHARACTER}␡"
    )
    assert inline("a\n    b\tc \x1b") == "a↵····b⇥c ␛"
    assert inline(" ") == "␣"
    assert one_line("a\u202eb\u200b\udc9b\U000e0041") == "a�b���"
    assert streamed("\N{MAN}\u200d\N{WOMAN}\u200b\ufeff") == "\N{MAN}\u200d\N{WOMAN}", (
        "emoji need the joiner"
    )
    assert (
        json_line({"a": "é\x9b\x7f\u2028\u200b\ud800"})
        == r'{"a": "é\u009b\u007f\u2028\u200b�"}'.encode() + b"\n"
    )
    assert json.loads(json_line({"a": "\U000e0041"})) == {"a": "\U000e0041"}
    view = AnswerView(theme.console())
    view.show([Piece(" a\x1b", True), Piece("b", False)])
    view.end()
    assert capsys.readouterr().out == " a\x1bb\n"


@pytest.mark.parametrize(
    ("environment", "style"),
    [
        ({}, "green"),
        ({"SPECGEN_THEME": "dark"}, "#56d364"),
        ({"SPECGEN_THEME": "dark", "NO_COLOR": "1"}, "none"),
    ],
)
def test_the_flavour_follows_the_environment(
    environment: dict[str, str], style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPECGEN_THEME", "NO_COLOR"):
        monkeypatch.setenv(name, environment.get(name, ""))
    assert str(theme.console().get_style("token.accepted")) == style
