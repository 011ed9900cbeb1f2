"""Images in the playground."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys

import pytest
from PIL import Image

from tests.browser.real_server import real_server
from tests.vision_models import make_vision_chat_model

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; `make test-browser` installs it"
).expect
SLOW_MS = 30_000
GIVE = """([file, how]) => {
    const bytes = Uint8Array.from(atob(file), (c) => c.charCodeAt(0)), transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "image.png", { type: "image/png" }));
    const event = how === "paste" ? new ClipboardEvent(how, { clipboardData: transfer, bubbles: true })
        : new DragEvent(how, { dataTransfer: transfer, bubbles: true });
    document.querySelector(".composer textarea").dispatchEvent(event);
}"""


def png(width: int, height: int, color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def give(page, file: bytes, how: str) -> None:
    """Paste or drop a file."""
    page.evaluate(GIVE, [base64.b64encode(file).decode(), how])


def choose(page, *files: tuple[str, bytes]) -> None:
    """Add files by the button."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add images").click()
    chooser.value.set_files([{"name": name, "mimeType": "image/png", "buffer": file} for name, file in files])


def test_images_that_are_chosen_pasted_and_dropped_are_asked_about_and_the_code_asks_the_same(page, tmp_path):
    with real_server(make_vision_chat_model(tmp_path / "model")) as url:
        page.goto(url)
        pending = page.locator(".composer .thumbnails img")
        choose(page, ("red.png", png(20, 12, "red")), ("blue.png", png(16, 16, "blue")))
        expect(pending).to_have_count(2)
        give(page, png(8, 8, "green"), "paste")
        give(page, png(12, 20, "white"), "drop")
        expect(pending).to_have_count(4)
        page.get_by_role("button", name="Remove image 3").focus()
        page.keyboard.press("Enter")
        expect(pending).to_have_count(3)
        expect(page.get_by_role("button", name="Remove image 3")).to_be_focused()

        page.get_by_text("Settings").first.click()
        page.get_by_label("temperature").first.fill("0")
        page.get_by_label("max tokens").first.fill("6")
        page.get_by_role("textbox", name="Message", exact=True).fill("What is it?")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(1, timeout=SLOW_MS)
        answer = page.locator(".turn.assistant .text").text_content()
        assert answer
        expect(page.locator(".turn.user img")).to_have_count(3)
        expect(pending).to_have_count(0)

        page.get_by_role("button", name="Code").click()
        for link in page.locator(".files a").all():
            with page.expect_download() as download:
                link.click()
            download.value.save_as(tmp_path / download.value.suggested_filename)
        assert sorted(path.name for path in tmp_path.glob("image-*")) == [f"image-{i}.png" for i in (1, 2, 3)]
        curl, python = page.locator(".snippet pre").all_inner_texts()
        by_curl, by_python = (
            subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=True, text=True).stdout
            for command in (["bash", "-c", curl], [sys.executable, "-c", python])
        )
        events = [json.loads(line[6:]) for line in by_curl.splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        assert said == by_python == answer
        page.close()


def test_a_large_image_is_made_smaller_and_what_is_no_image_is_refused_by_name(page, tmp_path):
    with real_server(make_vision_chat_model(tmp_path)) as url:
        page.goto(url)
        choose(page, ("broken.png", b"no image"), ("wide.png", png(4096, 10, "red")))
        expect(page.get_by_role("alert").filter(has_text="broken.png is no image")).to_be_visible()
        expect(page.get_by_alt_text("Image 1")).to_be_visible()
        assert page.get_by_alt_text("Image 1").evaluate("(image) => [image.naturalWidth, image.naturalHeight]") == [
            2048,
            5,
        ]
        page.close()


def test_a_model_that_reads_text_only_is_given_no_images(stage, page):
    page.goto(stage.url)
    expect(page.get_by_label("Model").first.locator("option")).to_have_count(1, timeout=SLOW_MS)
    expect(page.get_by_role("button", name="Add images")).to_be_hidden()
    give(page, png(8, 8, "red"), "paste")
    expect(page.get_by_role("alert").filter(has_text="This model reads no images.")).to_be_visible()
    expect(page.locator("main img")).to_have_count(0)
