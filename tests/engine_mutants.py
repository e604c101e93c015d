"""Mistakes in the engine and in training that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import Selection, mutants

RUNNER = Selection("test_model_runner.py", "llama or native")
EARLY_EXIT = Selection("test_part_runners.py", "(definition and exit and native) or few_tokens")
EXIT_RUNS = Selection("test_lossless.py", "run_each_token_once and native")
PENALTIES = Selection("test_penalties.py::test_penalties_are_equal_to_those_of_transformers")
BATCH = Selection("test_training.py", "batched_texts")

ENGINE_MUTANTS = [
    *mutants(
        "engine/cached_prefix.py",
        RUNNER,
        (
            "KV cache not rolled back after a rejection",
            """            self.draft = NO_NODES
            self.committed = min(self.committed, len(context) - (start == 0))""",
            "            self.committed = min(self.committed, len(context) - (start == 0))",
        ),
        ("KV cache not rolled back for another draft", "if kept < len(cached.tokens):", "if kept < 0:"),
        (
            "KV cache not rolled back for another context",
            """            self.committed = shared
""",
            """            self.committed = min(self.committed, len(context))
""",
        ),
        ("the accepted path of a tree is not gathered", "if path[-1] != length - 1:", "if path[-1] > 1000:"),
    ),
    *mutants(
        "engine/native/inputs.py",
        RUNNER,
        (
            "a tree's positions count nodes, not levels",
            "depths.append(chain if parent < 0 else depths[chain + parent] + 1)",
            "depths.append(len(bits))",
        ),
        (
            "a node sees its siblings",
            "bits.append((committed if parent < 0 else bits[chain + parent]) | own)",
            "bits.append(2 * own - 1)",
        ),
    ),
    *mutants(
        "engine/parts/feature_runner.py",
        EARLY_EXIT,
        (
            "early exit: shared hidden states not gathered",
            "self.kept[start : start + len(indices)] = self.kept.index_select(0, source)",
            "pass",
        ),
    ),
    *mutants(
        "engine/parts/feature_runner.py",
        EARLY_EXIT,
        (
            "early exit: rejected tokens stay in the shared layers",
            "cached.truncate_for(later.context, later.draft, len(later.draft.tokens) + 1)",
            "pass",
        ),
    ),
    *mutants(
        "engine/parts/feature_runner.py",
        EXIT_RUNS,
        (
            "early exit: the first layers run again for the verifier",
            "if later.last > cached.committed:",
            """cached.truncate(0)
        if True:""",
        ),
    ),
    *mutants(
        "engine/logits_processors.py",
        PENALTIES,
        (
            "penalties ignore drafted tokens",
            "for row, path in enumerate(paths) for token in path)",
            "for row, path in enumerate(paths) for token in path[:0])",
        ),
        (
            "penalties count the new tokens of the context only",
            "len(context) - context.prompt_length + len(path)",
            "len(context) - context.prompt_length",
        ),
    ),
    *mutants(
        "train/texts.py",
        BATCH,
        (
            "a batch's new tokens are at positions off by one",
            "(columns - padding).clamp_min(0)",
            "(columns - padding + 1).clamp_min(0)",
        ),
        (
            "a batch's texts see the padding",
            "visible, positions = columns >= padding,",
            "visible, positions = columns >= 0 * padding,",
        ),
    ),
]
