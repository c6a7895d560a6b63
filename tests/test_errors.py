"""One tree of exceptions, drawn in the module's docstring exactly as it is."""

import inspect
import re

import pytest

from strands_cosmos3 import errors
from strands_cosmos3.errors import (
    Cosmos3Error,
    MissingDependencyError,
    ResourceNotFoundError,
    UnknownNameError,
)

ALL = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)
]


def test_every_error_descends_from_the_root():
    assert all(issubclass(kind, Cosmos3Error) for kind in ALL)


def test_the_drawing_names_every_error_and_its_standard_base():
    drawn = dict(re.findall(r"(\w+Error)(?: \((\w+)\))?", errors.__doc__))
    assert set(drawn) == {kind.__name__ for kind in ALL}
    for name, base in drawn.items():
        if base:
            assert base in {parent.__name__ for parent in getattr(errors, name).__mro__}


def test_the_drawing_s_indentation_is_the_inheritance():
    branch = ["Cosmos3Error"]
    for line in errors.__doc__.splitlines():
        if (match := re.search(r"[├└]── (\w+)", line)) is None:
            continue
        depth = line.index(match[0]) // 4  # four columns a generation
        branch[depth:] = [match[1]]
        assert getattr(errors, branch[depth - 1]) in getattr(errors, match[1]).__bases__, match[1]


def test_unknown_name_lists_what_is_valid_and_suggests_the_nearest():
    message = str(UnknownNameError("embodiment", "driod", ["umi", "droid", "av"]))
    assert "Did you mean 'droid'?" in message
    assert "Valid: av, droid, umi." in message


@pytest.mark.parametrize("name", [None, 3, [1], "zzzz"])
def test_unknown_name_takes_any_value_without_a_suggestion(name):
    message = str(UnknownNameError("thing", name, ["a"]))
    assert repr(name) in message
    assert "Did you mean" not in message


def test_file_and_import_errors_print_their_message_only():
    assert str(ResourceNotFoundError("no such file: x")) == "no such file: x"
    assert str(ResourceNotFoundError()) == ""
    assert str(MissingDependencyError("install [sim]")) == "install [sim]"


def test_errors_are_caught_as_their_standard_kind_too():
    with pytest.raises(FileNotFoundError):
        raise ResourceNotFoundError("x")
    with pytest.raises(ValueError):
        raise errors.ShapeError("x")
