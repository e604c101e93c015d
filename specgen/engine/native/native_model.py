"""The native decoder: one implementation for all Llama-like families, driven by what config.json
says.

`load_native` builds a model from its safetensors files, one layer after the other, so that no
weight is in memory twice for long.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specgen.base.measuring import prefill_reports
from specgen.base.types import Context
from specgen.engine.devices import inference, move
from specgen.engine.forward_pass import (
    NO_NODES,
    BatchPass,
    ForwardFunction,
    ForwardPass,
    HiddenSource,
    LayerCall,
    ModelOutput,
)
from specgen.engine.gguf.rounded import restored
from specgen.engine.kernels.branches import PassProgram, Program, SegmentInputs, Table
from specgen.engine.kernels.operators import kernels_for
from specgen.engine.kernels.packing import FLOAT_KINDS
from specgen.engine.model import ALL_OPERATORS
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.families import tensor_names
from specgen.engine.native.inputs import CachePlace, InputMaker, PassInputs, layer_kinds
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_files import (
    EMBEDDING,
    EXIT_HEAD,
    FINAL_NORM,
    HEAD,
    final_norm,
    layer_files,
    read_layer,
)
from specgen.engine.native.layer_stack import SHORT_PASS, LayerStack
from specgen.engine.native.linear import DenseLinear, Linear, LinearFactory, kernel_runs
from specgen.engine.native.norms import norm_function, norm_gain, rms_norm
from specgen.engine.native.recurrent_states import RecurrentStates
from specgen.engine.native.tensors import tensor_shapes
from specgen.engine.weights import WeightFiles, model_files


class OwnEmbeddings:
    """The embeddings of tokens for each layer (Gemma 4): (`norm` RMSNorm(M x / sqrt(width)) +
    sqrt(size) E[token]) / sqrt(2).

    x is the model's embedding of the token. `table` [vocabulary, layers * size] is E, in any dtype;
    `projection` computes M x / sqrt(width), and `norm` is [size].
    """

    def __init__(
        self,
        architecture: Architecture,
        table: torch.Tensor,
        projection: Linear,
        norm: torch.Tensor,
    ) -> None:
        self._shape = architecture.num_layers, architecture.per_layer_size
        self._table = table
        self._projection = projection
        self._norm = norm * 0.5**0.5
        self._eps = architecture.norm_eps

    def __call__(self, ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [n, layers, size] of n token `ids`, whose embeddings in the model
        are [n, width]."""
        device = self._table.device
        own = (
            self._table.index_select(0, move(ids, device))
            .to(embeddings.dtype)
            .view(-1, *self._shape)
        )
        mixed = self._projection(move(embeddings, device)).view(-1, *self._shape)
        mixed = rms_norm(self._eps, self._norm, mixed)
        return mixed.add_(own, alpha=(self._shape[1] / 2) ** 0.5)


# bytes of weights; memory that is returned has to be cleared again for the next layers
_LEAST_RETURNED = 1 << 27
_OWN = tuple(
    f"{name}.weight"
    for name in (
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
    )
)


class OuterWeights(NamedTuple):
    """The weights of a native model outside of its layers.

    `embedding` [vocabulary, width] may be in another dtype than the model's, or a matrix of bytes
    (see `gguf.rounded`). `norm` [width] is the
    final norm's weight times the model's `norm_gain`.
    """

    embedding: torch.Tensor
    norm: torch.Tensor
    head: Linear
    own_embeddings: OwnEmbeddings | None = None


class NativeModel:
    """A model with its weights. Implements `engine.model.Model`.

    `norm_gain` is a factor in the weights that follow a norm (see `norms.norm_gain`). `rounding` is
    what the weights are rounded to, as in `LinearFactory`; None: they are not. `exact` pads
    passes so that in drafts without branches a token's logits have the same bits whichever tokens
    are run with it. With our own kernels they have, in draft trees too, and nothing is padded.
    `captures` makes the functions that `forward` returns run short passes as CUDA graphs (see
    `graphs`); None: no graphs. `layer_devices` has the device of each layer if they are on several.
    The embedding may be on another device than the norm and the head; the model's `device`, where
    all outputs are, is that of the norm and the head.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Sequence[NativeLayer],
        outer: OuterWeights,
        dtype: torch.dtype,
        *,
        norm_gain: float = 1.0,
        rounding: str | None = None,
        exact: bool = False,
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        self.architecture = self.shape = architecture
        self.outer = outer
        self.layers = layers
        self.dtype = dtype
        self.device = outer.norm.device
        self.norm_gain = norm_gain
        self.rounding = rounding
        self._unit_norm = norm_function(architecture.norm_eps, norm_gain)
        self.kernels = kernels_for(self.device, dtype)
        self.exact = exact and self.kernels is None
        self.layer_devices = layer_devices or [self.device] * len(architecture.layers)
        self.inputs = InputMaker(architecture, dtype, self.layer_devices, exact=self.exact)
        self.captures: Any = None  # a `graphs.Captures`, which cannot be imported here
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale).to(dtype))

    def new_cache(self, layers: range | None = None, *, sequences: int = 1) -> KVBuffer:
        """Returns an empty KV cache for the layers with these indices (None: all), for this number
        of sequences."""
        layers = range(len(self.layer_devices)) if layers is None else layers
        made = self.architecture
        devices = self.layer_devices[layers.start : layers.stop]
        options: dict[str, int] = {"first_layer": layers.start, "sequences": sequences}
        kinds = made.layers[layers.start : layers.stop]
        sizes = [
            (kind.kv_heads or made.num_kv_heads, kind.head_size or made.head_size) for kind in kinds
        ]
        # recurrent layers get entries of any layer
        any_owner = next(
            (index for index, kind in enumerate(kinds) if kind.mixer == "attention"), 0
        )
        owners = []
        for index, kind in enumerate(kinds):
            own = index if kind.mixer == "attention" else any_owner
            owners.append(own if kind.owner is None else kind.owner - layers.start)
        return KVBuffer(devices, sizes, self.dtype, reader=self.device, owners=owners, **options)

    def batch_cache(self, sequences: int) -> KVBuffer:
        return self.new_cache(sequences=sequences)

    def forward(
        self,
        layers: Sequence[LayerCall] | None = None,
        inputs: HiddenSource | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
    ) -> ForwardFunction:
        """Returns a function that runs some of the layers, short passes as static ones if there are
        `captures`; see `engine.model.Model`."""
        forward = NativeForward(self, layers, inputs, taps, with_head=with_head)
        function: ForwardFunction = (
            forward if self.captures is None else self.captures.wrapped(forward)
        )
        return function

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the embeddings [n, width] of the n tokens `ids`, as a new tensor on the
        embedding's device."""
        if len(ids) > 1:
            return self._embedded(torch.tensor(ids))
        # saves 1.5 % of a small draft's pass
        row = self.outer.embedding[ids[0] : ids[0] + 1]
        if row.dtype == torch.uint8:
            return self.scaled(restored(row))
        return self.scaled(row.to(self.dtype, copy=True))

    def embedding_table(self) -> Table | None:
        """Returns the embedding as the kernels read it; None if they cannot."""
        table = self.outer.embedding
        if table.dtype not in FLOAT_KINDS or not table.is_contiguous() or not table.is_cpu:
            return None
        return Table(table, self._embedding_scale)

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [..., width] of token ids [...], as they enter the first layer, on
        the model's device."""
        return move(self._embedded(ids), self.device).view(*ids.shape, -1)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [n, width] of n token ids of any shape, on the embedding's
        device."""
        table = self.outer.embedding
        rows = table.index_select(0, move(ids.flatten(), table.device))
        if rows.dtype == torch.uint8:
            return self.scaled(restored(rows))
        return self.scaled(rows.to(self.dtype))

    def scaled(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings if self._embedding_scale == 1.0 else embeddings * self._embedding_scale

    def norm_and_head(
        self, hidden: torch.Tensor, outer: OuterWeights, features: torch.Tensor | None = None
    ) -> ModelOutput:
        """Returns the output for hidden states [n, width] after the last layer: logits, hidden
        states after the final norm, and `features`."""
        states = self.normed(hidden, outer.norm)
        logits = final_logits(self.architecture, outer.head(states))
        return ModelOutput(logits, states, features=features)

    def normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns hidden states [n, width] after the final norm, whose `weight` [width] contains
        `norm_gain`."""
        if self.kernels is None or torch.is_grad_enabled():
            return self._unit_norm(hidden) * weight
        return self.kernels.rms_norm(hidden, weight, self.architecture.norm_eps)

    def head_logits(self, hidden: torch.Tensor, *, is_raw: bool = False) -> torch.Tensor:
        """Returns the logits [n, vocabulary] that the LM head computes from hidden states [n,
        width] after the final norm."""
        padded = self.inputs.with_padding(hidden, self.inputs.padded(hidden.shape[0]))
        logits = self.outer.head(padded)[: hidden.shape[0]]
        return logits if is_raw else final_logits(self.architecture, logits)

    def on_torch(self) -> tuple[str, ...]:
        if self.kernels is None:
            return ALL_OPERATORS
        counts = Counter(name for layer in self.layers for name in layer.on_torch)
        total = len(self.layers)
        names = [f"{name} ({count} of {total} layers)" for name, count in counts.items()]
        if self.outer.own_embeddings is not None:
            names.append("sums of the layers' own embeddings")
        if self.architecture.logit_scale != 1.0 or self.architecture.logit_cap is not None:
            names.append("factor and cap of the logits")
        return tuple(names)

    def check_layers(self, feature: str) -> None:
        """Does nothing: the layers can always be run one by one."""

    @inference
    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        boundary = self.shape.rope_boundary
        # layers that share keys and values do so in a cache
        cache = None if self.architecture.is_uniform else self.new_cache()
        inputs = self.inputs.of_chain(
            0, len(ids), cache, boundary is not None and len(ids) > boundary
        )
        if self.architecture.recurrent is not None:
            whole = ForwardPass(Context(ids), NO_NODES, 0, len(ids), None)
            inputs = self.inputs.with_steps(inputs, whole, RecurrentStates())
        forward = NativeForward(self)
        hidden = self.embed(ids)
        inputs = forward.with_own_embeddings(inputs, hidden, torch.tensor(ids))
        return self.norm_and_head(forward.run_layers(hidden, inputs)[0], self.outer).logits

    def batch(
        self,
        batch: BatchPass,
        layers: int | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
        logits_to_keep: int | None = None,
    ) -> ModelOutput:
        """Runs the first `layers` layers (None: all) on several sequences of n tokens; arguments
        and output as `engine.model.Model.batch`."""
        calls = None if layers is None else [LayerCall(index) for index in range(layers)]
        hidden = self._embedded(batch.ids)
        shape = batch.ids.shape
        if batch.cache is None and not self.architecture.is_uniform:
            batch = batch._replace(cache=self.batch_cache(shape[0]))
        forward = NativeForward(self, calls, taps=taps)
        inputs = forward.with_own_embeddings(self.inputs.batched(batch), hidden, batch.ids)
        hidden, features = forward.run_layers(hidden, inputs)
        hidden = hidden.view(*shape, -1)
        features = None if features is None else features.view(*shape, -1)
        if not with_head:
            return ModelOutput(hidden, hidden, features=features)
        kept = hidden if logits_to_keep is None else hidden[:, -logits_to_keep:]
        logits, states, *_ = self.norm_and_head(kept.flatten(0, 1), self.outer)
        assert states is not None
        return ModelOutput(
            logits.view(*kept.shape[:2], -1), states.view(kept.shape), features=features
        )

    def last_layers(self, folder: Path, count: int) -> dict[str, torch.Tensor]:
        """Returns float32 copies of the weights of the last `count` layers, the norm and the LM
        head, named as in an exit layer's file.

        Raises SpecgenError if they cannot be read from the model's files in `folder`.
        """
        names = tensor_names(self.architecture.model_type)
        files = model_files(folder, str(folder), self.device, names)
        first = len(self.layer_devices) - count
        taken: dict[str, str] = {}
        for index in range(count):
            own = tensor_shapes(layer_files(self.architecture, index))
            last = tensor_shapes(layer_files(self.architecture, first + index))
            taken |= zip(own, last, strict=True)
        taken |= {
            FINAL_NORM: FINAL_NORM,
            EXIT_HEAD: HEAD if HEAD in files or not self.architecture.tied else EMBEDDING,
        }
        return {own: files.take(name).to(torch.float32, copy=True) for own, name in taken.items()}

    def head_rows(self, folder: Path, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows [n, width] of the LM head for the token ids `ids` [n], in the dtype of
        the model's files in `folder`. Raises SpecgenError if they cannot be read."""
        names = tensor_names(self.architecture.model_type)
        files = model_files(folder, str(folder), self.device, names)
        name = HEAD if HEAD in files or not self.architecture.tied else EMBEDDING
        return files.take(name)[ids.to(self.device)]

    def free_weights(self, kept_layers: int = 0) -> None:
        """Frees the memory of all weights, or with `kept_layers` above 0 of all but the embedding
        and the first `kept_layers` layers."""
        none = self.outer.norm.new_empty(0, self.shape.hidden_size)
        self.layers = self.layers[:kept_layers]
        embedding = self.outer.embedding if kept_layers else none
        self.outer = self.outer._replace(embedding=embedding, head=DenseLinear(none))


class NativeForward:
    """Runs some layers of a model on the forward passes of a `ModelRunner`. A `ForwardFunction`.

    The arguments are those of `engine.model.Model.forward`. `outer` has the norm and the head that
    follow the layers; None: the function ends after the layers.
    """

    def __init__(
        self,
        model: NativeModel,
        layers: Sequence[LayerCall] | None = None,
        inputs: HiddenSource | None = None,
        taps: Sequence[int] = (),
        *,
        with_head: bool = True,
    ) -> None:
        self.model = model
        self.outer = model.outer if with_head else None
        self.inputs = inputs
        self.taps = tuple(taps)
        calls = (
            [LayerCall(index) for index in range(len(model.layers))] if layers is None else layers
        )
        self._calls = calls
        stops = {index for index, call in enumerate(calls) if call.layer in self.taps}
        self._stack = LayerStack([model.layers[call.layer] for call in calls], calls, stops)
        self._program = self._short_pass(model.embedding_table() if inputs is None else None)
        # of each piece of a short pass, the first column of the features before it; None: none
        self._tap_columns: list[int | None] = []
        for piece in self._stack.short_pieces:
            layer = calls[piece.first].layer
            is_tapped = layer in self.taps
            column = self.taps.index(layer) * model.shape.hidden_size if is_tapped else None
            self._tap_columns.append(column)

    def _short_pass(self, table: Table | None, *before: Program) -> PassProgram | None:
        """Returns the program of short passes, through the layers `before` first; None if the
        kernels cannot run all of them."""
        model = self.model
        programs = [*before, *(piece.program for piece in self._stack.short_pieces)]
        segments = [(program, None) for program in programs if program is not None]
        is_all = len(segments) == len(programs) > 0 and len(set(self.taps)) == len(self.taps)
        if not is_all or model.kernels is None or model.outer.own_embeddings is not None:
            return None
        norm = None
        head = None
        if self.outer is not None:
            norm = self.outer.norm
            runs = kernel_runs(self.outer.head)
            head = None if runs is None else runs[0]
        return PassProgram(
            segments,
            model.shape.hidden_size,
            SHORT_PASS,
            table=table,
            norm=norm,
            eps=model.architecture.norm_eps,
            head=head,
        )

    def program_after(self, before: Program, table: Table) -> PassProgram | None:
        """Returns the program of short passes through the layers `before` and these, in two
        segments; None if the kernels cannot run all of them, or if a state before one of these
        layers is tapped."""
        is_tapped = any(layer != self.model.shape.num_layers for layer in self.taps)
        if self._program is None or self.program is None or is_tapped:
            return None
        return self._short_pass(table, before)

    @property
    def program(self) -> Program | None:
        """The layers of short passes, if the kernels run all of them in one call."""
        pieces = self._stack.short_pieces
        return pieces[0].program if len(pieces) == 1 else None

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        model = self.model
        count = forward_pass.last - forward_pass.first
        inputs = model.inputs(forward_pass)
        if self._program is not None and inputs.place is not None and count <= SHORT_PASS:
            return self._run_short(self._program, forward_pass, inputs.place, logits_to_keep)
        hidden = self._hidden(forward_pass, inputs.rows)
        if self.model.outer.own_embeddings is not None:
            ids = forward_pass.ids + [0] * (inputs.rows - count)
            inputs = self.with_own_embeddings(inputs, hidden, torch.tensor(ids))
        first = 0  # of the rows that the LM head runs
        if self.outer is not None:
            first = max(0, inputs.rows - model.inputs.padded(inputs.rows - count + logits_to_keep))
        output = self.run(hidden, inputs, first)
        kept = slice(0 if self.outer is None else count - logits_to_keep - first, count - first)
        if kept == slice(0, inputs.rows - first):  # nothing was padded
            return output
        logits, states, _, features, _ = output
        assert states is not None
        return ModelOutput(
            logits[kept], states[kept], features=None if features is None else features[:count]
        )

    def _run_short(
        self, program: PassProgram, forward_pass: ForwardPass, place: CachePlace, kept: int
    ) -> ModelOutput:
        """Runs a short pass in one call of the kernels."""
        model = self.model
        kernels = model.kernels
        assert kernels is not None
        kernels.use_threads(torch.get_num_threads())
        tokens: Sequence[int] | torch.Tensor
        if self.inputs is not None:
            tokens = self.inputs(forward_pass)
        else:
            tokens = forward_pass.ids
            if not program.num_tokens:
                tokens = model.embed(tokens)
        rows = forward_pass.last - forward_pass.first
        width = program.width
        cache = place.cache
        features: torch.Tensor | None = None
        address = 0
        stride = len(self.taps) * width
        if self.taps:
            features = torch.empty(rows, stride)
            address = features.data_ptr()
        read = place.kinds, cache.places(), cache.first_layer
        segments = [
            SegmentInputs(*read, None if column is None else (address + 4 * column, stride))
            for column in self._tap_columns
        ]
        states, logits = kernels.run_pass(
            program, tokens, segments, place.slot, 0 if self.outer is None else kept
        )
        if features is not None and model.shape.num_layers in self.taps:
            column = self.taps.index(model.shape.num_layers) * width
            features[:, column : column + width] = states
        if self.outer is None:
            return ModelOutput(states, states)
        return self.output(states, logits, kept, features)

    def output(
        self,
        states: torch.Tensor,
        logits: torch.Tensor | None,
        kept: int,
        features: torch.Tensor | None,
    ) -> ModelOutput:
        """Returns the output of a short pass for its last `kept` rows.

        `states` [n, width] are those after the final norm; `logits` are the products of the head,
        None if it was not run.
        """
        assert self.outer is not None
        own = states if kept == len(states) else states[-kept:]
        if logits is None:
            logits = self.outer.head(own)
        return ModelOutput(final_logits(self.model.architecture, logits), own, features=features)

    def with_own_embeddings(
        self, inputs: PassInputs, hidden: torch.Tensor, ids: torch.Tensor
    ) -> PassInputs:
        """Returns the inputs of a pass over token `ids` with their embeddings for each layer, if
        the model has such embeddings.

        `hidden` [n, width] enters the first of the layers that are run.
        """
        own = self.model.outer.own_embeddings
        if own is None:
            return inputs
        embeddings = hidden if self.inputs is None else self.model.embeddings(ids)
        return inputs._replace(per_layer=own(ids.flatten(), embeddings))

    def run(self, hidden: torch.Tensor, inputs: PassInputs, first: int = 0) -> ModelOutput:
        """Runs the layers on the hidden states [rows, width] that enter them, and norm and head on
        the rows from `first` on.

        Its operators can be captured in a CUDA graph. Without a head the output's logits mean
        nothing.
        """
        if self.model.kernels is not None:
            self.model.kernels.use_threads(torch.get_num_threads())
        hidden, features = self.run_layers(hidden, inputs)
        if self.outer is None:
            return ModelOutput(hidden, hidden)
        kept = hidden[first:] if first else hidden
        return self.model.norm_and_head(kept, self.outer, features)

    def run_layers(
        self, hidden: torch.Tensor, inputs: PassInputs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the layers on `hidden` [rows, width]. Returns the hidden states after them, and the
        features [rows, ...] for `taps`, or None.

        Without gradients, `hidden` is changed.
        """
        model = self.model
        tapped = dict[int, torch.Tensor]()
        for piece in self._stack.pieces(inputs):
            layer = self._calls[piece.first].layer
            if layer in self.taps:
                tapped[layer] = hidden.clone()  # the layers change the stream in place
            prefill_reports.layer(piece.first, len(self._stack))
            hidden = self._stack.run(piece, hidden, inputs)
        hidden = move(hidden, model.device)
        if not self.taps:
            return hidden, None
        if model.shape.num_layers in self.taps:
            tapped[model.shape.num_layers] = model.normed(hidden, model.outer.norm)
        return hidden, torch.cat([move(tapped[index], model.device) for index in self.taps], dim=-1)

    def _hidden(self, forward_pass: ForwardPass, rows: int) -> torch.Tensor:
        """Returns the hidden states [`rows`, width] that enter the first layer; rows after the
        pass's tokens are padding."""
        if self.inputs is None:
            ids = forward_pass.ids
            return self.model.embed(ids if len(ids) == rows else ids + [0] * (rows - len(ids)))
        # which others read, too
        return self.model.inputs.with_padding(self.inputs(forward_pass).clone(), rows)


def final_logits(architecture: Architecture, logits: torch.Tensor) -> torch.Tensor:
    """Returns the logits that a model predicts with: those of its LM head's product, scaled, then
    capped."""
    if architecture.logit_scale != 1.0:
        logits = logits * architecture.logit_scale
    if (cap := architecture.logit_cap) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def load_native(
    folder: Path,
    name: str,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool = False,
    quantise: str | None = None,
    as_stored: bool = False,
    wide_attention: bool = False,
    layer_devices: Sequence[torch.device] | None = None,
) -> NativeModel:
    """Loads the model in `folder`; messages call it `name`.

    `exact` is as in `NativeModel`, `quantise` as in `LinearFactory`, `wide_attention` as in
    `NativeLayer`. `as_stored`: quantised matrices of a GGUF file stay as they are. `layer_devices`
    has the device of each layer, if they are on several: then the embedding is on the first
    layer's, and `device` is that of the final norm and the head. Raises SpecgenError for missing,
    damaged, unsuitable or unexpected tensors.
    """
    with torch.no_grad():
        files, architecture = open_model(folder, name, architecture, device)
        devices = layer_devices or [device] * len(architecture.layers)
        factories = {
            on: LinearFactory(on, dtype, quantise=quantise)
            for on in dict.fromkeys([*devices, device])
        }
        gain = 1.0
        if not any(factory.takes_stored for factory in factories.values()):
            gain = norm_gain(architecture, dtype, *factories)
        # before the layers: packing needs the head twice for a moment
        outer = _outer_weights(
            architecture, files, factories[device], dtype, gain, (devices[0], device), as_stored
        )
        (_, kinds), layers = layer_kinds(architecture, devices), []
        unreturned = 0
        for index, on in enumerate(devices):
            if index == 0 or on != devices[index - 1]:
                files.use_device(on)
            kept = None if factories[on].takes_stored else dtype
            take_matrix = files.take_matrix if as_stored else files.take
            weights = read_layer(
                architecture, index, files.take, kept, gain, take_matrix=take_matrix
            )
            moves_to = None if layer_devices is None else on
            options: dict[str, Any] = {
                "gain": gain,
                "device": moves_to,
                "wide_attention": wide_attention,
            }
            layers.append(
                NativeLayer(architecture, index, kinds[index], weights, factories[on], **options)
            )
            del weights
            unreturned += files.bytes // len(devices)
            if unreturned >= _LEAST_RETURNED:  # each time, opening reads the list of tensors anew
                files.close()
                if not files.are_copied:
                    return_free_memory()
                unreturned = 0
        files.close()
        if not files.are_copied:
            return_free_memory()
        return NativeModel(
            architecture,
            layers,
            outer,
            dtype,
            norm_gain=gain,
            rounding=quantise,
            exact=exact,
            layer_devices=layer_devices,
        )


def open_model(
    folder: Path, name: str, architecture: Architecture, device: torch.device
) -> tuple[WeightFiles, Architecture]:
    """Opens a model's weight files. Returns them, and the architecture with the layout in which
    they store experts.

    Raises SpecgenError unless the files have the tensors that the config describes, with the right
    shapes, and no others that may matter.
    """
    files = model_files(folder, name, device, tensor_names(architecture.model_type))
    mixture = architecture.mixture
    if (
        mixture is not None
        and mixture.layout == "separate"
        and any(key.endswith("experts.gate_up_proj") for key in files.names)
    ):
        architecture = replace(architecture, mixture=replace(mixture, layout="fused"))
    expected: dict[str, tuple[int, ...]] = {FINAL_NORM: (architecture.hidden_size,)}
    for index in range(len(architecture.layers)):
        expected |= tensor_shapes(layer_files(architecture, index))
    tables = {EMBEDDING, HEAD} if not architecture.tied else {*table_names(files)}
    expected |= dict.fromkeys(tables, (architecture.vocab_size, architecture.hidden_size))
    if size := architecture.per_layer_size:
        columns = architecture.num_layers * size
        # there may be more than the model has tokens
        rows = max(files.shape(_OWN[0])[0], architecture.vocab_size)
        expected |= zip(
            _OWN, ((rows, columns), (columns, architecture.hidden_size), (size,)), strict=True
        )
    files.check(expected)
    # layers without keys of their own may have unused weights in the files
    sharing = [index for index, kind in enumerate(architecture.layers) if kind.owner is not None]
    unused = {
        f"layers.{index}.self_attn.{name}.weight"
        for index in sharing
        for name in ("k_proj", "v_proj", "k_norm")
    }
    files.check_no_others({*expected, *unused}, len(architecture.layers))
    return files, architecture


def table_names(files: WeightFiles) -> tuple[str, str]:
    """Returns the names of the two tensors with the embedding and the LM head; the same name twice
    if the files have only one."""
    return (
        HEAD if HEAD in files and EMBEDDING not in files else EMBEDDING,
        HEAD if HEAD in files else EMBEDDING,
    )


def return_free_memory() -> None:
    """Returns freed memory to the system where the C library can (glibc), which otherwise keeps a
    tenth of a model's size."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no such library
        ctypes.CDLL(None).malloc_trim(0)


def _outer_weights(
    architecture: Architecture,
    files: WeightFiles,
    factory: LinearFactory,
    dtype: torch.dtype,
    gain: float,
    devices: tuple[torch.device, torch.device],
    as_stored: bool,
) -> OuterWeights:
    """Returns the embedding, on the first of the devices, and the final norm and the LM head, on
    the second one.

    A tied model's files have one of the two tables, which serves as both, or both, and then each
    serves its own purpose, as in transformers. If the head's weight is packed, the embedding stays
    as it is stored: its rows are converted when they are used.
    """
    embedding_name, head_name = table_names(files)
    if factory.kernels is None:
        matrix = files.take(head_name).to(dtype)
    else:
        matrix = files.take_matrix(head_name) if as_stored else files.take(head_name)
    head = factory(matrix)
    if head_name == embedding_name and isinstance(head, DenseLinear) and devices[0] == devices[1]:
        embedding = matrix
    else:
        del matrix
        # mapped anew, the table takes memory only for the rows that are used, not for all that
        # packing has read
        files.use_device(devices[0])
        if as_stored:
            embedding = files.take_matrix(embedding_name, exact=True)
        else:
            embedding = files.take(embedding_name)
        if files.are_copied and factory.kernels is None:
            embedding = embedding.to(dtype)
        files.use_device(devices[1])
    own = None
    if architecture.per_layer_size:
        files.use_device(devices[0])
        table, projection, norm = map(files.take, _OWN)
        projection = projection.float() * architecture.hidden_size**-0.5
        own = OwnEmbeddings(architecture, table, factory(projection.to(dtype)), norm.to(dtype))
        files.use_device(devices[1])
    return OuterWeights(embedding, final_norm(architecture, files.take, dtype, gain), head, own)
