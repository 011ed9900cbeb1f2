from __future__ import annotations

import pytest

from tests.models import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)
