"""Extends griffe, which reads signatures and docstrings for the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

from sirtaki.common.ops.collectives import without_waiting

MODULES = ("torch.ops.collectives", "numpy.collectives")
# `allgather = COLLECTIVES.allgather`, `allgather_async = asynchronous(allgather)`
FORM = re.compile(r"(?P<asynchronous>asynchronous\()?(COLLECTIVES\.)?(?P<method>\w+)\)?")


EXAMPLE = re.compile(r"(?<=^Example:\n)(?:    .*(?:\n|\Z)|\n)+", re.MULTILINE)


class Examples(griffe.Extension):
    """Shows the examples of docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(example: re.Match[str]) -> str:
    return f"    ```python\n{example[0].rstrip()}\n    ```\n"


class ExportedMethods(griffe.Extension):
    """Documents the methods of `ArrayCollectives` that a module exports as functions of the module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        methods = pkg["common.ops.collectives.ArrayCollectives"].members
        for module in (pkg[name] for name in MODULES):
            attributes = [
                member for member in module.members.values() if isinstance(member, griffe.Attribute)
            ]
            for attribute in attributes:
                form = FORM.fullmatch(str(attribute.value))
                if form is not None and form["method"] in methods:
                    function = function_of(
                        attribute, methods[form["method"]], form["asynchronous"] is not None
                    )
                    module.set_member(attribute.name, function)


def function_of(attribute: griffe.Attribute, method: Any, is_asynchronous: bool) -> griffe.Function:
    """Returns the function that the attribute is for users: a method without `self`."""
    function = griffe.Function(
        attribute.name,
        lineno=attribute.lineno,
        endlineno=attribute.endlineno,
        parameters=griffe.Parameters(*list(method.parameters)[1:]),  # without self
        returns=f"Handle[{method.returns}]" if is_asynchronous else method.returns,
    )
    text = method.docstring.value
    if is_asynchronous:
        text = without_waiting(text, method.name, attribute.name)
    function.docstring = griffe.Docstring(text, parent=function)
    return function
