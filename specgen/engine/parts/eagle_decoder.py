"""An EAGLE head as it drafts: its layers with a KV cache, the product on its features and its LM head, fast on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specgen.engine.forward_pass import ForwardPass
from specgen.engine.native.architecture import of_architecture
from specgen.engine.native.eagle_layers import EagleLayers, check_tensor, head_weight, read_design
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import PassInputs
from specgen.engine.native.loading import norm_gain
from specgen.engine.native.products import Product, ProductFactory
from specgen.engine.native.tensor_names import EMBEDDING, HEAD
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

        def take(name: str, shape: tuple[int, ...]) -> Tensor:
            return check_tensor(tensors, name, shape).to(device)

        design = read_design(weights.version, weights.config, tensors, norm_before_residual=weights.norm_before_residual)
        self.width, architecture = design.width, design.architecture
        self.rope_boundary = of_architecture(architecture).rope_boundary
        with torch.inference_mode(False), torch.no_grad():
            factory = ProductFactory(device, dtype)
            gain = norm_gain(architecture, dtype, device)
            inputs = feature_size + (self.width if weights.version == 1 else 0)
            self._layers = EagleLayers(design, take, dtype, factory, norm_gain=gain, fc_inputs=inputs)
            self._head: Product | None = None
            self.head_vocab_size = 0
            if weights.version == 3:
                self.head_vocab_size = len(tensors[HEAD]) if weights.vocabulary is None else len(weights.vocabulary)
                self._head = factory(head_weight(design, take, self.head_vocab_size, gain).to(dtype))
            own = tensors.get(EMBEDDING)
            self.embedding = None if own is None else take(EMBEDDING, (own.shape[0], self.width))
        self.inputs = InputMaker(architecture, dtype, device, min_rows=factory.min_rows)
        self.architecture, self.dtype, self.device = architecture, dtype, device
        self._sizes = len(architecture.layers), architecture.num_kv_heads, architecture.head_size

    def new_cache(self) -> KVBuffer:
        """Returns an empty KV cache, with one entry for each pair."""
        return KVBuffer(*self._sizes, self.dtype, self.device)

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
        values = self.run(embeddings, features, inputs)
        return values if inputs.rows == count else values[:count]

    def run(self, embeddings: Tensor, features: Tensor, inputs: PassInputs) -> Tensor:
        """Returns the predicted features [n, width] for n pairs, padding included."""
        return self._layers(embeddings, features, inputs).values

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [n, head vocabulary] of the head's own LM head for predicted features [n, width]."""
        assert self._head is not None
        return self._head(self._layers.residual(hidden).normed())
