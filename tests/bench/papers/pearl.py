"""PEARL: draft and target run at the same time."""

from __future__ import annotations

from dataclasses import replace

from papers.claims import TIME, Claim
from papers.measuring import (
    ACCEPTED_A_REJECTION,
    CLOSE,
    FAILS,
    HOLDS,
    PLAIN,
    SPEED,
    TOKENS_A_PASS,
    Bench,
    Measured,
    Quantity,
)

PEARL = "pearl"
SEQUENTIAL = ["sd:k=3", "sd:k=5", "sd:k=8"]
WITHOUT = {"pearl:pre_verify=false": "pre-verify", "pearl:post_verify=false": "post-verify"}
WINDOWS = {"bundled": (2, 4, 6, 8, 12, 16), "published": (1, 2, 3, 4)}
# of judged tokens, the accepted ones
JUDGED_RATE = Quantity(
    lambda run: float(run.summary["accepted"]),
    lambda run: float(run.summary["accepted"] + run.summary["rejections"]),
)


def claims(bench: Bench) -> list[Claim]:
    if bench.is_bundled:
        return _of_pair(bench, "")
    found = []
    for dtype in ("auto", "int8", "int4"):
        stored = "as stored" if dtype == "auto" else dtype
        options = () if dtype == "auto" else ("--draft-dtype", dtype)
        found += _of_pair(bench, f", draft {stored}", *options)
    return found


def _of_pair(bench: Bench, draft: str, *options: str) -> list[Claim]:
    """The claims for one draft, which `draft` names; `options` load it."""
    windows = [f"pearl:window={size}" for size in WINDOWS[bench.pair]]
    made = bench.compare([*SEQUENTIAL, PEARL, *WITHOUT, *windows], *options, prompts=bench.fewer)
    found = [
        *_speeds(made),
        *_accepted(made),
        *_ablations(made),
        _best_window(made, windows),
    ]
    return [replace(claim, text=claim.text + draft) for claim in found]


def _speeds(made: Measured) -> list[Claim]:
    plain = made.ratio(SPEED, PEARL, PLAIN)
    best = made.best(SPEED, SEQUENTIAL)
    sequential = made.ratio(SPEED, PEARL, best)
    return [
        Claim(
            "Tables 1, 2",
            "faster than plain decoding",
            "2.35 to 3.79",
            str(plain),
            plain.above(),
            TIME,
            made,
        ),
        Claim(
            "Tables 1, 2",
            f"faster than sequential drafting (best: `{best}`): ratio",
            "1.33 to 1.52",
            str(sequential),
            sequential.above(),
            TIME,
            made,
        ),
    ]


def _accepted(made: Measured) -> list[Claim]:
    """Table 4 and Theorem 2: accepted tokens until a rejection."""
    own = made.of(ACCEPTED_A_REJECTION, PEARL)
    passes = made.ratio(TOKENS_A_PASS, PEARL, "sd:k=5")
    rate = made.of(JUDGED_RATE, "sd:k=5").value
    expected = 1 / (1 - rate)
    printed = expected + 1
    # the token after the accepted ones is the target's own
    measured = replace(own, value=own.value + 1, low=own.low + 1, high=own.high + 1)
    agrees = [measured.low <= figure <= measured.high for figure in (expected, printed)]
    verdicts = [HOLDS if each else FAILS for each in agrees]
    if all(agrees):
        verdicts = [CLOSE, CLOSE]
    basis = f"from the acceptance {rate:.2f} of `sd:k=5`"
    return [
        Claim(
            "Table 4",
            "accepted tokens until a rejection, above 5 (the most of K = 5)",
            "27 to 40 (SD: 5 to 8)",
            str(own),
            own.above(5.0),
            source=made,
        ),
        Claim(
            "Theorem 2",
            "tokens until a rejection are 1 / (1 - α), as corrected",
            "",
            f"{measured} measured, {expected:.2f} {basis}",
            verdicts[0],
            source=made,
        ),
        Claim(
            "Theorem 2",
            "they are 1 / (1 - α) + 1, as printed",
            "yes",
            f"{measured} measured, {printed:.2f} {basis}",
            verdicts[1],
            source=made,
        ),
        Claim(
            "section 4.2",
            "more tokens a target pass than sequential drafting: ratio to `sd:k=5`",
            "yes",
            str(passes),
            passes.above(),
            source=made,
        ),
    ]


def _ablations(made: Measured) -> list[Claim]:
    found = []
    papers = {"pre-verify": "0.87 to 0.94", "post-verify": "0.68 to 0.75"}
    for spec, name in WITHOUT.items():
        ratio = made.ratio(SPEED, spec, PEARL)
        text = f"slower without {name}: ratio"
        found.append(Claim("Table 3", text, papers[name], str(ratio), ratio.below(), TIME, made))
    return found


def _best_window(made: Measured, windows: list[str]) -> Claim:
    """Theorem 1: the window that is chosen from measured passes, c, against others."""
    best = made.best(SPEED, windows)
    ratio = made.ratio(SPEED, PEARL, best)
    chosen = made.runs[PEARL][0].settings["window"]
    verdict = HOLDS if ratio.high >= 1 else FAILS
    return Claim(
        "Theorem 1, Tables 5, 6",
        "the window c is the best",
        "yes",
        f"`window={chosen}` over the best of the others (`{best}`): {ratio}",
        verdict,
        TIME,
        made,
    )
