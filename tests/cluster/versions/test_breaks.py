"""Changes of records that another version could not read, planted one by one, and changes that it can."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from cluster.versions.borders import forms, roots
from cluster.versions.breaks import find_breaks
from cluster.versions.record_form import Forms, RecordForm
from tests.cluster.versions.examples import Sampler, codec, kind_of

TODAY = forms()


def without(name: str, field: str) -> Forms:
    return {name: changed(name, fields=[told for told in TODAY[name].fields if not told.startswith(f"{field}:")])}


def changed(name: str, **parts: object) -> RecordForm:
    return msgspec.structs.replace(TODAY[name], **parts)


def with_field(name: str, field: str, told: str) -> Forms:
    """A record in which a field says something else of itself."""
    fields = [told if each.startswith(f"{field}:") else each for each in TODAY[name].fields]
    assert fields != TODAY[name].fields
    return {name: changed(name, fields=fields)}


def appended(name: str, told: str) -> Forms:
    return {name: changed(name, fields=[*TODAY[name].fields, told])}


def swapped(name: str) -> Forms:
    first, second, *others = TODAY[name].fields
    return {name: changed(name, fields=[second, first, *others])}


BREAKS: dict[str, tuple[Forms, str]] = {
    "a field of a message is removed": (without("Abort", "reason"), "Abort.reason was removed"),
    "a field of a store's record is removed": (without("JobRecord", "secret"), "JobRecord.secret was removed"),
    "a field has another name": (
        with_field("TokenBatch", "commands_to", "address: str"),
        "TokenBatch.commands_to was removed, or has another name",
    ),
    "a field has another type": (with_field("HoldMark", "tokens", "tokens: str"), "HoldMark.tokens was int and is str"),
    "a field may be none": (
        with_field("Subscribe", "address", "address: None | str"),
        "Subscribe.address was str and is None | str",
    ),
    "the items of an array change places": (swapped("Peer"), "Peer.engine_id was item 0 of the array and is item 1"),
    "an item enters an array in the middle": (
        {"Window": changed("Window", fields=["name: str = ''", *TODAY["Window"].fields])},
        "Window.start was item 0 of the array and is item 1",
    ),
    "a new field has no default": (appended("EngineUpdate", "load_2: int"), "EngineUpdate.load_2 is new and needs"),
    "a field loses its default": (
        with_field("TokenDelta", "position", "position: int"),
        "TokenDelta.position has no default any more",
    ),
    "a default changes where defaults are left out": (
        with_field("SamplingParams", "top_p", "top_p: float = 0.9"),
        "SamplingParams.top_p may be left out: this meant 1.0, and means 0.9",
    ),
    "a needed field may be left out": (
        with_field("GenerateRequest", "prompt", "prompt: list[int] = []"),
        "GenerateRequest.prompt may be missing now, and the version before needs it",
    ),
    "a choice has one more value": (
        with_field("Abort", "reason", "reason: Literal['abort', 'late', 'stop'] = 'abort'"),
        "Abort.reason was Literal",
    ),
    "a tag has another name": ({"Add": changed("Add", tag="AddRequest")}, "the tag of Add was 'Add'"),
    "a map becomes an array": ({"Claim": changed("Claim", is_array=True)}, "Claim is an array now"),
    "a record refuses further fields": ({"QuotaRecord": changed("QuotaRecord", is_closed=True)}, "QuotaRecord refuses"),
    "a part has another name": ({"PromptHold": changed("PromptHold", part="hints.kept")}, "PromptHold was carried as"),
    "what was a hint is needed": ({"Prediction": changed("Prediction", part="speculation")}, "Prediction was carried"),
    "a message of a union is removed": (
        with_field("Envelope", "message", "message: Progress | Refused | Release | Released"),
        "Envelope.message was",
    ),
}


@pytest.mark.parametrize("change", BREAKS)
def test_a_change_that_one_version_could_not_read_is_found(change):
    records, told = BREAKS[change]
    lines = find_breaks(TODAY, TODAY | records, roots())
    assert lines and lines[0].startswith(told)


@pytest.mark.parametrize(
    ("change", "name", "error"),
    [
        ("a field has another type", "PromptHold", "Expected `int`, got `str`"),
        ("a new field has no default", "EngineUpdate", "missing required field `load_2`"),
        ("a choice has one more value", "Abort", "Invalid enum value 'late'"),
        ("a tag has another name", "Add", "Invalid value 'Add"),
        ("a map becomes an array", "Claim", "Expected `object`, got `array`|Expected `array`, got `object`"),
    ],
)
def test_what_the_rules_refuse_is_what_bytes_cannot_say(change, name, error):
    """One of the two versions does not read what the other sends."""
    later, failures = TODAY | BREAKS[change][0], []
    sampler = Sampler(later)
    samples = {"a choice has one more value": {"type": "Abort", "request_id": "a", "reason": "late"}}
    sent = codec(name).encode(samples[change]) if change in samples else sampler.encoded(name)
    for data, reader in ((sent, TODAY), (Sampler(TODAY).encoded(name), later)):
        try:
            codec(name).decode(data, type=kind_of(reader)(name))
        except msgspec.ValidationError as found:
            failures.append(str(found))
    assert any(re.search(error, failure) for failure in failures), failures


def test_a_record_that_is_gone_is_found():
    later = {name: form for name, form in TODAY.items() if name != "Drain"}
    assert find_breaks(TODAY, later, roots()) == ["Drain was removed"]


def renamed(was: str, now: str) -> Forms:
    """All forms, in which a record that is only a part of others has another name."""
    found = {name: changed(name, fields=[told.replace(was, now) for told in TODAY[name].fields]) for name in TODAY}
    return {now if name == was else name: form for name, form in found.items()}


READABLE: dict[str, Callable[[], Forms]] = {
    "an appended field with a default": lambda: TODAY | appended("GenerateRequest", "deadline_s: None | float = None"),
    "one of an array": lambda: TODAY | appended("Peer", "zone: str = ''"),
    "a new kind of message": lambda: TODAY | {"Pause": RecordForm(fields=["seconds: float"], tag="Pause")},
    "one more message in a union": lambda: (
        TODAY
        | {"Hurry": RecordForm(fields=["handoff_id: str"], tag="Hurry", tag_field="type")}
        | with_field(
            "Envelope", "message", TODAY["Envelope"].fields[2].replace("Heartbeat", "Heartbeat | Hurry")
        )
    ),
    "another name for what others consist of": lambda: renamed("HoldMark", "Mark"),
    "nothing": lambda: TODAY,
}  # fmt: skip


@pytest.mark.parametrize("change", READABLE)
def test_a_change_that_both_versions_read_is_not_refused(change):
    later = READABLE[change]()
    assert find_breaks(TODAY, later, roots()) == []


@pytest.mark.parametrize("change", ["an appended field with a default", "one of an array"])
def test_bytes_with_an_appended_field_are_read_by_the_version_before_and_bytes_without_it_by_the_next(change):
    later = READABLE[change]()
    for name in ("GenerateRequest", "Envelope"):
        for sends, reads in ((later, TODAY), (TODAY, later)):
            codec(name).decode(Sampler(sends).encoded(name), type=kind_of(reads)(name))
