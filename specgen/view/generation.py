"""What `specgen generate` shows: the answer while it is generated, one line a round, and a line with the run's numbers.

In the answer the draft's tokens have another colour than the target's own. A round's line (a draft and its verification by the
target, as in EESD's Figure 6) shows the drafted tokens and which of them were accepted, the target's own token, and why the draft
ended.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, Protocol

from rich.console import Console
from rich.text import Text

from specgen.base.text import inline, streamed
from specgen.base.types import Round, TokenStatus
from specgen.pair.figures import Summary
from specgen.view.theme import ThemedConsole, one_line_text, wrapped

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


_FOOTER_STYLES = {"name": "strong", "shares": "quiet"}


class Detokenizer(Protocol):
    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Piece(NamedTuple):
    """A piece of the answer's text; `drafted` says whether the draft model proposed its tokens."""

    text: str
    drafted: bool


class AnswerText:
    """Turns the tokens of rounds into pieces of text that end before the first stop string.

    Text that may be the beginning of a stop string is held back until more text shows whether it is.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer, self._stop = detokenizer, stop
        self._held: list[Piece] = []
        self._ended = False
        self.text = ""

    def add(self, round_: Round) -> list[Piece]:
        """Adds a round's tokens and returns the text that can be shown now."""
        accepted = len(round_.verdict.path)
        for position, token in enumerate(round_.token_ids):
            self._held.append(Piece(self._detokenizer.push(token), drafted=position < accepted))
        return self._release(max((_overlap(self._held_text, stop) for stop in self._stop), default=0))

    def finish(self) -> list[Piece]:
        """Returns the text that was held back, at the end of generation."""
        self._held.append(Piece(self._detokenizer.flush(), drafted=False))
        return self._release(0)

    @property
    def _held_text(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _release(self, kept: int) -> list[Piece]:
        """Returns the held text but for its last `kept` characters. A stop string and all text after it are dropped."""
        text = self._held_text
        starts = [text.index(stop) for stop in self._stop if stop in text]
        room = 0 if self._ended else min(starts, default=len(text) - kept)
        self._ended |= bool(starts)
        shown, held = [], []
        for piece, drafted in self._held:
            shown += [Piece(piece[:room], drafted)] if piece[:room] else []
            held += [Piece(piece[room:], drafted)] if piece[room:] else []
            room = max(0, room - len(piece))
        self._held = [] if self._ended else held
        self.text += "".join(piece.text for piece in shown)
        return shown


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins, shorter than `stop` itself."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class AnswerView:
    """Writes pieces of the answer to standard output.

    On a terminal they are coloured and their control characters replaced by symbols. Into a pipe or file they are unchanged.
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
        for drafted, group in groupby(pieces, key=lambda piece: piece.drafted):
            shown = streamed("".join(piece.text for piece in group))
            if not self._begun and not styled:
                shown = shown.removeprefix(" ")  # it separates the first word from the prompt, which is not shown
            styled.append(shown, "token.accepted" if drafted else "token.target")
        self._begun = True
        self._console.stream(styled)

    def end(self) -> None:
        """Ends the last line of the answer with a line feed, if it has none."""
        if not self._at_line_start:
            self.show([Piece("\n", drafted=False)])


class Part(NamedTuple):
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


def footer(summary: Summary, notes: Sequence[str], width: int, *, mono: bool = False, tuned: str = "") -> Text:
    """Returns the line: method, number of tokens, speed, acceptance, tokens per target pass, shares of the time.

    If the line is longer than `width` cells, parts of it are shortened or left out, but never `notes` or `tuned`. `tuned` has, in
    words, the method and the settings that `specgen tune` saved, empty where they are not used. `mono` says that the output has
    no colours: the line then also gives the number of tokens that the target chose itself.
    """
    name = (tuned or summary.method) + (f" ({', '.join(notes)})" if notes else "")
    tokens = f"{summary.new_tokens:,} token{'s' * (summary.new_tokens != 1)}"
    own = f", {summary.new_tokens - summary.accepted:,} the target's own" if mono and summary.drafted else ""
    figures = {"name": name, "tokens": tokens + own, **_figures(summary)}
    words = "wait" if summary.parallel else "draft"
    shorter = [
        ("a pass", figures["a pass"].replace("tokens ", "")),
        ("shares", f"{summary.share_of_time('draft'):.0%} {words} {summary.share_of_time('verify'):.0%} verify"),
        ("shares", ""),
        ("runs", ""),
        ("ties", ""),
        ("tokens", tokens),
        ("name", name if notes or tuned else ""),
        *((figure, "") for figure in ("a pass", "accepted", "energy", "perplexity", "speed")),
    ]
    for figure, text in [("name", name), *shorter]:
        if figures[figure]:
            figures[figure] = text
        line = Text("  ").join(Text(text, _FOOTER_STYLES.get(figure, "none")) for figure, text in figures.items() if text)
        if line.cell_len <= width:
            break
    line.highlight_words(["accepted"], "token.accepted")  # the green word explains the colour of accepted tokens
    return line


def _figures(summary: Summary) -> dict[str, str]:
    """Returns the numbers that follow the token count, as unshortened text under their names; empty where a number is unknown."""
    rate, run, energy = summary.acceptance_rate, summary.mean_accepted_run, summary.energy
    joules, drafting = summary.joules_per_token, "waiting for the draft" if summary.parallel else "drafting"
    policy = f" and {share:.0%} length policy" if (share := summary.share_of_time("policy")) >= 0.01 else ""
    shares = f"{summary.share_of_time('draft'):.0%} {drafting}{policy}, {summary.share_of_time('verify'):.0%} verifying"
    return {
        "speed": f"{summary.tokens_per_second:.1f} tokens/s" if summary.tokens_per_second else "",
        "perplexity": "" if summary.perplexity is None else f"perplexity {summary.perplexity:.2f}",
        "energy": f"{joules:.3g} J/token above {energy.idle_watts:.3g} W idle" if joules is not None and energy else "",
        "accepted": "" if rate is None else f"{rate:.0%} accepted",
        "a pass": "" if rate is None else f"{summary.block_efficiency:.2f} tokens a pass",
        "runs": f"{run:.1f} per rejection" if summary.parallel and run is not None else "",
        "ties": f"{summary.ties} tie{'s' * (summary.ties != 1)} in the target's logits" if summary.ties else "",
        "shares": "" if rate is None else shares,
    }
