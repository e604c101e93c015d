"""The native decoder: one implementation for all Llama-like families, driven by what config.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from specgen.engine.batch_pass import BatchPass
from specgen.engine.devices import move, upload
from specgen.engine.exit_parts import check_exit_layers
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, HiddenSource, LayerPart, ModelOutput
from specgen.engine.inference_mode import inference
from specgen.engine.model_shape import ModelShape
from specgen.engine.native.architecture import of_architecture
from specgen.engine.native.description import Architecture
from specgen.engine.native.inputs import EXACT_ROWS, InputMaker, layer_kinds
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import NativeLayer, PassInputs
from specgen.engine.native.layer_weights import final_norm, layer_weights
from specgen.engine.native.placed_layers import PlacedInputs, PlacedKVCache, PlacedLayer
from specgen.engine.native.products import DenseProduct, Product, ProductChoice, ProductFactory
from specgen.engine.native.residual import ExtendedResidual, PlainResidual, Residual
from specgen.engine.native.static_pass import StaticWork, Widths
from specgen.engine.native.tensor_names import EXIT_HEAD, layer_tensors
from specgen.engine.native.trainable_exit import NativeTrainableExit, final_logits, untrained_exit
from specgen.engine.native.weight_files import WeightFiles


class NativeParts(NamedTuple):
    """The weights of a native model outside of its layers.

    `embedding` [vocabulary, width] may be in another dtype than the model's. `norm` [width] is the final norm's weight times the
    model's `norm_gain`, `norm_bias` its bias or None.
    """

    embedding: torch.Tensor
    norm: torch.Tensor
    norm_bias: torch.Tensor | None
    head: Product


class Captures(Protocol):
    """Captures the passes of a model before they are needed. `seconds` is the time that all its captures have taken so far."""

    seconds: float

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Captures what is missing for runs; see `engine.model.Model`."""
        ...


class NativeModel:
    """A model with its weights. Implements `engine.model.Model`.

    `norm_gain` is part of the weights that follow a norm (see `residual`). `min_rows` is the least number of tokens per forward
    pass: passes over fewer are padded, because they would take longer. `exact` pads passes so that a token's logits have the same
    bits whichever tokens are run with it, in drafts without trees. `product_choices` say which weights are packed, and why.
    `wrap` makes the functions that the methods return out of eager ones, see `static_forward.use_static_passes`; None returns the
    eager ones. `layer_devices` has the device of each layer if they are on several; the embedding may be on another one than the
    norm and the head, whose device is the model's: all outputs are there.
    """

    backend = "native"

    def __init__(
        self,
        architecture: Architecture,
        layers: Sequence[NativeLayer],
        parts: NativeParts,
        dtype: torch.dtype,
        *,
        norm_gain: float = 1.0,
        min_rows: int = 1,
        exact: bool = False,
        num_parameters: int = 0,
        product_choices: Sequence[ProductChoice] = (),
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        self.architecture, self.parts = architecture, parts
        self.shape: ModelShape = of_architecture(architecture)
        self.dtype, self.device = dtype, parts.norm.device
        self.num_embeddings = parts.embedding.shape[0]
        self.vocab_size = parts.head.out_features
        self.num_parameters, self.norm_gain = num_parameters, norm_gain
        self.product_choices = product_choices
        self.min_rows, self.exact = max(min_rows, EXACT_ROWS if exact else 1), exact
        self.inputs = InputMaker(architecture, dtype, self.device, min_rows=self.min_rows, exact=exact)
        self.layers: Sequence[NativeLayer | PlacedLayer] = layers
        self.pass_inputs: InputMaker | PlacedInputs = self.inputs
        self._layer_devices = layer_devices
        if layer_devices is not None:
            self.layers = [PlacedLayer(*placed) for placed in zip(layers, layer_devices, strict=True)]
            others = {*layer_devices} - {self.device}
            makers = {on: InputMaker(architecture, dtype, on, min_rows=self.min_rows, exact=exact) for on in others}
            self.pass_inputs = PlacedInputs({**makers, self.device: self.inputs}, self.device)
        self.wrap: Callable[[StaticWork], ForwardFunction] | None = None
        self.captures: Captures | None = None
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale).to(dtype))

    def new_cache(self, layers: range | None = None, *, sequences: int = 1) -> KVBuffer | PlacedKVCache:
        """Returns an empty KV cache for the layers with these indices (None: all), and for so many sequences."""
        layers = range(len(self.layers)) if layers is None else layers
        if self._layer_devices is None:
            return self.new_buffer(layers, self.device, sequences)
        devices = self._layer_devices[layers.start : layers.stop]
        parts = []
        for device in dict.fromkeys(devices):
            first = layers.start + devices.index(device)
            parts.append(self.new_buffer(range(first, first + devices.count(device)), device, sequences))
        return parts[0] if len(parts) == 1 else PlacedKVCache(parts, self.device)

    def new_buffer(self, layers: range, device: torch.device, sequences: int = 1) -> KVBuffer:
        """Returns an empty KV cache on one device for layers like this model's, counted as `layers`."""
        heads, size = self.architecture.num_kv_heads, self.architecture.head_size
        return KVBuffer(len(layers), heads, size, self.dtype, device, first_layer=layers.start, sequences=sequences)

    def forward(self) -> ForwardFunction:
        return self.layers_forward([LayerPart(index) for index in range(len(self.layers))])

    def layers_forward(
        self, layers: Sequence[LayerPart], inputs: HiddenSource | None = None, *, with_head: bool = True
    ) -> ForwardFunction:
        """Returns a function that runs some layers, or parts of them; see `engine.model.Model`."""
        chosen = [self.layers[part.layer] for part in layers]
        skips = any(not (part.attention and part.mlp) for part in layers)
        return self.wrapped(NativeForward(self, chosen, self.parts if with_head else None, inputs, layers if skips else None))

    def feature_forward(self, taps: Sequence[int]) -> ForwardFunction:
        """Returns a function that also returns hidden states between the layers; see `engine.model.Model`."""
        return self.wrapped(NativeForward(self, self.layers, self.parts, None, taps=taps))

    def wrapped(self, forward: StaticWork) -> ForwardFunction:
        """Returns the function itself, or one that runs short passes as static ones; see `static_forward`."""
        return forward if self.wrap is None else self.wrap(forward)

    def capture_passes(self, shortest: int, longest: int) -> None:
        if self.captures is not None:
            self.captures.capture_passes(shortest, longest)

    @property
    def capture_seconds(self) -> float:
        """The time that captures have taken; see `engine.model.Model`."""
        return 0.0 if self.captures is None else self.captures.seconds

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the embeddings [n, width] of the tokens `ids`."""
        table = self.parts.embedding
        rows = table[ids[0]][None] if len(ids) == 1 else table.index_select(0, upload(torch.tensor(ids), table.device))
        return self.scaled(rows.to(self.dtype))

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of token ids on the device; see `engine.model.Model`."""
        return move(self._embedded(ids), self.device).view(*ids.shape, -1)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [n, width] of n token ids of any shape, on the embedding's device."""
        table = self.parts.embedding
        return self.scaled(table.index_select(0, move(ids.flatten(), table.device)).to(self.dtype))

    def scaled(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings if self._embedding_scale == 1.0 else embeddings * self._embedding_scale

    def residual(self, hidden: torch.Tensor, *, in_place: bool = False) -> Residual:
        """Returns a residual stream that begins with the hidden states [n, width]; `in_place` allows it to change them."""
        if self.norm_gain != 1.0:
            return ExtendedResidual(hidden, self.architecture.norm_eps)
        is_layer_norm = self.architecture.norm == "layer"
        return PlainResidual(hidden, self.architecture.norm_eps, layer_norm=is_layer_norm, in_place=in_place)

    def norm_and_head(self, residual: Residual, parts: NativeParts, first: int = 0, rows: int | None = None) -> ModelOutput:
        """Returns logits and hidden states after the norm, for `rows` tokens (None: all) from index `first` on."""
        normed = residual.normed()
        if rows is not None and rows < normed.shape[0]:
            normed = normed.narrow(0, first, rows)
        normed = self._weighted(normed, parts)
        return ModelOutput(final_logits(self.architecture, parts.head(normed)), normed)

    def final_norm(self, residual: Residual) -> torch.Tensor:
        """Returns the hidden states [n, width] after the final norm, which enter the LM head."""
        return self._weighted(residual.normed(), self.parts)

    def _weighted(self, normed: torch.Tensor, parts: NativeParts) -> torch.Tensor:
        return normed * parts.norm if parts.norm_bias is None else torch.addcmul(parts.norm_bias, normed, parts.norm)

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits; see `engine.model.Model`."""
        count = hidden.shape[0]
        if (rows := self.inputs.padded(count)) > count:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, rows - count))
        return final_logits(self.architecture, self.parts.head(hidden))[:count]

    def check_layers(self, feature: str) -> None:
        """Does nothing: the layers can always be run one by one."""

    def exit_layers(self, tensors: Mapping[str, torch.Tensor], count: int) -> NativeExit:
        """Returns a trained exit layer; see `engine.model.Model`."""
        return NativeExit(self, tensors, count)

    @inference
    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        boundary = self.shape.rope_boundary
        inputs = self.pass_inputs.without_cache(len(ids), long_rope=boundary is not None and len(ids) > boundary)
        residual = self.residual(self.embed(ids))
        for layer in self.layers:
            layer(residual, inputs)
        residual.move_to(self.device)
        return self.norm_and_head(residual, self.parts).logits

    def batch_cache(self, sequences: int) -> KVBuffer | PlacedKVCache:
        return self.new_cache(sequences=sequences)

    def batch_logits(self, batch: BatchPass, logits_to_keep: int | None = None) -> torch.Tensor:
        sequences, tokens = batch.ids.shape
        residual = self._run_batch(batch, len(self.layers))
        if logits_to_keep is not None and logits_to_keep < tokens:
            kept = residual.values.view(sequences, tokens, -1)[:, -logits_to_keep:]
            residual = self.residual(kept.flatten(0, 1))
        return self.norm_and_head(residual, self.parts).logits.view(sequences, -1, self.vocab_size)

    def batch_layers(self, batch: BatchPass, layers: int, *, with_head: bool = False) -> ModelOutput:
        """Runs the first layers on several sequences; see `engine.model.Model`."""
        shape = batch.ids.shape
        residual = self._run_batch(batch, layers)
        if not with_head:
            hidden = residual.values.view(*shape, -1)
            return ModelOutput(hidden, hidden)
        output = self.norm_and_head(residual, self.parts)
        assert output.hidden_states is not None
        return ModelOutput(output.logits.view(*shape, -1), output.hidden_states.view(*shape, -1))

    def batch_features(self, batch: BatchPass, taps: Sequence[int]) -> torch.Tensor:
        """Returns hidden states between the layers for several sequences; see `engine.model.Model`."""
        residual, inputs = self._start_batch(batch)
        features = NativeForward(self, self.layers, self.parts, None, taps=taps).run_layers(residual, inputs)
        assert features is not None
        return features.view(*batch.ids.shape, -1)

    def _run_batch(self, batch: BatchPass, layers: int) -> Residual:
        """Runs the first layers on all tokens of all sequences, which are rows one after the other."""
        residual, inputs = self._start_batch(batch)
        for layer in self.layers[:layers]:
            layer(residual, inputs)
        residual.move_to(self.device)
        return residual

    def _start_batch(self, batch: BatchPass) -> tuple[Residual, PassInputs]:
        """Returns the residual stream before the first layer, with one row per token of all sequences, and the layers' inputs."""
        return self.residual(self._embedded(batch.ids)), self.pass_inputs.batched(batch)

    def trainable_exit(self, folder: Path, count: int) -> NativeTrainableExit:
        """Returns an untrained exit layer; see `engine.model.Model`."""
        check_exit_layers(count)
        files = WeightFiles(folder, str(folder), self.device)
        return NativeTrainableExit(self.architecture, self.inputs, untrained_exit(self.architecture, files, count), count)

    def free_weights(self, kept_layers: int = 0) -> None:
        """Frees the memory of weights; see `engine.model.Model`."""
        none = self.parts.norm.new_empty(0, self.shape.hidden_size)
        self.layers = self.layers[:kept_layers]
        embedding = self.parts.embedding if kept_layers else none
        self.parts = self.parts._replace(embedding=embedding, head=DenseProduct(none))


class NativeForward:
    """Runs `layers` on forward passes of a `ModelRunner`. `parts` has the norm and head after them; None: neither.

    `inputs` returns the hidden states that enter the first layer; None takes the token embeddings. `parts_run` says for each
    layer whether its attention and its MLP are run; None: all are. `taps` name the hidden states that the output's `features` are
    made of, see `engine.model.Model.feature_forward`.
    """

    def __init__(
        self,
        model: NativeModel,
        layers: Sequence[NativeLayer | PlacedLayer],
        parts: NativeParts | None,
        inputs: HiddenSource | None,
        parts_run: Sequence[LayerPart] | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        self.model, self.parts, self.inputs, self.taps = model, parts, inputs, tuple(taps)
        self._layers, self._parts_run = layers, parts_run

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        model = self.model
        count = forward_pass.last - forward_pass.first
        inputs = model.pass_inputs(forward_pass)
        residual = model.residual(self._hidden(forward_pass, inputs.rows))
        features = self.run_layers(residual, inputs)
        if self.parts is None:
            return ModelOutput(residual.values[:count], residual.values[:count])
        features = None if features is None else features[:count]
        begin, rows = count - logits_to_keep, model.inputs.padded(logits_to_keep)
        first = max(0, min(begin, inputs.rows - rows))
        output = model.norm_and_head(residual, self.parts, first, rows)
        if first == begin and rows == logits_to_keep:
            return output._replace(features=features)
        kept = slice(begin - first, begin - first + logits_to_keep)
        hidden = None if output.hidden_states is None else output.hidden_states[kept]
        return ModelOutput(output.logits[kept], hidden, features=features)

    @property
    def feeds(self) -> bool:
        """Whether a token that was chosen from the logits can be run without anything from the host; see `StaticWork`."""
        return self.inputs is None and self.parts is not None

    @property
    def widths(self) -> Widths:
        size, head = self.model.architecture.hidden_size, self.parts
        return Widths(
            0 if self.inputs is None else size, size, 0 if head is None else head.head.out_features, len(self.taps) * size
        )

    def prepare(self, forward_pass: ForwardPass) -> Sequence[torch.Tensor]:
        """Returns no buffers; see `static_pass.StaticWork`."""
        return ()

    def run(self, ids: torch.Tensor, hidden: torch.Tensor | None, inputs: PassInputs) -> ModelOutput:
        """Runs tokens whose ids are on the device, or the hidden states that enter instead; see `static_pass.StaticWork`."""
        model = self.model
        # a copy, as the layers change it, and a graph's replay begins with the same hidden states again
        hidden = model.embeddings(ids) if hidden is None else hidden.clone()
        residual = model.residual(hidden, in_place=True)
        features = self.run_layers(residual, inputs)
        if self.parts is None:
            return ModelOutput(residual.values, residual.values)
        return model.norm_and_head(residual, self.parts)._replace(features=features)

    def run_layers(self, residual: Residual, inputs: PassInputs) -> torch.Tensor | None:
        """Adds the outputs of all layers to the residual stream. Returns the features [rows, ...] that `taps` name, if any."""
        if self._parts_run is not None:
            for layer, part in zip(self._layers, self._parts_run, strict=True):
                layer(residual, inputs, attention=part.attention, mlp=part.mlp)
            residual.move_to(self.model.device)
            return None
        found: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in self.taps:
                found[index] = residual.values.clone()  # the layers change the stream in place
            layer(residual, inputs)
        residual.move_to(device := self.model.device)
        if not self.taps:
            return None
        found[len(self._layers)] = self.model.final_norm(residual)
        return torch.cat([move(found[index], device) for index in self.taps], dim=-1)

    def _hidden(self, forward_pass: ForwardPass, rows: int) -> torch.Tensor:
        """Returns the hidden states [`rows`, width] that enter the first layer; rows after the pass's tokens are padding."""
        if self.inputs is None:
            ids = forward_pass.ids
            return self.model.embed(ids if len(ids) == rows else ids + [0] * (rows - len(ids)))
        hidden = self.inputs(forward_pass)
        return hidden if hidden.shape[0] == rows else torch.nn.functional.pad(hidden, (0, 0, 0, rows - hidden.shape[0]))


class NativeExit:
    """A trained exit layer of EESD, made of native layers. Implements `engine.model.ExitLayers`."""

    def __init__(self, model: NativeModel, tensors: Mapping[str, torch.Tensor], count: int) -> None:
        self._model = model
        architecture, dtype, left = model.architecture, model.dtype, dict(tensors)

        def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            tensor = left.pop(name, tensors.get(name))
            if tensor is None or tuple(tensor.shape) != shape:
                raise ValueError(f"the exit layer has no {name} of shape {shape}")
            return tensor.to(model.device)

        with torch.no_grad():
            factory = ProductFactory(model.device, dtype)
            norm, bias = final_norm(architecture, take, dtype, model.norm_gain)
            head = model.parts.head
            if EXIT_HEAD in tensors:
                head = factory(take(EXIT_HEAD, (model.vocab_size, architecture.hidden_size)).to(dtype))
            self._parts = model.parts._replace(norm=norm, norm_bias=bias, head=head)
            kinds, first = layer_kinds(architecture), len(architecture.layers) - count
            self._layers = []
            for index in range(count):
                weights = layer_weights(architecture, layer_tensors(architecture, index), take, dtype, model.norm_gain)
                kind = kinds.index(architecture.layers[first + index])
                self._layers.append(NativeLayer(architecture, index, kind, weights, factory))
        if left:
            raise ValueError(f"the exit layer has unknown tensors: {', '.join(sorted(left))}")

    def new_cache(self) -> KVBuffer:
        return self._model.new_buffer(range(len(self._layers)), self._model.device)

    def forward(self, inputs: HiddenSource) -> ForwardFunction:
        return self._model.wrapped(NativeForward(self._model, self._layers, self._parts, inputs))
