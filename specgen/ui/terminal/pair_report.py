"""The pre-flight of a pair in a terminal: what fits, what it costs, from where on it pays, what each method still needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from specgen.cost_model import ACCEPTANCES, ParallelCosts, SpeedupModel
from specgen.tuning.pair_report import ModelFacts, PairReport, Readiness, TokenizerFacts
from specgen.ui.sanitize import inline

_LEAD = 13  # columns before what a line says


def show(console: Console, report: PairReport, next_step: str | None) -> None:
    """The whole report; `next_step` is the command to go on with."""
    for line in lines(report, console.width, next_step):
        console.print(line)


def lines(report: PairReport, width: int, next_step: str | None) -> Iterator[Text]:
    """At most `width` columns each, from 40 on."""
    yield from _models(report, width)
    yield Text()
    if report.tokenizers is not None and report.draft is not None:
        yield from _tokenizers(report.tokenizers, report.target, report.draft, width)
    yield from _memory(report, width)
    yield from _context(report, width)
    if report.speedup_model is not None:
        yield from _costs(report.speedup_model, report.parallel_costs, width)
    yield Text()
    yield from _methods(report.methods, width)
    if next_step:
        yield Text()
        yield from _said("next", "none", Text(next_step, "command"), width, lead=6)


def _models(report: PairReport, width: int) -> Iterator[Text]:
    models = [("target", report.target)] + ([("draft", report.draft)] if report.draft is not None else [])
    rows = [[role, *_columns(model)] for role, model in models]
    widths = [max(len(row[position]) for row in rows) for position in range(len(rows[0]))]
    for row in rows:
        aligned = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        if len(aligned) <= width:
            yield Text().append(aligned[: widths[0]], "strong").append(aligned[widths[0] :])
        else:
            yield from _said(row[0], "strong", Text("  ".join(row[1:])), width, lead=8)


def _columns(model: ModelFacts) -> list[str]:
    shape = f"{model.layers} layers × {model.hidden:,}"
    return [inline(model.name), f"{_count(model.parameters)} parameters", shape, model.dtype, _size(model.weight_bytes)]


def _tokenizers(found: TokenizerFacts, target: ModelFacts, draft: ModelFacts, width: int) -> Iterator[Text]:
    if found.refusal is not None:
        told = f"{found.refusal}; {found.shared:,} tokens have the same id in both"
        yield from _said("✗ tokenizer", "bad", Text(inline(told)), width)
        for difference in found.differences:
            ours, theirs = _token(difference.target), _token(difference.draft)
            told = f"id {difference.token_id:,}: {ours} in the target, {theirs} in the draft"
            yield from _said("", "none", Text(told, "quiet"), width)
        hint = "what a draft says would mean something else to the target: take one of its family, or method lookup"
        yield from _said("", "none", Text(hint, "quiet"), width)
        return
    same = found.target_size == found.draft_size == found.shared
    told = (
        f"the same, {found.target_size:,} tokens"
        if same
        else (f"{found.shared:,} tokens in common; the target has {found.target_size:,}, the draft {found.draft_size:,}")
    )
    if target.table_rows != found.target_size or draft.table_rows != found.draft_size:
        rows = (
            f"{target.table_rows:,}"
            if target.table_rows == draft.table_rows
            else f"{target.table_rows:,} and {draft.table_rows:,}"
        )
        told += f" (tables of {rows} rows: padded)"
    yield from _said("✓ tokenizer", "good", Text(told), width)
    if found.probe is not None:
        text, target_ids, draft_ids = found.probe
        pairs = enumerate(zip(target_ids, draft_ids, strict=False))
        position = next((at for at, (one, other) in pairs if one != other), min(len(target_ids), len(draft_ids)))
        told = f"but they cut “{inline(text)}” differently, from token {position + 1} on: only the target's way is used"
        yield from _said("", "none", Text(told, "quiet"), width)


def _token(token: str | None) -> str:
    return "no token" if token is None else f"“{inline(token)}”"


def _memory(report: PairReport, width: int) -> Iterator[Text]:
    needed = report.weight_bytes + (report.cache_bytes or 0)
    told = f"{_size(report.weight_bytes)} of weights"
    if report.cache_bytes is not None and report.context_limit is not None:
        told += f" and {_size(report.cache_bytes)} of cache for {report.context_limit:,} tokens"
    if report.free_bytes is None:
        yield from _said("· memory", "quiet", Text(told), width)
        return
    told += f"; {report.target.device} has {_size(report.free_bytes)} free"
    if report.weight_bytes > report.free_bytes:
        yield from _said("✗ memory", "bad", Text(f"{told}: the weights do not fit"), width)
    elif needed > report.free_bytes:
        a_token = report.target.cache_bytes + (report.draft.cache_bytes if report.draft else 0)
        room = (report.free_bytes - report.weight_bytes) // max(a_token, 1)
        yield from _said("✓ memory", "good", Text(f"{told}: room for about {room:,} tokens"), width)
    else:
        yield from _said("✓ memory", "good", Text(told), width)


def _context(report: PairReport, width: int) -> Iterator[Text]:
    limit = report.context_limit
    told = "the target's config names no limit" if limit is None else f"{limit:,} tokens, prompt and answer together"
    draft_limit = report.draft.context_limit if report.draft is not None else None
    if draft_limit is not None and (limit is None or draft_limit < limit):
        told += f"; the draft's ends at {draft_limit:,}, from there on nothing is drafted"
    yield from _said("✓ context", "good", Text(told), width)


def _costs(model: SpeedupModel, parallel: ParallelCosts | None, width: int) -> Iterator[Text]:
    target, widest = model.target_seconds, max(model.target_seconds)
    single = target[1]
    five = min(5, widest)
    told = f"a target pass takes {_duration(single)}"
    if model.draft_seconds:
        told = f"a draft pass takes {model.draft_seconds / single:.2f} of a target pass ({_duration(single)})"
    told += f"; verifying {five} tokens costs {max(target[five] / single - 1, 0):.0%} more than 1"
    yield from _said("✓ cost", "good", Text(told), width)
    by_width = [width_ for width_ in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16) if width_ in target]
    yield from _table(
        (
            ("tokens", [str(width_) for width_ in by_width]),
            ("a pass", [f"{target[width_] / single:.2f}×" for width_ in by_width]),
        ),
        width,
    )
    if parallel is not None:
        told = f"with both models running, a target pass takes as long as {parallel.ratio:.1f} draft passes (c): "
        told += f"PEARL's window is {parallel.window.size}"
        yield from _said("", "none", Text(told), width)
    yield from _pays(model, width)


def _pays(model: SpeedupModel, width: int) -> Iterator[Text]:
    lengths = model.draft_lengths
    paying = [rate for rate in map(model.break_even_acceptance, lengths) if rate is not None]
    if not paying:
        yield from _said(
            "✗ pays from", "bad", Text("no acceptance rate: drafting and verifying cost more than they can save"), width
        )
        return
    told = f"{min(paying):.0%} acceptance (accepted of drafted); by the length of a draft:"
    yield from _said("✓ pays from", "good", Text(told), width)
    listed = [k for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15) if k in lengths]
    rates = [model.break_even_acceptance(k) for k in listed]
    yield from _table(
        (("length", [str(k) for k in listed]), ("pays from", ["never" if rate is None else f"{rate:.0%}" for rate in rates])),
        width,
    )
    yield from _said("", "none", Text("at the best draft length, where each token is accepted with the same probability:"), width)
    best = [model.best(acceptance) for acceptance in ACCEPTANCES]
    rows = (
        ("acceptance", [f"{acceptance:.0%}" for acceptance in ACCEPTANCES]),
        ("speedup", [f"{speedup:.2f}×" for _, speedup in best]),
        ("length", [str(k) for k, _ in best]),
    )
    yield from _table(rows, width)


def _table(rows: Sequence[tuple[str, Sequence[str]]], width: int) -> Iterator[Text]:
    """Rows with a heading each, in as many columns as fit; the rest goes below."""
    cell = 7
    fitting = max(1, (width - _LEAD) // cell)
    count = len(rows[0][1])
    for start in range(0, count, fitting):
        for heading, cells in rows:
            line = Text().append(f"  {heading:<{_LEAD - 2}}", "quiet")
            yield line.append("".join(f"{entry:>{cell}}" for entry in cells[start : start + fitting]))


def _methods(found: Mapping[str, Readiness], width: int) -> Iterator[Text]:
    """Methods that say the same thing share a line; the ready ones come first."""
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for name, readiness in found.items():
        groups.setdefault((not readiness.ready, readiness.why, readiness.hint), []).append(name)
    room = max(width // 2, 16)
    shown = [(_names(names, room - 4), key) for key, names in sorted(groups.items(), key=lambda group: group[0][0])]
    column = max((len(names) for names, _ in shown), default=0) + 4
    for names, (is_missing, why, hint) in shown:
        told = Text(why if is_missing else f"ready; {why}" if why else "ready")
        if hint:
            told.append(f": {hint}", "quiet")
        yield from _said(f"{'✗' if is_missing else '✓'} {names}", "bad" if is_missing else "good", told, width, lead=column)


def _names(names: Sequence[str], room: int) -> str:
    """All of them, or as many as there is room for and how many they are."""
    for named in range(len(names), 0, -1):
        line = ", ".join(names) if named == len(names) else f"{', '.join(names[:named])}, … ({len(names)})"
        if len(line) <= room:
            break
    return line


def _said(mark: str, style: str, told: Text, width: int, *, lead: int = _LEAD) -> Iterator[Text]:
    """A mark, and behind it what it says, wrapped below itself; the words behind the sign are plain."""
    sign, space, words = mark.partition(" ")
    start = Text().append(sign, style).append(space + words)
    if start.cell_len > lead - 1:
        yield start
        start = Text()
    for position, part in enumerate(told.wrap(Console(width=width), max(width - lead, 12))):
        part.rstrip()
        first = start if position == 0 else Text()
        line = first + Text(" " * (lead - first.cell_len)) + part
        line.rstrip()
        yield line


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
