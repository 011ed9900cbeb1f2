from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer


@dataclass
class ByteTokens:
    """Token i stands for `table[i]`; ids at or above 1000 are special tokens."""

    table: list[bytes] = field(default_factory=lambda: [bytes([i]) for i in range(256)])

    def token_bytes(self, token_id: int) -> bytes:
        return b"<special>" if token_id >= 1000 else self.table[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= 1000


def feed(pieces: list[bytes], group: int = 1, **options) -> tuple[str, Detokenizer]:
    detokenizer = Detokenizer(ByteTokens(pieces), **options)
    ids = list(range(len(pieces)))
    text = "".join(detokenizer.add(ids[i : i + group]).text for i in range(0, len(ids), group))
    return text + detokenizer.finish(), detokenizer


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


text_or_bytes = st.one_of(
    st.binary(max_size=40), st.text(max_size=20).map(str.encode), st.text("ab\n👩‍🚀é́한", max_size=20).map(str.encode)
)
cuts = st.lists(st.integers(0, 100), max_size=20)


@given(text_or_bytes, cuts)
@example("👩‍🚀".encode(), [1, 2, 3])
@example(b"\xf0\x9f\x91\xff\xf0\x9f", [1, 2, 3, 4, 5])
def test_pieces_joined_are_the_whole_text(data, cuts):
    assert feed(split(data, cuts))[0] == data.decode(errors="replace")


@given(st.text("aé👩‍🚀\n", max_size=30), cuts)
def test_valid_text_never_shows_a_broken_character(text, cuts):
    pieces = split(text.encode(), cuts)
    detokenizer = Detokenizer(ByteTokens(pieces))
    assert all("\ufffd" not in detokenizer.add([i]).text for i in range(len(pieces)))


@given(st.text("abcé", max_size=30), st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3), cuts, st.booleans())
def test_text_ends_where_the_first_stop_string_is_complete(text, stop, cuts, include):
    got, detokenizer = feed(split(text.encode(), cuts), stop=stop, include_stop=include)
    # oracle: grow the text by one character at a time
    for end in range(len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            hit = max(hits, key=len)
            assert got == (text[:end] if include else text[: end - len(hit)])
            assert detokenizer.stopped_by == hit
            return
    assert got == text
    assert detokenizer.stopped_by is None


@given(text_or_bytes, cuts, st.integers(1, 7))
def test_grouping_of_tokens_does_not_change_the_text(data, cuts, group):
    pieces = split(data, cuts)
    assert feed(pieces, group, stop=["ab", "\n"])[0] == feed(pieces, stop=["ab", "\n"])[0]


def test_text_that_may_become_a_stop_string_is_held_back():
    detokenizer = Detokenizer(ByteTokens([b"Hello EN", b"D", b" of", b" END"]), stop=["END."])
    assert [detokenizer.add([i]).text for i in range(4)] == ["Hello ", "", "END of", " "]
    assert detokenizer.finish() == "END"


def test_tokens_after_the_stop_string_are_ignored():
    detokenizer = Detokenizer(ByteTokens([b"a", b"STOP", b"b"]), stop=["STOP"])
    assert detokenizer.add([0, 1, 2, 2]).text == "a"
    assert detokenizer.num_tokens == 2


def test_stop_string_does_not_count_before_min_tokens():
    assert feed([b"x.", b"y.", b"z.", b"w"], stop=["."], min_tokens=3)[0] == "x.y.z"


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<special>b")])
def test_special_tokens_are_text_only_on_request(skip, expected):
    detokenizer = Detokenizer(ByteTokens([b"a", b"b"]), skip_special_tokens=skip)
    assert detokenizer.add([0, 1000, 1]).text == expected


def test_hidden_last_token_counts_but_is_no_text():
    detokenizer = Detokenizer(ByteTokens([b"a", b"b"]))
    decoded = detokenizer.add([0, 1], hide_last=True)
    assert (decoded.text, decoded.offsets, detokenizer.num_tokens) == ("a", [0, 1], 2)


def test_offset_of_a_token_is_the_length_of_complete_text_before_it():
    detokenizer = Detokenizer(ByteTokens([b"ab", b"\xc3", b"\xa9", b"c"]))
    assert detokenizer.add([0, 1, 2, 3]).offsets == [0, 2, 2, 3]


def test_incomplete_character_at_the_end_becomes_one_replacement_character():
    assert feed([b"a", b"\xf0\x9f"])[0] == "a\ufffd"
