from __future__ import annotations

import pytest

from benchmarks import images
from engine.model.config import ModelConfig
from tests.vision_models import make_vision_chat_model


@pytest.mark.slow
def test_later_questions_find_what_the_first_one_about_an_image_has_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(images, "SETTLE_S", 0)
    folder = make_vision_chat_model(tmp_path)
    report = images.measure(str(folder), images=1, side=64, output_len=2, dtype="float32", num_threads=1)
    assert [row.count for row in report.rows] == [1, 9, 3, 3, 3] and report.image_tokens == 64
    first, later, *others = [row.cached_tokens for row in report.rows]
    assert later > 0 == first and not any(others)
    assert all(row.first_ms > row.before_ms > 0 < row.token_ms for row in report.rows)
    images.show_report(report)
    assert "each image was encoded once, for 13 questions" in capsys.readouterr().out


def test_the_folder_of_random_weights_is_that_of_a_model_that_sees(tmp_path):
    images.make_model(tmp_path)
    vision = ModelConfig.from_folder(tmp_path).vision
    assert vision is not None and vision.image_token_id == 256 + images.SPECIAL.index("<|image_pad|>")
