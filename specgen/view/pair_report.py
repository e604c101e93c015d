"""The report of `specgen inspect` on a pair of models: whether they fit together, their speed, which methods can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specgen.base.text import inline, one_line
from specgen.decoding.costs.pearl_window import ParallelCosts
from specgen.decoding.costs.speedup import ACCEPTANCES, SpeedupModel
from specgen.view.theme import column_width, labelled, table

if TYPE_CHECKING:
    from specgen.engine.text.translation import TokenOverlap
    from specgen.tune.method_readiness import Readiness
    from specgen.tune.pair_inspection import ModelFacts, PairReport, TokenizerFacts

_LEAD = 13  # cells for the label before the text of a line
_CELL = 7  # cells of a table's column
UNTRANSLATED = "sd with translation=text (drafts text), lookup or suffix (no draft model), a draft of the target's family"
_UNLESS = ", unless the draft was trained on the target's tokens"
ALTERNATIVES = f"{UNTRANSLATED}, or train this one: tune --train --methods sd"
_STYLES = {"✓": "good", "✗": "bad", "·": "quiet"}


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
    if report.tokenizers is not None and report.draft is not None:
        yield from _tokenizers(report.tokenizers, report.target, report.draft, report.speedup_model, width)
    for label, memory in _memory(report):
        yield from _line(label, memory, width)
    yield from _placement(report, width)
    yield from _line("✓ context", _context(report), width)
    yield from _engine(report, width)
    if report.speedup_model is not None:
        yield from _costs(report.speedup_model, report.parallel_costs, width)
        yield from _pays(report.speedup_model, width)
        if report.tokenizers is not None and report.tokenizers.overlap is not None:
            yield from _common_pays(report.tokenizers.overlap, report.speedup_model, width)
    yield Text()
    yield from _methods(report.methods, width)
    if next_step:
        yield Text()
        yield from labelled(Text("next"), Text(next_step, "command"), width, 6)


def _line(label: str, text: str, width: int, *, style: str = "none") -> list[Text]:
    """Returns a label with the text to its right, wrapped to `width` cells. The label's first character (✓) is coloured."""
    return labelled(_label(label), Text(text, style), width, _LEAD)


def _label(label: str) -> Text:
    return Text().append(label[:1], _STYLES.get(label[:1], "none")).append(label[1:])


def _models(report: PairReport, width: int) -> list[Text]:
    models = {"target": report.target} | ({"draft": report.draft} if report.draft is not None else {})
    rows = [[Text(role, "strong"), *map(Text, _columns(model))] for role, model in models.items()]
    lines = table([[""] * 6, *rows], left=range(6))[1:]
    if column_width(lines) <= width:
        return lines
    return [line for role, *cells in rows for line in labelled(role, Text("  ").join(cells), width, 8)]


def _columns(model: ModelFacts) -> list[str]:
    shape = f"{model.layers} layers × {model.hidden:,}"
    return [one_line(model.name), f"{_count(model.parameters)} parameters", shape, model.dtype, _size(model.weight_bytes)]


def _tokenizers(
    found: TokenizerFacts, target: ModelFacts, draft: ModelFacts, model: SpeedupModel | None, width: int
) -> Iterator[Text]:
    if found.overlap is not None:
        label = "· tokenizer" if found.overlap.is_low else "✓ tokenizer"
        yield from _line(label, f"another; {common_tokens(found.overlap)}", width)
        yield from _line("", covered_share(found.overlap), width)
        if model is None and (hint := advice(found.overlap)) is not None:
            yield from _line("", hint, width, style="quiet")
        return
    if found.refusal is not None:
        yield from _line("✗ tokenizer", found.refusal, width)
        yield from _line("", f"{found.shared:,} tokens have the same id in both", width, style="quiet")
        for difference in found.differences:
            ours, theirs = (
                "no token" if token is None else f"“{inline(token)}”" for token in (difference.target, difference.draft)
            )
            yield from _line("", f"id {difference.token_id:,}: {ours} in the target, {theirs} in the draft", width, style="quiet")
        yield from _line("", f"use {UNTRANSLATED}", width, style="quiet")
        return
    text = f"the same, {found.target_size:,} tokens"
    if not found.target_size == found.draft_size == found.shared:
        text = f"{found.shared:,} tokens in common; the target has {found.target_size:,}, the draft {found.draft_size:,}"
    if target.table_rows != found.target_size or draft.table_rows != found.draft_size:
        sizes = " and ".join(f"{size:,}" for size in dict.fromkeys((target.table_rows, draft.table_rows)))
        text += f" (tables of {sizes} rows: padded)"
    yield from _line("✓ tokenizer", text, width)
    if found.probe is not None:
        probe, target_ids, draft_ids = found.probe
        pairs = enumerate(zip(target_ids, draft_ids, strict=False))
        position = next((at for at, (one, other) in pairs if one != other), min(len(target_ids), len(draft_ids)))
        text = f"but they split “{inline(probe)}” differently, from token {position + 1} on: only the target's way is used"
        yield from _line("", text, width, style="quiet")


def _memory(report: PairReport) -> list[tuple[str, str]]:
    """Returns a label and a text for the memory of both models, or for that of each if they are on different devices."""
    target, draft, placement, longest = report.target, report.draft, report.placement, report.context_limit
    models = [target] if draft is None else [target, draft]
    if placement is not None and len(placement.stages) > 1:
        text = _needed(models, longest)[2]
        return [("✓ memory", f"{text}; the plan for {placement.context:,} tokens on {len(placement.stages)} devices:")]
    if draft is None or draft.device == target.device or placement is not None:
        return [_fitting(models, longest, report.free_bytes)]
    return [_fitting([target], longest, report.free_bytes), _fitting([draft], longest, report.draft_free_bytes)]


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


def _placement(report: PairReport, width: int) -> Iterator[Text]:
    """Yields a line for each device of a plan for several, and what follows from there being several."""
    if report.ranks is not None:
        part = _size(report.target.weight_bytes // report.ranks)
        text = f"torchrun's {report.ranks} processes each hold about {part} of the target"
        eager = "" if report.target.device == "cpu" else "; passes run without CUDA graphs"
        yield from _line("", text + eager, width)
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
        yield from _line("", f"{stage.device}: {', '.join(parts)}; {_size(stage.left)} of {_size(stage.free)} left", width)
    if report.placement.layer_devices is not None:
        text = "passes go through these devices one after the other, without CUDA graphs"
        slow = "; the layers on the CPU take most of the time" if str(last) == "cpu" else ""
        yield from _line("", text + slow, width, style="quiet")


def _context(report: PairReport) -> str:
    limit = report.context_limit
    text = "the target's config names no limit" if limit is None else f"{limit:,} tokens, prompt and answer together"
    draft_limit = report.draft.context_limit if report.draft is not None else None
    if draft_limit is not None and (limit is None or draft_limit < limit):
        text += f"; the draft's ends at {draft_limit:,}, after which nothing is drafted"
    return text


def _engine(report: PairReport, width: int) -> Iterator[Text]:
    """Yields lines about what runs each model, and about what was chosen when the models were loaded."""
    models = {"target": report.target} | ({"draft": report.draft} if report.draft is not None else {})
    label = "· engine"
    texts = {role: _running(model) for role, model in models.items()}
    for text in dict.fromkeys(texts.values()):
        roles = " and ".join(role for role, of_role in texts.items() if of_role == text)
        yield from _line(label, f"{roles}: {text}", width)
        label = ""
    if report.choices is None:
        return
    for role, choices in report.choices.products.items():
        packed = [choice for choice in choices if choice.packed]
        reasons = dict.fromkeys(choice.reason for choice in choices if choice.reason is not None)
        rounded = [choice for choice in choices if choice.quantised is not None]
        done = f"{len(rounded)} of {len(choices)} shapes rounded to {rounded[0].quantised}" if rounded else ""
        text = f"{role}: weights of {done or f'{len(packed)} of {len(choices)} shapes packed for oneDNN'}" + (
            f" (the others: {', '.join(reasons)})" if reasons else ""
        )
        if (rows := report.choices.padded_to[role]) > 1:
            text += f", passes padded to {rows} tokens"
        yield from _line("", text, width, style="quiet")
    threads = report.choices.threads
    if threads is not None:
        times = ", ".join(f"{_duration(taken)} with {count}" for count, taken in threads.seconds.items())
        yield from _line("· threads", f"{threads.threads}: {threads.reason}" + (f" ({times})" if times else ""), width)


def _running(model: ModelFacts) -> str:
    text = "specgen's own forward pass" if model.backend == "native" else f"transformers ({model.fallback})"
    text += f", {model.dtype}: {model.dtype_reason}"
    return text if model.tokenizer_fallback is None else f"{text}; tokenizer of transformers ({model.tokenizer_fallback})"


def _costs(model: SpeedupModel, parallel: ParallelCosts | None, width: int) -> Iterator[Text]:
    target = model.target_seconds
    single, five = target[1], min(5, max(target))
    text = f"a target pass takes {_duration(single)}"
    if model.draft_seconds:
        text = f"a draft pass takes {model.draft_seconds / single:.2f} of a target pass ({_duration(single)})"
    text += f"; verifying {five} tokens costs {max(target[five] / single - 1, 0):.0%} more than 1"
    yield from _line("✓ cost", text, width)
    widths = [tokens for tokens in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16) if tokens in target]
    yield from _table({"tokens": map(str, widths), "a pass": (f"{target[tokens] / single:.2f}×" for tokens in widths)}, width)
    if parallel is not None:
        text = f"with both models running, a target pass takes as long as {parallel.ratio:.1f} draft passes (c): "
        text += f"PEARL's window is {parallel.window.size}"
        text += f"; {parallel.remark}" if parallel.remark else ""
        yield from _line("", text, width)


def _pays(model: SpeedupModel, width: int) -> Iterator[Text]:
    rates = {k: model.break_even_acceptance(k) for k in model.draft_lengths}
    paying = [rate for rate in rates.values() if rate is not None]
    if not paying:
        yield from _line("✗ pays from", "no acceptance rate: drafting and verifying cost more than they can save", width)
        return
    yield from _line("✓ pays from", f"{min(paying):.0%} acceptance (accepted of drafted); by the length of a draft:", width)
    listed = {k: rates[k] for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15) if k in rates}
    shown = ("never" if rate is None else f"{rate:.0%}" for rate in listed.values())
    yield from _table({"length": map(str, listed), "pays from": shown}, width)
    yield from _line("", "at the best draft length, where each token is accepted with the same probability:", width)
    best = [model.best(acceptance) for acceptance in ACCEPTANCES]
    columns = {
        "acceptance": (f"{acceptance:.0%}" for acceptance in ACCEPTANCES),
        "speedup": (f"{speedup:.2f}×" for _, speedup in best),
        "length": (str(k) for k, _ in best),
    }
    yield from _table(columns, width)


def _common_pays(overlap: TokenOverlap, model: SpeedupModel, width: int) -> Iterator[Text]:
    """Yields lines that say whether drafts in the tokens that both tokenizers have are likely to pay."""
    if (found := best_speedup(overlap, model)) is None:
        return
    pays, text = found
    yield from _line("✓ tokens" if pays else "· tokens", text, width)
    if (hint := advice(overlap, pays=pays)) is not None:
        yield from _line("", hint, width, style="quiet")


def _table(rows: Mapping[str, Iterator[str]], width: int) -> Iterator[Text]:
    """Yields the lines of a table; `rows` has the cells of each row under the row's heading.

    A table wider than `width` cells is broken into several blocks of columns, one below the other.
    """
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
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _size(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.0f} KiB"


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
