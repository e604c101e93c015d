"""Forward passes of the native decoder with fixed shapes and buffers, in a form that a CUDA graph can capture.

A static pass has a width (tokens, padding included) and a bucket (entries of the KV cache that attention reads). The host writes
one vector of integers to the device; everything else is computed there: cache indices, positions, rotations and masks. No shape
depends on the data, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from specgen.engine.devices import pinned
from specgen.engine.forward_pass import ForwardPass, HiddenSource, ModelOutput
from specgen.engine.inference_mode import inference
from specgen.engine.native.ancestry import ancestry
from specgen.engine.native.description import Architecture
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kernels.kernel_set import SPAN, PassNumbers, StaticInputs
from specgen.engine.native.kv_buffer import KVBuffer, LayerEntries
from specgen.engine.native.layer import PassInputs


class Widths(NamedTuple):
    """The number of columns of what a forward function reads and returns: of `inputs` and of the fields of `ModelOutput`.

    0: it has no such input or output.
    """

    inputs: int
    hidden: int
    logits: int
    features: int = 0


class StaticModel(Protocol):
    """A model whose layers static passes run. `inputs` makes the inputs of its eager passes."""

    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    inputs: InputMaker


class StaticWork(Protocol):
    """A forward function that static passes can run, too.

    `inputs` returns the hidden states that enter it; None if it reads token ids alone. `feeds`: it can run a token that was
    chosen from its own output, without anything from the host.
    """

    @property
    def model(self) -> StaticModel: ...

    @property
    def widths(self) -> Widths: ...

    @property
    def inputs(self) -> HiddenSource | None: ...

    @property
    def feeds(self) -> bool: ...

    def prepare(self, forward_pass: ForwardPass) -> Sequence[torch.Tensor]:
        """Prepares what else `run` reads for this pass. Returns the buffers that it reads, which a graph must find unchanged."""
        ...

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput: ...

    def run(self, ids: torch.Tensor, hidden: torch.Tensor | None, inputs: PassInputs) -> ModelOutput:
        """Runs the tokens `ids` [n], which are on the device, or the hidden states [n, width] that enter, or both.

        Its operators can be captured. Without an LM head the output's logits mean nothing.
        """
        ...


class StaticPass:
    """A forward pass over at most `width` tokens, with buffers of its own. Used as `load`, `run`, `output`.

    Runs the layers of `forward` on `cache`, and attends to the cache's first `bucket` entries. Keys and values are written to
    `width` entries; those after the pass's tokens are not read before they are written again. `long_rope` selects LongRoPE's
    frequencies for long contexts. Raises ValueError if the cache has less room than `bucket`.

    `run` can be captured in a CUDA graph and replayed as long as `is_valid`: it only reads and writes buffers that exist since
    then, and those of the model. The model's `inputs.kernels` compute what is between the matrix products.
    """

    def __init__(self, forward: StaticWork, cache: KVBuffer, width: int, bucket: int, *, long_rope: bool = False) -> None:
        model = forward.model
        if not width <= bucket <= cache.data.shape[3]:
            raise ValueError(f"a bucket of {bucket} does not fit {width} tokens or a cache of {cache.data.shape[3]}")
        self.width, self.bucket, self.long_rope, self._kernels = width, bucket, long_rope, model.inputs.kernels
        self._forward, self._model, self._cache, self._data = forward, model, cache, cache.data
        self._count = 0  # tokens of the loaded pass
        device, widths = model.device, forward.widths
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be written outside it
            self._input = torch.zeros(2 + 2 * width + SPAN + 1, dtype=torch.int64, device=device)
            parts = torch.split(self._input, [1, 1, width, width, SPAN + 1])
            base, first, self._ids, bits, depths = parts
            self._numbers = PassNumbers(base, first, bits, depths)
            self._indices = torch.arange(bucket, device=device)
            tables = model.inputs.tables.items()
            self._rotations = {name: table.rows(0, bucket + width, long=long_rope) for name, table in tables}
            self._hidden_in = self._buffer(widths.inputs) if widths.inputs else None
            self._hidden, self._features = self._buffer(widths.hidden), self._buffer(widths.features)
            self._logits = self._buffer(widths.logits) if widths.logits else self._hidden
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
        last, written = first + count, first + self.width
        if count > self.width or last > self.bucket or written > self._data.shape[3] or first - base + self.width > SPAN:
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
        """Writes the inputs of a pass over the first level of a tree, of `width` tokens, but for what `feed` writes.

        The level is written to the cache from index `position` on, which is the number of tokens before the tree. A chain is a
        tree of width 1.
        """
        self._count = width = self.width
        bits, depths = (1 << row for row in range(width)), (node // width for node in range(SPAN + 1))
        self._write([position, position, *(0 for _ in range(width)), *bits, *depths])

    def feed(self, tokens: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        """Writes the tokens to run, `tokens` [width], which are on the device, and the hidden states that enter with them."""
        self._ids.copy_(tokens)
        if self._hidden_in is not None and hidden is not None:
            self._hidden_in.copy_(hidden)

    def advance(self, parents: torch.Tensor | None = None) -> None:
        """Changes the inputs to those of the next level of the tree, on the device, but for what `feed` writes.

        `parents` [width] are the rows of this pass that the next one's tokens follow; None for a chain.
        """
        base, first, bits, _ = self._numbers
        first.add_(self.width)
        if parents is None:
            base.add_(1)
            return
        own = torch.ones_like(bits) << (self._indices[: self.width] + (first - base))
        bits.copy_(bits.index_select(0, parents) | own)

    @property
    def inputs(self) -> torch.Tensor:
        """The vector of integers, which `feed` and `advance` change."""
        return self._input

    @property
    def logits(self) -> torch.Tensor:
        """The buffer [width, vocabulary] of the logits of all tokens, padding included."""
        return self._logits

    @property
    def hidden(self) -> torch.Tensor:
        """The buffer [width, width of the hidden states] of the hidden states of all tokens, padding included."""
        return self._hidden

    @inference
    def run(self) -> None:
        """Runs the loaded pass."""
        output = self._forward.run(self._ids, self._hidden_in, self._inputs())
        if output.features is not None:
            self._features.copy_(output.features)
        assert output.hidden_states is not None
        self._hidden.copy_(output.hidden_states)
        if self._logits is not self._hidden:
            self._logits.copy_(output.logits)

    def output(self, logits_to_keep: int) -> ModelOutput:
        """Returns the output for the last tokens of the pass, as views of the buffers: the next `run` overwrites them."""
        kept = slice(self._count - logits_to_keep, self._count)
        features = self._features[: self._count] if self._features.shape[1] else None
        return ModelOutput(self._logits[kept], self._hidden[kept], features=features)

    def _buffer(self, columns: int) -> torch.Tensor:
        return torch.zeros(self.width, columns, dtype=self._model.dtype, device=self._model.device)

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
