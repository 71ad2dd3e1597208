"""Nothing that runs inside gets out, sees another's files, or outlives its limits; in every kind of sandbox that works here."""

import dataclasses
import gzip
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from rl_adapter import sandbox

BOMB = gzip.compress(bytes(10**7)) * 50  # of 0.5 GB
LIMITS = sandbox.Limits(seconds=10.0, memory_mb=256, processes=8, output_kb=64, disk_mb=8)
SHORT = dataclasses.replace(LIMITS, seconds=0.7)


@pytest.fixture(params=sandbox.KINDS)
def kind(request):
    if why := sandbox.trouble(request.param):
        pytest.skip(f"{request.param} does not work here: {why}")
    return request.param


def python(source, kind, stdin=b"", limits=LIMITS, files={}, reads=()):  # noqa: B006
    return sandbox.run([sys.executable, "-I", "-c", source], files, stdin, limits, reads, kind)


def refused(source, kind, **more):
    """Runs lines each of which must raise; what it says is the ones that did not."""
    body = "".join(f"try:\n    {line}\n    print({line!r})\nexcept (OSError, MemoryError, RuntimeError): pass\n" for line in source)
    found = python("import ctypes, os, socket, threading\nlibc = ctypes.CDLL(None, use_errno=True)\n" + body, kind, **more)
    assert (found.returncode, found.stdout, found.reason) == (0, b"", ""), found
    return found


def test_a_program_gets_its_files_and_input_and_gives_its_output(kind):
    source = "import sys\nprint(open('a').read(), input(), flush=True)\nprint('error', file=sys.stderr)\nsys.exit(7)"
    found = python(source, kind, b"in\n", files={"a": b"file"})
    assert found == sandbox.Result(7, b"file in\n", b"error\n", "")
    assert python("import os; os.kill(os.getpid(), 11)", kind).returncode == 128 + 11
    large = os.urandom(60_000)
    assert python("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", kind, large).stdout == large
    assert python("pass", kind, b"x" * 10**6).returncode == 0  # input that it never reads


def test_only_the_scratch_folder_can_be_written(kind, tmp_path):
    targets = ["/x", "/usr/x", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname", f"{sys.prefix}/x", f"{tmp_path}/x", "/.sandbox_stage.py"]
    refused([f"open({target!r}, 'w').write('x')" for target in targets], kind, reads=[str(tmp_path)])
    assert not list(tmp_path.iterdir()) and not os.path.exists("/tmp/mine")
    assert python("open('/tmp/mine', 'w').write('x'); print(open('mine').read())", kind).stdout == b"x\n"
    assert not os.path.exists("/tmp/mine")


def test_nothing_of_others_can_be_read(kind, tmp_path, monkeypatch):
    """Nor of the trainer: its folders, home, environment, processes; by a link neither."""
    monkeypatch.setenv("SECRET_TOKEN", "xyzzy")
    (tmp_path / "secret").write_text("xyzzy")
    hidden = [
        str(tmp_path / "secret"),
        os.getcwd(),
        "/etc/passwd",
        "/run",
        "/var",
        "/home",
        f"/proc/{os.getpid()}/environ",
        "/proc/1/environ",
    ]
    hidden += ["/proc/1/mem", "/proc/1/root/etc", "/proc/1/fd"]
    refused([f"os.listdir({h!r}) if os.path.isdir({h!r}) else open({h!r}).read()" for h in hidden], kind)
    refused(["os.symlink('/etc/passwd', 'link'); open('link').read()"], kind)
    found = python("import os; print(dict(os.environ)); print(sorted(p for p in os.listdir('/proc') if p.isdigit()))", kind)
    environment, processes = found.stdout.decode().splitlines()
    assert "xyzzy" not in environment and eval(environment) == sandbox.ENVIRONMENT and eval(processes) == ["1", "2"]
    assert python("print(open('seen').read())", kind, files={"seen": b"1"}).stdout == b"1\n"
    assert python("open('seen')", kind).returncode == 1  # what another had is gone


def test_there_is_no_network_and_no_way_to_more_rights(kind):
    refused(
        [
            "socket.create_connection(('127.0.0.1', 22), 0.2)",
            "socket.socket(socket.AF_INET)",
            "socket.socket(socket.AF_INET6)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket(40, socket.SOCK_STREAM)",  # vsock: to the host of a virtual machine
            "os.chroot('/tmp')",
            "os.memfd_create('x')",
        ],
        kind,
    )
    calls = [
        "unshare(0x10000000)",
        "unshare(0x20000)",
        "mount(b'x', b'/tmp', b'tmpfs', 0, None)",
        "ptrace(16, 1, 0, 0)",
        "shmget(0, 4096, 0o1600)",
    ]
    calls += ["syscall(56, 0x10000011, 0, 0, 0, 0)", "syscall(435, 0, 0)", "syscall(425, 1, 0)", "syscall(250, 0, 0)", "setns(0, 0)"]
    calls = calls if os.uname().machine == "x86_64" else calls[:5]
    source = "import ctypes\nlibc = ctypes.CDLL(None)\n" + "".join(f"print(libc.{call})\n" for call in calls)
    names = ["CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp"]
    source += f"rights = dict(line.split(None, 1) for line in open('/proc/self/status') if line.split(':')[0] in {names})\n"
    source += f"print(*[rights[name + ':'].strip() for name in {names}])"
    said = python(source, kind).stdout.decode().split()
    assert said[: len(calls)] == ["-1"] * len(calls) and [int(x, 16) for x in said[len(calls) :]] == [0, 0, 0, 1, 2]


def test_the_supervisor_cannot_be_killed(kind):
    found = python(
        "import os, signal\nfor s in (9, 15, 19, 2): os.kill(1, s) if os.getuid() == os.stat('/proc/1').st_uid else None\nprint('on')", kind
    )
    assert found.stdout == b"on\n" and not found.returncode


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "deaf": "import signal, time\nfor s in range(1, 30):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\ntime.sleep(60)",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "orphans": "import os, time\nif os.fork(): time.sleep(60)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(60)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_the_endless_end_with_all_they_started(kind, name):
    before = inside()
    started = time.monotonic()
    found = python(ENDLESS[name], kind, limits=SHORT)
    assert found.reason == "time" and time.monotonic() - started < SHORT.seconds + 1
    assert wait_until(lambda: inside() <= before), "processes are left"


def inside() -> set:
    """Host pids of all processes in another process namespace than this one."""
    mine, found = os.readlink("/proc/self/ns/pid"), set()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns/pid") != mine:
                found.add(path.name)
        except OSError:
            pass
    return found


def wait_until(holds, seconds=3.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize(
    "source",
    [
        "x = bytearray(10**9)",
        "x = []\nwhile True: x.append('x' * 10**6)",
        "import gzip; gzip.decompress(open('bomb', 'rb').read())",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "9**9**9",
        "open('big', 'wb').write(bytes(10**7))",
        "for i in range(99): open(str(i), 'wb').write(bytes(10**6))",
        "open('hole', 'wb').truncate(10**12)",
        "import os\nwhile True: os.open('/dev/zero', 0)",
        "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    ],
    ids=["array", "list", "zip bomb", "recursion", "power", "file", "files", "hole", "descriptors", "threads"],
)
def test_the_greedy_fail(kind, source):
    started = time.monotonic()
    found = python(source, kind, limits=SHORT, files={"bomb": BOMB})
    assert (found.returncode or found.reason == "time") and time.monotonic() - started < SHORT.seconds + 1
    assert python("print(1)", kind).stdout == b"1\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut(kind, stream):
    found = python(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", kind)
    assert found.reason == "output" and getattr(found, stream) == b"x" * (LIMITS.output_kb * 1024)


def test_a_fork_bomb_slows_nobody_beyond_its_limit(kind):
    bomb = threading.Thread(target=python, args=(ENDLESS["fork bomb"], kind), kwargs={"limits": SHORT})
    bomb.start()
    found = [
        python("import os; os.wait() if os.fork() else print(1)", kind, limits=dataclasses.replace(LIMITS, processes=4)) for _ in range(3)
    ]
    bomb.join()
    assert [one.stdout for one in found] == [b"1\n"] * 3


def test_many_run_at_a_time_and_get_their_own(kind):
    found = {}

    def ask(n):
        found[n] = [python("print(input())", kind, f"{n}:{i}".encode()).stdout for i in range(3)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {n: [f"{n}:{i}\n".encode() for i in range(3)] for n in range(3)}


def test_what_runs_ends_with_the_trainer(kind):
    """However that ends."""
    before = inside()
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    source = f"from rl_adapter import sandbox\nimport time\nsandbox.start({sleeps}, kind={kind!r}, lasting=True)\n"
    source += "print(flush=True)\ntime.sleep(60)"
    environment = {"PYTHONPATH": os.getcwd(), "PATH": os.environ["PATH"]}
    trainer = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, env=environment)
    trainer.stdout.readline()
    assert wait_until(lambda: inside() - before)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_until(lambda: inside() <= before)


def test_inputs_are_checked_and_a_missing_program_says_so(kind):
    for name in ("../x", "a/b", "", ".", "a\0"):
        with pytest.raises(ValueError, match="files: found .* need names"):
            sandbox.run(["/bin/true"], files={name: b""}, kind=kind)
    for bad in ({"seconds": 0}, {"memory_mb": -1}, {"processes": float("nan")}):
        with pytest.raises(ValueError, match=f"limits: found {next(iter(bad))}"):
            sandbox.Limits(**bad)
    found = sandbox.run(["/no/program"], kind=kind)
    assert found.returncode == sandbox.BROKEN and found.stderr.startswith(b"sandbox: /no/program")


def test_without_a_sandbox_that_works_there_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sandbox, "trouble", lambda kind: "not today")
    sandbox._chosen.cache_clear()
    with pytest.raises(
        ValueError, match="sandbox: found none that works .bubblewrap: not today; namespaces: not today., need bubblewrap .apt-get"
    ):
        sandbox.describe()
    sandbox._chosen.cache_clear()


def test_an_interpreter_in_a_folder_of_its_owner_alone(kind, tmp_path):
    """As in a virtual environment that `mktemp -d` made the folder of: what only root may enter, the program's user must read."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "open").mkdir()
    (closed / "open/said").write_text("hello")
    found = sandbox.run(["/bin/cat", str(closed / "open/said")], reads=[str(closed)], kind=kind)
    assert found.stdout == b"hello"
