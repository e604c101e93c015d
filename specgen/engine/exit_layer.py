"""EESD's trained part: an exit layer with its norm and head (section 3.1), and Cali-TS's predictor (section 3.3, Eq. 5)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from specgen.engine.inference_mode import inference
from specgen.errors import SpecgenError, is_out_of_memory

MOST_LAYERS = 2  # the paper's Figure 5: more than one gains little
TOLERANCE = {torch.float32: 1e-3}  # of the largest logit, as in the check of a rollback
NARROW_TOLERANCE = 0.1

Mask = torch.Tensor | Mapping[str, torch.Tensor]


class ExitOutput(NamedTuple):
    """`logits` [batch, rows, vocabulary]; `hidden` [batch, rows, width], what the head saw: the rows behind the norm."""

    logits: torch.Tensor
    hidden: torch.Tensor


class ExitLayer(nn.Module):
    """Decoder layers of the target's own class, its norm and its head, to stand behind the target's first layers.

    The layers count their cache places from 0: a cache of its own needs `len(exit.layers)` of them. Without layers it is a norm
    and a head alone, the paper's ablation.
    """

    def __init__(
        self, layers: Iterable[nn.Module], kinds: Iterable[str | None], norm: nn.Module, head: nn.Module, config: Any
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.kinds = list(kinds)
        self.norm, self.head = norm, head
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    @classmethod
    def of(cls, model: Any, layers: int = 1) -> ExitLayer:
        """An untrained one for the target `model`: copies of its last layers, norm and head, with its logits' cap.

        Raises SpecgenError where the model is not built as Llama is.
        """
        if not 0 <= layers <= MOST_LAYERS:
            raise SpecgenError(f"the exit has {layers} layers", f"It can have 0 (a head alone) to {MOST_LAYERS}")
        check_split(model)
        own = [copy.deepcopy(layer) for layer in decoder_of(model).layers[len(decoder_of(model).layers) - layers :]]
        for position, layer in enumerate(own):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = position
        kinds = layer_kinds(model)[len(layer_kinds(model)) - layers :]
        norm, head = copy.deepcopy(decoder_of(model).norm), copy.deepcopy(model.lm_head)
        return cls(own, kinds, norm, head, model.config.get_text_config()).requires_grad_(False).eval()

    def forward(
        self,
        hidden: torch.Tensor,
        positions: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
        cache: Any = None,
        *,
        keep: int | None = None,
    ) -> ExitOutput:
        """The rows behind the last `keep` of the target's hidden rows [batch, n, width] at layer N, or behind all of them.

        `positions` are the decoder's rotary embeddings (cos, sin) of the n rows; `mask` is additive [1 or batch, 1, n, past + n],
        or a mapping with one a kind of layer; `cache` a transformers Cache, written at its layers 0, 1, ...
        """
        hidden = self.run(hidden, positions, mask, cache)
        return self.read(hidden if keep is None else hidden[:, -keep:])

    def run(
        self, hidden: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], mask: Mask, cache: Any = None
    ) -> torch.Tensor:
        """Through the layers alone, without norm and head."""
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            own = mask if isinstance(mask, torch.Tensor) else mask[str(kind)]
            hidden = layer(
                hidden,
                attention_mask=own,
                position_embeddings=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return hidden

    def read(self, hidden: torch.Tensor) -> ExitOutput:
        """Norm and head on what the layers gave [..., width]."""
        hidden = self.norm(hidden)
        logits = self.head(hidden)
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return ExitOutput(logits, hidden)


class Predictor(nn.Module):
    """How likely a drafted token is accepted: theta_M = sigmoid(w . [W_i h_T, h_D]) for place i = 1, 2, ... of a draft.

    h_T is the target's last row behind its norm, the one that produced the last committed token; h_D is the draft's row that
    produced the drafted token. W_i does nothing but give the row w' W_i, so that row is what is trained and kept: the same
    function with one d-th of the numbers. Places from the tenth on share theirs.
    """

    PLACES = 10

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target_weights = nn.Parameter(torch.zeros(self.PLACES, width))
        self.draft_weights = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(self.PLACES))

    def offsets(self, target_row: torch.Tensor) -> torch.Tensor:
        """What a round's target row [..., width] contributes at each place [..., PLACES]: once a round is enough."""
        return nn.functional.linear(target_row.to(self.bias.dtype), self.target_weights, self.bias)

    def logits(self, offsets: torch.Tensor, draft_rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The sigmoid's argument for rows [..., n, width] at `places` [..., n], from 1, behind `offsets` [..., PLACES]."""
        index = places.clamp(1, self.PLACES) - 1
        return draft_rows.to(self.bias.dtype) @ self.draft_weights + offsets.gather(-1, index)

    def score(self, offsets: torch.Tensor, draft_row: torch.Tensor, position: int) -> torch.Tensor:
        """theta_M of the token at `place`, from 1, drawn from the row [width]: a scalar that is left on the device."""
        own = offsets[min(position, self.PLACES) - 1]
        return torch.sigmoid(draft_row.to(self.bias.dtype) @ self.draft_weights + own)


def decoder_of(model: Any) -> Any:
    """The decoder inside a causal language model, which has `embed_tokens`, `layers`, `norm` and `rotary_emb`."""
    return getattr(model, model.base_model_prefix, None)


def layer_kinds(model: Any) -> list[str | None]:
    """The kind of attention of each layer, None where the model's code does not tell them apart."""
    count = len(decoder_of(model).layers)
    return list(getattr(model.config.get_text_config(), "layer_types", None) or [None] * count)


def missing_part(model: Any) -> str | None:
    """The first part that a model would need for its layers to be run one by one; None where all are there."""
    decoder = decoder_of(model)
    missing = [part for part in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(decoder, part)]
    return next(iter(missing), None if hasattr(model, "lm_head") else "lm_head")


@inference
def check_split(model: Any, method: str = "early exit") -> None:
    """Refuse a model whose layers, run one by one as they are here, do not give its own logits.

    A few tokens tell: a family with a different norm, head, embedding or position scheme would draft nonsense in silence.
    """
    name = model.config.model_type
    decoder = decoder_of(model)
    if missing := missing_part(model):
        raise _refusal(method, name, f"its decoder has no {missing}")
    ids = torch.tensor([[token % decoder.embed_tokens.weight.shape[0] for token in (5, 9, 7, 3)]], device=model.device)
    whole = ExitLayer(decoder.layers, layer_kinds(model), decoder.norm, model.lm_head, model.config.get_text_config())
    try:
        hidden = decoder.embed_tokens(ids)
        size = ids.shape[1]
        positions = decoder.rotary_emb(hidden, torch.arange(size, device=model.device)[None])
        mask = torch.full((size, size), torch.finfo(hidden.dtype).min, dtype=hidden.dtype, device=model.device).triu(1)[
            None, None
        ]
        masks: Mask = {str(kind): mask for kind in whole.kinds}
        found = whole(hidden, positions, masks).logits.float()
        own = model(input_ids=ids, use_cache=False).logits.float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _refusal(method, name, f"running its layers one by one ends in {type(error).__name__}") from error
    if own.isnan().any():  # damaged weights: said when they are used
        return
    if not float((found - own).abs().max()) <= TOLERANCE.get(model.dtype, NARROW_TOLERANCE) * float(own.abs().max()):
        raise _refusal(method, name, "its layers, run one by one, do not give its own logits")


def _refusal(method: str, name: str, why: str) -> SpecgenError:
    return SpecgenError(
        f"{method} needs a model built as Llama is, and {name} is not: {why}",
        "Take a Llama-like target (Llama, Mistral, Qwen, Phi-3, Gemma, OLMo), or a draft model: -m svip",
    )
