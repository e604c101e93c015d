"""SVIP: drafts end where the draft model's entropy is high."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import correlation

from papers.claims import TIME, Claim, unmeasured
from papers.measuring import (
    ACCEPTANCE,
    CLOSE,
    DRAFT_LENGTH,
    FAILS,
    HOLDS,
    PLAIN,
    SPEED,
    TOKENS_A_PASS,
    Bench,
    Costs,
    Measured,
)

CONSTANT = "sd:k=5"
HEURISTIC = "heuristic"
SVIP = "svip"
PRINTED = "svip:c=1"  # Algorithm 1 with the printed thresholds
# the trained draft has half of the published target's layers; the bundled draft is much smaller
COSTS = {"bundled": Costs(0.1, 0.1), "published": Costs(0.4, 0.1)}
C = 0.15  # the authors' constant
LEAST_ENTROPY = 0.01  # nats; below, the ratio of cross-entropy to entropy is noise


def claims(bench: Bench) -> list[Claim]:
    names = [CONSTANT, HEURISTIC, SVIP, PRINTED]
    if bench.is_bundled:
        names += [*_of_heads("glide"), *_of_heads("glide:cape=true"), "eagle", _with_svip("eagle")]
    main = bench.compare(names)
    rows = _table_1(bench, main, "Table 1", ("1.15 to 1.21", "1.03 to 1.21"))
    rows += _figure_5(main)
    sampled = bench.compare([CONSTANT, HEURISTIC, SVIP], "--temperature", "1")
    rows += _table_1(bench, sampled, "Table 5", ("0.99 to 1.57", "1.00 to 1.23"))
    if bench.is_bundled:
        rows += _heads(main)
        rows += _lengths(bench)
    rows += _entropies(bench)
    rows.append(_printed(main))
    return rows


def _with_svip(head: str) -> str:
    """EAGLE-2 decides after every second level, with the paper's threshold."""
    every = ":every=2" if head == "eagle" else ""
    return f"{head}:policy=svip:threshold=0.5{every}"


def _of_heads(head: str) -> Sequence[str]:
    return head, _with_svip(head)


def _table_1(bench: Bench, made: Measured, place: str, paper: tuple[str, str]) -> list[Claim]:
    costs = COSTS[bench.pair]
    rows = []
    for other, figures in zip((CONSTANT, HEURISTIC), paper, strict=True):
        name = "K = 5" if other == CONSTANT else "the heuristic"
        counted = made.ratio(costs.speedup, SVIP, other)
        text = f"SVIP over {name}, where a token costs {costs} target passes: ratio"
        rows.append(Claim(place, text, figures, str(counted), counted.above(), source=made))
        timed = made.ratio(SPEED, SVIP, other)
        text = f"SVIP is faster than {name}: ratio"
        rows.append(Claim(place, text, figures, str(timed), timed.above(), TIME, made))
    plain = made.ratio(SPEED, SVIP, PLAIN)
    text = "SVIP is faster than plain decoding"
    rows.append(Claim(place, text, "1.02 to 3.48", str(plain), plain.above(), TIME, made))
    return rows


def _figure_5(made: Measured) -> list[Claim]:
    rows = []
    for other in (CONSTANT, HEURISTIC):
        rates = [made.of(ACCEPTANCE, spec).value for spec in (SVIP, other)]
        lengths = [made.of(DRAFT_LENGTH, spec).value for spec in (SVIP, other)]
        accepted = made.ratio(ACCEPTANCE, SVIP, other)
        shorter = made.ratio(DRAFT_LENGTH, SVIP, other)
        text = f"SVIP's drafts against `{other}`: more is accepted: ratio"
        ours = f"{accepted}; {rates[0]:.0%} : {rates[1]:.0%}"
        rows.append(Claim("Figure 5", text, "yes", ours, accepted.above(), source=made))
        text = f"SVIP's drafts against `{other}`: shorter: ratio"
        ours = f"{shorter}; {lengths[0]:.1f} : {lengths[1]:.1f} tokens"
        rows.append(Claim("Figure 5", text, "yes", ours, shorter.below(), source=made))
    return rows


def _heads(made: Measured) -> list[Claim]:
    rows = []
    for place, head, paper in (
        ("Table 3", "glide", "1.02 to 1.06"),
        ("Table 3", "glide:cape=true", "1.01 to 1.05"),
        ("Table 4", "eagle", "1.01 to 1.06"),
    ):
        ratio = made.ratio(SPEED, _with_svip(head), head)
        passes = [made.of(TOKENS_A_PASS, spec).value for spec in (_with_svip(head), head)]
        text = f"SVIP makes `{head}` faster: ratio"
        ours = f"{ratio}; {passes[0]:.2f} : {passes[1]:.2f} tokens a pass"
        rows.append(Claim(place, text, paper, ours, ratio.above(), TIME, made))
    return rows


def _lengths(bench: Bench) -> list[Claim]:
    """Tables 2 and 6: short and long outputs."""
    rows = []
    costs = COSTS[bench.pair]
    for tokens in (32, 128, 512):
        made = bench.compare(
            [CONSTANT, SVIP], "--ignore-eos", prompts=bench.fewer, tokens=tokens, repeats=1
        )
        ratio = made.ratio(costs.speedup, SVIP, CONSTANT)
        text = f"SVIP over K = 5, {tokens} tokens each, greedy, costs {costs}: ratio"
        paper = "1.24 to 1.46 (Pythia)"
        rows.append(Claim("Table 6", text, paper, str(ratio), ratio.above(), source=made))
    rows.append(
        unmeasured(
            "Table 2", "the same up to 8K tokens", "", "the bundled context has 1,024 tokens"
        )
    )
    return rows


def _entropies(bench: Bench) -> list[Claim]:
    """Figures 2 to 4 and 8: entropy, acceptance and the bounds."""
    options = ("--record", "distributions")
    made = bench.compare(["sd:k=8"], *options, repeats=1)
    sampled = bench.compare(["sd:k=8"], *options, "--temperature", "1", repeats=1)
    tokens = list(_tokens(made))
    ratios = [1 + kl / entropy for entropy, _, kl, _ in tokens if entropy > LEAST_ENTROPY]
    inside = sum(1.0 <= ratio <= 1.3 for ratio in ratios) / len(ratios)
    bound = sum(overlap >= 1 - math.sqrt(kl / 2) - 1e-4 for _, overlap, kl, _ in tokens)
    estimate = sum(overlap >= 1 - math.sqrt(C * entropy) for entropy, overlap, _, _ in tokens)
    rows = [
        Claim(
            "Figure 3",
            "H(q,p) / H(q) is mostly between 1.0 and 1.3: share of tokens",
            "most tokens",
            f"{inside:.0%} of {len(ratios):,}",
            HOLDS if inside > 0.5 else FAILS,
            source=made,
        ),
        Claim(
            "Figure 4",
            "acceptance is above the lower bound (Pinsker): share of tokens",
            "all",
            f"{bound / len(tokens):.1%}",
            HOLDS if bound == len(tokens) else FAILS,
            source=made,
        ),
        Claim(
            "Figure 4",
            "the estimate 1 - √(cH) is a lower bound: share of tokens above it",
            "nearly all",
            f"{estimate / len(tokens):.1%}",
            HOLDS if estimate > 0.95 * len(tokens) else FAILS,
            source=made,
        ),
    ]
    for place, name, comparison in (
        ("Figure 8", "greedy", made),
        ("Figure 2", "sampling", sampled),
    ):
        judged = [(entropy, was) for entropy, _, _, was in _tokens(comparison) if was is not None]
        value = correlation([entropy for entropy, _ in judged], [float(was) for _, was in judged])
        text = f"high entropy goes with rejection, {name}: correlation with acceptance"
        verdict = HOLDS if value < -0.2 else CLOSE
        ours = f"{value:.2f} over {len(judged):,} tokens"
        rows.append(Claim(place, text, "negative", ours, verdict, source=comparison))
    return rows


def _tokens(made: Measured) -> Iterator[tuple[float, float, float, bool | None]]:
    """Yields entropy, acceptance probability, KL(q||p) of each drafted token, and whether it was
    accepted; None where the target did not judge it."""
    for run in made.runs["sd:k=8"]:
        for line in run.rounds:
            accepted = len(line["accepted_ids"])
            values = zip(line["entropies"], line["overlap"], line["kl"], strict=True)
            for position, (entropy, overlap, kl) in enumerate(values):
                judged = position < accepted if position <= accepted else None
                if None not in (entropy, overlap, kl):
                    yield entropy, overlap, kl, judged


def _printed(made: Measured) -> Claim:
    length = made.ratio(DRAFT_LENGTH, PRINTED, SVIP)
    lengths = [made.of(DRAFT_LENGTH, spec).value for spec in (PRINTED, SVIP)]
    return Claim(
        "Algorithm 1",
        "ours: `c=1`, as printed, drafts as long as the authors' c = 0.15: ratio",
        "",
        f"{length}; {lengths[0]:.1f} : {lengths[1]:.1f} tokens",
        length.above(),
        source=made,
    )
