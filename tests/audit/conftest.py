import json

import pytest
from toy_folders import save_text_llama
from toy_target import TEXTS, make_target


@pytest.fixture(scope="session")
def target():
    """A float64 toy with its references."""
    return make_target()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The same model as users have it."""
    return save_text_llama(tmp_path_factory.mktemp("audited"), seed=1)


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path
