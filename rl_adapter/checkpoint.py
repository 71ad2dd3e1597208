"""Checkpoints: the only importer of Orbax.

A directory holds one subdirectory a step and `identity.json`, which says what run the checkpoints belong to. Orbax
writes a step under a temporary name, in a background thread, and renames it when it is complete, so a process killed at
any moment leaves every step whole or absent. A step that is damaged all the same (a full or failing disk) is set
aside under `damaged/`, and the one before it counts as the latest.
"""

import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from rl_adapter.files import write_atomically
from rl_adapter.types import PyTree

_MISSING = "(absent)"


def _named(tree: PyTree) -> dict[str, Any]:
    """{path: leaf}. Stored flat, a tree does not depend on how optax or flax nest their containers' classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves have one name"
    return named


def _filled(named: Mapping[str, Any]) -> dict[str, Any]:
    """Without leaves that have no elements: Orbax refuses them, and they hold no bits."""
    return {name: leaf for name, leaf in named.items() if math.prod(leaf.shape)}


def _flat(identity: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out = {}
    for key, value in identity.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: where they lie; made if absent.
      identity: what the run's bits depend on (base digest, config fields, package versions), as JSON; may be nested.
      every: a `save` without `force` is skipped unless its step is a multiple of this; 0 skips them all.
      keep: how many of the last steps are kept.
      read_only: touch nothing, for a reader beside a run that may be saving.
      override: go on although the identity differs, and record the new one.

    Raises:
      ValueError: the directory holds checkpoints of another identity; the message has each field with both values.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        identity: Mapping[str, Any],
        every: int,
        keep: int,
        override: bool = False,
        read_only: bool = False,
    ):
        if keep < 1 or every < 0:
            raise ValueError(f"checkpoint: found keep={keep}, every={every}, need keep >= 1 and every >= 0")
        self._directory = pathlib.Path(directory).absolute()
        self._every = every
        self._checked: set[int] = set()  # steps known to be readable
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in () if read_only else self._directory.glob("*.orbax-checkpoint-tmp*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={"tree": ocp.StandardCheckpointHandler(), "cursor": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, save_root_metadata=False, enable_async_checkpointing=True),
        )
        self._read_only = read_only
        self._check_identity(json.loads(json.dumps(identity)), override)
        # Written once something of it is there: a resume that fails leaves the checkpoints to the run that they are of.
        self._identity = None if read_only else json.dumps(identity, indent=1, sort_keys=True)

    def _record_identity(self) -> None:
        if self._identity is not None:
            write_atomically(self._directory / "identity.json", self._identity)
            self._identity = None

    def _check_identity(self, identity: dict, override: bool) -> None:
        path = self._directory / "identity.json"
        if self._manager.all_steps():
            try:
                old, new = _flat(json.loads(path.read_text())), _flat(identity)
            except (OSError, ValueError, AttributeError) as error:
                if override:
                    return
                raise ValueError(f"{path}: found {error}, need the identity of the checkpoints beside it, or --override_identity") from None
            differ = [k for k in sorted(old.keys() | new.keys()) if old.get(k, _MISSING) != new.get(k, _MISSING)]
            lines = [f"  {k}: the checkpoint has {old.get(k, _MISSING)!r}, this run {new.get(k, _MISSING)!r}" for k in differ]
            if differ and not override:
                need = "need the same base, config and packages, another --workdir, or --override_identity to go on regardless"
                raise ValueError("\n".join([f"checkpoint identity of {self._directory}: found {len(differ)} differences, {need}", *lines]))
            if differ:
                logging.warning("resuming despite another identity:\n%s", "\n".join(lines))

    def save(self, step: int, tree: PyTree, cursor: Mapping[str, Any], force: bool = False) -> bool:
        """Starts saving in the background; the arrays are copied before this returns, so they may be donated after.

        Args:
          step: number of the step; the number of steps done, by convention.
          tree: pytree of jax or numpy arrays.
          cursor: the rest of the state, as JSON (position in the data, say).
          force: save although `step` is not a multiple of `every`.

        Returns:
          Whether a save was started: not if it isn't due, or the step is there already.
        """
        due = force or (self._every and step % self._every == 0)
        if not due or step in self._manager.all_steps():
            return False
        self._checked.add(step)
        self._record_identity()
        args = ocp.args.Composite(tree=ocp.args.StandardSave(_filled(_named(tree))), cursor=ocp.args.JsonSave(dict(cursor)))
        return self._manager.save(step, args=args, force=True)

    def steps(self) -> list[int]:
        """The steps that are there, readable or not."""
        return sorted(self._manager.all_steps())

    def cursor(self, step: int) -> dict:
        """The cursor of a step alone."""
        return self._manager.restore(step, args=ocp.args.Composite(cursor=ocp.args.JsonRestore())).cursor

    def latest(self) -> int | None:
        """The last step that can be read in full, or None if there are no steps; damaged ones after it are set aside (of a reader,
        passed over).

        Raises:
          ValueError: there are steps, and none can be read. Starting over in silence would lose the run.
        """
        damaged = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                # Checked by reading: it happens once, at resume, and nothing less finds a truncated file.
                if step not in self._checked:
                    self._manager.restore(step, args=self._restore_args(self._stored(step)))
            except Exception as error:  # whatever a damaged file makes of Orbax, TensorStore or JSON
                damaged[step] = str(error).strip().split("\n")[0]
                continue
            self._checked.add(step)
            for bad, why in damaged.items():
                if self._read_only:
                    logging.warning("checkpoint of step %d cannot be read: %s", bad, why)
                else:
                    self._set_aside(bad, why)
            return step
        if damaged:
            found = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
            raise ValueError(f"checkpoints in {self._directory}: found none that can be read ({found}), need one, or another --workdir")
        return None

    def restore(self, step: int, template: PyTree) -> tuple[PyTree, dict]:
        """Reads a step, bit for bit, onto the template's shardings.

        Args:
          step: one that `latest` gave.
          template: pytree of arrays or ShapeDtypeStructs. A leaf comes back as numpy where the template's is numpy, else
            as a jax.Array on the leaf's sharding (the default device, if it names none).

        Raises:
          ValueError: leaves, shapes or dtypes differ from the checkpoint's.
        """
        named, have = _named(template), self._stored(step)
        want = _filled(named)
        for name in sorted(want.keys() | have.keys()):
            w, h = ((f"{x[name].dtype}{list(x[name].shape)}" if name in x else "nothing") for x in (want, have))
            if w != h:
                raise ValueError(f"checkpoint {self._directory / str(step)}: found {name} = {h}, need {w}")
        restored = self._manager.restore(step, args=self._restore_args(want))
        tree = jax.tree.unflatten(
            jax.tree.structure(template),
            [restored.tree[name] if name in want else jnp.zeros(x.shape, x.dtype) for name, x in named.items()],
        )
        self._record_identity()
        return tree, restored.cursor

    def wait(self) -> None:
        """Returns once the saves that were started are complete on disk; raises what went wrong in them."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and stops the background threads."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _stored(self, step: int) -> dict[str, np.ndarray]:
        """Shapes and dtypes of the saved leaves, as empty numpy arrays: a template that needs no device."""
        metadata = self._manager.item_metadata(step).tree
        if metadata is None:
            raise ValueError(f"checkpoint {self._directory / str(step)}: found no metadata, need a complete checkpoint")
        return {name: np.empty(m.shape, m.dtype) for name, m in metadata.items()}

    @staticmethod
    def _restore_args(template: Mapping[str, Any]) -> ocp.args.Composite:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def abstract(x):
            if isinstance(x, np.ndarray):
                return x
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or default)

        tree = {name: abstract(x) for name, x in template.items()}
        return ocp.args.Composite(tree=ocp.args.StandardRestore(tree), cursor=ocp.args.JsonRestore())

    def _set_aside(self, step: int, why: str) -> None:
        target = self._directory / "damaged" / f"{step}-{time.time_ns()}"
        target.parent.mkdir(exist_ok=True)
        logging.warning("checkpoint of step %d cannot be read and is set aside in %s: %s", step, target, why)
        os.rename(self._directory / str(step), target)
        self._manager.reload()
