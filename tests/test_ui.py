"""Pieces of the answer, lines of rounds, footers and sanitized text."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from specgen.base.energy import Energy
from specgen.base.json_lines import json_line
from specgen.base.sanitize import inline, one_line, streamed
from specgen.base.types import Draft, Round, Verdict
from specgen.pair.figures import Summary
from specgen.view import theme
from specgen.view.generation import AnswerText, AnswerView, Piece, RoundsView, footer

WORDS = ["<eos>", " starts", " with", " 24", " pencils", ".", " 3", " packs", " of", " baskets", "Hello", "\n", " wor", "ld"]


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
    source: str | None = None,
    reason: str = "limit 5",
    **more: object,
) -> Round:
    draft = Draft.chain(tokens, stop_reason=reason)
    mode = "sequential" if index else "prefill"
    return Round(index, mode, draft, Verdict(tuple(range(accepted)), token, source), **more)  # type: ignore[arg-type]


def shown(pieces: Sequence[Piece]) -> str:
    return "".join(f"[{piece.text}]" if piece.drafted else piece.text for piece in pieces)


def test_pieces_separate_drafted_text_from_the_targets_own() -> None:
    answer = AnswerText(Spelled(), ())
    assert shown(answer.add(a_round(0, (), 0, 10))) == "Hello"
    assert shown(answer.add(a_round(1, (12, 13, 5), 2, 11, "correction"))) == "[ wor][ld]\n"
    assert shown(answer.finish()) == ""
    assert answer.text == "Hello world\n"


@pytest.mark.parametrize(
    ("stop", "steps", "text"),
    [
        (("world",), ["Hello", "[ ]", ""], "Hello "),
        (("lo wor",), ["Hel", "", ""], "Hel"),
        (("word",), ["Hello", "[ ][wor][ld]\n", ""], "Hello world\n"),
        (("nothing", "o"), ["Hell", "", ""], "Hell"),
        (("\n.",), ["Hello", "[ wor][ld]", "\n"], "Hello world\n"),
    ],
)
def test_what_may_become_a_stop_text_is_held_back(stop: tuple[str, ...], steps: list[str], text: str) -> None:
    answer = AnswerText(Spelled(), stop)
    found = [
        shown(answer.add(a_round(0, (), 0, 10))),
        shown(answer.add(a_round(1, (12, 13), 2, 11, "bonus"))),
        shown(answer.finish()),
    ]
    assert [text.replace("][", "") for text in found] == [text.replace("][", "") for text in steps]
    assert answer.text == text
    assert not any(text_ in answer.text for text_ in stop)


class Screen(RoundsView):
    """The view of rounds on a console of some width, and what it wrote."""

    def __init__(self, width: int, prompt_length: int = 3, **options: Any) -> None:
        colours: dict[str, Any] = options.pop("colours", {})
        self.out = io.StringIO()
        console = Console(file=self.out, width=width, theme=theme.theme("ansi"), soft_wrap=True, **colours)
        super().__init__(console, text_of, {0}, prompt_length, **options)

    def lines(self, *rounds: Round) -> list[str]:
        for round_ in rounds:
            self.show(round_)
        return [line.rstrip() for line in self.out.getvalue().splitlines()]


def test_a_line_a_round_as_in_the_mock_up() -> None:
    lines = Screen(100, 43).lines(
        a_round(0, (), 0, 10),
        a_round(1, (1, 2, 3), 3, 4, "bonus", "√cH 0.43 > 0.40"),
        a_round(2, (4, 5, 6, 7, 8), 3, 9, "correction", "limit 5"),
        a_round(3, (7,), 0, 9, "correction"),
        a_round(4, (4, 5, 0), 3, None, None, "eos"),
    )
    assert lines[0] == f"{'  0         Hello':82} prompt, 43 tokens"
    (first,) = Screen(100, 1).lines(a_round(0, (), 0, 1))
    assert first == f"{'  0         starts':85}prompt, 1 token", "without the space before it"
    assert lines[1] == f"{'  1    3/3  starts with 24 ⊕ pencils':85}√cH 0.43 > 0.40"
    assert lines[2] == f"{'  2    3/5  pencils. 3 ✗packs of → baskets':93}limit 5"
    assert lines[3].startswith("  3    0/1  ✗packs → baskets ")
    assert lines[4] == f"{'  4    3/3  pencils.<eos>':97}eos"


def test_a_line_feed_is_visible_and_tokens_keep_clear_of_the_reason() -> None:
    (line,) = Screen(100).lines(a_round(1, (1, 11, 2), 1, 11, "correction"))
    assert line.removesuffix("limit 5").rstrip() == "  1    1/3  starts✗↵ with →↵"
    for width in range(80, 100):  # wherever the tokens are wrapped
        first, *more = Screen(width).lines(a_round(1, (4, 5, 6, 7, 8, 1, 2) * 3, 21, 9, "bonus"))
        assert len(first) == width
        assert first.endswith("  limit 5")
        assert more
        assert all(len(line) <= width - len("  limit 5") for line in more)


def test_narrow_terminals_put_the_reason_after_the_text_and_wrap() -> None:
    screen = Screen(40)
    screen.legend()
    legend, more, key, *lines = screen.lines(a_round(2, (4, 5, 6, 7, 8, 1, 2), 3, 9, "correction"))
    assert legend == "accepted   ✗rejected   discarded"
    assert more == "→correction   ⊕bonus"
    assert key == "3/5 accepted of drafted"
    assert all(len(line) <= 40 for line in lines)
    assert lines[0].startswith("  2    3/7  pencils. 3 ✗packs")
    assert lines[1].startswith(" " * 12)
    assert lines[-1].endswith("limit 5")


def test_a_trees_line_shows_accepted_path_and_rejected_candidates() -> None:
    """The candidates at the position of the rejection, and `²` where the target accepted the second candidate."""
    draft = Draft((1, 4, 2, 5, 6, 7), (-1, -1, 0, 1, 2, 2), stop_reason="limit 3")
    refused = Round(1, "sequential", draft, Verdict((0, 2), 9, "correction"))
    accepted = Round(2, "sequential", draft, Verdict((1, 3), 9, "bonus"))
    lines = Screen(100).lines(refused, accepted)
    assert lines[0].split()[2:] == ["starts", "with", "✗3|packs", "→", "baskets", "limit", "3"]
    assert lines[1].split()[2:] == ["pencils².", "⊕", "baskets", "limit", "3"]


def test_tokens_keep_their_styles() -> None:
    screen = Screen(100, colours={"force_terminal": True, "color_system": "standard"})
    screen.show(a_round(2, (4, 5, 6, 7, 8), 3, 9, "correction"))
    for text in ("\x1b[32mpencils. 3\x1b[0m", "\x1b[1;31m✗\x1b[0m", "\x1b[9;31mpacks\x1b[0m", "\x1b[2m of\x1b[0m"):
        assert text in screen.out.getvalue()
    assert "\x1b[1m→\x1b[0m baskets" in screen.out.getvalue()


def a_summary() -> Summary:
    """The mock-up's figures: 51 tokens, 43 of 53 accepted, in 9 passes."""
    summary = Summary("svip")
    seconds = {"prefill": 0.0, "draft": 0.3, "verify": 0.53, "sample": 0.03, "other": 0.02}
    summary.add(a_round(0, [1] * 53, 43, 1, "correction", seconds=seconds))
    for index in range(1, 8):
        summary.add(a_round(index, (), 0, 1))
    summary.add(a_round(8, (), 0, None))
    return summary


@pytest.mark.parametrize(
    ("width", "notes", "line"),
    [
        (100, [], "svip  51 tokens  58.0 tokens/s  81% accepted  5.67 tokens a pass  34% drafting, 60% verifying"),
        (80, [], "svip  51 tokens  58.0 tokens/s  81% accepted  5.67 a pass  34% draft 60% verify"),
        (60, [], "svip  51 tokens  58.0 tokens/s  81% accepted  5.67 a pass"),
        (56, [], "51 tokens  58.0 tokens/s  81% accepted  5.67 a pass"),
        (40, [], "51 tokens  58.0 tokens/s  81% accepted"),
        (20, [], "51 tokens"),
        (80, ["no draft model"], "svip (no draft model)  51 tokens  58.0 tokens/s  81% accepted  5.67 a pass"),
        (60, ["lossy"], "svip (lossy)  51 tokens  58.0 tokens/s  81% accepted"),
    ],
)
def test_footers_fit_their_width(width: int, notes: list[str], line: str) -> None:
    assert footer(a_summary(), notes, width).plain == line


def a_parallel_summary() -> Summary:
    """Two rejections after 30 accepted tokens, waiting for the draft for a tenth of the time."""
    summary = Summary("pearl")
    seconds = {"prefill": 0.0, "draft": 0.1, "verify": 0.85, "sample": 0.03, "other": 0.02}
    first = a_round(1, [1] * 20, 18, 1, "correction", seconds=seconds)
    summary.add(a_round(0, (), 0, 1))
    summary.add(replace(first, mode="pre-verify"))
    summary.add(replace(a_round(2, [1] * 20, 12, 1, "correction"), mode="post-verify"))
    return summary


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (
            150,
            "  33.0 tokens/s  75% accepted  11.00 tokens a pass  15.0 per rejection  10% waiting for the draft, 85% verifying",
        ),
        (100, "  33.0 tokens/s  75% accepted  11.00 a pass  15.0 per rejection"),
        (90, "  33.0 tokens/s  75% accepted  11.00 a pass"),
        (60, "  33.0 tokens/s"),
        (40, ""),
    ],
)
def test_pearls_footer_shows_the_time_spent_waiting_for_the_draft(width: int, figures: str) -> None:
    """The mean accepted tokens for each rejection (PEARL, Table 4) differ from the tokens for each target pass."""
    summary = a_parallel_summary()
    assert footer(summary, ["window 8, c 8.2"], width).plain == f"pearl (window 8, c 8.2)  33 tokens{figures}"
    assert summary.as_dict("", "length")["mean_accepted_run"] == 15
    assert summary.block_efficiency == 11


@pytest.mark.parametrize("width", [40, 60, 79, 80])
def test_pearls_rounds_and_their_legend_fit_any_width(width: int) -> None:
    window = "window 12: a target pass takes as long as 12.3 draft passes, as measured here"
    screen = Screen(width, parallel=True, window=window)
    screen.legend()
    legend = screen.lines()
    assert " ".join(" ".join(legend).split()).endswith(window)
    rounds = [a_round(333, range(1, size + 1), size - 1, 9, "correction", "window 9, 8 ahead") for size in range(1, 9)]
    lines = screen.lines(*(replace(round_, mode=mode) for mode in ("pre-verify", "post-verify") for round_ in rounds))
    assert max(map(len, lines)) <= width
    rounds = lines[len(legend) :]
    assert all(line.startswith(("333  p", " " * 18)) for line in rounds), "the console wrapped no line again"


def test_the_legend_of_trees_explains_candidates() -> None:
    screen = Screen(60, branches=True)
    screen.legend()
    assert " ".join(screen.out.getvalue().split()).endswith("a|b: candidates for one position ²: the second one was accepted")


def test_pearls_rounds_are_named_as_in_its_figure() -> None:
    screen = Screen(90, parallel=True, window="window 4: c 4.2")
    screen.legend()
    lines = screen.lines(
        a_round(0, (), 0, 10),
        replace(a_round(1, (1,), 1, None, None, "window 4, 3 ahead"), mode="pre-verify"),
        replace(a_round(2, (2, 3, 4, 5, 6, 7, 8), 3, 9, "correction", "window 4"), mode="post-verify"),
    )
    assert lines[1] == "pre, post: verified while the next tokens were drafted   ahead: drafted, not yet verified"
    assert lines[2] == "window 4: c 4.2"
    assert [len(line) for line in lines[3:]] == [90] * 3, "reasons are right-aligned"
    assert [re.split("  {2,}", line.strip()) for line in lines[3:]] == [
        ["0", "Hello", "prompt, 3 tokens"],
        ["1  pre", "1/1  starts", "window 4, 3 ahead"],
        ["2  post", "3/7  with 24 pencils✗. 3 packs of → baskets", "window 4"],
    ]


def test_a_footer_shows_perplexity_and_energy_where_measured() -> None:
    summary = a_summary()
    summary.add_log_likelihood(-51 * math.log(2.5))
    summary.add_energy(Energy("RAPL package-0", 102.0, 12.34, 0.9))
    line = footer(summary, ["lossy"], 120).plain
    assert line.startswith("svip (lossy)  51 tokens  58.0 tokens/s  perplexity 2.50  2 J/token above 12.3 W idle  81% accepted")
    assert footer(summary, [], 80).plain == "51 tokens  58.0 tokens/s  perplexity 2.50  2 J/token above 12.3 W idle"
    summary.add_energy(Energy("unavailable", reason="no counter"))
    assert summary.joules_per_token is None
    assert "J/token" not in footer(summary, [], 120).plain


def test_without_colours_the_footer_counts_the_targets_own_tokens() -> None:
    assert "51 tokens, 8 the target's own" in footer(a_summary(), [], 120, mono=True).plain


def test_a_footer_without_drafts_names_no_acceptance() -> None:
    summary = Summary("ar")
    summary.add(a_round(0, (), 0, 1, seconds={"prefill": 0.5}))
    assert footer(summary, [], 100).plain == "ar  1 token  2.0 tokens/s"


def test_control_characters_become_pictures() -> None:
    assert streamed("a\x1b[31mb\x07\r\n\tc\x9b\x7f\u202e") == "a␛[31mb␇␍\n\tc\N{REPLACEMENT CHARACTER}␡"
    assert inline("a\n    b\tc \x1b") == "a↵····b⇥c ␛"
    assert inline(" ") == "␣"
    assert one_line("a\u202eb\u200b\udc9b\U000e0041") == "a�b���"
    assert streamed("\N{MAN}\u200d\N{WOMAN}\u200b\ufeff") == "\N{MAN}\u200d\N{WOMAN}", "emoji need the joiner"
    assert json_line({"a": "é\x9b\x7f\u2028\u200b\ud800"}) == r'{"a": "é\u009b\u007f\u2028\u200b�"}'.encode() + b"\n"
    assert json.loads(json_line({"a": "\U000e0041"})) == {"a": "\U000e0041"}


def test_a_pipe_gets_the_text_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    view = AnswerView(Console(file=io.StringIO()))
    view.show([Piece(" a\x1b", True), Piece("b", False)])
    view.end()
    assert capsys.readouterr().out == " a\x1bb\n"


@pytest.mark.parametrize(
    ("environment", "no_color", "many", "expected"),
    [
        ({}, False, True, "ansi"),
        ({"NO_COLOR": "1"}, False, True, "mono"),
        ({}, True, True, "mono"),
        ({"SPECGEN_THEME": "dark"}, False, True, "dark"),
        ({"SPECGEN_THEME": "light"}, False, False, "ansi"),
        ({"COLORFGBG": "15;0"}, False, True, "dark"),
        ({"COLORFGBG": "0;15"}, False, True, "light"),
        ({"COLORFGBG": "default;default"}, False, True, "ansi"),
    ],
)
def test_the_flavour_follows_the_environment(environment: dict[str, str], no_color: bool, many: bool, expected: str) -> None:
    assert theme.flavour(environment, no_color=no_color, many_colours=many) == expected
