"""The glossary of docs/design/glossary.md is the law for names; comments read as plain technical English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from test_structure import ROOT, sources

GLOSSARY = ROOT / "docs" / "design" / "glossary.md"
RIDDLES = ("What", "Who", "Whom", "Whose", "Where", "Of")  # a comment opens with a verb or a noun
# Words that were given up for the field's own, each with the word that replaces it.
RETIRED = {
    "AloneBackend": "SingleRankBackend",
    "BootstrapError": "RendezvousError",
    "BootstrapTimeout": "RendezvousTimeout",
    "bury": "reap",
    "Complaints": "RejectionLog",
    "is_news": "is_new",
    "Keeper": "PostMortem",
    "KnownSets": "ProcessSetTable",
    "let_go": "release, detach or free",
    "lets_go": "release, detach or free",
    "lingering": "detached operations",
    "lose_patience": "expire",
    "mend": "remedy",
    "Neighbours": "LocalPeers",
    "neighbours": "local peers",
    "Nudge": "WakeHint",
    "patience_ends": "deadline",
    "Sleeper": "EventWaiter",
    "spare_batch": "pooled_batch",
    "srt_hold_process_context": "srt_acquire_process_context",
    "srt_place": "srt_get_topology",
    "srt_start_operations": "srt_enqueue_or_complete",
    "StoreServer": "RendezvousServer",
    "StallWatch": "StallInspector",
    "Stranger": "a pending connection",
    "used_here": "record_stream",
    "Whereabouts": "StalledRankReport or PeerEndpoint",
}
WORD = re.compile(r"\w+")


def python_openings(path: Path) -> Iterator[tuple[int, str]]:
    """Returns the line and the text of each docstring, and of each first line of a comment."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield token.start[0], token.string.lstrip("#: ")
            last = token.start[0]


def native_openings(path: Path) -> Iterator[tuple[int, str]]:
    """Returns the line and the text of each first line of a comment."""
    is_inside = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        mark = re.match(r"\s*(//|/\*)\s*(.*)", line)
        if mark and not is_inside:
            yield number, mark[2]
        is_inside = mark is not None


def test_comments_open_with_a_verb_or_a_noun() -> None:
    found = [(path, *one) for path in sources(".py") for one in python_openings(path)]
    found += [(path, *one) for path in sources(".cc", ".h") for one in native_openings(path)]
    assert len(found) > 3000  # the comments were found
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {text[:60]}"
        for path, number, text in found
        if text.partition(" ")[0] in RIDDLES
    ]
    assert not wrong, "\n".join(wrong)


def test_words_that_were_given_up_do_not_come_back() -> None:
    wrong = []
    for path in sources(".py", ".cc", ".h", folders=("core", "bindings", "adapters", "runner", "benchmarks")):
        words = set(WORD.findall(path.read_text()))
        wrong += [
            f"{path.relative_to(ROOT)}: {word}: {RETIRED[word]}" for word in sorted(words & set(RETIRED))
        ]
    assert not wrong, "\n".join(wrong)


def test_classes_of_the_glossary_exist() -> None:
    glossary = GLOSSARY.read_text().partition("## Glossary")[2]
    rows = re.findall(r"^\| (.+?) \|", glossary, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", row)}
    assert len(names) > 10
    text = "\n".join(path.read_text() for path in sources(".py", ".h", ".cc"))
    declared = set(re.findall(r"\b(?:class|struct|enum class) (\w+)", text))
    assert not names - declared, sorted(names - declared)


def test_a_header_is_named_after_its_class() -> None:
    """A header that declares a single class has its name, or a part of it."""
    wrong = []
    for path in sources(".h", folders=("core/control", "core/context", "core/transport")):
        declared = re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
        snake = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in declared]
        if len(declared) == 1 and path.stem not in snake[0] and snake[0] not in path.stem:
            wrong.append(f"{path.relative_to(ROOT)} declares {declared[0]}")
    assert not wrong, "\n".join(wrong)
