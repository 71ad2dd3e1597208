"""No sample is lost or doubled whenever a run is killed, and files that retention takes away are told."""

import os
import random

import pytest
from test_samples import ALL, RUN, rules, table_of

from rl_adapter import audit, manifest, samples


class Killed(BaseException):
    pass


class Machine:
    """Counts what reaches the disk, and is dead from the n-th such call on; a write then has got half of its bytes there."""

    def __init__(self, patch):
        self.left = 10**9
        for function in ("open", "write", "replace", "unlink", "mkdir", "chmod", "fsync"):
            patch.setattr(os, function, self._mortal(function, getattr(os, function)))

    def _mortal(self, function, real):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left < 0 or (self.left == 0 and function != "write"):
                raise Killed
            if self.left == 0:
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise Killed
            return None if function == "fsync" else real(*args, **kwargs)  # no machine crashes here

        return call


STEPS, EVERY = 5, 2
TABLES = {step: table_of(1, step, p=1, g=2)[0] for step in range(STEPS)}


def train(directory, saved, how):
    """A trainer: `saved` are its checkpoints, {steps done: head}, which outlive it."""
    start = max(saved, default=0)
    manifest.rewind(directory, start, RUN, saved.get(start))
    for step in range(start, STEPS):
        head = samples.write(directory, step, TABLES[step], how)
        assert head == manifest.head(directory)
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            saved[step + 1] = head


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def finished(directory, saved):
    return audit.verify(directory, audit.Heads(manifest.head(directory), saved))


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.mark.parametrize("how", [rules(), rules(keep=2), rules(keep=1, keep_every=3)], ids=["all", "last", "some"])
def test_a_run_killed_anywhere_loses_and_doubles_nothing(tmp_path, machine, how):
    """At every call that touches the disk, and once more at a random one."""
    before = machine.left
    train(tmp_path / "whole", {}, how)
    calls, whole = before - machine.left, contents(tmp_path / "whole")
    assert calls > 50
    for n in range(1, calls + 1):
        directory, saved = tmp_path / "run" / str(n), {}
        for last in (n, random.randrange(1, 40), None):
            machine.left = last or 10**9
            try:
                train(directory, saved, how)
                break
            except Killed:
                machine.left = 10**9
                if (directory / manifest.NAME).exists():
                    faults, _ = audit.verify(directory, audit.Heads(None, saved))
                    assert not faults, (n, last, faults)
        machine.left = 10**9
        assert finished(directory, saved) == ([], []), n
        found = contents(directory)
        if not how.keep:
            assert found == whole, n
        assert found.keys() == whole.keys() and all(found[k] == whole[k] for k in whole if k != manifest.NAME), n
        for path in directory.iterdir():
            os.unlink(path)


def test_a_manifest_cut_anywhere_in_its_last_line_goes_on(tmp_path):
    train(tmp_path, {}, rules())
    whole = contents(tmp_path)
    raw = whole[manifest.NAME]
    for n in range(raw[:-1].rindex(b"\n") + 1, len(raw)):
        (tmp_path / manifest.NAME).write_bytes(raw[:n])
        assert not audit.verify(tmp_path, audit.Heads())[0], n
        manifest.rewind(tmp_path, STEPS - 1, RUN)
        samples.write(tmp_path, STEPS - 1, TABLES[STEPS - 1], ALL)
        assert contents(tmp_path) == whole, n


def test_retention_keeps_the_last_and_every_so_many(tmp_path):
    train(tmp_path / "samples", saved := {}, rules(keep=1, keep_every=3))
    there = [0, 3, 4]
    assert sorted(set(samples.read(tmp_path)["step"].to_pylist())) == there
    assert [line.entry["removed"] for line in manifest.lines(tmp_path / "samples") if "removed" in line.entry] == [
        manifest.name(step) for step in range(STEPS) if step not in there
    ]
    assert finished(tmp_path / "samples", saved) == ([], [])


def test_a_step_needs_a_rewind_and_a_checkpoint_its_chain(tmp_path):
    with pytest.raises(ValueError, match="found 0 lines .*need a rewind"):
        samples.write(tmp_path, 0, TABLES[0], ALL)
    train(tmp_path, saved := {}, rules())
    with pytest.raises(ValueError, match="need a rewind"):
        samples.write(tmp_path, 3, TABLES[3], ALL)
    whole = contents(tmp_path)
    with pytest.raises(ValueError, match="found head .* need other as in the checkpoint of step 4"):
        manifest.rewind(tmp_path, 4, RUN, "other")
    assert contents(tmp_path) == whole, "nothing was changed"
    manifest.rewind(tmp_path, 4, RUN | {"identity": "new"}, saved[4])
    assert manifest.lines(tmp_path)[-1].entry["run"] == RUN | {"identity": "new"}
    manifest.rewind(tmp_path, 6, RUN)
    assert manifest.lines(tmp_path)[-1].entry == {"previous": manifest.lines(tmp_path)[-2].hash, "step": 6, "run": RUN}
    samples.write(tmp_path, 6, TABLES[0], ALL)
    assert finished(tmp_path, {}) == ([], []), "steps that were not kept are no fault"
