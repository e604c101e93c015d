"""The input and the output of one forward pass, in the form that all backends (native,
transformers) share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from specgen.base.types import Context


class TreeNodes(NamedTuple):
    """The drafted tokens of a tree, and for each token the index of its parent (-1: the context).

    For a chain, in which each token follows the one before, `parents` is a `range`.
    """

    tokens: list[int]
    parents: Sequence[int]


def chain_parents(length: int) -> range:
    """Returns the parent indices of a chain of `length` tokens: -1, 0, 1, ... A range is cheap to
    make, slice and compare."""
    return range(-1, length - 1)


def draft_nodes(tokens: list[int], parents: Sequence[int] | None) -> TreeNodes:
    """Returns the nodes of a draft; `parents` None means a chain. The parents of a chain are
    returned as a range, in whatever form given."""
    chain = chain_parents(len(tokens))
    is_tree = not (parents is None or isinstance(parents, range)) and list(parents) != list(chain)
    return TreeNodes(tokens, list(parents or ()) if is_tree else chain)


NO_NODES = TreeNodes([], chain_parents(0))


class Cache(Protocol):
    """A KV cache with one entry per token of each sequence in each layer. The first `length`
    entries are valid.

    Forward passes write after the first `length` entries and do not change `length`; the caller
    does. When buffers are allocated anew, they have room for at least `capacity` tokens.
    """

    length: int
    capacity: int

    def restorable(self, length: int) -> int:
        """Returns the largest length, at most `length`, to which the cache can be rolled back. It
        is less than `length`, often 0, if a recurrent layer's state has moved past it. `length`
        entries are valid."""
        ...

    def gather(self, indices: Sequence[int], start: int) -> None:
        """Moves the entries at `indices` to `start`, `start + 1`, ... in every layer.

        `indices` must be ascending, and no entry may move to a higher index.
        """
        ...

    def keep_sequences(self, kept: Sequence[int]) -> None:
        """Drops all sequences but those with the indices `kept`, which must be ascending."""
        ...

    def keys_and_values(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the keys and of the values of a layer's first `count` entries.

        Each is [sequences * key-value heads, `count`, head size]. Keys are rotated.
        """
        ...


class ForwardPass(NamedTuple):
    """One forward pass over some of the tokens of a context followed by a draft.

    The pass runs the tokens with indices `first` to `last - 1` and writes their keys and values to
    the same indices of `cache`. A committed token's position is its index; a draft node's position
    is the context's length plus its depth in the tree. `long_rope`: a LongRoPE model uses its
    frequencies for long contexts.
    """

    context: Context
    draft: TreeNodes
    first: int
    last: int
    cache: Any
    long_rope: bool = False

    @property
    def ids(self) -> list[int]:
        """The ids of the tokens to run."""
        length = len(self.context)
        if self.first >= length:
            return self.draft.tokens[self.first - length : self.last - length]
        return (
            self.context.ids[self.first : self.last]
            + self.draft.tokens[: max(self.last - length, 0)]
        )

    @property
    def is_chain(self) -> bool:
        return isinstance(self.draft.parents, range)


class BatchPass(NamedTuple):
    """One forward pass over n tokens of each of several sequences.

    `ids` and `positions` are [batch, n]. The keys are those in `cache`, followed by those of the n
    tokens; without a cache (None) they are those of the n tokens alone. `visible` [batch, n, keys]
    is true where a token may see a key, `key_positions` [batch, keys] are the positions of the
    keys' tokens. Sliding windows are not part of `visible`: the model applies them, by the
    positions.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    key_positions: torch.Tensor
    cache: Any = None


def text_pass(ids: torch.Tensor) -> BatchPass:
    """Returns the pass over a single text, from its beginning and without a cache. `ids` [n] are
    the text's token ids."""
    positions = torch.arange(len(ids), device=ids.device)[None]
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).tril()
    return BatchPass(ids[None], positions, causal[None], positions)


class ModelOutput(NamedTuple):
    """The output of a forward pass for n tokens: `logits` [n, vocabulary], valid until the runner's
    next call.

    Tokens are chosen from `logits`. If penalties were applied to these (`PenaltyProcessor`),
    `unpenalised` [n, the model's vocabulary] are the logits before; otherwise it is None.
    `hidden_states` [n, width] are the LM head's inputs; None if the model was run by transformers'
    own `forward`, which does not return them. `features` [m, ...] are the hidden states that `taps`
    of `engine.model.Model.forward` ask for, of all m tokens of the pass; None without taps.
    `unrestricted` [n, vocabulary + k] is for a draft model with another tokenizer: its logits
    without penalties, also those of its k tokens that the target lacks and that cannot be drafted.
    None if there are none.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None
    unpenalised: torch.Tensor | None = None
    features: torch.Tensor | None = None
    unrestricted: torch.Tensor | None = None

    @property
    def model_logits(self) -> torch.Tensor:
        """The logits of the model itself, without penalties."""
        return self.logits if self.unpenalised is None else self.unpenalised

    def first(self, count: int) -> ModelOutput:
        """Returns the output for the first `count` tokens: the first rows of all tensors."""
        return ModelOutput(*(None if tensor is None else tensor[:count] for tensor in self))  # type: ignore[arg-type]

    def unpenalised_part(self, vocab_size: int) -> torch.Tensor | None:
        """Returns the logits of the draft model's own distribution, from which signals are
        computed; None if these are `logits`.

        They are `unrestricted`, or if that is None `unpenalised` without the columns from
        `vocab_size` on.
        """
        if self.unrestricted is not None:
            return self.unrestricted
        return None if self.unpenalised is None else self.unpenalised[:, :vocab_size]


# A function that runs a model, or some of its layers, on a forward pass. Its second argument is
# `logits_to_keep`: it returns the output for this number of tokens, the last ones of the pass.
ForwardFunction = Callable[[ForwardPass, int], ModelOutput]


class LayerCall(NamedTuple):
    """A decoder layer to run, by its index `layer` in the model. Its attention or its MLP may be
    left out."""

    layer: int
    attention: bool = True
    mlp: bool = True


# A function that returns the hidden states [n, width] that enter a model's later layers in a
# forward pass over n tokens.
HiddenSource = Callable[[ForwardPass], torch.Tensor]


def depths(parents: Sequence[int]) -> list[int]:
    """Returns each tree node's depth from `parents`, the nodes' parent indices (-1: the context,
    whose children have depth 0)."""
    depth_of_node: list[int] = []
    for parent in parents:
        depth_of_node.append(0 if parent < 0 else depth_of_node[parent] + 1)
    return depth_of_node


def path_to(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Returns the drafted tokens from the tree's root to `node`, in order; none for node -1."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def passes_of_levels(
    forward_pass: ForwardPass, *, mixed: bool = True
) -> Iterator[tuple[ForwardPass, int]]:
    """Yields passes over the drafted tokens of a pass, one after the other, such that no token is
    run in the same pass as its parent. Each comes with the level, from 1, of its first token.

    A pass may hold tokens of several levels unless `mixed` is False.
    """
    tokens, parents = forward_pass.draft
    length = len(forward_pass.context)
    levels = [depth + 1 for depth in depths(parents)]
    node = max(forward_pass.first - length, 0)
    while length + node < forward_pass.last:
        end = node + 1
        while end < len(tokens) and parents[end] < node and (mixed or levels[end] == levels[node]):
            end += 1
        drafted = TreeNodes(tokens[:end], parents[:end])
        first = length + node
        yield forward_pass._replace(draft=drafted, first=first, last=length + end), levels[node]
        node = end


def tokens_before(forward_pass: ForwardPass) -> torch.Tensor:
    """Returns the cache indices of the tokens before those of a pass, which are all of the context,
    or all of the draft."""
    first = forward_pass.first
    last = forward_pass.last
    length = len(forward_pass.context)
    if first < length:
        return torch.arange(first - 1, last - 1).clamp_min_(0)
    return torch.tensor(forward_pass.draft.parents[first - length : last - length]) + length


def positions(forward_pass: ForwardPass) -> list[int] | range:
    """Returns the positions of the tokens that the forward pass runs; a range unless the draft is a
    tree."""
    context, draft, first, last = forward_pass[:4]
    if forward_pass.is_chain:
        return range(first, last)
    length = len(context)
    return [
        *range(first, min(last, length)),
        *(length + depth for depth in depths(draft.parents)[max(first - length, 0) :]),
    ]
