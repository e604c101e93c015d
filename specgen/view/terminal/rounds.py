"""Prints one line per round (a draft and its verification by the target), as in EESD's Figure 6.

A line shows the drafted tokens and which of them were accepted, the target's own token, and why the draft ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rich.console import Console
from rich.text import Text

from specgen.base.sanitize import inline
from specgen.base.types import Round, TokenStatus
from specgen.view.terminal.text_layout import wrapped
from specgen.view.theme import one_line_text

LEAD = 12  # cells before a round's text, for its number and accepted/drafted
MODES = {"pre-verify": "pre", "post-verify": "post"}  # PEARL's modes, shown after a round's number
MODE = 6  # cells of the column with PEARL's mode
NARROW = 80  # cells; on narrower terminals the words on why a draft ended follow the tokens
Kind = Literal["accepted", "rejected", "discarded", "own", "cross", "mark", "space"]
_STYLES: Mapping[Kind, str] = {
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


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a round's line: drafted tokens of the same status (such as accepted), the target's own token, or a mark like ✗.

    `kind` says which of these it is; "own" is the target's token.
    """

    text: str
    kind: Kind


def parts(round_: Round, shown: Callable[[Sequence[int]], str]) -> list[Part]:
    """Returns the pieces of a round's line: the drafted tokens, then the token that the target chose.

    `→` comes before a correction and `⊕` before a bonus token. `✗` comes before a rejected token. `shown` returns the text of
    token ids on one line. If the draft is a tree, its accepted path is shown, with `²` after a token that was the second
    candidate at its position, then the rejected candidates as `a|b`.
    """
    line = _chain(round_, shown) if round_.draft.is_chain else _tree(round_, shown)
    if line:
        line[0] = Part(line[0].text.removeprefix(" "), line[0].kind)
        line = line if line[0].text else line[1:]
    if round_.verdict.token is not None:
        own = shown([round_.verdict.token])
        if round_.verdict.source is None:
            line.append(Part(own.removeprefix(" "), "own"))
        else:
            line += [Part(" ", "space"), Part(_MARKS[round_.verdict.source], "mark"), Part(own, "own")]
    return line


def reason(round_: Round, prompt_length: int) -> str:
    """Returns the words at the end of a round's line: why the draft ended, empty where no reason is known.

    The round "prefill", which only processes the prompt, has no draft. Its words are the number of prompt tokens,
    `prompt_length`.
    """
    if round_.mode == "prefill":
        return f"prompt, {prompt_length:,} token{'s' * (prompt_length != 1)}"
    return round_.draft.stop_reason or ""


def _chain(round_: Round, shown: Callable[[Sequence[int]], str]) -> list[Part]:
    line: list[Part] = []
    statuses = zip(round_.draft.tokens, round_.statuses, strict=True)
    for status, group in groupby(statuses, key=lambda entry: entry[1]):
        text = shown([token for token, _ in group])
        if status is TokenStatus.REJECTED:
            line += [Part(" " * (text[:1] == " "), "space"), Part("✗", "cross")]
            text = text.removeprefix(" ")
        line.append(Part(text, status.value))
    return line


def _tree(round_: Round, shown: Callable[[Sequence[int]], str]) -> list[Part]:
    draft = round_.draft
    line: list[Part] = []
    accepted, children = set(round_.verdict.path), Counter[int]()
    for node, parent in enumerate(draft.parents):
        children[parent] += 1
        if node not in accepted:
            continue
        rank = children[parent]  # among its siblings
        line.append(Part(shown([draft.tokens[node]]) + (str(rank).translate(_SUPERSCRIPTS) if rank > 1 else ""), "accepted"))
    rejected = [draft.tokens[node] for node, status in enumerate(round_.statuses) if status is TokenStatus.REJECTED]
    if rejected:
        line += [Part(" ", "space"), Part("✗", "cross")]
        line.append(Part("|".join(shown([token]).removeprefix(" ") for token in rejected), "rejected"))
    return line


class RoundsView:
    """Prints a legend and one line per round.

    `text_of` returns the text of token ids. `eos_ids` are shown as `<eos>`. `prompt_length` is in tokens. `parallel` adds a
    column for PEARL's two modes, pre-verify and post-verify. `window` is a line for the legend that says how PEARL's window (the
    number of tokens drafted during a target pass) was chosen. `branches` explains in the legend the marks of drafts that are
    trees.
    """

    def __init__(
        self,
        console: Console,
        text_of: Callable[[Sequence[int]], str],
        eos_ids: Collection[int],
        prompt_length: int,
        *,
        parallel: bool = False,
        window: str = "",
        branches: bool = False,
    ) -> None:
        self._console, self._text_of, self._eos_ids, self._prompt_length = console, text_of, eos_ids, prompt_length
        self._parallel, self._window, self._branches = parallel, window, branches
        self._lead = LEAD + MODE * parallel

    def legend(self) -> None:
        line = Text()
        line.append("accepted", "token.accepted").append("   ")
        line.append("✗", "mark.rejected").append("rejected", "token.rejected").append("   ")
        line.append("discarded", "token.discarded").append("   ")
        line.append("→", "mark").append("correction", "token.target").append("   ")
        line.append("⊕", "mark").append("bonus", "token.target")
        key = Text("3/5 accepted of drafted", "quiet")
        if line.cell_len + 3 + key.cell_len <= self._console.width:
            self._console.print(line.append("   ").append_text(key))
        else:
            self._print_wrapped(line)
            self._print_wrapped(key)
        if self._branches:
            self._print_wrapped(Text("a|b: candidates for one position   ²: the second one was accepted", "quiet"))
        if self._parallel:
            modes = "pre, post: verified while the next tokens were drafted   ahead: drafted, not yet verified"
            for text in filter(None, (modes, self._window)):
                self._print_wrapped(Text(text, "quiet"))

    def _print_wrapped(self, line: Text) -> None:
        for part in wrapped(line, self._console.width):
            self._console.print(part)

    def show(self, round_: Round) -> None:
        drafted = len(round_.draft.tokens)
        accepted = f"{len(round_.verdict.path)}/{drafted}" if drafted else ""
        text = self._tokens(round_)
        why = one_line_text(Text(reason(round_, self._prompt_length), "quiet"))
        width = self._console.width
        column = width - self._lead
        if width >= NARROW:
            column -= len(why) + 2
        else:
            text.append("  ").append_text(why)
        lines = wrapped(text, max(column, 20))
        mode = f"  {MODES.get(round_.mode, ''):<{MODE - 2}}" if self._parallel else ""
        row = Text().append(f"{round_.index:>3}{mode}{accepted:>7}  ", "quiet").append_text(lines[0])
        if width >= NARROW and why:
            row.append(" " * (width - row.cell_len - why.cell_len)).append_text(why)
        self._console.print(row)
        for line in lines[1:]:
            self._console.print(Text(" " * self._lead).append_text(line))

    def _tokens(self, round_: Round) -> Text:
        """Returns the drafted tokens, each in the style of its status (such as accepted), and then the target's own token."""
        return Text().join(Text(part.text, _STYLES[part.kind]) for part in parts(round_, self._shown))

    def _shown(self, tokens: Sequence[int]) -> str:
        if tokens and tokens[-1] in self._eos_ids:
            return (self._shown(tokens[:-1]) if tokens[:-1] else "") + "<eos>"
        return inline(self._text_of(tokens))
