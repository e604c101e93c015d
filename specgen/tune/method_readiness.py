"""Which methods can run with a target, its trained parts and a draft model, and what the others lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.engine.model_loading import PreparedModel
from specgen.engine.parts.trained_part import open_part
from specgen.methods.adaptive import Adaptive
from specgen.methods.method import HEADS, Method, training_command
from specgen.pair.pair import Pair
from specgen.pair.parts import PartStore

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a method can run with these models. If it cannot, `why` is the reason and `hint` says what to do."""

    ready: bool
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """The paths of the trained parts that the user named: an exit layer, and a head. None: look for those of the target."""

    exit_layer: Path | None = None
    head: Path | None = None


NO_PARTS = TrainedParts()


def readiness(target: PreparedModel, parts: TrainedParts, *, has_draft: bool, by_text: bool) -> dict[str, Readiness]:
    """Returns for each method whether it can run, as far as the models' files show. Reads no weights of models.

    `by_text`: drafts cannot be translated token by token, only by way of their text. Raises SpecgenError if a part that is named
    does not exist, is damaged or belongs to another target.
    """
    missing, unlike_llama = _missing_parts(target, parts), _unlike_llama(target)
    return {
        name: _readiness(method, missing, unlike_llama, has_draft=has_draft, by_text=by_text)
        for name, method in methods.METHODS.items()
    }


def _missing_parts(target: PreparedModel, parts: TrainedParts) -> Mapping[str, Readiness]:
    """Returns why there is no exit layer (`exit`) and no head of a kind, for those that are missing, with a hint each."""
    shape, cpu = target.shape, torch.device("cpu")
    sizes = SimpleNamespace(shape=shape, device=cpu)
    unloaded = SimpleNamespace(name=target.name, folder=target.folder, device=cpu, context_limit=shape.context_limit, model=sizes)
    store = PartStore(cast("LoadedModel", unloaded), is_bundled=target.source.label == "demo/target")
    if parts.exit_layer is not None:
        store.named["exit"] = open_part(parts.exit_layer, cast("LoadedModel", unloaded), is_exit=True)
    if parts.head is not None:
        store.name(parts.head, is_exit=False)
    location = None if target.source.label else target.source.location
    missing: dict[str, Readiness] = {}
    for kind in ("exit", *HEADS):
        if store.find(kind) is None:
            error, train = store.refusal(kind), training_command(kind, location)
            why = f"no {'exit layer' if kind == 'exit' else 'head'}"
            missing[kind] = Readiness(False, why, f"train one with {train}")
            if error is not None:
                missing[kind] = Readiness(False, error.message, error.hint)
    return missing


def _readiness(
    method: Method, missing: Mapping[str, Readiness], unlike_llama: str | None, *, has_draft: bool, by_text: bool
) -> Readiness:
    """Returns whether a method can run. `unlike_llama` is the target's family if its layers cannot be run one by one."""
    if unlike_llama is not None and (method.splits_target or method.head):
        why = f"needs a model built as Llama is, and {unlike_llama} is not"
        return Readiness(False, why, "take a draft model, or lookup")
    if (part := "exit" if method.needs_exit_layer else method.head) in missing:
        return missing[part]
    if not method.uses_draft_model or not (has_draft or method.needs_draft_model):
        return Readiness(True, "needs no draft model")
    if not has_draft:
        return Readiness(False, "no draft model", "name one with --draft")
    if by_text and "translation" not in method.settings:
        return Readiness(False, "the tokenizers differ", "take a draft of the target's family")
    if by_text:
        return Readiness(True, "with translation=text")
    return Readiness(True)


def obstacle(pair: Pair, name: str) -> SpecgenError | None:
    """Returns the error with which the method cannot be prepared for decoding with the loaded pair; None if it can."""
    method = methods.METHODS[name]
    # settings that are `auto` by default would have to be measured: they are given
    given: dict[str, Any] = {"skip": "0"} if method.skips_layers else {"window": 1} if method.is_parallel else {}
    given |= {"draft_cost": 0, "verify_cost": 0} if method.policy == Adaptive.name else {}
    if pair.draft is not None and pair.draft.refusal is not None and "translation" in method.settings:
        given |= {"translation": "text"}
    try:
        pair.run(pair.request([1], name, SamplingParams(max_new_tokens=1), **given))
    except SpecgenError as error:
        return error
    return None


def planned(pair: Pair, found: Mapping[str, Readiness]) -> dict[str, Readiness]:
    """Returns for each method whether it can run on the loaded pair: `found`, which was read from the files, corrected."""
    errors = {name: obstacle(pair, name) for name in methods.METHODS}
    return {
        name: found[name] if error is None or not found[name].ready else Readiness(False, error.message, error.hint)
        for name, error in errors.items()
    }


def _unlike_llama(prepared: PreparedModel) -> str | None:
    """Returns the model's family if its layers cannot be run one by one; None if they can, or if that is not known."""
    if prepared.backend == "native":
        return None
    from specgen.engine.transformers.transformers_model import missing_part, model_without_weights

    model = model_without_weights(prepared.transformers_config, prepared.source.trust_remote_code)
    return None if model is None or missing_part(model) is None else prepared.shape.model_type
