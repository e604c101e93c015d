"""What `specgen inspect` says about a pair of models (whether they fit together, their speed, which
methods can run) and about methods, and what `specgen tune` found for a pair."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specgen.base.text import counted, inline, one_line, significant
from specgen.decoding.costs import ACCEPTANCES, SpeedupModel
from specgen.decoding.parallel_costs import ParallelCosts
from specgen.methods import DEFAULT_METHOD, METHODS, available_policies, own_settings
from specgen.methods.base import Method
from specgen.tune.outcome import PLAIN, Candidate, Evidence, TuningOutcome
from specgen.view import theme
from specgen.view.theme import labelled, table, wrapped

if TYPE_CHECKING:
    from specgen.engine.text.translation import TokenOverlap
    from specgen.methods.readiness import Readiness
    from specgen.pair.finding import Found
    from specgen.tune.pair_inspection import ModelFacts, OverlapTrial, PairReport, TokenizerFacts
    from specgen.tune.rounding_cost import RoundingCost

_LEAD = 13  # cells for the label before the text of a line
_FIGURES = 66  # cells of a tuning's table to the right of the method's name
_FEW_FIGURES = 47  # without plain decoding's speed and the number of prompts
_FULL_TABLE = 80  # cells, from which a tuning's table has all columns
UNTRANSLATED = (
    "sd with translation=text (drafts text), lookup or suffix (no draft "
    "model), a draft of the target's family"
)
ALTERNATIVES = f"{UNTRANSLATED}, or train this one: tune --train --methods sd"
_STYLES = {"✓": "good", "✗": "bad", "·": "quiet"}
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)  # tokens in a draft or a pass
# A line of the report: a label and a text or, as a list of rows, a table. With an empty label it
# continues the line above.
Fact = tuple[str, str | list[list[str]]]


# a pair


def show(console: Console, report: PairReport, next_step: str | None) -> None:
    """Prints the report on a pair. `next_step` is the command to suggest to the user, None for no
    suggestion."""
    for line in lines(report, console.width, next_step):
        console.print(line, soft_wrap=True)


def show_found(console: Console, found: Sequence[Found], published: str | None) -> None:
    """Prints what was found to draft for a target, best first, with the expected speedups;
    `published` is a hint, or None."""
    lines = []
    found = [drafter for drafter in found if drafter.not_chosen is None]
    if found:
        rows = [["expected", "drafter", "why"]]
        for drafter in found:
            name = f"{drafter.kind} {drafter.name}"
            rows.append([f"{drafter.speedup:.2f}×", name, drafter.why])
        lines += table(rows, left=(1, 2))
    assumed = sorted({f"{drafter.acceptance:.0%}" for drafter in found if drafter.is_assumed})
    if assumed:
        note = (
            f"expected: estimated from sizes, as if {' or '.join(assumed)} of the "
            "drafted tokens were accepted; tune measures it"
        )
        lines += wrapped(Text(note, "quiet"), console.width)
    if published is not None:
        lines += wrapped(Text(published), console.width)
    if lines:
        lines.append(Text())
    for line in lines:
        console.print(line, soft_wrap=True)


def show_not_chosen(console: Console, found: Sequence[Found]) -> None:
    """Prints what was found and is used only where the user names it."""
    for drafter in found:
        if drafter.not_chosen is not None:
            text = f"kept: {drafter.kind} {drafter.name}: {drafter.not_chosen}"
            console.print(Text(text, "quiet"), soft_wrap=True)


def lines(report: PairReport, width: int, next_step: str | None) -> Iterator[Text]:
    """Yields the report on a pair in lines of at most `width` cells, which must be at least 40."""
    for role, model in _roles(report).items():
        about = Text(f"{one_line(model.name)}: {_size_in_words(model)}")
        yield from labelled(Text(role, "strong"), about, width, _LEAD)
    if report.head is not None:
        about = Text(f"{one_line(report.head.name)}: {report.head.about}")
        yield from labelled(Text("head", "strong"), about, width, _LEAD)
    yield Text()
    for label, text in facts(report):
        if isinstance(text, str):
            style = "none" if label else "quiet"
            yield from labelled(_label(label), Text(text, style), width, _LEAD)
        else:
            for line in table(text, left=()):
                yield Text(" " * _LEAD).append_text(line)
    yield Text()
    for mark, names in _methods(report.methods):
        yield from labelled(_label(mark), Text(names), width, 2)
    if next_step:
        yield Text()
        yield from labelled(Text("next"), Text(next_step, "command"), width, 6)


def _size_in_words(model: ModelFacts) -> str:
    parameters = f"{_count(model.parameters)} parameters"
    if model.active_parameters != model.parameters:
        parameters += f" ({_count(model.active_parameters)} for a token)"
    shape = f"{model.layers} layers × {model.hidden:,}"
    return f"{parameters}, {shape}, {model.dtype}, {_size(model.weight_bytes)}"


def facts(report: PairReport) -> Iterator[Fact]:
    """Yields what is known about a pair, from its files and by measuring."""
    if report.tokenizers is not None and report.draft is not None:
        yield from _tokenizers(report.tokenizers, report.target, report.draft)
    if report.tokenizers is not None and report.tokenizers.overlap is not None:
        yield from _overlap(report.tokenizers.overlap, report.speedup_model)
    for model in _roles(report).values():
        if model.tokenizer_warning is not None:
            yield "✗ tokenizer", one_line(model.tokenizer_warning)
    yield from _memory(report)
    yield "✓ context", _context(report)
    yield from _engine(report)
    if report.rounding is not None:
        yield "· rounding", _rounding(report.rounding, report.target.dtype)
    if report.speedup_model is not None:
        yield from _costs(report.speedup_model, report.parallel_costs, report.overlap_trial)


def _rounding(cost: RoundingCost, dtype: str) -> str:
    return (
        f"perplexity {cost.rounded_perplexity:.3f} in {dtype}, "
        f"{cost.stored_perplexity:.3f} as stored; "
        f"{cost.changed:.1%} of the greedy tokens change ({cost.tokens} tokens of text)"
    )


def _label(label: str) -> Text:
    """Returns a label whose first character (✓) is coloured."""
    return Text().append(label[:1], _STYLES.get(label[:1], "none")).append(label[1:])


def _roles(report: PairReport) -> dict[str, ModelFacts]:
    roles = {"target": report.target}
    if report.draft is not None:
        roles["draft"] = report.draft
    return roles


def _tokenizers(
    tokenizers: TokenizerFacts, target: ModelFacts, draft: ModelFacts
) -> Iterator[Fact]:
    if tokenizers.overlap is not None:
        return
    if tokenizers.refusal is not None:
        yield "✗ tokenizer", tokenizers.refusal
        yield "", f"{tokenizers.shared:,} tokens have the same id in both"
        for difference in tokenizers.differences:
            ours = _quoted(difference["target"])
            theirs = _quoted(difference["draft"])
            yield "", f"id {difference['token_id']:,}: {ours} in the target, {theirs} in the draft"
        yield "", f"use {UNTRANSLATED}"
        return
    target_size = tokenizers.target_size
    draft_size = tokenizers.draft_size
    text = f"the same, {target_size:,} tokens"
    if not target_size == draft_size == tokenizers.shared:
        text = (
            f"{tokenizers.shared:,} tokens in common; the target has {target_size:,}, "
            f"the draft {draft_size:,}"
        )
    if target.table_rows != target_size or draft.table_rows != draft_size:
        text += f" (tables of {target.table_rows:,} and {draft.table_rows:,} rows: padded)"
    yield "✓ tokenizer", text
    if tokenizers.probe is not None:
        probe = inline(tokenizers.probe[0])
        yield "", f"but they split “{probe}” differently: only the target's way is used"


def _quoted(token: str | None) -> str:
    return "no token" if token is None else f"“{inline(token)}”"


def _overlap(overlap: TokenOverlap, model: SpeedupModel | None) -> Iterator[Fact]:
    """Yields lines about drafts in the tokens that both tokenizers have, and with the measured
    `model` whether such drafts are likely to pay.

    They hold for a draft model that splits text as it was trained to. If `tune --train` has taught
    it the target's tokens, more of its tokens may be accepted than kappa, the share of a text that
    is one token in both.
    """
    yield "· tokenizer" if overlap.is_low else "✓ tokenizer", f"another; {common_tokens(overlap)}"
    yield "", covered_share(overlap)
    pays = True
    if model is not None and model.draft_lengths and overlap.kappa is not None:
        length, speedup = model.best(overlap.kappa)
        pays = speedup > 1
        drafts = f"with drafts of {length}" if pays else "so drafts in common tokens are slower"
        unless = ", unless the draft was trained on the target's tokens"
        yield "✓ tokens" if pays else "· tokens", f"about {speedup:.2f}× at best, {drafts}{unless}"
    if overlap.is_low or not pays:
        yield "", f"use {ALTERNATIVES}"


def common_tokens(overlap: TokenOverlap) -> str:
    """Returns how many of the target's tokens the draft model has."""
    return f"{overlap.common:,} of the target's {overlap.vocabulary:,} tokens are the draft's, too"


def covered_share(overlap: TokenOverlap) -> str:
    """Returns in words which share of a text's tokens (kappa) are one token in both tokenizers and,
    if known, how many of these follow each other on average."""
    if overlap.kappa is None:
        return "there is too little text to say how much of an output they cover (kappa)"
    text = "the target's output" if overlap.is_output else "example text"
    run = "" if overlap.expected_run is None else f", about {overlap.expected_run:.1f} in a row"
    return f"{overlap.kappa:.0%} of the tokens of {text} are one token in both (kappa){run}"


def notice(overlap: TokenOverlap) -> str:
    """Returns a line that tells the user, before a run, that the tokenizers differ, and how much of
    a text can be drafted."""
    line = f"note: the tokenizers differ: {common_tokens(overlap)}, and {covered_share(overlap)}"
    return f"{line}. Faster may be {ALTERNATIVES}" if overlap.is_low else line


def _memory(report: PairReport) -> Iterator[Fact]:
    """Yields lines about the memory of both models together, or of each if they are on different
    devices. If the target is spread over several devices, there is a line for each."""
    target = report.target
    draft = report.draft
    placement = report.placement
    stages = placement.stages if placement is not None else ()
    if draft is None or draft.device == target.device or stages:
        device = ", ".join(str(stage.device) for stage in stages) or target.device
        models = list(_roles(report).values())
        yield _fitting(models, device, target.context_limit, report.free_bytes)
    else:
        yield _fitting([target], target.device, target.context_limit, report.free_bytes)
        yield _fitting([draft], draft.device, target.context_limit, report.draft_free_bytes)
    for stage in stages if len(stages) > 1 else ():
        layers = "the draft"
        if stage.layers:
            layers = f"layers {stage.layers.start} to {stage.layers.stop - 1}"
        yield "", f"{stage.device}: {layers}; {_size(stage.left)} of {_size(stage.free)} left"
    if report.ranks is not None:
        share = _size(target.weight_bytes // report.ranks)
        yield "", f"torchrun's {report.ranks} processes each hold about {share} of the target"


def _fitting(
    models: Sequence[ModelFacts], device: str, longest: int | None, free: int | None
) -> Fact:
    """Returns whether the weights and a cache for `longest` tokens (None: no limit) fit into the
    `free` bytes of the device (None: unknown)."""
    weights = sum(model.weight_bytes for model in models)
    cache = 0
    text = f"{_size(weights)} of weights"
    if longest is not None:
        for model in models:
            cache += model.cache_bytes * min(model.context_limit or longest, longest)
        text += f" and {_size(cache)} of cache for {longest:,} tokens"
    if free is None:
        return "· memory", text
    text += f"; {device} has {_size(free)} free"
    if free < weights:
        return "✗ memory", f"{text}: the weights do not fit"
    if free < weights + cache:
        tokens = (free - weights) // max(sum(model.cache_bytes for model in models), 1)
        text += f": room for about {tokens:,} tokens"
    return "✓ memory", text


def _context(report: PairReport) -> str:
    limit = report.target.context_limit
    text = "the target's config names no limit"
    if limit is not None:
        text = f"{limit:,} tokens, prompt and answer together"
    draft_limit = report.draft.context_limit if report.draft is not None else None
    if draft_limit is not None and (limit is None or draft_limit < limit):
        text += f"; the draft's ends at {draft_limit:,}, after which nothing is drafted"
    return text


def _engine(report: PairReport) -> Iterator[Fact]:
    """Yields lines about what runs each model, and how many threads were chosen when the models
    were loaded."""
    for role, model in _roles(report).items():
        text = f"transformers ({model.fallback})"
        if model.backend == "native":
            text = "specgen's own forward pass"
        text += f", {model.dtype}: {model.dtype_reason}"
        if model.tokenizer_fallback is not None:
            text += f"; tokenizer of transformers ({model.tokenizer_fallback})"
        yield "· engine" if model is report.target else "", f"{role}: {text}"
    for role, model in _roles(report).items():
        yield "· kernels" if model is report.target else "", f"{role}: {_kernels(report, role)}"
    if report.head is not None and report.head.on_torch:
        own = ", ".join(report.head.on_torch)
        yield "", f"head: {report.target.kernels}, with torch: {own}"
    for role, model in _roles(report).items():
        text = (
            f"{role}: {model.kept_as}, {_size(model.weight_bytes)}; cache in {model.cache_dtype}, "
            f"{_size(model.cache_bytes)} a token"
        )
        yield "· weights" if model is report.target else "", text
    if report.threads is not None:
        text = f"{report.threads.threads}: {report.threads.reason}"
        times = [
            f"{_duration(seconds)} with {count}"
            for count, seconds in report.threads.seconds.items()
        ]
        if times:
            text += f" ({', '.join(times)})"
        yield "· threads", text


def _kernels(report: PairReport, role: str) -> str:
    """Returns which kernels run the target's or the draft's (`role`) passes, and if measured what
    is left to torch."""
    model = _roles(report)[role]
    text = model.kernels if model.no_kernels is None else f"none: {model.no_kernels}"
    if report.on_torch is None or model.no_kernels is not None:
        return text
    operators, share = report.on_torch[role]
    text += f"; {share:.0%} of a pass is spent outside of them"
    return f"{text}, with torch: {', '.join(operators)}" if operators else text


def _overlapping(parallel: ParallelCosts, trial: OverlapTrial | None) -> Iterator[Fact]:
    """Yields how much longer passes take beside the other model's, and what PEARL gains by
    overlapping them: expected, and measured by real runs."""
    if parallel.expected_gain is None:
        return
    yield "", "milliseconds of a pass over so many tokens, alone and beside the other model's:"
    rows = [["", "alone", "beside"]]
    for label, alone, beside in (
        ("draft × 1", parallel.draft_alone, parallel.draft_pass),
        ("target × 1", parallel.single_alone, parallel.single_pass),
        (f"target × {parallel.width}", parallel.target_alone, parallel.target_pass),
    ):
        rows.append([label, significant(1000 * alone), significant(1000 * beside)])
    yield "", rows

    choice = "they overlap" if parallel.overlaps else "pearl lets them take turns"
    text = (
        f"at 70% acceptance, overlapping passes decode at {parallel.expected_gain:.2f}× the speed "
        f"of passes in turn: {choice}"
    )
    yield "", text
    if trial is not None:
        yield (
            "",
            (
                f"really run on {counted(trial.prompts, 'prompt')}, at {trial.acceptance:.0%} "
                f"acceptance: {trial.gain:.2f}× the speed of sd:k={trial.length}, "
                f"{trial.expected_gain:.2f}× expected"
            ),
        )


def _costs(
    model: SpeedupModel, parallel: ParallelCosts | None, trial: OverlapTrial | None = None
) -> Iterator[Fact]:
    """Yields lines about the times of passes, and from which acceptance speculation pays."""
    target = model.target_seconds
    single = target[1]
    five = min(5, max(target))
    text = f"a target pass takes {_duration(single)}"
    if model.draft_seconds:
        text = (
            f"a draft pass takes {model.draft_seconds / single:.2f} of a target pass "
            f"({_duration(single)})"
        )
    more = max(target[five] / single - 1, 0)
    yield "✓ cost", f"{text}; verifying {five} tokens costs {more:.0%} more than 1"
    if parallel is not None:
        text = (
            "with both models running, a target pass takes as long as "
            f"{parallel.ratio:.1f} draft passes (c): PEARL's window is {parallel.window.size}"
        )
        yield "", text
        yield from _overlapping(parallel, trial)

    rates = {length: model.break_even_acceptance(length) for length in model.draft_lengths}
    paying = [rate for rate in rates.values() if rate is not None]
    if not paying:
        yield (
            "✗ pays from",
            "no acceptance rate: drafting and verifying cost more than they can save",
        )
        return
    yield (
        "✓ pays from",
        f"{min(paying):.0%} acceptance (accepted of drafted); by the length of a draft:",
    )
    rows = [["tokens", "a pass", "pays from"]]
    for length, rate in rates.items():
        if length in _WIDTHS:
            pays_from = "never" if rate is None else f"{rate:.0%}"
            rows.append([str(length), f"{target[length] / single:.2f}×", pays_from])
    yield "", rows

    yield "", "at the best draft length, where each token is accepted with the same probability:"
    rows = [["acceptance", "speedup", "length"]]
    for acceptance in ACCEPTANCES:
        length, speedup = model.best(acceptance)
        rows.append([f"{acceptance:.0%}", f"{speedup:.2f}×", str(length)])
    yield "", rows


def _methods(methods: Mapping[str, Readiness]) -> Iterator[tuple[str, str]]:
    """Yields (mark, text) pairs: which decoding methods can run on the pair, first those that can.
    Methods with the same explanation share a line."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for name, readiness in methods.items():
        why = "; ".join(filter(None, ["ready" * readiness.ready, readiness.why]))
        if readiness.cure:
            why = f"{why}: {readiness.cure}"
        group = groups.setdefault((not readiness.ready, why), [])
        group.append(name if METHODS[name].lossless else f"{name} (lossy)")
    for (is_missing, why), names in sorted(groups.items(), key=lambda group: group[0][0]):
        yield "✗" if is_missing else "✓", f"{', '.join(names)}: {why}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _size(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"


def _duration(seconds: float) -> str:
    return f"{significant(1000 * seconds)} ms" if seconds < 1 else f"{seconds:.2f} s"


# a method


def method_line(method: Method) -> dict[str, Any]:
    """Returns the JSON line of a decoding method. A setting's `low` or `high` is None where its
    values have no such bound."""
    settings = {
        name: {
            "default": setting.default,
            "help": setting.help,
            "low": setting.low if math.isfinite(setting.low) else None,
            "high": setting.high if math.isfinite(setting.high) else None,
            "choices": list(setting.choices),
        }
        for name, setting in own_settings(method).items()
    }
    return {
        "type": "method",
        "name": method.name,
        "paper": method.paper,
        "lossless": method.lossless,
        "needs_draft_model": method.needs_draft_model,
        "needs_exit_layer": method.needs_exit_layer,
        "policy": method.policy,
        "policies": available_policies(method),
        "settings": settings,
    }


def _implied_policies(method: Method) -> str:
    """Returns which settings select a length policy, if they are given without one; empty if none
    does."""
    settings = dict[str, list[str]]()
    for setting, policy in method.policy_by_setting.items():
        settings.setdefault(policy, []).append(setting)
    parts = [f"{', '.join(names)} alone: policy={policy}" for policy, names in settings.items()]
    return "".join(f"; {part}" for part in parts)


def method_card(console: Console, method: Method) -> None:
    """Prints a decoding method's name, its paper and whether it is lossless, then a line per
    setting with its default value."""
    head = Text(method.name, "strong")
    if method.paper:
        head.append(f"  {method.paper}", "quiet")
    if method.lossless:
        head.append("  lossless", "good")
    else:
        head.append("  lossy", "bad")
    if method.needed_part:
        head.append(f"  needs {method.needed_part}", "quiet")
    console.print(head)

    policies = available_policies(method)
    if policies:
        line = Text(f"  policy={method.policy or ''}")
        listed = ", ".join(policies)
        line.append(f"  one of {listed}, with its settings{_implied_policies(method)}", "quiet")
        console.print(line)
    for name, setting in own_settings(method).items():
        default = setting.default
        if isinstance(default, bool):
            default = str(default).lower()
        console.print(Text(f"  {name}={default}").append(f"  {setting.help}", "quiet"))


# a tuning


def show_tuning(
    console: Console,
    outcome: TuningOutcome,
    path: Path | None,
    *,
    is_default: bool = True,
    budget: float | None = None,
) -> None:
    """Prints the result of a tuning. `path` is the profile in which it was saved, None if that
    failed; `is_default`: other commands find it there without --profile. `budget` is the time that
    the tuning had, in seconds; None if there is no use in advising a larger one.
    """
    width = theme.width(console)
    headline, details = _verdict(outcome)
    details += _details(outcome, budget)
    if path is not None:
        use = "used from now on"
        if not is_default:
            use = f"use it with --profile {shlex.quote(str(path.parent))}"
        details.append(("saved", f"{path.parent}, {use}"))
    perplexities = [
        f"{method.written} {method.perplexity:.2f}"
        for method in outcome.methods
        if method.perplexity
    ]
    if perplexities:
        details.append(("perplexity", " · ".join(perplexities)))

    lines = [Text(), *_candidates(outcome, width), Text()]
    lines += wrapped(Text(headline, "strong"), width)
    for label, text in details:
        lines += labelled(Text(label, "quiet"), Text(text), min(width, theme.PIPED_WIDTH), _LEAD)
    for line in lines:
        console.print(line, soft_wrap=True)


def _details(outcome: TuningOutcome, budget: float | None) -> list[tuple[str, str]]:
    """Returns (label, text) pairs: what was run, what was left out, and what drafts."""
    details = [("ran", _ran(outcome))]
    if outcome.simulated:
        settings = counted(outcome.simulated, "setting")
        details.append(("simulated", f"{settings}; their speeds are expected ones"))
    for reason in dict.fromkeys(outcome.left_out.values()):
        names = ", ".join(name for name, other in outcome.left_out.items() if other == reason)
        details.append(("not tuned", _without_name(names, reason)))
    if outcome.missing_seconds > 0 and budget is not None:
        needed = 10 * math.ceil((budget + outcome.missing_seconds) / 10)
        details.append(("more time", f"--budget {needed}, for what was left out for lack of time"))
    draft = None if outcome.pair is None else outcome.pair.draft
    was_searched = outcome.pair is not None and bool(outcome.pair.found)
    if draft is not None and was_searched and METHODS[outcome.chosen.name].uses_draft_model:
        details.append(("drafted by", one_line(draft.name)))
    return details


def _without_name(names: str, reason: str) -> str:
    """Returns `names: reason`, but the reason alone if it begins with the names."""
    return reason if reason.startswith(f"{names} ") else f"{names}: {reason}"


def _ran(outcome: TuningOutcome) -> str:
    """Returns in words what was really run, such as `ar, adaptive: 12 runs of up to 24 tokens`."""
    names = [method.name for method in outcome.methods if method.measured is not None]
    if not names:
        return "a few tokens of plain decoding"
    tokens = counted(outcome.sampling.max_new_tokens, "token")
    return f"{', '.join(names)}: {counted(outcome.real_runs, 'run')} of up to {tokens}"


def _candidates(outcome: TuningOutcome, width: int) -> list[Text]:
    """Returns a table with a line for each method, measured ones first: its tokens per second,
    measured or else expected by simulation, those of plain decoding in the same turns, the number
    of prompts, and the measured speedup over plain decoding with its interval. On a narrow terminal
    plain decoding's speed and the prompts are left out, and settings that do not fit."""
    is_full = width >= _FULL_TABLE
    figures = _FIGURES if is_full else _FEW_FIGURES
    basis: list[str | Text] = ["ar there", "prompts"] if is_full else []
    rows: list[list[str | Text]] = [["tokens/s", "measured", *basis, "expected", "speedup", ""]]
    fastest_first = sorted(
        outcome.methods,
        key=lambda method: (method.measured is None, -(method.measured or method.predicted)),
    )
    for method in fastest_first:
        name = method.written if len(method.written) <= width - figures else method.name
        measured = "" if method.measured is None else f"{method.measured:.1f}"
        plain = "" if method.plain is None else f"{method.plain:.1f}"
        prompts = "" if method.prompts is None else str(method.prompts)
        speedup = "" if method.speedup is None else f"{method.speedup:.2f}×"
        remarks = []
        if method.low is not None and method.high is not None:
            remarks.append(f"{method.low:.2f}–{method.high:.2f}")
        if not method.lossless:
            remarks.append("lossy")
        label = Text(name, "strong" if method == outcome.chosen else "none")
        expected = f"{method.predicted:.1f}" if method.measured is None else ""
        basis = [plain, prompts] if is_full else []
        rows.append([label, measured, *basis, expected, speedup, Text(", ".join(remarks), "quiet")])
    return table(rows, left=(0, len(rows[0]) - 1))


def _verdict(outcome: TuningOutcome) -> tuple[str, list[tuple[str, str]]]:
    """Returns the result of a tuning: a headline, and (label, text) pairs that explain it, such as
    ("next", "svip: 1.40×")."""
    best = outcome.best
    speedup = f"{outcome.speedup_of(best):.2f}×"
    use = _use(outcome)
    if outcome.verdict == "no time":
        return f"Not enough time to tell what is fastest here: {use}.", _reasons(outcome)
    if best.name == PLAIN:
        return f"No method that keeps the output was tuned. So {use}.", []
    interval = ""
    if best.low is not None and best.high is not None:
        interval = f" (95%: {best.low:.2f}–{best.high:.2f})"
    gain = f"{best.written}: {speedup} plain decoding{interval}"
    reasons = _reasons(outcome)
    promising = outcome.promising
    hope = "" if promising is None else f"{promising.written}: {_hope(outcome, promising)}"
    if outcome.verdict == "unconfirmed":
        if promising is None:
            headline = (
                f"Not confirmed: {speedup} with {best.name}, on too few prompts. Until then {use}."
            )
            return headline, [("best found", gain), *reasons]
        headline = (
            f"Not confirmed by enough real runs: {promising.name}, "
            f"{_hope(outcome, promising)}. Until then {use}."
        )
        ran = [] if best.evidence is Evidence.SIMULATION else [("best run", gain)]
        return headline, [("best found", hope), *ran, *reasons]
    if outcome.verdict == "pays":
        unconfirmed = [("not confirmed", hope)] if hope else []
        return f"Speculation pays here: {speedup} with {best.name}.", [
            ("best", f"{gain}, the same output"),
            *reasons,
            *unconfirmed,
        ]
    if outcome.verdict == "unclear":
        headline = f"No clear gain here: {speedup} at best{interval}. So {use}."
        return headline, [
            *reasons,
            ("would tell", f"specgen compare --methods {best.written} --repeats 10"),
        ]
    draft = "a draft model that is smaller, or closer to the target: --draft MODEL"
    if outcome.speedup_model is None:
        draft = "a draft model: --draft MODEL, or a head: --head FOLDER"
    headline = f"Speculation does not pay here: {speedup} at best. So {use}."
    return headline, [("best found", gain), *reasons, ("would help", draft)]


def _hope(outcome: TuningOutcome, promising: Candidate) -> str:
    """Returns in words the speedup of a method that too few real runs confirm."""
    few = "in few tokens" if promising.low is not None else "on one prompt"
    known_from = "expected" if promising.evidence is Evidence.SIMULATION else few
    return f"{outcome.speedup_of(promising):.2f}× {known_from}"


def _use(outcome: TuningOutcome) -> str:
    chosen = outcome.chosen
    if chosen.name == PLAIN:
        return "generate decodes plainly for this pair"
    name = chosen.name
    if name == DEFAULT_METHOD:
        name += ", the default,"
    return f"generate uses {name} for this pair"


def _reasons(outcome: TuningOutcome) -> list[tuple[str, str]]:
    """Returns a (label, text) pair that explains the result by the costs of passes; none if they
    contradict it."""
    if outcome.speedup_model is None:
        return []
    needed = outcome.speedup_model.break_even_acceptance(1)
    accepted = outcome.acceptance_probability
    expects_gain = needed is not None and (accepted is None or accepted >= needed)
    if outcome.best.speedup is not None and (outcome.best.speedup > 1) != expects_gain:
        return []  # the times of single passes do not explain what was measured
    unit = "draft" if outcome.speedup_model.drafts_blocks else "draft token"
    text = f"a {unit} costs {outcome.speedup_model.relative_draft_cost:.2f} of a target pass"
    if needed is None:
        text += ": no acceptance makes it pay"
    else:
        text += f": pays from {needed:.0%} acceptance"
    if accepted is not None:
        text += f", here {accepted:.0%}"
    return [("why", text)]
