"""Converts operating-system errors of files and disks into errors that name the path and the fix."""

import errno
import os
import re

from strata.platform.errors import UserError

_SPACE = "Free some space there"
_PERMISSION = "Grant this user access to it, or choose another folder (STRATA_HOME, train.checkpoints)"
_PLACE = "Check what is at that path"
_STORAGE = "Check the disk or the mount that holds it"
_LATER = "Close other programs, or raise the limit (ulimit -n)"

FIXES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "Mount it for writing, or choose another folder (STRATA_HOME, train.checkpoints)",
    errno.ENOENT: _PLACE,
    errno.ENOTDIR: _PLACE,
    errno.EISDIR: _PLACE,
    errno.EEXIST: _PLACE,
    errno.ENOTEMPTY: _PLACE,
    errno.ELOOP: _PLACE,
    errno.ENAMETOOLONG: _PLACE,
    errno.EIO: _STORAGE,
    errno.ESTALE: _STORAGE,
    errno.ENOTCONN: _STORAGE,
    errno.ENODEV: _STORAGE,
    errno.ENXIO: _STORAGE,
    errno.EMFILE: _LATER,
    errno.ENFILE: _LATER,
}

# Errors for which a retry is pointless until the user has fixed the cause.
LASTING = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
    }
)

# Python and Arrow write "[Errno 28]" or "[errno 28]", libraries in Rust "(os error 28)".
_NUMBER = re.compile(r"\[[Ee]rrno (\d+)\]|\(os error (\d+)\)")
_PATH = re.compile(r"'(/[^']+)'")


def explain(error: BaseException, then: str = "run the command again") -> UserError | None:
    """A `UserError` for a file error, or None for an error of another kind. `then`: the step after the fix."""
    number = number_of(error)
    if number is None or number not in FIXES:
        return None
    filename = getattr(error, "filename", None)
    found = _PATH.search(str(error))
    place = os.fsdecode(filename) if isinstance(filename, str | bytes) else found[1] if found else "A file"
    return UserError(f"{place}: {os.strerror(number)}.", f"{FIXES[number]}, then {then}.")


def number_of(error: BaseException) -> int | None:
    """The errno of a file error, parsed from the message if the type has no `errno`. None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1] or found[2]) if found else None
