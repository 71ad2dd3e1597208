"""Arrays on the mesh that are filled piece by piece, so that the host never holds more than the piece at hand."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rl_adapter import quant
from rl_adapter.types import Array, PyTree


class Leaf:
    """One array [*lead, ...] on the mesh: each device gets its part of every piece [...], and nothing else."""

    def __init__(self, lead: tuple[int, ...], piece: np.ndarray, sharding: NamedSharding):
        self.shape, self.dtype, self.sharding, self._lead = (*lead, *piece.shape), piece.dtype, sharding, len(lead)
        self._hash = hashlib.sha256(quant.leaf_header(self.shape, self.dtype))
        self._places = sharding.addressable_devices_indices_map(self.shape)
        local = sharding.shard_shape(self.shape)
        self._buffers = {device: _zeros(local, self.dtype, device) for device in self._places}

    def put(self, index: tuple[int, ...], piece: np.ndarray) -> None:
        """Pieces come in the order in which they lie in the array."""
        need = self.shape[self._lead :]
        if piece.shape != need or piece.dtype != self.dtype:
            raise ValueError(f"found {piece.dtype} {list(piece.shape)}, need {self.dtype} {list(need)} as the first layer or expert has")
        piece = np.ascontiguousarray(piece).reshape(need)
        self._hash.update(piece.reshape(-1).view(np.uint8).data)
        for device, place in self._places.items():
            local = tuple(i - (s.start or 0) for i, s in zip(index, place))
            buffer = self._buffers[device]
            if all(0 <= i < n for i, n in zip(local, buffer.shape)):
                self._buffers[device] = _write(buffer, piece[place[self._lead :]], local, device)

    def finish(self) -> tuple[jax.Array, str]:
        """The array, and its digest."""
        buffers = [jax.device_put(self._buffers.pop(device), device) for device in self._places]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, buffers), self._hash.hexdigest()


def _zeros(shape: tuple[int, ...], dtype, device: jax.Device) -> np.ndarray | Array:
    """Memory of a device. A CPU's is the host's own: written to as it is, and handed over without a copy since it is aligned."""
    if device.platform != "cpu":
        return jnp.zeros(shape, dtype, device=device)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _write(buffer: np.ndarray | Array, piece: np.ndarray, index: tuple[int, ...], device: jax.Device) -> np.ndarray | Array:
    if isinstance(buffer, np.ndarray):
        buffer[index] = piece
        return buffer
    at = np.array(index + (0,) * piece.ndim, np.int32)
    # Waited for, or a fast reader would queue the whole model on the host.
    return jax.block_until_ready(_write_in_place(buffer, jax.device_put(piece, device), at))


@functools.partial(jax.jit, donate_argnums=0)
def _write_in_place(buffer: Array, piece: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_slice(buffer, jnp.expand_dims(piece, tuple(range(buffer.ndim - piece.ndim))), index)


class Stack:
    """A tree of leaves that have the same leading axes: the pieces of one field."""

    def __init__(self, lead: tuple[int, ...], shardings):
        """`shardings`: a tree of [*lead, ...] shapes -> the like tree of shardings."""
        self._lead, self._shardings = lead, shardings
        self._structure, self._leaves = None, []

    def put(self, index: tuple[int, ...], piece: PyTree) -> None:
        leaves, structure = jax.tree.flatten(piece)
        if self._structure is None:
            whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*self._lead, *x.shape), x.dtype), piece)
            shardings = jax.tree.leaves(self._shardings(whole))
            self._structure, self._leaves = structure, [Leaf(self._lead, x, s) for x, s in zip(leaves, shardings)]
        if structure != self._structure:
            raise ValueError("found another format than that of the first layer or expert, need one in all")
        for leaf, x in zip(self._leaves, leaves):
            leaf.put(index, x)

    def finish(self) -> tuple[PyTree, PyTree]:
        """The tree of arrays, and the like tree of their digests."""
        done = [leaf.finish() for leaf in self._leaves]
        return tuple(self._structure.unflatten([pair[i] for pair in done]) for i in (0, 1))
