"""A model of llama.cpp for the benchmarks; needs the package `llama-cpp-python`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CONTEXT = 4096  # tokens
LONGEST_BATCH = 512  # tokens of one pass

_no_log = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(_no_log, None)


class Llama:
    """A model of llama.cpp with one sequence, run by its C functions."""

    def __init__(self, file: Path, threads: int, vocabulary: int) -> None:
        defaults = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), defaults)
        assert self._model, f"llama.cpp cannot load {file}"
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = CONTEXT
        options.n_batch = LONGEST_BATCH
        options.n_threads = threads
        options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._batch = llama_cpp.llama_batch_init(LONGEST_BATCH, 0, 1)
        self._vocabulary = vocabulary
        self.length = 0

    def run(self, tokens: Sequence[int], *, wanted: int) -> None:
        """Runs the tokens after the first `length`, and keeps the logits of the last `wanted`,
        which must fit into one pass."""
        while len(tokens) > LONGEST_BATCH:
            self._run_pass(tokens[:LONGEST_BATCH], wanted=0)
            tokens = tokens[LONGEST_BATCH:]
        self._run_pass(tokens, wanted=wanted)

    def _run_pass(self, tokens: Sequence[int], *, wanted: int) -> None:
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

    def logits(self, tokens: Sequence[int], *, wanted: int = 1) -> list[Any]:
        """Runs the tokens as `run`, and returns the logits after each of the last `wanted`, valid
        until the next call."""
        self.run(tokens, wanted=wanted)
        rows = (llama_cpp.llama_get_logits_ith(self._context, index) for index in range(-wanted, 0))
        return [np.ctypeslib.as_array(row, (self._vocabulary,)) for row in rows]

    def choices(self, tokens: Sequence[int], *, wanted: int = 1) -> list[int]:
        """Runs the tokens as `run`, and returns the most likely token after each of the last
        `wanted`."""
        return [int(row.argmax()) for row in self.logits(tokens, wanted=wanted)]

    def keep(self, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, length, -1)
        self.length = length
