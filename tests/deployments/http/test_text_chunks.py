import msgspec
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.text_chunks import TextChunks
from deployments.openai.response_bodies import ChatChunk, ChatChunkChoice, ChatDelta


def chunk(index: int, text: str) -> ChatChunk:
    return ChatChunk("id", 1, 'a "model"', [ChatChunkChoice(index, ChatDelta(content=text))], "chat.completion.chunk")


@given(st.lists(st.tuples(st.integers(0, 2), st.text(st.characters(exclude_categories=["Cs"])))))
def test_chunks_are_what_the_encoder_makes_of_the_whole_body(pieces):
    texts = TextChunks(chunk)
    for index, text in pieces:
        assert msgspec.json.encode(texts.encoded(index, text)) == msgspec.json.encode(chunk(index, text))
