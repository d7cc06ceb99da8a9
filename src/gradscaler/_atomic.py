"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write. It replaces the one at ``path`` unless the block raises.

    Links are followed. The new file keeps the mode and the owner of the one that it replaces.

    Raises:
        OSError: ``path`` cannot be written, is not a file or is read-only, or the new file cannot
            have the old one's owner.
    """
    old = _old_file(path)
    target = path.resolve()
    temporary = target.with_name(f".gradscaler-{secrets.token_hex(8)}")
    temporary.touch(0o666 if old is None else 0o600, exist_ok=False)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems report only here that they are full
        if old is not None:
            _take_over(temporary, old)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _old_file(path: Path) -> os.stat_result | None:
    """The status of the file at ``path``, which must be writable; None if there is no file."""
    try:
        old = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(old.st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
    os.close(os.open(path, os.O_WRONLY))  # raises if the file is read-only
    return old


def _take_over(path: Path, old: os.stat_result) -> None:
    """Give the file at ``path`` the owner, the group and the mode of another."""
    new = path.stat()
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.chown(path, old.st_uid, old.st_gid)
        except PermissionError:
            message = "belongs to an owner or a group that a new file cannot have; delete it first"
            raise PermissionError(errno.EPERM, message) from None
    path.chmod(stat.S_IMODE(old.st_mode))  # a change of owner clears some bits
