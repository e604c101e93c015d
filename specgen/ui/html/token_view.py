"""A run's text with a token's details on hover and tap, and its rounds as a list: HTML, by style sheet alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from specgen.traces.trace_reader import TracedRound, TracedRun
from specgen.types import TokenStatus
from specgen.ui.html.page import running_text, text
from specgen.ui.sanitize import inline
from specgen.ui.terminal.rounds import Kind, parts

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CLASSES: dict[Kind, str] = {"accepted": "acc", "rejected": "rej", "discarded": "dis", "own": "own"}
_SHORT = {TokenStatus.ACCEPTED: "acc", TokenStatus.REJECTED: "gone rej", TokenStatus.DISCARDED: "gone dis"}


def answer(run: TracedRun, name: str) -> Iterator[str]:
    """The text, a span a token, and the switch that shows what was thrown away. `name` tells this answer's switch from others."""
    if not any(traced.round.draft.tokens for traced in run.rounds):  # plain decoding: nothing to tell apart
        yield '<div class="box"><div class="answer plain">'
        yield from _spans(run)
        yield "</div></div>\n"
        return
    yield '<p class="keys"><span class="acc">drafted, accepted</span><span class="own">the target\'s own</span></p>\n'
    yield (
        f'<input type="checkbox" class="gone-switch" id="{name}"><label class="reveal" for="{name}">'
        '<span>show what was thrown away: <span class="rej">rejected</span>, <span class="dis">discarded</span></span></label>\n'
    )
    yield '<div class="box"><div class="answer">'
    yield from _spans(run)
    yield "</div></div>\n"


def _spans(run: TracedRun) -> Iterator[str]:
    texts = committed_texts(run)
    ends = run.finish_reason == "eos"
    for position, traced in enumerate(run.rounds):
        yield from _round_spans(traced, texts, is_last=ends and position == len(run.rounds) - 1)


def committed_texts(run: TracedRun) -> Iterator[str]:
    """The text of each committed token. The last one of a character's several tokens gets it whole."""
    texts: list[str] = []
    for traced in run.rounds:
        texts += [traced.draft_texts[node] for node in traced.round.verdict.path]
        texts += [traced.token_text or ""] if traced.round.verdict.token is not None else []
    whole = run.summary["text"] if run.summary is not None else ""
    if whole and any(_BROKEN in shown for shown in texts):
        _mend(texts, whole)
    return iter(texts)


def _mend(texts: list[str], whole: str) -> None:
    """Put characters of `whole` where tokens hold only parts of them; leave alone what cannot be found in it."""
    start = position = 0
    while position < len(texts):
        end = position
        while end < len(texts) and _BROKEN in texts[end]:
            end += 1
        if end == position:
            shown = (
                texts[position] if start else texts[position].removeprefix(" ") if not whole.startswith(" ") else texts[position]
            )
            start += len(shown) if whole.startswith(shown, start) else 0
            position += 1
            continue
        found = len(whole) if end == len(texts) else whole.find(texts[end], start + 1)
        if start < found <= start + 2 * (end - position):
            texts[position : end - 1] = [""] * (end - 1 - position)
            texts[end - 1] = whole[start:found]
            start = found
        position = end


def _round_spans(traced: TracedRound, texts: Iterator[str], *, is_last: bool) -> Iterator[str]:
    """The accepted tokens, then what was thrown away, then the target's own. Of a tree the other branches are left out."""
    round_ = traced.round
    path, statuses, count = round_.verdict.path, round_.statuses, len(round_.draft.tokens)
    is_chain = round_.draft.is_chain
    for position, node in enumerate(path):
        is_end = is_last and position == len(path) - 1 and round_.verdict.token is None
        yield _span(
            "acc", _committed("⟨eos⟩" if is_end else next(texts), is_end), _drafted_tip(traced, node, count, statuses[node])
        )
        if is_end:
            next(texts, None)
    for node, status in enumerate(statuses):
        if status is TokenStatus.REJECTED or (status is TokenStatus.DISCARDED and is_chain):
            yield _span(_SHORT[status], _spaced(_word(traced.draft_texts[node])), _drafted_tip(traced, node, count, status))
    if round_.verdict.token is not None:
        shown = next(texts)
        yield _span("own", _committed("⟨eos⟩" if is_last else shown, is_last), _own_tip(traced, shown))


def _span(kind: str, content: str, tip: str) -> str:
    """`content` and `tip` are HTML."""
    return f'<span class="tok {kind}" tabindex="-1" data-tip="{tip}">{content}</span>'


@lru_cache(1 << 16)
def _word(token: str) -> str:
    """A token's text, made visible and escaped once: a long trace holds few different ones."""
    return text(token)


def _committed(shown: str, is_end: bool) -> str:
    return f'<i class="eos">{shown}</i>' if is_end else _spaced(running_text(shown))


def _spaced(shown: str) -> str:
    """White space stands outside what is underlined or struck through; `shown` is HTML."""
    core = shown.strip(" \n\t")
    if not core:
        return shown or "<i></i>"
    start = shown.index(core)
    return f"{shown[:start]}<i>{core}</i>{shown[start + len(core) :]}"


def _drafted_tip(traced: TracedRound, node: int, count: int, status: TokenStatus) -> str:
    draft = traced.round.draft
    figures = (
        ("entropy", draft.entropies, ".2f"),
        ("top probability", draft.top_probs, ".0%"),
        ("overlap", traced.overlap, ".2f"),
        ("divergence", traced.kl, ".2f"),
    )
    told = ", ".join(
        f"{name} {values[node]:{shape}}" for name, values, shape in figures if values and not math.isnan(values[node])
    )
    name = f"“{_word(traced.draft_texts[node])}”, id {draft.tokens[node]}: drafted, {status.value}."
    return f"{name} Round {traced.round.index}, {node + 1} of {count}." + (f" {told[0].upper()}{told[1:]}." if told else "")


def _own_tip(traced: TracedRound, shown: str) -> str:
    round_ = traced.round
    name = f"“{_word(shown)}”, id {round_.verdict.token}: the target's own"
    if round_.verdict.source == "bonus":
        why = ", after a draft that was wholly right"
    elif round_.mode == "prefill":
        why = ", from reading the prompt"
    else:
        refused = [
            word for word, status in zip(traced.draft_texts, round_.statuses, strict=True) if status is TokenStatus.REJECTED
        ]
        why = f", instead of the draft's {' or '.join(f'“{_word(word)}”' for word in refused[:4])}" if refused else ""
    return f"{name}{why}. Round {round_.index}."


def rounds_list(run: TracedRun) -> Iterator[str]:
    """All rounds, folded: one line each, as in the terminal."""
    count = len(run.rounds)
    yield f'<details><summary>All {count:,} round{"s" * (count != 1)}</summary><ol class="list">'
    texts = run.texts()

    def shown(ids: Sequence[int]) -> str:
        return inline("".join(texts[token] for token in ids))  # together: a space before spaces makes an indentation

    for traced in run.rounds:
        round_ = traced.round
        drafted = len(round_.draft.tokens)
        kept = f"{len(round_.verdict.path)}/{drafted}" if drafted else ""
        line = "".join(_marked(part.text, part.kind) for part in parts(round_, shown))
        yield (
            f'<li><span class="i">{round_.index}</span><span class="c">{kept}</span><span class="s">{line}</span>'
            f'<span class="w">{text(_reason(traced, len(run.start["prompt_ids"])))}</span></li>'
        )
    yield "</ol></details>\n"


def _marked(shown: str, kind: Kind) -> str:
    """White space outside the styled part, as in the text above."""
    core = shown.strip(" ")
    if kind == "space" or not core:
        return text(shown) if core else shown
    lead = shown[: len(shown) - len(shown.lstrip(" "))]
    tail = shown[len(lead) + len(core) :]
    if kind in ("cross", "mark"):
        return f"{lead}<b{' class=cross' if kind == 'cross' else ''}>{text(core)}</b>{tail}"
    return f'{lead}<span class="{_CLASSES[kind]}">{text(core)}</span>{tail}'


def _reason(traced: TracedRound, prompt_tokens: int) -> str:
    if traced.round.mode == "prefill":
        return f"prompt, {prompt_tokens:,} token{'s' * (prompt_tokens != 1)}"
    mode = {"pre-verify": "pre, ", "post-verify": "post, "}.get(traced.round.mode, "")
    return mode + (traced.round.draft.stop_reason or "")
