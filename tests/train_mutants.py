"""Mistakes in training and in the store of trained parts that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import Selection, mutants

LOOP = Selection("test_training.py", "resumed or suspensions")
ROWS = Selection("test_training_rows.py")
TEXTS = Selection("test_training.py", "one_part or every_text or teacher_references or reserved_text")
SAVED = Selection("test_training.py", "figures_are_those")
STORE = Selection("test_parts.py", "found_without or names or loaded_once or description or read_back or earlier_versions")
LAYOUTS = Selection("test_published_heads.py")

TRAIN_MUTANTS = [
    *mutants(
        "train/loop.py",
        LOOP,
        (
            "training: a resumed run begins its steps anew",
            'self.step, self.tokens, self.seconds = numbers["step"], numbers["tokens"], numbers["seconds"]',
            'self.tokens, self.seconds = numbers["tokens"], numbers["seconds"]',
        ),
        (
            "training: the optimizer's state is not restored",
            'if numbers["step"]:',
            "if False:",
        ),
        (
            "training: a suspended machine's time is charged",
            "min(clock() - start, _MAX_SLOWDOWN * mean_seconds)",
            "clock() - start",
        ),
    ),
    *mutants(
        "train/heads.py",
        ROWS,
        ("training: losses of deeper tokens weigh the same", "self.decay**row.depths * self.row_losses(", "self.row_losses("),
    ),
    *mutants(
        "train/loop.py",
        ROWS,
        (
            "training: agreement counts tokens after wrong ones",
            "is_right = (table == 0).cumprod(dim=1)",
            "is_right = (table == 0).long()",
        ),
    ),
    *mutants(
        "train/glide.py",
        ROWS,
        ("training: GliDe sees its own block", "block[:, None, :] < block[:, :, None]", "block[:, None, :] <= block[:, :, None]"),
    ),
    *mutants(
        "train/distillation.py",
        TEXTS,
        (
            "training: held-out texts are learned",
            "taught = [each for each in found if each.text.part == Part.TRAIN]",
            "taught = list(found)",
        ),
    ),
    *mutants(
        "train/predictor.py",
        TEXTS,
        (
            "training: the predictor learns from the exit's own texts",
            "if found.text.part == part and found.hidden is not None:",
            "if found.hidden is not None:",
        ),
    ),
    *mutants(
        "engine/parts/trained_part.py",
        SAVED,
        (
            "training: figures are of weights that are not rounded",
            "weight.copy_(weight.to(_SAVED_DTYPE))",
            "weight.copy_(weight)",
        ),
    ),
    *mutants(
        "engine/parts/trained_part.py",
        STORE,
        (
            "parts: a head's weights of another training are accepted",
            "if head.weights and head.weights != weights_fingerprint(path):",
            "if False:",
        ),
        (
            "parts: a part of another target is accepted",
            "described is not None and described.fingerprint != weights_fingerprint(target.folder)",
            "described is None",
        ),
        (
            "parts: the bundled part comes before the user's",
            "bundled if found is None and is_bundled and bundled.is_dir() else found",
            "bundled if is_bundled and bundled.is_dir() else found",
        ),
        ("parts: saved in float16", "_SAVED_DTYPE = torch.bfloat16", "_SAVED_DTYPE = torch.float16"),
        ("parts: the target's LM head is saved", 'if description.own_head or name != "head.weight"}', "if True}"),
    ),
    *mutants(
        "pair/parts.py",
        STORE,
        (
            "parts: a named part is opened again each time",
            "        if key not in self._opened:\n",
            "        if True:\n            self._opened.clear()\n",
        ),
        ("parts: any path is the default one", "if name != methods.DEFAULT_HEAD:", "if False:"),
    ),
    *mutants(
        "engine/parts/published_heads.py",
        LAYOUTS,
        ("parts: SGLang's feature layers are not shifted", "[each + (ids[0] == 1) for each in ids]", "ids"),
        ("parts: the reduced vocabulary's offsets are ids", "ids = offsets + torch.arange(rows)", "ids = offsets"),
    ),
]
