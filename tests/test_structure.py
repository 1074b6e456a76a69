"""The rules of the code's structure that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from sirtaki.bindings import errors, library
from sirtaki.bindings.request import Batch

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"

# Includes point to lower layers only. Control and data meet in context, and in plan, which lies below both.
BELOW = {
    "base": set(),
    "observe": {"base"},
    "plan": {"base", "observe"},
    "transport": {"base", "observe"},
    "control": {"base", "observe", "plan", "transport"},
    "data": {"base", "observe", "plan", "transport"},
    "gpu": {"base", "observe", "plan", "transport", "data"},
    "context": {"base", "observe", "plan", "transport", "control", "data", "gpu"},
    "api": {"base", "observe", "plan", "transport", "control", "data", "gpu", "context"},
}
# The native parts of the bindings know the core by its C interface alone.
INTERFACE = ("sirtaki.h", "sirtaki_observe.h")
NATIVE_BINDINGS = {
    "native": {"native"},
    **{name: {"native", name} for name in ("mpi", "tensorflow", "xla")},
}
# The same for Python: the packages of sirtaki that each folder may import, besides itself. The bootstrap
# makes processes ranks, and needs no runner, which starts processes.
IMPORTS = {
    "bindings": {"bindings"},
    "bindings/bootstrap": {"bindings", "bindings.bootstrap"},
    "adapters/as_horovod": {"as_horovod", "common"},
    "adapters/auto": {"auto", "bindings", "common"},
    "adapters/bench": {"bench", "bindings", "bindings.bootstrap", "common", "numpy", "runner", "torch"},
    "adapters/common": {"bindings", "bindings.bootstrap", "common"},
    "adapters/jax": {"bindings", "common", "jax", "numpy"},
    "adapters/numpy": {"bindings", "common", "numpy"},
    "adapters/ray": {"bindings", "bindings.bootstrap", "ray", "runner"},
    "adapters/spark": {"bindings.bootstrap", "runner", "spark"},
    "adapters/tensorflow": {"bindings", "common", "keras", "numpy", "tensorflow"},
    "adapters/torch": {"bindings", "common", "torch"},
    "adapters/keras": {"bindings", "common", "jax", "keras", "numpy", "tensorflow", "torch"},
    "runner": {"bindings", "bindings.bootstrap", "runner"},
}
NEUTRAL = ("bindings", "bindings/bootstrap", "adapters/auto", "adapters/common", "runner")  # use no framework
FRAMEWORKS = {"jax", "numpy", "tensorflow", "torch"}

# Symbols that a framework does not document: only the _private.py of each adapter names them.
PRIVATE = re.compile(
    r"torch\._C|_execution_engine|batchnorm import _|jax\._src|jaxlib\.mlir"
    r"|tensorflow\.(python|compiler)\b|(?<!self)\._(trainable_variables|flatten_layers|inputs|functions)\b"
)

NO_CODE = re.compile(r"//.*|/\*[\s\S]*?\*/|^#.*$|'(?:\\.|[^'\\\n])'" + r'|"(?:\\.|[^"\\\n])*"', re.MULTILINE)
CONTAINER = re.compile(r"\s*(template\s*<.*>\s*)?(typedef )?(namespace|class|struct|union|enum|extern)\b")

PRODUCT = ("core", "bindings", "adapters", "runner")
FOLDERS = (*PRODUCT, "tests", "examples", "benchmarks")
GENERATED = {"_cdef.py", "_version.py"}
MOST_FILES = 15  # of a folder, beside its sub-folders
LONGEST_FILE = 800
LONGEST_FUNCTION = 60
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))

# Relocated constants and the compiler's own references are written once, by the loader.
# process_context.cc holds the variable through which compiled programs find their context.
# The context of the process, and its users (core/api/process_context.cc).
MAY_BE_WRITABLE = {"(anonymous namespace)::process_context", "(anonymous namespace)::in_use"}
WRITABLE = re.compile(r"\.(data(?!\.rel\.ro|\.rel\.local\.DW\.ref)|bss|tdata|tbss)")


def sources(*suffixes: str, folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in found if path.suffix in suffixes and path.name not in GENERATED]


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Returns the functions of a file and their lengths in lines, without their docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            yield (
                node.name,
                (node.end_lineno or node.lineno) - node.lineno + 1 - len((docstring or "").splitlines()),
            )


def native_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Returns a C++ file's outermost blocks that are no namespace and no type: positions and lengths."""
    code = NO_CODE.sub(lambda match: "\n" * match.group().count("\n"), path.read_text())
    containers: list[bool] = []  # for each open block, whether it is a namespace or a type
    head = start = 0
    for mark in re.finditer("[;{}]", code):
        if mark.group() == "{":
            if all(containers):
                start = mark.start()
            containers.append(all(containers) and CONTAINER.match(code[head:start]) is not None)
        elif mark.group() == "}" and not containers.pop() and all(containers):
            yield f"line {code.count(chr(10), 0, start) + 1}", code.count("\n", start, mark.start()) + 1
        head = mark.end()


def test_includes_go_down_only() -> None:
    assert {path.name for path in CORE.iterdir() if path.is_dir()} <= {*BELOW, "include"}
    wrong = []
    for source in sources(".h", ".cc", folders=("core",)):
        folder = source.relative_to(CORE).parts[0]
        for included in re.findall(r'#include "([^"]+)"', source.read_text()):
            target = included.partition("/")[0] if "/" in included else ""
            if target in BELOW and target != folder and target not in BELOW.get(folder, set()):
                wrong.append(f"{source.relative_to(ROOT)} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_folders_of_the_core_do_not_include_each_other_in_a_circle() -> None:
    included: dict[str, set[str]] = {}
    for source in sources(".h", ".cc", folders=("core",)):
        folder = str(source.parent.relative_to(CORE))
        found = re.findall(r'#include "([\w/]+)/\w+\.h"', source.read_text())
        included.setdefault(folder, set()).update(set(found) - {folder})
    assert len(included) > 20  # the folders were found
    TopologicalSorter(included).prepare()  # raises CycleError, which names the folders


def test_native_bindings_include_the_c_interface_only() -> None:
    found = {source: source.parent.name for source in sources(".h", ".cc", folders=("bindings",))}
    assert set(found.values()) == set(NATIVE_BINDINGS)
    wrong = []
    for source, folder in found.items():
        allowed = tuple(f"{name}/" for name in NATIVE_BINDINGS[folder])
        for included in re.findall(r'#include "([^"]+)"', source.read_text()):
            if included not in INTERFACE and not included.startswith(allowed):
                wrong.append(f"{source.relative_to(ROOT)} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_each_type_of_the_core_has_a_name_of_its_own() -> None:
    """The linker treats two types of one name in one namespace as one type, and mixes up their members."""
    declared: dict[str, list[str]] = {}
    for source in sources(".h", folders=("core",)):
        for name in re.findall(
            r"^(?:struct|class) (?:alignas\([^)]*\) |(?:SCOPED_)?CAPABILITY(?:\([^)]*\))? )?(\w+)(?: final)?"
            r"(?: : [^;{]*)? {",
            source.read_text(),
            re.MULTILINE,
        ):
            declared.setdefault(name, []).append(str(source.relative_to(ROOT)))
    assert len(declared) > 50  # the types were found
    assert not {name: places for name, places in declared.items() if len(places) > 1}


def test_imports_go_down_only() -> None:
    wrong = []
    for folder, allowed in IMPORTS.items():
        below = [ROOT / other for other in IMPORTS if other.startswith(f"{folder}/")]
        for source in sources(".py", folders=(folder,)):
            if any(map(source.is_relative_to, below)):
                continue
            text = source.read_text()
            found = re.findall(r"^\s*(?:from|import) sirtaki\.(bindings\.bootstrap|\w+)", text, re.MULTILINE)
            used = set(found) - allowed
            if folder in NEUTRAL and source.name != "stores.py":  # that of torchrun is for torch only
                used |= FRAMEWORKS & set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
            used |= set(re.findall(r"^\s*from (\.\S*) import", text, re.MULTILINE))  # one style: absolute
            wrong += [f"{source.relative_to(ROOT)} imports {name}" for name in sorted(used)]
    assert not wrong, "\n".join(wrong)


def test_private_symbols_of_frameworks_are_in_one_place() -> None:
    adapters = [
        path for folder in IMPORTS for path in sources(".py", folders=(folder,)) if folder not in NEUTRAL
    ]
    naming = [path for path in adapters if PRIVATE.search(path.read_text())]
    assert {path.parent.name for path in naming} == {"jax", "keras", "tensorflow", "torch"}
    assert {path.name for path in naming} == {"_private.py"}


def test_no_folder_has_too_many_files() -> None:
    counts = Counter(path.parent for path in sources(".py", ".cc", ".h", folders=PRODUCT))
    assert not {str(folder): count for folder, count in counts.items() if count > MOST_FILES}


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(".py", ".cc", ".h")}
    assert len(lengths) > 100  # the functions were found
    assert not {str(path): length for path, length in lengths.items() if length > LONGEST_FILE}


def test_no_function_is_too_long() -> None:
    found = [(path, *function) for path in sources(".py") for function in python_functions(path)]
    found += [(path, *function) for path in sources(".cc", ".h") for function in native_functions(path)]
    assert len(found) > 1000  # the names were found
    assert not [
        f"{path}: {name}: {length} lines" for path, name, length in found if length > LONGEST_FUNCTION
    ]


def test_nothing_is_marked_as_unfinished() -> None:
    marked = [path for path in sources(".py", ".cc", ".h", ".txt") if UNFINISHED.search(path.read_text())]
    assert not marked


def test_documents_name_files_that_exist() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    documents += ROOT.glob("benchmarks/results/*.md")
    known = [f"/{path.relative_to(ROOT)}" for path in [*sources(".py", ".cc", ".h"), *documents]]
    lost = []
    for document in documents:
        text = document.read_text()
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        lost += [f"{document}: {link}" for link in links if not (document.parent / link).exists()]
        for name in set(re.findall(r"`([\w./-]+\.(?:py|cc|h|md))`", text)) - {"train.py"}:
            if not any(path.endswith(f"/{name}") for path in known):
                lost.append(f"{document}: {name}")
    assert not lost, "\n".join(lost)


def test_the_library_exports_its_interface_only() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library.PATH], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
    headers = [(CORE / "include" / name).read_text() for name in INTERFACE]
    declared = {name for header in headers for name in re.findall(r"\b(srt_\w+)\(", header)}
    assert {name for name in names if not name.startswith("srt_")} <= {
        "SIRTAKI"
    }  # the version script's own name
    assert {name for name in names if name.startswith("srt_")} == declared


def test_what_tensorflow_opens_exports_nothing_and_needs_nothing_of_it() -> None:
    path = library.PATH.with_name("libsirtaki_tensorflow.so")
    for switch in ("--defined-only", "--undefined-only"):
        listed = subprocess.run(["nm", "-D", switch, path], capture_output=True, text=True, check=True)
        names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
        assert {name for name in names if name.startswith(("TF_", "_Z"))} == set()
        assert switch == "--undefined-only" or not names


def test_no_object_file_has_writable_globals() -> None:
    objects = list((ROOT / "build" / "core").glob("**/core.dir/**/*.o"))
    if not objects:
        pytest.skip("there are no object files here; make test builds them")
    wrong = []
    for path in objects:
        for line in subprocess.run(
            ["objdump", "--syms", "--demangle", path], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            place, _, symbol = line.partition("\t")  # "address flags section", "size visibility name"
            size, _, name = symbol.partition(" ")
            if WRITABLE.match(place.rpartition(" ")[2]) and int(size, 16) and name not in MAY_BE_WRITABLE:
                wrong.append(f"{path.relative_to(ROOT)}: {int(size, 16)} bytes for {name}")
    assert not wrong, "\n".join(wrong)


def test_every_failure_has_an_exception() -> None:
    kinds = {kind.name for kind in library.statuses()} - {"ok", "in_progress"}
    assert kinds == set(errors.CLASSES)
    for kind in library.statuses():
        if kind.name in errors.CLASSES:
            assert str(errors.error_of(kind.code, "what happened")) == "what happened"


def test_a_batch_is_written_where_the_core_reads_it() -> None:
    batch = Batch(3)
    for index in range(3):
        batch.set_request(index, 0, 10, (index, 2), name=f"n{index}", group=(7, 3), layout=5, prescale=0.5)
        batch.set_buffers(index, 100 + index, 200 + index)
        batch.set_flags(index, index)
    first = [(r.input, r.output, r.flags, r.dimensions, list(r.shape[0:2])) for r in batch.requests]
    assert first == [(100 + i, 200 + i, i, 2, [i, 2]) for i in range(3)]
    batch.set_all_buffers([1, 2, 3], [4, 5, 6])
    batch.set_all_flags([1, 0, 1])
    assert [(r.input, r.output, r.flags) for r in batch.requests] == [(1, 4, 1), (2, 5, 0), (3, 6, 1)]
    assert [library.text(r.name) for r in batch.requests] == ["n0", "n1", "n2"]
    assert {(r.group_id, r.group_size, r.layout, r.prescale, r.dtype) for r in batch.requests} == {
        (7, 3, 5, 0.5, 10)
    }
