"""A model of llama.cpp for the benchmarks; needs the package `llama-cpp-python`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

CONTEXT = 1024  # tokens
LONGEST_BATCH = 512  # tokens of one pass

_no_log = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(_no_log, None)


class Llama:
    """A model of llama.cpp with one sequence, run by its C functions."""

    def __init__(self, file: Path, threads: int, vocabulary: int) -> None:
        defaults = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), defaults)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = CONTEXT
        options.n_batch = LONGEST_BATCH
        options.n_threads = threads
        options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._batch = llama_cpp.llama_batch_init(LONGEST_BATCH, 0, 1)
        self._vocabulary = vocabulary
        self.length = 0

    def choices(self, tokens: Sequence[int], *, wanted: int = 1) -> list[int]:
        """Runs the tokens after the first `length` and returns the most likely token after each of
        the last `wanted`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = self.length + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = index >= len(tokens) - wanted
        assert llama_cpp.llama_decode(self._context, batch) == 0
        self.length += len(tokens)

        first = len(tokens) - wanted
        rows = (
            llama_cpp.llama_get_logits_ith(self._context, first + index) for index in range(wanted)
        )
        return [int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in rows]

    def keep(self, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, length, -1)
        self.length = length


def llama_plain(target: Llama, prompt: Sequence[int], *, count: int) -> float:
    """Returns the tokens/s of plain decoding after the prompt's pass."""
    target.keep(0)
    token = target.choices(prompt)[0]
    begin = time.perf_counter()
    for _ in range(count):
        token = target.choices([token])[0]
    return count / (time.perf_counter() - begin)
