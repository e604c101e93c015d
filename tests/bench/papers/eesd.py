"""EESD: early exit with Thompson sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import specgen
from papers.claims import TIME, Claim, unmeasured
from papers.measuring import (
    CLOSE,
    FAILS,
    HARMONIC_MEAN,
    HOLDS,
    PLAIN,
    SPEED,
    TOKENS_A_PASS,
    Bench,
    Costs,
    Measured,
    Run,
    share_of_time,
)
from specgen.compare.prompts import load_prompts
from specgen.decoding.policy_base import DraftedToken, LengthPolicy

CALI = "eesd:policy=cali-ts"
BETA = "eesd:policy=beta-ts"
THRESHOLD = "eesd, the predictor with a threshold"  # `PredictorThreshold`, which has no name
WITHOUT_MODEL = f"{CALI}:model_prediction=false"
WITHOUT_SAMPLING = f"{CALI}:sampling_prediction=false"
KNOWN_RATE = f"{BETA}:alpha=70:beta=25"  # about the acceptance rate, as if it were learned already
TREE = f"{CALI}:width=3:depth=5"
SVIP = "eesd:policy=svip"
FIXED = [f"eesd:k={length}" for length in (1, 2, 3, 4, 5, 10)]
K10 = FIXED[-1]
PRINTED = [f"{policy}:rule=printed" for policy in (CALI, BETA)]
SELF_SD = "selfsd:skip=5+6a+7m:policy=fixed:k=10"
SELF_SD_BETA = "selfsd:skip=5+6a+7m:policy=beta-ts"
# cheap drafts, as of an exit after 5 of 80 layers; in between; as of the bundled pair on a CPU
COSTS = (Costs(0.1, 0.02), Costs(0.3, 0.1), Costs(0.6, 0.15))


class PredictorThreshold(LengthPolicy):
    """Ends a draft after a token whose predicted acceptance is below a threshold: Cali-TS's
    predictor without its draw."""

    signals = frozenset({"predicted_acceptance"})
    threshold = 0.7

    def keep_drafting(self, token: DraftedToken) -> bool:
        return token["predicted_acceptance"] >= self.threshold and self._below(40, token)


def claims(bench: Bench) -> list[Claim]:
    adaptive = [f"eesd:{costs.settings}" for costs in COSTS]
    specs = [CALI, BETA, WITHOUT_MODEL, WITHOUT_SAMPLING, *FIXED, SVIP, "eesd", *adaptive]
    specs += [KNOWN_RATE, *PRINTED]
    if not bench.is_bundled and bench.exit_layer is None:
        why = "no exit layer for the published target: --exit-layer FOLDER"
        return [unmeasured("all", "EESD on the published target", "", why)]
    main = bench.compare([*specs, TREE, "sd:k=10", "beta-ts", *_others(bench)], "--predict")
    rows = [
        *_speeds(bench, main),
        *_policies(main),
        *_fixed_lengths(main),
        *_why(bench, main),
        *_rest(bench, main),
    ]
    if bench.is_bundled:
        rows += _longer(bench)
    return rows + _trainings()


def _others(bench: Bench) -> list[str]:
    return [SELF_SD, SELF_SD_BETA, "medusa"] if bench.is_bundled else []


def _speeds(bench: Bench, main: Measured) -> list[Claim]:
    plain = main.ratio(SPEED, CALI, PLAIN)
    rows = [
        Claim(
            "Tables 1 to 3",
            "Cali-TS is faster than plain decoding",
            "1.27 to 2.45",
            str(plain),
            plain.above(),
            TIME,
            main,
        )
    ]
    papers = {"sd:k=10": "2.29 : 1.88", SELF_SD: "2.29 : 1.37", "medusa": "2.29 : 1.73"}
    for other in ["sd:k=10", *[name for name in _others(bench) if name in papers]]:
        ratio = main.ratio(SPEED, CALI, other)
        text = f"Cali-TS is faster than `{other.partition(':skip')[0]}`: ratio"
        paper = f"{papers[other]} (LLaMA-2-70B)"
        rows.append(Claim("Table 1", text, paper, str(ratio), ratio.above(), TIME, main))
    return rows


def _policies(main: Measured) -> list[Claim]:
    """Tables 1 and 4: by the harmonic mean, which are counts."""

    def compared(place: str, other: str, text: str, paper: str) -> Claim:
        ratio = main.ratio(HARMONIC_MEAN, CALI, other)
        values = [100 * main.of(HARMONIC_MEAN, spec).value for spec in (CALI, other)]
        ours = f"{values[0]:.1f} : {values[1]:.1f}, ratio {ratio}"
        return Claim(place, text, paper, ours, ratio.above(), source=main)

    return [
        compared("Table 1", BETA, "harmonic mean: Cali-TS above Beta-TS", "58.97 : 57.22"),
        compared("Table 4", K10, "harmonic mean: Cali-TS above K = 10", "58.97 : 44.76"),
        compared(
            "Table 4",
            WITHOUT_SAMPLING,
            "harmonic mean: above model prediction alone",
            "58.97 : 54.03",
        ),
        compared(
            "Table 4",
            WITHOUT_MODEL,
            "harmonic mean: above sampling prediction alone",
            "58.97 : 57.10",
        ),
    ]


def _fixed_lengths(main: Measured) -> list[Claim]:
    """Figure 3: against the best fixed K, for three costs of drafts, and by the clock."""
    rows = []
    for costs, adaptive in zip(COSTS, [f"eesd:{costs.settings}" for costs in COSTS], strict=True):
        best = main.best(costs.speedup, FIXED)
        speedup = main.of(costs.speedup, best).value
        for spec, name in ((CALI, "Cali-TS"), (BETA, "Beta-TS"), (adaptive, "our default")):
            ratio = main.ratio(costs.speedup, spec, best)
            text = f"{name} above the best fixed K, where a token costs {costs} target passes"
            ours = f"{ratio}; {best.partition(':')[2]} makes {speedup:.2f} × plain"
            verdict = ratio.above()
            place = "ours" if spec == adaptive else "Figure 3"
            paper = "" if spec == adaptive else "yes, slightly"
            rows.append(Claim(place, text, paper, ours, verdict, source=main))
    best = main.best(SPEED, FIXED)
    for spec, name in ((CALI, "Cali-TS"), ("eesd", "our default")):
        ratio = main.ratio(SPEED, spec, best)
        text = f"{name} above the best fixed K, by the clock ({best.partition(':')[2]})"
        place = "ours" if spec == "eesd" else "Figure 3"
        paper = "" if spec == "eesd" else "yes, slightly"
        rows.append(Claim(place, text, paper, str(ratio), ratio.above(), TIME, main))
    return rows


def _why(bench: Bench, main: Measured) -> list[Claim]:
    """Experiments on where Thompson sampling loses."""
    costs = COSTS[0]

    def value(spec: str) -> str:
        return f"{main.of(costs.speedup, spec).value:.2f}"

    rates = _acceptance_by_position(main)
    shown = ", ".join(f"{place}: {rate:.2f}" for place, rate in rates.items())
    rises = max(rates.values()) > rates[1] + 0.05
    known = main.ratio(costs.speedup, KNOWN_RATE, BETA)
    main.runs[THRESHOLD] = _threshold_runs(bench)
    by_threshold = main.ratio(costs.speedup, THRESHOLD, CALI)
    by_entropy = main.ratio(costs.speedup, SVIP, CALI)
    return [
        Claim(
            "section 3.3",
            "one acceptance rate holds for all positions of a draft",
            "assumed",
            f"acceptance by position, of tokens that the target judged: {shown}",
            FAILS if rises else HOLDS,
            source=main,
        ),
        Claim(
            "why",
            "Beta-TS loses by exploring: it gains if it knows the rate from the start",
            "",
            f"{value(BETA)} unknown, {value(KNOWN_RATE)} known, ratio {known}",
            known.above(),
            source=main,
        ),
        Claim(
            "why",
            f"Cali-TS's predictor gains more with a threshold than with a draw (costs {costs})",
            "",
            (
                f"{value(CALI)} with the draw, {value(THRESHOLD)} with a threshold of "
                f"{PredictorThreshold.threshold}, ratio {by_threshold}"
            ),
            by_threshold.above(),
            source=main,
        ),
        Claim(
            "why",
            f"entropy (`policy=svip`) gains more from the same exit layer (costs {costs})",
            "",
            f"Cali-TS {value(CALI)}, entropy {value(SVIP)}, ratio {by_entropy}",
            by_entropy.above(),
            source=main,
        ),
    ]


def _acceptance_by_position(main: Measured) -> dict[int, float]:
    judged: dict[int, list[bool]] = {}
    for run in main.runs[K10]:
        for drafted, accepted in run.drafts:
            for place in range(min(accepted + 1, drafted)):
                judged.setdefault(place + 1, []).append(place < accepted)
    shown = (1, 2, 4, 8)
    return {place: mean(accepted) for place, accepted in judged.items() if place in shown}


def _threshold_runs(bench: Bench) -> list[Run]:
    """Returns a run of each prompt with `PredictorThreshold`."""
    runs = []
    sampling = specgen.SamplingParams(max_new_tokens=bench.tokens)
    given = None if bench.target is None else str(bench.target)
    draft = None if bench.draft is None else str(bench.draft)
    exit_ = "auto" if bench.exit_layer is None else str(bench.exit_layer)
    with specgen.load(given, draft) as pair:
        for number, prompt in enumerate(load_prompts(None, limit=bench.prompts)):
            text = prompt.text if bench.is_bundled else [{"role": "user", "content": prompt.text}]
            request = pair.request(text, "eesd", sampling, policy="cali-ts", exit=exit_)
            request = replace(request, policy=PredictorThreshold)
            rounds = list(pair.prepare(request).rounds())
            run = Run(THRESHOLD, number, 0, "", prompt.text, {})
            run.summary = {"new_tokens": sum(len(round_.token_ids) for round_ in rounds)}
            run.drafts = [
                (len(round_.draft.tokens), len(round_.accepted_ids)) for round_ in rounds[1:]
            ]
            runs.append(run)
    return runs


def _rest(bench: Bench, main: Measured) -> list[Claim]:
    rows = []
    others = [("sd:k=10", "beta-ts", "speculative decoding", "+0.03 to +0.21")]
    if bench.is_bundled:
        others.append((SELF_SD, SELF_SD_BETA, "Self-SD", "+0.04 to +0.07"))
    for base, sampled, name, paper in others:
        ratio = main.ratio(SPEED, sampled, base)
        text = f"Beta-TS makes {name} with K = 10 faster: ratio"
        rows.append(Claim("Table 5", text, paper, str(ratio), ratio.above(), TIME, main))

    passes = main.ratio(TOKENS_A_PASS, TREE, CALI)
    rows.append(
        Claim(
            "Table 7",
            "a tree gives more tokens a pass: ratio",
            "",
            str(passes),
            passes.above(),
            source=main,
        )
    )
    speed = main.ratio(SPEED, TREE, CALI)
    text = "a tree is faster: ratio"
    rows.append(Claim("Table 7", text, "1.05 to 1.10", str(speed), speed.above(), TIME, main))

    bandit = [main.of(share_of_time("policy"), spec) for spec in (CALI, BETA)]
    rows.append(
        Claim(
            "Table 8",
            "Cali-TS's sampling costs more time than Beta-TS's: shares",
            "1.3 %, 0.05 % (70B)",
            f"{bandit[0].value:.1%}, {bandit[1].value:.1%}",
            HOLDS if bandit[0].low > bandit[1].high else CLOSE,
            TIME,
            main,
        )
    )
    rows.append(_prediction(main))
    for printed, spec in zip(PRINTED, (CALI, BETA), strict=True):
        ratio = main.ratio(COSTS[0].speedup, printed, spec)
        text = f"ours: `{printed}` against the corrected rule, costs {COSTS[0]}: ratio"
        rows.append(Claim("Eq. 8, Alg. 2", text, "", str(ratio), ratio.above(), source=main))
    return rows


def _prediction(main: Measured) -> Claim:
    """Equation 14 against the clock."""
    line = main.lines[CALI]
    predicted = line["predicted"] or {"eq14": None, "pass_costs": None}
    formula, by_passes = (predicted[name] or float("nan") for name in ("eq14", "pass_costs"))
    measured = main.ratio(SPEED, CALI, PLAIN)
    return Claim(
        "Eq. 14",
        "the formula predicts the speedup",
        "",
        (
            f"{formula:.2f} by the formula, {by_passes:.2f} by measured passes of each width, "
            f"{measured} measured"
        ),
        measured.near(formula),
        TIME,
        main,
    )


def _longer(bench: Bench) -> list[Claim]:
    """The same on 160 tokens of each prompt, and in sampling."""
    rows = []
    specs = [CALI, *FIXED, f"eesd:{COSTS[0].settings}"]
    variants: Sequence[tuple[str, Sequence[str]]] = (
        ("160 tokens each", ("--ignore-eos",)),
        ("at temperature 1", ("--temperature", "1")),
    )
    for name, options in variants:
        made = bench.compare(specs, *options, prompts=bench.fewer)
        best = made.best(COSTS[0].speedup, FIXED)
        for spec, label in ((CALI, "Cali-TS"), (specs[-1], "our default")):
            ratio = made.ratio(COSTS[0].speedup, spec, best)
            text = f"{label} above the best fixed K, {name}, costs {COSTS[0]}"
            place = "ours" if spec == specs[-1] else "Figure 3"
            rows.append(Claim(place, text, "", str(ratio), ratio.above(), source=made))
    return rows


def _trainings() -> list[Claim]:
    command = "`specgen tune --train -m eesd`"
    return [
        unmeasured(
            "Table 4",
            "the exit needs a decoder layer, and text that the target wrote",
            "23.69, 54.12 of 57.22",
            f"two more exits have to be trained: {command} with `--exit-layers 0`, `--self-text 0`",
        ),
        unmeasured(
            "Figures 4, 5",
            "few first layers, and one exit layer, are best",
            "5 to 10 % of the layers",
            f"an exit for each: {command} with `--layer N`, `--exit-layers N`",
        ),
        unmeasured("Table 6", "training takes less time and memory", "", "70B, 13B models on GPUs"),
    ]
