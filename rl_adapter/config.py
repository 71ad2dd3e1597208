"""The complete configuration of a run: every field, its unit, its constraint, and the check that a run starts from.

An experiment is a Python file with `get_config() -> ConfigDict` (and, for a sweep, `get_hyper()` beside it) that
starts from `default()` and changes what it needs. The dict is locked and typed, so a misspelt key or a wrong type
fails at once; `validate` then checks ranges and divisibility before anything compiles.
"""

import copy
import difflib
import hashlib
import importlib.util
import json
import os
import pathlib
import types
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"
SHIPPED_BASE = pathlib.Path(__file__).parent / "assets" / "base"
FORMATS = ("int8", "int4", "int4_g32", "int4_g128", "fixed16")
GROUPS = ("attention", "mlp", "experts", "router", "head")
CALLS = "auto", "kimi", "deepseek", "glm", "mistral", "harmony", "qwen_coder", "hermes", "llama3", "brackets", "equals"
ENGINE = "slots", "lanes", "steps", "page", "chunk", "prefill", "cache_tokens"  # of `rollout`: how completions are batched
VARIANTS = {"float": ("float", 16), "a16": ("exact", 16), "a8": ("exact", 8)}  # in quality.variants -> numerics, act_bits


def default() -> ConfigDict:
    """The default configuration, locked. Units and constraints stand beside each field."""
    c = ConfigDict()
    c.seed = 0  # int in 0 .. 2^32 - 1; keys adapter init and every sampled token
    c.steps = 100  # int >= 1; rollout batches trained on, in all (a resumed run goes on to this number)
    c.model = ""  # directory in HF layout, or a .gguf file; '' = the base that ships with the package
    c.prepared = ""  # directory of copies of loaded bases, which load faster: used where present, made where not; '' = none
    c.numerics = "exact"  # 'exact' (integer contractions, same bits everywhere) | 'float' (dequantize and multiply)
    c.act_bits = 16  # 8 | 16; bits of activations in exact mode
    c.cache_bits = 0  # 0 (as act_bits) | 8 | 16, at most act_bits; bits of keys and values in exact mode, in rollout and training alike
    c.context = 0  # tokens, >= 2; prompt + completion must fit; 0 = as needed by data.max_prompt_tokens + rollout.max_new_tokens
    c.remat = True  # recompute a block's activations in the backward pass: less memory, more time

    # What linears that are stored unquantized become on load (weights stored as INT4 keep their own codes and scales).
    q = c.quantize = ConfigDict()
    q.linear = "int8"  # one of FORMATS: int8 per channel | int4 per channel | int4_g32, int4_g128 per group | fixed16
    q.head = "fixed16"  # one of FORMATS; output projection
    q.router = "fixed16"  # one of FORMATS; expert router

    # Device mesh; the product of the three is the number of devices used.
    m = c.mesh = ConfigDict()
    m.data = 0  # int >= 0; ways that rows are split; 0 = all the devices that expert x model leave over
    m.expert = 1  # int >= 1; ways that experts are split; must divide the model's experts
    m.model = 1  # int >= 1; ways that heads are split; must divide the model's kv heads

    # LoRA. A group with rank 0 is off. A group's rank and alpha follow adapter.rank and adapter.alpha until set on their own.
    a = c.adapter = ConfigDict()
    a.rank = 8  # int >= 0; attention, mlp (of dense layers, and shared experts) and experts follow it
    a.alpha = 16.0  # > 0; an update is scaled by alpha / rank
    a.rank_stabilized = False  # scale by alpha / sqrt(rank) instead
    a.shared_a = False  # experts share A [D, R]; B stays per expert
    a.init = ""  # PEFT directory of the adapter to start from; its ranks and alphas must be those here; '' = a new one
    for group in GROUPS:
        g = a[group] = ConfigDict()
        # One-way: setting adapter.experts.rank must not move adapter.rank and, through it, attention.
        g.rank = a.get_oneway_ref("rank") if group in ("attention", "mlp", "experts") else 0
        g.alpha = a.get_oneway_ref("alpha")

    d = c.data = ConfigDict()
    d.kinds = ("chain_sum", "leg_counting", "base_conversion")  # one or more, distinct, of environments.generated.POOLS
    d.train_size = 4096  # problems >= 1 to train on
    d.eval_size = 256  # problems >= 1 held out, split from train by question
    d.seed = 0  # int in 0 .. 2^32 - 1; seed of the generated problems and of their order
    d.train_path = ""  # JSON-lines file of problems; '' = generated
    d.eval_path = ""  # as train_path
    d.prompt = "{prompt}"  # text around each problem's prompt, which stands for {prompt}
    d.chat = False  # render it as a user's message by the model's chat template
    d.max_prompt_tokens = 64  # tokens >= 1; a longer prompt is an error, never cut

    r = c.rollout = ConfigDict()
    r.prompts = 16  # prompts in a step >= 1; divisible by optimizer.minibatches
    r.group = 8  # completions of one prompt >= 2 (advantages are relative to the group)
    r.max_new_tokens = 32  # tokens >= 1
    r.temperature = 1.0  # >= 0.001
    r.top_k = 0  # tokens kept >= 1; 0 = off
    r.top_p = 1.0  # probability mass kept, in (0, 1]; 1.0 = off

    # Texts, each one token of the model, that end a completion beside the model's own stop tokens; () = none. On the command line
    # --config.rollout.stop="'12'" is a text that reads as a number, and =() none: an empty text is refused, since it is no token.
    r.stop = ()

    # How completions are batched: what it costs, never what comes out.
    r.slots = 0  # completions decoded at a time >= 1; 0 = all of a step
    r.lanes = 0  # slots that share the keys of one prompt, and take only its completions >= 1; 0 = the group, or 1 where slots are fewer
    r.steps = 16  # tokens of a slot >= 1 that are decoded in one dispatch, at most
    r.page = 16  # tokens of a page of the cache >= 1
    r.chunk = 256  # tokens of a prompt >= 1 that are prefilled at a time
    r.prefill = 16  # prompts >= 1 that are prefilled at a time, on each row shard of the mesh
    r.cache_tokens = 0  # tokens that the cache holds, on each row shard: a bound on its memory; 0 = as the slots need
    r.ahead = 0  # 1: sample the next step's completions while this one's update runs, with the adapter from before it

    w = c.reward = ConfigDict()
    w.mark = "Answer:"  # the answer is what follows its last occurrence; '' = what the completion begins with

    # Environments answer the model between its turns, with as many tokens as rollout.max_new_tokens leaves.
    v = c.env = ConfigDict()
    v.name = ""  # of problems that name none: '' (one turn) | tools | attempts | guess | vault | module:Class
    v.tools = ()  # what the environment 'tools' offers: calculator | python | retrieval | module:function; distinct
    v.calls = "auto"  # how the model calls tools, one of CALLS; auto: as its chat template does, else brackets
    v.max_turns = 8  # turns of the model >= 1
    v.max_result_tokens = 256  # tokens >= 1 of a tool's result; the rest is cut
    v.attempts = 3  # of the environment 'attempts' at one problem >= 1
    v.corpus = ""  # file that the tool 'retrieval' searches: .jsonl or .parquet of records with text, else text in paragraphs
    v.results = 3  # passages that it gives >= 1

    lo = c.loss = ConfigDict()
    lo.clip_low = 0.2  # in [0, 1); the ratio is clipped to [1 - clip_low, 1 + clip_high]
    lo.clip_high = 0.2  # >= 0
    lo.kl = 0.0  # >= 0; coefficient of the k3 KL against the base
    lo.measure_kl = True  # score the base too where kl is 0, for the metric: a third forward pass a step
    lo.advantage_eps = 1e-4  # > 0; added to the group's standard deviation of rewards

    o = c.optimizer = ConfigDict()
    o.learning_rate = 1e-3  # > 0; peak
    o.warmup_steps = 0  # optimizer updates >= 0, at most steps * minibatches
    o.schedule = "constant"  # after the warm-up: 'constant' | 'linear' (to 0) | 'cosine' (to 0)
    o.weight_decay = 0.0  # >= 0; decoupled
    o.b1 = 0.9  # in [0, 1)
    o.b2 = 0.99  # in [0, 1)
    o.eps = 1e-8  # > 0
    o.max_grad_norm = 1.0  # > 0; global norm
    o.minibatches = 1  # optimizer updates per rollout batch >= 1
    o.microbatch_tokens = 0  # tokens of a forward and backward pass, about, of all devices; less is less memory, same update; 0 = auto

    e = c.eval = ConfigDict()
    e.examples = 256  # held-out problems >= 1, at most data.eval_size where they are generated; greedy
    e.every = 0  # steps between evaluations; 0 = only before and after
    e.batch = 64  # problems decoded at a time >= 1

    # --mode=quality: bases in low precision against a reference, which runs in float numerics.
    y = c.quality = ConfigDict()
    y.against = ""  # the reference, such as the original in high precision, as `model`; '' = `model` itself
    y.also = ()  # more bases to measure beside `model`, each as `model`
    y.variants = ("a16", "a8")  # what each base runs in: float | a16 | a8, or with a form of quantize.linear, as in a8:int4_g32
    y.text_path = ""  # held-out text, UTF-8; '' = the answers to held-out problems
    y.rows = 256  # rows of text, or problems, >= 1: at most
    y.tokens = 256  # tokens of a row >= 2, at most
    y.positions = 16  # tokens of a row >= 1 at which logits and layers are compared; perplexity and experts are of all
    y.batch = 8  # rows at a time >= 1
    y.tasks = True  # let each answer eval.examples held-out problems too, greedily
    y.plot = True  # draw quality.png too, which needs the extra `plot`

    k = c.checkpoint = ConfigDict()
    k.every = 10  # steps between checkpoints; 0 = only at the end
    k.keep = 2  # last checkpoints kept >= 1
    return c.lock()


def _choices(config: ConfigDict) -> dict[str, tuple]:
    return {
        "numerics": ("exact", "float"),
        "act_bits": (8, 16),
        "cache_bits": (0, 8, 16),
        "rollout.ahead": (0, 1),
        "env.calls": CALLS,
        "optimizer.schedule": ("constant", "linear", "cosine"),
        **{f"quantize.{k}": FORMATS for k in config.quantize},
    }


# field -> (holds, what is needed)
_SEED = (lambda v: 0 <= v < 2**32, "in 0 .. 2^32 - 1")
_AT_LEAST_0 = (lambda v: 0 <= v < float("inf"), "at least 0 and finite")
_AT_LEAST_1 = (lambda v: v >= 1, "at least 1")
_POSITIVE = (lambda v: 0 < v < float("inf"), "a finite number above 0")
_FRACTION = (lambda v: 0 <= v < 1, "in [0, 1)")
_RANGES = {
    **{f: _AT_LEAST_0 for f in ("mesh.data", "adapter.rank", "rollout.top_k")},
    **{f: _SEED for f in ("seed", "data.seed")},
    **{f: _AT_LEAST_0 for f in ("loss.clip_high", "loss.kl", "optimizer.warmup_steps", "optimizer.weight_decay")},
    **{f: _AT_LEAST_0 for f in ("eval.every", "checkpoint.every", *(f"adapter.{g}.rank" for g in GROUPS))},
    **{f: _AT_LEAST_1 for f in ("steps", "mesh.expert", "mesh.model", "data.train_size", "data.eval_size")},
    **{f: _AT_LEAST_1 for f in ("data.max_prompt_tokens", "rollout.prompts", "rollout.max_new_tokens", "checkpoint.keep")},
    **{f: _AT_LEAST_1 for f in ("optimizer.minibatches", "eval.examples", "eval.batch")},
    **{f: _AT_LEAST_1 for f in ("rollout.steps", "rollout.page", "rollout.chunk", "rollout.prefill")},
    **{f: _AT_LEAST_0 for f in ("rollout.slots", "rollout.lanes", "rollout.cache_tokens", "optimizer.microbatch_tokens")},
    **{f: _AT_LEAST_1 for f in ("env.max_turns", "env.max_result_tokens", "env.attempts", "env.results")},
    **{f: _AT_LEAST_1 for f in ("quality.rows", "quality.positions", "quality.batch")},
    **{f: _POSITIVE for f in ("loss.advantage_eps", "optimizer.learning_rate", "optimizer.eps")},
    **{f: _POSITIVE for f in ("optimizer.max_grad_norm", "adapter.alpha", *(f"adapter.{g}.alpha" for g in GROUPS))},
    **{f: _FRACTION for f in ("loss.clip_low", "optimizer.b1", "optimizer.b2")},
    "rollout.temperature": (lambda v: 1e-3 <= v < float("inf"), "a finite number of at least 0.001"),
    "quality.tokens": (lambda v: v >= 2, "at least 2: the first is given"),
    "rollout.group": (lambda v: v >= 2, "at least 2: advantages are relative to the group"),
    "rollout.top_p": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "context": (lambda v: v == 0 or v >= 2, "0 or at least 2"),
}


def validate(config: ConfigDict) -> None:
    """Raises a ValueError that names the field, what was found and what is needed; needs no device and compiles nothing."""
    fields = flatten(config)
    for field, allowed in _choices(config).items():
        if fields[field] not in allowed:
            raise ValueError(f"{field}: found {fields[field]!r}, need one of {', '.join(map(repr, allowed))}")
    for field, (holds, need) in _RANGES.items():
        if not holds(fields[field]):
            raise ValueError(f"{field}: found {fields[field]!r}, need {need}")
    if not any(fields[f"adapter.{g}.rank"] for g in GROUPS):
        raise ValueError(f"adapter: every rank is 0, need at least one of adapter.{{{','.join(GROUPS)}}}.rank above 0")
    if config.cache_bits > config.act_bits:
        raise ValueError(f"cache_bits: found {config.cache_bits}, need at most act_bits = {config.act_bits}")
    kinds = config.data.kinds
    if not kinds or len(set(kinds)) < len(kinds) or not all(isinstance(k, str) and k for k in kinds):
        raise ValueError(f"data.kinds: found {kinds!r}, need one or more distinct names")
    if config.data.prompt.count("{prompt}") != 1:
        raise ValueError(f"data.prompt: found {config.data.prompt!r}, need a text that holds {{prompt}} once")
    if not all(isinstance(text, str) and text for text in config.rollout.stop):
        need = """texts that are not empty: () for none; on the command line, "'12'" for a text that reads as a number"""
        raise ValueError(f"rollout.stop: found {config.rollout.stop!r}, need {need}")
    named = config.env.tools
    if len(set(named)) < len(named) or not all(isinstance(name, str) and name for name in named):
        raise ValueError(f"env.tools: found {named!r}, need distinct names, or () for none")
    if "retrieval" in named and not os.path.isfile(config.env.corpus):
        raise ValueError(f"env.corpus: found {config.env.corpus!r}, which is no file; need one for the tool 'retrieval'")
    for field in ("data.prompt", "data.kinds", "rollout.stop", "reward.mark"):
        for text in (fields[field],) if isinstance(fields[field], str) else fields[field]:
            if half := half_character(text):
                raise ValueError(f"{field}: found {half!a}, half a character or a byte that is not UTF-8, in {text!a}, need whole ones")
    parts = config.optimizer.minibatches
    if config.rollout.prompts % parts:
        need = f"a multiple of optimizer.minibatches = {parts}"
        raise ValueError(f"rollout.prompts: found {config.rollout.prompts}, need {need}")
    need = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.context and config.context < need:
        raise ValueError(f"context: found {config.context}, need 0 or at least data.max_prompt_tokens + rollout.max_new_tokens = {need}")
    if config.optimizer.warmup_steps > config.steps * config.optimizer.minibatches:
        need = f"at most the {config.steps * config.optimizer.minibatches} updates of the run"
        raise ValueError(f"optimizer.warmup_steps: found {config.optimizer.warmup_steps}, need {need}")
    if not config.data.eval_path and config.eval.examples > config.data.eval_size:
        raise ValueError(f"eval.examples: found {config.eval.examples}, need at most data.eval_size = {config.data.eval_size}")
    for field, kind in {"data.train_path": "JSON-lines", "data.eval_path": "JSON-lines", "quality.text_path": "text"}.items():
        if fields[field] and not os.path.isfile(fields[field]):
            raise ValueError(f"{field}: found {fields[field]!r}, which is no file; need a {kind} file or ''")
    # os.path, as pathlib's is_file raises where a name is too long.
    if lacks := [name for name in ADAPTER_FILES if config.adapter.init and not os.path.isfile(os.path.join(config.adapter.init, name))]:
        raise ValueError(f"adapter.init: found no {lacks[0]} in {config.adapter.init!r}, need a PEFT directory or ''")
    variants = config.quality.variants
    known = [v for v in variants if isinstance(v, str) and _is_variant(v)]
    if not variants or len(set(variants)) < len(variants) or len(known) < len(variants):
        need = f"one or more distinct of {' | '.join(VARIANTS)}, each by itself or with one of {', '.join(FORMATS)}, as in a8:int4"
        raise ValueError(f"quality.variants: found {variants!r}, need {need}")
    for field, path, otherwise in (
        ("model", config.model or str(SHIPPED_BASE), ", or '' for the shipped base"),
        ("quality.against", config.quality.against or str(SHIPPED_BASE), ", or '' for the model itself"),
        *(("quality.also", path, "") for path in config.quality.also),
    ):
        if not (isinstance(path, str) and _is_model(path)):
            need = f"a directory that holds config.json and is not named .gguf, or a file named .gguf, in lower case{otherwise}"
            raise ValueError(f"{field}: found {path!r}, need {need}")


def _is_variant(text: str) -> bool:
    name, colon, form = text.partition(":")
    return name in VARIANTS and (not colon or form in FORMATS)


def _is_model(path: str) -> bool:
    # By what `hub.load.open_checkpoint` tells the two apart.
    gguf = pathlib.Path(path).suffix == ".gguf"
    return os.path.isfile(path if gguf else os.path.join(path, "config.json"))


def half_character(text: str) -> str:
    """The first lone surrogate of a text, which no tokenizer takes and no UTF-8 file holds; '' if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


def model_path(config: ConfigDict) -> pathlib.Path:
    """Where the base lies: `config.model`, or the one that ships with the package."""
    return pathlib.Path(config.model) if config.model else SHIPPED_BASE


def plain(config: ConfigDict) -> dict:
    """Nested plain dict as JSON would give it back: references resolved, tuples as lists."""
    return json.loads(json.dumps(config.to_dict()))


def flatten(config: ConfigDict | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of every leaf."""
    out = {}
    for key, value in config.items():
        nested = isinstance(value, ConfigDict | Mapping)
        out.update(flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return out


def identity(config: ConfigDict) -> dict[str, Any]:
    """The fields that decide the bits of a run: what a checkpoint is compared by.

    Evaluation and checkpointing only watch a run. `steps` shapes it through a decaying schedule; under a constant one,
    more steps merely extend it.
    """
    # The base is compared by its digest, not by where it lies.
    watched = ("eval.", "checkpoint.", "quality.", "model", "prepared") + (("steps",) if config.optimizer.schedule == "constant" else ())
    batching = {f"rollout.{name}" for name in ENGINE} if config.numerics == "exact" else ()  # cannot be seen in exact bits
    fields = {k: v for k, v in flatten(plain(config)).items() if not k.startswith(watched) and k not in batching}
    adapter = [os.path.join(config.adapter.init, name) for name in ADAPTER_FILES] if config.adapter.init else []
    return fields | {"adapter.init": _digest(adapter), "env.corpus": _digest([config.env.corpus] if config.env.corpus else [])}


def _digest(paths: Iterable[str]) -> str:
    """Of what files hold, wherever they lie; '' of none."""
    digests = []
    for path in paths:
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return hashlib.sha256(b"".join(digests)).hexdigest() if digests else ""


def suggest(key: str, known: Iterable[str]) -> str:
    """What a wrong dotted key may have meant, as ' (...)' to end an error message with; '' if nothing comes close."""
    known = list(known)
    section, _, last = key.rpartition(".")
    close = difflib.get_close_matches(key, known, 3, 0.85)
    close += [k for k in known if difflib.SequenceMatcher(None, last, k.rsplit(".", 1)[-1]).ratio() >= 0.75 and k not in close]
    if close:
        return f" (close: {', '.join(close[:4])})"
    for part in (key, section):
        fields = [k for k in known if part and k.startswith(f"{part}.")]
        if fields:
            return f" ({part} holds {', '.join(fields)})"
    return ""


def override(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """A copy of `config` with {dotted key: value} set; an unknown key or a wrong type is a ValueError."""
    out = copy.deepcopy(config)  # ConfigDict(config) would share the references of adapter.rank with the original
    known = flatten(out)
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{key}: no such field in the config{suggest(key, known)}")
        try:
            out.update_from_flattened_dict({key: value})
        except TypeError:
            raise ValueError(f"{key}: found {value!r}, need {type(known[key]).__name__}") from None
    return out.lock()


def load_module(path: str | os.PathLike) -> types.ModuleType:
    """The experiment at `path` as a module; it must define `get_config`."""
    if not os.path.isfile(path):
        raise ValueError(f"--config: found {str(path)!r}, which is no file; need a Python file with get_config()")
    path = pathlib.Path(path)
    spec = importlib.util.spec_from_file_location(f"_experiment_{path.stem}", path)
    if spec is None:
        raise ValueError(f"--config: found {str(path)!r}, need a Python file (.py) with get_config()")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "get_config", None)):
        raise ValueError(f"--config: found {str(path)!r} without get_config(), need a Python file that defines it")
    return module
