"""The line of figures below an answer, shortened to the terminal's width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from specgen.traces.summary import Summary

Segment = tuple[str, str]  # text, style


def footer(summary: Summary, notes: Sequence[str], width: int, *, mono: bool = False, tuned: str = "") -> Text:
    """Method, tokens, speed, acceptance, tokens a pass, shares of the time, at most `width` cells where notes allow.

    Narrow terminals lose the last figures first, then the method's name; `notes` and `tuned` (the method and settings that a
    profile chose, in words) always stay. With `mono` the target's own tokens are counted, since no colour shows them.
    """
    for segments in _variants(summary, notes, mono, tuned):
        line = Text("  ").join(_styled(text, style) for text, style in segments)
        if line.cell_len <= width:
            return line
    return line


def _variants(summary: Summary, notes: Sequence[str], mono: bool, tuned: str) -> list[list[Segment]]:
    """The footer's segments, from the longest variant to the shortest."""
    name = [(summary.method, "strong")]
    noted = f" ({', '.join(notes)})" if notes else ""
    named = [(f"{tuned or summary.method}{noted}", "strong")] if notes or tuned else []
    count = f"{summary.new_tokens:,} token{'s' * (summary.new_tokens != 1)}"
    own = f", {summary.new_tokens - summary.accepted:,} the target's own" if mono and summary.drafted else ""
    tokens, tokens_long = [(count, "")], [(count + own, "")]
    speed = [(f"{summary.tokens_per_second:.1f} tokens/s", "")] if summary.tokens_per_second else []
    rate, efficiency = summary.acceptance_rate, summary.block_efficiency
    accepted = [(f"{rate:.0%} accepted", "accepted")] if rate is not None else []
    drafting, verifying = summary.share_of_time("draft"), summary.share_of_time("verify")
    a_pass = [(f"{efficiency:.2f} a pass", "")] if rate is not None else []
    a_pass_long = [(f"{efficiency:.2f} tokens a pass", "")] if rate is not None else []
    measured = [(f"perplexity {summary.perplexity:.2f}", "")] if summary.perplexity is not None else []
    if summary.joules_per_token is not None and summary.energy is not None:
        measured.append((f"{summary.joules_per_token:.3g} J/token above {summary.energy.idle_watts:.3g} W idle", ""))
    run = summary.mean_accepted_run
    runs = [(f"runs of {run:.1f}", "")] if summary.parallel and run is not None else []
    words = ("waiting for the draft", "wait") if summary.parallel else ("drafting", "draft")
    shares = [(f"{drafting:.0%} {words[1]} {verifying:.0%} verify", "quiet")] if rate is not None else []
    shares_long = [(f"{drafting:.0%} {words[0]}, {verifying:.0%} verifying", "quiet")] if rate is not None else []
    speed += measured
    head = named or name
    return [
        head + tokens_long + speed + accepted + a_pass_long + runs + shares_long,
        *([head + tokens + speed + accepted + a_pass + runs + more for more in (shares, [])] if runs else []),
        head + tokens_long + speed + accepted + a_pass_long + shares_long,
        head + tokens_long + speed + accepted + a_pass + shares,
        head + tokens_long + speed + accepted + a_pass if own else head + tokens + speed + accepted + a_pass + shares,
        head + tokens + speed + accepted + a_pass,
        named + tokens + speed + accepted + a_pass,
        named + tokens + speed + accepted,
        named + tokens + speed,
        named + tokens,
    ]


def _styled(text: str, style: str) -> Text:
    if style != "accepted":
        return Text(text, style)
    number, _, word = text.partition(" ")
    return Text(f"{number} ").append(word, "token.accepted")  # the green word explains the colour of accepted tokens
