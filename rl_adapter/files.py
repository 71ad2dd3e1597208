"""Files that a killed process must not leave half written, and that others on the machine must not read."""

import os
import pathlib

PRIVATE = 0o600  # of a file that holds samples: prompts and answers may be confidential
TEMPORARY = ".*.tmp"  # what a killed process may leave beside a file


def write_atomically(path: str | os.PathLike, data: str | bytes, private: bool = False) -> None:
    """Writes so that a reader, or a run after a kill, sees the old file or the new one; on disk when this returns.

    `private`: for the owner alone, whatever the umask.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, data, os.O_TRUNC, private)
        os.replace(temporary, path)
        _sync(path.parent)  # else a crash of the machine may undo the rename, though what was written after it stays
    finally:
        temporary.unlink(missing_ok=True)


def append(path: str | os.PathLike, data: bytes) -> None:
    """Appends to a private file; on disk when this returns. A kill may leave the first part of `data`."""
    _write(pathlib.Path(path), data, os.O_APPEND, private=True)


def private_directory(path: str | os.PathLike) -> pathlib.Path:
    """Makes a directory for the owner alone, whatever the umask, if it is not there; or makes the one there so."""
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def _write(path: pathlib.Path, data: str | bytes, how: int, private: bool) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, PRIVATE if private else 0o666)
    try:
        if private:
            os.fchmod(file, PRIVATE)  # the umask may have taken the owner's bits too, and an old file has its own
        left = memoryview(data.encode() if isinstance(data, str) else data)
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)  # so that the rename cannot reach the disk before the text
    finally:
        os.close(file)


def _sync(directory: pathlib.Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
