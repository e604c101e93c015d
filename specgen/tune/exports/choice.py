"""Chooses the method to export to an engine, and says what the engine lacks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base.errors import SpecgenError, nearest
from specgen.base.part_kinds import MTP
from specgen.methods.copying import OFF
from specgen.methods.drafting_knowledge import AUTO
from specgen.tune.exports.engines import ENGINES
from specgen.tune.exports.records import BLOCKS, DRAFTERS, ExportedMethod, ExportedModels

if TYPE_CHECKING:
    from specgen.base.settings import Value
    from specgen.pair.profile import Tuned

PLAIN = "ar"
FOR_DRAFTS = "sd"  # what engines have for draft models
# the methods that draft so, by drafter; an engine has none but these, and its length rules
_METHODS = {
    "model": FOR_DRAFTS,
    "translated": FOR_DRAFTS,
    "pard": FOR_DRAFTS,
    "lookup": "lookup",
    "suffix": "suffix",
    "mtp": MTP,
    "assistant": MTP,
    "eagle": "eagle",
    "eagle3": "eagle",
    "dflash": "block",
    "dflash2": "block",
    "dspark": "block",
    "medusa": "medusa",
    "glide": "glide",
}
_CONVERT = "convert the models to GGUF first; quantised weights have other costs and acceptances"


def methods_of(name: str) -> list[str]:
    """Returns the methods that an engine supports. Raises SpecgenError for an unknown engine, with
    the nearest name."""
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        raise SpecgenError(
            f"there is no engine {name!r} to export to{nearest(name, ENGINES)}",
            f"There are {known}",
        )
    engine = ENGINES[name]
    supported = {_METHODS[drafter] for drafter in engine.drafters} | engine.policies.keys()
    return [method for method in methods.METHODS if method in supported]


def export(
    name: str, tuned: Mapping[str, Tuned], chosen: str, models: ExportedModels
) -> tuple[str, list[str]]:
    """Exports the fastest of the `tuned` methods (name: settings and speeds) that the engine `name`
    can run.

    Returns the text to give to the engine (a command, a program or a file), and notes on what it
    cannot express. Where plain decoding is `chosen`, or the engine can run none of the methods, the
    text is for plain decoding, and a note says so. If another method is chosen that the engine
    cannot run, a note says this, and why. If the engine has none like it, but drafts with the same
    model, it does so, with the mean length of the method's drafts. Raises SpecgenError as
    `methods_of` does.
    """
    known = ", ".join(methods_of(name))
    possible, refusals = _planned(name, tuned, models)
    stand_in = None
    if chosen not in possible and chosen not in refusals:
        stand_in = _stand_in(chosen, tuned, models)
    if stand_in is not None:
        reason = _refusal(name, stand_in)
        if reason is not None:
            refusals[chosen] = reason
            stand_in = None
    if not possible and stand_in is None:
        nothing = f"{name} has none of the tuned methods"
        problem = refusals.get(chosen) or next(iter(refusals.values()), nothing)
        return _plain(name, models, f"{problem} (it has {known}): it decodes plainly")

    best = stand_in or possible[_fastest(possible, tuned)]
    if chosen == PLAIN:
        return _plain(name, models, _slower(name, best.name, tuned))
    notes = _notes(name, best)
    if chosen != best.name:
        lacking = refusals.get(chosen)
        notes.insert(0, _instead(name, chosen, best, lacking, is_stand_in=stand_in is not None))
    return ENGINES[name].write(best), notes


def _instead(
    name: str, chosen: str, best: ExportedMethod, lacking: str | None, *, is_stand_in: bool
) -> str:
    """Returns the note that `best` is exported in place of the chosen method. `lacking` says why
    the engine cannot run that."""
    if is_stand_in:
        shared = "the same model" if best.head is None else "the same layers"
        return f"{chosen} is chosen here, which {name} has not: {best.name} drafts with {shared}"
    if lacking is not None:
        return f"{chosen} is chosen here, but {lacking}: {best.name} is the best of what it has"
    return f"{chosen} is chosen here: {best.name} is only the best of what {name} has"


def _planned(
    name: str, tuned: Mapping[str, Tuned], models: ExportedModels
) -> tuple[dict[str, ExportedMethod], dict[str, str]]:
    """Returns the tuned methods that the engine can run, and why it cannot run others. Those like
    which no engine has one are in neither."""
    possible = dict[str, ExportedMethod]()
    refusals = dict[str, str]()
    for method in tuned:
        if method not in _METHODS.values() and method not in ENGINES[name].policies:
            continue
        planned = _as_tuned(method, tuned, models)
        if planned is None:
            continue
        reason = _refusal(name, planned)
        if reason is None:
            possible[method] = planned
        else:
            refusals[method] = reason
    return possible, refusals


def _refusal(name: str, method: ExportedMethod) -> str | None:
    """Returns why an engine cannot run the method, in one line; None if it can."""
    engine = ENGINES[name]
    if method.drafter not in engine.drafters:
        return f"{name} does not run {DRAFTERS[method.drafter]}"
    return engine.refuses(method)


def _fastest(possible: Mapping[str, ExportedMethod], tuned: Mapping[str, Tuned]) -> str:
    """Returns the fastest method. A measured speed counts before an expected one."""
    return max(possible, key=lambda name: tuned[name].measured or tuned[name].predicted)


def _plain(name: str, models: ExportedModels, note: str) -> tuple[str, list[str]]:
    """Returns the options for plain decoding, and the notes."""
    return ENGINES[name].write_plain(models), [*_replaced(name, models), note]


def _slower(name: str, best: str, tuned: Mapping[str, Tuned]) -> str:
    """Returns the note that plain decoding is faster than the engine's best method."""
    speedup = tuned[best].speedup
    speed = "" if speedup is None else f", {speedup:.2f} times plain decoding here"
    return (
        f"plain decoding is the fastest here, so {name} decodes plainly; the "
        f"best of what it has is {best}{speed}"
    )


def _as_tuned(
    name: str, tuned: Mapping[str, Tuned], models: ExportedModels
) -> ExportedMethod | None:
    """Returns a tuned method; None if what it drafts with is not there."""
    settings = methods.resolve(methods.find(name), tuned[name].settings)
    return _method(name, settings.values, settings.policy, models, tuned[name].draft_length)


def _method(
    name: str,
    values: Mapping[str, Value],
    policy: str | None,
    models: ExportedModels,
    mean: float | None,
    copies: int | None = None,
) -> ExportedMethod | None:
    """Returns a method with these settings; None if what it drafts with is not there."""
    method = methods.find(name)
    head = models.heads.get(name)
    if method.uses_draft_model:
        drafter = _draft_model(models)
    elif method.head:
        drafter = "" if head is None else head.drafter
    else:
        drafter = name
    if not drafter or (method.uses_draft_model and models.draft is None):
        return None
    copies = _copies(values) if copies is None else copies
    return ExportedMethod(name, values, drafter, policy, models, head, mean, copies)


def _draft_model(models: ExportedModels) -> str:
    """Returns as what the draft model drafts, a key of `DRAFTERS`."""
    if models.tokenizers_differ:
        return "translated"
    return "pard" if models.is_pard else "model"


def _copies(values: Mapping[str, Value]) -> int | None:
    """Returns `ExportedMethod.copies` of a method with these settings."""
    copy = values.get("copy", OFF)
    if copy == OFF:
        return None
    return 0 if copy == AUTO else int(copy)


def _stand_in(
    chosen: str, tuned: Mapping[str, Tuned], models: ExportedModels
) -> ExportedMethod | None:
    """Returns an engine's own method that takes the place of the `chosen` one, with drafts as long.
    It drafts with the same model, and both keep the target's output. None if there is none.

    Where the drafts' length is not known, it has its own tuned settings, if there are any.
    """
    if chosen not in tuned or chosen not in methods.METHODS:
        return None
    method = methods.find(chosen)
    if not method.lossless or not method.uses_draft_model:
        return None
    name = FOR_DRAFTS
    if models.draft is None:
        if chosen != methods.ADAPTIVE:
            return None
        name = MTP  # with which `adaptive` drafts then

    values = methods.resolve(method, tuned[chosen].settings).values
    copies = _copies(values)
    mean = tuned[chosen].draft_length
    if mean is None and name in tuned:
        settings = methods.resolve(methods.find(name), tuned[name].settings)
        return _method(name, settings.values, settings.policy, models, None, copies)
    own = dict(methods.resolve(methods.find(name), {"policy": "fixed"}).values)
    del own["k"]
    return _method(name, own, chosen, models, mean, copies)


def _notes(name: str, method: ExportedMethod) -> list[str]:
    """Returns what the options of a method cannot express."""
    engine = ENGINES[name]
    models = method.models
    drafts_with_model = methods.find(method.name).uses_draft_model
    notes = []
    files = [models.target_gguf, models.draft_gguf if drafts_with_model else ""]
    if engine.names_gguf and None in files:
        notes.append(_CONVERT)
    notes += _lost(name, method)
    notes += _replaced(name, models)
    if drafts_with_model and models.draft_dtype is not None:
        notes.append(
            f"the draft's weights were rounded to {models.draft_dtype} here: {name} takes them "
            "as they are stored"
        )
    notes.append(
        "measured with specgen, one prompt at a time: a server that batches has other costs"
    )
    return notes


def _replaced(name: str, models: ExportedModels) -> list[str]:
    """Returns the note that the engine does not read the GGUF files, if there are some."""
    if ENGINES[name].reads_gguf or (models.target_gguf, models.draft_gguf) == (None, None):
        return []
    return [f"{name} needs the safetensors models in place of GGUF files"]


def _lost(name: str, method: ExportedMethod) -> list[str]:
    """Returns notes: the tuned settings that the engine lacks, and what is particular to the method
    in this engine."""
    engine = ENGINES[name]
    notes = []
    if method.tuned_length is None and method.name != "suffix":
        notes.append(
            f"{name} has no length policies: drafts have {method.length} tokens instead "
            f"of {method.policy}"
        )
    length = engine.length(method)
    if length != method.length:
        layers = "1 MTP layer" if method.head and method.head.layers == 1 else "its MTP layers"
        notes.append(f"{name} drafts {length} tokens with {layers}, in place of {method.length}")
    if method.settings.get("cape"):
        notes.append(f"{name} has no CaPE: the added candidates are left out")
    is_chain = not method.drafts_trees or method.drafter not in engine.trees
    if method.drafts_trees and is_chain:
        size = "width" if method.width != 1 else "nodes"
        notes.append(f"{name} drafts chains: the tree ({size} {method.settings[size]}) is left out")
    if method.drafter in BLOCKS and method.needed_rows < method.rows:
        notes.append(
            f"{name} may run the block with {method.needed_rows} rows, which changes what is "
            f"accepted; specgen does so with block_size={method.needed_rows}"
        )
    notes += _copying(name, method)
    notes += _judging(name, method, is_chain=is_chain)
    note = engine.policies.get(method.name) or engine.drafters[method.drafter]
    if note:
        folder = "" if method.head is None else quote(method.head.folder)
        named = {"head": folder, "target": quote(method.target)}
        notes.append(note.format(**{**method.settings, **named}))
    return notes


def _copying(name: str, method: ExportedMethod) -> list[str]:
    """Returns the note on what the engine copies from the text in place of drafts."""
    if method.copies is None:
        return []
    note = ENGINES[name].copies(method)
    return [note or f"{name} copies nothing from the text before it drafts with a model"]


def _judging(name: str, method: ExportedMethod, *, is_chain: bool) -> list[str]:
    """Returns the note that in sampling, the engine accepts another share of the drafted tokens
    than was measured here, if it does."""
    if not method.sampled or method.drafter in ("lookup", "suffix"):
        return []
    if method.drafter in ENGINES[name].judges and is_chain:
        return []
    return [
        f"at a temperature, {name} does not judge drawn tokens by their probabilities in the "
        "draft: it accepts another share of them than measured here"
    ]
