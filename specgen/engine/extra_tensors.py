"""Tensors in a model's files that its config.json does not describe. Some are known and harmless; any other means that weights
and config do not belong together, and that the model would generate nonsense."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specgen.base.errors import SpecgenError

# Buffers that older versions of transformers saved, which are computed from the config; and parts of a model that its next token
# does not depend on: heads that predict several tokens, value heads, and encoders of pictures and sound.
BUFFER = re.compile(r"\.(original_)?inv_freq$|\.(cos|sin)_cached$|(^|\.)position_ids$")
_HARMLESS = re.compile(
    BUFFER.pattern
    + r"|(^|\.)(mtp|mtp_\w+|v_head|medusa_head|vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\."
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_no_extra(names: Iterable[str], model: str, layers: int, prediction_layers: int = 0) -> None:
    """Raises SpecgenError if `names`, of tensors that a model has no use for, contain others than harmless ones.

    `model` is the model's name, for the message; `layers` is the number of its layers, after which its files may have
    `prediction_layers` further ones that predict several tokens at once (`num_nextn_predict_layers`).
    """
    extra = sorted(name for name in names if not _HARMLESS.search(name) and not _predicts(name, layers, prediction_layers))
    if extra:
        tensors = "a tensor" if len(extra) == 1 else f"{len(extra):,} tensors"
        raise SpecgenError(
            f"{model} has {tensors} that its config.json does not describe (the first: {extra[0]})",
            "Its weights and its config do not belong together: download or save it again",
        )


def _predicts(name: str, layers: int, prediction_layers: int) -> bool:
    found = _LAYER.search(name)
    return found is not None and layers <= int(found[1]) < layers + prediction_layers
