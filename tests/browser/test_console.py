"""What somebody sees who opens the console."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import httpx
import pytest

from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from engine.wire.part_record import encoded
from engine.wire.parts.costs import CostStats, SequenceCost
from engine.wire.parts.experts import ExpertReport, ExpertStats
from engine.wire.parts.handoffs import HandoffTotals
from engine.wire.parts.holds import HoldStats
from engine.wire.parts.stages import StageReport, StageStats
from engine.wire.stats.handoff_stats import HandoffInfo
from tests.browser.staged_cluster import PREFILL, staged_cluster

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; `make test-browser` installs it"
).expect
SLOW_MS = 30_000  # a busy machine; what is awaited comes within two looks at the cluster
MARKUP = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


def ask(page, text="What is an ocean?"):
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def test_an_answer_streams_into_the_page_and_can_be_stopped(stage, page):
    page.goto(stage.url)
    ask(page)
    answer = page.locator(".turn.assistant .text")
    expect(answer).to_contain_text("An ocean", timeout=SLOW_MS)
    assert not answer.inner_text().endswith("water. "), "it came as a whole"
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn.assistant .about")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_enter_while_an_answer_streams_neither_stops_it_nor_sends_and_escape_stops_it(stage, page):
    page.goto(stage.url)
    ask(page)
    expect(page.locator(".turn.assistant .text")).to_contain_text("An ocean", timeout=SLOW_MS)
    page.keyboard.type("And a lake?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_have_value("And a lake?")
    expect(page.locator(".turn.user")).to_have_count(1)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".turn.assistant .about")).to_contain_text("stopped")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user")).to_have_count(2)


def test_a_new_conversation_has_nothing_of_an_answer_that_was_cut_off(stage, page):
    page.goto(stage.url)
    ask(page)
    expect(page.locator(".turn.assistant .text")).to_contain_text("An ocean", timeout=SLOW_MS)
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=SLOW_MS)
    page.get_by_role("button", name="Code").first.click()
    code = page.get_by_role("dialog", name="The same request as code")
    expect(code).to_contain_text('"role": "user"')
    expect(code).not_to_contain_text("assistant")


def test_two_settings_answer_side_by_side_and_their_code_can_be_copied(stage, page):
    stage.pool.token_s = 0.0
    page.goto(stage.url)
    page.get_by_role("button", name="Side by side").click()
    right = page.locator(".pane").nth(1)
    right.get_by_text("Settings").click()
    right.get_by_label("max tokens").fill("4")
    ask(page)
    expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(2, timeout=SLOW_MS)
    left_text, right_text = page.locator(".turn.assistant .text").all_inner_texts()
    assert left_text.startswith(right_text)
    assert len(right_text) < len(left_text)
    right.get_by_role("button", name="Code").click()
    code = page.get_by_role("dialog", name="The same request as code")
    expect(code).to_contain_text('"max_tokens": 4')
    expect(code).to_contain_text("max_tokens=4,")
    code.get_by_role("button", name="Copy").first.click()
    expect(code.get_by_text("Copied")).to_be_visible()


def test_the_code_sends_the_same_request_when_it_is_run(page):
    with staged_cluster(auth=AuthConfig(api_keys=(f"alice:{hash_key('sk-a')}",))) as stage:
        stage.pool.token_s = 0.0
        page.goto(stage.url)
        page.get_by_role("dialog", name="API key").get_by_label("Key").fill("sk-a")
        page.keyboard.press("Enter")
        pane = page.locator(".pane").first
        pane.get_by_text("Settings").click()
        for example in ("Example tool", "Example schema"):
            pane.get_by_role("button", name=example).click()
        pane.get_by_label("tool choice").select_option("none")
        pane.get_by_label("max tokens").fill("4")
        ask(page, """It's "50 %" of $HOME, `ls` and \\n, é 🌊""")
        expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(1, timeout=SLOW_MS)
        pane.get_by_role("button", name="Code").click()
        curl, python = page.locator(".snippet pre").all_inner_texts()
        environment = {**os.environ, "MANTA_API_KEY": "sk-a"}
        for command in (["bash", "-c", curl], [sys.executable, "-c", python]):
            subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
        sent, by_curl, by_python = stage.pool.prompts
        assert by_curl == by_python == sent
        page.close()


def test_a_token_shows_how_probable_it_was_and_what_else_it_might_have_been(stage, page):
    stage.pool.token_s = 0.0
    page.goto(stage.url)
    page.get_by_text("Settings").first.click()
    page.get_by_text("Show how probable each token was").first.click()
    ask(page)
    page.locator(".token").first.hover()
    expect(page.locator(".alternatives li")).to_have_count(2, timeout=SLOW_MS)
    expect(page.locator(".alternatives .chosen")).to_contain_text("60.7 %")


def test_a_schema_that_is_no_json_is_refused_before_anything_is_sent(stage, page):
    page.goto(stage.url)
    page.get_by_text("Settings").first.click()
    page.get_by_label("JSON schema").first.fill("{")
    ask(page)
    expect(page.locator(".turn .problem")).to_contain_text("JSON schema: ")
    assert not stage.pool.running


def test_a_killed_replica_is_a_death_and_a_replay_while_the_text_goes_on(stage, page):
    stage.pool.token_s = 0.1
    page.goto(f"{stage.url}#cluster")
    expect(page.locator(".replica")).to_have_count(3, timeout=SLOW_MS)
    page.goto(f"{stage.url}#playground")
    ask(page)
    expect(page.locator(".turn.assistant .text")).to_contain_text("An", timeout=SLOW_MS)
    stage.pool.decode.remove("decode-m-a1")
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator(".events .replay")).to_contain_text("continues in another replica", timeout=SLOW_MS)
    expect(page.locator(".events .gone")).to_contain_text("decode-m-a1", timeout=SLOW_MS)
    page.get_by_role("link", name="Playground").click()
    expect(page.locator(".turn.assistant:not(.streaming) .text")).to_have_text(stage.pool.text, timeout=SLOW_MS)
    page.get_by_role("link", name="what happened").click()
    expect(page.locator(".story")).to_contain_text("another follows: engine_unavailable")
    expect(page.locator(".phase.decode")).to_be_visible()


def test_a_handoff_is_an_arrow_from_prefill_to_decode(stage, page):
    stage.pool.handoffs = [
        HandoffInfo(handoff_id="h", request_id="r", role="decode", peer=PREFILL, state="receiving", age_s=0.1,
                    deadline_s=9.0, num_bytes=2**20)
    ]  # fmt: skip
    page.goto(f"{stage.url}#cluster")
    expect(page.locator(".handoff.active")).to_have_count(1, timeout=SLOW_MS)
    expect(page.locator(".handoff")).to_have_count(2)
    expect(page.locator(".arrows")).to_contain_text("1 under way, 1 MiB")
    stage.pool.handoffs = []
    expect(page.locator(".handoff.active")).to_have_count(0, timeout=SLOW_MS)
    stage.pool.received = 3
    expect(page.locator(".arrows")).to_contain_text("3 handed over", timeout=SLOW_MS)


def test_a_replica_shows_its_holds_and_what_has_moved(stage, page):
    page.goto(f"{stage.url}#cluster")
    first = page.locator(".replica").filter(has=page.locator(".id", has_text="a1"))
    expect(first.locator('[data-fact="holds"]')).to_have_text("–", timeout=SLOW_MS)
    expect(first.locator('[data-fact="moved"]')).to_have_text("–")
    moves = {"received": 3, "failed": 1, "released": 5, "expired": 2}
    stage.pool.more_stats = {
        "parts": encoded(HoldStats(holds=2, blocks=30, device_blocks=10), HandoffTotals(moves=moves))
    }
    expect(first.locator('[data-fact="holds"]')).to_have_text("2 of 30 blocks", timeout=SLOW_MS)
    expect(first.locator('[data-fact="moved"]')).to_have_text("4, 7")
    assert "10 of them here" in first.locator(".blocks").get_attribute("title")


def test_a_replica_shows_its_pipeline_stages_with_their_ranks_and_how_much_each_computes(stage, page):
    page.goto(f"{stage.url}#cluster")
    first = page.locator(".replica").filter(has=page.locator(".id", has_text="a1"))
    expect(first.locator(".stages")).to_be_hidden(timeout=SLOW_MS)
    stages = [
        StageStats(layers=20, ranks=2, busy_s=6.0, wait_s=2.0),
        StageStats(layers=1, ranks=2, busy_s=2.0, wait_s=6.0),
    ]
    stage.pool.more_stats = {"parts": encoded(StageReport(stages))}
    expect(first.locator(".stages > li")).to_have_count(2, timeout=SLOW_MS)
    expect(first.locator(".stages > li").nth(0)).to_contain_text("stage 0: 20 layers")
    expect(first.locator(".stages > li").nth(0).locator(".ranks i")).to_have_count(2)
    expect(first.locator('.stages [data-fact="busy"]')).to_have_text(["computes 75 %", "computes 25 %"])


def test_a_replica_shows_how_its_experts_are_balanced_over_its_ranks(stage, page):
    page.goto(f"{stage.url}#cluster")
    first = page.locator(".replica").filter(has=page.locator(".id", has_text="a1"))
    expect(first.locator(".experts")).to_be_hidden(timeout=SLOW_MS)
    experts = ExpertStats(stage=0, rank_tokens=[40, 10], balancedness=0.625, top=[(3, 7, 0.5)], moved=12)
    stage.pool.more_stats = {"parts": encoded(ExpertReport([experts]))}
    expect(first.locator(".experts .ranks i")).to_have_count(2, timeout=SLOW_MS)
    expect(first.locator('.experts [data-fact="balanced"]')).to_have_text("balanced 62.5 %, 12 moved")
    expect(first.locator(".experts b").nth(1)).to_have_attribute("style", "width: 25%;")
    assert "layer 3, expert 7: 50 %" in first.locator(".experts > li").get_attribute("title")


def test_an_encode_pool_stands_above_the_others(stage, page):
    page.goto(f"{stage.url}#cluster")
    expect(page.locator('[data-role="prefill"] h2')).to_have_text("Prefill: 1 replica", timeout=SLOW_MS)
    expect(page.locator('[data-role="encode"]')).to_be_hidden()
    stage.pool.encode = ["encode-m-e1"]
    expect(page.locator('[data-role="encode"] h2')).to_have_text("Encode: 1 replica", timeout=SLOW_MS)
    tops = [page.locator(f'[data-role="{role}"]').bounding_box()["y"] for role in ("encode", "prefill", "decode")]
    assert tops[0] < tops[1] == tops[2]


def test_costs_are_shown_by_key_model_and_hour_with_what_was_wasted_and_what_the_cache_has_saved(page):
    with staged_cluster(auth=AuthConfig(api_keys=(f"alice:{hash_key('sk-a')}",), admin_keys=("alice",))) as stage:
        stage.pool.token_s, stage.pool.cost = 0.0, SequenceCost(1.5, 0.5, 2.0)
        spent = {"requests": 6.0, "preemption": 1.0, "replay": 0.5, "handoff": 0.5, "overhead": 1.0, "idle": 1.0}
        stage.pool.more_stats = {"parts": encoded(CostStats(spent))}
        page.goto(stage.url)
        page.get_by_role("dialog", name="API key").get_by_label("Key").fill("sk-a")
        page.keyboard.press("Enter")
        ask(page)
        expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(1, timeout=SLOW_MS)
        page.get_by_role("link", name="Costs").click()
        costs = page.locator(".costs")
        expect(costs.get_by_role("heading", name="By key")).to_be_visible(timeout=SLOW_MS)
        expect(costs.locator("tr", has_text="alice")).to_contain_text("1.5 s")
        expect(costs.locator("tr", has_text="pocket")).to_contain_text("500 ms")
        expect(costs.locator("tr", has_text="without an adapter")).to_contain_text("1.5 s")
        for title, share in (("Wasted by Manta", "20 %"), ("Overhead", "10 %"), ("Idle", "10 %")):
            expect(costs.locator(".figure", has_text=title)).to_contain_text(share)
        expect(costs.locator(".figure", has_text="Saved by the prefix cache")).to_contain_text("≈")
        bar = costs.get_by_role("img").last
        expect(bar).to_have_attribute("aria-label", re.compile("preemption 1 s, replay 500 ms, handoff 500 ms"))
        page.close()


def test_the_link_to_the_content_stays_in_the_view(stage, page):
    page.goto(f"{stage.url}#models")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    expect(page).to_have_url(f"{stage.url}#models")


def test_all_of_it_works_with_the_keyboard_alone(stage, page):
    stage.pool.token_s = 0.0
    page.goto(stage.url)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Playground")).to_be_focused()
    page.get_by_role("textbox", name="Message", exact=True).focus()
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(1, timeout=SLOW_MS)
    page.keyboard.press("Alt+3")
    request = page.locator(".requests a")
    expect(request).to_have_count(1, timeout=SLOW_MS)
    request.focus()
    page.wait_for_timeout(2500)  # a look at the cluster later
    expect(request).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".story tbody tr").first).to_contain_text("the request came")


def test_a_session_is_shown_as_a_line_of_its_turns(stage, page):
    stage.pool.token_s = 0.0
    body = {"prompt": "a", "max_tokens": 3, "session_id": MARKUP[:12]}
    for _ in range(2):
        httpx.post(f"{stage.url.rstrip('/')}/v1/completions", json=body, timeout=60).raise_for_status()
    page.goto(f"{stage.url}#sessions")
    page.get_by_role("link", name=MARKUP[:12]).click()
    expect(page.locator(".turns i")).to_have_count(2, timeout=SLOW_MS)
    expect(page.locator(".sessions tbody tr")).to_have_count(2)


@pytest.mark.parametrize("view", ["playground", "cluster", "requests", "sessions", "costs", "models", "configuration"])
def test_nothing_is_wider_than_a_phone(stage, page, view):
    page.set_viewport_size({"width": 360, "height": 740})
    stage.pool.token_s = 0.0
    page.goto(stage.url)
    ask(page, "a" * 200)
    expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(1, timeout=SLOW_MS)
    page.goto(f"{stage.url}#{view}")
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_key_is_asked_for_and_kept_for_the_session_only(page, browser):
    with staged_cluster(auth=AuthConfig(api_keys=(f"alice:{hash_key('sk-a')}",))) as stage:
        page.goto(stage.url)
        asked = page.get_by_role("dialog", name="API key")
        expect(asked).to_be_visible(timeout=SLOW_MS)
        for key in ("wrong", "sk-a"):
            asked.get_by_label("Key").fill(key)
            page.keyboard.press("Enter")
            if key == "wrong":
                expect(asked.get_by_role("alert")).not_to_be_empty(timeout=SLOW_MS)
        expect(page.locator("#pulse.live")).to_be_visible(timeout=SLOW_MS)
        page.goto(f"{stage.url}#configuration")
        expect(page.get_by_text("Only keys of ingress.admin_keys see the configuration.")).to_be_visible(
            timeout=SLOW_MS
        )
        assert "sk-a" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        forget = page.get_by_role("button", name="Forget key")
        expect(forget).to_be_visible(timeout=SLOW_MS)
        page.reload()
        expect(page.locator("#pulse.live")).to_be_visible(timeout=SLOW_MS)  # the same tab
        other = browser.new_context().new_page()
        other.goto(stage.url)
        expect(other.get_by_role("dialog", name="API key")).to_be_visible(timeout=SLOW_MS)
        other.context.close()
        forget.click()
        expect(asked).to_be_visible(timeout=SLOW_MS)
        expect(forget).to_be_hidden()
        page.close()


def test_markup_in_names_prompts_and_answers_is_shown_as_text(page):
    with staged_cluster(name=MARKUP) as stage:
        stage.pool.token_s, stage.pool.text = 0.0, f"{MARKUP} **said the model**"
        page.goto(stage.url)
        page.get_by_text("Settings").first.click()
        page.get_by_label("System message").first.fill(MARKUP)
        ask(page, MARKUP)
        expect(page.locator(".turn.assistant:not(.streaming) .text")).to_have_text(stage.pool.text, timeout=SLOW_MS)
        expect(page.locator(".turn.user .text")).to_have_text(MARKUP)
        for view, place in (("cluster", "h1"), ("requests", "td"), ("models", "h2"), ("configuration", "code")):
            page.goto(f"{stage.url}#{view}")
            expect(page.locator(place, has_text="onerror").first).to_be_visible(timeout=SLOW_MS)
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Manta · configuration"
        page.close()


def test_markup_in_tool_calls_and_in_what_tools_return_is_shown_as_text(stage, page):
    arguments = json.dumps({"word": MARKUP})
    call = {"index": 0, "id": "call-1", "function": {"name": MARKUP, "arguments": arguments}}
    chunk = {"id": "r", "choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    answer = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=answer, content_type="text/event-stream"))
    page.goto(stage.url)
    ask(page)
    expect(page.locator(".call pre")).to_have_text(arguments, timeout=SLOW_MS)
    expect(page.locator(".call h3")).to_have_text(MARKUP)
    page.get_by_label(f"What {MARKUP} returns").fill(MARKUP)
    page.get_by_role("button", name="Send result").click()
    expect(page.locator(".turn.tool .text")).to_have_text(MARKUP)
    expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(2, timeout=SLOW_MS)
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "Manta · playground"


def test_markup_in_names_of_keys_and_in_errors_is_shown_as_text(page):
    name = "<img/src=x/onerror=document.title='owned'>"  # names of keys have no blanks
    auth = AuthConfig(api_keys=(f"{name}:{hash_key('sk-a')}",), admin_keys=(name,))
    with staged_cluster(auth=auth) as stage:
        stage.pool.token_s, stage.pool.cost = 0.0, SequenceCost(1.5, 0.5, 2.0)
        page.goto(stage.url)
        page.get_by_role("dialog", name="API key").get_by_label("Key").fill("sk-a")
        page.keyboard.press("Enter")
        ask(page)
        expect(page.locator(".turn.assistant:not(.streaming)")).to_have_count(1, timeout=SLOW_MS)
        page.goto(f"{stage.url}#costs")
        expect(page.locator(".costs tr", has_text=name)).to_contain_text("1.5 s", timeout=SLOW_MS)
        error = json.dumps({"error": {"message": MARKUP, "type": MARKUP, "param": None, "code": MARKUP}})
        page.route("**/console/facts", lambda route: route.fulfill(body=error, content_type="application/json"))
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {error}\n\n", status=200))
        page.goto(f"{stage.url}#playground")
        ask(page)
        expect(page.get_by_text("onerror").first).to_be_visible(timeout=SLOW_MS)
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Manta · playground"
        page.close()


def test_the_browser_itself_refuses_markup_made_of_text_and_what_other_hosts_have(stage, browser):
    tab = browser.new_context().new_page()
    tab.goto(stage.url)
    assert tab.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'taken' } catch (e) { e.name }") == "TypeError"
    assert tab.evaluate("fetch('http://127.0.0.2:9/').then(() => 'sent', (e) => e.name)") == "TypeError"
    refused = "new Promise((done) => { addEventListener('securitypolicyviolation', (e) => done(e.effectiveDirective));"
    image = "document.body.append(new Image()); document.body.lastChild.src = 'http://127.0.0.2:9/'; })"
    assert tab.evaluate(refused + image) == "img-src"
    tab.context.close()
