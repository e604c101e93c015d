"""Exports to transformers: a program."""

from __future__ import annotations

from specgen.tune.exports.records import ExportedMethod, ExportedModels

# the target's types with MTP layers for which it has `use_mtp`
WITH_MTP = (
    "bailing_hybrid",
    "deepseek_v3",
    "glm4_moe",
    "inkling_mm_model",
    "inkling_text",
    "mellum",
    "sarvam_mla",
    "sarvam_moe",
    "step3p5",
    "step3p7",
)


def write(method: ExportedMethod) -> str:
    models = method.models
    arguments = _generation(models)
    lines = _start(models.target)
    passed = ["**inputs"]
    if method.drafter == "lookup":
        arguments |= {
            "prompt_lookup_num_tokens": method.length,
            "max_matching_ngram_size": method.settings["ngram"],
        }
    elif method.drafter == "mtp":
        arguments["use_mtp"] = True
    else:
        lines += _assistant(method)
        passed.append("assistant_model=assistant")
    passed.append(f"**{arguments}")
    if method.drafter == "translated":
        lines.append(f"other = AutoTokenizer.from_pretrained({method.draft!r})")
        passed += ["tokenizer=tokenizer", "assistant_tokenizer=other"]
    return "\n".join([*lines, *_end(", ".join(passed))])


def write_plain(models: ExportedModels) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in _generation(models).items())
    return "\n".join([*_start(models.target), *_end(f"**inputs, {arguments}")])


def refuses(method: ExportedMethod) -> str | None:
    if method.drafter == "mtp" and method.models.target_type not in WITH_MTP:
        return f"transformers does not run the MTP layers of {method.models.target_type} models"
    if method.drafter == "assistant" and method.sampled:
        return (
            "transformers judges an assistant's likeliest tokens as if they were drawn: at a "
            "temperature, the output would not be the target's"
        )
    if set(method.models.mixers) - {"conv"}:
        return "transformers cannot take back tokens of recurrent layers, so it runs no drafts"
    return None


def length(method: ExportedMethod) -> int:
    """Returns the number of drafted tokens: each MTP layer drafts one."""
    if method.drafter == "mtp" and method.head is not None:
        return method.head.layers
    return method.length


def _assistant(method: ExportedMethod) -> list[str]:
    """Returns the lines that load the assistant model and set how it drafts. Arguments of
    generate() would not reach it."""
    name = method.draft if method.head is None else method.head.folder
    schedule = "heuristic" if method.name == "heuristic" else "constant"
    settings = {
        "num_assistant_tokens": method.length,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": method.settings.get("threshold", 0.0),
    }
    return [
        f'assistant = AutoModelForCausalLM.from_pretrained({name!r}, dtype="auto")',
        *(f"assistant.generation_config.{key} = {value!r}" for key, value in settings.items()),
    ]


def _generation(models: ExportedModels) -> dict[str, object]:
    return {"max_new_tokens": 128, "do_sample": bool(models.sampling), **models.sampling}


def _start(target: str) -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
        f'model = AutoModelForCausalLM.from_pretrained({target!r}, dtype="auto")',
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt", return_token_type_ids=False)',
    ]


def _end(arguments: str) -> list[str]:
    return [
        f"output = model.generate({arguments})",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]
