"""What runs inside a sandbox before the untrusted program, and beside it until it ends. `sandbox.py` runs it as a script.

    python -I -S sandbox_stage.py CONFIG LIFELINE

Both are file descriptors: JSON that says what to run, and a pipe of which the trainer holds the other end. As process 1 of a process
namespace it ends with the program, or once the pipe closes or says so; with it the kernel ends every process of the namespace, whatever
they did to hide. Processes inside cannot signal it, and its memory is not theirs to read.
"""

import base64
import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys

SCRATCH = "/tmp"
BROKEN = 125  # exit code where the sandbox itself could not be made
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount, uts, ipc, user, pid, net
BIND, RECURSIVE, PRIVATE, NOSUID, NODEV, NOEXEC, DETACH = 4096, 16384, 1 << 18, 2, 4, 8, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442

# Calls that no solution to a task needs and that reach around the limits: other namespaces and mounts, other processes' memory, memory
# that no limit counts (System V and POSIX queues, memfd), keys, and the parts of the kernel with the longest history of holes.
DENIED = {
    "x86_64": (29, 64, 68, 101, 103, 155, 161, 163, 165, 166, 167, 168, 172, 173, 175, 176, 179, 237, 238, 240, 246, 248, 249, 250, 256)
    + (272, 279, 298, 300, 303, 304, 308, 310, 311, 312, 313, 319, 320, 321, 323),
    "aarch64": (39, 40, 41, 51, 60, 89, 97, 104, 105, 106, 116, 117, 180, 186, 190, 194, 217, 218, 219, 224, 225, 235, 237, 238, 239)
    + (241, 262, 264, 265, 268, 270, 271, 272, 273, 279, 280, 282, 294),
}
DENIED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 443, 447)  # io_uring, the newer mount calls, pidfd_getfd, ...
CLONE, SOCKET = {"x86_64": 56, "aarch64": 220}, {"x86_64": 41, "aarch64": 198}
CLONE3 = 435
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def call(name, *args):
    if getattr(LIBC, name)(*args) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def mount(source, target, kind, flags, options=None):
    encoded = [x.encode() if x is not None else None for x in (source, target, kind)]
    call("mount", *encoded, ctypes.c_ulong(flags), options.encode() if options else None)


def pivot(new, old):
    call("syscall", PIVOT_ROOT[platform.machine()], new.encode(), old.encode())


def read_only(path):
    """With every mount below it."""
    attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)  # read only, nosuid, nodev
    call("syscall", MOUNT_SETATTR, -100, path.encode(), 0x8000, attributes, len(attributes))


def filter_calls():
    """Installs the filter of system calls (seccomp, classic BPF over `struct seccomp_data`)."""
    machine = platform.machine()
    load, equal, at_least, masked, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill, refuse, absent = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
    code = [(load, 0, 0, 4), (equal, 1, 0, AUDIT[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # x32
    for number in DENIED[machine] + DENIED_EVERYWHERE:
        code += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    code += [(equal, 0, 1, CLONE3), (give, 0, 0, absent)]  # its flags lie in memory; libc then takes clone
    code += [(equal, 0, 4, CLONE[machine]), (load, 0, 0, 16), (masked, 0, 0, NEW_NAMESPACES | 0x02000000)]
    code += [(equal, 1, 0, 0), (give, 0, 0, refuse), (load, 0, 0, 0)]
    # Only Unix sockets: a network namespace does not cover vsock, and the other families are of no use.
    code += [(equal, 0, 3, SOCKET[machine]), (load, 0, 0, 16), (equal, 1, 0, 1), (give, 0, 0, refuse), (give, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    call("prctl", 22, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0))


def enter(config):
    """Into new namespaces, as process 1 of them, with a root of only what `config` names. Those outside wait, and end as it ends."""
    ready, go = os.pipe(), os.pipe()
    outside = os.getuid(), os.getgid()
    child = os.fork()
    if child:
        os.close(ready[1])
        if os.read(ready[0], 1):
            maps(child, outside, config["uid"])
            os.write(go[1], b".")
        leave_with(child)
    call("unshare", NEW_NAMESPACES)
    os.write(ready[1], b".")
    os.close(go[1])
    if not os.read(go[0], 1):
        os._exit(BROKEN)
    child = os.fork()
    if child:
        leave_with(child)
    for end in (*ready, go[0]):
        os.close(end)
    new_root(config)


def maps(child, outside, uid):
    """User and group numbers inside: the own one, and where root started this, number 1 for `uid`, which has no rights."""
    with open(f"/proc/{child}/setgroups", "w") as file:
        file.write("deny" if uid is None else "allow")
    for name, own in zip(("uid_map", "gid_map"), outside):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"{own} {own} 1\n" + ("" if uid is None else f"1 {uid} 1\n"))


def leave_with(child):
    os.closerange(0, 3)
    status = os.waitpid(child, 0)[1]
    os._exit(code_of(status))


def code_of(status):
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def new_root(config):
    mount(None, "/", None, RECURSIVE | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old"), os.mkdir("/tmp/new")
    pivot("/tmp", "/tmp/old")
    os.chdir("/")
    mount("tmpfs", "/new", "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    os.umask(0o022)
    scratch = f"/new{SCRATCH}"
    os.makedirs(scratch)
    mount("tmpfs", scratch, "tmpfs", NOSUID | NODEV, f"mode=1777,size={config['limits']['disk_mb']}m,nr_inodes=20000")
    for source, target in config["reads"]:
        bind(f"/old{source}", f"/new{target}")
        read_only(f"/new{target}")
    for device in config["devices"]:
        bind(f"/old{device}", f"/new{device}")
    os.symlink(SCRATCH, "/new/dev/shm")
    os.mkdir("/new/proc")
    try:
        mount("proc", "/new/proc", "proc", NOSUID | NODEV | NOEXEC)
    except PermissionError:
        pass  # where a container hides parts of its own /proc, none can be had
    call("umount2", b"/old", DETACH)
    os.chdir("/new")
    pivot(".", ".")
    call("umount2", b".", DETACH)
    os.chdir("/")
    attributes = struct.pack("QQQQ", 1, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, -100, b"/", 0, attributes, len(attributes))


def bind(source, target):
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a").close()
    mount(source, target, None, BIND | RECURSIVE)


def become_untrusted(config):
    """In the process that will be the program: no rights, no way to get any, and limits that hold for all it starts."""
    limits, uid = config["limits"], config["uid"]
    os.setsid()
    if uid is not None:
        inside = 1 if config["kind"] == "namespaces" else uid
        os.setgroups([])
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
    mb = 2**20
    for what, most in (
        (resource.RLIMIT_AS, limits["memory_mb"] * mb),
        (resource.RLIMIT_NPROC, limits["processes"] + (uid is None)),  # of root's sandboxes, this process is not the program's user
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * mb),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = hard if most is None else most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    call("prctl", 38, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))  # no new privileges
    filter_calls()


def supervise(config, lifeline):
    """Starts the program and ends with it, or with the lifeline."""
    call("prctl", 4, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))  # not dumpable: hidden from its user
    os.chdir(SCRATCH)
    for name, data in config["files"].items():
        with open(name, "xb") as file:
            file.write(base64.b64decode(data))
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    child = os.fork()
    if not child:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):  # Python ignores the first two
                signal.signal(number, signal.SIG_DFL)
            become_untrusted(config)
            os.closerange(3, 128)
            os.execve(config["argv"][0], config["argv"], config["env"])
        except BaseException as error:
            os.write(2, f"sandbox: {config['argv'][0]}: {error}\n".encode())
        os._exit(BROKEN)
    os.closerange(0, 3)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.register(woken, select.POLLIN)
    while True:
        if any(fd == lifeline for fd, _ in poll.poll()):
            os._exit(128 + signal.SIGKILL)
        os.read(woken, 512)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == child:
                os._exit(code_of(status))
            if not pid:
                break


def main():
    source, lifeline = map(int, sys.argv[1:])
    with os.fdopen(source, "rb") as file:
        file.seek(0)
        config = json.loads(file.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which lets go of the lifeline
    try:
        if config["kind"] == "namespaces":
            enter(config)
        supervise(config, lifeline)
    except Exception as error:
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(BROKEN)


if __name__ == "__main__":
    main()
