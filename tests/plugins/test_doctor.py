"""``pipeline doctor`` names what cannot be imported, whatever an import does, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pipeline_plugins.doctor.command import _load, _module, _requirements

REPOSITORY = Path(__file__).parents[2]
# Packages whose import takes long, beside torch.
SLOW_PACKAGES = ("bokeh", "hypothesis", "mlflow", "mypy", "optuna", "tensorboard", "torchmetrics", "wandb")
SEGFAULT = "import os\nos.kill(os.getpid(), 11)\n"
PLUGINS = """
[pipeline.plugins]
good = strangers_good:Plugin
bad = strangers_bad:Plugin
crashing = strangers_crashing:Plugin
nameless = strangers_good:Nothing
[pipeline.commands]
last = strangers_good:Plugin
[console_scripts]
other = strangers_bad:main
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def linked_packages(folder: Path, *without: str) -> Path:
    """All that is installed, and ours from its source, but for the packages whose names begin like this."""
    folder.mkdir()
    for path in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for package in path.iterdir():
            ours = package.name.startswith(("pipeline", "__editable__"))
            if not (ours or package.name.startswith(without) or (folder / package.name).exists()):
                (folder / package.name).symlink_to(package)
    (folder / "pipeline").symlink_to(REPOSITORY / "pipeline")
    (folder / "pipeline_plugins").symlink_to(REPOSITORY / "plugins")
    return folder


def doctor(*paths: Path, words: tuple[str, ...] = ("-m", "pipeline", "doctor", "--json")) -> tuple[int, str]:
    """(Exit code, stdout) where Python finds modules in these folders first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "80"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """Where several packages are broken, each in its own way."""
    files = {
        "wandb.py": "print('noise')\nraise OSError('libwandb.so:\\n  no such file')\n",
        "sqlalchemy.py": "import sys\nsys.exit(3)\n",
        "pyarrow.py": "import os\nos._exit(0)\n",
        "tensorboard.py": SEGFAULT,
        # Not broken, and imported at once.
        "torchmetrics.py": "",
        "mypy.py": "",
        "strangers_good.py": "class Plugin: pass\n",
        "strangers_bad.py": "1 / 0\n",
        "strangers_crashing.py": SEGFAULT,
        "strangers-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n",
        "strangers-1.0.dist-info/entry_points.txt": PLUGINS,
    }
    code, text = doctor(write(tmp_path_factory.mktemp("broken"), files))
    return code, json.loads(text)


def problems(report: dict[str, Any], extra: str) -> dict[str, str]:
    return {state["name"]: state["problem"] for state in report["extras"][extra]}


@pytest.mark.slow
def test_something_that_is_broken_is_an_exit_code_of_1(broken: tuple[int, dict[str, Any]]) -> None:
    code, report = broken
    # Those two import sqlalchemy.
    packages = {"wandb", "sqlalchemy", "pyarrow", "tensorboard", "alembic", "mlflow-skinny"}
    assert (code, set(report["broken"])) == (1, packages | {"bad", "crashing", "nameless"})


@pytest.mark.parametrize(
    ("extra", "package", "problem"),
    [
        ("wandb", "wandb", "OSError: libwandb.so: no such file"),
        ("mlflow", "sqlalchemy", "SystemExit: 3"),
        ("rec", "pyarrow", "ends its process: exit code 0"),
        ("tensorboard", "tensorboard", "ends its process: Segmentation fault"),
        ("rec", "numpy", ""),
        ("mlflow", "alembic", "SystemExit: 3"),
    ],
)
def test_each_package_of_an_extra_is_told_of(
    broken: tuple[int, dict[str, Any]], extra: str, package: str, problem: str
) -> None:
    assert problems(broken[1], extra)[package] == problem


def test_what_another_package_brings_is_listed_and_an_entry_point_after_a_crash_is_tried(
    broken: tuple[int, dict[str, Any]],
) -> None:
    found = {(own["group"], own["name"]): own["problem"] for own in broken[1]["offers"]}
    assert {own["package"] for own in broken[1]["offers"]} == {"strangers"}
    assert found == {
        ("pipeline.commands", "last"): "",
        ("pipeline.plugins", "good"): "",
        ("pipeline.plugins", "bad"): "ZeroDivisionError: division by zero",
        ("pipeline.plugins", "crashing"): "ends its process: Segmentation fault",
        ("pipeline.plugins", "nameless"): "AttributeError: module 'strangers_good' has no attribute 'Nothing'",
    }


@pytest.mark.slow
def test_an_extra_that_is_not_installed_is_no_fault(tmp_path: Path) -> None:
    site = linked_packages(tmp_path / "site", *SLOW_PACKAGES)
    code, text = doctor(site, words=("-S", "-m", "pipeline", "doctor", "--json"))
    report = json.loads(text)
    assert (code, report["broken"], report["offers"]) == (0, [], [])
    assert problems(report, "wandb") == {"wandb": "not installed"}
    assert report["version"] == version("five-stage-pipeline")
    [torch] = [state for state in report["required"] if state["name"] == "torch"]
    assert (torch["version"], torch["threads"]) == (version("torch"), 1)  # OMP_NUM_THREADS of the tests


@pytest.mark.slow
def test_the_text_fits_on_80_columns_and_says_how_to_install_an_extra(tmp_path: Path) -> None:
    torch = write(tmp_path / "torch", {"torch.py": f"raise ImportError({'a long story, ' * 20!r})"})
    (Path.cwd() / "runs").mkdir()
    site = linked_packages(tmp_path / "site", *SLOW_PACKAGES)
    code, text = doctor(torch, site, words=("-S", "-m", "pipeline", "doctor"))
    lines = text.splitlines()
    assert code == 1
    paths = (str(tmp_path), str(sys.executable))
    assert [line for line in lines if len(line) > 80 and not any(path in line for path in paths)] == []
    assert "  wandb>=0.31  not installed" in lines
    assert "  pip install 'five-stage-pipeline[wandb]'" in lines
    assert any(f"{version('torch')} ImportError: a long story" in line for line in lines)
    folders = text.partition("Folders:\n")[2].partition("\n\n")[0]
    assert str(Path.cwd() / "runs") in folders
    assert "iB free" in folders
    assert "torch" in text.partition("Broken:")[2]


def test_without_metadata_and_without_torch_it_says_so(tmp_path: Path) -> None:
    site = linked_packages(tmp_path / "site", "five_stage_pipeline", "torch")
    code = "from pipeline_plugins.doctor.command import command; command(['--json'])"
    status, text = doctor(site, words=("-S", "-c", code))
    report = json.loads(text)
    assert (status, report["version"], report["broken"]) == (1, None, ["torch"])
    assert [state["problem"] for state in report["required"]] == ["not installed"]


def test_a_folder_that_is_gone_is_told_of(tmp_path: Path) -> None:
    site = linked_packages(tmp_path / "site", "five_stage_pipeline", "torch")
    code = "import os; os.rmdir(os.getcwd()); from pipeline_plugins.doctor.command import command; command(['--json'])"
    _, text = doctor(site, words=("-S", "-c", code))
    [folder] = json.loads(text)["folders"]
    assert folder["problem"] == "cannot be written: No such file or directory"


def test_what_lies_in_the_current_folder_is_not_imported() -> None:
    write(Path.cwd(), {"colorsys.py": "raise SystemExit('the wrong one')"})
    assert _load(["colorsys"]) == [{"problem": ""}]


def test_a_process_that_an_import_leaves_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os, time\nif not os.fork():\n    open('child', 'w').write(str(os.getpid()))\n    time.sleep(200)\n"
    source += "    os._exit(0)\nwhile not (os.path.exists('child') and open('child').read()):\n    time.sleep(0.01)\n"
    monkeypatch.setenv("PYTHONPATH", str(write(tmp_path / "site", {"forking.py": source})))
    assert _load(["forking"]) == [{"problem": ""}]
    os.kill(int(Path("child").read_text(encoding="utf-8")), 9)  # it is still there


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("pyyaml", "yaml"),
        ("ruamel.yaml", "ruamel.yaml"),
        ("mlflow-skinny", "mlflow"),
        ("pytest-cov", "pytest_cov"),
        ("pytest-xdist", "xdist"),
        ("import-linter", "importlinter"),
        ("mypy", "mypy"),
        ("types-PyYAML", ""),
    ],
)
def test_a_package_is_imported_by_its_module(package: str, module: str) -> None:
    assert _module(package) == module


def test_requirements_belong_to_their_extra() -> None:
    lines = ["torch>=2.10", 'numpy>=2; extra == "rec"', "pyarrow>=20; python_version > '3' and extra == 'rec'"]
    assert _requirements(lines) == {"": ["torch>=2.10"], "rec": ["numpy>=2", "pyarrow>=20"]}
