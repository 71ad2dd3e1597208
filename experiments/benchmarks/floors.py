"""What a program cannot do without: its multiply-adds at the rate at which this machine multiplies matrices, and the bytes that it must
read at the rate at which memory gives them. Both rates are measured in the same run; the work is counted from the shapes.

Counted is what the mathematics asks for: each routed pair once, each prompt once a group, each query with the keys that it sees, each
frozen weight once a pass. Not counted: norms, softmax, sampling, quantizing activations, recomputing in the backward pass, and padding.
"""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.benchmarks.common import Variant, Work, size
from rl_adapter import quant
from rl_adapter.types import Numerics, Spec

EXPERTS = ("gate", "up", "down")
BIG = 1024  # rows, inner features and columns of the matrix product that shows what the machine can do
STREAM = 2**26  # elements of the array that shows what memory can do
TYPES = ("float32", "int8")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a program. Exact numerics make several products of 8-bit slices of one multiply-add; the backward pass is in float32."""

    forward: float = 0.0  # multiply-adds
    products: float = 0.0  # of 8-bit slices, that integers make of `forward`; as many as `forward` in float numerics
    backward: float = 0.0  # multiply-adds in float32
    bytes: float = 0.0  # read and written at least: weights, cache, optimizer

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Cost)))

    def times(self, n: float) -> "Cost":
        return Cost(*(getattr(self, f.name) * n for f in dataclasses.fields(Cost)))


def products(numeric: Numerics, bits: int) -> int:
    """Products of 8-bit slices of one activation and one weight of `bits` bits."""
    return numeric.act_bits // 8 * -(-bits // 8) if numeric.exact else 1


def per_token(work: Work) -> Cost:
    """All matrices between embedding and head, for one token; the experts' k times."""
    spec, numeric, total = work.model.spec, work.model.numeric, Cost()
    share = lambda name: spec.experts_per_token / spec.experts if name in EXPERTS else 1.0
    for layer, adapter in zip(work.base.layers, work.adapter.layers):
        for name in (f.name for f in dataclasses.fields(layer)):
            w = getattr(layer, name)
            if quant.is_quantized(w):
                macs = share(name) * math.prod(quant.shape(w))
                total += Cost(macs, macs * products(numeric, quant.STORED[w.form].bits), macs)
        for name, pair in adapter.items():
            macs = sum(share(name) * math.prod(m.shape) for m in (pair.a, pair.b))
            total += Cost(macs, macs * products(numeric, 16), 2 * macs)  # gradients of weights too, as only adapters have
    return total


def head(work: Work) -> Cost:
    """One token's logits."""
    k, n = quant.shape(work.base.head)
    macs = float(k * n)
    return Cost(macs, macs * products(work.model.numeric, quant.STORED[work.base.head.form].bits), macs)


def attention(work: Work, queries: range) -> Cost:
    """Queries at these positions, each of which sees itself and all before it, in all layers."""
    spec, numeric = work.model.spec, work.model.numeric
    windows = spec.windows or (0,) * spec.layers
    keys = sum(min(q + 1, w or q + 1) for w in windows for q in queries)
    macs = float(keys * spec.heads * (spec.head_dim + (spec.mla.kv_rank if spec.mla else spec.head_dim)))
    slices = {8: {8: 1}, 16: {8: 2, 16: 3}}[numeric.act_bits][numeric.key_bits] if numeric.exact else 1  # two low ones never meet
    return Cost(macs, macs * slices, 2 * macs)


def key_bytes(spec: Spec, numeric: Numerics) -> int:
    """Of one token's keys and values in all layers, as the cache holds them."""
    width = numeric.key_bits // 8 if numeric.exact else 4
    scale = 4 if numeric.exact else 0
    return spec.layers * spec.kv_heads * (1 if spec.mla else 2) * (spec.head_dim * width + scale)


def weight_bytes(work: Work, tokens: int) -> float:
    """Read in one pass of so many tokens: of the experts, those that are hit if all are as likely."""
    e, pairs = work.model.spec.experts, tokens * work.model.spec.experts_per_token
    hit = 1 - (1 - 1 / e) ** pairs if e else 0.0
    total = float(size(work.base.head))
    for layer in work.base.layers:
        experts = size([getattr(layer, n) for n in EXPERTS])
        total += size(layer) - experts + hit * experts
    return total


def costs(work: Work, v: Variant) -> dict[str, Cost]:
    """Of each program of `common.programs`."""
    rows, fed = v.batch * v.group, v.length - 1  # a completion's last token is not fed
    slots = min(v.slots or rows, rows)
    steps = fed * -(-rows // slots)
    keys = key_bytes(work.model.spec, work.model.numeric)
    tokens = v.batch * v.prompt + rows * fed
    each, logits = per_token(work), head(work)
    attended = attention(work, range(v.prompt)).times(v.batch) + attention(work, range(v.prompt, v.prompt + fed)).times(rows)
    forward = each.times(tokens) + attended
    own = sum(range(1, fed + 1)) * rows * keys  # read by the tokens of each completion
    shared = steps * -(-slots // v.group) * v.prompt * keys  # a prompt's once a step for its whole group
    weights = weight_bytes(work, v.batch * v.prompt) + steps * weight_bytes(work, slots)
    rollout = dataclasses.replace(forward + logits.times(v.batch + rows * fed), backward=0.0, bytes=weights + own + shared)
    once = weight_bytes(work, tokens)
    scored = forward + logits.times(rows * v.length)
    scoring = dataclasses.replace(scored, backward=0.0, bytes=once)
    adapter = size(work.adapter)
    # The reference is scored without adapter, which is a small part; parameters and two moments are read and written, gradients too.
    update = dataclasses.replace(scored + scoring, backward=scored.backward, bytes=3 * once + 8 * adapter)
    return {"rollout": rollout, "scoring": scoring, "update": update}


# --- what the machine can do -------------------------------------------------------------------------------------------------------


def fastest(f: Callable, *arguments, rounds: int = 5, donated: bool = False) -> float:
    """Seconds of the fastest of some runs: a rate that the machine has shown. A donated argument is what the last run gave."""
    value = jax.block_until_ready(f(*arguments))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        value = jax.block_until_ready(f(*((value,) if donated else arguments)))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def matmul_rate(dtype: str, rows: int, k: int, n: int, least: float = 2e8) -> float:
    """Multiply-adds a second of [rows, k] x [k, n] in float32, or of int8 into int32; small ones as a batch of `least` multiply-adds."""
    batch = max(1, round(least / (rows * k * n)))
    a, b = (jnp.ones(shape, dtype) for shape in ((batch, rows, k), (batch, k, n)))
    dims = (((2,), (1,)), ((0,), (0,)))
    if batch == 1:
        a, b, dims = a[0], b[0], (((1,), (0,)), ((), ()))
    dot = jax.jit(lambda a, b: jax.lax.dot_general(a, b, dims, "highest", jnp.int32 if dtype == "int8" else jnp.float32))
    return batch * rows * k * n / fastest(dot, a, b)


def bandwidth() -> dict[str, float]:
    """Bytes a second of XLA: read and written in place, and read alone."""
    x = jnp.zeros(STREAM)
    read = fastest(jax.jit(lambda x: jnp.max(x)), x)
    both = fastest(jax.jit(lambda x: x + 1, donate_argnums=0), x, donated=True)
    return {"read": 4 * STREAM / read, "read_and_write": 8 * STREAM / both}


def rows_of(v: Variant, spec: Spec) -> tuple[int, int]:
    """Rows that one expert gets on average: of a decoding step, and of a whole batch."""
    share = max(1, spec.experts_per_token) / max(1, spec.experts)
    decoded, whole = (max(1, round(share * n)) for n in (min(v.slots or v.batch * v.group, v.batch * v.group), v.tokens))
    return decoded, whole


def rates(v: Variant, spec: Spec) -> dict:
    """What the machine gives: multiply-adds a second of a good shape, of the rows that one expert gets of a decoding step ("rollout"),
    and of those that it gets of a whole batch ("scoring", "update"); bytes a second."""
    decoded, whole = rows_of(v, spec)
    found = {"bytes": bandwidth(), "best": {t: matmul_rate(t, BIG, BIG, BIG) for t in TYPES}, "rows": {}}
    for rows, names in ((decoded, ("rollout",)), (whole, ("scoring", "update"))):
        rate = {t: matmul_rate(t, rows, spec.d_model, spec.d_expert or spec.d_mlp) for t in TYPES}
        found["rows"] |= dict.fromkeys(names, {"rows": rows, **rate})
    return found


def seconds(cost: Cost, rate: dict[str, float]) -> float:
    """Least time of the multiply-adds: each as one in float32, or as products of 8-bit slices, whichever is faster here."""
    return min(cost.forward / rate["float32"], cost.products / rate["int8"]) + cost.backward / rate["float32"]


def floor(name: str, cost: Cost, found: dict) -> dict[str, float]:
    """Seconds of a program at these rates: `compute` at the machine's best, `rows` at that of its own rows, `bytes`, and as `floor` the
    larger of the first and the last."""
    compute, moved = seconds(cost, found["best"]), cost.bytes / max(found["bytes"].values())
    return {"compute": compute, "rows": seconds(cost, found["rows"][name]), "bytes": moved, "floor": max(compute, moved)}
