"""The dashboard in a real browser, before a real gateway whose policy changes while it plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from tests.integration.browser import CHROMIUM, DRIVER, Browser, browsing
from tests.integration.dashboard_scene import Stage, staged
from tests.integration.storyteller import chat

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="chromium or chromedriver is not installed: make system-packages",
)

TOKEN = "a-token-for-the-page"
MARKUP = "<script>window.broken = true</script><img src=x onerror='window.broken = true'>"
LONG = 32_768
NUM_STEPS = 6
"""Enough that rollouts which met a publication were trained on."""
MARKED = "visitor"
"""A consumer beside the trainer."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Some steps trained, one group of hostile text, and some that nobody has waited for."""
    folder = tmp_path_factory.mktemp("dashboard")
    with staged(folder, num_servers=2, token_latency_s=0.01, token=TOKEN) as stage:
        stage.attach(max_staleness=2)
        stage.submit(4 * NUM_STEPS + 8)
        for _ in range(NUM_STEPS):
            stage.train()
        hostile = stage.request("hostile", chat(MARKUP, "hostile", 1, answer="4"))
        stage.client.rollout([hostile.model_copy(update={"consumer": MARKED})], 60.0)
        yield stage


@pytest.fixture(scope="module")
def browser(stage: Stage) -> Iterator[Browser]:
    """On the overview, with the token given."""
    with browsing() as browser:
        browser.driver.get(f"{stage.url}/ui")
        give_token(browser, TOKEN)
        browser.find(".readouts")
        yield browser


def give_token(browser: Browser, token: str) -> None:
    browser.find("dialog input").send_keys(token + Keys.ENTER)


def go(browser: Browser, stage: Stage, place: str) -> None:
    browser.driver.get(f"{stage.url}/ui#/{place}")


def mixed_rollout(stage: Stage) -> str:
    """A consumed rollout whose first sample was sampled by several versions."""
    for number in range(stage.submitted):
        view = stage.client.get(f"train-{number:05d}")
        if view.summary.state != "consumed" or view.group is None:
            continue
        if len(set(view.group.trajectories[0].versions) - {-1}) > 1:
            return view.summary.rollout_id
    pytest.fail("no trajectory met a publication")


def test_the_token_is_asked_for_until_it_is_right_and_kept_by_the_tab_only(stage: Stage) -> None:
    with browsing() as browser:
        browser.driver.get(f"{stage.url}/ui")
        give_token(browser, "a-wrong-one")
        browser.find("#ask-why", "wrong token")
        give_token(browser, TOKEN)
        browser.find("#pulse", "live")
        browser.gone("dialog")
        kept = browser.driver.execute_script(
            "return [sessionStorage.length, localStorage.length, document.cookie, location.href]"
        )
        assert kept == [1, 0, "", f"{stage.url}/ui"]
        assert browser.errors() == []


def test_the_overview_shows_fleet_versions_counts_and_curves(
    browser: Browser, stage: Stage
) -> None:
    go(browser, stage, "")
    browser.find(".fleet tbody tr .state", "ready")
    assert len(browser.all(".fleet tbody tr")) == 2
    versions = browser.all(".fleet .version")
    assert {one.get_attribute("data-version") for one in versions} == {str(stage.version)}
    browser.find(".readout .value", f"v{stage.version}")
    browser.find(".readout .value", "2 / 2")
    consumed = f"consumed{stage.group_size * stage.batch * NUM_STEPS}"
    assert consumed in " ".join(browser.text(".states tr"))
    browser.find(".chart output", "mean ")  # of the staleness
    assert {one.get_attribute("role") for one in browser.all(".chart svg")} == {"img"}
    assert browser.all(".chart path.reward")
    assert browser.errors() == []


def test_what_is_lost_idle_or_failed_is_told_as_such(browser: Browser, stage: Stage) -> None:
    go(browser, stage, "rollouts")
    browser.find(".listing tbody tr")
    shown = browser.driver.execute_async_script(
        """
        const [done] = arguments;
        (async () => {
          const { overview } = await import("/ui/overview.js");
          const real = window.fetch;
          window.fetch = async (url, options) => {
            const answer = await real(url, options);
            const told = await answer.json();
            if (told.status) {
              const [alive, lost] = told.status.servers;
              Object.assign(lost, { state: "lost", running: 64, max_running: 128 });
              const point = told.history.at(-1);
              const at = (i) => point.at - 2 * (80 - i);
              told.history = Array.from({ length: 80 }, (_, i) => {
                const busy = i < 20 || i >= 60;
                const rewards = { num_rewards: busy ? 1 : 0, mean_reward: busy ? 0.5 : null };
                return { ...point, at: at(i), ...rewards };
              });
            } else if (String(url).includes("state=failed")) {
              told.rollouts = [0, 1].map((i) => ({ rollout_id: `f${i}`, reason: `why ${i}` }));
            }
            return { ok: true, json: async () => told };
          };
          const view = overview();
          document.getElementById("page").append(view.element);
          await view.refresh();
          window.fetch = real;
          const all = (selector) => [...view.element.querySelectorAll(selector)];
          const text = (selector) => all(selector).map((one) => one.textContent);
          const found = {
            readouts: text(".readout"),
            lost: text(".fleet tr:has(.is-lost) td.number"),
            line: view.element.querySelector("path.line.reward").getAttribute("d"),
            failures: text(".failures li"),
          };
          view.element.remove();
          done(found);
        })().catch((error) => done({ error: String(error) }));
        """
    )
    assert "error" not in shown, shown
    (servers,) = (one for one in shown["readouts"] if one.startswith("Servers ready"))
    assert servers.startswith("Servers ready1 / 11 lost")
    assert set(shown["lost"]) == {"\u2013"}
    assert shown["line"].count("M") == 2
    assert shown["failures"] == ["f0 why 0", "f1 why 1"]
    assert browser.errors() == []


def test_the_list_is_filtered_by_state_and_consumer(browser: Browser, stage: Stage) -> None:
    go(browser, stage, "rollouts")
    browser.find("tbody tr", "train-00000")
    browser.find("select option[value=consumed]").click()
    browser.gone("tbody .is-ready")
    browser.find("tbody .is-consumed")
    states = set(browser.text("tbody .state"))
    assert states == {"consumed"}
    go(browser, stage, f"rollouts?consumer={MARKED}")
    browser.find("tbody tr", "hostile")
    assert len(browser.all("tbody tr")) == 1
    assert browser.errors() == []


def test_a_rollout_is_clicked_and_its_tokens_tell_version_and_likelihood(
    browser: Browser, stage: Stage
) -> None:
    name = mixed_rollout(stage)
    go(browser, stage, "rollouts?state=consumed")
    browser.find("tbody a", name).click()
    browser.find(".title h2", name)
    group = stage.client.get(name).group
    assert group is not None
    row = group.trajectories[0]
    sampled = sorted({version for version in row.versions if version >= 0})
    legend = [one.get_attribute("data-version") for one in browser.all(".legend .version")]
    assert legend == [str(version) for version in sampled]
    tokens = browser.all(".tokens [data-version]")
    assert {one.get_attribute("data-version") for one in tokens} == set(legend)
    colours = {one.value_of_css_property("background-color") for one in tokens}
    assert len(colours) == len(sampled)
    assert "".join(browser.text(".tokens .text")) == "".join(row.tokens or [])

    browser.find(".choice span", "logprob").click()
    browser.find(".ramp")
    assert not browser.all(".tokens [data-version]")
    assert len({one.get_attribute("data-surprise") for one in browser.all(".tokens .token")}) > 2
    assert "".join(browser.text(".tokens .text")) == "".join(row.tokens or [])
    assert browser.errors() == []


def test_the_story_tells_turns_calls_siblings_events_and_the_step(
    browser: Browser, stage: Stage
) -> None:
    name = mixed_rollout(stage)
    go(browser, stage, f"rollouts/{name}")
    browser.find(".segment header", "turn 1")
    assert "calculator" in browser.find(".segment .notes").text
    assert [one.text for one in browser.all(".segment.given header b")] == ["prompt", "given"]
    assert len(browser.all(".sibling")) == stage.group_size
    assert browser.text(".events b") == ["submit", "lease", "complete", "deliver", "consume"]
    view = stage.client.get(name).summary
    facts = browser.find(".facts").text
    assert f"step {view.step} of trainer" in facts
    assert f"{view.staleness} at delivery" in facts


def test_it_is_used_by_keyboard(browser: Browser, stage: Stage) -> None:
    go(browser, stage, "")
    go(browser, stage, f"rollouts/{mixed_rollout(stage)}")
    region = browser.find(".tokens")
    region.send_keys(Keys.ARROW_RIGHT)
    browser.find(".inspector", "#0")
    region.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert "#1" in browser.find(".inspector").text
    assert "given, not sampled" in browser.find(".inspector").text
    region.send_keys("]")
    assert browser.find(".sibling[aria-pressed=true]").text.startswith("sample 1")
    browser.find("body").send_keys("l")
    browser.find(".ramp")
    browser.find("body").send_keys("v")
    browser.find(".tokens [data-version]")
    assert browser.errors() == []


def test_markup_in_prompts_and_answers_is_text(browser: Browser, stage: Stage) -> None:
    go(browser, stage, "rollouts/hostile")
    browser.find(".segment.given .text", MARKUP)
    browser.find(".segment.sampled .text", f"You asked: {MARKUP}")
    assert browser.driver.execute_script("return window.broken") is None
    assert not browser.all("main script, main img")
    assert browser.errors() == []


def test_what_does_not_exist_is_said_so(browser: Browser, stage: Stage) -> None:
    go(browser, stage, "rollouts/never-submitted")
    browser.find(".empty", "no rollout 'never-submitted' in the ledger")
    browser.errors()  # the browser tells of the 404 itself
    go(browser, stage, "")
    browser.find(".readouts")


def test_a_long_trajectory_is_few_elements(browser: Browser) -> None:
    shown = browser.driver.execute_async_script(
        """
        const [size, done] = arguments;
        (async () => {
          const { transcript } = await import("/ui/transcript.js");
          const all = (read) => Array.from({ length: size }, (_, i) => read(i));
          const view = transcript();
          document.getElementById("page").append(view.element);
          view.element.hidden = false;
          const row = {
            input_ids: all((i) => i), loss_mask: all((i) => i > 99), turns: [],
            tokens: all((i) => `w${i} `), logprobs: all((i) => (i % 7) / -2),
            versions: all((i) => (i > 99 ? Math.floor(i / 8192) : -1)),
          };
          view.show(row);
          const text = view.element.querySelector(".tokens");
          const spans = text.querySelectorAll("span").length;
          text.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
          const length = text.innerText.length;
          const said = view.element.querySelector(".inspector").textContent;
          view.element.remove();
          done({ spans, length, said });
        })().catch((error) => done({ error: String(error) }));
        """,
        LONG,
    )
    assert "error" not in shown, shown
    assert shown["spans"] < 12
    assert shown["length"] > 6 * LONG
    assert "#0" in shown["said"]
    assert browser.errors() == []
