"""Mistakes in drafting heads that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import Selection, mutants

_RUNNERS = "test_part_runners.py"
EAGLE = Selection(_RUNNERS, "(definition and eagle) or another_first_token or each_level")
EAGLE_TRAINING = Selection("test_training_rows.py", "drafted_there and eagle")
MEDUSA = Selection(_RUNNERS, "(definition and medusa) or heads_run_once")
MEDUSA_TREE = Selection("test_medusa.py", "drafts_have or nothing_follows")
GLIDE = Selection(_RUNNERS, "(definition and glide) or chunks")

HEAD_MUTANTS = [
    *mutants(
        "engine/parts/eagle.py",
        EAGLE,
        ("EAGLE: feature i is paired with token i", "first, Context(ids[1:] or ids)", "first, Context(ids[:-1] or ids)"),
        (
            "EAGLE: drafted pairs stay in the KV cache",
            "if self._cached.committed != len(pairs):",
            "if False:",
        ),
        ("EAGLE: a node's feature is another's", "torch.tensor(parents) - lowest", "torch.tensor(parents).clamp(min=0) - lowest"),
        ("EAGLE: levels are run together", "while end < len(tokens) and parents[end] < node:", "while end < len(tokens):"),
        (
            "EAGLE: the first token is not compared",
            """            if first != self._first:
                self._cached.clear()
""",
            "",
        ),
    ),
    *mutants(
        "engine/parts/eagle_layers.py",
        EAGLE,
        (
            "EAGLE-1: embedding and feature are swapped",
            "torch.cat((embeddings, features), dim=-1)",
            "torch.cat((features, embeddings), dim=-1)",
        ),
        (
            "EAGLE-3: the norms of embedding and feature are swapped",
            "torch.cat((take(name), take(FEATURE_NORM)))",
            "torch.cat((take(FEATURE_NORM), take(name)))",
        ),
    ),
    *mutants(
        "train/eagle.py",
        EAGLE_TRAINING,
        (
            "EAGLE: positions of drafted tokens in training",
            "at, padding = batch.positions + depth,",
            "at, padding = batch.positions,",
        ),
        ("EAGLE: tokens of the training-time test not shifted", "embeddings[:, 1 + depth :]", "embeddings[:, depth:]"),
    ),
    *mutants(
        "engine/parts/medusa.py",
        MEDUSA,
        (
            "Medusa: a chain's row is the next head's",
            "of_heads[start : start + len(heads)]",
            "of_heads[[min(head + 1, self.longest_draft - 1) for head in heads]]",
        ),
        ("Medusa: a tree's row is the head's before", "*(depth + 1 for depth in depths(parents))", "*depths(parents)"),
        ("Medusa: the heads' rows of a shorter context", " or self._computed[1] != len(context):", ":"),
        ("Medusa: the blocks' inputs are not added", "states = states + F.silu(", "states = F.silu("),
        (
            "Medusa: the hidden state that predicts the next token",
            "before = Context(context.ids[:-1])",
            "before = Context(context.ids)",
        ),
    ),
    *mutants(
        "methods/medusa_tree.py",
        MEDUSA_TREE,
        ("Medusa: tokens follow one that ends the output", "if token not in self._eos_ids:", "if True:"),
        (
            "Medusa: candidates of a level have the likeliest parent",
            "tree.add(nodes[path[:-1]], token)",
            "tree.add(nodes[(0,) * len(path[:-1])], token)",
        ),
        ("Medusa: impossible tokens are candidates", "in likely if value > -math.inf]", "in likely if True]"),
    ),
    *mutants(
        "engine/parts/glide.py",
        GLIDE,
        ("GliDe: one key of the target too many", "sight_of_chain(first - 1,", "sight_of_chain(first,"),
        ("GliDe: queries rotated as the first tokens", "positions(forward_pass)[-rows:]", "positions(forward_pass)[:rows]"),
        (
            "GliDe: queries rotated as the token before",
            "upload(torch.tensor(at), self._target_model.device)",
            "upload(torch.tensor(at) - 1, self._target_model.device)",
        ),
        ("GliDe: later layers keep accepted tokens", "len(forward.architecture.layers) == 1", "True"),
        (
            "GliDe: the target's first layers are read",
            "self._read_layers = range(first, len(self._target_architecture.layers))",
            "self._read_layers = range(len(architecture.layers))",
        ),
    ),
    *mutants(
        "engine/parts/glide_layers.py",
        GLIDE,
        ("GliDe: queries are not rotated", "if inputs.rotation is not None:", "if False:"),
        ("GliDe: the first token sees a key", "mixed if inputs.sees is None else mixed * inputs.sees", "mixed"),
        ("GliDe: the draft's scale for the target's heads", "self._size**-0.5", "self._size**-0.25"),
    ),
]
