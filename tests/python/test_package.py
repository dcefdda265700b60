"""The package as users get it: the wheel, what import does and refuses, types, style, documents."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import efla
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(efla.__file__).parent


def python(*arguments, path, **environment):
    """Runs this interpreter with `path` as PYTHONPATH and without EFLA_LIBRARY."""
    inherited = {k: v for k, v in os.environ.items() if k != "EFLA_LIBRARY"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**inherited, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        cwd=path,
    )


def installed(module):
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"{module} is not installed"
    )


# --- The wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Unpacked, of the library that is built already."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps",
         "--no-build-isolation", "-w", folder, "-C", f"build-dir={folder}/build",
         "-C", f"cmake.define.EFLA_PREBUILT={efla.library_path}",
         "-C", "cmake.define.EFLA_CUDA=OFF", ROOT],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    return path, folder / "unpacked"


@installed("scikit_build_core")
def test_the_wheel_is_whole_and_serves_any_python(wheel):
    path, folder = wheel
    assert re.fullmatch(r"efla-[0-9.]+-py3-none-linux_\w+\.whl", path.name)
    packed = {str(f.relative_to(folder / "efla")) for f in (folder / "efla").rglob("*.*")}
    sources = {str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py")}
    assert sources <= packed
    assert packed - sources == {"py.typed", "libefla_ops.so", "libefla_ops.json", "libhwy.so.1"}
    (metadata,) = folder.glob("efla-*.dist-info/METADATA")
    release = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={release}.*" in metadata.read_text()


TORCHS = r"lib(c10|c10_cuda|torch|torch_cpu|torch_cuda|cudart|gomp)\.so[.0-9]*"
EVERYWHERE = r"lib(stdc\+\+|gcc_s|m|c)\.so[.0-9]*|ld-linux.*"


@installed("scikit_build_core")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not here")
def test_the_library_needs_nothing_that_another_machine_lacks(wheel):
    _, folder = wheel
    for library in (folder / "efla").glob("*.so*"):
        listing = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listing)
        foreign = [n for n in needed if not re.fullmatch(f"{TORCHS}|{EVERYWHERE}", n)]
        assert all((folder / "efla" / name).is_file() for name in foreign), foreign
        assert all(p == "$ORIGIN" for p in re.findall(r"\((?:RUN|R)PATH\).*\[(.*)\]", listing))
    symbols = subprocess.run(
        ["readelf", "-Ws", "--dyn-syms", folder / "efla" / "libefla_ops.so"],
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert not re.search(r"UND _?Py[A-Z_]", symbols)  # no Python C API


@installed("scikit_build_core")
def test_the_wheel_runs_the_readme(wheel):
    _, folder = wheel
    (folder / "ten_lines.py").write_text(snippets(ROOT / "README.md")[0])
    done = python("-c", "exec(open('ten_lines.py').read()); print(efla.library_path)", path=folder)
    assert done.stdout.strip() == str(folder / "efla" / "libefla_ops.so"), done.stderr


@installed("scikit_build_core")
def test_the_backend_finds_torch_or_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "python" / "build_backend"))
    monkeypatch.chdir(ROOT)  # where a frontend calls it
    import efla_build

    assert efla_build.find_torch() == Path(torch.__file__).parent
    assert efla_build.torch_version(Path(torch.__file__).parent) == torch.__version__
    other = tmp_path / "torch"
    other.mkdir()
    (other / "version.py").write_text("__version__ = '2.99.1+cpu'\n")
    monkeypatch.setenv("EFLA_TORCH_DIR", str(other))
    assert efla_build.dynamic_metadata("dependencies") == ["torch==2.99.*"]
    (other / "version.py").write_text("")
    with pytest.raises(RuntimeError, match=r"version\.py names no version"):
        efla_build.dynamic_metadata("dependencies")
    # As in an isolated build: not importable here, but known to the interpreter that called.
    monkeypatch.delenv("EFLA_TORCH_DIR")
    monkeypatch.setattr(efla_build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(efla_build, "_programs", lambda: ["/bin/false", sys.executable])
    assert efla_build.find_torch() == Path(torch.__file__).parent
    monkeypatch.setattr(efla_build, "_programs", lambda: [])
    assert efla_build.find_torch() is None
    assert "torch==2.11.*" in efla_build.get_requires_for_build_wheel()
    with pytest.raises(SystemExit, match="no torch to build against: pip install torch"):
        efla_build.build_wheel(str(tmp_path))


# --- Import --------------------------------------------------------------------------------------


def test_import_loads_only_the_package():
    code = """
import sys
import torch
before = set(sys.modules)
import efla
print(*sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""
    done = python("-c", code, path=PACKAGE.parent, EFLA_LIBRARY=str(efla.library_path))
    assert done.stdout.split() == ["efla"], done.stdout + done.stderr


def test_what_another_torch_is_told(tmp_path, monkeypatch):
    library = tmp_path / "libefla_ops.so"
    library.touch()  # would not load, but is not tried
    monkeypatch.setenv("EFLA_LIBRARY", str(library))
    info = tmp_path / "libefla_ops.json"
    info.write_text(json.dumps({"torch": "2.4.1+cu124", "cuda": True}))
    with pytest.raises(ImportError) as error:
        efla._library.load_library()
    assert re.fullmatch(
        r"\S*libefla_ops.so was built against torch 2\.4\.1\+cu124, but torch \S+ is installed: "
        r"install torch 2\.4, or build efla again with torch \d+\.\d+ \(pip install .*\)",
        str(error.value),
    )
    for same in (torch.__version__, torch.__version__.split("+")[0] + "+other"):
        info.write_text(json.dumps({"torch": same, "cuda": False}))
        with pytest.raises(ImportError, match="could not be loaded with torch"):
            efla._library.load_library()


def test_the_build_says_what_it_was_built_against():
    info = efla._library.build_info(Path(efla.library_path))
    assert info["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert isinstance(info["cuda"], bool)


def test_every_public_name_is_documented_and_typed():
    for module in (efla, efla.nn):
        assert module.__doc__
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing) or name == "Rule":
                continue
            assert thing.__doc__, name
            if not isinstance(thing, type):
                assert "return" in thing.__annotations__, name
    with pytest.raises(AttributeError, match="module 'efla' has no attribute 'chunked'"):
        efla.chunked  # noqa: B018


# --- Types, style, documents ---------------------------------------------------------------------


@installed("mypy")
def test_types(tmp_path):
    done = python("-m", "mypy", "--cache-dir", tmp_path, path=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@installed("ruff")
def test_style():
    for arguments in (["check", "--no-cache", "python", "tests/python", "examples", "bench", "scripts"],
                      ["format", "--no-cache", "--check", "python", "examples"]):  # fmt: skip
        done = python("-m", "ruff", *arguments, path=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


def snippets(document):
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/python.md"])
def test_python_in_the_documents_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = snippets(ROOT / name)
    assert found
    names: dict = {}  # a document's snippets follow one another
    for snippet in found:
        if "transformers" in snippet and importlib.util.find_spec("transformers") is None:
            continue
        if "patch_fla" in snippet and importlib.util.find_spec("fla") is None:
            continue
        exec(compile(snippet, name, "exec"), names)
