"""The complete configuration of a run: every field, its unit, its constraint, and the check that a run starts from.

An experiment is a Python file with `get_config() -> ConfigDict` (and, for a sweep, `get_hyper()` beside it) that
starts from `default()` and changes what it needs. The dict is locked and typed, so a misspelt key or a wrong type
fails at once; `config_check.validate` then checks ranges and divisibility before anything compiles.
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
REWARD_MODEL = "reward_model.safetensors"
ADAPTERS = "adapter.init", "loss.reference"  # fields that name a directory of them
SHIPPED_BASE = pathlib.Path(__file__).parent / "assets" / "base"
FORMATS = ("int8", "int4", "int4_g32", "int4_g128", "fixed16")
GROUPS = ("attention", "mlp", "experts", "router", "head")
CALLS = "auto", "kimi", "deepseek", "glm", "mistral", "harmony", "qwen_coder", "hermes", "llama3", "brackets", "equals"
SCORERS = "exact", "math", "code", "gym", "regex", "json", "function"  # of `reward`
ENGINE = "slots", "lanes", "steps", "page", "chunk", "prefill", "cache_tokens"  # of `rollout`: how completions are batched
OBJECTIVES = "rl", "sft", "dpo", "ipo", "reward"
ESTIMATORS = "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "distill"  # of advantage.py
OF_GROUPS = "grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"  # those that need more than one completion of a prompt
KINDS = "ppo", "gspo", "gspo_token", "cispo", "dpo", "ipo"  # of losses on rollouts, of loss.py
OMITTABLE = (  # of samples.SCHEMA
    *("prompt_text", "messages", "answer", "metadata", "prompt_tokens", "completion_text", "completion_tokens", "drawn"),
    *("sampled_logprobs", "tempered_logprobs", "scored_logprobs", "adapter_versions", "parts", "failures"),
)
SPELT = {  # what gives a text away, reasons of failures among it
    "prompt_text": ("prompt_tokens", "messages", "failures"),
    "completion_text": ("completion_tokens", "failures"),
    "answer": ("metadata", "failures"),
    "metadata": ("failures",),
}
VARIANTS = {"float": ("float", 16), "a16": ("exact", 16), "a8": ("exact", 8)}  # in quality.variants -> numerics, act_bits


def default() -> ConfigDict:
    """The default configuration, locked. Units and constraints stand beside each field."""
    c = ConfigDict()
    c.objective = "rl"  # 'rl' | 'sft' (of data with completions) | 'dpo' | 'ipo' | 'reward' (of pairs): what is learned, and from what
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

    # Sources of problems (data/sources.py): a kind of environments.generated.POOLS | 'gym:NAME' or 'gym:NAME:{config}' of reasoning-gym |
    # a .jsonl or .parquet file | 'python:MODULE:FUNCTION'. On the command line a name with a comma or quotes is given as "('...',)".
    d = c.data = ConfigDict()
    d.train = ("chain_sum", "leg_counting", "base_conversion")  # one or more, distinct
    d.eval = ()  # held-out problems, distinct; () = held out of those of train, by question
    d.train_size = 4096  # problems >= 1 to train on, of all generated sources together, as many of each as can be; files are read whole
    d.eval_size = 256  # problems >= 1 held out, likewise
    d.seed = 0  # int in 0 .. 2^32 - 1; seed of the generated problems and of their order
    d.weights = ()  # a number > 0 for each source of train, its share of what is drawn; () = all problems alike
    d.prompt = "{prompt}"  # text around each problem's prompt, which stands for {prompt}; messages stay as they are
    d.chat = False  # render it as a user's message by the model's chat template; messages always are
    d.max_prompt_tokens = 64  # tokens >= 1; a prompt is never cut

    # What is done about records with a fault: 'refuse' the run | 'drop' them, and say so in data_report.json.
    d.duplicates = "refuse"  # what is asked is asked before
    d.empty = "refuse"  # blank, or no token
    d.too_long = "refuse"  # more than max_prompt_tokens
    d.overlap = "refuse"  # to train on, but held out too

    # Which problem comes next: 'none' = shuffled epochs | 'pass_rate' = rather one that passes sometimes (data/iterator.py has the formula)
    d.curriculum = "none"
    d.explore = 0.5  # in (0, 1]; share of draws for problems never drawn, while there are any
    d.floor = 0.05  # in (0, 1]; weight of a problem that passes always or never, beside 1 of one that passes half the time
    d.newest = 0.5  # in (0, 1]; share of the newest measurement in a problem's running pass rate

    r = c.rollout = ConfigDict()
    r.prompts = 16  # prompts in a step >= 1; divisible by optimizer.minibatches
    r.group = 8  # completions of one prompt >= 1; >= 2 where advantages are relative to the group
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
    r.max_staleness = 0  # steps >= 0 that the adapter which samples is behind; above 0 a step is sampled while the one before it updates
    r.tries = 1  # batches >= 1 that a step may draw, at most, to fill it with prompts whose completions differ in reward (DAPO); 1 = off

    w = c.reward = ConfigDict()
    w.mark = "Answer:"  # the answer is what follows its last occurrence; '' = what the completion begins with
    w.failure = 0.0  # finite; the value of a part whose scorer failed
    w.seconds = 10.0  # > 0; wall time of one scoring by a worker
    w.workers = 2  # processes >= 1 that score at a time; none is started where exact match is all there is
    w.held_out = ""  # one of SCORERS with weight 0.0, scored and logged but not rewarded; '' = none
    w.gold = "refuse"  # problems whose gold answer does not earn its own reward: 'refuse' to start | 'drop' them
    # A completion earns the sum of weight (finite, one not 0.0) times value of its parts. A part with weight 0.0 is off.
    for scorer in SCORERS:
        w[scorer] = ConfigDict({"weight": float(scorer == "exact")})
    w.env = ConfigDict({"weight": 1.0})  # finite; of what environments give by themselves, such as a game that is won
    w.model = ConfigDict({"weight": 0.0, "path": ""})  # finite; of a reward model: WORKDIR/reward_model of a run with objective 'reward'
    w.code.seconds = 10.0  # > 0; wall time of all tests of a program
    w.code.memory_mb = 1024  # MiB >= 1; address space of each of its processes
    w.code.processes = 16  # processes and threads >= 1 at a time
    w.code.output_kb = 1024  # KiB >= 1; of its standard output, and of its standard error
    w.gym.partial = False  # take scores below 1.0 too
    w.regex.pattern = ""  # regular expression that the whole completion must match
    w.json.schema = ""  # path of a JSON schema
    w.function.path = ""  # 'module:name' of a function (completion, dict of the problem's fields) -> float

    # Environments answer the model between its turns, with as many tokens as rollout.max_new_tokens leaves.
    n = c.env = ConfigDict()
    n.name = ""  # of problems that name none: '' (one turn) | tools | attempts | guess | vault | module:Class
    n.tools = ()  # what the environment 'tools' offers: calculator | python | retrieval | module:function; distinct
    n.calls = "auto"  # how the model calls tools, one of CALLS; auto: as its chat template does, else brackets
    n.max_turns = 8  # turns of the model >= 1
    n.max_result_tokens = 256  # tokens >= 1 of a tool's result; the rest is cut
    n.attempts = 3  # of the environment 'attempts' at one problem >= 1
    n.corpus = ""  # file that the tool 'retrieval' searches: .jsonl or .parquet of records with text, else text in paragraphs
    n.results = 3  # passages that it gives >= 1

    v = c.advantage = ConfigDict()  # `advantage.estimate` says what each estimator is
    v.estimator = "grpo"  # one of advantage.ESTIMATORS; 'gae' trains a critic, 'distill' rewards nothing but nearness to the reference
    v.eps = 1e-4  # > 0; added to standard deviations
    v.gamma = 1.0  # in [0, 1]; discount of a sampled token, of reinforce_pp* and gae
    v.lam = 1.0  # in [0, 1]; of gae
    v.overlong_buffer = 0  # last tokens >= 0 of rollout.max_new_tokens in which a completion loses reward; 0 = off
    v.overlong_penalty = 1.0  # >= 0; reward lost by one that fills them all

    lo = c.loss = ConfigDict()  # `loss.Loss` says what each kind is
    lo.kind = "ppo"  # one of loss.KINDS; dpo and ipo take each prompt's best and worst completion
    lo.aggregation = "token"  # one of loss.AGGREGATIONS: what a token's share of the loss is
    lo.clip_low = 0.2  # in [0, 1); the ratio is clipped to [1 - clip_low, 1 + clip_high]
    lo.clip_high = 0.2  # >= 0
    lo.kl = 0.0  # >= 0; coefficient of the KL against the reference
    lo.kl_estimator = "k3"  # k1 | k2 | k3
    lo.kl_in = "loss"  # 'loss' | 'reward': of each token, before advantages
    lo.measure_kl = True  # score the reference too where nothing needs it, for the metric: a third forward pass a step
    lo.reference = ""  # PEFT directory, of ranks and alphas as here, of an adapter that is the reference, or teacher; '' = the base itself
    lo.entropy = 0.0  # >= 0; coefficient of an entropy bonus
    lo.mask_truncated = False  # leave completions that were cut at rollout.max_new_tokens out of the loss
    # One of loss.CORRECTIONS: ratios are against the policy at the step's start, and weighed by its own ratio to the one that sampled.
    lo.correction = "none"
    lo.correction_low = 0.5  # in [0, 1]; of icepop
    lo.correction_high = 2.0  # >= 1
    lo.balance = 0.0  # >= 0; coefficient of the load-balancing loss of experts
    lo.router_z = 0.0  # >= 0; coefficient of the router's z-loss
    lo.beta = 0.1  # > 0; of dpo and ipo

    k = c.critic = ConfigDict()  # of advantage.estimator 'gae': an adapter of the shape of the policy's, and a linear head
    k.learning_rate = 1e-3  # > 0; peak; all else is as in `optimizer`
    k.clip = 0.2  # > 0; most that a value may move in a step before it is held back
    k.epochs = 2  # passes >= 1 over a step's completions
    k.warmup_steps = 0  # first steps >= 0 in which only the critic learns

    o = c.optimizer = ConfigDict()
    o.learning_rate = 1e-3  # > 0; peak
    o.warmup_steps = 0  # optimizer updates >= 0; of a shorter run, not all
    o.schedule = "constant"  # after the warm-up: 'constant' | 'linear' (to 0) | 'cosine' (to 0)
    o.weight_decay = 0.0  # >= 0; decoupled
    o.b1 = 0.9  # in [0, 1)
    o.b2 = 0.99  # in [0, 1)
    o.eps = 1e-8  # > 0
    o.max_grad_norm = 1.0  # > 0; global norm
    o.minibatches = 1  # parts >= 1 of a step's prompts, an update each
    o.epochs = 1  # passes >= 1 over a step's completions
    o.microbatch_tokens = 0  # tokens of a forward and backward pass, about, of all devices; less memory, same update; 0: 8,192 a row shard

    e = c.eval = ConfigDict()
    e.examples = 256  # held-out problems >= 1, at most data.eval_size where they are generated; greedy
    e.every = 0  # steps between evaluations; 0 = only before and after
    e.batch = 64  # completions decoded at a time >= 1
    # --mode=eval, beside greedy: mean@n, pass@k and maj@k of n completions of each problem.
    e.samples = 1  # n, in 1 .. 512; 1 = greedy only
    e.k = ()  # distinct numbers in 1 .. n; () = 1, 2, 4, .. and n
    e.temperature = 1.0  # >= 0.001
    e.top_p = 1.0  # probability mass kept, in (0, 1]; 1.0 = off
    e.solved = 1.0  # reward, finite, from which a completion counts as right

    # WORKDIR/samples: every completion of a step in a Parquet file, and a manifest that --mode=audit checks.
    sm = c.samples = ConfigDict()
    sm.write = True
    sm.keep = 0  # steps >= 0 whose files are kept, the last ones; 0 = all
    sm.keep_every = 0  # >= 0; files of steps that this divides are kept beside those; 0 = none
    sm.omit = ()  # fields to leave out, of OMITTABLE; a text only together with what SPELT says
    sm.redact = ()  # regular expressions (RE2): what they find in texts is replaced, and tokens that spell such a text are left out

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


def is_file(source: str) -> bool:
    """Whether a source of problems is a file, by its name."""
    return source.lower().endswith((".jsonl", ".parquet"))


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


FILES = (*ADAPTERS, "env.corpus", "reward.json.schema", "reward.model.path")  # fields that name what is compared by its content


def deciding(config: ConfigDict) -> dict[str, Any]:
    """The fields that decide the bits of a run, as they stand in the config.

    Evaluation, samples and checkpointing only watch a run. `steps` shapes it through a decaying schedule; under a constant one,
    more steps merely extend it.
    """
    # The base is compared by its digest, not by where it lies.
    watched = "eval.", "samples.", "checkpoint.", "quality.", "model", "prepared", "reward.workers"
    watched += ("steps",) if config.optimizer.schedule == "constant" else ()
    batching = {f"rollout.{name}" for name in ENGINE} if config.numerics == "exact" else ()  # cannot be seen in exact bits
    return {k: v for k, v in flatten(plain(config)).items() if not k.startswith(watched) and k not in batching}


def identity(config: ConfigDict) -> dict[str, Any]:
    """What a checkpoint is compared by: `deciding`, with the content of files, and of modules that the config names, in their place."""
    fields = flatten(config)
    within = {f: [os.path.join(path, name) for name in ADAPTER_FILES] for f in ADAPTERS if (path := fields[f])}
    judge = config.reward.model.path
    within |= {f: [fields[f]] for f in ("env.corpus", "reward.json.schema") if fields[f]}
    within |= {"reward.model.path": [os.path.join(judge, REWARD_MODEL)]} if judge else {}
    function = config.reward.function
    asked = [function.path] if function.weight or config.reward.held_out == "function" else []
    # Of a module the file alone: what it imports is the user's to keep as it was.
    code = {path: _digest([_module(path)]) for path in (*asked, config.env.name, *config.env.tools) if ":" in path}
    return deciding(config) | {f: _digest(within.get(f, [])) for f in FILES} | code


def _module(path: str) -> str:
    """The file of an import path's module."""
    name, _, _ = path.partition(":")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.has_location:
        raise ValueError(f"{path}: found no module {name}, need one that can be imported")
    return found.origin


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
