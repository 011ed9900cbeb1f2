"""The records of the last version (records/), which this one must still read, and the other way round."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.versions.borders import forms, kinds_by_border, roots
from cluster.versions.breaks import find_breaks
from cluster.versions.record_form import name_of
from tests.cluster.versions.examples import Sampler, codec, kind_of, read_examples, read_forms

KINDS = {name_of(kind): kind for kinds in kinds_by_border().values() for kind in kinds}
EXAMPLES = read_examples()


def has(whole: Any, part: Any) -> bool:
    """Whether all of `part` is in `whole`, which may have further fields."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and has(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) <= len(whole) and all(map(has, whole, part))
    return bool(whole == part)


def test_fields_are_only_appended_and_have_defaults():
    assert find_breaks(read_forms(), forms(), EXAMPLES) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_this_version_reads_what_the_last_one_has_written(name):
    known = codec(name).encode(codec(name).decode(EXAMPLES[name], type=KINDS[name]))
    assert has(codec(name).decode(known), codec(name).decode(EXAMPLES[name]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_last_version_reads_what_this_one_writes(name):
    sent = Sampler(forms()).encoded(name)
    known = codec(name).encode(codec(name).decode(sent, type=kind_of(read_forms())(name)))
    assert has(codec(name).decode(sent), codec(name).decode(known))


@pytest.mark.parametrize("name", roots())
def test_every_record_has_an_example_that_this_version_reads(name):
    sent = Sampler(forms()).encoded(name)
    read = codec(name).decode(sent, type=KINDS[name])
    assert has(codec(name).decode(codec(name).encode(read)), codec(name).decode(sent))


def test_a_field_that_is_needed_and_missing_is_named():
    with pytest.raises(msgspec.ValidationError, match="missing required field `request_id`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"type": "Abort"}), type=KINDS["Abort"])
