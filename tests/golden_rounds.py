"""Records what each method does in every round, on the bundled pair and on tiny random models, and
compares with a recording.

    python tests/golden_rounds.py record FILE [--only PATTERN]
    python tests/golden_rounds.py check FILE [--only PATTERN]

`record` with PATTERN records these cases and keeps the others in FILE, a gzipped JSON object, case
-> recording. A case is the name of a pair, a method with settings, further options of `generate`
and the temperature. Runs are seeded, and all costs and windows are settings, so that no clock
enters. A recording has the rounds of the JSON lines: mode, draft_ids, parents (null for a chain),
accepted_ids, token_id, source and stop_reason, then the sums of entropies, of top_probs and of
predicted, and of overlap and kl where recorded. A failed case has its error message instead.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
from golden_interface import command, own_folders
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

import specgen
from specgen.testing import recorded_rounds
from specgen.testing.recorded_rounds import figures_of

FILE = Path(__file__).parent / "golden" / "rounds.json.gz"
SPECIAL = ["<pad>", "<s>", "</s>"]
MERGES = ["t h", "th e", "a b", "ab c", "Ġ c", "Ġ the", "= Ġ"]  # Ġ stands for a space
CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZĠ0123456789.,:;!?()'\"-_=+*/<>[]{}|@#$%&~"
)
COSTS = "draft_cost=0.1:verify_cost=0.03"
PROMPTS = [
    "def mean(numbers):",
    "Question: A box holds 6 eggs. How many eggs do 7 boxes hold?\nAnswer:",
    'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as file:\n',
    "Question: Tom has 3 apples and buys 4 more. How many apples does Tom have?\nAnswer:",
    "a b c a b c a b",
    (
        "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - "
        "b\n\n\ndef multiply(a, b):\n"
    )
    * 4,
]
LONG_TEXT = "".join(f"{number} the cat sat on the mat abc. " for number in range(45))
PIECES = [
    "abc abc abc abd",
    "x",
    "The cat sat on the mat. The cat sat on the",
    "12 + 34 = 46; 12 + 35 = 47; 12 + 36 = ",
]

DEMO = f"""
ar sd sd:k=1 sd:k=8 sd:k=3:width=2 sd:width=3:depth=4:nodes=8 sd:k=6:cape=true sd:translation=text
sd:policy=svip:width=2:depth=6 sd:policy=svip:threshold=0.3:c=0.2
sd:policy=confidence:threshold=0.6:max_draft=9
sd:policy=heuristic sd:policy=beta-ts sd:policy=cali-ts sd:policy=cali-ts:model_prediction=false
sd:policy=selfsd
sd:policy=adaptive:{COSTS} sd:policy=adaptive:{COSTS}:width=2 heuristic
heuristic:k=2:max_draft=6 confidence confidence:threshold=0.7:max_draft=5
svip svip:threshold=0.2 svip:c=0.3:every=3 beta-ts beta-ts:alpha=5:beta=2:max_draft=8
adaptive:{COSTS} adaptive:draft_cost=0.3:verify_cost=0.1:lookup=false
adaptive:draft_cost=0.05:verify_cost=0:exploration=1:ngram=2
lookup:k=10 lookup:k=4:ngram=2 lookup:{COSTS} lookup:policy=heuristic lookup:policy=beta-ts
suffix:{COSTS} suffix:k=6:min_prob=0.1:factor=1 suffix:policy=confidence
lookahead lookahead:window=5:ngram=4:guesses=5 ouroboros ouroboros:k=3:ngram=3:branches=2:window=6
ouroboros:branches=0
pearl:window=3 pearl:window=3:pre_verify=false pearl:window=4:post_verify=false
pearl:window=2:pre_verify=false:post_verify=false
pearl:window=5:policy=svip pearl:window=3:policy=beta-ts
mtad mtad:k=3:beams=4:tau=0.3 mtad:beam=sample mtad:policy=svip bild
bild:fallback=0.5:rollback=4:k=6 bild:policy=confidence
joint:k=2 joint:k=3:beams=4 joint:k=3:nodes=16 spectr spectr:k=2:drafts=6
spectr:policy=svip:drafts=2
specinfer specinfer:k=3:drafts=2 specinfer:policy=confidence
eesd:policy=cali-ts eesd:model_prediction=false eesd:sampling_prediction=false:theta0=0.5
eesd-fixed eesd-fixed:k=3 eesd-fixed:policy=svip
eesd-fixed:cape=true eesd-beta eesd-beta:alpha=3:beta=2:max_draft=6 eesd-cali
eesd-cali:sigma_model=0.1:sigma_sample=1
eesd-tree eesd-tree:width=2:depth=3 eesd-tree:nodes=6 eesd-tree:policy=beta-ts
medusa medusa:nodes=0 medusa:nodes=20:k=3 medusa:policy=confidence eagle eagle:width=1
eagle:width=1:policy=svip
eagle:width=2:depth=4:nodes=6 eagle:nodes=auto:k=3 eagle:width=1:cape=true
eagle:width=1:policy=adaptive:{COSTS}
glide glide:k=3 glide:cape=true glide:policy=svip glide:policy=heuristic
selfsd:skip=5+6a+7m selfsd:skip=3+4:k=6 selfsd:skip=2+9:policy=fixed:k=4 selfsd:skip=4m+8a:cape=true
mtp block:k=7 block:k=4:nodes=12 block:policy=confidence block:policy=adaptive:{COSTS}
fly:k=15:window=4:entropy=0 eesd:{COSTS}
""".split()
FAMILY = f"""
ar sd:k=4 sd:k=3:width=2 sd:width=3:depth=4:nodes=7 sd:cape=true svip:threshold=0.5
confidence:threshold=0.2 beta-ts
adaptive:{COSTS} lookup:k=4:ngram=1 suffix:k=4 lookahead ouroboros:k=3 pearl:window=3
specinfer:k=3:drafts=3 spectr:k=3:drafts=3
mtad:k=3:beams=3 bild:k=4:fallback=0.1 joint:k=2:beams=3 selfsd:skip=1:k=3
selfsd:skip=0a+2m:policy=svip
""".split()
FEW = (
    f"ar sd:k=4 sd:k=3:width=2 svip:threshold=0.5 lookup:k=4:ngram=1 adaptive:{COSTS} "
    "specinfer:k=3:drafts=2"
).split()
OPTIONS = [
    "--top-p 0.8",
    "--top-k 5",
    "--exact",
    "--stop return",
    "--ignore-eos",
    "--context 40",
    "--record distributions",
]
OPTIONS += ["--backend transformers", "--seed 7"]
RUNS = [
    "svip",
    "eagle",
    "eesd:policy=cali-ts",
    "lookup:k=6",
    "sd:k=3:width=2",
    "glide",
    "pearl:window=3",
    "medusa",
    "selfsd:skip=3:k=6",
    "ar",
]
OTHER = [
    "sd:k=4",
    "svip:threshold=0.5",
    "sd:k=3:width=2",
    "pearl:window=3",
    "specinfer:k=3:drafts=2",
    "sd:translation=text:k=4",
]

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "vocab_size": 112,  # some rows have no token, as in padded models
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GEMMA = {"head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8}
_FULL = "full_attention"
_SLIDING = "sliding_attention"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "layer_types": [_SLIDING, _FULL, _SLIDING]},
    "mistral": {"sliding_window": 12},
    "phi3": {"sliding_window": 12},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 160},
    "gpt_neox": {},
    "starcoder2": {"sliding_window": 12},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
}
ON_TRANSFORMERS = ("gpt2", "gpt_neox", "starcoder2", "stablelm", "cohere")
LONG = 2048  # tokens: prompts above 1,024 run in chunks
VARIANTS: dict[str, dict[str, Any]] = {  # fields of the target's generation_config
    "llama-repetition": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9},
    "llama-bans": {
        "suppress_tokens": list(range(30, 45)),
        "bad_words_ids": [[5], [6, 7]],
        "sequence_bias": [[[9], 5.0]],
    },
    "mistral-long": {},
    "llama-transformers": {},
    "gemma3_text-transformers": {},
    # the draft's tokenizer has other ids, other merges, and lacks some characters
    "llama-foreign": {},
}


def make_model(family: str, **changes: Any) -> Any:
    """A random float32 model. NumPy draws the weights, so that they do not depend on torch,
    transformers or the processor."""
    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_gain = (
                weight.dim() == 1 and not name.endswith("bias") and not family.startswith("gemma")
            )
            weight.fill_(1.0 if is_gain else 0.0)
    add_noise(model, 0, 0.25)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def add_noise(model: Any, seed: int, scale: float) -> None:
    """Adds to all weights random numbers with the standard deviation `scale`; a third of it for
    norms and biases."""
    draws = numpy.random.default_rng(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                torch.from_numpy(
                    draws.standard_normal(tuple(weight.shape))
                    * scale
                    / (3 if weight.dim() == 1 else 1)
                )
            )


def vocabulary(merges: list[str], characters: str) -> list[str]:
    return [*SPECIAL, *characters, *(merge.replace(" ", "") for merge in merges)]


def make_tokenizer(merges: list[str], characters: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows these characters and merges."""
    words = {word: id_ for id_, word in enumerate(vocabulary(merges, characters))}
    backend = Tokenizer(
        models.BPE(words, [(merge.split()[0], merge.split()[1]) for merge in merges])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def save(model: Any, folder: Path, merges: list[str] = MERGES, characters: str = CHARACTERS) -> str:
    model.save_pretrained(folder)
    make_tokenizer(merges, characters).save_pretrained(folder)
    return str(folder)


@cache
def pair_options(pair: str, folder: Path) -> tuple[str, ...]:
    """The options of `generate` for a pair named `demo`, as a family or as a variant. Makes it and
    saves it in `folder`, unless it is the bundled one."""
    common = ("--device", "cpu", "--dtype", "float32")
    if pair == "demo":
        return common
    family, _, variant = pair.partition("-")
    more = {"max_position_embeddings": LONG} if variant == "long" else {}
    model, draft = make_model(family, **more), make_model(family, **more)
    add_noise(draft, 1, 0.012)
    model.generation_config = GenerationConfig(
        eos_token_id=2, pad_token_id=0, **VARIANTS.get(pair, {})
    )
    own = (MERGES, CHARACTERS)
    if variant == "foreign":
        own = ([*MERGES[2:5], "o n"], CHARACTERS[-9::-1])
        known = vocabulary(MERGES, CHARACTERS)
        rows = [
            known.index(word) if word in known else known.index(word[0])
            for word in vocabulary(*own)
        ]
        with torch.no_grad():
            for table in (draft.model.embed_tokens.weight, draft.lm_head.weight):
                table[: len(rows)] = table[rows].clone()
    target_folder = save(model, folder / pair / "target")
    draft_folder = save(draft, folder / pair / "draft", *own)
    backend = "transformers" if family in ON_TRANSFORMERS or variant == "transformers" else "native"
    return ("-t", target_folder, "-d", draft_folder, "--backend", backend, *common)


def cases() -> Iterator[tuple[str, str, list[str]]]:
    """Yields the name of each case, the name of its pair, and further arguments of `generate`. No
    arguments stand for a session (see `session`). Two thirds of the cases ignore `</s>`."""
    listed = [
        ("demo", DEMO, PROMPTS, [""], 40),
        ("demo", ["sd", "svip:threshold=0.3"], PROMPTS[::2], OPTIONS, 24),
    ]
    listed += [
        (family, FAMILY if family not in ON_TRANSFORMERS[2:] else FEW, PIECES, [""], 24)
        for family in FAMILIES
    ]
    for pair in VARIANTS:
        listed += [
            (
                pair,
                OTHER if "foreign" in pair else FEW,
                [LONG_TEXT] if "long" in pair else PIECES,
                [""],
                24,
            )
        ]
    for pair, methods, prompts, options, count in listed:
        for option, (index, spec), temperature in product(options, enumerate(methods), "01"):
            if spec.startswith("joint") and temperature != "0" and pair != "demo":
                continue  # it decodes greedily only
            method, *settings = spec.split(":")
            arguments = [
                "-m",
                method,
                *(part for setting in settings for part in ("--set", setting)),
                *option.split(),
            ]
            arguments += ["--seed", "0"] * ("--seed" not in option) + ["--ignore-eos"] * (
                index % 3 > 0
            )
            arguments += [
                "-n",
                str(count),
                "--temperature",
                temperature,
                prompts[(index + int(temperature)) % len(prompts)],
            ]
            yield " ".join(filter(None, (pair, spec, option, f"t={temperature}"))), pair, arguments
    yield from ((f"demo session t={temperature}", "demo", []) for temperature in "01")


def run(case: str, pair: str, arguments: list[str], folder: Path) -> Any:
    """Runs a case and returns its rounds and summary, or its exit code and error message."""
    if not arguments:
        return session(float(case[-1]))
    code, out, err = command(
        "generate", *pair_options(pair, folder), "--json", "--quiet", *arguments
    )
    lines = [json.loads(line) for line in out.splitlines()]
    if code:
        return {"exit": code, "error": err.strip().splitlines()[0].replace(str(folder), "FOLDER")}
    end = lines[-1]
    summary = {
        name: end[name]
        for name in ("finish_reason", "text", "target_passes", "drafted", "accepted")
    }
    return {**summary, "rounds": [figures_of(line) for line in lines if line["type"] == "round"]}


def session(temperature: float) -> list[Any]:
    """Runs of one bundled pair from Python, one after another, so that caches are used again:
    tokens and rounds of each run.

    Each prompt goes on from the answer before it; one run is left unfinished, and the caches are
    emptied once.
    """
    sampling = specgen.SamplingParams(max_new_tokens=16, temperature=temperature, seed=0)
    prompt = PROMPTS[0]
    done = []
    with own_folders(), specgen.load(device="cpu", dtype="float32") as pair:
        for index, spec in enumerate([*RUNS, *["suffix:k=4:history=true"] * (temperature == 0)]):
            method, *settings = spec.split(":")
            values = dict(setting.split("=") for setting in settings)
            unfinished = pair.rounds(prompt, method=method, sampling=sampling, **values)
            next(unfinished)
            unfinished.close()
            result = pair.generate(prompt, method=method, sampling=sampling, **values)
            rounds = [
                [list(each.draft.tokens), list(each.accepted_ids), each.verdict.token]
                for each in result.rounds
            ]
            done.append([spec, list(result.token_ids), rounds])
            prompt = prompt + result.text + "\n" if index % 3 else PROMPTS[index % len(PROMPTS)]
            if index == 4:
                pair.forget()
    return done


def difference(old: Any, new: Any) -> str | None:
    """Returns the first place where the recordings of a case differ, rounds before the summary; the
    error if only the new one failed; None if they agree."""
    if isinstance(old, dict) and isinstance(new, dict):
        if "error" in new and "error" not in old:
            return str(new["error"])
        old = dict(reversed(old.items()))
        new = dict(reversed(new.items()))
    return recorded_rounds.difference(old, new)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--only", default="", help="a regular expression that the names of cases contain"
    )
    options = parser.parse_args()
    listed = list(cases())
    chosen = [case for case in listed if re.search(options.only, case[0])]
    logging.disable_progress_bar()
    known = {}
    if options.action == "check" or options.only:
        known = json.loads(gzip.decompress(options.file.read_bytes()))
    made = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        for case, pair, arguments in chosen:
            made[case] = run(case, pair, arguments, Path(name))
            if options.action == "record":
                continue
            first = difference(known.get(case), made[case])
            if first is not None:
                wrong += 1
                print(f"{case:60}  {first[:150]}", flush=True)
    if options.action == "record":
        kept = known | made
        whole = {name: kept[name] for name, _, _ in listed if name in kept}
        text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False)
        options.file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(
        f"{len(made)} cases, {wrong} differ"
        if options.action == "check"
        else f"{len(made)} cases recorded"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
