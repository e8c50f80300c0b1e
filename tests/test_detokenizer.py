import pytest
from greedy import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_text import byte_tokenizer

from batchspec.detokenizer import INCOMPLETE, Detokenizer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


def push_all(text, params=None, prompt=""):
    detokenizer = Detokenizer(TOKENIZER, ids(prompt), params or greedy())
    stop = None
    for token_id in ids(text):
        stop = detokenizer.push(token_id)
        if stop is not None:
            break
    return detokenizer, stop


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=INCOMPLETE), max_size=30)


@settings(deadline=None)
@given(texts, texts)
def test_text_grows_by_whole_characters_to_what_was_encoded(prompt, text):
    detokenizer = Detokenizer(TOKENIZER, ids(prompt), greedy())
    for token_id in ids(text):
        before = detokenizer.text
        detokenizer.push(token_id)
        assert detokenizer.text.startswith(before)
        assert text.startswith(detokenizer.text)
    assert detokenizer.text == text


def test_a_character_that_begins_in_the_prompt_is_given_out_whole():
    detokenizer = Detokenizer(TOKENIZER, ids("x😀")[:-1], greedy())
    for token_id in ids("x😀")[-1:] + ids("y"):
        detokenizer.push(token_id)
    assert detokenizer.text == "😀y"


def test_half_a_character_is_never_shown_not_even_at_the_end():
    detokenizer = Detokenizer(TOKENIZER, ids("x"), greedy())
    for token_id in ids("a😀")[:-1]:
        detokenizer.push(token_id)
    assert detokenizer.text == "a"
    detokenizer.push(ids("😀")[-1])
    assert detokenizer.text == "a😀"


@settings(deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_is_cut_at_the_first_stop_string_that_gets_complete(text, stops):
    detokenizer, stop = push_all(text, greedy(stop=stops))
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert (detokenizer.text, stop) == (text, None)
        return
    first_end = min(ends)[0]
    assert stop in stops
    assert detokenizer.text == text[: min(start for end, start in ends if end == first_end)]


def test_a_stop_string_may_be_kept():
    params = greedy(stop=["ell"], include_stop_str_in_output=True)
    detokenizer, stop = push_all("hello", params)
    assert (detokenizer.text, stop) == ("hell", "ell")


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_count():
    detokenizer, stop = push_all("op no", greedy(stop="stop"), prompt="stop st")
    assert (detokenizer.text, stop) == ("op no", None)


def test_stop_strings_wait_for_min_tokens():
    detokenizer, stop = push_all("aXbXc", greedy(stop="X", min_tokens=2))
    assert (detokenizer.text, stop) == ("aXb", "X")


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    detokenizer, stop = push_all("abcd", greedy(stop="ab", min_tokens=1))
    assert (detokenizer.text, stop) == ("", "ab")


def test_whole_characters_are_given_out_before_half_a_one_in_the_same_token():
    """As byte-level vocabularies have them: one token that ends within a character."""
    tokenizer = byte_tokenizer()
    byte = tokenizer.convert_ids_to_tokens(ids("😀"))
    tokenizer.add_tokens(["END" + byte[0]])  # decoded like any run of bytes
    merged = tokenizer.convert_tokens_to_ids("END" + byte[0])
    detokenizer = Detokenizer(tokenizer, [], greedy(stop="END"))
    if tokenizer.decode([merged]) != "END" + INCOMPLETE:
        pytest.skip("this version of tokenizers does not decode added tokens as bytes")
    assert detokenizer.push(merged) == "END"


def test_bytes_that_never_become_a_character_do_not_hold_the_text_back_for_ever():
    detokenizer = Detokenizer(TOKENIZER, [], greedy())
    half = ids("é")[0]
    for token_id in [half] * 80 + ids("x"):
        detokenizer.push(token_id)
    assert detokenizer.text == INCOMPLETE * 80 + "x"


def test_text_that_may_begin_a_stop_string_is_held_back_while_streaming():
    detokenizer = Detokenizer(TOKENIZER, [], greedy(stop=["\n\nUser:"]))
    shown = []
    for token_id in ids("Hi\n\nUs!\n"):
        detokenizer.push(token_id)
        shown.append(detokenizer.text_so_far())
    assert shown == ["H", "Hi", "Hi", "Hi", "Hi", "Hi", "Hi\n\nUs!", "Hi\n\nUs!"]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_shown_only_when_asked_for(skip, text):
    detokenizer = Detokenizer(TOKENIZER, [], greedy(skip_special_tokens=skip))
    for token_id in [*ids("a"), END, *ids("b")]:
        detokenizer.push(token_id)
    assert detokenizer.text == text
