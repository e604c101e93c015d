"""Forward passes whose logits have the same bits for a token, whichever tokens are run with it: all of one width.

On a GPU, the order in which a product or an attention adds numbers up depends on the shapes. So every pass of an exact model
covers as many rows, and the number of cache entries that it attends to follows from its tokens' indices alone: neither from the
length of the draft or the prompt, nor from the size of the KV cache. What remains assumed: an operator with the same shapes
computes each row alike, wherever the row is and whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from specgen.engine.forward_pass import ForwardPass, ModelOutput

FIRST_BUCKET = 512  # entries of the KV cache
_LARGEST_STEP = 8192  # entries; buckets are twice as large each up to this one, then this much larger each


def bucket_of(entries: int) -> int:
    """Returns how many cache entries a token attends to, masked ones included, if it is the last of so many `entries`."""
    if entries > _LARGEST_STEP:
        return -(-entries // _LARGEST_STEP) * _LARGEST_STEP
    return max(FIRST_BUCKET, 1 << (entries - 1).bit_length())


def pieces(forward_pass: ForwardPass, width: int) -> Iterator[ForwardPass]:
    """Yields passes over at most `width` tokens each, in order, that together run the tokens of `forward_pass`.

    All tokens of a piece have the same bucket.
    """
    first = forward_pass.first
    while first < forward_pass.last:
        last = min(first + width, forward_pass.last, bucket_of(first + 1))
        yield forward_pass._replace(first=first, last=last)
        first = last


def joined(outputs: Sequence[ModelOutput]) -> ModelOutput:
    """Returns the outputs of consecutive pieces as one."""
    columns = zip(*outputs, strict=True)
    return ModelOutput(*(None if parts[0] is None else torch.cat(parts) for parts in columns))  # type: ignore[arg-type]
