"""Exports tuned settings to another inference engine: chooses the method, and says what the engine
lacks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base.errors import SpecgenError, nearest
from specgen.tune.engines import ENGINES, TARGET, ExportedHead, ExportedMethod, ExportedModels

if TYPE_CHECKING:
    from specgen.pair.profile import Tuned

PLAIN = "ar"
FOR_DRAFTS = "sd"  # what engines have for draft models
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
    return [method for method in methods.METHODS if method in ENGINES[name].methods]


def export(
    name: str, tuned: Mapping[str, Tuned], chosen: str, models: ExportedModels
) -> tuple[str, list[str]]:
    """Exports the fastest of the `tuned` methods (name: settings and speeds) that the engine `name`
    supports.

    Returns the text to give to the engine (a command, a program or a config file), and notes on
    what it cannot express. Raises SpecgenError for an unknown engine. Where
    plain decoding is `chosen` or the engine supports none of the methods, the text is for plain
    decoding, and a note says so. If another method is chosen that the engine does not
    support, a note says this. If that drafts with the draft model, the engine's own method for
    draft models takes its place, with the mean length of its drafts. Raises SpecgenError as
    `methods_of` does.
    """
    known = methods_of(name)
    usable = [each for each in tuned if each in known and _has_head(name, each, models)]
    stands_in = _needs_stand_in(chosen, tuned, known, models)
    if not usable and not stands_in:
        note = (
            f"{name} has none of the tuned methods (it has {', '.join(known)}): it decodes plainly"
        )
        return _plain(name, models, note)

    best = FOR_DRAFTS if stands_in else _fastest(usable, tuned)
    if chosen == PLAIN:
        return _plain(name, models, _slower(name, best, tuned))
    if stands_in:
        method = _stand_in(chosen, tuned, models)
        first = f"{chosen} is chosen here, which {name} has not: {best} drafts with the same model"
    else:
        method = _as_tuned(name, best, tuned, models)
        first = f"{chosen} is chosen here: {best} is only the best of what {name} has"
    notes = [] if best == chosen else [first]
    return ENGINES[name].write(method), [*notes, *_notes(name, method)]


def _has_head(name: str, method: str, models: ExportedModels) -> bool:
    """Whether the method drafts without a head, or with one that the engine reads."""
    return not methods.find(method).head or _fitting_head(name, method, models) is not None


def _fitting_head(name: str, method: str, models: ExportedModels) -> ExportedHead | None:
    head = models.heads.get(method)
    return head if head is not None and head.kind in ENGINES[name].head_kinds else None


def _needs_stand_in(
    chosen: str, tuned: Mapping[str, Tuned], known: Sequence[str], models: ExportedModels
) -> bool:
    """Whether the engine's method for draft models takes the place of the chosen one, which it
    lacks: both draft with the same model, and keep the target's output."""
    if chosen not in tuned or chosen in known or FOR_DRAFTS not in known:
        return False
    method = methods.find(chosen)
    return models.draft is not None and method.uses_draft_model and method.lossless


def _fastest(usable: Sequence[str], tuned: Mapping[str, Tuned]) -> str:
    """Returns the fastest method. A measured speed counts before an expected one."""
    return max(usable, key=lambda name: tuned[name].measured or tuned[name].predicted)


def _plain(name: str, models: ExportedModels, note: str) -> tuple[str, list[str]]:
    """Returns the options for plain decoding, and the notes."""
    engine = ENGINES[name]
    target = (models.target_gguf or TARGET) if engine.names_gguf else models.target
    return engine.write_plain(target), [*_replaced(name, models), note]


def _slower(name: str, best: str, tuned: Mapping[str, Tuned]) -> str:
    """Returns the note that plain decoding is faster than the engine's best method."""
    speedup = tuned[best].speedup
    speed = "" if speedup is None else f", {speedup:.2f} times plain decoding here"
    return (
        f"plain decoding is the fastest here, so {name} decodes plainly; the "
        f"best of what it has is {best}{speed}"
    )


def _as_tuned(
    name: str, method: str, tuned: Mapping[str, Tuned], models: ExportedModels
) -> ExportedMethod:
    """Returns a tuned method that the engine has."""
    settings = methods.resolve(methods.find(method), tuned[method].settings)
    head = _fitting_head(name, method, models)
    mean = tuned[method].draft_length
    return ExportedMethod(method, settings.values, settings.policy, models, head, mean)


def _stand_in(chosen: str, tuned: Mapping[str, Tuned], models: ExportedModels) -> ExportedMethod:
    """Returns the method for draft models with drafts as long as those of the `chosen` one. Where
    their length is not known, it has its own tuned settings, if there are any."""
    mean = tuned[chosen].draft_length
    method = methods.find(FOR_DRAFTS)
    if mean is None and FOR_DRAFTS in tuned:
        settings = methods.resolve(method, tuned[FOR_DRAFTS].settings)
        return ExportedMethod(FOR_DRAFTS, settings.values, settings.policy, models)
    values = dict(methods.resolve(method, {"policy": "fixed"}).values)
    del values["k"]
    return ExportedMethod(FOR_DRAFTS, values, chosen, models, mean_length=mean)


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
    if drafts_with_model and models.tokenizers_differ and not engine.translates:
        notes.append("the draft model's tokenizer is not the target's: the engine may refuse it")
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
    if method.settings.get("cape"):
        notes.append(f"{name} has no CaPE: the added candidates are left out")
    if method.settings.get("width", 1) != 1 and not engine.drafts_trees:
        notes.append(
            f"{name} drafts chains: the tree (width {method.settings['width']}) is left out"
        )
    note = engine.methods[method.name]
    if note:
        folder = "" if method.head is None else quote(method.head.folder)
        notes.append(
            note.format(**{**method.settings, "head": folder, "target": quote(method.target)})
        )
    return notes
