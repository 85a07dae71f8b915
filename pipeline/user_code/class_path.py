"""Class paths: from text to a checked class.

``{workspace}/file.py`` (the class named after its place), ``{workspace}/file.py:AnyName``, ``package.module:Name``,
``package.module.Name``, a bare ``Name`` where a place has a module of its own (``Adam`` among optimizers, ``AUC`` among
metrics), and from Python the class itself.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from pipeline.config.yaml_tree import resolve_path
from pipeline.errors import ClassPathError, nearest, one_of
from pipeline.user_code import source
from pipeline.user_code.imports import no_python, wrong_imports
from pipeline.user_code.source import find_spec
from pipeline.user_code.tracebacks import import_failed, no_module
from pipeline.workspaces import package_name

if TYPE_CHECKING:  # a command of a package does not wait for pydantic
    from pipeline.context import ConfigView


@dataclass(frozen=True)
class ClassPath:
    """A parsed class path: ``module`` can be imported and has ``name``.

    ``file`` is set for a workspace file, ``implied`` where the path names only the file, and so not the class.
    """

    text: str
    module: str
    name: str
    file: Path | None = None
    implied: bool = False


def parse(
    text: str, *, name: str = "", folder: Path | None = None, workspace: Path | None = None, module: str = ""
) -> ClassPath:
    """Split a class path; nothing is imported.

    Args:
        text: the class path, ``{workspace}`` already replaced.
        name: the class meant where the path names only a file.
        folder: what a relative file path is relative to.
        workspace: the root of the package to which files in it belong.
        module: the module in which a bare name is looked up.

    Raises:
        ClassPathError: it has none of the forms, or there is no such file.
    """
    if placeholder := re.search(r"\{(\w*)\}", text):
        known = one_of(placeholder[1], ["workspace", "run_dir"])
        raise ClassPathError(f"'{text}': unknown placeholder '{placeholder[0]}'{known}")
    if "\\" in text:
        raise ClassPathError(f"'{text}': write folders with '/', on every system: '{text.replace(chr(92), '/')}'")
    folders, slash, last = text.rpartition("/")
    last, colon, attribute = last.partition(":")
    path = folders + slash + last
    if path.endswith(".py") or slash:
        return replace(_parse_file(text, path, attribute if colon else name, folder, workspace), implied=not colon)
    if not colon:
        path, _, attribute = path.rpartition(".")
    path = path or module
    if not path or not all(part.isidentifier() for part in [*path.split("."), attribute]):
        forms = "'{workspace}/file.py', '{workspace}/file.py:Name' or 'package.module:Name'"
        raise ClassPathError(f"'{text}' is no class path; write {forms}")
    return ClassPath(text, path, attribute)


def _parse_file(text: str, path: str, name: str, folder: Path | None, workspace: Path | None) -> ClassPath:
    if folder is None and not Path(path).is_absolute():
        needs = "a relative path needs a config file or a workspace"
        raise ClassPathError(f"'{text}': {needs}; give the config a 'workspace', or an absolute path")
    try:
        file = resolve_path((folder or Path()) / path)
    except OSError as error:
        raise ClassPathError(f"'{text}' can be no file: {error.strerror}; check the path") from error
    if file.is_dir():
        inside = ", ".join(_python_files(file)) or "there is none"
        raise ClassPathError(f"'{text}': '{file.name}' is not a .py file but a folder; name a file in it: {inside}")
    if file.suffix != ".py":
        raise ClassPathError(f"'{text}': '{file.name}' is not a .py file{_nearest_file(file)}")
    if not file.is_file():
        name = Path(path).name
        link = f", to which the link '{name}' leads; mend the link" if name != file.name else ""
        raise ClassPathError(f"'{text}': no such file: {file}{link or _nearest_file(file)}")
    if not name.isidentifier():
        raise ClassPathError(f"'{text}': '{name}' is no class name; write '{{workspace}}/{file.name}:Name'")
    root = workspace.resolve() if workspace and file.is_relative_to(workspace.resolve()) else file.parent
    parts = file.parent.relative_to(root).parts + (() if file.stem == "__init__" else (file.stem,))
    if any("." in part for part in parts):
        what = f"Python cannot import '{file.name}' for the dot in its name or folder"
        raise ClassPathError(f"'{text}': {what}; rename it")
    for ancestor in file.parents[: len(file.parent.relative_to(root).parts)]:
        if ancestor.with_name(f"{ancestor.name}.py").is_file() and not (ancestor / "__init__.py").is_file():
            hidden = f"Python finds '{ancestor.name}.py' instead of the folder '{ancestor.name}' beside it"
            raise ClassPathError(f"'{text}': {hidden}; rename one of them")
    return ClassPath(text, ".".join([package_name(root), *parts]), name, file)


def _nearest_file(file: Path) -> str:
    files = _python_files(file.parent)
    return one_of(file.name, files) if files else "; there is no .py file there"


def _python_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.py") if file.is_file())


def examine(path: ClassPath) -> tuple[source.Definition | None, list[str]]:
    """The source of the class or function, and the certain faults of its path and imports."""
    wrong = [f"'{path.text}': {message}" for message in wrong_imports(path.module)] if path.file else []
    try:
        return define(path), wrong
    except ClassPathError as error:
        # What cannot be imported defines nothing: that is one fault, not two.
        return None, wrong or [str(error)]


def define(path: ClassPath) -> source.Definition | None:
    """The source of the class or function, without importing it; None: unknown.

    Raises:
        ClassPathError: there is certainly no such module or name.
    """
    if find_spec(path.module) is None:
        if path.module in sys.modules:  # made by code, like os.path
            return None
        raise ClassPathError(no_module(path.text, path.module))
    try:
        module = source.read(path.module)
        definition = source.define(module, path.name) if module else None
    except SyntaxError as error:
        raise ClassPathError(f"'{path.text}': {no_python(error, str(path.file or path.module))}", error) from error
    except OSError as error:
        raise ClassPathError(f"'{path.text}': {error.filename}: {error.strerror}; make it readable") from error
    except source.NotDefinedError as error:
        raise ClassPathError(_no_name(path, module, error.args[0])) from error
    if module and definition is None and source.is_module(module, path.name):
        raise ClassPathError(_is_a_module(path))
    if module and path.implied and (heirs := source.heirs(module, path.name)):
        # A file that just imports the class which its path implies, and derives from it, means the derived one.
        what = f"{path.file and path.file.name} only imports '{path.name}', and derives {', '.join(heirs)} from it"
        remedy = f"write ':{heirs[0]}' after the file, or ':{path.name}' if the import is meant"
        raise ClassPathError(f"'{path.text}': {what}; {remedy}")
    return definition


def _is_a_module(path: ClassPath) -> str:
    return f"'{path.text}': {path.name} is a module, and no class or function; name one in it"


def _no_name(path: ClassPath, module: source.Module | None, home: source.Module) -> str:
    where = path.file.name if path.file else path.module
    if module and path.name in module.bindings:
        imports = f"{where} imports '{path.name}' from {home.file}"
        return f"'{path.text}': {imports}, which does not define it; mend the import"
    names = source.definitions(module) if module else []
    if not path.file:
        names = [*names, *(source.names(module) if module else ())]
        return f"'{path.text}': {where} has no '{path.name}'{nearest(path.name, names) or _offered(path, module)}"
    if module and (outer := source.outer_class(module, path.name)):
        return f"'{path.text}': {where} defines '{path.name}' only inside of {outer}; move it out, to the top level"
    other = f"; write ':{names[0]}' after the file, or name the class {path.name}" if names else ""
    hint = nearest(path.name, names) or other or f"; define {path.name} in it"
    return f"'{path.text}': {where} defines no '{path.name}'; it defines {', '.join(names) or 'no class'}{hint}"


# More names than these are no help in a message.
_MOST_NAMES = 40


def _offered(path: ClassPath, module: source.Module | None) -> str:
    """The remedy for a name that is near to none of a module: the classes that the module offers."""
    names = source.offered_classes(module) if module else []
    if not 0 < len(names) <= _MOST_NAMES:
        return "; check the spelling"
    own = f", or name a class of your own: '{{workspace}}/file.py:{path.name}'" if path.text.isidentifier() else ""
    return f"; known: {', '.join(names)}{own}"


def load(path: ClassPath) -> Any:
    """Import and return what the path names.

    Raises:
        ClassPathError: no such module or name, or the user's file failed; then ``user_error`` is what it raised.
    """
    if path.module not in sys.modules:
        # The file may be newer than what Python remembers of its folder.
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(path.module)
    except (Exception, SystemExit) as error:
        raise import_failed(path.text, path.module, path.file, error) from error
    if not hasattr(module, path.name):
        define(path)
        where = path.file.name if path.file else path.module
        raise ClassPathError(f"'{path.text}': {where} has no '{path.name}' after it was imported; check the spelling")
    value = getattr(module, path.name)
    if isinstance(value, ModuleType):
        raise ClassPathError(_is_a_module(path))
    return value


def load_class(path: ClassPath | type, base: type) -> type:
    """The class, imported and checked: a concrete subclass of ``base``.

    Raises:
        ClassPathError: it is no class, derives from something else, or leaves a method abstract.
    """
    cls = load(path) if isinstance(path, ClassPath) else path
    text = path.text if isinstance(path, ClassPath) else describe(path)
    if not isinstance(cls, type):
        what = f"'{text}' is of type {type(cls).__name__}, not a class"
        raise ClassPathError(f"{what}; name a subclass of {describe(base)}")
    if not issubclass(cls, base):
        raise ClassPathError(wrong_base(text, cls.__name__, describe(base)))
    if inspect.isabstract(cls):
        raise ClassPathError(missing_methods(text, cls.__name__, sorted(getattr(cls, "__abstractmethods__", ()))))
    return cls


def load_named(
    path: Any, address: str, name: str, config: ConfigView, module: str = "", base: type | None = None
) -> Any:
    """What a class path of the config names; a class or function that a config in Python has is itself.

    Args:
        path: the class path.
        address: its address.
        name: the class meant where the path names only a file.
        config: the config.
        module: where a bare name is looked up.
        base: what the class has to derive from; None where a function does as well.

    Raises:
        ClassPathError: it cannot be loaded; the message begins with where the config says so.
    """
    try:
        if isinstance(path, str):
            path = parse(path, name=name, workspace=config.workspace, module=module)
        if base is not None:
            return load_class(path, base)
        return load(path) if isinstance(path, ClassPath) else path
    except ClassPathError as error:
        raise ClassPathError(f"{config.origin(address)}: {address}: {error}", error.user_error) from error


def describe(cls: type | FunctionType) -> str:
    """``module:Name``, the class path of a class or function."""
    return f"{cls.__module__}:{cls.__qualname__}"


def wrong_base(text: str, name: str, base: str, place: str = "") -> str:
    """The message for a class of the wrong kind; ``place``: where it is, and with which bases."""
    return f"'{text}': {name} does not derive from {base}; write `class {name}({base.rpartition(':')[2]})`{place}"


def missing_methods(text: str, name: str, methods: Iterable[str]) -> str:
    """The message for a class that leaves methods of its base abstract."""
    return f"'{text}': {name} does not define {', '.join(methods)}; define it, spelt exactly so"


OPTIMIZERS = "torch.optim"

# Those of which single rows of a parameter may be stepped: their states begin as zeros, and each row goes its own way.
LAZY_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")

SCHEDULES = "pipeline.optim.schedules"

LR_SCHEDULERS = "torch.optim.lr_scheduler"


def spelling(name: Any, home: str) -> Any:
    """The name of a module's class that is spelt so but for capitals and underscores; else the name itself.

    ``ADAM``, as PaddleRec writes it, is ``Adam`` of torch.optim, and ``warmup_cosine`` the schedule ``WarmupCosine``.
    """
    module = source.read(home) if isinstance(name, str) and name.isidentifier() else None
    known = {known.lower(): known for known in (module.bindings if module else ()) if known[0].isupper()}
    return known.get(str(name).lower().replace("_", ""), name) if module else name


# Where the class of a module is looked up that has only a name.
MODULES = "torch.nn"


METRICS = "pipeline.metrics"
