"""Whether each of the ``hyper_parameters`` is read, from source code alone."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from pipeline.check.data_flow import is_untouched, runs_in_order
from pipeline.check.inspection import Inspection, Setting, plain
from pipeline.check.phase import MODULE
from pipeline.config.foreign_keys import foreign_remedy
from pipeline.config.usage import is_within
from pipeline.config.yaml_tree import DEFAULT, Node
from pipeline.context import STAGES
from pipeline.errors import one_of
from pipeline.user_code import class_path, classes, source
from pipeline.user_code.class_path import OPTIMIZERS
from pipeline.user_code.plugins import configured_plugins
from pipeline.user_code.uncalled import BRAIN

# Words of code that may read any of them.
_WHOLE = {"hyper_parameters", "env", "config", "config_yaml", "yaml"}

# Files of a workspace that are looked at.
_MOST = 300


def unread_hyper_parameters(inspection: Inspection) -> set[str]:
    """Return the hyper-parameters that nothing seems to read; each is a fault where that is certain."""
    return HyperParameterCheck(inspection).all()


class HyperParameterCheck:
    """The check of ``hyper_parameters``, except the optimizer.

    Args:
        inspection: where the faults go.
    """

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection
        # Faults of what is looked up here are reported elsewhere.
        self.quiet = Inspection(inspection.tree, inspection.workspace, [])
        self.phases = self.quiet.settings("phase").values()
        self.models = [phase["model"].find_class("Model") for phase in self.phases]
        self.parameters = [classes.parameters(model) if model else None for model in self.models]

    def all(self) -> set[str]:
        """The names that nothing seems to read; each is a fault where that is certain."""
        section = self.inspection.tree.child("hyper_parameters")
        names = {name for parameters in self.parameters if parameters for name in parameters.names} | {"optimizer"}
        children = section.children() if section and isinstance(section.value, dict) else ()
        written = {name: node for name, node in children if node.origin is not DEFAULT and name not in names}
        unread = {
            name: node
            for name, node in written.items()
            if not is_within(f"hyper_parameters.{name}", self.inspection.used)
        }
        files = _user_files(self.inspection.tree, self.inspection.workspace) if unread else []
        words = _words(files)
        unread = {name: node for name, node in unread.items() if name not in words}
        if unread and self.inspection.certain and self.is_default(files):
            words |= _words(_programs(self.inspection))
            for name in (name for name, node in unread.items() if self.is_own(node) and not words & {name, *_WHOLE}):
                remedy = foreign_remedy(name) or self.hint(name)
                message = f"nobody reads it: no model takes it, and nothing refers to it{remedy}"
                self.inspection.setting("hyper_parameters")[name].fault(message, of_key=True)
        return set(unread)

    def is_own(self, node: Node) -> bool:
        """Whether a value belongs to this config alone: it is not from a base, and no YAML alias repeats it."""
        origin = node.key or node.origin
        texts = [value.origin.text for value in (node, *(below for _, below in node.walk()))]
        is_local = origin.where == self.inspection.tree.origin.where or origin.is_override
        return is_local and not any(re.search(r"(^|[\s{\[,])&\w", text) for text in texts)

    def is_default(self, files: Collection[Path]) -> bool:
        """Whether only the defaults, and code in known files, can use the context."""
        runners = self.inspection.tree.section("runner").values()
        paths = [phase["updater"]["class_path"] for phase in self.phases]
        updaters = [path.find_class("Updater") for path in paths if path.node]
        plugins, _ = configured_plugins(self.inspection.tree, self.inspection.workspace)
        certain = [runs_in_order(runner) and is_untouched(runner, stage) for runner in runners for stage in STAGES]
        certain += [parameters is not None and not parameters.any_name for parameters in self.parameters]
        certain += [cls is not None and _is_looked_at(cls, files) for cls in (*self.models, *updaters)]
        certain += [isinstance(plugin.target, class_path.ClassPath) and _is_known(plugin.target) for plugin in plugins]
        return all(certain)

    def hint(self, name: str) -> str:
        """The nearest parameter of a model or of the optimizer; else all of the models'."""
        optimizer = self.quiet.setting("hyper_parameters")["optimizer"]["class"].with_spelling_of(OPTIMIZERS)
        definition = optimizer.find_class("Optimizer", module=OPTIMIZERS)
        own = classes.parameters(definition) if definition else None
        model_parameters = {name: name for parameters in self.parameters if parameters for name in parameters.names}
        known = {key: f"optimizer.{key}" for key in (*(own.names[1:] if own else ()), "learning_rate")}
        known |= {"optimizer": "optimizer", **model_parameters}
        matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        return f"; did you mean '{known[matches[0]]}'?" if matches else one_of(name, model_parameters)


def _is_looked_at(definition: source.Definition, files: Collection[Path]) -> bool:
    """Whether a class cannot use the context, or all its code is in known files."""
    is_class = isinstance(definition.node, source.ClassNode)
    ancestry, complete = classes.ancestry(definition) if is_class else ([definition], True)
    known = complete and all(source.is_ours(base.module) or base.module.file in files for base in ancestry)
    return known or (classes.is_subclass(definition, BRAIN) is False and bool(classes.is_subclass(definition, MODULE)))


def _is_known(plugin: class_path.ClassPath) -> bool:
    return plugin.file is not None or plugin.module.startswith("pipeline_plugins.")


def _programs(inspection: Inspection) -> Iterator[Path]:
    """The programs of the workspace, except installed, kept and hidden ones."""
    outputs = Path(str(plain(inspection.tree, "output_dir"))).name
    for root, folders, files in os.walk(inspection.workspace) if inspection.workspace else ():
        folders[:] = [name for name in folders if not name.startswith((".", "__")) and name != outputs]
        if "pyvenv.cfg" in files:
            folders.clear()
        yield from (Path(root, name) for name in files if name.endswith((".py", ".ipynb", ".sh")))


def _words(files: Iterable[Path]) -> set[str]:
    """The words in the code of some files, without docstrings and comments; every word if there are too many files."""
    words: set[str] = set()
    for count, file in enumerate(dict.fromkeys(files)):
        if count == _MOST:
            return words | _WHOLE
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
            words |= set(source.words([ast.parse(text)]) if file.suffix == ".py" else re.findall(r"\w+", text))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return words | _WHOLE
    return words


def _user_files(tree: Node, workspace: Path | None) -> list[Path]:
    """The files of user code that the config names, and those that they import relatively."""
    inspection = Inspection(tree, workspace, [])
    for _, node in tree.walk():
        value = node.value
        if isinstance(value, str) and re.search(r"\.py(:\w+)?$", value):
            Setting(inspection, "", Node(value, tree.origin), tree.origin).find_class("Any")
    return inspection.files
