"""Files of others are opened with care; files and folders of ours appear complete or not at all.

A file or folder is made in a folder of its own beside its place, `.NAME.<32 hex digits>.tmp`, synced to the disk, and
renamed. That folder is locked (flock) as long as its process lives: what a killed run left has no lock, and the next
run for the same place removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 100_000_000
"""Of a header (the safetensors package's own limit) and of a JSON file."""

_MAX_MARKS = 1_000_000
_BYTES_PER_MARK = 10
"""Python takes 60 to 170 bytes for a value of JSON, be it two characters long. This many brackets, colons and commas
are read from any file, and one for so many bytes: headers and indexes of checkpoints have names, and thus fewer."""

_PIECE_BYTES = 1 << 20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A regular file (or a link to one), open for reading. Never waits, as opening a pipe would.

    Raises ValueError, naming the file, for a pipe, a device, a socket or a folder; OSError for one that cannot be read.
    """
    _check_regular(path, os.stat(path).st_mode)  # before it is opened: that alone makes some devices do something
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    try:
        _check_regular(path, os.fstat(stream.fileno()).st_mode)  # another one may have come to its place
    except ValueError:
        stream.close()
        raise
    return stream


def _check_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: expected a regular file, got {_KINDS.get(stat.S_IFMT(mode), 'something else')}")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, naming the file, for anything else."""
    content = bytearray()
    with open_regular(path) as stream:
        # In pieces: read(MAX_JSON_BYTES) allocates that much at once, whatever the file holds.
        while len(content) <= MAX_JSON_BYTES and (piece := stream.read(_PIECE_BYTES)):
            content += piece
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got more")
    try:
        value = parse_json(bytes(content), constants=True)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got a damaged file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(content: bytes, constants: bool = False) -> Any:
    """A JSON value in UTF-8 without a byte order mark, with each name once in its object.

    constants: whether NaN and Infinity are allowed, which JSON lacks and some config.json of transformers have.
    Raises ValueError for anything else, for one that is nested too deeply, and for more values than its bytes explain.
    """
    marks, most = sum(map(content.count, (b"{", b"[", b":", b","))), _MAX_MARKS + len(content) // _BYTES_PER_MARK
    if marks > most:
        raise ValueError(f"it has {marks} brackets, colons and commas, more than the {most} of {len(content)} bytes")
    refuse = None if constants else _no_constant
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_once, parse_constant=refuse, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is there twice")
    return value


def _whole(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)  # a float for the safetensors package, too


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


# --- what is written -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, for what `publish` is to move there. It is removed in the end.

    Raises FileNotFoundError where the folder of `target` does not exist.
    """
    parent = target.parent
    if not parent.is_dir():
        raise FileNotFoundError(f"{target}: expected its folder to exist, got none at {parent}")
    _remove_leftovers(target)
    folder, lock = _locked_folder(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def publish(made: Path, target: Path) -> None:
    """Move a file or folder that is complete to its place, such that a loss of power leaves all of it or nothing.

    A file replaces one that is there. Raises FileExistsError for a folder where something is.
    """
    if made.is_dir():
        for file in made.iterdir():
            sync(file)
    sync(made)
    try:
        os.replace(made, target)
    except OSError as error:
        if made.is_dir() and os.path.lexists(target):
            raise FileExistsError(f"{target}: expected nothing there, but something came there meanwhile") from error
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Returns when the disk has a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked_folder(target: Path) -> tuple[Path, int]:
    """A new folder, and the open descriptor that holds its lock."""
    while True:
        folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another run took it for a leftover, before the lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another run has the lock, and removes the folder
            os.close(lock)
            continue
        except OSError:
            pass  # a file system without locks: then nothing is removed, either
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_leftovers(target: Path) -> None:
    """Remove the folders of runs for `target` that live no more."""
    name = re.compile(rf"{re.escape(f'.{target.name}.')}[0-9a-f]{{32}}\.tmp")
    for entry in os.scandir(target.parent):
        if not name.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # it is locked, of another user, or gone
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(lock)
