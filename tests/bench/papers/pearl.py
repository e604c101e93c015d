"""PEARL: draft and target run at the same time."""

from __future__ import annotations

from dataclasses import replace

from papers.claims import TIME, Claim, unmeasured
from papers.measuring import (
    ACCEPTED_A_REJECTION,
    CLOSE,
    HOLDS,
    PLAIN,
    SPEED,
    TOKENS_A_PASS,
    Bench,
    Estimate,
    Measured,
    Quantity,
)

PEARL = "pearl"
SEQUENTIAL = ["sd:k=3", "sd:k=5", "sd:k=8"]
WITHOUT = {"pre_verify": "0.87 to 0.94", "post_verify": "0.68 to 0.75"}  # the paper's Table 3
WINDOWS = {"bundled": (2, 4, 6, 8, 12, 16), "published": (1, 2, 3, 4)}
# of judged tokens, the accepted ones
JUDGED_RATE = Quantity(
    lambda run: float(run.summary["accepted"]),
    lambda run: float(run.summary["accepted"] + run.summary["rejections"]),
)


def claims(bench: Bench) -> list[Claim]:
    if bench.is_bundled:
        return _of_pair(bench, "")
    rows = []
    for dtype in ("auto", "int8", "int4"):
        stored = "as stored" if dtype == "auto" else dtype
        options = () if dtype == "auto" else ("--draft-dtype", dtype)
        rows += _of_pair(bench, f", draft {stored}", *options)
    return rows


def _of_pair(bench: Bench, draft: str, *options: str) -> list[Claim]:
    """The claims for one draft, which `draft` names; `options` load it."""
    passes = bench.passes(*options)
    window = passes["pearl_window"]
    own = f"{PEARL}:window={window}"
    in_turn = f"sd:k={window}"
    others = [f"{PEARL}:window={size}" for size in WINDOWS[bench.pair] if size != window]
    ablations = [f"{own}:{phase}=false" for phase in WITHOUT]
    specs = dict.fromkeys([*SEQUENTIAL, in_turn, PEARL, own, *ablations, *others])
    made = bench.compare([*specs], *options, prompts=bench.fewer)
    rows = [
        *_speeds(made, own),
        *_accepted(made, own),
        *_ablations(made, own),
        _best_window(made, own, others),
        _gain(made, own, in_turn, passes["pearl_gain_over_sd"]),
    ]
    return [replace(claim, text=claim.text + draft) for claim in rows]


def _speeds(made: Measured, own: str) -> list[Claim]:
    plain = made.ratio(SPEED, own, PLAIN)
    best = made.best(SPEED, SEQUENTIAL)
    sequential = made.ratio(SPEED, own, best)
    default = made.ratio(SPEED, PEARL, own)
    return [
        Claim(
            "Tables 1, 2",
            f"`{own}` is faster than plain decoding",
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
        Claim(
            "ours",
            f"`{PEARL}`, which may let the models take turns, is faster than `{own}`: ratio",
            "",
            str(default),
            default.above(),
            TIME,
            made,
        ),
    ]


def _accepted(made: Measured, own: str) -> list[Claim]:
    """Table 4 and Theorem 2: accepted tokens until a rejection."""
    accepted = made.of(ACCEPTED_A_REJECTION, own)
    passes = made.ratio(TOKENS_A_PASS, own, "sd:k=5")
    rate = made.of(JUDGED_RATE, "sd:k=5").value
    expected = 1 / (1 - rate)
    printed = expected + 1
    # the token after the accepted ones is the target's own
    measured = Estimate(accepted.value + 1, accepted.low + 1, accepted.high + 1)
    verdicts = [measured.near(figure) for figure in (expected, printed)]
    if verdicts == [HOLDS, HOLDS]:
        verdicts = [CLOSE, CLOSE]
    basis = f"from the acceptance {rate:.2f} of `sd:k=5`"
    return [
        Claim(
            "Table 4",
            "accepted tokens until a rejection, above 5 (the most of K = 5)",
            "27 to 40 (SD: 5 to 8)",
            str(accepted),
            accepted.above(5.0),
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


def _ablations(made: Measured, own: str) -> list[Claim]:
    rows = []
    for phase, paper in WITHOUT.items():
        ratio = made.ratio(SPEED, f"{own}:{phase}=false", own)
        text = f"slower without {phase.replace('_', '-')}: ratio"
        rows.append(Claim("Table 3", text, paper, str(ratio), ratio.below(), TIME, made))
    return rows


def _gain(made: Measured, own: str, in_turn: str, expected: float | None) -> Claim:
    """What overlapping passes gains by their times, against the clock."""
    ratio = made.ratio(SPEED, own, in_turn)
    text = f"the times of passes (`specgen inspect --measure`) predict the gain over `{in_turn}`"
    if expected is None:
        return unmeasured("ours", text, "", "passes of one model alone were not timed")
    return Claim(
        "ours",
        text,
        "",
        f"{expected:.2f} predicted at 70 % acceptance, {ratio} measured",
        ratio.near(expected),
        TIME,
        made,
    )


def _best_window(made: Measured, own: str, others: list[str]) -> Claim:
    """Theorem 1: the window that follows from measured passes, c, against others."""
    best = made.best(SPEED, others)
    ratio = made.ratio(SPEED, own, best)
    return Claim(
        "Theorem 1, Tables 5, 6",
        "the window c is the best",
        "yes",
        f"`{own}` over the best of the others (`{best}`): {ratio}",
        ratio.above(),
        TIME,
        made,
    )
