"""Small files that a killed process must not leave half written."""

import os
import pathlib


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes `text` so that a reader, or a run after a kill, sees the old file or the new one."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # so that the rename cannot reach the disk before the text
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
