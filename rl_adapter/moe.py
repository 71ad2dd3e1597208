"""Routed experts without dropping and without density: token-expert pairs are sorted by expert and visited tile by tile.

A tile is a few pairs of one expert; a visit takes one tile, or several where experts are small, and unpacks the weights of their experts
alone. So cost grows with pairs (tokens x k), no array the size of a large layer's dequantized experts exists, and no pair is ever cut by
a capacity.

Over a mesh each device visits the pairs of its own experts. Their weighted outputs are summed as integers, so the sum does not
depend on which device computed what.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rl_adapter import lora, numerics, quant
from rl_adapter import mesh as meshes
from rl_adapter.types import Array, Layer, Numerics, PyTree, Spec

f32 = jnp.float32
AT_ONCE = 2**19  # bytes of one of an expert's three matrices, unpacked to float32, times the tiles that are visited at once


@struct.dataclass
class Mlp:
    """Weights and adapters of one MLP, or [E, ...] of one layer's experts, and what is static about them."""

    gate: PyTree
    up: PyTree
    down: PyTree
    adapter: dict  # name -> Lora; may be empty
    bias: dict  # name -> [(E,) N] f32; may be empty
    scales: tuple = struct.field(pytree_node=False, default=())  # ((name, LoRA scale), ...)
    limit: float = struct.field(pytree_node=False, default=0.0)  # of a clamped SwiGLU; 0: plain


def route(x: Array, layer: Layer, adapter: PyTree, scale: float, spec: Spec, numeric: Numerics) -> tuple[Array, Array, Array, Array]:
    """x [N, D] -> weights [N, k] f32, experts [N, k] int32 (ties: the lower expert); and for losses probabilities and logits [N, E]."""
    z = lora.linear(x, layer.router, adapter, scale, numeric, layer.bias.get("router"))
    exact, k = numeric.exact, spec.experts_per_token
    if spec.score == "softmax_of_chosen":
        top, choice = jax.lax.top_k(z, k)
        return numerics.softmax(top, exact), choice, jax.nn.softmax(z, -1), z
    if spec.score == "softmax":
        s = p = numerics.softmax(z, exact)
    else:
        s = numerics.sigmoid(z) if exact else jax.nn.sigmoid(z)
        p = s / jnp.sum(s, -1, keepdims=True)
    preference = s if layer.score_bias is None else s + layer.score_bias
    if spec.expert_groups > 1:  # only experts of the best groups, by the sum of a group's two best (DeepSeek-V3, arXiv:2412.19437)
        grouped = preference.reshape(len(x), spec.expert_groups, -1)
        _, kept = jax.lax.top_k(jnp.sum(jax.lax.top_k(grouped, 2)[0], -1), spec.groups_per_token)
        is_kept = jnp.any(kept[:, :, None] == jnp.arange(spec.expert_groups), 1)
        preference = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(s.shape)
    weights, choice = jax.lax.top_k(preference, k)
    if preference is not s:
        weights = jnp.take_along_axis(s, choice, -1)
    if spec.norm_topk_prob:
        total = numerics.exact_sum(weights) if exact else jnp.sum(weights, -1, keepdims=True)
        weights = numerics.divide_rows(weights, jnp.maximum(total, 1e-20))
    return weights * spec.routed_scale if spec.routed_scale != 1 else weights, choice, p, z


def feed_forward(x: Array, e: Mlp, numeric: Numerics) -> Array:
    """[t, D] -> [t, D] by SwiGLU (Shazeer 2020, arXiv:2002.05202), or its clamped form (gpt-oss): (up + 1) gate sigmoid(1.702 gate)."""
    scales = dict(e.scales)

    def linear(x, name):
        return lora.linear(x, getattr(e, name), e.adapter.get(name), scales.get(name, 1.0), numeric, e.bias.get(name))

    sigmoid = numerics.sigmoid if numeric.exact else jax.nn.sigmoid
    gate, up = linear(x, "gate"), linear(x, "up")
    if e.limit:
        gate, up = jnp.minimum(gate, e.limit), jnp.clip(up, -e.limit, e.limit)
        return linear((up + 1) * (gate * sigmoid(gate * 1.702)), "down")
    return linear(gate * sigmoid(gate) * up, "down")


@struct.dataclass
class _Visits:
    """Pairs in tile order. A slot is a row of a tile; slots past an expert's last pair point at no token."""

    slot: Array  # [N * k] slot of each pair; one past the end for a pair that is not visited
    token: Array  # [slots] token of each slot; N where empty
    expert: Array  # [tiles]
    tiles: Array  # [] how many tiles hold pairs
    size: int = struct.field(pytree_node=False)  # slots of a tile


def _visits(choice: Array, wanted: Array, experts: int, tile: int, at_once: int = 1) -> _Visits:
    """choice [N, k] in 0 .. experts - 1 where wanted [N, k]; every wanted pair gets a slot, in a multiple of `at_once` tiles."""
    n, k = choice.shape
    pairs = n * k
    most = -(-(pairs // tile + min(experts, pairs)) // at_once) * at_once
    e = jnp.where(wanted, choice, experts).reshape(-1)
    order = jnp.argsort(e, stable=True)
    e_sorted = e[order]
    start = jnp.searchsorted(e_sorted, jnp.arange(experts + 1))
    last = jnp.cumsum(-(-(start[1:] - start[:-1]) // tile))  # [E] tiles up to and with this expert
    first = jnp.concatenate([jnp.zeros(1, last.dtype), last])
    slot_sorted = jnp.where(e_sorted < experts, first[e_sorted] * tile + jnp.arange(pairs) - start[e_sorted], most * tile)
    slot = jnp.zeros(pairs, jnp.int32).at[order].set(slot_sorted.astype(jnp.int32))
    token = jnp.full(most * tile, n, jnp.int32).at[slot].set(jnp.arange(pairs, dtype=jnp.int32) // k, mode="drop")
    expert = jnp.searchsorted(last, jnp.arange(most), side="right").astype(jnp.int32)
    return _Visits(slot, token, jnp.minimum(expert, experts - 1), last[-1], tile)


def _pick(experts: Mlp, e: Array) -> Mlp:
    """One expert's weights; an A shared by all experts stays as it is."""
    take = functools.partial(jax.tree.map, lambda w: jax.lax.dynamic_index_in_dim(w, e, 0, keepdims=False))
    adapter = {name: lora.Lora(pair.a if _is_shared(pair) else take(pair.a), take(pair.b)) for name, pair in experts.adapter.items()}
    return experts.replace(gate=take(experts.gate), up=take(experts.up), down=take(experts.down), adapter=adapter, bias=take(experts.bias))


def _is_shared(pair: lora.Lora) -> bool:
    return pair.a.master.ndim < pair.b.master.ndim


def _append(x: Array, rows: int = 1) -> Array:
    return jnp.concatenate([x, jnp.zeros((rows, *x.shape[1:]), x.dtype)])


def _run(x: Array, choice: Array, wanted: Array, experts: Mlp, n_experts: int, numeric: Numerics) -> Array:
    """Expert outputs of every wanted pair, [N, k, D]; zero for the others."""
    tile = tile_size(choice.size, n_experts)
    many = tiles_at_once(experts, tile, choice.size, n_experts)
    v = _visits(choice, wanted, n_experts, tile, many)
    x = _append(x)
    visit_one = jax.vmap(lambda rows, e: feed_forward(rows, _pick(experts, e), numeric))

    def visit(i, out):
        rows = x[jax.lax.dynamic_slice_in_dim(v.token, i * many * tile, many * tile)].reshape(many, tile, -1)
        y = visit_one(rows, jax.lax.dynamic_slice_in_dim(v.expert, i * many, many))
        return jax.lax.dynamic_update_slice_in_dim(out, y.reshape(many * tile, -1), i * many * tile, 0)

    out = jax.lax.fori_loop(0, -(-v.tiles // many), visit, jnp.zeros((v.token.size + 1, x.shape[1]), f32))
    return out[v.slot].reshape(*choice.shape, -1)


def _trained(experts: Mlp) -> list[Array]:
    return quant.split(experts.replace(bias={}))[0]


def _cotangent(experts: Mlp, grads: list[Array]) -> Mlp:
    """Biases are frozen, like the weights that they belong to."""
    return quant.cotangent(experts.replace(bias={}), grads).replace(bias=dict.fromkeys(experts.bias))


def tile_size(pairs: int, experts: int) -> int:
    """Pairs of a tile: a power of two not above the mean load, so that few slots of a last tile stay empty. Cannot be seen in the bits."""
    return int(min(128, max(8, 2 ** math.floor(math.log2(max(1, pairs / experts))))))


def tiles_at_once(experts: Mlp, tile: int, pairs: int, n_experts: int) -> int:
    """Tiles of a visit: as many as are sure to be there and whose unpacked weights stay small. Of a small expert most of a visit's time
    would be starting its operations."""
    k, n = quant.shape(experts.gate)[-2:]
    return max(1, min(AT_ONCE // (4 * k * n), pairs // tile + min(n_experts, pairs)))


def _combine(y: Array, weights: Array, axes: tuple[str, ...], numeric: Numerics) -> Array:
    """Sum over k of weights [N, k] * y [N, k, D], over the mesh axes too: [N, D]."""
    z = weights[..., None] * y
    if not numeric.exact:
        total = jnp.sum(z, 1)
        return jax.lax.psum(total, axes) if axes else total
    largest = jnp.max(jnp.max(jnp.abs(z), 1), -1, keepdims=True)
    if axes:
        largest = jax.lax.pmax(largest, axes)
    s = numerics.power_of_two_above(largest) * 2.0 ** (math.ceil(math.log2(max(2, y.shape[1]))) - 30)
    total = jnp.sum(jnp.round(z / s[..., None]).astype(jnp.int32), 1)
    if axes:
        total = jax.lax.psum(total, axes)
    return total.astype(f32) * s


def _backward_run(x: Array, weights: Array, choice: Array, wanted: Array, experts: Mlp, n_experts: int, dy: Array):
    """Gradients of sum_k weights * y by the float twin: to x [N, D], weights [N, k] and the list of trained leaves of `experts`."""
    tile = tile_size(choice.size, n_experts)
    many = tiles_at_once(experts, tile, choice.size, n_experts)
    v = _visits(choice, wanted, n_experts, tile, many)
    x, dy = _append(x), _append(dy)
    slot_weight = jnp.zeros(v.token.size, f32).at[v.slot].set(weights.reshape(-1), mode="drop")

    def of_tile(rows, w, d, e):
        mine = _pick(experts, e)
        trained, rebuild = quant.split(mine.replace(bias={}))
        expert = lambda t: rebuild(t).replace(bias=mine.bias)
        y, vjp = jax.vjp(lambda rows, t: feed_forward(rows, expert(t), Numerics("float")), rows, trained)
        return jnp.matmul(d * y, jnp.ones((y.shape[-1], 1)))[:, 0], *vjp(d * w[:, None])  # a sum in a fusion does not run in vectors

    def visit(i, carry):
        dx, dots, grads = carry
        tokens, w = (jax.lax.dynamic_slice_in_dim(t, i * many * tile, many * tile) for t in (v.token, slot_weight))
        e = jax.lax.dynamic_slice_in_dim(v.expert, i * many, many)
        by_tile = lambda t: t.reshape(many, tile, *t.shape[1:])
        d_weight, d_rows, d_trained = jax.vmap(of_tile)(by_tile(x[tokens]), by_tile(w), by_tile(dy[tokens]), e)
        dots = jax.lax.dynamic_update_slice_in_dim(dots, d_weight.reshape(-1), i * many * tile, 0)
        grads = [g + d.sum(0) if g.ndim < d.ndim else g.at[e].add(d) for g, d in zip(grads, d_trained)]  # an A shared by all has no [E]
        return dx.at[tokens].add(d_rows.reshape(many * tile, -1)), dots, grads

    start = jnp.zeros_like(x), jnp.zeros(v.token.size + 1, f32), [jnp.zeros_like(t) for t in _trained(experts)]
    dx, dots, grads = jax.lax.fori_loop(0, -(-v.tiles // many), visit, start)
    return dx[:-1], dots[v.slot].reshape(choice.shape), grads


def _local_pairs(choice: Array, valid: Array, n_experts: int) -> tuple[Array, Array, int]:
    """Inside shard_map: choices renumbered to this device's experts, which of them it holds, and how many experts it holds."""
    ways = jax.lax.axis_size("expert") * jax.lax.axis_size("model")
    mine = n_experts // ways
    choice = choice - mine * (jax.lax.axis_index("expert") * jax.lax.axis_size("model") + jax.lax.axis_index("model"))
    return choice, valid[:, None] & (choice >= 0) & (choice < mine), mine


def _gather(*arrays: Array) -> list[Array]:
    return [jax.lax.all_gather(a, "expert", tiled=True) for a in arrays]


def _my_rows(x: Array) -> Array:
    """Of rows gathered over `expert`, those of this device."""
    n = x.shape[0] // jax.lax.axis_size("expert")
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("expert") * n, n)


def _forward(x, weights, choice, valid, experts, n_experts, numeric, mesh):
    if mesh is None or mesh.size == 1:
        y = _run(x, choice, jnp.broadcast_to(valid[:, None], choice.shape), experts, n_experts, numeric)
        return _combine(y, weights, (), numeric)

    def body(x, weights, choice, valid, experts):
        x, weights, choice, valid = _gather(x, weights, choice, valid)
        choice, wanted, mine = _local_pairs(choice, valid, n_experts)
        return _my_rows(_combine(_run(x, choice, wanted, experts, mine, numeric), weights, meshes.EXPERTS, numeric))

    rows = P(meshes.ROWS)
    return jax.shard_map(body, mesh=mesh, in_specs=(rows, rows, rows, rows, _specs(experts)), out_specs=rows, check_vma=False)(
        x, weights, choice, valid, experts
    )


def _specs(experts: Mlp) -> Mlp:
    split, whole = P(meshes.EXPERTS), P()

    def of_pair(pair):
        of_a = whole if _is_shared(pair) else split
        return lora.Lora(jax.tree.map(lambda _: of_a, pair.a), jax.tree.map(lambda _: split, pair.b))

    adapter = {name: of_pair(pair) for name, pair in experts.adapter.items()}
    return jax.tree.map(lambda _: split, experts.replace(adapter={})).replace(adapter=adapter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def routed(
    x: Array, weights: Array, choice: Array, valid: Array, experts: Mlp, n_experts: int, numeric: Numerics, mesh: Mesh | None
) -> Array:
    """sum over k of weights * expert(x): [N, D]. Rows that are not valid [N] are not computed, and are zero.

    The residual is the input and the packed experts; the backward pass visits the same tiles with the float twin.
    """
    return _forward(x, weights, choice, valid, experts, n_experts, numeric, mesh)


def _routed_forward(x, weights, choice, valid, experts, n_experts, numeric, mesh):
    return _forward(x, weights, choice, valid, experts, n_experts, numeric, mesh), (x, weights, choice, valid, experts)


def _routed_backward(n_experts, numeric, mesh, residual, dy):
    x, weights, choice, valid, experts = residual
    if mesh is None or mesh.size == 1:
        wanted = jnp.broadcast_to(valid[:, None], choice.shape)
        dx, dw, grads = _backward_run(x, weights, choice, wanted, experts, n_experts, dy)
        return dx, dw, None, None, _cotangent(experts, grads)

    def body(x, weights, choice, valid, dy, experts):
        x, weights, choice, valid, dy = _gather(x, weights, choice, valid, dy)
        choice, wanted, mine = _local_pairs(choice, valid, n_experts)
        dx, dw, grads = _backward_run(x, weights, choice, wanted, experts, mine, dy)
        dx, dw = (_my_rows(jax.lax.psum(g, meshes.EXPERTS)) for g in (dx, dw))
        shared = [g.ndim < 3 for g in grads]
        grads = [jax.lax.psum(g, ("data", *meshes.EXPERTS) if whole else "data") for g, whole in zip(grads, shared)]
        return dx, dw, grads

    rows = P(meshes.ROWS)
    grad_specs = [P() if t.ndim < 3 else P(meshes.EXPERTS) for t in _trained(experts)]
    dx, dw, grads = jax.shard_map(
        body, mesh=mesh, in_specs=(rows,) * 5 + (_specs(experts),), out_specs=(rows, rows, grad_specs), check_vma=False
    )(x, weights, choice, valid, dy, experts)
    return dx, dw, None, None, _cotangent(experts, grads)


routed.defvjp(_routed_forward, _routed_backward)
