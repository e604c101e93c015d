"""What `specgen generate` shows: the answer while it is generated, one line a round, and a line
with the run's numbers.

In the answer the draft's tokens have another colour than the target's own. A round's line (a draft
and its verification by the target, as in EESD's Figure 6) shows the drafted tokens and which of
them were accepted, the target's own token, and why the draft ended.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.text import Text

from specgen.base.text import counted, inline, significant, streamed
from specgen.base.types import Round, TokenStatus
from specgen.pair.figures import Figures
from specgen.view.theme import PIPED_WIDTH, ThemedConsole, one_line_text, wrapped

if TYPE_CHECKING:
    from specgen.engine.text.stop_strings import StopStrings
    from specgen.engine.text.tokenizer import Detokenizer

LEAD = 12  # cells before a round's text, for its number and accepted/drafted
MODES = {"pre-verify": "pre", "post-verify": "post"}  # PEARL's modes, shown after a round's number
MODE = 6  # cells of the column with PEARL's mode
NARROW = 80  # cells; on narrower terminals the words on why a draft ended follow the tokens
_STYLES = {
    "accepted": "token.accepted",
    "rejected": "token.rejected",
    "discarded": "token.discarded",
    "own": "token.target",
    "cross": "mark.rejected",
    "mark": "mark",
    "space": "none",
}
_MARKS = {"correction": "→", "bonus": "⊕"}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_DROPPED_FIRST = (
    "runs",
    "ties",
    "shares",
    "pass",
    "where",
    "first",
    "name",
    "prompt",
    "sources",
    "accepted",
    "energy",
)
_DROPPED_NEXT = ("perplexity", "speed")


class Piece(NamedTuple):
    """A piece of the answer's text; `drafted` says whether the draft model proposed its tokens."""

    text: str
    drafted: bool


class AnswerText:
    """Turns the tokens of rounds into pieces of text that end before the first stop string. Text
    that may begin one is held back until more text shows whether it does."""

    def __init__(self, detokenizer: Detokenizer, stop: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        # everything: also marks, text that is held back, and a stop string with what follows it
        self._all = ""
        self._drafted: list[bool] = []  # for each character of it
        self._shown = 0  # characters of it
        self._starts: list[int] = []  # where each token's text begins in it

    @property
    def text(self) -> str:
        return self._stop.shown(self._all[: self._shown])

    @property
    def shown_tokens(self) -> int:
        """How many of the tokens have text that was shown, or are before one that has."""
        return bisect_left(self._starts, self._shown)

    def offset(self, token: int) -> int:
        """Returns where the text of a token, by its number, begins in the answer's text."""
        return len(self._stop.shown(self._all[: self._starts[token]]))

    def add(self, round_: Round) -> list[Piece]:
        """Adds a round's tokens and returns the text that can be shown now."""
        accepted = len(round_.verdict.path)
        for position, token in enumerate(round_.token_ids):
            self._starts.append(len(self._all))
            text = self._detokenizer.push(token) + self._stop.mark(token)
            self._hold(text, drafted=position < accepted)
        return self._release(self._stop.begun(self._all))

    def finish(self) -> list[Piece]:
        """Returns the text that was held back, at the end of generation."""
        self._hold(self._detokenizer.flush(), drafted=False)
        return self._release(0)

    def _hold(self, text: str, *, drafted: bool) -> None:
        self._all += text
        self._drafted += [drafted] * len(text)

    def _release(self, kept: int) -> list[Piece]:
        """Returns the held text but for its last `kept` characters, or up to a stop string."""
        start = self._stop.start(self._all)
        end = len(self._all) - kept if start is None else start
        pieces = []
        for drafted, group in groupby(range(self._shown, end), key=self._drafted.__getitem__):
            text = self._stop.shown("".join(self._all[place] for place in group))
            if text:
                pieces.append(Piece(text, drafted))
        self._shown = max(self._shown, end)
        return pieces


class AnswerView:
    """Writes pieces of the answer to standard output.

    On a terminal they are coloured and their control characters replaced by symbols. Into a pipe or
    file they are unchanged.
    """

    def __init__(self, console: ThemedConsole) -> None:
        self._console = console
        self._at_line_start = True
        self._begun = False

    def show(self, pieces: Sequence[Piece]) -> None:
        text = "".join(piece.text for piece in pieces)
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if not (self._console.is_terminal or sys.stdout.isatty()):
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        styled = Text()
        for piece in pieces:
            shown = streamed(piece.text)
            if not self._begun:
                # the space between the prompt, which is not shown, and the first word
                shown = shown.removeprefix(" ")
            self._begun = True
            styled.append(shown, "token.accepted" if piece.drafted else "token.target")
        self._console.stream(styled)

    def end(self) -> None:
        """Ends the last line of the answer with a line feed, if it has none."""
        if not self._at_line_start:
            self.show([Piece("\n", drafted=False)])


class Segment(NamedTuple):
    """A piece of a round's line: drafted tokens of the same status (such as accepted), the target's
    own token, or a mark like ✗.

    `kind`, a key of `_STYLES`, says which of these it is; "own" is the target's token.
    """

    text: str
    kind: str


def segments(round_: Round, shown: Callable[[Sequence[int]], str]) -> list[Segment]:
    """Returns the pieces of a round's line: the drafted tokens, then the token that the target
    chose. `shown` returns the text of token ids on one line.

    `✗` comes before a rejected token, `→` before a correction, `⊕` before a bonus token. Of a draft
    that is a tree come the accepted path, with `²` after a token that was the second candidate at
    its position, the rejected candidates as `a|b`, and the number of all other nodes.
    """
    line = _chain(round_, shown) if round_.draft.is_chain else _tree(round_, shown)
    token = round_.verdict.token
    source = round_.verdict.source
    if source is not None:
        line += [Segment(" ", "space"), Segment(_MARKS[source], "mark")]
    if token is not None:
        line.append(Segment(shown([token]), "own"))
    if line:
        line[0] = line[0]._replace(text=line[0].text.removeprefix(" "))
    return line


def reason(round_: Round, prompt_length: int) -> str:
    """Returns the words at the end of a round's line: why the draft ended, empty where that is not
    known; for the prefill, which has no draft, the number of prompt tokens."""
    if round_.mode == "prefill":
        return f"prompt, {counted(prompt_length, 'token')}"
    return round_.draft.stop_reason or ""


def _chain(round_: Round, shown: Callable[[Sequence[int]], str]) -> list[Segment]:
    line: list[Segment] = []
    statuses = zip(round_.draft.tokens, round_.statuses, strict=True)
    for status, group in groupby(statuses, key=itemgetter(1)):
        text = shown([token for token, _ in group])
        if status is TokenStatus.REJECTED:
            line += [Segment(" " * (text[:1] == " "), "space"), Segment("✗", "cross")]
            text = text.removeprefix(" ")
        line.append(Segment(text, status.value))
    return line


def _tree(round_: Round, shown: Callable[[Sequence[int]], str]) -> list[Segment]:
    draft = round_.draft
    ranks = Counter[int]()
    line = []
    rejected = []
    discarded = 0
    for token, parent, status in zip(draft.tokens, draft.parents, round_.statuses, strict=True):
        ranks[parent] += 1  # its rank among its siblings
        if status is TokenStatus.ACCEPTED:
            rank = str(ranks[parent]).translate(_SUPERSCRIPTS) if ranks[parent] > 1 else ""
            line.append(Segment(shown([token]) + rank, "accepted"))
        elif status is TokenStatus.REJECTED:
            rejected.append(shown([token]).removeprefix(" "))
        else:
            discarded += 1
    if rejected:
        line += [
            Segment(" ", "space"),
            Segment("✗", "cross"),
            Segment("|".join(rejected), "rejected"),
        ]
    if discarded:
        line += [Segment(" ", "space"), Segment(f"+{discarded}", "discarded")]
    return line


class RoundsView:
    """Prints a legend and one line per round.

    `text_of` returns the text of token ids. `eos_ids` are shown as `<eos>`. `prompt_length` is in
    tokens. `parallel` adds a column for PEARL's two modes, pre-verify and post-verify. `branches`
    explains in the legend the marks of drafts that are trees.
    """

    def __init__(
        self,
        console: Console,
        text_of: Callable[[Sequence[int]], str],
        eos_ids: Collection[int],
        prompt_length: int,
        *,
        parallel: bool = False,
        branches: bool = False,
    ) -> None:
        self._console = console
        self._text_of = text_of
        self._eos_ids = eos_ids
        self._prompt_length = prompt_length
        self._parallel = parallel
        self._branches = branches
        self._lead = LEAD + MODE * parallel

    def legend(self) -> None:
        line = Text("   ").join(
            [
                Text("accepted", "token.accepted"),
                Text.assemble(("✗", "mark.rejected"), ("rejected", "token.rejected")),
                Text("discarded", "token.discarded"),
                Text.assemble(("→", "mark"), ("correction", "token.target")),
                Text.assemble(("⊕", "mark"), ("bonus", "token.target")),
                Text("3/5 accepted", "quiet"),
            ]
        )
        lines = [line]
        if self._branches:
            marks = (
                "a|b: candidates for one position   ²: the second was accepted   +9: other nodes"
            )
            lines.append(Text(marks, "quiet"))
        if self._parallel:
            modes = (
                "pre, post: verified while the next tokens were drafted   ahead: "
                "drafted, not yet verified"
            )
            lines.append(Text(modes, "quiet"))
        for line in lines:
            for part in wrapped(line, self._console.width):
                self._console.print(part)

    def show(self, round_: Round) -> None:
        drafted = len(round_.draft.tokens)
        accepted = f"{len(round_.verdict.path)}/{drafted}" if drafted else ""
        text = Text().join(
            Text(segment.text, _STYLES[segment.kind]) for segment in segments(round_, self._shown)
        )
        why = one_line_text(Text(reason(round_, self._prompt_length), "quiet"))
        width = min(self._console.width, PIPED_WIDTH)  # the reason stays near the text
        column = width - self._lead
        if width >= NARROW:
            column -= len(why) + 2
        else:
            text.append("  ").append_text(why)
        lines = wrapped(text, max(column, 20))
        mode = f"  {MODES.get(round_.mode, ''):<{MODE - 2}}" if self._parallel else ""
        row = Text().append(f"{round_.index:>3}{mode}{accepted:>7}  ", "quiet")
        row.append_text(lines[0])
        if width >= NARROW and why:
            row.append(" " * (width - row.cell_len - why.cell_len)).append_text(why)
        self._console.print(row)
        for line in lines[1:]:
            self._console.print(Text(" " * self._lead).append_text(line))

    def _shown(self, tokens: Sequence[int]) -> str:
        if tokens and tokens[-1] in self._eos_ids:
            before = self._shown(tokens[:-1]) if tokens[:-1] else ""
            return f"{before}<eos>"
        return inline(self._text_of(tokens))


def footer(
    summary: Figures,
    notes: Sequence[str],
    width: int,
    *,
    tuned: str = "",
    where: str = "",
    is_cut: bool = False,
) -> Text:
    """Returns the line below the answer: the method, numbers of tokens, speeds, shares.

    If it is longer than `width` cells, the less important figures are left out, but never `notes`
    and `tuned`. `tuned` names, in words, a method and settings that come from a profile; it is
    empty for others. `where` is the device and the dtype, empty if they are not to be shown.
    `is_cut`: the limit of the user or the default (-n) ended the output.
    """
    figures = _footer_figures(summary, is_cut=is_cut)
    figures["name"] = tuned or summary.method
    if notes:
        figures["name"] += f" ({', '.join(notes)})"
    figures["where"] = where
    styles = {"name": "strong", "shares": "quiet"}
    for left_out in (None, *_DROPPED_FIRST, *_DROPPED_NEXT):
        if left_out is not None and not (left_out == "name" and (notes or tuned)):
            del figures[left_out]
        line = Text("  ").join(
            Text(text, styles.get(key, "none")) for key, text in figures.items() if text
        )
        if line.cell_len <= width:
            break
    # the green word explains the colour of accepted tokens
    line.highlight_words(["accepted"], "token.accepted")
    return line


def _footer_figures(summary: Figures, *, is_cut: bool) -> dict[str, str]:
    """Returns the figures of the footer in their order, each empty if it is not known; `name` and
    `where` are still empty."""
    tokens = counted(summary.new_tokens, "token")
    rate = summary.acceptance_rate
    draft = summary.share_of_time("draft")
    verify = summary.share_of_time("verify")
    drafting = "waiting for the draft" if summary.parallel else "drafting"
    idle = 0.0
    if summary.energy is not None and summary.energy.idle_watts is not None:
        idle = summary.energy.idle_watts
    joules = f"{{}} J/token above {significant(idle)} W idle"
    return {
        "name": "",
        "tokens": f"stopped at {tokens} (-n)" if is_cut else tokens,
        "speed": _figure("decoding {:,.1f} tokens/s", summary.decode_tokens_per_second),
        "prompt": _figure("prompt {:,.0f}/s", summary.prompt_tokens_per_second),
        "perplexity": _figure("perplexity {:.2f}", summary.perplexity),
        "energy": _figure(joules, summary.joules_per_token, 3),
        "accepted": _figure("{:.0%} accepted", rate),
        "sources": ", ".join(" ".join(pair) for pair in summary.by_source),
        "first": _figure("first token {} s", summary.first_token_seconds, 2),
        "where": "",
        "pass": _figure("{:.2f} a pass", None if rate is None else summary.block_efficiency),
        "runs": _figure(
            "{:.1f} per rejection", summary.mean_accepted_run if summary.parallel else None
        ),
        "ties": f"{counted(summary.ties, 'tie')} in the target's logits" if summary.ties else "",
        "shares": "" if rate is None else f"{draft:.0%} {drafting}, {verify:.0%} verifying",
    }


def _figure(template: str, value: float | None, digits: int | None = None) -> str:
    """Returns the text of a figure, empty if it is not known. `digits` rounds it to so many
    significant ones."""
    if value is None:
        return ""
    return template.format(value if digits is None else significant(value, digits))
