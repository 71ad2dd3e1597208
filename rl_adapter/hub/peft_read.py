"""PEFT directories read as adapters, in any layout that `hub.peft` writes.

A directory is untrusted: whatever is wrong with it ends in a ValueError, and nothing is left out or loaded by halves.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

import numpy as np

from rl_adapter.hub import families
from rl_adapter.hub.codecs.codec import FLOATS
from rl_adapter.hub.files import Tensors, open_file, read_json
from rl_adapter.hub.peft import CONFIG, PREFIX, WEIGHTS, Pair, check_learned, pairs
from rl_adapter.lora import GROUPS, Adapter, AdapterSpec, Lora

SHOWN = 20  # problems of one kind that an error lists

# Fields that change what the weights mean, and the values under which they mean what is written above.
_PLAIN = (None, False, {}, [])
_MEANING = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others have changed the base
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication", "megatron_config"), _PLAIN),
    **dict.fromkeys(("trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config"), _PLAIN),
    **dict.fromkeys(("velora_config", "kasa_config", "monteclora_config", "corda_config", "loftq_config"), _PLAIN),
}
# And those that do not: they say how an adapter was trained or where it belongs, or repeat what the keys of the tensors say.
_SILENT = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_version", "target_modules"),
    *("target_parameters", "task_type", "base_model_name_or_path", "auto_mapping", "revision", "inference_mode", "lora_dropout"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "eva_config", "lora_ga_config"),
    *("qalora_group_size", "ensure_weight_tying", "runtime_config"),
}


@dataclasses.dataclass(frozen=True)
class _Config:
    """What `adapter_config.json` says of ranks and scales."""

    rank: int
    alpha: float
    ranks: tuple[tuple["_Pattern", int], ...]
    alphas: tuple[tuple["_Pattern", float], ...]
    rank_stabilized: bool

    def of(self, pair: Pair) -> tuple[int, float]:
        """Rank and alpha of a pair."""
        module = pair.module.removesuffix(".base_layer")
        paths = [f"{module}.{pair.target.rsplit('.', 1)[1]}"] if pair.experts else [module, module + ".weight"]
        find = lambda values, default: next((v for pattern, v in values if any(map(pattern.fits, paths))), default)
        return find(self.ranks, self.rank), find(self.alphas, self.alpha)


@dataclasses.dataclass(frozen=True)
class _Pattern:
    r"""A key of `rank_pattern`, K, without running it: peft matches `(.*\.)?(K)$` with a path from its first letter on."""

    before: str  # "": the name may end a path, "^": it is a path, ".*\.": it ends a longer one, ".*.": so do its letters
    name: str

    def fits(self, path: str) -> bool:
        if self.before == "^":
            return path == self.name
        if self.before == ".*.":
            return path != self.name and path.endswith(self.name)
        return path.endswith("." + self.name) or (path == self.name and not self.before)


# Other expressions are not run: those of a hostile file take forever. A name that begins with a point would be any letter and a name.
_PATTERN = re.compile(r"(?:\^?(\.\*\\?\.)|(\^?))(\w+(?:\\?\.\w+)*)\$?")


def _pattern(key: str) -> _Pattern | None:
    """None: an expression that is not taken."""
    found = _PATTERN.fullmatch(key)
    return found and _Pattern(found[1] or found[2], found[3].replace("\\.", "."))


def read(directory: str | os.PathLike, described: families.Description, wanted: AdapterSpec | None = None) -> tuple[Adapter, AdapterSpec]:
    """Reads an adapter in any of the layouts, as f32 host arrays.

    Args:
        wanted: what it must be, and is returned; None: what the directory says.

    Raises:
        ValueError: settings that are not implemented; keys that are missing, unknown, or misshapen; ranks or alphas that differ within a
            group, or from `wanted`; values that are not finite; an adapter that would change nothing.
    """
    directory = pathlib.Path(directory)
    config = _read_config(directory / CONFIG)
    if not (directory / WEIGHTS).is_file() and (directory / "adapter_model.bin").exists():
        raise ValueError(f"{directory}: found adapter_model.bin, which may run code as it is read; need {WEIGHTS}")
    tensors = open_file(directory / WEIGHTS)
    if bare := [key for key in tensors.entries if not key.startswith(PREFIX)]:
        raise ValueError(f"{directory / WEIGHTS}: need keys that begin with {PREFIX!r}, found others:" + _listed(bare))
    every = _pairs_of(described, tensors)
    groups = {pair.group for pair in every if any(key in tensors for key in pair.keys)}
    used = [pair for pair in every if pair.group in groups]
    expected = {key for pair in used for key in pair.keys}
    for what, keys in (("unknown", tensors.entries.keys() - expected), ("missing", expected - tensors.entries.keys())):
        if keys:
            raise ValueError(
                f"{directory / WEIGHTS}: found {len(keys)} {what} keys, need those of {', '.join(sorted(groups)) or 'any group'}:"
                + _listed(keys)
            )
    found, problems = _spec(used, config, tensors)
    if problems:
        raise ValueError(f"{directory}:" + _listed(problems))
    if wanted is not None:
        _compare(wanted, found, {pair.group for pair in every}, directory)
    spec = wanted or found
    adapter = _read_pairs(described, used, spec, tensors)
    try:
        check_learned(adapter)
    except ValueError as error:
        raise ValueError(f"{directory / WEIGHTS}: changes no logit: {error}") from None
    return adapter, spec


def _listed(problems: Iterable[str]) -> str:
    problems = sorted(problems)
    more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "".join(f"\n  {p}" for p in [p[:200] for p in problems[:SHOWN]] + more)


def _read_config(path: pathlib.Path) -> _Config:
    config, problems = read_json(path), []

    def take(name, holds, need, default=None):
        value = config.get(name, default)
        if not holds(value):
            problems.append(f"{name}: found {str(value)[:80]!r}, need {need}")
            return default
        return value

    is_rank = lambda v: type(v) is int and 1 <= v < 2**20
    is_alpha = lambda v: type(v) in (int, float) and 0 < v < 1e6
    take("peft_type", lambda v: v == "LORA", "'LORA'", "LORA")
    for name, values in _MEANING.items():
        take(name, lambda v: any(type(v) is type(x) and v == x for x in values), " or ".join(map(repr, values)), values[0])  # noqa: B023
    for name in config.keys() - _MEANING.keys() - _SILENT:
        take(name, lambda v: not v, "nothing: it is not implemented")
    rank = take("r", is_rank, "an integer of at least 1")
    alpha = take("lora_alpha", is_alpha, "a finite number above 0: an adapter that is scaled by 0 changes nothing")
    rank_stabilized = take("use_rslora", lambda v: type(v) is bool, "true or false", False)
    patterns = {}
    for name, holds, need in (("rank_pattern", is_rank, "integers of at least 1"), ("alpha_pattern", is_alpha, "finite numbers above 0")):
        value = take(name, lambda v: v is None or (isinstance(v, dict) and all(map(holds, v.values()))), f"an object of {need}") or {}  # noqa: B023
        if bad := [key for key in value if not _pattern(key)]:
            problems.append(f"{name}: found {bad[0][:80]!r}, need the ends of names of modules, no other regular expressions")
        patterns[name] = tuple((_pattern(key), v) for key, v in value.items())  # in order: the first that fits is taken
    if problems:
        raise ValueError(f"{path}:" + _listed(problems))
    return _Config(rank, alpha, patterns["rank_pattern"], patterns["alpha_pattern"], rank_stabilized)


def _pairs_of(described: families.Description, tensors: Tensors) -> list[Pair]:
    """All pairs in the layout that the tensors are in."""
    fused = list(pairs(described, "fused"))
    try:
        single = list(pairs(described, "per-expert"))
    except ValueError:  # the family has no such layout
        single = []
    hits = lambda candidates: sum(key in tensors for pair in candidates for key in pair.keys)
    if hits(single) >= hits(fused):
        return single
    # Told by the inputs of A. No width of experts makes both of their parameters square.
    swapped = list(pairs(described, "fused-0.18"))
    shape = lambda pair: tensors.entries[pair.keys[0]].shape
    fits = all(shape(p)[1:] == p.shapes(1)[0][1:] for p in swapped if p.experts and p.keys[0] in tensors)
    return swapped if fits and hits(swapped) else fused


def _spec(used: list[Pair], config: _Config, tensors: Tensors) -> tuple[AdapterSpec | None, list[str]]:
    """The one rank and alpha of each group, and what is wrong with shapes, ranks and alphas."""
    ranks, alphas, problems = {}, {}, []
    for pair in sorted(used, key=lambda pair: len(pair.fields)):  # down before gate and up, whose rank may be twice the group's
        a, (rank, alpha) = pair.keys[0], config.of(pair)
        for key, shape in zip(pair.keys, pair.shapes(rank)):
            entry = tensors.entries[key]
            if entry.shape != shape:
                problems.append(f"{key}: found shape {list(entry.shape)}, need {list(shape)}: adapter_config.json gives it rank {rank}")
            if entry.dtype not in FLOATS:
                problems.append(f"{key}: found {entry.dtype}, need {' or '.join(FLOATS)}")
        if rank > len(pair.fields) * (least := min(pair.inputs, pair.width // len(pair.fields))):
            problems.append(f"{a}: found rank {rank}, need at most {least}, the smaller side of its matrix")
        of_group = ranks.setdefault(pair.group, rank)
        times = len(pair.fields) if rank == len(pair.fields) * of_group else 1
        alpha /= math.sqrt(times) if config.rank_stabilized else times
        if rank != times * of_group:
            problems.append(f"{a}: found rank {rank}, need {of_group} in all of {pair.group}")
        elif not math.isclose(alphas.setdefault(pair.group, alpha), alpha, rel_tol=1e-9):
            problems.append(f"{a}: found alpha {alpha}, need {alphas[pair.group]} in all of {pair.group}")
    if problems:
        return None, problems
    every = lambda values, empty: tuple((group, values.get(group, empty)) for group in GROUPS)
    return AdapterSpec(every(ranks, 0), every(alphas, 1.0), config.rank_stabilized), []


def _compare(wanted: AdapterSpec, found: AdapterSpec, groups: set[str], directory: pathlib.Path) -> None:
    """Raises where a config asks for another adapter than the one that is there."""
    problems = []
    if wanted.rank_stabilized != found.rank_stabilized:
        problems.append(f"adapter.rank_stabilized: found {wanted.rank_stabilized}, need {found.rank_stabilized}")
    ranks, alphas = (dict(wanted.ranks), dict(found.ranks)), (dict(wanted.alphas), dict(found.alphas))
    for group in sorted(groups):
        (want, have), (alpha, its_alpha) = ([values[group] for values in both] for both in (ranks, alphas))
        if want != have:
            problems.append(f"adapter.{group}.rank: found {want}, need {have}")
        elif have and not math.isclose(alpha, its_alpha, rel_tol=1e-9):
            problems.append(f"adapter.{group}.alpha: found {alpha}, need {its_alpha}")
    if problems:
        raise ValueError(f"the config does not fit the adapter in {directory}:" + _listed(problems))


def _read_pairs(described: families.Description, used: list[Pair], spec: AdapterSpec, tensors: Tensors) -> Adapter:
    ranks, stacks = dict(spec.ranks), {}
    lengths = {run: count for run, (_, count, _) in enumerate(described.spec.stacks)}
    for pair in used:
        stored = (_finite(tensors, key) for key in pair.keys)
        per_expert = families.per_expert(pair.fields[0])
        lead = () if pair.run is None else (lengths[pair.run], *((described.spec.experts,) if per_expert else ()))
        for field, a, b in _from_disk(pair, *stored, ranks[pair.group]):
            if (pair.run, field) not in stacks:
                stacks[pair.run, field] = Lora(*(np.zeros((*lead, *x.shape[-2:]), np.float32) for x in (a, b)))
            stacks[pair.run, field].a[pair.index], stacks[pair.run, field].b[pair.index] = a, b
    if spec.shared_a:
        for (run, field), lora in stacks.items():
            if families.per_expert(field):
                if (lora.a != lora.a[:, :1]).any():
                    raise ValueError(f"adapter.shared_a: found true, but experts in the adapter have each their own A of {field}")
                stacks[run, field] = Lora(lora.a[:, 0], lora.b)
    layers = tuple({field: lora for (r, field), lora in stacks.items() if r == run} for run in lengths)
    return Adapter(layers, stacks.get((None, "head")))


def _finite(tensors: Tensors, key: str) -> np.ndarray:
    value = tensors.read(key).astype(np.float32)
    if not np.isfinite(value).all():
        raise ValueError(f"{key}: holds NaN or Inf, need finite values")
    return value


def _from_disk(pair: Pair, a: np.ndarray, b: np.ndarray, rank: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The inverse of `to_disk`: field, A [(E,) K, R], B [(E,) R, N]."""
    if not pair.experts:
        yield pair.fields[0], a.T, b.T
        return
    a = a.reshape(pair.experts, -1, a.shape[1]).swapaxes(1, 2)
    b = b.reshape(b.shape[0], -1, pair.experts).transpose(2, 1, 0)
    if pair.swapped:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    blocks = a.shape[-1] != rank
    for i, (field, outputs) in enumerate(zip(pair.fields, pair.outputs)):
        part = b[..., outputs]
        if not blocks:  # one A for gate and up, as peft trains it
            yield field, a, part
            continue
        mine = slice(i * rank, (i + 1) * rank)
        if np.delete(part, np.r_[mine], 1).any():
            raise ValueError(
                f"{pair.keys[1]}: found rank {a.shape[-1]}, need {rank}, or blocks of it for each of {' and '.join(pair.fields)}"
            )
        yield field, a[..., mine], part[:, mine]
