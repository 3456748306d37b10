"""The console in a real browser: accessible, free of errors, safe with hostile text, usable by keyboard and on a phone."""

import http.server
import threading
from contextlib import contextmanager

import pytest

from conformal_arbitrage.store import keys
from tests.console.filled import Visit, token_of
from tests.gateway.house import until

PAGES = {
    "sign in": "/console/sign-in",
    "overview": "/console",
    "policy": "/console/policies/broken",
    "decisions": "/console/decisions",
    "nothing found": "/console/decisions?who=fallback",
    "decision": "record",
    "team": "/console/team",
    "keys": "/console/keys",
    "health": "/console/health",
}
LOOKS = {
    "desk, light": (1280, False),
    "desk, dark": (1280, True),
    "phone, light": (390, False),
    "phone, dark": (390, True),
}
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]},
    "resultTypes": ["violations"],  # every rule is still run; of what passes, one example comes back instead of all
}
OPEN_DETAILS = "document.querySelectorAll('details').forEach(node => { node.open = true; })"


def violations(page, context=None):
    from axe_playwright_python.sync_playwright import Axe

    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    run = "([context, rules]) => axe.run(context ?? document, rules).then(results => results.violations)"
    found = page.evaluate(run, [context, RULES])
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


def sign_in(page, house):
    carry_cookies(Visit(house, house.keys["admin"]), page)
    page.goto(house.url + "/console")
    return page


def carry_cookies(visit, page):
    """Let a browser be signed in as someone is without one."""
    page.context.add_cookies([{"name": one.name, "value": one.value, "url": visit.house.url} for one in visit.cookies])


def path_of(house, name):
    return f"/console/decisions/{house.record}" if PAGES[name] == "record" else PAGES[name]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_accessible_fits_its_width_and_keeps_hostile_text_as_text(filled, open_page, name):
    page, loaded = open_page(), []
    page.on("request", lambda request: loaded.append(request.url))
    if name != "sign in":
        carry_cookies(Visit(filled, filled.keys["admin"]), page)
    page.goto(filled.url + path_of(filled, name))
    page.wait_for_load_state("load")
    page.evaluate(OPEN_DETAILS)
    for look, (width, dark) in LOOKS.items():
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if dark else "light")
        assert violations(page) == [], look
        assert page.evaluate("document.documentElement.scrollWidth") <= width, look
    assert "owned" not in page.title()
    assert page.evaluate("document.querySelectorAll('img, b, script:not([src])').length") == 0
    assert len(loaded) > 1
    assert [url for url in loaded if not url.startswith(f"{filled.url}/console")] == []


def test_signing_in_takes_a_key_and_enter(filled, open_page):
    page = open_page(filled.url + "/console/sign-in")
    page.keyboard.type(filled.keys["admin"])
    page.keyboard.press("Enter")
    page.wait_for_url(filled.url + "/console")


def test_a_page_that_is_not_accessible_would_fail_a_test(filled, open_page):
    page = open_page(filled.url + "/console/sign-in")
    page.evaluate(
        "() => { document.documentElement.removeAttribute('lang'); document.querySelector('label[for=key]').remove(); }"
    )
    assert {"html-has-lang", "label"} <= {rule for rule, _ in violations(page)}


def test_what_the_policy_forbids_is_not_loaded_and_would_fail_a_test(filled, open_page):
    page = sign_in(open_page(), filled)
    with other_site("") as port:
        page.evaluate(f"() => {{ new Image().src = 'http://127.0.0.1:{port}/x.png'; }}")
        page.wait_for_timeout(100)
        until(lambda: page.evaluate("1") and page.trouble)
    assert "Content Security Policy" in page.trouble[0]
    page.trouble.clear()


def test_dialogs_are_accessible_and_ask_again(filled, open_page):
    page = sign_in(open_page(), filled)
    page.goto(filled.url + "/console/policies/broken")
    page.get_by_role("button", name="Lift the alarm").click()
    assert page.locator("dialog[open]").count() == 1
    assert violations(page, "dialog[open]") == []
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    assert page.evaluate("document.activeElement.textContent").startswith("Lift")


def test_everything_is_reached_by_keyboard(filled, open_page):
    page = sign_in(open_page(), filled)
    page.goto(filled.url + "/console")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.tagName"))
    assert seen[0] == "Skip to the content"
    assert {"Overview", "Decisions", "Keys", "Health", "support", "broken", "As a table", "INPUT"} <= set(seen)


def test_the_cursor_of_a_chart_moves_by_arrows(filled, open_page):
    page = sign_in(open_page(), filled)
    cursor = page.locator("chart-cursor input").first
    output = page.locator("figure output").first
    last = output.text_content()
    cursor.focus()
    page.keyboard.press("Home")
    first = output.text_content()
    assert first != last
    assert "after 5 audits" in first
    assert cursor.get_attribute("aria-valuetext") == first
    page.keyboard.press("End")
    assert output.text_content() == last


def test_the_overview_looks_again_by_itself(house, open_page):
    gate = house(policy={"audit_rate": 1.0})
    for _ in range(8):
        gate.decide()
    page = open_page(gate.url + "/console")
    before = page.locator("figure output").first.text_content()
    gate.decide()
    page.wait_for_function("before => document.querySelector('figure output').textContent !== before", arg=before)


def test_without_scripts_everything_that_shows_works(filled, open_page):
    page = open_page(filled.url + "/console/sign-in", java_script_enabled=False)
    page.fill("#key", filled.keys["admin"])
    page.press("#key", "Enter")
    page.wait_for_url(filled.url + "/console")
    for name in PAGES:
        page.goto(filled.url + path_of(filled, name))
        assert page.locator("h1").count() == 1
    page.goto(filled.url + "/console")
    assert page.locator("figure svg.wide").first.is_visible()
    page.get_by_role("button", name="Sign out").click()
    assert page.url.endswith("/console/sign-in?why=left")


@contextmanager
def other_site(content):
    """Another server on this machine with one page; yield its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["another port", "another site"])
@pytest.mark.parametrize("token", [False, True], ids=["without a token", "with the token"])
def test_a_form_on_another_site_or_port_changes_nothing(filled, open_page, host, token):
    page = sign_in(open_page(), filled)
    csrf = page.locator("input[name=csrf]").first.get_attribute("value") if token else ""
    before = len(filled.with_store(lambda store: store.run(keys.list_all)))
    form = (
        f'<title>elsewhere</title><form id="f" method="post" action="{filled.url}/console/keys">'
        f'<input name="csrf" value="{csrf}"><input name="label" value="evil"><input name="scope" value="admin"></form>'
    )
    with other_site(form) as port:
        page.goto(f"http://{host}:{port}/")
        page.evaluate("document.getElementById('f').submit()")
        page.wait_for_url("**/console/**")
    page.trouble.clear()  # the browser reports the refusal
    assert len(filled.with_store(lambda store: store.run(keys.list_all))) == before


def test_colours_of_the_system_are_respected(filled, open_page):
    page = sign_in(open_page(forced_colors="active"), filled)
    assert page.locator(".badge").first.is_visible()
    assert violations(page) == []


def test_a_sign_in_on_another_port_of_the_host_is_no_sign_in_here(filled, house, open_page):
    page = sign_in(open_page(), filled)
    other = house()
    other.key("admin")
    page.goto(other.url + "/console")
    assert "/console/sign-in" in page.url
    assert token_of(Visit(other).open("/console/sign-in").text)
