"""Every change of a run's samples is seen, and what no change is is not."""

import json
import re
import shutil

import numpy as np
import pytest
from test_manifest import STEPS, contents, rules, train
from test_samples import IDENTITY

from rl_adapter import audit, checkpoint, manifest
from rl_adapter import config as configs


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


def swap(directory, a, b):
    x, y = (directory / manifest.name(step) for step in (a, b))
    one, other = x.read_bytes(), y.read_bytes()
    x.write_bytes(other), y.write_bytes(one)


def relinked(raw):
    """A manifest whose every line is made to follow the one before."""
    out, previous = [], manifest.NOTHING
    for line in raw.splitlines():
        out.append(json.dumps(json.loads(line) | {"previous": previous}).encode())
        previous = manifest.Line(out[-1], {}).hash
    return b"\n".join(out) + b"\n"


def lines_of(directory, change):
    """`change` of the list of lines."""
    edit(directory / manifest.NAME, lambda raw: b"\n".join(change(raw.splitlines())) + b"\n")


FILE3, NAME = manifest.name(3), re.escape(manifest.NAME)
CHANGES = {
    "edited": (lambda d: edit(d / FILE3, lambda x: x[:99] + bytes([x[99] ^ 1]) + x[100:]), f"^{FILE3}: found .* bytes with SHA-256"),
    "cut": (lambda d: edit(d / FILE3, lambda x: x[:-1]), f"^{FILE3}: found"),
    "longer": (lambda d: edit(d / FILE3, lambda x: x + b"\0"), f"^{FILE3}: found"),
    "swapped": (lambda d: swap(d, 2, 3), f"^{FILE3}: found what was written as 000002"),
    "missing": (lambda d: (d / FILE3).unlink(), f"^{FILE3}: found none"),
    "a directory": (lambda d: ((d / FILE3).unlink(), (d / FILE3).mkdir()), f"^{FILE3}: found none"),
    "extra": (lambda d: (d / manifest.name(9)).write_bytes(b""), "^000009.parquet: found a file that no line is of"),
    "a later one": (
        lambda d: (d / manifest.name(STEPS + 3)).write_bytes(b""),
        f"^{manifest.name(STEPS + 3)}: found a file that no line is of",
    ),
    "stray": (lambda d: (d / "notes").write_bytes(b""), "^notes: found a file that no line is of"),
    "removed with its line": (
        lambda d: ((d / FILE3).unlink(), lines_of(d, lambda x: x[:4] + x[5:])),
        f"^{NAME}: line 5: found .* for the line before it",
    ),
    "reordered": (lambda d: lines_of(d, lambda x: [*x[:3], x[4], x[3], *x[5:]]), f"^{NAME}: line 4: found"),
    "an edited line": (lambda d: edit(d / manifest.NAME, lambda x: x.replace(b'"rows": 2', b'"rows": 3', 1)), f"^{NAME}: line 3: found"),
    "an edited last line": (lambda d: lines_of(d, lambda x: [*x[:-1], x[-1].replace(b'"rows": 2', b'"rows": 3')]), f"^{NAME}: found head"),
    "no JSON": (lambda d: lines_of(d, lambda x: [x[0], b"{", *x[2:]]), f"^{NAME}: line 2: found no JSON"),
    "deep JSON": (lambda d: lines_of(d, lambda x: [x[0], b"[" * 10**5, *x[2:]]), f"^{NAME}: line 2: found no JSON"),
    "another path": (
        lambda d: lines_of(d, lambda x: [one.replace(FILE3.encode(), b"../../a") for one in x]),
        f"^{NAME}: line 5: .*not the name",
    ),
    "wrong types": (lambda d: lines_of(d, lambda x: [one.replace(b'"rows": 2', b'"rows": -2') for one in x]), f"^{NAME}: line 2: .*types"),
    "no last line": (
        lambda d: (lines_of(d, lambda x: x[:-1]), (d / manifest.name(STEPS - 1)).unlink()),
        f"^{NAME}: found head .*, need .* of (that checkpoint|summary)",
    ),
    "no end of the last line": (lambda d: edit(d / manifest.NAME, lambda x: x[:-1]), f"^{NAME}: line 6: found a line without an end"),
    "a whole other chain": (
        lambda d: ((d / FILE3).unlink(), edit(d / manifest.NAME, lambda x: relinked(b"\n".join(x.splitlines()[:4] + x.splitlines()[5:])))),
        f"^{NAME}: found head .* after 4 steps",
    ),
    "nothing": (lambda d: (d / manifest.NAME).write_bytes(b""), f"^{NAME}: found head none"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run's directory of samples, and its heads."""
    directory, saved = tmp_path_factory.mktemp("whole") / "samples", {}
    train(directory, saved, rules())
    return directory, audit.Heads(manifest.head(directory), saved)


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_seen(whole, tmp_path, what):
    directory, heads = whole
    for name, data in contents(directory).items():
        (tmp_path / name).write_bytes(data)
    assert audit.verify(tmp_path, heads) == ([], [])
    change, needed = CHANGES[what]
    change(tmp_path)
    faults, left = audit.verify(tmp_path, heads)
    assert any(re.search(needed, fault) for fault in faults), faults
    assert not left


@pytest.fixture
def run(whole, tmp_path):
    """The directory of a finished run: as much of it as an audit reads."""
    source, heads = whole
    (tmp_path / "samples").mkdir()
    for name, data in contents(source).items():
        (tmp_path / "samples" / name).write_bytes(data)
    about = {"config": configs.plain(configs.default()), "base_digest": IDENTITY["base_digest"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(STEPS)))
    (tmp_path / "summary.json").write_text(json.dumps({"samples/head": heads.final}))
    with checkpoint.Checkpoints(tmp_path / "checkpoints", IDENTITY, 1, 2) as saved:
        for step, head in heads.checkpoints.items():
            saved.save(step, {"x": np.zeros(1)}, {"samples": head}, force=True)
    return tmp_path


def rewrite(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_audit_of_a_whole_run(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = audit.run(run)
    assert (found["files"], found["rows"], found["removed"], found["faults"]) == (STEPS, 2 * STEPS, 0, [])
    assert found["checkpoints"] == [4, 5] and found["finished"] and found["head"] in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "an audit reads"


def damage_cursors(run):
    for path in (run / "checkpoints" / "4" / "cursor").rglob("*"):
        if path.is_file():
            path.write_text("{")


def take_the_end_away(run):
    """The last step's samples, and all that tells of them but the metrics."""
    lines_of(run / "samples", lambda x: x[:-1])
    (run / "samples" / manifest.name(STEPS - 1)).unlink()
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")


CHANGES_OF_THE_RUN = {
    "samples": (lambda run: edit(run / "samples" / FILE3, lambda x: x[:-1]), FILE3),
    "summary": (lambda run: rewrite(run / "summary.json", **{"samples/head": "x"}), "need x of summary.json"),
    "no head": (lambda run: (run / "summary.json").write_text("{}"), "need none of summary.json"),
    **{
        f"a head that is {head!r}": (
            lambda run, head=head: rewrite(run / "summary.json", **{"samples/head": head}),
            "found samples/head = ",
        )
        for head in (None, 3, ["x"])
    },
    "no identity": (lambda run: (run / "checkpoints/identity.json").unlink(), "identity.json: found none beside checkpoints of 4, 5 steps"),
    "an identity of another shape": (lambda run: (run / "checkpoints/identity.json").write_text('{"config": []}'), "identity.json: found"),
    "no end and no heads": (take_the_end_away, "found samples up to step 3, need those of step 4 of metrics.jsonl"),
    "no metrics": (lambda run: (run / "metrics.jsonl").write_text("{\n"), "metrics.jsonl: found no steps"),
    "no JSON": (lambda run: (run / "summary.json").write_text("{"), "summary.json: found .* need JSON"),
    "base": (lambda run: rewrite(run / "config.json", base_digest="c"), "config.json: found base c, need b"),
    "config": (
        lambda run: rewrite(run / "config.json", config=json.loads((run / "config.json").read_text())["config"] | {"seed": 9}),
        "found seed = 9",
    ),
    "identity": (lambda run: rewrite(run / "checkpoints/identity.json", packages={}), "identity.json: found another run"),
    "no config": (lambda run: (run / "config.json").unlink(), "config.json: found .* need JSON"),
    "cursor": (damage_cursors, "checkpoints/4: found no cursor"),
    "all of it replaced": (lambda run: (manifest.rewind(run / "samples", 0, {}), train(run / "samples", {}, rules(keep=1))), "found head"),
}


@pytest.mark.parametrize("what", CHANGES_OF_THE_RUN)
def test_every_change_of_the_rest_is_seen(run, what):
    change, needed = CHANGES_OF_THE_RUN[what]
    change(run)
    with pytest.raises(ValueError, match=f"^samples of .*: found [0-9]+ faults, (.|\n)*{needed}"):
        audit.run(run)


def test_a_run_without_samples_is_told(tmp_path):
    with pytest.raises(ValueError, match="^--workdir: found no manifest.jsonl"):
        audit.run(tmp_path)
