"""Forward passes of the native decoder with fixed shapes and buffers, in a form that a CUDA graph can capture.

A static pass has a width (tokens, padding included) and a bucket (entries of the KV cache that attention reads). The host writes
one vector of integers to the device; everything else is computed there: cache indices, positions, rotations and masks. No shape
depends on the data, and the host waits for nothing.
"""

from __future__ import annotations

import torch

from specgen.engine.devices import pinned
from specgen.engine.forward_pass import ForwardPass, ModelOutput
from specgen.engine.inference_mode import inference
from specgen.engine.native.ancestry import ancestry
from specgen.engine.native.kernels.kernel_set import SPAN, KernelSet, PassNumbers, StaticInputs
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.kv_buffer import KVBuffer, LayerEntries
from specgen.engine.native.layer import PassInputs
from specgen.engine.native.native_model import NativeForward


class StaticPass:
    """A forward pass over at most `width` tokens, with buffers of its own. Used as `load`, `run`, `output`.

    Runs the layers of `forward` on `cache`, and attends to the cache's first `bucket` entries. Keys and values are written to
    `width` entries; those after the pass's tokens are not read before they are written again. `long_rope` selects LongRoPE's
    frequencies for long contexts. Raises ValueError if the cache has less room than `bucket`.

    `run` can be captured in a CUDA graph and replayed as long as `is_valid`: it only reads and writes buffers that exist since
    then, and those of the model. `kernels` compute what is between the matrix products.
    """

    def __init__(
        self,
        forward: NativeForward,
        cache: KVBuffer,
        width: int,
        bucket: int,
        *,
        long_rope: bool = False,
        kernels: KernelSet = TORCH,
    ) -> None:
        model = forward.model
        if not width <= bucket <= cache.data.shape[3]:
            raise ValueError(f"a bucket of {bucket} does not fit {width} tokens or a cache of {cache.data.shape[3]}")
        self.width, self.bucket, self.long_rope, self._kernels = width, bucket, long_rope, kernels
        self._forward, self._model, self._cache, self._data = forward, model, cache, cache.data
        self._count = 0  # tokens of the loaded pass
        device, hidden_size = model.device, model.architecture.hidden_size
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be written outside it
            self._input = torch.zeros(2 + 2 * width + SPAN + 1, dtype=torch.int64, device=device)
            parts = torch.split(self._input, [1, 1, width, width, SPAN + 1])
            base, first, self._ids, bits, depths = parts
            self._numbers = PassNumbers(base, first, bits, depths)
            self._indices = torch.arange(bucket, device=device)
            tables = model.inputs.tables.items()
            self._rotations = {name: table.rows(0, bucket, long=long_rope) for name, table in tables}
            self._hidden_in = None
            if forward.inputs is not None:
                self._hidden_in = torch.zeros(width, hidden_size, dtype=model.dtype, device=device)
            self._hidden = torch.zeros(width, hidden_size, dtype=model.dtype, device=device)
            self._features = torch.zeros(width, len(forward.taps) * hidden_size, dtype=model.dtype, device=device)
            self._logits = self._hidden
            if forward.parts is not None:
                self._logits = torch.zeros(width, forward.parts.head.out_features, dtype=model.dtype, device=device)
            self._entries = [LayerEntries(layer, layer[0, :, :bucket], layer[1, :, :bucket]) for layer in self._data.unbind(0)]

    @property
    def is_valid(self) -> bool:
        """Whether the KV cache still has the buffer that this pass reads and writes. It gets a larger one when it grows."""
        return self._cache.data is self._data

    def load(self, forward_pass: ForwardPass, hidden: torch.Tensor | None = None) -> None:
        """Writes the inputs of a pass to the buffers, with one copy to the device, which the host does not wait for.

        `hidden` [n, hidden size], on the device, are the hidden states that enter the first layer, if the forward function takes
        them instead of token ids. Raises ValueError for a pass that has more tokens than `width`, that reaches beyond the bucket
        or more than `SPAN` tokens beyond its base, or for which the cache has a new buffer.
        """
        base, depths, bits = ancestry(forward_pass)
        ids, first, count = forward_pass.ids, forward_pass.first, len(bits)
        if not self.is_valid or forward_pass.long_rope != self.long_rope:
            raise ValueError("the pass is for another KV cache buffer or other rotary frequencies")
        if count > self.width or first + self.width > self.bucket or first - base + self.width > SPAN:
            raise ValueError(f"{count} tokens from {first} on, {first - base} of them before, do not fit a static pass")
        padding = range(count, self.width)
        others = bits[-1] ^ 1 << (first - base + count - 1)  # what the last token sees besides itself
        self._count = count
        numbers = [
            *(base, first),
            *ids,
            *(ids[-1] for _ in padding),  # padding repeats the last token, so that its numbers are finite if the token's are
            *bits,
            *(others | 1 << (first - base + row) for row in padding),
            *depths,
            *(depths[-1] for _ in range(SPAN + 1 - len(depths))),
        ]
        self._write(numbers)
        if self._hidden_in is not None:
            assert hidden is not None
            self._hidden_in[:count] = hidden
            self._hidden_in[count:] = hidden[-1]

    def load_position(self, position: int) -> None:
        """Writes the inputs of a pass over one token at this index of the cache, but for the token's id: see `feed`."""
        self._count = 1
        self._write([position, position, 0, 1, *(0 for _ in range(SPAN + 1))])

    def feed(self, token: torch.Tensor) -> None:
        """Writes the id of the token to run, `token` [1], which is on the device. For passes of width 1."""
        self._ids.copy_(token)

    def advance(self) -> None:
        """Changes the inputs of a pass over one token to the next index of the cache, on the device."""
        self._numbers.base.add_(1)
        self._numbers.first.add_(1)

    @property
    def inputs(self) -> torch.Tensor:
        """The vector of integers, which `feed` and `advance` change."""
        return self._input

    @property
    def logits(self) -> torch.Tensor:
        """The buffer [width, vocabulary] of the logits of all tokens, padding included."""
        return self._logits

    @inference
    def run(self) -> None:
        """Runs the loaded pass."""
        model, parts = self._model, self._forward.parts
        if self._hidden_in is None:
            hidden = model.scaled(model.parts.embedding.index_select(0, self._ids).to(model.dtype))
        else:
            hidden = self._hidden_in.clone()  # a graph's replay begins with the same numbers again
        residual = model.residual(hidden, in_place=True)
        features = self._forward.run_layers(residual, self._inputs())
        if features is not None:
            self._features.copy_(features)
        if parts is None:
            self._hidden.copy_(residual.values)
            return
        output = model.norm_and_head(residual, parts)
        assert output.hidden_states is not None
        self._logits.copy_(output.logits)
        self._hidden.copy_(output.hidden_states)

    def output(self, logits_to_keep: int) -> ModelOutput:
        """Returns the output for the last tokens of the pass, as views of the buffers: the next `run` overwrites them."""
        kept = slice(self._count - logits_to_keep, self._count)
        features = self._features[: self._count] if self._forward.taps else None
        return ModelOutput(self._logits[kept], self._hidden[kept], features=features)

    def _write(self, numbers: list[int]) -> None:
        self._input.copy_(pinned(torch.tensor(numbers), self._input.device), non_blocking=True)

    def _inputs(self) -> PassInputs:
        """Returns the layers' inputs, which are computed on the device from the vector of integers."""
        made, width = self._model.inputs, self.width
        entries, first_layer = self._entries, self._cache.first_layer
        static = StaticInputs(
            self._kernels, self._numbers, made.kinds, self._rotations, entries, made.group, first_layer, self._indices
        )
        return PassInputs(width, width, width, (), first_layer=first_layer, static=static)
