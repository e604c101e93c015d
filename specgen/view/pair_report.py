"""What `specgen inspect` says about a pair of models (whether they fit together, their speed, which methods can run) and about
methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specgen.base.text import inline, one_line
from specgen.decoding.costs import ACCEPTANCES, SpeedupModel
from specgen.methods import available_policies, known_settings
from specgen.methods.method import Method
from specgen.methods.pearl import ParallelCosts
from specgen.view.theme import column_width, labelled, table

if TYPE_CHECKING:
    from specgen.engine.text.translation import TokenOverlap
    from specgen.tune.pair_inspection import ModelFacts, PairReport, Readiness, TokenizerFacts

_LEAD = 13  # cells for the label before the text of a line
_CELL = 7  # cells of a table's column
UNTRANSLATED = "sd with translation=text (drafts text), lookup or suffix (no draft model), a draft of the target's family"
_UNLESS = ", unless the draft was trained on the target's tokens"
ALTERNATIVES = f"{UNTRANSLATED}, or train this one: tune --train --methods sd"
_STYLES = {"✓": "good", "✗": "bad", "·": "quiet"}
Fact = tuple[str, str | Mapping[str, Iterable[str]]]
"""A label with its text, or a table: the cells of each row under the row's heading. Without a label: more on the fact above."""


def show(console: Console, report: PairReport, next_step: str | None) -> None:
    """Prints the report on a pair. `next_step` is the command that the user can run next, None where the pair cannot be used."""
    for line in lines(report, console.width, next_step):
        console.print(line)


def lines(report: PairReport, width: int, next_step: str | None) -> Iterator[Text]:
    """Yields the report on a pair in lines of at most `width` cells; `width` must be at least 40.

    `next_step` is the command that the user can run next, None where the pair cannot be used.
    """
    yield from _models(report, width)
    yield Text()
    for label, found in facts(report):
        if isinstance(found, str):
            yield from labelled(_label(label), Text(found, "none" if label else "quiet"), width, _LEAD)
        else:
            yield from _table(found, width)
    yield Text()
    yield from _methods(report.methods, width)
    if next_step:
        yield Text()
        yield from labelled(Text("next"), Text(next_step, "command"), width, 6)


def facts(report: PairReport) -> Iterator[Fact]:
    """Yields what is known about a pair, from its files and by measuring, in the order of the report."""
    model = report.speedup_model
    if report.tokenizers is not None and report.draft is not None:
        yield from _tokenizers(report.tokenizers, report.target, report.draft, model)
    yield from _memory(report)
    yield from _placement(report)
    yield "✓ context", _context(report)
    yield from _engine(report)
    if model is not None:
        yield from _costs(model, report.parallel_costs)
        yield from _pays(model)
        if report.tokenizers is not None and report.tokenizers.overlap is not None:
            yield from _common_pays(report.tokenizers.overlap, model)


def _label(label: str) -> Text:
    """Returns a label whose first character (✓) is coloured."""
    return Text().append(label[:1], _STYLES.get(label[:1], "none")).append(label[1:])


def _roles(report: PairReport) -> dict[str, ModelFacts]:
    return {"target": report.target} | ({"draft": report.draft} if report.draft is not None else {})


def _models(report: PairReport, width: int) -> list[Text]:
    rows: list[list[str | Text]] = []
    for role, model in _roles(report).items():
        shape, parameters = f"{model.layers} layers × {model.hidden:,}", f"{_count(model.parameters)} parameters"
        rows.append([Text(role, "strong"), one_line(model.name), parameters, shape, model.dtype, _size(model.weight_bytes)])
    lines = table([[""] * 6, *rows], left=range(6))[1:]
    if column_width(lines) <= width:
        return lines
    return [
        line for role, *cells in rows for line in labelled(Text(str(role), "strong"), Text("  ".join(map(str, cells))), width, 8)
    ]


def _tokenizers(found: TokenizerFacts, target: ModelFacts, draft: ModelFacts, model: SpeedupModel | None) -> Iterator[Fact]:
    if found.overlap is not None:
        yield "· tokenizer" if found.overlap.is_low else "✓ tokenizer", f"another; {common_tokens(found.overlap)}"
        yield "", covered_share(found.overlap)
        if model is None and (hint := advice(found.overlap)) is not None:
            yield "", hint
        return
    if found.refusal is not None:
        yield "✗ tokenizer", found.refusal
        yield "", f"{found.shared:,} tokens have the same id in both"
        for difference in found.differences:
            pair = (difference.target, difference.draft)
            ours, theirs = ("no token" if token is None else f"“{inline(token)}”" for token in pair)
            yield "", f"id {difference.token_id:,}: {ours} in the target, {theirs} in the draft"
        yield "", f"use {UNTRANSLATED}"
        return
    text = f"the same, {found.target_size:,} tokens"
    if not found.target_size == found.draft_size == found.shared:
        text = f"{found.shared:,} tokens in common; the target has {found.target_size:,}, the draft {found.draft_size:,}"
    if target.table_rows != found.target_size or draft.table_rows != found.draft_size:
        sizes = " and ".join(f"{size:,}" for size in dict.fromkeys((target.table_rows, draft.table_rows)))
        text += f" (tables of {sizes} rows: padded)"
    yield "✓ tokenizer", text
    if found.probe is not None:
        probe, target_ids, draft_ids = found.probe
        pairs = enumerate(zip(target_ids, draft_ids, strict=False))
        position = next((at for at, (one, other) in pairs if one != other), min(len(target_ids), len(draft_ids)))
        yield "", f"but they split “{inline(probe)}” differently, from token {position + 1} on: only the target's way is used"


def _memory(report: PairReport) -> Iterator[tuple[str, str]]:
    """Yields the memory of both models, or of each if they are on different devices."""
    target, draft, placement, longest = report.target, report.draft, report.placement, report.context_limit
    models = [target] if draft is None else [target, draft]
    if placement is not None and len(placement.stages) > 1:
        text = _needed(models, longest)[2]
        yield "✓ memory", f"{text}; the plan for {placement.context:,} tokens on {len(placement.stages)} devices:"
    elif draft is None or draft.device == target.device or placement is not None:
        yield _fitting(models, longest, report.free_bytes)
    else:
        yield _fitting([target], longest, report.free_bytes)
        yield _fitting([draft], longest, report.draft_free_bytes)


def _needed(models: Sequence[ModelFacts], longest: int | None) -> tuple[int, int, str]:
    """Returns the bytes of the models' weights and of their cache for `longest` tokens (None: no limit), and both as text."""
    weights, cache = sum(model.weight_bytes for model in models), 0
    text = f"{_size(weights)} of weights"
    if longest is not None:
        cache = sum(model.cache_bytes * min(model.context_limit or longest, longest) for model in models)
        text += f" and {_size(cache)} of cache for {longest:,} tokens"
    return weights, cache, text


def _fitting(models: Sequence[ModelFacts], longest: int | None, free: int | None) -> tuple[str, str]:
    """Returns a label and a text that say whether weights and cache fit into the free bytes of a device (None: unknown)."""
    weights, cache, text = _needed(models, longest)
    if free is None:
        return "· memory", text
    text, room = f"{text}; {models[0].device} has {_size(free)} free", free - weights
    if room < 0:
        return "✗ memory", f"{text}: the weights do not fit"
    tokens = room // max(sum(model.cache_bytes for model in models), 1)
    return "✓ memory", f"{text}: room for about {tokens:,} tokens" if room < cache else text


def _placement(report: PairReport) -> Iterator[Fact]:
    """Yields a line for each device of a plan for several, and what follows from there being several."""
    if report.ranks is not None:
        part = _size(report.target.weight_bytes // report.ranks)
        eager = "" if report.target.device == "cpu" else "; passes run without CUDA graphs"
        yield "", f"torchrun's {report.ranks} processes each hold about {part} of the target{eager}"
    if report.placement is None or len(report.placement.stages) == 1:
        return
    count, last = report.target.layers, report.placement.device
    for stage in report.placement.stages:
        parts = []
        if stage.layers:
            ends = [", embedding"] * (stage.layers.start == 0) + [", norm, head"] * (stage.layers.stop == count)
            parts.append(f"layers {stage.layers.start} to {stage.layers.stop - 1}{''.join(ends)}: {_size(stage.weight_bytes)}")
            parts.append(f"cache {_size(stage.cache_bytes)}, for passes {_size(stage.working_bytes)}")
        if stage.draft_bytes:
            parts.append(f"draft {_size(stage.draft_bytes)}")
        yield "", f"{stage.device}: {', '.join(parts)}; {_size(stage.left)} of {_size(stage.free)} left"
    if report.placement.layer_devices is not None:
        slow = "; the layers on the CPU take most of the time" if str(last) == "cpu" else ""
        yield "", f"passes go through these devices one after the other, without CUDA graphs{slow}"


def _context(report: PairReport) -> str:
    limit = report.context_limit
    text = "the target's config names no limit" if limit is None else f"{limit:,} tokens, prompt and answer together"
    draft_limit = report.draft.context_limit if report.draft is not None else None
    if draft_limit is not None and (limit is None or draft_limit < limit):
        text += f"; the draft's ends at {draft_limit:,}, after which nothing is drafted"
    return text


def _engine(report: PairReport) -> Iterator[Fact]:
    """Yields lines about what runs each model, and about what was chosen when the models were loaded."""
    texts: dict[str, list[str]] = {}
    for role, model in _roles(report).items():
        texts.setdefault(_running(model), []).append(role)
    for number, (text, roles) in enumerate(texts.items()):
        yield "" if number else "· engine", f"{' and '.join(roles)}: {text}"
    if report.choices is None:
        return
    for role, choices in report.choices.products.items():
        packed = [choice for choice in choices if choice.packed]
        reasons = dict.fromkeys(choice.reason for choice in choices if choice.reason is not None)
        rounded = [choice for choice in choices if choice.quantised is not None]
        done = f"{len(rounded)} of {len(choices)} shapes rounded to {rounded[0].quantised}" if rounded else ""
        text = f"{role}: weights of {done or f'{len(packed)} of {len(choices)} shapes packed for oneDNN'}"
        text += f" (the others: {', '.join(reasons)})" if reasons else ""
        yield "", text
    if (threads := report.choices.threads) is not None:
        times = ", ".join(f"{_duration(taken)} with {count}" for count, taken in threads.seconds.items())
        yield "· threads", f"{threads.threads}: {threads.reason}" + (f" ({times})" if times else "")


def _running(model: ModelFacts) -> str:
    text = "specgen's own forward pass" if model.backend == "native" else f"transformers ({model.fallback})"
    text += f", {model.dtype}: {model.dtype_reason}"
    return text if model.tokenizer_fallback is None else f"{text}; tokenizer of transformers ({model.tokenizer_fallback})"


def _costs(model: SpeedupModel, parallel: ParallelCosts | None) -> Iterator[Fact]:
    target = model.target_seconds
    single, five = target[1], min(5, max(target))
    text = f"a target pass takes {_duration(single)}"
    if model.draft_seconds:
        text = f"a draft pass takes {model.draft_seconds / single:.2f} of a target pass ({_duration(single)})"
    yield "✓ cost", f"{text}; verifying {five} tokens costs {max(target[five] / single - 1, 0):.0%} more than 1"
    widths = [tokens for tokens in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16) if tokens in target]
    yield "", {"tokens": map(str, widths), "a pass": (f"{target[tokens] / single:.2f}×" for tokens in widths)}
    if parallel is not None:
        text = f"with both models running, a target pass takes as long as {parallel.ratio:.1f} draft passes (c): "
        yield "", f"{text}PEARL's window is {parallel.window.size}" + (f"; {parallel.remark}" if parallel.remark else "")


def _pays(model: SpeedupModel) -> Iterator[Fact]:
    rates = {k: model.break_even_acceptance(k) for k in model.draft_lengths}
    paying = [rate for rate in rates.values() if rate is not None]
    if not paying:
        yield "✗ pays from", "no acceptance rate: drafting and verifying cost more than they can save"
        return
    yield "✓ pays from", f"{min(paying):.0%} acceptance (accepted of drafted); by the length of a draft:"
    listed = {k: rates[k] for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15) if k in rates}
    shown = ("never" if rate is None else f"{rate:.0%}" for rate in listed.values())
    yield "", {"length": map(str, listed), "pays from": shown}
    yield "", "at the best draft length, where each token is accepted with the same probability:"
    best = [model.best(acceptance) for acceptance in ACCEPTANCES]
    acceptances, speedups = (f"{acceptance:.0%}" for acceptance in ACCEPTANCES), (f"{speedup:.2f}×" for _, speedup in best)
    yield "", {"acceptance": acceptances, "speedup": speedups, "length": (str(k) for k, _ in best)}


def _common_pays(overlap: TokenOverlap, model: SpeedupModel) -> Iterator[Fact]:
    """Yields lines that say whether drafts in the tokens that both tokenizers have are likely to pay."""
    if (found := best_speedup(overlap, model)) is None:
        return
    pays, text = found
    yield "✓ tokens" if pays else "· tokens", text
    if (hint := advice(overlap, pays=pays)) is not None:
        yield "", hint


def _table(rows: Mapping[str, Iterable[str]], width: int) -> Iterator[Text]:
    """Yields the lines of a table. One wider than `width` cells is broken into several blocks of columns, one below the other."""
    cells = {heading: list(values) for heading, values in rows.items()}
    fitting = max(1, (width - _LEAD) // _CELL)
    for start in range(0, max(map(len, cells.values())), fitting):
        for heading, values in cells.items():
            line = Text().append(f"  {heading:<{_LEAD - 2}}", "quiet")
            yield line.append("".join(f"{value:>{_CELL}}" for value in values[start : start + fitting]))


def _methods(found: Mapping[str, Readiness], width: int) -> Iterator[Text]:
    """Yields lines that say which decoding methods can run on the pair, first those that can.

    Methods with the same result and the same explanation share a line.
    """
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for name, readiness in found.items():
        groups.setdefault((not readiness.ready, readiness.why, readiness.hint), []).append(name)
    room = max(width // 2, 16) - 4
    shown = [(_names(names, room), key) for key, names in sorted(groups.items(), key=lambda group: group[0][0])]
    lead = max((len(names) for names, _ in shown), default=0) + 4
    for names, (is_missing, why, hint) in shown:
        text = Text(why if is_missing else f"ready; {why}" if why else "ready").append(f": {hint}" if hint else "", "quiet")
        yield from labelled(_label(f"{'✗' if is_missing else '✓'} {names}"), text, width, lead)


def _names(names: Sequence[str], room: int) -> str:
    """Returns all names joined by commas. If they need more than `room` cells, only the first names and the number of all."""
    for count in range(len(names), 0, -1):
        line = ", ".join(names) if count == len(names) else f"{', '.join(names[:count])}, … ({len(names)})"
        if len(line) <= room:
            break
    return line


def _count(number: int) -> str:
    units = ((10**9, " B"), (10**6, " M"), (10**3, " K"))
    return next((f"{number / size:.1f}{unit}" for size, unit in units if number >= size), str(number))


def _size(count: int) -> str:
    size, unit = next((each for each in ((1 << 30, "GiB"), (1 << 20, "MiB")) if count >= each[0]), (1024, "KiB"))
    return f"{count / size:,.{0 if unit == 'KiB' else 1}f} {unit}"


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def common_tokens(overlap: TokenOverlap) -> str:
    """Returns how many of the target's tokens the draft model has."""
    return f"{overlap.common:,} of the target's {overlap.vocabulary:,} tokens are the draft's, too"


def covered_share(overlap: TokenOverlap) -> str:
    """Returns which share of a text's tokens both tokenizers have in common, and how long drafts can be therefore."""
    if overlap.kappa is None:
        return "there is too little text to say how much of an output they cover (kappa)"
    text = "the target's output" if overlap.is_output else "example text"
    run = "" if overlap.expected_run is None else f", about {overlap.expected_run:.1f} in a row"
    return f"{overlap.kappa:.0%} of the tokens of {text} are one token in both (kappa){run}"


def best_speedup(overlap: TokenOverlap, model: SpeedupModel) -> tuple[bool, str] | None:
    """Returns whether drafts in common tokens are likely to pay, and the text that says so; None if kappa is not known.

    The text is about a draft model that splits text as it was trained to. One that `tune --train` taught the target's tokens may
    have more of its drafts accepted than kappa.
    """
    if overlap.kappa is None or not model.draft_lengths:
        return None
    length, speedup = model.best(overlap.kappa)
    if speedup > 1:
        return True, f"about {speedup:.2f}× at best, with drafts of {length}{_UNLESS}"
    return False, f"about {speedup:.2f}× at best, so drafts in common tokens are slower{_UNLESS}"


def advice(overlap: TokenOverlap, *, pays: bool = True) -> str | None:
    """Returns what to use instead, where drafts in common tokens are unlikely to pay or kappa is low; otherwise None."""
    return f"use {ALTERNATIVES}" if not pays or overlap.is_low else None


def notice(overlap: TokenOverlap) -> str:
    """Returns one line for a run that is about to begin."""
    line = f"note: the tokenizers differ: {common_tokens(overlap)}, and {covered_share(overlap)}"
    return f"{line}. Faster may be {ALTERNATIVES}" if overlap.is_low else line


def method_line(method: Method) -> dict[str, Any]:
    """Returns the JSON line of a decoding method. A setting's `low` or `high` is None where its values have no such bound."""
    settings = {
        name: {
            "default": setting.default,
            "help": setting.help,
            "low": setting.low if math.isfinite(setting.low) else None,
            "high": setting.high if math.isfinite(setting.high) else None,
            "choices": list(setting.choices),
        }
        for name, setting in known_settings(method, method.policy).items()
    }
    return {
        "type": "method",
        "name": method.name,
        "paper": method.paper,
        "lossless": method.lossless,
        "needs_draft_model": method.needs_draft_model,
        "needs_exit_layer": method.needs_exit_layer,
        "policy": method.policy,
        "policies": available_policies(method) if method.any_policy else [],
        "settings": settings,
    }


def method_card(console: Console, method: Method) -> None:
    """Prints a decoding method's name, its paper and whether it is lossless, then a line per setting with its default value."""
    head = Text().append(method.name, "strong").append(f"  {method.paper}", "quiet")
    head.append("  lossless" if method.lossless else "  lossy", "good" if method.lossless else "bad")
    needs = {"a draft model": method.needs_draft_model, "an exit layer": method.needs_exit_layer, "a trained head": method.head}
    console.print(head.append("".join(f"  needs {what}" for what, is_needed in needs.items() if is_needed), "quiet"))
    if method.any_policy:
        policies = ", ".join(available_policies(method))
        fixed = "; k=N alone: policy=fixed" if method.k_alone else ""
        console.print(Text(f"  policy={method.policy or ''}").append(f"  one of {policies}, with its settings{fixed}", "quiet"))
    for name, setting in known_settings(method, method.policy).items():
        default = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
        console.print(Text(f"  {name}={default}").append(f"  {setting.help}", "quiet"))
