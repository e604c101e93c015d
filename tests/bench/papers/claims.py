"""A paper's claims with their evidence, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from papers.measuring import UNMEASURED, Measured

TIME = "time"
COUNTS = "counts"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper: where it stands (`place`), what it says, the paper's figures and ours.

    `kind` is `COUNTS`, which no load of the machine disturbs, or `TIME`. `source` is the comparison
    that our figure is from; None: there is none.
    """

    place: str
    text: str
    paper: str
    ours: str
    verdict: str
    kind: str = COUNTS
    source: Measured | None = None


def unmeasured(place: str, text: str, paper: str, why: str) -> Claim:
    return Claim(place, text, paper, why, UNMEASURED, "")


def table(claims: Sequence[Claim]) -> str:
    """Returns a Markdown table of the claims, then their commands by letter."""
    letters: dict[str, str] = {}
    lines = ["where | claim | paper | here | verdict | from", "---|---|---|---|---|---"]
    for claim in claims:
        origin = ""
        if claim.source is not None:
            command = claim.source.command
            letter = letters.setdefault(command, chr(ord("A") + len(letters)))
            origin = f"{letter}, {claim.kind}"
        cells = (claim.place, claim.text, claim.paper, claim.ours, f"**{claim.verdict}**", origin)
        lines.append(" | ".join(cells))
    lines.append("")
    lines += [f"- {letter}: `{command}`" for command, letter in letters.items()]
    return "\n".join(lines)
