"""`--mode=quality`: how far bases in low precision are from a reference, so that one is proven before anything is trained on it.

The reference is `quality.against` (the original in high precision; '' = the model itself) in float numerics, with matrices that it
stores as floats kept in fixed16, which loses next to nothing. Each base (`model`, and `quality.also`) is held against it in each of
`quality.variants`, by the same forward pass and the same greedy sampler as everything else:

    on text    perplexity, with the paired interval of its change; KL(reference || variant) of the next token, whether both find the
               same token likeliest; the error of the residual stream after each layer; whether the router chooses the same experts
    on tasks   accuracy on held-out problems, with its interval, and the paired interval of its change

Bases are loaded one after the other, so that devices never hold two; those that differ in numerics alone are loaded once. What the
host keeps of the reference is, in f32, V + L * D numbers for each of quality.rows * quality.positions tokens, and, in int16, k
experts for each token and layer: 1,024 tokens of a model with V = 150,000, D = 7,168 and 61 layers take 2.4 GB (the default 256 rows
of 16 positions four times as much). On the devices a batch adds quality.batch * quality.positions * (V + L * D) numbers.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from rl_adapter import config as configs
from rl_adapter import config_check, evaluate, programs, quality_show, statistics
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter import session as sessions
from rl_adapter.data import prompts
from rl_adapter.files import write_atomically
from rl_adapter.hub import codecs, load
from rl_adapter.hub.tokenizer import Tokenizer
from rl_adapter.types import Array, Base, Numerics

SHARED = ("vocab", "layers", "d_model", "experts", "experts_per_token", "dense")  # of a Spec: without these nothing can be compared
CHARACTERS_A_TOKEN = 16  # of a text file that are read, at most, for each token wanted


@dataclasses.dataclass(frozen=True)
class Source:
    """A base as it is loaded."""

    path: str
    linear: str  # forms that matrices stored as floats take; '' where there are none
    head: str
    router: str


@dataclasses.dataclass(frozen=True)
class Variant:
    """One column of the table."""

    label: str
    source: Source
    numeric: Numerics


@dataclasses.dataclass(frozen=True)
class Rows:
    """Text as tokens, and the tokens that logits and layers are compared at. All on the host."""

    tokens: np.ndarray  # [R, T] int32
    starts: np.ndarray  # [R] >= 1: tokens before it are given
    lengths: np.ndarray  # [R]
    slots: np.ndarray  # [R, n] int32: each predicts the token after it
    used: np.ndarray  # [R, n] bool: short rows have fewer slots

    @property
    def predicted(self) -> np.ndarray:
        """[R, T - 1]: which tokens, from the second of a row on, are predicted."""
        at = np.arange(1, self.tokens.shape[1])
        return (at >= self.starts[:, None]) & (at < self.lengths[:, None])

    @property
    def valid(self) -> np.ndarray:
        """[R, T]"""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one base made of some rows, on the host."""

    logprobs: np.ndarray  # [R, T - 1] f32 of each token given those before
    choices: np.ndarray  # [Ls, R, T, k] int16
    stream: np.ndarray  # [L, R, n, D] f32 after each block
    logits: np.ndarray  # [R, n, V] f32


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far one base is from the reference on some rows."""

    worse: np.ndarray  # [R, T - 1] nats: the reference's logprob less this one's
    kl: np.ndarray  # [R, n] nats
    same_top: np.ndarray  # [R, n] bool
    error: np.ndarray  # [L, R, n] of the residual stream, over its size
    shared: np.ndarray  # [Ls, R, T] share of the reference's experts that are chosen here too


def run(config: ConfigDict, workdir: str | os.PathLike) -> dict:
    """Measures, prints the table, and writes `quality.json`, which it returns, and `quality.png`.

    Raises:
        ValueError: before any weight is read, where bases cannot be compared, the text is unfit, or the plot cannot be drawn.
    """
    config_check.validate(config)
    if config.quality.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("quality.plot: found no matplotlib, need `pip install 'rl-adapter[plot]'`, or --config.quality.plot=False")
    model = str(configs.model_path(config))
    against = config.quality.against or model
    checkpoints = {path: load.open_checkpoint(path) for path in (against, model, *config.quality.also)}
    tokenizer = check(checkpoints)
    rows = read_rows(config, tokenizer, min(c.spec.max_positions for c in checkpoints.values()))
    reference, *variants = plan(config, checkpoints)
    check_forms(config, checkpoints, (reference, *variants))
    by_source: dict[Source, list[Variant]] = {}
    for variant in (reference, *variants):
        by_source.setdefault(variant.source, []).append(variant)
    columns: dict[Variant, dict] = {}
    kept, at_first = [], None
    for source, here in by_source.items():
        for variant, about, parts, rewards in measure(config, source, here, rows):
            if variant is reference:
                kept, at_first = list(parts), rewards
                columns[variant] = about | {"perplexity": perplexity(kept, rows)} | tasks(rewards)
            else:
                # strict runs `parts` to its end, or it would hold this base while the next one is loaded.
                gaps = [compare(mine, part) for mine, part in zip(kept, parts, strict=True)]
                columns[variant] = about | summary(gaps, kept, rows) | tasks(rewards, at_first)
    text = {
        "path": config.quality.text_path,
        "rows": len(rows.tokens),
        "tokens": int(rows.predicted.sum()),
        "compared": int(rows.used.sum()),
    }
    result = {"text": text, "reference": columns[reference], "variants": [columns[variant] for variant in variants]}
    Console().print(quality_show.table(result))
    directory = pathlib.Path(workdir)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "quality.json", json.dumps(result, indent=1))
    if config.quality.plot:
        quality_show.plot(result, directory / "quality.png")
    return result


# What is compared


def check(checkpoints: Mapping[str, load.Checkpoint]) -> Tokenizer:
    """The first one's tokenizer; raises where another differs from it in more than how its weights are stored."""
    (first, one), *others = checkpoints.items()
    tokenizer = one.tokenizer()
    ids = tokenizer.backend.get_vocab(with_added_tokens=True)
    for path, other in others:
        for name in SHARED:
            a, b = (getattr(c.spec, name) for c in (one, other))
            if a != b:
                raise ValueError(f"quality: {name}: found {b} in {path}, need {a} as in {first}: only forms of one model can be compared")
        # Files may name ids that the other leaves unnamed, such as those that pad the vocabulary.
        theirs = other.tokenizer().backend.get_vocab(with_added_tokens=True)
        moved = [token for token, i in theirs.items() if ids.get(token, i) != i]
        if moved or not ids.keys() & theirs.keys():
            found = f"{len(moved)} tokens with other ids (such as {moved[0]!r})" if moved else "no token in common"
            raise ValueError(f"quality: tokenizer: found {found} in {path} than in {first}, need the same")
    return tokenizer


def plan(config: ConfigDict, checkpoints: Mapping[str, load.Checkpoint]) -> list[Variant]:
    """The reference, then each base in each variant. `checkpoints`: the reference's, then the bases'."""
    paths = [pathlib.Path(os.path.abspath(path)) for path in checkpoints]  # "." has no name
    names = [path.stem if path.is_file() else path.name for path in paths]
    name_of = dict(zip(checkpoints, names if len(set(names)) == len(names) else checkpoints))
    floats = {path: stored_as_floats(checkpoint) for path, checkpoint in checkpoints.items()}

    def source(path: str, forms: Mapping[str, str]) -> Source:
        # Forms that nothing takes are left out, so that variants which load the same are seen to.
        return Source(path, *(forms[name] if name in floats[path] else "" for name in ("linear", "head", "router")))

    model = str(configs.model_path(config))
    against = config.quality.against or model
    near_lossless = dict.fromkeys(("linear", "head", "router"), "fixed16")
    found = [Variant(f"{name_of[against]}, reference", source(against, near_lossless), Numerics("float"))]
    for path in (model, *config.quality.also):
        for text in config.quality.variants:
            name, _, form = text.partition(":")
            if form and "linear" not in floats[path]:
                need = f"{name!r}: the matrices of {path} have a form already"
                raise ValueError(f"quality.variants: found {text!r}, need {need}")
            forms = {**config.quantize, **({"linear": form} if form else {})}
            label = f"{name_of[path]}, {text}" if config.quality.also else text
            found.append(Variant(label, source(path, forms), Numerics(*configs.VARIANTS[name])))
    return found


def forms_of(config: ConfigDict, source: Source) -> dict[str, str]:
    """`quantize` as a base is loaded with it; what nothing takes is as the config has it."""
    return {name: getattr(source, name) or config.quantize[name] for name in ("linear", "head", "router")}


def check_forms(config: ConfigDict, checkpoints: Mapping[str, load.Checkpoint], variants: Sequence[Variant]) -> None:
    """Raises where some base cannot be loaded in its forms: it would be found only once all before it are measured."""
    for source, variant in {variant.source: variant for variant in reversed(variants)}.items():
        checkpoint = checkpoints[source.path]
        fields, problems = load.plan(checkpoint)
        if problems := problems + load.check(checkpoint, fields, load.forms_of(forms_of(config, source))):
            more = [f"... and {len(problems) - 10} more"] if len(problems) > 10 else []
            found = "\n  ".join(problem[:1000] for problem in problems[:10] + more)
            raise ValueError(f"quality.variants: found {variant.label!r}, need what {source.path} can be loaded as:\n  {found}")


def stored_as_floats(checkpoint: load.Checkpoint) -> set[str]:
    """Which of the forms of `quantize` ("linear", "head", "router") some matrix of the checkpoint takes."""
    fields, _ = load.plan(checkpoint)
    taken = [field.name for field in fields if any(piece.codec is codecs.floats.FLOAT for piece in field.pieces)]
    return {name if name in ("head", "router") else "linear" for name in taken if name not in ("embed", "kv_b")}


def read_rows(config: ConfigDict, tokenizer: Tokenizer, max_positions: int) -> Rows:
    """The text: a file, cut into rows of quality.tokens; or one held-out problem a row, of which the answer is predicted."""
    quality = config.quality
    documents, starts = _text(config, tokenizer) if quality.text_path else _problems(config, tokenizer)
    longest = max(map(len, documents))
    if longest > max_positions and quality.text_path:
        raise ValueError(f"quality.tokens: found {quality.tokens}, need at most {max_positions}, the positions of the model")
    if longest > max_positions:
        raise ValueError(f"data: found a problem of {longest} tokens with its answer, need at most {max_positions}, the model's positions")
    if longest > quality.tokens:
        raise ValueError(f"quality.tokens: found {quality.tokens}, need at least {longest} for the longest problem with its answer")
    tokens, lengths = prompts.batch(documents, np.arange(len(documents)), longest, tokenizer.pad_id)
    n = min(quality.positions, int((lengths - starts).max()))
    slots, used = np.zeros((len(tokens), n), np.int32), np.zeros((len(tokens), n), bool)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        count = min(n, length - start)
        slots[row, :count] = np.round(np.linspace(start - 1, length - 2, count))
        used[row, :count] = True
    return Rows(tokens, np.array(starts), lengths, slots, used)


def _text(config: ConfigDict, tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[int]]:
    path, wanted, size = config.quality.text_path, config.quality.rows, config.quality.tokens
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(wanted * size * CHARACTERS_A_TOKEN)
    except UnicodeDecodeError as error:
        raise ValueError(f"quality.text_path: found bytes that are not UTF-8 in {path!r} ({error.reason}), need a text file") from error
    first = tokenizer.encode("")  # what the model's texts begin with, if anything
    size -= len(first)
    if size < 1:
        raise ValueError(f"quality.tokens: found {config.quality.tokens}, need more than the {len(first)} that every row begins with")
    ids = tokenizer.encode(text, special=False)
    rows = [np.array(first + ids[i : i + size], np.int32) for i in range(0, len(ids), size)][:wanted]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ValueError(f"quality.text_path: found {len(ids)} tokens in {path!r}, need at least 2")
    return rows, [1] * len(rows)


def _problems(config: ConfigDict, tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[int]]:
    rows, starts = [], []
    for problem in prompts.load(config.data, "eval").problems[: config.quality.rows]:
        start = prompts.tokens_of(tokenizer, config.data, problem)
        answer = f"{config.reward.mark} {problem.answer}" if config.reward.mark else problem.answer
        asked = prompts.asked(config.data, problem)
        between = "" if not isinstance(asked, str) or asked[-1].isspace() else " "
        end = tokenizer.encode(between + answer, special=False)
        if not len(start) or not end:
            raise ValueError(f"data: found a problem of {len(start)} tokens with an answer of {len(end)}, need at least 1 of each")
        rows.append(np.array([*start, *end], np.int32))
        starts.append(len(start))
    return rows, starts


# Measuring


def measure(
    config: ConfigDict, source: Source, variants: Sequence[Variant], rows: Rows
) -> Iterator[tuple[Variant, dict, Iterator[Seen], np.ndarray | None]]:
    """Loads a base; of each variant what it is, what it makes of the rows, and its rewards on tasks. Done with, the base is freed."""
    changes = {f"quantize.{name}": form for name, form in forms_of(config, source).items()}
    longest = rows.tokens.shape[1]
    if config.quality.tasks:
        changes |= {"context": max(config.context or config.data.max_prompt_tokens + config.rollout.max_new_tokens, longest)}
    else:  # nothing is sampled, so no prompt with its completion need fit
        changes |= {"context": longest, "data.max_prompt_tokens": 1, "rollout.max_new_tokens": 1}
    opened = configs.override(config, {"model": source.path, "adapter.init": "", **changes})
    session = sessions.open_session(opened, *(["eval"] if config.quality.tasks else []))
    data = session.data.get("eval")
    about = {"path": source.path, "forms": dict(sorted(session.report["bytes"].items())), "base_digest": session.digest}
    for variant in variants:
        model = dataclasses.replace(session.model, numeric=variant.numeric)
        here = dataclasses.replace(session, model=model)
        rewards = None if data is None else evaluate.greedy(config, here, data, None)[0]
        numeric = {"label": variant.label, "numerics": variant.numeric.mode}
        numeric |= {"act_bits": variant.numeric.act_bits} if variant.numeric.exact else {}
        yield variant, numeric | about, observe(here, variant.label, rows, config.quality.batch), rewards


def observe(session: sessions.Session, label: str, rows: Rows, batch: int) -> Iterator[Seen]:
    """What the base makes of the rows, some at a time."""
    shards, count = meshes.row_shards(session.model.mesh), len(rows.tokens)
    size = -(-min(batch, count) // shards) * shards
    for start in range(0, count, size):
        which = np.arange(start, start + size) % count  # the last ones are filled up from the front, to one shape
        placed = jax.device_put((rows.tokens[which], rows.lengths[which], rows.slots[which]), meshes.rows(session.model.mesh))
        logprobs, choices, stream, logits = jax.device_get(_observe(session.model, session.base, *placed))
        n = min(size, count - start)
        if not np.isfinite(logits[:n]).all():
            raise ValueError(f"quality: {label}: found logits that are NaN or Inf, need finite ones")
        yield Seen(logprobs[:n], choices[:, :n].astype(np.int16), stream[:, :n], logits[:n])


@programs.jit(static_argnames=("model",))
def _observe(model: models.Model, base: Base, tokens: Array, lengths: Array, slots: Array) -> tuple[Array, Array, Array, Array]:
    p, t = tokens.shape
    at = jnp.broadcast_to(jnp.arange(t), (p, t))
    attention = models.prefill(model.numeric, lengths)
    out = models.apply(model, base, None, tokens, at, at < lengths[:, None], attention, slots=slots)
    width = out.hidden.shape[-1]
    _, scored, _ = models.token_logprobs(model, base, None, out.hidden[:, :-1].reshape(-1, width), tokens[:, 1:].reshape(-1))
    chosen = jnp.take_along_axis(out.hidden, slots[..., None], 1)
    logits = models.logits(model, base, None, chosen.reshape(-1, width)).reshape(*slots.shape, -1)
    return scored.reshape(p, t - 1), out.choices, out.stream, logits


def compare(a: Seen, b: Seen) -> Gap:
    """How far b is from the reference a, in float64."""
    kl = np.stack([divergence(*of_row) for of_row in zip(a.logits, b.logits)])  # by row: a vocabulary in float64 is large
    size = np.linalg.norm(a.stream.astype(np.float64), axis=-1)
    error = np.linalg.norm(b.stream.astype(np.float64) - a.stream, axis=-1) / np.maximum(size, 1e-30)
    shared = (a.choices[..., :, None] == b.choices[..., None, :]).any(-1).mean(-1) if a.choices.size else np.zeros(a.choices.shape[:3])
    return Gap(a.logprobs.astype(np.float64) - b.logprobs, kl, a.logits.argmax(-1) == b.logits.argmax(-1), error, shared)


def divergence(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """KL(softmax a || softmax b) of logits [n, V]: [n] nats."""
    p, q = (z.astype(np.float64) - z.max(-1, keepdims=True) for z in (a, b))
    p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (p, q))
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)  # rounding may leave -1e-17


def perplexity(parts: Sequence[Seen], rows: Rows) -> float:
    return float(np.exp(-np.concatenate([part.logprobs for part in parts])[rows.predicted].mean(dtype=np.float64)))


def summary(gaps: Sequence[Gap], kept: Sequence[Seen], rows: Rows) -> dict:
    """The numbers of one column. Intervals are of 95 %; that of the perplexity is paired, and takes rows as what was drawn."""
    axes = {"error": 1, "shared": 1}
    worse, kl, same_top, error, shared = (
        np.concatenate([getattr(gap, field.name) for gap in gaps], axes.get(field.name, 0)) for field in dataclasses.fields(Gap)
    )
    used, valid, predicted = rows.used, rows.valid, rows.predicted
    change, half = _mean_of_rows(worse, predicted)
    of_layer = np.sqrt((error[:, used] ** 2).mean(-1))
    found = {
        "perplexity": perplexity(kept, rows) * float(np.exp(change)),
        "perplexity_change": float(np.expm1(change)),
        "perplexity_change_interval": None if half is None else [float(np.expm1(change - half)), float(np.expm1(change + half))],
        "kl_mean": float(kl[used].mean()),
        "kl_p99": float(np.quantile(kl[used], 0.99)),
        "kl_max": float(kl[used].max()),
        "same_top": float(same_top[used].mean()),
        "layer_error": of_layer.tolist(),
    }
    if len(shared):
        found["experts_shared"] = float(shared[:, valid].mean())
        found["experts_same_set"] = float((shared[:, valid] == 1).mean())
        found["experts_shared_of_layer"] = shared[:, valid].mean(-1).tolist()
    return found


def _mean_of_rows(x: np.ndarray, seen: np.ndarray) -> tuple[float, float | None]:
    """Mean of x [R, T] where seen, and half its interval: tokens of a row depend on each other, so rows are the sample."""
    mean, count = x[seen].mean(), len(x)
    if count < 2:
        return float(mean), None
    residual = np.where(seen, x - mean, 0.0).sum(1)
    return float(mean), float(statistics.NORMAL * np.sqrt(count / (count - 1) * (residual**2).sum()) / seen.sum())


def tasks(rewards: np.ndarray | None, reference: np.ndarray | None = None) -> dict:
    """Accuracy; against the reference's answers to the same problems, its change. Rewards are 0 or 1."""
    if rewards is None:
        return {}
    found = {"accuracy": float(rewards.mean()), "accuracy_interval": list(statistics.interval(rewards)), "examples": len(rewards)}
    if reference is None:
        return found
    low, high = statistics.paired_interval(rewards, reference)
    return found | {"accuracy_change": float((rewards - reference).mean()), "accuracy_change_interval": [low, high]}
