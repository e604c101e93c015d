"""The runner of a GliDe draft model (Du et al. 2024), which drafts from its own KV cache and the target's.

Its queries see the target's keys of committed tokens alone, all but the last: the target has not been run on that one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specgen.base.errors import SpecgenError
from specgen.base.machine import launch
from specgen.base.types import Context
from specgen.engine.devices import upload
from specgen.engine.forward_pass import NO_NODES, ForwardPass, ModelOutput, positions
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.attention import WIDE, sight_of_chain
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import norm_gain
from specgen.engine.native.layer_weights import EMBEDDING, HEAD
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.products import ProductFactory
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.parts.exit_layers import known_architecture
from specgen.engine.parts.feature_runner import PartRunners
from specgen.engine.parts.glide_layers import CrossInputs, GlideLayers
from specgen.engine.parts.weights import GlideWeights


def make_runners(
    weights: GlideWeights, model: Model, target: ModelRunner, penalties: Callable[[], PenaltyProcessor | None]
) -> PartRunners:
    """Returns the target's runner and the draft model's. Raises SpecgenError if the weights do not fit the target `model`.

    `target` runs the whole `model`; it is the one that verifies. `penalties` makes the penalties on the draft's logits.
    """
    return PartRunners(target, GlideRunner(weights, model, target, penalties()))


class GlideRunner(ModelRunner):
    """Runs a GliDe draft model. Implements `DraftRunner`. Its context limit and its vocabulary are the target's.

    With one layer, its cached keys and values are functions of the tokens alone, so those of accepted tokens stay. Those of a
    later layer also depend on what the target had cached then, so accepted tokens are run again.
    """

    def __init__(
        self, weights: GlideWeights, model: Model, target: ModelRunner, penalties: PenaltyProcessor | None = None
    ) -> None:
        forward = GlideForward(weights, model, target)
        super().__init__(model, penalties, forward, forward.new_cache())
        self._keeps_accepted = len(forward.architecture.layers) == 1

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """Returns the logits after the last context token and after each draft token; see `ModelRunner.logits`."""
        if not self._keeps_accepted and len(context) != self._cached.committed:
            self._cached.draft = NO_NODES
        return super().logits(context, draft, parents, start=start)


class GlideForward:
    """The forward function of a GliDe draft model. `target` runs the target `model`."""

    @inference
    def __init__(self, weights: GlideWeights, model: Model, target: ModelRunner) -> None:
        self.architecture, self._target_architecture = weights.architecture, known_architecture(model, "glide")
        self._target_model, self._target = model, target
        self._check(weights)
        device, dtype, architecture, tensors = model.device, model.dtype, self.architecture, weights.tensors
        factory = ProductFactory(device, dtype)

        def take(name: str) -> torch.Tensor:
            return tensors[name].to(device)

        gain, is_native = norm_gain(architecture, dtype, device), isinstance(model, NativeModel)
        self._layers = GlideLayers(
            architecture, self._target_architecture, take, dtype, factory, device, native_keys=is_native, norm_gain=gain
        )
        self._embedding = take(EMBEDDING).to(dtype) if EMBEDDING in tensors else None
        self._head = factory(take(HEAD).to(dtype)) if HEAD in tensors else None
        self._devices = [device] * len(architecture.layers)
        self._inputs = InputMaker(architecture, dtype, self._devices)
        rounded = None if self._target_architecture.rotary_in_float32 else dtype
        rotary = self._target_architecture.rotary
        self._rotations = {name: RotaryTable(each, device, rounded) for name, each in rotary.items()}
        first = len(self._target_architecture.layers) - len(architecture.layers)
        self._read_layers = range(first, len(self._target_architecture.layers))

    def new_cache(self) -> KVBuffer:
        """Returns an empty KV cache for the draft model's layers."""
        made = self.architecture
        return KVBuffer(self._devices, made.num_kv_heads, made.head_size, self._target_model.dtype)

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        cached, _ = self._target.share_prefix(forward_pass.context)
        has_long_rope = any(rotary.long_boundary is not None for rotary in self.architecture.rotary.values())
        inputs = self._inputs(forward_pass._replace(long_rope=forward_pass.long_rope and has_long_rope))
        cross = self._cross_inputs(forward_pass, cached, logits_to_keep)
        target, ids = self._target_model, upload(torch.tensor(forward_pass.ids), self._target_model.device)
        hidden = target.embeddings(ids) if self._embedding is None else self._embedding.index_select(0, ids)
        normed = self._layers(hidden, inputs, cross, logits_to_keep)
        return ModelOutput(target.head_logits(normed) if self._head is None else self._head(normed), normed)

    def _cross_inputs(self, forward_pass: ForwardPass, cached: int, logits_to_keep: int) -> list[CrossInputs | None]:
        """Returns the inputs of each layer's cross-attention to the target's first `cached` tokens."""
        if cached == 0:
            return [None] * len(self._read_layers)
        cache = self._target.cache
        rows = [forward_pass.last - forward_pass.first] * (len(self._read_layers) - 1) + [logits_to_keep]
        return [
            CrossInputs(
                *cache.keys_and_values(layer, cached),
                self._rotation(layer, forward_pass, count),
                *self._visible(forward_pass.last - count, count, cached),
            )
            for layer, count in zip(self._read_layers, rows, strict=True)
        ]

    def _rotation(self, layer: int, forward_pass: ForwardPass, rows: int) -> torch.Tensor | None:
        """Returns the rotations of the target's layer at the positions of the pass's last `rows` tokens."""
        name = self._target_architecture.layers[layer].rotary
        if name is None:
            return None
        table, at, is_long = self._rotations[name], positions(forward_pass)[-rows:], forward_pass.long_rope
        if isinstance(at, range):
            return table.rows(at.start, at.stop, is_long)[:, None]
        return table.gather(upload(torch.tensor(at), self._target_model.device), is_long, forward_pass.last)[:, None]

    def _visible(self, first: int, rows: int, cached: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns `mask` and `sees` of `CrossInputs` for the tokens from cache index `first` on: each sees the keys before it."""
        if first >= cached:  # the context's last token and those of the draft see all
            return None, None
        device, dtype, theirs = self._target_model.device, self._target_model.dtype, self._target_architecture
        sight, sees = sight_of_chain(first - 1, rows, 0, cached, device), None
        if first == 0:
            sight.hidden[0] = False
            sees = torch.ones(rows, 1, dtype=dtype, device=device)
            sees[0] = 0
        return sight.mask(None, dtype, 1 if rows >= WIDE else theirs.num_heads // theirs.num_kv_heads), sees

    def _check(self, weights: GlideWeights) -> None:
        """Raises SpecgenError if the draft model cannot be run with this target."""
        if launch() is not None:
            raise SpecgenError(
                "glide reads the target's keys and values, which are split over torchrun's processes",
                "Take another method, or run without torchrun",
            )
        if not {EMBEDDING, HEAD} <= weights.tensors.keys():
            self._target_model.check_layers("glide")
        known = {None, self._target_model.shape.rope_boundary}
        if {rotary.long_boundary for rotary in self.architecture.rotary.values()} - known:
            problem = "the head's rotary embedding changes at another context length than the target's (LongRoPE)"
            raise SpecgenError(problem, "Take a head that was trained for this target")
