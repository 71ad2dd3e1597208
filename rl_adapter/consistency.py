"""`--mode=consistency`: whether rollout and training agree to the last bit, measured on this base and this machine.

The config's prompts are completed once under a random adapter. Then each thing that must not matter is changed alone, and what
comes out is held against that first time: cached decoding against the full forward of training, the number of prompts at a
time, padding, the order of rows, and the mesh. In exact numerics every share is 1; in float the table says how far off.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table

from rl_adapter import evaluate, lora, programs, rollout, scoring
from rl_adapter import mesh as meshes
from rl_adapter import model as models
from rl_adapter import session as sessions
from rl_adapter.data import prompts
from rl_adapter.files import write_atomically
from rl_adapter.sampling import Sampling
from rl_adapter.types import Array, Base, Rollout, Spec

SIZE_OF_B = 0.05  # with the usual alphas a random adapter then moves activations by tenths of their size
PADDING = 5, 3  # more prompt and completion slots than needed; odd, so that vector loops have remainders


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one way of computing gave, on the host."""

    tokens: np.ndarray  # [P, G, C]
    logprobs: np.ndarray  # [P, G, C] f32
    prompt_choices: np.ndarray  # [L, P, T, k]
    choices: np.ndarray  # [L, P, G, C, k]

    def rows(self, rows: np.ndarray) -> "Seen":
        return Seen(self.tokens[rows], self.logprobs[rows], self.prompt_choices[:, rows], self.choices[:, rows])


@dataclasses.dataclass(frozen=True)
class Place:
    """A model with its base and adapter on one mesh."""

    model: models.Model
    base: Base
    adapter: lora.Adapter  # raw

    def moved(self, mesh: jax.sharding.Mesh) -> "Place":
        base = jax.device_put(self.base, meshes.base_shardings(mesh, self.base))
        adapter = meshes.place(mesh, self.adapter)
        return Place(dataclasses.replace(self.model, mesh=mesh), base, adapter)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts on the host."""

    tokens: np.ndarray  # [P, T]
    lengths: np.ndarray  # [P]
    ids: np.ndarray  # [P]

    def rows(self, rows: np.ndarray) -> "Batch":
        return Batch(self.tokens[rows], self.lengths[rows], self.ids[rows])

    def padded(self, more: int) -> "Batch":
        return dataclasses.replace(self, tokens=np.pad(self.tokens, ((0, 0), (0, more))))


def run(config: ConfigDict, workdir: str | os.PathLike, shapes: Sequence[tuple[int, int, int]] | None = None) -> dict:
    """Measures, prints the table, and writes `consistency.json`, which it returns.

    Args:
        shapes: (data, expert, model) of the meshes held against the config's own; default: `mesh_shapes`.
    """
    session = sessions.open_session(config, "train")
    data = session.data["train"]
    count = config.rollout.prompts // config.optimizer.minibatches
    if len(data.problems) < count:
        raise ValueError(f"rollout.prompts: found {count} at a time, need at most the {len(data.problems)} training problems")
    if shapes is None:
        shapes = mesh_shapes(jax.local_device_count(), session.model.spec, count)
    own = tuple(session.model.mesh.shape.values())
    others = {shape: meshes.make(*shape) for shape in shapes if tuple(shape) != own}
    for mesh in others.values():
        meshes.check(mesh, session.model.spec, count)
    tokens, lengths = prompts.batch(data.encoded, np.arange(count), data.length, session.tokenizer.pad_id)
    batch = Batch(tokens, lengths, np.array([p.id for p in data.problems[:count]], np.int32))
    here = Place(session.model, session.base, random_adapter(config, session))
    sampling = sessions.sampling(config, session)
    console = Console()
    with console.status("measuring; most of the time goes into compiling"):
        comparisons = compare_all(here, others, batch, sampling, config.seed)
    result = {
        "numerics": config.numerics,
        "act_bits": config.act_bits,
        "base_digest": session.digest,
        "devices": jax.devices()[0].device_kind,
        "mesh": list(own),
        "prompts": count,
        "group": config.rollout.group,
        "all_equal": all(row[k] == 1 for row in comparisons for k in row if k.endswith("_equal")),
        "comparisons": comparisons,
    }
    console.print(table(result))
    pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
    write_atomically(pathlib.Path(workdir) / "consistency.json", json.dumps(result, indent=1))
    return result


def compare_all(here: Place, others: dict, batch: Batch, sampling: Sampling, seed: int) -> list[dict]:
    """Every row of the table. `others`: {(data, expert, model): mesh}."""
    found = []
    first, seen = decode(here, sampling, batch, seed)
    full = forward(here, first)

    def note(name: str, by: str, a: Seen, b: Seen, rows=slice(None)) -> None:
        measured = compare(a, b, first.lengths[rows], first.prompt_lengths[rows], sampled=by == "decode")
        found.append({"comparison": name, "by": by} | measured)

    def again(name: str, place: Place, batch: Batch, rows: np.ndarray, r: Rollout, sampling: Sampling) -> None:
        """Both ways of computing, with something changed, against the first time; `rows` of it are in `batch` and `r`."""
        note(name, "decode", seen.rows(rows), decode(place, sampling, batch, seed)[1], rows)
        note(name, "forward", full.rows(rows), forward(place, r), rows)

    note("decode / full forward", "both", seen, full)
    everything = np.arange(len(batch.ids))
    fewest = meshes.row_shards(here.model.mesh)  # prompts that the mesh can take at a time
    alone = [everything[i : i + fewest] for i in range(0, min(4 * fewest, len(everything)), fewest)]
    one = dataclasses.replace(sampling, group=1)
    parts = [(decode(here, one, batch.rows(rows), seed)[1], forward(here, pick(first, rows, group=1))) for rows in alone]
    rows = np.concatenate(alone)
    for by, whole, pieces in zip(("decode", "forward"), (seen, full), zip(*parts)):
        note(f"{fewest} / {len(everything)} prompts at a time", by, whole.rows(rows), _joined(pieces), rows)
    wide, long = PADDING
    longer = dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens + long)
    again("padding", here, batch.padded(wide), everything, pick(first, everything, wide=wide, long=long), longer)
    mixed = np.random.default_rng(seed).permutation(everything)
    again("order of rows", here, batch.rows(mixed), mixed, pick(first, mixed), sampling)
    name = lambda shape: "x".join(map(str, shape))
    for shape, mesh in others.items():
        title = f"mesh {name(here.model.mesh.shape.values())} / {name(shape)}"
        again(title, here.moved(mesh), batch, everything, pick(first, everything), sampling)
    return found


def mesh_shapes(devices: int, spec: Spec, count: int) -> list[tuple[int, int, int]]:
    """Meshes worth comparing on so many devices: one, two and all, over every axis, as far as the model and `count` prompts divide."""
    wanted = [(1, 1, 1), (2, 1, 1), (devices, 1, 1)]
    wanted += [(devices // 4, 2, 2)] if devices >= 4 else [(1, 2, 1), (1, 1, 2)]  # both other axes at once: each mesh compiles twice

    def fits(shape):
        data, expert, model = shape
        heads = spec.heads if spec.mla else spec.kv_heads
        divides = spec.experts % (expert * model) == 0 and heads % model == 0 and count % max(1, data * expert) == 0
        return 0 < data * expert * model <= devices and divides

    return list(dict.fromkeys(filter(fits, wanted)))


def random_adapter(config: ConfigDict, session: sessions.Session) -> lora.Adapter:
    """A new adapter whose B is not zero, or the one to start from."""
    adapter = sessions.init_adapter(config, session)
    if session.initial is not None:
        return adapter
    leaves, tree = jax.tree.flatten(adapter)
    keys = jax.random.split(jax.random.key(config.seed + 1), len(leaves))
    random = tree.unflatten([SIZE_OF_B * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)])
    is_pair = lambda x: isinstance(x, lora.Lora)
    filled = jax.tree.map(lambda pair, other: pair.replace(b=other.b), adapter, random, is_leaf=is_pair)
    return meshes.place(session.model.mesh, filled)


def decode(place: Place, sampling: Sampling, batch: Batch, seed: int) -> tuple[Rollout, Seen]:
    """Sample with a cache, as the rollout does. Both on the host."""
    inputs = jax.device_put((batch.tokens, batch.lengths, batch.ids), meshes.rows(place.model.mesh))
    prepared = evaluate.prepare(place.model, place.adapter)
    r = jax.device_get(rollout.generate(place.model, sampling, place.base, prepared, *inputs, seed % 2**31))
    return r, Seen(r.tokens, r.scored_logprobs, r.prompt_choices, r.choices)


def forward(place: Place, r: Rollout) -> Seen:
    """Score given completions (host arrays) in one pass, as the update does."""
    placed = jax.device_put(pick(r, slice(None)), meshes.rows(place.model.mesh))
    scored, choices = jax.device_get(_score(place.model, place.base, evaluate.prepare(place.model, place.adapter), placed))
    (layers, p_, _, k), t_ = choices.shape, r.prompts.shape[1]
    return Seen(r.tokens, scored, choices[:, :, :t_], choices[:, :, t_:].reshape(layers, p_, *r.tokens.shape[1:], k))


@programs.jit(static_argnames=("model",))
def _score(model: models.Model, base: Base, adapter: lora.Adapter, r: Rollout) -> tuple[Array, Array]:
    s = scoring.score(model, base, adapter, r)
    return s.scored, s.choices


def pick(r: Rollout, rows, group: int | None = None, wide: int = 0, long: int = 0) -> Rollout:
    """What scoring needs of some prompts' first `group` completions, with more padding."""
    tokens, lengths = r.tokens[rows, :group], r.lengths[rows, :group]
    tokens = np.pad(tokens, ((0, 0), (0, 0), (0, long)))
    kept = dict(prompts=np.pad(r.prompts[rows], ((0, 0), (0, wide))), prompt_lengths=r.prompt_lengths[rows], tokens=tokens, lengths=lengths)
    return Rollout(**{f.name: kept.get(f.name) for f in dataclasses.fields(Rollout)})


def compare(a: Seen, b: Seen, lengths: np.ndarray, prompt_lengths: np.ndarray, sampled: bool) -> dict:
    """Shares of equal bits over what both hold, without padding: `lengths` [P, G] and `prompt_lengths` [P] are a's.

    A logprob after tokens that differ is another quantity: it counts as different, and not towards the largest difference.
    """
    group, c = (min(a.tokens.shape[i], b.tokens.shape[i]) for i in (1, 2))
    t = min(a.prompt_choices.shape[2], b.prompt_choices.shape[2])
    own = lambda x: x[..., :group, :c]
    same_text = np.cumprod(own(a.tokens) == own(b.tokens), -1).astype(bool)
    lengths = lengths[:, :group, None]
    live, fed, prompt = np.arange(c) < lengths, np.arange(c) < lengths - 1, np.arange(t) < prompt_lengths[:, None]
    x, y = own(a.logprobs), own(b.logprobs)
    equal = same_text & (x.view(np.uint32) == y.view(np.uint32))
    of_prompt = a.prompt_choices[:, :, :t] == b.prompt_choices[:, :, :t]
    of_own = same_text[..., None] & (a.choices[:, :, :group, :c] == b.choices[:, :, :group, :c])
    choices = np.concatenate([of_prompt[:, prompt].ravel(), of_own[:, fed].ravel()])
    result = {
        "logprobs_equal": float(equal[live].mean()),
        "choices_equal": float(choices.mean()) if choices.size else 1.0,  # a dense model has none
        "max_abs_logprob_diff": float(np.abs(x - y)[live & same_text].max(initial=0.0)),
    }
    return result | ({"completions_equal": float(np.all(same_text | ~live, -1).mean())} if sampled else {})


def _joined(parts: Sequence[Seen]) -> Seen:
    axes = {"tokens": 0, "logprobs": 0, "prompt_choices": 1, "choices": 1}
    return Seen(**{name: np.concatenate([getattr(p, name) for p in parts], axis) for name, axis in axes.items()})


def table(result: dict) -> Table:
    precision = f", A{result['act_bits']}" if result["numerics"] == "exact" else ""
    size = f"{result['prompts']} prompts x {result['group']} completions"
    title = f"{result['numerics']}{precision}, base {result['base_digest'][:12]}, {size}"
    out = Table(title=title, box=box.SIMPLE, caption="the same bits everywhere" if result["all_equal"] else "not the same bits everywhere")
    for name in ("equal bits of", "by", "logprobs", "experts", "texts", "max gap"):
        out.add_column(name, no_wrap=True)
    share = lambda x: "" if x is None else "100 %" if x == 1 else f"{math.floor(x * 1e4) / 1e2:.2f} %"  # 100 % is never rounded up to
    for row in result["comparisons"]:
        shares = (share(row.get(f"{k}_equal")) for k in ("logprobs", "choices", "completions"))
        out.add_row(row["comparison"], row["by"], *shares, f"{row['max_abs_logprob_diff']:.3g}")
    return out
