"""A framework without a symbol that an adapter needs is refused by the symbol's name."""

from __future__ import annotations

import json

import pytest

from sirtaki.common.private_api import Framework

JSON = Framework("json", "3.1", "2.0 and 3.0")


def test_a_symbol_is_found_in_modules_and_in_objects() -> None:
    assert JSON.symbol("json.decoder.JSONDecoder.decode") is json.JSONDecoder.decode
    assert JSON.symbol("json.tool.main").__module__ == "json.tool"  # json does not import it by itself
    assert JSON.optional("json.decoder.nothing.at_all") is None


def test_a_missing_symbol_is_named_with_the_tested_versions() -> None:
    words = (
        r"sirtaki uses json.decoder._gone, which json 3.1 does not have; .* with json 2.0 and 3.0: install"
    )
    with pytest.raises(ImportError, match=words):
        JSON.symbol("json.decoder._gone")
    with pytest.raises(ImportError, match=r"JSONDecoder\._inputs, which json 3.1"):
        JSON.attribute(json.JSONDecoder(), "_inputs")
