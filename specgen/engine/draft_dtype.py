"""Chooses the dtype of a draft model: that of both models, or one of its own, which may round its weights to 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specgen.base.errors import SpecgenError
from specgen.base.types import QUANTISED
from specgen.engine.devices import DTYPES
from specgen.engine.dtype_choice import DtypeChoice
from specgen.engine.model_loading import PreparedModel
from specgen.engine.native.products import refusal


def choose_draft_dtype(name: str | None, dtype: str, draft: PreparedModel, device: torch.device) -> DtypeChoice:
    """Returns the dtype of a draft model: what --draft-dtype names, or if that is None what --dtype names.

    A draft that is quantised computes in float32 on a CPU, where its products take the same time in all dtypes, and elsewhere in
    the dtype of its weights. If this machine has no products that work for it, the choice is not quantised and says why. Raises
    SpecgenError for an unknown name, and to quantise a model that transformers runs.
    """
    if name is None or name not in QUANTISED:
        return draft.choose_dtype(name or dtype, device)
    if draft.config.architecture is None:
        raise SpecgenError(
            f"--draft-dtype {name} needs the native backend, and {draft.name} runs on transformers: {draft.config.fallback}",
            "Leave it out, or take auto, float32, bfloat16 or float16",
        )
    if (problem := refusal(name, device)) is not None:
        return replace(draft.choose_dtype(dtype, device), warning=f"{draft.name} is not quantised: {problem}")
    own = torch.float32 if device.type == "cpu" else DTYPES.get(str(draft.shape.dtype), torch.float32)
    return DtypeChoice(own, "chosen by --draft-dtype", name)


def choose_dtypes(
    models: Sequence[PreparedModel], devices: Sequence[torch.device], dtypes: tuple[str, str | None]
) -> list[DtypeChoice]:
    """Returns the dtype of a target and, if there is one, of its draft model.

    `dtypes` are what --dtype and --draft-dtype name. Raises SpecgenError as `choose_draft_dtype` does.
    """
    target, *drafts = models
    of_drafts = [choose_draft_dtype(dtypes[1], dtypes[0], draft, devices[1]) for draft in drafts]
    return [target.choose_dtype(dtypes[0], devices[0]), *of_drafts]


def as_chosen(draft: PreparedModel, choice: DtypeChoice) -> PreparedModel:
    """Returns the draft model, to be loaded with its weights rounded if the choice says so."""
    return replace(draft, source=replace(draft.source, quantise=choice.quantise))
