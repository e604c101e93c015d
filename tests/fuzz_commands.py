"""Makes command lines and environments for the fuzzer: all commands and options, with valid, borderline and absurd values."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fuzz_inputs import ESCAPE
from fuzz_materials import Materials

from specgen.compare.baselines import BASELINES
from specgen.methods import METHODS, POLICIES, known_settings

LONG = "a" * 5000
BYTES = os.fsdecode(b"a\xff")  # an argument that is not UTF-8
WORDS = ("", " ", "x", "-", "--", "-1", "é", ESCAPE, BYTES, "=1+1", "%s{0}", "a,b:c=d", "\n", LONG)
WHOLE = (
    *["0", "-1", "1", "2", "7", "1e3", "nan", "inf", "x", "1_000", "٣", "0x10", "-0", "1.5"],
    "9" * 20,
    "9" * 400,
    "9" * 5000,
    "",
    " 4 ",
)
REAL = (*WHOLE, "-inf", "1e-46", "1e-320", "1e309", "0.5", "1.0000001", "1,5", ".9", "5e-324", "100", "0.001")
Value = Callable[[Random, "Case"], str]


@dataclass
class Case:
    """A command to run: its arguments, standard input, environment and files, all in `folder`.

    `outputs` are the paths that it may write. A variable of `environment` that is None is removed. `is_loose`: an option may have
    taken another one as its value, so that nothing is known about the form of the output.
    """

    part: str
    folder: Path
    materials: Materials
    args: list[str] = field(default_factory=list)
    stdin: bytes = b""
    environment: dict[str, str | None] = field(default_factory=dict)
    outputs: list[Path] = field(default_factory=list)
    is_terminal: bool = False
    is_loose: bool = False

    def make_folders(self) -> None:
        for name in ("in", "out", "home", "data", "cache", "tmp", "dev"):
            (self.folder / name).mkdir(parents=True)
        out = self.folder / "out"
        (out / "old.html").write_text("old")
        (out / "folder").mkdir()
        (out / "dangling").symlink_to(out / "new.html")
        (out / "link").symlink_to(out / "old.html")
        (out / "loop").symlink_to("loop")
        os.mkfifo(out / "fifo")
        for name, minor in (("null", 3), ("full", 7)):  # nodes of the fuzzer's own: the machine's are never named
            try:
                os.mknod(self.folder / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            except OSError:
                (self.folder / "dev" / name).symlink_to(f"/dev/{name}")


def pick(*values: str) -> Value:
    return lambda rng, case: rng.choice(values)


def mostly(good: tuple[str, ...], bad: tuple[str, ...], share: float = 0.8) -> Value:
    return lambda rng, case: rng.choice(good if rng.random() < share else bad)


def output(*suffixes: str) -> Value:
    """A path to write: a new file, an old one, a folder, a link, a device, a name that cannot be, an input."""

    def value(rng: Random, case: Case) -> str:
        out = case.folder / "out"
        names = [f"new{rng.choice(suffixes)}", f"x{rng.choice(suffixes)}"] * 4
        names += [
            "old.html",
            "folder",
            "dangling",
            "link",
            "fifo",
            "no/new",
            LONG,
            "a" * 252,
            f"p{ESCAPE}".replace("/", ""),
            f"é{BYTES}",
        ]
        names += ["loop", "loop/x"]
        names += ["../dev/full", "../dev/null", "../in/p.jsonl", "folder/../x.csv", "old.html/x", ".", "..", "~", "-"]
        path = out / rng.choice(names)
        if rng.random() < 0.03:
            return rng.choice(("", "~/x", "~nobody/x", "/", "-"))
        case.outputs.append(path)
        return os.path.relpath(path, case.folder) if rng.random() < 0.3 and len(str(path)) < 4000 else str(path)

    return value


def model(rng: Random, case: Case) -> str:
    made, choice = case.materials, rng.random()
    if choice < 0.6:
        return str(made.draft if rng.random() < 0.4 else made.target)
    if choice < 0.8:
        return str(rng.choice((*made.families.values(), made.other)))
    places = (str(case.folder), str(made.target / "config.json"))
    return rng.choice((*WORDS, *places, "no/such", "a//b", "a/b/c", "~", ".", "~nobody"))


def method_name(rng: Random, case: Case) -> str:
    names = [name for name in METHODS if not METHODS[name].needs_exit_layer or rng.random() < 0.1]
    return rng.choice(names) if rng.random() < 0.85 else rng.choice(("svp", "eesd", "all", "transformers", *WORDS))


def setting(rng: Random, name: str) -> str:
    """KEY=VALUE for a method, mostly with a key that it has."""
    method = METHODS.get(name) or rng.choice(list(METHODS.values()))
    policy = rng.choice(list(POLICIES)) if rng.random() < 0.3 else method.policy
    known = known_settings(method, policy)
    key = rng.choice([*known, "policy", "k", "exit", "skip"]) if rng.random() < 0.9 else rng.choice(WORDS)
    if key == "policy" and rng.random() < 0.7:
        return f"policy={rng.choice(list(POLICIES))}"
    text = rng.choice((*REAL[:14], "0.5", "3", "true", "false", "auto", "1+2", "0", "2m", "1a+1m", "greedy", *WORDS))
    return f"{key}={text}" if rng.random() < 0.95 else rng.choice((key, f"{key}==", f"={text}", f"{key}:{text}"))


def method_list(rng: Random, case: Case) -> str:
    parts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = method_name(rng, case) if rng.random() < 0.9 else rng.choice(list(BASELINES))
        settings = [setting(rng, name) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
        parts.append(":".join([name, *settings]))
    return rng.choice((",", ",", ",", ", ", ",,")).join(parts)


def prompts_file(rng: Random, case: Case) -> str:
    path = case.folder / "in" / "p.jsonl"
    if not path.exists():
        path.write_text('{"prompt": "hello", "category": "c"}\n{"prompt": "abc abc"}\n')
    others = (*WORDS, str(case.folder / "no"), str(case.folder), str(case.materials.target))
    return str(path) if rng.random() < 0.9 else rng.choice(others)


def trace_file(rng: Random, case: Case) -> str:
    path = case.folder / "in" / "trace.jsonl"
    path.write_text(rng.choice(case.materials.traces), encoding="utf-8")
    return str(path) if rng.random() < 0.9 else rng.choice((*WORDS[:-1], str(case.folder / "no"), str(case.folder), "-"))


def resumed(rng: Random, case: Case) -> str:
    path = Path(trace_file(rng, case))
    case.outputs.append(path)
    return str(path)


def folder_in(rng: Random, case: Case) -> str:
    folders = (case.materials.profile, case.materials.exit_layer, case.materials.target, case.folder / "no")
    return rng.choice((*map(str, folders), *WORDS))


FLAG = None
DEVICE = mostly(("cpu", "cpu", "auto"), ("cuda", "cuda:7", "mps", "CPU", "tpu", "cpu:0", "cuda:-1", "cuda:x", *WORDS), 0.9)
MODELS: dict[str, Value | None] = {
    "--target": model,
    "--draft": model,
    "--device": DEVICE,
    "--draft-device": DEVICE,
    "--dtype": mostly(("float32", "auto", "bfloat16"), ("float16", "float64", "int8", "Float32", *WORDS)),
    "--revision": pick("main", *WORDS),
    "--draft-revision": pick("main", *WORDS),
    "--offline": FLAG,
    "--backend": mostly(("auto", "native", "transformers"), WORDS),
    "--exit-layer": folder_in,
}
SAMPLING: dict[str, Value | None] = {
    "--temperature": mostly(("0", "1", "0.7"), REAL, 0.6),
    "--top-p": mostly(("1", "0.9"), REAL, 0.6),
    "--top-k": mostly(("0", "5"), WHOLE, 0.6),
    "--seed": mostly(("0", "5"), WHOLE, 0.6),
    "--ignore-eos": FLAG,
}
DISPLAY: dict[str, Value | None] = {"--json": FLAG, "--quiet": FLAG, "--no-color": FLAG}
RECORD = mostly(("distributions",), WORDS)
COMMANDS: dict[str, dict[str, Value | None]] = {
    "generate": {
        "--method": method_name,
        "--set": lambda rng, case: setting(rng, rng.choice(list(METHODS))),
        "--chat": FLAG,
        "--system": pick(*WORDS),
        "--help-method": FLAG,
        "--profile": folder_in,
        "--exact": FLAG,
        "--stop": pick("e", "ab", "a" * 100_000, *WORDS),
        "--rounds": FLAG,
        "--trace": output(".jsonl"),
        "--record": RECORD,
        "--perplexity": FLAG,
        "--energy": FLAG,
    },
    "compare": {
        "--methods": method_list,
        "--category": pick("c", *WORDS),
        "--limit": mostly(("1", "2"), WHOLE),
        "--turns": FLAG,
        "--chat": FLAG,
        "--profile": folder_in,
        "--exact": FLAG,
        "--by-category": FLAG,
        "--phases": FLAG,
        "--predict": FLAG,
        "--perplexity": FLAG,
        "--energy": FLAG,
        "--trace": output(".jsonl"),
        "--record": RECORD,
        "--resume": resumed,
        "--csv": output(".csv"),
        "--svg": output(".svg"),
        "--html": output(".html"),
    },
    "inspect": {
        "--methods": FLAG,
        "--html": output(".html"),
        "--rounds": mostly(("0", "1", "3"), WHOLE, 0.6),
        "--run": mostly(("1",), WHOLE, 0.6),
        "--pair": FLAG,
    },
    "tune": {
        "--methods": mostly(
            ("eesd", "sd", "medusa", "eagle", "svip", "lookup,sd", "ar"), ("svp", "transformers", "sd:k=3", *WORDS)
        ),
        "--prompts": prompts_file,
        "--category": pick("c", *WORDS),
        "--limit": mostly(("1",), WHOLE),
        "--chat": FLAG,
        "--objective": mostly(("speed", "perplexity"), WORDS),
        "--max-perplexity": mostly(("120%", "5", "100%"), ("0", "-1%", "nan", "nan%", "inf", "1e999%", "%", *WORDS)),
        "--export": mostly(("vllm", "transformers", "sglang", "llama.cpp", "mlx"), WORDS),
        "--out": output("", "/deeper/still"),
        "--corpus": prompts_file,
        "--layer": mostly(("1", "2"), WHOLE),
        "--exit-layers": mostly(("0", "1", "2"), WHOLE),
        "--exit-head": mostly(("own", "target"), WORDS),
        "--self-text": mostly(("0", "0.5", "1"), REAL),
        "--batch-size": mostly(("1", "2"), WHOLE),
        "--window": mostly(("16", "32"), WHOLE),
        "--learning-rate": mostly(("0.001",), REAL),
    },
}


def options(rng: Random, case: Case, command: str, count: int) -> list[str]:
    """Some of a command's options with values; an option may be given twice."""
    known: dict[str, Value | None] = {**COMMANDS[command], **MODELS, **DISPLAY, **({} if command == "inspect" else SAMPLING)}
    args = []
    for name in rng.choices(list(known), k=count):
        value = known[name]
        args += [name] if value is None else [name, value(rng, case)]
    return args


def small(rng: Random, case: Case, command: str) -> list[str]:
    """The options that make a run short."""
    args = [] if command == "inspect" else ["-n", rng.choice(("1", "3", "6")) if rng.random() < 0.9 else rng.choice(WHOLE)]
    if command == "compare":
        args += ["--prompts", prompts_file(rng, case), "--repeats", mostly(("1",), ("0", "-1", "2", "x"), 0.9)(rng, case)]
    if command == "tune" and rng.random() < 0.6:
        steps = ("--steps", mostly(("1",), ("0", "-1", "x"))(rng, case))
        minutes = ("--minutes", rng.choice(("1e-9", "0", "-1", "nan", "x")))
        args += ["--train", *(steps if rng.random() < 0.9 else minutes), "--window", "16", "--batch-size", "2"]
        args += ["--corpus", prompts_file(rng, case), "--out", str(case.folder / "out" / "trained")]
        case.outputs.append(case.folder / "out" / "trained")
    elif command == "tune":
        args += ["--budget", rng.choice(("0.2", "0.2", "0", "-1", "nan", "inf", "x")), "--prompts", prompts_file(rng, case)]
    return args


def pair_of(rng: Random, case: Case) -> list[str]:
    made = case.materials
    return ["--target", str(made.target), *(["--draft", str(made.draft)] if rng.random() < 0.8 else []), "--device", "cpu"]


def command_line(rng: Random, case: Case, command: str | None = None, count: int | None = None) -> list[str]:
    """A command on the tiny pair with `count` more options (None: a random number) and what the command works on."""
    command = command or rng.choice(("generate", "generate", "compare", "compare", "inspect", "tune"))
    count = rng.choice((0, 1, 2, 2, 3, 5, 8)) if count is None else count
    args = [command]
    of_trace = command == "inspect" and rng.random() < 0.7
    if not of_trace and rng.random() < 0.9:
        args += pair_of(rng, case)
    if command == "generate":
        args += [rng.choice(("abc", "hello abc abc"))] if rng.random() < 0.8 else ["--", rng.choice((*WORDS[1:], "a" * 200))]
    if command == "compare" and rng.random() < 0.9:
        args += ["--methods", method_list(rng, case)]
    if of_trace:
        args += [trace_file(rng, case) for _ in range(rng.choice((1, 1, 2)))]
    # `--` ends the options: what it is followed by has to come last
    ending = [args.pop() for _ in range(2)][::-1] if "--" in args[-2:] else []
    if command == "generate" and rng.random() < 0.5:
        args += ["--method", (name := method_name(rng, case))]
        args += ["--set", setting(rng, name)] * (rng.random() < 0.4)
    args += small(rng, case, command) + options(rng, case, command, count)
    if rng.random() < 0.07:
        case.is_loose = True
        _spoil(rng, case, args)
    return args + ending


def _spoil(rng: Random, case: Case, args: list[str]) -> None:
    """Makes a wrong combination: an option of another command, a part that is missing, added or at another place."""
    choice = rng.randrange(4)
    if choice == 0:
        args += options(rng, case, rng.choice(list(COMMANDS)), 1)
    elif choice == 1:
        del args[rng.randrange(len(args))]
    elif choice == 2:
        args.insert(rng.randrange(len(args)), rng.choice(("--help", "--version", "-", "--", "-x", "--no", *WORDS)))
    else:
        rng.shuffle(args)
    if "--minutes" not in args and "--steps" not in args and "--train" in args:
        args.remove("--train")  # else it would train for half an hour
    if "compare" in args and "--prompts" not in args:
        args += ["--prompts", prompts_file(rng, case)]
    if "tune" in args and "--budget" not in args and "--train" not in args:
        args += ["--budget", "0.2"]


ENVIRONMENT: dict[str, tuple[str | None, ...]] = {  # None: the variable is removed
    "COLUMNS": ("0", "1", "12", "20", "80", "1000", "²", "-5", "x", "", "9" * 400, "99999999"),
    "LINES": ("0", "1", "x"),
    "NO_COLOR": ("1", "", "0"),
    "FORCE_COLOR": ("1", "x"),
    "SPECGEN_THEME": ("dark", "light", "ansi", "mono", "x", ESCAPE, "DARK"),
    "SPECGEN_DATA": ("{out}/data", "{file}", "{no}/a/b", "relative", ESCAPE.replace("/", ""), "{dev}/null", LONG, "~"),
    "SPECGEN_CACHE": ("{out}/cache", "{file}", "{no}/a/b", "relative", "{dev}/null", LONG, BYTES),
    "LC_ALL": ("C", "POSIX", "tr_TR.UTF-8", "x"),
    "HOME": (None, None, "", "/nonexistent", "{file}", "relative", LONG, BYTES),
    "USER": (None, "", ESCAPE),
    "PATH": (None, ""),
    "LANG": (None, "C", "x"),
    "PYTHONIOENCODING": ("ascii", "utf-8:surrogateescape"),
    "XDG_DATA_HOME": ("{out}/xdg", "", "{file}"),
    "OMP_NUM_THREADS": ("1", "2", "0", "-1", "x", "1,2", ""),
    "TERM": ("dumb", "unknown", "xterm-256color", "xterm", "", "x"),
    "COLORTERM": ("truecolor", "x"),
    "COLORFGBG": ("15;0", "0;15", "x;²", ";", "1;٣", "0;" + "9" * 5000),
    "HF_HUB_OFFLINE": ("1",),
    "HF_HOME": ("{file}", "{no}", LONG, BYTES, "relative", "{dev}/null"),
    "HF_HUB_CACHE": ("{file}", "{no}", LONG, BYTES, "relative", "$HOME/x", "~nobody"),
    "XDG_CACHE_HOME": ("{file}", "{no}", LONG, BYTES),
    "HF_TOKEN": ("x", "é"),
    "TQDM_DISABLE": ("1",),
    "PYTHONUTF8": ("0", "1"),
    "TERMINAL_WIDTH": ("0", "x", "12"),
    "CUDA_VISIBLE_DEVICES": ("", "x", "99"),
}


def environment(rng: Random, case: Case, count: int) -> dict[str, str | None]:
    """Some variables of the environment with odd values. The folders of specgen's own lie in the case's folder."""
    out = case.folder / "out"
    places = {"out": out, "file": out / "old.html", "no": out / "no", "dev": case.folder / "dev"}
    chosen: dict[str, str | None] = {}
    for name in rng.sample(list(ENVIRONMENT), count):
        chosen[name] = text = rng.choice(ENVIRONMENT[name])
        if text is None:
            continue
        for key, path in places.items():
            text = text.replace(f"{{{key}}}", str(path))
        chosen[name] = text
        if name in ("SPECGEN_DATA", "SPECGEN_CACHE"):
            case.outputs += [case.folder / text, out / "no"]
    return chosen
