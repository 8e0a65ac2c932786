"""A form binds what follows the thoughts, and the thoughts themselves are free."""

import numpy as np
import pytest

from outdraft.core.errors import RequestError
from outdraft.core.structured_outputs import StructuredOutput, Thoughts
from outdraft.structured.compiler import GrammarCompiler
from tests.engine.byte_level import byte_ids, tokenizer

END_ID = 1
VOCAB_SIZE = tokenizer().get_vocab_size()
FORMS = [
    ("json_schema", '{"enum": [5]}', "5"),
    ("json_object", "", '{"a":5}'),
    ("regex", "[ab]{2}", "ab"),
    ("grammar", 'start: "y" | "n" start', "nny"),
    ("grammar", 'root ::= "y" | "n" root', "nny"),
]
BEGUN, FREE = Thoughts("</think>"), Thoughts("</think>", start="<think>")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB_SIZE)


def is_whole(compiler: GrammarCompiler, structured: StructuredOutput, text: str) -> bool:
    matcher = compiler.compile(structured).matcher({END_ID})
    for token_id in byte_ids(text):
        mask = np.zeros((1, VOCAB_SIZE // 32 + 1), np.int32)
        matcher.fill_masks([], [], mask)
        if not allows(mask[0], token_id):
            return False
        matcher.advance(token_id)
    mask = np.zeros((1, VOCAB_SIZE // 32 + 1), np.int32)
    matcher.fill_masks([], [], mask)
    return allows(mask[0], END_ID)


def allows(mask_W: np.ndarray, token_id: int) -> bool:
    return bool(mask_W[token_id // 32] >> (token_id % 32) & 1)


@pytest.mark.parametrize(("kind", "text", "answer"), FORMS)
def test_the_form_begins_behind_the_first_end_of_the_thoughts(compiler, kind, text, answer):
    begun = StructuredOutput(kind, text, BEGUN)
    for thoughts in ("", "héllo\n{<b> </thin k>", answer, "<think>"):
        assert is_whole(compiler, begun, f"{thoughts}</think>{answer}")
        assert not is_whole(compiler, begun, f"{thoughts}</think>{answer}</think>{answer}")
        assert not is_whole(compiler, begun, f"{thoughts}</think>?{answer}")
        assert not is_whole(compiler, begun, f"{thoughts}{answer}")


@pytest.mark.parametrize(("kind", "text", "answer"), FORMS)
def test_a_model_that_may_think_begins_with_its_mark_or_with_the_form(compiler, kind, text, answer):
    free = StructuredOutput(kind, text, FREE)
    assert is_whole(compiler, free, answer)
    assert is_whole(compiler, free, f"<think>\n{answer} or?\n</think>{answer}")
    assert not is_whole(compiler, free, f"<think>{answer}")
    assert not is_whole(compiler, free, f"hm</think>{answer}")
    assert not is_whole(compiler, free, f"{answer}<think></think>{answer}")


def test_a_draft_that_reaches_from_the_thoughts_into_the_form_has_the_masks_of_single_steps(
    compiler,
):
    form = StructuredOutput("regex", "[ab]{2}", BEGUN)
    draft = byte_ids("x</think>abab")
    width = VOCAB_SIZE // 32 + 1
    together = np.zeros((1 + len(draft), width), np.int32)
    compiler.compile(form).matcher({END_ID}).fill_masks(draft, range(len(draft)), together)
    steps = compiler.compile(form).matcher({END_ID})
    num_reached = len(byte_ids("x</think>ab")) + 1
    for row in range(num_reached):
        alone = np.zeros((1, width), np.int32)
        steps.fill_masks([], [], alone)
        assert (together[row] == alone[0]).all(), row
        steps.advance(draft[row])
    assert not allows(together[num_reached - 1], draft[num_reached - 1])


@pytest.mark.parametrize(("end", "start"), [("", None), ("a", ""), (5, None), ("a", 5)])
def test_marks_are_texts(end, start):
    with pytest.raises(RequestError, match="must be a text"):
        Thoughts(end, start)
    with pytest.raises(RequestError, match="must be Thoughts"):
        StructuredOutput("regex", "a", "b")  # pyright: ignore[reportArgumentType]
