"""What the ranks other than 0 do: they run their part of everything that rank 0 runs, until it says that it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specgen.engine.devices import DTYPES
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, LayerPart
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.spread.messages import Operation, from_text_numbers, read_pass, receive
from specgen.engine.spread.ranks import Ranks
from specgen.engine.spread.sharded_model import ShardedModel, load_shard


class ReceivedHidden:
    """The hidden states that enter the first layer of a pass: rank 0 computed them, the others receive them."""

    def __init__(self) -> None:
        self.states: torch.Tensor | None = None

    def __call__(self, forward_pass: ForwardPass) -> torch.Tensor:
        assert self.states is not None
        return self.states


def make_forward(model: ShardedModel, description: dict[str, Any]) -> tuple[ForwardFunction, ReceivedHidden | None]:
    """Returns the forward function that `description` names, and what holds its hidden inputs; None if it reads token ids."""
    received = ReceivedHidden() if description["inputs"] else None
    if description["taps"] is not None:
        return model.feature_forward(description["taps"]), None
    layers = [LayerPart(index, bool(attention), bool(mlp)) for index, attention, mlp in description["layers"]]
    return model.layers_forward(layers, received, with_head=description["head"]), received


class Follower:
    """Runs what rank 0 announces. `device` is this rank's."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._objects: dict[int, Any] = {}  # models, forward functions with their hidden inputs, and caches, by rank 0's number

    def run(self) -> None:
        """Runs all that rank 0 announces until it has ended. Raises LostRankError if it ends without saying so."""
        with torch.inference_mode():
            while True:
                operation, numbers = receive(self._ranks)
                if operation is Operation.END:
                    return
                self._do(operation, numbers)

    def _do(self, operation: Operation, numbers: list[int]) -> None:
        objects = self._objects
        if operation is Operation.DROP:
            for number in numbers:
                objects.pop(number, None)
            return
        key, rest = numbers[0], numbers[1:]
        if operation is Operation.LOAD:
            objects[key] = self._load(**from_text_numbers(rest))
        elif operation is Operation.FUNCTION:
            objects[key] = make_forward(objects[rest[0]], from_text_numbers(rest[1:]))
        elif operation is Operation.CACHE:
            model, first, last = rest
            objects[key] = objects[model].new_cache(range(first, last))
        elif operation is Operation.GATHER:
            objects[key].gather(rest[1:], rest[0])
        elif operation is Operation.PASS:
            self._pass(objects[key], rest)
        elif operation is Operation.HEAD:
            model = objects[key]
            model.parts.head(self._received(rest[0], model))
        elif operation is Operation.EMBED:
            objects[key].embeddings(torch.tensor(rest).to(self._device))
        else:
            objects[key].reference_logits(rest)

    def _pass(self, function: tuple[ForwardFunction, ReceivedHidden | None], numbers: Sequence[int]) -> None:
        forward, hidden = function
        cache, model, *rest = numbers
        forward_pass, kept = read_pass(rest, self._objects[cache])
        if hidden is not None:
            hidden.states = self._received(forward_pass.last - forward_pass.first, self._objects[model])
        forward(forward_pass, kept)

    def _received(self, rows: int, model: ShardedModel) -> torch.Tensor:
        hidden = torch.empty(rows, model.shape.hidden_size, dtype=model.dtype, device=self._device)
        self._ranks.broadcast(hidden)
        return hidden

    def _load(self, folder: str, name: str, dtype: str, exact: bool) -> ShardedModel:
        architecture = read_architecture(read_config(Path(folder), name))
        return load_shard(Path(folder), name, architecture, DTYPES[dtype], self._device, self._ranks, exact=exact)
