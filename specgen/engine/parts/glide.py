"""A GliDe draft model (Du et al. 2024): a small Llama whose layers also attend to the target's KV
cache.

Its queries see the target's keys of the committed tokens except the last one, on which the target
has not been run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from specgen.base.errors import SpecgenError
from specgen.base.machine import launch
from specgen.base.types import Context
from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardPass, ModelOutput, positions
from specgen.engine.kernels.operators import Kernels, SeenSlots
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner, Runners
from specgen.engine.native.attend import WIDE, attend, attend_batch
from specgen.engine.native.attention import head_order
from specgen.engine.native.attention_mask import chain_mask
from specgen.engine.native.inputs import PassInputs, layer_kinds
from specgen.engine.native.layer_files import EMBEDDING, HEAD, final_norm
from specgen.engine.native.linear import Linear, MakeLinear
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.norms import output_norm
from specgen.engine.native.rotary import RotaryTable, rotate
from specgen.engine.parts.own_layers import known_architecture
from specgen.engine.parts.part import DecoderRunner, GlideWeights, native_layers, part_weight
from specgen.engine.penalties import PenaltyProcessor


class CrossInputs(NamedTuple):
    """What the cross-attention of one layer needs in a pass over several tokens of one sequence, or
    of each of `batch` sequences.

    `keys` and `values` are those of one layer of the target, and `mask` hides some of them (None:
    none), all in the shapes that `attend` takes, or with `batch` those that `attend_batch` takes.
    `rotation` [batch * rows, 1, R/2] is the target's rotary embedding at the positions of the
    tokens (None: this layer of the target has none). `seen` are the keys that each token sees, for
    our own kernels, which take no mask; None: torch computes.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rotation: torch.Tensor | None
    mask: torch.Tensor | None = None
    batch: int | None = None
    seen: SeenSlots | None = None


class CrossAttention:
    """Attention to the cached keys and values of the target. Only its queries and its output have
    weights.

    The target's keys are rotated already, so the queries are rotated as the target's are. Queries
    are scaled by 1 / sqrt(the target's head size). There is no norm, score cap or sliding window.
    `q_proj` [heads * head size, width] has the rows of a head in the order of the model's files.
    Keys of a `NativeModel` are in the native decoder's order, which is taken into account.
    """

    def __init__(
        self,
        target: Model,
        q_proj: torch.Tensor,
        o_proj: torch.Tensor,
        dtype: torch.dtype,
        make_linear: MakeLinear,
    ) -> None:
        architecture = known_architecture(target.shape, "glide")
        self._kernels = make_linear.kernels
        self._heads = architecture.num_heads
        self._size = architecture.head_size
        self._scale = self._size**-0.5
        order = head_order(architecture, q_proj.device)
        query = q_proj.view(self._heads, self._size, -1)[:, order].flatten(0, 1)
        self._query = make_linear(part_weight(query, dtype, make_linear), None, 1.0)
        self._output = make_linear(part_weight(o_proj, dtype, make_linear), None, 1.0)
        self._key_order = None if isinstance(target, NativeModel) else order.argsort()

    def __call__(self, hidden: torch.Tensor, inputs: CrossInputs) -> torch.Tensor:
        """Returns the residual stream `hidden` [rows, width] with the attention's output added. The
        queries are computed from `hidden`."""
        query = self._query(hidden).view(-1, self._heads, self._size)
        if self._kernels is not None and inputs.seen is not None:
            return self._output.add_to(hidden, self._by_kernels(self._kernels, query, inputs))
        if inputs.rotation is not None:
            rotate(query, inputs.rotation)
        if self._key_order is not None:
            query = query.index_select(2, self._key_order)
        query = query * self._scale
        if inputs.batch is None:
            mixed = attend(query, inputs.keys, inputs.values, inputs.mask)
        else:
            assert inputs.mask is not None
            query = query.view(inputs.batch, -1, self._heads, self._size)
            mixed = attend_batch(query, inputs.keys, inputs.values, inputs.mask).flatten(0, 1)
        return self._output.add_to(hidden, mixed)

    def _by_kernels(
        self, kernels: Kernels, query: torch.Tensor, inputs: CrossInputs
    ) -> torch.Tensor:
        """Returns the attention of queries [rows, heads, head size], [rows, heads * head size]."""
        assert inputs.seen is not None
        if inputs.rotation is not None:
            kernels.rotate_and_write(query, self._heads, 0, inputs.rotation[:, 0], None)
        if self._key_order is not None:
            query = query.index_select(2, self._key_order)
        return kernels.attention(query, inputs.keys, inputs.values, inputs.seen, self._scale)


class GlideLayers:
    """All layers of a GliDe draft model for `target`, and its final norm. Each layer has
    self-attention, cross-attention and an MLP.

    The weights are rounded to `dtype`. All operations can be differentiated. `norm_gain` is `gain`
    of `norms.norm_function`.
    """

    def __init__(
        self,
        weights: GlideWeights,
        target: Model,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        norm_gain: float = 1.0,
    ) -> None:
        architecture = weights.architecture

        def take(name: str) -> torch.Tensor:
            return weights.tensors[name].to(target.device)

        _, kinds = layer_kinds(architecture, [target.device] * len(architecture.layers))
        self._layers = native_layers(architecture, kinds, take, dtype, make_linear, norm_gain)
        self._attentions: list[CrossAttention] = []
        for index in range(len(kinds)):
            q_proj, o_proj = (
                take(f"layers.{index}.cross_attn.{name}_proj.weight") for name in "qo"
            )
            self._attentions.append(CrossAttention(target, q_proj, o_proj, dtype, make_linear))
        norm = final_norm(architecture, take, dtype, norm_gain)
        self._norm = output_norm(architecture.norm_eps, norm_gain, norm)

    def __call__(
        self, hidden: torch.Tensor, inputs: PassInputs, cross: Sequence[CrossInputs]
    ) -> torch.Tensor:
        """Runs the layers on embeddings [n, width], and returns the hidden states [n, width] after
        the final norm.

        `cross` has the inputs of each layer's cross-attention; empty if the target has no cached
        keys, which leaves it out.
        """
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, inputs, mlp=False)
            if cross:
                hidden = self._attentions[index](hidden, cross[index])
            hidden = layer(hidden, inputs, attention=False)
        return self._norm(hidden)


class GlideRunner(DecoderRunner):
    """Runs a GliDe draft model. Implements `DraftRunner`. Its context limit and its vocabulary are
    the target's. Raises SpecgenError if the target has too few layers with keys.

    In a draft model with one layer, cached keys and values depend on the tokens alone, so those of
    accepted tokens are kept. In later layers they also depend on how many tokens the target had
    cached, so accepted tokens are run again.
    """

    def __init__(
        self,
        weights: GlideWeights,
        model: Model,
        target: ModelRunner,
        penalties: PenaltyProcessor | None,
    ) -> None:
        super().__init__(weights, model, self._run, penalties)
        self._target = target
        self._theirs = known_architecture(model.shape, "glide")
        self._layers = GlideLayers(weights, model, model.dtype, self.make_linear, self.gain)
        with_keys = [
            index for index, kind in enumerate(self._theirs.layers) if kind.mixer == "attention"
        ]
        if len(with_keys) < len(self.devices):
            problem = (
                f"this GliDe model reads the keys of {len(self.devices)} layers, "
                f"and the target has {len(with_keys)} with keys"
            )
            raise SpecgenError(problem, "Take a head that was trained for the target, or -m lookup")
        self._read_layers = with_keys[-len(self.devices) :]
        head = weights.tensors.get(HEAD)
        self._lm_head: Linear | None = None
        if head is not None:
            own = part_weight(head.to(self.device), model.dtype, self.make_linear)
            self._lm_head = self.make_linear(own)
        rounded = None if self._theirs.rotary_in_float32 else model.dtype
        self._rotations = {
            name: RotaryTable(each, self.device, rounded)
            for name, each in self._theirs.rotary.items()
        }

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits after the context (index 0) and after each draft token i (index i +
        1), from index `start` on.

        The arguments are those of `ModelRunner.logits`.
        """
        committed = self._cached.committed
        if len(self.devices) > 1 and len(context) != committed:
            # a context of one token has seen no key of the target
            self._cached.truncate(committed if committed > 1 else 0)
        return super().logits(context, draft, parents, start=start)

    def _run(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        normed = self._layers(
            self.embed(forward_pass), self.inputs(forward_pass), self._cross_inputs(forward_pass)
        )
        kept = normed[-logits_to_keep:]
        return ModelOutput(
            self.target_model.head_logits(kept) if self._lm_head is None else self._lm_head(kept),
            kept,
        )

    def _cross_inputs(self, forward_pass: ForwardPass) -> list[CrossInputs]:
        """Returns the inputs of each layer's cross-attention. A token sees the target's keys of the
        tokens before it.

        The first token of the context, which has none before it, sees its own key.
        """
        cached, _ = self._target.share_prefix(forward_pass.context)
        if cached == 0:
            return []
        mask, first, rows = None, forward_pass.first, forward_pass.last - forward_pass.first
        seen: SeenSlots | None = None
        if self.make_linear.kernels is not None:
            ends = torch.arange(first, first + rows).clamp(1, cached)
            ranges = torch.zeros(rows, 4, dtype=torch.int32)
            ranges[:, 1] = ends
            seen = SeenSlots(ranges, torch.zeros(1, dtype=torch.int32))
        elif first < cached:  # the context's last token and those of the draft see all
            attention_mask = chain_mask(first - 1, rows, 0, cached, self.device)
            attention_mask.excluded[:, 0] = False
            group = 1 if rows >= WIDE else self._theirs.num_heads // self._theirs.num_kv_heads
            mask = attention_mask.additive(None, self.target_model.dtype, group)
        at = upload(torch.tensor(positions(forward_pass)), self.device)
        boundary = self._theirs.rope_boundary
        made = []
        is_long = boundary is not None and forward_pass.context.prompt_length > boundary
        for layer in self._read_layers:
            name = self._theirs.layers[layer].rotary
            rotation = None
            if name is not None:
                rotation = self._rotations[name].gather(at, is_long, forward_pass.last)[:, None]
            made.append(
                CrossInputs(
                    *self._target.cache.keys_and_values(layer, cached), rotation, mask, seen=seen
                )
            )
        return made


@torch.no_grad()
def make_runners(
    weights: GlideWeights,
    model: Model,
    target: ModelRunner,
    penalties: Callable[[], PenaltyProcessor | None],
) -> Runners:
    """Returns `target`, which runs the whole `model` and verifies, and a runner of the GliDe draft
    model.

    `penalties` makes the penalty processor for the draft's logits. Raises SpecgenError if the draft
    model cannot be run with this target.
    """
    if launch() is not None:
        problem = (
            "glide reads the target's keys and values, which are split over torchrun's processes"
        )
        raise SpecgenError(problem, "Take another method, or run without torchrun")
    if not {EMBEDDING, HEAD} <= weights.tensors.keys():
        model.check_layers("glide")
    return Runners(target, GlideRunner(weights, model, target, penalties()))
