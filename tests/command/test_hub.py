"""Models of the Hugging Face Hub, by huggingface_hub itself: a cache that the test wrote, a server on this machine."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import ROOT
from tests.hf_models import llama, saved, write_model

from weightonly import hub
from weightonly.hub import model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(home: Path, model: str, folder: Path, revision: str = "main", commit: str = COMMIT) -> Path:
    """Puts a folder into the cache below `home`, as the library does: links to blobs, and the commit of a revision."""
    place = home / "hub" / f"models--{model.replace('/', '--')}"
    snapshot, blobs = place / "snapshots" / commit, place / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for file in folder.iterdir():
        blob = f"{commit[:4]}-{file.name}"
        shutil.copyfile(file, blobs / blob)
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / blob)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / revision).write_text(commit)
    return snapshot


def python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    places = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=places)


CODE = """
import json, sys
import torch
import weightonly as wo
from weightonly.__main__ import main
from weightonly.hf import load_model

def say(words):
    print("==", *words)
    print("returned", main(words), flush=True)

say(["quantize", "org/dense", "out", "--group-size", "64"])
say(["inspect", "org/awq"])
say(["explain", "org/awq", "--m", "1", "--arch", "sm90"])
say(["convert", "org/awq", "packed", "--arch", "cpu"])
say(["run", "org/dense", "--tokens", "1,2,3", "--max-new-tokens", "2", "--device", "cpu"])
say(["quantize", "org/dense", "tagged", "--group-size", "64", "--revision", "v2"])
say(["quantize", "org/dense", "x", "--revision", "v3"])
say(["quantize", "org/other", "x"])
model = load_model("org/dense", revision="v2")
print("v2", float(model.lm_head.weight.detach().abs().max()))
print("records", len(list(wo.load_checkpoint("org/awq", arch="cpu"))))
"""


def test_every_command_takes_a_model_of_the_hub(tmp_path: Path, generator: torch.Generator) -> None:
    home = tmp_path / "home"
    cached(home, "org/dense", saved(tmp_path / "a", llama))
    doubled = llama()
    torch.nn.init.constant_(doubled.lm_head.weight, 3.0)
    doubled.save_pretrained(tmp_path / "b")
    cached(home, "org/dense", tmp_path / "b", "v2", "f" * 40)
    cached(home, "org/awq", write_model(tmp_path / "c", "awq", generator))
    run = python(CODE, tmp_path, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    parts = run.stdout.split("== ")
    assert [part.splitlines()[-1] for part in parts[1:7]] == ["returned 0"] * 6, run.stdout + run.stderr
    assert ("awq (from config.json)" in parts[2] and "compute capability" in parts[3]) or "sm90" in parts[3]
    assert "quantized layers" in parts[4] and "2 tokens in" in parts[5]
    missing = "expected a folder, or a model that was downloaded before, as HF_HUB_OFFLINE is set, got none; "
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: org/{name}: {missing}unset it, or give its folder" for name in ("dense", "other")]
    assert "v2 3.0" in parts[8] and "records" in parts[8]
    assert not (tmp_path / "x").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "weightonly"
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())


# --- errors of the hub -------------------------------------------------------------------------------------------

ANSWERS = {
    "org/unknown": (401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}),
    "org/gated": (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}),
    "org/known": (404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}),
    "org/broken": (500, {}),
}


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A hub that has nothing."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers = next((a for name, a in ANSWERS.items() if f"/{name}" in self.path), (404, {}))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ERRORS = """
from weightonly.hub import model_folder
for name, revision in (("org/unknown", None), ("org/gated", None), ("org/known", "v9"), ("org/broken", None)):
    try:
        model_folder(name, revision)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_errors_of_the_hub_are_one_line(endpoint: str, tmp_path: Path) -> None:
    run = python(ERRORS, tmp_path, HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    unknown, gated, revision, broken = run.stdout.splitlines()
    expected = (
        "expected a folder or the id of a model on the Hugging Face Hub, got neither; `hf auth login` shows private"
    )
    assert unknown == f"FileNotFoundError org/unknown: {expected} ones", run.stderr
    assert gated.startswith("PermissionError org/gated: expected a model that may be downloaded, got a gated one; ")
    assert revision == "ValueError revision: expected a branch, tag or commit of org/known, got 'v9'"
    assert "org/broken: " in broken


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    code = "from weightonly.__main__ import main; print(main(['inspect', 'org/model']))"
    places = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    run = python(code, tmp_path, **places)
    expected = "of the Hugging Face Hub, which cannot be reached, that was downloaded before, got none; give its folder"
    assert (
        run.stdout == "1\n"
        and run.stderr.splitlines()[-1] == f"error: org/model: expected a folder, or a model {expected}"
    )


# --- which names are ids -----------------------------------------------------------------------------------------


def test_folders_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model").mkdir(parents=True)
    for name in ("org/model", "./org/x", "/org/x", "~/x", "x", "a/b/c", "org/x.gguf", Path("org/x")):
        assert model_folder(name) == Path(name)
    with pytest.raises(ValueError, match="revision: expected none of a folder, got 'v1' for x"):
        model_folder("x", "v1")
    with pytest.raises(TypeError, match="folder: expected a path, got int"):
        model_folder(3)  # type: ignore[arg-type]


def test_a_model_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text("{}")
    cached(tmp_path, "org/bin", tmp_path / "a")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError, match=r"^org/bin: expected safetensors files, got none; pickles and GGUF"):
        model_folder("org/bin")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(hub.os.path, "lexists", lambda path: False)
    with pytest.raises(ImportError, match=r"huggingface_hub: expected it to be installed, got none; pip install 'hug"):
        model_folder("org/model")
