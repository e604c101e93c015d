"""The models to export, of a loaded pair."""

from __future__ import annotations

from collections.abc import Iterable

from specgen import methods
from specgen.base.part_kinds import MTP
from specgen.base.types import SamplingParams
from specgen.engine.draft_model import DraftModel
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.config_reading import text_config
from specgen.engine.parts.trained_part import HeadVariant, TrainedPart
from specgen.pair.pair import Pair
from specgen.tune.exports.engines import ENGINES
from specgen.tune.exports.records import ExportedHead, ExportedModels

# layers without keys and values for each token, in `layer_types` of config.json
_RECURRENT = ("linear_attention", "conv", "mamba", "recurrent")


def exported_models(
    pair: Pair,
    engine: str,
    tuned: Iterable[str],
    sampling: SamplingParams,
    draft_dtype: str | None,
) -> ExportedModels:
    """Returns the pair's models for an engine, with the heads of the `tuned` methods, which it
    loads.

    `sampling` is that for which the methods were tuned; `draft_dtype` is what the draft's weights
    were rounded to, None if they were not.
    """
    target = pair.target
    draft = pair.draft
    return ExportedModels(
        _name(target, engine),
        None if draft is None else _name(draft, engine),
        _heads(pair, tuned, _name(target, engine)),
        is_pard=draft is not None and draft.drafts_blocks,
        tokenizers_differ=draft is not None and _is_translated(draft),
        draft_dtype=draft_dtype,
        target_gguf=_gguf_file(target),
        draft_gguf=None if draft is None else _gguf_file(draft),
        target_type=target.shape.model_type,
        mixers=_mixers(target),
        sampling=_sampling(sampling),
    )


def _heads(pair: Pair, tuned: Iterable[str], target: str) -> dict[str, ExportedHead]:
    """Returns the heads by method. `target` is the target's name for the engine."""
    names = set(tuned) & methods.METHODS.keys()
    if methods.ADAPTIVE in names and pair.draft is None:
        names.add(MTP)  # with which it drafts
    heads = {}
    for name in names:
        kind = methods.find(name).head
        part = pair.parts.load(kind) if kind else None
        if part is not None and part.variant is not None:
            heads[name] = _head(part, part.variant, target)
    return heads


def _head(part: TrainedPart, variant: HeadVariant, target: str) -> ExportedHead:
    folder = target if variant.name == MTP else str(part.path)
    return ExportedHead(folder, variant.name, variant.longest, variant.rows, variant.layers)


def _name(model: LoadedModel, engine: str) -> str:
    """Returns the name by which the engine loads the model."""
    if ENGINES[engine].finds_bundled and model.files.source.is_bundled:
        return str(model.folder)
    return model.name


def _gguf_file(model: LoadedModel) -> str | None:
    return str(model.folder) if model.folder.is_file() else None


def _is_translated(draft: DraftModel) -> bool:
    return draft.translation is not None or draft.refusal is not None


def _mixers(target: LoadedModel) -> list[str]:
    """Returns what the target's layers have in place of attention, in each case once."""
    architecture = target.files.architecture
    if architecture is not None:
        return sorted({layer.mixer for layer in architecture.layers} - {"attention"})
    types = text_config(target.files.raw).get("layer_types")
    return sorted(set(types or ()) & set(_RECURRENT))


def _sampling(sampling: SamplingParams) -> dict[str, float]:
    if sampling.greedy:
        return {}
    return {"temperature": sampling.temperature, **sampling.active_filters}
