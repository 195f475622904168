"""What is opened is a regular file; what is written appears complete, as the umask says, and leaves nothing behind."""

# mypy: disable-error-code="arg-type, attr-defined"

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests import ROOT
from tests.formats_layers import AWQ, awq_layer, folder_of
from tests.tuned_cases import H200, entry, problem, table

import weightonly as wo
from weightonly import storage
from weightonly.formats import convert
from weightonly.heuristics.configs import CONFIGS
from weightonly.plan import tuned

WEIGHT = torch.arange(-32, 32, dtype=torch.int8).repeat(64, 1)


# --- what is opened ------------------------------------------------------------------------------------------


def _checkpoint(path: Path) -> object:
    return wo.load_checkpoint(path.parent)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "load": ("w.safetensors", wo.load),
    "PackedWeight.load": ("w.safetensors", wo.PackedWeight.load),
    "shard": ("model.safetensors", _checkpoint),
    "index": ("model.safetensors.index.json", _checkpoint),
    "tuned table": ("table.json", lambda path: tuned.read(path, H200, CONFIGS)),
}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_not_opened(reader: str, kind: str, tmp_path: Path, in_time: None) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"^{path}: expected a regular file, got a {kind}$"):
        read(path)


def test_a_config_that_is_a_pipe_is_not_opened(tmp_path: Path, in_time: None, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ValueError, match=r"config\.json: expected a regular file, got a pipe"):
        wo.load_checkpoint(folder)


def test_links_to_files_are_followed(tmp_path: Path, generator: torch.Generator) -> None:
    """The cache of Hugging Face's hub is made of them."""
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    for file in list(folder.iterdir()):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert len(list(wo.load_checkpoint(folder))) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "'c' is there twice"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": -Infinity}', "-Infinity is no JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": 1} {}', "Extra data"),
    ],
    ids=["a name twice", "NaN", "infinity", "byte order mark", "UTF-16", "nested", "two values"],
)
def test_strict_json(content: bytes, message: str) -> None:
    """That of headers. A config of transformers may hold NaN and Infinity."""
    with pytest.raises(ValueError, match=message):
        storage.parse_json(content)
    if b"N" in content or b"I" in content:
        assert storage.parse_json(content, constants=True).keys() == {"a"}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_deeply_nested_json_is_an_error_of_its_file(file: str, tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator, shards=2)
    (folder / file).write_text('{"a":' * 200_000)
    with pytest.raises(ValueError, match=rf"{file}: expected JSON, got a damaged file"):
        wo.load_checkpoint(folder)


def test_a_small_config_takes_little_memory(tmp_path: Path) -> None:
    """Not as much as the largest file that is allowed."""
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    tracemalloc.start()
    try:
        assert storage.read_json(path) == {"a": 1}
        assert tracemalloc.get_traced_memory()[1] < storage.MAX_JSON_BYTES // 10
    finally:
        tracemalloc.stop()


def test_a_config_is_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    monkeypatch.setattr(storage, "MAX_JSON_BYTES", 8)
    assert storage.read_json(path) == {"a": 1}
    path.write_text('{"a": 12}')
    with pytest.raises(ValueError, match="expected at most 8 bytes of JSON, got more"):
        storage.read_json(path)


def test_a_config_with_infinity_is_read(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    config = json.loads((folder / "config.json").read_text()) | {"time_step_limit": [0.0, float("inf")]}
    (folder / "config.json").write_text(json.dumps(config))
    assert len(list(wo.load_checkpoint(folder))) == 4


def test_a_config_that_says_two_things_is_an_error(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    options = json.dumps(AWQ)
    (folder / "config.json").write_text(f'{{"quantization_config": {options}, "quantization_config": {options}}}')
    with pytest.raises(ValueError, match=r"config\.json: .*'quantization_config' is there twice"):
        wo.load_checkpoint(folder)


def test_a_table_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    tuned.write(path, table(entry(problem(1))))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if os.getuid() == 0:
        os.chown(path, 54321, -1)
    with pytest.raises(ValueError, match="it belongs to another user"):
        tuned.read(path, H200, CONFIGS)


# --- what is written -----------------------------------------------------------------------------------------


def _save(folder: Path) -> list[Path]:
    wo.save(folder / "w.safetensors", {"w": wo.preprocess(WEIGHT, bits=8)})
    return [folder / "w.safetensors"]


def _convert(folder: Path) -> list[Path]:
    source = folder_of(folder / "source", awq_layer, AWQ, torch.Generator())
    convert(source, folder / "packed")
    return [folder / "packed", *(folder / "packed").iterdir()]


def _tune(folder: Path) -> list[Path]:
    tuned.write(folder / "table.json", table(entry(problem(1))))
    return [folder / "table.json"]


WRITERS: dict[str, Callable[[Path], list[Path]]] = {"save": _save, "convert": _convert, "tuned table": _tune}


@pytest.mark.parametrize("writer", WRITERS)
def test_permissions_are_what_the_umask_leaves(writer: str, tmp_path: Path, umask: None) -> None:
    (tmp_path / "source").mkdir()
    for path in WRITERS[writer](tmp_path):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert oct(mode) == oct(0o750 if path.is_dir() else 0o640), path


@pytest.mark.parametrize("writer", WRITERS)
def test_what_appears_is_on_the_disk(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and its folder are synced before the rename, and the folder above after it."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def watch_replace(made: Path, target: Path) -> None:
        events.append(f"-> {target}")
        replace(made, target)

    (tmp_path / "source").mkdir()
    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    first, *files = WRITERS[writer](tmp_path)
    moved = events.index(f"-> {first}")
    assert str(tmp_path) in events[moved + 1 :]
    before = [Path(event).name for event in events[:moved]]
    assert {file.name for file in files} <= set(before)
    assert Path(before[-1]).suffix in (".tmp", ".safetensors", ".json")


@pytest.mark.parametrize("writer", WRITERS)
def test_planted_links_are_not_followed(writer: str, tmp_path: Path) -> None:
    """Names under which earlier versions wrote."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in ("table.json", "w.safetensors"):
        (tmp_path / f".{name}.{os.getpid()}").symlink_to(victim)
        (tmp_path / f".{name}.{'0' * 32}.tmp").symlink_to(victim)
    (tmp_path / "source").mkdir()
    WRITERS[writer](tmp_path)
    assert victim.read_text() == "kept"


LEFT_BY = """
import os, signal, sys, time
from pathlib import Path
from weightonly import storage
with storage.staged(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    time.sleep(100)
"""


def _holder(target: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder for `target`."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEFT_BY, str(target)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "w.safetensors"
    (killed, left), (living, held) = _holder(target), _holder(target)
    try:
        killed.kill()
        killed.wait()
        assert left.is_dir() and held.is_dir()
        other = tmp_path / f".other.safetensors.{'0' * 32}.tmp"
        other.mkdir()
        _save(tmp_path)
        assert not left.exists(), "what a killed run left is still there"
        assert held.is_dir(), "the folder of a running one is gone"
        assert other.is_dir(), "the folder of another file is gone"
    finally:
        living.kill()
        living.wait()
        killed.stdout.close()  # type: ignore[union-attr]
        living.stdout.close()  # type: ignore[union-attr]


SAVES = """
import sys, torch, weightonly as wo
for _ in range(int(sys.argv[2])):
    wo.save(sys.argv[1], {"w": torch.full((100,), float(sys.argv[3]))})
"""


def test_all_writers_of_one_path_succeed(tmp_path: Path) -> None:
    """Six threads, and two processes beside them; each takes the folders of the others for leftovers, if it can."""
    target, errors = tmp_path / "w.safetensors", []

    def write(number: int) -> None:
        try:
            for _ in range(60):
                wo.save(target, {"w": torch.full((100,), float(number))})
        except Exception as error:
            errors.append(error)

    processes = [subprocess.Popen([sys.executable, "-c", SAVES, str(target), "60", str(n)], cwd=ROOT) for n in (6, 7)]
    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in processes] == [0, 0] and not errors
    loaded = wo.load(target)["w"]
    assert isinstance(loaded, torch.Tensor) and loaded.shape == (100,)
    assert bool((loaded == loaded[0]).all()) and loaded[0] in range(8)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_folder_that_another_run_removes_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock was refused, or it went before it could be opened; the next one is taken."""
    made: list[Path] = []
    lock, open_ = fcntl.flock, os.open

    def refuse_first(descriptor: int, how: int) -> None:
        made.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if len(made) == 1:
            raise BlockingIOError
        lock(descriptor, how)

    def lose_second(path: Path, flags: int) -> int:
        if len(made) == 1:
            made.append(Path(path))
            os.rmdir(path)
        return open_(path, flags)

    monkeypatch.setattr(fcntl, "flock", refuse_first)
    monkeypatch.setattr(os, "open", lose_second)
    with storage.staged(tmp_path / "w") as folder:
        assert folder == made[2] and len(set(made)) == 3


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    _save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("name", ["missing/w.safetensors", "file/w.safetensors"])
def test_a_missing_folder_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=rf"^{tmp_path / name}: expected its folder to exist"):
        wo.save(tmp_path / name, {"w": torch.ones(3)})


def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    limit, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(OSError, match=rf"^{tmp_path / 'w.safetensors'}: could not be written"):
            wo.save(tmp_path / "w.safetensors", {"w": torch.ones(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


def test_two_names_of_one_tensor_are_saved_twice(tmp_path: Path) -> None:
    weight, plain = wo.preprocess(WEIGHT, bits=8), torch.arange(12.0).view(3, 4)
    entries = {"a": weight, "b": weight, "p": plain, "q": plain, "column": plain[:, 1], "row": plain[1]}
    wo.save(tmp_path / "w.safetensors", entries)
    loaded = wo.load(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name].data, entry.data) for name, entry in entries.items())


# --- convert -------------------------------------------------------------------------------------------------


def test_a_dangling_target_fails_before_the_work(tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    (tmp_path / "packed").symlink_to(tmp_path / "nowhere")
    started = set(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match=r"packed: expected a folder that does not exist yet, got a link"):
        convert(source, tmp_path / "packed")
    assert set(tmp_path.iterdir()) == started


def test_the_loser_of_two_converts_is_told_so(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    replace = os.replace

    def late(made: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").touch()
        replace(made, target)

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(FileExistsError, match=r"packed: expected nothing there, but something came there meanwhile"):
        convert(source, tmp_path / "packed")


def test_a_link_to_elsewhere_is_not_copied(tmp_path: Path, generator: torch.Generator) -> None:
    source = folder_of(tmp_path, awq_layer, AWQ, generator)
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"notes\.txt: expected a file of this folder, got a link to .*secret"):
        convert(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_links_of_the_hub_are_copied(tmp_path: Path, generator: torch.Generator) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    folder_of(tmp_path, awq_layer, AWQ, generator).rename(snapshot)
    (snapshot / "tokenizer.json").write_text("{}")
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / ".." / "blobs" / str(number))
    convert(snapshot, tmp_path / "packed")
    copied = tmp_path / "packed" / "tokenizer.json"
    assert copied.read_text() == "{}" and not copied.is_symlink()


def test_many_small_tensors_are_converted_in_linear_time(tmp_path: Path, generator: torch.Generator) -> None:
    from weightonly.formats.folder import write_shards

    def seconds(count: int) -> float:
        """CPU time, the least of three: what waits for a disk or another process does not count."""
        taken: list[float] = []
        for _ in range(3):
            folder = tmp_path / f"{count}-{len(taken)}"
            folder.mkdir()
            started = time.process_time()
            assert write_shards(folder, ({f"t{i}": torch.ones(1)} for i in range(count)), 1 << 30) == 4 * count
            taken.append(time.process_time() - started)
            shutil.rmtree(folder)
        return min(taken)

    seconds(100)
    assert seconds(8000) < 40 * seconds(1000)  # quadratic: 64 times


# --- digests -------------------------------------------------------------------------------------------------


def test_convert_writes_digests_that_find_any_flipped_bit(tmp_path: Path, generator: torch.Generator) -> None:
    convert(folder_of(tmp_path, awq_layer, AWQ, generator), tmp_path / "packed")
    assert len(list(wo.load_checkpoint(tmp_path / "packed", verify=True))) == 4
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for place in torch.randint(begin, len(content), (30,), generator=generator).tolist():
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(ValueError, match=rf"^{file}: [\w.]+: expected bytes with SHA-256 \w{{64}}, got others"):
            list(wo.load_checkpoint(tmp_path / "packed", verify=True))


def test_a_folder_without_digests_cannot_be_verified(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, awq_layer, AWQ, generator)
    with pytest.raises(ValueError, match=r"model\.safetensors: [\w.]+: expected a digest to verify"):
        wo.load_checkpoint(folder, verify=True)


def test_sockets_are_no_files(tmp_path: Path, in_time: None) -> None:
    import socket

    path = tmp_path / "w.safetensors"
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)
        server.bind(path.name)
        os.chdir(ROOT)
        with pytest.raises(ValueError, match="expected a regular file, got a socket"):
            storage.open_regular(path)
