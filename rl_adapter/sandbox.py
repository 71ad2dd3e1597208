"""Runs programs that nobody vouches for: what a model wrote, and what reads what a model wrote.

Inside there is no network; of files only the interpreter, the system's libraries and what the caller names, all read-only; one scratch
folder, in memory, of this program alone; and no other process. Wall and CPU time, memory, processes, output and disk are limited, and at a
limit, or when the trainer dies, every process of it ends.

Who makes the walls: `bubblewrap` where it works, else this package by itself (`sandbox_stage.py`: user, mount, process, network and IPC
namespaces). In both the stage drops all rights, sets the limits and filters system calls. Where root starts it, the program runs as a
user of its own without rights, since the kernel does not limit root's processes.
"""

import base64
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_adapter import sandbox_stage

KINDS = ("bubblewrap", "namespaces")  # in order of preference
SCRATCH, BROKEN = sandbox_stage.SCRATCH, sandbox_stage.BROKEN
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/alternatives", "/etc/localtime")
SYSTEM += ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
USERS = range(61184, 65184)  # numbers that distributions leave to users made on the fly
# Nothing of the trainer's own environment, which may hold tokens and passwords. One thread: a sample gets no more of the machine.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
ENVIRONMENT |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
_STAGE = "/.sandbox_stage.py"
_count = itertools.count(os.getpid())


@dataclasses.dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # of wall time; CPU seconds of each process follow from it
    memory_mb: int = 1024  # address space of each process
    processes: int = 16  # and threads, at a time
    output_kb: int = 1024  # of stdout, and of stderr
    disk_mb: int = 64  # of the scratch folder, and of a file

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"limits: found {field.name} = {getattr(self, field.name)!r}, need a number above 0")


@dataclasses.dataclass(frozen=True)
class Result:
    returncode: int  # 128 + its number where a signal ended it
    stdout: bytes
    stderr: bytes
    reason: str  # the limit that ended it, "time" or "output"; "": it ended by itself, or by a limit that the kernel kept


class Process(subprocess.Popen):
    """A sandboxed process. `kill` ends all that it started too."""

    lifeline: int = -1

    def kill(self) -> None:
        if self.lifeline >= 0:
            try:
                os.write(self.lifeline, b".")  # a fork of the trainer may hold the pipe open
            except BrokenPipeError:
                pass  # it has ended
            os.close(self.lifeline)
            self.lifeline = -1
        try:
            self.wait(5)
        except subprocess.TimeoutExpired:
            super().kill()
            self.wait()


def start(
    argv: Sequence[str],
    files: Mapping[str, bytes] = {},  # noqa: B006
    limits: Limits = Limits(),  # noqa: B008
    reads: Sequence[str] = (),
    kind: str | None = None,
    lasting: bool = False,
    **streams: Any,
) -> Process:
    """Starts a program in a sandbox; the caller keeps the clock, reads what it says, and must `kill` it in the end.

    Args:
      argv: an absolute path, and arguments.
      files: name -> content, put into the scratch folder, where the program starts.
      limits: of which wall time and output are the caller's to keep.
      reads: absolute paths, shown read-only beside the interpreter's and the system's.
      kind: one of `KINDS`; default: the first that works here.
      lasting: without a limit on CPU seconds, for a process that serves many requests.
      streams: `stdin`, `stdout`, `stderr` as of Popen; pipes if not given.
    """
    for name in files:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"files: found {name!r}, need names without a folder")
    kind = kind or _chosen()
    uid = USERS[next(_count) % len(USERS)] if os.getuid() == 0 else None
    numbers = dataclasses.asdict(limits) | {"cpu_s": None if lasting else int(limits.seconds) + 1}
    shown = _shown(reads)
    config = {"kind": kind, "uid": uid, "argv": list(argv), "env": ENVIRONMENT, "limits": numbers, "reads": shown, "devices": DEVICES}
    config["files"] = {name: base64.b64encode(data).decode() for name, data in files.items()}
    told = os.memfd_create("sandbox")
    held, lifeline = os.pipe()
    try:
        with os.fdopen(os.dup(told), "wb") as file:
            file.write(json.dumps(config).encode())
        command = _bubblewrap(limits, shown, uid) if kind == "bubblewrap" else []
        stage = _STAGE if kind == "bubblewrap" else sandbox_stage.__file__
        command = [*command, sys.executable, "-I", "-S", stage, str(told), str(held)]
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")} | streams
        process = Process(command, pass_fds=(told, held), cwd="/", **pipes)
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(told)
        os.close(held)
    process.lifeline = lifeline
    return process


def run(
    argv: Sequence[str],
    files: Mapping[str, bytes] = {},  # noqa: B006
    stdin: bytes = b"",
    limits: Limits = Limits(),  # noqa: B008
    reads: Sequence[str] = (),
    kind: str | None = None,
) -> Result:
    """Runs a program to its end, or to a limit. Arguments as of `start`."""
    deadline = time.monotonic() + limits.seconds
    process = start(argv, files, limits, reads, kind)
    try:
        output, reason = _converse(process, stdin, limits.output_kb * 1024, deadline)
        if not reason:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                reason = "time"
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            _close(stream)
    return Result(process.returncode, bytes(output[process.stdout]), bytes(output[process.stderr]), reason)


def read(process: Process, stream: Any, most: int, deadline: float) -> tuple[bytes, str]:
    """What a process says on one of its streams until it closes it, and the limit that was met, if any."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(stream, selectors.EVENT_READ)
        found = b""
        while len(found) <= most:
            if not waiting.select(max(0, deadline - time.monotonic())):
                return found, "time"
            piece = os.read(stream.fileno(), 65536)
            if not piece:
                return found, ""
            found += piece
    return found[:most], "output"


def _converse(process: Process, stdin: bytes, most: int, deadline: float) -> tuple[dict, str]:
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    left = memoryview(stdin)
    with selectors.DefaultSelector() as waiting:
        for stream in output:
            waiting.register(stream, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        waiting.register(process.stdin, selectors.EVENT_WRITE)
        while waiting.get_map():
            ready = waiting.select(max(0, deadline - time.monotonic()))
            if not ready:
                return output, "time"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        left = left[os.write(key.fd, left[:65536]) :] if left else left
                    except BrokenPipeError:
                        left = left[:0]  # what it never read
                    if not left:
                        waiting.unregister(key.fileobj)
                        _close(key.fileobj)
                    continue
                piece = os.read(key.fd, 65536)
                output[key.fileobj] += piece
                if not piece:
                    waiting.unregister(key.fileobj)
                elif len(output[key.fileobj]) > most:
                    del output[key.fileobj][most:]
                    return output, "output"
    return output, ""


def _close(stream) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        pass


def python_paths() -> tuple[str, ...]:
    """The interpreter and the packages installed for it."""
    packages = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
    return tuple(dict.fromkeys([sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *packages]))


def _shown(reads: Sequence[str]) -> list[tuple[str, str]]:
    """(where it lies, where it is shown), folders before what lies in them."""
    paths = {path for path in (*SYSTEM, *python_paths(), *reads) if path != "/" and os.path.exists(path)}
    paths = {inside for path in paths for inside in _open_to_all(path)}
    return [(os.path.realpath(path), path) for path in sorted(paths, key=lambda p: (p.count("/"), p))]


def _open_to_all(path: str) -> list[str]:
    """The path; of a folder that only its owner may enter, such as one of `mktemp -d`, what lies in it: the program is another user."""
    closed = os.path.isdir(path) and os.stat(path).st_mode & 0o005 != 0o005
    return [os.path.join(path, name) for name in os.listdir(path)] if closed else [path]


def _bubblewrap(limits: Limits, shown: list[tuple[str, str]], uid: int | None) -> list[str]:
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1"]
    command += ["--new-session", "--clearenv"]
    if uid is None:
        command += ["--unshare-user"]
    else:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # for the stage, to become another user
    command += ["--proc", "/proc", "--perms", "1777", "--size", str(limits.disk_mb * 2**20), "--tmpfs", SCRATCH]
    folders = {str(folder) for path in (*DEVICES, *(target for _, target in shown)) for folder in pathlib.PurePath(path).parents}
    for folder in sorted(folders - {"/", SCRATCH}, key=lambda path: path.count("/")):
        command += ["--perms", "0755", "--dir", folder]  # those that it makes by itself are closed to the program's user
    for source, target in (*shown, (os.path.realpath(sandbox_stage.__file__), _STAGE)):
        command += ["--ro-bind", source, target]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    return [*command, "--symlink", SCRATCH, "/dev/shm", "--remount-ro", "/", "--"]


# Which kind


@functools.cache
def trouble(kind: str) -> str:
    """Why a kind of sandbox does not work here, found by running one; "" if it works."""
    if kind == "bubblewrap" and not shutil.which("bwrap"):
        return "no program bwrap"
    try:
        found = run([sys.executable, "-I", "-S", "-c", "print(6 * 7)"], limits=Limits(seconds=10), kind=kind)
    except (OSError, KeyError) as error:
        return str(error)
    said = found.stderr.decode(errors="replace").strip()
    return "" if (found.returncode, found.stdout) == (0, b"42\n") else said or f"exit code {found.returncode} {found.reason}".strip()


@functools.cache
def _chosen() -> str:
    for kind in KINDS:
        if not trouble(kind):
            return kind
    found = "; ".join(f"{kind}: {trouble(kind)}" for kind in KINDS)
    need = "bubblewrap (apt-get install bubblewrap), or a kernel (5.12 or newer) and a container that allow user namespaces"
    raise ValueError(f"sandbox: found none that works ({found}), need {need}")


def describe() -> str:
    """Which sandbox is in use. Raises a ValueError that says what to install where none works."""
    kind = _chosen()
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout if kind == "bubblewrap" else ""
    number = re.search(r"[\d.]+", version)
    made = f"bubblewrap {number[0]}" if number else "user namespaces, made by this package"
    return f"sandbox: {made}" + (", as users without rights" if os.getuid() == 0 else "")
