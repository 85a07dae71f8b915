"""The text of a config, and edits to it that leave every comment and everything else as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.config import yaml_tree
from pipeline.convert.entry import Entry, entries, refuse_aliases

_BREAKS = "\n\x85\u2028\u2029"
_LINE_END = re.compile(rf"[{_BREAKS}]|\Z")
_NEXT_LINE = re.compile(rf"[{_BREAKS}]([ ]*)(?=\S)")
_COMMENTS_ABOVE = re.compile(r"(?:^[ ]*#.*\n)+\Z", re.MULTILINE)


class _Edit(NamedTuple):
    """``text[start:end]`` becomes ``new``."""

    start: int
    end: int
    new: str


class Document:
    """A config file that is being rewritten.

    Attributes:
        where: what messages call it.
        entries: those of the whole config.

    Raises:
        ConfigError: it cannot be read, is no YAML or no mapping, or uses aliases.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.ours = yaml_tree.read_file(path, self.where)
        self.text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(self.text, Loader=yaml.SafeLoader)
        assert root is not None, "reading it has refused an empty file"
        refuse_aliases(root, self.ours)
        self.entries = entries(root, self.ours, self.text)
        self._edits: list[_Edit] = []
        self._removed: list[Entry] = []

    def result(self) -> str:
        """The text after all edits."""
        for siblings in {id(entry.siblings): entry.siblings for entry in self._removed}.values():
            self._close_gaps(siblings)
        self._removed.clear()
        text = self._render(0, len(self.text))
        return text if text.endswith("\n") else f"{text}\n"

    def replace(self, start: int, end: int, value: float | None) -> None:
        """Write a number or a truth value in the place of another."""
        self._edits.append(_Edit(start, end, written(value)))

    def set(self, entry: Entry, value: Any) -> None:
        """Give an entry another value; a list of several lines stays as a comment."""
        start = entry.node.start_mark.index
        if not entry.is_block:
            self._edits.append(_Edit(start, entry.end, written(value, in_braces=entry.flow is not None)))
            return
        colon = self.text.index(":", entry.key_node.end_mark.index) + 1
        self._edits.append(_Edit(colon, colon, f" {written(value)}"))
        self._comment_out_lines(entry, self.text.index("\n", colon))

    def rename(self, entry: Entry, key: str) -> None:
        """Give an entry another key."""
        self._edits.append(_Edit(entry.start, entry.key_node.end_mark.index, key))

    def add(self, after: Entry, key: str, value: Any) -> None:
        """Write a new entry behind another."""
        if after.flow is not None:
            self._edits.append(_Edit(after.end, after.end, f", {key}: {written(value, in_braces=True)}"))
            return
        end = self._line_end(after.end)
        self._edits.append(_Edit(end, end, f"\n{' ' * after.column}{key}: {written(value)}"))

    def remark(self, entry: Entry, comment: str) -> None:
        """Write a comment line above an entry; above the whole of it where that is in braces."""
        if entry.flow is None:
            self._edits.append(_Edit(entry.start, entry.start, f"# {comment}\n{' ' * entry.column}"))
            return
        line = max(self.text.rfind(each, 0, entry.flow) for each in _BREAKS) + 1
        indent = len(self.text[line:]) - len(self.text[line:].lstrip(" "))
        self._edits.append(_Edit(line, line, f"{' ' * indent}# {comment}\n"))

    def comment_out(self, entry: Entry, reason: str) -> None:
        """Turn an entry into a comment, ``# reason: key: value``."""
        if entry.flow is not None:
            self.remark(entry, f"{reason}: {' '.join(self.text[entry.start : entry.end].split())}")
            self._removed.append(entry)
            return
        self._edits.append(_Edit(entry.start, entry.start, f"# {reason}: "))
        self._comment_out_lines(entry, entry.start)

    def gather(self, gathered: Sequence[Entry], key: str) -> None:
        """Put entries of one mapping, in the order of the text, into a mapping under a new key, where the first one was."""
        first, *others = gathered
        if first.flow is not None:
            inner = ", ".join(self._take(each.start, each.end) for each in gathered)
            self._edits.append(_Edit(first.start, first.end, f"{key}: {{{inner}}}"))
            self._removed += others
            return
        # Behind the dash of a list there is no line of its own to start on.
        is_behind_dash = first.siblings[0] is first
        indent = " " * first.column
        start, end = first.start if is_behind_dash else self._with_comments(first), self._line_end(first.end)
        lines = [(indent if is_behind_dash else "") + self._take(start, end)]
        for each in others:
            above, after = self._with_comments(each), min(self._line_end(each.end) + 1, len(self.text))
            lines.append(self._take(above, after).rstrip())
            self._edits.append(_Edit(above, after, ""))
        inner = re.sub(r"^(?=.*\S)", "  ", "\n".join(lines), flags=re.MULTILINE)
        self._edits.append(_Edit(start, end, f"{'' if is_behind_dash else indent}{key}:\n{inner}"))

    def _comment_out_lines(self, entry: Entry, start: int) -> None:
        """Turn the lines of an entry that begin behind ``start`` into comments."""
        for found in _NEXT_LINE.finditer(self.text[start : entry.end]):
            at = start + found.start(1) + min(entry.column, len(found[1]))
            self._edits.append(_Edit(at, at, "# "))

    def _with_comments(self, entry: Entry) -> int:
        """Where the line of an entry starts, or the comment lines right above it."""
        start = entry.start - entry.column
        before = self._line_end(entry.siblings[entry.siblings.index(entry) - 1].end) + 1
        found = _COMMENTS_ABOVE.search(self.text[before:start])
        return before + found.start() if found else start

    def _take(self, start: int, end: int) -> str:
        """The text between, with its edits, which are done with then."""
        text = self._render(start, end)
        self._edits = [edit for edit in self._edits if not (start <= edit.start and edit.end <= end)]
        return text

    def _render(self, start: int, end: int) -> str:
        parts = []
        for edit in sorted(self._edits, key=lambda edit: (edit.start, edit.end)):
            if start <= edit.start and edit.end <= end:
                parts += [self.text[start : edit.start], edit.new]
                start = edit.end
        return "".join([*parts, self.text[start:end]])

    def _line_end(self, at: int) -> int:
        found = _LINE_END.search(self.text, at)
        return found.start() if found else len(self.text)

    def _close_gaps(self, siblings: list[Entry]) -> None:
        """Take entries out of a mapping in braces, with their commas; comments between them go above."""
        for index, entry in enumerate(siblings):
            if entry not in self._removed:
                continue
            if any(each not in self._removed for each in siblings[index:]):
                start, end = entry.start, siblings[index + 1].start
                gap = self.text[entry.end : end]
            else:
                start, end = siblings[index - 1].end if index else entry.start, entry.end
                gap = self.text[start : entry.start]
            for comment in re.findall(r"#\s*(.*)", gap):
                self.remark(entry, comment)
            self._edits.append(_Edit(start, end, ""))


def written(value: Any, *, in_braces: bool = False) -> str:
    """A value as YAML text; a string that needs quotes has double ones, as in our examples."""
    text = yaml_tree.one_line([value])[1:-1] if in_braces else yaml_tree.one_line(value)
    return json.dumps(value, ensure_ascii=False) if text.startswith("'") else text
