"""The house: what is installed, who imports whom, which names occur where, and what must not be in the files."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.starting import LONGEST

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["heads", "inference", "data", "trainers"]
ROOMS = ["decoding", "proposers", "reports", "serving"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_OURS = {".git", "runs", "build", "dist", "wandb", "__pycache__", "node_modules"}


def files(*suffixes: str) -> Iterator[Path]:
    """The files of the repository (as git would list them, but without needing git)."""

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or path.name in NOT_OURS or (path.name.startswith(".") and path.is_dir() and path.name != ".ci"):
                continue
            if path.is_dir():
                if not path.name.endswith(".egg-info"):
                    yield from walk(path)
            elif not suffixes or path.suffix in suffixes:
                yield path

    return walk(ROOT)


def names(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


def mentions(word: str, path: Path) -> list[str]:
    """Lines with the word (not as a part of a longer one), in any case."""
    found = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [f"{path.relative_to(ROOT)}:{i}" for i, line in enumerate(path.read_text().splitlines(), 1) if found.search(line)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ["pyproject.toml", "LICENSE", "README.md", "train.py"]:
        shutil.copy(ROOT / name, source)
    for each in [*FOLDERS, "door", "conf", "tests"]:
        shutil.copytree(ROOT / each, source / each, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, timeout=LONGEST)
    (found,) = folder.glob("headstart-*.whl")
    return found


def test_a_wheel_holds_one_package_and_all_of_it(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = {path for folder in (*FOLDERS, "door") for path in (ROOT / folder).rglob("*.py")}
    others = {*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "heads").rglob("*.cpp"), *(ROOT / "heads").rglob("*.h")}
    wanted = {f"headstart/{path.relative_to(ROOT).as_posix()}" for path in code | others}
    assert inside == wanted


@pytest.mark.slow
def test_an_installed_wheel_trains_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """Its console command and its modules, in a folder that holds nothing, with none of the checkout in sight."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=LONGEST)
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=empty, env=environment, capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", "import headstart.trainers.run as x; print(x.__file__)").startswith(str(tmp_path / "site"))
    assert "headstart train" in run(str(tmp_path / "site/bin/headstart"), "--help")
    command = [str(tmp_path / "site/bin/headstart"), "train", "experiment=smoke", f"target.path={ROOT}/assets/tiny", "out=run"]
    said = run(*command, "trainer.steps=2", "decode.prompts=1", "decode.new_tokens=8")
    assert "report" in said and (empty / "run" / "speculator" / "model.safetensors").is_file()
    assert "speculator" in run("-m", "headstart.inference", "--help")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONGEST)


def test_imports_run_one_way() -> None:
    done = lint(ROOT)
    assert done.returncode == 0 and "3 kept, 0 broken" in done.stdout, done.stdout + done.stderr
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text(), "no exceptions"


def test_import_contracts_can_fail(tmp_path: Path) -> None:
    """An arrow back is found: without this, a misconfigured linter would pass for ever."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in [*FOLDERS, "door", *(f"inference/{room}" for room in ROOMS)]:
        (tmp_path / "headstart" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "headstart" / folder / "__init__.py").touch()
    for name in ("hf", "settings", "speculator", "provenance", "spelling"):
        (tmp_path / "headstart/inference" / f"{name}.py").touch()
    for place, arrow in (("heads", "headstart.trainers"), ("data", "hydra"), ("inference/decoding", "headstart.inference.serving")):
        (tmp_path / "headstart" / place / "bad.py").write_text(f"import {arrow}\n")
    done = lint(tmp_path)
    assert done.returncode != 0 and "0 kept, 3 broken" in done.stdout, done.stdout + done.stderr


def test_nothing_is_imported_past_the_package() -> None:
    """From the checkout ``import heads`` would work too, and everything would be there twice."""
    past = re.compile(rf"^\s*(from|import) ({'|'.join([*FOLDERS, 'door', 'conf'])})\b", re.MULTILINE)
    assert [str(p.relative_to(ROOT)) for p in files(".py", ".md", ".ipynb") if past.search(p.read_text())] == []


@pytest.mark.parametrize("head", names("head"))
def test_no_drafter_is_named_above_the_ground(head: str) -> None:
    doors = [ROOT / "train.py", *(ROOT / "door").glob("*.py"), *ROOT.glob("*/__main__.py")]
    below = [p for folder in ("trainers", "data", "inference") for p in (ROOT / folder).rglob("*.py") if p not in doors]
    above = below if importlib.util.find_spec(head) else [*doors, *below]  # doors speak of a library of that name
    assert [line for path in above for line in mentions(head, path)] == []


@pytest.mark.parametrize("target", [t for t in names("target") if t != "folder"])  # `folder` is any model's
def test_no_target_is_named_in_code(target: str) -> None:
    kinds = ROOT / "heads" / "engines.py"  # a list of transformers' kinds of models; one has the name of a target
    code = [p for p in files(".py") if p.relative_to(ROOT).parts[0] not in ("tests", "benchmarks", "assets") and p != kinds]
    assert [line for path in code for line in mentions(target, path)] == []


def test_what_is_whole_or_not_there_is_written_in_one_place() -> None:
    """The digest of a file, and what puts a file or folder in its place."""
    found = re.compile(r"file_digest|renameat2|os\.re(name|place)\(|\.rename\(|beside\.replace")
    code = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    places = {p.relative_to(ROOT).as_posix(): len(found.findall(p.read_text())) for p in code if found.search(p.read_text())}
    assert places.keys() == {"heads/files.py", "trainers/checkpoint.py"} and places["trainers/checkpoint.py"] == 1  # one that is removed


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    return {p: ast.parse(p.read_text()) for folder in [*FOLDERS, "door"] for p in sorted((ROOT / folder).rglob("*.py"))}


def test_files_and_functions_are_short() -> None:
    assert [str(p.relative_to(ROOT)) for p in parsed() if len(p.read_text().splitlines()) > 300] == []
    walked = ((p.relative_to(ROOT).as_posix(), f) for p, module in parsed().items() for f in ast.walk(module))
    long = {f"{name} {f.name}" for name, f in walked if isinstance(f, FUNCTIONS) and (f.end_lineno or 0) - f.lineno >= 60}
    assert sorted(long) == [], "over 60 lines"


def test_what_is_public_says_what_it_is() -> None:
    """Of the functions, the classes and their methods that others call, nine of ten; the others' names say all."""
    said = dict[str, bool]()
    for path, module in parsed().items():
        public = [(n.name, n) for n in module.body if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and not n.name.startswith("_")]
        methods = [(f"{c}.{m.name}", m) for c, n in public if isinstance(n, ast.ClassDef) for m in n.body if isinstance(m, FUNCTIONS)]
        methods = [(name, m) for name, m in methods if not m.name.startswith("_")]
        said |= {f"{path.relative_to(ROOT)} {name}": bool(ast.get_docstring(n)) for name, n in [*public, *methods]}
    assert len(said) > 500 and sum(said.values()) >= 0.9 * len(said), [name for name, docstring in said.items() if not docstring]


def test_no_machine_or_registry_is_named() -> None:
    slash = "/"
    places = [slash + name + slash for name in ("work", "farm", "root", "home")]
    hosts = ["pypi" + "." + "org", "python" + "hosted", "opt" + slash + "wheels", "opt" + slash + "pypi", "+" + "cpu"]
    text = [
        p
        for p in files()
        if p.suffix in {".py", ".toml", ".txt", ".md", ".yaml", ".yml", ".cfg", ".ipynb", ".json", ""} and p.stat().st_size < 1 << 20
    ]
    assert len(text) > 40
    found = []
    for path in text:
        for i, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            wrong = [w for w in hosts if w in line] + [p for p in places if re.search(rf"(?<![\w.}}]){re.escape(p)}", line)]
            found += [f"{path.relative_to(ROOT)}:{i}: {w}" for w in wrong]
    assert found == []


def test_constraints_are_plain_pins_within_the_ranges() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()  # type: ignore[union-attr]
            pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(wanted)
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None or requirement.name == "torch", f"{requirement.name} is not pinned in constraints.txt"
        assert pinned is None or pinned in requirement.specifier


def test_make_help_lists_every_command() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    shown = subprocess.run([make, "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "checks", "figures"} <= set(targets)
    assert [line.split()[1] for line in shown.splitlines()] == targets


@pytest.mark.parametrize("of, refused", [("elsewhere", True), ("gone", False), (ROOT, False), (None, False)])
def test_the_environment_of_another_checkout_is_left_alone(of: str | Path | None, refused: bool, tmp_path: Path) -> None:
    make, venv = shutil.which("make"), tmp_path / "venv"
    if make is None:
        pytest.skip("make is not installed")
    (tmp_path / "elsewhere").mkdir()
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@" > "$0.asked"\n')
    python.chmod(0o755)
    if of is not None:
        about = venv / "lib" / "python3.11" / "site-packages" / "headstart-0.1.dist-info"
        about.mkdir(parents=True)
        (about / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": f"file://{tmp_path / of}"}))
    command = [make, "-s", "install", f"VENV={venv}", f"PYTHON={sys.executable}"]
    for installed in (False, True):  # also where nothing is to be installed
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode != 0) == refused and (f"of {tmp_path}/elsewhere: choose another" in done.stdout) == refused, done.stderr
        if not installed:
            assert (venv / "bin" / "python.asked").exists() is not refused
            (venv / ".installed").touch()


WITHOUT = """
import sys
sys.path.insert(0, ".")
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]  # headstart is not installed either
for name in ("hydra", "omegaconf", "pydantic", "datasets", "wandb", "deepspeed", "hypothesis"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_tests_for_gpus_need_no_installation() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", WITHOUT, "tests/test_gpu.py", "-k", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed, ", done.stdout, re.MULTILINE)
    assert passed is not None and int(passed[1]) > 12
