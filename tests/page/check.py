#!/usr/bin/env python3
"""Opens report pages in a real browser and fails on whatever they must not do.

    cargo run -p gpureap --example report_page -- target/pages
    tests/page/check.py target/pages/*.html --shots target/pages

A page fails when it says something on the console, breaks its own Content-Security-Policy, throws, opens a dialog, asks for
anything besides itself, runs a script at all, has elements of other kinds than the templates make, or is wider than its
window. With --shots it writes NAME-light.png, NAME-dark.png and NAME-print.pdf. Needs `pip install playwright` and a Chromium.
"""

import argparse
import pathlib
import shutil
import sys

from playwright.sync_api import sync_playwright

# Everything else must have come out of a name.
TAGS = set(
    "a article bdi body caption col colgroup dd defs details div dl dt footer g h1 h2 h3 h4 head header html li line main meta p path "
    "pattern rect section span style summary svg table tbody td text th thead time title tr tspan ul".split()
)

LOOK = """() => ({
    tags: [...new Set([...document.querySelectorAll('*')].map(e => e.localName))],
    handlers: [...document.querySelectorAll('*')].flatMap(e => [...e.attributes]
        .filter(a => a.name.startsWith('on') || a.name === 'style' || /^\\s*javascript:/i.test(a.value)).map(a => a.name)),
    links: [...document.querySelectorAll('[href], [src]')].map(e => e.getAttribute('href') ?? e.getAttribute('src'))
        .filter(link => !link.startsWith('#')),
    broken: [...document.querySelectorAll('a[href^="#"]')].map(e => e.getAttribute('href').slice(1))
        .filter(id => !document.getElementById(id)),
    twice: [...document.querySelectorAll('[id]')].map(e => e.id).filter((id, at, all) => all.indexOf(id) !== at),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    tips: [...document.querySelectorAll('.tip')].filter(e => getComputedStyle(e).visibility !== 'hidden').length,
})"""


def check(browser, path, shots):
    mistakes = []
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        url = path.resolve().as_uri()
        page.on("console", lambda message: mistakes.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: mistakes.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (mistakes.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url != url and mistakes.append(f"request: {request.url}"))
        page.goto(url)
        seen = page.evaluate(LOOK)
        mistakes += [f"unexpected element: {tag}" for tag in seen["tags"] if tag not in TAGS]
        mistakes += [f"unexpected attribute: {name}" for name in seen["handlers"]]
        mistakes += [f"link that leads elsewhere: {link}" for link in seen["links"]]
        mistakes += [f"link to nothing: {link}" for link in seen["broken"]]
        mistakes += [f"id twice: {name}" for name in seen["twice"]]
        if seen["wide"] > 0:
            mistakes.append(f"wider than the window by {seen['wide']} px")
        if seen["tips"]:
            mistakes.append(f"{seen['tips']} tips are shown unasked: does the style apply?")
        spot = page.locator(".timeline .spot a").first
        if spot.count():
            # Tips by pointer and by keyboard; a link opens the details that it leads to.
            target = spot.get_attribute("href")[1:]
            tip = page.locator(".timeline .spot:has(a) .tip").first
            for reach in (lambda: spot.locator("rect").hover(), spot.focus):
                reach()
                if tip.evaluate("e => getComputedStyle(e).visibility") != "visible":
                    mistakes.append("no tip where one was asked for")
                page.mouse.move(1, 1)
            spot.focus()
            page.keyboard.press("Enter")
            if not page.evaluate("id => document.getElementById(id).checkVisibility()", target):
                mistakes.append(f"the link to {target} shows nothing")
            page.goto(url)
        if shots:
            page.screenshot(path=shots / f"{path.stem}-{scheme}.png")
            page.screenshot(path=shots / f"{path.stem}-{scheme}-whole.png", full_page=True)
            if scheme == "light":
                page.pdf(path=shots / f"{path.stem}-print.pdf", prefer_css_page_size=True, print_background=True)
        context.close()
    return sorted(set(mistakes))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=pathlib.Path)
    parser.add_argument("--shots", type=pathlib.Path, help="write pictures into this directory")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser; without it playwright's own")
    arguments = parser.parse_args()
    failed = False
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        for path in arguments.pages:
            mistakes = check(browser, path, arguments.shots)
            failed |= bool(mistakes)
            print(f"{path.name}: {'ok' if not mistakes else ''}", *mistakes, sep="\n  " if mistakes else "")
        print(f"browser: {browser.version}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
