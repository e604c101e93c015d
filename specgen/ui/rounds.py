"""One line a round, as in EESD's Figure 6: what was drafted, what stood, what the target said instead, what ended the draft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rich.console import Console
from rich.text import Text

from specgen.types import Fate, Round
from specgen.ui.visible import inline

LEAD = 12  # columns before a round's text: its number and how many were kept
MODES = {"pre-verify": "pre", "post-verify": "post"}  # PEARL's rounds, in a column of their own
MODE = 5  # its columns
NARROW = 80  # below this the reason follows the text
_STYLES = {
    Fate.ACCEPTED: "token.accepted",
    Fate.REJECTED: "token.rejected",
    Fate.DISCARDED: "token.discarded",
}


class RoundsView:
    """`text_of` turns ids into text for display. `parallel` rounds are PEARL's, `window` a line that says how it was found."""

    def __init__(
        self,
        console: Console,
        text_of: Callable[[Sequence[int]], str],
        eos_ids: Collection[int],
        prompt_length: int,
        *,
        parallel: bool = False,
        window: str = "",
    ) -> None:
        self._console, self._text_of, self._eos_ids, self._prompt_length = console, text_of, eos_ids, prompt_length
        self._parallel, self._window = parallel, window
        self._lead = LEAD + MODE * parallel

    def legend(self) -> None:
        line = Text()
        line.append("accepted", "token.accepted").append("   ")
        line.append("✗", "mark.rejected").append("rejected", "token.rejected").append("   ")
        line.append("discarded", "token.discarded").append("   ")
        line.append("→", "mark").append("correction", "token.target").append("   ")
        line.append("⊕", "mark").append("bonus", "token.target")
        line.append("\n" if self._console.width < NARROW else "   ").append("3/5 accepted of drafted", "quiet")
        if self._parallel:
            line.append("\npre, post", "quiet").append(": judged while the next tokens were drafted", "quiet")
            line.append("   ahead: drafted, not judged yet", "quiet")
            line.append(f"\n{self._window}" if self._window else "", "quiet")
        self._console.print(line)

    def show(self, round_: Round) -> None:
        drafted = len(round_.draft.tokens)
        kept = f"{len(round_.verdict.path)}/{drafted}" if drafted else ""
        text = self._tokens(round_)
        reason = Text(self._reason(round_), "quiet")
        width = self._console.width
        column = width - self._lead
        if width >= NARROW:
            column -= len(reason) + 2
        else:
            text.append("  ").append_text(reason)
        lines = text.wrap(self._console, max(column, 20))
        lines[0].rstrip()
        mode = f"  {MODES.get(round_.mode, ''):<{MODE - 2}}" if self._parallel else ""
        row = Text().append(f"{round_.index:>3}{mode}{kept:>7}  ", "quiet").append_text(lines[0])
        if width >= NARROW and reason:
            row.append(" " * (width - row.cell_len - reason.cell_len)).append_text(reason)
        for line in lines[1:]:
            line.rstrip()
            row.append("\n" + " " * self._lead).append_text(line)
        self._console.print(row)

    def _reason(self, round_: Round) -> str:
        if round_.mode == "prefill":
            return f"prompt, {self._prompt_length:,} token{'s' * (self._prompt_length != 1)}"
        return round_.draft.stop_reason or ""

    def _tokens(self, round_: Round) -> Text:
        """The draft's tokens by fate, then the target's own."""
        line = Text()
        for fate, tokens in _by_fate(round_):
            shown = self._shown(tokens)
            if not line:
                shown = shown.removeprefix(" ")
            if fate is Fate.REJECTED:
                line.append(" " * (shown[:1] == " ")).append("✗", "mark.rejected")
                shown = shown.removeprefix(" ")
            line.append(shown, _STYLES[fate])
        if round_.verdict.token is not None:
            own = self._shown([round_.verdict.token])
            marks = {"correction": "→", "bonus": "⊕"}
            if round_.verdict.source is None:
                line.append(own.removeprefix(" "), "token.target")
            else:
                line.append(" ").append(marks[round_.verdict.source], "mark").append(own, "token.target")
        return line

    def _shown(self, tokens: Sequence[int]) -> str:
        if tokens and tokens[-1] in self._eos_ids:
            return (self._shown(tokens[:-1]) if tokens[:-1] else "") + "<eos>"
        return inline(self._text_of(tokens))


def _by_fate(round_: Round) -> list[tuple[Fate, list[int]]]:
    """The draft's tokens: what was accepted, each that was refused (a tree may have several), what was discarded, by branches."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(round_.draft.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), node))
    fates = round_.fates
    groups: list[tuple[Fate, list[int]]] = []
    for node in sorted(range(len(paths)), key=lambda node: (list(Fate).index(fates[node]), paths[node])):
        if not groups or groups[-1][0] is not fates[node] or fates[node] is Fate.REJECTED:
            groups.append((fates[node], []))
        groups[-1][1].append(round_.draft.tokens[node])
    return groups
