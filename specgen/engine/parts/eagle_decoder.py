"""An EAGLE head as it drafts: its layers with a KV cache, the product on its features and its LM head, fast on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specgen.engine.forward_pass import ForwardPass
from specgen.engine.native.architecture import of_architecture
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import norm_gain
from specgen.engine.native.layer_weights import EMBEDDING, HEAD
from specgen.engine.native.products import Product, ProductFactory
from specgen.engine.parts.eagle_layers import EagleLayers, check_tensors, head_weight, read_design
from specgen.engine.parts.weights import EagleWeights


class EagleDecoder:
    """Runs a head on pairs of features and embeddings of any model, whatever its backend.

    `feature_size` is the width of the target's features that the head reads: of version 3, of all of them side by side.
    `embedding` is the head's own table of embeddings, None if it uses the target's. `head_vocab_size` is the number of logits
    that the head's own LM head computes, 0 if it uses the target's. `inputs` makes the inputs of its layers.
    Raises SpecgenError for missing tensors and wrong shapes.
    """

    def __init__(self, weights: EagleWeights, feature_size: int, dtype: torch.dtype, device: torch.device) -> None:
        tensors = weights.tensors

        def take(name: str) -> Tensor:
            return tensors[name].to(device)

        design = read_design(weights.version, weights.config, tensors, norm_before_residual=weights.norm_before_residual)
        self.width, architecture = design.width, design.architecture
        self.rope_boundary = of_architecture(architecture).rope_boundary
        inputs = feature_size + (self.width if weights.version == 1 else 0)
        rows = 0
        if weights.version == 3:
            rows = len(weights.vocabulary if weights.vocabulary is not None else tensors.get(HEAD, ()))
        check_tensors(design, tensors, inputs, rows)
        with torch.inference_mode(False), torch.no_grad():
            factory = ProductFactory(device, dtype)
            gain = norm_gain(architecture, dtype, device)
            self._layers = EagleLayers(design, take, dtype, factory, device, norm_gain=gain)
            self._head: Product | None = factory(head_weight(take, gain).to(dtype)) if weights.version == 3 else None
            self.head_vocab_size = rows
            self.embedding = take(EMBEDDING) if EMBEDDING in tensors else None
        devices = [device] * len(architecture.layers)
        self.inputs = InputMaker(architecture, dtype, devices, min_rows=factory.min_rows)
        self.architecture, self.dtype, self.device = architecture, dtype, device
        self._devices = devices

    def new_cache(self) -> KVBuffer:
        """Returns an empty KV cache, with one entry for each pair."""
        return KVBuffer(self._devices, self.architecture.num_kv_heads, self.architecture.head_size, self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Returns what version 3 keeps of the target's features [n, feature size]: their product with `fc`, [n, width]."""
        return self._layers.fc(features)

    def __call__(self, forward_pass: ForwardPass, embeddings: Tensor, features: Tensor) -> Tensor:
        """Returns the predicted features [n, width] for the n pairs of a pass.

        `embeddings` and `features` are theirs, [n, width].
        """
        count = features.shape[0]
        inputs = self.inputs(forward_pass)
        if inputs.rows != count:
            embeddings, features = (functional.pad(x, (0, 0, 0, inputs.rows - count)) for x in (embeddings, features))
        values = self._layers(embeddings, features, inputs)
        return values if inputs.rows == count else values[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, head vocabulary] of the head's own LM head for predicted features [n, width]."""
        assert self._head is not None
        return self._head(self._layers.normed(hidden))
