"""Checks of a config that need no device and compile nothing: ranges, choices, files, and what does not go together."""

import os
import pathlib
import re

from ml_collections import ConfigDict

from rl_adapter.config import (
    ADAPTER_FILES,
    ADAPTERS,
    CALLS,
    ESTIMATORS,
    FORMATS,
    GROUPS,
    KINDS,
    OBJECTIVES,
    OF_GROUPS,
    OMITTABLE,
    REWARD_MODEL,
    SCORERS,
    SHIPPED_BASE,
    SPELT,
    VARIANTS,
    flatten,
    half_character,
    is_file,
)


def _choices(config: ConfigDict) -> dict[str, tuple]:
    return {
        "numerics": ("exact", "float"),
        "act_bits": (8, 16),
        "cache_bits": (0, 8, 16),
        "objective": OBJECTIVES,
        "advantage.estimator": ESTIMATORS,
        "loss.kind": KINDS,
        "loss.aggregation": ("token", "sequence", "group", "constant"),
        "loss.kl_estimator": ("k1", "k2", "k3"),
        "loss.kl_in": ("loss", "reward"),
        "loss.correction": ("none", "truncated", "masked", "icepop"),
        "env.calls": CALLS,
        "optimizer.schedule": ("constant", "linear", "cosine"),
        "data.curriculum": ("none", "pass_rate"),
        **{f"data.{fault}": ("refuse", "drop") for fault in ("duplicates", "empty", "too_long", "overlap")},
        "reward.gold": ("refuse", "drop"),
        "reward.held_out": ("", *SCORERS),
        **{f"quantize.{k}": FORMATS for k in config.quantize},
    }


# field -> (holds, what is needed)
_SEED = (lambda v: 0 <= v < 2**32, "in 0 .. 2^32 - 1")
_AT_LEAST_0 = (lambda v: 0 <= v < float("inf"), "at least 0 and finite")
_AT_LEAST_1 = (lambda v: v >= 1, "at least 1")
_FINITE = (lambda v: abs(v) < float("inf"), "a finite number")
_POSITIVE = (lambda v: 0 < v < float("inf"), "a finite number above 0")
_FRACTION = (lambda v: 0 <= v < 1, "in [0, 1)")
_SHARE = (lambda v: 0 <= v <= 1, "in [0, 1]")
_RANGES = {
    **{f: _AT_LEAST_0 for f in ("mesh.data", "adapter.rank", "rollout.top_k")},
    **{f: _SEED for f in ("seed", "data.seed")},
    **{f: _AT_LEAST_0 for f in ("loss.clip_high", "loss.kl", "loss.entropy", "loss.balance", "loss.router_z")},
    **{f: _AT_LEAST_0 for f in ("optimizer.warmup_steps", "optimizer.weight_decay", "critic.warmup_steps", "rollout.max_staleness")},
    **{f: _AT_LEAST_0 for f in ("advantage.overlong_buffer", "advantage.overlong_penalty")},
    **{f: _AT_LEAST_1 for f in ("optimizer.epochs", "critic.epochs", "rollout.tries", "rollout.group", "loss.correction_high")},
    **{f: _POSITIVE for f in ("critic.learning_rate", "critic.clip", "loss.beta")},
    **{f: _SHARE for f in ("advantage.gamma", "advantage.lam", "loss.correction_low")},
    **{f: _AT_LEAST_0 for f in ("eval.every", "checkpoint.every", *(f"adapter.{g}.rank" for g in GROUPS))},
    **{f: _AT_LEAST_1 for f in ("steps", "mesh.expert", "mesh.model", "data.train_size", "data.eval_size")},
    **{f: _AT_LEAST_1 for f in ("data.max_prompt_tokens", "rollout.prompts", "rollout.max_new_tokens", "checkpoint.keep")},
    **{f: _AT_LEAST_1 for f in ("optimizer.minibatches", "eval.examples", "eval.batch")},
    **{f: _AT_LEAST_1 for f in ("rollout.steps", "rollout.page", "rollout.chunk", "rollout.prefill")},
    **{f: _AT_LEAST_0 for f in ("rollout.slots", "rollout.lanes", "rollout.cache_tokens", "optimizer.microbatch_tokens")},
    **{f: _AT_LEAST_1 for f in ("env.max_turns", "env.max_result_tokens", "env.attempts", "env.results")},
    **{f: _AT_LEAST_1 for f in ("quality.rows", "quality.positions", "quality.batch")},
    **{f: _POSITIVE for f in ("advantage.eps", "optimizer.learning_rate", "optimizer.eps")},
    **{f: _POSITIVE for f in ("optimizer.max_grad_norm", "adapter.alpha", *(f"adapter.{g}.alpha" for g in GROUPS))},
    **{f: _FRACTION for f in ("loss.clip_low", "optimizer.b1", "optimizer.b2")},
    **{f"data.{f}": (lambda v: 0 < v <= 1, "in (0, 1]") for f in ("explore", "floor", "newest")},
    **{f: (lambda v: 1e-3 <= v < float("inf"), "a finite number of at least 0.001") for f in ("rollout.temperature", "eval.temperature")},
    **{f: (lambda v: 0 < v <= 1, "in (0, 1]") for f in ("rollout.top_p", "eval.top_p")},
    **{f: _AT_LEAST_0 for f in ("samples.keep", "samples.keep_every")},
    "eval.samples": (lambda v: 1 <= v <= 512, "in 1 .. 512"),
    "eval.solved": _FINITE,
    **{f: _FINITE for f in ("reward.failure", *(f"reward.{scorer}.weight" for scorer in (*SCORERS, "env", "model")))},
    **{f: _POSITIVE for f in ("reward.seconds", "reward.code.seconds")},
    **{f: _AT_LEAST_1 for f in ("reward.workers", "reward.code.memory_mb", "reward.code.processes", "reward.code.output_kb")},
    "quality.tokens": (lambda v: v >= 2, "at least 2: the first is given"),
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
    _validate_data(config.data)
    if not all(isinstance(text, str) and text for text in config.rollout.stop):
        need = """texts that are not empty: () for none; on the command line, "'12'" for a text that reads as a number"""
        raise ValueError(f"rollout.stop: found {config.rollout.stop!r}, need {need}")
    named = config.env.tools
    if len(set(named)) < len(named) or not all(isinstance(name, str) and name for name in named):
        raise ValueError(f"env.tools: found {named!r}, need distinct names, or () for none")
    if "retrieval" in named and not os.path.isfile(config.env.corpus):
        raise ValueError(f"env.corpus: found {config.env.corpus!r}, which is no file; need one for the tool 'retrieval'")
    for field in ("data.prompt", "data.train", "data.eval", "rollout.stop", "reward.mark"):
        for text in (fields[field],) if isinstance(fields[field], str) else fields[field]:
            if half := half_character(text):
                raise ValueError(f"{field}: found {half!a}, half a character or a byte that is not UTF-8, in {text!a}, need whole ones")
    _validate_reward(config)
    if config.rollout.prompts % config.optimizer.minibatches:
        need = f"a multiple of optimizer.minibatches = {config.optimizer.minibatches}"
        raise ValueError(f"rollout.prompts: found {config.rollout.prompts}, need {need}")
    _validate_algorithm(config)
    need = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.context and config.context < need:
        raise ValueError(f"context: found {config.context}, need 0 or at least data.max_prompt_tokens + rollout.max_new_tokens = {need}")
    generated = not any(is_file(source) or source.startswith("python:") for source in config.data.eval or config.data.train)
    if generated and config.eval.examples > config.data.eval_size:
        raise ValueError(f"eval.examples: found {config.eval.examples}, need at most data.eval_size = {config.data.eval_size}")
    k, n = config.eval.k, config.eval.samples
    if len(set(k)) < len(k) or not all(type(x) is int and 1 <= x <= n for x in k):
        raise ValueError(f"eval.k: found {k!r}, need distinct numbers in 1 .. eval.samples = {n}, or ()")
    _validate_samples(config.samples)
    if config.quality.text_path and not os.path.isfile(config.quality.text_path):
        raise ValueError(f"quality.text_path: found {config.quality.text_path!r}, which is no file; need a text file or ''")
    # os.path, as pathlib's is_file raises where a name is too long.
    for field in ADAPTERS:
        path = fields[field]
        if lacks := [name for name in ADAPTER_FILES if path and not os.path.isfile(os.path.join(path, name))]:
            raise ValueError(f"{field}: found no {lacks[0]} in {path!r}, need a PEFT directory or ''")
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


def _validate_algorithm(config: ConfigDict) -> None:
    """What of advantages, losses and rollouts does not go together, or would do nothing."""
    if config.objective != "rl":
        return _validate_offline(config)
    a, lo, r = config.advantage, config.loss, config.rollout
    preference = lo.kind in ("dpo", "ipo")
    if r.group < 2 and (preference or r.tries > 1 or a.estimator in OF_GROUPS):
        why = f"loss.kind = {lo.kind}" if preference else "rollout.tries above 1" if r.tries > 1 else f"advantage.estimator = {a.estimator}"
        raise ValueError(f"rollout.group: found {r.group}, need at least 2 for {why}, which holds completions against each other")
    if a.overlong_buffer > r.max_new_tokens:
        raise ValueError(f"advantage.overlong_buffer: found {a.overlong_buffer}, need at most rollout.max_new_tokens = {r.max_new_tokens}")
    if lo.kl_in == "reward" and preference:
        raise ValueError(f"loss.kl_in: found 'reward' with loss.kind = {lo.kind}, which has no advantages; need 'loss'")
    if preference and (a.estimator in ("gae", "distill") or lo.correction != "none"):
        raise ValueError(f"loss.kind: found {lo.kind!r} with advantages by {a.estimator} or loss.correction, which pairs do not have")
    if lo.kind == "gspo" and lo.aggregation != "sequence":
        raise ValueError(f"loss.aggregation: found {lo.aggregation!r}, need 'sequence' for loss.kind = gspo: a ratio is a completion's")
    of_tokens = a.estimator in ("gae", "distill", "reinforce_pp") or lo.kl_in == "reward" or lo.correction != "none"
    if lo.kind == "gspo" and of_tokens:
        raise ValueError("loss.kind: found 'gspo', need 'gspo_token' for advantages that differ within a completion")
    if a.estimator == "distill" and lo.kl and lo.kl_in == "reward":
        raise ValueError("loss.kl_in: found 'reward' with advantage.estimator = distill, whose reward is that already; need 'loss'")
    if a.estimator == "distill" and not (lo.reference or config.adapter.init):
        raise ValueError("loss.reference: found '' with advantage.estimator = distill, need a teacher: the student begins as the base")
    if config.critic.warmup_steps >= config.steps and a.estimator == "gae":
        raise ValueError(f"critic.warmup_steps: found {config.critic.warmup_steps}, need less than steps = {config.steps}")


def _validate_offline(config: ConfigDict) -> None:
    """Learning from given completions makes one update a step, and has no rollouts."""
    wanted = {"optimizer.minibatches": 1, "optimizer.epochs": 1, "rollout.max_staleness": 0, "rollout.tries": 1}
    wanted |= {"loss.kl_in": "loss"} | ({"loss.kl": 0.0} if config.objective in ("sft", "reward") else {})
    fields = flatten(config)
    for field, value in wanted.items():
        if fields[field] != value:
            raise ValueError(f"{field}: found {fields[field]!r} with objective = {config.objective}, need {value!r}: it would do nothing")
    if config.advantage.estimator == "gae":
        raise ValueError(f"advantage.estimator: found 'gae' with objective = {config.objective}, which has no advantages; need another")


def _validate_data(data: ConfigDict) -> None:
    for field, sources in (("data.train", data.train), ("data.eval", data.eval)):
        if len(set(sources)) < len(sources) or not all(isinstance(s, str) and s for s in sources):
            raise ValueError(f"{field}: found {sources!r}, need distinct sources, each a text")
        for source in sources:
            if is_file(source) and not os.path.isfile(source):
                raise ValueError(f"{field}: found {source!r}, which is no file; need a JSONL or Parquet file")
    if not data.train:
        raise ValueError("data.train: found none, need at least one source")
    good = [w for w in data.weights if isinstance(w, int | float) and not isinstance(w, bool) and 0 < w < float("inf")]
    if data.weights and not len(good) == len(data.weights) == len(data.train):
        raise ValueError(
            f"data.weights: found {data.weights!r}, need () or a finite number above 0 for each of the {len(data.train)} sources"
        )
    if data.prompt.count("{prompt}") != 1:
        raise ValueError(f"data.prompt: found {data.prompt!r}, need a text that holds {{prompt}} once")


def _validate_samples(settings: ConfigDict) -> None:
    omit = settings.omit
    if unknown := [name for name in omit if name not in OMITTABLE]:
        raise ValueError(f"samples.omit: found {unknown[0]!r}, need fields of {', '.join(OMITTABLE)}")
    for text, others in SPELT.items():
        if text in omit and (left := [name for name in others if name not in omit]):
            raise ValueError(f"samples.omit: found {text} without {left[0]}, which gives it away; need both, or neither")
    if not settings.redact:
        return
    import pyarrow as pa  # takes long to load, which most command lines need not wait for
    import pyarrow.compute

    for pattern in settings.redact:
        try:
            found = pa.compute.match_substring_regex(pa.scalar(""), pattern).as_py()
        except (pa.ArrowInvalid, TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"samples.redact: found {pattern!a} ({error}), need a regular expression of RE2") from None
        if found:
            raise ValueError(f"samples.redact: found {pattern!a}, which finds the empty text, need one that does not")


def _validate_reward(config: ConfigDict) -> None:
    reward = config.reward
    parts = (*SCORERS, "model", *(("env",) if config.env.name else ()))
    if not any(reward[part].weight for part in parts):
        raise ValueError(f"reward: every weight is 0.0, need at least one of reward.{{{','.join(parts)}}}.weight that is not")
    if reward.model.weight and not os.path.isfile(os.path.join(reward.model.path, REWARD_MODEL)):
        found = f"no {REWARD_MODEL} in {reward.model.path!r}"
        raise ValueError(f"reward.model.path: found {found}, need WORKDIR/reward_model of a run with objective 'reward'")
    if reward.held_out and reward[reward.held_out].weight:
        found = f"{reward.held_out!r}, whose weight is {reward[reward.held_out].weight:g}"
        raise ValueError(f"reward.held_out: found {found}, need one with weight 0.0: what is rewarded is not held out")
    used = [scorer for scorer in SCORERS if reward[scorer].weight or reward.held_out == scorer]
    if "regex" in used:
        try:
            re.compile(reward.regex.pattern or "(")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"reward.regex.pattern: found {reward.regex.pattern!r} ({error}), need a regular expression") from None
    if "json" in used and not os.path.isfile(reward.json.schema):
        raise ValueError(f"reward.json.schema: found {reward.json.schema!r}, which is no file; need a JSON schema")
    if "function" in used and not re.fullmatch(r"\w+(\.\w+)*:\w+", reward.function.path):
        raise ValueError(f"reward.function.path: found {reward.function.path!r}, need 'module:name' of a function")


def _is_variant(text: str) -> bool:
    name, colon, form = text.partition(":")
    return name in VARIANTS and (not colon or form in FORMATS)


def _is_model(path: str) -> bool:
    # By what `hub.load.open_checkpoint` tells the two apart.
    gguf = pathlib.Path(path).suffix == ".gguf"
    return os.path.isfile(path if gguf else os.path.join(path, "config.json"))
