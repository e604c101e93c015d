"""The line below an answer with its numbers, such as speed and acceptance, shortened to the terminal's width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from specgen.pair.figures import Summary

_STYLES = {"name": "strong", "shares": "quiet"}


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
        line = Text("  ").join(Text(text, _STYLES.get(figure, "none")) for figure, text in figures.items() if text)
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
