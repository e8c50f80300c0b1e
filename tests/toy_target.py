"""A toy target with its references, for the auditor."""

from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM
from batchspec.audit.target import Target, answer_alone

TEXTS = ("The sea", "A list: a b c a b c", "Once", "one two one two one", "Z", "What is a tree?")


def make_target(dtype=None, prompts=TEXTS, max_tokens=40, seed=1):
    model = text_llama(seed).to(dtype) if dtype else text_llama(seed)
    llm = LLM(model, tokenizer=byte_tokenizer(), strategy="eqspec")
    target = Target(llm, [list(llm.tokenize(text)[1]) for text in prompts], max_tokens)
    answer_alone(target, lambda: None)
    return target
