"""Incremental detokenization equals that of the whole sequence, for every kind of vocabulary."""

import codecs

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lorikeet.router.text.detokenizer import BytewiseDetokenizer, Vocabulary, WindowedDetokenizer, detokenizer
from tests.router.text.vocabularies import ALL, BYTEWISE, SPECIAL, TEXTS, byte_level, sentencepiece_like, word_pieces

VOCABULARIES = {name: Vocabulary(make()) for name, make in ALL.items()}


def pieces(vocabulary: Vocabulary, ids: list[int], prompt_ids: list[int]) -> list[str]:
    """The text of each token; the rest at the end belongs to the last."""
    growing = detokenizer(vocabulary, prompt_ids)
    texts = [growing.push(token_id) for token_id in ids]
    if texts:
        texts[-1] += growing.flush()
    return texts


def decoded_after(vocabulary: Vocabulary, prompt_ids: list[int], ids: list[int]) -> str:
    """What the tokenizer adds to the text of the prompt."""
    backend = vocabulary.backend
    before = backend.decode(prompt_ids, skip_special_tokens=False)
    return backend.decode([*prompt_ids, *ids], skip_special_tokens=False).removeprefix(before)


def test_the_implementation_depends_on_the_decoder() -> None:
    assert {name for name, vocabulary in VOCABULARIES.items() if vocabulary.is_bytewise} == set(BYTEWISE)
    assert isinstance(detokenizer(VOCABULARIES["word_pieces"], []), WindowedDetokenizer)
    assert isinstance(detokenizer(VOCABULARIES["byte_level"], []), BytewiseDetokenizer)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_round_trips(name: str, text: str) -> None:
    vocabulary = VOCABULARIES[name]
    assume(not any(word in text for word in SPECIAL))  # no space stands before a special token
    ids = vocabulary.backend.encode(text, add_special_tokens=False).ids
    assert vocabulary.special_ids.isdisjoint(ids)
    expected = text if name == "byte_level" else " " + text.replace("▁", " ") if text else ""
    assert "".join(pieces(vocabulary, ids, [])) == expected


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_byte_level_tokens_decode_as_a_whole(data: st.DataObject) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = data.draw(st.lists(st.integers(3, vocabulary.size - 1), max_size=30))
    assert "".join(pieces(vocabulary, ids, [])) == vocabulary.backend.decode(ids, skip_special_tokens=False)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_byte_fallback_tokens_decode_as_utf8(data: st.DataObject) -> None:
    """The tokenizer replaces a whole run of bytes where one is invalid; a stream cannot retract what it sent."""
    vocabulary = VOCABULARIES["sentencepiece_like"]
    ids = data.draw(st.lists(st.integers(3, vocabulary.size - 1), max_size=30))
    together = b"".join(vocabulary.piece(token_id) for token_id in ids)
    assert "".join(pieces(vocabulary, ids, [])) == together.decode(errors="replace")


@pytest.mark.parametrize("name", list(ALL))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_text_continues_the_prompt(name: str, data: st.DataObject) -> None:
    """Spaces between prompt and output are those of the whole text."""
    vocabulary = VOCABULARIES[name]
    plain = [
        token_id
        for token_id in range(vocabulary.size)
        if token_id not in vocabulary.special_ids and "\ufffd" not in vocabulary.text(token_id)
    ]
    ids = st.lists(st.sampled_from(plain), min_size=1, max_size=20)
    prompt_ids, output_ids = data.draw(ids), data.draw(ids)
    # A prompt of only the stripped space has no text, so the whole text cannot start with it.
    first = next(token_id for token_id in plain if vocabulary.text(token_id).strip())
    prompt_ids = [first, *prompt_ids]
    assert "".join(pieces(vocabulary, output_ids, prompt_ids)) == decoded_after(vocabulary, prompt_ids, output_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_chunk_has_half_a_character(text: str) -> None:
    for make in (byte_level, sentencepiece_like):
        vocabulary = Vocabulary(make())
        ids = vocabulary.backend.encode(text, add_special_tokens=False).ids
        assert not any("\ufffd" in piece for piece in pieces(vocabulary, ids, []))


def test_a_special_token_ends_an_incomplete_character() -> None:
    vocabulary = VOCABULARIES["sentencepiece_like"]
    first_byte, second_byte = vocabulary.backend.token_to_id("<0xC3>"), vocabulary.backend.token_to_id("<0xA9>")
    turn = vocabulary.backend.token_to_id("<|turn|>")
    assert pieces(vocabulary, [first_byte, second_byte], []) == ["", "é"]
    assert pieces(vocabulary, [first_byte, turn, second_byte], []) == ["", "\ufffd<|turn|>", "\ufffd"]
    words = VOCABULARIES["word_pieces"]
    jump, turn = words.backend.token_to_id("jump"), words.backend.token_to_id("<|turn|>")
    assert pieces(words, [jump, turn, jump], []) == ["jump", "<|turn|>", " jump"]


def test_bytes_of_half_a_surrogate_are_two_characters() -> None:
    vocabulary = VOCABULARIES["sentencepiece_like"]
    growing = detokenizer(vocabulary, [])
    for byte in ("<0xED>", "<0xA0>"):
        assert growing.push(vocabulary.backend.token_to_id(byte)) == ""
    text = growing.push(vocabulary.backend.token_to_id("<0x41>"))
    assert text == "\ufffd\ufffdA" and growing.num_earlier == 2


def test_the_window_of_word_pieces_stays_short() -> None:
    vocabulary = Vocabulary(word_pieces())
    growing = WindowedDetokenizer(vocabulary, [4])
    ids = [5, 6, 7, 9] * 100
    text = "".join(growing.push(token_id) for token_id in ids)
    assert text == decoded_after(vocabulary, [4], ids)
    assert len(growing._ids) <= 2 * growing.context


def test_an_id_without_a_name_has_no_text() -> None:
    """Output heads are often padded beyond the vocabulary."""
    vocabulary = VOCABULARIES["byte_level"]
    assert pieces(vocabulary, [vocabulary.size + 5], []) == [""]


def test_python_decodes_incrementally_as_it_does_at_once() -> None:
    """The bytewise implementation relies on this."""
    broken = b"a\xf0\x9f\x98\xff\xe4\xbd\xc3\xa9\xed\xa0\x80\xf4\x90\x80\x80"
    for cut in range(len(broken)):
        first, taken = codecs.utf_8_decode(broken[:cut], "replace", False)
        assert first + broken[taken:].decode(errors="replace") == broken.decode(errors="replace")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_characters_of_earlier_tokens_are_counted(name: str, data: st.DataObject) -> None:
    """They are what the text would have been without the token."""
    vocabulary = VOCABULARIES[name]
    ids = data.draw(st.lists(st.integers(3, vocabulary.size - 1), min_size=1, max_size=12))
    growing, without = detokenizer(vocabulary, []), detokenizer(vocabulary, [])
    for token_id in ids[:-1]:
        growing.push(token_id)
        without.push(token_id)
    text, tail = growing.push(ids[-1]), without.flush()
    assert growing.num_earlier in (0, len(tail)) and text.startswith(tail[: growing.num_earlier])
    piece = vocabulary.piece(ids[-1])
    continues = bool(piece) and 0x80 <= piece[0] < 0xC0 and ids[-1] not in vocabulary.special_ids
    assert growing.num_earlier == 0 or not continues or text.startswith("\ufffd\ufffd")


def test_words_after_an_incomplete_character_are_not_its(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = VOCABULARIES["word_pieces"]
    growing = WindowedDetokenizer(vocabulary, [])
    texts = iter(["a\ufffd", "a\ufffd\ufffd", "a\ufffd\ufffdb"])
    monkeypatch.setattr(WindowedDetokenizer, "_decode", lambda self, ids: next(texts))
    growing._shown = growing._decoded = "a"
    counts = [(growing.push(5), growing.num_earlier) for _ in range(3)]
    assert counts == [("", 0), ("", 1), ("\ufffd\ufffdb", 2)]
