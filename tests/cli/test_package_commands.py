"""Commands that installed packages add to the command line."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Call = Callable[..., Result]
Install = Callable[..., None]
PUBLISH = '''
    import click

    @click.command()
    @click.argument("words", nargs=-1)
    def command(words):
        """Publish a run.

        As long as it has to be.
        """
        click.echo(f"published {words}")
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with one module and one command: ``install("package", "command", "source")``."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def write(package: str, command: str, source: str, attribute: str = "command") -> None:
        (site / package).mkdir()
        (site / package / "__init__.py").write_text("", encoding="utf-8")
        (site / package / "main.py").write_text(textwrap.dedent(source), encoding="utf-8")
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        entry = f"[pipeline.commands]\n{command} = {package}.main:{attribute}\n"
        (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")
        monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.delitem(sys.modules, f"{package}.main", raising=False)

    return write


def test_a_command_of_a_package_is_called_by_its_name(pipeline: Call, install: Install) -> None:
    install("reports", "publish", PUBLISH)
    done = pipeline("publish", "a", "b")
    assert (done.exit_code, done.stdout) == (0, "published ('a', 'b')\n")


def test_help_lists_it_among_ours_with_the_first_line_of_its_docstring(pipeline: Call, install: Install) -> None:
    install("reports", "publish", PUBLISH)
    names = [line.split()[0] for line in pipeline("--help").stdout.partition("Commands:\n")[2].splitlines()]
    assert "  publish      Publish a run.\n" in pipeline("--help").stdout
    assert names.index("new") < names.index("publish") < names.index("resume")


def test_help_imports_no_package_and_lists_one_that_cannot_be_imported(pipeline: Call, install: Install) -> None:
    install("reports", "publish", f"raise ValueError('imported')\n{textwrap.dedent(PUBLISH)}")
    done = pipeline("--help")
    assert done.exit_code == 0, done.output
    assert "  publish      Publish a run.\n" in done.stdout
    assert "reports" not in sys.modules


def test_help_names_the_object_where_its_docstring_cannot_be_read(pipeline: Call, install: Install) -> None:
    install("reports", "publish", "command = make()")
    assert "  publish      reports.main:command, which has no docstring.\n" in pipeline("--help").stdout


@pytest.mark.parametrize(
    ("source", "attribute", "message"),
    [
        ("import nothing_of_that_name", "command", "main.py:1"),
        ("1 / 0", "command", "ZeroDivisionError: division by zero; mend the file"),
        ("other = 1", "command", "reports.main has no 'command'"),
        ("command = 1", "command", "'reports.main:command' is no click command; write @click.command() above it"),
        ("def command(): pass", "", "'reports.main:' is no class path"),
    ],
)
def test_what_is_no_command_is_refused_with_its_package(
    pipeline: Call, install: Install, source: str, attribute: str, message: str
) -> None:
    install("reports", "publish", source, attribute)
    done = pipeline("publish")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the command 'publish' of the package 'reports': " in done.stderr
    assert message in done.stderr


def test_two_packages_with_one_name_are_both_named(pipeline: Call, install: Install) -> None:
    install("reports", "publish", PUBLISH)
    install("writers", "publish", PUBLISH)
    done = pipeline("publish")
    assert done.exit_code == 2
    assert "the command 'publish' is offered by 'reports' and 'writers'; uninstall one of them" in done.stderr
    assert "  publish      offered by 'reports' and 'writers'; uninstall one of them\n" in pipeline("--help").stdout


def test_a_name_of_ours_stays_ours_and_help_says_so(pipeline: Call, install: Install) -> None:
    install("reports", "check", PUBLISH)
    assert "has no config.yaml; name a config" in pipeline("check").stderr
    shown = " ".join(pipeline("--help").stdout.split())
    assert "check Name every mistake of a config" in shown
    assert "check also offered by 'reports', which nobody can call; give it another name there" in shown


def test_a_misspelt_name_is_answered_with_one_of_a_package(pipeline: Call, install: Install) -> None:
    install("reports", "publish", PUBLISH)
    assert "there is no command 'publsh'; did you mean 'publish'?" in pipeline("publsh").stderr
